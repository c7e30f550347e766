"""The command `harness`: quick answers without torch, exit codes that tell verdicts from mistakes, one line for each mistake."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness import cli


def run_fresh(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    program = code or "import sys; from harness.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


def test_help_and_mistakes_import_nothing_heavy():
    code = """
import contextlib, io, sys
from harness.cli import main
import harness
for arguments in (["--help"], ["validate", "--help"], ["validate"], ["validate", "a", "b", "--dataset", "d", "--num-samples", "0"]):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(arguments)
heavy = {"torch", "transformers", "numpy", "matplotlib", "safetensors"} & set(sys.modules)
sys.exit(f"imported: {heavy}" if heavy else 0)
"""
    result = run_fresh(code=code)
    assert result.returncode == 0, result.stderr


def test_every_public_name_is_there_and_others_are_not():
    import harness

    for name in harness.__all__:
        assert getattr(harness, name).__doc__
    assert set(harness.__all__) <= set(dir(harness))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = harness.nonsense


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["validate", "a"], ["validate", "a", "b"],
                                       ["validate", "a", "b", "--dataset", "d", "--confidence", "95"],
                                       ["validate", "a", "b", "--dataset", "d", "--max-seq-length", "-1"],
                                       ["validate", "a", "b", "--dataset", "d", "--typo"]])  # fmt: skip
def test_wrong_arguments_exit_with_3_because_1_and_2_are_verdicts(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 3
    assert "error: " in capsys.readouterr().err.splitlines()[0]


def test_help_names_verbs_flags_and_exit_codes(capsys):
    for arguments, words in (
        (["--help"], ["validate"]),
        (["validate", "--help"], ["--policy", "--seed", "exit codes: 0 pass", "3 no verdict"]),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 0
        text = capsys.readouterr().out
        assert all(word in text for word in words)


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "harness", "validate"], capture_output=True, text=True, check=False)
    assert done.returncode == 3 and done.stderr.startswith("harness validate: error: ")
