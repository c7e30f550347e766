"""Magnitude pruning in training and in one shot; the arithmetic is in `compressor.algorithms.pruning`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator
from torch import Tensor, nn

from compressor.algorithms.pruning.magnitude import Blocks, Pattern, num_zeros, pruned_weights
from compressor.algorithms.pruning.schedule import DEFAULT_EXPONENT, SCHEDULES, SparsitySchedule
from compressor.errors import RecipeError, SchemeError
from compressor.lifecycle import Event, EventType, State
from compressor.lifecycle.interface import AcrossRanks
from compressor.modifiers.pruning.masks import PruningModifier, weight_rows
from compressor.spelling import suggest

# Structures in which weights go together, by the names that llm-compressor gives them: its channels are rows of the weight, its filters
# columns.
_BLOCKS = {"channel": Blocks(1, None), "filter": Blocks(None, 1)}


class ConstantPruningModifier(PruningModifier):
    """Keep the weights at zero that are zero when it starts: for training a model that is sparse already."""

    def on_start(self, state: State, event: Event) -> None:
        """Take note of the zeros."""
        del state, event
        self.begin()
        for mask, weight in zip(self._pruned.values(), self.weights(), strict=True):
            mask.copy_(weight == 0)

    def on_calibration_start(self, state: State, event: Event) -> None:
        """Without a training before, take note of the zeros here, whatever `start` says: what comes out is reported."""
        if self.start is None or not event.step:
            self.on_start(state, event)

    def scheme_label(self) -> str:
        """Return in words what targeted modules get."""
        return "zeros kept"


class MagnitudePruningModifier(PruningModifier):
    """Set the smallest weights to zero: step by step between `start` and `end`, or at once in oneshot.

    In training, the masks follow the schedule at the first batch of each `update` interval, and reach `final_sparsity` at `end`. In oneshot
    there are no steps: `start`, `end` and `update` are left out, and weights go before any calibration data flows.

    Attributes:
        init_sparsity: share of zeros at the start.
        final_sparsity: share of zeros at the end.
        update_scheduler: `linear`, `cubic`, `polynomial` or `polynomial_decay`; see `compressor.algorithms.pruning.schedule`.
        scheduler_args: `exponent` of the polynomials, 2 by default; the other schedules take none.
        mask_structure: `unstructured`; `N:M`: N of every M neighbours in a row stay, such as `2:4`; or what goes as a whole: `channel` (a
            row of the weight, all that makes one output), `filter` (a column, all that reads one input), `block_R,C` (R rows, C columns).
        leave_enabled: keep the weights at zero after `end`, until the training is over; else they may grow again.
        apply_globally: one share over all targets together, in place of the same share in each.
    """

    across_ranks: ClassVar[AcrossRanks | None] = "repeats"

    init_sparsity: float = Field(default=0.0, ge=0, lt=1)
    final_sparsity: float = Field(gt=0, lt=1)
    update_scheduler: str = "cubic"
    scheduler_args: dict[str, float] = Field(default_factory=dict)
    mask_structure: str = "unstructured"
    leave_enabled: bool = False
    apply_globally: bool = False

    _sparsity: float = PrivateAttr(default=0.0)

    @field_validator("update_scheduler", mode="after")
    @classmethod
    def _check_scheduler(cls, value: str) -> str:
        if value not in SCHEDULES:
            raise RecipeError(f"update_scheduler={value!r} does not exist; {suggest(value, SCHEDULES)}")
        return value

    @field_validator("scheduler_args", mode="after")
    @classmethod
    def _check_arguments(cls, value: Mapping[str, float]) -> Mapping[str, float]:
        unknown = sorted(value.keys() - {"exponent"})
        if unknown:
            raise RecipeError(f"scheduler_args: {unknown[0]!r} does not exist; {suggest(unknown[0], ['exponent'])}")
        if value.get("exponent", 1.0) <= 0:
            raise RecipeError(f"scheduler_args: exponent={value['exponent']} is not positive; give for example 2")
        return value

    @field_validator("mask_structure", mode="before")
    @classmethod
    def _check_structure(cls, value: Any) -> Any:
        if isinstance(value, int):
            raise RecipeError(f"mask_structure={value} is a number: YAML reads 2:4 as 2 * 60 + 4; put it in quotes, '2:4'")
        if isinstance(value, str):
            structure_of(value)
        return value

    @model_validator(mode="after")
    def _check_sparsities(self) -> Self:
        if self.init_sparsity > self.final_sparsity:
            raise RecipeError(
                f"init_sparsity={self.init_sparsity} is above final_sparsity={self.final_sparsity}, and zeros do not come back; give less"
            )
        pattern = self.structure
        if isinstance(pattern, Blocks) and self.apply_globally:
            raise RecipeError(
                f"mask_structure={self.mask_structure!r}: with apply_globally blocks of different sizes would be compared; "
                "leave one of the two out"
            )
        if isinstance(pattern, Pattern) and abs(self.final_sparsity - pattern.sparsity) > 1e-9:
            raise RecipeError(
                f"final_sparsity={self.final_sparsity} is not that of mask_structure={self.mask_structure!r}, of which {pattern.keep} of "
                f"{pattern.of} weights stay; give final_sparsity={pattern.sparsity:g}"
            )
        return self

    @model_validator(mode="after")
    def _check_exponent(self) -> Self:
        exponent = self.scheduler_args.get("exponent")
        if exponent is None or self.update_scheduler.startswith("polynomial") or (self.update_scheduler == "cubic" and exponent == 3):
            return self
        raise RecipeError(f"scheduler_args: update_scheduler={self.update_scheduler!r} takes no exponent={exponent}; give polynomial_decay")

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if (self.start is None) != (self.end is None):
            raise RecipeError(
                f"start={self.start} and end={self.end} do not say when sparsity grows; give both for training, or neither for oneshot"
            )
        if self.end is not None and self.end <= 0:
            raise RecipeError(f"end={self.end:g} lies before the first step, so it would never begin; give a larger end")
        if self.start is not None and self.start < 0:
            raise RecipeError(f"start={self.start:g} lies before the first step, so a part of the schedule would never run; give 0 or more")
        if self.update == 0:
            raise RecipeError("update=0 is no interval; give more than 0, or leave update out: masks then follow at every batch")
        for name in ("update", "init_sparsity", "update_scheduler", "scheduler_args", "leave_enabled"):
            value = getattr(self, name)
            if self.start is None and value != type(self).model_fields[name].get_default(call_default_factory=True):
                raise RecipeError(f"{name}={value} is for training, which needs a start; give start and end, or leave {name} out")
        return self

    def check_oneshot(self) -> list[str]:
        """Refuse a schedule: sparsity would not grow along it."""
        if self.start is not None:
            raise RecipeError(
                f"{self.label}: start={self.start} and end={self.end} count the steps of a training, and this is a calibration; "
                "leave start, end and update out"
            )
        return []

    @property
    def phase(self) -> tuple[float, float]:
        """From `start` to `end`, or on to the end of the training where the zeros are to stay; without a start, the whole run."""
        if self.start is None or self.end is None:
            return -math.inf, math.inf
        return self.start, math.inf if self.leave_enabled else self.end

    @property
    def structure(self) -> Pattern | Blocks | None:
        """Which weights may go, and which go together; None for any."""
        return structure_of(self.mask_structure)

    @property
    def keeps_on(self) -> bool:
        """Whether the masks count behind `end`, too."""
        return self.leave_enabled

    @property
    def wanted_sparsity(self) -> float:
        """The share of zeros that a finished run should have."""
        return self.final_sparsity

    def num_wanted(self, weight: Tensor) -> int:
        """Say how many weights of a module should be zero when a run is finished.

        Args:
            weight: as `weights` gives it.

        Returns:
            Their number: of blocks, the weights in whole ones.
        """
        blocks = self.structure
        if not isinstance(blocks, Blocks):
            return super().num_wanted(weight)
        count = blocks.count(weight.shape)
        return num_zeros(self.final_sparsity, count) * (weight.numel() // count)

    @property
    def why_fewer(self) -> str:
        """Why less is zero at the end than was wanted, and what to do."""
        if self.end is not None and self._sparsity < self.final_sparsity:
            return f"the run was over before end={self.end:g}: give a smaller end, or a longer run"
        return super().why_fewer

    @property
    def sparsity(self) -> float:
        """The share of zeros that the present masks were made for."""
        return self._sparsity

    def scheme_label(self) -> str:
        """Return in words what targeted modules get."""
        where = " of all together" if self.apply_globally else ""
        share = f"{self.final_sparsity:.4%}".rstrip("0%").rstrip(".")
        return f"{self.mask_structure}, {share}% zeros{where}"

    def prunable(self, model: nn.Module) -> dict[str, nn.Module]:
        """Find the modules whose weights are pruned; see PruningModifier.

        Args:
            model: on any device; not modified.

        Returns:
            Dotted name to module.

        Raises:
            SchemeError: weights do not divide into runs or blocks of the structure (all such modules are named).
        """
        found = super().prunable(model)
        pattern = self.structure
        if pattern is None:
            return found
        shapes = {name: tuple(weight_rows(module).shape) for name, module in found.items()}
        if isinstance(pattern, Blocks):
            bad = [f"{name} {list(shape)}" for name, shape in shapes.items() if not pattern.fit(shape)]
            if bad:
                raise SchemeError(
                    f"{len(bad)} modules: the weights of {', '.join(bad)} do not divide into {self.mask_structure}; add them to ignore"
                )
            return found
        bad = [f"{name} {list(shape)}" for name, shape in shapes.items() if len(shape) != 2 or shape[1] % pattern.of]
        if bad:
            raise SchemeError(
                f"{len(bad)} modules: the rows of {', '.join(bad)} do not divide into runs of {pattern.of} for {self.mask_structure}; "
                "add them to ignore"
            )
        return found

    def on_update(self, state: State, event: Event) -> None:
        """Follow the schedule, outside of the step."""
        if event.type is EventType.BATCH_START and self._active:
            self._prune(self._schedule().at(event.index))

    def on_end(self, state: State, event: Event) -> None:
        """Reach the final sparsity; with the next step the weights go free, unless they are to stay."""
        del state, event
        self._prune(self.final_sparsity)

    def on_calibration_start(self, state: State, event: Event) -> None:
        """Prune at once, before any data flows."""
        if self.started and event.step:  # by a training that came before
            return
        self.check_oneshot()
        self.on_start(state, event)
        self._prune(self.final_sparsity)

    def _prune(self, sparsity: float) -> None:
        names, structure = list(self._modules), self.structure
        masks = pruned_weights(self.weights(), sparsity, structure, together=self.apply_globally, names=names)
        self.write_masks(masks)
        self._sparsity = sparsity

    def _schedule(self) -> SparsitySchedule:
        start = self.start or 0.0
        end = start + 1 if self.end is None else self.end  # which no recipe can leave out
        exponent = self.scheduler_args.get("exponent", DEFAULT_EXPONENT)
        return SparsitySchedule(self.update_scheduler, self.init_sparsity, self.final_sparsity, start, end, exponent)


def structure_of(text: str) -> Pattern | Blocks | None:
    """Read a mask structure.

    Args:
        text: `unstructured`, N:M, `channel`, `filter`, or `block_R,C`.

    Returns:
        None for `unstructured`.

    Raises:
        RecipeError: it is none of them.
    """
    sizes = re.fullmatch(r"block_(\d+),(\d+)", text)
    if sizes is not None and int(sizes[1]) and int(sizes[2]):
        return Blocks(int(sizes[1]), int(sizes[2]))
    if text.startswith("block"):
        raise RecipeError(f"mask_structure={text!r} does not say two sizes; give rows and columns, such as 'block_4,1'")
    return _BLOCKS[text] if text in _BLOCKS else pattern_of(text)


def pattern_of(structure: str) -> Pattern | None:
    """Read a mask structure in which each weight goes by itself.

    Args:
        structure: `unstructured`, or N:M.

    Returns:
        None for `unstructured`.

    Raises:
        RecipeError: it is neither.
    """
    if structure == "unstructured":
        return None
    numbers = re.fullmatch(r"(\d+):(\d+)", structure)
    if numbers is None:
        whole = structure in _BLOCKS or structure.startswith("block_")
        why = "is for MagnitudePruningModifier: here each weight goes by itself" if whole else "does not exist"
        raise RecipeError(f"mask_structure={structure!r} {why}; give unstructured, or N:M such as '2:4'")
    keep, of = int(numbers[1]), int(numbers[2])
    if not 0 < keep < of:
        raise RecipeError(f"mask_structure={structure!r} leaves all weights or none; give N:M with 0 < N < M, such as '2:4'")
    return Pattern(keep, of)
