"""A golden's file has a name that a person reads and every file system holds; a second golden with one file is refused."""

from __future__ import annotations

import itertools
import string
import tempfile
import unicodedata
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import GoldenError
from harness.goldens.store.candidates import CandidateFolder
from harness.goldens.store.paths import MAX_PART, relative_path
from harness.goldens.store.writer import accept
from tests.mutation.golden_statements import Shelf

APART = [
    "a-b", "a/b", "a b", "ab", "a:b", "a\\b", "a%2fb", "a+b", "a~b", "a@b", "a=b", "%61-b", "+a-b", "W4A16", "W4A16[x]", "w4a16[x]",
    "Straße", "strasse", "é", unicodedata.normalize("NFD", "é"), "ı", "i", "İ", "K", "\u212a",
    "con", "CON", "con.x", "con x", "con_x", "prn", "nul", "aux.txt", "com1", "lpt9", "conx", "xcon", "con/x", "nul/nul",
    ".", "..", "../a", "...", ".hidden", "-x", "_x", "x-", "a", "a.", "a ", " a", "a..", "a.safetensors", "a.safetensors/b",
    "Manifest JSON", "manifest.json", "manifest.json/b", "\ud800", "\x00", "\n", "a\n", "a\tb", "x" * 119, "x" * 120, "x" * 121, "x" * 300,
    "x" * 299 + "y", "é" * 100, "a" * 300 + "/b", "a" * 300 + "b/b", "~" + "0" * 8,
]  # fmt: skip
TOGETHER = [("W4A16", "w4a16"), ("a_b", "a-b"), ("a b", "a.b"), ("A/x", "a/x"), ("int4 g_idx", "INT4.g-idx"), ("a. b", "a .b")]
DEVICES = {"con", "prn", "aux", "nul", *(f"com{n}" for n in range(10)), *(f"lpt{n}" for n in range(10))}
ANY_NAME = st.text(st.characters(codec=None) | st.sampled_from("abAB01-_./+%~@ :\\.con"), min_size=1, max_size=12).filter(
    lambda name: all(name.split("/"))
)
READABLE_NAME = st.text("aAb01-_. /", min_size=1, max_size=5).filter(lambda name: all(name.split("/")))


def as_windows_sees_it(path: str) -> str:
    """Two paths that are equal here are one file where case and trailing dots and blanks do not count."""
    return "/".join(part.casefold().rstrip(". ") for part in unicodedata.normalize("NFC", path).split("/"))


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("layers/W4A16_ASYM 5x128", "layers/w4a16-asym.5x128"),
        ("solvers/FP8_DYNAMIC gptq", "solvers/fp8-dynamic.gptq"),
        ("Llama 3.2/q_proj.weight", "llama.3.2/q-proj.weight"),
        ("W4A16[sym=True]", "w4a16-sym-true~fd024f5a"),
        ("CON.txt", "con-txt~09c8cc7e"),
        (".hidden", "hidden~16924190"),
        ("x" * 121, "x" * 111 + "~79072a47"),
        ("é", "~4a99557e"),
    ],
)
def test_names_read_as_the_test_wrote_them(name: str, path: str) -> None:
    assert relative_path(name) == f"{path}.safetensors"


def test_hard_names_have_files_of_their_own() -> None:
    assert len({as_windows_sees_it(relative_path(name)) for name in APART}) == len(APART)


def _is_safe(part: str) -> bool:
    plain = set(part) <= set(string.ascii_lowercase + string.digits + "-.~")
    return plain and part[0] not in ".-" and part[-1] != "." and part.partition(".")[0] not in DEVICES


@given(ANY_NAME)
def test_files_can_be_made_anywhere(name: str) -> None:
    *folders, file = relative_path(name).split("/")
    stem = file.removesuffix(".safetensors")
    assert all(_is_safe(part) and len(part) <= MAX_PART for part in (*folders, stem))
    assert not any(folder == "manifest.json" or folder.endswith(".safetensors") for folder in folders), "the name of a file of a store"
    assert len(folders) == name.count("/"), "it cannot lead out of the store"


@pytest.mark.parametrize("name", APART, ids=range(len(APART)))
def test_hard_names_can_be_made_anywhere(name: str) -> None:
    test_files_can_be_made_anywhere.hypothesis.inner_test(name)


@given(ANY_NAME, ANY_NAME)
def test_different_names_differ_on_every_file_system_or_have_one_path(one: str, other: str) -> None:
    """A path that is only nearly the same would be refused by nobody."""
    paths = relative_path(one), relative_path(other)
    assert (paths[0] == paths[1]) == (as_windows_sees_it(paths[0]) == as_windows_sees_it(paths[1]))
    if one != other and paths[0] == paths[1]:
        assert one.lower().translate(str.maketrans(" _", ".-")) == other.lower().translate(str.maketrans(" _", ".-"))


def _write(shelf: Shelf, name: str, value: float) -> str:
    """Write a golden; return why it was refused, or nothing."""
    try:
        shelf.write(name, torch.full((2,), value))
    except GoldenError as error:
        return str(error)
    return ""


@given(READABLE_NAME, READABLE_NAME)
@settings(max_examples=60, deadline=None)
def test_two_goldens_have_two_files_or_the_second_is_refused(one: str, other: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shelf = Shelf(Path(folder))
        assert not _write(shelf, one, 1.0)
        before = shelf.content()
        refusal = _write(shelf, other, 1.0 if one == other else 2.0)
        assert bool(refusal) == (one != other and relative_path(one) == relative_path(other))
        if refusal:
            assert f"golden {other!r}: its file" in refusal
            assert f"is that of golden {one!r} too" in refusal
            assert shelf.content() == before
        elif one != other:
            assert shelf.check(other, torch.full((2,), 2.0))["verdict"] == "pass"
        assert shelf.check(one, torch.ones(2))["verdict"] == "pass"


@pytest.mark.parametrize(("one", "other"), TOGETHER)
@pytest.mark.parametrize("update", ["", "new", "failed", "all"])
def test_a_golden_whose_file_is_anothers_is_refused_whatever_is_asked(shelf, one: str, other: str, update: str) -> None:
    shelf.write(one, torch.ones(2))
    before = shelf.content()
    golden = shelf.golden(update)
    with pytest.raises(GoldenError, match=r"golden .*: its file .*\.safetensors is that of golden .*harness golden prune --delete .*"):
        golden.check(other, torch.ones(2))
    assert golden.outcomes[-1]["verdict"] == "unreadable"
    with pytest.raises(GoldenError, match="is that of golden"):
        shelf.golden(update).inputs(other, lambda: {"x": torch.ones(2)})
    assert shelf.content() == before


@pytest.mark.parametrize(("one", "other"), TOGETHER)
def test_one_test_that_gives_two_goldens_one_file_is_told(shelf, one: str, other: str) -> None:
    golden = shelf.golden("new")
    golden.check(one, torch.ones(2))
    with pytest.raises(GoldenError, match="is that of golden"):
        golden.check(other, torch.ones(2))
    with pytest.raises(GoldenError, match="is that of golden"):
        golden.inputs(other, lambda: {"x": torch.ones(2)})
    assert [candidate.name for candidate in CandidateFolder(shelf.cache).all()] == [one]


@pytest.mark.parametrize(("one", "other"), TOGETHER)
def test_candidates_do_not_overwrite_each_other_and_only_one_is_accepted(shelf, one: str, other: str) -> None:
    shelf.check(one, torch.ones(2))
    shelf.check(other, torch.full((2,), 2.0))
    both = list(CandidateFolder(shelf.cache).all())
    assert {candidate.name for candidate in both} == {one, other}
    for order in (both, both[::-1]):
        with pytest.raises(GoldenError, match="is that of golden"):
            accept(shelf.root, order)
        assert not shelf.content()
    accept(shelf.root, both[:1])
    before = shelf.content()
    with pytest.raises(GoldenError, match="is that of golden"):
        accept(shelf.root, both[1:])
    assert shelf.content() == before


def test_a_merge_that_leaves_two_goldens_with_one_file_is_seen(shelf) -> None:
    shelf.write("W4A16", torch.ones(2))
    manifest = shelf.root / "manifest.json"
    ours = manifest.read_text()
    manifest.write_text(ours.replace('"W4A16": {', '"w4a16": ' + ours.split('"W4A16": ', 1)[1].rsplit("}", 2)[0] + ',\n"W4A16": {', 1))
    with pytest.raises(GoldenError, match=r"manifest\.json: golden 'W4A16': its file w4a16\.safetensors is that of golden 'w4a16' too"):
        shelf.check("W4A16", torch.ones(2))


@pytest.mark.parametrize("name", ["", "/", "a//b", "/a", "a/"])
def test_an_empty_part_is_refused(name: str) -> None:
    with pytest.raises(GoldenError, match="empty part"):
        relative_path(name)


def test_a_variant_collides_with_no_name() -> None:
    names = ["a", "a@cpu-x86_64-AVX2", "a-cpu", "a~b"]
    paths = [relative_path(name, variant) for name, variant in itertools.product(names, ["", "cpu-x86_64-AVX2"])]
    assert len(set(paths)) == len(paths)


def test_two_platforms_never_share_a_file(shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.goldens import golden as golden_module
    from harness.goldens.store.provenance import Platform

    for number, set_name in enumerate(("AVX512", "AVX2", "avx2"), 1):
        monkeypatch.setattr(golden_module, "current_platform", lambda device="cpu", name=set_name: Platform("cpu", "x86_64", name))
        if number < 3:
            shelf.write("x", torch.full((2,), float(number)), variant=True)
    before = shelf.content()
    with pytest.raises(GoldenError, match=r"its file x@cpu-x86-64-avx2\.safetensors for cpu-x86_64-avx2 is that for cpu-x86_64-AVX2"):
        shelf.write("x", torch.full((2,), 3.0), variant=True)
    assert shelf.content() == before
