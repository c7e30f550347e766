"""Public names of a package that are imported when somebody asks for one, so that importing the package costs nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
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


class OtherHomes(MetaPathFinder, Loader):
    """Modules without a file, which hold names under the paths that they have elsewhere; for `sys.meta_path`, behind all other finders."""

    def __init__(self, modules: Collection[str], look_up: Callable[[str], Any]) -> None:
        """Say which.

        Args:
            modules: dotted names.
            look_up: finds a name of any of them.
        """
        self._modules, self._look_up = modules, look_up

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Answer the import system (importlib.abc.MetaPathFinder)."""
        del path, target
        return ModuleSpec(fullname, self, is_package=True) if fullname in self._modules else None

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module (importlib.abc.Loader)."""
        module.__getattr__ = self._look_up  # type: ignore[method-assign]
