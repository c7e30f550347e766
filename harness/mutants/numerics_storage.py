"""Planted bugs in packers, observers and runtime layers."""

from __future__ import annotations

from harness.mutants.in_place import bug
from harness.mutants.patches import Edit, Mutant, Table

_PACK = "compressor.numerics.packing:"
_FP4 = "compressor.numerics.packing_fp4:"
_TRIP = "packer.round_trip"

PACKER_MUTANTS: tuple[Mutant, ...] = (
    bug("nibbles_packed_swapped", "packers", "packing puts the first code of a pair into the upper nibble", _TRIP,
        Edit(_FP4 + "pack_fp4", "nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)", "nibbles[..., 1::2] | (nibbles[..., 0::2] << 4)")),
    bug("nibbles_swapped_both_ways", "packers", "packing and unpacking agree on the wrong nibble", "packer.layout",
        Edit(_FP4 + "pack_fp4", "nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)", "nibbles[..., 1::2] | (nibbles[..., 0::2] << 4)"),
        Edit(_FP4 + "unpack_fp4", "(packed & 0x0F, packed >> 4)", "(packed >> 4, packed & 0x0F)")),
    bug("fp4_table_out_of_order", "packers", "3 and 4 have each other's nibble, both ways", "packer.layout",
        Table(_FP4 + "FP4_VALUES", lambda right: (*right[:5], 4.0, 3.0, right[7]))),
    bug("fp4_loses_signs", "packers", "the sign of fp4 is not unpacked", _TRIP,
        Edit(_FP4 + "_decoding", "torch.cat((positive, -positive))", "torch.cat((positive, positive))")),
    bug("no_straddling", "packers", "the part of a code that lies in the next word is lost", _TRIP,
        Edit(_PACK + "pack_int32", "if shift + num_bits > _WORD:", "if shift + num_bits > 2 * _WORD:")),
    bug("straddles_by_one_less", "packers", "the upper part of a straddling code is shifted by one bit", _TRIP,
        Edit(_PACK + "pack_int32", "code >> (_WORD - shift)", "code >> (_WORD - shift - 1)")),
    bug("upper_part_not_masked", "packers", "unpacking takes bits of the next code along", _TRIP,
        Edit(_PACK + "unpack_int32", "((1 << num_high) - 1)", "((1 << num_bits) - 1)")),
    bug("sign_extended", "packers", "unpacking shifts the sign of the word in", _TRIP,
        Edit(_PACK + "unpack_int32", "& ((1 << min(num_bits, _WORD - shift)) - 1)", "& 0xFF")),
    bug("offset_forgotten", "packers", "unpacked codes stay unsigned", _TRIP,
        Edit(_PACK + "unpack_int32", "code - (1 << (num_bits - 1))", "code")),
    bug("codes_backwards", "packers", "codes of a repeat lie in reverse order, both ways", "packer.round_trip",
        Edit(_PACK + "pack_int32", "unsigned[..., i].to(torch.int32)", "unsigned[..., per_repeat - 1 - i].to(torch.int32)"),
        Edit(_PACK + "unpack_int32", "codes[..., i] = ", "codes[..., per_repeat - 1 - i] = ")),
    bug("offset_by_twos_complement", "packers", "codes are stored in two's complement, both ways", "packer.layout",
        Edit(_PACK + "pack_int32", "code = unsigned[..., i].to(torch.int32)", "code = unsigned[..., i].to(torch.int32) ^ offset"),
        Edit(_PACK + "unpack_int32", "codes[..., i] = code - (1 << (num_bits - 1))",
             "codes[..., i] = (code ^ (1 << (num_bits - 1))) - (1 << (num_bits - 1))")),
    bug("rows_not_turned_back", "packers", "packing along the rows returns columns", _TRIP,
        Edit(_PACK + "pack_int32", "pack_int32(codes.transpose(-1, -2), num_bits).transpose(-1, -2).contiguous()",
             "pack_int32(codes.transpose(-1, -2), num_bits).contiguous()")),
    bug("last_word_dropped", "packers", "a word that is not full is dropped", _TRIP,
        Edit(_PACK + "pack_int32", "num_words = math.ceil(codes.shape[-1] * num_bits / _WORD)",
             "num_words = max(1, codes.shape[-1] * num_bits // _WORD)")),
    bug("word_too_many", "packers", "every row ends with an empty word, both ways", _TRIP,
        Edit(_PACK + "pack_int32", "words.flatten(-2)[..., :num_words]", "functional.pad(words.flatten(-2)[..., :num_words], (0, 1))")),
    bug("unfit_codes_are_cut", "packers", "a code that does not fit spills into its neighbour", "packer.refuses_unfit",
        Edit(_PACK + "pack_int32", "if lowest < -offset or highest >= offset:", "if lowest < -128 or highest > 127:")),
    bug("highest_code_may_be_one_more", "packers", "the bound of codes is off by one", "packer.refuses_unfit",
        Edit(_PACK + "pack_int32", "highest >= offset", "highest > offset")),
)  # fmt: skip

_OBSERVERS = "compressor.numerics.observers:"
_UPDATE = _OBSERVERS + "MinMaxObserver.update"
_WIDER = "torch.minimum(min_val, self._range[0]), torch.maximum(max_val, self._range[1])"

OBSERVER_MUTANTS: tuple[Mutant, ...] = (
    bug("last_batch_only", "observers", "only the last batch counts", "observer.scale_rule", Edit(_UPDATE, _WIDER, "min_val, max_val")),
    bug("first_batch_only", "observers", "only the first batch counts", "observer.scale_rule",
        Edit(_UPDATE, _WIDER, "self._range[0], self._range[1]")),
    bug("mean_of_batches", "observers", "the range is averaged over batches in place of widened", "observer.scale_rule",
        Edit(_UPDATE, _WIDER, "(min_val + self._range[0]) / 2, (max_val + self._range[1]) / 2")),
    bug("moving_average", "observers", "the range is a moving average", "observer.scale_rule",
        Edit(_UPDATE, _WIDER, "0.1 * min_val + 0.9 * self._range[0], 0.1 * max_val + 0.9 * self._range[1]")),
    bug("minimum_of_maxima", "observers", "the smaller of two maxima is kept", "observer.scale_rule",
        Edit(_UPDATE, "torch.maximum(max_val, self._range[1])", "torch.minimum(max_val, self._range[1])")),
    bug("nan_is_observed", "observers", "a batch with NaN or infinity is observed", "observer.refuses_nonfinite",
        Edit(_OBSERVERS + "_check_range", "if not bool(", "if name == '' and not bool(")),
    bug("state_turned_around", "observers", "minimum and maximum change places in a saved state", "observer.scale_rule",
        Edit(_OBSERVERS + "MinMaxObserver.state", '"min": self._range[0], "max": self._range[1]',
             '"min": self._range[1], "max": self._range[0]')),
    bug("range_of_the_first_row", "observers", "only the first sequence of a batch is looked at", "observer.scale_rule",
        Edit(_OBSERVERS + "_extremes", "torch.aminmax(x)", "torch.aminmax(x[:1])")),
    bug("no_floor_under_activations", "observers", "batches of zeros give a scale of zero", "observer.scales_positive",
        Edit("compressor.numerics.qparams:calculate_qparams", "torch.where(scale == 0,", "torch.where(scale < 0,")),
    bug("absolute_range", "observers", "the minimum is taken for minus the maximum", "observer.scale_rule",
        Edit(_OBSERVERS + "_extremes", "return min_val.reshape(1), max_val.reshape(1)", "return -max_val.reshape(1), max_val.reshape(1)")),
)  # fmt: skip

_LINEAR = "compressor.nn.quantized_linear:QuantizedLinear."
_STORAGE = "compressor.nn.storage:"
_STORED = "layer.weight_as_calibrated"
_PRODUCT = "layer.product"

LAYER_MUTANTS: tuple[Mutant, ...] = (
    bug("bias_dropped", "layers", "the bias is not added", _PRODUCT,
        Edit(_LINEAR + "forward", "self.dequantized_weight(), self.bias)", "self.dequantized_weight(), None)")),
    bug("bias_dropped_natively", "layers", "the bias is not added where codes are multiplied", _PRODUCT,
        Edit(_LINEAR + "_multiply_codes", "product if self.bias is None else product + self.bias.float()", "product")),
    bug("input_not_quantized", "layers", "the input is multiplied as it is", _PRODUCT,
        Edit(_LINEAR + "forward", "x = fake_quantize(x, self._input_qparams(x, args), args)", "pass")),
    bug("static_input_scale_ignored", "layers", "a static input takes the scale of each batch", _PRODUCT,
        Edit(_LINEAR + "_input_qparams", 'QParams(self.get_buffer("input_scale"), getattr(self, "input_zero_point", None))',
             "dynamic_qparams(x, args.model_copy(update={'dynamic': True}), None)")),
    bug("g_idx_ignored", "layers", "columns are dequantized as if their groups lay in order", _STORED,
        Edit("compressor.nn.layer:QuantizedLayer.dequantized_weight", 'g_idx=getattr(self, "weight_g_idx", None)', "g_idx=None")),
    bug("global_scale_forgotten", "layers", "the weight of NVFP4 is not divided by its global scale", _STORED,
        Edit(_STORAGE + "Fp4Weight.weight_qparams", 'getattr(self, "weight_global_scale", None)', "None")),
    bug("scale_stored_in_float16", "layers", "packed layers store their scales in float16", _STORED,
        Edit(_STORAGE + "PackedWeight._weight_buffers", '"weight_scale": qparams.scale.clone()',
             '"weight_scale": qparams.scale.half().to(qparams.scale.dtype)')),
    bug("zero_point_not_unpacked", "layers", "packed layers forget their zero points", _STORED,
        Edit(_STORAGE + "PackedWeight.weight_qparams", "if packed is None or",
             "return QParams(self.weight_scale, None)\n    if packed is None or")),
    bug("zero_point_packed_from_the_end", "layers", "zero points of packed layers are stored in reverse order of rows", _STORED,
        Edit(_STORAGE + "PackedWeight._weight_buffers", "pack_int32(qparams.zero_point, bits, dim=0)",
             "pack_int32(qparams.zero_point.flip(0), bits, dim=0)")),
    bug("plain_zero_point_kept_away", "layers", "the zero point of the input takes the wrong sign where codes are multiplied", _PRODUCT,
        Edit("compressor.numerics.products:_without_zero_points", "product -= zx * weight_RC", "product += zx * weight_RC")),
    bug("codes_times_one_scale", "layers", "where codes are multiplied, all rows take the scale of the first", _PRODUCT,
        Edit("compressor.numerics.products:_spread_rows", "part.reshape(-1, part.shape[-1]).expand(num_rows, -1)",
             "part.reshape(-1, part.shape[-1])[:1].expand(num_rows, -1)")),
    bug("mx_exponent_off_by_one", "layers", "stored MX exponents are read one too high", _STORED,
        Edit("compressor.numerics.mx:decode_mx_scale", "stored.to(torch.int32) - _BIAS", "stored.to(torch.int32) + 1 - _BIAS")),
    bug("dtype_lost", "layers", "the output is float32 whatever the input", _PRODUCT,
        Edit(_LINEAR + "_multiply_codes", ".to(x.dtype)", ".float()")),
    bug("int8_product_wraps", "layers", "sums of int8 products wrap around at 16 bits", _PRODUCT,
        Edit("compressor.numerics.products:code_product", "product = x_NC.double() @ weight_RC.double().t()",
             "product = (x_NC.double() @ weight_RC.double().t()).to(torch.int16)"),
        Edit("compressor.numerics.products:code_product", "return torch._int_mm(x_NC.contiguous(), weight_RC.contiguous().t())",
             "return torch._int_mm(x_NC.contiguous(), weight_RC.contiguous().t()).to(torch.int16)")),
    bug("formats_follow_the_model", "layers", "fp8 codes and scales are widened when a layer goes to another dtype", "layer.moves",
        Edit("compressor.nn.layer:QuantizedLayer.kept_dtypes", "frozenset(named & self._buffers.keys())", "frozenset()")),
    bug("plain_scale_in_bfloat16", "layers", "plain layers keep their scales in bfloat16", _STORED,
        Edit(_STORAGE + "PlainWeight._weight_buffers", "else qparams.scale.clone()",
             "else qparams.scale.bfloat16().to(qparams.scale.dtype)")),
)  # fmt: skip
