"""Local attention by shifts, which holds no matrix product of two activations, is a block of unknown roles; norms and gates are none."""

from __future__ import annotations

import io
from collections.abc import Callable

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.onnx_graph.census.census import census
from harness.onnx_graph.contracts.base import Holding
from harness.onnx_graph.contracts.registry import contract_from_names

pytestmark = pytest.mark.filterwarnings("ignore")  # both exporters warn of themselves
WIDTH, LENGTH, REACH = 16, 5, 3
ROLES = contract_from_names("separate-qkv,same-block-count,role-weights")


def _padded(x: Tensor) -> list[Tensor]:
    held = F.pad(x, (0, 0, 1, 1))
    return [held[:, at : at + LENGTH] for at in range(REACH)]


def _looked_up(x: Tensor) -> list[Tensor]:
    return [x[:, (torch.arange(LENGTH) + at) % LENGTH] for at in range(REACH)]


def _filtered(x: Tensor) -> list[Tensor]:
    kernels = torch.eye(REACH)[:, None, None].expand(-1, WIDTH, 1, REACH)
    return [F.conv1d(x.transpose(1, 2), kernel, padding=1, groups=WIDTH).transpose(1, 2) for kernel in kernels]


SHIFTS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "padded": _padded,
    "looked up": _looked_up,
    "rolled": lambda x: [x.roll(at, 1) for at in range(REACH)],
    "filtered": _filtered,
}
SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda q, k: (q * k).sum(-1, keepdim=True),
    "mean": lambda q, k: (q * k).mean(-1, keepdim=True),
    "matrix of ones": lambda q, k: (q * k) @ torch.ones(WIDTH, 1),
    "heads": lambda q, k: (q * k).view(1, LENGTH, 4, -1).sum(-1, keepdim=True).expand(-1, -1, -1, 4).reshape(1, LENGTH, WIDTH),
    "einsum": lambda q, k: torch.einsum("bsd,bsd->bs", q, k)[..., None],
    "halves added": lambda q, k: (q * k)[..., :8].sum(-1, keepdim=True) + (q * k)[..., 8:].sum(-1, keepdim=True),
    "distance": lambda q, k: -((q - k) ** 2).sum(-1, keepdim=True),
    "ratio": lambda q, k: (q / (k.abs() + 1)).sum(-1, keepdim=True),
}


def _stacked(scores: list[Tensor], values: list[Tensor]) -> Tensor:
    weights = torch.stack(scores, -1).softmax(-1)
    return torch.stack([weights[..., at] * value for at, value in enumerate(values)]).sum(0)


def _concatenated(scores: list[Tensor], values: list[Tensor]) -> Tensor:
    weights = torch.cat([score[..., :1] for score in scores], -1).softmax(-1).split(1, -1)
    return weights[0] * values[0] + weights[1] * values[1] + weights[2] * values[2]


def _each(normalise: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor], list[Tensor]], Tensor]:
    return lambda scores, values: sum((normalise(one) * value for one, value in zip(scores, values, strict=True)), torch.zeros(()))


WEIGHS: dict[str, Callable[[list[Tensor], list[Tensor]], Tensor]] = {
    "softmax, stacked": _stacked,
    "softmax, concatenated": _concatenated,
    "sigmoid": _each(torch.sigmoid),
    "tanh": _each(torch.tanh),
    "relu": _each(torch.relu),
    "exponent over sum": lambda scores, values: _each(torch.exp)(scores, values) / sum(one.exp() for one in scores),
    "linear": _each(lambda score: score * 0.1),
    "chosen": lambda scores, values: torch.where(scores[0] > scores[1], values[0], values[1]),
}


class Plain(nn.Module):
    """Attention that can be read."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x) @ self.k(x).transpose(1, 2)).softmax(-1) @ self.v(x)


class Local(nn.Module):
    """Q, K and V in one layer, mixed by any function."""

    def __init__(self, mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mix, self.packed, self.out = mix, nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(*self.packed(x).chunk(3, -1)))


def _export(mix: Callable[[Tensor, Tensor, Tensor], Tensor], exporter: str = "torchscript", opset: int = 18) -> onnx.ModelProto:
    torch.manual_seed(0)
    module, inputs = nn.Sequential(Plain(), Local(mix)).eval(), (torch.randn(1, LENGTH, WIDTH),)
    if exporter == "dynamo":
        proto: onnx.ModelProto = torch.onnx.export(module, inputs, dynamo=True, verbose=False, opset_version=18).model_proto
        return proto
    stream = io.BytesIO()
    torch.onnx.export(module, inputs, stream, dynamo=False, opset_version=opset)
    return onnx.load_from_string(stream.getvalue())


def _assert_unknown(model: onnx.ModelProto) -> None:
    found = census(model)
    assert len(found.read) == 1 and found.unknown and not found.comparisons, found.text()
    assert (WIDTH, 3 * WIDTH) in {layer.shape for block in found.unknown for layer in block.leading}, found.text()
    assert ROLES.check(model, model).holding is Holding.NOT_ANALYSED


def _local(shift: str, score: str, weigh: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return WEIGHS[weigh]([SCORES[score](q, one) for one in SHIFTS[shift](k)], SHIFTS[shift](v))

    return mix


@pytest.mark.parametrize("weigh", WEIGHS)
@pytest.mark.parametrize("shift", SHIFTS)
def test_local_attention_is_a_block_however_it_shifts_and_weighs(shift: str, weigh: str) -> None:
    _assert_unknown(_export(_local(shift, "sum", weigh)))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("weigh", ["softmax, stacked", "sigmoid"])
def test_local_attention_is_a_block_however_it_sums(score: str, weigh: str) -> None:
    _assert_unknown(_export(_local("padded", score, weigh)))


def _scattered(values: Tensor) -> Tensor:
    """The sum over the tokens, added up at one place."""
    return torch.zeros(1, 1, WIDTH).scatter_add(1, torch.zeros(1, LENGTH, WIDTH, dtype=torch.long), values)


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(1, keepdim=True),
    "running sum": lambda x: x.cumsum(1),
    "scattered": _scattered,
}


@pytest.mark.parametrize("name", SUMS)
def test_diagonal_linear_attention_is_a_block_however_it_sums(name: str) -> None:
    _assert_unknown(_export(lambda q, k, v: q * SUMS[name](k * v)))


@pytest.mark.nightly
def test_rows_that_are_added_up_at_one_place_are_a_sum() -> None:
    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q * torch.zeros(1, WIDTH).index_put((torch.zeros(LENGTH, dtype=torch.long),), (k * v)[0], accumulate=True)

    _assert_unknown(_export(mix, "dynamo"))  # the other exporter forgets to add up


@pytest.mark.nightly
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("weigh", WEIGHS)
def test_the_other_exporter_spells_it_otherwise(shift: str, score: str, weigh: str) -> None:
    _assert_unknown(_export(_local(shift, score, weigh), "dynamo"))


def _norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def _root_mean_square(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)


def _unrolled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A gated cell over time, as exporters of recurrences spell it."""
    state, steps = torch.zeros(1, WIDTH), []
    for at in range(LENGTH):
        new = torch.tanh(q[:, at] + k[:, at].sigmoid() * state)
        state = (1 - v[:, at].sigmoid()) * new + v[:, at].sigmoid() * state
        steps.append(state)
    return torch.stack(steps, 1)


NONE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "gated": lambda q, k, v: q * F.silu(k) + v,
    "gated twice": lambda q, k, v: torch.tanh(q * k.sigmoid()) * v.sigmoid(),
    "modulated norm": lambda q, k, v: _norm(q * k + v) * (1 + v.mean(1, keepdim=True)) + k.mean(1, keepdim=True),
    "modulated root mean square": lambda q, k, v: _root_mean_square(q * k + v) * (1 + v.mean(1, keepdim=True)),
    "gated residual of norms": lambda q, k, v: _norm(v + q * _norm(_norm(v) * (1 + k))) * (1 + q),
    "norm and gate": lambda q, k, v: F.silu(_norm(q * k)) + v,
    "group norm": lambda q, k, v: F.silu(F.group_norm((q * k).transpose(1, 2), 4).transpose(1, 2)) * v,
    "rotated": lambda q, k, v: (q * k) * 0.5 + torch.cat([-(q * k)[..., 8:], (q * k)[..., :8]], -1) * 0.3 + v,
    "recurrent": _unrolled,
    "unit length": lambda q, k, v: F.normalize(q * k, dim=-1) + F.normalize(v, dim=-1),
    "gated, scattered and added": lambda q, k, v: v + _scattered(q * F.silu(k)),
    "scattered": lambda q, k, v: q * F.silu(k) + _scattered(v),
    "pooled": lambda q, k, v: (q * k).mean(1, keepdim=True) + v,
}


@pytest.mark.parametrize("opset", [16, 18])
@pytest.mark.parametrize("name", NONE)
def test_norms_gates_and_cells_are_no_attention(name: str, opset: int) -> None:
    model = _export(NONE[name], opset=opset)
    found = census(model)
    assert found.counts == {"SEPARATE": 1} and not found.comparisons, found.text()
    assert ROLES.check(model, model).holds
