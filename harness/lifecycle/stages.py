"""The stages in which a calibration goes through a model: its blocks, or, as in `oneshot`, what a modifier watches in them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from compressor.pipelines.settings import cut_at_inputs
from compressor.tracing import module_names, partition

Stages = list[tuple[str, ...]]


def block_stages(model: nn.Module) -> Stages:
    """Return the names of modules by blocks, those of the first list or else the children, and what lies in none at the end.

    Args:
        model: to calibrate.

    Returns:
        Dotted names, of each stage those of a block and of all in it.
    """
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)]
    heads = [f"{lists[0]}.{name}" for name, _ in model.get_submodule(lists[0]).named_children()] if lists else None
    return _stages(model, [[head] for head in heads or [name for name, _ in model.named_children()]])


def watched_stages(model: nn.Module, watched: Collection[str], forward: Callable[[nn.Module], object]) -> Stages:
    """Return the names of modules by what is watched, in the order of the calls, that of one input together.

    Args:
        model: to calibrate; a copy of it runs.
        watched: dotted names of the modules with hooks of a calibration.
        forward: runs a model on a batch.

    Returns:
        Dotted names, of each stage those of its modules and of all in them; what lies in none, and what is not called, at the end.
    """
    one, seen = copy.deepcopy(model), dict[str, Tensor | None]()
    for name, module in cut_at_inputs(one, watched, partition(one, None)).targets.items():
        module.register_forward_pre_hook(_noting(seen, name), with_kwargs=True)
    with torch.no_grad():
        forward(one)
    groups: dict[int, list[str]] = {}
    for name, tensor in seen.items():  # which holds the tensors, so that no other has their identity
        groups.setdefault(id(tensor), []).append(name)
    return _stages(model, groups.values())


def _noting(seen: dict[str, Tensor | None], name: str) -> Callable[..., None]:
    def hook(_: nn.Module, args: object, kwargs: object) -> None:
        seen.setdefault(name, next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None))

    return hook


def _stages(model: nn.Module, groups: Iterable[Iterable[str]]) -> Stages:
    stages = [tuple(name for head in group for name in module_names(model, head)) for group in groups]
    staged = {name for stage in stages for name in stage}
    rest = tuple(name for name, _ in model.named_modules() if name not in staged)
    return [*stages, rest] if rest else stages
