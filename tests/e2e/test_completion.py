"""Shells complete verbs, flags, choices and files, from a script that the commands print."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import compressor.cli.main
import harness.cli

MAIN = {"compressor": compressor.cli.main.main, "harness": harness.cli.main}


def _script(command: str, shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        MAIN[command](["--completion", shell])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("compressor on", {"oneshot"}),
        ("compressor oneshot --qu", {"--quiet"}),
        ("compressor oneshot MODEL --mode f", {"fast"}),
        ("compressor oneshot MODEL --recipe rec", {"recipe.yaml"}),
        ("compressor oneshot MOD", {"MODEL"}),
        ("compressor recipe ch", {"check"}),
        ("harness vali", {"validate"}),
        ("harness replay --he", {"--help"}),
    ],
)
def test_bash_completes(words: str, completed: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").touch()
    (tmp_path / "MODEL").mkdir()
    command = words.split()[0]
    (tmp_path / "script.bash").write_text(_script(command, "bash", capsys), encoding="utf-8")
    at = f"COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}"
    asked = f'source script.bash; {at}; _shtab_{command}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    shell = subprocess.run(["bash", "--norc", "-c", asked], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert set(shell.stdout.split()) == completed, shell.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_of_their_own(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = _script("compressor", shell, capsys)
    assert "oneshot" in script and "recipe" in script
    assert script != _script("compressor", "bash", capsys)


def test_another_shell_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        MAIN["compressor"](["--completion", "csh"])
    assert end.value.code == 2
    assert "'csh'" in capsys.readouterr().err
