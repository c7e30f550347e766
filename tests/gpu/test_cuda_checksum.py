"""A checksum is that of the CPU, whatever lies in how many pieces."""

from __future__ import annotations

import pytest
import torch

from compressor.numerics.checksum import checksum

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_bytes", [0, 5, 4099, 1 << 20, (1 << 20) + 11, 3 << 20, (65 << 20) + 8, 130 << 20])
def test_a_checksum_is_that_of_the_cpu(num_bytes: int, device: torch.device) -> None:
    values = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))
    there = values.to(device)
    assert checksum(there) == checksum(values)
    if num_bytes:
        there[num_bytes // 2] ^= 1
        assert checksum(there) != checksum(values)
