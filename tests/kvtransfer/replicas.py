"""Simulated replicas that exchange blocks: real schedulers and exchanges, memory in which every cell tells its history,
a network of links and reads under the test's control.

Each step of a replica checks that what it reads of the cache is the request's own history (`tests.scheduler`), so a
block that is wrong, early, late or another's fails at the step that reads it. Called by the tests of the exchange.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sonar.config import LayerKind, SchedulerConfig
from sonar.kvcache.groups import CacheGroup
from sonar.kvtransfer.contract import Region
from sonar.kvtransfer.exchange import KVExchange
from sonar.kvtransfer.peer import CacheMemory
from sonar.messages import KVSource
from sonar.peer_messages import KVLayout, PeerMessage
from tests.kvtransfer.faulty import FakeNetwork, FakeTransport
from tests.scheduler.world import FULL, World

BLOCK = 4


def layout(groups: tuple[CacheGroup, ...], model: str = "m") -> KVLayout:
    """8 bytes a token."""
    return KVLayout(
        model=model,
        dtype="float32",
        activations="float32",
        block_size=BLOCK,
        num_kv_heads=1,
        head_dim=1,
        groups=tuple(f"{group.kind.value} {group.window} {group.layers}" for group in groups),
        block_bytes=tuple(8 * BLOCK for _ in groups),
        ranks="1x1",
        transport="fake",
    )


class Replica:
    """A world with an exchange around it."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        groups: tuple[CacheGroup, ...],
        num_blocks: tuple[int, ...],
        *,
        model: str = "m",
        checksums: bool = False,
        incarnation: int = 7,
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.is_alive = True
        self.world = World(
            groups=groups,
            num_blocks=num_blocks,
            block_size=BLOCK,
            config=SchedulerConfig(max_num_requests=4, max_step_tokens=10, max_waiting=8),
        )
        memory = self.world.executor.memory
        addresses = tuple(cells.buffer_info()[0] for cells in memory)
        self.transport = FakeTransport(cluster.network)
        self.transport.register(
            [Region(address, 8 * len(cells)) for address, cells in zip(addresses, memory)],
        )
        self.exchange = KVExchange(
            self.world.scheduler,
            groups,
            CacheMemory(layout(groups, model), addresses, num_blocks),
            self.transport,
            wants_checksums=checksums,
            clock=lambda: cluster.now,
        )
        self._cluster = cluster

    @property
    def source(self) -> KVSource:
        """To be asked by others."""
        return KVSource(replica_id=self.name, incarnation=self.incarnation)

    def exchange_once(self) -> None:
        """The loop's part after a step."""
        for peer, message in self.exchange.tick():
            self._cluster.links.append((self, (peer.replica_id, peer.incarnation), message))


@dataclass
class Cluster:
    """Replicas, their links through a head, and a clock."""

    groups: tuple[CacheGroup, ...] = (FULL,)
    network: FakeNetwork = field(default_factory=FakeNetwork)
    links: deque[tuple[Replica, tuple[str, int], PeerMessage]] = field(default_factory=deque)
    replicas: dict[str, Replica] = field(default_factory=dict)
    now: float = 100.0

    def add(self, name: str, num_blocks: int = 40, **more: object) -> Replica:
        """Another replica, or another incarnation of one."""
        # The told group of a router must be full; a sliding one gets by with less.
        counts = tuple(num_blocks if group.kind is LayerKind.FULL else num_blocks // 2 for group in self.groups)
        self.replicas[name] = Replica(self, name, self.groups, counts, **more)  # type: ignore[arg-type]
        return self.replicas[name]

    def deliver(self) -> None:
        """One message, as the head carries it: to the present incarnation, else the sender hears that it is gone."""
        if not self.links:
            return
        sender, (name, incarnation), message = self.links.popleft()
        target = self.replicas.get(name)
        if not sender.is_alive:
            return
        if target is None or not target.is_alive or target.incarnation != incarnation:
            sender.exchange.peer_gone(name, incarnation, True)
        else:
            target.exchange.receive(sender.name, sender.incarnation, message)

    def kill(self, name: str) -> None:
        """A replica's process ends; the others hear of it."""
        dead = self.replicas[name]
        dead.is_alive = False
        for other in self.replicas.values():
            if other is not dead:
                other.exchange.peer_gone(dead.name, dead.incarnation, True)

    def turn(self, seconds: float = 0.01) -> None:
        """Everyone does what can be done."""
        self.now += seconds
        while self.links:
            self.deliver()
        self.network.step()
        for replica in self.replicas.values():
            if replica.is_alive:
                replica.world.step()
                replica.exchange_once()

    def settle(self) -> None:
        """Until no request is open and no transfer; then every block is back."""
        for _ in range(5000):
            self.turn()
            if self.now > 1000:
                self.network.release_late()
            living = [replica for replica in self.replicas.values() if replica.is_alive]
            if not any(r.world.scheduler.num_open or r.world.executor.results or r.exchange.is_busy for r in living):
                break
            self.now += 0.2
        for replica in living:
            assert not replica.exchange.is_busy and not replica.world.open, (replica.name, replica.world.open)
            replica.world.check()
            counts = replica.world.cache.counts()
            assert counts.in_use == counts.in_transit == 0, (replica.name, counts)
