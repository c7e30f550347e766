"""The journal: no byte of it changes unseen, stages come back bit for bit, the disk is written in an order that survives a loss of power"""

from __future__ import annotations

import os
import pathlib
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import PrivateAttr
from torch import Tensor, nn

from compressor import oneshot
from compressor.atomic import whole_file
from compressor.data import load_dataset_source
from compressor.errors import CheckpointError, LifecycleError, OutputError, ResumeError
from compressor.lifecycle import Event, EventType, FinishedStage, Modifier, ModuleRecord, Report, Session, State
from compressor.pipelines import run_pipeline
from compressor.pipelines.journal import Journal, NullJournal, check_places
from compressor.pipelines.journal.fingerprint import changes
from compressor.pipelines.journal.place import open_journal
from compressor.pipelines.journal.run_folder import Lines, RunFolder
from compressor.pipelines.journal.stage_files import add_report, report_since, write_content
from compressor.progress import SilentProgress
from compressor.random_state import RandomState

ENTRIES = [{"kind": "run", "n": 0}, {"kind": "stage", "text": "ä\n"}, {"kind": "stage", "error": 0.1 + 0.2}]


def written(path: Path) -> bytes:
    lines = Lines.create(path, ENTRIES[0])
    for entry in ENTRIES[1:]:
        lines.append(entry)
    return path.read_bytes()


def test_lines_come_back_as_they_were(tmp_path: Path) -> None:
    written(tmp_path / "j")
    lines = Lines.read(tmp_path / "j")
    assert lines.entries == ENTRIES
    assert not lines.was_torn
    lines.append({"kind": "more"})
    assert Lines.read(tmp_path / "j").entries == [*ENTRIES, {"kind": "more"}]


def test_any_changed_byte_is_an_error_or_costs_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    content = written(path)
    for position in range(len(content)):
        for flip in (1, 0x80):
            path.write_bytes(content[:position] + bytes([content[position] ^ flip]) + content[position + 1 :])
            if position == len(content) - 1:  # the last line has lost its end, as after a kill
                assert Lines.read(path).entries == ENTRIES[:-1]
                continue
            with pytest.raises(ResumeError, match=rf"{path}: line \d is not what was written|first line"):
                Lines.read(path)


def test_any_truncation_costs_the_torn_line_only(tmp_path: Path) -> None:
    path = tmp_path / "j"
    content = written(path)
    ends = [position + 1 for position, byte in enumerate(content) if byte == 10]
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        whole = sum(end <= length for end in ends)
        if not whole:
            with pytest.raises(ResumeError, match="first line is cut off"):
                Lines.read(path)
            continue
        lines = Lines.read(path)
        assert (lines.entries, lines.was_torn) == (ENTRIES[:whole], length not in ends)
        lines.append({"kind": "next"})
        assert Lines.read(path).entries == [*ENTRIES[:whole], {"kind": "next"}]


def test_lines_of_another_file_or_order_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "j"
    first, second, third = written(path).splitlines(keepends=True)
    for mixed in (first + third, first + third + second, second + third, first + second + second):
        path.write_bytes(mixed)
        with pytest.raises(ResumeError, match="checksum"):
            Lines.read(path)


def test_an_append_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = written(tmp_path / "j")
    lines = Lines.read(tmp_path / "j")
    plain_write = os.write

    def half(descriptor: int, data: Any) -> int:
        plain_write(descriptor, bytes(data)[:9])
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space"):
        lines.append({"kind": "stage"})
    monkeypatch.undo()
    assert (tmp_path / "j").read_bytes() == content
    lines.append({"kind": "stage"})
    assert len(Lines.read(tmp_path / "j").entries) == 4


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_whole_file_replaces_the_old_one_or_nothing(error: BaseException, tmp_path: Path) -> None:
    target = tmp_path / "f"
    target.write_text("old")
    expected = CheckpointError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected), whole_file(target) as partial:
        partial.write_text("new")
        raise error
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert target.read_text() == "old"


def test_what_a_killed_write_left_beside_a_file_is_removed_by_the_next(tmp_path: Path) -> None:
    place = tmp_path / "f.partial"
    for left in (lambda: place.write_text("half"), lambda: (place.mkdir(), (place / ".tmpAb3dE9").write_text("half"))):
        left()
        with whole_file(tmp_path / "f") as partial:
            assert partial == place / "f"
            partial.write_text("new")
            (partial.parent / "of a library").write_text("temporary")
        assert [path.name for path in tmp_path.iterdir()] == ["f"]


class Scaler(Modifier):
    """Changes weights in place, counts its stages, draws a random number in each and reports it; notes which stages it worked on."""

    can_resume: bool = True
    fail_at: int | None = None
    _num_stages: int = PrivateAttr(default=0)
    _worked: list[int] = PrivateAttr(default_factory=list)

    def on_initialize(self, state: State) -> bool:
        state.claim([name for name, module in state.model.named_modules() if isinstance(module, nn.Linear)], self.label)
        return True

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        if self.fail_at == self._num_stages:
            raise KeyboardInterrupt
        for name in event.modules:
            module = state.model.get_submodule(name)
            if isinstance(module, nn.Linear | nn.LayerNorm):
                with torch.no_grad():
                    module.weight.mul_(torch.rand(()))
                state.report.modules[name] = ModuleRecord(name, "Scaler", "-", float(torch.rand(())), self._num_stages)
        if event.modules:
            state.report.add_fallback(event.modules[0], "kind", f"stage {self._num_stages}")
            self._worked.append(self._num_stages)
            self._num_stages += 1

    def stage_memory(self, modules: Sequence[str]) -> dict[str, Any] | None:
        return {"num_stages": self._num_stages, "seen": torch.tensor([len(modules)])} if self.can_resume else None

    def skip_stage(self, state: State, stage: FinishedStage) -> None:
        assert stage.memory["seen"].tolist() == [len(stage.modules)]  # type: ignore[union-attr]
        self._num_stages = int(stage.memory["num_stages"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.kept = nn.LayerNorm(8), nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.kept(self.up(self.norm(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@dataclass
class Ran:
    """What a run left."""

    model: nn.Module
    report: Report
    modifier: Scaler
    random: dict[str, Tensor] = field(default_factory=dict)


def run(folder: Path | None, *, pipeline: str = "sequential", fail_at: int | None = None, resume: bool = False) -> Ran:
    modifier, model = Scaler(fail_at=fail_at), Blocks()
    state = State(model, report=Report())
    data = load_dataset_source(torch.utils.data.DataLoader(torch.rand(6, 8, generator=torch.Generator().manual_seed(1)), batch_size=2))
    with torch.random.fork_rng(), Session(state, [modifier]) as session:
        torch.manual_seed(7)
        session.initialize()
        journal = open_journal(folder, resume=resume, required=True, fingerprint={}, modifiers=[modifier], output_dir=None)
        with journal or _nothing() as kept:
            run_pipeline(pipeline, session, data, progress=SilentProgress(), journal=kept)
            session.finalize()
            kept.finish()
        return Ran(model, state.report, modifier, RandomState.current(foreign=False).by_device)


class _nothing:
    def __enter__(self) -> NullJournal:
        return NullJournal()

    def __exit__(self, *error: object) -> None:
        pass


@pytest.mark.parametrize("pipeline", ["sequential", "basic"])
def test_changes_in_place_reports_and_random_numbers_survive(pipeline: str, tmp_path: Path) -> None:
    whole = run(None, pipeline=pipeline)
    stages = {"sequential": 4, "basic": 1}[pipeline]  # three layers, and the head outside of them
    folder = tmp_path / "run"
    for stage in range(1, min(stages, 3)):
        with pytest.raises(KeyboardInterrupt):
            run(folder, pipeline=pipeline, fail_at=stage, resume=stage > 1)
        assert len(list(folder.glob("stage-*"))) == stage
    resumed = run(folder, pipeline=pipeline, resume=True)
    assert resumed.modifier._worked == list(range(stages))[-len(resumed.modifier._worked) :]
    assert len(resumed.modifier._worked) == (2 if pipeline == "sequential" else 1)
    assert resumed.report == whole.report
    assert all(torch.equal(tensor, resumed.model.state_dict()[name]) for name, tensor in whole.model.state_dict().items())
    assert torch.equal(resumed.random["cpu"], whole.random["cpu"])
    assert not folder.exists()


def test_a_stage_holds_what_was_claimed_or_changed_and_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", fail_at=1)
    entry = Lines.read(tmp_path / "run" / "journal.jsonl").entries[1]
    assert entry["tensors"] == ["layers.0.up.weight", "layers.0.up.bias", "layers.0.norm.weight"]  # not the batch norm
    assert (entry["name"], entry["total"], entry["memories"]) == ("layers.0", 3, [{"num_stages": 1}])


def on_a_device(folder: Path, steps: Callable[[Journal, Session, Callable[[int], None]], None]) -> None:
    """Run steps beside a journal whose session is elsewhere than on the CPU; the third argument opens a stage and changes its weight."""
    modifier, model = Scaler(), Blocks()
    with Session(State(model, report=Report()), [modifier]) as session:
        session.initialize()
        session.state.device = torch.device("meta")  # of which the journal asks no more than that it is not the CPU

        def stage(index: int) -> None:
            assert not journal.open_stage(session, index, f"layers.{index}", [f"layers.{index}.up"], 3)
            model.layers[index].up.weight.data.fill_(index + 1)

        opened = open_journal(folder, resume=False, required=True, fingerprint={}, modifiers=[modifier], output_dir=None)
        assert isinstance(opened, Journal)
        with opened as journal:
            steps(journal, session, stage)


def stages_in(folder: Path) -> list[str]:
    return [entry["name"] for entry in Lines.read(folder / "journal.jsonl").entries if entry["kind"] == "stage"]


def test_on_a_device_a_stage_is_written_while_the_next_one_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, folder = threading.Event(), tmp_path / "run"

    def slowly(path: Path, content: Mapping[str, Tensor]) -> None:
        assert go_on.wait(60)
        write_content(path, content)

    monkeypatch.setattr("compressor.pipelines.journal.journal.write_content", slowly)

    def steps(journal: Journal, session: Session, stage: Callable[[int], None]) -> None:
        stage(0)
        journal.finish_stage(session)
        assert stages_in(folder) == []
        session.state.model.get_parameter("layers.0.up.weight").data.zero_()  # what is written is what the stage has left
        stage(1)
        go_on.set()
        journal.finish_stage(session)
        assert stages_in(folder)[:1] == ["layers.0"]
        assert journal.kept(0).tensors["layers.0.up"]["weight"].unique().tolist() == [1.0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        on_a_device(folder, steps)
    assert stages_in(folder) == ["layers.0", "layers.1"]
    assert "2 of 3 stages are finished and kept" in caught.value.__notes__[0]


@pytest.mark.parametrize("then", ["next stage", "end", "exit"])
def test_a_disk_that_fails_beside_a_device_is_told_at_the_next_moment(then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: Mapping[str, Tensor]) -> None:
        raise CheckpointError(f"{path}: no space")

    monkeypatch.setattr("compressor.pipelines.journal.journal.write_content", full)

    def steps(journal: Journal, session: Session, stage: Callable[[int], None]) -> None:
        stage(0)
        journal.finish_stage(session)
        if then == "next stage":
            stage(1)
            journal.finish_stage(session)
        elif then == "end":
            journal.end_stages(session, (), ())

    with pytest.raises(CheckpointError, match=r"stage-0000.safetensors: no space"):
        on_a_device(tmp_path / "run", steps)
    assert not (tmp_path / "run").exists()


def test_a_modifier_that_cannot_resume_runs_without_a_journal_unless_one_was_asked_for(tmp_path: Path) -> None:
    class Plain(Modifier):
        def on_initialize(self, state: State) -> bool:
            return True

    arguments = {"fingerprint": {}, "modifiers": [Plain(index=0)], "output_dir": None}
    assert open_journal(tmp_path / "run", resume=False, required=False, **arguments) is None  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
    with pytest.raises(ResumeError, match=r"Plain\[0\]: cannot resume \(it has no stage_memory\)"):
        open_journal(tmp_path / "run", resume=True, required=True, **arguments)  # type: ignore[arg-type]


def test_a_model_that_runs_otherwise_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(folder, fail_at=1)
    journal = open_journal(folder, resume=True, required=True, fingerprint={}, modifiers=[Scaler()], output_dir=None)
    assert isinstance(journal, Journal)
    session = Session(State(Blocks()), [Scaler()])
    with pytest.raises(ResumeError, match=r"stage 0 was 'layers\.0' and is 'layers\.1' now"), journal:
        journal.open_stage(session, 0, "layers.1", ("layers.1",), 3)
    assert folder.exists()


def test_reports_come_back_field_by_field_and_none_is_forgotten() -> None:
    @dataclass
    class Longer(Report):
        news: list[str] = field(default_factory=list)

    state = Report()
    state.modules["a"] = ModuleRecord("a", "M", "s", 0.1 + 0.2, None, {"loss": 1e-9})
    kept = report_since(state, {name: {} for name in ("modules", "fallbacks", "notes")})
    copied = Report()
    add_report(copied, kept)
    assert copied == state
    with pytest.raises(LifecycleError, match="lose \\['news'\\]"):
        report_since(Longer(), {})


def test_the_order_of_writes_survives_a_loss_of_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name counts only behind its bytes: file, folder, then the line; checkpoint and its folder before anything is removed."""
    calls: list[str] = []
    plain = {name: getattr(os, name) for name in ("fsync", "write", "replace", "rename", "unlink")}

    def at(descriptor: int) -> str:
        return Path(f"/proc/self/fd/{descriptor}").readlink().name

    watched = {
        "fsync": lambda fd: f"fsync {at(fd)}",
        "write": lambda fd, data: f"write {at(fd)}",
        "replace": lambda source, target: f"rename to {Path(target).name}",
        "rename": lambda source, target: f"rename to {Path(target).name}",
        "unlink": lambda path, **kwargs: f"unlink {Path(path).name}",
    }
    for name, describe in watched.items():

        def call(*args: Any, name: str = name, describe: Any = describe, **kwargs: Any) -> Any:
            calls.append(describe(*args, **kwargs))
            return plain[name](*args, **kwargs)

        monkeypatch.setattr(os, name, call)
    recipe = {"QuantizationModifier": {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}}}}
    oneshot(
        Blocks(), recipe=recipe, dataset=torch.utils.data.DataLoader(torch.rand(4, 8)), pipeline="sequential", output_dir=tmp_path / "out"
    )
    monkeypatch.undo()
    text = "\n".join(calls)
    for index in range(3):
        stage = f"stage-{index:04d}.safetensors"
        expected = [f"fsync {stage}", f"rename to {stage}", "fsync out.partial-run", "write journal.jsonl", "fsync journal.jsonl"]
        assert "\n".join(expected) in text
    kept = "\n".join(["fsync journal.jsonl", "rename to journal.jsonl", "fsync out.partial-run"])
    assert text.index(kept) < text.index("fsync stage-0000")
    end = [call for call in calls if call.startswith(("fsync model.safetensors", "fsync compression.json", "rename to out"))]
    assert end == ["fsync compression.json", "fsync model.safetensors", "rename to out"]
    renamed = calls.index("rename to out")
    assert calls[renamed + 1] == f"fsync {tmp_path.name}"
    assert calls.index("unlink stage-0000.safetensors") > renamed
    assert calls.index("unlink journal.jsonl", renamed) > calls.index("unlink stage-0002.safetensors")


def test_a_lock_outlives_neither_its_process_nor_its_folder(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    first.create()
    with pytest.raises(ResumeError, match=rf"another run works in this folder \(process {os.getpid()}\)"):
        second.create()
    first.unlock()
    second.create()
    second.remove()
    assert not (tmp_path / "run").exists()
    pid = os.spawnv(os.P_NOWAIT, shutil.which("true") or "true", ["true"])  # a process whose number is free again
    os.waitpid(pid, 0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").write_text(f"{pid}\n")
    first.create()
    first.remove()


def test_a_folder_removed_between_opening_and_locking_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    plain_lock, folder = fcntl.flock, tmp_path / "run"
    folder.mkdir()
    races = iter([True])

    def racing(descriptor: int, operation: int) -> None:
        if next(races, False):  # the run before this one ends right now
            (folder / "lock").unlink()
        plain_lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", racing)
    mine, other = RunFolder(folder), RunFolder(folder)
    mine.create()
    with pytest.raises(ResumeError, match="another run"):
        other.create()
    mine.remove()


def test_places(tmp_path: Path) -> None:
    place = check_places(tmp_path / "out", None, resume=False, source=None)
    assert place.run_dir == tmp_path / "out.partial-run"
    assert check_places(None, None, resume=False, source=None).run_dir is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be used as run folder"):
        check_places(tmp_path / "out", tmp_path / "file", resume=False, source=None)
    with pytest.raises(OutputError, match="lies in the folder of the model"):
        check_places(None, tmp_path / "model" / "run", resume=False, source=tmp_path / "model")


def test_changes_are_told_from_what_to_what() -> None:
    before = {"recipe": "a: 1\nb: 2\n", "seed": 0, "data": {"n": 3, "sha": "0" * 64}, "settings": {"targets": None}}
    now = {"recipe": "a: 1\nb: 5\n", "seed": 1, "data": {"n": 3, "sha": "1" * 64}, "settings": {"targets": ["x"], "new": True}}
    assert changes(before, now) == [
        "recipe said 'b: 2' and says 'b: 5'",
        "seed was 0 and is 1",
        "data.sha was 000000000000 and is 111111111111",
        "settings.targets was not given and is ['x']",
        "settings.new was not given and is True",
    ]
    assert changes(before, before) == []
    long, lines = "ab" * 60, "x\n" + "cd" * 60
    assert changes({"data": long + "1" + long, "recipe": lines + "1"}, {"data": long + "2" + long, "recipe": lines + "2"}) == [
        f"data was '...{long[-20:]}1{long[:36]}...' and is '...{long[-20:]}2{long[:36]}...'",
        f"recipe said '...{lines[-20:]}1' and says '...{lines[-20:]}2'",
    ]
    assert changes({str(n): 0 for n in range(9)}, {})[-1] == "3 more things changed"


def test_another_text_is_told_by_its_digest_and_not_by_its_marks() -> None:
    before = {"eval_data": {"sha256": "0" * 64, "marks": {"every": 1, "hex": "0a" * 40}}}
    now = {"eval_data": {"sha256": "1" * 64, "marks": {"every": 2, "hex": "1b" * 40}}}
    assert changes(before, now) == ["eval_data.sha256 was 000000000000 and is 111111111111"]


def test_the_events_of_a_resumed_run_keep_their_order(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", fail_at=2)
    resumed = run(tmp_path / "run", resume=True)
    assert resumed.modifier.finalized
    assert EventType.CALIBRATION_END  # CALIBRATION_START, one stage, the rest, CALIBRATION_END: else the session would have refused
    assert pathlib.Path(tmp_path / "run").exists() is False
