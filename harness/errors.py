"""The errors that only the harness raises, in the compressor's tree: `CompressorError` is the root of all.

    CompressorError
    |-- UserInputError (ValueError)
    |   |-- GoldenError                   a golden that cannot be read, or must not be written
    |   `-- HistoryError                  a history of measurements that cannot be read or written
    |-- ContractViolation (AssertionError) a graph that broke the contract it was held against
    `-- HarnessError (RuntimeError)       the harness itself failed; never used for a verdict

Bad input of any other kind is a `UserInputError`, or one of its kinds in `compressor.errors`.
"""

from __future__ import annotations

from compressor.errors import CompressorError, UserInputError


class GoldenError(UserInputError):
    """A golden cannot be read, or must not be written."""


class HistoryError(UserInputError):
    """A history of measurements cannot be read or written."""


class ContractViolation(CompressorError, AssertionError):
    """A graph broke the contract that it was held against: a verdict, not a failure of ours."""


class HarnessError(CompressorError, RuntimeError):
    """The harness itself failed; never used for a verdict."""
