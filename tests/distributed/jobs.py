"""What the rank processes of `rank_pool` are told to do; each returns plain data."""

from __future__ import annotations

from typing import Any

from sonar.config import EngineConfig
from sonar.distributed.rank_link import RankLink
from sonar.engine import build_engine, build_follower
from tests.worker.request_mix import everything, run


def requests(config: EngineConfig, link: RankLink) -> Any:
    """Serves the requests of the equality tests; the lead returns their outputs, the others their number of steps."""
    if config.parallel.rank:
        loop = build_follower(config, link=link)
        loop.run()
        return loop.num_steps
    built = build_engine(config, link=link, incarnation=link.spec.incarnation)
    outputs = run(built.engine, everything())
    steps = built.engine.stats().steps
    built.engine.close()
    return {name: (output.tokens, output.alternatives) for name, output in outputs.items()}, steps
