"""Which replicas of a deployment are to be restarted next: one at a time, and only while all the others serve.

A replica that does not come back stops the round: the rest keep serving as they are. Pure; called by `cluster.state`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from cluster.records import ReplicaRecord, ReplicaState


def mark_for_restart(replicas: Iterable[ReplicaRecord]) -> list[str]:
    """The present incarnations are to be replaced. Returns ids of those that serve; the others start anew anyway."""
    marked = [replica for replica in replicas if replica.state is ReplicaState.READY]
    for replica in marked:
        replica.restart_up_to = replica.incarnation
    return [replica.replica_id for replica in marked]


def next_to_restart(replicas: Collection[ReplicaRecord]) -> list[ReplicaRecord]:
    """At most one of each deployment."""
    due: dict[str, ReplicaRecord] = {}
    for replica in replicas:
        if replica.is_wanted and replica.incarnation <= replica.restart_up_to:
            due.setdefault(replica.deployment, replica)
    if not due:
        return []
    busy = {replica.deployment for replica in replicas if replica.is_wanted and replica.state is not ReplicaState.READY}
    return [replica for name, replica in due.items() if name not in busy]
