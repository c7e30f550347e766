"""Planted bugs in what is learned, rounding and rotations, against their goldens."""

from __future__ import annotations

from harness.mutants.patches import Edit, Mutant, bug

_LEARNED = "compressor.algorithms.autoround:LearnedRounding."
_WHOLE = "compressor.algorithms.autoround:_whole_scale"
_GOLDEN = "golden AutoRound"
_ROTATION = "compressor.modifiers.transforms.learned_rotations:"
_ROTATED = "golden learned rotations"

AUTOROUND_MUTANTS: tuple[Mutant, ...] = (
    bug("against_the_gradient", "AutoRound", "offsets go with the gradient, not against it", _GOLDEN,
        Edit(_LEARNED + "step", "_offset_RGS.sub_(", "_offset_RGS.add_(")),
    bug("size_of_the_gradient", "AutoRound", "offsets take the gradient itself, not its sign", _GOLDEN,
        Edit(_LEARNED + "step", "gradient_RGS.sign().mul_(inside_RGS)", "gradient_RGS.mul(inside_RGS)")),
    bug("past_the_neighbours", "AutoRound", "offsets may reach over a whole step", _GOLDEN,
        Edit(_LEARNED + "step", ".clamp_(-0.5, 0.5)", ".clamp_(-1.0, 1.0)")),
    bug("ranges_stay", "AutoRound", "the upper end of a range does not move", _GOLDEN,
        Edit(_LEARNED + "step", "range_rate * high_RG.sign()", "0 * high_RG.sign()")),
    bug("ranges_without_an_end", "AutoRound", "a range may vanish", _GOLDEN,
        Edit(_LEARNED + "step", "self._low_RG.sub_(range_rate * low_RG.sign()).clamp_(_NARROWEST, 1.0)",
             "self._low_RG.sub_(32 * range_rate * low_RG.sign()).clamp_(0.01, 1.0)")),
    bug("zero_point_without_gradient", "AutoRound", "the zero point hands nothing on to the range", _GOLDEN,
        Edit(_LEARNED + "_range_gradients", "by_zero = -(gradient * ~inside).sum(-1) * scale", "by_zero = 0 * scale")),
    bug("cut_off_is_inside", "AutoRound", "a weight that is cut off moves its offset", _GOLDEN,
        Edit(_LEARNED + "_codes", "codes == rounded", "codes == codes")),
    bug("steps_all_alike", "AutoRound", "neighbours of fp8 are a step of one apart everywhere", f"{_GOLDEN} in blocks of fp8",
        Edit(_LEARNED + "_codes", "steps = local_steps(rounded, self._args.type, self._args.num_bits)", "steps = 1.0")),
    bug("blocks_in_another_order", "AutoRound", "rows of blocks are put back from the last to the first", f"{_GOLDEN} in blocks of fp8",
        Edit(_LEARNED + "_ungrouped", "block_structure).transpose(1, 2)", "block_structure).transpose(1, 2).flip(0)")),
    bug("without_its_global_scale", "AutoRound", "weights are divided by group scales alone", f"{_GOLDEN} of NVFP4",
        Edit(_WHOLE, "if qparams.global_scale is None", "if True")),
)  # fmt: skip

LEARNED_ROTATION_MUTANTS: tuple[Mutant, ...] = (
    bug("not_skew", "rotations that are learned", "what is learned is no rotation", _ROTATED,
        Edit(_ROTATION + "LearnedRotation.matrix", "self.move_BB - self.move_BB.T", "self.move_BB + self.move_BB.T")),
    bug("turned_the_other_way", "rotations that are learned", "each step turns the other way", _ROTATED,
        Edit(_ROTATION + "LearnedRotation.matrix", "unit_BB - skew_BB, unit_BB + skew_BB", "unit_BB + skew_BB, unit_BB - skew_BB")),
    bug("start_forgotten", "rotations that are learned", "what was there at the start is left out", _ROTATED,
        Edit(_ROTATION + "LearnedRotation.matrix", "self.start_BB.to(dtype) @ torch", "torch")),
    bug("steps_by_the_size", "rotations that are learned", "large rotations move as far in each entry as small ones", _ROTATED,
        Edit(_ROTATION + "LearnedRotation.matrix", "/ size**0.5", "")),
    bug("means_drift", "rotations that are learned", "a rotation that has to keep means learns to move them", _ROTATED,
        Edit(_ROTATION + "LearnedRotation.matrix", "if self.keeps_mean:", "if False:")),
    bug("float_weights", "rotations that are learned", "the loss is that of weights that are not rounded", _ROTATED,
        Edit(_ROTATION + "LearnedTurns._values", "weight.dim() == 2", "weight.dim() == 3")),
    bug("float_inputs", "rotations that are learned", "the loss is that of inputs that are not rounded", _ROTATED,
        Edit(_ROTATION + "_rounding_inputs", "args.dynamic is not True", "args.dynamic is True")),
    bug("blocks_hand_nothing_on", "rotations that are learned", "of all weights only embedding and head hand gradients on", _ROTATED,
        Edit(_ROTATION + "LearnedTurns._leaf", "if not self._plan.turns_of(name):", "if name.endswith('_proj'):")),
)  # fmt: skip
