"""What transformers does not read of quantized keys and values is said before the run, and by save_pretrained; all else it reads"""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaPreTrainedModel

from compressor import load_compressed, oneshot, plan
from compressor.errors import SchemeError, TargetError
from compressor.model.checkpoints.format import unpacks_as_it_reads
from compressor.model.class_readers import module_notes, reading_notes
from compressor.model.loading.load import quiet_transformers
from compressor.nn.attention.kv_cache import cache_argument
from compressor.numerics import QuantizationArgs
from tests import tiny

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
EXPERTS = {"intermediate_size": 32, "num_key_value_heads": 2, "num_local_experts": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"intermediate_size": 32},
    "OPT": {"ffn_dim": 32, "word_embed_proj_dim": 32, "max_position_embeddings": 32},
    "Mixtral": EXPERTS,
    "GPTNeoX": {"intermediate_size": 32},
    "Bloom": {},
}
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
WEIGHTS = {"num_bits": 4, "group_size": 16}
ATTENTION, ALL = r"re:.*self_attn\..*", "Linear"
UNCOUNTED, MERGED = "its config has no num_key_value_heads", "merges weights into .experts"
DEQUANTIZED = "but keys and values are not quantized there"
UNSEEN = "transformers leaves keys and values as they are"
TOKENS = torch.arange(48).reshape(4, 12)


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **MODELS[kind]})
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize(
    ("kind", "target", "said"),
    [
        ("Llama", None, None),
        ("OPT", None, UNCOUNTED),
        ("OPT", ALL, UNCOUNTED),
        ("Mixtral", None, MERGED),
        ("Mixtral", ATTENTION, None),
        ("Mixtral", ALL, DEQUANTIZED),
    ],
)
def test_what_transformers_does_not_read_is_said_before_the_run(kind: str, target: str | None, said: str | None, tmp_path: Path) -> None:
    if cache_argument(LlamaAttention) == "cache":  # transformers 5.24
        said = said or UNSEEN
    groups = {} if target is None else {"ignore": ["lm_head"], "config_groups": {"g": {"targets": [target], "weights": WEIGHTS}}}
    recipe = {"QuantizationModifier": {"kv_cache_scheme": KV, **groups}}
    planned = plan(model_of(kind), recipe=recipe).notes
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = oneshot(model_of(kind), recipe=recipe, dataset=TOKENS, output_dir=tmp_path / "out")
        result.model.save_pretrained(tmp_path / "again")
    found = [str(one.message) for one in caught if said is not None and said in str(one.message)]
    assert len(found) == (0 if said is None else 2)  # save_pretrained says so, too
    told, foretold = ([note for note in notes if "transformers" in note] for notes in (result.report.notes, planned))
    assert (said is None) == (not [note for note in told if "are stored fused" not in note])  # which it reads
    assert told == foretold
    assert torch.equal(logits(load_compressed(tmp_path / "out")), logits(result.model))
    agrees = _transformers_agrees(tmp_path / "out", logits(result.model))
    if said == DEQUANTIZED and not unpacks_as_it_reads():  # before 5.21 it unpacks weights alone
        assert agrees
    else:
        assert (said is None) == agrees


def test_caches_under_a_name_that_compressed_tensors_does_not_know_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaAttention, "forward", lambda self, hidden_states, cache=None, **kwargs: None)  # as from 5.24 on
    (note,) = reading_notes(model_of("Llama"), {}, QuantizationArgs.model_validate(KV))
    assert f"{UNSEEN} (model.layers.0.self_attn" in note


@pytest.mark.parametrize(
    ("kind", "swiglu", "ignore", "symmetric", "is_read"),
    [
        ("Dinov2", False, [], True, False),
        ("Dinov2", True, [], True, True),
        ("Dinov2", True, ["re:.*mlp.*"], True, False),
        ("HrmText", True, [], True, True),
        ("HrmText", True, ["re:.*mlp.*"], True, False),
        ("HrmText", True, [], False, False),  # unpacked at once, so no layer has a scale
    ],
)
def test_rules_for_files_that_transformers_cannot_make_are_said(
    kind: str, swiglu: bool, ignore: list[str], symmetric: bool, is_read: bool, tmp_path: Path
) -> None:
    """A rule that cuts a joined weight into parts that are no quantized layers stops it before it reads anything."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    of_images = {"image_size": 16, "patch_size": 8, "mlp_ratio": 2, "use_swiglu_ffn": swiglu}
    of_text = {"vocab_size": 64, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16}
    config = getattr(transformers, f"{kind}Config")(**sizes, **(of_images if kind == "Dinov2" else of_text))
    kept = getattr(transformers, f"{kind}{'ForImageClassification' if kind == 'Dinov2' else 'ForCausalLM'}")
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16)} if kind == "Dinov2" else {"input_ids": TOKENS}
    weights = {"num_bits": 8, "strategy": "channel"} if symmetric else {"num_bits": 4, "group_size": 16, "symmetric": False}
    scheme: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
    if kind == "Dinov2":  # under the name `weight`, so that nothing is asked for
        scheme["input_activations"] = {"num_bits": 8, "strategy": "token", "dynamic": True}
    recipe = {
        "QuantizationModifier": {"ignore": ["classifier" if kind == "Dinov2" else "lm_head", *ignore], "config_groups": {"g": scheme}}
    }
    model, folder = kept(config).eval(), tmp_path / "out"
    planned = plan(model, recipe=recipe).notes
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = oneshot(model, recipe=recipe, output_dir=folder)
    with torch.no_grad():
        expected = model(**inputs).logits
        assert torch.equal(load_compressed(folder, model_class=kept)(**inputs).logits, expected)
        try:
            assert torch.equal(kept.from_pretrained(folder).eval()(**inputs).logits, expected)
            said = ""
        except ValueError as error:
            said = str(error)
    reads = not said
    assert reads or "one to many, one to one or many to one" in said
    assert reads is is_read or not unpacks_as_it_reads()  # transformers before 5.21 makes other rules
    for notes in (planned, result.report.notes, [str(one.message) for one in caught]):
        assert bool([note for note in notes if "it makes no rule for the files" in note]) is not reads


def _transformers_agrees(folder: Path, expected: torch.Tensor) -> bool:
    try:
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
            return torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(folder).eval()), expected)
    except (ValueError, RuntimeError, IndexError):  # the last before 5.23, where it looks for a scheme and there is none
        return False


@pytest.mark.parametrize(("heads", "group_size", "is_read"), [(4, 16, False), (2, 16, True), (4, 32, True)])
def test_packed_zero_points_in_one_word_are_refused_before_the_run(heads: int, group_size: int, is_read: bool, tmp_path: Path) -> None:
    model = tiny.llama(**{**SIZES, "intermediate_size": 32, "num_attention_heads": heads, "num_key_value_heads": 1})
    weights = {"num_bits": 4, "group_size": group_size, "symmetric": False}
    recipe = {"QuantizationModifier": {"ignore": ["lm_head"], "config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}}
    unwritable, folder = plan(model, recipe=recipe).unwritable, tmp_path / "out"
    rows = model.model.layers[0].self_attn.k_proj.out_features
    packed = torch.zeros(-(-rows * 4 // 32), 32 // group_size, dtype=torch.int32)
    if is_read:
        result = oneshot(model, recipe=recipe, output_dir=folder)
        assert unwritable is None and _transformers_agrees(folder, logits(result.model))
        assert unpack_from_int32(packed, 4, torch.Size([rows, packed.shape[1]]), packed_dim=0).shape[0] == rows
        return
    with pytest.raises(RuntimeError, match="stride"):  # else the refusal may go
        unpack_from_int32(packed, 4, torch.Size([rows, packed.shape[1]]), packed_dim=0)
    with pytest.raises(SchemeError, match=r"self_attn.k_proj, .*v_proj: compressed-tensors 0.20 does not unpack zero points") as error:
        oneshot(model, recipe=recipe, output_dir=folder)
    assert unwritable == str(error.value) and not folder.exists()


def test_a_parametrized_module_that_its_class_builds_is_no_other_one() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    convolutions = {"conv_dim": [8], "conv_stride": [2], "conv_kernel": [3]}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = transformers.Wav2Vec2Config(**sizes, **convolutions, **positions)
    model = transformers.Wav2Vec2ForCTC(config).eval()
    assert module_notes(model) == []
    torch.nn.utils.parametrizations.weight_norm(model.lm_head)
    assert any("lm_head" in note for note in module_notes(model)), module_notes(model)


@pytest.mark.parametrize("kind", ["GPTNeoX", "Bloom"])
def test_attention_that_readers_do_not_know_is_refused_as_that(kind: str) -> None:
    with pytest.raises(TargetError, match=rf"{kind}ForCausalLM has no attention module in which readers would quantize keys and values"):
        oneshot(model_of(kind), recipe={"QuantizationModifier": {"kv_cache_scheme": KV}}, dataset=TOKENS)


@pytest.mark.parametrize(
    "recipe", [{"QuantizationModifier": {"scheme": "W8A8", "ignore": ["lm_head"]}}, {"MagnitudePruningModifier": {"final_sparsity": 0.5}}]
)
def test_weights_of_several_dtypes_are_said_before_the_run(recipe: dict[str, Any], tmp_path: Path) -> None:
    model = model_of("Llama")
    model.get_input_embeddings().bfloat16()
    with pytest.warns(UserWarning, match=r"11 tensors \(lm_head.weight, .*\) are float32 in this model, and bfloat16, the one dtype"):
        result = oneshot(model, recipe=recipe, output_dir=tmp_path / "out")
    assert not torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(result.model))
    for plain in (model_of("Llama").bfloat16(), model_of("Llama")):
        assert not any("the one dtype" in note for note in oneshot(plain, recipe=recipe).report.notes)


def test_weights_that_their_class_keeps_in_float32_are_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was cast as a whole computes otherwise than its checkpoint, in which a reader has them in float32 (DeepSeek-V4)."""
    monkeypatch.setattr(LlamaPreTrainedModel, "_keep_in_fp32_modules_strict", ["input_layernorm"])
    recipe = {"QuantizationModifier": {"scheme": "W8A8", "ignore": ["lm_head"]}}
    model = model_of("Llama").bfloat16()
    said = r"1 tensors \(model.layers.0.input_layernorm.weight\) are bfloat16 in this model, and float32, in which its class"
    with pytest.warns(UserWarning, match=said):
        oneshot(model, recipe=recipe, output_dir=tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    layer = again.model.layers[0]
    assert (layer.input_layernorm.weight.dtype, layer.post_attention_layernorm.weight.dtype) == (torch.float32, torch.bfloat16)
    model_of("Llama").bfloat16().save_pretrained(tmp_path / "base")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert not any("keeps them" in note for note in oneshot(read, recipe=recipe).report.notes)


def test_an_embedding_without_a_head_is_tied_to_nothing_whatever_the_config_says(tmp_path: Path) -> None:
    model = tiny.bert()
    assert model.config.tie_word_embeddings
    rounded = {"targets": ["re:.*word_embeddings$"], "weights": {"num_bits": 8, "strategy": "channel"}}
    recipe = {"quant_stage": {"quant_modifiers": {"QuantizationModifier": {"config_groups": {"g": rounded}}}}}
    oneshot(model, recipe=recipe, output_dir=tmp_path / "out")
    with torch.no_grad(), quiet_transformers():
        again = type(model).from_pretrained(tmp_path / "out")
        assert torch.equal(again(TOKENS)[0], model(TOKENS)[0])
