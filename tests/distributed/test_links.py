"""Steps and results over shared memory and over CURVE ZMQ; torch's store over a link to a head."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from sonar.distributed.frames import open_reader, open_writer
from sonar.distributed.rank_link import RankLink, RankSpec
from sonar.distributed.step_link import ResultReceiver, ResultSender, StepReceiver, StepSender
from sonar.distributed.store import HeadStore
from sonar.distributed.zmq_frames import WINDOW, ZmqReader, ZmqWriter
from sonar.errors import ProtocolError
from sonar.messages import EndOfSteps, StepBatch, StepResult
from sonar.transport import Address
from tests.distributed.rank_pool import REPLICA, TOKEN, StoreServer


@pytest.fixture(scope="module")
def server():
    server = StoreServer()
    yield server
    server.close()


@pytest.fixture
def connect(server, request):
    links = []
    incarnation = abs(hash(request.node.nodeid)) % 10**6 + 1

    def make(rank):
        host, port = server.address
        links.append(
            RankLink(
                RankSpec(
                    head_host=host,
                    head_port=port,
                    token=TOKEN,
                    replica_id=REPLICA,
                    incarnation=incarnation,
                    rank=rank,
                    world_size=4,
                )
            )
        )
        return HeadStore(links[-1])

    yield make
    for link in links:
        link.close()


def batch(step, incarnation=1):
    return StepBatch(
        incarnation=incarnation, step=step, slots=[0, 3], starts=[5, 0], lengths=[1, 2], samples=[True, False]
    )


def test_torch_store_contract(connect):
    store, other = connect(0), connect(1)
    store.set("a", "text")
    assert other.get("a") == b"text"
    assert [store.add("n", 2), other.add("n", 3)] == [2, 5]
    assert other.compare_set("a", "text", "new") == b"new" and store.compare_set("a", "text", "no") == b"new"
    assert store.num_keys() == 2 and store.check(["a", "n"]) and not store.check(["a", "zz"])
    assert store.delete_key("a") and not store.delete_key("a")
    prefixed = dist.PrefixStore("p", store)
    prefixed.set("k", b"\x00\xff")
    assert other.get("p/k") == b"\x00\xff"


def test_a_wait_ends_when_the_key_comes_or_says_what_did_not(connect):
    store, other = connect(0), connect(1)
    threading.Timer(0.7, lambda: other.set("late", b"1")).start()
    began = time.monotonic()
    store.wait(["late"], timedelta(seconds=20))
    assert time.monotonic() - began > 0.5
    with pytest.raises(dist.DistStoreError, match="'never'"):
        store.wait(["never"], timedelta(seconds=0.2))


@pytest.mark.parametrize("is_one_host", [True, False])
def test_steps_reach_every_rank_in_order_and_then_end(connect, is_one_host):
    store = connect(0)
    writer = open_writer(store, "steps", 2, is_one_host=is_one_host, own_host="127.0.0.1", token=TOKEN)
    receivers = [StepReceiver(open_reader(connect(1 + n), "steps", n, TOKEN), 1) for n in range(2)]
    sender = StepSender(writer, 1)
    for step in range(5):
        sender.send(batch(step))
    for receiver in receivers:
        assert [receiver.receive(5.0) for _ in range(5)] == [batch(step) for step in range(5)]
        assert receiver.receive(0.0) is None
    sender.close()
    for receiver in receivers:
        assert receiver.receive(5.0) == EndOfSteps(incarnation=1)
        receiver.close()


@pytest.mark.parametrize("is_one_host", [True, False])
def test_a_gap_and_a_stranger_raise(connect, is_one_host):
    store = connect(0)
    writer = open_writer(store, "steps", 1, is_one_host=is_one_host, own_host="127.0.0.1", token=TOKEN)
    receiver = StepReceiver(open_reader(store, "steps", 0, TOKEN), 1)
    sender = StepSender(writer, 1)
    sender.send(batch(0))
    sender.send(batch(2))
    assert receiver.receive(5.0) == batch(0)
    with pytest.raises(ProtocolError, match="step 2 came where 1 was due"):
        receiver.receive(5.0)
    sender.send(batch(1, incarnation=9))
    with pytest.raises(ProtocolError, match="incarnation 9 in incarnation 1"):
        receiver.receive(5.0)
    writer.write(b"junk", 1.0)
    with pytest.raises(ProtocolError, match="junk"):
        receiver.receive(5.0)
    receiver.close()
    writer.close()


def test_results_come_back(connect):
    store = connect(0)
    sender = ResultSender(open_writer(store, "results", 1, is_one_host=True, own_host="", token=TOKEN))
    receiver = ResultReceiver(open_reader(store, "results", 0, TOKEN))
    result = StepResult(step=3, token_ids=[7, 8], prompt_logprobs={2: []})
    sender.send(result)
    assert receiver.receive(5.0) == result
    assert receiver.receive(0.0) is None
    receiver.close()
    sender.close()


def test_zmq_writer_gives_up_on_a_reader_that_stands_still():
    writer = ZmqWriter("127.0.0.1", 1, TOKEN)
    reader = ZmqReader(writer.address, 0, TOKEN)
    with pytest.raises(ProtocolError, match="no acknowledgement of all 1 readers"):
        for _ in range(WINDOW + 1):
            writer.write(b"x", 0.1)
    reader.close()
    writer.close()


def test_zmq_stranger_is_not_let_in():
    writer = ZmqWriter("127.0.0.1", 1, TOKEN)
    stranger = ZmqReader(Address(*writer.address), 0, "another token, just as long as theirs")
    with pytest.raises(ProtocolError, match="no hello of all 1 readers"):
        writer._await(lambda: bool(writer._acknowledged), 0.5, "hello")
    stranger.close()
    writer.close()
