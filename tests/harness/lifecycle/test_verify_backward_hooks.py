"""Hooks of a backward are a modifier's as those of a forward are: they sleep where it says so, and run in a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from compressor.lifecycle import Event, Modifier, State
from compressor.lifecycle.hooks import HookKind
from harness.lifecycle.verify import verify
from harness.reporting.verdict import Outcome

NESTED = "lifecycle.nested_contexts"


class CountsGradients(Modifier):
    start: float | None = 0
    end: float | None = 2
    kind: HookKind = "full_backward"

    _count: int = 0

    def on_initialize(self, state: State) -> bool:
        return True

    def on_start(self, state: State, event: Event) -> None:
        self.register_hook(state.model.get_submodule("lm_head"), self.seen(), self.kind)

    def seen(self) -> Callable[..., None]:
        def add(*args: Any) -> None:
            self._count += 1

        return add

    def on_end(self, state: State, event: Event) -> None:
        self.remove_hooks()


class WakesTooEarly(CountsGradients):
    def disable_hooks(self) -> Any:
        number = self._num_disabled

        class Context:
            def __enter__(_) -> None:
                self._num_disabled = number + 1

            def __exit__(_, *error: object) -> None:
                self._num_disabled = 0

        return Context()


@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre"])
def test_hooks_of_a_backward_are_woken_by_a_backward(kind: HookKind) -> None:
    (record,) = [one for one in verify(CountsGradients(kind=kind), checks=[NESTED]).records if one.name == NESTED]
    assert record.outcome is Outcome.PASS, record.summary


def test_a_hook_of_a_backward_that_wakes_in_the_outer_context_is_found() -> None:
    (record,) = [one for one in verify(WakesTooEarly(), checks=[NESTED]).records if one.name == NESTED]
    assert record.outcome is Outcome.FAIL and "hooks ran inside disable_hooks" in record.summary, record.summary
