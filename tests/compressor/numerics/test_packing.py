"""Packing loses nothing, at any width, rank and length, and refuses what does not fit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.errors import NumericsError, SchemeError
from compressor.numerics import pack_int32, unpack_int32


@given(
    num_bits=st.integers(1, 8),
    outer=st.lists(st.integers(1, 3), max_size=2),
    inner=st.lists(st.sampled_from([1, 2, 3, 7, 13, 31, 32, 33, 64]), min_size=1, max_size=2),
    dim=st.integers(0, 1),
    seed=st.integers(0, 2**31),
)
def test_10_unpack_undoes_pack(num_bits, outer, inner, dim, seed):
    shape = outer + inner
    dim = 1 if len(shape) == 1 else dim
    half = 1 << (num_bits - 1)
    codes = torch.randint(-half, half, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))
    packed = pack_int32(codes, num_bits, dim)
    assert packed.dtype == torch.int32 and packed.is_contiguous()
    assert packed.shape[dim - 2 if len(shape) > 1 else 0] == -(-shape[dim - 2 if len(shape) > 1 else 0] * num_bits // 32)
    assert torch.equal(unpack_int32(packed, num_bits, codes.shape, dim), codes)
    assert torch.equal(unpack_int32(packed, num_bits, torch.tensor(codes.shape), dim), codes)


@given(num_bits=st.integers(1, 8), num_codes=st.integers(1, 100), seed=st.integers(0, 2**31))
def test_a_row_of_words_is_one_long_number(num_bits, num_codes, seed):
    """The oracle knows Python integers only: code i, made unsigned, stands at bit i * num_bits."""
    half = 1 << (num_bits - 1)
    codes = torch.randint(-half, half, (1, num_codes), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))
    number = sum((int(code) + half) << (i * num_bits) for i, code in enumerate(codes[0]))
    words = pack_int32(codes, num_bits)[0]
    assert sum((int(word) & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(words)) == number


@pytest.mark.parametrize("num_bits", range(1, 9))
@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_nothing_packs_to_nothing(num_bits, shape):
    codes = torch.zeros(shape, dtype=torch.int8)
    assert unpack_int32(pack_int32(codes, num_bits), num_bits, shape).shape == shape


def test_extreme_codes_keep_out_of_their_neighbours():
    codes = torch.tensor([[-8, 7, -8, 7, 7, -8, 0, -1, 7]], dtype=torch.int8)
    assert pack_int32(codes, 4).tolist() == [[0x780FF0F0, 0xF]]


@pytest.mark.parametrize("code", [-9, 8])
def test_a_code_that_does_not_fit_is_refused(code):
    with pytest.raises(NumericsError, match="do not fit into num_bits=4"):
        pack_int32(torch.tensor([[0, code]], dtype=torch.int8), 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack_int32(torch.zeros(2, 2), 4), "torch.float32 is not torch.int8"),
        (lambda: unpack_int32(torch.zeros(2, 2), 4, (2, 16)), "torch.float32 is not torch.int32"),
        (lambda: pack_int32(torch.zeros(2, 2, dtype=torch.int8), 9), "num_bits=9"),
        (lambda: pack_int32(torch.zeros(2, 2, dtype=torch.int8), 4, dim=2), "dim=2"),
        (lambda: pack_int32(torch.zeros(2, dtype=torch.int8), 4, dim=0), "dim=0"),
        (lambda: unpack_int32(torch.zeros(2, 2, dtype=torch.int32), 4, (2, 17)), "do not hold"),
        (lambda: unpack_int32(torch.zeros(2, 2, dtype=torch.int32), 4, (3, 16)), "do not hold"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(SchemeError, match=message):
        call()
