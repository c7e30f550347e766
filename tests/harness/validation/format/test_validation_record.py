"""compression.json is held against the folders: another base, or calibration data taken for held-out data, is caught."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from compressor.data import load_dataset_source
from compressor.model.checkpoints.save import write_record
from harness.validation.format.container import whole
from harness.validation.format.record import check_record, file_hashes, read_record

HELD = replace(load_dataset_source([[*range(40)], [*range(50, 90)]]), sha256="d" * 64)
MARKS = HELD.marks.record
OTHERS = load_dataset_source([[*range(200, 240)]]).marks.record
HASHES = {"config.json": "aa", "model.safetensors": "bb", "tokenizer.json": "cc"}


def outcomes(folder: Path, content: str | None) -> dict[str, tuple[str, str]]:
    if content is not None:
        (folder / "compression.json").write_text(content)
    return {record.name: (record.outcome.value, record.summary) for record in check_record(folder, HASHES, ["model.safetensors"], HELD)}


def test_a_record_of_this_base_and_of_other_data_passes(tmp_path):
    content = {"base": {"config.json": "aa", "model.safetensors": "bb"}, "data": {"sha256": "e" * 64, "marks": OTHERS}}
    write_record(tmp_path, content, None, {})
    found = outcomes(tmp_path, None)
    assert {outcome for outcome, _ in found.values()} == {"pass"} and len(found) == 3


@pytest.mark.parametrize(
    ("edit", "outcome"),
    {
        "nothing": (lambda d: None, "pass"),
        "in another order": (lambda d: d.update(seed=d.pop("seed")), "pass"),
        "seed": (lambda d: d.update(seed=1), "fail"),
        "a number of another kind": (lambda d: d["layers"]["9"].__setitem__(0, 1.0), "fail"),
        "a key more": (lambda d: d.update(more=None), "fail"),
        "a key less": (lambda d: d.pop("seed"), "fail"),
        "deep inside": (lambda d: d["layers"]["10"].pop(), "fail"),
        "the digest": (lambda d: d.update(sha256="0" * 64), "fail"),
        "a digest of another kind": (lambda d: d.update(sha256=None), "fail"),
        "no digest": (lambda d: d.pop("sha256"), "inconclusive"),
    }.values(),
)
def test_any_edit_of_a_record_is_told(tmp_path, edit, outcome):
    write_record(tmp_path, {"seed": 0, "layers": {10: [0.1, "\u00e4"], 9: [1, True]}}, None, {})
    content = json.loads((tmp_path / "compression.json").read_text())
    edit(content)
    assert outcomes(tmp_path, json.dumps(content, ensure_ascii=False))["record.whole"][0] == outcome


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
        ({"data": {"sha256": "e" * 64}}, "record.data", "inconclusive", "says nothing of what this text and that"),
        ({"data": {"sha256": "e" * 64, "marks": {"every": 1, "hex": ""}}}, "record.data", "inconclusive", "held no text"),
        *(
            ({"data": {"sha256": "e" * 64, "marks": odd}}, "record.data", "fail", "data.marks are not what a run writes")
            for odd in (
                None,
                [],
                {},
                {**MARKS, "hex": "0" * 7},
                {**MARKS, "hex": "g" * 8},
                {**MARKS, "every": 0},
                {**MARKS, "every": True},
                {**MARKS, "every": 3},
                {**MARKS, "every": 2**17},
                {**MARKS, "every": 2},
                {**MARKS, "hex": MARKS["hex"][:-8]},
                {**MARKS, "hex": MARKS["hex"][::-1]},
                {"every": 1, "hex": MARKS["hex"][::-1]},
                {"every": 1, "hex": "0" * len(MARKS["hex"])},
            )
        ),
        ({"data": {"sha256": "e" * 64, "marks": MARKS}}, "record.data", "fail", "100% of this text was in the calibration data"),
        (
            {"data": {"sha256": "e" * 64, "marks": {"every": 1, "hex": OTHERS["hex"]}}},
            "record.data",
            "inconclusive",
            "no digest of data.marks",
        ),
        ({"data": {"sha256": "e" * 64, "marks": {"every": 1, "hex": MARKS["hex"]}}}, "record.data", "fail", "100% of this text"),
        ({"data": "x"}, "record.data", "fail", "data.sha256 is no digest"),
        *(({"base": odd}, "record.base", "fail", "base is no table of digests") for odd in (5, "x", ["a"], "")),
    ],
)
def test_what_does_not_belong_together_is_caught(tmp_path, content, name, outcome, message):
    found = outcomes(tmp_path, json.dumps(content))[name]
    assert found[0] == outcome
    assert message in found[1]


@pytest.mark.parametrize(
    ("calibration", "outcome"),
    {
        "one is left out": (lambda rows: rows[1:], "fail"),
        "in another order": (lambda rows: rows[::-1], "fail"),
        "cut": (lambda rows: [row[:50] for row in rows], "fail"),
        "longer, and later": (lambda rows: [[1, 2, 3, *row, *row] for row in rows], "fail"),
        "joined": (lambda rows: [[token for row in rows for token in row]], "fail"),
        "among others": (lambda rows: [[token + 500 for row in rows for token in row], *rows], "fail"),
        "a third of them": (lambda rows: rows[::3], "fail"),
        "a fifth of them": (lambda rows: rows[::5], "pass"),
        "the beginning of each": (lambda rows: [[*row[:30], *row[60::-1]] for row in rows], "pass"),
        "others": (lambda rows: [row[::-1] for row in rows], "pass"),
    }.values(),
)
@pytest.mark.parametrize("as_batches", [False, True])
def test_text_that_was_calibrated_on_is_told_however_it_is_cut(tmp_path, calibration, outcome, as_batches):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 500, (90, 100), generator=generator).tolist()
    seen, held = load_dataset_source(calibration(rows), max_seq_length=20_000), load_dataset_source(rows, max_seq_length=100)
    if as_batches:
        padded = torch.nn.functional.pad(torch.tensor(rows), (0, 3))
        mask = (torch.arange(103) < 100).long().expand(90, -1)
        held = load_dataset_source(DataLoader([{"input_ids": padded, "attention_mask": mask}], batch_size=None))  # type: ignore[arg-type]
    content = {"base": {}, "data": {"sha256": seen.sha256, "marks": seen.marks.record}}
    (tmp_path / "compression.json").write_text(json.dumps(content))
    (record,) = [one for one in check_record(tmp_path, {}, [], held) if one.name == "record.data"]
    assert record.outcome.value == outcome, record.summary
    assert len(seen.marks.marks) <= 4096 and (seen.marks.every > 1) == (seen.num_tokens > 6000)


def test_a_sample_that_comes_again_counts_each_time_and_a_template_once(tmp_path):
    rows = torch.randint(0, 500, (40, 120), generator=torch.Generator().manual_seed(4)).tolist()
    template = rows[0][:60]
    cases = {
        "one sample that comes again": (rows[:1], [*rows[:1] * 15, *rows[10:30]], "fail"),
        "a template that comes again": ([template + row[60:] for row in rows[:20]], [template + row[60:] for row in rows[20:]], "pass"),
    }
    for seen, held, outcome in cases.values():
        known, data = load_dataset_source(seen), load_dataset_source(held)
        (tmp_path / "compression.json").write_text(json.dumps({"data": {"sha256": known.sha256, "marks": known.marks.record}}))
        (record,) = [one for one in check_record(tmp_path, {}, [], data) if one.name == "record.data"]
        assert record.outcome.value == outcome, record.summary


def test_a_broken_record_fails_and_none_is_skipped(tmp_path):
    assert {outcome for outcome, _ in outcomes(tmp_path, None).values()} == {"skip"}
    assert outcomes(tmp_path, "{")["record.whole"][0] == "fail"
    assert outcomes(tmp_path, '{"seed": 1, "seed": 0}')["record.whole"][0] == "fail"
    assert outcomes(tmp_path, "[]")["record.whole"][0] == "fail"
    assert read_record(tmp_path) is None


def test_hashes_cover_every_file_below_the_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b").write_bytes(b"two")
    (tmp_path / "a").write_bytes(b"one")
    assert file_hashes(tmp_path) == {"a": hashlib.sha256(b"one").hexdigest(), "sub/b": hashlib.sha256(b"two").hexdigest()}


@pytest.mark.parametrize("value", [1.0, 1.5, "1", True, None])
def test_a_count_is_a_whole_number(value):
    assert whole(1) == 1
    with pytest.raises(TypeError, match="is no whole number"):
        whole(value)
