"""The whole state of a training run as one safetensors file; a run that is killed and resumed gives the same bits.

Stored are parameters, gradients, buffers, optimizer state, learning rates, averages, tensors of modifiers, and the random generators of
torch and Python, with a digest of all that. Nothing of it is pickled. Where the data stand follows from the number of steps, which
`Trainer.fit` hands to `batch_at`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from compressor.atomic import whole_file
from compressor.errors import ResumeError
from compressor.lifecycle import EventType
from compressor.random_state import RandomState, foreign_random
from compressor.training.step.digests import raw_bytes
from compressor.training.step.step import TrainStep
from compressor.training.trainer import Trainer

_PLAIN = (bool, int, float, str, type(None))
_FORMAT = "training-state-4"


def save_training(trainer: Trainer, path: str | Path, notes: Mapping[str, Any] | None = None) -> Path:
    """Write the state of a trainer between two steps; the file appears whole or not at all.

    Args:
        trainer: the trainer.
        path: the file; one that exists is replaced.
        notes: what else is to be found again, such as the losses so far; JSON types.

    Returns:
        The path.

    Raises:
        UserInputError: averages stand in the model.
    """
    path = Path(path)
    step = trainer.step
    if step.averages is not None:
        step.averages.refuse_applied("save_training")
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in step.tensors().items()}
    generators = RandomState.current(foreign=False, devices=step.device).by_device
    tensors |= {f"rng:{number}": state for number, state in enumerate(generators.values())}
    numbers = {f"{number}.{key}": value for number, key, value in _host_state(trainer)}
    record = {
        "format": _FORMAT,
        "num_steps": trainer.num_steps,
        "python_rng": foreign_random().python,
        "optimizer": type(step.optimizer).__name__,
        "modifiers": _modifiers(step),
        "host_state": numbers,
        "optimizer_state": _python_state(step),
        "optimizer_attributes": _plain_attributes(step.optimizer),
        "notes": dict(notes or {}),
        "digest": _digest(tensors),
    }
    with whole_file(path) as partial:
        save_file(tensors, partial, metadata={"training": json.dumps(record)})
    return path


def load_training(trainer: Trainer, path: str | Path) -> dict[str, Any]:
    """Bring a trainer to a stored state. Changes model, optimizer, averages, modifiers, random generators and the trainer's plans.

    A session is led through its batches again without steps, so that modifiers start and end where they did.

    Args:
        trainer: made as the one that was stored was, and not yet used.
        path: what `save_training` wrote.

    Returns:
        The notes that were stored with it.

    Raises:
        ResumeError: the file is missing, damaged, of another model, optimizer, recipe or format, or the trainer has made steps already.
    """
    if trainer.num_steps:
        raise ResumeError(f"{path}: the trainer has made {trainer.num_steps} steps already; resume with a new one")
    record, stored = _read(Path(path))
    if record["optimizer"] != type(trainer.step.optimizer).__name__:
        raise ResumeError(
            f"{path}: it was stored with {record['optimizer']}, not with {type(trainer.step.optimizer).__name__}; use the same"
        )
    if record["modifiers"] != _modifiers(trainer.step):
        raise ResumeError(f"{path}: {_other_modifiers(record['modifiers'], _modifiers(trainer.step))}; use the recipe that was stored")
    rng = [stored.pop(name) for name in sorted(name for name in stored if name.startswith("rng:"))]
    generators = RandomState.current(foreign=False, devices=trainer.step.device).by_device
    if len(rng) != len(generators):
        raise ResumeError(f"{path}: it was stored on another kind of device; resume on the kind it was stored on")
    _check_names(trainer, stored, Path(path))
    odd = sorted({f"{number}.{key}" for number, key, _ in _host_state(trainer)} ^ record["host_state"].keys())
    if odd:
        raise ResumeError(
            f"{path}: optimizer settings {', '.join(odd[:3])} are in one of file and trainer only; make the optimizer as it was made"
        )
    _replay_session(trainer, record["num_steps"])
    _make_optimizer_state(trainer, stored, record["optimizer_state"])
    for name, parameter in trainer.step.parameters().items():  # of one that the optimizer does not train, no trainer makes it
        if f"grad:{name}" in stored and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    with torch.no_grad():
        for name, tensor in trainer.step.tensors().items():
            tensor.copy_(stored[name])
    for number, key, _ in _host_state(trainer):
        trainer.step.optimizer.param_groups[number][key] = _tupled(record["host_state"][f"{number}.{key}"])
    vars(trainer.step.optimizer).update(record["optimizer_attributes"])
    trainer.num_steps = record["num_steps"]
    trainer.forget_plans()
    version, state, gauss = record["python_rng"]
    foreign = foreign_random()._replace(python=(version, tuple(state), gauss))
    RandomState(dict(zip(generators, rng, strict=True)), foreign).restore()
    return dict(record["notes"])


def _modifiers(step: TrainStep) -> list[dict[str, Any]]:
    """List the modifiers with their settings, as JSON gives them back; of a value that JSON does not have the type stands for it."""
    settings = [{"type": _type_name(m), **m.model_dump(mode="json", fallback=_type_name)} for m in step.modifiers]
    result: list[dict[str, Any]] = json.loads(json.dumps(settings))
    return result


def _type_name(value: object) -> str:
    return type(value).__name__


def _other_modifiers(stored: list[dict[str, Any]], given: list[dict[str, Any]]) -> str:
    """Say what differs first between two lists of modifiers."""
    types = [", ".join(one["type"] for one in some) or "no modifiers" for some in (stored, given)]
    if types[0] != types[1]:
        return f"it was stored with {types[0]}, not with {types[1]}"
    return next(
        f"{one['type']} was stored with {key}={one.get(key)!r}, not with {other.get(key)!r}"
        for one, other in zip(stored, given, strict=True)
        for key in {**one, **other}
        if one.get(key) != other.get(key)
    )


def _host_state(trainer: Trainer) -> list[tuple[int, str, Any]]:
    """List the settings of the optimizer's groups that are Python values."""
    groups = enumerate(trainer.step.optimizer.param_groups)
    return [
        (number, key, value)
        for number, group in groups
        for key, value in group.items()
        if key != "params" and not isinstance(value, Tensor)
    ]


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            record = json.loads((file.metadata() or {}).get("training", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (OSError, SafetensorError, ValueError) as error:
        raise ResumeError(f"{path}: it cannot be read as a training state ({error}); give a file that save_training wrote") from error
    if record.get("format") != _FORMAT:
        raise ResumeError(f"{path}: it is no {_FORMAT}; give a file that save_training wrote")
    if record["digest"] != _digest(tensors):
        raise ResumeError(f"{path}: it does not hold what was written; give another state, or start over")
    return record, tensors


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Hash the tensors of a state, so that damage on the disk does not go on as another run."""
    result = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        result.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        result.update(raw_bytes(tensor).numpy().data)
    return result.hexdigest()


def _check_names(trainer: Trainer, stored: dict[str, Tensor], path: Path) -> None:
    """Refuse a file of another model before anything changes; optimizer state is not there yet in a new trainer."""
    present = trainer.step.tensors()
    missing = sorted(present.keys() - stored.keys())
    unknown = sorted(name for name in stored.keys() - present.keys() if not name.startswith(("opt.", "modifier", "grad:")))
    wrong = sorted(
        name
        for name in present.keys() & stored.keys()
        if present[name].shape != stored[name].shape or present[name].dtype != stored[name].dtype
    )
    for what, names in (("lacks", missing), ("has besides", unknown), ("has in another shape or dtype", wrong)):
        if names:
            raise ResumeError(f"{path}: the file {what} {', '.join(names[:3])}; resume with the model and settings that were stored")


def _replay_session(trainer: Trainer, num_steps: int) -> None:
    session = trainer.step.session
    if session is None:
        return
    for _ in range(num_steps):
        session.send(EventType.BATCH_START)
        session.send(EventType.BATCH_END)


def _python_state(step: TrainStep) -> dict[str, dict[str, Any]]:
    """List what an optimizer keeps for a parameter beside tensors, such as the number of its steps: parameter, key, value."""
    found: dict[str, dict[str, Any]] = {}
    names = {parameter: name for name, parameter in step.parameters().items()}
    for holder, state in step.optimizer.state.items():
        name = names.get(holder)  # type: ignore[call-overload]
        for key, value in state.items():
            if name is not None and isinstance(value, Tensor):
                continue
            if name is None or type(value) not in _PLAIN:
                raise ResumeError(
                    f"{type(step.optimizer).__name__}: its state {key!r} is neither a tensor nor a number of a parameter, and a run "
                    "that is resumed would lack it; keep it as one of these"
                )
            found.setdefault(name, {})[key] = value
    return found


def _plain_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Numbers and texts that an optimizer keeps on itself, such as a counter; what begins with an underscore is torch's."""
    return {key: value for key, value in vars(optimizer).items() if type(value) in _PLAIN and not key.startswith("_")}


def _make_optimizer_state(trainer: Trainer, stored: dict[str, Tensor], values: Mapping[str, Mapping[str, Any]]) -> None:
    step = trainer.step
    names = {parameter: name for name, parameter in step.parameters().items()}
    for number, group in enumerate(step.optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if names[parameter] in values:
                step.optimizer.state[parameter].update(values[names[parameter]])
            suffix = ":" + names.get(parameter, f"group{number}[{place}]")
            for name, tensor in stored.items():
                if name.startswith("opt.") and name.endswith(suffix) and name[4 : -len(suffix)].isidentifier():
                    like = (
                        torch.empty_like(parameter, dtype=tensor.dtype) if tensor.shape == parameter.shape else tensor.to(parameter.device)
                    )
                    step.optimizer.state[parameter].setdefault(name[4 : -len(suffix)], like.detach().clone())
