"""The processes of one run, as the rest of the code sees them: alone by default, else the ranks of a torch.distributed group.

All ranks make the same calls in the same order. Sums have the bits that one process gets (`PartSum`): each rank counts its share of the
parts of the samples, and whoever needs a sum adds the parts of all in their order.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from operator import add
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from compressor.distributed.messages import blanks, read, written
from compressor.distributed.watch import Watch, watched
from compressor.errors import CalibrationError, RankError, UserInputError
from compressor.numerics.part_sums import NUM_PARTS, PartSum, add_parts
from compressor.pages import raw_bytes

T = TypeVar("T")
_NO_LIMIT = timedelta(days=30)  # one rank may solve, or write, for long; whether it lives is for the watch to say
_PIECE = 1 << 22  # numbers that come together at once, from every rank
# Seconds between two looks at whether a collective is done, and by how much longer each: a fifth of the wait so far, however short it is.
_LONGEST_PAUSE, _SHORTEST_PAUSE, _GROWTH = 1e-2, 1e-5, 1.2
# Texts are sent with their length before them, and what is short, as most are, in one collective instead of two.
_LENGTH_BYTES, _HEAD_BYTES = 8, 1 << 12
_IN_HEAD = _HEAD_BYTES - _LENGTH_BYTES


def share_out(costs: Sequence[float], size: int) -> list[int]:
    """Choose who solves what: the most expensive first, each for the rank that has least to do.

    Args:
        costs: of each problem.
        size: number of ranks.

    Returns:
        The rank of each problem.

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies": at most 4/3 of the shortest time.
    """
    loads, owners = [0.0] * size, [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        owners[place] = min(range(size), key=loads.__getitem__)
        loads[owners[place]] += costs[place]
    return owners


class Ranks:
    """The ranks that share a run.

    Attributes:
        rank: number of this process.
        size: number of processes; 1 for a run in one process.
        device: where this rank computes.
    """

    def __init__(self, group: Any = None, watch: Watch | None = None) -> None:
        """Take over a process group; None for one process."""
        self._group, self._watch = group, watch
        self.rank: int = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()
        self.device = torch.device("cpu")

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is written."""
        return self.rank == 0

    @property
    def on_host(self) -> int:
        """How many ranks share this host, as torchrun says; all, where nobody says."""
        return min(self.size, int(os.environ.get("LOCAL_WORLD_SIZE", self.size)))

    def counts(self, part: int) -> bool:
        """Say whether this rank counts the samples of a part.

        Args:
            part: its number.

        Returns:
            True for one rank.
        """
        return part * self.size // NUM_PARTS == self.rank

    def check(self) -> None:
        """Raise what has happened to another rank.

        Raises:
            RankError: one has failed, or does not answer.
        """
        if self._watch is not None:
            self._watch.check()

    def broadcast(self, value: Any, source: int, types: Sequence[type] = ()) -> Any:
        """Give a value of one rank to all.

        Args:
            value: on that rank: numbers, text, tensors, lists, mappings, and objects of `types`; on the others it is not looked at.
            source: number of that rank.
            types: dataclasses and named tuples inside of the value.

        Returns:
            The value; on the other ranks a copy, with tensors on the CPU or on their device.
        """
        if self.size == 1:
            return value
        text, tensors = written(value) if self.rank == source else (b"", [])
        head = self._bytes_of(source, _head(text), _HEAD_BYTES)
        if (length := _length(head)) > _IN_HEAD:
            head += self._bytes_of(source, text[_IN_HEAD:], length - _IN_HEAD)
        return self._tensors_of(source, value, tensors, _text(head), types)

    def gather(self, value: Any, types: Sequence[type] = ()) -> list[Any]:
        """Give the values of all ranks to all.

        Args:
            value: of this rank, as `broadcast` takes it.
            types: as `broadcast` takes them.

        Returns:
            By rank.
        """
        if self.size == 1:
            return [value]
        text, tensors = written(value)
        heads = self._bytes_of_all(_head(text), _HEAD_BYTES)
        if (longest := max(map(_length, heads))) > _IN_HEAD:
            heads = list(map(add, heads, self._bytes_of_all(text[_IN_HEAD:], longest - _IN_HEAD)))
        return [self._tensors_of(source, value, tensors, _text(head), types) for source, head in enumerate(heads)]

    def first(self, work: Callable[[], Any], types: Sequence[type] = ()) -> Any:
        """Do something on the first rank alone.

        Args:
            work: gives a value as `broadcast` takes it.
            types: as `broadcast` takes them.

        Returns:
            The value, on all ranks.
        """
        return self.broadcast(work() if self.is_first else None, 0, types)

    def union(self, values: Sequence[str]) -> list[str]:
        """Put texts of all ranks together: those of the first rank first, each once.

        Args:
            values: of this rank.

        Returns:
            The same on all ranks.
        """
        return list(dict.fromkeys(value for own in self.gather(list(values)) for value in own))

    def share_out(self, costs: Sequence[float]) -> list[int]:
        """Choose who solves what, as `share_out` does.

        Args:
            costs: of each problem.

        Returns:
            The rank of each problem; the same on all ranks.
        """
        return share_out(costs, self.size)

    def solved(self, owners: Sequence[int], solve: Callable[[int], T], types: Sequence[type]) -> Iterator[T]:
        """Solve problems, each on its owner, and give the results to all.

        Args:
            owners: of each problem.
            solve: called with the number of a problem.
            types: as `broadcast` takes them.

        Yields:
            The results, in the order of the problems; in one process each is solved when it is asked for.
        """
        own: dict[int, T] = {}
        for place in (place for place, owner in enumerate(owners) if self.size > 1 and owner == self.rank):
            self.check()
            own[place] = solve(place)
        for place, owner in enumerate(owners):
            yield solve(place) if self.size == 1 else self.broadcast(own.pop(place, None), owner, types)

    def add_up(self, sums: Sequence[PartSum], owners: Sequence[int | None]) -> None:
        """Add what all ranks have counted. Changes the sums: they are whole on their owner, and empty elsewhere.

        Args:
            sums: the same ones on all ranks, in the same order.
            owners: of each; None for all ranks.

        Raises:
            CalibrationError: something sees all samples several times, so that its parts cannot be told apart.
        """
        if self.size == 1:
            return
        if any(self.gather(any(one.came_again for one in sums))):
            raise CalibrationError(
                "ranks: a module is called between several stages, so that its statistics cannot be shared out; run it in one process"
            )
        kinds = [[[[*span], [_kind(array) for array in arrays]] for span, arrays in one.nodes.items()] for one in sums]
        everywhere = self.gather(kinds)
        for place, (one, owner) in enumerate(zip(sums, owners, strict=True)):
            held = [own[place] for own in everywhere]
            target = 0 if owner is None else owner
            found = self._added(one, held, target)
            one.replace(found)
            if owner is None:
                one.replace(self.broadcast(found, target))

    def _bytes_of(self, source: int, own: bytes, size: int) -> bytes:
        """Give bytes of one rank to all; what the others hand in is not looked at."""
        data = _padded(own, size)
        self._wait(dist.broadcast(data, group=self._group, group_src=source, async_op=True))
        return data.numpy().tobytes()

    def _bytes_of_all(self, own: bytes, size: int) -> list[bytes]:
        """Give bytes of every rank to all."""
        data = _padded(own, size)
        room = [torch.empty_like(data) for _ in range(self.size)]
        self._wait(dist.all_gather(room, data, group=self._group, async_op=True))
        return [one.numpy().tobytes() for one in room]

    def _tensors_of(self, source: int, value: Any, tensors: list[Tensor], text: bytes, types: Sequence[type]) -> Any:
        """Give the tensors of a value to all that have its text, and put it together there."""
        skeleton, room = (None, tensors) if source == self.rank else blanks(text, self.device)
        for tensor in room:
            if tensor.numel():
                self._wait(dist.broadcast(raw_bytes(tensor), group=self._group, group_src=source, async_op=True))
        return value if source == self.rank else read(skeleton, room, types)

    def _added(self, one: PartSum, held: Sequence[Any], target: int) -> list[Tensor]:
        """Bring the arrays of a sum together on one rank, a piece of them at a time; nothing on the others."""
        kinds: list[Any] = next((spans[0][1] for spans in held if spans), [])
        most, own, found = max(map(len, held)), list(one.nodes.values()), []
        for array, (kind, shape, place) in enumerate(kinds):
            dtype, device = getattr(torch, kind), torch.device("cpu") if place == "cpu" else self.device
            total = torch.empty(shape if self.rank == target else 0, dtype=dtype, device=device).reshape(-1)
            for start in range(0, math.prod(shape), _PIECE):
                part = slice(start, min(start + _PIECE, math.prod(shape)))
                pieces = [arrays[array].reshape(-1)[part] for arrays in own]
                pieces += [torch.zeros(part.stop - start, dtype=dtype, device=device) for _ in range(most - len(own))]
                came = [self._gathered(piece, target) for piece in pieces]
                if self.rank == target:
                    nodes = {tuple(span): came[node][rank] for rank, spans in enumerate(held) for node, (span, _) in enumerate(spans)}
                    total[part] = add_parts(nodes)
            found.append(total.reshape(shape) if self.rank == target else total)
        return found if self.rank == target else []

    def _gathered(self, tensor: Tensor, target: int) -> list[Tensor]:
        """Bring tensors of one shape to one rank."""
        room = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == target else None
        self._wait(dist.gather(tensor, room, group=self._group, group_dst=target, async_op=True))
        return room or []

    def _wait(self, work: Any) -> None:
        """Wait for a collective; not longer than all ranks live."""
        pause = _SHORTEST_PAUSE
        try:
            while not work.is_completed():
                self.check()
                time.sleep(pause)
                pause = min(_LONGEST_PAUSE, _GROWTH * pause)
            work.wait()
        except RankError:
            raise
        except RuntimeError as error:
            assert self._watch is not None
            raise self._watch.explain(error) from error


def _head(text: bytes) -> bytes:
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text[:_IN_HEAD]


def _length(head: bytes) -> int:
    return int.from_bytes(head[:_LENGTH_BYTES], "little")


def _text(sent: bytes) -> bytes:
    return sent[_LENGTH_BYTES : _LENGTH_BYTES + _length(sent)]


def _padded(own: bytes, size: int) -> Tensor:
    return torch.frombuffer(bytearray(own.ljust(size, b"\0")), dtype=torch.uint8)


def _kind(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type]


@contextmanager
def joined() -> Iterator[Ranks]:
    """Find the ranks that share this run: those of the process group, where there is one.

    Yields:
        The ranks; all leave together, and when one fails all do.

    Raises:
        UserInputError: a number of ranks among which the parts of the samples cannot be divided.
        RankError: another rank has failed.
    """
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if size == 1:
        yield Ranks()
        return
    if NUM_PARTS % size:
        kind = UserInputError if dist.get_rank() == 0 else RankError  # which one rank tells
        raise kind(
            f"ranks: {size} processes were started, and statistics are summed in {NUM_PARTS} parts, so that every number of them gives "
            "the same bytes; start 1, 2, 4 or 8"
        )
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    number = store.add(f"compressor runs of rank {rank}", 1)
    with watched(dist.PrefixStore(f"compressor run {number}", store), rank, size) as watch:  # type: ignore[attr-defined]
        ranks = Ranks(watch.during(lambda: dist.new_group(timeout=_NO_LIMIT, backend=backend)), watch)
        yield ranks
        ranks.gather(None)  # nobody leaves before all are done
