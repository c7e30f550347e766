"""Targets that are called repeatedly can be calibrated only if the weights of finished targets stay as the samples met them."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from compressor.errors import TracingError

_Print = dict[tuple[nn.Module, str], tuple[Tensor, int]]


class FixedWeights:
    """Remembers the weights of targets, and tells when they have been replaced or written to."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._prints: dict[str, _Print] = {}

    def fix(self, target: str, module: nn.Module) -> None:
        """Remember the weights of a target when the samples run on through it.

        Args:
            target: dotted name.
            module: the target as it is now.
        """
        self._prints[target] = _print(module)

    def check(self, model: nn.Module, own: Collection[tuple[nn.Module, str]], targets: Collection[str] | None = None) -> None:
        """Compare weights with what they were.

        Args:
            model: the model.
            own: module and name of what forwards set there themselves, each of them its own.
            targets: dotted names; None takes all that are remembered.

        Raises:
            TracingError: they have changed.
        """
        for target in self._prints if targets is None else targets:
            now, before = _print(model.get_submodule(target)), self._prints[target]
            places = {*now, *before}.difference(own)
            if any(place not in now or place not in before or _differs(now[place], before[place]) for place in places):
                raise TracingError(
                    f"{target or 'the model'}: its weights changed after the samples had run on, but some target is called repeatedly and "
                    'needs forwards with the weights of then; use propagate_error=True, pipeline="basic" or other sequential targets'
                )


def _differs(now: tuple[Tensor, int], before: tuple[Tensor, int]) -> bool:
    return now[0] is not before[0] or now[1] != before[1]


def _print(module: nn.Module) -> _Print:
    return {
        (below, name): (tensor, 0 if tensor.is_inference() else tensor._version)
        for below in module.modules()
        for name, tensor in (*below.named_parameters(recurse=False), *below.named_buffers(recurse=False))
    }
