"""Weights of every sort and the formats for them, for the property tests of this folder.

They are fixtures because nothing below tests/ is a package: a test takes the strategy as an argument and draws from it with `st.data()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import compressed_tensors.quantization as theirs
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from compressor.numerics import QuantizationArgs

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_STYLES = ("normal", "outliers", "constant", "zeros", "zero groups", "subnormal", "halves", "positive", "negative", "huge")


@dataclass(frozen=True)
class Case:
    """A weight [R, C] and a format whose groups divide it."""

    weight: Tensor
    args: QuantizationArgs
    style: str

    @property
    def groups(self) -> Tensor:
        """The weight as [R, G, S], [R, 1, C] or [1, R * C], so that the last dimension shares a scale."""
        if self.args.strategy == "tensor":
            return self.weight.reshape(1, -1)
        num_groups = self.weight.shape[1] // self.args.group_size if self.args.strategy == "group" else 1
        return self.weight.reshape(self.weight.shape[0], num_groups, -1)


def _values(style: str, shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** int(torch.randint(-3, 3, (), generator=generator))
    info = torch.finfo(dtype)
    if style == "outliers":
        normal[..., 0] *= 100
    elif style == "constant":
        normal[:] = normal.flatten()[0]
    elif style == "zeros":
        normal.zero_()
        normal[..., 0] *= -1.0  # -0.0
    elif style == "zero groups":
        normal[:, ::2] = 0
    elif style == "subnormal":
        normal = torch.randint(-300, 300, shape, generator=generator) * info.smallest_normal * info.eps
    elif style == "halves":
        normal = torch.randint(-32, 32, shape, generator=generator) / 2
    elif style == "positive":
        normal = normal.abs()
    elif style == "negative":
        normal = -normal.abs()
    elif style == "huge":
        normal = (torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1) * info.max
    return normal.to(dtype).reshape(shape[0], -1)


@pytest.fixture(scope="session")
def cases() -> Callable[..., st.SearchStrategy[Case]]:
    """Give a strategy of cases; keyword arguments narrow what it draws."""

    @st.composite
    def draw_case(
        draw: st.DrawFn,
        dtypes: tuple[torch.dtype, ...] = DTYPES,
        types: tuple[str, ...] = ("int", "float"),
        symmetric: tuple[bool, ...] = (True, False),
        strategies: tuple[str, ...] = ("tensor", "channel", "group"),
        styles: tuple[str, ...] = _STYLES,
        bits: tuple[int, int] = (2, 8),
        observer: str | None = None,
    ) -> Case:
        number_type = draw(st.sampled_from(types))
        is_float = number_type == "float"
        shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 4), st.sampled_from((1, 2, 3, 7, 16, 31, 64))))
        strategy = draw(st.sampled_from(strategies))
        args = QuantizationArgs(
            num_bits=8 if is_float else draw(st.integers(*bits)),
            type=number_type,
            symmetric=is_float or draw(st.sampled_from(symmetric)),
            strategy=strategy,
            group_size=shape[2] if strategy == "group" else None,
            observer=observer,
        )
        style = draw(st.sampled_from(styles))
        return Case(_values(style, shape, draw(st.sampled_from(dtypes)), draw(st.integers(0, 2**31))), args, style)

    return draw_case


@pytest.fixture(scope="session")
def peer_args() -> Callable[[QuantizationArgs], theirs.QuantizationArgs]:
    """Translate our args into compressed-tensors' own."""

    def translate(args: QuantizationArgs) -> theirs.QuantizationArgs:
        fields = {"num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "block_structure", "scale_dtype"}
        return theirs.QuantizationArgs(**args.model_dump(include=fields))

    return translate


@pytest.fixture(scope="session")
def same_bits() -> Callable[[Tensor, Tensor], bool]:
    """Compare shape, dtype and bytes: -0.0 is not 0.0 here, and NaN equals itself."""

    def compare(one: Tensor, other: Tensor) -> bool:
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
        return torch.equal(one.view(bits), other.view(bits))

    return compare
