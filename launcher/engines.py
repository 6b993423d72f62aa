"""The engines that an agent can start: a name, as deployments and messages have it, and what builds it in a worker.

A head names an engine, never code: what a name stands for is decided on the host that runs it, here or by the
`--engine` flag of its agent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sonar.errors import ConfigError

ENGINES: dict[str, str] = {"sonar": "sonar.engine:build_engine"}
_ENTRY = re.compile(r"([A-Za-z0-9._-]+)=([A-Za-z_][\w.]*:[A-Za-z_]\w*)")


def engine_table(extra: Sequence[str]) -> dict[str, str]:
    """The known engines and those given as "NAME=MODULE:FUNCTION".

    Raises:
        ConfigError: an item has another form.
    """
    table = dict(ENGINES)
    for item in extra:
        match = _ENTRY.fullmatch(item)
        if match is None:
            raise ConfigError(f"--engine {item!r}: write NAME=MODULE:FUNCTION, e.g. sonar={ENGINES['sonar']}")
        table[match[1]] = match[2]
    return table
