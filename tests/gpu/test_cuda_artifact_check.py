"""Check 60 on a GPU: a checkpoint is the same on both devices, and a device that computes something else is caught."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from compressor import oneshot
from harness import check
from harness.checks.adapters.ours import OurArtifact
from harness.checks.suites import artifact
from harness.reporting.verdict import Outcome

pytestmark = pytest.mark.gpu

REFERENCE = Path(__file__).parents[2] / "golden" / "reference"


@pytest.mark.check(60)
def test_codes_and_loss_are_the_same_on_both_devices(tmp_path):
    recipe = {"s_stage": {"s_modifiers": {"QuantizationModifier": {"scheme": "W4A16", "targets": ["Linear"], "ignore": ["lm_head"]}}}}
    oneshot(str(REFERENCE), recipe=recipe, output_dir=str(tmp_path / "w4"), device="cpu")
    subject = OurArtifact(REFERENCE, tmp_path / "w4")
    record = check(subject, checks=[60]).records[0]
    assert record.outcome is Outcome.PASS, record.summary
    load = artifact.load_compressed

    def wrong_on_cuda(folder, device):
        model = load(folder, device=device)
        if device == "cuda":
            model.model.layers[2].mlp.up_proj.weight_scale.mul_(2)
        return model

    with mock.patch.object(artifact, "load_compressed", wrong_on_cuda):
        assert check(subject, checks=[60]).records[0].outcome is Outcome.FAIL
