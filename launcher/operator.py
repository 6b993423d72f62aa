"""An operator's side of the control port: finds the head, asks one thing, waits for the answer.

Where a head runs on this host its record says how to reach it; elsewhere `--head` and `--token-file` do. Called by the
commands `status`, `drain`, `scale` and `rm`. Decides nothing.
"""

from __future__ import annotations

import argparse
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from cluster.config import DEFAULT_CONTROL_PORT
from cluster.operator_messages import Accepted, Declined, HeadToOperator, OperatorToHead, StatusAnswer, StatusAsked
from cluster.security import read_token
from cluster.status import ClusterStatus
from launcher.cli.state import ServerRecord, StateDir
from sonar.errors import SonarError, UserError
from sonar.transport import Address, PeerId, PeerKind, parse_address
from sonar.transport_client import Client

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 10.0


def add_head_flags(parser: argparse.ArgumentParser) -> None:
    """--head, --token-file; see `HeadContact.find`."""
    parser.add_argument("--head", default="", metavar="HOST[:PORT]", help="default: the head that runs on this host")
    parser.add_argument("--token-file", type=Path, default=None, help="its join token (default: that head's own)")


class HeadContact:
    """A connection to a head's control port; a context manager.

    Raises:
        HandshakeRefusedError, UnreachableError: there is no head that takes this token.
    """

    def __init__(self, address: Address, token: str) -> None:
        peer = PeerId(PeerKind.OPERATOR, f"operator-{os.getpid()}", secrets.randbits(62))
        self._link = Client(address, token, peer, HeadToOperator)
        try:
            self._link.connect(CONNECT_TIMEOUT_S)
        except SonarError:
            self._link.close(0)
            raise

    @classmethod
    def find(cls, args: argparse.Namespace, environ: Mapping[str, str]) -> HeadContact:
        """The head that the flags name, or the only one of this user on this host.

        Raises:
            UserError: there is none, or there are several.
        """
        if args.head:
            if args.token_file is None:
                raise UserError("--head needs --token-file: a copy of that head's join token", param="token_file")
            return cls(parse_address(args.head, DEFAULT_CONTROL_PORT), read_token(args.token_file))
        port = getattr(args, "port", None)
        records = [r for r in StateDir.of_user(environ).records() if r.control and port in (None, r.port)]
        if len(records) != 1:
            there = ", ".join(record.control for record in records) or "none"
            raise UserError(f"heads of this user on this host: {there}; name one with --head and --token-file")
        return cls.of_record(records[0])

    @classmethod
    def of_record(cls, record: ServerRecord) -> HeadContact:
        """The head of a record."""
        return cls(parse_address(record.control, DEFAULT_CONTROL_PORT), read_token(Path(record.token_file)))

    @property
    def address(self) -> Address:
        """Of its control port."""
        return self._link.address

    def ask(self, message: OperatorToHead) -> HeadToOperator:
        """Sends a request and waits for its answer.

        Raises:
            SonarError: none came in time.
        """
        self._link.send(message)
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            for answer in self._link.receive(left_s):
                return answer  # type: ignore[no-any-return]
        raise SonarError(f"the head at {self._link.address} did not answer within {ANSWER_TIMEOUT_S:g} s")

    def status(self) -> ClusterStatus:
        """What the head sees now."""
        answer = self.ask(StatusAsked())
        assert isinstance(answer, StatusAnswer), answer
        return answer.status

    def order(self, message: OperatorToHead) -> str:
        """Has something done; what will happen, for people.

        Raises:
            UserError: the head declined.
        """
        answer = self.ask(message)
        if isinstance(answer, Declined):
            raise UserError(answer.reason)
        assert isinstance(answer, Accepted), answer
        return answer.text

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._link.close(0)
