"""Datasets by their names on the hub, and the usual calibration sets by theirs: which rows are read, as which texts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import constants
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import compressor
from compressor.data import load_dataset_source, open_source
from compressor.data.presets import PRESETS, find_preset
from compressor.errors import DatasetError
from compressor.settings.verbs import DataSettings

TURNS = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def read(name: str, tokenizer: Any = None, **settings: Any) -> list[dict[str, Any]]:
    opened = open_source(name, DataSettings(**settings), batch_size=None, shuffle_seed=None, tokenizer=tokenizer)
    return list(opened) if not hasattr(opened, "__len__") else [opened[index] for index in range(len(opened))]


@pytest.fixture
def words() -> Any:
    vocabulary = {word: number for number, word in enumerate(["?", "user", "assistant", "a", "b", "c", "</s>"])}
    model = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="?", eos_token="</s>")


def test_splits_and_configurations_of_a_set_on_the_hub(hub: Any) -> None:
    card = b"---\nconfigs:\n- config_name: one\n  data_files: one.csv\n- config_name: two\n  data_files: two.csv\n---\n"
    hub.add("owner/set", {"README.md": card, "one.csv": b"text\nx\ny\nz\n", "two.csv": b"text\nw\n"}, "datasets")
    hub.add("owner/split", {"train.jsonl": lines([{"text": str(n)} for n in range(10)]), "test.jsonl": lines([{"text": "t"}])}, "datasets")
    assert read("owner/set", dataset_config_name="one", split="train[1:]") == [{"text": "y"}, {"text": "z"}]
    assert read("owner/set", dataset_config_name="two") == [{"text": "w"}]
    assert read("owner/split", split="train[:20%]") == [{"text": "0"}, {"text": "1"}]
    assert read("owner/split", split="train", streaming=True)[9] == {"text": "9"}
    for settings, message in (
        ({}, r"owner/set: .*available configs: \['one', 'two'\].*; name one \(dataset_config_name=\)$"),
        ({"dataset_config_name": "three"}, r"owner/set: .*'three' not found.*; name one \(dataset_config_name=\)$"),
    ):
        with pytest.raises(DatasetError, match=message):
            read("owner/set", **settings)
    with pytest.raises(DatasetError, match=r"dataset: it has the splits .*; name one"):
        read("owner/split")


def test_what_the_hub_does_not_give_is_told_in_one_line(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("owner/private", {"a.csv": b"text\nx\n"}, "datasets", private=True)
    hub.add("owner/gated", {"a.csv": b"text\nx\n"}, "datasets", gated=True)
    asked = [("owner/none", {}), ("owner/private", {}), ("owner/gated", {}), ("owner/private", {"raw_kwargs": {"revision": "v9"}})]
    for name, settings in asked:
        with pytest.raises(DatasetError, match=rf"^{name}: no dataset can be .*correct its name or revision, or set HF_TOKEN"):
            read(name, **settings)
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    assert read("owner/private") == read("owner/gated") == [{"text": "x"}]
    for holder in (constants, datasets.config):
        monkeypatch.setattr(holder, "HF_HUB_OFFLINE", True)
    assert read("owner/private") == [{"text": "x"}]  # from the cache
    with pytest.raises(DatasetError, match=r"owner/other: .*; unset HF_HUB_OFFLINE, with which nothing is fetched$"):
        read("owner/other")


def test_without_a_network_one_line_says_so(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = "http://127.0.0.1:9"
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the tries of the client
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", nowhere + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", nowhere)
    monkeypatch.setattr(datasets.config, "HUB_DATASETS_URL", nowhere + "/datasets/{repo_id}/resolve/{revision}/{path}")
    with pytest.raises(DatasetError, match=r"^owner/set: .*Couldn't reach 'owner/set' on the Hub .*; check the network, or give a file$"):
        read("owner/set")


def test_a_set_is_read_by_its_usual_part(hub: Any, words: Any) -> None:
    card = b"---\nconfigs:\n- config_name: wikitext-2-raw-v1\n  data_files: two.jsonl\n- config_name: other\n  data_files: o.jsonl\n---\n"
    texts = {"two.jsonl": lines([{"text": "a b"}]), "o.jsonl": lines([{"text": "c"}])}
    hub.add("Salesforce/wikitext", {"README.md": card, **texts}, "datasets")
    assert read("wikitext") == read("Salesforce/wikitext") == [{"text": "a b"}]
    assert read("wikitext", dataset_config_name="other", split="train[:1]") == [{"text": "c"}]
    shards = {f"en/c4-train.0000{n}-of-01024.json.gz": gzip.compress(lines([{"text": f"shard {n}"}])) for n in (0, 1)}
    shards["en/c4-validation.00000-of-00008.json.gz"] = gzip.compress(lines([{"text": "held out"}]))
    hub.add("allenai/c4", shards, "datasets")
    assert read("c4") == read("allenai/c4", dataset_config_name="en", split="train[:5]") == [{"text": "shard 0"}]
    assert read("c4", split="validation") == [{"text": "held out"}]
    assert not any("c4-train.00001" in line for line in hub.asked)
    chats = {f"{name}.jsonl": lines([{"prompt": "x", "messages": TURNS}]) for name in ("train_sft", "test_sft")}
    parts = "".join(f"  - split: {name}\n    path: {name}.jsonl\n" for name in ("train_sft", "test_sft"))
    card = f"---\nconfigs:\n- config_name: default\n  data_files:\n{parts}---\n".encode()
    hub.add("HuggingFaceH4/ultrachat_200k", {"README.md": card, **chats}, "datasets")
    words.chat_template = TEMPLATE
    for name in ("ultrachat-200k", "ultrachat_200k", "ultrachat", "HuggingFaceH4/ultrachat_200k"):
        opened = open_source(name, DataSettings(), batch_size=None, shuffle_seed=None, tokenizer=words)
        assert load_dataset_source(opened, tokenizer=words).batches[0]["input_ids"].tolist() == [[1, 3, 4, 2, 5]]  # type: ignore[call-overload]
    own = read("ultrachat", words, preprocessing_func=lambda row: {"text": row["prompt"]}, split="test_sft")
    assert own == [{"text": "x"}]


ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "open-platypus": (
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a response that "
        "appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3",
    ),
    "open_platypus": (
        {"instruction": "Add {x}.", "input": "", "output": "3"},
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd {x}.\n\n### Response:\n3",
    ),
    "cnn_dailymail": ({"article": "A.", "highlights": "B.", "id": "1"}, "Article:\nA.\n\n### Summarization:\nB.\n"),
    "gsm8k": ({"question": "1+1?", "answer": "2"}, "Question: 1+1?\nAnswer: 2"),
    "evolcodealpaca": (
        {"instruction": "Sort.", "output": "sorted()"},
        "Below is an instruction that describes a programming task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSort.\n\n### Response:\nsorted()",
    ),
    "ultrachat_200k": ({"messages": TURNS}, "<|user|>\na b</s>\n<|assistant|>\nc</s>\n"),
    "perfectblend": (
        {"conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c"}]},
        "<|user|>\na b</s>\n<|assistant|>\nc</s>\n",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_a_set_become_texts(name: str, words: Any) -> None:
    row, text = ROWS[name]
    preset = find_preset(name)
    assert preset is not None
    function = preset.row_function(words)
    assert function is not None and function(row) == {"text": text}


def test_every_set_is_found_by_all_its_names_and_names_are_unique() -> None:
    found = [(name, preset.name) for preset in PRESETS for name in (preset.name, preset.repo, preset.repo.split("/")[1], *preset.aliases)]
    assert [(name, own) for name, own in found if (preset := find_preset(name)) is None or preset.name != own] == []
    assert {preset.name for preset in PRESETS if preset.template} <= {find_preset(name).name for name in ROWS}  # type: ignore[union-attr]


def test_turns_of_sharegpt_go_through_the_chat_template(words: Any) -> None:
    words.chat_template = TEMPLATE
    turns = [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c"}]
    data = load_dataset_source([{"conversations": turns}, {"messages": TURNS}], tokenizer=words)
    assert data.batches[0]["input_ids"].tolist() == [[1, 3, 4, 2, 5]] * 2  # type: ignore[call-overload]


def test_an_unknown_word_is_told_with_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        DatasetError, match=r"'ultrachat-20k' is no file, .*; did you mean 'ultrachat-200k'\? give one of ultrachat-200k, wiki"
    ):
        read("ultrachat-20k")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wikitext").write_text("a b\n")
    assert open_source("wikitext", DataSettings(), batch_size=None, shuffle_seed=None) == "wikitext"  # a file of that name goes before it


def test_the_chapter_has_a_row_of_every_set() -> None:
    chapter = (Path(compressor.__file__).parent / "entrypoints" / "README.md").read_text(encoding="utf-8")
    for preset in PRESETS:
        parts = [f"`{preset.repo}`", *([] if preset.config in (None, preset.split) else [f"`{preset.config}`"]), f"`{preset.split}`"]
        assert f"| `{preset.name}` | {', '.join(parts)}" in chapter
