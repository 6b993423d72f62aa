"""What a scheduler does for and with other replicas: requests whose blocks are fetched, and exports whose blocks are
kept for others to read.

Owner of both while they hold neither slot nor place in the queue. Pure. Called by the scheduler and, for what was read
and what became of it, by the exchange (`sonar.kvtransfer.exchange`).
"""

from __future__ import annotations

from sonar.kvcache.fetches import BlockFetch, BlockFetches
from sonar.kvcache.manager import KVCacheManager
from sonar.messages import KVSource
from sonar.request import Request, RequestStatus


class PeerWork:
    """Owner of fetching requests and held exports.

    Attributes:
        fetches: the blocks on their way.
        fetching, holding: the requests; changed by this class alone.
        is_blocked: `schedule` found nothing to do, and nothing has changed since.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self.fetches = BlockFetches(cache)
        self.fetching: set[Request] = set()
        self.holding: set[Request] = set()
        self.is_blocked = False
        self._cache = cache
        self._begun: list[Request] = []

    @property
    def is_empty(self) -> bool:
        """Whether no request waits for another replica."""
        return not self.fetching and not self.holding

    def wants(self, request: Request, hit: int) -> bool:
        """Whether a waiting request's blocks are to be fetched rather than computed."""
        if request.peers.source is None:
            return False
        missing = self._wanted_end(request, request.peers.source) - hit
        if missing * self._cache.block_size >= max(1, request.peers.source.least_tokens):
            return True
        request.peers.source = None  # it was cached meanwhile
        return False

    def begin(self, request: Request, hit: int, after_step: int, spare: float) -> bool:
        """Sets blocks aside for a waiting request; False when there are too few. It leaves the queue with that."""
        assert request.peers.source is not None, f"{request.spec.request_id} has no source"
        end = self._wanted_end(request, request.peers.source)
        fetch = self.fetches.begin(request.blocks, hit, end, after_step, spare)
        if fetch is None:
            return False
        request.peers.fetch = fetch
        request.status = RequestStatus.FETCHING
        self.fetching.add(request)
        self._begun.append(request)
        return True

    def _wanted_end(self, request: Request, source: KVSource) -> int:
        """How many of its blocks, from the first on, are to be there in the end; never that of the last token."""
        size = self._cache.block_size
        end = (len(request.token_ids) - 1) // size
        return min(end, source.cached_tokens // size) if source.cached_tokens else end

    def is_cached(self, token_ids: list[int], cache_salt: str) -> bool:
        """Whether all blocks of a sequence but the one of its last token are in the prefix cache."""
        blocks = self._cache.new_blocks(cache_salt)
        return self._cache.find_prefix(blocks, token_ids) == (len(token_ids) - 1) // self._cache.block_size

    def take_begun(self) -> list[Request]:
        """Requests whose fetch began since the last call; their `source` says who is to be asked."""
        begun, self._begun = self._begun, []
        return begun

    def end_fetch(self, request: Request) -> None:
        """A fetch is over, whatever it brought; the request computes what is missing."""
        fetch: BlockFetch | None = request.peers.fetch
        assert fetch is not None, f"{request.spec.request_id} fetches nothing"
        self.fetches.end(fetch)
        request.peers.fetch = request.peers.source = None
        self.fetching.remove(request)

    def hold(self, request: Request) -> None:
        """An export is computed as far as it goes."""
        request.status = RequestStatus.HOLDING
        self.holding.add(request)

    def let_go(self, request: Request) -> None:
        """A held export is not wanted any more."""
        self.holding.remove(request)
        self._cache.free(request.blocks)
