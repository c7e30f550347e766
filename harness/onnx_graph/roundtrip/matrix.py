"""The round trip: model x exporter x optimizer x skips, a row each: the verdict, what changed, and by how much the numbers did."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from compressor.errors import CompressorError, UserInputError
from compressor.settings.kinds import TEXTS, WHOLE
from compressor.settings.options import check_kind
from harness.errors import ContractViolation
from harness.onnx_graph.contracts.base import Contract, ContractResult, Finding, Holding
from harness.onnx_graph.graph.drawn_inputs import example_inputs
from harness.onnx_graph.graph.reading import load_graph, read_graph
from harness.onnx_graph.graph.run_session import POLICIES, OutputRow, compare_outputs
from harness.onnx_graph.roundtrip.optimizers import find_optimizer, run_optimizer

if TYPE_CHECKING:
    import torch
    from torch import nn

    from harness.onnx_graph.roundtrip.export import Dynamic, Exported


@dataclass(frozen=True)
class RoundTripRow:
    """One cell of the matrix.

    Attributes:
        exporter: or `file`.
        optimizer: name.
        skips: forced.
        result: what the contract says; NOT_ANALYSED where exporter or optimizer failed.
        num_nodes: before and after.
        op_changes: operator to change of its count.
        numbers: by policy, the worst output; missing where the graph could not be run.
        seconds: of the optimizer.
        optimized: the graph after; None where there is none.
    """

    exporter: str
    optimizer: str
    skips: tuple[str, ...]
    result: ContractResult
    num_nodes: tuple[int, int] = (0, 0)
    op_changes: Mapping[str, int] = field(default_factory=dict)
    numbers: Mapping[str, OutputRow] = field(default_factory=dict)
    seconds: float = 0.0
    optimized: onnx.ModelProto | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON types."""
        return {
            "exporter": self.exporter,
            "optimizer": self.optimizer,
            "skips": list(self.skips),
            "result": self.result.to_dict(),
            "num_nodes": list(self.num_nodes),
            "op_changes": dict(self.op_changes),
            "numbers": {name: {"max_abs": row.max_abs, "sqnr_db": row.sqnr_db} for name, row in self.numbers.items()},
            "seconds": self.seconds,
        }


class RoundTrip:
    """A model on its way through exporters and optimizers. Each exporter runs once."""

    def __init__(self, exports: Mapping[str, Callable[[], Exported]], opset: int | None = None) -> None:
        """Export nothing yet.

        Args:
            exports: exporter to what makes the graph.
            opset: that was asked for; None for a graph that was exported elsewhere.
        """
        self._opset = opset
        self._exports = dict(exports)
        self._made: dict[str, Exported] = {}

    @property
    def exporters(self) -> tuple[str, ...]:
        """Those that can be asked for."""
        return tuple(self._exports)

    def exported(self, exporter: str) -> Exported:
        """Return the graph of an exporter.

        Args:
            exporter: one of `exporters`.

        Returns:
            The graph, exported on first use.

        Raises:
            ExportFailure: the exporter cannot export this model.
            UserInputError: it is none of `exporters`.
        """
        if exporter not in self._exports:
            raise UserInputError(f"round trip: there is no exporter {exporter!r} here; choose from {', '.join(self._exports)}")
        if exporter not in self._made:
            self._made[exporter] = self._exports[exporter]()
        return self._made[exporter]

    def notes(self) -> list[str]:
        """Say of every export that was made what nobody asked for: its inputs, another opset, what its checks did not see."""
        from harness.onnx_graph.roundtrip.export import describe_inputs, opset_of

        exports = [one for one in self._made.values() if one.inputs is not None]
        lines = list(dict.fromkeys(f"exported with inputs {describe_inputs(one.inputs or {})}" for one in exports))
        found = {one.exporter: opset_of(one.model) for one in exports}
        lines += [f"{name}: opset {number}, not {self._opset}" for name, number in found.items() if number != self._opset]
        return lines + [note for one in exports for note in one.notes]

    def run(self, contract: Contract, exporter: str, optimizer: str, skip: Sequence[str] = ()) -> RoundTripRow:
        """Go one way.

        Args:
            contract: what must hold.
            exporter: one of `exporters`.
            optimizer: name.
            skip: passes to leave out.

        Returns:
            The row; a failure of exporter or optimizer is NOT_ANALYSED in it.

        Raises:
            UserInputError: an unknown exporter, optimizer or pass, or no contract.
        """
        find_optimizer(optimizer)
        if not isinstance(contract, Contract):
            raise UserInputError(f"round trip: {contract!r} is no contract; give an object of one, SeparateQKV() for example")
        try:
            exported = self.exported(exporter)
            optimized = run_optimizer(exported.model, optimizer, skip)
            result = contract.check(exported.model, optimized.model, exported.module)
            result = replace(result, notes=(*result.notes, *exported.notes))
        except UserInputError:
            raise
        except CompressorError as error:
            finding = Finding(contract.name, Holding.NOT_ANALYSED, str(error))
            return RoundTripRow(exporter, optimizer, tuple(skip), ContractResult((contract.name,), (finding,)))
        before, after = _histogram(exported.model), _histogram(optimized.model)
        changes = {name: after[name] - before[name] for name in sorted(before | after) if after[name] != before[name]}
        counts = (before.total(), after.total())
        numbers = _numbers(exported, optimized.model)
        return RoundTripRow(exporter, optimizer, tuple(skip), result, counts, changes, numbers, optimized.seconds, optimized.model)

    def matrix(
        self,
        contract: Contract,
        exporters: Sequence[str] | None = None,
        optimizers: Sequence[str] = ("onnxsim",),
        skips: Sequence[Sequence[str]] = ((),),
        on_row: Callable[[RoundTripRow], None] = lambda row: None,
    ) -> list[RoundTripRow]:
        """Go all ways.

        Args:
            contract: what must hold.
            exporters: by default all.
            optimizers: names.
            skips: sets of passes; those that an optimizer cannot skip are left out of its rows.
            on_row: called with each row as it comes.

        Returns:
            One row per exporter, optimizer and set of skips.
        """
        rows = []
        for exporter in exporters or self.exporters:
            for optimizer in optimizers:
                for chosen in _skips_for(optimizer, skips):
                    rows.append(self.run(contract, exporter, optimizer, chosen))
                    on_row(rows[-1])
        return rows

    def assert_holds(self, contract: Contract, skip: Sequence[str] = (), optimizer: str = "onnxsim", exporter: str | None = None) -> None:
        """Fail a test unless the contract survives.

        Args:
            contract: what must hold.
            skip: passes to leave out.
            optimizer: name.
            exporter: by default the first.

        Raises:
            ContractViolation: it is violated or could not be analysed; with the skips that would keep it, where there are any.
        """
        chosen = exporter or self.exporters[0]
        row = self.run(contract, chosen, optimizer, skip)
        if row.result.holds:
            return
        given = f"skipping {', '.join(skip)}" if skip else "with nothing skipped"
        head = f"{row.result.holding.value} after {chosen} and {optimizer} {given}"
        raise ContractViolation(
            "\n".join(filter(None, [head, row.result.message, _numbers_text(row), self._advice(contract, chosen, optimizer, row)]))
        )

    def _advice(self, contract: Contract, exporter: str, optimizer: str, row: RoundTripRow) -> str:
        """Say which passes are guilty, where that can be searched."""
        from harness.onnx_graph.roundtrip.explain import OPTIMIZER_OF, explain

        backend = next((name for name, one in OPTIMIZER_OF.items() if one == optimizer), None)
        if backend is None or row.result.holding is Holding.NOT_ANALYSED:
            return ""
        exported = self.exported(exporter)
        explanation = explain(exported.model, contract, backend, exported.module)
        if not explanation.kept or not explanation.skips:
            return "no set of skips keeps it"
        return f"kept by skipping {', '.join(explanation.skips)} ({explanation.num_calls} calls of {backend} {explanation.version})"


def onnx_roundtrip(
    model: nn.Module | onnx.ModelProto | str | Path,
    inputs: Mapping[str, torch.Tensor] | None = None,
    *,
    exporters: Sequence[str] = ("dynamo", "torchscript"),
    opset: int | None = None,
    dynamic: Dynamic | None = None,
    model_class: str | None = None,
) -> RoundTrip:
    """Start a round trip.

    Args:
        model: a module with example inputs, the folder of a transformers checkpoint (a compressed one goes with its codes), an .onnx file,
            or a graph.
        inputs: by the names of the forward's arguments; needed for a module.
        exporters: `dynamo`, `torchscript`; of no account for a graph.
        opset: of the export; None for 18, or 21 for a compressed checkpoint, which has no other.
        dynamic: sizes that may change, by input and axis.
        model_class: class of transformers for a folder.

    Returns:
        The round trip; nothing is exported before it is asked for.

    Raises:
        UserInputError: a module without inputs, a file that is no model, or an export setting that is of no account for it.
    """
    from harness.onnx_graph.roundtrip.export import DEFAULT_OPSET, Exported, example_batch, export, is_quantized, load_for_export
    from harness.onnx_graph.roundtrip.export_quantized import OPSET, export_quantized, load_quantized_for_export

    check_kind("exporters", list(exporters), TEXTS)
    if not exporters:
        raise UserInputError("exporters: none was given, so that nothing would be looked at; give dynamo, torchscript or both")
    if opset is not None:
        check_kind("opset", opset, WHOLE)
    if isinstance(model, onnx.ModelProto) or (isinstance(model, str | Path) and not Path(model).is_dir()):
        for name, value in (("model_class", model_class), ("opset", opset)):
            if value is not None:
                raise UserInputError(
                    f"{name}: {value} was given for a graph, which is exported already; leave it out, or give a checkpoint"
                )
        graph = read_graph(model)
        return RoundTrip({"file": lambda: Exported(graph, None, None, "file")})
    if isinstance(model, str | Path) and is_quantized(model):
        if opset not in (None, OPSET):
            raise UserInputError(f"opset: {opset} was given for a compressed checkpoint, which goes at {OPSET}; leave it out")
        quantized = load_quantized_for_export(model, model_class)
        batch = inputs or example_batch(quantized)
        ways = {one: functools.partial(export_quantized, quantized, batch, exporter=one, dynamic=dynamic) for one in exporters}
        return RoundTrip(ways, OPSET)
    if isinstance(model, str | Path):
        module, examples = load_for_export(model, model_class)
        inputs = inputs or examples
    else:
        module = model
    if inputs is None:
        raise UserInputError("round trip: a module needs example inputs; give them by the names of its forward's arguments")
    opset = DEFAULT_OPSET if opset is None else opset
    return RoundTrip(
        {one: functools.partial(export, module, inputs, exporter=one, opset=opset, dynamic=dynamic) for one in exporters}, opset
    )


def _histogram(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in load_graph(model).graph.all_nodes())


def _numbers(exported: Exported, after: onnx.ModelProto) -> dict[str, OutputRow]:
    try:
        inputs = exported.inputs or example_inputs(exported.model)
        rows = {name: compare_outputs(exported.model, after, inputs, policy) for name, policy in POLICIES.items()}
    except CompressorError:
        return {}  # the graph cannot be run here; the row shows no numbers, and NumericEqual says why where it is asked for
    return {name: min(outputs, key=lambda row: row.sqnr_db) for name, outputs in rows.items() if outputs}


def _numbers_text(row: RoundTripRow) -> str:
    return "; ".join(f"{name}: max abs {one.max_abs:.3g}, SQNR {one.sqnr_db:.1f} dB" for name, one in row.numbers.items())


def _skips_for(optimizer: str, skips: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The sets of skips that an optimizer understands, each once."""
    from harness.onnx_graph.skips.passes import effective_passes

    backend = find_optimizer(optimizer).backend
    known = effective_passes(backend).known if backend else frozenset()
    return list(dict.fromkeys(tuple(name for name in one if name in known) for one in skips))
