"""A world of fake agents and leads around `ClusterState`, without sockets or sleep: commands go in, events come out.

Messages to agents wait in a queue per agent until they are delivered, so that tests choose orders and losses.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from cluster.commands import CloseRoute, Command, DrainRoute, OpenRoute, RecordIncarnation, ResyncRoute, SendToAgent
from cluster.config import DeploymentConfig, RestartPolicy, Timeouts
from cluster.events import AgentReported, AgentSpoke, DeploymentApplied, Event, LeadSpoke, NodeRegistered, Tick
from cluster.messages import (
    DeviceFacts,
    HardwareFacts,
    HeadToAgent,
    KillReplica,
    Refused,
    Register,
    RegisterAgain,
    RunningWorker,
    Shutdown,
    StartWorker,
    StopWorker,
    WorkerExited,
    WorkerRef,
    WorkerStarted,
)
from cluster.records import ReplicaState
from cluster.state import ClusterState
from sonar.config import EngineConfig
from sonar.messages import LeadHello, LeadReady, LeadStats, Roll
from sonar.transport import PROTOCOL_VERSION

VERSIONS = {"sonar": "1"}


def hardware(boot_id: str = "boot", num_devices: int = 0) -> HardwareFacts:
    devices = [
        DeviceFacts(index=i, kind="cuda", name="gpu", memory_bytes=1 << 30, uuid=str(i)) for i in range(num_devices)
    ]
    return HardwareFacts(
        hostname="host",
        boot_id=boot_id,
        cpu_cores=2,
        cpu_model="cpu",
        memory_bytes=1 << 30,
        memory_available_bytes=1 << 30,
        devices=devices,
        addresses=[],
        address="10.0.0.9",
    )


def lead_ready(ref: WorkerRef, **changes: int) -> LeadReady:
    values = {
        "num_blocks": 64,
        "block_size": 16,
        "max_model_len": 256,
        "max_num_requests": 4,
        "weights_bytes": 1,
        **changes,
    }
    return LeadReady(incarnation=ref.incarnation, replica_id=ref.replica_id, ops_backend="fake", **values)


def lead_stats(incarnation: int, steps: int = 0, **changes: int) -> LeadStats:
    names = (
        "num_running num_waiting blocks_free blocks_cached blocks_in_use blocks_in_transit blocks_total prompt_tokens "
        "cached_tokens generated_tokens preemptions"
    )
    values = dict.fromkeys(names.split(), 0) | changes
    return LeadStats(incarnation=incarnation, steps=steps, step_seconds=0.0, **values)


def deployment(name: str = "m", replicas: int = 1, **engine: object) -> DeploymentConfig:
    return DeploymentConfig(name=name, replicas=replicas, engine_config=EngineConfig(model="none", **engine))


@dataclass
class FakeAgent:
    node_id: str
    agent_id: int
    num_devices: int = 0
    boot_id: str = ""
    is_reachable: bool = True
    is_over: bool = False
    inbox: deque[HeadToAgent] = field(default_factory=deque)
    workers: dict[WorkerRef, RunningWorker] = field(default_factory=dict)

    def register(self) -> NodeRegistered:
        register = Register(
            protocol=PROTOCOL_VERSION,
            node_id=self.node_id,
            pid=1,
            versions=VERSIONS,
            hardware=hardware(self.boot_id or self.node_id, self.num_devices),
            running=list(self.workers.values()),
        )
        return NodeRegistered(self.agent_id, register)


class World:
    """Owns the state under test, simulated time and the agents; checks the invariants of each command."""

    def __init__(self, timeouts: Timeouts | None = None, restart: RestartPolicy | None = None) -> None:
        self.now = 1000.0
        self.state = ClusterState(timeouts or Timeouts(), restart or RestartPolicy(), VERSIONS, 0)
        self.policies = (timeouts or Timeouts(), restart or RestartPolicy())
        self.agents: dict[int, FakeAgent] = {}
        self.routes: dict[str, int] = {}
        self.commands: list[Command] = []
        self.recorded: dict[str, int] = {}
        self._next_agent_id = 1
        self._next_pid = 100

    def handle(self, event: Event) -> list[Command]:
        commands = self.state.handle(event, self.now)
        self.commands.extend(commands)
        for command in commands:
            self._check(command)
        self._check_devices()
        return commands

    def join(self, node_id: str, num_devices: int = 0) -> FakeAgent:
        agent = FakeAgent(node_id, self._next_agent_id, num_devices)
        self._next_agent_id += 1
        self.agents[agent.agent_id] = agent
        self.handle(agent.register())
        return agent

    def advance(self, seconds: float, step: float = 0.25) -> None:
        """Time passes; reachable agents and their leads beat."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += step
            for agent in self.agents.values():
                if agent.is_reachable and not agent.is_over:
                    self.handle(AgentSpoke(agent.node_id, agent.agent_id, tuple(agent.workers)))
                    for ref in agent.workers:
                        self.lead_says(ref, lead_stats(ref.incarnation))
            self.handle(Tick())

    def deliver(self, agent: FakeAgent) -> None:
        """The agent takes its oldest message and obeys."""
        if agent.is_over or not agent.inbox:
            return
        match agent.inbox.popleft():
            case StartWorker(worker=ref) as order:
                self._next_pid += 1
                worker = RunningWorker(
                    worker=ref,
                    pid=self._next_pid,
                    devices=order.devices,
                    log_path="log",
                    world_size=order.world_size,
                    settings=order.settings,
                )
                agent.workers[ref] = worker
                self.report(agent, WorkerStarted(worker=ref, pid=worker.pid, log_path="log"))
            case KillReplica(replica_id=replica_id, incarnation=incarnation):
                for ref in [r for r in agent.workers if (r.replica_id, r.incarnation) == (replica_id, incarnation)]:
                    self.exit(agent, ref, signal=9, was_asked=True)
            case StopWorker(worker=ref):
                if ref in agent.workers:
                    self.exit(agent, ref, was_asked=True)
            case Refused() | Shutdown():
                self.kill_agent(agent)
            case RegisterAgain():
                self.handle(agent.register())
            case _:
                pass

    def settle(self, seconds: float = 5.0) -> None:
        """Everything is delivered and every lead gets ready, for some seconds."""
        end = self.now + seconds
        while self.now < end:
            for agent in list(self.agents.values()):
                while agent.inbox and agent.is_reachable and not agent.is_over:
                    self.deliver(agent)
                for ref in list(agent.workers):
                    if self.routes.get(ref.replica_id) != ref.incarnation:
                        self.make_ready(agent, ref)
            self.advance(0.25)

    def new_head(self) -> None:
        """The head is gone, with all that was on its way; another one begins with what the store remembers."""
        before, deployments = self.state.nodes_with_workers, list(self.state.deployments.values())
        floor = max(self.recorded.values(), default=0)
        self.state = ClusterState(*self.policies, VERSIONS, floor, nodes_before=before)
        self.routes.clear()
        for agent in self.agents.values():
            agent.inbox.clear()
        for config in deployments:
            self.handle(DeploymentApplied(config))
        for agent in list(self.agents.values()):
            if agent.is_reachable and not agent.is_over:
                self.handle(agent.register())

    def make_ready(self, agent: FakeAgent, ref: WorkerRef) -> None:
        replica = self.state.replicas.get(ref.replica_id)
        if replica is not None and replica.state is ReplicaState.ADOPTING and ref.rank == 0 and agent.is_reachable:
            self.lead_says(ref, Roll(incarnation=ref.incarnation, ready=lead_ready(ref), next_sequence=9))
        elif ref.rank == 0 and agent.is_reachable:
            self.lead_says(ref, LeadHello(incarnation=ref.incarnation, replica_id=ref.replica_id, pid=1))
            self.lead_says(ref, lead_ready(ref))

    def lead_says(self, ref: WorkerRef, message: object) -> None:
        self.handle(LeadSpoke(ref.replica_id, ref.incarnation, message))

    def report(self, agent: FakeAgent, report: object) -> None:
        if agent.is_reachable:
            self.handle(AgentReported(agent.node_id, agent.agent_id, report))

    def exit(self, agent: FakeAgent, ref: WorkerRef, code: int = 0, signal: int = 0, was_asked: bool = False) -> None:
        worker = agent.workers.pop(ref)
        report = WorkerExited(
            worker=ref, pid=worker.pid, exit_code=code, signal=signal, log_tail="last words", was_asked=was_asked
        )
        self.report(agent, report)

    def kill_agent(self, agent: FakeAgent) -> None:
        """The agent's process ends without a word, and its workers with it."""
        agent.is_over = True
        agent.workers.clear()

    def ready(self) -> list[str]:
        return sorted(r.replica_id for r in self.state.replicas.values() if r.state is ReplicaState.READY)

    def _check(self, command: Command) -> None:
        match command:
            case RecordIncarnation(replica_id=replica_id, incarnation=incarnation):
                assert incarnation > self.recorded.get(replica_id, 0), command
                assert replica_id not in self.routes, "an incarnation began while another was routed"
                self.recorded[replica_id] = incarnation
            case SendToAgent(agent_id=agent_id, message=message):
                agent = self.agents[agent_id]
                assert agent.node_id == command.node_id
                if isinstance(message, StartWorker):
                    assert self.recorded[message.worker.replica_id] == message.worker.incarnation
                    assert self.state.nodes[agent.node_id].agent_id == agent_id
                    assert not self.state.is_stopping
                if agent.is_reachable:
                    agent.inbox.append(message)
            case OpenRoute(replica_id=replica_id, incarnation=incarnation):
                assert replica_id not in self.routes
                self.routes[replica_id] = incarnation
            case DrainRoute(replica_id=replica_id, incarnation=incarnation) | ResyncRoute(replica_id, incarnation):
                assert self.routes[replica_id] == incarnation
            case CloseRoute(replica_id=replica_id, incarnation=incarnation):
                assert self.routes.pop(replica_id) == incarnation
            case _:
                pass

    def _check_devices(self) -> None:
        """No accelerator has two owners; routes are those of serving replicas."""
        owners: set[tuple[str, int]] = set()
        for replica in self.state.replicas.values():
            serving = replica.state in (ReplicaState.READY, ReplicaState.DRAINING)
            assert replica.is_routed == serving == (replica.replica_id in self.routes)
            for _, rank in replica.alive_ranks():
                for device in rank.devices:
                    assert (rank.node_id, device) not in owners
                    owners.add((rank.node_id, device))
