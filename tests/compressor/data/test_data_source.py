"""Datasets by folder and file, splits, functions on rows, collators, joined samples: what the model gets, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import save_file
from torch.utils.data import DataLoader, Dataset

from compressor.data import load_dataset_source, open_source
from compressor.errors import DatasetError
from compressor.settings.verbs import DataSettings

ROWS = [{"input_ids": [10 * n + 1, 10 * n + 2, 10 * n + 3], "label": n, "loss_mask": [0, 1, 1]} for n in range(6)]


def ids_of(
    source: Any, *, num_calibration_samples: int = 512, concatenate: bool = False, length: int | None = None, **settings: Any
) -> list[list[int]]:
    opened = open_source(source, DataSettings(**settings), batch_size=None, shuffle_seed=None)
    data = load_dataset_source(
        opened, num_calibration_samples=num_calibration_samples, concatenate=concatenate, max_seq_length=length, batch_size=None
    )
    return [row.tolist() for batch in data.batches if isinstance(batch, dict) for row in batch["input_ids"]]


PLAIN = [row["input_ids"] for row in ROWS]


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet", "folder", "saved", "saved_dict", "dict", "mapping"])
def test_the_same_rows_from_every_source(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    made = datasets.Dataset.from_list(ROWS)
    source: Any = tmp_path / f"d.{kind}"
    split = None
    if kind == "json":
        source.write_text(json.dumps(ROWS))
    elif kind == "jsonl":
        source.write_text("\n".join(map(json.dumps, ROWS)))
    elif kind == "parquet":
        made.to_parquet(source)
    elif kind == "folder":
        source.mkdir()
        made.to_parquet(source / "train.parquet")
    elif kind == "saved":
        made.save_to_disk(source)
    elif kind == "saved_dict":
        datasets.DatasetDict({"train": made, "test": made.select([0])}).save_to_disk(source)
        split = "train"
    elif kind == "dict":
        source, split = datasets.DatasetDict({"test": made.select([0]), "train": made}), "train"
    else:
        source = {"train": made}
    assert ids_of(source, split=split) == PLAIN


def test_words_of_a_csv_that_pandas_takes_for_nothing_are_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "d.csv").write_text("text\nNA\nnull\nwords\n")
    found = open_source(tmp_path / "d.csv", DataSettings(), batch_size=None, shuffle_seed=None)
    assert [row["text"] for row in found] == ["NA", "null", "words"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("words", [["12", "007"], ["True", "False"], ["1e5", "word"], ["2020-01-01", ""]])
def test_texts_of_a_csv_stay_texts_whatever_they_look_like(
    words: list[str], streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "d.csv").write_text("number,words\n" + "".join(f"{number},{word}\n" for number, word in enumerate(words)))
    settings = DataSettings(streaming=streaming)
    found = open_source(tmp_path / "d.csv", settings, batch_size=None, shuffle_seed=None, text_column="words")
    assert list(found) == [{"number": number, "words": word} for number, word in enumerate(words)]


@pytest.mark.parametrize(
    ("name", "held", "words"),
    [
        ("d.csv", "text,label,text\na,0,b\n", r"d.csv: 2 columns are called 'text'; rename all but one"),
        ("d.parquet", "", r"d.parquet: 2 columns are called 'text'"),
        ("d.json", '[{"text": "a", "text": "b"}]', r"d.json: this JSON .*'text' stands twice in one object"),
        ("d.jsonl", '{"text": "a", "text": "b"}', "line 1: this JSON cannot be read .'text' stands twice in one object"),
        ("d.jsonl", '{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "'content' stands twice in one object"),
    ],
)
def test_a_name_that_stands_twice_is_refused(name: str, held: str, words: str, tmp_path: Path) -> None:
    if held:
        (tmp_path / name).write_text(held)
    else:
        parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), tmp_path / name)
    with pytest.raises(DatasetError, match=words):
        ids_of(tmp_path / name)


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_none(name: str) -> None:
    with pytest.raises(DatasetError, match="names no data; give a file, a folder or the name of a dataset"):
        ids_of(name)


def test_surplus_cells_of_a_csv_are_seen_in_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("id,words\n1,a b,c d\n2,e,f\n")
    found = open_source(path, DataSettings(streaming=True), batch_size=None, shuffle_seed=None, text_column="words")
    with pytest.raises(
        DatasetError, match=r"d\.csv: a row has more cells than there are columns: put texts .* in quotation marks; repair the file$"
    ):
        list(found)
    named = DataSettings(streaming=True, raw_kwargs={"index_col": 0})
    assert [row["words"] for row in open_source(path, named, batch_size=None, shuffle_seed=None)] == ["c d", "f"]


def test_csv_has_columns_that_are_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "d.csv"
    path.write_text('words,label\n"1 2 3",0\n"4 5",1\n')
    found = ids_of(path, preprocessing_func=lambda row: {"input_ids": [int(word) for word in row["words"].split()]})
    assert found == [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize(("split", "taken"), [("train[:2]", slice(0, 2)), ("train[50%:]", slice(3, 6)), ("train[1:-1]", slice(1, 5))])
def test_a_part_of_a_split(split: str, taken: slice) -> None:
    made = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])})
    assert ids_of(made, split=split) == PLAIN[taken]
    assert ids_of({"train": ROWS, "test": ROWS[:1]}, split=split) == PLAIN[taken]


def test_splits_that_cannot_be_taken_are_refused() -> None:
    rows = datasets.Dataset.from_list(ROWS)
    both = datasets.DatasetDict({"train": rows, "test": rows})
    for source, split, words in (
        (both, None, "it has the splits train, test; name one"),
        (both, "tain", "none that is called 'tain'; did you mean 'train'"),
        (both, "train[2", "no part of a split"),
        (rows, "train", "this data has no splits"),
        (both.with_format("torch") and {"train": rows.to_iterable_dataset()}, "train[:2]", "cuts a stream"),
    ):
        with pytest.raises(DatasetError, match=words.replace("[", r"\[")):
            ids_of(source, split=split)


def test_functions_on_rows_come_before_columns_are_removed() -> None:
    def swapped(row: Any) -> Any:
        return {"input_ids": row["input_ids"][::-1], "token_type_ids": [1, 1, 1]}

    assert ids_of(ROWS, preprocessing_func=swapped, remove_columns=["token_type_ids"]) == [row[::-1] for row in PLAIN]
    assert ids_of(datasets.Dataset.from_list(ROWS).to_iterable_dataset(), preprocessing_func=swapped) == [row[::-1] for row in PLAIN]
    with pytest.raises(DatasetError, match="dataset row 0: preprocessing_func gave a list"):
        ids_of(ROWS, preprocessing_func=lambda row: row["input_ids"])
    with pytest.raises(DatasetError, match="without columns that are named"):
        ids_of([[1, 2, 3]], remove_columns=["label"])
    for rows in (ROWS, datasets.Dataset.from_list(ROWS), {"train": ROWS}):
        with pytest.raises(DatasetError, match=r"^remove_columns: no row has a column 'lable'; did you mean 'label'\?$"):
            ids_of(rows, remove_columns=["lable"])
    assert ids_of([*ROWS, {"input_ids": [7], "odd": 1}], remove_columns=["odd"]) == [*PLAIN, [7]]


def test_a_function_may_be_named_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "rows_for_a_test.py").write_text("def first(row):\n    return {'input_ids': row['input_ids'][:1]}\n\nNUMBER = 3\n")
    assert ids_of(ROWS, preprocessing_func=f"{tmp_path}/rows_for_a_test.py:first") == [row[:1] for row in PLAIN]
    with pytest.raises(DatasetError, match="no 'frist'; did you mean 'first'"):
        ids_of(ROWS, preprocessing_func=f"{tmp_path}/rows_for_a_test.py:frist")
    with pytest.raises(DatasetError, match="is no function"):
        ids_of(ROWS, preprocessing_func=f"{tmp_path}/rows_for_a_test.py:NUMBER")


@pytest.mark.parametrize(("use", "num_tokens"), [(True, 12), (False, 18)])
def test_a_loss_mask_may_be_left_unread(use: bool, num_tokens: int) -> None:
    opened = open_source(ROWS, DataSettings(use_loss_mask=use), batch_size=None, shuffle_seed=None)
    assert load_dataset_source(opened).num_tokens == num_tokens


def test_a_collator_makes_the_batches_that_the_model_gets() -> None:
    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {"pixels": torch.tensor([row["label"] for row in rows], dtype=torch.float32)[:, None]}

    def labels(seed: int | None, size: int | None) -> list[list[float]]:
        loader = open_source(ROWS, DataSettings(data_collator=collate), batch_size=size, shuffle_seed=seed)
        assert isinstance(loader, DataLoader)
        return [batch["pixels"].flatten().tolist() for batch in load_dataset_source(loader).batches if isinstance(batch, dict)]

    assert labels(None, None) == [[0.0], [1.0], [2.0], [3.0], [4.0], [5.0]]
    assert labels(None, 4) == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0]]
    drawn = labels(5, 6)
    assert drawn == labels(5, 6) != labels(None, 6) and sorted(drawn[0]) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_settings_without_a_use_are_refused_for_a_loader() -> None:
    loader = DataLoader(ROWS)  # type: ignore[arg-type]
    for name, value in {"split": "train", "preprocessing_func": print, "remove_columns": ["label"], "use_loss_mask": False}.items():
        with pytest.raises(DatasetError, match=f"{name}: .* a DataLoader gives batches as they are; leave it out"):
            open_source(loader, DataSettings(**{name: value}), batch_size=None, shuffle_seed=None)
    with pytest.raises(DatasetError, match="concatenate_data: a DataLoader"):
        load_dataset_source(loader, concatenate=True)


@pytest.mark.parametrize("rows", [[[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]], [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]], [[n] for n in range(1, 11)]])
def test_joined_samples_are_cut_into_one_length(rows: list[list[int]]) -> None:
    assert ids_of(rows, concatenate=True, length=4) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert ids_of(rows, concatenate=True, length=4, num_calibration_samples=1) == [[1, 2, 3, 4]]
    assert ids_of(rows, concatenate=True, length=10) == [list(range(1, 11))]
    with pytest.raises(DatasetError, match="all samples together do not fill 11 tokens of which one counts"):
        ids_of(rows, concatenate=True, length=11)


def test_what_a_mask_takes_out_stays_out_when_samples_are_joined() -> None:
    data = load_dataset_source(ROWS[:2], concatenate=True, max_seq_length=6)
    assert data.num_tokens == 4 and data.token_masks[0] is not None and data.token_masks[0].tolist() == [[False, True, True] * 2]


def test_a_name_that_cannot_be_loaded_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source in (str(tmp_path / "empty"), "nobody/has-this-dataset"):
        with pytest.raises(DatasetError, match="no dataset can be loaded from there") as caught:
            ids_of(source)
        assert "\n" not in str(caught.value) and str(caught.value).startswith(source)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.csv", "text\né\n".encode("latin-1"), "convert the file to UTF-8"),
        ("a.json", b"5", "repair the file"),
        ("b.json", b"[]", "no row"),
    ],
)
def test_what_the_library_logs_of_a_file_is_not_told_beside_the_error(
    tmp_path: Path, name: str, content: bytes, told: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / name).write_bytes(content)
    before = datasets.utils.logging.get_verbosity()
    with pytest.raises(DatasetError, match=told):
        ids_of(str(tmp_path / name))
    assert capfd.readouterr().err == "" and datasets.utils.logging.get_verbosity() == before


def test_a_file_that_is_not_there_is_told_though_a_split_was_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"no such file; check the path \(a dataset of the hub is named owner/name"):
        ids_of(str(tmp_path / "nowhere.jsonl"), split="train[:3]")


def test_a_kind_of_files_may_stand_for_the_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "d.txt").write_text("\n".join(json.dumps(row) for row in ROWS))
    assert ids_of("json", split="train[1:]", raw_kwargs={"data_files": str(tmp_path / "d.txt")}) == PLAIN[1:]


@pytest.mark.parametrize("name", ["d.jsonl", "d.csv"])
def test_a_file_has_no_configurations_to_choose_from(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"input_ids": [1, 2]}\n')
    with pytest.raises(DatasetError, match="dataset_config_name: 'main' was given, but this file has no configurations; leave it out"):
        ids_of(tmp_path / name, dataset_config_name="main")


@pytest.mark.parametrize(("name", "value"), [("streaming", True), ("dataset_config_name", "main"), ("raw_kwargs", {"revision": "x"})])
def test_what_says_how_to_load_is_refused_where_nothing_is_loaded(name: str, value: Any, tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    save_file({"input_ids": torch.tensor(PLAIN)}, tmp_path / "d.safetensors")
    sources = [ROWS, datasets.Dataset.from_list(ROWS), {"train": ROWS}, tmp_path / "saved", tmp_path / "d.safetensors"]
    if name == "streaming":  # whose lines are read as they come
        (tmp_path / "d.jsonl").write_text('{"input_ids": [1, 2]}\n')
        sources.append(tmp_path / "d.jsonl")
    for source in sources:
        with pytest.raises(DatasetError, match=f"^{name}: .* was given, but this "):
            ids_of(source, **{name: value})


def test_a_batch_is_no_mapping_of_splits() -> None:
    for batch in ({"input_ids": torch.tensor(PLAIN)}, {"input_ids": PLAIN, "attention_mask": PLAIN}):
        with pytest.raises(DatasetError, match="a dict is no source of calibration data"):
            ids_of(batch)


def _no_column(row: Any) -> Any:
    return {"input_ids": row["nope"]} if row["label"] == 2 else row


class _Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": torch.tensor([_no_column(ROWS[index])["input_ids"]])}


def _collator(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([_no_column(row)["input_ids"] for row in rows])}


_STREAM = datasets.Dataset.from_list(ROWS).to_iterable_dataset()


@pytest.mark.parametrize(
    ("source", "settings", "words"),
    [
        (ROWS, {"preprocessing_func": _no_column}, "dataset row 2: preprocessing_func _no_column raised KeyError: 'nope'; correct it"),
        (_STREAM, {"preprocessing_func": _no_column}, "dataset row 2: preprocessing_func _no_column raised KeyError: 'nope'"),
        (ROWS, {"data_collator": _collator}, "dataset row 2: data_collator _collator raised KeyError: 'nope'"),
        (_STREAM, {"data_collator": _collator}, "dataset row 2: data_collator _collator raised KeyError: 'nope'"),
        (ROWS, {"preprocessing_func": _no_column, "data_collator": _collator}, "dataset row 2: preprocessing_func _no_column"),
        (_STREAM, {"preprocessing_func": _no_column, "data_collator": _collator}, "dataset row 2: preprocessing_func _no_column"),
        (datasets.Dataset.from_list(ROWS).with_transform(lambda rows: rows["nope"]), {}, "dataset row 0: the dataset raised KeyError"),
        (_STREAM.map(_no_column), {}, "dataset row 2: the dataset raised KeyError: 'nope'"),
        (DataLoader(_Rows(), batch_size=None), {}, "dataset batch 2: the DataLoader raised KeyError: 'nope'"),
    ],
)
def test_whatever_code_of_the_user_raises_is_named_with_its_row(source: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(DatasetError, match=words) as caught:
        ids_of(source, **settings)
    assert isinstance(caught.value.__cause__, KeyError)


def test_errors_of_ours_and_interrupts_pass_functions_of_the_user_as_they_are() -> None:
    def stopped(row: Any) -> Any:
        raise KeyboardInterrupt if row["label"] else DatasetError("mine")

    with pytest.raises(DatasetError, match=r"^mine$"):
        ids_of(ROWS, preprocessing_func=stopped)
    with pytest.raises(KeyboardInterrupt):
        ids_of(ROWS[1:], preprocessing_func=stopped)


def test_a_collator_names_all_rows_of_its_batch_and_takes_no_shuffled_stream() -> None:
    loader = open_source(ROWS, DataSettings(data_collator=_collator), batch_size=4, shuffle_seed=None)
    with pytest.raises(DatasetError, match="dataset rows 0 to 3: data_collator"):
        load_dataset_source(loader)
    with pytest.raises(DatasetError, match="a stream without a length cannot be shuffled"):
        open_source(_STREAM, DataSettings(data_collator=_collator), batch_size=4, shuffle_seed=0)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("d.csv", b"text\ncaf\xe9 caf\xe9\n", r"can't decode byte 0xe9 .*\); convert the file to UTF-8$"),
        ("d.json", b'[{"text": "caf\xe9"}]', r"UTF-8 .*; convert the file to UTF-8$"),
        ("folder/d.csv", b"text\ncaf\xe9\n", r"can't decode byte 0xe9 .*; convert the file to UTF-8$"),
        ("d.json", b"[[1, 2], [3]]", r'd.json: a JSON list is no row; write \{"text": "\.\.\."\}, or \{"input_ids"'),
        ("d.json", b"5", r"\(JSON parse error: .*; repair the file$"),
        ("d.json", b'[{"text": ', r"\((JSON parse error|Expected object).*; repair the file$"),
        ("d.json", b"", r"\(it holds no row\); repair the file$"),
        ("d.csv", b"", r"\(No columns to parse from file\); repair the file$"),
        (
            "d.csv",
            b"text\na b,c\nd,e\n",
            r"\(a row has more cells than there are columns: put .* quotation marks\); repair the file$",
        ),
        ("folder/d.csv", b"id,text\n1,a b,c\n", r"\(a row has more cells than there are columns: .*; repair the file$"),
        ("d.csv", b'text\n"open\nx\n', r"EOF inside string starting at row 1\); repair the file$"),
        ("folder/notes", b"nothing", r"; put files of rows there, or name another place$"),
    ],
)
def test_a_broken_file_names_its_real_cause(name: str, content: bytes, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=words):
        ids_of(path.parent if path.parent != tmp_path else path)
