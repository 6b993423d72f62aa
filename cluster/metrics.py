"""The head's Prometheus metrics: read from the owners of the figures at each scrape, so nothing is counted twice.

What clients see (latency, tokens by request) is measured by the API. Labels come from closed sets: nodes, replicas,
deployments, states, reasons. Made by the head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.control import ControlPlane
from cluster.records import NodeState, ReplicaState
from sonar.messages import FinishReason
from sonar.transport import DropReason

_PAUSE_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120)
# LeadStats field -> what it is. Counters begin anew with each incarnation, as Prometheus expects of a process.
_GAUGES = {
    "num_running": "Requests in the engine's batch",
    "num_waiting": "Requests that wait in the engine",
    "blocks_free": "KV blocks that hold nothing",
    "blocks_cached": "KV blocks that only the prefix cache holds",
    "blocks_in_use": "KV blocks of running requests",
    "blocks_in_transit": "KV blocks that a transfer is to write",
    "blocks_quarantined": "KV blocks that a transfer which was given up may still write",
    "blocks_total": "KV blocks",
    "expert_imbalance": "Rows of the busiest expert-parallel rank by their mean, in the least even layer; 0: unknown",
}
_COUNTERS = {
    "steps": "Engine steps",
    "prompt_tokens": "Prompt tokens admitted",
    "cached_tokens": "Prompt tokens found in the prefix cache",
    "generated_tokens": "Tokens generated",
    "preemptions": "Requests put back to make room",
    "experts_moved": "Experts moved to even out their load",
    "step_seconds": "Seconds spent in engine steps",
}
# The same of `PairStats`: what a replica got from a peer.
_PAIR_COUNTERS = {
    "fetches": "Fetches of a prompt's KV blocks that have ended",
    "failed": "Of those, fetches that did not bring all blocks",
    "bytes_read": "Bytes of KV blocks read",
    "early_bytes": "Of those, bytes read while the peer was still computing",
    "recomputed_tokens": "Tokens computed after all, because a fetch failed",
    "read_seconds": "Seconds that reads took",
}


class HeadMetrics(Collector):
    """Puts the control plane's figures into a registry.

    Attributes:
        registry: also the API's; what `/metrics` shows.
    """

    def __init__(self, control: ControlPlane) -> None:
        self.registry = CollectorRegistry()
        self._control = control
        self._pause = Histogram(
            "sonar_stream_pause_seconds",
            "From a replica's death to the next token of a stream it had",
            buckets=_PAUSE_BUCKETS,
            registry=None,  # collected below, after the pauses have been taken in
        )
        self.registry.register(self)

    def describe(self) -> list[Metric]:
        """Nothing: `collect` needs no dry run at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families, from the figures of this moment."""
        pauses = self._control.table.counters.pauses_s
        for seconds in pauses:
            self._pause.observe(seconds)
        pauses.clear()
        yield from self._pause.collect()
        yield from self._requests()
        yield from self._cluster()
        yield from self._replicas()
        yield from self._pairs()
        yield from self._transport()

    def _requests(self) -> Iterator[Metric]:
        table = self._control.table
        counters = table.counters
        finished = CounterMetricFamily("sonar_requests", "Sequences by how they ended", labels=["outcome"])
        for reason in FinishReason:
            finished.add_metric([reason.value], counters.finished[reason])
        finished.add_metric(["refused"], counters.refused)
        yield finished
        yield GaugeMetricFamily("sonar_open_requests", "Sequences that have not ended", value=table.num_open)
        queue = GaugeMetricFamily("sonar_queued_requests", "Sequences that no replica has", labels=["deployment"])
        for name in self._control.state.deployments:
            queue.add_metric([name], table.num_waiting(name))
        yield queue
        for name, text, value in (
            ("sonar_tokens", "Tokens handed out", counters.tokens),
            ("sonar_migrations", "Attempts that broke off and were begun again", counters.migrations),
            ("sonar_tokens_replayed", "Emitted tokens that a replica was told again", counters.tokens_replayed),
            ("sonar_attempts_resumed", "Sequences taken over without computing again", counters.resumed),
            ("sonar_attempts_abandoned", "Sequences of an earlier head that nobody came for", counters.abandoned),
            ("sonar_requests_convicted", "Requests failed for ending replicas", counters.convicted),
            ("sonar_sequence_gaps", "Gaps in numbered messages", counters.sequence_gaps),
            ("sonar_repeated_tokens", "Tokens that came twice and were dropped", counters.repeated_tokens),
            ("sonar_late_events", "Events of attempts that were given up", counters.late_events),
        ):
            yield CounterMetricFamily(name, text, value=value)

    def _cluster(self) -> Iterator[Metric]:
        state = self._control.state
        nodes = GaugeMetricFamily("sonar_nodes", "Hosts by state", labels=["state"])
        node_states = Counter(node.state for node in state.nodes.values())
        for node_state in NodeState:
            nodes.add_metric([node_state.value], node_states[node_state])
        yield nodes
        replicas = GaugeMetricFamily("sonar_replicas", "Replicas by state", labels=["deployment", "state"])
        states = Counter((r.deployment, r.state) for r in state.replicas.values())
        for name in state.deployments:
            for replica_state in ReplicaState:
                replicas.add_metric([name, replica_state.value], states[name, replica_state])
        yield replicas
        failures = GaugeMetricFamily("sonar_replica_failures", "Failures in a row", labels=["replica"])
        incarnations = GaugeMetricFamily("sonar_replica_incarnation", "Starts so far", labels=["replica"])
        for replica in state.replicas.values():
            failures.add_metric([replica.replica_id], replica.failure.count)
            incarnations.add_metric([replica.replica_id], replica.incarnation)
        yield failures
        yield incarnations

    def _replicas(self) -> Iterator[Metric]:
        routes = self._control.table.routes()
        open_ = GaugeMetricFamily("sonar_replica_open_requests", "Sequences sent there", labels=["replica"])
        known = GaugeMetricFamily("sonar_replica_known_blocks", "Cached blocks the router knows", labels=["replica"])
        for route in routes:
            open_.add_metric([route.replica_id], len(route.attempts))
            known.add_metric([route.replica_id], len(route.index))
        yield open_
        yield known
        told = [(route.replica_id, route.stats) for route in routes if route.stats is not None]
        for field, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"sonar_replica_{field}", text, labels=["replica"])
            for replica_id, stats in told:
                gauge.add_metric([replica_id], getattr(stats, field))
            yield gauge
        for field, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"sonar_replica_{field}", text, labels=["replica"])
            for replica_id, stats in told:
                counter.add_metric([replica_id], getattr(stats, field))
            yield counter

    def _pairs(self) -> Iterator[Metric]:
        labels = ["replica", "peer"]
        told = [
            (route.replica_id, pair)
            for route in self._control.table.routes()
            if route.stats is not None
            for pair in route.stats.pairs
        ]
        open_ = GaugeMetricFamily("sonar_kv_pair_open_fetches", "Fetches under way", labels=labels)
        for replica_id, pair in told:
            open_.add_metric([replica_id, pair.replica_id], pair.open_fetches)
        yield open_
        for field, text in _PAIR_COUNTERS.items():
            counter = CounterMetricFamily(f"sonar_kv_pair_{field}", text, labels=labels)
            for replica_id, pair in told:
                counter.add_metric([replica_id, pair.replica_id], getattr(pair, field))
            yield counter

    def _transport(self) -> Iterator[Metric]:
        counters = self._control.server.counters
        dropped = CounterMetricFamily("sonar_control_frames_dropped", "Frames not handled", labels=["reason"])
        for reason in DropReason:
            dropped.add_metric([reason.value], counters.dropped[reason])
        yield dropped
        for name, text, value in (
            ("sonar_control_frames_received", "Frames received", counters.received),
            ("sonar_control_frames_sent", "Frames sent", counters.sent),
            ("sonar_control_frames_unsent", "Frames for peers that are gone or do not read", counters.unsent),
            ("sonar_control_handshakes", "Connections accepted", counters.handshakes),
            ("sonar_control_handshakes_refused", "Connections refused for their key", counters.refused),
        ):
            yield CounterMetricFamily(name, text, value=value)
