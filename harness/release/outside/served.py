"""vLLM, in an environment of its own: the checkpoint loads there and writes what transformers finds likeliest.

T positions of a prompt, N new tokens, V vocabulary.
"""

from __future__ import annotations

import torch

from harness.release.candidate import Candidate, Check, vocabulary_of
from harness.release.generation import ends_of, tie_of
from harness.release.outside.process import told, two_answers
from harness.reporting.record import CheckRecord, Claim

VLLM = Claim("served.vllm", "vLLM loads it and writes the tokens that transformers finds likeliest, and ends where a text ends")


def check_served(candidate: Candidate) -> list[CheckRecord]:
    """Have vLLM write, where the policy names a Python that has it.

    Args:
        candidate: what is to be signed.

    Returns:
        One record.
    """
    return [Check(VLLM, _look).record(candidate)]


def _look(candidate: Candidate) -> CheckRecord:
    prompts = "\n".join(" ".join(map(str, prompt[0].tolist())) for prompt in candidate.prompts)
    words = [str(candidate.compressed.absolute()), str(candidate.num_new)]
    answers = two_answers(VLLM, candidate, candidate.policy.vllm, "with_vllm.py", words, prompts)
    return answers if isinstance(answers, CheckRecord) else _judge(candidate, *answers)


def _judge(candidate: Candidate, versions: dict[str, str], texts: list[list[int]]) -> CheckRecord:
    limit, findings, ties = tie_of(candidate), [], 0
    if len(texts) != len(candidate.prompts):
        findings.append(f"{len(texts)} texts came, of {len(candidate.prompts)} prompts")
    for number, (prompt, text) in enumerate(zip(candidate.prompts, texts, strict=False)):
        problem = _ended_wrongly(candidate, text)
        gaps = [] if problem else _gaps(candidate.model, prompt, text)
        wide = [(place, gap) for place, gap in enumerate(gaps) if not gap <= limit]
        ties += sum(0 < gap <= limit for gap in gaps)
        problem = problem or "".join(f"token {place} is another, {gap:.1e} of the largest logit away" for place, gap in wide[:1])
        findings += [f"prompt {number}: {problem}"] if problem else []
    same = f"{told(versions)}: {sum(map(len, texts))} tokens after {len(texts)} prompts" + (f", {ties} of them at a tie" if ties else "")
    return VLLM.found(
        findings, same, noun="text", limit=f"<= {limit:.1e} of the largest logit between two tokens", evidence={**versions, "ties": ties}
    )


def _ended_wrongly(candidate: Candidate, text: list[int]) -> str:
    """Say what is wrong with the length of a text, or with a number in it; nothing is said of a right one."""
    ends, vocabulary = ends_of(candidate.model), vocabulary_of(candidate.model)
    if outside := [token for token in text if not 0 <= token < vocabulary]:
        return f"token {outside[0]} is outside of the vocabulary"
    if early := [token for token in text[:-1] if token in ends]:
        return f"goes on behind token {early[0]}, which ends a text"
    is_whole = len(text) == candidate.num_new or (text and text[-1] in ends)
    return "" if is_whole else f"ends after {len(text)} tokens, and none of them ends a text"


def _gaps(model: torch.nn.Module, prompt: torch.Tensor, text: list[int]) -> list[float]:
    """How far each token of a text after a prompt [1, T] lies behind the likeliest one, relative to the largest logit."""
    tokens = prompt.new_tensor(text)
    logits_NV = model(input_ids=torch.cat([prompt, tokens[None]], dim=1), use_cache=False).logits[0, prompt.shape[1] - 1 : -1].float()
    chosen_N = logits_NV.gather(1, tokens[:, None])[:, 0]
    gaps: list[float] = ((logits_NV.amax(1) - chosen_N) / logits_NV.abs().amax(1).clamp(min=1e-30)).tolist()
    return gaps
