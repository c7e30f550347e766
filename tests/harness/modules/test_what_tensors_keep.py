"""verify_module tells copies, conversions and state dicts that lose what a tensor is: values, dtype, ties, whether it trains."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness import verify_module
from harness.reporting.verdict import Outcome

FEATURES = 4


class Codes(nn.Module):
    """A layer with integer codes, a frozen scale, an 8-bit float, and a linear layer that stands twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.arange(1 << 24, (1 << 24) + FEATURES, dtype=torch.int32))
        self.register_buffer("small", torch.ones(FEATURES, dtype=torch.float32).to(torch.float8_e4m3fn))
        self.scale = nn.Parameter(torch.rand(FEATURES), requires_grad=False)
        self.first = self.second = nn.Linear(FEATURES, FEATURES)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(input)) * self.scale + (self.codes & 3) + self.small.to(input.dtype)
        return output


class CodesThroughFloats(Codes):
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CodesThroughFloats:
        super()._apply(fn, recurse)
        self.codes = fn(self.codes.float()).to(torch.int32)
        return self


class Scaled(Codes):
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Scaled:
        super()._apply(fn, recurse)
        self.scale.data.mul_(1.02)
        return self


class Untied(Codes):
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Untied:
        super()._apply(fn, recurse)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight, self.second.bias = (nn.Parameter(one.detach()) for one in (self.first.weight, self.first.bias))
        return self


class Thawed(Codes):
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Thawed:
        super()._apply(fn, recurse)
        self.scale = nn.Parameter(self.scale.data)
        return self


class Loses(Codes):
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Loses:
        super()._apply(fn, recurse)
        self.scale = None  # type: ignore[assignment]
        return self


def scale(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 3


class DropsAnyHook(Codes):
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DropsAnyHook:
        self._forward_pre_hooks.clear()
        return super()._apply(fn, recurse)  # type: ignore[no-any-return]


class DropsHooksOfAWeight(Codes):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda grad: grad)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DropsHooksOfAWeight:
        super()._apply(fn, recurse)
        self.first.weight = nn.Parameter(self.first.weight.detach())
        return self


class Unsaves(Codes):
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Unsaves:
        super()._apply(fn, recurse)
        self._non_persistent_buffers_set.add("small")
        return self


class Trains(Codes):
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Trains:
        return super()._apply(fn, recurse).train()  # type: ignore[no-any-return]


class DropsHooks(Codes):
    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DropsHooks:
        self.first._forward_hooks.clear()
        return super()._apply(fn, recurse)  # type: ignore[no-any-return]


class WritesInBfloat16(Codes):
    def forward(self, input: Tensor) -> Tensor:
        if input.dtype is torch.bfloat16:
            self.first.weight.data.mul_(0.5)
        return super().forward(input)


class TakesAnyShape(Codes):
    def _load_from_state_dict(self, state: Any, prefix: str, meta: Any, strict: bool, missing: Any, unexpected: Any, errors: Any) -> None:
        super()._load_from_state_dict(state, prefix, meta, strict, missing, unexpected, errors)
        errors.clear()


class LoadThaws(Codes):
    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)
        self.scale.requires_grad_(True)


class CopyOfACopyThaws(Codes):
    copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> CopyOfACopyThaws:
        twin = CopyOfACopyThaws()
        twin.load_state_dict(self.state_dict())
        twin.copies = self.copies + 1
        return twin.requires_grad_(twin.copies > 1).train(self.training) if twin.copies > 1 else twin.train(self.training)


class LoadBehindAConversionUnsaves(Codes):
    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)
        if self.scale.dtype is torch.float64:
            self._non_persistent_buffers_set.add("small")


class CopyThaws(Codes):
    def __deepcopy__(self, memo: dict[int, Any]) -> CopyThaws:
        twin = CopyThaws()
        twin.load_state_dict(self.state_dict())
        twin.scale.requires_grad_(True)
        return twin.train(self.training)


class CopyUnties(Codes):
    def __deepcopy__(self, memo: dict[int, Any]) -> CopyUnties:
        twin = CopyUnties()
        twin.second = nn.Linear(FEATURES, FEATURES)
        twin.load_state_dict(self.state_dict())
        return twin.train(self.training)


class CopySavesLess(Codes):
    def __deepcopy__(self, memo: dict[int, Any]) -> CopySavesLess:
        twin = CopySavesLess()
        twin.load_state_dict(self.state_dict())
        twin.register_buffer("codes", twin.codes, persistent=False)
        return twin.train(self.training)


class SavesWider(Codes):
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "small"] = destination[prefix + "small"].float()


class SavesOthers(Codes):
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "codes"] = destination[prefix + "codes"] + 1

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        state = {key: value - 1 if key == prefix + "codes" else value for key, value in state.items()}
        super()._load_from_state_dict(state, prefix, *rest)


class SeedsPython(Codes):
    def forward(self, input: Tensor) -> Tensor:
        random.seed(0)
        return super().forward(input)


class SeedsNumpy(Codes):
    def forward(self, input: Tensor) -> Tensor:
        np.random.seed(0)
        return super().forward(input)


class WritesAndRefusesToTrain(Codes):
    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.first.weight.data.mul_(2)
            raise NotImplementedError("for inference only")
        return super().forward(input)


PLANTED: dict[type[Codes], tuple[str, str]] = {
    CodesThroughFloats: ("to_dtype", "codes has other values in torch.int32"),
    Scaled: ("to_dtype", "scale has other values in torch.bfloat16"),
    Untied: ("to_dtype", "second.weight: the same as was first.weight and is second.weight behind to(torch.bfloat16)"),
    Thawed: ("to_dtype", "scale: requires_grad was False and is True behind to(torch.bfloat16)"),
    Loses: ("to_dtype", "scale is lost behind to(torch.bfloat16)"),
    Unsaves: ("to_dtype", "small: in the state dict was True and is False behind to(torch.bfloat16)"),
    Trains: ("to_dtype", "training was False and is True behind to(torch.bfloat16)"),
    DropsHooks: ("to_dtype", "first: hooks was ["),
    DropsAnyHook: ("to_dtype", "hooks was ["),
    DropsHooksOfAWeight: ("to_dtype", "first.weight: hooks of the tensor was [<"),
    WritesInBfloat16: ("to_dtype", "a forward in torch.bfloat16 changed the values of parameters: first.weight"),
    TakesAnyShape: ("state_dict_keys", "a strict load accepted codes in another shape, and left it as it was"),
    LoadThaws: ("state_dict_round_trip", "scale: requires_grad was False and is True behind a load"),
    CopyOfACopyThaws: ("two_steps", "scale: requires_grad was False and is True behind a copy, and a copy of that"),
    LoadBehindAConversionUnsaves: (
        "two_steps",
        "small: in the state dict was True and is False behind to(torch.float64), and a load of that",
    ),
    CopyThaws: ("deepcopy", "scale: requires_grad was False and is True in the copy"),
    CopyUnties: ("deepcopy", "second.weight: the same as was first.weight and is second.weight in the copy"),
    CopySavesLess: ("deepcopy", "codes: in the state dict was True and is False in the copy"),
    SavesWider: ("state_dict_keys", "small is torch.float8_e4m3fn [4], and in the state dict it is torch.float32 [4]"),
    SavesOthers: ("state_dict_keys", "codes is torch.int32 [4], and in the state dict it is torch.int32 [4] of other bits"),
    SeedsPython: ("surroundings", "seeds Python's generator"),
    SeedsNumpy: ("surroundings", "seeds numpy's generator"),
    WritesAndRefusesToTrain: ("surroundings", "in training=True changed the values of parameters: first.weight"),
}


def layer_of(cls: type[Codes]) -> Codes:
    torch.manual_seed(0)
    return cls().eval()


@pytest.mark.parametrize("cls", PLANTED, ids=lambda cls: cls.__name__)
def test_what_is_lost_is_told_by_its_name(cls: type[Codes]) -> None:
    name, line = PLANTED[cls]
    report = verify_module(layer_of(cls), torch.rand(2, FEATURES))
    found = {record.name: record.findings for record in report.records if record.outcome is Outcome.FAIL}
    assert any(line in one for one in found.get(f"module.{name}", ())), report.to_text()


class Draws(Codes):
    """As layers that are dropped at random do."""

    def forward(self, input: Tensor) -> Tensor:
        random.random()
        np.random.rand()
        return super().forward(input)


class Packs(Codes):
    """Floats of eight bits that stay, and a number that is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("missing", torch.tensor([float("nan"), float("inf"), 1e-9]))


class MakesItFit(Codes):
    """A buffer takes the shape of what is loaded, as observers have it."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.codes = torch.empty_like(state.get(prefix + "codes", self.codes))
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize("cls", [Codes, Draws, Packs, MakesItFit])
def test_a_layer_that_keeps_them_passes(cls: type[Codes]) -> None:
    report = verify_module(layer_of(cls), torch.rand(2, FEATURES))
    assert report.passed, report.to_text()


def test_a_mode_in_which_the_module_does_not_run_is_said() -> None:
    class Refuses(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if self.training:
                raise KeyError("w")
            return super().forward(input)

    report = verify_module(Refuses(FEATURES, 2).eval(), torch.rand(2, FEATURES))
    said = {record.name: record.summary for record in report.records}["module.surroundings"]
    assert report.passed and "training=True was not looked at to the end, since the forward raises KeyError: 'w'" in said, said


def test_a_pre_hook_of_positional_inputs_is_no_deviation_from_calls_by_name() -> None:
    layer = nn.Linear(FEATURES, 2)
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    report = verify_module(layer, torch.rand(2, FEATURES))
    said = {record.name: record for record in report.records}["module.hooks_with_kwargs"]
    assert report.passed and said.outcome is Outcome.PASS and "pre-hook of its own" in said.summary, report.to_text()
