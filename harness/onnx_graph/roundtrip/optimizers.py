"""The optimizers that a round trip goes through, as one table: a model in, the optimized model out, passes skipped where it can.

Every one is called the way its users call it. What it prints is swallowed, what it raises becomes an OptimizerFailure with its name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from compressor.errors import UserInputError
from compressor.spelling import did_you_mean
from harness.errors import HarnessError
from harness.onnx_graph.graph.reading import load_graph
from harness.onnx_graph.skips.intercept import INTERCEPTOR
from harness.onnx_graph.skips.passes import effective_passes, native_output, resolve_skips
from harness.reporting.text import plain_text


class OptimizerFailure(HarnessError):
    """An optimizer raised, or made no graph that can run: the graph could not be analysed, which is never a pass."""


@dataclass(frozen=True)
class Optimizer:
    """One way to optimize.

    Attributes:
        name: in commands and reports.
        package: that must be installed.
        backend: whose pass names it can skip; empty if it has none.
        call: (model, names to skip, whether to log what passes did) to the optimized model; the given model may be changed.
        acted: finds the passes that changed something in the log; None where the log does not say.
    """

    name: str
    package: str
    backend: str
    call: Callable[[onnx.ModelProto, Sequence[str], bool], onnx.ModelProto]
    acted: re.Pattern[str] | None = None

    @property
    def installed(self) -> bool:
        """Whether its package can be imported."""
        return importlib.util.find_spec(self.package) is not None


def _onnxsim(model: onnx.ModelProto, skip: Sequence[str], log: bool) -> onnx.ModelProto:
    import onnxsim

    with INTERCEPTOR.exclusive(), _variable("ONNXSIM_PROFILE_PASS_PHASES", "1" if log else None):
        simplified, _ = onnxsim.simplify(model, skipped_optimizers=list(skip))
    return simplified


def _onnxslim(model: onnx.ModelProto, skip: Sequence[str], log: bool) -> onnx.ModelProto:
    import onnxslim

    return onnxslim.slim(model)


def _onnxoptimizer(model: onnx.ModelProto, skip: Sequence[str], log: bool) -> onnx.ModelProto:
    import onnxoptimizer

    passes = [name for name in effective_passes("onnxoptimizer").effective if name not in skip]
    return onnxoptimizer.optimize(model, passes, fixed_point=True)


def _onnxscript(model: onnx.ModelProto, skip: Sequence[str], log: bool) -> onnx.ModelProto:
    import onnxscript.optimizer
    import onnxscript.rewriter

    return onnxscript.rewriter.rewrite(onnxscript.optimizer.optimize(model))


def _transformer_optimizer(model: onnx.ModelProto, skip: Sequence[str], log: bool) -> onnx.ModelProto:
    from onnxruntime.transformers import optimizer

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(model, path)
        optimized = optimizer.optimize_model(str(path), model_type="bert", num_heads=0, hidden_size=0, opt_level=0, use_gpu=False)
        optimized.save_model_to_file(str(path))  # which names the version of its operators
        return onnx.load(path)


def _ort(level: str) -> Callable[[onnx.ModelProto, Sequence[str], bool], onnx.ModelProto]:
    def call(model: onnx.ModelProto, skip: Sequence[str], log: bool) -> onnx.ModelProto:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level, options.log_verbosity_level = (0, 1) if log else (3, 0)
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "model.onnx", Path(folder) / "optimized.onnx"
            onnx.save(model, source)
            options.optimized_model_filepath = str(target)
            onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"], disabled_optimizers=list(skip))
            return onnx.load(target)

    return call


_ONNXSIM_ACTED = re.compile(r"^(\w+)\s+[\d.]+\s+\d+\s+[\d.]+\s+[1-9]\d*\s", re.MULTILINE)
_ORT_ACTED = re.compile(r"GraphTransformer (\S+) modified: 1")

OPTIMIZERS: Mapping[str, Optimizer] = {
    one.name: one
    for one in (
        Optimizer("onnxsim", "onnxsim", "onnxsim", _onnxsim, _ONNXSIM_ACTED),
        Optimizer("onnxslim", "onnxslim", "", _onnxslim),
        Optimizer("onnxoptimizer", "onnxoptimizer", "onnxoptimizer", _onnxoptimizer),
        Optimizer("ort-basic", "onnxruntime", "ort", _ort("BASIC"), _ORT_ACTED),
        Optimizer("ort-extended", "onnxruntime", "ort", _ort("EXTENDED"), _ORT_ACTED),
        Optimizer("ort-all", "onnxruntime", "ort", _ort("ALL"), _ORT_ACTED),
        Optimizer("ort-transformers", "onnxruntime", "", _transformer_optimizer),
        Optimizer("onnxscript", "onnxscript", "", _onnxscript),
    )
}
"""Name to optimizer."""


@dataclass(frozen=True)
class Optimized:
    """What an optimizer made of a model.

    Attributes:
        model: the result.
        acted: the passes that changed something; None where the optimizer does not say, or was not asked.
        seconds: wall time.
    """

    model: onnx.ModelProto
    acted: tuple[str, ...] | None
    seconds: float


def optimize(model: onnx.ModelProto, name: str, skip: Sequence[str] = ()) -> onnx.ModelProto:
    """Run one optimizer on a copy of a model.

    Args:
        model: not modified.
        name: a key of OPTIMIZERS.
        skip: passes to leave out.

    Returns:
        The optimized model.

    Raises:
        UserInputError: no such optimizer, it is not installed, it has no passes to skip, or it knows no such pass.
        OptimizerFailure: it raised, or made a graph that cannot run.
    """
    return run_optimizer(model, name, skip).model


def run_optimizer(model: onnx.ModelProto, name: str, skip: Sequence[str] = (), *, log: bool = False) -> Optimized:
    """Run one optimizer on a copy of a model, and say what it took.

    Args:
        model: not modified.
        name: a key of OPTIMIZERS.
        skip: passes to leave out.
        log: find out which passes changed something, where the optimizer says so.

    Returns:
        The optimized model, the passes that acted, and the time.

    Raises:
        UserInputError: no such optimizer, it is not installed, it has no passes to skip, or it knows no such pass.
        OptimizerFailure: it raised, or made a graph that cannot run.
    """
    chosen = find_optimizer(name)
    if skip and not chosen.backend:
        given = ", ".join(skip)
        raise UserInputError(f"optimizer: {name} has no passes that can be skipped by name, and {given} was given; leave the skips out")
    names = resolve_skips(skip, [chosen.backend])[chosen.backend] if skip else ()
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    begin = time.perf_counter()
    try:
        with contextlib.redirect_stdout(io.StringIO()), native_output(2) as text:
            optimized = chosen.call(copy, names, log)
            acted = tuple(dict.fromkeys(chosen.acted.findall(text()))) if log and chosen.acted is not None else None
    except Exception as error:  # whatever native code throws; it is told apart, and never taken for a pass
        raise OptimizerFailure(f"{name}: it failed with {type(error).__name__}: {_words(str(error))}") from error
    seconds = time.perf_counter() - begin
    try:
        load_graph(optimized)
    except UserInputError as error:  # its remedy is for the graph that was exported, and this is not to blame
        wrong = str(error).removeprefix("graph: ").rpartition(";")[0]
        raise OptimizerFailure(f"{name}: it made a graph that cannot run: {wrong}; leave it out") from error
    return Optimized(optimized, acted, seconds)


def _words(text: str) -> str:
    """What native code says, without the folder in which somebody built it."""
    return re.sub(r"(?<!\S)/\S*/(?=[\w.]+:\d+)", "", plain_text(text))[:300]


def find_optimizer(name: str) -> Optimizer:
    """Look an optimizer up.

    Args:
        name: a key of OPTIMIZERS.

    Returns:
        The optimizer.

    Raises:
        UserInputError: no such optimizer, or it is not installed.
    """
    if name not in OPTIMIZERS:
        raise UserInputError(
            f"optimizer: {name!r} is none that is known; {did_you_mean(name, OPTIMIZERS)}choose from {', '.join(OPTIMIZERS)}"
        )
    chosen = OPTIMIZERS[name]
    if not chosen.installed:
        raise UserInputError(f"optimizer: {chosen.package} is not installed, so {name} cannot run; install it, or leave it out")
    return chosen


@contextlib.contextmanager
def _variable(name: str, value: str | None) -> Iterator[None]:
    """Set an environment variable that native code reads; None leaves it alone."""
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if value is not None and before is None:
            del os.environ[name]
        elif before is not None:
            os.environ[name] = before
