"""Calls of watched modules that no stage would see."""

from __future__ import annotations

from collections.abc import Collection

from compressor.errors import CalibrationError
from compressor.tracing.graph.program import Program

_REMEDY = 'use pipeline="basic" or other sequential targets'


def check_inside(program: Program, segment: int, targets: Collection[str], inside: Collection[str], sample: int) -> None:
    """Refuse watched modules that a forward calls again outside of their stage, after it.

    Args:
        program: of the sample.
        segment: that begins with the stage.
        targets: of the stage.
        inside: watched modules inside the targets.
        sample: number of the batch, for the error.

    Raises:
        CalibrationError: there is one.
    """
    position = {name: index for index, one in enumerate(program.segments) for name in one.targets}
    for name, owner, where in program.calls:
        later = where >= segment if owner is None else owner not in targets and position.get(owner, 0) > segment
        if name in inside and later:
            raise CalibrationError(
                f"{name}: batch {sample} calls it outside {', '.join(targets) or 'the model'}, the sequential target that it was "
                f"calibrated in, and after that, so its statistics miss this call; {_REMEDY}"
            )
