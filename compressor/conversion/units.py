"""What there is to do, in pieces that any process can do by itself: plain data, from tensors of the base's files to tensors of new ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict
from torch import dtype as Dtype

from compressor.model.headers import DTYPES, NAMES, StoredTensor
from compressor.numerics import QuantizationScheme

Kind = Literal["range", "round", "copy", "hash"]


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps.

    Args:
        shape: of the tensor.

    Returns:
        In values, by dimension.
    """
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class View(_Plain):
    """A part of a tensor in a file, as strides see it.

    Attributes:
        file: name of the file.
        dtype: of its values, as safetensors names it.
        start: byte of the first value.
        shape: of the part.
        strides: in values, by dimension.
        scales: of an fp8 weight in blocks, which is read as floats; None for what needs none.
        block: rows and columns of one such block; the last of a row or column may be smaller.
    """

    file: str
    dtype: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    scales: View | None = None
    block: tuple[int, int] | None = None

    @staticmethod
    def of(stored: StoredTensor, scales: StoredTensor | None = None, block: tuple[int, int] | None = None) -> View:
        """See a whole tensor."""
        inner = None if scales is None else View.of(scales)
        return View(
            file=stored.file,
            dtype=NAMES[stored.dtype],
            start=stored.start,
            shape=stored.shape,
            strides=dense_strides(stored.shape),
            scales=inner,
            block=block,
        )

    @property
    def num_values(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> Dtype:
        """Its dtype in the file."""
        return DTYPES[self.dtype]


class Target(_Plain):
    """A tensor that is written.

    Attributes:
        name: in the file.
        file: name of the file.
        dtype: of its values, as safetensors names it.
        start: byte of the first value.
        shape: of the tensor.
    """

    name: str
    file: str
    dtype: str
    start: int
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def label(self) -> str:
        """Dtype and shape as digests name them."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Unit(_Plain):
    """One piece of work.

    Attributes:
        kind: `range` finds the extremes of a weight, `round` quantizes it, `copy` writes what stays as it is, `hash` reads a whole file.
        name: of the module, the tensor or the file.
        views: what is read; of a copy one part after the other.
        dtype: in which the model has the weight, as safetensors names it.
        targets: what is written, by the name of the buffer.
        scheme: that a weight gets.
        needs: names of the weights whose ranges must be known.
        extremes: what they are: smallest and largest value of each, its own first.
    """

    kind: Kind
    name: str
    views: tuple[View, ...] = ()
    dtype: str = ""
    targets: dict[str, Target] = {}
    scheme: QuantizationScheme | None = None
    needs: tuple[str, ...] = ()
    extremes: tuple[tuple[float, float], ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes that are read."""
        return sum(view.num_values * view.torch_dtype.itemsize for view in self.views)

    @property
    def place(self) -> tuple[str, int]:
        """Where reading begins, so that a disk is read in its order; a whole file comes behind its tensors."""
        return (self.views[0].file, self.views[0].start) if self.views else (self.name, 1 << 62)


class Done(_Plain):
    """What came of a unit.

    Attributes:
        kind: of the unit.
        name: of the unit.
        digests: of the tensors that were written, as compression.json names them.
        errors: sum of squared errors of a rounded weight, and of its squares.
        extremes: smallest and largest value, where they were looked for.
        is_finite: no NaN and no infinity was copied.
        sha256: of the file.
    """

    kind: Kind
    name: str
    digests: dict[str, str] = {}
    errors: tuple[float, float] | None = None
    extremes: tuple[float, float] | None = None
    is_finite: bool = True
    sha256: str | None = None
