"""Where a refused operator was called from, and what helps there: advice that names the caller's own line and torch's own switch."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from compressor.training.remedies import for_batch_norm

_TORCH, _OWN = Path(torch.__file__).parent, Path(__file__).parent
_STEP = str(_OWN / "step.py")
_ADVICE = "keep it a tensor (torch.where, a tensor lr, fused=True), or decide before the step"
# Part of torch that reads, where several are on the way the innermost: what to do about it.
_ADVICE_BY_PART = {
    "optim": "keep settings of its groups Python numbers, and let only lr be a tensor",
    "distributions": "give the distribution validate_args=False, which is all that it reads for",
    "nn/modules/batchnorm.py": f"without a momentum it counts its batches; count in a tensor:{for_batch_norm()}",
    "nn/utils/rnn.py": "pad instead of packing, and mask what lies behind the end of a row",
}


def caller() -> str:
    """Name the line of the step, outside torch and this package, that the running operator came from.

    Returns:
        Such as ` at model.py:12`; where the step itself calls torch, the line of torch; empty where neither is known.
    """
    frames = _frames()
    outside = [frame for frame in frames if not _is_in(frame, _TORCH)]
    if outside:
        return f" at {Path(outside[-1].filename).name}:{outside[-1].lineno}"
    parts = [frame for frame in frames if _part(frame) is not None]
    return f" at torch/{Path(parts[-1].filename).relative_to(_TORCH).as_posix()}:{parts[-1].lineno}" if parts else ""


def advice_on_reading() -> str:
    """Say what helps against the read on the host that is under way.

    Returns:
        A clause.
    """
    part = next((part for part in map(_part, reversed(_frames())) if part is not None), None)
    return _ADVICE if part is None else _ADVICE_BY_PART[part]


def _frames() -> list[traceback.FrameSummary]:
    """Return the frames within the step, the innermost last, without those of this package that watch it."""
    frames = list(traceback.extract_stack())
    begin = max((place for place, frame in enumerate(frames) if frame.filename == _STEP), default=-1)
    return [frame for frame in frames[begin + 1 :] if not _is_in(frame, _OWN)]


def _is_in(frame: traceback.FrameSummary, folder: Path) -> bool:
    return Path(frame.filename).is_relative_to(folder)


def _part(frame: traceback.FrameSummary) -> str | None:
    if not _is_in(frame, _TORCH):
        return None
    path = Path(frame.filename).relative_to(_TORCH).as_posix()
    return next((part for part in _ADVICE_BY_PART if path == part or path.startswith(f"{part}/")), None)
