"""The compiled column loop gives what the loop in torch gives; where it cannot be built, torch runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compressor.algorithms import babai, compiled
from compressor.algorithms.babai import Factor, Grid, GridColumns, rounding_kernel, search_scales, solve_r_form
from compressor.algorithms.compiled import RoundingKernel
from compressor.errors import UserInputError
from compressor.numerics import QuantizationArgs, weight_qparams

SIZE = 32


@pytest.fixture
def kernel() -> RoundingKernel:
    found = rounding_kernel("cpu")
    if found is None:
        pytest.skip("no C compiler is at hand, or COMPRESSOR_KERNEL=off")
    return found


def problem(rows: int, columns: int, dtype: torch.dtype, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(400, 12, generator=g) @ torch.randn(12, columns, generator=g) + torch.randn(400, columns, generator=g)
    hessian = 2 * x.t() @ x / len(x)
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
    return (scale * torch.randn(rows, columns, generator=g)).to(dtype), hessian


def both(monkeypatch: pytest.MonkeyPatch, rows: int, args: QuantizationArgs, dtype: torch.dtype, scale: float = 1.0) -> list[tuple]:
    """Searched scales, codes, losses and errors, by the kernel and by torch."""
    weight, hessian = problem(rows, 96, dtype, scale)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    factor, observed = Factor.of(hessian[order][:, order], "m"), weight_qparams(weight, args)
    grid = Grid(observed.scale, observed.zero_point, torch.arange(96) // SIZE, args)
    results = []
    for off in (False, True):
        if off:
            monkeypatch.setattr(babai, "rounding_kernel", lambda device: None)
        work = weight.t()[order].float().contiguous()
        scales = search_scales(work, factor, grid, order)
        codes, loss = solve_r_form(work, factor, GridColumns(grid, order), 40)
        results.append((scales, codes, loss, work))
    return results


@pytest.mark.parametrize("rows", [1, 31, 64, 77])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_losses_errors_and_scales_agree(
    kernel: RoundingKernel, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bits: int, symmetric: bool, rows: int
) -> None:
    (scales, codes, loss, errors), plain = both(
        monkeypatch, rows, QuantizationArgs(num_bits=bits, group_size=SIZE, symmetric=symmetric), dtype
    )
    assert (scales == plain[0]).float().mean() > 0.98
    same_R = (codes == plain[1]).all(0)  # sums in another order move a value over an edge now and then, and with it its row
    assert same_R.float().mean() > 0.9
    assert torch.allclose(loss[same_R], plain[2][same_R], rtol=1e-4)
    assert torch.allclose(errors[:, same_R], plain[3][:, same_R], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-7, 1e-5, 3e3])
def test_values_are_rounded_to_the_dtype_of_the_scales(
    kernel: RoundingKernel, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, scale: float
) -> None:
    """With its subnormals: weights of 1e-7 have scales of one or two steps of float16."""
    kernels, plain = both(monkeypatch, 64, QuantizationArgs(num_bits=4, group_size=SIZE), dtype, scale)
    same_R = (kernels[1] == plain[1]).all(0)
    assert same_R.float().mean() > 0.9
    assert torch.equal(kernels[3][:, same_R], plain[3][:, same_R])


def test_threads_change_no_bit(kernel: RoundingKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    args = QuantizationArgs(num_bits=4, group_size=SIZE)
    monkeypatch.setattr(compiled, "MIN_WORK", 0)
    results = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        with pytest.MonkeyPatch.context() as inner:
            results.append(both(inner, 300, args, torch.float32)[0])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_floats_wide_scales_and_other_devices_stay_with_torch() -> None:
    group, int4 = torch.zeros(4, dtype=torch.long), QuantizationArgs(num_bits=4, group_size=SIZE)
    fp8 = QuantizationArgs(num_bits=8, type="float", strategy="channel")
    assert babai.kernel_for(Grid(torch.ones(2, 1), None, group, fp8), torch.device("cpu")) is None
    assert babai.kernel_for(Grid(torch.ones(2, 1).double(), None, group, int4), torch.device("cpu")) is None
    assert babai.kernel_for(Grid(torch.ones(2, 1), None, group, int4), torch.device("meta")) is None
    assert babai.kernel_for(Grid(torch.ones(2, 1), None, group, int4), torch.device("cpu")) is rounding_kernel("cpu")


def test_a_view_is_refused(kernel: RoundingKernel) -> None:
    args = QuantizationArgs(num_bits=4, group_size=SIZE)
    grid = Grid(torch.ones(8, 1), None, torch.zeros(SIZE, dtype=torch.long), args)
    columns = GridColumns(grid, torch.arange(SIZE))
    with pytest.raises(AssertionError, match="view"):
        kernel.search(torch.ones(8, SIZE).t(), torch.eye(SIZE), torch.ones(SIZE), columns, torch.ones(3))


ASK = "from compressor.algorithms.babai import rounding_kernel; print(rounding_kernel('cpu') is None)"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"COMPRESSOR_KERNEL": "off"}, id="switched off"),
        pytest.param({"PATH": ""}, id="no compiler"),
        pytest.param({"XDG_CACHE_HOME": "/dev/null/none"}, id="no cache folder"),
    ],
)
def test_what_cannot_be_built_runs_in_torch(change: dict[str, str], repo_root: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", ASK], env={**os.environ, **change}, capture_output=True, text=True, cwd=repo_root)
    assert (ran.returncode, ran.stdout) == (0, "True\n"), ran.stderr


def test_a_switch_that_means_nothing_is_no_silent_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESSOR_KERNEL", "OFF")
    with pytest.raises(UserInputError, match="COMPRESSOR_KERNEL: 'OFF' means nothing; choose from on, off"):
        rounding_kernel("cpu")


def test_a_cache_that_others_may_write_to_is_not_trusted(kernel: RoundingKernel, tmp_path: Path, repo_root: Path) -> None:
    folder = tmp_path / "compressor-harness"
    folder.mkdir()
    folder.chmod(0o777)
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", ASK], env=env, capture_output=True, text=True, cwd=repo_root)
    assert (ran.stdout, list(folder.iterdir())) == ("True\n", []), ran.stderr


@pytest.mark.nightly
def test_the_library_is_built_once_and_appears_whole(kernel: RoundingKernel, tmp_path: Path, repo_root: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    written = []
    for _ in range(2):
        ran = subprocess.run([sys.executable, "-c", ASK], env=env, capture_output=True, text=True, cwd=repo_root)
        assert ran.stdout == "False\n", ran.stderr
        written.append([(path.name, path.stat().st_mtime_ns) for path in sorted((tmp_path / "compressor-harness").iterdir())])
    assert written[0] == written[1]
    assert [name.startswith("rounding-") and name.endswith(".so") for name, _ in written[0]] == [True]
