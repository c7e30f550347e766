"""Goldens of what pruning, scales, ranges, experts and rotations decide, on the stored weight and Hessian of the solvers.

What goes by comparing numbers that IEEE 754 fixes (Wanda, magnitude, the choice of experts) is held bit by bit everywhere. The rest sums or
takes powers in the machine's own order: there the decisions are held, and the numbers up to that order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from compressor.algorithms.autoround import LearnedRounding
from compressor.algorithms.clipping import search_clipping
from compressor.algorithms.pruning.magnitude import Blocks, Pattern, pruned_weights
from compressor.algorithms.pruning.reap import ExpertSaliency, kept_experts
from compressor.algorithms.pruning.refit import SentTokens, refit
from compressor.algorithms.pruning.sparsegpt import prune_sparsegpt
from compressor.algorithms.pruning.wanda import layer_sparsities, outlier_share, prune_wanda, scores
from compressor.algorithms.rotations import make_rotation
from compressor.algorithms.smoothing import equalizing_scales, search_awq, smooth_scales
from compressor.numerics import QuantizationArgs, weight_qparams
from harness.tolerance import T1, T3, Tier
from tests.reference_model.layer_cases import Result
from tests.reference_model.modifier_cases import by_outliers, equalized, kept_zeros, learned_turns

Inputs = Mapping[str, Tensor]
_NUM_EXPERTS, _NUM_TOKENS = 8, 24
_INT4 = QuantizationArgs(num_bits=4, group_size=64)
_INT4_ASYM = QuantizationArgs(num_bits=4, group_size=32, symmetric=False)
_FP8_BLOCKS = QuantizationArgs(type="float", num_bits=8, strategy="block", block_structure=(20, 80))  # the last ones are not full
_NVFP4 = QuantizationArgs(type="float", num_bits=4, strategy="tensor_group", group_size=16)
_OBSERVED = {
    "mse": (_INT4, _NVFP4),
    "imatrix_mse": (_INT4, _INT4_ASYM),
    "nvfp4_expanded_mse": (_NVFP4,),
    "nvfp4_expanded_imatrix": (_NVFP4,),
}
_CLOSE = T3(max_relative_error=1e-4)
_RANGES = ("kept symmetric", "kept asymmetric")
REASON = "sums, powers and roots in the machine's own order; what is decided by them is the same on one platform"


def elsewhere(result: Result) -> dict[str, Tier] | None:
    """Return the tiers on another platform, where a few weights in a hundred may change places with their neighbours in an order.

    Args:
        result: of a case.

    Returns:
        A tier for every tensor; None where every bit counts everywhere.
    """
    if not result.reason:
        return None
    zeros = {name: T3(max_relative_error=0.05) for name in ("gone", "values") if "gone" in result.tensors}
    counts = {name: T3(max_relative_error=0.02) for name in ("zeros",) if name in result.tensors}
    ranges = {name: T3(max_relative_error=0.01) for name in _RANGES if name in result.tensors}
    return {"*": T3(max_relative_error=1e-3), **zeros, **counts, **ranges}


def _sparsegpt(inputs: Inputs, sparsity: float, pattern: Pattern | None) -> Result:
    (found,) = prune_sparsegpt([inputs["weight"]], inputs["hessian"], sparsity, pattern, block_size=64)
    tensors = {"gone": _as_codes(found.weight_RC == 0), "values": found.weight_RC, "error": _number(found.relative_error)}
    (smallest,) = pruned_weights([inputs["weight"]], sparsity, pattern)
    decoys = {"by magnitude": inputs["weight"].masked_fill(smallest, 0.0)}
    return Result(tensors, inputs, {"values": T3(max_relative_error=2e-3), "error": _CLOSE}, decoys, REASON)


def _wanda(inputs: Inputs, sparsity: float, pattern: Pattern | None) -> Result:
    mean_square_C = inputs["hessian"].diagonal() / 2
    return Result({"gone": _as_codes(prune_wanda(inputs["weight"], mean_square_C, sparsity, pattern))}, inputs)


def _owl(inputs: Inputs) -> Result:
    """Layers of two matrices each, one of which meets larger inputs, and shares that take one layer to its end."""
    found_RC = scores(inputs["weight"], inputs["hessian"].diagonal() / 2)
    layers = [layer.split([96, 96], dim=1) for layer in (found_RC * torch.tensor([1.0, 3.0]).repeat_interleave(96)).split([8, 24, 16])]
    shares, sizes = [outlier_share(layer, 3.0) for layer in layers], [sum(part.numel() for part in layer) for layer in layers]
    tensors = {f"sparsities of {wanted}": layer_sparsities(shares, sizes, wanted, 0.08) for wanted in (0.6, 0.97)}
    made = {name: torch.tensor(found, dtype=torch.float64) for name, found in tensors.items()}
    return Result({"shares": torch.tensor(shares), **made}, inputs)


def _magnitude(inputs: Inputs, sparsity: float, pattern: Pattern | Blocks | None) -> Result:
    parts = list(inputs["weight"].split([16, 32]))
    each = pruned_weights(parts, sparsity, pattern)
    tensors = {"gone": _as_codes(torch.cat(each))}
    if not isinstance(pattern, Blocks):
        tensors["gone of all together"] = _as_codes(torch.cat(pruned_weights(parts, sparsity, pattern, together=True)))
    return Result(tensors, inputs)


def _scales(inputs: Inputs, of: Callable[[Tensor, Tensor], Tensor]) -> Result:
    """Of channels of which one meets no activations, one next to none, and one no weights."""
    act_C, weight_C = inputs["hessian"].diagonal().sqrt().clone(), inputs["weight"].float().abs().amax(0)
    act_C[5], act_C[7], weight_C[11] = 0.0, 1e-9, 0.0
    return Result({"scales": of(act_C, weight_C)}, inputs, {"scales": T1(16)}, reason=REASON)


def _awq(inputs: Inputs) -> Result:
    weights, mean_C = inputs["weight"].split([16, 32]), inputs["hessian"].diagonal().sqrt() / 2
    tensors = {}
    for duo in (True, False):
        found = search_awq(weights, [_INT4, _INT4_ASYM], inputs["hessian"], mean_C, n_grid=10, duo_scaling=duo)
        tensors |= {f"scales duo={duo}": found.scales_C, f"error duo={duo}": torch.tensor([found.error_before, found.error])}
    return Result(tensors, inputs, dict.fromkeys(tensors, _CLOSE), reason=REASON)


def _clipping(inputs: Inputs) -> Result:
    tensors = {}
    for name, args in ((" symmetric", _INT4), (" asymmetric", _INT4_ASYM)):
        found = search_clipping(inputs["weight"], args, inputs["hessian"])
        tensors |= {f"kept{name}": found.kept_RG, f"error{name}": torch.tensor([found.error_before, found.error])}
    return Result(tensors, inputs, {name: _CLOSE for name in tensors if name.startswith("error")}, reason=REASON)


def _observed(inputs: Inputs) -> Result:
    """Scales of ranges that are narrower, or in fp4 wider, than the weights; the inputs of some columns are far larger."""
    importance_C = inputs["hessian"].diagonal() ** 3
    tensors = {}
    for observer, args in ((name, args) for name, of in _OBSERVED.items() for args in of):
        args = args.model_copy(update={"observer": observer})
        found = weight_qparams(inputs["weight"].float(), args, importance_C=importance_C)
        tensors[f"{observer}, {args.type}, {'' if args.symmetric else 'a'}symmetric"] = found.scale
    return Result(tensors, inputs, reason=REASON)


def _learned(inputs: Inputs, args: QuantizationArgs) -> Result:
    """Eight steps against gradients that are the distance from a shifted weight, so that each sign is the same on every machine."""
    weight_RC = inputs["weight"].float()
    wanted_RC = weight_RC.roll(1, 1) * 0.25 + weight_RC * 0.75
    global_scale = weight_qparams(weight_RC, args, "weight").global_scale
    rounding = LearnedRounding(weight_RC, args, global_scale, learn_range=True)
    for step in range(8):
        rounding.step(rounding.values() - wanted_RC, 0.125 * (1 - step / 8), 1 / 64)
    qparams = rounding.qparams()
    offsets, low, high = rounding.state()
    tensors = {"codes": rounding.codes().float(), "scale": qparams.scale, "offsets": offsets, "low": low, "high": high}
    return Result(tensors, inputs, {"scale": T1(4)}, reason=REASON)


def _reap(inputs: Inputs) -> Result:
    saliency = ExpertSaliency(_NUM_EXPERTS)
    for expert, (outputs_NC, weights_N) in enumerate(_expert_tokens(inputs)):
        saliency.add(expert, weights_N[:9], outputs_NC[:9])
        if expert != 2:
            saliency.add(expert, weights_N[9:], outputs_NC[9:])
    found_E = saliency.value()
    tensors = {
        "saliency": found_E,
        "kept": torch.tensor(kept_experts(found_E, 4)),
        "kept in groups": torch.tensor(kept_experts(found_E, 4, 4)),
    }
    return Result(tensors, inputs, {"saliency": T3(max_relative_error=1e-6)}, reason=REASON)


def _refit(inputs: Inputs) -> Result:
    weights = [one.float() for one in inputs["weight"].split(12)]  # of four experts, [12, 192]
    tokens_NC = inputs["hessian"][:120, :]
    sent = [
        SentTokens(rows_n, tokens_NC[rows_n])
        for rows_n in (torch.arange(first, 120, step) for first, step in ((3, 5), (0, 3), (0, 1), (1, 2)))
    ]
    missing_NC = inputs["hessian"][60:180, 40:52].clone()
    moved = refit(sent, weights, missing_NC, 0.01, 3)
    return Result({"values": torch.stack(moved), "missing": missing_NC}, inputs, {"*": T3(max_relative_error=1e-3)}, reason=REASON)


def _rotations(inputs: Inputs) -> Result:
    tensors = {}
    for size in (12, 48, 64, 192):  # a core alone, a core of 12 and doublings, doublings alone, both again
        for keeps_mean in (False, True):
            rotation = make_rotation("random-hadamard", size, seed=3, keeps_mean=keeps_mean)
            row_1C = inputs["weight"].double()[:1]
            turns = [rotation.turn(row_1C), rotation.turn(row_1C, back=True)]
            tensors[f"turned by {size}{', keeping means' if keeps_mean else ''}"] = torch.cat(turns)
    return Result(tensors, inputs, dict.fromkeys(tensors, T3(max_relative_error=1e-12)), reason=REASON)


def _expert_tokens(inputs: Inputs) -> list[tuple[Tensor, Tensor]]:
    """Outputs [24, 192] and weights of the router [24] of each expert."""
    outputs = inputs["hessian"].split(_NUM_TOKENS)
    return [(outputs_NC, inputs["weight"][expert, :_NUM_TOKENS].float()) for expert, outputs_NC in enumerate(outputs)]


def _as_codes(mask: Tensor) -> Tensor:
    return mask.to(torch.int8)


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


ALGORITHMS: Mapping[str, Callable[[Inputs], Result]] = {
    "SparseGPT": lambda inputs: _sparsegpt(inputs, 0.5, None),
    "SparseGPT 2 of 4": lambda inputs: _sparsegpt(inputs, 0.5, Pattern(2, 4)),
    "Wanda": lambda inputs: _wanda(inputs, 0.5, None),
    "Wanda 2 of 4": lambda inputs: _wanda(inputs, 0.5, Pattern(2, 4)),
    "OWL": _owl,
    "OWL of a model": by_outliers,
    "magnitude": lambda inputs: _magnitude(inputs, 0.5, None),
    "magnitude 2 of 4": lambda inputs: _magnitude(inputs, 0.4, Pattern(2, 4)),
    "magnitude in blocks": lambda inputs: _magnitude(inputs, 0.5, Blocks(4, 8)),
    "kept zeros": kept_zeros,
    "SmoothQuant": lambda inputs: _scales(inputs, lambda act_C, weight_C: smooth_scales(act_C, weight_C, 0.8)),
    "logarithmic equalization": lambda inputs: _scales(inputs, equalizing_scales),
    "logarithmic equalization of a model": equalized,
    "AWQ": _awq,
    "AWQ ranges": _clipping,
    "observed ranges": _observed,
    "AutoRound": lambda inputs: _learned(inputs, _INT4_ASYM),
    "AutoRound in blocks of fp8": lambda inputs: _learned(inputs, _FP8_BLOCKS),
    "AutoRound of NVFP4": lambda inputs: _learned(inputs, _NVFP4),
    "REAP": _reap,
    "REAP refit": _refit,
    "rotations": _rotations,
    "learned rotations": learned_turns,
}
