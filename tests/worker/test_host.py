"""Facts of the host, read from made-up control groups."""

from __future__ import annotations

import os

import psutil
import pytest

from sonar.worker.host import available_memory, usable_cpus

GIB = 1 << 30


def write(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu_dot_max": "50000 100000\n"}, 1),
        ({"cpu_dot_max": "100000 100000\n"}, 1),
        ({"cpu__cpu.cfs_quota_us": "100000\n", "cpu__cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_a_quota_bounds_the_cpus(tmp_path, files, quota):
    assert usable_cpus(write(tmp_path, **files)) == quota


@pytest.mark.parametrize(
    "files", [{}, {"cpu_dot_max": "max 100000\n"}, {"cpu__cpu.cfs_quota_us": "-1\n", "cpu__cpu.cfs_period_us": "9\n"}]
)
def test_without_a_quota_the_affinity_counts(tmp_path, files):
    assert usable_cpus(write(tmp_path, **files)) == len(os.sched_getaffinity(0))


def test_memory_is_what_the_group_still_allows(tmp_path):
    group = write(
        tmp_path,
        memory_dot_max=f"{3 << 20}\n",
        memory_dot_current=f"{2 << 20}\n",
        memory_dot_stat=f"anon 5\ninactive_file {1 << 19}\n",
    )
    assert available_memory(group) == (3 << 20) - (2 << 20) + (1 << 19)


@pytest.mark.parametrize("limit", ["max", str(1 << 60)])
def test_memory_without_a_tighter_limit_is_the_hosts(tmp_path, limit):
    group = write(tmp_path, memory_dot_max=limit, memory_dot_current="1000")
    assert available_memory(group) == pytest.approx(psutil.virtual_memory().available, rel=0.1)
