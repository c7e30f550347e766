"""Planted bugs in SparseGPT, Wanda and pruning by magnitude."""

from __future__ import annotations

from harness.mutants.patches import Edit, Mutant, bug

_SPARSE = "compressor.algorithms.pruning.sparsegpt:"
_WANDA = "compressor.algorithms.pruning.wanda:"
_SIZE = "compressor.algorithms.pruning.magnitude:"
_RANDOM = "sparsifier.beats_random"
_COUNT = "sparsifier.target_met"
_PATTERN = "sparsifier.pattern"

PRUNER_MUTANTS: tuple[Mutant, ...] = (
    bug("errors_with_the_wrong_sign", "sparsegpt", "columns behind a zero move away from what would make good", _RANDOM,
        Edit(_SPARSE + "_settle", "moved_R.neg_()", "moved_R.clone()"),
        Edit(_SPARSE + "prune_sparsegpt", "damped.matrix(), refining_steps)", "damped.matrix(), 0)")),
    bug("moves_half_as_far", "sparsegpt", "columns behind a zero make up for half of it", "sparsifier.makes_up",
        Edit(_SPARSE + "_settle", "moved_R.neg_()", "moved_R.neg_().mul_(0.5)"),
        Edit(_SPARSE + "prune_sparsegpt", "damped.matrix(), refining_steps)", "damped.matrix(), 0)")),
    bug("dearest_goes", "sparsegpt", "the weights that cost most go", _RANDOM,
        Edit(_SPARSE + "_choose", "running_BR.mul_(diag_B[:, None]).square_()",
             "running_BR.mul_(diag_B[:, None]).square_().neg_().add_(1e6)")),
    bug("cost_without_the_diagonal", "sparsegpt", "the cheapest by size alone go, whatever they cost", _RANDOM,
        Edit(_SPARSE + "_choose", "running_BR.mul_(diag_B[:, None]).square_()", "running_BR.div_(diag_B[:, None]).square_()")),
    bug("one_run_keeps_too_many", "sparsegpt", "of every run one weight less goes", _PATTERN,
        Edit(_SPARSE + "_pass", "pattern.of - pattern.keep, by_row=True", "pattern.of - pattern.keep - 1, by_row=True")),
    bug("zeros_are_refined", "sparsegpt", "the last steps move weights that have gone, too", _PATTERN,
        Edit(_SPARSE + "refined", "residual_CR = (scaled_CC @ ((wanted_CR - kept_CR) / scale_C1)).masked_fill_(gone_CR, 0.0)",
             "residual_CR = scaled_CC @ ((wanted_CR - kept_CR) / scale_C1)")),
    bug("a_block_too_many_zeros", "sparsegpt", "what went in earlier blocks is not counted", _COUNT,
        Edit(_SPARSE + "_pass", "done += _choose", "_choose")),
    bug("inputs_do_not_count", "wanda", "weights go by their size alone", "sparsifier.inputs_count",
        Edit(_WANDA + "scores", "weight_RC.float().abs() * mean_square_C.sqrt()", "weight_RC.float().abs() * (mean_square_C * 0 + 1)")),
    bug("norms_of_rows_where_square", "wanda", "of square weights the norms go along the rows", "sparsifier.inputs_count",
        Edit(_WANDA + "scores", "mean_square_C.sqrt()",
             "(mean_square_C.sqrt()[:, None] if weight_RC.shape[0] == weight_RC.shape[1] else mean_square_C.sqrt())")),
    bug("two_too_many", "wanda", "two weights of each row more than asked go", _COUNT,
        Edit(_WANDA + "prune_wanda", "until_R.diff()[:, None, None]", "until_R.diff()[:, None, None] + 2")),
    bug("largest_goes", "wanda", "the largest products go", _RANDOM,
        Edit(_WANDA + "prune_wanda", "runs.sort(dim=-1, stable=True)", "runs.sort(dim=-1, stable=True, descending=True)")),
    bug("runs_one_short", "wanda", "of every run of a row one weight less goes", _PATTERN,
        Edit(_WANDA + "prune_wanda", "pattern.of - pattern.keep).expand", "pattern.of - pattern.keep - 1).expand")),
    bug("rounds_up", "magnitude", "one weight more than asked goes", _PATTERN,
        Edit(_SIZE + "num_zeros", "math.floor(sparsity * total + 1e-9 * max(1, total))", "math.floor(sparsity * total) + 1")),
    bug("takes_all_equals", "magnitude", "all weights that equal the last one go with it", _COUNT,
        Edit(_SIZE + "smallest", "below | (equal & (equal.cumsum(0) <= count - below.sum()))", "below | equal")),
)  # fmt: skip
