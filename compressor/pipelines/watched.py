"""Which modules the modifiers of a session are looking at now: those that carry their calibration hooks."""

from __future__ import annotations

from compressor.lifecycle import Session
from compressor.tracing import Watched


def watched_modules(session: Session) -> Watched:
    """Find the hooked modules.

    Args:
        session: its modifiers own the hooks.

    Returns:
        Dotted name, in the order of the model, to whether a hook there needs the module's output or only its input.
    """
    kinds: dict[int, set[str]] = {}
    for modifier in session.modifiers:
        for module, kind in modifier.hooked_modules():
            kinds.setdefault(id(module), set()).add(kind)
    return {name: kinds[id(module)] != {"forward_pre"} for name, module in session.state.model.named_modules() if id(module) in kinds}
