"""Export a module or a model of transformers through either exporter of torch, and keep what belongs to the graph: inputs, names, module.

The forward is called with its inputs by name and gives its first output, without caches: those are what makes exports of transformers
models fail or differ, and no contract here looks at them.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

from compressor.atomic import whole_file
from compressor.errors import OutputError, UserInputError
from compressor.json_text import from_json
from compressor.model.evaluation import evaluation_mode
from compressor.model.folder import some
from compressor.model.loading.load import load_model
from compressor.model.loading.sample_batches import Modality, sample_batches
from compressor.nn.experts import UnfusedExperts
from compressor.spelling import did_you_mean
from compressor.tracing.footprint import Footprint
from harness.errors import HarnessError
from harness.onnx_graph.graph.reading import read_proto
from harness.onnx_graph.graph.run_session import POLICIES, run_graph, sqnr_db
from harness.onnx_graph.skips.passes import native_output
from harness.reporting.text import plain_text

# Write a graph whole or not at all, with its data in a file beside it where it is larger than protobuf takes.

_LIMIT = 2**31 - 2**20


def write_graph(model: onnx.ModelProto, path: Path, limit_bytes: int = _LIMIT) -> None:
    """Write.

    Args:
        model: not modified.
        path: of the graph; with external data `<name>.data` lies beside it. A graph that is there is replaced, with its data.
        limit_bytes: from this size on, weights go to the file beside.

    Raises:
        OutputError: there is no such folder, or a file in the place of the data that belongs to no graph there.
        CheckpointError: it cannot be written; nothing is left behind.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise OutputError(f"{path}: there is no folder {path.parent}; make it first")
    if model.ByteSize() < limit_bytes:
        with whole_file(path) as partial:
            onnx.save(model, partial)
        return
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    data = path.with_name(f"{path.name}.data")
    if data.exists() and not path.exists():
        raise OutputError(f"{data}: the weights go there, and what is there belongs to no graph {path.name}; move it, or name another file")
    onnx.external_data_helper.convert_model_to_external_data(copy, location=data.name, size_threshold=1024)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder, whole_file(path) as partial:
        onnx.external_data_helper.write_external_data_tensors(copy, folder)
        with whole_file(data) as partial_data:
            (Path(folder) / data.name).replace(partial_data)
        onnx.save(copy, partial)  # the graph comes last: it makes the data count


# Did an exporter freeze what the inputs decide, a branch or the rows of an expert, or write an operator wrongly? The graph is asked on
# inputs it has not seen.

_MIN_SQNR_DB = 20.0
"""Far below what rounding of codes costs (33 dB were seen), far above another branch."""


# Of the user's forward: drawn ids do not keep counts of image tokens, for example.
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Tried:
    """What a graph gave on other inputs.

    Attributes:
        differs: how it is not what the module computes; empty where nothing differs.
        unseen: what kept the comparison from seeing, and which inputs never changed; empty where it saw all.
    """

    differs: str = ""
    unseen: str = ""


def try_other_inputs(
    model: onnx.ModelProto, forward: Callable[..., torch.Tensor], inputs: Mapping[str, torch.Tensor], num_draws: int = 3
) -> Tried:
    """Compare a graph with the module on other inputs of the same sizes.

    Args:
        model: not modified.
        forward: the module, called with the inputs in order.
        inputs: that the graph was recorded with; integers are drawn anew from the range that they cover.
        num_draws: of other inputs.

    Returns:
        What differs, or that the graph does not run; and what was not seen, because the module does not take such inputs, does not repeat
        itself, or because the example leaves nothing to draw.
    """
    draws = [{name: _another(tensor, seed) for name, tensor in inputs.items()} for seed in range(num_draws)]
    held = [name for name, tensor in inputs.items() if all(torch.equal(tensor, one[name]) for one in draws)]
    if len(held) == len(inputs):
        return Tried(unseen=f"the example leaves no other values to draw for {', '.join(held)}; give one that holds several")
    results = [_compare(model, forward, other) for other in draws]
    differs = next((one.differs for one in results if one.differs), "")
    if differs or all(one.unseen for one in results):
        return Tried(differs, results[0].unseen)
    return Tried(unseen=f"{', '.join(held)} had the example's values throughout" if held else "")


def _compare(model: onnx.ModelProto, forward: Callable[..., torch.Tensor], other: Mapping[str, torch.Tensor]) -> Tried:
    try:
        expected, again = (forward(*other.values()).detach().cpu().numpy() for _ in range(2))
    except _REFUSALS as error:
        return Tried(unseen=f"the model fails ({type(error).__name__})")
    if not np.isfinite(expected).all():
        return Tried(unseen="the model's output is not finite")
    if not np.array_equal(expected, again):
        return Tried(unseen="the model gives other outputs for the same inputs")
    try:
        found = run_graph(model, {name: tensor.detach().cpu().numpy() for name, tensor in other.items()}, POLICIES["golden"])[0]
    except HarnessError as error:
        return Tried(f"no output ({error})")
    if found.shape != expected.shape:
        return Tried(f"shape {list(found.shape)}, not {list(expected.shape)}")
    noise = sqnr_db(expected, found)
    return Tried(f"{noise:.1f} dB from what it computes" if noise < _MIN_SQNR_DB else "")


def try_other_sizes(
    model: onnx.ModelProto, forward: Callable[..., torch.Tensor], inputs: Mapping[str, torch.Tensor], dynamic: Dynamic
) -> Tried:
    """Compare a graph with the module where one size after the other is one more than that which the graph was recorded with.

    Args:
        model: not modified.
        forward: the module, called with the inputs in order.
        inputs: that the graph was recorded with.
        dynamic: sizes that may change, by input and axis; all axes of one name change together.

    Returns:
        The first size at which the graph does not give what the module computes; else those at which that could not be seen.
    """
    axes = [(size, name, axis) for name, named in dynamic.items() for axis, size in named.items()]
    unseen = []
    for size in sorted({one[0] for one in axes}):
        other = dict(inputs)
        for _, name, axis in (one for one in axes if one[0] == size):
            other[name] = torch.cat([other[name], other[name].narrow(axis, 0, 1)], axis)
        found = _compare(model, forward, other)
        what = f"with one more of {size} ({describe_inputs(other)})"
        if found.differs:
            return Tried(f"{found.differs}, {what}")
        if found.unseen:
            unseen.append(f"{what} {found.unseen}, so {size} may be open in vain; open with it what changes with it")
    return Tried(unseen="; ".join(unseen))


def _another(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Other values: floats reversed with either sign, and shuffled with 1.7 of their size, as branches ask for sign, place or size."""
    if tensor.dtype is torch.bool or tensor.is_complex() or tensor.numel() == 0:
        return tensor
    random = np.random.default_rng(seed)
    if tensor.is_floating_point():
        shuffled = tensor.flatten()[torch.from_numpy(random.permutation(tensor.numel()))].reshape(tensor.shape)
        return (-tensor.flip(-1), tensor.flip(-1), 1.7 * shuffled)[seed % 3] if tensor.dim() else tensor * (-1.0, 0.6, 1.7)[seed % 3]
    low, high = int(tensor.min()), int(tensor.max())
    return torch.from_numpy(random.integers(low, high + 1, tuple(tensor.shape))).to(tensor.dtype)


EXPORTERS = ("dynamo", "torchscript")
DEFAULT_OPSET = 18
_EXPERTS = "_experts_implementation_internal"
_DECIDED = (
    "values decide what runs, and this exporter writes none of it; compute a branch with torch.where; where one run goes every way, as "
    "through all experts, torchscript records it"
)
_WRONG = {
    "torchscript": "this exporter records one run, and what the inputs decide is frozen in it; compute a branch with torch.where, and a "
    "number of rows dynamo may write",
    "dynamo": "an operator is not written as the model computes it, or chooses among equal values (TopK, ArgMax), where runtimes differ; "
    "try torchscript",
}
_FROZEN = {
    "torchscript": "open what changes with that size, too; one that the forward reads as a number is frozen: try dynamo, or leave it fixed",
    "dynamo": "open what changes with that size, too, or leave it fixed",
}
_FIXED_SIZE = re.compile(r"static shape of (\d+) for dimension inputs\['inputs'\]\[(\d+)\]\.shape\[(\d+)\]")
Dynamic = Mapping[str, Mapping[int, str]]
"""Input to axis to the name of its size."""


class ExportFailure(HarnessError):
    """An exporter raised: there is no graph to analyse."""


@dataclass(frozen=True, eq=False)
class Exported:
    """A graph, and what it was made from.

    Attributes:
        model: the graph.
        module: what was exported; None for a graph that came from a file.
        inputs: by name, as arrays; None for a graph from a file: inputs are drawn then.
        exporter: `dynamo`, `torchscript` or `file`.
        notes: what the checks of the export could not see.
    """

    model: onnx.ModelProto
    module: nn.Module | None
    inputs: dict[str, np.ndarray] | None
    exporter: str
    notes: tuple[str, ...] = ()


class _ByName(nn.Module):
    """Calls a module with positional inputs under their names, and returns its first tensor."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self._names = tuple(names)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = dict(zip(self._names, inputs, strict=True))
        if hasattr(getattr(self.module, "config", None), "use_cache"):
            given["use_cache"] = False
        output = self.module(**given)
        if isinstance(output, Mapping):
            output = next(iter(output.values()))
        return output if isinstance(output, torch.Tensor) else output[0]


def export(
    module: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    *,
    exporter: str = "dynamo",
    opset: int = DEFAULT_OPSET,
    dynamic: Dynamic | None = None,
) -> Exported:
    """Export a module.

    Args:
        module: put into eval mode for the export; its modes are as before afterwards, and otherwise it is not modified.
        inputs: example inputs by the names of the forward's arguments.
        exporter: `dynamo` (torch.export) or `torchscript`.
        opset: version of the standard operators; an exporter that cannot write it takes one that it can, and the graph says which.
        dynamic: sizes that may change, by input and axis.

    Returns:
        The graph, checked.

    Raises:
        UserInputError: no such exporter, opset or dynamic size, no inputs, or one of a dtype that numpy does not have.
        ExportFailure: the exporter raised, what it made is no valid graph, or gives something else than the module does.
    """
    if exporter not in _EXPORTERS:
        raise UserInputError(f"export: there is no exporter {exporter!r}; choose from {', '.join(EXPORTERS)}")
    if not inputs:
        raise UserInputError("export: no inputs were given; give example tensors by the names of the forward's arguments")
    if not 1 <= opset <= onnx.defs.onnx_opset_version():
        raise UserInputError(f"export: there is no opset {opset}; choose from 1 to {onnx.defs.onnx_opset_version()}")
    for name, tensor in inputs.items():
        if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
            raise UserInputError(f"export: {name} is {str(tensor.dtype)[6:]}, which numpy does not have; give module.float() and float32")
    _check_dynamic(dynamic or {}, inputs)
    with tempfile.TemporaryDirectory() as folder, _quiet(), torch.no_grad(), evaluation_mode(module):
        path = Path(folder) / "model.onnx"
        wrapped = _ByName(module, list(inputs)).eval()  # torchscript puts everything back into the mode of what it was given
        try:
            with _experts_that_export(module):
                _EXPORTERS[exporter](wrapped, dict(inputs), path, opset, dynamic or {})
            onnx.checker.check_model(str(path), full_check=True)
        except Exception as error:  # exporters raise what they like; the graph is then missing, which is never a pass
            raise _blame(exporter, wrapped, inputs, dynamic or {}, error) from error
        else:
            model = read_proto(path)
            tried = try_other_inputs(model, wrapped, inputs), try_other_sizes(model, wrapped, inputs, dynamic or {})
    for what, wrong, found in zip(("on other inputs", "at other sizes"), (_WRONG, _FROZEN), tried, strict=True):
        if found.differs:
            raise ExportFailure(
                f"{exporter}: {type(module).__name__} cannot be exported: {what} the graph gives {found.differs}; {wrong[exporter]}"
            )
    notes = tuple(f"the graph of {exporter} was not held against the model in full: {one.unseen}" for one in tried if one.unseen)
    return Exported(model, module, {name: tensor.detach().cpu().numpy() for name, tensor in inputs.items()}, exporter, notes)


def _check_dynamic(dynamic: Dynamic, inputs: Mapping[str, torch.Tensor]) -> None:
    for name, axes in dynamic.items():
        if name not in inputs:
            near = did_you_mean(name, inputs)
            raise UserInputError(
                f"export: a dynamic size is given for {name}, which is no input; {near}the inputs are {describe_inputs(inputs)}"
            )
        for axis in axes:
            if not 0 <= axis < inputs[name].dim():
                raise UserInputError(f"export: {name} has no axis {axis}; its sizes are {list(inputs[name].shape)}, counted from 0")


def describe_inputs(inputs: Mapping[str, Any], dynamic: Dynamic | None = None) -> str:
    """Name inputs with their sizes.

    Args:
        inputs: tensors or arrays by name.
        dynamic: sizes that may change, by input and axis.

    Returns:
        Such as `input_ids [batch, 16]`, with commas between.
    """
    sizes = {name: [(dynamic or {}).get(name, {}).get(axis, size) for axis, size in enumerate(one.shape)] for name, one in inputs.items()}
    return ", ".join(f"{name} [{', '.join(map(str, shape))}]" for name, shape in sizes.items())


def opset_of(model: onnx.ModelProto) -> int:
    """Return the version of the standard operators that a graph uses.

    Args:
        model: not modified.

    Returns:
        The version.
    """
    return next(int(one.version) for one in model.opset_import if one.domain in ("", "ai.onnx"))


def load_for_export(
    folder: str | Path, model_class: str | None = None, modality: Modality | None = None, seed: int = 0
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Load a model of transformers in float32, and make inputs for it.

    Args:
        folder: of the checkpoint.
        model_class: class of transformers; None for AutoModelForCausalLM.
        modality: of the inputs; None for what the model reads first.
        seed: of the inputs.

    Returns:
        The model on the CPU, and inputs without padding.

    Raises:
        ModelError: it cannot be loaded, or there is no sample input for it.
    """
    module = load_model(folder, dtype="float32", device="cpu", model_class=model_class).model
    return module, example_batch(module, modality, seed)


def example_batch(module: nn.Module, modality: Modality | None = None, seed: int = 0) -> dict[str, torch.Tensor]:
    """Make inputs for a model of transformers.

    Args:
        module: with a config.
        modality: of the inputs; None for what the model reads first.
        seed: of the inputs.

    Returns:
        Inputs without padding, by name.

    Raises:
        ModelError: there is no sample input for it.
    """
    with Footprint(module):  # a forward may change the model for good, as BigBird's does on few tokens
        batch = sample_batches(module, modality, seed).batches[0]
    takes_mask = "attention_mask" in inspect.signature(module.forward).parameters
    if "input_ids" in batch and takes_mask and "attention_mask" not in batch:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])  # else decoders look for packed sequences, which torchscript lacks
    return batch


def is_quantized(folder: str | Path) -> bool:
    """Whether a folder holds a compressed checkpoint; False where it has no config, which loading then names."""
    path = Path(folder) / "config.json"
    try:
        return path.is_file() and "quantization_config" in from_json(path.read_text(encoding="utf-8"))
    except ValueError:
        return False


def _dynamo(wrapped: nn.Module, inputs: dict[str, torch.Tensor], path: Path, opset: int, dynamic: Dynamic) -> None:
    shapes = {"inputs": tuple(dict(dynamic.get(name, {})) for name in inputs)} if dynamic else None
    torch.onnx.export(
        wrapped,
        tuple(inputs.values()),
        path,
        dynamo=True,
        verbose=False,
        input_names=list(inputs),
        output_names=["output"],
        opset_version=opset,
        dynamic_shapes=shapes,
    )


def _torchscript(wrapped: nn.Module, inputs: dict[str, torch.Tensor], path: Path, opset: int, dynamic: Dynamic) -> None:
    torch.onnx.export(
        wrapped,
        tuple(inputs.values()),
        str(path),
        dynamo=False,
        input_names=list(inputs),
        output_names=["output"],
        opset_version=min(opset, 20),  # the last that this exporter knows
        dynamic_axes={name: dict(axes) for name, axes in dynamic.items()},
    )


_EXPORTERS: Mapping[str, Callable[[nn.Module, dict[str, torch.Tensor], Path, int, Dynamic], None]] = {
    "dynamo": _dynamo,
    "torchscript": _torchscript,
}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Exporters talk: on standard output, through warnings about themselves, and through their loggers."""
    loggers = {name: logging.getLogger(name) for name in ("torch.onnx", "onnxscript")}  # what is wrong in the end is our word to say
    levels = {name: logger.level for name, logger in loggers.items()}
    for logger in loggers.values():
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), native_output(1, 2):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, logger in loggers.items():
            logger.setLevel(levels[name])


@contextlib.contextmanager
def _experts_that_export(module: nn.Module) -> Iterator[None]:
    """Let fused experts multiply in batches and unfused ones see all tokens: exporters know neither grouped products nor routed rows."""
    unfused = [one for one in module.modules() if isinstance(one, UnfusedExperts)]
    configs = {id(one): one for part in module.modules() if getattr(one := getattr(part, "config", None), _EXPERTS, None) is not None}
    before = {key: getattr(config, _EXPERTS) for key, config in configs.items()}
    try:
        for config in configs.values():
            setattr(config, _EXPERTS, "batched_mm")
        for experts in unfused:
            experts.__dict__["forward"] = experts.forward_dense
        yield
    finally:
        for experts in unfused:
            experts.__dict__.pop("forward", None)
        for key, config in configs.items():
            setattr(config, _EXPERTS, before[key])


def _blame(exporter: str, wrapped: _ByName, inputs: Mapping[str, torch.Tensor], dynamic: Dynamic, error: BaseException) -> ExportFailure:
    """Blame the exporter, unless the forward fails without one: then it fails in the other, too."""
    what = f"{exporter}: {type(wrapped.module).__name__} cannot be exported"
    try:
        wrapped(*inputs.values())
    except Exception as own:  # the forward is the user's, and raises what it likes
        raise ExportFailure(f"{what}, for it fails on these inputs by itself: {_cause(own)}; give inputs that it takes") from own
    if fixed := _fixed(error, inputs, dynamic):
        return ExportFailure(f"{what}: {fixed}; {_FROZEN[exporter]}")
    values = "data-dependent" in (cause := _cause(error))
    return ExportFailure(f"{what}: {cause}; {_DECIDED if values else 'try the other exporter'}")


def _fixed(error: BaseException, inputs: Mapping[str, torch.Tensor], dynamic: Dynamic) -> str:
    """Say which open sizes torch.export found fixed, and the fixed ones of the same size that may be why; empty where it found none."""
    said, names = list[str](), list(inputs)
    for size, at, axis in (map(int, found) for found in _FIXED_SIZE.findall(str(error))):
        others = [
            f"{name} axis {place}"
            for name, one in inputs.items()
            for place, fixed in enumerate(one.shape)
            if fixed == size and place not in dynamic.get(name, {})
        ]
        like = f", the fixed size of {some(others)}" if others else ""
        said.append(f"{dynamic[names[at]][axis]} ({names[at]} axis {axis}) is open, and the forward fixes it at {size}{like}")
    return ", and ".join(said)


def _cause(error: BaseException) -> str:
    """Exporters wrap what happened in advice and step counts: the innermost error's first line says it, or the line that it announces."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in map(plain_text, str(error).splitlines()) if line]
    said = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    return f"{type(error).__name__}: {said[:300]}"
