"""Goldens of modifiers whose work is in what they do when, not in one function: on weights that are the stored ones of the solvers.

Every number of the training is a short binary fraction, so that its sums are exact and each bit counts everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from compressor import WandaPruningModifier, oneshot
from compressor.algorithms.rotations import make_rotation
from compressor.lifecycle import EventType, Session, State
from compressor.mappings.basis import find_basis
from compressor.mappings.turns import Turn
from compressor.modifiers.pruning.magnitude import ConstantPruningModifier
from compressor.modifiers.transforms.learned_rotations import LearnedRotation, LearnedTurns
from compressor.modifiers.transforms.smoothing import LogarithmicEqualizationModifier
from compressor.modifiers.tuning.budget import frozen
from compressor.numerics import QuantizationArgs, QuantizationScheme
from harness.checks.adapters.modifiers import OurTransform
from harness.tolerance import T3
from tests.reference_model.layer_cases import Result

_NUM_STEPS, _START, _END = 6, 1, 4
_SIZE = 16
_NORMS = ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm")


def kept_zeros(inputs: Mapping[str, Tensor]) -> Result:
    """Weights and moments over six steps: free, then from the second to the fourth with the zeros that are there by then, and free again.

    Args:
        inputs: `weight` [48, 192].

    Returns:
        After each step, of a Linear and of a Conv1D, whose weight lies the other way round: [steps, 16, 16] float64.
    """
    model = nn.ModuleDict({"linear": nn.Linear(_SIZE, _SIZE, bias=False), "conv1d": Conv1D(_SIZE, _SIZE)}).double()
    weights = {name: module.get_parameter("weight") for name, module in model.items()}
    with torch.no_grad():
        for place, weight in enumerate(weights.values()):
            weight.copy_(inputs["weight"][_SIZE * place :][:_SIZE, :_SIZE])
            weight[:, place::3], weight[3, 1] = 0.0, 2.0**-20
            weight[7, 2 - place] = 0.75  # gone after the first step, and so kept at zero as well
    session = Session(State(model), [ConstantPruningModifier(targets=["Linear", "Conv1D"], start=_START, end=_END)])
    session.initialize()
    optimizer = torch.optim.SGD(weights.values(), lr=0.5, momentum=0.5, foreach=False)
    taken: dict[str, list[Tensor]] = {f"{name} {what}": [] for name in weights for what in ("weight", "moment")}
    for step in range(_NUM_STEPS):
        _step(session, optimizer, weights, step)
        for name, weight in weights.items():
            taken[f"{name} weight"].append(weight.detach().clone())
            taken[f"{name} moment"].append(optimizer.state[weight]["momentum_buffer"].clone())
    session.finalize()
    return Result({name: torch.stack(found) for name, found in taken.items()}, inputs)


def _step(session: Session, optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor], step: int) -> None:
    session.send(EventType.BATCH_START)
    for place, weight in enumerate(weights.values()):
        places = torch.arange(_SIZE * _SIZE, dtype=torch.float64).view(_SIZE, _SIZE)
        weight.grad = ((5 * step + 3 * place + places) % 7 - 3) / 8
        if step == 0:
            weight.grad[7, 2 - place] = 1.5
    session.send(EventType.LOSS_CALCULATED, loss=torch.tensor(0.0))
    session.send(EventType.OPTIM_PRE_STEP)
    optimizer.step()
    session.send(EventType.OPTIM_POST_STEP)
    session.send(EventType.BATCH_END)


def equalized(inputs: Mapping[str, Tensor]) -> Result:
    """Scales of every norm of a small Llama, of two batches in which other channels are the largest.

    Args:
        inputs: `weight` [48, 192], `hessian` [192, 192].

    Returns:
        By norm, [16] float32.
    """
    model = _llama(inputs, num_layers=1)
    before = {name: model.get_submodule(name).get_parameter("weight").detach().clone() for name in _NORMS}
    OurTransform(LogarithmicEqualizationModifier, {}).apply(model, [torch.arange(18).view(2, 9), torch.arange(18, 32).view(2, 7)])
    scales = {name: weight / model.get_submodule(name).get_parameter("weight").detach() for name, weight in before.items()}
    reason = "a forward of a model, in the machine's own order of sums"
    return Result(scales, inputs, dict.fromkeys(scales, T3(max_relative_error=1e-4)), reason=reason)


def by_outliers(inputs: Mapping[str, Tensor]) -> Result:
    """Zeros of each layer of a small Llama by its outliers, where the layers are of three sizes and have several matrices each.

    Args:
        inputs: `weight` [48, 192], `hessian` [192, 192].

    Returns:
        Share of zeros by layer, [3] float64.
    """
    model = _llama(inputs, num_layers=3)
    left_out = ["lm_head", "re:.*layers.0.mlp.*", "re:.*layers.1.self_attn.*"]
    owl = {"sparsity_profile": "owl", "owl_m": 3, "owl_lmbda": 0.1}
    rows = torch.arange(32).view(4, 8)
    oneshot(model, recipe=WandaPruningModifier(sparsity=0.6, ignore=left_out, **owl), dataset=rows)
    gone = [torch.cat([one.flatten() == 0 for one in layer.parameters() if one.ndim == 2]) for layer in model.model.layers]
    found = torch.stack([one.double().mean() for one in gone])
    return Result({"zeros": found}, inputs, {"zeros": T3(max_relative_error=0.01)}, reason="a forward of a model")


def learned_turns(inputs: Mapping[str, Tensor]) -> Result:
    """What a rotation has become on its way, and the way on from there: of a small Llama with rounded weights and inputs.

    Args:
        inputs: `weight` [48, 192], `hessian` [192, 192].

    Returns:
        Two rotations, one of which keeps means, float64, and the gradient that moves the first, float32: [16, 16].
    """
    model, ids = _llama(inputs, num_layers=1), torch.arange(18).view(2, 9)
    device = torch.device("cpu")
    basis = find_basis(model, {"input_ids": ids}, device)
    sources = tuple(pair.source for pair in basis.norms)
    readers = tuple(name for pair in basis.norms for name in pair.readers)
    turn = Turn(make_rotation("random-hadamard", _SIZE, seed=3), (*basis.writers, *sources), (*basis.readers, *readers))
    # Symmetric codes put the lowest number of each group half way between the last two codes, where the order of sums decides between them.
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=3, group_size=_SIZE, symmetric=False),
        input_activations=QuantizationArgs(num_bits=4, strategy="token", dynamic=True, symmetric=False),
    )
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    moves = LearnedTurns(model, basis.norms, [turn], dict.fromkeys(linears, scheme), device, keeps_mean=False)
    (move_BB,) = moves.tensors()
    keeping = LearnedRotation.of(make_rotation("random-hadamard", _SIZE, seed=4, keeps_mean=True), device, keeps_mean=True)
    for one_BB in (move_BB, keeping.move_BB):
        one_BB.data = inputs["hessian"][:_SIZE, :_SIZE].triu() / inputs["hessian"][:_SIZE, :_SIZE].abs().amax() * 2
    with frozen(model), moves.tried():
        model(ids).logits.square().mean().backward()
    assert move_BB.grad is not None
    (settled,) = (one.rotation.matrix() for one in moves.settled())
    tensors = {"settled": settled, "keeping means": keeping.matrix(torch.float64).detach(), "gradient": move_BB.grad}
    tiers = dict.fromkeys(tensors, T3(max_relative_error=1e-6)) | {"gradient": T3(max_relative_error=1e-3)}
    return Result(tensors, inputs, tiers, reason="a forward of a model, and what solves a system, in the machine's own order of sums")


def _llama(inputs: Mapping[str, Tensor], num_layers: int) -> LlamaForCausalLM:
    """A model whose weights are runs of the stored ones, those of norms 40 at most and the others 1."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=_SIZE,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    stored = torch.cat([inputs["weight"].float().flatten(), inputs["hessian"].float().flatten()])
    with torch.no_grad():
        for place, (name, parameter) in enumerate(model.named_parameters()):
            drawn = stored[101 * place :][: parameter.numel()].view_as(parameter)
            parameter.copy_(drawn / drawn.abs().amax() * (40 if "norm" in name else 1))
    return model
