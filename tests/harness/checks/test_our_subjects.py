"""Everything of ours passes what its tags promise; what compressed-tensors does otherwise is listed with its reason."""

from __future__ import annotations

from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationArgs as TheirArgs

import harness
from harness.checks.ours import LAYERS, OBSERVERS, PACKERS, QUANTIZERS, SOLVERS, SUBJECTS
from harness.reporting.verdict import Outcome

# Random inputs are drawn for one of each kind; the others differ in their formats only.
DRAWN = ("int4-group16", "int8-asym-token-dynamic", "fp4-tensor_group16", "pack_int32-3bit-dim1", "pack_fp4")


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_ours_passes(subject: Any) -> None:
    report = harness.check(subject, draws=subject.name in DRAWN)
    assert report.passed, str(report)


def test_names_are_unique_and_every_kind_is_there() -> None:
    assert len({subject.name for subject in SUBJECTS}) == len(SUBJECTS)  # type: ignore[attr-defined]
    assert all((QUANTIZERS, PACKERS, OBSERVERS, LAYERS, SOLVERS))


# In bfloat16 and float16 it divides in the dtype of the weight, so that codes beside a tie come out one off.
DIVIDES_NARROWLY = dict.fromkeys(
    ("quantizer.nearest_codes", "quantizer.conditions_meet"), "compressed-tensors divides weights by their scale in the weight's own dtype"
)
# The largest value less the smallest one is computed in the dtype of the weight, in which it may be no number any more.
RANGE_OVERFLOWS = dict.fromkeys(
    ("quantizer.scales_positive", "quantizer.scale_rule", "quantizer.covers", "quantizer.codes_come_back"),
    "compressed-tensors takes the range of asymmetric weights in their own dtype, where it overflows",
)
THEIRS = [
    (TheirArgs(num_bits=4, group_size=16, strategy="group"), DIVIDES_NARROWLY),
    (TheirArgs(num_bits=8, strategy="channel"), DIVIDES_NARROWLY),
    (TheirArgs(num_bits=8, type="float", strategy="tensor"), DIVIDES_NARROWLY),
    (
        TheirArgs(num_bits=8, group_size=16, strategy="group", symmetric=False),
        {
            **DIVIDES_NARROWLY,
            **RANGE_OVERFLOWS,
            "quantizer.half_step": "so that errors exceed half a step",
            "quantizer.given_scales": "and adds the zero point there, too",
        },
    ),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("args", "reasons"), THEIRS, ids=["int4", "int8", "fp8", "int8-asym"])
def test_theirs_passes_but_for_what_is_listed(args: TheirArgs, reasons: dict[str, str]) -> None:
    report = harness.check(args, draws=False, expected_failures=reasons)
    assert report.passed, str(report)
    assert sum(record.outcome is Outcome.SKIP for record in report.records) > len(reasons)


def test_torchao_is_checked_where_it_is_installed() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    from harness.checks.adapters.torchao import TorchaoQuantizer

    report = harness.check(TorchaoQuantizer(), draws=False)
    assert report.passed, str(report)
