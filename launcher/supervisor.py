"""The workers of one host: spawn, watch, end. Owns their processes; decides nothing about replicas.

Every worker leads a session of its own and dies with this process, however that ends; an exit is seen by the kernel's
word (a pidfd in the caller's poller), never by asking in turns. Called by the agent's loop, all from one thread that
lives as long as the process: the parent-death signal is tied to the thread that made the child.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path

import msgspec

from cluster.messages import RunningWorker, StartFailed, StartWorker, WorkerExited, WorkerRef, WorkerStarted
from launcher.leftovers import Leftovers
from launcher.worker_log import WorkerLog
from launcher.worker_main import WorkerSetup, run_worker
from sonar.errors import SonarError
from sonar.process import kill_session, signal_group
from sonar.transport import Address
from sonar.worker.lead import LeadSpec

logger = logging.getLogger(__name__)

STACK_DUMP_S = 0.5
REAP_TIMEOUT_S = 2.0
TRIM_INTERVAL_S = 10.0


@dataclass
class _Worker:
    """A live process. order: by which it was started. kill_at_s: when SIGKILL is due; was_asked: its end is wanted."""

    ref: WorkerRef
    process: SpawnProcess
    pid: int
    pidfd: int
    log: WorkerLog
    order: StartWorker
    kill_at_s: float = math.inf
    was_asked: bool = False


class Supervisor:
    """Owner of this host's worker processes.

    Args:
        state_dir: logs and the list of live workers are kept there.
        heads: their addresses, the present one first; with the token handed to the workers.
        mark: see `Leftovers`. engines: name -> "module:function".
        clock: monotonic seconds.
    """

    def __init__(
        self,
        state_dir: Path,
        mark: str,
        heads: Callable[[], Sequence[Address]],
        token: str,
        engines: Mapping[str, str],
        clock: Callable[[], float],
    ) -> None:
        self._logs = state_dir / "logs"
        self._leftovers = Leftovers(state_dir / "workers.json", mark)
        self._heads = heads
        self._token = token
        self._engines = engines
        self._clock = clock
        self._context = multiprocessing.get_context("spawn")
        self._workers: dict[WorkerRef, _Worker] = {}
        self._next_trim_s = 0.0

    def sweep(self) -> list[int]:
        """Kills what a predecessor left behind; the pids. Call it once, before the first start."""
        return self._leftovers.sweep()

    def running(self) -> list[RunningWorker]:
        """Workers whose exit has not been reported."""
        return [
            RunningWorker(
                worker=w.ref,
                pid=w.pid,
                devices=w.order.devices,
                log_path=str(w.log.path),
                world_size=w.order.world_size,
                settings=w.order.settings,
            )
            for w in self._workers.values()
        ]

    def pidfds(self) -> list[int]:
        """Descriptors that become readable when a worker has ended."""
        return [worker.pidfd for worker in self._workers.values()]

    def start(self, message: StartWorker) -> WorkerStarted | StartFailed:
        """Spawns a worker."""
        ref = message.worker
        entry = self._engines.get(message.engine)
        if entry is None:
            known = ", ".join(sorted(self._engines))
            return StartFailed(worker=ref, error=f"no engine {message.engine!r} here; known: {known}", permanent=True)
        if ref in self._workers:
            return StartFailed(worker=ref, error="that worker runs already", permanent=False)
        head, *other_heads = self._heads()
        log = WorkerLog(self._logs, ref.replica_id, ref.rank)
        setup = WorkerSetup(
            agent_pid=os.getpid(),
            log_path=str(log.path),
            devices=message.devices,
            lead=LeadSpec(
                head_host=head.host,
                head_port=head.port,
                other_heads=other_heads,
                token=self._token,
                replica_id=ref.replica_id,
                incarnation=ref.incarnation,
                rank=ref.rank,
                engine_entry=entry,
                engine_config=message.engine_config,
            ),
        )
        process = self._context.Process(target=run_worker, args=(msgspec.msgpack.encode(setup),), name=str(log.path))
        try:
            process.start()
            assert process.pid is not None
            pid, pidfd = process.pid, os.pidfd_open(process.pid)
        except OSError as error:
            if process.pid is not None:
                process.kill()
            return StartFailed(worker=ref, error=f"cannot start a process: {error}", permanent=False)
        self._workers[ref] = _Worker(ref, process, pid, pidfd, log, message)
        self._write_list()
        return WorkerStarted(worker=ref, pid=pid, log_path=str(log.path))

    def stop(self, ref: WorkerRef, grace_s: float) -> None:
        """SIGTERM to a worker, SIGKILL to its session after the grace; an unknown one has ended already."""
        worker = self._workers.get(ref)
        if worker is not None:
            worker.was_asked = True
            worker.kill_at_s = min(worker.kill_at_s, self._clock() + grace_s)
            _signal(worker, signal.SIGTERM)

    def kill(self, replica_id: str, incarnation: int, *, dump_stacks: bool = False) -> None:
        """SIGKILL to every rank of an incarnation here; with `dump_stacks` half a second after asking for stacks."""
        for ref, worker in self._workers.items():
            if (ref.replica_id, ref.incarnation) == (replica_id, incarnation):
                worker.was_asked = True
                if dump_stacks:
                    _signal(worker, signal.SIGUSR1)
                    worker.kill_at_s = min(worker.kill_at_s, self._clock() + STACK_DUMP_S)
                else:
                    _kill(worker)

    def stop_all(self, grace_s: float) -> None:
        """`stop` for every worker."""
        for ref in list(self._workers):
            self.stop(ref, grace_s)

    def kill_all(self) -> None:
        """SIGKILL to every worker, without waiting: this process is about to end."""
        for worker in self._workers.values():
            _kill(worker)

    def next_deadline_s(self) -> float:
        """When `tick` has something to do."""
        return min((worker.kill_at_s for worker in self._workers.values()), default=math.inf)

    def tick(self) -> None:
        """Carries out due kills and trims logs."""
        now = self._clock()
        for worker in self._workers.values():
            if now >= worker.kill_at_s:
                worker.kill_at_s = math.inf
                _kill(worker)
        if now >= self._next_trim_s:
            self._next_trim_s = now + TRIM_INTERVAL_S
            for worker in self._workers.values():
                if worker.log.trim():
                    logger.warning("%s grew too long; its content is in .1", worker.log.path)

    def reap(self) -> list[WorkerExited]:
        """Reports of workers that have ended since the last call; nothing of their sessions is left then."""
        ended = [worker for worker in self._workers.values() if _has_ended(worker)]
        reports = [self._bury(worker) for worker in ended]
        if reports:
            self._write_list()
        return reports

    def _bury(self, worker: _Worker) -> WorkerExited:
        try:
            kill_session(
                worker.pid, REAP_TIMEOUT_S
            )  # before its zombie is collected: until then its pid cannot be another's
        except SonarError as error:
            logger.error("%s: %s", worker.ref, error)
        worker.process.join(REAP_TIMEOUT_S)
        code = worker.process.exitcode
        assert code is not None, worker.ref
        worker.process.close()
        os.close(worker.pidfd)
        del self._workers[worker.ref]
        return WorkerExited(
            worker=worker.ref,
            pid=worker.pid,
            exit_code=max(code, -1),
            signal=max(-code, 0),
            log_tail=worker.log.tail(),
            was_asked=worker.was_asked,
        )

    def _write_list(self) -> None:
        self._leftovers.write(worker.pid for worker in self._workers.values())


def _signal(worker: _Worker, number: int) -> None:
    """To the worker itself: what its libraries have started is for it to end."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(worker.pidfd, number)


def _kill(worker: _Worker) -> None:
    """To its whole group, and to itself: a process that was just spawned leads no group yet."""
    signal_group(worker.pid, signal.SIGKILL)
    _signal(worker, signal.SIGKILL)


def _has_ended(worker: _Worker) -> bool:
    try:
        return os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True  # multiprocessing collects its ended children when it starts a new one
