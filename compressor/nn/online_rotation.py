"""Rotations that are computed in every forward: R4 of SpinQuant (arXiv:2405.16406), V and U of QuIP# (arXiv:2402.04396).

A rotation is a forward hook of the layer whose input or output it turns, in front of all others: whoever watches the layer sees the input
that meets its weight. It holds the factors of a Hadamard matrix, not the matrix, and goes with the hooks when another layer takes the place
of its own. What it is called in a checkpoint stands in `compressor.model.checkpoints.online`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compressor.algorithms.rotations import Rotation
from compressor.errors import TargetError

Side = Literal["input", "output"]
ALREADY = "is turned in every forward already"


class OnlineRotation:
    """A hook that turns what a layer is handed, x Q, or gives, y Q^T: its weight has been turned so that the two take each other back.

    Layers that are handed the very same tensor may share one. Without gradients it is then turned once, and they are handed the very same
    tensor again: GPTQ has one Hessian for them. What is written through `.data` or numpy counts no version, so the first one of a layer is
    turned for itself, and compared.

    Attributes:
        group: its name in the transform_config of a checkpoint: R4, v, u.
        side: what it turns.
        rotation: Q.
        back: multiply by Q^T.
    """

    def __init__(self, group: str, side: Side, rotation: Rotation, *, back: bool) -> None:
        """Take the rotation; `attach` puts it to work."""
        self.group, self.side, self.rotation, self.back = group, side, rotation, back
        self._placed: dict[tuple[torch.device, torch.dtype], Rotation] = {}
        self._last: tuple[ref[Tensor], tuple[int, int], Tensor] | None = None
        self._shares: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is turned right now, of which nothing outlives a forward, and what is known of the layers of this model."""
        return {name: value for name, value in vars(self).items() if name not in ("_last", "_shares")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin without both."""
        vars(self).update(state, _last=None, _shares=WeakKeyDictionary())

    def attach(self, module: nn.Module) -> RemovableHandle:
        """Turn inputs or outputs of a module from now on, before any other hook sees them. Changes the module.

        Args:
            module: a linear layer, or what stands for one.

        Returns:
            torch's handle, which takes it off.
        """
        if self.side == "input":
            return module.register_forward_pre_hook(self, with_kwargs=True, prepend=True)
        return module.register_forward_hook(self, prepend=True)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], other: Any) -> Any:
        """Do what torch asks of a hook: before the forward with keyword arguments, after it with the output."""
        if self.side == "output":
            if not isinstance(other, Tensor):
                raise TargetError(
                    f"{self.group}: {type(module).__name__} gives a {type(other).__name__}, which cannot be turned; ignore it"
                )
            return self.turn(other)
        if args:
            return (self._turned_once(module, args[0]), *args[1:]), other
        name = next(iter(other))
        return (), {**other, name: self._turned_once(module, other[name])}

    def _turned_once(self, module: nn.Module, x_ND: Tensor) -> Tensor:
        """Turn a tensor that has just been turned no second time, unless somebody may have written to it, or to what it became."""
        if torch.is_grad_enabled() or torch.is_inference(x_ND) or torch.compiler.is_compiling():
            return self.turn(x_ND)
        last = self._last
        is_last = last is not None and last[0]() is x_ND and last[1] == (x_ND._version, last[2]._version)
        if is_last and module not in self._shares:
            self._shares[module] = last is not None and torch.equal(last[2], self.turn(x_ND))
        if last is None or not is_last or not self._shares[module]:
            turned_ND = self.turn(x_ND)
            self._last = last = (ref(x_ND, self._forget), (x_ND._version, turned_ND._version), turned_ND)
        return last[2]

    def _forget(self, gone: ref[Tensor]) -> None:
        """Let go of what a tensor became, with the tensor."""
        del gone
        self._last = None

    def turn(self, x_ND: Tensor) -> Tensor:
        """Turn rows, in float32 at least.

        Args:
            x_ND: [..., D], D a multiple of the size of Q.

        Returns:
            [..., D] in the same dtype.
        """
        placed, dtype = self.at(x_ND.device, x_ND.dtype)
        return placed.turn(x_ND.to(dtype), back=self.back).to(x_ND.dtype)

    def at(self, device: torch.device, dtype: torch.dtype) -> tuple[Rotation, torch.dtype]:
        """Return the rotation where it is applied, made once; asked for ahead of all forwards it is no value that one leaves for the next.

        Args:
            device: of what is turned.
            dtype: of it.

        Returns:
            The rotation, and its dtype: float32, or float64.
        """
        # By hand: torch.promote_types is an operator, and one that gives no tensor.
        place = device, dtype if dtype is torch.float64 else torch.float32
        if place not in self._placed:
            self._placed[place] = self.rotation.to(*place)
        return self._placed[place], place[1]


def sees_outputs(module: nn.Module) -> bool:
    """Say whether a hook asks for what a module gives; the rotation of its output is a part of its forward.

    Args:
        module: any module.

    Returns:
        True where one does.
    """
    return any(not isinstance(hook, OnlineRotation) for hook in module._forward_hooks.values())


def online_rotations(module: nn.Module) -> list[OnlineRotation]:
    """Name the rotations of a module.

    Args:
        module: any module.

    Returns:
        Those of its input, then those of its output.
    """
    hooks: list[Any] = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return [hook for hook in hooks if isinstance(hook, OnlineRotation)]


def turned_already(module: nn.Module, side: Side) -> str:
    """Say why no scale moves, and nothing is turned, past a rotation in the forward.

    Args:
        module: any module.
        side: of it.

    Returns:
        A clause behind the name of the module; nothing where there is no rotation on this side.
    """
    group = next((one.group for one in online_rotations(module) if one.side == side), None)
    return "" if group is None else f"whose {side} {ALREADY} ({group}; put what moves scales or turns weights in front of that)"


def rotated_modules(model: nn.Module) -> Mapping[str, list[OnlineRotation]]:
    """Find all rotations of a model.

    Args:
        model: any module.

    Returns:
        Dotted names, in the order of the model, with their rotations.
    """
    found = {name: online_rotations(module) for name, module in model.named_modules()}
    return {name: rotations for name, rotations in found.items() if rotations}


def is_watched(module: nn.Module) -> bool:
    """Tell whether a module carries hooks other than rotations.

    Args:
        module: any module.

    Returns:
        True where somebody looks at what it is handed or gives.
    """
    return any(not isinstance(hook, OnlineRotation) for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()))


def unwatched_forward(module: nn.Module, x: Tensor) -> Tensor:
    """Compute what a layer does without letting anybody see it.

    Args:
        module: a linear layer, or what stands for one.
        x: its input.

    Returns:
        Its output.
    """
    rotations = online_rotations(module)
    for rotation in rotations:
        x = rotation.turn(x) if rotation.side == "input" else x
    output: Tensor = module.forward(x)
    for rotation in rotations:
        output = rotation.turn(output) if rotation.side == "output" else output
    return output
