"""A setting that nobody would read, a run inside torch.autocast or another default dtype: refused. Numbers of numpy are numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from compressor import oneshot, plan, train
from compressor.cli.main import main
from compressor.entrypoints.trace import trace_model
from compressor.errors import CompressorError, DatasetError, ModelError, RecipeError, UserInputError

IDS = torch.arange(64, dtype=torch.int64).reshape(4, 16)


def quantize(**settings: Any) -> str:
    return json.dumps({"quant_stage": {"quant_modifiers": {"GPTQModifier": {"ignore": ["lm_head"], "scheme": "W8A8", **settings}}}})


UNREAD: dict[str, tuple[dict[str, Any], str]] = {
    "a dtype": ({"dtype": "bfloat16"}, "dtype: 'bfloat16' was given for a model in memory"),
    "no dtype": ({"dtype": "int8"}, "dtype: 'int8' was given for a model in memory"),
    "a class": ({"model_class": "AutoModel"}, "model_class: 'AutoModel' was given for a model in memory"),
    "a column of token ids": ({"text_column": "nope"}, "text_column: 'nope' was given, but this data has no columns"),
    "a column of texts": ({"text_column": "nope", "dataset": ["a b"]}, "text_column: 'nope' was given, but this data has no columns"),
    "a column beside ids": (
        {"text_column": "body", "dataset": [{"body": "a", "input_ids": IDS[0]}]},
        "the column 'body' was named .* and 'input_ids' would be read in its place",
    ),
    "a column beside messages": ({"text_column": "bdy", "dataset": [{"body": "a", "messages": []}]}, "'messages' would be read in its"),
    "a loader's size": ({"batch_size": 2, "dataset": DataLoader(IDS)}, "batch_size: 2 was given, but a DataLoader has its own"),
    "a loader's column": ({"text_column": "x", "dataset": DataLoader(IDS)}, "text_column: 'x' was given, but a DataLoader"),
    "an unused value": ({"recipe_args": {"S": 1}}, "the argument 'S' is not used by the recipe, which holds no ..name.; leave it out"),
    "a value twice": ({"recipe_args": ["S=a", "S=b"]}, "recipe_args: 'S' was given twice, as 'a' and as 'b'"),
    "an unknown column": ({"dataset": [{"input": IDS[0]}]}, "call that of token ids input_ids"),
    "a leaf": ({"leaves": ["os"]}, "leaves: 'os' is no package.module:function"),
    "a folder that is no UTF-8": ({"output_dir": b"/tmp/\xff/out".decode("utf-8", "surrogateescape")}, "output_dir: .* is no UTF-8"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_setting_that_nobody_would_read_is_refused(name: str, llama_dir: Path) -> None:
    given, words = UNREAD[name]
    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype="float32")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    usual: dict[str, Any] = {"model": model, "recipe": quantize(), "dataset": IDS, "pipeline": "sequential"}
    with pytest.raises(CompressorError, match=words):
        oneshot(**{**usual, **given})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    "given",
    [{"num_calibration_samples": 4}, {"max_seq_length": 8}, {"batch_size": 2}, {"text_column": "x"}, {"shuffle_calibration_samples": True}],
)
def test_settings_of_data_without_data_are_refused_and_unread_data_is_noted(given: dict[str, Any]) -> None:
    recipe = json.dumps({"a_stage": {"a_modifiers": {"MagnitudePruningModifier": {"final_sparsity": 0.5}}}})
    with pytest.raises(DatasetError, match=rf"{next(iter(given))}: .* was given without a dataset to read"):
        oneshot(torch.nn.Sequential(torch.nn.Linear(4, 4)), recipe=recipe, **given)
    result = oneshot(torch.nn.Sequential(torch.nn.Linear(4, 4)), recipe=recipe, dataset=IDS, **given)
    assert result.report.notes == ["the dataset was not read, because the data_free pipeline ran"]


def test_buffers_that_a_cast_has_rounded_and_no_file_holds_are_noted(llama_dir: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(llama_dir, dtype="bfloat16")
    cast = AutoModelForCausalLM.from_pretrained(llama_dir, dtype="float32").bfloat16()
    notes = [oneshot(model, recipe=quantize(), dataset=IDS).report.notes for model in (loaded, cast)]
    (said,) = set(notes[1]) - set(notes[0])
    assert "inv_freq) are bfloat16 in this model, and float32 where its checkpoint is loaded" in said and not set(notes[0]) - set(notes[1])


def test_training_and_plans_refuse_them_too(llama_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype="bfloat16")
    for run, given in ((train, {"dataset": IDS, "steps": 1, "dtype": "float16"}), (plan, {"recipe": quantize(), "dtype": "float16"})):
        with pytest.raises(ModelError, match="dtype: 'float16' was given for a model in memory"):
            run(model, **given)  # type: ignore[operator]
    with pytest.raises(ModelError, match="model_class: 'AutoModel' was given for a model in memory"):
        trace_model(model, model_class="AutoModel")
    with pytest.raises(DatasetError, match="text_column: 'x' was given"):
        train(model, dataset=IDS, steps=1, text_column="x")


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numbers_of_numpy_are_numbers(kind: Any, llama_dir: Path, tmp_path: Path) -> None:
    numbers = {
        "num_calibration_samples": 3,
        "max_seq_length": 8,
        "batch_size": 2,
        "max_variants": 4,
        "seed": 3,
        "shuffle_calibration_samples": True,
    }
    records = [
        oneshot(
            llama_dir,
            recipe=quantize(),
            dataset=IDS,
            output_dir=tmp_path / str(of),
            **{key: value if value is True else of(value) for key, value in numbers.items()},
        )
        for of in (int, kind)
    ]
    assert records[0].record == records[1].record
    trained = train(
        llama_dir,
        dataset=IDS,
        steps=kind(1),
        batch_size=kind(2),
        max_seq_length=kind(16),
        learning_rate=np.float32(0.5),
        seed=kind(1),
        output_dir=tmp_path / "t",
    )
    assert trained.record["training"]["learning_rate"] == 0.5
    for value in (np.bool_(True), np.float64(3)):
        with pytest.raises(UserInputError, match=r"seed: .* was given, where a whole number belongs"):
            oneshot(llama_dir, recipe=quantize(), dataset=IDS, seed=value)  # type: ignore[arg-type]


def test_autocast_and_another_default_dtype_around_a_run_are_refused(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: tuple[Callable[[], Any], ...] = (
        lambda: oneshot(llama_dir, recipe=quantize(), dataset=IDS),
        lambda: train(llama_dir, dataset=IDS, steps=1),
        lambda: plan(llama_dir, recipe=quantize()),
        lambda: trace_model(llama_dir),
    )
    for run in runs:
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(UserInputError, match=r"torch\.autocast\('cpu', torch\.bfloat16\) is on"):
            run()
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    for run in runs:
        with pytest.raises(UserInputError, match=r"torch\.set_default_dtype\(torch\.float64\) is in force"):
            run()


def test_numbers_of_a_command_line_and_of_a_recipe_are_named_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["oneshot", "x", "--recipe", "y", "--output-dir", "z", "--seed", "1.5"])
    assert "oneshot: error: --seed: '1.5' is not a whole number; see" in capsys.readouterr().err
    with pytest.raises(RecipeError, match=r"block_size: 1e\+30 was given, where a whole number belongs"):
        oneshot("x", recipe=quantize(block_size=1e30))
