"""Buffers of every kind: written as they are, or refused by name before the run; a change of any is found."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import OlmoConfig, OlmoForCausalLM

from compressor import load_compressed, oneshot
from compressor.errors import CheckpointError
from compressor.model.checkpoints.audit import check_unclaimed, contents
from tests import tiny

QUANTIZED = pytest.mark.filterwarnings("ignore:.*(quantized tensor creation functions|beta state)")


def _complex(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))


WRITTEN: dict[str, Callable[[], dict[str, Tensor]]] = {
    "a conjugate": lambda: {"a": _complex(3).conj()},
    "a conjugate beside what it is one of": lambda: dict(zip("ab", (lambda z: (z, z.conj()))(_complex(3)), strict=True)),
    "a negated part of a conjugate": lambda: {"a": _complex(3).conj().imag},
    "a transposed one beside a complex one": lambda: {"a": _complex(3), "b": torch.arange(6.0).view(2, 3).t(), "c": _complex(3, 2).t()},
    "unsigned": lambda: {str(dtype)[6:]: torch.tensor([1, 200]).to(dtype) for dtype in (torch.uint16, torch.uint32, torch.uint64)},
    "exponents": lambda: {"a": torch.tensor([0.5, 4.0]).to(torch.float8_e8m0fnu)},
}
REFUSED: dict[str, Callable[[], Tensor]] = {
    "complex128 (3,)": lambda: _complex(3).to(torch.complex128),
    "float32 sparse_coo (3, 3)": lambda: torch.eye(3).to_sparse(),
    "float32 sparse_csr (3, 3)": lambda: torch.eye(3).to_sparse_csr(),
    "qint8 (4,)": lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.qint8),
    "qint8 (2, 2)": lambda: torch.quantize_per_channel(torch.eye(2), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8),
}


class Net(nn.Module):
    def __init__(self, buffers: dict[str, Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        for name, value in buffers.items():
            self.register_buffer(name, value)


GROUPS = {"all": {"targets": ["layer"], "weights": {"num_bits": 8, "strategy": "channel"}}}
RECIPE = {"modifiers": {"QuantizationModifier": {"config_groups": GROUPS}}}


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_buffer_is_written_as_it_is(kind: str, tmp_path: Path) -> None:
    oneshot(Net(WRITTEN[kind]()), recipe=RECIPE, output_dir=tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in WRITTEN[kind]().items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].view(torch.uint8), value.resolve_conj().resolve_neg().contiguous().view(torch.uint8)), name


def test_a_conjugate_is_not_what_lies_in_its_memory() -> None:
    found = contents(Net(WRITTEN["a conjugate beside what it is one of"]()))
    assert found["a"] != found["b"]


def test_a_model_without_a_float_left_is_saved_and_read(tmp_path: Path) -> None:
    """Norms of OLMo have no weights, and transformers asks the first float parameter for the dtype of a model."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    model = OlmoForCausalLM(OlmoConfig(**sizes, **ends, tie_word_embeddings=False)).to(torch.bfloat16).eval()
    groups = {"all": {"targets": ["Linear", "Embedding"], "weights": {"num_bits": 8, "group_size": 16, "strategy": "group"}}}
    oneshot(model, recipe={"modifiers": {"QuantizationModifier": {"config_groups": groups}}}, output_dir=tmp_path / "out")
    assert not list(model.parameters())
    ids = torch.arange(1, 9)[None]
    # Rotary frequencies of the model in memory were rounded with it; those of a model that is read are not.
    ours, theirs = load_compressed(tmp_path / "out", device="cpu"), OlmoForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(ours(ids).logits, theirs(ids).logits) and theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours(ids).logits, model(ids).logits, rtol=0, atol=0.05)


@QUANTIZED
@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_file_holds_is_refused_by_name_before_the_run_and_stays_in_memory(kind: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="odd.*no file of safetensors holds, odd is " + kind.replace("(", r"\(").replace(")", r"\)")):
        oneshot(Net({"odd": REFUSED[kind]()}), recipe=RECIPE, output_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    result = oneshot(Net({"odd": REFUSED[kind]()}), recipe=RECIPE)
    with pytest.raises(CheckpointError, match="no file of safetensors holds"):
        result.save(tmp_path / "out")


@QUANTIZED
@pytest.mark.parametrize("kind", REFUSED)
def test_a_change_of_such_a_buffer_is_found(kind: str) -> None:
    model = Net({"odd": REFUSED[kind]()})
    before = contents(model)
    check_unclaimed(model, before, {"layer"})
    model.odd = model.odd + model.odd if "q" not in kind else model.odd.dequantize().neg()
    with pytest.raises(CheckpointError, match="odd: 1 tensors"):
        check_unclaimed(model, before, {"layer"})


@pytest.mark.parametrize(("kind", "dtype"), [("deepseek_v3", torch.bfloat16), ("deepseek_v3", torch.float16), ("t5", torch.float16)])
def test_what_a_class_keeps_in_float32_is_read_so(
    kind: str, dtype: torch.dtype, tiny_moe: Callable[[str], nn.Module], tmp_path: Path
) -> None:
    """Router biases of DeepSeek, and the last layer of T5, whose scales count, too."""
    model: Any = (tiny.t5() if kind == "t5" else tiny_moe(kind)).to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = 8 + torch.linspace(-0.02, 0.02, len(buffer), dtype=torch.float32)
    model.save_pretrained(tmp_path / "base")
    scheme = {"all": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}
    recipe = {"QuantizationModifier": {"config_groups": scheme, "ignore": ["lm_head"]}}
    given = {"model_class": type(model).__name__}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = oneshot(tmp_path / "base", recipe=recipe, output_dir=tmp_path / "out", **given)
    loaded: Any = load_compressed(tmp_path / "out", **given)
    files, state = load_file(tmp_path / "out" / "model.safetensors"), loaded.state_dict()
    kept = [key for key, value in files.items() if value.dtype == torch.float32 and key in state]
    assert kept and all(torch.equal(files[key], state[key]) for key in kept)
    batch = {"input_ids": torch.arange(18).view(2, 9)} | ({"decoder_input_ids": torch.arange(10).view(2, 5)} if kind == "t5" else {})
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, result.model(**batch).logits)
    loaded.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert files.keys() == again.keys() and all(torch.equal(again[key], value) for key, value in files.items())
