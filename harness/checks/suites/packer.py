"""Checks of packers: 10, how dense the words are, and where each code lies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

import torch
from torch import Tensor

from harness.checks.catalogue.registry import CheckContext, CheckFailed, NothingToCheckError, register
from harness.checks.inputs.examine import refuse
from harness.checks.inputs.memory import hold_memory
from harness.checks.inputs.pairs import in_words, pairwise, told_of
from harness.checks.inputs.presentations import EXPANDED, GRAD_MODES, layouts, places
from harness.checks.inputs.presentations import LAYOUTS as LAID
from harness.checks.oracles import LAYOUTS, bits_behind
from harness.checks.protocols import Packer

_LENGTHS = (1, 2, 3, 5, 7, 8, 13, 31, 32, 33, 37, 64, 67)
_LARGE = ((521, 13), (2, 1031), (0, 8))  # many rows, a long row, and none


def _cases(subject: Packer) -> Iterator[Tensor]:
    """Every code in every place of some lengths and ranks: neighbours are alike, different, and at both ends."""
    generator = torch.Generator().manual_seed(0)
    grid = subject.code_values
    for length in _LENGTHS:
        columns = length * subject.column_multiple
        for rank in subject.ranks:
            shape = (*(3, 2, 5)[: rank - 1], columns)
            if subject.packed_dim == -2:
                shape = (*shape[:-2], columns, 3)
            yield grid[torch.randint(0, len(grid), shape, generator=generator)].to(subject.code_dtype)
    for num_rows, length in _LARGE:
        codes = grid[torch.randint(0, len(grid), (num_rows, length * subject.column_multiple), generator=generator)].to(subject.code_dtype)
        yield codes.t().contiguous() if subject.packed_dim == -2 else codes
    wide = 8 * subject.column_multiple
    for code in grid:
        for other in (grid[0], grid[-1]):
            rows = torch.full((4, wide), float(other), dtype=torch.float64)
            rows[0, ::2], rows[1, 1::2], rows[2, -1] = code, code, code
            ready = rows.t().contiguous() if subject.packed_dim == -2 else rows
            yield ready.to(subject.code_dtype)


@register(
    10,
    "round_trip",
    "unpack(pack(q)) == q, of any rank, odd and prime row lengths, every code in every place",
    kind="packer",
    caught_by=("compressed-tensors#401", "compressed-tensors#608"),
)
def round_trip(subject: Packer, context: CheckContext) -> str:
    """Pack and unpack, and hold the codes."""
    count = 0
    for codes in _cases(subject):
        _comes_back(subject, codes)
        count += 1
    if context.draws:
        _draw(subject, context)
    return f"{count} fixed tensors of codes" + (f" and {context.profile.examples} drawn ones" if context.draws else "")


def _draw(subject: Packer, context: CheckContext) -> None:
    from hypothesis import given

    from harness.checks.strategies import code_tensors

    ranks = [rank for rank in subject.ranks if rank >= -subject.packed_dim]

    @context.profile.example_settings()
    @given(code_tensors(subject.code_values, subject.code_dtype, ranks, subject.column_multiple))
    def drawn(codes: Tensor) -> None:
        _comes_back(subject, codes)

    drawn()


def _comes_back(subject: Packer, codes: Tensor) -> Tensor:
    """Return the words from which the codes came back."""
    before = codes.clone()
    packed = subject.pack(codes)
    words = packed.detach().clone()  # as a file holds them, when other codes have been packed meanwhile
    for other in (subject.code_values[-1], subject.code_values[0]):
        subject.pack(torch.full_like(codes, float(other)))
    back = subject.unpack(words, tuple(codes.shape))
    if not torch.equal(packed, words):
        raise CheckFailed("unpacking has changed the words that it was given")
    if (back.dtype, back.shape) != (before.dtype, before.shape):
        raise CheckFailed(f"{before.dtype} {list(before.shape)} came back as {back.dtype} {list(back.shape)}")
    one, two = before.to(torch.float64), back.to(torch.float64)
    refuse(one != two, f"{list(codes.shape)}: a code does not come back", code=one, back=two)
    if not torch.equal(codes.to(torch.float64), one):
        raise CheckFailed("packing has changed the codes that it was given")
    return packed


@register(
    None,
    "dense",
    "A row takes no more words than it needs, they are contiguous, and views and used memory pack as copies do",
    kind="packer",
)
def dense(subject: Packer, context: CheckContext) -> str:
    """Count the words."""
    for codes, packed in _packed(subject, context):
        _hold_dense(subject, codes, packed)
    for shape in _ordinary_shapes(subject):
        codes = _drawn_codes(subject, shape)
        _hold_views(subject, codes)
        _hold_words(subject, codes)
        _hold_memory(subject, shape)
    return f"{subject.bits} bits a code"


def _packed(subject: Packer, context: CheckContext) -> list[tuple[Tensor, Tensor]]:
    """The fixed tensors of codes, and the words that all checks of one run look at."""
    return context.once(subject, "packed", lambda: [(codes, subject.pack(codes)) for codes in _cases(subject)])


def _hold_dense(subject: Packer, codes: Tensor, packed: Tensor) -> None:
    if not packed.is_contiguous():
        raise CheckFailed(f"the words of {list(codes.shape)} are no contiguous tensor, as files hold them")
    length = codes.shape[subject.packed_dim]
    words = -(-length * subject.bits // (packed.dtype.itemsize * 8))
    if packed.shape[subject.packed_dim] != words:
        raise CheckFailed(f"{length} codes of {subject.bits} bits take {packed.shape[subject.packed_dim]} words, {words} are enough")
    expected = list(codes.shape)
    expected[subject.packed_dim] = words
    if list(packed.shape) != expected:
        raise CheckFailed(f"codes of {list(codes.shape)} pack to words of {list(packed.shape)}, not {expected}")


def _ordinary_shapes(subject: Packer) -> list[tuple[int, ...]]:
    """A shape of every rank, none of whose rows ends with a word."""
    wide = 13 * subject.column_multiple
    found = [(*(3, 2, 5)[: rank - 1], wide) for rank in subject.ranks]
    return [(*shape[:-2], wide, 3) for shape in found] if subject.packed_dim == -2 else found


def _drawn_codes(subject: Packer, shape: tuple[int, ...], seed: int = 1) -> Tensor:
    grid, generator = subject.code_values, torch.Generator().manual_seed(seed)
    return grid[torch.randint(0, len(grid), shape, generator=generator)].to(subject.code_dtype)


def _hold_memory(subject: Packer, shape: tuple[int, ...]) -> None:
    """Codes, and words, in memory that has held others."""
    series = [_drawn_codes(subject, shape, seed) for seed in (1, 2, 3)]
    hold_memory(subject.pack, f"pack {list(shape)}", series)
    hold_memory(lambda words: subject.unpack(words, shape), f"unpack {list(shape)}", [subject.pack(one) for one in series])


def _hold_views(subject: Packer, codes: Tensor) -> None:
    """Codes that lie in memory in another way pack as their copy does."""
    for name, view, plain in layouts(codes):
        if not torch.equal(subject.pack(view), subject.pack(plain)):
            raise CheckFailed(f"{name} of {list(codes.shape)} packs to other words than its copy")


def _hold_words(subject: Packer, codes: Tensor) -> None:
    """Words that are a slice of more of them, as those of a file are, unpack as their copy does."""
    for name, view, plain in layouts(subject.pack(codes)):
        if not view.is_contiguous():
            continue
        one, two = (subject.unpack(words, tuple(codes.shape)).to(torch.float64) for words in (view, plain))
        refuse(one != two, f"{list(codes.shape)}: {name} of words unpacks to other codes than its copy", code=two, unpacked=one)


@register(None, "layout", "Each code lies where the declared layout has it, in an independent reader of the bits", kind="packer")
def layout(subject: Packer, context: CheckContext) -> str:
    """Decode the words bit by bit."""
    if subject.layout is None:
        raise NothingToCheckError("no layout is declared")
    packed = _packed(subject, context)
    for codes, words in packed:
        _hold_layout(subject, codes, words)
    return f"{len(packed)} tensors read as {subject.layout}"


def _hold_layout(subject: Packer, codes: Tensor, packed: Tensor) -> None:
    if subject.layout is None or not codes.numel():
        return
    wanted = codes
    if subject.packed_dim == -2:
        packed, wanted = packed.transpose(-1, -2), codes.transpose(-1, -2)
    rows = packed.reshape(-1, packed.shape[-1]).contiguous().numpy()
    if rest := bits_behind(rows, subject.bits, wanted.shape[-1]):
        raise CheckFailed(
            f"{list(codes.shape)}: {rest} bits behind the last codes of rows are set, where equal codes must have equal bytes"
        )
    read = torch.from_numpy(LAYOUTS[subject.layout](rows, subject.bits, wanted.shape[-1])).to(torch.float64)
    expected = wanted.to(torch.float64).reshape(-1, wanted.shape[-1])
    refuse(read != expected, f"{list(codes.shape)}: a code does not lie in its place", code=expected, read=read)


@register(None, "refuses_unfit", "A code that does not fit into its bits raises an error", kind="packer", needs=("refuses_unfit",))
def refuses_unfit(subject: Packer, context: CheckContext) -> str:
    """Put one code beyond either end among others: near and far, in every place, and under each pair of conditions."""
    grid = subject.code_values
    near, far = _unfit(subject)
    if not near:
        raise NothingToCheckError("every value of the dtype is a code")
    shapes = _ordinary_shapes(subject)
    few = (*near[:2], *far[:2])
    planted = [(shapes[0], place, wrong) for place in places(shapes[0]) for wrong in (*near, *far)]
    others = [(shape, place) for shape in (*shapes[1:], *_large_shapes(subject)) for place in places(shape)]
    planted += [(*where, wrong) for where, wrong in zip(others, cycle(few), strict=False)]
    for shape, place, wrong in planted:
        codes = torch.full(shape, float(grid[0]), dtype=torch.float64)
        codes[place] = wrong
        _must_refuse(subject, codes.to(subject.code_dtype), f"{wrong:g} at {list(place)} of {list(shape)}")
    codes = torch.full(shapes[-1], float(grid[-1]), dtype=torch.float64)
    codes.view(-1)[0] = near[0]
    views = list(layouts(codes.to(subject.code_dtype)))
    for name, view, _ in views:
        _must_refuse(subject, view, f"{near[0]:g} at the beginning of {name} of {list(codes.shape)}")
    return f"{len(planted) + len(views) + _hold_unfit(subject, few)} codes beyond the ends were refused"


def _hold_unfit(subject: Packer, wrong: Sequence[float]) -> int:
    """Put a code that does not fit among others for each pair of conditions; return how many."""
    shapes = [shape for shape in _meeting(subject) if 0 not in shape]
    ways = {"as they are": torch.clone, **LAID}
    others = {"at": ("the beginning", "the middle", "the end"), "among": _CODES, "wrong": wrong, "grad": tuple(GRAD_MODES)}
    cases = pairwise({"laid": tuple(ways), "shape": shapes, "leading": _leading(subject), **others}, {"shape": _ONE_DIMENSION})
    for one in cases:
        codes = _codes(subject, one["shape"], one["leading"], one["among"])
        place = {"the beginning": 0, "the middle": codes.numel() // 2, "the end": -1}[one["at"]]
        codes.view(-1)[place] = torch.tensor(one["wrong"], dtype=torch.float64).to(subject.code_dtype)
        with GRAD_MODES[one["grad"]]():
            _must_refuse(subject, ways[one["laid"]](codes), f"{in_words(one)}, {list(codes.shape)}")
    return len(cases)


def _large_shapes(subject: Packer) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [(rows, length * subject.column_multiple) for rows, length in _LARGE if rows]
    return [shape[::-1] for shape in found] if subject.packed_dim == -2 else found


def _unfit(subject: Packer) -> tuple[list[float], list[float]]:
    """Values beside the ends that the dtype of the codes holds, and those far from them, where bits that are cut off make other codes."""
    low, high = float(subject.code_values[0]), float(subject.code_values[-1])
    dtype = subject.code_dtype
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    step = float(1 << subject.bits)
    near = [high + 1, low - 1, high + 2, low - 2]
    far = [float(info.max), float(info.min), 100.0, -100.0, high + step, low - step, high + step / 2, low - step / 2, 2 * high, 2 * low]
    kept = [[float(torch.tensor(value).to(dtype)) for value in part if info.min <= value <= info.max] for part in (near, far)]
    beside, beyond = (list(dict.fromkeys(value for value in part if not low <= value <= high)) for part in kept)
    return beside, beyond


def _must_refuse(subject: Packer, codes: Tensor, what: str) -> None:
    try:
        subject.pack(codes)
    except Exception as error:  # the subject may refuse with any class
        if not str(error).strip():
            raise CheckFailed(f"{what}: {type(error).__name__} came without a message") from error
        return
    raise CheckFailed(f"{what} was packed into {subject.bits} bits")


# Rows, and columns in units of those that a word needs; the other way round where words run down the columns.
_MEETING = ((3, 13), (3, 16), (13, 13), (1, 13), (5, 1), (1, 1), (521, 3), (3, 1031), (0, 13))
_ONE_DIMENSION = ((13,), (32,), (1,), (1031,))
_CODES = ("drawn", "all the first", "all the last")


def _meeting(subject: Packer) -> list[tuple[int, ...]]:
    return [*_MEETING, *(_ONE_DIMENSION if 1 in subject.ranks and subject.packed_dim != -2 else ())]


def _leading(subject: Packer) -> list[tuple[int, ...]]:
    """The dimensions in front of rows and columns, for each rank."""
    return [(2,) * (rank - 2) for rank in subject.ranks if rank > 1]


def _codes(subject: Packer, shape: tuple[int, ...], leading: tuple[int, ...], kind: str) -> Tensor:
    *rows, columns = shape
    wide = columns * subject.column_multiple
    whole = (*rows, wide) if subject.packed_dim != -2 else (wide, *rows)
    codes = _drawn_codes(subject, (*leading, *whole) if rows else whole)
    return codes if kind == _CODES[0] else codes.fill_(subject.code_values[0 if kind == _CODES[1] else -1])


@register(
    None,
    "conditions_meet",
    "Any two of shape, rank, layout, gradients and kind of codes may meet: they come back, lie in their places, packed as a copy is",
    kind="packer",
)
def conditions_meet(subject: Packer, context: CheckContext) -> str:
    """Pack codes for each pair of conditions."""
    ways = {"as they are": torch.clone, **LAID, **EXPANDED}
    little = [shape for shape in _MEETING if min(shape) < 2]  # none, or one row or column, which lies as it does in any layout
    masking = {"laid": tuple(EXPANDED), "shape": (*_ONE_DIMENSION, *little), "codes": _CODES[1:]}
    cases = pairwise(
        {
            "laid": tuple(ways),
            "shape": _meeting(subject),
            "leading": _leading(subject),
            "codes": _CODES,
            "grad": tuple(GRAD_MODES),
        },
        masking,
    )
    for one in cases:
        view = ways[one["laid"]](_codes(subject, one["shape"], one["leading"], one["codes"]))
        plain = view.clone(memory_format=torch.contiguous_format)
        words = subject.pack(plain)
        with told_of(f"{in_words(one)}, {list(view.shape)}"):
            _hold_dense(subject, plain, words)
            _hold_layout(subject, plain, words)
            with GRAD_MODES[one["grad"]]():
                if not torch.equal(_comes_back(subject, view), words):
                    raise CheckFailed("packs to other words than its copy")
    return f"{len(cases)} tensors of codes"
