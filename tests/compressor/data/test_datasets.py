"""Every source of calibration data gives the same batches for the same content, and every bad one says what is wrong where."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from compressor import oneshot
from compressor.data import CalibrationData, input_columns, load_dataset_source
from compressor.data.encode import max_positions
from compressor.errors import DatasetError
from tests import tiny

TEXTS = ["the cat sat", "the dog", "a cat and a dog sat", "mat"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A word-level tokenizer with a start token: <s> the 1, cat 2, ..."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "the", "cat", "sat", "dog", "a", "and", "mat", "<unk>", "user", "hi", "</s>"]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    backend.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 12)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", unk_token="<unk>")


def ids_of(data: CalibrationData) -> list[list[int]]:
    rows = []
    for batch, mask in zip(data.batches, data.token_masks, strict=True):
        assert isinstance(batch, dict)
        for i, row in enumerate(batch["input_ids"]):
            rows.append(row.tolist() if mask is None else row[mask[i]].tolist())
    return rows


def write_source(kind: str, folder: Path) -> Any:
    path = folder / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS) + "\n\n")
    elif kind == "txt":
        path.write_text("\n\n".join(TEXTS))
    elif kind == "parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table({"text": TEXTS, "other": [1, 2, 3, 4]}), path)
    elif kind == "hf":
        import datasets

        return datasets.Dataset.from_dict({"text": TEXTS})
    elif kind == "hf_stream":
        import datasets

        return datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset()
    elif kind == "list":
        return TEXTS
    elif kind == "mappings":
        return [{"text": text} for text in TEXTS]
    return path


@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet", "hf", "hf_stream", "list", "mappings"])
def test_every_source_of_texts_gives_the_same_data(kind: str, tmp_path: Path, tokenizer: Any) -> None:
    data = load_dataset_source(write_source(kind, tmp_path), tokenizer=tokenizer, num_calibration_samples=3)
    assert ids_of(data) == [[1, 2, 3, 4, 12], [1, 2, 5, 12], [1, 6, 3, 7, 6, 5, 4, 12]]
    assert (data.num_samples, data.num_tokens, data.num_dropped) == (3, 17, 0)
    assert data.sha256 == load_dataset_source(TEXTS, tokenizer=tokenizer, num_calibration_samples=3, batch_size=2).sha256


@pytest.mark.parametrize("kind", ["tensor", "rows", "lists", "safetensors", "hf", "uint16"])
def test_every_source_of_token_ids_gives_the_same_data(kind: str, tmp_path: Path) -> None:
    tokens = torch.arange(12).reshape(3, 4)
    if kind == "safetensors":
        save_file({"input_ids": tokens}, tmp_path / "a.safetensors")
        source: Any = str(tmp_path / "a.safetensors")
    elif kind == "hf":
        import datasets

        source = datasets.Dataset.from_dict({"input_ids": tokens.tolist(), "text": ["x"] * 3})
    else:
        source = {"tensor": tokens, "rows": list(tokens), "lists": tokens.tolist(), "uint16": tokens.to(torch.uint16)}[kind]
    data = load_dataset_source(source, max_seq_length=3, batch_size=2)
    assert ids_of(data) == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]
    assert data.token_masks == [None, None] and all("attention_mask" not in batch for batch in data.batches)
    assert data.sha256 == load_dataset_source(tokens[:, :3]).sha256 != load_dataset_source(tokens).sha256


def test_short_rows_are_padded_right_and_masked() -> None:
    data = load_dataset_source([[5, 6, 7], [8], [9, 9]], batch_size=2)
    batch, mask = data.batches[0], data.token_masks[0]
    assert isinstance(batch, dict) and mask is not None
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert mask.tolist() == [[True, True, True], [True, False, False]] and torch.equal(batch["attention_mask"], mask.long())
    assert data.token_masks[1] is None and data.num_tokens == 6


def test_padding_of_tokenized_rows_is_cut_off() -> None:
    rows = [{"input_ids": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1]}, {"input_ids": [7, 8, 9, 0], "attention_mask": [1, 1, 1, 0]}]
    assert ids_of(load_dataset_source(rows)) == [[5, 6], [7, 8, 9]]
    with pytest.raises(DatasetError, match="row 0: attention_mask has holes"):
        load_dataset_source([{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}])


def test_empty_samples_are_dropped_and_counted(tokenizer: Any) -> None:
    data = load_dataset_source(["", "cat", "  \n", "dog", "", "mat"], tokenizer=tokenizer, num_calibration_samples=2)
    assert ids_of(data) == [[1, 3, 12], [1, 5, 12]] and data.num_dropped == 2
    assert load_dataset_source([[], [1]]).num_dropped == 1
    joined = load_dataset_source(["cat", "\u00a0", "dog mat"], tokenizer=tokenizer, max_seq_length=3, concatenate=True)
    assert (joined.num_samples, joined.num_dropped) == (2, 1)


@pytest.mark.parametrize(("blank", "note"), [(1, "1 sample without"), (2, "2 samples without"), (0, None)])
def test_a_run_says_how_many_samples_were_dropped(blank: int, note: str | None) -> None:
    recipe = {"GPTQModifier": {"targets": ["re:.*q_proj$"], "scheme": "W8A8"}}
    notes = oneshot(tiny.llama(), recipe=recipe, dataset=[*[[]] * blank, [1, 2, 3]]).report.notes
    assert [one for one in notes if "left out" in one] == (
        [] if note is None else [f"{note} a token that counts (blank, or masked out) left out"]
    )


def test_truncation_keeps_the_special_tokens_and_leaves_the_tokenizer_as_it_was(tokenizer: Any) -> None:
    before = tokenizer.backend_tokenizer.to_str()
    data = load_dataset_source(["a cat and a dog sat"], tokenizer=tokenizer, max_seq_length=4)
    assert ids_of(data) == [[1, 6, 3, 12]]
    assert tokenizer.backend_tokenizer.to_str() == before


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_shuffle_is_a_seeded_choice_without_repetition(seed: int, num: int) -> None:
    source = torch.arange(10)[:, None]
    chosen = ids_of(load_dataset_source(source, num_calibration_samples=num, shuffle=True, seed=seed))
    assert chosen == ids_of(load_dataset_source(source, num_calibration_samples=num, shuffle=True, seed=seed))
    assert len({row[0] for row in chosen}) == len(chosen) == min(num, 10)


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), min_size=1, max_size=9), st.integers(1, 4))
def test_batches_hold_exactly_the_rows_for_any_batch_size(rows: list[list[int]], batch_size: int) -> None:
    data = load_dataset_source(rows, batch_size=batch_size)
    assert ids_of(data) == rows and data.sha256 == load_dataset_source(rows).sha256
    assert data.num_tokens == sum(map(len, rows)) and len(data.batches) == -(-len(rows) // batch_size)


INPUTS = {"position_ids", "token_type_ids", "pixel_values"}
BESIDE: list[tuple[dict[str, Any], str | None]] = [
    ({"position_ids": [0, 1, 0, 1]}, "position_ids"),
    ({"position_ids": [0, 1, 2, 3]}, None),
    ({"position_ids": [0, 1, 2]}, "position_ids"),
    ({"token_type_ids": [0, 0, 1, 1]}, "token_type_ids"),
    ({"token_type_ids": [0, 0, 0, 0]}, None),
    ({"pixel_values": [0.0, 0.0, 0.0, 0.0]}, "pixel_values"),
    ({"pixel_values": None}, None),
    ({"length": [4, 4, 4, 4], "labels": [1, 1, 1, 1]}, None),
]


@pytest.mark.parametrize("kind", ["rows", "jsonl", "parquet", "safetensors"])
@pytest.mark.parametrize(("beside", "named"), BESIDE)
def test_a_column_that_the_model_would_read_is_not_left_out(kind: str, beside: dict[str, Any], named: str | None, tmp_path: Path) -> None:
    row = {"input_ids": [3, 1, 4, 1], **beside}
    source: Any = tmp_path / f"data.{kind}"
    if kind == "rows":
        source = [{name: value if value is None else torch.tensor(value) for name, value in row.items()}]
    elif kind == "jsonl":
        source.write_text(json.dumps(row))
    elif kind == "parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table({name: [value] for name, value in row.items()}), source)
    else:
        save_file({name: torch.tensor([value]) for name, value in row.items() if value is not None}, source)
    if named is None:
        assert ids_of(load_dataset_source(source, inputs=INPUTS)) == [[3, 1, 4, 1]]
    else:
        with pytest.raises(DatasetError, match=f"(row 0|line 1): the column '{named}' is an input of the model"):
            load_dataset_source(source, inputs=INPUTS)


def test_inputs_of_a_model_are_what_its_forward_takes_beside_tokens_and_targets() -> None:
    class Model(nn.Module):
        def forward(self, input_ids, attention_mask=None, pixel_values=None, labels=None, start_positions=None):
            return input_ids

    assert input_columns(Model()) == {"pixel_values"}


def test_a_row_as_a_tokenizer_gives_one_text_is_one_sample(tokenizer: Any) -> None:
    rows = [tokenizer(text, return_tensors="pt") for text in TEXTS]
    assert ids_of(load_dataset_source(rows)) == ids_of(load_dataset_source(TEXTS, tokenizer=tokenizer))


def test_shuffle_draws_the_same_rows_from_a_file_and_from_a_list(tmp_path: Path, tokenizer: Any) -> None:
    options: dict[str, Any] = {"tokenizer": tokenizer, "shuffle": True, "seed": 3, "num_calibration_samples": 2}
    hashes = {load_dataset_source(write_source(kind, tmp_path), **options).sha256 for kind in ("jsonl", "txt", "parquet", "hf", "list")}
    assert len(hashes) == 1


def test_conversations_go_through_the_chat_template(tokenizer: Any) -> None:
    rows = [{"messages": [{"role": "user", "content": "hi cat"}]}]
    with pytest.raises(DatasetError, match=r"row 0: .*no chat template; set tokenizer.chat_template"):
        load_dataset_source(rows, tokenizer=tokenizer)
    tokenizer.chat_template = "<s> {% for m in messages %}{{ m['role'] }} {{ m['content'] }}{% endfor %}{{ '' if messages else raise() }}"
    try:
        assert ids_of(load_dataset_source(rows, tokenizer=tokenizer)) == [[1, 10, 11, 3]]
        with pytest.raises(DatasetError, match="row 0: a conversation is no list"):
            load_dataset_source([{"messages": ["hi"]}], tokenizer=tokenizer)
        tokenizer.chat_template = "{{ undefined_function() }}"
        with pytest.raises(DatasetError, match="row 0: the chat template refuses"):
            load_dataset_source(rows, tokenizer=tokenizer)
    finally:
        tokenizer.chat_template = None


_TOOLED = "{% if tools %}{{ tools[0]['name'] }} {% endif %}{% if loud %}dog dog {% endif %}{{ messages[0]['content'] }}"


@pytest.mark.parametrize("kind", ["list", "jsonl", "parquet", "texts"])
def test_a_chat_template_gets_the_tools_and_arguments_of_a_row(kind: str, tmp_path: Path, tokenizer: Any, monkeypatch: Any) -> None:
    turns = [{"role": "user", "content": "cat"}]
    rows: list[dict[str, Any]] = [
        {"messages": turns, "tools": [{"name": "mat"}], "chat_template_kwargs": {"loud": True}},
        {"messages": turns, "tools": None, "chat_template_kwargs": None},
    ]
    source: Any = rows
    if kind == "texts":
        source = [
            {name: value if name == "messages" or value is None else json.dumps(value) for name, value in row.items()} for row in rows
        ]
    elif kind == "jsonl":
        source = tmp_path / "d.jsonl"
        source.write_text("\n".join(map(json.dumps, rows)))
    elif kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        source = tmp_path / "d.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    monkeypatch.setattr(tokenizer, "chat_template", _TOOLED)
    texts = [tokenizer.apply_chat_template(turns, tools=rows[0]["tools"], loud=True, tokenize=False), "cat"]
    assert texts[0] == "mat dog dog cat"
    assert ids_of(load_dataset_source(source, tokenizer=tokenizer)) == [tokenizer(one, add_special_tokens=False).input_ids for one in texts]


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ({"tools": "[{"}, "tools is no JSON"),
        ({"tools": {"name": "mat"}}, "tools is no list of tools"),
        ({"tools": [3]}, "the chat template refuses these messages"),
        ({"chat_template_kwargs": ["loud"]}, "chat_template_kwargs is no mapping of arguments"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs is no mapping of arguments"),
    ],
)
def test_what_no_chat_template_could_be_given_is_refused(beside: dict[str, Any], said: str, tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", _TOOLED)
    with pytest.raises(DatasetError, match=f"row 0: {said}"):
        load_dataset_source([{"messages": [{"role": "user", "content": "cat"}], **beside}], tokenizer=tokenizer)


def test_a_loader_is_taken_as_it_is_up_to_the_number_of_samples() -> None:
    tokens = torch.arange(24).reshape(6, 4)
    data = load_dataset_source(DataLoader(TensorDataset(tokens), batch_size=2), num_calibration_samples=3)
    assert [[t.tolist() for t in batch] for batch in data.batches] == [[tokens[:2].tolist()], [tokens[2:4].tolist()]]
    assert (data.num_samples, data.num_tokens, data.token_masks) == (4, 16, [None, None])

    rows = [{"input_ids": row, "attention_mask": torch.tensor([0, 1, 1, 1])} for row in tokens]
    data = load_dataset_source(DataLoader(rows, batch_size=3))
    assert data.num_tokens == 18 and all(mask is not None and mask.dtype == torch.bool for mask in data.token_masks)

    features = load_dataset_source(DataLoader(torch.ones(5, 7), batch_size=5))
    assert features.num_tokens == 5 and isinstance(features.batches[0], tuple)


@pytest.mark.parametrize("past_versions", [False, True])
def test_a_loader_that_fills_one_tensor_for_all_batches_is_refused(past_versions: bool) -> None:
    class Filling(IterableDataset[dict[str, torch.Tensor]]):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            ids, mask = torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64)
            for number in range(2):
                (ids.data if past_versions else ids).fill_(number)
                yield {"input_ids": ids, "attention_mask": mask}

    with pytest.raises(DatasetError, match=r"batch 0: the loader has written to it after it had given it"):
        load_dataset_source(DataLoader(Filling(), batch_size=None))
    one, mask = torch.arange(4)[None], torch.ones(1, 4, dtype=torch.int64)  # the same mask for all is no such thing
    shared = [{"input_ids": one, "attention_mask": mask}, {"input_ids": one + 4, "attention_mask": mask}]
    assert load_dataset_source(DataLoader(shared, batch_size=None)).num_tokens == 8  # type: ignore[arg-type]


def test_length_defaults_to_what_the_model_takes() -> None:
    tokens = torch.zeros(1, 3000, dtype=torch.int64)
    assert load_dataset_source(tokens).num_tokens == 2048
    assert load_dataset_source(tokens, max_positions=100).num_tokens == 100
    assert load_dataset_source(tokens, max_positions=9000).num_tokens == 2048
    assert load_dataset_source(tokens, max_positions=9000, max_seq_length=2999).num_tokens == 2999
    with pytest.raises(DatasetError, match="max_seq_length: 101 is more than the model takes; give at most 100"):
        load_dataset_source(tokens, max_positions=100, max_seq_length=101)
    with pytest.raises(DatasetError, match="batch 0: sequences of 3000 tokens are longer than the 2048"):
        load_dataset_source(DataLoader(tokens), max_positions=2048)


BAD_FILES = {
    "missing.jsonl": (None, "missing.jsonl: no such file"),
    "folder.jsonl": (..., "folder.jsonl: this is no file, or a link to none"),
    "data.csv": ("a,b", r"data.csv: the extension '.csv' is unknown"),
    "empty.jsonl": ("", "empty.jsonl: there is no sample in it"),
    "blank.jsonl": ('{"text": " "}\n{"text": ""}', "blank.jsonl: all 2 samples are empty"),
    "broken.jsonl": ('{"text": "a"}\n\n{"text": ', "broken.jsonl line 3: this is no JSON"),
    "scalar.jsonl": ('"a"', "scalar.jsonl line 1: a JSON str is no row"),
    "number.jsonl": ('{"text": "a"}\n{"text": 3}', "number.jsonl line 2: a int stands where text should"),
    "null.jsonl": ('{"text": null}', "null.jsonl line 1: a NoneType stands"),
    "columns.jsonl": ('{"prompt": "a", "answer": "b"}', r"columns.jsonl line 1: none of the columns \['answer', 'prompt'\] is 'text'"),
    "ids.jsonl": ('{"input_ids": [1, [2]]}', "ids.jsonl line 1: a list that is no flat list of integers"),
    "mask.jsonl": (
        '{"input_ids": [1], "attention_mask": "1"}',
        "mask.jsonl line 1: a str that is no flat list of integers stands where the numbers of attention_mask should",
    ),
    "floats.jsonl": ('{"input_ids": [1.5]}', "floats.jsonl line 1: torch.float32"),
    "negative.jsonl": ('{"input_ids": [1, -100]}', "negative.jsonl line 1: the token id -100 is negative"),
    "broken.parquet": ("no parquet", "broken.parquet: this is no readable parquet"),
    "broken.safetensors": ("no", "broken.safetensors: this is no readable safetensors"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named_with_its_line(name: str, tmp_path: Path, tokenizer: Any) -> None:
    content, message = BAD_FILES[name]
    if content is ...:
        (tmp_path / name).mkdir()
    elif content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DatasetError, match=message):
        load_dataset_source(tmp_path / name, tokenizer=tokenizer)


def make_socket(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path)


@pytest.mark.parametrize("make", [os.mkfifo, make_socket])
@pytest.mark.parametrize("name", ["rows/data", "rows/data.jsonl"])
def test_what_is_there_and_no_regular_file_is_no_name_on_the_hub(
    make: Any, name: str, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows").mkdir()
    make(name)
    with pytest.raises(DatasetError, match=f"^{name}: this is no regular file but a pipe, a socket or a device; check the path"):
        load_dataset_source(name, tokenizer=tokenizer)


def test_a_byte_order_mark_and_capitals_in_the_extension_are_ordinary(tmp_path: Path, tokenizer: Any) -> None:
    line = '{"text": "Hello there"}\n'
    (tmp_path / "marked.JSONL").write_text("\ufeff" + line, encoding="utf-8")
    (tmp_path / "plain.jsonl").write_text(line, encoding="utf-8")
    marked, plain = (load_dataset_source(tmp_path / name, tokenizer=tokenizer) for name in ("marked.JSONL", "plain.jsonl"))
    assert marked.sha256 == plain.sha256


def test_bytes_that_are_no_text_are_named_with_their_line(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_bytes(b"cat\n\xff\xfe\n")
    with pytest.raises(DatasetError, match=r"a.txt line 2: these bytes are no UTF-8"):
        load_dataset_source(tmp_path / "a.txt", tokenizer=tokenizer)


def test_an_array_file_without_token_ids_names_what_it_holds(tmp_path: Path) -> None:
    save_file({"tokens": torch.zeros(1, 2, dtype=torch.int64)}, tmp_path / "a.safetensors")
    with pytest.raises(DatasetError, match=r"no tensor 'input_ids' among \['tokens'\]"):
        load_dataset_source(tmp_path / "a.safetensors")


@pytest.mark.parametrize(("kind", "given"), [("arrow", "Table"), ("pandas", "DataFrame")])
@pytest.mark.parametrize("streams", [False, True])
def test_a_dataset_that_formats_rows_as_tables_is_refused(kind: str, given: str, streams: bool) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]]})
    formatted = (rows.to_iterable_dataset() if streams else rows).with_format(kind)
    with pytest.raises(DatasetError, match=rf"dataset row 0: the dataset gives it as a {given}; .*with_format\(None\)"):
        load_dataset_source(formatted)


def test_a_dataset_of_splits_or_without_text_is_refused(tokenizer: Any) -> None:
    import datasets

    one = datasets.Dataset.from_dict({"prompt": ["a"]})
    with pytest.raises(DatasetError, match=r"none of the columns \['prompt'\] is 'text'"):
        load_dataset_source(one, tokenizer=tokenizer)
    with pytest.raises(DatasetError, match=r"a dictionary of splits \['train'\]"):
        load_dataset_source(datasets.DatasetDict(train=one), tokenizer=tokenizer)
    with pytest.raises(DatasetError, match="a stream without a length"):
        load_dataset_source(one.to_iterable_dataset(), tokenizer=tokenizer, text_column="prompt", shuffle=True)
    assert ids_of(load_dataset_source(one, tokenizer=tokenizer, text_column="prompt")) == [[1, 6, 12]]


def as_it_is(batch: Any) -> DataLoader[Any]:
    return DataLoader([batch], batch_size=None, collate_fn=lambda one: one)  # type: ignore[arg-type]


BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"source": 3}, "dataset: a int is no source"),
    ({"source": ["cat"]}, "row 0: text needs a tokenizer"),
    ({"source": []}, "dataset: there is no sample"),
    ({"source": torch.zeros(4, dtype=torch.int64)}, r"shape \(4,\) are not \[N, T\]"),
    ({"source": torch.zeros(2, 4)}, "row 0: torch.float32 of shape"),
    ({"source": [torch.ones(2, 3, dtype=torch.int64)]}, r"row 0: token ids of shape \(2, 3\) are not one sample"),
    ({"source": [[1]], "num_calibration_samples": 0}, "num_calibration_samples: 0 is not positive"),
    ({"source": [[1]], "batch_size": 0}, "batch_size: 0 is not positive"),
    ({"source": [[1]], "max_seq_length": -1}, "max_seq_length: -1 is not positive"),
    ({"source": DataLoader([]), "shuffle": True}, "a DataLoader decides its own order"),
    ({"source": DataLoader([])}, "the DataLoader gave no batch"),
    ({"source": DataLoader(["a"])}, r"batch 0: the batch holds 0 \(str\)"),
    ({"source": DataLoader([{"x": "a"}])}, r"batch 0: the batch holds 'x' \(list\)"),
    ({"source": DataLoader([1], collate_fn=lambda rows: 1)}, "batch 0: a int is no batch"),
    ({"source": as_it_is({"input_ids": torch.ones(2, 3).to_sparse()})}, "batch 0: input_ids are sparse_coo; give rows of whole numbers"),
    ({"source": as_it_is({"input_ids": torch.ones(2, 3, dtype=torch.cfloat)})}, "batch 0: input_ids are complex; give rows of whole"),
    ({"source": as_it_is({"x": torch.ones(0)})}, r"batch 0: a tensor of shape \(0,\) holds no sample"),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_without_a_shape_is_no_batch() -> None:
    batch = {"x": torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(1, 2)])}
    with pytest.raises(DatasetError, match=r"batch 0: 'x' is a nested tensor, .* make it with layout=torch\.jagged"):
        load_dataset_source(as_it_is(batch))


@pytest.mark.parametrize(("arguments", "message"), BAD_CALLS)
def test_a_bad_call_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        load_dataset_source(**arguments)


@pytest.mark.parametrize("first", ["scale", "x"])
def test_a_number_among_the_tensors_of_a_batch_does_not_count_samples(first: str) -> None:
    batch = {"scale": torch.tensor(0.5), "x": torch.ones(3, 2)}
    batch = {first: batch[first], **batch}
    data = load_dataset_source(DataLoader([batch], batch_size=None))
    assert (data.num_samples, data.num_tokens) == (3, 3)


@pytest.mark.parametrize(
    ("rope", "taken"),
    [
        ({"rope_type": "default"}, 16),
        ({"rope_type": "dynamic", "factor": 4.0}, 24),
    ],
)
def test_frequencies_that_follow_the_length_are_no_limit(rope: dict[str, Any], taken: int) -> None:
    model = tiny.llama(max_position_embeddings=16, rope_parameters={"rope_theta": 10_000.0, **rope})
    limit = max_positions(model)
    assert load_dataset_source(torch.ones(3, 24, dtype=torch.long), max_positions=limit).num_tokens == 3 * taken
