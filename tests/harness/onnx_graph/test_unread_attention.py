"""What mixes activations and is not read is a block of unknown roles, and no contract about attention holds over it."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.onnx_graph.census.baseline import take_baseline
from harness.onnx_graph.census.census import census
from harness.onnx_graph.contracts.base import Holding
from harness.onnx_graph.contracts.registry import contract_from_names
from harness.onnx_graph.roundtrip.optimizers import optimize

pytestmark = pytest.mark.filterwarnings("ignore")  # both exporters warn of themselves
WIDTH, LENGTH, HEADS = 32, 5, 4
ALL = contract_from_names("separate-qkv,same-block-count,role-weights,numeric-equal")


class Block(nn.Module):
    """A pre-norm block, whose three projections onnxsim packs, around any way of mixing."""

    def __init__(self, mix: Callable[..., Tensor]) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), mix
        self.wq, self.wk, self.wv, self.wo, self.gate = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))
        self.over_heads = nn.Parameter(torch.randn(HEADS, HEADS))

    def heads(self, flat: Tensor) -> Tensor:
        return flat.view(1, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2)

    def out(self, mixed: Tensor) -> Tensor:
        return self.wo(mixed.transpose(1, 2).reshape(1, LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.out(self.mix(self, self.heads(self.wq(h)), self.heads(self.wk(h)), self.heads(self.wv(h))))


class Flat(Block):
    """A block whose mixing works on the activation itself."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self, self.norm(x))


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5


def _talking_heads(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhij,hg->bgij", _scores(q, k), block.over_heads).softmax(-1)
    return torch.einsum("bhij,hg->bgij", weights, block.over_heads) @ v


def _exp_over_sum(_: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights / weights.sum(-1, keepdim=True)) @ v


def _divided(_: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = _scores(q, k).softmax(-1)
    weights = weights * (weights > 0.2)
    return (weights / weights.sum(-1, keepdim=True)) @ v


def _differential(_: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first, second = (_scores(*pair).softmax(-1) for pair in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True))
    return (first - 0.3 * second) @ v


def _linear(_: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.transpose(-1, -2) @ v) / (q @ k.sum(-2, keepdim=True).transpose(-1, -2))


def _linear_scores_first(_: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (F.relu(q) @ F.relu(k).transpose(-1, -2)) @ v


def _hardmax(_: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.one_hot(_scores(q, k).argmax(-1), LENGTH).float() @ v


def _elementwise(_: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q[:, :, :, None] * k[:, :, None]).sum(-1).sigmoid()
    return (weights[..., None] * v[:, :, None]).sum(3)


def _distances(_: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (-(q[:, :, :, None] - k[:, :, None]).pow(2).sum(-1)).softmax(-1) @ v


def _state_space(_: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, steps = torch.zeros(1, HEADS, WIDTH // HEADS, WIDTH // HEADS), []
    for step in range(LENGTH):
        state = state * 0.9 + k[:, :, step, :, None] * v[:, :, step, None]
        steps.append((state * q[:, :, step, None]).sum(-1))
    return torch.stack(steps, 2)


def _rows(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q[:, :, :, None], k[:, :, None]


def _max_plus(_: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one, other = _rows(q, k)
    return ((one + other).amax(-1, keepdim=True) + v[:, :, None]).amax(3)


def _additive(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one, other = _rows(q, k)
    return ((torch.tanh(one + other) @ block.wo.weight[: WIDTH // HEADS, :1]).softmax(3) * v[:, :, None]).sum(3)


def _inverse_distances(_: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one, other = _rows(q, k)
    return ((1 / (1 + (one - other).abs().sum(-1, keepdim=True))) + v[:, :, None]).amax(3)


def _relation(block: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    pair = torch.cat(torch.broadcast_tensors(*_rows(q, k)), -1)
    return torch.relu(pair @ block.wo.weight[: 2 * WIDTH // HEADS, : WIDTH // HEADS]).sum(3) + v


def _hard(_: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.gather(v, 2, _scores(q, k).argmax(-1, keepdim=True).expand(-1, -1, -1, WIDTH // HEADS))


def _best_of_near_tokens(_: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.stack([(q * k.roll(shift, 2)).sum(-1) for shift in range(3)], -1).softmax(-1)
    chosen = weights.topk(2, -1).indices
    near = torch.stack([v.roll(shift, 2) for shift in range(3)], 3).gather(3, chosen[..., None].expand(-1, -1, -1, -1, WIDTH // HEADS))
    return (weights.gather(-1, chosen)[..., None] * near).sum(3)


UNKNOWN: dict[str, Callable[..., Tensor]] = {
    "talking heads": _talking_heads,
    "sigmoid": lambda _, q, k, v: torch.sigmoid(_scores(q, k) - 1.6) @ v,
    "relu": lambda _, q, k, v: torch.relu(_scores(q, k)) / LENGTH @ v,
    "exp over sum": _exp_over_sum,
    "softmax1": lambda _, q, k, v: torch.exp(_scores(q, k)) / (1 + torch.exp(_scores(q, k)).sum(-1, keepdim=True)) @ v,
    "log-softmax": lambda _, q, k, v: torch.log_softmax(_scores(q, k), -1).exp() @ v,
    "bias behind": lambda _, q, k, v: (_scores(q, k).softmax(-1) + 0.1) @ v,
    "divided behind": _divided,
    "differential": _differential,
    "linear": _linear,
    "linear, scores first": _linear_scores_first,
    "efficient": lambda _, q, k, v: q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v),
    "hardmax": _hardmax,
    "elementwise": _elementwise,
    "distances": _distances,
    "max-plus": _max_plus,
    "additive": _additive,
    "inverse distances": _inverse_distances,
    "best of near tokens": _best_of_near_tokens,
    "relation": _relation,
    "hard": _hard,
    "attention free": lambda _, q, k, v: q.sigmoid() * (k.softmax(2) * v).sum(2, keepdim=True),
    "cumulative": lambda _, q, k, v: q.sigmoid() * (k.exp() * v).cumsum(2) / k.exp().cumsum(2),
    "state space": _state_space,
    "synthesizer": lambda _, q, k, v: (q @ torch.ones(WIDTH // HEADS, LENGTH)).softmax(-1) @ (v + k),
}
AMBIGUOUS: dict[str, Callable[..., Tensor]] = {
    "two scores": lambda _, q, k, v: (_scores(q, k) + _scores(q.tanh(), v)).softmax(-1) @ v,
    "the axis of queries": lambda _, q, k, v: _scores(q, k).softmax(-2) @ v,
    "two values": lambda _, q, k, v: _scores(q, k).softmax(-1) @ v + _scores(q, k).softmax(-1) @ (_scores(q, k).softmax(-1) @ v),
}
SEPARATE: dict[str, Callable[..., Tensor]] = {
    "plain": lambda _, q, k, v: _scores(q, k).softmax(-1) @ v,
    "masked by topk": lambda _, q, k, v: (
        _scores(q, k).masked_fill(_scores(q, k) < _scores(q, k).topk(2, -1).values[..., -1:], -1e9).softmax(-1) @ v
    ),
    "sinks": lambda block, q, k, v: (
        torch.cat([_scores(q, k), block.over_heads[:, :1].view(1, HEADS, 1, 1).expand(1, HEADS, LENGTH, 1)], -1).softmax(-1)[..., :-1] @ v
    ),
    "gated": lambda block, q, k, v: (_scores(q, k).softmax(-1) @ v) * torch.sigmoid(block.heads(block.gate(block.out(q)))),
    "keys first": lambda _, q, k, v: torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhkd,bhqd->bhqk", k, q).softmax(-1), v),
    "softmax over rows": lambda _, q, k, v: (k @ q.transpose(-1, -2)).softmax(-2).transpose(-1, -2) @ v,
    "rows, einsum": lambda _, q, k, v: torch.einsum("bhkq,bhke->bhqe", torch.einsum("bhkd,bhqd->bhkq", k, q).softmax(2), v),
    "scores transposed": lambda _, q, k, v: (k @ q.transpose(-1, -2)).transpose(-1, -2).softmax(-1) @ v,
    "values left": lambda _, q, k, v: (v.transpose(-1, -2) @ (k @ q.transpose(-1, -2)).softmax(-2)).transpose(-1, -2),
    "reshaped": lambda _, q, k, v: _scores(q, k).reshape(HEADS, LENGTH, LENGTH).softmax(-1).reshape(1, HEADS, LENGTH, LENGTH) @ v,
    "over channels": lambda _, q, k, v: ((q.transpose(-1, -2) @ k).softmax(-1) @ v.transpose(-1, -2)).transpose(-1, -2),
}


def _routed(block: Block, h: Tensor) -> Tensor:
    weights, chosen = block.gate(h)[..., :2].softmax(-1).topk(1, -1)
    experts = torch.stack([block.wk(h), block.wv(h)], 2)
    return (weights[..., None] * torch.gather(experts, 2, chosen[..., None].expand(-1, -1, -1, WIDTH))).sum(2)


def _dense(weights: Tensor, chosen: Tensor, block: Block, h: Tensor) -> Tensor:
    every = torch.zeros(1, LENGTH, 2).scatter(-1, chosen, weights)
    return (torch.stack([block.wk(h).relu(), block.wv(h).relu()], 2) * every[..., None]).sum(2)


def _switch(block: Block, h: Tensor) -> Tensor:
    return _dense(*block.gate(h)[..., :2].softmax(-1).max(-1, keepdim=True), block, h)


def _chosen_behind_a_bias(block: Block, h: Tensor) -> Tensor:
    weights = block.gate(h)[..., :2].softmax(-1)
    chosen = (weights + block.over_heads[0, :2]).topk(1, -1).indices
    return _dense(weights.gather(-1, chosen), chosen, block, h)


def _batched_experts(block: Block, h: Tensor) -> Tensor:
    first, second = torch.stack([block.wk.weight, block.wv.weight]), torch.stack([block.wo.weight, block.gate.weight])
    weights, chosen = block.wq(h)[0, :, :2].softmax(-1).topk(1, -1)
    return (torch.bmm(second[chosen[:, 0]], F.silu(torch.bmm(first[chosen[:, 0]], h[0][..., None])))[..., 0] * weights)[None]


def _axial_positions(block: Block, h: Tensor) -> Tensor:
    """What a bias computes from the queries alone, over rows and columns, is no pair of queries and keys."""
    q, k, v = (block.heads(layer(h))[:, :, :4] for layer in (block.wq, block.wk, block.wv))
    rows, columns = q @ block.wo.weight[: WIDTH // HEADS, :2], q @ block.wo.weight[: WIDTH // HEADS, 2:4]
    bias = (rows[..., :, None] + columns[..., None, :]).reshape(1, HEADS, 4, 4)
    return block.wo(((_scores(q, k) + bias).softmax(-1) @ v).transpose(1, 2).reshape(1, 4, WIDTH))


def _cosine(block: Block, h: Tensor) -> Tensor:
    q, k, v = (block.heads(layer(h)) for layer in (block.wq, block.wk, block.wv))
    lengths = q.norm(dim=-1, keepdim=True) * k.norm(dim=-1)[..., None, :]
    return block.out((q @ k.transpose(-1, -2) / lengths).softmax(-1) @ v)


def _tokens_of_experts(block: Block, h: Tensor) -> Tensor:
    weights, chosen = block.gate(h[0])[:, :2].softmax(-1).topk(1, -1)
    out = torch.zeros_like(h[0])
    for number, expert in enumerate((block.wk, block.wv)):
        tokens = torch.nonzero(chosen[:, 0] == number)[:, 0]
        out = out.index_add(0, tokens, expert(h[0][tokens]) * weights[tokens])
    return out[None]


SEPARATE_FLAT: dict[str, Callable[..., Tensor]] = {"positions on two axes": _axial_positions, "cosine": _cosine}
Experts = Callable[[Block, Tensor], list[Tensor]]


def _mixture(of: Experts, over: int = 2, axis: int = -1) -> Callable[..., Tensor]:
    """A softmax of a router over what is stacked, which is summed."""

    def mix(block: Block, h: Tensor) -> Tensor:
        stacked = torch.stack(of(block, h), 2)
        weights = block.gate(h) @ block.over_heads.repeat(WIDTH // HEADS, 1)[:, : stacked.shape[2]]
        return (weights.softmax(axis)[..., None] * stacked).sum(over)

    return mix


def _two_experts(block: Block, h: Tensor) -> list[Tensor]:
    return [block.wk(h).relu(), block.wv(F.gelu(block.wq(h)) * h)]


def _turned(block: Block, h: Tensor) -> Tensor:
    """Experts over the axis of tokens."""
    rows, router = h.transpose(1, 2), block.over_heads.repeat(2, 1)[:LENGTH]
    stacked = torch.stack([rows @ block.wk.weight[:LENGTH, :LENGTH], rows @ block.wv.weight[:LENGTH, :LENGTH]], 2)
    return ((rows @ router[:, :2]).softmax(-1)[..., None] * stacked).sum(2).transpose(1, 2)


TOKENS_ARE_MIXED: dict[str, Callable[..., Tensor]] = {
    "convolution that each token computes": _mixture(lambda block, h: [block.wv(h).roll(shift, 1) for shift in range(3)]),
    "an expert of the mean": _mixture(lambda block, h: [block.wk(h), block.wv(h.mean(1, keepdim=True)).expand_as(h)]),
    "an expert of the token before": _mixture(lambda block, h: [block.wk(h), block.wv(torch.cat([h[:, :1], h[:, :-1]], 1))]),
    "an expert of rows": _mixture(lambda block, h: [block.wk(h), block.wv.weight[:LENGTH, :LENGTH] @ h]),
    "sum over tokens": _mixture(_two_experts, over=1),
    "softmax over tokens": _mixture(_two_experts, axis=1),
    "experts over the axis of tokens": _turned,
}
NOTHING: dict[str, Callable[..., Tensor]] = {
    "gated linear unit": lambda block, h: block.wo(block.wq(h) * F.silu(block.wk(h))),
    "squeeze and excite": lambda block, h: block.wo((block.wq(h) * torch.sigmoid(block.wk(h.mean(1, keepdim=True)))).mean(1, keepdim=True)),
    "mixer": lambda block, h: block.wo(torch.ones(LENGTH, LENGTH) @ h),
    "modulated": lambda block, h: block.wo(h * block.wq(h[:, :1]) + block.wk(h[:, :1])),
    "masked mean": lambda block, h: block.wo((block.wq(h) * (h[..., :1] > 0).float()).sum(1, keepdim=True)),
    "all experts": _mixture(_two_experts),
    "all experts, gated": lambda block, h: block.wo(_mixture(_two_experts)(block, h) * F.silu(block.wq(h))) + h,
    "routed experts": _routed,
    "the best expert": _switch,
    "experts chosen behind a bias": _chosen_behind_a_bias,
    "batched experts": _batched_experts,
    "tokens of experts": _tokens_of_experts,
    "scaled by its mean": lambda block, h: block.wo(block.wq(h) / block.wk(h.mean(1, keepdim=True)) - block.wv(h).amax(1, keepdim=True)),
}


def _export(module: nn.Module, exporter: str = "torchscript") -> onnx.ModelProto:
    inputs = (torch.randn(1, LENGTH, WIDTH),)
    if exporter == "dynamo":
        proto: onnx.ModelProto = torch.onnx.export(module.eval(), inputs, dynamo=True, verbose=False, opset_version=18).model_proto
        return proto
    stream = io.BytesIO()
    torch.onnx.export(module.eval(), inputs, stream, dynamo=False, opset_version=17)
    return onnx.load_from_string(stream.getvalue())


def _graph(block: nn.Module, beside: bool, exporter: str = "torchscript") -> onnx.ModelProto:
    return _export(nn.Sequential(Block(SEPARATE["plain"]), block) if beside else block, exporter)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_no_contract_holds_over_what_is_not_read(name: str, beside: bool) -> None:
    model = _graph(Block(UNKNOWN[name]), beside)
    found = census(model)
    assert found.counts == {"UNKNOWN": 1, "SEPARATE": 1} if beside else {"UNKNOWN": 1}, found.text()
    result = ALL.check(model, model)
    assert result.holding is Holding.NOT_ANALYSED and "roles are unknown" in result.message
    assert not ALL.check(model, optimize(model, "onnxsim", ["fuse_attention"])).holds
    layers = {layer.shape for layer in found.blocks[-1].leading}
    assert (WIDTH, WIDTH) in layers or (WIDTH // HEADS, LENGTH) in layers, "the message says which layers nobody can vouch for"


def test_a_block_that_no_pass_touches_does_not_vouch_for_one_that_is_packed() -> None:
    """A residual is the fourth use of the first block's input, so that only the second one is packed."""
    first = Block(SEPARATE["plain"])
    first.forward = lambda x: x + first.out(first.mix(first, *(first.heads(one(x)) for one in (first.wq, first.wk, first.wv))))  # type: ignore[method-assign]
    model = _export(nn.Sequential(nn.LayerNorm(WIDTH), first, Block(UNKNOWN["sigmoid"])))
    packed = optimize(model, "onnxsim", ["fuse_attention"])
    assert [block.status.value for block in census(packed).read] == ["SEPARATE"]
    assert any(layer.shape == (WIDTH, 3 * WIDTH) for layer in census(packed).unknown[0].leading)
    assert ALL.check(model, packed).holding is Holding.NOT_ANALYSED


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_softmax_whose_roles_cannot_be_told_is_ambiguous(name: str) -> None:
    model = _graph(Block(AMBIGUOUS[name]), beside=True)
    assert census(model).counts == {"SEPARATE": 1, "AMBIGUOUS": 1}, census(model).text()
    assert ALL.check(model, model).holding is Holding.NOT_ANALYSED


@pytest.mark.parametrize("name", SEPARATE)
def test_roles_are_told_by_the_axis_of_the_softmax(name: str) -> None:
    block = Block(SEPARATE[name]).eval()
    model = _export(block)
    assert [one.module for one in take_baseline(model, block).of_block(0)] == ["wq", "wk", "wv"], census(model).text()
    assert ALL.check(model, model).holds
    assert ALL.check(model, optimize(model, "onnxsim")).holding is Holding.VIOLATED


@pytest.mark.parametrize("name", TOKENS_ARE_MIXED)
def test_a_weighted_sum_that_mixes_tokens_is_no_mixture_of_experts(name: str) -> None:
    model = _graph(Flat(TOKENS_ARE_MIXED[name]), beside=True)
    assert census(model).counts == {"SEPARATE": 1, "UNKNOWN": 1}, census(model).text()
    assert ALL.check(model, model).holding is Holding.NOT_ANALYSED


@pytest.mark.parametrize("name", NOTHING)
def test_gates_mixers_and_experts_are_no_attention(name: str) -> None:
    model = _graph(Flat(NOTHING[name]), beside=True)
    assert census(model).counts == {"SEPARATE": 1} and not census(model).comparisons, census(model).text()
    assert ALL.check(model, model).holds


@pytest.mark.parametrize("name", SEPARATE_FLAT)
def test_pairs_that_are_only_added_to_scores_or_divide_them_are_no_block(name: str) -> None:
    model = _graph(Flat(SEPARATE_FLAT[name]), beside=True)
    assert census(model).counts == {"SEPARATE": 2}, census(model).text()
    assert ALL.check(model, model).holds


class Similarity(Block):
    """The logits of two projections of one activation, as of images and texts."""

    def forward(self, x: Tensor) -> Any:
        return self.compared(self.wq(x[0]), self.wk(x[0]))

    def compared(self, image: Tensor, text: Tensor) -> Any:
        logits = F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).T
        return logits, logits.T


class PackedSimilarity(Similarity):
    """The same with one layer for both."""

    def forward(self, x: Tensor) -> Any:
        return self.compared(*(x[0] @ torch.cat([self.wq.weight, self.wk.weight]).T).split(WIDTH, -1))


@pytest.mark.parametrize("is_spelled_out", [True, False])
def test_attention_pooling_is_a_block_at_the_end_of_a_graph_too(is_spelled_out: bool) -> None:
    def pool(block: Block, x: Tensor) -> Tensor:
        x = block.wv(x)
        weights = block.gate(x)[..., :1].softmax(1)
        return (weights * x).sum(1) if is_spelled_out else weights.transpose(1, 2) @ x

    found = census(_export(Flat(pool)))
    assert found.counts == {"UNKNOWN": 1} and not found.comparisons, found.text()


def test_logits_that_only_leave_the_graph_are_said_and_compared() -> None:
    block = Similarity(SEPARATE["plain"])
    packed = PackedSimilarity(SEPARATE["plain"])
    packed.load_state_dict(block.state_dict())
    first = Block(SEPARATE["plain"])
    model, changed = (_export(nn.Sequential(first, one)) for one in (block, packed))
    assert census(model).counts == {"SEPARATE": 1} and len(census(model).comparisons) == 1
    result = ALL.check(model, model)
    assert result.holds and "combines two activations and only leaves the graph; fed by MatMul" in result.message
    assert ALL.check(model, optimize(model, "onnxsim", ["fuse_qkv", "fuse_attention"])).holds
    lost = ALL.check(model, changed)
    assert lost.holding is Holding.NOT_ANALYSED and "were [[(32, 32), (32, 32)]]; now: MatMul" in lost.message


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*UNKNOWN, *SEPARATE, *NOTHING])
def test_the_other_exporter_is_read_in_the_same_way(name: str) -> None:
    mixes = UNKNOWN | SEPARATE
    model = _graph(Block(mixes[name]) if name in mixes else Flat(NOTHING[name]), beside=True, exporter="dynamo")
    expected = {"UNKNOWN": 1, "SEPARATE": 1} if name in UNKNOWN else {"SEPARATE": 2 if name in SEPARATE else 1}
    assert census(model).counts == expected, census(model).text()
