"""What counts as good enough: limits with defaults in code, overridable by a YAML file.

The defaults suit a good 4-bit weight-only compression and are relative to the base model, never absolute: a perplexity may rise by 5 %
at most, measured as non-inferiority (the whole interval must lie below the margin). SQNR limits depend on the number format, because
each bit is worth 6 dB. They are wide: round-to-nearest with groups of 128 gives about 20 dB at 4 bits and 12 dB at 3, but GPTQ trades
weight error for output error and comes down to 12 and 5.5 dB in single modules of the reference model, with better predictions. What they
let through is held by the scale mismatch: below 2 for every sound quantizer, above 30 where scales belong to other groups.

The limits of single rows leave room for what a solver may do. Rows of the reference model have gains within 0.05 of 1 at 4 bits and
more, 0.3 at 2; the farthest of 396 synthetic layers (heavy tails, outliers, a few loud inputs) was 0.78, at 2 bits; a dead or random row
has 1. The noise of eight neighbours stays below 9 on the reference model and below 17 on those layers; where a packed word is zeroed it is
above 60 at 4 bits and more, about 20 at 2 bits and in NVFP4, where zeros are values near the others and may pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from compressor.errors import UserInputError
from harness.settings_file import SettingsPart, read_settings

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Decibels = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class SqnrLimits(SettingsPart):
    """Least signal-to-quantization-noise ratio of a weight in dB, by number format."""

    int2: Decibels = 1.0
    int3: Decibels = 3.0
    int4: Decibels = 8.0
    int5: Decibels = 14.0
    int6: Decibels = 20.0
    int7: Decibels = 26.0
    int8: Decibels = 32.0
    float4: Decibels = 14.0
    float8: Decibels = 22.0


class Policy(SettingsPart):
    """The limits of a validation."""

    confidence: Annotated[float, Field(gt=0.5, le=0.9999)] = Field(0.95, description="of every two-sided interval")
    num_resamples: Annotated[int, Field(ge=10_000, le=1_000_000)] = Field(10_000, description="bootstrap resamples of whole sequences")
    min_sequences: Annotated[int, Field(ge=2)] = Field(20, description="below this number of sequences no interval is trusted")
    max_perplexity_ratio: Annotated[float, Field(gt=1, allow_inf_nan=False)] = Field(1.05, description="compressed / base")
    max_mean_kl: Positive = Field(0.05, description="KL(base || compressed), nats per token")
    min_top1_agreement: Share = Field(0.85, description="share of positions where both models prefer the same token")
    max_accuracy_drop: Share = Field(0.01, description="of the share of right next tokens, absolute")
    allow_dequantize_load: bool = Field(False, description="loading only with dequantize=True is good enough")
    max_scale_mismatch: Positive = Field(10.0, description="mean squared deviation of the groups' gains from 1, in units of their variance")
    max_row_gain_error: Positive = Field(
        0.8,
        description="|<w, q> / <w, w> - 1| of a row or column (or what chance leaves it): 0 if faithful, 1 if dead or random",
    )
    max_row_error: Positive = Field(
        7.0,
        description="mean squared error of a row in rounding steps, in medians; beyond it half of max_row_gain_error is too much",
    )
    max_run_noise: Positive = Field(20.0, description="squared error of 8 neighbouring weights, in units of what their columns have")
    allow_unserved_schemes: bool = Field(False, description="a scheme that the server has no kernel for is good enough")
    tensor_parallel: Annotated[int, Field(ge=1, le=1024)] = Field(1, description="GPUs among which a server divides each layer")
    min_sqnr_db: SqnrLimits = Field(default_factory=SqnrLimits, description="per module, decoded weight against base weight")


def policy_of(given: object) -> Policy:
    """Return the limits that were given to a function.

    Args:
        given: a Policy, the path of its file, or None for the defaults.

    Returns:
        The policy.

    Raises:
        UserInputError: it is something else, or the file cannot be used.
    """
    if isinstance(given, str | Path):
        return load_policy(Path(given))
    if given is not None and not isinstance(given, Policy):
        raise UserInputError(f"policy: a {type(given).__name__} was given, where a Policy or the path of its file belongs; correct it")
    return given or Policy()


def load_policy(path: str | Path | None) -> Policy:
    """Read a policy file; what it does not name keeps its default.

    Args:
        path: a YAML mapping, or None for the defaults.
    Returns:
        The policy.
    Raises:
        UserInputError: the file is missing, is no YAML mapping, names an unknown limit or gives a value out of range; all of it at once.
    """
    if path is None:
        return Policy()
    path = Path(path)
    if not path.is_file():
        raise UserInputError(f"{path}: no such policy file; leave --policy away for the defaults")
    return read_settings(path, Policy, "limit")
