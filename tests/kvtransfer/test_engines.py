"""Real engines on tiny models that exchange blocks in one process: the tokens are those of one engine alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sonar.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from sonar.engine import BuiltEngine, build_engine
from sonar.errors import ConfigError
from sonar.messages import KVSource, PairStats, Submit, TokenEvent
from sonar.sampling_params import SamplingParams
from tests.tiny import write_tiny_folder

PROMPT = [4 + i * 7 % 300 for i in range(150)]


def _config(model: str, kv_transfer: str = "shm", **more: object) -> EngineConfig:
    return EngineConfig(
        model=model,
        device="cpu",
        threads=1,
        kv_transfer=kv_transfer,  # type: ignore[arg-type]
        kv_checksums=True,
        cache=CacheConfig(memory_bytes=8 << 20, **more),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(max_num_requests=8, max_step_tokens=40),
    )


@dataclass
class _Pair:
    engines: dict[str, BuiltEngine]
    events: dict[str, list[TokenEvent]] = field(default_factory=dict)

    def submit(self, name: str, prompt: list[int], sampling: SamplingParams, at: str = "d", salt: str = "") -> None:
        source = KVSource(replica_id="p", incarnation=1) if at == "d" else None
        submit = Submit(
            incarnation=1,
            request_id=name,
            prompt_token_ids=prompt,
            sampling=sampling,
            kv_source=source,
            cache_salt=salt,
        )
        self.events[name] = []
        self.engines[at].engine.add(submit)

    def run(self) -> None:
        """Until nothing is open; messages go straight across."""
        deadline_s = time.monotonic() + 60
        while any(built.engine.num_open or built.exchange.is_busy for built in self.engines.values()):
            assert time.monotonic() < deadline_s, "no end"
            for name, built in self.engines.items():
                if built.engine.has_work:
                    for event in built.engine.step():
                        self.events[event.request_id].append(event)
                for peer, message in built.exchange.tick():
                    self.engines[peer.replica_id].exchange.receive(name, 1, message)
        for built in self.engines.values():
            built.engine.check()
            stats = built.engine.stats()
            assert stats.blocks_in_use == stats.blocks_in_transit == stats.blocks_quarantined == 0

    def said(self, name: str) -> list[tuple]:
        """What a client sees of a request: tokens, log-probabilities, its end."""
        return [(e.token_ids, e.logprobs, e.prompt_logprobs, e.finish, e.stop_token_id) for e in self.events[name]]

    @property
    def stats(self) -> PairStats:
        (stats,) = self.engines["d"].engine.stats().pairs
        return stats


@pytest.fixture(scope="module", params=["llama", "gemma3", "deepseek_v3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Pair]:
    folder = write_tiny_folder(request.param, tmp_path_factory.mktemp(request.param))
    engines = {name: build_engine(_config(str(folder)), incarnation=1) for name in ("p", "d")}
    yield _Pair(engines)
    for built in engines.values():
        built.engine.close()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(seed=1, temperature=0.0, max_tokens=12, ignore_eos=True),
        SamplingParams(seed=2, temperature=1.0, top_p=0.9, max_tokens=12, logprobs=2, repetition_penalty=1.2),
        SamplingParams(seed=3, temperature=0.9, max_tokens=12, stop_token_ids=tuple(range(100, 200)), min_tokens=2),
    ],
    ids=["greedy", "drawn", "stops"],
)
def test_tokens_and_their_probabilities_are_those_of_one_engine(pair: _Pair, sampling: SamplingParams) -> None:
    salt = str(sampling.seed)
    pair.submit("remote", PROMPT, sampling, salt=salt)
    pair.run()
    record = next(event.kv_fetch for event in pair.events["remote"] if event.kv_fetch)
    assert (record.replica_id, record.tokens, record.error) == ("p", 144, "") and record.bytes_read > 0
    assert 0 <= record.asked_s <= record.first_s <= record.done_s
    assert pair.events["remote"][0].num_cached_tokens == 0
    pair.submit("local", PROMPT, sampling, at="p", salt="elsewhere" + salt)
    pair.run()
    assert pair.said("remote") == pair.said("local")
    assert pair.stats.failed == 0 and pair.stats.early_bytes > 0


def test_two_requests_of_one_prompt_fetch_it_once(pair: _Pair) -> None:
    before = pair.stats.fetches if pair.engines["d"].engine.stats().pairs else 0
    for number in range(2):
        pair.submit(f"n{number}", PROMPT, SamplingParams(seed=10 + number, max_tokens=6, ignore_eos=True), salt="n")
    pair.run()
    assert pair.stats.fetches == before + 1
    for number in range(2):
        sampling = SamplingParams(seed=10 + number, max_tokens=6, ignore_eos=True)
        pair.submit(f"alone{number}", PROMPT, sampling, at="p", salt=f"alone {number}")
        pair.run()
        assert pair.said(f"n{number}") == pair.said(f"alone{number}")


def test_caches_of_different_shape_refuse_each_other_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = str(write_tiny_folder("llama", tmp_path))
    engines = {
        "p": build_engine(_config(folder, block_size=32), incarnation=1),
        "d": build_engine(_config(folder), incarnation=1),
    }
    pair = _Pair(engines)
    pair.submit("r", PROMPT, SamplingParams(seed=1, max_tokens=3, ignore_eos=True))
    pair.run()
    assert "block_size is 16 there and 32 here" in caplog.text
    assert sum(len(event.token_ids) for event in pair.events["r"]) == 3 and pair.stats.failed == 1
    for built in engines.values():
        built.engine.close()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"parallel": ParallelConfig(tp_size=2)}, "2 ranks"),
        ({"cache": CacheConfig(enable_prefix_caching=False)}, "prefix caching"),
        ({"device": "cuda"}, "on a CPU only"),
    ],
)
def test_what_blocks_cannot_be_moved_for_is_refused(settings: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        EngineConfig("m", kv_transfer="shm", **settings)


def test_an_engine_without_an_exchange_computes_what_it_was_to_ask_for(tmp_path: Path) -> None:
    built = build_engine(_config(str(write_tiny_folder("llama", tmp_path)), kv_transfer="none"), incarnation=1)
    source = KVSource(replica_id="p", incarnation=1)
    sampling = SamplingParams(seed=1, max_tokens=3, ignore_eos=True)
    built.engine.add(
        Submit(incarnation=1, request_id="r", prompt_token_ids=PROMPT, sampling=sampling, kv_source=source)
    )
    events = [event for _ in range(40) if built.engine.has_work for event in built.engine.step()]
    assert sum(len(event.token_ids) for event in events) == 3 and built.engine.num_open == 0
    built.engine.close()
