"""Planted bugs in the session: the order of moments, the index, and what happens to the others when one modifier fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.mutants.patches import Edit, Mutant, Table

_SESSION = "compressor.lifecycle.session:Session."
_FOLLOWS = "compressor.lifecycle.events:FOLLOWS"
_SESSIONS = "machine.session"


def _also_after(moment: str, last: str) -> Table:
    """FOLLOWS, with a moment that may come after one more."""

    def change(follows: Mapping[Any, Any]) -> Mapping[Any, Any]:
        names = {one.name: one for one in follows}
        return {one: before | {names[last]} if one.name == moment else before for one, before in follows.items()}

    return Table(_FOLLOWS, change)


SESSION_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "any_order",
        "session",
        "every moment may come at any time",
        (Edit(_SESSION + "_exclusive", "if moment is not Call.ABORT and moment not in allowed:", "if False:"),),
        "lifecycle.illegal_calls",
    ),
    Mutant(
        "batch_ends_twice",
        "session",
        "BATCH_END may follow BATCH_END",
        (_also_after("BATCH_END", "BATCH_END"),),
        "lifecycle.illegal_calls",
    ),
    Mutant(
        "calibration_ends_before_start",
        "session",
        "CALIBRATION_END may come without CALIBRATION_START",
        (_also_after("CALIBRATION_END", "INITIALIZE"),),
        "lifecycle.illegal_calls",
    ),
    Mutant(
        "optimizer_before_loss",
        "session",
        "OPTIM_PRE_STEP may come before LOSS_CALCULATED",
        (_also_after("OPTIM_PRE_STEP", "BATCH_START"),),
        "lifecycle.illegal_calls",
    ),
    Mutant(
        "finalizes_in_calibration",
        "session",
        "finalize may come during a calibration",
        (_also_after("FINALIZE", "SEQUENTIAL_EPOCH_END"),),
        "lifecycle.illegal_calls",
    ),
    Mutant(
        "calibrates_twice",
        "session",
        "a second calibration may follow after a batch",
        (Table("compressor.lifecycle.events:ONCE", lambda once: frozenset()),),
        _SESSIONS,
    ),
    Mutant(
        "initialize_again_does_nothing",
        "session",
        "initialize after finalize is a silent no-op",
        (
            Edit(
                _SESSION + "initialize",
                "with self._exclusive(Call.INITIALIZE):",
                "if self._last is Call.FINALIZE:\n        return\n    with self._exclusive(Call.INITIALIZE):",
            ),
        ),
        "lifecycle.illegal_calls",
    ),
    Mutant(
        "refusal_counts",
        "session",
        "a moment that was refused is taken for the last one",
        (
            Edit(
                _SESSION + "_exclusive",
                '    raise LifecycleError(f"session: {_spell(moment)} is not',
                '    self._last = moment\n            raise LifecycleError(f"session: {_spell(moment)} is not',
            ),
        ),
        "lifecycle.illegal_calls",
    ),
    Mutant(
        "step_stands_still",
        "session",
        "the step never advances",
        (Edit(_SESSION + "send", "self._step = step", "pass"),),
        "lifecycle.completes",
    ),
    Mutant(
        "whole_epochs",
        "session",
        "the index counts whole epochs only",
        (Edit(_SESSION + "_index_at", "step / self.steps_per_epoch", "step // self.steps_per_epoch"),),
        "lifecycle.start_and_end",
    ),
    Mutant(
        "end_one_batch_late",
        "session",
        "BATCH_END still has the index of its beginning",
        (
            Edit(_SESSION + "send", "step = self._step + (event_type is EventType.BATCH_END)", "step = self._step"),
            Edit(_SESSION + "_commit", "self._last = moment", "self._last = moment\n    self._step += moment is EventType.BATCH_END"),
        ),
        "lifecycle.completes",
    ),
    Mutant(
        "no_loss_needed",
        "session",
        "LOSS_CALCULATED may come without a loss",
        (Edit("compressor.lifecycle.session:_check_payload", "not isinstance(loss, torch.Tensor)", "False"),),
        "lifecycle.illegal_calls",
    ),
    Mutant(
        "modules_are_lost",
        "session",
        "SEQUENTIAL_EPOCH_END does not carry the names of its modules",
        (Edit(_SESSION + "send", "tuple(modules))", "())"),),
        "lifecycle.completes",
    ),
    Mutant(
        "failed_initialize_is_final",
        "session",
        "a run that could not begin may not try again",
        (Edit(_SESSION + "initialize", "self._roll_back(flags)\n", "self._roll_back(flags)\n            self._commit(Call.ABORT)\n"),),
        "lifecycle.nothing_left",
    ),
    Mutant(
        "claims_after_failed_initialize",
        "session",
        "a run that could not begin keeps its claims and its entries in the report",
        (Edit(_SESSION + "initialize", "        bring_back()\n", "        pass\n"),),
        _SESSIONS,
    ),
    Mutant(
        "earlier_ones_stay_initialized",
        "session",
        "modifiers before the one that fails to initialize stay initialized",
        (Edit(_SESSION + "initialize", "self._roll_back(flags)", "self._roll_back()"),),
        _SESSIONS,
    ),
    Mutant(
        "earlier_ones_keep_flags",
        "session",
        "modifiers before the one that fails an event keep the flags that it gave them",
        (Edit(_SESSION + "send", "self._roll_back(flags)", "self._roll_back()"),),
        _SESSIONS,
    ),
    Mutant(
        "earlier_ones_keep_hooks",
        "session",
        "only the first modifier's hooks are removed when a run fails",
        (
            Edit(
                _SESSION + "_roll_back",
                "        modifier.remove_hooks()\n",
                "        if number == 0:\n            modifier.remove_hooks()\n",
            ),
        ),
        _SESSIONS,
    ),
    Mutant(
        "failed_run_goes_on",
        "session",
        "a run in which a callback failed may go on",
        (Edit(_SESSION + "send", "        self._commit(Call.ABORT)\n", "        pass\n"),),
        "lifecycle.nothing_left",
    ),
    Mutant(
        "failed_event_keeps_everything",
        "session",
        "nothing is rolled back when a callback fails in an event",
        (Edit(_SESSION + "send", "        self._roll_back(flags)\n", "        pass\n"),),
        "lifecycle.nothing_left",
    ),
    Mutant(
        "interrupt_keeps_everything",
        "session",
        "nothing is rolled back after a KeyboardInterrupt",
        (Edit(_SESSION + "send", "except BaseException:", "except Exception:"),),
        "lifecycle.nothing_left",
    ),
    Mutant(
        "first_failure_stops_finalize",
        "session",
        "the modifiers after one that fails to finalize are left as they are",
        (
            Edit(
                _SESSION + "finalize",
                "errors += self._finalize_error(modifier)",
                "errors += [] if errors else self._finalize_error(modifier)",
            ),
        ),
        _SESSIONS,
    ),
    Mutant(
        "one_error_of_many",
        "session",
        "only the first of several errors in finalize is reported",
        (Edit(_SESSION + "finalize", 'failed to finalize", errors)', 'failed to finalize", errors[:1])'),),
        _SESSIONS,
    ),
    Mutant(
        "unwilling_finalize_is_done",
        "session",
        "False from on_finalize counts as done",
        (Edit(_SESSION + "_finalize_error", "return [] if done else", "return [] if done is not None else"),),
        "lifecycle.nothing_left",
    ),
    Mutant(
        "callbacks_drive_the_session",
        "session",
        "a callback may call its session again",
        (
            Edit(
                _SESSION + "_exclusive",
                "if not self._busy.acquire(blocking=False):",
                "if not self._busy.acquire(blocking=False) and False:",
            ),
            Edit(_SESSION + "_exclusive", "self._busy.release()", "pass"),
        ),
        _SESSIONS,
    ),
    Mutant(
        "with_block_forgets",
        "session",
        "leaving the with block by an exception aborts nothing",
        (Edit(_SESSION + "__exit__", "if kind is not None:\n        self.abort()", "if kind is not None:\n        return"),),
        "lifecycle.nothing_left",
    ),
    Mutant(
        "abort_forgets_originals",
        "session",
        "abort does not put the originals back",
        (Edit(_SESSION + "_roll_back", "self.state.restore_originals()", "pass"),),
        "lifecycle.rolls_back",
    ),
    Mutant(
        "sleeps_alone",
        "session",
        "hooks_disabled() puts only the first modifier's hooks to sleep",
        (Edit(_SESSION + "hooks_disabled", "in self.modifiers:", "in self.modifiers[:1]:"),),
        _SESSIONS,
    ),
)
