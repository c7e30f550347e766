"""QuantizationModifier: round every weight to the nearest value of its scheme, at once or after training with that rounding."""

from __future__ import annotations

from compressor.algorithms.rtn import round_to_nearest
from compressor.lifecycle import CalibrationNeed, ModuleRecord, State
from compressor.modifiers.qat import TrainingModifier
from compressor.modifiers.schemes.targets import scheme_label
from compressor.nn import weight_of
from compressor.numerics import weight_qparams


class QuantizationModifier(TrainingModifier):
    """Quantize by rounding, with all presets; needs data only where inputs have static ranges.

    With `start`, and in a training, it trains the layers for that rounding first: see `compressor.modifiers.qat`.
    """

    @property
    def calibration_need(self) -> CalibrationNeed:
        """`basic` for static input ranges, else `none`."""
        return "basic" if self.needs_inputs else "none"

    def compress(self, state: State, names: list[str]) -> None:
        """Round the named modules."""
        for name in names:
            self.round_module(state, name)

    def round_module(self, state: State, name: str) -> None:
        """Round one module and put the quantized layer in its place."""
        args = self._schemes[name].weights
        assert args is not None
        weight = weight_of(self._pending[name])
        trained = self.trained_qparams(name)
        qparams = trained or weight_qparams(weight, args, name, self.global_scale(name))
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
