"""SpinQuant in a run: the model computes what it did, whatever it is saved as; with quantization behind, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    OPTForCausalLM,
    Qwen3MoeForCausalLM,
)

from compressor import GPTQModifier, MagnitudePruningModifier, QuantizationModifier, SmoothQuantModifier, SpinQuantModifier, oneshot
from compressor.errors import CalibrationError, CompressorError, ModelError, NumericsError, RecipeError, TargetError
from compressor.lifecycle import Event, Session, State
from compressor.mappings import turns
from compressor.model.loading.load import load_model
from compressor.model.loading.sample_batches import sample_batches
from compressor.recipe import load_recipe
from harness.traceability.architectures import zoo
from tests import tiny

IDS = torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(0))
GROUPS = {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 16}}}


def roughened(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    return model.eval()


def llama(**settings: Any) -> LlamaForCausalLM:
    return roughened(tiny.llama(**settings))  # type: ignore[no-any-return]


def opt() -> OPTForCausalLM:
    return roughened(tiny.opt(max_position_embeddings=32))  # type: ignore[no-any-return]


def moe() -> Qwen3MoeForCausalLM:
    return roughened(tiny.qwen3_moe())  # type: ignore[no-any-return]


MODELS = {"llama": llama, "tied llama": lambda: llama(tie_word_embeddings=True), "opt": opt, "moe": moe}


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits.double()
    return found


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / one.norm())


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"rotations": ["r1"]}, {"transform_type": "random-matrix", "randomize": True}, {"transform_block_size": 16, "randomize": True}],
    ids=["hadamard", "R1", "random", "blocks"],
)
def test_the_turned_model_computes_what_it_did_also_in_transformers(make: Any, settings: Any, tmp_path: Path) -> None:
    model = make()
    before = logits(model)
    changed = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "base")
    oneshot(str(tmp_path / "base"), recipe=SpinQuantModifier(**settings), output_dir=tmp_path / "out", device="cpu")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert difference(before, logits(again)) < 1e-5
    embedding = next(name for name in changed if "embed_tokens" in name)
    assert not torch.allclose(again.state_dict()[embedding], changed[embedding])


def test_bfloat16_loses_no_more_than_a_rounding_of_every_weight() -> None:
    model = llama()
    exact = logits(model)
    narrow = model.to(torch.bfloat16)
    rounded = logits(narrow)
    oneshot(narrow, recipe=SpinQuantModifier())
    assert difference(exact, logits(narrow)) < 2.5 * difference(exact, rounded)


def test_a_conv1d_is_turned_by_its_own_sides() -> None:
    model = roughened(tiny.gpt2(n_positions=32))
    before = logits(model)
    oneshot(model, recipe=SpinQuantModifier(rotations=["R1"]))
    assert difference(before, logits(model)) < 1e-5
    with pytest.raises(TargetError, match="R2: no linear layer gives the values of an attention alone"):
        oneshot(model, recipe=SpinQuantModifier(rotations=["R2"]))


def test_channels_that_stand_out_cost_rounding_less_when_they_are_turned() -> None:
    def outlying() -> LlamaForCausalLM:
        model = llama()
        with torch.no_grad():  # two channels of the hidden states are large, as in large models, and layers read them with small weights
            for name, parameter in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter[:2] *= 100
                elif parameter.dim() == 2 and "embed" not in name:
                    parameter[:, :2] /= 100
            model.model.embed_tokens.weight[:, :2] *= 100
        return model

    exact = logits(outlying())
    errors = []
    for recipe in ([], [SpinQuantModifier()]):
        model = outlying()
        oneshot(model, recipe=[*recipe, QuantizationModifier(scheme="W8A8", ignore=["lm_head"])], dataset=IDS)
        errors.append(difference(exact, logits(model)))
    assert errors[1] < 0.6 * errors[0], errors


@pytest.mark.parametrize("quantizer", [QuantizationModifier, GPTQModifier])
def test_quantization_behind_it_stores_the_turned_weights(quantizer: Any, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    recipe = [SmoothQuantModifier(), SpinQuantModifier(), quantizer(config_groups=GROUPS, ignore=["lm_head"])]
    result = oneshot(str(tmp_path / "base"), recipe=recipe, dataset=IDS, output_dir=tmp_path / "out", device="cpu")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert difference(logits(result.model), logits(read)) < 1e-5
    assert [entry["kind"] for entry in result.report.transforms][-1] == "rotations"
    norms = {name: tensor for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items() if "norm" in name}
    assert all(bool((tensor == 1).all()) for tensor in norms.values())


def test_rotations_of_other_sides_may_come_one_after_the_other() -> None:
    model, base = llama(), llama()
    oneshot(model, recipe=[SpinQuantModifier(rotations=[one]) for one in ("R2", "R1", "R4")])
    assert difference(logits(model), logits(base)) < 1e-5


def test_equal_runs_give_equal_bytes_and_seeds_other_ones(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    recipe = SpinQuantModifier(transform_type="random-hadamard")
    found = []
    for number, seed in enumerate((1, 1, 2)):
        out = tmp_path / str(number)
        oneshot(str(tmp_path / "base"), recipe=recipe.model_copy(deep=True), seed=seed, output_dir=out, device="cpu")
        found.append(((out / "model.safetensors").read_bytes(), (out / "compression.json").read_bytes()))
    assert found[0] == found[1] and found[0][0] != found[2][0]


@pytest.mark.parametrize(
    ("recipe", "error", "why"),
    [
        ([SpinQuantModifier(transform_block_size=24)], RecipeError, "transform_block_size=24 does not divide the 32 channels"),
        ([QuantizationModifier(scheme="W8A8", ignore=["lm_head"]), SpinQuantModifier()], RecipeError, "let it stand before those"),
        (
            [MagnitudePruningModifier(final_sparsity=0.5, targets=["Linear"]), SpinQuantModifier()],
            RecipeError,
            "which a rotation would fill",
        ),
        (
            [SpinQuantModifier(rotations=["R1"]), SpinQuantModifier(rotations=["R1", "R2"])],
            TargetError,
            r"SpinQuantModifier\[1\]: what model.embed_tokens gives is turned by an earlier modifier already",
        ),
        (
            [SpinQuantModifier(rotations=["R2"]), SpinQuantModifier(rotations=["R2"])],
            TargetError,
            r"what model.layers.0.self_attn.v_proj gives is turned by an earlier modifier already",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_and_the_model_is_as_it_was(recipe: Any, error: type[CompressorError], why: str) -> None:
    model = llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(error, match=why):
        oneshot(model, recipe=recipe)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"rotations": []}, "names none"),
        ({"rotations": ["R1", "r1"]}, r"'R1' stands twice in \['R1', 'r1'\]"),
        ({"rotations": ["R3"]}, "R3 would be computed inside attention"),
        ({"rotations": ["R5"]}, "rotations"),
        ({"transform_type": "fourier"}, "transform_type"),
        ({"transform_block_size": 1}, "transform_block_size"),
        ({"precision": "float32"}, "turned in float64"),
        ({"transform_config": {"config_groups": {}}}, "transform_config"),
        ({"mappings": {"attn_x": "lm_head"}}, "'attn_x' is no role; choose from embedding"),
        ({"mappings": []}, "mappings: .* is none"),
        ({"norm_mappings": [{"norm": "model.norm"}]}, "norm_mappings: .* is none"),
        ({"rotations": ["R2"], "transform_block_size": 2}, "R1 and R4 turn runs of channels, and rotations names neither; leave it out"),
        ({"rotations": ["R2"], "norm_mappings": [{"norm": "a", "linears": "b"}]}, "they are for R1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: Any, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        SpinQuantModifier(**settings)


class _Plain(nn.Module):
    """No model of transformers: it has no config."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norms = nn.Embedding(64, 32), nn.ModuleList(nn.RMSNorm(32) for _ in range(2))
        self.up, self.down, self.head = nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False), nn.Linear(32, 64, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        del attention_mask
        hidden = self.embed(input_ids)
        hidden = hidden + self.down(self.up(self.norms[0](hidden)).relu())
        return self.head(self.norms[1](hidden))  # type: ignore[no-any-return]


def test_a_module_without_a_config_is_turned_by_the_data() -> None:
    tokens = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(0))
    with pytest.raises(ModelError, match="_Plain has no config to make a batch from; give a dataset and pipeline='basic'"):
        oneshot(_Plain(), recipe=SpinQuantModifier(rotations=["R1"]), dataset=tokens)
    result = oneshot(_Plain(), recipe=SpinQuantModifier(rotations=["R1"]), dataset=tokens, pipeline="basic")
    assert not torch.equal(result.model.up.weight, _Plain().up.weight)
    assert torch.allclose(result.model(tokens), _Plain()(tokens), atol=1e-4)


def test_a_norm_behind_the_sum_is_named() -> None:
    model = tiny.gemma2()
    with pytest.raises(TargetError, match=r"R1: model.layers.0.post_attention_layernorm adds .* leave R1 out"):
        oneshot(model, recipe=SpinQuantModifier())


def test_weights_that_compute_something_else_are_noticed_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    monkeypatch.setattr(turns, "_turned_output", lambda module, weight_RK, rotation: rotation.turn(weight_RK.T, back=True).T)
    with pytest.raises(NumericsError, match=r"outputs are .* off, relative, more than rounding"):
        oneshot(model, recipe=SpinQuantModifier(transform_type="random-hadamard"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_recipe_of_llm_compressor_is_read_and_written() -> None:
    text = "quant_stage: {quant_modifiers: {SpinQuantModifier: {rotations: [R1, R2], transform_block_size: 16, transform_type: hadamard}}}"
    modifier = load_recipe(text).modifiers[0]
    assert isinstance(modifier, SpinQuantModifier) and modifier.transform_block_size == 16
    assert load_recipe(load_recipe(text).dump()) == load_recipe(text)


def test_a_folder_of_bfloat16_stays_one(tmp_path: Path) -> None:
    llama().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    oneshot(str(tmp_path / "base"), recipe=SpinQuantModifier(), output_dir=tmp_path / "out", device="cpu")
    assert load_model(tmp_path / "out", device="cpu").model.dtype is torch.bfloat16


def test_a_run_without_calibration_does_not_pass_for_a_turned_one() -> None:
    session = Session(State(model=llama()), [SpinQuantModifier()])
    session.initialize()
    with pytest.RaisesGroup(pytest.RaisesExc(CalibrationError, match="nothing was turned")):
        session.finalize()


@pytest.mark.nightly
def test_a_resumed_run_turns_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama().save_pretrained(tmp_path / "base")
    whole = GPTQModifier.on_sequential_epoch_end
    seen: list[int] = []

    def stops(self: GPTQModifier, state: State, event: Event) -> None:
        seen.append(1)
        if len(seen) == 2:
            raise KeyboardInterrupt
        whole(self, state, event)

    def run(out: Path, **settings: Any) -> None:
        recipe = [SpinQuantModifier(transform_type="random-hadamard"), GPTQModifier(config_groups=GROUPS, ignore=["lm_head"])]
        oneshot(str(tmp_path / "base"), recipe=recipe, dataset=IDS, output_dir=out, device="cpu", **settings)

    run(tmp_path / "straight")
    monkeypatch.setattr(GPTQModifier, "on_sequential_epoch_end", stops)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped")
    monkeypatch.setattr(GPTQModifier, "on_sequential_epoch_end", whole)
    run(tmp_path / "stopped", resume=True)
    for name in ("model.safetensors", "compression.json"):
        assert (tmp_path / "straight" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes()


ROLES: dict[str, Any] = {
    "embedding": "re:.*embed_tokens$",
    "attn": "re:.*self_attn$",
    "attn_q": "re:.*q_proj$",
    "attn_k": "re:.*k_proj$",
    "attn_v": "re:.*v_proj$",
    "attn_o": "re:.*o_proj$",
    "mlp_in": ["re:.*up_proj$", "re:.*gate_proj$"],
    "mlp_out": "re:.*down_proj$",
    "lm_head": "lm_head",
}
NORMS = [{"norm": "re:.*input_layernorm$", "linears": ["re:.*q_proj$", "re:.*v_proj$"]}, {"norm": "model.norm", "linears": "lm_head"}]


def test_written_roles_are_held_against_a_forward() -> None:
    model = llama()
    before = logits(model)
    notes = oneshot(model, recipe=SpinQuantModifier(mappings={**ROLES, "attn_head_dim": 8}, norm_mappings=NORMS)).report.notes
    assert difference(before, logits(model)) < 1e-5 and len(notes) == 1
    fewer = {role: ROLES[role] for role in ("embedding", "attn_o", "attn_q")}
    model = llama()
    notes = oneshot(model, recipe=SpinQuantModifier(mappings=fewer)).report.notes
    assert difference(before, logits(model)) < 1e-5
    assert "model.layers.0.mlp.down_proj, model.layers.1.mlp.down_proj write hidden states, too" in notes[0]
    assert "read hidden states, too" in notes[1]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"mappings": {**ROLES, "attn_o": "re:.*v_proj$"}}, "attn_o: .*v_proj.*: no forward shows that it writes hidden states"),
        ({"mappings": {**ROLES, "mlp_in": "re:.*down_proj$"}}, "mlp_in: .*down_proj.*: no forward shows that it reads hidden states"),
        ({"mappings": {**ROLES, "lm_head": "re:.*head2$"}}, "matches no module"),
        ({"mappings": {**ROLES, "attn_head_dim": 16}}, "attn_head_dim=16, but model.layers.0.self_attn.v_proj has heads of 8"),
        ({"norm_mappings": [{"norm": "model.norm", "linears": ["re:.*q_proj$"]}]}, "no forward shows that it reads model.norm"),
        ({"norm_mappings": [{"norm": "lm_head", "linears": ["lm_head"]}]}, "no forward shows that it is a norm of hidden states"),
    ],
)
def test_a_role_that_no_forward_shows_is_an_error(settings: Any, why: str) -> None:
    model = llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(TargetError, match=why):
        oneshot(model, recipe=SpinQuantModifier(**settings))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("data", ["none", "text"])
@pytest.mark.parametrize(("name", "is_right"), [("qwen2_5_vl", False), ("llava", False), ("qwen3_vl", True)])
def test_what_writes_features_of_images_turns_too_or_nothing_does(name: str, is_right: bool, data: str) -> None:
    """A merger of images that is not turned changes no text: on text alone the model had passed for right."""
    model, base = (roughened(zoo()[name].build(0)).float() for _ in range(2))
    image = sample_batches(base, "vision").batches[0]
    given = {"dataset": IDS, "pipeline": "basic"} if data == "text" else {}
    if not is_right:
        with pytest.raises(TargetError, match=r"R1: .* adds to|meet|on vision that the config allows the model gives other outputs"):
            oneshot(model, recipe=SpinQuantModifier(rotations=["R1"]), **given)
    else:
        oneshot(model, recipe=SpinQuantModifier(rotations=["R1"]), **given)
    with torch.no_grad():
        before, after = (one(**image).logits.double() for one in (base, model))
    assert difference(before, after) < 1e-4
