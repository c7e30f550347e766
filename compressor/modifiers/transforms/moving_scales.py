"""What SmoothQuant, logarithmic equalization and AWQ share: statistics of the uncompressed model, and scales that move from norms and
linear layers into what reads them.

All of it happens at the start of the calibration, in forwards of its own: the model computes afterwards what it did before, so whatever
quantizes behind is calibrated on a model like any other. Nothing of it is kept: a resumed run does it again, to the same bytes.
"""

from __future__ import annotations

import base64
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import Field, PrivateAttr, field_validator
from torch import Tensor, nn

from compressor.algorithms.costs import Memory, Work
from compressor.errors import CalibrationError, RecipeError, TargetError
from compressor.lifecycle import CalibrationNeed, Event, Modifier, ModuleRecord, State
from compressor.lifecycle.hooks import without_modifier_hooks
from compressor.lifecycle.state import StageValue
from compressor.mappings import Mappings, ScalePair, explicit_pairs, find_pairs, scale_channels
from compressor.mappings.explicit import Written, resolve_written
from compressor.model.checkpoints.format import stored_names
from compressor.model.checkpoints.save import as_pretrained
from compressor.model.evaluation import evaluation_mode
from compressor.model.experts.format import fused_modules
from compressor.model.folder import some
from compressor.model.targets import check_patterns, matches
from compressor.modifiers.own_forwards import calibration_data, show_inputs
from compressor.modifiers.transforms.other_batches import OtherBatches
from compressor.modifiers.transforms.rotating import Turned, body_layers, refuse_behind, turned_by, turned_now
from compressor.nn import weight_of
from compressor.nn.build import is_quantizable
from compressor.nn.online_rotation import ALREADY
from compressor.numerics.part_sums import most_sums
from compressor.spelling import suggest

_STATISTICS_BYTES = 4 << 30  # of all pairs that are looked at in one pass over the data

Item = TypeVar("Item")


class ScaleMovingModifier(Modifier):
    """Base of the modifiers that move scales.

    Attributes:
        mappings: which layers read which source, where not all that the model has are wanted; None finds them on its forward.
        ignore: patterns of sources that stay as they are.
    """

    calibration: ClassVar[CalibrationNeed] = "own"

    mappings: list[Any] | None = None
    ignore: list[str] = Field(default_factory=list)

    _written: dict[str, tuple[str, ...]] | None = PrivateAttr(default=None)
    _was_asked: bool = PrivateAttr(default=False)

    @field_validator("ignore", mode="before")
    @classmethod
    def _patterns(cls, value: Any) -> Any:
        patterns = [] if value is None else [value] if isinstance(value, str) else value
        check_patterns(patterns, required=False)
        return patterns

    @field_validator("mappings", mode="after")
    @classmethod
    def _mappings_mean_something(cls, value: list[Any] | None) -> list[Any] | None:
        if value is not None:
            _written_mappings(value)
            if not value:
                raise RecipeError("mappings: an empty list was given, so nothing would be changed; leave it out to have them found")
        return value

    @property
    def found_in_forwards(self) -> str:
        """What a run learns from the model's own forward, and refuses where there is nothing."""
        return "which scales may move"

    def on_initialize(self, state: State) -> bool:
        """Resolve mappings of the recipe, before any data is read."""
        self._written, self._was_asked = None, False
        if self.mappings is not None:
            self._written = resolve_written(state.model, _written_mappings(self.mappings), self.label)
        moved = None if self._written is None else {name for source, readers in self._written.items() for name in (source, *readers)}
        first = next((name for name in state.schemes if moved is None or name in moved), None)
        if first is not None:
            raise RecipeError(f"{self.label}: {first} is quantized by a modifier before it; let it stand before those that quantize")
        return True

    def check_apart(self, state: State, before: Sequence[Modifier]) -> None:
        """Refuse to come behind rotations in the forward of all that is quantized, as far as shapes and the config say.

        Args:
            state: of a plan; a run sees them on the layers themselves.
            before: modifiers that stand before it.

        Raises:
            TargetError: no scale could move.
        """
        self._check_in_front(state, turned_by(state.model, before))

    def _check_in_front(self, state: State, turned: Turned) -> None:
        if self._written is None:
            refuse_behind(self.label, state.schemes or body_layers(state.model), turned, ("input",))

    def on_calibration_start(self, state: State, event: Event) -> None:
        """Find the pairs, take the statistics, move the scales. Changes the model."""
        del event
        self._was_asked = True
        self._check_in_front(state, turned_now(state.model))
        with without_modifier_hooks(state.model), evaluation_mode(state.model):
            others = OtherBatches(state, self.label)
            pairs = self._pairs(state)
        for taken in in_portions(pairs, lambda pair: self.statistics_bytes(reader_columns(state.model, pair).shape[1])):
            show_inputs(state, [(pair.readers[0], partial(self.watch_input, pair)) for pair in taken], type(self).__name__)
            state.report.transforms += self._search(state, taken)
        with without_modifier_hooks(state.model), evaluation_mode(state.model):
            others.check(state)
        state.bring(())
        state.report.notes.append(f"{self.label}: scales of {len(pairs)} modules were moved into what reads them ({_in_short(pairs)})")

    def on_finalize(self, state: State) -> bool:
        """Refuse to finish where nobody asked for it: it does nothing in a training."""
        del state
        if not self._was_asked:
            raise CalibrationError(f"{self.label}: no scale was moved, for that happens in a calibration; run one, or leave it out")
        return True

    def stage_memory(self, modules: Sequence[str]) -> Mapping[str, StageValue]:
        """Nothing: scales move again, to the same values, when a run is resumed."""
        del modules
        return {}

    def forwards_of_training(self, num_samples: int) -> float:
        """Say what it costs beside the stages.

        Args:
            num_samples: calibration sequences.

        Returns:
            Forwards of one sequence: one pass over the data.
        """
        return float(num_samples)

    def own_memory(self, work: Work) -> Memory:
        """Say what it takes, as if scales moved into all weights: statistics of a portion, and what a search does.

        Args:
            work: on the whole model.

        Returns:
            The memory; a changed weight is a tensor of its own.
        """
        sums = most_sums(work.num_samples * work.num_tokens)
        sizes = [sums * self.statistics_bytes(stack[0][1]) for stack in work.weights]
        statistics = max((sum(portion) for portion in in_portions(sizes, lambda size: size)), default=0)
        searching = max((self.search_bytes(stack) for stack in work.weights), default=0)
        seen = max(statistics, work.changed_bytes)  # forwards come first, and once more when the scales have moved
        return Memory(statistics_bytes=seen, working_bytes=statistics + work.changed_bytes + searching)

    def search_bytes(self, stack: Sequence[tuple[int, int, int]]) -> int:
        """Say what the search over weights takes that read one input; nothing to speak of unless overridden.

        Args:
            stack: rows, columns and bytes of an element of each.

        Returns:
            Bytes beyond weights and statistics.
        """
        del stack
        return 0

    @abstractmethod
    def wants(self, state: State, pair: ScalePair) -> bool:
        """Say whether a pair that was found is to be changed, where the recipe names none."""

    @abstractmethod
    def statistics_bytes(self, num_columns: int) -> int:
        """Say what the statistics of one pair take."""

    @abstractmethod
    def watch_input(self, pair: ScalePair, tokens_NK: Tensor, part: int) -> None:
        """Take the inputs of real tokens of the first reader, and the part of the samples that they are in."""

    @abstractmethod
    def add_up(self, state: State, pairs: Sequence[ScalePair]) -> list[int]:
        """Put the statistics of all ranks together.

        Args:
            state: of the run.
            pairs: that were watched, the same on all ranks.

        Returns:
            For each pair the rank that has them, and looks for its scales.
        """

    def found_beside(self) -> dict[str, Any]:
        """Hand over what the last search has found beside scales, for all ranks."""
        return {}

    def keep_beside(self, state: State, found: Mapping[str, Any]) -> None:
        """Take over what a search has found beside scales.

        Args:
            state: of the run; changed.
            found: what `found_beside` gave.
        """

    @abstractmethod
    def scales(self, state: State, pair: ScalePair) -> tuple[Tensor, dict[str, float]]:
        """Say by what [C] the inputs are divided, and what is to be recorded; the statistics of the pair are complete."""

    def _pairs(self, state: State) -> tuple[ScalePair, ...]:
        data = calibration_data(state, self.label)
        self._note_fused(state)
        sources = None if self._written is None else set(self._written)
        found = find_pairs(state.model, data.fullest, state.device, sources=sources, progress=state.progress)
        if self._written is not None:
            pairs, notes = explicit_pairs(self._written, found, self.label)
            state.report.notes += notes
        else:
            pairs = tuple(pair for pair in found.pairs if self.wants(state, pair))
            self._note_turned(state, found)
        self._check_ignored(state, pairs)
        kept = tuple(pair for pair in pairs if not self._is_ignored(state.model, pair.source))
        if not kept:
            raise TargetError(f"{self.label}: {self._nothing(found, pairs)}")
        return kept

    def _note_turned(self, state: State, found: Mappings) -> None:
        """Say where rotations in the forward keep it from moving scales that it would move."""
        anywhere = tuple(state.schemes)
        turned = [one for one in found.refused if ALREADY in one.why and self.wants(state, ScalePair(one.source, anywhere))]
        if turned:
            state.report.notes.append(
                f"{self.label}: no scale of {some([one.source for one in turned])} moves ({turned[0].source}: {turned[0].why})"
            )

    def _note_fused(self, state: State) -> None:
        """Experts are taken apart where something quantizes or prunes them; no scale moves into fused ones."""
        fused = fused_modules(state.model)
        if not fused:
            return
        remedy = "scales move into experts where a modifier behind this one quantizes or prunes them, for then they are taken apart"
        hidden = [name for names in (self._written or {}).values() for name in names if name.startswith(tuple(f"{one}." for one in fused))]
        if hidden:
            raise TargetError(f"{self.label}: {hidden[0]} is one of the fused experts {fused[0]}; {remedy}, or take its mapping out")
        state.report.notes.append(f"{self.label}: no scale moves into {some(fused)}, whose experts are fused; {remedy}")

    def _nothing(self, found: Mappings, pairs: Sequence[ScalePair]) -> str:
        if pairs:
            return "ignore names all sources, so nothing would be changed; leave some out"
        why = next(iter(found.refused), None)
        seen = "" if why is None else f" (of {why.source} none can, for {why.why})"
        return f"no scale can move into a layer that is quantized{seen}; `compressor mappings` shows what was tried; leave the modifier out"

    def _check_ignored(self, state: State, pairs: Sequence[ScalePair]) -> None:
        """Refuse a name that is none; note a pattern that names no source."""
        named = [*state.model.named_modules()][1:]
        for pattern in self.ignore:
            if any(matches(pair.source, state.model.get_submodule(pair.source), pattern) for pair in pairs):
                continue
            if not pattern.startswith("re:") and not any(matches(name, module, pattern) for name, module in named):
                raise TargetError(f"{self.label}: ignore {pattern!r} matches no module; {suggest(pattern, [name for name, _ in named])}")
            state.report.notes.append(f"{self.label}: ignore {pattern!r} names no source of a scale that can move, and leaves nothing out")

    def _is_ignored(self, model: nn.Module, name: str) -> bool:
        return any(matches(name, model.get_submodule(name), pattern) for pattern in self.ignore)

    def _search(self, state: State, pairs: Sequence[ScalePair]) -> list[dict[str, Any]]:
        """Find scales, each by the rank that has its statistics, and move them; return what was done, in the order of the pairs."""
        owners, done = self.add_up(state, pairs), {}
        for level in _levels(pairs):

            def found(number: int, level: Sequence[int] = level) -> dict[str, Any]:
                pair = pairs[level[number]]
                state.bring((pair.source, *pair.readers))
                scales_C, details = self.scales(state, pair)
                return {"scales": scales_C, "details": details, "beside": self.found_beside()}

            with torch.no_grad():
                for place, one in zip(level, state.ranks.solved([owners[place] for place in level], found, ()), strict=True):
                    state.bring((pairs[place].source, *pairs[place].readers))
                    self.keep_beside(state, one["beside"])
                    done[place] = self._move(state, pairs[place], one["scales"], one["details"])
        return [done[place] for place in range(len(pairs))]

    def _move(self, state: State, pair: ScalePair, scales_C: Tensor, details: Mapping[str, float]) -> dict[str, Any]:
        for name in (pair.source, *pair.readers):
            state.own_tensors(name)
            state.settled.add(name)
        factor_C = (1.0 / scales_C.double()).float().cpu()
        scale_channels(state.model, pair, factor_C)
        largest = float(torch.maximum(scales_C, 1 / scales_C).max())
        record = ModuleRecord(pair.source, type(self).__name__, "scales moved", 0.0, None, {"largest_factor": largest, **details})
        state.report.modules.setdefault(pair.source, record)
        return self._transform(state.model, pair, factor_C)

    def _transform(self, model: nn.Module, pair: ScalePair, factor_C: Tensor) -> dict[str, Any]:
        """What a reader of compression.json needs to do the same to the base; names are those of its files."""
        names = [pair.source, *pair.readers]
        stored = {} if as_pretrained(model) is None else stored_names(model, names)
        source, *readers = (stored.get(name, name) for name in names)
        layout = {"head_dim": pair.head_dim, "repeats": pair.repeats, "offset": pair.offset}
        factors = base64.b64encode(factor_C.numpy().astype("<f4").tobytes()).decode()
        return {"kind": "scales", "modifier": type(self).__name__, "source": source, "readers": readers, **layout, "factors": factors}


def _levels(pairs: Sequence[ScalePair]) -> list[list[int]]:
    """Which pairs can be searched together, with the results of one after another: those whose modules no pair before them changes."""
    reached: dict[str, int] = {}
    levels: list[list[int]] = []
    for place, pair in enumerate(pairs):
        names = (pair.source, *pair.readers)
        level = max(reached.get(name, 0) for name in names)
        levels += [[]] if level == len(levels) else []
        levels[level].append(place)
        reached |= dict.fromkeys(names, level + 1)
    return levels


def in_portions(items: Iterable[Item], size_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Cut a list so that the statistics of each part fit into memory.

    Args:
        items: in order.
        size_of: bytes that the statistics of one take.

    Yields:
        Parts of the list, none of them empty.
    """
    portion: list[Item] = []
    taken = 0
    for item in items:
        size = size_of(item)
        if portion and taken + size > _STATISTICS_BYTES:
            yield portion
            portion, taken = [], 0
        portion.append(item)
        taken += size
    if portion:
        yield portion


def reader_columns(model: nn.Module, pair: ScalePair) -> Tensor:
    """Return the weight [R, K] of the first reader of a pair.

    Args:
        model: not modified.
        pair: of it.

    Returns:
        A view.
    """
    return reader_weight(model.get_submodule(pair.readers[0]))


def reader_weight(module: nn.Module) -> Tensor:
    """Return the weight [R, K] of a layer that multiplies by it; a view.

    Args:
        module: linear, or a router.

    Returns:
        The weight.
    """
    return weight_of(module) if is_quantizable(module) else module.get_parameter("weight")


def _written_mappings(given: Sequence[Any]) -> list[Written]:
    """Take mappings in any of the forms of llm-compressor."""
    made = []
    for item in given:
        smooth, balance = _smooth_and_balance(item)
        balance = [balance] if isinstance(balance, str) else balance
        patterns: list[Any] = [smooth, *balance] if isinstance(balance, list | tuple) and balance else [None]
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise RecipeError(f"mappings: {item!r} is none; give [[layers that read it], source], or smooth_layer and balance_layers")
        check_patterns(patterns, required=True)
        made.append(Written(smooth, tuple(balance)))
    return made


def _smooth_and_balance(item: Any) -> tuple[Any, Any]:
    if isinstance(item, Mapping):
        return item.get("smooth_layer"), item.get("balance_layers")
    if isinstance(item, list | tuple) and len(item) == 2:
        return item[1], item[0]
    return getattr(item, "smooth_layer", None), getattr(item, "balance_layers", None)


def _in_short(pairs: Sequence[ScalePair]) -> str:
    first = pairs[0]
    readers = ", ".join(name.rpartition(".")[2] for name in first.readers[:3]) + (", ..." if first.readers[3:] else "")
    return f"{first.source} into {readers}{'; ...' if pairs[1:] else ''}"
