"""What no modifier has claimed is byte for byte what was loaded before anything is saved, whoever wrote to it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from compressor import oneshot, train
from compressor.errors import CheckpointError
from compressor.lifecycle import CalibrationNeed, Event, Modifier, State
from compressor.model.checkpoints.audit import check_unclaimed, contents
from compressor.numerics.checksum import checksum
from tests import tiny

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64)


class Careless(Modifier):
    """Changes one weight and, if told so, says it."""

    name: str = "1"
    says: str = ""

    def on_initialize(self, state: State) -> bool:
        if self.says == "claim":
            state.claim([self.name], self.label)
        elif self.says == "touch":
            state.touch([self.name])
        return True

    def on_calibration_end(self, state: State, event: Event) -> None:
        if self.says == "replace":
            state.replace_module(self.name, nn.Linear(4, 4))
        else:
            state.model.get_submodule(self.name).get_parameter("weight").data.mul_(0.5)


class Eager(Careless):
    """The same while data flows."""

    calibration: ClassVar[CalibrationNeed] = "basic"


class Stack(nn.Sequential):
    """Takes token ids."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids.float())


def stack() -> Any:
    torch.manual_seed(0)
    return Stack(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()


def rescale(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook that writes past torch's version counters."""
    module.get_parameter("weight").detach().numpy().__imul__(0.5)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "halved": lambda w: w.mul_(0.5),
    "one bit": lambda w: w.view(torch.int32)[1].bitwise_xor_(1),
    "zeroed": lambda w: w.zero_(),
    "two signs": lambda w: w[1::2].neg_(),
    "swapped": lambda w: w.copy_(w.flip(0)),
    "rows of chunks": lambda w: w.copy_(w.roll(1 << 18)),
    "last": lambda w: w[-1].add_(1),
    "numpy": lambda w: w.numpy().__setitem__(5, 7.0),
}


@pytest.mark.parametrize("size", [7, 600_001])
@pytest.mark.parametrize("name", CHANGES)
def test_a_checksum_tells_accidents(name: str, size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(1))
    before, unchanged = checksum(values), checksum(values.clone())
    assert before == unchanged == checksum(torch.stack([values, values], 1)[:, 0])
    CHANGES[name](values)
    if name != "rows of chunks" or size > 1 << 18:
        assert checksum(values) != before


def test_a_checksum_takes_no_more_memory_for_more_bytes() -> None:
    """Freed buffers stay on the heap where small results lie between them: as much again as the tensor."""

    def allocations(size: int) -> int:
        values = torch.zeros(size)
        kinds = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=kinds, profile_memory=True, acc_events=True) as profile:  # as live_peak.py says
            checksum(values)
        assert profile.profiler is not None and profile.profiler.kineto_results is not None
        return sum(event.name() == "[memory]" and event.nbytes() > 1 << 16 for event in profile.profiler.kineto_results.events())

    allocations(1 << 19)  # the factors are made once, and not for a number of half a word
    assert 0 < allocations(1 << 19) == allocations(1 << 21)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_reads_bytes_of_every_dtype(dtype: torch.dtype) -> None:
    raw = torch.arange(48, dtype=torch.uint8) % 2 if dtype is torch.bool else torch.arange(48, dtype=torch.uint8)
    values = raw.view(dtype)
    assert checksum(values) == checksum(raw) == checksum(raw[0:].clone().view(dtype).reshape(-1, 1))
    assert checksum(values[:-1]) != checksum(values)


def test_minus_zero_and_the_kind_of_nan_count() -> None:
    zeros, nans = torch.zeros(4), torch.full((4,), float("nan"))
    assert checksum(zeros) != checksum(-zeros)
    assert checksum(nans) != checksum(nans.view(torch.int32).add(1).view(torch.float32))
    assert checksum(torch.empty(0)) == checksum(torch.empty(0, 3))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m[1].weight.data.mul_(2), r"^1\.weight: 1 tensors"),
        (lambda m: m[2].running_mean.add_(1), r"^2\.running_mean: "),
        (lambda m: m[2].num_batches_tracked.add_(1), r"^2\.num_batches_tracked: "),
        (lambda m: m[1].register_buffer("table", torch.ones(2)), r"^1\.table: "),
        (lambda m: m.__delitem__(2), r"5 tensors \(2\.bias"),
        (lambda m: setattr(m[1], "weight", nn.Parameter(m[1].weight.double())), r"^1\.weight: "),
        (lambda m: setattr(m[1], "weight", nn.Parameter(m[1].weight.flip(0))), r"^1\.weight: "),
        (lambda m: m[1].bias.detach().numpy().fill(3), r"^1\.bias: "),
    ],
)
def test_a_change_that_nobody_claims_is_named(change: Callable[[Any], Any], said: str) -> None:
    model = stack()
    base = contents(model)
    check_unclaimed(model, base, {"0"})
    change(model)
    with pytest.raises(CheckpointError, match=said):
        check_unclaimed(model, base, {"0"})
    check_unclaimed(model, base, {"1", "2"})


def test_what_is_tied_to_a_claimed_weight_changes_with_it() -> None:
    model = stack()
    model[1].weight = model[0].weight
    base = contents(model)
    model[0].weight.data.mul_(0.5)
    check_unclaimed(model, base, {"0"})
    with pytest.raises(CheckpointError, match=r"0\.weight, 1\.weight"):
        check_unclaimed(model, base, {"2"})


def test_what_only_shares_the_memory_of_a_claimed_weight_is_another_weight() -> None:
    model = stack()
    model[1].weight = nn.Parameter(model[0].weight.data)
    base = contents(model)
    model[0].weight.data.mul_(0.5)
    with pytest.raises(CheckpointError, match=r"^1\.weight: 1 tensors"):
        check_unclaimed(model, base, {"0"})


@pytest.mark.parametrize("kind", [Careless, Eager])
@pytest.mark.parametrize("says", ["", "claim", "touch", "replace"])
def test_a_modifier_that_says_nothing_saves_nothing(says: str, kind: type[Careless], tmp_path: Path) -> None:
    model = stack()
    before, out = copy.deepcopy(model.state_dict()), tmp_path / "out"
    data = torch.ones(2, 4, dtype=torch.int64) if kind is Eager else None

    def run() -> None:
        oneshot(model, recipe=kind(says=says), dataset=data, output_dir=out)

    if says:
        run()
        assert (out / "model.safetensors").exists()
        assert not torch.equal(model.state_dict()["1.weight"], before["1.weight"])
        return
    with pytest.raises(CheckpointError, match=r"^1\.weight: 1 tensors \(1\.weight\) are no longer what was loaded"):
        run()
    assert not out.exists()


def test_what_a_hook_of_somebody_else_writes_is_taken_back_or_found(tmp_path: Path) -> None:
    """What writes always is seen by planning and taken back; what writes later is found before saving."""

    def run(hook: Callable[[nn.Module, Any, Any], None], out: Path) -> Any:
        model = stack()
        model[1].register_forward_hook(hook)
        oneshot(model, recipe=Eager(name="0", says="claim"), dataset=torch.ones(2, 4, dtype=torch.int64), output_dir=out)
        return model

    calls = 0

    def late(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            rescale(module, args, output)

    before = stack()[1].weight
    assert torch.equal(run(rescale, tmp_path / "always")[1].weight, before)
    assert torch.equal(load_file(tmp_path / "always" / "model.safetensors")["1.weight"], before)
    with pytest.raises(CheckpointError, match=r"^1\.weight: "):
        run(late, tmp_path / "late")
    assert not (tmp_path / "late").exists()


@pytest.mark.parametrize("frozen", [True, False])
def test_training_changes_what_is_trained_only(frozen: bool, tmp_path: Path) -> None:
    model = tiny.llama(
        vocab_size=32, max_position_embeddings=16, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    norm = model.model.norm
    norm.weight.requires_grad_(not frozen)
    norm.register_forward_hook(rescale)

    def run() -> None:
        train(
            model,
            dataset=(torch.arange(256) % 32).reshape(16, 16),
            steps=1,
            batch_size=2,
            max_seq_length=8,
            mode="eager",
            output_dir=tmp_path / "out",
        )

    if frozen:
        with pytest.raises(CheckpointError, match=r"^model\.norm\.weight: 1 tensors"):
            run()
        assert not (tmp_path / "out").exists()
    else:
        run()
