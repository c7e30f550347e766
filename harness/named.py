"""From what somebody names on the command line to the object: `package.module:Name`, or `path/to/file.py:Name`."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

from compressor.errors import UserInputError
from compressor.spelling import suggest


def find_named(given: str, noun: str, base: type = object) -> object:
    """Return what a text names.

    Args:
        given: `package.module:Name` or `path/to/file.py:Name`; the name may be dotted.
        noun: what is looked for, for messages.
        base: classes below it are suggested where the name is not there.

    Returns:
        Whatever it is.

    Raises:
        UserInputError: there is no such module, file or name, or importing it failed.
    """
    where, _, name = given.rpartition(":")
    if not name or not where:
        form = f"{given}:Name" if given.endswith(".py") else "package.module:Name or path/to/file.py:Name"
        raise UserInputError(f"{given}: this names no {noun}; write {form}")
    module = _imported(given, _module_name(given, where))
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserInputError(f"{given}: {where} has no {name!r}; {suggest(name, _names(module, base))}")
        found = getattr(found, part)
    return found


def _module_name(given: str, where: str) -> str:
    """The dotted name of the module; that of a file becomes importable from its folder, or from the one around its packages."""
    if not where.endswith(".py") and "/" not in where:
        return where
    file = Path(where).resolve()
    if not file.is_file() or file.suffix != ".py":
        what = "there is no such file" if not file.exists() else f"{where} is no Python file"
        raise UserInputError(f"{given}: {what}; correct the path, or write package.module:Name")
    folder, parts = file.parent, [file.stem]
    while (folder / "__init__.py").is_file():
        folder, parts = folder.parent, [folder.name, *parts]
    if any("." in part for part in parts):
        raise UserInputError(f"{given}: {'/'.join(parts)} has a dot in it, so Python cannot import it; rename it")
    name = ".".join(parts)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    other = getattr(_imported(given, name), "__file__", None)
    if other is None or Path(other).resolve() != file:
        raise UserInputError(f"{given}: the name {name!r} already belongs to {other or 'a built-in module'}; rename the file")
    return name


def _imported(given: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (ImportError, ValueError) as error:
        raise UserInputError(f"{given}: its module cannot be imported ({error}); install it or correct the name") from error
    except (Exception, SystemExit) as error:
        raise UserInputError(f"{given}: importing it raised {type(error).__name__} ({error}); repair the module") from error


def _names(module: ModuleType, base: type) -> list[str]:
    own = [name for name, cls in inspect.getmembers(module, inspect.isclass) if issubclass(cls, base) and cls.__module__ == module.__name__]
    if base is object:  # objects of its classes, and lists of them
        own += [name for name, one in vars(module).items() if type(one).__module__ == module.__name__ or isinstance(one, list | tuple)]
    return own or [name for name in dir(module) if not name.startswith("_")]  # also what a package imports on first use
