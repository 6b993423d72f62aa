"""Two replicas and their exchange, step by step: what is asked, read, released; what follows a fault."""

from __future__ import annotations

import pytest

from sonar.messages import FinishReason, KVSource
from sonar.sampling_params import SamplingParams
from tests.kvtransfer.faulty import FakeNetwork, FaultKind
from tests.kvtransfer.replicas import BLOCK, Cluster
from tests.scheduler.world import FULL, sliding

PROMPT = [1 + i % 40 for i in range(30)]


def _pair(fault: FaultKind = FaultKind.NONE, **more: object) -> Cluster:
    cluster = Cluster(network=FakeNetwork(choose=lambda: fault))
    cluster.add("p")
    cluster.add("d", **more)
    return cluster


def _ask(cluster: Cluster, name: str = "r", **more: object) -> None:
    cluster.replicas["d"].world.request(name, PROMPT, source=cluster.replicas["p"].source, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("groups", [(FULL,), (sliding(6), FULL)], ids=["full", "sliding"])
def test_the_prompt_is_computed_there_and_the_rest_here(groups: tuple) -> None:
    cluster = Cluster(groups=groups)
    p, d = cluster.add("p"), cluster.add("d")
    _ask(cluster)
    cluster.settle()
    client = d.world.clients["r"]
    assert client.finish is FinishReason.LENGTH
    blocks = (len(PROMPT) - 1) // BLOCK
    assert p.world.executor.num_computed_tokens == blocks * BLOCK
    # What is left of the prompt, and the tokens drawn but the last.
    assert d.world.executor.num_computed_tokens == len(PROMPT) - blocks * BLOCK + 3
    assert client.num_cached_tokens == 0, "blocks computed for this request were in no cache"
    (pair,) = d.exchange.stats()
    assert (pair.replica_id, pair.fetches, pair.failed, pair.open_fetches) == ("p", 1, 0, 0)
    # The windows of sliding layers are told at the end; a full group's blocks were read while the rest was computed.
    assert pair.early_bytes > 0 and pair.bytes_read >= blocks * BLOCK * 8


def test_what_is_cached_on_either_side_is_counted_once() -> None:
    cluster = _pair()
    p, d = cluster.replicas.values()
    _ask(cluster)
    cluster.settle()
    computed = p.world.executor.num_computed_tokens
    d.world.request("again", PROMPT, source=p.source)
    cluster.settle()
    assert d.world.clients["again"].num_cached_tokens == (len(PROMPT) - 1) // BLOCK * BLOCK
    assert p.world.executor.num_computed_tokens == computed and d.exchange.stats()[0].fetches == 1
    other = cluster.add("e")
    other.world.request("there", PROMPT, source=p.source)
    cluster.settle()
    assert p.world.executor.num_computed_tokens == computed, "an export of what is cached computes nothing"
    assert other.world.clients["there"].num_cached_tokens == (len(PROMPT) - 1) // BLOCK * BLOCK


def test_a_second_request_waits_for_the_blocks_of_the_first() -> None:
    cluster = _pair()
    _ask(cluster, "a")
    _ask(cluster, "b", sampling=SamplingParams(seed=2, max_tokens=3, ignore_eos=True))
    cluster.settle()
    assert cluster.replicas["d"].exchange.stats()[0].fetches == 1


@pytest.mark.parametrize("fault", [FaultKind.HALF, FaultKind.REFUSED, FaultKind.LOST, FaultKind.LATE])
def test_a_failed_read_ends_in_a_recompute(fault: FaultKind) -> None:
    cluster = _pair(fault)
    d = cluster.replicas["d"]
    _ask(cluster)
    for _ in range(4000):
        cluster.turn()
        if not d.world.open:
            break
    assert d.world.clients["r"].finish is FinishReason.LENGTH
    (pair,) = d.exchange.stats()
    assert pair.failed == 1 and pair.recomputed_tokens > 0
    counts = d.world.cache.counts()
    is_held = fault in (FaultKind.LOST, FaultKind.LATE)
    assert (counts.quarantined > 0) == is_held, "blocks that a read may still write are nobody's"
    cluster.network.release_late()
    cluster.settle()
    assert not cluster.replicas["p"].exchange.is_busy
    if fault is FaultKind.LOST:
        assert d.world.cache.counts().quarantined > 0
        cluster.kill("p")
    assert d.world.cache.counts().quarantined == 0


def test_wrong_bytes_are_found_by_checksums() -> None:
    cluster = _pair(FaultKind.WRONG, checksums=True)
    _ask(cluster)
    cluster.settle()
    assert cluster.replicas["d"].exchange.stats()[0].failed == 1


def test_a_prefill_side_that_dies_is_forgotten_and_the_prompt_computed_here() -> None:
    cluster = _pair()
    d = cluster.replicas["d"]
    _ask(cluster)
    for _ in range(3):
        cluster.turn()
    assert d.world.cache.counts().in_transit > 0
    cluster.kill("p")
    assert not d.transport.peers
    cluster.settle()
    assert d.world.clients["r"].finish is FinishReason.LENGTH


def test_a_decode_side_that_dies_leaves_nothing_held() -> None:
    cluster = _pair()
    _ask(cluster)
    for _ in range(3):
        cluster.turn()
    assert cluster.replicas["p"].exchange.is_busy
    cluster.kill("d")
    cluster.settle()


def test_silence_ends_in_a_recompute_and_what_is_held_is_released_when_links_are_back() -> None:
    cluster = _pair()
    p, d = cluster.replicas.values()
    _ask(cluster)
    for _ in range(3):
        cluster.turn()
    for _ in range(40):  # every message is lost for 8 s
        cluster.links.clear()
        cluster.turn(0.2)
        cluster.links.clear()
    assert not d.world.open and p.exchange.is_busy and d.exchange.stats()[0].failed == 1
    cluster.settle()
    assert not p.exchange.is_busy


def test_another_model_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    cluster = _pair(model="other")
    _ask(cluster)
    cluster.settle()
    assert "model is 'other' there and 'm' here" in caplog.text
    assert cluster.replicas["d"].world.clients["r"].finish is FinishReason.LENGTH


def test_an_incarnation_that_is_over_is_refused() -> None:
    cluster = _pair()
    d = cluster.replicas["d"]
    d.world.request("r", PROMPT, source=KVSource(replica_id="p", incarnation=3))
    cluster.settle()
    assert d.exchange.stats()[0].failed == 1 and not d.transport.peers


def test_a_cancelled_request_releases_both_sides() -> None:
    cluster = _pair(FaultKind.LATE)
    p, d = cluster.replicas.values()
    _ask(cluster)
    while not cluster.network.under_way:
        cluster.turn()
    d.world.abort("r")
    assert d.world.cache.counts().quarantined > 0 and d.world.cache.counts().in_transit == 0
    for _ in range(3):
        cluster.turn()
    assert p.exchange.is_busy, "a read is under way: its blocks are kept"
    cluster.network.release_late()
    cluster.settle()
    assert d.world.cache.counts().quarantined == 0


def test_short_prompts_and_prompt_logprobs_stay_here() -> None:
    cluster = _pair()
    d, source = cluster.replicas["d"], KVSource(replica_id="p", incarnation=7, least_tokens=16)
    d.world.request("short", PROMPT[:15], source=source)
    logprobs = SamplingParams(seed=1, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    d.world.request("scored", PROMPT, logprobs, source=source)
    cluster.settle()
    assert not d.exchange.stats()


def test_a_prefix_that_another_has_is_read_and_the_rest_computed_here() -> None:
    cluster = _pair()
    p, d = cluster.replicas.values()
    p.world.request("first", PROMPT[:22])
    cluster.settle()
    computed = p.world.executor.num_computed_tokens
    source = KVSource(replica_id="p", incarnation=7, cached_tokens=20)
    d.world.request("r", PROMPT, source=source)
    cluster.settle()
    assert p.world.executor.num_computed_tokens == computed, "what is not cached is not computed for others"
    assert d.world.clients["r"].num_cached_tokens == 20
    assert (d.exchange.stats()[0].fetches, d.exchange.stats()[0].failed) == (1, 0)


def test_a_prefix_that_was_thrown_out_meanwhile_is_computed_here(caplog: pytest.LogCaptureFixture) -> None:
    cluster = _pair()
    d = cluster.replicas["d"]
    d.world.request("r", PROMPT, source=KVSource(replica_id="p", incarnation=7, cached_tokens=20))
    cluster.settle()
    assert "not cached any more" in caplog.text and d.exchange.stats()[0].failed == 1
    assert cluster.replicas["p"].world.executor.num_computed_tokens == 0


def test_what_a_lost_read_may_write_is_free_once_its_peer_has_ended_whoever_missed_the_news() -> None:
    cluster = _pair(FaultKind.LOST)
    d = cluster.replicas["d"]
    _ask(cluster)
    while not cluster.network.under_way:
        cluster.turn()
    cluster.network.release_late()
    cluster.settle()
    assert d.world.cache.counts().quarantined > 0
    cluster.replicas["p"].is_alive = False  # and nobody tells
    for _ in range(60):
        cluster.turn(0.1)
    assert d.world.cache.counts().quarantined == 0


def test_a_request_that_waits_for_quarantined_blocks_keeps_its_replica_from_ending() -> None:
    cluster = _pair(FaultKind.LOST, num_blocks=9)
    d = cluster.replicas["d"]
    _ask(cluster)
    while not cluster.network.under_way:
        cluster.turn()
    for _ in range(5):
        cluster.network.release_late()
        cluster.turn()
    assert d.world.open and not d.world.scheduler.can_step and d.world.cache.counts().quarantined > 0
    assert d.exchange.is_busy
    cluster.kill("p")
    cluster.settle()
    assert d.world.clients["r"].finish is FinishReason.LENGTH
