"""Planted bugs in attention whose queries, keys and values are quantized, against compressed-tensors, real tokens and the files.

The looks need one Llama with two heads of keys for four of queries, so that a mix-up of the two shows.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressor import QuantizationModifier, load_compressed, oneshot
from compressor.errors import CompressorError
from compressor.nn.attention.kv_cache import attach_kv_quantizer, attention_modules
from compressor.numerics import QParams, QuantizationArgs
from harness.mutants.family import Family, Killer
from harness.mutants.patches import Edit, Mutant, bug
from tests import tiny

_KV, _QUERIES = "compressor.nn.attention.kv_cache:", "compressor.nn.attention.queries:"
_OBSERVING = "compressor.modifiers.schemes.kv_cache:_observing"
_IDS = torch.arange(1, 25).reshape(2, 12) * 5 % 63 + 1
_FORMAT = QuantizationArgs(type="float", strategy="attn_head")
_SCALES = {"q": 0.02 * torch.arange(1, 5).reshape(4, 1, 1), "k": torch.full((2, 1, 1), 0.02), "v": torch.full((2, 1, 1), 0.05)}
_PADDED = 5  # real tokens of the second sequence


def _model() -> Any:
    with torch.random.fork_rng():
        model = tiny.llama(intermediate_size=32, num_hidden_layers=1)
    layer = model.model.layers[0].self_attn
    model.model.embed_tokens.weight.data[0] = torch.linalg.svd(layer.q_proj.weight.data).Vh[0]  # no query is larger than that of padding
    return model


def _logits(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(_IDS).logits
        return found


@functools.cache
def _theirs() -> Tensor:
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = _model()
    group = {"targets": ["LlamaAttention"], "input_activations": _FORMAT.model_dump(mode="json"), "format": "dense"}
    apply_quantization_config(model, QuantizationConfig(config_groups={"g": group}, quantization_status="compressed"), show_progress=False)
    for attention in attention_modules(model).values():
        for part, scale in _SCALES.items():
            getattr(attention, f"{part}_scale").data.copy_(scale)
    return _logits(model)


def as_compressed_tensors() -> str | None:
    """Compare logits for given scales, one per head."""
    model = _model()
    for name, attention in attention_modules(model).items():
        attach_kv_quantizer(attention, _FORMAT, {part: QParams(scale, None) for part, scale in _SCALES.items()}, name=name, queries=True)
    ours = _logits(model)
    return None if torch.equal(ours, _theirs()) else f"logits differ by up to {float((ours - _theirs()).abs().max()):.2g}"


@functools.cache
def _largest() -> Tensor:
    """The largest query of each head, over real tokens, computed by hand."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model, largest = _model(), torch.zeros(4)
    attention = model.model.layers[0].self_attn

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module, args
        query = attention.q_proj(kwargs["hidden_states"]).view(1, -1, 4, 8).transpose(1, 2)
        largest.copy_(largest.maximum(apply_rotary_pos_emb(query, query, *kwargs["position_embeddings"])[0].abs().amax((0, 2, 3))))

    attention.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.inference_mode():
        for row in (_IDS[:1], _IDS[1:, :_PADDED]):
            model(row)
    return largest


def range_of_real_tokens() -> str | None:
    """Calibrate on two sequences of different length in one batch."""
    model = _model()
    oneshot(model, recipe=_recipe(), dataset=[_IDS[0], _IDS[1, :_PADDED]], batch_size=2)
    found = model.model.layers[0].self_attn.q_scale.flatten()
    return None if torch.allclose(found, _largest() / 448, rtol=1e-5) else f"scales {found.tolist()} for {(_largest() / 448).tolist()}"


def reload() -> str | None:
    """Write the model and read it back."""
    model = _model()
    with tempfile.TemporaryDirectory(prefix="mutants-attention-") as folder:
        try:
            oneshot(model, recipe=_recipe(), dataset=list(_IDS), output_dir=Path(folder) / "out")
            again = load_compressed(Path(folder) / "out", device="cpu")
        except CompressorError as error:
            return str(error)
    return None if torch.equal(_logits(again), _logits(model)) else "what is read computes otherwise"


def _recipe() -> QuantizationModifier:
    groups: Any = {"attention": {"targets": ["LlamaAttention"], "input_activations": _FORMAT}}
    return QuantizationModifier(config_groups=groups)


_MUTANTS: Sequence[Mutant] = (
    bug("queries_stay", "runtime", "queries are shown and not exchanged", "as_compressed_tensors",
        Edit(_QUERIES + "_attend", "transform(query)", "(transform(query), query)[1]")),
    bug("queries_unseen", "runtime", "keys and values are quantized, queries never", "as_compressed_tensors",
        Edit(_KV + "_quantize_on_the_way", 'queries="q" in quantized_parts(attention)', "queries=False")),
    bug("scale_of_first_head", "runtime", "all heads of queries have the scale of the first", "as_compressed_tensors",
        Edit(_KV + "kv_qparams", 'QParams(getattr(attention, f"{part}_scale")',
             'QParams(getattr(attention, f"{part}_scale")[:1] if part == "q" else getattr(attention, f"{part}_scale")')),
    bug("padding_counts", "calibration", "ranges are those of padding, too", "range_of_real_tokens",
        Edit(_OBSERVING, "state.token_mask", "None")),
    bug("heads_in_turn", "calibration", "tokens of one head are taken for another's", "range_of_real_tokens",
        Edit(_OBSERVING, "tokens_NHD.reshape(len(tokens_NHD), states.shape[1], -1)",
             "tokens_NHD.reshape(len(tokens_NHD), -1, states.shape[1]).mT")),
    bug("queries_not_said", "writer", "config.json names keys and values only", "reload",
        Edit("compressor.model.checkpoints.format:config_of", "attention=sorted(queries)", "attention=[]")),
    bug("heads_of_keys", "reader", "the scales of queries have room for as many heads as keys have", "reload",
        Edit(_KV + "_empty_scales", "num_heads(attention, part, where)", 'num_heads(attention, "k", where)')),
)  # fmt: skip


def _killers(mutant: Mutant | None) -> Sequence[Killer]:
    del mutant
    return [Killer(look.__name__, look) for look in (as_compressed_tensors, range_of_real_tokens, reload)]


FAMILY = Family("attention", {mutant.name: mutant for mutant in _MUTANTS}, _killers)
