"""Differences as one HTML page that needs nothing else: a table and a heat map for each tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.atomic import write_whole
from harness.errors import GoldenError
from harness.goldens.differences import Difference
from harness.goldens.report import HEADINGS, row_cells
from harness.reporting.pages import heat_map_html, render
from harness.reporting.verdict import Verdict
from harness.tolerance.bits import differs
from harness.tolerance.measures import absolute_error

MAX_ROWS, MAX_COLUMNS = 48, 96
"""Cells of a heat map; a larger tensor shows the worst element of each cell."""
_CELL = 6
_LEAST = 0.15
"""Opacity of the smallest difference, so that none is invisible."""


def write_page(path: Path, differences: Sequence[Difference]) -> None:
    """Write the page.

    Args:
        path: of the page; replaced if it is there.
        differences: what to show.

    Raises:
        GoldenError: the page cannot be written.
    """
    try:
        write_whole(path, render_page(differences).encode())
    except OSError as error:
        raise GoldenError(f"{path}: cannot be written ({error.strerror}); name a file in a folder that can be") from error


def render_page(differences: Sequence[Difference]) -> str:
    """Return the whole HTML document.

    Args:
        differences: what to show.

    Returns:
        A document without any reference outside of itself.
    """
    data = {
        "count": "1 golden differs" if len(differences) == 1 else f"{len(differences)} goldens differ",
        "verdict": (Verdict.REGRESSION if differences else Verdict.PASS).value,
        "headings": HEADINGS,
        "differences": [_difference(difference) for difference in differences],
    }
    return render("goldens.html.j2", data)


def _difference(difference: Difference) -> dict[str, Any]:
    found, all_of_it = difference.candidate, difference.comparisons
    bad = [comparison for comparison in all_of_it if comparison.distance and (not comparison.ok or comparison.distance.share)]
    pictures = [(comparison, heat_map(*difference.pairs[comparison.tensor])) for comparison in bad]
    return {
        "name": found.name,
        "verdict": found.verdict,
        "test": found.test,
        "notes": difference.notes,
        "rows": [row_cells(comparison.to_dict()) for comparison in all_of_it],
        "figures": [(comparison.tensor, comparison.summary, svg) for comparison, svg in pictures if svg],
    }


def heat_map(actual: Tensor, expected: Tensor) -> str:
    """Draw where two tensors differ: the last dimension runs to the right, all others downward, darker cells differ more.

    Args:
        actual: what came out.
        expected: what should have, of the same dtype and shape.

    Returns:
        An SVG element; empty where nothing differs.
    """
    changed = differs(actual, expected)
    if not bool(changed.any()):
        return ""
    columns = expected.shape[-1] if expected.ndim else 1
    strength = _strength(absolute_error(actual, expected).amax(dim=1), changed).reshape(-1, columns)
    cells = _pooled(strength)
    height, width = cells.shape
    rows, places = torch.nonzero(cells, as_tuple=True)
    label = f"heat map of {int(changed.sum())} differing elements of {changed.numel()}, {height} by {width} cells"
    found = [(column, row, float(cells[row, column])) for row, column in zip(rows.tolist(), places.tolist(), strict=True)]
    return heat_map_html(label, (width, height), _CELL, found)


def _strength(error_N: Tensor, changed_N: Tensor) -> Tensor:
    """Opacity of each element: 0 where nothing differs, else by the logarithm of the difference."""
    finite = error_N[error_N.isfinite() & (error_N > 0)]
    low, high = (math.log(float(finite.min())), math.log(float(finite.max()))) if finite.numel() else (0.0, 0.0)
    scaled = torch.ones_like(error_N) if high == low else (error_N.log().clamp(low, high) - low) / (high - low)
    return torch.where(changed_N, _LEAST + (1 - _LEAST) * scaled, torch.zeros_like(scaled))


def _pooled(strength: Tensor) -> Tensor:
    """Return at most MAX_ROWS x MAX_COLUMNS cells, each with its strongest element."""
    height, width = min(MAX_ROWS, strength.shape[0]), min(MAX_COLUMNS, strength.shape[1])
    return torch.nn.functional.adaptive_max_pool2d(strength[None, None], (height, width))[0, 0]
