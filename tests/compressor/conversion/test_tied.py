"""A tied weight has the name of the files only where the files hold it: `convert` refuses what `oneshot` refuses, in its words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from compressor import model_free, oneshot
from compressor.errors import SchemeError, TargetError
from compressor.model.loading.load import quiet_transformers

_SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
_OLMO = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
_ZAMBA: dict[str, Any] = {
    **_SMALL,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "mamba_d_state": 8,
    "mamba_ngroups": 1,
    "n_mamba_heads": 4,
    "mamba_headdim": 16,
    "chunk_size": 8,
    "hybrid_layer_ids": [1, 3],
    "layers_block_type": ["mamba", "hybrid"] * 2,
    "num_mem_blocks": 1,
    "adapter_rank": 4,
}
_GROUPS = {"weights": {"num_bits": 4, "group_size": 4, "strategy": "group"}}
_CHANNELS = {"weights": {"num_bits": 8, "strategy": "channel"}}
_BLOCKS = ["lm_head", "re:.*layers[.]1[.].*"]
_LLAMA = {**_SMALL, "num_hidden_layers": 1, "tie_word_embeddings": True}
_TIED: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[str], type[Exception], str]] = {
    "block": ("Zamba2ForCausalLM", _ZAMBA, _GROUPS, _BLOCKS, TargetError, "layers.3.shared_transformer.self_attn.q_proj: .* tied to"),
    "groups": ("Zamba2ForCausalLM", _ZAMBA, {"weights": {**_GROUPS["weights"], "group_size": 32}}, _BLOCKS, SchemeError, "layers.3.shared"),
    "decoder": (
        "DebertaV2ForMaskedLM",
        {**_SMALL, "num_hidden_layers": 1},
        _CHANNELS,
        ["re:deberta.embeddings.*"],
        TargetError,
        "cls.predictions.decoder: its weight is tied to",
    ),
    "head": ("LlamaForCausalLM", _LLAMA, _CHANNELS, ["model.embed_tokens"], TargetError, "lm_head: its weight is tied to"),
    "table": ("LlamaForCausalLM", _LLAMA, _CHANNELS, ["lm_head"], TargetError, "model.embed_tokens: its weight is tied to"),
}


@pytest.mark.parametrize("is_stored_twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize(("name", "config", "scheme", "ignore", "kind", "words"), _TIED.values(), ids=list(_TIED))
def test_what_is_tied_to_an_ignored_module_is_refused_as_oneshot_refuses_it(
    name: str,
    config: dict[str, Any],
    scheme: dict[str, Any],
    ignore: list[str],
    kind: type[Exception],
    words: str,
    is_stored_twice: bool,
    tmp_path: Path,
) -> None:
    """Whether the files hold it under one name, or the same values under every name."""
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**config))
    with quiet_transformers():
        model.save_pretrained(tmp_path / "base")
    if is_stored_twice:
        file = tmp_path / "base" / "model.safetensors"
        every = {key: value.clone() for key, value in model.state_dict().items()}
        assert len(every) > len(load_file(file))
        save_file(every, file, metadata={"format": "pt"})
    groups = {"a": {"targets": ["Linear", "Embedding"] if "Llama" in name else ["Linear"], **scheme}}
    asked: dict[str, Any] = {"recipe": {"QuantizationModifier": {"config_groups": groups, "ignore": ignore}}, "model_class": name}
    told = []
    for verb in (oneshot, model_free):
        with pytest.raises(kind, match=words) as refused:
            verb(tmp_path / "base", output_dir=tmp_path / "made", **asked)
        told.append(str(refused.value))
    assert told[0] == told[1] and not (tmp_path / "made").exists()


def test_a_tied_block_is_rounded_for_neither_verb_where_all_its_places_are_ignored(tmp_path: Path) -> None:
    """By the names of the model; what lies beside it is rounded alike."""
    torch.manual_seed(0)
    with quiet_transformers():
        transformers.Zamba2ForCausalLM(transformers.Zamba2Config(**_ZAMBA)).save_pretrained(tmp_path / "base")
    settings = {"config_groups": {"a": {"targets": ["Linear"], **_GROUPS}}, "ignore": ["lm_head", "re:.*shared_transformer.*"]}
    made = [
        verb(tmp_path / "base", output_dir=tmp_path / verb.__name__, recipe={"QuantizationModifier": settings})
        for verb in (oneshot, model_free)
    ]
    assert list(made[0].report.modules) == list(made[1].report.modules)
    files = [load_file(tmp_path / verb / "model.safetensors") for verb in ("oneshot", "model_free")]
    assert files[0].keys() == files[1].keys() and all(torch.equal(value, files[1][key]) for key, value in files[0].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_joined_row_behind_row_and_is_no_target_is_copied(dtype: torch.dtype, tmp_path: Path) -> None:
    """Of OLMo-Hybrid transformers makes one convolution of three."""
    settings = {**_OLMO, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
    torch.manual_seed(0)
    with quiet_transformers():
        config = transformers.OlmoHybridConfig(**settings, layer_types=["linear_attention", "full_attention"])
        transformers.OlmoHybridForCausalLM(config).to(dtype).save_pretrained(tmp_path / "base")
    recipe = {"QuantizationModifier": {"config_groups": {"a": {"targets": ["Linear"], **_GROUPS}}, "ignore": ["lm_head"]}}
    for verb in (oneshot, model_free):
        verb(tmp_path / "base", output_dir=tmp_path / verb.__name__, recipe=recipe)
    files = [(tmp_path / verb / "model.safetensors").read_bytes() for verb in ("oneshot", "model_free")]
    assert files[0] == files[1]
