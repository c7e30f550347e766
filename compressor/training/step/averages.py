"""Exponential moving averages of weights, updated inside the step so that a replay updates them too.

Each decay is a tensor: whoever writes into it between two steps changes the next step in every mode, without a new capture. Averages of
weights in half precision are kept in float32, where a share of 0.001 does not round away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from compressor.errors import UserInputError
from compressor.settings.kinds import FLAG, MODULE, NUMBER, NUMBERS, Kind
from compressor.settings.options import checked

_HALVES = (torch.bfloat16, torch.float16)


class WeightAverages:
    """Averages of all floating-point parameters of a model: average = decay * average + (1 - decay) * weight.

    Args:
        model: the model; its weights are copied.
        decay: share of the old average that stays after a step, in (0, 1); or several, each with averages of its own.
        warmup: begin with smaller decays: at the n-th update at most (1 + n) / (10 + n), so that the first weights are soon forgotten.

    Attributes:
        decays: by the number that was given, the decay in force, a float64 tensor that may be written in place between steps.
        settle: called where weights were written; a step with modifiers sets it, so that averages stand under the same masks.

    Raises:
        UserInputError: a decay out of range, or given twice.
    """

    @checked(
        model=MODULE, decay=Kind(lambda value: NUMBER.holds(value) or NUMBERS.holds(value), "a number, or a list of numbers"), warmup=FLAG
    )
    def __init__(self, model: nn.Module, decay: float | Sequence[float] = 0.999, *, warmup: bool = False) -> None:
        given = list(decay) if isinstance(decay, Sequence) else [decay]
        if not given or len(set(given)) < len(given):
            raise UserInputError(f"WeightAverages: decay={decay} names no decay, or one twice; give each once")
        for one in given:
            if not 0 < one < 1:
                raise UserInputError(f"WeightAverages: decay={one} is not between 0 and 1; give for example 0.999")
        self.warmup, self._applied = warmup, False
        self.settle: Callable[[], None] = _nothing
        self._model = model
        weights = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
        device = next((weight.device for weight in weights.values()), torch.device("cpu"))
        self.decays = {one: torch.tensor(one, dtype=torch.float64, device=device) for one in given}
        self._updates = torch.zeros((), dtype=torch.int64, device=device)
        self._averages = {one: {name: _copy(weight) for name, weight in weights.items()} for one in given}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything that a step reads or writes and a checkpoint holds, by name."""
        return {
            "updates": self._updates,
            **{f"{one:g}:decay": tensor for one, tensor in self.decays.items()},
            **{f"{one:g}:{name}": value for one, averages in self._averages.items() for name, value in averages.items()},
        }

    @checked(decay=NUMBER)
    def weights(self, decay: float | None = None) -> Mapping[str, Tensor]:
        """Return the averages of one decay.

        Args:
            decay: as it was given; None: the first one.

        Returns:
            Name of the parameter to its average; the tensors that the steps write to.

        Raises:
            UserInputError: there are no averages of this decay.
        """
        chosen = next(iter(self._averages)) if decay is None else decay
        if chosen not in self._averages:
            raise UserInputError(
                f"WeightAverages: there are no averages of decay {chosen}; choose from {', '.join(map(str, self._averages))}"
            )
        return self._averages[chosen]

    def _weights(self) -> dict[str, nn.Parameter]:
        """The parameters that the model has now under their names: one may have been replaced."""
        now, averages = dict(self._model.named_parameters()), next(iter(self._averages.values()))
        if gone := [name for name, average in averages.items() if name not in now or now[name].shape != average.shape]:
            raise UserInputError(f"WeightAverages: {gone[0]} is gone or of another shape; make new averages of the model")
        return {name: now[name] for name in averages}

    @torch.no_grad()
    def update(self) -> None:
        """Move every average towards its weight, in place.

        Raises:
            UserInputError: the model lacks a parameter that it had, or has it in another shape.
        """
        weights = self._weights()
        self._updates.add_(1)
        for one, decay in self.decays.items():
            if self.warmup:
                decay = torch.minimum(decay, (1 + self._updates.double()) / (10 + self._updates.double()))
            share = (1 - decay).float()
            for name, average in self._averages[one].items():
                average.lerp_(weights[name].detach().to(average.dtype), share.to(average.dtype))

    @torch.no_grad()
    def copy_into_model(self, decay: float | None = None) -> None:
        """Put averages in the place of the weights for good, under the masks. Changes the model's parameters, in place.

        Args:
            decay: whose averages; None: the first one.

        Raises:
            UserInputError: there are no averages of this decay, or the model lacks a parameter that it had.
        """
        weights = self._weights()
        for name, average in self.weights(decay).items():
            weights[name].copy_(average)
        self.settle()

    def refuse_applied(self, where: str) -> None:
        """Refuse what takes the model's values for its weights while averages stand in their place.

        Args:
            where: what is refused.

        Raises:
            UserInputError: a block of `applied` is open.
        """
        if self._applied:
            raise UserInputError(f"{where}: averages stand in the place of the weights, in a block of applied(); end the block first")

    @contextmanager
    def applied(self, decay: float | None = None) -> Iterator[None]:
        """Put averages into the model while the block runs, under the masks; storages stay where they are, so that plans stay valid.

        Args:
            decay: whose averages; None: the first one.

        Yields:
            Nothing.

        Raises:
            UserInputError: they are there already.
        """
        self.refuse_applied("applied()")
        weights = self._weights()
        kept = {name: weight.detach().clone() for name, weight in weights.items()}
        self.copy_into_model(decay)
        self._applied = True
        try:
            yield
        finally:
            self._applied = False
            with torch.no_grad():
                for name, weight in weights.items():
                    weight.copy_(kept[name])
            self.settle()


def _copy(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.float32 if weight.dtype in _HALVES else weight.dtype, copy=True)


def _nothing() -> None:
    """No modifier keeps anything with the weights."""
