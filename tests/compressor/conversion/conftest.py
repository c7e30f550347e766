"""Small models on disk, and what `oneshot` makes of them: what a conversion must give, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from compressor import QuantizationModifier, oneshot
from compressor.model.loading.load import quiet_transformers

_SIZE = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 1, "num_attention_heads": 2}
_SIZE |= {"num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("LlamaForCausalLM", {}),
    "tied": ("Gemma2ForCausalLM", {"head_dim": 64}),
    "biases": ("Qwen2ForCausalLM", {}),
    "experts": ("MixtralForCausalLM", {"num_local_experts": 2, "intermediate_size": 128}),
    "fused": ("GptOssForCausalLM", {"num_local_experts": 2, "intermediate_size": 128, "head_dim": 64}),
}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give the folder of a model; made once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            class_name, more = _MODELS[name]
            made[name] = tmp_path_factory.mktemp("bases") / name
            cls = getattr(transformers, class_name)
            torch.manual_seed(0)
            model = cls(cls.config_class(**_SIZE | more))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(std=0.05)
            with quiet_transformers():
                model.to(torch.bfloat16).save_pretrained(made[name], max_shard_size="150KB")
            (made[name] / "chat_template.jinja").write_text("{{ messages }}")
        return made[name]

    return folder


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Give the checkpoint that `oneshot` makes of a folder; made once."""
    made: dict[str, Path] = {}

    def folder(source: Path, **scheme: Any) -> Path:
        key = json.dumps([str(source), scheme], default=str)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("expected") / "checkpoint"
            oneshot(source, recipe=QuantizationModifier(**scheme), output_dir=made[key])
        return made[key]

    return folder


@pytest.fixture(scope="session")
def differences() -> Callable[[Path, Path], list[str]]:
    """Name the files that two folders do not share byte for byte."""

    def names(one: Path, other: Path) -> list[str]:
        found, wanted = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (one, other))
        return sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))

    return names


@pytest.fixture(scope="session")
def check_same(differences: Callable[[Path, Path], list[str]]) -> Callable[[Path, Path], None]:
    """Hold a conversion against what `oneshot` has written: of the record, notes are compared as far as they need no weights."""

    def check(made: Path, wanted: Path) -> None:
        assert set(differences(made, wanted)) <= {"compression.json"}
        found, told = (json.loads((folder / "compression.json").read_text()) for folder in (made, wanted))
        errors = [{name: one.pop("error") for name, one in record["modules"].items()} for record in (found, told)]
        assert errors[0] == pytest.approx(errors[1], rel=1e-4)  # sums over blocks of rows
        notes = [[note.partition("; outputs")[0] for note in record.pop("notes", [])] for record in (found, told)]
        assert notes[0] == notes[1]
        digests = [record.pop("sha256") for record in (found, told)]
        assert found == told and len(digests[0]) == len(digests[1]) == 64

    return check
