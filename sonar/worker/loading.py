"""From a configuration to a runner that computes: source, shape, `auto`, weights, cache, in this order.

Reports each phase as it goes, so that whoever waits can tell progress from a hang. Knows nothing of requests. Called by
`sonar.engine.build_engine`.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from sonar.config import EngineConfig, ModelConfig
from sonar.kvcache.groups import CacheGroup, cache_groups
from sonar.model_config import load_model_config
from sonar.model_source import ModelSource, resolve_model
from sonar.models.base import Model
from sonar.models.registry import load_model
from sonar.ops.registry import select_ops
from sonar.ops.table import OpTable
from sonar.packaged_model import Progress, no_progress
from sonar.weights.open_weights import open_weights
from sonar.worker.draw_plan import Vocabulary
from sonar.worker.kv_cache import CacheLayout, KVCache
from sonar.worker.model_runner import ModelRunner, RunnerParts
from sonar.worker.profile import measure_activations
from sonar.worker.resolve import (
    DTYPES,
    Machine,
    MemoryUse,
    SettingRow,
    inspect_machine,
    resolve_cache,
    resolve_config,
)
from sonar.worker.slots import SlotTable


@dataclass(frozen=True)
class LoadedRunner:
    """A runner and what became of its configuration.

    Attributes:
        config: without `auto`. settings: the table to print.
        groups, num_blocks: cache groups and the blocks of each.
        weights_bytes: taken by the weights, measured. ops_backend: name of the op table.
    """

    runner: ModelRunner
    config: EngineConfig
    model_config: ModelConfig
    source: ModelSource
    settings: tuple[SettingRow, ...]
    groups: tuple[CacheGroup, ...]
    num_blocks: tuple[int, ...]
    weights_bytes: int
    ops_backend: str


def load_runner(
    config: EngineConfig,
    progress: Progress = no_progress,
    cache_dir: Path | None = None,
    machine: Machine | None = None,
) -> LoadedRunner:
    """Loads a model and its cache on this process's device.

    Args:
        cache_dir: for downloaded and derived files. machine: facts to resolve `auto` by; None asks this host.

    Raises:
        ModelError, ConfigError, CapacityError: with the remedy.
    """
    progress("find model", 0, 0)
    source = resolve_model(config.model, config.revision, cache_dir, progress)
    model_config = load_model_config(source)
    machine = machine or inspect_machine()
    resolved, rows = resolve_config(config, model_config, machine)
    device = _find_device(resolved)
    if device.type == "cpu":
        torch.set_num_threads(resolved.threads)
    model, ops, weights_bytes = _load_weights(resolved, model_config, source, device, progress)
    groups = cache_groups(model_config)
    layout = CacheLayout(
        groups,
        model_config.num_kv_heads,
        model_config.head_dim,
        resolved.cache.block_size,
        DTYPES[resolved.cache.dtype],
    )
    progress("measure memory", 0, 0)
    vocabulary = Vocabulary(model_config.vocab_size, model_config.eos_token_ids)
    build = RunnerBuilder(model, layout, ops, vocabulary, device, resolved)
    use = MemoryUse(weights_bytes, measure_activations(build.build, layout, model_config, resolved))
    (resolved, cache_rows), num_blocks = resolve_cache(
        resolved,
        groups,
        layout.token_bytes,
        use,
        machine,
        is_length_given=config.scheduler.max_model_len > 0,
    )
    progress("allocate KV cache", 0, 0)
    runner = RunnerBuilder(model, layout, ops, vocabulary, device, resolved).build(num_blocks)
    progress("prepare", 0, 0)
    runner.prepare()
    return LoadedRunner(
        runner=runner,
        config=resolved,
        model_config=model_config,
        source=source,
        settings=(*rows, *cache_rows, SettingRow("ops", ops.name, f"for {resolved.device}")),
        groups=groups,
        num_blocks=num_blocks,
        weights_bytes=weights_bytes,
        ops_backend=ops.name,
    )


@dataclass(frozen=True)
class RunnerBuilder:
    """Makes runners of one model over caches of different sizes: one to measure with, one to serve."""

    model: Model
    layout: CacheLayout
    ops: OpTable
    vocabulary: Vocabulary
    device: torch.device
    config: EngineConfig

    def build(self, num_blocks: tuple[int, ...]) -> ModelRunner:
        """Allocates a cache of so many blocks a group, and slots. Raises `CapacityError`."""
        slots = SlotTable(
            num_slots=self.config.scheduler.max_num_requests,
            max_model_len=self.config.scheduler.max_model_len,
            block_size=self.layout.block_size,
            num_groups=len(self.layout.groups),
            device=self.device,
        )
        cache = KVCache(self.layout, num_blocks, self.device)
        threads = self.config.threads if self.device.type == "cpu" else 0
        return ModelRunner(
            RunnerParts(
                self.model,
                cache,
                slots,
                self.ops.sample,
                self.vocabulary,
                self.device,
                threads,
                self.device.type == "cuda" and self.ops.is_capturable,
            )
        )


def _find_device(config: EngineConfig) -> torch.device:
    # With its index: the runner's thread has a current device of its own.
    return torch.device("cuda", torch.cuda.current_device()) if config.device == "cuda" else torch.device("cpu")


def _load_weights(
    config: EngineConfig, model_config: ModelConfig, source: ModelSource, device: torch.device, progress: Progress
) -> tuple[Model, OpTable, int]:
    """The model, its ops, and the bytes that loading took."""
    progress("load weights", 0, 0)
    dtype = DTYPES[config.dtype]
    ops = select_ops(device, dtype, activations=config.activations)
    before = _bytes_in_use(device)
    with torch.inference_mode():
        weights = open_weights(source, model_config, config.load_format, dtype, device)
        model = load_model(model_config, weights, ops)
    del weights
    gc.collect()
    return model, ops, max(0, _bytes_in_use(device) - before)


def _bytes_in_use(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    # Private memory alone: what is read from a mapped file can be dropped and read again.
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))
