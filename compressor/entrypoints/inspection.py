"""What a checkpoint is: formats by module, bytes, zeros, and what its record says about how it was made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import safe_open
from torch import Tensor

from compressor.errors import ModelError
from compressor.lifecycle.state import Detail
from compressor.model.checkpoints.format import stored_names
from compressor.model.checkpoints.load import check_scheme_kept, load_compressed
from compressor.model.folder import check_weight_files, read_config, read_json, resolve_folder, weight_files
from compressor.modifiers.schemes.targets import scheme_label
from compressor.nn import QuantizedLayer
from compressor.nn.attention.kv_cache import kv_scheme_of, quantized_parts
from compressor.numerics import QuantizationScheme

_RECORD = "compression.json"
_UNNAMED = "what the record does not name"
FLOAT = "not quantized"


@dataclass(frozen=True)
class InspectedModule:
    """A layer, or a tensor that belongs to none.

    Attributes:
        name: of the layer in the model, or of the tensor in the files.
        format: of weights and inputs, such as `int4 group 128`; the dtype of a tensor.
        num_weights: how many.
        num_bytes: as they are stored, scales included.
        zeros: share of the weights that are zero.
        error: relative error of the layer's output or weight in calibration, as the record says; None where it says none.
    """

    name: str
    format: str
    num_weights: int
    num_bytes: int
    zeros: float
    error: float | None = None


class _Part(BaseModel):
    """A part of compression.json, as far as it is shown here."""

    model_config = ConfigDict(strict=True)


class _Data(_Part):
    num_samples: int
    num_tokens: int


class _Fallback(_Part):
    module: str
    detail: str


class _Source(_Part):
    name: str
    commit: str


class _Details(_Part):
    """Numbers and words; these few are counted and compared."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Detail | bool | None]

    pruned: str | None = None
    sparsity: float | None = None
    peak_input: float | None = None
    loudest_input: float | None = None


class _Module(_Part):
    modifier: str | None = None
    scheme: str | None = None
    error: float | None = None
    num_tokens: int | None = None
    details: _Details = _Details()


class _Record(_Part):
    modules: dict[str, _Module] = {}
    fallbacks: list[_Fallback] = []
    notes: list[str] = []
    versions: dict[str, str] = {}
    data: _Data | None = None
    source: _Source | None = None
    recipe: str | None = None


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint is.

    Attributes:
        folder: of the checkpoint.
        architecture: class of transformers, as config.json says.
        storage: format of compressed-tensors; None where nothing is quantized.
        kv_cache: format of keys and values; None where they stay as they are.
        queries: whether queries are quantized as well, in that format.
        num_bytes: of all weight files.
        quantized: layers, in the order of the model.
        tensors: all others, by name.
        record: what compression.json says; None where there is none.
    """

    folder: str
    architecture: str
    storage: str | None
    kv_cache: str | None
    queries: bool
    num_bytes: int
    quantized: tuple[InspectedModule, ...]
    tensors: tuple[InspectedModule, ...]
    record: dict[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, the digests of the record left out."""
        record = None if self.record is None else {key: value for key, value in self.record.items() if key != "tensors"}
        return {**asdict(self), "record": record}

    def lines(self, modules: bool = False, width: int | None = None) -> list[str]:
        """Say it in lines.

        Args:
            modules: a line for each layer as well.
            width: columns after which sentences go on in the next line, 80 at least; None for whole lines.

        Returns:
            The lines.
        """
        stored = self.storage or FLOAT
        said = [f"{self.architecture}, {stored}, {_mb(self.num_bytes)}"]
        if self.kv_cache is not None:
            said.append(f"{'queries, keys' if self.queries else 'keys'} and values: {self.kv_cache}")
        said += ["", f"{'format':<40} {'count':>6} {'weights':>13} {'size':>10} {'zeros':>7}"]
        for name, members in _by_format((*self.quantized, *self.tensors)).items():
            said.append(_row(name, str(len(members)), _joined(members)))
        if modules:
            said += ["", *(f"{_row(one.format, '', one)}  {one.name}" for one in (*self.quantized, *self.tensors))]
        return [*said, "", *self._record_lines(width)]

    def _record_lines(self, width: int | None) -> list[str]:
        if self.record is None:
            return [f"no {_RECORD}: it was not written here, or its record was lost"]
        if not self.record.keys() & _Record.model_fields.keys():
            return [f"{_RECORD}: says nothing that a run here says; it is of something else, or damaged"]
        versions = ", ".join(f"{name} {version}" for name, version in self.record.get("versions", {}).items()) or _UNNAMED
        data = self.record.get("data") or {}
        read = f"{data['num_samples']:,} samples, {data['num_tokens']:,} tokens" if data else "no data"
        read = read if "data" in self.record else _UNNAMED
        source = self.record.get("source")
        made_of = f" of {source['name']}, commit {source['commit']}" if source else ""
        said = [f"made with {versions}{made_of}", f"calibrated with {read}; seed {self.record.get('seed', _UNNAMED)}"]
        pruned = Counter(one.get("details", {}).get("pruned") for one in self.record.get("modules", {}).values())
        said += [f"pruned: {count:,} modules to {what}" for what, count in pruned.items() if what is not None]
        fallbacks = self.record.get("fallbacks", [])
        said.append(f"fallbacks: {len(fallbacks)}")
        said += [f"  {one['module']}: {one['detail']}" for one in fallbacks]
        said += [f"note: {note}" for note in self.record.get("notes", [])]
        if width is not None:
            said = [part for line in said for part in wrap(line, width, subsequent_indent="  ", break_long_words=False)]
        return [*said, "recipe:", *(f"  {line}" for line in str(self.record.get("recipe", "")).splitlines())]


def inspect_checkpoint(folder: str | Path, revision: str | None = None) -> Inspection:
    """Read what a checkpoint is. A compressed one is loaded into main memory, as it is stored.

    Args:
        folder: of a checkpoint with config.json and safetensors files, compressed or not; or its name on the hub.
        revision: branch, tag or commit on the hub; None is main.

    Returns:
        What it is.

    Raises:
        ModelError: the folder holds no checkpoint that can be read, or the hub does not give it.
    """
    folder = resolve_folder(folder, revision).path
    config = read_config(folder)
    check_weight_files(folder)
    check_scheme_kept(folder, config)
    found = config.get("quantization_config") or {}
    record, named = read_run_record(folder), config.get("architectures")
    quantized: tuple[InspectedModule, ...] = ()
    parts, kv, queries = set[str](), None, False
    if found:
        errors = {name: one.get("error") for name, one in ((record or {}).get("modules") or {}).items()}
        model = load_compressed(folder, device="cpu", model_class=_class_named(named))
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}
        quantized = tuple(_layer(name, layer, errors.get(name)) for name, layer in layers.items())
        parts = layers.keys() | stored_names(model, [*layers]).values()  # some architectures have other names in their files
        kv = kv_scheme_of(model)
        queries = any("q" in quantized_parts(module) for module in model.modules())
    return Inspection(
        folder=str(folder),
        architecture=str(next(iter(named if isinstance(named, list) else ()), config.get("model_type", "a model"))),
        storage=found.get("format"),
        kv_cache=None if kv is None else scheme_label(kv),
        queries=queries,
        num_bytes=sum((folder / name).stat().st_size for name in weight_files(folder)),
        quantized=quantized,
        tensors=tuple(_float_tensors(folder, parts)),
        record=record,
    )


def _class_named(architectures: object) -> str | None:
    """The class of transformers that config.json names; none where it names none that is there."""
    import transformers

    name = next(iter(architectures), None) if isinstance(architectures, list) else None
    return name if isinstance(name, str) and hasattr(getattr(transformers, name, None), "from_pretrained") else None


def read_run_record(folder: Path) -> dict[str, Any] | None:
    """Read what a run has said of itself.

    Args:
        folder: of a checkpoint.

    Returns:
        compression.json; None where there is none.

    Raises:
        ModelError: a part of it is of another kind than a run writes.
    """
    path = folder / _RECORD
    if not path.is_file():
        return None
    record = read_json(path)
    try:
        _Record.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ModelError(f"{path}: {where}: {first['msg']}; restore the file") from error
    return record


def _layer(name: str, layer: QuantizedLayer, error: float | None) -> InspectedModule:
    weight = layer.dequantized_weight()
    stored = sum(buffer.numel() * buffer.element_size() for buffer in layer.state_dict().values())
    return InspectedModule(name, _label(layer.scheme), weight.numel(), stored, _zeros(weight), error)


def _label(scheme: QuantizationScheme) -> str:
    assert scheme.weights is not None
    inputs = scheme.input_activations
    weights = scheme_label(scheme.weights)
    if inputs is None:
        return weights
    return f"{weights}, inputs {scheme_label(inputs)}{' dynamic' if inputs.dynamic is True else ''}"


def _float_tensors(folder: Path, layers: set[str]) -> Iterable[InspectedModule]:
    """Tensors of the files that belong to no quantized layer, one at a time."""
    for file_name in weight_files(folder):
        with safe_open(folder / file_name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                if not _belongs(key, layers):
                    tensor = file.get_tensor(key)
                    size = tensor.numel() * tensor.element_size()
                    yield InspectedModule(key, str(tensor.dtype).removeprefix("torch."), tensor.numel(), size, _zeros(tensor))


def _belongs(key: str, layers: set[str]) -> bool:
    return key.rpartition(".")[0] in layers


def _zeros(tensor: Tensor) -> float:
    return float((tensor == 0).float().mean()) if tensor.numel() else 0.0


def _by_format(modules: Iterable[InspectedModule]) -> Mapping[str, list[InspectedModule]]:
    found: dict[str, list[InspectedModule]] = {}
    for module in modules:
        found.setdefault(module.format, []).append(module)
    return found


def _joined(modules: list[InspectedModule]) -> InspectedModule:
    weights = sum(one.num_weights for one in modules)
    zeros = sum(one.zeros * one.num_weights for one in modules) / max(weights, 1)
    return InspectedModule("", "", weights, sum(one.num_bytes for one in modules), zeros)


def _row(label: str, count: str, module: InspectedModule) -> str:
    return f"{label:<40} {count:>6} {module.num_weights:>13,} {_mb(module.num_bytes):>10} {module.zeros:>7.1%}"


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.2f} MB"
