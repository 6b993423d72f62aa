"""What the journal of resumable answers costs a token: CPU of the process, and time until an update is written.

`python benchmarks/answer_journal.py [FOLDER]`; FOLDER (default: a temporary one) decides which disk is measured.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

from cluster.answer_journal import AnswerJournal, AnswerRecord, LoggedEvent
from sonar.messages import TokenEvent

NUM_UPDATES = 20_000
OUTPUT = b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1,"model":"m"}' * 2


async def one_stream(journal: AnswerJournal, name: str, count: int, step_s: float, waits: list[float]) -> None:
    """Appends one token's update after the other, each as soon as its step has come."""
    record = AnswerRecord(
        answer_id=name,
        owner="",
        key="",
        route="/",
        body=b"x" * 500,
        asked=b"",
        fingerprint=b"",
        created_unix_s=1,
        max_model_len=1,
        streams=True,
    )
    await journal.begin(record)
    for number in range(count):
        event = TokenEvent(request_id=name, first=number, token_ids=[number])
        began_s = time.perf_counter()
        await journal.append(name, [LoggedEvent(0, event)], OUTPUT, is_last=number == count - 1)
        waits.append(time.perf_counter() - began_s)
        if step_s:
            await asyncio.sleep(step_s)


async def measure(folder: Path, num_streams: int, step_s: float) -> str:
    """A row: streams side by side, as quick as the journal is, or a token a step each."""
    journal = AnswerJournal(folder / f"{num_streams}-{step_s}.db")
    count = NUM_UPDATES // num_streams if not step_s else max(20, 2000 // num_streams)
    waits: list[float] = []
    cpu_s, began_s = time.process_time(), time.perf_counter()
    await asyncio.gather(*(one_stream(journal, str(n), count, step_s, waits) for n in range(num_streams)))
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - began_s
    per_commit = journal.counters.updates / journal.counters.commits
    journal.close()
    waits.sort()
    figures = (1e6 * cpu_s / len(waits), len(waits) / wall_s, per_commit)
    p50, p99 = 1e3 * statistics.median(waits), 1e3 * waits[int(0.99 * len(waits))]
    row = "{:.0f} us CPU a token, {:.0f} tokens/s, {:.1f} a commit".format(*figures)
    pace = f"a token each {1e3 * step_s:.0f} ms" if step_s else "as quick as it is"
    return f"{num_streams} streams, {pace}: {row}; written after p50 {p50:.2f} ms, p99 {p99:.2f} ms"


def main() -> None:
    """Prints a row a load."""
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        for num_streams, step_s in ((1, 0.0), (64, 0.0), (1, 0.02), (64, 0.02)):
            print(asyncio.run(measure(Path(folder), num_streams, step_s)), flush=True)


if __name__ == "__main__":
    main()
