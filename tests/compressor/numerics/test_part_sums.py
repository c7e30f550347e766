"""A sum over samples has the same bits however many processes share the samples, in few sums at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.data.datasets import CalibrationData
from compressor.numerics.part_sums import MIN_TOKENS_SHARED, NUM_PARTS, PartSum, add_parts, most_sums

VALUES = torch.randn(3 * NUM_PARTS, 50, generator=torch.Generator().manual_seed(0))


def add(sums: PartSum, part: int) -> None:
    """Three values to a part."""
    (total,) = sums.of_part(part, lambda: [torch.zeros(50)])
    for value in VALUES[3 * part : 3 * part + 3]:
        total += value


@given(parts=st.sets(st.integers(0, NUM_PARTS - 1), min_size=1), processes=st.sampled_from([1, 2, 4, 8]))
def test_any_number_of_processes_gives_the_same_bits(parts: set[int], processes: int) -> None:
    alone = PartSum()
    for part in sorted(parts):
        add(alone, part)
    nodes = {}
    for process in range(processes):
        own = PartSum()
        for part in sorted(part for part in parts if part * processes // NUM_PARTS == process):
            add(own, part)
            assert len(own.nodes) <= (
                most_sums(MIN_TOKENS_SHARED, processes) if len(parts) == NUM_PARTS else 6
            )  # a gap keeps its neighbours apart
        nodes |= {span: arrays[0] for span, arrays in own.nodes.items()}
    (expected,) = alone.total() or [torch.empty(0)]
    assert torch.equal(add_parts(nodes), expected)
    assert torch.equal((alone.total() or [torch.empty(0)])[0], expected)  # which may be asked for again


def test_three_sums_are_alive_at_most() -> None:
    sums, most = PartSum(), 0
    for part in range(NUM_PARTS):
        add(sums, part)
        most = max(most, len(sums.nodes))
    assert most == most_sums(MIN_TOKENS_SHARED) and most_sums(MIN_TOKENS_SHARED - 1) == 1
    chains = [torch.zeros(50), torch.zeros(50)]
    for part in range(NUM_PARTS):
        chains[part // 4] += sum(VALUES[3 * part + 1 : 3 * part + 3], VALUES[3 * part])
    assert torch.equal((sums.total() or [torch.empty(0)])[0], chains[0] + chains[1])


def test_what_sees_all_samples_twice_adds_up_both_times() -> None:
    sums = PartSum()
    for part in (0, 5, 0, 5):
        add(sums, part)
    once = VALUES[:3].sum(0) + VALUES[15:18].sum(0)
    assert sums.came_again
    torch.testing.assert_close((sums.total() or [torch.empty(0)])[0], 2 * once)


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_parts_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    lengths = [100 + 40 * (row % 7) for row in range(24)]
    masks = [torch.arange(400) < length for length in lengths]
    groups = [torch.stack(masks[start : start + batch_size]) for start in range(0, len(masks), batch_size)]
    ids = [{"input_ids": torch.zeros(group.shape, dtype=torch.int64)} for group in groups]
    data = CalibrationData([*ids], [*groups], "", len(masks), sum(lengths))
    parts = [part for batch in data.sample_parts for part in batch]
    assert parts == sorted(parts) and set(parts) == set(range(NUM_PARTS))
    shares = [sum(length for length, own in zip(lengths, parts, strict=True) if own == part) for part in range(NUM_PARTS)]
    assert max(shares) - min(shares) <= 2 * max(lengths)
    few = CalibrationData([*ids][:1], [groups[0][:1]], "", 1, lengths[0])
    assert few.sample_parts == [(0,)]
