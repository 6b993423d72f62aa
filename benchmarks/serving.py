"""The served demo model under load: starts a server, sweeps streams over two workloads, prints tables for RESULTS.md.

    python benchmarks/serving.py [--streams 1,8,32] [--json FOLDER] [flags of `sonar serve`]

Workloads: `random` (128 tokens in, 64 out, nothing shared) and `shared-prefix` (512 shared and 64 own tokens in, 64
out). The server is an ordinary detached one on a free port, stopped in the end whatever happens.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m"
SONAR = [sys.executable, "-m", "launcher.cli.main"]
WORKLOADS = {
    "random": ["--dataset", "random", "--input-len", "128", "--output-len", "64"],
    "shared-prefix": ["--dataset", "shared-prefix", "--prefix-len", "512", "--input-len", "64", "--output-len", "64"],
}
COLUMNS = ("streams", "output tok/s", "TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms", "cached", "failed")


def main() -> None:
    """Runs everything; raises `CalledProcessError` when a command fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--json", default="", help="keep the measured figures in this folder")
    args, serve_flags = parser.parse_known_args()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    subprocess.run([*SONAR, "serve", args.model, "--detach", "--port", port, *serve_flags], check=True)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(args.json or temporary)
            folder.mkdir(parents=True, exist_ok=True)
            print(f"\n{args.model} {' '.join(serve_flags)}\n{machine()}")
            for name, flags in WORKLOADS.items():
                out = folder / f"{name}.json"
                load = ["--url", f"http://127.0.0.1:{port}", "--concurrency", args.streams, *flags]
                subprocess.run([*SONAR, "bench", "serve", *load, "--json", str(out)], check=True, stdout=sys.stderr)
                print(f"\n{name}: {' '.join(flags)}\n{markdown(json.loads(out.read_text())['runs'])}")
    finally:
        subprocess.run([*SONAR, "stop", "--port", port], check=True)


def machine() -> str:
    """What the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"


def markdown(runs: list[dict[str, Any]]) -> str:
    """A table, one row a run."""
    rows = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for run in runs:
        s = run["summary"]
        figures = [s["output_tokens_per_s"]] + [s[k][p] for k in ("ttft_ms", "itl_ms") for p in ("p50", "p99")]
        cached = f"{s['cached_tokens'] / max(1, s['prompt_tokens']):.0%}"
        cells = [run["label"].split()[0], *(f"{value:.1f}" for value in figures), cached, str(s["failed"])]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
