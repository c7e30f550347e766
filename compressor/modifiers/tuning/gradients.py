"""Gradients of forwards that others wrote: whether there are any, of the right values, and what they never came to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from compressor.errors import CalibrationError
from compressor.model.folder import some
from compressor.numerics.checksum import checksum

_WRITES = "its forward writes in place over what gradients need"
_CUTS = "no_grad, inference_mode, detach, numpy, or torch.utils.checkpoint without use_reentrant=False"
_INSTEAD = (
    "change the forward, or train nothing: GPTQModifier without mode: best in place of AutoRoundModifier, SpinQuantModifier without "
    "learnable, no ScaleTuningModifier"
)


class Unreached:
    """What is trained and has met no gradient but zero so far: behind a no_grad, a detach or a rounding a forward cuts it off."""

    def __init__(self, names: Iterable[str]) -> None:
        """Begin with all.

        Args:
            names: of what is trained.
        """
        self._names = dict.fromkeys(names)
        self._num_trained = len(self._names)

    def __contains__(self, name: str) -> bool:
        """Tell whether no gradient has come to it."""
        return name in self._names

    def meet(self, name: str, gradient: Tensor | None) -> None:
        """Strike one out whose gradient is not zero; each is looked at until it is.

        Args:
            name: of what is trained.
            gradient: of one step; None where there was none.
        """
        if name in self._names and gradient is not None and bool(gradient.any()):
            del self._names[name]

    def notes(self, label: str) -> list[str]:
        """Say what has learnt nothing.

        Args:
            label: of the modifier.

        Returns:
            A note for the report; none where a gradient came to all.
        """
        return [told_unreached(label, list(self._names), self._num_trained)] if self._names else []


def told_unreached(label: str, names: list[str], num_trained: int) -> str:
    """Put into words what has learnt nothing.

    Args:
        label: of the modifier.
        names: of what no gradient came to, at least one.
        num_trained: how many were trained, these among them.

    Returns:
        A note for the report.
    """
    return (
        f"{label}: no gradient came to {len(names)} of {num_trained} that are trained ({some(names)}), so nothing was learnt there: no "
        "token came to them, the forward cuts them off (no_grad, inference_mode, detach, a rounding or a comparison behind them), or "
        "nothing that is judged depends on them"
    )


def send_back(output: Tensor, gradient: Tensor | None, where: str) -> None:
    """Add the gradients of an output to whatever asks for them.

    Args:
        output: of a forward.
        gradient: as the output; None for a scalar.
        where: whose forward it was, for errors.

    Raises:
        CalibrationError: the forward keeps no gradients, or has written over what they need.
    """
    if not output.requires_grad:
        raise CalibrationError(f"{where}: its forward keeps no gradients ({_CUTS} in it); {_INSTEAD}")
    try:
        output.backward(gradient)
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise CalibrationError(f"{where}: {_WRITES}; {_INSTEAD}") from error


@contextmanager
def saved_values_checked(where: str, *, is_first: bool) -> Iterator[None]:
    """Refuse backwards on other values than their forwards saved: autograd counts no writes through `.data` or numpy.

    Args:
        where: whose forward it is, for errors.
        is_first: of a training; later steps run the same code, and are not looked at.

    Yields:
        Nothing, for a forward and its backward, which raises a CalibrationError.
    """

    def keep(tensor: Tensor) -> tuple[Tensor, int]:
        return tensor.detach(), checksum(tensor)

    def give(kept: tuple[Tensor, int]) -> Tensor:
        tensor, known = kept
        if checksum(tensor) != known:
            raise CalibrationError(f"{where}: {_WRITES}; {_INSTEAD}")
        return tensor

    with saved_tensors_hooks(keep, give) if is_first else nullcontext():
        yield
