"""Checks 31 to 36 pass correct reference transforms and catch the bugs that are known from the field."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from harness import check
from harness.checks.transforms_models import build, in_dtype, logits, token_ids, truly
from harness.checks.transforms_subject import InPlaceTransform
from harness.verdict import Outcome


class Base:
    """What the reference transforms share."""

    kind = "transform"
    tags = frozenset({"invariant_fp"})
    architectures = ("llama", "mistral", "qwen2")
    fake_quantize = None

    @property
    def name(self):
        return type(self).__name__

    def rotations(self, model):
        return {}


def norm_pairs(model):
    """Norm -> the linear layers that read it, for models of the shape of llama; gemma2 reads its MLP from another norm."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        if hasattr(layer, "input_layernorm"):
            yield layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]
        before_mlp = getattr(layer, "pre_feedforward_layernorm", None)
        if before_mlp is None and hasattr(layer, "input_layernorm"):
            before_mlp = layer.post_attention_layernorm
        if before_mlp is not None:
            yield before_mlp, [mlp.gate_proj, mlp.up_proj]
    yield model.model.norm, [model.lm_head]


def gain(norm):
    """What a norm multiplies with: gemma adds one."""
    return norm.weight + 1 if "Gemma" in type(norm).__name__ else norm.weight


def set_gain(norm, value):
    norm.weight.copy_(value - 1 if "Gemma" in type(norm).__name__ else value)


def untie(model):
    if model.lm_head.weight is model.model.embed_tokens.weight:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False


class FoldNorms(Base):
    """Moves the weights of norms into the linear layers behind them."""

    architectures = ("llama", "mistral", "qwen2", "qwen3", "gemma2")

    def apply(self, model, batches):
        untie(model)
        for norm, linears in self.pairs(model):
            for linear in linears:
                linear.weight.mul_(self.factor(norm))
            self.reset(norm)

    def pairs(self, model):
        return list(norm_pairs(model))

    def factor(self, norm):
        return gain(norm)

    def reset(self, norm):
        set_gain(norm, torch.ones_like(norm.weight))

    def targets(self, model):
        names = {id(module): name for name, module in model.named_modules()}
        return [f"{names[id(linear)]}.weight" for _, linears in norm_pairs(model) for linear in linears]


class Rotate(FoldNorms):
    """Folds the norms, then turns the residual stream by a Hadamard matrix."""

    architectures = ("llama", "mistral", "qwen2")

    def apply(self, model, batches):
        super().apply(model, batches)
        rotation = self.rotation(model.config.hidden_size).to(model.lm_head.weight.dtype)
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight @ rotation)
        for _, linears in norm_pairs(model):
            for linear in linears:
                linear.weight.copy_(linear.weight @ rotation)
        for layer in model.model.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.copy_(rotation.t() @ linear.weight)

    def rotation(self, n):
        one = torch.ones(1, 1, dtype=torch.float64)
        while len(one) < n:
            one = torch.cat([torch.cat([one, one], 1), torch.cat([one, -one], 1)])
        return one / math.sqrt(n)

    def rotations(self, model):
        return {"hadamard": self.rotation(model.config.hidden_size)}

    def targets(self, model):
        return [*super().targets(model), "model.embed_tokens.weight"]


def fake_int4(weight):
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 7
    return (weight / scale).round() * scale


class Smooth(Base):
    """Searches, for each norm, the power of the activation's size by which columns are scaled."""

    fake_quantize = staticmethod(fake_int4)
    powers = (0.0, 0.25, 0.5, 0.75, 1.0)

    def apply(self, model, batches):
        pairs = [pair for pair in norm_pairs(model) if pair[0] is not model.model.norm]
        inputs = {}
        handles = [
            linears[0].register_forward_pre_hook(lambda _, args, key=number: inputs.setdefault(key, []).append(args[0]))
            for number, (_, linears) in enumerate(pairs)
        ]
        for ids in batches:
            logits(model, ids)
        for handle in handles:
            handle.remove()
        for number, (norm, linears) in enumerate(pairs):
            x = torch.cat([batch.flatten(0, -2) for batch in inputs[number]])
            scale = self.best(x, linears)
            self.place(norm, linears, scale)

    def best(self, x, linears):
        size = x.abs().mean(0).clamp(min=1e-5)
        scales = [size**power / (size**power).mean() for power in self.powers]
        return min(scales, key=lambda scale: self.loss(x, linears, scale))

    def loss(self, x, linears, scale):
        errors = [((fake_int4(linear.weight * scale) / scale - linear.weight) @ x.t()).square().sum() for linear in linears]
        return float(sum(errors)) / float(sum((linear.weight @ x.t()).square().sum() for linear in linears))

    def place(self, norm, linears, scale):
        norm.weight.div_(scale)
        for linear in linears:
            linear.weight.mul_(scale)

    def targets(self, model):
        names = {id(module): name for name, module in model.named_modules()}
        pairs = [pair for pair in norm_pairs(model) if pair[0] is not model.model.norm]
        return [f"{names[id(linear)]}.weight" for _, linears in pairs for linear in linears]


class AlwaysSmooth(Smooth):
    """Without a search that may choose to do nothing."""

    fake_quantize = None
    powers = (0.5,)


@pytest.mark.parametrize("transform", [FoldNorms, Rotate, AlwaysSmooth])
def test_correct_transforms_pass(transform):
    report = check(transform())
    assert not [record for record in report.records if record.outcome is Outcome.FAIL], report.to_text()
    passed = {record.name for record in report.records if record.outcome is Outcome.PASS}
    assert {"transform.float_output", "transform.every_architecture", "transform.tied_weights", "transform.not_vacuous"} <= passed


def test_a_correct_search_passes():
    report = check(Smooth(), checks=[31, 36])
    assert [record.outcome for record in report.records] == [Outcome.PASS, Outcome.PASS], report.to_text()


class CentredEmbeddings(Base):
    """Mean-centres the embeddings, which only a LayerNorm forgives: 20 % at every dtype."""

    def apply(self, model, batches):
        untie(model)
        weight = model.model.embed_tokens.weight
        weight.sub_(weight.mean(1, keepdim=True))

    def targets(self, model):
        return ["model.embed_tokens.weight"]


class NormNotReset(FoldNorms):
    """Folds, and leaves the norm what it was."""

    def reset(self, norm):
        del norm


class ForgetsTheOne(FoldNorms):
    """Folds the weight of a gemma norm without the one that is added to it."""

    def factor(self, norm):
        return norm.weight

    def reset(self, norm):
        norm.weight.fill_(1)


class WrongNormOfGemma(FoldNorms):
    """Takes gemma2's post_attention_layernorm for the norm before the MLP."""

    def pairs(self, model):
        for layer in model.model.layers:
            yield layer.input_layernorm, [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
            yield layer.post_attention_layernorm, [layer.mlp.gate_proj, layer.mlp.up_proj]
        yield model.model.norm, [model.lm_head]


class InBfloat16(FoldNorms):
    """Computes in bfloat16 whatever the model has."""

    def apply(self, model, batches):
        untie(model)
        for norm, linears in norm_pairs(model):
            for linear in linears:
                linear.weight.copy_((linear.weight.bfloat16() * gain(norm).bfloat16()).to(linear.weight.dtype))
            self.reset(norm)


class InFloat32(FoldNorms):
    """Computes in float32: only the rung of float64 sees it."""

    def apply(self, model, batches):
        untie(model)
        for norm, linears in norm_pairs(model):
            for linear in linears:
                linear.weight.copy_((linear.weight.type(torch.FloatTensor) * gain(norm).type(torch.FloatTensor)).to(linear.weight.dtype))
            self.reset(norm)


class KeepsTheTie(FoldNorms):
    """Folds the last norm into a head that is the embedding, too."""

    def apply(self, model, batches):
        for norm, linears in norm_pairs(model):
            for linear in linears:
                linear.weight.mul_(gain(norm))
            self.reset(norm)


class UntiesInMemoryOnly(FoldNorms):
    """Unties without saying so in the config: what is loaded again is tied again."""

    def apply(self, model, batches):
        if model.lm_head.weight is model.model.embed_tokens.weight:
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        tie, model.config.tie_word_embeddings = model.config.tie_word_embeddings, False
        super().apply(model, batches)
        model.config.tie_word_embeddings = tie


class NotNormalized(Rotate):
    """A Hadamard matrix whose scale is a little off."""

    def rotation(self, n):
        return super().rotation(n) * 1.0001


class DoesNothing(FoldNorms):
    """Matches no module, and says nothing."""

    def apply(self, model, batches):
        del model, batches


class SkipsOne(FoldNorms):
    """Leaves out the last pair."""

    def pairs(self, model):
        return list(norm_pairs(model))[:-1]


class NoTargets(FoldNorms):
    """Claims nothing, so that nothing can be found missing."""

    def targets(self, model):
        return []


class ScaleOnOneSide(AlwaysSmooth):
    """Scales the weights and forgets the norm."""

    def place(self, norm, linears, scale):
        for linear in linears:
            linear.weight.mul_(scale)


class TakesTheWorst(Smooth):
    """Searches for the largest loss."""

    def best(self, x, linears):
        return max((x.abs().mean(0).clamp(min=1e-5) ** power for power in (0.0, -1.5, 3.0)), key=lambda scale: self.loss(x, linears, scale))


PLANTS = [
    (CentredEmbeddings, 31), (NormNotReset, 31), (ForgetsTheOne, 32), (WrongNormOfGemma, 32), (InBfloat16, 31), (InFloat32, 31),
    (KeepsTheTie, 34), (UntiesInMemoryOnly, 34), (NotNormalized, 33), (NotNormalized, 31), (DoesNothing, 35), (SkipsOne, 35),
    (NoTargets, 35),
    (ScaleOnOneSide, 31), (TakesTheWorst, 36),
]  # fmt: skip


@pytest.mark.parametrize(("transform", "number"), PLANTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_planted_bug_is_caught(transform, number):
    record = check(transform(), checks=[number]).records[0]
    assert record.outcome is Outcome.FAIL, record.summary
    assert "could not be completed" not in record.summary, record.summary


def test_the_ladder_really_computes_in_float64():
    model = in_dtype(build("llama"), torch.float64)
    ids = token_ids(model)[0]
    with truly(torch.float64):
        fine = logits(model, ids)
    coarse = logits(model, ids)
    assert 1e-9 < float((coarse - fine).norm() / fine.norm()) < 1e-5


def test_nothing_is_said_where_there_is_nothing_to_check():
    outcomes = {record.name: record.outcome for record in check(CentredEmbeddings(), checks=[33, 36]).records}
    assert set(outcomes.values()) == {Outcome.SKIP}


def test_a_plain_function_is_a_subject():
    def double_and_halve(model, batches):
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.mul_(2)
            layer.mlp.down_proj.weight.div_(2)

    right = InPlaceTransform(double_and_halve, ["*.up_proj.weight", "*.down_proj.weight"])
    assert check(right).verdict.value == "pass"
    assert right.name == "double_and_halve"
    wrong = InPlaceTransform(double_and_halve, ["*_proj.weight"])
    assert check(wrong, checks=[35]).records[0].outcome is Outcome.FAIL
    assert check(InPlaceTransform(double_and_halve, ["*.up_proj.weight"], matrices={"R": torch.ones(4, 4)}), checks=[33]).exit_code == 1
