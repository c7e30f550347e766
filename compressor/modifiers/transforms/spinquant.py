"""SpinQuantModifier: hidden states are turned so that no channel stands out (SpinQuant, arXiv 2405.16406).

R1 turns the hidden states that all layers add to, R2 the values of each attention head, both in weights alone. Which modules write and read
them is found and proved on the model's own forward, see `compressor.mappings.basis`. A model with LayerNorm gets a rotation that keeps the
mean of a token's channels, so that it stays a model of its class. R4 turns the input of the last layer of each MLP in every forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator
from torch import Tensor, nn

from compressor.algorithms.costs import Memory, Work
from compressor.data.collate import Batch
from compressor.errors import CalibrationError, ModelError, RecipeError, TargetError
from compressor.lifecycle import CalibrationNeed, Event, Modifier, ModuleRecord, State
from compressor.lifecycle.hooks import without_modifier_hooks
from compressor.mappings import ScalePair, find_pairs
from compressor.mappings.basis import Basis, find_basis, find_values
from compressor.mappings.inner import find_inner
from compressor.mappings.pairs import pattern_of
from compressor.mappings.turns import Turn, fold_and_turn, has_biases
from compressor.model.checkpoints.save import as_pretrained, left_out
from compressor.model.evaluation import evaluation_mode
from compressor.model.folder import some
from compressor.model.loading.sample_batches import Modality, reads, unheld
from compressor.model.targets import ends_of, text_config
from compressor.modifiers.own_forwards import calibration_data
from compressor.modifiers.transforms.learned_rotations import LearnedTurns
from compressor.modifiers.transforms.other_batches import OtherBatches, outputs_of_model
from compressor.modifiers.transforms.rotating import (
    RotatingModifier,
    Turned,
    as_record,
    body_layers,
    refuse_behind,
    turned_by,
    turned_now,
)
from compressor.modifiers.transforms.written_roles import check_written, notes_of_written
from compressor.modifiers.tuning.base_outputs import BaseOutputs, training_memory
from compressor.modifiers.tuning.budget import Budget, tune
from compressor.nn import weight_of
from compressor.nn.attention.kv_cache import kv_scheme_of
from compressor.nn.build import is_quantizable
from compressor.nn.online_rotation import ALREADY
from compressor.tracing.footprint import Footprint

RotationName = Literal["R1", "R2", "R3", "R4"]
_INNER_SIZES = ("intermediate", "ffn", "n_inner")  # of configs, for the width inside an MLP


class SpinQuantModifier(RotatingModifier):
    """Turn hidden states, values of attention and what MLPs end with before they are quantized.

    Attributes:
        rotations: R1, R2; R4, which is computed in every forward.
        transform_type: `hadamard`; `random-hadamard`, with random signs; `random-matrix`, orthogonal, for sizes without a Hadamard matrix.
        randomize: a rotation of its own for the values of each layer; random signs.
        transform_block_size: R1 and R4 turn runs of so many channels; None: all together.
        mappings: which modules write and read hidden states, by role, as llm-compressor has it; found on a forward, and held against it.
        norm_mappings: which layers read which norm; the same.
        precision: float64, in which all is computed.
        learnable: train R1 and R2 on the calibration data, against what the model predicted, rounded as the modifiers behind will.
        steps: of the training.
        batch_size: sequences in a step, at most.
        lr: angle, about, by which a step turns at its peak.
        held_out_frac: share of the sequences that only judge; the best state on them is kept, the fixed rotation where none is better.
    """

    spell: ClassVar[Callable[[str], str]] = str.upper

    rotations: list[RotationName] = Field(default=["R1", "R2"])
    mappings: Any = None
    norm_mappings: Any = None
    learnable: bool = False
    steps: int = Field(default=100, gt=0)
    batch_size: int = Field(default=8, gt=0)
    lr: float = Field(default=0.02, gt=0, le=1)
    held_out_frac: float = Field(default=0.125, gt=0, lt=1)

    _inner: frozenset[str] | None = PrivateAttr(default=None)

    @field_validator("rotations", mode="after")
    @classmethod
    def _built(cls, value: list[RotationName]) -> list[RotationName]:
        if "R3" in value:
            raise RecipeError(
                "rotations: R3 would be computed inside attention, on queries and keys behind their rotary embedding; no reader does "
                "(transformers applies no transform_config), so it is not built here: leave it out, kv_cache_scheme works without"
            )
        return value

    @model_validator(mode="after")
    def _has_mappings(self) -> Self:
        check_written(self.mappings, self.norm_mappings)
        if (self.mappings is not None or self.norm_mappings is not None) and "R1" not in self.rotations:
            raise RecipeError("mappings: they are for R1, which rotations does not name; leave them out")
        if self.transform_block_size is not None and not {"R1", "R4"} & set(self.rotations):
            raise RecipeError("transform_block_size: R1 and R4 turn runs of channels, and rotations names neither; leave it out")
        return self

    @model_validator(mode="after")
    def _settings_of_a_training(self) -> Self:
        if self.learnable and not {"R1", "R2"} & set(self.rotations):
            raise RecipeError("learnable: R1 and R2 are learned, and rotations names neither; leave it out")
        given = [name for name in ("steps", "batch_size", "lr", "held_out_frac") if name in self.model_fields_set]
        if given and not self.learnable:
            raise RecipeError(f"{given[0]}={getattr(self, given[0])} is for a training; add learnable: true, or leave it out")
        return self

    @property
    def calibration_need(self) -> CalibrationNeed:
        """Data for a training, in forwards of its own; else none."""
        return "own" if self.learnable else "none"

    def on_initialize(self, state: State) -> bool:
        """Refuse what is quantized already, and R4 where no checkpoint can hold it."""
        if "R4" in self.rotations:
            self.check_has_config(state)
        return super().on_initialize(state)

    def check_recipe(self, state: State) -> None:
        """Refuse a training without weights that will be rounded, and runs of channels that do not fill the config's hidden states.

        Args:
            state: of the session, or of a plan; all modifiers have been initialized.

        Raises:
            RecipeError: there are none, they do not, or there is no rotation of their size.
        """
        if self.learnable and not any(scheme.weights is not None for scheme in state.schemes.values()):
            raise RecipeError(f"{self.label}: learnable: no modifier behind it quantizes weights, and that is learned from; add one")
        size = getattr(text_config(getattr(state.model, "config", None)), "hidden_size", None)
        if "R1" in self.rotations and isinstance(size, int):
            self._check_block(size)

    def _check_once(self, state: State, turns: Sequence[Turn]) -> None:
        """Refuse to turn what this run has turned: the matrix is the same one, and a Hadamard matrix takes itself back."""
        earlier = (turn for record in state.report.transforms for turn in record.get("turns", ()) if "online" not in turn)
        before = {name for turn in earlier for name in turn["writers"]}
        again = [name for turn in as_record(state.model, "", turns)["turns"] for name in turn["writers"] if name in before]
        if again:
            raise TargetError(f"{self.label}: what {again[0]} gives is turned by an earlier modifier already; leave one of the two out")

    def _check_block(self, size: int) -> int:
        """Return how many of `size` channels R1 turns together."""
        block = self.transform_block_size or size
        if size % block:
            raise RecipeError(f"{self.label}: transform_block_size={block} does not divide the {size} channels; give one that does")
        self._check_size(block, size, "R1")
        return block

    def check_apart(self, state: State, before: Sequence[Modifier]) -> None:
        """Refuse R4 where a modifier before it turns, too, and R1 and R2 behind rotations in the forward; see the base."""
        super().check_apart(state, before)
        self._check_in_front(state, turned_by(state.model, before))

    def _check_in_front(self, state: State, turned: Turned) -> None:
        if {"R1", "R2"} & set(self.rotations):
            refuse_behind(self.label, body_layers(state.model), turned, ("input", "output"))

    def on_calibration_start(self, state: State, event: Event) -> None:
        """Find what may be turned, turn it, and see that the model computes what it did. Changes the model."""
        del event
        self.check_recipe(state)
        self._was_asked = True
        batch, turned = self.first_batch(state), turned_now(state.model)
        with without_modifier_hooks(state.model), evaluation_mode(state.model):
            more = {f"{kind} that the config allows": self._made(state, kind) for kind in self._unheld(state, [batch])}
            before, others = outputs_of_model(state, batch), OtherBatches(state, self.label, more)
            online = self._fourth(state, batch) if "R4" in self.rotations else []
            self.turn_online(state, online, batch)
            self._check_in_front(state, turned)
            basis = self._basis(state, batch) if "R1" in self.rotations else None
            values = self._values(state, batch) if "R2" in self.rotations else ()
            notes = notes_of_written(state.model, basis, values, self.mappings, self.norm_mappings, self.label)
            state.report.notes += notes
            turns = [*self._first(state, basis), *self._second(state, values)]
            self._check_once(state, turns)
            folds = () if basis is None else basis.norms
            if self.learnable:
                turns = self._learned(state, basis, turns)
            fold_and_turn(state.model, folds, turns, state.own_tensors)
            if basis is not None and basis.tied:
                _untie(state)
            self.check_outputs(state, batch, before)
            others.check(state)
        self._report(state, basis, online, turns)

    def first_batch(self, state: State) -> Batch:
        """As the base; with R1 one with images or sound, where the model reads these beside text and the data hold none."""
        kinds = [kind for kind in self._unheld(state, ()) if kind != "text"]
        return self._made(state, kinds[0]) if kinds and reads(state.model, "text") else super().first_batch(state)

    def _unheld(self, state: State, more: Sequence[Batch]) -> list[Modality]:
        """With R1, what the model reads and neither the data nor these hold: what writes its features turns, too, or nothing does."""
        if "R1" not in self.rotations or as_pretrained(state.model) is None:
            return []
        return unheld(state.model, [*more, *(() if state.data is None else state.data.batches)])

    def _made(self, state: State, kind: Modality) -> Batch:
        try:
            return self.made_batch(state, kind)
        except ModelError as error:
            raise TargetError(f"{self.label}: R1: the model reads {kind}, the data hold none, and none can be made: {error}") from error

    def forwards_of_training(self, num_samples: int) -> float:
        """Say what a training costs: a forward of everything, measurements on what is held out, steps of a forward and a backward each.

        Args:
            num_samples: calibration sequences.

        Returns:
            Forwards of one sequence; a backward counts as two.
        """
        if not self.learnable:
            return super().forwards_of_training(num_samples)
        held_out = min(max(1, round(self.held_out_frac * num_samples)), max(1, num_samples - 1))
        return num_samples + 9 * held_out + 3 * self.steps * min(self.batch_size, num_samples)

    @property
    def needs_gradients(self) -> bool:
        """Whether rotations are learned."""
        return self.learnable

    def own_memory(self, work: Work) -> Memory:
        """As the base; a training computes with turned and rounded values in the place of all weights."""
        return training_memory(work, self.batch_size, work.stored_bytes) if self.learnable else super().own_memory(work)

    @property
    def found_in_forwards(self) -> str:
        """What a run learns from the model's own forward, and refuses where there is nothing."""
        return f"what {' and '.join(self.rotations)} {'turn' if self.rotations[1:] else 'turns'}"

    def added_bytes(self, model: nn.Module) -> int:
        """With R1, a head that shares the embedding's weight gets one of its own, and with that tie end all others.

        The embedding adds to the hidden states unless it is narrower and stands alone: then it is projected before anything is added.
        """
        head, embedding = ends_of(model) if hasattr(model, "get_output_embeddings") else (None, None)
        shared: Any = getattr(head, "weight", None)
        is_tied = "R1" in self.rotations and shared is getattr(embedding, "weight", None)
        if not is_tied or not isinstance(shared, Tensor):
            return 0
        width = shared.shape[-1]
        tables = [one for one in model.modules() if isinstance(one, nn.Embedding) and one.embedding_dim == width]
        hidden = getattr(text_config(getattr(model, "config", None)), "hidden_size", width)
        if width != hidden and not tables[1:]:
            return 0
        return sum(value.nbytes for value in left_out(model).values()) or shared.nbytes

    def turned_online(self, model: nn.Module) -> Iterator[tuple[str, int, str]]:
        """With R4, the last layers of MLPs: as a plan has foreseen them, or else told by the config's sizes.

        Args:
            model: with or without values; not modified.

        Yields:
            Dotted name, number of channels, and `R4`.
        """
        config = text_config(getattr(model, "config", None))
        given = config.to_dict() if "R4" in self.rotations and hasattr(config, "to_dict") else {}
        inner = {value for key, value in given.items() if any(part in key for part in _INNER_SIZES) and isinstance(value, int)}
        for name, module in model.named_modules():
            if is_quantizable(module) and not isinstance(module, nn.Embedding):
                rows, columns = weight_of(module).shape
                by_shape = columns in inner and rows == given.get("hidden_size")
                if "R4" in self.rotations and (by_shape if self._inner is None else name in self._inner):
                    yield name, columns, "R4"

    def foresee_inner(self, names: Sequence[str] | None) -> None:
        """Take what R4 would turn, as followed on shapes; a run sees it on the weights.

        Args:
            names: dotted names of layers; None where no forward could be followed.
        """
        self._inner = None if names is None else frozenset(names)

    def _basis(self, state: State, batch: Batch) -> Basis:
        try:
            return find_basis(state.model, batch, state.device, progress=state.progress)
        except TargetError as error:
            raise TargetError(f"{self.label}: R1: {error}; leave R1 out") from error

    def _first(self, state: State, basis: Basis | None) -> list[Turn]:
        if basis is None:
            return []
        rotation = self.rotation(self._check_block(basis.size), state.seed, "R1", width=basis.size, keeps_mean=basis.keeps_mean)
        norms = [pair.source for pair in basis.norms if not has_biases(state.model, pair.readers)]  # they keep their bias, turned
        readers = [*basis.readers, *(name for pair in basis.norms for name in pair.readers)]
        return [Turn(rotation, (*basis.writers, *norms), tuple(readers))]

    def _values(self, state: State, batch: Batch) -> tuple[tuple[ScalePair, int], ...]:
        found = find_pairs(state.model, batch, state.device, progress=state.progress)
        values = find_values(state.model, batch, state.device, found.pairs, head_dim(state.model))
        if not values and kv_scheme_of(state.model) is not None:
            raise TargetError(f"{self.label}: R2: keys and values are quantized already; leave R2 out, or turn first")
        if not values:
            turned = next((f" (of {one.source} none moves, for {one.why})" for one in found.refused if ALREADY in one.why), "")
            raise TargetError(f"{self.label}: R2: no linear layer gives the values of an attention alone{turned}; leave R2 out")
        kinds = {pattern_of(pair.source) for pair, _ in values}
        missed = [one for one in found.refused if ALREADY in one.why and pattern_of(one.source) in kinds]
        if missed:
            names = some([one.source for one in missed])
            state.report.notes.append(f"{self.label}: R2 leaves out {names} ({missed[0].source}: {missed[0].why})")
        return values

    def _second(self, state: State, values: Sequence[tuple[ScalePair, int]]) -> list[Turn]:
        turns: dict[Any, Turn] = {}
        for number, (pair, size) in enumerate(values):
            key = number if self.randomize or self.learnable else size
            known = turns.get(key)
            rotation = known.rotation if known else self.rotation(size, state.seed + 1 + (number if self.randomize else 0), "R2")
            writers, readers = (known.writers, known.readers) if known else ((), ())
            turns[key] = Turn(rotation, (*writers, pair.source), (*readers, *pair.readers))
        return list(turns.values())

    def _fourth(self, state: State, batch: Batch) -> list[Turn]:
        try:
            names = find_inner(state.model, batch, state.device, progress=state.progress)
        except TargetError as error:
            raise TargetError(f"{self.label}: R4: {error}; leave R4 out") from error
        turns: dict[int, Turn] = {}
        widths = {name: weight_of(state.model.get_submodule(name)).shape[1] for name in names}
        for name, width in widths.items():
            size = self.transform_block_size or width
            self.check_divides(size, width, name)
            known = turns.get(size) or Turn(self.rotation(size, state.seed, "R4", width=math.gcd(*widths.values())), (), (), "R4")
            turns[size] = replace(known, readers=(*known.readers, name))
        return list(turns.values())

    def _learned(self, state: State, basis: Basis | None, turns: Sequence[Turn]) -> list[Turn]:
        """Train the rotations; the model is as it was afterwards."""
        data = calibration_data(state, self.label)
        if data.num_samples < 2:
            raise CalibrationError(f"{self.label}: {data.num_samples} sequence was given; give at least 2, of which one is held out")
        with Footprint(state.model):
            base = BaseOutputs(state.model, data, state.device, self.label)
            split = base.split(self.held_out_frac, state.seed % 2**62)
            keeps_mean = basis is not None and basis.keeps_mean
            moves = LearnedTurns(
                state.model, () if basis is None else basis.norms, turns, state.schemes, state.device, keeps_mean=keeps_mean
            )
            budget = Budget(self.steps, self.batch_size, self.lr, max(1, self.steps // 10), max(4, self.steps // 8), 4, state.seed % 2**62)
            with state.progress.task("learn rotations", total=self.steps) as task:
                outcome = tune(moves, base, state.model, split, budget, lambda note: task.advance(1, note=note))
                task.advance(self.steps - outcome.steps)
        state.report.notes.append(
            f"{self.label}: {base.measure} of the rounded model {outcome.before:.6g} -> {outcome.after:.6g} on {len(split.held_out)} "
            f"held-out sequences (best after step {outcome.best_step} of {outcome.steps}), rotations learned on {len(split.trained)}"
        )
        state.report.notes += moves.unreached.notes(self.label)
        return moves.settled() if outcome.best_step else list(turns)

    def _report(self, state: State, basis: Basis | None, online: Sequence[Turn], offline: Sequence[Turn]) -> None:
        folds, turns = () if basis is None else basis.norms, [*online, *offline]
        names = list(
            dict.fromkeys([*(pair.source for pair in folds), *(name for turn in turns for name in (*turn.writers, *turn.readers))])
        )
        state.settled.update(names)
        for name in names:
            record = ModuleRecord(name, type(self).__name__, f"turned ({self.transform_type})", 0.0, None, {})
            state.report.modules.setdefault(name, record)
        tied = {} if basis is None else basis.tied
        if online:  # rounded before the others are computed
            state.report.transforms.append(as_record(state.model, type(self).__name__, online))
        if offline:
            state.report.transforms.append(as_record(state.model, type(self).__name__, offline, basis))
        untied = f"; {', '.join(tied)} is no longer tied to {', '.join(tied.values())}" if tied else ""
        what = f"{' and '.join(self.rotations)} {'are' if self.rotations[1:] else 'is'}"
        state.report.notes.append(f"{self.label}: {what} in the weights of {len(names)} modules{untied}")
        state.report.notes += self.online_notes((name, turn.online) for turn in online for name in turn.readers)


def _untie(state: State) -> None:
    """Say in the config what is true of the weights, so that no loader ties them again."""
    config: Any = getattr(state.model, "config", None)
    for part in {id(part): part for part in (config, text_config(config))}.values():
        if hasattr(part, "tie_word_embeddings"):
            state.set_setting(part, "tie_word_embeddings", False)


def head_dim(model: nn.Module) -> int | None:
    """Return the size of attention heads as the config has it, or None.

    Args:
        model: of transformers, or any other, whose config says nothing.

    Returns:
        Channels of one head.
    """
    config = text_config(getattr(model, "config", None))
    own = getattr(config, "head_dim", None)
    if isinstance(own, int):
        return own
    size, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    return size // heads if isinstance(size, int) and isinstance(heads, int) and heads else None
