"""The contract about numbers: what the graph computes under a policy of running it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import onnx

from compressor.errors import UserInputError
from compressor.model.folder import some
from compressor.settings.kinds import TEXT, WHOLE, Kind
from compressor.settings.options import checked
from harness.onnx_graph.contracts.base import Contract, Finding, Pair
from harness.onnx_graph.graph.added_masks import added_masks
from harness.onnx_graph.graph.drawn_inputs import (
    Sizes,
    example_inputs,
    full_size_inputs,
    inputs_of,
    is_mask,
    narrower_ids,
    nudged,
    other_inputs,
    small_inputs,
    zeroed_inputs,
)
from harness.onnx_graph.graph.indexed_tables import reached_tables, special_ids
from harness.onnx_graph.graph.named_rows import named_rows
from harness.onnx_graph.graph.padded_inputs import equal_where_undecided, padded_inputs, special_inputs
from harness.onnx_graph.graph.run_session import (
    POLICIES,
    GraphRefused,
    Limit,
    OutputRow,
    Policy,
    Session,
    arrays_of,
    output_rows,
    random_operators,
)
from harness.onnx_graph.graph.sized_inputs import first_drawn, first_sizes, sizes_to_look_at
from harness.onnx_graph.graph.view import INITIALIZERS_ARE_INPUTS

_ROUNDING_MARGIN_DB = 20.0
"""What a graph that rounds in another order may be worse than one whose inputs moved by one rounding: ten times the amplitude."""
_ZERO_DB = 60.0
"""Of one row of equal values a norm leaves rounding, a millionth, times the reciprocal root of its epsilon."""
LEAST_DB = 20.0
"""Below it the exported graph decides nothing itself."""
_DEPLOYED_MARGIN_DB = 6.0
"""What a graph may be worse, as deployed, than the exported one is as deployed: twice the amplitude."""
_MOST_NAMES = 8
_MOST_SPECIAL = 8
"""Of one input: padding, begin, end and a few more of a processor."""
_PLACES = (0, 1, 2, 3, 5, 6)  # in a row of seven


_ARRAYS = Kind(
    lambda value: isinstance(value, Mapping) and all(isinstance(name, str) and isinstance(one, np.ndarray) for name, one in value.items()),
    "a mapping of names to numpy arrays",
)
_BEFORE, _AFTER = "the exported graph", "the optimized graph"
Drawing = tuple[Mapping[str, np.ndarray], list[Any]]
"""Inputs, and what the exported graph makes of them."""


class NumericEqual(Contract):
    """Both graphs compute the same on the same inputs, within the limit of a policy.

    `golden` runs onnxruntime with its optimizations off, so that only the graphs differ; `deploy` runs it as it is deployed, with the wider
    limit that its integer kernels need (source: measured, see the README of this room). Where the exported graph itself, as deployed, comes
    no nearer than that on some inputs, the limit is there what it comes to, less 6 dB; below 20 dB of its own nothing is decided.

    Inputs are drawn several times: masks whole and with other holes in every row, flags true and false, everything else anew; then with
    floats that are zero in whole rows, and in other open sizes (`sized_inputs`), each with holes and padding. Of what the exported graph
    refuses smaller integers are tried, else it keeps its first values, and notes name what had the same values throughout and the sizes
    that were refused; what it takes and the optimized graph refuses is a violation. Under `golden` all floats are large at once, over each
    of these masks and flags, and over masks of two ones a row and of two zeros. Rounding grows there: the limit is then what inputs that
    moved by one rounding leave, less 20 dB.
    Masks also pad rows on the left and right, and leave one empty: what sees nothing there may change, but not to NaN or infinite.
    A mask of floats that is only added to scores is written as zero and the least float.
    Numbers that either graph compares ids with (padding, the end of a text) stand first and last in rows, padded ones and whole ones.
    Outputs are compared in their order: a name that moved to another output is a violation, a new name is a note, for exporters number
    outputs that nobody names.

    An output that is constant, NaN everywhere, empty or drawn at random is no evidence; another type or shape, or NaN elsewhere, is a
    violation. An error passes if it has less than a billionth of an output's energy and less than a thousandth (3 % in amplitude) of each
    slice along an axis that it lies in; at 35 dB less than 1/3000, and a small slice may be wrong altogether. Of ids, places and truth
    values (integers of 4 bytes or more) one in 31,623 may be another, at 35 dB one in 56: ties that fall the other way.
    Numbers that a mask filled in (1000 and more, a hundred times all others, the same at several places) are judged by themselves.
    """

    @checked(policy=TEXT, inputs=_ARRAYS, seed=WHOLE)
    def __init__(self, policy: str = "golden", inputs: Mapping[str, np.ndarray] | None = None, seed: int = 0) -> None:
        """Choose how to run.

        Args:
            policy: `golden` or `deploy`.
            inputs: by name; drawn from `seed` where they are not given.
            seed: of drawn inputs.

        Raises:
            UserInputError: no such policy, inputs that are no arrays, or a seed below 0.
        """
        if seed < 0:
            raise UserInputError(f"NumericEqual: seed={seed} is below 0; give 0 or more")
        if policy not in POLICIES:
            raise UserInputError(f"NumericEqual: there is no policy {policy!r}; choose from {', '.join(POLICIES)}")
        self._policy, self._inputs, self._seed = POLICIES[policy], inputs, seed

    @property
    def name(self) -> str:
        """With the policy."""
        return f"NumericEqual({self._policy.name})"

    def findings(self, pair: Pair) -> list[Finding]:
        """Run both.

        Args:
            pair: before and after.

        Returns:
            One finding per output beyond the limit.
        """
        drawn = [f"{when} {', '.join(random[:3])}" for when, random in _random(pair) if random]
        if drawn:
            return [self.not_analysed(f"the graph draws random numbers, so two runs differ: {'; '.join(drawn)}; export it for inference")]
        if changed := _interface_changed(pair):
            return [self.violated(text) for text in changed]
        try:
            if self._inputs is None:
                example_inputs(pair.before, self._seed)  # which says what cannot be drawn
        except UserInputError as error:
            return [self.not_analysed(str(error))]
        try:
            return [*self._renamed(pair), *self._compared(pair)]
        except GraphRefused as error:
            is_damage = error.graph == _AFTER and not error.is_unknown
            return [self.violated(f"{error}; {_BEFORE} can") if is_damage else self.not_analysed(str(error))]

    def _compared(self, pair: Pair) -> list[Finding]:
        added = added_masks(pair.before) if self._inputs is None else ()
        before = Session(pair.before, POLICIES["golden"], _BEFORE, added)
        sizes = first_sizes(before, pair.before) if self._inputs is None else Sizes()
        first = self._inputs if self._inputs is not None else example_inputs(pair.before, self._seed, sizes)
        as_large = self._as_large(pair, first, before)
        sized = self._sized(pair, before, sizes) if self._inputs is None else []
        after = Session(pair.after, self._policy, _AFTER, added)
        limits = _Limits(pair, self._policy, self.name, added)
        names = [value.name for value in pair.before.graph.output]
        drawings = [drawing for several in (as_large, *sized) for drawing in several]
        rows = [output_rows(names, expected, after.run(inputs)) for inputs, expected in drawings]
        for name, *values in zip(names, *(expected for _, expected in as_large), strict=True):
            if len(values) > 1 and all(_is_same(values[0], other) for other in values[1:]):
                pair.notes.append(f"{self.name}: output {name} did not change with the inputs that were drawn, so it says little of them")
        shapes = [_shapes(inputs) for inputs, _ in drawings]
        held = [limits.of(names, *drawing, found) for drawing, found in zip(drawings, rows, strict=True)]
        judged = [self._judge(pair, several, held, shapes) for several in zip(*rows, strict=True)]
        found = [finding for finding in judged if finding is not None]
        found += self._unvaried(pair, [inputs for inputs, _ in drawings])
        self._count_rows(pair, [inputs for inputs, _ in drawings], added)
        if not found and self._inputs is None:
            several = [[inputs for inputs, _ in one] for one in (as_large, *sized)]
            found = (
                self._at_zero(pair, as_large[0], before, after, limits)
                or self._at_full_size(pair, several[0], before, after)
                or list(islice(self._padded(pair, several, before, after, limits), 1))
            )
        return found or [self.not_analysed(text) for text in limits.undecided[:1]]

    def _as_large(self, pair: Pair, first: Mapping[str, np.ndarray], before: Session) -> list[Drawing]:
        """Draw again as large as at first. Of a drawing that the exported graph refuses, what it takes is kept."""
        drawings: list[Drawing] = [(first, before.run(first))]
        if self._inputs is not None:
            return drawings
        tables = reached_tables(pair.before)
        drawings += self._with_special_ids(pair, first, before)
        others = (*other_inputs(pair.before, first, self._seed), *small_inputs(pair.before, first))
        drawings += [_accepted(before, first, other, tables) for other in others]
        same = [name for name, one in first.items() if one.size and all(np.array_equal(one, other[name]) for other, _ in drawings)]
        if same:
            pair.notes.append(f"{self.name}: this was not seen in full: {', '.join(same)} had the same values throughout")
        if idle := [name for name in first if name not in same and first[name].size and not _has_effect(name, drawings, before)]:
            said = f"{some(idle)} had many values, of which none changed an output; where others do, pass inputs"
            pair.notes.append(f"{self.name}: this was not seen in full: {said}")
        return drawings

    def _sized(self, pair: Pair, before: Session, first: Sizes) -> list[list[Drawing]]:
        """Draw in other sizes, in each several times: as at first, and everything anew with holes in the masks and flags off."""
        drawings, tables, refused = list[list[Drawing]](), reached_tables(pair.before), dict[str, None]()
        for words, several in sizes_to_look_at(pair.before, first, lambda sizes: first_drawn(before, pair.before, [sizes]) is not None):
            drawn = first_drawn(before, pair.before, several, self._seed + 4)
            if drawn is None:
                refused[words] = None
                continue
            others = [_accepted(before, drawn[0], other, tables) for other in other_inputs(pair.before, drawn[0], self._seed + 4)]
            small = [_accepted(before, drawn[0], other, tables) for other in small_inputs(pair.before, drawn[0])]
            drawings.append([drawn, *small, *others[1:], others[0]])  # large scores of a long row leave one place to see
        if refused:
            pair.notes.append(f"{self.name}: {_BEFORE} refuses open sizes, which were not looked at: {'; '.join(refused)}")
        return drawings

    def _with_special_ids(self, pair: Pair, first: Mapping[str, np.ndarray], before: Session) -> list[Drawing]:
        """Ids that the graphs know by number, as no draw from a large vocabulary would hit them."""
        drawings: list[Drawing] = []
        refused, special = dict[str, None](), _special(pair, first)
        if many := [name for name, numbers in special.items() if len(numbers) > _MOST_SPECIAL]:
            pair.notes.append(
                f"{self.name}: of the numbers that {some(many)} is compared with, only the first {_MOST_SPECIAL} were looked at"
            )
        for name, number, inputs in special_inputs(first, {**_few(special), **_single(pair, first)}):
            try:
                drawings.append((inputs, before.run(inputs)))
            except GraphRefused:
                refused |= {f"{name} of {number}": None} if name in special else {}
        if refused:
            pair.notes.append(f"{self.name}: {_BEFORE} refuses {some(list(refused))}, a number that it compares with; it was not looked at")
        return drawings

    def _count_rows(self, pair: Pair, drawn: Sequence[Mapping[str, np.ndarray]], added: Collection[str]) -> None:
        """Note the rows of tables that no id named, in whatever drawing and size."""
        counts: dict[tuple[int, int], list[str]] = {}
        for table, used, rows in named_rows(pair.before, drawn, added):
            counts.setdefault((used, rows), []).append(table)
        if short := [f"{used:,} of {rows:,} rows of {_several(names)}" for (used, rows), names in sorted(counts.items()) if used < rows]:
            pair.notes.append(f"{self.name}: of tables only these rows were looked at: {'; '.join(short)}")

    def _unvaried(self, pair: Pair, drawn: Sequence[Mapping[str, np.ndarray]]) -> list[Finding]:
        """Ids that named the same rows throughout: of the others nothing is known. One number alone may be a length, which shapes force."""
        if self._inputs is not None:
            return []
        tables, first = reached_tables(pair.before), drawn[0]
        several = [name for name, one in first.items() if one.size > 1 and one.dtype.kind in "iu" and not is_mask(name, one.dtype)]
        fixed = [
            name
            for name in dict.fromkeys((*tables, *several))
            if tables.get(name) != 1 and name in first and first[name].size and all(np.array_equal(first[name], one[name]) for one in drawn)
        ]
        why = f"{_BEFORE} refuses the other ids that were tried, so what they name was not looked at; pass inputs"
        return [self.not_analysed(f"input {name}: {why}") for name in fixed]

    def _padded(
        self, pair: Pair, groups: Sequence[Sequence[Mapping[str, np.ndarray]]], before: Session, after: Session, limits: _Limits
    ) -> Iterator[Finding]:
        """Masks as batches have them. Where all keys are hidden no more is asked than that nothing is NaN or infinite that was not."""
        names = [value.name for value in pair.before.graph.output]
        undecided, refused = list[str](), dict[str, None]()
        for drawn in groups:
            for where, inputs in padded_inputs(drawn[0], _few(_special(pair, drawn[0]))):
                try:
                    expected = before.run(inputs)
                except GraphRefused:
                    refused[f"{self.name}: masks {where} were not looked at; {_BEFORE} refuses them"] = None
                    continue
                actual = after.run(inputs)
                rows = output_rows(names, expected, actual)
                if wrong := _wrong(rows, limit := limits.of(names, inputs, expected, rows)):
                    taken = equal_where_undecided((before, after), inputs, drawn[-1], (expected, actual))
                    if left := _wrong(output_rows(names, expected, taken), limit):
                        yield self.violated(f"{left}, {where}: {_shapes(inputs)}")
                    undecided.append(f"{self.name}: {wrong}, {where}, but only at places that see nothing which the mask leaves")
        more = f"; so in {len(undecided) - 1} drawings more" if len(undecided) > 1 else ""
        pair.notes.extend([*refused, *(f"{one}{more}" for one in undecided[:1])])

    def _at_zero(self, pair: Pair, first: Drawing, before: Session, after: Session, limits: _Limits) -> list[Finding]:
        """Floats that are zero. A deviation of what is equal is nothing but rounding, so the limit is wider than that of other inputs."""
        names = [value.name for value in pair.before.graph.output]
        for words, inputs in zeroed_inputs(pair.before, first[0]):
            expected, actual = before.run(inputs), after.run(inputs)
            rows = output_rows(names, expected, actual)
            if not all(map(_is_as_finite, expected, first[1])):
                pair.notes.append(f"{self.name}: what is computed where {words} was not looked at; {_BEFORE} is not finite there")
            elif wrong := _wrong(rows, min(Limit.of(_ZERO_DB), limits.of(names, inputs, expected, rows))):
                return [self.violated(f"{wrong}, where {words}")]
        return []

    def _at_full_size(self, pair: Pair, drawn: Sequence[Mapping[str, np.ndarray]], before: Session, after: Session) -> list[Finding]:
        """All floats large at once. Rounding grows there, so the limit is what inputs that moved by one rounding leave, less a margin."""
        if self._policy is not POLICIES["golden"]:
            return []
        names, said = [value.name for value in pair.before.graph.output], dict[str, None]()
        larges = list(full_size_inputs(pair.before, drawn, self._seed))
        found = list[Finding]()
        for large, other in zip(larges, [*larges[1:], *larges[:1]], strict=True):
            try:
                expected, moved = before.run(large), before.run(nudged(large, self._seed))
            except GraphRefused:
                said[f"{self.name}: inputs that are all large were not looked at; {_BEFORE} refuses them"] = None
                continue
            rounding, actual = output_rows(names, expected, moved), after.run(large)
            wrong, unclear = self._beyond_rounding(rounding, output_rows(names, expected, actual))
            if wrong:
                taken = equal_where_undecided((before, after), large, other, (expected, actual))
                wrong, _ = self._beyond_rounding(rounding, output_rows(names, expected, taken))
            found += [self.violated(f"{text}, where all inputs are large") for text in wrong]
            said |= dict.fromkeys(unclear)
        pair.notes.extend(said)
        return found[:1]

    def _beyond_rounding(self, rounding: Sequence[Sequence[OutputRow]], rows: Sequence[Sequence[OutputRow]]) -> tuple[list[str], list[str]]:
        """What is wrong, in words, and where rounding decides."""
        wrong, unclear = list[str](), list[str]()
        for own, row in ((own, row) for pairs in zip(rounding, rows, strict=True) for own, row in zip(*pairs, strict=False)):
            limit = min(self._policy.limit, Limit.of(own.sqnr_db - _ROUNDING_MARGIN_DB))
            if own.changed or limit.whole < LEAST_DB:
                unclear.append(f"{self.name}: output {own.name} says nothing where all inputs are large: rounding decides it")
            elif row.wrong(limit):
                wrong.append(row.text(limit))
        return wrong, unclear

    def _judge(self, pair: Pair, drawings: Sequence[Sequence[OutputRow]], limits: Sequence[Limit], shapes: Sequence[str]) -> Finding | None:
        """One output on every drawing. One that says nothing on some is judged by the others."""
        rows = [row for drawing in drawings for row in drawing]
        for at, (drawing, limit) in enumerate(zip(drawings, limits, strict=True), 1):
            if wrong := _wrong([drawing], limit):
                return self.violated(f"{wrong}{f', on drawing {at} of {len(drawings)}: {shapes[at - 1]}' * (at > 1)}")
        told = [row for row in rows if not row.unknown]
        if not told:
            return self.not_analysed(rows[0].unknown)
        if _ANY not in limits:
            pair.notes.append(f"{self.name}: {min(told, key=lambda row: row.sqnr_db).text(min(limits))}")
        return None

    def _renamed(self, pair: Pair) -> list[Finding]:
        """Outputs are compared in their order. A name that means another output now is damage; a new one may be an exporter's number."""
        names = [[value.name for value in one.graph.output] for one in (pair.before, pair.after)]
        pairs = [(was, now) for was, now in zip(*names, strict=True) if was != now]
        new = [f"output {was} is named {now} now, and programs that fetch it by name break" for was, now in pairs if was not in names[1]]
        pair.notes.extend(f"{self.name}: {text}" for text in new)
        gone = {value.name for value in pair.before.graph.input} - {value.name for value in pair.after.graph.input}
        if gone and pair.before.ir_version > INITIALIZERS_ARE_INPUTS:
            pair.notes.append(f"{self.name}: {some(sorted(gone))} had a value in the file, could be given another, and no longer can")
        return [self.violated(f"output {was}: {now} is found in its place") for was, now in pairs if was in names[1]]


_ANY = Limit(-np.inf, -np.inf)


class _Limits:
    """How near two runs must be. What the exported graph itself loses as deployed is asked where that decides."""

    def __init__(self, pair: Pair, policy: Policy, name: str, added: Collection[str]) -> None:
        self._pair, self._policy, self._name, self._added = pair, policy, name, added
        self._deployed: Session | None = None
        self.undecided: list[str] = []  # where it says too little itself, in words

    def of(
        self, names: Sequence[str], inputs: Mapping[str, np.ndarray], expected: Sequence[Any], rows: Sequence[Sequence[OutputRow]]
    ) -> Limit:
        """Of one drawing, of which the other graph made rows; any distance will do where nothing is decided."""
        limit = self._policy.limit
        if self._policy.name == "golden" or not _wrong(rows, limit):
            return limit
        self._deployed = self._deployed or Session(self._pair.before, self._policy, _BEFORE, self._added)
        own = [row for several in output_rows(names, expected, self._deployed.run(inputs)) for row in several]
        whole, slices = (min(values) - _DEPLOYED_MARGIN_DB for values in zip(*((row.sqnr_db, row.weakest_db) for row in own), strict=True))
        is_undecided = whole < LEAST_DB - _DEPLOYED_MARGIN_DB
        if (is_undecided and any(row.changed for several in rows for row in several)) or (whole >= limit.whole and slices >= limit.slices):
            return limit
        reached = f"{whole + _DEPLOYED_MARGIN_DB:.1f} dB, in its weakest slice {slices + _DEPLOYED_MARGIN_DB:.1f} dB"
        if is_undecided:
            self.undecided.append(
                f"as deployed {_BEFORE} itself comes to {reached}, and below {LEAST_DB:g} dB nothing is decided: {_shapes(inputs)}"
            )
            return _ANY
        self._pair.notes.append(
            f"{self._name}: as deployed {_BEFORE} itself comes to {reached}, and 6 dB less are asked for: {_shapes(inputs)}"
        )
        return Limit(min(limit.whole, whole), min(limit.slices, slices))


def _wrong(outputs: Sequence[Sequence[OutputRow]], limit: Limit) -> str:
    """The first array beyond the limit, in words."""
    return next((row.text(limit) for rows in outputs for row in rows if row.wrong(limit)), "")


def _shapes(inputs: Mapping[str, np.ndarray]) -> str:
    return ", ".join(f"{name} {list(one.shape)}" for name, one in inputs.items())


def _several(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _is_as_finite(one: Any, other: Any) -> bool:
    """Whether two outputs are NaN or infinite at the same places."""
    pairs = list(zip(arrays_of(one), arrays_of(other), strict=False))
    return all(a.dtype.kind != "f" or (a.shape == b.shape and np.array_equal(np.isfinite(a), np.isfinite(b))) for a, b in pairs)


def _is_same(one: Any, other: Any) -> bool:
    left, right = arrays_of(one), arrays_of(other)
    return len(left) == len(right) and all(
        np.array_equal(*both, equal_nan=both[0].dtype.kind == "f") for both in zip(left, right, strict=True)
    )


def _special(pair: Pair, first: Mapping[str, np.ndarray]) -> dict[str, list[int]]:
    """Input to the numbers that either graph compares it with, as far as they name a row of its table."""
    rows, found = reached_tables(pair.before), dict[str, list[int]]()
    both = [special_ids(model) for model in (pair.before, pair.after)]
    for name, ids in first.items():
        if ids.ndim and ids.size > 1 and ids.dtype.kind in "iu" and not is_mask(name, ids.dtype):
            low, high = (0, rows[name] - 1) if rows.get(name) else (np.iinfo(ids.dtype).min, np.iinfo(ids.dtype).max)
            found[name] = sorted({number for one in both for number in one.get(name, ()) if low <= number <= high})
    return found


def _single(pair: Pair, first: Mapping[str, np.ndarray]) -> dict[str, list[int]]:
    """Single integers to small numbers: a length, a width or a step counts places, which no draw from a wide range would hit."""
    rows, found = reached_tables(pair.before), dict[str, list[int]]()
    for name, one in first.items():
        if one.size == 1 and one.dtype.kind in "iu" and not is_mask(name, one.dtype):
            found[name] = [number for number in _PLACES if number < (rows.get(name) or np.inf)]
    return found


def _has_effect(name: str, drawings: Sequence[Drawing], before: Session) -> bool:
    """Whether an input by itself changes any output; of one that the graph refuses alone nobody knows."""
    first, outputs = drawings[0]
    others = {inputs[name].tobytes(): inputs[name] for inputs, _ in drawings[1:]}
    for other in others.values():
        try:
            if not all(map(_is_same, outputs, before.run({**first, name: other}))):
                return True
        except GraphRefused:
            return True
    return False


def _few(special: Mapping[str, list[int]]) -> dict[str, list[int]]:
    return {name: numbers[:_MOST_SPECIAL] for name, numbers in special.items()}


def _accepted(graph: Session, first: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], tables: Mapping[str, int]) -> Drawing:
    """Run on other inputs; where the graph refuses them, on those of the others that it takes one by one, and on smaller integers."""
    try:
        return other, graph.run(other)
    except GraphRefused:
        kept, outputs = dict(first), graph.run(first)
    for name, array in other.items():
        smaller = narrower_ids(array, tables.get(name, 0)) if name in tables or not is_mask(name, array.dtype) else ()
        for one in (array, *smaller):
            try:
                found = graph.run(kept | {name: one})
            except GraphRefused:
                continue
            if one is array or not _is_same(outputs, found):  # else these are other names of the same rows
                kept[name], outputs = one, found
                break
    return kept, outputs


def _interface_changed(pair: Pair) -> list[str]:
    """Outputs that came or went, inputs that are new or others: who runs the graph would notice before any number differs."""
    outputs = [[value.name for value in one.graph.output] for one in (pair.before, pair.after)]
    if len(outputs[0]) != len(outputs[1]):
        found = [f"output {name} is gone" for name in outputs[0] if name not in outputs[1]]
        found += [f"output {name} is new" for name in outputs[1] if name not in outputs[0]]
        return found or [f"{len(outputs[0])} outputs became {len(outputs[1])}"]
    had, has = ([value.name for value in inputs_of(one)] for one in (pair.before, pair.after))
    if new := [name for name in has if name not in had]:
        listed = {value.name for value in pair.before.graph.input}  # one of these has a value in the file, unless it is given another
        return [f"input {name} {'has lost its value' if name in listed else 'is new'}: {_AFTER} does not run without it" for name in new]
    if gone := [name for name in had if name not in {value.name for value in pair.after.graph.input}]:
        return [f"input {name} is gone: {_AFTER} refuses who gives it" for name in gone]
    inputs = [{value.name: value.type.tensor_type for value in one.graph.input} for one in (pair.before, pair.after)]
    both = [(f"input {name}", inputs[0][name], now) for name, now in inputs[1].items() if name in inputs[0]]
    kind = onnx.TensorProto.DataType.Name
    types = [f"{what}: {kind(was.elem_type)} became {kind(now.elem_type)}" for what, was, now in both if was.elem_type != now.elem_type]
    return types or [f"{what}: {_shown(was)} became {_shown(now)}" for what, was, now in both if _takes_less(_sizes(was), _sizes(now))]


Declared = Sequence[int | str | None]


def _sizes(kind: onnx.TypeProto.Tensor) -> Declared | None:
    """What is declared: a length, a name, or None for whatever it is; of an unknown rank nothing is."""
    if not kind.HasField("shape"):
        return None
    return [(one.dim_value if one.HasField("dim_value") and one.dim_value >= 0 else one.dim_param or None) for one in kind.shape.dim]


def _shown(kind: onnx.TypeProto.Tensor) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in _sizes(kind) or ())}]"


def _takes_less(was: Declared | None, now: Declared | None) -> bool:
    """What ran before does not run now: another rank, or a length that was another one or open."""
    if was is None or now is None:
        return now is not None
    return len(was) != len(now) or any(isinstance(size, int) and size != before for before, size in zip(was, now, strict=True))


def _random(pair: Pair) -> list[tuple[str, list[str]]]:
    return [("as exported", random_operators(pair.before)), ("as optimized", random_operators(pair.after))]
