"""Blocks of a model by themselves: what they are called with, what they should give, and how far from it they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from compressor.errors import CalibrationError, NumericsError
from compressor.lifecycle import State
from compressor.modifiers.tuning.sequences import Axes, Piece, cut, find_axes, joined
from compressor.nn.quantized_linear import is_conv1d


@dataclass
class BlockCalls:
    """The calls of one block, batch by batch, in main memory.

    Attributes:
        inputs: (args, kwargs) of each.
        targets: what the uncompressed block gave on the stream of the uncompressed model; empty where nobody asked.
        masks: bool [batch, tokens], or None.
        sizes: rows and tokens of each batch.
    """

    inputs: list[Any] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    masks: list[Tensor | None] = field(default_factory=list)
    sizes: list[tuple[int, ...]] = field(default_factory=list)

    def note_call(self, state: State, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep a call on the stream of the compressed model."""
        if state.base_stream:
            return
        kept = tree_map(_kept, (args, dict(kwargs)))
        first = next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
        self.inputs.append(kept)
        self.masks.append(None if state.token_mask is None else state.token_mask.cpu())
        self.sizes.append(tuple(state.batch_shape or first.shape[:2]))

    def note_output(self, state: State, output: Any) -> None:
        """Keep what it gave on the stream of the uncompressed model."""
        if state.base_stream:
            self.targets.append(_kept(first_tensor(output)))

    def clear(self) -> None:
        """Let everything go."""
        for kept in (self.inputs, self.targets, self.masks, self.sizes):
            kept.clear()


class BlockLoss:
    """The squared error of a block's output over sequences that are drawn."""

    def __init__(self, block: nn.Module, calls: BlockCalls, device: torch.device, name: str) -> None:
        """Compute the targets that are missing with the block as it is now, a forward of all calls, and cut calls into sequences.

        Args:
            block: uncompressed.
            calls: of it.
            device: of the model.
            name: dotted name of the block, for errors.

        Raises:
            CalibrationError: calls on the two streams do not correspond.
            NumericsError: NaN or infinity in what the block should give for a token that counts.
        """
        self._block, self._device, self._name = block, device, name
        if calls.targets and len(calls.targets) != len(calls.inputs):
            raise CalibrationError(
                f"{name}: {len(calls.targets)} calls in the uncompressed model and {len(calls.inputs)} in the compressed one do not "
                "correspond; use target='propagated'"
            )
        self._pieces: list[Piece] = []
        known: dict[str, Axes | None] = {}
        for number, (inputs, mask, size) in enumerate(zip(calls.inputs, calls.masks, calls.sizes, strict=True)):
            shapes = str(tree_map(lambda one: (one.shape, one.dtype) if isinstance(one, Tensor) else one, (inputs, size[0])))
            given = _kept(self._output(self._to(inputs))) if not calls.targets or shapes not in known else calls.targets[number]
            if shapes not in known:
                known[shapes] = find_axes(inputs, given, size[0], lambda one: self._output(self._to(one)))
            target, axes = calls.targets[number] if calls.targets else given, known[shapes]
            if not bool(torch.isfinite(_that_count(target, mask)).all()):
                raise NumericsError(f"{name}: its calibration outputs hold NaN or infinity; check the model in its own dtype on this data")
            mask_axis = None if mask is None else 0
            tokens = target[..., 0].numel()
            self._pieces += cut((inputs, target, mask), size[0], tokens, None if axes is None else (*axes, mask_axis))

    def draw(self, num_sequences: int, generator: torch.Generator) -> list[int]:
        """Draw pieces.

        Args:
            num_sequences: in all of them, at most, unless the first has more: calls that cannot be cut are drawn whole.
            generator: of the numbers.

        Returns:
            Their numbers, to be handed to `backward`.
        """
        order = torch.randperm(len(self._pieces), generator=generator).tolist()
        rows = accumulate(self._pieces[number].num_rows for number in order)
        return [number for place, (number, sum_) in enumerate(zip(order, rows, strict=True)) if sum_ <= num_sequences or not place]

    def backward(self, numbers: Sequence[int]) -> float:
        """Sum the squared error over some sequences, and add its gradients where grad mode is on.

        Args:
            numbers: as drawn.

        Returns:
            The sum over sequences, tokens that count, and channels.

        Raises:
            NumericsError: it is NaN or infinite.
        """
        total = 0.0
        for inputs, target, mask in joined([self._pieces[one] for one in numbers]):
            error = (self._output(self._to(inputs)).float() - target.to(self._device).float()).square()
            error = _that_count(error, None if mask is None else mask.to(self._device))
            loss = error.sum()
            total += float(loss.detach())
            if torch.is_grad_enabled():
                loss.backward()
        if not math.isfinite(total):
            raise NumericsError(
                f"{self._name}: the squared error of its outputs is {total} on {len(numbers)} calibration sequences, and nothing can be "
                "learned from that; check the model in its own dtype on this data"
            )
        return total

    def _to(self, tree: Any) -> Any:
        return tree_map(lambda one: one.to(self._device) if isinstance(one, Tensor) else one, tree)

    def _output(self, inputs: Any) -> Tensor:
        args, kwargs = inputs
        return first_tensor(self._block(*args, **kwargs))


def _that_count(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None or mask.shape != values.shape[:-1] else values[mask]


def first_tensor(output: Any) -> Tensor:
    """Return the output itself, or the first tensor of a tuple.

    Args:
        output: of a block.

    Returns:
        The hidden states.
    """
    found: Tensor = output if isinstance(output, Tensor) else next(one for one in output if isinstance(one, Tensor))
    return found


@contextmanager
def weights_tried(modules: Mapping[str, nn.Module], weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Let float layers compute with other weights for the duration. Changes the modules meanwhile.

    Args:
        modules: by name.
        weights: [R, C] of each.

    Yields:
        Nothing.
    """
    with ExitStack() as held:
        for name, module in modules.items():
            table: dict[str, Any] = module._parameters
            held.callback(table.__setitem__, "weight", table["weight"])
            table["weight"] = weights[name].t() if is_conv1d(module) else weights[name]
        yield


def _kept(one: Any) -> Any:
    return one.detach().to("cpu", copy=True) if isinstance(one, Tensor) else one
