"""The CUDA engine: the same two methods as the tape, with a `torch.cuda.CUDAGraph` that repeats the kernels.

Written against the documentation of `torch.cuda.graph`. A capture executes nothing, so the trainer replays once after it. All eager legs
run on the capture stream, because AccumulateGrad nodes remember the stream they were made on. The graphs of one engine share a memory
pool; the recorder keeps the storages of every plan alive, so that no graph writes into the memory of another. `torch.cuda.graph` registers
the default generator of the device; a step that names a generator of its own is refused by CUDA.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from compressor.training.engine import Captured
from compressor.training.operators import Record
from compressor.training.recorder import Recorder
from compressor.training.tape import spoil


class CudaGraphEngine:
    """Captures steps into CUDA graphs of one memory pool.

    Args:
        device: the CUDA device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def eager(self, run: Callable[[], Tensor]) -> Tensor:
        """Run a step on the capture stream.

        Args:
            run: the step on its fixed inputs.

        Returns:
            What it returned, safe to use on the current stream.
        """
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = run()
        current.wait_stream(self._stream)
        loss.record_stream(current)
        return loss

    def capture(self, run: Callable[[], Tensor], recorder: Recorder) -> Captured:
        """Capture a step; nothing is executed.

        Args:
            run: the step on its fixed inputs.
            recorder: raises the named errors, with operator and module, before CUDA says that an operation is not permitted.

        Returns:
            The graph.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"), recorder:
            loss = run()
        return CudaGraph(graph, recorder.ops, loss.detach(), recorder.scratch)


class CudaGraph:
    """A captured step on a GPU.

    Args:
        graph: the captured graph.
        ops: the recorded operators.
        loss: where a replay leaves the loss.
        scratch: storages of the graph's pool.
    """

    ran_at_capture = False

    def __init__(self, graph: torch.cuda.CUDAGraph, ops: list[Record], loss: Tensor, scratch: list[torch.UntypedStorage]) -> None:
        self._graph, self.ops, self.loss, self._scratch = graph, ops, loss, scratch
        leaves = (leaf for op in ops for leaf in tree_leaves((op.args, op.kwargs)))
        self.generators = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Generator)}.values())

    @property
    def lines(self) -> list[str]:
        """The signature, a line per operator."""
        return [op.line for op in self.ops]

    @property
    def scratch_bytes(self) -> int:
        """Memory that the graph holds beside the model, the optimizer and the inputs."""
        return sum(storage.nbytes() for storage in self._scratch)

    def replay(self) -> None:
        """Perform one step on the current stream."""
        self._graph.replay()

    def replay_spoiled(self) -> None:
        """Perform one step after every storage that it makes was filled with 0xA5."""
        for storage in self._scratch:
            spoil(storage)
        self.replay()
