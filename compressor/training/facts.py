"""The facts of the host that a captured step takes for granted, by name, so that a change can be said in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from compressor.training.frozen import Same, frozen
from compressor.training.held import GLOBAL_HOOKS, classes, containers, other_modules, watches_update
from compressor.training.reached import HOOKS, variables
from compressor.training.step import TrainStep

_PLAIN = (bool, int, float, str, type(None))
_MAX_SPELLED = 8


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
    for name, parameter in step.parameters().items():
        after = getattr(parameter, "_post_accumulate_grad_hooks", None)
        facts[f"parameter {name}"] = (
            parameter.requires_grad,
            *map(Same, (parameter._backward_hooks or {}).values()),
            *map(Same, (after or {}).values()),
        )
    facts |= _optimizer_facts(step)
    for name, getter in variables(step):
        facts[name] = frozen(getter())
    for held in containers(step):
        facts[f"content of {held.name}"] = held.facts()
    for name, module in other_modules(step).items():
        facts[name] = {**_module_facts(module), **{key: Same(value) for key, value in module.state_dict(keep_vars=True).items()}}
    for number, (cls, content) in enumerate(classes(step).items()):  # two classes may have one name
        facts[f"class {cls.__qualname__} ({number})"] = {key: frozen(value) for key, value in content.items() if not key.startswith("__")}
    return facts


def _optimizer_facts(step: TrainStep) -> dict[str, object]:
    facts: dict[str, object] = {}
    is_watched = watches_update(step)
    for number, group in enumerate(step.optimizer.param_groups):
        if is_watched:
            facts |= {f"optimizer group {number}: {key}": value for key, value in group.items() if not isinstance(value, Tensor | list)}
        facts[f"optimizer group {number}: parameters"] = tuple(map(Same, group["params"]))
    if is_watched:
        hooks = (step.optimizer._optimizer_step_pre_hooks, step.optimizer._optimizer_step_post_hooks)
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
    yield "matmul precision", torch.get_float32_matmul_precision()
    yield "grad mode", torch.is_grad_enabled()
    yield "anomaly detection", looks_for_nan()
    yield "attention kernels and mkldnn", backends()
    yield "step settings", (Same(step.loss_fn), step.accumulate, step.clip_norm, step.autocast, Same(step.averages))
    yield "parts of the step", (Same(step.model), Same(step.optimizer), Same(step.session))
    yield "global hooks", tuple(Same(hook) for table in GLOBAL_HOOKS for hook in table.values())


def looks_for_nan() -> bool:
    """Say whether torch reads every gradient on the host, which no replay would."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def backends() -> tuple[bool, ...]:
    """Return which implementations torch may choose from."""
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_cudnn_benchmark(),
    )


def _module_facts(module: nn.Module) -> dict[str, object]:
    values = module.__dict__
    facts: dict[str, object] = {key: value for key, value in values.items() if type(value) in _PLAIN}
    facts |= {key: Same(value) for key, value in values.items() if isinstance(value, Tensor | torch.Generator | FunctionType)}
    facts["class"] = type(module)
    facts["forward"] = Same(values.get("forward"))
    hooks = tuple(Same(hook) for kind in HOOKS for hook in values[kind].values())
    if hooks:
        facts["hooks"] = hooks
    return facts


def _spell(before: Any, after: Any) -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        key = next(key for key in {**before, **after} if before.get(key, _MISSING) != after.get(key, _MISSING))
        return f"{key}={before.get(key, _MISSING)!r} and is now {after.get(key, _MISSING)!r}"
    if isinstance(before, tuple) and isinstance(after, tuple) and max(len(before), len(after)) > _MAX_SPELLED:
        # Of a large one only what differs: an environment holds what belongs into no log.
        gone, come = (tuple(item for item in some if item not in other) for some, other in ((before, after), (after, before)))
        if gone or come:
            return f"{gone!r} and is now {come!r}, among {len(after)}"
    return f"{before!r} and is now {after!r}"


class _Missing:
    def __repr__(self) -> str:
        """Spell what is not there."""
        return "(absent)"


_MISSING = _Missing()
