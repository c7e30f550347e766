"""The pytest plugin does what its help says, and nothing unasked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# Stands in for torch on a machine with a GPU.
_TORCH_WITH_CUDA = """
class cuda:
    is_available = staticmethod(lambda: True)
class device:
    def __init__(self, type): self.type = type
"""
_DRAWS = """
from hypothesis import given, settings, strategies as st
drawn = []
@given(st.integers())
def test_draw(number):
    drawn.append(number)
def test_report():
    current = settings()
    print(f"examples={len(drawn)} derandomize={current.derandomize} drawn={drawn}")
"""


@pytest.fixture(autouse=True)
def _source_tree_is_importable(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(repo_root))


def _run(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    """Run in this process; never with a profile, which would stay loaded for the tests that come after."""
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rs", *args)


def _run_apart(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *args)


def test_markers_are_known_and_explained(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    result = _run(pytester, "--markers")
    for name in ("gpu", "nightly", "release", "peer", "check(id)"):
        result.stdout.fnmatch_lines([f"@pytest.mark.{name}: *"])


def test_marked_tests_are_skipped_with_their_reason(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pytester.makepyfile("""
        import pytest
        @pytest.mark.gpu
        def test_gpu(): raise AssertionError
        @pytest.mark.nightly
        def test_nightly(): raise AssertionError
        @pytest.mark.peer
        def test_peer(peer_python): raise AssertionError
        def test_plain(): pass
    """)
    result = _run(pytester)
    result.assert_outcomes(passed=1, skipped=3)
    for reason in ("no CUDA device", "--harness-profile=nightly", "--peer-python"):
        assert reason in result.stdout.str()


def test_marked_tests_run_when_their_condition_is_met(pytester: pytest.Pytester) -> None:
    (pytester.path / "torch.py").write_text(_TORCH_WITH_CUDA)
    pytester.makepyfile("""
        import pytest
        @pytest.mark.gpu
        def test_gpu(device): assert device.type == "cuda"
        @pytest.mark.nightly
        def test_nightly(device): assert device.type == "cpu"
        @pytest.mark.peer
        def test_peer(peer_python): assert peer_python.name.startswith("python")
    """)
    _run_apart(pytester, "--harness-profile=nightly", f"--peer-python={sys.executable}").assert_outcomes(passed=3)


def test_the_peer_fixture_needs_its_option(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_unmarked(peer_python): pass")
    result = _run(pytester)
    result.assert_outcomes(errors=1)
    assert "mark the test with pytest.mark.peer" in result.stdout.str()


def _report(pytester: pytest.Pytester, *args: str) -> str:
    pytester.makepyfile(_DRAWS)
    result = _run_apart(pytester, "-s", *args)
    return next(line for line in result.outlines if "examples=" in line)


def test_pr_draws_the_same_examples_every_time(pytester: pytest.Pytester) -> None:
    first = _report(pytester, "--harness-profile=pr")
    assert "examples=25 derandomize=True" in first
    assert _report(pytester, "--harness-profile=pr") == first


def test_nightly_draws_ten_times_as_many(pytester: pytest.Pytester) -> None:
    assert "examples=250 derandomize=False" in _report(pytester, "--harness-profile=nightly")


def test_without_the_option_hypothesis_keeps_its_own_settings(pytester: pytest.Pytester) -> None:
    (pytester.path / "conftest.py").write_text(
        "from hypothesis import settings\nsettings.register_profile('own', max_examples=7)\nsettings.load_profile('own')\n"
    )
    assert "examples=7" in _report(pytester)


def test_release_tests_run_only_in_the_release_profile(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest
        @pytest.mark.release
        def test_release(): pass
        @pytest.mark.nightly
        def test_nightly(): pass
    """)
    _run(pytester).assert_outcomes(skipped=2)
    _run_apart(pytester, "--harness-profile=release").assert_outcomes(passed=2)


CHECKS = """
import pytest
@pytest.mark.check(20)
def test_twenty(): pass
@pytest.mark.check(3, 20)
def test_both(): pass
@pytest.mark.check(4)
def test_four(): pass
def test_none(): pass
"""


@pytest.mark.parametrize(("arguments", "passed"), [([], 4), (["--harness-check=20"], 2), (["--harness-check=3", "--harness-check=4"], 2)])
def test_only_the_checks_that_are_asked_for_run(pytester: pytest.Pytester, arguments: list[str], passed: int) -> None:
    pytester.makepyfile(CHECKS)
    _run(pytester, "--strict-markers", *arguments).assert_outcomes(passed=passed, deselected=4 - passed)


@pytest.mark.parametrize("marker", ["check", "check()", "check('20')", "check(id=20)"])
def test_a_check_without_a_number_is_refused(pytester: pytest.Pytester, marker: str) -> None:
    pytester.makepyfile(f"import pytest\n@pytest.mark.{marker}\ndef test_it(): pass\n")
    result = _run(pytester)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "names no number; write pytest.mark.check(20)" in result.stderr.str()


@pytest.mark.parametrize(
    ("arguments", "outcome", "message"),
    [
        (["--harness-device=auto"], {"passed": 1}, ""),
        (["--harness-device=cpu"], {"passed": 1}, ""),
        (["--harness-device=cuda:1"], {"errors": 1}, "torch sees no CUDA device"),
    ],
)
def test_the_device_is_the_one_that_is_asked_for(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, arguments: list[str], outcome: dict[str, int], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pytester.makepyfile("def test_it(device): assert device.type == 'cpu'")
    result = _run(pytester, *arguments)
    result.assert_outcomes(**outcome)
    assert message in result.stdout.str()


def test_a_device_that_torch_does_not_know_is_refused_before_any_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(): pass")
    result = _run(pytester, "--harness-device=abacus")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--harness-device=abacus: torch knows no such device; say auto, cpu, cuda or cuda:1" in result.stderr.str()


def test_the_ini_file_may_name_profile_and_device(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nharness_profile = nightly\nharness_device = cpu\n")
    assert "examples=250" in _report(pytester)
    pytester.makeini("[pytest]\nharness_profile = never\n")
    result = _run(pytester)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "harness_profile=never: does not exist" in result.stderr.str()


def test_help_explains_every_option_and_ini_value(pytester: pytest.Pytester) -> None:
    text = _run(pytester, "--help").stdout.str()
    for name in ("profile", "device", "golden-dir", "cache-dir", "reference-model", "check"):
        assert f"--harness-{name}" in text
    for name in ("harness_profile", "harness_device", "harness_golden_dir", "harness_cache_dir", "harness_reference_model"):
        assert f"{name} (string):" in text
    for name in ("--golden-update", "--golden-reason", "--golden-variant"):
        assert name in text
