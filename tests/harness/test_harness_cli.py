"""The command `harness`: quick answers without torch, exit codes that tell verdicts from mistakes, one line for each mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness import cli
from harness.cli import main


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


@pytest.mark.parametrize("verb", ["onnx census", "verify", "nightly judge --history", "report --output-dir out"])
def test_a_name_that_the_system_refuses_is_told_in_a_line(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for name, said in (("x" * 300, "is a longer name than the system takes; give a shorter one"), ("loop", "")):
        path = f"{tmp_path / name}.py:M" if verb == "verify" else str(tmp_path / name)
        assert main([*verb.split(), path]) == 3
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith(f"harness {verb.split()[0]}: error: ") and said in lines[0]


def test_json_that_is_no_model_is_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in ('{"a": 1}', "[" * 10000):
        (tmp_path / "config.json").write_text(content)
        assert main(["onnx", "census", str(tmp_path / "config.json")]) == 3
        assert "config.json: this is no ONNX model" in capsys.readouterr().err
