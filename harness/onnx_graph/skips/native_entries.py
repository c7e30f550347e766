"""The native functions through which every use of an optimizer goes, and how each takes its skip list.

Python wrappers (`onnxsim.simplify`, the command `onnxsim`, `onnxoptimizer.optimize`, `onnxruntime.InferenceSession`) look these up when
they are called, so that one place per function reaches all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import HarnessError

Names = tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """One native function.

    Attributes:
        backend: the optimizer.
        extension: the last part of the extension module's name, which its initializer fixes, wherever it is loaded from.
        path: attribute path inside it; with a class, `Class.method`.
        position: finds the index of the argument that names passes.
        force: (asked, skips) to what is used.
        container: the type in which the native function takes the names.
        graphs: (arguments, result) to the graph before and after, each bytes or a path; None where the function has neither.
        takes_no_list: `position` is that of the optimization level: the function optimizes, and cannot be told what to leave out.
    """

    backend: str
    extension: str
    path: str
    position: Callable[[Any], int]
    force: Callable[[Names, Names], Names]
    container: Callable[[Sequence[str]], Any]
    graphs: Callable[[Sequence[Any], Any], tuple[Any, Any]] | None
    takes_no_list: bool = False


def _by_signature(function: Any) -> int:
    """Find `skip_optimizers` in the signature that the binding wrote into the docstring."""
    signature = (function.__doc__ or "").partition("(")[2]
    flat = signature
    while (shorter := re.sub(r"\[[^\[\]]*\]", "", flat)) != flat:  # commas inside of type brackets do not part arguments
        flat = shorter
    names = [part.partition(":")[0].strip() for part in flat.partition(")")[0].split(",")]
    if "skip_optimizers" not in names:
        raise HarnessError(f"onnxsim: its native entry takes ({', '.join(names)}), no skip list; this release is not supported, report it")
    return names.index("skip_optimizers")


def _more_skips(asked: Names, skips: Names) -> Names:
    return (*asked, *(name for name in skips if name not in asked))


def _fewer_passes(asked: Names, skips: Names) -> Names:
    return tuple(name for name in asked if name not in skips)


def _first_and_result(arguments: Sequence[Any], result: Any) -> tuple[Any, Any]:
    return arguments[0], result


def _second_and_result(arguments: Sequence[Any], result: Any) -> tuple[Any, Any]:
    return arguments[1], result


def _two_paths(arguments: Sequence[Any], result: Any) -> tuple[Any, Any]:
    return arguments[0], arguments[1]


def _two_paths_after_executor(arguments: Sequence[Any], result: Any) -> tuple[Any, Any]:
    return arguments[1], arguments[2]


_SIM, _OPT, _ORT = "onnxsim_cpp2py_export", "onnx_opt_cpp2py_export", "onnxruntime_pybind11_state"

ENTRIES = (
    Entry("onnxsim", _SIM, "simplify", _by_signature, _more_skips, list, _second_and_result),
    Entry("onnxsim", _SIM, "simplify_path", _by_signature, _more_skips, list, _two_paths_after_executor),
    Entry("onnxoptimizer", _OPT, "optimize", lambda function: 1, _fewer_passes, list, _first_and_result),
    Entry("onnxoptimizer", _OPT, "optimize_fixedpoint", lambda function: 1, _fewer_passes, list, _first_and_result),
    Entry("onnxoptimizer", _OPT, "optimize_from_path", lambda function: 2, _fewer_passes, list, _two_paths),
    Entry("onnxoptimizer", _OPT, "optimize_fixedpoint_from_path", lambda function: 2, _fewer_passes, list, _two_paths),
    Entry("ort", _ORT, "InferenceSession.initialize_session", lambda function: 3, _more_skips, set, None),
    Entry("ort", _ORT, "ModelCompiler.__init__", lambda function: 8, _more_skips, set, None, takes_no_list=True),
)

EXTENSIONS: Mapping[str, str] = {entry.extension: entry.backend for entry in ENTRIES}
"""Extension to backend."""


def read_graph(source: Any) -> Any:
    """Read one side of a call.

    Args:
        source: serialized model or path.

    Returns:
        ModelProto.
    """
    import onnx

    return onnx.load_from_string(source) if isinstance(source, bytes) else onnx.load(source)
