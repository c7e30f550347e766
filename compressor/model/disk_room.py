"""Whether the disk has room for what a run will write: known before hours of calibration, not after them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from compressor.data.layouts import dense_parts, has_memory
from compressor.errors import CheckpointError
from compressor.model.checkpoints.save import left_out
from compressor.model.targets import all_names
from compressor.nn import weight_of
from compressor.numerics.packing import quantized_bytes
from compressor.numerics.scheme import QuantizationScheme


def check_room(
    model: nn.Module, schemes: Mapping[str, QuantizationScheme], output_dir: Path | None, run_dir: Path | None, *, beside: int = 0
) -> None:
    """Refuse disks that are too small.

    Args:
        model: not yet compressed.
        schemes: dotted name of every module that will be quantized to its scheme.
        output_dir: where the checkpoint will be; None where none is written.
        run_dir: where finished stages will be kept; None where none are.
        beside: bytes of the checkpoint that are no weight's.

    Raises:
        CheckpointError: a disk has less room than the files will take.
    """
    made = {name: _bytes_after(model.get_submodule(name), scheme) for name, scheme in schemes.items()}
    _check((output_dir, checkpoint_bytes(model, made) + beside), (run_dir, max(0, sum(made.values()) - _bytes_in(run_dir))))


def check_training_room(
    model: nn.Module, itemsize: int | None, num_averages: int, num_states: int, output_dir: Path | None, run_dir: Path | None
) -> None:
    """Refuse disks that are too small for a training.

    Args:
        model: as it is trained.
        itemsize: bytes of a weight in the checkpoint; None for those that it has now. Codes take less.
        num_averages: kept beside the weights.
        num_states: that lie on the disk at one time: weights, averages, and two moments of each weight.
        output_dir: where the checkpoint will be; None where none is written.
        run_dir: where states will be kept; None where none are.

    Raises:
        CheckpointError: a disk has less room than the files will take.
    """
    now = checkpoint_bytes(model, {})
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    saved = now if itemsize is None else sum(value.numel() * itemsize for value in model.parameters())
    state = now + trained * (2 + num_averages)
    _check((output_dir, saved), (run_dir, max(0, num_states * state - _bytes_in(run_dir))))


def _bytes_in(folder: Path | None) -> int:
    """What an earlier part of the run has written already."""
    return 0 if folder is None or not folder.is_dir() else sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _check(*files: tuple[Path | None, int]) -> None:
    needed: dict[int, tuple[Path, int]] = {}
    for folder, num_bytes in files:
        if folder is None:
            continue
        place = next(parent for parent in (folder, *folder.parents) if parent.exists())
        disk = place.stat().st_dev
        first, before = needed.get(disk, (place, 0))
        needed[disk] = first, before + num_bytes
    for place, num_bytes in needed.values():
        free = shutil.disk_usage(place).free
        if num_bytes > free:
            raise CheckpointError(
                f"{place}: this run will write about {num_bytes:,} bytes there, and {free:,} are free; free some space or name another disk"
            )


def checkpoint_bytes(model: nn.Module, made: Mapping[str, int]) -> int:
    """Say what the tensors of a checkpoint take: a module with several names is written under each, a tie of transformers once.

    Args:
        model: not yet compressed, with or without values.
        made: dotted name of every module that will be quantized, to the bytes that its weight takes then.

    Returns:
        Bytes.
    """
    places = all_names(model)
    weights = {f"{place}.weight": size for name, size in made.items() for place in places[name]}
    tied, state = left_out(model), model.state_dict(keep_vars=True)
    if {id(value) for value in tied.values()} & {id(state.get(name)) for name in weights}:
        tied = {}  # to quantize one side of a tie ends all of them
    stays = [value for name, value in state.items() if isinstance(value, Tensor) and name not in tied and name not in weights]
    return sum(weights.values()) + sum(_bytes_of(value) for value in stays)


def _bytes_of(value: Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in ((value,) if has_memory(value) else dense_parts(value)))


def _bytes_after(module: nn.Module, scheme: QuantizationScheme) -> int:
    weight = weight_of(module)
    rows, columns = weight.shape
    return quantized_bytes(rows, columns, scheme, scale_bytes=weight.element_size())
