"""A model whose sound comes through a codec, as codes that take the places of tokens (CSM): what hears it is seen, made from its config"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CsmConfig, CsmForConditionalGeneration

from compressor import SpinQuantModifier, oneshot
from compressor.errors import TargetError
from compressor.model.loading.sample_batches import sample_batches

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 40,
    "num_codebooks": 4,
}
_CODEC: dict[str, Any] = {
    **{name: _SMALL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")},
    "model_type": "mimi",
    "num_key_value_heads": 2,
    "num_filters": 4,
    "num_quantizers": 4,
    "codebook_size": 32,
    "codebook_dim": 8,
    "vector_quantization_hidden_dimension": 8,
    "upsample_groups": 32,
}
_TOKENS = {"audio_token_id": 62, "audio_eos_token_id": 63, "pad_token_id": 61, "bos_token_id": 60, "eos_token_id": 59}


def csm() -> CsmForConditionalGeneration:
    torch.manual_seed(0)
    depth = {**_SMALL, "backbone_hidden_size": 32, "max_position_embeddings": 33}
    codes = {"codebook_pad_token_id": 39, "codebook_eos_token_id": 0}
    return CsmForConditionalGeneration(
        CsmConfig(**_SMALL, **_TOKENS, **codes, text_vocab_size=64, depth_decoder_config=depth, codec_config=_CODEC)
    ).eval()


def test_sound_that_a_codec_reads_is_made_from_the_config() -> None:
    model, heard = csm(), list[int]()
    model.backbone_model.embed_tokens.register_forward_pre_hook(lambda _, args: heard.append(args[0].shape[1]))
    for batch in sample_batches(model, "audio").batches:
        assert int((batch["input_ids"] == 62).sum()) > 0
        heard.clear()
        with torch.no_grad():
            model(**batch)
        assert heard[0] == int((batch["input_ids"][0] == 62).sum())  # a code of each codebook, for each token


@pytest.mark.parametrize("pipeline", [None, "basic"])
def test_the_reason_why_its_hidden_states_cannot_turn_is_the_tie_and_not_the_sound(pipeline: Any) -> None:
    """Codes of sound are embedded by a table that the depth decoder has, too; text alone would not have shown that."""
    ids = torch.randint(50, (4, 12))
    with pytest.raises(TargetError, match=r"embed_audio_tokens, which adds to the hidden states, is tied to depth_decoder\.model\.embed"):
        oneshot(csm(), recipe=SpinQuantModifier(rotations=["R1"]), dataset=ids, pipeline=pipeline)
