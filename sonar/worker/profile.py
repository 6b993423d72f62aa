"""How much memory a step takes beside weights and cache.

Measured on CUDA by running the two largest kinds of step; estimated on a CPU, where a step of full size would cost
seconds of start-up and the figure matters little. Knows nothing of how the cache is shared out. Called by
`sonar.worker.loading`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from sonar.config import EngineConfig, ModelConfig, SchedulerConfig
from sonar.messages import AdmittedRequest, NewBlocks, StepBatch
from sonar.sampling_params import SamplingParams
from sonar.worker.kv_cache import CacheLayout
from sonar.worker.model_runner import ModelRunner

_MIB = 1 << 20
# What allocators round up and keep, and libraries take for workspaces.
_MARGIN = 1.1
_CUDA_RESERVE_BYTES = 256 * _MIB


class LargestSteps(NamedTuple):
    """Steps to run one after the other in a fresh runner. num_blocks: that each cache group must have for them."""

    num_blocks: int
    batches: tuple[StepBatch, ...]


def measure_activations(
    build: Callable[[tuple[int, ...]], ModelRunner], layout: CacheLayout, model: ModelConfig, config: EngineConfig
) -> int:
    """Bytes that the largest step takes.

    Args:
        build: makes a runner with so many blocks a group; it is closed again here.
    """
    if config.device == "cpu":
        return estimate_activations(model, config)
    steps = largest_steps(layout, config.scheduler)
    runner = build((steps.num_blocks,) * len(layout.groups))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for batch in steps.batches:
        runner.submit(batch).result()
    peak = torch.cuda.max_memory_allocated() - before
    runner.close()
    torch.cuda.empty_cache()
    return int(peak * _MARGIN) + _CUDA_RESERVE_BYTES


def largest_steps(layout: CacheLayout, limits: SchedulerConfig) -> LargestSteps:
    """One prompt that fills the token budget, then a full batch whose draws use every filter."""
    length = min(limits.max_step_tokens, limits.max_model_len - 1)
    num_blocks = -(-length // layout.block_size)
    return LargestSteps(
        num_blocks, (_prompt_step(length, num_blocks, layout), _decode_step(limits.max_num_requests, layout))
    )


def estimate_activations(model: ModelConfig, config: EngineConfig) -> int:
    """An upper bound of a step's activations in float32: rows of hidden, QKV and MLP size, and the logits of a full
    batch, each held twice."""
    per_token = 4 * model.hidden_size + 3 * model.intermediate_size
    per_token += (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    if model.moe is not None:  # every choice is a row of its own
        per_token += model.moe.top_k * (2 * model.hidden_size + 3 * model.moe.intermediate_size)
        per_token += 3 * model.moe.shared_intermediate_size
    if model.mla is not None:  # queries and attention's output in the latent space
        per_token += 2 * model.num_heads * model.cache_shape.dim
    numbers = config.scheduler.max_step_tokens * per_token + config.scheduler.max_num_requests * model.vocab_size
    return 2 * 4 * numbers


def _prompt_step(length: int, num_blocks: int, layout: CacheLayout) -> StepBatch:
    tables = [NewBlocks(0, group, 0, list(range(num_blocks))) for group in range(len(layout.groups))]
    return StepBatch(
        incarnation=0,
        step=0,
        slots=[0],
        starts=[0],
        lengths=[length],
        samples=[True],
        admitted=[_request(0, [0] * length)],
        new_blocks=tables,
    )


def _decode_step(num_requests: int, layout: CacheLayout) -> StepBatch:
    # All write to one block, which is harmless here.
    slots = list(range(num_requests))
    return StepBatch(
        incarnation=0,
        step=1,
        slots=slots,
        starts=[0] * num_requests,
        lengths=[1] * num_requests,
        samples=[True] * num_requests,
        admitted=[_request(slot, [0]) for slot in slots],
        new_blocks=[NewBlocks(slot, group, 0, [0]) for slot in slots for group in range(len(layout.groups))],
        released=[0],
    )


def _request(slot: int, token_ids: list[int]) -> AdmittedRequest:
    params = SamplingParams(seed=0, top_k=50, top_p=0.9, min_p=0.01, typical_p=0.9, logprobs=5)
    return AdmittedRequest(slot=slot, token_ids=token_ids, prompt_len=len(token_ids), sampling=params)
