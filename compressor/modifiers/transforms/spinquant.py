"""SpinQuantModifier: hidden states are turned so that no channel stands out, in weights alone (SpinQuant, arXiv 2405.16406).

R1 turns the hidden states that all layers add to, R2 the values of each attention head. Which modules write and read them is found and
proved on the model's own forward, see `compressor.mappings.basis`. A model with LayerNorm gets a rotation that keeps the mean of a token's
channels, so that it stays a model of its class.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, PrivateAttr, field_validator, model_validator
from torch import Tensor, nn

from compressor.algorithms.rotations import Rotation, RotationKind, make_rotation
from compressor.data.collate import Batch, batch_to, call_model
from compressor.errors import CalibrationError, NumericsError, RecipeError, TargetError
from compressor.lifecycle import CalibrationNeed, Event, Modifier, ModuleRecord, State
from compressor.lifecycle.hooks import without_modifier_hooks
from compressor.lifecycle.state import StageValue
from compressor.mappings import ScalePair, find_pairs
from compressor.mappings.basis import Basis, find_basis, find_values
from compressor.mappings.turns import Turn, fold_and_turn, has_biases
from compressor.model.checkpoints.format import stored_names
from compressor.model.checkpoints.save import as_pretrained
from compressor.model.evaluation import evaluation_mode
from compressor.model.loading.sample_batches import sample_batches
from compressor.modifiers.own_forwards import calibration_data
from compressor.modifiers.transforms.learned_rotations import LearnedTurns
from compressor.modifiers.transforms.written_roles import check_written, notes_of_written
from compressor.modifiers.tuning.base_outputs import BaseOutputs
from compressor.modifiers.tuning.budget import Budget, Split, tune
from compressor.nn.build import is_quantizable
from compressor.nn.experts import UnfusedExperts
from compressor.tracing.footprint import Footprint
from compressor.tracing.picking import excerpt

RotationName = Literal["R1", "R2", "R3", "R4"]
_ONLINE = ("R3", "R4")
_MOST = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.05}  # relative difference of logits that is rounding
_MOST_NARROW = 0.2  # bfloat16, whose weights are all rounded a second time


class SpinQuantModifier(Modifier):
    """Turn hidden states and values of attention before they are quantized.

    Attributes:
        rotations: R1, R2.
        transform_type: `hadamard`; `random-hadamard`, with random signs; `random-matrix`, orthogonal, for sizes without a Hadamard matrix.
        randomize: a rotation of its own for the values of each layer.
        transform_block_size: R1 turns runs of so many channels; None: all together.
        mappings: which modules write and read hidden states, by role, as llm-compressor has it; found on a forward, and held against it.
        norm_mappings: which layers read which norm; the same.
        precision: float64, in which all is computed.
        learnable: train the rotations on the calibration data, against what the model predicted, rounded as the modifiers behind will.
        steps: of the training.
        batch_size: sequences in a step.
        lr: angle, about, by which a step turns at its peak.
        held_out_frac: share of the sequences that only judge; the best state on them is kept, the fixed rotation where none is better.
    """

    rotations: list[RotationName] = Field(default=["R1", "R2"])
    transform_type: RotationKind = "hadamard"
    randomize: bool = False
    transform_block_size: int | None = Field(default=None, gt=1)
    mappings: Any = None
    norm_mappings: Any = None
    precision: Any = None
    transform_config: Any = None
    learnable: bool = False
    steps: int = Field(default=100, gt=0)
    batch_size: int = Field(default=8, gt=0)
    lr: float = Field(default=0.02, gt=0, le=1)
    held_out_frac: float = Field(default=0.125, gt=0, lt=1)

    _was_asked: bool = PrivateAttr(default=False)

    @field_validator("rotations", mode="before")
    @classmethod
    def _upper(cls, value: Any) -> Any:
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, list | tuple) or not given:
            raise RecipeError(f"rotations: {value!r} names none; give some of R1, R2")
        return list(dict.fromkeys(one.upper() if isinstance(one, str) else one for one in given))

    @field_validator("rotations", mode="after")
    @classmethod
    def _offline(cls, value: list[RotationName]) -> list[RotationName]:
        online = [name for name in value if name in _ONLINE]
        if online:
            raise RecipeError(f"rotations: {', '.join(online)} would be computed in every forward, which is not built here; leave it out")
        return value

    @field_validator("precision", mode="after")
    @classmethod
    def _is_float64(cls, value: Any) -> Any:
        if value is not None and str(value).removeprefix("torch.") != "float64":
            raise RecipeError(f"precision={value}: weights are turned in float64 and rounded once, to their own dtype; leave it out")
        return value

    @field_validator("transform_config", mode="after")
    @classmethod
    def _not_given(cls, value: Any) -> Any:
        if value is not None:
            raise RecipeError("transform_config: rotations of one's own are not built here; give rotations, transform_type and the rest")
        return value

    @model_validator(mode="after")
    def _has_mappings(self) -> Self:
        check_written(self.mappings, self.norm_mappings)
        if (self.mappings is not None or self.norm_mappings is not None) and "R1" not in self.rotations:
            raise RecipeError("mappings: they are for R1, which rotations does not name; leave them out")
        return self

    @model_validator(mode="after")
    def _settings_of_a_training(self) -> Self:
        given = [name for name in ("steps", "batch_size", "lr", "held_out_frac") if name in self.model_fields_set]
        if given and not self.learnable:
            raise RecipeError(f"{given[0]}={getattr(self, given[0])} is for a training; add learnable: true, or leave it out")
        return self

    @property
    def calibration_need(self) -> CalibrationNeed:
        """Data for a training, in forwards of its own; else none."""
        return "own" if self.learnable else "none"

    def on_initialize(self, state: State) -> bool:
        """Refuse what is quantized already."""
        self._was_asked = False
        if state.schemes:
            first = next(iter(state.schemes))
            raise RecipeError(f"{self.label}: {first} is quantized by a modifier before it; let it stand before those that quantize")
        if state.sparse:
            zeros = next(iter(state.sparse))
            raise RecipeError(
                f"{self.label}: a modifier before it makes zeros in {zeros}, which a rotation would fill; let it stand before that"
            )
        for layer, module in state.model.named_modules():
            if isinstance(module, UnfusedExperts):  # taken apart for this run, and kept so where somebody changes them
                state.touch(f"{layer}.{name}" for name, part in module.named_modules() if is_quantizable(part))
        return True

    def on_calibration_start(self, state: State, event: Event) -> None:
        """Find what may be turned, turn it, and see that the model computes what it did. Changes the model."""
        del event
        self._was_asked = True
        batch = state.data.batches[0] if state.data is not None else sample_batches(state.model).batches[0]
        with without_modifier_hooks(state.model), evaluation_mode(state.model):
            basis = self._basis(state, batch) if "R1" in self.rotations else None
            values = self._values(state, batch) if "R2" in self.rotations else ()
            notes = notes_of_written(state.model, basis, values, self.mappings, self.norm_mappings, self.label)
            state.report.notes += notes
            turns = [*self._first(state, basis), *self._second(state, values)]
            before = _logits(state, batch)
            folds = () if basis is None else basis.norms
            if self.learnable:
                turns = self._learned(state, basis, turns)
            fold_and_turn(state.model, folds, turns, state.own_tensors)
            if basis is not None and basis.tied:
                _untie(state)
            self._check_outputs(state, before, _logits(state, batch))
        self._report(state, basis, turns)

    def on_finalize(self, state: State) -> bool:
        """Refuse to finish where nobody asked for it: it does nothing in a training."""
        del state
        if not self._was_asked:
            raise CalibrationError(f"{self.label}: nothing was turned, for that happens in a calibration; run one, or leave it out")
        return True

    def forwards_of_training(self, num_samples: int) -> float:
        """Say what a training costs: a forward of everything, measurements on what is held out, steps of a forward and a backward each.

        Args:
            num_samples: calibration sequences.

        Returns:
            Forwards of one sequence; a backward counts as two.
        """
        if not self.learnable:
            return 0.0
        held_out = min(max(1, round(self.held_out_frac * num_samples)), max(1, num_samples - 1))
        return num_samples + 9 * held_out + 3 * self.steps * self.batch_size

    def stage_memory(self, modules: Sequence[str]) -> Mapping[str, StageValue]:
        """Nothing: the same rotations are made again when a run is resumed."""
        del modules
        return {}

    def _basis(self, state: State, batch: Batch) -> Basis:
        try:
            return find_basis(state.model, batch, state.device, progress=state.progress)
        except TargetError as error:
            raise TargetError(f"{self.label}: R1: {error}; leave R1 out") from error

    def _first(self, state: State, basis: Basis | None) -> list[Turn]:
        if basis is None:
            return []
        block = self.transform_block_size or basis.size
        if basis.size % block:
            raise RecipeError(f"{self.label}: transform_block_size={block} does not divide the {basis.size} channels; give one that does")
        rotation = self._rotation(block, state.seed, "R1", keeps_mean=basis.keeps_mean)
        norms = [pair.source for pair in basis.norms if not has_biases(state.model, pair.readers)]  # they keep their bias, turned
        readers = [*basis.readers, *(name for pair in basis.norms for name in pair.readers)]
        return [Turn(rotation, (*basis.writers, *norms), tuple(readers))]

    def _values(self, state: State, batch: Batch) -> tuple[tuple[ScalePair, int], ...]:
        found = find_pairs(state.model, batch, state.device, progress=state.progress)
        values = find_values(state.model, batch, state.device, found.pairs, head_dim(state.model))
        if not values:
            raise TargetError(f"{self.label}: R2: no linear layer gives the values of an attention alone; leave R2 out")
        return values

    def _second(self, state: State, values: Sequence[tuple[ScalePair, int]]) -> list[Turn]:
        turns: dict[Any, Turn] = {}
        for number, (pair, size) in enumerate(values):
            key = number if self.randomize or self.learnable else size
            known = turns.get(key)
            rotation = known.rotation if known else self._rotation(size, state.seed + 1 + (number if self.randomize else 0), "R2")
            writers, readers = (known.writers, known.readers) if known else ((), ())
            turns[key] = Turn(rotation, (*writers, pair.source), (*readers, *pair.readers))
        return list(turns.values())

    def _learned(self, state: State, basis: Basis | None, turns: Sequence[Turn]) -> list[Turn]:
        """Train the rotations; the model is as it was afterwards."""
        data = calibration_data(state, self.label)
        if not any(scheme.weights is not None for scheme in state.schemes.values()):
            raise RecipeError(f"{self.label}: learnable: no modifier behind it quantizes weights, and that is learned from; add one")
        if data.num_samples < 2:
            raise CalibrationError(f"{self.label}: {data.num_samples} sequence was given; give at least 2, of which one is held out")
        with Footprint(state.model):
            base = BaseOutputs(state.model, data, state.device, self.label)
            split = Split.of(len(base.sequences), self.held_out_frac, state.seed % 2**62)
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
        return moves.settled() if outcome.best_step else list(turns)

    def _rotation(self, size: int, seed: int, what: str, *, keeps_mean: bool = False) -> Rotation:
        kind = "random-hadamard" if self.randomize and self.transform_type == "hadamard" else self.transform_type
        try:
            return make_rotation(kind, size, seed=seed, keeps_mean=keeps_mean)
        except NumericsError as error:
            raise RecipeError(f"{self.label}: {what}: {error}") from error

    def _check_outputs(self, state: State, before: Tensor, after: Tensor) -> None:
        """The proof was for the rule; this is for the weights as they were rounded."""
        difference = float((after - before).square().mean().sqrt() / before.square().mean().sqrt().clamp_min(1e-30))
        dtype = next(state.model.parameters()).dtype
        if not difference <= _MOST.get(dtype, _MOST_NARROW):
            raise NumericsError(
                f"{self.label}: the turned model's outputs are {difference:.2g} off, relative, more than rounding to {dtype} explains; "
                "leave it out, or load the model with dtype float32"
            )

    def _report(self, state: State, basis: Basis | None, turns: Sequence[Turn]) -> None:
        folds = () if basis is None else basis.norms
        names = list(
            dict.fromkeys([*(pair.source for pair in folds), *(name for turn in turns for name in (*turn.writers, *turn.readers))])
        )
        state.settled.update(names)
        for name in names:
            record = ModuleRecord(name, type(self).__name__, f"turned ({self.transform_type})", 0.0, None, {})
            state.report.modules.setdefault(name, record)
        tied = {} if basis is None else basis.tied
        state.report.transforms.append(_transform(state.model, type(self).__name__, basis, turns))
        untied = f"; {', '.join(tied)} is no longer tied to {', '.join(tied.values())}" if tied else ""
        what = f"{' and '.join(self.rotations)} {'are' if self.rotations[1:] else 'is'}"
        state.report.notes.append(f"{self.label}: {what} in the weights of {len(names)} modules{untied}")


def _untie(state: State) -> None:
    """Say in the config what is true of the weights, so that no loader ties them again."""
    config: Any = getattr(state.model, "config", None)
    parts = [config, config.get_text_config()] if hasattr(config, "get_text_config") else [config]
    for part in {id(part): part for part in parts}.values():
        if hasattr(part, "tie_word_embeddings"):
            state.set_setting(part, "tie_word_embeddings", False)


def head_dim(model: nn.Module) -> int | None:
    """Return the size of attention heads as the config has it, or None.

    Args:
        model: of transformers, or any other, whose config says nothing.

    Returns:
        Channels of one head.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    own = getattr(config, "head_dim", None)
    if isinstance(own, int):
        return own
    size, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    return size // heads if isinstance(size, int) and isinstance(heads, int) and heads else None


def _logits(state: State, batch: Batch) -> Tensor:
    with torch.no_grad():
        output = call_model(state.model, batch_to(excerpt(batch, 0), state.device))
    logits = getattr(output, "logits", None)
    first = logits if logits is not None else output if isinstance(output, Tensor) else next(iter(output.values()))
    found: Tensor = first.detach().double().cpu()
    return found


def _transform(model: nn.Module, modifier: str, basis: Basis | None, turns: Sequence[Turn]) -> dict[str, Any]:
    """What a reader of compression.json needs to do the same to the base; names are those of its files."""
    folds = () if basis is None else basis.norms
    names = {name for pair in folds for name in (pair.source, *pair.readers)} | {
        name for turn in turns for name in (*turn.writers, *turn.readers)
    }
    stored = {} if as_pretrained(model) is None else stored_names(model, sorted(names))

    def as_stored(given: Sequence[str]) -> list[str]:
        return [stored.get(name, name) for name in given]

    def as_data(turn: Turn) -> dict[str, Any]:
        assert isinstance(turn.rotation, Rotation)
        return {"matrix": encoded(turn.rotation), "writers": as_stored(turn.writers), "readers": as_stored(turn.readers)}

    return {
        "kind": "rotations",
        "modifier": modifier,
        "folds": [{"norm": as_stored([pair.source])[0], "readers": as_stored(pair.readers), "offset": pair.offset} for pair in folds],
        "turns": [as_data(turn) for turn in turns],
        "untied": {} if basis is None else {as_stored([head])[0]: as_stored([source])[0] for head, source in basis.tied.items()},
    }


def encoded(rotation: Rotation) -> dict[str, Any]:
    """Return a matrix as plain data.

    Args:
        rotation: of any kind.

    Returns:
        `size` and, in base64, `signs`: a bit for each entry of Q sqrt(size), row by row, 1 for +1; with a `diagonal` of signs d, Q is
        U diag(d) U^T and the bits are those of U. Where not all entries are of one size, `values`: little-endian float64.
    """
    size = rotation.size
    if rotation.is_mirrored and rotation.signs_B is not None:
        plain = encoded(replace(rotation, signs_B=None, is_mirrored=False))
        return {**plain, "diagonal": _packed(rotation.signs_B)} if "signs" in plain else _values(rotation)
    matrix = rotation.matrix()
    if float((matrix.abs() - size**-0.5).abs().max()) < 1e-9:
        return {"size": size, "signs": _packed(matrix)}
    return _values(rotation)


def _packed(signs: Tensor) -> str:
    return base64.b64encode(np.packbits((signs > 0).numpy().reshape(-1)).tobytes()).decode()


def _values(rotation: Rotation) -> dict[str, Any]:
    return {"size": rotation.size, "values": base64.b64encode(rotation.matrix().numpy().astype("<f8").tobytes()).decode()}
