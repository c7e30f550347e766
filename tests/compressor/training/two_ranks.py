"""One rank of a data-parallel training: runs every case and prints what came of it as JSON. Started twice by test_data_parallel.py."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from compressor.errors import CompressorError
from compressor.lifecycle import Session, State
from compressor.modifiers.pruning.magnitude import MagnitudePruningModifier
from compressor.modifiers.quantization import QuantizationModifier
from compressor.pages import raw_bytes
from compressor.training import Snapshot, Trainer, TrainStep, adamw, load_training, locate, save_training

NUM_STEPS = 22
SETTINGS: dict[str, dict[str, Any]] = {
    "many buckets": {"ddp": {"bucket_cap_mb": 0.0001}},
    "bucket views": {"ddp": {"gradient_as_bucket_view": True}, "accumulate": 2},
    "everything": {"ddp": {"bucket_cap_mb": 0.0001}, "accumulate": 2, "clip_norm": 0.5, "autocast": torch.bfloat16},
    "modifiers": {"modifiers": True, "clip_norm": 0.5},
}


class Mlp(nn.Module):
    """Batch norm and dropout, and a place for mischief."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.3)
        self.mischief: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        return self.last(hidden if self.mischief is None else self.mischief(hidden))


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["x"]).float(), batch["y"])


def batch_of(number: int, rows: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
    return {"x": torch.randn(rows, 8, generator=generator), "y": torch.randint(0, 4, (rows,), generator=generator)}


def make(mode: str, ddp: dict[str, Any] | None = None, trainer: dict[str, Any] | None = None, **step: Any) -> Trainer:
    torch.manual_seed(0)
    model = DistributedDataParallel(Mlp(), **(ddp or {}))
    if step.pop("modifiers", False):
        step["session"] = pruned_and_quantized(model.module)
    torch.manual_seed(100 + dist.get_rank())  # the masks of dropout differ between ranks
    return Trainer(TrainStep(model, loss_fn, adamw(model.parameters(), lr=1e-2), **step), mode, **{"audit_every": 7, **(trainer or {})})


def pruned_and_quantized(model: nn.Module) -> Session:
    int4 = {"group": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 8}}}
    pruner = MagnitudePruningModifier(final_sparsity=0.5, mask_structure="2:4", start=2, end=8, update=2, leave_enabled=True)
    quantizer = QuantizationModifier(config_groups=int4, start=11, disable_quantization_observer_epoch=16)
    session = Session(State(model), [pruner, quantizer])
    session.initialize()
    return session


def batch_for(trainer: Trainer, number: int) -> Any:
    count = trainer.step.accumulate
    return batch_of(number) if count == 1 else [batch_of(count * number + k) for k in range(count)]


def digest(trainer: Trainer, *kinds: str) -> str:
    """Hash the tensors of some kinds, or all of them and the random generators."""
    state = Snapshot.take(trainer.step)
    tensors = [tensor for name, tensor in sorted(state.tensors.items()) if not kinds or name.startswith(kinds)]
    parts = tensors if kinds else [*tensors, *state.rng.by_device.values()]
    return hashlib.blake2b(b"".join(raw_bytes(part).numpy().tobytes() for part in parts), digest_size=8).hexdigest()


def equal(settings: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in ("eager", "capture", "replay"):
        trainer = make(mode, **settings)
        losses = [trainer.train_step(batch_for(trainer, number)).item() for number in range(NUM_STEPS)]
        found[mode] = {"all": digest(trainer), "losses": losses, "last": trainer.last_action}
        found[mode]["shared"] = digest(trainer, "param:", "grad:", "opt.")
    found["buckets"] = len(trainer.step.ranks.buckets)
    found["collectives"] = sum("c10d." in line for line in trainer.plans[0].captured.lines)
    return found


def by_hand() -> dict[str, Any]:
    """The loop as everybody writes it, without anything of ours."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Mlp())
    torch.manual_seed(100 + dist.get_rank())
    optimizer = adamw(model.parameters(), lr=1e-2)
    for number in range(NUM_STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss_fn(model, batch_of(number)).backward()
        optimizer.step()
    trainer = make("eager")
    for number in range(NUM_STEPS):
        trainer.train_step(batch_of(number))
    ours = list(trainer.step.model.parameters())
    return {"equal": all(torch.equal(a, b) for a, b in zip(model.parameters(), ours, strict=True))}


def uneven() -> dict[str, Any]:
    """Each rank has its own order of shapes, so that one warms up while the other would prove or replay."""
    rows = ([6, 4, 6, 6, 6, 4, 4, 6, 4, 4, 6], [4, 4, 6, 4, 6, 6, 6, 4, 4, 6, 4])[dist.get_rank()] * 2
    found: dict[str, Any] = {}
    for mode in ("eager", "capture", "replay"):
        trainer, actions = make(mode, trainer={"audit_every": 5}), []
        for number, count in enumerate(rows):
            trainer.train_step(batch_of(number, count))
            actions.append(trainer.last_action)
        found[mode] = {"all": digest(trainer), "shared": digest(trainer, "param:", "grad:", "opt."), "actions": actions}
    return found


def refused(step_number: int, mode: str, spoil: Callable[[Trainer], Callable[[], object]], rank: int) -> dict[str, Any]:
    """Spoil one rank before a step; afterwards undo it, and go on."""
    trainer = make(mode, trainer={"audit_every": 0})
    for number in range(step_number):
        trainer.train_step(batch_of(number))
    before, undo, text = Snapshot.take(trainer.step), lambda: None, "nothing was raised"
    if dist.get_rank() == rank:
        undo = spoil(trainer)
    try:
        trainer.train_step(batch_of(step_number))
    except CompressorError as error:
        text = f"{type(error).__name__}: {error}"
    changed = before.differences(Snapshot.take(trainer.step))
    undo()
    trainer.forget_plans()
    for number in range(step_number, step_number + 6):
        trainer.train_step(batch_of(number))
    return {"text": text, "changed": changed, "last": trainer.last_action, "shared": digest(trainer, "param:", "grad:", "opt.")}


def drop_rate(trainer: Trainer) -> Callable[[], object]:
    drop = trainer.step.model.module.drop
    drop.p = 0.5
    return lambda: setattr(drop, "p", 0.3)


def host_read(trainer: Trainer) -> Callable[[], object]:
    model = trainer.step.model.module
    model.mischief = lambda hidden: hidden * hidden.mean().item()
    return lambda: setattr(model, "mischief", None)


def list_read(trainer: Trainer) -> Callable[[], object]:
    model = trainer.step.model.module
    model.mischief = lambda hidden: hidden * hidden.detach().mean(0).tolist()[0]
    return lambda: setattr(model, "mischief", None)


def silenced(trainer: Trainer) -> Callable[[], object]:
    """Leave one operator of the tape out."""
    tape = trainer.plans[0].captured
    next(op for op in tape.ops if "aten.relu" in op.line).run = lambda: None
    tape.relink()
    return lambda: None


def no_allreduce(trainer: Trainer) -> Callable[[], object]:
    """Let the tape of every rank forget to synchronize."""
    tape = trainer.plans[0].captured
    for op in tape.ops:
        if "c10d.allreduce_" in op.line:
            op.run = None
    tape.relink()
    return lambda: None


def unsynchronized() -> dict[str, Any]:
    trainer = make("replay")
    for number in range(3):
        trainer.train_step(batch_of(number))
    no_allreduce(trainer)
    try:
        trainer.train_step(batch_of(3))
    except CompressorError as error:
        return {"text": f"{type(error).__name__}: {error}"}
    return {"text": "nothing was raised"}


def settings_differ() -> dict[str, Any]:
    trainer = make(("replay", "eager")[dist.get_rank()])
    try:
        trainer.train_step(batch_of(0))
    except CompressorError as error:
        return {"text": f"{type(error).__name__}: {error}"}
    return {"text": "nothing was raised"}


def evaluated() -> dict[str, Any]:
    """Rank 0 evaluates between steps, rank 1 does not."""
    found: dict[str, Any] = {}
    for evaluates in (False, True):
        trainer = make("replay")
        for number in range(10):
            trainer.train_step(batch_of(number))
            if evaluates and dist.get_rank() == 0:
                trainer.evaluate([batch_of(100)])
        found[str(evaluates)] = digest(trainer)
    found["last"] = trainer.last_action
    found["located"] = locate(trainer.plans[0], batch_of(11))
    return found


def resumed() -> dict[str, Any]:
    trainer = make("replay")
    for number in range(8):
        trainer.train_step(batch_of(number))
    with tempfile.TemporaryDirectory() as folder:
        path = save_training(trainer, Path(folder) / "state.safetensors")
        for number in range(8, 16):
            trainer.train_step(batch_of(number))
        end = digest(trainer)
        again = make("replay")
        load_training(again, path)
    for number in range(8, 16):
        again.train_step(batch_of(number))
    return {"end": end, "again": digest(again)}


def stumbled() -> dict[str, Any]:
    """On rank 1 the key of a plan cannot be made, by an error that is none of ours."""
    trainer = make("replay")
    trainer.train_step(batch_of(0))
    if dist.get_rank() == 1:
        trainer.step.plan_key = lambda: {}["gone"]
    try:
        trainer.train_step(batch_of(1))
    except (CompressorError, KeyError) as error:
        return {"text": f"{type(error).__name__}: {error}"}
    return {"text": "nothing was raised"}


def left_alone() -> dict[str, Any]:
    """Rank 1 makes three steps, rank 0 a fourth one."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=8))
    torch.manual_seed(0)
    model = DistributedDataParallel(Mlp(), process_group=group)
    trainer = Trainer(TrainStep(model, loss_fn, adamw(model.parameters())), "replay")
    try:
        for number in range(3 if dist.get_rank() else 4):
            trainer.train_step(batch_of(number))
    except CompressorError as error:
        return {"text": f"{type(error).__name__}: {error}"}
    return {"text": "nothing was raised"}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"equal: {name}": lambda settings=settings: equal(settings) for name, settings in SETTINGS.items()},
    "by hand": by_hand,
    "uneven": uneven,
    "guard on rank 1": lambda: refused(6, "replay", drop_rate, 1),
    "host read on rank 0": lambda: refused(2, "replay", host_read, 0),
    "host read on rank 1 in capture mode": lambda: refused(4, "capture", list_read, 1),
    "proof on rank 0": lambda: refused(3, "replay", silenced, 0),
    "unsynchronized": unsynchronized,
    "settings": settings_differ,
    "evaluated": evaluated,
    "resumed": resumed,
    "stumbled": stumbled,
    "left alone": left_alone,
}


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=180))
    results = {}
    for name, case in CASES.items():
        print(name, file=sys.stderr, flush=True)  # where it hangs, if it does
        results[name] = case()
    print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
