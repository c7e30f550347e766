"""The bytes of a tensor, however it lies in memory: one value alone has any stride."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from compressor import QuantizationModifier, oneshot
from compressor.data.layouts import digest
from compressor.model.headers import write_tensors
from compressor.numerics.checksum import checksum
from compressor.pages import in_pieces, raw_bytes
from compressor.tracing import trace

LAID_OUT: dict[str, Tensor] = {
    "one of three": torch.tensor([1.5, 2.0, 3.0])[::3],
    "a corner": torch.arange(20.0).reshape(4, 5)[3:, 4:].t(),
    "a column": torch.arange(20).reshape(4, 5)[:, 2],
    "a transpose": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
    "a conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "a number": torch.tensor(3),
    "nothing": torch.empty(0, 3),
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_bytes_are_those_of_a_plain_copy(name: str, tmp_path: Path) -> None:
    tensor = LAID_OUT[name]
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    expected = bytes(plain.reshape(-1).view(torch.uint8).tolist())
    assert bytes(raw_bytes(tensor).tolist()) == expected
    assert b"".join(bytes(piece.tolist()) for piece in in_pieces(tensor)) == expected
    assert checksum(tensor) == checksum(plain) and digest(tensor) == digest(plain)
    if not tensor.is_complex():
        write_tensors({"t": tensor}, tmp_path / "t.safetensors", {})
        assert torch.equal(load_file(tmp_path / "t.safetensors")["t"], plain)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = nn.Parameter(LAID_OUT["one of three"])

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.gain * scale
        return out


def test_a_run_takes_them_in_the_model_and_in_its_batches(tmp_path: Path) -> None:
    batches = [{"x": torch.randn(1, 8), "scale": torch.arange(1.0, 13.0)[None][:, place]} for place in (0, 3)]
    assert Scaled().gain.stride() == (3,) and batches[1]["scale"].stride() == (12,)
    static = {"g": {"targets": ["Linear"], "weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}}}
    recipe = QuantizationModifier(config_groups=static)
    result = oneshot(Scaled(), recipe=recipe, dataset=DataLoader(batches, batch_size=None), output_dir=tmp_path / "out")  # type: ignore[arg-type]
    assert list(result.report.modules) == ["linear"]
    assert len(trace(Scaled().eval(), batches).stages) == 1
