"""The stages in which a calibration goes through a model, layers or what is watched in them, and who sees data before each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from compressor.pipelines.settings import cut_at_inputs
from compressor.random_state import random_numbers_kept
from compressor.tracing import module_names, partition
from harness.lifecycle.forwards import Batch, call

Calls = Mapping[str, Tensor | None]
"""The first tensor that each module is called with, by its dotted name, in the order of the calls."""


@dataclass(frozen=True)
class Stages:
    """What a calibration stops at.

    Attributes:
        parts: dotted names of the modules of each stage; what lies in none comes last.
        order: names of modules in the order in which a forward first calls them.
    """

    parts: list[tuple[str, ...]]
    order: tuple[str, ...] = ()

    def awake(self, names: tuple[str, ...]) -> set[str]:
        """Name the modules whose hooks see the batches before a stage, as each sees them once.

        Args:
            names: of the modules of the stage.

        Returns:
            Those, and with the first stage what runs before it.
        """
        is_first, is_last = (self.parts[place] == names for place in (0, -1))
        if is_first == is_last:
            return set(names)
        first = min((self.order.index(name) for name in self.parts[0] if name in self.order), default=0)
        early = set(self.order[:first]).intersection(self.parts[-1])  # what runs before the first stage, or around it
        return early.union(names) if is_first else set(names) - early


def calls_of(model: nn.Module, batch: Batch) -> Calls:
    """Run a forward and note the calls.

    Args:
        model: a copy of it runs.
        batch: a copy of it is taken.

    Returns:
        What is called, and with what.
    """
    one, seen = copy.deepcopy(model), dict[str, Tensor | None]()
    for name, module in one.named_modules():
        module.register_forward_pre_hook(_noting(seen, name), with_kwargs=True)
    with torch.no_grad(), random_numbers_kept():
        call(one, copy.deepcopy(batch))
    return seen


def stages_of(model: nn.Module, watched: Collection[str], calls: Calls) -> Stages:
    """Return the stages of an `oneshot` in which layers are compressed one after another.

    Args:
        model: to calibrate.
        watched: dotted names of the modules with hooks of a calibration, at which one pass stops in the order of the calls, at those of
            one input once; none for two passes, which stop at layers.
        calls: of its forward.

    Returns:
        The stages.
    """
    layers = partition(model, None)
    if not watched:
        return _stages(model, [[name] for name in layers.targets], calls)
    targets, groups = cut_at_inputs(model, watched, layers).targets, dict[int, list[str]]()
    for name, tensor in calls.items():  # which holds the tensors, so that no other has their identity
        if name in targets:
            groups.setdefault(id(tensor), []).append(name)
    return _stages(model, groups.values(), calls)


def whole(model: nn.Module) -> Stages:
    """Return the one stage of a run in which all is compressed at once."""
    return Stages([module_names(model, "")])


def _noting(seen: dict[str, Tensor | None], name: str) -> Callable[..., None]:
    def hook(_: nn.Module, args: object, kwargs: object) -> None:
        seen.setdefault(name, next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None))

    return hook


def _stages(model: nn.Module, groups: Iterable[Iterable[str]], calls: Calls) -> Stages:
    parts = [tuple(name for head in group for name in module_names(model, head)) for group in groups]
    staged = {name for part in parts for name in part}
    rest = tuple(name for name, _ in model.named_modules() if name not in staged)
    return Stages([*parts, rest] if rest else parts, tuple(calls))
