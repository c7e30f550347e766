"""A subject under watch: whatever a call changes beside its result is told, in every check and with one cause.

A call may change nothing that it was given, nothing that an earlier call has returned, and nothing of the process: no random number is
drawn but for the first weights of modules that are made, no hook is left, no setting of torch is moved. What the subject declares stays,
too, whether it answers or refuses. A transform changes the weights of its model, and nothing else of it; one that works online, too,
leaves hooks at layers whose weight it has changed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any

from torch import Tensor, nn

from harness.checks import protocols
from harness.checks.catalogue.kinds import KINDS, SideEffectError
from harness.lifecycle.driving.shared_code import SharedCode
from harness.lifecycle.driving.snapshot import Difference, Held, Snapshot, describe_change, freeze
from harness.lifecycle.driving.torch_settings import EnteredModes
from harness.lifecycle.process_state import ModulesMayDraw
from harness.lifecycle.subject import begin_random_numbers

# What a method may change of a module that it is given, and what it is that may; by default nothing.
_MAY_CHANGE: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("layer", "weight"): ("attribute", "tensor"),  # what it has unpacked it may keep
    ("layer", "expected_input"): ("attribute", "tensor"),
    ("expert_pruner", "prune"): ("attribute", "tensor", "module"),  # a check of its own holds tensors and settings against the base
}
# These run models or are run in other processes: what they change is looked at by checks of their own.
_UNWATCHED = frozenset({"calibration", "artifact"})
_MAKES_MODULES = frozenset({"build", "apply"})


def watched(subject: Any) -> Any:
    """Return the subject with its methods watched.

    Args:
        subject: of a kind of the catalogue.

    Returns:
        Something with the same members.
    """
    kind = getattr(subject, "kind", None)
    return subject if isinstance(subject, Watched) or kind not in KINDS or kind in _UNWATCHED else Watched(subject)


class Watched:
    """A subject whose methods are watched; all else is the subject's own."""

    def __init__(self, subject: Any) -> None:
        """Nothing has been called yet."""
        self._subject = subject
        self._protocol = getattr(protocols, KINDS[subject.kind])
        self._results: dict[str, object] = {}
        self._num_calls = 0
        self._declared = self._declares()

    def __getattr__(self, name: str) -> Any:
        """Return the subject's attribute, watched where it is a method of the protocol."""
        value = getattr(self._subject, name)
        is_method = inspect.isfunction(getattr(self._protocol, name, None))
        return partial(self._call, name, value) if is_method else value

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(_parameters(self._protocol, name), args, strict=False)), **kwargs}
        before, results = _look(given), {key: _frozen(value) for key, value in self._results.items()}
        self._num_calls += 1
        begin_random_numbers(self._num_calls)  # each call finds another seed of the caller's, which decides nothing
        around, shared, modes = Snapshot.of_surroundings(), _shared_code(given), EnteredModes()
        try:
            with ModulesMayDraw() if name in _MAKES_MODULES else nullcontext():
                result = method(*args, **kwargs)
        finally:
            # Whoever refuses what it was given leaves it as it was, too.
            process = around.differences(Snapshot.of_surroundings(), ("threads",)) + shared.differences()
            modes.put_back()  # nothing below is to go through them
            shared.put_back()
            self._refuse(name, process, before, given, results)
            self._refuse_declared(name)
        if isinstance(getattr(result, "kind", None), str):
            return watched(result)
        if isinstance(result, nn.Module):
            return result
        self._results[name] = result
        return _by_values(result)

    def _declares(self) -> dict[str, object]:
        """What the subject says of itself; of functions, which a property may make anew, that they are there."""
        values = {name: getattr(self._subject, name) for name in self._protocol.__annotations__}
        return {name: callable(value) or freeze(value) for name, value in values.items()}

    def _refuse_declared(self, method: str) -> None:
        """Against what was said before the first call, so that no later check believes what an earlier one has changed."""
        for name, value in self._declares().items():
            if self._declared[name] != value:
                change = describe_change(self._declared[name], value)
                raise SideEffectError(f"{method}() has changed the subject's {name}: {change}", f"declared {name}")

    def _refuse(
        self,
        name: str,
        process: Sequence[Difference],
        before: Mapping[str, object],
        given: Mapping[str, Any],
        results: Mapping[str, object],
    ) -> None:
        may = _MAY_CHANGE.get((self._subject.kind, name), ())
        for key, value in _look(given).items():
            was = before[key]
            if isinstance(was, Snapshot) and isinstance(value, Snapshot):
                inside = was.differences(value, (*may, *_AROUND))
                if self._subject.kind == "transform":
                    inside = _beside_weights(inside, was, value, given[key], online="online" in self._subject.tags)
                else:
                    inside = [one for one in inside if not _of_another_module(one, self._subject.kind)]
                if inside:
                    raise SideEffectError(f"{name}() has changed the {key} that it was given: {inside[0]}", f"{key} {inside[0].kind}")
            elif was != value:
                raise SideEffectError(f"{name}() has changed the {key} that it was given: {describe_change(was, value)}", key)
        if process:
            raise SideEffectError(f"{name}() has changed something of the process: {process[0]}", str(process[0]))
        for key, value in results.items():
            if _frozen(self._results[key]) != value:
                raise SideEffectError(f"{name}() has changed what {key}() returned before; give each call memory of its own", f"{key}()")


def _by_values(result: Any) -> Any:
    """What checks see of a result: its values. Whether it has a gradient is the subject's own affair, and numbers are not read from one."""
    if isinstance(result, Tensor):
        return result.detach() if result.requires_grad else result
    if isinstance(result, protocols.Quantized | protocols.Solved):
        return replace(result, **{field.name: _by_values(getattr(result, field.name)) for field in fields(result)})
    if isinstance(result, Mapping):
        return {key: _by_values(value) for key, value in result.items()}
    return [_by_values(one) for one in result] if isinstance(result, list) else result


@cache
def _parameters(protocol: type, method: str) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(getattr(protocol, method)).parameters if name != "self")


def _of_another_module(one: Difference, kind: str) -> bool:
    """Whether something came, or went with a module that another takes the place of; a hook that runs does not."""
    if one.kind == "hooks":
        return kind == "expert_pruner" and one.text in ("appeared: []", "vanished: []")
    return "appeared" in one.text or (kind == "expert_pruner" and one.text.startswith("vanished"))


# To untie a head is said in the config, and in what transformers remembers of ties.
_UNTIED = re.compile(r"changed in ([\w.]*\.)?tie_word_embeddings: True -> False")
_OF_NEW = ("grad", "requires_grad")
_TIES = ("_tied_weights_keys", "all_tied_weights_keys", "_dynamic_tied_weights_keys")


def _beside_weights(found: Sequence[Difference], before: Snapshot, after: Snapshot, model: nn.Module, *, online: bool) -> list[Difference]:
    """Of what a transform has changed of its model, that which is neither a weight nor the word that the head is tied."""
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    # A weight in the place of another has attributes of its own: that those of the old one are gone is no change.
    new = {name for name in weights if _weight_of(before, name) != _weight_of(after, name)}
    hooked = {one.where.rpartition(".")[0] for one in found if one.kind == "tensor"} if online else set()
    found = [one for one in found if one.kind != "hooks" or one.where.rpartition(".")[0] not in hooked]
    left = [one for one in found if not _may_come_of_weights(one, weights, new)]
    return sorted(left, key=lambda one: one.kind in _OF_NEW)  # what a new tensor brings along comes behind it


def _may_come_of_weights(one: Difference, weights: Collection[str], new: Collection[str]) -> bool:
    if one.kind == "tensor":
        return one.where in weights
    if one.kind in _OF_NEW:
        return one.where in new and one.text.startswith("appeared")
    if one.kind != "attribute":
        return False
    owner, _, name = one.where.rpartition(".")
    if owner in new and one.text.startswith("vanished"):
        return True
    return name in _TIES or (name == "config" and _UNTIED.fullmatch(one.text) is not None)


def _weight_of(snapshot: Snapshot, name: str) -> object:
    """The very tensor that stands there, without its values."""
    held = snapshot.items.get(("tensor", name))
    return held[0] if isinstance(held, list) else None


def _shared_code(given: Mapping[str, Any]) -> SharedCode:
    """What the files of the given models share with others, as one is that `apply` has patched."""
    return SharedCode(module for value in given.values() if isinstance(value, nn.Module) for module in value.modules())


_AROUND = ("rng", "torch", "threads")


def _look(given: Mapping[str, Any]) -> dict[str, object]:
    return {key: Snapshot(value) if isinstance(value, nn.Module) else _frozen(value) for key, value in given.items() if _is_held(value)}


def _frozen(value: object) -> object:
    return freeze(value, tensors=Held)


def _is_held(value: object) -> bool:
    """Lists, tensors and modules; other sequences may make their items as they are asked for."""
    return isinstance(value, list | tuple | Tensor | nn.Module | protocols.Quantized)
