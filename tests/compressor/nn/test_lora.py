"""LoRA of peft on a compressed model: adapters learn, codes stay byte for byte, and what has no room for them is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import LlamaForCausalLM

from compressor import load_compressed, oneshot
from compressor.errors import ModelError
from compressor.nn import for_compressed, set_matmul
from compressor.training import Trainer, TrainStep, adamw
from compressor.training_run.attention import causal_attention
from tests import tiny

IDS = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(1))
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21 asks for it
TARGETS = ["q_proj", "v_proj", "down_proj"]


def compressed(scheme: str, output_dir: Path | None = None, num_layers: int = 2) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(
        tiny.config("llama", hidden_size=128, intermediate_size=128, num_hidden_layers=num_layers, num_attention_heads=2),
        dtype=torch.bfloat16,
    ).eval()
    recipe = {"quant_modifiers": {"QuantizationModifier": {"scheme": scheme, "targets": ["Linear"], "ignore": ["lm_head"]}}}
    return oneshot(model, recipe=recipe, dataset=list(IDS), output_dir=output_dir).model


def adapted(model: Any) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(model, for_compressed(peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS)))


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(**batch).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["input_ids"][:, 1:].flatten())


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "FP8", "NVFP4"])
def test_adapters_learn_and_codes_stay(scheme: str, tmp_path: Path) -> None:
    model = compressed(scheme, tmp_path / "base")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with_adapters = adapted(model)
    trained = [parameter for parameter in with_adapters.parameters() if parameter.requires_grad]
    trainer = Trainer(TrainStep(with_adapters, loss_of, adamw(trained, lr=1e-2)))
    losses = [float(trainer.train_step({"input_ids": IDS})) for _ in range(4)]
    assert losses[3] < losses[2] < losses[1] < losses[0]
    assert len(trained) == 12 and all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in trained)
    with pytest.raises(ModelError, match=r"q_proj: adapters cannot be merged into codes; save them"):
        with_adapters.merge_and_unload()
    with pytest.raises(ModelError, match="adapters of peft are attached"):
        model.save_pretrained(tmp_path / "refused")
    with_adapters.save_pretrained(tmp_path / "adapters")
    logits = with_adapters.eval()(IDS).logits
    base = with_adapters.unload()
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())
    own = for_compressed(peft.PeftConfig.from_pretrained(tmp_path / "adapters"))
    again = peft.PeftModel.from_pretrained(load_compressed(tmp_path / "base"), tmp_path / "adapters", config=own)
    assert torch.equal(again(IDS).logits, logits) and not torch.equal(base(IDS).logits, logits)


@pytest.mark.nightly
def test_the_trainer_replays_steps_of_adapters_to_the_bit() -> None:
    ends = []
    for mode in ("eager", "replay"):
        model = compressed("W8A8", num_layers=1)
        with_adapters = adapted(model)
        model.config.use_cache = False
        attention = causal_attention(model, IDS[:1])
        trained = [parameter for parameter in with_adapters.parameters() if parameter.requires_grad]
        trainer = Trainer(TrainStep(with_adapters, loss_of, adamw(trained, lr=1e-2)), mode=mode)  # type: ignore[arg-type]
        with attention.applied(model):
            actions = [(float(trainer.train_step({"input_ids": IDS, **attention.arguments})), trainer.last_action)[1] for _ in range(6)]
        ends.append([parameter.detach().clone() for parameter in trained])
    assert actions[2:4] == ["capture", "prove"] and all(torch.equal(*pair) for pair in zip(*ends, strict=True))


@pytest.mark.parametrize("scheme", ["W8A8", "FP8_DYNAMIC"])
def test_products_of_codes_pass_the_gradient_of_the_values_on(scheme: str) -> None:
    gradients = []
    for matmul in ("reference", "native"):
        model = compressed(scheme)
        set_matmul(model, matmul)  # type: ignore[arg-type]
        layer = model.model.layers[0].mlp.up_proj
        layer.bias = torch.nn.Parameter(torch.ones(layer.out_features, dtype=torch.bfloat16))
        x = torch.randn(3, 128, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        layer(x).float().square().sum().backward()
        gradients.append((x.grad, layer.bias.grad))
    for of_reference, of_native in zip(*gradients, strict=True):
        assert bool(of_reference.any()) and torch.allclose(of_native, of_reference, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("setting", [{"use_dora": True}, {"init_lora_weights": "pissa"}])
def test_settings_that_need_float_weights_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=f"{next(iter(setting))}: .* needs the float weight of a layer"):
        for_compressed(peft.LoraConfig(**setting))


@pytest.mark.parametrize("word", ["all-linear", "All-Linear"])
def test_layers_that_peft_does_not_find_by_itself_have_to_be_named(word: str) -> None:
    with pytest.raises(ModelError, match=r"target_modules: .* would pass over quantized ones; give the last parts of their names"):
        for_compressed(peft.LoraConfig(target_modules=word))
    assert for_compressed(peft.LoraConfig(target_modules=r".*\.(q|v)_proj")).target_modules == r".*\.(q|v)_proj"


def test_a_compressed_model_generates_at_once() -> None:
    model = compressed("W8A8")
    made = model.generate(IDS[:2, :4], max_new_tokens=3, do_sample=False)
    assert made.shape == (2, 7) and torch.equal(made[:, :4], IDS[:2, :4])
