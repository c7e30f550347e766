"""Checks of what a module holds: its children, its mode, its text and its state dict."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from harness.modules.loads import copied_state, halved, not_loaded, not_taken, note_refusal
from harness.modules.subject import PROBE, ModuleCheck, Subject, collect, untouched
from harness.modules.tensors import (
    changed_facts,
    facts_of,
    known_tensors,
    non_persistent_names,
    overwrite,
    persistent_names,
    same_bits,
)

CHECKS: list[ModuleCheck] = []
_check = collect(CHECKS)
MAX_LEFT_OUT = 32
"""How many keys are left out of a state dict, one at a time, to see whether a strict load notices; and modules of a switch of modes."""


@_check("module.apply_order", calls=False)
def _apply_order(subject: Subject) -> list[str]:
    """`apply` visits children before their parent, each as often as torch does, and returns the module."""
    outer = nn.Sequential(subject.module)  # so that a module without children has an order, too
    visited: list[nn.Module] = []
    outer.apply(visited.append)
    findings = [] if [id(part) for part in visited] == [id(part) for part in _post_order(outer)] else [f"visited {_classes(visited)}"]
    return findings if subject.module.apply(lambda module: None) is subject.module else [*findings, "apply did not return the module"]


@_check("module.train_and_eval", calls=False)
def _train_and_eval(subject: Subject) -> list[str]:
    """`train` and `eval` reach every descendant and return the module; a mode that is no bool is refused and changes nothing."""
    module, findings = subject.module, list[str]()
    with untouched(module):
        for mode, switch in ((False, module.eval), (True, module.train), (False, lambda: module.train(False))):
            findings += dict.fromkeys(_left_behind(module, mode, switch))
        for wrong in (1, "eval", None):
            try:
                module.train(wrong)  # type: ignore[arg-type]
                findings.append(f"train({wrong!r}) was accepted")
            except ValueError:
                findings += [f"train({wrong!r}) raised and yet changed a mode" for part in module.modules() if part.training is not False]
    return findings


def _left_behind(module: nn.Module, mode: bool, switch: Callable[[], nn.Module]) -> Iterator[str]:
    """What a switch does not reach where all are in the other mode, or all but one: a module may return early where it sees the mode."""
    for one_there in (None, *islice(module.modules(), MAX_LEFT_OUT)):
        for part in module.modules():
            part.training = mode if part is one_there else not mode
        if switch() is not module:
            yield f"the switch to training={mode} did not return the module"
        left = [name or "the module" for name, part in module.named_modules() if part.training != mode]
        yield from (f"{name} stayed in training={not mode}" for name in left)


@_check("module.extra_repr", calls=False)
def _extra_repr(subject: Subject) -> list[str]:
    """`repr` names the class, every line of `extra_repr`, and every child."""
    module = subject.module
    text, extra_lines = repr(module), (module.extra_repr() or "").splitlines()  # torch takes None, too
    expected = [type(module).__name__, *extra_lines, *(f"({name}): " for name, _ in module.named_children())]
    return [f"{part!r} is not in repr" for part in expected if part.strip() not in text]


@_check("module.state_dict_keys", calls=False)
def _state_dict_keys(subject: Subject) -> list[str]:
    """The state dict holds each parameter and persistent buffer as it is, below another module, too; a strict load names what misfits."""
    module = subject.module
    state, tensors = module.state_dict(), known_tensors(module)
    findings = [f"{name} is not in the state dict" for name in persistent_names(module) if name not in state]
    findings += _unlike(module, state)
    if not findings:
        with untouched(module):
            overwrite(module)
            findings = [f"{line}, behind a change of it" for line in _unlike(module, module.state_dict())]
    needed = [name for name in state if name not in non_persistent_names(module)][:MAX_LEFT_OUT]
    unexpected = [f"{name}.{PROBE}".lstrip(".") for name, _ in islice(module.named_modules(), MAX_LEFT_OUT)]
    wrong = {**{f"with the unexpected key {key}": key for key in unexpected}, **{f"without the key {name}": name for name in needed}}
    with untouched(module):
        findings += _below_another(subject)
        findings += [line for name in needed if name in tensors for line in _with_another_shape(module, state, name)]
        for what, name in wrong.items():
            contents = copy.copy(state)  # a copy like this one keeps the versions, which a load may look at
            if contents.pop(name, None) is None:
                contents[name] = torch.zeros(1)
            try:
                module.load_state_dict(contents, strict=True)
                findings.append(f"a strict load accepted a state dict {what}")
            except RuntimeError as error:
                findings += [] if name in str(error) else [f"the error of a strict load {what} does not name it"]
            differing = module.load_state_dict(contents, strict=False)
            findings += [] if name in (*differing.missing_keys, *differing.unexpected_keys) else [f"strict=False does not report {name}"]
    return findings


def _unlike(module: nn.Module, state: dict[str, Any]) -> list[str]:
    """Which tensors a state dict holds otherwise."""
    tensors = known_tensors(module)
    return [
        f"{name} is {tensors[name].dtype} {list(tensors[name].shape)}, and in the state dict it is {_described(state[name])}"
        for name in persistent_names(module)
        if name in state and not same_bits(tensors[name].detach(), state[name])
    ]


def _with_another_shape(module: nn.Module, state: dict[str, Any], name: str) -> list[str]:
    """Load a tensor of other shapes, each of which is refused, or taken as a buffer that is made to fit."""
    contents, shape = copy.copy(state), [*state[name].shape]
    larger, smaller, flat = [size + 1 for size in shape], [max(1, size - 1) for size in shape], [state[name].numel()]
    for other in [larger, smaller, [1] * len(shape), flat, [1, *shape]] if shape else [[2, 2]]:
        if other == shape:
            continue
        contents[name] = _repeated(state[name], other)
        with untouched(module):
            try:
                module.load_state_dict(contents, strict=True)
            except RuntimeError as error:
                if name not in str(error):
                    return [f"the error of a strict load with {name} in another shape does not name it"]
                continue
            if module.state_dict()[name].shape != contents[name].shape:
                return [f"a strict load accepted {name} in another shape, and left it as it was"]
    return []


def _repeated(tensor: Tensor, shape: list[int]) -> Tensor:
    """Its own values in another shape, again and again: a module may refuse others, such as negative ones."""
    own = tensor.detach().flatten()
    size = math.prod(shape)
    return own.repeat(size // max(1, own.numel()) + 1)[:size].reshape(shape) if own.numel() else tensor.new_zeros(shape)


def _described(saved: object) -> str:
    return f"{saved.dtype} {list(saved.shape)} of other bits" if isinstance(saved, Tensor) else f"of {type(saved)}"


def _below_another(subject: Subject) -> list[str]:
    """Save and load it as a part of another module. Changes its tensors, whose values come back."""
    module = subject.module
    outer = nn.ModuleDict({"part": module})
    saved, there = copied_state(outer), "where the module is 'part' of another"
    findings = [f"{name} has not the prefix 'part.' {there}" for name in saved if not name.startswith("part.")]
    findings += [f"{name} is not in the state dict {there}" for name in persistent_names(module) if f"part.{name}" not in saved]
    other = not_taken(outer, subject.not_seen)
    overwrite(module)
    try:
        lost = not_loaded(outer, saved)
    except RuntimeError as error:
        return [*findings, f"what is saved is not loaded {there}: {' '.join(str(error).split())[:200]}"]
    findings += [f"{name} did not come back {there}" for name in lost]
    return [*findings, *(f"{name} does not hold the other values that were loaded {there}" for name in other if name not in lost)]


@_check("module.state_dict_round_trip")
def _state_dict_round_trip(subject: Subject) -> list[str]:
    """Loading its own state dict brings back every tensor, bit for bit, and with them the output; loading others changes it.

    What they make of the output is what the module gives that has not been called before: one that keeps a weight from its first call
    gives another. What is computed at construction, and not again behind a load, is not known from what is constant.
    """
    module = subject.module
    with untouched(module):
        module.eval()
        saved = copied_state(module)
        output = subject.call()
        repeats = subject.repeats()
        if module.state_dict().keys() != saved.keys():  # a buffer that was None has got a value, and is state from now on
            saved = copied_state(module)
        findings: list[str] = []
        for mode in (True, False):
            for part in module.modules():
                part.training = mode
            findings = _loaded_both_ways(subject, saved)
            if findings:
                break
        module.eval()
        findings += [] if not repeats or same_bits(output, subject.call()) else ["the output after loading differs"]
    return findings or (_load_others(subject) if repeats else [])


def _loaded_both_ways(subject: Subject, saved: dict[str, Any]) -> list[str]:
    """Load other values in the place of its own, and its own in the place of others."""
    module = subject.module
    other = not_taken(module, subject.not_seen)
    overwrite(module)
    facts, dtypes = facts_of(module), {name: tensor.dtype for name, tensor in known_tensors(module).items()}
    lost = not_loaded(module, saved)
    findings = [f"{line} behind a load" for line in changed_facts(facts, facts_of(module))]
    findings += [f"{name} did not come back" for name in lost]
    findings += [f"{name} does not hold the other values that were loaded" for name in other if name not in lost]
    return findings + [  # of what is not saved, too
        f"{name}: the dtype was {dtypes[name]} and is {tensor.dtype} behind a load"
        for name, tensor in known_tensors(module).items()
        if name not in lost and dtypes.get(name, tensor.dtype) != tensor.dtype
    ]


def _load_others(subject: Subject) -> list[str]:
    module, outputs = subject.module, []
    for calls_before in (False, True):
        with untouched(module):
            module.eval()
            others = halved(module.state_dict())
            if calls_before:
                subject.call()
                if module.state_dict().keys() != others.keys():
                    return []  # torch loads no state from before a call that made a buffer, so the two cannot be compared
            try:
                module.load_state_dict(others, strict=True)
            except Exception as error:
                if calls_before:  # what it has taken before
                    raise
                note_refusal(error, subject.not_seen)
                return []
            outputs.append(subject.call())
    return [] if same_bits(*outputs) else ["what was loaded after a call does not reach the output"]


@_check("module.state_dict_version", calls=False)
def _state_dict_version(subject: Subject) -> list[str]:
    """The state dict carries `_version` of every submodule, and loading hands it over."""
    module = subject.module
    versions = {name: part._version for name, part in module.named_modules()}
    handed: dict[str, Any] = {}

    def watch(part: nn.Module) -> None:
        load = part._load_from_state_dict

        def note(state: object, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
            handed[prefix.removesuffix(".")] = metadata.get("version")
            load(state, prefix, metadata, *rest)

        vars(part)["_load_from_state_dict"] = note

    state = module.state_dict()
    carried = getattr(state, "_metadata", {})
    findings = [
        f"the state dict carries version {carried.get(name, {}).get('version')} of {name or 'the module'}, not {version}"
        for name, version in versions.items()
        if carried.get(name, {}).get("version") != version
    ]
    with untouched(module):
        for part in module.modules():
            watch(part)
        module.load_state_dict(state)
    if not findings:
        wrong = [name or "the module" for name, version in versions.items() if handed.get(name) != version]
        findings = [f"loading did not hand its version to {name}" for name in wrong]
    return findings


@_check("module.non_persistent_buffers", calls=False)
def _non_persistent_buffers(subject: Subject) -> list[str]:
    """A non-persistent buffer is a buffer, is not saved, and keeps its value when a state dict is loaded."""
    module, findings = subject.module, []
    with untouched(module):
        module.register_buffer(PROBE, torch.arange(3), persistent=False)
        if PROBE not in dict(module.named_buffers()):
            findings.append("a buffer that was registered is not among named_buffers()")
        state = module.state_dict()
        left_out = non_persistent_names(module)
        findings += [f"the non-persistent buffer {name} is in the state dict" for name in sorted(left_out) if name in state]
        for name in left_out:
            state.pop(name, None)
        module.load_state_dict(state)
        if not torch.equal(getattr(module, PROBE), torch.arange(3)):
            findings.append("loading changed a non-persistent buffer")
    return findings


def _post_order(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _post_order(child)
    yield module


def _classes(modules: list[nn.Module]) -> str:
    return ", ".join(type(module).__name__ for module in modules) or "nothing"
