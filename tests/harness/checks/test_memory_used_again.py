"""Whoever keeps its last result by the address, the shape, the version or the identity of what it was given is told, method by method."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness
from compressor.numerics import QuantizationArgs, QuantizationScheme
from harness.checks.adapters.ours import OurFp4Packer, OurLayer, OurObserver, OurPacker, OurQuantizer, OurSolver
from harness.checks.protocols import Pruner, Quantized

INT4 = QuantizationArgs(num_bits=4, group_size=16)
ASYM = QuantizationArgs(num_bits=4, group_size=16, symmetric=False, actorder="group")


def _key(value: Any) -> Hashable:
    """What a hasty cache asks of its arguments."""
    if isinstance(value, Tensor):
        return value.data_ptr(), tuple(value.shape), value.stride(), value.dtype, value._version
    if isinstance(value, Quantized):
        return _key(value.codes), _key(value.scale)
    if isinstance(value, nn.Linear):
        return id(value), _key(value.weight)
    return tuple(map(_key, value)) if isinstance(value, list | tuple) else value


def remembering(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the last result, and copies of it are given for what looks the same; with the arguments alive, so that no address is free."""
    kept: list[Any] = [None, None, None]

    @wraps(method)
    def remembers(*args: Any, **kwargs: Any) -> Any:
        if kept[0] != (key := _key([*args, *kwargs.values()])):
            kept[:] = key, method(*args, **kwargs), (args, kwargs)
        return kept[1].clone() if isinstance(kept[1], Tensor) else kept[1]

    return remembers


def _half(weight: Tensor, hessian: Tensor) -> Tensor:
    return weight.scatter(1, weight.abs().argsort(dim=1, stable=True)[:, : weight.shape[1] // 2], 0.0)


MAKE: dict[str, Callable[[], Any]] = {
    "quantizer": lambda: OurQuantizer(INT4),
    "asymmetric quantizer": lambda: OurQuantizer(ASYM.model_copy(update={"actorder": None})),
    "packer": lambda: OurPacker(3),
    "packer of rows": lambda: OurPacker(4, 0),
    "fp4 packer": OurFp4Packer,
    "observer": lambda: OurObserver(QuantizationArgs(strategy="tensor")),
    "solver": lambda: OurSolver(INT4),
    "solver with act-order": lambda: OurSolver(ASYM),
    "layer": lambda: OurLayer(QuantizationScheme(targets=["Linear"], weights=INT4)),
    "pruner": lambda: Pruner(_half),
}
CASES = [
    *(
        (name, method, "quantizer.shapes")
        for name in ("quantizer", "asymmetric quantizer")
        for method in ("quantize", "encode", "dequantize")
    ),
    *((name, method, "packer.dense") for name in ("packer", "packer of rows", "fp4 packer") for method in ("pack", "unpack")),
    *((name, method, "solver.layouts") for name in ("solver", "solver with act-order") for method in ("hessian", "solve", "order")),
    ("observer", "observe", "observer.batch_order"),
    ("layer", "build", "layer.weight_as_calibrated"),
    ("pruner", "prune", "sparsifier.beats_random"),
]


@pytest.mark.parametrize(("name", "method", "check"), CASES)
def test_a_result_that_is_kept_is_told(name: str, method: str, check: str) -> None:
    subject = MAKE[name]()
    object.__setattr__(subject, method, remembering(getattr(subject, method)))
    record = harness.check(subject, checks=[check], draws=False).records[0]
    assert record.outcome == "fail" and ("in memory that has held other values" in record.summary or "built again" in record.summary), (
        record
    )


@pytest.mark.parametrize("name", MAKE)
def test_whoever_keeps_nothing_passes(name: str) -> None:
    checks = sorted({check for other, _, check in CASES if other == name})
    assert harness.check(MAKE[name](), checks=checks, draws=False).passed


def test_a_solver_that_keeps_what_it_made_of_a_hessian_is_told() -> None:
    """The weights decide nothing of it, so that only a Hessian which changes by itself shows it."""
    subject = OurSolver(INT4)
    solve = subject.solve
    chosen = remembering(lambda hessian: hessian.clone())
    subject.solve = lambda weights, hessian, *rest: solve(weights, chosen(hessian), *rest)  # type: ignore[method-assign]
    record = harness.check(subject, checks=["solver.layouts"], draws=False).records[0]
    assert record.outcome == "fail" and "solve: in memory" in record.summary, record.summary
    assert torch.equal(chosen(torch.eye(3)), torch.eye(3))
