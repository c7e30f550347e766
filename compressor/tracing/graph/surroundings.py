"""What a forward may do besides calling torch and modules: catch exceptions, draw other random numbers, write to state, set variables."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compressor.tracing.graph.refusal import Refusal, Unrepeatable
from compressor.tracing.graph.trees import find_tensor
from compressor.tracing.isolation import foreign_random

if TYPE_CHECKING:
    from compressor.tracing.graph.recorder import Recorder

_UNSET = object()


class Surroundings:
    """How things stood when a forward began, to be compared with how it leaves them.

    Attributes:
        caught: where a call raised something that the forward has caught; None if none did.
    """

    def __init__(self, model: nn.Module) -> None:
        """Look at random generators, parameters, buffers and context variables."""
        self.caught: str | None = None
        self._python_random, self._seed = foreign_random(), torch.initial_seed()
        self._versions = {name: (tensor, tensor._version) for name, tensor in _state(model)}
        self._context = copy_context()

    def check(self) -> None:
        """Refuse a forward that did what a graph cannot repeat.

        Raises:
            Refusal: it caught an exception, drew from Python's or numpy's generators, or seeded torch's.
            Unrepeatable: it wrote to parameters or buffers in place.
        """
        if self.caught is not None:
            raise Refusal(f'{self.caught}: whether it is raised depends on the batch; use engine="suspend"')
        if foreign_random() != self._python_random:
            raise Refusal(
                "forward: it draws from the random generators of Python or numpy, whose numbers would be frozen in a graph; draw with "
                'torch, or use engine="suspend"'
            )
        if torch.initial_seed() != self._seed:
            raise Refusal('forward: it seeds torch\'s random generator, which a graph cannot repeat; use engine="suspend"')
        written = [name for name, (tensor, version) in self._versions.items() if tensor._version != version]
        if written:
            raise Unrepeatable(written_in_place(written[0]))

    def context(self, recorder: Recorder) -> tuple[tuple[ContextVar[Any], Any], ...]:
        """Collect the context variables that the forward has set around a call, but for collectors, which only take notes.

        Args:
            recorder: of the forward.

        Returns:
            Variable and value.

        Raises:
            Refusal: one of them holds a tensor.
        """
        found = []
        for variable, value in copy_context().items():
            if self._context.get(variable, _UNSET) is value or isinstance(value, TorchFunctionMode | dict | list | set):
                continue
            if find_tensor(value, recorder.encoder.owns) is not None:
                raise recorder.refuse(
                    f"context variable {variable.name} hands a tensor to the module that is called, past its arguments; pass it as an "
                    'argument, or use engine="suspend"'
                )
            found.append((variable, value))
        return tuple(found)


def written_in_place(name: str) -> str:
    """Say what is wrong with a tensor that every forward rewrites.

    Args:
        name: of a parameter or buffer.

    Returns:
        The message.
    """
    return (
        f"{name}: every forward writes to it, and all samples share it; keep what changes in a buffer or attribute, and put a new tensor "
        'there (self.name = ...) instead of writing to it, or use pipeline="basic"'
    )


def exchanged(name: str) -> str:
    """Say what is wrong with a module or parameter in whose place every forward puts another.

    Args:
        name: of the parameter that is no longer there.

    Returns:
        The message.
    """
    return (
        f"{name}: forward puts another module or parameter in its place, if only for a while, and all samples share the model; choose by "
        'calling one or the other (self.b(x) in place of self.a(x)), or use pipeline="basic"'
    )


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_inference():
            yield name, tensor


def modules_around(model: nn.Module, targets: Container[int]) -> set[nn.Module]:
    """Find the modules that hold a target, and are none themselves.

    Args:
        model: the model.
        targets: ids of the targets.

    Returns:
        What a recorder takes apart.
    """
    found: set[nn.Module] = set()

    def holds(module: nn.Module) -> bool:
        below = [holds(child) for child in module.children()]
        if any(below):
            found.add(module)
        return any(below) or id(module) in targets

    holds(model)
    return {module for module in found if id(module) not in targets}
