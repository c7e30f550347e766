"""Both forms of GPTQ against a float64 oracle that shares no code with them, and the properties that any solver must have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compressor.algorithms.gptq import ActOrder, GPTQSolution, Grid, Solver, activation_order, quantize_gptq, solve_gptq
from compressor.algorithms.rtn import round_to_nearest
from compressor.errors import NumericsError
from compressor.numerics import PRESETS, QParams, QuantizationArgs, calculate_qparams, dequantize

SOLVERS: tuple[Solver, ...] = ("r_form", "reference")
FORMATS = {
    "int4 group": QuantizationArgs(num_bits=4, group_size=16),
    "int4 group asymmetric": QuantizationArgs(num_bits=4, group_size=16, symmetric=False),
    "int3 channel": QuantizationArgs(num_bits=3, group_size=-1),
    "int8 channel": PRESETS["W8A8"].weights,
    "fp8 channel": PRESETS["FP8_DYNAMIC"].weights,
}


def problem(rows: int = 24, columns: int = 48, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight and the Hessian of correlated, unevenly scaled inputs."""
    g = torch.Generator().manual_seed(seed)
    x = (torch.rand(6 * columns, 8, generator=g) - 0.5) @ (torch.rand(8, columns, generator=g) - 0.5)
    x += 0.3 * (torch.rand(6 * columns, columns, generator=g) - 0.5)
    x *= 0.2 + 3 * torch.rand(columns, generator=g) ** 3
    return torch.rand(rows, columns, generator=g) - 0.5, 2 * x.t() @ x / len(x)


def grid_of(weight: Tensor, args: QuantizationArgs) -> tuple[Grid, QParams]:
    size = args.group_size if args.strategy == "group" and args.group_size else weight.shape[1]
    groups = weight.unflatten(1, (-1, size))
    qparams = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    return Grid(qparams.scale, qparams.zero_point, torch.arange(weight.shape[1]) // size, args), qparams


def output_loss(weight: Tensor, values: Tensor, hessian: Tensor) -> float:
    error = (weight - values).double()
    return 0.5 * float(((error @ hessian.double()) * error).sum())


def solve(weight: Tensor, hessian: Tensor, args: QuantizationArgs, **settings: object) -> tuple[GPTQSolution, Tensor]:
    grid, qparams = grid_of(weight, args)
    solution = solve_gptq(weight, hessian, grid, **settings)  # type: ignore[arg-type]
    return solution, dequantize(solution.codes_RC, qparams, args).float()


def surgeon(weight: Tensor, hessian: Tensor, args: QuantizationArgs, damp_frac: float = 0.01) -> Tensor:
    """Dense optimal brain surgeon in float64: one column at a time, the inverse downdated after each (Hassibi and Stork 1993)."""
    grid, _ = grid_of(weight, args)
    W, H = weight.double().clone(), hessian.double().clone()
    H.diagonal().add_(damp_frac * H.diagonal().mean())
    inverse = torch.linalg.inv(H)
    low, high = args.code_range
    codes = torch.empty_like(W)
    for k in range(W.shape[1]):
        scale = grid.scale_RG[:, grid.group_C[k]].double()
        zero = torch.zeros_like(scale) if grid.zero_RG is None else grid.zero_RG[:, grid.group_C[k]].double()
        scaled = (W[:, k] / scale + zero).clamp(low, high)
        codes[:, k] = scaled.to(torch.float8_e4m3fn).double() if args.type == "float" else scaled.round()
        error = (W[:, k] - (codes[:, k] - zero) * scale) / inverse[k, k]
        W -= error[:, None] * inverse[k]
        inverse -= torch.outer(inverse[:, k], inverse[k]) / inverse[k, k]
        inverse[k, k] = 1.0  # the column is done; keep the downdate finite
    return codes


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", FORMATS)
def test_codes_and_loss_follow_the_float64_surgeon(solver: Solver, name: str) -> None:
    args = FORMATS[name]
    weight, hessian = problem()
    solution, values = solve(weight, hessian, args, solver=solver)
    expected = surgeon(weight, hessian, args)
    assert (solution.codes_RC.double() == expected).double().mean() > 0.995
    grid, qparams = grid_of(weight, args)
    del grid
    best = dequantize(expected.to(args.storage_dtype), qparams, args).float()
    assert output_loss(weight, values, hessian) <= 1.01 * output_loss(weight, best, hessian)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", FORMATS)
def test_never_worse_than_rounding(solver: Solver, name: str) -> None:
    args = FORMATS[name]
    weight, hessian = problem(seed=3)
    _, values = solve(weight, hessian, args, solver=solver)
    _, qparams = grid_of(weight, args)
    rounded = dequantize(round_to_nearest(weight, qparams, args).codes_RC, qparams, args).float()
    assert output_loss(weight, values, hessian) < 0.9 * output_loss(weight, rounded, hessian)


@pytest.mark.parametrize("solver", SOLVERS)
def test_an_isotropic_hessian_gives_exactly_rounding(solver: Solver) -> None:
    args = FORMATS["int4 group"]
    weight, _ = problem()
    solution, _ = solve(weight, 3.0 * torch.eye(weight.shape[1]), args, solver=solver)
    _, qparams = grid_of(weight, args)
    assert torch.equal(solution.codes_RC, round_to_nearest(weight, qparams, args).codes_RC)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("block_size", [1, 5, 16, 1000])
def test_block_size_does_not_matter(solver: Solver, block_size: int) -> None:
    weight, hessian = problem(64, 96)
    one, _ = solve(weight, hessian, FORMATS["int4 group"], solver=solver)
    other, _ = solve(weight, hessian, FORMATS["int4 group"], solver=solver, block_size=block_size)
    assert (one.codes_RC != other.codes_RC).float().mean() <= 1e-3


def test_the_scale_of_the_hessian_does_not_matter() -> None:
    weight, hessian = problem(64, 96)
    one, _ = solve(weight, hessian, FORMATS["int4 group"])
    for factor in (1e-4, 1e4):
        other, _ = solve(weight, factor * hessian, FORMATS["int4 group"])
        assert (one.codes_RC != other.codes_RC).float().mean() <= 1e-3


@pytest.mark.parametrize("solver", SOLVERS)
def test_rows_are_independent_so_stacks_equal_single_solves(solver: Solver) -> None:
    args = FORMATS["int4 group asymmetric"]
    weight, hessian = problem(32, 48)
    stacked, _ = solve(weight, hessian, args, solver=solver)
    parts = [solve(part, hessian, args, solver=solver)[0].codes_RC for part in weight.split(8)]
    assert (torch.cat(parts) != stacked.codes_RC).float().mean() <= 1e-3
    shuffled = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    permuted, _ = solve(weight[shuffled], hessian, args, solver=solver)
    assert torch.equal(permuted.codes_RC, stacked.codes_RC[shuffled])


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_weight_on_the_grid_stays(solver: Solver) -> None:
    args = FORMATS["int4 group"]
    weight, hessian = problem()
    grid, qparams = grid_of(weight, args)
    on_grid = dequantize(round_to_nearest(weight, qparams, args).codes_RC, qparams, args)
    solution = solve_gptq(on_grid, hessian, grid, solver=solver)
    assert torch.equal(dequantize(solution.codes_RC, qparams, args), on_grid)
    assert float(solution.loss_R.abs().max()) == pytest.approx(0.0, abs=1e-9)


def with_dead(hessian: Tensor, dead: Tensor, zero: float = 0.0) -> Tensor:
    """The Hessian of the same inputs with some columns zero."""
    hessian = hessian.clone()
    hessian[dead] = zero
    hessian[:, dead] = zero
    return hessian


DEAD = {"three": torch.tensor([0, 17, 47]), "a whole group": torch.arange(16, 32), "all but one": torch.arange(47)}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("which", DEAD)
def test_dead_columns_are_rounded_and_the_others_solved_as_without_them(solver: Solver, name: str, which: str) -> None:
    args, dead = FORMATS[name], DEAD[which]
    weight, hessian = problem()
    hessian = with_dead(1e-4 * hessian, dead)
    grid, qparams = grid_of(weight, args)
    rounded = round_to_nearest(weight, qparams, args).codes_RC
    live = torch.ones(48, dtype=torch.bool)
    live[dead] = False
    smaller = Grid(grid.scale_RG, grid.zero_RG, grid.group_C[live], args)
    alone = solve_gptq(weight[:, live], hessian[live][:, live], smaller, solver=solver)
    for order_C in (None, activation_order(hessian)):
        solution, _ = solve(weight, hessian, args, solver=solver, order_C=order_C)
        assert solution.num_dead == len(dead)
        assert torch.equal(solution.codes_RC[:, dead], rounded[:, dead])
        assert bool(torch.isfinite(solution.loss_R).all())
        if order_C is None:
            assert (solution.codes_RC[:, live] != alone.codes_RC).float().mean() <= 1e-3


@pytest.mark.parametrize("actorder", [None, "static", "weight", "group"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_dead_columns_are_rounded_on_the_scales_that_were_chosen(solver: Solver, actorder: ActOrder | None) -> None:
    args = FORMATS["int4 group asymmetric"]
    weight, hessian = problem()
    dead = torch.tensor([1, 2, 3, *range(32, 48)])
    (solved,), num_dead = quantize_gptq([weight], with_dead(hessian, dead), args, actorder=actorder, solver=solver, scale_search=True)
    group_C = torch.arange(48) // 16 if solved.g_idx_C is None else solved.g_idx_C
    scale, zero = (part[:, group_C] for part in (solved.qparams.scale, solved.qparams.zero_point) if part is not None)
    nearest = (weight / scale + zero).round().clamp(*args.code_range)
    assert num_dead == len(dead)
    assert torch.equal(solved.codes_RC[:, dead].float(), nearest[:, dead])


@pytest.mark.parametrize("solver", SOLVERS)
def test_inputs_of_negative_zero_are_dead_and_squares_that_underflow_are_too(solver: Solver) -> None:
    weight, hessian = problem()
    dead = torch.tensor([5, 40])
    expected, _ = solve(weight, with_dead(hessian, dead), FORMATS["int4 group"], solver=solver)
    for odd in (-0.0, 1e-25):
        odd_hessian = with_dead(hessian, dead, odd)
        odd_hessian.diagonal()[dead] = odd if odd == 0 else 0.0
        solution, _ = solve(weight, odd_hessian, FORMATS["int4 group"], solver=solver)
        assert solution.num_dead == 2
        assert torch.equal(solution.codes_RC, expected.codes_RC)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_column_that_hardly_fires_is_no_dead_one(solver: Solver) -> None:
    weight, hessian = problem()
    faint = torch.ones(48)
    faint[[5, 40]] = 1e-6
    solution, _ = solve(weight, hessian * faint[:, None] * faint, FORMATS["int4 group"], solver=solver)
    silent, _ = solve(weight, with_dead(hessian, torch.tensor([5, 40])), FORMATS["int4 group"], solver=solver)
    assert solution.num_dead == 0
    assert (solution.codes_RC != silent.codes_RC)[:, [5, 40]].sum() <= 2  # ties may fall otherwise


def test_the_last_column_is_optimal() -> None:
    args = FORMATS["int4 group"]
    weight, hessian = problem()
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
    solution, values = solve(weight, hessian, args, damp_frac=1e-12)
    _, qparams = grid_of(weight, args)
    best = output_loss(weight, values, hessian)
    for step in (-1, 1):
        for row in range(weight.shape[0]):
            moved = solution.codes_RC.clone()
            moved[row, -1] = (moved[row, -1] + step).clamp(-8, 7)
            assert output_loss(weight, dequantize(moved, qparams, args).float(), hessian) >= best * (1 - 1e-6)


@pytest.mark.parametrize("solver", SOLVERS)
def test_activation_order_rounds_the_strongest_column_first(solver: Solver) -> None:
    args = FORMATS["int4 group"]
    weight, hessian = problem()
    order = activation_order(hessian)
    assert hessian.diagonal()[order].diff().max() <= 0
    solution, values = solve(weight, hessian, args, order_C=order, solver=solver)
    first = order[0]
    _, qparams = grid_of(weight, args)
    rounded = round_to_nearest(weight, qparams, args).codes_RC
    assert torch.equal(solution.codes_RC[:, first], rounded[:, first])
    _, plain = solve(weight, hessian, args, solver=solver)
    assert output_loss(weight, values, hessian) < output_loss(weight, plain, hessian)


@pytest.mark.parametrize("solver", SOLVERS)
def test_reported_loss_is_the_real_one(solver: Solver) -> None:
    weight, hessian = problem(200, 48)
    solution, values = solve(weight, hessian, FORMATS["int4 group"], solver=solver)
    damped = hessian.clone()
    damped.diagonal().add_(0.01 * hessian.diagonal().mean())
    assert float(solution.loss_R.sum()) == pytest.approx(output_loss(weight, values, damped), rel=1e-3)


@pytest.mark.parametrize("actorder", [None, "static", "group"])
def test_weights_with_one_input_are_solved_together(actorder: ActOrder | None) -> None:
    args = FORMATS["int4 group asymmetric"]
    weight, hessian = problem(300, 48)
    parts = list(weight.split([200, 90, 10]))
    together, num_dead = quantize_gptq(parts, hessian, args, actorder=actorder, names=["q", "k", "v"])
    assert num_dead == 0
    for part, own in zip(parts, together, strict=True):
        (alone,), _ = quantize_gptq([part], hessian, args, actorder=actorder)
        assert (own.codes_RC != alone.codes_RC).float().mean() <= 1e-3
        values = dequantize(own.codes_RC, own.qparams, args, own.g_idx_C).float()
        assert (own.g_idx_C is not None) == (actorder == "group")
        expected = output_loss(part, values, hessian) / output_loss(part, torch.zeros_like(part), hessian)
        assert own.relative_error == pytest.approx(expected, rel=0.1 if len(part) > 128 else 1e-4)
    assert len({own.relative_error for own in together}) == 3


def test_errors_name_the_module() -> None:
    weight, hessian = problem()
    grid, _ = grid_of(weight, FORMATS["int4 group"])
    with pytest.raises(NumericsError, match=r"layer.q.*not positive definite"):
        solve_gptq(weight, -hessian, grid, name="layer.q")
    weight[1, 2] = float("nan")
    with pytest.raises(NumericsError, match=r"layer.q.*NaN or infinity"):
        solve_gptq(weight, hessian, grid, name="layer.q")


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_layout_of_a_hessian_does_not_matter(solver: Solver) -> None:
    """One whose columns lie behind each other is what its transpose would be, and it is symmetric."""
    weight, hessian = problem()
    hessian = (hessian + hessian.t()) / 2
    expected, found = (quantize_gptq([weight], one, FORMATS["int4 group"], solver=solver)[0][0] for one in (hessian, hessian.t()))
    assert torch.equal(expected.codes_RC, found.codes_RC)


def test_inputs_are_not_modified() -> None:
    weight, hessian = problem()
    copies = weight.clone(), hessian.clone()
    solve(weight, hessian, FORMATS["int4 group"], order_C=activation_order(hessian))
    assert torch.equal(weight, copies[0])
    assert torch.equal(hessian, copies[1])
