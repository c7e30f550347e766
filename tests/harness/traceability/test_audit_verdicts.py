"""The audit passes what is right and sees planted errors: a dropped mask, swapped arguments, a frozen size, lost error propagation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor.errors import TargetError, TracingError
from harness.traceability.architectures import zoo
from harness.traceability.audit import Auditor
from harness.traceability.batches import Batch
from harness.traceability.flows import Flow, FlowResult, PlanFlow, StagePasses
from harness.traceability.recording import Record, first_difference, flatten, recording, same_bits
from harness.traceability.toys.base import Toy
from harness.traceability.toys.registry import TOYS, ToyCase
from harness.traceability.verdicts import Finding, Row

FEW = ("llama", "gemma3n", "albert", "t5", "mamba2")
OnStage = Callable[[StagePasses], None]


@pytest.mark.parametrize("name", FEW)
@pytest.mark.filterwarnings("ignore")
def test_few_architectures_of_different_kinds_are_right_at_layer_level(name: str) -> None:
    row = Auditor("auto").audit(zoo()[name].subject(), "layer")
    assert row.finding is Finding.OK, row.detail
    assert set(row.checks) == {"same", "padded", "shape", "bare", "multi", "two_pass", "left_behind"}


@pytest.mark.parametrize("engine", ["graph", "suspend"])
@pytest.mark.parametrize("level", ["inferred", "linear"])
@pytest.mark.filterwarnings("ignore")
def test_both_engines_give_the_bits_of_the_plain_model_and_so_of_each_other(engine: str, level: str) -> None:
    row = Auditor(engine).audit(zoo()["llama"].subject(), level)
    assert row.finding is Finding.OK, row.detail
    assert row.used == engine


# RWKV divides weights of its layers where it calls them, SqueezeBERT calls `.forward()` of its layers, and a router of Switch converts
# its own weight in each forward.
OUTSIDE = "is used outside of"
REFUSED = {
    **{("rwkv", level): OUTSIDE for level in ("layer", "inferred", "linear")},
    **{("squeezebert", level): "calls of its .forward() are not seen" for level in ("layer", "inferred")},
    ("switch_transformers", "linear"): OUTSIDE,
}


@pytest.mark.parametrize("level", ["layer", "inferred", "linear"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.nightly) for name in zoo()])
@pytest.mark.filterwarnings("ignore")
def test_every_architecture_is_right_at_every_level(name: str, level: str) -> None:
    row = Auditor("auto").audit(zoo()[name].subject(), level)
    if (name, level) in REFUSED:
        assert row.finding is Finding.REFUSED and REFUSED[name, level] in row.detail, row.detail
    else:
        assert row.finding is Finding.OK, row.detail


@pytest.mark.parametrize("level", ["layer", pytest.param("linear", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", TOYS)
@pytest.mark.filterwarnings("ignore")
def test_a_toy_is_right_or_refused_as_it_demands(name: str, level: str) -> None:
    row = Auditor("auto").audit(TOYS[name].subject(), level)
    allowed = {Finding.OK} if TOYS[name].must == "right" else {Finding.OK, Finding.REFUSED}
    assert row.finding in allowed, row.detail


class WrongFlow:
    """Runs the plan while the glue of the model is another one."""

    engine = "wrong"

    def __init__(self, flow: Flow, model: nn.Module, forward: Callable[..., Any]) -> None:
        self._flow, self._model, self._forward = flow, model, forward
        self.targets: Sequence[str] = flow.targets

    def run(self, batches: Sequence[Batch], *rest: Any) -> FlowResult:
        kind = type(self._model)
        before = kind.forward
        kind.forward = self._forward  # type: ignore[method-assign]
        try:
            return self._flow.run(batches, *rest)
        finally:
            kind.forward = before  # type: ignore[method-assign]


class WrongGlue(Auditor):
    """Plants an error that a tracer could have made into the model's own glue."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__("suspend")
        self._forward = forward

    def make(self, model: nn.Module, batch: Batch, patterns: Sequence[str] | None) -> Flow:
        return WrongFlow(super().make(model, batch, patterns), model, self._forward)


def without_mask(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    hidden = self.embed(x)
    for layer in self.layers:
        hidden = layer(hidden)
    return self.head(hidden)


def swapped(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    left = self.embed(x)
    right = left.flip(1)
    for layer in self.layers:
        left, right = layer(right, right=left)
    return self.head(left - 2 * right)


def frozen(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    hidden = self.embed(x)
    for index, layer in enumerate(self.layers):
        hidden = layer(hidden + self.tables[(5 + index) % 3])
    return self.head(hidden)


def unused_dropped(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    return self.head(self.layers[2](self.layers[0](self.embed(x))))


def result_only(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    hidden = self.embed(x)
    for layer in self.layers:
        if mask is not None and not mask.all():
            hidden = hidden * mask[..., None]
        hidden = layer(hidden)
    return self.head(hidden) * (1 + 2**-20)


@pytest.mark.parametrize(
    ("toy", "forward", "silent", "right"),
    [
        ("masked", without_mask, {"padded", "multi", "two_pass"}, {"same", "shape", "bare"}),
        ("crossed", swapped, {"same", "padded", "shape", "bare", "multi", "two_pass"}, set()),
        ("list_indexed_by_size", frozen, {"shape", "bare", "multi", "two_pass"}, {"same", "padded"}),
        ("unused_target", unused_dropped, {"same", "padded", "shape", "bare", "multi"}, set()),
        ("masked", result_only, {"same", "padded", "shape", "bare", "multi", "two_pass"}, set()),
    ],
    ids=["mask dropped", "arguments swapped", "size frozen", "unused call dropped", "result off by one bit or two"],
)
def test_a_planted_error_is_silent_exactly_where_it_shows(toy: str, forward: Any, silent: set[str], right: set[str]) -> None:
    row = WrongGlue(forward).audit(TOYS[toy].subject(), "layer")
    assert row.finding is Finding.SILENT and row.detail
    assert {name for name, (finding, _) in row.checks.items() if finding is Finding.SILENT} == silent
    assert {name for name, (finding, _) in row.checks.items() if finding is Finding.OK} >= right


class StageWrapper:
    """A stage whose passes are planned otherwise."""

    def __init__(self, stage: StagePasses, is_hasty: bool) -> None:
        self._stage, self._is_hasty, self.name = stage, is_hasty, stage.name
        self._is_done = False

    @property
    def module_names(self) -> tuple[str, ...]:
        return self._stage.module_names

    def calibrate(self) -> None:
        if not self._is_hasty:
            return
        self._stage.calibrate()
        self._stage.propagate()
        self._is_done = True

    def propagate(self) -> None:
        if not self._is_done:
            self._stage.propagate()


class WrongPasses(Auditor):
    """Plants an error into the two passes of a stage."""

    def __init__(self, is_hasty: bool) -> None:
        super().__init__("suspend")
        self._is_hasty = is_hasty

    def make(self, model: nn.Module, batch: Batch, patterns: Sequence[str] | None) -> Flow:
        flow, is_hasty = super().make(model, batch, patterns), self._is_hasty

        class Wrapped(PlanFlow):
            def run(self, batches: Sequence[Batch], on_stage: OnStage, *rest: Any) -> FlowResult:
                return super().run(batches, lambda stage: on_stage(StageWrapper(stage, is_hasty)), *rest)

        assert isinstance(flow, PlanFlow)
        return Wrapped(flow.plan)


@pytest.mark.parametrize("is_hasty", [True, False], ids=["propagated before it was compressed", "never calibrated"])
def test_wrong_passes_are_seen_by_the_two_pass_check_alone(is_hasty: bool) -> None:
    row = WrongPasses(is_hasty).audit(TOYS["masked"].subject(), "layer")
    assert {name for name, (finding, _) in row.checks.items() if finding is not Finding.OK} == {"two_pass"}
    assert row.finding is Finding.SILENT


class Failing(Auditor):
    """Cannot trace."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def make(self, model: nn.Module, batch: Batch, patterns: Sequence[str] | None) -> Flow:
        raise self._error


@pytest.mark.parametrize(
    ("error", "finding"),
    [(TracingError("f.py:1: no"), Finding.REFUSED), (KeyError("x"), Finding.CRASH), (GeneratorExit(), Finding.CRASH)],
)
def test_our_own_errors_are_refusals_and_all_others_are_crashes(error: BaseException, finding: Finding) -> None:
    row = Failing(error).audit(TOYS["masked"].subject(), "layer")
    assert row.finding is finding and row.detail.startswith("trace: ")
    assert row.to_dict()["checks"]["trace"]["finding"] == finding.value


class Untidy(Auditor):
    """Leaves something on the model."""

    def __init__(self, leave: Callable[[nn.Module], None]) -> None:
        super().__init__("suspend")
        self._leave = leave

    @contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        yield
        self._leave(model)


def patch_forward(model: nn.Module) -> None:
    model.forward = model.forward  # type: ignore[method-assign]


def change_weight(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).add_(1e-3)


def hang_hook(model: nn.Module) -> None:
    model.register_forward_hook(lambda module, args, output: None)


@pytest.mark.parametrize("leave", [patch_forward, change_weight, hang_hook])
def test_what_a_run_leaves_behind_is_seen(leave: Callable[[nn.Module], None]) -> None:
    row = Untidy(leave).audit(TOYS["masked"].subject(), "layer")
    assert row.checks["left_behind"][0] is Finding.SILENT


def test_a_patch_of_torch_that_stays_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(model: nn.Module) -> None:
        plain = nn.Module.__setattr__
        monkeypatch.setattr(nn.Module, "__setattr__", lambda self, name, value: plain(self, name, value))

    row = Untidy(leave).audit(TOYS["masked"].subject(), "layer")
    assert "nn.Module.__setattr__ is still patched" in row.detail


class LosingTargets(Auditor):
    """Runs without one of the targets."""

    def make(self, model: nn.Module, batch: Batch, patterns: Sequence[str] | None) -> Flow:
        flow = super().make(model, batch, ["layers.0", "layers.2"])
        assert isinstance(flow, PlanFlow)
        flow.targets = ["layers.0", "layers.1", "layers.2"]
        return flow


def test_a_target_that_is_called_and_has_no_stage_is_seen() -> None:
    row = LosingTargets("suspend").audit(TOYS["masked"].subject(), "layer")
    assert row.checks["same"] == (Finding.SILENT, "layers.1 is called and has no stage")


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(TargetError, match="'layers' does not exist"):
        Auditor("suspend").audit(TOYS["masked"].subject(), "layers")


def test_the_worst_check_is_the_verdict() -> None:
    row = Row("a", "layer", "auto")
    assert row.finding is Finding.CRASH, "nothing was checked"
    for finding in (Finding.OK, Finding.REFUSED, Finding.CRASH, Finding.SILENT):
        row.checks[finding.name] = (finding, f"because of {finding.name}")
        assert row.finding is finding
    assert row.detail == "SILENT: because of SILENT"


def run_recorded(model: nn.Module, batch: Mapping[str, Tensor], around: AbstractContextManager[Any] | None = None) -> Record:
    record = Record()
    with torch.no_grad(), recording(model, record):
        record.results.append(flatten(model(**batch)))
    return record


def toy(name: str) -> tuple[ToyCase, nn.Module, Batch]:
    case = TOYS[name]
    return case, case.build(), case.batches()["same"]


def test_a_record_holds_copies_and_says_where_two_differ() -> None:
    _, model, batch = toy("in_place_across_layers")
    expected, got = run_recorded(model, batch), run_recorded(model, batch)
    assert first_difference(expected, got) is None
    assert set(expected.inputs) == {name for name, _ in model.named_modules()} - {"layers"}
    with torch.no_grad():
        model.get_submodule("layers.1.down").weight.view(-1)[0] += 1e-6  # type: ignore[union-attr]
    told = first_difference(expected, run_recorded(model, batch))
    assert told is not None and "result of forward 0" in told and "layers.2" in told
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (torch.tensor([float("nan"), 0.0]), torch.tensor([float("nan"), 0.0]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.ones(2, 1), torch.ones(1, 2), False),
        (torch.ones(2, 3).T, torch.ones(3, 2), True),
        (torch.tensor(True), torch.tensor(True), True),
        (torch.tensor(1.0), "1.0", False),
        ("None", "None", True),
        (torch.ones(2, device="meta"), torch.ones(2), False),
        (torch.ones(2, device="meta"), torch.ones(2, device="meta"), True),
    ],
)
def test_leaves_are_compared_bit_for_bit(left: Any, right: Any, same: bool) -> None:
    assert same_bits(left, right) is same


def test_structures_are_taken_apart_without_being_used_up() -> None:
    class Cache:
        def __init__(self) -> None:
            self.rows = [torch.ones(1)]
            self.me = self

    generator = (i for i in range(3))
    flat = dict(flatten(({"a": torch.ones(2), "b": None}, [1, "x"], Cache(), generator, len, nn.Linear(1, 1))))
    assert torch.equal(flat[".0.a"], torch.ones(2)) and flat[".0.b"] == "None" and flat[".1.1"] == "'x'"  # type: ignore[arg-type]
    assert torch.equal(flat[".2.rows.0"], torch.ones(1))  # type: ignore[arg-type]
    assert flat[".2.me"] == "<Cache>" and flat[".5"] == "<Linear>"
    assert list(generator) == [0, 1, 2]


def test_a_paused_record_does_not_grow() -> None:
    _, model, batch = toy("masked")
    record = Record()
    with torch.no_grad(), recording(model, record):
        with record.paused(), record.paused():
            model(**batch)
        assert not record.inputs
        model(**batch)
    assert record.inputs and isinstance(model, Toy)
