"""A run killed at whatever moment, once or twice, resumes to the bytes of a run that never stopped, and nothing else stays on the disk"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests import tiny

INT4 = {"num_bits": 4, "group_size": 32, "strategy": "group"}
MLP, ATTENTION = "re:.*mlp.*_proj", "re:.*self_attn.*_proj"
# Two modifiers, of which one observes static inputs and the other quantizes a layer outside of all stages, too.
MIXED = {
    "quant_stage": {
        "quant_modifiers": {
            "GPTQModifier": {"targets": [MLP, "lm_head"], "config_groups": {"g": {"targets": [MLP, "lm_head"], "weights": INT4}}},
            "QuantizationModifier": {"targets": [ATTENTION], "scheme": "FP8"},
        }
    }
}
LAYERS = {"GPTQModifier": {"ignore": ["lm_head"], "config_groups": {"g": {"targets": ["Linear"], "weights": INT4}}}}
ROUND = {"QuantizationModifier": {"ignore": ["lm_head"], "config_groups": {"g": {"targets": ["Linear"], "weights": INT4}}}}
BY_HEADS = {"targets": ["LlamaAttention"], "input_activations": {"num_bits": 8, "type": "float", "strategy": "attn_head"}}

CASES: dict[str, dict[str, Any]] = {
    "mixed": {"recipe": MIXED, "passes": "two"},
    "layers": {"recipe": LAYERS},
    "float propagation": {"recipe": LAYERS, "propagate_error": False},
    "suspended": {"recipe": MIXED, "engine": "suspend"},
    "small targets": {"recipe": LAYERS, "sequential_targets": ["LlamaMLP", "LlamaAttention"]},
    "basic": {"recipe": MIXED, "pipeline": "basic"},
    "data free": {"recipe": ROUND, "dataset": None},
    "ranges of queries, keys and values": {
        "recipe": {"GPTQModifier": {"ignore": ["lm_head"], "config_groups": LAYERS["GPTQModifier"]["config_groups"] | {"a": BY_HEADS}}}
    },
    "siblings in stages of their own": {
        "recipe": {"GPTQModifier": {"ignore": ["lm_head"], "scheme": "NVFP4A16"}},
        "sequential_targets": ["re:.*_proj"],
    },
    "learned rounding": {"recipe": {"AutoRoundModifier": LAYERS["GPTQModifier"] | {"iters": 3, "batch_size": 2}}},
    "learned rounding, suspended": {
        "recipe": {"AutoRoundModifier": LAYERS["GPTQModifier"] | {"iters": 3, "batch_size": 2}},
        "engine": "suspend",
    },
    "tuned": {"recipe": LAYERS | {"ScaleTuningModifier": {"steps": 4, "batch_size": 2, "evaluate_every": 1}}},
    "noted by the plan": {
        "recipe": {
            "AutoRoundModifier": {"config_groups": {"g": {"targets": [MLP], "weights": INT4}}, "iters": 2, "batch_size": 2},
            "QuantizationModifier": {
                "config_groups": {"g": {"targets": [ATTENTION], "weights": INT4}},
                "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
            },
        }
    },
    "pruned before": {"recipe": {"MagnitudePruningModifier": {"targets": [MLP], "final_sparsity": 0.5}} | LAYERS},
    "experts": {"recipe": {"GPTQModifier": LAYERS["GPTQModifier"] | {"ignore": ["lm_head", "re:.*gate$"]}}, "model": "experts"},
}
ENDS_IN_HALF = {"write", "write_bytes", "write_text", "copyfile", "serialize_file"}  # calls that a kill can leave half done


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


class Killer:
    """Sends runs to the process of kill_server.py, each into a folder of its own."""

    def __init__(self, folder: Path, send: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.folder, self.inputs, self.send = folder, _inputs(folder), send
        self.references: dict[str, tuple[dict[str, str], list[str], list[str], float]] = {}
        self.folders: dict[str, Path] = {}  # of the references
        self.count = 0
        self.ask(CASES["mixed"], self.new_folder(), warm=True)

    def ask(self, case: dict[str, Any], folder: Path, **request: Any) -> dict[str, Any]:
        case = case | ({"model": str(self.folder / case["model"])} if "model" in case else {})
        content = {**self.inputs, **case, "output_dir": str(folder / "out"), **({} if "warm" in request else {"kill": None}), **request}
        return self.send(content)

    def new_folder(self) -> Path:
        self.count += 1
        folder = self.folder / f"run{self.count}"
        folder.mkdir()
        return folder

    def reference(self, name: str) -> tuple[dict[str, str], list[str], list[str], float]:
        """Files, report and disk calls of a run that nobody stops, and how long it takes."""
        if name not in self.references:
            folder = self.folders[name] = self.new_folder()
            done = self.ask(CASES[name], folder)
            assert done["error"] is None and done["signal"] is None
            self.references[name] = (digest(folder / "out"), done["modules"], done["events"], done["seconds"])
        return self.references[name]

    def resumes(self, name: str, folder: Path, where: str) -> str | None:
        """Resume, and see that everything is as if nobody had stopped the run."""
        done = self.ask(CASES[name], folder, resume=True)
        files, modules, _, _ = self.reference(name)
        if done["error"] is not None:
            assert done["error"].startswith("AlreadyDoneError"), f"{where}: {done['error']}"
        else:
            assert done["modules"] == modules, where
        assert digest(folder / "out") == files, where
        assert [path.name for path in folder.iterdir()] == ["out"], where
        shutil.rmtree(folder)
        return done["resumed"]


def _inputs(folder: Path) -> dict[str, Any]:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tiny.llama(num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32).bfloat16().save_pretrained(
        folder / "model"
    )
    tiny.qwen3_moe(
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=16, moe_intermediate_size=32
    ).bfloat16().save_pretrained(folder / "experts")
    words = Tokenizer(models.WordLevel({chr(97 + i): i for i in range(26)}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a", pad_token="a").save_pretrained(folder / "model")
    ids = torch.randint(0, 64, (6, 16), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    save_file({"input_ids": ids}, folder / "tokens.safetensors")
    return {"model": str(folder / "model"), "dataset": str(folder / "tokens.safetensors")}


@pytest.fixture(scope="module")
def killer(tmp_path_factory: pytest.TempPathFactory, kill_server: Callable[[dict[str, Any]], dict[str, Any]]) -> Killer:
    return Killer(tmp_path_factory.mktemp("resume"), kill_server)


def moments(events: list[str]) -> list[tuple[int, str]]:
    """Every place where a run can be killed between two calls or inside one."""
    return [
        (number, moment)
        for number, event in enumerate(events)
        for moment in ("before", "middle", "after")
        if moment != "middle" or event.split()[0] in ENDS_IN_HALF
    ]


def kill_and_resume(killer: Killer, name: str, chosen: list[tuple[int, str]]) -> set[str | None]:
    events = killer.reference(name)[2]
    resumed = set()
    for number, moment in chosen:
        folder = killer.new_folder()
        killed = killer.ask(CASES[name], folder, kill={"event": number, "moment": moment})
        assert killed["signal"] == 9, f"nothing was killed {moment} {number} ({events[number]})"
        resumed.add(killer.resumes(name, folder, f"killed {moment} call {number}, {events[number]}"))
    return resumed


def test_killed_at_every_kind_of_write(killer: Killer) -> None:
    events = killer.reference("mixed")[2]
    kinds = {event.split()[0] for event in events}
    assert kinds >= {"mkdir", "write", "fsync", "ftruncate", "replace", "rename", "unlink", "rmdir", "serialize_file", "write_bytes"}
    inside = [moment for moment in moments(events) if moment[1] == "middle"][::3]  # at night all of them, and in all settings
    between = [moment for moment in moments(events) if moment[1] != "middle"][::45]
    assert len(inside) + len(between) >= 8
    resumed = kill_and_resume(killer, "mixed", inside + between)
    assert resumed == {None, *(f"resumed after stage {number} of 3" for number in (1, 2, 3))}


@pytest.mark.parametrize("name", [name for name in CASES if name != "mixed"])
def test_killed_in_other_pipelines_and_settings(name: str, killer: Killer) -> None:
    events = killer.reference(name)[2]
    lines = [number for number, event in enumerate(events) if event.startswith("replace stage-")]
    behind_a_stage = (lines[len(lines) // 2] + 5, "after") if lines else (0, "after")  # its line is in the journal, and flushed
    resumed = kill_and_resume(killer, name, [behind_a_stage, random.Random(name).choice(moments(events))])
    assert not lines or resumed != {None}


@pytest.mark.nightly
def test_killed_between_blocks_whose_rounding_is_learned(killer: Killer) -> None:
    for name in ("learned rounding", "learned rounding, suspended"):
        lines = [number for number, event in enumerate(killer.reference(name)[2]) if event.startswith("replace stage-")]
        assert kill_and_resume(killer, name, [(lines[1] + 5, "after")]) == {"resumed after stage 2 of 3"}


@pytest.mark.nightly
def test_killed_while_scales_are_trained(killer: Killer) -> None:
    """Training keeps nothing: it begins anew behind the last stage, without any stage being forwarded, and ends with the same bytes."""
    events = killer.reference("tuned")[2]
    end = next(number for number, event in enumerate(events) if event.startswith("replace end"))
    assert kill_and_resume(killer, "tuned", [(end + 5, "after")]) == {"resumed after stage 12 of 12"}


def test_killed_behind_the_last_stage(killer: Killer) -> None:
    """No stage is planned anew then: what the plan has noted comes back all the same, and in its place."""
    events = killer.reference("noted by the plan")[2]
    record = killer.folders["noted by the plan"] / "out" / "compression.json"
    assert any("calibrated as a whole" in note for note in json.loads(record.read_text(encoding="utf-8"))["notes"])
    end = next(number for number, event in enumerate(events) if event.startswith("replace end"))
    assert kill_and_resume(killer, "noted by the plan", [(end + 5, "after")]) == {"resumed after stage 3 of 3"}


@pytest.mark.nightly
def test_killed_between_layers_that_share_a_scale(killer: Killer) -> None:
    """The scale of q_proj, k_proj and v_proj follows from all three, also where the first of them is a stage that is over."""
    name = "siblings in stages of their own"
    lines = [number for number, event in enumerate(killer.reference(name)[2]) if event.startswith("replace stage-")]
    kill_and_resume(killer, name, [(lines[stage] + 5, "after") for stage in (0, 4, 7, 11)])


@pytest.mark.nightly
def test_killed_again_while_it_resumes(killer: Killer) -> None:
    draw = random.Random(1)
    num_events = len(killer.reference("mixed")[2])
    for _ in range(3):
        folder = killer.new_folder()
        first, second = draw.randrange(12, num_events), draw.randrange(6, num_events - 15)
        killer.ask(CASES["mixed"], folder, kill={"event": first, "moment": "after"})
        killer.ask(CASES["mixed"], folder, resume=True, kill={"event": second, "moment": "middle"})
        killer.resumes("mixed", folder, f"killed at calls {first} and {second}")


@pytest.mark.parametrize("kind", ["KILL", "INT"])
def test_stopped_by_the_clock(kind: str, killer: Killer) -> None:
    draw = random.Random(kind)
    seconds = killer.reference("mixed")[3]
    for _ in range(2):
        folder, moment = killer.new_folder(), draw.uniform(0, seconds)
        stopped = killer.ask(CASES["mixed"], folder, kill={"seconds": moment, "signal": kind})
        resumed = killer.resumes("mixed", folder, f"{kind} after {moment:.3f} s")
        if kind == "INT" and stopped["error"] is not None:
            assert stopped["error"].startswith("KeyboardInterrupt")
            assert ("--resume" in stopped["error"]) == (resumed is not None)


@pytest.mark.parametrize("share", [0.15, 0.4, 0.6, 0.75])
def test_a_full_disk_is_named_and_loses_nothing(share: float, killer: Killer) -> None:
    folder = killer.new_folder()
    number = int(len(killer.reference("mixed")[2]) * share)
    failed = killer.ask(CASES["mixed"], folder, kill={"full_from": number})
    assert failed["signal"] is None
    assert failed["error"].startswith("CheckpointError") and "No space left" in failed["error"]
    kept = sum(path.read_text().count('"kind":"stage"') for path in folder.rglob("journal.jsonl"))  # a file may lack its line
    assert not list(folder.rglob("*.partial"))
    resumed = killer.resumes("mixed", folder, f"full from call {number}")
    assert resumed == (f"resumed after stage {kept} of 3" if kept else None)


def test_a_file_that_cannot_grow_is_named(killer: Killer) -> None:
    folder = killer.new_folder()
    failed = killer.ask(CASES["mixed"], folder, kill={"file_size": 15_000})
    assert failed["error"].startswith("CheckpointError") and "File too large" in failed["error"]
    killer.resumes("mixed", folder, "files of 15 kB at most")


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_killed_at_every_moment(name: str, killer: Killer) -> None:
    kill_and_resume(killer, name, moments(killer.reference(name)[2]))


@pytest.mark.nightly
def test_killed_twice_at_random(killer: Killer) -> None:
    draw = random.Random(5)
    possible = moments(killer.reference("mixed")[2])
    for _ in range(60):
        folder = killer.new_folder()
        for resume in (False, True):
            number, moment = draw.choice(possible)
            killer.ask(CASES["mixed"], folder, resume=resume, kill={"event": number, "moment": moment})
        killer.resumes("mixed", folder, "killed twice")


@pytest.mark.nightly
def test_the_command_killed_by_the_clock(killer: Killer, repo_root: Path) -> None:
    files, draw = killer.reference("mixed")[0], random.Random(7)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(repo_root)}

    def command(folder: Path, *flags: str) -> list[str]:
        arguments = [killer.inputs["model"], "--dataset", killer.inputs["dataset"], "--recipe", json.dumps(MIXED), "--quiet"]
        return [sys.executable, "-m", "compressor.cli.main", "oneshot", *arguments, "--output-dir", str(folder / "out"), *flags]

    begun = time.perf_counter()
    subprocess.run(command(killer.new_folder()), env=environment, check=True, capture_output=True)
    seconds = time.perf_counter() - begun
    for _ in range(12):
        folder = killer.new_folder()
        process = subprocess.Popen(command(folder), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(draw.uniform(0.6 * seconds, seconds))
        process.kill()
        process.wait()
        done = subprocess.run(command(folder, "--resume"), env=environment, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert digest(folder / "out") == files
        assert [path.name for path in folder.iterdir()] == ["out"]
