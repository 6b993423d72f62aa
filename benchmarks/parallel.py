"""What parallel ranks cost on one host: collectives and bytes a token against the theoretical count, the step message,
and how busy the stages of a pipeline are.

`python -m benchmarks.parallel [MODEL]` (default: the demo model). Prints Markdown tables; exits 1 when a count is not
the theoretical one. Ranks are real processes over gloo; each has one thread.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from cluster.rendezvous import Rendezvous
from sonar.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from sonar.distributed.rank_link import RankLink, RankSpec
from sonar.distributed.ring import RingReader, RingWriter
from sonar.distributed.step_link import StepReceiver, StepSender
from sonar.messages import RankToHead, StepBatch, Submit
from sonar.model_config import load_model_config
from sonar.model_source import resolve_model
from sonar.sampling_params import SamplingParams
from sonar.transport import Address, PeerId, PeerKind
from sonar.transport_server import Server

TOKEN = "the benchmark's own token, for loopback alone"
REPLICA = "bench-0"
SHAPES = ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (2, 2))
NUM_STREAMS = 8
NUM_TOKENS = 24
FLOAT_BYTES = 4


class Counted(NamedTuple):
    """What one rank did in decode steps alone. tokens: rows of those steps; busy_s: its step thread had work."""

    steps: int
    rows: int
    collectives: dict[str, int]
    sends: dict[str, int]
    busy_s: float
    wall_s: float


def main() -> int:
    """Runs everything."""
    source = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
    shape = load_model_config(source)
    print(f"{source.name}, {os.cpu_count()} CPUs, {NUM_STREAMS} streams of {NUM_TOKENS} tokens, float32\n")
    measure_step_message()
    return measure_replicas(str(source.path), shape)


# --- the step message -------------------------------------------------------------------------------------------------


def measure_step_message() -> None:
    """Cost at the lead and time until the last rank has it."""
    print("| step message, rows | ranks | bytes | lead's cost, us | until every rank has it, us |")
    print("| --- | --- | --- | --- | --- |")
    for num_rows in (1, 16, 256):
        for num_readers in (1, 3):
            batch = decode_batch(0, num_rows)
            cost_us, until_us, size = time_messages(num_rows, num_readers)
            print(f"| {num_rows} | {num_readers + 1} | {size} | {cost_us:.0f} | {until_us:.0f} |")
            del batch
    print()


def decode_batch(step: int, num_rows: int) -> StepBatch:
    """A step of running requests, all of which decode."""
    return StepBatch(
        incarnation=1,
        step=step,
        slots=list(range(num_rows)),
        starts=[1000 + step] * num_rows,
        lengths=[1] * num_rows,
        samples=[True] * num_rows,
    )


def time_messages(num_rows: int, num_readers: int, count: int = 400) -> tuple[float, float, int]:
    """Medians of the sender's cost and of the time until the last reader has answered, half a round trip off."""
    context = multiprocessing.get_context("spawn")
    writer = RingWriter(num_readers)
    pipes, processes = [], []
    for reader in range(num_readers):
        ours, theirs = context.Pipe()
        process = context.Process(target=answer_messages, args=(os.getpid(), writer.descriptor, reader, count, theirs))
        process.start()
        pipes.append(ours)
        processes.append(process)
    answers = [RingReader(*pipe.recv(), 0) for pipe in pipes]
    sender = StepSender(writer, 1)
    costs, untils, size = [], [], 0
    for step in range(count):
        batch = decode_batch(step, num_rows)
        before = writer._position
        began = time.perf_counter()
        sender.send(batch)
        costs.append(time.perf_counter() - began)
        stamps = [float(answer.read(10.0) or b"nan") for answer in answers]
        untils.append(max(stamps) - began)
        size = writer._position - before
        time.sleep(0.001)  # a rank sleeps between steps, as it does while another computes
    for process in processes:
        process.join(10)
    return 1e6 * statistics.median(costs), 1e6 * statistics.median(untils), size


def answer_messages(pid: int, descriptor: int, reader: int, count: int, pipe: Connection) -> None:
    """A reader: says when it had each message decoded (one clock serves all processes of a host)."""
    receiver = StepReceiver(RingReader(pid, descriptor, reader), 1)
    answers = RingWriter(1)
    pipe.send((os.getpid(), answers.descriptor))
    for _ in range(count):
        assert receiver.receive(30.0) is not None
        answers.write(str(time.perf_counter()).encode(), 10.0)
    time.sleep(0.5)


# --- replicas ---------------------------------------------------------------------------------------------------------


def measure_replicas(model: str, shape: ModelConfig) -> int:
    """Counts and speed of each shape; 1 when a count is wrong."""
    is_right = True
    rows = []
    for tp_size, pp_size in SHAPES:
        counted = run_replica(model, ParallelConfig(tp_size=tp_size, pp_size=pp_size))
        ok = check_counts(counted, shape, tp_size, pp_size)
        is_right = is_right and ok
        rows.append(describe(counted, shape, tp_size, pp_size, ok))
    print(
        "| tp | pp | sums a layer and step | bytes sent a token, rank 0: measured | theoretical | stages busy | tok/s |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print("\n".join(rows))
    return 0 if is_right else 1


def theoretical_bytes(shape: ModelConfig, tp_size: int, rank: int, stage_layers: int, pp_size: int) -> float:
    """Bytes that a rank sends for one decoded, greedy token; see docs/parallelism.md."""
    stage = rank // tp_size
    is_first, is_last = stage == 0, stage == pp_size - 1
    row = shape.hidden_size * FLOAT_BYTES
    sums = 2 * stage_layers + (1 if is_first else 0)
    total = 0.0
    if tp_size > 1:
        total += sums * row * (tp_size - 1)
        total += 16 * (tp_size - 1) if is_last else 0
    if pp_size > 1:
        total += 8 if is_last else row
    return total


def check_counts(counted: list[Counted], shape: ModelConfig, tp_size: int, pp_size: int) -> bool:
    """Whether every rank made the sums and sent the bytes that the formulas give."""
    ok = True
    for rank, one in enumerate(counted):
        layers = one.sends["layers"]
        expected_sums = one.steps * (2 * layers + (1 if rank < tp_size else 0)) if tp_size > 1 else 0
        sent = one.collectives["sum_bytes"] + one.collectives["gather_bytes"] + one.sends["send_bytes"]
        expected = theoretical_bytes(shape, tp_size, rank, layers, pp_size) * one.rows
        if one.collectives["sums"] != expected_sums or sent != expected:
            print(f"tp={tp_size} pp={pp_size} rank {rank}: {one.collectives['sums']} sums, {expected_sums} expected; "
                  f"{sent} bytes, {expected:.0f} expected")  # fmt: skip
            ok = False
    return ok


def describe(counted: list[Counted], shape: ModelConfig, tp_size: int, pp_size: int, ok: bool) -> str:
    """One row of the table."""
    lead = counted[0]
    sent = lead.collectives["sum_bytes"] + lead.collectives["gather_bytes"] + lead.sends["send_bytes"]
    per_token = sent / max(1, lead.rows)
    theory = theoretical_bytes(shape, tp_size, 0, lead.sends["layers"], pp_size)
    sums = lead.collectives["sums"] / max(1, lead.steps * lead.sends["layers"])
    busy = " ".join(f"{one.busy_s / one.wall_s:.0%}" for one in counted[::tp_size])
    speed = NUM_STREAMS * NUM_TOKENS / lead.wall_s
    mark = "" if ok else " (wrong)"
    return f"| {tp_size} | {pp_size} | {sums:.2f} | {per_token:.0f}{mark} | {theory:.0f} | {busy} | {speed:.0f} |"


def run_replica(model: str, parallel: ParallelConfig) -> list[Counted]:
    """Starts the ranks, has them decode, returns what each counted."""
    server = StoreServer()
    context = multiprocessing.get_context("spawn")
    pipes = []
    for rank in range(parallel.world_size):
        ours, theirs = context.Pipe()
        context.Process(
            target=rank_main, args=(model, parallel.tp_size, parallel.pp_size, rank, server.address, theirs)
        ).start()
        pipes.append(ours)
    counted = [Counted(*json.loads(pipe.recv())) for pipe in pipes]
    server.close()
    return counted


def rank_main(model: str, tp_size: int, pp_size: int, rank: int, address: Address, pipe: Connection) -> None:
    """One rank: the lead serves the streams, the others follow; all count from the end of the prompts on."""
    from sonar.engine import build_engine, build_follower

    config = EngineConfig(
        model=model,
        device="cpu",
        threads=1,
        activations="float32",
        cache=CacheConfig(memory_bytes=64 << 20),
        scheduler=SchedulerConfig(max_num_requests=NUM_STREAMS, max_step_tokens=512, max_model_len=256),
        parallel=ParallelConfig(tp_size=tp_size, pp_size=pp_size, rank=rank),
    )
    spec = RankSpec(
        head_host=address.host,
        head_port=address.port,
        token=TOKEN,
        replica_id=REPLICA,
        incarnation=1,
        rank=rank,
        world_size=tp_size * pp_size,
    )
    link = RankLink(spec) if tp_size * pp_size > 1 else None
    if rank == 0:
        engine = build_engine(config, link=link, incarnation=1).engine
        runner = getattr(engine._executor, "_runner", engine._executor)
        watch = Watch(runner)
        serve_streams(engine)
        pipe.send(json.dumps(watch.result()))
        engine.close()
    else:
        assert link is not None
        loop = build_follower(config, link=link)
        watch = Watch(loop._runner)
        loop._close, close = (lambda: None), loop._close  # type: ignore[method-assign]
        loop.run()
        pipe.send(json.dumps(watch.result()))
        close()


def serve_streams(engine: Any) -> None:
    """All streams at once, greedy."""
    for number in range(NUM_STREAMS):
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=0)
        engine.add(
            Submit(incarnation=0, request_id=str(number), prompt_token_ids=[number + 5, 9, 11], sampling=sampling)
        )
    while engine.has_work:
        engine.step()


class Watch:
    """Counts what a runner does in steps that only decode."""

    def __init__(self, runner: Any) -> None:
        self._parts = runner._parts
        self._steps = self._rows = 0
        self._totals: dict[str, int] = {}
        self._busy_s = 0.0
        self._began_s = self._ended_s = 0.0
        stage = self._parts.stage
        self._wait_s = 0.0
        if stage is not None:
            for name in ("receive_hidden", "receive_tokens"):
                setattr(stage._links, name, self._timed(getattr(stage._links, name)))
        compute = runner._compute

        def counted(batch: StepBatch) -> Any:
            before, began, waited = self._counts(), time.perf_counter(), self._wait_s
            result = compute(batch)
            if batch.slots and max(batch.lengths) == 1:
                now = time.perf_counter()
                self._began_s = self._began_s or began
                self._ended_s = now
                self._busy_s += now - began - (self._wait_s - waited)
                self._steps += 1
                self._rows += len(batch.slots)
                for name, value in self._counts().items():
                    self._totals[name] = self._totals.get(name, 0) + value - before[name]
            return result

        runner._compute = counted

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                self._wait_s += time.perf_counter() - began

        return call

    def _counts(self) -> dict[str, int]:
        counts = dict.fromkeys(("sums", "sum_bytes", "gather_bytes", "send_bytes"), 0)
        for owner in (self._parts.parallel, self._parts.stage._links if self._parts.stage else None):
            if owner is not None:
                counts |= {name: getattr(owner.counts, name) for name in counts if hasattr(owner.counts, name)}
        return counts

    def result(self) -> tuple[Any, ...]:
        """Fields of `Counted`."""
        totals = {**dict.fromkeys(("sums", "sum_bytes", "gather_bytes", "send_bytes"), 0), **self._totals}
        layers = len(self._parts.cache.layers)
        sends = {"send_bytes": totals["send_bytes"], "layers": layers}
        return self._steps, self._rows, totals, sends, self._busy_s, self._ended_s - self._began_s


class StoreServer:
    """The part of a head that ranks meet through, in a thread with a loop of its own."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._end = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        self._is_open.wait(10)

    async def _serve(self) -> None:
        rendezvous, server = Rendezvous(), Server(TOKEN, {PeerKind.RANK: RankToHead})
        self.address: Address = server.bind("127.0.0.1", 0)

        def handle(peer: PeerId, message: Any) -> None:
            rank = int(peer.name.rpartition("/")[2])
            for reply in rendezvous.handle(REPLICA, peer.generation, rank, message, time.monotonic()):
                server.send(peer._replace(name=f"{REPLICA}/{reply.rank}"), reply.message)

        server.open(handle)
        self._is_open.set()
        while not self._end.is_set():
            await asyncio.sleep(0.05)
            for _, incarnation, reply in rendezvous.tick(time.monotonic()):
                server.send(PeerId(PeerKind.RANK, f"{REPLICA}/{reply.rank}", incarnation), reply.message)
        server.close()

    def close(self) -> None:
        """Ends the thread."""
        self._end.set()
        self._thread.join(10)


if __name__ == "__main__":
    sys.exit(main())
