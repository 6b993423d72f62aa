"""A fake engine: real block hashes, real KV events, invented tokens, no computation.

Its tokens are a function of seed and position, as a real engine's are of the logits too, so that whoever reads a stream
can tell whether each token came once and in order, whatever became of the replicas in between.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from sonar.block_hash import hash_blocks
from sonar.messages import BlockRemoved, BlockStored, FinishReason, KVEvent, LeadReady, Submit, TokenEvent

BLOCK_SIZE = 16
NUM_BLOCKS = 512
MAX_NUM_REQUESTS = 64
TOKENS_PER_REPORT = 8
REPORT_INTERVAL_S = 0.2
VOCAB_SIZE = 30_000


def token_at(seed: int, position: int) -> int:
    """The output token of a request at a position of its output."""
    return (seed * 31 + position * 7919) % VOCAB_SIZE


def ready_message(replica_id: str, incarnation: int) -> LeadReady:
    """What such an engine says of itself."""
    return LeadReady(
        incarnation=incarnation,
        replica_id=replica_id,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=8192,
        max_num_requests=MAX_NUM_REQUESTS,
        weights_bytes=1 << 34,
        ops_backend="sim",
    )


@dataclass
class _Running:
    submit: Submit
    num_emitted: int
    num_cached: int


class SimEngine:
    """Owns one replica's requests and prefix cache. Several steps of a real engine count as one report here."""

    def __init__(self) -> None:
        self.num_reports = 0
        self.generated_tokens = 0
        self._requests: OrderedDict[str, _Running] = OrderedDict()
        self._cached: OrderedDict[bytes, None] = OrderedDict()
        self._changes: list[KVEvent] = []

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def blocks_cached(self) -> int:
        """Blocks of the prefix cache."""
        return len(self._cached)

    def add(self, submit: Submit) -> None:
        """Takes a request; its prompt's blocks enter the cache."""
        tokens = submit.prompt_token_ids + submit.emitted_token_ids
        hashes = hash_blocks(tokens, BLOCK_SIZE, submit.cache_salt)
        num_cached = 0
        while num_cached < len(hashes) and hashes[num_cached] in self._cached:
            num_cached += 1
        parent = b""
        for block_hash in hashes:
            if block_hash not in self._cached:
                self._cached[block_hash] = None
                self._changes.append(BlockStored(block_hash, parent))
            self._cached.move_to_end(block_hash)
            parent = block_hash
        while len(self._cached) > NUM_BLOCKS:
            self._changes.append(BlockRemoved(self._cached.popitem(last=False)[0]))
        running = _Running(submit, len(submit.emitted_token_ids), num_cached * BLOCK_SIZE)
        self._requests[submit.request_id] = running

    def abort(self, request_id: str, finish: FinishReason) -> TokenEvent | None:
        """Ends a request; its terminal event, or None when it is not known."""
        running = self._requests.pop(request_id, None)
        if running is None:
            return None
        return TokenEvent(request_id=request_id, first=running.num_emitted, token_ids=[], finish=finish)

    def report(self) -> list[TokenEvent]:
        """Some tokens of each request of the batch."""
        self.num_reports += 1
        batch = list(self._requests.items())[:MAX_NUM_REQUESTS]
        return [self._advance(request_id, running) for request_id, running in batch]

    def take_kv_events(self) -> list[KVEvent]:
        """Changes of the prefix cache since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def _advance(self, request_id: str, running: _Running) -> TokenEvent:
        sampling = running.submit.sampling
        assert sampling.seed is not None and sampling.max_tokens is not None
        first, end = running.num_emitted, min(running.num_emitted + TOKENS_PER_REPORT, sampling.max_tokens)
        running.num_emitted = end
        self.generated_tokens += end - first
        if end == sampling.max_tokens:
            del self._requests[request_id]
        num_cached, running.num_cached = running.num_cached, -1
        return TokenEvent(
            request_id=request_id,
            first=first,
            token_ids=[token_at(sampling.seed, position) for position in range(first, end)],
            finish=FinishReason.LENGTH if end == sampling.max_tokens else None,
            num_cached_tokens=num_cached,
        )
