"""Planted bugs in how values become codes, and codes values."""

from __future__ import annotations

from harness.mutants.in_place import bug
from harness.mutants.patches import Edit, Mutant

_FORMATS = "compressor.numerics.formats:"
_QUANTIZE = "compressor.numerics.quantize:"
_SNAP = _FORMATS + "snap_"
_NEAREST = "quantizer.nearest_codes"
_RULE = "quantizer.scale_rule"

QUANTIZER_MUTANTS: tuple[Mutant, ...] = (
    bug("narrow_range", "codes", "the lowest code is -127 in place of -128", _RULE,
        Edit(_FORMATS + "code_range", "return -half, half - 1.0", "return 1.0 - half, half - 1.0")),
    bug("code_past_the_end", "codes", "the highest code is 128, which int8 does not hold", _RULE,
        Edit(_FORMATS + "code_range", "return -half, half - 1.0", "return -half, half")),
    bug("lowest_code_never_used", "codes", "codes are clamped to -127 while scales know -128", _NEAREST,
        Edit(_SNAP, "values.clamp_(low, high)", "values.clamp_(low + (number_type == 'int'), high)")),
    bug("rounds_down", "codes", "codes are rounded down", _NEAREST, Edit(_SNAP, "values.round_()", "values.floor_()")),
    bug("cuts_off", "codes", "codes are cut off toward zero", _NEAREST, Edit(_SNAP, "values.round_()", "values.trunc_()")),
    bug("ties_up", "codes", "ties go up in place of to even", "quantizer.odd", Edit(_SNAP, "values.round_()", "values.add_(0.5).floor_()")),
    bug("ties_away_from_zero", "codes", "ties go away from zero in place of to even", "quantizer.ties",
        Edit(_SNAP, "values.round_()", "values.sign() * (values.abs() + 0.5).floor_()")),
    bug("no_clamp", "codes", "codes past the end wrap around in int8", _NEAREST,
        Edit(_SNAP, "values.clamp_(low, high)", "values if number_type == 'int' else values.clamp_(low, high)")),
    bug("fp8_overflows", "codes", "values past 448 become NaN, as a cast of older versions of torch makes them", "quantizer.nearest_codes",
        Edit(_FORMATS + "encode_", "values.clamp_(-FP8_MAX, FP8_MAX).to",
             "torch.where(values.abs() > FP8_MAX, torch.nan, values).to")),
    bug("fp8_clamped_at_240", "codes", "fp8 is clamped to the end of another fp8 format", _NEAREST,
        Edit(_FORMATS + "encode_", "clamp_(-FP8_MAX, FP8_MAX)", "clamp_(-240.0, 240.0)")),
    bug("fp8_cut_off", "codes", "fp8 drops the bits below the significand in place of rounding", _NEAREST,
        Edit(_FORMATS + "encode_", "values.clamp_(-FP8_MAX, FP8_MAX).to", "(values.clamp_(-FP8_MAX, FP8_MAX) * 0.97).to")),
    bug("fp4_steps_end_early", "codes", "fp4 takes steps of 2 from 3 on", _NEAREST,
        Edit(_FORMATS + "_round_to_fp4", "magnitude < 4, 1.0", "magnitude < 3, 1.0")),
    bug("fp4_ties_up", "codes", "ties of fp4 go up", "quantizer.ties",
        Edit(_FORMATS + "_round_to_fp4", ".round_().mul_(step)", ".add_(0.5).floor_().mul_(step)")),
    bug("fp4_loses_the_sign", "codes", "negative fp4 codes become positive", _NEAREST,
        Edit(_FORMATS + "_round_to_fp4", ".mul_(values.sign())", "")),
    bug("neighbours_scale", "codes", "each group is divided and multiplied by the scale of the group before", "quantizer.search_pays",
        Edit(_QUANTIZE + "_align", "qparams.map(lambda part: part.unsqueeze(-1))",
             "qparams.map(lambda part: part.roll(1, -1).unsqueeze(-1))")),
    bug("transposed_scale", "codes", "scales of groups are read in the order of their transpose", "quantizer.search_pays",
        Edit(_QUANTIZE + "_align", "qparams.map(lambda part: part.unsqueeze(-1))",
             "qparams.map(lambda part: part.t().reshape(part.shape).unsqueeze(-1))")),
    bug("interleaved_groups", "codes", "columns of a group lie G apart in place of side by side", "quantizer.search_pays",
        Edit(_QUANTIZE + "_align", "grouped = x.reshape(*x.shape[:-1], num_groups, args.group_size)",
             "grouped = x.reshape(*x.shape[:-1], args.group_size, num_groups).transpose(-1, -2)")),
    bug("blocks_turned", "codes", "blocks are as wide as they should be high", _NEAREST,
        Edit(_QUANTIZE + "_spread_blocks", "part.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]",
             "part.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1).roll(1, 1)[:, :columns]")),
    bug("zero_point_subtracted", "codes", "quantizing subtracts the zero point", _NEAREST,
        Edit(_QUANTIZE + "_divide", "scaled += ", "scaled -= ")),
    bug("zero_point_before_the_scale", "codes", "the zero point is added before the division", _NEAREST,
        Edit(_QUANTIZE + "_divide", "scaled += qparams.zero_point.to(x.dtype)",
             "scaled += qparams.zero_point.to(x.dtype) / qparams.scale")),
    bug("zero_point_added_back", "codes", "dequantizing adds the zero point", "quantizer.zero",
        Edit(_QUANTIZE + "_multiply_", "codes -= ", "codes += ")),
    bug("zero_point_ignored", "codes", "dequantizing forgets the zero point", "quantizer.zero",
        Edit(_QUANTIZE + "_multiply_", "codes -= qparams.zero_point.to(codes.dtype)", "pass")),
    bug("divides_to_dequantize", "codes", "dequantizing divides by the scale", "quantizer.half_step",
        Edit(_QUANTIZE + "_multiply_", "codes *= qparams.scale", "codes /= qparams.scale")),
    bug("global_scale_upside_down", "codes", "group scales are multiplied by the global scale in place of divided", _NEAREST,
        Edit(_QUANTIZE + "_align", "qparams.scale / qparams.global_scale", "qparams.scale * qparams.global_scale")),
    bug("divides_in_bfloat16", "codes", "weights are divided by their scale in their own dtype", _NEAREST,
        Edit("compressor.algorithms.rtn:nearest_codes", "quantize(weight_RC.float(), wide, args, checked=checked)",
             "quantize(weight_RC, qparams, args)")),
    bug("weight_overwritten", "codes", "the division overwrites the weight that was given", "quantizer.scales_positive",
        Edit(_QUANTIZE + "_divide", "scaled = x / qparams.scale", "scaled = x.div_(qparams.scale)")),
    bug("values_in_bfloat16", "codes", "dequantized values are rounded to bfloat16", "quantizer.half_step",
        Edit(_QUANTIZE + "dequantize", "return values.to(qparams.scale.dtype)",
             "return values.bfloat16().to(qparams.scale.dtype)")),
    bug("small_values_dropped", "codes", "what lies below three quarters of a step becomes zero", _NEAREST,
        Edit(_QUANTIZE + "_divide", "    return scaled", "    return torch.where(scaled.abs() < 0.75, scaled * 0, scaled)")),
)  # fmt: skip
