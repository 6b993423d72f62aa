"""`sonar bench offline` and `latency` on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.cli.main import main
from tests.tiny import write_tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder("llama", tmp_path_factory.mktemp("tiny")))


ENGINE = ["--threads", "1", "--kv-cache-memory", "8MiB", "--device", "cpu"]


def test_offline_counts_every_token(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    work = ["--num-prompts", "5", "--input-len", "40", "--output-len", "6", "--num-iterations", "2"]
    assert main(["bench", "offline", folder, *ENGINE, *work, "--json", str(out)]) == 0
    printed = capsys.readouterr()
    assert "output tokens/s" in printed.out and "load weights" in printed.err
    runs = json.loads(out.read_text())["runs"]
    assert [run["summary"]["output_tokens"] for run in runs] == [30, 30]
    assert all(run["summary"]["prompt_tokens"] == 200 and run["summary"]["cached_tokens"] == 0 for run in runs)


def test_shared_prefixes_come_from_the_cache(folder: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    work = ["--dataset", "shared-prefix", "--prefix-len", "64", "--input-len", "8", "--output-len", "2"]
    assert main(["bench", "offline", folder, *ENGINE, *work, "--num-prompts", "3", "--json", str(out)]) == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert run["summary"]["cached_tokens"] == 3 * 64  # the warm-up run computed the prefix


def test_latency_of_dummy_weights(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    work = ["--batch-size", "2", "--input-len", "16", "--output-len", "3", "--num-iterations", "4"]
    assert main(["bench", "latency", folder, *ENGINE, "--load-format", "dummy", *work, "--json", str(out)]) == 0
    assert "decode step, ms" in capsys.readouterr().out
    figures = json.loads(out.read_text())["runs"]["figures"]
    assert {name: spread["count"] for name, spread in figures.items()} == {
        "batch, ms": 4,
        "first tokens, ms": 4,
        "decode step, ms": 4,
    }
    assert figures["batch, ms"]["min"] >= figures["first tokens, ms"]["min"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num-prompts", "0"], "num_prompts=0"),
        (["--input-len", "600"], "600"),
        (["--block-size", "7"], "block_size=7"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(
    folder: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "offline", folder, *ENGINE, *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and words in error


def test_an_unknown_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", "no-such-model"]) == 2
    assert "no-such-model" in capsys.readouterr().err.splitlines()[-1]
