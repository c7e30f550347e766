"""Graphs small enough to be optimized hundreds of times, and the third party's code."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import onnx
import pytest

from harness.onnx_graph.roundtrip import pass_list_check


@pytest.fixture(scope="module", autouse=True)
def heap_in_sight() -> Iterator[None]:
    """Forced skips ask the garbage collector who holds a native function; what is frozen it does not show."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture
def attention_graph() -> onnx.ModelProto:
    """Four [32, 32] projections, three of which fuse."""
    return pass_list_check.attention_graph()


@pytest.fixture(scope="session")
def third_party() -> Iterator[ModuleType]:
    """Code that is not ours and that took hold of the native functions long before."""
    place = str(Path(__file__).parent)
    sys.path.insert(0, place)
    yield importlib.import_module("third_party.deploy")
    sys.path.remove(place)
