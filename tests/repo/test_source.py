"""House rules that a machine can check: sizes, docstrings, what lies at the top, and no trace of the machine it was written on."""

from __future__ import annotations

import ast
import doctest
import gc
import graphlib
import importlib
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60
TOP_LEVEL = {"README.md", "pyproject.toml", "conftest.py", "compressor", "harness", "golden", "tests"}
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".sh", ""}
# Written in pieces, so that this file does not hold what it looks for.
MACHINE_PATHS = re.compile(r"(?<![\w.])/(work|farm|root|home/\w+|opt/\w+|Users/\w+|tmp/[a-z]\w*)" + "/")
FOREIGN_FOLDERS = re.compile(r"\bshared" + r"/(design|lab|hooks)\b")
PACKAGES = ("compressor", "harness")
MAX_MODULES = 12
# What all rooms use has no room of its own: it would share nothing else.
MORE_MODULES = {"compressor": 14}
NEEDS = {
    "compressor.algorithms.rounding_triton": "triton",
    "harness.release.outside.with_vllm": "vllm",
}  # modules that are imported where a package is at hand that nobody has to install
# Tests go through public doors. What is left puts a planted bug into a private function, or looks for what must not stay behind.
MOST_PRIVATE = 37


@pytest.fixture(scope="module", autouse=True)
def _trees_live_on() -> Iterator[None]:
    """Each look for garbage among a million nodes finds none: without them parsing takes a third of the time."""
    gc.disable()
    yield
    gc.enable()


def _tracked(root: Path) -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    return [root / path for path in listing.split("\0") if path and (root / path).is_file()]


def _sources(root: Path) -> list[Path]:
    return [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(_parsed(path)):
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


def test_rooms_stay_small(repo_root: Path) -> None:
    rooms = Counter(path.parent.relative_to(repo_root).as_posix() for path in _sources(repo_root) if not path.stem.startswith("__"))
    assert not {room: count for room, count in rooms.items() if count > MORE_MODULES.get(room, MAX_MODULES)}


def _private(path: Path) -> set[str]:
    """What a file defines with a leading underscore: functions, classes, variables, attributes of its objects."""
    names = set()
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in names if name.startswith("_") and not name.endswith("__")}


# `thing._name`, "_name" for `setattr` and `patch.object`, `import _name`; what a class of the file calls its own is none.
REACHED = re.compile(
    r"""(?<!\bself)(?<!\bcls)(?<!super\(\))\.(_[A-Za-z]\w*)|["'](?:[\w.]+\.)?(_[A-Za-z]\w*)["']|import .*\b(_[A-Za-z]\w*)"""
)
OWN = re.compile(r"(?:\b(?:def|class) |\b(?:self|cls)\.|^ *)(_[A-Za-z]\w*)", re.MULTILINE)


def test_tests_reach_for_few_private_names(repo_root: Path) -> None:
    """Those that torch, transformers and tuples have by the same name are theirs; bugs are planted where they would stand."""
    theirs = {*dir(torch), *dir(torch.nn.Module()), *dir(torch.Tensor), "_attn_implementation", "_experts_implementation"}
    theirs |= {"_cdata", "_dynamo", "_from_config", "_is_quantized", "_op", "_replace", "_schema", "_weight_conversions"}
    ours = set().union(*(_private(path) for path in _sources(repo_root))) - theirs
    found = []
    for path in sorted({*(repo_root / "tests").rglob("*.py")} - {*(repo_root / "tests" / "mutation").rglob("*.py")}):
        text = path.read_text(encoding="utf-8")
        own = set(OWN.findall(text))
        for number, line in enumerate(text.splitlines(), 1):
            names = {name for groups in REACHED.findall(line) for name in groups}
            found += [f"{path.relative_to(repo_root)}:{number}: {name}" for name in sorted(names & ours - own)]
    assert len(found) <= MOST_PRIVATE, "\n".join(found)


@pytest.mark.parametrize(
    "line", ["from x import a, _b", "x = thing._b(1)", 'monkeypatch.setattr(thing, "_b", 1)', 'patch("some.module._b")', "a = [self.x._b]"]
)
def test_a_private_name_that_is_reached_for_is_seen(line: str) -> None:
    assert "_b" in {name for groups in REACHED.findall(line) for name in groups}


def test_tiny_models_have_one_home(repo_root: Path) -> None:
    """Those for a GPU have its sizes; the reference model and benchmarks are no tests."""
    own = re.compile(r"\b(Llama|Gemma2|Mixtral|Qwen3Moe|OPT|GPT2|Bert|T5)Config\(")
    others = {"gpu", "bench", "reference_model"}
    files = [path for path in (repo_root / "tests").rglob("*.py") if path.relative_to(repo_root).parts[1] not in others]
    assert [path for path in files if own.search(path.read_text(encoding="utf-8"))] == []
    assert len([path for path in files if "tiny." in path.read_text(encoding="utf-8")]) > 50


def test_no_tensor_is_made_in_the_default_dtype(repo_root: Path) -> None:
    made = ("zeros", "ones", "empty", "full", "eye", "rand", "randn", "linspace", "logspace", "tensor", "scalar_tensor")
    found = []
    for path in (path for path in _sources(repo_root) if path.relative_to(repo_root).parts[0] == "compressor"):
        calls = (node for node in ast.walk(_parsed(path)) if isinstance(node, ast.Call))
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
    return [importlib.import_module(name) for name in [*PACKAGES, *names] if _is_here(NEEDS.get(name))]


def _is_here(package: str | None) -> bool:
    return package is None or importlib.util.find_spec(package) is not None


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


def test_packages_list_files_that_are_there(repo_root: Path) -> None:
    listed = re.compile(r"(?<![\w./])[a-z_0-9]+\.py\b")
    rooms = [path for path in _sources(repo_root) if path.name == "__init__.py"]
    gone = [
        f"{path.relative_to(repo_root)}: {name}"
        for path in rooms
        for name in listed.findall(ast.get_docstring(_parsed(path)) or "")
        if not (path.parent / name).is_file()
    ]
    assert not gone, "\n".join(gone)


def _says_something(thing: Any) -> bool:
    """A class must speak for itself: what it inherits, or what `dataclass` writes, is about something else."""
    if inspect.isclass(thing):
        return bool(thing.__doc__) and not thing.__doc__.startswith(f"{thing.__name__}(")
    return bool(inspect.getdoc(thing))


@pytest.mark.filterwarnings("default")
def test_examples_in_docstrings_are_true() -> None:
    # doctest looks at every name of a module, which takes longer than all examples together.
    shown = [module for module in _modules() if ">>>" in Path(str(module.__file__)).read_text(encoding="utf-8")]
    results = {module.__name__: doctest.testmod(module) for module in shown}
    assert not {name: result.failed for name, result in results.items() if result.failed}
    assert sum(result.attempted for result in results.values()) >= 10


@pytest.mark.filterwarnings("default")
def test_public_names_exist_and_no_module_hides_one() -> None:
    public = [module for module in _modules() if hasattr(module, "__path__") and hasattr(module, "__all__")]
    assert len(public) > 10
    for module in public:  # all modules are imported by now, which sets the attribute `name` of a package to its module of that name
        assert [name for name in module.__all__ if inspect.ismodule(getattr(module, name))] == [], module
        assert set(module.__all__) <= set(dir(module)), module


def test_json_and_yaml_of_others_have_one_reader_each(repo_root: Path) -> None:
    """A bare `json.loads` ends in a RecursionError, and a bare loader of YAML in the errors of its library."""
    own = {"json_text.py", "yaml_text.py", "container.py", "history.py", "checkpoint.py", "run_folder.py"}  # the last three: under a digest
    bare = re.compile(r"\bjson\.loads?\((?!json\.dumps)|\byaml\.(safe_|full_)?load|\byaml\.compose")
    assert [path for path in _sources(repo_root) if path.name not in own and bare.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("code", ["import compressor, compressor.cli.main", "import harness, harness.cli", "import harness.plugin"])
def test_heavy_libraries_are_imported_only_when_needed(repo_root: Path, code: str) -> None:
    check = f"import sys; {code}; print([name for name in ('torch', 'transformers', 'matplotlib', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], cwd=repo_root, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def _import_graph(paths: Iterable[Path], root: Path) -> dict[str, set[str]]:
    """What each module imports, whether as it is loaded, for the type checker alone or in a function; a package is its `__init__`."""
    modules = {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    graph = {}
    for name, path in modules.items():
        wanted = {target for node in ast.walk(_parsed(path)) for target in _imported(node, modules)}
        graph[name] = wanted & modules.keys() - {name}
    return graph


def _imported(node: ast.AST, modules: Collection[str]) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.module:
        longer = [f"{node.module}.{alias.name}" for alias in node.names]
        return [name if name in modules else node.module for name in longer]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def test_no_module_needs_itself(repo_root: Path) -> None:
    graph = _import_graph(_sources(repo_root), repo_root)
    assert len(graph) > 300 and sum(map(len, graph.values())) > 1000
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises an error that names the circle


@pytest.mark.parametrize("back", ["import package.a", "def f():\n    from package.a import A", "from package import a", "import package"])
def test_a_circle_is_found_wherever_it_closes(back: str, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for name, text in {"__init__": "from package.a import A", "a": "from package.b import B", "b": back}.items():
        (tmp_path / "package" / f"{name}.py").write_text(text)
    graph = _import_graph(tmp_path.rglob("*.py"), tmp_path)
    with pytest.raises(graphlib.CycleError):
        tuple(graphlib.TopologicalSorter(graph).static_order())


def _narrows(test: ast.expr) -> bool:
    """Whether an assertion tells the type checker what a value is, and nothing about what it holds."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return all(map(_narrows, test.values))
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return isinstance(test.operand, ast.Call) and _narrows(test.operand)
    if isinstance(test, ast.Compare):
        return [type(operator) for operator in test.ops] == [ast.IsNot] and ast.unparse(test.comparators[0]) == "None"
    return isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance"


def _odd_statements(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and not _narrows(node.test):
            yield node.lineno, "assert guards data, which python -O would let through; raise an error that says what to do"
        if isinstance(node, ast.ClassDef):
            hidden = [inner for one in node.body if isinstance(one, ast.If) for inner in one.body]
            if any(isinstance(one, ast.AnnAssign) for one in hidden):
                yield node.lineno, f"{node.name} declares attributes of its host; hand them to its methods"


def test_no_assertion_guards_data_and_no_mixin_declares_its_host(repo_root: Path) -> None:
    found = [f"{path.relative_to(repo_root)}:{line}: {why}" for path in _sources(repo_root) for line, why in _odd_statements(_parsed(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "is_odd"),
    [
        ("assert x is not None and isinstance(y, int)", False),
        ("assert len(x) == 2", True),
        ("assert x is not None or y", True),
        ("assert x.dtype is not torch.int8", True),
        ("class Mixin:\n    if TYPE_CHECKING:\n        host: int", True),
        ("class Own:\n    own: int = 0", False),
    ],
)
def test_odd_statements_are_found(text: str, is_odd: bool) -> None:
    assert bool([*_odd_statements(ast.parse(text))]) is is_odd
