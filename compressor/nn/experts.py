"""Experts one by one: a mixture-of-experts layer whose projections are ordinary linear layers, and whose forward is that of the fused one.

transformers keeps the weights of all experts of a layer in one tensor of three dimensions, which no target pattern reaches and no hook
sees. `UnfusedExperts` takes the place of such a module: `0.gate_proj`, `0.up_proj`, `0.down_proj`, `1.gate_proj`, ... are linear layers
whose weights are views of the fused tensors, so nothing is copied. Every expert is called in every forward, also with no token at all: how
often a module is called then depends on no data.

Shapes: N tokens, K experts per token, C columns (in_features).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_INDEX_ADD = "eager"  # this implementation of transformers adds expert after expert; all others sum over the K slots of a token
_MODULE_STATE = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class ExpertLayout:
    """Where the projections of one expert lie in the fused tensors, and what they are called by themselves.

    Attributes:
        gate: name of the gate projection; None for experts without a gate.
        up: name of the up projection.
        down: name of the down projection.
        is_transposed: weights lie as [in, out].
        is_concatenated: gate and up lie one after the other; else they alternate, row by row.
        has_bias: there are `gate_up_proj_bias` (or `up_proj_bias`) and `down_proj_bias`.
    """

    gate: str | None
    up: str
    down: str
    is_transposed: bool = False
    is_concatenated: bool = True
    has_bias: bool = False

    @property
    def fused_first(self) -> str:
        """Name of the fused tensor that the hidden states meet first."""
        return "up_proj" if self.gate is None else "gate_up_proj"

    @property
    def sources(self) -> dict[str, tuple[str, ...]]:
        """Names of the fused weights, and of the projections that lie in each, in their order."""
        first = (self.up,) if self.gate is None else (self.gate, self.up)
        return {self.fused_first: first, "down_proj": (self.down,)}


class TokenRows(NamedTuple):
    """Which tokens an expert is working on.

    Attributes:
        rows: their numbers among the tokens of the layer's input.
        num_tokens: how many tokens the layer's input has.
    """

    rows: Tensor
    num_tokens: int


class Expert(nn.Module):
    """The projections of one expert.

    Attributes:
        token_rows: what the expert is working on; None when it works on all tokens, or rests.
    """

    def __init__(self, projections: Mapping[str, nn.Linear]) -> None:
        """Take the projections under their names."""
        super().__init__()
        self.token_rows: TokenRows | None = None
        for name, linear in projections.items():
            self.add_module(name, linear)

    @property
    def is_watched(self) -> bool:
        """True while a projection carries a hook."""
        return any(layer._forward_pre_hooks or layer._forward_hooks for layer in self.children())


class UnfusedExperts(nn.Module):
    """Stands where a fused experts module of transformers stood, and computes what that did.

    Attributes:
        layout: of the fused module.
        fused_class: class of the fused module, whose gate is used.
        calibrate_all: show all tokens to the hooks of every expert; the output stays that of the routed tokens.
    """

    config: Any
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]

    def __init__(self, fused: nn.Module, layout: ExpertLayout) -> None:
        """Take over everything of the fused module but its weights, which become views in the experts.

        Args:
            fused: a module with the interface of transformers' `use_experts_implementation`; not changed.
            layout: of its weights.
        """
        super().__init__()
        self.__dict__.update({key: value for key, value in vars(fused).items() if key not in _MODULE_STATE})
        self.layout = layout
        self.fused_class = type(fused)
        self.calibrate_all = False
        for index, projections in enumerate(_projections(fused, layout)):
            self.add_module(str(index), Expert(projections))
        for name, child in fused.named_children():
            self.add_module(name, child)
        self.train(fused.training)

    def experts(self) -> Iterator[Expert]:
        """Yield the experts in their order."""
        for child in self.children():
            if isinstance(child, Expert):
                yield child

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Send each token through its experts, and add up what they give.

        Args:
            hidden_states: [N, C].
            top_k_index: [N, K] expert of each slot; a number beyond the last expert means none.
            top_k_weights: [N, K] weight of each slot.

        Returns:
            [N, C], in the dtype of the hidden states.
        """
        if getattr(getattr(self, "config", None), "_experts_implementation", _INDEX_ADD) == _INDEX_ADD:
            final = torch.zeros_like(hidden_states)
            for rows, slots, output in self._outputs(hidden_states, top_k_index):
                final.index_add_(0, rows, (output * top_k_weights[rows, slots, None]).to(final.dtype))
            return final
        by_slot: Tensor | None = None
        for rows, slots, output in self._outputs(hidden_states, top_k_index):
            weighted = output * top_k_weights[rows, slots, None]
            if by_slot is None:
                by_slot = weighted.new_zeros(*top_k_index.shape, weighted.shape[-1])
            by_slot[rows, slots] = weighted
        assert by_slot is not None
        return by_slot.sum(dim=1).to(hidden_states.dtype)

    def _outputs(self, hidden_states: Tensor, top_k_index: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for index, expert in enumerate(self.experts()):
            rows, slots = torch.where(top_k_index == index)
            if self.calibrate_all and expert.is_watched:
                self._run(expert, hidden_states, with_hooks=True)
                yield rows, slots, self._run(expert, hidden_states[rows], with_hooks=False)
                continue
            expert.token_rows = TokenRows(rows, hidden_states.shape[0])
            try:
                output = self._run(expert, hidden_states[rows], with_hooks=True)
            finally:
                expert.token_rows = None
            yield rows, slots, output

    def _run(self, expert: Expert, x_NC: Tensor, *, with_hooks: bool) -> Tensor:
        def project(name: str, x: Tensor) -> Tensor:
            layer = expert.get_submodule(name)
            output: Tensor = layer(x) if with_hooks else layer.forward(x)
            return output

        layout = self.layout
        if layout.gate is None:
            inner = self.act_fn(project(layout.up, x_NC))
        else:
            gate, up = project(layout.gate, x_NC), project(layout.up, x_NC)
            joined = torch.cat([gate, up], dim=-1) if layout.is_concatenated else torch.stack([gate, up], dim=-1).flatten(-2)
            inner = self.fused_class._apply_gate(self, joined)  # type: ignore[attr-defined]
        output = project(layout.down, inner)
        normed: Tensor = self.post_expert_norm(output) if getattr(self, "has_post_expert_norm", False) else output
        return normed


def expert_rows(model: nn.Module, name: str) -> TokenRows | None:
    """Say which tokens a projection of an expert is working on.

    Args:
        model: the model.
        name: dotted name of any module.

    Returns:
        The rows; None for what is no expert's projection, or works on all tokens.
    """
    parent = model.get_submodule(name.rpartition(".")[0])
    return parent.token_rows if isinstance(parent, Expert) else None


def fused_weights(experts: UnfusedExperts) -> dict[str, Tensor]:
    """Put the weights that are still floats back into fused tensors.

    Args:
        experts: not changed.

    Returns:
        Name of each fused tensor, of which no projection of any expert has been replaced, to a copy of it; biases with their weights.
    """
    layout, found = experts.layout, {}
    for fused_name, projections in layout.sources.items():
        layers = [[expert.get_submodule(name) for name in projections] for expert in experts.experts()]
        if not all(isinstance(layer, nn.Linear) for row in layers for layer in row):
            continue
        weights = torch.stack([_joined([layer.get_parameter("weight") for layer in row], layout) for row in layers])
        found[fused_name] = weights.transpose(1, 2).contiguous() if layout.is_transposed else weights
        if layout.has_bias:
            found[f"{fused_name}_bias"] = torch.stack([_joined([layer.get_parameter("bias") for layer in row], layout) for row in layers])
    return found


def _joined(parts: list[Tensor], layout: ExpertLayout) -> Tensor:
    """Rows of gate and up as they lie in the fused tensor; a single part as it is."""
    values = [part.detach() for part in parts]
    if len(values) == 1:
        return values[0]
    return torch.cat(values) if layout.is_concatenated else torch.stack(values, dim=1).flatten(0, 1)


def _projections(fused: nn.Module, layout: ExpertLayout) -> Iterator[dict[str, nn.Linear]]:
    num_experts = fused.get_parameter("down_proj").shape[0]
    for index in range(num_experts):
        yield {
            name: _linear(*_part(fused, fused_name, layout, index, place, len(names)))
            for fused_name, names in layout.sources.items()
            for place, name in enumerate(names)
        }


def _part(
    fused: nn.Module, fused_name: str, layout: ExpertLayout, index: int, place: int, num_parts: int
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Weight [out, in] and bias of one projection, as views."""
    whole = fused.get_parameter(fused_name)
    tensors = [whole[index].t() if layout.is_transposed else whole[index]]
    if layout.has_bias:
        tensors.append(fused.get_parameter(f"{fused_name}_bias")[index])
    if num_parts > 1:
        tensors = [tensor.chunk(num_parts)[place] if layout.is_concatenated else tensor[place::num_parts] for tensor in tensors]
    views = [nn.Parameter(tensor.detach(), requires_grad=whole.requires_grad) for tensor in tensors]
    return views[0], views[1] if layout.has_bias else None


def _linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    linear.weight = weight
    if bias is not None:
        linear.bias = bias
    return linear
