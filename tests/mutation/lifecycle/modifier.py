"""Planted bugs in the lifecycle of one modifier: when it starts and ends, which callbacks come, what a failure leaves."""

from __future__ import annotations

from harness.mutants.patches import Edit, Mutant, Table

_MODIFIER = "compressor.lifecycle.modifier:Modifier."
_MACHINE = "machine.modifier"

MODIFIER_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "starts_late",
        "modifier",
        "the start itself is not reached yet: start < index",
        (Edit(_MODIFIER + "should_start", "self.start <= index", "self.start < index"),),
        "lifecycle.completes",
    ),
    Mutant(
        "starts_after_end",
        "modifier",
        "an index beyond the end still starts the modifier",
        (Edit(_MODIFIER + "should_start", "(self.end is None or index < self.end)", "True"),),
        "lifecycle.start_and_end",
    ),
    Mutant(
        "never_ends",
        "modifier",
        "the end never fires",
        (Edit(_MODIFIER + "should_end", "self.end is not None and index >= self.end", "False"),),
        "lifecycle.completes",
    ),
    Mutant(
        "ends_late",
        "modifier",
        "the end itself is not the end yet: index > end",
        (Edit(_MODIFIER + "should_end", "index >= self.end", "index > self.end"),),
        "lifecycle.completes",
    ),
    Mutant(
        "never_starts_at_initialize",
        "modifier",
        "start=0 waits for the first batch",
        (Edit(_MODIFIER + "initialize", "if self.should_start(0.0):", "if False:"),),
        "lifecycle.start_and_end",
    ),
    Mutant(
        "updates_counted_from_zero",
        "modifier",
        "update intervals are counted from index 0, not from start",
        (Edit(_MODIFIER + "_note_period", "(self.start or 0.0)", "0.0"),),
        "lifecycle.completes",
    ),
    Mutant(
        "updates_always",
        "modifier",
        "the update interval is ignored",
        (Edit(_MODIFIER + "should_update", "not self.update or self._lifecycle_flags.due", "True"),),
        "lifecycle.completes",
    ),
    Mutant(
        "updates_after_end",
        "modifier",
        "on_update still comes after the end",
        (Edit(_MODIFIER + "_fits", "row.ended in (None, self._lifecycle_flags.ended)", "True"),),
        "lifecycle.completes",
    ),
    Mutant(
        "rounds_periods",
        "modifier",
        "the rounding of fractional epochs is not absorbed, so that 0.3 lies in the interval before it",
        (Edit(_MODIFIER + "_note_period", " + 1e-9", ""),),
        "lifecycle.start_and_end",
    ),
    Mutant(
        "no_update_after_start",
        "modifier",
        "on_start is not followed by on_update",
        (
            Table(
                "compressor.lifecycle.modifier:TRANSITIONS",
                lambda rows: tuple(row._replace(callbacks=("on_start",)) if "on_start" in row.callbacks else row for row in rows),
            ),
        ),
        "lifecycle.completes",
    ),
    Mutant(
        "some_events_only",
        "modifier",
        "on_event comes only while the modifier is active",
        (Edit(_MODIFIER + "update_event", "self.on_event(state, event)", "self.started and self.on_event(state, event)"),),
        "lifecycle.completes",
    ),
    Mutant(
        "calibration_does_not_end",
        "modifier",
        "CALIBRATION_END does not set ended",
        (
            Table(
                "compressor.lifecycle.modifier:TRANSITIONS",
                lambda rows: tuple(row._replace(sets=None) if "on_calibration_end" in row.callbacks else row for row in rows),
            ),
        ),
        "lifecycle.completes",
    ),
    Mutant(
        "none_is_true",
        "modifier",
        "a callback that forgets to return counts as willing",
        (
            Edit(
                _MODIFIER + "_checked_bool",
                "if not isinstance(answer, bool):",
                "answer = True if answer is None else answer\n    if False:",
            ),
        ),
        "lifecycle.nothing_left",
    ),
    Mutant(
        "garbage_is_true",
        "modifier",
        "anything true counts as True",
        (Edit(_MODIFIER + "_checked_bool", "if not isinstance(answer, bool):", "answer = bool(answer)\n    if answer is None:"),),
        _MACHINE,
    ),
    Mutant(
        "initializes_twice",
        "modifier",
        "an initialized modifier initializes again",
        (
            Edit(
                _MODIFIER + "_calling",
                "if (before.initialized, before.finalized) != CALLS[method]:",
                "if method != 'initialize' and (before.initialized, before.finalized) != CALLS[method]:",
            ),
        ),
        "lifecycle.illegal_calls",
    ),
    Mutant(
        "works_after_finalize",
        "modifier",
        "a finalized modifier takes events and finalizes again",
        (Edit(_MODIFIER + "_calling", "(before.initialized, before.finalized) != CALLS", "(before.initialized, False) != CALLS"),),
        "lifecycle.illegal_calls",
    ),
    Mutant(
        "drives_itself",
        "modifier",
        "a callback may call its own modifier again",
        (Edit(_MODIFIER + "_calling", "if self._running_method is not None:", "if False:"),),
        _MACHINE,
    ),
    Mutant(
        "flags_after_error",
        "modifier",
        "a callback that raises leaves the flags that were set before it",
        (Edit(_MODIFIER + "_calling", "        self._lifecycle_flags = before\n", ""),),
        _MACHINE,
    ),
    Mutant(
        "flags_after_interrupt",
        "modifier",
        "a KeyboardInterrupt leaves the flags that were set before it",
        (Edit(_MODIFIER + "_calling", "except BaseException:", "except Exception:"),),
        _MACHINE,
    ),
    Mutant(
        "period_after_error",
        "modifier",
        "a batch that failed counts as the first of its update interval",
        (
            Edit(
                _MODIFIER + "_calling",
                "self._lifecycle_flags = before",
                "self._lifecycle_flags = before._replace(period=self._lifecycle_flags.period, due=self._lifecycle_flags.due)",
            ),
        ),
        _MACHINE,
    ),
    Mutant(
        "hooks_after_failed_initialize",
        "modifier",
        "hooks stay when on_initialize raises",
        (Edit(_MODIFIER + "_calling", "if drop_hooks:", "if False:"),),
        _MACHINE,
    ),
    Mutant(
        "hooks_after_unwilling_initialize",
        "modifier",
        "hooks stay when on_initialize says False",
        (Edit(_MODIFIER + "initialize", "else:\n            self.remove_hooks()", "else:\n            pass"),),
        _MACHINE,
    ),
    Mutant(
        "hooks_after_finalize",
        "modifier",
        "hooks stay after finalize",
        (Edit(_MODIFIER + "finalize", "self.remove_hooks()", "pass"),),
        _MACHINE,
    ),
    Mutant(
        "swallows_errors",
        "modifier",
        "an exception in a callback is swallowed",
        (Edit(_MODIFIER + "_calling", "        raise\n", "        pass\n"),),
        "lifecycle.nothing_left",
    ),
)
