"""What `auto` becomes on machines of every kind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sonar.config import CacheConfig, EngineConfig, LayerKind, ModelConfig, RopeConfig, SchedulerConfig
from sonar.errors import CapacityError, ConfigError
from sonar.kvcache.groups import cache_groups
from sonar.worker.resolve import CPU_CACHE_CAP_BYTES, CacheNeeds, Machine, MemoryUse, resolve_cache, resolve_config

GIB = 1 << 30
CPU = Machine(num_cpus=6, host_bytes=16 * GIB)
HOPPER = Machine(num_cpus=6, host_bytes=16 * GIB, cuda_capability=(9, 0), cuda_bytes=100 * GIB)
TURING = Machine(num_cpus=6, host_bytes=16 * GIB, cuda_capability=(7, 5), cuda_bytes=15 * GIB)


def make_model(dtype="bfloat16", quantization=None, max_position=8192, kinds=(LayerKind.FULL,) * 2):
    return ModelConfig(
        architecture="llama",
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_layers=len(kinds),
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=max_position,
        norm_eps=1e-5,
        activation="silu",
        layer_kinds=kinds,
        rope={kind: RopeConfig(theta=1e4, dim=16) for kind in set(kinds)},
        sliding_window=64,
        dtype=dtype,
        quantization=quantization,
    )


@pytest.mark.parametrize(
    ("machine", "model", "asked", "expected"),
    [
        (CPU, make_model(), {}, ("cpu", "float32")),
        (CPU, make_model(), {"dtype": "bfloat16"}, ("cpu", "bfloat16")),
        (HOPPER, make_model(), {}, ("cuda", "bfloat16")),
        (HOPPER, make_model("float16"), {}, ("cuda", "float16")),
        (HOPPER, make_model("float32"), {}, ("cuda", "bfloat16")),
        (HOPPER, make_model("float16", "Q4_K_M"), {}, ("cuda", "bfloat16")),
        (HOPPER, make_model(), {"device": "cpu"}, ("cpu", "float32")),
        (TURING, make_model(), {}, ("cuda", "float16")),
        (TURING, make_model("float32"), {"dtype": "float32"}, ("cuda", "float32")),
    ],
)
def test_device_and_dtype(machine, model, asked, expected):
    resolved, rows = resolve_config(EngineConfig(model="m", **asked), model, machine)
    assert (resolved.device, resolved.dtype) == expected
    assert resolved.cache.dtype == expected[1]
    assert {row.name: row.value for row in rows}["dtype"] == expected[1]
    assert all(row.reason for row in rows)


@pytest.mark.parametrize(("asked", "expected"), [(0, 8192), (100, 100), (8192, 8192)])
def test_the_context_is_at_most_the_models(asked, expected):
    config = EngineConfig(model="m", scheduler=SchedulerConfig(max_model_len=asked))
    resolved, rows = resolve_config(config, make_model(), CPU)
    assert resolved.scheduler.max_model_len == expected
    assert not any(row.warning for row in rows)


@pytest.mark.parametrize(
    ("machine", "quantization", "settings", "expected"),
    [
        (CPU, "Q4_1", {}, "int8"),
        (CPU, "Q4_1", {"activations": "float32"}, "float32"),
        (CPU, None, {}, "float32"),
        (replace(CPU, has_cpu_kernels=False), "Q4_1", {}, "float32"),
        (HOPPER, "Q4_1", {}, "auto"),
        (HOPPER, "Q4_1", {"device": "cpu"}, "int8"),
    ],
)
def test_quantized_weights_meet_8_bit_activations_where_there_are_kernels(machine, quantization, settings, expected):
    model = replace(make_model(), quantization=quantization)
    resolved, rows = resolve_config(EngineConfig(model="m", **settings), model, machine)
    assert resolved.activations == expected
    assert all(row.reason for row in rows)


def test_threads_and_cache_dtype_as_given_or_found():
    resolved, _ = resolve_config(EngineConfig(model="m"), make_model(), CPU)
    assert resolved.threads == 6
    config = EngineConfig(model="m", threads=2, cache=CacheConfig(dtype="float16"))
    resolved, _ = resolve_config(config, make_model(), CPU)
    assert (resolved.threads, resolved.cache.dtype) == (2, "float16")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(model="m", device="cuda"), "no CUDA device; use device='cpu'"),
        (EngineConfig(model="m", threads=100_000), "--threads 100000 on 6 CPUs; choose at most 64"),
        (
            EngineConfig(model="m", scheduler=SchedulerConfig(max_model_len=9000)),
            "limit of 8192 tokens.*--max-model-len",
        ),
    ],
)
def test_what_cannot_be_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        resolve_config(config, make_model(), CPU)


TOKEN_BYTES = 2 * 2 * 16 * 4


USE = MemoryUse(GIB, GIB // 2)


def cache_of(config, machine, model=None, use=USE):
    model = model or make_model()
    resolved, _ = resolve_config(config, model, machine)
    (resolved, rows), num_blocks = resolve_cache(
        resolved,
        cache_groups(model),
        TOKEN_BYTES,
        use,
        machine,
        is_length_given=config.scheduler.max_model_len > 0,
    )
    return resolved, {row.name: (row.value, row.reason, row.warning) for row in rows}, num_blocks


def test_on_a_cpu_the_cache_is_a_share_with_a_cap():
    resolved, rows, _ = cache_of(EngineConfig(model="m"), CPU)
    assert resolved.cache.memory_bytes == CPU_CACHE_CAP_BYTES
    assert "cap on a CPU" in rows["KV cache"][1]
    small = Machine(num_cpus=2, host_bytes=2 * GIB)
    resolved, rows, num_blocks = cache_of(EngineConfig(model="m"), small, use=MemoryUse(GIB, GIB // 4))
    assert resolved.cache.memory_bytes == int(0.9 * 2 * GIB) - GIB - GIB // 4
    assert "90% of 2.0 GiB, less weights 1024 MiB and activations 256 MiB" in rows["KV cache"][1]
    block_bytes = 2 * 16 * TOKEN_BYTES
    assert num_blocks == (resolved.cache.memory_bytes // block_bytes,)


def test_on_cuda_the_cache_takes_what_is_left_of_the_share():
    resolved, _, _ = cache_of(EngineConfig(model="m", cache=CacheConfig(memory_share=0.5)), HOPPER)
    assert resolved.cache.memory_bytes == 50 * GIB - GIB - GIB // 2


def test_given_bytes_are_taken_as_they_are():
    config = EngineConfig(model="m", cache=CacheConfig(memory_bytes=64 << 20))
    resolved, rows, num_blocks = cache_of(config, CPU, make_model(kinds=(LayerKind.FULL, LayerKind.SLIDING)))
    assert resolved.cache.memory_bytes == 64 << 20
    assert rows["KV cache"][1] == "as given"
    assert len(num_blocks) == 2
    assert rows["KV blocks"][0] == f"{num_blocks[0]} full + {num_blocks[1]} sliding"


def test_a_context_of_our_own_choice_is_lowered_to_what_fits():
    config = EngineConfig(model="m", cache=CacheConfig(memory_bytes=1 << 20))
    resolved, rows, num_blocks = cache_of(config, CPU)
    fits = (1 << 20) // (2 * TOKEN_BYTES)
    assert resolved.scheduler.max_model_len == fits
    value, reason, warning = rows["max_model_len"]
    assert (value, reason) == (str(fits), "the longest request that the KV cache holds")
    assert f"from 8192 to {fits} tokens: the KV cache of 1 MiB" in warning and "raise --kv-cache-memory" in warning
    assert num_blocks[0] * 16 == fits


def test_a_context_is_not_lowered_below_use():
    config = EngineConfig(model="m", cache=CacheConfig(memory_bytes=200_000))
    with pytest.raises(
        CapacityError, match=r"needs 262144 bytes .*=512 tokens .* are 200000; lower --max-model-len to 384"
    ):
        cache_of(config, CPU)
    resolved, rows, _ = cache_of(config, CPU, make_model(max_position=128))
    assert resolved.scheduler.max_model_len == 128 and "max_model_len" not in rows
    asked = EngineConfig(
        model="m", cache=CacheConfig(memory_bytes=200_000), scheduler=SchedulerConfig(max_model_len=384)
    )
    assert cache_of(asked, CPU)[0].scheduler.max_model_len == 384


def test_a_given_context_that_does_not_fit_is_refused_with_the_figures():
    config = EngineConfig(
        model="m", cache=CacheConfig(memory_bytes=1 << 20), scheduler=SchedulerConfig(max_model_len=8000)
    )
    with pytest.raises(CapacityError, match=r"needs 4096000 bytes .*max_model_len=8000 .* there are 1048576; lower"):
        cache_of(config, CPU)


def test_no_memory_at_all_is_refused_with_the_figures():
    with pytest.raises(CapacityError, match=r"needs \d+ bytes .* there are 0; raise"):
        cache_of(EngineConfig(model="m"), Machine(num_cpus=1, host_bytes=GIB))


def test_ranks_of_one_host_share_its_cpus_and_memory():
    assert CPU.shared_by(4) == Machine(num_cpus=1, host_bytes=4 * GIB)
    shared = HOPPER.shared_by(8)
    assert (shared.num_cpus, shared.cuda_bytes) == (1, HOPPER.cuda_bytes), "each has a device of its own"


def test_all_ranks_plan_by_the_tightest_of_their_needs():
    model = make_model(kinds=(LayerKind.FULL, LayerKind.SLIDING, LayerKind.FULL))
    config, _ = resolve_config(EngineConfig(model="m", cache=CacheConfig(memory_bytes=1 << 26)), model, CPU)
    own = []

    def agree(needs: CacheNeeds) -> CacheNeeds:
        own.append(needs)
        return CacheNeeds(needs.budget // 2, 2 * needs.token_bytes, (3, 1))

    groups = tuple(group.within(range(1, 3)) for group in cache_groups(model))
    _, few = resolve_cache(config, groups, TOKEN_BYTES, USE, CPU, is_length_given=False, agree=agree)
    assert own == [CacheNeeds(1 << 26, TOKEN_BYTES, (1, 1))]
    _, many = resolve_cache(config, groups, TOKEN_BYTES, USE, CPU, is_length_given=False)
    assert all(a < b for a, b in zip(few, many))


@pytest.mark.parametrize(("asked", "requests", "settled"), [(0, 8, 256), (0, 300, 300), (64, 8, 64)])
def test_a_step_on_a_cpu_is_short_unless_it_is_told_otherwise(asked: int, requests: int, settled: int) -> None:
    limits = SchedulerConfig(max_num_requests=requests, max_step_tokens=asked)
    resolved = resolve_config(EngineConfig(model="m", device="cpu", scheduler=limits), make_model(), CPU)
    assert resolved.config.scheduler.max_step_tokens == settled
