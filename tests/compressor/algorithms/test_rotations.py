"""Rotations: orthogonal at every size that models have, equal to their matrices, and the kinds do what their names say."""

from __future__ import annotations

import pytest
import torch

from compressor.algorithms.rotations import KINDS, has_hadamard, make_rotation
from compressor.errors import NumericsError

SIZES = (1, 2, 12, 20, 28, 36, 64, 96, 140, 344 * 2, 768, 896, 1536)  # 12, 20, 36 and 28 have other primes each
MODELS = (2048, 2560, 3072, 3584, 4096, 4864, 5120, 8960, 11008, 13824, 14336, 18944, 27648, 29568)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keeps_mean", [False, True])
@pytest.mark.parametrize("size", [size for size in SIZES if has_hadamard(size)])
def test_every_rotation_is_orthogonal_and_its_own_matrix(kind: str, keeps_mean: bool, size: int) -> None:
    rotation = make_rotation(kind, size, seed=3, keeps_mean=keeps_mean)
    matrix = rotation.matrix()
    assert torch.allclose(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)
    x = torch.randn(3, 2 * size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(rotation.turn(x), x @ torch.block_diag(matrix, matrix), rtol=0, atol=1e-11)
    assert torch.allclose(rotation.turn(rotation.turn(x), back=True), x, rtol=0, atol=1e-11)
    if keeps_mean:
        assert torch.allclose(rotation.turn(x).mean(1), x.mean(1), rtol=0, atol=1e-12)
    elif kind != "random-matrix":
        assert torch.allclose(matrix.abs(), torch.full_like(matrix, size**-0.5), rtol=0, atol=1e-12)


def test_one_channel_that_stands_out_is_spread_over_all() -> None:
    spike = torch.zeros(1, 768, dtype=torch.float64)
    spike[0, 5] = 100.0
    assert float(make_rotation("hadamard", 768).turn(spike).abs().max()) == pytest.approx(100 / 768**0.5)
    assert float(make_rotation("hadamard", 768, keeps_mean=True).turn(spike).abs().max()) < 20


def test_the_widths_of_models_have_a_matrix() -> None:
    assert [size for size in MODELS if not has_hadamard(size)] == []


def test_seeds_decide_what_is_random() -> None:
    for kind in ("random-hadamard", "random-matrix"):
        one, same, other = (make_rotation(kind, 24, seed=seed).matrix() for seed in (1, 1, 2))
        assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(make_rotation("hadamard", 24, seed=1).matrix(), make_rotation("hadamard", 24, seed=2).matrix())


@pytest.mark.parametrize("size", [3, 6, 7, 92, 30])
def test_a_size_without_a_matrix_is_refused_with_what_to_do(size: int) -> None:
    with pytest.raises(NumericsError, match=rf"size {size} .*random-matrix"):
        make_rotation("hadamard", size)
    assert make_rotation("random-matrix", size).size == size
