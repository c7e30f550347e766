"""verify_module looks at hooks alone and beside others, at a second conversion and at first calls, and leaves a module as it was."""

from __future__ import annotations

import collections
import dataclasses
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from compressor.errors import UserInputError
from harness import verify_module
from harness.modules.contract import ModuleReport
from harness.reporting.verdict import Outcome

FEATURES, OUT = 8, 3
STORES = {
    "forward_pre": "_forward_pre_hooks",
    "forward": "_forward_hooks",
    "full_backward_pre": "_backward_pre_hooks",
    "full_backward": "_backward_hooks",
}
REMOVALS: dict[str, Callable[[dict[int, Any]], object]] = {
    "none": lambda store: None,
    "all": lambda store: store.clear(),
    "the newest": lambda store: store.popitem() if store else None,
    "the oldest": lambda store: store.pop(next(iter(store)), None) if store else None,
}


def inputs_of() -> Tensor:
    return torch.rand(2, FEATURES, generator=torch.Generator().manual_seed(0))


def failed(report: ModuleReport) -> dict[str, str]:
    return {one.name.removeprefix("module."): "; ".join(one.findings) for one in report.records if one.outcome is Outcome.FAIL}


class Handle:
    """Of a hook, that removes what it likes."""

    def __init__(self, remove: Callable[[], object]) -> None:
        self.remove = remove


@pytest.mark.parametrize("removed", REMOVALS)
@pytest.mark.parametrize("kind", STORES)
def test_a_handle_that_does_not_remove_its_own_hook_is_told(kind: str, removed: str) -> None:
    def register(layer: nn.Module, hook: Any, **options: bool) -> Handle:
        getattr(nn.Linear, f"register_{kind}_hook")(layer, hook, **options)
        return Handle(lambda: REMOVALS[removed](getattr(layer, STORES[kind])))

    layer = type("Registers", (nn.Linear,), {f"register_{kind}_hook": register})(FEATURES, OUT)
    assert kind in failed(verify_module(layer, inputs_of()))["hook_removal"]


@pytest.mark.parametrize("kind", STORES)
def test_a_handle_that_removes_nothing_where_its_hook_is_alone_is_told(kind: str) -> None:
    def register(layer: nn.Module, hook: Any, **options: bool) -> Handle:
        handle = getattr(nn.Linear, f"register_{kind}_hook")(layer, hook, **options)
        return Handle(lambda: handle.remove() if len(getattr(layer, STORES[kind])) > 1 else None)

    layer = type("Registers", (nn.Linear,), {f"register_{kind}_hook": register})(FEATURES, OUT)
    assert f"removed {kind} hook, alone," in failed(verify_module(layer, inputs_of()))["hook_removal"]


@pytest.mark.parametrize("kind", ["full_backward_pre", "full_backward"])
def test_backward_hooks_that_are_never_prepended_are_told(kind: str) -> None:
    def register(layer: nn.Module, hook: Any, prepend: bool = False) -> Any:
        return getattr(nn.Linear, f"register_{kind}_hook")(layer, hook)

    layer = type("Appends", (nn.Linear,), {f"register_{kind}_hook": register})(FEATURES, OUT)
    assert "prepended" in failed(verify_module(layer, inputs_of()))["backward_hooks"]


def test_a_forward_hook_that_a_backward_hook_displaces_is_told() -> None:
    class Displaces(nn.Linear):
        def __call__(self, *args: Any) -> Any:
            kept = self._forward_hooks.copy()
            if self._backward_hooks:
                self._forward_hooks.clear()
            output = super().__call__(*args)
            self._forward_hooks.update(kept)
            return output

    assert "forward hook" in failed(verify_module(Displaces(FEATURES, OUT), inputs_of()))["backward_hooks"]


@pytest.mark.parametrize("swallowed", [RuntimeError, ValueError, TypeError, NotImplementedError, LookupError, Exception])
def test_a_call_that_swallows_a_kind_of_error_is_told(swallowed: type[Exception]) -> None:
    class Swallows(nn.Linear):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except swallowed:
                return torch.zeros(2, OUT)

    assert "did not reach the caller" in failed(verify_module(Swallows(FEATURES, OUT), inputs_of()))["always_called_hooks"]


@pytest.mark.parametrize(
    ("layer", "given"),
    [
        (nn.Sequential(nn.Linear(FEATURES, OUT), nn.ReLU(inplace=True)), inputs_of()),
        (nn.SoftMarginLoss(), (inputs_of(), torch.ones(2, FEATURES))),
    ],
    ids=["in place behind a layer", "a target without a derivative"],
)
def test_backward_hooks_are_looked_at_where_torch_runs_them(layer: nn.Module, given: Any) -> None:
    report = verify_module(layer, given)
    assert report.passed and "SKIP" not in str([one for one in report.records if "backward" in one.name]), report.to_text()


@pytest.mark.parametrize(
    ("effect", "says"),
    [
        (lambda layer: layer._parameters.update(weight=nn.Parameter(layer.weight.data.clone())), "others are in the place of parameters"),
        (lambda layer: layer.weight.data.copy_(torch.nextafter(layer.weight.data, layer.weight.data + 1)), "weight has other values"),
    ],
    ids=["another parameter", "one unit off"],
)
def test_a_conversion_rounds_as_torch_does_and_keeps_parameters(effect: Callable[[Any], object], says: str) -> None:
    class Converts(nn.Linear):
        def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Converts:
            was = self.weight.dtype
            super()._apply(fn, recurse)
            if self.weight.dtype is not was:
                effect(self)
            return self

    assert says in failed(verify_module(Converts(FEATURES, OUT), inputs_of()))["to_dtype"]


@pytest.mark.parametrize(
    ("seen", "check"),
    [
        (("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"), "forward_hook_order"),
        (("_forward_hooks", "_forward_pre_hooks", "global_forward_hooks", "global_forward_pre_hooks"), "backward_hooks"),
    ],
)
def test_a_call_that_skips_the_only_hook_there_is_is_told(seen: tuple[str, ...], check: str) -> None:
    class Fast(nn.Linear):
        def __call__(self, *args: Any) -> Any:
            there = [getattr(torch_module, f"_{one}") if one.startswith("global") else getattr(self, one) for one in seen]
            return super().__call__(*args) if any(there) else self.forward(*args)

    assert "a single" in failed(verify_module(Fast(FEATURES, OUT), inputs_of()))[check]


@pytest.mark.parametrize("training", [True, False])
def test_a_switch_that_returns_early_leaves_a_part_behind(training: bool) -> None:
    class Early(nn.Sequential):
        def train(self, mode: bool = True) -> Early:
            return self if self.training is mode else super().train(mode)

    layer = Early(nn.Linear(FEATURES, OUT), nn.BatchNorm1d(OUT)).train(training)
    assert "1 stayed in training" in failed(verify_module(layer, inputs_of()))["train_and_eval"]


class Parts(nn.Sequential):
    """A trained layer and a frozen one, with a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, OUT), nn.Dropout())
        self[0].bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(OUT))
        self.register_buffer("cached", torch.full((OUT,), 0.3), persistent=False)


EFFECTS: dict[str, tuple[Callable[[Any], object], str]] = {
    "freezes": (lambda one: one[1].weight.requires_grad_(False), "1.weight: requires_grad was True"),
    "thaws": (lambda one: one[0].bias.requires_grad_(True), "0.bias: requires_grad was False"),
    "unsaves": (lambda one: one._non_persistent_buffers_set.add("scale"), "scale: in the state dict was True"),
    "saves": (lambda one: one._non_persistent_buffers_set.clear(), "cached: in the state dict was False"),
    "trains": (lambda one: one.train(not one.training), "training was"),
    "drops hooks": (lambda one: one._forward_hooks.clear(), "hooks was ["),
    "writes": (lambda one: one.cached.data.add_(1), "cached, of torch.float32, is another tensor, of torch.float"),
    "keeps a dtype": (lambda one: setattr(one, "scale", one.scale.half()), "scale, of torch.float32, is another tensor, of torch.float16"),
    "loses a part": (lambda one: one._modules.pop("2"), "2 is lost"),
    "is another class": (lambda one: setattr(one[0], "__class__", Doubled), "0: class was"),
}


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(("before", "behind"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)])
@pytest.mark.parametrize("effect", EFFECTS)
def test_what_one_conversion_alone_loses_is_told(effect: str, before: torch.dtype, behind: torch.dtype) -> None:
    act, says = EFFECTS[effect]

    class Converts(Parts):
        def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Converts:
            was = self[0].weight.dtype
            super()._apply(fn, recurse)
            if (was, self[0].weight.dtype) == (before, behind):
                act(self)
            return self

    told = failed(verify_module(Converts().eval(), inputs_of()))
    assert set(told) == {"two_steps"} and says in told["two_steps"], told


@pytest.mark.parametrize("effect", ["loses a part", "is another class"])
@pytest.mark.parametrize("way", ["copy", "load", "conversion"])
def test_a_part_that_is_lost_or_another_is_told(effect: str, way: str) -> None:
    act, says = EFFECTS[effect]
    check = {"copy": "deepcopy", "load": "state_dict_round_trip", "conversion": "to_dtype"}[way]

    class Changes(Parts):
        def __setstate__(self, state: Any) -> None:
            super().__setstate__(state)
            if way == "copy":
                act(self)

        def _load_from_state_dict(self, *given: Any) -> None:
            super()._load_from_state_dict(*given)
            if way == "load":
                act(self)

        def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Changes:
            was = self.scale.dtype
            super()._apply(fn, recurse)
            if way == "conversion" and self.scale.dtype is not was:
                act(self)
            return self

    assert says in failed(verify_module(Changes().eval(), inputs_of()))[check]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_a_load_that_leaves_another_mode_is_told(given: bool, training: bool) -> None:
    class Loads(nn.Linear):
        def _load_from_state_dict(self, *rest: Any) -> None:
            super()._load_from_state_dict(*rest)
            self.training = training

    layer = Loads(FEATURES, OUT).train(given)
    assert f"training was {not training}" in failed(verify_module(layer, inputs_of()))["state_dict_round_trip"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_a_copy_that_freezes_in_one_mode_is_told(given: bool, training: bool) -> None:
    class Copies(nn.Linear):
        def __setstate__(self, state: Any) -> None:
            super().__setstate__(state)
            self.weight.requires_grad_(self.training is not training)

    told = failed(verify_module(Copies(FEATURES, OUT).train(given), inputs_of()))
    assert "weight: requires_grad was True and is False" in told["deepcopy" if given is training else "two_steps"]


@pytest.mark.parametrize(("before", "behind"), [(torch.float32, torch.bfloat16), (torch.float32, torch.float64)])
def test_a_conversion_that_drops_gradients_is_told(before: torch.dtype, behind: torch.dtype) -> None:
    class Drops(nn.Linear):
        def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Drops:
            was = self.weight.dtype
            super()._apply(fn, recurse)
            if (was, self.weight.dtype) == (before, behind):
                self.weight.grad = None
            return self

    told = failed(verify_module(Drops(FEATURES, OUT), inputs_of()))
    assert "weight: a gradient was True and is False" in told["to_dtype" if behind is torch.bfloat16 else "two_steps"]


@pytest.mark.parametrize(
    "shape",
    [(OUT - 1, FEATURES - 1), (1, 1), (OUT * FEATURES,), (1, OUT, FEATURES)],
    ids=["smaller", "broadcast", "flat", "one dimension more"],
)
def test_a_load_that_swallows_another_shape_is_told(shape: tuple[int, ...]) -> None:
    class Swallows(nn.Linear):
        def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
            if tuple(state.get(prefix + "weight", self.weight).shape) == shape:
                state = {**state, prefix + "weight": self.weight.detach()}
            super()._load_from_state_dict(state, prefix, *rest)

    told = failed(verify_module(Swallows(FEATURES, OUT), inputs_of()))
    assert told == {"state_dict_keys": "a strict load accepted weight in another shape, and left it as it was"}


def test_a_state_dict_that_is_kept_from_the_first_call_is_told() -> None:
    class Keeps(nn.Linear):
        kept: dict[str, Tensor] | None = None

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            if self.kept is None:
                self.kept = {name: tensor.detach().clone() for name, tensor in self._parameters.items()}
            destination.update({prefix + name: tensor for name, tensor in self.kept.items()})

    assert "behind a change of it" in failed(verify_module(Keeps(FEATURES, OUT), inputs_of()))["state_dict_keys"]


def test_a_copy_whose_load_goes_to_the_original_is_told() -> None:
    class LoadsElsewhere(nn.Linear):
        def __init__(self) -> None:
            super().__init__(FEATURES, OUT)
            load = super()._load_from_state_dict
            self.load = lambda *rest: load(*rest)  # a copy keeps this function, which is the original's

        def _load_from_state_dict(self, *rest: Any) -> None:
            self.load(*rest)

    assert "the copy does not take weight, bias from a state dict" in failed(verify_module(LoadsElsewhere(), inputs_of()))["deepcopy"]


def test_random_numbers_of_the_caller_stay() -> None:
    def drawn() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    layer, found = nn.Linear(FEATURES, OUT), []
    for act in (lambda: None, lambda: verify_module(layer, inputs_of())):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        act()
        found.append(drawn())
    assert found[0] == found[1]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_part_that_swallows_unexpected_keys_is_told(depth: int) -> None:
    class Swallows(nn.Linear):
        def _load_from_state_dict(
            self, state: Any, prefix: Any, meta: Any, strict: Any, missing: Any, unexpected: Any, errors: Any
        ) -> None:
            super()._load_from_state_dict(state, prefix, meta, strict, missing, [], errors)

    layer: nn.Module = Swallows(FEATURES, OUT)
    for _ in range(depth):
        layer = nn.Sequential(layer)
    assert "unexpected key" in failed(verify_module(layer, inputs_of()))["state_dict_keys"]


class LoadsByHand(nn.Linear):
    """All of it, without torch's way, which calls hooks that look at the version."""

    _version = 3

    def _load_from_state_dict(self, state: Any, prefix: Any, meta: Any, strict: Any, missing: Any, unexpected: Any, errors: Any) -> None:
        for name, tensor in self._parameters.items():
            value = state.get(prefix + name)
            if value is None:
                missing.append(prefix + name)
            elif value.shape != tensor.shape:
                errors.append(f"size mismatch for {prefix}{name}")
            else:
                tensor.data.copy_(value)
        unexpected += [key for key in state if key.startswith(prefix) and key.removeprefix(prefix) not in self._parameters]


def test_a_layer_that_loads_by_hand_passes() -> None:
    report = verify_module(nn.Sequential(LoadsByHand(FEATURES, OUT)), inputs_of())
    assert report.passed, report.to_text()


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize(
    ("effect", "says"),
    [
        (lambda layer: layer.weight.requires_grad_(False), "requires_grad changed"),
        (lambda layer: layer.train(not layer.training), "training changed"),
        (lambda layer: torch.set_default_dtype(torch.float64), "default dtype"),
        (lambda layer: layer._parameters.update(weight=nn.Parameter(layer.weight.data.clone())), "put others in the place"),
    ],
    ids=["freezes", "mode", "dtype", "parameter"],
)
def test_what_the_second_call_leaves_is_told(effect: Callable[[Any], object], says: str, call: int) -> None:
    class Leaves(nn.Linear):
        calls = 0

        def forward(self, input: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == call:
                effect(self)
            return input.mean() + torch.zeros(OUT)

    assert says in failed(verify_module(Leaves(FEATURES, OUT), inputs_of()))["surroundings"]
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("whose", ["the module", "inner"])
def test_a_forward_that_changes_a_class_is_told_and_put_back(whose: str) -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(FEATURES, OUT)

        def forward(self, input: Tensor) -> Any:
            output = self.inner(input)
            part = self if whose == "the module" else self.inner
            part.__class__ = Other if whose == "the module" else Doubled
            return output

    class Other(Changes):
        pass

    layer = Changes()
    assert f"changed the class of {whose}" in failed(verify_module(layer, inputs_of()))["surroundings"]
    assert (type(layer), type(layer.inner)) == (Changes, nn.Linear)


@pytest.mark.parametrize(
    ("whose", "seed"),
    [("torch's", torch.manual_seed), ("numpy's", np.random.seed), ("Python's", random.seed)],
)
@pytest.mark.parametrize("call", [1, 2])
def test_a_generator_that_one_call_alone_seeds_is_told(whose: str, seed: Callable[[int], object], call: int) -> None:
    class Seeds(nn.Linear):
        calls = 0

        def forward(self, input: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == call:
                seed(0)
            return super().forward(input)

    assert f"seeds {whose} generator" in failed(verify_module(Seeds(FEATURES, OUT), inputs_of()))["surroundings"]


class Resizes(nn.Linear):
    def __init__(self) -> None:
        super().__init__(FEATURES, OUT)
        self.register_buffer("seen", torch.zeros(0), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        if self.seen.numel() == 0:
            self.seen.resize_(FEATURES).zero_()
        return super().forward(input)


class Recurs(nn.Linear):
    def __init__(self) -> None:
        super().__init__(FEATURES, OUT)
        self.register_buffer("state", torch.zeros(2, OUT), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        self.state = torch.tanh(super().forward(input) + self.state.to(input.dtype)).detach()
        return super().forward(input) + self.state


class DrawsOfItsOwn(nn.Linear):
    def __init__(self) -> None:
        super().__init__(FEATURES, OUT)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + torch.rand(OUT, generator=self.generator).to(input)


@pytest.mark.parametrize("make", [Resizes, Recurs, DrawsOfItsOwn])
def test_a_layer_with_a_state_of_its_own_passes_and_is_left_as_it_was(make: Callable[[], nn.Module]) -> None:
    layer = make()
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    report = verify_module(layer, inputs_of())
    assert report.passed, report.to_text()
    after = dict(layer.named_buffers())
    assert after.keys() == before.keys() and all(torch.equal(value, after[name]) for name, value in before.items())
    assert ("outputs were not compared" in report.to_text()) == (make is not Resizes)


Pair = collections.namedtuple("Pair", "first second")
Box = dataclasses.make_dataclass("Box", ["first"])


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ((inputs_of(), inputs_of()), lambda pair: pair[0]),
        (Pair(inputs_of(), inputs_of()), lambda pair: pair.first),
        (Box(inputs_of()), lambda box: box.first),
        (types.SimpleNamespace(first=[inputs_of()]), lambda box: box.first[0]),
    ],
    ids=["tuple", "namedtuple", "dataclass", "namespace"],
)
def test_a_layer_that_takes_an_object_of_tensors_passes(given: Any, read: Callable[[Any], Tensor]) -> None:
    class Reads(nn.Linear):
        def forward(self, packed: Any) -> Tensor:
            return super().forward(read(packed))

    report = verify_module(Reads(FEATURES, OUT), (given,))
    assert report.passed, report.to_text()


def test_a_module_that_was_not_set_up_is_refused_in_words() -> None:
    class Forgot(nn.Module):
        def __init__(self) -> None:
            pass

    with pytest.raises(UserInputError, match=r"Forgot has not called super\(\).__init__\(\)"):
        verify_module(Forgot(), inputs_of())
