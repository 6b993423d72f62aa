"""A bad cable: carries the frames of one host's link late, not all of them, in one direction alone, or damaged.

In user space, since not every kernel has tc's netem. The host's end of the link is taken off the bridge; frames are
carried between it and a new port by packet sockets. Checksums that would be computed in hardware are computed by the
kernel first, or receivers would drop every frame.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import heapq
import itertools
import random
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tests.integration.hosts import Host, Network, in_namespace, ip

SIOCETHTOOL = 0x8946
# ETHTOOL_STXCSUM, _STSO, _SGSO, _SGRO: what would hand over frames larger than the link's, or without checksum.
_OFFLOADS = (0x17, 0x1F, 0x24, 0x2C)
ETH_P_ALL = 3
MAX_FRAME = 65_536
PACKET_OUTGOING = 4


@dataclass(frozen=True)
class Damage:
    """What happens to frames. delay_s: each way. loss, corrupt: share of frames, 0 to 1. one_way: what the host sends
    is lost ("from") or what is sent to it ("to"); empty: neither."""

    delay_s: float = 0.0
    loss: float = 0.0
    corrupt: float = 0.0
    one_way: str = ""


@contextlib.contextmanager
def bad_cable(network: Network, host: Host, damage: Damage) -> Iterator[None]:
    """The host's eth0 is such a link meanwhile."""
    port = network.port_of(host)
    ends = ("cable0", "cable1")
    offloads_off(host.namespace, "eth0")
    ip(*f"-n {network.switch} link add {ends[0]} type veth peer name {ends[1]}".split())
    in_namespace(network.switch, lambda: [_offloads_off(name) for name in (port, *ends)])
    ip(*f"-n {network.switch} link set {port} nomaster".split())
    ip(*f"-n {network.switch} link set {ends[0]} up".split())
    ip(*f"-n {network.switch} link set {ends[1]} master bridge up".split())
    carrier = _Carrier(network.switch, port, ends[0], damage)
    try:
        yield
    finally:
        carrier.close()
        ip(*f"-n {network.switch} link del {ends[0]}".split())
        ip(*f"-n {network.switch} link set {port} master bridge".split())


def offloads_off(namespace: str, interface: str) -> None:
    """Frames of this interface are whole and within its MTU from here on."""
    in_namespace(namespace, lambda: _offloads_off(interface))


def _offloads_off(interface: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        for command in _OFFLOADS:
            value = array.array("B", struct.pack("II", command, 0))
            address, _ = value.buffer_info()
            fcntl.ioctl(handle, SIOCETHTOOL, struct.pack("16sP", interface.encode(), address))


class _Carrier:
    """Owner of the two sockets and the thread."""

    def __init__(self, namespace: str, host_port: str, bridge_port: str, damage: Damage) -> None:
        self._damage = damage
        self._sockets = in_namespace(namespace, lambda: [_open(host_port), _open(bridge_port)])
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()
        for handle in self._sockets:
            handle.close()

    def _run(self) -> None:
        rng, order = random.Random(5), itertools.count()
        waiting: list[tuple[float, int, int, bytes]] = []
        selector = selectors.DefaultSelector()
        for side, handle in enumerate(self._sockets):
            selector.register(handle, selectors.EVENT_READ, side)
        while not self._is_closed.is_set():
            patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.05
            for key, _ in selector.select(min(patience, 0.05)):
                for frame in _frames(self._sockets[key.data]):
                    if (carried := self._damaged(frame, key.data, rng)) is not None:
                        due_s = time.monotonic() + self._damage.delay_s
                        heapq.heappush(waiting, (due_s, next(order), 1 - key.data, carried))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, side, frame = heapq.heappop(waiting)
                with contextlib.suppress(OSError):  # a link that is down or full loses frames too
                    self._sockets[side].send(frame)
        selector.close()

    def _damaged(self, frame: bytes, side: int, rng: random.Random) -> bytes | None:
        """None: lost. side: 0 for what the host sends."""
        damage = self._damage
        if damage.one_way == ("from", "to")[side] or rng.random() < damage.loss:
            return None
        if rng.random() < damage.corrupt:
            at = rng.randrange(14, len(frame))
            return frame[:at] + bytes([frame[at] ^ (1 << rng.randrange(8))]) + frame[at + 1 :]
        return frame


def _open(interface: str) -> socket.socket:
    handle = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    handle.bind((interface, ETH_P_ALL))
    handle.setblocking(False)
    handle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    # 263 is SOL_PACKET, 1 PACKET_ADD_MEMBERSHIP, 1 PACKET_MR_PROMISC: frames for every address.
    handle.setsockopt(263, 1, struct.pack("iHH8s", socket.if_nametoindex(interface), 1, 0, b""))
    return handle


def _frames(handle: socket.socket) -> Iterator[bytes]:
    """What has come in by this interface; not what was sent out by it."""
    while True:
        try:
            frame, address = handle.recvfrom(MAX_FRAME)
        except (BlockingIOError, OSError):
            return
        if address[2] != PACKET_OUTGOING:
            yield frame
