"""Defects that releases have had, planted one by one: each is found by the check that is there for it."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness.release.candidate import Candidate
from harness.release.report import ReleaseReport
from harness.release.signing import sign_off
from harness.reporting.record import CheckRecord
from harness.reporting.verdict import Outcome, Verdict
from tests.harness.release.conftest import POLICY, TEMPLATE, Release

UP, Q = "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj"
Plant = Callable[[Release], Any]


def in_json(name: str, **values: Any) -> Plant:
    return lambda release: release.edit_json(name, lambda data: data.update(values))


def without(name: str, key: str) -> Plant:
    return lambda release: release.edit_json(name, lambda data: data.pop(key))


def in_quantization(change: Callable[[dict[str, Any]], Any]) -> Plant:
    return lambda release: release.edit_json("config.json", lambda data: change(data["quantization_config"]))


def in_vocabulary(change: Callable[[dict[str, int]], Any]) -> Plant:
    return lambda release: release.edit_json("tokenizer.json", lambda data: change(data["model"]["vocab"]))


def scaled(name: str, factor: float) -> Plant:
    return lambda release: release.edit(lambda tensors: tensors.update({name: (tensors[name].float() * factor).to(tensors[name].dtype)}))


def swapped(words: dict[Any, Any], first: Any, second: Any) -> None:
    words[first], words[second] = words[second], words[first]


def a_file(name: str, content: bytes) -> Plant:
    return lambda release: (release.compressed / name).write_bytes(content)


def unrecorded(plant: Plant) -> Plant:
    """The same in a checkpoint of another tool, which has no record of its tensors."""

    def both(release: Release) -> None:
        (release.compressed / "compression.json").unlink()
        plant(release)

    return both


def zeroed_row(release: Release) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{UP}.weight_packed"][3] = -2139062144  # four codes of 128, which is zero behind its offset

    release.edit(change)


def layer_of_the_base(release: Release) -> None:
    weight = load_file(release.base / "model.safetensors")[f"{UP}.weight"]

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("weight_packed", "weight_scale", "weight_shape"):
            del tensors[f"{UP}.{part}"]
        tensors[f"{UP}.weight"] = weight

    release.edit(change)


def layers_swapped(release: Release) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers.0." in name]:
            swapped(tensors, name, name.replace(".0.", ".1."))

    release.edit(change)


def missing_shard(release: Release) -> None:
    names = load_file(release.compressed / "model.safetensors")
    index = {"metadata": {}, "weight_map": {name: f"model-0000{1 + (UP in name)}-of-00002.safetensors" for name in names}}
    (release.compressed / "model.safetensors.index.json").write_text(json.dumps(index))
    (release.compressed / "model.safetensors").rename(release.compressed / "model-00001-of-00002.safetensors")


def cut_off(release: Release) -> None:
    path = release.compressed / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def permuted_head(release: Release) -> None:
    release.edit(lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].roll(1, 0)}))


def inputs_per_tensor(config: dict[str, Any]) -> None:
    """A range over the whole batch: what stands beside a prompt reaches its predictions."""
    arguments = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": True}
    config["config_groups"]["group_0"]["input_activations"] = arguments


DEFECTS: dict[str, tuple[Plant, str]] = {
    # the tokenizer
    "special tokens swapped": (in_json("tokenizer_config.json", eos_token="<s>", bos_token="</s>"), "tokenizer.special_tokens"),
    "pad token is the end of text": (in_json("tokenizer_config.json", pad_token="</s>"), "tokenizer.special_tokens"),
    "added token lost": (lambda r: r.edit_json("tokenizer.json", lambda d: d["added_tokens"].pop()), "tokenizer.special_tokens"),
    "ids of two words swapped": (in_vocabulary(lambda words: swapped(words, "w5", "w6")), "tokenizer.vocabulary"),
    "vocabulary cut off": (in_vocabulary(lambda words: [words.pop(f"w{i}") for i in range(80, 95)]), "tokenizer.vocabulary"),
    "texts split otherwise": (
        lambda r: r.edit_json("tokenizer.json", lambda d: d.update(pre_tokenizer={"type": "WhitespaceSplit"})), "tokenizer.texts"
    ),
    "padding side": (in_json("tokenizer_config.json", padding_side="right"), "tokenizer.settings"),
    "truncation side": (in_json("tokenizer_config.json", truncation_side="left"), "tokenizer.settings"),
    "model_max_length": (in_json("tokenizer_config.json", model_max_length=32), "tokenizer.settings"),
    "chat template of another model": (a_file("chat_template.jinja", TEMPLATE.replace(" : ", ": ").encode()), "tokenizer.chat_template"),
    "chat template lost": (lambda r: (r.compressed / "chat_template.jinja").unlink(), "tokenizer.chat_template"),
    "chat template without the prompt": (
        a_file("chat_template.jinja", TEMPLATE.partition("{% if add")[0].encode()), "tokenizer.chat_template"
    ),
    "tokenizer of an unknown kind": (
        lambda r: r.edit_json("tokenizer.json", lambda d: d["model"].update(type="Later")), "tokenizer.vocabulary"
    ),
    "tokenizer lost": (lambda r: [path.unlink() for path in r.compressed.glob("tokenizer*")], "tokenizer.vocabulary"),
    # settings of generation
    "generation_config lost": (lambda r: (r.compressed / "generation_config.json").unlink(), "files.generation_config"),
    "temperature changed": (in_json("generation_config.json", do_sample=True, temperature=0.2), "files.generation_config"),
    "another end of text": (in_json("generation_config.json", eos_token_id=5), "generation.eos"),
    "no end of text": (without("generation_config.json", "eos_token_id"), "generation.eos"),
    "end of text outside of the vocabulary": (in_json("generation_config.json", eos_token_id=[2, 4000]), "generation.eos"),
    # config.json
    "rope theta": (in_json("config.json", rope_parameters={"rope_theta": 500000.0, "rope_type": "default"}), "files.config"),
    "dtype in the config": (in_json("config.json", dtype="float16"), "files.config"),
    "ties where the base has none": (in_json("config.json", tie_word_embeddings=True), "files.config"),
    "fewer positions": (in_json("config.json", max_position_embeddings=32), "files.config"),
    "epsilon of the norms": (in_json("config.json", rms_norm_eps=1e-2), "files.config"),
    "padding that leaks": (in_quantization(inputs_per_tensor), "invariance.padding_left"),
    "ignore list lost": (in_quantization(lambda config: config.update(ignore=[])), "record.config"),
    "group size": (in_quantization(lambda config: config["config_groups"]["group_0"]["weights"].update(group_size=64)), "record.config"),
    "taken for uncompressed": (in_quantization(lambda config: config.update(quantization_status="frozen")), "format.accepted"),
    "scheme of keys and values lost": (in_quantization(lambda config: config.update(kv_cache_scheme=None)), "record.config"),
    "quantization_config lost": (without("config.json", "quantization_config"), "files.tensors"),
    "config asks for code": (in_json("config.json", auto_map={"AutoModelForCausalLM": "model.Own"}), "files.safe"),
    # tensors
    "kv scale off by two": (scaled("model.layers.0.self_attn.k_scale", 2.0), "record.tensors"),
    "scales off by two": (scaled(f"{UP}.weight_scale", 2.0), "weights.scales"),
    "scale is NaN": (scaled(f"{UP}.weight_scale", float("nan")), "weights.qparams"),
    "norm changed": (scaled("model.norm.weight", 1.5), "files.tensors"),
    "layer restored from the base": (layer_of_the_base, "files.tensors"),
    "row zeroed": (zeroed_row, "record.tensors"),
    "row zeroed, no record": (unrecorded(zeroed_row), "weights.rows"),
    "layers swapped": (layers_swapped, "record.tensors"),
    "layers swapped, no record": (unrecorded(layers_swapped), "weights.sqnr"),
    "bias dropped": (lambda r: r.edit(lambda tensors: tensors.pop(f"{Q}.bias")), "files.tensors"),
    "head permuted": (permuted_head, "behaviour.top1"),
    "vocabulary of the head cut off": (
        lambda r: r.edit(lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"][:80]})), "files.tensors"
    ),
    # files
    "shard missing": (missing_shard, "files.shards"),
    "file cut off": (cut_off, "files.shards"),
    "pickle beside the weights": (a_file("pytorch_model.bin", pickle.dumps({})), "files.safe"),
    "pickle under another name": (a_file("cache.dat", pickle.dumps({})), "files.safe"),
    "program called a licence": (a_file("LICENSE.txt", b"\x7fELF\x02\x01\x01" + bytes(9)), "files.safe"),
    "archive called a notice": (a_file("NOTICE", gzip.compress(b"words", mtime=0)), "files.safe"),
    "Python file": (a_file("modeling_own.py", b"import os\n"), "files.safe"),
    "link out of the folder": (lambda r: (r.compressed / "LICENSE").symlink_to("/etc/hostname"), "files.safe"),
    "file of nobody": (a_file("notes.draft", b"todo"), "files.foreign"),
    "base exchanged": (
        lambda r: r.edit_json("compression.json", lambda d: d["base"].update({"model.safetensors": "0" * 64})), "record.base"
    ),
}  # fmt: skip
"""Name to how it is planted, and the check that must find it."""


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found_by_the_check_that_is_there_for_it(name: str, release: Release) -> None:
    plant, check = DEFECTS[name]
    plant(release)
    report = sign_off(release.base, release.compressed, release.dataset, policy=POLICY)
    assert report.verdict is Verdict.REGRESSION
    assert check in report.names(Outcome.FAIL)


@pytest.fixture(scope="module")
def sound(made: Release) -> ReleaseReport:
    return sign_off(made.base, made.compressed, made.dataset, policy=POLICY)


def test_a_sound_release_passes_and_nothing_else_is_found(sound: ReleaseReport) -> None:
    assert sound.verdict is Verdict.PASS and sound.exit_code == 0
    assert sound.names(Outcome.FAIL, Outcome.INCONCLUSIVE) == []
    assert {check for _, check in DEFECTS.values()} <= set(sound.names(Outcome.PASS))


def test_data_of_the_calibration_and_files_that_change_meanwhile_are_told(
    sound: ReleaseReport, release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meddle(candidate: Candidate) -> list[CheckRecord]:
        (candidate.compressed / "config.json").write_text("{}")
        return []

    release.edit_json("compression.json", lambda data: data["data"].update(sha256=sound.provenance["data"]["sha256"]))
    monkeypatch.setattr("harness.release.signing.check_commands", meddle)
    report = sign_off(release.base, release.compressed, release.dataset, policy=POLICY)
    assert {"record.data", "files.stable"} <= set(report.names(Outcome.FAIL))
