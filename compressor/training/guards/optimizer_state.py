"""What an optimizer holds in Python: where its update runs behind the replay, only the update may move it.

The captured part of a step runs no Python in a replay. What it moves on the optimizer, in `zero_grad()`, the loss, a hook or a backward
pass, would stand still there, and the update, which runs on, would read it. So each recording and each audit compares before with after.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from compressor.errors import GuardDriftError
from compressor.training.guards.containers import Container, containers_of
from compressor.training.guards.frozen_value import frozen, is_foreign
from compressor.training.guards.host_facts import difference
from compressor.training.guards.python_state import one_look
from compressor.training.step.step import TrainStep


def optimizer_containers(step: TrainStep) -> list[Container]:
    """List the containers that an optimizer holds, those of optimizers within it included.

    Args:
        step: the step; not changed.

    Returns:
        Each once; its attributes first.
    """
    found: dict[int, Container] = {}
    for name, optimizer in _optimizers(step.optimizer, "the optimizer").items():
        state: Mapping[Any, Any] = getattr(optimizer, "state", {})
        groups = getattr(optimizer, "param_groups", [])
        own = [Container(f"attributes of {name}", vars(optimizer)), Container(f"groups of {name}", groups)]
        own += [Container(f"group {number} of {name}", group) for number, group in enumerate(groups)]
        own += [Container(f"state of {name}", state)]
        own += [Container(f"state {place} of {name}", one) for place, one in enumerate(state.values()) if isinstance(one, dict)]
        held = {f"attribute '{key}' of {name}": value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
        held |= {f"{one.name}: {key}": value for one in own[2:] for key, value in one.content.items() if not isinstance(value, dict)}
        found |= {id(one.content): one for one in [*reversed(containers_of(held)), *own] if id(one.content) not in found}
    return list(found.values())


def optimizer_classes(step: TrainStep) -> dict[type, Mapping[str, Any]]:
    """List the classes of an optimizer that are no library's.

    Args:
        step: the step; not changed.

    Returns:
        Class to a live view of its attributes.
    """
    optimizers = _optimizers(step.optimizer, "").values()
    return {cls: vars(cls) for one in optimizers for cls in type(one).__mro__ if not is_foreign(cls.__module__)}


@one_look()
def optimizer_facts(step: TrainStep) -> dict[str, object]:
    """Collect what an optimizer holds in Python.

    Args:
        step: the step; not changed.

    Returns:
        Name of the fact to its value; values compare by `==`.
    """
    facts: dict[str, object] = {}
    for held in optimizer_containers(step):
        values: Any = held.facts()
        facts[held.name] = dict(values) if isinstance(held.content, dict) and len(held.content) == len(values) else values
    for cls, content in optimizer_classes(step).items():
        facts[f"class {cls.__qualname__}"] = {key: frozen(value) for key, value in content.items() if not key.startswith("__")}
    return facts


def refuse_moved(before: Mapping[str, object], step: TrainStep) -> None:
    """Refuse what the captured part of a step has moved on the optimizer.

    Args:
        before: the facts before it ran.
        step: it has just run.

    Raises:
        GuardDriftError: the optimizer holds something else now.
    """
    changed = difference(before, optimizer_facts(step))
    if changed is None:
        return
    where, remedy = ("before its update", "move it in step() of the optimizer, which runs in Python")
    if step.update_is_captured:
        where, remedy = "in Python", "leave fused=True and capturable=True out of the optimizer, so that its step() runs in Python"
    raise GuardDriftError(
        f"the step changes the optimizer {where}: {changed}, and a replay would not repeat it; {remedy}, or keep it in a buffer of the "
        "model, in place"
    )


def _optimizers(optimizer: Optimizer, name: str) -> dict[str, Optimizer]:
    """An optimizer, and those that it keeps as attributes, by name."""
    found = {name: optimizer}
    for key, value in vars(optimizer).items():
        if isinstance(value, Optimizer) and not any(value is one for one in found.values()):
            found[f"'{key}' of {name}"] = value
    return found
