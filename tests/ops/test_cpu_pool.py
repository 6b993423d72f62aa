"""The kernels' threads: many callers at once, counts that change, forks, and calls that must not be lost or doubled."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from tests.ops.cpu_case import LEVELS, at_level, build, random_matrix, with_threads

_cpu = pytest.importorskip("sonar.ops._cpu", reason="the CPU kernels are not built here")


def test_a_thousand_short_calls_on_changing_thread_counts() -> None:
    draw, linear = random.Random(0), build("int8").linear([random_matrix("Q4_1", 320, 96)], None)
    x_TK = torch.randn(40, 96)
    with with_threads(1):
        expected = linear(x_TK)
    for _ in range(40):
        with with_threads(draw.choice([1, 2, 3, 5])):
            for _ in range(25):
                first = draw.randrange(40)
                rows = slice(first, draw.randrange(first + 1, 41))
                assert linear(x_TK[rows]).equal(expected[rows])


def test_callers_in_several_threads_get_their_own_results() -> None:
    linears = [build("int8").linear([random_matrix("Q4_1", 640, 96, seed=seed)], None) for seed in range(4)]
    x_TK = torch.randn(64, 96)
    expected = [linear(x_TK) for linear in linears]
    wrong: list[int] = []

    def call(index: int) -> None:
        for _ in range(60):
            if not linears[index](x_TK).equal(expected[index]):
                wrong.append(index)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    with with_threads(3):
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(timeout=60)
    assert not wrong and not any(caller.is_alive() for caller in callers)


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_random_calls_under_load_and_the_thread_sanitizer_run_every_chunk_once(tmp_path: Path) -> None:
    here, root, program = Path(__file__).parent, Path(__file__).parents[2], tmp_path / "pool_stress"
    sources = [str(here / "pool_stress.cpp"), str(root / "csrc/cpu/pool.cpp"), f"-I{root / 'csrc/cpu'}"]
    flags = ["-std=gnu++17", "-O1", "-g", "-fsanitize=thread", "-pthread"]
    subprocess.run(["c++", *flags, *sources, "-o", str(program)], check=True, timeout=120)
    command = [str(program), "1.5", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "unexpected memory mapping" in run.stderr:  # addresses are random over more bits than the sanitizer knows
        run = subprocess.run(["setarch", "-R", *command], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def _sum_in_child(connection: multiprocessing.connection.Connection) -> None:
    linear = build("float32").linear([random_matrix("Q8_0", 640, 96)], None)
    connection.send(float(linear(torch.ones(8, 96)).double().sum()))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_threads_of_its_own() -> None:
    linear = build("float32").linear([random_matrix("Q8_0", 640, 96)], None)
    with with_threads(2):
        expected = float(linear(torch.ones(8, 96)).double().sum())
        here, there = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=_sum_in_child, args=(there,))
        child.start()
        assert here.poll(60), "the child hangs"
        assert here.recv() == expected
        child.join(timeout=60)
        assert child.exitcode == 0


def test_threads_are_clamped_and_levels_are_checked() -> None:
    with with_threads(0):
        assert _cpu.num_threads() == 1
    with pytest.raises(ValueError, match="sse9 is not among levels"):
        _cpu.set_level("sse9")
    for level in LEVELS:
        with at_level(level):
            assert _cpu.level() == level
    assert _cpu.level() == LEVELS[0]


def test_wrong_arguments_are_python_errors() -> None:
    with pytest.raises(TypeError, match="rms_norm takes 7 arguments, not 1"):
        _cpu.rms_norm(1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="type 99"):
        _cpu.linear_plan(32, 99, 0, 16, 0, 0)
    with pytest.raises(ValueError, match="k 33"):
        _cpu.pack(3, 0, 0, 16, 33, 0)
    with pytest.raises(TypeError):
        _cpu.set_num_threads("two")  # type: ignore[arg-type]
    assert _cpu.packed_bytes(3, 16, 33) == 0
