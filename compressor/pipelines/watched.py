"""Which modules the modifiers of a session are looking at now: those that carry their calibration hooks."""

from __future__ import annotations

from compressor.lifecycle import Session
from compressor.tracing import Watched


def watched_modules(session: Session) -> Watched:
    """Find the hooked modules.

    Args:
        session: its modifiers own the hooks.

    Returns:
        Dotted names, in the order of the model.
    """
    hooked = {id(module) for modifier in session.modifiers for module, _ in modifier.hooked_modules()}
    return tuple(name for name, module in session.state.model.named_modules() if id(module) in hooked)
