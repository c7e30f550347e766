"""Hazards of modifiers: what starts, ends and acts while a plan is in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import PrivateAttr
from torch import Tensor

from compressor.errors import EscapedTensorError, GuardDriftError, PlanStormError
from compressor.lifecycle import Event, EventType, Modifier, Session, State
from compressor.training import TrainStep
from harness.replay.equivalence.run import Subject
from harness.replay.hazards.building_blocks import Net, classify, default_optimizer
from harness.replay.hazards.registry import Hazard


class _Base(Modifier):
    """Knows the model."""

    _model: Any = PrivateAttr(default=None)
    _scale: Any = PrivateAttr(default=None)

    def on_initialize(self, state: State) -> bool:
        """Take note of the model."""
        self._model, self._scale = state.model, torch.ones(())
        return True


class _Scales(_Base):
    """DATA: a tensor that follows the step, written in place before it."""

    def training_tensors(self) -> Mapping[str, Tensor]:
        """Name the tensor."""
        return {"scale": self._scale}

    def on_event(self, state: State, event: Event) -> None:
        """Fill it before the step, use it within."""
        if event.type == EventType.BATCH_START:
            self._scale.fill_(1 + event.step / 10)
        if event.type == EventType.OPTIM_PRE_STEP:
            self._model.last.weight.grad.mul_(self._scale)


class _UnnamedScales(_Scales):
    """The same, but it names no tensor and is read in the step."""

    def training_tensors(self) -> Mapping[str, Tensor]:
        """Name nothing."""
        return {}


class _NumberAtTenth(_Base):
    """A Python number that it changes at the tenth step, and reads within the step."""

    _factor: float = PrivateAttr(default=1.0)

    def on_event(self, state: State, event: Event) -> None:
        """Change it before the step, use it within."""
        if event.type == EventType.BATCH_START and event.step == 8:
            self._factor = 0.5
        if event.type == EventType.OPTIM_PRE_STEP:
            self._model.last.weight.grad.mul_(self._factor)


class _KeyedNumber(_NumberAtTenth):
    """The same number, which its plan key tells."""

    def plan_key(self) -> float:
        """Tell the number."""
        return self._factor


class _StepInKey(_Base):
    """Puts the step into its plan key."""

    _step: int = PrivateAttr(default=0)

    def plan_key(self) -> int:
        """Tell the step."""
        return self._step

    def on_event(self, state: State, event: Event) -> None:
        """Count."""
        if event.type == EventType.BATCH_START:
            self._step = int(event.step)


class _ActsAtTenth(_Base):
    """Counts the events within the step, and acts at every tenth."""

    _count: int = PrivateAttr(default=0)

    def on_event(self, state: State, event: Event) -> None:
        """Count, and halve a weight."""
        if event.type == EventType.OPTIM_POST_STEP:
            self._count += 1
            if self._count % 10 == 0:
                with torch.no_grad():
                    self._model.last.weight.mul_(0.5)


class _Hooks(_Base):
    """STRUCTURE: a hook from start to end."""

    def on_start(self, state: State, event: Event) -> None:
        """Double what the first layer gives."""
        self.register_hook(self._model.first, lambda module, args, out: out * 2, "forward")

    def on_end(self, state: State, event: Event) -> None:
        """Let it be."""
        self.remove_hooks()


class _Swaps(_Base):
    """STRUCTURE: replaces a function of a layer at start."""

    def on_start(self, state: State, event: Event) -> None:
        """Let the network have another middle."""
        self._model.middle = torch.tanh


class _Masks(_Base):
    """DATA between steps: masks weights in place after every step."""

    def on_event(self, state: State, event: Event) -> None:
        """Zero the small weights."""
        if event.type == EventType.BATCH_END:
            with torch.no_grad():
                weight = self._model.last.weight
                weight.mul_(weight.abs() > 0.02)


class _KeepsLoss(_Base):
    """Keeps the loss that it is told."""

    _losses: list[Tensor] = PrivateAttr(default_factory=list)

    def on_event(self, state: State, event: Event) -> None:
        """Keep it."""
        if event.type == EventType.LOSS_CALCULATED:
            self._losses.append(event.loss)  # type: ignore[arg-type]


class _ReadsLoss(_Base):
    """Reads the loss for a log."""

    def on_event(self, state: State, event: Event) -> None:
        """Read it."""
        if event.type == EventType.LOSS_CALCULATED and event.loss is not None:
            float(event.loss)


def _with(*make: Callable[[], Modifier]) -> Callable[[], Subject]:
    def stage() -> Subject:
        model = Net()
        session = Session(State(model), [one() for one in make])
        session.initialize()
        return Subject(TrainStep(model, classify, default_optimizer(model.parameters()), session))

    return stage


def _gradual(structure: str, final: float, leave: bool) -> Callable[[], Modifier]:
    from compressor.modifiers.pruning.magnitude import MagnitudePruningModifier

    return lambda: MagnitudePruningModifier(
        targets=["Linear"], start=2, end=16, update=3, init_sparsity=0.0 if structure == "unstructured" else 0.5,
        final_sparsity=final, mask_structure=structure, leave_enabled=leave,
    )  # fmt: skip


def _constant() -> Modifier:
    from compressor.modifiers.pruning.magnitude import ConstantPruningModifier

    return ConstantPruningModifier(targets=["Linear"], start=2, end=14)


def _qat() -> Modifier:
    from compressor.modifiers.quantization import QuantizationModifier

    return QuantizationModifier(
        config_groups={"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "symmetric": True, "strategy": "channel"}}},
        start=2, end=20, disable_quantization_observer_epoch=12,
    )  # fmt: skip


_TENTH = "compressor/training/README.md: what follows the step index"
HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        "data",
        "a tensor of a modifier is filled before every step",
        _with(lambda: _Scales(start=0)),
        source="compressor/training/README.md: modifiers",
    ),
    Hazard(
        "unnamed_data",
        "the same without training_tensors()",
        _with(lambda: _UnnamedScales(start=0)),
        source="compressor/training/README.md: modifiers",
    ),
    Hazard(
        "number_of_modifier",
        "a Python number of a modifier changes after the proof",
        _with(lambda: _NumberAtTenth(start=0)),
        GuardDriftError,
        "_factor",
        "tracel-ai/burn#5779",
        steps=12,
    ),
    Hazard(
        "keyed_number",
        "the same number as part of plan_key()",
        _with(lambda: _KeyedNumber(start=0)),
        source="compressor/training/README.md: modifiers",
        steps=14,
    ),
    Hazard(
        "step_in_key",
        "plan_key() holds the step",
        _with(lambda: _StepInKey(start=0)),
        PlanStormError,
        "keep step numbers out of plan_key()",
        "compressor/training/README.md: plan keys",
        steps=12,
    ),
    Hazard(
        "acts_at_tenth",
        "a modifier counts within the step, and acts at every tenth",
        _with(lambda: _ActsAtTenth(start=0)),
        GuardDriftError,
        "_count",
        _TENTH,
        steps=13,
    ),
    Hazard(
        "start_and_end",
        "a hook from step 5 to step 10",
        _with(lambda: _Hooks(start=5, end=10)),
        source="compressor/training/README.md: modifiers",
        steps=16,
    ),
    Hazard(
        "two_modifiers",
        "two modifiers that start and end at times of their own",
        _with(lambda: _Hooks(start=4, end=9), lambda: _Scales(start=2)),
        source="compressor/training/README.md: modifiers",
        steps=16,
    ),
    Hazard(
        "swapped_function",
        "a function of the model is exchanged at start",
        _with(lambda: _Swaps(start=6)),
        source="compressor/training/README.md: modifiers",
        steps=12,
    ),
    Hazard(
        "masks_between",
        "weights are masked in place after every step",
        _with(lambda: _Masks(start=0)),
        source="compressor/training/README.md: modifiers",
    ),
    Hazard(
        "keeps_loss",
        "a modifier keeps the loss that it is told",
        _with(lambda: _KeepsLoss(start=0)),
        EscapedTensorError,
        "keeps a tensor",
        "pytorch/pytorch#144386",
    ),
    Hazard(
        "gradual_pruning",
        "gradual magnitude pruning",
        _with(_gradual("unstructured", 0.6, True)),
        source="compressor/modifiers/README.md: Pruning and quantization-aware training",
        steps=22,
    ),
    Hazard(
        "pruning_2_of_4",
        "2:4 magnitude pruning, whose end lets weights grow",
        _with(_gradual("2:4", 0.5, False)),
        source="compressor/modifiers/README.md: Pruning and quantization-aware training",
        steps=22,
    ),
    Hazard(
        "constant_pruning",
        "zeros that stay zeros",
        _with(_constant),
        source="compressor/modifiers/README.md: Pruning and quantization-aware training",
        steps=20,
    ),
    Hazard(
        "quantization_aware",
        "quantization-aware training from step 2 on, with observers frozen at step 12",
        _with(_qat),
        source="compressor/modifiers/README.md: Pruning and quantization-aware training",
        steps=18,
    ),
)
