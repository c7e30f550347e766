"""What a run would refuse of recipe and config, found without weights and data.

Copies of the modifiers are initialized on a model that has shapes alone, in the order of the recipe and with the state that a run has: what
they refuse of each other and of the model, they refuse here, in the same words. All of it is undone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, runtime_checkable

from torch import nn

from compressor.errors import CompressorError, UserInputError
from compressor.lifecycle import Flags, Modifier, Session, State
from compressor.pipelines.settings import check_base_stream
from compressor.settings.verbs import PlanSettings
from compressor.tracing import Engine

# What a model or a modifier raises that asks for a value nobody has here, or that needs other inputs than token ids.
CANNOT_FOLLOW = (NotImplementedError, RuntimeError, ValueError, TypeError, AttributeError, LookupError)


@runtime_checkable
class _Reshaping(Protocol):
    def reshape(self, state: State) -> None:
        """Take out the modules that would go."""

    def check_first(self, state: State) -> None:
        """Refuse to come behind another modifier."""


@runtime_checkable
class _Checking(Protocol):
    def check_recipe(self, state: State) -> None:
        """Refuse what its neighbours in the recipe, and the config, rule out."""


@runtime_checkable
class _Turning(Protocol):
    def check_apart(self, state: State, before: Sequence[Modifier]) -> None:
        """Refuse a rotation in the forward where another has put one."""


@runtime_checkable
class _Finding(Protocol):
    @property
    def found_in_forwards(self) -> str:
        """What a run learns from the model's own forward, in words."""


@runtime_checkable
class _PerHead(Protocol):
    ignore: list[str]

    def kv_targets(self, model: nn.Module, ignore: Sequence[str]) -> dict[str, nn.Module]:
        """Find attention whose keys and values are quantized."""

    def checking_heads(self, modules: Mapping[str, nn.Module]) -> dict[str, Any]:
        """Make hooks that refuse other heads than readers count."""


@contextmanager
def reshaped(skeleton: nn.Module, modifiers: Sequence[Modifier]) -> Iterator[None]:
    """Take out what modifiers take out of the model, and put it back.

    Args:
        skeleton: without values; the same afterwards.
        modifiers: of the recipe.

    Yields:
        Nothing.
    """
    state = State(skeleton, keep_originals=True)
    try:
        for modifier in modifiers:
            if isinstance(modifier, _Reshaping):
                modifier.reshape(state)
        yield
    finally:
        state.restore_originals()


def refuse_budget(settings: PlanSettings, missing_bytes: int) -> None:
    """Refuse activations that are granted no place, which a run would find at its first stage that is too large.

    Args:
        settings: of the plan.
        missing_bytes: the most that activations need beyond their budget, estimated.

    Raises:
        UserInputError: there is no folder for them.
    """
    if missing_bytes and settings.offload_dir is None:
        raise UserInputError(
            f"activation_memory: {settings.activation_memory!r} was given, and about {missing_bytes:,} bytes more are live between layers "
            "at once (estimate); raise it, name an offload_dir for the rest, or take fewer or shorter samples"
        )


def refuse_recipe(skeleton: nn.Module, modifiers: Sequence[Modifier], pipeline: str, engine: Engine) -> str | None:
    """Refuse what a run would refuse of recipe and config before any data flows.

    Args:
        skeleton: the model without values, experts taken apart and `reshaped`; the same afterwards.
        modifiers: of the recipe; not changed.
        pipeline: that would run.
        engine: of the sequential pipeline, as it was asked for.

    Returns:
        Why not all of it could be tried; None where it could.

    Raises:
        CompressorError: whatever a run would raise.
    """
    twins, state = [_twin(one) for one in modifiers], State(skeleton, has_steps=False, keep_originals=True)
    sessions: list[Session] = []
    try:
        for twin in twins:
            if twin.reshapes and not isinstance(twin, _Reshaping):
                return f"{twin.label} changes the modules of the model, and has no method reshape that says how"
            if isinstance(twin, _Reshaping):
                twin.check_first(state)
                continue
            sessions.append(Session(state, [twin]))
            try:
                sessions[-1].initialize()
            except CANNOT_FOLLOW as error:
                if isinstance(error, CompressorError):
                    raise
                return f"{twin.label} asks for more than shapes when it is initialized ({' '.join(str(error).split())[:160]})"
        _refuse_together(state, twins, pipeline, engine)
    finally:
        for session in reversed(sessions):
            session.abort()
        state.restore_originals()
    return None


def left_to_forwards(modifiers: Sequence[Modifier]) -> list[str]:
    """Say what only a forward of the weights shows.

    Args:
        modifiers: of the recipe.

    Returns:
        Notes.
    """
    finding = [one for one in modifiers if isinstance(one, _Finding)]
    return [f"{one.label}: {one.found_in_forwards} shows in a forward of the weights, so that a run may refuse it" for one in finding]


def try_forward(skeleton: nn.Module, modifiers: Sequence[Modifier], follow: Callable[[], object]) -> list[str]:
    """Refuse, or say, what a run would refuse that a forward on shapes shows.

    Args:
        skeleton: see `refuse_recipe`, but not yet `reshaped`; the same afterwards.
        modifiers: of the recipe.
        follow: runs a forward of the skeleton.

    Returns:
        Notes; none where no forward can be followed on shapes, whatever the recipe.

    Raises:
        SchemeError: attention hands other heads to its cache than readers count.
    """
    reshaping = [one.label for one in modifiers if isinstance(one, _Reshaping)]
    checks = [one.checking_heads(one.kv_targets(skeleton, one.ignore)) for one in modifiers if isinstance(one, _PerHead)]
    if not reshaping and not any(checks):
        return []
    try:
        follow()
        with reshaped(skeleton, modifiers), ExitStack() as hooks:
            for name, check in (pair for hooked in checks for pair in hooked.items()):
                hooks.callback(skeleton.get_submodule(name).register_forward_pre_hook(check, with_kwargs=True).remove)
            return _followed(reshaping, follow)
    except CANNOT_FOLLOW as error:
        if isinstance(error, CompressorError):
            raise
        return []


def _followed(reshaping: Sequence[str], follow: Callable[[], object]) -> list[str]:
    """Say when what is left of a model that could be followed cannot be."""
    try:
        follow()
    except CANNOT_FOLLOW as error:
        if isinstance(error, CompressorError) or not reshaping:
            raise
        reason = " ".join(str(error).split())[:160]
        return [f"{' and '.join(reshaping)}: no forward can be followed on shapes of what is left ({reason}), so that a run may refuse it"]
    return []


def _refuse_together(state: State, twins: Sequence[Modifier], pipeline: str, engine: Engine) -> None:
    for place, twin in enumerate(twins):
        if isinstance(twin, _Checking):
            twin.check_recipe(state)
        if isinstance(twin, _Turning):
            twin.check_apart(state, twins[:place])
    if pipeline == "sequential":
        check_base_stream(twins, engine, "asked for")


def _twin(modifier: Modifier) -> Modifier:
    """A modifier that shares no table with the other, was never used, and does not start: what starts works on values."""
    twin = modifier.model_copy(update={} if modifier.start is None else {"start": math.inf})
    for held in (twin.__dict__, twin.__pydantic_private__ or {}):
        held.update({name: copy.copy(value) for name, value in held.items() if isinstance(value, dict | list | set)})
    twin.restore_flags(Flags())
    return twin
