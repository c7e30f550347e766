"""README.md is about the project that is there: its tree, its commands, and the tool that writes both."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def readme_tool(repo_root: Path) -> ModuleType:
    """The script .ci/readme.py as a module."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("readme_tool", repo_root / ".ci" / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tree_and_command_line_are_the_real_ones(repo_root: Path) -> None:
    done = subprocess.run([sys.executable, ".ci/readme.py", "--check"], cwd=repo_root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_tree_has_one_line_for_each_file(readme_tool: ModuleType, repo_root: Path) -> None:
    readme = (repo_root / "README.md").read_text()
    for path in readme_tool.tracked_files():
        name = path.rsplit("/", 1)[-1]
        if name != "__init__.py":
            assert re.search(rf"^ *{re.escape(name)} +\S", readme, re.MULTILINE), f"{path} has no line in the tree"


def test_folders_stand_above_their_files_with_what_the_package_says(readme_tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "rooms" / "deep").mkdir(parents=True)
    (tmp_path / "rooms" / "__init__.py").write_text('"""All rooms. And more."""')
    (tmp_path / "rooms" / "one.py").write_text('"""The first. room.\n\nLonger."""')
    (tmp_path / "rooms" / "deep" / "run").write_text("#!/bin/sh\n# Goes down.\n")
    lines = readme_tool.tree(["rooms/deep/run", "rooms/__init__.py", "rooms/one.py"], tmp_path).splitlines()
    assert [line.split() for line in lines[1:-1]] == [
        ["rooms/", "All", "rooms"],
        ["deep/"],
        ["run", "Goes", "down"],
        ["one.py", "The", "first.", "room"],
    ]


def test_a_file_that_says_nothing_is_refused(readme_tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text("x = 1\n")
    with pytest.raises(SystemExit, match=r"silent\.py: says nothing about itself"):
        readme_tool.own_line("silent.py", tmp_path)


@pytest.mark.parametrize("command", ["compressor", "harness"])
def test_every_flag_is_tried_in_a_test(readme_tool: ModuleType, repo_root: Path, command: str) -> None:
    tests = "\n".join(path.read_text() for path in (repo_root / "tests").rglob("*.py"))
    missing = [
        f"{verb} {option}"
        for verb, parser in readme_tool.verbs(command).items()
        for option in (option for action in parser._actions for option in action.option_strings)
        if option.startswith("--") and option != "--help" and not re.search(rf"{option}(?![\w-])", tests)
    ]
    assert not missing, f"no test uses {', '.join(missing)}"


def test_readme_names_the_two_commands(repo_root: Path) -> None:
    readme = (repo_root / "README.md").read_text()
    for command in ("bash .ci/demo", "bash .ci/test", "bash .ci/nightly"):
        assert command in readme
        assert (repo_root / command.split()[1]).is_file()
