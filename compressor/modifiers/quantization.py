"""QuantizationModifier: round every weight to the nearest value of its scheme, at once or after training with that rounding."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PrivateAttr

from compressor import look_up
from compressor.algorithms.rtn import round_to_nearest
from compressor.lifecycle import CalibrationNeed, Event, ModuleRecord, State
from compressor.lifecycle.interface import AcrossRanks
from compressor.modifiers.own_forwards import MeanSquare, mean_squares
from compressor.modifiers.qat import TrainingModifier
from compressor.modifiers.schemes.targets import scheme_label
from compressor.nn import weight_of
from compressor.numerics import QuantizationArgs, weight_qparams

__getattr__ = look_up  # llm-compressor has GPTQModifier here,
__path__: list[str] = []  # and in a module below


class QuantizationModifier(TrainingModifier):
    """Quantize by rounding, with all presets; needs data only where inputs have static ranges, or `observer: imatrix_mse` asks for it.

    With `start`, and in a training, it trains the layers for that rounding first: see `compressor.modifiers.qat`.
    """

    across_ranks: ClassVar[AcrossRanks | None] = "sums"

    _squares: dict[str, MeanSquare] = PrivateAttr(default_factory=dict)

    @property
    def calibration_need(self) -> CalibrationNeed:
        """`basic` for static input ranges, `own` for weights whose observer asks for their inputs, else `none`."""
        return "basic" if self.needs_inputs else "own" if self.needs_importance else "none"

    def on_initialize(self, state: State) -> bool:
        """Resolve targets, and say whose ranges may be narrowed."""
        done = super().on_initialize(state)
        if self.start is None:
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
