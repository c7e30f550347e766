"""Checks of observers of static activations: 1, 2, 13 and 22 for them, and the rule that their scales follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.checks.catalogue.registry import CheckContext, CheckFailed, NothingToCheckError, register
from harness.checks.inputs.memory import hold_memory
from harness.checks.inputs.pairs import in_words, pairwise
from harness.checks.inputs.presentations import EXPANDED, GRAD_MODES, HELD, WAYS
from harness.checks.oracles import RULES, nearest
from harness.checks.protocols import Observer, Quantized
from harness.checks.strategies import NOT_FINITE

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _batches(kind: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    draw = torch.rand(6, 3, 16, generator=generator, dtype=torch.float64)
    made = {
        "both signs": draw * 5 - 2,
        "positive": draw + 0.5,
        "negative": -draw - 0.25,
        "zeros": draw * 0,
        "rising": draw * torch.arange(1, 7)[:, None, None] - 0.5,
        "falling": (draw - 0.4) * torch.arange(6, 0, -1)[:, None, None],
        "spike": torch.where(draw > 0.995, 40.0, draw - 0.5),
        "small": (draw - 0.4) * 2.0**-4,
        "large": (draw - 0.4) * 2.0**13,
        "tiny": (draw - 0.4) * float(torch.finfo(dtype).tiny) * 2.0**9,  # a floor under the scale shows
        "far": (draw - 0.5) * 1.8 * float(torch.finfo(dtype).max),  # the width is beyond the largest number
        "long": _long(generator),
    }
    made |= {f"{name} {place}": _ends_at(draw, *where) for name, place, *where in _ENDS}
    return list(made[kind].to(dtype))


# Where both ends lie, for whoever leaves a part of a batch out: batch, row and column of each.
_ENDS = (
    ("first", "row", (0, 0, 3), (0, 0, 9)),
    ("last", "row", (5, 2, 3), (5, 2, 9)),
    ("first", "column", (2, 1, 0), (3, 1, 0)),
    ("last", "column", (2, 1, 15), (3, 1, 15)),
)


def _ends_at(draw: Tensor, high: tuple[int, ...], low: tuple[int, ...]) -> Tensor:
    made = draw - 0.5
    made[high], made[low] = 9.0, -8.0
    return made


def _uneven(kind: str, dtype: torch.dtype) -> list[Tensor]:
    """Batches of other sizes than their neighbours, which carry both ends."""
    plain, ends = torch.tensor([[0.5, -0.25, 0.125], [0.0, 1.0, -1.0]]), torch.tensor([[9.0, -8.0, 0.0]])
    made = {
        "one number": [plain, ends[:, :1], ends[:, 1:2]],
        "one number first": [ends[:, :1], ends[:, 1:2], plain],
        "one row": [plain, ends, plain],
        "one column": [plain, ends.t()],
        "one dimension": [plain, ends[0]],
        "no dimension": [plain, ends[0, 0], ends[0, 1]],
        "no dimension first": [ends[0, 0], ends[0, 1], plain],
    }
    return [x.to(dtype) for x in made[kind]]


def _placed(kind: str, dtype: torch.dtype) -> list[Tensor]:
    """Batches of every rank, size and layout, of which one value decides: the last one, below zero."""
    generator = torch.Generator().manual_seed(7)
    if kind == "102 batches":
        many = [torch.rand(2, 8, generator=generator, dtype=torch.float64) - 0.5 for _ in range(102)]
        many[-1][-1, -1] = -9.0
        return [x.to(dtype) for x in many]
    draw = torch.rand(_PLACED[kind], generator=generator, dtype=torch.float64) - 0.5
    draw.view(-1)[-1] = -9.0
    return [_LAID[kind](draw.to(dtype)) if kind in _LAID else draw.to(dtype)]


_PLACED = {
    "130 rows": (130, 16),
    "1,000 columns": (2, 1000),
    "37 numbers": (37,),
    "sequences": (4, 5, 16),
    "long sequences": (5, 130, 16),
    "four dimensions": (2, 3, 4, 8),
    "five dimensions": (2, 3, 2, 3, 4),
    "six dimensions": (2, 2, 2, 3, 2, 4),
    "a single number": (),
    "a transposed view": (12, 20),
    "every other column": (6, 24),
    "a part of a larger tensor": (6, 24),
    "one row, expanded": (1, 24),
}
# The same values, laid out in another way.
_LAID: Mapping[str, Callable[[Tensor], Tensor]] = {
    "a transposed view": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: torch.stack((x, x * 0), -1).flatten(-2)[:, ::2],
    "a part of a larger tensor": lambda x: torch.cat((x * 0, x, x * 0), 1)[:, x.shape[1] : 2 * x.shape[1]],
    "one row, expanded": lambda x: x.expand(5, -1),
}
_PLACES = (*_PLACED, "102 batches")


def _long(generator: torch.Generator) -> Tensor:
    """Two batches of many values, whose ends are the very first value and the very last."""
    long = torch.rand(2, 33, 131, generator=generator, dtype=torch.float64) - 0.5
    long[0, 0, 0], long[-1, -1, -1] = -7.0, 9.0
    return long


class _Reused(Sequence[Tensor]):
    """Batches that all lie in one piece of memory, one after the other, as a data loader may give them."""

    def __init__(self, batches: list[Tensor]) -> None:
        self._batches, self._memory = batches, batches[0].clone()

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, place: Any) -> Any:
        return self._memory.copy_(self._batches[place])


_KINDS: tuple[str, ...] = ("both signs", "positive", "negative", "zeros", "rising", "falling")
_KINDS += ("spike", "small", "large", "tiny", "far", "long")
_KINDS += tuple(f"{name} {place}" for name, place, *_ in _ENDS)
_UNEVEN = ("one number", "one number first", "one row", "one column", "one dimension", "no dimension", "no dimension first")


@register(1, "scales_positive", "Scales are finite and above 0, for batches of zeros too", kind="observer", caught_by=("GPTQModel#1531",))
def scales_positive(subject: Observer, context: CheckContext) -> str:
    """Observe batches of every kind."""
    for dtype in _DTYPES:
        for kind in _KINDS:
            found = subject.observe(_batches(kind, dtype))
            wide = _in_all(found)
            if not bool((wide.isfinite() & (wide > 0)).all()):
                raise CheckFailed(f"{kind} in {dtype}: scale {wide.flatten()[:3].tolist()}")
            zero = torch.zeros(1) if found.zero_point is None else found.zero_point.to(torch.float64)
            if bool(((zero < subject.code_values[0]) | (zero > subject.code_values[-1]) | (zero != zero.round())).any()):
                raise CheckFailed(f"{kind} in {dtype}: zero point {zero.flatten()[:3].tolist()} is no code")
    return f"{len(_KINDS)} kinds of batches in {len(_DTYPES)} dtypes"


@register(None, "scale_rule", "Scale and zero point are those of all values of all batches together", kind="observer")
def scale_rule(subject: Observer, context: CheckContext) -> str:
    """Hold them against the rule in float64."""
    if subject.scale_rule is None:
        raise NothingToCheckError("the scale is searched; no rule is declared")
    for dtype in _DTYPES:
        for kind in (*_KINDS, *_UNEVEN, *_PLACES):
            if kind == "zeros":
                continue
            make = _uneven if kind in _UNEVEN else _placed if kind in _PLACES else _batches
            batches = make(kind, dtype)
            found = subject.observe(batches)
            _hold_rule(subject, found, batches, f"{kind} in {dtype}")
    return f"the rule {subject.scale_rule}"


def _hold_rule(subject: Observer, found: Quantized, batches: Sequence[Tensor], what: str) -> None:
    flat = torch.cat([x.detach().flatten() for x in batches]).to(torch.float64)[None]
    scale, zero = RULES[str(subject.scale_rule)](flat, subject.code_values)
    # Whoever gives a scale in float32 has not measured the width in the dtype of the batches.
    eps = float(torch.finfo(found.scale.dtype).eps)
    actual = float(_in_all(found).reshape(()))
    if abs(actual - float(scale)) > 2 * eps * float(scale):
        raise CheckFailed(f"{what}: scale {actual:.9g}, the rule {subject.scale_rule} says {float(scale):.9g}")
    if found.zero_point is not None:
        _hold_zero(found, torch.zeros(1) if zero is None else zero, subject, eps, what)


def _in_all(found: Quantized) -> Tensor:
    """What a code counts: the scale, over the scale of all scales where there is one."""
    wide = found.scale.to(torch.float64)
    return wide if found.global_scale is None else wide / found.global_scale.to(torch.float64)


def _hold_zero(found: Quantized, zero: Tensor, subject: Observer, eps: float, what: str) -> None:
    assert found.zero_point is not None
    actual = float(found.zero_point.to(torch.float64).reshape(()))
    wanted = float(zero.clamp(subject.code_values[0], subject.code_values[-1]))
    if abs(actual - wanted) > 0.5 + 4 * eps * float(subject.code_values[-1] - subject.code_values[0]) * 2:
        raise CheckFailed(f"{what}: zero point {actual:g}, the rule {subject.scale_rule} says {wanted:g}")


@register(22, "batch_order", "Neither the order of the batches nor where they are cut changes one bit", kind="observer")
def batch_order(subject: Observer, context: CheckContext) -> str:
    """Observe the same values in other orders and batches: each in every dtype, and with every kind of values."""
    cases = pairwise({"kind": _KINDS, "cut": tuple(_CUTS), "dtype": _DTYPES})
    for one in cases:
        kind, dtype = one["kind"], one["dtype"]
        batches = _batches(kind, dtype)
        whole = context.once(subject, f"observed {kind} in {dtype}", partial(subject.observe, batches))
        _same(subject.observe(_CUTS[one["cut"]](batches)), whole, f"{kind} in {dtype}, {one['cut']}")
    for dtype in _DTYPES:
        plain = _batches("both signs", dtype)[0]
        hold_memory(lambda batch: subject.observe([batch]), f"observe {dtype}", [plain, plain * 3, plain * 0.4])
    return f"{len(cases)} sets of batches"


_CUTS: Mapping[str, Callable[[list[Tensor]], Sequence[Tensor]]] = {
    "reversed": lambda batches: batches[::-1],
    "one by one": lambda batches: [row[None] for x in batches for row in x],
    "in one batch": lambda batches: [torch.cat(batches)],
    "with an empty batch": lambda batches: [batches[0][:0], *batches, batches[0][:0]],
    "all in one piece of memory": lambda batches: _Reused(batches),
    "all in one piece of memory, reversed": lambda batches: _Reused(batches[::-1]),
}


def _same(one: Quantized, two: Quantized, what: str) -> None:
    pairs = ((one.scale, two.scale), (one.zero_point, two.zero_point), (one.global_scale, two.global_scale))
    if not all(left is right is None or (left is not None and right is not None and torch.equal(left, right)) for left, right in pairs):
        raise CheckFailed(f"{what}: scale {one.scale.flatten()[:2].tolist()} where it was {two.scale.flatten()[:2].tolist()}")


@register(
    13, "refuses_nonfinite", "NaN or infinity in a batch raises an error with a message", kind="observer", needs=("refuses_nonfinite",)
)
def refuses_nonfinite(subject: Observer, context: CheckContext) -> str:
    """Plant NaN and infinities into the first and the last batch, and under each pair of conditions; who refuses keeps nothing."""
    planted = 0
    for dtype in _DTYPES:
        plain = _batches("both signs", dtype)
        whole = subject.observe(plain)
        for value in NOT_FINITE:
            for place in (0, -1):
                batches = [x.clone() * 100 for x in plain]
                batches[place][1, 3] = value
                _refused(subject, batches, f"{value} in batch {place} in {dtype}")
                _same(subject.observe(plain), whole, f"after a run that was refused for {value} in {dtype}")
            planted += 2
    for value in NOT_FINITE:
        for rank in range(7):
            batches = [*_batches("both signs", torch.float32), torch.full((1,) * rank, value, dtype=torch.float32)]
            _refused(subject, batches, f"{value} alone in a batch of {rank} dimensions")
            planted += 1
    ways = [way for way in WAYS if way not in EXPANDED]  # of a row that is seen again only the first place can be planted
    cases = pairwise({**_CONDITIONS, "laid": ways, "values": NOT_FINITE})
    for one in cases:
        batches = _met(one, partial(_planted, value=one["values"]), torch.clone)
        with GRAD_MODES[one["grad"]]():
            _refused(subject, batches, in_words(one))
    return f"{planted + len(cases)} planted values were refused"


def _planted(draw: Tensor, value: float) -> Tensor:
    return torch.where(draw == draw.max(), value, draw)


def _refused(subject: Observer, batches: list[Tensor], what: str) -> None:
    try:
        subject.observe(batches)
    except Exception as error:  # the subject may refuse with any class
        if not str(error).strip():
            raise CheckFailed(f"{what}: {type(error).__name__} came without a message") from error
        return
    raise CheckFailed(f"{what} was observed as if nothing had happened")


@register(36, "search_pays", "A searched range loses at most 2 % more than the full one: |dq - x|^2.4 over all values", kind="observer")
def search_pays(subject: Observer, context: CheckContext) -> str:
    """Round all values with the scale that was found, and with that of the full range."""
    if subject.scale_rule is not None:
        raise NothingToCheckError("the scale follows a rule")
    ratios = []
    for dtype in _DTYPES:
        for kind in _KINDS:
            batches = _batches(kind, dtype)
            found = subject.observe(batches)
            own, full = _errors(subject, found, batches, f"{kind} in {dtype}")
            ratios.append(own / full if full else 1.0)
    return f"{min(ratios):.3f} to {max(ratios):.3f} of the error of the full range"


def _errors(subject: Observer, found: Quantized, batches: Sequence[Tensor], what: str, most: float = 1.02) -> tuple[float, float]:
    """The error of all values with a searched range, which may be so many times that with the full one, and that."""
    flat = torch.cat([x.detach().flatten() for x in batches]).to(torch.float64)
    scale, zero = RULES["half_range" if found.zero_point is None else "range"](flat[None], subject.code_values)
    own_zero = 0.0 if found.zero_point is None else float(found.zero_point)
    full_zero = 0.0 if zero is None else float(zero.round())
    own = _error(flat, float(_in_all(found)), own_zero, subject.code_values)
    full = _error(flat, float(scale), full_zero, subject.code_values) if float(scale) else 0.0
    if not own <= most * full + 1e-30:
        raise CheckFailed(f"{what}: an error of {own:.6g}, with the full range it is {full:.6g}")
    return own, full


def _error(flat: Tensor, scale: float, zero: float, grid: Tensor) -> float:
    return float((((nearest(flat / scale + zero, grid) - zero) * scale - flat).abs() ** 2.4).sum())


@register(42, "refuses_nothing", "No value at all raises an error with a message: there is no range", kind="observer")
def refuses_nothing(subject: Observer, context: CheckContext) -> str:
    """Observe no batch, and batches without values, of every rank and dtype."""
    _refused(subject, [], "no batch")
    cases = pairwise({"shape": _EMPTY, "another": (None, *_EMPTY), "dtype": _DTYPES, "held": tuple(HELD), "grad": tuple(GRAD_MODES)})
    for one in cases:
        shapes = [shape for shape in (one["shape"], one["another"]) if shape is not None]
        batches = [HELD[one["held"]](torch.zeros(shape, dtype=one["dtype"])) for shape in shapes]
        with GRAD_MODES[one["grad"]]():
            _refused(subject, batches, f"batches without values, {in_words(one)},")
    return f"no batch, and {len(cases)} sets of batches without values"


_EMPTY: tuple[tuple[int, ...], ...] = ((0,), (0, 16), (16, 0), (2, 0, 16), (2, 3, 0), (1, 0, 2, 16), (0, 0))


_VALUES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "both signs": lambda draw: draw - 0.4,
    "positive": lambda draw: draw + 0.1,
    "negative": lambda draw: -draw - 0.1,
    "behind a relu": lambda draw: (draw - 0.5).clamp(min=0),
    "zeros": lambda draw: draw * 0,
    "a constant": lambda draw: torch.full_like(draw, 0.75),
    "small": lambda draw: (draw - 0.4) * 2.0**-6,
    "large": lambda draw: (draw - 0.4) * 2.0**13,
}
_MEETING = (
    (37,),
    (1,),
    (1, 16),
    (6, 1),
    (130, 16),
    (2, 1000),
    (2, 3, 16),
    (1, 13, 16),
    (5, 130, 16),
    (2, 5, 13, 16),
    (2, 3, 2, 3, 4),
    (2, 2, 2, 3, 2, 4),
)
# How many batches there are, and which of them decides.
_DECIDES = {
    "alone": (1, 0),
    "the first of two": (2, 0),
    "the last of two": (2, 1),
    "in the middle of three": (3, 1),
    "the last of nine": (9, 8),
}
# What the others are: a hundredth of those values, in its shape, or in one of their own.
_BESIDE: Mapping[str, tuple[int, ...] | None] = {
    "alike": None,
    "numbers": (),
    "rows": (3, 16),
    "sequences": (2, 3, 16),
    "without values": (0, 16),
}
# Where the largest number of the batch lies that decides.
_AT: Mapping[str, int | None] = {"anywhere": None, "at the beginning": 0, "at the end": -1}
_CONDITIONS: Mapping[str, Sequence[Any]] = {
    "laid": tuple(WAYS),
    "held": tuple(HELD),
    "shape": _MEETING,
    "decides": tuple(_DECIDES),
    "beside": tuple(_BESIDE),
    "at": tuple(_AT),
    "dtype": _DTYPES,
    "grad": tuple(GRAD_MODES),
}
# Where values are all the same nobody sees that some were left out, and a single row or column lies as it does in any layout.
_MASKING: Mapping[str, Sequence[Any]] = {
    "laid": tuple(EXPANDED),
    "values": ("zeros", "a constant"),
    "shape": [shape for shape in _MEETING if 1 in shape and len(shape) < 3],
}


@register(
    None,
    "conditions_meet",
    "Any two of shape, dtype, layout, kind of tensor, gradients, values and the batch that decides may meet: the rule, or as of plain ones",
    kind="observer",
)
def conditions_meet(subject: Observer, context: CheckContext) -> str:
    """Observe batches for each pair of conditions."""
    cases = pairwise({**_CONDITIONS, "values": tuple(_VALUES)}, _MASKING)
    for one in cases:
        batches = _met(one, _VALUES[one["values"]], _VALUES[one["values"]])
        what = in_words(one)
        with GRAD_MODES[one["grad"]]():
            found = subject.observe(batches)
        if subject.scale_rule is None:
            plain = [batch.detach().clone(memory_format=torch.contiguous_format) for batch in batches]
            _same(found, subject.observe(plain), what)
            # Fewer may all lie on the full range's grid, and beside any other.
            if len(torch.cat([batch.flatten() for batch in plain]).unique()) > 8:
                _errors(subject, found, batches, what, most=2.0)  # with few values a search by histograms loses some
        elif any(bool(batch.any()) for batch in batches):
            _hold_rule(subject, found, batches, what)
    return f"{len(cases)} sets of batches"


def _met(one: Mapping[str, Any], values: Callable[[Tensor], Tensor], others: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The batches of a case, of which one decides."""
    generator = torch.Generator().manual_seed(9)
    count, place = _DECIDES[one["decides"]]
    shape, at = _BESIDE[one["beside"]], _AT[one["at"]]
    batches = []
    for number in range(count):
        is_other = number != place
        draw = torch.rand(one["shape"] if shape is None or not is_other else shape, generator=generator, dtype=torch.float64)
        if at is not None and not is_other:
            draw.view(-1)[at] = 3.0
        batch = (others(draw) * 0.01 if is_other else values(draw)).to(one["dtype"])
        batches.append(HELD[one["held"]](WAYS[one["laid"]](batch) if batch.dim() else batch))
    return batches
