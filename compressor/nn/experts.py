"""Experts one by one: a mixture-of-experts layer whose projections are ordinary linear layers, and whose forward is that of the fused one.

transformers keeps the weights of all experts of a layer in one tensor of three dimensions, which no target pattern reaches and no hook
sees. `UnfusedExperts` takes the place of such a module: `0.gate_proj`, `0.up_proj`, `0.down_proj`, `1.gate_proj`, ... are linear layers
whose weights are views of the fused tensors, so nothing is copied. Every expert is called in every forward, also with no token at all: how
often a module is called then depends on no data.

Shapes: N tokens, K experts per token, C columns (in_features).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compressor.nn.online_rotation import is_watched, unwatched_forward

# Where the weights of single experts lie in the fused tensors of transformers: taking those apart, and putting rows together.


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

    def fused_names(self) -> list[str]:
        """Names of all fused tensors, biases after their weights."""
        return [name for weight in self.sources for name in ((weight, f"{weight}_bias") if self.has_bias else (weight,))]


def split_weights(layout: ExpertLayout, fused_name: str, whole: Tensor) -> dict[str, Tensor]:
    """Take a fused tensor apart.

    Args:
        layout: of the module that it belongs to.
        fused_name: name of the tensor, of weights or of biases.
        whole: [E, ...], the tensor.

    Returns:
        `0.gate_proj.weight` and so on to views of the tensor.
    """
    is_bias = fused_name.endswith("_bias")
    names = layout.sources[fused_name.removesuffix("_bias")]
    found = {}
    for index, part in enumerate(whole):
        rows = part.t() if layout.is_transposed and not is_bias else part
        for place, name in enumerate(names):
            own = rows.chunk(len(names))[place] if layout.is_concatenated else rows[place :: len(names)]
            found[f"{index}.{name}.{'bias' if is_bias else 'weight'}"] = own if len(names) > 1 else rows
    return found


def joined_rows(parts: list[Tensor], layout: ExpertLayout) -> Tensor:
    """Put rows of gate and up together as they lie in the fused tensor.

    Args:
        parts: weights or biases of gate and up, or a single one.
        layout: of the fused tensor.

    Returns:
        The rows; a single part as it is.
    """
    values = [part.detach() for part in parts]
    if len(values) == 1:
        return values[0]
    return torch.cat(values) if layout.is_concatenated else torch.stack(values, dim=1).flatten(0, 1)


_INDEX_ADD = "eager"  # this implementation of transformers adds expert after expert; all others sum over the K slots of a token
_MODULE_STATE = frozenset(vars(nn.Module()))
_USUAL_NAME = "_usual_name"


class TokenRows(NamedTuple):
    """Which tokens an expert is working on.

    Attributes:
        rows: their numbers among the tokens of the layer's input.
        num_tokens: how many tokens the layer's input has.
    """

    rows: Tensor
    num_tokens: int


class Expert(nn.Module):
    """One expert: its projections, and the gate of the layer that it belongs to.

    Attributes:
        token_rows: what the expert is working on; None when it works on all tokens, or rests.
    """

    def __init__(self, projections: Mapping[str, nn.Module], layer: UnfusedExperts) -> None:
        """Take the projections under their names, and know the layer without owning it."""
        super().__init__()
        self.token_rows: TokenRows | None = None
        self.__dict__["_layer"] = layer
        for name, linear in projections.items():
            self.add_module(name, linear)

    @property
    def is_watched(self) -> bool:
        """True while a projection carries a hook."""
        return any(is_watched(layer) for layer in self.children())

    @property
    def is_read_fused(self) -> bool:
        """Of the layer."""
        layer: UnfusedExperts = self.__dict__["_layer"]
        return layer.is_read_fused

    def forward(self, x_NC: Tensor) -> Tensor:
        """Compute what the expert makes of its tokens.

        Args:
            x_NC: [N, C]; N may be 0.

        Returns:
            [N, C], not yet weighted.
        """
        return self.compute(x_NC, with_hooks=True)

    def compute(self, x_NC: Tensor, *, with_hooks: bool, own_N1: Tensor | None = None) -> Tensor:
        """Compute what `forward` does.

        Args:
            x_NC: [N, C]; N may be 0.
            with_hooks: False passes the hooks of the projections by, but for rotations.
            own_N1: True where a token is the expert's; each projection sees zeros for the others, so that a scale over all tokens is that
                of its own. None for all.

        Returns:
            [N, C], not yet weighted.
        """

        def project(name: str, x: Tensor) -> Tensor:
            projection = self.get_submodule(name)
            x = x if own_N1 is None else torch.where(own_N1, x, torch.zeros_like(x))
            output: Tensor = projection(x) if with_hooks else unwatched_forward(projection, x)
            return output

        layer: UnfusedExperts = self.__dict__["_layer"]
        layout = layer.layout
        first = [project(name, x_NC) for name in layout.sources[layout.fused_first]]
        return layer.normed(project(layout.down, layer.gated(first)))


class UnfusedExperts(nn.Module):
    """Stands where a fused experts module of transformers stood, and computes what that did.

    Attributes:
        layout: of the fused module.
        fused_class: class of the fused module, whose gate is used.
        calibrate_all: show all tokens to the hooks of every expert; the output stays that of the routed tokens.
        is_read_fused: transformers keeps such layers fused, and of a quantized one rounds no inputs, nor those of any other layer.
    """

    is_read_fused = True
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
        _take_over(self, fused, but=layout.fused_names())
        self.layout = layout
        self.fused_class = type(fused)
        self.calibrate_all = False
        for index, projections in enumerate(_projections(fused, layout)):
            self.add_module(str(index), Expert(projections, self))
        for name, child in fused.named_children():
            self.add_module(name, child)
        self.train(fused.training)

    def selection(self, chosen: Sequence[int]) -> UnfusedExperts:
        """Make a layer of some of these experts, or of all in another order. It holds the same parameters.

        Args:
            chosen: numbers of the experts, in their new order.

        Returns:
            The layer; what it says of their number is for the caller to set.
        """
        new = UnfusedExperts.__new__(UnfusedExperts)
        nn.Module.__init__(new)
        _take_over(new, self, but=())
        own = list(self.experts())
        for place, index in enumerate(chosen):
            new.add_module(str(place), Expert(dict(own[index].named_children()), new))
        for name, child in self.named_children():
            if not isinstance(child, Expert):
                new.add_module(name, child)
        new.train(self.training)
        return new

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

    def forward_dense(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute what `forward` does up to rounding, with every expert on all rows: no shape depends on the routing.

        Args:
            hidden_states: [N, C].
            top_k_index: [N, K] expert of each slot; a number beyond the last expert means none.
            top_k_weights: [N, K] weight of each slot.

        Returns:
            [N, C], in the dtype of the hidden states.
        """
        final: Tensor | None = None
        for index, expert in enumerate(self.experts()):
            hits = top_k_index == index
            own = hits.any(-1, keepdim=True)
            weighted = expert.compute(hidden_states, with_hooks=True, own_N1=own) * (top_k_weights * hits).sum(-1, keepdim=True)
            chosen = torch.where(own, weighted, torch.zeros_like(weighted))
            final = chosen if final is None else final + chosen
        assert final is not None
        return final.to(hidden_states.dtype)

    def gated(self, first: list[Tensor]) -> Tensor:
        """Combine gate and up as the fused class does.

        Args:
            first: outputs of gate and up, or of up alone.

        Returns:
            The input of the down projection.
        """
        if len(first) == 1:
            return self.act_fn(first[0])
        joined = torch.cat(first, dim=-1) if self.layout.is_concatenated else torch.stack(first, dim=-1).flatten(-2)
        inner: Tensor = self.fused_class._apply_gate(self, joined)  # type: ignore[attr-defined]
        return inner

    def normed(self, output: Tensor) -> Tensor:
        """Normalize the output of an expert where the fused class does.

        Args:
            output: of the down projection.

        Returns:
            Output of the expert.
        """
        return self.post_expert_norm(output) if getattr(self, "has_post_expert_norm", False) else output

    def _outputs(self, hidden_states: Tensor, top_k_index: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for index, expert in enumerate(self.experts()):
            rows, slots = torch.where(top_k_index == index)
            if self.calibrate_all and expert.is_watched:
                expert(hidden_states)
                yield rows, slots, expert.compute(hidden_states[rows], with_hooks=False)
                continue
            expert.token_rows = TokenRows(rows, hidden_states.shape[0])
            try:
                output = expert(hidden_states[rows])
            finally:
                expert.token_rows = None
            yield rows, slots, output


class SortedExperts(UnfusedExperts):
    """Stands where a module stood that is handed one weighted copy of all tokens for each expert, one after the other, as in Llama 4.

    A row of zeros is a token that is not sent to the expert; without biases it comes out as zeros, and so it is left out. transformers has
    single experts in its place, too, and hands each its rows as [N, C], of which compressed-tensors takes one scale: so does this.
    """

    is_read_fused = False

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Send to each expert its tokens.

        Args:
            hidden_states: [E * N, C], expert after expert.

        Returns:
            [E * N, C].
        """
        experts, outputs = list(self.experts()), torch.zeros_like(hidden_states)
        num_tokens = len(hidden_states) // len(experts)
        for number, (expert, x_NC) in enumerate(zip(experts, hidden_states.split(num_tokens), strict=True)):
            (rows,) = torch.where(x_NC.any(-1))
            expert.token_rows = TokenRows(rows, num_tokens)
            try:
                outputs[number * num_tokens + rows] = expert(x_NC[rows])
            finally:
                expert.token_rows = None
        return outputs

    def forward_dense(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Compute what `forward` does with every expert on all of its rows.

        Args:
            hidden_states: [E * N, C], expert after expert.

        Returns:
            [E * N, C].
        """
        experts = list(self.experts())
        parts = hidden_states.split(len(hidden_states) // len(experts))
        return torch.cat([expert(x_NC) for expert, x_NC in zip(experts, parts, strict=True)])

    def gated(self, first: list[Tensor]) -> Tensor:
        """Combine gate and up.

        Args:
            first: outputs of gate and up.

        Returns:
            The input of the down projection.
        """
        gate, up = first
        return up * self.act_fn(gate)


def tokens_are_rows(model: nn.Module, quantized: Iterable[str]) -> bool:
    """Say whether each row of an input is a token to all layers of a model whose inputs have scales by token.

    compressed-tensors tells tokens apart by the first two dimensions, whatever the rank, and layers do as it does, so that transformers
    computes the same. Where it rounds no inputs at all there is nobody to agree with, and a token has a scale of its own.

    Args:
        model: its experts taken apart.
        quantized: dotted names of the modules that are quantized, or will be.

    Returns:
        True if experts that transformers keeps fused are among them.
    """
    return any(_is_read_fused(model, name.split(".")) for name in quantized)


def _is_read_fused(module: nn.Module | None, path: list[str]) -> bool:
    for part in path[:-1]:
        module = None if module is None else module._modules.get(part)  # of experts that were pruned nothing is there
    return isinstance(module, Expert) and module.is_read_fused


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
        weights, biases = (_stacked(layers, key, layout) for key in ("weight", "bias"))
        assert weights is not None
        found[fused_name] = weights.transpose(1, 2).contiguous() if layout.is_transposed else weights
        if biases is not None:
            found[f"{fused_name}_bias"] = biases
    return found


def _stacked(layers: list[list[nn.Module]], key: str, layout: ExpertLayout) -> Tensor | None:
    if key == "bias" and not layout.has_bias:
        return None
    return torch.stack([joined_rows([layer.get_parameter(key) for layer in row], layout) for row in layers])


def _take_over(new: nn.Module, old: nn.Module, but: Collection[str]) -> None:
    """Give a module the attributes, parameters and buffers of another, as its author may have put them there."""
    new.__dict__.update({key: value for key, value in vars(old).items() if key not in _MODULE_STATE})
    new._parameters.update({name: one for name, one in old._parameters.items() if name not in but})
    new._buffers.update(old._buffers)
    new._non_persistent_buffers_set |= old._non_persistent_buffers_set


def _projections(fused: nn.Module, layout: ExpertLayout) -> Iterator[dict[str, nn.Linear]]:
    tensors: dict[str, nn.Parameter] = {}
    for fused_name in layout.fused_names():
        whole = fused.get_parameter(fused_name)
        parts = split_weights(layout, fused_name, whole.detach())
        tensors |= {key: nn.Parameter(part, requires_grad=whole.requires_grad) for key, part in parts.items()}
    names = {layout.gate: "gate_proj", layout.up: "up_proj", layout.down: "down_proj"}
    for index in range(fused.get_parameter("down_proj").shape[0]):
        yield {
            name: _linear(tensors[f"{index}.{name}.weight"], tensors.get(f"{index}.{name}.bias"), usual)
            for name, usual in names.items()
            if name is not None
        }


def usual_name(projection: nn.Module) -> str | None:
    """Return what recipes of llm-compressor call a projection of an expert, whatever the files of its model do; None for other modules."""
    name: str | None = projection.__dict__.get(_USUAL_NAME)
    return name


def _linear(weight: nn.Parameter, bias: nn.Parameter | None, usual: str) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    linear.weight = weight
    if bias is not None:
        linear.bias = bias
    linear.__dict__[_USUAL_NAME] = usual
    return linear
