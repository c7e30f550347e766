"""The column loop for CUDA, in Triton: `rounding.c` for a GPU, with float formats too; see `babai` for formulas.

A program takes a tile of rows through all columns of one block and keeps their errors in registers, so that a block of columns is one
launch where torch has ten for every column; the scales of all groups are searched in one. Rows are independent and sums lie in one order,
so equal runs give equal bits. Products are not fused with sums: values are to be rounded as a loader rounds them.

This module needs triton; `babai` imports it where it is at hand. In kernels the names of arrays stand for pointers to them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from compressor.algorithms.compiled import SCALE_DTYPES, Columns, refuse_views
from compressor.numerics.formats import FLOAT_LAYOUTS

_TILE = 8  # rows of one program
_WARP_ELEMENTS = 1024  # errors of one warp: 32 registers of each thread; with 64 the compiler begins to spill
_MOST_WARPS = 8
# What the first launch may raise, which takes the machine's C compiler and a GPU that Triton knows.
CANNOT_LAUNCH = (OSError, RuntimeError, subprocess.SubprocessError, TritonError)


@triton.jit
def _stored(value: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Round half to even to the dtype in which scales are stored."""
    if DTYPE == 1:  # bfloat16 by its bits, since Triton's interpreter would cut them off
        bits = value.to(tl.uint32, bitcast=True)
        value = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    if DTYPE == 2:
        value = value.to(tl.float16).to(tl.float32)
    return value


@triton.jit
def _snapped(x: tl.tensor, SMALLEST: tl.constexpr, STEP: tl.constexpr) -> tl.tensor:
    """Round half to even to the nearest code: next to 1.5 * 2^23 steps float32 has no bits for parts of a step."""
    shift = 12582912.0 * STEP
    if SMALLEST > 0:  # of floats STEP is that from one to two; it grows with the power of two, from the smallest normal on
        power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        shift = shift * tl.maximum(power, SMALLEST)
    return (x + shift) - shift


@triton.jit
def _byte(x: tl.tensor, code: tl.tensor, SMALLEST: tl.constexpr) -> tl.tensor:
    """The code as it is stored, int8 or the bits of fp8 e4m3 with the sign of what was rounded."""
    byte = code.to(tl.int32)
    if SMALLEST > 0:
        bits = code.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        byte = tl.where(bits >= 0x3C800000, (bits >> 20) - 960, (tl.abs(code) * 512.0).to(tl.int32))  # below 2^-6 multiples of 2^-9
        byte = byte | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return byte.to(tl.int8)


@triton.jit
def _on_grid(
    x: tl.tensor, s: tl.tensor, z: tl.tensor, gone: tl.tensor, inside: tl.tensor, LOW: tl.constexpr, HIGH: tl.constexpr
) -> tl.tensor:
    """What is rounded to a code; a weight that is to become zero lies on its code already."""
    on_grid = tl.minimum(tl.maximum(tl.div_rn(x, s) + z, LOW), HIGH)
    if gone is not None:
        on_grid = tl.where(tl.load(gone, mask=inside, other=0) != 0, z, on_grid)
    return on_grid


@triton.jit(do_not_specialize=["columns", "rows"], do_not_specialize_on_alignment=["T", "E", "codes", "loss", "diag", "gone", "group"])
def _round_rows(
    T: tl.tensor, E: tl.tensor, codes: tl.tensor, loss: tl.tensor, C: tl.tensor, diag: tl.tensor, scale: tl.tensor, zero: tl.tensor,
    gone: tl.tensor, group: tl.tensor, columns: tl.tensor, rows: tl.tensor, LOW: tl.constexpr, HIGH: tl.constexpr,
    SMALLEST: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr, B: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """One block of columns, for one tile of rows; `group` tells the row of `scale` and `zero`."""
    r, j = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, B)
    inside = r < rows
    E_BT, total, z = tl.zeros((B, TILE), tl.float32), tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    for k in range(columns):
        place = tl.cast(k, tl.int64) * rows + r
        own = tl.load(group + k) * rows + r
        shares = tl.load(C + k * columns + j, mask=j < k, other=0.0)
        s = tl.load(scale + own, mask=inside, other=1.0)
        if zero is not None:
            z = tl.load(zero + own, mask=inside, other=0.0)
        t, w = tl.load(T + place, mask=inside, other=0.0), tl.load(E + place, mask=inside, other=0.0)
        x = t + tl.sum(shares[:, None] * E_BT, 0)
        on_grid = _on_grid(x, s, z, None if gone is None else gone + place, inside, LOW, HIGH)
        code = _snapped(on_grid, SMALLEST, STEP)
        tl.store(codes + place, _byte(on_grid, code, SMALLEST), mask=inside)
        value = _stored((code - z) * s, DTYPE)
        miss = (x - value) * tl.load(diag + k)
        total += miss * miss
        E_BT = tl.where(j[:, None] == k, (w - value)[None, :], E_BT)
    tl.debug_barrier()  # all of the weights are read before errors take their place
    places = j.to(tl.int64)[:, None] * rows + r[None, :]
    tl.store(E + places, E_BT, mask=(j < columns)[:, None] & inside[None, :])
    tl.store(loss + r, tl.load(loss + r, mask=inside, other=0.0) + total, mask=inside)


@triton.jit(do_not_specialize=["columns", "rows", "candidates"])
def _search_rows(
    W: tl.tensor, C: tl.tensor, diag: tl.tensor, scale: tl.tensor, zero: tl.tensor, gone: tl.tensor, multiples: tl.tensor,
    places: tl.tensor, counts: tl.tensor, candidates: tl.tensor, columns: tl.tensor, rows: tl.tensor, LOW: tl.constexpr,
    HIGH: tl.constexpr, SMALLEST: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr, B: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """One group, of the `columns` at most at `places`, for one tile of rows: `scale` becomes its best multiple."""
    r, j, group = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, B), tl.program_id(1).to(tl.int64)
    inside, count = r < rows, tl.load(counts + group)
    observed, z = tl.load(scale + group * rows + r, mask=inside, other=1.0), tl.zeros((TILE,), tl.float32)
    if zero is not None:
        z = tl.load(zero + group * rows + r, mask=inside, other=0.0)
    best, least = _stored(tl.load(multiples) * observed, DTYPE), tl.full((TILE,), float("inf"), tl.float32)
    for p in range(candidates):
        s = _stored(tl.load(multiples + p) * observed, DTYPE)
        E_BT, total = tl.zeros((B, TILE), tl.float32), tl.zeros((TILE,), tl.float32)
        for k in range(count):
            column = tl.load(places + group * columns + k)
            place = column * rows + r
            shares = tl.load(C + (group * columns + k) * columns + j, mask=j < k, other=0.0)
            w = tl.load(W + place, mask=inside, other=0.0)
            x = w + tl.sum(shares[:, None] * E_BT, 0)
            on_grid = _on_grid(x, s, z, None if gone is None else gone + place, inside, LOW, HIGH)
            value = _stored((_snapped(on_grid, SMALLEST, STEP) - z) * s, DTYPE)
            miss = (x - value) * tl.load(diag + column)
            total += miss * miss
            E_BT = tl.where(j[:, None] == k, (w - value)[None, :], E_BT)
        better = (s > 0) & (total < least)  # a candidate that rounds to zero is no scale
        best, least = tl.where(better, s, best), tl.where(better, total, least)
    tl.store(scale + group * rows + r, best, mask=inside)


@triton.jit
def _nothing() -> None:
    pass


class TritonKernel:
    """Rounds the columns of one block, or tries scales on the columns of every group; all formats, on CUDA."""

    name = "triton"
    number_types = ("int", "float")

    def __init__(self) -> None:
        """Launch once, so that a machine on which it cannot says so here, with an error of CANNOT_LAUNCH."""
        _nothing[1,]()

    def round_block(
        self, T_BR: Tensor, E_BR: Tensor, C_BB: Tensor, diag_B: Tensor, columns: Columns, first: int, codes_BR: Tensor, loss_R: Tensor
    ) -> None:
        """Round the columns of one block, a program to a tile of rows."""
        num_columns, rows = T_BR.shape
        group_B = columns.group_C[first : first + num_columns]
        gone_BR = None if columns.gone_CR is None else columns.gone_CR[first : first + num_columns].view(torch.uint8)
        held = (T_BR, E_BR, codes_BR.view(torch.int8), loss_R, C_BB, diag_B, columns.scale32_GR, columns.zero32_GR, gone_BR, group_B)
        _launch(_round_rows, (), held, (num_columns, rows), columns)

    def search(self, work_CR: Tensor, C_CC: Tensor, diag_C: Tensor, columns: Columns, multiples_P: Tensor) -> Tensor:
        """Try the scales, a program to a group and a tile of rows."""
        scale_GR = columns.scale32_GR.clone()
        groups, rows = scale_GR.shape
        place_GS, count_G = _places(columns.group_C, groups)
        part_GSS = C_CC[place_GS[:, :, None], place_GS[:, None, :]].contiguous()
        gone_CR = None if columns.gone_CR is None else columns.gone_CR.view(torch.uint8)
        held = (work_CR, part_GSS, diag_C, scale_GR, columns.zero32_GR, gone_CR, multiples_P, place_GS, count_G)
        _launch(_search_rows, (groups,), held, (len(multiples_P), place_GS.shape[1], rows), columns)
        return scale_GR


def _launch(kernel: Any, groups: tuple[int, ...], held: Sequence[Tensor | None], sizes: tuple[int, ...], columns: Columns) -> None:
    """Run a kernel over tiles of rows, on the device of its arrays; the last two sizes are columns and rows."""
    refuse_views(held)
    shape = _shape(sizes[-2])
    with torch.cuda.device_of(held[0]):
        kernel[triton.cdiv(sizes[-1], shape["TILE"]), *groups](*held, *sizes, **_constants(columns), **shape)


def _places(group_C: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The columns of each group, [G, S] for S of the widest, filled up with column 0; and how many each group has."""
    count_G = torch.bincount(group_C, minlength=groups)
    order_C = torch.argsort(group_C, stable=True)
    sorted_C = group_C[order_C]
    within_C = torch.arange(len(group_C), device=group_C.device) - (count_G.cumsum(0) - count_G)[sorted_C]
    place_GS = group_C.new_zeros(groups, int(count_G.max()))
    place_GS[sorted_C, within_C] = order_C
    return place_GS, count_G


def _shape(columns: int) -> dict[str, Any]:
    """Tile and warps for so many columns: what the errors of a tile take in registers does not grow past what a program has."""
    padded = triton.next_power_of_2(columns)
    tile = min(_TILE, max(1, _MOST_WARPS * _WARP_ELEMENTS // padded))
    warps = min(_MOST_WARPS, max(1, padded * tile // _WARP_ELEMENTS))
    return {"B": padded, "TILE": tile, "num_warps": warps, "enable_fp_fusion": False}


def _constants(columns: Columns) -> dict[str, Any]:
    smallest, step = 0.0, 1.0
    if columns.args.type == "float":
        exponent, _, fraction_bits = FLOAT_LAYOUTS[columns.args.num_bits]
        smallest, step = 2.0**exponent, 2.0**-fraction_bits
    return {"LOW": columns.low, "HIGH": columns.high, "SMALLEST": smallest, "STEP": step, "DTYPE": SCALE_DTYPES[columns.dtype]}
