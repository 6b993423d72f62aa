"""An installation without a compiler has no compiled module: the engine then runs on the reference, and says so."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import logging, sys
logging.basicConfig(level="WARNING")
sys.modules["sonar.ops._cpu"] = None  # what an import of it then raises is an ImportError
import torch
from sonar.errors import ConfigError
from sonar.ops.registry import select_ops
print(select_ops(torch.device("cpu"), torch.float32).name)
try:
    select_ops(torch.device("cpu"), torch.float32, "cpu")
except ConfigError as error:
    print(error)
"""


def test_the_reference_takes_over_and_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=100, check=True)
    name, refusal = done.stdout.splitlines()
    assert name == "reference"
    assert "C++ compiler" in done.stderr and "slow" in done.stderr
    assert "C++ compiler" in refusal
