"""Settings, placement, token, store, suspects, streams, metrics: each on its own."""

from __future__ import annotations

import asyncio
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from cluster.config import ClusterConfig, DeploymentConfig, NetworkConfig, RestartPolicy, Timeouts
from cluster.control import ControlPlane
from cluster.events import DeploymentApplied
from cluster.gateway import GenerateRequest
from cluster.messages import WorkerRef
from cluster.metrics import HeadMetrics
from cluster.placement import NodeView, Unplaceable, place_replica, shortfall
from cluster.routing.least_work import Candidate, choose_replica
from cluster.security import load_or_create_token, read_token
from cluster.store.sqlite import SqliteStore
from cluster.streams import RequestStream, merge_events
from cluster.suspects import PROGRESS_TOKENS, Strikes, strike_all
from sonar.config import EngineConfig
from sonar.errors import ConfigError
from sonar.messages import FinishReason, Logprob, TokenEvent
from sonar.sampling_params import SamplingParams
from sonar.transport import TransportCounters
from tests.cluster.world import FakeAgent, deployment, lead_ready, lead_stats

ENGINE = EngineConfig("m")


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DeploymentConfig("a/b", ENGINE), "deployment='a/b'; use letters"),
        (lambda: DeploymentConfig("x" * 101, ENGINE), "at most 100"),
        (lambda: DeploymentConfig("a", ENGINE, replicas=-1), "replicas=-1; choose 0"),
        (lambda: DeploymentConfig("a", ENGINE, max_queued=0), "max_queued=0; choose 1"),
        (lambda: DeploymentConfig("a", ENGINE, queue_timeout_s=0), "queue_timeout_s=0"),
        (lambda: DeploymentConfig("a", ENGINE, replicas=2, prefill_replicas=2), "none is left to decode"),
        (lambda: DeploymentConfig("a", ENGINE, replicas=2, prefill_replicas=1), "set kv_transfer"),
        (lambda: DeploymentConfig("a", ENGINE, remote_prefill_tokens=0), "remote_prefill_tokens=0"),
        (lambda: Timeouts(drain_s=0), "drain_s=0; must be above 0"),
        (lambda: Timeouts(heartbeat_interval_s=2, heartbeat_timeout_s=3), "below two intervals"),
        (lambda: RestartPolicy(crash_limit=0), "crash_limit=0"),
        (lambda: RestartPolicy(backoff_s=-1), "backoff_s=-1"),
        (lambda: NetworkConfig(http_port=70000), "http_port=70000 is no port"),
    ],
)
def test_a_wrong_setting_names_field_value_and_remedy(make, words) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_names_are_unique(tmp_path) -> None:
    one, two = DeploymentConfig("a", ENGINE, served_name="m"), DeploymentConfig("b", ENGINE, served_name="m")
    with pytest.raises(ConfigError, match="served_name 'm' is given twice"):
        ClusterConfig(tmp_path, (one, two))


def test_backoff_grows_to_its_limit() -> None:
    policy = RestartPolicy(backoff_s=0.5, backoff_max_s=3.0)
    assert [policy.delay_s(n) for n in (0, 1, 2, 3, 4, 5, 1000)] == [0, 0, 0.5, 1, 2, 3, 3]


# --- placement ------------------------------------------------------------------------------------------------------


def node(node_id: str, free: int, total: int | None = None, workers: int = 0) -> NodeView:
    return NodeView(node_id, total if total is not None else free, tuple(range(free)), workers)


def hosts(placed) -> list[str]:
    return [rank.node_id for rank in placed]


def test_a_group_stays_in_one_host_that_just_fits() -> None:
    placed = place_replica(4, 4, "cuda", [node("big", 8), node("fits", 4), node("small", 2)], {})
    assert hosts(placed) == ["fits"] * 4 and [rank.devices for rank in placed] == [(0,), (1,), (2,), (3,)]


def test_pipeline_stages_share_a_host_when_there_is_room() -> None:
    assert hosts(place_replica(4, 2, "cuda", [node("a", 4), node("b", 4)], {})) == ["a"] * 4
    assert hosts(place_replica(4, 2, "cuda", [node("a", 3), node("b", 3)], {})) == ["a", "a", "b", "b"]


def test_a_group_that_fits_nowhere_is_spread() -> None:
    placed = place_replica(4, 4, "cuda", [node("a", 1), node("b", 3)], {})
    assert sorted(hosts(placed)) == ["a", "b", "b", "b"]


def test_no_room_says_what_is_free() -> None:
    refusal = place_replica(4, 4, "cuda", [node("a", 1, 8), node("b", 0, 8)], {})
    assert refusal == Unplaceable("needs 4 CUDA devices, more than are free", "a 1/8, b 0/8")
    assert refusal.text.endswith("free; free of all: a 1/8, b 0/8")
    assert isinstance(place_replica(1, 1, "auto", [], {}), Unplaceable)


@pytest.mark.parametrize(
    ("ranks", "device", "devices", "words"),
    [
        (1, "cuda", [0], "no CUDA device on this host; use --device cpu"),
        (1, "cuda", [0, 0], "no CUDA device on any host"),
        (3, "auto", [1, 1], "needs 3 CUDA devices and there are 2 in all"),
        (2, "cuda", [1, 1], ""),
        (4, "auto", [0], ""),
        (4, "cpu", [1], ""),
    ],
)
def test_what_could_never_be_placed_is_told_from_what_waits(ranks, device, devices, words) -> None:
    reason = shortfall(ranks, device, [node(f"n{i}", 0, count) for i, count in enumerate(devices)])
    assert words in reason and bool(words) == bool(reason)


def test_on_cpus_the_least_loaded_host_is_next_and_failures_come_last() -> None:
    nodes = [node("a", 0, workers=2), node("b", 0, workers=1)]
    assert hosts(place_replica(1, 1, "auto", nodes, {})) == ["b"]
    assert hosts(place_replica(1, 1, "cpu", [*nodes, node("gpu", 8, workers=0)], {})) == ["gpu"]
    assert hosts(place_replica(1, 1, "auto", nodes, {"b": 1})) == ["a"]


def test_a_limit_of_ranks_a_host_spreads_a_replica() -> None:
    cpus = [node("a", 0, workers=1), node("b", 0), node("c", 0)]
    assert hosts(place_replica(4, 4, "cpu", cpus, {})) == ["b"] * 4
    assert hosts(place_replica(2, 2, "cpu", cpus, {}, 1)) == ["b", "c"], "one group over two hosts"
    assert hosts(place_replica(2, 1, "cpu", cpus, {}, 1)) == ["b", "c"], "two stages over two hosts"
    assert hosts(place_replica(4, 2, "cpu", cpus, {}, 2)) == ["b", "b", "c", "c"], "a group stays together where it can"
    assert hosts(place_replica(4, 2, "cuda", [node("a", 8), node("b", 8)], {}, 2)) == ["a", "a", "b", "b"]
    refusal = place_replica(4, 2, "cpu", cpus, {}, 1)
    assert isinstance(refusal, Unplaceable) and "ranks_per_host = 1 and 3 hosts up" in refusal.text


@given(st.lists(st.integers(0, 8), min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 4))
def test_all_ranks_are_placed_exactly_when_there_are_devices_enough(free, stages, tp_size) -> None:
    nodes = [node(f"n{i}", count) for i, count in enumerate(free)]
    placed = place_replica(stages * tp_size, tp_size, "cuda", nodes, {})
    if isinstance(placed, Unplaceable):
        assert sum(free) < stages * tp_size
        return
    assert [rank.rank for rank in placed] == list(range(stages * tp_size))
    taken = [(rank.node_id, device) for rank in placed for device in rank.devices]
    assert len(set(taken)) == len(placed) and set(taken) <= {(n.node_id, d) for n in nodes for d in n.free_devices}


# --- routing --------------------------------------------------------------------------------------------------------


def candidate(
    replica_id: str, cached: int = 0, pending: int = 0, num_open: int = 0, session: bool = False
) -> Candidate:
    return Candidate(replica_id, cached, pending, num_open, 4, session)


def test_the_choice_is_explained_and_repeatable() -> None:
    decision = choose_replica(500, [candidate("b", cached=480), candidate("a", num_open=1), candidate("c", num_open=4)])
    assert decision.replica_id == "b"
    assert [(score.replica_id, score.total) for score in decision.scores] == [("b", 20), ("a", 516), ("c", 1588)]
    assert choose_replica(5, [candidate("b"), candidate("a")]).replica_id == "a"
    assert choose_replica(9, [candidate("a"), candidate("b", num_open=3, session=True)]).replica_id == "b"


# --- suspects -------------------------------------------------------------------------------------------------------


def test_two_deaths_of_a_sole_request_convict_it_three_of_a_tie() -> None:
    one = Strikes()
    assert strike_all([(one, 5)]) is None and strike_all([(one, 5)]) == 0
    tie = [Strikes(), Strikes()]
    assert strike_all([(s, 5) for s in tie]) is None and strike_all([(s, 5) for s in tie]) is None
    assert all(s.is_suspect for s in tie)
    assert strike_all([(tie[0], 5)]) == 0
    assert strike_all([]) is None


def test_progress_clears() -> None:
    strikes = Strikes(2, at_token=5)
    assert not strikes.clear_by_progress(4 + PROGRESS_TOKENS) and strikes.is_suspect
    assert strikes.clear_by_progress(5 + PROGRESS_TOKENS) and not strikes.is_suspect


# --- streams --------------------------------------------------------------------------------------------------------


def event(first: int, *token_ids: int, **fields) -> TokenEvent:
    return TokenEvent(request_id="r", first=first, token_ids=list(token_ids), **fields)


async def test_a_slow_reader_gets_one_event_of_all() -> None:
    stream = RequestStream()
    logprob = [Logprob(1, -0.5, 1)]
    stream.push(event(0, 7, num_cached_tokens=4, logprobs=[logprob], prompt_logprobs=[logprob]))
    stream.push(event(1, 8, logprobs=[logprob]))
    stream.push(event(2, finish=FinishReason.STOP, stop_token_id=9))
    merged = await stream.next()
    assert (merged.first, merged.token_ids, merged.finish, merged.stop_token_id) == (0, [7, 8], FinishReason.STOP, 9)
    assert (merged.num_cached_tokens, len(merged.logprobs), len(merged.prompt_logprobs)) == (4, 2, 1)
    assert stream.is_finished


async def test_a_reader_waits_for_news() -> None:
    stream = RequestStream()
    reader = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.push(event(0, 7))
    assert (await reader).token_ids == [7]


def test_events_that_do_not_follow_one_another_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        merge_events(event(0, 7), event(2, 8))


# --- token and store ------------------------------------------------------------------------------------------------


def test_the_token_is_made_once_and_for_its_owner(tmp_path) -> None:
    path = tmp_path / "deep" / "join.token"
    token = load_or_create_token(path)
    assert load_or_create_token(path) == token == read_token(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and [p.name for p in path.parent.iterdir()] == ["join.token"]


@pytest.mark.parametrize("content", [b"", b"secret", b"sonar-join-short", b"\xff\xfe"])
def test_a_file_that_holds_no_token_is_refused_with_the_remedy(tmp_path, content) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="copy the head's token file"):
        load_or_create_token(path)


def test_a_missing_token_and_an_open_one(tmp_path, caplog) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "none")
    path = tmp_path / "token"
    load_or_create_token(path)
    path.chmod(0o644)
    read_token(path)
    assert "chmod 600" in caplog.text


def test_the_store_remembers(tmp_path) -> None:
    path = tmp_path / "head.db"
    store = SqliteStore(path)
    store.put("incarnation/a", b"1")
    store.put("incarnation/a", b"2")
    store.put("incarnation_b", b"9")
    store.close()
    assert SqliteStore(path).items("incarnation/") == {"incarnation/a": b"2"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_damaged_store_is_a_clear_error(tmp_path) -> None:
    path = tmp_path / "head.db"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match=r"store .*head.db cannot be opened"):
        SqliteStore(path)


# --- metrics and status ---------------------------------------------------------------------------------------------


class SilentServer:
    """A transport that sends nowhere."""

    def __init__(self) -> None:
        self.counters = TransportCounters()

    def send(self, peer, message) -> bool:
        return True


def test_metrics_and_status_tell_of_replicas_and_requests(tmp_path) -> None:
    store = SqliteStore(tmp_path / "db")
    control = ControlPlane(ClusterConfig(tmp_path), SilentServer(), store, {"sonar": "1"}, lambda: 5.0)
    metrics = HeadMetrics(control)
    control.feed(FakeAgent("n", 1).register())
    control.feed(DeploymentApplied(deployment("m", 1)))
    ref = WorkerRef(replica_id="m-0", incarnation=1)
    from sonar.transport import PeerId, PeerKind

    lead = PeerId(PeerKind.LEAD, "m-0", 1)
    control.on_message(lead, lead_ready(ref))
    control.on_message(lead, lead_stats(1, steps=3, blocks_total=64, blocks_free=60, blocks_in_use=4))
    control.on_message(lead, lead_stats(2))
    control.table.open(GenerateRequest("r", "m", [1], SamplingParams(seed=1)))
    control.table.counters.pauses_s.append(0.2)
    text = generate_latest(metrics.registry).decode()
    for line in (
        'sonar_replicas{deployment="m",state="ready"} 1.0',
        'sonar_replica_blocks_in_use{replica="m-0"} 4.0',
        'sonar_replica_steps_total{replica="m-0"} 3.0',
        'sonar_replica_open_requests{replica="m-0"} 1.0',
        'sonar_control_frames_dropped_total{reason="stale_incarnation"} 1.0',
        'sonar_nodes{state="up"} 1.0',
        "sonar_stream_pause_seconds_count 1.0",
        "sonar_open_requests 1.0",
    ):
        assert line in text, line
    status = control.status()
    assert (status.replicas[0].state, status.replicas[0].num_open, status.num_open_requests) == ("ready", 1, 1)
    assert status.replicas[0].stats["blocks_free"] == 60
    assert store.items("incarnation/") == {"incarnation/ceiling": b"64"}
