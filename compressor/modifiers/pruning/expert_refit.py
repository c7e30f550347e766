"""Refitting the experts that stay to what all experts gave, layer by layer; the arithmetic is in `compressor.algorithms.pruning.refit`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compressor.algorithms.costs import FLOAT32_BYTES, Memory
from compressor.algorithms.pruning.refit import SentTokens, refit
from compressor.data.collate import ALL_COUNTED
from compressor.errors import ModelError
from compressor.lifecycle import State
from compressor.model.evaluation import evaluation_mode
from compressor.modifiers.pruning.expert_count import ExpertCount, chosen_for_each, routing_of
from compressor.nn.experts import UnfusedExperts

MAX_TOKENS = 32768  # of each layer, drawn from all batches
_MAX_BYTES = 4 << 30  # of all layers together
_DAMPENING_FRAC = 0.01
_ROUNDS = 4
_HELD_OUT_FRAC = 0.125  # tokens that only judge


@dataclass
class SeenLayer:
    """What a layer of experts was handed before some of them went, and what it gave; on the CPU.

    Attributes:
        block: dotted name of the module that holds the router and the experts.
        inputs: [n, C] of the block, a tensor for each batch.
        outputs: [n, C] of the experts.
    """

    block: str
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


def blocks_of(count: ExpertCount) -> dict[str, str]:
    """Find the module around the experts of each layer and all that follows their number, which computes the routing.

    Args:
        count: of the model.

    Returns:
        Dotted name by layer.
    """
    found = {}
    for layer in count.layers:
        names = [layer.split("."), *(name.split(".") for name, (owner, _) in count.tensors.items() if owner == layer)]
        common = next((place for place, parts in enumerate(zip(*names, strict=False)) if len(set(parts)) > 1), min(map(len, names)) - 1)
        found[layer] = ".".join(names[0][:common])
    return found


def kept_frac(model: nn.Module, count: ExpertCount, num_tokens: int) -> float:
    """Say which share of all tokens is kept, so that what is kept of all layers fits.

    Args:
        model: that is pruned.
        count: of it.
        num_tokens: of the data.

    Returns:
        1 at most.
    """
    experts = model.get_submodule(count.layers[0])
    assert isinstance(experts, UnfusedExperts)
    num_columns = next(experts.experts()).get_submodule(experts.layout.down).get_parameter("weight").shape[0]
    room = min(MAX_TOKENS, _MAX_BYTES // (2 * 4 * num_columns * len(count.layers)))
    return min(1.0, room / max(1, num_tokens))


def refit_memory(model: nn.Module, count: ExpertCount, num_tokens: int) -> Memory:
    """Say what refitting takes: what is kept of all layers, and of one layer what its experts are sent and what they shall give.

    Args:
        model: with or without values, and with all experts or fewer.
        count: of it.
        num_tokens: of the data.

    Returns:
        The memory; new weights are tensors of their own.
    """
    experts = model.get_submodule(count.layers[0])
    assert isinstance(experts, UnfusedExperts)
    weight = next(experts.experts()).get_submodule(experts.layout.down).get_parameter("weight")
    (columns, inner), num_layers = weight.shape, len(count.layers)
    tokens = math.ceil(kept_frac(model, count, num_tokens) * num_tokens)
    chosen = min(count.fewer, max(chosen_for_each(model, count).values(), default=count.fewer))
    new = weight.element_size() * num_layers + 2 * FLOAT32_BYTES  # of one layer also what it moves by, and the sums
    # Joined inputs and outputs, and of each those that are fitted or the difference; what experts are sent, plain and weighted.
    working = FLOAT32_BYTES * tokens * (5 * columns + 2 * chosen * inner) + new * count.fewer * columns * inner
    return Memory(kept_bytes=2 * FLOAT32_BYTES * tokens * columns * num_layers, working_bytes=working)


@contextmanager
def layer_seen(state: State, layer: str, seen: SeenLayer, frac: float) -> Iterator[None]:
    """Keep what a block is handed, and what its experts give.

    Args:
        state: of the run; its token mask says what is padding. The model has hooks until the end.
        layer: dotted name of the experts.
        seen: gets it.
        frac: share of the tokens that is kept.

    Yields:
        Nothing.
    """

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len(args) + len(kwargs) != 1 or len(given) != 1:
            raise ModelError(
                f"{seen.block}: holds router and experts, and is handed more than hidden states, so that experts cannot be refitted; set "
                "refit: false"
            )
        seen.inputs.append(_kept_rows(state, given[0], layer, frac, len(seen.inputs)))

    def after(module: nn.Module, args: Any, output: Tensor) -> None:
        del module, args
        seen.outputs.append(_kept_rows(state, output, layer, frac, len(seen.outputs)))

    with ExitStack() as stack:
        block = state.model.get_submodule(seen.block)  # what it is handed goes through the hooks of its author again
        stack.callback(block.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
        stack.callback(state.model.get_submodule(layer).register_forward_hook(after).remove)
        yield


def _kept_rows(state: State, value: Tensor, layer: str, frac: float, batch: int) -> Tensor:
    """Draw rows of real tokens; the same for all that is seen of a batch."""
    rows_NC = value.detach().reshape(-1, value.shape[-1])
    if state.token_mask is not None:
        if len(rows_NC) != state.token_mask.numel():
            raise ModelError(
                f"{layer}: was handed {len(rows_NC)} rows for a batch of {state.token_mask.numel()} tokens, not all of which count; "
                f"{ALL_COUNTED}"
            )
        rows_NC = rows_NC[state.token_mask.flatten().to(rows_NC.device)]
    drawn_N = _shuffled(len(rows_NC), state.seed + batch)[: math.ceil(frac * len(rows_NC))].sort().values
    return rows_NC[drawn_N.to(rows_NC.device)].float().cpu()


def _shuffled(count: int, seed: int) -> Tensor:
    # Not every so many: what stands at one place in a sequence, such as its first token, is alike.
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed % 2**63))


def refit_layer(state: State, layer: str, seen: SeenLayer) -> tuple[float, float]:
    """Move the last projections of the experts that stay. Changes the model, unless held-out tokens say that it is no better.

    Args:
        state: of the run, whose model has fewer experts.
        layer: dotted name of the experts.
        seen: of the layer when it had all.

    Returns:
        Relative squared error of the layer's outputs on held-out tokens, before and after.
    """
    experts = state.model.get_submodule(layer)
    assert isinstance(experts, UnfusedExperts)
    inputs_NC, outputs_NC = torch.cat(seen.inputs).to(state.device), torch.cat(seen.outputs).to(state.device)
    drawn_N = _shuffled(len(inputs_NC), state.seed).to(state.device)
    held_out = max(1, round(_HELD_OUT_FRAC * len(inputs_NC)))
    judging_N, fits_N = drawn_N[:held_out].sort().values, drawn_N[held_out:].sort().values
    names = [f"{layer}.{index}.{experts.layout.down}" for index, _ in enumerate(experts.experts())]
    weights = [state.model.get_submodule(name).get_parameter("weight") for name in names]
    with torch.no_grad(), evaluation_mode(state.model):
        judged, held_NC = _sent(state.model, layer, seen.block, inputs_NC[judging_N])
        sent, given_NC = _sent(state.model, layer, seen.block, inputs_NC[fits_N])
        before = _relative_error(held_NC, outputs_NC[judging_N])
        old = [weight.float() for weight in weights]
        new = refit(sent, old, outputs_NC[fits_N] - given_NC, _DAMPENING_FRAC, _ROUNDS)
        rounded = [one.to(weight.dtype) for one, weight in zip(new, weights, strict=True)]
        for tokens, one, was in zip(judged, rounded, old, strict=True):
            held_NC = held_NC.index_add(0, tokens.rows_n, tokens.inputs_nD @ (one.float() - was).T)  # it may be an inference tensor
        after = _relative_error(held_NC, outputs_NC[judging_N])
        if not after < before:
            return before, before
        for name, one in zip(names, rounded, strict=True):
            state.put_tensor(name, "weight", one)
            state.settled.add(name)
    return before, after


def _sent(model: nn.Module, layer: str, block: str, inputs_NC: Tensor) -> tuple[list[SentTokens], Tensor]:
    """Run a block on tokens; what each expert is sent, and what the experts give together."""
    experts = model.get_submodule(layer)
    assert isinstance(experts, UnfusedExperts)
    routing: dict[str, Any] = {}
    inner: dict[int, Tensor] = {}
    given: list[Tensor] = []

    def keep_inner(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            del module
            inner[index] = args[0].detach().to(torch.float32, copy=True)

        return hook

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        del module
        routing.update(routing_of(args, kwargs))
        given.append(output.detach().to(torch.float32, copy=True))  # the block may write to it

    with ExitStack() as stack:
        stack.callback(experts.register_forward_hook(note, with_kwargs=True).remove)
        for index, expert in enumerate(experts.experts()):
            down = expert.get_submodule(experts.layout.down)
            stack.callback(down.register_forward_pre_hook(keep_inner(index)).remove)
        dtype = next(experts.parameters()).dtype
        model.get_submodule(block)(inputs_NC.to(dtype)[None])
    found = []
    for index, _ in enumerate(experts.experts()):
        rows_n, slots_n = torch.where(routing["top_k_index"] == index)
        found.append(SentTokens(rows_n, inner[index] * routing["top_k_weights"][rows_n, slots_n, None].float()))
    return found, given[0]


def _relative_error(found_NC: Tensor, wanted_NC: Tensor) -> float:
    return float((found_NC - wanted_NC).square().sum() / wanted_NC.square().sum().clamp_min(1e-30))
