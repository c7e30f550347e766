"""What a model is before it is run for the sake of a plan, to be put back bit for bit, and what of it a forward was seen to change.

Looked at are all modules: their attributes (with `training`, hooks and the tables of parameters and buffers), the lists, dicts, sets,
bytes that can be written to, objects (with slots, too) and attributes of functions that these hold, the attributes of the classes of all
these and what they hold, every tensor among all that, generators, and the random states of the process. Not looked at: what no module
holds, classes of torch, numpy and Python, iterators, objects of libraries in C, and whatever lies beyond 100,000 objects and 100 a module.

The bytes of a small model are copied. Of a larger one a tensor is copied when torch is about to write to it for the first time; a
checksum tells at the end of what was written past torch, which is then an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from operator import is_
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from compressor.data.layouts import dense_parts, has_memory
from compressor.errors import TracingError
from compressor.numerics.checksum import checksum
from compressor.pages import let_go
from compressor.random_state import generator_state, same_state, set_generator_state
from compressor.tracing.containers import GLOBAL_HOOKS, Walk, attributes_of, content, fill, holds
from compressor.tracing.targets.sample_state import OF_EVERY_MODULE, TorchState

# Writes to the tensors of a model, seen before they happen, for models of which no copy is kept: what is about to change is copied.


class WriteWatch(TorchDispatchMode):
    """Tells of every torch operation that is about to write to one of some storages. What writes past torch (numpy) is not seen."""

    supports_higher_order_operators = True

    def __init__(self, storages: Mapping[int, Any], tell: Callable[[int], None]) -> None:
        """Watch nothing before it is entered.

        Args:
            storages: keys are those of storages (`_cdata`), which somebody keeps alive.
            tell: called with the key of a storage before each write to it.
        """
        super().__init__()
        self._storages, self._tell = storages, tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the arguments that an operation writes to, then run it."""
        kwargs = kwargs or {}
        for place, name in _written(func):
            given = args[place] if place < len(args) else kwargs.get(name)
            for tensor in _tensors(given):
                key = tensor.untyped_storage()._cdata
                if key in self._storages:
                    self._tell(key)
        return func(*args, **kwargs)


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of the arguments that an operation writes to, by its schema."""
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    return tuple((place, one.name) for place, one in enumerate(arguments) if one.alias_info is not None and one.alias_info.is_write)


def _tensors(given: Any) -> Iterator[Tensor]:
    for item in given if isinstance(given, list | tuple) else (given,):
        if isinstance(item, Tensor) and has_memory(item):
            yield item


COPIED_BYTES = 256 << 20  # models up to this size are copied whole


@dataclass(frozen=True)
class Stirred:
    """What forwards were seen to change: containers, tensors by identity, and generators.

    Attributes:
        containers: by identity; classes count as containers of their attributes.
        tensors: whose bytes or memory changed.
        generators: that were drawn from.
        rewritten: names of the parameters and buffers among the tensors, and of parameters that were replaced by others.
        marked: tensors of which only the gradient changed, or whether there is to be one.
    """

    containers: dict[int, Any] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)
    generators: dict[int, Any] = field(default_factory=dict)
    rewritten: dict[str, None] = field(default_factory=dict)
    marked: dict[int, Tensor] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """True if anything was."""
        return bool(self.containers or self.tensors or self.generators or self.marked)

    def add(self, other: Stirred) -> None:
        """Take in what others have seen.

        Args:
            other: of the same model.
        """
        for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True):
            mine.update(theirs)


class KeptTensor:
    """One tensor: which memory it is a look at, and, where they are kept, the bytes there."""

    def __init__(self, tensor: Tensor) -> None:
        """Note the memory; no byte is copied."""
        self.tensor = tensor
        self.is_plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
        self.is_plain = self.is_plain and type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
        self._alias = tensor.detach() if self.is_plain else None
        self._form = self._form_of(tensor)
        self._leaf = self._leaf_of(tensor)
        self.spans = [_bytes(part) for part in _parts(tensor)]
        self.copies: list[Tensor] | None = None

    def _form_of(self, tensor: Tensor) -> Any:
        return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if self.is_plain else None

    def _leaf_of(self, tensor: Tensor) -> tuple[bool, Any, Any]:
        return (tensor.requires_grad, tensor.grad, tensor._backward_hooks) if tensor.is_leaf else (False, None, None)

    def copy(self) -> None:
        """Keep the bytes, unless they are kept."""
        if self.copies is None:
            self.copies = [span.clone() for span in self.spans]
            let_go(self.spans)  # weights that are mapped from a file: reading them all must not make them all stay

    @property
    def is_changed(self) -> bool:
        """Whether memory or bytes are others than they were; of bytes that were not kept nobody knows."""
        kept = zip(self.spans, self.copies or (), strict=False)
        return self._form_of(self.tensor) != self._form or not all(torch.equal(span, copy) for span, copy in kept)

    def put_back(self) -> bool:
        """Put memory and bytes back. Changes the tensor.

        Returns:
            True if there was anything to put back.
        """
        tensor, changed = self.tensor, False
        if self._alias is not None and self._form_of(tensor) != self._form:
            tensor.data, changed = self._alias, True
        for span, kept in zip(self.spans, self.copies or (), strict=False):
            if not torch.equal(span, kept):
                span.copy_(kept)
                changed = True
            let_go([span])
        return changed

    def unmark(self) -> bool:
        """Put the gradient back, and whether there is to be one. Changes the tensor.

        Returns:
            True if there was anything to put back.
        """
        tensor = self.tensor
        if not tensor.is_leaf or all(map(is_, self._leaf_of(tensor), self._leaf)):
            return False
        requires_grad, tensor.grad, hooks = self._leaf
        tensor._backward_hooks = hooks  # torch takes one only where a gradient is asked for
        tensor.requires_grad_(requires_grad)
        return True


class Footprint:
    """A model as it is now. A context manager that puts it back at the end.

    Attributes:
        stirred: what had to be put back so far.
    """

    def __init__(self, model: nn.Module) -> None:
        """Look at the model.

        Args:
            model: put back whenever asked.
        """
        self.stirred = Stirred()
        self._model = model
        self._state = TorchState.current(foreign=True)
        found = Walk(model)
        self._containers = [(one, content(one)) for one in found.containers.values()]
        self._instruments = Walk(model, of=found.instruments).containers
        self._generators = [(one, generator_state(one)) for one in found.generators.values()]
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self._tensors = [KeptTensor(one) for one in found.tensors.values()]
        self._names = {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        self._is_small = sum(span.nbytes for kept in self._tensors for span in kept.spans) <= COPIED_BYTES
        self._by_storage: dict[int, list[KeptTensor]] = {}
        self._sums: dict[int, list[int]] = {}
        self._watch: WriteWatch | None = None

    def __enter__(self) -> Self:
        """Keep the bytes, or watch out for writes."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            # A copy of a small model costs less than a watch over every operation, and sees writes past torch.
            if self._is_small:
                for kept in self._tensors:
                    kept.copy()
                return self
            for kept in self._tensors:
                self._sums[id(kept.tensor)] = [checksum(span) for span in kept.spans]
                for span in kept.spans:
                    self._by_storage.setdefault(span.untyped_storage()._cdata, []).append(kept)
        self._watch = WriteWatch(self._by_storage, self._copy)
        self._watch.__enter__()
        return self

    def _copy(self, storage: int) -> None:
        for kept in self._by_storage[storage]:
            kept.copy()

    def __exit__(self, *exc_info: object) -> None:
        """Put everything back."""
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
        self._state.restore()
        self.put_back()
        self._check_sums()

    def _check_sums(self) -> None:
        """Name a tensor that was written to in a way that nobody saw."""
        with torch._C.DisableTorchFunction():
            odd = [kept for kept in self._tensors if self._sums and [checksum(span) for span in kept.spans] != self._sums[id(kept.tensor)]]
        if odd:
            name = next((name for name, tensor in self._names.items() if tensor is odd[0].tensor), "a tensor of the model")
            raise TracingError(
                f"{name}: forward writes to it past torch (numpy, a kernel of its own), and a model of this size is not copied beforehand, "
                "so it cannot be put back; load the model anew, and let forward write with torch"
            )

    def put_back(self) -> Stirred:
        """Put everything back that is not what it was. Changes the model.

        Returns:
            What that was.
        """
        found = Stirred()
        self._state.random.restore()
        moved = [(one, kept) for one, kept in self._containers if not holds(one, kept)]
        # Named now: once the tables are as they were, nothing tells which parameter had been replaced.
        if moved:
            replaced = [name for name, one in self._names.items() if isinstance(one, nn.Parameter) and self._now(name) is not one]
            found.rewritten.update(dict.fromkeys(replaced))
        for one, kept in moved:
            fill(one, kept)
            found.containers[id(one)] = one
        for generator, state in self._generators:
            if not same_state(generator_state(generator), state):
                set_generator_state(generator, state)
                found.generators[id(generator)] = generator
        with torch._C.DisableTorchFunction(), torch.no_grad():
            found.tensors.update({id(kept.tensor): kept.tensor for kept in self._tensors if kept.put_back()})
            found.marked.update({id(kept.tensor): kept.tensor for kept in self._tensors if kept.unmark()})
        found.rewritten.update(dict.fromkeys(name for name, tensor in self._names.items() if id(tensor) in found.tensors))
        self.stirred.add(found)
        return found

    def _now(self, name: str) -> object:
        owner, _, key = name.rpartition(".")
        try:
            return dict(self._model.get_submodule(owner)._parameters.items()).get(key)  # of TorchScript it is no dict
        except AttributeError:  # the module was taken out
            return None

    def is_written(self, name: str) -> bool:
        """Say whether a parameter or buffer was written to, rather than exchanged for another.

        Args:
            name: of those that were rewritten.

        Returns:
            True if its bytes or memory changed.
        """
        return id(self._names[name]) in self.stirred.tensors

    @contextmanager
    def returning(self) -> Iterator[Footprint]:
        """Put everything back at the end, however it ends; for one forward of several. Yields this footprint."""
        try:
            yield self
        finally:
            self.put_back()

    def left_by_forward(self, noted: Collection[tuple[nn.Module, str]]) -> str:
        """Say why few batches prove nothing for others if a forward that has just run has left something on the model.

        Args:
            noted: module and name of the attributes and buffers that it set on modules: if these are the model's, they are a sample's own.

        Returns:
            The reason, with the first place; empty where nothing is left. Parameters are not looked at.
        """
        moved = [(one, kept) for one, kept in self._containers if not holds(one, kept)]
        with torch._C.DisableTorchFunction(), torch.no_grad():
            written = next((kept.tensor for kept in self._tensors if not isinstance(kept.tensor, nn.Parameter) and kept.is_changed), None)
        if not moved and written is None:
            return ""
        modules = set(self._model.modules())
        own = {(id(table), name) for module, name in noted if module in modules for table in (vars(module), module._buffers)}
        set_up = {id(vars(module).get(name)) for module in self._model.modules() for name in OF_EVERY_MODULE - {"_buffers"}}
        set_up |= self._instruments.keys()
        odd = (one for one, kept in moved if id(one) not in set_up and any((id(one), key) not in own for key in _moved(one, kept)))
        place = next((place_of(self._model, one) for one in odd), "") or (written is not None and place_of(self._model, written)) or ""
        return place and f"the forward leaves something in {place}, where another batch may find it"


def _moved(container: Any, kept: Any) -> Iterator[Any]:
    """Keys under which a container holds something else; of one without keys, None. Python itself adds `__annotations__` to classes."""
    if holds(container, kept):
        return
    if not isinstance(kept, dict):
        yield None
        return
    now, missing = content(container), object()
    names = {**kept, **now} if not isinstance(container, type) else {key: None for key in {**kept, **now} if not key.startswith("__")}
    yield from (key for key in names if kept.get(key, missing) is not now.get(key, missing))


def place_of(model: nn.Module, container: Any) -> str:
    """Say where in a model a container or tensor lies.

    Args:
        model: not modified.
        container: that something in the model holds, a module itself, or a class.

    Returns:
        The dotted name of the module or its attribute; of what lies deeper, its type.
    """
    if isinstance(container, type):
        return f"the class {container.__qualname__}"
    for name, module in model.named_modules():
        if vars(module) is container or module._buffers is container:
            return name or "the model"
        for key, value in (*vars(module).items(), *module._buffers.items()):
            if value is container or attributes_of(value) is container:
                return f"{name}.{key}".lstrip(".")
    return f"a {type(container).__name__} that the model holds"


class HeldContainers:
    """What lies in the containers, objects, classes, buffers and arrays that a model holds, but for the tables of modules.

    Later it is held against that. Buffers and arrays are copied.
    """

    def __init__(self, model: nn.Module, watched: Collection[str], known: Collection[int]) -> None:
        """Look at the model.

        Args:
            model: is only looked at.
            watched: dotted names of modules on which, or below, hooks keep statistics: these are left out.
            known: identities of containers and tensors that are known to change.
        """
        found = Walk(model, {below for name in watched for below in model.get_submodule(name).modules()})
        tables = {
            id(table) for module in model.modules() for table in (vars(module), *(vars(module).get(name) for name in OF_EVERY_MODULE))
        }
        left_out = tables | set(known) | {id(one) for one in GLOBAL_HOOKS} | Walk(model, of=found.instruments).containers.keys()
        self._model, self._containers = model, [(one, content(one)) for key, one in found.containers.items() if key not in left_out]
        with torch._C.DisableTorchFunction(), torch.no_grad():
            held = (one for key, one in found.tensors.items() if key not in left_out and not isinstance(one, nn.Parameter))
            self._tensors = [KeptTensor(one) for one in held]
            for kept in self._tensors:
                kept.copy()

    def changed(self) -> str:
        """Say which holds something else now.

        Returns:
            The first one by its place in the model; empty where there is none.
        """
        moved = next((one for one, kept in self._containers if any(True for _ in _moved(one, kept))), None)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            moved = next((kept.tensor for kept in self._tensors if kept.is_changed), None) if moved is None else moved
        return "" if moved is None else place_of(self._model, moved)


def held_tensors(model: nn.Module) -> Collection[Tensor]:
    """List the tensors that a model holds, in modules and in whatever these hold.

    Args:
        model: not modified.

    Returns:
        Each tensor once.
    """
    return Walk(model).tensors.values()


def all_that_may_change(model: nn.Module, watched: Collection[str]) -> Stirred:
    """List what forwards can change by other means than writing to a parameter, and can put back cheaply.

    Args:
        model: is only looked at.
        watched: dotted names of the modules that carry calibration hooks; of these and of what lies below only the submodules count,
            for hooks may keep statistics there.

    Returns:
        Containers, tensors that are no parameters, and generators.
    """
    found = Walk(model, {below for name in watched for below in model.get_submodule(name).modules()})
    tables: list[Any] = [module._modules for module in model.modules()]
    modules = {id(table): table for table in tables if isinstance(table, dict)}  # that of TorchScript is none
    tensors = {key: tensor for key, tensor in found.tensors.items() if not isinstance(tensor, nn.Parameter)}
    return Stirred({**found.containers, **modules}, tensors, found.generators)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors in whose memory a tensor keeps its values."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    elif not (tensor.is_quantized or tensor.is_meta or tensor.is_mkldnn):
        yield from (part for part in dense_parts(tensor.detach()) if part.numel() and not part.is_meta)


def _bytes(tensor: Tensor) -> Tensor:
    """The memory that a tensor spans, as words or bytes."""
    first = tensor.storage_offset() * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    length = (last + 1) * tensor.element_size()
    data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), first, (length,), (1,))
    # Words are compared and summed faster than bytes.
    return data.view(torch.int64) if not first % 8 and not length % 8 else data
