"""Settings of float32's precision are read and put back however they were made; runs go on where torch's older way of asking raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch

from compressor.numerics.precision import float32_precisions, matmul_precision, set_float32_precisions


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = float32_precisions()
    yield
    set_float32_precisions(before)


def _set_cuda() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def _set_mkldnn() -> None:
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


def _set_all() -> None:
    torch.backends.fp32_precision = "tf32"


@pytest.mark.parametrize("change", [_set_cuda, _set_mkldnn, _set_all, lambda: torch.set_float32_matmul_precision("medium")])
def test_what_somebody_set_is_seen_and_put_back(change: object) -> None:
    before = float32_precisions()
    change()  # type: ignore[operator]
    assert float32_precisions() != before
    set_float32_precisions(before)
    assert float32_precisions() == before
    assert torch.get_float32_matmul_precision() == "highest"  # raises where the two ways of asking disagree


def test_what_is_put_back_the_older_way_is_as_it_was() -> None:
    before = float32_precisions()
    torch.set_float32_matmul_precision("medium")
    torch.set_float32_matmul_precision("highest")
    assert float32_precisions() == before


WRITES: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "cuDNN": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "cuBLAS": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "CUDA by the newer name": _set_cuda,
    "the CPU by the newer name": _set_mkldnn,
    "all by the newer name": _set_all,
}


def _older() -> dict[str, object]:
    """The older settings, as far as torch tells them: it refuses one that does not agree with the newer ones."""
    told: dict[str, object] = {}
    with suppress(RuntimeError):
        told["cuDNN"] = torch.backends.cudnn.allow_tf32
    with suppress(RuntimeError):
        told["cuBLAS"] = torch.backends.cuda.matmul.allow_tf32
    with suppress(RuntimeError):
        told["products"] = torch.get_float32_matmul_precision()
    return told


@pytest.mark.parametrize("before", WRITES)
def test_older_settings_can_be_read_as_before(before: str) -> None:
    WRITES[before]()
    places, older = float32_precisions(), _older()
    for change in WRITES.values():
        change()
        set_float32_precisions(places)
        assert float32_precisions() == places
        assert older.items() <= _older().items()


def test_one_backend_alone_has_a_name() -> None:
    assert matmul_precision(torch.device("cpu")) == "highest"
    _set_mkldnn()
    assert (matmul_precision(torch.device("cpu")), matmul_precision(torch.device("cuda"))) == ("medium", "highest")
