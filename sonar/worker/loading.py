"""From a configuration to a runner that computes: source, shape, `auto`, weights, cache, in this order.

Reports each phase as it goes, so that whoever waits can tell progress from a hang. Knows nothing of requests. Called by
`sonar.engine.build_engine`.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from sonar.config import EngineConfig, ModelConfig
from sonar.distributed.rank_link import RankLink
from sonar.errors import ConfigError
from sonar.kvcache.groups import CacheGroup, cache_groups
from sonar.model_config import load_model_config
from sonar.model_source import ModelSource, resolve_model
from sonar.models.base import Model
from sonar.models.registry import load_model
from sonar.ops.registry import select_ops
from sonar.ops.table import OpTable
from sonar.packaged_model import Progress, no_progress
from sonar.weights.finite_weights import FiniteWeights
from sonar.weights.gguf_weights import GGUFWeights
from sonar.weights.open_weights import open_weights
from sonar.worker.draw_plan import Vocabulary
from sonar.worker.kv_cache import CacheLayout, KVCache
from sonar.worker.model_runner import MAX_UNDER_WAY, ModelRunner, RunnerParts
from sonar.worker.pipeline_stage import PipelineStage
from sonar.worker.profile import measure_activations
from sonar.worker.resolve import (
    DTYPES,
    Machine,
    MemoryUse,
    SettingRow,
    as_they_are,
    inspect_machine,
    resolve_cache,
    resolve_config,
)
from sonar.worker.slots import SlotTable

if TYPE_CHECKING:
    from sonar.worker.ranks import Ranks


@dataclass(frozen=True)
class LoadedRunner:
    """A runner and what became of its configuration.

    Attributes:
        config: without `auto`. settings: the table to print.
        groups, num_blocks: cache groups of the whole model, and the blocks of each.
        weights_bytes: taken by the weights of this rank, measured. ops_backend: name of the op table.
        ranks: the replica's other ranks; None when there are none.
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
    ranks: Ranks | None = None


def load_runner(
    config: EngineConfig,
    progress: Progress = no_progress,
    cache_dir: Path | None = None,
    machine: Machine | None = None,
    link: RankLink | None = None,
) -> LoadedRunner:
    """Loads a model and its cache, or this rank's part of them, on this process's device.

    Args:
        cache_dir: for downloaded and derived files. machine: facts to resolve `auto` by; None asks this host.
        link: to meet the replica's other ranks by; needed when there are any.

    Raises:
        ModelError, ConfigError, CapacityError: with the remedy. RemoteError: another rank did not come.
    """
    progress("find model", 0, 0)
    source = resolve_model(config.model, config.revision, cache_dir, progress)
    whole = load_model_config(source)
    machine = machine or inspect_machine()
    ranks = _meet_ranks(config, whole, machine, link, progress)
    if ranks is not None:
        machine = machine.shared_by(ranks.groups.placement.num_beside(config.parallel.rank))
    resolved, rows = resolve_config(config, whole, machine)
    device = _find_device(resolved)
    if device.type == "cpu":
        torch.set_num_threads(resolved.threads)
    model, local, ops, weights_bytes = _load_weights(resolved, whole, source, device, progress, ranks)
    groups = cache_groups(whole)
    layout = CacheLayout(
        tuple(group.within(local.layers) for group in groups),
        local.cache_shape.num_heads,
        local.cache_shape.dim,
        resolved.cache.block_size,
        DTYPES[resolved.cache.dtype],
        local.cache_shape.num_planes,
    )
    progress("measure memory", 0, 0)
    vocabulary = Vocabulary(whole.vocab_size, whole.eos_token_ids)
    capture = can_capture(device, ops, local)
    builder = RunnerBuilder(model, layout, ops, vocabulary, device, resolved, local.hidden_size, capture, ranks)
    use = MemoryUse(weights_bytes, measure_activations(builder.build, layout, local, resolved))
    (resolved, cache_rows), num_blocks = resolve_cache(
        resolved,
        layout.groups,
        layout.token_bytes,
        use,
        machine,
        is_length_given=config.scheduler.max_model_len > 0,
        agree=ranks.agree if ranks else as_they_are,
    )
    progress("allocate KV cache", 0, 0)
    runner = replace(builder, config=resolved).build(num_blocks)
    progress("prepare", 0, 0)
    runner.prepare()
    if ranks is not None:
        progress("wait for ranks", 0, 0)
        ranks.groups.barrier()
        rows = (*rows, *ranks.rows(local))
    return LoadedRunner(
        runner=runner,
        config=resolved,
        model_config=whole,
        source=source,
        settings=(*rows, *cache_rows, SettingRow("ops", ops.name, f"for {resolved.device}")),
        groups=groups,
        num_blocks=num_blocks,
        weights_bytes=weights_bytes,
        ops_backend=ops.name,
        ranks=ranks,
    )


@dataclass(frozen=True)
class RunnerBuilder:
    """Makes runners of one model over caches of different sizes: one to measure with, one to serve.

    Attributes:
        can_capture: see the function of this name.
    """

    model: Model
    layout: CacheLayout
    ops: OpTable
    vocabulary: Vocabulary
    device: torch.device
    config: EngineConfig
    hidden_size: int
    can_capture: bool
    ranks: Ranks | None = None

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
        parts = RunnerParts(
            self.model,
            cache,
            slots,
            self.ops.sample,
            self.vocabulary,
            self.device,
            threads,
            self.ranks is None and self.can_capture,
            self.ops.parallel,
            experts=self.ranks.balance() if self.ranks else None,
        )
        links = self.ranks.groups.pipeline if self.ranks else None
        if links is not None:
            stage = PipelineStage(links, slots.history, self.hidden_size, DTYPES[self.config.dtype], self.device)
            parts = replace(parts, stage=stage, max_under_way=max(MAX_UNDER_WAY, links.num_stages))
        return ModelRunner(parts)


def can_capture(device: torch.device, ops: OpTable, model: ModelConfig) -> bool:
    """Whether decode steps may be captured in CUDA graphs.

    Not with experts, whose reference op reads on the host how many rows each of them has; not with latent attention,
    whose reference op takes the padding's slot -1 for the last one of the cache.
    """
    return device.type == "cuda" and ops.is_capturable and model.moe is None and model.mla is None


def _find_device(config: EngineConfig) -> torch.device:
    # With its index: the runner's thread has a current device of its own.
    return torch.device("cuda", torch.cuda.current_device()) if config.device == "cuda" else torch.device("cpu")


def _meet_ranks(
    config: EngineConfig, whole: ModelConfig, machine: Machine, link: RankLink | None, progress: Progress
) -> Ranks | None:
    """This rank's groups; None when it is the only one."""
    parallel = config.parallel
    if parallel.world_size == 1:
        return None
    if link is None:
        raise ConfigError(
            f"tp_size={parallel.tp_size}, pp_size={parallel.pp_size}, ep_size={parallel.ep_size}: ranks are processes "
            "that a head starts; use `sonar serve`, or leave them at 1",
            param="tp_size" if parallel.tp_size > 1 else "pp_size",
        )
    from sonar.worker.ranks import Ranks  # one rank alone does without torch's process groups

    progress("meet ranks", 0, 0)
    return Ranks(link, parallel, _find_device(resolve_config(config, whole, machine).config))


def _load_weights(
    config: EngineConfig,
    whole: ModelConfig,
    source: ModelSource,
    device: torch.device,
    progress: Progress,
    ranks: Ranks | None,
) -> tuple[Model, ModelConfig, OpTable, int]:
    """The model or this rank's part of it, the shape of that part, its ops, and the bytes that loading took."""
    progress("load weights", 0, 0)
    dtype = DTYPES[config.dtype]
    ops = select_ops(device, dtype, activations=config.activations)
    before = _bytes_in_use(device)
    with torch.inference_mode():
        opened = weights = open_weights(source, whole, config.load_format, dtype, device)
        local = whole
        if ranks is not None:
            weights, local, ops = ranks.shard(weights, whole, ops)
        model = load_model(local, FiniteWeights(weights), ops)
    if isinstance(opened, GGUFWeights):
        # The embedding's rows stay where they are in the file and keep the mapping, of which the rest is packed by now.
        opened.release_pages()
    del weights, opened
    gc.collect()
    return model, local, ops, max(0, _bytes_in_use(device) - before)


def _bytes_in_use(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    # Private memory alone: what is read from a mapped file can be dropped and read again.
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))
