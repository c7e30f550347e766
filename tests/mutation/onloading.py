"""Planted bugs in weights that come to the device stretch by stretch, against a device that is made of main memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from harness.mutants.family import Family, Killer
from harness.mutants.patches import Edit, Mutant
from tests.compressor.pipelines.offload.simulated_device import Simulated

STRETCHES = ("a", "ab", "b")
_BYTES = 4 * (16 + 4)  # of each, and of what lies in none


class _Chain(nn.Module):
    """Three stretches, of which one name begins with another, and a layer that lies in none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in (*STRETCHES, "rest"):
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


class _Small(Simulated):
    room = 2 * _BYTES


def _onloaded(model: nn.Module, kind: type[Simulated] = Simulated) -> Simulated:
    return kind(model, STRETCHES, torch.device("cpu"))


def _addresses(model: nn.Module) -> dict[str, int]:
    return {name: one.data_ptr() for name, one in model.named_parameters()}


@torch.no_grad()
def _order() -> str | None:
    model = _Chain()
    before, x = _addresses(model), torch.ones(2, 4)
    expected = model(x)
    with _onloaded(model) as device:
        found = model(x)
    wanted = [("asked", None), ("used", None), ("needed", "a"), ("asked", "a"), ("used", "a"), ("asked", "ab")]
    wanted += [("needed", "ab"), ("used", "ab"), ("asked", "b"), ("needed", "b"), ("used", "b")]
    if not torch.equal(found, expected):
        return "another result"
    if device.events != wanted:
        return f"other events: {device.events}"
    if device.most_at_hand != 1 or device.resident:
        return f"{device.most_at_hand} stretches at hand, {device.resident} bytes stay"
    return None if _addresses(model) == before else "parameters lie elsewhere than before"


@torch.no_grad()
def _held() -> str | None:
    model = _Chain()
    before = _addresses(model)
    with _onloaded(model) as device:
        for name in STRETCHES:
            device.hold([name])
            away = {key.partition(".")[0] for key, place in _addresses(model).items() if place != before[key]}
            if away != {name, "rest"}:
                return f"when {name} is held, {sorted(away)} are on the device"
    return None if _addresses(model) == before else "parameters lie elsewhere than before"


@torch.no_grad()
def _written() -> str | None:
    model = _Chain()
    doubled = {name: 2 * one for name, one in model.state_dict().items()}
    with _onloaded(model) as device:
        for name in STRETCHES:
            device.hold([name])
            for one in model.get_submodule(name).parameters():
                one.mul_(2)
        for one in model.rest.parameters():
            one.mul_(2)
    lost = [name for name, one in model.state_dict().items() if not torch.equal(one, doubled[name])]
    return f"{lost[0]} is not as it was written" if lost else None


@torch.no_grad()
def _written_ahead() -> str | None:
    model = _Chain()
    with _onloaded(model) as device:
        device.hold(["a"])
        device._coming["ab"].copies.result()  # it is on its way
        model.ab.weight.fill_(3)
        device.hold(["ab"])
        seen = bool((model.ab.weight == 3).all())
    return None if seen and bool((model.ab.weight == 3).all()) else "what was written while a copy was on its way is lost"


@torch.no_grad()
def _room() -> str | None:
    model = _Chain()
    with _onloaded(model, _Small) as device:
        try:
            for name in STRETCHES:
                device.hold([name])
                for coming in device._coming.values():
                    coming.copies.exception()  # asked for while this one is here; a thread that is late would find room
        except torch.OutOfMemoryError:
            return "a device with room for one stretch is not enough"
    return None if device.most_resident == _Small.room else f"{device.most_resident} bytes at most"


KILLERS = [
    Killer(f"onload.{name}", look)
    for name, look in {
        "order": _order,
        "held": _held,
        "written": _written,
        "written_ahead": _written_ahead,
        "room": _room,
    }.items()
]


def _edit(name: str, wrong: str, killer: str, where: str, old: str, new: str) -> Mutant:
    return Mutant(name, "onload", wrong, (Edit(f"compressor.pipelines.offload.onload:{where}", old, new),), f"onload.{killer}")


MUTANTS: Sequence[Mutant] = (
    _edit("stays", "a stretch never goes", "order", "WeightsByStretch.put_away", "for target in going:", "for target in ():"),
    _edit("stays_at_the_end", "stretches stay at the end", "held", "WeightsByStretch.__exit__", "self.put_away()", "pass"),
    _edit("not_ahead", "nothing is copied ahead of its time", "order", "OnloadedWeights._look_ahead", "+ 1 :][:1]", "+ 1 :][:0]"),
    _edit("too_far_ahead", "the one after the next is copied ahead", "order", "OnloadedWeights._look_ahead", "+ 1 :][:1]", "+ 2 :][:1]"),
    _edit("held_by_prefix", "a stretch is held for a name that begins alike", "held", "_lies_in", '{target}.")', '{target}")'),
    _edit("not_held", "what is held is not brought", "held", "WeightsByStretch.hold", "self._need(target)", "pass"),
    _edit("not_written", "what was written on the device is lost", "written", "OnloadedWeights._return", "!= brought", "is None"),
    _edit(
        "stale_copy",
        "a copy on its way is taken although its original was written to",
        "written_ahead",
        "_same",
        "[one._version for one in own] == coming.versions",
        "True",
    ),
    _edit("no_second_try", "what found no room ahead of its time fails", "room", "_found_no_room", "error is not None and", "False and"),
)


def _killers(mutant: Mutant | None) -> Sequence[Killer]:
    return KILLERS


FAMILY = Family("onloading", {mutant.name: mutant for mutant in MUTANTS}, _killers)
