"""Contracts of lifecycles call the garbage collector, which need not walk over thirteen thousand tests each time."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def tests_left_out_of_collections() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()
