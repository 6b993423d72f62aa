"""Time from `sonar join` to the first served token, on hosts that are network namespaces of this machine (needs root).

`python -m benchmarks.join_to_token MODEL [ROUNDS]`: each round starts a head without hosts, then an agent on another
host, and asks until a token comes. "load" is what the head counts from the spawned worker to the ready engine; the rest
is what joining costs beyond the model.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.integration.hosts import Host, in_namespace, running_network

POLL_S = 0.02


def first_token_s(head: Host, began_s: float) -> float:
    """Seconds until a completion of one token was answered."""
    body = {"model": "m", "prompt": "Hello", "max_tokens": 1}

    def ask() -> float:
        with httpx.Client(base_url="http://127.0.0.1:2242", trust_env=False, timeout=60.0) as client:
            while client.post("/v1/completions", json=body).status_code != 200:
                time.sleep(POLL_S)
        return time.monotonic() - began_s

    return in_namespace(head.namespace, ask)


def one_round(model: str, folder: Path) -> tuple[float, float]:
    """Seconds in all, and of them the load."""
    toml = (
        f'[security]\ntoken_file = "{folder}/token"\n[nodes]\nhead_runs_workers = false\n'
        f'[[deployment]]\nname = "m"\nmodel = "{model}"\n'
    )
    with running_network(folder, "b") as network:
        head, node = network.host("head", "10.1.0.1/24"), network.host("node", "10.1.0.2/24")
        process = head.head(toml)
        began_s = time.monotonic()
        node.join("10.1.0.1", folder / "token")
        total_s = first_token_s(head, began_s)
        match = re.search(r"loaded in ([\d.]+) s", process.text())
        assert match is not None, process.text()
        return total_s, float(match[1])


def main() -> None:
    """Prints a line a round."""
    model, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            total_s, load_s = one_round(model, Path(folder))
        print(
            f"join to token {total_s:.2f} s, of it load {load_s:.1f} s, beyond it {total_s - load_s:.2f} s", flush=True
        )


if __name__ == "__main__":
    main()
