"""A head that stands by: answers HTTP for the one that leads, keeps a copy of its journal, and waits for its turn.

Ends when this head leads; what it then becomes is `cluster.head`, on the same listening socket, with the same files.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sqlite3

from cluster.answer_journal import open_journal
from cluster.config import DEFAULT_CONTROL_PORT, ClusterConfig
from cluster.http_server import HttpServer
from cluster.journal_rows import write_rows
from cluster.leadership import Candidate, HeadAddress
from cluster.standby_app import StandbyApp
from cluster.standby_messages import Acked, Follow, HeadToStandby, Rows
from cluster.threads import finish_in_thread
from sonar.errors import SonarError
from sonar.transport import PeerId, PeerKind, parse_address
from sonar.transport_client import Client

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 1.0
RETRY_S = 0.5
LISTEN_S = 0.25


async def stand_by(config: ClusterConfig, listener: socket.socket, candidate: Candidate, me: HeadAddress) -> None:
    """Returns once the candidate has won.

    Args:
        listener: stays open.

    Raises:
        SonarError: the HTTP application did not start.
    """
    app = StandbyApp(lambda: candidate.leader, forwards=config.network.tls is None)
    http = HttpServer(app, listener.dup(), config.network.tls)
    try:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(http.run())
            following = group.create_task(_follow(config, candidate, me))
            try:
                await candidate.win()
            finally:
                following.cancel()
                http.stop(now=True)
                await serving
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _follow(config: ClusterConfig, candidate: Candidate, me: HeadAddress) -> None:
    """Copies the journal of whoever leads, one after the other."""
    token = config.token_path.read_text().strip()
    connection = open_journal(config.state_dir / "answers.db")
    try:
        while True:
            leader = candidate.leader
            if leader is not None and leader.name != me.name:
                logger.info("standing by; %s leads", leader.http)
                try:
                    await _copy(leader, token, me.name, candidate, connection)
                except (SonarError, sqlite3.Error) as error:
                    logger.warning("the journal of the leader is not copied: %s", error)
            await asyncio.sleep(RETRY_S)
    finally:
        connection.close()


async def _copy(
    leader: HeadAddress, token: str, name: str, candidate: Candidate, connection: sqlite3.Connection
) -> None:
    """Until another head leads."""
    address = parse_address(leader.control, DEFAULT_CONTROL_PORT)
    link = Client(address, token, PeerId(PeerKind.STANDBY, f"head-{name}", 1), HeadToStandby)
    try:
        await finish_in_thread(lambda: link.connect(CONNECT_TIMEOUT_S))
        link.send(Follow())
        while candidate.leader == leader:
            rows: list[Rows] = await finish_in_thread(lambda: link.receive(LISTEN_S))
            for message in rows:
                # In this thread: a few rows into a file that is not synced; the journal's other users are elsewhere.
                write_rows(connection, message.rows, is_first=message.is_first)
                link.send(Acked(number=message.number))
            if link.take_reconnected():
                link.send(Follow())
    finally:
        link.close(0)
