"""The compiled form of the column loop: `rounding.c`, built by the machine's C compiler when it is first needed.

It is optional. Where no compiler is at hand, where building fails, or with COMPRESSOR_KERNEL=off, the same arithmetic runs in torch; the
record of a run says which. The two round sums in another order, so their codes agree but for the few that lie on the edge between two.

What was built is kept in the user's cache folder, under a name that holds the hash of the source and of what the
compiler says of itself and of the processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from compressor.numerics.scheme import QuantizationArgs

_SOURCE = Path(__file__).with_name("rounding.c")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
SCALE_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_LAST = (ctypes.c_float, ctypes.c_float, ctypes.c_int)  # smallest and largest code, dtype of scales
_TILE = 32
MIN_WORK = 1 << 26  # products and sums, some milliseconds: for less, a second thread costs more than it brings
_BUILD_SECONDS = 60


class Columns(Protocol):
    """What the kernel reads of the columns of a grid: [G, R] each, and bool [C, R] of weights that are to be zero."""

    args: QuantizationArgs
    low: float
    high: float
    scale32_GR: Tensor
    zero32_GR: Tensor | None
    group_C: Tensor
    gone_CR: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored scales."""


class RoundingKernel(Protocol):
    """What rounds columns in place of torch: `CompiledKernel` or `TritonKernel`."""

    @property
    def name(self) -> str:
        """As the record of a run names it."""

    @property
    def number_types(self) -> Sequence[str]:
        """The formats that it knows."""

    def round_block(
        self, T_BR: Tensor, E_BR: Tensor, C_BB: Tensor, diag_B: Tensor, columns: Columns, first: int, codes_BR: Tensor, loss_R: Tensor
    ) -> None:
        """Round the columns of one block.

        Args:
            T_BR: [B, R] float32, the weights and what the errors of earlier blocks add to them.
            E_BR: [B, R] float32, the weights; becomes their errors.
            C_BB: [B, B] float32, how the error of column j moves column k, at [k, j].
            diag_B: [B] float32, what an error of each column costs.
            columns: scales and zero points.
            first: place of the first column among those of `columns`.
            codes_BR: [B, R] int8 or, where the kernel knows floats, float8_e4m3fn; filled.
            loss_R: [R] float32, twice the loss of these columns is added.
        """

    def search(self, work_CR: Tensor, C_CC: Tensor, diag_C: Tensor, columns: Columns, multiples_P: Tensor) -> Tensor:
        """Choose for each row and group the multiple of its scale with the least loss.

        Args:
            work_CR: [C, R] float32, the weights, their columns in the order of rounding; not modified.
            C_CC: [C, C] float32, as for `round_block`, of all columns.
            diag_C: [C] float32, as for `round_block`.
            columns: observed scales and zero points.
            multiples_P: [P] float32, in the order in which they win where losses are equal.

        Returns:
            [G, R] float32, the chosen scales.
        """


class CompiledKernel:
    """Rounds the columns of one block, or tries scales on the columns of every group; integers on a CPU."""

    name = "compiled"
    number_types = ("int",)

    def __init__(self, library: ctypes.CDLL) -> None:
        """Take the functions out of a library."""
        self._round_rows, self._search_rows = library.round_rows, library.search_rows
        self._round_rows.argtypes = [*[ctypes.c_void_p] * 10, *[ctypes.c_int64] * 4, *_LAST]
        self._search_rows.argtypes = [*[ctypes.c_void_p] * 9, *[ctypes.c_int64] * 6, *_LAST]
        self._round_rows.restype = self._search_rows.restype = ctypes.c_int

    def round_block(
        self, T_BR: Tensor, E_BR: Tensor, C_BB: Tensor, diag_B: Tensor, columns: Columns, first: int, codes_BR: Tensor, loss_R: Tensor
    ) -> None:
        """Round the columns of one block, in parts of the rows."""
        num_columns, rows = T_BR.shape
        group_B = columns.group_C[first : first + num_columns]
        gone_BR = None if columns.gone_CR is None else columns.gone_CR[first : first + num_columns]
        held = (T_BR, E_BR, codes_BR, loss_R, C_BB, diag_B, columns.scale32_GR, columns.zero32_GR, gone_BR, group_B)
        pointers, last = _pointers(held), (columns.low, columns.high, SCALE_DTYPES[columns.dtype])
        work = rows * num_columns * num_columns // 2
        _in_parts(lambda begin, end: int(self._round_rows(*pointers, num_columns, rows, begin, end, *last)), rows, work)

    def search(self, work_CR: Tensor, C_CC: Tensor, diag_C: Tensor, columns: Columns, multiples_P: Tensor) -> Tensor:
        """Try the scales, in parts of the rows."""
        num_columns, rows = work_CR.shape
        scale_GR = columns.scale32_GR.clone()
        groups = len(scale_GR)
        place_C = torch.argsort(columns.group_C, stable=True)
        counts_G = torch.bincount(columns.group_C, minlength=groups)
        bounds = torch.cat([counts_G.new_zeros(1), counts_G.cumsum(0)])
        C_CC = C_CC.contiguous()
        pointers = _pointers((work_CR, C_CC, diag_C, scale_GR, columns.zero32_GR, columns.gone_CR, multiples_P, place_C, bounds))
        last = (columns.low, columns.high, SCALE_DTYPES[columns.dtype])
        sizes = (groups, num_columns, rows, len(multiples_P))
        work = rows * num_columns * int(counts_G.max()) * len(multiples_P) // 2
        _in_parts(lambda begin, end: int(self._search_rows(*pointers, *sizes, begin, end, *last)), rows, work)
        return scale_GR


def refuse_views(held: Iterable[Tensor | None]) -> None:
    """Refuse what a kernel would read in another order than its pointer tells.

    Args:
        held: arrays of a kernel.

    Raises:
        AssertionError: one is not contiguous.
    """
    if any(tensor is not None and not tensor.is_contiguous() for tensor in held):
        raise AssertionError("the kernel was handed a view")


def _pointers(held: Sequence[Tensor | None]) -> list[int | None]:
    refuse_views(held)
    return [None if tensor is None else tensor.data_ptr() for tensor in held]


def _in_parts(run: Callable[[int, int], int], rows: int, work: int) -> None:
    """Run over all rows, on as many threads as torch has where that pays."""
    threads = torch.get_num_threads() if work > MIN_WORK else 1
    step = max(1, -(-rows // threads // _TILE) * _TILE if threads > 1 else rows)
    parts = [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]
    if len(parts) == 1:
        failed = [run(*parts[0])]
    else:
        with ThreadPoolExecutor(len(parts)) as pool:
            failed = list(pool.map(lambda part: run(*part), parts))
    if any(failed):
        raise MemoryError("no memory for the errors of one block of columns")


@functools.cache
def compiled_kernel() -> RoundingKernel | None:
    """Return the kernel, built if need be.

    Returns:
        None where it cannot be built here.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    try:
        return CompiledKernel(ctypes.CDLL(str(_built(compiler))))
    except (OSError, RuntimeError, subprocess.SubprocessError, AttributeError):
        return None


def _built(compiler: str) -> Path:
    """Return the library, from the cache or fresh; it appears whole or not at all."""
    # What the compiler defines tells its version and what -march=native stands for on this processor.
    defined = _run(compiler, "-march=native", "-dM", "-E", "-x", "c", os.devnull)
    named = b"\0".join([_SOURCE.read_bytes(), " ".join(_FLAGS).encode(), defined])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "compressor-harness"
    library = folder / f"rounding-{hashlib.sha256(named).hexdigest()[:16]}.so"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    held = folder.stat()
    if held.st_uid != os.getuid() or held.st_mode & 0o022:
        raise PermissionError(f"{folder}: others may write to it, and what lies there is run")
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            fresh = Path(work) / library.name
            _run(compiler, *_FLAGS, str(_SOURCE), "-o", str(fresh), "-lm")
            fresh.replace(library)
    return library


def _run(*command: str) -> bytes:
    return subprocess.run(command, capture_output=True, check=True, timeout=_BUILD_SECONDS).stdout
