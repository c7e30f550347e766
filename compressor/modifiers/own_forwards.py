"""Forwards that a modifier runs by itself, on the model as it stands, before the stages of a calibration begin."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compressor.data import CalibrationData, batch_to
from compressor.data.collate import call_model
from compressor.errors import CalibrationError
from compressor.lifecycle import State
from compressor.lifecycle.hooks import without_modifier_hooks
from compressor.lifecycle.padding import check_padding
from compressor.model.evaluation import evaluation_mode
from compressor.modifiers.schemes.input_statistics import input_of, own_sequences
from compressor.numerics.part_sums import PartSum
from compressor.tracing.footprint import Footprint

Watcher = Callable[[Tensor, int], None]  # takes tokens, and the part of the samples that they are in


class MeanSquare:
    """Mean of x^2 of each input column, over calibration tokens."""

    def __init__(self) -> None:
        """Start at zero tokens."""
        self.sums, self.num_tokens = PartSum(), 0

    def add(self, tokens_NC: Tensor, part: int) -> None:
        """Add tokens, [N, C], of a part of the samples."""
        added_C = tokens_NC.detach().float().square().sum(0, dtype=torch.float64)
        self.sums.of_part(part, lambda: [torch.zeros_like(added_C)])[0].add_(added_C)
        self.num_tokens += len(tokens_NC)

    def value(self) -> Tensor:
        """Return [C] float32; some token must have been seen."""
        found = self.sums.total()
        assert found is not None
        return (found[0] / self.num_tokens).float()


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
    state.ranks.add_up([square.sums for square in squares.values()], [None] * len(squares))
    counts = state.ranks.gather({name: square.num_tokens for name, square in squares.items()})
    for name, square in squares.items():
        square.num_tokens = sum(own[name] for own in counts)
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


def show_inputs(state: State, watchers: Sequence[tuple[str, Watcher]], title: str) -> None:
    """Run all batches, and show what modules are handed, without padding. The model is the same afterwards.

    Args:
        state: of the run, with data.
        watchers: dotted module names, each with what takes its inputs of real tokens, [N, C] of one sequence, one at least, and
            the part of the samples that it is in.
        title: of the bar.

    Raises:
        CalibrationError: the run has no data.
    """

    def watched(stack: ExitStack) -> None:
        for name, watch in watchers:
            module = state.model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(_hook(state, name, watch), with_kwargs=True).remove)

    run_batches(state, [name for name, _ in watchers], watched, title)


def run_batches(state: State, names: Collection[str], watch: Callable[[ExitStack], None], title: str, *, everywhere: bool = False) -> None:
    """Run batches under hooks of the caller: those of this rank. The model is the same afterwards.

    Args:
        state: of the run, with data; it says of each batch what is padding.
        names: dotted names of the modules whose inputs are looked at.
        watch: registers the hooks, and what removes them.
        title: of the bar.
        everywhere: each rank runs all batches, for statistics that cannot be added up.

    Raises:
        CalibrationError: the run has no data, or the rows of an input are not the tokens of a padded batch.
    """
    data = calibration_data(state, title)
    with ExitStack() as stack:
        stack.enter_context(without_modifier_hooks(state.model))
        stack.enter_context(evaluation_mode(state.model))
        stack.enter_context(Footprint(state.model))
        numbers = range(len(data.batches)) if everywhere else state.own_batches(data)
        task = stack.enter_context(state.progress.task(title, total=len(numbers)))
        stack.enter_context(torch.no_grad())
        check_padding(state, data, names)
        watch(stack)
        for index in numbers:
            state.ranks.check()
            with _masked(state, index):
                call_model(state.model, batch_to(data.batches[index], state.device))
            task.advance()


def _hook(state: State, name: str, watch: Watcher) -> Any:
    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        for part, tokens_NK in own_sequences(state, input_of(args, kwargs, name).detach(), name):
            if len(tokens_NK):
                watch(tokens_NK, part)

    return look


@contextmanager
def _masked(state: State, index: int) -> Iterator[None]:
    """Say which tokens of a batch are real while it runs. Changes the state."""
    assert state.data is not None
    state.enter_batch(state.data, index)
    try:
        yield
    finally:
        state.leave_batch()
