"""Every verb takes a model by its name on the hub, and does what it does with the folder; the record says which commit it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import compressor
from compressor import load_compressed, oneshot
from compressor.cli.main import main
from compressor.entrypoints.inspection import inspect_checkpoint
from compressor.entrypoints.mappings import find_mappings
from compressor.entrypoints.trace import trace_model
from compressor.errors import ModelError, UserInputError
from compressor.planning import plan
from compressor.training_run import train
from harness.bisect.locate import bisect
from harness.validation.compare import validate
from tests import tiny

RECIPE = {"quant_modifiers": {"QuantizationModifier": {"scheme": "W8A16", "targets": ["Linear"], "ignore": ["lm_head"]}}}
ROWS = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16]]


@pytest.fixture
def folder(tmp_path: Path, hub: Any) -> Path:
    """A tiny model, which the hub has as owner/name, at the revisions main (other weights) and v2."""
    for name, seed in (("other", 1), ("model", 0)):
        tiny.llama(seed=seed, hidden_size=128, intermediate_size=128, num_attention_heads=2).save_pretrained(
            tmp_path / name, max_shard_size="300KB"
        )
    hub.add("owner/name", tmp_path / "other")
    hub.add("owner/name", tmp_path / "model", revision="v2")
    return tmp_path / "model"


def test_a_checkpoint_made_by_name_is_that_made_of_the_folder(folder: Path, hub: Any, tmp_path: Path) -> None:
    for name, model in (("by_name", "owner/name"), ("by_folder", folder)):
        oneshot(model, recipe=RECIPE, output_dir=tmp_path / name, model_revision="v2" if name == "by_name" else None)
    (one, other) = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("by_name", "by_folder"))
    records = [json.loads(files.pop("compression.json")) for files in (one, other)]
    assert one == other
    commit = hub.repos["models", "owner/name"].commit("v2")
    assert records[0].pop("source") == {"name": "owner/name", "revision": "v2", "commit": commit}
    digests = [record.pop("sha256") for record in records]  # of all else in it, the source too
    assert records[0] == records[1] and digests[0] != digests[1]
    lines = " ".join(inspect_checkpoint(tmp_path / "by_name").lines())
    assert f"of owner/name, commit {commit}" in lines and main(["inspect", str(tmp_path / "by_name")]) == 0


def test_every_verb_takes_a_name(folder: Path, hub: Any, tmp_path: Path) -> None:
    own = {"model_revision": "v2"}
    assert plan("owner/name", recipe=RECIPE, **own).to_dict()["modules"] == plan(folder, recipe=RECIPE).to_dict()["modules"]
    assert trace_model("owner/name", **own).num_left_out == 0
    assert find_mappings("owner/name", **own).found.pairs == find_mappings(folder).found.pairs
    assert not any(line.endswith(".safetensors") for line in hub.asked)  # of those three none reads weights
    trained = train("owner/name", dataset=ROWS * 4, steps=2, batch_size=2, max_seq_length=8, mode="eager", output_dir=tmp_path / "t", **own)
    assert trained.record["source"]["revision"] == "v2"
    oneshot(folder, recipe=RECIPE, output_dir=tmp_path / "out")
    hub.add("owner/small", tmp_path / "out")
    assert inspect_checkpoint("owner/small").to_dict()["quantized"] == inspect_checkpoint(tmp_path / "out").to_dict()["quantized"]
    tokens = torch.tensor(ROWS)
    assert torch.equal(load_compressed("owner/small")(tokens).logits, load_compressed(tmp_path / "out")(tokens).logits)
    rows = "".join(json.dumps({"input_ids": row}) + "\n" for row in ROWS * 16).encode()
    hub.add("owner/tokens", {"train.jsonl": b'{"input_ids": [1, 2]}\n', "test.jsonl": rows}, "datasets")
    reports = [
        validate("owner/name@v2", "owner/small", "owner/tokens", split="test[:32]").to_dict(),
        validate(folder, tmp_path / "out", tokens.repeat(16, 1)).to_dict(),
    ]
    assert reports[0]["verdict"] == reports[1]["verdict"] and reports[0]["metrics"] == reports[1]["metrics"]
    found = [bisect(*models, tokens).to_dict() for models in (("owner/name@v2", "owner/small"), (folder, tmp_path / "out"))]
    assert found[0]["total"] == found[1]["total"]


@pytest.mark.parametrize("words", [["plan", "--recipe", json.dumps(RECIPE)], ["trace"], ["mappings"], ["inspect"]])
def test_the_command_line_takes_a_name_and_a_revision(words: list[str], folder: Path, hub: Any) -> None:
    verb, *rest = words
    assert main([verb, "owner/name", "--model-revision", "v2", "--json", *rest]) == 0
    assert main([verb, "owner/name", "--model-revision", "v3", *rest]) == 1


def test_tokenizer_processor_and_config_have_names_too(folder: Path, hub: Any) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 1, "b": 2, "?": 0}, unk_token="?")), unk_token="?")
    words.save_pretrained(folder.parent / "words")
    hub.add("owner/words", folder.parent / "words")
    given = {"tokenizer": "owner/words", "config_name": "owner/name"}
    recipe = {"quant_modifiers": {"GPTQModifier": {"scheme": "W8A16", "targets": ["re:.*q_proj"], "dampening_frac": 0.5}}}
    found = oneshot("owner/name", recipe=recipe, dataset=["a", "b"] * 20, **given)
    assert found.tokenizer.get_vocab() == words.get_vocab()
    for argument in ("tokenizer", "processor", "config_name"):
        with pytest.raises(ModelError, match=f"^{argument}: 'owner/none' is no folder here, and the hub has none of that name"):
            oneshot("owner/name", recipe=RECIPE, **{argument: "owner/none"})


@pytest.mark.parametrize("verb", [plan, trace_model, find_mappings, oneshot])
def test_a_revision_of_what_has_none_is_refused(folder: Path, verb: Callable[..., Any]) -> None:
    settings = {"recipe": RECIPE} if verb in (plan, oneshot) else {}
    for model in (folder, LlamaForCausalLM(LlamaConfig.from_pretrained(folder))):
        with pytest.raises(UserInputError, match=r"^model_revision: 'v2' was given for .*, which has none; leave it out$"):
            verb(model, model_revision="v2", **settings)


@pytest.mark.nightly
def test_the_command_reads_the_environment_of_the_hub(folder: Path, hub: Any, tmp_path: Path) -> None:
    hub.repos["models", "owner/name"].private = True
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_of_a_test", "NO_PROXY": "127.0.0.1"}
    recipe = "quant_modifiers: {QuantizationModifier: {scheme: W8A16, targets: [Linear], ignore: [lm_head]}}"
    words = [
        "oneshot",
        "owner/name",
        "--model-revision",
        "v2",
        "--recipe",
        recipe,
        "--output-dir",
        str(tmp_path / "out"),
        "--quiet",
        "--json",
    ]
    root = str(Path(compressor.__file__).parents[1])
    script = f"import sys; sys.path.insert(0, {root!r}); from compressor.cli.main import main; main({words})"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.stderr == "" and json.loads(done.stdout)["source"]["commit"] == hub.repos["models", "owner/name"].commit("v2")
    assert (tmp_path / "out/config.json").is_file() and (tmp_path / "home/hub/models--owner--name").is_dir()
