"""From a text that somebody wrote to the object that it means: `package.module:Name`, or `path/to/file.py:Name` on a command line.

Python calls this an object reference. Whoever takes one (recipes, tracing's leaves, subjects of checks, kernels, planted bugs) asks here,
and so do packages whose public names are imported when somebody asks for one.
"""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from compressor.errors import CompressorError, UserInputError, reason
from compressor.spelling import suggest

Names = Callable[[ModuleType], Iterable[str]]


@dataclass(frozen=True)
class Place:
    """Where an object was found.

    Attributes:
        owner: the module or class that holds it.
        name: under which.
    """

    owner: Any
    name: str

    @property
    def value(self) -> Any:
        """The object."""
        return getattr(self.owner, self.name)

    @property
    def stored(self) -> Any:
        """What stands there, not bound to its owner: a static method is one, a property is one."""
        return inspect.getattr_static(self.owner, self.name)


def public_names(module: ModuleType) -> list[str]:
    """List all that a module shows, also what it imports on first use.

    Args:
        module: any.

    Returns:
        The names without a leading underscore.
    """
    return [name for name in dir(module) if not name.startswith("_")]


def subclass_names(base: type) -> Names:
    """Suggest classes.

    Args:
        base: what they derive from.

    Returns:
        Lists a module's classes below `base` that are not abstract; all that it shows where there is none.
    """

    def names(module: ModuleType) -> list[str]:
        classes = inspect.getmembers(module, inspect.isclass)
        return [name for name, cls in classes if issubclass(cls, base) and not inspect.isabstract(cls)] or public_names(module)

    return names


def own_names(module: ModuleType) -> list[str]:
    """List what a module makes itself.

    Args:
        module: any.

    Returns:
        Its classes, the objects of its classes, and lists; all that it shows where there is none.
    """
    own = [name for name, cls in inspect.getmembers(module, inspect.isclass) if cls.__module__ == module.__name__]
    own += [name for name, one in vars(module).items() if type(one).__module__ == module.__name__ or isinstance(one, list | tuple)]
    return own or public_names(module)


def resolve(
    reference: str,
    noun: str,
    *,
    where: str | None = None,
    error: type[CompressorError] = UserInputError,
    names: Names = public_names,
    files: bool = False,
) -> Place:
    """Import the module of an object reference, and look the name up. This runs the module.

    Args:
        reference: `package.module:Name`; the name may be dotted.
        noun: what is looked for, for messages.
        where: the begin of messages; None for the reference.
        error: class of what is raised.
        names: what may have been meant where the name is not there.
        files: `path/to/file.py:Name` is taken as well; its folder becomes one that Python imports from.

    Returns:
        The place of the object, which is there.

    Raises:
        CompressorError: of the class that was given: no such module, file or name, or importing it failed.
    """
    where = reference if where is None else where
    source, colon, path = reference.rpartition(":")
    if not colon:
        form = "package.module:Name" + (" or path/to/file.py:Name" if files else "")
        form = f"{reference}:Name" if files and reference.endswith(".py") else form
        raise error(f"{where}: this names no {noun}; write {form}")
    try:
        module = _imported(_module_name(source) if files else source)
    except _NotImportedError as problem:
        raise error(f"{where}: {problem}") from problem.__cause__
    found: Any = module
    for name in path.split("."):
        if not hasattr(found, name):
            choices = list(names(module))
            advice = suggest(path, choices) if choices else "it has no name at all; give another"
            raise error(f"{where}: {source} has no {path!r}; {advice}")
        owner, found = found, getattr(found, name)
    return Place(owner, name)


class _NotImportedError(Exception):
    """A module cannot be had; what is wrong and what to do."""


def _module_name(source: str) -> str:
    """The dotted name of the module; that of a file becomes importable from its folder, or from the one around its packages."""
    if not source.endswith(".py") and "/" not in source:
        return source
    file = Path(source).resolve()
    if not file.is_file() or file.suffix != ".py":
        what = "there is no such file" if not file.exists() else f"{source} is no Python file"
        raise _NotImportedError(f"{what}; correct the path, or write package.module:Name")
    folder, parts = file.parent, [file.stem]
    while (folder / "__init__.py").is_file():
        folder, parts = folder.parent, [folder.name, *parts]
    if any("." in part for part in parts):
        raise _NotImportedError(f"{'/'.join(parts)} has a dot in it, so Python cannot import it; rename it")
    name = ".".join(parts)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    other = getattr(_imported(name), "__file__", None)
    if other is None or Path(other).resolve() != file:
        raise _NotImportedError(f"the name {name!r} already belongs to {other or 'a built-in module'}; rename the file")
    return name


def _imported(name: str) -> ModuleType:
    if not all(name.split(".")):
        raise _NotImportedError(f"its module {name!r} cannot be imported (a part of its name is empty); correct the name")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _NotImportedError(f"its module {name!r} cannot be imported ({error}); install it or correct the name") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # it runs somebody's code, which may raise anything, SystemExit too
        raise _NotImportedError(
            f"its module {name!r} fails while it is imported ({type(error).__name__}: {reason(error)}); make it importable first"
        ) from error


# Public names of a package that are imported when somebody asks for one, so that importing the package costs nothing.


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
        generator = random.getstate()
        try:
            return getattr(importlib.import_module(homes[name]), name)
        finally:
            random.setstate(generator)  # a library may draw while it is imported, as rich does; torch's generators would cost its import

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
