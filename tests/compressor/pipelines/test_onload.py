"""Weights come to the device stretch by stretch: on a device that is made of main memory, and refuses tensors of the other side"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from compressor import oneshot
from compressor.errors import TargetError, TracingError
from compressor.pages import let_go
from compressor.pipelines.offload import onload
from compressor.pipelines.offload.onload import OnloadedWeights

LAYERS = 3
GPTQ = {"quant_modifiers": {"GPTQModifier": {"scheme": "W4A16", "ignore": ["lm_head"]}}}
SMOOTHED = {"quant_modifiers": {"SmoothQuantModifier": {}, "GPTQModifier": {"scheme": "W8A8", "ignore": ["lm_head"]}}}
MODES = {
    "one pass, the uncompressed model beside": (GPTQ, {}),
    "two passes": (GPTQ, {"passes": "two"}),
    "paused forwards": (GPTQ, {"engine": "suspend"}),
    "scales that move between layers": (SMOOTHED, {}),
}


class Sides(TorchDispatchMode):
    """Two sides of one memory: an operation on tensors of both is refused, as torch refuses it for two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.here: dict[int, Tensor] = {}  # by address: weights on the device
        self.there: dict[int, Tensor] = {}  # and those that wait
        self.peak = 0

    def side_of(self, tensor: Tensor) -> str | None:
        address = tensor.untyped_storage().data_ptr()
        if address in self.here:
            return "device"
        return "host" if address in self.there else getattr(tensor, "side", None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        sides = {side for leaf in given if (side := self.side_of(leaf)) is not None}
        if len(sides) > 1 and func._overloadpacket is not torch.ops.aten.copy_:
            raise AssertionError(f"{func}: tensors of both sides")
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made) if sides else ():
            if isinstance(leaf, Tensor):
                leaf.side = next(iter(sides))  # type: ignore[attr-defined]
        return made


class Simulated(OnloadedWeights):
    """Weights of a device that counts."""

    sides: Sides

    def __enter__(self) -> Any:
        type(self).sides = Sides()
        self.sides.there = {one.untyped_storage().data_ptr(): one.detach() for one in (*self._model.parameters(), *self._model.buffers())}
        super().__enter__()
        self.sides.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.sides.__exit__(None, None, None)
        super().__exit__(*exc_info)

    def _install(self, target: str | None, coming: Any) -> None:
        self.sides.here |= {made.untyped_storage().data_ptr(): made for made in coming.copies.result().tensors}
        super()._install(target, coming)
        self.sides.peak = max(self.sides.peak, len(self._lent) - 1)

    def _return(self, target: str | None) -> None:
        gone = {lent.own.untyped_storage().data_ptr() for lent in self._lent.get(target, ())}
        super()._return(target)
        for address in gone:
            self.sides.here.pop(address, None)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[Simulated]:
    """A device to which weights must be copied."""
    monkeypatch.setattr(onload, "needs_copies", lambda model, device: True)
    monkeypatch.setattr(onload, "OnloadedWeights", Simulated)
    return Simulated


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    size = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    made = tmp_path_factory.mktemp("model") / "llama"
    LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=LAYERS, tie_word_embeddings=True)).save_pretrained(made)
    return made


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run(folder: Path, output: Path | None, mode: str, **settings: Any) -> Any:
    recipe, chosen = MODES[mode]
    data = torch.randint(96, (4, 12), generator=torch.Generator().manual_seed(1))
    return oneshot(folder, recipe=recipe, dataset=data, output_dir=output, batch_size=2, **{**chosen, **settings})


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, bytes]]:
    """The files of a run without such a device, made once for each mode."""

    @functools.cache
    def made(mode: str) -> dict[str, bytes]:
        output = tmp_path_factory.mktemp("plain") / "out"
        run(folder, output, mode)
        return files(output)

    return made


@pytest.mark.parametrize("mode", MODES)
def test_every_stage_computes_on_the_device_and_gives_the_same_bytes(
    mode: str, plain: Callable[[str], dict[str, bytes]], folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    expected = plain(mode)
    device = request.getfixturevalue("device")  # after the plain run
    result = run(folder, tmp_path / "out", mode)
    assert files(tmp_path / "out") == expected
    assert device.sides.peak <= 2  # a layer, and the one whose norm the propagation reaches
    assert not device.sides.here
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in result.model.modules())


@torch.no_grad()
def test_what_is_written_to_weights_on_the_device_is_kept_where_they_wait() -> None:
    torch.manual_seed(2)
    model = nn.ModuleDict({"first": nn.BatchNorm1d(3), "second": nn.Linear(5, 3), "outside": nn.Linear(3, 2)})
    model["second"].weight.data = torch.randn(5, 3).t()  # a view, as some models keep them
    waiting = {name: (one, one.detach(), 2 * one) for name, one in model.state_dict(keep_vars=True).items()}
    with OnloadedWeights(model, ("first", "second"), torch.device("cpu")) as weights:
        for target in ("first", "second", "outside"):
            weights.hold([target])
            for one in (*model[target].parameters(), *model[target].buffers()):
                assert all(one.data_ptr() != host.data_ptr() for own, host, _ in waiting.values() if own is one)
                one.mul_(2)
    for name, (own, host, doubled) in waiting.items():
        assert torch.equal(own, doubled) and own.data_ptr() == host.data_ptr(), name


@pytest.mark.nightly
def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(
    plain: Callable[[str], dict[str, bytes]], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    mode = "two passes"
    expected = plain(mode)
    device = request.getfixturevalue("device")
    hold = device.hold

    def killed(self: Simulated, modules: Any) -> None:
        if any(name.endswith("layers.2") for name in modules):
            raise KeyboardInterrupt
        hold(self, modules)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(device, "hold", killed)
        run(folder, tmp_path / "out", mode)
    assert "resumed after stage 2 of 3" in run(folder, tmp_path / "out", mode, resume=True).resumed
    assert files(tmp_path / "out") == expected


@pytest.mark.parametrize(
    ("free", "device", "obstacle", "asked", "waits"),
    [
        (1, "cpu", None, "cpu", False),
        (1, "cuda", None, None, True),
        (1, "cuda", None, "none", False),
        (1 << 40, "cuda", None, None, False),
        (1 << 40, "cuda", None, "cpu", True),
        (1, "cuda", "why not", None, False),
    ],
)
def test_weights_wait_where_they_would_fill_the_device_or_were_told_to(
    free: int, device: str, obstacle: str | None, asked: str | None, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onload, "free_bytes", lambda device: free)
    assert onload.weights_wait(nn.Linear(4, 4), torch.device(device), obstacle, asked) is waits


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ({"quant_modifiers": {"QuantizationModifier": {"scheme": "FP8"}}}, "the basic pipeline has no layers that take turns"),
        ({"quant_modifiers": {"GPTQModifier": {"scheme": "W4A16", "mode": "best"}}}, "ScaleTuningModifier.* trains through all layers"),
    ],
)
def test_layers_that_have_no_turns_cannot_wait_for_them(recipe: Any, why: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compressor.entrypoints.oneshot.resolve_device", torch.device)  # as on a machine with a GPU
    with pytest.raises(TargetError, match=f"sequential_offload_device: 'cpu' was given, but {why}"):
        oneshot(folder, recipe=recipe, dataset=torch.ones(2, 4, dtype=torch.long), device="cuda", sequential_offload_device="cpu")


def test_a_stage_that_is_left_in_main_memory_fails(folder: Path, device: type[Simulated], monkeypatch: pytest.MonkeyPatch) -> None:
    bring = device._bring
    monkeypatch.setattr(device, "_bring", lambda self, target: None if target.endswith(".1") else bring(self, target))
    with pytest.raises(TracingError, match="tensors of both sides"):
        run(folder, None, "two passes", verify="off")


def test_pages_of_a_file_go_and_what_was_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.ones(1 << 20, dtype=torch.float32)}, path)
    with safe_open(path, framework="pt") as file:
        mapped = file.get_tensor("a")
    mapped[:4096] = 2
    assert mapped.sum() == (1 << 20) + 4096
    resident = file_pages()
    let_go([mapped])
    assert file_pages() < resident - (3 << 20)
    assert mapped.sum() == (1 << 20) + 4096


def file_pages() -> int:
    """Bytes of files in the memory of this process."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return 1024 * int(lines["RssFile"].split()[0])
