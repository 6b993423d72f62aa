"""Real rank processes that meet through a real link, and are told to form one replica after another."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from cluster.rendezvous import Rendezvous
from sonar.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from sonar.distributed.rank_link import RankLink, RankSpec
from sonar.messages import RankToHead
from sonar.transport import Address, PeerId, PeerKind
from sonar.transport_server import Server
from tests.integration.hosts import enter

TOKEN = "a token of the tests' own, long enough"
REPLICA = "tiny-0"
TIMEOUT_S = 90.0


class StoreServer:
    """The part of a head that ranks meet through, in a thread with a loop of its own."""

    def __init__(self, host: str = "127.0.0.1", namespace: str = "") -> None:
        self._host = host
        self._namespace = namespace
        self._rendezvous = Rendezvous()
        self._is_open = threading.Event()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._is_open.wait(10)

    async def _serve(self) -> None:
        if self._namespace:
            enter(self._namespace)
        self._loop = asyncio.get_running_loop()
        server = Server(TOKEN, {PeerKind.RANK: RankToHead})
        self.address: Address = server.bind(self._host, 0)

        def handle(peer: PeerId, message: Any) -> None:
            rank = int(peer.name.rpartition("/")[2])
            for reply in self._rendezvous.handle(REPLICA, peer.generation, rank, message, time.monotonic()):
                server.send(peer._replace(name=f"{REPLICA}/{reply.rank}"), reply.message)

        server.open(handle)
        self._is_open.set()
        while not self._end.is_set():
            await asyncio.sleep(0.02)
            for _, incarnation, reply in self._rendezvous.tick(time.monotonic()):
                server.send(PeerId(PeerKind.RANK, f"{REPLICA}/{reply.rank}", incarnation), reply.message)
        server.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)


class RankPool:
    """Owns the processes; each replica is one incarnation.

    Args:
        namespaces: network namespaces over which the ranks are spread evenly, in order; none: this one.
        host: address of the head's part, in the first namespace.
    """

    def __init__(self, size: int, namespaces: tuple[str, ...] = (), host: str = "127.0.0.1") -> None:
        self._server = StoreServer(host, namespaces[0] if namespaces else "")
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        self._incarnation = 0
        for rank in range(size):
            ours, theirs = context.Pipe()
            namespace = namespaces[rank * len(namespaces) // size] if namespaces else ""
            process = context.Process(
                target=_rank_main, args=(rank, self._server.address, theirs, namespace), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, folder: str, parallel: ParallelConfig, job: str = "requests") -> list[Any]:
        """What a job returns on each rank."""
        self._incarnation += 1
        pipes = self._pipes[: parallel.world_size]
        for pipe in pipes:
            pipe.send((folder, parallel, self._incarnation, job))
        answers = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(TIMEOUT_S), f"rank {rank} does not answer"
            answer = pipe.recv()
            assert not isinstance(answer, str), f"rank {rank}: {answer}"
            answers.append(answer[0])
        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            assert process.exitcode == 0
        self._server.close()


def make_config(folder: str, parallel: ParallelConfig) -> EngineConfig:
    """Small steps, so that prompts come in chunks and decode beside one another."""
    return EngineConfig(
        model=folder,
        device="cpu",
        threads=1,
        cache=CacheConfig(memory_bytes=4 << 20),
        scheduler=SchedulerConfig(max_num_requests=8, max_step_tokens=48, max_model_len=128),
        parallel=parallel,
    )


def _rank_main(rank: int, address: Address, pipe: Connection, namespace: str) -> None:
    import traceback

    if namespace:
        enter(namespace)  # before any thread: later ones are born into it

    from tests.distributed import jobs

    while (order := pipe.recv()) is not None:
        folder, shape, incarnation, job = order
        parallel = dataclasses.replace(shape, rank=rank)
        try:
            link = RankLink(
                RankSpec(
                    head_host=address.host,
                    head_port=address.port,
                    token=TOKEN,
                    replica_id=REPLICA,
                    incarnation=incarnation,
                    rank=rank,
                    world_size=parallel.world_size,
                )
            )
            pipe.send((getattr(jobs, job)(make_config(folder, parallel), link),))
            link.close()
        except Exception:  # noqa: BLE001 - the test process tells of it
            pipe.send(traceback.format_exc())
