"""QuantizationModifier: round every weight to the nearest value of its scheme."""

from __future__ import annotations

from compressor.algorithms.rtn import round_to_nearest
from compressor.lifecycle import CalibrationNeed, ModuleRecord, State
from compressor.modifiers.scheme_modifier import SchemeModifier
from compressor.modifiers.scheme_targets import scheme_label
from compressor.nn import weight_of
from compressor.numerics import weight_qparams


class QuantizationModifier(SchemeModifier):
    """Quantize by rounding, with all presets; needs data only where inputs have static ranges."""

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
        qparams = weight_qparams(weight, args, name, self.global_scale(name))
        rounded = round_to_nearest(weight, qparams, args)
        record = ModuleRecord(
            name=name, modifier="QuantizationModifier", scheme=scheme_label(args), error=rounded.relative_error, num_tokens=None, details={}
        )
        self.place(state, name, rounded.codes_RC, qparams, record)
