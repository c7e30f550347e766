"""The audit: traced runs of a model against its plain forwards, bit for bit, for the inputs and outputs of every module.

Traced on one batch, a model runs on that batch, a padded one, another shape, one without what is optional, and on all of them layer by
layer. The two-pass check calibrates, compresses and propagates stage by stage, and compares what the calibration saw with a naive
reference that runs all plain forwards again from the start for every stage.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from compressor.errors import CompressorError, TargetError
from harness.traceability.batches import Batch
from harness.traceability.flows import Flow, StagePasses, make_flow
from harness.traceability.recording import (
    Record,
    compress_stage,
    first_difference,
    flatten,
    naive_passes,
    plain_forward,
    recording,
    same_bits,
    watchable,
)
from harness.traceability.verdicts import LEVELS, Finding, Row, Subject

_PATCHABLE = ("__call__", "__setattr__", "register_buffer")
_PLAIN = {name: nn.Module.__dict__[name] for name in _PATCHABLE}


class Auditor:
    """Audits subjects with one engine. Another tracer, or one with planted errors, is a subclass that makes another flow.

    Attributes:
        engine: auto, graph or suspend.
        two_passes: calibrate, compress and propagate, too.
        only_tensors: compare only the tensors that modules with weights are given and return, and no results: what matters for
            calibration, where a library drops the rest.
        missing_stage: what it means that a target is called and has no stage.
    """

    two_passes = True
    only_tensors = False
    missing_stage = Finding.SILENT

    def __init__(self, engine: str = "auto") -> None:
        """Choose the engine."""
        self.engine = engine

    def make(self, model: nn.Module, batch: Batch, patterns: Sequence[str] | None) -> Flow:
        """Trace a model on one batch.

        Args:
            model: the model.
            batch: to trace on.
            patterns: of the targets; None infers them.

        Returns:
            What can be run.
        """
        return make_flow(model, batch, patterns, self.engine)

    def batches(self, subject: Subject) -> Mapping[str, Batch]:
        """Choose the batches that are run.

        Args:
            subject: has the batches.

        Returns:
            Variant to batch.
        """
        return subject.batches

    def around(self, model: nn.Module) -> AbstractContextManager[None]:
        """Enter what surrounds all forwards, those of the reference included.

        Args:
            model: the model.

        Returns:
            The context.
        """
        del model
        return nullcontext()

    def audit(self, subject: Subject, level: str) -> Row:
        """Audit one subject at one level.

        Args:
            subject: what to audit.
            level: a name in LEVELS.

        Returns:
            The verdict.

        Raises:
            HarnessError: the plain model fails, so that nothing can be said about a traced one.
        """
        start = time.perf_counter()
        row = Row(subject.name, level, self.engine)
        model, batches = subject.build(), self.batches(subject)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with self.around(model):
            reference = plain_records(model, batches)
            hooks = _num_hooks(model)  # a model may install some of its own in its first forward
            self._check_runs(row, model, batches, subject, reference)
        if not self.only_tensors:
            with _judged(row, "left_behind"):
                row.checks["left_behind"] = _verdict(_left_behind(model, before, hooks))
        row.seconds = time.perf_counter() - start
        return row

    def _check_runs(
        self, row: Row, model: nn.Module, batches: Mapping[str, Batch], subject: Subject, reference: Mapping[str, Record]
    ) -> None:
        patterns = target_patterns(model, subject, row.level, reference)
        with _judged(row, "trace"):
            flow = self.make(model, batches["same"], patterns)
            row.used = flow.engine
            for name, batch in batches.items():
                with _judged(row, name):
                    row.checks[name] = self._compare_run(row, flow, model, [batch], reference[name])
            with _judged(row, "multi"):
                row.checks["multi"] = self._compare_run(row, flow, model, list(batches.values()), _together(reference.values()))
            row.used = flow.engine
        if self.two_passes and "trace" not in row.checks:
            with _judged(row, "two_pass"):
                row.checks["two_pass"] = _verdict(self._two_passes(subject, list(batches.values()), patterns))

    def _compare_run(self, row: Row, flow: Flow, model: nn.Module, batches: Sequence[Batch], expected: Record) -> tuple[Finding, str]:
        """Run twice: planning may call modules too, so only the second run is recorded; the results of both must be right."""
        torch.manual_seed(0)
        first = flow.run(batches, _propagate, dict, nullcontext)
        got = Record()
        torch.manual_seed(0)
        with recording(model, got):
            result = flow.run(batches, _propagate, dict, got.paused)
        row.num_stages, row.targets = len(result.stages), list(flow.targets)
        got.results = [flatten(one) for one in result.results]
        unrecorded = Record(expected.inputs, expected.outputs, [flatten(one) for one in first.results])
        called = expected.inputs.keys()
        if self.only_tensors:
            names = watchable(model, [name for name, _ in model.named_modules()])
            expected, got = expected.tensors_of(names), got.tensors_of(names)
        difference = first_difference(expected, got, may_miss=ancestors(flow.targets), any_order=len(batches) > 1)
        if difference is None and not self.only_tensors:
            difference = first_difference(expected, unrecorded)
        problem = _stages_differ(result.stages, flow.targets, called)
        if problem is not None and (difference is None or self.missing_stage is not Finding.SILENT):
            return self.missing_stage, problem
        return _verdict(difference)

    def _two_passes(self, subject: Subject, batches: Sequence[Batch], patterns: list[str] | None) -> str | None:
        model, got = subject.build(), Record()
        flow = self.make(model, batches[0], patterns)
        flow.run(batches, _propagate, dict, nullcontext)
        watched: dict[str, bool] = {}

        def on_stage(stage: StagePasses) -> None:
            names = watchable(model, stage.module_names)
            watched.clear()
            watched.update(dict.fromkeys(names, False))
            with recording(model, got, set(names), only_inputs=True):
                stage.calibrate()
            watched.clear()
            compress_stage(model, stage.module_names)
            stage.propagate()

        torch.manual_seed(0)
        result = flow.run(batches, on_stage, lambda: watched, got.paused)
        got.results = [flatten(one) for one in result.results]
        return first_difference(naive_passes(subject.build(), batches, result.stages), got, any_order=True)


@contextmanager
def _judged(row: Row, check: str) -> Iterator[None]:
    """Turn what a run raises into a finding: our own errors are refusals, everything else is a crash."""
    try:
        yield
    except CompressorError as error:
        row.checks[check] = (Finding.REFUSED, _one_line(error))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, and be it a leaked GreenletExit, it is the finding
        row.checks[check] = (Finding.CRASH, _one_line(error))


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def _verdict(difference: str | None) -> tuple[Finding, str]:
    return (Finding.OK, "") if difference is None else (Finding.SILENT, difference)


@torch.no_grad()
def plain_records(model: nn.Module, batches: Mapping[str, Batch]) -> dict[str, Record]:
    """Run plain forwards, each from the same state of the random generator.

    Args:
        model: not modified.
        batches: variant to batch.

    Returns:
        Variant to record.
    """
    records = {}
    for name, batch in batches.items():
        records[name] = Record()
        with recording(model, records[name]):
            records[name].results.append(flatten(plain_forward(model, batch)))
    return records


def _together(records: Collection[Record]) -> Record:
    both = Record()
    for record in records:
        both.results += record.results
        for name, calls in record.inputs.items():
            both.inputs.setdefault(name, []).extend(calls)
        for name, calls in record.outputs.items():
            both.outputs.setdefault(name, []).extend(calls)
    return both


def _propagate(stage: StagePasses) -> None:
    stage.propagate()


def _stages_differ(stages: Sequence[str], targets: Collection[str], called: Collection[str]) -> str | None:
    """Every target that is called has one stage; a stage is a target, not a call."""
    twice = [name for name in stages if stages.count(name) > 1]
    if twice:
        return f"{twice[0]} has {stages.count(twice[0])} stages"
    missed = [name for name in targets if name in called and name not in stages]
    return f"{missed[0]} is called and has no stage" if missed else None


def ancestors(targets: Collection[str]) -> set[str]:
    """List the modules that hold a target.

    Args:
        targets: dotted names.

    Returns:
        Dotted names; a tracer may take these modules apart instead of calling them.
    """
    found = {""} if any(targets) else set()
    for target in targets:
        parts = target.split(".")
        found |= {".".join(parts[:num]) for num in range(1, len(parts))}
    return found - set(targets)


def target_patterns(model: nn.Module, subject: Subject, level: str, reference: Mapping[str, Record]) -> list[str] | None:
    """Name the sequential targets of a level.

    Args:
        model: of the subject.
        subject: knows its layers.
        level: a name in LEVELS.
        reference: says which linears any batch calls; the others can be no targets.

    Returns:
        Patterns; None to let the engine infer them.

    Raises:
        TargetError: there is no such level.
    """
    if level not in LEVELS:
        raise TargetError(f"targets: {level!r} does not exist; choose one of {', '.join(LEVELS)}")
    if level == "inferred":
        return None
    if level == "layer":
        return list(subject.layers)
    called = {name for record in reference.values() for name in record.inputs}
    return [name for name, module in model.named_modules() if name in called and _is_linear(module)]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _num_hooks(model: nn.Module) -> dict[str, int]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {name: sum(len(module.__dict__[kind]) for kind in kinds) for name, module in model.named_modules()}


def _left_behind(model: nn.Module, before: Mapping[str, torch.Tensor], hooks: Mapping[str, int]) -> str | None:
    """Name what a run has left: patches of torch, hooks on the model, changed weights."""
    patched = [name for name in _PATCHABLE if nn.Module.__dict__[name] is not _PLAIN[name]]
    if patched:
        return f"nn.Module.{patched[0]} is still patched"
    for name, module in model.named_modules():
        if "__call__" in module.__dict__ or "forward" in module.__dict__:
            return f"{name}: a method stays replaced"
    if hooked := [name for name, num in _num_hooks(model).items() if num != hooks[name]]:
        return f"{hooked[0] or 'the model'}: a hook stays"
    after = model.state_dict()
    changed = [name for name, tensor in before.items() if name not in after or not same_bits(after[name], tensor)]
    return f"{changed[0]} is changed" if changed else None
