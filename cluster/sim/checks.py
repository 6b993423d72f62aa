"""What has to hold at every moment of a simulation, read from the head's records and from the fakes' truth.

`SimAgent` itself refuses a device that is in use and a worker that runs; readers of streams check tokens. Here is what
only the whole shows. A breach is an AssertionError that names the values.
"""

from __future__ import annotations

from collections.abc import Iterable

from cluster.control import ControlPlane
from cluster.records import ReplicaState
from cluster.sim.agent import SimAgent

SERVING = (ReplicaState.READY, ReplicaState.DRAINING)


def check_records(control: ControlPlane) -> None:
    """One owner a device; routes are those of serving replicas; each open request is in one place.

    Raises:
        AssertionError: the head's records contradict each other.
    """
    state, table = control.state, control.table
    owners: dict[tuple[str, int], str] = {}
    for replica in state.replicas.values():
        assert replica.is_routed == (replica.state in SERVING), (replica.replica_id, replica.state)
        for _, rank in replica.alive_ranks():
            for device in rank.devices:
                other = owners.setdefault((rank.node_id, device), replica.replica_id)
                assert other == replica.replica_id, f"{rank.node_id}/{device}: {other} and {replica.replica_id}"
    routes = table.routes()
    serving = {(r.replica_id, r.incarnation) for r in state.replicas.values() if r.state in SERVING}
    assert {(route.replica_id, route.incarnation) for route in routes} == serving
    waiting = sum(table.num_waiting(name) for name in state.deployments)
    sent = [attempt.request for route in routes for attempt in route.attempts.values() if attempt.request is not None]
    assert len(set(map(id, sent))) == len(sent), "a request is computed twice"
    assert table.num_open == waiting + len(sent), (table.num_open, waiting, len(sent))


def check_processes(agents: Iterable[SimAgent]) -> None:
    """No rank of one incarnation lives twice, on whatever hosts.

    Raises:
        AssertionError: names the worker.
    """
    seen: dict[tuple[str, int, int], str] = {}
    for agent in agents:
        for ref in agent.workers:
            other = seen.setdefault((ref.replica_id, ref.incarnation, ref.rank), agent.node_id)
            assert other == agent.node_id, f"{ref} lives on {other} and {agent.node_id}"


def is_converged(control: ControlPlane) -> bool:
    """Whether every wanted replica serves."""
    states = [replica.state for replica in control.state.replicas.values()]
    return bool(states) and all(state is ReplicaState.READY for state in states)


def is_settled(control: ControlPlane) -> bool:
    """Whether every host is up and every replica serves, or there is no room for it."""
    state = control.state
    whole = all(node.takes_work and not node.held for node in state.nodes.values())
    waiting = [replica for replica in state.replicas.values() if replica.state is not ReplicaState.READY]
    return whole and all(replica.state is ReplicaState.PLACING and replica.note for replica in waiting)
