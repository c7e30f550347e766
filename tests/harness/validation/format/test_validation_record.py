"""compression.json is held against the folders: another base, or calibration data taken for held-out data, is caught."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from harness.validation.format.record import check_record, file_hashes, read_record

HASHES = {"config.json": "aa", "model.safetensors": "bb", "tokenizer.json": "cc"}


def outcomes(folder: Path, content: str | None) -> dict[str, tuple[str, str]]:
    if content is not None:
        (folder / "compression.json").write_text(content)
    return {record.name: (record.outcome.value, record.summary) for record in check_record(folder, HASHES, ["model.safetensors"], "d" * 64)}


def test_a_record_of_this_base_and_of_other_data_passes(tmp_path):
    content = {"base": {"config.json": "aa", "model.safetensors": "bb"}, "data": {"sha256": "e" * 64}}
    found = outcomes(tmp_path, json.dumps(content))
    assert {outcome for outcome, _ in found.values()} == {"pass"}


@pytest.mark.parametrize(
    ("content", "name", "outcome", "message"),
    [
        ({"base": {"model.safetensors": "xx"}}, "record.base", "fail", "model.safetensors: has another sha256 here"),
        ({"base": {"ghost.safetensors": "bb"}}, "record.base", "fail", "ghost.safetensors: is not here"),
        ({"data": {"sha256": "d" * 64}}, "record.data", "fail", "very tokens that the model was calibrated on"),
        ({"data": None}, "record.data", "skip", "names no calibration data"),
        ({"data": None, "pipeline": "data_free"}, "record.data", "skip", "names no calibration data"),
        ({"base": {"config.json": "aa"}}, "record.base", "inconclusive", "no digest of the base's model.safetensors"),
        ({"base": {"model.safetensors": "bb"}}, "record.base", "inconclusive", "no digest of the base's config.json"),
        ({"base": {}}, "record.base", "skip", "the model was in memory"),
        *((taken, "record.base", "inconclusive", "no digests of a base") for taken in ({}, {"base": None})),
        *((taken, "record.data", "inconclusive", "no digest of the data") for taken in ({}, {"data": {}}, {"data": {"sha256": None}})),
        ({"data": None, "pipeline": "sequential"}, "record.data", "inconclusive", "no digest of the data"),
        *(({"data": {"sha256": odd}}, "record.data", "fail", "data.sha256 is no digest") for odd in (5, "", "e", ["e" * 64])),
        ({"data": "x"}, "record.data", "fail", "data.sha256 is no digest"),
        *(({"base": odd}, "record.base", "fail", "base is no table of digests") for odd in (5, "x", ["a"], "")),
    ],
)
def test_what_does_not_belong_together_is_caught(tmp_path, content, name, outcome, message):
    found = outcomes(tmp_path, json.dumps(content))[name]
    assert found[0] == outcome
    assert message in found[1]


def test_a_broken_record_fails_and_none_is_skipped(tmp_path):
    assert {outcome for outcome, _ in outcomes(tmp_path, None).values()} == {"skip"}
    assert outcomes(tmp_path, "{")["record.base"][0] == "fail"
    assert outcomes(tmp_path, "[]")["record.base"][0] == "fail"
    assert read_record(tmp_path) is None


def test_hashes_cover_every_file_below_the_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b").write_bytes(b"two")
    (tmp_path / "a").write_bytes(b"one")
    assert file_hashes(tmp_path) == {"a": hashlib.sha256(b"one").hexdigest(), "sub/b": hashlib.sha256(b"two").hexdigest()}
