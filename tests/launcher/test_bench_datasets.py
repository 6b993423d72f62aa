"""Prompts: seeded, of the promised lengths, prefixes shared as told."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.bench.datasets import LOWEST_ID, DatasetConfig, DatasetKind, make_prompts
from sonar.errors import ConfigError


def test_random_ids_have_the_lengths_and_range_asked_for() -> None:
    config = DatasetConfig(input_len=32, output_len=8, length_spread=0.5, vocab_size=120)
    prompts = make_prompts(config, 200)
    assert prompts == make_prompts(config, 200)
    assert {len(p.content) for p in prompts} == set(range(16, 33))
    assert {p.output_len for p in prompts} == set(range(4, 9))
    assert all(isinstance(p.content, list) and min(p.content) >= LOWEST_ID and max(p.content) < 120 for p in prompts)


def test_another_seed_draws_other_prompts() -> None:
    assert make_prompts(DatasetConfig(seed=1), 3) != make_prompts(DatasetConfig(seed=2), 3)


def test_shared_prefixes_come_in_turn_and_the_rest_differs() -> None:
    config = DatasetConfig(kind=DatasetKind.SHARED_PREFIX, prefix_len=64, num_prefixes=2, input_len=16)
    prompts = [p.content for p in make_prompts(config, 6)]
    assert all(len(p) == 80 for p in prompts)
    heads = [tuple(p[:64]) for p in prompts]
    assert heads[0] == heads[2] == heads[4] and heads[1] == heads[3] and heads[0] != heads[1]
    assert len({tuple(p[64:]) for p in prompts}) == 6


def test_words_are_text() -> None:
    (prompt,) = make_prompts(DatasetConfig(kind=DatasetKind.WORDS, input_len=12), 1)
    assert isinstance(prompt.content, str) and len(prompt.content.split()) == 12


def test_file_mixes_plain_lines_and_json_and_is_repeated(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('plain text\n\n{"prompt": "from json", "output_len": 5}\n{"other": 1}\n')
    config = DatasetConfig(kind=DatasetKind.FILE, path=str(path), output_len=9)
    prompts = make_prompts(config, 5)
    assert [(p.content, p.output_len) for p in prompts] == [
        ("plain text", 9),
        ("from json", 5),
        ('{"other": 1}', 9),
        ("plain text", 9),
        ("from json", 5),
    ]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input_len": 0}, "input_len"),
        ({"vocab_size": 100}, "vocab_size"),
        ({"length_spread": 1.0}, "length_spread"),
        ({"kind": DatasetKind.FILE}, "path"),
        ({"path": "x"}, "path"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, object], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DatasetConfig(**changes)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    for path in (empty, tmp_path / "none.txt"):
        with pytest.raises(ConfigError, match=path.name):
            make_prompts(DatasetConfig(kind=DatasetKind.FILE, path=str(path)), 1)
