"""The state a model is in while calibration data flows: evaluation mode, no growing caches; all of it undone afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from compressor.data import CalibrationData
from compressor.errors import CalibrationError
from compressor.lifecycle import Session, State
from compressor.model.evaluation import evaluation_mode
from compressor.numerics.checksum import checksum
from compressor.tracing import Watched

# Which modules the modifiers of a session are looking at now: those that carry their calibration hooks.


def watched_modules(session: Session, *, keeping: bool = False) -> Watched:
    """Find the hooked modules.

    Args:
        session: its modifiers own the hooks.
        keeping: only those on which hooks may keep statistics.

    Returns:
        Dotted names, in the order of the model.
    """
    # By identity, because a hook knows its module and not the module's name, which may be several.
    looking = [modifier for modifier in session.modifiers if modifier.keeps_on_modules or not keeping]
    hooked = {id(module) for modifier in looking for module, _ in modifier.hooked_modules()}
    return tuple(name for name, module in session.state.model.named_modules() if id(module) in hooked)


@contextmanager
def calibration_mode(state: State) -> Iterator[None]:
    """Switch dropout and key/value caches off for the duration, and forget the token mask at the end. Changes the model.

    Args:
        state: of the session.

    Yields:
        Nothing.
    """
    try:
        with evaluation_mode(state.model):
            yield
    finally:
        state.leave_batch()
        state.base_stream, state.has_base_stream = False, False


def note_kept(state: State, kept: Collection[str]) -> None:
    """Say in the report that batches do not see what the model keeps of those before them.

    Args:
        state: of the session; changed.
        kept: attributes of modules by which a batch would change what the next one gives.
    """
    if kept:
        names = ", ".join(kept)
        state.report.notes.append(f"{names} would pass from batch to batch; every batch starts with the state of the model")


def note_proof(state: State, widened: str) -> None:
    """Say in the report why all batches were run beforehand, if they were.

    Args:
        state: of the session; changed.
        widened: the reason; empty where a few batches were enough.
    """
    if widened:
        state.report.notes.append(f"all batches were held against the plain model before the first stage, for {widened}")


def set_token_mask(state: State, data: CalibrationData, index: int) -> None:
    """Give the modifiers the mask and the shape of the batch that is about to run. Changes the state.

    Args:
        state: of the session.
        data: the batches with their masks.
        index: number of the batch.
    """
    state.enter_batch(data, index)


def check_alike(state: State, names: Sequence[str]) -> None:
    """Refuse to go on where ranks have made different things of one stage.

    Args:
        state: of the session.
        names: dotted names of the stage's modules, before it was compressed.

    Raises:
        CalibrationError: the tensors of a module differ.
    """
    if state.ranks.size == 1:
        return
    changed = {name for name in names if name in state.claims or name in state.touched}
    modules = {name: module for name, module in state.model.named_modules() if name in changed}
    sums = {name: [checksum(tensor) for tensor in module.state_dict().values()] for name, module in modules.items()}
    first, *others = state.ranks.gather(sums)
    for rank, own in enumerate(others, 1):
        different = [name for name in first if own.get(name) != first[name]]
        if different:
            raise CalibrationError(
                f"{different[0]} (one of {len(different)}): rank {rank} has made something else of it than rank 0; ranks must run on equal "
                "machines with as many threads each (OMP_NUM_THREADS)"
            )
