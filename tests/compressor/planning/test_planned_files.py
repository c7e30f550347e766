"""What a run refuses or notes of the files of a model before it begins, a plan says too, where the files are there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from compressor import oneshot, plan
from compressor.errors import ModelError, SchemeError
from tests import tiny

RECIPE = {"q_modifiers": {"QuantizationModifier": {"scheme": "INT8", "targets": ["Linear"]}}}
TABLE, NORM = "model.embed_tokens.weight", "model.norm.weight"


def saved(folder: Path, **config: Any) -> Path:
    tiny.llama(**config).save_pretrained(folder, max_shard_size="60KB")
    assert len(shards(folder)) > 1
    return folder


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def change(folder: Path, name: str, value: Callable[[torch.Tensor], torch.Tensor | None], *, to: str = "", beside: bool = False) -> None:
    """Write another tensor in the place of one (None: none), under another name, or into the next file as well."""
    number = next(number for number, path in enumerate(shards(folder)) if name in load_file(path))
    path = shards(folder)[(number + beside) % len(shards(folder))]
    tensors, made = load_file(path), value(load_file(shards(folder)[number])[name])
    left = {key: tensor for key, tensor in tensors.items() if key != name or to}
    save_file(left if made is None else left | {to or name: made.contiguous()}, path, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    places = {key: file for key, file in content["weight_map"].items() if key != name or made is not None}
    index.write_text(json.dumps(content | {"weight_map": {**places, **({to: path.name} if to else {})}}))


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "one name in two files": (lambda folder: change(folder, NORM, lambda x: x + 1, beside=True), "stands in .* and in .*; keep one"),
    "two names of one place": (
        lambda folder: change(folder, NORM, lambda x: x + 1, to="norm.weight"),
        "differ, and both are model.norm.weight",
    ),
    "too much": (lambda folder: change(folder, NORM, lambda x: x, to="odd.weight"), "have no place in the model"),
    "too little": (lambda folder: change(folder, NORM, lambda x: None), "not in its files"),
    "another shape": (lambda folder: change(folder, NORM, lambda x: x[1:]), "another shape"),
    "codes": (lambda folder: change(folder, NORM, lambda x: x.to(torch.int8)), "no scales say which floats"),
    "cut off": (lambda folder: shards(folder)[0].write_bytes(shards(folder)[0].read_bytes()[:-1]) and None, "not a whole safetensors file"),
    "an index without metadata": (
        lambda folder: (
            (index := folder / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]})
            )
            and None
        ),
        "has no metadata",
    ),
}


@pytest.mark.parametrize("damage", REFUSED)
def test_files_that_a_run_refuses_a_plan_refuses(damage: str, tmp_path: Path) -> None:
    spoil, said = REFUSED[damage]
    spoil(saved(tmp_path / "base"))
    for verb in (plan, lambda *args, **given: oneshot(*args, device="cpu", **given)):
        with pytest.raises(ModelError, match=said):
            verb(tmp_path / "base", recipe=RECIPE)


def test_a_tie_that_the_files_do_not_keep_is_planned_as_it_is_run(tmp_path: Path) -> None:
    """Where they keep it, head and table are one weight, and to quantize that is refused."""
    folder = saved(tmp_path / "base", tie_word_embeddings=True)
    change(folder, TABLE, lambda x: x + 1, to="lm_head.weight")
    made, result = plan(folder, recipe=RECIPE), oneshot(folder, recipe=RECIPE, device="cpu")
    assert made.notes == tuple(result.report.notes) and "config.json ties what differs in the files" in made.notes[0]
    assert {module.name for module in made.modules} == result.report.modules.keys() >= {"lm_head"}
    with pytest.raises(SchemeError) as refused:
        oneshot(folder, recipe=RECIPE, device="cpu", output_dir=tmp_path / "out")
    assert made.unwritable == str(refused.value)


def test_a_plan_needs_no_weights_and_reads_no_values(tmp_path: Path) -> None:
    folder = saved(tmp_path / "base")
    whole = plan(folder, recipe=RECIPE, dtype="float16")
    change(folder, NORM, lambda x: x * 1e30)  # in float16 infinity, which a run refuses
    assert plan(folder, recipe=RECIPE, dtype="float16").modules == whole.modules
    for path in shards(folder):
        path.unlink()
        assert plan(folder, recipe=RECIPE, dtype="float16").modules == whole.modules
    (folder / "model.safetensors.index.json").unlink()
    bare = plan(folder, recipe=RECIPE, dtype="float16")
    assert (bare.modules, bare.estimate.checkpoint_bytes) == (whole.modules, whole.estimate.checkpoint_bytes)


class Shared(nn.Module):
    """A layer with three names, a list that holds a stack of two twice, and a head with the weight of the table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.head.weight = self.table.weight
        self.a = self.b = self.c = nn.Linear(32, 32)
        stack = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        self.layers = nn.ModuleList([stack, stack])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.c(self.b(self.a(self.table(ids))))
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


INT4 = {"QuantizationModifier": {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}}}}
TURNED = {"SpinQuantModifier": {"rotations": ["R1", "R2"]}}
HEAD = "re:.*(head|predictions.decoder)$"
OPT = {"hidden_size": 64, "ffn_dim": 96, "word_embed_proj_dim": 32}
ALBERT = {"hidden_size": 64, "intermediate_size": 96, "embedding_size": 32}


CASES = [(kind, modifier) for kind in ("module", "opt", "albert") for modifier in ("codes", "pruned", "turned")]


@pytest.mark.parametrize(("kind", "modifier"), [one for one in CASES if one != ("module", "turned")])
def test_bytes_are_those_of_the_file_whatever_is_shared(kind: str, modifier: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    model: Any = Shared()
    if kind != "module":
        name, config = ("OPTForCausalLM", OPT) if kind == "opt" else ("AlbertForMaskedLM", ALBERT)
        torch.manual_seed(0)
        model = getattr(transformers, name)(transformers.AutoConfig.for_model(kind, **sizes, **config))
    coded = {"QuantizationModifier": INT4["QuantizationModifier"] | {"ignore": [HEAD]}}
    pruned = {"MagnitudePruningModifier": {"targets": ["Linear", "Embedding"], "final_sparsity": 0.5}}
    recipe = {"q_modifiers": {"codes": coded, "pruned": pruned, "turned": TURNED | coded}[modifier]}
    told = plan(model, recipe=recipe).estimate.checkpoint_bytes
    oneshot(model.eval(), recipe=recipe, output_dir=tmp_path / "made", dataset=torch.randint(64, (4, 8)))
    assert told == sum(tensor.nbytes for tensor in load_file(tmp_path / "made" / "model.safetensors").values())
