"""Blocks of a model by themselves: what they are called with, what they should give, and how far from it they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from compressor.errors import CalibrationError
from compressor.lifecycle import State
from compressor.modifiers.tuning.sequences import cut, joined
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
        """Compute the targets that are missing with the block as it is now: a forward of all calls.

        Args:
            block: uncompressed.
            calls: of it.
            device: of the model.
            name: dotted name of the block, for errors.

        Raises:
            CalibrationError: calls on the two streams do not correspond.
        """
        self._block, self._device = block, device
        if calls.targets and len(calls.targets) != len(calls.inputs):
            raise CalibrationError(
                f"{name}: {len(calls.targets)} calls in the uncompressed model and {len(calls.inputs)} in the compressed one do not "
                "correspond; use target='propagated'"
            )
        targets = calls.targets or [_kept(self._output(self._to(one))) for one in calls.inputs]
        self._pieces: list[Any] = []
        self._tokens: list[int] = []
        for inputs, target, mask, size in zip(calls.inputs, targets, calls.masks, calls.sizes, strict=True):
            rows = size[0] if target.dim() and target.shape[0] == size[0] else 1
            parts = zip(cut(inputs, rows), cut(target, rows), cut(mask, rows), strict=True)
            self._pieces += list(parts)
            self._tokens += [target[..., 0].numel() // rows] * rows

    def __len__(self) -> int:
        """How many sequences there are."""
        return len(self._pieces)

    def backward(self, numbers: Sequence[int]) -> float:
        """Sum the squared error over some sequences, and add its gradients where grad mode is on.

        Args:
            numbers: of the sequences.

        Returns:
            The sum over sequences, tokens that count, and channels.
        """
        total = 0.0
        pieces, tokens = [self._pieces[one] for one in numbers], [self._tokens[one] for one in numbers]
        for (inputs, target, mask), _ in joined(pieces, tokens):
            error = (self._output(self._to(inputs)).float() - target.to(self._device).float()).square()
            if mask is not None and mask.shape == error.shape[:-1]:
                error = error[mask.to(self._device)]
            loss = error.sum()
            total += float(loss.detach())
            if torch.is_grad_enabled():
                loss.backward()
        return total

    def _to(self, tree: Any) -> Any:
        return tree_map(lambda one: one.to(self._device) if isinstance(one, Tensor) else one, tree)

    def _output(self, inputs: Any) -> Tensor:
        args, kwargs = inputs
        return first_tensor(self._block(*args, **kwargs))


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
