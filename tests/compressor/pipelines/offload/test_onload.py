"""Weights come to the device stretch by stretch: on a device that is made of main memory, and refuses tensors of the other side"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaForCausalLM

from compressor import Modifier, QuantizationModifier, oneshot
from compressor.errors import FinalizeError, OutOfMemoryError, TargetError, TracingError
from compressor.lifecycle import Event, State
from compressor.mappings import probe
from compressor.pages import let_go
from compressor.pipelines.forward_checks import weights_held_to
from compressor.pipelines.offload import onload
from compressor.pipelines.offload.onload import OnloadedWeights
from tests import tiny
from tests.compressor.pipelines.offload.simulated_device import Simulated

LAYERS = 3
GPTQ = {"quant_modifiers": {"GPTQModifier": {"scheme": "W4A16", "ignore": ["lm_head"]}}}
SMOOTHED = {"quant_modifiers": {"SmoothQuantModifier": {}, "GPTQModifier": {"scheme": "W8A8", "ignore": ["lm_head"]}}}
MODES = {
    "one pass, the uncompressed model beside": (GPTQ, {}),
    "two passes": (GPTQ, {"passes": "two"}),
    "paused forwards": (GPTQ, {"engine": "suspend"}),
    "scales that move between layers": (SMOOTHED, {}),
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[Simulated]:
    """A device to which weights must be copied."""
    monkeypatch.setattr(onload, "needs_copies", lambda model, device: True)
    monkeypatch.setattr(probe, "read_past", lambda model, names, run: [])  # moves weights by .to(), which tells no sides of one memory
    monkeypatch.setattr(onload, "OnloadedWeights", made := type("Simulated", (Simulated,), {}))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("model") / "llama"
    tiny.llama(vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS, tie_word_embeddings=True).save_pretrained(
        made
    )
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
    assert device.last.most_at_hand <= 2  # a layer, and the one whose norm the propagation reaches
    assert not device.last.sides.here
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in result.model.modules())


def of_a_layer(folder: Path) -> tuple[int, int]:
    """Bytes of a layer, and of what lies in none."""
    model = LlamaForCausalLM.from_pretrained(folder)
    layer = sum(one.nbytes for one in model.model.layers[0].parameters())
    return layer, sum(one.nbytes for one in (*model.parameters(), *model.buffers())) - LAYERS * layer


def test_each_layer_is_copied_ahead_of_its_use_and_once(folder: Path, device: type[Simulated]) -> None:
    run(folder, None, "one pass, the uncompressed model beside", verify="off")
    events = device.last.events
    layer, outside = of_a_layer(folder)
    for kind in ("asked", "used"):  # in rounds of the trace and of the run, and nothing that nobody uses
        named = [target for what, target in events if what == kind]
        assert named == [None, *(f"model.layers.{index % LAYERS}" for index in range(len(named) - 1))] and len(named) % LAYERS == 1
    late = [target for (what, target), (then, _) in pairwise(events) if (what, then) == ("needed", "asked")]
    assert set(late) <= {"model.layers.0"}  # nobody knows that a forward begins
    assert device.last.most_resident <= outside + 2 * layer and device.last.resident == 0


def test_a_device_with_room_for_one_layer_is_enough(
    plain: Callable[[str], dict[str, bytes]], folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    mode = "one pass, the uncompressed model beside"
    expected, (layer, outside) = plain(mode), of_a_layer(folder)
    device = request.getfixturevalue("device")
    device.room = outside + 1.5 * layer
    run(folder, tmp_path / "out", mode)
    assert files(tmp_path / "out") == expected and device.last.most_resident == outside + layer
    device.room = outside + 0.5 * layer
    with pytest.raises(OutOfMemoryError, match=r"memory ran out while it was traced \(Tried to allocate \d+ bytes"):
        run(folder, None, mode)
    assert device.last.resident == 0


def test_a_copy_that_fails_leaves_a_run_that_goes_on(
    plain: Callable[[str], dict[str, bytes]], folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    mode = "one pass, the uncompressed model beside"
    expected = plain(mode)
    device = request.getfixturevalue("device")
    run(folder, None, mode)
    for number in range(device.last.num_copies, 0, -12):
        device.fails_at, output = number, tmp_path / str(number)
        with contextlib.suppress(RuntimeError):
            run(folder, output, mode)
        if not output.exists():
            break
        assert files(output) == expected  # a trial of a part of a batch is made again with all of it
    else:
        pytest.fail("no copy that failed has ended a run")
    assert not device.last.sides.here
    device.fails_at = 0
    assert run(folder, output, mode, resume=True).resumed.startswith("resumed after stage ")
    assert files(output) == expected


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
    monkeypatch.setattr(
        importlib.import_module("compressor.entrypoints.oneshot"), "resolve_device", torch.device
    )  # as on a machine with a GPU
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


def test_who_looks_at_a_number_of_every_page_gives_the_pages_back(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"weight": torch.ones(1 << 10, 1 << 11, dtype=torch.float32)}, path)
    layer = nn.Linear(1 << 11, 1 << 10, bias=False)
    with safe_open(path, framework="pt") as file:
        layer.weight = nn.Parameter(file.get_tensor("weight"))
    before = file_pages()
    with weights_held_to(layer, [""]) as found:
        assert file_pages() < before + (1 << 20)  # of 8 MB
        layer(torch.ones(1 << 11))
        assert not found


def file_pages() -> int:
    """Bytes of files in the memory of this process."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return 1024 * int(lines["RssFile"].split()[0])


class _Fails(Modifier):
    """Looks at a layer that another quantizes, and fails at the end."""

    def on_initialize(self, state: State) -> bool:
        return True

    def on_calibration_start(self, state: State, event: Event) -> None:
        self.register_hook(state.model.get_submodule("model.layers.0.mlp.up_proj"), lambda module, args: None, "forward_pre")

    def on_finalize(self, state: State) -> bool:
        raise ValueError


def test_a_run_that_fails_at_its_end_leaves_no_hook_on_what_it_puts_back(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    with pytest.raises(FinalizeError):
        oneshot(
            model, recipe=[_Fails(), QuantizationModifier(scheme="FP8", ignore=["lm_head"])], dataset=torch.ones(2, 8, dtype=torch.int64)
        )
    assert not any(module._forward_pre_hooks for module in model.modules())
