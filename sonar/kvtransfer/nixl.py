"""The transport `nixl`: NVIDIA's transfer library over UCX, within a host and between hosts.

Metadata goes over this project's own links, never over the library's. Posting a read blocks for as long as it takes to
set it up (100 ms on a first connection), and a cut link leaves it under way for ever: both happen in a thread, with a
deadline after which the handle is given back and the read is lost. Host memory only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from sonar.kvtransfer.contract import LostReadError, Piece, Reading, Region, TransferError
from sonar.kvtransfer.readings import ReadThread

_POLL_S = 0.0002
# A read that moves less than this has stopped.
_FLOOR_BYTES_PER_S = 10e6
_LEAST_S = 2.0


class NixlTransport:
    """Implements `Transport`.

    Args:
        name: of this start of the process, unique among all that meet.

    Raises:
        TransferError: the library is not installed or has no UCX.
    """

    def __init__(self, name: str) -> None:
        try:
            from nixl_cu13._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise TransferError(f"NIXL cannot be imported ({error}); pip install 'sonar-cluster[nixl]'") from error
        try:
            self._agent: Any = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        except Exception as error:
            raise TransferError(f"NIXL does not start: {error}") from error
        self._lock = Lock()  # the library's agent is not made for several threads at once
        self._peers: dict[str, tuple[str, ReadThread]] = {}
        self._regions: Any = None

    def register(self, regions: Sequence[Region]) -> None:
        rows = [(region.address, region.size_bytes, 0, "kv") for region in regions]
        try:
            self._regions = self._agent.register_memory(rows, "DRAM")
        except Exception as error:
            raise TransferError(f"NIXL cannot register the KV cache: {error}") from error

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def connect(self, peer: str, metadata: bytes) -> None:
        self.disconnect(peer)
        try:
            with self._lock:
                name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransferError(f"{peer}: NIXL does not take its metadata: {error}") from error
        self._peers[peer] = (name.decode() if isinstance(name, bytes) else name), ReadThread(f"kv-nixl {peer}")

    def read(self, peer: str, pieces: Sequence[Piece]) -> Reading:
        name, thread = self._peers[peer]
        return thread.submit(partial(self._copy, name, list(pieces)))

    def disconnect(self, peer: str) -> None:
        if peer in self._peers:
            name, thread = self._peers.pop(peer)
            thread.submit(partial(self._forget, name))  # after the reads that use it
            thread.end()

    def close(self) -> None:
        threads = [thread for _, thread in self._peers.values()]
        for peer in list(self._peers):
            self.disconnect(peer)
        for thread in threads:
            thread.join()
        if self._regions is not None:
            with self._lock:
                self._agent.deregister_memory(self._regions)
            self._regions = None

    def _forget(self, name: str) -> None:
        with self._lock:
            self._agent.remove_remote_agent(name)

    def _copy(self, name: str, pieces: list[Piece]) -> None:
        agent, lock = self._agent, self._lock
        local = np.array([(piece.local, piece.size_bytes, 0) for piece in pieces], dtype=np.uint64)
        remote = np.array([(piece.remote, piece.size_bytes, 0) for piece in pieces], dtype=np.uint64)
        size_bytes = sum(piece.size_bytes for piece in pieces)
        deadline_s = time.monotonic() + _LEAST_S + size_bytes / _FLOOR_BYTES_PER_S
        with lock:
            descriptors = agent.get_xfer_descs(local, mem_type="DRAM"), agent.get_xfer_descs(remote, mem_type="DRAM")
            handle = agent.initialize_xfer("READ", *descriptors, name)
        try:
            with lock:
                state = agent.transfer(handle)
            while state == "PROC":
                if time.monotonic() > deadline_s:
                    raise LostReadError(f"{name}: a read of {size_bytes} bytes did not end in time")
                time.sleep(_POLL_S)
                with lock:
                    state = agent.check_xfer_state(handle)
        finally:
            with lock:
                agent.release_xfer_handle(handle)
        if state != "DONE":
            raise TransferError(f"{name}: NIXL ended a read as {state}")
