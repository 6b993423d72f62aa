"""Messages between a head and an operator's commands (`sonar status`, `drain`, `scale`, `rm`), over the control port.

That port asks for the join token and encrypts; the HTTP one may be open, or have keys that clients hold. One request,
one answer. Frozen tagged msgspec structs, as in `cluster.messages`.
"""

from __future__ import annotations

import msgspec

from cluster.status import ClusterStatus
from cluster.timelines import Timeline


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# --- operator -> head -----------------------------------------------------------------------------------------------


class StatusAsked(_Message, frozen=True, kw_only=True):
    """Operator -> head: answered by `StatusAnswer`."""


class DrainNode(_Message, frozen=True, kw_only=True):
    """Operator -> head: no work on that node; or, with drain false, again. Answered by `Accepted` or `Declined`."""

    node_id: str
    drain: bool


class ScaleDeployment(_Message, frozen=True, kw_only=True):
    """Operator -> head: so many replicas, and so many of them for prompts. Answered by `Accepted` or `Declined`.

    `prefill_replicas`: None leaves that as it is. A replica that runs changes its role at once, and keeps its cache."""

    name: str
    replicas: int
    prefill_replicas: int | None = None


class RemoveDeployment(_Message, frozen=True, kw_only=True):
    """Operator -> head: its replicas drain and end. Answered by `Accepted` or `Declined`."""

    name: str


class ProbeAsked(_Message, frozen=True, kw_only=True):
    """Operator -> head: have every node try every other. Answered by `Accepted`; the results are in the status, under
    this number."""

    number: int


class RestartDeployment(_Message, frozen=True, kw_only=True):
    """Operator -> head: replace its replicas, one at a time. Answered by `Accepted` or `Declined`."""

    name: str


class ExplainAsked(_Message, frozen=True, kw_only=True):
    """Operator -> head: what happened to a request; its id, an answer's id, or a part of either. Answered by
    `Explanation`."""

    request: str


OperatorToHead = (
    StatusAsked | ProbeAsked | DrainNode | ScaleDeployment | RemoveDeployment | RestartDeployment | ExplainAsked
)


# --- head -> operator -----------------------------------------------------------------------------------------------


class StatusAnswer(_Message, frozen=True, kw_only=True):
    """Head -> operator: everything at one moment. versions, unix_s: the head's own packages and clock."""

    status: ClusterStatus
    versions: dict[str, str]
    unix_s: float


class Explanation(_Message, frozen=True, kw_only=True):
    """Head -> operator: the timelines of the sequences it knows by that id, the latest last."""

    timelines: list[Timeline]


class Accepted(_Message, frozen=True, kw_only=True):
    """Head -> operator: it has begun; `StatusAsked` shows how far it is. text: what will happen, for people."""

    text: str


class Declined(_Message, frozen=True, kw_only=True):
    """Head -> operator: nothing was changed. reason: with the remedy, for people."""

    reason: str


HeadToOperator = StatusAnswer | Explanation | Accepted | Declined
