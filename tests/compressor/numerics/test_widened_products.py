"""Products in half precision are computed as float32 where the CPU is slow at them, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from compressor.numerics import precision
from compressor.numerics.precision import slow_dtypes, widened_products

HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _slow_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the path on every CPU, so that machines with the instructions test it too."""
    monkeypatch.setattr(precision, "slow_dtypes", lambda: frozenset(HALVES))
    yield
    assert not precision._open


def _factors(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "linear": (torch.nn.functional.linear, ((2, 5, 64), (32, 64))),
    "linear with bias": (torch.nn.functional.linear, ((2, 5, 64), (32, 64), (32,))),
    "bmm": (torch.bmm, ((3, 5, 64), (3, 64, 7))),
    "baddbmm": (torch.baddbmm, ((3, 5, 7), (3, 5, 64), (3, 64, 7))),
    "scaled addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), ((7,), (5, 64), (64, 7))),
    "no rows": (torch.mm, ((0, 64), (64, 7))),
    "one column": (torch.mm, ((5, 64), (64, 1))),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_product_is_the_float32_product_rounded_once(name: str, dtype: torch.dtype) -> None:
    function, shapes = PRODUCTS[name]
    factors = _factors(dtype, *shapes)
    expected = function(*(factor.float() for factor in factors)).to(dtype)
    with widened_products():
        found = function(*factors)
    assert found.dtype == dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_product_into_a_given_tensor_has_the_same_bits(dtype: torch.dtype) -> None:
    left, right = _factors(dtype, (5, 64), (64, 7))
    with widened_products():
        expected, out, empty = left @ right, torch.zeros(5, 7, dtype=dtype), torch.zeros(0, dtype=dtype)
        assert torch.mm(left, right, out=out) is out
        torch.mm(left, right, out=empty)
    assert torch.equal(out, expected)
    assert torch.equal(empty, expected)


def test_gradients_are_widened_too_and_match_those_in_float32() -> None:
    x, w = (factor.requires_grad_() for factor in _factors(torch.bfloat16, (5, 64), (7, 64)))
    with widened_products():
        torch.nn.functional.linear(x, w).sum().backward()
    assert x.grad is not None and w.grad is not None
    assert torch.equal(x.grad, w.detach().float().sum(0).bfloat16().expand(5, 64))
    assert torch.equal(w.grad, x.detach().float().sum(0).bfloat16().expand(7, 64))


def test_a_wide_right_factor_is_widened_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = _factors(torch.bfloat16, (5, 64), (64, 33))
    with widened_products():
        whole = left @ right
        monkeypatch.setattr(precision, "MAX_WIDENED", 64 * 10)
        assert torch.equal(left @ right, whole)


def test_other_dtypes_and_refusals_are_as_they_were() -> None:
    left, right = _factors(torch.float32, (5, 64), (64, 7))
    single, double = left @ right, left.double() @ right.double()
    with widened_products(), widened_products():
        assert torch.equal(left @ right, single)
        assert torch.equal(left.double() @ right.double(), double)
        with pytest.raises(RuntimeError, match="same dtype"):
            torch.mm(left, right.bfloat16())
        with pytest.raises(RuntimeError, match="same dtype"):
            torch.mm(left.bfloat16(), right)


def test_torchs_own_kernels_are_back_after_an_error() -> None:
    left, right = _factors(torch.bfloat16, (16, 256), (256, 16))
    before = left @ right
    with pytest.raises(KeyError), widened_products():
        raise KeyError
    assert torch.equal(left @ right, before)
    assert not precision._open


def test_a_cpu_with_the_instructions_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "slow_dtypes", frozenset)
    with widened_products():
        assert not precision._open


def test_dtypes_are_slow_that_onednn_does_not_multiply() -> None:
    assert (torch.bfloat16 in slow_dtypes()) == (not torch.ops.mkldnn._is_mkldnn_bf16_supported())
