"""The real engine, one of whose ranks raises or hangs in a step. For an agent: `--engine faulty=tests...:build_engine`.

Which rank, at which step and how is said in the model's name: "<folder>?rank=1&step=5&how=raise".
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any
from urllib.parse import parse_qsl

import sonar.engine
from sonar.config import EngineConfig

FAULTY_ENGINE_FLAG = "faulty=tests.integration.faulty_engine:build_engine"


def build_engine(config: EngineConfig, *arguments: Any, **named: Any) -> Any:
    config, fault = _split(config)
    built = sonar.engine.build_engine(config, *arguments, **named)
    if fault.get("rank") == "0":
        _plant(built.engine._executor._runner, fault, named["incarnation"])
    return built


def build_follower(config: EngineConfig, *, link: Any) -> Any:
    config, fault = _split(config)
    loop = sonar.engine.build_follower(config, link=link)
    if fault.get("rank") == str(config.parallel.rank):
        _plant(loop._runner, fault, link.spec.incarnation)
    return loop


def _split(config: EngineConfig) -> tuple[EngineConfig, dict[str, str]]:
    model, _, query = config.model.partition("?")
    return dataclasses.replace(config, model=model), dict(parse_qsl(query))


def _plant(runner: Any, fault: dict[str, str], incarnation: int) -> None:
    """In the first incarnation alone: the next one is to serve."""
    if incarnation > 1:
        return
    compute = runner._compute

    def faulty(batch: Any) -> Any:
        if batch.step == int(fault["step"]):
            if fault["how"] == "raise":
                raise ArithmeticError(f"planted in step {batch.step}")
            time.sleep(3600)
        return compute(batch)

    runner._compute = faulty
