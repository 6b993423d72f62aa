"""The worker on a GPU: the same tokens as on a CPU in float32, with overlap, and memory that is measured.

pytest -m gpu tests/worker/test_cuda.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sonar.config import CacheConfig, EngineConfig, SchedulerConfig
from sonar.engine import build_engine
from sonar.worker.upload import upload
from tests.tiny import write_tiny_folder
from tests.worker.test_equality import FAMILIES, MAX_LEN, SAMPLINGS, everything, request, run

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: write_tiny_folder(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


def make_engine(folder, device, *, memory_bytes=16 << 20, overlap=True, max_step_tokens=512, dtype="float32"):
    cache = CacheConfig(memory_bytes=memory_bytes)
    limits = SchedulerConfig(
        max_num_requests=8, max_step_tokens=max_step_tokens, max_model_len=MAX_LEN, overlap=overlap
    )
    return build_engine(EngineConfig(model=str(folder), device=device, dtype=dtype, cache=cache, scheduler=limits))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("overlap", "max_step_tokens"), [(True, 512), (True, 9), (False, 512)])
def test_the_tokens_are_those_of_a_cpu(folders, family, overlap, max_step_tokens):
    expected = make_engine(folders[family], "cpu")
    actual = make_engine(folders[family], "cuda", overlap=overlap, max_step_tokens=max_step_tokens)
    cpu, cuda = run(expected.engine, everything()), run(actual.engine, everything())
    for name in cpu:
        assert cuda[name].tokens == cpu[name].tokens, name
    cut = [request(i, cpu[str(i)].tokens[:7]) for i in range(len(SAMPLINGS))]
    assert {name: output.tokens for name, output in run(actual.engine, cut).items()} == {
        name: output.tokens for name, output in cpu.items()
    }
    expected.engine.close()
    actual.engine.close()


def test_auto_measures_and_fills_the_memory(folders):
    built = make_engine(folders["llama"], "cuda", memory_bytes=0, dtype="auto")
    settings = {row.name: row for row in built.settings}
    assert built.config.dtype == "bfloat16"
    assert built.config.cache.memory_bytes > torch.cuda.get_device_properties(0).total_memory // 4
    assert "less weights" in settings["KV cache"].reason
    assert torch.cuda.mem_get_info()[0] > 0
    outputs = run(built.engine, everything())
    assert all(len(output.tokens) == 24 for output in outputs.values())
    built.engine.close()


def test_closing_gives_the_memory_back(folders):
    make_engine(folders["llama"], "cuda").engine.close()  # cuBLAS keeps 32 MiB for each of the streams we work on
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    built = make_engine(folders["llama"], "cuda")
    run(built.engine, everything())
    built.engine.close()
    del built
    assert torch.cuda.memory_allocated() - before < 8 << 20


def test_packed_uploads_keep_shapes_types_and_values():
    rng = np.random.default_rng(0)
    for _ in range(50):
        arrays = [
            rng.integers(0, 1000, size=rng.integers(0, 40)).astype(np.int64),
            rng.integers(0, 1000, size=(3, rng.integers(1, 5))).astype(np.int32),
            rng.random(rng.integers(1, 9)).astype(np.float32),
            rng.random((2, 3)) > 0.5,
        ]
        for tensor, array in zip(upload(arrays, torch.device("cuda")), arrays):
            assert np.array_equal(tensor.cpu().numpy(), array)
            assert tensor.cpu().numpy().dtype == array.dtype
