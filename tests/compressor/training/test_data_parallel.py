"""DistributedDataParallel over gloo: replay is eager on every rank, what one rank refuses all refuse, and nobody waits for nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from compressor.errors import HostReadError, ProofError, ReplayError, UserInputError
from compressor.training import Plan, Snapshot, Trainer, TrainStep, adamw
from compressor.training.engines.select import engine_for

WORKER = Path(__file__).with_name("two_ranks.py")
EQUAL = ("many buckets", "bucket views", "everything", "modifiers")
MODES = ("eager", "capture", "replay")


@pytest.fixture(scope="session")
def ranks(repo_root, tmp_path_factory):
    """What came of every case on both ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"PYTHONPATH": str(repo_root), "OMP_NUM_THREADS": "1"}
    started = []
    for rank in range(2):
        with (folder / f"err{rank}").open("w") as errors, (folder / f"out{rank}").open("w") as output:
            command = [sys.executable, "-W", "error", str(WORKER), str(rank), str(folder)]
            started.append(subprocess.Popen(command, stdout=output, stderr=errors, env=environment))
    try:
        codes = [process.wait(timeout=900) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert codes == [0, 0], "\n".join((folder / f"err{rank}").read_text()[-1500:] for rank in range(2))
    return [json.loads((folder / f"out{rank}").read_text()) for rank in range(2)]


@pytest.mark.nightly
@pytest.mark.parametrize("name", EQUAL)
def test_two_ranks_end_bit_for_bit_alike_in_all_modes(ranks, name):
    cases = [found[f"equal: {name}"] for found in ranks]
    for case in cases:
        assert case["eager"]["all"] == case["capture"]["all"] == case["replay"]["all"]
        assert case["eager"]["losses"] == case["capture"]["losses"] == case["replay"]["losses"]
        assert case["collectives"] >= 2 + case["buckets"]
    assert len({case[mode]["shared"] for case in cases for mode in MODES}) == 1
    assert cases[0]["eager"]["losses"] != cases[1]["eager"]["losses"]  # each rank has data of its own
    assert (cases[0]["buckets"] > 1) == (name in ("many buckets", "everything"))


@pytest.mark.nightly
def test_a_step_of_ours_is_the_loop_that_everybody_writes(ranks):
    assert [found["by hand"]["equal"] for found in ranks] == [True, True]


@pytest.mark.nightly
def test_ranks_with_shapes_of_their_own_wait_for_each_other_with_proofs(ranks):
    for found in ranks:
        case = found["uneven"]
        assert case["eager"]["all"] == case["capture"]["all"] == case["replay"]["all"]
        assert {"warm-up", "capture", "prove", "audit", "replay"} <= set(case["replay"]["actions"])
    assert ranks[0]["uneven"]["replay"]["shared"] == ranks[1]["uneven"]["replay"]["shared"]
    assert any("eager" in found["uneven"]["replay"]["actions"] for found in ranks)  # one would prove, the other could not


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "rank", "error"),
    [
        ("guard on rank 1", 1, "GuardDriftError: module module.drop was p=0.3"),
        ("host read on rank 0", 0, "HostReadError: op "),
        ("host read on rank 1 in capture mode", 1, "HostReadError: Tensor.tolist()"),
    ],
)
def test_what_one_rank_refuses_is_undone_on_all_and_training_goes_on(ranks, case, rank, error):
    found = [results[case] for results in ranks]
    assert found[rank]["text"].startswith(error)
    assert found[1 - rank]["text"].startswith(f"ReplayError: rank {1 - rank} of 2: another rank refused this step")
    assert [one["changed"] for one in found] == [[], []]
    assert found[0]["shared"] == found[1]["shared"] and found[0]["last"] == found[1]["last"] != "warm-up"


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["proof on rank 0", "unsynchronized"])
def test_a_wrong_tape_on_one_rank_and_a_tape_that_forgets_to_synchronize_fail_the_proof(ranks, case):
    for found in ranks:
        assert found[case]["text"].startswith("ProofError: the replayed step is not the eager one")
    assert ranks[0]["proof on rank 0"]["shared"] == ranks[1]["proof on rank 0"]["shared"]


@pytest.mark.nightly
def test_trainers_made_differently_are_refused_before_they_wait(ranks):
    for found, mode in zip(ranks, ("replay", "eager"), strict=True):
        assert found["settings"]["text"].startswith(
            "UserInputError: Trainer: the ranks were made with different settings, here mode=" + repr(mode)
        )


@pytest.mark.nightly
def test_an_error_that_is_not_ours_keeps_nobody_waiting(ranks):
    assert ranks[0]["stumbled"]["text"].startswith("ReplayError: rank 0 of 2: another rank refused this step")
    assert ranks[1]["stumbled"]["text"] == "KeyError: 'gone'"


@pytest.mark.nightly
def test_a_rank_that_waits_in_vain_says_so_when_its_time_is_up(ranks):
    assert ranks[0]["left alone"]["text"].startswith("ReplayError: rank 0 of 2: the other ranks did not answer")
    assert ranks[1]["left alone"]["text"] == "nothing was raised"


@pytest.mark.nightly
def test_one_rank_may_evaluate_alone_and_leaves_no_trace(ranks):
    for found in ranks:
        case = found["evaluated"]
        assert case["False"] == case["True"] and case["last"] == "replay" and case["located"] is None


@pytest.mark.nightly
def test_each_rank_resumes_from_a_file_of_its_own(ranks):
    for found in ranks:
        assert found["resumed"]["end"] == found["resumed"]["again"]


@pytest.fixture
def alone():
    """A group of one rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _trainer(mode, ddp=None, loss_fn=None, trainer=None, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))
    wrapped = DistributedDataParallel(model, **(ddp or {}))
    step = TrainStep(wrapped, loss_fn or _classify, adamw(wrapped.parameters()), **settings)
    return Trainer(step, mode, **(trainer or {}))


def _classify(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2, "clip_norm": 0.5}], ids=["plain", "accumulate"])
@pytest.mark.parametrize("ddp", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}], ids=["default", "views", "buckets"])
def test_one_rank_ends_alike_in_all_modes(alone, batches, ddp, settings):
    ends, losses = {}, {}
    count = settings.get("accumulate", 1)
    for mode in MODES:
        trainer = _trainer(mode, ddp, trainer={"audit_every": 7}, **settings)
        given = [batches(n) if count == 1 else [batches(n * count + k) for k in range(count)] for n in range(20)]
        losses[mode] = [trainer.train_step(batch).item() for batch in given]
        ends[mode] = Snapshot.take(trainer.step)
    assert losses["eager"] == losses["capture"] == losses["replay"]
    assert ends["eager"].differences(ends["replay"]) == [] == ends["eager"].differences(ends["capture"])


def _hook(wrapped):
    wrapped.register_comm_hook(None, fp16_compress_hook)


def _builtin_hook(wrapped):
    wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


@pytest.mark.parametrize("mode", ["capture", "replay"])
@pytest.mark.parametrize(
    ("ddp", "change", "error", "match"),
    [
        ({"find_unused_parameters": True}, None, HostReadError, "read on the host which parameters were used"),
        ({"static_graph": True}, None, HostReadError, "static_graph"),
        ({}, _hook, ReplayError, "communication hook"),
        ({}, _builtin_hook, ReplayError, "communication hook"),
    ],
    ids=["unused", "static", "hook", "builtin hook"],
)
def test_what_a_tape_cannot_repeat_of_it_is_refused_by_name(alone, batches, mode, ddp, change, error, match):
    trainer = _trainer(mode, ddp)
    if change is not None:
        change(trainer.step.model)
    for number in range(2):
        trainer.train_step(batches(number))
    before = Snapshot.take(trainer.step)
    with pytest.raises(error, match=match):
        trainer.train_step(batches(2))
    assert before.differences(Snapshot.take(trainer.step)) == []


def test_inside_join_and_with_one_warm_up_step_it_is_refused(alone, batches):
    with pytest.raises(UserInputError, match="warmup=1 is below 2, and DistributedDataParallel"):
        _trainer("replay", trainer={"warmup": 1})
    trainer = _trainer("replay")
    with trainer.step.model.join(), pytest.raises(ReplayError, match=r"inside join\(\) ranks stop at different steps"):
        for number in range(3):
            trainer.train_step(batches(number))


def test_a_refusal_in_the_backward_pass_leaves_the_wrapper_usable(alone, batches):
    trainer = _trainer("replay")
    weight, reads = trainer.step.model.module[4].weight, [False]
    weight.register_hook(lambda gradient: gradient * (gradient.mean().item() if reads[0] else 1))
    for number in range(2):
        trainer.train_step(batches(number))
    reads[0] = True
    before = Snapshot.take(trainer.step)
    with pytest.raises(HostReadError, match="reads a tensor on the host"):
        trainer.train_step(batches(2))
    assert before.differences(Snapshot.take(trainer.step)) == []
    reads[0] = False
    trainer.forget_plans()
    for number in range(2, 8):
        trainer.train_step(batches(number))
    assert trainer.last_action in ("replay", "audit")


def _summed(model, batch):
    loss = _classify(model, batch)
    summed = loss.detach().clone()
    dist.all_reduce(summed)
    return loss + 0 * summed


def test_collectives_of_the_loss_function_are_repeated(alone, batches):
    ends = {}
    for mode in MODES:
        trainer = _trainer(mode, loss_fn=_summed)
        ends[mode] = [trainer.train_step(batches(number)).item() for number in range(8)]
    assert ends["eager"] == ends["capture"] == ends["replay"]
    assert any("loss" in op.phase or op.phase == "forward" for op in trainer.plans[0].captured.ops if "c10d.allreduce_" in op.line)


def _functional(model, batch):
    from torch.distributed._functional_collectives import all_reduce

    return all_reduce(_classify(model, batch).detach(), "sum", dist.group.WORLD) * 0 + _classify(model, batch)


def _sent(model, batch):
    loss = _classify(model, batch)
    dist.barrier()
    torch.ops.c10d.send([loss.detach()], dist.group.WORLD.boxed(), 0, 0)
    return loss


@pytest.mark.parametrize(("loss_fn", "match"), [(_functional, "without a handle"), (_sent, "is no collective of all ranks")])
def test_communication_that_cannot_be_repeated_alike_is_refused(alone, mlp_trainer, batches, loss_fn, match):
    step = mlp_trainer(loss_fn=loss_fn).step
    with pytest.raises(ReplayError, match=match):
        Plan(step, batches(0), engine_for(step.device))


def test_ranks_that_are_not_known_to_run_the_step_are_not_waited_for(mlp_trainer, batches):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        step = mlp_trainer(loss_fn=_summed).step
        with pytest.raises(ReplayError, match="communicates with 2 ranks that are not known to run this step; wrap the model"):
            Plan(step, batches(0), engine_for(step.device))
    finally:
        dist.destroy_process_group()


def test_a_tape_that_forgets_to_fill_a_bucket_fails_the_proof(alone, batches):
    trainer = _trainer("replay")
    for number in range(3):
        trainer.train_step(batches(number))
    tape = trainer.plans[0].captured
    next(op for op in tape.ops if op.line.startswith("backward") and " -> bucket:0" in op.line and "c10d" not in op.line).run = None
    tape.relink()
    with pytest.raises(ProofError, match="the replayed step is not the eager one"):
        trainer.train_step(batches(3))


def test_sharded_parameters_are_refused(alone, batches):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    step = TrainStep(model, _classify, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ReplayError, match=r"0\.weight: it is a DTensor; a tape holds whole tensors"):
        Plan(step, batches(0), engine_for(step.device))


def test_a_tape_outlives_its_group_only_to_say_so(batches):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        trainer = _trainer("replay")
        for number in range(5):
            trainer.train_step(batches(number))
        assert trainer.last_action in ("replay", "audit")
    finally:
        dist.destroy_process_group()
    with pytest.raises(ReplayError, match=r"process group .*: it was destroyed since the capture"):
        trainer.train_step(batches(5))
