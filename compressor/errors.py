"""Every exception of both packages, one tree.

    CompressorError                       the root: catch this to catch all of ours
    |-- UserInputError (ValueError)       the caller gave something that breaks a rule
    |   |-- RecipeError                   a recipe that cannot be read or that names what does not exist
    |   |-- SchemeError                   a preset, format or group size that does not exist or does not fit
    |   |-- TargetError                   a target or ignore pattern that matches nothing
    |   |-- DatasetError                  calibration data that is missing, empty or of the wrong form
    |   |-- ModelError                    a model that cannot be loaded or must not be compressed
    |   |-- GoldenError                   a golden that cannot be read, or must not be written
    |   |-- OutputError                   an output folder that exists or cannot be written
    |   |   `-- AlreadyDoneError            the output folder holds the result of this very run, so there is nothing to resume
    |   `-- ResumeError                   a run folder that is in use, damaged, or of another run
    |-- LifecycleError (RuntimeError)     a call at a moment when the lifecycle does not allow it
    |-- CalibrationError (RuntimeError)   statistics that are missing, or more fallbacks than the recipe allows
    |-- OutOfMemoryError (MemoryError)    memory that ran out in a stage: a smaller batch may do
    |-- TracingError (RuntimeError)       a model whose data flow cannot be followed
    |-- NumericsError (ArithmeticError)   NaN, infinity, a matrix that is not positive definite
    |-- CheckpointError (OSError)         a checkpoint that cannot be written whole or does not read back
    |-- ContractViolation (AssertionError) a graph that broke the contract it was held against
    `-- HarnessError (RuntimeError)       the harness itself failed; never used for a verdict

A message reads `<where>: <what was given> <rule broken>; <what to do>`.
"""

from __future__ import annotations


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


class DatasetError(UserInputError):
    """Calibration data is missing, empty or of the wrong form."""


class ModelError(UserInputError):
    """A model cannot be loaded or must not be compressed."""


class GoldenError(UserInputError):
    """A golden cannot be read, or must not be written."""


class OutputError(UserInputError):
    """An output folder exists already or cannot be written."""


class AlreadyDoneError(OutputError):
    """The output folder holds the result of this very run; nothing is left to resume."""


class ResumeError(UserInputError):
    """A run folder is in use, damaged, or of another run."""


class LifecycleError(CompressorError, RuntimeError):
    """A call came at a moment when the lifecycle does not allow it."""


class CalibrationError(CompressorError, RuntimeError):
    """Statistics are missing, or more fallbacks happened than the recipe allows."""


class OutOfMemoryError(CompressorError, MemoryError):
    """Memory ran out in a stage of the run."""


class TracingError(CompressorError, RuntimeError):
    """The data flow of a model cannot be followed."""


class NumericsError(CompressorError, ArithmeticError):
    """NaN, infinity, or a matrix that is not positive definite."""


class CheckpointError(CompressorError, OSError):
    """A checkpoint cannot be written whole or does not read back."""


class ContractViolation(CompressorError, AssertionError):
    """A graph broke the contract that it was held against: a verdict, not a failure of ours."""


class HarnessError(CompressorError, RuntimeError):
    """The harness itself failed; never used for a verdict."""
