"""verify_module tells loads that put first values back, where a module holds them, and conversions that change plain attributes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import verify_module
from harness.modules.contract import ModuleReport
from harness.reporting.verdict import Outcome

FEATURES = 4
NOT_HELD = "does not hold the other values that were loaded"


class Fresh(nn.Module):
    """A layer as it is made: weights of ones, biases and a scale of zeros, and attributes of each plain kind."""

    offset = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(FEATURES, FEATURES), nn.LayerNorm(FEATURES)
        self.scale = nn.Parameter(torch.zeros(FEATURES))
        self.register_buffer("steps", torch.arange(FEATURES), persistent=False)
        self.factor, self.name, self.missing, self.table = 1.0, "half a layer", math.nan, {"scales": [1.0, (2, None)], "on": True}

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.norm(self.first(input)) * (1 + self.scale) * self.factor * self.table["scales"][0] + self.offset
        return output + self.steps.to(input.dtype)


class PutsTheNormBack(Fresh):
    def load_state_dict(self, *given: Any, **more: Any) -> Any:
        result = super().load_state_dict(*given, **more)
        self.norm.reset_parameters()
        return result


class KeepsItsScale(Fresh):
    def load_state_dict(self, *given: Any, **more: Any) -> Any:
        kept = self.scale.detach().clone()
        result = super().load_state_dict(*given, **more)
        self.scale.data.copy_(kept)
        return result


class PutsItsScaleBackBelowAnother(Fresh):
    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, prefix, *rest)
        if prefix == "part.":
            self.scale.data.zero_()


class PutsTheNormBackInFloat64(Fresh):
    def load_state_dict(self, *given: Any, **more: Any) -> Any:
        result = super().load_state_dict(*given, **more)
        if self.scale.dtype is torch.float64:
            self.norm.reset_parameters()
        return result


class LoadsNothingInFloat64(Fresh):
    def load_state_dict(self, *given: Any, **more: Any) -> Any:
        return None if self.scale.dtype is torch.float64 else super().load_state_dict(*given, **more)


class CopyPutsTheNormBack(Fresh):
    is_copy = False

    def __deepcopy__(self, memo: dict[int, Any]) -> CopyPutsTheNormBack:
        twin = type(self)()
        twin.load_state_dict(self.state_dict())
        twin.is_copy = True
        return twin.train(self.training)

    def load_state_dict(self, *given: Any, **more: Any) -> Any:
        result = super().load_state_dict(*given, **more)
        if self.is_copy:
            self.norm.reset_parameters()
        return result


class LoadNarrowsWhatIsNotSaved(Fresh):
    def load_state_dict(self, *given: Any, **more: Any) -> Any:
        self.steps = self.steps.to(torch.int32)
        return super().load_state_dict(*given, **more)


class Converts(Fresh):
    """Does something in a conversion to one dtype."""

    dtype: torch.dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Converts:
        super()._apply(fn, recurse)
        if self.first.weight.dtype is self.dtype and fn(torch.zeros(1, dtype=torch.float16)).dtype is self.dtype:
            self.change()
        return self

    def change(self) -> None:
        raise NotImplementedError


class ChangesItsFactor(Converts):
    dtype = torch.bfloat16

    def change(self) -> None:
        self.factor = 2.0


class ChangesTheEpsOfAChild(Converts):
    dtype = torch.float64

    def change(self) -> None:
        self.norm.eps = 0.5


class ChangesItsTable(Converts):
    dtype = torch.float32

    def change(self) -> None:
        self.table["scales"][0] = 2.0


class CoversWhatItsClassHas(Converts):
    dtype = torch.bfloat16

    def change(self) -> None:
        self.offset = 1.0


FOUND: dict[type[nn.Module], tuple[str, str]] = {
    PutsTheNormBack: ("state_dict_round_trip", f"norm.weight {NOT_HELD}"),
    KeepsItsScale: ("state_dict_round_trip", "scale did not come back"),
    PutsItsScaleBackBelowAnother: ("state_dict_keys", f"part.scale {NOT_HELD} where the module is 'part' of another"),
    PutsTheNormBackInFloat64: ("two_steps", f"norm.bias {NOT_HELD} behind to(torch.float64), and a load of that"),
    LoadsNothingInFloat64: (
        "two_steps",
        "scale, of torch.float32, is another tensor, of torch.float64 behind to(torch.float64), and a load",
    ),
    CopyPutsTheNormBack: ("deepcopy", "the copy does not take norm.weight, norm.bias from a state dict"),
    LoadNarrowsWhatIsNotSaved: ("state_dict_round_trip", "steps: the dtype was torch.int64 and is torch.int32 behind a load"),
    ChangesItsFactor: ("to_dtype", "the attribute factor was 1.0 and is 2.0 behind to(torch.bfloat16)"),
    ChangesTheEpsOfAChild: ("two_steps", "the attribute norm.eps was 1e-05 and is 0.5 behind to(torch.float64)"),
    ChangesItsTable: ("two_steps", "the attribute table was {'scales': [1.0, (2, None)], 'on': True} and is {'scales': [2.0, (2, None)]"),
    CoversWhatItsClassHas: ("to_dtype", "the attribute offset was 0.0 and is 1.0 behind to(torch.bfloat16)"),
}


def report_of(module: nn.Module) -> ModuleReport:
    return verify_module(module, torch.rand(2, FEATURES, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("cls", FOUND, ids=lambda cls: cls.__name__)
def test_what_a_load_or_a_conversion_changes_is_told_by_its_name(cls: type[nn.Module]) -> None:
    name, line = FOUND[cls]
    report = report_of(cls())
    found = {record.name: record.findings for record in report.records if record.outcome is Outcome.FAIL}
    assert any(line in one for one in found.get(f"module.{name}", ())), report.to_text()


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_value_that_no_load_changes_is_told_whatever_it_is(value: float) -> None:
    layer = KeepsItsScale()
    layer.scale.data.fill_(value)
    assert "module.state_dict_round_trip" in report_of(layer).failed


class KeepsNotesOfItsDtype(Converts):
    """What a conversion may change: dtypes and their names, and tensors that were computed before."""

    dtype = torch.bfloat16

    def __init__(self) -> None:
        super().__init__()
        self.stored, self.stored_name, self.computed, self.cache = torch.float32, "torch.float32", None, {"scale": torch.ones(1)}

    def change(self) -> None:
        self.stored, self.stored_name, self.computed = torch.bfloat16, "bfloat16", self.scale.detach() * 2  # type: ignore[assignment]
        self.cache.clear()


class NotesThatItIsStale(Converts):
    """Under a private name, which is its own business."""

    dtype = torch.bfloat16

    def change(self) -> None:
        self._is_stale = True


class HoldsItself(Fresh):
    def __init__(self) -> None:
        super().__init__()
        self.ring: list[Any] = [1]
        self.ring.append(self.ring)


class ShowsNone(Fresh):
    """torch's repr takes it."""

    def extra_repr(self) -> str:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize("cls", [Fresh, KeepsNotesOfItsDtype, NotesThatItIsStale, HoldsItself, ShowsNone])
def test_a_fresh_layer_that_keeps_them_passes(cls: type[nn.Module]) -> None:
    report = report_of(cls())
    assert report.passed, report.to_text()


def test_a_layer_that_refuses_other_values_passes_and_the_record_says_so() -> None:
    class Sealed(nn.Linear):
        def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
            weight = state.get(prefix + "weight", self.weight)
            if weight.shape == self.weight.shape and not weight.any():
                raise ValueError("a weight of zeros")
            super()._load_from_state_dict(state, prefix, *rest)

    report = report_of(Sealed(FEATURES, FEATURES))
    said = {record.name: record.summary for record in report.records}
    assert report.passed, report.to_text()
    assert (
        "loads of other values were not looked at to the end, since one raises ValueError: a weight of zeros"
        in said["module.state_dict_round_trip"]
    )
