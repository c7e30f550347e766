"""GPTQModifier: what to hook and when to compress; the arithmetic is in `compressor.algorithms.gptq`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from pydantic import Field, PrivateAttr, field_validator
from torch import Tensor, nn

from compressor.algorithms.gptq import GPTQSolution, Grid, activation_order, solve_gptq
from compressor.algorithms.hessian import Hessian
from compressor.algorithms.rtn import round_to_nearest
from compressor.errors import NumericsError
from compressor.lifecycle import Event, ModuleRecord, State
from compressor.lifecycle import CalibrationNeed
from compressor.modifiers.inputs import InputHessians, InputHook
from compressor.modifiers.scheme_modifier import SchemeModifier
from compressor.modifiers.scheme_targets import scheme_label
from compressor.numerics import QParams, QuantizationArgs, QuantizationScheme, weight_qparams

ActOrder = Literal["static", "weight", "group"]


class GPTQModifier(SchemeModifier):
    """Quantize with second-order error compensation (GPTQ), layer after layer.

    Attributes:
        block_size: columns between two large matrix products; speed only.
        dampening_frac: share of the mean Hessian diagonal that is added to it.
        actorder: order in which columns are rounded: by activation with groups as they lie (`static` = `weight`, the default), by
            activation with groups formed in that order (`group`), or None for the columns' own order.
        solver: `r_form` (fast, the default) or `reference` (the classical form).
        share_inputs: accumulate one Hessian for modules that read the same tensor.
    """

    block_size: int = Field(default=128, gt=0)
    dampening_frac: float = Field(default=0.01, gt=0)
    actorder: ActOrder | None = "static"
    solver: Literal["r_form", "reference"] = "r_form"
    share_inputs: bool = True

    _hessians: InputHessians = PrivateAttr(default_factory=lambda: InputHessians(share=True))

    @field_validator("actorder", mode="before")
    @classmethod
    def _none_in_words(cls, value: Any) -> Any:
        return None if value == "none" else value

    @property
    def calibration_need(self) -> CalibrationNeed:
        """Always `sequential`: each layer should see the error of those before it."""
        return "sequential"

    def _completed(self, scheme: QuantizationScheme) -> QuantizationScheme:
        scheme = super()._completed(scheme)
        assert scheme.weights is not None
        # Only grouped formats can carry the order in the file; elsewhere it changes how codes are found, not what they mean.
        if self.actorder is None or scheme.weights.strategy != "group":
            return scheme
        return scheme.model_copy(update={"weights": scheme.weights.model_copy(update={"actorder": self.actorder})})

    def on_calibration_start(self, state: State, event: Event) -> None:
        """Hook every targeted module's input."""
        super().on_calibration_start(state, event)
        self._hessians = InputHessians(share=self.share_inputs)
        for name in self._pending:
            self.watch(name, self._accumulating(state, name))

    def on_calibration_end(self, state: State, event: Event) -> None:
        """Compress what no stage contained, then let the statistics go."""
        super().on_calibration_end(state, event)
        self._hessians = InputHessians(share=self.share_inputs)

    def compress(self, state: State, names: list[str]) -> None:
        """Solve the named modules, those with one input and one format together."""
        for hessian, members in self._by_hessian(state, names):
            hessian_CC = hessian.matrix(members[0])
            for stack in _stacks(members, self._schemes):
                self._solve(state, stack, hessian_CC, hessian.num_tokens)

    def _accumulating(self, state: State, name: str) -> InputHook:
        def accumulate(module: nn.Module, args: tuple[Any, ...]) -> None:
            del module
            self._hessians.observe(name, args[0], state.token_mask)

        return accumulate

    def _by_hessian(self, state: State, names: list[str]) -> Iterator[tuple[Hessian, list[str]]]:
        left = list(names)
        while left:
            taken = self._hessians.take(left[0])
            if taken is None:
                self._round(state, left[0], "no_tokens", "no calibration token reached it")
                left = left[1:]
                continue
            hessian, members = taken
            yield hessian, members
            left = [name for name in left if name not in members]

    def _solve(self, state: State, names: list[str], hessian_CC: Tensor, num_tokens: int) -> None:
        """Quantize weights that share input and format as one stack of rows."""
        args = self._schemes[names[0]].weights
        assert args is not None
        order_C = None if self.actorder is None else activation_order(hessian_CC)
        weights = [self._pending[name].weight for name in names]
        qparams, group_C = _qparams_and_groups(weights, args, order_C, names)
        grid = _stacked_grid(qparams, group_C, args, [weight.shape[0] for weight in weights])
        try:
            solution = solve_gptq(
                torch.cat(weights) if len(weights) > 1 else weights[0],
                hessian_CC,
                grid,
                order_C=order_C,
                block_size=self.block_size,
                damp_frac=self.dampening_frac,
                solver=self.solver,
                name=" + ".join(names),
            )
        except NumericsError as error:
            if not all(bool(torch.isfinite(weight).all()) for weight in weights):
                raise
            for name in names:
                self._round(state, name, "not_positive_definite", str(error))
            return
        if solution.num_dead:
            self.fall_back(state, names[0], "dead_columns", f"{solution.num_dead} input columns are always zero; their weights become zero")
        g_idx_C = group_C if args.actorder == "group" else None
        self._place_rows(state, names, solution, qparams, g_idx_C, num_tokens)

    def _place_rows(
        self, state: State, names: list[str], solution: GPTQSolution, qparams: list[QParams], g_idx_C: Tensor | None, num_tokens: int
    ) -> None:
        start = 0
        for name, own in zip(names, qparams, strict=True):
            stop = start + self._pending[name].out_features
            args = self._schemes[name].weights
            assert args is not None
            record = ModuleRecord(
                name=name,
                modifier="GPTQModifier",
                scheme=scheme_label(args),
                error=solution.relative_error,
                num_tokens=num_tokens,
                details={"loss": float(solution.loss_R[start:stop].sum(dtype=torch.float64))},
            )
            self.place(state, name, solution.codes_RC[start:stop], own, record, g_idx_C)
            start = stop

    def _round(self, state: State, name: str, kind: str, detail: str) -> None:
        self.fall_back(state, name, kind, detail)
        args = self._schemes[name].weights
        assert args is not None
        weight = self._pending[name].weight
        plain = args.model_copy(update={"actorder": None})
        qparams = weight_qparams(weight, plain, name)
        rounded = round_to_nearest(weight, qparams, plain)
        record = ModuleRecord(name, "GPTQModifier (rounded)", scheme_label(args), rounded.relative_error, None, {"fallback": kind})
        self.place(state, name, rounded.codes_RC, qparams, record)


def _stacks(names: list[str], schemes: dict[str, QuantizationScheme]) -> list[list[str]]:
    """Split modules with one input by weight format: only equal formats can be solved as one stack of rows."""
    stacks: list[list[str]] = []
    for name in names:
        for stack in stacks:
            if schemes[stack[0]].weights == schemes[name].weights:
                stack.append(name)
                break
        else:
            stacks.append([name])
    return stacks


def _qparams_and_groups(
    weights: list[Tensor], args: QuantizationArgs, order_C: Tensor | None, names: list[str]
) -> tuple[list[QParams], Tensor]:
    """Return scales per weight and the group of each column; under `group` order, groups are formed after sorting the columns."""
    columns = weights[0].shape[1]
    size = args.group_size if args.strategy == "group" and args.group_size else columns
    group_C = torch.arange(columns, device=weights[0].device) // size
    if args.actorder == "group" and order_C is not None:
        weights = [weight.index_select(1, order_C) for weight in weights]
        sorted_group_C, group_C = group_C, torch.empty_like(group_C)
        group_C[order_C] = sorted_group_C
    return [weight_qparams(weight, args, name) for weight, name in zip(weights, names, strict=True)], group_C


def _stacked_grid(qparams: list[QParams], group_C: Tensor, args: QuantizationArgs, rows: list[int]) -> Grid:
    """Spread scales of any strategy over [rows, groups] and stack them."""

    def stacked(tensors: list[Tensor]) -> Tensor:
        return torch.cat([t.reshape(-1, t.shape[-1]).expand(num, -1) for t, num in zip(tensors, rows, strict=True)])

    zeros = [own.zero_point for own in qparams if own.zero_point is not None]
    return Grid(stacked([own.scale for own in qparams]), stacked(zeros) if zeros else None, group_C, args)
