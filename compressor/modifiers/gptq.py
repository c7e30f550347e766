"""GPTQModifier: what to hook and when to compress; the arithmetic is in `compressor.algorithms.gptq`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PrivateAttr, field_validator, model_validator
from torch import Tensor, nn

from compressor.algorithms.babai import can_search
from compressor.algorithms.costs import Cost, gptq_cost
from compressor.algorithms.gptq import ActOrder, Solver, quantize_gptq
from compressor.algorithms.hessian import Hessian
from compressor.algorithms.rtn import round_to_nearest
from compressor.errors import NumericsError, RecipeError, SchemeError
from compressor.lifecycle import BaseStream, CalibrationNeed, Event, Modifier, ModuleRecord, State
from compressor.lifecycle.interface import AcrossRanks
from compressor.model.folder import some
from compressor.modifiers.scale_tuning import ScaleTuningModifier
from compressor.modifiers.schemes.base import SchemeModifier
from compressor.modifiers.schemes.hessians import HessianHooks, SharedInput, Target, join_hessians
from compressor.modifiers.schemes.targets import scheme_label
from compressor.nn import weight_of
from compressor.nn.experts import Expert
from compressor.numerics import QParams, QuantizationArgs, QuantizationScheme, weight_qparams

Mode = Literal["fast", "default", "best"]

_FEW_BITS = 4  # of a weight: with more, what compression changes is too little to be worth another forward
_SPARSE = 0.05  # share of zeros from which on somebody has put them there
# 20 ranges in place of the observer's 111: the same KL (0.823 of minmax, either) in a sixth of the time.
_FLOAT_SEARCH = MappingProxyType({"grid": 36})
_DEAD = "dead_columns"  # in the details of a module's record


@dataclass(frozen=True)
class Solved:
    """What is to be put in a module's place, whoever has found it.

    Attributes:
        name: dotted module name.
        codes_RC: [R, C].
        qparams: of the weight.
        record: for the report.
        g_idx_C: [C] group of each column, where columns were reordered into groups.
        fallback: kind of fallback and what happened, where the module was only rounded.
    """

    name: str
    codes_RC: Tensor
    qparams: QParams
    record: ModuleRecord
    g_idx_C: Tensor | None = None
    fallback: tuple[str, str] | None = None


class GPTQModifier(SchemeModifier):
    """Quantize with second-order error compensation (GPTQ), layer after layer.

    Attributes:
        block_size: columns between two large matrix products; speed only.
        dampening_frac: share of the mean Hessian diagonal that is added to it.
        actorder: order in which columns are rounded: by activation with groups as they lie (`static` = `weight`, the default), by
            activation with groups formed in that order (`group`), or None for the columns' own order.
        solver: `r_form` (fast, the default) or `reference` (the classical form).
        scale_search: choose the scale of each integer group by the error of GPTQ itself, around the observed one; by default with
            `r_form` only, so that `reference` stays the classical algorithm.
        share_inputs: accumulate one Hessian for modules that read the same tensor.
        target: what the outputs of a module should be: those of the module as it was, on the inputs that the compressed model gives
            (`propagated`), or on those of the uncompressed model (`base`), which then runs beside the other. By default `base` where layers
            run once and one of the modifier's weights has at most 4 bits: then the others have it for nothing.
        alpha: how far towards `base` weights are moved before they are rounded.
        preserve_sparsity_mask: weights that are zero stay zero; by default those of modules that a modifier before it prunes, or of which
            5 % or more are zero already.
        mode: how much time its accuracy is worth, in a word: `fast` leaves the uncompressed model out, `default` has it run beside the
            other, `best` trains scales afterwards, too (see ScaleTuningModifier). What is set by itself comes first.
    """

    across_ranks: ClassVar[AcrossRanks | None] = "sums"
    borrows: ClassVar[bool] = True
    takes_embeddings: ClassVar[bool] = False
    takes_order: ClassVar[bool] = True

    block_size: int = Field(default=128, gt=0)
    dampening_frac: float = Field(default=0.01, gt=0, le=1)
    actorder: ActOrder | None = "static"
    solver: Solver = "r_form"
    scale_search: bool | None = None
    share_inputs: bool = True
    target: Target | None = None
    alpha: float = Field(default=1.0, gt=0, le=1)
    preserve_sparsity_mask: bool | None = None
    mode: Mode = "default"

    _statistics: HessianHooks = PrivateAttr(default_factory=HessianHooks)

    @field_validator("actorder", mode="before")
    @classmethod
    def _none_in_words(cls, value: Any) -> Any:
        return None if value == "none" else value

    @model_validator(mode="after")
    def _alpha_has_a_use(self) -> GPTQModifier:
        if self.target == "propagated" and self.alpha != 1.0:
            raise ValueError(f"alpha={self.alpha} moves nothing with target='propagated'; leave one of them out")
        return self

    def on_initialize(self, state: State) -> bool:
        """Refuse what would change nothing for these formats."""
        done = super().on_initialize(state)
        formats = [scheme.weights for scheme in self._schemes.values() if scheme.weights is not None]
        if self.scale_search and formats and not any(can_search(args) or self._observed(args) is not args for args in formats):
            raise SchemeError(
                f"{self.label}: scale_search=True was given, and {scheme_label(formats[0])} has no scales that are searched; leave it out"
            )
        if self.alpha != 1.0 and self.base_stream == "unused":
            raise RecipeError(
                f"{self.label}: alpha={self.alpha} moves nothing, since target is 'propagated' in mode 'fast' and for more than "
                f"{_FEW_BITS} bits; give target='base', or leave it out"
            )
        return done

    @property
    def base_stream(self) -> BaseStream:
        """`required` with `target="base"`; left to us, wanted where one of the weights has at most 4 bits."""
        return self.base_stream_for(self._schemes.values())

    def base_stream_for(self, schemes: Iterable[QuantizationScheme]) -> BaseStream:
        """Say what `base_stream` will be once the modifier is initialized with these schemes."""
        if self.target is not None:
            return "required" if self.target == "base" else "unused"
        if self.mode == "fast":
            return "unused"
        bits = [scheme.weights.num_bits for scheme in schemes if scheme.weights is not None]
        return "wanted" if min(bits, default=16) <= _FEW_BITS else "unused"

    def followers(self) -> list[Modifier]:
        """Tuning of the scales, with `mode="best"`."""
        return [ScaleTuningModifier()] if self.mode == "best" else []

    @property
    def calibration_need(self) -> CalibrationNeed:
        """Always `sequential`: each layer should see the error of those before it."""
        return "sequential"

    def _completed(self, scheme: QuantizationScheme) -> QuantizationScheme:
        scheme = super()._completed(scheme)
        weights = scheme.weights
        assert weights is not None
        order = self.actorder
        if weights.actorder is not None and _same_order(weights.actorder) != _same_order(order):
            if "actorder" in self.model_fields_set:
                raise SchemeError(f"actorder: {order!r} was given beside actorder={weights.actorder!r} in a group; leave one of them out")
            order = weights.actorder
        if order == "group" and (weights.strategy, scheme.compression_format) != ("group", "pack-quantized"):
            raise SchemeError(
                "actorder='group' stores the group of each column, for which there is room beside integers in groups alone "
                f"(pack-quantized); those of {scheme.targets} are {scheme.compression_format} with strategy={weights.strategy!r}; use "
                "actorder='static'"
            )
        # Only grouped formats can carry the order in the file; elsewhere it changes how codes are found, not what they mean.
        if weights.strategy != "group" or order is None:
            return scheme
        return scheme.model_copy(update={"weights": weights.model_copy(update={"actorder": order})})

    def _order(self, args: QuantizationArgs) -> ActOrder | None:
        """The order of columns for a weight; that of its group in the recipe comes first."""
        return args.actorder if args.strategy == "group" else self.actorder

    def on_calibration_start(self, state: State, event: Event) -> None:
        """Hook every targeted module's input."""
        super().on_calibration_start(state, event)
        self._statistics = HessianHooks(share=self.share_inputs, has_base=self.base_stream != "unused")
        for name in self._pending:
            self.watch(name, self._statistics.accumulating(state, name))

    def on_calibration_end(self, state: State, event: Event) -> None:
        """Compress what no stage contained, then let the statistics go."""
        super().on_calibration_end(state, event)
        state.report.notes += self._statistics.notes(self.label, state.ranks)
        self._statistics = HessianHooks()
        asked = ["target"] * (self.target == "base") + ["alpha"] * (self.alpha != 1.0)
        moved = [name for name in self._schemes if name in state.settled_to_base]
        if asked and moved:
            state.report.notes.append(
                f"{self.label}: {' and '.join(asked)} did not count for {some(moved)}: another modifier has moved their weights to what "
                "the base gives, and a second time they would be moved too far"
            )

    def on_finalize(self, state: State) -> bool:
        """Say of how many modules some input columns were always zero."""
        records = [state.report.modules[name] for name in self._schemes if name in state.report.modules]
        dead = {record.name: record.details[_DEAD] for record in records if _DEAD in record.details}
        if dead:
            most = max(dead, key=lambda name: int(dead[name]))
            state.report.notes.append(
                f"{self.label}: {len(dead)} of {len(self._schemes)} modules have input columns that were zero on every calibration token "
                f"({most} most of them, {dead[most]}); nothing is known of these columns, so their weights were rounded to nearest, by "
                "scales that suit the others"
            )
        return super().on_finalize(state)

    def watches(self, model: nn.Module) -> list[str]:
        """All that it quantizes, and what else has static ranges; see the base."""
        return [*super().watches(model), *self.resolve(model)]

    def compress(self, state: State, names: list[str]) -> None:
        """Solve the named modules, those with one input and one format together; each by the rank that owns it."""
        inputs = self._statistics.hessians.take_all(names, state.ranks)
        owners = state.ranks.share_out([self._flops(one) for one in inputs])
        join_hessians(state.ranks, [one.hessian for one in inputs], owners)
        for solved in state.ranks.solved(owners, lambda place: self._solve(state, inputs[place]), (Solved, QParams, ModuleRecord)):
            for own in solved:
                if own.fallback is not None:
                    self.fall_back(state, own.name, *own.fallback)
                self.place(state, own.name, own.codes_RC, own.qparams, own.record, own.g_idx_C)

    def cost(
        self,
        scheme: QuantizationScheme | None,
        rows: Sequence[int],
        columns: int,
        element_bytes: int,
        num_tokens: int,
        has_base_stream: bool = False,
    ) -> Cost:
        """What GPTQ costs: Hessian, factor and column loop of a stack of weights."""
        assert scheme is not None and scheme.weights is not None
        return gptq_cost(
            rows,
            columns,
            element_bytes,
            scheme.weights,
            num_tokens=num_tokens,
            block_size=self.block_size,
            solver=self.solver,
            scale_search=self._searches_scales and self._order(scheme.weights) != "group",
            has_base_stream=has_base_stream and self.base_stream_for([scheme]) != "unused",
        )

    @property
    def _searches_scales(self) -> bool:
        return self.solver == "r_form" if self.scale_search is None else self.scale_search

    def _observed(self, args: QuantizationArgs) -> QuantizationArgs:
        """The format, with an observer that looks for ranges of 4-bit floats where none is named; those of integers the solver searches."""
        if not self._searches_scales or args.observer is not None or args.type != "float" or args.num_bits != 4:
            return args
        return args.model_copy(update={"observer": "nvfp4_expanded_imatrix", "observer_kwargs": dict(_FLOAT_SEARCH)})

    def _keeps_zeros(self, state: State, names: Sequence[str], weights: Sequence[Tensor]) -> bool:
        """What was asked for, else whether one of them has been pruned, now or before; the others have no zeros to speak of."""
        if self.preserve_sparsity_mask is not None:
            return self.preserve_sparsity_mask
        return not state.sparse.isdisjoint(names) or any(int((weight == 0).sum()) >= _SPARSE * weight.numel() for weight in weights)

    def _flops(self, shared: SharedInput) -> float:
        weights = [weight_of(self._pending[name]) for name in shared.members]
        rows = [len(weight) for weight in weights]
        return self.cost(self._schemes[shared.members[0]], rows, weights[0].shape[1], 4, 0).flops if shared.hessian.num_tokens else 0.0

    def _solve(self, state: State, shared: SharedInput) -> list[Solved]:
        """Solve modules that share an input."""
        names, hessian = shared
        if hessian.num_tokens == 0:
            return [self._round(name, "no_tokens", f"no calibration token reached it{_hint(state, name)}") for name in names]
        shift_CC = hessian.shift(self.alpha)
        if not state.settled_to_base.isdisjoint(names):  # a second time they would be moved too far
            shift_CC = None
        hessian_CC = hessian.matrix(names[0])
        return [
            solved for stack in _stacks(names, self._schemes) for solved in self._solve_stack(state, stack, hessian_CC, hessian, shift_CC)
        ]

    def _solve_stack(self, state: State, names: list[str], hessian_CC: Tensor, seen: Hessian, shift_CC: Tensor | None) -> list[Solved]:
        """Quantize weights that share input and format together."""
        args = self._schemes[names[0]].weights
        assert args is not None
        if not hessian_CC.diagonal().any():
            return [
                self._round(name, "dead_input", f"its input was zero, or below 1e-22, on all {seen.num_tokens} calibration tokens")
                for name in names
            ]
        weights = [weight_of(self._pending[name]) for name in names]
        squares_C = hessian_CC.diagonal()  # twice the means
        loudest = float((squares_C.max() / squares_C.mean()).sqrt())
        peak = float(seen.peak / (squares_C.mean() / 2).sqrt())
        try:
            solved, num_dead = quantize_gptq(
                weights,
                hessian_CC,
                self._observed(args),
                shift_CC=shift_CC,
                actorder=self._order(args),
                block_size=self.block_size,
                damp_frac=self.dampening_frac,
                solver=self.solver,
                scale_search=self._searches_scales,
                keep_zeros=self._keeps_zeros(state, names, weights),
                names=names,
                global_scales=[self.global_scale(name) for name in names],
            )
        except NumericsError as error:
            if not all(bool(torch.isfinite(weight).all()) for weight in weights):
                raise
            text = str(error).removeprefix(f"{' + '.join(names)}: ")
            return [self._round(name, "not_positive_definite", text) for name in names]
        dead = {_DEAD: num_dead} if num_dead else {}
        return [
            Solved(
                name,
                own.codes_RC,
                own.qparams,
                ModuleRecord(
                    name,
                    type(self).__name__,
                    scheme_label(args),
                    own.relative_error,
                    seen.num_tokens,
                    {"loss": own.loss, "loudest_input": loudest, "peak_input": peak, **dead},
                ),
                own.g_idx_C,
            )
            for name, own in zip(names, solved, strict=True)
        ]

    def _round(self, name: str, kind: str, detail: str) -> Solved:
        args = self._schemes[name].weights
        assert args is not None
        weight = weight_of(self._pending[name])
        plain = args.model_copy(update={"actorder": None} | ({"observer": "mse"} if args.observer_kind == "imatrix" else {}))
        qparams = weight_qparams(weight, plain, name, self.global_scale(name))
        rounded = round_to_nearest(weight, qparams, plain)
        record = ModuleRecord(name, "GPTQModifier (rounded)", scheme_label(args), rounded.relative_error, None, {"fallback": kind})
        return Solved(name, rounded.codes_RC, qparams, record, fallback=(kind, detail))


def _same_order(order: str | None) -> str | None:
    return "static" if order == "weight" else order


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


def _hint(state: State, name: str) -> str:
    is_expert = isinstance(state.model.get_submodule(name.rpartition(".")[0]), Expert)
    return " (calibrate_all_experts shows all tokens to every expert)" if is_expert else ""
