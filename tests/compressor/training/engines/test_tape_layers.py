"""Layers that a tape could stumble over are equal in eager and replay: recurrent ones, other layouts, graphs of graphs, lists."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d, cross_entropy, relu
from torch.utils.checkpoint import checkpoint

from compressor.training import Snapshot, Trainer, TrainStep, adamw, sgd


class Recurrent(nn.Module):
    """A recurrent layer over short sequences."""

    def __init__(self, kind, **settings):
        super().__init__()
        self.layer = kind(8, 6, batch_first=True, **settings)
        self.head = nn.Linear(12 if settings.get("bidirectional") else 6, 4)

    def forward(self, x):
        return self.head(self.layer(x.reshape(2, 3, 8))[0].flatten(0, 1))


class ChannelsLast(nn.Module):
    """Convolutions on another layout, one of them in groups."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3, stride=2, groups=2)
        self.head = nn.Linear(24, 4)

    def forward(self, x):
        image = x.reshape(6, 1, 8, 1).expand(6, 1, 8, 4).contiguous(memory_format=torch.channels_last)
        return self.head(adaptive_avg_pool2d(self.second(relu(self.norm(self.first(image)))), (3, 1)).flatten(1))


class Encoder(nn.Module):
    """A layer of a transformer."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.layer(x[None])[0])


class Table(nn.Module):
    """An embedding."""

    def __init__(self, table):
        super().__init__()
        self.table, self.head = table, nn.Linear(8, 4)

    def forward(self, x):
        found = self.table((x * 3).long().abs() % 16)
        return self.head(found if found.dim() == 2 else found.mean(1))


class Two(nn.Module):
    """Two linears, called in the way that is given."""

    def __init__(self, call):
        super().__init__()
        self.first, self.last, self.call = nn.Linear(8, 16), nn.Linear(16, 4), call

    def forward(self, x):
        return self.call(self, x)

    def plain(self, x):
        return self.last(self.first(x).tanh())


def _gradient_of_gradient(module, x):
    inner = x.clone().requires_grad_()
    result = module.plain(inner)
    (gradient,) = torch.autograd.grad(result.sum(), inner, create_graph=True)
    return result + gradient[:, :4]


class Mixture(nn.Module):
    """Experts that are all computed and weighed by a scatter."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x):
        shares = self.gate(x).softmax(-1)
        values, chosen = shares.topk(2)
        mask = torch.zeros_like(shares).scatter(1, chosen, values)
        return sum(mask[:, k : k + 1] * expert(x) for k, expert in enumerate(self.experts))


def _normed():
    last = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4))
    return nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Mish(), last)


MODELS = {
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "lstm of two layers in two directions": lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.2),
    "lstm without biases": lambda: Recurrent(nn.LSTM, bias=False),
    "channels last": lambda: ChannelsLast().to(memory_format=torch.channels_last),
    "transformer layer": Encoder,
    "bag of embeddings": lambda: Table(nn.EmbeddingBag(16, 8, mode="max")),
    "embedding with a largest norm": lambda: Table(nn.Embedding(16, 8, max_norm=1.0)),
    "embedding scaled by frequency": lambda: Table(nn.Embedding(16, 8, scale_grad_by_freq=True, padding_idx=0)),
    "normed weights": _normed,
    "mixture of experts": Mixture,
    "checkpointed": lambda: Two(lambda m, x: checkpoint(m.plain, x, use_reentrant=False)),
    "vmap": lambda: Two(lambda m, x: torch.func.vmap(m.plain)(x)),
    "gradient of a gradient": lambda: Two(_gradient_of_gradient),
    "bfloat16": lambda: Two(lambda m, x: m.plain(x.bfloat16())).bfloat16(),
    "float64": lambda: Two(lambda m, x: m.plain(x.double())).double(),
}
OPTIMIZERS = {
    "foreach sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, foreach=True),
    "sgd": lambda params: sgd(params, 0.01, momentum=0.9, nesterov=True),
    "fused adam with the largest second moment": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), fused=True, amsgrad=True),
    "fused adagrad": lambda params: torch.optim.Adagrad(params, lr=torch.tensor(0.01), fused=True),
    "foreach rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, foreach=True),
}


def train(make, optimizer, mode):
    """Train a fresh model for a few steps."""
    torch.manual_seed(0)
    model = make()
    step = TrainStep(model, lambda m, batch: cross_entropy(m(batch["x"]).float(), batch["y"]), optimizer(model.parameters()))
    trainer, losses = Trainer(step, mode, audit_every=0), []
    for number in range(7):
        draw = torch.Generator().manual_seed(number)
        batch = {"x": torch.randn(6, 8, generator=draw), "y": torch.randint(0, 4, (6,), generator=draw)}
        losses.append(trainer.train_step(batch).item())
    return trainer, losses, Snapshot.take(step)


def assert_equal(make, optimizer):
    """Hold replay against eager."""
    _, losses, eager = train(make, optimizer, "eager")
    trainer, others, replay = train(make, optimizer, "replay")
    assert trainer.last_action == "replay" and len(set(losses)) == 7
    assert losses == others and eager.differences(replay) == []
    tape = trainer.plans[0].captured
    assert tape.scratch_bytes <= 2 * tape.live_peak_bytes


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_is_equal_bit_for_bit(name):
    assert_equal(MODELS[name], lambda params: adamw(params, 0.01))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_equal_bit_for_bit(name):
    assert_equal(Encoder, OPTIMIZERS[name])
