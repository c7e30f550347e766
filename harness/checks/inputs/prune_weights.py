"""What pruners are shown: weights on which masks go wrong, and those on which quantizers do. Each is pruned once for all checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from harness.checks.catalogue.registry import CheckContext, CheckFailed
from harness.checks.inputs.memory import hold_memory
from harness.checks.inputs.pairs import pairwise, told_of
from harness.checks.protocols import Sparsifier
from harness.checks.strategies import fixed_weights

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Their squares leave the range of float32, and a pruner that reads the Hessian squares.
_NO_SQUARE = ("subnormal", "large", "tiny", "widest")
_MOST_DENSE = 200


@dataclass(frozen=True)
class Pruned:
    """One weight and what a pruner made of it.

    Attributes:
        weight: as given.
        hessian: as given.
        pruned: what came out.
    """

    weight: Tensor
    hessian: Tensor
    pruned: Tensor

    @property
    def zeros_before(self) -> Tensor:
        """Zeros of each row that were there before, [R]: nobody can say whether they were kept."""
        return (self.weight == 0).sum(1)


def ordinary_weights(subject: Sparsifier, context: CheckContext) -> Iterator[tuple[str, Tensor]]:
    """Yield weights on which masks go wrong: all magnitudes equal, ties everywhere, outliers, single rows, every dtype; no zeros.

    Args:
        subject: whose blocks they suit.
        context: its seed is used.

    Yields:
        Words that say which one it is, and the weight.
    """
    multiple = multiple_of(subject)
    wide = 24 * multiple if multiple > 1 else 97
    generator = torch.Generator().manual_seed(context.seed)

    def drawn(rows: int, columns: int) -> Tensor:
        values = torch.rand(rows, columns, generator=generator) - 0.5
        return values + 0.01 * values.sign() + (values == 0) * 0.01

    yield "random", drawn(7, wide)
    yield "one row", drawn(1, wide)
    yield "shortest", drawn(3, multiple if multiple > 1 else 2)
    yield "one magnitude", drawn(5, wide).sign() * 0.25
    yield "ties", (drawn(6, wide) * 6).round().abs().clamp(min=1) * drawn(6, wide).sign()
    yield "one large row", drawn(6, wide) * torch.tensor([1.0, 1, 100, 1, 1, 0.01])[:, None]
    outliers = drawn(6, wide)
    outliers[:, ::9] *= 50
    yield "outliers", outliers
    yield "tiny", drawn(4, wide) * 1e-30
    yield "bfloat16", drawn(6, wide).to(torch.bfloat16)
    yield "float16", drawn(6, wide).to(torch.float16)


def _hurtful_weights(subject: Sparsifier) -> Iterator[tuple[str, Tensor]]:
    """Those that quantizers are shown: zeros, large, subnormal, constant, square, wide, of many rows, of one column; and views of some."""
    for label, weight in fixed_weights(DTYPES, multiple_of(subject), group=16):
        if subject.second_order and label.startswith(_NO_SQUARE):
            continue
        yield label, weight
        if weight.dtype == DTYPES[0] and label.startswith(("spread groups", "zeros")):
            for name, view in views_of(weight).items():
                yield f"{label}, {name}", view


def views_of(weight: Tensor) -> dict[str, Tensor]:
    """Return the same values in other layouts of memory.

    Args:
        weight: [R, C].

    Returns:
        Each in words, and the view.
    """
    larger = torch.full((weight.shape[0] + 2, 2 * weight.shape[1] + 3), 3.0, dtype=weight.dtype)
    larger[1:-1, 2:-1:2] = weight
    return {"a transposed view": weight.t().contiguous().t(), "a part of a larger tensor": larger[1:-1, 2:-1:2]}


def multiple_of(subject: Sparsifier) -> int:
    """Return what the columns must be a multiple of."""
    return subject.pattern[1] if subject.pattern else 1


def hessian_of(columns: int, context: CheckContext) -> Tensor:
    """Make the Hessian of correlated inputs; the same one every time.

    Args:
        columns: of the weight.
        context: its seed is used.

    Returns:
        float32 [C, C].
    """
    return context.once(context, f"hessian of {columns} columns", partial(_hessian, columns, context.seed + 1))


def _hessian(columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = 4 * columns if columns <= _MOST_DENSE else 64
    x = torch.rand(tokens, columns, generator=generator) - 0.5
    x = x + 0.7 * (torch.rand(tokens, 1, generator=generator) - 0.5)  # columns that go together
    x[:, ::5] *= 3
    hessian = 2 * x.t() @ x / len(x)
    # Of many columns a few tokens, and as much again on the diagonal as if each column were apart: it is not singular, and soon made.
    return hessian if columns <= _MOST_DENSE else hessian + torch.diag(hessian.diagonal())


FEW_LARGE = ("few large", "few large, one dead", "few large, weights of others zero")
"""Kinds of `few_large_inputs`."""


def num_large(subject: Sparsifier, columns: int) -> int:
    """Return how many inputs of each block, or of a row, may be large so that all their weights can stay; 0 where none can, or all do."""
    size = subject.pattern[1] if subject.pattern else columns
    num_kept = round((1 - subject.sparsity) * size)
    spare = 1 if subject.pattern else 2  # a row may have a zero more or less than was asked for
    return max(1, num_kept // 2) if spare <= num_kept <= size - spare else 0


TIES = ("one score", "few scores", "one score of weights that differ")
"""Kinds of `tied_scores`."""


def tied_scores(kind: str, shape: tuple[int, int], context: CheckContext) -> tuple[Tensor, Tensor]:
    """Make a weight and a Hessian without correlations, by which many weights of a row lose the same: what a threshold says is not enough.

    Args:
        kind: one of TIES.
        shape: (R, C) of the weight.
        context: its seed is used.

    Returns:
        The weight and the Hessian [C, C], float32; scores tie exactly, however they are computed.
    """
    generator = torch.Generator().manual_seed(context.seed + 7)
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    few = torch.randint(1, 4, shape, generator=generator) if kind == TIES[1] else torch.ones(shape)
    powers = torch.randint(-2, 3, (shape[1],), generator=generator).float() * (kind == TIES[2])
    return signs * few * torch.ldexp(torch.full_like(powers, 0.25), -powers), torch.diag(torch.ldexp(torch.ones_like(powers), 2 * powers))


def few_large_inputs(subject: Sparsifier, kind: str, shape: tuple[int, int], context: CheckContext) -> tuple[Tensor, Tensor, Tensor]:
    """Make a weight of about equal magnitudes, and inputs of which a few are a hundred times the others and alone say what may go.

    Args:
        subject: whose blocks they suit.
        kind: one of FEW_LARGE: as they are; with an input that is always zero, whose weights are a sixty-fourth of the others; or with
            weights of a seventh of the other inputs that are zero.
        shape: (R, C) of the weight.
        context: its seed is used.

    Returns:
        The weight, the Hessian, and which inputs are large, bool [C].
    """
    columns = shape[1]
    size = subject.pattern[1] if subject.pattern else columns
    generator = torch.Generator().manual_seed(context.seed + 6)
    is_large = torch.rand(columns // size, size, generator=generator).argsort(-1).flatten() < num_large(subject, columns)
    weight = (torch.rand(shape, generator=generator) * 0.2 + 0.9) * (torch.randint(0, 2, shape, generator=generator) * 2 - 1)
    scale = 1 + 99.0 * is_large
    if kind == FEW_LARGE[1]:
        dead = int(is_large.to(torch.int8).argmin())
        scale[dead], weight[:, dead] = 0.0, weight[:, dead] / 64
    if kind == FEW_LARGE[2]:
        weight = weight.masked_fill((torch.arange(weight.numel()) % 7 == 3).reshape(shape) & ~is_large, 0.0)
    name = f"{kind} of {columns} columns in blocks of {size}"
    return weight, context.once(context, name, lambda: hessian_of(columns, context) * scale * scale[:, None]), is_large


def pruned_shapes(subject: Sparsifier) -> list[tuple[int, int]]:
    """Return few rows, one, as many as columns, many, and many columns, but where each takes a pruner long."""
    m = multiple_of(subject)
    wide, narrow = (24 * m, 3 * m) if m > 1 else (96, 31)
    long = [] if subject.second_order else [(3, -(-1031 // m) * m)]
    return [(7, wide), (1, wide), (wide, wide), (521, narrow), *long]


def each_ordinary(subject: Sparsifier, context: CheckContext, hold: Callable[[Pruned], None]) -> str:
    """Show a function every ordinary weight, and what the subject made of it.

    Args:
        subject: a pruner.
        context: how closely.
        hold: raises CheckFailed for a weight with which the subject is wrong.

    Returns:
        How many were looked at, in words.
    """
    return _each(_beside_hessian(ordinary_weights(subject, context), context), subject, context, hold)


def each_weight(subject: Sparsifier, context: CheckContext, hold: Callable[[Pruned], None]) -> str:
    """Show a function every ordinary weight, those that hurt, views, and tied scores; each is pruned once for all checks that share a look.

    Args:
        subject: a pruner.
        context: how closely.
        hold: raises CheckFailed for a weight with which the subject is wrong.

    Returns:
        How many were looked at, in words.
    """
    seen = each_ordinary(subject, context, hold)
    hurt = _each(_beside_hessian(_hurtful_weights(subject), context), subject, context, hold)
    return f"{seen}, {hurt} that hurt, {_each(_each_tied(subject, context), subject, context, hold)} of tied scores"


def _beside_hessian(weights: Iterator[tuple[str, Tensor]], context: CheckContext) -> Iterator[tuple[str, Tensor, Tensor]]:
    return ((label, weight, hessian_of(weight.shape[1], context)) for label, weight in weights)


def _each_tied(subject: Sparsifier, context: CheckContext) -> Iterator[tuple[str, Tensor, Tensor]]:
    for case in pairwise({"ties": TIES, "shape": pruned_shapes(subject), "dtype": DTYPES}):
        weight, hessian = tied_scores(case["ties"], case["shape"], context)
        yield f"{case['ties']} in {case['dtype']}", weight.to(case["dtype"]), hessian


def _each(cases: Iterator[tuple[str, Tensor, Tensor]], subject: Sparsifier, context: CheckContext, hold: Callable[[Pruned], None]) -> str:
    count = 0
    for label, weight, hessian in cases:
        label = f"{label} {list(weight.shape)}"
        with told_of(label):
            hold(context.once(subject, f"pruned {label}", partial(_examine, subject, weight, hessian)))
        count += 1
    return f"{count} weights"


def _examine(subject: Sparsifier, weight: Tensor, hessian: Tensor) -> Pruned:
    """Prune a weight, twice."""
    pruned = subject.prune(weight, hessian)
    if pruned.shape != weight.shape or pruned.dtype != weight.dtype:
        raise CheckFailed(f"{list(pruned.shape)} {pruned.dtype} came out of {list(weight.shape)} {weight.dtype}")
    if not bool(torch.isfinite(pruned).all()):
        raise CheckFailed("a value is not finite")
    if not torch.equal(subject.prune(weight, hessian), pruned):
        raise CheckFailed("a second call gives another result")
    # Whoever multiplies matrices, as a second-order pruner does, may add in another order for another layout.
    is_exact = not subject.second_order and not weight.is_contiguous()
    if is_exact and not torch.equal(subject.prune(weight.contiguous(), hessian), pruned):
        raise CheckFailed("a contiguous weight of the same values gives another result")
    return Pruned(weight, hessian, pruned)


def memory_used_again(subject: Sparsifier, context: CheckContext) -> None:
    """Prune other weights, with other Hessians, in one piece of memory each.

    Args:
        subject: a pruner.
        context: how closely.

    Raises:
        CheckFailed: what came out is not what comes out of new memory.
    """
    columns = 24 * multiple_of(subject)
    generator = torch.Generator().manual_seed(context.seed + 2)
    weights = [torch.rand(8, columns, generator=generator) - 0.5 for _ in range(3)]
    plain = hessian_of(columns, context)
    hold_memory(subject.prune, f"prune {[8, columns]}", weights, [plain, plain.roll((2, 2), (0, 1)), plain.roll((1, 1), (0, 1))])
