"""Processes that a comparison of servers needs: the servers, a watch over their memory, a loop that takes a core.

Knows nothing of loads or figures. Linux only (/proc). Called by `benchmarks.peers.server`.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 30.0
_SAMPLE_S = 0.25


class MemoryWatch:
    """Samples what a process and its descendants take together, from a thread, until `stop`.

    PSS, in bytes: of a page that several processes share, each is charged its part; of a mapped file what is resident.
    """

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._root = psutil.Process(pid)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Takes no more samples."""
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._end.wait(_SAMPLE_S):
            try:
                pids = [self._root.pid, *(child.pid for child in self._root.children(recursive=True))]
            except psutil.NoSuchProcess:
                return
            self.peak_bytes = max(self.peak_bytes, sum(map(read_pss, pids)))


def read_pss(pid: int) -> int:
    """Bytes; 0 for a process that has ended."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def find_free_port() -> int:
    """A port of loopback that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def running(arguments: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """`python ARGUMENTS` with a state folder of its own; interrupted in the end, and killed if that does not do."""
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder, "log")
        environment = {**os.environ, "XDG_STATE_HOME": folder}
        with log_path.open("wb") as log:
            process = subprocess.Popen([sys.executable, *arguments], env=environment, stdout=log, stderr=log)
        try:
            yield process
        except BaseException:
            print(log_path.read_text(errors="replace")[-3000:], file=sys.stderr)
            raise
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def core_taken(cpu: int) -> Iterator[None]:
    """A process that does nothing but run on one CPU."""
    process = multiprocessing.get_context("spawn").Process(target=_spin, args=(cpu,), daemon=True)
    process.start()
    time.sleep(0.5)  # its interpreter's start is not what is to be measured
    try:
        yield
    finally:
        process.kill()
        process.join()


def _spin(cpu: int) -> None:
    os.sched_setaffinity(0, {cpu})
    while True:
        pass
