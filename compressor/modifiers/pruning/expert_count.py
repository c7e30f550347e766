"""Fewer experts in every layer of a mixture, so that the model is one that its class builds from its config.

No architecture is known here. Which setting of the config counts the experts, and which tensors and numbers of the model follow from it,
is read off two models of the class without bytes, one of them with fewer experts. That nothing is left out is proved on the model's own
forward: with the experts of every layer in another order, each layer must give what it gave.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressor.data.collate import Batch, batch_to, call_model
from compressor.errors import ModelError
from compressor.lifecycle import State
from compressor.lifecycle.hooks import without_modifier_hooks
from compressor.model.class_readers import class_twin
from compressor.model.evaluation import evaluation_mode
from compressor.model.folder import one_line, some
from compressor.nn.experts import SortedExperts, UnfusedExperts
from compressor.tracing.picking import excerpt

_MOST = 0.05  # relative difference of a layer's output for the median token that is rounding of sums in another order
_CHOSEN = re.compile(r"experts_per_tok|^moe_(top_?)?k$|^top_?k_experts$")  # names of settings that say how many a token goes to
_GROUPS = re.compile(r"group")  # in the names of settings that may count groups of experts


@dataclass(frozen=True)
class ExpertCount:
    """What of a model follows from the number of its experts.

    Attributes:
        layers: dotted names of all modules with experts, each an `UnfusedExperts`.
        num_experts: of each.
        path: names of attributes from the config to the setting that counts them, such as ("text_config", "num_experts").
        tensors: dotted names of the other tensors with a place for each expert (routers), to the layer and the axis.
        numbers: modules and attributes that follow it, to the value of each for fewer experts.
        fewer: that number of experts.
    """

    layers: tuple[str, ...]
    num_experts: int
    path: tuple[str, ...]
    tensors: Mapping[str, tuple[str, int]]
    numbers: Mapping[tuple[str, str], int]
    fewer: int

    def holder(self, config: Any) -> Any:
        """Return the part of a config that has the setting."""
        for name in self.path[:-1]:
            config = getattr(config, name)
        return config


def expert_layers(model: nn.Module) -> dict[str, int]:
    """Find the layers whose experts can be told apart.

    Args:
        model: with its experts taken apart.

    Returns:
        Dotted name to number of experts.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, UnfusedExperts)}
    weighted = next((name for name, module in found.items() if isinstance(module, SortedExperts)), None)
    if weighted is not None:
        raise ModelError(
            f"{weighted}: {found[weighted].fused_class.__name__} is handed tokens that its router has weighted already, so what an expert "
            "adds cannot be told from what it is sent; leave REAPPruningModifier out"
        )
    return {name: len(list(module.experts())) for name, module in found.items()}


def count_experts(model: nn.Module, fewer: int) -> ExpertCount:
    """Find what of a model follows from the number of its experts.

    Args:
        model: of transformers, with its experts taken apart; not changed.
        fewer: a smaller number of experts.

    Returns:
        What was found; nothing is proved yet.

    Raises:
        ModelError: layers differ in their number, or no setting of the config makes a model with fewer.
    """
    layers = expert_layers(model)
    numbers = sorted(set(layers.values()))
    if len(numbers) != 1:
        raise ModelError(f"{type(model).__name__}: layers of {' and '.join(map(str, numbers))} experts, where all must have as many")
    whole = class_twin(model)
    if whole is None:
        raise ModelError(f"{type(model).__name__}: its class does not build it from its config, so nothing can say that experts are gone")
    reasons = []
    for path in _paths(model.config, numbers[0]):
        found = _follow(model, whole, tuple(layers), path, numbers[0], fewer)
        if isinstance(found, ExpertCount):
            return found
        reasons.append(f"{'.'.join(path)}: {found}")
    why = f" ({'; '.join(reasons)})" if reasons else ""
    raise ModelError(f"{type(model).__name__}: no setting of its config makes a model with {fewer} of {numbers[0]} experts{why}")


def _paths(config: Any, value: int, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Settings of a config, and of configs in it, with a value; those named after experts first."""
    own = vars(config)
    names = [name for name, found in own.items() if type(found) is int and found == value]
    yield from ((*above, name) for name in sorted(names, key=lambda name: ("expert" not in name, name)))
    for name, part in own.items():
        if hasattr(part, "to_diff_dict") and not name.startswith("_"):
            yield from _paths(part, value, (*above, name))


def _follow(model: nn.Module, whole: nn.Module, layers: tuple[str, ...], path: tuple[str, ...], num_experts: int, fewer: int) -> Any:
    """Build the class with another value of a setting; what follows from it, or why that is not the number of experts."""
    changed = class_twin(model, {path: fewer})
    if changed is None:
        return f"its class builds no model with {fewer}"
    before, after = _tensors(whole), _tensors(changed)
    if before.keys() != after.keys():
        return "other tensors come with it"
    tensors: dict[str, tuple[str, int]] = {}
    reached = set()
    for name, old in before.items():
        axes = [axis for axis, (one, other) in enumerate(zip(old.shape, after[name].shape, strict=False)) if one != other]
        if not axes and old.dim() == after[name].dim():
            continue
        layer = _layer_of(name, layers)
        if layer is None or len(axes) != 1 or (old.shape[axes[0]], after[name].shape[axes[0]]) != (num_experts, fewer):
            return f"{name} changes from {list(old.shape)} to {list(after[name].shape)}"
        if name.startswith(f"{layer}."):
            reached.add(layer)
        else:
            tensors[name] = layer, axes[0]
    if reached != set(layers):
        return "it does not count the experts"
    return ExpertCount(layers, num_experts, path, tensors, dict(_numbers(whole, changed)), fewer)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _layer_of(name: str, layers: Sequence[str]) -> str | None:
    """The layer of experts with which a tensor has the most of its name in common; None where several have as much."""

    def common(layer: str) -> int:
        pairs = zip(name.split("."), layer.split("."), strict=False)
        return next((place for place, (one, other) in enumerate(pairs) if one != other), len(layer.split(".")))

    most = max(map(common, layers))
    near = [layer for layer in layers if common(layer) == most]
    return near[0] if len(near) == 1 else None


def _numbers(whole: nn.Module, changed: nn.Module) -> Iterator[tuple[tuple[str, str], int]]:
    others = dict(changed.named_modules())
    for name, module in whole.named_modules():
        for key, value in vars(module).items():
            other = vars(others[name]).get(key, value) if name in others else value
            if type(value) is int and type(other) is int and other != value:
                yield (name, key), other


def choose_experts(state: State, count: ExpertCount, kept: Mapping[str, Sequence[int]]) -> None:
    """Leave each layer the experts that are named, in that order, and say so in the config. Changes the model.

    Args:
        state: of the run; it knows how to undo all of it.
        count: what follows.
        kept: numbers of the experts, by layer; as many in each, all of them or `count.fewer`.
    """
    number = len(next(iter(kept.values())))
    for layer, chosen in kept.items():
        experts = state.model.get_submodule(layer)
        assert isinstance(experts, UnfusedExperts)
        fewer = experts.selection(chosen)
        state.replace_module(layer, fewer)
        state.touch(f"{layer}.{name}" for name, _ in fewer.named_modules() if name)
    for name, (layer, axis) in count.tensors.items():
        module, _, key = name.rpartition(".")
        held = _tensors(state.model)[name].detach()
        places = torch.tensor(list(kept[layer]), dtype=torch.int64, device=held.device)
        state.put_tensor(module, key, held.index_select(axis, places))
        state.settled.add(module)  # no later layer is calibrated without it
    if number == count.num_experts:
        return
    for (name, key), value in count.numbers.items():
        state.set_setting(state.model.get_submodule(name), key, value)
    state.set_setting(count.holder(state.model.config), count.path[-1], number)


def num_groups(model: nn.Module, count: ExpertCount, batch: Batch, device: torch.device, seed: int) -> int:
    """Find into how many groups the routers divide the experts, and prove that nothing else depends on their order.

    Args:
        model: the same afterwards.
        count: of it.
        batch: an excerpt of it runs, once for every number of groups that may be, and once as things are.
        device: where the model is.
        seed: of the orders.

    Returns:
        The number; 1 where routers look at all experts alike.

    Raises:
        ModelError: in no such order do the layers give what they gave.
    """
    part = batch_to(excerpt(batch, 0), device)
    with without_modifier_hooks(model), evaluation_mode(model), torch.no_grad():
        expected = _outputs(model, count, part)
        worst: dict[int, str] = {}
        for groups in possible_groups(model.config, count):
            state = State(model, keep_originals=True)
            generator = torch.Generator().manual_seed(seed % 2**63)
            orders = {layer: _order(count.num_experts, groups, generator) for layer in count.layers}
            try:
                choose_experts(state, count, orders)
                found = _outputs(model, count, part)
            finally:
                state.restore_originals()
            off = {layer: _median_difference(found[layer], expected[layer]) for layer in count.layers}
            layer = max(off, key=lambda name: off[name])
            if off[layer] <= _MOST:
                return groups
            worst[groups] = f"{layer} {off[layer]:.2g} off"
    raise ModelError(
        f"{type(model).__name__}: with its experts in another order its layers give something else ({some(list(worst.values()))}), so more "
        "depends on their numbers than routers and config, and none can be taken out"
    )


def possible_groups(config: Any, count: ExpertCount) -> list[int]:
    """List into how many groups the routers may divide the experts, as settings named after groups have it.

    Args:
        config: of the model.
        count: of it.

    Returns:
        Rising numbers, 1 the first.
    """
    own = vars(count.holder(config))
    named = {value for name, value in own.items() if _GROUPS.search(name) and type(value) is int and 1 < value < count.num_experts}
    return [1, *sorted(value for value in named if count.num_experts % value == 0)]


def check_enough(model: nn.Module, count: ExpertCount) -> None:
    """See by the config that as many experts stay as a router chooses for each token.

    Args:
        model: of transformers; not changed.
        count: of it.

    Raises:
        ModelError: fewer stay.
    """
    for name, value in chosen_for_each(model, count).items():
        if value > count.fewer:
            raise ModelError(_too_few(model, count, f"{name} is {value}"))


def chosen_for_each(model: nn.Module, count: ExpertCount) -> dict[str, int]:
    """Return what a config says of how many experts a router chooses for a token, by the name of the setting."""
    own = vars(count.holder(model.config))
    return {name: value for name, value in own.items() if _CHOSEN.search(name) and type(value) is int}


def _too_few(model: nn.Module, count: ExpertCount, why: str) -> str:
    of_all = f"{count.fewer} of {count.num_experts} experts"
    return f"{type(model).__name__}: its routers cannot choose among {of_all} ({why}); give a smaller sparsity"


def _order(num_experts: int, groups: int, generator: torch.Generator) -> list[int]:
    size = num_experts // groups
    return [group * size + int(place) for group in range(groups) for place in torch.randperm(size, generator=generator)]


def _outputs(model: nn.Module, count: ExpertCount, batch: Batch) -> dict[str, Tensor]:
    """What each layer of experts gives, [N, C] float32 on the CPU, of the last call."""
    found: dict[str, Tensor] = {}

    def keep(layer: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            del module, args
            found[layer] = output.detach().float().cpu().reshape(-1, output.shape[-1])

        return hook

    with ExitStack() as stack:
        for layer in count.layers:
            stack.callback(model.get_submodule(layer).register_forward_hook(keep(layer)).remove)
        call_model(model, batch)
    silent = [layer for layer in count.layers if layer not in found]
    if silent:
        raise ModelError(f"{some(silent)}: {len(silent)} layers of experts are not called in a forward; give data that exercises them")
    return found


def _median_difference(found_NC: Tensor, expected_NC: Tensor) -> float:
    """Of most tokens: one whose router is undecided may go elsewhere for a rounding error."""
    sizes_N = expected_NC.norm(dim=-1)
    off_N = (found_NC - expected_NC).norm(dim=-1) / sizes_N.clamp_min(1e-30)
    return float(off_N.nan_to_num(nan=torch.inf).median())


@contextmanager
def experts_seen(model: nn.Module, layer: str, take: Any) -> Iterator[None]:
    """Show what each expert of a layer gives.

    Args:
        model: with hooks until the end.
        layer: dotted name.
        take: called with the number of an expert, the rows [N] of its tokens among those of the layer, how many rows the layer was handed,
            the weights [N] that the router gives it there, and its outputs [N, C].

    Yields:
        Nothing.
    """
    experts = model.get_submodule(layer)
    assert isinstance(experts, UnfusedExperts)
    routing: dict[str, Tensor] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        routing.update(routing_of(args, kwargs))

    def show(index: int) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            del args
            rows, num_rows = module.token_rows
            hits = routing["top_k_index"][rows] == index
            take(index, rows, num_rows, (routing["top_k_weights"][rows] * hits).sum(-1), output)

        return hook

    with ExitStack() as stack:
        stack.callback(experts.register_forward_pre_hook(note, with_kwargs=True).remove)
        for index, expert in enumerate(experts.experts()):
            stack.callback(expert.register_forward_hook(show(index)).remove)
        yield


def routing_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Say what a layer of experts was handed, by name.

    Args:
        args: positional arguments of the call.
        kwargs: named ones.

    Returns:
        hidden_states, top_k_index, top_k_weights.
    """
    return {**dict(zip(("hidden_states", "top_k_index", "top_k_weights"), args, strict=False)), **kwargs}


def try_routing(model: nn.Module, count: ExpertCount, batch: Batch, device: torch.device, groups: int) -> None:
    """See that routers send tokens to as few experts as are to stay, whichever these are.

    Args:
        model: the same afterwards.
        count: of it.
        batch: an excerpt of it runs.
        device: where the model is.
        groups: into which the routers divide the experts.

    Raises:
        ModelError: a router cannot choose as many experts as it did, or names one that is gone.
    """
    size, fewer = count.num_experts // groups, count.fewer // groups
    first = [group * size + place for group in range(groups) for place in range(fewer)]
    check_enough(model, count)
    state = State(model, keep_originals=True)
    try:
        choose_experts(state, count, dict.fromkeys(count.layers, first))
        stray = _stray(model, count, batch_to(excerpt(batch, 0), device))
    finally:
        state.restore_originals()
    if stray:
        raise ModelError(
            f"{stray[0]}: with {count.fewer} of {count.num_experts} experts left its router names one that is gone, or gives no number; "
            "give a smaller sparsity"
        )


def _stray(model: nn.Module, count: ExpertCount, batch: Batch) -> list[str]:
    """The layers whose routers name an expert that is gone."""
    stray: list[str] = []

    def look(layer: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            del module
            routing = routing_of(args, kwargs)
            if int(routing["top_k_index"].max()) >= count.fewer or not bool(torch.isfinite(routing["top_k_weights"]).all()):
                stray.append(layer)

        return hook

    with ExitStack() as stack:
        stack.enter_context(without_modifier_hooks(model))
        stack.enter_context(evaluation_mode(model))
        stack.enter_context(torch.no_grad())
        for layer in count.layers:
            stack.callback(model.get_submodule(layer).register_forward_pre_hook(look(layer), with_kwargs=True).remove)
        try:
            call_model(model, batch)
        except (RuntimeError, IndexError) as error:
            raise ModelError(_too_few(model, count, one_line(error))) from error
    return stray
