"""Memory of the host: freed activations go back to the system, and a second stream keeps nothing wide."""

from __future__ import annotations

import hashlib
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from compressor import GPTQModifier, QuIPModifier, oneshot, pages
from compressor.lifecycle import Modifier
from compressor.model.checkpoints.audit import tensor_digests
from compressor.model.headers import write_tensors
from compressor.nn import QuantizedLayer
from compressor.pipelines.memory import bound_heap, return_freed_pages
from compressor.pipelines.offload.activation_store import ActivationStore
from compressor.pipelines.offload.onload import weights_by_stretch
from compressor.tracing import trace
from tests import tiny

# Blocks of 9 MB, each with a small one behind it that lives on: without a fixed size the heap keeps them all.
_CHURN = """
import sys, torch
from compressor.pipelines.memory import bound_heap
if sys.argv[1] == "fixed":
    assert bound_heap()
torch.empty(30 << 20, dtype=torch.uint8).fill_(1)  # freed, and from now on glibc takes blocks up to 30 MB from the heap
large, small = [], []
for _ in range(16):
    large.append(torch.empty(9 << 20, dtype=torch.uint8).fill_(1))
    small.append(torch.empty(20000, dtype=torch.uint8).fill_(1))
del large
print(int(open("/proc/self/statm").read().split()[1]) * 4096)
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="the allocator of glibc")
def test_freed_blocks_leave_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)

    def resident(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", _CHURN, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert resident("plain") - resident("fixed") > 64 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator of glibc")
def test_what_was_freed_between_blocks_that_live_on_leaves_the_process() -> None:
    blocks = [torch.ones(size // 4) for _ in range(400) for size in (100_000, 10_000)]
    before = _resident_bytes()  # where a run in this process has set limits, they leave as they are freed
    del blocks[::2]
    return_freed_pages()
    assert before - _resident_bytes() > 30_000_000
    assert all(bool(block.all()) for block in blocks)


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="the system tells no pages apart")
def test_planning_leaves_no_mapped_weights_in_memory(tmp_path: Path) -> None:
    """The model is copied before it is run, and compared with the copy afterwards: both read all of it."""
    model = nn.Sequential(nn.Linear(1024, 1024, False), nn.Linear(1024, 1024, False)).eval()
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    with safe_open(tmp_path / "weights.safetensors", "pt") as weights:
        for place, layer in enumerate(model):
            layer.weight = nn.Parameter(weights.get_tensor(f"{place}.weight"))
    trace(model, [{"input": torch.ones(1, 1024)}], targets=["0"])
    assert _mapped_bytes("weights.safetensors") < 1_000_000
    assert all(bool(layer.weight.isfinite().all()) for layer in model) and _mapped_bytes("weights.safetensors") > 8_000_000


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="the system tells no pages apart")
def test_embeddings_and_the_head_take_turns_with_the_layers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024, False), nn.Linear(1024, 1024, False), nn.Linear(1024, 1024, False)).eval()
    save_file(model.state_dict(), tmp_path / "turns.safetensors")
    with safe_open(tmp_path / "turns.safetensors", "pt") as weights:
        for place, layer in enumerate(model):
            layer.weight = nn.Parameter(weights.get_tensor(f"{place}.weight"))
    resident = []
    with weights_by_stretch(model, {"1": model[1]}, torch.device("cpu")):
        for layer in model:
            layer.register_forward_hook(lambda *_: resident.append(_mapped_bytes("turns.safetensors")))
        model(torch.ones(1, 1024))
    assert [round(num_bytes, -6) for num_bytes in resident] == 3 * [4_000_000]
    assert not any(module._forward_pre_hooks for module in model)


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator of glibc")
def test_what_a_layer_leaves_on_the_heap_while_a_model_is_traced_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of activations that are too small for blocks of their own the heap keeps what lies between blocks that live on."""
    model, kept, after = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), [], []

    def work(*_: object) -> None:
        after.append(_resident_bytes())
        larger = 50_000 + 8_000 * len(after)  # than what the layer before has left: it finds no room between the others
        blocks = [torch.ones(size // 4) for _ in range(400) for size in (larger, 4_000)]
        kept.extend(blocks[1::2])

    with weights_by_stretch(model, {str(place): layer for place, layer in enumerate(model)}, torch.device("cpu")):
        for layer in model:
            layer.register_forward_hook(work)
        model(torch.ones(8))
        model(torch.ones(8))
    assert after[-1] - after[1] < 22_000_000  # 33 MB where nothing is given back, and 10 MB that six layers have kept


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="the system tells no pages apart")
def test_of_a_large_tensor_that_is_written_and_hashed_a_piece_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.arange(12 << 20, dtype=torch.float32).reshape(3, -1)
    save_file({"weight": weight}, tmp_path / "large.safetensors")
    resident = []
    letting = pages.let_go
    monkeypatch.setattr(pages, "let_go", lambda tensors: resident.append(_mapped_bytes("e.safetensors")) or letting(tensors))
    with safe_open(tmp_path / "large.safetensors", "pt") as file:
        write_tensors({"weight": file.get_tensor("weight")}, tmp_path / "large", {})
    (tmp_path / "again").mkdir()
    (tmp_path / "large").rename(tmp_path / "again" / "large.safetensors")
    digests = [tensor_digests(folder) for folder in (tmp_path, tmp_path / "again")]
    sha256 = hashlib.sha256(weight.numpy()).hexdigest()
    assert digests == 2 * [{"weight": f"F32[3,{4 << 20}] {sha256}"}]
    assert len(resident) == 9 and max(resident) < 20_000_000


def test_a_last_layer_is_not_made_float_beside_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample alone runs on, through each of its modules once."""
    torch.manual_seed(0)
    model = tiny.llama(intermediate_size=96)
    kept: list[str] = []
    materialize = QuantizedLayer.materialize
    monkeypatch.setattr(QuantizedLayer, "materialize", lambda self: kept.append(self.where) or materialize(self))
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16, "strategy": "group"}}
    recipe = GPTQModifier(config_groups={"group_0": group}, ignore=["lm_head"])
    oneshot(model, recipe=recipe, dataset=torch.randint(64, (12, 8), generator=torch.Generator().manual_seed(0)), batch_size=2)
    assert "model.layers.0.mlp.down_proj" in kept and "model.layers.1.mlp.up_proj" in kept
    assert "model.layers.1.mlp.down_proj" not in kept


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def _mapped_bytes(file: str) -> int:
    """What of a file is resident in this process."""
    lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    places = [number for number, line in enumerate(lines) if line.endswith(file)]
    rss = [next(line for line in lines[place:] if line.startswith("Rss:")) for place in places]
    return sum(int(line.split()[1]) * 1024 for line in rss)


# Forwards that free blocks of 3 MB, each with a small one behind it that lives on.
_FORWARDS = """
import torch
from pathlib import Path
from compressor.pipelines.memory import FreedMemory, bound_heap
assert bound_heap()
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
freed, start, most, small = FreedMemory(), resident(), 0, []
for _ in range(30):
    large = []
    for _ in range(4):
        large.append(torch.empty(3 << 20, dtype=torch.uint8).fill_(1))
        small.append(torch.empty(20000, dtype=torch.uint8).fill_(1))
    most = max(most, resident() - start)
    del large
    freed.bound(0)
print(most)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator of glibc")
def test_what_forwards_free_between_blocks_that_live_on_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run([sys.executable, "-c", _FORWARDS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < (12 + 16 + 12) << 20, "a forward, what may be free, and the next forward"


@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_an_allocator_that_the_user_set_up_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "4194304")
    assert not bound_heap()


@pytest.mark.parametrize(
    ("target", "num_wide", "before"), [("propagated", 4, []), ("base", 0, []), ("base", 0, [QuIPModifier(rotations=["v", "u"])])]
)
def test_few_samples_wait_with_wide_inputs(monkeypatch: pytest.MonkeyPatch, target: str, num_wide: int, before: list[Modifier]) -> None:
    """The down projection reads 96 features, all else 32: four streams of 32 would wait before it, and three may.

    Beside the uncompressed model, whose samples have the last numbers, none waits there, turned outputs or not. What waits before a norm
    is what it reads.
    """
    model = tiny.llama(intermediate_size=96)
    wide: set[int] = set()
    most: list[int] = []
    held: dict[int, int] = {}
    put = ActivationStore.put

    def noting(self: ActivationStore, sample: int, values: dict[str, object]) -> None:
        widths = [one.shape[-1] for one in values.values() if isinstance(one, torch.Tensor) and one.dim() == 3 and one.shape[0] == 2]
        held[sample] = sum(widths)
        wide.update({sample} if 96 in widths else ())
        most.append(sum(held.values()))
        put(self, sample, values)

    monkeypatch.setattr(ActivationStore, "put", noting)
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16, "strategy": "group"}}
    recipe = [*before, GPTQModifier(config_groups={"group_0": group}, ignore=["lm_head"], target=target)]
    oneshot(model, recipe=recipe, dataset=torch.randint(64, (12, 8), generator=torch.Generator().manual_seed(0)), batch_size=2)
    assert wide == set(range(num_wide))
    assert max(most) <= 3 * 6 * 32
