"""Flags that mirror `sonar.config.EngineConfig`: one table row a field, shared by `sonar serve` and `sonar bench`.

The dataclasses own defaults and checks; this module only names, parses and carries values over. Torch-free.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from sonar.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from sonar.errors import ConfigError

SIZE_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_size(text: str) -> int:
    """Bytes from "536870912", "512MiB", "4G" or "1.5gb" (all units are powers of 1024).

    Raises:
        argparse.ArgumentTypeError: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if text.strip().startswith("-"):
        raise argparse.ArgumentTypeError(f"{text!r} is negative; write e.g. 4GiB, or 0 to leave it to the server")
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes or e.g. 512MiB, 4GiB")
    return int(float(match[1]) * SIZE_UNITS[match[2]])


def parse_layers(text: str) -> tuple[int, ...]:
    """Numbers of layers from "14,16".

    Raises:
        argparse.ArgumentTypeError: it is no such list.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layers a stage; write e.g. 14,16")
    return tuple(int(part) for part in parts)


class EngineFlag(NamedTuple):
    """One flag. section: which dataclass holds `field`. parse: `bool` makes it a switch that turns the field over."""

    option: str
    section: Literal["engine", "cache", "scheduler", "parallel"]
    field: str
    parse: Callable[[str], Any]
    help: str
    choices: tuple[str, ...] | None = None


DTYPES = ("auto", "float32", "bfloat16", "float16")
FLAGS = (
    EngineFlag("--revision", "engine", "revision", str, "branch, tag or commit of a hub model"),
    EngineFlag("--device", "engine", "device", str, "where the model runs", ("auto", "cpu", "cuda")),
    EngineFlag("--dtype", "engine", "dtype", str, "compute type", DTYPES),
    EngineFlag("--load-format", "engine", "load_format", str, "dummy: random weights", ("auto", "dummy")),
    EngineFlag("--threads", "engine", "threads", int, "CPU threads; 0: as many as the process may use"),
    EngineFlag(
        "--activations",
        "engine",
        "activations",
        str,
        "what quantized weights meet on a CPU; auto: int8, fast; float32 is exact",
        ("auto", "float32", "int8"),
    ),
    EngineFlag(
        "--kv-transfer",
        "engine",
        "kv_transfer",
        str,
        "how KV blocks move between replicas: nixl, or shm within a host",
        ("none", "nixl", "shm"),
    ),
    EngineFlag("--kv-checksums", "engine", "kv_checksums", bool, "verify each KV block that another replica sent"),
    EngineFlag("--seed", "engine", "seed", int, "of dummy weights"),
    EngineFlag("--tp", "parallel", "tp_size", int, "ranks (processes) that share every layer"),
    EngineFlag("--pp", "parallel", "pp_size", int, "stages that share out the layers, of --tp ranks each"),
    EngineFlag(
        "--pp-layers", "parallel", "pp_layers", parse_layers, "layers of each stage, e.g. 14,16; empty: balanced"
    ),
    EngineFlag("--dp", "parallel", "dp_size", int, "groups with requests of their own; without --ep: as many replicas"),
    EngineFlag("--ep", "parallel", "ep_size", int, "ranks that share out the experts: --dp times --tp, or 1"),
    EngineFlag("--redundant-experts", "parallel", "redundant_experts", int, "places for second copies of busy experts"),
    EngineFlag(
        "--rebalance-steps",
        "parallel",
        "rebalance_steps",
        int,
        "steps after which experts move to even out their load; 0: never",
    ),
    EngineFlag("--block-size", "cache", "block_size", int, "tokens a KV block"),
    EngineFlag(
        "--kv-cache-memory", "cache", "memory_bytes", parse_size, "bytes, or e.g. 4GiB; 0: a share of what is free"
    ),
    EngineFlag(
        "--memory-share", "cache", "memory_share", float, "share of memory for weights, activations and KV cache"
    ),
    EngineFlag("--kv-cache-dtype", "cache", "dtype", str, "type of cached keys and values", DTYPES),
    EngineFlag("--no-prefix-caching", "cache", "enable_prefix_caching", bool, "compute shared prefixes every time"),
    EngineFlag("--max-num-requests", "scheduler", "max_num_requests", int, "requests computed in one step"),
    EngineFlag("--max-step-tokens", "scheduler", "max_step_tokens", int, "token budget of a step; 0: by device"),
    EngineFlag("--max-waiting", "scheduler", "max_waiting", int, "requests held waiting; one more is refused"),
    EngineFlag(
        "--max-model-len",
        "scheduler",
        "max_model_len",
        int,
        "prompt + output tokens, at most the model's own limit; 0: that",
    ),
    EngineFlag("--no-overlap", "scheduler", "overlap", bool, "schedule a step only after the last one has ended"),
)
SECTIONS = {"engine": EngineConfig, "cache": CacheConfig, "scheduler": SchedulerConfig, "parallel": ParallelConfig}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Declares the model argument and every flag of the table; absent flags leave the dataclass's default alone."""
    parser.add_argument("model", metavar="MODEL", help="folder, .gguf file, hub id, or alias (smollm2-135m)")
    group = parser.add_argument_group("engine")
    for flag in FLAGS:
        if flag.parse is bool:
            action = "store_false" if _default(flag) else "store_true"
            group.add_argument(flag.option, dest=_dest(flag), action=action, default=argparse.SUPPRESS, help=flag.help)
            continue
        group.add_argument(
            flag.option,
            dest=_dest(flag),
            type=flag.parse,
            choices=flag.choices,
            default=argparse.SUPPRESS,
            metavar=None if flag.choices else flag.parse.__name__.removeprefix("parse_").upper(),
            help=f"{flag.help} (default: {_default(flag)})",
        )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The settings that the parsed flags describe.

    Raises:
        ConfigError: a value is out of range; the text names the flag as the user typed it.
    """
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for flag in FLAGS:
        if hasattr(args, _dest(flag)):
            values[flag.section][flag.field] = getattr(args, _dest(flag))
    try:
        return EngineConfig(
            model=args.model,
            cache=CacheConfig(**values["cache"]),
            scheduler=SchedulerConfig(**values["scheduler"]),
            parallel=ParallelConfig(**values["parallel"]),
            **values["engine"],
        )
    except ConfigError as error:
        raise ConfigError(f"{_option_of(error.param)}{error.message}", param=error.param) from error


def _dest(flag: EngineFlag) -> str:
    return f"{flag.section}_{flag.field}"


def _default(flag: EngineFlag) -> object:
    fields = {field.name: field.default for field in dataclasses.fields(SECTIONS[flag.section])}
    return fields[flag.field]


def _option_of(param: str | None) -> str:
    """ "--flag: " for a field that a flag sets under another name, else nothing."""
    for flag in FLAGS:
        if flag.field == param and flag.option != "--" + flag.field.replace("_", "-"):
            return f"{flag.option}: "
    return ""
