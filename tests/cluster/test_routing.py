"""The choice among many replicas: its indices against plain sets, its result against weighing every replica."""

from __future__ import annotations

import sys
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.least_work import choose_replica, standing_load
from cluster.routing.load_order import LoadOrder
from cluster.routing.prefix_index import BlockHolders, PrefixIndex
from cluster.routing.routes import MAX_HOLDERS, NUM_LEAST_LOADED, OPEN_PER_SLOT, WEIGH_ALL, RouteTable
from sonar.block_hash import hash_blocks
from sonar.messages import BlockRemoved, BlockStored, KVEvents, LeadReady

SIZE = 16
SLOTS = 4


def ready(replica_id: str) -> LeadReady:
    return LeadReady(
        incarnation=1,
        replica_id=replica_id,
        num_blocks=1000,
        block_size=SIZE,
        max_model_len=4096,
        max_num_requests=SLOTS,
        weights_bytes=1,
        ops_backend="fake",
    )


def table_of(count: int) -> RouteTable[str]:
    table: RouteTable[str] = RouteTable()
    for index in range(count):
        table.open(f"m-{index:04d}", 1, "m", ready(f"m-{index:04d}"))
    return table


def cache(table: RouteTable[str], replica_id: str, tokens: list[int]) -> None:
    route = table.get(replica_id, 1)
    assert route is not None
    sequence = len(route.index)
    stored = [BlockStored(block_hash, b"") for block_hash in hash_blocks(tokens, SIZE)]
    route.index.forget()
    assert route.index.apply(KVEvents(incarnation=1, sequence=sequence, events=stored))


def weigh_everyone(table: RouteTable[str], tokens: list[int]):
    hashes = hash_blocks(tokens, SIZE)
    routes = [route for route in table.of("m") if route.has_room]
    return choose_replica(
        len(tokens), [r.as_candidate(SIZE * r.index.count_prefix(hashes)) for r in routes]
    ) if routes else None  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9), st.booleans()), max_size=60))
def test_the_order_is_that_of_a_sorted_list(changes) -> None:
    order, loads = LoadOrder(), {}
    for name, load, is_gone in changes:
        replica_id = f"r{name:02d}"
        if is_gone:
            order.remove(replica_id)
            loads.pop(replica_id, None)
        else:
            order.put(replica_id, load)
            loads[replica_id] = load
        expected = [name for _, name in sorted((load, name) for name, load in loads.items())]
        assert list(order) == expected and len(order) == len(loads)
        assert order.least(3) == expected[:3]
        some = {f"r{index:02d}" for index in range(0, 21, 2)}
        assert order.least_of(some, 4, {"r02"}) == [name for name in expected if name in some - {"r02"}][:4]
        assert order.least_of({"r04"}, 4) == [name for name in expected if name == "r04"]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans()), max_size=80))
def test_holders_are_those_that_said_so(events) -> None:
    holders, truth = BlockHolders(), set()
    for block, replica, is_stored in events:
        pair = (bytes([block]), f"r{replica}")
        (holders.add if is_stored else holders.discard)(*pair)
        (truth.add if is_stored else truth.discard)(pair)
        for number in range(6):
            assert holders.of(bytes([number])) == {name for block, name in truth if block == bytes([number])}
    assert len(holders) == len({block for block, _ in truth})


def test_an_index_takes_its_part_of_the_holders_with_it() -> None:
    holders = BlockHolders()
    first, second = PrefixIndex("a", 2, holders), PrefixIndex("b", 10, holders)
    blocks = [BlockStored(bytes([n]), b"") for n in range(2)]
    assert first.apply(KVEvents(incarnation=1, sequence=0, events=blocks))
    assert second.apply(KVEvents(incarnation=1, sequence=0, events=blocks))
    assert holders.of(bytes([0])) == {"a", "b"}
    second.apply(KVEvents(incarnation=1, sequence=1, events=[BlockRemoved(bytes([0]))]))
    assert (holders.of(bytes([0])), holders.of(bytes([1]))) == ({"a"}, {"a", "b"})
    assert not first.apply(KVEvents(incarnation=1, sequence=7, events=[]))  # a gap
    assert (holders.of(bytes([0])), holders.of(bytes([1]))) == (set(), {"b"})
    too_many = [BlockStored(bytes([n]), b"") for n in range(3)]
    assert not first.apply(KVEvents(incarnation=1, sequence=8, events=too_many))
    assert len(holders) == 1 and len(first) == 0
    second.forget()
    assert len(holders) == 0


@pytest.mark.parametrize("count", [1, 2, WEIGH_ALL, 60])
@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_the_one_among_all(count, seed) -> None:
    """Requests come and go at random; few replicas share a prefix, so that none that may be best is left out."""
    random, table = Random(seed), table_of(count)
    conversations = [[random.randrange(100) for _ in range(SIZE * random.randrange(1, 12))] for _ in range(30)]
    open_requests: list[tuple[str, str]] = []
    for number in range(300):
        tokens = random.choice(conversations) + [random.randrange(100) for _ in range(random.randrange(1, 40))]
        expected, chosen = weigh_everyone(table, tokens), table.choose("m", tokens, "", "")
        assert (expected is None) == (chosen is None)
        if chosen is not None:
            route, decision = chosen
            assert decision.replica_id == expected.replica_id
            route.add(f"w{number}", "request", decision.scores[0].uncached)
            open_requests.append((route.replica_id, f"w{number}"))
            if random.random() < 0.5:
                cache(table, route.replica_id, tokens)
        while open_requests and random.random() < 0.45:
            replica_id, wire_id = open_requests.pop(random.randrange(len(open_requests)))
            table.get(replica_id, 1).remove(wire_id)


def test_among_many_that_hold_a_prefix_one_with_little_to_do_is_taken() -> None:
    table, system_prompt = table_of(200), list(range(SIZE * 20))
    for route in table.of("m"):
        cache(table, route.replica_id, system_prompt)
        for number in range(int(route.replica_id[-2:]) % 5 + 1):
            route.add(f"w{number}", "request", 3)
    conversation = [*system_prompt, *range(SIZE * 20)]
    cache(table, "m-0150", conversation)
    route, decision = table.choose("m", [*system_prompt, 1, 2, 3], "", "")
    assert route.replica_id == weigh_everyone(table, [*system_prompt, 1, 2, 3]).replica_id
    assert len(decision.scores) <= MAX_HOLDERS + NUM_LEAST_LOADED + 1
    assert table.choose("m", [*conversation, 1], "", "")[0].replica_id == "m-0150"


def test_full_draining_and_unreachable_replicas_are_not_chosen() -> None:
    table = table_of(3)
    first, second, third = table.of("m")
    for number in range(OPEN_PER_SLOT * SLOTS):
        first.add(f"w{number}", "request", 0)
    second.drain()
    third.set_reachable(False)
    assert table.choose("m", [1], "", "") is None and table.choose("other", [1], "", "") is None
    third.set_reachable(True)
    assert table.choose("m", [1], "", "")[0] is third
    third.drain()
    first.remove("w0")
    assert table.choose("m", [1], "", "")[0] is first
    for route in (first, second, third):
        table.close(route)
    assert table.choose("m", [1], "", "") is None and not list(table)


def test_a_session_stays_among_many() -> None:
    table = table_of(100)
    route = table.get("m-0070", 1)
    other, _ = table.choose("m", [1] * 40, "", "s")
    assert other.replica_id == "m-0000"
    other.add("w", "request", 40)
    assert table.choose("m", [1] * 40, "", "s")[0] is other, "worth more than the little there is to do"
    assert standing_load(route.as_candidate()) == 0
    table.close(other)
    assert table.choose("m", [1] * 40, "", "s")[0].replica_id == "m-0001"


def lines_of_a_choice(count: int) -> int:
    """Lines of Python that one choice runs, in a deployment of so many replicas that all hold the prompt's prefix."""
    table, tokens, lines = table_of(count), list(range(200)), 0
    for route in table.of("m"):
        cache(table, route.replica_id, tokens[:96])

    def trace(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        table.choose("m", tokens, "", "")
    finally:
        sys.settrace(before)
    return lines


def test_what_a_choice_costs_does_not_grow_with_the_replicas() -> None:
    assert lines_of_a_choice(50) == lines_of_a_choice(400)


def pools(prefill: int, decode: int) -> RouteTable[str]:
    table: RouteTable[str] = RouteTable()
    for index in range(prefill + decode):
        name = f"m-{index:04d}"
        table.open(name, 1, "m", ready(name), is_prefill=index < prefill)
    return table


def test_requests_go_to_decode_replicas_and_their_prompts_to_prefill_replicas():
    table = pools(2, 2)
    tokens = list(range(64))
    cache(table, "m-0001", tokens)
    route, decision = table.choose("m", tokens, "", "")
    assert route.replica_id == "m-0002" and decision.scores[0].uncached == 64
    helper, _ = table.choose_helper("m", tokens, "", route)
    assert helper.replica_id == "m-0001", "it has the prompt"
    route.add("r", "r", 64, helper)
    assert (route.pending_tokens, helper.pending_tokens) == (0, 64)
    assert table.choose_helper("m", [9] * 64, "", route)[0].replica_id == "m-0000", "it has less to do"
    route.saw_token(route.attempts["r"])
    assert helper.pending_tokens == 0
    route.remove("r")
    assert helper.pending_tokens == 0 and not route.attempts


def test_without_a_decode_replica_the_others_do_both():
    table = pools(1, 1)
    table.close(table.get("m-0001", 1))
    route, _ = table.choose("m", [1] * 64, "", "")
    assert route.replica_id == "m-0000" and table.choose_helper("m", [1] * 64, "", route) is None


def test_a_helper_that_is_gone_is_in_no_order_when_its_attempts_end():
    table = pools(1, 2)
    route, _ = table.choose("m", [1] * 64, "", "")
    helper, _ = table.choose_helper("m", [1] * 64, "", route)
    route.add("r", "r", 64, helper)
    table.close(helper)
    route.remove("r")
    assert table.choose_helper("m", [1] * 64, "", route) is None
    assert table.choose("m", [1], "", "")[0].replica_id in ("m-0001", "m-0002")


def test_roles_change_at_once_and_back():
    table = pools(1, 2)
    table.set_roles("m", lambda name: name != "m-0002")
    route, _ = table.choose("m", [1] * 64, "", "")
    assert route.replica_id == "m-0002"
    assert {table.choose_helper("m", [1] * 64, "", route)[0].replica_id} <= {"m-0000", "m-0001"}
    table.set_roles("m", lambda name: False)
    assert table.choose_helper("m", [1] * 64, "", route) is None
    assert {candidate.replica_id for candidate in table.choose("m", [1], "", "")[1].scores} == {
        "m-0000",
        "m-0001",
        "m-0002",
    }


def test_of_replicas_that_do_both_the_one_with_most_of_the_prompt_is_named_as_its_source():
    table = table_of(3)
    tokens = list(range(80))
    to = table.get("m-0000", 1)
    assert table.choose_holder("m", tokens, "", to) is None
    cache(table, "m-0001", tokens[:32])
    cache(table, "m-0002", tokens[:64])
    cache(table, "m-0000", tokens)
    holder, num_cached = table.choose_holder("m", tokens, "", to)
    assert (holder.replica_id, num_cached) == ("m-0002", 64)
    assert table.choose_holder("m", tokens, "other tenant", to) is None
