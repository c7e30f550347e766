"""Orthogonal matrices by which hidden states are turned, so that no channel stands out: Hadamard matrices of the sizes that models have.

A Hadamard matrix of order n is a Kronecker product of two smaller ones, each multiplied along its own axis: n sqrt(n) in place of n^2.
Orders that are no power of two are built from quadratic residues (Paley, "On orthogonal matrices", 1933), 12 for 768, 172 no less than 20.

Shapes: N rows, D channels, B channels of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from compressor.errors import NumericsError

RotationKind = Literal["hadamard", "random-hadamard", "random-matrix"]
KINDS: tuple[str, ...] = get_args(RotationKind)


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix Q [B, B], applied to runs of B channels.

    Attributes:
        factors: one or two float64 matrices, whose Kronecker product is U sqrt(norm), U [B, B] orthogonal. Those of a Hadamard matrix hold
            +1 and -1, so that sums of few bits are exact, and so are halves between two of them.
        norm: B of a Hadamard matrix, else 1.
        signs_B: of +1 and -1, or None. Q = diag(signs) U, or, where it is mirrored, U diag(signs) U^T.
        is_mirrored: see signs_B. With a first column of U that is constant and a first sign of +1, Q keeps the mean of a row.
    """

    factors: tuple[Tensor, ...]
    norm: int = 1
    signs_B: Tensor | None = None
    is_mirrored: bool = False

    @property
    def size(self) -> int:
        """B."""
        return math.prod(len(factor) for factor in self.factors)

    def turn(self, x_ND: Tensor, *, back: bool = False) -> Tensor:
        """Multiply rows by Q, run of B by run.

        Args:
            x_ND: [..., D], D a multiple of B.
            back: multiply by Q^T.

        Returns:
            [..., D] in the dtype of `x_ND`.
        """
        x_NB = x_ND.reshape(-1, self.size)
        signs_B = None if self.signs_B is None else self.signs_B.to(x_ND)
        if self.is_mirrored:
            x_NB = self._by_factors(x_NB, transposed=False)
            return self._by_factors(x_NB if signs_B is None else x_NB * signs_B, transposed=True).reshape(x_ND.shape)
        if not back and signs_B is not None:
            x_NB = x_NB * signs_B
        x_NB = self._by_factors(x_NB, transposed=back)
        if back and signs_B is not None:
            x_NB = x_NB * signs_B
        return x_NB.reshape(x_ND.shape)

    def to(self, device: torch.device, dtype: torch.dtype) -> Rotation:
        """Return the same rotation with its factors elsewhere, or in another dtype; bits of products depend on how they lie."""
        *outer, last_FF = self.factors
        factors = (*outer, last_FF / math.sqrt(self.norm))  # saves a walk over all rows
        signs_B = None if self.signs_B is None else self.signs_B.to(device, dtype)
        return replace(self, factors=tuple(factor.to(device, dtype).contiguous() for factor in factors), norm=1, signs_B=signs_B)

    def matrix(self) -> Tensor:
        """Return Q [B, B] in float64."""
        return self.turn(torch.eye(self.size, dtype=torch.float64))

    def _by_factors(self, x_NB: Tensor, *, transposed: bool) -> Tensor:
        *outer, last_FF = ((factor.T if transposed else factor).to(x_NB) for factor in self.factors)
        x_NB = (x_NB.reshape(-1, len(last_FF)) @ last_FF).reshape(-1, self.size)
        for outer_FF in outer:  # along the rows of [F, B / F], which then need not be copied into columns
            x_NB = (outer_FF.T @ x_NB.reshape(-1, len(outer_FF), len(last_FF))).reshape(-1, self.size)
        return x_NB if self.norm == 1 else x_NB / math.sqrt(self.norm)


def make_rotation(kind: str, size: int, *, seed: int = 0, keeps_mean: bool = False) -> Rotation:
    """Make a rotation.

    Args:
        kind: `hadamard`; `random-hadamard`, one with random signs; `random-matrix`, an orthogonal matrix drawn uniformly.
        size: B, at least 1.
        seed: of what is random.
        keeps_mean: a row keeps its mean, and a row of equal numbers stays one, as LayerNorm needs it. A Hadamard matrix gets random signs.

    Returns:
        The rotation.

    Raises:
        NumericsError: no Hadamard matrix of this size can be built.
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "random-matrix":
        return Rotation((_random_orthogonal(size, generator, keeps_mean=keeps_mean),))
    factors = _hadamard_factors(size)
    signs_B = None
    if kind == "random-hadamard" or keeps_mean:
        signs_B = torch.randint(2, (size,), generator=generator).double() * 2 - 1
        if keeps_mean:
            signs_B[0] = 1.0
    return Rotation(tuple(factors), size, signs_B, is_mirrored=keeps_mean)


def rotation_of(matrix_BB: Tensor) -> Rotation:
    """Find the factors of a Hadamard matrix, with which it is multiplied in B log B steps.

    Args:
        matrix_BB: float, of +1 and -1; Q sqrt(B).

    Returns:
        Q, by its factors where it is what `make_rotation` makes, with or without random signs; else by the matrix.
    """
    matrix_BB = matrix_BB.double().cpu()
    size = len(matrix_BB)
    if has_hadamard(size):
        plain, signs_B = Rotation(tuple(_hadamard_factors(size)), size), matrix_BB[:, 0]
        if torch.equal(signs_B[:, None] * _kronecker(plain.factors), matrix_BB):
            return plain if bool((signs_B == 1).all()) else replace(plain, signs_B=signs_B)
    return Rotation((matrix_BB,), size)


def rotation_flops(kind: str, size: int) -> float:
    """Return the arithmetic of turning one row, without making the matrix of random numbers.

    Args:
        kind: as for `make_rotation`.
        size: B.

    Returns:
        FLOPs: products with all factors, signs, and the division by the root of the size.

    Raises:
        NumericsError: no Hadamard matrix of this size can be built.
    """
    if kind == "random-matrix":
        return 2.0 * size * size
    return size * (2.0 * sum(map(len, _hadamard_factors(size))) + (1 if kind == "hadamard" else 2))


def has_hadamard(size: int) -> bool:
    """Tell whether a Hadamard matrix of this size can be built."""
    return _core_order(size) is not None


def _hadamard_factors(size: int) -> list[Tensor]:
    """Factors of a Hadamard matrix, of +1 and -1, each with a first column of +1."""
    order = _core_order(size)
    if order is None:
        raise NumericsError(
            f"no Hadamard matrix of size {size} can be built from primes (orders are 1, 2 and multiples of 4); make a random-matrix"
        )
    doublings = (size // order).bit_length() - 1
    outer = min(range(doublings + 1), key=lambda step: 2**step + (size >> step))  # equal sizes cost least
    last = _kronecker([_sylvester(doublings - outer), _core(order)])
    return [_sylvester(outer), last] if outer else [last]


def _core_order(size: int) -> int | None:
    """The smallest order m, size = m 2^k, of which there is a matrix."""
    if size < 1:
        return None
    order = size >> ((size & -size).bit_length() - 1)
    while order <= size:
        if order == 1 or (order % 4 == 0 and (_is_prime(order - 1) or (order % 8 == 4 and _is_prime(order // 2 - 1)))):
            return order
        order *= 2
    return None


def _is_prime(number: int) -> bool:
    return number > 2 and all(number % divisor for divisor in (2, *range(3, math.isqrt(number) + 1, 2)))


def _sylvester(doublings: int) -> Tensor:
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    return _kronecker([torch.ones(1, 1, dtype=torch.float64)] + [two] * doublings)


def _kronecker(matrices: Sequence[Tensor]) -> Tensor:
    product = matrices[0]
    for matrix in matrices[1:]:
        product = torch.kron(product, matrix)
    return product


def _core(order: int) -> Tensor:
    """A matrix of Paley's: of order q + 1 for a prime q = 3 mod 4, of order 2 (q + 1) for q = 1 mod 4."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    is_first = _is_prime(order - 1)
    q = order - 1 if is_first else order // 2 - 1
    squares = torch.zeros(q, dtype=torch.float64) - 1
    squares[(torch.arange(1, q) ** 2) % q] = 1.0
    squares[0] = 0.0
    jacobsthal = squares[(torch.arange(q)[:, None] - torch.arange(q)) % q]
    bordered = torch.ones(q + 1, q + 1, dtype=torch.float64)
    bordered[0, 0] = 0.0
    bordered[1:, 1:] = jacobsthal
    if is_first:
        bordered[1:, 0] = -1.0  # skew
        signs = bordered + torch.eye(q + 1, dtype=torch.float64)
    else:
        signs = torch.kron(bordered, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
        signs += torch.kron(torch.eye(q + 1, dtype=torch.float64), torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64))
    return signs * signs[:, :1]


def _random_orthogonal(size: int, generator: torch.Generator, *, keeps_mean: bool) -> Tensor:
    """Uniform, by the QR decomposition of normal numbers with a positive diagonal of R (Mezzadri, math-ph/0609050)."""
    free = size - 1 if keeps_mean else size
    q, r = torch.linalg.qr(torch.randn(free, free, generator=generator, dtype=torch.float64))
    q = q * r.diagonal().sign()
    if not keeps_mean:
        return q
    whole = torch.eye(size, dtype=torch.float64)
    whole[1:, 1:] = q
    mirror = torch.full((size,), 1.0 / math.sqrt(size), dtype=torch.float64)
    mirror[0] -= 1.0  # reflects the first axis into the row of equal numbers
    if size > 1:
        mirror /= mirror.norm()
    reflection = torch.eye(size, dtype=torch.float64) - 2 * torch.outer(mirror, mirror)
    return reflection @ whole @ reflection
