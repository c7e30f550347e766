"""Rotations that are computed in every forward, on disk: `transform_config` and one matrix of +1 and -1 for each group and size.

The format is that of compressed-tensors 0.20, as llm-compressor 0.14 writes it: a group of `transform_config` names modules and a place
(`input`, `output`; `weight_input` and `weight_output` are in the weights already), and the matrix lies under the name of the first module,
`model.layers.0.mlp.down_proj.R4_input.weight`, for all modules of the group with this size. Of Hadamard matrices it is Q sqrt(B).

transformers applies neither, and gives other logits without a word (before 5.23 it stops where nothing is quantized): such a checkpoint
is for `load_compressed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressor.algorithms.rotations import Rotation, RotationKind, rotation_of
from compressor.errors import ModelError
from compressor.model.checkpoints.format import stored_names
from compressor.model.folder import some
from compressor.model.targets import all_names, matches
from compressor.nn import is_quantizable, weight_of
from compressor.nn.online_rotation import OnlineRotation, Side, rotated_modules
from compressor.nn.quantized_linear import is_conv1d

_NOTE = (
    "{groups} turn in every forward what {modules} modules compute with, and transformers applies no transform_config: it computes "
    "something else, or stops (before 5.23, where no weight is quantized); load the checkpoint with compressor.load_compressed"
)
_HADAMARD: tuple[RotationKind, ...] = ("hadamard", "random-hadamard")
_KINDS = (*_HADAMARD, "random-matrix")
_ROUNDING = 0.02  # of a rotation in bfloat16, relative
_SIDES: Mapping[str, Side | None] = {"input": "input", "output": "output", "weight_input": None, "weight_output": None}


def transform_config(model: nn.Module, renamed: Mapping[str, str]) -> dict[str, Any]:
    """Describe the rotations of a model.

    Args:
        model: with its rotations in place.
        renamed: name in the model to name in the files, where the two differ.

    Returns:
        The value of `transform_config`; empty where there are none.
    """
    groups: dict[str, list[tuple[str, OnlineRotation]]] = {}
    for name, rotations in rotated_modules(model).items():
        for rotation in rotations:
            groups.setdefault(rotation.group, []).append((name, rotation))
    places = all_names(model) if groups else {}
    return {"config_groups": {group: _group(model, members, renamed, places) for group, members in groups.items()}} if groups else {}


def rotation_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the matrices of a model's rotations.

    Args:
        model: of transformers, with its rotations in place.

    Returns:
        Name in the files to matrix, float32, of a float64 model with all its digits; one for each group and size.
    """
    found: dict[tuple[str, int], tuple[str, OnlineRotation]] = {}
    for name, rotations in rotated_modules(model).items():
        for rotation in rotations:
            found.setdefault((rotation.group, rotation.rotation.size), (name, rotation))
    stored = stored_names(model, [name for name, _ in found.values()])
    wide = any(tensor.dtype is torch.float64 for tensor in (*model.parameters(), *model.buffers()))  # it computes with all digits
    return {f"{stored.get(name, name)}.{_key(one.group, one.side)}": _stored(one, wide) for name, one in found.values()}


def rotation_notes(model: nn.Module) -> list[str]:
    """Say what a user must know about reading a checkpoint of this model.

    Args:
        model: with its rotations in place.

    Returns:
        A sentence, or none.
    """
    return notes_of_turned((name, rotation.group) for name, rotations in rotated_modules(model).items() for rotation in rotations)


def notes_of_turned(turned: Iterable[tuple[str, str]]) -> list[str]:
    """Say the same of modules that are turned in every forward, or will be.

    Args:
        turned: dotted names, each with the name of its rotation.

    Returns:
        A sentence, or none.
    """
    groups: dict[str, set[str]] = {}
    for name, group in turned:
        groups.setdefault(group, set()).add(name)
    return [_NOTE.format(groups=some(sorted(groups)), modules=len(set().union(*groups.values())))] if groups else []


def read_rotations(
    model: nn.Module, config: Mapping[str, Any], tensors: dict[str, Tensor], folder: Path
) -> list[tuple[str, OnlineRotation]]:
    """Read the rotations of a checkpoint.

    Args:
        model: with the float layers still in place; not changed.
        config: the `quantization_config`.
        tensors: of the files; the matrices are taken out.
        folder: for errors.

    Returns:
        Dotted names of modules, each with what is to be attached to it.

    Raises:
        ModelError: a group cannot be read, or asks for what is not built here; a matrix is missing, or of another shape.
    """
    groups = (config.get("transform_config") or {}).get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise ModelError(f"{folder}: transform_config: config_groups is no table; restore config.json")
    stored = stored_names(model, [name for name, module in model.named_modules() if is_quantizable(module)]) if groups else {}
    found = []
    shared: dict[tuple[str, Side, int, bool], OnlineRotation] = {}
    for group, scheme in groups.items():
        where = f"{folder}: transform_config: {group}"
        matrices, entries = _Matrices.of(group, tensors), _entries(scheme, where)
        _check_halves(model, stored, entries, where, has_matrices=bool(matrices))
        for entry in entries:
            side = _SIDES[entry["location"]]
            for name in _meant(model, stored, entry) if side is not None else ():
                size = scheme.get("head_dim") or _width(model.get_submodule(name), side or "input")
                matrix = matrices.matrix(f"{stored.get(name, name)}.{_key(group, side or 'input')}", size, where)
                key = group, side or "input", id(matrix), bool(entry.get("inverse"))
                if key not in shared:
                    _check_rotation(matrix, where)
                    shared[key] = _read(group, key[1], scheme["type"], matrix, inverse=key[-1])
                found.append((name, shared[key]))
    return found


def _group(
    model: nn.Module, members: Sequence[tuple[str, OnlineRotation]], renamed: Mapping[str, str], places: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    first = members[0][1]
    sizes = {rotation.rotation.size for _, rotation in members}
    whole = all(rotation.rotation.size == _width(model.get_submodule(name), rotation.side) for name, rotation in members)
    targets = [alias for name, _ in members for place in places[name] for alias in dict.fromkeys((place, renamed.get(place, place)))]
    offline = {"targets": targets, "location": f"weight_{first.side}", "inverse": not first.back, "ignore": []}
    online = {"targets": targets, "location": first.side, "inverse": first.back, "ignore": []}
    return {
        "apply": [online, offline] if first.side == "input" else [offline, online],
        "head_dim": None if whole else sizes.pop(),
        "precision": "torch.float32",
        "randomize": False,
        "requires_grad": False,
        "type": _kind([rotation.rotation for _, rotation in members]),
    }


def _kind(rotations: Sequence[Rotation]) -> str:
    """What a reader could make itself: of plain Hadamard matrices it knows the powers of two."""
    if any(rotation.norm == 1 and rotation.size > 1 for rotation in rotations):
        return "random-matrix"
    plain = all(rotation.signs_B is None and rotation.size & (rotation.size - 1) == 0 for rotation in rotations)
    return "hadamard" if plain else "random-hadamard"


def _stored(rotation: OnlineRotation, wide: bool) -> Tensor:
    """Q sqrt(B) of Hadamard matrices, which the reader transposes; else what the reader multiplies with."""
    matrix = rotation.rotation.matrix()
    if _kind([rotation.rotation]) == "random-matrix":
        return (matrix.T if rotation.back else matrix).contiguous().to(torch.float64 if wide else torch.float32)
    return (matrix * rotation.rotation.size**0.5).round().float()


def _check_halves(
    model: nn.Module, stored: Mapping[str, str], entries: Sequence[Mapping[str, Any]], where: str, *, has_matrices: bool
) -> None:
    """Refuse what turns a layer in the forward and not its weight the other way, or has matrices and turns nothing."""
    turned: dict[str, set[tuple[str, bool]]] = {location: set() for location in _SIDES}
    for entry in entries:
        turned[entry["location"]] |= {(name, bool(entry.get("inverse"))) for name in _meant(model, stored, entry)}
    for side in ("input", "output"):
        back = {(name, not inverse) for name, inverse in turned[f"weight_{side}"]}
        alone = sorted({name for name, _ in turned[side] ^ back})
        if alone and (turned[side] or has_matrices):
            raise ModelError(
                f"{where}: of {some(alone)} the {side} and the weight are not turned to take each other back; restore config.json"
            )
    if has_matrices and not turned["input"] and not turned["output"]:
        raise ModelError(f"{where}: the files hold its matrices, and it turns nothing; restore config.json")


def _check_rotation(matrix_BB: Tensor, where: str) -> None:
    """Refuse what does not take itself back, by some rows of random numbers: all of the product would take minutes where B is large."""
    rows_NB = torch.randn(4, len(matrix_BB), dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    scale = matrix_BB.float().square().sum(0).mean()  # 1, or B where it holds +1 and -1
    back_NB = rows_NB @ matrix_BB.float() @ matrix_BB.float().T
    if not bool((back_NB - scale * rows_NB).norm() <= _ROUNDING * scale * rows_NB.norm()):
        raise ModelError(f"{where}: its matrix of {len(matrix_BB)} x {len(matrix_BB)} is no rotation; fetch the folder again")


def _read(group: str, side: Side, kind: str, matrix: Tensor, *, inverse: bool) -> OnlineRotation:
    if kind in _HADAMARD:
        return OnlineRotation(group, side, rotation_of(matrix), back=inverse)
    return OnlineRotation(group, side, Rotation((matrix.T.double() if inverse else matrix.double(),)), back=inverse)


def _key(group: str, side: str) -> str:
    return f"{group}_{side}.weight"


def _width(module: nn.Module, side: Side) -> int:
    if hasattr(module, "in_features"):
        return int(module.in_features if side == "input" else module.out_features)  # type: ignore[arg-type]
    rows, columns = weight_of(module).shape
    return columns if side == "input" else rows


def _entries(scheme: Any, where: str) -> list[Mapping[str, Any]]:
    if not isinstance(scheme, Mapping) or scheme.get("type") not in _KINDS or scheme.get("randomize"):
        raise ModelError(f"{where}: is no rotation of the kinds {', '.join(_KINDS)} without randomize; restore config.json")
    entries = scheme.get("apply")
    if not isinstance(entries, list) or not all(isinstance(one, Mapping) and _names(one, "targets") for one in entries):
        raise ModelError(f"{where}: names no modules; restore config.json")
    if not all(one.get("ignore") is None or _names(one, "ignore") for one in entries) or not isinstance(scheme.get("head_dim"), int | None):
        raise ModelError(f"{where}: an ignore is no list of names, or head_dim no number; restore config.json")
    others = [place for one in entries if not isinstance(place := one.get("location"), str) or place not in _SIDES]
    if not all(isinstance(other, str) for other in others):
        raise ModelError(f"{where}: does not say where it turns ({others[0]!r} is no location); restore config.json")
    if others:
        raise ModelError(f"{where}: {others[0]!r} is a place in attention, which is not built here; leave R3 out, and compress again")
    return entries


def _names(entry: Mapping[str, Any], field: str) -> bool:
    """Whether a field of an entry is a list of texts."""
    found = entry.get(field)
    return isinstance(found, list) and all(isinstance(one, str) for one in found)


def _meant(model: nn.Module, stored: Mapping[str, str], entry: Mapping[str, Any]) -> list[str]:
    def is_named(name: str, module: nn.Module, patterns: Sequence[str]) -> bool:
        names = (name, stored.get(name, name))
        return any(matches(one, module, pattern) or (pattern == "Linear" and is_conv1d(module)) for one in names for pattern in patterns)

    linears = {name: one for name, one in model.named_modules() if is_quantizable(one) and not isinstance(one, nn.Embedding)}
    ignore = entry.get("ignore") or []
    return [name for name, one in linears.items() if is_named(name, one, entry["targets"]) and not is_named(name, one, ignore)]


class _Matrices:
    """Those of one group, taken out of the files."""

    def __init__(self, by_name: Mapping[str, Tensor]) -> None:
        self._by_name = by_name
        self._by_size = {len(matrix): matrix for matrix in reversed(by_name.values())}  # type: ignore[call-overload]

    @classmethod
    def of(cls, group: str, tensors: dict[str, Tensor]) -> _Matrices:
        ends = tuple(f".{_key(group, side)}" for side in _SIDES)
        return cls({name: tensors.pop(name) for name in [name for name in tensors if name.endswith(ends)]})

    def __bool__(self) -> bool:
        """Whether the files hold any."""
        return bool(self._by_name)

    def matrix(self, name: str, size: int, where: str) -> Tensor:
        """That of a module, or the one that all modules of this size have."""
        found = self._by_name.get(name, self._by_size.get(size))
        if found is None or found.shape != (size, size) or not bool(torch.isfinite(found).all()):
            raise ModelError(f"{where}: the files hold no matrix of {size} x {size} for {name}; restore the folder")
        return found
