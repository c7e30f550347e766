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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

SWITCH = "COMPRESSOR_KERNEL"
_SOURCE = Path(__file__).with_name("rounding.c")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
SCALE_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_TILE = 32
_MIN_WORK = 1 << 21  # multiplications below which a second thread costs more than it brings
_BUILD_SECONDS = 60


class Columns(Protocol):
    """What the kernel reads of the columns of a grid, [G, R] each."""

    low: float
    high: float
    scale32_GR: Tensor
    zero32_GR: Tensor | None
    group_C: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored scales."""


class RoundingKernel:
    """Rounds the columns of one block, or tries scales on the columns of one group; integers on a CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Take the function out of a library."""
        self._round_rows = library.round_rows
        self._round_rows.restype = ctypes.c_int
        self._round_rows.argtypes = [*[ctypes.c_void_p] * 9, *[ctypes.c_int64] * 5, *[ctypes.c_float] * 2, ctypes.c_int]

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
            codes_BR: [B, R] int8, filled.
            loss_R: [R] float32, twice the loss of these columns is added.
        """
        self._call(T_BR, E_BR, C_BB, diag_B, columns, columns.group_C[first : first + len(T_BR)], 1, codes_BR, loss_R)

    def losses(self, work_SR: Tensor, C_SS: Tensor, diag_S: Tensor, columns: Columns) -> Tensor:
        """Round the columns of one group with every one of some scales.

        Args:
            work_SR: [S, R] float32, the weights; not modified.
            C_SS: [S, S] float32, as for `round_block`.
            diag_S: [S] float32, as for `round_block`.
            columns: the candidates, [P, R], and their zero point, the same for all.

        Returns:
            [P, R] float32, the loss with each.
        """
        candidates = len(columns.scale32_GR)
        loss_PR = work_SR.new_zeros(candidates, work_SR.shape[1])
        self._call(work_SR, work_SR, C_SS, diag_S, columns, columns.group_C, candidates, None, loss_PR)
        return loss_PR.mul_(0.5)

    def _call(
        self,
        T_BR: Tensor,
        E_BR: Tensor,
        C_BB: Tensor,
        diag_B: Tensor,
        columns: Columns,
        group_B: Tensor,
        candidates: int,
        codes_BR: Tensor | None,
        loss_R: Tensor,
    ) -> None:
        num_columns, rows = T_BR.shape
        held = (T_BR, E_BR, codes_BR, loss_R, C_BB, diag_B, columns.scale32_GR, columns.zero32_GR, group_B)
        for tensor in held:
            if tensor is not None and not tensor.is_contiguous():
                raise AssertionError("the kernel was handed a view")
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in held]

        def run(begin: int, end: int) -> int:
            bounds = (num_columns, rows, begin, end, candidates, columns.low, columns.high, SCALE_DTYPES[columns.dtype])
            return int(self._round_rows(*pointers, *bounds))

        threads = torch.get_num_threads() if rows * num_columns * num_columns * candidates > _MIN_WORK else 1
        step = -(-rows // threads // _TILE) * _TILE if threads > 1 else rows
        parts = [(begin, min(begin + step, rows)) for begin in range(0, rows, max(step, 1))]
        if len(parts) == 1:
            failed = [run(*parts[0])]
        else:
            with ThreadPoolExecutor(len(parts)) as pool:
                failed = list(pool.map(lambda part: run(*part), parts))
        if any(failed):
            raise MemoryError("no memory for the errors of one block of columns")


@functools.cache
def rounding_kernel() -> RoundingKernel | None:
    """Return the kernel, built if need be.

    Returns:
        None where COMPRESSOR_KERNEL=off, or where it cannot be built here.
    """
    compiler = None if os.environ.get(SWITCH) == "off" else shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    try:
        return RoundingKernel(ctypes.CDLL(str(_built(compiler))))
    except (OSError, RuntimeError, subprocess.SubprocessError, AttributeError):
        return None


def _built(compiler: str) -> Path:
    """Return the library, from the cache or fresh; it appears whole or not at all."""
    # What the compiler defines tells its version and what -march=native stands for on this processor.
    defined = _run(compiler, "-march=native", "-dM", "-E", "-x", "c", os.devnull)
    named = b"\0".join([_SOURCE.read_bytes(), " ".join(_FLAGS).encode(), defined])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "compressor-harness"
    library = folder / f"rounding-{hashlib.sha256(named).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            fresh = Path(work) / library.name
            _run(compiler, *_FLAGS, str(_SOURCE), "-o", str(fresh), "-lm")
            fresh.replace(library)
    return library


def _run(*command: str) -> bytes:
    return subprocess.run(command, capture_output=True, check=True, timeout=_BUILD_SECONDS).stdout
