"""The CUDA engine: the same two methods as the tape, with a `torch.cuda.CUDAGraph` that repeats the kernels.

Reviewed against the documentation and the source of torch 2.13 and 2.11, and run on an H200 with torch 2.11; see the README.

- Everything runs on one stream of the engine's: AccumulateGrad nodes and the workspaces of cuBLAS remember the stream they were made on.
- A capture performs nothing. `record` therefore runs the step eagerly first, watched, and undone: all named errors come from there.
- The graphs of an engine share a memory pool. That is sound because a replay reads nothing that another replay left in the pool: what
  outlives a step was there before, and the loss is cloned at once.
- Failing to end a capture leaves torch with a pool that counts as in use, and before 2.13 with generators that count as capturing; both
  are put right before the named error is raised.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from compressor.errors import ReplayError, reason
from compressor.training.capture.operators import Record, operands
from compressor.training.capture.protocol import Captured
from compressor.training.capture.recorder import Recorder

# Ranges of memory, which may overlap, as few that do not.


@dataclass(frozen=True, order=True)
class Interval:
    """A range of addresses.

    Attributes:
        begin: the first byte.
        end: the byte after the last one.
    """

    begin: int
    end: int

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.end - self.begin


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Unite ranges that overlap.

    Args:
        intervals: in any order; empty ones are left out, and those that only touch stay apart, since they may be of different blocks.

    Returns:
        Disjoint ranges in ascending order.
    """
    found: list[Interval] = []
    for interval in sorted(interval for interval in intervals if interval.size > 0):
        if found and interval.begin < found[-1].end:
            found[-1] = Interval(found[-1].begin, max(found[-1].end, interval.end))
        else:
            found.append(interval)
    return found


# What happens when a capture fails: in which order it is ended, put right and named. It knows no device, so every machine can test it.

T = TypeVar("T")


def run_captured(
    begin: Callable[[], object],
    run: Callable[[], T],
    end: Callable[[], object],
    recover: Callable[[], object],
    name: Callable[[RuntimeError], ReplayError],
) -> T:
    """Run something between the begin and the end of a capture, and leave no capture open.

    Args:
        begin: opens the capture.
        run: what is captured.
        end: closes it; it fails where the device has given the capture up.
        recover: puts right what a failed end leaves behind.
        name: says in our words what the device refused.

    Returns:
        What it returned.

    Raises:
        ReplayError: refused by the recorder, or by the device.
    """
    begin()
    try:
        result = run()
    except BaseException as error:
        _close(end, recover)
        if isinstance(error, RuntimeError) and not isinstance(error, ReplayError):
            raise name(error) from error
        raise
    try:
        end()
    except RuntimeError as error:
        recover()
        raise name(error) from error
    return result


def _close(end: Callable[[], object], recover: Callable[[], object]) -> None:
    """End a capture whose content has failed; where the end fails too, it says the same once more."""
    try:
        end()
    except RuntimeError:
        recover()


_SPOILED = 0xA5
# Threads that pin memory for a data loader may go on meanwhile; the backward pass is captured from its own thread all the same.
_ERROR_MODE = "thread_local"


class CudaGraphEngine:
    """Captures steps into CUDA graphs of one memory pool.

    Args:
        device: the CUDA device of the model.
    """

    runs_while_capturing = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def eager(self, run: Callable[[], Tensor]) -> Tensor:
        """Run a step on the engine's stream.

        Args:
            run: the step on its fixed inputs.

        Returns:
            What it returned, safe to use on the current stream.
        """
        loss = _on(self._stream, run)
        loss.record_stream(torch.cuda.current_stream(self.device))
        return loss

    def capture(self, run: Callable[[], Tensor], recorder: Recorder, generators: Sequence[torch.Generator]) -> Captured:
        """Capture a step; nothing is executed.

        Args:
            run: the step on its fixed inputs.
            recorder: raises the named errors, with operator and module, before CUDA says that an operation is not permitted.
            generators: those that the step draws from beside the default one.

        Returns:
            The graph.

        Raises:
            ReplayError: the step cannot be captured; the engine can go on.
        """
        graph = _new_graph(generators)

        def watched() -> Tensor:
            with recorder:
                return run()

        with _collector_off(), _workspaces_of_its_own(), torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            _forget_dead_pools()
            loss = run_captured(
                partial(graph.capture_begin, pool=self._pool, capture_error_mode=_ERROR_MODE),
                watched,
                partial(_end, graph),
                partial(self._recover, generators),
                partial(_refusal, recorder),
            )
        return CudaGraph(graph, recorder, loss.detach(), self._stream)

    def _recover(self, generators: Sequence[torch.Generator]) -> None:
        """After a capture that could not be ended: take another pool, and let the generators see a capture end well."""
        self._pool = torch.cuda.graph_pool_handle()
        graph = _new_graph(generators)
        graph.capture_begin(pool=self._pool, capture_error_mode=_ERROR_MODE)
        torch.zeros(1, dtype=torch.float32, device=self.device)
        graph.capture_end()


class CudaGraph:
    """A captured step on a GPU.

    Args:
        graph: the captured graph.
        recorder: has watched the capture.
        loss: where a replay leaves the loss.
        stream: where it was captured, and is replayed.

    Attributes:
        ops: the recorded operators.
        loss: where a replay leaves the loss.
        generators: random generators, beside the default one, that the step draws from.
    """

    ran_at_capture = False

    def __init__(self, graph: torch.cuda.CUDAGraph, recorder: Recorder, loss: Tensor, stream: torch.cuda.Stream) -> None:
        self._graph, self._stream = graph, stream
        self.ops: list[Record] = recorder.ops
        self.loss = loss
        leaves = (leaf for op in self.ops for leaf in operands((op.args, op.kwargs)))
        self.generators = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Generator)}.values())
        storages = recorder.storages
        on_device = (device.type == "cuda" for device in storages.devices)
        self._memory = merged(
            Interval(begin, begin + size)
            for begin, size, counts in zip(storages.addresses, storages.sizes, on_device, strict=True)
            if counts
        )

    @property
    def lines(self) -> list[str]:
        """The signature, a line per operator."""
        return [op.line for op in self.ops]

    @property
    def scratch_bytes(self) -> int:
        """Memory that the graph holds beside the model, the optimizer and the inputs."""
        return sum(interval.size for interval in self._memory)

    def replay(self) -> None:
        """Perform one step; the current stream waits for it."""
        _on(self._stream, self._graph.replay)

    def replay_spoiled(self) -> None:
        """Perform one step after all memory of the pool that it writes was filled with 0xA5."""
        _on(self._stream, self._spoil)
        self.replay()

    def _spoil(self) -> None:
        for interval in self._memory:
            bytes_at(interval, self.loss.device).fill_(_SPOILED)


def _on(stream: torch.cuda.Stream, run: Callable[[], T]) -> T:
    """Run on a stream, after what the current stream has to do, and before what it gets to do."""
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        result = run()
    current.wait_stream(stream)
    return result


def _new_graph(generators: Sequence[torch.Generator]) -> torch.cuda.CUDAGraph:
    """Make a graph that knows the generators; torch registers the default one itself, and from 2.13 on finds all when they are used."""
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a torch that finds them itself says that it need not be told
        for generator in generators:
            if generator.device.type == "cuda":
                graph.register_generator_state(generator)
    return graph


@contextmanager
def _collector_off() -> Iterator[None]:
    """Collect now and not in the block: an old graph or event that is destroyed during a capture may stop it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _forget_dead_pools() -> None:
    """Let both allocators drop a pool whose graphs are all gone, since no capture may begin in one that they still remember."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()


@contextmanager
def _workspaces_of_its_own() -> Iterator[None]:
    """Let cuBLAS take its workspace from the pool of the graph, which lives as long; others may free the one it has."""
    clear: Callable[[], None] = torch._C._cuda_clearCublasWorkspaces
    clear()
    try:
        yield
    finally:
        clear()


def bytes_at(interval: Interval, device: torch.device) -> Tensor:
    """Show memory that a graph owns as a tensor."""
    storage: Any = torch._C._construct_storage_from_data_pointer(interval.begin, device, interval.size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _end(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a graph is empty says nothing of a step that was refused at its first operator
        graph.capture_end()


def _refusal(recorder: Recorder, error: RuntimeError) -> ReplayError:
    last = recorder.ops[-1].place if recorder.ops else "before its first operator"
    return ReplayError(
        f"CUDA does not capture this step, after {last}: {reason(error)}; "
        "it copies from or waits for the host, or works on another stream; do that outside of the step, or use mode='eager'"
    )
