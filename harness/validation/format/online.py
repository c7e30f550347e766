"""Rotations that a checkpoint asks its reader to compute in every forward: transform_config held against the record, matrix by matrix.

A layer computes x W^T. Where its weight is W Q, what it is handed has to be turned to x Q; where it is Q^T W, what it gives back to
y Q^T. The record says which weights were turned, and `format.transforms` does it again; here the other half is looked at: does the reader
turn the inputs and outputs of the same modules, by the same matrices? Then the two take each other back, for all of them are orthogonal.
What transform_config says to be in weights no reader computes; the record must say it as well, or nothing has looked for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from harness.validation.format.rotations import Rotations
from harness.validation.loading import module_classes
from harness.validation.subject import Subject, is_ignored, is_meant

_SIDES = ("input", "output")
_IN_WEIGHTS = ("weight_input", "weight_output")
_CLOSE = 1e-5  # of entries


def online_groups(subject: Subject) -> dict[str, Mapping[str, Any]]:
    """Return the groups of transform_config that ask for something in the forward.

    Args:
        subject: both folders.
    Returns:
        Name to group; empty where there are none.
    """
    return {name: group for name, group in _groups(subject).items() if any(_in_forward(group))}


def matrix_names(subject: Subject) -> set[str]:
    """Name the tensors that are matrices of such groups.

    Args:
        subject: both folders.
    Returns:
        Names in the compressed files.
    """
    ends = tuple(f".{group}_{side}.weight" for group in online_groups(subject) for side in _SIDES)
    return {name for name in subject.compressed.entries if ends and name.endswith(ends)}


def online_misfits(subject: Subject) -> list[str]:
    """Say where what the reader computes does not take back what the record says was done to weights.

    Args:
        subject: both folders.
    Returns:
        Sentences.
    """
    said = _recorded(subject)
    classes = module_classes(subject.base.folder, trust_remote_code=subject.trust_remote_code)
    findings = []
    for group, content in online_groups(subject).items():
        for entry in _in_forward(content):
            side = entry.get("location")
            if side not in _SIDES:
                findings.append(f"transform_config says {group} at {side}, which is not judged here")
                continue
            for module in _modules(subject, classes, entry):
                fault = _fault(subject, group, content, entry, module, said.pop((module, side), None))
                findings += [f"{module}: {fault}"] if fault else []
    findings += [f"{module}: its weight was turned for an {side} that transform_config does not turn" for module, side in said]
    return findings + _unrecorded(subject, classes)


def _unrecorded(subject: Subject, classes: Mapping[str, Any]) -> list[str]:
    """Turns that are said to be in weights, and that the record does not have; where weights were trained on, behaviour alone is judged."""
    turns = [turn for move in subject.moved if isinstance(move, Rotations) for turn in move.turns]
    done = {
        (turn.online, place, name)
        for turn in turns
        for place, names in zip(_IN_WEIGHTS, (turn.readers, turn.writers), strict=True)
        for name in names
    }
    online = online_groups(subject)
    return [
        f"{module}: transform_config says that {group} is in it ({entry['location']}), and compression.json names no such rotation"
        for group, content in _groups(subject).items()
        for entry in content.get("apply") or ()
        if entry.get("location") in _IN_WEIGHTS and not subject.trained
        for module in _modules(subject, classes, entry)
        if (group if group in online else "", entry["location"], module) not in done
    ]


def _groups(subject: Subject) -> Mapping[str, Mapping[str, Any]]:
    return ((subject.quantization_config or {}).get("transform_config") or {}).get("config_groups") or {}


def _in_forward(group: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (entry for entry in group.get("apply") or () if entry.get("location") not in _IN_WEIGHTS)


def _recorded(subject: Subject) -> dict[tuple[str, str], Tensor]:
    """What each module has to be multiplied with, as the record has it."""
    turns = [turn for move in subject.moved if isinstance(move, Rotations) for turn in move.turns if turn.online]
    inputs = {(name, "input"): turn.matrix_BB for turn in turns for name in turn.readers}
    return inputs | {(name, "output"): turn.matrix_BB.T for turn in turns for name in turn.writers}


def _modules(subject: Subject, classes: Mapping[str, Any], entry: Mapping[str, Any]) -> list[str]:
    names = [name.removesuffix(".weight") for name, one in subject.base.entries.items() if name.endswith(".weight") and len(one.shape) == 2]
    given = (entry.get(key) or () for key in ("targets", "ignore"))
    targets, ignore = ((one,) if isinstance(one, str) else one for one in given)  # one name alone stands for a list of it
    return [
        name
        for name in names
        if any(is_meant(name, classes.get(name, ("Linear",)), target) for target in targets) and not is_ignored(name, classes, ignore)
    ]


def _fault(subject: Subject, group: str, content: Mapping[str, Any], entry: Mapping[str, Any], module: str, wanted: Tensor | None) -> str:
    side = entry["location"]
    if wanted is None:
        return f"transform_config turns its {side} ({group}), and compression.json names no such rotation"
    end = f".{group}_{side}.weight"
    matrices = subject.compressed.entries
    shared = (name for name, one in matrices.items() if name.endswith(end) and one.shape == tuple(wanted.shape))
    key = f"{module}{end}" if f"{module}{end}" in matrices else next(shared, None)
    if key is None:
        return f"the files hold no matrix of {len(wanted)} channels for {group}"
    found = subject.compressed.tensor(key).double()
    if content.get("type") != "random-matrix":
        found = (found.T if entry.get("inverse") else found) / len(wanted) ** 0.5
    if found.shape != wanted.shape or not float((found - wanted).abs().max()) <= _CLOSE:
        return f"{key} is another matrix than compression.json has for its {side}"
    return ""
