"""The zoo is whole, the same every time, and read strictly; every architecture beyond a few runs on all its batches in the nightly run."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

from compressor.model.targets import resolve_targets
from harness.errors import HarnessError
from harness.traceability.architectures import choose, read_architectures, zoo
from harness.traceability.batches import MAKERS, make_batches
from harness.traceability.toys.registry import TOYS

DEMANDED = set(
    re.findall(
        r"\w+",
        """llama mistral qwen2 qwen3 mixtral qwen3_moe gemma2 gemma3 gemma3n phi3 opt gpt2 gpt_neox bloom falcon olmo2 granite cohere2
        mamba2 deepseek_v3 jamba starcoder2 gpt_oss glm4 bert roberta deberta_v2 distilbert albert modernbert vit clip siglip dinov2 t5 bart
        whisper llava qwen2_vl qwen2_5_vl mllama gemma3_vision idefics3 paligemma pixtral""",
    )
)
DEMANDED_TOYS = set(
    re.findall(
        r"\w+",
        """in_place_across_layers called_twice early_exit list_indexed_by_size numpy_round_trip shared_dictionary autocast_around_targets
        generator_output exception_caught closure_over_tensors dropout_in_glue unused_target""",
    )
)
FEW = ("llama", "bert", "t5", "vit", "qwen2_vl")


def test_what_was_demanded_is_there() -> None:
    assert len(DEMANDED) >= 45
    assert {one.name for one in choose([])} >= DEMANDED
    assert TOYS.keys() >= DEMANDED_TOYS and len(TOYS) >= 40
    assert len(zoo()) >= 140, "many more than what must pass"
    assert not TOYS.keys() & zoo().keys(), "names on the command line are clear"
    assert all(toy.claim and toy.must in ("right", "right or refused") for toy in TOYS.values())
    assert len({one.name for one in choose([], more=True)}) == len(zoo())


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.nightly) for name in zoo() if name not in FEW)])
@pytest.mark.filterwarnings("ignore")
def test_an_architecture_is_the_same_every_time_and_takes_all_its_batches(name: str) -> None:
    one = zoo()[name]
    before = torch.get_rng_state(), random.getstate()
    model, again = one.build(), one.build()
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert all(torch.equal(left, right) for left, right in zip(model.parameters(), again.parameters(), strict=True))
    assert not model.training and {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert len(resolve_targets(model, one.layers)) >= 1
    batches = one.batches()
    assert list(batches) == ["same", "padded", "shape", "bare"]
    with torch.no_grad():
        for batch in batches.values():
            model(**{key: value.clone() for key, value in batch.items()})


@pytest.mark.parametrize("kind", ["text", "seq2seq", "speech"])
def test_variants_differ_in_what_they_are_called_after(kind: str) -> None:
    batches, again = make_batches(kind, {}), make_batches(kind, {})
    same, padded, shape, bare = batches.values()
    assert all(torch.equal(value, again["same"][name]) for name, value in same.items())
    assert same["attention_mask"].all() and same["attention_mask"].shape == padded["attention_mask"].shape
    mask = padded["attention_mask"]
    assert mask[0, 0] == 0 and mask[0, -1] == 1 and mask[-1, 0] == 1 and mask[-1, -1] == 0, "padding on the left and on the right"
    assert shape["attention_mask"].shape[0] != mask.shape[0] and shape["attention_mask"].shape[1] != mask.shape[1]
    assert "attention_mask" not in bare
    assert "text" in MAKERS


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[]", "holds no mapping `architectures`"),
        ("architectures: {a: {config: {}}}", "a must have a `class`"),
        ("architectures: {a: {class: A, layer: []}}", "rename the rest"),
        ("architectures: {a: {class: A, batch: texts}}", "batch 'texts' does not exist"),
        ("architectures: {a: {class: A, base: b}}", "base 'b' does not exist"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(HarnessError, match=complaint):
        read_architectures(path)


def test_an_unknown_name_comes_with_the_nearest() -> None:
    with pytest.raises(HarnessError, match="'qwn3' is not in the zoo; did you mean 'qwen3'"):
        choose(["qwn3"])
