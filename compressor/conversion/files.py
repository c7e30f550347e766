"""Reading parts of tensors and writing them to their places, without mapping a file: memory is what is asked for, and no more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from compressor.conversion.units import Target, View, dense_strides
from compressor.errors import ModelError


class Files:
    """The files of a folder, each opened once.

    Attributes:
        folder: that holds them.
    """

    def __init__(self, folder: Path, *, writable: bool = False) -> None:
        """Open nothing yet."""
        self.folder = folder
        self._flags = os.O_RDWR if writable else os.O_RDONLY
        self._open: dict[str, int] = {}
        self._held = ExitStack()

    def __enter__(self) -> Self:
        """Return the files."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close what has been opened."""
        self._held.close()

    def descriptor(self, file: str) -> int:
        """Open a file.

        Args:
            file: its name.

        Returns:
            The descriptor.

        Raises:
            OSError: it cannot be opened.
        """
        if file not in self._open:
            self._open[file] = os.open(self.folder / file, self._flags)
            self._held.callback(os.close, self._open[file])
        return self._open[file]

    def read_bytes(self, file: str, start: int, count: int) -> Tensor:
        """Read a stretch of a file.

        Args:
            file: its name.
            start: first byte.
            count: how many.

        Returns:
            uint8 [count].

        Raises:
            ModelError: the file ends before that.
        """
        found = torch.empty(count, dtype=torch.uint8)
        view, done = found.numpy().data, 0
        while done < count:
            read = os.preadv(self.descriptor(file), [view[done:]], start + done)
            if not read:
                raise ModelError(f"{self.folder / file}: ends at byte {start + done:,}, within a tensor; fetch it again")
            done += read
        return found

    def write(self, target: Target, skipped: int, values: Tensor) -> None:
        """Write a stretch of a tensor.

        Args:
            target: the tensor.
            skipped: bytes of it that lie before.
            values: contiguous uint8, on the CPU.
        """
        view, done = values.numpy().data, 0
        while done < len(view):
            done += os.pwrite(self.descriptor(target.file), view[done:], target.start + skipped + done)

    def rows(self, view: View, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Read rows of a matrix, as the model has them.

        Args:
            view: of the matrix.
            first: number of the first row.
            last: number of the row behind the last one.
            dtype: in which the model has them.

        Returns:
            [last - first, C], contiguous.
        """
        size, columns = view.torch_dtype.itemsize, view.shape[1]
        span = (last - first - 1) * view.strides[0] + (columns - 1) * view.strides[1] + 1
        raw = self.read_bytes(view.file, view.start + first * view.strides[0] * size, span * size)
        found = raw.view(view.torch_dtype).as_strided((last - first, columns), view.strides)
        if view.scales is not None:
            found = self._dequantized(found, view, first)
        return found.to(dtype).contiguous()

    def _dequantized(self, codes_RC: Tensor, view: View, first: int) -> Tensor:
        """As transformers does it: both as float32, the product rounded once."""
        assert view.scales is not None and view.block is not None
        height, width = view.block
        last = first + len(codes_RC)
        scale_GG = self.rows(view.scales, first // height, -(-last // height), torch.float32)
        scale_RC = scale_GG.repeat_interleave(height, 0)[first % height :][: len(codes_RC)].repeat_interleave(width, 1)
        return codes_RC.float().mul_(scale_RC[:, : view.shape[1]])

    def flat(self, view: View, at_most: int) -> Iterator[Tensor]:
        """Read a whole tensor in the order of its values, part by part.

        Args:
            view: of the tensor.
            at_most: values of one part, where rows allow it.

        Yields:
            Values [n] in the dtype of the file; of an fp8 weight in float32.
        """
        if view.scales is None and view.strides == dense_strides(view.shape):
            size = view.torch_dtype.itemsize
            for first in range(0, view.num_values, at_most):
                count = min(at_most, view.num_values - first)
                yield self.read_bytes(view.file, view.start + first * size, count * size).view(view.torch_dtype)
            return
        matrix = view if len(view.shape) == 2 else view.model_copy(update={"shape": (*view.shape, 1), "strides": (*view.strides, 1)})
        kept = view.torch_dtype if view.scales is None else torch.float32
        rows = max(1, at_most // matrix.shape[1])
        for first in range(0, matrix.shape[0], rows):
            yield self.rows(matrix, first, min(first + rows, matrix.shape[0]), kept).reshape(-1)
