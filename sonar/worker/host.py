"""What this process may use of its host: CPUs and memory, limits of its control group included.

Facts only, no choice. Called when `auto` settings are resolved.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def usable_cpus(cgroup: Path = _CGROUP) -> int:
    """CPUs of the process's affinity mask, no more than its CPU quota pays for; at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota(cgroup)
    return max(1, min(count, math.ceil(quota)) if quota else count)


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that can be had without swapping: what the host has left, or what the control group still allows."""
    available = psutil.virtual_memory().available
    limit = _read_int(cgroup / "memory.max") or _read_int(cgroup / "memory/memory.limit_in_bytes")
    used = _read_int(cgroup / "memory.current") or _read_int(cgroup / "memory/memory.usage_in_bytes")
    if limit is None or used is None:
        return available
    # The group's figure counts files it has read, which the system drops when memory is asked for.
    return max(0, min(available, limit - used + _inactive_file(cgroup)))


def _cpu_quota(cgroup: Path) -> float | None:
    """CPUs' worth of time a period, None when not limited (cgroup v2, then v1)."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        version_1 = [_read_int(cgroup / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        return version_1[0] / version_1[1] if version_1[0] and version_1[1] and version_1[0] > 0 else None
    return None if quota == "max" else int(quota) / int(period)


def _inactive_file(cgroup: Path) -> int:
    for name in ("memory.stat", "memory/memory.stat"):
        try:
            lines = (cgroup / name).read_text().splitlines()
        except OSError:
            continue
        fields = dict(line.split()[:2] for line in lines)
        return int(fields.get("inactive_file", 0))
    return 0


def _read_int(path: Path) -> int | None:
    """The number in a file; None when there is no file or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
