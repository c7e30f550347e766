"""Layers that run once for their calibration: what they compute, how often they run, and where it is not possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import compressor
from compressor import AWQModifier, GPTQModifier, Modifier, QuantizationModifier, State, WandaPruningModifier, load_compressed, oneshot
from compressor.cli.main import main
from compressor.entrypoints.oneshot import OneshotResult
from compressor.errors import CalibrationError, CompressorError, TargetError, TracingError
from compressor.lifecycle import Event
from compressor.lifecycle.modifier import CalibrationNeed
from compressor.modifiers.schemes.base import SchemeModifier
from tests import tiny

INT4 = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}}
IDS = torch.randint(64, (24, 16), generator=torch.Generator().manual_seed(0))


def llama() -> LlamaForCausalLM:
    return tiny.llama(intermediate_size=48)


def gptq(ignore: Sequence[str] = ("lm_head",), target: Any = None) -> GPTQModifier:
    return GPTQModifier(config_groups=INT4, ignore=list(ignore), target=target)


def compressed(model: nn.Module, passes: str, dataset: Any = IDS, target: Any = None, **settings: Any) -> OneshotResult:
    recipe = gptq(("lm_head",) if hasattr(model, "lm_head") else (), target)
    return oneshot(model, recipe=recipe, dataset=dataset, batch_size=4, passes=passes, **settings)


def codes(model: nn.Module) -> dict[str, Tensor]:
    return {name: module.codes() for name, module in model.named_modules() if hasattr(module, "codes")}


def test_what_reads_the_same_input_becomes_the_same_codes() -> None:
    one, two = (codes(compressed(llama(), passes).model) for passes in ("one", "two"))
    first = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    assert all(torch.equal(one[name], two[name]) for name in first)
    assert one.keys() == two.keys()
    assert any(not torch.equal(one[name], two[name]) for name in one)  # behind them the error of their own layer counts


def test_each_module_sees_what_those_before_it_in_its_layer_give_after_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Tensor]] = {}
    watch = SchemeModifier.watch

    def noting(self: Any, name: str, hook: Any) -> None:
        watch(self, name, lambda x: (seen.setdefault(name, []).append(x.detach().clone()), hook(x))[1])

    monkeypatch.setattr(SchemeModifier, "watch", noting)
    model = compressed(llama(), "one", target="propagated").model
    given: dict[str, list[Tensor]] = {}
    for name in seen:
        model.get_submodule(name).register_forward_pre_hook(lambda module, args, name=name: given.setdefault(name, []).append(args[0]))
    with torch.no_grad():
        for batch in IDS.split(4):
            model(batch, use_cache=False)
    for name, inputs in seen.items():
        for x, y in zip(inputs, given[name], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)  # the materialized weight in the run, its codes here


def test_layers_run_once() -> None:
    ids, calls = torch.randint(64, (40, 64), generator=torch.Generator().manual_seed(1)), Counter[tuple[str, str]]()
    for passes in ("one", "two"):
        model = llama()
        for name in ("mlp.act_fn", "input_layernorm"):

            def count(module: nn.Module, args: Any, out: Any, key: tuple[str, str] = (passes, name)) -> None:
                calls[key] += args[0].shape[:2] == (4, 64)  # whole batches: not those of the proof

            model.get_submodule(f"model.layers.0.{name}").register_forward_hook(count)
        compressed(model, passes, ids, "propagated")
    assert calls["two", "mlp.act_fn"] - calls["one", "mlp.act_fn"] == 10, calls
    assert calls["two", "input_layernorm"] == calls["one", "input_layernorm"], calls  # what it makes does not wait for all samples


@pytest.mark.parametrize("target", ["propagated", "base"])
def test_bytes_do_not_depend_on_how_many_samples_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    calls: Counter[int] = Counter()
    for streams in (0, 3, 100):  # all samples wait before modules that read 160 features, some, and none
        monkeypatch.setattr("compressor.tracing.graph.run.WAITING_STREAMS", streams)
        model = tiny.llama(intermediate_size=160).eval()
        model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_, streams=streams: calls.update([streams]))
        compressed(model, "one", target=target, output_dir=tmp_path / str(streams))
    assert calls[0] > calls[100] and (calls[0] > calls[3] > calls[100]) == (target == "propagated")
    written = {(tmp_path / str(streams) / "model.safetensors").read_bytes() for streams in (0, 3, 100)}
    assert len(written) == 1


def test_experts_run_twice_and_all_else_once() -> None:
    model = tiny.qwen3_moe(intermediate_size=48)
    result = oneshot(
        model,
        recipe=GPTQModifier(config_groups=INT4, ignore=["lm_head", "re:.*mlp.gate$"]),
        dataset=IDS,
        batch_size=4,
        passes="one",
        calibrate_all_experts=True,
    )
    assert len(result.report.modules) == 2 * (4 + 4 * 3)
    assert not result.report.fallbacks
    assert torch.isfinite(result.model(IDS[:2]).logits).all()


@pytest.mark.parametrize("stages", [1, 4, 6])
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int) -> None:
    llama().save_pretrained(tmp_path / "model")
    settings: dict[str, Any] = {"dataset": IDS, "batch_size": 4, "passes": "one"}
    oneshot(str(tmp_path / "model"), recipe=gptq(), output_dir=tmp_path / "whole", **settings)
    done, compress = [], GPTQModifier.compress

    def stopping(self: GPTQModifier, state: Any, names: list[str]) -> None:
        if len(done) == stages:
            raise KeyboardInterrupt
        done.append(names)
        compress(self, state, names)

    monkeypatch.setattr(GPTQModifier, "compress", stopping)
    with pytest.raises(KeyboardInterrupt):
        oneshot(str(tmp_path / "model"), recipe=gptq(), output_dir=tmp_path / "resumed", **settings)
    monkeypatch.undo()
    with pytest.raises(CompressorError, match="passes"):
        oneshot(str(tmp_path / "model"), recipe=gptq(), output_dir=tmp_path / "resumed", resume=True, **{**settings, "passes": "two"})
    oneshot(str(tmp_path / "model"), recipe=gptq(), output_dir=tmp_path / "resumed", resume=True, **settings)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "resumed" / name).read_bytes()


class Deciding(nn.Module):
    """A layer whose Python decides by what its first module gives."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return x + (self.down(y) if float(y.sum()) < 1e9 else y)


class Lending(Deciding):
    """A layer that sets a number of a module of its own for the length of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.gain = 2.0
        y = self.down(self.up(x)) * self.gain
        self.gain = 1.0
        return x + y


class Stack(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(64, 16), nn.ModuleList([layer(), layer()])

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


def stack(layer: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return Stack(layer).eval()


class Gained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gain = nn.RMSNorm(16), nn.Parameter(torch.ones(16))
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x) * self.gain * x.sigmoid())))


class Reaching(Modifier):
    """Writes to one tensor, past its version or not, as a layer's `up` is compressed."""

    calibration: ClassVar[CalibrationNeed] = "sequential"
    contract_tags: ClassVar[frozenset[str]] = frozenset({"in_place"})
    tensor: str
    counted: bool
    at: str = "layers.1.up"

    def on_initialize(self, state: State) -> bool:
        state.touch(name for name, _ in state.model.named_modules())
        return True

    def on_calibration_start(self, state: State, event: Event) -> None:
        for name, module in state.model.named_modules():
            if name.endswith(("up", "down")):
                self.register_hook(module, lambda module, args: None, "forward_pre")

    def on_calibration_end(self, state: State, event: Event) -> None:
        self.remove_hooks()

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        if self.at in event.modules:
            with torch.no_grad():
                tensor = state.model.get_parameter(self.tensor)
                (tensor if self.counted else tensor.data).mul_(0.25)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize(
    ("tensor", "refused"),
    [
        ("layers.1.gain", "one"),
        ("layers.1.norm.weight", "one"),
        ("layers.0.down.weight", "one two suspend"),
        ("embed.weight", "one two suspend"),
        ("layers.1.up.weight", ""),
        ("layers.1.down.weight", ""),
    ],
)
def test_what_samples_have_run_past_may_not_change(tensor: str, refused: str, counted: bool) -> None:
    for way, given in {"one": {"passes": "one"}, "two": {"passes": "two"}, "suspend": {"passes": "two", "engine": "suspend"}}.items():
        model: Any = stack(Gained)
        asked = {"recipe": Reaching(tensor=tensor, counted=counted), "dataset": IDS, "batch_size": 4, **given}
        if way in refused.split():
            with pytest.raises(CalibrationError, match=f"{tensor}: was changed as layers.1.* was compressed, which is not in it"):
                oneshot(model, **asked)
        else:
            oneshot(model, **asked)


@pytest.mark.parametrize("tensor", ["layers.0.up.weight", "embed.weight", "layers.1.down.weight", "layers.1.up.weight"])
def test_without_propagation_nothing_outside_of_the_stage_may_change(tensor: str) -> None:
    for engine in ("graph", "suspend"):
        asked: Any = {"recipe": Reaching(tensor=tensor, counted=True), "dataset": IDS, "batch_size": 4, "engine": engine}
        if tensor.startswith("layers.1"):
            oneshot(stack(Gained), propagate_error=False, **asked)
        else:
            with pytest.raises(CalibrationError, match=f"{tensor}: was changed as layers.1 was compressed, which is not in it"):
                oneshot(stack(Gained), propagate_error=False, **asked)


@pytest.mark.parametrize("engine", ["graph", "suspend"])
def test_a_later_layer_may_change_ahead_of_its_stage_with_propagation_alone(engine: Any) -> None:
    """Else what lies behind it would learn from what the uncompressed model does not give."""
    asked: Any = {"dataset": IDS, "batch_size": 4, "engine": engine, "passes": "two"}
    recipe = [Reaching(tensor="layers.1.up.weight", counted=True, at="layers.0.up") for _ in range(2)]
    oneshot(stack(Gained), recipe=recipe[0], **asked)
    with pytest.raises(CalibrationError, match=r"layers\.1\.up\.weight: was changed as layers\.0 was compressed, which is not in it"):
        oneshot(stack(Gained), recipe=recipe[1], propagate_error=False, **asked)


@pytest.mark.parametrize("engine", ["graph", "suspend"])
def test_a_weight_that_two_layers_share_is_the_later_ones_too(engine: Any) -> None:
    model: Any = stack(Gained)
    model.layers[1].up.weight = model.layers[0].up.weight
    recipe = Reaching(tensor="layers.0.up.weight", counted=True, at="layers.0.up")
    with pytest.raises(CalibrationError, match=r"layers\.1\.up\.weight: was changed as layers\.0 was compressed, which is not in it"):
        oneshot(model, recipe=recipe, dataset=IDS, batch_size=4, engine=engine, propagate_error=False)


class ReachingOwn(Reaching):
    """Touches only what it writes to."""

    def on_initialize(self, state: State) -> bool:
        state.touch([self.tensor.rpartition(".")[0]])
        return True


class Tied(Stack):
    """Uses the weight of its last layer under a name of its own, or of an embedding's, before the layers or behind them."""

    def __init__(self, layer: type[nn.Module], owner: str, before: bool) -> None:
        super().__init__(layer)
        self.before, weight = before, self.layers[1].up.weight
        self.table = nn.Embedding(24, 16)
        if owner == "root":
            self.own = weight
        else:
            self.table.weight = weight

    def forward(self, input_ids: Tensor) -> Tensor:
        def tied(x: Tensor) -> Tensor:
            rows = self.own[input_ids % 24] if hasattr(self, "own") else self.table(input_ids % 24)
            return x + rows

        x: Tensor = self.embed(input_ids)
        x = tied(x) if self.before else x
        for layer in self.layers:
            x = layer(x)
        return x if self.before else tied(x)


@pytest.mark.parametrize("given", [{"passes": "one"}, {"passes": "two"}, {"engine": "suspend"}, {"propagate_error": False}], ids=str)
@pytest.mark.parametrize("owner", ["root", "table"])
@pytest.mark.parametrize("before", [True, False])
def test_a_weight_that_is_used_under_another_name_may_not_change_behind_that_use(before: bool, owner: str, given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Tied(Gained, owner, before).eval()
    asked: Any = {"recipe": ReachingOwn(tensor="layers.1.up.weight", counted=False), "dataset": IDS, "batch_size": 4, **given}
    if before or "propagate_error" in given or (owner, *given) == ("root", "engine"):  # a forward that pauses may hold what is its own
        with pytest.raises(CalibrationError, match=r"(own|table\.weight): was changed as layers\.1.* was compressed, which is not in it"):
            oneshot(model, **asked)
    else:
        oneshot(model, **asked)


class Beside(Reaching):
    """Asks for the stream of the uncompressed model, too."""

    @property
    def base_stream(self) -> Any:
        return "required"


@pytest.mark.parametrize("passes", ["one", "two"])
@pytest.mark.parametrize("tensor", ["layers.1.up.weight", "layers.0.up.weight", "layers.0.norm.weight", "layers.0.down.weight"])
def test_the_uncompressed_stream_meets_no_later_layer_that_has_changed(tensor: str, passes: Any) -> None:
    model: Any = stack(Gained)
    model.layers[1].down.weight, model.layers[1].norm.weight = model.layers[0].down.weight, model.layers[0].norm.weight
    recipe = Beside(tensor=tensor, counted=True, at="layers.0.up")
    if tensor == "layers.0.up.weight":
        oneshot(model, recipe=recipe, dataset=IDS, batch_size=4, passes=passes)
    else:
        with pytest.raises(CalibrationError, match=r"weight: was changed as layers\.0.* was compressed, which is not in it"):
            oneshot(model, recipe=recipe, dataset=IDS, batch_size=4, passes=passes)


def test_an_uncounted_write_to_a_large_tensor_is_seen_in_some_of_its_numbers() -> None:
    model: Any = stack(Gained)
    model.embed = nn.Embedding(1 << 17, 16)
    with pytest.raises(CalibrationError, match=r"embed\.weight: was changed as layers\.1"):
        oneshot(model, recipe=Reaching(tensor="embed.weight", counted=False), dataset=IDS, batch_size=4)


class Setting(Reaching):
    """Sets an attribute instead."""

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        if "layers.0.up" in event.modules:
            holder, _, name = self.tensor.rpartition(".")
            setattr(state.model.get_submodule(holder), name, 0.5)
            with torch.no_grad():
                state.model.get_parameter("layers.0.up.weight").mul_(0.5)


@pytest.mark.parametrize(("attribute", "refused"), [("factor", "one two suspend"), ("layers.1.factor", "one"), ("layers.1.up.factor", "")])
def test_what_code_between_layers_reads_may_not_change_either(attribute: str, refused: str) -> None:
    class Factored(Gained):
        factor = 1.0

    for way, given in {"one": {"passes": "one"}, "two": {"passes": "two"}, "suspend": {"passes": "two", "engine": "suspend"}}.items():
        model: Any = stack(Factored)
        model.factor = model.layers[1].factor = model.layers[1].up.factor = 1.0
        asked: Any = {"recipe": Setting(tensor=attribute, counted=True), "dataset": IDS, "batch_size": 4, **given}
        if way in refused.split():
            with pytest.raises(CalibrationError, match=f"{attribute} was 1.0 and is 0.5, since layers.0.* was compressed"):
                oneshot(model, **asked)
        else:
            oneshot(model, **asked)


def test_a_norm_that_a_stage_runs_anew_may_change_with_what_reads_it() -> None:
    """Less waits before it than behind it, so that the stage begins there."""

    class Plain(Gained):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.relu(self.up(self.norm(x))))

    asked: Any = {"recipe": Reaching(tensor="layers.1.norm.weight", counted=True), "dataset": IDS, "batch_size": 4}
    assert oneshot(stack(Plain), passes="one", **asked).report is not None


@pytest.mark.parametrize(
    ("layer", "why"), [(Deciding, "Python decides"), (Lending, "gain goes from 1.0 to 2.0 outside of targets, where batches take turns")]
)
def test_a_layer_that_cannot_be_cut_runs_twice_and_the_report_says_so(layer: type[nn.Module], why: str) -> None:
    auto, two = (compressed(stack(layer), passes) for passes in ("auto", "two"))
    assert any("each layer ran twice" in note and why in note for note in auto.report.notes)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(codes(auto.model).values(), codes(two.model).values(), strict=True))
    with pytest.raises(TracingError, match=f"passes: 'one' is not possible here: .*{why}"):
        compressed(stack(layer), "one")


@pytest.mark.parametrize(
    ("other", "word"),
    [({"engine": "suspend"}, "suspend"), ({"propagate_error": False}, "propagate_error"), ({"pipeline": "basic"}, "basic")],
)
def test_choices_that_rule_each_other_out_are_refused(other: dict[str, Any], word: str) -> None:
    with pytest.raises(CompressorError, match=word):
        compressed(llama(), "one", **other)


def test_hooks_that_write_to_what_they_see_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = SchemeModifier.watch
    monkeypatch.setattr(SchemeModifier, "watch", lambda self, name, hook: watch(self, name, lambda x: x.mul_(1.0)))
    with pytest.raises(CompressorError, match="writes to the input"):
        compressed(llama(), "one")


def test_padding_stays_out_of_the_statistics() -> None:
    rows: Sequence[Tensor] = [row[: 6 + 2 * (place % 5)] for place, row in enumerate(IDS)]
    dataset = [{"input_ids": row.tolist()} for row in rows]
    padded, alone = (oneshot(llama(), recipe=gptq(), dataset=dataset, batch_size=size, passes="one") for size in (8, 1))
    tokens = {record.num_tokens for record in padded.report.modules.values()}
    assert tokens == {sum(map(len, rows))} == {record.num_tokens for record in alone.report.modules.values()}


def test_the_command_line_takes_the_choice(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(
        "GPTQModifier: {ignore: [lm_head], config_groups: {g: {targets: [Linear], weights: {group_size: 16}}}}"
    )
    from safetensors.torch import save_file

    save_file({"input_ids": IDS.to(torch.int32)}, tmp_path / "tokens.safetensors")
    argv = [str(tmp_path / "model"), "--recipe", str(tmp_path / "recipe.yaml"), "--dataset", str(tmp_path / "tokens.safetensors")]
    assert main(["oneshot", *argv, "--output-dir", str(tmp_path / "out"), "--passes", "one", "--quiet"]) == 0
    assert load_compressed(tmp_path / "out") is not None


class Reads(nn.Module):
    """A layer whose second module is never called: its weight is read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.a(x) @ self.b.weight)


def test_modules_that_no_batch_calls_are_left_to_the_budget_of_the_recipe() -> None:
    def run(passes: str, budget: int) -> OneshotResult:
        torch.manual_seed(0)
        model = nn.Sequential(nn.ModuleDict({"layers": nn.Sequential(Reads(), Reads())})["layers"])
        recipe = GPTQModifier(config_groups=INT4, ignore=[], fallback_budget=budget)
        return oneshot(model, recipe=recipe, dataset=torch.utils.data.DataLoader(torch.randn(32, 16)), passes=passes)

    one, two = run("auto", 2), run("two", 2)
    assert all(torch.equal(code, codes(two.model)[name]) for name, code in codes(one.model).items()) and len(codes(one.model)) == 4
    assert any("each layer ran twice" in note and "no batch calls" in note for note in one.report.notes)
    with pytest.raises(CompressorError, match="no calibration token reached it; the recipe allows fallback_budget=0"):
        run("auto", 0)
    with pytest.raises(CompressorError, match=r"no batch calls these sequential targets.* passes='two' leaves them to"):
        run("one", 2)


@pytest.mark.parametrize("passes", ["auto", "one", "two"])
def test_where_nothing_learns_in_a_layer_all_passes_are_possible(passes: str) -> None:
    recipe = [AWQModifier(n_grid=3), QuantizationModifier(config_groups=INT4, ignore=["lm_head"])]
    result = oneshot(llama(), recipe=recipe, dataset=IDS, batch_size=4, pipeline="sequential", passes=passes)
    assert len(codes(result.model)) == 14
    assert any("layers were not run for all batches" in note for note in result.report.notes)


@pytest.mark.parametrize("passes", ["one", "two"])
def test_layers_from_which_nothing_learns_run_no_more_for_more_batches(passes: str) -> None:
    """What the note says, and why either choice of passes is kept."""

    def calls(num_samples: int) -> int:
        model, seen = llama(), Counter[str]()
        nn.Module.register_forward_pre_hook(model.model.layers[1].mlp.act_fn, lambda *_: seen.update(["called"]))
        recipe = QuantizationModifier(config_groups=INT4, ignore=["lm_head"])
        oneshot(model, recipe=recipe, dataset=IDS[:num_samples], batch_size=1, pipeline="sequential", passes=passes, verify="off")
        return seen["called"]

    assert calls(24) - calls(8) < 16


@pytest.mark.parametrize("passes", ["one", "two"])
def test_passes_are_refused_where_layers_do_not_run_one_after_another(passes: str) -> None:
    recipe = WandaPruningModifier(targets=["Linear"], ignore=["lm_head"], sparsity=0.5)
    for act in (oneshot, compressor.plan):
        data = {"dataset": IDS} if act is oneshot else {}
        with pytest.raises(TargetError, match=f"passes: '{passes}' was given, but no modifier looks at layers one after another"):
            act(llama(), recipe=recipe, sequential_targets=["LlamaDecoderLayer"], passes=passes, **data)


@pytest.mark.parametrize("engine", ["graph", "suspend"])
def test_a_module_that_learns_from_its_own_call_is_the_target_in_the_place_of_those_inside(engine: str) -> None:
    found = []
    for targets in (["Linear"], ["LlamaAttention", "re:.*mlp.*_proj", "lm_head"]):
        recipe = GPTQModifier(config_groups=INT4, ignore=["lm_head"], kv_cache_scheme={"num_bits": 8, "type": "float"})
        model = oneshot(llama(), recipe=recipe, dataset=IDS, batch_size=4, sequential_targets=targets, engine=engine).model
        found.append({name: value for name, value in model.state_dict().items() if "scale" in name})
    assert "model.layers.1.self_attn.k_scale" in found[0]
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
