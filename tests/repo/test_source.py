"""House rules that a machine can check: sizes, docstrings, what lies at the top, and no trace of the machine it was written on."""

from __future__ import annotations

import ast
import doctest
import graphlib
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60
TOP_LEVEL = {"README.md", "pyproject.toml", "conftest.py", "compressor", "harness", "golden", "tests"}
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".sh", ""}
# Written in pieces, so that this file does not hold what it looks for.
MACHINE_PATHS = re.compile(r"(?<![\w.])/(work|farm|root|home/\w+|opt/\w+|Users/\w+|tmp/[a-z]\w*)" + "/")
FOREIGN_FOLDERS = re.compile(r"\bshared" + r"/(design|lab|hooks)\b")
PACKAGES = ("compressor", "harness")


def _tracked(root: Path) -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    return [root / path for path in listing.split("\0") if path and (root / path).is_file()]


def _sources(root: Path) -> list[Path]:
    return [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_files_and_functions_keep_their_budget(repo_root: Path) -> None:
    long = []
    for path in _sources(repo_root):
        lines = len(path.read_text().splitlines())
        if lines > MAX_FILE_LINES:
            long.append(f"{path.relative_to(repo_root)}: {lines} lines")
        for node in _functions(path):
            body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
            length = (node.end_lineno or 0) - body[0].lineno + 1
            if length > MAX_FUNCTION_LINES:
                long.append(f"{path.relative_to(repo_root)}:{node.lineno}: {node.name} has {length} lines below its docstring")
    assert not long, "\n".join(long)


def test_no_tensor_is_made_in_the_default_dtype(repo_root: Path) -> None:
    made = ("zeros", "ones", "empty", "full", "eye", "rand", "randn", "linspace", "logspace", "tensor", "scalar_tensor")
    found = []
    for path in _sources(repo_root):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        if path.relative_to(repo_root).parts[0] == "compressor":
            bare = [call for call in calls if all(keyword.arg != "dtype" for keyword in call.keywords)]
            found += [f"{path}:{call.lineno}" for call in bare if ast.unparse(call.func) in {f"torch.{name}" for name in made}]
    assert not found, "\n".join(found)


def test_top_level_holds_only_what_belongs_there(repo_root: Path) -> None:
    names = {path.relative_to(repo_root).parts[0] for path in _tracked(repo_root)}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


def test_no_package_below_tests(repo_root: Path) -> None:
    assert not list((repo_root / "tests").rglob("__init__.py"))


def test_test_files_have_unique_names(repo_root: Path) -> None:
    names = [path.name for path in (repo_root / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})


@pytest.mark.parametrize("pattern", [MACHINE_PATHS, FOREIGN_FOLDERS], ids=["machine paths", "foreign folders"])
def test_no_trace_of_one_machine(repo_root: Path, pattern: re.Pattern[str]) -> None:
    found = [
        f"{path.relative_to(repo_root)}:{number}: {line.strip()[:100]}"
        for path in _tracked(repo_root)
        if path.suffix in TEXT_SUFFIXES and path.name != "tokenizer.json"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "is_found"),
    [("cd /wo" + "rk/main", True), ("'/ro" + "ot/x'", True), ("a/work/b", False), ("tests/root/x", False), ("/tm" + "p/out/x", True)],
)
def test_the_pattern_for_machine_paths_finds_them(text: str, is_found: bool) -> None:
    assert bool(MACHINE_PATHS.search(text)) is is_found


def _modules() -> list[ModuleType]:
    names = [
        info.name for package in PACKAGES for info in pkgutil.walk_packages(importlib.import_module(package).__path__, prefix=f"{package}.")
    ]
    return [importlib.import_module(name) for name in [*PACKAGES, *names]]


def _public_things(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield every public class, function and method that the module itself defines; an override inherits its docstring."""
    yield module.__name__, module
    for name, thing in vars(module).items():
        if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(thing) or inspect.isfunction(thing):
            yield f"{module.__name__}.{name}", thing
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                if not member.startswith("_") and isinstance(value, property | classmethod | staticmethod | FunctionType):
                    yield f"{module.__name__}.{name}.{member}", getattr(thing, member)


@pytest.mark.filterwarnings("default")
def test_every_public_name_says_what_it_is() -> None:
    silent = [name for module in _modules() for name, thing in _public_things(module) if not _says_something(thing)]
    assert not silent, "\n".join(silent)


def _says_something(thing: Any) -> bool:
    """A class must speak for itself: what it inherits, or what `dataclass` writes, is about something else."""
    if inspect.isclass(thing):
        return bool(thing.__doc__) and not thing.__doc__.startswith(f"{thing.__name__}(")
    return bool(inspect.getdoc(thing))


@pytest.mark.filterwarnings("default")
def test_examples_in_docstrings_are_true() -> None:
    failed = {module.__name__: doctest.testmod(module).failed for module in _modules()}
    assert not {name: count for name, count in failed.items() if count}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("package", PACKAGES)
def test_a_public_name_is_not_hidden_by_the_module_that_defines_it(package: str) -> None:
    _modules()  # importing `package.name` sets the attribute `name` of the package to the module
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if inspect.ismodule(getattr(module, name))] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_in_all_exists(package: str) -> None:
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("code", ["import compressor, compressor.cli.main", "import harness, harness.cli", "import harness.plugin"])
def test_heavy_libraries_are_imported_only_when_needed(repo_root: Path, code: str) -> None:
    check = f"import sys; {code}; print([name for name in ('torch', 'transformers', 'matplotlib', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], cwd=repo_root, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def _imports(nodes: list[ast.stmt]) -> Iterator[str]:
    """What a module names as it is loaded, and what it names for the type checker alone."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.If):
            yield from _imports([*node.body, *node.orelse])


def test_no_file_needs_itself(repo_root: Path) -> None:
    files = {
        ".".join(path.relative_to(repo_root).with_suffix("").parts): path for path in _sources(repo_root) if path.name != "__init__.py"
    }
    graph = {name: {*_imports(ast.parse(path.read_text(encoding="utf-8")).body)} & files.keys() for name, path in files.items()}
    assert len(graph) > 300 and sum(map(len, graph.values())) > 1000
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises an error that names the circle
