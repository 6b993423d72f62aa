"""Random histories of replicas that exchange blocks under faults: every read of the cache is the request's own history,
every output that of the fault-free run, and in the end every block is back."""

from __future__ import annotations

import random

import msgspec
import pytest

from sonar.errors import CapacityError
from sonar.kvcache.groups import CacheGroup
from sonar.sampling_params import SamplingParams
from tests.kvtransfer.faulty import FakeNetwork, FaultKind
from tests.kvtransfer.replicas import Cluster, Replica
from tests.scheduler.world import FULL, sliding

OPERATIONS = 30_000
FAULTS = [FaultKind.LATE, FaultKind.LOST, FaultKind.HALF, FaultKind.REFUSED]


class _History:
    """One random run over two prefill and two decode replicas."""

    def __init__(self, seed: int, groups: tuple[CacheGroup, ...]) -> None:
        self.rng = rng = random.Random(seed)
        self.cluster = Cluster(
            groups=groups,
            network=FakeNetwork(lambda: rng.choice(FAULTS) if rng.random() < 0.1 else FaultKind.NONE),
        )
        for name in ("p0", "p1", "d0", "d1"):
            self.cluster.add(name, num_blocks=26)
        self.texts = [[rng.randrange(1, 50) for _ in range(50)] for _ in range(4)]
        self.fetched = self.failed = 0
        self.graves: list[Replica] = []

    def submit(self, number: int) -> None:
        rng, replicas = self.rng, self.cluster.replicas
        at = replicas[rng.choice(("d0", "d1", "d0", "d1", "p0"))]
        source = replicas[rng.choice([name for name in replicas if name != at.name])].source
        if rng.random() < 0.2:
            source = msgspec.structs.replace(source, cached_tokens=4 * rng.randrange(1, 12))
        text = rng.choice(self.texts)
        prompt = text[: rng.randrange(2, 44)] + [rng.randrange(1, 50) for _ in range(rng.choice((0, 1, 6)))]
        sampling = SamplingParams(seed=rng.randrange(3), max_tokens=rng.choice((1, 3, 12)), ignore_eos=True)
        try:
            at.world.request(f"r{number}", prompt, sampling, source=source if rng.random() < 0.8 else None)
        except CapacityError as error:
            assert error.code == "queue_full"

    def abort(self) -> None:
        at = self.rng.choice(list(self.cluster.replicas.values()))
        if at.world.open:
            at.world.abort(self.rng.choice(at.world.open))

    def restart(self) -> None:
        """A replica is killed and comes back as another incarnation."""
        name = self.rng.choice(list(self.cluster.replicas))
        dead = self.cluster.replicas[name]
        self._count(dead)
        self.cluster.kill(name)
        # Reads into a dead process's memory end with it.
        for reading in list(self.cluster.network.under_way):
            cells = dead.transport.regions
            if any(r.address <= reading.pieces[0].local < r.address + r.size_bytes for r in cells):
                self.cluster.network.under_way.remove(reading)
        self.graves.append(dead)  # its memory stays: readers may copy from it, as from a process that has just ended
        self.cluster.add(name, num_blocks=26, incarnation=dead.incarnation + 1)

    def step(self, number: int) -> None:
        rng, cluster = self.rng, self.cluster
        choice = rng.random()
        at = rng.choice(list(cluster.replicas.values()))
        if choice < 0.05:
            self.submit(number)
        elif choice < 0.06:
            self.abort()
        elif choice < 0.061:
            self.restart()
        elif choice < 0.064 and cluster.links:
            cluster.links.popleft()  # lost
        elif choice < 0.066:
            cluster.now += rng.choice((0.5, 2.0))
        elif choice < 0.075:
            cluster.network.release_late()
        elif choice < 0.3:
            cluster.deliver()
        elif choice < 0.45:
            cluster.network.step()
        elif choice < 0.6 and at.world.executor.results:
            at.world.update()
        elif choice < 0.8:
            at.world.schedule()
        else:
            at.exchange_once()
        cluster.now += 0.002

    def _count(self, replica: Replica) -> None:
        self.fetched += sum(pair.fetches - pair.failed for pair in replica.exchange.stats())
        self.failed += sum(pair.failed for pair in replica.exchange.stats())

    def end(self) -> None:
        self.cluster.network.choose = lambda: FaultKind.NONE
        self.cluster.network.release_late()
        self.cluster.settle()
        for replica in list(self.cluster.replicas.values()):
            self._count(replica)
        # What lost reads may still write is free once their peers have ended.
        for name in ("p0", "p1", "d0"):
            self.cluster.kill(name)
        counts = self.cluster.replicas["d1"].world.cache.counts()
        assert counts.free + counts.cached == counts.total, counts


@pytest.mark.parametrize("groups", [(FULL,), (sliding(6), FULL)], ids=["full", "sliding"])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_read_is_the_requests_own_history(seed: int, groups: tuple[CacheGroup, ...]) -> None:
    history = _History(seed, groups)
    for number in range(OPERATIONS):
        history.step(number)
        if number % 20 == 0:
            for replica in history.cluster.replicas.values():
                replica.world.check()
    history.end()
    assert history.fetched > 100 and history.failed > 20, (history.fetched, history.failed)
