"""Checks of pruners: 37 to 40, and that what is kept is kept. Masks and losses are computed anew here, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from harness.checks.catalogue.registry import CheckContext, CheckFailed, NothingToCheckError, register
from harness.checks.inputs.examine import refuse
from harness.checks.inputs.pairs import in_words, pairwise, told_of
from harness.checks.inputs.presentations import GRAD_MODES, HELD, LAYOUTS, WAYS
from harness.checks.inputs.prune_weights import (
    DTYPES,
    FEW_LARGE,
    TIES,
    Pruned,
    each_ordinary,
    each_weight,
    few_large_inputs,
    hessian_of,
    memory_used_again,
    multiple_of,
    num_large,
    pruned_shapes,
    tied_scores,
)
from harness.checks.oracles import drop_dense
from harness.checks.protocols import Sparsifier
from harness.tolerance import T0, compare


@register(37, "pattern", "N:M counts are exact in every block", kind="sparsifier")
def pattern(subject: Sparsifier, context: CheckContext) -> str:
    """Count zeros in every run of m neighbours, and look at a row that does not divide."""
    if subject.pattern is None:
        raise NothingToCheckError("the subject has no pattern")
    seen = each_weight(subject, context, partial(_hold_pattern, subject))
    return f"{seen}; {_ragged(subject, context, *subject.pattern)}"


def _hold_pattern(subject: Sparsifier, one: Pruned) -> None:
    n, m = subject.pattern or (1, 1)
    counts = (one.pruned.reshape(len(one.pruned), -1, m) != 0).sum(-1)
    were_zero = (one.weight.reshape(len(one.pruned), -1, m) == 0).sum(-1)
    bad = ((counts > n) | (counts < n - were_zero)).nonzero()  # a zero that is kept cannot be told from one that is not
    if len(bad):
        row, block = (int(place) for place in bad[0])
        raise CheckFailed(
            f"{len(bad)} of {counts.numel()} blocks do not keep {n} of {m}; row {row}, block {block} keeps {int(counts[row, block])}"
        )


def _ragged(subject: Sparsifier, context: CheckContext, n: int, m: int) -> str:
    """Give rows with columns too many: they may be refused, or whole blocks are right, and of the rest n are kept, or what there is."""
    whole, taken = 6 * m, []
    for columns in range(whole + 1, whole + m):
        weight = torch.rand(3, columns, generator=torch.Generator().manual_seed(context.seed)) + 0.1
        weight[:, -1] *= 1000  # so large that no score lets it go
        try:
            pruned = subject.prune(weight, hessian_of(columns, context))
        except Exception:  # noqa: BLE001 - the subject may refuse with any class
            continue
        if pruned.shape != weight.shape or bool(((pruned[:, :whole].reshape(3, -1, m) != 0).sum(-1) != n).any()):
            raise CheckFailed(f"{columns} columns are neither refused nor pruned {n} of {m} in their whole blocks")
        kept, due = (pruned[:, whole:] != 0).sum(-1), min(n, columns - whole)
        if odd := [count for count in kept.tolist() if count != due]:
            raise CheckFailed(f"of {columns} columns the last {columns - whole} keep {odd[0]}, not {due}")
        if bool((pruned[:, -1] == 0).any()):
            raise CheckFailed(f"of {columns} columns the last one went, which is by far the largest")
        taken.append(columns)
    return f"{', '.join(map(str, taken))} columns are pruned" if taken else f"{whole + 1} to {whole + m - 1} columns are refused"


@register(38, "zeros_survive", "Zeros survive later quantizers", kind="sparsifier", caught_by=("sparseml#2281",))
def zeros_survive(subject: Sparsifier, context: CheckContext) -> str:
    """Quantize what was pruned; a zero must be 0 after it, whatever the group beside it holds."""
    quantize = subject.quantize
    if quantize is None:
        raise NothingToCheckError("nothing comes behind the subject")

    def examined(one: Pruned) -> None:
        weight, pruned = one.weight, one.pruned
        for shift in (0.0, 0.3):  # a group that lies on one side of zero needs a zero point that can say 0
            mask = pruned == 0
            shifted = torch.where(mask, pruned, pruned + shift * weight.abs().amax())
            lost = mask & (quantize(shifted.clone()) != 0)
            if bool(lost.any()):
                raise CheckFailed(
                    f"{int(lost.sum())} of {int(mask.sum())} zeros did not survive, the first at {lost.nonzero()[0].tolist()}"
                )

    return each_ordinary(subject, context, examined)


@register(39, "target_met", "The target sparsity is met to one element per row", kind="sparsifier")
def target_met(subject: Sparsifier, context: CheckContext) -> str:
    """Count zeros per row, or in all where the subject's scope is the tensor."""
    return each_weight(subject, context, partial(_hold_target, subject))


def _hold_target(subject: Sparsifier, one: Pruned) -> None:
    zeros, before = (one.pruned == 0).sum(1).double(), one.zeros_before.double()
    wanted = subject.sparsity * one.weight.shape[1]
    if subject.scope == "tensor":
        zeros, before = zeros.mean()[None], before.mean()[None]
    off = torch.maximum(wanted - zeros, zeros - wanted - before)  # a zero that was there may have been dropped or kept
    if float(off.max()) > 1:
        raise CheckFailed(
            f"a row has {float(zeros[int(off.argmax())]):g} zeros of {one.weight.shape[1]}, where {wanted:.1f} were asked for"
        )


@register(
    None,
    "kept_weights",
    "A weight that is kept is what it was, bit for bit, where the subject does not make up for what it drops",
    kind="sparsifier",
)
def kept_weights(subject: Sparsifier, context: CheckContext) -> str:
    """Compare what is not zero."""
    if subject.second_order:
        raise NothingToCheckError("the subject moves the weights that it keeps")
    return each_weight(subject, context, _hold_kept)


def _hold_kept(one: Pruned) -> None:
    found = compare(one.pruned, torch.where(one.pruned != 0, one.weight, torch.zeros_like(one.weight)), T0())
    if found.distance is not None and found.distance.max_abs:
        raise CheckFailed(f"kept weights have changed: {found.summary}")


@register(None, "beats_random", "The loss is nearer to that of magnitude pruning than to that of masks drawn at random", kind="sparsifier")
def beats_random(subject: Sparsifier, context: CheckContext) -> str:
    """Compare tr(E H E^T) where magnitudes tell; whoever drops the large ones, or forgets their sign, does no better than chance."""
    memory_used_again(subject, context)
    _hold_far_apart(subject, context)
    worst = 0.0
    for label, weight in _uneven(subject, context):
        hessian = hessian_of(weight.shape[1], context)
        own, best, chance = _losses_of(subject, Pruned(weight, hessian, subject.prune(weight, hessian)), context)
        ends = {place % len(weight) for place in range(-3, 3)} if subject.scope == "row" else ()
        for rows in (slice(None), *(slice(row, row + 1) for row in sorted(ends))):
            sums = own[rows].sum(), best[rows].sum(), chance[rows].sum()
            # The middle between both; where few weights stay, magnitude pruning is hardly better than chance itself, and says nothing.
            if sums[1] < 0.8 * sums[2] and not sums[0] <= (sums[1] + sums[2]) / 2:
                seen = "loss {:.4g}, where magnitude pruning has {:.4g} and masks drawn at random have {:.4g}".format(*sums)
                raise CheckFailed(f"{label} {list(weight.shape)}: {seen}")
            worst = max(worst, float((sums[0] - sums[1]) / (sums[2] - sums[1]).clamp(min=1e-300)))
    return f"the loss goes at most {worst:.0%} of the way from magnitude pruning to masks drawn at random"


def _hold_far_apart(subject: Sparsifier, context: CheckContext) -> None:
    """Plant, at random in every row and block, a thousandfold in half of the places that stay, a thousandth in half of those that go."""
    generator = torch.Generator().manual_seed(context.seed)
    m = multiple_of(subject)
    columns = 24 * m if m > 1 else 97
    size = m if subject.pattern else columns
    num_kept = round((1 - subject.sparsity) * size)
    for rows in (9, columns):
        signs = torch.randint(0, 2, (rows, columns), generator=generator) * 2 - 1
        values = (torch.rand(rows, columns, generator=generator) + 0.5) * signs
        ranks = torch.rand(rows, columns // size, size, generator=generator).argsort(-1).reshape(rows, columns)
        large, small = ranks < (num_kept + 1) // 2, ranks >= size - (size - num_kept + 1) // 2
        weight = torch.where(large, values * 1000, torch.where(small, values / 1000, values))
        stays = subject.prune(weight, hessian_of(columns, context)) != 0
        refuse(large & ~stays, f"{list(weight.shape)}: a weight of a thousand times the others is dropped", weight=weight)
        if not subject.second_order:  # which may have moved a small one before it comes to it
            refuse(small & stays, f"{list(weight.shape)}: a weight of a thousandth of the others is kept", weight=weight)


def _uneven(subject: Sparsifier, context: CheckContext) -> Iterator[tuple[str, Tensor]]:
    """Weights whose magnitudes differ, in shapes with columns enough; two of one shape, of which one has the first row of the other."""
    generator = torch.Generator().manual_seed(context.seed)
    m = multiple_of(subject)
    wide = 24 * m if m > 1 else 96
    for rows, columns in ((16, wide), (wide, wide), (131, 24 * m), (3, -(-1031 // m) * m)):
        weight = _uneven_of((rows, columns), generator)
        yield "uneven", weight
        if rows == 16:
            yield "another one of that shape", torch.cat([weight[:1], weight[1:].flip(1)])
            yield "of bfloat16", weight.to(torch.bfloat16)
            yield "of float16", weight.to(torch.float16)
            for power in () if subject.second_order else (-140, 100):  # subnormal, and large
                yield f"times 2^{power}", torch.ldexp(weight, torch.tensor(power))


def _uneven_of(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return (torch.rand(shape, generator=generator) ** 2 + 0.01) * (torch.randint(0, 2, shape, generator=generator) * 2 - 1)


def _losses_of(subject: Sparsifier, one: Pruned, context: CheckContext) -> tuple[Tensor, Tensor, Tensor]:
    """The losses [R] of the subject, of magnitude pruning, and of masks drawn at random, as a mean."""
    weight, wide = one.weight, one.hessian.double()
    masks = context.once(subject, f"masks of {list(weight.shape)}", partial(_random_masks, subject, weight.shape))
    chance = torch.stack([_row_losses(weight, weight.masked_fill(mask, 0.0), wide) for mask in masks]).mean(0)
    return _row_losses(weight, one.pruned, wide), _row_losses(weight, _by_magnitude(subject, weight), wide), chance


def _random_masks(subject: Sparsifier, shape: torch.Size) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [_by_magnitude(subject, torch.rand(shape, generator=generator) + 0.01) == 0 for _ in range(16)]


@register(40, "beats_magnitude", "The loss of a pruner that reads the Hessian is <= 1.001 x that of magnitude pruning", kind="sparsifier")
def beats_magnitude(subject: Sparsifier, context: CheckContext) -> str:
    """Compare tr(E H E^T) in float64 with dropping the smallest magnitudes of the same rows and blocks."""
    if not _says_that_it_reads(subject):
        raise NothingToCheckError("the subject does not say that it reads the Hessian")
    shares = []

    def examined(one: Pruned) -> None:
        """Hold the loss against that of magnitude pruning, where all zeros would be worse."""
        weight, pruned, hessian = one.weight, one.pruned, one.hessian
        if len(weight) == 1 or weight.shape[1] < 8 or float(weight.abs().max()) < 1e-20:
            return  # a promise about layers; one row may lose by the order of columns, and squares of tiny values vanish
        own, other = _loss(weight, pruned, hessian), _loss(weight, _by_magnitude(subject, weight), hessian)
        decoy = _loss(weight, torch.zeros_like(weight), hessian)
        if decoy <= 1.001 * other:
            raise CheckFailed("the limit measures nothing: all zeros would pass")
        shares.append(own / other)
        if not own <= 1.001 * other:
            raise CheckFailed(f"loss {own:.6g}, where magnitude pruning has {other:.6g}")

    return f"{each_ordinary(subject, context, examined)}, {min(shares):.3f} to {max(shares):.3f} of the loss of magnitude pruning"


# A damping of a tenth of the mean diagonal costs 2 % of the norm of a row's error, ours 0.2 %.
_DAMPING = 1.03
_FEW_COLUMNS = 100


@register(
    None,
    "makes_up",
    "A second-order pruner makes up for what it drops as well as optimal brain surgery, column by column, does in float64",
    kind="sparsifier",
)
def makes_up(subject: Sparsifier, context: CheckContext) -> str:
    """Hold sqrt(e H e^T) of each row to that of a dense solver that drops the same weights, and rounds them to their dtype.

    Columns go in their own order or by falling diagonal of the Hessian, whichever leaves the larger error: a pruner may do either.
    """
    if not subject.second_order:
        raise NothingToCheckError("the subject does not move the weights that it keeps")
    worst = 0.0

    def examined(one: Pruned) -> None:
        nonlocal worst
        worst = max(worst, _hold_made_up(one))

    seen = each_ordinary(subject, context, examined)
    for columns in (3, 97, 260, 644):
        _hold_last_columns(subject, context, columns)
    for columns, seed in ((97, 1), (97, 2), (644, 3)):  # one shape with other inputs; more columns than are taken at once
        _hold_far_columns(subject, columns, context.seed + seed)
    return f"{seen}, errors at most {worst:.3f} of those of the dense solver"


def _hold_made_up(one: Pruned) -> float:
    """Return the largest share of a row's limit."""
    wide, gone = one.hessian.double(), one.pruned == 0
    limit = torch.zeros(len(gone), dtype=torch.float64)
    for order in (torch.arange(len(wide)), wide.diagonal().argsort(descending=True, stable=True)):
        moved = drop_dense(one.weight, wide, gone, order)
        rounding = _row_losses(moved, moved.to(one.weight.dtype), wide)
        limit = torch.maximum(limit, _row_losses(one.weight, moved, wide).sqrt() + 2 * rounding.sqrt())
    own = _row_losses(one.weight, one.pruned, wide).sqrt()
    shares = own / limit.clamp(min=1e-6 * float(one.weight.double().abs().max()) + 1e-300)  # float32 where next to nothing goes
    row = int(shares.argmax())
    if not float(shares.max()) <= _DAMPING:
        still = torch.equal(one.pruned, one.weight.masked_fill(gone, 0.0))
        what = "the pruner moves none of the weights that it keeps: " if still else ""
        seen = f"{what}row {row} has an error of {own[row]:.4g} where it could have at most {limit[row]:.4g} with the same zeros"
        raise CheckFailed(seen)
    return float(shares.max())


def _hold_last_columns(subject: Sparsifier, context: CheckContext, columns: int) -> None:
    """Let the last columns, which stay, take what all others leave: they must be what least squares, damped by a tenth, makes of them."""
    m = multiple_of(subject)
    columns = -(-columns // m) * m
    num_kept = min(2, subject.pattern[0] if subject.pattern else int((1 - subject.sparsity) * columns))
    if not 0 < num_kept < columns:
        return
    weight, hessian = _one_signal(columns, num_kept, context.seed)
    pruned, wide, exact = subject.prune(weight.clone(), hessian.clone()), hessian.double(), weight.double()
    label = f"the last columns of {list(weight.shape)}"
    refuse(pruned[:, -num_kept:] == 0, f"{label}: a weight is dropped that does most", weight=weight[:, -num_kept:])
    for last in range(1, num_kept + 1):
        damped = wide[-last:, -last:] + 0.1 * wide.diagonal().mean() * torch.eye(last)
        left = (pruned.double() - exact)[:, :-last] @ wide[:-last, -last:]
        best = torch.cat([pruned[:, :-last].double(), exact[:, -last:] - torch.linalg.solve(damped, left.t()).t()], 1)
        own, limit = (_row_losses(weight, one, wide).sqrt() for one in (pruned, best))
        beyond = own > _DAMPING * limit.clamp(min=1e-6 * float(exact.abs().max()))
        refuse(beyond, f"{label}: the last {last} do not make up for the others", error=own, possible=limit)


def _hold_far_columns(subject: Sparsifier, columns: int, seed: int) -> None:
    """Let inputs be sums of sixteen signals, so that columns far apart make up for each other."""
    columns = -(-columns // multiple_of(subject)) * multiple_of(subject)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * columns, 16, generator=generator) @ torch.randn(16, columns, generator=generator)
    x = x + torch.randn(x.shape, generator=generator)
    x = x / x.square().mean(0).sqrt() * torch.linspace(1.1, 1.0, columns)  # by falling diagonal they lie as they are
    weight, hessian = torch.randn(8, columns, generator=generator), 2 * x.t() @ x / len(x)
    pruned, wide = subject.prune(weight.clone(), hessian.clone()), hessian.double()
    dampings = (share * wide.diagonal().mean() * torch.eye(columns) for share in (0.0, 0.1))
    best = [drop_dense(weight, wide + damping, pruned == 0, torch.arange(columns)) for damping in dampings]
    limit = torch.stack([_row_losses(weight, one, wide).sqrt() for one in best]).amax(0)
    own = _row_losses(weight, pruned, wide).sqrt()
    refuse(own > 1.2 * limit, f"{list(weight.shape)}: columns do not make up for those far from them", error=own, possible=limit)


def _one_signal(columns: int, num_last: int, seed: int) -> tuple[Tensor, Tensor]:
    """A weight and the Hessian of inputs that share one signal.

    What the last column to be dropped leaves of it can only be made up for behind it: by the last ones, which come last by their place and,
    with the smallest inputs, by the diagonal, too, and weigh so much that they stay.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * columns, 1, generator=generator) + 0.1 * torch.randn(4 * columns, columns, generator=generator)
    x[:, -num_last:] *= 0.8
    weight = (torch.rand(16, columns, generator=generator) + 0.5) * (torch.randint(0, 2, (16, columns), generator=generator) * 2 - 1)
    weight[:, -num_last:] *= 100
    return weight, 2 * x.t() @ x / len(x)


_VALUES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "uneven": torch.clone,
    "above zero": torch.abs,
    "a row of zeros": lambda w: w * (torch.arange(len(w)) != len(w) - 1)[:, None],
    "large": lambda w: w * 2.0**8,
    "small": lambda w: w * 2.0**-8,
}


_UNITS = (0, -26, 26)
"""Of inputs, as powers of two of their squares: 1, 1e-4 and 1e4."""


@register(
    None,
    "inputs_count",
    "Where few inputs are a hundred times the others, a pruner that reads the Hessian loses at most half of what chance does of them",
    kind="sparsifier",
)
def inputs_count(subject: Sparsifier, context: CheckContext) -> str:
    """Give few columns large inputs, all of which may stay: who looks at weights alone, or mixes up rows and columns, drops some.

    Any two of shape, dtype, values and the unit of inputs meet, with and without an input that is always zero, or weights that are zero.
    """
    shapes = [shape for shape in pruned_shapes(subject) if num_large(subject, shape[1])]
    if not shapes:
        raise NothingToCheckError("the subject keeps nothing, or all")
    shares, reads, keeps_dead = [], _says_that_it_reads(subject), []
    cases = pairwise({"inputs": FEW_LARGE, "shape": shapes, "dtype": DTYPES, "values": tuple(_VALUES), "unit": _UNITS})
    for case in cases:
        weight, hessian, is_large = few_large_inputs(subject, case["inputs"], case["shape"], context)
        hessian = hessian * 2.0 ** case["unit"]
        weight = _VALUES[case["values"]](weight).to(case["dtype"])
        one = Pruned(weight, hessian, subject.prune(weight, hessian))
        with told_of(in_words(case)):
            _hold_zeros(subject, one)
            shares.append((*_share_of_chance(subject, one, is_large), in_words(case)))
        if not bool((weight == 0).any()) and bool(((one.pruned != 0) & (hessian.diagonal() == 0)).any()):
            keeps_dead.append(in_words(case))
        reads = reads or not torch.equal(one.pruned == 0, subject.prune(weight, hessian_of(len(hessian), context)) == 0)
    if not reads:
        raise NothingToCheckError("the subject does not read the Hessian")
    worst, row, what = max(shares)
    if not worst <= 0.5:
        seen = f"row {row} loses {worst:.3g} times what chance does at large inputs"
        raise CheckFailed(f"{what}: {seen}: the sizes of inputs do not count as they should")
    if keeps_dead:
        raise CheckFailed(f"{keeps_dead[0]}: a weight that is small, of a dead input, is kept")
    _hold_magnitudes(subject, few_large_inputs(subject, FEW_LARGE[0], shapes[0], context)[0], context)
    return f"{len(cases)} weights, at large inputs no row loses more than {worst:.3f} of what chance does"


def _hold_magnitudes(subject: Sparsifier, weight: Tensor, context: CheckContext) -> None:
    """Inputs of another unit choose the same weights: what is added to a Hessian, or a floor of it, is relative to it."""
    hessian = hessian_of(weight.shape[1], context)
    plain = _loss(weight, subject.prune(weight, hessian), hessian)
    for power in _UNITS[1:]:
        if not (loss := _loss(weight, subject.prune(weight, hessian * 2.0**power), hessian)) <= 1.01 * plain:
            raise CheckFailed(f"2^{power // 2} times the inputs: the zeros lose {loss / plain:.3g} times what they do without")


def _share_of_chance(subject: Sparsifier, one: Pruned, is_large: Tensor) -> tuple[float, int]:
    """Return the largest share of a row in what masks drawn at random take of the weights of large inputs, and the row."""
    exact = one.weight.double()
    lost, whole = ((change[:, is_large].square() @ one.hessian.diagonal()[is_large].double()) for change in (one.pruned - exact, exact))
    shares = lost / (subject.sparsity * whole).clamp(min=1e-300)
    return float(shares.max()), int(shares.argmax())


_LAID = ("as it is", *LAYOUTS)
_MEETING = {
    "held": tuple(HELD),
    "hessian": _LAID[::3],
    "hessian held": tuple(HELD),
    "unit": _UNITS,
    "values": tuple(_VALUES),
    "dtype": DTYPES,
    "grad": tuple(GRAD_MODES),
}
_INPUTS = ("correlated", FEW_LARGE[1], TIES[1])


@register(
    None,
    "conditions_meet",
    "Any two of shape, dtype, values, inputs, their unit, layouts and gradients may meet: zeros and losses as ever, as of ordinary weights",
    kind="sparsifier",
)
def conditions_meet(subject: Sparsifier, context: CheckContext) -> str:
    """Prune for each pair of conditions, and the same weight as an ordinary tensor."""
    # Losses say nothing beside inputs that are dead or alike; a single row lies as it does in any layout.
    sizes = pruned_shapes(subject)
    masking = {"inputs": _INPUTS[1:], "shape": [size for size in sizes if 1 in size]}
    cases = pairwise({"laid": _LAID, "shape": sizes, "inputs": _INPUTS, **_MEETING}, masking)
    for case in cases:
        weight, hessian = _met(subject, case["inputs"], case["shape"], context)
        hessian = hessian * 2.0 ** case["unit"]
        weight = _VALUES[case["values"]](weight).to(case["dtype"])
        one = Pruned(weight, hessian, subject.prune(weight, hessian))
        with GRAD_MODES[case["grad"]]():
            found = subject.prune(
                HELD[case["held"]](WAYS[case["laid"]](weight)), HELD[case["hessian held"]](WAYS[case["hessian"]](hessian))
            )
        with told_of(in_words(case)):
            if case["inputs"] == _INPUTS[0]:
                _hold_all(subject, one, context)
                _hold_alike(subject, found, one.pruned)
            else:  # whoever adds in another order may choose another one of equals
                _hold_zeros(subject, one)
                _hold_zeros(subject, Pruned(weight, hessian, found))
    return f"{len(cases)} weights"


def _met(subject: Sparsifier, inputs: str, shape: tuple[int, int], context: CheckContext) -> tuple[Tensor, Tensor]:
    if inputs in TIES:
        return tied_scores(inputs, shape, context)
    if inputs in FEW_LARGE:
        return few_large_inputs(subject, inputs, shape, context)[:2]
    return _uneven_of(shape, torch.Generator().manual_seed(context.seed + 5)), hessian_of(shape[1], context)


def _hold_zeros(subject: Sparsifier, one: Pruned) -> None:
    """Hold the zeros of any weight, and what stays of it where nothing is made up for."""
    refuse(~one.pruned.isfinite(), "a value is not finite", weight=one.weight)
    for hold in (_hold_pattern, _hold_target) if subject.pattern else (_hold_target,):
        hold(subject, one)
    if not subject.second_order:
        _hold_kept(one)


def _hold_all(subject: Sparsifier, one: Pruned, context: CheckContext) -> None:
    """Hold an ordinary weight to what the other checks say of theirs."""
    _hold_zeros(subject, one)
    if subject.second_order and one.weight.shape[1] <= _FEW_COLUMNS:
        _hold_made_up(one)
    own, best, chance = (float(part.sum()) for part in _losses_of(subject, one, context))
    if not own <= (best + chance) / 2 * (1 + 1e-9):
        raise CheckFailed(f"loss {own:.4g}, where magnitude pruning has {best:.4g} and masks drawn at random have {chance:.4g}")


def _hold_alike(subject: Sparsifier, found: Tensor, expected: Tensor) -> None:
    """The same values, but for what sums in another order move in a pruner that makes up for what it drops."""
    far = float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300))
    if found.dtype != expected.dtype or not far <= (0.05 if subject.second_order else 0):
        raise CheckFailed(f"another result than that of an ordinary tensor: relative error {far:.3g}")


def _says_that_it_reads(subject: Sparsifier) -> bool:
    return subject.second_order or "reads_hessian" in subject.tags


def _loss(weight: Tensor, pruned: Tensor, hessian: Tensor) -> float:
    return float(_row_losses(weight, pruned, hessian.double()).sum())


def _row_losses(weight: Tensor, pruned: Tensor, hessian: Tensor) -> Tensor:
    error = pruned.double() - weight.double()
    return ((error @ hessian) * error).sum(1)


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
