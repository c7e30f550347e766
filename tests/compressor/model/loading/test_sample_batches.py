"""Random batches fit the model they were made for, whatever it reads, and what cannot be made is said in one line."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from compressor.errors import ModelError
from compressor.model.loading.sample_batches import MODALITIES, Modality, sample_batches
from compressor.model.targets import text_config
from tests.compressor.recipe.published.record import build

_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = {"model_type": "llama", "vocab_size": 128, **_SMALL}
_CLIP = {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **_SMALL}
_BOTH = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
_SEQ2SEQ = {"vocab_size": 64, "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0, **_BOTH}
_IDS = {"image_token_id": 100, "video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}
_PATCHES = {"embed_dim": 32, "hidden_size": 32, "depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "mlp_ratio": 2}
_ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}, "num_key_value_heads": 2}
_CONVOLUTIONS = {"conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}

_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("BartForConditionalGeneration", {**_SEQ2SEQ, "max_position_embeddings": 64}),
    "vit": ("ViTForImageClassification", {**_SMALL, "image_size": 16, "patch_size": 8}),
    "clip": ("CLIPModel", {"text_config": {**_SMALL, "vocab_size": 64, "max_position_embeddings": 32}, "vision_config": _CLIP}),
    "llava": ("LlavaForConditionalGeneration", {"image_token_index": 100, "vision_config": _CLIP, "text_config": _LLAMA}),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {**_IDS, "vision_config": _PATCHES, "text_config": {**_LLAMA, **_ROPE, "model_type": "qwen2_vl_text"}},
    ),
    "whisper": ("WhisperForConditionalGeneration", {**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 10}),
    "qwen2_audio": (
        "Qwen2AudioForConditionalGeneration",
        {
            "audio_token_index": 100,
            "text_config": {**_LLAMA, "model_type": "qwen2", "num_key_value_heads": 2},
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 48,
                "num_mel_bins": 8,
                "max_source_positions": 10,
            },
        },
    ),
    "vit_gpt2": (
        "VisionEncoderDecoderModel",
        {
            "encoder": {**_SMALL, "model_type": "vit", "image_size": 32, "patch_size": 16},
            "decoder": {
                "model_type": "gpt2",
                "n_embd": 32,
                "n_layer": 1,
                "n_head": 4,
                "vocab_size": 64,
                "is_decoder": True,
                "add_cross_attention": True,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
        },
    ),
    "llava_next": (
        "LlavaNextForConditionalGeneration",
        {"image_token_index": 100, "vision_config": _CLIP, "text_config": _LLAMA, "image_grid_pinpoints": [[8, 16], [16, 8]]},
    ),
    "voxtral": (
        "VoxtralForConditionalGeneration",
        {
            "audio_token_id": 100,
            "text_config": {**_LLAMA, "num_key_value_heads": 2, "head_dim": 8},
            "audio_config": {**_SMALL, "intermediate_size": 128, "num_mel_bins": 8, "max_source_positions": 20},
        },
    ),
    "patchtst": ("PatchTSTForPrediction", {"d_model": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16}),
    "wav2vec2": ("Wav2Vec2Model", {**_SMALL, **_CONVOLUTIONS, "num_conv_pos_embedding_groups": 4}),
}


def _make(kind: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind not in _MODELS:
            return build(kind)
        name, config = copy.deepcopy(_MODELS[kind])
        model_class = getattr(transformers, name)
        model: nn.Module = model_class(model_class.config_class(**config)).eval()
    return model


@pytest.mark.parametrize(
    ("kind", "asked", "got", "names"),
    [
        ("bart", None, "text", "input_ids decoder_input_ids"),
        ("vit", None, "vision", "pixel_values"),
        ("clip", None, "vision", "input_ids pixel_values"),
        ("llava", None, "text", "input_ids"),
        ("llava", "vision", "vision", "input_ids attention_mask pixel_values"),
        ("qwen2_vl", "vision", "vision", "input_ids attention_mask mm_token_type_ids pixel_values image_grid_thw"),
        ("whisper", None, "audio", "input_features decoder_input_ids"),
        ("qwen2_audio", "audio", "audio", "input_ids attention_mask input_features feature_attention_mask"),
        ("wav2vec2", None, "audio", "input_values"),
        ("vit_gpt2", None, "vision", "pixel_values decoder_input_ids"),
        ("llava_next", "vision", "vision", "input_ids attention_mask pixel_values image_sizes"),
        ("voxtral", "audio", "audio", "input_ids attention_mask input_features"),
        ("gemma4", "vision", "vision", "input_ids attention_mask mm_token_type_ids pixel_values image_position_ids"),
        ("gemma4", "audio", "audio", "input_ids attention_mask mm_token_type_ids input_features input_features_mask"),
        ("kimi_k25", "vision", "vision", "input_ids attention_mask pixel_values image_grid_thw"),
    ],
)
def test_batches_run_and_hold_what_was_asked_for(kind: str, asked: Modality | None, got: str, names: str) -> None:
    model = _make(kind)
    made = sample_batches(model, asked)
    assert made.modality == got
    assert list(made.batches[0]) == names.split()
    first, second = ({name: value.shape for name, value in batch.items()} for batch in made.batches)
    assert first != second
    assert all(
        torch.equal(value, again)
        for value, again in zip(made.batches[0].values(), sample_batches(model, asked).batches[0].values(), strict=True)
    )


def test_as_many_placeholders_as_the_tower_gives_features() -> None:
    batch = sample_batches(_make("llava"), "vision").batches[0]
    assert (batch["input_ids"] == 100).sum(dim=1).tolist() == [4, 4]


def test_placeholders_never_stand_in_plain_text() -> None:
    batch = sample_batches(_make("llava"), "text").batches[0]
    assert int(batch["input_ids"].max()) < 100


@pytest.mark.parametrize(
    ("kind", "asked", "told"),
    [
        ("vit", "text", "reads no text; choose --modality vision"),
        ("bart", "vision", "reads no images; choose --modality text"),
        ("clip", "audio", "reads no sound; choose --modality text or vision"),
        ("gemma4_moe", "audio", "reads no sound; choose --modality text or vision"),  # its config has no tower for that
        *(("patchtst", modality, r"reads no (text|images|sound); give real inputs .* --dataset") for modality in MODALITIES),
    ],
)
def test_a_modality_that_the_model_does_not_read_is_refused(kind: str, asked: Modality, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        sample_batches(_make(kind), asked)


def test_a_model_that_cannot_run_what_was_made_says_what_to_give() -> None:
    model = _make("clip")
    with pytest.raises(
        ModelError, match=r"CLIPModel: cannot run a text batch made from its config .* --dataset inputs.safetensors, or for ONNX"
    ):
        sample_batches(model, "text")
    with pytest.raises(ModelError, match="has no config"):
        sample_batches(nn.Linear(2, 2))


def test_a_config_of_several_texts_is_taken_as_a_whole() -> None:
    parts = {
        "text_encoder": {"model_type": "t5", "vocab_size": 64, "d_model": 32, "num_layers": 1},
        "audio_encoder": {"model_type": "encodec"},
        "decoder": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
    }
    config = transformers.MusicgenConfig(**parts)
    assert text_config(config) is config and text_config(None) is None
    assert text_config(_make("llava").config).vocab_size == 128
