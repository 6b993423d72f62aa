"""A head's part in the election of the one that leads: waiting for it, holding it, learning that it is over.

The lease says when another may try; the epoch says who leads. A head whose store is away goes on leading, because
nobody else can take the epoch from it there; once the store answers with a higher one, it is deposed. Until it has
looked, it says nothing: one that was stopped for long may have been replaced. Blocking calls run in threads. Called by
`cluster.head`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import socket
import time
from dataclasses import replace

import msgspec

from cluster.config import ClusterConfig
from cluster.epoch import next_epoch, read_epoch
from cluster.store.contract import Store, StoreUnavailableError
from cluster.store.election import Election
from cluster.store.registry import open_store
from cluster.threads import finish_in_thread
from sonar.errors import ConfigError
from sonar.transport import Address

logger = logging.getLogger(__name__)

KEY = "head/leader"
TOKEN_KEY = "head/token-digest"
LEASE_S = 2.0
# A look at the store takes at most a few of these, so that what a head knows is never older than HOLD_S for that.
LOOK_TIMEOUT_S = 1.0
HOLD_S = 6.0


class HeadAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a head is reached. name: unlike that of every other start. http: base address, as the other heads reach it.
    control: of its control port."""

    name: str
    http: str
    control: str


class Candidate:
    """Owner of a head's lease and of what it knows of who leads.

    Args:
        store: that the heads share; closed by its owner.

    Attributes:
        epoch: of this head since it leads; 0 before.
        leader: whoever led at the last look, if anybody did; None while it is this head.
    """

    def __init__(self, store: Store, address: HeadAddress) -> None:
        self.epoch = 0
        self.leader: HeadAddress | None = None
        self._store = store
        name = msgspec.json.encode(address)
        self._election = Election(self._store, KEY, name, LEASE_S, time.monotonic)
        self._held_until_s = 0.0

    def is_held(self) -> bool:
        """Whether this head may speak as the one that leads."""
        return time.monotonic() < self._held_until_s

    async def win(self) -> None:
        """Returns once this head leads. A store that does not answer is waited for."""
        while not await finish_in_thread(self._try_to_win):
            await asyncio.sleep(self._election.interval_s)

    async def hold(self) -> None:
        """Returns once another head leads."""
        while await finish_in_thread(self._look):
            await asyncio.sleep(self._election.interval_s)

    def resign(self) -> None:
        """Lets another lead at once, who would have to wait for the lease."""
        try:
            self._election.resign()
        except StoreUnavailableError as error:
            logger.warning("%s; the next head waits for the lease", error)

    def _try_to_win(self) -> bool:
        asked_s = time.monotonic()
        try:
            if self._election.tick():
                self.epoch = next_epoch(self._store)
                self._held_until_s = asked_s + HOLD_S
                self.leader = None
                return True
            self.leader = _decode(self._election.leader())
        except StoreUnavailableError as error:
            logger.debug("%s", error)
        return False

    def _look(self) -> bool:
        """Whether no later head is known of."""
        asked_s = time.monotonic()
        self._election.tick()
        try:
            latest = read_epoch(self._store)
        except StoreUnavailableError as error:
            if not self.is_held():
                logger.warning("%s; this head goes on leading until it answers", error)
            latest = self.epoch
        if latest > self.epoch:
            self._held_until_s = 0.0
            return False
        self._held_until_s = asked_s + HOLD_S
        return True


def open_lead_store(config: ClusterConfig) -> Store:
    """A connection for the election alone: a call that takes long would be a look that comes too late."""
    store = replace(config.store, timeout_s=min(config.store.timeout_s, LOOK_TIMEOUT_S))
    return open_store(store, config.state_dir)


def check_same_token(store: Store, token: str) -> None:
    """All heads have one join token: the first leaves a digest of it. It is of 256 random bits: nothing leads back.

    Raises:
        ConfigError: this head's is another one.
    """
    digest = hashlib.blake2b(token.encode(), digest_size=32, person=b"sonar heads").hexdigest().encode()
    if store.compare_and_set(TOKEN_KEY, None, digest):
        return
    known = store.get(TOKEN_KEY)
    if known is None or not hmac.compare_digest(known, digest):
        raise ConfigError(
            "the join token of this head is not that of the heads that used this store before; copy their token file "
            f"here, or, if the token was changed on purpose, delete {TOKEN_KEY!r} below the store's prefix",
            param="token_file",
        )


def announced_address(config: ClusterConfig, listener: socket.socket) -> HeadAddress:
    """How the other heads reach this one.

    Raises:
        ConfigError: any port will do for agents, who then could not know it.
    """
    network = config.network
    if not network.control_port:
        raise ConfigError("control_port=0 with etcd: hosts have to know the port of each head", param="control_port")
    host, port = network.http_host, listener.getsockname()[1]
    if host in ("0.0.0.0", "::"):
        host = network.control_host
    scheme = "https" if network.tls is not None else "http"
    return HeadAddress(
        name=secrets.token_hex(8),
        http=f"{scheme}://{Address(host, port)}",
        control=str(Address(network.control_host, network.control_port)),
    )


def _decode(data: bytes | None) -> HeadAddress | None:
    try:
        return msgspec.json.decode(data, type=HeadAddress) if data else None
    except msgspec.MsgspecError:
        return None
