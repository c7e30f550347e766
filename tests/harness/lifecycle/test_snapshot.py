"""A snapshot sees everything that a call could change, says what it was, and sees nothing that is not there."""

from __future__ import annotations

import copy
import gc
import random
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy
import pytest
import torch
from torch import nn

from harness.lifecycle.driving.probes import TinyModel
from harness.lifecycle.driving.snapshot import Namespace, Snapshot, freeze, num_hooks


def _set_grad(model: TinyModel) -> None:
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)


def _patch_forward(model: TinyModel) -> None:
    model.lm_head.forward = lambda x: x  # type: ignore[method-assign]


def _same_values_elsewhere(model: TinyModel) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def _one_bit(model: TinyModel) -> None:
    model.lm_head.weight.data.view(torch.int32)[0, 0] += 1


def _negative_zero(model: TinyModel) -> None:
    model.norm.bias.data.neg_()


CHANGES: dict[str, tuple[str, Callable[[TinyModel], Any]]] = {
    "one bit of a weight": ("tensor", _one_bit),
    "a zero that becomes negative": ("tensor", _negative_zero),
    "another parameter with the same values": ("tensor", _same_values_elsewhere),
    "a new buffer": ("tensor", lambda model: model.register_buffer("extra", torch.zeros(1))),
    "requires_grad": ("requires_grad", lambda model: model.norm.weight.requires_grad_(False)),
    "a gradient": ("grad", _set_grad),
    "the training flag of one module": ("training", lambda model: model.layers[0].norm.train(False)),
    "a setting of the config": ("attribute", lambda model: setattr(model.config, "use_cache", False)),
    "a new setting of the config": ("attribute", lambda model: setattr(model.config, "new", 1)),
    "an attribute of a module": ("attribute", lambda model: setattr(model.layers[1], "note", "x")),
    "a patched forward": ("attribute", _patch_forward),
    "a forward hook": ("hooks", lambda model: model.norm.register_forward_hook(lambda *args: None)),
    "a pre-hook": ("hooks", lambda model: model.norm.register_forward_pre_hook(lambda *args: None)),
    "a backward hook": ("hooks", lambda model: model.norm.register_full_backward_hook(lambda *args: None)),
    "a state-dict hook": ("hooks", lambda model: model.norm.register_state_dict_post_hook(lambda *args: None)),
    "another module": ("module", lambda model: setattr(model, "norm", nn.LayerNorm(8))),
    "torch's random numbers": ("rng", lambda model: torch.rand(1)),
    "Python's random numbers": ("rng", lambda model: random.random()),
    "numpy's random numbers": ("rng", lambda model: numpy.random.random()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen(what: str) -> None:
    kind, change = CHANGES[what]
    model = TinyModel(8)
    before = Snapshot(model)
    change(model)
    found = before.differences(Snapshot(model))
    assert kind in {difference.kind for difference in found}
    assert not before.differences(Snapshot(model), allowed=[difference.kind for difference in found])
    assert str(found[0])


def test_nothing_is_seen_where_nothing_changed() -> None:
    model = TinyModel(8)
    before = Snapshot(model, {"extra": {"a": [1, float("nan"), torch.ones(2), {"b"}]}})
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long))
    assert before.differences(Snapshot(model, {"extra": {"a": [1, float("nan"), torch.ones(2), {"b"}]}})) == []


def test_a_patched_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyModel(8)
    before = Snapshot(model)
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: x)
    assert [difference.kind for difference in before.differences(Snapshot(model))] == ["class"]


def test_switches_and_hooks_of_the_process_are_seen() -> None:
    model = TinyModel(8)
    before = Snapshot(model)
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        with torch.no_grad():
            found = before.differences(Snapshot(model))
        assert {(one.kind, one.where) for one in found} == {
            ("torch", "grad mode"),
            ("hooks", "of every module._global_forward_hooks"),
        }
        assert num_hooks(model) == 1
    finally:
        handle.remove()
    assert num_hooks(model) == 0


def test_a_thread_that_is_left_is_seen() -> None:
    model = TinyModel(8)
    before = Snapshot(model)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert [difference.kind for difference in before.differences(Snapshot(model))] == ["threads"]
    finally:
        stop.set()
        thread.join()


def test_freeze_ends_on_a_cycle_and_compares_objects_by_their_content() -> None:
    class Thing:
        def __init__(self) -> None:
            self.me = self
            self.values = [1]

    thing = Thing()
    frozen = freeze(thing)
    assert frozen == freeze(thing)
    thing.values.append(2)
    assert frozen != freeze(thing)


@pytest.mark.parametrize("kind", [WeakSet, WeakKeyDictionary, WeakValueDictionary])
def test_what_is_held_weakly_may_go_when_garbage_is_collected(kind: Any) -> None:
    module, holder = nn.Linear(1, 1), kind()
    holder.add(module) if kind is WeakSet else holder.update({module if kind is WeakKeyDictionary else 1: module})
    state = {"kept": holder}
    frozen = freeze(state)
    del module
    gc.collect()
    assert frozen == freeze(state) and frozen != freeze({"kept": kind()})


def test_what_pickling_notes_of_a_class_is_no_change() -> None:
    class Own:
        pass

    before = Namespace(Own)
    copy.copy(Own())
    assert "__slotnames__" in vars(Own) and Namespace(Own) == before
    Own.seen = True  # type: ignore[attr-defined]
    assert Namespace(Own) != before
