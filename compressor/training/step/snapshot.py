"""The whole state of a step at one moment, to go back to and to compare bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.random_state import RandomState
from compressor.settings.kinds import TENSOR, object_of
from compressor.settings.options import checked
from compressor.training.step.digests import same_bits
from compressor.training.step.step import TrainStep


@dataclass(frozen=True)
class Snapshot:
    """Copies of all tensors of a step, of its loss where it has run, and of the random generators.

    Attributes:
        tensors: by role and name.
        rng: states of the generators.
    """

    tensors: dict[str, Tensor]
    rng: RandomState

    @classmethod
    @checked(step=object_of(TrainStep, words="a TrainStep"), loss=TENSOR)
    def take(cls, step: TrainStep, generators: Sequence[torch.Generator] = (), loss: Tensor | None = None) -> Snapshot:
        """Copy the state.

        Args:
            step: the step.
            generators: generators beside the default ones.
            loss: the loss that the step has just returned.

        Returns:
            The copy.
        """
        tensors = {name: tensor.detach().clone() for name, tensor in step.tensors().items()}
        if loss is not None:
            tensors["loss"] = loss.detach().clone()
        return cls(tensors, RandomState.current(foreign=False, devices=step.device, generators=generators))

    @torch.no_grad()
    def put_back(self, step: TrainStep, generators: Sequence[torch.Generator] = ()) -> None:
        """Write the copied values into the step's tensors, in place. Changes the step's state.

        Args:
            step: the step that it was taken of.
            generators: the same generators.
        """
        for name, tensor in step.tensors().items():
            if name in self.tensors:  # what a failed step has added or replaced stays; the guards name it
                saved = self.tensors[name]
                if tensor.shape == saved.shape and not _is_expanded(tensor):
                    tensor.copy_(saved)
                else:  # the step has resized or expanded it, or put another in its place
                    tensor.data = saved.clone()
        for name, learner in step.learners().items():
            if f"grad:{name}" not in self.tensors:  # made by the step; the next backward pass would add to it
                learner.grad = None
        for name, parameter in step.parameters().items():
            state = step.optimizer.state.get(parameter) if step.update_is_captured else None
            state = state if isinstance(state, dict) else {}
            made = [key for key, value in state.items() if isinstance(value, Tensor) and f"opt.{key}:{name}" not in self.tensors]
            for key in made:  # likewise
                del state[key]
        self.rng.restore(generators)

    def differences(self, other: Snapshot) -> list[str]:
        """List what differs, in words.

        Args:
            other: a snapshot of the same step.

        Returns:
            One clause per tensor; empty where everything is equal bit for bit.
        """
        found = []
        for name in {**self.tensors, **other.tensors}:
            a, b = self.tensors.get(name), other.tensors.get(name)
            if a is None or b is None:
                found.append(f"{name} exists in one of the two only")
            elif not same_bits(a, b):
                found.append(f"{name}: {_distance(a, b)}")
        if not self.rng.equals(other.rng):
            found.append("the random generators stand elsewhere")
        return found


def _distance(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
    x, y = (t.to(torch.float64) if not t.is_complex() else torch.view_as_real(t).double() for t in (a, b))
    return f"{int((x != y).sum())} of {x.numel()} elements differ, by up to {(x - y).abs().max().item():.3e}"


def _is_expanded(tensor: Tensor) -> bool:
    """Whether several of its elements are one, which nobody writes to."""
    is_strided = tensor.layout is torch.strided
    return is_strided and any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
