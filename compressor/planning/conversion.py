"""What `compressor convert` would take for a recipe that needs no forward.

Of memory a block of one weight; of time what the disk takes, or its own work, of which small pieces are timed on this machine.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from compressor.algorithms.costs import rounding_cost
from compressor.conversion.files import Files
from compressor.conversion.recipes import convertible
from compressor.conversion.rounding import BLOCK_VALUES, needs_ranges, rows_at_once, run_unit
from compressor.conversion.units import Kind, Target, Unit, View
from compressor.errors import RecipeError, SchemeError
from compressor.model.headers import NAMES, read_header
from compressor.nn import empty_layer, weight_of
from compressor.numerics import QuantizationScheme
from compressor.planning import workload
from compressor.planning.estimate import best_seconds
from compressor.recipe import Recipe

DISK_BYTES = 1 << 26  # written and read to time the disk


@dataclass(frozen=True)
class Conversion:
    """What a conversion would take.

    Attributes:
        workers: processes, which take the next tensor when they are ready.
        block_bytes: that each holds at most beyond itself: of a weight, and of what rounding makes of it.
        read_bytes: of the base; that it is hashed, too, finds it in the system's cache.
        written_bytes: of the result, for which the disk must have room.
        disk_seconds: that the disk takes, at the speed of the folder for temporary files.
        work_seconds: of a processor, for rounding, copying and hashing.
    """

    workers: int
    block_bytes: int
    read_bytes: int
    written_bytes: int
    disk_seconds: float
    work_seconds: float

    @property
    def seconds(self) -> float:
        """Wall time once the model is known: of what bounds it."""
        return max(self.disk_seconds, self.work_seconds / min(self.workers, os.cpu_count() or 1))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self) | {"seconds": self.seconds}


def estimate_conversion(
    skeleton: nn.Module, recipe: Recipe, targets: Sequence[workload.Target], written_bytes: int, workers: int, device: torch.device
) -> Conversion | None:
    """Estimate a conversion.

    Args:
        skeleton: the model, on the meta device.
        recipe: of the run.
        targets: modules that change.
        written_bytes: of the checkpoint.
        workers: processes.
        device: where weights would be rounded.

    Returns:
        The estimate; None where the recipe needs more than weights by themselves.
    """
    try:
        convertible(recipe)
    except (RecipeError, SchemeError):
        return None
    model_bytes = workload.bytes_of(skeleton)
    by_scheme: dict[str, list[tuple[nn.Module, QuantizationScheme]]] = {}
    for target in targets:
        assert target.scheme is not None
        found = (skeleton.get_submodule(target.module.name), target.scheme)
        by_scheme.setdefault(target.scheme.model_copy(update={"targets": []}).model_dump_json(), []).append(found)
    block_bytes, read_bytes, rounded_bytes, work = 0, model_bytes, 0, 0.0
    copy, read = _piece(torch.bfloat16, device)
    for members in by_scheme.values():
        scheme = members[0][1]
        assert scheme.weights is not None
        weights = [weight_of(module) for module, _ in members]
        num_bytes = sum(weight.nbytes for weight in weights)
        rounded_bytes += num_bytes
        if needs_ranges(scheme.weights):
            read_bytes += num_bytes
        work += num_bytes * _rounding(max(weights, key=torch.Tensor.numel), scheme, device)
        for weight in weights:
            columns = weight.shape[1]
            rows = min(rows_at_once(weight.shape, weight.stride(), scheme.weights), len(weight))
            own = rounding_cost([rows], columns, weight.element_size()).working_bytes + rows * columns * weight.element_size()
            block_bytes = max(block_bytes, own)
    work += (model_bytes - rounded_bytes) * copy + model_bytes * read
    reading, writing = disk_speed()
    return Conversion(workers, block_bytes, read_bytes, written_bytes, read_bytes / reading + written_bytes / writing, work)


@cache
def disk_speed() -> tuple[float, float]:
    """Time the disk that holds temporary files, once in a process.

    Returns:
        Bytes read a second, from the disk where the system can be told to forget them, and written.
    """
    data = os.urandom(DISK_BYTES)
    with tempfile.TemporaryFile(buffering=0) as file:
        start = time.perf_counter()
        file.write(data)
        os.fsync(file.fileno())
        written = time.perf_counter()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begun = time.perf_counter()
        file.read(DISK_BYTES)
        return DISK_BYTES / (time.perf_counter() - begun), DISK_BYTES / (written - start)


def _rounding(weight: torch.Tensor, scheme: QuantizationScheme, device: torch.device) -> float:
    """Seconds of a byte of such weights."""
    assert scheme.weights is not None
    kinds: tuple[Kind, ...] = ("range", "round") if needs_ranges(scheme.weights) else ("round",)
    rows, columns = weight.shape
    rows = min(rows, max(1, BLOCK_VALUES // columns) + 127 & ~127)  # whole blocks of any format
    with torch.device("meta"):
        linear = nn.Linear(columns, rows, bias=False, dtype=weight.dtype)
    tensors = {key: torch.zeros(shape, dtype=dtype) for key, (shape, dtype) in empty_layer(linear, scheme).specs().items()}
    return sum(_timed(kinds, torch.randn(rows, columns, dtype=torch.float32).to(weight.dtype), tensors, scheme, device))


@cache
def _piece(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Seconds of a byte that is copied, and of one that is hashed with its file."""
    values = torch.zeros(1, BLOCK_VALUES, dtype=dtype)
    copied, hashed = _timed(("copy", "hash"), values, {"": values.clone()}, None, device)
    return copied, hashed


def _timed(
    kinds: Sequence[Kind], weight: torch.Tensor, made: dict[str, torch.Tensor], scheme: QuantizationScheme | None, device: torch.device
) -> list[float]:
    """Seconds of a byte of a weight in each kind of unit, done on files of the temporary folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_file({"weight": weight}, folder / "base.safetensors")
        save_file({key or "copy": value for key, value in made.items()}, folder / "made.safetensors")
        view = View.of(read_header(folder / "base.safetensors")["weight"])
        stored = read_header(folder / "made.safetensors")
        targets = {
            key: Target(name=key, file="made.safetensors", dtype=NAMES[one.dtype], start=one.start, shape=one.shape)
            for key, one in ((key, stored[key or "copy"]) for key in made)
        }
        common = {"views": (view,), "dtype": NAMES[weight.dtype], "targets": targets, "scheme": scheme, "extremes": ((-4.0, 4.0),)}
        units = [Unit(kind=kind, name="base.safetensors", **common) for kind in kinds]
        with Files(folder) as read, Files(folder, writable=True) as written:
            return [best_seconds(lambda unit=unit: run_unit(unit, read, written, device)) / weight.nbytes for unit in units]  # type: ignore[misc]
