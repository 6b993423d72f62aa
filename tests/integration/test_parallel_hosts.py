"""Replicas whose ranks lie on two hosts, under a real head: the tokens of one rank, streams that outlive a rank."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.hosts import DEADLINE_S, SONAR, Host, Network, Running, Stream, in_namespace, running_network
from tests.tiny import write_tiny_folder

URL = "http://127.0.0.1:2242"
SHAPES = {"one": "", "tp": "tp = 2\nranks_per_host = 1", "pp": "pp = 2\nranks_per_host = 1"}
GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "golden_smollm2.json").read_text())["completion"]


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with running_network(tmp_path, "r") as network:
        yield network


def start(
    network: Network, model: str, token: Path, names: tuple[str, ...], max_model_len: int = 512
) -> tuple[Host, Running]:
    """A head on a host of its own, and two others that serve a deployment of each shape."""
    deployments = "".join(
        f"""
[[deployment]]
name = "{name}"
model = "{model}"
{SHAPES[name]}
[deployment.engine]
device = "cpu"
threads = 1
activations = "float32"
[deployment.cache]
memory_bytes = "96MiB"
[deployment.scheduler]
max_model_len = {max_model_len}
"""
        for name in names
    )
    head, *nodes = [network.host(name, f"10.1.0.{number}/24") for number, name in enumerate(("head", "n1", "n2"), 1)]
    nodes_table = "[nodes]\nhead_runs_workers = false\nmin = 2"
    process = head.head(f'[security]\ntoken_file = "{token}"\n{nodes_table}\n{deployments}')
    for node in nodes:
        node.join("10.1.0.1", token)
    process.wait_for("Ready after")
    return head, process


def ask(head: Host, model: str, prompt: str | list[int], max_tokens: int) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}

    def post() -> httpx.Response:
        return httpx.post(f"{URL}/v1/completions", json=body, timeout=DEADLINE_S, trust_env=False)

    answer = in_namespace(head.namespace, post)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def ranks_of(head: Host, replica: str) -> list[tuple[str, int]]:
    """Node and process id of each rank."""
    status = json.loads(head.run(*SONAR, "status", "--json").stdout)
    found = next(one for one in status["replicas"] if one["replica_id"] == replica)
    return list(zip(found["nodes"], found["pids"], strict=True))


def test_ranks_on_two_hosts_give_the_tokens_of_one(network: Network, tmp_path: Path) -> None:
    model = str(write_tiny_folder("llama", tmp_path / "tiny"))
    head, process = start(network, model, tmp_path / "join.token", ("one", "tp", "pp"))
    prompts = ["hello", "a longer prompt of several words, cut into blocks of sixteen tokens each"]
    expected = [ask(head, "one", prompt, 40) for prompt in prompts]
    for name in ("tp", "pp"):
        ranks = ranks_of(head, f"{name}-0")
        assert sorted(node for node, _ in ranks) == ["n1", "n2"], ranks
        assert [ask(head, name, prompt, 40) for prompt in prompts] == expected
    whole = Stream(head, URL, "hello", 300, model="tp").end()
    broken = Stream(head, URL, "hello", 300, model="tp")
    broken.has_begun()
    os.kill(ranks_of(head, "tp-0")[1][1], signal.SIGKILL)  # the rank that follows, on the other host
    assert broken.end() == whole and broken.num_tokens == 300
    assert process.end() == 0


@pytest.mark.slow
def test_the_demo_model_over_two_hosts_gives_the_golden_tokens(network: Network, smollm2, tmp_path: Path) -> None:
    head, process = start(network, str(smollm2.path), tmp_path / "join.token", ("tp", "pp"), 1280)
    for name in ("tp", "pp"):
        for case in GOLDEN.values():
            margins = case["top2_logit_margin"]
            count = next((i for i, margin in enumerate(margins) if margin < 0.05), len(margins))
            text = ask(head, name, case["prompt_token_ids"], count)
            assert count and case["output_text"].startswith(text.rstrip("\N{REPLACEMENT CHARACTER}")) and text, name
    assert process.end() == 0
