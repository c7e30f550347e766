"""Every flag of `compressor train` does what it says: it changes the result, the record, what is shown, or what is refused"""

from __future__ import annotations

import importlib
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor import train
from compressor.cli.main import main
from compressor.errors import (
    AlreadyDoneError,
    CheckpointError,
    CompressorError,
    DatasetError,
    HostReadError,
    ModelError,
    NumericsError,
    OutOfMemoryError,
    OutputError,
    UserInputError,
)
from compressor.training import adamw

PRUNE = {
    "MagnitudePruningModifier": {
        "targets": ["re:.*mlp.*_proj"],
        "start": 2,
        "end": 6,
        "update": 2,
        "final_sparsity": 0.5,
        "leave_enabled": True,
    }
}
FAST = {
    "--steps": "4",
    "--batch-size": "4",
    "--max-seq-length": "24",
    "--learning-rate": "1e-2",
    "--save-dtype": "float32",
    "--save-every": "0",
}


def fast(flags: tuple[str, ...]) -> list[str]:
    """A short run, but for what the flags say otherwise."""
    return [word for flag, value in FAST.items() if flag not in flags for word in (flag, value)]


class Runner:
    """Runs `compressor train` in this process."""

    def __init__(self, model: Path, tokens: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.model, self.tokens, self.folder, self.capsys = model, tokens, folder, capsys
        self.count = 0

    def __call__(self, *flags: str, mode: str = "eager", dataset: Path | None = None) -> dict[str, Any]:
        self.count += 1
        self.out = self.folder / f"out{self.count}"
        common = ["train", str(self.model), "--dataset", str(dataset or self.tokens), "--output-dir", str(self.out)]
        code = main([*common, "--mode", mode, "--json", "--quiet", *fast(flags), *flags])
        captured = self.capsys.readouterr()
        assert code == 0, captured.err
        return dict(json.loads(captured.out))

    def error(self, *flags: str, code: int = 1) -> str:
        common = ["train", str(self.model), "--dataset", str(self.tokens), "--output-dir", str(self.folder / "refused")]
        assert main([*common, "--mode", "eager", "--quiet", *fast(flags), *flags]) == code
        assert not (self.folder / "refused").exists()
        return self.capsys.readouterr().err

    def weights(self) -> bytes:
        return (self.out / "model.safetensors").read_bytes()


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Hear ctrl-C, which a shell that starts the tests in the background has switched off for them."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


@pytest.fixture
def run(llama_dir: Path, tokens_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(llama_dir, tokens_file, tmp_path, capsys)


def test_equal_commands_give_equal_bytes_and_flags_of_the_step_change_them(run: Runner) -> None:
    run()
    base, record = run.weights(), (run.out / "compression.json").read_bytes()
    run()
    assert (run.weights(), (run.out / "compression.json").read_bytes()) == (base, record)
    flags = (
        ("--steps", "5"),
        ("--batch-size", "2"),
        ("--accumulate", "2"),
        ("--learning-rate", "1e-3"),
        ("--warmup-steps", "2"),
        ("--weight-decay", "0.5"),
        ("--clip-norm", "0.01"),
        ("--clip-norm", "0"),
        ("--autocast", "bf16"),
        ("--ema", "0.9", "--save-ema", "0.9"),
        ("--ema", "0.9", "--save-ema", "0.9", "--ema-warmup"),
        ("--max-seq-length", "16"),
        ("--no-shuffle",),
        ("--seed", "1"),
        ("--dtype", "auto"),
        ("--save-dtype", "auto"),
    )
    results = {base: ("base",)}
    for some in flags:
        run(*some)
        assert run.weights() not in results, f"{some} gives what {results[run.weights()]} gives"
        results[run.weights()] = some


def test_the_checkpoint_is_as_the_one_that_was_loaded_but_for_its_weights(run: Runner) -> None:
    run("--save-dtype", "auto")
    old, new = (load_file(folder / "model.safetensors") for folder in (run.model, run.out))
    assert {name: (t.dtype, t.shape) for name, t in old.items()} == {name: (t.dtype, t.shape) for name, t in new.items()}
    assert not any(torch.equal(old[name], new[name]) for name in old if "proj" in name)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (run.model, run.out)]
    assert configs[0] == configs[1]
    assert (run.out / "tokenizer.json").read_bytes() == (run.model / "tokenizer.json").read_bytes()


@pytest.mark.nightly
def test_all_modes_give_the_bytes_of_eager_with_everything_switched_on(run: Runner, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps(PRUNE))
    flags = (
        "--steps",
        "10",
        "--batch-size",
        "2",
        "--accumulate",
        "2",
        "--warmup-steps",
        "2",
        "--weight-decay",
        "0.1",
        "--autocast",
        "bf16",
    )
    flags += ("--ema", "0.9", "--ema", "0.5", "--ema-warmup", "--save-ema", "0.9", "--recipe", str(recipe))
    flags += ("--eval-dataset", str(run.tokens), "--eval-every", "4", "--max-seq-length", "16")
    found = {}
    for mode in ("eager", "capture", "replay"):
        result = run(*flags, mode=mode)
        found[mode] = (run.weights(), (run.out / "compression.json").read_bytes(), result["losses"])
        assert result["mode"] == mode and len(result["plans"]) == (2 if mode == "replay" else 0)
    assert found["eager"] == found["capture"] == found["replay"]
    assert [entry["step"] for entry in result["training"]["evaluations"]] == [0, 4, 8, 10, 10]
    assert all(set(entry["ema"]) == {"0.9", "0.5"} for entry in result["training"]["evaluations"][:-1])
    saved = load_file(run.out / "model.safetensors")
    pruned = [name for name in saved if "mlp" in name]
    assert len(pruned) == 6 and all((saved[name] == 0).float().mean() == 0.5 for name in pruned), "averages keep the zeros of the mask"
    assert result["training"]["sparsity"]["model.layers.0.mlp.up_proj"] == 0.5


def test_the_loss_falls_and_evaluations_see_it(run: Runner, tmp_path: Path) -> None:
    data = tmp_path / "count.safetensors"  # tokens that follow a rule
    save_file({"input_ids": (torch.arange(48 * 16).view(16, 48) * 7 % 61).int()}, data)
    result = run("--steps", "30", "--eval-dataset", str(data), "--ema", "0.5", dataset=data)
    first, last, saved = result["training"]["evaluations"]
    assert last["loss"] < first["loss"] - 2 and saved["as_saved"] and abs(saved["loss"] - last["loss"]) < 0.02
    assert result["losses"][-1] < result["losses"][0] - 2 and len(result["losses"]) == 30
    assert result["training"]["tokens"] == 30 * 4 * 24
    assert result["training"]["losses"]["means"] == pytest.approx(result["losses"])


AWARE = json.dumps({"QuantizationModifier": {"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "W4A16", "start": 1}})


@pytest.mark.parametrize("recipe", [(), ("--recipe", AWARE), ("--recipe", json.dumps(PRUNE))], ids=["plain", "quantized", "pruned"])
def test_what_is_saved_loads_and_computes_what_was_evaluated(run: Runner, recipe: tuple[str, ...]) -> None:
    from transformers import AutoModelForCausalLM

    flags = ("--eval-dataset", str(run.tokens), "--max-seq-length", "48", "--save-dtype", "auto", "--steps", "8", *recipe)
    evaluations = run(*flags)["training"]["evaluations"]
    model = AutoModelForCausalLM.from_pretrained(run.out)
    ids = load_file(run.tokens)["input_ids"].long()
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert evaluations[-1]["loss"] == pytest.approx(loss, abs=2e-3)
    assert evaluations[-2]["loss"] == pytest.approx(loss, abs=2e-2), "what was trained is what is saved"
    assert loss < evaluations[0]["loss"] - 0.1


def test_the_recipe_counts_in_the_unit_of_the_length(run: Runner, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    settings = {"targets": "['re:.*mlp.*_proj']", "start": 0, "end": "${end}", "update": 0.5, "final_sparsity": 0.5}
    recipe.write_text("MagnitudePruningModifier:\n" + "".join(f"  {name}: {value}\n" for name, value in settings.items()))
    by_steps = run("--recipe", str(recipe), "--recipe-arg", "end=2", "--steps", "8")
    assert by_steps["training"]["recipe_counts"] == "steps" and by_steps["training"]["sparsity"]["all"] < 0.01, "weights grew again"
    assert "50.0%" in by_steps["notes"][0]
    arguments = [
        "train",
        str(run.model),
        "--dataset",
        str(run.tokens),
        "--output-dir",
        str(tmp_path / "epochs"),
        "--mode",
        "eager",
        "--json",
    ]
    assert main([*arguments, "--quiet", "--epochs", "2", "--recipe", str(recipe), "--recipe-arg", "end=2"]) == 0
    result = json.loads(run.capsys.readouterr().out)
    assert result["training"]["recipe_counts"] == "epochs" and result["training"]["steps"] == 2 * (16 * 48 // 64 // 8)
    assert result["training"]["sparsity"]["model.layers.0.mlp.up_proj"] == 0.5
    assert "end=9 lies behind the run of 4 steps" in run("--recipe", str(recipe), "--recipe-arg", "end=9")["notes"][0]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often a run has guarded, proved and audited."""
    from compressor.training import trainer
    from compressor.training.replay.plan import Plan

    calls = {"guard": 0, "prove": 0, "audit": 0}
    guard, prove, audit = Plan.guard, trainer.prove, trainer.audit
    monkeypatch.setattr(Plan, "guard", lambda self: (calls.update(guard=calls["guard"] + 1), guard(self))[1])
    monkeypatch.setattr(trainer, "prove", lambda *given: (calls.update(prove=calls["prove"] + 1), prove(*given))[1])
    monkeypatch.setattr(trainer, "audit", lambda *given: (calls.update(audit=calls["audit"] + 1), audit(*given))[1])
    return calls


def test_guards_and_audits_are_as_rare_as_asked(run: Runner, calls: dict[str, int]) -> None:
    run("--steps", "12", "--check-every", "5", "--audit-every", "0", mode="replay")
    assert (calls["prove"], calls["audit"]) == (1, 0) and calls["guard"] <= 5  # it is 9 or more where every step is checked


def test_guards_and_audits_come_as_often_as_asked(run: Runner, calls: dict[str, int]) -> None:
    seen = {}
    for flags in ((), ("--check-every", "5", "--audit-every", "0"), ("--audit-every", "0"), ("--audit-every", "3")):
        calls.update(guard=0, prove=0, audit=0)
        run("--steps", "12", *flags, mode="replay")
        seen[flags] = dict(calls)
    assert all(count["prove"] == 1 for count in seen.values())
    assert [count["audit"] for count in seen.values()] == [4, 0, 0, 3], "after 1, 2, 4 and 8 steps; after 3 and 6, and in the last step"
    assert seen[("--check-every", "5", "--audit-every", "0")]["guard"] < seen[("--audit-every", "0")]["guard"] - 4


def test_text_comes_from_its_column(run: Runner, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": "a b c d " * 30, "body": "x y " * 70}) + "\n" for _ in range(4)))
    first = run(dataset=data)["data"]
    second = run("--text-column", "body", dataset=data)["data"]
    assert (
        (first["num_samples"], first["num_blocks"]) == (4, 20) and second["num_tokens"] == 23 * 24 and first["sha256"] != second["sha256"]
    )


def test_code_in_the_folder_runs_only_when_trusted(run: Runner, tmp_path: Path) -> None:
    folder = tmp_path / "custom"
    folder.mkdir()
    config = json.loads((run.model / "config.json").read_text())
    config |= {"model_type": "own_llama_t", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((run.model / "model.safetensors").read_bytes())
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_llama_t'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    run.model = folder
    assert "trust_remote_code" in run.error()
    run("--trust-remote-code")
    assert (run.out / "own.py").is_file()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model-class", "AutoModel"), "no causal language model"),
        (("--device", "gpu"), "use auto"),
        (("--max-seq-length", "65"), "65 is more than the model takes; give at most 64"),
        (("--batch-size", "99"), "fewer than the 99 of one step"),
        (("--accumulate", "40"), "batch_size=4 x accumulate=40"),
        (("--save-ema", "0.9"), "no averages of decay 0.9 are kept (ema is none)"),
        (("--ema", "0.9", "--save-ema", "0.99"), "(ema is 0.9)"),
        (("--ema", "2"), "decay=2.0 is not between 0 and 1"),
        (("--ema-warmup",), "no averages are kept"),
        (("--warmup-steps", "4"), "4 steps of warm-up leave nothing of a run of 4 steps"),
        (("--learning-rate", "0"), "it must be above 0"),
        (("--learning-rate", "nan"), "it must be above 0"),
        (("--weight-decay", "-1"), "it must be at least 0"),
        (("--clip-norm", "-1"), "0 clips nothing"),
        (("--eval-every", "2"), "without eval_dataset"),
        (("--eval-dataset", "missing.jsonl"), "no such file"),
        (("--recipe-arg", "a=1"), "a were given without a recipe"),
        (("--recipe", "QuantizationModifier: {targets: [Linear], scheme: W4A16, ignore: [lm_head]}"), "it has no start"),
        (("--recipe", "GPTQModifier: {targets: [Linear], scheme: W4A16, ignore: [lm_head]}"), "it takes no part in training"),
        (("--recipe", json.dumps({"MagnitudePruningModifier": {"start": 4, "end": 9, "final_sparsity": 0.5}})), "start=4 is not reached"),
        (("--run-dir", "."), "is no run folder of a training"),
        (("--steps", str(10**30)), "at most 1,000,000,000"),
        (("--recipe", json.dumps({"MagnitudePruningModifier": {"start": -2, "end": 0, "final_sparsity": 0.5}})), "end=0 lies before the"),
        (("--recipe", "QuantizationModifier: {scheme: W4A16, ignore: [lm_head], start: -2, end: -1}"), "end=-1 lies before the first step"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_first_step(run: Runner, flags: tuple[str, ...], words: str) -> None:
    assert words in run.error(*flags)
    assert not list(run.folder.iterdir())


def test_wrong_arguments_end_with_usage(run: Runner) -> None:
    for flags in (("--nonsense",), ("--steps", "0"), ("--steps", "3", "--epochs", "1"), ("--mode", "fast"), ("--autocast", "fp16")):
        with pytest.raises(SystemExit) as exit_info:
            run.error(*flags)
        assert exit_info.value.code == 2


def test_a_disk_without_room_is_known_before_the_first_step(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    for free, promised in ((100, True), (usage.free, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        folder = tmp_path / str(free)
        if promised:
            with pytest.raises(CheckpointError, match=r"this run will write about [\d,]+ bytes there, and 100 are free") as caught:
                train(run.model, dataset=run.tokens, output_dir=folder, **small())
            about = int(str(caught.value).split("about ")[1].split(" ")[0].replace(",", ""))
            continue
        with pytest.raises(KeyboardInterrupt):
            train(run.model, dataset=run.tokens, output_dir=folder, progress=PressAt(5), **small())
        states = [path.stat().st_size for path in folder.with_name(f"{free}.partial-run").glob("state-*")]
        assert sum(states) < about < 4 * sum(states)


def test_weights_that_float16_has_no_room_for_are_refused(run: Runner, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    model.model.norm.weight.data[0] = 1e5
    with pytest.raises(ModelError, match=r"save_dtype: float16 ends at 65,504, and model\.norm\.weight hold more"):
        train(model, dataset=run.tokens, save_dtype="float16", **small())


@pytest.mark.parametrize("where", ["files", "memory"])
def test_float16_has_no_room_for_what_adam_keeps(run: Runner, where: str) -> None:
    from transformers import AutoModelForCausalLM

    model, choices = run.model, {"dtype": "float16"}
    if where == "memory":
        model, choices = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float16), {}
    with pytest.raises(UserInputError, match=r"AdamW: weights are float16, .*; train in float32 or bfloat16"):
        train(model, dataset=run.tokens, **choices, **small())
    with pytest.raises(UserInputError, match=r"AdamW: weights are float16, .*; keep them in float32"):
        adamw([torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))])


def test_a_mask_of_another_name_than_loss_mask_is_told(run: Runner) -> None:
    rows = [{"input_ids": [3 + (number + place) % 50 for place in range(16)], "assistant_masks": [0, 1] * 8} for number in range(16)]
    told = [note for note in train(run.model, dataset=rows, **small()).report.notes if note.startswith("assistant_masks of the rows")]
    assert len(told) == 1 and "a loss_mask" in told[0]


@pytest.mark.parametrize(("choices", "said"), [({}, 1), ({"save_dtype": "float32"}, 0)])
def test_weights_of_several_dtypes_that_become_one_are_told(run: Runner, tmp_path: Path, choices: dict[str, str], said: int) -> None:
    from transformers import AutoModelForCausalLM

    in_files, in_memory = (AutoModelForCausalLM.from_pretrained(run.model, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    in_files.model.norm.float()
    in_files.save_pretrained(tmp_path / "mixed")
    in_memory.model.norm.bfloat16()
    for source in (in_memory, tmp_path / "mixed"):
        notes = train(source, dataset=run.tokens, **choices, **small()).report.notes
        told = [note for note in notes if "cast the model to one dtype first" in note or note.startswith("save_dtype: some weights")]
        assert len(told) == said, notes


def test_an_existing_output_is_not_overwritten(run: Runner) -> None:
    run()
    assert main(["train", str(run.model), "--dataset", str(run.tokens), "--output-dir", str(run.out), "--quiet", *fast(())]) == 1
    assert "exists and is not empty" in run.capsys.readouterr().err
    with pytest.raises(OutputError, match="lies in the folder of the model"):
        train(run.model, dataset=run.tokens, output_dir=run.model / "out")


def test_results_are_printed_and_bars_hidden_when_asked(run: Runner, tmp_path: Path) -> None:
    common = ["train", str(run.model), "--dataset", str(run.tokens), "--eval-dataset", str(run.tokens)]
    assert main([*common, *fast(("--steps",)), "--steps", "8", "--output-dir", str(tmp_path / "a")]) == 0
    shown = run.capsys.readouterr()
    assert "train" in shown.err and "8/8" in shown.err
    for words in (
        "8 steps, 768 tokens",
        "held out:",
        "as saved",
        "mode:       replay, 1 plan captured and proved",
        f"checkpoint: {tmp_path / 'a'}",
    ):
        assert words in shown.out
    assert main([*common, *fast(()), "--output-dir", str(tmp_path / "b"), "--quiet"]) == 0
    assert run.capsys.readouterr().err == ""


# ---- from Python ----


def small(**changes: Any) -> dict[str, Any]:
    return {"steps": 8, "batch_size": 2, "max_seq_length": 16, "learning_rate": 1e-2, "mode": "eager", "save_every": 2, **changes}


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_a_model_in_memory_is_trained_in_place_and_left_in_its_mode(run: Runner) -> None:
    model = loaded(run.model)
    before = model.lm_head.weight.detach().clone()
    states = torch.get_rng_state()
    result = train(model, dataset=torch.randint(0, 256, (16, 16)), **small(mode="replay"))
    assert result.model is model and not torch.equal(before, model.lm_head.weight) and not model.training
    assert result.output_dir is None and len(result.plans) == 1 and all(p.grad is None for p in model.parameters())
    assert torch.equal(states, torch.get_rng_state()) is False, "randint above"
    after = torch.get_rng_state()
    train(model, dataset=torch.zeros(16, 16, dtype=torch.int64) + 3, **small(steps=1))
    assert torch.equal(after, torch.get_rng_state()), "a run leaves the caller's generators where they were"


def test_parameters_that_are_frozen_stay_and_nothing_to_train_is_refused(run: Runner) -> None:
    model = loaded(run.model)
    model.model.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, dataset=run.tokens, **small(weight_decay=0.1))
    assert [name for name, p in model.named_parameters() if not torch.equal(p, before[name])] == ["lm_head.weight"]
    model.requires_grad_(False)
    with pytest.raises(UserInputError, match="no parameter requires a gradient"):
        train(model, dataset=run.tokens, **small())
    with pytest.raises(ModelError, match="no causal language model"):
        train(torch.nn.Linear(2, 2), dataset=run.tokens, **small())
    with pytest.raises(DatasetError, match="none was given"):
        train(model.requires_grad_(True), dataset=None, **small())
    with pytest.raises(DatasetError, match="token id 300"):
        train(model, dataset=[[300] * 64], **small())


def test_a_loss_that_is_no_number_stops_the_run_and_is_never_kept(run: Runner, tmp_path: Path) -> None:
    with pytest.raises(
        NumericsError, match=r"step \d+: the loss is (nan|inf) \(it was .* a step before\); give a smaller learning_rate"
    ) as info:
        train(run.model, dataset=run.tokens, output_dir=tmp_path / "o", **small(learning_rate=1e18, clip_norm=0, save_every=1))
    assert not (tmp_path / "o").exists()
    for state in (tmp_path / "o.partial-run").glob("state-*"):
        assert all(bool(t.isfinite().all()) for name, t in load_file(state).items() if name.startswith("param:")), state.name
    assert "start over" in str(info.value)
    broken = loaded(run.model)
    broken.lm_head.weight.data[0, 0] = float("nan")
    with pytest.raises(NumericsError, match="step 1: the loss is nan before any update; look at the model's weights"):
        train(broken, dataset=run.tokens, **small())


def test_memory_that_runs_out_is_said_with_the_step(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    from compressor.training_run import phases

    def starve(model: Any, batch: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")

    monkeypatch.setattr(phases, "next_token_loss", starve)
    with pytest.raises(OutOfMemoryError, match=r"step 1: memory ran out .*99 bytes.*smaller batch_size.*nothing was kept"):
        train(loaded(run.model), dataset=run.tokens, **small())


def test_what_cannot_be_captured_names_the_mode_that_can(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    from compressor.training_run import phases

    plain = phases.next_token_loss

    def reading(model: Any, batch: Any) -> Any:
        loss = plain(model, batch)
        return loss if loss.item() > -1 else loss * 2

    monkeypatch.setattr(phases, "next_token_loss", reading)
    with pytest.raises(HostReadError) as info:
        train(loaded(run.model), dataset=run.tokens, **small(mode="replay"))
    assert "at step 3; --mode eager (mode='eager') makes the same steps without a capture" in info.value.__notes__[0]


class PressAt:
    """A bar that presses ctrl-C when it shows a step."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.seen = steps, 0

    def task(self, description: str, total: int) -> Any:
        from contextlib import nullcontext

        return nullcontext(self)

    def advance(self, amount: int = 1, note: str | None = None) -> None:
        self.seen += amount
        if self.seen in self.steps:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_keeps_a_state_and_says_how_to_go_on(run: Runner, tmp_path: Path) -> None:
    whole = train(run.model, dataset=run.tokens, output_dir=tmp_path / "whole", **small())
    with pytest.raises(KeyboardInterrupt) as info:
        train(run.model, dataset=run.tokens, output_dir=tmp_path / "o", progress=PressAt(5), **small())
    assert "stopped after step 5 of 8; 5 steps are kept in" in info.value.__notes__[0] and "--resume" in info.value.__notes__[0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    states = sorted(path.name for path in (tmp_path / "o.partial-run").glob("state-*"))
    assert states == ["state-00000004.safetensors", "state-00000005.safetensors"], "the last two are kept"
    result = train(run.model, dataset=run.tokens, output_dir=tmp_path / "o", resume=True, **small(mode="replay"))
    assert result.resumed == "resumed after step 5 of 8" and result.losses == whole.losses
    assert [(tmp_path / name / "model.safetensors").read_bytes() for name in ("o", "whole")].count(
        (tmp_path / "o" / "model.safetensors").read_bytes()
    ) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o", "whole"]
    with pytest.raises(AlreadyDoneError):
        train(run.model, dataset=run.tokens, output_dir=tmp_path / "o", resume=True, **small())


def test_the_second_ctrl_c_stops_at_once(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compressor.training_run import phases

    plain, calls = phases.next_token_loss, []

    def pressing(model: Any, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return plain(model, batch)

    monkeypatch.setattr(phases, "next_token_loss", pressing)
    with pytest.raises(KeyboardInterrupt) as info:
        train(run.model, dataset=run.tokens, output_dir=tmp_path / "o", **small())
    assert "stopped in the midst of step 6; 4 steps are kept in" in info.value.__notes__[0]


@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_behind_the_last_step_says_what_is_there(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    from compressor.training_run import phases

    plain = phases.save_trained

    def pressed(*given: Any) -> Any:
        if when == "after":
            plain(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(phases, "save_trained", pressed)
    common = ["train", str(run.model), "--dataset", str(run.tokens), "--output-dir", str(tmp_path / "o"), "--quiet"]
    assert main([*common, *fast(("--save-every",))]) == 130
    said = run.capsys.readouterr().err
    assert (f"the checkpoint in {tmp_path / 'o'} is whole" in said) == (when == "after")
    assert ("4 steps are kept in" in said) == (when == "before") and "nothing was written" not in said


@pytest.mark.parametrize("given", ["beside it", "named"])
def test_ctrl_c_before_anything_was_read_says_what_an_earlier_run_has_kept(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    kept = tmp_path / ("o.partial-run" if given == "beside it" else "kept")
    common = ["train", str(run.model), "--dataset", str(run.tokens), "--output-dir", str(tmp_path / "o"), "--resume", *fast(())]
    common += ["--run-dir", str(kept)] if given == "named" else []

    def pressed(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("compressor.training_run"), "train", pressed)
    assert main(common) == 130
    assert run.capsys.readouterr().err == "compressor train: interrupted; nothing was written\n"
    kept.mkdir()
    assert main(common) == 130
    assert f"interrupted; what {kept} holds is kept; the same command with --resume goes on from there" in run.capsys.readouterr().err


@pytest.mark.parametrize("output_dir", ["loop", "loop/x", "a\0b", "/"])
def test_ctrl_c_before_a_wrong_output_dir_was_refused_is_told_in_a_line(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output_dir: str
) -> None:
    def pressed(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.setattr(importlib.import_module("compressor.training_run"), "train", pressed)
    assert main(["train", str(run.model), "--dataset", str(run.tokens), "--output-dir", output_dir, *fast(())]) == 130
    assert run.capsys.readouterr().err == "compressor train: interrupted; nothing was written\n"


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_state(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compressor.training_run import phases

    def full(*given: Any) -> None:
        raise CheckpointError("disk: full; make room")

    with monkeypatch.context() as patch:
        patch.setattr(phases, "save_trained", full)
        with pytest.raises(CompressorError, match="disk: full"):
            train(run.model, dataset=run.tokens, output_dir=tmp_path / "o", **small())
    assert (tmp_path / "o.partial-run" / "state-00000008.safetensors").is_file()
    assert train(run.model, dataset=run.tokens, output_dir=tmp_path / "o", resume=True, **small()).resumed == "resumed after step 8 of 8"
