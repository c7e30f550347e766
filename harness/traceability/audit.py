"""The audit: traced on one batch, a model runs on that batch, a padded one, another shape, one without what is optional, and on all of them
layer by layer; every module's inputs and outputs are compared with the plain model's, bit for bit.

The two-pass check calibrates, compresses and propagates stage by stage, and compares what the calibration saw with a naive reference that
runs all plain forwards again from the start for every stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from compressor.errors import CompressorError, TargetError
from compressor.model.targets import resolve_targets
from harness.traceability.batches import Batch
from harness.traceability.flows import Flow, StagePasses, make_flow
from harness.traceability.passes import compress_stage, naive_passes, plain_forward, watchable
from harness.traceability.recording import Record, first_difference, flatten, recording, same_bits
from harness.traceability.verdicts import Finding, Row, Subject

LEVELS = ("layer", "inferred", "linear")
_PATCHABLE = ("__call__", "__setattr__", "register_buffer")
_PLAIN = {name: nn.Module.__dict__[name] for name in _PATCHABLE}


FlowMaker = Callable[[nn.Module, Batch, "Sequence[str] | None", str], Flow]


def audit(subject: Subject, level: str, engine: str, make: FlowMaker = make_flow) -> Row:
    """Audit one subject at one level with one engine.

    Args:
        subject: what to audit.
        level: a name in LEVELS.
        engine: auto, graph or suspend.
        make: traces; replaced by tests that plant errors.

    Returns:
        The verdict.
    """
    start = time.perf_counter()
    row = Row(subject.name, level, engine)
    model = subject.build()
    reference = plain_records(model, subject.batches)
    patterns = target_patterns(model, subject, level, reference)
    row.targets = None if patterns is None else list(resolve_targets(model, patterns))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with _judged(row, "trace"):
        flow = make(model, subject.batches["same"], patterns, engine)
        row.used = flow.engine
        _single_runs(row, flow, model, subject.batches, reference)
        with _judged(row, "two_pass"):
            row.checks["two_pass"] = _verdict(_two_passes(subject, patterns, engine, make))
        row.used = flow.engine
    with _judged(row, "left_behind"):
        row.checks["left_behind"] = _verdict(_left_behind(model, before))
    row.seconds = time.perf_counter() - start
    return row


def _single_runs(row: Row, flow: Flow, model: nn.Module, batches: Mapping[str, Batch], reference: Mapping[str, Record]) -> None:
    for name, batch in batches.items():
        with _judged(row, name):
            row.checks[name] = _verdict(_compare_run(row, flow, model, [batch], reference[name]))
    with _judged(row, "multi"):
        row.checks["multi"] = _verdict(_compare_run(row, flow, model, list(batches.values()), _together(reference.values())))


@contextmanager
def _judged(row: Row, check: str) -> Iterator[None]:
    """Turn what a run raises into a finding: our own errors are refusals, everything else is a crash."""
    try:
        yield
    except CompressorError as error:
        row.checks[check] = (Finding.REFUSED, f"{type(error).__name__}: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, and be it a leaked GreenletExit, it is the finding
        row.checks[check] = (Finding.CRASH, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


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


def _compare_run(row: Row, flow: Flow, model: nn.Module, batches: Sequence[Batch], expected: Record) -> str | None:
    """Run twice: planning may call modules too, so only the second run is recorded; the results of both must be right."""
    torch.manual_seed(0)
    unrecorded = flow.run(batches, _propagate, dict, nullcontext)
    got = Record()
    torch.manual_seed(0)
    with recording(model, got):
        result = flow.run(batches, _propagate, dict, got.paused)
    got.results = [flatten(one) for one in result.results]
    row.num_stages = len(result.stages)
    difference = first_difference(expected, got, may_miss=ancestors(result.stages), any_order=len(batches) > 1)
    results = Record(expected.inputs, expected.outputs, [flatten(one) for one in unrecorded.results])
    return difference or first_difference(expected, results) or _stages_differ(result.stages, row.targets, expected)


def _propagate(stage: StagePasses) -> None:
    stage.propagate()


def _stages_differ(stages: Sequence[str], targets: Collection[str] | None, expected: Record) -> str | None:
    """Every target that is called has one stage; a stage is a target, not a call."""
    twice = [name for name in stages if stages.count(name) > 1]
    if twice:
        return f"{twice[0]} has {stages.count(twice[0])} stages"
    missed = [name for name in targets or () if name in expected.inputs and name not in stages]
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


def _two_passes(subject: Subject, patterns: list[str] | None, engine: str, make: FlowMaker) -> str | None:
    model, got = subject.build(), Record()
    flow = make(model, subject.batches["same"], patterns, engine)
    batches = list(subject.batches.values())
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


def _left_behind(model: nn.Module, before: Mapping[str, torch.Tensor]) -> str | None:
    """Name what a run has left: patches of torch, hooks on the model, changed weights."""
    patched = [name for name in _PATCHABLE if nn.Module.__dict__[name] is not _PLAIN[name]]
    if patched:
        return f"nn.Module.{patched[0]} is still patched"
    for name, module in model.named_modules():
        if "__call__" in module.__dict__ or "forward" in module.__dict__:
            return f"{name}: a method stays replaced"
    after = model.state_dict()
    changed = [name for name, tensor in before.items() if name not in after or not same_bits(after[name], tensor)]
    return f"{changed[0]} is changed" if changed else None
