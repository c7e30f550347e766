"""The signature of a step, a line per operator, and what differs between two of them in words a reader can act on."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Sequence

from compressor.settings.kinds import TEXTS
from compressor.settings.options import checked

_DEVICE = re.compile(r"@\w+(:\d+)?")
_VALUE = re.compile(r"%\d+")
_OUTSIDE = re.compile(r"(outside|const):\w+")
_SHAPE = re.compile(r"\[[\d,]*\]|\([\d,]*\)|\+\d+")
_NUMBER = re.compile(r"(?<![\w\[:,%])-?\d+\.?\d*(?:e-?\d+)?(?![\w\]])")
# What was blotted out of both lines to make them equal, and what that says.
_HINTS = (
    (_NUMBER, "only a Python number differs; it would be frozen at capture: make it a tensor (lr, step count, dropout rate)"),
    (_OUTSIDE, "a tensor that is neither parameter, buffer, optimizer state nor input differs; register it, or give it with the batch"),
    (_SHAPE, "the same operator on another shape or layout; give batches of one shape, so that each shape has a plan"),
)


@checked(lines=TEXTS)
def signature_hash(lines: Sequence[str]) -> str:
    """Hash a signature; it holds no address, but two steps that alias differently differ.

    Args:
        lines: one per operator.

    Returns:
        32 hexadecimal digits.
    """
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def neutral(lines: Sequence[str]) -> list[str]:
    """Leave out on which device each operand lies: kernels keep the seed of their random numbers on the host unless a graph is captured.

    Args:
        lines: of a signature.

    Returns:
        The lines without devices.
    """
    return [_DEVICE.sub("", line) for line in lines]


@checked(first=TEXTS, second=TEXTS)
def drift(first: Sequence[str], second: Sequence[str], names: tuple[str, str] = ("capture", "now"), limit: int = 3) -> str | None:
    """Compare two signatures.

    Args:
        first: lines of one step.
        second: lines of the other.
        names: what the two are called in the text.
        limit: number of differences to show.

    Returns:
        The first differences with what they mean, or None where the signatures are equal.
    """
    if list(first) == list(second):
        return None
    # Numbers of values shift with every inserted operator, so lines are aligned without them.
    bare_first, bare_second = ([_VALUE.sub("%", line) for line in lines] for lines in (first, second))
    blocks = [
        block for block in difflib.SequenceMatcher(None, bare_first, bare_second, autojunk=False).get_opcodes() if block[0] != "equal"
    ]
    if not blocks:
        index = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
        return f"the same operators on other aliases from op {index}:\n  {names[0]}: {first[index]}\n  {names[1]}: {second[index]}"
    pairs = [
        (
            index_a + k,
            index_b + k,
            first[index_a + k] if index_a + k < end_a else None,
            second[index_b + k] if index_b + k < end_b else None,
        )
        for _, index_a, end_a, index_b, end_b in blocks
        for k in range(max(end_a - index_a, end_b - index_b))
    ]
    text = [f"{names[0]} has {len(first)} operators, {names[1]} has {len(second)}; {len(pairs)} differ:"]
    for index_a, index_b, a, b in pairs[:limit]:
        index = index_a if a is not None else index_b
        text.append(f"  op {index}\n    {names[0]}: {a or '(absent)'}\n    {names[1]}: {b or '(absent)'}\n    {_hint(a, b)}")
    return "\n".join(text)


def _hint(a: str | None, b: str | None) -> str:
    if a is None or b is None:
        return "the operator is in one of the two only: Python control flow, a hook, or a switch between train and eval"
    a, b = _VALUE.sub("%", a), _VALUE.sub("%", b)
    for pattern, hint in _HINTS:
        if pattern.sub("", a) == pattern.sub("", b):
            return hint
    return "another operator runs here: Python control flow, or a function that was exchanged"
