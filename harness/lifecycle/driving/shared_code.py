"""What the code of a model shares with every other model of the process: the functions, classes and registries that its files name.

The files are those in which the classes of the model's modules are defined, such as `modeling_llama`. Looked at are their functions, the
methods of the classes and the entries of the registries that they name, the logging level of their packages, and the settings of
torch.compile. What these use in turn, and plain data, is not followed.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import lru_cache, partial
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from harness.lifecycle.driving.snapshot import CLASSES, SHARED, Difference, Functions, is_of_torch

_CONFIGS = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")
# Looked at elsewhere, or nothing that anybody patches.
_NOT_FOLLOWED = frozenset({"torch", "builtins", "typing", "collections", "abc", "enum", "dataclasses", "types", "functools"})
_MEMBERS = (FunctionType, property, classmethod, staticmethod)
_MISSING = object()
# Tensors of other devices by type have thousands of methods that stand in torch.Tensor, too.
_NOT_LOOKED_AT = re.compile(r"[.]_|^torch[.](cuda|sparse|xpu)([.]|$)")


class Methods(Functions):
    """Functions and properties of a class, which may count and keep what it likes beside them."""

    def changed(self, other: Functions) -> list[str]:  # type: ignore[override]  # narrower than any namespace
        """Return the names that stand for another function, or for none; a new one stands before what the class has inherited."""
        mine, its = self.values, other.values
        names = [name for name in {**mine, **its} if mine.get(name, _MISSING) is not its.get(name, _MISSING)]
        return [name for name in names if isinstance(mine.get(name), _MEMBERS) or isinstance(its.get(name), _MEMBERS)]


class Entries(Methods):
    """Functions, classes and recipes for them in a registry, to which the package of the files that name it may add more of its own."""

    def __init__(self, registry: Mapping[Any, Any], package: str) -> None:
        """Copy the references; reading an entry may make something of it."""
        self._package = package
        items = dict.items(registry) if isinstance(registry, dict) else registry.items()
        self.keys = {str(key): key for key, _ in items}
        self.values = {str(key): value for key, value in items}

    def changed(self, other: Functions) -> list[str]:  # type: ignore[override]
        """Return the keys that stand for something else that can be called, or for nothing, and those that came from elsewhere."""
        mine, its = self.values, other.values
        names = [name for name, value in mine.items() if callable(value) or isinstance(value, tuple)]
        came = [name for name, value in its.items() if name not in mine and callable(value) and _package_of(value) != self._package]
        return [*(name for name in names if its.get(name, _MISSING) is not mine[name]), *came]

    def put_back(self, registry: MutableMapping[Any, Any], name: str, now: Entries) -> None:
        """Have one entry as it was, or take it out where there was none."""
        if name in self.values:
            registry[self.keys[name]] = self.values[name]
            return
        key = now.keys[name]
        for store in vars(type(registry)).values():  # transformers' interfaces keep what all objects of theirs share at the class
            if isinstance(store, dict):
                store.pop(key, None)
        if key in registry:
            del registry[key]


def _package_of(value: object) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


class LibraryCode:
    """Public functions and classes in the public modules of torch that are loaded, and whatever stands in these classes."""

    def __init__(self, aside: Iterable[object] = ()) -> None:
        """Copy the references.

        Args:
            aside: modules and classes that are looked at elsewhere.
        """
        others = {id(one) for one in aside}
        owners = (one for one in _owners(len(sys.modules)) if id(one[1]) not in others)
        self._before = [(place, owner, dict(vars(owner))) for place, owner in owners]

    def changed(self) -> list[str]:
        """Return the full names that stand for another function or class, or for none, and new public ones of classes.

        What torch itself has put there, as the first torch.compile does, is left out, and so is what has been loaded meanwhile.
        """
        return [f"{place}.{name}" for place, _, name, _ in self._changes()]

    def put_back(self) -> None:
        """Make all of it as it was."""
        for _, owner, name, value in list(self._changes()):
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    def _changes(self) -> Iterator[tuple[str, Any, str, object]]:
        """Place, owner and name of what changed, and what stood there."""
        for place, owner, before in self._before:
            now = vars(owner)
            if _is_same(before, now):
                continue  # as nearly everywhere
            for name, value in before.items():
                own, is_public = now.get(name, _MISSING), isinstance(owner, type) or not name.startswith("_")
                if own is not value and is_public and (callable(value) or isinstance(value, _MEMBERS)) and not is_of_torch(name, own):
                    yield place, owner, name, value
            for name in now.keys() - before.keys() if isinstance(owner, type) else ():
                if not name.startswith("_") and not is_of_torch(name, now[name]):
                    yield place, owner, name, _MISSING


def _is_same(before: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """Seen at one look: what stands where it stood is not compared."""
    try:
        return before == now
    except (RuntimeError, ValueError, TypeError):  # as of two tensors
        return False


@lru_cache(maxsize=1)
def _owners(num_modules: int) -> list[tuple[str, Any]]:
    """Public modules and classes of torch, with their full names, as long as no module is loaded."""
    del num_modules
    found: list[tuple[str, Any]] = []
    for place, module in list(sys.modules.items()):
        if not place.startswith("torch.") or _NOT_LOOKED_AT.search(place):
            continue
        found.append((place, module))
        # isinstance would ask the thing itself, and some of torch's warn of their end
        owned = [(name, value) for name, value in vars(module).items() if not name.startswith("_") and issubclass(type(value), type)]
        found += [(f"{place}.{name}", value) for name, value in owned if value.__module__ == place]
    return found


class SharedCode:
    """What stands in the files of a model at one moment.

    Args:
        modules: of the model.
        library: torch's own code, too, whoever uses it.
    """

    def __init__(self, modules: Iterable[nn.Module], *, library: bool = False) -> None:
        own = {cls for module in modules for cls in type(module).__mro__ if issubclass(cls, nn.Module)}
        files = {name: sys.modules[name] for name in sorted({cls.__module__ for cls in own}) if name in sys.modules}
        self._owners: list[tuple[str, Any, Callable[[Any], Functions], Functions]] = []
        for name, file in files.items():
            self._add(f"the module {name}", file, Functions)
        for package, key, value in _named([file for name, file in files.items() if name.partition(".")[0] != "torch"]):
            if isinstance(value, type) and value not in own and value.__module__.partition(".")[0] not in _NOT_FOLLOWED:
                self._add(f"the class {value.__qualname__}", value, Methods)
            elif isinstance(value, MutableMapping) and not key.startswith("__"):
                self._add(f"the registry {key}", value, partial(Entries, package=package))
        self._library = LibraryCode([*files.values(), *own, *SHARED.values(), *CLASSES]) if library else None
        self._levels, self._configs = _levels(), dict(_configs()) if files else {}

    def _add(self, label: str, owner: Any, kind: Callable[[Any], Functions]) -> None:
        self._owners.append((label, owner, kind, kind(owner)))

    def differences(self) -> list[Difference]:
        """Return what is not as it was."""
        found = []
        for label, owner, kind, before in self._owners:
            if names := before.changed(kind(owner)):
                found.append(Difference("process", label, f"changed: {', '.join(names[:5])}"))
        if self._library and (names := self._library.changed()):
            found.append(Difference("process", "torch's code", f"changed: {', '.join(names[:5])}"))
        levels = _levels()
        for name, level in self._levels.items():
            if levels.get(name, level) != level:
                found.append(Difference("process", f"logging of {name}", f"changed: {level} -> {levels[name]}"))
        for name, now in _configs() if self._configs else ():
            was = self._configs[name]
            keys = [key for key in {**was, **now} if was.get(key, _MISSING) != now.get(key, _MISSING)]
            found += [Difference("process", name, f"changed in {key}") for key in keys]
        return found

    def put_back(self) -> None:
        """Make all of it as it was."""
        if self._library:
            self._library.put_back()
        for _, owner, kind, before in self._owners:
            now = kind(owner)
            for name in before.changed(now):
                if isinstance(before, Entries) and isinstance(now, Entries):
                    before.put_back(owner, name, now)
                elif name not in before.values:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before.values[name])
        for name, level in self._levels.items():
            if (logger := logging.getLogger(name)).level != level:  # to set one clears what all loggers remember
                logger.setLevel(level)
        for name, read in _configs() if self._configs else ():
            config, was = sys.modules.get(name), self._configs[name]
            for key in {**was, **read}:
                setattr(config, key, was[key] if key in was else config._config[key].default)  # type: ignore[union-attr]


def _named(files: Iterable[ModuleType]) -> Iterable[tuple[str, str, object]]:
    """What files name, each thing once, with the package of the file."""
    return {id(value): (file.__name__.partition(".")[0], key, value) for file in files for key, value in vars(file).items()}.values()


def _levels() -> dict[str, int]:
    """The levels of the loggers of whole packages."""
    known = list(logging.root.manager.loggerDict.items())
    return {name: logger.level for name, logger in known if isinstance(logger, logging.Logger) and "." not in name}


def _configs() -> Iterable[tuple[str, dict[str, Any]]]:
    """The settings of torch.compile that are not the default ones; none of what has not been loaded yet."""
    for name in _CONFIGS:
        config: Any = sys.modules.get(name)
        lines = config.codegen_config().splitlines() if config is not None else []
        keys = [line.partition(" = ")[0].removeprefix(f"{name}.") for line in lines if line.startswith(f"{name}.")]
        yield name, {key: _read(config, key) for key in keys}


def _read(config: Any, key: str) -> Any:
    value = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
