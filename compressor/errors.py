"""Every exception of the package, one tree; what only the harness raises hangs in it from `harness.errors`.

    CompressorError                       the root: catch this to catch all of ours
    |-- UserInputError (ValueError)       the caller gave something that breaks a rule
    |   |-- RecipeError                   a recipe that cannot be read or that names what does not exist
    |   |-- SchemeError                   a preset, format or group size that does not exist or does not fit
    |   |-- TargetError                   a target or ignore pattern that matches nothing
    |   |-- DatasetError                  calibration data that is missing, empty or of the wrong form
    |   |-- ModelError                    a model that cannot be loaded or must not be compressed
    |   |-- OutputError                   an output folder that exists or cannot be written
    |   |   `-- AlreadyDoneError            the output folder holds the result of this very run, so there is nothing to resume
    |   `-- ResumeError                   a run folder that is in use, damaged, or of another run
    |-- LifecycleError (RuntimeError)     a call at a moment when the lifecycle does not allow it
    |-- CalibrationError (RuntimeError)   statistics that are missing, or more fallbacks than the recipe allows
    |-- OutOfMemoryError (MemoryError)    memory that ran out in a stage: a smaller batch may do
    |-- TracingError (RuntimeError)       a model whose data flow cannot be followed
    |-- NumericsError (ArithmeticError)   NaN, infinity, a matrix that is not positive definite
    |-- RankError (RuntimeError)          another process of the run has failed, or does not answer
    |-- CheckpointError (OSError)         a checkpoint that cannot be written whole or does not read back
    `-- ReplayError (RuntimeError)        a captured training step cannot stand for the eager one
        |-- HostReadError                   the step reads a tensor on the host
        |-- DynamicShapeError               a shape of the step depends on data
        |-- UntrackedRandomnessError        random numbers that no recorded op drew
        |-- EscapedTensorError              something outside the step keeps, or is written by, a tensor of the step
        |-- BindError                       a batch that does not fit the fixed input buffers
        |-- PointerDriftError               a parameter, gradient, buffer or optimizer state lies elsewhere than at capture
        |-- GuardDriftError                 a fact of the host that the capture took for granted has changed
        |-- SignatureDriftError             the step is another one on another batch
        |-- ProofError                      replay and eager differ
        `-- PlanStormError                  more plans than the cap allows

A message reads `<where>: <what was given> <rule broken>; <what to do>`.
"""

from __future__ import annotations

import re

_PRINTED_OBJECT = re.compile(r"([\[({])\n(?:[ \t].*\n|\n)*([\])}])(?:\n(?= ))?")  # its brackets stand alone at the ends of lines


class CompressorError(Exception):
    """Root of the tree."""


class UserInputError(CompressorError, ValueError):
    """The caller gave something that breaks a rule."""


class RecipeError(UserInputError):
    """A recipe cannot be read, or names what does not exist."""


class SchemeError(UserInputError):
    """A preset, number format or group size does not exist or does not fit."""


class TargetError(UserInputError):
    """A target or ignore pattern matches nothing."""


class CacheError(TargetError, AttributeError):
    """An attention module asks its cache for something else than to take keys and values."""


class DatasetError(UserInputError):
    """Calibration data is missing, empty or of the wrong form."""


class ModelError(UserInputError):
    """A model cannot be loaded or must not be compressed."""


class OutputError(UserInputError):
    """An output folder exists already or cannot be written."""


class AlreadyDoneError(OutputError):
    """The output folder holds the result of this very run; nothing is left to resume."""


class ResumeError(UserInputError):
    """A run folder is in use, damaged, or of another run."""


class LifecycleError(CompressorError, RuntimeError):
    """A call came at a moment when the lifecycle does not allow it."""


class FinalizeError(LifecycleError, ExceptionGroup):
    """Some modifiers failed to finalize; holds the error of each."""


class CalibrationError(CompressorError, RuntimeError):
    """Statistics are missing, or more fallbacks happened than the recipe allows."""


class OutOfMemoryError(CompressorError, MemoryError):
    """Memory ran out in a stage of the run, or cannot suffice."""


class TracingError(CompressorError, RuntimeError):
    """The data flow of a model cannot be followed."""


class NumericsError(CompressorError, ArithmeticError):
    """NaN, infinity, or a matrix that is not positive definite."""


class RankError(CompressorError, RuntimeError):
    """Another process of the run has failed, or does not answer.

    Attributes:
        is_mine_to_tell: no process but this one says so to the user; False where the one that failed has done it.
        kind: name of the class of that process's error.
    """

    is_mine_to_tell = False
    kind = "RankError"


class CheckpointError(CompressorError, OSError):
    """A checkpoint cannot be written whole or does not read back."""


class ReplayError(CompressorError, RuntimeError):
    """A captured training step cannot stand for the eager one."""


class HostReadError(ReplayError):
    """The step reads a tensor on the host; the value would be frozen at capture."""


class DynamicShapeError(ReplayError):
    """A shape of the step depends on data."""


class UntrackedRandomnessError(ReplayError):
    """Random numbers of the step come from something that no recorded op drew."""


class EscapedTensorError(ReplayError):
    """Something outside the step keeps a tensor that the step made, or the step writes to a tensor that nobody registered."""


class BindError(ReplayError):
    """A batch does not fit the fixed input buffers of its plan."""


class PointerDriftError(ReplayError):
    """A parameter, gradient, buffer or optimizer state does not lie where it lay at capture."""


class GuardDriftError(ReplayError):
    """A fact of the host that the capture took for granted has changed."""


class SignatureDriftError(ReplayError):
    """The step runs other operators, or other Python numbers, on another batch."""


class ProofError(ReplayError):
    """Replay, recorded eager and plain eager do not agree bit for bit."""


class PlanStormError(ReplayError):
    """More plans are asked for than the cap allows."""


def reason(error: BaseException) -> str:
    """Say in one line what an error of another library says.

    Args:
        error: any error.

    Returns:
        The first line of its message, in which `...` stands for what a printed object holds on lines of its own; two lines where the
        first only announces the second. Empty where it has no message.
    """
    text = _PRINTED_OBJECT.sub(r"\1...\2", str(error))
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return " ".join(lines[: 1 + lines[0].endswith(":")]).rstrip(".") if lines else ""
