"""Where a state of a run folder is damaged, wherever in the file, the one before it is taken, and named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compressor.errors import ResumeError
from compressor.training import Snapshot, Trainer, TrainStep, adamw, load_training
from compressor.training_run.states import opened


def classify(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch["x"]), batch["y"])


def batch_at(number: int) -> dict[str, Tensor]:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(number))
    return {"x": x, "y": (x.sum(1) > 0).long()}


def trainer() -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    return Trainer(TrainStep(model, classify, adamw(model.parameters())))


def test_an_older_state_that_somebody_made_a_folder_goes_as_others_do(tmp_path: Path) -> None:
    whole, state = trainer(), tmp_path / "run" / "state-00000001.safetensors"
    with opened(tmp_path / "run", {"model": "one"}, resume=False, output_dir=None) as states:
        for number in (1, 2, 3):
            if number == 3:
                state.unlink()
                state.mkdir()
            whole.fit(batch_at, number)
            states.save(whole, {})
        assert [path.name for path in sorted(state.parent.glob("state-*"))] == [f"state-0000000{number}.safetensors" for number in (2, 3)]


def test_a_state_of_another_run_is_left_out_and_named(tmp_path: Path) -> None:
    for seed in (0, 1):
        run: Any = {"model": "one", "seed": seed, "machine": {"cores": 2}}
        whole = trainer()
        with opened(tmp_path / f"run{seed}", run, resume=False, output_dir=None) as states:
            for number in (3, 6):
                whole.fit(batch_at, number)
                states.save(whole, {"losses": [float(number)]})
    shutil.copy(tmp_path / "run0" / "state-00000006.safetensors", tmp_path / "run1")
    with opened(tmp_path / "run1", run, resume=True, output_dir=None) as states:
        assert states.load_newest(trainer(), 9) == {"losses": [3.0]}
        assert "it is a state of another run, by its note 'run'" in str(states.resumed) and "00000006" in str(states.resumed)
    with pytest.raises(ResumeError, match="it is a state of another run, by its note 'epoch'; give one of this run"):
        load_training(trainer(), tmp_path / "run1" / "state-00000003.safetensors", {"losses": [3.0], "epoch": None})


def damaged(path: Path, was: bytes) -> None:
    content = path.read_bytes()
    place = content.index(was) + len(was) - 1
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])


@pytest.mark.parametrize(
    "was", [b'num_steps\\": 6', b"num_step", b"python_rng", b"host_state", b'0.betas\\": [0.9', b"losses", b"training"]
)
def test_the_state_before_a_damaged_one_is_taken(tmp_path: Path, was: bytes) -> None:
    run: Any = {"model": "one"}
    whole = trainer()
    with opened(tmp_path / "run", run, resume=False, output_dir=None) as states:
        for number in (3, 6):
            whole.fit(batch_at, number)
            states.save(whole, {"losses": [float(number)]})
    rest = whole.fit(batch_at, 9)
    damaged(tmp_path / "run" / "state-00000006.safetensors", was)
    resumed = trainer()
    with opened(tmp_path / "run", run, resume=True, output_dir=None) as states:
        assert states.load_newest(resumed, 9) == {"losses": [3.0]}
        assert resumed.num_steps == 3 and "state-00000006" in str(states.resumed)
        assert resumed.fit(batch_at, 9)[3:] == rest
    damaged(tmp_path / "run" / "state-00000003.safetensors", was.replace(b"6", b"3"))
    other = trainer()
    before = Snapshot.take(other.step)
    with (
        opened(tmp_path / "run", run, resume=True, output_dir=None) as states,
        pytest.raises(
            ResumeError, match=r"run: none of its states can be taken \(.*\); remove that folder and give the same command to start over$"
        ) as caught,
    ):
        states.load_newest(other, 9)
    assert "save_training" not in str(caught.value)
    assert before.differences(Snapshot.take(other.step)) == [] and other.num_steps == 0
