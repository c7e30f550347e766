"""Write the two parts of README.md that must not drift: the tree of files and the reference of the command line.

`python .ci/readme.py` rewrites what stands between the markers; `--check` only says whether it is up to date.
Run it from the environment of the project. The tree says of each file what the file says of itself.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("compressor", "harness")
COLUMN = 44
# What files that cannot speak for themselves would say.
TEXTS = {
    "README.md": "This page",
    "pyproject.toml": "Packaging, and the settings of every checker",
    ".gitignore": "What tools leave behind",
    ".github/LICENSE": "Apache-2.0",
    "compressor/py.typed": "Tells type checkers that the package is annotated",
    "harness/py.typed": "Tells type checkers that the package is annotated",
    "golden/onnx_passes.json": "Passes in force per release of each ONNX optimizer",
    "golden/figures/fusing-cost-minilm.svg": "What one scale over Q, K and V costs on MiniLM",
    "golden/reference/README.md": "What the reference model is and how it was made",
    "golden/reference/model.safetensors": "Its weights, bf16",
    "golden/reference/config.json": "Its architecture",
    "golden/reference/generation_config.json": "How it generates",
    "golden/reference/tokenizer.json": "Byte-level BPE of 2,048 tokens",
    "golden/reference/tokenizer_config.json": "How transformers loads the tokenizer",
    "golden/reference/training.json": "The record of its training",
    "golden/reference/calibration.safetensors": "Token sequences to calibrate on",
    "golden/reference/heldout.safetensors": "Token sequences to judge by",
    "golden/reference/arrays.json": "Which files the sequences were cut from",
    "golden/reference/quality.json": "What 4-bit quantization does to it, with intervals",
    "golden/graphs/manifest.json": "What the stages of the graph engine put out; the goldens lie beside their manifests",
    "golden/layers/manifest.json": "Every runtime layer x scheme x odd shapes: buffers, codes, outputs",
    "golden/logits/manifest.json": "Logits of the reference model, rounded to nearest, per scheme",
    "golden/packers/manifest.json": "Packed words of every width",
    "golden/solvers/manifest.json": "GPTQ and round-to-nearest on stored inputs",
}
# `harness golden list` lists these.
SINGLE_GOLDENS = re.compile(r"golden/(?!reference/).*\.safetensors")


def tracked_files(root: Path = ROOT) -> list[str]:
    """Return what git tracks and the disk holds, without single goldens, folders before the files beside them."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    paths = (path for path in listing.split("\0") if path and (root / path).is_file() and not SINGLE_GOLDENS.fullmatch(path))
    return sorted(paths, key=_tree_order)


def own_line(path: str, root: Path = ROOT) -> str:
    """Return what a file says about itself: the first sentence of its docstring or of its first comment."""
    if path in TEXTS:
        return TEXTS[path]
    text = (root / path).read_text(encoding="utf-8")
    if path.endswith(".py"):
        said = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    else:
        comments = [line for line in text.splitlines() if line.startswith("#") and not line.startswith("#!")]
        said = comments[0].lstrip("# ") if comments else ""
    if not said:
        raise SystemExit(f"{path}: says nothing about itself; begin it with a docstring or a comment, or name it in TEXTS of .ci/readme.py")
    return re.split(r"\. (?=[A-Z])", said)[0].rstrip(".")


def tree(paths: Sequence[str], root: Path = ROOT) -> str:
    """Return one line a file; what a package's `__init__.py` says stands beside the folder."""
    lines: list[str] = []
    above: list[str] = []
    for path in paths:
        *folders, name = path.split("/")
        for depth, folder in enumerate(folders):
            if above[: depth + 1] != folders[: depth + 1]:
                init = "/".join([*folders[: depth + 1], "__init__.py"])
                lines.append(_line(depth, f"{folder}/", own_line(init, root) if init in paths else ""))
        above = folders
        if name != "__init__.py":
            lines.append(_line(len(folders), name, own_line(path, root)))
    return "```\n" + "\n".join(lines) + "\n```"


def command_line(commands: Sequence[str] = COMMANDS) -> str:
    """Return a heading and a table for each verb of each command."""
    parts = []
    for command in commands:
        for name, parser in verbs(command).items():
            rows = [f"| {_spelling(action)} | {_meaning(action)} |" for action in parser._actions if "--help" not in action.option_strings]
            table = ["", "| argument | meaning |", "| --- | --- |", *rows] if rows else []
            parts.append("\n".join([f"### `{name}`", *([parser.description] if parser.description else []), *table]))
    return "\n\n".join(parts)


def verbs(command: str) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each full verb (`compressor recipe check`), caught at the moment when the command would read its arguments."""
    caught: list[argparse.ArgumentParser] = []

    def catch(self: argparse.ArgumentParser, *_: object) -> None:
        caught.append(self)
        raise _Caught

    main = importlib.import_module(f"{command}.cli").main
    try:
        with mock.patch.object(argparse.ArgumentParser, "parse_args", catch):
            main([])
    except _Caught:
        pass
    return dict(_leaves(command, caught[0]))


def updated(readme: str) -> str:
    """Return the text of README.md with both parts as they are today."""
    for name, part in (("tree", tree(tracked_files())), ("command line", command_line())):
        begin, end = f"<!-- {name}: written by .ci/readme.py -->", f"<!-- end of {name} -->"
        before, _, rest = readme.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"README.md: holds no part between {begin} and {end}")
        readme = f"{before}{begin}\n{part}\n{end}{after}"
    return readme


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite both parts, or with --check tell whether they would change."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something is out of date")
    args = parser.parse_args(argv)
    sys.path.insert(0, str(ROOT))
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    new = updated(text)
    if args.check and new != text:
        print("README.md: is out of date; run python .ci/readme.py", file=sys.stderr)
        return 1
    if not args.check:
        path.write_text(new, encoding="utf-8")
    return 0


class _Caught(BaseException):
    """Ends a command where it would begin to read its arguments; no handler of errors may catch it."""


def _leaves(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield name, parser
    for group in groups:
        for verb, inner in group.choices.items():
            yield from _leaves(f"{name} {verb}", inner)


def _tree_order(path: str) -> list[tuple[bool, str]]:
    parts = path.split("/")
    return [(index == len(parts) - 1, part) for index, part in enumerate(parts)]


def _line(depth: int, name: str, said: str) -> str:
    entry = "  " * depth + name
    return f"{entry:<{COLUMN}} {said}".rstrip()


def _spelling(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    if action.nargs == 0:
        return ", ".join(f"`{option}`" for option in action.option_strings)
    value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper())
    return ", ".join(f"`{option} {value}`" for option in action.option_strings)


def _meaning(action: argparse.Action) -> str:
    said = (action.help or "") % {**vars(action), "prog": ""}
    return said.replace("|", "\\|")


if __name__ == "__main__":
    raise SystemExit(main())
