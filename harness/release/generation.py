"""What the checkpoint writes: finite, the same each time, no loop, no special token in between, and an end where the base ends.

T positions of a prompt, N new tokens, V vocabulary.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from compressor.model.checkpoints.load import load_compressed as load_with_our_layers
from compressor.model.folder import read_config
from compressor.model.loading.load import quiet_transformers
from harness.release.candidate import Candidate, Check, rounding_modules, vocabulary_of
from harness.release.tokenizer import read_tokenizer, special_ids
from harness.reporting.record import CheckRecord, Claim
from harness.reporting.verdict import Outcome

GREEDY = Claim("generation.greedy", "Greedy text is finite and the same each time, with the folder's own settings")
SAMPLED = Claim("generation.sampled", "Sampled text is finite, and the same for the same seed")
LOOPS = Claim("generation.loops", "It falls into a loop no more often than the base")
SPECIAL = Claim("generation.special_tokens", "Special tokens appear in its text no more often than in the base's")
EOS = Claim("generation.eos", "The tokens that end a text are the base's, and end it")
RUNTIME = Claim("generation.runtime", "Our own layers write the greedy text that transformers writes")
LONG = Claim("generation.long_context", "Up to the last position its predictions are finite and as close to the base's as the limit asks")

_LONGEST_PERIOD, _LEAST_TURNS = 8, 3


def _continue(model: torch.nn.Module, candidate: Candidate, prompt: torch.Tensor, **options: Any) -> tuple[list[int], torch.Tensor]:
    """Generate after one prompt [1, T]; return the new tokens and their logits [N, V]."""
    out = _generated(model, candidate, prompt, output_logits=True, **options)
    return out.sequences[0, prompt.shape[1] :].tolist(), torch.cat(list(out.logits))


def _generated(model: torch.nn.Module, candidate: Candidate, prompt: torch.Tensor, **options: Any) -> Any:
    generator: Any = model
    asked = {"max_new_tokens": candidate.num_new, "do_sample": False, "return_dict_in_generate": True}
    with quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings for sampling that a greedy text does not use
        return generator.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **(asked | options))


def _sampled(model: torch.nn.Module, candidate: Candidate, prompt: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    devices = [candidate.device] if candidate.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(candidate.seed)
        return _continue(model, candidate, prompt, do_sample=True)


def _text(candidate: Candidate, role: str, number: int, *, sampled: bool = False) -> list[int]:
    """The text of `base` or `compressed` after a prompt; written once."""
    key = (role, sampled, number)
    if key not in candidate.texts:
        model = candidate.base_model if role == "base" else candidate.model
        candidate.texts[key] = (_sampled if sampled else _continue)(model, candidate, candidate.prompts[number])[0]
    return candidate.texts[key]


def _twice(claim: Claim, candidate: Candidate, write: Any) -> CheckRecord:
    findings, total = [], 0
    for number, prompt in enumerate(candidate.prompts):
        first = _text(candidate, "compressed", number, sampled=write is _sampled)
        second, logits = write(candidate.model, candidate, prompt)
        total += len(first)
        findings += [f"prompt {number}: logits are not finite"] if not bool(torch.isfinite(logits).all()) else []
        findings += [f"prompt {number}: a second run wrote other tokens"] if first != second else []
    return claim.found(findings, f"{total} tokens after {len(candidate.prompts)} prompts, twice")


def _greedy(candidate: Candidate) -> CheckRecord:
    return _twice(GREEDY, candidate, _continue)


def _sample(candidate: Candidate) -> CheckRecord:
    return _twice(SAMPLED, candidate, _sampled)


def period(tokens: Sequence[int]) -> int:
    """Return the period in which a text ends, 0 if it ends in none.

    Args:
        tokens: of the text.

    Returns:
        At most 8; what repeats has done so three times and over at least 12 tokens.
    """
    for length in range(1, _LONGEST_PERIOD + 1):
        tail = list(tokens[-max(12, _LEAST_TURNS * length) :])
        if len(tail) >= 12 and tail[length:] == tail[:-length]:
            return length
    return 0


def _loops(candidate: Candidate) -> CheckRecord:
    limit = candidate.policy.generation.max_extra_loops
    new, found = [], {"base": 0, "compressed": 0}
    for number in range(len(candidate.prompts)):
        before, after = (period(_text(candidate, role, number)) for role in ("base", "compressed"))
        found["base"] += bool(before)
        found["compressed"] += bool(after)
        new += [f"prompt {number}: ends in {after} tokens over and over, the base does not"] if after and not before else []
    share = len(new) / len(candidate.prompts)
    told = f"{found['compressed']} of {len(candidate.prompts)} texts end in a loop, of the base's {found['base']}"
    return LOOPS.found(new if share > limit else [], told, limit=f"<= {limit:.0%} more", evidence={"loops": found})


def _special(candidate: Candidate) -> CheckRecord:
    own = read_tokenizer(candidate.base)
    special = set() if own is None else special_ids(own) - ends_of(candidate.base_model)
    if not special:
        return SPECIAL.record(Outcome.PASS, "the base has no special token beside those that end a text")
    findings = []
    for number in range(len(candidate.prompts)):
        before, after = (_text(candidate, role, number, sampled=True) for role in ("base", "compressed"))
        leaked = sorted(special & set(after) - set(before))
        findings += [f"prompt {number}: token {token}, which is special" for token in leaked]
    return SPECIAL.found(findings, f"none of {len(special)} special tokens")


def ends_of(model: torch.nn.Module) -> set[int]:
    """Return the tokens that end a text of a model."""
    settings: Any = getattr(model, "generation_config", None)
    ids = getattr(settings, "eos_token_id", None)
    return set(ids if isinstance(ids, list) else [ids]) - {None}


class _Force:
    """A processor of logits that lets one token be chosen, from the third on."""

    def __init__(self, token: int, start: int) -> None:
        self.token, self.start = token, start

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores [1, V] to choose from."""
        chosen = self.token if ids.shape[1] >= self.start + 2 else (self.token + 1) % scores.shape[1]
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([chosen], device=scores.device), 0.0)


def _eos(candidate: Candidate) -> CheckRecord:
    expected, found = ends_of(candidate.base_model), ends_of(candidate.model)
    if not expected and not found:
        return EOS.record(Outcome.PASS, "neither names a token that ends a text")
    findings = [f"token {token}: ends no text here" for token in sorted(expected - found)]
    findings += [f"token {token}: ends a text here, and not in the base" for token in sorted(found - expected)]
    findings += [
        f"token {token}: is outside of the vocabulary" for token in sorted(found) if not 0 <= token < vocabulary_of(candidate.model)
    ]
    prompt = candidate.prompts[0]
    for token in sorted(expected - {one for one in expected if (one + 1) in expected}):
        written, _ = _continue(candidate.model, candidate, prompt, logits_processor=[_Force(token, prompt.shape[1])])
        findings += [] if len(written) == 3 else [f"token {token}: was forced as the third, and {len(written)} tokens came"]
    return EOS.found(findings, f"{', '.join(map(str, sorted(expected)))}; a text stops there")


def _runtime(candidate: Candidate) -> CheckRecord:
    if "quantization_config" not in read_config(candidate.compressed):
        return RUNTIME.skipped("nothing is quantized")
    with quiet_transformers():
        ours = load_with_our_layers(candidate.compressed, device=candidate.device)
    limit, findings, ties = tie_of(candidate), [], 0
    for number in range(len(candidate.prompts)):
        gaps = dict(_partings(ours, candidate, number))
        ties += sum(gap <= limit for gap in gaps.values())
        wide = [(place, gap) for place, gap in gaps.items() if gap > limit]
        findings += [f"prompt {number}: token {place} is another, {gap:.1e} of the largest logit away" for place, gap in wide[:1]]
    told = f"the same tokens after {len(candidate.prompts)} prompts" + (f", but for {ties} at a tie" if ties else "")
    return RUNTIME.found(
        findings, told, noun="text", limit=f"<= {limit:.1e} of the largest logit between two tokens", evidence={"ties": ties}
    )


def tie_of(candidate: Candidate) -> float:
    """Return how near two tokens are, relative to the largest logit, between which two right runtimes may choose otherwise."""
    limits, model = candidate.policy.generation, candidate.model
    if rounding_modules(model):
        return limits.max_dtype_deviation  # a code that falls the other way costs more than the dtype does
    return max(limits.max_deviation, 4 * torch.finfo(next(model.parameters()).dtype).eps)


def _partings(ours: torch.nn.Module, candidate: Candidate, number: int) -> Iterator[tuple[int, float]]:
    """Where our layers choose another token than transformers after a prompt and its text so far, and by how much of the largest logit.

    Behind each place our layers go on from the text of transformers: a tie must not hide what comes after it.
    """
    prompt, text = candidate.prompts[number], _text(candidate, "compressed", number)
    start = 0
    while start < len(text):
        so_far = torch.cat([prompt, prompt.new_tensor([text[:start]])], dim=1)
        own = _generated(ours, candidate, so_far, max_new_tokens=len(text) - start, output_scores=True)
        tokens = own.sequences[0, so_far.shape[1] :].tolist()
        place = next((i for i, (a, b) in enumerate(zip(tokens, text[start:], strict=False)) if a != b), len(tokens))
        start += place
        if start == len(text):
            return
        if place == len(tokens):
            yield start, math.inf  # ours ends behind the same token, and transformers goes on
            return
        until = torch.cat([so_far, prompt.new_tensor([text[start - place : start]])], dim=1)
        theirs = _generated(candidate.model, candidate, until, max_new_tokens=1, output_scores=True)
        chosen = [text[start], tokens[place]]
        yield start, max(_gap(scores[0], chosen) for scores in (theirs.scores[0], own.scores[place]))
        start += 1


def _gap(scores: torch.Tensor, tokens: Sequence[int]) -> float:
    """How far two tokens lie from each other in scores [V], relative to the largest; infinite where either cannot be chosen."""
    finite = scores[torch.isfinite(scores)].abs()
    one, other = scores[list(tokens)].tolist()
    return abs(one - other) / max(finite.max().item(), 1e-30) if math.isfinite(one - other) else math.inf


def _long(candidate: Candidate) -> CheckRecord:
    row, limit = candidate.long_row, candidate.policy.limits.max_mean_kl
    base, other = (_logits(model, row).float().log_softmax(-1) for model in (candidate.base_model, candidate.model))
    if base.shape != other.shape:
        return LONG.record(Outcome.FAIL, f"it predicts {other.shape[-1]} tokens, the base {base.shape[-1]}")
    kl = (base.exp() * (base - other)).sum(-1)[0]
    quarter = kl[3 * len(kl) // 4 :].mean().item()
    findings = [] if bool(torch.isfinite(kl).all()) else ["predictions are not finite"]
    findings += [f"the last quarter is {quarter:.4f} nats from the base's"] if quarter > limit else []
    evidence = {"tokens": len(kl), "mean KL": {"first quarter": kl[: max(1, len(kl) // 4)].mean().item(), "last quarter": quarter}}
    short = candidate.num_positions - len(kl)
    told = f"{len(kl)} tokens, {quarter:.4f} nats in the last quarter"
    if short > 0 and not findings:
        told += f"; the model has {candidate.num_positions} positions"
    return LONG.found(findings, told, limit=f"<= {limit:g} nats", evidence=evidence)


def _logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


CHECKS = (
    *(Check(GREEDY, _greedy), Check(SAMPLED, _sample), Check(LOOPS, _loops), Check(SPECIAL, _special)),
    *(Check(EOS, _eos), Check(RUNTIME, _runtime), Check(LONG, _long)),
)
