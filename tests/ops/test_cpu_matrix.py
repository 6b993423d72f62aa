"""Linear layers and embeddings of the CPU backend against float64 products of the same weights, at every level."""

from __future__ import annotations

import pytest
import torch

from sonar.errors import ModelError
from sonar.ops.table import Activation, GGUFMatrix, Matrix, PlainMatrix
from tests.ops.cpu_case import K_TYPES, LEGACY_TYPES, LEVELS, at_level, build, dense, random_matrix, with_threads

TYPES = [(name, 256 if name in K_TYPES else 32) for name in (*LEGACY_TYPES, *K_TYPES)]


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a share of the largest value."""
    return float((actual.double() - expected).abs().max() / expected.abs().max())


def _rounding_bound(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """How far 8 bits may take an output: each x is off by at most 1/254 of the largest of its 32."""
    largest_TB = x_TK.double().abs().view(len(x_TK), -1, 32).amax(dim=-1)
    weight_NB = weight_NK.abs().view(len(weight_NK), -1, 32).sum(dim=-1)
    return largest_TB @ weight_NB.T / 254 * 1.001


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("type_name", "block"), TYPES)
def test_quantized_linear(type_name: str, block: int, level: str) -> None:
    # Rows not a multiple of 16 lanes, columns over one and several unpacked chunks, rows of every tile size.
    for num_rows, num_columns in ((1, block), (37, 3 * block), (16, 1024 + 2 * block)):
        matrix = random_matrix(type_name, num_rows, num_columns)
        weight_NK = dense(matrix).double()
        for num_tokens in (1, 2, 3, 4, 5, 13, 31):
            x_TK = torch.randn(num_tokens, num_columns, generator=torch.Generator().manual_seed(num_tokens))
            expected = x_TK.double() @ weight_NK.T
            with at_level(level):
                exact = build("float32").linear([matrix], None)(x_TK)
                rounded = build("int8").linear([matrix], None)(x_TK)
            assert _error(exact, expected) < 3e-6
            assert ((rounded.double() - expected).abs() <= _rounding_bound(x_TK, weight_NK)).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("type_name", "block"), TYPES)
def test_activations_that_8_bits_hold_exactly_give_exact_products(type_name: str, block: int, level: str) -> None:
    """Integers up to 127 with a 127 in every block survive the rounding: integer arithmetic then adds no error."""
    matrix = random_matrix(type_name, 19, 2 * block)
    x_TK = torch.randint(-127, 128, (6, 2 * block), generator=torch.Generator().manual_seed(1)).float()
    x_TK[:, ::32] = 127.0
    with at_level(level):
        actual = build("int8").linear([matrix], None)(x_TK)
    assert _error(actual, x_TK.double() @ dense(matrix).double().T) < 1e-6


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 1), (17, 33), (100, 64), (48, 301)])
def test_plain_linear(num_rows: int, num_columns: int, dtype: torch.dtype, level: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight_NK = torch.randn(num_rows, num_columns, generator=generator).to(dtype)
    bias_N = torch.randn(num_rows, generator=generator)
    for num_tokens in (1, 4, 7, 30):
        x_TK = torch.randn(num_tokens, num_columns, generator=generator)
        with at_level(level):
            actual = build("int8").linear([PlainMatrix(weight_NK)], bias_N)(x_TK)
        assert _error(actual, x_TK.double() @ weight_NK.double().T + bias_N.double()) < 3e-6


def test_parts_of_several_formats_stack_with_their_biases() -> None:
    parts: list[Matrix] = [random_matrix("Q4_K", 20, 256), random_matrix("Q6_K", 5, 256, seed=1)]
    parts.append(PlainMatrix(torch.randn(9, 256)))
    weight_NK = torch.cat([dense(part) if isinstance(part, GGUFMatrix) else part.weight_NK for part in parts])
    bias_N, x_TK = torch.randn(34), torch.randn(21, 256)
    actual = build("float32").linear(parts, bias_N)(x_TK)
    assert _error(actual, x_TK.double() @ weight_NK.double().T + bias_N.double()) < 3e-6


def test_types_without_kernels_are_widened() -> None:
    raw_NX = torch.randint(0, 200, (11, 2 * 18), dtype=torch.uint8)
    raw_NX[:, 1::18] = 0x20  # the high byte of each block's scale
    matrix = GGUFMatrix(raw_NX, "IQ4_NL", 64)
    x_TK = torch.randn(3, 64)
    assert _error(build("int8").linear([matrix], None)(x_TK), x_TK.double() @ dense(matrix).double().T) < 3e-6


def test_corrupt_rows_are_named() -> None:
    short = GGUFMatrix(torch.zeros(4, 19, dtype=torch.uint8), "Q4_1", 32)
    with pytest.raises(ModelError, match="Q4_1 takes 20 bytes for each 32, not 19"):
        build("int8").linear([short], None)
    with pytest.raises(ModelError, match="Q9_Z"):
        build("int8").linear([GGUFMatrix(torch.zeros(4, 20, dtype=torch.uint8), "Q9_Z", 32)], None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    weight_NK, x_TK = torch.randn(40, 64).to(dtype), torch.randn(5, 64).to(dtype)
    actual = build("float32", dtype).linear([PlainMatrix(weight_NK)], None)(x_TK)
    assert actual.dtype == dtype
    expected = (x_TK.double() @ weight_NK.double().T).to(dtype)
    torch.testing.assert_close(actual, expected, atol=torch.finfo(dtype).eps * 2, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize(("type_name", "block"), TYPES)
def test_quantized_embedding_is_the_format_s_own_numbers(type_name: str, block: int) -> None:
    table, ids_T = random_matrix(type_name, 50, 2 * block), torch.tensor([0, 49, 7, 7, 13])
    assert build("int8").embedding(table)(ids_T).equal(dense(table)[ids_T])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_embedding(dtype: torch.dtype) -> None:
    table_VD, ids_T = torch.randn(30, 7).to(dtype), torch.tensor([29, 0, 3])
    assert build("int8").embedding(PlainMatrix(table_VD))(ids_T).equal(table_VD[ids_T].float())
    embedding = build("int8").embedding(PlainMatrix(table_VD))
    with pytest.raises(IndexError, match=r"outside \[0, 30\)"):
        embedding(torch.tensor([3, 30]))


@pytest.mark.parametrize("mode", ["int8", "float32"])
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_fused_forms_give_the_bits_of_the_singlebuild(num_tokens: int, mode: str) -> None:
    ops = build(mode)
    assert ops.fused is not None
    up, down = ops.linear([random_matrix("Q4_1", 96, 1088)], None), ops.linear([random_matrix("Q8_0", 1088, 96)], None)
    x_TD, norm_D = torch.randn(num_tokens, 1088), torch.randn(1088)
    normed = ops.rms_norm(x_TD, norm_D, 1e-5)
    assert ops.fused.norm_linear(up, x_TD, norm_D, 1e-5).equal(up(normed))
    gated = ops.fused.norm_gated_linear(up, x_TD, norm_D, 1e-5, Activation.SILU)
    assert gated.equal(ops.gated_activation(up(normed), Activation.SILU))
    y_TK = torch.randn(num_tokens, 96)
    expected = x_TD + down(y_TK)
    ops.fused.linear_add(down, y_TK, x_TD)
    assert x_TD.equal(expected)
    residual_TN = torch.randn(num_tokens, 96)  # 1088 columns are more than one chunk holds: sums are carried over
    expected = residual_TN + up(x_TD)
    ops.fused.linear_add(up, x_TD, residual_TN)
    assert residual_TN.equal(expected)


def test_weights_live_as_long_as_their_layer() -> None:
    matrix, x_TK = random_matrix("Q4_0", 64, 64), torch.randn(2, 64)
    linear = build("float32").linear([matrix], torch.randn(64))  # the table, and with it the arena, is dropped at once
    before = linear(x_TK)
    for _ in range(20):
        build("float32").linear([random_matrix("Q4_0", 640, 64, seed=9)], torch.randn(640))
    assert linear(x_TK).equal(before)


def test_inputs_need_not_be_contiguous() -> None:
    linear = build("float32").linear([random_matrix("Q4_0", 20, 64)], None)
    x_KT = torch.randn(64, 5)
    with with_threads(1):
        assert linear(x_KT.T).equal(linear(x_KT.T.contiguous()))
