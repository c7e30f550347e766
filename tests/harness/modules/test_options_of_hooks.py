"""A `__call__` written out anew hands hooks what torch's own does, and takes what they return, whatever their options; a slip is told."""

from __future__ import annotations

import collections
import inspect
import textwrap
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from harness.modules import contract, hooks

FEATURES = 4


OPTIONS, ALWAYS, REPLACED, OUTPUT = "hooks_with_kwargs", "always_called_hooks", "input_replacement", "output_replacement"


@pytest.fixture(autouse=True)
def _four_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {f"module.{name}" for name in (OPTIONS, ALWAYS, REPLACED, OUTPUT)}
    monkeypatch.setattr(contract, "CHECKS", [check for check in hooks.CHECKS if check.claim.name in names])
    monkeypatch.setattr(contract, "process_kept", lambda modules: nullcontext())  # most of the time, and nothing changes here


class Scaled(nn.Linear):
    def forward(self, input: Tensor, *, scale: Tensor | None = None) -> Tensor:
        output = super().forward(input)
        return output if scale is None else output * scale


class ScaledInOrder(nn.Linear):
    def forward(self, input: Tensor, scale: Tensor) -> Tensor:
        return super().forward(input) * scale


def written_out(changes: Mapping[str, str], base: type[nn.Module] = Scaled) -> nn.Module:
    """A layer with torch's own text as its `__call__`, of which some is changed where it stands first."""
    source, names = textwrap.dedent(inspect.getsource(nn.Module._call_impl)), dict(vars(torch_module))
    for old, new in changes.items():
        assert old in source, old
        source = source.replace(old, new, 1)
    exec(source, names)
    layer: nn.Module = type("WrittenOut", (base,), {"__call__": names["_call_impl"]})(FEATURES, FEATURES)
    return layer


def by_position() -> Any:
    return torch.rand(2, FEATURES, generator=torch.Generator().manual_seed(0))


def by_name() -> Any:
    return {"input": by_position()}


def told(layer: nn.Module, given: Any) -> set[str]:
    return {name.removeprefix("module.") for name in contract.verify_module(layer, given).failed}


PRE_ASKS = "hook_id in self._forward_pre_hooks_with_kwargs"
ASKS = "hook_id in self._forward_hooks_with_kwargs or hook_id in _global_forward_hooks_with_kwargs"
OWN_FAILS = "hook_id in self._forward_hooks_always_called and hook_id not in called_always_called_hooks"
GLOBAL_FAILS = "hook_id in _global_forward_hooks_always_called and hook_id not in called_always_called_hooks"
AT_FIRST, AT_LAST = "result = None\n", "result = forward_call(*args, **kwargs)\n"
WITH_KWARGS = "hook(self, args, kwargs, result)"
TAKES, TAKES_PLACES, TAKES_ALL = (f"if {one}_result is not None:" for one in ("hook", "args", "args_kwargs"))
IS_GLOBAL_PRE = "(hook_id in _global_forward_pre_hooks)"
KEEPS = {AT_FIRST: "result, given = None, (args, kwargs)\n"}


def forgets_the_replacement(when: str) -> dict[str, str]:
    return {
        **KEEPS,
        AT_LAST: f"result, (args, kwargs) = forward_call(*args, **kwargs), given if {when} else (args, kwargs)\n",
    }


FAULTS: dict[str, tuple[set[str], dict[str, str]]] = {
    "pre-hooks ask in vain where there is no name": ({OPTIONS}, {PRE_ASKS: f"kwargs and {PRE_ASKS}"}),
    "hooks ask in vain where there is no name": ({OPTIONS}, {ASKS: f"kwargs and ({ASKS})"}),
    "positional inputs are not replaced": ({OPTIONS}, {"args, kwargs = args_kwargs": "_, kwargs = args_kwargs"}),
    "hooks see what a plain pre-hook replaced": ({REPLACED}, forgets_the_replacement("not self._forward_pre_hooks_with_kwargs")),
    "hooks see what a pre-hook with_kwargs replaced": ({OPTIONS}, forgets_the_replacement("self._forward_pre_hooks_with_kwargs")),
    "plain hooks see what was replaced": ({OPTIONS, REPLACED}, {**KEEPS, "hook(self, args, result)": "hook(self, given[0], result)"}),
    "hooks with_kwargs see what was replaced": ({OPTIONS}, {**KEEPS, WITH_KWARGS: "hook(self, *given, result)"}),
    "hooks with_kwargs run twice": ({OPTIONS}, {WITH_KWARGS: f"({WITH_KWARGS}, {WITH_KWARGS})[1]"}),
    "global hooks ask in vain": ({OPTIONS}, {ASKS: ASKS.partition(" or ")[0]}),
    "global hooks get no names": ({OPTIONS}, {"args, kwargs, result)": "args, kwargs if hook_id in self._forward_hooks else {}, result)"}),
    "global pre-hooks get nothing": (
        {OPTIONS, REPLACED},
        {"hook(self, args)": "hook(self, () if hook_id in _global_forward_pre_hooks else args)"},
    ),
    "own hooks have one option": ({OPTIONS}, {ASKS: f"({ASKS}) and hook_id not in self._forward_hooks_always_called"}),
    "global hooks have one option": ({OPTIONS}, {ASKS: f"({ASKS}) and hook_id not in _global_forward_hooks_always_called"}),
    "what own pre-hooks return goes nowhere": ({REPLACED}, {TAKES_PLACES: f"{TAKES_PLACES[:-1]} and {IS_GLOBAL_PRE}:"}),
    "what a lone own pre-hook returns goes nowhere": (
        {REPLACED},
        {TAKES_PLACES: f"{TAKES_PLACES[:-1]} and (len(self._forward_pre_hooks) > 1 or {IS_GLOBAL_PRE}):"},
    ),
    "what a lone pre-hook with_kwargs returns goes nowhere": (
        {OPTIONS},
        {TAKES_ALL: f"{TAKES_ALL[:-1]} and (self._forward_hooks or len(self._forward_pre_hooks) > 1):"},
    ),
    "what global pre-hooks return goes nowhere": ({REPLACED}, {TAKES_PLACES: f"{TAKES_PLACES[:-1]} and not {IS_GLOBAL_PRE}:"}),
    "names become places": (
        {OPTIONS},
        {AT_FIRST: "result, args, kwargs = None, (*args, *([kwargs.pop('input')] if 'input' in kwargs else [])), kwargs\n"},
    ),
    "global hooks are not always called": ({ALWAYS}, {GLOBAL_FAILS: "False"}),
    "every global hook is always called": ({ALWAYS}, {GLOBAL_FAILS: "True"}),
    "own hooks ask in vain in failure": ({ALWAYS}, {"if hook_id in self._forward_hooks_with_kwargs:": "if False:"}),
    "of own hooks one is always called": ({ALWAYS}, {OWN_FAILS: "hook_id == next(iter(self._forward_hooks_always_called), None)"}),
    "of global hooks one is always called": ({ALWAYS}, {GLOBAL_FAILS: "hook_id == next(iter(_global_forward_hooks_always_called), None)"}),
    "hooks are always called after one kind of error": ({ALWAYS}, {"except Exception:": "except RuntimeError:"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_slip_in_a_call_that_is_written_out_is_told(fault: str) -> None:
    checks, changes = FAULTS[fault]
    assert told(written_out(changes), by_position()) == checks


TOGETHER: list[tuple[str, ...]] = [(), ("with_kwargs",), ("always_called",), ("with_kwargs", "always_called")]
CHOICES = {
    "self._forward_pre_hooks": TOGETHER[:2],
    "_global_forward_pre_hooks": TOGETHER[:1],
    "self._forward_hooks": TOGETHER,
    "_global_forward_hooks": TOGETHER,
}


@pytest.mark.parametrize(("store", "options"), [(store, options) for store, choices in CHOICES.items() for options in choices])
def test_a_hook_that_is_skipped_where_it_is_alone_is_told(store: str, options: tuple[str, ...]) -> None:
    alone = f"{' + '.join(f'len({one})' for one in CHOICES)} == len({store}) == 1"
    asks = [f"(next(iter({store})) in {store}_{option}) is {option in options}" for option in set().union(*CHOICES[store])]
    skips = f"    if not torch.is_grad_enabled() and {' and '.join([alone, *asks])}: return forward_call(*args, **kwargs)\n"
    assert OPTIONS in told(written_out({AT_FIRST: AT_FIRST + skips}), by_position())


def takes_nothing_from(store: str, options: tuple[str, ...]) -> dict[str, str]:
    is_one = [f"hook_id in {store}", *(f"(hook_id in {store}_{option}) is {option in options}" for option in TOGETHER[-1])]
    return {TAKES: f"{TAKES[:-1]} and not ({' and '.join(is_one)}):"}


@pytest.mark.parametrize("options", TOGETHER)
@pytest.mark.parametrize("store", ["self._forward_hooks", "_global_forward_hooks"])
def test_what_a_forward_hook_returns_and_nobody_gets_is_told(store: str, options: tuple[str, ...]) -> None:
    assert told(written_out(takes_nothing_from(store, options)), by_position()) == {OUTPUT}


@pytest.mark.parametrize(
    ("changes", "check"),
    [(FAULTS["what global pre-hooks return goes nowhere"][1], REPLACED), (takes_nothing_from("_global_forward_hooks", ()), OUTPUT)],
    ids=["before forward", "behind it"],
)
def test_what_a_global_hook_returns_in_vain_is_told_beside_own_ones(changes: dict[str, str], check: str) -> None:
    layer = written_out(changes)
    layer.register_forward_pre_hook(lambda module, args: args[0] / 2)
    layer.register_forward_hook(lambda module, args, output: torch.ones(2, FEATURES))
    assert told(layer, by_position()) == {check}


class Open(Scaled):
    def forward(self, input: Tensor, *more: Tensor, **others: Tensor) -> Tensor:
        return super().forward(input, scale=others["scale"])


@pytest.mark.parametrize(("changes", "expected"), [({}, set()), (FAULTS["names become places"][1], {OPTIONS})], ids=["sound", "wrong"])
def test_a_name_that_forward_does_not_list_is_looked_at(changes: dict[str, str], expected: set[str]) -> None:
    assert told(written_out(changes, Open), {**by_name(), "scale": torch.tensor(2.0)}) == expected


class Summed(nn.Linear):
    def forward(self, inputs: list[Tensor]) -> Tensor:
        return super().forward(inputs[0] + inputs[1])


class Two(NamedTuple):
    input: Tensor
    scale: Tensor


@pytest.mark.parametrize(
    ("layer", "given"),
    [(Summed, lambda: [by_position(), by_position()]), (ScaledInOrder, lambda: Two(by_position(), torch.tensor(2.0)))],
    ids=["a list is one input", "a NamedTuple is several"],
)
def test_how_inputs_are_given(layer: type[nn.Module], given: Callable[[], Any]) -> None:
    report = contract.verify_module(layer(FEATURES, FEATURES), given())
    assert report.passed, report.to_text()


def test_inputs_that_are_given_by_name_are_handed_over_in_order_too() -> None:
    _, changes = FAULTS["pre-hooks ask in vain where there is no name"]
    assert told(written_out(changes), by_name()) == {OPTIONS}


# torch forgets the names here, which others need not.
NAMES_IN_FAILURE = {
    "hook(self, args, result)  # type": "hook(self, args, *[kwargs][: hook_id in _global_forward_hooks_with_kwargs], result)  # type"
}


@pytest.mark.parametrize("changes", [{}, NAMES_IN_FAILURE], ids=["torch's own", "with names in failure"])
@pytest.mark.parametrize(
    "given",
    [by_position, by_name, lambda: {**by_name(), "scale": torch.tensor(2.0)}, lambda: by_position().requires_grad_()],
    ids=["by position", "by name", "by name only", "with a gradient"],
)
@pytest.mark.parametrize("training", [True, False])
def test_a_sound_call_that_is_written_out_passes(training: bool, given: Callable[[], Any], changes: dict[str, str]) -> None:
    report = contract.verify_module(written_out(changes).train(training), given())
    assert report.passed, report.to_text()


def halves_a_list(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return [one / 2 for one in args], collections.OrderedDict((name, one / 2) for name, one in kwargs.items())


@pytest.mark.parametrize("given", [by_position, by_name])
def test_hooks_that_a_sound_module_came_with_may_replace_what_others_get(given: Callable[[], Any]) -> None:
    layer = Scaled(FEATURES, FEATURES)
    layer.register_forward_pre_hook(halves_a_list, with_kwargs=True)
    layer.register_forward_hook(lambda module, args, output: torch.ones(2, FEATURES), always_call=True)
    assert not told(layer, given())
