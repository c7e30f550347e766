"""No two names share a file, on any file system; a manifest that was edited is refused."""

from __future__ import annotations

import itertools
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.errors import GoldenError
from harness.goldens.store.paths import MAX_PART, relative_path, stem_of

HARD = [
    "a-b", "a_b", "a/b", "a b", "a.b", "ab", "A-B", "A/b", "a/B", "a:b", "a\\b", "a%2fb", "a+b", "a~b", "a@b", "%61-b", "+a-b",
    "W4A16", "w4a16", "W4a16", "Straße", "strasse", "STRASSE", "é", unicodedata.normalize("NFD", "é"), "ı", "i", "I", "İ", "K", "k",
    "\u212a",
    "con", "CON", "con.x", "Con", "prn", "nul", "aux.txt", "com1", "COM1", "lpt9", "conx", "xcon", "con/x", "nul/nul",
    ".", "..", "../a", "...", ".hidden", "a.", "a ", " a", "a..", "a.safetensors", "a.safetensors/b", "manifest.json", "manifest.json/b",
    "\ud800", "\x00", "\n", "a\tb", "x" * 119, "x" * 120, "x" * 121, "x" * 300, "x" * 299 + "y", "X" * 60, "X" * 61, "é" * 100,
    "a" * 300 + "/b", "a" * 300 + "b/b", "~" + "0" * 32,
]  # fmt: skip
DEVICES = {"con", "prn", "aux", "nul", *(f"com{n}" for n in range(10)), *(f"lpt{n}" for n in range(10))}
CHARACTERS = st.characters(codec=None) | st.sampled_from("abAB01-_./+%~@ :\\.con")


def as_windows_sees_it(path: str) -> str:
    """Two paths that are equal here are one file where case and trailing dots and blanks do not count."""
    return "/".join(part.casefold().rstrip(". ") for part in unicodedata.normalize("NFC", path).split("/"))


def test_hard_names_have_files_of_their_own() -> None:
    assert len({as_windows_sees_it(relative_path(name)) for name in HARD}) == len(HARD)


@pytest.mark.parametrize("name", HARD, ids=range(len(HARD)))
def test_files_can_be_made_anywhere(name: str) -> None:
    for part in relative_path(name).split("/"):
        assert part.isascii()
        assert len(part) <= MAX_PART + len(".safetensors")
        assert not set(part) & set('<>:"\\|?* \x00')
        assert not part.startswith(".")
        assert not part.endswith((".", " "))
        assert part.partition(".")[0] not in DEVICES
        assert part == part.lower()


def test_a_name_cannot_lead_out_of_the_store_nor_onto_the_manifest() -> None:
    for name in HARD:
        parts = relative_path(name).split("/")
        assert ".." not in parts
        assert "manifest.json" not in parts


@given(st.text(CHARACTERS, min_size=1, max_size=12), st.text(CHARACTERS, min_size=1, max_size=12))
def test_different_names_have_different_files(one: str, other: str) -> None:
    paths = []
    for name in (one, other):
        try:
            paths.append(as_windows_sees_it(relative_path(name)))
        except GoldenError:
            assert not all(name.split("/"))
            return
    assert (one == other) == (paths[0] == paths[1])


@pytest.mark.parametrize("name", ["", "/", "a//b", "/a", "a/"])
def test_an_empty_part_is_refused(name: str) -> None:
    with pytest.raises(GoldenError, match="empty part"):
        relative_path(name)


def test_readable_names_stay_readable() -> None:
    assert relative_path("layers/W4A16_ASYM 5x128") == "layers/+w4+a16_+a+s+y+m%205x128.safetensors"


def test_a_variant_collides_with_no_name() -> None:
    names = ["a", "a@cpu-x86_64-AVX2", "a-cpu", "a~b"]
    paths = [relative_path(name, variant) for name, variant in itertools.product(names, ["", "cpu-x86_64-AVX2"])]
    assert len(set(paths)) == len(paths)


def test_a_planted_escape_that_joins_names_would_be_seen() -> None:
    def careless(name: str) -> str:
        return name.replace("-", "_").replace("/", "_")

    assert len({careless(name) for name in ("a-b", "a_b", "a/b")}) == 1
    assert len({stem_of(name) if "/" not in name else relative_path(name) for name in ("a-b", "a_b", "a/b")}) == 3
