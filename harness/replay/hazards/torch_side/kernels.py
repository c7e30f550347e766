"""Hazards of kernels: operators that write where their schema says nothing, that alias, or that a replay might call differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, embedding_bag, gelu, layer_norm, scaled_dot_product_attention

from compressor.errors import DynamicShapeError, HostReadError
from compressor.training import sgd
from harness.replay.hazards.building_blocks import stage, tokens
from harness.replay.hazards.registry import Hazard


class _Wrapped(nn.Module):
    """A layer between two linear ones, on [rows, 16]."""

    def __init__(self, layer: nn.Module, act: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.layer, self.last, self.act = nn.Linear(8, 16), layer, nn.Linear(16, 4), act

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.act(self.layer, self.first(x)))
        return result


def _layer(make: Callable[[], nn.Module], act: Callable[[Any, Tensor], Tensor] = lambda layer, h: layer(h)) -> Any:
    return stage(model=lambda: _Wrapped(make(), act))


class _Words(nn.Module):
    """Embeddings, added up in bags, and a linear layer."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embed, self.last, self.is_sparse = nn.Embedding(32, 8), nn.Linear(8, 4), sparse

    def forward(self, ids: Tensor) -> Tensor:
        offsets = torch.arange(len(ids)) * ids.shape[1]
        bags = embedding_bag(ids.flatten(), self.embed.weight, offsets, mode="mean")
        result: Tensor = self.last(bags + embedding(ids, self.embed.weight, sparse=self.is_sparse).mean(1))
        return result


def _word_loss(model: nn.Module, batch: Any) -> Tensor:
    result: Tensor = model(batch["input_ids"]).square().mean()
    return result


def _index_put(module: Any, h: Tensor) -> Tensor:
    table = torch.zeros(4, 16)
    table = table.index_put((torch.tensor([0, 1, 1, 3, 0, 2]),), h, accumulate=True)
    return h + table.mean(0)


def _scatter(module: Any, h: Tensor) -> Tensor:
    index = (torch.arange(6) % 3)[:, None].expand(6, 16)
    return h + torch.zeros(3, 16).scatter_add(0, index, h).sum(0)


def _complex(module: Any, h: Tensor) -> Tensor:
    z = torch.complex(h, h.flip(1))
    return torch.view_as_real(torch.fft.ifft(torch.fft.fft(z) * 1j).conj().resolve_conj()).sum(-1)


def _lazy_bits(module: Any, h: Tensor) -> Tensor:
    z = torch.complex(h, h * 0.5).conj()
    return (z.imag * z.real).neg()


def _viewed(module: Any, h: Tensor) -> Tensor:
    bits = h.detach().clone().view(torch.int32)
    return h + (bits & 1).to(h.dtype)


def _strided(module: Any, h: Tensor) -> Tensor:
    return h.t().contiguous().as_strided((6, 16), (1, 6)) + h.unfold(1, 2, 1).sum((1, 2))[:, None] + h.T.reshape(-1).view(16, 6).T


def _in_place_chain(module: Any, h: Tensor) -> Tensor:
    out = h.clone()
    out[:, :4] += 1
    out[:, 4:8].mul_(2).clamp_(min=-1)
    out.t()[8].zero_()
    return out


def _attention(module: Any, h: Tensor) -> Tensor:
    q = h.view(1, 6, 2, 8).transpose(1, 2)
    out = scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=0.0) + scaled_dot_product_attention(q, q, q, dropout_p=0.2)
    return out.transpose(1, 2).reshape(6, 16)


def _sorted(module: Any, h: Tensor) -> Tensor:
    values, order = h.sort(1)
    top = h.topk(3, 1).values.sum(1, keepdim=True)
    return values.cumsum(1) + order.float() * 0.01 + top + h.logcumsumexp(1) + h.cummax(1).values + h.kthvalue(2, 1, keepdim=True).values


def _split(module: Any, h: Tensor) -> Tensor:
    a, b = h.chunk(2, 1)
    return torch.cat([b.relu(), a.sigmoid()], 1) + torch.stack(h.unbind(1), 1) + torch.cat(h.split([5, 11], 1), 1)


def _out_argument(module: Any, h: Tensor) -> Tensor:
    into = torch.empty(6, 16)
    torch.mul(h.detach(), 2.0, out=into)
    return h + into


def _linear_algebra(module: Any, h: Tensor) -> Tensor:
    gram = h.T @ h + 8 * torch.eye(16)
    return torch.linalg.solve(gram, h.T).T + torch.linalg.cholesky(gram).sum() * 0.01


def _einsum(module: Any, h: Tensor) -> Tensor:
    return torch.einsum("ij,kj->ik", h, h) @ h + torch.baddbmm(h[None], h[None] @ h.T[None], h[None])[0]


def _foreach(module: Any, h: Tensor) -> Tensor:
    return sum(torch._foreach_mul([h, h.flip(0)], 0.5), torch.zeros(()))


def _lookup(module: Any, h: Tensor) -> Tensor:
    return h + module.table[(h[:, 0] > 0).long()].gather(1, torch.arange(16)[None].expand(6, 16))


def _bfloat(module: Any, h: Tensor) -> Tensor:
    return (h.bfloat16() @ h.bfloat16().T).float() @ h


def _inner_autocast(module: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        mixed = h @ h.T @ h
    return mixed.float()


_PYTORCH = "pytorch/pytorch#61880"
HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        "batch_norm",
        "batch norm moves its statistics without saying so",
        _layer(lambda: nn.BatchNorm1d(16)),
        source="pytorch/pytorch#70444",
    ),
    Hazard(
        "batch_norm_cumulative",
        "batch norm with momentum=None reads its counter",
        _layer(lambda: nn.BatchNorm1d(16, momentum=None)),
        HostReadError,
        "reads a tensor on the host",
        "pytorch/pytorch#70444",
    ),
    Hazard(
        "instance_norm",
        "instance norm with running statistics",
        _layer(
            lambda: nn.InstanceNorm1d(16, track_running_stats=True, affine=True),
            lambda layer, h: layer(h.T[None].contiguous().transpose(0, 0).reshape(1, 16, 6))[0].T,
        ),
        source="pytorch/pytorch#70444",
    ),
    Hazard(
        "layer_norm",
        "layer and group norm",
        _layer(lambda: nn.GroupNorm(4, 16), lambda layer, h: layer(layer_norm(h, (16,)))),
        source=_PYTORCH,
    ),
    Hazard(
        "lstm",
        "an LSTM",
        _layer(lambda: nn.LSTM(16, 16, batch_first=True), lambda layer, h: layer(h[None])[0][0]),
        source="torch source: aten::mkldnn_rnn_layer",
    ),
    Hazard(
        "lstm_dropout",
        "an LSTM of two layers with dropout, both ways",
        _layer(lambda: nn.LSTM(16, 8, 2, dropout=0.3, bidirectional=True), lambda layer, h: layer(h[:, None])[0][:, 0]),
        source="torch source: aten::mkldnn_rnn_layer",
    ),
    Hazard(
        "gru",
        "a GRU",
        _layer(lambda: nn.GRU(16, 16), lambda layer, h: layer(h[:, None])[0][:, 0]),
        source="torch source: aten::mkldnn_rnn_layer",
    ),
    Hazard(
        "convolution",
        "convolutions, which mkldnn runs",
        _layer(lambda: nn.Conv1d(1, 1, 3, padding=1), lambda layer, h: layer(h[:, None])[:, 0]),
        source="csarofeen/pytorch#2098",
    ),
    Hazard(
        "convolution_2d",
        "a convolution in two dimensions with channels last, and pooling",
        _layer(
            lambda: nn.Conv2d(1, 4, 3, padding=1),
            lambda layer, h: torch.max_pool2d(layer(h.view(6, 1, 4, 4).to(memory_format=torch.channels_last)), 2).flatten(1),
        ),
        source="csarofeen/pytorch#2098",
    ),
    Hazard(
        "attention_module",
        "multi-head attention with dropout",
        _layer(
            lambda: nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True), lambda layer, h: layer(h[None], h[None], h[None])[0][0]
        ),
        source="Dao-AILab/flash-attention#166",
    ),
    Hazard(
        "transformer_layer",
        "an encoder layer of torch",
        _layer(lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), lambda layer, h: layer(h[None])[0]),
        source="Dao-AILab/flash-attention#166",
    ),
    Hazard("sdpa", "scaled dot-product attention, causal and with dropout", stage(_attention), source="Dao-AILab/flash-attention#166"),
    Hazard("embedding_bag", "bags of embeddings", stage(model=lambda: _Words(False), loss_fn=_word_loss), batches=tokens, source=_PYTORCH),
    Hazard(
        "sparse_gradients",
        "embeddings with sparse gradients",
        stage(model=lambda: _Words(True), loss_fn=_word_loss, optimizer=lambda p: sgd(p)),
        DynamicShapeError,
        "layout torch.sparse_coo",
        "pytorch/pytorch#118018",
        batches=tokens,
    ),
    Hazard("complex", "complex numbers and transforms of Fourier", stage(_complex), source=_PYTORCH),
    Hazard("lazy_conjugate", "views that are conjugated or negated lazily", stage(_lazy_bits), source=_PYTORCH),
    Hazard("index_put", "index_put that accumulates", stage(_index_put), source=_PYTORCH),
    Hazard("scatter_add", "scatter_add", stage(_scatter), source=_PYTORCH),
    Hazard("sorting", "sort, topk, cumsum, cummax, kthvalue", stage(_sorted), source=_PYTORCH),
    Hazard("dtype_view", "float bits seen as integers", stage(_viewed), source=_PYTORCH),
    Hazard("strides", "as_strided, unfold, reshape of a transposed tensor", stage(_strided), source=_PYTORCH),
    Hazard("in_place_views", "in-place writes through views of one tensor", stage(_in_place_chain), source=_PYTORCH),
    Hazard("many_outputs", "chunk, unbind, split, stack", stage(_split), source=_PYTORCH),
    Hazard("out_argument", "out= of a tensor made in the step", stage(_out_argument), source=_PYTORCH),
    Hazard("linear_algebra", "solve and cholesky", stage(_linear_algebra), source=_PYTORCH),
    Hazard("einsum", "einsum and baddbmm", stage(_einsum), source=_PYTORCH),
    Hazard("foreach", "operators over lists of tensors", stage(_foreach), source=_PYTORCH),
    Hazard(
        "lookup",
        "integer indices into a buffer",
        stage(_lookup, prepare=lambda m: m.register_buffer("table", torch.linspace(-1, 1, 32).view(2, 16))),
        source=_PYTORCH,
    ),
    Hazard("bfloat16", "products in bfloat16", stage(_bfloat), source=_PYTORCH),
    Hazard("autocast_inside", "autocast around a part of the model", stage(_inner_autocast), source=_PYTORCH),
    Hazard(
        "activations",
        "silu, gelu, softplus, mish, hardswish",
        stage(
            lambda m, h: sum(
                (f(h) for f in (nn.functional.silu, gelu, nn.functional.softplus, nn.functional.mish, nn.functional.hardswish)), h
            )
        ),
        source=_PYTORCH,
    ),
)
