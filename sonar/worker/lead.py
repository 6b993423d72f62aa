"""The process of a replica's rank 0, its lead: connect, build the engine, serve, end with an exit code that says how.

Torch-free itself: the engine's builder is named by the agent that starts the process ("module:function") and imported
here. Handles SIGTERM (drain); is told everything else by its head. Called by the launcher's worker main.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol, cast

import msgspec

from sonar.config import EngineConfig
from sonar.distributed.rank_link import RankLink, RankSpec
from sonar.errors import ConfigError, RemoteError, SonarError, UserError
from sonar.messages import Fault, HeadToLead, LeadHello, LeadReady, LoadProgress
from sonar.process import EXIT_USER_ERROR
from sonar.transport import Address, PeerId, PeerKind
from sonar.transport_client import Client
from sonar.worker.lead_loop import LeadLoop, PeerPort, ServingEngine

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
FAULT_LINGER_MS = 2000
PROGRESS_INTERVAL_S = 0.1
CONSEQUENCE_DELAY_S = 0.5


class LeadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a lead, or another rank, is started with; made by its agent, on the same host.

    Attributes:
        other_heads: addresses of further heads, of which one may lead instead.
        engine_entry: "module:function" that builds the engine (see `EngineBuilder`).
    """

    head_host: str
    head_port: int
    token: str
    replica_id: str
    incarnation: int
    rank: int
    engine_entry: str
    engine_config: EngineConfig
    other_heads: list[Address] = []


class Built(Protocol):
    """What a builder returns; `sonar.engine.BuiltEngine` is one."""

    @property
    def engine(self) -> ServingEngine:
        """Ready for requests."""
        ...

    @property
    def config(self) -> EngineConfig:
        """Without `auto`."""
        ...

    @property
    def num_blocks(self) -> int:
        """KV blocks, as in `LeadStats.blocks_total`."""
        ...

    @property
    def max_model_len(self) -> int:
        """Prompt + output tokens of a request."""
        ...

    @property
    def weights_bytes(self) -> int:
        """Memory of the weights."""
        ...

    @property
    def ops_backend(self) -> str:
        """Name of the op table."""
        ...

    @property
    def exchange(self) -> PeerPort | None:
        """Of KV blocks with other replicas."""
        ...

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences that the owner of the server has to be told."""
        ...


class EngineBuilder(Protocol):
    """Builds an engine; raises `UserError` for what the same start would meet again."""

    def __call__(
        self, config: EngineConfig, progress: Callable[[str, int, int], None], *, incarnation: int, **more: Any
    ) -> Built:
        """more: `link`, a `RankLink`, when the replica has more ranks than one."""
        ...


class _TermFlag:
    """Remembers SIGTERM. While the engine is being built there is nothing to drain: the process ends at once."""

    def __init__(self) -> None:
        self.is_set = False
        self.is_serving = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True
        if not self.is_serving:
            raise SystemExit(0)


class _ProgressReport:
    """Tells the head of progress, at most ten times a second a phase; the last figure of a phase always."""

    def __init__(self, link: Client, incarnation: int) -> None:
        self._link = link
        self._incarnation = incarnation
        self._last = ("", 0.0)

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if phase == self._last[0] and done != total and now - self._last[1] < PROGRESS_INTERVAL_S:
            return
        self._last = (phase, now)
        self._link.send(LoadProgress(incarnation=self._incarnation, phase=phase, done=done, total=total))


def main(spec: LeadSpec) -> int:
    """Runs the lead's life. Returns the exit code: 0 drained, EXIT_USER_ERROR, or 1.

    Call it from the main thread of the process."""
    flag = _TermFlag()
    signal.signal(signal.SIGTERM, flag.on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the head's to handle
    assert spec.rank == 0, f"rank {spec.rank} leads no replica"
    peer = PeerId(PeerKind.LEAD, spec.replica_id, spec.incarnation)
    head = Address(spec.head_host, spec.head_port)
    link = Client(head, spec.token, peer, HeadToLead, others=spec.other_heads)
    try:
        link.connect(CONNECT_TIMEOUT_S)
    except SonarError as error:
        logger.error("%s", error)
        link.close(0)
        return 1
    return _serve(spec, link, flag)


def _serve(spec: LeadSpec, link: Client, flag: _TermFlag) -> int:
    hello = LeadHello(incarnation=spec.incarnation, replica_id=spec.replica_id, pid=os.getpid())
    loop: LeadLoop | None = None
    try:
        link.send(hello)
        report = _ProgressReport(link, spec.incarnation)
        # A link of its own: the store is asked by torch's threads too.
        more = {"link": RankLink(rank_spec(spec))} if spec.engine_config.parallel.world_size > 1 else {}
        built = load_builder(spec.engine_entry)(spec.engine_config, report, incarnation=spec.incarnation, **more)
        ready = _ready_message(spec, built)
        flag.is_serving = True
        link.send(ready)
        loop = LeadLoop(built.engine, link, hello, ready, lambda: flag.is_set, time.monotonic, built.exchange)
        loop.run()
    except UserError as error:
        _report_fault(spec, link, loop, error)
        return EXIT_USER_ERROR if loop is None else 1
    except Exception as error:  # noqa: BLE001 - whatever it is, this incarnation is over, and the head is to know why
        _report_fault(spec, link, loop, error)
        return 1
    logger.info("drained")
    link.close()
    built.engine.close()
    return 0


def let_the_cause_be_told(error: Exception) -> None:
    """Waits a little before a fault is reported that follows from another rank's end: that one, or its agent, is to be
    heard first, for it knows why."""
    if isinstance(error, RemoteError):
        time.sleep(CONSEQUENCE_DELAY_S)


def rank_spec(spec: LeadSpec) -> RankSpec:
    """The part of a spec by which a rank meets the others."""
    return RankSpec(
        head_host=spec.head_host,
        head_port=spec.head_port,
        token=spec.token,
        replica_id=spec.replica_id,
        incarnation=spec.incarnation,
        rank=spec.rank,
        world_size=spec.engine_config.parallel.world_size,
        other_heads=spec.other_heads,
    )


def load_builder(entry: str) -> EngineBuilder:
    """Imports "module:function".

    Raises:
        ConfigError: there is no such thing.
    """
    module_name, _, name = entry.partition(":")
    try:
        return cast(EngineBuilder, getattr(importlib.import_module(module_name), name))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"engine entry {entry!r} cannot be imported: {error}", param="engine") from error


def _ready_message(spec: LeadSpec, built: Built) -> LeadReady:
    return LeadReady(
        incarnation=spec.incarnation,
        replica_id=spec.replica_id,
        num_blocks=built.num_blocks,
        block_size=built.config.cache.block_size,
        max_model_len=built.max_model_len,
        max_num_requests=built.config.scheduler.max_num_requests * built.config.parallel.num_groups,
        weights_bytes=built.weights_bytes,
        ops_backend=built.ops_backend,
        notices=built.notices,
    )


def _report_fault(spec: LeadSpec, link: Client, loop: LeadLoop | None, error: Exception) -> None:
    """Tells the head and the log. SIGTERM is ignored from here: the exit code is to be the fault's."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    text = traceback.format_exc()
    let_the_cause_be_told(error)
    step = loop.num_steps - 1 if loop is not None else -1
    message = error.message if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    is_mistake = loop is None and isinstance(error, UserError)  # whose sentence says it all
    logger.error("incarnation %d is over:\n%s", spec.incarnation, message if is_mistake else text)
    if is_mistake:
        logger.debug("%s", text)
    link.send(
        Fault(
            incarnation=spec.incarnation,
            rank=spec.rank,
            step=step,
            error=message[:4000],
            traceback=text[-16000:],
            is_user_error=is_mistake,
        )
    )
    link.close(FAULT_LINGER_MS)
