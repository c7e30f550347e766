"""What an onnxruntime session made of its model: the graph that was given, and the optimized one.

onnxruntime never hands the optimized graph out, but writes it to a file if the session's options name one. The name is put into the
options while the native session copies them, and taken out again.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


class SessionGraphs:
    """Keeps, for sessions that were made but not yet initialized, where their two graphs are."""

    def __init__(self) -> None:
        """Nothing is patched yet."""
        self._native: Any = None
        self._original: Any = None
        self._pending = threading.local()

    def install(self, native: Any, wanted: Callable[[bool], bool]) -> None:
        """Patch the constructor of the native session.

        Args:
            native: the native class.
            wanted: (whether it writes its optimized graph) to whether a session that is made now will be judged.
        """
        if self._native is not None:
            return
        original = native.__init__

        def construct(session: Any, options: Any, model: Any, *rest: Any) -> None:
            self._discard()
            given = options.optimized_model_filepath
            self._pending.writes = bool(given)
            if not wanted(bool(given)):
                original(session, options, model, *rest)
                return
            target = given or str(Path(tempfile.mkdtemp(prefix="session-graph-")) / "optimized.onnx")
            self._pending.graphs = (session, model, target, not given)
            options.optimized_model_filepath = target
            try:
                original(session, options, model, *rest)
            finally:
                options.optimized_model_filepath = given

        self._native, self._original = native, original
        native.__init__ = construct

    def uninstall(self) -> None:
        """Put the constructor back."""
        if self._native is not None:
            self._native.__init__ = self._original
            self._native = self._original = None
        self._discard()

    def writes(self) -> bool:
        """Whether the session that was made last in this thread writes its optimized graph to a file."""
        return getattr(self._pending, "writes", False)

    def graphs(self, session: Any) -> tuple[Any, Any]:
        """Give the graphs of a session that has been initialized in this thread.

        Args:
            session: the native session.

        Returns:
            The model before (bytes or path) and after (bytes); the temporary file is gone.
        """
        held, model, target, _ = self._pending.graphs
        assert held is session, "sessions are made and initialized one after the other in a thread"
        after = Path(target).read_bytes()
        self._discard()
        return model, after

    def _discard(self) -> None:
        """Forget the last session of this thread, and remove the file if its name was ours; it may have failed before there was one."""
        pending = getattr(self._pending, "graphs", None)
        if pending is not None and pending[3]:
            shutil.rmtree(Path(pending[2]).parent)
        self._pending.graphs = None
