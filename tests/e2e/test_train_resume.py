"""A training killed at whatever moment, once or twice, goes on to the bytes of one that never stopped; another run never goes on from it"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor import train
from compressor.cli.main import main
from compressor.errors import OutputError, ResumeError
from tests import tiny

LAYERS = ["re:.*mlp.*_proj"]
GRADUAL = {"MagnitudePruningModifier": {"targets": LAYERS, "start": 1, "end": 9, "update": 2, "final_sparsity": 0.5, "leave_enabled": True}}
WEIGHTS = {"num_bits": 4, "group_size": 16, "strategy": "group"}
INPUTS = {"num_bits": 8, "strategy": "tensor", "dynamic": False, "observer": "minmax"}
AWARE = {
    "QuantizationModifier": {
        "targets": LAYERS,
        "start": 2,
        "end": 10,
        "disable_quantization_observer_epoch": 7,
        "config_groups": {"g": {"targets": LAYERS, "weights": WEIGHTS, "input_activations": INPUTS}},
    }
}
COMMON = {"steps": 12, "batch_size": 2, "accumulate": 2, "learning_rate": 1e-2, "warmup_steps": 2, "save_every": 3, "max_seq_length": 8}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"mode": "eager", "ema": [0.9, 0.5], "ema_warmup": True, "save_ema": 0.9, "eval_every": 4, "autocast": "bf16"},
    "replayed": {"mode": "replay", "weight_decay": 0.1},
    "gradual pruning": {"mode": "eager", "recipe": GRADUAL, "ema": [0.5], "save_ema": 0.5},
    "quantization-aware": {"mode": "eager", "recipe": AWARE},
    "quantization-aware, replayed": {"mode": "replay", "recipe": {**GRADUAL, **AWARE}},
}
ENDS_IN_HALF = {"write", "write_bytes", "write_text", "copyfile", "serialize_file"}  # calls that a kill can leave half done


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


class Killer:
    """Sends trainings to the process of kill_server.py, each into a folder of its own."""

    def __init__(self, folder: Path, send: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.folder, self.inputs, self.send = folder, make_inputs(folder), send
        self.references: dict[str, tuple[dict[str, str], list[str]]] = {}
        self.count = 0
        self.ask("replayed", self.new_folder(), warm=True)

    def ask(self, name: str, folder: Path, **request: Any) -> dict[str, Any]:
        content = {"verb": "train", **self.inputs, **COMMON, **CASES[name], "output_dir": str(folder / "out")}
        content |= request if "warm" in request else {"kill": None, **request}
        return self.send(content)

    def new_folder(self) -> Path:
        self.count += 1
        folder = self.folder / f"run{self.count}"
        folder.mkdir()
        return folder

    def reference(self, name: str) -> tuple[dict[str, str], list[str]]:
        """Files and disk calls of a run that nobody stops."""
        if name not in self.references:
            folder = self.new_folder()
            done = self.ask(name, folder)
            assert done["error"] is None and done["signal"] is None, done
            self.references[name] = digest(folder / "out"), done["events"]
        return self.references[name]

    def resumes(self, name: str, folder: Path, where: str) -> str | None:
        """Resume, and see that everything is as if nobody had stopped the run."""
        done = self.ask(name, folder, resume=True)
        assert done["error"] is None or done["error"].startswith("AlreadyDoneError"), f"{where}: {done['error']}"
        assert digest(folder / "out") == self.reference(name)[0], where
        assert [path.name for path in folder.iterdir()] == ["out"], where
        shutil.rmtree(folder)
        return done["resumed"]


def make_inputs(folder: Path) -> dict[str, Any]:
    tiny.llama(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32, attention_dropout=0.1).bfloat16().save_pretrained(
        folder / "model"
    )
    ids = torch.randint(0, 64, (11, 16), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    save_file({"input_ids": ids}, folder / "tokens.safetensors")
    save_file({"input_ids": ids[:2]}, folder / "heldout.safetensors")
    data = {name: str(folder / f"{file}.safetensors") for name, file in (("dataset", "tokens"), ("eval_dataset", "heldout"))}
    return {"model": str(folder / "model"), **data}


@pytest.fixture(scope="module")
def killer(tmp_path_factory: pytest.TempPathFactory, kill_server: Callable[[dict[str, Any]], dict[str, Any]]) -> Killer:
    return Killer(tmp_path_factory.mktemp("train-resume"), kill_server)


def moments(events: list[str]) -> list[tuple[int, str]]:
    """Every place where a run can be killed between two calls or inside one."""
    return [
        (number, moment)
        for number, event in enumerate(events)
        for moment in ("before", "middle", "after")
        if moment != "middle" or event.split()[0] in ENDS_IN_HALF
    ]


def kill_and_resume(killer: Killer, name: str, places: list[tuple[int, str]]) -> None:
    events = killer.reference(name)[1]
    for number, moment in places:
        folder = killer.new_folder()
        done = killer.ask(name, folder, kill={"event": number, "moment": moment})
        assert done["signal"] == signal.SIGKILL, done
        killer.resumes(name, folder, f"killed {moment} {events[number]}")


@pytest.mark.parametrize("name", CASES)
def test_a_run_killed_at_any_moment_goes_on_to_the_same_bytes(killer: Killer, name: str) -> None:
    events = killer.reference(name)[1]
    places = moments(events)
    assert len(places) > 60 and sum("state-" in event for event in events) >= 12
    kill_and_resume(killer, name, random.Random(name).sample(places, 2 if CASES[name]["mode"] == "eager" else 1))


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_training_killed_at_every_moment(killer: Killer, name: str) -> None:
    kill_and_resume(killer, name, moments(killer.reference(name)[1]))


def test_a_kill_in_the_midst_of_a_file_leaves_nothing_that_stops_the_next_run(killer: Killer) -> None:
    """safetensors writes into a temporary file of a name of its own; the kernel kills it in there."""
    events = killer.reference("plain")[1]
    writes = [number for number, event in enumerate(events) if event.startswith("serialize_file")]
    assert len(writes) >= 3
    kill_and_resume(killer, "plain", [(writes[0], "middle"), (writes[-1], "middle")])


@pytest.mark.parametrize(("name", "steps"), [("gradual pruning", (3, 6, 9)), ("quantization-aware", (3, 6, 9))])
def test_modifiers_go_on_from_every_state(killer: Killer, name: str, steps: tuple[int, ...]) -> None:
    """Behind each saved state in turn: before, within and after what the modifiers do."""
    events = killer.reference(name)[1]
    for step in steps:
        folder = killer.new_folder()
        number = max(at for at, event in enumerate(events) if f"state-{step:08d}" in event and event.startswith("replace"))
        assert killer.ask(name, folder, kill={"event": number, "moment": "after"})["signal"] == signal.SIGKILL
        assert killer.resumes(name, folder, f"after step {step}") == f"resumed after step {step} of 12"


@pytest.mark.nightly
def test_a_run_killed_twice_goes_on_in_another_mode(killer: Killer) -> None:
    events, folder = killer.reference("plain")[1], killer.new_folder()
    for place in (0.4, 0.2):
        at = int(len(events) * place)
        killer.ask("plain", folder, kill={"event": at, "moment": "after"}, resume=folder.joinpath("out.partial-run").exists())
    done = killer.ask("plain", folder, resume=True, mode="replay", check_every=3, audit_every=4, save_every=5)
    assert done["error"] is None and digest(folder / "out") == killer.reference("plain")[0]


def test_a_full_disk_stops_the_run_with_its_states_whole(killer: Killer) -> None:
    events, folder = killer.reference("plain")[1], killer.new_folder()
    second = next(number for number, event in enumerate(events) if event.startswith("serialize_file") and "state-00000006" in event)
    done = killer.ask("plain", folder, kill={"full_from": second})
    assert done["error"].startswith("CheckpointError") and "state-00000006.safetensors: cannot be written" in done["error"]
    assert killer.resumes("plain", folder, "disk full") == "resumed after step 3 of 12"


@pytest.mark.nightly
def test_a_real_command_killed_by_sigkill_goes_on(tmp_path: Path, repo_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = make_inputs(tmp_path)
    flags = ["--dataset", inputs["dataset"], "--steps", "24", "--batch-size", "2", "--learning-rate", "1e-2", "--save-every", "2"]
    command = ["train", inputs["model"], *flags, "--mode", "eager", "--quiet", "--output-dir"]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": str(repo_root)}
    process = subprocess.Popen(
        [sys.executable, "-m", "compressor.cli.main", *command, str(tmp_path / "o")], env=environment, stdout=subprocess.DEVNULL
    )
    while process.poll() is None and len(list((tmp_path / "o.partial-run").glob("state-*.safetensors"))) < 2:
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL and not (tmp_path / "o").exists()
    assert main([*command, str(tmp_path / "o")]) == 1
    assert "holds a training that did not end" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "o"), "--resume"]) == 0
    assert "resumed after step" in capsys.readouterr().out
    assert main([*command, str(tmp_path / "whole")]) == 0 and "to resume" not in capsys.readouterr().out
    assert main([*command, str(tmp_path / "fresh"), "--resume"]) == 0
    assert "nothing of an earlier run was there to resume: begun at the beginning" in capsys.readouterr().out
    assert digest(tmp_path / "o") == digest(tmp_path / "whole")
    capsys.readouterr()
    assert main([*command, str(tmp_path / "o"), "--resume", "--json"]) == 0
    shown = capsys.readouterr()
    assert "nothing is left to resume" in shown.err and json.loads(shown.out)["training"]["steps"] == 24


# ---- what is not gone on from ----


@pytest.fixture
def stopped(tmp_path: Path) -> dict[str, Any]:
    """A run of 12 steps that broke off after 6; its arguments."""
    given = {**make_inputs(tmp_path), **COMMON, "output_dir": str(tmp_path / "o"), "run_dir": str(tmp_path / "states"), "mode": "eager"}

    class Fall:
        def task(self, description: str, total: int) -> Any:
            from contextlib import nullcontext

            self.seen = 0
            return nullcontext(self)

        def advance(self, amount: int = 1, note: str | None = None) -> None:
            self.seen += amount
            if self.seen == 8:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(**given, progress=Fall())
    assert sorted(path.name for path in (tmp_path / "states").glob("state-*")) == [f"state-0000000{n}.safetensors" for n in (3, 6)]
    return given


def test_what_an_interrupted_write_leaves_is_cleared(stopped: dict[str, Any]) -> None:
    folder = Path(stopped["run_dir"])
    (folder / ".tmpAb3dE9").write_bytes(b"half of")
    (folder / "state-00000009.safetensors.partial").mkdir()
    (folder / "state-00000009.safetensors.partial" / ".tmpXyZ123").write_bytes(b"half of")
    assert train(**stopped, resume=True).resumed == "resumed after step 6 of 12"
    assert not folder.exists()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"steps": 13}, "steps was 12 and is 13"),
        ({"learning_rate": 1e-3}, "settings.learning_rate was 0.01 and is 0.001"),
        ({"recipe": GRADUAL}, "recipe was not given and is"),
        ({"ema": [0.9]}, "settings.ema"),
        ({"max_seq_length": 16, "batch_size": 1}, "data.sha256 was"),
        ({"eval_dataset": None}, "eval_data"),
        ({"save_dtype": "float32"}, "settings.save_dtype was 'auto' and is 'float32'"),
    ],
)
def test_other_settings_are_refused_by_name(stopped: dict[str, Any], changed: dict[str, Any], words: str) -> None:
    before = digest(Path(stopped["run_dir"]))
    with pytest.raises(ResumeError, match="holds another run and cannot be resumed with this one") as info:
        train(**{**stopped, **changed}, resume=True)
    assert words in str(info.value)
    assert digest(Path(stopped["run_dir"])) == before


def test_another_model_is_refused(stopped: dict[str, Any]) -> None:
    path = Path(stopped["model"]) / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] += 1
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ResumeError, match=r"model\.files\.model\.safetensors was"):
        train(**stopped, resume=True)


def test_a_damaged_state_is_named_and_the_one_before_it_taken(stopped: dict[str, Any], tmp_path: Path) -> None:
    whole = train(**{**stopped, "output_dir": str(tmp_path / "whole"), "run_dir": None})
    newest = Path(stopped["run_dir"]) / "state-00000006.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 4
    newest.write_bytes(content)
    result = train(**stopped, resume=True)
    assert result.resumed.startswith("resumed after step 3 of 12 (") and "does not hold what was written" in result.resumed
    assert result.losses == whole.losses and digest(tmp_path / "o") == digest(tmp_path / "whole")


def test_a_run_folder_without_a_whole_state_or_with_strangers_is_refused(stopped: dict[str, Any], tmp_path: Path) -> None:
    states = Path(stopped["run_dir"])
    for path in states.glob("state-*"):
        path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ResumeError, match="to start over"):
        train(**stopped, resume=True)
    (states / "run.json").unlink()
    with pytest.raises(ResumeError, match="is gone, though states are there"):
        train(**stopped, resume=True)
    (states / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"holds notes\.txt"):
        train(**stopped, resume=True)
    with pytest.raises(ResumeError, match="neither output_dir nor run_dir"):
        train(**{**stopped, "output_dir": None, "run_dir": None}, resume=True)
    with pytest.raises(OutputError, match="lie one in the other"):
        train(**{**stopped, "run_dir": str(tmp_path / "o" / "states")})


def test_two_runs_do_not_share_a_folder(stopped: dict[str, Any]) -> None:
    from compressor.pipelines.journal.run_folder import RunFolder

    folder = RunFolder(Path(stopped["run_dir"]))
    folder.lock()
    with pytest.raises(ResumeError, match="another run works in this folder"):
        train(**stopped, resume=True)
    folder.unlock()
    assert train(**stopped, resume=True).resumed == "resumed after step 6 of 12"


def test_resume_where_nothing_is_kept_begins_at_the_beginning_and_another_result_is_kept(stopped: dict[str, Any], tmp_path: Path) -> None:
    fresh = {**stopped, "run_dir": None, "output_dir": str(tmp_path / "fresh")}
    assert train(**fresh, resume=True).resumed is None
    with pytest.raises(OutputError, match="holds the result of another run"):
        train(**{**fresh, "seed": 5}, resume=True)
