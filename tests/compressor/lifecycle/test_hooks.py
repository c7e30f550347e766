"""Hooks belong to one object, keep torch's behaviour, sleep in nested contexts and can all be taken away."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from compressor.errors import LifecycleError
from compressor.lifecycle import HooksMixin
from compressor.lifecycle.hooks import without_modifier_hooks


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


def test_hooks_of_all_kinds_run_and_may_replace_what_flows() -> None:
    owner, module, seen = HooksMixin(), linear(), []
    owner.register_hook(module, lambda m, args, kwargs: (seen.append("pre"), ((args[0] + 1,), kwargs))[1], "forward_pre", with_kwargs=True)
    owner.register_hook(module, lambda m, args, kwargs, out: (seen.append("forward"), out * 2)[1], "forward", with_kwargs=True)
    owner.register_hook(module, lambda m, out: seen.append("backward_pre"), "full_backward_pre")
    owner.register_hook(module, lambda m, into, out: seen.append("backward"), "full_backward")
    x = torch.ones(1, 2, requires_grad=True)
    module(x).sum().backward()
    expected = 2 * nn.functional.linear(x + 1, module.weight, module.bias)
    assert seen == ["pre", "forward", "backward_pre", "backward"]
    with torch.no_grad():
        assert torch.equal(module(x), expected)


def test_an_always_called_hook_runs_after_an_error() -> None:
    owner, module, seen = HooksMixin(), linear(), []
    owner.register_hook(module, lambda m, args, out: seen.append("always"), "forward", always_call=True)
    owner.register_hook(module, lambda m, args, out: seen.append("normal"), "forward")
    with pytest.raises(RuntimeError):
        module(torch.ones(1, 3))
    assert seen == ["always"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("backward", {}),
        ("forward_pre", {"always_call": True}),
        ("full_backward", {"with_kwargs": True}),
        ("full_backward", {"always_call": True}),
        ("full_backward_pre", {"with_kwargs": True}),
    ],
)
def test_a_kind_or_an_option_that_does_not_exist_is_refused(
    kind: Any, options: dict[str, bool], num_hooks: Callable[[nn.Module], int]
) -> None:
    owner, module = HooksMixin(), linear()
    with pytest.raises(LifecycleError, match=r"register_hook: .*;"):
        owner.register_hook(module, lambda *args: None, kind, **options)
    assert num_hooks(module) == 0


def test_remove_hooks_removes_the_chosen_ones_or_all(num_hooks: Callable[[nn.Module], int]) -> None:
    owner, module = HooksMixin(), linear()
    handles = [owner.register_hook(module, lambda m, args, out: None, "forward") for _ in range(3)]
    foreign = module.register_forward_hook(lambda m, args, out: None)
    owner.remove_hooks(handles[:1])
    assert num_hooks(module) == 3
    owner.remove_hooks()
    assert num_hooks(module) == 1
    owner.remove_hooks()
    foreign.remove()


def test_a_handle_of_somebody_else_is_refused_and_nothing_is_removed(num_hooks: Callable[[nn.Module], int]) -> None:
    owner, other, module = HooksMixin(), HooksMixin(), linear()
    mine = owner.register_hook(module, lambda m, args, out: None, "forward")
    theirs = other.register_hook(module, lambda m, args, out: None, "forward")
    with pytest.raises(LifecycleError, match="owner"):
        owner.remove_hooks([mine, theirs])
    assert num_hooks(module) == 2
    owner.remove_hooks([mine])
    with pytest.raises(LifecycleError, match="once"):
        owner.remove_hooks([mine])


@given(st.lists(st.sampled_from(["enter", "leave", "raise", "call"]), max_size=20))
def test_disabling_nests(actions: list[str]) -> None:
    owner, module, calls = HooksMixin(), linear(), []
    owner.register_hook(module, lambda m, args, out: calls.append(1), "forward")
    contexts: list[Any] = []
    expected = 0
    for action in actions:
        if action == "enter":
            contexts.append(owner.disable_hooks())
            contexts[-1].__enter__()
        elif action == "leave" and contexts:
            contexts.pop().__exit__(None, None, None)
        elif action == "raise" and contexts:
            error = ValueError("planted")
            with pytest.raises(ValueError, match="planted"):
                contexts.pop().gen.throw(error)
        elif action == "call":
            module(torch.ones(1, 2))
            expected += not contexts
    assert len(calls) == expected


def test_switching_off_is_not_seen_by_other_owners_or_threads() -> None:
    first, second, module, seen = HooksMixin(), HooksMixin(), linear(), []
    first.register_hook(module, lambda m, args, out: seen.append("first"), "forward")
    second.register_hook(module, lambda m, args, out: seen.append("second"), "forward")
    with first.disable_hooks():
        thread = threading.Thread(target=lambda: module(torch.ones(1, 2)))
        thread.start()
        thread.join()
    assert seen == ["second"]


def test_the_owner_says_where_its_hooks_sit() -> None:
    owner, first, second = HooksMixin(), linear(), linear()
    handle = owner.register_hook(first, lambda m, args, out: None, "forward")
    owner.register_hook(second, lambda m, args: None, "forward_pre")
    assert owner.hooked_modules() == [(first, "forward"), (second, "forward_pre")]
    owner.remove_hooks([handle])
    assert owner.hooked_modules() == [(second, "forward_pre")]


def test_hooks_that_come_or_go_while_those_of_modifiers_are_off_have_come_or_gone() -> None:
    layer, modifier, seen = linear(), HooksMixin(), list[str]()
    gone = layer.register_forward_pre_hook(lambda *_: seen.append("gone"))
    modifier.register_hook(layer, lambda *_: seen.append("modifier"), "forward_pre")
    layer.register_forward_pre_hook(lambda *_: seen.append("author"))
    with without_modifier_hooks(layer):
        gone.remove()
        layer.register_forward_pre_hook(lambda *_: seen.append("first"), prepend=True)
        layer.register_forward_pre_hook(lambda *_: seen.append("last"))
        layer(torch.zeros(1, 2))
    layer(torch.zeros(1, 2))
    assert seen == ["first", "author", "last", "first", "modifier", "author", "last"]
