"""The passes of each optimizer: which names it knows, which are in force, and a hash that changes with a new release.

Optimizers ignore a name they do not know, so a misspelt skip protects nothing and says nothing. Here every name is looked up first. The
lists are read from the optimizers themselves: onnxsim registers more than a third of its passes on first use only, and onnxruntime has
no function that lists its graph transformers, but logs each of them by name while it opens a session.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from compressor.errors import UserInputError
from compressor.spelling import did_you_mean
from harness.errors import HarnessError

_ORT_TRANSFORMER = re.compile(r"GraphTransformer (\S+) modified: ")

_ORT_REWRITE_RULES = (
    *("CastChainElimination", "CastElimination", "ClipQuantRewrite", "ConvAddFusion", "ConvBNFusion", "ConvMulFusion"),
    *("DivMulFusion", "EliminateDropout", "EliminateIdentity", "EliminateSlice", "ExpandElimination", "FuseReluClip"),
    *(
        "GemmSumFusion",
        "GemmTransposeFusion",
        "LabelEncoderFusion",
        "MatMul_BatchNormalization_Fusion",
        "NoopElimination",
        "NotWhereFusion",
    ),
    *("Pad_Fusion", "PreShapeNodeElimination", "ReluQuantRewrite", "UnsqueezeElimination"),
)
"""Rules inside onnxruntime's two rule-based transformers, which its log does not name (source: onnxruntime, graph_transformer_utils.cc)."""


@dataclass(frozen=True)
class PassList:
    """The passes of one optimizer.

    Attributes:
        backend: `onnxsim`, `onnxoptimizer` or `ort`.
        version: of the installed package.
        effective: those that run by default, in the order of the optimizer; after first use.
        optional: further names that it knows.
    """

    backend: str
    version: str
    effective: tuple[str, ...]
    optional: tuple[str, ...]

    @property
    def known(self) -> frozenset[str]:
        """Every name that can be skipped or asked for."""
        return frozenset(self.effective) | frozenset(self.optional)

    @property
    def sha256(self) -> str:
        """Hash of the effective list, order included: another order is another optimizer."""
        return hashlib.sha256("\n".join(self.effective).encode()).hexdigest()

    def to_dict(self) -> dict[str, object]:
        """Return the list as JSON types."""
        return {
            "backend": self.backend,
            "version": self.version,
            "effective": list(self.effective),
            "optional": sorted(self.optional),
            "sha256": self.sha256,
        }


def _onnxsim_passes() -> tuple[Sequence[str], Sequence[str]]:
    native = importlib.import_module("onnxsim.onnxsim_cpp2py_export")
    others: Callable[[], Sequence[str]] = getattr(native, "_list_other_optimizers", list)
    optional = others()  # registers the passes of onnxsim's own; before this the next list is short of 25
    return native._list_optimizers(), optional


def _onnxoptimizer_passes() -> tuple[Sequence[str], Sequence[str]]:
    native = importlib.import_module("onnxoptimizer.onnx_opt_cpp2py_export")
    effective = native.get_fuse_and_elimination_passes()
    return effective, [name for name in native.get_available_passes() if name not in effective]


def _ort_passes() -> tuple[Sequence[str], Sequence[str]]:
    names = tuple(dict.fromkeys(_ORT_TRANSFORMER.findall(_ort_log())))
    if not names:
        raise HarnessError("onnxruntime: its log names no graph transformer, so its passes are unknown; report the version")
    return names, _ORT_REWRITE_RULES


def _ort_log() -> str:
    """Return what onnxruntime logs while it opens a model of one node with all optimizations."""
    import onnx
    import onnxruntime
    from onnx import helper

    value = functools.partial(helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT, shape=[1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", [value("x")], [value("y")])
    probe = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.log_verbosity_level = 0, 1
    with native_output(2) as text:
        onnxruntime.InferenceSession(probe.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return text()


@contextlib.contextmanager
def native_output(*descriptors: int) -> Iterator[Callable[[], str]]:
    """Catch what native code writes to file descriptors.

    Args:
        *descriptors: 1 for standard output, 2 for standard error.

    Yields:
        A function that returns the text so far.
    """
    with tempfile.TemporaryFile() as file, contextlib.ExitStack() as stack:

        def text() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        for descriptor in descriptors:
            (sys.stdout if descriptor == 1 else sys.stderr).flush()
            saved = os.dup(descriptor)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, descriptor)
            os.dup2(file.fileno(), descriptor)
        yield text


_READERS: Mapping[str, tuple[str, Callable[[], tuple[Sequence[str], Sequence[str]]]]] = {
    "onnxsim": ("onnxsim", _onnxsim_passes),
    "onnxoptimizer": ("onnxoptimizer", _onnxoptimizer_passes),
    "ort": ("onnxruntime", _ort_passes),
}

BACKENDS = tuple(_READERS)
"""The optimizers whose passes can be skipped by name."""


def installed_backends() -> tuple[str, ...]:
    """Return the optimizers that can be imported here; nothing is imported."""
    return tuple(name for name, (package, _) in _READERS.items() if importlib.util.find_spec(package) is not None)


@functools.cache
def effective_passes(backend: str) -> PassList:
    """Read the passes of an installed optimizer, as they are after its first use.

    Args:
        backend: `onnxsim`, `onnxoptimizer` or `ort`.

    Returns:
        Its passes; read once per process.

    Raises:
        UserInputError: no such backend, or it is not installed.
    """
    if backend not in _READERS:
        raise UserInputError(f"passes: {backend!r} is no optimizer with named passes; choose from {', '.join(BACKENDS)}")
    package, read = _READERS[backend]
    if importlib.util.find_spec(package) is None:
        raise UserInputError(f"passes: {package} is not installed; install it, or leave the backend {backend!r} out")
    effective, optional = read()
    return PassList(backend, importlib.metadata.version(package), tuple(effective), tuple(sorted(set(optional) - set(effective))))


def resolve_skips(names: Sequence[str], backends: Sequence[str] | None = None) -> dict[str, tuple[str, ...]]:
    """Say which optimizer each name belongs to.

    Args:
        names: pass names; one that several optimizers know is skipped in all of them.
        backends: the optimizers to look in; by default all that are installed.

    Returns:
        Names by backend; a backend that knows none of them is missing.

    Raises:
        UserInputError: a name that no optimizer knows, with the nearest one; or no name at all.
    """
    if isinstance(names, str):
        raise UserInputError(f"skip: {names!r} is one text; give a list of names: {[name.strip() for name in names.split(',')]}")
    if not names:
        raise UserInputError("skip: no pass was named; name at least one, `fuse_qkv` for example")
    lists = [effective_passes(backend) for backend in backends or installed_backends()]
    known = {name for one in lists for name in one.known}
    for name in names:
        if name not in known:
            where = ", ".join(f"{one.backend} {one.version}" for one in lists) or "no installed optimizer"
            advice = f"{did_you_mean(name, known)}`harness onnx passes --json` lists all" if known else "install one of them"
            raise UserInputError(f"skip: {name!r} is no pass of {where}, which would ignore it in silence; {advice}")
    found = {one.backend: tuple(name for name in dict.fromkeys(names) if name in one.known) for one in lists}
    return {backend: skips for backend, skips in found.items() if skips}
