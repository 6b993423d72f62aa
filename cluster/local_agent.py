"""The agent of the head's own host, as a child process: spawn, watch, spawn again, end.

How to start one is handed in by the launcher, which this package may not import. The child is bound to this process by
the kernel (parent death), or by a deadline after which it ends without a head; its workers are bound to it. One that an
earlier head of this host has left within that time is taken over. Called by the head.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cluster.agent_lock import LockHolder, lock_holder
from sonar.process import describe_exit
from sonar.transport import Address

logger = logging.getLogger(__name__)

RESPAWN_DELAYS_S = (0.0, 0.25, 0.5, 1.0, 2.0)
# An agent that has lived so long worked; what ended it was no fault of its start.
STABLE_S = 3.0
LOG_TAIL_BYTES = 4096


@dataclass(frozen=True)
class AgentTicket:
    """What a local agent has to know. state_dir: its own folder. outlive_s: how long it and its workers go on when the
    head is killed; 0: they die with it."""

    head: Address
    token_path: Path
    node_id: str
    state_dir: Path
    outlive_s: float = 0.0


class AgentProcess(NamedTuple):
    """How to start one: the argument list, program first, and the whole environment."""

    arguments: list[str]
    environment: dict[str, str]


AgentCommand = Callable[[AgentTicket], AgentProcess]
ExitHandler = Callable[[str], None]


class LeftAgent:
    """An agent that is no child of this process, with what is asked of a child's `Process`.

    Raises:
        ProcessLookupError: it has ended.
    """

    def __init__(self, holder: LockHolder) -> None:
        self.pid, self.head = holder.pid, holder.head
        self._pidfd = os.pidfd_open(holder.pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    @property
    def returncode(self) -> int | None:
        """None while it runs; how it has ended is not to be known."""
        return 0 if self._ended.is_set() else None

    async def wait(self) -> int:
        """Until it has ended."""
        await self._ended.wait()
        return 0

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._ended.set()

    def terminate(self) -> None:
        """SIGTERM."""
        if not self._ended.is_set():
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)


class LocalAgent:
    """Owner of the child process.

    Args:
        command: says how to start the child, which must bind its life to this process (see
            `sonar.process`).
        on_exit: told why, each time the child has ended unasked.
    """

    def __init__(self, ticket: AgentTicket, command: AgentCommand, on_exit: ExitHandler) -> None:
        self.node_id = ticket.node_id
        self.log_path = ticket.state_dir / "logs" / "agent.log"
        self._ticket = ticket
        self._command = command(ticket)
        self._on_exit = on_exit
        self._process: Process | LeftAgent | None = None
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int:
        """Of the present child; 0 when there is none."""
        return self._process.pid if self._process is not None else 0

    async def run(self) -> None:
        """Keeps a child alive until `stop`; ends when the last one has."""
        failures = 0
        while not self._stopping.is_set():
            began_s = time.monotonic()
            how = await self._run_once()
            if self._stopping.is_set():
                return
            failures = 0 if time.monotonic() - began_s > STABLE_S else failures + 1
            reason = f"the agent's process ended: {how}"
            logger.warning("%s; its log ends with:\n%s", reason, self._log_tail())
            self._on_exit(reason)
            await asyncio.sleep(RESPAWN_DELAYS_S[min(failures, len(RESPAWN_DELAYS_S)) - 1])

    def expect_end(self) -> None:
        """The child will end, or has been told to: do not start another."""
        self._stopping.set()

    async def stop(self, timeout_s: float) -> None:
        """Waits for the child, which has been told to end; after the time it is killed, and its workers by the kernel.

        A child's end is awaited in any case: none is left when this returns."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            logger.warning("the agent (pid %d) did not end within %.1f s: killing it", process.pid, timeout_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    def terminate(self) -> None:
        """SIGTERM to the child: it ends its workers, then itself."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    async def _run_once(self) -> str:
        """Until one has ended; how."""
        left = self._left_by_earlier_head()
        if left is not None:
            logger.info("the agent of an earlier head lives (pid %d)", left.pid)
            self._process = left
            if left.head != str(self._ticket.head):
                left.terminate()  # it would look for its head where none is
            await left.wait()
            return "it was an earlier head's"
        self.log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            # A session of its own: a terminal's Ctrl-C is for the head, which then ends its agent in order.
            self._process = await asyncio.create_subprocess_exec(
                *self._command.arguments,
                env=self._command.environment,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return describe_exit(await self._process.wait())

    def _left_by_earlier_head(self) -> LeftAgent | None:
        holder = lock_holder(self._ticket.state_dir)
        if holder is None:
            return None
        try:
            return LeftAgent(holder)
        except ProcessLookupError:
            return None

    def _log_tail(self) -> str:
        try:
            return self.log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        except OSError:
            return ""
