"""How much memory tensors take, counted by the operators that make them; and a hub on the loopback address."""

from __future__ import annotations

import importlib.util
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Allocations(TorchDispatchMode):
    """Counts the bytes of storages that operators made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self.alive:
                    self.alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


@pytest.fixture(scope="session")
def int8_path() -> str:
    """The product of int8 codes that this CPU may use: torch's own where it sums exactly, which takes VNNI instructions."""
    x, weight = torch.full((33, 64), 127, dtype=torch.int8), torch.full((64, 33), 127, dtype=torch.int8)
    return "int_mm" if torch.equal(torch._int_mm(x, weight).long(), x.long() @ weight.long()) else "int_exact"


@pytest.fixture(scope="session")
def peak_bytes() -> Callable[[Callable[[], object]], int]:
    """Run a function and return the largest number of bytes that tensors made in it held at one time."""

    def measure(run: Callable[[], object]) -> int:
        with torch.no_grad(), _Allocations() as allocations:
            run()
        return allocations.peak

    return measure


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty hub (`loopback_hub.Hub`), which the clients of this process ask, without a token and with a cache of its own."""
    import datasets
    from huggingface_hub import constants

    spec = importlib.util.spec_from_file_location("loopback_hub", Path(__file__).with_name("loopback_hub.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    home = tmp_path / "hf_home"
    with module.serve() as served:
        # What the clients read of the environment when they are imported.
        for name, value in {
            "ENDPOINT": served.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": f"{served.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
            "AGENT_HARNESSES_PATH": str(home / "agents.json"),
        }.items():
            monkeypatch.setattr(constants, name, value, raising=False)  # not every version has each of them
        for name, value in {
            "HF_ENDPOINT": served.url,
            "HUB_DATASETS_URL": f"{served.url}/datasets/{{repo_id}}/resolve/{{revision}}/{{path}}",
            "HF_HUB_OFFLINE": False,
            "HF_DATASETS_CACHE": home / "datasets",
            "HF_MODULES_CACHE": str(home / "modules"),
        }.items():
            monkeypatch.setattr(datasets.config, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield served
