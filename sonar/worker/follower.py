"""The process of a replica's rank other than 0: meet the lead, load a part of the model, follow, end with an exit code.

The lead decides when it ends; of a failure it tells the head itself, with its rank, step and traceback, before its end
makes the other ranks fail as well. Torch-free itself, as the lead's main is. Called by the launcher's worker main.
"""

from __future__ import annotations

import importlib
import logging
import signal
import traceback
from types import FrameType
from typing import Protocol, cast

from sonar.config import EngineConfig
from sonar.distributed.rank_link import RankLink
from sonar.errors import ConfigError, SonarError, UserError
from sonar.process import EXIT_USER_ERROR
from sonar.worker.lead import LeadSpec, let_the_cause_be_told, rank_spec

logger = logging.getLogger(__name__)


class Following(Protocol):
    """What a builder returns; `sonar.worker.follower_loop.FollowerLoop` is one."""

    num_steps: int

    def run(self) -> None:
        """Follows until the lead ends the steps."""
        ...


class FollowerBuilder(Protocol):
    """Builds a rank's part; raises `UserError` for what the same start would meet again."""

    def __call__(self, config: EngineConfig, *, link: RankLink) -> Following: ...


class _TermFlag:
    """SIGTERM ends a rank that is still loading. Later it is the lead that ends: it drains first, this rank with it."""

    is_serving = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.is_serving:
            raise SystemExit(0)


def main(spec: LeadSpec) -> int:
    """Runs the rank's life. Returns the exit code: 0, EXIT_USER_ERROR, or 1. Call it from the process's main thread."""
    flag = _TermFlag()
    signal.signal(signal.SIGTERM, flag.on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        link = RankLink(rank_spec(spec))
    except SonarError as error:
        logger.error("%s", error)
        return 1
    loop: Following | None = None
    try:
        loop = load_follower_builder(spec.engine_entry)(spec.engine_config, link=link)
        flag.is_serving = True
        loop.run()
    except Exception as error:  # noqa: BLE001 - whatever it is, this incarnation is over, and the head is to know why
        _report(link, loop, error)
        return EXIT_USER_ERROR if loop is None and isinstance(error, UserError) else 1
    logger.info("the lead has ended the steps")
    link.close()
    return 0


def load_follower_builder(entry: str) -> FollowerBuilder:
    """`build_follower` of the module that builds the engine.

    Raises:
        ConfigError: that engine has none: it runs on one rank.
    """
    module_name = entry.partition(":")[0]
    try:
        return cast(FollowerBuilder, importlib.import_module(module_name).build_follower)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"engine {entry!r} runs on one rank alone: {error}", param="tp_size") from error


def _report(link: RankLink, loop: Following | None, error: Exception) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    text = traceback.format_exc()
    let_the_cause_be_told(error)
    step = loop.num_steps - 1 if loop is not None else -1
    message = error.message if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    is_mistake = loop is None and isinstance(error, UserError)  # whose sentence says it all
    logger.error("rank %d is over:\n%s", link.spec.rank, message if is_mistake else text)
    if is_mistake:
        logger.debug("%s", text)
    link.report(step, message, text, is_user_error=is_mistake)
