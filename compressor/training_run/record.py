"""What compression.json says of a training: everything that made the result, and how it went. No time, no path, no mode: equal runs give
equal bytes, however often they were stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from compressor.lifecycle import Report
from compressor.nn import QuantizedLayer
from compressor.pipelines.journal.fingerprint import Fingerprint, digest

_SHOWN_LOSSES = 256


def training_record(
    run: Fingerprint,
    base: Mapping[str, str],
    losses: Sequence[float],
    evaluations: Sequence[Mapping[str, Any]],
    sparsity: Mapping[str, float],
    report: Report,
    attention: str,
) -> dict[str, Any]:
    """Put together what compression.json holds.

    Args:
        run: what the result depends on.
        base: hashes of the files of the base model.
        losses: of every step.
        evaluations: on held-out data.
        sparsity: what `sparsities` gave.
        report: what the modifiers did.
        attention: where the attention mask came from.

    Returns:
        JSON types.
    """
    tokens_per_step = run["data"]["block_length"] * run["settings"]["batch_size"] * run["settings"]["accumulate"]
    training = {
        **run["settings"],
        "steps": run["steps"],
        "tokens": run["steps"] * tokens_per_step,
        "attention_mask": attention,
        "losses": _thinned(losses),
        "evaluations": [dict(entry) for entry in evaluations],
        "sparsity": dict(sparsity),
    }
    return {
        "base": dict(base),
        "data": run["data"],
        "eval_data": run["eval_data"],
        "recipe": run["recipe"],
        "seed": run["seed"],
        "versions": run["versions"],
        "fingerprint": digest(run),
        "training": training,
        **report.to_dict(),
    }


def sparsities(model: nn.Module) -> dict[str, float]:
    """Count the zeros of all matrices.

    Args:
        model: the trained model.

    Returns:
        Share of zeros: of all matrices together under `all`, and of each that has at least one in a hundred, by dotted module name.
    """
    shares, zeros, total = {}, 0, 0
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLayer):
            weight = module.dequantized_weight()
        elif isinstance(found := module._parameters.get("weight"), nn.Parameter) and found.dim() >= 2:
            weight = found.detach()
        else:
            continue
        count = int((weight == 0).sum())
        zeros, total = zeros + count, total + weight.numel()
        if count * 100 >= weight.numel():
            shares[name] = count / weight.numel()
    return {"all": zeros / max(total, 1), **shares}


def _thinned(losses: Sequence[float]) -> dict[str, Any]:
    """At most 256 values, each the mean of an interval of steps."""
    every = max(1, -(-len(losses) // _SHOWN_LOSSES))
    parts = [losses[at : at + every] for at in range(0, len(losses), every)]
    return {"every": every, "means": [sum(part) / len(part) for part in parts]}
