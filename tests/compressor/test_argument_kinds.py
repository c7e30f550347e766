"""Public functions of layers and of training say what belongs into an argument, whatever somebody puts there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compressor import QuantizedKVCache, load_compressed, training
from compressor import nn as layers
from compressor.errors import CompressorError, UserInputError
from compressor.numerics import preset_scheme
from compressor.training import Snapshot, Trainer, TrainStep, WeightAverages

WRONG: tuple[Any, ...] = (-3, 2.5, "x", [], {"a": 1}, object(), torch.zeros(2), torch.tensor(True), nn.ReLU(), nn.Linear, True, None)
SCHEME = preset_scheme("W4A16")
LINEAR, EMBEDDING = nn.Linear(256, 8), nn.Embedding(8, 256)
LAYER = layers.quantized(LINEAR, SCHEME)
TABLE = layers.quantized(EMBEDDING, SCHEME)
NET = nn.Sequential(LINEAR)
STEP = TrainStep(NET, lambda model, batch: model(batch).sum(), training.adamw(NET.parameters()))
STORED = {"scheme": SCHEME, "codes_RC": LAYER.codes(), "qparams": LAYER.weight_qparams(), "g_idx_C": None, "name": ""}
BUFFERS = dict(LAYER.named_buffers())
RATES = {"lr": 0.1, "weight_decay": 0.0}

DOORS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "check_fit": (layers.check_fit, {"module": LINEAR, "scheme": SCHEME, "name": ""}),
    "check_shards": (layers.check_shards, {"model": NET, "num_shards": 2}),
    "empty_layer": (layers.empty_layer, {"module": LINEAR, "scheme": SCHEME, "name": ""}),
    "float_layer": (layers.float_layer, {"layer": LAYER}),
    "from_buffers": (layers.from_buffers, {"module": LINEAR, "scheme": SCHEME, "buffers": BUFFERS, "name": ""}),
    "from_embedding": (layers.QuantizedEmbedding.from_embedding, {"embedding": EMBEDDING, **STORED}),
    "from_linear": (layers.QuantizedLinear.from_linear, {"linear": LINEAR, **STORED}),
    "class of a linear layer": (layers.QuantizedLinear.class_of, {"scheme": SCHEME}),
    "class of an embedding": (layers.QuantizedEmbedding.class_of, {"scheme": SCHEME}),
    "forward of a linear layer": (LAYER, {"input": torch.zeros(2, 256)}),
    "forward of an embedding": (TABLE, {"input": torch.zeros(2, dtype=torch.int64)}),
    "is_quantizable": (layers.is_quantizable, {"module": LINEAR}),
    "load_compressed": (
        load_compressed,
        {"folder": "nowhere", "device": "cpu", "model_class": None, "trust_remote_code": False, "matmul": "native", "revision": None},
    ),
    "matmul_path": (getattr(LAYER, "matmul_path"), {"x": torch.zeros(2, 256)}),  # noqa: B009 (of one of the classes)
    "quantized": (layers.quantized, {"module": LINEAR, "scheme": SCHEME, "input_qparams": None, "name": ""}),
    "replacement": (layers.replacement, {"module": LINEAR, **STORED, "input_qparams": None}),
    "set_matmul": (layers.set_matmul, {"model": NET, "matmul": "native"}),
    "shard_problems": (layers.shard_problems, {"model": NET, "num_shards": 2}),
    "weight_of": (layers.weight_of, {"module": LINEAR}),
    "QuantizedKVCache": (QuantizedKVCache, {"model": NET}),
    "TrainStep": (
        TrainStep,
        {
            "model": NET,
            "loss_fn": STEP.loss_fn,
            "optimizer": STEP.optimizer,
            "session": None,
            "accumulate": 1,
            "clip_norm": None,
            "autocast": None,
            "averages": None,
        },
    ),
    "Trainer": (
        Trainer,
        {
            "step": STEP,
            "mode": "eager",
            "schedule": None,
            "warmup": 2,
            "check_every": 1,
            "audit_every": None,
            "max_plans": 8,
            "progress": None,
        },
    ),
    "fit": (Trainer(STEP).fit, {"num_steps": 0, "each": None}),
    "evaluate": (Trainer(STEP).evaluate, {"weights": None}),
    "WeightAverages": (WeightAverages, {"model": NET, "decay": 0.9, "warmup": False}),
    "weights of averages": (WeightAverages(NET).weights, {"decay": 0.999}),
    "adamw": (training.adamw, {"params": [LINEAR.weight], **RATES, "betas": (0.9, 0.99), "eps": 1e-8}),
    "sgd": (training.sgd, {"params": [LINEAR.weight], **RATES, "momentum": 0.1, "nesterov": False}),
    "warmup_cosine": (training.warmup_cosine, {"warmup_steps": 1, "num_steps": 10, "final_frac": 0.0}),
    "save_training": (training.save_training, {"trainer": Trainer(STEP), "path": Path("nowhere", "at", "all"), "notes": None}),
    "load_training": (training.load_training, {"trainer": Trainer(STEP), "path": "nowhere"}),
    "locate": (training.locate, {"plan": None}),
    "Plan": (training.Plan, {"step": STEP, "engine": None}),
    "drift": (training.drift, {"first": ["a"], "second": ["b"]}),
    "signature_hash": (training.signature_hash, {"lines": ["a"]}),
    "Snapshot.take": (Snapshot.take, {"step": STEP, "loss": None}),
}
FREE: dict[str, dict[str, Any]] = {  # of no kind of their own, or with a test below
    "fit": {"batch_at": lambda number: None},
    "locate": {"batch": None},
    "Plan": {"batch": None},
    "evaluate": {"batches": [torch.zeros(1, 256)]},
}


@pytest.mark.parametrize("door", DOORS)
def test_what_is_of_no_use_is_refused_in_our_words(door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where `x` is a path that may be written
    function, given = DOORS[door]
    refused = set()
    for name in given:
        for value in WRONG:
            try:
                function(**{**FREE.get(door, {}), **given, name: value})
            except CompressorError as error:  # any other exception fails the test
                if name in str(error):
                    refused.add(name)
    assert refused == given.keys() - ({"module"} if door == "is_quantizable" else set())


@pytest.mark.parametrize(
    ("name", "value"), [("batch_at", [1, 2]), ("batch_at", 3), ("num_steps", 2.0), ("num_steps", True), ("each", "log")]
)
def test_a_training_is_given_functions_and_whole_numbers(name: str, value: Any) -> None:
    given = {"batch_at": lambda number: torch.zeros(1, 256), "num_steps": 0, "each": None}
    with pytest.raises(UserInputError, match=f"^{name}: "):
        Trainer(STEP).fit(**{**given, name: value})


@pytest.mark.parametrize("batches", [3, "x", {"x": 1}, torch.tensor(1.0), None], ids=str)
def test_an_evaluation_is_given_batches(batches: Any) -> None:
    with pytest.raises(UserInputError, match=r"^batches: "):
        Trainer(STEP).evaluate(batches)


def test_an_optimizer_says_what_torch_says() -> None:
    for kind, given, said in (
        (training.adamw, {"betas": (2.0, 0.9)}, "AdamW: torch does not take this .*beta"),
        (training.adamw, {"eps": -1.0}, "AdamW: torch does not take this .*epsilon"),
        (training.sgd, {"nesterov": True}, "SGD: torch does not take this .*[Nn]esterov"),
    ):
        with pytest.raises(UserInputError, match=said):
            kind([LINEAR.weight], **given)  # type: ignore[operator]
    with pytest.raises(UserInputError, match=r"AdamW: torch does not take this .*empty parameter list"):
        training.adamw([])
    for rate in (-1.0, float("nan"), "fast", [0.1]):
        with pytest.raises(UserInputError, match=r"^lr"):
            training.sgd([{"params": [LINEAR.weight], "lr": rate}])
    assert training.adamw([LINEAR.weight], lr=torch.tensor(0.5)).param_groups[0]["lr"].item() == 0.5  # type: ignore[arg-type]
