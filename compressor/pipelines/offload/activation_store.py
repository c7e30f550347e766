"""The store of activations: what is live for every sample between two stages, on the device, in host memory or on disk by budget.

Tensors are kept as the bytes of their storages, so views, strides and tensors that share memory come back as they were. A storage whose
bytes are also those of another sample (a mask, rotary tables) is kept once, whether the forwards shared it or computed it anew; each
sample then gets a copy of its own, so that none sees what another writes. To look at bytes is to wait for a GPU: while there is room on
one, a sample is looked at when the next is put, on a stream beside the one that computes, which has work then.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from compressor.errors import OutputError, UserInputError
from compressor.pipelines.memory import FreedMemory, free_bytes
from compressor.pipelines.offload.block_pool import SMALL_BYTES, Block, BlockPool, Coming, Place
from compressor.pipelines.offload.tensor_skeleton import put_together, take_apart
from compressor.settings.kinds import parse_bytes

# Shares of what is free when calibration starts: the rest is for statistics, solvers and the forwards themselves.
HOST_SHARE, DEVICE_SHARE = 0.75, 0.4
TIGHT_SHARE = 0.1  # of a device that does not hold the model: a stage, its statistics and its solver come first
_MARKS = 256  # bytes of a storage by which candidates for equality are found before all bytes are compared
_MAX_CANDIDATES = 8

_Marks = tuple[torch.device, int, bytes]


class _View(NamedTuple):
    """How a tensor looks at its storage."""

    block: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool
    attributes: dict[str, Any]


@dataclass
class _Sample:
    """A value taken apart: blocks for its storages, and for each slot a view, or the tensor itself where it cannot be one."""

    skeleton: Any
    views: list[_View | Tensor]
    blocks: list[Block]


class _Unshared(NamedTuple):
    """A sample that was put last, whose bytes nobody has looked at yet; `made` when they are there."""

    sample: int
    storages: list[Tensor]
    made: torch.cuda.Event


class ActivationStore:
    """Keeps the live values of every sample; implements `compressor.tracing.ValueStore`. A context manager that closes itself."""

    def __init__(
        self,
        device: torch.device,
        device_budget_bytes: int,
        host_budget_bytes: int = 0,
        disk_dir: str | Path | None = None,
        by_reference: Callable[[Any], bool] = lambda value: False,
    ) -> None:
        """Start empty.

        Args:
            device: that computes.
            device_budget_bytes: what may stay on it. On a CPU the two budgets are one memory and count together.
            host_budget_bytes: what may go to host memory, pinned where the device is a GPU.
            disk_dir: folder for what fits in neither; None where that is an error. The file in it has no name and leaves nothing behind.
            by_reference: says which objects among the values are to be kept as they are, such as a model's configuration.

        Raises:
            OutputError: the folder cannot be written.
        """
        self._freed = FreedMemory()
        self._pool = BlockPool(device, device_budget_bytes, host_budget_bytes, disk_dir)
        self._by_reference = by_reference
        self._samples: dict[int, _Sample] = {}
        self._by_marks: dict[_Marks, list[Block]] = {}
        self._marks_of: dict[int, _Marks] = {}
        self._coming: dict[int, Future[list[Coming]]] = {}
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._unshared: _Unshared | None = None
        # One thread: samples come back one by one, in the order in which they will be asked for.
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="activations")

    @property
    def peak_bytes(self) -> Mapping[Place, int]:
        """The most bytes that each place has held so far."""
        return Counter(self._pool.peak)

    @property
    def used_bytes(self) -> Mapping[Place, int]:
        """The bytes that each place holds now."""
        self._share_last()
        return Counter(self._pool.used)

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close it."""
        self.close()

    def put(self, sample: int, values: dict[str, Any]) -> None:
        """Keep what is live for a sample; replaces what was kept for it.

        Args:
            sample: number of the sample.
            values: by name, any objects; their tensors are kept as they are while they fit, so nobody may write to them any more.

        Raises:
            CalibrationError: no place has room, or the disk fails.
        """
        self._share_last()
        self._forget_coming(sample)
        skeleton, tensors = take_apart(dict(values), self._by_reference)
        storages: dict[int, tuple[int, Tensor]] = {}  # by address of the storage: its number and its bytes
        kept = _Sample(skeleton, [_view(tensor, storages) for tensor in tensors], [])
        del tensors
        own, label = [data for _, data in storages.values()], f"sample {sample}"
        if self._beside is not None and self._pool.fits(own):
            self.drop(sample)
            kept.blocks += [self._pool.keep(data, label) for data in own]
            self._unshared = _Unshared(sample, own, torch.cuda.current_stream(self._beside.device).record_event())
        else:
            marks = _marks(own)
            found = [self._find_equal(data, key) for data, key in zip(own, marks, strict=True)]
            # Counted before this sample's earlier values are dropped, which may hold the very same block.
            for block in found:
                if block is not None:
                    block.refs += 1
            self.drop(sample)  # before new places are taken: most often the same ones
            kept.blocks += [
                block or self._known_by(key, self._pool.keep(data, label)) for data, key, block in zip(own, marks, found, strict=True)
            ]
        self._samples[sample] = kept

    def get(self, sample: int) -> dict[str, Any]:
        """Return what is live for a sample, on the device it was made on.

        Args:
            sample: number of a sample that has been put.

        Returns:
            The values by name, bitwise as they were put; lent where they fit on the device, see `ValueStore`.

        Raises:
            KeyError: nothing was put for this sample.
            CalibrationError: what was written to disk does not read back.
        """
        self._freed.bound(self._pool.used["device"] + self._pool.used["host"])
        self._share_last(sample)
        kept = self._samples[sample]
        coming = self._coming.pop(sample, None)
        fetched = self._fetch(kept) if coming is None else coming.result()
        own = [self._lend(self._pool.arrive(item), block) for item, block in zip(fetched, kept.blocks, strict=True)]
        return dict(put_together(kept.skeleton, [_tensor(view, own) for view in kept.views]))

    def prefetch(self, sample: int) -> None:
        """Start to bring a sample back in the background: reading from disk, and copying to a GPU.

        Args:
            sample: number of the sample; nothing happens for one that is unknown, on its way or where it belongs.
        """
        self._share_last(sample)
        kept = self._samples.get(sample)
        if kept is not None and sample not in self._coming and any(block.place != "device" for block in kept.blocks):
            self._coming[sample] = self._reader.submit(self._fetch, kept)

    def drop(self, sample: int) -> None:
        """Forget a sample and free what only it used.

        Args:
            sample: number of the sample; unknown ones are ignored.
        """
        self._forget_coming(sample)
        if self._unshared is not None and self._unshared.sample == sample:
            self._unshared = None
        kept = self._samples.pop(sample, None)
        for block in kept.blocks if kept is not None else ():
            block.refs -= 1
            if not block.refs:
                self._pool.release(block)
                self._forget_marks(block)

    def close(self) -> None:
        """Forget everything and give the disk space back; may be called again."""
        for future in self._coming.values():
            future.cancel()
        self._reader.shutdown(wait=True)
        self._coming.clear()
        for sample in list(self._samples):
            self.drop(sample)
        self._pool.close()

    def _fetch(self, kept: _Sample) -> list[Coming]:
        return [self._pool.fetch(block) for block in kept.blocks]

    def _lend(self, data: Tensor, block: Block) -> Tensor:
        """Give out the bytes of a block, or a copy where others hold it, too."""
        # Bytes from elsewhere were copied on the way, so whoever gets them may write to them.
        if data is not block.data:
            return data
        if block.refs > 1 or block.num_bytes <= SMALL_BYTES:
            return data.clone()
        self._forget_marks(block)  # a forward may write to it: no other sample may come to hold it now
        return data

    def _forget_coming(self, sample: int) -> None:
        """Blocks must not be released while they are being read."""
        coming = self._coming.pop(sample, None)
        if coming is not None and not coming.cancel():
            coming.exception()

    def _share_last(self, sample: int | None = None) -> None:
        """Find what the sample that was put last has in common with others, if it is this one (None: any), and keep that once."""
        last = self._unshared
        if last is None or sample not in (None, last.sample):
            return
        self._unshared, blocks = None, self._samples[last.sample].blocks
        with torch.cuda.stream(self._beside):
            last.made.wait()
            for number, (data, key) in enumerate(zip(last.storages, _marks(last.storages), strict=True)):
                same = self._find_equal(data, key)
                if same is None:
                    self._known_by(key, blocks[number])
                else:
                    same.refs += 1
                    self._pool.release(blocks[number])
                    blocks[number] = same

    def _known_by(self, key: _Marks | None, block: Block) -> Block:
        if key is not None:
            self._by_marks.setdefault(key, []).append(block)
            self._marks_of[id(block)] = key
        return block

    def _find_equal(self, data: Tensor, key: _Marks | None) -> Block | None:
        """A block with the same bytes: of another sample, or of this one where a stage has passed something through."""
        for block in () if key is None else self._by_marks.get(key, ())[:_MAX_CANDIDATES]:
            stored = block.data
            if stored is None or stored.device != data.device:
                stored = self._pool.arrive(self._pool.fetch(block))
            if stored.data_ptr() == data.data_ptr() or torch.equal(stored, data):
                return block
        return None

    def _forget_marks(self, block: Block) -> None:
        key = self._marks_of.pop(id(block), None)
        if key is not None:
            self._by_marks[key].remove(block)
            if not self._by_marks[key]:
                del self._by_marks[key]


def _marks(storages: Sequence[Tensor]) -> list[_Marks | None]:
    """What tells storages apart, None of small ones. The bytes of all on a device are read at once, since each read waits for a GPU."""
    large = [data for data in storages if data.numel() > SMALL_BYTES]
    read: dict[int, bytes] = {}
    for device in {data.device for data in large}:
        own = [data for data in large if data.device == device]
        marks = torch.stack([data[_mark_places(data.numel(), device)] for data in own]).cpu().numpy()
        read |= {id(data): row.tobytes() for data, row in zip(own, marks, strict=True)}
    return [(data.device, data.numel(), read[id(data)]) if id(data) in read else None for data in storages]


@lru_cache(maxsize=256)
def _mark_places(num_bytes: int, device: torch.device) -> Tensor:
    return torch.linspace(0, num_bytes - 1, _MARKS, dtype=torch.float64).long().to(device)


def _view(tensor: Tensor, storages: dict[int, tuple[int, Tensor]]) -> _View | Tensor:
    """Describe a tensor, and note its storage; one that is more than a look at bytes stays as it is. Changes `storages`."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not (tensor.requires_grad or tensor.is_quantized)
    if not is_plain or tensor.device.type not in ("cpu", "cuda") or tensor.is_nested:
        return tensor
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        storages[storage._cdata] = (len(storages), data)
    number = storages[storage._cdata][0]
    shape = (int(tensor.storage_offset()), tensor.size(), tensor.stride())
    return _View(number, tensor.dtype, *shape, tensor.is_conj(), tensor.is_neg(), dict(tensor.__dict__))


def _tensor(view: _View | Tensor, blocks: list[Tensor]) -> Tensor:
    """Make the tensor that a view describes."""
    if isinstance(view, Tensor):
        return view
    data = blocks[view.block]
    tensor = torch.empty(0, dtype=view.dtype, device=data.device)
    tensor.set_(data.untyped_storage(), view.offset, view.size, view.stride)
    # A conjugated or negated look at the bytes, as `Tensor.conj` and `.imag` give: a bit of the tensor, not of its memory.
    if view.is_conj:
        torch._C._set_conj(tensor, True)
    if view.is_neg:
        torch._C._set_neg(tensor, True)
    tensor.__dict__.update(view.attributes)
    return tensor


# From the memory that a user grants to activations to the store that keeps within it.


def check_offload_dir(folder: str | Path) -> None:
    """Refuse a folder before anything runs that could not be written later.

    Args:
        folder: for activations.

    Raises:
        OutputError: it is missing or not writable.
    """
    if not Path(folder).is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"offload_dir: {folder} is no folder that can be written; make it, or name another")


def open_store(
    model: nn.Module,
    device: torch.device,
    *,
    activation_memory: int | str | None = None,
    activation_device_memory: int | str | None = None,
    offload_dir: str | Path | None = None,
    weights_wait: bool = False,
    sharers: int = 1,
) -> ActivationStore:
    """Make the store for one run.

    Args:
        model: its configurations are kept by reference wherever activations hold one.
        device: that computes.
        activation_memory: bytes of main memory; None takes three quarters of what is free, or an even share of that.
        activation_device_memory: bytes of GPU memory; None takes two fifths of what is free, or a tenth where weights wait in main memory.
            There is none to grant on a CPU.
        offload_dir: folder for what fits in neither; None makes that an error.
        weights_wait: whether layers come to the device one by one.
        sharers: processes of the run on this host.

    Returns:
        An empty store; close it.

    Raises:
        UserInputError: a size that is none, GPU memory without a GPU, or a folder that cannot be written.
    """
    cpu = torch.device("cpu")
    host = (
        int(HOST_SHARE * free_bytes(cpu)) // sharers if activation_memory is None else parse_bytes(activation_memory, "activation_memory")
    )
    if device.type != "cuda" and activation_device_memory is not None:
        raise UserInputError(
            f"activation_device_memory: {activation_device_memory!r} was given, but the run is on {device}; use activation_memory"
        )
    on_device = 0
    if device.type == "cuda":
        granted = activation_device_memory
        share = TIGHT_SHARE if weights_wait else DEVICE_SHARE
        on_device = int(share * free_bytes(device)) if granted is None else parse_bytes(granted, "activation_device_memory")
    configs = {id(module.__dict__["config"]) for module in model.modules() if "config" in module.__dict__}
    return ActivationStore(device, on_device, host, offload_dir, by_reference=lambda value: id(value) in configs)
