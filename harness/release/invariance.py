"""Several ways to one prediction: padding, batch, cache, dtype, device, and a folder that was saved again. All but the last in float32.

B batch, T positions, V vocabulary.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from compressor.model.folder import some
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


def _run(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids, attention_mask=mask, **({"use_cache": False} | options)).logits
    return logits.float()


def _padded(model: torch.nn.Module, candidate: Candidate, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Each prompt alone, and all of them padded to the length of the longest and four more."""
    prompts = candidate.prompts
    width = max(prompt.shape[1] for prompt in prompts) + 4
    ids = torch.full((len(prompts), width), _padding_token(model), dtype=torch.long, device=candidate.device)
    mask = torch.zeros_like(ids)
    places = [slice(width - one.shape[1], width) if left else slice(0, one.shape[1]) for one in prompts]
    for row, (prompt, place) in enumerate(zip(prompts, places, strict=True)):
        ids[row, place], mask[row, place] = prompt[0], 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    together = _run(model, ids, mask, position_ids=positions)
    alone = torch.cat([_run(model, prompt)[0] for prompt in prompts])
    return alone, torch.cat([together[row, place] for row, place in enumerate(places)])


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
    prompt, cache, steps = candidate.prompts[0], None, []
    for place in range(prompt.shape[1]):
        runner: Any = model
        out = runner(input_ids=prompt[:, place : place + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits.float())
    return _run(model, prompt), torch.cat(steps, dim=1)


def _check(claim: Claim, way: Way) -> Check:
    """A way that the base goes too: where it parts from itself, four times as much is let pass, and told."""

    def look(candidate: Candidate) -> CheckRecord:
        own, found = (deviation(*way(model, candidate)) for model in (candidate.wide_base, candidate.wide_model))
        limit = max(candidate.policy.generation.max_deviation, 4 * own)
        rounding = rounding_modules(candidate.wide_model)
        if limit < found < float("inf") and limit < 1 and rounding:
            return _judged_without_rounding(claim, way, candidate, limit, {"base": own, "compressed": found})
        return _judged(claim, found, limit, {"base": own, "compressed": found})

    return Check(claim, look)


def _judged_without_rounding(claim: Claim, way: Way, candidate: Candidate, limit: float, evidence: dict[str, float]) -> CheckRecord:
    """Judge a checkpoint that rounds activations: one that lies at a tie falls either way, and no two ways to a prediction are equal.

    So the ways are compared where nothing is rounded but the weights, and each layer must round a token by itself.
    """
    model = candidate.wide_model
    with _without_rounding(model):
        found = deviation(*way(model, candidate))
    joint = [name for name, module in rounding_modules(model).items() if _looks_beside(module)]
    told = f"{evidence['compressed']:.1e} of the largest logit, and {found:.1e} where activations are not rounded"
    findings = [f"the two ways part by {told}"] if found > limit else []
    if joint:
        findings.append(f"the two ways part by {told}: a token is rounded by what stands beside it ({some(joint)})")
    told += ": those at a tie fall either way"
    return claim.found(findings, told, limit=f"<= {limit:.1e}", evidence={"deviation": evidence | {"without_rounding": found}})


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


def _judged(claim: Claim, found: float, limit: float, evidence: dict[str, float]) -> CheckRecord:
    told = f"{found:.1e} of the largest logit"
    if limit >= 1:
        return claim.record(Outcome.INCONCLUSIVE, f"the base parts from itself by {evidence['base']:.1e}; nothing can be told")
    findings = [] if found <= limit else [f"the two ways part by {told}"]
    return claim.found(findings, told, limit=f"<= {limit:.1e}", evidence={"deviation": evidence})


def _dtype(candidate: Candidate) -> CheckRecord:
    prompt = candidate.prompts[0]
    found = deviation(_run(candidate.wide_model, prompt), _run(candidate.model, prompt))
    return _judged(DTYPE, found, candidate.policy.generation.max_dtype_deviation, {"compressed": found})


def _device(candidate: Candidate) -> CheckRecord:
    if not torch.cuda.is_available():
        return DEVICE.skipped("not run: this machine has no GPU")
    prompt, models = candidate.prompts[0], []
    for device in ("cpu", "cuda"):
        models.append(_run(load_wide(candidate.compressed).to(device), prompt.to(device)).cpu())
    found = deviation(*models)
    return _judged(DEVICE, found, candidate.policy.generation.max_dtype_deviation, {"compressed": found})


def _reload(candidate: Candidate) -> CheckRecord:
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder) / "again"
        save_again(candidate.compressed, again)
        attempt = load_compressed(again)
        if attempt.model is None:
            return RELOAD.found(attempt.problems or ["it does not load again"], "")
        prompt = candidate.prompts[0]
        before, after = (_run(model, prompt) for model in (candidate.model, attempt.model.to(candidate.device)))
    differ = int((before != after).sum())
    return RELOAD.found([f"{differ} of {before.numel()} logits are others"] if differ else [], f"{before.numel()} logits are equal")


CHECKS = (
    *(_check(LEFT, _left), _check(RIGHT, _right), _check(BATCH, _batch), _check(CACHE, _cache)),
    *(Check(DTYPE, _dtype), Check(DEVICE, _device), Check(RELOAD, _reload)),
)
