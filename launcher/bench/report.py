"""Summaries as a table for people and as JSON for programs. Knows nothing of how they were measured."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from launcher.bench.stats import Spread, Summary
from sonar.errors import ConfigError


class Run(msgspec.Struct, frozen=True):
    """One measured run of a sweep and what tells it from the others, e.g. "8 streams"."""

    label: str
    settings: dict[str, Any]
    summary: Summary


_ROWS: tuple[tuple[str, str], ...] = (
    ("requests done / failed", "{s.completed} / {s.failed}"),
    ("duration, s", "{s.duration_s:.2f}"),
    ("requests/s", "{s.requests_per_s:.2f}"),
    ("output tokens/s", "{s.output_tokens_per_s:.1f}"),
    ("all tokens/s", "{s.total_tokens_per_s:.1f}"),
    ("prompt tokens (cached)", "{s.prompt_tokens} ({s.cached_tokens})"),
    ("output tokens", "{s.output_tokens}"),
)
_LATENCIES = (("TTFT, ms", "ttft_ms"), ("ITL, ms", "itl_ms"), ("TPOT, ms", "tpot_ms"), ("end to end, ms", "e2e_ms"))


def table(runs: Sequence[Run]) -> str:
    """A text table, one column a run."""
    rows = [["", *(run.label for run in runs)]]
    rows += [[name, *(form.format(s=run.summary) for run in runs)] for name, form in _ROWS]
    for name, attribute in _LATENCIES:
        spreads: list[Spread | None] = [getattr(run.summary, attribute) for run in runs]
        for part in ("p50", "p90", "p99"):
            rows.append([f"{name} {part}", *(f"{getattr(s, part):.2f}" if s else "-" for s in spreads)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    lines += [f"{run.label}: {count} x {error}" for run in runs for error, count in run.summary.errors.items()]
    return "\n".join(lines)


def write_json(path: str, kind: str, runs: Sequence[Run] | dict[str, Any]) -> None:
    """Writes what was measured and on what; raises `ConfigError` when the file cannot be written."""
    document = {
        "kind": kind,
        "machine": {
            "platform": platform.platform(),
            "processor": platform.machine(),
            "python": platform.python_version(),
        },
        "runs": msgspec.to_builtins(runs),
    }
    try:
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}", param="json") from error
