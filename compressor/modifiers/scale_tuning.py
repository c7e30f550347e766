"""ScaleTuningModifier: when all codes are known, train scales and norms so that the whole model predicts what it predicted before.

It stands behind the modifiers that quantize. At the start of the calibration it records what the uncompressed model predicts; at the end,
when every module is compressed, it trains. Nothing of it is kept between: a resumed run records and trains again, to the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from pydantic import Field, PrivateAttr

from compressor.algorithms.costs import Memory, Work
from compressor.errors import CalibrationError, RecipeError, SchemeError
from compressor.lifecycle import CalibrationNeed, Event, Modifier, ModuleRecord, State
from compressor.lifecycle.hooks import without_modifier_hooks
from compressor.lifecycle.interface import AcrossRanks
from compressor.lifecycle.state import Detail, StageValue
from compressor.model.evaluation import evaluation_mode
from compressor.modifiers.tuning.base_outputs import BaseOutputs, training_memory
from compressor.modifiers.tuning.budget import Budget, Outcome, tune
from compressor.modifiers.tuning.moves import Moves
from compressor.modifiers.tuning.sequences import Split
from compressor.tracing.footprint import Footprint


class ScaleTuningModifier(Modifier):
    """Train group scales and norm weights against the divergence from the uncompressed model, with codes fixed.

    Attributes:
        steps: of Adam, at most.
        batch_size: sequences in a step, at most.
        lr: by how much a step moves a weight of typical size at the peak, in steps of its grid; rises over a tenth of the steps, falls as
            a cosine.
        held_out_frac: share of the calibration sequences that no step sees, on which the best state is chosen.
        evaluate_every: steps between two measurements on these; None: an eighth of all, at least 4.
        patience: measurements without a better state, after which it stops.
        tune_norms: train weights and biases of norms, too.
        seed: of the split and the order; None: that of the run.
    """

    needs_all_layers: ClassVar[bool] = True
    across_ranks: ClassVar[AcrossRanks | None] = "repeats"

    steps: int = Field(default=64, gt=0)
    batch_size: int = Field(default=8, gt=0)
    lr: float = Field(default=7.5e-3, gt=0, le=1)
    held_out_frac: float = Field(default=0.125, gt=0, lt=1)
    evaluate_every: int | None = Field(default=None, gt=0)
    patience: int = Field(default=4, gt=0)
    tune_norms: bool = True
    seed: int | None = Field(default=None, ge=0, lt=2**62)

    _base: BaseOutputs | None = PrivateAttr(default=None)
    _before: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def calibration_need(self) -> CalibrationNeed:
        """`basic`: data, in whatever way the other modifiers want it to flow."""
        return "basic"

    def on_initialize(self, state: State) -> bool:
        """Refuse formats whose scales cannot be trained, before any data is read."""
        powers = [name for name, scheme in state.schemes.items() if scheme.weights is not None and scheme.weights.is_mx]
        if powers:
            raise SchemeError(
                f"{self.label}: {powers[0]} (one of {len(powers)}) gets an MX format, whose scales, powers of two, cannot be trained; "
                "give integers, fp8 or NVFP4, or leave it out"
            )
        self._base, self._before = None, frozenset(state.schemes)
        return True

    def check_recipe(self, state: State) -> None:
        """Refuse a recipe that quantizes nothing before it, or something behind it; all modifiers have been initialized.

        Args:
            state: of the session, or of a plan.

        Raises:
            RecipeError: it does.
        """
        if not state.schemes:
            raise RecipeError(
                f"{self.label}: no modifier before it quantizes weights, so no scales can be trained; put one before it, or leave it out"
            )
        late = [name for name in state.schemes if name not in self._before]
        if late:
            raise RecipeError(f"{self.label}: {late[0]} (one of {len(late)}) is quantized by a modifier behind it; let it stand last")

    def on_calibration_start(self, state: State, event: Event) -> None:
        """Record what the model predicts before anything is compressed; without data there is nothing to record."""
        del event
        if state.data is None:
            return
        self.check_recipe(state)
        if state.data.num_samples < 2:
            raise CalibrationError(f"{self.label}: {state.data.num_samples} sequence was given; give at least 2, of which one is held out")
        with without_modifier_hooks(state.model), evaluation_mode(state.model), Footprint(state.model):
            self._base = BaseOutputs(state.model, state.data, state.device, self.label)

    def on_calibration_end(self, state: State, event: Event) -> None:
        """Train; every modifier that stands before this one has compressed its modules by now."""
        del event
        base, self._base = self._base, None
        if base is None:
            state.report.notes.append(f"{self.label}: no calibration data was at hand, so nothing was trained")
            return
        seed = state.seed % 2**62 if self.seed is None else self.seed
        split = base.split(self.held_out_frac, seed)
        with evaluation_mode(state.model), Footprint(state.model), state.progress.task("tune scales", total=self.steps) as task:
            moves = Moves(state.model, state.schemes, norms=(lambda: base.error(split.held_out[:1])) if self.tune_norms else None)
            outcome = tune(moves, base, state.model, split, self._budget(seed), lambda note: task.advance(1, note=note))
            task.advance(self.steps - outcome.steps)
        changed = moves.settle(state) if outcome.best_step else {}
        self._report(state, base, split, outcome, changed, moves)
        state.report.notes += moves.unreached.notes(self.label)

    def stage_memory(self, modules: Sequence[str]) -> Mapping[str, StageValue]:
        """Nothing: what a stage made is the work of others, and tuning begins anew when all stages are there."""
        del modules
        return {}

    def forwards_of_training(self, num_samples: int) -> float:
        """Say what it costs: one forward of everything, measurements on what is held out, and steps of a forward and a backward each.

        Args:
            num_samples: calibration sequences.

        Returns:
            Forwards of one sequence; a backward counts as two.
        """
        held_out = min(max(1, round(self.held_out_frac * num_samples)), max(1, num_samples - 1))
        measurements = 1 + -(-self.steps // self._every)
        return num_samples + measurements * held_out + 3 * self.steps * min(self.batch_size, num_samples)

    @property
    def needs_gradients(self) -> bool:
        """True: its forwards keep something for a backward."""
        return True

    def own_memory(self, work: Work) -> Memory:
        """Say what it takes: every compressed layer holds a float weight, which scales make anew in each step."""
        return training_memory(work, self.batch_size, work.changed_bytes)

    @property
    def _every(self) -> int:
        return self.evaluate_every or max(4, self.steps // 8)

    def _budget(self, seed: int) -> Budget:
        return Budget(self.steps, self.batch_size, self.lr, max(1, self.steps // 10), self._every, self.patience, seed)

    def _report(self, state: State, base: BaseOutputs, split: Split, outcome: Outcome, changed: Mapping[str, float], moves: Moves) -> None:
        for name, step in changed.items():
            known = state.report.modules.get(name)
            if known is None:  # a norm
                state.touch([name])
                known = ModuleRecord(name, type(self).__name__, "trained", step)
            details: dict[str, Detail] = {**known.details, "tuned": step}
            state.report.modules[name] = replace(known, details=details)
        moved = f"scales of {len(moves.scales)} layers and {len({name.rpartition('.')[0] for name in moves.norms})} norms"
        spent = f"{outcome.steps} of {self.steps} steps of {min(self.batch_size, len(split.trained))} sequences for {moved}"
        numbers = f"{outcome.before:.6g} -> {outcome.after:.6g} on {len(split.held_out)} held-out sequences (best after step "
        seen = f"{outcome.trained_before:.6g} -> {outcome.trained_after:.6g} on {len(split.trained)} that were trained on"
        if outcome.best_step:
            text = f"{base.measure} {numbers}{outcome.best_step}), {seen}; {spent}"
        else:
            text = f"{base.measure} did not fall below {outcome.before:.6g} on held-out sequences ({seen}; {spent}); nothing was changed"
        early = "; it stopped early" if outcome.steps < self.steps else ""
        state.report.notes.append(f"{self.label}: {text}{early}; {base.num_bytes / 1e6:.1f} MB of base outputs were kept meanwhile")
