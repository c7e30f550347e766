"""On a machine with a GPU only the tests that ask for one see it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TESTS = """
import os, subprocess, sys
import pytest, torch

@pytest.fixture(scope="session")
def child():
    code = "import os; print(repr(os.environ.get('CUDA_VISIBLE_DEVICES')))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

def test_of_the_processor(child):
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0 and child == "''"

@pytest.mark.gpu
def test_of_the_gpu():
    assert torch.cuda.is_available() and torch.cuda.device_count() == 2 and os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
"""


def test_a_gpu_is_seen_by_tests_marked_gpu_alone(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    pytester.makeconftest((ROOT / "conftest.py").read_text(encoding="utf-8"))
    (pytester.mkdir("tests") / "cases_per_change.txt").touch()
    pytester.makepyfile(TESTS)
    pytester.runpytest("-p", "no:cacheprovider", "--harness-profile=pr").assert_outcomes(passed=2)
