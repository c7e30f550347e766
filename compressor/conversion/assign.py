"""From a model without bytes and its recipe to the files of the result, still empty, and to the units that fill them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from compressor.conversion.rounding import needs_ranges
from compressor.conversion.units import Target, Unit, View
from compressor.errors import CheckpointError, ModelError
from compressor.model.checkpoints.format import stored_keys
from compressor.model.experts.format import kept_fused, with_fused_floats
from compressor.model.folder import some
from compressor.model.headers import NAMES, read_header
from compressor.model.loading.empty import EmptyModel
from compressor.model.targets import other_names, outward
from compressor.modifiers.schemes.base import siblings
from compressor.nn import QuantizedLayer, empty_layer, weight_of
from compressor.numerics import QuantizationScheme


@dataclass(frozen=True)
class _Stretch:
    """Elements of a tensor of the model, from the first to before the last, that are one tensor of the files."""

    first: int
    last: int
    name: str


class Origins:
    """Where the values of each tensor of a model lie: of a tensor of meta, by the memory that it would have."""

    def __init__(self, empty: EmptyModel) -> None:
        """Note which memory each tensor of the model would have; to be made before modules are taken apart or replaced."""
        self.empty = empty
        self._keys: dict[int, str] = {}
        self._held: dict[int, list[str]] = {}  # under every key of tied ones that the files hold, too
        self._stretches: dict[str, list[_Stretch]] = {}
        for key, value in empty.loaded.model.state_dict().items():
            if key in empty.sources or value.untyped_storage()._cdata not in self._keys:
                self._keys[value.untyped_storage()._cdata] = key
            if key in empty.sources:
                self._held.setdefault(value.untyped_storage()._cdata, []).append(key)
                self._stretches[key] = list(self._in_a_row(empty.sources[key]))

    def _in_a_row(self, names: Collection[str]) -> Iterator[_Stretch]:
        first = 0
        for name in names:
            last = first + View.of(self.empty.tensors[name]).num_values
            yield _Stretch(first, last, name)
            first = last

    def view(self, value: Tensor, where: str) -> View:
        """Say where a tensor of the model lies in the files.

        Args:
            value: on the meta device: a tensor of the model, or a part of one.
            where: its name, for errors.

        Returns:
            The part of a tensor of the files.

        Raises:
            ModelError: transformers computes it from several, or in a way that is not known here.
        """
        key = self._keys.get(value.untyped_storage()._cdata, where)
        found = self._stretch(value, key)
        if found is None:
            how = f" ({self.empty.made[key]})" if key in self.empty.made else ""
            raise ModelError(
                f"{where}: transformers makes this weight of others while it loads{how}, which is not done here; use oneshot, or ignore it"
            )
        whole = self.whole(found.name)
        start = whole.start + (value.storage_offset() - found.first) * whole.torch_dtype.itemsize
        part = whole.model_copy(update={"start": start, "shape": tuple(value.shape), "strides": value.stride()})
        if whole.scales is not None and part != whole:
            raise ModelError(f"{where}: is a part of a tensor in fp8, which is read as a whole only; use a base in bfloat16, or ignore it")
        return part

    def file_name(self, value: Tensor, owner: str) -> str | None:
        """Say what the files call the tensor in which a tensor of the model lies.

        Args:
            value: on the meta device: a tensor of the model, or a part of one.
            owner: dotted name of the module that holds it.

        Returns:
            The name; None where transformers computes it from several, and where the files hold it for another module to which it is tied.
        """
        around = set(outward(owner))
        own = (key for key in self._held.get(value.untyped_storage()._cdata, ()) if key.rpartition(".")[0] in around)
        found = next((one for key in own if (one := self._stretch(value, key)) is not None), None)
        return None if found is None else found.name

    def _stretch(self, value: Tensor, key: str) -> _Stretch | None:
        first = value.storage_offset()
        last = first + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        return next((one for one in self._stretches.get(key, ()) if one.first <= first and last < one.last), None)

    def whole(self, name: str) -> View:
        """See a whole tensor of the files.

        Args:
            name: of the tensor in the files.

        Returns:
            The view.
        """
        scales = self.empty.scales.get(name)
        return View.of(self.empty.tensors[name], scales, None if scales is None else self.empty.scale_block)

    def parts(self, key: str) -> tuple[View, ...]:
        """See the tensors of the files that make a tensor of the model, one after the other.

        Args:
            key: of the model's state as it was loaded.

        Returns:
            Their views; empty where it is made in another way.
        """
        return tuple(self.whole(one.name) for one in self._stretches.get(key, ()))


def place_empty_layers(model: nn.Module, schemes: Mapping[str, QuantizationScheme]) -> dict[str, Tensor]:
    """Put quantized layers without values in the place of float ones. Changes the model.

    Args:
        model: on the meta device.
        schemes: dotted name of every module that gets one, to its scheme.

    Returns:
        Dotted name to the float weight [R, C], on the meta device.

    Raises:
        ModelError: one of them stands in the model in several places.
    """
    twice = other_names(model)
    for name in schemes:
        if name in twice:  # to transformers, which names what is written, two names of one tensor that nobody ties
            raise ModelError(f"{name}: it stands in the model as {twice[name][0]}, too; use oneshot, or add {name!r} to ignore")
    weights = {name: weight_of(model.get_submodule(name)).detach() for name in schemes}
    for name, scheme in schemes.items():
        model.set_submodule(name, empty_layer(model.get_submodule(name), scheme, name=name))
    return weights


def units_of(folder: Path, origins: Origins, schemes: Mapping[str, QuantizationScheme], weights: Mapping[str, Tensor]) -> list[Unit]:
    """Say what fills the files of a checkpoint.

    Args:
        folder: of the checkpoint, as `save_empty` writes it.
        origins: of the model's tensors.
        schemes: dotted name of every quantized layer to its scheme.
        weights: what `place_empty_layers` returned.

    Returns:
        The units; those that find ranges come first, the others as they lie in the files of the base.

    Raises:
        ModelError: a tensor comes from the files in a way that is not known here.
        CheckpointError: a tensor of the checkpoint would stay empty.
    """
    model = origins.empty.loaded.model
    open_targets = {
        name: Target(name=name, file=path.name, dtype=NAMES[one.dtype], start=one.start, shape=one.shape)
        for path in sorted(folder.glob("*.safetensors"))
        for name, one in read_header(path).items()
    }
    own = model.state_dict()
    state = {key: own.get(key, value) for key, value in with_fused_floats(model, own).items()}  # which copies parts of tensors
    with kept_fused(model, state, schemes) as are_kept:
        whole = [key for key in state if are_kept or len(origins.parts(key)) <= 1]  # others are taken apart when they are saved
        stored = stored_keys(model, whole)
    rounded = list(_rounded(model, origins, schemes, weights, stored, open_targets))
    copied = list(_copied(origins, state, stored, open_targets))
    if open_targets:
        raise CheckpointError(f"checkpoint: {len(open_targets)} tensors ({some(open_targets)}) come from nowhere; use oneshot")
    ranges = [one.model_copy(update={"kind": "range", "targets": {}, "needs": ()}) for one in rounded if one.needs]
    files = sorted({one.file for one in origins.empty.tensors.values()})
    hashed = [Unit(kind="hash", name=name) for name in (*files, "config.json")]
    return [*sorted(ranges, key=lambda unit: unit.place), *sorted((*rounded, *copied, *hashed), key=lambda unit: unit.place)]


def _rounded(
    model: nn.Module,
    origins: Origins,
    schemes: Mapping[str, QuantizationScheme],
    weights: Mapping[str, Tensor],
    stored: Mapping[str, str],
    targets: dict[str, Target],
) -> Iterator[Unit]:
    """One unit for each quantized layer. Takes its tensors out of the targets."""
    for name, scheme in schemes.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, QuantizedLayer) and scheme.weights is not None
        fused = [one for one in siblings(name) if one != name and one in schemes] if _has_global_scale(scheme) else []
        needed = (name, *(one for one in fused if _has_global_scale(schemes[one])))
        yield Unit(
            kind="round",
            name=name,
            views=(origins.view(weights[name], f"{name}.weight"),),
            dtype=NAMES[weights[name].dtype],
            targets={key: targets.pop(stored[f"{name}.{key}"]) for key in layer.specs()},
            scheme=scheme,
            needs=needed if needs_ranges(scheme.weights) else (),
        )


def _has_global_scale(scheme: QuantizationScheme) -> bool:
    return scheme.weights is not None and scheme.weights.has_global_scale


def _copied(origins: Origins, state: Mapping[str, Tensor], stored: Mapping[str, str], targets: dict[str, Target]) -> Iterator[Unit]:
    """One unit for each other tensor of the checkpoint. Takes it out of the targets."""
    key_of = {name: key for key, name in stored.items()}
    for name in list(targets):
        target = targets[name]
        value = state.get(key_of.get(name, name))
        tensors = origins.empty.tensors
        if value is not None and tuple(value.shape) == target.shape:
            views = origins.parts(key_of.get(name, name)) or (origins.view(value, name),)
        elif name in tensors and tensors[name].shape == target.shape:
            views = (origins.whole(name),)  # what transformers has merged, and takes apart again when it saves
        else:
            views = origins.parts(name)
        if sum(view.num_values for view in views) == math.prod(target.shape):
            del targets[name]
            yield Unit(kind="copy", name=name, views=views, targets={"": target})
