"""Sequential targets are the repeated layers of a model, and the reason is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor.errors import TargetError
from compressor.tracing import infer_targets, module_names, partition


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class OtherLayer(Layer):
    pass


def model_of(**lists: Any) -> nn.Module:
    model = nn.Module()
    for name, children in lists.items():
        setattr(model, name, children if isinstance(children, nn.Module) else nn.ModuleList(children))
    return model


def test_the_outermost_repeated_layers_are_the_targets() -> None:
    cut = infer_targets(model_of(embed=nn.Linear(2, 2), layers=[Layer(), Layer()]))
    assert list(cut.targets) == ["layers.0", "layers.1"] and cut.inferred
    assert cut.reason == "layers repeats Layer 2x"


def test_several_stacks_and_mixed_stacks_count() -> None:
    cut = infer_targets(model_of(encoder=[Layer(), Layer()], decoder=[Layer(), OtherLayer(), Layer()]))
    assert list(cut.targets) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.2"]
    assert cut.reason == "encoder repeats Layer 2x; decoder repeats Layer 2x and OtherLayer 1x"


def test_lists_in_lists_are_looked_into() -> None:
    cut = infer_targets(model_of(blocks=[nn.ModuleList([Layer(), Layer()]), nn.ModuleList([Layer(), Layer()])]))
    assert list(cut.targets) == ["blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"]


def test_a_sequential_of_layers_counts() -> None:
    assert list(infer_targets(nn.Sequential(Layer(), Layer())).targets) == ["0", "1"]


@pytest.mark.parametrize(
    "model",
    [
        model_of(heads=[nn.Linear(2, 2), nn.Linear(2, 2)]),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
        model_of(layers=[Layer()]).layers[0].linear,
        model_of(kinds=[Layer(), OtherLayer()]).kinds[0].linear,
    ],
)
def test_a_model_without_repeated_layers_is_one_target(model: nn.Module) -> None:
    cut = infer_targets(model)
    assert cut.targets == {"": model} and cut.reason.endswith("the whole model is calibrated at once")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("LlamaForCausalLM", ["model.layers.0", "model.layers.1"]),
        ("BertModel", ["encoder.layer.0", "encoder.layer.1"]),
        ("AlbertModel", [""]),
        ("T5ForConditionalGeneration", ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]),
        ("JambaForCausalLM", ["model.layers.0", "model.layers.1", "model.layers.2"]),
    ],
)
def test_layers_of_known_architectures_are_found(kind: str, expected: list[str]) -> None:
    import transformers

    model_class = getattr(transformers, kind)
    small = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 11, "num_hidden_layers": 2}
    if kind.startswith("T5"):
        small = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "num_layers": 2, "vocab_size": 11}
    if kind.startswith("Jamba"):
        small |= {"num_key_value_heads": 1, "num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}
    with torch.device("meta"):
        model = model_class(model_class.config_class(**small))
    assert list(infer_targets(model).targets) == expected


def test_named_targets_are_taken_at_their_word() -> None:
    model = model_of(layers=[Layer(), Layer()], head=nn.Linear(2, 2))
    cut = partition(model, ["re:head", "layers.1"])
    assert list(cut.targets) == ["layers.1", "head"] and not cut.inferred
    with pytest.raises(TargetError, match=r"sequential_targets .* matches no module"):
        partition(model, ["Layr"])
    with pytest.raises(TargetError, match=r"layers.0.linear lies inside layers.0"):
        partition(model, ["Layer", "Linear"])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_torchscript_among_the_layers_is_none_of_them() -> None:
    model = model_of(layers=[Layer(), torch.jit.script(nn.Sequential(nn.Linear(2, 2))), torch.jit.script(nn.GELU()), Layer()])
    assert list(infer_targets(model).targets) == ["layers.0", "layers.3"]
    with pytest.raises(TargetError, match=r"^sequential_targets: layers.1 is TorchScript, where no hook looks inside; name other modules$"):
        partition(model, ["re:layers[.][0-9]$"])


def test_names_inside_a_target_are_dotted_from_the_root() -> None:
    model = model_of(layers=[Layer(), Layer()])
    assert module_names(model, "layers.1")[:2] == ("layers.1", "layers.1.linear")
    assert module_names(model, "")[:2] == ("", "layers")
