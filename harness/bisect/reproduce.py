"""A test that fails until a guilty module is repaired: both folders, one sequence of tokens, one number."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from compressor.errors import UserInputError
from compressor.numerics.precision import widened_products
from harness.bisect.difference import MEASURES, Comparer
from harness.bisect.models import load_pair
from harness.validation.behaviour.scoring import TokenBatch

_TEMPLATE = '''"""{subject} differs from the base. Written by `harness bisect`; fails until it is repaired."""

from harness.bisect import swap_difference

BASE = {base}
COMPRESSED = {compressed}
TOKENS = {tokens}


def test_{name}():
    difference = swap_difference(BASE, COMPRESSED, {parts}, TOKENS, measure="{measure}")
    assert difference <= {limit!r}, f"{{difference}} with nothing compressed but {subject}"
'''


@widened_products()
def swap_difference(
    base: str | Path,
    compressed: str | Path,
    parts: Sequence[str],
    tokens: Sequence[Sequence[int]],
    *,
    measure: str = "kl",
    device: str = "cpu",
) -> float:
    """Put parts of a compressed model into its base, and say how far the predictions move.

    Args:
        base: folder of the base model.
        compressed: folder of the compressed checkpoint.
        parts: modules or layers, by dotted name; what is equal in both models changes nothing.
        tokens: rows of token ids, equally long.
        measure: kl, loss or sqnr.
        device: where both run.

    Returns:
        Nats per token; for sqnr noise over signal.

    Raises:
        UserInputError: a part that the models do not have, another measure, or no tokens.
    """
    if measure not in MEASURES:
        raise UserInputError(f"swap_difference: measure={measure!r} does not exist; give one of {', '.join(MEASURES)}")
    if not tokens or any(len(row) != len(tokens[0]) or len(row) < 2 for row in tokens):
        raise UserInputError("swap_difference: tokens are empty, too short or not equally long; give rows of two or more token ids")
    pair = load_pair(base, compressed, device=device)
    known = dict(pair.base.named_modules())
    unknown = [name for name in parts if name not in known]
    if unknown:
        raise UserInputError(f"swap_difference: the models have no module {unknown[0]!r}; name modules as named_modules does")
    ids = torch.tensor(tokens, dtype=torch.long)
    compare = Comparer(pair, [TokenBatch(ids)], measure)
    compare.run_base()
    inside = {part for part in pair.parts if any(part == name or part.startswith(f"{name}.") for name in parts)}
    return compare(frozenset(inside))


def write_test(base: Path, compressed: Path, subject: Sequence[str], tokens: Sequence[int], *, measure: str, limit: float) -> str:
    """Return the text of a test file.

    Args:
        base: folder of the base model.
        compressed: folder of the compressed checkpoint.
        subject: modules or a layer to take from the compressed model.
        tokens: one sequence.
        measure: kl, loss or sqnr.
        limit: largest difference that passes.

    Returns:
        Python source that pytest runs as it is.
    """
    return _TEMPLATE.format(
        subject=" and ".join(subject),
        base=json.dumps(str(base.resolve())),
        compressed=json.dumps(str(compressed.resolve())),
        tokens=[list(tokens)],
        name=re.sub(r"\W+", "_", "_and_".join(subject)).strip("_") + "_keeps_to_the_base",
        parts=json.dumps(list(subject)),
        measure=measure,
        limit=limit,
    )
