"""A request table over fake replicas: what each was sent, what it says, and what each client has read."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from cluster.gateway import GenerateRequest
from cluster.journal import MemoryJournal
from cluster.messages import WorkerRef
from cluster.requests import RequestTable
from cluster.streams import RequestStream
from sonar.messages import (
    Abort,
    FinishReason,
    Resume,
    Roll,
    Submit,
    TakeRoll,
    TokenEvent,
    Tokens,
)
from sonar.sampling_params import SamplingParams
from sonar.worker.replay import Replay
from tests.cluster.world import deployment, lead_ready


def token(request_id: str, number: int) -> int:
    """What any replica computes: a function of the request and the position alone."""
    return sum(request_id.encode()) * 31 + number * 7


@dataclass
class FakeReplica:
    """Computes a token a step for each request it was sent."""

    replica_id: str
    incarnation: int
    sequence: int = 0
    running: dict[str, list] = field(default_factory=dict)
    ended: list[TokenEvent] = field(default_factory=list)
    answers: list = field(default_factory=list)
    replay: Replay = field(default_factory=Replay)
    is_reachable: bool = True

    def receive(self, message) -> None:
        assert message.incarnation == self.incarnation
        match message:
            case Submit():
                assert message.request_id not in self.running
                self.running[message.request_id] = [message, len(message.emitted_token_ids)]
                self.replay.begin(message)
            case TakeRoll():
                roll = Roll(
                    incarnation=self.incarnation,
                    ready=lead_ready(WorkerRef(replica_id=self.replica_id, incarnation=self.incarnation)),
                    next_sequence=self.sequence,
                    requests=self.replay.roll(),
                )
                self.answers.append(roll)
            case Resume():
                event = self.replay.since(message.request_id, message.first)
                if event is not None:
                    self.answers.append(self._tokens([event]))
            case Abort() if message.request_id in self.running:
                number = self.running.pop(message.request_id)[1]
                self.ended.append(
                    TokenEvent(request_id=message.request_id, first=number, token_ids=[], finish=message.finish)
                )

    def step(self) -> Tokens:
        events, self.ended = self.ended, []
        for wire_id, (submit, number) in list(self.running.items()):
            is_last = number + 1 == submit.sampling.max_tokens
            name = wire_id.rpartition("~")[0]
            events.append(
                TokenEvent(
                    request_id=wire_id,
                    first=number,
                    token_ids=[token(name, number)],
                    finish=FinishReason.LENGTH if is_last else None,
                    num_cached_tokens=5 if number == len(submit.emitted_token_ids) else -1,
                )
            )
            self.running[wire_id][1] += 1
            if is_last:
                del self.running[wire_id]
        for event in events:
            self.replay.record(event, 0.0)
        return self._tokens(events)

    def _tokens(self, events: list[TokenEvent]) -> Tokens:
        self.sequence += 1
        return Tokens(incarnation=self.incarnation, sequence=self.sequence - 1, events=events)


class Bench:
    """A table, its replicas, and what each client has read."""

    def __init__(self, **config) -> None:
        self.now, self.config, self.num_heads = 0.0, config, 0
        self.replicas: dict[str, FakeReplica] = {}
        self.table = RequestTable(MemoryJournal(), self, lambda: self.now)
        self.table.set_deployments([deployment(**config)])
        self.streams: dict[str, RequestStream] = {}
        self.read: dict[str, list[TokenEvent]] = {}
        self.incarnation = 0

    def send_to_lead(self, replica_id, incarnation, message) -> bool:
        replica = self.replicas.get(replica_id)
        if replica is None or replica.incarnation != incarnation or not replica.is_reachable:
            return False
        replica.receive(message)
        return True

    def open_route(self, replica_id: str, max_num_requests: int = 4, **ready) -> FakeReplica:
        self.incarnation += 1
        replica = self.replicas[replica_id] = FakeReplica(replica_id, self.incarnation)
        ref = WorkerRef(replica_id=replica_id, incarnation=self.incarnation)
        message = lead_ready(ref, max_num_requests=max_num_requests, **ready)
        self.table.open_route(replica_id, self.incarnation, "m", message)
        return replica

    def new_head(self) -> None:
        """The head is gone; the next one readmits what its clients have read, and hears from each replica in turn."""
        self.num_heads += 1
        before, self.table = self.table, RequestTable(MemoryJournal(self.num_heads), self, lambda: self.now)
        self.table.set_deployments([deployment(**self.config)])
        self.table.recovery.has_begun = True
        for entry in before._journal.open_entries():
            request = entry.request
            stream = self.table.open(
                dataclasses.replace(request, emitted_token_ids=self.tokens(request.request_id)), ignore_limit=True
            )
            self.streams[request.request_id] = stream
        for replica_id, replica in self.replicas.items():
            replica.answers.clear()
            replica.receive(TakeRoll(incarnation=replica.incarnation))
            roll = replica.answers.pop()
            self.table.open_route(replica_id, replica.incarnation, "m", roll.ready, roll)
        self.table.end_recovery()

    def kill(self, replica_id: str, blames_requests: bool = True) -> None:
        replica = self.replicas.pop(replica_id)
        self.table.close_route(replica_id, replica.incarnation, blames_requests=blames_requests)

    def submit(self, request_id: str, max_tokens: int = 10, prompt=(1, 2, 3), **fields) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, seed=1)
        request = GenerateRequest(request_id, "m", list(prompt), sampling, **fields)
        self.streams[request_id] = self.table.open(request)
        self.read[request_id] = []

    def step(self, *replica_ids: str) -> None:
        for replica_id in replica_ids or list(self.replicas):
            self.deliver(replica_id)
            self.table.on_message(replica_id, self.replicas[replica_id].step())
            self.deliver(replica_id)
        self.drain()

    def deliver(self, replica_id: str) -> None:
        """What the replica was asked for arrives."""
        replica = self.replicas[replica_id]
        while replica.answers:
            self.table.on_message(replica_id, replica.answers.pop(0))

    def drain(self) -> None:
        """Clients read; a coroutine with something to give returns at its first step."""
        for request_id, stream in self.streams.items():
            while stream._waiting is not None:
                try:
                    stream.next().send(None)
                except StopIteration as result:
                    self.read[request_id].append(result.value)

    def tokens(self, request_id: str) -> list[int]:
        numbers = []
        for event in self.read[request_id]:
            assert event.first == len(numbers) and event.request_id == request_id
            numbers += event.token_ids
        return numbers

    def finish(self, request_id: str) -> FinishReason | None:
        ends = [e.finish for e in self.read[request_id] if e.finish is not None]
        assert len(ends) <= 1 and (not ends or self.read[request_id][-1].finish is ends[0])
        return ends[0] if ends else None


def whole(request_id: str, count: int) -> list[int]:
    return [token(request_id, number) for number in range(count)]
