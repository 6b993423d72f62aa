"""The lead's loop over a fake engine and a fake link: what it says, in which order, and when it ends."""

from __future__ import annotations

from collections import deque

import pytest

from cluster.messages import WorkerRef
from sonar.messages import (
    Abort,
    BlockStored,
    Drain,
    Drained,
    Draining,
    FinishReason,
    FromPeer,
    KVEvents,
    LeadHello,
    LeadStats,
    PeerGone,
    Ping,
    Pong,
    Resume,
    Roll,
    StepAhead,
    Submit,
    TakeRoll,
    Tokens,
    ToPeer,
)
from sonar.peer_messages import AskBlocks, BlocksRefused, KVLayout
from sonar.sampling_params import SamplingParams
from sonar.worker.lead_loop import LeadLoop
from tests.cluster.world import lead_ready
from tests.fakes import BAD, POISON, FakeEngine, fake_output

INCARNATION = 4
HELLO = LeadHello(incarnation=INCARNATION, replica_id="m-0", pid=1)
READY = lead_ready(WorkerRef(replica_id="m-0", incarnation=INCARNATION))


class FakeLink:
    """Gives the loop one batch of messages a look; time passes when it waits."""

    def __init__(self, batches: list) -> None:
        self.batches = deque(batches)
        self.sent: list = []
        self.now = 0.0
        self.waits: list[float] = []
        self.num_full = 0
        self.reconnect_at = -1
        self.is_connected = True

    def send(self, message) -> bool:
        if self.num_full:
            self.num_full -= 1
            return False
        self.sent.append(message)
        return True

    def wait_writable(self, timeout_s: float) -> bool:
        return False

    def receive(self, timeout_s: float) -> list:
        self.waits.append(timeout_s)
        self.now += timeout_s or 0.01
        if not self.batches:
            return [Drain(incarnation=INCARNATION)]
        return self.batches.popleft()

    def take_reconnected(self) -> bool:
        self.reconnect_at -= 1
        return self.reconnect_at == 0

    def of(self, kind) -> list:
        return [message for message in self.sent if isinstance(message, kind)]


def submit(request_id: str, prompt=(1, 2), max_tokens: int = 3, emitted=(), incarnation: int = INCARNATION) -> Submit:
    sampling = SamplingParams(max_tokens=max_tokens, seed=5)
    return Submit(
        incarnation=incarnation,
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling=sampling,
        emitted_token_ids=list(emitted),
    )


def run(batches: list, should_drain=lambda: False, prepare=lambda link, engine: None) -> tuple[FakeLink, LeadLoop]:
    link, engine = FakeLink(batches), FakeEngine(0.0, 8, -1)
    prepare(link, engine)
    loop = LeadLoop(engine, link, HELLO, READY, should_drain, lambda: link.now)
    loop.run()
    return link, loop


def test_tokens_are_numbered_and_the_last_word_is_drained() -> None:
    link, loop = run([[submit("a"), submit("b", [7])], []])
    tokens = link.of(Tokens)
    assert [message.sequence for message in tokens] == [0, 1, 2]
    assert [event.token_ids[0] for m in tokens for event in m.events if event.request_id == "a"] == fake_output(
        [1, 2], 5, 3
    )
    assert tokens[-1].events[0].finish is FinishReason.LENGTH
    assert link.sent[-1] == Drained(incarnation=INCARNATION)
    assert loop.num_steps == 3


def test_a_moved_request_goes_on_after_its_emitted_tokens() -> None:
    link, _ = run([[submit("a", max_tokens=4, emitted=fake_output([1, 2], 5, 3))]])
    (message,) = link.of(Tokens)
    assert (message.events[0].first, message.events[0].token_ids) == (3, fake_output([1, 2], 5, 4)[3:])


def test_a_refused_request_and_an_abort_get_their_terminal_events() -> None:
    batch = [submit("bad", [BAD], emitted=[1]), submit("a"), Abort(incarnation=INCARNATION, request_id="a")]
    link, _ = run([[*batch, Abort(incarnation=INCARNATION, request_id="unknown")]])
    (message,) = link.of(Tokens)
    bad, aborted = message.events
    assert (bad.finish, bad.first, "667" in bad.error) == (FinishReason.ERROR, 1, True)
    assert (aborted.request_id, aborted.finish) == ("a", FinishReason.ABORT)


def test_messages_of_another_incarnation_are_dropped() -> None:
    link, loop = run([[submit("a", incarnation=3), Ping(incarnation=5, number=1), Drain(incarnation=3)], [], []])
    assert loop.num_stale == 3 and not link.of(Tokens) and not link.of(Pong)


def test_ping_is_answered_from_the_loop() -> None:
    link, _ = run([[Ping(incarnation=INCARNATION, number=9)]])
    assert link.of(Pong) == [Pong(incarnation=INCARNATION, number=9)]


def test_an_ask_for_blocks_is_refused_where_none_can_be_had() -> None:
    layout = KVLayout(
        model="m",
        dtype="float32",
        activations="float32",
        block_size=16,
        num_kv_heads=1,
        head_dim=1,
        groups=("full",),
        block_bytes=(64,),
        ranks="1x1",
        transport="shm",
    )
    ask = AskBlocks(transfer=4, token_ids=[1] * 17, first=0, end=1, layout=layout)
    asked = FromPeer(incarnation=INCARNATION, replica_id="m-1", peer_incarnation=3, message=ask)
    gone = PeerGone(incarnation=INCARNATION, replica_id="m-1", peer_incarnation=3, has_ended=True)
    link, _ = run([[asked, gone]])
    (said,) = link.of(ToPeer)
    assert (said.replica_id, said.peer_incarnation) == ("m-1", 3)
    assert isinstance(said.message, BlocksRefused) and said.message.transfer == 4


def test_an_idle_lead_waits_and_reports_each_second() -> None:
    link, _ = run([[]] * 40)
    assert min(w for w in link.waits[1:] if w) > 0 and max(link.waits) <= 0.25
    assert 9 <= len(link.of(LeadStats)) <= 12 and all(s.incarnation == INCARNATION for s in link.of(LeadStats))


def test_a_busy_lead_does_not_wait_and_tells_of_the_change() -> None:
    link, _ = run([[submit("a", max_tokens=4)], [], [], [], []])
    busy = [stats.num_running for stats in link.of(LeadStats)]
    assert busy[:2] == [1, 0], "on becoming busy and on becoming idle"
    assert link.waits[1:4] == [0.0, 0.0, 0.0]


def test_draining_finishes_what_is_open() -> None:
    told = iter([False, True])
    link, _ = run([[submit("a", max_tokens=3)], [], []], should_drain=lambda: next(told, True))
    assert [type(m) for m in link.sent if isinstance(m, Draining | Drained)] == [Draining, Drained]
    assert sum(len(e.token_ids) for m in link.of(Tokens) for e in m.events) == 3


def test_a_reconnect_is_followed_by_hello_and_ready() -> None:
    def prepare(link: FakeLink, engine: FakeEngine) -> None:
        link.reconnect_at = 2

    link, _ = run([[], [], []], prepare=prepare)
    assert link.of(LeadHello) == [HELLO] and link.of(type(READY)) == [READY]


def test_a_full_queue_holds_the_engine_up_and_loses_nothing() -> None:
    def prepare(link: FakeLink, engine: FakeEngine) -> None:
        link.num_full = 5

    link, _ = run([[submit("a")], []], prepare=prepare)
    assert [m.sequence for m in link.of(Tokens)] == [0, 1, 2]


def test_cache_events_are_numbered_on_their_own() -> None:
    def prepare(link: FakeLink, engine: FakeEngine) -> None:
        changes = deque([[BlockStored(b"a", b"")], [], [BlockStored(b"b", b"a")]])
        engine.take_kv_events = lambda: changes.popleft() if changes else []

    link, _ = run([[submit("a")], [], []], prepare=prepare)
    assert [(m.sequence, m.events[0].block_hash) for m in link.of(KVEvents)] == [(0, b"a"), (1, b"b")]


def test_a_long_step_is_announced_before_it_and_its_end_is_said_at_once() -> None:
    def prepare(link: FakeLink, engine: FakeEngine) -> None:
        compute, durations = engine._compute, deque([0.02, 0.02, 5.0, 7.0, 0.02])

        def slowly() -> list:
            link.now += durations.popleft()
            return compute()

        engine._compute = slowly

    link, _ = run([[submit("a", max_tokens=5)], [], [], [], []], prepare=prepare)
    ahead = link.of(StepAhead)
    assert [(m.step, m.num_tokens, m.expected_s) for m in ahead[:1]] == [(0, 1, 150.0)], "nothing is known yet"
    assert [(m.step, round(m.expected_s)) for m in ahead[1:]] == [(3, 5), (4, 7)], "5 s had not been expected"
    for message in ahead:
        after = link.sent[link.sent.index(message) :]
        kinds = [type(m) for m in after if isinstance(m, Tokens | LeadStats)]
        assert kinds[:2] == [Tokens, LeadStats]


def test_what_a_step_raises_ends_the_loop() -> None:
    link = FakeLink([[submit("a", [POISON], max_tokens=9)], [], [], []])
    loop = LeadLoop(FakeEngine(0.0, 8, -1), link, HELLO, READY, lambda: False, lambda: link.now)
    with pytest.raises(ArithmeticError):
        loop.run()
    assert loop.num_steps == 3 and len(link.of(Tokens)) == 3


def test_without_a_head_it_computes_on_and_tells_the_next_one_from_where_it_is_asked() -> None:
    lost: list = []

    def cut(link, engine) -> None:
        receive = link.receive

        def receive_and_cut(timeout_s: float) -> list:
            messages = receive(timeout_s)
            link.is_connected = len(link.waits) not in range(3, 6)
            lost.append(not link.is_connected)
            return messages

        link.receive = receive_and_cut

    ask = [TakeRoll(incarnation=INCARNATION), Resume(incarnation=INCARNATION, request_id="a", first=1)]
    unknown = Resume(incarnation=INCARNATION, request_id="nobody", first=0)
    link, loop = run([[submit("a", max_tokens=8)], [], [], [], [], [*ask, unknown], [], []], prepare=cut)
    assert loop.num_steps == 8 and sum(lost) == 3
    (roll,) = link.of(Roll)
    assert [(held.request_id, held.first, held.end) for held in roll.requests] == [("a", 0, 5)]
    whole = fake_output([1, 2], 5, 8)
    tokens = link.of(Tokens)
    assert [m.sequence for m in tokens] == list(range(len(tokens))) and roll.next_sequence == 2
    events = [event for message in tokens for event in message.events]
    assert [(event.first, event.token_ids) for event in events] == [
        (0, whole[:1]),
        (1, whole[1:2]),
        (1, whole[1:5]),
        *[(number, [whole[number]]) for number in (5, 6, 7)],
    ]
