"""Forwards that a modifier runs by itself, on the model as it stands, before the stages of a calibration begin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compressor.data import CalibrationData, batch_to
from compressor.data.collate import call_model, leading_tensor
from compressor.errors import CalibrationError
from compressor.lifecycle import State
from compressor.lifecycle.hooks import without_modifier_hooks
from compressor.model.evaluation import evaluation_mode
from compressor.modifiers.schemes.input_statistics import input_of, mask_of_input, real_tokens
from compressor.tracing.footprint import Footprint


class MeanSquare:
    """Mean of x^2 of each input column, over calibration tokens."""

    def __init__(self) -> None:
        """Start at zero tokens."""
        self._sum_C: Tensor | float = 0.0
        self.num_tokens = 0

    def add(self, tokens_NC: Tensor) -> None:
        """Add tokens, [N, C]."""
        self._sum_C = self._sum_C + tokens_NC.detach().float().square().sum(0, dtype=torch.float64)
        self.num_tokens += len(tokens_NC)

    def value(self) -> Tensor:
        """Return [C] float32; some token must have been seen."""
        assert isinstance(self._sum_C, Tensor)
        return (self._sum_C / self.num_tokens).float()


def mean_squares(state: State, names: Iterable[str], title: str) -> dict[str, MeanSquare]:
    """Run all batches, and look at the inputs of modules.

    Args:
        state: of the run, with data.
        names: dotted module names.
        title: of the bar.

    Returns:
        Dotted name to the mean squares; of those that no token reached they have seen none.
    """
    squares = {name: MeanSquare() for name in names}
    show_inputs(state, [(name, square.add) for name, square in squares.items()], title)
    return squares


def calibration_data(state: State, label: str) -> CalibrationData:
    """Find the data of a run.

    Args:
        state: of the run.
        label: of who asks.

    Returns:
        Its batches.

    Raises:
        CalibrationError: the run has none.
    """
    if state.data is None:
        raise CalibrationError(f"{label}: the run has no calibration data, and it runs forwards of its own; give State(data=...)")
    return state.data


def show_inputs(state: State, watchers: Iterable[tuple[str, Callable[[Tensor], None]]], title: str) -> None:
    """Run all batches, and show what modules are handed, without padding. The model is the same afterwards.

    Args:
        state: of the run, with data.
        watchers: dotted module names, each with what takes its inputs of real tokens, [N, C], one call at least.
        title: of the bar.

    Raises:
        CalibrationError: the run has no data.
    """

    def watched(stack: ExitStack) -> None:
        for name, watch in watchers:
            module = state.model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(_hook(state, name, watch), with_kwargs=True).remove)

    run_batches(state, watched, title)


def run_batches(state: State, watch: Callable[[ExitStack], None], title: str) -> None:
    """Run all batches under hooks of the caller. The model is the same afterwards.

    Args:
        state: of the run, with data; it says of each batch what is padding.
        watch: registers the hooks, and what removes them.
        title: of the bar.

    Raises:
        CalibrationError: the run has no data.
    """
    data = calibration_data(state, title)
    with ExitStack() as stack:
        stack.enter_context(without_modifier_hooks(state.model))
        stack.enter_context(evaluation_mode(state.model))
        stack.enter_context(Footprint(state.model))
        task = stack.enter_context(state.progress.task(title, total=len(data.batches)))
        stack.enter_context(torch.no_grad())
        watch(stack)
        for index, batch in enumerate(data.batches):
            with _masked(state, index):
                call_model(state.model, batch_to(batch, state.device))
            task.advance()


def _hook(state: State, name: str, watch: Callable[[Tensor], None]) -> Any:
    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        tokens_NK = real_tokens(input_of(args, kwargs, name).detach(), mask_of_input(state, name), name)
        if len(tokens_NK):
            watch(tokens_NK)

    return look


@contextmanager
def _masked(state: State, index: int) -> Iterator[None]:
    """Say which tokens of a batch are real while it runs. Changes the state."""
    assert state.data is not None
    mask = state.data.token_masks[index]
    state.token_mask = None if mask is None else mask.to(state.device)
    state.batch_shape = tuple(leading_tensor(state.data.batches[index]).shape[:2])
    try:
        yield
    finally:
        state.token_mask, state.batch_shape = None, None
