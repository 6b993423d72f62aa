"""Names, figures and memory that both sides of an exchange use. Pure data."""

from __future__ import annotations

import ctypes
import zlib
from dataclasses import dataclass
from typing import NamedTuple

from sonar.peer_messages import KVLayout, PeerMessage


class PeerKey(NamedTuple):
    """One start of a replica."""

    replica_id: str
    incarnation: int

    @property
    def text(self) -> str:
        """As transports know it."""
        return f"{self.replica_id}/{self.incarnation}"


class Outgoing(NamedTuple):
    """A message for a peer."""

    peer: PeerKey
    message: PeerMessage


@dataclass(frozen=True)
class CacheMemory:
    """This process's KV cache as bytes.

    Attributes:
        addresses, num_blocks: of each cache group.
    """

    layout: KVLayout
    addresses: tuple[int, ...]
    num_blocks: tuple[int, ...]

    def address(self, group: int, block: int) -> int:
        """Where a block begins."""
        return self.addresses[group] + block * self.layout.block_bytes[group]

    def checksum(self, group: int, block: int) -> int:
        """CRC-32 of a block's bytes."""
        size = self.layout.block_bytes[group]
        return zlib.crc32((ctypes.c_char * size).from_address(self.address(group, block)))
