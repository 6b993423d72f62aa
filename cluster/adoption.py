"""What a new head does with workers that an earlier one started: which it keeps, and how long it waits for them.

A head that finds that hosts had workers waits for those hosts, so that no replica is started beside one that runs. A
worker is kept if it belongs to a replica that is wanted with the very settings it runs with. Pure; owned by
`cluster.state`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import msgspec

from cluster.config import DeploymentConfig
from cluster.messages import RunningWorker
from cluster.placement import NodeView
from cluster.records import IncarnationNumbers, ReplicaRecord, ReplicaState


class AdoptionWindow:
    """The wait for hosts that had workers when the earlier head was last heard; it happens once in a head's life.

    Args:
        expected: their node ids. wait_s: after it the missing hosts' replicas are started anew.

    Attributes:
        is_over: replicas may be placed.
    """

    def __init__(self, expected: Collection[str], wait_s: float) -> None:
        self.is_over = not expected
        self._expected = sorted(expected)
        self._wait_s = wait_s
        self._deadline_s: float | None = None

    def missing(self, here: Collection[str]) -> list[str]:
        """Hosts that have not said what runs there."""
        return [name for name in self._expected if name not in here]

    def tick(self, here: Collection[str], now: float) -> str:
        """Time has passed, or somebody came. Returns what is to be announced when the wait has been in vain."""
        if self.is_over:
            return ""
        if self._deadline_s is None:
            self._deadline_s = now + self._wait_s
        missing = self.missing(here)
        self.is_over = not missing or now >= self._deadline_s
        if not self.is_over or not missing:
            return ""
        return f"{', '.join(missing)} had workers under an earlier head and did not come back within {self._wait_s:g} s"

    def note(self, here: Collection[str]) -> str:
        """Why a replica has no place yet."""
        return f"waits for nodes that had workers under an earlier head: {', '.join(self.missing(here))}"


def settings_digest(config: DeploymentConfig) -> str:
    """Equal for workers that may stand for one another: by engine and settings, the rank apart."""
    what = msgspec.json.encode((config.engine, config.engine_config))
    return hashlib.blake2b(what, digest_size=16).hexdigest()


def is_adoptable(
    replica: ReplicaRecord,
    item: RunningWorker,
    config: DeploymentConfig,
    numbers: IncarnationNumbers,
    view: NodeView,
) -> bool:
    """Whether a worker that runs on a node can be (a rank of) that replica from now on.

    Args:
        view: of the node; accelerators that another worker is thought to hold are not free in it.
    """
    ref, world_size = item.worker, config.engine_config.parallel.world_size
    is_first = (
        replica.state is ReplicaState.PLACING
        and replica.replica_id not in numbers.given
        and ref.incarnation <= numbers.floor
    )
    is_next = (
        replica.state is ReplicaState.ADOPTING
        and replica.incarnation == ref.incarnation
        and ref.rank not in replica.ranks
    )
    return (
        (is_first or is_next)
        and replica.is_wanted
        and item.settings == settings_digest(config)
        and item.world_size == world_size
        and ref.rank < world_size
        and set(item.devices) <= set(view.free_devices)
    )
