"""Checks of pruners: 37 to 40, and that what is kept is kept. Masks and losses are computed anew here, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from harness.checks.catalogue.registry import Broken, Look, NothingToCheckError, register
from harness.checks.protocols import Sparsifier
from harness.tolerance import T0, compare


def _weights(subject: Sparsifier, look: Look) -> Iterator[tuple[str, Tensor]]:
    """Weights on which masks go wrong: all magnitudes equal, ties everywhere, outliers, single rows, every dtype; no zeros."""
    multiple = subject.pattern[1] if subject.pattern else 1
    wide = 24 * multiple if multiple > 1 else 97
    generator = torch.Generator().manual_seed(look.seed)

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


def _hessian(columns: int, look: Look) -> Tensor:
    generator = torch.Generator().manual_seed(look.seed + 1)
    x = torch.rand(4 * columns, columns, generator=generator) - 0.5
    x = x + 0.7 * (torch.rand(4 * columns, 1, generator=generator) - 0.5)  # columns that go together
    x[:, ::5] *= 3
    return 2 * x.t() @ x / len(x)


def _each(subject: Sparsifier, look: Look, examined: Callable[[Tensor, Tensor, Tensor], None]) -> str:
    """Prune every weight and look at it: weight, pruned, Hessian."""
    count = 0
    for label, weight in _weights(subject, look):
        hessian = _hessian(weight.shape[1], look)
        pruned = subject.prune(weight, hessian)
        try:
            if pruned.shape != weight.shape or pruned.dtype != weight.dtype:
                raise Broken(f"{list(pruned.shape)} {pruned.dtype} came out of {list(weight.shape)} {weight.dtype}")
            if not bool(torch.isfinite(pruned).all()):
                raise Broken("a value is not finite")
            if not torch.equal(subject.prune(weight, hessian), pruned):
                raise Broken("a second call gives another result")
            examined(weight, pruned, hessian)
        except Broken as broken:
            raise Broken(f"{label} {list(weight.shape)}: {broken}", broken.findings) from None
        count += 1
    return f"{count} weights"


@register(37, "pattern", "N:M counts are exact in every block", kind="sparsifier")
def pattern(subject: Sparsifier, look: Look) -> str:
    """Count zeros in every run of m neighbours, and look at a row that does not divide."""
    if subject.pattern is None:
        raise NothingToCheckError("the subject has no pattern")
    n, m = subject.pattern

    def examined(weight: Tensor, pruned: Tensor, hessian: Tensor) -> None:
        del weight, hessian
        counts = (pruned.reshape(len(pruned), -1, m) != 0).sum(-1)
        bad = (counts != n).nonzero()
        if len(bad):
            row, block = (int(place) for place in bad[0])
            raise Broken(
                f"{len(bad)} of {counts.numel()} blocks do not keep {n} of {m}; row {row}, block {block} keeps {int(counts[row, block])}"
            )

    seen = _each(subject, look, examined)
    return f"{seen}; {_ragged(subject, look, n, m)}"


def _ragged(subject: Sparsifier, look: Look, n: int, m: int) -> str:
    """Give a row with one column too many: it may be refused, or its whole blocks must be right."""
    whole = 6 * m
    weight = torch.rand(3, whole + 1, generator=torch.Generator().manual_seed(look.seed)) + 0.1
    try:
        pruned = subject.prune(weight, _hessian(whole + 1, look))
    except Exception:  # noqa: BLE001 - the subject may refuse with any class
        return f"{whole + 1} columns are refused"
    if pruned.shape != weight.shape or bool(((pruned[:, :whole].reshape(3, -1, m) != 0).sum(-1) != n).any()):
        raise Broken(f"{whole + 1} columns are neither refused nor pruned {n} of {m} in their whole blocks")
    return f"{whole + 1} columns are pruned"


@register(38, "zeros_survive", "Zeros survive later quantizers", kind="sparsifier", caught_by=("sparseml#2281",))
def zeros_survive(subject: Sparsifier, look: Look) -> str:
    """Quantize what was pruned; a zero must be 0 after it, whatever the group beside it holds."""
    quantize = subject.quantize
    if quantize is None:
        raise NothingToCheckError("nothing comes behind the subject")

    def examined(weight: Tensor, pruned: Tensor, hessian: Tensor) -> None:
        del hessian
        for shift in (0.0, 0.3):  # a group that lies on one side of zero needs a zero point that can say 0
            mask = pruned == 0
            shifted = torch.where(mask, pruned, pruned + shift * weight.abs().amax())
            lost = mask & (quantize(shifted.clone()) != 0)
            if bool(lost.any()):
                raise Broken(f"{int(lost.sum())} of {int(mask.sum())} zeros did not survive, the first at {lost.nonzero()[0].tolist()}")

    return _each(subject, look, examined)


@register(39, "target_met", "The target sparsity is met to one element per row", kind="sparsifier")
def target_met(subject: Sparsifier, look: Look) -> str:
    """Count zeros per row, or in all where the subject's scope is the tensor."""

    def examined(weight: Tensor, pruned: Tensor, hessian: Tensor) -> None:
        del hessian
        zeros = (pruned == 0).sum(1).double()
        wanted = subject.sparsity * weight.shape[1]
        off = (zeros - wanted).abs() if subject.scope == "row" else (zeros - wanted).mean().abs()[None]
        if float(off.max()) > 1:
            raise Broken(f"a row has {int(zeros[int(off.argmax())])} zeros of {weight.shape[1]}, where {wanted:.1f} were asked for")

    return _each(subject, look, examined)


@register(
    None,
    "kept_weights",
    "A weight that is kept is what it was, bit for bit, where the subject does not make up for what it drops",
    kind="sparsifier",
)
def kept_weights(subject: Sparsifier, look: Look) -> str:
    """Compare what is not zero."""
    if subject.second_order:
        raise NothingToCheckError("the subject moves the weights that it keeps")

    def examined(weight: Tensor, pruned: Tensor, hessian: Tensor) -> None:
        del hessian
        found = compare(pruned, torch.where(pruned != 0, weight, torch.zeros_like(weight)), T0())
        if found.distance is not None and found.distance.max_abs:
            raise Broken(f"kept weights have changed: {found.summary}")

    return _each(subject, look, examined)


@register(None, "beats_random", "The loss is nearer to that of magnitude pruning than to that of masks drawn at random", kind="sparsifier")
def beats_random(subject: Sparsifier, look: Look) -> str:
    """Compare tr(E H E^T) where magnitudes differ; whoever drops the large ones, or forgets their sign, does no better than chance."""
    generator = torch.Generator().manual_seed(look.seed)
    shape = 16, 24 * subject.pattern[1] if subject.pattern else 96
    weight = (torch.rand(shape, generator=generator) ** 2 + 0.01) * (torch.randint(0, 2, shape, generator=generator) * 2 - 1)
    hessian = _hessian(shape[1], look)
    own = _loss(weight, subject.prune(weight, hessian), hessian)
    best = _loss(weight, _by_magnitude(subject, weight), hessian)
    masks = [_by_magnitude(subject, torch.rand(shape, generator=generator) + 0.01) == 0 for _ in range(16)]
    chance = sum(_loss(weight, weight.masked_fill(mask, 0.0), hessian) for mask in masks) / len(masks)
    seen = f"loss {own:.4g}, where magnitude pruning has {best:.4g} and masks drawn at random have {chance:.4g}"
    if not own <= (best + chance) / 2:
        raise Broken(seen)
    return seen


@register(40, "beats_magnitude", "The loss of a second-order pruner is <= 1.001 x that of magnitude pruning", kind="sparsifier")
def beats_magnitude(subject: Sparsifier, look: Look) -> str:
    """Compare tr(E H E^T) in float64 with dropping the smallest magnitudes of the same rows and blocks."""
    if not subject.second_order:
        raise NothingToCheckError("the subject does not read the Hessian")
    shares = []

    def examined(weight: Tensor, pruned: Tensor, hessian: Tensor) -> None:
        """Hold the loss against that of magnitude pruning, where all zeros would be worse."""
        if len(weight) == 1 or weight.shape[1] < 8 or float(weight.abs().max()) < 1e-20:
            return  # a promise about layers; one row may lose by the order of columns, and squares of tiny values vanish
        own, other = _loss(weight, pruned, hessian), _loss(weight, _by_magnitude(subject, weight), hessian)
        decoy = _loss(weight, torch.zeros_like(weight), hessian)
        if decoy <= 1.001 * other:
            raise Broken("the limit measures nothing: all zeros would pass")
        shares.append(own / other)
        if not own <= 1.001 * other:
            raise Broken(f"loss {own:.6g}, where magnitude pruning has {other:.6g}")

    return f"{_each(subject, look, examined)}, {min(shares):.3f} to {max(shares):.3f} of the loss of magnitude pruning"


def _loss(weight: Tensor, pruned: Tensor, hessian: Tensor) -> float:
    error = pruned.double() - weight.double()
    return float(((error @ hessian.double()) * error).sum())


def _by_magnitude(subject: Sparsifier, weight: Tensor) -> Tensor:
    """Drop the smallest magnitudes of each block, each row, or the whole; ties by position."""
    n, m = subject.pattern or (0, 0)
    if subject.pattern:
        pieces, drop = weight.reshape(-1, m), m - n
    else:
        pieces = weight if subject.scope == "row" else weight.reshape(1, -1)
        drop = round(subject.sparsity * pieces.shape[1])
    order = pieces.abs().double().argsort(dim=1, stable=True)[:, :drop]
    return pieces.scatter(1, order, 0.0).reshape(weight.shape)
