"""The agent of the head's own host, as a child process: spawn, watch, spawn again, end.

How to start one is handed in by the launcher, which this package may not import. The child is bound to this process by
the kernel (parent death); its workers are bound to it. Called by the head.
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

from sonar.process import describe_exit
from sonar.transport import Address

logger = logging.getLogger(__name__)

RESPAWN_DELAYS_S = (0.0, 0.25, 0.5, 1.0, 2.0)
# An agent that has lived so long worked; what ended it was no fault of its start.
STABLE_S = 3.0
LOG_TAIL_BYTES = 4096


@dataclass(frozen=True)
class AgentTicket:
    """What a local agent has to know. state_dir: its own folder."""

    head: Address
    token_path: Path
    node_id: str
    state_dir: Path


class AgentProcess(NamedTuple):
    """How to start one: the argument list, program first, and the whole environment."""

    arguments: list[str]
    environment: dict[str, str]


AgentCommand = Callable[[AgentTicket], AgentProcess]
ExitHandler = Callable[[str], None]


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
        self._command = command(ticket)
        self._on_exit = on_exit
        self._process: Process | None = None
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
            code = await self._run_once()
            if self._stopping.is_set():
                return
            failures = 0 if time.monotonic() - began_s > STABLE_S else failures + 1
            reason = f"the agent's process ended: {describe_exit(code)}"
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

    async def _run_once(self) -> int:
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
        return await self._process.wait()

    def _log_tail(self) -> str:
        try:
            return self.log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        except OSError:
            return ""
