"""Rotations in the forward, R4 of SpinQuant and QuIP: what the model computes, what a checkpoint holds, who reads it, what is refused."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import transformers
from compressed_tensors.transform import TransformConfig, apply_transform_config
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from compressor import (
    AWQModifier,
    GPTQModifier,
    QuantizationModifier,
    QuIPModifier,
    SmoothQuantModifier,
    SpinQuantModifier,
    load_compressed,
    oneshot,
    train,
)
from compressor.algorithms.rotations import Rotation, make_rotation, rotation_of
from compressor.data.collate import call_model
from compressor.errors import CompressorError, ModelError, NumericsError, RecipeError, TargetError
from compressor.lifecycle import Event, EventType, Session, State
from compressor.mappings import find_pairs
from compressor.mappings.inner import find_inner
from compressor.model.checkpoints import online
from compressor.model.experts.unfuse import unfused_experts
from compressor.model.loading.sample_batches import sample_batches
from compressor.nn.experts import Expert
from compressor.nn.online_rotation import OnlineRotation, rotated_modules
from compressor.recipe import load_recipe
from harness.traceability.architectures import zoo
from tests import tiny
from tests.compressor.mappings.test_residual_basis import roughened
from tests.compressor.modifiers.transforms.test_spinquant import GROUPS, IDS, MODELS, difference, llama, logits, moe

R4 = SpinQuantModifier(rotations=["R4"])
QUIP = QuIPModifier(rotations=["v", "u"], transform_type="hadamard")
QUANTIZERS = {
    "floats": [],
    "weights": [GPTQModifier(config_groups=GROUPS, ignore=["lm_head"])],
    "inputs": [QuantizationModifier(scheme="W8A8", ignore=["lm_head"])],
}
RECIPES = {
    "R4": R4,
    "all": SpinQuantModifier(rotations=["R1", "R2", "R4"], transform_type="random-hadamard"),
    "blocks": SpinQuantModifier(rotations=["R4"], transform_type="random-matrix", transform_block_size=8),
    "QuIP": QuIPModifier(rotations=["u", "v"]),
    "QuIP in blocks": QuIPModifier(rotations=["v", "u"], transform_type="random-matrix", transform_block_size=8),
}


def run(base: Path, out: Path, *recipe: Any, **settings: Any) -> Any:
    recipe = tuple(one.model_copy(deep=True) for one in recipe)
    return oneshot(str(base), recipe=list(recipe), dataset=IDS, output_dir=out, device="cpu", **settings)


@pytest.mark.filterwarnings("ignore:transformers 5.23 will not load these experts:UserWarning")
@pytest.mark.parametrize("quantizers", QUANTIZERS.values(), ids=QUANTIZERS)
@pytest.mark.parametrize(
    ("kind", "what"), [("llama", "all"), ("llama", "blocks"), ("opt", "R4"), ("opt", "QuIP"), ("moe", "R4"), ("moe", "QuIP")]
)
def test_our_reader_computes_what_the_model_in_memory_does(kind: str, what: str, quantizers: Any, tmp_path: Path) -> None:
    model = MODELS[kind]()
    before = logits(model)
    model.save_pretrained(tmp_path / "base")
    made = run(tmp_path / "base", tmp_path / "out", RECIPES[what], *quantizers).model
    again = load_compressed(tmp_path / "out", device="cpu")
    assert torch.equal(logits(made), logits(again))
    assert rotated_modules(made).keys() == rotated_modules(again).keys()
    assert difference(before, logits(made)) < (0.06 if quantizers else 1e-5)


@pytest.mark.parametrize("modifier", [R4, QUIP], ids=["R4", "QuIP"])
def test_compressed_tensors_makes_of_the_base_what_the_checkpoint_holds(modifier: Any, tmp_path: Path) -> None:
    model = llama()
    before = logits(model)
    model.save_pretrained(tmp_path / "base")
    run(tmp_path / "base", tmp_path / "out", modifier)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["transform_config"]
    apply_transform_config(model, TransformConfig.model_validate(config))
    assert difference(before, logits(model)) < 1e-5
    theirs = model.state_dict()
    matrices = {name for name in stored if name.endswith(("_input.weight", "_output.weight"))}
    assert len(matrices) == (1 if modifier is R4 else 5)  # one for all modules of a size
    for name, tensor in stored.items():
        assert torch.allclose(tensor, theirs[name].to(tensor.dtype), atol=1e-6), name


def test_a_checkpoint_that_names_patterns_and_shares_matrices_is_read(tmp_path: Path) -> None:
    """As llm-compressor writes it: `re:` and `Linear` with `ignore`, float64, the matrix with whichever module came first."""
    llama().save_pretrained(tmp_path / "base")
    made = run(tmp_path / "base", tmp_path / "out", QuIPModifier(), *QUANTIZERS["weights"]).model
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    group = config["quantization_config"]["transform_config"]["config_groups"]["v"]
    for entry in group["apply"]:
        entry.update(targets=["Linear"], ignore=["lm_head"])
    group.update(precision="torch.float64")
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    first = tensors.pop("model.layers.0.self_attn.q_proj.v_input.weight")
    tensors["model.layers.1.mlp.gate_proj.v_input.weight"] = first.double()
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(made), logits(load_compressed(tmp_path / "out", device="cpu")))


@pytest.mark.parametrize("modifier", [RECIPES["blocks"], RECIPES["QuIP in blocks"], R4], ids=["R4", "QuIP", "Hadamard"])
def test_a_float64_model_keeps_all_digits_of_its_matrices(modifier: Any, tmp_path: Path) -> None:
    llama().double().save_pretrained(tmp_path / "base")
    made = run(tmp_path / "base", tmp_path / "out", modifier, *QUANTIZERS["weights"]).model
    assert torch.equal(logits(made), logits(load_compressed(tmp_path / "out", device="cpu")))


@pytest.mark.parametrize("quantizers", [QUANTIZERS["floats"], QUANTIZERS["weights"]], ids=["floats", "weights"])
def test_transformers_does_not_apply_the_rotation_and_the_run_says_so(quantizers: Any, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    result = run(tmp_path / "base", tmp_path / "out", R4, *quantizers)
    assert "transformers applies no transform_config" in result.report.notes[-1]
    if not quantizers:
        with pytest.warns(UserWarning, match="transformers applies no transform_config"):
            train(result.model, dataset=IDS, steps=1, batch_size=2, max_seq_length=16, output_dir=tmp_path / "trained")
        later = oneshot(result.model, recipe=QuantizationModifier(config_groups=GROUPS, ignore=["lm_head"]))
        assert any("transformers applies no transform_config" in note for note in later.report.notes), later.report.notes
    if not quantizers and Version(transformers.__version__) < Version("5.23"):
        with pytest.raises(AttributeError, match="config_groups"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        return
    there = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert difference(logits(result.model), logits(there)) > 0.05  # where this fails it has learned to: take the note away


@pytest.mark.parametrize("modifier", [R4, QUIP], ids=["R4", "QuIP"])
def test_a_model_that_turns_in_every_forward_is_trained_by_replay_as_without(modifier: Any) -> None:
    losses = []
    for mode in ("replay", "eager"):
        model = oneshot(llama(), recipe=modifier.model_copy(deep=True), dataset=IDS).model
        losses.append(train(model, dataset=IDS, steps=6, batch_size=2, max_seq_length=16, mode=mode).losses)
    assert losses[0] == losses[1]


def test_layers_share_what_is_turned_unless_it_was_written_to_in_between() -> None:
    first, second, third = (nn.Linear(8, 8, bias=False) for _ in range(3))
    turned: list[Tensor] = []
    rotation = OnlineRotation("v", "input", make_rotation("hadamard", 8, seed=0), back=False)
    for layer in (first, second, third):
        rotation.attach(layer)
        layer.register_forward_pre_hook(lambda module, args: turned.append(args[0]))
    for _ in range(2):
        x = torch.randn(2, 8)
        with torch.no_grad():
            outputs = [first(x)]
            x.data[:, ::2] *= 3.0
            outputs += [second(x), third(x)]
        assert not torch.equal(turned[-3], turned[-2]) and turned[-2] is turned[-1]
        assert torch.equal(turned[-1], rotation.turn(x)) and torch.equal(outputs[-1], turned[-1] @ third.weight.T)


def test_what_is_saved_again_is_the_same(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    run(tmp_path / "base", tmp_path / "out", RECIPES["all"], *QUANTIZERS["weights"])
    with pytest.warns(UserWarning, match="R4 turn in every forward"):
        load_compressed(tmp_path / "out", device="cpu").save_pretrained(tmp_path / "again")
    for name in ("model.safetensors", "config.json", "compression.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name
    with pytest.raises(CompressorError, match="float weights cannot say so"):
        load_compressed(tmp_path / "out", device="cpu").save_pretrained(tmp_path / "floats", save_compressed=False)


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_matrices_of_modules_that_files_name_otherwise_are_written_and_read(name: str, tmp_path: Path) -> None:
    """transformers renames what it saves: a matrix under the name that files have had been renamed twice."""
    model, ignore = zoo()[name].build(0), ["re:.*lm_head"]
    groups = {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}}
    recipe = [QuIPModifier(rotations=["u"], ignore=ignore), QuantizationModifier(config_groups=groups, ignore=ignore)]
    oneshot(model, recipe=recipe, output_dir=tmp_path / "out")
    read = load_compressed(tmp_path / "out", model_class=type(model).__name__, device="cpu")
    batch = sample_batches(model, "vision").batches[0]
    with torch.no_grad():
        assert torch.equal(read(**batch).logits, model(**batch).logits)


def test_the_end_of_an_mlp_is_found_where_the_first_token_is_zero_everywhere() -> None:
    model = llama()
    with torch.no_grad():
        model.get_input_embeddings().weight[int(IDS[0, 0])] = 0.0  # as the row of a padding token is
    found = find_inner(model, {"input_ids": IDS}, torch.device("cpu"))
    assert found == tuple(f"model.layers.{index}.mlp.down_proj" for index in range(model.config.num_hidden_layers))


@pytest.mark.nightly
@pytest.mark.parametrize("modifier", [RECIPES["all"], RECIPES["QuIP"]], ids=["R4", "QuIP"])
def test_a_resumed_run_turns_alike(modifier: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama().save_pretrained(tmp_path / "base")
    whole = GPTQModifier.on_sequential_epoch_end
    seen: list[int] = []

    def stops(self: GPTQModifier, state: State, event: Event) -> None:
        seen.append(1)
        if len(seen) == 2:
            raise KeyboardInterrupt
        whole(self, state, event)

    run(tmp_path / "base", tmp_path / "straight", modifier, *QUANTIZERS["weights"])
    monkeypatch.setattr(GPTQModifier, "on_sequential_epoch_end", stops)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "base", tmp_path / "stopped", modifier, *QUANTIZERS["weights"])
    monkeypatch.setattr(GPTQModifier, "on_sequential_epoch_end", whole)
    run(tmp_path / "base", tmp_path / "stopped", modifier, *QUANTIZERS["weights"], resume=True)
    for name in ("model.safetensors", "compression.json"):
        assert (tmp_path / "straight" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes()


NO_MLP, NO_FLOAT64 = "no linear layer reads what another one gives channel by channel", "cannot run a text batch"
WITHOUT_R4 = {**dict.fromkeys(("bitnet", "dbrx", "falcon_mamba", "jetmoe", "mamba", "mamba2"), NO_MLP), "xglm": NO_FLOAT64}
WITHOUT_QUIP = {
    **dict.fromkeys(("gpt2", "openai_gpt"), "leaves none of the 1 modules that targets 'Linear' match"),  # theirs are Conv1D
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba"), "dt_proj is read past its layer"),
    **dict.fromkeys(("xlnet", "zamba", "zamba2"), "is tied to"),
    **dict.fromkeys(("llama4", "phimoe"), "Router gives a tuple"),
    "xglm": NO_FLOAT64,
}


@pytest.mark.parametrize("part", range(8))
def test_decoders_of_the_zoo_compute_the_same_in_float64_or_are_refused(part: int) -> None:
    refused: dict[str, str] = {}
    for number, (name, entry) in enumerate(zoo().items()):
        if number % 8 != part or not type(entry.build(0)).__name__.endswith(("ForCausalLM", "LMHeadModel")):
            continue
        for without, modifier in (
            (WITHOUT_R4, SpinQuantModifier(rotations=["R4"], transform_type="random-matrix")),
            (WITHOUT_QUIP, QuIPModifier(rotations=["v", "u"], transform_type="random-matrix", ignore=["re:.*(lm_head|embed_out)$"])),
        ):
            model = roughened(entry.build(0)).double()
            try:
                off = turned_and_taken_back(model, modifier)
            except CompressorError as error:
                refused[name] = str(error)
                assert without.get(name, "no reason is known") in refused[name], name
            else:
                assert name not in without and off < 1e-10, name


def turned_and_taken_back(model: nn.Module, modifier: Any) -> float:
    """How far the logits move while the model is turned; afterwards it is as it was, hooks and all."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # others multiply no float64
    with torch.no_grad(), unfused_experts(model, hold=True) as experts:
        batch = sample_batches(model, None).batches[0]
        before, weights = call_model(model, batch).logits, {name: one.clone() for name, one in model.named_parameters()}
        session = Session(State(model, keep_originals=True), [modifier])
        session.initialize()
        session.send(EventType.CALIBRATION_START)
        after = call_model(model, batch).logits
        turned = {f"{name}.weight" for name in rotated_modules(model)}
        assert turned and turned == {
            name for name, one in model.named_parameters() if one.dim() == 2 and not torch.equal(one, weights[name])
        }
        session.abort()
        assert not rotated_modules(model) and torch.equal(before, call_model(model, batch).logits)
        experts.restore()
    return float((after - before).norm() / before.norm())


def test_an_expert_that_nobody_watches_turns_too() -> None:
    model = moe()
    with unfused_experts(model, hold=True):
        expert = next(module for module in model.modules() if isinstance(module, Expert))
        OnlineRotation("R4", "input", make_rotation("hadamard", 16), back=False).attach(expert.get_submodule("down_proj"))
        OnlineRotation("u", "output", make_rotation("hadamard", 16), back=True).attach(expert.get_submodule("up_proj"))
        assert not expert.is_watched
        x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
        assert torch.equal(expert.compute(x, with_hooks=False), expert(x))
        expert.get_submodule("up_proj").register_forward_hook(lambda module, args, output: None)
        assert expert.is_watched


def test_layers_that_read_one_tensor_are_handed_one_and_any_other_is_turned_anew() -> None:
    layers, handed, x = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)]), [], torch.randn(3, 8)
    hook = OnlineRotation("v", "input", make_rotation("hadamard", 8), back=False)
    for layer in layers:
        hook.attach(layer)
        layer.register_forward_pre_hook(lambda module, args: handed.append(args[0]))

    def all_read(*inputs: Tensor) -> bool:
        handed.clear()
        for layer, one in zip(layers, inputs, strict=True):
            layer(one)
            assert torch.equal(handed[-1], hook.turn(one))
        return handed[0] is handed[1]

    assert not all_read(x, x)  # one gradient each
    with torch.no_grad():
        assert all_read(x, x) and all_read(x, x) and not all_read(x, x.clone())
        for written in (x, handed[-1]):
            layers[0](x)
            written.mul_(2)
            all_read(x, x)
        assert copy.deepcopy(layers)[0](x).equal(layers[0](x))
        pickle.dumps(hook)
        kept = ref(handed[-1])
        handed.clear()
        del x, written
        assert kept() is None
    with torch.inference_mode():  # where nobody counts what is written
        one = torch.ones(2, 8)
        assert not all_read(one, one)


@pytest.mark.parametrize("size", [1, 12, 64, 96])
def test_a_matrix_is_taken_for_its_factors_where_it_is_one_of_ours(size: int) -> None:
    for kind in ("hadamard", "random-hadamard"):
        made = make_rotation(kind, size, seed=3)
        matrix = (made.matrix() * size**0.5).round()
        found = rotation_of(matrix)
        assert list(map(len, found.factors)) == list(map(len, made.factors)) and torch.equal(found.matrix(), made.matrix())
        assert found.signs_B is None or kind == "random-hadamard"
        other = matrix[torch.randperm(size, generator=torch.Generator().manual_seed(1))]
        assert torch.allclose(rotation_of(other).matrix(), other / size**0.5)


def _v(part: str) -> QuIPModifier:
    return QuIPModifier(targets=[f"re:.*{part}"])


def _u(part: str) -> QuIPModifier:
    return QuIPModifier(targets=[f"re:.*{part}"], rotations=["u"])


R1, R2 = (SpinQuantModifier(rotations=[name]) for name in ("R1", "R2"))


def test_no_scale_of_rows_that_are_turned_moves() -> None:
    model = llama()
    oneshot(model, recipe=[_u("mlp.up_proj")])
    found = find_pairs(model, {"input_ids": IDS}, torch.device("cpu"))
    assert "is turned in every forward already (u;" in found.why_not["model.layers.0.mlp.up_proj"]
    assert "model.layers.0.self_attn.v_proj" in found.by_source


@pytest.mark.parametrize("layer", [0, 1])
def test_a_rotation_of_one_layer_stops_the_scales_of_that_layer_alone(layer: int) -> None:
    model = llama()
    oneshot(model, recipe=[_v(f"layers.{layer}.*_proj")])
    found = find_pairs(model, {"input_ids": IDS}, torch.device("cpu"))
    other = f"model.layers.{1 - layer}."
    parts = ["input_layernorm", "self_attn.v_proj", "post_attention_layernorm", "mlp.up_proj"]
    assert {pair.source for pair in found.pairs} == {*(other + part for part in parts), "model.norm"}
    assert all("is turned in every forward already (v;" in found.why_not[f"model.layers.{layer}.{part}"] for part in parts)
    assert "turned" not in found.why_not[f"{other}self_attn.q_proj"]


@pytest.mark.parametrize(
    ("recipe", "note"),
    [
        ([R4, AWQModifier(), *QUANTIZERS["weights"]], r"AWQModifier\[1\]: no scale of .*mlp.up_proj.* moves \(.*down_proj .*\(R4; put"),
        ([_v("layers.0.*_proj"), SmoothQuantModifier()], r"no scale of model.layers.0.input_layernorm, .* moves \(.*\(v; put"),
        ([_v("layers.0.*o_proj"), R2], r"R2 leaves out model.layers.0.self_attn.v_proj \(model.layers.0.self_attn.v_proj: it meets"),
        ([R4, SmoothQuantModifier()], None),  # which moves no scale of what R4 turns
    ],
)
def test_what_rotations_in_the_forward_keep_others_from_is_noted(recipe: Any, note: str | None) -> None:
    notes = oneshot(llama(), recipe=[one.model_copy(deep=True) for one in recipe], dataset=IDS).report.notes
    said = [one for one in notes if "is turned in every forward already" in one]
    assert len(said) == (0 if note is None else 1) and all(re.search(str(note), one) for one in said)


@pytest.mark.parametrize(
    ("recipe", "error", "why"),
    [
        ([SpinQuantModifier(rotations=["R4"], transform_block_size=24)], RecipeError, "transform_block_size=24 does not divide the 64"),
        ([QuIPModifier(transform_block_size=64)], RecipeError, "transform_block_size=64 does not divide the 32 channels of"),
        ([R4, QuIPModifier(targets=["re:.*mlp.*"])], TargetError, "input of model.layers.0.mlp.down_proj is turned by R4 already"),
        ([R4, R4], TargetError, "input of model.layers.0.mlp.down_proj is turned by R4 already"),
        (
            [_v("mlp"), R1],
            TargetError,
            r"it meets model.layers.0.mlp.gate_proj .*, whose input is turned in every forward already",
        ),
        ([_v("o_proj"), R2], TargetError, r"it meets model.layers.0.self_attn.o_proj .*, whose input is turned in every forward already"),
        (
            [_u("down_proj"), R1],
            TargetError,
            r"R1: model.layers.0.mlp.down_proj, which adds to .*, is a layer whose output is turned",
        ),
        (
            [_u("v_proj"), R2],
            TargetError,
            r"of model.layers.0.self_attn.v_proj none moves, for it is a layer whose output is turned",
        ),
        ([QuIPModifier(targets=["re:.*embed_tokens"])], TargetError, "is no linear layer"),
        ([*QUANTIZERS["inputs"], QUIP], RecipeError, "let it stand before those that quantize"),
    ],
)
def test_what_cannot_be_done_is_refused_and_the_model_is_as_it_was(recipe: Any, error: type[CompressorError], why: str) -> None:
    model = llama()
    before = logits(model)
    with pytest.raises(error, match=why):
        oneshot(model, recipe=[one.model_copy(deep=True) for one in recipe])
    assert torch.equal(logits(model), before) and not rotated_modules(model)


@pytest.mark.parametrize("rotations", [["v"], ["u"]])
def test_a_weight_that_is_read_past_its_layer_is_named_however_little_it_counts(rotations: list[str]) -> None:
    """Mamba multiplies by the weight of the time step itself; turned on one side alone it changes the logits by 1e-4 only."""
    model = zoo()["mamba"].build(0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(TargetError, match=r"the weight of \S+dt_proj, \S+dt_proj is read past its layer"):
        oneshot(model, recipe={"QuIPModifier": {"rotations": rotations, "targets": ["re:.*(dt|in|out)_proj$"]}}, dataset=IDS)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("sizes", "modifier", "advice"),
    [
        ({"hidden_size": 36, "num_attention_heads": 6}, SpinQuantModifier(rotations=["R2"]), {}),
        ({"hidden_size": 36, "num_attention_heads": 6}, SpinQuantModifier(rotations=["R1", "R2"], transform_block_size=2), {}),
        ({"hidden_size": 18, "num_attention_heads": 9}, SpinQuantModifier(rotations=["R1"]), {"transform_block_size": 2}),
        ({"intermediate_size": 48}, SpinQuantModifier(rotations=["R4"], transform_block_size=3), {"transform_block_size": 48}),
        ({"intermediate_size": 35}, SpinQuantModifier(rotations=["R4"]), {}),
        ({"intermediate_size": 50}, QuIPModifier(rotations=["v", "u"], transform_type="hadamard"), {"transform_block_size": 2}),
    ],
)
def test_what_is_advised_where_there_is_no_hadamard_matrix_helps(sizes: Any, modifier: Any, advice: Any) -> None:
    heads = sizes.get("num_attention_heads", 4)
    config = tiny.config("llama", **sizes | {"num_key_value_heads": heads, "num_hidden_layers": 1})
    with pytest.raises(RecipeError, match=r"no Hadamard matrix of size \d+ can") as told:
        oneshot(LlamaForCausalLM(config), recipe=modifier.model_copy(deep=True))
    given = "".join(f"{key}: {value}, or " for key, value in advice.items())
    assert str(told.value).endswith(f"; give {given}transform_type: random-matrix")
    for way in ({"transform_type": "random-matrix"}, *([advice] if advice else [])):
        oneshot(LlamaForCausalLM(config), recipe=modifier.model_copy(update=way, deep=True))


def test_a_tied_head_is_refused_and_a_model_that_is_none_of_transformers() -> None:
    with pytest.raises(TargetError, match=r"lm_head is tied to model.embed_tokens.*; ignore it"):
        oneshot(MODELS["tied llama"](), recipe=QuIPModifier(ignore=[]))
    with pytest.raises(TargetError, match="Sequential is no model of transformers"):
        oneshot(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), recipe=QuIPModifier())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"rotations": []}, "rotations"),
        ({"rotations": ["w"]}, "rotations"),
        ({"randomize": True}, "share one rotation"),
        ({"learnable": True}, "drawn, not learned"),
        ({"precision": "float32"}, "turned in float64"),
        ({"transform_config": {}}, "transform_config"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: Any, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        QuIPModifier(**settings)


def test_a_recipe_of_llm_compressor_is_read_and_written() -> None:
    text = "quant_stage: {quant_modifiers: {QuIPModifier: {rotations: [V, u], transform_block_size: 16, ignore: lm_head, targets: Linear}}}"
    modifier = load_recipe(text).modifiers[0]
    assert isinstance(modifier, QuIPModifier) and modifier.rotations == ["v", "u"] and modifier.ignore == ["lm_head"]


def test_a_weight_that_is_turned_the_wrong_way_is_noticed_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    before = logits(model)
    monkeypatch.setattr(OnlineRotation, "turn", lambda self, x: self.rotation.turn(x, back=not self.back))
    with pytest.raises(NumericsError, match=r"outputs are .* off, relative, more than rounding"):
        oneshot(model, recipe=QuIPModifier())
    monkeypatch.undo()
    assert torch.equal(logits(model), before) and not rotated_modules(model)


CONFIGS: dict[str, tuple[Any, str]] = {
    "no table": (lambda q: q.update(transform_config=[1]), "transform_config is no table"),
    "a place in attention": (lambda q: group(q)["apply"][0].update(location="q_attn"), "'q_attn' is a place in attention"),
    "no kind": (lambda q: group(q).update(type="fourier"), "R4: is no rotation of the kinds hadamard"),
    "permuted": (lambda q: group(q).update(randomize=True), "R4: is no rotation of the kinds"),
    "no modules": (lambda q: group(q).update(apply=None), "R4: names no modules"),
    "another size": (lambda q: group(q).update(head_dim=32), "hold no matrix of 32 x 32 for model.layers.0.mlp.down_proj"),
    "a group that is gone": (lambda q: q["transform_config"]["config_groups"].pop("R4"), "left over .*R4_input.weight"),
}


def group(config: dict[str, Any]) -> Any:
    return config["transform_config"]["config_groups"]["R4"]


def test_a_config_that_asks_for_something_else_is_an_error(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    run(tmp_path / "base", tmp_path / "out", R4, *QUANTIZERS["weights"])
    path = tmp_path / "out" / "config.json"
    text = path.read_text()
    for change, why in CONFIGS.values():
        config = json.loads(text)
        change(config["quantization_config"])
        path.write_text(json.dumps(config))
        with pytest.raises(ModelError, match=why):
            load_compressed(tmp_path / "out", device="cpu")


BUGS: dict[str, Any] = {
    "the matrix is stored transposed": ("_stored", lambda one, wide: online_stored(one, wide).T.contiguous()),
    "the inverse is forgotten": (
        "_read",
        lambda group, side, kind, matrix, *, inverse: online_read(group, side, kind, matrix, inverse=False),
    ),
    "the scale is forgotten": ("rotation_of", lambda matrix: Rotation((matrix.double(),))),
}
online_stored, online_read = online._stored, online._read


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_in_reader_and_writer_show(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama().save_pretrained(tmp_path / "base")
    name, change = BUGS[bug]
    monkeypatch.setattr(online, name, change)
    made = run(tmp_path / "base", tmp_path / "out", RECIPES["QuIP"]).model
    assert difference(logits(made), found(tmp_path / "out")) > 1e-2


def found(folder: Path) -> Tensor:
    return logits(load_compressed(folder, device="cpu"))


@pytest.mark.parametrize("modifier", [QuIPModifier(ignore=["lm_head"]), SpinQuantModifier(rotations=["R4"])])
def test_rotations_are_no_values_that_pass_from_batch_to_batch(modifier: Any) -> None:
    """They were made in the first forward, and the proof took them for what another batch had left: all batches were held against it."""
    recipe = [modifier, GPTQModifier(config_groups={"g": {"targets": ["re:.*proj"], "weights": {"num_bits": 4, "group_size": 8}}})]
    result = oneshot(tiny.llama(), recipe=recipe, dataset=torch.ones(6, 8, dtype=torch.long), batch_size=2)
    assert not [note for note in result.report.notes if "all batches" in note]
