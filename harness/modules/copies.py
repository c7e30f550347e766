"""Checks of a module on the move: copied, converted, sent to another device, none of it through pickle."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.hooks import RemovableHandle

from harness.modules.loads import copied_state, halved, not_taken, note_refusal
from harness.modules.subject import PROBE, ModuleCheck, NotApplicableError, Subject, collect, run, untouched
from harness.modules.tensors import (
    FLOATS,
    Facts,
    all_tensors,
    changed_facts,
    cut_names,
    facts_of,
    known_tensors,
    non_persistent_names,
    overwrite,
    persistent_names,
    plain_attributes,
    same_bits,
    share_memory,
)

CHECKS: list[ModuleCheck] = []
_check = collect(CHECKS)


@_check("module.deepcopy")
def _deepcopy(subject: Subject) -> list[str]:
    """A deep copy is equal, with what trains, is shared and is saved; it computes the same from tensors of its own."""
    module = subject.module
    with untouched(module):
        twin = copy.deepcopy(module)
        if repr(type(twin)) != repr(type(module)) or twin is module:  # each GraphModule has a class of its own, of one name
            return ["the copy is the module itself, or of another class"]
        findings = []
        tensors, others = all_tensors(module), all_tensors(twin)
        if tensors.keys() != others.keys():
            findings.append(f"only one of the two has {sorted(tensors.keys() ^ others.keys())}")
        for name in tensors.keys() & others.keys():
            findings += [] if same_bits(tensors[name], others[name]) else [f"{name} differs in the copy"]
            findings += [f"{name} is shared with the copy"] if share_memory(tensors[name], others[name]) else []
        findings += [f"{line} in the copy" for line in changed_facts(facts_of(module), facts_of(twin), *_NOT_COPIED)]
        module.eval()
        twin.eval()
        output = run(twin, *subject.inputs())
        findings += _loaded_into(twin, subject)
        if not subject.repeats():
            return findings
        findings += [] if same_bits(subject.call(), output) else ["the copy's output differs"]
        findings += [] if findings else _answers_otherwise(twin, subject)
        if not findings:
            overwrite(module)  # a function in an attribute is not copied: it may still compute with the module it was made for
            is_its_own = same_bits(output, run(twin, *subject.inputs()))
            findings += [] if is_its_own else ["the copy computes with the tensors of the original"]
        return findings


def _loaded_into(twin: nn.Module, subject: Subject) -> list[str]:
    """Whether a copy takes what is loaded into it; what the original does not take either is told elsewhere. Leaves both as they were."""
    module = subject.module
    state = copied_state(module)
    lost = [name for name in _forgotten(twin, module, state) if name not in _forgotten(module, twin, state)]
    if not lost:
        with untouched(module), untouched(twin):
            others = set(not_taken(twin, subject.not_seen)) - set(not_taken(module, subject.not_seen))
            lost = [name for name in state if name in others]
    return [f"the copy does not take {', '.join(lost[:5])} from a state dict"] if lost else []


def _answers_otherwise(twin: nn.Module, subject: Subject) -> list[str]:
    """Whether a load of a copy reaches its output as it does in the original, and nothing of the original. Leaves both as they were."""
    module, outputs, changed = subject.module, [], list[str]()
    before = {name: tensor.detach().clone() for name, tensor in all_tensors(module).items()}
    for one in (twin, module):
        with untouched(module), untouched(twin):
            try:
                one.load_state_dict(halved(module.state_dict()), strict=True)
                now = all_tensors(module)
                changed += [] if one is module else [name for name in before if name in now and not same_bits(before[name], now[name])]
                outputs.append(run(one, *subject.inputs()))
            except Exception as error:  # noqa: BLE001 - a module may refuse values in any way
                note_refusal(error, subject.not_seen)
                return []
    findings = [f"a load of the copy changes {', '.join(changed[:5])} of the original"] if changed else []
    return findings + ([] if same_bits(*outputs) else ["what is loaded into the copy does not reach its output as in the original"])


def _forgotten(module: nn.Module, other: nn.Module, state: dict[str, Any]) -> list[str]:
    with untouched(module), untouched(other):
        overwrite(module)
        try:
            module.load_state_dict(state, strict=True)
        except RuntimeError:
            return []
        now = known_tensors(module)
        return [name for name in persistent_names(module) if name in state and not same_bits(now[name].detach(), state[name])]


@_check("module.to_dtype")
def _to_dtype(subject: Subject) -> list[str]:
    """`to(dtype)` rounds floating-point parameters and buffers, changes nothing else, and returns the module, which runs in that dtype.

    Attributes of plain data, such as a factor, are not changed either; what names a dtype may be, and tensors in attributes.
    Complex numbers may stay, or become real, as torch makes them. 8-bit floats are codes rather than numbers to compute with: they may
    stay or be converted. So may what a module names in `kept_dtypes`: buffers whose dtype is part of a file format. What torch's functions
    do not take is torch's own limit, and so is a buffer under two names, of which it makes two.
    """
    module = subject.module
    known, old, new = _tensors_with_inputs(subject), _own_dtype(subject), _another_dtype(subject)
    if old is None and any(tensor.is_complex() for tensor in known):
        raise NotApplicableError("it computes with complex numbers alone")
    with untouched(module):
        facts, handles = _facts_with_hooks(module)
        parameters = _plain_parameters(module)
        values = {name: tensor.detach().clone() for name, tensor in known_tensors(module).items()}
        before = {name: tensor.dtype for name, tensor in values.items()}
        kept, attributes = _kept_names(module), plain_attributes(module)
        findings = [] if module.to(new) is module else ["to(dtype) did not return the module"]
        findings += [f"{line} behind to({new})" for line in changed_facts(facts, facts_of(module))]
        findings += [f"{line} behind to({new})" for line in (*_replaced(parameters, module), *_changed_attributes(attributes, module))]
        for handle in handles:
            handle.remove()
        for name, tensor in known_tensors(module).items():
            if name not in before:
                continue
            allowed = {*_allowed(before[name], new), *([before[name]] if name in kept else [])}
            findings += [] if tensor.dtype in allowed else [f"{name} went from {before[name]} to {tensor.dtype} where {new} was asked for"]
            findings += [] if _is_rounded(values[name], tensor.detach()) else [f"{name} has other values in {tensor.dtype}"]
        if not findings:
            now = {name: one.detach().clone() for name, one in module.named_parameters() if name not in cut_names(module)}
            _run_in(new, old or torch.float32, subject)
            after = dict(module.named_parameters())
            written = [name for name in now if not same_bits(after[name].detach(), now[name])]
            findings += [f"a forward in {new} changed the values of parameters: {', '.join(written[:5])}"] if written else []
    return findings


def _tensors_with_inputs(subject: Subject) -> list[Tensor]:
    return [*known_tensors(subject.module).values(), *(leaf for leaf in tree_leaves(subject.given) if isinstance(leaf, Tensor))]


def _own_dtype(subject: Subject) -> torch.dtype | None:
    """What it computes with."""
    return next((tensor.dtype for tensor in _tensors_with_inputs(subject) if tensor.dtype in FLOATS), None)


def _another_dtype(subject: Subject) -> torch.dtype:
    """What `to_dtype` converts it to."""
    return torch.bfloat16 if _own_dtype(subject) is not torch.bfloat16 else torch.float32


def _plain_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Those that torch changes in place."""
    return {name: one for name, one in module.named_parameters() if type(one) is nn.Parameter}


def _replaced(parameters: Mapping[str, nn.Parameter], module: nn.Module) -> list[str]:
    now = dict(module.named_parameters())
    others = [name for name, parameter in parameters.items() if now.get(name, parameter) is not parameter]
    return [f"others are in the place of parameters that optimizers hold, {', '.join(others[:5])},"] if others else []


def _changed_attributes(before: Mapping[str, str], module: nn.Module) -> list[str]:
    now = plain_attributes(module)
    changed = [name for name, value in before.items() if now.get(name, value) != value]
    return [f"the attribute {name} was {before[name][:80]} and is {now[name][:80]}" for name in changed]


def _kept_names(module: nn.Module) -> set[str]:
    """Names of the buffers whose dtype a file format fixes."""
    return {f"{where}.{name}".lstrip(".") for where, part in module.named_modules() for name in getattr(part, "kept_dtypes", ())}


def _allowed(before: torch.dtype, new: torch.dtype) -> set[torch.dtype]:
    """What `to(new)` may make of a dtype."""
    is_number = before.is_floating_point or before.is_complex
    return {new} if before in FLOATS else {before, new} if is_number else {before}


def _facts_with_hooks(module: nn.Module) -> tuple[Facts, list[RemovableHandle]]:
    """Hang a hook of each kind on each of its modules, which change nothing, give gradients, and return the facts. Changes the module."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.is_leaf:
            parameter.grad = torch.zeros_like(parameter)
    handles = [register(part, _look) for part in module.modules() for register in _REGISTERS]
    return facts_of(module), handles


def _look(*seen: object) -> None:
    """A hook that changes nothing."""


_REGISTERS: tuple[Callable[[nn.Module, Callable[..., None]], RemovableHandle], ...] = (
    nn.Module.register_forward_pre_hook,
    nn.Module.register_forward_hook,
    nn.Module.register_full_backward_pre_hook,
    nn.Module.register_full_backward_hook,
    nn.Module.register_state_dict_pre_hook,
    nn.Module.register_state_dict_post_hook,
    nn.Module.register_load_state_dict_pre_hook,
    nn.Module.register_load_state_dict_post_hook,
)


def _is_rounded(value: Tensor, now: Tensor) -> bool:
    """Whether numbers are those before, rounded to another dtype; in the same one, whether all bits are."""
    if value.dtype == now.dtype or value.is_complex():
        return value.dtype != now.dtype or same_bits(value, now)
    return same_bits(value.to(now.dtype), now)


class _LimitsOfTorch(TorchFunctionMode):
    """Notes which functions of torch do not take a dtype: they raise where all numbers are of it, and do not with the same in another."""

    def __init__(self, new: torch.dtype, old: torch.dtype) -> None:
        """Nothing has raised."""
        super().__init__()
        self.new, self.old, self.found = new, old, ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, and try it in the other dtype where it raises."""
        try:
            return func(*args, **(kwargs or {}))
        except (RuntimeError, TypeError) as error:
            given = tree_map(self._in_old, (args, kwargs or {}))
            dtypes = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_floating_point()}
            if dtypes <= {self.new} and _is_taken(func, *given):
                self.found = self.found or f"torch's {getattr(func, '__name__', func)} does not take {self.new}: {error}"
            raise

    def _in_old(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(self.old) if leaf.dtype == self.new else leaf
        return self.old if leaf is self.new else leaf


def _is_taken(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        func(*args, **kwargs)
    except (RuntimeError, TypeError):
        return False
    return True


class _CopiedAs(TorchFunctionMode):
    """Deep copies of floating-point tensors are of another dtype."""

    def __init__(self, new: torch.dtype) -> None:
        """Nothing is copied."""
        super().__init__()
        self.new = new

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function."""
        if func is Tensor.__deepcopy__ and args[0].is_floating_point():
            return args[0].detach().to(self.new, copy=True)
        return func(*args, **(kwargs or {}))


def _run_in(new: torch.dtype, old: torch.dtype, subject: Subject) -> None:
    """Call the module, which has been converted, on inputs that have been, too."""
    with _CopiedAs(new):  # tensors in any object
        inputs = subject.inputs()
    inputs = tree_map_only(Tensor, lambda tensor: tensor.to(new) if tensor.is_floating_point() else tensor, inputs)
    with _LimitsOfTorch(new, old) as limits:
        try:
            run(subject.module, *inputs)
        except (RuntimeError, TypeError) as error:
            if limits.found:
                raise NotApplicableError(limits.found) from error
            raise


@_check("module.to_device")
def _to_device(subject: Subject) -> list[str]:
    """`to(device)` moves every tensor as it is, and returns the module, which runs there; without a second device only the move is seen."""
    module = subject.module
    devices = {tensor.device.type for tensor in all_tensors(module).values()}
    target = torch.device("cpu" if "cuda" in devices else "cuda" if torch.cuda.is_available() else "meta")
    with untouched(module):
        values = {name: tensor.detach().cpu() for name, tensor in known_tensors(module).items()}
        facts, handles = _facts_with_hooks(module)
        findings = [] if module.to(target) is module else ["to(device) did not return the module"]
        # On meta torch makes new parameters, one for each name.
        of_torch = ("the same as", "hooks of the tensor", "a gradient") if target.type == "meta" else ()
        findings += [f"{line} behind to({target.type!r})" for line in changed_facts(facts, facts_of(module), *of_torch)]
        for handle in handles:
            handle.remove()
        left = [name for name, tensor in all_tensors(module).items() if tensor.device.type != target.type]
        findings += [f"{name} stayed behind when the module went to {target.type}" for name in left]
        if target.type != "meta" and not findings:
            there = known_tensors(module)
            findings += [
                f"{name} has other values on {target.type}" for name in values if not same_bits(values[name], there[name].detach())
            ]
            run(module, *tree_map_only(Tensor, lambda tensor: tensor.to(target), subject.inputs()))
    return findings


def _loaded(module: nn.Module) -> nn.Module:
    state = copied_state(module)
    overwrite(module)  # else a load that does nothing is right about every value
    module.load_state_dict(state)
    return module


def _to(dtype: torch.dtype) -> Callable[[nn.Module], nn.Module]:
    return lambda module: module.to(dtype)


_CONVERSIONS = {f"to({dtype})": dtype for dtype in (torch.float64, torch.float32, torch.bfloat16)}
_STEPS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "a copy": copy.deepcopy,
    "a load": _loaded,
    **{step: _to(dtype) for step, dtype in _CONVERSIONS.items()},
}
_NOT_COPIED = ("hooks", "hooks of the tensor", "a gradient")  # which torch's own GraphModule leaves out


@_check("module.two_steps", calls=False)
def _two_steps(subject: Subject) -> list[str]:
    """What is copied, loaded or converted keeps what trains, is shared and saved, modes and numbers, in both modes and when done again."""
    module, told, findings = subject.module, f"to({_another_dtype(subject)})", list[str]()
    kept = [step for step in ("a copy", "a load", told) if _keeps(subject, step)]  # what one step loses its own check tells
    for mode in (True, False):
        with untouched(module):
            for part in module.modules():
                part.training = mode
            findings += [f"{line} behind {step} in training={mode}" for step in kept for line in _lost(subject, step)]
    for step in [one for one in _CONVERSIONS if one != told and told in kept]:
        lost = _lost(subject, step)
        findings += [f"{line} behind {step}" for line in lost]
        kept += [] if lost else [step]
    pairs = [(first, second) for first in kept for second in kept]
    return findings + [f"{line} behind {first}, and {second} of that" for first, second in pairs for line in _lost(subject, first, second)]


def _keeps(subject: Subject, step: str) -> bool:
    try:
        return not _lost(subject, step)
    except Exception:  # noqa: BLE001 - a module may raise what it likes, and its own check tells
        return False


def _lost(subject: Subject, *steps: str) -> list[str]:
    """What is another behind some steps, in words."""
    module = subject.module
    with untouched(module):
        before = facts_of(module) if "a copy" in steps else _facts_with_hooks(module)[0]  # torch leaves hooks out of some copies
        values, found = {name: tensor.detach().clone() for name, tensor in known_tensors(module).items()}, module
        parameters = _plain_parameters(module)
        lines = list[str]()
        for step in steps:
            others = not_taken(found, subject.not_seen) if step == "a load" else []
            attributes = plain_attributes(found) if step in _CONVERSIONS else {}
            found = _STEPS[step](found)
            lines += [f"{name} does not hold the other values that were loaded" for name in others]
            lines += _changed_attributes(attributes, found)
        lines += _replaced(parameters, found) if found is module else []
        lines += changed_facts(before, facts_of(found), *(_NOT_COPIED if "a copy" in steps else ()))
        now, kept, dtypes = known_tensors(found), _kept_names(module), [_CONVERSIONS[step] for step in steps if step in _CONVERSIONS]
        # A load may compute what is not saved again, from numbers that a conversion has rounded: other bits than what is rounded itself.
        computed = non_persistent_names(found) if dtypes and steps[-1] == "a load" else set()
        return lines + [
            f"{name}, of {value.dtype}, is another tensor, of {now[name].dtype}"
            for name, value in values.items()
            if name in now and not _is_converted(value, now[name].detach(), dtypes, name in kept, name in computed)
        ]


def _is_converted(value: Tensor, now: Tensor, dtypes: Sequence[torch.dtype], is_kept: bool, is_computed: bool) -> bool:
    """Whether a tensor is one before, of a dtype that conversions may give it, and rounded by them, if it is not computed again."""
    allowed = {value.dtype}
    for dtype in dtypes:
        allowed = {one for before in allowed for one in _allowed(before, dtype)}
    if now.dtype not in allowed | ({value.dtype} if is_kept else set()) or value.shape != now.shape:
        return False
    if is_computed or (value.is_complex() and now.dtype != value.dtype):
        return True
    if is_kept or (now.dtype == value.dtype and value.dtype not in FLOATS):
        return same_bits(value.to(now.dtype), now)
    for dtype in dtypes:
        value = value.to(dtype)
    return same_bits(value, now)


@_check("module.no_pickling")
def _no_pickling(subject: Subject) -> list[str]:
    """An attribute that cannot be pickled does not stand in the way of a copy, a call or a state dict, which holds tensors only."""
    module = subject.module
    findings = [
        f"{name} in the state dict is of {type(value)}, no tensor"
        for name, value in module.state_dict().items()
        if not isinstance(value, Tensor)
    ]
    with untouched(module):
        setattr(module, PROBE, lambda: None)
        for what, action in (
            ("deepcopy", lambda: copy.deepcopy(module)),
            ("a call", subject.call),
            ("a state dict", lambda: module.load_state_dict(module.state_dict())),
        ):
            try:
                action()
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                findings.append(f"{what} fails beside an attribute that cannot be pickled: {error}")
    return findings
