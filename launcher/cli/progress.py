"""What a person sees while a server starts: one line a phase, then the address and a command that works.

On a terminal the line is rewritten as numbers change; elsewhere each phase gets a line. Watches a head through
`cluster.head.HeadObserver`; decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from sonar.transport import Address

if TYPE_CHECKING:
    from cluster.status import ClusterStatus, ReplicaStatus

REDRAW_S = 0.2
LINE_WIDTH = 78
MIB = 2**20
READY_WORDS = "Ready after"


class PhaseLine:
    """Owns the present line of a stream."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._redraws = stream.isatty()
        self._phase = ""
        self._began_s = 0.0
        self._drawn_s = 0.0

    def show(self, phase: str, done: int, total: int) -> None:
        """A phase goes on; total 0 is unknown. May be called often, from any thread."""
        now_s = self._clock()
        if phase != self._phase:
            self.end()
            self._phase, self._began_s = phase, now_s
            if not self._redraws:
                print(f"  {phase}", file=self._stream, flush=True)
        elif not self._redraws or now_s - self._drawn_s < REDRAW_S:
            return
        if self._redraws:
            self._drawn_s = now_s
            text = f"  {phase} {amount(done, total)} {now_s - self._began_s:.0f} s"
            print(f"\r\x1b[K{text[:LINE_WIDTH]}", end="", file=self._stream, flush=True)

    def end(self) -> None:
        """Leaves the line; the next output begins on a new one."""
        if self._phase and self._redraws:
            took_s = self._clock() - self._began_s
            print(f"\r\x1b[K  {self._phase} ({took_s:.1f} s)", file=self._stream, flush=True)
        self._phase = ""


def amount(done: int, total: int) -> str:
    """ "12/93 MiB" for bytes, "3/30" for small counts, nothing when there is nothing to tell."""
    if not done and not total:
        return ""
    if max(done, total) >= MIB:
        return f"{done // MIB}/{total // MIB} MiB" if total else f"{done // MIB} MiB"
    return f"{done}/{total}" if total else str(done)


class StartDisplay:
    """Implements `cluster.head.HeadObserver`.

    Args:
        on_listening: told the HTTP port and where the head is; returns the address for clients.
        stream: where to; None = stdout.
    """

    def __init__(
        self,
        model: str,
        *,
        has_keys: bool,
        on_listening: Callable[[int, str], str],
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        import sys

        self._model = model
        self._has_keys = has_keys
        self._register = on_listening
        self._stream = stream or sys.stdout
        self._line = PhaseLine(self._stream, clock)
        self._clock = clock
        self._began_s = clock()
        self._url = ""
        self._states: dict[str, str] = {}
        self._was_ready = False

    def on_listening(self, http: Address, control: Address) -> None:
        self._url = self._register(http.port, str(control))
        self._print(f"  listening on {self._url} (not ready yet)")

    def on_status(self, status: ClusterStatus) -> None:
        if status.is_stopping:
            self._show_stopping(status)
            return
        for replica in status.replicas:
            self._show_replica(replica)
        if status.replicas and all(replica.state == "ready" for replica in status.replicas) and not self._was_ready:
            self._was_ready = True
            self._line.end()
            self._print(banner(self._url, self._model, self._clock() - self._began_s, self._has_keys))

    def end(self) -> None:
        """Leaves the stream at the beginning of a line."""
        self._line.end()

    def _show_replica(self, replica: ReplicaStatus) -> None:
        if replica.phase:
            self._line.show(replica.phase, replica.done, replica.total)
        before = self._states.get(replica.replica_id)
        self._states[replica.replica_id] = replica.state
        if before == replica.state:
            return
        if self._was_ready and replica.state == "ready":
            self._line.end()
            self._print(f"  {replica.replica_id} is ready again")
        elif replica.state in ("backoff", "failed") and (self._was_ready or not replica.is_permanent):
            self._line.end()
            self._print(f"  {replica.replica_id}: {replica.state}: {replica.last_end or replica.note}")

    def _show_stopping(self, status: ClusterStatus) -> None:
        waits = f", {status.num_open_requests} open requests" if status.num_open_requests else ""
        self._line.show(f"stopping{waits}", 0, 0)

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def banner(url: str, model: str, seconds: float, has_keys: bool) -> str:
    """The address and what to do with it."""
    key = " -H 'Authorization: Bearer YOUR_KEY'" if has_keys else ""
    body = f'{{"model": "{model}", "max_tokens": 64, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return (
        f"\n{READY_WORDS} {seconds:.1f} s: {model} on {url}\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'\n"
    )
