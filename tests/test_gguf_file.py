"""The GGUF reader: agreement with the gguf package, and named errors for every way a file can be broken."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sonar.errors import ModelError
from sonar.gguf_file import SERVED_TYPES, GGUFArray, GGUFFile
from sonar.model_source import ModelSource
from tests.gguf_writing import quantized, write_gguf

METADATA = {
    "a.bool": True,
    "a.int": 7,
    "a.float": 0.25,
    "a.text": "naïve",
    "a.strings": ["x", "", "図書館"],
    "a.ints": [3, -1, 2],
    "a.floats": [0.5, -1.5],
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    tensors = {
        "dense": (np.arange(12, dtype=np.float32).reshape(3, 4), "F32"),
        "vector": (np.arange(5, dtype=np.float16), "F16"),
        "packed": (quantized((6, 256), "Q4_K"), "Q4_K"),
    }
    return write_gguf(path, "llama", METADATA, tensors)


def test_reads_what_was_written(small: Path) -> None:
    file = GGUFFile(small)
    scalars = {key: value for key, value in METADATA.items() if not isinstance(value, list)}
    assert {key: file.metadata[key] for key in scalars} == scalars
    assert file.strings("a.strings") == METADATA["a.strings"]
    assert file.numbers("a.ints") == METADATA["a.ints"]
    assert file.numbers("a.floats") == METADATA["a.floats"]
    assert file.tensors["dense"].shape == (3, 4)
    assert file.rows(file.tensors["dense"]).view(np.float32).tolist() == np.arange(12.0).reshape(3, 4).tolist()
    assert file.rows(file.tensors["vector"]).view(np.float16).tolist() == [[0, 1, 2, 3, 4]]
    assert file.tensors["packed"].type_name == "Q4_K"
    assert np.array_equal(file.rows(file.tensors["packed"]), quantized((6, 256), "Q4_K"))


def test_tensors_are_views_of_the_file(small: Path) -> None:
    file = GGUFFile(small)
    assert np.shares_memory(file.rows(file.tensors["packed"]), file.data)


def test_array_of_another_type_is_a_named_error(small: Path) -> None:
    file = GGUFFile(small)
    for read, key in (
        (file.strings, "a.ints"),
        (file.numbers, "a.strings"),
        (file.numbers, "a.int"),
        (file.strings, "no"),
    ):
        with pytest.raises(ModelError, match=f"'{key}'"):
            read(key)


def test_demo_model_agrees_with_the_gguf_package(smollm2: ModelSource) -> None:
    file, reference = GGUFFile(smollm2.path), gguf.GGUFReader(smollm2.path)
    assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        mine = file.tensors[tensor.name]
        assert mine.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert (mine.type_name, mine.start) == (tensor.tensor_type.name, tensor.data_offset)
    last = reference.tensors[-1]
    assert np.array_equal(file.rows(file.tensors[last.name]).reshape(-1), last.data.view(np.uint8).reshape(-1))
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        assert isinstance(file.metadata[key], GGUFArray)
        field = reference.fields[key]
        assert file.strings(key)[::997] == [str(bytes(field.parts[i]), "utf-8") for i in field.data[::997]]


@pytest.mark.parametrize("type_name", SERVED_TYPES)
def test_every_served_type(type_name: str, tmp_path: Path) -> None:
    ggml_type = gguf.GGMLQuantizationType[type_name]
    data = quantized((5, 512), type_name)
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, {"w": (data, type_name)})
    file = GGUFFile(path)
    rows = file.rows(file.tensors["w"])
    assert file.tensors["w"].shape == (5, 512)
    assert np.array_equal(gguf.dequantize(rows, ggml_type), gguf.dequantize(data, ggml_type))


def test_empty_missing_and_foreign_files(tmp_path: Path) -> None:
    cases = {"empty": b"", "short": b"GGUF", "zip": b"PK\3\4" + bytes(100), "text": b"version https://git-lfs" * 9}
    for name, content in cases.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelError, match=name):
            GGUFFile(path)
    with pytest.raises(ModelError, match="No such file"):
        GGUFFile(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("at", "content", "message"),
    [
        (4, b"\x01\0\0\0", "version 1"),
        (4, b"\0\0\0\x03", "big-endian"),
        (8, b"\xff" * 8, "needs"),
        (16, b"\xff\xff\xff\x7f\0\0\0\0", "needs"),
        (24, b"\xff\xff\xff\xff\xff\xff\xff\x7f", "needs"),
    ],
)
def test_hostile_header(small: Path, tmp_path: Path, at: int, content: bytes, message: str) -> None:
    data = bytearray(small.read_bytes())
    data[at : at + len(content)] = content
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message):
        GGUFFile(path)


def test_cut_within_the_tensor_data_names_the_tensor(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[:-40])
    with pytest.raises(ModelError, match=r"cut short: tensor 'packed'"):
        GGUFFile(path)


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.005, 0.01, 0.015, 0.0175, 0.0181, 0.5, 0.999])
def test_cut_demo_model(smollm2: ModelSource, tmp_path: Path, share: float) -> None:
    """The header is 1.8% of the file: the first cuts fall into metadata, vocabulary and tensor table."""
    path = tmp_path / "cut.gguf"
    with smollm2.path.open("rb") as source, path.open("wb") as target:
        target.write(source.read(int(smollm2.path.stat().st_size * share)))
    with pytest.raises(ModelError, match=r"needs|ends within|cut short"):
        GGUFFile(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_is_a_model_error_or_harmless(small: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Flipped bytes and cuts anywhere: reading everything either works or raises `ModelError`, nothing else."""
    content = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, 700))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    try:
        file = GGUFFile(path)
        for key, value in file.metadata.items():
            if isinstance(value, GGUFArray) and value.type_id != 9:
                (file.strings if value.type_id == 8 else file.numbers)(key)
        for tensor in file.tensors.values():
            assert file.rows(tensor).nbytes == tensor.size_bytes
    except ModelError as error:
        assert "damaged.gguf" in str(error)


def test_damaged_demo_header(smollm2: ModelSource, tmp_path: Path) -> None:
    """A single flipped byte in the vocabulary's lengths shifts everything behind it: found, and named."""
    path = tmp_path / "demo.gguf"
    shutil.copyfile(smollm2.path, path)
    start = GGUFFile(smollm2.path).metadata["tokenizer.ggml.tokens"]
    assert isinstance(start, GGUFArray)
    with path.open("r+b") as file:
        file.seek(start.start + 3)
        file.write(b"\x80")
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.tokens"):
        GGUFFile(path)
