"""What operators ask of a head, turned into events: each request is checked against what there is, and answered.

Knows no sockets: the control plane hands messages in and sends the answers. Changes last as long as the head; a restart
begins with its file again, and the answers say so.
"""

from __future__ import annotations

import dataclasses
import difflib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import assert_never

from cluster.events import (
    DeploymentApplied,
    DeploymentRemoved,
    Event,
    NodeDrainRequested,
    ProbeRequested,
    RestartRequested,
)
from cluster.operator_messages import (
    Accepted,
    Declined,
    DrainNode,
    ExplainAsked,
    Explanation,
    HeadToOperator,
    OperatorToHead,
    ProbeAsked,
    RemoveDeployment,
    RestartDeployment,
    ScaleDeployment,
    StatusAnswer,
    StatusAsked,
)
from cluster.state import ClusterState
from cluster.status import ClusterStatus
from cluster.timelines import Timelines
from sonar.errors import ConfigError

_UNTIL_RESTART = "holds until the head's next start; change its file too"


class OperatorDesk:
    """Answers operators.

    Args:
        feed: takes an event in. status: a snapshot of now. versions: the head's own.
        timelines: of the requests.
    """

    def __init__(
        self,
        state: ClusterState,
        feed: Callable[[Event], None],
        status: Callable[[], ClusterStatus],
        versions: Mapping[str, str],
        timelines: Timelines,
    ) -> None:
        self._state = state
        self._feed = feed
        self._status = status
        self._versions = dict(versions)
        self._timelines = timelines

    def answer(self, message: OperatorToHead) -> HeadToOperator:
        """Does what was asked, or says why not."""
        match message:
            case StatusAsked():
                return StatusAnswer(status=self._status(), versions=self._versions, unix_s=time.time())
            case ExplainAsked(request=request):
                return Explanation(timelines=self._timelines.find(request))
            case ProbeAsked(number=number):
                self._feed(ProbeRequested(number))
                return Accepted(text=f"{len(self._state.nodes_here)} nodes try each other")
            case _ if self._state.is_stopping:
                return Declined(reason="the head is stopping")
            case DrainNode(node_id=node_id, drain=drain):
                return self._drain(node_id, drain)
            case ScaleDeployment():
                return self._scale(message)
            case RemoveDeployment(name=name):
                if name not in self._state.deployments:
                    return Declined(reason=_unknown("deployment", name, self._state.deployments))
                self._feed(DeploymentRemoved(name))
                return Accepted(text=f"{name} takes no new requests; its replicas drain and end ({_UNTIL_RESTART})")
            case RestartDeployment(name=name):
                if name not in self._state.deployments:
                    return Declined(reason=_unknown("deployment", name, self._state.deployments))
                self._feed(RestartRequested(name))
                return Accepted(text=f"{name}: each replica drains and starts anew while the others serve")
            case _:
                assert_never(message)

    def _drain(self, node_id: str, drain: bool) -> HeadToOperator:
        if node_id not in self._state.nodes:
            return Declined(reason=_unknown("node", node_id, self._state.nodes))
        self._feed(NodeDrainRequested(node_id, drain))
        if not drain:
            return Accepted(text=f"{node_id} takes work again")
        here = [
            replica.replica_id
            for replica in self._state.replicas.values()
            if any(rank.node_id == node_id and rank.is_alive for rank in replica.ranks.values())
        ]
        what = f"{', '.join(here)} finish what they have, then start elsewhere" if here else "nothing runs there"
        return Accepted(text=f"{node_id} takes no new work; {what}")

    def _scale(self, asked: ScaleDeployment) -> HeadToOperator:
        name = asked.name
        config = self._state.deployments.get(name)
        if config is None:
            return Declined(reason=_unknown("deployment", name, self._state.deployments))
        prefill = config.prefill_replicas if asked.prefill_replicas is None else asked.prefill_replicas
        try:
            wanted = dataclasses.replace(config, replicas=asked.replicas, prefill_replicas=prefill)
        except ConfigError as error:
            return Declined(reason=error.message)
        self._feed(DeploymentApplied(wanted))
        pools = f", {prefill} of them for prompts" if prefill or config.prefill_replicas else ""
        return Accepted(text=f"{name}: {config.replicas} -> {asked.replicas} replicas{pools} ({_UNTIL_RESTART})")


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names) or 'none'}"
    return f"no {kind} {name[:100]!r}; {hint}"
