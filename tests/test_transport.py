"""Control links over real sockets on loopback: what is let in, what is dropped and counted, what survives a break."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from sonar.errors import ConfigError, ProtocolError
from sonar.messages import HeadToLead, LeadHello, LeadToHead, Ping, Pong, Submit
from sonar.sampling_params import SamplingParams
from sonar.transport import (
    EPOCH_BYTES,
    Address,
    Codec,
    DropReason,
    HandshakeRefusedError,
    PeerId,
    PeerKind,
    TransportSettings,
    UnreachableError,
    parse_address,
)
from sonar.transport_client import Client
from sonar.transport_keys import derive_keys, hkdf_sha256
from sonar.transport_server import Office, Server

LEAD = PeerId(PeerKind.LEAD, "m-0", 3)
HELLO = LeadHello(incarnation=3, replica_id="m-0", pid=1)
SMALL = TransportSettings(max_frame_bytes=2000, linger_ms=100)


class Ends:
    """A server in the running loop, and clients of it."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, settings: TransportSettings = SMALL) -> None:
        self.received: list = []
        self.server = Server("token", {PeerKind.LEAD: LeadToHead}, settings)
        self.address = self.server.bind(host, port)
        self.server.open(lambda peer, message: self.received.append((peer, message)))
        self.clients: list[Client] = []

    def client(self, token: str = "token", peer: PeerId = LEAD, address: Address | None = None) -> Client:
        self.clients.append(Client(address or self.address, token, peer, HeadToLead, SMALL))
        return self.clients[-1]

    async def connected(self, peer: PeerId = LEAD) -> Client:
        client = self.client(peer=peer)
        await asyncio.to_thread(client.connect, 5.0)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close(0)
        self.server.close()


@pytest.fixture
async def ends():
    made = Ends()
    with contextlib.closing(made):
        yield made


async def until(condition, what: str, timeout_s: float = 10.0) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, what
        await asyncio.sleep(0.005)


async def test_messages_go_both_ways_in_order(ends) -> None:
    client = await ends.connected()
    for number in range(500):
        assert client.send(Pong(incarnation=3, number=number))
    await until(lambda: len(ends.received) == 500, "all arrive")
    assert [(peer, message.number) for peer, message in ends.received] == [(LEAD, n) for n in range(500)]
    for number in range(300):
        assert ends.server.send(LEAD, Ping(incarnation=3, number=number))
    got: list[int] = []
    while len(got) < 300:
        messages = await asyncio.to_thread(client.receive, 5.0)
        assert messages and len(messages) <= 256
        got += [message.number for message in messages]
    assert got == list(range(300))


async def test_receive_waits_no_longer_than_asked(ends) -> None:
    client = await ends.connected()
    client.receive(0.0)
    assert await asyncio.to_thread(client.receive, 0.05) == []


@pytest.mark.parametrize("token", ["wrong", "", "token "])
async def test_a_wrong_token_is_refused_and_told_in_time(ends, token) -> None:
    client = ends.client(token)
    with pytest.raises(HandshakeRefusedError, match="the join token is not the one of that head"):
        await asyncio.to_thread(client.connect, 10.0)
    await until(lambda: ends.server.counters.refused >= 2, "the server counts it")
    client.send(HELLO)
    await asyncio.sleep(0.1)
    assert not ends.received


async def test_a_client_that_knows_the_servers_key_alone_is_refused(ends) -> None:
    """The server's public key is not secret enough: the client's own is checked too."""
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0
    stranger.curve_serverkey = derive_keys("token", "server").public
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    stranger.connect(ends.address.endpoint)
    stranger.send(msgspec.msgpack.encode(HELLO))
    await until(lambda: ends.server.counters.refused == 1, "it is refused")
    assert not ends.received
    context.destroy(0)


async def test_a_plain_client_is_refused(ends) -> None:
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0
    stranger.connect(ends.address.endpoint)
    stranger.send(msgspec.msgpack.encode(HELLO))
    await until(lambda: ends.server.counters.refused >= 1, "it is refused")
    assert not ends.received
    context.destroy(0)


async def test_nobody_there_is_told_in_time() -> None:
    client = Client(Address("127.0.0.1", 1), "token", LEAD, HeadToLead, SMALL)
    with pytest.raises(UnreachableError, match=r"no head answered at 127.0.0.1:1 within 0.2 s"):
        await asyncio.to_thread(client.connect, 0.2)
    client.close(0)


async def test_junk_of_a_member_is_counted_and_dropped(ends) -> None:
    client = await ends.connected()
    raw = client.sockets[0]
    for junk in (b"", b"\xc1", b"\x93\xa5Hello", msgspec.msgpack.encode({"type": "x"}), b"\x91" * 1900):
        raw.send(junk)
    raw.send_multipart([b"two", b"frames"])
    bad = msgspec.msgpack.encode(Submit(incarnation=3, request_id="r", prompt_token_ids=[1], sampling=SamplingParams()))
    raw.send(bad)  # a message of the other direction
    raw.send(b"x" * 2001)
    client.send(HELLO)
    await until(lambda: ends.received, "the good one arrives")
    assert ends.received == [(LEAD, HELLO)]
    assert ends.server.counters.dropped == {DropReason.JUNK: 7, DropReason.OVERSIZED: 1}


async def test_a_value_out_of_range_is_junk_for_the_client(ends) -> None:
    """Structs check themselves with errors of our own, which a decoder lets through."""
    client = await ends.connected()
    good = Submit(incarnation=3, request_id="r", prompt_token_ids=[1], sampling=SamplingParams(seed=1, top_p=0.5))
    frame = msgspec.msgpack.encode(good)
    evil = frame.replace(msgspec.msgpack.encode(0.5), msgspec.msgpack.encode(5.5))
    assert evil != frame
    ends.server._socket.send_multipart([LEAD.encode(), bytes(EPOCH_BYTES), evil])
    ends.server.send(LEAD, good)
    messages: list = []
    while not messages:
        messages = await asyncio.to_thread(client.receive, 5.0)
    assert messages == [good] and client.counters.dropped == {DropReason.JUNK: 1}


async def test_a_huge_frame_costs_its_sender_the_connection_only(ends) -> None:
    other = await ends.connected(PeerId(PeerKind.LEAD, "other", 1))
    client = await ends.connected()
    client.sockets[0].send(b"x" * 100_000)
    await until(lambda: ends.server.counters.disconnects >= 1, "it is cut off")
    other.send(HELLO)
    await until(lambda: ends.received, "others go on")


async def test_junk_before_the_handshake_changes_nothing(ends) -> None:
    for junk in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 1000,
        b"\0" * 64,
        b"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE" + b"\0" * 51,
    ):
        with socket.create_connection(ends.address) as stranger:
            stranger.sendall(junk)
    client = await ends.connected()
    client.send(HELLO)
    await until(lambda: ends.received, "members are served")


async def test_made_up_names_are_dropped(ends) -> None:
    context = zmq.Context()
    members = []  # a socket that is collected is closed
    for identity in (b"nonsense", b"lead/x/m-0", b"agent/1/a", b"lead/1/", b"\xff\xfe"):
        members.append(member := context.socket(zmq.DEALER))
        member.linger = 0
        member.curve_serverkey = derive_keys("token", "server").public
        member.curve_publickey, member.curve_secretkey = derive_keys("token", "client")
        member.setsockopt(zmq.IDENTITY, identity)
        member.connect(ends.address.endpoint)
        member.send(msgspec.msgpack.encode(HELLO))
    await until(lambda: ends.server.counters.dropped[DropReason.UNKNOWN_PEER] == 5, "all are dropped")
    assert not ends.received
    context.destroy(0)


async def test_an_error_in_the_handler_is_counted_and_the_rest_goes_on(ends) -> None:
    def handler(peer: PeerId, message: Pong) -> None:
        if message.number == 0:
            raise ZeroDivisionError
        ends.received.append(message.number)

    ends.server._handler = handler
    client = await ends.connected()
    for number in range(3):
        client.send(Pong(incarnation=3, number=number))
    await until(lambda: ends.received == [1, 2], "the others are handled")
    assert ends.server.counters.dropped == {DropReason.FAILED: 1}


async def test_sending_to_nobody_or_too_much_is_told(ends) -> None:
    assert not ends.server.send(PeerId(PeerKind.LEAD, "gone", 1), Ping(incarnation=1, number=1))
    assert ends.server.counters.unsent == 1
    long = Submit(incarnation=3, request_id="r", prompt_token_ids=[70000] * 1000, sampling=SamplingParams())
    with pytest.raises(ProtocolError, match="a frame holds 2000"):
        ends.server.send(LEAD, long)


async def test_a_peer_that_does_not_read_fills_its_own_queue_only() -> None:
    ends = Ends(settings=TransportSettings(send_queue=50, receive_queue=50, linger_ms=0))
    with contextlib.closing(ends):
        other = PeerId(PeerKind.LEAD, "other", 1)
        await ends.connected(other)
        await ends.connected()
        message = Submit(incarnation=3, request_id="r", prompt_token_ids=[70000] * 100_000, sampling=SamplingParams())
        sent = 0
        while ends.server.send(LEAD, message):
            sent += 1
            assert sent < 10_000
        assert ends.server.send(other, Ping(incarnation=1, number=1))


async def test_a_client_finds_a_server_that_was_restarted_and_says_so(ends) -> None:
    client = await ends.connected()
    assert not client.take_reconnected()
    ends.server.close()
    await until(lambda: client.receive(0.0) == [] and not client.is_connected, "the break is seen")
    assert client.send(HELLO), "it is kept for later"
    again = Ends(port=ends.address.port)
    with contextlib.closing(again):
        await until(lambda: client.receive(0.0) == [] and client.take_reconnected(), "it is back")
        await until(lambda: again.received == [(LEAD, HELLO)], "what was kept arrives")


async def test_a_full_queue_without_a_head_is_told_and_the_order_kept() -> None:
    settings = TransportSettings(send_queue=10, receive_queue=10, linger_ms=0)
    client = Client(Address("127.0.0.1", 1), "token", LEAD, HeadToLead, settings)
    client._socket.connect(client.address.endpoint)
    sent = 0
    while client.send(Pong(incarnation=3, number=sent)):
        sent += 1
        assert sent <= 10
    assert not client.wait_writable(0.01)
    assert client.counters.unsent == 1
    client.close(0)


async def test_a_reconnect_under_the_same_name_takes_over(ends) -> None:
    await ends.connected()
    second = await ends.connected()
    second.send(HELLO)
    await until(lambda: ends.received, "the second is heard")
    assert ends.server.send(LEAD, Ping(incarnation=3, number=7))
    messages: list = []
    while not messages:
        messages = await asyncio.to_thread(second.receive, 5.0)
    assert messages == [Ping(incarnation=3, number=7)]


async def test_ipv6() -> None:
    ends = Ends("::1")
    with contextlib.closing(ends):
        assert str(ends.address).startswith("[::1]:")
        client = await ends.connected()
        client.send(HELLO)
        await until(lambda: ends.received, "it arrives")


async def test_a_name_and_only_the_given_address(ends) -> None:
    client = ends.client(address=Address("localhost", ends.address.port))
    await asyncio.to_thread(client.connect, 5.0)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", ends.address.port), timeout=1)


async def test_a_port_in_use_is_a_clear_error(ends) -> None:
    with pytest.raises(ConfigError, match=f"control port {ends.address.port} on 127.0.0.1.*stop what listens there"):
        Ends(port=ends.address.port)


def test_keys_are_those_of_rfc_5869_and_differ_by_role_and_token() -> None:
    # RFC 5869, test case 1.
    secret, salt, info = b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA))
    expected = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    assert hkdf_sha256(secret, salt, info, 42).hex() == expected
    keys = {derive_keys(token, role) for token in ("a", "b") for role in ("server", "client")}
    assert len(keys) == 4 and derive_keys("a", "server") == derive_keys("a", "server")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("head", Address("head", 2243)),
        ("head:5", Address("head", 5)),
        ("10.0.0.1:5", Address("10.0.0.1", 5)),
        ("::1", Address("::1", 2243)),
        ("[::1]", Address("::1", 2243)),
        ("[fe80::1]:5", Address("fe80::1", 5)),
    ],
)
def test_addresses(text, expected) -> None:
    assert parse_address(text, 2243) == expected
    assert parse_address(str(expected), 1) == expected


@pytest.mark.parametrize("text", ["", ":5", "head:", "head:x", "head:0", "head:70000", "[::1", "[::1]5"])
def test_what_is_no_address_is_refused(text) -> None:
    with pytest.raises(ConfigError, match="address"):
        parse_address(text, 2243)


@given(st.binary(max_size=200))
def test_a_codec_never_raises(data) -> None:
    codec = Codec(LeadToHead, 100)
    result = codec.decode([data])
    assert isinstance(result, DropReason | msgspec.Struct)


@given(st.text(min_size=1, max_size=100).filter(lambda s: len(s.encode()) < 200), st.integers(0, 2**62))
def test_names_survive_the_wire(name, generation) -> None:
    peer = PeerId(PeerKind.AGENT, name, generation)
    assert PeerId.decode(peer.encode()) == peer


async def test_a_client_leaves_a_head_that_is_away_for_the_next(ends) -> None:
    away = Address("127.0.0.1", 1)
    client = Client(away, "token", LEAD, HeadToLead, SMALL, others=[ends.address])
    await asyncio.to_thread(client.connect, 5.0)
    assert client.address == ends.address and client.addresses == (ends.address, away)
    client.send(HELLO)
    await until(lambda: ends.received, "it arrives")
    client.close(0)


async def test_who_has_heard_a_later_head_obeys_no_earlier_one(ends) -> None:
    client = await ends.connected()
    ping = [Ping(incarnation=1, number=number) for number in range(3)]
    for epoch, message in zip((7, 6, 8), ping, strict=True):
        ends.server.office = Office(epoch)
        assert ends.server.send(LEAD, message)
    ends.server.office = Office(9, lambda: False)
    assert not ends.server.send(LEAD, ping[0]), "a head that may have been replaced says nothing"
    messages: list = []
    while len(messages) < 2:
        messages += await asyncio.to_thread(client.receive, 5.0)
    assert messages == [ping[0], ping[2]] and client.epoch == 8
    assert client.counters.dropped == {DropReason.DEPOSED: 1}


@pytest.mark.parametrize(
    ("address", "endpoint", "is_at"),
    [
        (Address("10.1.0.9", 2243), "tcp://10.1.0.9:2243", True),
        (Address("10.1.0.9", 2243), "tcp://10.1.0.1:2243", False),
        (Address("10.1.0.9", 2243), "tcp://10.1.0.9:2244", False),
        (Address("fd00::1", 2243), "tcp://[fd00::1]:2243", True),
        (Address("localhost", 2243), "tcp://127.0.0.1:2243", True),
        (Address("localhost", 2243), "tcp://10.1.0.1:2243", False),
        (Address("no-such-name.invalid", 2243), "tcp://10.1.0.1:2243", False),
    ],
)
def test_news_of_a_connection_is_told_from_that_of_another_head(address: Address, endpoint: str, is_at: bool) -> None:
    assert address.is_at(endpoint) is is_at
