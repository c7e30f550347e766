"""What a machine draws: times, calls in and out of order, and callbacks that misbehave.

Everything is drawn from small sets of telling values, simplest first, so that a counter-example shrinks to something a reader can run
in his head.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from harness.lifecycle.driving.callback_recorder import OWN, Act, Acts
from harness.lifecycle.oracle import ANSWERING, EVENTS, MOMENTS, Settings

# Literals as a recipe would hold them; thirds and tenths because floats cannot hold them.
_STARTS = (0.0, 1.0, 2.0, 3.0, 0.5, 1.5, 0.1, 0.3, 1 / 3, 2 / 3, -1.0)
_ENDS = (1.0, 2.0, 3.0, 4.0, 0.5, 2.5, 0.3, 0.7, 1 / 3, 4 / 3, 0.0)
_UPDATES = (0.0, 1.0, 2.0, 3.0, 0.5, 1.5, 0.1, 0.2, 1 / 3)
_EPOCHS = (1, 2, 3, 4, 5, 5, 6, 7, 10, 10)
_GARBAGE: tuple[object, ...] = (None, 1, 0, "True", [], 1.0)
_HOOK_KINDS = ("forward_pre", "forward", "forward_pre+kwargs", "forward+kwargs", "forward+always", "forward+always")
_PLACES = ("first", "second")


@st.composite
def _settings(draw: st.DrawFn, steps_per_epoch: int | None = None) -> Settings:
    """Draw settings that a modifier accepts: an end that is not after the start is left out.

    Where an epoch has steps, half of all times lie exactly on one: there a float that is not quite what it stands for would show.
    """
    on_steps = steps_per_epoch is not None and draw(st.booleans())
    grid = [number / (steps_per_epoch or 1) for number in range(1, 7)] if on_steps else []
    start = draw(st.sampled_from((None, None, *(grid or _STARTS))))
    end = draw(st.sampled_from((None, None, None, *(grid or _ENDS))))
    updates = grid or list(_UPDATES)
    update = draw(st.sampled_from((*[None] * len(updates), *updates)))
    return Settings(start, None if start is not None and end is not None and end <= start else end, update)


settings = _settings()


@dataclass(frozen=True)
class Setup:
    """How a run begins."""

    settings: tuple[Settings, ...] = (Settings(),)
    steps_per_epoch: int | None = None
    keep_originals: bool = False


@st.composite
def _setups(draw: st.DrawFn) -> Setup:
    steps_per_epoch = draw(st.sampled_from((None, None, None, *_EPOCHS)))
    modifiers = draw(st.lists(_settings(steps_per_epoch), min_size=1, max_size=3))
    return Setup(tuple(modifiers), steps_per_epoch, draw(st.booleans()))


setups = _setups()
begins = st.sampled_from((False, True, True, True))
"""Initialize at once: most of what can go wrong comes later."""

_hook_steps = st.builds("hook {} {}".format, st.sampled_from(_HOOK_KINDS), st.sampled_from(_PLACES))
_unhook_steps = st.sampled_from(("unhook", "unhook all"))
hook_steps = _hook_steps | _hook_steps | st.sampled_from(("unhook", "unhook", "unhook all"))
_replace_steps = st.builds("replace {}".format, st.sampled_from(_PLACES))
_claim_steps = st.builds("claim {}".format, st.sampled_from(_PLACES))
_again_steps = st.sampled_from(("again initialize", "again update_event", "again finalize"))
_reenter_steps = st.builds("{} {}".format, st.sampled_from(("reenter", "reenter", "thread")), st.sampled_from((*MOMENTS, "ABORT")))

StepKinds = tuple[SearchStrategy[str], ...]
OBEDIENT_STEPS: StepKinds = (
    _hook_steps,
    _hook_steps,
    _hook_steps,
    _unhook_steps,
    _replace_steps,
    _replace_steps,
    _claim_steps,
    _reenter_steps,
    _again_steps,
    st.just("neighbour"),
)
SOLO_STEPS: StepKinds = (_hook_steps, _hook_steps, _hook_steps, _unhook_steps, _replace_steps, _again_steps)
GUEST_STEPS: StepKinds = (_reenter_steps, _again_steps)


@functools.cache
def _acts_of(callback: str, kinds: StepKinds, faulty: bool) -> SearchStrategy[Act]:
    some = st.lists(st.one_of(kinds), min_size=1, max_size=2).map(tuple)
    if not faulty:
        return st.builds(Act, steps=some)
    before = some | st.just(()) | some
    endings = st.sampled_from(("raised", "raised", "raised", "interrupted"))
    raising = st.builds(Act, steps=before, ending=endings, skip_own=st.booleans(), answer=st.just(OWN))
    nonsense = st.just(False) | st.sampled_from(_GARBAGE)
    return raising | st.builds(Act, steps=before if callback in ANSWERING else st.just(()), answer=nonsense)


@functools.cache
def acts(keys: tuple[tuple[int, str], ...], kinds: StepKinds = OBEDIENT_STEPS, often_wrong: bool = False) -> SearchStrategy[Acts]:
    """Return a strategy for what callbacks do during one call: mostly nothing, often something harmless, sometimes something wrong.

    Args:
        keys: modifier and name of the callbacks that may come.
        kinds: the small things that they may do.
        often_wrong: where a failure ends nothing, half of the calls may fail.

    Returns:
        A strategy for acts by callback.
    """
    if not keys:
        return st.just({})

    def entries(faulty: bool) -> SearchStrategy[Acts]:
        entry = st.sampled_from(keys).flatmap(lambda key: st.tuples(st.just(key), _acts_of(key[1], kinds, faulty)))
        return st.lists(entry, min_size=1, max_size=3, unique_by=operator.itemgetter(0)).map(dict)

    nothing: SearchStrategy[Acts] = st.just({})
    if often_wrong:
        return st.one_of(nothing, entries(faulty=False), entries(faulty=True), entries(faulty=True))
    return st.one_of(nothing, entries(faulty=False), nothing, entries(faulty=False), nothing, entries(faulty=True))


events = st.sampled_from((*EVENTS, "BATCH_START", "BATCH_START", "BATCH_END"))
moments = st.sampled_from(MOMENTS)
places = st.sampled_from(_PLACES)
