"""What a worker process does before it is a worker: session, parent death, log, devices; then the main of its rank.

Started by multiprocessing's spawn from `launcher.supervisor`; the first code of ours in the new process.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys

import msgspec

from sonar.process import die_with_parent
from sonar.worker import follower, lead


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """From the agent to its new process, through the pipe that spawn reads.

    Attributes:
        agent_pid: dies with it. log_path: gets all output. devices: accelerators it may see; empty leaves that alone.
    """

    agent_pid: int
    log_path: str
    devices: list[int]
    lead: lead.LeadSpec


def run_worker(encoded: bytes) -> None:
    """Never returns: ends the process with the lead's exit code.

    Args:
        encoded: a `WorkerSetup` in MessagePack.
    """
    setup = msgspec.msgpack.decode(encoded, type=WorkerSetup)
    os.setsid()  # a session of its own: whatever it starts can be found and killed with it
    die_with_parent(setup.agent_pid)
    _redirect_output(setup.log_path)
    if setup.devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, setup.devices))
    code = 1
    try:
        code = lead.main(setup.lead) if setup.lead.rank == 0 else follower.main(setup.lead)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        logging.exception("the worker failed outside its loop")
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a library's thread that does not end must not keep a worker that has said its last word.
    os._exit(code)


def _redirect_output(path: str) -> None:
    """Python's and native code's output goes to the log, and all threads' stacks at fatal signals and SIGUSR1."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(nothing)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
