"""Planted bugs in what pruning, scales, ranges, experts and rotations decide, against the goldens of these algorithms."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from harness.goldens.golden import Golden, GoldenMismatch, GoldenSettings
from harness.mutants.family import Family, Killer
from harness.mutants.patches import CodeMutant, Edit, Mutant, bug
from tests.mutation.numerics.learned import AUTOROUND_MUTANTS, LEARNED_ROTATION_MUTANTS
from tests.mutation.numerics.owl import OWL_MUTANTS
from tests.mutation.numerics.scales import RANGE_MUTANTS
from tests.reference_model.algorithm_cases import ALGORITHMS, elsewhere
from tests.reference_model.model_cases import SOLVER_INPUTS

_ROOT = Path(__file__).parents[3] / "golden"
_SPARSE = "compressor.algorithms.pruning.sparsegpt:"
_WANDA = "compressor.algorithms.pruning.wanda:"
_SIZE = "compressor.algorithms.pruning.magnitude:"
_REAP = "compressor.algorithms.pruning.reap:"
_REFIT = "compressor.algorithms.pruning.refit:"
_SMOOTH = "compressor.algorithms.smoothing:"
_CLIP = "compressor.algorithms.clipping:"
_MATRIX = "compressor.algorithms.rotations:"
_MASKS = "compressor.modifiers.pruning.masks:PruningModifier."
_KEPT = "compressor.modifiers.pruning.magnitude:ConstantPruningModifier."
_MOVER = "compressor.modifiers.transforms.smoothing:SmoothQuantModifier."
_OF_A_MODEL = "logarithmic equalization of a model"


def _bug(name: str, wrong: str, golden: str, where: str, right: str, planted: str) -> CodeMutant:
    return bug(name, golden.split(" ", 1)[0], wrong, f"golden {golden}", Edit(where, right, planted))


BUGS: tuple[Mutant, ...] = (
    _bug(
        "undamped",
        "the Hessian is damped a hundred times as much",
        "SparseGPT",
        _SPARSE + "prune_sparsegpt",
        "DampedHessian(hessian_CC, None, damp_frac,",
        "DampedHessian(hessian_CC, None, 100 * damp_frac,",
    ),
    _bug(
        "unrefined",
        "the weights that are kept stay where the pass has left them",
        "SparseGPT",
        _SPARSE + "prune_sparsegpt",
        "damped.matrix(), refining_steps)",
        "damped.matrix(), 0)",
    ),
    _bug(
        "blind_to_earlier_blocks",
        "zeros are chosen as if earlier columns had kept all",
        "SparseGPT",
        _SPARSE + "_choose",
        "running_BR = W_BR + torch",
        "running_BR = W_BR + 0 * torch",
    ),
    _bug(
        "cost_not_squared",
        "costs are compared with their sign",
        "SparseGPT",
        _SPARSE + "_choose",
        ".square_()",
        ".square_().sqrt_().neg_()",
    ),
    _bug(
        "outside_of_the_pattern",
        "one more of every four goes",
        "SparseGPT 2 of 4",
        _SPARSE + "_pass",
        "pattern.of - pattern.keep, by_row=True",
        "pattern.of - pattern.keep + 1, by_row=True",
    ),
    _bug("mean_square_without_root", "inputs count by their square", "Wanda", _WANDA + "scores", "mean_square_C.sqrt()", "mean_square_C"),
    _bug("signed_weights", "large negative weights go first", "Wanda", _WANDA + "scores", "weight_RC.float().abs()", "weight_RC.float()"),
    _bug(
        "over_the_whole_weight",
        "a row more than half of which is small keeps its share of the first row",
        "Wanda",
        _WANDA + "prune_wanda",
        "runs.sort(dim=-1, stable=True)",
        "runs[..., :1, :, :].expand_as(runs).sort(dim=-1, stable=True)",
    ),
    _bug(
        "share_of_a_run",
        "of every run the share of a row goes, and one more",
        "Wanda 2 of 4",
        _WANDA + "prune_wanda",
        "pattern.of - pattern.keep",
        "pattern.of - pattern.keep + 1",
    ),
    _bug(
        "rounded_up",
        "one weight more goes than the share allows",
        "magnitude",
        _SIZE + "num_zeros",
        "math.floor(sparsity",
        "1 + math.floor(sparsity",
    ),
    _bug(
        "last_of_equals",
        "among equals the last go first",
        "magnitude",
        _SIZE + "smallest",
        "equal.cumsum(0)",
        "equal.flip(0).cumsum(0).flip(0)",
    ),
    _bug(
        "each_by_itself",
        "a share of all together is a share of each",
        "magnitude",
        _SIZE + "pruned_weights",
        "if not together:",
        "if True:",
    ),
    _bug(
        "largest_of_a_run",
        "of every run the largest may go",
        "magnitude 2 of 4",
        _SIZE + "_candidates",
        "stable=True)",
        "stable=True, descending=True)",
    ),
    _bug(
        "largest_in_a_block",
        "a block counts by its largest weight",
        "magnitude in blocks",
        _SIZE + "_smallest_blocks",
        "laid_out.sum((1, 3, 4), dtype=torch.float64)",
        "laid_out.amax((1, 3, 4))",
    ),
    _bug("next_to_zero", "next to zero counts as zero", "kept zeros", _KEPT + "on_start", "weight == 0", "weight.abs() < 1e-3"),
    _bug("others_are_kept", "what is not zero is kept there", "kept zeros", _KEPT + "on_start", "weight == 0", "weight != 0"),
    _bug(
        "one_module_only",
        "zeros of the first module alone are noted",
        "kept zeros",
        _KEPT + "on_start",
        "zip(self._pruned.values(), self.weights(), strict=True)",
        "zip(list(self._pruned.values())[:1], self.weights())",
    ),
    _bug("never_let_go", "zeros stay when the end is reached", "kept zeros", _MASKS + "on_event", "self._active = False", "pass"),
    _bug(
        "moments_live",
        "gradients of zeros go into the moments",
        "kept zeros",
        _MASKS + "on_event",
        ".masked_fill_(mask, 0.0)",
        ".masked_fill(mask, 0.0)",
    ),
    _bug(
        "gradient_as_it_lies",
        "the mask of a Conv1D meets its gradient the other way round",
        "kept zeros",
        _MASKS + "on_event",
        "_as_rows(self._modules[name], gradient)",
        "gradient",
    ),
    _bug(
        "ahead_of_the_step",
        "zeros are written ahead of the step alone, whose old moments move them",
        "kept zeros",
        _MASKS + "on_event",
        "event.type is EventType.OPTIM_POST_STEP",
        "event.type is EventType.OPTIM_PRE_STEP",
    ),
    _bug(
        "below_zero",
        "zeros have the sign of what stood there",
        "kept zeros",
        _MASKS + "apply",
        "masked_fill_(mask, 0.0)",
        "mul_(~mask)",
    ),
    _bug(
        "strength_the_other_way",
        "weights keep what activations should give",
        "SmoothQuant",
        _SMOOTH + "smooth_scales",
        "pow(1 - strength)",
        "pow(strength)",
    ),
    _bug(
        "weights_do_not_count",
        "scales are those of the activations alone",
        "SmoothQuant",
        _SMOOTH + "smooth_scales",
        "/ weight_max_C.float()",
        "/ torch.ones_like(weight_max_C).float()",
    ),
    _bug(
        "product_in_place_of_quotient",
        "activations and weights are multiplied",
        "SmoothQuant",
        _SMOOTH + "smooth_scales",
        "pow(strength) / weight",
        "pow(strength) * weight",
    ),
    _bug(
        "dead_channels_scaled",
        "channels without activations get a scale",
        "SmoothQuant",
        _SMOOTH + "_alive",
        "& ~is_dead_C",
        "| is_dead_C",
    ),
    _bug(
        "only_both_are_dead",
        "a channel counts as dead where both sides say nothing",
        "SmoothQuant",
        _SMOOTH + "_alive",
        "max()) | (weight_C",
        "max()) & (weight_C",
    ),
    _bug(
        "natural_logarithm",
        "the logarithm is to base e",
        "logarithmic equalization",
        _SMOOTH + "equalizing_scales",
        "torch.log2(",
        "torch.log(",
    ),
    _bug(
        "one_for_two",
        "the logarithm begins at one",
        "logarithmic equalization",
        _SMOOTH + "equalizing_scales",
        "/ torch.log2(2 +",
        "/ torch.log2(1 +",
    ),
    _bug(
        "logarithm_alone",
        "the range does not stand above the logarithm",
        "logarithmic equalization",
        _SMOOTH + "equalizing_scales",
        "largest_C / torch",
        "1 / torch",
    ),
    _bug(
        "ranges_of_weights",
        "weights are what is equalized",
        "logarithmic equalization",
        _SMOOTH + "equalizing_scales",
        "largest_C = act_max_C",
        "largest_C = weight_max_C",
    ),
    _bug(
        "no_weight_reads_it",
        "channels that no weight reads get a scale",
        "logarithmic equalization",
        _SMOOTH + "equalizing_scales",
        "act_max_C, weight_max_C)",
        "act_max_C, act_max_C)",
    ),
    _bug(
        "smoothed_instead",
        "ranges are shared with the weights as by SmoothQuant",
        _OF_A_MODEL,
        _MOVER + "scales",
        'self.algorithm == "log_equalization"',
        'self.algorithm != "log_equalization"',
    ),
    _bug("above_zero", "inputs below zero have no range", _OF_A_MODEL, _MOVER + "watch_input", "tokens_NK.abs()", "tokens_NK"),
    _bug(
        "last_batch",
        "ranges are those of the last batch",
        _OF_A_MODEL,
        _MOVER + "watch_input",
        "torch.maximum(known, largest_K)",
        "largest_K",
    ),
    _bug("last_candidate", "the last candidate is taken", "AWQ", _SMOOTH + "search_awq", "if now < best:", "if True:"),
    _bug(
        "other_scale_back",
        "rounded weights are not scaled back",
        "AWQ",
        _SMOOTH + "search_awq",
        "importance_C=importance_C), args) / scales_C",
        "importance_C=importance_C), args)",
    ),
    _bug(
        "diagonal_alone",
        "errors of columns are summed as if no inputs went together",
        "AWQ",
        _SMOOTH + "search_awq",
        "(off_RC @ hessian_CC) * off_RC",
        "(off_RC * hessian_CC.diagonal()) * off_RC",
    ),
    _bug(
        "weights_multiply",
        "candidates are multiplied by the weights' sizes",
        "AWQ",
        _SMOOTH + "_candidates",
        "scales_C / (weight_mean_C",
        "scales_C * (weight_mean_C",
    ),
    _bug(
        "uncentred",
        "scales keep their size",
        "AWQ",
        _SMOOTH + "_candidates",
        "made.append(scales_C / (scales_C.max() * scales_C.min()).sqrt())",
        "made.append(scales_C)",
    ),
    _bug("half_of_the_grid", "strong scales are not tried", "AWQ", _SMOOTH + "_candidates", "step / n_grid for", "step / n_grid / 2 for"),
    _bug(
        "worst_range",
        "the range with the largest error is kept",
        "AWQ ranges",
        _CLIP + "_search_rows",
        "error_RG < best_RG",
        "error_RG > best_RG",
    ),
    _bug("one_step_only", "one narrower range is tried", "AWQ ranges", _CLIP + "_search_rows", "int(_MAX_SHRINK * _NUM_STEPS)", "2"),
    _bug(
        "first_block_for_all",
        "all groups are judged by the inputs of the first",
        "AWQ ranges",
        _CLIP + "_errors",
        "(off_GRS @ blocks_GSS)",
        "(off_GRS @ blocks_GSS[:1])",
    ),
    _bug(
        "inputs_left_out",
        "errors of weights are judged, not of outputs",
        "AWQ ranges",
        _CLIP + "_errors",
        "(off_GRS @ blocks_GSS) * off_GRS",
        "off_GRS * off_GRS",
    ),
    _bug("ranges_not_narrowed", "what is rounded keeps the whole range", "AWQ ranges", _CLIP + "_errors", ", kept_RG=kept_RG)", ")"),
    _bug(
        "without_the_router",
        "experts count by the size of their outputs",
        "REAP",
        _REAP + "ExpertSaliency.add",
        "weights_N.double().abs() *",
        "weights_N.double().abs() ** 0 *",
    ),
    _bug(
        "sums", "experts count by how many tokens they get", "REAP", _REAP + "ExpertSaliency.value", "self.num_tokens_E.clamp_min(1)", "1"
    ),
    _bug(
        "signs_cancel",
        "weights of the router below zero take away",
        "REAP",
        _REAP + "ExpertSaliency.add",
        "weights_N.double().abs()",
        "weights_N.double()",
    ),
    _bug(
        "groups_are_one",
        "groups of experts lose as they come",
        "REAP",
        _REAP + "kept_experts",
        "size = len(saliency_E) // num_groups",
        "num_groups = 1; size = len(saliency_E)",
    ),
    _bug(
        "strongest_go", "the experts that matter most go", "REAP", _REAP + "kept_experts", "stable=True)", "stable=True, descending=True)"
    ),
    _bug("one_round", "each expert takes its turn once", "REAP refit", _REFIT + "refit", "rounds * turns", "turns"),
    _bug("no_ridge", "what has been moved is not held back", "REAP refit", _REFIT + "refit", "- ridge * moved[place].T", ""),
    _bug("missing_stays", "what an expert gives stays missing", "REAP refit", _REFIT + "refit", "missing_NC[tokens.rows_n] -=", "_ ="),
    _bug(
        "twice_the_step",
        "steps are twice as long",
        "REAP refit",
        _REFIT + "refit",
        "moved[place] += step_CD",
        "moved[place] += 2 * step_CD",
    ),
    _bug(
        "turns_as_they_come",
        "the first expert goes first",
        "REAP refit",
        _REFIT + "refit",
        "key=lambda place: -sizes[place]",
        "key=lambda place: place",
    ),
    _bug(
        "signs_forgotten",
        "random signs are not multiplied",
        "rotations",
        _MATRIX + "Rotation.turn",
        "if not back and signs_B is not None:",
        "if back and signs_B is None:",
    ),
    _bug("never_back", "turning back turns on", "rotations", _MATRIX + "Rotation.turn", "transposed=back)", "transposed=False)"),
    _bug(
        "no_root", "rows grow by the root of the size", "rotations", _MATRIX + "Rotation._by_factors", "x_NB / math.sqrt(self.norm)", "x_NB"
    ),
    _bug(
        "means_not_kept",
        "a rotation for LayerNorm moves means",
        "rotations",
        _MATRIX + "Rotation.turn",
        "if self.is_mirrored:",
        "if False:",
    ),
    _bug(
        "factors_the_other_way",
        "the first factor is transposed",
        "rotations",
        _MATRIX + "Rotation._by_factors",
        "factor.T if transposed else factor",
        "factor if transposed else factor.T",
    ),
)


def _killers(mutant: Mutant | None) -> Sequence[Killer]:
    """All goldens of algorithms, in their order."""
    del mutant
    return [Killer(f"golden {name}", partial(_look, name)) for name in ALGORITHMS]


def _look(name: str) -> str | None:
    with tempfile.TemporaryDirectory() as cache:
        golden = Golden(GoldenSettings(_ROOT, Path(cache)), __name__)
        inputs = golden.inputs(SOLVER_INPUTS, dict)
        try:
            result = ALGORITHMS[name](inputs)
            golden.check(f"algorithms/{name}", result.tensors, tier=result.tier, elsewhere=elsewhere(result), inputs=result.inputs)
        except GoldenMismatch as seen:
            return str(seen).splitlines()[0]
    return None


_EVERY = (*BUGS, *OWL_MUTANTS, *RANGE_MUTANTS, *AUTOROUND_MUTANTS, *LEARNED_ROTATION_MUTANTS)
FAMILY = Family("algorithms", {mutant.name: mutant for mutant in _EVERY}, _killers)
