"""Whatever is wrong with a store, the error says what and where, and nothing is overwritten."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.json_text import to_json
from harness.errors import GoldenError
from harness.goldens.differences import difference_of
from harness.goldens.golden import GoldenMismatch
from harness.goldens.store import writer
from harness.goldens.store.candidates import CandidateFolder, read_candidate
from harness.goldens.store.listing import explain, find, read_usage, state_of_goldens, unused_goldens
from harness.goldens.store.paths import USAGE_FILE
from harness.goldens.store.writer import accept, remove
from harness.tolerance import T1, T3
from tests.mutation.golden_statements import Shelf

VALUE = torch.arange(64.0)


@pytest.fixture
def filled(shelf):
    shelf.write("x", VALUE)
    shelf.write("y", VALUE + 1)
    return shelf


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def _cut_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5])


def _flip_data(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def _flip_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[12] ^= 1
    path.write_bytes(bytes(data))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _text(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")


def _other(path: Path) -> None:
    path.write_bytes(path.with_name("y.safetensors").read_bytes())


@pytest.mark.parametrize("damage", [_cut, _cut_header, _flip_data, _flip_header, _empty, _text, _other, Path.unlink])
@pytest.mark.parametrize("update", ["", "new", "failed", "all"])
def test_a_damaged_golden_is_an_error_and_is_not_overwritten(filled, damage: Callable[[Path], None], update: str) -> None:
    damage(filled.root / "x.safetensors")
    before = filled.content()
    golden = filled.golden(update)
    with pytest.raises(GoldenError, match=r"x\.safetensors: .*version"):
        golden.check("x", VALUE)
    assert golden.outcomes[-1]["verdict"] == "unreadable"
    assert not golden.outcomes[-1]["candidate"]
    assert filled.content() == before
    assert filled.check("y", VALUE + 1)["verdict"] == "pass", "the others are as good as before"


def _conflict(text: str) -> str:
    lines = text.splitlines()
    return "\n".join([*lines[:4], "<<<<<<< HEAD", lines[4], "=======", lines[4], ">>>>>>> theirs", *lines[5:]])


def _edited(change: Callable[[dict], None]) -> Callable[[str], str]:
    def edit(text: str) -> str:
        data = json.loads(text)
        change(data)
        return json.dumps(data)

    return edit


MANIFESTS = {
    "conflict": (_conflict, r"manifest\.json:5: holds the mark of a merge conflict"),
    "only the end mark": (lambda text: text + ">>>>>>> theirs\n", "mark of a merge conflict"),
    "key twice": (lambda text: text.replace('"goldens": {', '"goldens": {"y": {}, ', 1), "'y' stands twice"),
    "newer": (_edited(lambda data: data.update(format=2)), "has format 2, and this harness reads up to 1"),
    "no format": (_edited(lambda data: data.pop("format")), "is no manifest of goldens"),
    "cut off": (lambda text: text[:-20], r"manifest\.json:\d+: is no JSON"),
    "empty": (lambda text: "", "is no JSON"),
    "a list": (lambda text: "[]", "is no manifest of goldens"),
    "no variants": (_edited(lambda data: data["goldens"]["x"].update(variants=[])), "names the files"),
    "entry without tier": (_edited(lambda data: data["goldens"]["x"].pop("tier")), "golden 'x': tier: is missing"),
    "unknown tier": (_edited(lambda data: data["goldens"]["x"].update(tier={"*": {"tier": "T7"}})), "a newer harness"),
    "unknown limit": (_edited(lambda data: data["goldens"]["x"].update(tier={"*": {"tier": "T1", "row": 1}})), "a newer harness"),
    "file of another": (
        _edited(lambda data: data["goldens"]["x"]["variants"][0].update(file="y.safetensors")),
        "names the files",
    ),
    "a way out": (_edited(lambda data: data["goldens"]["x"]["variants"][0].update(file="../x.safetensors")), "names the files"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_damaged_manifest_is_an_error_and_nothing_is_written(filled, name: str) -> None:
    damage, message = MANIFESTS[name]
    path = filled.root / "manifest.json"
    path.write_text(damage(path.read_text()))
    before = filled.content()
    for golden_name in ("x", "new one"):
        with pytest.raises(GoldenError, match=message):
            filled.golden("all").check(golden_name, VALUE)
    with pytest.raises(GoldenError, match=message):
        remove(filled.root, ["x"])
    assert filled.content() == before


WRONG = [None, -1, True, "\ud800", [], [5], {"a": 5}]


def test_every_field_of_every_record_is_of_its_type_or_is_named(filled) -> None:
    """Each field of a manifest, of the record of a failed check and of that of a run, left out and as everything that it is not."""
    filled.write("x", VALUE * 2, tier=T1(4), elsewhere=T3(max_kl=0.1), inputs={"in": VALUE}, recipe={}, seed=1, reason="r", update="all")
    candidate = Path(_candidate(filled, "x", VALUE * 3, "t::a").path)
    usage = candidate.with_name(USAGE_FILE)
    usage.write_text(json.dumps({"complete": True, "gaps": [], "used": ["x"], "unknown_tests": [], "golden_dir": "golden"}))
    told = set()
    for path in (filled.root / "manifest.json", candidate, usage):
        text = path.read_text()
        for place in _places(json.loads(text)):
            for value in [*WRONG, KeyError]:
                path.write_text(_with_value(json.loads(text), place, value))
                try:
                    _look_at_all(filled, usage)
                except GoldenError as error:
                    told.add((place[-1], "golden 'x'" in str(error) and f"{'.'.join(map(str, place[2:]))}: " in str(error)))
        path.write_text(text)
    assert {name for name, is_named in told if is_named} >= {
        "sha256",
        "dtype",
        "shape",
        "device",
        "architecture",
        "versions",
        "date",
        "test",
    }


def _places(data: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value within a value."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inner:
        yield (*place, key)
        yield from _places(value, (*place, key))


def _with_value(data: Any, place: tuple[Any, ...], value: Any) -> str:
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    if value is KeyError:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return json.dumps(data)


def _look_at_all(shelf: Shelf, usage: Path) -> None:
    record = read_usage(usage)
    for row in state_of_goldens(shelf.root):
        entry = find(shelf.root, row["name"]) if row["tensors"] else None
        if entry is not None:
            to_json(explain(entry))
    if record is not None:
        unused_goldens(shelf.root / record.get("golden_dir", "golden") if record["complete"] else shelf.root, record)
    for candidate in CandidateFolder(shelf.cache).all():
        to_json([difference_of(shelf.root, candidate).to_dict(), candidate.to_dict()])
    with suppress(GoldenMismatch):
        shelf.golden().check("x", VALUE, tier=T1(4), inputs={"in": VALUE}, recipe={}, seed=1)


def test_a_manifest_that_is_no_text(filled) -> None:
    (filled.root / "manifest.json").write_bytes(b"\xff\xfe")
    with pytest.raises(GoldenError, match="is no text"):
        filled.check("x", VALUE)


@pytest.mark.parametrize("dtype", ["float16", "int32", "no_such_dtype"])
def test_a_wrong_dtype_in_the_manifest_is_an_error(filled, dtype: str) -> None:
    path = filled.root / "manifest.json"
    path.write_text(path.read_text().replace('"dtype": "float32"', f'"dtype": "{dtype}"'))
    with pytest.raises(GoldenError, match=dtype):
        filled.check("x", VALUE)


def test_int8_does_not_pass_as_float64(shelf) -> None:
    shelf.write("x", torch.arange(4, dtype=torch.int8))
    found = shelf.check("x", torch.arange(4, dtype=torch.float64))
    assert (found["verdict"], found["summary"][:50]) == ("outputs regressed", "value: dtype float64 where int8 was expected"[:50])


def test_a_file_without_a_manifest_is_not_overwritten(filled) -> None:
    (filled.root / "manifest.json").unlink()
    before = filled.content()
    with pytest.raises(GoldenError, match="no manifest lists it"):
        filled.golden("new").check("x", VALUE)
    assert filled.content() == before


def _candidate(shelf, name: str, value: torch.Tensor, test: str):
    golden = shelf.golden("all", test=test)
    golden.check(name, value)
    return read_candidate(Path(golden.outcomes[-1]["candidate"]))


def test_two_tests_that_write_one_golden_write_nothing(filled) -> None:
    before = filled.content()
    for other in (VALUE * 2, VALUE * 3):
        two = [_candidate(filled, "x", VALUE * 2, "a.py::one"), _candidate(filled, "x", other, "b.py::two")]
        with pytest.raises(GoldenError, match=r"is written by a\.py::one and by b\.py::two; nothing was written"):
            accept(filled.root, [*two, _candidate(filled, "z", VALUE, "c.py::three")])
        assert filled.content() == before


def test_one_test_that_gives_one_golden_two_contents_is_told(shelf) -> None:
    golden = shelf.golden("new")
    golden.check("x", VALUE)
    golden.check("x", VALUE)
    with pytest.raises(GoldenError, match="two different contents"):
        golden.check("x", VALUE + 1)


@pytest.mark.parametrize("update", ["failed", "all"])
@pytest.mark.parametrize(
    "values", [(VALUE, VALUE + 1), (VALUE + 1, VALUE), (VALUE + 1, VALUE + 2)], ids=["stored first", "stored last", "new"]
)
def test_one_of_two_contents_may_be_what_is_stored(filled, update: str, values: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Written, the golden held one of them, and the next run failed for the other."""
    golden = filled.golden(update)
    golden.check("x", values[0])
    with pytest.raises(GoldenError, match="two different contents"):
        golden.check("x", values[1])


@pytest.mark.parametrize("fails_at", range(5))
def test_a_disk_that_fails_in_the_middle_leaves_everything_as_it_was(filled, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    wanted = [_candidate(filled, "x", VALUE * 2, "t::a"), _candidate(filled, "deep/new", VALUE, "t::b")]
    before = filled.content()
    calls = {"count": 0}
    real_replace, real_stage = Path.replace, writer.stage

    def count() -> None:
        calls["count"] += 1
        if calls["count"] == fails_at + 1:
            raise OSError(28, "No space left on device")

    def replace(self: Path, target: Path) -> Path:
        if fails_at < 3:
            count()
        return real_replace(self, target)

    def stage(path: Path, data: bytes) -> Path:
        if fails_at >= 3:
            count()
        return real_stage(path, data)

    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(writer, "stage", stage)
    if fails_at >= 3:
        calls["count"] = 3 - 1
    with pytest.raises(GoldenError, match=r"cannot be written \(No space left on device\); nothing was written"):
        accept(filled.root, wanted)
    assert filled.content() == before


def test_a_folder_that_cannot_be_written(filled, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [_candidate(filled, "x", VALUE * 2, "t::a")]
    before = filled.content()

    def refuse(path: Path, data: bytes) -> Path:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(writer, "stage", refuse)
        with pytest.raises(GoldenError, match=r"cannot be written \(Permission denied\); nothing was written; make the folder writable"):
            accept(filled.root, wanted)
    assert filled.content() == before


def test_a_file_where_the_folder_should_be(shelf) -> None:
    shelf.root.parent.mkdir(exist_ok=True)
    candidate = _candidate(shelf, "x", VALUE, "t::a")
    shelf.root.write_text("in the way")
    with pytest.raises(GoldenError, match="cannot be"):
        accept(shelf.root, [candidate])
    assert shelf.root.read_text() == "in the way"


def test_a_loosening_without_a_reason_is_refused_when_accepted_too(filled) -> None:
    from harness.tolerance import T1

    golden = filled.golden()
    with pytest.raises(AssertionError):
        golden.check("x", VALUE * 2, tier=T1(4))
    candidates = [candidate for candidate in CandidateFolder(filled.cache).all() if candidate.name == "x"]
    before = filled.content()
    for reason in ("", "   "):
        with pytest.raises(GoldenError, match="loosened from T0"):
            accept(filled.root, candidates, reason=reason)
        assert filled.content() == before
    assert accept(filled.root, candidates, reason="because").written == (
        "x: outputs changed, tier loosened, elsewhere loosened, T1(max_ulp=4)",
    )


def test_a_damaged_candidate_is_an_error(filled) -> None:
    candidate = _candidate(filled, "x", VALUE * 2, "t::a")
    _flip_data(candidate.tensors_path)
    before = filled.content()
    with pytest.raises(GoldenError, match="not the file that the test saved"):
        accept(filled.root, [candidate])
    Path(candidate.path).write_text("{")
    with pytest.raises(GoldenError, match="is no record of a failed check"):
        list(CandidateFolder(filled.cache).all())
    assert filled.content() == before


def _accept_in_a_process(root: str, path: str) -> None:
    accept(Path(root), [read_candidate(Path(path))])


def test_processes_that_write_at_once_lose_nothing(filled) -> None:
    candidates = [_candidate(filled, f"new {number}", VALUE + number, f"t::{number}") for number in range(6)]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_accept_in_a_process, args=(str(filled.root), candidate.path)) for candidate in candidates]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert all(process.exitcode == 0 for process in processes)
    for number in range(6):
        assert filled.check(f"new {number}", VALUE + number)["verdict"] == "pass"
