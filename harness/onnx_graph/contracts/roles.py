"""The contracts about attention: blocks, their three projections, and the weights of these."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from compressor.errors import UserInputError
from compressor.model.folder import some
from compressor.settings.kinds import NUMBER
from compressor.settings.options import checked
from harness.onnx_graph.census.baseline import RoleWeight, columns_of, describe, packed_in
from harness.onnx_graph.census.census import ROLES, Block, Status
from harness.onnx_graph.census.flow import Shapes
from harness.onnx_graph.census.parts import takes_a_part
from harness.onnx_graph.census.projections import Projection
from harness.onnx_graph.contracts.base import Contract, Finding, Holding, Pair
from harness.onnx_graph.contracts.counterparts import same_order
from harness.onnx_graph.contracts.packed import columns_taken, columns_told
from harness.onnx_graph.contracts.stored import Lost, codes_lost, number_mark, stored_numbers
from harness.onnx_graph.graph.drawn_inputs import Sizes, example_inputs
from harness.onnx_graph.graph.run_session import POLICIES, GraphRefused, Session, sqnr_db
from harness.onnx_graph.graph.sized_inputs import first_sizes

_UNCLEAR = (Status.MISSING, Status.AMBIGUOUS, Status.UNKNOWN)


class RoleContract(Contract):
    """A contract about attention. It holds over no graph in which something mixes activations and is not read."""

    def findings(self, pair: Pair) -> list[Finding]:
        """Look at what is read, and say what is not.

        Args:
            pair: before and after.

        Returns:
            One finding per place where the contract does not hold or cannot be decided.
        """
        before, after = pair.baseline.census, pair.census_after
        pair.notes.extend(note for note in (*before.notes, *after.notes) if note not in pair.notes)
        unread = [self.not_analysed(_unread(block, "as exported"), block.index) for block in before.unknown]
        if len(before.unknown) != len(after.unknown):
            unread += [self.not_analysed(_unread(block, "as optimized"), block.index) for block in after.unknown]
        if not before.read:
            return unread or [_no_attention(self)]
        return [*self.of_blocks(pair), *unread, *self._compared(pair)]

    @abstractmethod
    def of_blocks(self, pair: Pair) -> list[Finding]:
        """Look at the blocks that are read; there is at least one before.

        Args:
            pair: before and after.

        Returns:
            None if it holds everywhere.
        """

    def lost(self, pair: Pair, counted: str) -> Finding:
        """Say that blocks are gone, or that nobody knows, where as many are there that cannot be read."""
        before, after = pair.baseline.census, pair.census_after
        fresh = max(0, len(after.unknown) - len(before.unknown))
        if len(before.read) - len(after.read) > fresh:
            return self.violated(counted)
        return self.not_analysed(f"{counted}; what is new and cannot be read ({fresh}) may be what is missing")

    def unread_before(self, pair: Pair) -> list[Finding]:
        """Name the blocks whose projections nobody can hold anything against."""
        blind = [block for block in pair.baseline.census.read if block.status in (*_UNCLEAR, Status.ABSORBED)]
        return [self.not_analysed(f"block {block.index} ({block.kind}), as exported: {describe(block)}", block.index) for block in blind]

    def _compared(self, pair: Pair) -> Iterator[Finding]:
        """Products that are no attention are said; where they or the shapes of their layers change, nobody knows what was lost."""
        before, after = pair.baseline.census.comparisons, pair.census_after.comparisons
        pair.notes.extend(note for one in before if (note := f"not read: {one.text()}") not in pair.notes)
        shapes = [sorted(sorted(layer.shape for layer in one.layers) for one in several) for several in (before, after)]
        if shapes[0] != shapes[1]:
            now = "; ".join(one.text() for one in after) or "there is none"
            yield self.not_analysed(f"{len(before)} products of two activations that are not read were {shapes[0]}; now: {now}")


class SameBlockCount(RoleContract):
    """As many attention blocks after as before, kind by kind, and at least one."""

    def of_blocks(self, pair: Pair) -> list[Finding]:
        """Count.

        Args:
            pair: before and after.

        Returns:
            None, or one.
        """
        before, after = (sorted(block.kind for block in one.read) for one in (pair.baseline.census, pair.census_after))
        inside = [block for block in (*pair.baseline.census.read, *pair.census_after.read) if block.runs_unknown_times]
        if inside:
            counted = f"{len(before)} attention blocks before, {len(after)} after; " if len(before) != len(after) else ""
            return [self.not_analysed(f"{counted}block {inside[0].index}: {inside[0].note}, and how often it runs is not read")]
        if len(before) != len(after):
            counted = f"{len(before)} attention blocks before, {len(after)} after"
            return [self.lost(pair, counted) if len(before) > len(after) else self.violated(counted)]
        if before != after and not any(block.status is Status.ABSORBED for block in pair.census_after.blocks):
            return [self.violated(f"the blocks were {', '.join(before)}, and are {', '.join(after)}")]
        return []


class SeparateQKV(RoleContract):
    """Q, K and V of every block come from three linear layers of their own, before and after."""

    def of_blocks(self, pair: Pair) -> list[Finding]:
        """Look at every block.

        Args:
            pair: before and after.

        Returns:
            One finding per role that was lost, or per block that was never separate or is not clear.
        """
        before = pair.baseline.census.read
        early = {block.index: finding for block in before if (finding := self._before(block)) is not None}
        after: Sequence[Block] = pair.census_after.read
        if early:  # a Loop may be unrolled and a branch left out, so that only what was clear before is looked for
            after = [block for index, block in pair.counterparts.items() if index not in early]
        elif len(after) < len(before):
            counted = f"{len(before)} attention blocks before, {len(after)} after"
            return [self.lost(pair, f"{counted}, so {len(before) - len(after)} cannot be found again")]
        return [*early.values(), *(finding for block in after for finding in self._after(pair, block))]

    def _before(self, block: Block) -> Finding | None:
        where = f"block {block.index} ({block.kind}), as exported, before any optimizer"
        if block.status is Status.SEPARATE:
            return None
        if block.status in _UNCLEAR:
            return self.not_analysed(f"{where}: {describe(block)}; its roles are not clear", block.index)
        return self.violated(
            f"{where}: already {describe(block)}; the model itself has no three layers and weights of their own", block.index
        )

    def _after(self, pair: Pair, block: Block) -> Iterator[Finding]:
        if block.status in _UNCLEAR:
            yield self.not_analysed(f"block {block.index} ({block.kind}): {describe(block)}; its roles are not clear", block.index)
            return
        was = next((index for index, one in pair.counterparts.items() if one is block), None)
        is_separate = block.status is Status.SEPARATE
        if was is None:
            if not is_separate:
                yield self.violated(f"block {block.index} ({block.kind}) was none before, and is {describe(block)}", block.index)
            return
        places = {lost: _place(pair, lost, block) for lost in pair.baseline.of_block(was)}
        for lost, place in places.items():
            rows, columns = lost.projection.shape
            if not place and (is_separate or any(places.values())):
                continue
            found = place or describe(block)
            yield self.violated(f"{lost.where}: expected a layer of its own [{rows}, {columns}], found {found}", block.index, lost.role)


class RoleWeights(RoleContract):
    """Every role of every block still has its own weight: not another role's, not transposed, not scaled, not another matrix.

    So do the other layers that lead to it alone. Of a layer that several roles share, of which a role takes a part, or whose result is cut,
    joined or repeated otherwise than before, every role still takes the same columns in the same order; what that is, is found by running
    the graph, and where it cannot be run, nobody knows. Exact by default. With `min_sqnr_db` a weight that was
    quantized may differ by so much.
    """

    @checked(min_sqnr_db=NUMBER)
    def __init__(self, min_sqnr_db: float | None = None) -> None:
        """Choose how close.

        Args:
            min_sqnr_db: signal to quantization noise that a role's weight must reach, above 0; None asks for equal values.

        Raises:
            UserInputError: it is no finite number above 0.
        """
        if min_sqnr_db is not None and not 0 < min_sqnr_db < math.inf:
            raise UserInputError(
                f"RoleWeights: min_sqnr_db={min_sqnr_db} is no limit, which noise as large as the weight would pass; give 15"
            )
        self._min_sqnr_db = min_sqnr_db

    def of_blocks(self, pair: Pair) -> list[Finding]:
        """Compare every role by content.

        Args:
            pair: before and after.

        Returns:
            One finding per role whose weight is not its own, and per block whose weights could not be read before.
        """
        compared = [self._compare(pair, one, pair.counterparts.get(one.block)) for one in pair.baseline.weights.values()]
        kept = [one for one, finding in zip(pair.baseline.weights.values(), compared, strict=True) if finding is None]
        new = list(self._new(pair)) if len(pair.census_after.read) > len(pair.baseline.census.read) else []
        lost = [finding for finding in compared if finding is not None]
        return [*self.unread_before(pair), *new, *lost, *self._taken(pair, kept), *self._moved(pair, kept)]

    def _new(self, pair: Pair) -> Iterator[Finding]:
        """Blocks that were none before: there is nothing to hold their weights against."""
        known = {id(block) for block in pair.counterparts.values()}
        for block in pair.census_after.read:
            if id(block) not in known:
                yield self.not_analysed(f"block {block.index} ({block.kind}) was none before, so its weights are nobody's", block.index)

    def _taken(self, pair: Pair, kept: Sequence[RoleWeight]) -> Iterator[Finding]:
        """Roles that have their weight, and take other columns of it than before."""
        blocks = {block.index: block for block in pair.baseline.census.read}
        told = columns_told(pair.baseline.census), columns_told(pair.census_after)
        asked = [one for one in kept if _may_differ(told[0][one.block, one.role], told[1][pair.counterparts[one.block].index, one.role])]
        if not asked:
            return
        try:
            inputs = example_inputs(pair.before, sizes=_sizes(pair))
        except UserInputError as error:
            yield self.not_analysed(f"what each role takes of a layer that they share is found by running the graph: {error}")
            return
        before = columns_taken(pair.baseline.census, [(blocks[one.block], one.role) for one in asked], inputs)
        after = columns_taken(pair.census_after, [(pair.counterparts[one.block], one.role) for one in asked], inputs)
        for one, was, now in zip(asked, before, after, strict=True):
            if isinstance(was, str) or isinstance(now, str):
                why = was if isinstance(was, str) else now
                yield self.not_analysed(f"{one.where}: which columns of its layer it takes cannot be read: {why}", one.block, one.role)
            elif was.operator == now.operator and was.is_same(now):
                continue
            elif was.operator != now.operator or (len(was.order) != len(now.order) and set(was.order) == set(now.order)):
                yield self.not_analysed(f"{one.where}: it takes its columns in another form than before", one.block, one.role)
            else:
                layer = one.projection
                found = f"expected {was.text()} of {layer.op} {layer.name} [{layer.shape[0]}, {layer.shape[1]}], found {now.text()}"
                yield self.violated(f"{one.where}: {found}", one.block, one.role)

    def _moved(self, pair: Pair, kept: Sequence[RoleWeight]) -> Iterator[Finding]:
        """Blocks that have their weights at another place of the data flow: their weights were exchanged, nothing was reordered."""
        found = {one.block: pair.counterparts[one.block] for one in kept}
        before = {block.index: block for block in pair.baseline.census.read}
        inputs = {value.name for value in pair.before.graph.input}
        for index, now in found.items():
            was = before[index]
            where = f"block {index} ({was.kind}): its weights are found at block {now.index}"
            others = [other for other, one in found.items() if other > index and not same_order(was, now, other, one)]
            if others:
                text = f"{where}, which lies elsewhere in the data flow: block {others[0]} does not follow or precede it as before"
                yield self.violated(text, index)
            elif was.place.outputs != now.place.outputs and len(pair.before.graph.output) == len(pair.after.graph.output):
                outputs = [[pair.before.graph.output[at].name for at in sorted(place.outputs)] for place in (was.place, now.place)]
                reached = " and ".join(", ".join(names) or "no output" for names in outputs)
                yield self.violated(f"{where}, which leads to other outputs of the graph than before: {reached}", index)
            elif (lost := was.place.inputs - now.place.inputs) and (gained := (now.place.inputs - was.place.inputs) & inputs):
                read = f"{', '.join(sorted(gained))} in the place of {', '.join(sorted(lost))}"
                yield self.violated(f"{where}, which reads other inputs of the graph than before: {read}", index)

    def _compare(self, pair: Pair, was: RoleWeight, block: Block | None) -> Finding | None:
        if block is None or block.status in (*_UNCLEAR, Status.ABSORBED):
            state = "no such block" if block is None else describe(block)
            return Finding(self.name, Holding.NOT_ANALYSED, f"{was.where}: its weight cannot be read: {state}", was.block, was.role)
        now = block.projection(was.role)
        assert now is not None
        layer = f"{now.op} {now.name} [{now.shape[0]}, {now.shape[1]}]"
        if not self._is_close(was.projection, now):
            text = f"{was.where}: expected its own weight, found {layer} with {_what(pair, was, now)}"
            return self.violated(text, was.block, was.role)
        lost = self._lost_beside(was.projection, now)
        return self.violated(f"{was.where}: {layer} is kept, but {lost}", was.block, was.role) if lost else None

    def _lost_beside(self, was: Projection, now: Projection) -> str:
        """Say what became of the other layers on the way; empty if they are kept."""
        if len(was.beside) != len(now.beside):
            return f"expected {len(was.beside)} further layers on its way, found {len(now.beside)}"
        changed = [f"{one.op} {one.name}" for one, other in zip(was.beside, now.beside, strict=True) if not self._is_close(one, other)]
        return f"on its way {', '.join(changed)} changed" if changed else ""

    def _is_close(self, was: Projection, now: Projection) -> bool:
        if was.fingerprint == now.fingerprint:
            return True
        return self._min_sqnr_db is not None and sqnr_db(was.matrix_IO, now.matrix_IO) >= self._min_sqnr_db


class ProjectionOp(RoleContract):
    """The projections are computed by one of these operators."""

    def __init__(self, operators: Collection[str] = ("MatMul", "Gemm")) -> None:
        """Choose the operators.

        Args:
            operators: op types that are allowed.
        """
        self._operators = frozenset(operators)

    def of_blocks(self, pair: Pair) -> list[Finding]:
        """Look at the operator of every projection after.

        Args:
            pair: before and after.

        Returns:
            One finding per projection with another operator.
        """
        if not pair.census_after.read:
            return [_no_attention(self)]
        return [finding for block in pair.census_after.read for finding in self._of_block(block)]

    def _of_block(self, block: Block) -> Iterator[Finding]:
        if block.status in (*_UNCLEAR, Status.ABSORBED):
            yield self.not_analysed(f"block {block.index} ({block.kind}): {describe(block)}", block.index)
            return
        allowed = " or ".join(sorted(self._operators))
        for role in ROLES:
            for layer in block.projections[role]:
                if layer.op not in self._operators:
                    text = f"block {block.index} {role.upper()}: expected {allowed}, found {layer.op} {layer.name}"
                    yield self.violated(text, block.index, role)


class QDQPreserved(RoleContract):
    """What was stored in codes still is; Q, K and V mean the same numbers. Other layers and tables are found by theirs, or by the codes."""

    def of_blocks(self, pair: Pair) -> list[Finding]:
        """Look at every projection that was quantized, and at all other layers and tables.

        Args:
            pair: before and after.

        Returns:
            One finding per projection that is float now, or whose numbers changed, per other layer that is float now, and per block whose
            projections could not be read before.
        """
        quantized = [one for one in pair.baseline.weights.values() if one.projection.stored == "codes"]
        before, after = (stored_numbers(one.view) for one in (pair.baseline.census, pair.census_after) if one.view is not None)
        if not (before.codes or before.unread):
            return [
                self.not_analysed("no layer and no table was stored in codes before, so nothing is to preserve; give a quantized model")
            ]
        told = {one.where: finding for one in quantized if (finding := self._of_role(pair, one)) is not None}
        marks = {_mark(one.projection) for one in quantized if one.where in told}
        roles = {mark for one in quantized for mark in map(_mark, (one.projection, *one.projection.beside))}
        lost = codes_lost(before, after, marks, roles)
        has_codes = bool(after.codes or after.held or after.unread)
        return [*self.unread_before(pair), *told.values(), *self._other_layers(lost, has_codes)]

    def _of_role(self, pair: Pair, one: RoleWeight) -> Finding | None:
        now = pair.counterparts[one.block].projection(one.role) if one.block in pair.counterparts else None
        if now is None:
            return self.not_analysed(f"{one.where}: its layer cannot be found again", one.block, one.role)
        if now.stored != "codes":
            return self.violated(f"{one.where}: expected codes, found floating point in {now.op} {now.name}", one.block, one.role)
        changed = [(old, new) for old, new in _in_codes(one.projection, now) if old.fingerprint != new.fingerprint]
        if not changed:
            return None
        old, new = min(changed, key=lambda pair: sqnr_db(*(layer.matrix_IO for layer in pair)))
        place = packed_in(old.matrix_IO, pair.counterparts[one.block]) if new.shape != old.shape else ""
        what = f"its codes are packed as {place}" if place else f"its dequantized weight changed, {_distance(old, new)} what it was"
        return self.violated(f"{one.where}: {what}", one.block, one.role)

    def _other_layers(self, lost: Lost, has_codes: bool) -> Iterator[Finding]:
        """All layers and tables by their numbers. Where none has these any more they may have been merged or folded, into codes or not."""
        for was, now in lost.floats:
            yield self.violated(f"{was}: expected codes, found floating point in {now}")
        if lost.gone and has_codes:
            yield self.not_analysed(f"codes whose numbers nothing has any more: {some(lost.gone)}")
        elif lost.gone:
            yield self.violated(f"{some(lost.gone)}: expected codes, and nothing in the graph is stored in codes any more")


def _mark(layer: Projection) -> str:
    return number_mark(layer.matrix_IO)


def _sizes(pair: Pair) -> Sizes:
    """Open sizes at which the graph runs."""
    try:
        return first_sizes(Session(pair.before, POLICIES["golden"]), pair.before)
    except GraphRefused:  # which is said where it is asked for numbers
        return Sizes()


def _place(pair: Pair, lost: RoleWeight, block: Block) -> str:
    """Say where a projection lies that shares a layer or a weight, also with what is no role of any block, such as a gate; else empty."""
    was, now = lost.projection, block.projection(lost.role)
    if place := packed_in(was.matrix_IO, block):
        return f"packed as {place}"
    if now is None or pair.census_after.view is None:
        return ""
    if now.cut_from and not was.cut_from:
        return f"{now.op} {now.name} on a part of {now.cut_from}"
    view = pair.census_after.view
    is_wider = now.shape[1] > was.shape[1] and takes_a_part(view, Shapes(view), now, block.taken.get(lost.role))
    return f"a part of {now.op} {now.name} [{now.shape[0]}, {now.shape[1]}]" if is_wider else ""


def _in_codes(was: Projection, now: Projection) -> list[tuple[Projection, Projection]]:
    pairs = zip((was, *was.beside), (now, *now.beside), strict=False)
    return [(one, other) for one, other in pairs if one.stored == "codes"]


def _may_differ(was: Counter[str] | None, now: Counter[str] | None) -> bool:
    """Whether a role may take other columns: it takes a part, or its way is another one."""
    return was is None or now is None or was != now


def _unread(block: Block, when: str) -> str:
    return f"block {block.index}, {when}: its roles are unknown, so nobody can say whether its layers are kept; {block.note}"


def _what(pair: Pair, was: RoleWeight, now: Projection) -> str:
    """Say what a wrong weight is."""
    other = pair.baseline.named(now.fingerprint)
    if other is not None:
        return f"the weight of {other.where}"
    expected: np.ndarray[Any, Any] = was.projection.matrix_IO
    if expected.T.shape == now.matrix_IO.shape and np.array_equal(expected.T, now.matrix_IO):
        return "the same weight transposed"
    if expected.shape == now.matrix_IO.shape and (factor := _factor(expected, now.matrix_IO)) is not None:
        scaled = f"{factor:.6g}"
        return f"the same weight times {scaled}" if scaled != "1" else f"nearly the same weight, {_distance(was.projection, now)} its own"
    if now.shape[0] == expected.shape[0] and now.shape[1] > expected.shape[1]:
        return f"several projections packed into [{now.shape[0]}, {now.shape[1]}]"
    if columns := columns_of(expected, now.matrix_IO):
        return f"{columns} alone of its own [{expected.shape[0]}, {expected.shape[1]}]"
    if expected.shape == now.matrix_IO.shape and np.array_equal(_sorted_columns(expected), _sorted_columns(now.matrix_IO)):
        return "its own columns in another order, and what takes them back is not followed"
    return f"another weight, {_distance(was.projection, now)} its own"


def _distance(was: Projection, now: Projection) -> str:
    """How far two weights are apart, in words that the second one's name follows."""
    if was.matrix_IO.shape != now.matrix_IO.shape:
        return f"{list(now.matrix_IO.shape)} in place of the {list(was.matrix_IO.shape)} of"
    if not (np.isfinite(was.matrix_IO).all() and np.isfinite(now.matrix_IO).all()):
        return "with NaN or infinite numbers in it or in"
    return f"{sqnr_db(was.matrix_IO, now.matrix_IO):.1f} dB from"


def _sorted_columns(matrix_IO: np.ndarray) -> np.ndarray:
    return matrix_IO[:, np.lexsort(matrix_IO)]


def _factor(expected: np.ndarray, actual: np.ndarray) -> float | None:
    """The factor by which all elements differ, if it is one."""
    norm = float(np.square(expected, dtype=np.float64).sum())
    factor = float((expected.astype(np.float64) * actual).sum()) / norm if norm else 0.0
    return factor if factor and np.allclose(expected * factor, actual, rtol=1e-5, atol=0) else None


def _no_attention(contract: Contract) -> Finding:
    return contract.not_analysed("no attention block was found, and nothing to check is never a pass")
