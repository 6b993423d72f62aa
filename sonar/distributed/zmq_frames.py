"""Frames between hosts: a ZMQ ROUTER that writes, a DEALER in each reader, CURVE keys from the join token.

PUB/SUB would lose frames without a word; here each reader acknowledges by number, the writer keeps a bounded window of
unacknowledged frames, and a reader that sees a gap raises. Called by `frames`. Torch-free.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import zmq

from sonar.errors import ProtocolError
from sonar.transport import Address, TransportSettings
from sonar.transport_keys import ZAP_DOMAIN, KeyGate, derive_keys
from sonar.transport_options import set_common_options

# Frames that a reader may be behind. Two steps are under way at once; the rest is slack for a slow wake-up.
WINDOW = 64
HELLO_TIMEOUT_S = 120.0
_NUMBER = struct.Struct("<Q")
_SETTINGS = TransportSettings(max_frame_bytes=256 << 20)


class ZmqWriter:
    """Owns the socket that readers connect to.

    Args:
        host: address of this host to listen at, on a free port.

    Attributes:
        address: what readers connect to.
    """

    def __init__(self, host: str, num_readers: int, token: str) -> None:
        self._acknowledged: dict[bytes, int] = {}
        self._num_readers = num_readers
        self._count = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._gate = KeyGate(self._context, derive_keys(token, "client").public)
        self._gate.start()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = derive_keys(token, "server")
        self._socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        set_common_options(self._socket, Address(host, 1), _SETTINGS)
        port = self._socket.bind_to_random_port(f"tcp://[{host}]" if ":" in host else f"tcp://{host}")
        self.address = Address(host, port)

    def write(self, frame: bytes, timeout_s: float) -> None:
        """See `FrameWriter.write`. The first call waits until every reader has said hello."""
        self._await(lambda: len(self._acknowledged) == self._num_readers, HELLO_TIMEOUT_S, "hello")
        number = _NUMBER.pack(self._count)
        self._count += 1
        for reader in self._acknowledged:
            try:
                self._socket.send_multipart([reader, number, frame], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise ProtocolError(f"reader {reader.decode()} is gone: {error.strerror}") from error
        self._await(lambda: self._count - min(self._acknowledged.values()) <= WINDOW, timeout_s, "acknowledgement")

    def close(self) -> None:
        """Closes after what is unsent has gone out."""
        self._socket.close(_SETTINGS.linger_ms)
        self._gate.close()
        self._context.term()

    def _await(self, is_done: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        self._take_acknowledgements()
        while not is_done():
            left_ms = int((deadline_s - time.monotonic()) * 1000)
            if left_ms <= 0:
                raise ProtocolError(f"no {what} of all {self._num_readers} readers within {timeout_s:g} s")
            self._socket.poll(left_ms)
            self._take_acknowledgements()

    def _take_acknowledgements(self) -> None:
        while True:
            try:
                reader, number = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                continue  # not two frames: none of ours
            if len(number) == _NUMBER.size:
                self._acknowledged[reader] = _NUMBER.unpack(number)[0]


class ZmqReader:
    """One reader's socket."""

    def __init__(self, address: Address, reader: int, token: str) -> None:
        self._count = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.curve_serverkey = derive_keys(token, "server").public
        self._socket.curve_publickey, self._socket.curve_secretkey = derive_keys(token, "client")
        self._socket.setsockopt(zmq.IDENTITY, str(reader).encode())
        set_common_options(self._socket, address, _SETTINGS)
        self._socket.connect(address.endpoint)
        self._acknowledge()

    def read(self, timeout_s: float) -> bytes | None:
        """See `FrameReader.read`."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        number, frame = self._socket.recv_multipart()
        if number != _NUMBER.pack(self._count):
            raise ProtocolError(f"frame {number.hex()} came where {self._count} was due: the link broke")
        self._count += 1
        self._acknowledge()
        return bytes(frame)

    def close(self) -> None:
        """Closes at once."""
        self._socket.close(0)
        self._context.term()

    def _acknowledge(self) -> None:
        self._socket.send(_NUMBER.pack(self._count), zmq.NOBLOCK)
