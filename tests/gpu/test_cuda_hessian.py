"""Inputs in bfloat16 are multiplied as they are on a GPU; their sums are those of float32."""

from __future__ import annotations

import pytest
import torch

from compressor.algorithms.hessian import Hessian

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is at hand")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hessian_and_shift_are_those_of_float64(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(4, 300, 400, generator=g) + 0.5).to(dtype)
    base = (x.float() * (1 + 0.02 * torch.randn(x.shape, generator=g))).to(dtype)
    hessian = Hessian(400, "cuda")
    for one, other in zip(x, base, strict=True):
        hessian.add(one.cuda())
        hessian.add_shift(other.cuda(), one.cuda())
    flat, wide = x.reshape(-1, 400).double(), base.reshape(-1, 400).double()
    shift, matrix = hessian.shift(), hessian.matrix("m")
    assert shift is not None
    for found, exact in ((matrix, flat.t() @ flat), (shift, (wide - flat).t() @ flat)):
        want = 2 * exact / len(flat)
        assert float((found.cpu().double() - want).abs().max()) < 2e-5 * float(want.abs().max())
