"""QuantizationModifier: round every weight to the nearest value of its scheme, at once or after training with that rounding."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import ClassVar, Self

import torch
import torch.distributed as dist
from pydantic import PrivateAttr, model_validator
from torch import Tensor

from compressor import look_up
from compressor.algorithms.rtn import round_to_nearest
from compressor.errors import CalibrationError, RecipeError, SchemeError
from compressor.lifecycle import CalibrationNeed, Event, EventType, ModuleRecord, State
from compressor.lifecycle.interface import AcrossRanks
from compressor.model.folder import some
from compressor.modifiers.own_forwards import MeanSquare, mean_squares
from compressor.modifiers.schemes.base import SchemeModifier, shared_global_scales
from compressor.modifiers.schemes.targets import scheme_label
from compressor.nn import weight_of
from compressor.nn.fake_quant import FakeQuantizedLayer, fake_quantized
from compressor.numerics import QParams, QuantizationArgs, make_observer, weight_qparams

# Quantization-aware training: what a quantizing modifier does when `start` is given and batches come.
#
# start                                  targeted layers compute with fake-quantized weights and inputs      STRUCTURE
# every step                             scales follow the weights, inside the step
# or every `update`                      scales are written outside the step, and stay between               DATA
# disable_quantization_observer_epoch    scales are fixed, weights go on                                     STRUCTURE
# end                                    the same, where it was not before                                   STRUCTURE
# finalize                               codes take the place of weights, with the scales of that moment


class TrainingModifier(SchemeModifier):
    """Base of the quantizing modifiers that can train.

    Attributes:
        disable_quantization_observer_epoch: index from which scales are fixed, at the latest from `end`; None: from `end`.
    """

    disable_quantization_observer_epoch: float | None = None

    _layers: dict[str, FakeQuantizedLayer] = PrivateAttr(default_factory=dict)
    _fixed: bool = PrivateAttr(default=False)
    _trained: bool = PrivateAttr(default=False)
    _observes: bool = PrivateAttr(default=False)  # looked at with the first batch
    _in_step: bool = PrivateAttr(default=False)

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        freeze = self.disable_quantization_observer_epoch
        if self.start is None:
            for name, value in (("end", self.end), ("update", self.update), ("disable_quantization_observer_epoch", freeze)):
                if value is not None:
                    raise RecipeError(f"{name}={value} is for training, which needs a start; give start, or leave {name} out")
        if self.start is not None and self.kv_format is not None:
            raise RecipeError("kv_cache_scheme: queries, keys and values are calibrated, not trained; give them to a modifier of their own")
        return self

    def trains(self, state: State) -> bool:
        """Say whether layers are to be trained with their rounding.

        Args:
            state: of the session.

        Returns:
            True where there is a start, and steps will come.
        """
        return self.start is not None and state.has_steps

    def plan_key(self) -> Hashable:
        """Return what a step computes with: floats, scales that follow the weights, or stored ones."""
        if not self._layers:
            return "float"
        observing = any(layer.observing for layer in self._layers.values())
        return "stored scales" if self._fixed or self.update else "own scales", observing

    def training_tensors(self) -> Mapping[str, Tensor]:
        """Return stored scales and ranges of inputs; they are there from the start on."""
        return {f"{name}.{key}": tensor for name, layer in self._layers.items() for key, tensor in layer.tensors().items()}

    def on_initialize(self, state: State) -> bool:
        """Resolve targets, and refuse what training cannot have."""
        self._layers, self._fixed, self._trained, self._observes, self._in_step = {}, False, False, False, False
        done = super().on_initialize(state)
        for name, scheme in self._schemes.items() if self.trains(state) else ():
            inputs = scheme.input_activations
            if inputs is None or inputs.dynamic is True:
                continue
            if inputs.observer_kind != "minmax":
                raise SchemeError(f"{name} input: observer={inputs.observer!r} counts values on the host; training needs 'minmax'")
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                raise SchemeError(
                    f"{name} input: each of {dist.get_world_size()} ranks would find a static range of its own; use dynamic=True"
                )
        return done

    def on_start(self, state: State, event: Event) -> None:
        """Let the targeted layers compute as their quantized forms will, where they are trained so."""
        if not self.trains(state):
            return
        self._choose_global_scales()
        for name, module in self._pending.items():
            layer = fake_quantized(module, self._schemes[name], name, self.global_scale(name))
            layer.fixed, layer.in_step = bool(self.update), self._in_step
            state.swap_module(name, layer)
            self._layers[name] = layer
        self._fix_when_due(event)

    def on_event(self, state: State, event: Event) -> None:
        """Fix the scales when it is time; let ranges follow the inputs of steps, and global scales the weights, inside the step."""
        del state
        if event.type in (EventType.BATCH_START, EventType.BATCH_END):
            self._in_step = event.type is EventType.BATCH_START
            for layer in self._layers.values():
                layer.in_step = self._in_step
        if event.type is EventType.BATCH_START:
            if self._layers and not self._observes:
                self._check_observed()
                self._observes = True
            self._trained = True
            self._fix_when_due(event)
        if event.type is EventType.OPTIM_POST_STEP:
            self.settle()

    def settle(self) -> None:
        """Let global scales follow the weights, where scales do."""
        if self._layers and not (self._fixed or self.update):
            self._follow_global_scales()

    def on_update(self, state: State, event: Event) -> None:
        """Store the scales of the present weights, where that is done in intervals."""
        del state
        if event.type is EventType.BATCH_START and self.update and not self._fixed:
            self._keep_scales()

    def on_end(self, state: State, event: Event) -> None:
        """Fix the scales."""
        del state, event
        if not self._fixed:
            self._fix()

    def on_calibration_start(self, state: State, event: Event) -> None:
        """Watch inputs, unless training has done it; without any batch this is no training, whatever `start` says."""
        if self._layers and self._trained:
            return
        for name in self._layers:
            state.replace_module(name, self._pending[name])
        self._layers = {}
        super().on_calibration_start(state, event)

    def on_finalize(self, state: State) -> bool:
        """Put codes in the place of what was trained."""
        if self._layers:
            self._compress_pending(state, tuple(self._pending))
        return super().on_finalize(state)

    def trained_qparams(self, name: str) -> QParams | None:
        """Return the scales that a layer in training computes with, for codes that mean what it has learnt.

        Args:
            name: dotted module name.

        Returns:
            Scale, zero point and global scale; None where the layer is not in training.
        """
        layer = self._layers.get(name)
        return None if layer is None else layer.weight_qparams()

    def _compress_pending(self, state: State, modules: Iterable[str]) -> None:
        modules = tuple(modules)
        trained = {name: self._layers[name] for name in modules if name in self._pending and name in self._layers}
        for name in trained:
            self._take_over(name)
        super()._compress_pending(state, modules)
        for name, layer in trained.items():
            del self._layers[name]
            if layer.stored_dtype is not None:
                state.model.get_submodule(name).to(layer.stored_dtype)

    def _take_over(self, name: str) -> None:
        """Hand what training knows to the float layer, which is what codes are made from."""
        layer, module, inputs = self._layers[name], self._pending[name], self._schemes[name].input_activations
        for key, parameter in layer.named_parameters():
            module.register_parameter(key, parameter)
        extremes = layer.input_range()
        if inputs is not None and extremes is not None:
            observer = self._input_observers[name] = make_observer(inputs, f"{name} input")
            if bool((extremes["min"] < extremes["max"]).all()):  # else no batch came, which is refused as in a calibration
                observer.restore(extremes)

    def _check_observed(self) -> None:
        """Refuse, before the first step, layers whose ranges no step would find."""
        ranges = {name: layer.input_range() for name, layer in self._layers.items() if layer.observing and not layer.training}
        if blind := [name for name, one in ranges.items() if one is not None and not bool((one["min"] < one["max"]).all())]:
            raise CalibrationError(
                f"{self.label}: {some(blind)} are in evaluation mode, in which static ranges of inputs are not observed; call train() on "
                "them (dropout and norms beside them may stay as they are), or choose dynamic inputs"
            )

    def _fix_when_due(self, event: Event) -> None:
        freeze = self.disable_quantization_observer_epoch
        if freeze is not None and self._layers and not self._fixed and event.index >= freeze:
            self._fix()

    def _fix(self) -> None:
        self._keep_scales()
        for layer in self._layers.values():
            layer.fixed, layer.observing = True, False
        self._fixed = True

    def _keep_scales(self) -> None:
        self._follow_global_scales()
        with torch.no_grad():
            for layer in self._layers.values():
                layer.keep_scales()

    @torch.no_grad()
    def _follow_global_scales(self) -> None:
        weights = {name: self._layers[name].weight_RC.detach() for name in self._layers if name in self._global_scales}
        for name, scale in shared_global_scales(weights, self._schemes).items():
            self._global_scales[name].copy_(scale)


__getattr__ = look_up  # llm-compressor has GPTQModifier here,
__path__: list[str] = []  # and in a module below


class QuantizationModifier(TrainingModifier):
    """Quantize by rounding, with all presets; needs data only where inputs have static ranges, or `observer: imatrix_mse` asks for it.

    With `start`, and in a training, it trains the layers for that rounding first, as `TrainingModifier` does.
    """

    across_ranks: ClassVar[AcrossRanks | None] = "sums"

    _squares: dict[str, MeanSquare] = PrivateAttr(default_factory=dict)

    @property
    def calibration_need(self) -> CalibrationNeed:
        """`basic` for static input ranges, `own` for weights whose observer asks for their inputs, else `none`."""
        return "basic" if self.needs_inputs else "own" if self.needs_importance else "none"

    def forwards_of_training(self, num_samples: int) -> float:
        """Say what it costs beside the stages: one pass over the data where an observer asks for inputs."""
        return float(num_samples) if self.needs_importance else 0.0

    def on_initialize(self, state: State) -> bool:
        """Resolve targets, and say whose ranges may be narrowed."""
        done = super().on_initialize(state)
        if not self.trains(state):
            state.narrowable.update(name for name, scheme in self._schemes.items() if _is_narrowable(scheme.weights))
        return done

    def on_calibration_start(self, state: State, event: Event) -> None:
        """Look at the inputs of weights whose observer asks for them; then as all that quantize."""
        schemes = {name: self._schemes[name].weights for name in self._pending}
        asking = [name for name, args in schemes.items() if args is not None and args.observer_kind == "imatrix"]
        self._squares = mean_squares(state, asking, type(self).__name__) if asking and state.data is not None else {}
        super().on_calibration_start(state, event)

    def compress(self, state: State, names: list[str]) -> None:
        """Round the named modules."""
        for name in names:
            self.round_module(state, name)

    def round_module(self, state: State, name: str) -> None:
        """Round one module and put the quantized layer in its place."""
        args = self._schemes[name].weights
        assert args is not None
        weight = weight_of(self._pending[name])
        trained, seen = self.trained_qparams(name), self._squares.get(name)
        if seen is not None and seen.num_tokens == 0:
            self.fall_back(state, name, "no_tokens", "no calibration token reached it, so its errors are not weighed by inputs")
            args = args.model_copy(update={"observer": "mse", "observer_kwargs": {}})
        importance_C = seen.value() if seen is not None and seen.num_tokens else None
        if importance_C is not None and not bool(importance_C.any()):
            self.fall_back(state, name, "dead_input", "its input was zero, or below 1e-22, so its errors are not weighed by inputs")
        kept_RG = state.kept_ranges.get(name)
        qparams = trained or weight_qparams(weight, args, name, self.global_scale(name), importance_C=importance_C, kept_RG=kept_RG)
        rounded = round_to_nearest(weight, qparams, args)
        record = ModuleRecord(
            name=name,
            modifier="QuantizationModifier",
            scheme=scheme_label(args),
            error=rounded.relative_error,
            num_tokens=None,
            details={} if trained is None else {"trained_from": self.start or 0.0},
        )
        self.place(state, name, rounded.codes_RC, qparams, record)


def _is_narrowable(args: QuantizationArgs | None) -> bool:
    """Integers in groups or rows, whose observer takes the whole range."""
    return args is not None and args.type == "int" and args.strategy in ("group", "channel") and args.observer_kind == "minmax"
