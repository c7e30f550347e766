"""AutoRoundModifier: what to record of a block, and how long it learns; the arithmetic is in `compressor.algorithms.autoround`."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PrivateAttr, model_validator
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compressor.algorithms.autoround import LearnedRounding
from compressor.algorithms.costs import FLOAT32_BYTES, Memory, Work
from compressor.algorithms.rtn import squared_sums
from compressor.errors import CalibrationError, SchemeError
from compressor.lifecycle import BaseStream, CalibrationNeed, Event, FinishedStage, ModuleRecord, State
from compressor.lifecycle.hooks import without_modifier_hooks
from compressor.lifecycle.interface import AcrossRanks
from compressor.lifecycle.state import Detail
from compressor.model.evaluation import check_trainable
from compressor.model.folder import some
from compressor.modifiers.schemes.base import SchemeModifier
from compressor.modifiers.schemes.input_statistics import input_of
from compressor.modifiers.schemes.targets import scheme_label
from compressor.modifiers.tuning.blocks import BlockCalls, BlockLoss, weights_tried
from compressor.modifiers.tuning.budget import frozen
from compressor.modifiers.tuning.gradients import Unreached, saved_values_checked, told_unreached
from compressor.modifiers.tuning.sequences import sequences_at_once
from compressor.nn import weight_of
from compressor.nn.experts import UnfusedExperts
from compressor.nn.straight_through import through_rounding
from compressor.numerics import QParams, QuantizationArgs, QuantizationScheme, dynamic_qparams
from compressor.tracing import partition

_JUDGES = 16  # sequences on which the best step is found, at most
_MEASUREMENTS = 10
_GRADIENT, _TARGET, _TOKENS = "gradient", "target", "tokens"  # in the details of a module's record
_PLACED = (QParams, ModuleRecord)
_STREAMS: Mapping[str | None, BaseStream] = MappingProxyType({"base": "required", None: "wanted", "propagated": "unused"})


class AutoRoundModifier(SchemeModifier):
    """Quantize with learned rounding (AutoRound): signed gradients on offsets and ranges, block after block, best step kept.

    Attributes:
        iters: steps for each block; 0 rounds to nearest, without data where no input has a static range.
        batch_size: sequences in a step.
        lr: rate of offsets at the start, falling to zero along a line; None: 1 / iters.
        minmax_lr: rate of ranges; None: that of offsets.
        enable_minmax_tuning: learn ranges, too; False keeps the observed ones.
        target: what a block should give: what it gave in the uncompressed model, which runs beside the other (`base`), or what it gives
            uncompressed on the inputs of the compressed model (`propagated`, as in the paper); None: `base` where layers run once.
    """

    across_ranks: ClassVar[AcrossRanks | None] = "sums"  # the first learns, from the calls of all
    borrows: ClassVar[bool] = True
    keeps_on_modules: ClassVar[bool] = False  # it hooks whole blocks, whose forwards may set what they like
    takes_embeddings: ClassVar[bool] = False

    iters: int = Field(default=200, ge=0)
    batch_size: int = Field(default=8, gt=0)
    lr: float | None = Field(default=None, gt=0, le=1)
    minmax_lr: float | None = Field(default=None, gt=0, le=1)
    enable_minmax_tuning: bool = True
    target: Literal["base", "propagated"] | None = None

    _blocks: dict[str, str] = PrivateAttr(default_factory=dict)
    _calls: dict[str, BlockCalls] = PrivateAttr(default_factory=dict)
    _block_handles: dict[str, list[RemovableHandle]] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _settings_have_a_use(self) -> AutoRoundModifier:
        learning = ("batch_size", "lr", "minmax_lr", "enable_minmax_tuning", "target")
        changed = [name for name in learning if getattr(self, name) != type(self).model_fields[name].default]
        if changed and not self.iters:
            raise ValueError(f"{changed[0]}={getattr(self, changed[0])} is for learning, and iters=0 learns nothing; leave one of them out")
        if self.minmax_lr is not None and not self.enable_minmax_tuning:
            raise ValueError(f"minmax_lr={self.minmax_lr} moves nothing with enable_minmax_tuning=False; leave one of them out")
        return self

    @property
    def calibration_need(self) -> CalibrationNeed:
        """`sequential`, since each block should see the error of those before it; with nothing to learn, that of rounding."""
        if self.iters:
            return "sequential"
        return "basic" if self.needs_inputs else "none"

    @property
    def base_stream(self) -> BaseStream:
        """`required` with `target="base"`; left to us, wanted."""
        return self.base_stream_for(self._schemes.values())

    def base_stream_for(self, schemes: Iterable[QuantizationScheme]) -> BaseStream:
        """Say what `base_stream` will be, whatever the schemes are."""
        del schemes
        return _STREAMS[self.target] if self.iters else "unused"

    def on_initialize(self, state: State) -> bool:
        """Refuse ranges that something else would choose; find the block of each module."""
        done = super().on_initialize(state)
        formats = (scheme.weights for scheme in self._schemes.values() if scheme.weights is not None)
        choosing = next((args.observer for args in formats if args.observer_kind != "minmax"), None)
        if choosing is not None:
            raise SchemeError(
                f"{self.label}: observer {choosing} chooses ranges, which are learned here from the whole range on; leave it out"
            )
        self._blocks = _blocks_of(state.model, self._pending)
        self._calls, self._block_handles = {}, {}
        return done

    def watches(self, model: nn.Module) -> list[str]:
        """The blocks that it learns from, and what else has static ranges; see the base."""
        blocks = dict.fromkeys(_blocks_of(model, self.resolve(model)).values()) if self.iters else ()
        return [*super().watches(model), *blocks]

    def on_calibration_start(self, state: State, event: Event) -> None:
        """Hook the blocks."""
        super().on_calibration_start(state, event)
        if any(isinstance(module, UnfusedExperts) and module.calibrate_all for module in state.model.modules()):
            state.report.notes.append(f"{self.label}: calibrate_all_experts does not count: experts learn from the tokens they are sent")
        if self.iters:
            check_trainable((*state.model.named_parameters(), *state.model.named_buffers()))
        for block in dict.fromkeys(self._blocks[name] for name in self._pending) if self.iters else ():
            calls = self._calls[block] = BlockCalls(block)
            module = state.model.get_submodule(block)

            def note(module: nn.Module, args: Any, kwargs: Any, calls: BlockCalls = calls) -> None:
                del module
                calls.note_call(state, args, kwargs)

            def note_output(module: nn.Module, args: Any, output: Any, calls: BlockCalls = calls) -> None:
                del module, args
                calls.note_output(state, output)

            self._block_handles[block] = [
                # Before the hooks of the model's author, through which a noted call goes again.
                self.register_hook(module, note, "forward_pre", with_kwargs=True, prepend=True),
                self.register_hook(module, note_output, "forward"),
            ]

    def on_calibration_end(self, state: State, event: Event) -> None:
        """Compress what no stage contained, then let the inputs go."""
        super().on_calibration_end(state, event)
        self._calls = {}

    def on_finalize(self, state: State) -> bool:
        """Say which modules no gradient came to, also in stages that a resumed run took over."""
        records = [state.report.modules[name] for name in self._schemes if name in state.report.modules]
        without = [record.name for record in records if _GRADIENT in record.details]
        if without:
            state.report.notes.append(told_unreached(self.label, without, len(records)))
        if propagated := [record.name for record in records if _TARGET in record.details]:
            state.report.notes.append(
                f"{self.label}: calls of the blocks of {some(propagated)} in the uncompressed model and in the compressed one do not "
                "correspond; the target was what the block gives uncompressed on the inputs of the compressed model"
            )
        return super().on_finalize(state)

    def skip_stage(self, state: State, stage: FinishedStage) -> None:
        """Take over a finished stage; blocks that are done are watched no more."""
        super().skip_stage(state, stage)
        for block in [one for one in self._block_handles if not any(self._blocks[name] == one for name in self._pending)]:
            self.remove_hooks(self._block_handles.pop(block))
            self._calls.pop(block, None)

    def compress(self, state: State, names: list[str]) -> None:
        """Learn the rounding of the named modules, block by block."""
        for block in dict.fromkeys(self._blocks[name] for name in names):
            members = [name for name in names if self._blocks[name] == block]
            left = [name for name in self._pending if self._blocks[name] == block and name not in members]
            if left and self.iters:
                raise CalibrationError(
                    f"{block}: {left[0]} lies in it and in another stage, but a block is learned at once; leave sequential_targets out"
                )
            self.remove_hooks(self._block_handles.pop(block, []))
            calls = self._calls.pop(block, BlockCalls(block))
            if not calls.brought_to_first(state.ranks) and self.iters:
                for name in members:
                    self.fall_back(state, name, "no_tokens", "no calibration token reached it")
            placed = state.ranks.first(partial(self._learn, state, block, members, calls), _PLACED)
            for name, one in placed.items():
                if _TOKENS in one[-1].details:
                    self.fall_back(state, name, "no_tokens", "no calibration token reached it")
                self.place(state, name, *one)

    def forwards_of_training(self, num_samples: int) -> float:
        """Say what it costs beside the stages: targets, measurements, and steps of a forward and a backward each.

        Args:
            num_samples: calibration sequences.

        Returns:
            Forwards of one sequence through all blocks; a backward counts as two.
        """
        if not self.iters:
            return 0
        return num_samples + (_MEASUREMENTS + 1) * min(_JUDGES, num_samples) + 3 * self.iters * self.batch_size

    @property
    def needs_gradients(self) -> bool:
        """Whether its forwards keep something for a backward."""
        return self.iters > 0

    def block_memory(self, work: Work) -> Memory:
        """Say what learning a block takes: its calls and targets, and of each weight offsets, now and at the best, values and gradients."""
        if not self.iters:
            return Memory()
        size, wide = sum(work.sizes), FLOAT32_BYTES
        rows, judges = (sequences_at_once(min(number, work.num_samples), work.num_tokens) for number in (self.batch_size, _JUDGES))
        call = work.given_bytes + 3 * work.stream_bytes  # a copy of what is handed; output, target and their difference
        forward = 2 * wide * size + 2 * work.changed_bytes + rows * (call + work.saved_bytes)
        step = 2 * wide * size + 2 * work.changed_bytes + 6 * wide * max(work.sizes)
        measuring = 3 * wide * size + work.changed_bytes + judges * (call + work.forward_bytes)
        kept = work.num_samples * (work.given_bytes + work.stream_bytes)
        return Memory(kept, 0, max(forward, step, measuring), "train")

    def _weights(self, name: str) -> QuantizationArgs:
        args = self._schemes[name].weights
        assert args is not None
        return args

    def _learn(self, state: State, block: str, names: Sequence[str], calls: BlockCalls) -> dict[str, tuple[Tensor, QParams, ModuleRecord]]:
        """Learn the rounding of one block; return what is to be placed, by name."""
        module = state.model.get_submodule(block)
        floats = {name: self._pending[name] for name in names}
        roundings = {
            name: LearnedRounding(weight_of(one), self._weights(name), self.global_scale(name), learn_range=self.enable_minmax_tuning)
            for name, one in floats.items()
        }
        unreached = Unreached(names if calls.calls else ())
        untold, details, why = list[str](), dict[str, Detail](), dict[str, dict[str, Detail]]()
        if self.target is None and not calls.correspond:
            calls.targets, details = [], {_TARGET: "propagated"}
        if calls.calls:
            with without_modifier_hooks(module), frozen(module), ExitStack() as held:
                loss = BlockLoss(module, calls, state.device, floats)
                for name, one in floats.items():
                    held.enter_context(_inputs_rounded(one, self._schemes[name], name))
                before, after, best = self._descend(loss, floats, roundings, unreached, state.seed + zlib.crc32(block.encode()))
                untold = loss.uncalled({name: one for name, one in floats.items() if name in unreached})
            details |= {"block_loss_before": before, "block_loss": after, "best_step": best}
        for name in [name for name in names if name in unreached]:
            why[name] = {_TOKENS: 0} if name in untold else {_GRADIENT: "none"}
        return {name: self._rounded(name, rounding, details | why.get(name, {})) for name, rounding in roundings.items()}

    def _descend(
        self, loss: BlockLoss, floats: dict[str, nn.Module], roundings: dict[str, LearnedRounding], unreached: Unreached, seed: int
    ) -> tuple[float, float, int]:
        """Go the steps; return the error on the judges at the start and at the best step, and that step. Changes the roundings."""
        generator = torch.Generator().manual_seed(seed % 2**63)
        judges = loss.draw(_JUDGES, generator)
        rate, range_rate = self.lr or 1 / self.iters, self.minmax_lr or self.lr or 1 / self.iters
        every = max(1, self.iters // _MEASUREMENTS)
        before = best = self._measure(loss, floats, roundings, judges)
        kept, best_step = {name: one.state() for name, one in roundings.items()}, 0
        for step in range(1, self.iters + 1):
            drawn = loss.draw(self.batch_size, generator)
            share = 1 - (step - 1) / self.iters
            with torch.enable_grad():
                leaves = {name: one.values().requires_grad_() for name, one in roundings.items()}
                with weights_tried(floats, leaves), saved_values_checked(loss.name, is_first=step == 1):
                    loss.backward(drawn)
            for name, leaf in leaves.items():
                unreached.meet(name, leaf.grad)
                if leaf.grad is not None:  # else no token of these came to the expert
                    roundings[name].step(leaf.grad, rate * share, range_rate * share)
            if step % every == 0 or step == self.iters:
                now = self._measure(loss, floats, roundings, judges)
                if now < best:
                    best, best_step, kept = now, step, {name: one.state() for name, one in roundings.items()}
        for name, state in kept.items():
            roundings[name].restore(state)
        return before, best, best_step

    @torch.no_grad()
    def _measure(self, loss: BlockLoss, floats: dict[str, nn.Module], roundings: dict[str, LearnedRounding], judges: list[int]) -> float:
        with weights_tried(floats, {name: one.values() for name, one in roundings.items()}):
            return loss.backward(judges)

    def _rounded(self, name: str, rounding: LearnedRounding, details: dict[str, Detail]) -> tuple[Tensor, QParams, ModuleRecord]:
        args = self._weights(name)
        codes_RC, qparams = rounding.codes(), rounding.qparams()
        off, size = squared_sums(weight_of(self._pending[name]), codes_RC, qparams, args)
        record = ModuleRecord(name, type(self).__name__, scheme_label(args), off / size if size else 0.0, None, details)
        return codes_RC, qparams, record


def _blocks_of(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The layer that each module lies in; itself where it lies in none."""
    layers = [name for name in partition(model, None).targets if name]
    return {name: next((one for one in layers if name.startswith(f"{one}.")), name) for name in names}


def _inputs_rounded(module: nn.Module, scheme: QuantizationScheme, name: str) -> ExitStack:
    """Round what a layer is handed as its quantized form will, where scales come from the input itself; undone when closed."""
    args, held = scheme.input_activations, ExitStack()
    if args is None or args.dynamic is not True:
        return held

    def rounded(module: nn.Module, given: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        del module
        x: Tensor = input_of(given, kwargs, name)
        return (through_rounding(x, dynamic_qparams(x, args), args) if x.numel() else x,), {}

    held.callback(module.register_forward_pre_hook(rounded, with_kwargs=True).remove)
    return held
