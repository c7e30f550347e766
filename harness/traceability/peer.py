"""The same audit for llmcompressor: its `trace_subgraphs`, run as its sequential pipeline runs them.

The library is imported here and nowhere else, and is never a dependency. Its calibration context (eager attention, a head on the meta
device) surrounds the reference, too, so what differs is the tracing. Its contract wants the same arguments in every batch, so batches
without the optional ones are left out.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from compressor.errors import TracingError
from compressor.tracing import Watched
from harness.errors import HarnessError
from harness.traceability.audit import Auditor
from harness.traceability.batches import Batch, copies
from harness.traceability.flows import FlowResult, StagePasses
from harness.traceability.verdicts import Finding, Row, Subject


class PeerAuditor(Auditor):
    """Traces with llmcompressor."""

    two_passes = False
    only_tensors = True
    missing_stage = Finding.REFUSED  # it logs a warning

    def __init__(self) -> None:
        """Look for the library.

        Raises:
            HarnessError: it is not installed.
        """
        if importlib.util.find_spec("llmcompressor") is None:
            raise HarnessError("--peer: llmcompressor is not installed here; run with the interpreter of an environment that has it")
        super().__init__("peer")

    def audit(self, subject: Subject, level: str) -> Row:
        """Audit in a process of its own: a trace that fails leaves patches of torch behind, under which the next one would suffer.

        Args:
            subject: what to audit.
            level: layer, inferred or linear.

        Returns:
            The verdict.
        """
        importlib.import_module("llmcompressor")  # once, for all children
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=lambda: sender.send(super(PeerAuditor, self).audit(subject, level)))
        child.start()
        sender.close()
        try:
            row: Row = receiver.recv()
        except EOFError:
            row = Row(subject.name, level, self.engine, checks={"trace": (Finding.CRASH, "the process died")})
        child.join()
        return row

    def batches(self, subject: Subject) -> dict[str, Batch]:
        """Choose the batches that have the same arguments as the traced one.

        Args:
            subject: has the batches.

        Returns:
            Variant to batch.
        """
        return {name: batch for name, batch in subject.batches.items() if batch.keys() == subject.batches["same"].keys()}

    def around(self, model: nn.Module) -> AbstractContextManager[None]:
        """Enter the library's calibration context.

        Args:
            model: changed for the duration.

        Returns:
            The context.
        """
        from llmcompressor.utils.helpers import calibration_forward_context

        context: AbstractContextManager[None] = calibration_forward_context(model)
        return context

    def make(self, model: nn.Module, batch: Batch, patterns: Sequence[str] | None) -> PeerFlow:
        """Trace a model on one batch.

        Args:
            model: the model.
            batch: to trace on.
            patterns: of the targets; None infers them as the library does.

        Returns:
            What can be run.

        Raises:
            TracingError: the library raised, whatever it was.
        """
        from compressed_tensors.utils.match import match_named_modules
        from llmcompressor.args import DatasetArguments
        from llmcompressor.pipelines.sequential.helpers import trace_subgraphs
        from llmcompressor.utils.pytorch.module import infer_sequential_targets

        try:
            targets = infer_sequential_targets(model, None if patterns is None else list(patterns))
            subgraphs = trace_subgraphs(model, copies([batch])[0], targets, DatasetArguments().tracing_ignore)
        except Exception as error:  # the peer and the model raise what they like
            raise TracingError(f"trace_subgraphs raised {type(error).__name__}: {error}") from error
        if not targets:
            raise TracingError("infer_sequential_targets found none")
        return PeerFlow(model, subgraphs, [name for name, _ in match_named_modules(model, targets)])


class PeerFlow:
    """Subgraphs in a row, and the values that each batch keeps between them."""

    engine = "trace_subgraphs"

    def __init__(self, model: nn.Module, subgraphs: Sequence[Any], targets: Sequence[str]) -> None:
        """Take the subgraphs."""
        self._model, self._subgraphs = model, subgraphs
        self.targets = targets

    def run(
        self,
        batches: Sequence[Batch],
        on_stage: Callable[[StagePasses], None],
        watched: Callable[[], Watched],
        quiet: Callable[[], AbstractContextManager[None]],
    ) -> FlowResult:
        """Run batches subgraph by subgraph.

        Args:
            batches: copied first.
            on_stage: not called; nothing is compressed.
            watched: not asked.
            quiet: not entered.

        Returns:
            The results and the targets that the subgraphs call.
        """
        del on_stage, watched, quiet
        values: list[dict[str, Any]] = [dict(batch) for batch in copies(batches)]
        results: list[Any] = [None] * len(batches)
        stages = []
        for index, subgraph in enumerate(self._subgraphs):
            called = (str(node.target) for node in subgraph.graph.find_nodes(op="call_module"))
            stages += [name for name in called if name in self.targets]
            for number, held in enumerate(values):
                output = subgraph.forward(self._model, **{name: held[name] for name in subgraph.input_names})
                if index == len(self._subgraphs) - 1:
                    results[number] = output
                    continue
                held.update(output)
                for name in subgraph.consumed_names:
                    held.pop(name, None)
        return FlowResult(results, list(dict.fromkeys(stages)))
