"""What training needs of the numerics: where a value is cut off, and the same arithmetic without a look from the host."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compressor.algorithms.rtn import nearest_codes
from compressor.numerics import PRESETS, QParams, QuantizationArgs, inside_range, preset_scheme, range_qparams, weight_qparams
from compressor.numerics.formats import last_step


class HostReads(TorchDispatchMode):
    """Counts operators that hand a value to Python, and copies from Python, which a CUDA graph cannot repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::lift_fresh", "aten::nonzero"):
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("observer", ["minmax", "mse"])
def test_without_checks_the_same_numbers_come_out_and_the_host_sees_none(preset: str, observer: str) -> None:
    args = preset_scheme(preset, ["Linear"]).weights
    assert args is not None
    args = args.model_copy(update={"observer": observer})
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(1))
    checked = weight_qparams(weight, args)
    with HostReads() as reads:
        unchecked = weight_qparams(weight, args, checked=False)
        codes = nearest_codes(weight, unchecked, args, checked=False)
    assert reads.found == []
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(checked, unchecked, strict=True))
    assert torch.equal(codes.view(torch.uint8), nearest_codes(weight, checked, args).view(torch.uint8))
    with HostReads() as reads:
        weight_qparams(weight, args)
    assert "aten::_local_scalar_dense" in reads.found or "aten::is_nonzero" in reads.found  # the counter sees what is there


@pytest.mark.parametrize(
    ("settings", "zero_point", "low", "high"),
    [
        ({"num_bits": 4}, None, -9.0, 8.0),
        ({"num_bits": 8}, None, -129.0, 128.0),
        ({"num_bits": 4, "symmetric": False}, 3, -12.0, 5.0),
        ({"num_bits": 8, "type": "float"}, None, -480.0, 480.0),
    ],
)
def test_values_are_inside_up_to_one_step_beyond_the_last_code(settings, zero_point, low, high) -> None:
    args = QuantizationArgs(strategy="tensor", **settings)
    scale = 0.5
    qparams = QParams(torch.tensor([scale]), None if zero_point is None else torch.tensor([zero_point], dtype=torch.int8))
    codes = torch.tensor([low - 1, low, low + 0.01, 0.0, high - 0.01, high, high + 1])
    assert inside_range(codes * scale, qparams, args).tolist() == [False, False, True, True, True, False, False]


def test_each_group_has_a_range_of_its_own() -> None:
    args = QuantizationArgs(num_bits=4, group_size=4)
    x = torch.tensor([[1.0, 7.0, 9.0, -8.5, 1.0, 7.0, 9.0, -8.5]])
    found = inside_range(x, QParams(torch.tensor([[1.0, 2.0]]), None), args)
    assert found.tolist() == [[True, True, False, True, True, True, True, True]]


def test_the_last_step_is_the_distance_between_the_two_largest_codes() -> None:
    fp8 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().sort().values
    assert last_step("float", 8) == float(fp8[-1] - fp8[-2])
    assert last_step("float", 4) == 2.0 and last_step("int", 5) == 1.0


def test_a_range_alone_gives_the_global_scale_where_the_format_has_one() -> None:
    nvfp4 = preset_scheme("NVFP4", ["Linear"]).input_activations
    assert nvfp4 is not None
    assert float(range_qparams(torch.tensor([-3.0]), torch.tensor([2.0]), nvfp4).global_scale) == pytest.approx(448 * 6 / 3)
    assert range_qparams(torch.tensor([-3.0]), torch.tensor([2.0]), QuantizationArgs()).global_scale is None
