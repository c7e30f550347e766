"""Every keyword of llm-compressor's oneshot means something here, is warned of, or is refused; the chapter has a row of each."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import LlamaConfig, LlamaForCausalLM

import compressor
from compressor import GPTQModifier, QuantizationModifier, QuantizedLinear, load_recipe, oneshot
from compressor.cli.main import main
from compressor.errors import ModelError, RecipeError, UserInputError
from compressor.settings.llmcompressor import KEYWORDS, NAMES, translated
from compressor.settings.verbs import OneshotSettings
from tests import tiny

CHAPTER = Path(compressor.__file__).parent / "entrypoints" / "README.md"
# llmcompressor 0.14.0.1: the signature of oneshot, and the fields of its classes of arguments.
THEIRS = [
    "model",
    "config_name",
    "tokenizer",
    "processor",
    "precision",
    "tie_word_embeddings",
    "trust_remote_code_model",
    "save_compressed",
    "model_revision",
    "recipe",
    "recipe_args",
    "clear_sparse_session",
    "stage",
    "dataset",
    "dataset_config_name",
    "dataset_path",
    "splits",
    "batch_size",
    "data_collator",
    "num_calibration_samples",
    "shuffle_calibration_samples",
    "max_seq_length",
    "pad_to_max_length",
    "text_column",
    "concatenate_data",
    "streaming",
    "overwrite_cache",
    "preprocessing_num_workers",
    "dataloader_num_workers",
    "min_tokens_per_module",
    "moe_calibrate_all_experts",
    "pipeline",
    "tracing_ignore",
    "sequential_targets",
    "sequential_offload_device",
    "quantization_aware_calibration",
    "sequential_prefetch",
    "output_dir",
    "log_dir",
    "remove_columns",
    "preprocessing_func",
    "raw_kwargs",
    "sequential_targets_per_subgraph",
    "propagate_error",
    "use_loss_mask",
    "dvc_data_repository",
]

MEANT: list[tuple[str, Any, dict[str, Any]]] = [
    ("precision", "bf16", {"dtype": "bfloat16"}),
    ("precision", "float32", {"dtype": "float32"}),
    ("save_compressed", True, {}),
    ("model_revision", "main", {"model_revision": "main"}),
    ("clear_sparse_session", True, {}),
    ("quantization_aware_calibration", True, {}),
    ("splits", "train[:5%]", {"split": "train[:5%]"}),
    ("splits", ["train"], {"split": "train"}),
    ("splits", {"calibration": "test"}, {"split": "test"}),
    ("splits", {"train": "train[:3]"}, {"split": "train[:3]"}),
    ("remove_columns", "label", {"remove_columns": ["label"]}),
    ("num_calibration_samples", None, {"num_calibration_samples": sys.maxsize}),
    ("num_calibration_samples", 7, {"num_calibration_samples": 7}),
    ("num_calibration_samples", 0, {"num_calibration_samples": 0}),
    ("batch_size", None, {"batch_size": None}),
    ("data_collator", "padding", {}),
    ("data_collator", dict, {"data_collator": dict}),
    ("pad_to_max_length", False, {}),
    ("overwrite_cache", False, {}),
    ("preprocessing_num_workers", None, {}),
    ("dataloader_num_workers", 0, {}),
    ("dvc_data_repository", None, {}),
    ("moe_calibrate_all_experts", True, {"calibrate_all_experts": True}),
    ("pipeline", "datafree", {"pipeline": "data_free"}),
    ("pipeline", "independent", {"pipeline": None}),
    ("pipeline", "sequential", {"pipeline": "sequential"}),
    ("tracing_ignore", None, {}),
    ("sequential_targets_per_subgraph", 1, {}),
    ("sequential_prefetch", False, {}),
    ("sequential_offload_device", "cpu", {"sequential_offload_device": "cpu"}),
    ("sequential_offload_device", torch.device("cpu"), {"sequential_offload_device": "cpu"}),
    ("sequential_offload_device", None, {}),
    ("oneshot_device", "cpu", {"device": "cpu"}),
    ("log_dir", None, {}),
    ("overwrite_output_dir", False, {}),
    ("callbacks", None, {}),
    ("dataset_path", "a.csv", {"dataset": "a.csv"}),
]
WARNED: list[tuple[str, Any]] = [
    ("pad_to_max_length", True),
    ("overwrite_cache", True),
    ("preprocessing_num_workers", 32),
    ("dataloader_num_workers", 32),
    ("tracing_ignore", ["_update_causal_mask"]),
    ("sequential_targets_per_subgraph", 4),
    ("sequential_prefetch", True),
    ("quantization_aware_calibration", False),
    ("log_dir", "logs"),
    ("data_collator", "truncation"),
]
REFUSED: list[tuple[str, Any, str]] = [
    ("save_compressed", False, "always stored compressed"),
    ("dvc_data_repository", "dvc://x", "give the file itself"),
    ("overwrite_output_dir", True, "remove it first"),
    ("callbacks", [print], "write a modifier"),
    ("splits", ["train", "test"], "names no split for calibration"),
    ("splits", {"a": "train", "b": "test"}, "names no split for calibration"),
    ("data_collator", "average", "no function"),
]


@pytest.mark.parametrize("name", THEIRS)
def test_every_keyword_is_known(name: str) -> None:
    assert name in ("model", "dataset_path") or name in OneshotSettings.model_fields or name in {keyword.name for keyword in KEYWORDS}
    assert f"`{name}`" in CHAPTER.read_text(encoding="utf-8")


def test_the_chapter_has_a_row_of_every_keyword_that_differs() -> None:
    rows = [line for line in CHAPTER.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert [keyword.name for keyword in KEYWORDS if not any(f"`{keyword.name}`" in row.split("|")[1] for row in rows)] == []


@pytest.mark.parametrize(("name", "value", "meant"), MEANT, ids=lambda part: str(part)[:30])
def test_what_is_meant_here(name: str, value: Any, meant: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert translated({name: value}) == meant
    assert set(meant) <= set(OneshotSettings.model_fields)


def test_every_row_of_the_table_is_tried() -> None:
    assert {keyword.name for keyword in KEYWORDS} <= {name for name, *_ in (*MEANT, *WARNED, *REFUSED)}


@pytest.mark.parametrize(("name", "value"), WARNED)
def test_what_has_no_effect_is_said(name: str, value: Any) -> None:
    with pytest.warns(UserWarning, match=f"^{name}=.* has no effect here: "):
        assert translated({name: value}) == {}


@pytest.mark.parametrize(("name", "value", "words"), REFUSED, ids=lambda part: str(part)[:30])
def test_what_is_not_done_here_is_refused_with_a_sentence(name: str, value: Any, words: str) -> None:
    with pytest.raises(UserInputError, match=words) as caught:
        translated({name: value})
    assert str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("one", "other"), [("precision", "dtype"), ("splits", "split"), ("moe_calibrate_all_experts", "calibrate_all_experts")]
)
def test_two_words_for_one_thing_are_refused(one: str, other: str) -> None:
    with pytest.raises(UserInputError, match=f"{one}: it was given beside {other}"):
        translated({one: "train", other: "train"})
    with pytest.raises(UserInputError, match=r"dataset_path: 'a\.csv' was given beside dataset"):
        translated({"dataset_path": "a.csv", "dataset": "b.csv"})
    assert translated({"dataset_path": "a.csv", "dataset": "csv"}) == {"dataset": "a.csv"}


def test_a_misspelt_keyword_is_still_told() -> None:
    with pytest.raises(UserInputError, match="max_seq_lenght: there is no such argument; did you mean 'max_seq_length'"):
        oneshot("m", recipe=QuantizationModifier(scheme="W8A16"), max_seq_lenght=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_have_no_place_say_what_to_do(name: str) -> None:
    with pytest.raises(ImportError, match=f"{name} of llm-compressor has no place here; "):
        getattr(compressor, name)


@pytest.mark.parametrize(
    ("home", "name"),
    [
        ("core", "active_session"),
        ("entrypoints", "Oneshot"),
        ("entrypoints.oneshot", "Oneshot"),
        ("utils", "dispatch_for_generation"),
        ("modeling", "replace_modules_for_calibration"),
        ("modifiers.transform.awq.mappings", "AWQMapping"),
        ("datasets.utils", "get_rank_partition"),
        ("args", "DatasetArguments"),
    ],
)
def test_they_say_so_where_scripts_import_them(home: str, name: str) -> None:
    with pytest.raises(ImportError, match=f"{name} of llm-compressor has no place here; "):
        getattr(importlib.import_module(f"compressor.{home}"), name)


def _llama(folder: Path, *, tied: bool = False) -> Path:
    tiny.llama(
        hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=tied
    ).save_pretrained(folder)
    return folder


def test_a_script_of_theirs_runs_and_gives_the_same_as_our_words(tmp_path: Path) -> None:
    folder = _llama(tmp_path / "m")
    rows = [{"input_ids": [1, 2, 3, 4, 5, 6], "label": 0}, {"input_ids": [7, 8, 9], "label": 1}]
    recipe = {"quant_stage": {"quant_modifiers": {"GPTQModifier": {"scheme": "W4A16", "targets": ["re:.*proj"], "dampening_frac": 0.1}}}}
    with pytest.warns(UserWarning, match="preprocessing_num_workers=4 has no effect"):
        theirs = oneshot(
            model=str(folder),
            dataset=rows,
            recipe=recipe,
            output_dir=str(tmp_path / "theirs"),
            precision="fp32",
            remove_columns=["label"],
            moe_calibrate_all_experts=False,
            pipeline="sequential",
            save_compressed=True,
            preprocessing_num_workers=4,
            sequential_offload_device="cpu",
        )
    oneshot(
        folder,
        dataset=[{"input_ids": row["input_ids"]} for row in rows],
        recipe=recipe,
        output_dir=tmp_path / "ours",
        dtype="float32",
        pipeline="sequential",
    )
    assert (tmp_path / "theirs/model.safetensors").read_bytes() == (tmp_path / "ours/model.safetensors").read_bytes()
    assert theirs.report.modules
    with pytest.raises(AttributeError, match=r"OneshotResult: there is no 'generate'; .* whose model is `.model`"):
        _ = theirs.generate
    with pytest.raises(UserInputError, match=r"save_compressed='no' cannot be done .* give False"):
        theirs.model.save_pretrained(tmp_path / "no", save_compressed="no")


@pytest.mark.parametrize("value", ["disk", "meta", torch.device("cuda", 1)])
def test_a_choice_that_does_not_exist_is_refused_whatever_the_device(value: Any) -> None:
    with pytest.raises(UserInputError, match=r"sequential_offload_device: '(disk|meta|cuda)' does not exist; choose one of cpu, none"):
        oneshot("m", recipe=QuantizationModifier(scheme="W8A16"), sequential_offload_device=value)


SCRIPTS: dict[str, dict[str, Any]] = {
    "masks": {"use_loss_mask": True, "data_collator": lambda rows: {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}},
    "workers": {"preprocessing_num_workers": 32, "dataloader_num_workers": 32, "log_dir": None, "batch_size": 4},
    "part": {"splits": "train[:50%]", "shuffle_calibration_samples": True},
    "mapping": {"splits": {"calibration": "train_sft[:4]"}, "max_seq_length": 2048, "batch_size": 1},
    "layers": {
        "pipeline": "sequential",
        "sequential_targets": ["MixtralDecoderLayer"],
        "sequential_prefetch": True,
        "sequential_targets_per_subgraph": 12,
        "propagate_error": False,
        "moe_calibrate_all_experts": True,
    },
    "saved": {"save_compressed": True, "trust_remote_code_model": True, "moe_calibrate_all_experts": False, "pipeline": "independent"},
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.filterwarnings("ignore:.*has no effect here:UserWarning")
def test_values_of_published_scripts_work(name: str) -> None:
    """Those that its examples give, on a model with experts."""
    sizes = {"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny.mixtral(**sizes, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=2048)
    rows = Dataset.from_list([{"input_ids": [*range(3, 9)], "attention_mask": [1] * 6, "loss_mask": [0, 0, 1, 1, 1, 1]}] * 8)
    given = DatasetDict({"train": rows, "train_sft": rows}) if "splits" in SCRIPTS[name] else rows
    recipe = GPTQModifier(targets="Linear", scheme="W8A8", ignore=["lm_head", "re:.*mlp.gate"], fallback_budget=6)
    result = oneshot(model=model, dataset=given, recipe=recipe, num_calibration_samples=4, **SCRIPTS[name])
    assert set(result.report.modules) == {name for name, module in result.model.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(result.report.modules) == 10


def test_untied_heads_are_weights_of_their_own_in_the_checkpoint(tmp_path: Path) -> None:
    folder = _llama(tmp_path / "m", tied=True)
    recipe = QuantizationModifier(scheme="W8A16", targets=["Linear"])
    result = oneshot(folder, recipe=recipe, output_dir=tmp_path / "out", tie_word_embeddings=False)
    loaded = compressor.load_compressed(tmp_path / "out")
    assert any("weights of its own" in note for note in result.report.notes) and "lm_head" in result.report.modules
    assert loaded.get_input_embeddings().weight.dtype == torch.float32 and not loaded.config.tie_word_embeddings
    table = LlamaForCausalLM.from_pretrained(folder).get_input_embeddings().weight
    assert torch.equal(loaded.get_input_embeddings().weight, table)
    with pytest.raises(ModelError, match="in memory; untie it first"):
        oneshot(LlamaForCausalLM.from_pretrained(folder), recipe=QuantizationModifier(scheme="W8A16"), tie_word_embeddings=False)


def test_choices_that_change_nothing_are_said(tmp_path: Path) -> None:
    folder, recipe = _llama(tmp_path / "m"), QuantizationModifier(scheme="W8A16", targets=["Linear"])
    told = oneshot(folder, recipe=recipe, tie_word_embeddings=False, sequential_offload_device="cpu", device="cpu").report.notes
    plain = oneshot(folder, recipe=QuantizationModifier(scheme="W8A16", targets=["Linear"]), device="cpu").report.notes
    assert [note.partition(":")[0] for note in told if note not in plain] == ["tie_word_embeddings", "sequential_offload_device"]


def test_an_untied_model_is_left_as_it_is(tmp_path: Path) -> None:
    folder = _llama(tmp_path / "m")
    for name, tie in (("a", True), ("b", False)):
        oneshot(folder, recipe=QuantizationModifier(scheme="W8A16"), output_dir=tmp_path / name, tie_word_embeddings=tie)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_the_config_of_another_folder_is_loaded_by(tmp_path: Path) -> None:
    folder = _llama(tmp_path / "m")
    config = LlamaConfig.from_pretrained(folder)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 77.0}
    config.save_pretrained(tmp_path / "c")
    oneshot(folder, recipe=QuantizationModifier(scheme="W8A16"), output_dir=tmp_path / "out", config_name=tmp_path / "c")
    assert LlamaConfig.from_pretrained(tmp_path / "out").rope_parameters["rope_theta"] == 77.0
    with pytest.raises(ModelError, match="which has its config; leave it out"):
        oneshot(LlamaForCausalLM.from_pretrained(folder), recipe=QuantizationModifier(scheme="W8A16"), config_name=tmp_path / "c")
    with pytest.raises(ModelError, match="is not a folder"):
        oneshot(folder, recipe=QuantizationModifier(scheme="W8A16"), config_name=tmp_path / "nowhere")


TWO_STAGES = """
first_stage: {quant_modifiers: {QuantizationModifier: {scheme: W8A16, targets: ["re:.*q_proj"]}}}
second_stage: {quant_modifiers: {QuantizationModifier: {scheme: W4A16, targets: ["re:.*v_proj"]}}}
"""


@pytest.mark.parametrize("stage", ["second", "second_stage"])
def test_one_stage_of_a_recipe(stage: str) -> None:
    recipe = load_recipe(TWO_STAGES, stage=stage)
    assert [modifier.scheme for modifier in recipe.modifiers] == ["W4A16"] and recipe.modifiers[0].index == 0  # type: ignore[attr-defined]
    assert load_recipe(recipe.dump()) == recipe
    with pytest.raises(RecipeError, match="stage: the recipe has none that is called 'secnd'; did you mean 'second'"):
        load_recipe(TWO_STAGES, stage="secnd")


def _mixture(folder: Path) -> Path:
    tiny.mixtral(
        hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_local_experts=2, num_experts_per_tok=1
    ).save_pretrained(folder)
    return folder


def test_modules_that_few_tokens_reach_are_noted(tmp_path: Path) -> None:
    folder = _mixture(tmp_path / "m")

    def run(share: float) -> list[str]:
        settings = {"scheme": "W4A16", "targets": ["re:.*q_proj", "re:.*experts[.][0-9]+[.]w[123]"], "dampening_frac": 0.1}
        result = oneshot(
            folder,
            recipe={"quant_modifiers": {"GPTQModifier": settings}},
            dataset=[list(range(64))] * 2,
            min_tokens_per_module=share,
        )
        return [note for note in result.report.notes if "were reached by fewer than" in note]

    (note,) = run(1.0)
    assert note.startswith("6 modules were reached by fewer than 1 of all tokens, 128: model.layers.0.mlp.experts.")
    assert run(0.01) == []
    with pytest.raises(UserInputError, match=r"min_tokens_per_module: 1\.5 is no share"):
        run(1.5)


def test_the_command_line_has_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _llama(tmp_path / "m", tied=True)
    data, code, recipe = tmp_path / "d.json", tmp_path / "rows_of_a_test.py", tmp_path / "r.yaml"
    data.write_text(
        '[{"ids": [1, 2, 3, 4], "label": 1, "loss_mask": [1, 1, 0, 0]}, {"ids": [5, 6, 7, 8], "label": 0, "loss_mask": [1, 1, 1, 1]}]'
    )
    code.write_text("def ids(row):\n    return {'input_ids': row['ids'], 'label': row['label'], 'loss_mask': row['loss_mask']}\n")
    recipe.write_text(TWO_STAGES.replace("QuantizationModifier: {", "GPTQModifier: {dampening_frac: 0.1, "))
    out = tmp_path / "out"
    words = [
        *("oneshot", str(folder), "--recipe", str(recipe), "--dataset", str(data), "--output-dir", str(out), "--quiet", "--json"),
        *("--stage", "first", "--split", "train", "--preprocessing-func", f"{code}:ids", "--remove-column", "label", "--no-loss-mask"),
        *("--concatenate-data", "--max-seq-length", "4", "--untie-word-embeddings", "--config-name", str(folder), "--streaming"),
        *("--min-tokens-per-module", "0.5", "--dataset-config-name", "default"),
    ]
    assert main(words) == 0, capsys.readouterr().err
    loaded = compressor.load_compressed(out)
    assert not loaded.config.tie_word_embeddings


@pytest.mark.parametrize("pattern", ["re:.*mlp$", "model.layers.0.mlp", "LlamaMLP", "re:.*mlp.*", "re:.*_proj.weight"])
def test_loose_patterns_give_the_checkpoint_that_exact_ones_give(tmp_path: Path, pattern: str) -> None:
    folder = _llama(tmp_path / "m")
    exact = ["re:.*_proj$"] if pattern.endswith("weight") else ["re:.*mlp[.].*_proj$"]
    made = oneshot(
        folder, recipe=QuantizationModifier(scheme="W8A16", targets=[pattern], ignore=["re:.*vision"]), output_dir=tmp_path / "a"
    )
    oneshot(folder, recipe=QuantizationModifier(scheme="W8A16", targets=exact), output_dir=tmp_path / "b")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert "QuantizationModifier: ignore 're:.*vision' matches no module" in made.report.notes
    assert any(f"targets {pattern!r} mean 3 layers" in note for note in made.report.notes) == (pattern != "re:.*_proj.weight")


@pytest.mark.filterwarnings("ignore:transformers .* will not load these experts:UserWarning")
def test_experts_have_the_names_that_recipes_have_for_them_whatever_files_call_them(tmp_path: Path) -> None:
    tiny.mixtral(
        hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_local_experts=2, num_experts_per_tok=1
    ).save_pretrained(tmp_path / "m")
    for name, first, last in (("a", "(gate|up)_proj", "down_proj"), ("b", "w(1|3)", "w2")):
        scheme = {"W8A16": [f"re:.*experts.*{first}$"], "W4A16": [f"re:.*experts.*{last}$"]}
        oneshot(tmp_path / "m", recipe=QuantizationModifier(scheme=scheme), output_dir=tmp_path / name)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_container_is_pruned_by_its_layers(tmp_path: Path) -> None:
    folder = _llama(tmp_path / "m")
    recipe = {"prune_modifiers": {"SparseGPTModifier": {"sparsity": 0.5, "targets": ["re:.*mlp$"], "ignore": ["re:.*vision"]}}}
    result = oneshot(folder, recipe=recipe, dataset=[list(range(64))] * 4)
    zeros = {name: float((module.weight == 0).float().mean()) for name, module in result.model.named_modules() if name.endswith("_proj")}
    assert {name for name, share in zeros.items() if share > 0.4} == {name for name in zeros if ".mlp." in name}
    assert any("ignore 're:.*vision' matches no module" in note for note in result.report.notes)
