"""SparseGPTModifier: zeros whose loss the kept weights make good; the arithmetic is in `compressor.algorithms.pruning.sparsegpt`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compressor.algorithms.costs import Cost, sparsegpt_cost
from compressor.algorithms.pruning.sparsegpt import prune_sparsegpt
from compressor.errors import NumericsError, RecipeError
from compressor.lifecycle import BaseStream, CalibrationNeed, Event, FinishedStage, State
from compressor.lifecycle.interface import AcrossRanks
from compressor.lifecycle.state import StageValue
from compressor.modifiers.fallbacks import kept_number
from compressor.modifiers.own_forwards import mean_squares
from compressor.modifiers.pruning.calibrated import CalibratedPruningModifier, dead_input
from compressor.modifiers.pruning.masks import weight_rows
from compressor.modifiers.schemes.hessians import HessianHooks, SharedInput, Target, join_hessians
from compressor.modifiers.schemes.input_statistics import InputHook, input_of
from compressor.numerics import QuantizationScheme


@dataclass(frozen=True)
class Solved:
    """What becomes of one weight, whoever has found it.

    Attributes:
        name: dotted module name.
        weight_RC: [R, C]; None where it is to be pruned by size.
        error: relative squared error of the outputs.
        is_shifted: moved towards what the uncompressed model gives.
        fallback: why it is pruned by size, as `prune_by_size` takes it.
    """

    name: str
    weight_RC: Tensor | None = None
    error: float = 0.0
    is_shifted: bool = False
    fallback: Sequence[str] = ()


class SparseGPTModifier(CalibratedPruningModifier):
    """Set to zero the weights that the others can make good, layer after layer (SparseGPT).

    Attributes:
        block_size: columns of which the zeros are chosen at once.
        dampening_frac: share of the mean Hessian diagonal that is added to it.
        preserve_sparsity_mask: weights that are zero already stay zero, and count.
        refining_steps: of conjugate gradients that move the kept weights towards their best; 0: the classical algorithm.
        target: what the outputs of a module should be: those of the module as it was, on the inputs that the compressed model gives
            (`propagated`), or on those of the uncompressed model (`base`), which then runs beside the other where layers run once.
        alpha: how far towards `base` weights are moved before they are pruned.
        share_inputs: accumulate one Hessian for modules that read the same tensor.
    """

    across_ranks: ClassVar[AcrossRanks | None] = "sums"
    calibration: ClassVar[CalibrationNeed] = "sequential"

    block_size: int = Field(default=128, gt=0)
    dampening_frac: float = Field(default=0.01, gt=0, le=1)
    preserve_sparsity_mask: bool = False
    refining_steps: int = Field(default=8, ge=0)
    target: Target | None = None
    alpha: float = Field(default=1.0, gt=0, le=1)
    share_inputs: bool = True
    offload_hessians: bool | None = None  # of llm-compressor; where they lie changes no result

    _statistics: HessianHooks = PrivateAttr(default_factory=HessianHooks)
    _handles_of: dict[str, list[RemovableHandle]] = PrivateAttr(default_factory=dict)

    @property
    def base_stream(self) -> BaseStream:
        """`required` with `target="base"`; left to us, wanted."""
        return "wanted" if self.target is None else "required" if self.target == "base" else "unused"

    def base_stream_for(self, schemes: Iterable[QuantizationScheme]) -> BaseStream:
        """The same whatever the schemes, for formats play no part in pruning."""
        del schemes
        return self.base_stream

    def cost(
        self,
        scheme: QuantizationScheme | None,
        rows: Sequence[int],
        columns: int,
        element_bytes: int,
        num_tokens: int,
        has_base_stream: bool = False,
    ) -> Cost:
        """What SparseGPT costs: Hessian, factor and column loop of a stack of weights."""
        del scheme
        return sparsegpt_cost(
            rows,
            columns,
            element_bytes,
            num_tokens=num_tokens,
            block_size=self.block_size,
            refining_steps=self.refining_steps,
            has_base_stream=has_base_stream and self.base_stream != "unused",
        )

    def on_initialize(self, state: State) -> bool:
        """Find the weights; refuse those that a modifier before it will have quantized when their stage has been calibrated."""
        done = super().on_initialize(state)
        first = next((name for name in self._modules if name in state.schemes), None)
        if first is not None:
            raise RecipeError(
                f"{self.label}: {first} is quantized by {state.claims.get(first, 'a modifier')} before it is pruned; let this one stand "
                "before those that quantize"
            )
        return done

    def on_calibration_start(self, state: State, event: Event) -> None:
        """Look for outliers, where shares depend on them; then watch every input."""
        del event
        self._statistics, self._handles_of = HessianHooks(share=self.share_inputs, has_base=self.base_stream != "unused"), {}
        if self.sparsity_profile is not None and state.data is not None:
            self.share_by_outliers(state, mean_squares(state, self._modules, type(self).__name__))
        for name in self._pending:
            self._watch(name, self._statistics.accumulating(state, name))

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        """Prune the modules of the stage that has just been calibrated."""
        self._prune_pending(state, event.modules)

    def on_calibration_end(self, state: State, event: Event) -> None:
        """Prune what no stage contained, then let the statistics go."""
        del event
        self._prune_pending(state, tuple(self._pending))
        state.report.notes += self._statistics.notes(self.label, state.ranks)
        self._statistics = HessianHooks()

    def stage_memory(self, modules: Sequence[str]) -> dict[str, StageValue]:
        """The fallbacks so far, and the shares of zeros."""
        return {**self.fallbacks_so_far(), **{name: self._zeros[name] for name in modules if name in self._zeros}}

    def skip_stage(self, state: State, stage: FinishedStage) -> None:
        """Forget the modules of a stage that an earlier run has finished; their weights come back with the stage."""
        del state
        for name in [name for name in stage.modules if name in self._pending]:
            self.remove_hooks(self._handles_of.pop(name, []))
            del self._pending[name]
            self._zeros[name] = kept_number(stage.memory, name)
        self.restore_fallbacks(stage.memory)

    def _watch(self, name: str, hook: InputHook) -> None:
        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            del module
            hook(input_of(args, kwargs, name))

        self._handles_of.setdefault(name, []).append(self.register_hook(self._pending[name], look, "forward_pre", with_kwargs=True))

    def _prune_pending(self, state: State, modules: Iterable[str]) -> None:
        names = [name for name in modules if name in self._pending]
        if names:
            self.remove_hooks([handle for name in names for handle in self._handles_of.pop(name, [])])
            with torch.no_grad():
                self.prune(state, names)

    def prune(self, state: State, names: list[str]) -> None:
        """Prune modules of one stage, those with one input together. Changes the model.

        Args:
            state: of the run.
            names: dotted module names.
        """
        inputs = self._statistics.hessians.take_all(names, state.ranks)
        owners = state.ranks.share_out([self._flops(one) for one in inputs])
        join_hessians(state.ranks, [one.hessian for one in inputs], owners)
        for shared, solved in zip(inputs, state.ranks.solved(owners, lambda place: self._solve(inputs[place]), (Solved,)), strict=True):
            for own in solved:
                if own.weight_RC is None:
                    self.prune_by_size(state, own.name, *own.fallback)
                    continue
                if own.is_shifted:
                    state.settled_to_base.add(own.name)
                self.place(state, own.name, own.weight_RC, own.error, shared.hessian.num_tokens, {"kept": "moved"})

    def _flops(self, shared: SharedInput) -> float:
        weights = [weight_rows(self._pending[name]) for name in shared.members]
        rows = [len(weight) for weight in weights]
        return self.cost(None, rows, weights[0].shape[1], 4, 0).flops if shared.hessian.num_tokens else 0.0

    def _solve(self, shared: SharedInput) -> list[Solved]:
        """Prune modules that share an input, those with one share of zeros together."""
        names, hessian = shared
        if hessian.num_tokens == 0:
            return [Solved(name) for name in names]
        shift_CC = hessian.shift(self.alpha)
        hessian_CC = hessian.matrix(names[0])
        if not hessian_CC.diagonal().any():
            return [Solved(name, fallback=dead_input(hessian.num_tokens)) for name in names]
        shares = dict.fromkeys(self.share_of(name) for name in names)
        stacks = {share: [name for name in names if self.share_of(name) == share] for share in shares}
        return [solved for share, stack in stacks.items() for solved in self._solve_stack(stack, share, hessian_CC, shift_CC)]

    def _solve_stack(self, names: list[str], share: float, hessian_CC: Tensor, shift_CC: Tensor | None) -> list[Solved]:
        try:
            solved = prune_sparsegpt(
                [weight_rows(self._pending[name]) for name in names],
                hessian_CC,
                share,
                self.structure,
                shift_CC=shift_CC,
                block_size=self.block_size,
                damp_frac=self.dampening_frac,
                keep_zeros=self.preserve_sparsity_mask,
                refining_steps=self.refining_steps,
                names=names,
            )
        except NumericsError as error:
            text = str(error).removeprefix(f"{' + '.join(names)}: ")
            return [Solved(name, fallback=("not_positive_definite", text)) for name in names]
        return [Solved(name, own.weight_RC, own.relative_error, shift_CC is not None) for name, own in zip(names, solved, strict=True)]
