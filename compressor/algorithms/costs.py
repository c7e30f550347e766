"""What the algorithms cost, from shapes alone: bytes of statistics, bytes of working memory at the worst moment, and arithmetic.

Each formula names the arrays that are alive together; tests hold them against what the allocator sees.

Shapes: R rows (out features) of all weights that are solved as one stack, C columns, S columns of one group, B columns of one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from compressor.algorithms.babai import NUM_CANDIDATES, TURNED, can_search, rounding_kernel
from compressor.algorithms.gptq import Solver
from compressor.algorithms.hessian import ERROR_ROWS, EXACT_ROWS, panel_bytes
from compressor.numerics.part_sums import most_sums
from compressor.numerics.scheme import QuantizationArgs

FLOAT32_BYTES = 4


class Cost(NamedTuple):
    """The cost of one stack of weights.

    Attributes:
        statistics_bytes: sums over the calibration samples, at the end of the calibration.
        settled_bytes: of the finished statistics, while they wait for the solver and in it.
        working_bytes: beyond these and weights, while it is solved.
        flops: in matrix products and factorizations.
        num_columns: columns that are rounded one after the other, where the speed of matrix products says nothing.
        num_roundings: elements in all of these columns.
    """

    statistics_bytes: int
    settled_bytes: int
    working_bytes: int
    flops: float
    num_columns: int
    num_roundings: int


class Work(NamedTuple):
    """What forwards and trainings of a modifier's own work on: the whole model, or one block of it.

    Attributes:
        num_samples: sequences.
        num_tokens: of each.
        weights: rows, columns and bytes of an element of each weight that the recipe changes, in stacks that read one input.
        stored_bytes: of all weights, changed or not.
        given_bytes: what a forward is handed for one sequence.
        stream_bytes: of one sequence the hidden states: those that a block is handed, those before the head of a model; without a head what
            the model gives.
        forward_bytes: what a forward takes for one sequence.
        saved_bytes: what it keeps for a backward.
        vocabulary: rows of the output head; 0 where there is none.
    """

    num_samples: int
    num_tokens: int
    weights: Sequence[Sequence[tuple[int, int, int]]]
    stored_bytes: int
    given_bytes: float
    stream_bytes: float
    forward_bytes: float
    saved_bytes: float
    vocabulary: int = 0

    @property
    def sizes(self) -> list[int]:
        """Elements of each weight; at least one."""
        return [rows * columns for stack in self.weights for rows, columns, _ in stack] or [0]

    @property
    def changed_bytes(self) -> int:
        """Of all weights that change."""
        return sum(rows * columns * element for stack in self.weights for rows, columns, element in stack)


class Memory(NamedTuple):
    """What such work takes.

    Attributes:
        kept_bytes: in main memory from its beginning to its end; what a modifier behind the stages needs lies beside these, too.
        statistics_bytes: sums over the samples, while forwards run.
        working_bytes: beyond weights and these, at the worst moment that is no plain forward.
        doing: that moment.
    """

    kept_bytes: float = 0
    statistics_bytes: float = 0
    working_bytes: float = 0
    doing: Literal["compress", "train"] = "compress"


def together(costs: Sequence[Cost]) -> Cost:
    """Return the cost of algorithms that work on the same weights, one after the other, each with statistics of its own.

    Args:
        costs: of each; at least one.

    Returns:
        The cost: statistics lie beside each other, working memory does not.
    """
    sums = Cost(*map(sum, zip(*costs, strict=True)))
    return sums._replace(working_bytes=max(cost.working_bytes for cost in costs))


def rounding_cost(rows: Sequence[int], columns: int, element_bytes: int) -> Cost:
    """Return the cost of round-to-nearest, one weight after the other.

    Args:
        rows: out features of each weight.
        columns: in features of all of them.
        element_bytes: of one weight element.

    Returns:
        The cost: a float32 copy, quotient, values and codes of the largest weight.
    """
    copies = 2 * FLOAT32_BYTES + 1 + (FLOAT32_BYTES if element_bytes < FLOAT32_BYTES else 0)
    return Cost(0, 0, copies * max(rows) * columns, 0.0, 0, sum(rows) * columns)


def gptq_cost(
    rows: Sequence[int],
    columns: int,
    element_bytes: int,
    args: QuantizationArgs,
    *,
    num_tokens: int,
    block_size: int,
    solver: Solver,
    scale_search: bool,
    has_base_stream: bool = False,
) -> Cost:
    """Return the cost of GPTQ on weights that read one input.

    Args:
        rows: out features of each weight.
        columns: in features of all of them.
        element_bytes: of one weight element.
        args: number format of the weights.
        num_tokens: calibration tokens.
        block_size: as of `quantize_gptq`.
        solver: as of `quantize_gptq`.
        scale_search: as of `quantize_gptq`.
        has_base_stream: inputs are compared with those in the uncompressed model, and weights are shifted.

    Returns:
        The cost.
    """
    num_rows, square = sum(rows), FLOAT32_BYTES * columns * columns
    searched = scale_search and can_search(args)
    group = args.group_size if searched and args.group_size else columns
    stacked = element_bytes * num_rows * columns if len(rows) > 1 else 0
    work = FLOAT32_BYTES * num_rows * columns
    block = 2 * FLOAT32_BYTES * block_size * num_rows + FLOAT32_BYTES * block_size**2
    codes = num_rows * columns
    # The damped Hessian, whose factor takes its place, and in the classical form the inverse; beside them codes and one block.
    solving = stacked + work + (1 if solver == "r_form" else 2) * square + codes + block
    # The factor; of one group its columns, its part of the factor and a copy of that; and, where they are not compiled, three float32
    # arrays and one of codes that hold every candidate.
    held = FLOAT32_BYTES + (NUM_CANDIDATES * (3 * FLOAT32_BYTES + 1) if rounding_kernel("cpu") is None else 0)
    searching = stacked + work + square + group * num_rows * held + 2 * FLOAT32_BYTES * group**2 if searched else 0
    # The factor; the weights in float32, and as often again on the way to the shifted ones.
    shifting = stacked + square + (3 + (element_bytes < FLOAT32_BYTES)) * work if has_base_stream else 0
    turning = stacked + work + square + 2 * FLOAT32_BYTES * min(TURNED["cpu"], columns**2 // 2) if solver == "r_form" else 0  # in place
    solving, searching = (part + (work if has_base_stream and part else 0) for part in (solving, searching))
    factoring = columns**3 * (1 / 3 if solver == "r_form" else 5 / 3)
    sweeps = num_rows * columns * (columns + (NUM_CANDIDATES * group if searched else 0)) + _measuring_flops(rows, columns)
    return Cost(
        statistics_bytes=most_sums(num_tokens) * (panel_bytes(columns) + (square if has_base_stream else 0)),
        settled_bytes=2 * square if has_base_stream else square,
        working_bytes=max(panel_bytes(columns), turning, solving, searching, shifting),  # at first the panels of which the Hessian is made
        flops=float(num_tokens) * columns * columns * (3 if has_base_stream else 1)
        + factoring
        + sweeps
        + (6.0 * num_rows * columns * columns if has_base_stream else 0.0),
        num_columns=columns * (2 if searched else 1),
        num_roundings=num_rows * columns * (1 + (NUM_CANDIDATES if searched else 0)),
    )


def sparsegpt_cost(
    rows: Sequence[int],
    columns: int,
    element_bytes: int,
    *,
    num_tokens: int,
    block_size: int,
    refining_steps: int,
    has_base_stream: bool = False,
) -> Cost:
    """Return the cost of SparseGPT on weights that read one input.

    Args:
        rows: out features of each weight.
        columns: in features of all of them.
        element_bytes: of one weight element.
        num_tokens: calibration tokens.
        block_size: as of `prune_sparsegpt`.
        refining_steps: as of `prune_sparsegpt`.
        has_base_stream: inputs are compared with those in the uncompressed model, and weights are shifted.

    Returns:
        The cost.
    """
    num_rows, square = sum(rows), FLOAT32_BYTES * columns * columns
    largest = max(rows) * columns
    done = element_bytes * (num_rows * columns - largest)  # weights of the stack that are pruned already
    # The factor beside the weight, its errors and its zeros; of one block what it is moved by, what it becomes, what that costs, and the
    # count among equals in 8 bytes. Then beside the factor the damped Hessian, another of unit diagonal, and of the weight what is left,
    # four arrays of the search for the best that it can be, and one product. Then the pruned weight, and three
    # arrays of some rows to measure its error.
    copies = 2 + (element_bytes < FLOAT32_BYTES)
    choosing = (4 * FLOAT32_BYTES + 8 + 2) * min(block_size, columns) * max(rows)
    sweeping = square + (copies * FLOAT32_BYTES + 1) * largest + choosing
    refining = 3 * square + (8 * FLOAT32_BYTES + 1) * largest if refining_steps else 0
    measuring = square + (copies * FLOAT32_BYTES + element_bytes + 1) * largest + 3 * FLOAT32_BYTES * min(ERROR_ROWS, max(rows)) * columns
    products = 2.0 * (refining_steps + 1 if refining_steps else 0) + 1.0 + (6.0 if has_base_stream else 0.0)
    return Cost(
        statistics_bytes=most_sums(num_tokens) * (panel_bytes(columns) + (square if has_base_stream else 0)),
        settled_bytes=2 * square if has_base_stream else square,
        working_bytes=done + max(sweeping, refining, measuring),
        flops=float(num_tokens) * columns * columns * (3 if has_base_stream else 1)
        + columns**3 / 3
        + products * num_rows * columns**2
        + _measuring_flops(rows, columns),
        num_columns=columns,
        num_roundings=num_rows * columns,
    )


def _measuring_flops(rows: Sequence[int], columns: int) -> float:
    """Of the relative error of each weight."""
    return sum(2.0 * min(num, EXACT_ROWS) * columns**2 for num in rows)
