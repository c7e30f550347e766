"""QuIPModifier: the weight of every layer is turned on both sides, so that no entry stands out (QuIP, arXiv 2307.13304; QuIP#, 2402.04396).

A layer computes x W^T = ((x V) (U^T W V)^T) U^T. What stands in the middle is rounded; x V (v) and the product with U^T (u) are computed in
every forward. Nothing has to be known of the model: each layer takes back what was done to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator
from torch import nn

from compressor.algorithms.rotations import RotationKind
from compressor.errors import RecipeError, TargetError
from compressor.lifecycle import CalibrationNeed, Event, ModuleRecord, State
from compressor.lifecycle.hooks import without_modifier_hooks
from compressor.mappings.probe import tied_modules
from compressor.mappings.turns import Turn
from compressor.model.evaluation import evaluation_mode
from compressor.model.targets import check_patterns, resolve_layers
from compressor.modifiers.transforms.other_batches import OtherBatches, outputs_of_model
from compressor.modifiers.transforms.rotating import RotatingModifier, as_record, bytes_of_sizes
from compressor.nn import weight_of
from compressor.nn.build import is_quantizable


class QuIPModifier(RotatingModifier):
    """Turn the weights of layers before they are quantized.

    Attributes:
        rotations: v, inputs; u, outputs.
        targets: patterns of linear layers.
        ignore: patterns of layers that stay.
    """

    rotations: list[Literal["v", "u"]] = Field(default=["v"])
    transform_type: RotationKind = "random-hadamard"
    targets: list[str] = Field(default=["Linear"])
    ignore: list[str] = Field(default=["re:.*lm_head$"])
    learnable: bool = False

    _names: tuple[str, ...] = PrivateAttr(default=())

    @field_validator("targets", "ignore", mode="before")
    @classmethod
    def _patterns(cls, value: Any, info: ValidationInfo) -> Any:
        patterns = [value] if isinstance(value, str) else value
        check_patterns(patterns, required=info.field_name == "targets")
        return patterns

    @field_validator("randomize", "learnable", mode="after")
    @classmethod
    def _is_off(cls, value: bool) -> bool:
        if value:
            raise RecipeError("randomize, learnable: all layers of a size share one rotation, which is drawn, not learned; leave both out")
        return value

    @property
    def calibration_need(self) -> CalibrationNeed:
        """None: weights alone are looked at."""
        return "none"

    def on_initialize(self, state: State) -> bool:
        """Find the layers, and refuse what is quantized already."""
        super().on_initialize(state)
        self.check_has_config(state)
        self._names = tuple(resolve_layers(state.model, self.targets, self.ignore, _is_linear))
        for name in self._names:
            if not _is_linear(state.model.get_submodule(name)):
                raise TargetError(f"{self.label}: {name} is no linear layer; correct targets, or ignore it")
        tied = tied_modules(state.model)
        shared = next((name for name in self._names if name in tied), None)
        if shared is not None:
            raise TargetError(f"{self.label}: {shared} is tied to {tied[shared]}, which would be turned, too; ignore it")
        return True

    def turned_online(self, model: nn.Module) -> Iterator[tuple[str, int, str]]:
        """All layers: their inputs, their outputs, or both.

        Args:
            model: with or without values; not modified.

        Yields:
            Dotted name, number of channels, and `v` or `u`.
        """
        for name in resolve_layers(model, self.targets, self.ignore, _is_linear):
            rows, columns = weight_of(model.get_submodule(name)).shape
            yield from ((name, columns if side == "v" else rows, side) for side in self.rotations)

    def online_bytes(self, model: nn.Module) -> int:
        """As for all, inputs and outputs by themselves."""
        shapes = [weight_of(model.get_submodule(name)).shape for name in resolve_layers(model, self.targets, self.ignore, _is_linear)]
        return sum(bytes_of_sizes(self.transform_block_size or shape[side == "v"] for shape in shapes) for side in self.rotations)

    def on_calibration_start(self, state: State, event: Event) -> None:
        """Turn the weights, and see that the model computes what it did. Changes the model."""
        del event
        self._was_asked = True
        batch = self.first_batch(state)
        with without_modifier_hooks(state.model), evaluation_mode(state.model):
            before, others = outputs_of_model(state, batch), OtherBatches(state, self.label)
            turns = [turn for side in ("v", "u") if side in self.rotations for turn in self._turns(state, side)]
            self.turn_online(state, turns, batch)
            self.check_outputs(state, batch, before)
            others.check(state)
        self._report(state, turns)

    def _turns(self, state: State, side: str) -> list[Turn]:
        turns: dict[int, Turn] = {}
        common = math.gcd(*(width for _, width, _ in self.turned_online(state.model)))
        for name in self._names:
            rows, columns = weight_of(state.model.get_submodule(name)).shape
            width = columns if side == "v" else rows
            size = self.transform_block_size or width
            self.check_divides(size, width, name)
            known = turns.get(size)
            if known is None:
                known = Turn(self.rotation(size, state.seed + (side == "u"), f"{side} of {name}", width=common), (), (), side)
            turned = replace(known, readers=(*known.readers, name)) if side == "v" else replace(known, writers=(*known.writers, name))
            turns[size] = turned
        return list(turns.values())

    def _report(self, state: State, turns: Sequence[Turn]) -> None:
        state.settled.update(self._names)
        for name in self._names:
            record = ModuleRecord(name, type(self).__name__, f"turned ({self.transform_type})", 0.0, None, {})
            state.report.modules.setdefault(name, record)
        state.report.transforms.append(as_record(state.model, type(self).__name__, turns))
        state.report.notes += self.online_notes((name, turn.online) for turn in turns for name in (*turn.readers, *turn.writers))


def _is_linear(module: nn.Module) -> bool:
    return is_quantizable(module) and not isinstance(module, nn.Embedding)
