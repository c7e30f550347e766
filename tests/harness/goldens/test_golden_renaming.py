"""A store that an older harness named is never called empty: every action says what to do, and `golden rename` does it, all or nothing."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from harness import cli
from harness.errors import GoldenError
from harness.goldens import golden as golden_module
from harness.goldens.store import writer
from harness.goldens.store.provenance import Platform
from harness.goldens.store.renaming import rename

OLD = {
    "a-b.safetensors": "a_b.safetensors",
    "a-b@cpu-x86-64-avx2.safetensors": "a_b@cpu-x86_64-+a+v+x2.safetensors",
    "layers/w4a16.5x128.safetensors": "layers/+w4+a16%205x128.safetensors",
    "layers/plain.safetensors": "layers/plain.safetensors",
    "w4-a16/1.5b/deep.safetensors": "+w4_+a16/1%2e5+b/deep.safetensors",
    "w4-a16/1.5b/manifest.json": "+w4_+a16/1%2e5+b/manifest.json",
    "x-y/plain.safetensors": "x_y/plain.safetensors",
    "x-y/manifest.json": "x_y/manifest.json",
}
"""Files as this harness names them, and as an older one did."""
NAMES = ["a_b", "layers/W4A16 5x128", "layers/plain", "W4_A16/1.5B/deep", "x_y/plain"]
VALUE = torch.arange(8.0)


def _age(root: Path) -> None:
    """Name files and folders as an older harness did."""
    for manifest in sorted(root.rglob("manifest.json")):
        text = manifest.read_text()
        for new, old in OLD.items():
            text = text.replace(f'"file": "{Path(new).name}"', f'"file": "{Path(old).name}"')
        manifest.write_text(text)
    for new, old in OLD.items():
        (root / old).parent.mkdir(parents=True, exist_ok=True)
        (root / new).rename(root / old)
    for folder in ("w4-a16/1.5b", "w4-a16", "x-y"):
        (root / folder).rmdir()


@pytest.fixture
def new_content(shelf, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What the store held before it was given old names."""
    with monkeypatch.context() as patch:  # two platforms, whichever this machine is
        patch.setattr(golden_module, "current_platform", lambda device="cpu": Platform("cpu", "x86_64", "AVX512"))
        for number, name in enumerate(NAMES, 1):
            shelf.write(name, VALUE * number)
        patch.setattr(golden_module, "current_platform", lambda device="cpu": Platform("cpu", "x86_64", "AVX2"))
        shelf.write("a_b", VALUE + 1, variant=True)
    content = shelf.content()
    _age(shelf.root)
    assert set(shelf.content()) == {OLD.get(path, path) for path in content}
    return content


@pytest.fixture
def run(shelf, no_ci, capsys: pytest.CaptureFixture[str]):
    """Run an action on the store; return exit code, standard output and standard error."""
    no_ci()

    def command(action: str, *arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(["golden", action, *arguments, "--golden-dir", str(shelf.root), "--cache-dir", str(shelf.cache.parent)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("update", ["", "new", "all"])
def test_a_golden_under_its_old_name_is_not_called_missing(shelf, new_content, name: str, update: str) -> None:
    before = shelf.content()
    for ask in (lambda golden: golden.check(name, VALUE), lambda golden: golden.inputs(name, lambda: {"x": VALUE})):
        with pytest.raises(GoldenError, match=r"rename (it|them) with harness golden rename if an older harness wrote"):
            ask(shelf.golden(update))
    assert shelf.content() == before


@pytest.mark.parametrize("arguments", [("list",), ("why", "x_y/plain"), ("prune", "x_y/plain", "--delete"), ("prune", "a_b", "--delete")])
def test_every_action_says_what_to_do(run, shelf, new_content, arguments: tuple[str, ...]) -> None:
    before = shelf.content()
    code, _, error = run(*arguments)
    assert code == 3
    assert "harness golden rename" in error
    assert shelf.content() == before


def test_rename_gives_the_new_names_and_changes_no_golden(run, shelf, new_content) -> None:
    code, text, _ = run("rename")
    assert code == 0
    assert sorted(text.splitlines()) == sorted(
        f"renamed: {old} -> {new}" for new, old in OLD.items() if new != old and not new.endswith("manifest.json")
    )
    assert shelf.content() == new_content
    assert run("list")[0] == 0
    assert not any((shelf.root / folder).exists() for folder in ("+w4_+a16/1%2e5+b", "x_y"))
    assert run("rename")[:2] == (0, "every name is right already\n")
    assert run("rename", "--json")[1] == '{\n "renamed": []\n}\n'


def test_a_store_inside_a_store_keeps_its_place(shelf, new_content) -> None:
    shelf.root.rename(shelf.folder / "moved")
    shelf.root.mkdir()
    (shelf.folder / "moved").rename(shelf.root / "inner")
    assert len(rename(shelf.root)) == 5
    assert shelf.content() == {f"inner/{path}": data for path, data in new_content.items()}


def test_a_machine_of_ci_renames_nothing(run, shelf, new_content, monkeypatch: pytest.MonkeyPatch) -> None:
    before = shelf.content()
    monkeypatch.setenv("CI", "1")
    code, _, error = run("rename")
    assert code == 3
    assert "CI machine never writes goldens" in error
    assert shelf.content() == before


def _damage_file(root: Path) -> None:
    (root / "layers" / "plain.safetensors").write_bytes(b"?")


def _lose_file(root: Path) -> None:
    (root / "x_y" / "plain.safetensors").unlink()


def _occupy(root: Path) -> None:
    (root / "a-b.safetensors").write_bytes(b"?")


def _lead_out(root: Path) -> None:
    manifest = root / "x_y" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"plain.safetensors"', '"../a_b.safetensors"'))


def _list_twice(root: Path) -> None:
    """As an older harness kept x-y/plain and x_y/plain."""
    (root / "x-y").mkdir()
    for file in ("manifest.json", "plain.safetensors"):
        (root / "x-y" / file).write_bytes((root / "x_y" / file).read_bytes())
    manifest = root / "x-y" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"x_y/plain"', '"x-y/plain"'))


def _move_up(root: Path) -> None:
    for path in (root / "+w4_+a16" / "1%2e5+b").iterdir():
        path.rename(root / "+w4_+a16" / path.name)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_damage_file, r"plain\.safetensors: is not the file that its manifest describes; nothing was renamed"),
        (_lose_file, r"plain\.safetensors: cannot be read"),
        (_occupy, r"a-b\.safetensors: exists and is in no manifest\.json; nothing was renamed"),
        (_lead_out, r"names the file '\.\./a_b\.safetensors', as no harness does"),
        (_move_up, r"golden 'W4_A16/1\.5B/deep': belongs into the folder w4-a16/1\.5b; nothing was renamed; move manifest and files back"),
        (_list_twice, r"would be the file of golden 'x-y/plain', now .*, and of golden 'x_y/plain', now .*; nothing was renamed"),
    ],
)
def test_what_cannot_be_renamed_whole_is_left_as_it_is(shelf, new_content, harm, message: str) -> None:
    harm(shelf.root)
    before = shelf.content()
    with pytest.raises(GoldenError, match=message):
        rename(shelf.root)
    assert shelf.content() == before


@pytest.mark.parametrize("fails_at", range(6))
def test_a_disk_that_fails_in_the_middle_leaves_the_old_names(shelf, new_content, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    before, real_stage, calls = shelf.content(), writer.stage, []

    def stage(path: Path, data: bytes) -> Path:
        calls.append(path)
        if len(calls) > fails_at:
            raise OSError(28, "No space left on device")
        return real_stage(path, data)

    monkeypatch.setattr(writer, "stage", stage)
    with pytest.raises(GoldenError, match="nothing was written"):
        rename(shelf.root)
    assert shelf.content() == before


def test_no_store_is_bad_input(run) -> None:
    assert run("rename")[0] == 3


def test_a_candidate_of_an_older_harness_is_an_error_that_says_what_to_do(run, shelf) -> None:
    shelf.check("x", VALUE)
    record = next(shelf.cache.rglob("*.json"))
    digest = hashlib.sha256(b"test_it.py::test_it").hexdigest()[:16]
    record.with_name(f"x@{digest}.safetensors.json").write_text(record.read_text().replace('"format": 2', '"format": 1'))
    record.unlink()
    code, _, error = run("accept")
    assert code == 3
    assert "delete it and run the test again" in error
