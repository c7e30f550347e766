"""A quick look at everything the guards watch: the same objects at the same addresses cannot mean another step.

Naming every tensor and every fact takes as long as replaying a small model. So the guards first compare objects by identity, which is done
without a line of Python per attribute, and only where one differs do they compare by name and value. The objects are held, so that no
other one can take over an identity. What is empty is only asked whether it still is. Values of dicts and lists are taken with the garbage
collector's own traversal, several times as fast as an iterator, where it has been seen to give them and nothing else.
"""

from __future__ import annotations

import gc
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compressor.numerics.precision import KERNEL_SETTINGS, float32_precisions
from compressor.training.guards.containers import (
    TABLES,
    all_modules,
    arrays,
    classes,
    containers,
    guarded_tensors,
    loose_tensors,
    watches_update,
)
from compressor.training.guards.frozen_value import MISSING, PLAIN, Plain, Same, fact, frozen, is_foreign
from compressor.training.guards.python_state import GLOBAL_HOOKS, one_look, other_modules, variables
from compressor.training.guards.reach import BOOKS, HOOKS
from compressor.training.step.step import HasTensors, TrainStep

# The facts of the host that a captured step takes for granted, by name, so that a change can be said in words.

_MAX_SPELLED = 8
_MAX_TEXT = 200


@one_look()
def host_facts(step: TrainStep) -> dict[str, object]:
    """Collect what a capture freezes beside tensors.

    Args:
        step: the step; not changed.

    Returns:
        Name of the fact to its value; values compare by `==`.
    """
    facts: dict[str, object] = dict(settings(step))
    for name, module in step.model.named_modules():
        facts[f"module {name or 'model'}"] = _module_facts(module)
    facts |= {f"parameter {name}": _gradient_facts(parameter) for name, parameter in step.parameters().items()}
    for name, buffer in step.model.named_buffers():
        facts[f"buffer {name}"] = {**_gradient_facts(buffer), "grad": Same(buffer.grad)}
    facts |= _optimizer_facts(step)
    facts |= _told_apart((name, frozen(getter())) for name, getter in variables(step))
    facts |= _told_apart((f"content of {held.name}", held.facts()) for held in containers(step))
    for name, module in other_modules(step).items():
        facts[name] = {**_module_facts(module), **{key: Same(value) for key, value in module.state_dict(keep_vars=True).items()}}
    for number, (cls, content) in enumerate(classes(step).items()):  # two classes may have one name
        facts[f"class {cls.__qualname__} ({number})"] = {key: frozen(value) for key, value in content.items() if not key.startswith("__")}
    return facts


def _told_apart(facts: Iterable[tuple[str, object]]) -> dict[str, object]:
    """Number those of one name: two functions may be called alike, and so may two keys of a dict."""
    found: dict[str, object] = {}
    seen: Counter[str] = Counter()
    for name, value in facts:
        seen[name] += 1
        found[name if seen[name] == 1 else f"{name} ({seen[name]})"] = value
    return found


def _optimizer_facts(step: TrainStep) -> dict[str, object]:
    facts: dict[str, object] = {}
    is_watched = watches_update(step)
    for number, group in enumerate(step.optimizer.param_groups):
        if is_watched:
            facts |= {
                f"optimizer group {number}: {key}": fact(value) for key, value in group.items() if not isinstance(value, Tensor | list)
            }
        facts[f"optimizer group {number}: parameters"] = tuple(map(Same, group["params"]))
    if is_watched:
        hooks = (step.optimizer._optimizer_step_pre_hooks, step.optimizer._optimizer_step_post_hooks)
        # Of torch's GradScaler, which sets them before each step; a fused kernel reads them.
        facts |= {f"optimizer: {key}": Same(getattr(step.optimizer, key, None)) for key in ("grad_scale", "found_inf")}
        facts["optimizer hooks"] = tuple(Same(hook) for some in hooks for hook in some.values())
    return facts


def difference(before: Mapping[str, object], after: Mapping[str, object]) -> str | None:
    """Say in words what differs first between two collections of facts.

    Args:
        before: facts at capture.
        after: facts now.

    Returns:
        One clause, or None where all are equal.
    """
    if before == after:
        return None
    for name in before:  # what has another value says more than what went or came with it
        if name in after and before[name] != after[name]:
            return f"{name} was {_spell(before[name], after[name])}"
    name = next(name for name in {**before, **after} if name not in before or name not in after)
    return f"{name} is {'gone' if name in before else 'new'}"


def settings(step: TrainStep) -> Iterator[tuple[str, object]]:
    """List the settings of torch and of the step itself.

    Args:
        step: the step; not changed.

    Yields:
        Name and value.
    """
    device = step.device.type
    yield "number of threads", torch.get_num_threads()
    yield "deterministic algorithms", torch.are_deterministic_algorithms_enabled()
    yield "autocast", (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    yield "default dtype", torch.get_default_dtype()
    yield "matmul precision", float32_precisions()
    yield "grad mode", torch.is_grad_enabled()
    yield "anomaly detection", looks_for_nan()
    yield from ((name, ask()) for name, (ask, _) in KERNEL_SETTINGS.items())
    yield "step settings", (Same(step.loss_fn), step.accumulate, step.clip_norm, step.autocast, Same(step.averages))
    yield "update in the capture", step.update_is_captured
    yield "parts of the step", (Same(step.model), Same(step.optimizer), Same(step.session))
    yield "global hooks", tuple(Same(hook) for table in GLOBAL_HOOKS for hook in table.values())


def looks_for_nan() -> bool:
    """Say whether torch reads every gradient on the host, which no replay would."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


_BACKENDS = tuple(ask for ask, _ in KERNEL_SETTINGS.values())


def backends() -> tuple[object, ...]:
    """Return which implementations torch may choose from, and how they add up."""
    return tuple([ask() for ask in _BACKENDS])


def _module_facts(module: nn.Module) -> dict[str, object]:
    values = module.__dict__
    facts = {key: fact(value) for key, value in values.items() if key not in BOOKS or type(value) in PLAIN}
    facts["class"] = type(module)
    facts |= {f"order of {kind}": tuple(values[kind]) for kind in ("_modules", "_parameters", "_buffers")}
    facts["forward"] = Same(values.get("forward"))
    hooks = tuple(Same(hook) for kind in HOOKS for hook in values[kind].values())
    if hooks:
        facts["hooks"] = hooks
    return facts


def _gradient_facts(tensor: Tensor) -> dict[str, object]:
    hooks = (getattr(tensor, kind, None) or {} for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"))
    found = tuple(Same(hook) for some in hooks for hook in some.values())
    return {"requires_grad": tensor.requires_grad, "retains_grad": tensor.retains_grad, **({"hooks": found} if found else {})}


def _spell(before: Any, after: Any) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        key = next(key for key in {**before, **after} if before.get(key, MISSING) != after.get(key, MISSING))
        return f"{key}={_spell(before.get(key, MISSING), after.get(key, MISSING))}"
    if isinstance(before, tuple) and isinstance(after, tuple):
        # Of a large one only what differs: an environment holds what belongs into no log.
        gone, come = (tuple(item for item in some if item not in other) for some, other in ((before, after), (after, before)))
        if (gone or come) and max(len(before), len(after)) > _MAX_SPELLED:
            return f"{gone!r} and is now {come!r}, among {len(after)}"
        if _is_array(before) and _is_array(after) and before[:-1] == after[:-1] and len(before[-1]) == len(after[-1]):
            return _spell_number(before, after)
    old, new = repr(before), repr(after)
    return f"{_cut(old)} and is now {'another of the same kind, or lies otherwise' if old == new else _cut(new)}"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT // 2]}...{text[-_MAX_TEXT // 2 :]}"


def _is_array(facts: tuple[Any, ...]) -> bool:
    return len(facts) > 1 and isinstance(facts[-1], bytes)


def _spell_number(before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
    """The first number of an array that is another one."""
    try:
        gone, come = (np.frombuffer(facts[-1], facts[-2]) for facts in (before, after))
    except (TypeError, ValueError):  # a type that numpy cannot read from bytes
        gone, come = (np.frombuffer(facts[-1], "B") for facts in (before, after))
    size = gone.dtype.itemsize
    place = int((np.frombuffer(before[-1], "B") != np.frombuffer(after[-1], "B")).argmax()) // size
    return f"{gone[place]!s} at place {place} and is now {come[place]!s}, among {len(come)} numbers"


def _array_facts(some: Any) -> tuple[Any, ...]:
    if isinstance(some, np.ndarray):
        return some.shape, some.strides, some.dtype, some.tobytes()
    return "B", bytes(some)


_tensor_facts = operator.attrgetter("grad", "requires_grad", "retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_step_facts = operator.attrgetter("model", "optimizer", "session", "loss_fn", "accumulate", "clip_norm", "autocast", "averages")


class Identities:
    """The objects of a step at one moment.

    Args:
        step: the step; not changed.
    """

    @one_look()
    def __init__(self, step: TrainStep) -> None:
        self._step, self._device = step, step.device.type
        self._parameters = list(step.parameters().values())
        self._learning: list[Tensor] = [*self._parameters, *step.model.buffers()]  # a buffer may be asked for its gradient, too
        self._modifiers = [modifier for modifier in step.modifiers if isinstance(modifier, HasTensors)]
        held = [held.content for held in containers(step)]
        self._keyed = [_plain(content) for content in held if isinstance(content, Mapping)]  # the last value may have got another key
        self._getters = [getter for _, getter in variables(step, with_modules=True)]
        self._getters += [partial(getattr, content, "default_factory") for content in held if isinstance(content, defaultdict)]
        self._arrays = arrays(step)
        tables = list(map(_plain, _tables(step)))
        self._owners = [module for _, module in all_modules(step)]
        self._modules = [module.__dict__ for module in self._owners]
        self._attributes = [partial(_own_attributes(table), table) for table in self._modules]
        self._empty = [table for table in tables if not table]
        filled = [table for table in tables if table]
        self._traversed = [table for table in filled if _identical(gc.get_referents(table), list(_values(table)))]
        self._views = [_values(table) for table in filled if not any(table is traversed for traversed in self._traversed)]
        # A value that leaves a dict for the next would go to its end, so that the order of all values shows it; in a list it need not.
        self._lists = [table for table in filled if not isinstance(table, Mapping)]
        # State of the optimizer is exchanged, which shows without its address; nobody gives it another storage in place.
        others = (tensor for name, tensor in guarded_tensors(step).items() if name.startswith(("grad:", "buffer:")))
        loose = loose_tensors(step)
        self._tensors: list[Tensor] = [*self._parameters, *others, *loose]
        self._turned = [*self._learning, *loose]
        self._values = self._by_value()
        self._objects = self._by_identity()

    def unchanged(self) -> bool:
        """Say whether every object of the step is the very same one, at the same address.

        Returns:
            True when nothing at all was exchanged.
        """
        try:
            if any(self._empty) or self._by_value() != self._values:
                return False
            return _identical(self._by_identity(), self._objects)
        except Exception:  # noqa: BLE001 - an attribute is gone, or an object raises what it likes, of which the whole look tells
            return False

    def _by_identity(self) -> list[object]:
        """Collect all objects."""
        objects: list[object] = gc.get_referents(*self._traversed)
        objects += _step_facts(self._step)
        objects += map(type, self._owners)
        objects += chain.from_iterable(map(operator.call, self._attributes))
        objects += chain.from_iterable((*self._views, *self._keyed))
        objects += chain.from_iterable(map(_tensor_facts, self._learning))
        objects += [group["params"] for group in self._step.optimizer.param_groups]  # the lists: another may have taken their place
        objects += map(operator.call, self._getters)
        for modifier in self._modifiers:
            objects += modifier.training_tensors().values()
        return objects

    def _by_value(self) -> list[Any]:
        """Collect sizes, addresses and settings of torch."""
        return [
            *map(len, self._lists),
            *map(len, self._modules),
            *map(Tensor.data_ptr, self._tensors),
            *map(Tensor.stride, self._turned),  # `.data =` and t_() turn a tensor where it lies
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_autocast_enabled(self._device),
            torch.get_autocast_dtype(self._device),
            self._step.update_is_captured,
            torch.get_default_dtype(),
            float32_precisions(),
            torch.is_grad_enabled(),
            looks_for_nan(),
            backends(),
            *map(_array_facts, self._arrays),
        ]


def _tables(step: TrainStep) -> Iterator[Any]:
    """List the dicts, lists and sets whose content is watched; what comes or goes changes one of them."""
    for _, module in all_modules(step):
        yield from (module.__dict__[name] for name in TABLES)
    optimizer = step.optimizer
    yield from (optimizer.param_groups, *(group["params"] for group in optimizer.param_groups))
    if watches_update(step):
        yield from optimizer.param_groups
        yield from (optimizer.state.get(parameter, {}) for group in optimizer.param_groups for parameter in group["params"])
        yield from (optimizer.__dict__, optimizer.state, optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    yield from GLOBAL_HOOKS
    yield from (held.content for held in containers(step))
    yield from classes(step).values()
    yield from () if step.averages is None else _nested(step.averages.__dict__)
    for tensor in (*step.parameters().values(), *step.model.buffers()):
        yield vars(tensor)
        yield from (hooks for hooks in _tensor_facts(tensor)[3:] if hooks is not None)


def _own_attributes(table: dict[str, Any]) -> operator.itemgetter[Any]:
    """What reads the attributes of a module but those in which torch keeps its books; two at least, so that it gives a tuple."""
    return operator.itemgetter("_parameters", "_modules", *(key for key in table if key == "training" or key not in BOOKS))


def _plain(table: Any) -> Any:
    return table if is_foreign(type(table).__module__) else Plain(table)


def _values(table: Any) -> Any:
    return table.values() if isinstance(table, Mapping | Plain) else table


def _identical(some: list[object], others: list[object]) -> bool:
    """Say whether two lists hold the very same objects."""
    return len(some) == len(others) and not any(map(operator.is_not, some, others))


def _nested(table: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
    yield table
    for value in table.values():
        yield from _nested(value) if isinstance(value, dict) else ()
