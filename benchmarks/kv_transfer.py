"""KV blocks between two processes: Sonar's transports against a bare NIXL loop with the same descriptors, turn by turn.

    pip install --no-deps nixl-cu13==1.5.1
    python benchmarks/kv_transfer.py [--blocks 32] [--block-bytes 737280] [--rounds 30]

The default is a prompt of 512 tokens of the demo model in float32: 32 blocks, each one descriptor over all layers. The
loop does what any use of the library must: descriptors, a handle, post, poll, release. Prints GB/s, medians with
ranges, and the shares of the loop's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from sonar.kvtransfer.contract import Piece, ReadState, Region, Transport
from sonar.kvtransfer.registry import TRANSPORTS, open_transport

SPREAD = 4  # the cache is so many times what one read takes, so that blocks lie scattered
Read = Callable[[list[Piece]], None]


def hold(size: int, link: Connection) -> None:
    """The process whose memory is read."""
    memory = np.full(size, 7, dtype=np.uint8)
    opened = {name: open_transport(name, f"bench-{name}") for name in TRANSPORTS}
    for transport in opened.values():
        transport.register([Region(memory.ctypes.data, size)])
    link.send((memory.ctypes.data, {name: transport.metadata() for name, transport in opened.items()}))
    link.recv()


def bare_loop(region: Region, metadata: bytes) -> Read:
    """NIXL without Sonar."""
    from nixl_cu13._api import nixl_agent, nixl_agent_config

    agent: Any = nixl_agent("bench-bare", nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(region.address, region.size_bytes, 0, "kv")], "DRAM")
    peer = agent.add_remote_agent(metadata)
    peer = peer.decode() if isinstance(peer, bytes) else peer

    def read(pieces: list[Piece]) -> None:
        local = agent.get_xfer_descs(np.array([(p.local, p.size_bytes, 0) for p in pieces], np.uint64), mem_type="DRAM")
        there = agent.get_xfer_descs(
            np.array([(p.remote, p.size_bytes, 0) for p in pieces], np.uint64), mem_type="DRAM"
        )
        handle = agent.initialize_xfer("READ", local, there, peer)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        assert state == "DONE", state

    return read


def by_transport(transport: Transport, region: Region, metadata: bytes) -> Read:
    """As the exchange uses it: post, and look now and then."""
    transport.register([region])
    transport.connect("holder", metadata)

    def read(pieces: list[Piece]) -> None:
        reading = transport.read("holder", pieces)
        while reading.state is ReadState.UNDER_WAY:
            time.sleep(0.0001)
        assert reading.state is ReadState.DONE, reading.error

    return read


def main() -> None:
    """Runs all, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--block-bytes", type=int, default=737_280)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    num_cached = SPREAD * args.blocks
    size = num_cached * args.block_bytes
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=hold, args=(size, theirs))
    process.start()
    there, metadata = ours.recv()
    memory = np.zeros(size, dtype=np.uint8)
    region = Region(memory.ctypes.data, size)
    readers: dict[str, Read] = {"bare NIXL loop": bare_loop(region, metadata["nixl"])}
    for name in TRANSPORTS:
        readers[f"Sonar, {name}"] = by_transport(open_transport(name, f"reader-{name}"), region, metadata[name])
    rates: dict[str, list[float]] = {name: [] for name in readers}
    rng = random.Random(0)
    for turn in range(args.rounds + 3):
        blocks = rng.sample(range(num_cached), args.blocks)
        pieces = [
            Piece(region.address + a * args.block_bytes, there + b * args.block_bytes, args.block_bytes)
            for a, b in zip(sorted(blocks), rng.sample(range(num_cached), args.blocks))
        ]
        for name, read in readers.items():
            begin = time.perf_counter()
            read(pieces)
            if turn >= 3:  # connections are made, pages are there
                rates[name].append(args.blocks * args.block_bytes / (time.perf_counter() - begin) / 1e9)
    ours.send(None)
    process.join()
    loop = statistics.median(rates["bare NIXL loop"])
    print("| | GB/s | range | share of the loop |\n| --- | --- | --- | --- |")
    for name, found in rates.items():
        middle = statistics.median(found)
        print(f"| {name} | {middle:.2f} | {min(found):.2f} to {max(found):.2f} | {middle / loop:.2f} |")


if __name__ == "__main__":
    main()
