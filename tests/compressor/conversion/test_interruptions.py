"""Whatever ends a conversion, one message says what, and the next one ends with the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor import model_free
from compressor.cli.main import main
from compressor.conversion import workers
from compressor.errors import CheckpointError, CompressorError, ModelError, NumericsError, OutputError, ResumeError, UserInputError
from compressor.pipelines.journal.run_folder import Lines

Folders = Callable[[str], Path]
_ASKED: dict[str, Any] = {"scheme": "NVFP4A16", "ignore": ["lm_head"]}


class _Stop(BaseException):
    """What ends a run in the middle."""


class _Bar:
    """A bar that ends the run after so many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[_Bar]:
        del description, total
        yield self

    def advance(self, amount: int = 1, note: str | None = None) -> None:
        del amount
        self.left -= note is not None
        if self.left < 0:
            raise _Stop


@pytest.fixture
def wanted(base: Folders, tmp_path: Path) -> Path:
    """What a conversion gives that nothing ends."""
    return model_free(base("dense"), output_dir=tmp_path / "wanted", **_ASKED).output_dir


def test_a_run_goes_on_wherever_it_stopped(
    base: Folders, wanted: Path, tmp_path: Path, differences: Callable[[Path, Path], list[str]]
) -> None:
    """After each seventh step; what is damaged meanwhile is done again."""
    for steps in range(0, 24, 7):
        out = tmp_path / f"made{steps}"
        run = out.with_name(f"{out.name}.partial-run")
        with pytest.raises(_Stop) as stopped:
            model_free(base("dense"), output_dir=out, progress=_Bar(steps), **_ASKED)
        kept = steps + 1
        assert f"{kept} of 24 parts are kept in {run}; the same command with --resume" in "".join(stopped.value.__notes__)
        assert not out.exists()
        with pytest.raises(ResumeError, match=f"{kept} of 24 parts are finished.*--resume"):
            model_free(base("dense"), output_dir=out, **_ASKED)
        with pytest.raises(ResumeError, match="holds another run"):
            model_free(base("dense"), output_dir=out, resume=True, scheme="W4A16", ignore=["lm_head"])
        file = run / "checkpoint" / "model.safetensors"
        with file.open("r+b") as stream:  # a loss of power
            stream.seek(-20_000, os.SEEK_END)
            stream.write(b"\0" * 20_000)
        journal = run / "journal.jsonl"
        journal.write_bytes(journal.read_bytes() + b"0123")  # a line that was cut off
        result = model_free(base("dense"), output_dir=out, resume=True, **_ASKED)
        assert not run.exists() and differences(out, wanted) == []
        assert result.resumed is None or result.resumed.startswith("resumed after ")


def test_a_line_that_lacks_any_key_is_refused(base: Folders, tmp_path: Path) -> None:
    """As another version of this package may have written it."""
    out, run = tmp_path / "made", tmp_path / "made.partial-run"
    with pytest.raises(_Stop):
        model_free(base("dense"), output_dir=out, progress=_Bar(3), **_ASKED)
    first, parts = Lines.read(run / "journal.jsonl").entries
    done = parts["done"]
    for changed in (
        *({key: value for key, value in parts.items() if key != lost} for lost in parts),  # one of them says "parts"
        *({**parts, "done": [{key: value for key, value in done[0].items() if key != lost}, *done[1:]]} for lost in ("kind", "name")),
    ):
        Lines.create(run / "journal.jsonl", first).append(changed)
        with pytest.raises(ResumeError, match="another version of this package"):
            model_free(base("dense"), output_dir=out, resume=True, **_ASKED)
    Lines.create(run / "journal.jsonl", first).append(parts)
    assert model_free(base("dense"), output_dir=out, resume=True, **_ASKED).resumed is not None


def _damage_header(folder: Path) -> None:
    with _shards(folder)[0].open("r+b") as stream:
        stream.write(b"\xff" * 64)


def _replace_by_folder(folder: Path) -> None:
    shard = _shards(folder)[0]
    shard.unlink()
    shard.mkdir()


_LOSSES: dict[str, Callable[[Path], None]] = {
    "a shard": lambda folder: _shards(folder)[0].unlink(),
    "its header": _damage_header,
    "its end": lambda folder: os.truncate(_shards(folder)[0], 1000),
    "a shard, a folder in its place": _replace_by_folder,
    "the config": lambda folder: (folder / "config.json").unlink(),
    "the index": lambda folder: (folder / "model.safetensors.index.json").unlink(),
    "all": lambda folder: shutil.rmtree(folder),
    "nothing, a stray file besides": lambda folder: (folder / "stray.safetensors").touch(),
}


def test_files_of_the_run_that_were_lost_are_made_again(
    base: Folders, tmp_path: Path, differences: Callable[[Path, Path], list[str]]
) -> None:
    """The others are kept."""
    asked: dict[str, Any] = {**_ASKED, "max_shard_size": "60KB"}
    wanted = model_free(base("dense"), output_dir=tmp_path / "wanted", **asked).output_dir
    with pytest.raises(_Stop):
        model_free(base("dense"), output_dir=tmp_path / "stopped", progress=_Bar(15), **asked)
    for number, lose in enumerate(_LOSSES.values()):
        out = tmp_path / f"made{number}"
        run = shutil.copytree(tmp_path / "stopped.partial-run", tmp_path / f"made{number}.partial-run")
        lose(run / "checkpoint")
        result = model_free(base("dense"), output_dir=out, resume=True, **asked)
        assert differences(out, wanted) == [] and not run.exists()
        assert (result.resumed is None) == (lose is _LOSSES["all"])


def test_a_killed_worker_ends_the_run_at_once(
    base: Folders, wanted: Path, tmp_path: Path, differences: Callable[[Path, Path], list[str]]
) -> None:
    """With its number and how it ended."""
    out = tmp_path / "made"
    killed = threading.Thread(target=_kill_a_child)
    killed.start()
    with pytest.raises(CheckpointError, match=r"worker \d+: was killed by SIGKILL while it converted .*go on with --resume"):
        model_free(base("dense"), output_dir=out, workers=2, **_ASKED)
    killed.join()
    assert not _children()
    model_free(base("dense"), output_dir=out, resume=True, **_ASKED)
    assert differences(out, wanted) == []


def test_two_workers_give_the_same_bytes(
    base: Folders, wanted: Path, tmp_path: Path, differences: Callable[[Path, Path], list[str]]
) -> None:
    model_free(base("dense"), output_dir=tmp_path / "made", workers=2, **_ASKED)
    assert differences(tmp_path / "made", wanted) == []


def test_workers_end_with_the_process_that_started_them(
    base: Folders, wanted: Path, tmp_path: Path, differences: Callable[[Path, Path], list[str]]
) -> None:
    """Killed or ended in the middle, it has no time to end them; what they have written is used by the next run."""
    out = tmp_path / "made"
    program = f"from compressor import model_free; model_free({str(base('dense'))!r}, output_dir={str(out)!r}, workers=2, **{_ASKED!r})"
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL) as process:
        while len(found := _children(process.pid)) < 2:
            time.sleep(0.01)
        process.kill()
    _wait_for_the_end_of(found)
    model_free(base("dense"), output_dir=out, resume=True, **_ASKED)
    assert differences(out, wanted) == []


def test_a_worker_ends_in_the_middle_of_a_unit_that_nobody_waits_for(tmp_path: Path) -> None:
    program = (
        "import sys, time; from compressor.conversion import worker; worker.Unit.model_validate_json = lambda line: line; "
        "worker.run_unit = lambda *_: (print('begun', flush=True), time.sleep(300)); worker.main([sys.argv[1], sys.argv[1], 'cpu'])"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(b"a unit\nanother\n")
            assert process.stdout.readline() == b"begun\n"
            process.stdin.close()
            assert process.wait(timeout=30) == 1
        finally:
            process.kill()


def _wait_for_the_end_of(pids: list[int]) -> None:
    end = time.monotonic() + 30
    while any(map(_lives, pids)):
        assert time.monotonic() < end
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    return False


def _children(parent: int | None = None) -> list[int]:
    pid = os.getpid() if parent is None else parent
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _kill_a_child() -> None:
    while not (found := _children()):
        time.sleep(0.01)
    os.kill(found[-1], signal.SIGKILL)


@pytest.mark.parametrize("on_ctrl_c", [signal.default_int_handler, signal.SIG_IGN], ids=["ctrl-C too", "in the background"])
def test_sigterm_ends_the_command_with_a_word_on_what_is_kept(
    on_ctrl_c: Any, base: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ctrl-C does, also where that is ignored; afterwards SIGTERM is what it was."""
    done: list[str] = []
    usual_unit = workers.run_unit

    def run_unit(unit: Any, *args: Any) -> Any:
        done.append(unit.name)
        if len(done) == 4:
            signal.raise_signal(signal.SIGTERM)
        return usual_unit(unit, *args)

    monkeypatch.setattr(workers, "run_unit", run_unit, raising=True)
    usual = signal.signal(signal.SIGINT, on_ctrl_c)
    try:
        code = main(["convert", str(base("dense")), "--scheme", "W4A16", "--ignore", "lm_head", "--output-dir", str(tmp_path / "out")])
    finally:
        signal.signal(signal.SIGINT, usual)
    assert code == 130 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("compressor convert: interrupted; 3 of ")
    assert said.endswith("the same command with --resume (resume=True) goes on from there")


@pytest.mark.nightly
def test_a_kill_at_any_moment_changes_no_byte(
    base: Folders, wanted: Path, tmp_path: Path, differences: Callable[[Path, Path], list[str]]
) -> None:
    """Of the whole process, from its start to its end."""
    out = tmp_path / "made"
    program = f"from compressor import model_free; model_free({str(base('dense'))!r}, output_dir={str(out)!r}, resume=True, **{_ASKED!r})"
    begun = time.monotonic()
    assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == 0
    seconds = time.monotonic() - begun
    shutil.rmtree(out)
    for share in (0.5, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.99):
        with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL) as process:
            time.sleep(share * seconds)
            process.kill()
    if not out.exists():
        model_free(base("dense"), output_dir=out, resume=True, **_ASKED)
    assert differences(out, wanted) == []


class _Damage(NamedTuple):
    do: Callable[[Path], None]
    kind: type[CompressorError]
    words: str


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _truncate(folder: Path) -> None:
    with _shards(folder)[0].open("r+b") as stream:
        stream.truncate(_shards(folder)[0].stat().st_size - 1)


def _rewritten(change: Callable[[dict[str, Any]], str]) -> Callable[[Path], None]:
    """Write another header before the same tensors."""

    def write(folder: Path) -> None:
        data = _shards(folder)[0].read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        text = change(json.loads(data[8:begin])).encode()
        _shards(folder)[0].write_bytes(len(text).to_bytes(8, "little") + text + data[begin:])

    return write


def _overlap(header: dict[str, Any]) -> str:
    one, other, *_ = (name for name in header if name != "__metadata__")
    return json.dumps({**header, other: header[one]})


def _hole(header: dict[str, Any]) -> str:
    first = min((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][0])
    return json.dumps({name: entry for name, entry in header.items() if name != first})


def _twice(header: dict[str, Any]) -> str:
    name = next(name for name in header if name != "__metadata__")
    return json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"


def _lose(folder: Path) -> None:
    _shards(folder)[1].unlink()


def _double(folder: Path) -> None:
    first, second = _shards(folder)[:2]
    save_file(load_file(first) | load_file(second), second, metadata={"format": "pt"})


def _unknown_dtype(folder: Path) -> None:
    path = _shards(folder)[0]
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"F6_X"'))


def _move(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    places = content["weight_map"]
    name, file = next(iter(places.items()))
    places[name] = next(other for other in places.values() if other != file)
    index.write_text(json.dumps(content))


def _spoil(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for path in _shards(folder):
            tensors = load_file(path)
            if name in tensors:
                tensors[name].view(-1)[0] = float("nan")
                save_file(tensors, path, metadata={"format": "pt"})

    return write


def _more(folder: Path) -> None:
    path = _shards(folder)[0]
    save_file(load_file(path) | {"odd": torch.ones(2, dtype=torch.bfloat16)}, path, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["odd"] = path.name
    index.write_text(json.dumps(content))


def _quantized(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))


_DAMAGES = {
    "cut off": _Damage(_truncate, ModelError, "not a whole safetensors file .*its tensors end at byte"),
    "two tensors in one place": _Damage(_rewritten(_overlap), ModelError, "not a whole safetensors file .*the tensor before it ends at"),
    "bytes of no tensor": _Damage(_rewritten(_hole), ModelError, "not a whole safetensors file .*the tensor before it ends at"),
    "a name twice in a header": _Damage(_rewritten(_twice), ModelError, "stands twice in one object"),
    "a missing file": _Damage(_lose, ModelError, "1 of [0-9]+ weight files are missing"),
    "a name in two files": _Damage(_double, ModelError, "stands in model-00001.* and in model-00002"),
    "an unknown dtype": _Damage(_unknown_dtype, ModelError, "is stored as 'F6_X'"),
    "an index of other files": _Damage(_move, ModelError, "1 tensors .* are not in the files that it names"),
    "NaN in a weight": _Damage(_spoil("model.layers.0.mlp.up_proj.weight"), NumericsError, "up_proj.weight: holds NaN or infinity"),
    "a weight too much": _Damage(_more, ModelError, r"1 weights in its files have no place in the model \(odd\)"),
    "a quantized base": _Damage(_quantized, ModelError, r"quantized already \(gptq\)"),
}


@pytest.mark.parametrize("damage", _DAMAGES.values(), ids=list(_DAMAGES))
def test_a_damaged_base_is_refused_in_one_line(damage: _Damage, base: Folders, tmp_path: Path) -> None:
    """And nothing is there afterwards."""
    folder = shutil.copytree(base("dense"), tmp_path / "base")
    damage.do(folder)
    with pytest.raises(damage.kind, match=damage.words):
        model_free(folder, output_dir=tmp_path / "made", scheme="W4A16", ignore="lm_head")
    assert not (tmp_path / "made").exists()


def test_what_stays_as_it_is_may_hold_nan(base: Folders, tmp_path: Path) -> None:
    """A note says so."""
    folder = shutil.copytree(base("dense"), tmp_path / "base")
    _spoil("model.norm.weight")(folder)
    made = model_free(folder, output_dir=tmp_path / "made", scheme="W4A16", ignore="lm_head")
    assert made.report.notes == ["1 parameters that stay as they are hold NaN or infinity (model.norm.weight)"]


def test_places_that_cannot_be_used_are_refused(base: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, a folder with something in it, a model in memory."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(OutputError, match="not empty"):
        model_free(base("dense"), output_dir=tmp_path / "full", **_ASKED)
    with pytest.raises(UserInputError, match="a Linear in memory was given, and only files are converted"):
        model_free(torch.nn.Linear(2, 2), output_dir=tmp_path / "made", **_ASKED)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"this run will write about [0-9,]+ bytes there, and 1,000 are free"):
        model_free(base("dense"), output_dir=tmp_path / "made", **_ASKED)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
