"""Settles every `auto` of an `EngineConfig`, once, into a new object, with the reason for each value.

Two moments: device, dtypes, threads and context before the weights load; the cache's memory after, when what weights
and activations take is known. Decisions are functions of facts (`Machine`), so tests need no such machine. Called by
`sonar.worker.loading`; whoever starts the engine prints the rows as one table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch

from sonar.config import ActivationMode, Device, DType, EngineConfig, ModelConfig, SchedulerConfig
from sonar.errors import ConfigError
from sonar.kvcache.groups import CacheGroup
from sonar.kvcache.plan import longest_that_fits, plan_blocks
from sonar.ops.registry import has_kernels
from sonar.worker.host import available_memory, usable_cpus

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# On a CPU the cache shares the memory with everything else that runs there: more than this only when it is asked for.
CPU_CACHE_CAP_BYTES = 4 << 30
_BF16_CAPABILITY = (8, 0)
# A context that nobody chose is not lowered below this (or the model's own): such a server would refuse most prompts.
LEAST_CONTEXT = 512
# More threads than that only get into each other's way, and far more end the process.
THREADS_PER_CPU = 4
LEAST_MAX_THREADS = 64
# A step is the least time between two tokens of a stream. 2 CPU cores compute some 600 prompt tokens of a 135M model a
# second: with 2048 a step, a long prompt stopped every other stream for seconds.
AUTO_STEP_TOKENS = {"cpu": 256, "cuda": 2048}


@dataclass(frozen=True)
class Machine:
    """Facts of this host.

    Attributes:
        num_cpus: that this process may use. host_bytes: of memory available now.
        cuda_capability: of the first visible device, None when there is none. cuda_bytes: its free memory now.
        has_cpu_kernels: whether the compiled ones are installed.
    """

    num_cpus: int
    host_bytes: int
    cuda_capability: tuple[int, int] | None = None
    cuda_bytes: int = 0
    has_cpu_kernels: bool = True

    def shared_by(self, num_ranks: int) -> Machine:
        """What one of so many ranks of this host may use; each has an accelerator of its own."""
        return replace(
            self, num_cpus=max(1, self.num_cpus // num_ranks), host_bytes=self.host_bytes // max(1, num_ranks)
        )


class CacheNeeds(NamedTuple):
    """What decides how many blocks there are.

    Attributes:
        budget: bytes for all blocks. token_bytes: of one token's keys and values in one layer.
        num_layers: of each cache group.
    """

    budget: int
    token_bytes: int
    num_layers: tuple[int, ...]


def as_they_are(needs: CacheNeeds) -> CacheNeeds:
    """A rank that has no others to agree with."""
    return needs


class SettingRow(NamedTuple):
    """One line of the start-up table. warning: what the user has to be told of it, if anything."""

    name: str
    value: str
    reason: str
    warning: str = ""


class Resolved(NamedTuple):
    """A configuration without `auto`, and why it came out so."""

    config: EngineConfig
    rows: tuple[SettingRow, ...]


class MemoryUse(NamedTuple):
    """Bytes the rank takes beside its cache."""

    weights: int
    activations: int


def inspect_machine() -> Machine:
    """Asks this host."""
    capability, cuda_bytes = None, 0
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        cuda_bytes = torch.cuda.mem_get_info()[0]
    return Machine(usable_cpus(), available_memory(), capability, cuda_bytes, has_kernels("cpu"))


def resolve_config(config: EngineConfig, model: ModelConfig, machine: Machine) -> Resolved:
    """Settles everything but the cache's memory.

    Raises:
        ConfigError: the device is not there, too many threads, or more context than the model has.
    """
    device, device_reason = _resolve_device(config.device, machine)
    dtype, dtype_reason = _resolve_dtype(config.dtype, device, model, machine)
    cache_dtype = dtype if config.cache.dtype == "auto" else config.cache.dtype
    threads = _resolve_threads(config.threads, machine)
    activations, activations_reason = _resolve_activations(config.activations, device, model, machine)
    max_model_len, length_reason = _resolve_length(config.scheduler.max_model_len, model)
    step_tokens, step_reason = _resolve_step_tokens(config.scheduler, device)
    resolved = replace(
        config,
        device=device,
        dtype=dtype,
        threads=threads,
        activations=activations,
        cache=replace(config.cache, dtype=cache_dtype),
        scheduler=replace(config.scheduler, max_model_len=max_model_len, max_step_tokens=step_tokens),
    )
    rows = (
        SettingRow("device", device, device_reason),
        SettingRow("dtype", dtype, dtype_reason),
        SettingRow("cache dtype", cache_dtype, "as dtype" if config.cache.dtype == "auto" else "as given"),
        SettingRow("threads", str(threads), "as given" if config.threads else "CPUs this process may use"),
        SettingRow("activations", activations, activations_reason),
        SettingRow("max_model_len", str(max_model_len), length_reason),
        SettingRow("max_step_tokens", str(step_tokens), step_reason),
    )
    return Resolved(resolved, rows)


def resolve_cache(
    config: EngineConfig,
    groups: Sequence[CacheGroup],
    token_bytes: int,
    use: MemoryUse,
    machine: Machine,
    *,
    is_length_given: bool,
    agree: Callable[[CacheNeeds], CacheNeeds] = as_they_are,
) -> tuple[Resolved, tuple[int, ...]]:
    """Settles the cache's memory, and with it how long a request may be.

    Args:
        config: as `resolve_config` left it.
        token_bytes: of one token's keys and values in one layer.
        use: measured. machine: as it was before the weights were loaded.
        is_length_given: the user set max_model_len. If not, it is lowered to what the cache holds.
        agree: makes of each rank's needs those that all ranks plan by, for they hold the same blocks.

    Returns:
        the configuration and the blocks of each group.

    Raises:
        CapacityError: not even one request of the given length, or of LEAST_CONTEXT, fits; says what is needed and what
            there is.
    """
    cache, limits = config.cache, config.scheduler
    budget, reason = cache.memory_bytes, "as given"
    if not budget:
        budget, reason = _memory_budget(config, use, machine)
    agreed = agree(CacheNeeds(budget, token_bytes, tuple(len(group.layers) for group in groups)))
    planned = [replace(group, layers=tuple(range(count))) for group, count in zip(groups, agreed.num_layers)]
    sizes = (agreed.budget, planned, agreed.token_bytes, cache.block_size, limits.max_model_len, limits.max_step_tokens)
    rows = []
    if not is_length_given and (fits := longest_that_fits(*sizes)) < limits.max_model_len:
        # Below the least, planning finds that it does not fit, and says what would.
        length = max(fits, min(LEAST_CONTEXT, limits.max_model_len))
        warning = (
            f"context lowered from {limits.max_model_len} to {length} tokens: the KV cache of "
            f"{agreed.budget / 2**20:.0f} MiB holds no more; raise --kv-cache-memory or --memory-share"
        )
        limits = replace(limits, max_model_len=length)
        rows.append(SettingRow("max_model_len", str(length), "the longest request that the KV cache holds", warning))
    num_blocks = plan_blocks(
        agreed.budget, planned, agreed.token_bytes, cache.block_size, limits.max_model_len, limits.max_step_tokens
    )
    layers = [len(group.layers) for group in groups]
    taken = sum(count * of * token_bytes * cache.block_size for count, of in zip(num_blocks, layers))
    rows.append(SettingRow("KV cache", f"{taken / 2**20:.0f} MiB", reason))
    text = " + ".join(f"{count} {group.kind.value}" for count, group in zip(num_blocks, groups))
    rows.append(SettingRow("KV blocks", text, f"{cache.block_size} tokens each"))
    resolved = replace(config, cache=replace(cache, memory_bytes=budget), scheduler=limits)
    return Resolved(resolved, tuple(rows)), num_blocks


def _resolve_step_tokens(limits: SchedulerConfig, device: str) -> tuple[int, str]:
    if limits.max_step_tokens:
        return limits.max_step_tokens, "as given"
    return max(AUTO_STEP_TOKENS[device], limits.max_num_requests), f"auto for {device}"


def _resolve_threads(asked: int, machine: Machine) -> int:
    most = max(LEAST_MAX_THREADS, THREADS_PER_CPU * machine.num_cpus)
    if asked > most:
        raise ConfigError(
            f"--threads {asked} on {machine.num_cpus} CPUs; choose at most {most}, or 0 for as many as there are CPUs",
            param="threads",
        )
    return asked or machine.num_cpus


def _resolve_device(asked: Device, machine: Machine) -> tuple[Device, str]:
    has_cuda = machine.cuda_capability is not None
    if asked == "cuda" and not has_cuda:
        raise ConfigError("device='cuda' and torch sees no CUDA device; use device='cpu' or 'auto'", param="device")
    if asked != "auto":
        return asked, "as given"
    return ("cuda", "torch sees a CUDA device") if has_cuda else ("cpu", "torch sees no CUDA device")


def _resolve_dtype(asked: DType, device: Device, model: ModelConfig, machine: Machine) -> tuple[DType, str]:
    if asked != "auto":
        return asked, "as given"
    if device == "cpu":
        return "float32", "CPUs without bf16 arithmetic are several times slower in it"
    capability = machine.cuda_capability or (0, 0)
    can_bf16 = capability >= _BF16_CAPABILITY
    if model.quantization is None and (model.dtype == "float16" or (model.dtype == "bfloat16" and can_bf16)):
        return cast(DType, model.dtype), "as the checkpoint's"
    if can_bf16:
        return "bfloat16", f"the checkpoint is {model.quantization or model.dtype}"
    return "float16", f"the device's compute capability {capability[0]}.{capability[1]} has no bf16"


def _resolve_activations(
    asked: ActivationMode, device: Device, model: ModelConfig, machine: Machine
) -> tuple[ActivationMode, str]:
    if asked != "auto":
        return asked, "as given"
    if device != "cpu":
        return asked, "a setting of the CPU's kernels"
    if model.quantization is None:
        return "float32", "the weights are not quantized"
    if not machine.has_cpu_kernels:
        return "float32", "the compiled kernels are not installed"
    return "int8", f"the weights are {model.quantization}; float32 is exact and slower"


def _resolve_length(asked: int, model: ModelConfig) -> tuple[int, str]:
    if not asked:
        return model.max_position, "the model's own limit"
    if asked > model.max_position:
        raise ConfigError(
            f"max_model_len={asked} is above the model's own limit of {model.max_position} tokens; "
            "lower --max-model-len, or leave it at 0, which is that limit",
            param="max_model_len",
        )
    return asked, "as given"


def _memory_budget(config: EngineConfig, use: MemoryUse, machine: Machine) -> tuple[int, str]:
    share = config.cache.memory_share
    there_is = machine.cuda_bytes if config.device == "cuda" else machine.host_bytes
    budget = max(0, int(share * there_is) - use.weights - use.activations)
    reason = (
        f"{share:.0%} of {there_is / 2**30:.1f} GiB, less weights {use.weights / 2**20:.0f} MiB "
        f"and activations {use.activations / 2**20:.0f} MiB"
    )
    if config.device == "cpu" and budget > CPU_CACHE_CAP_BYTES:
        return CPU_CACHE_CAP_BYTES, f"cap on a CPU; --kv-cache-memory sets it (there would be {budget / 2**30:.1f} GiB)"
    return budget, reason
