"""The tensors of a module as the checks compare them: which there are, which are saved, and whether two hold the same bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from compressor.pages import equal_bytes, raw_bytes
from harness.lifecycle.driving.snapshot import HOOKS, TENSOR_HOOKS, Same

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that layers compute with; `to(dtype)` goes between them."""


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Find the tensors that a module holds itself, whether or not torch knows of them.

    Args:
        module: the module; its children are not searched.

    Returns:
        Name -> parameter, buffer, or tensor in a plain attribute.
    """
    plain = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    known = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    return {**plain, **known}


def all_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Find the tensors of a module and its descendants, plain attributes included.

    Args:
        module: the module.

    Returns:
        Dotted name -> tensor.
    """
    return {_join(prefix, name): tensor for prefix, part in module.named_modules() for name, tensor in own_tensors(part).items()}


def held_tensors(module: nn.Module) -> list[Tensor]:
    """Find every tensor of a module and its descendants, those in plain containers included.

    Args:
        module: the module.

    Returns:
        Each tensor once.
    """
    found: dict[int, Tensor] = {}
    for value in (value for part in module.modules() for value in vars(part).values()):
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | set | tuple) else (value,)
        found |= {id(one): one for one in held if isinstance(one, Tensor)}
    return list(found.values())


def known_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Find the parameters and buffers of a module and its descendants.

    Args:
        module: the module.

    Returns:
        Dotted name -> tensor; a shared one under each of its names.
    """
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


Facts = dict[tuple[str, str], object]


def facts_of(module: nn.Module) -> Facts:
    """Find what torch knows of a module beside the values of its tensors, which a copy, a conversion and a load keep.

    Args:
        module: the module; its descendants are looked at, too.

    Returns:
        Kind and dotted name -> fact: what trains, which names are those of one parameter, what is saved, modes, hooks, and classes of
        modules, by name: each GraphModule has one of its own.
    """
    first: dict[int, str] = {}
    left_out = non_persistent_names(module)
    facts: Facts = {}
    for name, tensor in known_tensors(module).items():
        hooks = [Same(hook) for kind in TENSOR_HOOKS for hook in (getattr(tensor, kind, None) or {}).values()]
        facts |= {("requires_grad", name): tensor.requires_grad, ("in the state dict", name): name not in left_out}
        facts["a gradient", name] = tensor.is_leaf and tensor.grad is not None
        facts["hooks of the tensor", name] = hooks
    for name, parameter in module.named_parameters(remove_duplicate=False):
        facts["the same as", name] = first.setdefault(id(parameter), name)
    for name, part in module.named_modules():
        hooks = [Same(hook) for kind in HOOKS for hook in (vars(part).get(kind) or {}).values()]
        facts |= {("training", name): part.training, ("hooks", name): hooks, ("class", name): repr(type(part))}
    return facts


def changed_facts(before: Facts, after: Facts, *leave_out: str) -> list[str]:
    """Say which facts are others.

    Args:
        before: of a module.
        after: of what came of it.
        *leave_out: kinds that are not compared.

    Returns:
        A line each; a tensor or module that came or went has one.
    """
    lines = []
    for kind, name in dict.fromkeys([*before, *after]):
        was, now = before.get((kind, name)), after.get((kind, name))
        if was is None or now is None:
            lines += [f"{name} is {'added' if was is None else 'lost'}"] if kind in ("requires_grad", "class") else []
        elif was != now and kind not in leave_out:
            lines.append(f"{f'{name}: ' if name else ''}{kind} was {was} and is {now}")
    return lines


def plain_attributes(module: nn.Module) -> dict[str, str]:
    """Find the plain data in the attributes of a module and its descendants: what they are set to, such as a factor or an eps.

    Args:
        module: the module.

    Returns:
        Dotted name -> repr of a number, a text, a bool, None, or tuples, lists and dicts of such. Private names are left out, as of flags
        that a conversion sets, and so is what names a dtype, which it may change. What is not set on a module is that of its class.
    """
    found: dict[str, str] = {}
    for prefix, part in module.named_modules():
        owners = [vars(cls) for cls in reversed(type(part).__mro__) if issubclass(cls, nn.Module) and cls is not nn.Module]
        values = {name: value for attributes in (*owners, vars(part)) for name, value in attributes.items() if name[:1] != "_"}
        found |= {_join(prefix, name): repr(value) for name, value in values.items() if name not in _OF_TORCH and _is_plain(value)}
    return found


_OF_TORCH = frozenset(vars(nn.Module()))  # hooks, modes and tensors, which are looked at by themselves
_MAX_DEPTH = 8  # a list may hold itself


def _is_plain(value: object, depth: int = 0) -> bool:
    if isinstance(value, str):
        return not isinstance(vars(torch).get(value.removeprefix("torch.")), torch.dtype)
    held = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    if held is None:
        return value is None or isinstance(value, bool | int | float | complex)
    return depth < _MAX_DEPTH and all(_is_plain(one, depth + 1) for one in held)


def cut_names(module: nn.Module) -> set[str]:
    """Find the weights that their own forward may write to: an embedding cuts the norms of its weight to its max_norm.

    Args:
        module: the module; its descendants are looked at, too.

    Returns:
        Dotted names.
    """
    return {_join(name, "weight") for name, part in module.named_modules() if getattr(part, "max_norm", None) is not None}


def persistent_names(module: nn.Module) -> list[str]:
    """List the names that belong into a state dict.

    Args:
        module: the module.

    Returns:
        Dotted names of the parameters and persistent buffers.
    """
    left_out = non_persistent_names(module)
    return [name for name in known_tensors(module) if name not in left_out]


def non_persistent_names(module: nn.Module) -> set[str]:
    """Find the buffers that do not belong into a state dict.

    Args:
        module: the module.

    Returns:
        Dotted names of the non-persistent buffers.
    """
    parts = module.named_modules(remove_duplicate=False)  # each under all of its names
    return {_join(prefix, name) for prefix, part in parts for name in part._non_persistent_buffers_set}


def overwrite(module: nn.Module) -> None:
    """Give every tensor that a state dict holds another value. Changes the module.

    Args:
        module: the module.
    """
    tensors = known_tensors(module)
    with torch.no_grad():
        for tensor in {id(tensors[name]): tensors[name] for name in persistent_names(module)}.values():
            plain = tensor.view(torch.uint8) if tensor.dtype == torch.float4_e2m1fn_x2 else tensor  # fp4 cannot be filled
            original = plain.clone()
            if same_bits(original, plain.zero_()):
                plain.fill_(1)


def share_memory(first: Tensor, second: Tensor) -> bool:
    """Say whether two tensors lie in the same storage.

    Args:
        first: a tensor.
        second: another.

    Returns:
        True when they do; empty tensors never do.
    """
    return first.numel() > 0 and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def same_bits(first: Any, second: Any) -> bool:
    """Compare two trees of tensors bit for bit, NaN included.

    Args:
        first: a tensor, or containers of them.
        second: the same.

    Returns:
        True when dtypes, shapes and bytes are equal.
    """
    leaves, others = ([leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in (first, second))
    return len(leaves) == len(others) and all(_same_tensor(leaf, other) for leaf, other in zip(leaves, others, strict=True))


def _same_tensor(first: Tensor, second: Tensor) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return equal_bytes(raw_bytes(first.cpu()), raw_bytes(second.cpu()))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
