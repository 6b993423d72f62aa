"""Linear and embedding: plain and quantized parts, stacked, biased, cast and shared."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor

from sonar.errors import ModelError
from sonar.ops import reference_matrix
from sonar.ops.reference import build
from sonar.ops.table import GGUFMatrix, Matrix, PlainMatrix

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
COLUMNS = 512


def _quantized(type_name: str, num_rows: int, num_columns: int = COLUMNS, seed: int = 0) -> GGUFMatrix:
    """Random bytes below 60, so that every scale, whose float's high byte lies among them, is finite and small."""
    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    raw = np.random.default_rng(seed).integers(0, 60, (num_rows, num_columns // numbers * size), dtype=np.uint8)
    return GGUFMatrix(torch.from_numpy(raw), type_name, num_columns)


def _plain(num_rows: int, num_columns: int, dtype: torch.dtype, seed: int = 0) -> PlainMatrix:
    return PlainMatrix(torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed)).to(dtype))


def _dense(matrix: Matrix) -> Tensor:
    if isinstance(matrix, PlainMatrix):
        return matrix.weight_NK.double()
    return torch.from_numpy(
        quants.dequantize(matrix.raw_NX.numpy(), GGMLQuantizationType[matrix.type_name]).astype(np.float64)
    )


@pytest.mark.parametrize("num_tokens", [1, 2, 13])
@pytest.mark.parametrize("type_name", TYPES)
def test_linear_of_every_quantization(type_name: str, num_tokens: int) -> None:
    matrix = _quantized(type_name, 11)
    x_TK = torch.randn(num_tokens, COLUMNS)
    expected = x_TK.double() @ _dense(matrix).T
    actual = build(CPU, torch.float32).linear([matrix], None)(x_TK)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def test_q8_0_is_read_as_the_format_says() -> None:
    scale = np.array([0.25], dtype=np.float16).view(np.uint8)
    raw = np.concatenate([scale, np.arange(-16, 16, dtype=np.int8).view(np.uint8)])
    matrix = GGUFMatrix(torch.from_numpy(raw).unsqueeze(0), "Q8_0", 32)
    rows = build(CPU, torch.float32).embedding(matrix)(torch.tensor([0]))
    assert rows.tolist() == [[0.25 * value for value in range(-16, 16)]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_linear_computes_in_the_compute_dtype(stored: torch.dtype, dtype: torch.dtype) -> None:
    matrix, bias_N = _plain(7, 33, stored), torch.randn(7)
    x_TK = torch.randn(5, 33).to(dtype)
    actual = build(CPU, dtype).linear([matrix], bias_N)(x_TK)
    expected = x_TK.double() @ matrix.weight_NK.to(dtype).double().T + bias_N.to(dtype).double()
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=40 * torch.finfo(dtype).eps)


def test_parts_of_several_formats_are_stacked_in_order() -> None:
    parts: list[Matrix] = [_quantized("Q4_1", 3), _plain(1, COLUMNS, torch.float16), _quantized("Q6_K", 5)]
    bias_N, x_TK = torch.randn(9), torch.randn(4, COLUMNS)
    actual = build(CPU, torch.float32).linear(parts, bias_N)(x_TK)
    expected = torch.cat([x_TK.double() @ _dense(part).T for part in parts], dim=1) + bias_N
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-3)


def test_large_matrices_are_dequantized_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_matrix, "_PIECE_NUMBERS", 2 * COLUMNS)
    matrix = _quantized("Q5_0", 7)
    rows = build(CPU, torch.float32).embedding(matrix)(torch.arange(7))
    torch.testing.assert_close(rows.double(), _dense(matrix))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table", [_plain(9, COLUMNS, torch.float16), _quantized("Q8_0", 9)], ids=["plain", "q8_0"])
def test_embedding_returns_fresh_rows_in_the_compute_dtype(table: Matrix, dtype: torch.dtype) -> None:
    embed = build(CPU, dtype).embedding(table)
    ids_T = torch.tensor([8, 0, 0, 5])
    rows_TD = embed(ids_T)
    assert rows_TD.dtype == dtype
    expected = _dense(table)[ids_T].to(dtype)
    assert rows_TD.equal(expected)
    rows_TD.zero_()
    assert embed(ids_T).equal(expected), "the table was changed through what was looked up"


def test_tied_head_shares_the_unpacked_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    original = reference_matrix.dequantize_rows

    def counting(matrix: GGUFMatrix, first: int, last: int) -> Tensor:
        next(calls)
        return original(matrix, first, last)

    monkeypatch.setattr(reference_matrix, "dequantize_rows", counting)
    ops, table = build(CPU, torch.float32), _quantized("Q8_0", 9)
    embed, head = ops.embedding(table), ops.linear([table], None)
    assert next(calls) == 1
    x_TK = embed(torch.tensor([3]))
    torch.testing.assert_close(head(x_TK).double(), x_TK.double() @ _dense(table).T, rtol=1e-5, atol=1e-4)


def test_matrix_in_the_compute_dtype_is_not_copied() -> None:
    matrix = _plain(4, 8, torch.float32)
    head = build(CPU, torch.float32).linear([matrix], None)
    matrix.weight_NK.zero_()
    assert head(torch.ones(1, 8)).tolist() == [[0.0] * 4]


def test_unknown_quantization_lists_what_is_known() -> None:
    matrix = GGUFMatrix(torch.zeros(2, 10, dtype=torch.uint8), "Q9_X", 32)
    with pytest.raises(ModelError, match="'Q9_X' is not supported; known are F32, F16, Q4_0"):
        build(CPU, torch.float32).linear([matrix], None)


def test_rows_of_a_wrong_length_are_refused() -> None:
    matrix = GGUFMatrix(torch.zeros(2, 33, dtype=torch.uint8), "Q8_0", 32)
    with pytest.raises(ModelError, match="a row of 32 numbers in Q8_0 takes 34 bytes for each 32, not 33 in all"):
        build(CPU, torch.float32).embedding(matrix)
