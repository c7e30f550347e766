"""The Hessian is the mean it claims to be, however the tokens arrive."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compressor.algorithms.hessian import Hessian, relative_output_error
from compressor.algorithms.pruning.wanda import prune_wanda
from compressor.errors import NumericsError
from compressor.numerics import QuantizationArgs, weight_qparams


def tokens(count: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, columns, generator=torch.Generator().manual_seed(seed)) - 0.5


@pytest.mark.parametrize("columns", [1, 7, 61, 257, 600])
def test_equals_twice_the_mean_outer_product(columns: int) -> None:
    x = tokens(50, columns)
    hessian = Hessian(columns)
    for part in x.split(13):
        hessian.add(part)
    expected = 2 * x.double().t() @ x.double() / 50
    result = hessian.matrix("m")
    assert torch.equal(result, result.t())
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-7)
    assert torch.linalg.eigvalsh(result.double()).min() >= -1e-6 * expected.diagonal().max()


def test_batch_dimensions_are_tokens() -> None:
    x = tokens(12, 5)
    flat, batched = Hessian(5), Hessian(5)
    flat.add(x)
    batched.add(x.view(3, 4, 5))
    assert batched.num_tokens == 12
    assert torch.equal(flat.matrix("m"), batched.matrix("m"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e25])
def test_a_bad_input_names_the_module(bad: float) -> None:
    x = tokens(4, 3)
    x[2, 1] = bad
    hessian = Hessian(3)
    hessian.add(x)
    with pytest.raises(NumericsError, match=r"model\.layers\.3.*NaN or infinity, or are too large to be squared in float32"):
        hessian.matrix("model.layers.3")


def test_no_tokens_is_an_error() -> None:
    with pytest.raises(NumericsError, match=r"0 calibration tokens"):
        Hessian(3).matrix("m")


@pytest.mark.parametrize("size", [1e-19, 1e-20, 1e-21])
def test_inputs_too_small_to_be_squared_are_told_from_zeros(size: float) -> None:
    x, weight = tokens(16, 32) * size, torch.ones(4, 32)
    hessian = Hessian(32)
    hessian.add(x)
    mean_C = x.square().mean(0)
    weighed = QuantizationArgs(num_bits=4, observer="imatrix_mse", group_size=16)
    for look in (
        lambda: hessian.matrix("m"),
        lambda: prune_wanda(weight, mean_C, 0.5, name="m"),
        lambda: weight_qparams(weight, weighed, "m", importance_C=mean_C),
    ):
        with pytest.raises(NumericsError, match=r"^m: its calibration inputs are too small to be squared in float32 .*; scale"):
            look()


def _outputs(kind: str, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, what stands in its place, and the Hessian of its input."""
    draw = torch.Generator().manual_seed(rows)
    weight, x = (torch.randn(num, columns, generator=draw) for num in (rows, 4 * columns))
    if kind == "one loud direction":
        x += 30 * torch.randn(len(x), 1, generator=draw) * torch.randn(columns, generator=draw)
    if kind == "loud channels":
        x *= (4 * torch.rand(columns, generator=draw)).exp()
    if kind == "rows that are lost":
        weight[1::8] *= 20
    values = torch.round(3 * weight) / 3
    values[1::8] = torch.round(weight[1::8] / 20) * 20
    return weight, values, x.t() @ x


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("kind", ["plain", "one loud direction", "loud channels", "rows that are lost"])
@pytest.mark.parametrize("rows", [1, 129, 1024, 1025, 3000])
def test_the_error_of_outputs_is_that_of_all_rows(rows: int, kind: str, size: float) -> None:
    weight, values, hessian = _outputs(kind, rows, 600 if rows == 129 else 96)
    off, kept = (weight - values).double(), weight.double()
    expected = float(((off @ hessian.double()) * off).sum() / ((kept @ hessian.double()) * kept).sum())
    assert relative_output_error(size * weight, size * values, hessian) == pytest.approx(expected, rel=1e-4 if rows <= 1024 else 0.05)


@pytest.mark.parametrize("seed", range(8))
def test_an_error_where_inputs_hardly_go_is_never_negative(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(96, 96, generator=draw)).Q
    hessian = (turn * torch.logspace(4, -4, 96)) @ turn.t()
    weight = torch.randn(1100, 96, generator=draw)
    values = weight - 0.01 * torch.randn(1100, 1, generator=draw) * turn[:, -1]
    assert 0 <= relative_output_error(weight, values, hessian) < 1e-9


def test_the_error_of_outputs_that_are_all_zero_is_zero() -> None:
    weight, values, hessian = _outputs("plain", 40, 16)
    assert relative_output_error(weight, values, torch.zeros_like(hessian)) == 0.0
    assert relative_output_error(torch.zeros_like(weight), torch.zeros_like(weight), hessian) == 0.0
    assert relative_output_error(weight, torch.zeros_like(weight), hessian) == pytest.approx(1.0)
