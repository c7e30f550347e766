"""README.md and the chapters: they can be read (sizes, links), and what they show works (commands, options, Python)."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
import runpy
import shlex
import shutil
import subprocess
import textwrap
import unittest
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings

from harness.cli import spelled
from harness.lifecycle.process_state import process_kept

ROOT = Path(__file__).parents[2]
CHAPTERS = sorted(
    path
    for path in map(Path, subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())
    if (ROOT / path).is_file() and path.parts[0] != "golden"  # that of the reference model is rendered, and has a test of its own
)
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: [^\n]+ -->\n *```python\n.*?^ *```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\$ )?((?:compressor|harness) [a-z].*?)(?:\s+#.*)?$", re.MULTILINE)
TEXTS = ["The first sample is short, and there are not many of them.", "A second one, to learn from; it is longer than the first one."]


def _text(chapter: Path) -> str:
    return (ROOT / chapter).read_text(encoding="utf-8")


def _anchors(text: str) -> set[str]:
    """Those of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("chapter", CHAPTERS, ids=str)
def test_a_chapter_can_be_read(chapter: Path) -> None:
    lines = _text(chapter).splitlines()
    assert not [number for number, line in enumerate(lines, 1) if len(line) > 120]
    assert len(lines) <= 300 or chapter.name == "DECISIONS.md"
    assert lines[0].startswith("# ")
    assert not [number for number, line in enumerate(lines, 1) if line.startswith(("<<<<<<< ", ">>>>>>> "))]  # of a merge


@pytest.mark.parametrize("chapter", CHAPTERS, ids=str)
def test_every_link_leads_somewhere(chapter: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", _text(chapter)))
    for link in (link for link in links if not link.startswith("http")):
        file, _, anchor = link.partition("#")
        target = (ROOT / chapter).parent / file if file else ROOT / chapter
        assert target.exists(), f"{chapter}: {link} leads nowhere"
        assert not anchor or anchor in _anchors(target.read_text(encoding="utf-8")), f"{chapter}: {link} names no heading"


def test_every_chapter_is_on_the_map() -> None:
    linked = set(re.findall(r"\]\(([^)#\s]+)\)", _text(Path("README.md"))))
    assert {str(chapter) for chapter in CHAPTERS} - {"README.md"} <= linked


def test_every_message_that_is_explained_is_one_that_the_packages_give() -> None:
    explained = re.findall(r"^\| `([^`]+)` \|", _text(Path("compressor/cli/README.md")), re.MULTILINE)
    source = "\n".join(path.read_text(encoding="utf-8") for name in ("compressor", "harness") for path in (ROOT / name).rglob("*.py"))
    assert len(explained) > 10
    assert [message for message in explained if message not in source] == []


class _CaughtError(BaseException):
    """Ends a command where it would begin to read its arguments; no handler of errors may catch it."""


def _parser(command: str) -> argparse.ArgumentParser:
    caught: list[argparse.ArgumentParser] = []

    def catch(self: argparse.ArgumentParser, *_: object) -> None:
        caught.append(self)
        raise _CaughtError

    main = importlib.import_module({"compressor": "compressor.cli.main", "harness": "harness.cli"}[command]).main
    with mock.patch.object(argparse.ArgumentParser, "parse_args", catch), pytest.raises(_CaughtError):
        main([])
    return caught[0]


def _verbs(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield name, parser
    for group in groups:
        for verb, inner in group.choices.items():
            yield from _verbs(f"{name} {verb}", inner)


@pytest.mark.parametrize("command", ["compressor", "harness"])
def test_every_verb_has_a_line_and_every_flag_a_test(command: str) -> None:
    verbs = dict(_verbs(command, _parser(command)))
    listed = set(re.findall(rf"^\| `({command} [\w-]+)`", _text(Path("README.md")), re.MULTILINE))
    assert listed == {" ".join(verb.split()[:2]) for verb in verbs}
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    options = {(verb, option) for verb, parser in verbs.items() for action in parser._actions for option in action.option_strings}
    untried = [f"{verb} {one}" for verb, one in options if one.startswith("--") and not re.search(rf"{one}(?![\w-])", tests)]
    assert set(untried) <= {f"{verb} --help" for verb in verbs}


@pytest.mark.parametrize("chapter", CHAPTERS, ids=str)
def test_commands_have_the_options_that_are_shown(chapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _, language, block in FENCE.findall(_text(chapter)):
        for line in COMMAND.findall(block.replace("\\\n", " ")) if language != "python" else ():
            words = shlex.split(re.split(r" [>&]", line)[0])
            if "..." in words or "error:" in words:  # shortened, or what a command said
                continue
            _parser(words[0]).parse_args(_spelled(words))


def _spelled(words: list[str]) -> list[str]:
    """The arguments as the command itself completes them."""
    return spelled(words[1:]) if words[0] == "harness" else words[1:]


@pytest.mark.parametrize(
    "chapter", [chapter for chapter in CHAPTERS if "```python" in NOT_RUN.sub("", (ROOT / chapter).read_text(encoding="utf-8"))], ids=str
)
def test_python_runs_as_printed(chapter: Path, tmp_path: Path, reference_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [
        "\n".join(line.removeprefix(indent) for line in block.splitlines())
        for indent, language, block in FENCE.findall(NOT_RUN.sub("", _text(chapter)))
        if language == "python"
    ]
    _workplace(
        tmp_path, reference_model, [] if chapter == Path("README.md") else re.findall(r"MODEL-W4A16|out/reference-w4a16", str(blocks))
    )
    (tmp_path / "chapter.py").write_text("\n\n".join(blocks), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with process_kept(), warnings.catch_warnings(action="ignore"):  # an interpreter of its own would import for three seconds
        made = runpy.run_path("chapter.py", run_name="chapter")
        for case in [one for one in made.values() if isinstance(one, type) and issubclass(one, unittest.TestCase)]:
            _collected(case)


def _collected(case: Any) -> None:
    """Run what pytest would collect of a chapter: a machine, over few examples."""
    case.settings = settings(max_examples=3, stateful_step_count=4, derandomize=True, database=None, deadline=None)
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    assert result.testsRun and result.wasSuccessful(), [text for _, text in (*result.errors, *result.failures)]


PRINTED_ONLY = [
    (chapter, block)
    for chapter in CHAPTERS
    for part in NOT_RUN.findall((ROOT / chapter).read_text(encoding="utf-8"))
    for _, _, block in FENCE.findall(part)
]


@pytest.mark.parametrize(("chapter", "block"), PRINTED_ONLY, ids=[str(chapter) for chapter, _ in PRINTED_ONLY])
def test_python_that_is_not_run_imports_what_there_is_and_calls_it_as_it_can_be_called(chapter: Path, block: str) -> None:
    tree, known = ast.parse(textwrap.dedent(block)), dict[str, object]()
    imports: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), str(chapter), "exec"), known)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known]
    assert calls
    for call in calls:
        called = known[call.func.id] if isinstance(call.func, ast.Name) else None
        inspect.signature(called).bind(*call.args, **{one.arg: one.value for one in call.keywords if one.arg})  # type: ignore[arg-type]


def _workplace(folder: Path, model: Path, compressed: list[str]) -> None:
    """What the chapters take for granted: a model, data, a recipe and, where one is used that they do not make, a compressed model."""
    from safetensors.torch import load_file, save_file

    copy = shutil.copytree(model, folder / "MODEL")
    # Weights in float32: products of bfloat16 take many times as long on most CPUs.
    save_file(
        {name: tensor.float() for name, tensor in load_file(copy / "model.safetensors").items()},
        copy / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    as_today = {"max_position_embeddings": 2048, "dtype": "float32"}
    (copy / "config.json").write_text(json.dumps(config | as_today), encoding="utf-8")
    for name in ("calibration.jsonl", "heldout.jsonl"):
        (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 40), encoding="utf-8")
    fences = [block for _, language, block in FENCE.findall(_text(Path("README.md"))) if language == "yaml"]
    (folder / "recipe.yaml").write_text(fences[0], encoding="utf-8")
    for name in set(compressed):
        from compressor import oneshot

        recipe, data = str(folder / "recipe.yaml"), str(folder / "calibration.jsonl")
        oneshot(str(copy), recipe=recipe, dataset=data, num_calibration_samples=8, max_seq_length=16, output_dir=str(folder / name))
