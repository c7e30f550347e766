"""Several ways to one prediction: padding, batch, cache, dtype, device, and a folder that was saved again. All but the last in float32.

B batch, T positions, V vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from compressor.model.folder import some
from compressor.model.targets import text_config
from compressor.nn.attention.kv_cache import cache_argument
from harness.release.candidate import Candidate, Check, load_wide, rounding_modules
from harness.reporting.record import CheckRecord, Claim
from harness.reporting.verdict import Outcome
from harness.validation.loading import load_compressed, save_again

LEFT = Claim("invariance.padding_left", "Padding before a prompt changes no prediction")
RIGHT = Claim("invariance.padding_right", "Padding behind a prompt changes no prediction")
BATCH = Claim("invariance.batch", "A prompt has the same predictions alone and in a batch")
CACHE = Claim("invariance.cache", "Token by token with a cache come the predictions of one forward")
DTYPE = Claim("invariance.dtype", "In float32 it predicts what it predicts in the dtype of its config")
DEVICE = Claim("device.cuda", "The GPU predicts what the CPU predicts")
RELOAD = Claim("reload.logits", "Saved with save_pretrained and loaded again, it predicts the same, bit for bit")

_SAME = 1e-5
"""Of a product in float32 that is computed in another order; a code that is another one costs a hundred times as much."""
_STEPS = 4
"""Tokens that come one by one behind a cache."""
_WINDOWS = ("sliding_window", "attention_chunk_size")
"""Settings of a config behind which another path begins."""
Way = Callable[[torch.nn.Module, Candidate], tuple[torch.Tensor, torch.Tensor]]
"""A model and the prompts -> logits of one way and of the other, of equal shape."""


def deviation(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference relative to the largest value.

    Args:
        one: float, any shape.
        other: of the same shape.

    Returns:
        The ratio; infinite where either holds what is not finite.
    """
    if not bool(torch.isfinite(one).all() & torch.isfinite(other).all()):
        return float("inf")
    return ((one - other).abs().max() / one.abs().max().clamp(min=1e-30)).item()


def _run(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def _padded(model: torch.nn.Module, candidate: Candidate, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Each prompt alone, and all of them padded to the length of the longest and four more, the last tokens behind a cache.

    Without a cache transformers takes positions that start again for another text, and masks pads of which the model knows nothing.
    """
    prompts = candidate.prompts
    lengths = [prompt.shape[1] for prompt in prompts]
    width, num_steps = max(lengths) + 4, min(_STEPS, min(lengths) - 1)
    mask = torch.ones(len(prompts), width, dtype=torch.long, device=candidate.device)
    ids = torch.full_like(mask, _padding_token(model))
    for row, prompt in enumerate(prompts):
        start = 0 if left else lengths[row] - num_steps
        mask[row, start : start + width - lengths[row]] = 0
        ids[row, mask[row].bool()] = prompt[0]
    alone = torch.cat([_run(model, prompt)[0] for prompt in prompts])
    return alone, _stepped(model, ids, mask, num_steps)[mask.bool()]


def _stepped(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Logits [B, T, V] of tokens [B, T] that are asked for as `generate` does: all but the last steps at once, those behind a cache."""
    runner: Any = model
    positions, first = (mask.cumsum(1) - 1).clamp(min=0), ids.shape[1] - num_steps
    placed = "position_ids" in inspect.signature(runner.forward).parameters  # ALiBi has none
    cache, logits, key = None, [], cache_argument(model)
    for start, stop in itertools.pairwise([0, *range(first, ids.shape[1] + 1)]):
        where = {"position_ids": positions[:, start:stop]} if placed else {}
        out = runner(input_ids=ids[:, start:stop], attention_mask=mask[:, :stop], use_cache=True, **{key: cache}, **where)
        cache = out[key]
        logits.append(out.logits.float())
    return torch.cat(logits, dim=1)


def _padding_token(model: torch.nn.Module) -> int:
    token = getattr(model.config, "pad_token_id", None)
    return 0 if token is None else int(token)


def _left(model: torch.nn.Module, candidate: Candidate) -> tuple[torch.Tensor, torch.Tensor]:
    return _padded(model, candidate, left=True)


def _right(model: torch.nn.Module, candidate: Candidate) -> tuple[torch.Tensor, torch.Tensor]:
    return _padded(model, candidate, left=False)


def _batch(model: torch.nn.Module, candidate: Candidate) -> tuple[torch.Tensor, torch.Tensor]:
    length = min(prompt.shape[1] for prompt in candidate.prompts)
    rows = [prompt[:, :length] for prompt in candidate.prompts]
    return torch.cat([_run(model, row) for row in rows]), _run(model, torch.cat(rows))


def _cache(model: torch.nn.Module, candidate: Candidate) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt token by token, and steps at several lengths of the long context."""
    prompt, long = candidate.prompts[0], candidate.long_row
    whole, steps = [_run(model, prompt)], [_stepped(model, prompt, torch.ones_like(prompt), prompt.shape[1] - 1)]
    predictions = _run(model, long)
    for stop in _stops(model, long.shape[1]):
        steps.append(_stepped(model, long[:, :stop], torch.ones_like(long[:, :stop]), _STEPS)[:, -_STEPS:])
        whole.append(predictions[:, stop - _STEPS : stop])
    return torch.cat(whole, dim=1), torch.cat(steps, dim=1)


def _stops(model: torch.nn.Module, length: int) -> list[int]:
    """Numbers of tokens behind which a cache is looked at: half of the steps before each power of two and window, and the last ones."""
    config: Any = model.config
    own = [getattr(text_config(config), name, None) for name in _WINDOWS]
    edges = [2**power for power in range(4, length.bit_length())] + [edge for edge in own if edge]
    return sorted({edge + _STEPS // 2 for edge in edges if _STEPS < edge + _STEPS // 2 < length} | {length} - set(range(_STEPS + 1)))


def _check(claim: Claim, way: Way) -> Check:
    """A way that the base goes too: where it parts from itself, four times as much is let pass, and told."""

    def look(candidate: Candidate) -> CheckRecord:
        own, found = (deviation(*way(model, candidate)) for model in (candidate.wide_base, candidate.wide_model))
        limit = max(candidate.policy.generation.max_deviation, 4 * own)
        again = partial(_parted, way, candidate.wide_model, candidate)
        return _judged(claim, found, limit, {"base": own, "compressed": found}, candidate, again)

    return Check(claim, look)


def _look_at_caches(candidate: Candidate) -> CheckRecord:
    record, longest = _check(CACHE, _cache).look(candidate), candidate.long_row.shape[1] - 1
    told = record.summary
    if record.outcome is Outcome.PASS:
        told += f", on caches of up to {longest} tokens; the model has {candidate.num_positions} positions"
    return replace(record, summary=told, evidence={**record.evidence, "longest cache": longest})


def _parted(way: Way, model: torch.nn.Module, candidate: Candidate) -> float:
    with _without_rounding(model):
        return deviation(*way(model, candidate))


def _judged_by_weights(claim: Claim, found: float, limit: float, evidence: dict[str, float], candidate: Candidate) -> CheckRecord:
    """Judge a checkpoint that rounds activations: one that lies at a tie falls either way, and no two ways to a prediction are equal.

    So the ways are compared where nothing is rounded but the weights, each layer must round a token by itself, and two roundings must not
    part by more than four times what one of them moves.
    """
    model, prompt = candidate.wide_model, candidate.prompts[0]
    rounded = _run(model, prompt)
    with _without_rounding(model):
        moved = deviation(_run(model, prompt), rounded)
    joint = [name for name, module in rounding_modules(model).items() if _looks_beside(module)]
    told = f"{evidence['compressed']:.1e} of the largest logit, and {found:.1e} where activations are not rounded"
    findings = [f"the two ways part by {told}"] if found > limit else []
    if evidence["compressed"] > 4 * moved:
        findings.append(f"the two ways part by {told}; rounding activations moves no more than {moved:.1e}")
    if joint:
        findings.append(f"the two ways part by {told}: a token is rounded by what stands beside it ({some(joint)})")
    told += ": those at a tie fall either way"
    measured = evidence | {"without_rounding": found, "rounding": moved}
    return claim.found(findings, told, limit=f"<= {limit:.1e}", evidence={"deviation": measured})


@contextlib.contextmanager
def _without_rounding(model: torch.nn.Module) -> Iterator[None]:
    """Leave activations as they are; the weights are those of the checkpoint."""
    kept: dict[Any, Any] = {module: module.quantization_scheme for module in rounding_modules(model).values()}
    nothing = {"input_activations": None, "output_activations": None}
    try:
        for module, scheme in kept.items():
            module.quantization_scheme = scheme.model_copy(update=nothing)
        yield
    finally:
        for module, scheme in kept.items():
            module.quantization_scheme = scheme


def _looks_beside(module: Any) -> bool:
    """Whether a module rounds some tokens otherwise where large ones stand beside them."""
    if not isinstance(module, torch.nn.Linear):
        activations = (module.quantization_scheme.input_activations, module.quantization_scheme.output_activations)
        return any(one is not None and one.dynamic is True and one.strategy == "tensor" for one in activations)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(1, 6, module.in_features, generator=generator).to(module.weight)
    beside = torch.cat([tokens, 100 * tokens.flip(1)], dim=1), torch.cat([tokens, 100 * tokens])
    return any(deviation(module(tokens)[0], module(more)[0, :6]) > _SAME for more in beside)


def _judged(
    claim: Claim, found: float, limit: float, evidence: dict[str, float], candidate: Candidate, again: Callable[[], float]
) -> CheckRecord:
    """Hold a deviation against its limit; above it `again` looks once more at a model that rounds activations, without that."""
    told = f"{found:.1e} of the largest logit"
    if limit >= 1:
        return claim.record(Outcome.INCONCLUSIVE, f"the base parts from itself by {evidence['base']:.1e}; nothing can be told")
    if limit < found < float("inf") and rounding_modules(candidate.wide_model):
        return _judged_by_weights(claim, again(), limit, evidence, candidate)
    findings = [] if found <= limit else [f"the two ways part by {told}"]
    return claim.found(findings, told, limit=f"<= {limit:.1e}", evidence={"deviation": evidence})


def _dtype(candidate: Candidate) -> CheckRecord:
    prompt, wide, own = candidate.prompts[0], candidate.wide_model, candidate.model

    def parted() -> float:
        with _without_rounding(wide), _without_rounding(own):
            return deviation(_run(wide, prompt), _run(own, prompt))

    found = deviation(_run(wide, prompt), _run(own, prompt))
    return _judged(DTYPE, found, candidate.policy.generation.max_dtype_deviation, {"compressed": found}, candidate, parted)


def _device(candidate: Candidate) -> CheckRecord:
    if not torch.cuda.is_available():
        return DEVICE.skipped("not run: this machine has no GPU")
    prompt, limit = candidate.prompts[0], candidate.policy.generation.max_dtype_deviation

    def parted(*, rounds: bool) -> float:
        logits = []
        for device in ("cpu", "cuda"):
            model = load_wide(candidate.compressed).to(device)
            with contextlib.nullcontext() if rounds else _without_rounding(model):
                logits.append(_run(model, prompt.to(device)).cpu())
        return deviation(*logits)

    found = parted(rounds=True)
    return _judged(DEVICE, found, limit, {"compressed": found}, candidate, partial(parted, rounds=False))


def _reload(candidate: Candidate) -> CheckRecord:
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder) / "again"
        options = save_again(candidate.compressed, again)
        attempt = load_compressed(again)
        if attempt.model is None:
            return RELOAD.found(attempt.problems or ["it does not load again"], "")
        prompt = candidate.prompts[0]
        before, after = (_run(model, prompt) for model in (candidate.model, attempt.model.to(candidate.device)))
    differ = int((before != after).sum())
    told = f"{before.numel()} logits are equal"
    if options:
        told += "; saved as floats, with save_original_format=False: what transformers dequantizes while it loads it cannot write back"
    return RELOAD.found([f"{differ} of {before.numel()} logits are others"] if differ else [], told)


CHECKS = (
    *(_check(LEFT, _left), _check(RIGHT, _right), _check(BATCH, _batch), Check(CACHE, _look_at_caches)),
    *(Check(DTYPE, _dtype), Check(DEVICE, _device), Check(RELOAD, _reload)),
)
