"""Planted bugs in scales that move: in SmoothQuant, in AWQ, and in what proves that they may."""

from __future__ import annotations

from harness.mutants.patches import Edit, Mutant, bug

_PAIRS = "compressor.mappings.pairs:"
_SMOOTH = "compressor.algorithms.smoothing:"
_MOVE = "compressor.modifiers.transforms.moving_scales:ScaleMovingModifier."
_FLOAT = "transform.float_output"
_EVERY = "transform.every_architecture"
_VACUOUS = "transform.not_vacuous"

MOVED_SCALE_MUTANTS: tuple[Mutant, ...] = (
    bug("readers_forgotten", "pairs", "the source is scaled and its readers are not", _FLOAT,
        Edit(_PAIRS + "scale_channels", "for name in pair.readers}", "for name in ()}")),
    bug("one_reader_forgotten", "pairs", "the last reader keeps its columns", _FLOAT,
        Edit(_PAIRS + "scale_channels", "for name in pair.readers}", "for name in pair.readers[:-1]}")),
    bug("bias_forgotten", "pairs", "the bias of a source stays as it was", _EVERY,
        Edit(_PAIRS + "_scaled_source", "if bias is not None:", "if bias is None and weight is None:"), raises="TargetError"),
    bug("gemmas_one_forgotten", "pairs", "a norm that multiplies by 1 + weight is scaled as if it did not", _EVERY,
        Edit(_PAIRS + "_scaled_source", "(weight.to(wide) + offset) * factor_C - offset",
             "weight.to(wide) * factor_C"), raises="TargetError"),
    bug("columns_multiplied", "pairs", "columns are multiplied where they should be divided", _FLOAT,
        Edit(_PAIRS + "_scaled_reader", "weight_RK.to(wide) / factor_K", "weight_RK.to(wide) * factor_K"), raises="TargetError"),
    bug("activations_forgotten", "smoothing", "scales are those of the weights alone, all one at full strength", _VACUOUS,
        Edit(_MOVE + "_move", "(1.0 / scales_C.double())", "(1.0 / scales_C.double().clamp(1, 1))")),
    bug("worst_of_the_search", "awq", "the candidate with the largest error is taken", _VACUOUS,
        Edit(_SMOOTH + "search_awq", "if now < best:", "if now > best:")),
    bug("first_pair_only", "smoothing", "all pairs but the first stay as they are", _VACUOUS,
        Edit(_MOVE + "_search", "done[place] = self._move(", "done[place] = {} if place else self._move(")),
    bug("factors_in_bfloat16", "smoothing", "source and readers get factors that were rounded on the way to one of them", _FLOAT,
        Edit(_PAIRS + "scale_channels", "columns_K = pair.spread(factor_C)", "columns_K = pair.spread(factor_C.bfloat16())")),
    bug("source_rounded_first", "pairs", "a source is scaled in its own dtype after a detour through bfloat16", _FLOAT,
        Edit(_PAIRS + "_scaled_source", "wide = torch.promote_types(weight.dtype, torch.float32)",
             "wide = torch.promote_types(weight.dtype, torch.float32)\n    weight.copy_(weight.bfloat16())"), raises="TargetError"),
)  # fmt: skip
