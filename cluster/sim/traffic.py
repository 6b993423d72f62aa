"""Clients of a simulation: prompts with Zipf-shared prefixes, and a reader a request that checks every token.

Requests go through the real `RequestTable`. What a reader finds wrong is an assertion, not a figure.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from cluster.gateway import GenerateRequest
from cluster.requests import RequestTable
from cluster.sim.engine import VOCAB_SIZE, token_at
from cluster.sim.link import SimLink
from cluster.streams import RequestStream
from sonar.errors import CapacityError
from sonar.messages import FinishReason
from sonar.sampling_params import SamplingParams

NUM_PREFIXES = 500
ZIPF_EXPONENT = 1.1


@dataclass
class _Client:
    """One request's reader. num_tokens: read so far."""

    sampling: SamplingParams
    stream: RequestStream
    num_tokens: int = 0


class _Prompts:
    """Makes prompts: a prefix that others share, by Zipf's law, and some tokens of its own."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._prefixes = [
            [random.randrange(VOCAB_SIZE) for _ in range(random.randrange(64, 513))] for _ in range(NUM_PREFIXES)
        ]
        self._weights = list(accumulate(rank**-ZIPF_EXPONENT for rank in range(1, NUM_PREFIXES + 1)))

    def draw(self) -> list[int]:
        """Token ids of the next prompt."""
        random = self._random
        prefix = random.choices(self._prefixes, cum_weights=self._weights)[0]
        return prefix + [random.randrange(VOCAB_SIZE) for _ in range(random.randrange(8, 65))]


class Traffic:
    """Owner of the clients.

    Args:
        models: served names; each request picks one evenly.

    Attributes:
        finished: requests by how they ended. errors: their texts without numbers, counted. refused: not accepted.
    """

    def __init__(self, link: SimLink, table: RequestTable, models: list[str], random: Random) -> None:
        self.finished: Counter[FinishReason] = Counter()
        self.errors: Counter[str] = Counter()
        self.accepted = self.refused = self.num_tokens = 0
        self._link = link
        self._table = table
        self._models = models
        self._random = random
        self._clients: dict[str, _Client] = {}
        self._prompts = _Prompts(random)
        self._period = 0

    @property
    def num_open(self) -> int:
        """Accepted requests that have not ended."""
        return len(self._clients)

    def begin(self, requests_per_s: float) -> None:
        """Lets requests come, at random moments, until the next call; 0 ends them."""
        self._period += 1
        if requests_per_s:
            self._plan_next(self._period, requests_per_s)

    def read_all(self) -> None:
        """Every client reads what has come for it."""
        for request_id in list(self._clients):
            self._read(request_id)

    def _plan_next(self, period: int, requests_per_s: float) -> None:
        def send() -> None:
            if period == self._period:
                self._send()
                self._plan_next(period, requests_per_s)

        self._link.timeline.after(self._random.expovariate(requests_per_s), send)

    def _send(self) -> None:
        random = self._random
        prompt = self._prompts.draw()
        number = self.accepted + self.refused
        sampling = SamplingParams(seed=random.getrandbits(40), max_tokens=random.randrange(1, 65))
        request = GenerateRequest(f"r{number}", random.choice(self._models), prompt, sampling)
        began_ns = time.thread_time_ns()
        try:
            stream = self._table.open(request)
        except CapacityError:
            self.refused += 1
            return
        self._link.meter.add_decision(time.thread_time_ns() - began_ns)
        self.accepted += 1
        self._clients[request.request_id] = _Client(sampling, stream)

    def _read(self, request_id: str) -> None:
        client = self._clients[request_id]
        event = client.stream.take()
        if event is None:
            return
        seed, limit = client.sampling.seed, client.sampling.max_tokens
        assert seed is not None and limit is not None
        assert event.first == client.num_tokens, f"{request_id} went on at {event.first}, had {client.num_tokens}"
        expected = [token_at(seed, event.first + index) for index in range(len(event.token_ids))]
        assert event.token_ids == expected, f"{request_id} got wrong tokens from {event.first} on"
        client.num_tokens += len(event.token_ids)
        self.num_tokens += len(event.token_ids)
        if event.finish is None:
            return
        assert client.stream.is_finished
        whole = client.num_tokens == limit
        assert whole == (event.finish is FinishReason.LENGTH), f"{request_id}: {event.finish}, {client.num_tokens}"
        self.finished[event.finish] += 1
        if event.finish is FinishReason.ERROR:
            self.errors[" ".join(word for word in event.error.split() if not word.isdigit())] += 1
        del self._clients[request_id]
