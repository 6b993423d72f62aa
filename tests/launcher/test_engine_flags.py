"""Flags carry every engine setting over, and errors name the flag that was typed."""

from __future__ import annotations

import argparse
import dataclasses
import socket

import pytest

from launcher.cli import ports
from launcher.cli.engine_flags import FLAGS, SECTIONS, add_engine_flags, engine_config, parse_size
from sonar.config import EngineConfig
from sonar.errors import ConfigError

# Set by position, by composition, or by the parts that place ranks.
WITHOUT_FLAG = {"model", "cache", "scheduler", "parallel", "rank"}


def parse(*arguments: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    return engine_config(parser.parse_args(["some/model", *arguments]))


def test_without_flags_the_defaults_are_the_dataclasses_own() -> None:
    assert parse() == EngineConfig(model="some/model")


def test_every_setting_has_a_flag() -> None:
    for section, kind in SECTIONS.items():
        named = {flag.field for flag in FLAGS if flag.section == section}
        assert named == {field.name for field in dataclasses.fields(kind)} - WITHOUT_FLAG


def test_values_reach_their_fields() -> None:
    config = parse(
        *("--device", "cpu", "--dtype", "bfloat16", "--threads", "3", "--load-format", "dummy"),
        *("--block-size", "32", "--kv-cache-memory", "1.5GiB", "--no-prefix-caching"),
        *("--max-num-requests", "8", "--max-step-tokens", "64", "--max-model-len", "512", "--no-overlap"),
    )
    assert parse("--kv-transfer", "nixl", "--kv-checksums").kv_transfer == "nixl"
    assert parse("--kv-transfer", "nixl", "--kv-checksums").kv_checksums
    assert (config.device, config.dtype, config.threads, config.load_format) == ("cpu", "bfloat16", 3, "dummy")
    assert config.cache.block_size == 32 and config.cache.memory_bytes == 3 * 2**29
    assert not config.cache.enable_prefix_caching and not config.scheduler.overlap
    assert config.scheduler.max_num_requests == 8
    assert (config.scheduler.max_step_tokens, config.scheduler.max_model_len) == (64, 512)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--block-size", "17"), "block_size=17"),
        (("--memory-share", "2"), "memory_share=2.0"),
        (("--max-step-tokens", "4"), "max_step_tokens=4"),
        (("--threads", "-1"), "threads=-1 is negative"),
        (("--max-model-len", "-5"), "max_model_len=-5"),
    ],
)
def test_bad_values_are_refused_by_name(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(*arguments)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("123", 123), ("2k", 2048), ("512MiB", 2**29), ("4G", 2**32), ("1.5 gb", 3 * 2**29), ("0", 0)],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "x", "-1", "1..5G", "5 parsecs"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_size(text)


def test_a_negative_size_is_called_that() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="'-4GiB' is negative"):
        parse_size("-4GiB")


def test_a_port_in_use_is_named_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        problem = ports.port_problem("127.0.0.1", port)
        assert problem is not None and str(port) in problem and "--port" in problem
    assert ports.port_problem("127.0.0.1", port) is None


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("127.0.0.1", 70000, "0 to 65535"),
        ("192.0.2.1", 0, "no address of this machine"),
        ("no.such.host.invalid", 0, "--host"),
    ],
)
def test_other_impossible_addresses(host: str, port: int, words: str) -> None:
    problem = ports.port_problem(host, port)
    assert problem is not None and words in problem
