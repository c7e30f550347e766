"""A run folder is resumed by the run that it belongs to, undamaged, by one process; what is wrong is named, and nothing is lost"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import compressor
import compressor.modifiers.gptq
from compressor import oneshot
from compressor.cli.main import main
from compressor.errors import AlreadyDoneError, CheckpointError, OutputError, ResumeError
from compressor.settings.verbs import DataSettings
from tests import tiny

INT4 = {"num_bits": 4, "group_size": 32, "strategy": "group"}
RECIPE: dict[str, Any] = {"GPTQModifier": {"ignore": ["lm_head"], "config_groups": {"g": {"targets": ["Linear"], "weights": INT4}}}}


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@contextmanager
def stopping_at(call: int, error: type[BaseException] = KeyboardInterrupt) -> Iterator[None]:
    """Raise at a call of the solver: four calls make a layer."""
    original, calls = compressor.modifiers.gptq.quantize_gptq, iter(range(1000))

    def stopped(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise error
        return original(*args, **kwargs)

    compressor.modifiers.gptq.quantize_gptq = stopped
    try:
        yield
    finally:
        compressor.modifiers.gptq.quantize_gptq = original


class Unfinished:
    """A model, data, and the run folder of a run that was stopped in the third of four layers."""

    def __init__(self, folder: Path) -> None:
        self.model, self.tokens, self.out = folder / "model", folder / "tokens.safetensors", folder / "out"
        self.run = folder / "out.partial-run"
        if not self.model.exists():
            tiny.llama(
                num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32
            ).bfloat16().save_pretrained(self.model)
            ids = torch.randint(0, 64, (6, 16), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
            save_file({"input_ids": ids}, self.tokens)
            with stopping_at(10), pytest.raises(KeyboardInterrupt):
                self.go()

    def go(self, **changes: Any) -> Any:
        arguments = {"model": self.model, "recipe": RECIPE, "dataset": self.tokens, "output_dir": self.out, "passes": "two"} | changes
        if arguments.get("pipeline") == "basic":
            del arguments["passes"]
        return oneshot(arguments.pop("model"), **arguments)

    def resume(self, **changes: Any) -> Any:
        return self.go(**{"resume": True} | changes)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Unfinished, dict[str, str]]:
    made = Unfinished(tmp_path_factory.mktemp("unfinished"))
    made.go(output_dir=made.out.with_name("whole"))
    return made, digest(made.out.with_name("whole"))


@pytest.fixture
def unfinished(original: tuple[Unfinished, dict[str, str]], tmp_path: Path) -> Unfinished:
    shutil.copytree(original[0].run.parent, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "whole")
    return Unfinished(tmp_path / "copy")


@pytest.fixture(scope="module")
def whole(original: tuple[Unfinished, dict[str, str]]) -> dict[str, str]:
    return original[1]


def change_weights(run: Unfinished) -> dict[str, Any]:
    tensors = load_file(run.model / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, run.model / "model.safetensors", metadata={"format": "pt"})
    return {}


def change_config(run: Unfinished) -> dict[str, Any]:
    config = json.loads((run.model / "config.json").read_text())
    (run.model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.001}))
    return {}


def change_tokens(run: Unfinished) -> dict[str, Any]:
    ids = load_file(run.tokens)["input_ids"]
    ids[5, 15] += 1 if ids[5, 15] < 63 else -1
    save_file({"input_ids": ids}, run.tokens)
    return {}


def change_recipe(run: Unfinished) -> dict[str, Any]:
    return {"recipe": {"GPTQModifier": RECIPE["GPTQModifier"] | {"dampening_frac": 0.02}}}


CHANGES: dict[str, tuple[Callable[[Unfinished], dict[str, Any]], str]] = {
    "weights": (change_weights, r"model\.files\.model\.safetensors was [0-9a-f]{12} and is [0-9a-f]{12};"),
    "config": (change_config, r"model\.files\.config\.json was [0-9a-f]{12} and is [0-9a-f]{12};"),
    "recipe": (change_recipe, r"recipe said .* and says .*dampening_frac: 0\.02"),
    "one token": (change_tokens, r"data\.tokens was [0-9a-f]{12} and is [0-9a-f]{12}; data\.batches was"),
    "fewer samples": (lambda run: {"num_calibration_samples": 5}, r"data\.num_samples was 6 and is 5; data\.num_tokens was 96 and is 80"),
    "shorter samples": (lambda run: {"max_seq_length": 15}, r"data\.num_tokens was 96 and is 90"),
    "batches": (lambda run: {"batch_size": 2}, r"data\.num_batches was 1 and is 3"),
    "seed": (lambda run: {"seed": 1}, r"seed was 0 and is 1"),
    "pipeline": (lambda run: {"pipeline": "basic"}, r"settings\.pipeline was 'sequential' and is 'basic'"),
    "targets": (lambda run: {"sequential_targets": ["LlamaMLP"]}, r"settings\.targets was not given and is \['LlamaMLP'\]"),
    "propagation": (lambda run: {"propagate_error": False}, r"settings\.propagate_error was True and is False"),
    "engine": (lambda run: {"engine": "suspend"}, r"settings\.engine was 'auto' and is 'suspend'"),
    "dtype": (lambda run: {"dtype": "float32"}, r"settings\.dtype was 'auto' and is 'float32'"),
    "ties": (lambda run: {"tie_word_embeddings": False}, r"settings\.tie_word_embeddings was not given and is False"),
    "config of another folder": (lambda run: {"config_name": run.model}, r"settings\.config_name was not given and is [0-9a-f]{12}"),
    "class": (lambda run: {"model_class": "LlamaForCausalLM"}, r"settings\.model_class was not given and is 'LlamaForCausalLM'"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_run_is_refused_by_what_changed(name: str, unfinished: Unfinished) -> None:
    change, words = CHANGES[name]
    before = digest(unfinished.run)
    with pytest.raises(ResumeError, match=words):
        unfinished.resume(**change(unfinished))
    assert digest(unfinished.run) | {"lock": ""} == before | {"lock": ""}
    assert not unfinished.out.exists()


def test_another_version_or_machine_is_refused(unfinished: Unfinished, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressor, "__version__", "9.9")
    with pytest.raises(ResumeError, match=r"versions\.compressor was '0\.1\.0' and is '9\.9'"):
        unfinished.resume()
    monkeypatch.undo()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        with pytest.raises(ResumeError, match=rf"machine\.threads was {threads} and is {threads + 1}"):
            unfinished.resume()
    finally:
        torch.set_num_threads(threads)


def test_what_changes_no_result_may_change(unfinished: Unfinished, whole: dict[str, str]) -> None:
    (unfinished.model / "README.md").write_text("new")
    result = unfinished.resume(verify="off", device="cpu")
    assert result.resumed == "resumed after stage 2 of 4"
    assert digest(unfinished.out) == whole
    assert next(iter(result.report.modules)) == "model.layers.0.self_attn.q_proj"
    assert not unfinished.run.exists()


def test_every_argument_is_part_of_the_fingerprint_or_known_not_to_matter() -> None:
    """An argument that is added must be looked at here: it goes into `choices`, or into one of these lists."""
    import inspect

    by_hash = {"model", "recipe", "mode", "recipe_args", "dataset", "tokenizer", "seed", "device", "trust_remote_code_model"}
    by_hash |= {"model_revision", "processor", "stage"}
    in_data = {"num_calibration_samples", "max_seq_length", "batch_size", "text_column", "shuffle_calibration_samples", "concatenate_data"}
    in_data |= set(DataSettings.model_fields)
    in_choices = {"pipeline", "dtype", "model_class", "calibrate_all_experts", "config_name", "tie_word_embeddings"}
    in_settings = {"passes", "sequential_targets", "propagate_error", "engine", "max_variants", "leaves"}
    changes_nothing = {
        "output_dir",
        "run_dir",
        "resume",
        "progress",
        "report_to",
        "verify",
        "activation_memory",
        "activation_device_memory",
        "offload_dir",
        "min_tokens_per_module",  # a note that is made at the end
    }
    in_machine = {"sequential_offload_device"}
    known = by_hash | in_data | in_choices | in_settings | in_machine | changes_nothing
    assert set(inspect.signature(oneshot).parameters) <= known


def test_without_resume_nothing_is_overwritten(unfinished: Unfinished, capsys: pytest.CaptureFixture[str]) -> None:
    before = digest(unfinished.run)
    with pytest.raises(ResumeError, match=r"2 of 4 stages are finished\); continue it with --resume \(resume=True\), or remove the folder"):
        unfinished.go()
    assert digest(unfinished.run).keys() == before.keys()


@pytest.mark.parametrize("file", ["journal.jsonl", "stage-0000.safetensors", "stage-0001.safetensors"])
def test_a_changed_byte_is_found_and_the_file_named(file: str, unfinished: Unfinished) -> None:
    path = unfinished.run / file
    whole_file = path.read_bytes()
    for position in (0, 7, 70, len(whole_file) // 3, len(whole_file) // 2, len(whole_file) - 2):
        changed = bytearray(whole_file)
        changed[position] ^= 1
        path.write_bytes(changed)
        with pytest.raises(ResumeError, match=rf"{file}: .*restore the file, or remove .*out\.partial-run to start over"):
            unfinished.resume()
    path.write_bytes(whole_file)
    assert unfinished.resume().resumed == "resumed after stage 2 of 4"


@pytest.mark.parametrize("file", ["stage-0000.safetensors", "journal.jsonl"])
def test_a_file_that_is_gone_or_cut_off_is_named(file: str, unfinished: Unfinished) -> None:
    path = unfinished.run / file
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 4])
    with pytest.raises(ResumeError, match=file):
        unfinished.resume()
    path.unlink()
    with pytest.raises(ResumeError, match=rf"{file}: is gone"):
        unfinished.resume()
    path.write_bytes(content)
    assert unfinished.resume().resumed is not None


def test_a_last_line_without_its_end_is_done_again(unfinished: Unfinished, whole: dict[str, str]) -> None:
    journal = unfinished.run / "journal.jsonl"
    content = journal.read_bytes()
    journal.write_bytes(content[:-20])
    (unfinished.run / "stage-0002.safetensors.partial").write_bytes(b"half of")
    (unfinished.run / "stage-0002.safetensors").write_bytes(b"written, but not in the journal")
    with pytest.raises(ResumeError, match=r"ends after stage 1, though stage-0002\.safetensors is there"):
        unfinished.resume()  # a kill leaves one stage without a line, not two
    (unfinished.run / "stage-0002.safetensors").unlink()
    assert unfinished.resume().resumed == "resumed after stage 1 of 4"
    assert digest(unfinished.out) == whole


def test_what_an_interrupted_write_of_any_library_leaves_is_cleared(unfinished: Unfinished, whole: dict[str, str]) -> None:
    (unfinished.run / ".tmpAb3dE9").write_bytes(b"half of")  # safetensors, as earlier releases called it
    (unfinished.run / "stage-0001.safetensors.partial").write_bytes(b"half of")  # of an earlier release, too
    place = unfinished.run / "stage-0002.safetensors.partial"
    place.mkdir()
    for name in (".tmpXyZ123", "stage-0002.safetensors", "whatever"):
        (place / name).write_bytes(b"half of")
    assert unfinished.resume().resumed == "resumed after stage 2 of 4"
    assert digest(unfinished.out) == whole
    assert not unfinished.run.exists()


@pytest.mark.parametrize("name", ["notes.partial", ".tmp", ".tmpshort", "tmpAb3dE9", "model.safetensors.partial"])
def test_what_no_write_of_ours_leaves_is_somebody_elses(name: str, unfinished: Unfinished) -> None:
    (unfinished.run / name).write_text("precious")
    with pytest.raises(OutputError, match=f"is no run folder, for it holds {name}"):
        unfinished.resume()
    assert (unfinished.run / name).read_text() == "precious"


def test_the_advice_for_a_damaged_file_works(unfinished: Unfinished, whole: dict[str, str]) -> None:
    (unfinished.run / "stage-0001.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ResumeError, match=r"keep the first 2 lines of journal\.jsonl and the first 1 stage files, and resume there"):
        unfinished.resume()
    lines = (unfinished.run / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (unfinished.run / "journal.jsonl").write_bytes(b"".join(lines[:2]))
    (unfinished.run / "stage-0001.safetensors").unlink()
    assert unfinished.resume().resumed == "resumed after stage 1 of 4"
    assert digest(unfinished.out) == whole


def test_two_runs_in_one_folder(unfinished: Unfinished) -> None:
    with (unfinished.run / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for resume in (False, True):
            with pytest.raises(ResumeError, match=rf"another run works in this folder \(process {os.getpid()}\)"):
                unfinished.go(resume=resume)
    assert unfinished.resume().resumed is not None  # the number of a dead process in the file is no obstacle


def test_a_foreign_folder_is_left_alone(unfinished: Unfinished, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(OutputError, match=r"is no run folder, for it holds thesis\.txt"):
            unfinished.go(run_dir=mine, resume=resume)
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]
    for bad in (unfinished.model / "run", unfinished.out / "run", unfinished.out.parent):
        with pytest.raises(OutputError):
            unfinished.go(run_dir=bad)


def test_a_folder_that_cannot_be_written_is_named(unfinished: Unfinished, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(unfinished.run)
    plain_open = os.open

    def read_only(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:  # a superuser may write wherever the mode says no
        if flags & (os.O_WRONLY | os.O_RDWR) and str(unfinished.run) in str(path):
            raise OSError(30, os.strerror(30))
        return plain_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(OutputError, match=r"out\.partial-run: cannot be used as run folder \(Read-only file system\)"):
        unfinished.resume()
    monkeypatch.undo()
    assert digest(unfinished.run) == before
    if os.geteuid():
        unfinished.run.chmod(stat.S_IRUSR | stat.S_IXUSR)
        with pytest.raises((OutputError, CheckpointError)):
            unfinished.resume()
        unfinished.run.chmod(stat.S_IRWXU)
    assert unfinished.resume().resumed is not None


def test_a_finished_run_has_nothing_to_resume(unfinished: Unfinished, whole: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    unfinished.resume()
    with pytest.raises(AlreadyDoneError, match="result of this very run"):
        unfinished.resume()
    with pytest.raises(OutputError, match="result of another run"):
        unfinished.resume(seed=1)
    with pytest.raises(OutputError, match="not empty"):
        unfinished.go()
    assert digest(unfinished.out) == whole


def test_a_finished_run_that_was_damaged_is_not_called_finished(unfinished: Unfinished) -> None:
    unfinished.resume()
    weights = unfinished.out / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    for damage, words in ((bytes(content), "is not what was written"), (b"xx", "a file")):
        weights.write_bytes(damage)
        with pytest.raises(ResumeError, match=words):
            unfinished.resume()


@pytest.mark.parametrize("name", [".DS_Store", ".nfs0000001", "Thumbs.db"])
def test_what_systems_put_into_any_folder_is_no_obstacle(name: str, unfinished: Unfinished, whole: dict[str, str]) -> None:
    (unfinished.run / name).write_bytes(b"x")
    assert unfinished.resume().resumed is not None
    assert digest(unfinished.out) == whole


def test_a_disk_without_room_is_known_when_resuming(unfinished: Unfinished, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(unfinished.out.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(CheckpointError, match=r"this run will write about [\d,]+ bytes there, and 100 are free"):
        unfinished.resume()


def test_a_finished_run_discards_no_other_run(unfinished: Unfinished) -> None:
    unfinished.resume()
    with stopping_at(6), pytest.raises(KeyboardInterrupt):
        unfinished.go(seed=1, output_dir=unfinished.out.with_name("second"))
    other = unfinished.out.with_name("second.partial-run")
    with pytest.raises(AlreadyDoneError):
        unfinished.resume(run_dir=other)
    result = unfinished.resume(seed=1, output_dir=unfinished.out.with_name("second"))
    assert result.resumed == "resumed after stage 1 of 4"


def test_a_model_in_memory_is_resumed_by_an_equal_model(unfinished: Unfinished) -> None:
    from transformers import AutoModelForCausalLM

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(unfinished.model, dtype="auto")

    ids = load_file(unfinished.tokens)["input_ids"].long()
    kept = unfinished.out.with_name("kept")
    with stopping_at(10), pytest.raises(KeyboardInterrupt):
        oneshot(load(), recipe=RECIPE, dataset=ids, run_dir=kept, passes="two")
    other = load()
    other.model.norm.weight.data[0] += 1
    with pytest.raises(ResumeError, match=r"model\.tensors was"):
        oneshot(other, recipe=RECIPE, dataset=ids, run_dir=kept, resume=True, passes="two")
    resumed = oneshot(load(), recipe=RECIPE, dataset=ids, run_dir=kept, resume=True, passes="two")
    plain = oneshot(load(), recipe=RECIPE, dataset=ids, passes="two")
    assert resumed.resumed == "resumed after stage 2 of 4"
    assert resumed.report == plain.report
    states = resumed.model.state_dict(), plain.model.state_dict()
    assert list(states[0]) == list(states[1])
    assert all(
        torch.equal(states[0][name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)) for name, tensor in states[1].items()
    )
    assert not kept.exists()
    with pytest.raises(ResumeError, match="neither output_dir nor run_dir"):
        oneshot(load(), recipe=RECIPE, dataset=ids, resume=True)


def test_the_command_line(unfinished: Unfinished, whole: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "elsewhere"
    unfinished.run.rename(kept)
    command = ["oneshot", str(unfinished.model), "--recipe", json.dumps(RECIPE), "--dataset", str(unfinished.tokens)]
    command += ["--output-dir", str(unfinished.out), "--run-dir", str(kept), "--passes", "two"]
    assert main([*command, "--quiet"]) == 1
    assert "2 of 4 stages are finished" in capsys.readouterr().err
    with stopping_at(6):
        assert main([*command, "--resume", "--quiet"]) == 130
    assert f"interrupted; 3 of 4 stages are finished and kept in {kept}" in " ".join(capsys.readouterr().err.split())
    assert main([*command, "--resume"]) == 0
    shown = capsys.readouterr()
    assert "resumed after stage 3 of 4" in shown.out
    assert "resumed after stage 3 of 4; stage 4 of 4, error up to" in " ".join(shown.err.split())
    assert digest(unfinished.out) == whole
    assert not kept.exists()
    assert main([*command, "--resume", "--json"]) == 0
    shown = capsys.readouterr()
    assert "nothing is left to resume" in shown.err
    assert json.loads(shown.out)["pipeline"] == "sequential"


def test_resume_where_nothing_is_kept_begins_at_the_beginning(unfinished: Unfinished, whole: dict[str, str]) -> None:
    fresh = unfinished.out.with_name("fresh")
    result = unfinished.resume(output_dir=fresh)
    assert result.resumed is None
    assert digest(fresh) == whole
