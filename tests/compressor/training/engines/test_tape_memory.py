"""The tape holds little more than a step needs at a time, and a mistake in who shares bytes with whom is found by the proof."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import compressor.training.engines.memory_plan as layout
from compressor.errors import EscapedTensorError, ProofError
from compressor.training import InputBuffers, Snapshot, adamw
from compressor.training.capture.operators import IDLE, Extent
from compressor.training.engines.memory_plan import lifetimes, place
from compressor.training.engines.select import TapeEngine
from compressor.training.engines.tape import Tape
from compressor.training.guards.python_values import PythonValues
from compressor.training.replay.plan import record

lives = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 30), st.integers(0, 12)), max_size=40)


@given(lives, st.sampled_from([64, 512]))
def test_storages_that_live_at_the_same_time_share_no_byte(drawn, alignment):
    sizes, first = [size for size, _, _ in drawn], [begin for _, begin, _ in drawn]
    last = [begin + length for _, begin, length in drawn]
    offsets, arena_bytes = place(sizes, first, last, alignment=alignment)
    for i, offset in enumerate(offsets):
        assert offset % (alignment if sizes[i] > 16 else 16) == 0 and offset + sizes[i] <= arena_bytes
        for j in range(i):
            together = first[i] <= last[j] and first[j] <= last[i]
            assert not together or offset + sizes[i] <= offsets[j] or offsets[j] + sizes[j] <= offset
    at_a_time = [sum(size for size, b, e in zip(sizes, first, last, strict=True) if b <= t <= e) for t in range(50)]
    assert max(at_a_time) <= arena_bytes <= sum(-(-size // alignment) * alignment for size in sizes)


class AliveBytes(TorchDispatchMode):
    """Counts the bytes of new storages that are alive: another way than the recorder's, by finalizers."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            storage = leaf.untyped_storage() if isinstance(leaf, torch.Tensor) else None
            is_constant = func._schema.name == "aten::lift_fresh"
            if storage is not None and storage not in self.seen and (storage._cdata not in known or is_constant):
                self.seen.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._forget, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _forget(self, count):
        self.now -= count


@pytest.mark.parametrize("name", ["mlp", "llama", "gpt2"])
def test_the_tape_holds_little_more_than_the_peak_of_an_eager_step(new_trainer, cases, name):
    trainer = new_trainer(cases[name], "replay")
    for number in range(5):
        trainer.train_step(cases[name].batch_at(number))
    tape, batch = trainer.plans[0].captured, cases[name].batch_at(9)
    with AliveBytes() as counter:
        trainer.step(batch)
    assert tape.live_peak_bytes == counter.peak > 0
    assert tape.scratch_bytes <= 1.5 * counter.peak
    assert sum(tape.layout.sizes) >= 2 * tape.scratch_bytes  # what it would take without sharing


def test_recording_needs_no_more_memory_than_the_step_itself(new_trainer, cases):
    peaks, batch = [], cases["llama"].batch_at(9)

    class Measured(TapeEngine):
        def capture(self, run, recorder, generators):
            with recorder, AliveBytes() as counter:
                loss = run()
            peaks.append(counter.peak)
            return Tape(recorder.ops, recorder.alias(loss), loss, recorder.storages, self.arena)

    step = new_trainer(cases["llama"], "eager").step
    step(batch)
    record(step, InputBuffers(batch), Measured(), PythonValues())
    with AliveBytes() as counter:
        step(batch)
    assert peaks == [counter.peak]


def test_plans_of_several_shapes_take_turns_in_one_arena(new_trainer, cases):
    rows = [24, 6, 12]
    order = [count for count in rows for _ in range(4)] + [6, 24, 12, 24, 6, 12] * 2
    losses = {}
    for mode in ("eager", "replay"):
        trainer = new_trainer(cases["mlp"], mode)
        losses[mode] = [trainer.train_step(vectors(number, count)).item() for number, count in enumerate(order)]
    tapes = [plan.captured for plan in trainer.plans]
    assert losses["eager"] == losses["replay"] and trainer.last_action == "replay" and len(tapes) == 3
    held = {arena.data_ptr(): arena.nbytes() for tape in tapes for arena in tape._arenas.values()}
    assert list(held.values()) == [max(sum(tape.layout.arena_bytes.values()) for tape in tapes)]


def vectors(number, count):
    """A batch of an MLP."""
    draw = torch.Generator().manual_seed(number)
    return {"x": torch.randn(count, 8, generator=draw), "y": torch.randint(0, 4, (count,), generator=draw)}


def _is_read_last(records, number):
    def names(leaves):
        return any(isinstance(leaf, Extent) and leaf.storage == number for leaf in tree_leaves(leaves))

    touching = [record for record in records if record.kind not in IDLE and names((record.args, record.kwargs, record.outs))]
    return len(touching) > 1 and names((touching[-1].args, touching[-1].kwargs))


def _mlp_after_warm_up(new_trainer, cases):
    trainer = new_trainer(cases["mlp"], "replay")
    for number in range(2):
        trainer.train_step(cases["mlp"].batch_at(number))
    return trainer


@pytest.mark.parametrize("mistake", ["dies too early", "is born too late"])
def test_a_life_that_is_one_op_short_is_found_by_the_proof(new_trainer, cases, monkeypatch, mistake):
    probe = _mlp_after_warm_up(new_trainer, cases)
    probe.train_step(cases["mlp"].batch_at(2))
    num_storages, num_ops, found = len(probe.plans[0].captured.layout.sizes), len(probe.plans[0].captured.ops), 0
    for victim in range(num_storages):
        true_lives, chosen = [], []

        def planted(records, count, victim=victim, true_lives=true_lives, chosen=chosen):
            first, last = lifetimes(records, count)
            true_lives.append((first[victim], last[victim]))
            chosen.append(_is_read_last(records, victim))
            if mistake == "dies too early":
                last[victim] -= 1
            else:
                first[victim] += 1
            return first, last

        trainer = _mlp_after_warm_up(new_trainer, cases)
        with monkeypatch.context() as patch:
            patch.setattr(layout, "lifetimes", planted)
            trainer.train_step(cases["mlp"].batch_at(2))
        (first, last), kept = true_lives[0], trainer.plans[0].captured.layout.last[victim] == num_ops
        if chosen[0] and first < last and not (kept and mistake == "dies too early"):
            with pytest.raises(ProofError):
                trainer.train_step(cases["mlp"].batch_at(3))
            found += 1
    assert found >= 10


def test_storages_on_top_of_each_other_are_found_by_the_proof(new_trainer, cases, monkeypatch):
    trainer = _mlp_after_warm_up(new_trainer, cases)
    monkeypatch.setattr(layout, "place", lambda sizes, first, last, alignment: ([0] * len(sizes), max(sizes)))
    trainer.train_step(cases["mlp"].batch_at(2))
    with pytest.raises(ProofError):
        trainer.train_step(cases["mlp"].batch_at(3))


def test_what_an_object_keeps_of_the_step_is_an_escape(mlp_trainer, batches):
    meter = SimpleNamespace(last=None)

    def loss_fn(model, batch):
        loss = cross_entropy(model(batch["x"]), batch["y"])
        meter.last = loss.detach()
        return loss

    trainer = mlp_trainer(loss_fn=loss_fn)
    for number in range(2):
        trainer.train_step(batches(number))
    with pytest.raises(EscapedTensorError, match=r"it keeps a tensor that op \d+ \(forward\): aten.nll_loss"):
        trainer.train_step(batches(2))


def test_a_function_with_a_cycle_through_its_tensors_is_no_escape(mlp_trainer, batches):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            result = x * x
            ctx.itself = ctx
            ctx.x, ctx.result = x, result
            return result

        @staticmethod
        def backward(ctx, grad):
            return 2 * ctx.x * grad

    trainer = mlp_trainer(loss_fn=lambda model, batch: cross_entropy(Square.apply(model(batch["x"])), batch["y"]))
    for number in range(6):
        trainer.train_step(batches(number))
    assert trainer.last_action == "replay"


def test_a_batch_norm_of_a_transposed_input_is_equal(mlp_trainer):
    class Transposed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = torch.nn.BatchNorm1d(6, affine=False, track_running_stats=False), torch.nn.Linear(6, 4)

        def forward(self, x):
            return self.head(self.norm(x.t()))

    _assert_equal(mlp_trainer, Transposed, lambda number: torch.randn(6, 4, generator=torch.Generator().manual_seed(number)))


def test_a_convolution_behind_frozen_weights_is_equal(mlp_trainer):
    """Its backward returns one tensor of three."""

    class Frozen(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.conv = torch.nn.Parameter(torch.ones(2, 1, 1)), torch.nn.Conv2d(2, 3, 3).requires_grad_(False)

        def forward(self, x):
            return self.conv(x * self.scale).mean((2, 3))

    _assert_equal(mlp_trainer, Frozen, lambda number: torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(number)))


def _assert_equal(mlp_trainer, make, input_at):
    ends = []
    for mode in ("eager", "replay"):
        torch.manual_seed(1)
        trainer = mlp_trainer(make(), lambda m, b: cross_entropy(m(b["x"]), torch.arange(4) % 3), lambda p: adamw(p, lr=0.05), mode=mode)
        losses = [trainer.train_step({"x": input_at(number)}).item() for number in range(8)]
        ends.append((losses, Snapshot.take(trainer.step)))
    assert trainer.last_action == "replay"
    assert ends[0][0] == ends[1][0] and ends[0][1].differences(ends[1][1]) == []
