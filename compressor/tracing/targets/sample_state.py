"""What belongs to one paused forward and not to the thread: torch's modes, settings, random states, attributes of modules, arguments.

Forwards that take turns would otherwise see each other's grad and autocast state, draw from each other's random numbers, and what one
writes to a module (`self.mask = ...`) another would read in its place.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from compressor.errors import TracingError
from compressor.random_state import GENERATORS, RandomState, generator_state, set_generator_state
from compressor.tracing.graph.nested_values import Modes

_ATOMS = (str, bytes, int, float, complex, type, torch.dtype, torch.device, torch.Size, nn.Module, torch.Generator)


class TorchState(NamedTuple):
    """What of torch a forward may change and must find again when it goes on: modes of the thread, settings of the process, generators."""

    modes: Modes
    random: RandomState

    @staticmethod
    def current(*, foreign: bool = False) -> TorchState:
        """Return the modes as they are now and the states of the random generators; `foreign` as in RandomState."""
        return TorchState(Modes.current(), RandomState.current(foreign=foreign))

    def restore(self) -> None:
        """Make these the modes and the states of the random generators."""
        self.random.restore()
        self.modes.restore()


class _Place(NamedTuple):
    """Where a module keeps a value: among its plain attributes or its buffers; `exists` False for a value that is not there."""

    exists: bool
    is_buffer: bool
    value: Any


View = dict[tuple[Any, str], _Place]  # of modules; the state of a generator goes by the generator and an empty name


class ModuleValues:
    """Attributes and buffers that paused forwards have set on modules, so that each of them finds its own again when it goes on.

    Every forward starts with what the modules held before the run. A distinction is made between data (tensors, numbers,
    containers) and set-up (flags such as "hooks are installed", handles, functions): set-up outlives trial calls and the run.
    """

    def __init__(self) -> None:
        """Start with nothing set."""
        self._originals: View = {}
        self._generators: View = {}

    def keep_generators(self, modules: Iterable[nn.Module]) -> None:
        """Let each forward draw from the generators that modules hold as if it was alone.

        Args:
            modules: whose attributes, and lists, tuples and dicts among these, are looked at.
        """
        held = (one for module in modules for value in vars(module).values() for one in _held_by(value) if isinstance(one, GENERATORS))
        self._generators = {(one, ""): state for one, state in _states(held).items()}

    def note(self, module: nn.Module, name: str) -> None:
        """Remember what is there before a value is set for the first time.

        Args:
            module: the module.
            name: of the attribute or buffer.
        """
        if (module, name) not in self._originals:
            self._originals[module, name] = _find(module, name)

    def noted(self) -> tuple[tuple[nn.Module, str], ...]:
        """List what has been noted: module and name of the attribute or buffer."""
        return tuple(self._originals)

    def changed(self) -> tuple[tuple[nn.Module, str], ...]:
        """List the data that is not what it was: module and name of the attribute or buffer."""
        found = ((module, name, _find(module, name), original) for (module, name), original in self._originals.items())
        return tuple((module, name) for module, name, now, original in found if now is not original and _differs(now, original))

    def view(self) -> View:
        """Return all noted values as they are now: what a forward sees when it pauses."""
        states = _states(generator for generator, _ in self._generators)
        return {(module, name): _find(module, name) for module, name in self._originals} | {(one, ""): kept for one, kept in states.items()}

    def restore(self, view: View) -> None:
        """Show a forward that goes on what it saw when it paused. Changes the modules.

        Args:
            view: what it saw; values that were first set later are hidden from it, set-up excepted.
        """
        for (module, name), original in self._originals.items():
            if (module, name) in view:
                _put(module, name, view[module, name])
            # Set by another forward meanwhile.
            elif _is_data(_find(module, name).value):
                _put(module, name, original)
        self._restore_generators(view)

    def _restore_generators(self, view: View) -> None:
        for key, original in self._generators.items():
            set_generator_state(key[0], view.get(key, original).value)

    def undo(self, view: View) -> None:
        """Take back all data that was set after a view was taken; with an empty view, all data. Changes the modules.

        Args:
            view: the earlier values.
        """
        for (module, name), original in self._originals.items():
            if _is_data(_find(module, name).value):
                _put(module, name, view.get((module, name), original))
        self._restore_generators(view)


def names_of(model: nn.Module, places: Iterable[tuple[nn.Module, str]]) -> frozenset[str]:
    """Return the dotted names of attributes and buffers; those of modules that are none of the model's are left out.

    Args:
        model: the model.
        places: module and name, each.

    Returns:
        The names.
    """
    names = {module: name for name, module in model.named_modules()}
    return frozenset(f"{names[module]}.{name}".lstrip(".") for module, name in places if module in names)


class SetByForwards:
    """Attributes and buffers that the model's own forward was seen to set on modules, before hooks kept anything there.

    They are a sample's also where hooks keep statistics of all samples beside them, and where another module has taken its module's place.

    Attributes:
        names: dotted.
    """

    def __init__(self, model: nn.Module, names: Collection[str]) -> None:
        """Take the model, whose modules may be replaced later, and the dotted names."""
        self._model, self.names = model, frozenset(names)
        self._last_parts = {name.rpartition(".")[2] for name in names}
        self._homes: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()

    def __contains__(self, place: object) -> bool:
        """Say whether a module and a name are one of them."""
        module, name = cast("tuple[nn.Module, str]", place)
        if name not in self._last_parts:
            return False
        if module not in self._homes:
            self._homes[module] = next((home for home, one in self._model.named_modules() if one is module), None)
        home = self._homes[module]
        return home is not None and f"{home}.{name}".lstrip(".") in self.names


@contextlib.contextmanager
def values_kept(module: nn.Module) -> Iterator[None]:
    """Take back all data that is set inside on a module, and on modules in it, and what containers there hold; set-up stays.

    See `ModuleValues`.

    Args:
        module: that is called inside.

    Yields:
        Nothing.
    """
    tables = [table for part in module.modules() for table in (vars(part), part._buffers)]
    kept = [dict(table) for table in tables]
    values = (value for part in module.modules() for name, value in vars(part).items() if name not in OF_EVERY_MODULE)
    contents = [(one, _contents(one)) for one in _containers(values)]
    try:
        yield
    finally:
        for table, before in zip(tables, kept, strict=True):
            for name in [one for one, value in table.items() if value is not before.get(one)]:
                if name in before and (_is_data(table[name]) or _is_data(before[name])):
                    table[name] = before[name]
                elif _is_data(table[name]):
                    del table[name]
            table.update((name, before[name]) for name in before.keys() - table.keys())
        for container, held in contents:
            if [*map(id, _contents(container))] != [*map(id, held)]:
                _refill(container, held)


OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # tables of hooks, parameters, modules: no data of the author


def _containers(values: Iterable[Any]) -> list[Any]:
    """Find plain containers that can change, those within each other included, each once."""
    found: dict[int, Any] = {}
    left = list(values)
    while left:
        value = left.pop()
        if type(value) is tuple:
            left += value
        elif type(value) in _CHANGING and id(value) not in found:
            found[id(value)] = value
            left += value.values() if isinstance(value, dict) else value
    return list(found.values())


_CHANGING = (list, dict, set, OrderedDict, defaultdict, deque)


def _contents(container: Any) -> list[Any]:
    return [part for pair in container.items() for part in pair] if isinstance(container, dict) else list(container)


def _refill(container: Any, contents: list[Any]) -> None:
    container.clear()
    if isinstance(container, dict):
        container.update(zip(contents[::2], contents[1::2], strict=True))
    elif isinstance(container, set):
        container.update(contents)
    else:
        container.extend(contents)


def _held_by(value: Any) -> Iterable[Any]:
    return value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)


def _states(generators: Iterable[Any]) -> dict[Any, _Place]:
    """Where generators stand, but for those without a state, as that of the operating system."""
    states = {one: generator_state(one) for one in generators}
    return {one: _Place(True, False, state) for one, state in states.items() if state is not None}


def _is_data(value: Any) -> bool:
    return isinstance(value, Tensor | int | float | complex | str | list | tuple | dict | set) and not isinstance(value, bool)


def _differs(now: _Place, original: _Place) -> bool:
    if not now.exists or not _is_data(now.value) or now.value is original.value:
        return False
    return not original.exists or not isinstance(now.value, int | float | str) or now.value != original.value


def _find(module: nn.Module, name: str) -> _Place:
    if name in module._buffers:
        return _Place(True, True, module._buffers[name])
    return _Place(name in module.__dict__, False, module.__dict__.get(name))


def _put(module: nn.Module, name: str, place: _Place) -> None:
    now = _find(module, name)
    if now.exists and (not place.exists or now.is_buffer != place.is_buffer):
        (module._buffers if now.is_buffer else module.__dict__).pop(name)
    if place.exists:
        (module._buffers if place.is_buffer else module.__dict__)[name] = place.value


@contextlib.contextmanager
def noting_cached_properties(note: Callable[[nn.Module, str], None]) -> Iterator[None]:
    """Tell of every `functools.cached_property` of a module that is computed: its value is set past `__setattr__`.

    Args:
        note: is given the module and the name, before the value is there.

    Yields:
        Nothing.
    """
    # It writes to `__dict__` itself, so no patch of `__setattr__` hears of it.
    plain: Any = functools.cached_property.__get__

    def get(cached: Any, instance: Any, owner: Any = None) -> Any:
        if isinstance(instance, nn.Module) and cached.attrname is not None:
            note(instance, cached.attrname)
        return plain(cached, instance, owner)

    functools.cached_property.__get__ = get  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        functools.cached_property.__get__ = plain  # type: ignore[method-assign]


_ARGUMENT = ("this argument of a sequential target", 'use pipeline="basic"')


def copy_arguments(value: Any, model: nn.Module, words: tuple[str, str] = _ARGUMENT) -> Any:
    """Copy tensors and whatever holds them, so that a call on the copy leaves the original as it was.

    Args:
        value: arguments of a module: tensors, containers, plain values and helper objects such as caches.
        model: its modules, parameters and buffers are not copied.
        words: what the value is, and what to do where it cannot be copied; for the error.

    Returns:
        A copy in which a tensor that occurred twice still occurs twice.

    Raises:
        TracingError: a helper object cannot be copied.
    """
    return _Copier(model, words).copy(value)


class _Copier:
    def __init__(self, model: nn.Module, words: tuple[str, str]) -> None:
        self._model, self._words = model, words
        self._copies: dict[int, Any] = {}  # by id of the original: also the memo of deepcopy
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._of_model: set[int] | None = None
        self._knows_model = False

    def copy(self, value: Any) -> Any:
        if value is None or isinstance(value, _ATOMS) or callable(value):
            return value
        if isinstance(value, Tensor):
            if id(value) not in self._copies:
                self._copies[id(value)] = copied = self._copy_tensor(value)
                if copied is not value and type(value) is Tensor:
                    copied.__dict__.update({name: self.copy(item) for name, item in value.__dict__.items()})
            return self._copies[id(value)]
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(self.copy(item) for item in value)
        if type(value) is dict:
            return {key: self.copy(item) for key, item in value.items()}
        return self._copy_object(value)

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        """Copy the memory behind a tensor, once for all that share it; what belongs to the model stays."""
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
        if not is_plain or tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_meta:
            return tensor.clone()
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            if storage.nbytes() != tensor.nbytes and storage._cdata in self._model_storages():
                return tensor
            self._storages[storage._cdata] = storage.clone()
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return made.set_(self._storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())

    def _model_storages(self) -> set[int]:
        """Several weights may be slices of one file in memory."""
        if self._of_model is None:
            tensors = (*self._model.parameters(), *self._model.buffers())
            self._of_model = {one.untyped_storage()._cdata for one in tensors if one.layout is torch.strided}
        return self._of_model

    def _copy_object(self, value: Any) -> Any:
        if not self._knows_model:
            shared = [*self._model.modules(), *self._model.parameters(), *self._model.buffers()]
            self._copies = {id(item): item for item in shared} | self._copies
            self._knows_model = True
        try:
            return copy.deepcopy(value, self._copies)
        except (TypeError, RuntimeError, copy.Error) as error:
            raise TracingError(
                f"{type(value).__name__}: {self._words[0]} cannot be copied ({error}), so a trial call could change it; {self._words[1]}"
            ) from error


def run_shielded(function: Callable[[], Any]) -> Any:
    """Call a function so that what it writes to containers in context variables (collectors of outputs) is not kept.

    Args:
        function: called once.

    Returns:
        What it returns.
    """
    return contextvars.copy_context().run(_with_copied_variables, function)


def _with_copied_variables(function: Callable[[], Any]) -> Any:
    for variable, value in list(contextvars.copy_context().items()):
        if isinstance(value, list | dict | set):
            variable.set(_copy_containers(value))
    return function()


def _copy_containers(value: Any) -> Any:
    if type(value) in (list, set):
        return type(value)(_copy_containers(item) for item in value)
    if type(value) is dict:
        return {key: _copy_containers(item) for key, item in value.items()}
    return value
