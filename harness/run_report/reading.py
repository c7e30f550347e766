"""What a run left behind: its record, the weights of its checkpoint, and the times that `compressor oneshot --json` printed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from compressor.entrypoints.inspection import read_run_record
from compressor.errors import UserInputError
from compressor.json_text import from_json
from compressor.model.checkpoints.load import load_compressed
from compressor.model.folder import read_config
from compressor.nn import QuantizedLayer
from compressor.progress import Progress
from harness.errors import HarnessError
from harness.settings_file import read_as
from harness.validation.format.container import Checkpoint, read_checkpoint

OUTLIER = 6.0
"""A weight is an outlier from so many times the root of the mean square of its module's weights."""

OUTSIDE = "outside of the layers"


@dataclass(frozen=True)
class ModuleRow:
    """What became of one module.

    Attributes:
        name: dotted.
        modifier: that changed it.
        scheme: format of its weights, or what else was done.
        error: relative, of outputs on the calibration data or of the weight; None where the record says none.
        num_tokens: that it has seen in calibration; None where none were counted.
        low: least weight of the checkpoint, decoded; None where the checkpoint holds no weight of it.
        high: greatest weight.
        peak: largest absolute weight, over the root of their mean square.
        outliers: share of the weights beyond OUTLIER times that root.
        zeros: share of the weights that are zero.
        input_peak: largest absolute input that its static scale covers; None where inputs have none.
        peak_input: largest absolute input of the calibration data, over the rms of all; None where no run has measured it.
        loudest_input: rms of the input channel with the largest, over that of all channels; None where no run has measured it.
        details: what else the record says of it.
    """

    name: str
    modifier: str
    scheme: str
    error: float | None
    num_tokens: int | None
    low: float | None = None
    high: float | None = None
    peak: float | None = None
    outliers: float | None = None
    zeros: float | None = None
    input_peak: float | None = None
    peak_input: float | None = None
    loudest_input: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layer(self) -> str:
        """Dotted name of the layer that holds it."""
        return layer_of(self.name)


@dataclass(frozen=True)
class RunReport:
    """A run of the compressor.

    Attributes:
        folder: of the checkpoint.
        record: its compression.json, digests and factors left out.
        num_bytes: of all tensors of the checkpoint.
        modules: those that the record names, the largest error first.
        phases: time and memory of loading, calibrating and so on, as `--json` printed them; None where no such file was given.
        stages: those of the parts of a calibration.
    """

    folder: Path
    record: Mapping[str, Any]
    num_bytes: int
    modules: tuple[ModuleRow, ...]
    phases: tuple[Mapping[str, Any], ...] | None = None
    stages: tuple[Mapping[str, Any], ...] | None = None

    @property
    def layers(self) -> dict[str, list[ModuleRow]]:
        """Modules with an error by their layer, in the order of the model."""
        found: dict[str, list[ModuleRow]] = {}
        for row in sorted(self.modules, key=lambda row: _in_order(row.name)):
            if row.error is not None and row.scheme != MOVED:
                found.setdefault(row.layer, []).append(row)
        return found

    def seconds_of(self, layer: str) -> float | None:
        """Seconds of the stages of a layer; None where they are not known."""
        mine = [stage["seconds"] for stage in self.stages or () if layer_of(stage["name"].split(", ")[0]) == layer]
        return sum(mine) if mine else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        own = {key: value for key, value in self.record.items() if key != "modules"}
        modules = [asdict(row) for row in self.modules]
        laps = {"phases": self.phases, "stages": self.stages}
        return {"folder": str(self.folder), "num_bytes": self.num_bytes, "modules": modules, **laps, **own}


MOVED = "scales moved"
_RECORDED = {"modifier", "scheme", "error", "num_tokens", "details"}
_Measured = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class _Lap:
    name: str
    seconds: _Measured
    host_bytes: _Measured | None
    host_peak_bytes: _Measured
    device_peak_bytes: _Measured | None
    tokens_per_second: _Measured | None


@dataclass(frozen=True)
class _Times:
    phases: list[_Lap]
    stages: list[_Lap]


_TIMES = TypeAdapter(_Times)


def layer_of(name: str) -> str:
    """Return the layer of a module: its name up to the first number."""
    found = re.match(r".*?\.\d+(?=\.|$)", name)
    return found.group() if found else OUTSIDE


def read_run(folder: Path, times: Path | None, progress: Progress) -> RunReport:
    """Read a checkpoint and what the run said of itself.

    Args:
        folder: that the run has written.
        times: what `compressor oneshot --json` printed; None where it is not there.
        progress: shows a bar.

    Returns:
        The report.

    Raises:
        HarnessError: the folder has no record, or the times are of another run.
        ModelError: the checkpoint cannot be read.
    """
    if not folder.is_dir():
        raise HarnessError(f"{folder}: there is no such folder; give one that `compressor` has written")
    record = read_run_record(folder)
    if record is None or not isinstance(record.get("modules"), dict):
        raise HarnessError(f"{folder}: holds no compression.json of a run; give a folder that `compressor` has written")
    said = {} if times is None else _read_times(times, record)
    checkpoint = read_checkpoint(folder)
    if checkpoint.problems:
        raise HarnessError(f"{folder}: {checkpoint.problems[0]}; `harness validate` says what is wrong with it")
    with progress.task("weights", len(record["modules"])) as task:
        rows = []
        for row in _rows(folder, record["modules"], checkpoint):
            rows.append(row)
            task.advance(1, row.name)
    rows.sort(key=lambda row: (-1.0 if row.error is None else -row.error, _in_order(row.name)))
    shown = {key: value for key, value in record.items() if key not in ("tensors", "transforms")}
    laps = {name: tuple(said[name]) for name in ("phases", "stages") if name in said}
    return RunReport(folder, shown, checkpoint.num_bytes, tuple(rows), **laps)


def _read_times(path: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    try:
        said = from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HarnessError(f"{path}: cannot be read ({error}); give what `compressor oneshot --json` printed") from error
    try:
        read_as(_TIMES, said)
    except UserInputError as error:
        raise HarnessError(f"{path}: has no phases and stages of a run ({error}); give what `compressor oneshot --json` printed") from error
    if said.get("fingerprint") != record.get("fingerprint"):
        raise HarnessError(f"{path}: is of another run than the checkpoint (their fingerprints differ); give what that run printed")
    return said


def _rows(folder: Path, modules: Mapping[str, Any], checkpoint: Checkpoint) -> Iterator[ModuleRow]:
    named = load_compressed(folder, device="cpu").named_modules() if "quantization_config" in read_config(folder) else ()
    layers = {name: module for name, module in named if isinstance(module, QuantizedLayer)}
    for name, said in modules.items():
        if not isinstance(said, dict) or not said.keys() >= _RECORDED:
            raise HarnessError(f"{folder}: compression.json does not say of {name} what a run says ({', '.join(sorted(_RECORDED))})")
        layer, key = layers.get(name), f"{name}.weight"
        found: dict[str, Any] = {}
        if layer is not None:
            found = {**_spread(layer.dequantized_weight()), "input_peak": _input_peak(layer)}
        elif key in checkpoint.entries:
            found = _spread(checkpoint.tensor(key))
        own = {key: said[key] for key in ("error", "num_tokens", "details")}
        inputs = {key: said["details"].get(key) for key in ("peak_input", "loudest_input")}
        yield ModuleRow(name, str(said["modifier"]), str(said["scheme"]), **own, **inputs, **found)


def _spread(weight: Tensor) -> dict[str, Any]:
    values = weight.float()
    root = float(values.square().mean().sqrt())
    largest = float(values.abs().max())
    return {
        "low": float(values.min()),
        "high": float(values.max()),
        "peak": largest / root if root else 0.0,
        "outliers": float((values.abs() > OUTLIER * root).float().mean()) if root else 0.0,
        "zeros": float((values == 0).float().mean()),
    }


def _input_peak(layer: QuantizedLayer) -> float | None:
    """The largest absolute input: of codes around a zero point, that at the farther end."""
    args, stored = layer.scheme.input_activations, dict(layer.named_buffers())
    if args is None or "input_scale" not in stored:
        return None
    ends = torch.tensor([-448.0, 448.0] if args.type == "float" else [-(2.0 ** (args.num_bits - 1)), 2.0 ** (args.num_bits - 1) - 1])
    zero = stored["input_zero_point"].float() if "input_zero_point" in stored else 0.0
    return float(((ends - zero) * stored["input_scale"].float()).abs().max())


def _in_order(name: str) -> list[tuple[int, str]]:
    """Sort numbers in a name as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
