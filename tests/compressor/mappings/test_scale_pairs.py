"""Which scales may move: found on the forward of many architectures, exact where they are used, refused where they may not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from compressor import AWQModifier, QuantizationModifier, SmoothQuantModifier, oneshot
from compressor.data.collate import call_model
from compressor.errors import TargetError, TracingError
from compressor.mappings import Mappings, ScalePair, explicit_pairs, find_pairs, scale_channels
from compressor.mappings.explicit import Written, resolve_written
from compressor.mappings.pairs import pattern_of
from compressor.model.experts.unfuse import unfused_experts
from compressor.model.loading.sample_batches import sample_batches
from harness.traceability.architectures import zoo
from tests import tiny

CPU = torch.device("cpu")
TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GQA = {**TEXT, "num_key_value_heads": 2}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
OPT = {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 32}
DEEPSEEK = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "n_routed_experts": 4}
HEADS = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8, "patch_size": 4}

_ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))


def text(kind: str, settings: dict[str, Any]) -> Callable[[], tuple[nn.Module, dict[str, Tensor]]]:
    def make() -> tuple[nn.Module, dict[str, Tensor]]:
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**settings)
        model = transformers.AutoModelForCausalLM.from_config(config)
        return _roughened(model), {"input_ids": _ids}

    return make


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    model = tiny.t5(d_model=32, d_ff=48, num_heads=4, feed_forward_proj="gated-gelu")
    return _roughened(model), {"input_ids": _ids, "decoder_input_ids": _ids[:, :5]}


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT))
    return _roughened(model), {"pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))}


def _roughened(model: nn.Module) -> nn.Module:
    """Norms that do something, offsets of zero excepted: a weight of one hides whether it multiplies."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter)))
    return model.eval()


# The kinds of sources that must be found, with those of their readers, and the offset of the norms.
NORMS = {
    "model.layers.*.input_layernorm": {"q_proj", "k_proj", "v_proj"},
    "model.layers.*.post_attention_layernorm": {"gate_proj", "up_proj"},
}
DENSE = {**NORMS, "model.layers.*.self_attn.v_proj": {"o_proj"}, "model.layers.*.mlp.up_proj": {"down_proj"}}
KINDS: dict[str, tuple[Callable[[], tuple[nn.Module, dict[str, Tensor]]], dict[str, set[str]], float]] = {
    "llama": (text("Llama", GQA), {**DENSE, "model.norm": {"lm_head"}}, 0.0),
    "gemma2": (
        text("Gemma2", {**GQA, "head_dim": 8}),
        {
            "model.layers.*.input_layernorm": {"q_proj", "k_proj", "v_proj"},
            "model.layers.*.pre_feedforward_layernorm": {"gate_proj", "up_proj"},
            "model.layers.*.mlp.up_proj": {"down_proj"},
        },
        1.0,
    ),
    "opt": (
        text("OPT", OPT),
        {
            "model.decoder.layers.*.self_attn_layer_norm": {"q_proj", "k_proj", "v_proj"},
            "model.decoder.layers.*.final_layer_norm": {"fc1"},
            "model.decoder.layers.*.fc1": {"fc2"},  # through a ReLU, which a positive scale passes
            "model.decoder.layers.*.self_attn.v_proj": {"out_proj"},
        },
        0.0,
    ),
    "gpt2": (
        text("GPT2", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
        {"transformer.h.*.ln_1": {"c_attn"}, "transformer.h.*.ln_2": {"c_fc"}},
        0.0,
    ),
    "cohere, attention and mlp side by side": (
        text("Cohere", GQA),
        {"model.layers.*.input_layernorm": {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}},
        0.0,
    ),
    "qwen3 moe": (
        text("Qwen3Moe", {**GQA, **MOE, "num_experts": 4, "head_dim": 8}),
        {
            "model.layers.*.post_attention_layernorm": {"gate", "gate_proj", "up_proj"},
            "model.layers.*.mlp.experts.*.up_proj": {"down_proj"},
        },
        0.0,
    ),
    "deepseek, latent attention and shared experts": (
        text("DeepseekV3", {**GQA, **MOE, **DEEPSEEK, **HEADS}),
        {
            "model.layers.*.self_attn.q_a_layernorm": {"q_b_proj"},
            "model.layers.*.self_attn.kv_a_layernorm": {"kv_b_proj"},
            "model.layers.*.mlp.shared_experts.up_proj": {"down_proj"},
        },
        0.0,
    ),
    "t5, encoder and decoder": (
        t5,
        {
            "encoder.block.*.layer.*.SelfAttention.v": {"o"},
            "encoder.block.*.layer.*.DenseReluDense.wi_*": {"wo"},
            "decoder.block.*.layer.*.EncDecAttention.v": {"o"},
        },
        0.0,
    ),
    "vit": (vit, {"vit.layers.*.layernorm_before": {"q_proj", "k_proj", "v_proj"}, "vit.layers.*.layernorm_after": {"fc1"}}, 0.0),
}


# Norms that compute in float32, and experts, which have no kernel in float64.
IN_FLOAT32 = {"gemma2", "cohere, attention and mlp side by side", "qwen3 moe", "deepseek, latent attention and shared experts"}


@contextmanager
def found_in(name: str, dtype: torch.dtype | None = None) -> Iterator[tuple[nn.Module, dict[str, Tensor], Mappings]]:
    model, batch = KINDS[name][0]()
    dtype = dtype or (torch.float32 if "moe" in name or "deepseek" in name else torch.float64)  # no kernel for experts in float64
    model = model.to(dtype)
    batch = {key: one.to(dtype) if one.is_floating_point() else one for key, one in batch.items()}
    with unfused_experts(model, hold=False):
        yield model, batch, find_pairs(model, batch, CPU)


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**batch).logits
    return found


@pytest.mark.parametrize("name", KINDS)
def test_pairs_are_found_without_knowing_the_architecture(name: str) -> None:
    _, expected, offset = KINDS[name]
    with found_in(name) as (model, _, found):
        kinds: dict[str, set[str]] = {}
        for pair in found.pairs:
            kinds.setdefault(_kind(pair.source), set()).update(reader.rpartition(".")[2] for reader in pair.readers)
            if model.get_submodule(pair.source).get_parameter("weight").dim() == 1:
                assert pair.offset == offset, pair
        missing = {kind: readers for kind, readers in expected.items() if kinds.get(kind) != readers}
        assert not missing, kinds
        assert all(refusal.why for refusal in found.refused)
        assert not {pair.source for pair in found.pairs} & {refusal.source for refusal in found.refused}


def _kind(name: str) -> str:
    return pattern_of(name).replace("wi_0", "wi_*").replace("wi_1", "wi_*")


@pytest.mark.parametrize("name", KINDS)
def test_scales_that_move_change_nothing(name: str) -> None:
    """Every pair takes random factors at once, in float64."""
    with found_in(name) as (model, batch, found):
        before, generator = logits(model, batch), torch.Generator().manual_seed(3)
        for pair in found.pairs:
            channels = _channels(model, pair)
            scale_channels(model, pair, torch.exp(torch.randn(channels, generator=generator, dtype=torch.float64)))
        assert torch.allclose(logits(model, batch), before, rtol=0, atol=1e-6 if name in IN_FLOAT32 else 1e-10)
        for pair in found.pairs[:3]:  # and a factor without its counterpart would have been seen
            wrong = ScalePair(pair.source, pair.readers[1:], pair.head_dim, pair.repeats, pair.offset)
            scale_channels(model, wrong, torch.full((_channels(model, pair),), 3.0))
            assert not torch.allclose(logits(model, batch), before, rtol=0, atol=1e-6)


def _channels(model: nn.Module, pair: ScalePair) -> int:
    module = model.get_submodule(pair.source)
    weight = module.get_parameter("weight")
    return int(weight.shape[1] if type(module).__name__ == "Conv1D" else weight.shape[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3 moe"])
def test_the_same_pairs_are_found_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    with found_in(name) as (_, _, exact), found_in(name, dtype) as (_, _, found):
        assert found.pairs == exact.pairs


@pytest.mark.parametrize("seed", range(6))
def test_small_numbers_of_float16_hide_no_pair(seed: int) -> None:
    """Below 2^-14 its steps are coarse, and a factor makes them larger than those of what it multiplies."""
    model = tiny.llama(intermediate_size=48).half()
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(seed))
    found = find_pairs(model, {"input_ids": ids}, torch.device("cpu")).by_source
    assert {f"model.layers.{index}.self_attn.v_proj" for index in range(2)} <= found.keys()


def test_heads_that_share_a_key_head_share_a_scale() -> None:
    with found_in("llama") as (_, _, found):
        pair = found.by_source["model.layers.0.self_attn.v_proj"]
        assert (pair.head_dim, pair.repeats) == (8, 2)
        spread = pair.spread(torch.arange(16))
        assert spread.tolist() == [*range(8), *range(8), *range(8, 16), *range(8, 16)]
        assert torch.equal(pair.gather(spread), torch.arange(16))


def test_what_stands_between_is_the_reason() -> None:
    with found_in("llama") as (_, _, found):
        assert found.why_not["model.layers.1.mlp.gate_proj"].startswith("it meets model.layers.0.mlp.down_proj (modeling_llama.py:")
        assert "output" in found.why_not["lm_head"]


def test_what_the_model_gives_out_is_not_scaled() -> None:
    """Encoders with a decoder give what the encoder said, too, and somebody may read that."""
    with found_in("t5, encoder and decoder") as (_, _, found):
        assert "the model's output" in found.why_not["encoder.final_layer_norm"]


def test_tied_weights_are_left_alone() -> None:
    with found_in("opt") as (_, _, found):
        assert "tied to model.decoder.embed_tokens" in found.why_not["model.decoder.final_layer_norm"]


class _Sometimes(nn.Module):
    """Reads the norm in two places, of which one is not called by small data."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.branches = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.other = nn.Linear(8, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.norm(torch.nn.functional.one_hot(input_ids % 8, 8).to(self.other.weight.dtype))
        y: Tensor = self.branches[0](x)
        return y if int(input_ids.max()) < 64 else y + self.branches[1](x)


class _Twice(nn.Module):
    """One layer reads the norm, and something else as well."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = torch.nn.functional.one_hot(input_ids % 8, 8).to(self.linear.weight.dtype)
        y: Tensor = self.linear(self.norm(x)) + self.linear(x)
        return y


class _Noisy(_Twice):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) + torch.rand(())


@pytest.mark.parametrize(("kind", "why"), [(_Sometimes, "branches.1, which this data does not call"), (_Twice, "on other inputs, too")])
def test_readers_that_are_not_all_of_it_are_refused(kind: type[nn.Module], why: str) -> None:
    torch.manual_seed(0)
    found = find_pairs(_roughened(kind()), {"input_ids": _ids}, CPU)
    assert why in found.why_not["norm"]


class _Between(nn.Module):
    """A gated MLP with something between the layer that goes up and the one that goes down."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.gate, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 8)
        self.between = between

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.norm(torch.sin(input_ids[..., None] * torch.arange(1, 17, device=input_ids.device)).to(self.up.weight.dtype))
        found: Tensor = self.down(self.between(self.up(x)) * torch.sigmoid(self.gate(x)))
        return found


LINEAR: dict[str, Callable[[Tensor], Tensor]] = {"nothing": lambda x: x, "a relu": torch.relu, "a leaky one": nn.functional.leaky_relu}
WITHIN: dict[str, Callable[[Tensor], Tensor]] = {  # outputs are below 10, and most are above 0.001
    "a clamp": lambda x: x.clamp(-100, 100),
    "a clamp of large values": lambda x: x.clamp(max=60.0),
    "a clamped relu": lambda x: torch.relu(x).clamp(max=100.0),
    "hardtanh": lambda x: nn.functional.hardtanh(x, -50.0, 50.0),
    "a minimum": lambda x: torch.minimum(x, torch.tensor(200.0, dtype=x.dtype)),
    "where": lambda x: torch.where(x < 90, x, 0.0),
    "no infinity": lambda x: torch.nan_to_num(x * 2.0**12, posinf=1.0) / 2.0**12 if x.dtype == torch.float16 else x.clamp(max=1e6),
}
ABOVE: dict[str, Callable[[Tensor], Tensor]] = {
    "a threshold": lambda x: nn.functional.threshold(x.abs(), 1e-6, 0.0),
    "a hard shrinkage": lambda x: nn.functional.hardshrink(x, 1e-7),
    "an epsilon": lambda x: x.abs().clamp(min=1e-6) * x.sign(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*LINEAR, *WITHIN, *ABOVE])
def test_what_is_linear_within_a_range_alone_passes_no_scale(name: str, dtype: torch.dtype) -> None:
    """Scales that are applied leave the range, though those of the proof may not. float16 has no small numbers to lose."""
    torch.manual_seed(0)
    found = find_pairs(_Between((LINEAR | WITHIN | ABOVE)[name]).eval().to(dtype), {"input_ids": _ids}, CPU)
    if name in LINEAR:
        assert found.by_source["up"].readers == ("down",)
    elif name in WITHIN or dtype != torch.float16:
        assert "whose input is no longer a scaled one" in found.why_not["up"]
    assert found.by_source["norm"].readers == ("up", "gate")


@pytest.mark.parametrize("dead", ["mlp.up_proj", "mlp.gate_proj", "self_attn.v_proj", "post_attention_layernorm"])
def test_a_weight_of_zeros_in_one_layer_hides_no_pair(dead: str) -> None:
    model, batch = text("Llama", GQA)()
    found = find_pairs(model, batch, CPU)
    model.get_submodule(f"model.layers.1.{dead}").get_parameter("weight").data.zero_()
    assert find_pairs(model, batch, CPU).pairs == found.pairs


class _Loop(nn.Module):
    """A mixture that calls every expert, without rows, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.gate = nn.Embedding(64, 16), nn.LayerNorm(16), nn.Linear(16, 2, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.norm(self.embed(input_ids)).reshape(-1, 16)
        chosen, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]))
        return out


@pytest.mark.parametrize("number", [0, 1])
def test_an_expert_that_is_called_without_rows_shows_nothing(number: int) -> None:
    torch.manual_seed(0)
    model = _Loop()
    chosen = model.gate(model.norm(model.embed.weight)).argmax(-1)
    found = find_pairs(model, {"input_ids": (chosen != number).nonzero()[:3, 0][None]}, CPU)
    assert found.pairs == ()
    assert found.why_not["norm"] == f"experts.{number}.0, which this data does not call, may read it, too"


def test_a_forward_that_draws_random_numbers_proves_nothing() -> None:
    with pytest.raises(TracingError, match="other bits when it is run again"):
        find_pairs(_Noisy(), {"input_ids": _ids}, CPU)


def test_the_model_is_as_before() -> None:
    model, batch = KINDS["llama"][0]()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    model.train()
    find_pairs(model, batch, CPU)
    assert model.training
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# Those whose norms stand behind the sum, or whose only readers are tied or out of reach: there nothing may move.
WITHOUT = {"jetmoe", "openai_gpt", "xlnet"}


DECODERS = [name for name, entry in zoo().items() if entry.model_class.endswith(("ForCausalLM", "LMHeadModel"))]


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_of_the_zoo_has_pairs_that_all_hold_or_is_known_to_have_none(name: str) -> None:
    model = _roughened(zoo()[name].build(0))
    batch = sample_batches(model, None).batches[0]
    with torch.no_grad(), unfused_experts(model, hold=True) as experts:
        before = call_model(model, batch).logits
        found = find_pairs(model, batch, CPU)
        for pair in found.pairs:
            width = len(model.get_submodule(pair.source).get_parameter("weight"))
            scale_channels(model, pair, torch.linspace(0.8, 1.25, width))
        after = call_model(model, batch).logits
        experts.restore()
    assert float((after - before).norm() / before.norm()) < 1e-3
    assert all(refusal.why for refusal in found.refused)
    assert (name in WITHOUT) == (not found.pairs)


def test_nearly_every_decoder_of_the_zoo_has_pairs() -> None:
    assert set(DECODERS) >= WITHOUT
    assert len(WITHOUT) < 0.05 * len(DECODERS)


# Mappings that a recipe writes down.

QKV = ("re:.*q_proj", "re:.*k_proj", "re:.*v_proj")


def test_a_written_mapping_means_the_layers_of_its_own_block() -> None:
    with found_in("llama") as (model, _, found):
        wanted = resolve_written(model, [Written("re:.*input_layernorm", QKV)], "X")
        assert list(wanted) == ["model.layers.0.input_layernorm", "model.layers.1.input_layernorm"]
        pairs, notes = explicit_pairs(wanted, found, "X")
        assert [pair.source for pair in pairs] == list(wanted)
        assert not notes


def test_a_reader_that_the_recipe_forgot_is_scaled_and_said() -> None:
    with found_in("llama") as (model, _, found):
        wanted = resolve_written(model, [Written("re:.*input_layernorm", QKV[:2])], "X")
        pairs, notes = explicit_pairs(wanted, found, "X")
        assert pairs[0].readers[-1].endswith("v_proj")
        assert notes[0].startswith("X: model.layers.0.self_attn.v_proj read")


@pytest.mark.parametrize(
    ("smooth", "balance", "why"),
    [
        ("re:.*input_layernorm", ("re:.*gate_proj",), "gate_proj does not read the output of model.layers.0.input_layernorm"),
        ("re:.*post_attention_layernorm", (*QKV,), "does not read the output of"),
        ("re:.*mlp.gate_proj", ("re:.*down_proj",), "no scale of model.layers.0.mlp.gate_proj may move, for it meets"),
        ("re:.*q_proj", ("re:.*k_proj",), "no scale of model.layers.0.self_attn.q_proj may move"),
        ("re:.*layernrm", ("re:.*k_proj",), "matches no module"),
        ("re:.*input_layernorm", ("re:.*k_prj",), "matches no module"),
    ],
)
def test_wrong_mappings_are_refused_by_name(smooth: str, balance: tuple[str, ...], why: str) -> None:
    with found_in("llama") as (model, _, found), pytest.raises(TargetError, match=why):
        explicit_pairs(resolve_written(model, [Written(smooth, balance)], "X"), found, "X")


@pytest.mark.parametrize("source", ["model.embed_tokens", "model.layers.0.self_attn"])
def test_a_source_that_is_no_norm_and_no_linear_layer_is_told_as_such(source: str) -> None:
    """In a whole sentence: the forward does call it."""
    model, batch = KINDS["llama"][0]()
    wanted = resolve_written(model, [Written(source, ("re:.*q_proj",))], "X")
    found = find_pairs(model, batch, CPU, sources=set(wanted))
    with pytest.raises(TargetError, match=f"no scale of {source} may move, for it is no norm and no linear layer; take this mapping out"):
        explicit_pairs(wanted, found, "X")


class ReadPast(nn.Module):
    """A norm and two layers, and something that a forward does with a weight or bias of theirs beside."""

    def __init__(self, past: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 16)
        self.past = past
        if past == "hook":
            self.norm.register_forward_hook(lambda module, args, output: output / module.weight.norm())

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(self.norm(x)))
        if self.past == "skip":
            return y + (x * self.norm.weight)[..., :16]
        if self.past == "spectral":
            return y / self.down.weight.norm()
        if self.past == "again":
            return y + nn.functional.linear(x, self.up.weight)[..., :16]
        if self.past == "unseen":
            return y * (1 + self.norm.weight.nan_to_num().mean())
        if self.past == "bias":
            return y + self.up.bias.sum()
        return y


@pytest.mark.parametrize(
    ("past", "refused"),
    [
        ("no", {}),
        ("hook", {"norm": "norm"}),
        ("skip", {"norm": "norm"}),
        ("spectral", {"up": "down"}),
        ("again", {"norm": "up", "up": "up"}),
        ("bias", {"norm": "up", "up": "up"}),
    ],
)
def test_what_a_forward_reads_past_a_layer_keeps_its_scale(past: str, refused: dict[str, str]) -> None:
    torch.manual_seed(0)
    model, x = ReadPast(past).eval(), torch.randn(2, 6, 32, dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = find_pairs(model, {"x": x}, torch.device("cpu"))
    assert {pair.source for pair in found.pairs} == {"norm", "up"} - refused.keys()
    for source, layer in refused.items():
        assert found.why_not[source] == f"the weight or bias of {layer} is read past its forward"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert "forward" not in vars(model.norm) and not any(bool(one.isnan().any()) for one in model.parameters())


class ReadPastInShort(ReadPast):
    """Short batches go another way."""

    def forward(self, x: Tensor) -> Tensor:
        self.past = "skip" if x.shape[1] == 6 else "no"
        return super().forward(x)


def test_what_is_read_past_a_layer_is_left_alone_and_ends_a_run_where_only_other_batches_show_it() -> None:
    torch.manual_seed(0)
    rows = [{"x": torch.randn(4, 6, 32, dtype=torch.float32) * torch.logspace(-1, 1, 32, dtype=torch.float32)} for _ in range(3)]
    quantizer = QuantizationModifier(config_groups={"all": {"targets": ["Linear"], "weights": {"num_bits": 8, "group_size": 8}}})
    model = ReadPast("skip").eval()
    with torch.no_grad():
        before = model(rows[0]["x"])
        result = oneshot(model, recipe=[AWQModifier(), quantizer.model_copy(deep=True)], dataset=DataLoader(rows, batch_size=None))
        assert "scales of 1 modules" in result.report.notes[0]
        assert float((model(rows[0]["x"]) - before).norm() / before.norm()) < 0.02
    with pytest.raises(TargetError, match=r"on batch 0 .* the model gives other outputs than before"):
        oneshot(
            ReadPast("unseen").eval(),
            recipe=[SmoothQuantModifier(), quantizer.model_copy(deep=True)],
            dataset=DataLoader(rows, batch_size=None),  # of one kind
        )
    longer = DataLoader([*rows, {"x": torch.cat([row["x"] for row in rows], dim=1)}], batch_size=None)
    with pytest.raises(TargetError, match="the model gives other outputs than before"):
        oneshot(ReadPastInShort("no").eval(), recipe=[AWQModifier(), quantizer], dataset=longer)
