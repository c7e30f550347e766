"""A module that stands in several places is stored once for each, and the config names them all: readers build each place anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from compressor import load_compressed, oneshot
from tests import tiny

PLACES: dict[str, Callable[[Any, Any], None]] = {
    "an mlp": lambda first, last: setattr(last, "mlp", first.mlp),
    "an attention": lambda first, last: setattr(last, "self_attn", first.self_attn),
    "a layer": lambda first, last: setattr(last.self_attn, "o_proj", first.self_attn.o_proj),
    "in a layer of another name": lambda first, last: setattr(last.self_attn, "o_proj", first.self_attn.q_proj),
}
_BYTES = {"num_bits": 8, "strategy": "channel"}
RECIPES: dict[str, dict[str, Any]] = {
    "turned in every forward": {"SpinQuantModifier": {"rotations": ["R4"]}},
    "turned on both sides": {"QuIPModifier": {"targets": ["re:.*(mlp|self_attn).*"]}},
    "named, not Linear": {"QuantizationModifier": {"config_groups": {"all": {"targets": ["re:.*layers.0.*"], "weights": _BYTES}}}},
    "ignored": {
        "QuantizationModifier": {"config_groups": {"all": {"targets": ["Linear"], "weights": _BYTES}}, "ignore": ["re:.*layers.0.*"]}
    },
    "of several schemes, with keys and values": {
        "QuantizationModifier": {
            "config_groups": {
                "some": {"targets": ["re:.*mlp.*"], "weights": _BYTES, "input_activations": {"num_bits": 8, "dynamic": False}},
                "others": {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 16}},
            },
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
        }
    },
}


def _model(place: str) -> PreTrainedModel:
    model = tiny.llama(num_hidden_layers=3, num_key_value_heads=4, use_cache=False)
    layers = model.model.layers  # type: ignore[union-attr]
    PLACES[place](layers[0], layers[2])  # type: ignore[index]
    return model


@pytest.mark.filterwarnings("ignore:transformers does not run this checkpoint:UserWarning")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_loads_computes_what_was_compressed(recipe: str, place: str, tmp_path: Path) -> None:
    model = _model(place)
    ids = torch.randint(tiny.VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(0))
    before = model(ids).logits
    oneshot(model, recipe={"modifiers": RECIPES[recipe]}, dataset=ids, output_dir=tmp_path / "out")
    with torch.no_grad():
        computed, loaded = model(ids).logits, load_compressed(tmp_path / "out")(ids).logits
    assert torch.equal(computed, loaded)
    assert not torch.equal(computed, before)


@pytest.mark.filterwarnings("ignore:transformers does not run this checkpoint:UserWarning")
def test_every_place_is_named(tmp_path: Path) -> None:
    oneshot(_model("an mlp"), recipe={"modifiers": RECIPES["turned in every forward"]}, output_dir=tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    entries = config["quantization_config"]["transform_config"]["config_groups"]["R4"]["apply"]
    assert [sorted(entry["targets"]) for entry in entries] == 2 * [[f"model.layers.{layer}.mlp.down_proj" for layer in range(3)]]
