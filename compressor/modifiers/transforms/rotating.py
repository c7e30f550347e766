"""What modifiers that turn weights have in common: settings, where they may stand, the proof on the model, and what they write down."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, PrivateAttr, field_validator
from torch import Tensor, nn

from compressor.algorithms.costs import Memory, Work
from compressor.algorithms.rotations import Rotation, RotationKind, has_hadamard, make_rotation, rotation_flops
from compressor.data.collate import Batch
from compressor.errors import CalibrationError, ModelError, NumericsError, RecipeError, TargetError
from compressor.lifecycle import Modifier, State
from compressor.lifecycle.interface import AcrossRanks
from compressor.lifecycle.state import StageValue
from compressor.mappings.basis import Basis
from compressor.mappings.read_past import read_past
from compressor.mappings.turns import Turn, fold_and_turn
from compressor.model.checkpoints.format import stored_names
from compressor.model.checkpoints.online import notes_of_turned
from compressor.model.checkpoints.save import as_pretrained
from compressor.model.folder import some
from compressor.model.loading.sample_batches import Modality, sample_batches
from compressor.model.targets import ends_of
from compressor.modifiers.transforms.other_batches import outputs_of_model, rounding_of
from compressor.nn.build import is_quantizable
from compressor.nn.experts import UnfusedExperts
from compressor.nn.online_rotation import ALREADY, OnlineRotation, online_rotations, rotated_modules
from compressor.tracing.footprint import Footprint

# The side of a layer on which a rotation in the forward stands, by the name of the rotation.
SIDES: Mapping[str, str] = MappingProxyType({"R4": "input", "v": "input", "u": "output"})


def bytes_of_sizes(sizes: Iterable[int]) -> int:
    """Return the bytes of one square float32 matrix for each size that comes."""
    return sum(4 * size * size for size in set(sizes))


class RotatingModifier(Modifier):
    """Base of the modifiers that turn weights.

    Attributes:
        transform_type: `hadamard`; `random-hadamard`, with random signs; `random-matrix`, orthogonal, for sizes without a Hadamard matrix.
        randomize: random signs, too.
        transform_block_size: runs of so many channels are turned; None: all together.
        precision: float64, in which all is computed.
    """

    across_ranks: ClassVar[AcrossRanks | None] = "repeats"
    spell: ClassVar[Callable[[str], str]] = str.lower  # of the names of rotations

    transform_type: RotationKind = "hadamard"
    randomize: bool = False
    transform_block_size: int | None = Field(default=None, gt=1)
    precision: Any = None
    transform_config: Any = None

    _was_asked: bool = PrivateAttr(default=False)

    @field_validator("rotations", mode="before", check_fields=False)
    @classmethod
    def _each_once(cls, value: Any) -> Any:
        """One, or a list of them, in the spelling of the class."""
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, list | tuple):
            return given
        spelled = [cls.spell(one) if isinstance(one, str) else one for one in given]
        twice = next((one for place, one in enumerate(spelled) if one in spelled[:place]), None)
        if not spelled:
            raise RecipeError("[] names none; give one, or leave rotations out for the usual ones")
        if twice is not None:
            raise RecipeError(f"{twice!r} stands twice in {list(given)}, and a model is turned once by each; name it once")
        return spelled

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

    def first_batch(self, state: State) -> Batch:
        """Give a batch on which the model shows where it may be turned.

        Args:
            state: of the run.

        Returns:
            The fullest one of the data's first; where no data is read, one that the config allows.

        Raises:
            ModelError: there is neither.
        """
        if state.data is not None:
            return state.data.fullest
        if getattr(state.model, "config", None) is None:
            raise ModelError(
                f"{self.label}: {type(state.model).__name__} has no config to make a batch from; give a dataset and pipeline='basic', "
                "which reads it"
            )
        try:
            return self.made_batch(state)
        except ModelError as error:
            why = str(error).partition("; ")[0]
            raise ModelError(f"{self.label}: {why}; give a dataset and pipeline='basic', which reads it") from error

    def made_batch(self, state: State, kind: Modality | None = None) -> Batch:
        """Make a batch that the config allows, of what the model reads first or of a kind; see `sample_batches` for the errors."""
        with Footprint(state.model):  # such a batch is short, and a forward may change the model for good by that (BigBird)
            return sample_batches(state.model, kind).batches[0]

    def on_finalize(self, state: State) -> bool:
        """Refuse to finish where nobody asked for it: it does nothing in a training."""
        del state
        if not self._was_asked:
            raise CalibrationError(f"{self.label}: nothing was turned, for that happens in a calibration; run one, or leave it out")
        return True

    def stage_memory(self, modules: Sequence[str]) -> Mapping[str, StageValue]:
        """Nothing: the same rotations are made again when a run is resumed."""
        del modules
        return {}

    def rotation(self, size: int, seed: int, what: str, *, width: int | None = None, keeps_mean: bool = False) -> Rotation:
        """Make a rotation of the type that was asked for.

        Args:
            size: B.
            seed: of what is random.
            what: is turned, for the error.
            width: channels that blocks must divide; None where blocks are not to be chosen.
            keeps_mean: as for `make_rotation`.

        Returns:
            The rotation.

        Raises:
            RecipeError: there is none of this type and size.
        """
        kind = "random-hadamard" if self.randomize and self.transform_type == "hadamard" else self.transform_type
        self._check_size(size, width, what)
        return make_rotation(kind, size, seed=seed, keeps_mean=keeps_mean)

    def turned_online(self, model: nn.Module) -> Iterator[tuple[str, int, str]]:
        """Name the layers that turn what they are handed, or give, in every forward, as far as shapes and the config say.

        Args:
            model: with or without values; not modified.

        Yields:
            Dotted name, number of channels, and name of the rotation; a layer that turns both comes twice.
        """
        yield from ()

    def online_flops(self, model: nn.Module) -> Mapping[str, float]:
        """Say what rotations in the forward cost.

        Args:
            model: with or without values; not modified.

        Returns:
            FLOPs for each token, by dotted name of the layer that turns.

        Raises:
            RecipeError: there is no rotation of this type and size.
        """
        found: dict[str, float] = {}
        turned = list(self.turned_online(model))
        common = math.gcd(*(width for _, width, _ in turned))
        for name, width, _ in turned:
            size = self.transform_block_size or width
            self.check_divides(size, width, name)
            self._check_size(size, common, name)
            found[name] = found.get(name, 0.0) + width // size * rotation_flops(self.transform_type, size)
        return found

    def online_notes(self, turned: Iterable[tuple[str, str]]) -> list[str]:
        """Say who reads a checkpoint of layers that are turned in every forward, as a plan expects them and a run has them.

        Args:
            turned: dotted names, each with the name of its rotation.

        Returns:
            A sentence, or none.
        """
        return [f"{self.label}: {note}" for note in notes_of_turned(turned)]

    def forwards_of_training(self, num_samples: int) -> float:
        """Say how many forwards of a sequence, about, show what may be turned, and that the model computes what it did."""
        return float(min(num_samples, 4))

    def own_memory(self, work: Work) -> Memory:
        """Say what it takes: what is turned gets tensors of its own, which the last forwards see, and is computed in float64."""
        return Memory(statistics_bytes=work.stored_bytes, working_bytes=work.stored_bytes + 2 * 8 * max(work.sizes))

    def online_bytes(self, model: nn.Module) -> int:
        """Say what the matrices of rotations in the forward take in a checkpoint: float32, one for each size.

        Args:
            model: with or without values; not modified.

        Returns:
            Bytes.
        """
        return bytes_of_sizes(self.transform_block_size or width for _, width, _ in self.turned_online(model))

    def added_bytes(self, model: nn.Module) -> int:
        """Say what weights the model has more when it is turned.

        Args:
            model: with or without values; not modified.

        Returns:
            Bytes.
        """
        del model
        return 0

    def check_apart(self, state: State, before: Sequence[Modifier]) -> None:
        """Refuse a rotation in the forward where a modifier before it has put one, as far as shapes and the config say.

        Args:
            state: of a plan; a run sees it on the layers themselves.
            before: modifiers that stand before it.

        Raises:
            TargetError: a layer would have two on one side.
        """
        taken = turned_by(state.model, before)
        for name, _, group in self.turned_online(state.model):
            if (name, SIDES[group]) in taken:
                raise self.turned_twice(name, SIDES[group], taken[name, SIDES[group]])

    def turned_twice(self, name: str, side: str, group: str) -> TargetError:
        """Make the error of a layer on a side ("input", "output") of which a rotation of that group stands already."""
        return TargetError(f"{self.label}: the {side} of {name} is turned by {group} already; leave one of the two out")

    def _check_size(self, size: int, width: int | None, what: str) -> None:
        """Refuse a size without a Hadamard matrix, and name a block size that has one, if any has."""
        if self.transform_type == "random-matrix" or has_hadamard(size):
            return
        blocks = (block for block in range(width or 0, 1, -1) if (width or 0) % block == 0 and has_hadamard(block))
        block = next(blocks, None)
        instead = "" if block is None else f"transform_block_size: {block}, or "
        raise RecipeError(
            f"{self.label}: {what}: no Hadamard matrix of size {size} can be built from primes (orders are 1, 2 and multiples of 4); give "
            f"{instead}transform_type: random-matrix"
        )

    def check_outputs(self, state: State, batch: Batch, before: Tensor) -> None:
        """See that the weights as they were rounded compute what they did; a proof of the rule is another thing.

        Args:
            state: of the session.
            batch: on which it is run.
            before: outputs of the model as it was.

        Raises:
            NumericsError: they differ by more than rounding, or hold NaN or infinity before.
        """
        if not bool(before.isfinite().all()):
            raise NumericsError(f"{self.label}: the model gives NaN or infinity as it is; check it in its own dtype on this data")
        after = outputs_of_model(state, batch)
        difference = float((after - before).square().mean().sqrt() / before.square().mean().sqrt().clamp_min(1e-30))
        dtype = next(state.model.parameters()).dtype
        if not difference <= rounding_of(dtype):
            if not bool((after == outputs_of_model(state, batch)).all()):
                raise NumericsError(
                    f"{self.label}: the model gives other outputs when it is run again; switch off what draws random numbers, or give a "
                    "dataset that holds them, and pipeline='basic'"
                )
            raise NumericsError(
                f"{self.label}: the turned model's outputs are {difference:.2g} off, relative, more than rounding to {dtype} explains; "
                "leave it out, or load the model with dtype float32"
            )

    def check_divides(self, size: int, width: int, name: str) -> None:
        """Refuse blocks that do not fill a layer.

        Args:
            size: channels of a block.
            width: channels of the layer.
            name: of the layer.

        Raises:
            RecipeError: they do not.
        """
        if width % size:
            raise RecipeError(
                f"{self.label}: transform_block_size={size} does not divide the {width} channels of {name}; give one that does"
            )

    def check_has_config(self, state: State) -> None:
        """Refuse rotations in every forward where no checkpoint can hold them.

        Args:
            state: of the session.

        Raises:
            TargetError: the model is none of transformers.
        """
        if as_pretrained(state.model) is None:
            raise TargetError(
                f"{self.label}: rotations in every forward are kept in config.json, and {type(state.model).__name__} is no model of "
                "transformers; leave them out"
            )

    def turn_online(self, state: State, turns: Sequence[Turn], batch: Batch) -> None:
        """Turn the weights of layers, and have these layers turn what they are handed, or give, from now on. Changes the model.

        Args:
            state: of the session.
            turns: rotations with readers only, or writers only.
            batch: shows whether a weight is read past its layer.

        Raises:
            TargetError: a layer has a rotation on this side already, or its weight is read past it.
        """
        hooks = [(name, hook) for turn in turns for hook in [_hook(turn)] for name in (*turn.readers, *turn.writers)]
        for name, hook in hooks:
            taken = next((one.group for one in online_rotations(state.model.get_submodule(name)) if one.side == hook.side), None)
            if taken is not None:
                raise self.turned_twice(name, hook.side, taken)
        names = list(dict.fromkeys(name for name, _ in hooks))
        if past := read_past(state.model, names, partial(outputs_of_model, state, batch)):
            raise TargetError(
                f"{self.label}: the weight of {some(past)} is read past its layer, which alone turns what it is handed; ignore it"
            )
        fold_and_turn(state.model, (), turns, state.own_tensors)
        for name, hook in hooks:
            module = state.model.get_submodule(name)
            hook.at(state.device, next(module.parameters()).dtype)
            state.keep_hook(hook.attach(module))


Turned = Mapping[tuple[str, str], str]  # name and side of a layer to the rotation there


def turned_by(model: nn.Module, modifiers: Iterable[Modifier]) -> Turned:
    """Say what modifiers will turn in every forward, as far as shapes and the config say.

    Args:
        model: of a plan.
        modifiers: of the recipe.

    Returns:
        Rotations by layer and side.
    """
    turning = (one for one in modifiers if isinstance(one, RotatingModifier))
    return {(name, SIDES[group]): group for one in turning for name, _, group in one.turned_online(model)}


def turned_now(model: nn.Module) -> Turned:
    """Say what is turned in every forward.

    Args:
        model: of a run.

    Returns:
        Rotations by layer and side.
    """
    return {(name, one.side): one.group for name, found in rotated_modules(model).items() for one in found}


def refuse_behind(label: str, layers: Collection[str], turned: Turned, sides: Sequence[str]) -> None:
    """Refuse what finds nothing to change behind rotations in the forward.

    Args:
        label: of the modifier.
        layers: dotted names of all that it may be about.
        turned: rotations in the forward by layer and side.
        sides: of a layer, past each of which it cannot go.

    Raises:
        TargetError: all layers are turned on one of these sides.
    """
    for side in sides:
        groups = dict.fromkeys(turned[name, side] for name in layers if (name, side) in turned)
        if groups and all((name, side) in turned for name in layers):
            raise TargetError(
                f"{label}: the {side} of {some(list(layers))} {ALREADY} ({', '.join(groups)}), past which no scale moves and nothing "
                "else is turned; put this modifier in front of the one that does it"
            )


def body_layers(model: nn.Module) -> list[str]:
    """Name the linear layers of a model but its output head.

    Args:
        model: any module.

    Returns:
        Dotted names.
    """
    head = ends_of(model)[0] if hasattr(model, "get_output_embeddings") else None
    linear = ((name, module) for name, module in model.named_modules() if is_quantizable(module) and not isinstance(module, nn.Embedding))
    return [name for name, module in linear if module is not head]


def _hook(turn: Turn) -> OnlineRotation:
    rotation: Any = turn.rotation
    assert isinstance(rotation, Rotation)
    return OnlineRotation(turn.online, "input" if turn.readers else "output", rotation, back=bool(turn.writers))


def as_record(model: nn.Module, modifier: str, turns: Sequence[Turn], basis: Basis | None = None) -> dict[str, Any]:
    """Write down what a reader of compression.json needs to do the same to the base.

    Args:
        model: as it is now.
        modifier: class that did it.
        turns: in their order.
        basis: of hidden states that were turned; None where they were not.

    Returns:
        Plain data; names are those of the files.
    """
    folds = () if basis is None else basis.norms
    names = {name for pair in folds for name in (pair.source, *pair.readers)} | {
        name for turn in turns for name in (*turn.writers, *turn.readers)
    }
    stored = {} if as_pretrained(model) is None else stored_names(model, sorted(names))

    def as_stored(given: Sequence[str]) -> list[str]:
        return [stored.get(name, name) for name in given]

    def as_data(turn: Turn) -> dict[str, Any]:
        assert isinstance(turn.rotation, Rotation)
        written = {"matrix": encoded(turn.rotation), "writers": as_stored(turn.writers), "readers": as_stored(turn.readers)}
        return {**written, "online": turn.online} if turn.online else written

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
