"""llama.cpp's HTTP server in a process of its own, until interrupted. Called by `benchmarks.peers.server`.

python -m benchmarks.peers.llama_server MODEL.gguf PORT THREADS SLOTS SLOT_TOKENS
"""

from __future__ import annotations

import os
import signal
import sys

import xllamacpp  # type: ignore[import-not-found, unused-ignore]


def main() -> None:
    """Serves with as many slots as asked for, each of so many tokens; all else as the package sets it."""
    model, (port, threads, slots, slot_tokens) = sys.argv[1], map(int, sys.argv[2:])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.port = port
    params.n_parallel = slots
    params.n_ctx = slots * slot_tokens
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    os._exit(0)  # its destructor waits for clients


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main()
