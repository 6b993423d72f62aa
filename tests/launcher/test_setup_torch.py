"""Which torch launcher/setup.sh installs: pip, uv and the GPU are stand-ins that say what they were asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
CPU_WHEEL = {"version": "2.13.0+cpu", "requires_dist": ["filelock", 'nvidia-x; platform_system == "Linux"']}
LIGHT_WHEEL = {"version": "2.13.0", "requires_dist": ["filelock", "sympy>=1.13"]}
CUDA_WHEEL = {"version": "2.13.0", "requires_dist": ["filelock", 'nvidia-nccl-cu13==2; platform_system == "Linux"']}


def install(tmp_path: Path, wheel: dict[str, object], *, gpu: bool = False, uv: str = "works") -> list[str]:
    """Runs install_torch; returns the installations it asked for. uv: "works", "fails" or "absent"."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "report.json").write_text(json.dumps({"install": [{"metadata": wheel}]}))
    tools = tmp_path / "tools"
    tools.mkdir()
    if uv != "absent":
        (tools / "uv").write_text(
            f'#!/bin/bash\necho "uv $*" >>{tmp_path}/calls\n{"exit 1" if uv == "fails" else ""}\n'
        )
        (tools / "uv").chmod(0o755)
    body = f"""
    ROOT={tmp_path}; source {REPO}/launcher/setup.sh
    torch_is_there() {{ return 1; }}
    has_gpu() {{ {"true" if gpu else "false"}; }}
    pip() {{
        case "$*" in
        *--dry-run*) cat {tmp_path}/report.json ;;
        *) echo "pip $*" >>{tmp_path}/calls; case "$*" in "install uv") return 1 ;; esac ;;
        esac
    }}
    install_torch || exit
    """
    path = f"{tools}:/usr/bin:/bin"
    subprocess.run(["bash", "-c", body], check=True, timeout=30, env={**os.environ, "PATH": path})
    return [line.replace(str(tmp_path), "") for line in (tmp_path / "calls").read_text().splitlines()]


PLAIN = "pip install torch==2.13.0"
THROUGH_UV = "uv pip install --python /.venv/bin/python --torch-backend=cpu torch==2.13.0"


@pytest.mark.parametrize("wheel", [CPU_WHEEL, LIGHT_WHEEL])
def test_pip_is_enough_where_it_offers_a_build_without_cuda(tmp_path: Path, wheel: dict[str, object]) -> None:
    assert install(tmp_path, wheel) == [PLAIN]


def test_a_gpu_host_takes_what_pip_offers(tmp_path: Path) -> None:
    assert install(tmp_path, CUDA_WHEEL, gpu=True) == [PLAIN]


def test_uv_brings_the_cpu_build_where_pip_has_none(tmp_path: Path) -> None:
    assert install(tmp_path, CUDA_WHEEL) == [THROUGH_UV]


def test_the_large_build_is_the_last_resort(tmp_path: Path) -> None:
    assert install(tmp_path, CUDA_WHEEL, uv="fails") == [THROUGH_UV, PLAIN]


def test_without_any_uv_it_still_installs(tmp_path: Path) -> None:
    assert install(tmp_path, CUDA_WHEEL, uv="absent") == ["pip install uv", PLAIN]


@pytest.mark.parametrize(
    ("version", "fits"), [("2.11.0", True), ("2.13.0+cpu", True), ("2.10.1", False), ("2.15.0", False), ("3.0", False)]
)
def test_a_torch_already_there_is_kept_when_it_fits(tmp_path: Path, version: str, fits: bool) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    info = tmp_path / "site" / f"torch-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    body = f"ROOT={tmp_path}; source {REPO}/launcher/setup.sh; torch_is_there"
    done = subprocess.run(["bash", "-c", body], timeout=30, env={**os.environ, "PYTHONPATH": str(tmp_path / "site")})
    assert (done.returncode == 0) is fits
