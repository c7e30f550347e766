"""The whole state of a training run as one safetensors file; a run that is killed and resumed gives the same bits.

Stored are parameters, gradients, buffers, optimizer state and what the optimizer keeps on itself, learning rates, averages, tensors of
modifiers, extra state of modules, and the random generators of torch, Python and numpy and those that the step holds, with a digest of all
that. Nothing of it is pickled. Where the data stand follows from the number of steps, which `Trainer.fit` hands to `batch_at`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from compressor.atomic import whole_file
from compressor.errors import ResumeError, UserInputError
from compressor.lifecycle import EventType
from compressor.pages import raw_bytes
from compressor.random_state import ForeignRandom, RandomState, foreign_random
from compressor.settings.kinds import MAPPING, PATH, object_of
from compressor.settings.options import checked
from compressor.training.guards.frozen_value import exact_text, is_foreign
from compressor.training.step.step import TrainStep
from compressor.training.stored_values import Reader, Writer, books, generators, is_writable
from compressor.training.trainer import Trainer

_OF_MODULES = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str, type(None))
_FORMAT = "training-state-5"
_KEPT = "kept:"
_TRAINER = object_of(Trainer, words="a Trainer")


@checked(trainer=_TRAINER, path=PATH, notes=MAPPING)
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
        ResumeError: optimizer or a module's extra state holds what no file of tensors and JSON keeps.
    """
    path = Path(path)
    step = trainer.step
    if step.averages is not None:
        step.averages.refuse_applied("save_training")
    writer = Writer(step)
    record = {
        "format": _FORMAT,
        "num_steps": trainer.num_steps,
        "python_rng": foreign_random().python,
        "numpy_rng": writer.write(np.random.get_state(legacy=False), "numpy.random"),
        "optimizer": type(step.optimizer).__name__,
        "modifiers": _modifiers(step),
        "settings": _settings(trainer),
        "made_with": step.made_with,
        "factor": None if trainer.schedule is None else trainer.schedule.given,
        "host_state": {
            f"{number}.{key}": value if _is_simple(value) else writer.write(value, f"setting '{key}' of optimizer group {number}")
            for number, key, value in _host_state(trainer)
        },
        "optimizer_state": _python_state(step),
        "optimizer_attributes": {key: writer.write(value, _attribute(step, key)) for key, value in _attributes(step).items()},
        "generators": {name: writer.write(generator, name) for name, generator in generators(step).items()},
        "module_tensors": {
            name: {key: writer.write(value, f"attribute '{key}' of {name or 'the model'}") for key, value in held.items()}
            for name, held in _module_tensors(step.model).items()
        },
        "extra_state": {
            name: writer.write(module.get_extra_state(), f"extra state of {name or 'the model'}", is_new=True)
            for name, module in _with_extra_state(step.model).items()
        },
        "notes": _json(notes),
    }
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in step.tensors().items()}
    tensors |= {f"rng:{number}": state for number, state in enumerate(_torch_rng(step).values())}
    tensors |= writer.tensors
    text = _text_of(record, path)
    with whole_file(path) as partial:
        try:
            save_file(tensors, partial, metadata={"training": f"{_digest(text, tensors)} {text}"})
        except KeyError as error:  # how safetensors says that it has no name for a dtype
            raise ResumeError(
                f"{path}: {error} is the dtype of a tensor of model or optimizer, which no such file keeps; use another"
            ) from None
    return path


def _text_of(record: Mapping[str, Any], path: Path) -> str:
    try:
        return json.dumps(record)
    except ValueError as error:
        raise ResumeError(f"{path}: a number of the state cannot be written down ({error}); keep it in a tensor") from None


def _json(notes: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        return dict(json.loads(json.dumps(dict(notes or {}))))
    except (TypeError, ValueError) as error:
        raise UserInputError(f"notes: they are no JSON ({error}); give numbers, texts, lists and dicts") from error


def _is_simple(value: object) -> bool:
    """Whether JSON gives a setting back as it is, but for a tuple of plain values, which is known to be one."""
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(one, _PLAIN) for one in value))


@checked(trainer=_TRAINER, path=PATH, expected=MAPPING)
def load_training(trainer: Trainer, path: str | Path, expected: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Bring a trainer to a stored state. Changes model, optimizer, averages, modifiers, random generators and the trainer's plans.

    A session is led through its batches again without steps, so that modifiers start and end where they did.

    Args:
        trainer: made as the one that was stored was, and not yet used.
        path: what `save_training` wrote.
        expected: notes that must be among the stored ones, such as which run it is; JSON types.

    Returns:
        The notes that were stored with it.

    Raises:
        ResumeError: the file is missing, damaged, of another model, optimizer, recipe, setting or format, lacks an expected note, or the
            trainer has made steps already. Nothing has changed then.
    """
    path = Path(path)
    if trainer.num_steps:
        raise ResumeError(f"{path}: the trainer has made {trainer.num_steps} steps already; resume with a new one")
    record, tensors = _read(path)
    other = [key for key, value in _json(expected).items() if key not in record["notes"] or record["notes"][key] != value]
    if other:
        raise ResumeError(f"{path}: it is a state of another run, by its note {other[0]!r}; give one of this run")
    kept = {name: tensor for name, tensor in tensors.items() if name.startswith(_KEPT)}
    rng = [tensors[name] for name in sorted(name for name in tensors if name.startswith("rng:"))]
    stored = {name: tensor for name, tensor in tensors.items() if not name.startswith((_KEPT, "rng:"))}
    _check_fits(trainer, record, stored, len(rng), path)
    try:
        _put_values(trainer, record, Reader(trainer.step, kept, dry=True))
    except ResumeError as error:
        raise ResumeError(f"{path}: {error}") from error
    _replay_session(trainer, record["num_steps"])
    _make_optimizer_state(trainer, stored, record["optimizer_state"])
    for name, learner in trainer.step.learners().items():  # of one that the optimizer does not train, no trainer makes it
        if f"grad:{name}" not in stored:
            learner.grad = None
        elif learner.grad is None:
            learner.grad = torch.zeros_like(learner)
    with torch.no_grad():
        for name, tensor in trainer.step.tensors().items():
            tensor.copy_(stored[name])
    reader = Reader(trainer.step, kept, dry=False)
    for number, key, present in _host_state(trainer):
        node = record["host_state"][f"{number}.{key}"]
        value = reader.read(node, present) if isinstance(node, dict) else _tupled(node)
        trainer.step.optimizer.param_groups[number][key] = value
    numpy_rng, attributes, extra = _put_values(trainer, record, reader)
    vars(trainer.step.optimizer).update(attributes)
    for name, state in extra.items():
        trainer.step.model.get_submodule(name).set_extra_state(state)
    trainer.num_steps = record["num_steps"]
    trainer.forget_plans()
    RandomState(dict(zip(_torch_rng(trainer.step), rng, strict=True)), ForeignRandom(_python_rng(record), numpy_rng)).restore()
    return dict(record["notes"])


def _torch_rng(step: TrainStep) -> Mapping[str, Tensor]:
    return RandomState.current(foreign=False, devices=step.device).by_device


def _check_fits(trainer: Trainer, record: dict[str, Any], stored: dict[str, Tensor], num_rng: int, path: Path) -> None:
    """Refuse a state of another run, before anything changes."""
    step = trainer.step
    if record["optimizer"] != type(step.optimizer).__name__:
        raise ResumeError(f"{path}: it was stored with {record['optimizer']}, not with {type(step.optimizer).__name__}; use the same")
    if record["modifiers"] != _modifiers(step):
        raise ResumeError(f"{path}: {_other_modifiers(record['modifiers'], _modifiers(step))}; use the recipe that was stored")
    if num_rng != len(_torch_rng(step)):
        raise ResumeError(f"{path}: it was stored on another kind of device; resume on the kind it was stored on")
    _check_names(trainer, stored, path)
    odd = sorted({f"{number}.{key}" for number, key, _ in _host_state(trainer)} ^ record["host_state"].keys())
    if odd:
        raise ResumeError(
            f"{path}: optimizer settings {', '.join(odd[:3])} are in one of file and trainer only; make the optimizer as it was made"
        )
    _check_settings(trainer, record, path)
    for what, there, now in (
        ("generator", record["generators"], generators(step)),
        ("extra state", record["extra_state"], _with_extra_state(step.model)),
    ):
        for name in sorted(there.keys() ^ now.keys()):
            raise ResumeError(f"{path}: the {what} of {name or 'the model'} is in one of file and trainer only; make it as it was made")


def _check_settings(trainer: Trainer, record: dict[str, Any], path: Path) -> None:
    """Refuse a trainer with other settings, by the name of the first."""
    stored, settings = record["settings"], _settings(trainer)
    if "made_with" in record:  # files of before have none
        stored, settings = {**stored, **record["made_with"]}, {**settings, **json.loads(json.dumps(trainer.step.made_with))}
    for name in {**stored, **settings}:
        was, now = stored.get(name), settings.get(name)
        if was != now:
            raise ResumeError(f"{path}: {name} was {was} when it was stored, and is {now}; make the trainer as the stored one was made")
    if trainer.schedule is not None and record["factor"] is not None:
        number, factor = record["factor"]
        if trainer.schedule.factor(number) != factor:
            raise ResumeError(
                f"{path}: the schedule gave {factor} to step {number}, and another one now; give the schedule that was stored"
            )


def _put_values(trainer: Trainer, record: dict[str, Any], reader: Reader) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Read numpy's state, attributes of the optimizer and extra states; set the generators and tensors that modules hold."""
    step = trainer.step
    numpy_rng = reader.read(record["numpy_rng"], None)
    np.random.RandomState().set_state(numpy_rng)
    random.Random().setstate(_python_rng(record))
    nodes, there = record["optimizer_attributes"], vars(step.optimizer)
    attributes = {key: reader.read(node, there.get(key)) for key, node in nodes.items()}
    now = generators(step)
    for name, node in record["generators"].items():
        reader.read(node, now[name])
    modules = dict(step.model.named_modules())
    own = {tensor.untyped_storage()._cdata for tensor in step.tensors().values()}
    for name, nodes in record["module_tensors"].items():
        held: dict[str, Any] = modules[name].__dict__ if name in modules else {}  # a modifier that starts may make the module
        values = {key: reader.read(node, _apart(held.get(key), own)) for key, node in nodes.items()}
        held.update({} if reader.is_dry else values)
    return numpy_rng, attributes, {name: reader.read(node, None) for name, node in record["extra_state"].items()}


def _apart(present: Any, own: Collection[int]) -> Any:
    """What stands in a place and may be written to: nothing where it lies in the memory of a parameter, which has its own value."""
    return None if isinstance(present, Tensor) and present.untyped_storage()._cdata in own else present


def _python_rng(record: dict[str, Any]) -> Any:
    version, state, gauss = record["python_rng"]
    return version, tuple(state), gauss


def _settings(trainer: Trainer) -> dict[str, Any]:
    """List what makes another run of the same tensors: settings of step and trainer, what is trained, and the classes of the modules."""
    step = trainer.step
    names = {parameter: name for name, parameter in step.parameters().items()}
    found: dict[str, Any] = {
        "clip_norm": step.clip_norm,
        "accumulate": step.accumulate,
        "autocast": None if step.autocast is None else str(step.autocast),
        "schedule": None if trainer.schedule is None else trainer.schedule.description,
    }
    for number, group in enumerate(step.optimizer.param_groups):
        found |= {f"place {place} of optimizer group {number}": names[p] for place, p in enumerate(group["params"])}
    asked = {name: tensor.requires_grad for name, tensor in step.learners().items() if tensor.requires_grad or tensor in names}
    found |= {f"requires_grad of {name}": is_asked for name, is_asked in asked.items()}
    flags = {name: module.training for name, module in step.model.named_modules() if name in step.made_of}
    found |= {f"training of {name or 'the model'}": flag for name, flag in flags.items()}
    now = {name: type(module).__qualname__ for name, module in step.model.named_modules()}
    classes = now if step.session is None else step.made_of  # a modifier that starts gives modules others, and starts when it is loaded
    found |= {f"class of {name or 'the model'}": cls for name, cls in classes.items()}
    if step.session is None:
        found |= {f"settings of {name or 'the model'}": text for name, module in step.model.named_modules() if (text := _told(module))}
    if step.ranks.is_wrapped:
        found["rank"] = torch.distributed.get_rank()
    result: dict[str, Any] = json.loads(json.dumps(found))
    return result


def _told(module: nn.Module) -> str:
    """What a module of torch says of itself, such as the rate of a dropout; and the numbers that one of one's own holds."""
    if is_foreign(type(module).__module__):
        return module.extra_repr() if type(module).__module__.startswith("torch.nn.") else ""
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        return ""  # it gets its own back
    kept = {key: value for key, value in vars(module).items() if isinstance(value, _PLAIN) and key not in _OF_MODULES}
    return ", ".join(f"{key}={exact_text(value)}" for key, value in kept.items())


def _module_tensors(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """List the tensors that modules hold without having registered them, such as a scale that is written between steps."""
    held = {name: {k: v for k, v in vars(m).items() if isinstance(v, Tensor) and is_writable(v)} for name, m in model.named_modules()}
    return {name: tensors for name, tensors in held.items() if tensors}


def _with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    found = {name: m for name, m in model.named_modules() if type(m).get_extra_state is not nn.Module.get_extra_state}
    for name, module in found.items():
        if type(module).set_extra_state is nn.Module.set_extra_state:
            raise ResumeError(
                f"{name or 'the model'}: it has get_extra_state() and no set_extra_state(), which a resumed run needs; add it"
            )
    return found


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
    """Read a file, and hold all that it says against its digest before any of it is believed."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (OSError, SafetensorError, ValueError) as error:
        raise ResumeError(f"{path}: it cannot be read as a training state ({error}); give a file that save_training wrote") from error
    digest, _, text = metadata.get("training", "").partition(" ")
    if f'"{_FORMAT}"' not in text[:80]:
        raise ResumeError(f"{path}: it is no {_FORMAT}; give a file that save_training wrote")
    if digest != _digest(text, tensors):
        raise ResumeError(f"{path}: it does not hold what was written; give another state, or start over")
    record: dict[str, Any] = json.loads(text)
    return record, tensors


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Hash all of a state, so that damage on the disk does not go on as another run."""
    result = hashlib.blake2b(f"{len(text)} {text}\n".encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        result.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        result.update(raw_bytes(tensor).numpy().data)
    return result.hexdigest()


def _check_names(trainer: Trainer, stored: dict[str, Tensor], path: Path) -> None:
    """Refuse a file of another model before anything changes; optimizer state is not there yet in a new trainer."""
    present = trainer.step.tensors()
    missing = sorted(name for name in present.keys() - stored.keys() if not name.startswith("grad:"))
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
        items: list[tuple[Any, Any]] = list(state.items()) if isinstance(state, Mapping) else [(name or holder, None)]
        for key, value in items:
            is_kept = isinstance(state, Mapping) and name is not None and str(key).isidentifier()
            if is_kept and isinstance(value, Tensor):
                continue
            if not is_kept or name is None or type(value) not in _PLAIN:
                raise ResumeError(
                    f"{type(step.optimizer).__name__}: its state {key!r} is neither a tensor nor a number of a parameter, and a run "
                    "that is resumed would lack it; keep it as one of these"
                )
            found.setdefault(name, {})[key] = value
    return found


def _attributes(step: TrainStep) -> dict[str, Any]:
    """What an optimizer keeps on itself, such as a counter or slow weights."""
    return {key: value for key, value in vars(step.optimizer).items() if key not in books()}


def _attribute(step: TrainStep, key: str) -> str:
    return f"attribute '{key}' of {type(step.optimizer).__name__}"


def _make_optimizer_state(trainer: Trainer, stored: dict[str, Tensor], values: Mapping[str, Mapping[str, Any]]) -> None:
    state = trainer.step.optimizer.state
    for owner, parameter in trainer.step.parameters().items():
        if owner in values:
            state[parameter].update(values[owner])
        suffix = f":{owner}"
        for name, tensor in stored.items():
            if name.startswith("opt.") and name.endswith(suffix) and name[4 : -len(suffix)].isidentifier():
                like = torch.empty_like(parameter, dtype=tensor.dtype) if tensor.shape == parameter.shape else tensor.to(parameter.device)
                state[parameter].setdefault(name[4 : -len(suffix)], like.detach().clone())
