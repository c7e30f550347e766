"""verify_module tells loads that change values which a module does not hold, and takes those that compute anew what is not saved."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor.object_reference import lazy_names
from harness import verify_module
from harness.modules.contract import ModuleReport
from harness.modules.irregular import STARTS, irregular
from harness.reporting.verdict import Outcome

FEATURES = 4
NOT_HELD = "table does not hold the other values that were loaded"
INT32, BOOL = torch.int32, torch.bool


class Table(nn.Module):
    """A layer with a buffer of given values, each load of which goes through a function."""

    def __init__(self, values: Tensor, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(FEATURES, FEATURES), change
        self.register_buffer("table", values.clone())
        self.register_buffer("spread", torch.ones(1).expand(FEATURES), persistent=False)  # nobody can write to it

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        if prefix + "table" in state:
            state[prefix + "table"] = self.change(state[prefix + "table"])
        super()._load_from_state_dict(state, prefix, *rest)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.linear(input) + self.table.sum().to(input.dtype)
        return output


CHANGES: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
    "half precision": (torch.ones(FEATURES), lambda values: values.half().to(values.dtype)),
    "whole numbers": (torch.zeros(FEATURES), torch.trunc),
    "a rising order": (torch.zeros(2), lambda values: values.sort().values),
    "a falling order": (torch.zeros(2), lambda values: values.sort(descending=True).values),
    "the first for all": (torch.zeros(FEATURES), lambda values: values[:1].expand(FEATURES).clone()),
    "no sign of one number": (torch.ones(1), torch.abs),
    "what 8 bits hold": (torch.zeros(()), lambda values: values.clamp(-127, 127)),
    "nothing for little": (torch.ones(()), lambda values: torch.where(values.abs() < 0.01, 0, values)),
    "int8": (torch.zeros(FEATURES, dtype=INT32), lambda values: values.to(torch.int8).to(INT32)),
    "float32": (torch.arange(FEATURES, dtype=INT32), lambda values: values.float().to(INT32)),
    "nibbles": (torch.ones(1, dtype=torch.uint8), lambda values: values & 15),
    "any for all": (torch.ones(FEATURES, dtype=BOOL), lambda values: values.any().expand(FEATURES).clone()),
    "ones for zeros, as if these were missing": (torch.full((FEATURES,), 0.5), lambda values: values if values.any() else values + 1),
}


def report_of(module: nn.Module) -> ModuleReport:
    return verify_module(module, torch.rand(2, FEATURES, generator=torch.Generator().manual_seed(0)))


def findings_of(report: ModuleReport) -> dict[str, tuple[str, ...]]:
    return {record.name: record.findings for record in report.records if record.outcome is Outcome.FAIL}


@pytest.mark.parametrize("name", CHANGES)
def test_a_load_that_changes_values_is_told_whatever_the_module_holds(name: str) -> None:
    values, change = CHANGES[name]
    assert torch.equal(change(values), values)  # a load of its own brings them back
    report = report_of(Table(values, change))
    assert NOT_HELD in findings_of(report).get("module.state_dict_round_trip", ()), report.to_text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64, torch.float8_e4m3fn, INT32, torch.uint16, BOOL], ids=str)
def test_a_load_that_keeps_them_passes_and_nothing_is_drawn(dtype: torch.dtype) -> None:
    module = Table(torch.ones(FEATURES).to(dtype), torch.clone)
    module.linear = nn.Identity()  # type: ignore[assignment]
    module.forward = lambda input: input * 2  # type: ignore[method-assign]
    before = torch.get_rng_state()
    report = report_of(module)
    assert report.passed, report.to_text()
    assert not [record.summary for record in report.records if "other values were not looked at" in record.summary], report.to_text()
    assert torch.equal(before, torch.get_rng_state())


def test_a_layer_that_refuses_irregular_values_is_looked_at_with_plain_ones() -> None:
    def refuse(values: Tensor) -> Tensor:
        if values.shape == (2,) and ((values < 0).any() or values.max() > 1):
            raise ValueError("no share")
        return values

    def refuse_and_forget(values: Tensor) -> Tensor:
        return torch.full_like(refuse(values), 0.5)

    said, forgets = report_of(Table(torch.full((2,), 0.5), refuse)), report_of(Table(torch.full((2,), 0.5), refuse_and_forget))
    line = "loads of other values were not looked at to the end, since one raises ValueError: no share"
    assert said.passed, said.to_text()
    assert [record.summary.count(line) for record in said.records if record.name == "module.state_dict_round_trip"] == [1]
    assert NOT_HELD in findings_of(forgets)["module.state_dict_round_trip"]


class SealedByACall(nn.Linear):
    """Takes no other values behind its first call."""

    def __init__(self) -> None:
        super().__init__(FEATURES, FEATURES)
        self.first, self.called = self.weight.tolist(), False

    def forward(self, input: Tensor) -> Tensor:
        self.called = True
        return super().forward(input)

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        weight = state.get(prefix + "weight", self.weight)
        if self.called and weight.shape == self.weight.shape and weight.tolist() != self.first:
            raise ValueError("sealed")
        super()._load_from_state_dict(state, prefix, *rest)


def test_a_layer_that_takes_other_values_before_a_call_takes_them_behind_it() -> None:
    assert "ValueError: sealed" in findings_of(report_of(SealedByACall()))["module.state_dict_round_trip"]


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.int8, torch.uint8, INT32, torch.int64, torch.uint64, BOOL], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (2,), (3, 5), (100, 100), (0, 3)], ids=str)
def test_irregular_values_are_finite_of_the_shape_and_the_same_again(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    like = torch.empty(shape, dtype=dtype)
    first, second = (irregular(like, start) for start in STARTS)
    assert (first.shape, first.dtype) == (like.shape, dtype)
    assert torch.view_as_real(first).isfinite().all() if dtype.is_complex else first.to(torch.float64).isfinite().all()
    assert first.tolist() == irregular(like, STARTS[0]).tolist()
    assert not like.numel() or first.tolist() != second.tolist()


@pytest.mark.parametrize("dtype", [INT32, torch.int64, torch.uint32], ids=str)
def test_one_integer_alone_is_no_count_that_a_load_cannot_afford(dtype: torch.dtype) -> None:
    assert all(2 <= abs(irregular(torch.zeros((), dtype=dtype), start).item()) < 2**15 for start in STARTS)


class Derived(nn.Module):
    """Computes a weight that is not saved from codes and scales, again behind each load."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.arange(16, dtype=torch.int8).view(FEATURES, FEATURES) - 8)
        self.register_buffer("scales", torch.rand(FEATURES, 1, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("weight", None, persistent=False)
        self.fill()
        self.register_load_state_dict_post_hook(lambda module, keys: module.fill())  # type: ignore[operator]

    def fill(self) -> None:
        self.weight = self.codes.to(self.scales.dtype) * self.scales

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight)


class DerivedInFloat32(Derived):
    """It forgets that it has been converted."""

    def fill(self) -> None:
        self.weight = self.codes.float() * self.scales.float()


@pytest.mark.parametrize("training", [True, False])
def test_a_load_may_compute_a_buffer_again_that_is_not_saved(training: bool) -> None:
    report = report_of(Derived().train(training))
    assert report.passed, report.to_text()


def test_a_buffer_that_is_computed_again_keeps_the_dtype_of_a_conversion() -> None:
    lines = findings_of(report_of(DerivedInFloat32()))["module.two_steps"]
    assert any(
        "weight, of torch.float32, is another tensor, of torch.float32 behind to(torch.bfloat16), and a load" in line for line in lines
    )


class Turned(nn.Module):
    """Keeps its weight a second time, the other way round, and fills that behind a load."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("turned", self.linear.weight.detach().t().clone(), persistent=False)
        self.register_load_state_dict_post_hook(self.make_hook())

    def make_hook(self) -> Callable[[Any, Any], None]:
        return lambda module, keys: module.fill(module)

    def fill(self, source: Turned) -> None:
        self.turned.copy_(source.linear.weight.detach().t())

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = input @ self.turned + self.linear.bias
        return output


class FillsTheFirst(Turned):
    def make_hook(self) -> Callable[[Any, Any], None]:
        return lambda module, keys: self.fill(self)


class FillsBoth(Turned):
    def make_hook(self) -> Callable[[Any, Any], None]:
        return lambda module, keys: (module.fill(module), self.fill(module))[0]


def test_a_load_of_a_copy_reaches_its_output_and_nothing_of_the_original() -> None:
    sound = report_of(Turned())
    assert sound.passed, sound.to_text()
    lost = findings_of(report_of(FillsTheFirst()))["module.deepcopy"]
    assert lost == ("what is loaded into the copy does not reach its output as in the original",)
    assert findings_of(report_of(FillsBoth()))["module.deepcopy"] == ("a load of the copy changes turned of the original",)


class Scaled(nn.Module):
    """Its scale is extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def get_extra_state(self) -> Tensor:
        return self.scale.clone()

    def set_extra_state(self, state: Tensor) -> None:
        self.scale.copy_(state)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.linear(input) * self.scale.to(input.dtype)
        return output


class DropsIt(Scaled):
    def set_extra_state(self, state: Tensor) -> None:
        del state


class RoundsIt(Scaled):
    def set_extra_state(self, state: Tensor) -> None:
        self.scale.copy_(state.round())


class RefusesAnother(Scaled):
    def set_extra_state(self, state: Tensor) -> None:
        if state != 2:
            raise ValueError("another scale")


class Pickles(Scaled):
    def get_extra_state(self) -> Tensor:
        return torch.tensor(list(pickle.dumps(self.scale.item())), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        self.scale.fill_(pickle.loads(bytes(state.tolist())))


class NamesItsVersion(Scaled):
    """No load changes it."""

    def get_extra_state(self) -> Tensor:
        return torch.tensor(3)

    def set_extra_state(self, state: Tensor) -> None:
        del state


@pytest.mark.parametrize("cls", [DropsIt, RoundsIt], ids=lambda cls: cls.__name__)
def test_a_load_that_changes_the_extra_state_is_told(cls: type[nn.Module]) -> None:
    found = findings_of(report_of(cls()))
    assert "_extra_state does not hold the other values that were loaded" in found["module.state_dict_round_trip"]


@pytest.mark.parametrize("cls", [Scaled, RefusesAnother, Pickles, NamesItsVersion], ids=lambda cls: cls.__name__)
def test_an_extra_state_that_is_loaded_refused_or_constant_passes(cls: type[nn.Module]) -> None:
    report = report_of(cls())
    assert report.passed, report.to_text()


def test_a_name_that_is_imported_on_first_use_draws_no_random_numbers(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `harness.verify_module`, which brings in a library that draws."""
    (tmp_path / "draws_on_import.py").write_text("import random\nVALUE = random.random()\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = random.getstate()
    assert 0 <= lazy_names("none", {"VALUE": "draws_on_import"})[0]("VALUE") < 1
    assert random.getstate() == before


SEEN: list[list[float]] = []  # outside of the layer, whose own attributes come back


class RefusesNegativeScales(nn.Module):
    """Of any shape, by an error of its own; what is loaded in another shape are its own values, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scales", torch.rand(4, generator=torch.Generator().manual_seed(0)) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x[..., :1] * self.scales

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        scales = state.get(prefix + "scales", self.scales)
        if scales.shape != self.scales.shape:
            SEEN.append(scales.flatten().tolist())
        if not bool((scales >= 0).all()):
            raise ValueError(f"{prefix}scales must not be negative")
        super()._load_from_state_dict(state, prefix, *rest)


def test_tensors_of_another_shape_hold_the_modules_own_values() -> None:
    SEEN.clear()
    layer = RefusesNegativeScales()
    report = report_of(layer)
    assert report.passed, report.to_text()
    assert SEEN and all(set(values) <= set(layer.scales.tolist()) for values in SEEN)
