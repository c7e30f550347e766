"""Checks of a module's call: which hook comes when, what it is given, and what it may replace.

Hooks that are seen to run hand on clones, so a check sees by identity (`is`) whether the next one got what the last one returned. That is
done without gradients: a full backward hook of the module's own puts views in the place of tensors that carry some.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from harness.modules.subject import ForwardKind, Hooks, Kind, ModuleCheck, NotApplicableError, Owner, Subject, collect, run, untouched

CHECKS: list[ModuleCheck] = []
_check = collect(CHECKS)
_BACKWARD: tuple[Kind, ...] = ("full_backward_pre", "full_backward")
_OPTIONS: dict[Kind, tuple[str, ...]] = {
    "forward_pre": ("", "prepend", "with_kwargs"),
    "forward": ("", "prepend", "with_kwargs", "always_call"),
    "full_backward_pre": ("", "prepend"),
    "full_backward": ("", "prepend"),
}
_OWNERS: tuple[Owner, ...] = ("own", "global")
_Inputs = tuple[tuple[Any, ...], dict[str, Any]]
_Lone = tuple[ForwardKind, Owner, tuple[str, ...]]
_BOTH = ("with_kwargs", "always_call")
# Hooks that are looked at alone, and the options that are on together; torch's global pre-hooks have none.
_LONE_PRE: tuple[_Lone, ...] = (("forward_pre", "own", ()), ("forward_pre", "global", ()))
_LONE_PRE_BY_NAME: tuple[_Lone, ...] = (("forward_pre", "own", ("with_kwargs",)),)
_LONE_FORWARD: tuple[_Lone, ...] = tuple(
    ("forward", whose, options) for whose in _OWNERS for options in ((), ("with_kwargs",), ("always_call",), _BOTH)
)
# When forward raises, torch hands a global one no keyword inputs, even if it asks for them.
_LONE_IN_FAILURE = tuple(lone for lone in _LONE_FORWARD if lone[1:] != ("global", _BOTH))


class _PlannedError(NotImplementedError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError):
    """What a watched forward raises on purpose: whoever swallows one kind of error swallows it."""


class _OtherError(Exception):
    """What one raises that is of no such kind."""


@_check("module.forward_hook_order")
def _forward_hook_order(subject: Subject) -> list[str]:
    """Global pre-hooks, own pre-hooks, forward, global hooks and own hooks run in this order; a prepended one is the first of its kind."""
    log: list[str] = []
    with subject.watched_forward(lambda args, kwargs: log.append("forward")), subject.hooks() as hooks:
        _note_forward_hooks(hooks, log)
        subject.call()
    expected = ["global pre-hook", "prepended pre-hook", "pre-hook 1", "pre-hook 2", "forward"]
    findings = _difference(log, [*expected, "global hook", "prepended hook", "hook 1", "hook 2"])
    return findings + [line for kind in get_args(ForwardKind) for line in _alone(subject, kind, subject.call)]


def _alone(subject: Subject, kind: Kind, call: Callable[[], object]) -> list[str]:
    """A hook runs where there is no other, its own or a global one: a module may skip what runs hooks if it sees none.

    Global backward hooks are left out: with them torch refuses every child that works in place.
    """
    findings = []
    for whose in _OWNERS[: 1 if kind in _BACKWARD else 2]:
        log: list[str] = []
        with subject.hooks() as hooks:
            hooks.register(whose, kind, _note(log, "it"))
            call()
        findings += [] if log == ["it"] else [f"a single {kind} hook, {whose}, ran {len(log)} times in a call"]
    return findings


@_check("module.backward_hooks")
def _backward_hooks(subject: Subject) -> list[str]:
    """Full backward pre-hooks run before full backward hooks, each kind in order, and each may replace the gradients that it is given."""
    places, args, ends = _differentiable(subject)
    leaves = [args[place] for place in places]
    log: list[str] = []
    seen: list[Tensor] = []
    reached: list[Tensor] = []

    def replace_output(module: nn.Module, grad_output: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        log.append("pre-hook 1")
        return tuple(None if grad is None else torch.full_like(grad, 0.5) for grad in grad_output)

    def replace_input(module: nn.Module, grad_input: Sequence[Tensor | None], grad_output: Sequence[Tensor | None]) -> tuple[Any, ...]:
        log.append("hook 1")
        seen.extend(grad for grad in grad_output if grad is not None)
        reached.extend(leaf for leaf, grad in zip(leaves, (grad_input[place] for place in places), strict=True) if grad is not None)
        return tuple(None if grad is None else torch.full_like(grad, 3.0) for grad in grad_input)

    with subject.hooks() as hooks, torch.enable_grad():
        hooks.own("forward_pre", lambda module, changed: args)  # what a pre-hook of the module's own makes of them is no leaf
        hooks.own("forward", _note(log, "forward hook"))
        hooks.own("full_backward_pre", replace_output)
        hooks.own("full_backward_pre", _note(log, "pre-hook 2"))
        hooks.own("full_backward_pre", _note(log, "prepended pre-hook"), prepend=True)
        hooks.own("full_backward", replace_input)
        hooks.own("full_backward", _note(log, "hook 2"))
        hooks.own("full_backward", _note(log, "prepended hook"), prepend=True)
        _send_ones_back(_outputs_with_gradient(subject, args), ends)
    expected = ["forward hook", "prepended pre-hook", "pre-hook 1", "pre-hook 2", "prepended hook", "hook 1", "hook 2"]
    findings = _difference(log, expected)
    if not findings and not all(bool((grad == 0.5).all()) for grad in seen):
        findings.append("the gradient that the pre-hook returned did not reach the backward hook")
    if not findings and not all(leaf.grad is not None and bool((leaf.grad == 3.0).all()) for leaf in reached):
        findings.append("the gradient that the backward hook returned did not reach the input")
    call = partial(_there_and_back, subject, args, ends)
    return findings or [line for kind in _BACKWARD for line in _alone(subject, kind, call)]


@_check("module.input_replacement")
def _input_replacement(subject: Subject) -> list[str]:
    """What a pre-hook returns, as a tuple or as one value, goes to the next pre-hook, to forward and to the forward hooks."""
    first = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), subject.in_order())
    second = tree_map_only(Tensor, torch.clone, first)
    got: dict[str, tuple[Any, ...]] = {}

    def replace_again(module: nn.Module, args: tuple[Any, ...]) -> Any:
        got["the second pre-hook"] = args
        return second[0] if len(second) == 1 and not isinstance(second[0], tuple) else second  # torch takes a tuple for all inputs

    with subject.watched_forward(lambda args, kwargs: got.update(forward=args)), subject.hooks() as hooks:
        hooks.own("forward_pre", lambda module, args: first)
        hooks.own("forward_pre", replace_again)
        hooks.own("forward", lambda module, args, output: got.update({"the forward hook": args}))
        run(subject.module, subject.in_order(), {})
    expected = {"the second pre-hook": first, "forward": second, "the forward hook": second}
    findings = [
        f"{who} did not get what the pre-hook before it returned" for who, what in expected.items() if not _same(got.get(who), what)
    ]
    return findings or _in_vain(subject, lambda: (subject.in_order(), {}), _LONE_PRE)


@_check("module.output_replacement")
def _output_replacement(subject: Subject) -> list[str]:
    """What a forward hook returns goes to the next hook and to the caller; None leaves the output."""
    outputs: list[Any] = []
    got: list[Any] = []

    def replace(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        got.append(output)
        outputs.append(tree_map_only(Tensor, torch.clone, output))
        return outputs[-1]

    with subject.hooks() as hooks, torch.no_grad():
        hooks.own("forward", replace)
        hooks.own("forward", replace)
        hooks.own("forward", lambda module, args, output: None)
        returned = subject.call()
    if len(got) != 2:
        return [f"of two forward hooks {len(got)} ran"]
    findings = [] if got[1] is outputs[0] else ["the second hook did not get what the first returned"]
    findings += [] if returned is outputs[1] else ["the caller did not get what the last hook returned"]
    return findings or [line for inputs in _ways(subject) for line in _in_vain(subject, inputs, _LONE_FORWARD)]


@_check("module.hooks_with_kwargs")
def _hooks_with_kwargs(subject: Subject) -> list[str]:
    """A hook, alone too, gets what its options ask for and no keyword inputs else; a pre-hook with_kwargs may replace all inputs."""
    findings = []
    for inputs in _ways(subject):
        findings += _lone_hooks(subject, inputs, (*_LONE_PRE, *_LONE_PRE_BY_NAME, *_LONE_FORWARD))
        findings += _replaced(subject, *inputs()) or _in_vain(subject, inputs, _LONE_PRE_BY_NAME)
    try:
        return findings + _by_name(subject)
    except NotApplicableError as reason:
        subject.not_seen.append(f"keyword inputs were not looked at: {reason}")
        return findings


def _ways(subject: Subject) -> list[Callable[[], _Inputs]]:
    """The inputs as given; and by name where they are given in order, or in order where they are given by name."""

    def otherwise() -> _Inputs:
        return ((), subject.by_keyword()) if subject.given[0] else (subject.in_order(), {})

    with suppress(NotApplicableError):
        otherwise()
        return [subject.inputs, otherwise]
    return [subject.inputs]


def _lone_hooks(subject: Subject, inputs: Callable[[], _Inputs], hooks: Sequence[_Lone], forward_fails: bool = False) -> list[str]:
    """Name the hooks that, each alone, do not run as torch runs them."""
    how = "when forward raises" if forward_fails else "in a call"
    return [
        f"{_named(lone)} does not get what torch hands it {how}"
        for lone in hooks
        if not _runs_as_of_torch(subject, inputs(), lone, forward_fails)
    ]


def _named(lone: _Lone) -> str:
    kind, whose, options = lone
    return f"a single {kind} hook, {whose}, {' and '.join(options) or 'without options'},"


def _runs_as_of_torch(subject: Subject, inputs: _Inputs, lone: _Lone, forward_fails: bool) -> bool:
    """Whether a hook that is alone runs once, with the inputs of forward as far as it asks for them, and with its output; or not at all."""
    kind, whose, options = lone
    got: list[_Inputs] = []
    seen: list[tuple[Any, ...]] = []
    output = None

    def watch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        got.append((args, kwargs))
        if forward_fails:
            raise _OtherError("planned by the harness")

    with torch.no_grad(), subject.watched_forward(watch), subject.hooks() as hooks, suppress(_OtherError):
        hooks.register(whose, kind, lambda module, *handed: seen.append(handed), **dict.fromkeys(options, True))
        output = run(subject.module, *inputs)
    if not got or (forward_fails and "always_call" not in options):
        return not seen
    args, kwargs = got[0]
    expected = (args, *([kwargs] if "with_kwargs" in options else []), *([output] if kind == "forward" else []))
    # Hooks that the module came with stand between a global one and the last that it gets, or give an output where forward fails.
    end = -1 if _brought_along(subject, kind) and (forward_fails or whose == "global") else None
    return len(seen) == 1 and _same(_plain(seen[0][:end]), _plain(expected[:end]))


def _in_vain(subject: Subject, inputs: Callable[[], _Inputs], hooks: Sequence[_Lone]) -> list[str]:
    """Name the hooks that, each alone, return what the next one does not get."""
    return [f"{_named(lone)} returns what the next one does not get" for lone in hooks if not _is_taken(subject, inputs(), lone)]


def _is_taken(subject: Subject, inputs: _Inputs, lone: _Lone) -> bool:
    """Whether what a hook that is alone returns reaches whoever is next: forward, the caller, or an own hook that the module came with."""
    kind, whose, options = lone
    is_pre = kind == "forward_pre"
    new: list[Any] = []
    later: list[tuple[Any, ...]] = []  # what the next ones are handed

    def replace(module: nn.Module, *handed: Any) -> Any:
        later.clear()
        new[:] = tree_map_only(Tensor, torch.clone, _plain(handed) if is_pre else handed[-1:])
        return tuple(new) if len(new) > 1 else new[0]  # with_kwargs, a pre-hook returns all inputs

    with torch.no_grad(), subject.watched_forward(lambda *given: later.append(given)), subject.hooks() as hooks:
        hooks.register(whose, kind, replace, **dict.fromkeys(options, True))
        if whose == "global" and _brought_along(subject, kind):
            hooks.own(kind, lambda module, *handed: later.append(handed), prepend=True)
        later.append((run(subject.module, *inputs),))
    return not new or _same([*(later[0][: len(new)] if is_pre else later[0][-1:])], new)


def _brought_along(subject: Subject, kind: ForwardKind) -> bool:
    return bool(subject.module._forward_pre_hooks if kind == "forward_pre" else subject.module._forward_hooks)


def _plain(handed: tuple[Any, ...]) -> list[Any]:
    """A pre-hook that the module came with may have returned a list of inputs, or a mapping of another class; forward gets plain ones."""
    return [tuple(one) if isinstance(one, list) else dict(one) if isinstance(one, Mapping) else one for one in handed]


def _replaced(subject: Subject, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Name those who do not get what a pre-hook with_kwargs returns."""
    new: _Inputs = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))
    got: dict[str, tuple[Any, ...]] = {}
    with torch.no_grad(), subject.watched_forward(lambda *given: got.update(forward=given)), subject.hooks() as hooks:
        hooks.own("forward_pre", lambda module, *given: new, with_kwargs=True)
        hooks.own("forward", lambda module, *handed: got.update({"the plain hook": handed[:-1]}))
        hooks.own("forward", lambda module, *handed: got.update({"the hook with_kwargs": handed[:-1]}), with_kwargs=True)
        run(subject.module, args, kwargs)
    expected = {"forward": new, "the plain hook": new[:1], "the hook with_kwargs": new}
    return [f"{who} did not get what a pre-hook with_kwargs returned" for who, what in expected.items() if not _same(got.get(who), what)]


def _by_name(subject: Subject) -> list[str]:
    """Name the pre-hooks that do not get the inputs of a call by name as they are: the plain one nothing, the other all of it."""
    given = subject.by_keyword()
    if subject.module._forward_pre_hooks:  # that may have replaced them
        return []
    got: dict[str, tuple[Any, ...]] = {}
    with subject.hooks() as hooks:
        hooks.own("forward_pre", lambda module, *handed: got.update({"the plain pre-hook": handed}))
        hooks.own("forward_pre", lambda module, *handed: got.update({"the pre-hook with_kwargs": handed}), with_kwargs=True)
        run(subject.module, (), given)
    expected = {"the plain pre-hook": ((),), "the pre-hook with_kwargs": ((), given)}
    return [f"{who} did not get the keyword inputs that it should" for who, what in expected.items() if not _same(got.get(who), what)]


@_check("module.always_called_hooks")
def _always_called_hooks(subject: Subject) -> list[str]:
    """When forward raises, the error comes through, hooks with always_call run once, alone too, and the others do not."""
    log: list[str] = []

    def fail(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _PlannedError("planned by the harness")

    findings = []
    with subject.watched_forward(fail), subject.hooks() as hooks:
        hooks.own("forward", _note(log, "hook"))
        for whose in _OWNERS:
            hooks.register(whose, "forward", _note(log, f"first {whose} hook with always_call"), always_call=True)
            hooks.register(whose, "forward", _note(log, f"second {whose} hook with always_call"), always_call=True)
        try:
            subject.call()
            findings.append("the error that forward raised did not reach the caller")
        except _PlannedError:
            pass
    expected = [f"{which} {whose} hook with always_call" for whose in reversed(_OWNERS) for which in ("first", "second")]
    findings += _difference(log, expected, "after an error in forward: ")
    findings += _lone_hooks(subject, subject.inputs, _LONE_IN_FAILURE, forward_fails=True)
    log.clear()
    with subject.hooks() as hooks:
        hooks.own("forward", _note(log, "hook with always_call"), always_call=True)
        subject.call()
    return findings + _difference(log, ["hook with always_call"], "after a forward without error: ")


@_check("module.bare_forward")
def _bare_forward(subject: Subject) -> list[str]:
    """`module.forward(...)` runs no hook of the module, neither its own nor a global one."""
    log: list[str] = []
    with subject.hooks() as hooks:
        _note_forward_hooks(hooks, log)
        run(subject.module.forward, *subject.inputs())
    return _difference(log, [])


@_check("module.hook_removal")
def _hook_removal(subject: Subject) -> list[str]:
    """A hook whose handle was removed does not run any more, and those before and behind it still do."""
    findings = [line for kind in get_args(ForwardKind) for line in _removed(subject, kind, subject.call)]
    try:
        _, args, ends = _differentiable(subject)
    except NotApplicableError as reason:
        subject.not_seen.append(f"handles of backward hooks were not looked at: {reason}")
        return findings
    call = partial(_there_and_back, subject, args, ends)
    return findings + [line for kind in _BACKWARD for line in _removed(subject, kind, call)]


def _removed(subject: Subject, kind: Kind, call: Callable[[], object]) -> list[str]:
    """Remove a hook that is alone, and one with each of torch's options from between two others; that hooks run at all others tell."""
    log: list[str] = []
    with subject.hooks() as hooks:
        handle = hooks.own(kind, _note(log, f"removed {kind} hook, alone,"))
        call()
        if not log:
            return []
        log.clear()
        handle.remove()
        call()
    if log:
        return _difference(log, [])
    expected, handles = [], []
    with subject.hooks() as hooks:
        for option in _OPTIONS[kind]:
            what, chosen = f"{kind} hook{f' {option}' if option else ''}", {option: True} if option else {}
            hooks.own(kind, _note(log, f"{what} before"), **chosen)
            handles.append(hooks.own(kind, _note(log, f"removed {what}"), **chosen))
            hooks.own(kind, _note(log, f"{what} behind"), **chosen)
            expected += [f"{what} before", f"{what} behind"]
        call()
        if len(log) != len(expected) + len(handles):
            return []
        log.clear()
        for handle in handles:
            handle.remove()
        call()
    return _difference(sorted(log), sorted(expected))


def _note_forward_hooks(hooks: Hooks, log: list[str]) -> None:
    """Register hooks that write their names, in an order that differs from the one they must run in."""
    names: dict[ForwardKind, str] = {"forward_pre": "pre-hook", "forward": "hook"}
    for kind, name in names.items():
        hooks.own(kind, _note(log, f"{name} 1"))
        hooks.own(kind, _note(log, f"{name} 2"))
        hooks.own(kind, _note(log, f"prepended {name}"), prepend=True)
        hooks.everywhere(kind, _note(log, f"global {name}"))


def _note(log: list[str], name: str) -> Callable[..., None]:
    return lambda *seen: log.append(name)


def _difference(log: list[str], expected: list[str], where: str = "") -> list[str]:
    if log == expected:
        return []
    return [f"{where}{', '.join(log) or 'nothing'} ran, where {', '.join(expected) or 'nothing'} should"]


def _same(first: Any, second: Any) -> bool:
    """The same structure around the very same objects."""
    (leaves, tree), (other_leaves, other_tree) = tree_flatten(first), tree_flatten(second)
    return tree == other_tree and all(leaf is other for leaf, other in zip(leaves, other_leaves, strict=True))


def _differentiable(subject: Subject) -> tuple[list[int], tuple[Any, ...], list[Tensor] | None]:
    """Clone the inputs; those at the returned places carry gradients, and the output sends them some. Hooks see no nested ones.

    The last value says where a backward ends: at them, so that no hook on a parameter runs, for it may be an optimizer; or at every leaf
    (None), where the module takes nothing less, as reentrant checkpointing does.
    """
    args = tuple(arg.detach().clone() if isinstance(arg, Tensor) else arg for arg in subject.in_order())
    floats = [place for place, arg in enumerate(args) if isinstance(arg, Tensor) and arg.is_floating_point()]
    if not floats:
        raise NotApplicableError("no input can carry a gradient")
    if _writes_to_inputs(subject):
        raise NotApplicableError("a forward changes its input in place, where torch runs no full backward hooks")
    refusal: RuntimeError | None = None
    for places in (floats, *([place] for place in floats)):  # torch may have no derivative by one of them, as by a loss's target
        leaves = [args[place].requires_grad_() for place in places]
        try:
            ends = _ends(subject, args, leaves)
        except RuntimeError as error:
            refusal = refusal or error
            for leaf in leaves:
                leaf.requires_grad_(False)
            continue
        if all(leaf.grad is None for leaf in leaves):
            raise NotApplicableError("no gradient goes from an output to an input")
        for leaf in leaves:
            leaf.grad = None
        return places, args, ends
    raise refusal or NotApplicableError("no input can carry a gradient")


def _ends(subject: Subject, args: tuple[Any, ...], leaves: list[Tensor]) -> list[Tensor] | None:
    """Go there and back once, and say where the way back ended."""
    with untouched(subject.module):
        try:
            _there_and_back(subject, args, leaves)
        except RuntimeError:
            _there_and_back(subject, args, None)
            return None
    return leaves


def _there_and_back(subject: Subject, args: tuple[Any, ...], ends: list[Tensor] | None) -> None:
    with torch.enable_grad():
        _send_ones_back(_outputs_with_gradient(subject, args), ends)


def _send_ones_back(outputs: list[Tensor], ends: list[Tensor] | None) -> None:
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs], inputs=ends)


def _writes_to_inputs(subject: Subject) -> bool:
    args, kwargs = subject.inputs()
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and not leaf.is_inference()]
    versions = [tensor._version for tensor in tensors]
    with untouched(subject.module), torch.no_grad():
        run(subject.module, args, kwargs)
    return versions != [tensor._version for tensor in tensors]


def _outputs_with_gradient(subject: Subject, args: tuple[Any, ...]) -> list[Tensor]:
    """Those whose gradients torch shows to hooks."""
    output = run(subject.module, args, {})
    if not isinstance(output, Tensor | tuple):
        raise NotApplicableError(f"torch runs backward hooks for a tensor or a tuple of them, and the output is a {type(output).__name__}")
    return [one for one in (output if isinstance(output, tuple) else (output,)) if isinstance(one, Tensor) and one.requires_grad]
