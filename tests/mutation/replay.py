"""Planted bugs in captured training steps, against the hazards of `harness replay hazards`; the bugs stand in replay_bugs.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from compressor.errors import BindError
from harness.mutants.family import Family, Killer
from harness.mutants.patches import Mutant
from tests.mutation.replay_bugs import MUTANTS


def _hazard(name: str) -> str | None:
    from harness.replay.hazards.registry import all_hazards, run_hazard

    result = run_hazard(*all_hazards()[name], modes=("replay",))
    return None if result.is_well else f"{result.outcome.value}: {result.detail.splitlines()[0]}"


def _binds() -> str | None:
    """A plan that is handed a batch of one row must not let it broadcast into its buffers."""
    from compressor.training import Trainer, TrainStep
    from harness.replay.hazards.building_blocks import Net, classify, default_optimizer, vectors

    model = Net()
    trainer = Trainer(TrainStep(model, classify, default_optimizer(model.parameters())), "replay", audit_every=0)
    for number in range(5):
        trainer.train_step(vectors(number))
    try:
        trainer.plans[0](vectors(5, rows=1))
    except BindError:
        return None
    return "a plan of 6 rows took a batch of 1 row"


def _killers(mutant: Mutant | None) -> Sequence[Killer]:
    """The one that the bug names looks first: which of forty hazards sees it besides is not worth forty looks."""
    names = dict.fromkeys(one.killer.removeprefix("hazards.") for one in MUTANTS if one.killer.startswith("hazards."))
    killers = [Killer("plan.binds", _binds), *(Killer(f"hazards.{name}", partial(_hazard, name)) for name in names)]
    return sorted(killers, key=lambda killer: mutant is not None and killer.name != mutant.killer)


FAMILY = Family("replay", {mutant.name: mutant for mutant in MUTANTS}, _killers)
