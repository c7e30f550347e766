"""The tokenizer as transformers reads it: what it knows, and what it makes of texts and conversations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.errors import ModelError
from compressor.model.loading.load import load_tokenizer, quiet_transformers
from harness.release.candidate import Candidate, Check
from harness.reporting.record import CheckRecord, Claim
from harness.reporting.verdict import Outcome
from harness.validation.loading import first_line

VOCABULARY = Claim("tokenizer.vocabulary", "Every token has the id that it has in the base")
SPECIAL = Claim("tokenizer.special_tokens", "Special and added tokens are the base's")
SETTINGS = Claim("tokenizer.settings", "Padding side, truncation side and model_max_length are the base's")
TEXTS = Claim("tokenizer.texts", "Texts become the ids that they become in the base, and come back")
TEMPLATE = Claim("tokenizer.chat_template", "A conversation is written out as in the base")

_SETTINGS = ("padding_side", "truncation_side", "model_max_length", "clean_up_tokenization_spaces", "add_bos_token", "add_eos_token")
_PROBES = ("The quick brown fox.", " two  spaces\n\ttab", "def f(x):\n    return x + 1", "Grüße, 世界 🙂", "1234567890 3.14", "")
_CONVERSATION = (
    {"role": "user", "content": "Say a number."},
    {"role": "assistant", "content": "Seven."},
    {"role": "user", "content": "Another."},
)


def read_tokenizer(folder: Path) -> Any:
    """Read the tokenizer of a folder.

    Args:
        folder: of a model.

    Returns:
        A tokenizer of transformers; None where the folder holds none.

    Raises:
        ModelError: it cannot be loaded.
    """
    with quiet_transformers():
        return load_tokenizer(folder)


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of all special tokens.

    Args:
        tokenizer: of transformers.

    Returns:
        Those with a role, and those that were added as special without one, such as the marks of turns in a conversation.
    """
    return {*tokenizer.all_special_ids, *(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)}


def _vocabulary(base: Any, other: Any) -> tuple[list[str], str]:
    lines = _differing(base.get_vocab(), other.get_vocab())
    return lines, f"{len(base.get_vocab())} tokens"


def _special(base: Any, other: Any) -> tuple[list[str], str]:
    named = _differing(base.special_tokens_map, other.special_tokens_map)
    before, after = ({number: str(token) for number, token in one.added_tokens_decoder.items()} for one in (base, other))
    flags = ({number: repr(token) for number, token in one.added_tokens_decoder.items()} for one in (base, other))
    same_text = [line for line in _differing(*flags) if before == after]
    return [*named, *_differing(before, after), *same_text], f"{len(base.special_tokens_map)} special, {len(before)} added tokens"


def _settings(base: Any, other: Any) -> tuple[list[str], str]:
    before, after = ({name: getattr(one, name, None) for name in _SETTINGS} for one in (base, other))
    return _differing(before, after), ", ".join(f"{name} {before[name]}" for name in _SETTINGS[:3])


def _texts(base: Any, other: Any) -> tuple[list[str], str]:
    before, after = ({text: one(text)["input_ids"] for text in _PROBES} for one in (base, other))
    lines = [f"{text!r}: {before[text]} became {after[text]}" for text in _PROBES if before[text] != after[text]]
    written, back = ({text: one.decode(before[text]) for text in _PROBES} for one in (base, other))
    return [*lines, *(line for line in _differing(written, back) if not lines)], f"{len(_PROBES)} texts, both ways"


def _template(base: Any, other: Any) -> tuple[list[str], str]:
    if not base.chat_template:
        return (["the base has no chat template"] if other.chat_template else []), "neither has a template"
    if not other.chat_template:
        return ["the chat template is missing"], ""
    lines = ["the text of the template differs"] if base.chat_template != other.chat_template else []
    for more in (False, True):
        before, after = (one.apply_chat_template(_CONVERSATION, tokenize=False, add_generation_prompt=more) for one in (base, other))
        lines += [f"{before!r} became {after!r}"] if before != after else []
    return lines, "a conversation of three turns"


def _differing(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> list[str]:
    keys = sorted((key for key in before.keys() | after.keys() if before.get(key) != after.get(key)), key=str)
    return [f"{key}: {before.get(key)!r} became {after.get(key)!r}" for key in keys]


_LOOKS = {VOCABULARY: _vocabulary, SPECIAL: _special, SETTINGS: _settings, TEXTS: _texts, TEMPLATE: _template}


def _look(claim: Claim, candidate: Candidate) -> CheckRecord:
    own = read_tokenizer(candidate.base)
    if own is None:
        return claim.skipped("the base has no tokenizer")
    try:
        other = read_tokenizer(candidate.compressed)
    except ModelError as error:
        return claim.record(Outcome.FAIL, f"transformers cannot read it: {first_line(error)}")
    if other is None:
        return claim.record(Outcome.FAIL, "it has none, and the base has one")
    findings, summary = _LOOKS[claim](own, other)
    return claim.found(findings, summary, noun="difference")


def _check(claim: Claim) -> Check:
    return Check(claim, lambda candidate: _look(claim, candidate))


CHECKS = tuple(_check(claim) for claim in _LOOKS)
