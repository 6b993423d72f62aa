"""Open requests over fake replicas: order, moves, gaps, repeats, poison; random histories against the unbroken run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.dispatcher import RESUME_S
from cluster.gateway import GenerateRequest
from cluster.held import CLAIM_S
from sonar.block_hash import hash_blocks
from sonar.errors import CapacityError, UserError
from sonar.messages import (
    BlockRemoved,
    BlockStored,
    FinishReason,
    KVEvents,
    TokenEvent,
    Tokens,
)
from sonar.sampling_params import SamplingParams
from tests.cluster.bench import Bench, whole
from tests.cluster.world import deployment


def test_a_request_waits_for_a_replica_and_runs_to_its_end() -> None:
    bench = Bench()
    bench.submit("r", 3)
    bench.open_route("m-0")
    for _ in range(3):
        bench.step()
    assert bench.tokens("r") == whole("r", 3) and bench.finish("r") is FinishReason.LENGTH
    assert bench.read["r"][0].num_cached_tokens == 5 and bench.read["r"][1].num_cached_tokens == -1
    assert bench.table.num_open == 0


def test_after_a_death_another_replica_goes_on_after_the_last_token() -> None:
    bench = Bench()
    bench.open_route("m-0")
    bench.submit("r", 6)
    bench.step()
    bench.step()
    bench.now = 5.0
    bench.kill("m-0")
    bench.now = 7.5
    other = bench.open_route("m-1")
    assert other.running["r~2"][0].emitted_token_ids == whole("r", 2)
    for _ in range(4):
        bench.step()
    assert bench.tokens("r") == whole("r", 6)
    assert [e.num_cached_tokens for e in bench.read["r"]] == [5, -1, -1, -1, -1, -1], "usage is told once"
    counters = bench.table.counters
    assert (counters.migrations, counters.tokens_replayed, counters.pauses_s) == (1, 2, [2.5])


def test_tokens_of_a_dead_incarnation_and_repeats_are_not_handed_out() -> None:
    bench = Bench()
    old = bench.open_route("m-0")
    bench.submit("r", 6)
    late = old.step()
    bench.table.on_message("m-0", late)
    assert not bench.table.on_message("m-0", late), "a repeated message"
    late = old.step()
    bench.kill("m-0")
    bench.open_route("m-0")
    assert not bench.table.on_message("m-0", late), "a stale one"
    for _ in range(5):
        bench.step()
    assert bench.tokens("r") == whole("r", 6)


def test_an_event_that_begins_early_is_trimmed() -> None:
    bench = Bench()
    replica = bench.open_route("m-0")
    bench.submit("r", 6)
    bench.step()
    event = TokenEvent(request_id="r~1", first=0, token_ids=whole("r", 3), logprobs=[[], [], []])
    bench.table.on_message("m-0", Tokens(incarnation=replica.incarnation, sequence=1, events=[event]))
    bench.drain()
    assert bench.tokens("r") == whole("r", 3) and len(bench.read["r"][1].logprobs) == 2
    assert bench.table.counters.repeated_tokens == 1


def test_after_a_gap_what_was_lost_is_told_again_and_nothing_computed_again() -> None:
    bench = Bench()
    replica = bench.open_route("m-0")
    bench.submit("a", 2)
    bench.submit("b", 9)
    bench.step()
    replica.step()  # lost: a's end, a token of b
    bench.step()  # b's event begins after a gap; a is not in it
    assert set(replica.running) == {"b~1"} and bench.tokens("a") == whole("a", 2)
    for _ in range(9):
        bench.step()
    assert bench.table.counters.resumed == 2 and bench.table.counters.migrations == 0
    assert bench.tokens("a") == whole("a", 2) and bench.tokens("b") == whole("b", 9)
    assert bench.table.counters.sequence_gaps >= 1


def test_after_a_reconnect_attempts_go_on_and_lost_ones_begin_again() -> None:
    bench = Bench()
    replica = bench.open_route("m-0")
    bench.submit("a", 4)
    bench.submit("b", 4)
    bench.step()
    del replica.running["b~1"]  # its Submit was lost
    replica.step()
    replica.replay._open.pop("b~1")
    bench.table.resync_route("m-0", replica.incarnation)
    bench.step()
    assert set(replica.running) == {"a~1", "b~2"}
    for _ in range(4):
        bench.step()
    assert bench.tokens("a") == whole("a", 4) and bench.tokens("b") == whole("b", 4)


def test_a_new_head_goes_on_where_the_clients_are_and_nothing_is_computed_again() -> None:
    bench = Bench()
    replica = bench.open_route("m-0")
    bench.submit("a", 9)
    bench.submit("b", 3)
    bench.step()
    bench.step()
    replica.step()  # for nobody: the head is gone; b has ended
    replica.step()
    bench.new_head()
    bench.deliver("m-0")
    bench.drain()
    assert bench.tokens("a") == whole("a", 4) and bench.tokens("b") == whole("b", 3)
    assert bench.finish("b") is FinishReason.LENGTH and set(replica.running) == {"a~1"}
    for _ in range(5):
        bench.step()
    assert bench.tokens("a") == whole("a", 9) and bench.finish("a") is FinishReason.LENGTH
    counters = bench.table.counters
    assert (counters.resumed, counters.migrations, counters.tokens_replayed) == (2, 0, 0)


def test_what_nobody_comes_back_for_is_aborted_after_its_time() -> None:
    bench = Bench()
    replica = bench.open_route("m-0")
    bench.submit("gone", 1000)
    bench.step()
    bench.table._journal.close(bench.table._open["gone"].entry, FinishReason.ABORT)  # its client is no one who resumes
    bench.new_head()
    bench.now = CLAIM_S - 1
    bench.table.tick()
    assert "gone~1" in replica.running
    bench.now = CLAIM_S
    bench.table.tick()
    assert not replica.running and bench.table.counters.abandoned == 1


def test_an_attempt_that_a_replica_does_not_have_any_more_begins_again_after_its_time() -> None:
    bench = Bench()
    replica = bench.open_route("m-0")
    bench.submit("a", 9)
    bench.step()
    bench.table.resync_route("m-0", replica.incarnation)
    roll = replica.answers.pop()
    replica.replay._open.clear()  # between its answer and the question for the tokens
    replica.running.clear()
    bench.table.on_message("m-0", roll)
    assert not replica.running
    bench.now = RESUME_S
    bench.table.tick()
    for _ in range(8):
        bench.step()
    assert bench.tokens("a") == whole("a", 9) and bench.table.counters.migrations == 1


def test_a_request_sent_between_question_and_answer_is_not_taken_for_lost() -> None:
    bench = Bench()
    replica = bench.open_route("m-0")
    bench.table.resync_route("m-0", replica.incarnation)
    bench.submit("late", 3)
    for _ in range(3):
        bench.step()
    assert bench.tokens("late") == whole("late", 3) and bench.table.counters.migrations == 0


def test_abort_ends_at_once_and_the_replicas_last_word_frees_its_place() -> None:
    bench = Bench()
    replica = bench.open_route("m-0", max_num_requests=1)
    for name in "abc":
        bench.submit(name)
    assert set(replica.running) == {"a~1", "b~1"}
    bench.step()
    bench.table.abort("a", FinishReason.STOP)
    bench.drain()
    assert bench.finish("a") is FinishReason.STOP and bench.tokens("a") == whole("a", 1)
    assert "c~1" not in replica.running
    bench.step()
    assert "c~1" in replica.running
    bench.table.abort("c")
    bench.table.abort("unknown")
    bench.drain()
    assert bench.finish("c") is FinishReason.ABORT


def test_abort_while_waiting_leaves_the_queue() -> None:
    bench = Bench()
    bench.submit("a")
    bench.table.abort("a")
    assert bench.table.num_waiting("m") == 0
    assert not bench.open_route("m-0").running


def test_priority_then_arrival_and_a_moved_request_is_ahead() -> None:
    bench = Bench()
    bench.open_route("m-0", max_num_requests=1)
    bench.submit("first")
    bench.submit("second")
    for name, priority in (("third", 0), ("urgent", -1), ("fourth", 0)):
        bench.submit(name, priority=priority)
    bench.kill("m-0", blames_requests=False)
    order = list(bench.open_route("m-1", max_num_requests=1).running)
    assert order == ["urgent~1", "first~2"]


def test_a_full_queue_a_stop_and_bad_requests_are_refused() -> None:
    bench = Bench()
    config = deployment()
    object.__setattr__(config, "max_queued", 2)
    bench.table.set_deployments([config])
    bench.submit("a")
    bench.submit("b")
    with pytest.raises(CapacityError, match="2 requests wait for m already"):
        bench.submit("c")
    with pytest.raises(UserError, match="is in use"):
        bench.table.open(GenerateRequest("a", "m", [1], SamplingParams(seed=1)))
    with pytest.raises(UserError, match="not deployed"):
        bench.table.open(GenerateRequest("d", "other", [1], SamplingParams(seed=1)))
    with pytest.raises(UserError, match="at most 1000000 can be sent"):
        bench.submit("long", prompt=range(1_000_001))
    bias = SamplingParams(seed=1, bad_words=((70000,) * 1_100_000,))
    with pytest.raises(UserError, match="shorten logit_bias or bad_words"):
        bench.table.open(GenerateRequest("biased", "m", [1], bias))
    bench.table.close_to_new()
    with pytest.raises(CapacityError, match="stopping"):
        bench.submit("e")


def test_waiting_has_a_deadline_and_a_removed_model_ends_its_requests() -> None:
    bench = Bench()
    bench.submit("a")
    bench.now = 601.0
    bench.table.tick()
    bench.submit("b")
    bench.table.set_deployments([])
    bench.drain()
    assert "took it within 600 s" in bench.read["a"][0].error and "not deployed any more" in bench.read["b"][0].error


def test_no_hope_fails_those_that_wait() -> None:
    bench = Bench()
    bench.submit("a")
    bench.table.fail_waiting("m", "all replicas failed")
    bench.drain()
    assert bench.finish("a") is FinishReason.ERROR


def test_an_unreachable_replica_is_passed_over_and_tried_again() -> None:
    bench = Bench()
    replica = bench.open_route("m-0")
    replica.is_reachable = False
    bench.submit("a")
    assert bench.table.num_waiting("m") == 1
    replica.is_reachable = True
    bench.submit("b")
    assert not replica.running, "not before the next tick or reconnect"
    bench.table.tick()
    assert set(replica.running) == {"a~2", "b~1"}


def test_a_draining_replica_gets_nothing_new() -> None:
    bench = Bench()
    first = bench.open_route("m-0")
    bench.submit("a")
    bench.table.drain_route("m-0", first.incarnation)
    bench.submit("b")
    assert list(first.running) == ["a~1"] and bench.table.num_waiting("m") == 1


def test_a_poison_request_fails_alone() -> None:
    """ "bad" kills its replica whenever it gets to token 3; the others must not fail with it."""
    bench = Bench()
    names = ["a", "b", "c", "bad"]
    bench.open_route("m-0")
    for name in names:
        bench.submit(name, 40)
    for _ in range(400):
        while any(w.startswith("bad") and number >= 3 for w, (_, number) in bench.replicas["m-0"].running.items()):
            bench.kill("m-0")
            bench.open_route("m-0")
        bench.step()
    assert bench.finish("bad") is FinishReason.ERROR and bench.tokens("bad") == whole("bad", 3)
    for name in "abc":
        assert bench.tokens(name) == whole(name, 40) and bench.finish(name) is FinishReason.LENGTH
    assert bench.table.counters.convicted == 1


def test_a_sole_request_at_two_deaths_without_progress_fails() -> None:
    bench = Bench()
    bench.submit("a", 50)
    for _ in range(2):
        bench.open_route("m-0")
        bench.step()
        bench.kill("m-0")
    bench.drain()
    assert bench.finish("a") is FinishReason.ERROR and "2 replicas in a row" in bench.read["a"][-1].error


def test_crashes_between_which_there_was_progress_convict_nobody() -> None:
    bench = Bench()
    bench.submit("a", 50)
    for _ in range(5):
        bench.open_route("m-0")
        for _ in range(9):
            bench.step()
        bench.kill("m-0")
    bench.open_route("m-0")
    for _ in range(5):
        bench.step()
    assert bench.tokens("a") == whole("a", 50)


def test_lost_hosts_convict_nobody() -> None:
    bench = Bench()
    bench.submit("a", 5)
    for _ in range(4):
        bench.open_route("m-0")
        bench.kill("m-0", blames_requests=False)
    bench.open_route("m-0")
    for _ in range(5):
        bench.step()
    assert bench.tokens("a") == whole("a", 5)


def test_a_cached_prefix_attracts_until_its_replica_is_busier() -> None:
    bench = Bench()
    bench.open_route("m-0", max_num_requests=50)
    cached = bench.open_route("m-1", max_num_requests=50)
    prompt = list(range(64))
    hashes = hash_blocks(prompt, 16)
    stored = [BlockStored(h, b"") for h in hashes]
    assert bench.table.on_message("m-1", KVEvents(incarnation=cached.incarnation, sequence=0, events=stored))
    for number in range(8):
        bench.submit(f"r{number}", prompt=prompt)
    placed = {name: list(replica.running) for name, replica in bench.replicas.items()}
    assert placed["m-1"][:4] == ["r0~1", "r1~1", "r2~1", "r3~1"] and placed["m-0"], placed
    removed = [BlockRemoved(hashes[0])]
    bench.table.on_message("m-1", KVEvents(incarnation=cached.incarnation, sequence=1, events=removed))
    assert [len(r.index) for r in bench.table.routes()] == [0, 3]
    bench.table.on_message("m-1", KVEvents(incarnation=cached.incarnation, sequence=3, events=[]))
    assert [len(r.index) for r in bench.table.routes()] == [0, 0], "after a gap all is forgotten"


def test_a_session_stays_where_it_was() -> None:
    bench = Bench()
    bench.open_route("m-0", max_num_requests=50)
    bench.open_route("m-1", max_num_requests=50)
    bench.submit("x", prompt=range(30))
    for number in range(4):
        bench.submit(f"s{number}", session="alice")
    assert list(bench.replicas["m-1"].running) == [f"s{n}~1" for n in range(4)]


OTHER_ACTIONS = ("kill", "lose_host", "open", "lose_message", "lose_submit", "repeat", "submit", "abort", "tick")
ACTIONS = ("step", "step", "step", "step", "unreachable", "new_head", *OTHER_ACTIONS)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 100)), max_size=80))
def test_whatever_happens_every_output_is_that_of_the_unbroken_run(history) -> None:
    bench = Bench()
    aborted: set[str] = set()
    sizes: dict[str, int] = {}
    for action, number in history:
        bench.now += 0.1
        replicas = sorted(bench.replicas)
        chosen = replicas[number % len(replicas)] if replicas else None
        match action:
            case "open" if len(replicas) < 3 and f"m-{number % 3}" not in replicas:
                bench.open_route(f"m-{number % 3}", max_num_requests=1 + number % 4)
            case "submit":
                name = f"r{len(sizes)}"
                sizes[name] = 1 + number % 12
                bench.submit(name, sizes[name], prompt=range(number % 40 + 1))
            case "abort" if sizes:
                name = f"r{number % len(sizes)}"
                aborted.add(name)
                bench.table.abort(name)
            case "tick":
                bench.table.tick()
            case "lose_host" if chosen:
                bench.kill(chosen, blames_requests=False)
            case "kill" if chosen and number < 40:
                bench.kill(chosen)
            case "step" if chosen:
                bench.step(chosen)
            case "repeat" if chosen:
                message = bench.replicas[chosen].step()
                bench.table.on_message(chosen, message)
                assert not bench.table.on_message(chosen, message)
            case "lose_message" if chosen:
                bench.replicas[chosen].step()
            case "lose_submit" if chosen and bench.replicas[chosen].running:
                # A Submit can be lost only with its connection, which is followed by a hello.
                wire_id, _ = bench.replicas[chosen].running.popitem()
                bench.replicas[chosen].replay._open.pop(wire_id)
                bench.table.resync_route(chosen, bench.replicas[chosen].incarnation)
            case "new_head":
                bench.new_head()
            case "unreachable" if chosen:
                bench.replicas[chosen].is_reachable = not bench.replicas[chosen].is_reachable
            case _:
                pass
    for replica_id in list(bench.replicas):
        bench.kill(replica_id, blames_requests=False)
    bench.open_route("m-9")
    for _ in range(40 + 12 * len(sizes)):
        bench.step()
    assert bench.table.num_open == 0 and bench.table.num_waiting("m") == 0
    for name, size in sizes.items():
        finish = bench.finish(name)
        tokens = bench.tokens(name)
        assert tokens == whole(name, len(tokens))
        if finish is FinishReason.LENGTH:
            assert tokens == whole(name, size)
        else:
            assert finish is (FinishReason.ABORT if name in aborted else FinishReason.ERROR)
            if finish is FinishReason.ERROR:
                assert "replicas in a row" in bench.read[name][-1].error
    (route,) = bench.table.routes()
    assert not route.attempts and route.pending_tokens == 0


def test_a_removed_model_finishes_what_runs_and_ends_what_would_have_to_move() -> None:
    bench = Bench()
    bench.open_route("m-0")
    bench.submit("stays", max_tokens=3)
    bench.submit("moves", max_tokens=9)
    bench.table.set_deployments([])
    for _ in range(3):
        bench.step()
    assert bench.finish("stays") is FinishReason.LENGTH and bench.tokens("stays") == whole("stays", 3)
    assert bench.finish("moves") is None
    bench.kill("m-0", blames_requests=False)
    bench.table.tick()
    bench.drain()
    assert bench.finish("moves") is FinishReason.ERROR and "not deployed any more" in bench.read["moves"][-1].error
