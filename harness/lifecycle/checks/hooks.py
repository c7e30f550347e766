"""A check of the hooks that a modifier makes through `register_hook`: they are torch's own, as long as they are awake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compressor.lifecycle import Modifier
from harness.lifecycle.checks.registry import register
from harness.lifecycle.driving.compare import Violation
from harness.lifecycle.driving.snapshot import num_hooks
from harness.lifecycle.subject import Subject

KINDS = ("forward_pre", "forward", "full_backward_pre", "full_backward")


class _Scale(nn.Module):
    """Multiplies its input with a keyword argument, and raises on a scale of 0."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        if not scale:
            raise ZeroDivisionError("the harness asked for it")
        return x * scale


@dataclass
class _Watcher:
    """Calls one module, and notes which hooks saw what."""

    modifier: Modifier
    module: nn.Module = field(default_factory=_Scale)
    seen: list[str] = field(default_factory=list)

    def hang(self, name: str, kind: Any, replaces: Any = None, **options: bool) -> Any:
        """Hang a hook up that notes its name and how many arguments it gets, and returns a replacement."""

        def hook(*args: object) -> Any:
            self.seen.append(f"{name}/{len(args)}")
            return replaces

        return self.modifier.register_hook(self.module, hook, kind, **options)

    def call(self, scale: float = 1.0, backward: bool = False) -> tuple[list[str], Tensor | None]:
        """Call the module; return what was seen and what came out."""
        self.seen.clear()
        x = torch.ones(2, requires_grad=True)
        try:
            y: Tensor = self.module(x, scale=scale)
        except ZeroDivisionError:
            return list(self.seen), None
        if backward:
            y.sum().backward()
            return list(self.seen), x.grad
        return list(self.seen), y.detach()


def _expect(what: str, seen: object, due: object) -> None:
    if seen != due:
        raise Violation("hooks", f"{what}: {due} is due, {seen} was seen")


def _order_and_arguments(watcher: _Watcher) -> None:
    for number, kind in enumerate(KINDS):
        watcher.hang(f"{kind}-{number}", kind)
        watcher.hang(f"{kind}-later", kind)
    seen, _ = watcher.call(backward=True)
    due = ["forward_pre-0/2", "forward_pre-later/2", "forward-1/3", "forward-later/3"]
    due += ["full_backward_pre-2/2", "full_backward_pre-later/2", "full_backward-3/3", "full_backward-later/3"]
    _expect("hooks of every kind, two of each, with their numbers of arguments", seen, due)
    where = [(module, kind) for module, kind in watcher.modifier.hooked_modules()]
    _expect("hooked_modules()", where, [(watcher.module, kind) for kind in KINDS for _ in range(2)])


def _replacements(watcher: _Watcher) -> None:
    watcher.hang("input", "forward_pre", (torch.full((2,), 3.0, requires_grad=True),))
    _expect("the input that a forward_pre hook returns", watcher.call()[1], _Values(3.0))
    watcher.hang("output", "forward", torch.full((2,), 5.0, requires_grad=True))
    _expect("the output that a forward hook returns", watcher.call()[1], _Values(5.0))
    watcher.modifier.remove_hooks()
    watcher.hang("gradient", "full_backward", (torch.full((2,), 7.0),))
    _expect("the gradient that a full_backward hook returns", watcher.call(backward=True)[1], _Values(7.0))


def _options(watcher: _Watcher) -> None:
    watcher.hang("pre", "forward_pre", with_kwargs=True)
    watcher.hang("post", "forward", with_kwargs=True)
    watcher.hang("always", "forward", always_call=True)
    _expect("with_kwargs and always_call", watcher.call()[0], ["pre/3", "post/4", "always/3"])
    _expect("always_call after an exception in forward", watcher.call(scale=0.0)[0], ["pre/3", "always/3"])


def _removal(watcher: _Watcher) -> None:
    handles = [watcher.hang(str(number), "forward") for number in range(3)]
    watcher.modifier.remove_hooks([handles[1]])
    _expect("after remove_hooks of the second of three", watcher.call()[0], ["0/3", "2/3"])
    watcher.modifier.remove_hooks()
    _expect("after remove_hooks()", watcher.call()[0], [])
    _expect("hooks on the module after remove_hooks()", num_hooks(watcher.module), 0)


def _owners(watcher: _Watcher, other: _Watcher) -> None:
    """Two modifiers on one module do not see each other's contexts and removals."""
    other.module, other.seen = watcher.module, watcher.seen
    watcher.hang("mine", "forward")
    other.hang("other's", "forward")
    with watcher.modifier.disable_hooks():
        _expect("disable_hooks() of one of two modifiers", watcher.call()[0], ["other's/3"])
    watcher.modifier.remove_hooks()
    _expect("remove_hooks() of one of two modifiers", watcher.call()[0], ["other's/3"])
    other.modifier.remove_hooks()


class _Values:
    """Equal with a tensor that holds one value only."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tensor) and bool((other == self.value).all())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"all {self.value:g}"


_PARTS: tuple[Callable[[_Watcher], None], ...] = (_order_and_arguments, _replacements, _options, _removal)


@register("hooks", "A hook made with register_hook gets and gives what torch's would, and belongs to its modifier alone", number=50)
def hooks(subject: Subject) -> str:
    """Hang hooks of every kind and option on a module of the harness.

    Args:
        subject: what is verified.

    Returns:
        What was seen.
    """
    for part in _PARTS:
        part(_Watcher(subject.fresh()))
    _owners(_Watcher(subject.fresh()), _Watcher(subject.fresh()))
    return f"{len(KINDS)} kinds of hooks, their arguments, return values, order, options and owners"
