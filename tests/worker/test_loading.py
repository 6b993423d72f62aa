"""Loading a runner: phases, facts, and the largest steps it may be given."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from sonar.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from sonar.errors import CapacityError, ConfigError, ModelError
from sonar.model_config import load_model_config
from sonar.model_source import resolve_model
from sonar.ops.registry import select_ops
from sonar.worker.loading import can_capture, load_runner
from sonar.worker.profile import estimate_activations, largest_steps
from sonar.worker.resolve import Machine
from tests.tiny import write_tiny_folder

MACHINE = Machine(num_cpus=1, host_bytes=1 << 30)
CONFIG = EngineConfig(
    model="",
    device="cpu",
    cache=CacheConfig(memory_bytes=8 << 20),
    scheduler=SchedulerConfig(max_num_requests=16, max_step_tokens=64),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_folder("gemma3", tmp_path_factory.mktemp("gemma3")))


def test_a_loaded_runner_tells_what_became_of_its_settings(folder):
    loaded = load_runner(dataclasses.replace(CONFIG, model=folder), machine=MACHINE)
    assert (loaded.config.device, loaded.config.dtype, loaded.config.threads) == ("cpu", "float32", 1)
    assert loaded.config.scheduler.max_model_len == 512 == loaded.model_config.max_position
    assert [group.window for group in loaded.groups] == [17, 0]
    assert loaded.ops_backend in {row.value for row in loaded.settings}
    cache = loaded.runner._parts.cache
    assert [len(tensor) for tensor in cache.tensors] == list(loaded.num_blocks)
    assert 0 < cache.size_bytes <= 8 << 20
    loaded.runner.close()


def test_random_weights_are_as_good_as_read_ones(folder):
    loaded = load_runner(dataclasses.replace(CONFIG, model=folder, load_format="dummy"), machine=MACHINE)
    for batch in largest_steps(loaded.runner._parts.cache.layout, loaded.config.scheduler).batches:
        result = loaded.runner.submit(batch).result()
        assert all(0 <= token < loaded.model_config.vocab_size for token in result.token_ids)
    loaded.runner.close()


def test_the_largest_steps_fill_the_budget_and_the_batch(folder):
    loaded = load_runner(dataclasses.replace(CONFIG, model=folder), machine=MACHINE)
    steps = largest_steps(loaded.runner._parts.cache.layout, loaded.config.scheduler)
    assert [sum(batch.lengths) for batch in steps.batches] == [64, 16]
    assert [sum(batch.samples) for batch in steps.batches] == [1, 16]
    ids = [block for batch in steps.batches for new in batch.new_blocks for block in new.block_ids]
    assert max(ids) < steps.num_blocks
    estimate = estimate_activations(loaded.model_config, loaded.config)
    assert estimate > 4 * 16 * loaded.model_config.vocab_size
    loaded.runner.close()


def test_a_context_that_does_not_fit_is_refused_before_anything_is_allocated(folder):
    config = dataclasses.replace(
        CONFIG,
        model=folder,
        cache=CacheConfig(memory_bytes=1 << 18),
        scheduler=SchedulerConfig(max_num_requests=4, max_step_tokens=64, max_model_len=512),
    )
    with pytest.raises(CapacityError, match=r"max_model_len=512 tokens and there are 262144; lower --max-model-len to"):
        load_runner(config, machine=MACHINE)


def test_a_missing_tensor_is_named(tmp_path):
    folder = write_tiny_folder("qwen3", tmp_path)
    weights = folder / "model.safetensors"
    from safetensors.torch import load_file, save_file

    tensors = load_file(weights)
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, weights)
    with pytest.raises(ModelError, match=r"model\.layers\.2\.mlp\.down_proj\.weight"):
        load_runner(dataclasses.replace(CONFIG, model=str(folder)), machine=MACHINE)


def test_an_unknown_architecture_lists_the_known(tmp_path):
    folder = write_tiny_folder("qwen3", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen9", "architectures": ["Qwen9"]}))
    with pytest.raises(ModelError, match=r"qwen9.*llama"):
        load_runner(dataclasses.replace(CONFIG, model=str(folder)), machine=MACHINE)


def test_threads_bind_torch_in_the_runners_thread(folder):
    before = torch.get_num_threads()
    loaded = load_runner(dataclasses.replace(CONFIG, model=folder, threads=1), machine=MACHINE)
    seen = loaded.runner._thread.submit(torch.get_num_threads).result()
    assert seen == 1
    loaded.runner.close()
    torch.set_num_threads(before)


def test_ranks_are_refused_without_a_head_that_starts_them(folder):
    config = dataclasses.replace(CONFIG, model=folder, parallel=ParallelConfig(tp_size=2))
    with pytest.raises(ConfigError, match="tp_size=2, pp_size=1, ep_size=1: ranks are processes that a head starts"):
        load_runner(config, machine=MACHINE)


@pytest.mark.parametrize(
    ("family", "expected"), [("llama", True), ("qwen3", True), ("qwen3_moe", False), ("deepseek_v3", False)]
)
def test_graphs_are_for_models_whose_ops_never_read_on_the_host(tmp_path, family, expected):
    config = load_model_config(resolve_model(str(write_tiny_folder(family, tmp_path))))
    ops = dataclasses.replace(select_ops(torch.device("cpu"), torch.float32, "reference"), is_capturable=True)
    assert can_capture(torch.device("cuda"), ops, config) is expected
    assert not can_capture(torch.device("cpu"), ops, config)
