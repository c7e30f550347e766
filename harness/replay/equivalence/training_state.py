"""The whole state of a training run at one moment, collected by the harness itself: what a step forgets to list must not go unseen.

Beside tensors there is what Python holds: settings of the optimizer, plain attributes of modules, where modifiers stand, and the random
generators. Equality is that of bytes, so NaN payloads count and -0 differs from +0.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from compressor.training import TrainStep
from compressor.training.guards.frozen_value import exact_text
from harness.tolerance.bits import dtype_name, to_bytes

_PLAIN = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True)
class TrainingState:
    """What a training run consists of at one moment.

    Attributes:
        tensors: by role and name: `param:fc.weight`, `grad:...`, `buffer:...`, `opt.exp_avg:...`, `in:...`, `loss`, `rng:torch`.
        host: Python values as texts, by name.
    """

    tensors: Mapping[str, Tensor]
    host: Mapping[str, str] = field(default_factory=dict)

    def digests(self) -> dict[str, str]:
        """Return a text per name, equal where nothing tells two values apart."""
        return {name: _digest(tensor) for name, tensor in self.tensors.items()} | dict(self.host)

    def copied(self) -> TrainingState:
        """Return a copy that later steps do not reach."""
        return TrainingState({name: tensor.detach().clone() for name, tensor in self.tensors.items()}, dict(self.host))


def state_of(step: TrainStep, loss: Tensor | None = None, batch: object = None) -> TrainingState:
    """Collect the state of a run.

    Args:
        step: of the run; not changed.
        loss: what the last step returned.
        batch: what the last step was given; a step that writes into it has changed the caller's data.

    Returns:
        The state; its tensors are those of the run, no copies.
    """
    tensors = dict(_model_tensors(step.model)) | dict(_optimizer_tensors(step)) | dict(_other_tensors(step))
    tensors |= {f"in:{keystr(path)}": leaf for path, leaf in tree_flatten_with_path(batch)[0] if isinstance(leaf, Tensor)}
    if loss is not None:
        tensors["loss"] = loss
    return TrainingState({name: tensor.detach() for name, tensor in tensors.items()} | dict(_generators(step)), dict(_host_values(step)))


def differing_names(expected: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    """List the names under which two states differ.

    Args:
        expected: digests of one state.
        actual: digests of the other.

    Returns:
        Names, the loss first and gradients before what follows from them.
    """
    return sorted((name for name in {**expected, **actual} if expected.get(name) != actual.get(name)), key=_rank)


_ORDER = ("loss", "grad:", "param:", "buffer:", "opt.")


def _rank(name: str) -> int:
    return next((number for number, prefix in enumerate(_ORDER) if name.startswith(prefix)), len(_ORDER))


def _digest(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided:
        dense = tensor.to_dense()
        return f"{tensor.layout} {_digest(dense)}"
    data = to_bytes(tensor.resolve_conj().resolve_neg()).cpu().contiguous().numpy().tobytes()
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}:{hashlib.blake2b(data, digest_size=12).hexdigest()}"


def _model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield f"param:{name}", parameter
        if parameter.grad is not None:
            yield f"grad:{name}", parameter.grad
    for name, buffer in model.named_buffers():
        yield f"buffer:{name}", buffer
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            if isinstance(value, Tensor):
                yield f"attribute:{name}.{key}".replace(":.", ":"), value


def _optimizer_tensors(step: TrainStep) -> Iterator[tuple[str, Tensor]]:
    names = {parameter: name for name, parameter in step.model.named_parameters()}
    for number, group in enumerate(step.optimizer.param_groups):
        yield from ((f"group{number}.{key}", value) for key, value in group.items() if isinstance(value, Tensor))
        for place, parameter in enumerate(group["params"]):
            name = names.get(parameter, f"group{number}[{place}]")
            if parameter not in names:
                yield f"param:{name}", parameter
            state = step.optimizer.state.get(parameter, {}).items()
            yield from ((f"opt.{key}:{name}", value) for key, value in state if isinstance(value, Tensor))


def _other_tensors(step: TrainStep) -> Iterator[tuple[str, Tensor]]:
    if step.averages is not None:
        yield from ((f"average:{name}", value) for name, value in step.averages.tensors.items())
    for number, modifier in enumerate(step.modifiers):
        listed = getattr(modifier, "training_tensors", None)
        if listed is not None:
            yield from ((f"modifier{number}.{key}", value) for key, value in listed().items())


def _generators(step: TrainStep) -> Iterator[tuple[str, Tensor]]:
    yield "rng:torch", torch.get_rng_state()
    if step.device.type == "cuda":
        yield "rng:cuda", torch.cuda.get_rng_state(step.device)
    for name, module in step.model.named_modules():
        for key, value in module.__dict__.items():
            if isinstance(value, torch.Generator):
                yield f"rng:{name}.{key}".replace(":.", ":"), value.get_state()


def _host_values(step: TrainStep) -> Iterator[tuple[str, str]]:
    yield "rng:random", hashlib.blake2b(repr(random.getstate()).encode(), digest_size=12).hexdigest()
    numpy_state: Any = np.random.get_state(legacy=True)
    yield "rng:numpy", hashlib.blake2b(numpy_state[1].tobytes() + repr(numpy_state[2:]).encode(), digest_size=12).hexdigest()
    for name, parameter in step.model.named_parameters():
        yield f"requires_grad:{name}", repr(parameter.requires_grad)
    for name, module in step.model.named_modules():
        for key, value in module.__dict__.items():
            if type(value) in _PLAIN and not key.startswith("_torchdynamo"):  # torch.compile counts its wrappers
                yield f"attribute:{name}.{key}".replace(":.", ":"), exact_text(value)
    for number, group in enumerate(step.optimizer.param_groups):
        yield from (
            (f"group{number}.{key}", exact_text(value)) for key, value in group.items() if key != "params" and not isinstance(value, Tensor)
        )
    for number, state in enumerate(step.optimizer.state.values()):
        yield from ((f"opt.{key}:{number}", exact_text(value)) for key, value in state.items() if type(value) in _PLAIN)
    for number, modifier in enumerate(step.modifiers):
        yield f"modifier{number}.flags", repr(modifier.flags)
