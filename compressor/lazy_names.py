"""Public names of a package that are imported when somebody asks for one, so that importing the package costs nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the `__getattr__` and `__dir__` of a package (PEP 562).

    Args:
        package: its dotted name, `__name__`.
        homes: public name to the module that defines it; none is the name of a module of the package, which would hide it for good
            as soon as somebody imports that.

    Returns:
        What the package assigns to `__getattr__, __dir__`.
    """

    def look_up(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return look_up, lambda: sorted(homes)
