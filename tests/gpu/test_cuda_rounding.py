"""The Triton form of the column loop gives what the loop in torch gives, on a GPU, and the record of a run names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor import oneshot
from compressor.algorithms import babai
from compressor.algorithms.babai import SWITCH, Factor, Grid, GridColumns, can_search, rounding_kernel, search_scales, solve_r_form
from compressor.algorithms.compiled import RoundingKernel
from compressor.numerics import QuantizationArgs, weight_qparams
from compressor.numerics.formats import snap_

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is at hand")]

COLUMNS = 192
CUDA = torch.device("cuda")
FORMATS: dict[str, dict[str, Any]] = {
    "int4": {"num_bits": 4, "group_size": 64},
    "int3, odd groups with zero points": {"num_bits": 3, "group_size": 24, "symmetric": False},
    "int8, one group": {"num_bits": 8, "strategy": "channel"},
    "fp8": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
}


@pytest.fixture
def kernel() -> RoundingKernel:
    pytest.importorskip("triton", reason="this torch brings no triton")
    found = rounding_kernel(CUDA)
    assert found is not None and found.name == "triton", "triton is here, and cannot launch a kernel"
    return found


def solved(args: QuantizationArgs, dtype: torch.dtype, rows: int, block: int, has_gone: bool) -> tuple[torch.Tensor, ...]:
    """Searched scales, codes, losses and errors of one problem, its columns in a drawn order."""
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(800, 24, generator=g) @ torch.randn(24, COLUMNS, generator=g) + torch.randn(800, COLUMNS, generator=g)
    weight, order = torch.randn(rows, COLUMNS, generator=g).to(dtype), torch.randperm(COLUMNS, generator=g)
    gone = torch.rand(rows, COLUMNS, generator=g) < 0.3 if has_gone else None
    hessian = (2 * x.t() @ x / len(x) + 0.02 * torch.eye(COLUMNS))[order][:, order]
    observed = weight_qparams(weight, args)
    group = torch.arange(COLUMNS) // (COLUMNS // observed.scale.shape[1])
    scale, zero, group, gone, order, work = (
        None if one is None else one.to(CUDA)
        for one in (observed.scale, observed.zero_point, group, gone, order, weight.t()[order].float())
    )
    factor, grid = Factor.of(hessian.to(CUDA), "m"), Grid(scale, zero, group, args, gone)
    work = work.contiguous()
    found = search_scales(work, factor, grid, order) if can_search(args) else scale
    codes, loss = solve_r_form(work, factor, GridColumns(grid, order), block)
    return found, codes.float(), loss, work


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("dtype", "rows", "block", "has_gone"), [
    (torch.float32, 33, 128, False), (torch.bfloat16, 77, 50, True), (torch.float16, 1, 512, False),
])  # fmt: skip
def test_it_is_the_loop_in_torch(
    kernel: RoundingKernel, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, rows: int, block: int, has_gone: bool
) -> None:
    args = QuantizationArgs(**FORMATS[name])
    found, again = solved(args, dtype, rows, block, has_gone), solved(args, dtype, rows, block, has_gone)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    monkeypatch.setattr(babai, "rounding_kernel", lambda device: None)
    plain = solved(args, dtype, rows, block, has_gone)
    assert (found[0] == plain[0]).float().mean() > 0.98
    # Sums in another order move a value over an edge now and then, and with it its row.
    same_R = (found[1] == plain[1]).all(0) & (found[0] == plain[0]).all(1)
    assert same_R.float().mean() > 0.9
    assert torch.allclose(found[2][same_R], plain[2][same_R], rtol=1e-3)
    assert torch.equal(found[3][:, same_R], plain[3][:, same_R])


@pytest.mark.parametrize(("kind", "bits", "group_size"), [("float", 4, 32), ("float", 8, 32), ("int", 8, 32), ("int", 2, 32)])
def test_each_value_is_rounded_as_numerics_rounds_it(kernel: RoundingKernel, kind: str, bits: int, group_size: int) -> None:
    """All codes of fp8, the middles between them and their neighbours on both sides: ties, subnormals, what lies past the ends."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].unique()
    ties = torch.cat([(codes[1:] + codes[:-1]) / 2, torch.arange(-300, 300) + 0.5])
    far = torch.tensor(1e9)
    x = torch.cat([codes, ties, torch.nextafter(ties, far), torch.nextafter(ties, -far), torch.tensor([1e-30, -1e-30, 1e30, -1e30])]).to(
        CUDA
    )
    args = QuantizationArgs(num_bits=bits, type=kind, group_size=group_size)  # type: ignore[arg-type]
    only = torch.zeros(1, dtype=torch.long, device=CUDA)
    columns = GridColumns(Grid(torch.ones(len(x), 1, device=CUDA), None, only, args), only)
    found, errors, one = torch.empty(1, len(x), dtype=args.storage_dtype, device=CUDA), x[None].clone(), torch.ones(1, 1, device=CUDA)
    kernel.round_block(x[None].clone(), errors, one, one[0], columns, 0, found, torch.zeros(len(x), device=CUDA))
    want = snap_(x.clone(), args.type, bits)
    assert torch.equal(found[0].float(), want)
    assert torch.equal(errors[0], x - want)


def test_the_record_names_it(
    kernel: RoundingKernel, monkeypatch: pytest.MonkeyPatch, reference_model: Path, device: torch.device, tmp_path: Path
) -> None:
    recipe = {"quant_stage": {"quant_modifiers": {"GPTQModifier": {"scheme": "W4A16", "ignore": ["lm_head"]}}}}
    for name, switch in (("triton", "on"), ("torch", "off")):
        monkeypatch.setenv(SWITCH, switch)
        oneshot(
            reference_model,
            recipe=recipe,
            device=str(device),
            dataset=reference_model / "calibration.safetensors",
            num_calibration_samples=8,
            output_dir=tmp_path / name,
        )
        assert json.loads((tmp_path / name / "compression.json").read_text())["kernel"] == name
