"""What a forward reads that no run in stages can follow: weights of a target outside of it, and Python values of the data.

Weights. A value that is made of a target's weight before the target's stage is made of the weight as it was before compression, and lives
on. And a paused forward may hold the weight, or the module around it, in a variable, where it stays what it was when a modifier has
replaced it.

Python values (`self.loud = bool(x.max() > 2)`). What a module hands on outside of arguments is not seen in the next batch: whoever reads
`loud` afterwards goes another way in other batches. No list of the places where a value may be left is complete (attributes, globals,
classes, the environment, closures), but it must be read off a tensor before, and torch tells of that. So such a read, and only that, makes
a proof take all batches. Likewise code between targets that catches exceptions: a layer may raise in other batches only. Not counted: reads
by torch, numpy and this package, and by functions of transformers that set no attribute and no global, nor do their callers up to the
module that runs (how experts are routed, whether a mask is needed).

Left memory (`BUS["over"] = torch.relu(y - 6)`, `self.largest.copy_(...)`). Where forwards take turns, as in the proof, one of them may use
a tensor that another has made or written to. It has come past the arguments, wherever it was left and by whatever code, and may be the
same in all batches but a few.
"""

from __future__ import annotations

import dis
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn, overrides
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from compressor.data.collate import call_model
from compressor.data.layouts import has_memory
from compressor.tracing.graph.nested_values import DATA_SIZED, call_name, constant_query
from compressor.tracing.graph.nodes import Unrepeatable, current_place
from compressor.tracing.targets.records import short_file

# These ask a tensor for its shape or mark it, or take only shape and dtype of it; the latter, where it is not the first of their arguments.
_ASKS = frozenset(
    (
        *("shape", "ndim", "nbytes", "size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "is_contiguous"),
        *("data_ptr", "__len__", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("requires_grad", "requires_grad_", "is_leaf", "grad_fn", "dtype", "device", "layout", "names", "retain_grad"),
        *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "_version", "_is_view"),
    )
)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_OUTSIDE = "outside of all targets"
_TAKES_AFTER = frozenset(("to", "type_as", "expand_as", "view_as", "reshape_as"))


class Unnoticed(TorchFunctionMode):
    """A mode that code asking for one is not told of: nn.TransformerEncoder takes another way where it meets any, with other bits."""

    num_entered: ClassVar[int] = 0  # forwards that take turns leave theirs in any order

    def __enter__(self) -> Any:
        """Enter the mode."""
        Unnoticed.num_entered += 1
        overrides.has_torch_function = _has_torch_function
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Leave it."""
        super().__exit__(*error)
        Unnoticed.num_entered -= 1
        if not Unnoticed.num_entered:
            overrides.has_torch_function = _ASKED_OF_TORCH


_ASKED_OF_TORCH = overrides.has_torch_function
_DISABLED = torch._C._disabled_torch_function_impl


def _has_torch_function(args: Iterable[Any]) -> bool:
    """Answer as torch does, by the classes of the tensors alone where all modes are to go unnoticed."""
    if not torch._C._is_torch_function_enabled() or not all(isinstance(one, Unnoticed) for one in _get_current_function_mode_stack()):
        return _ASKED_OF_TORCH(args)
    return any(type(one) is not Tensor and getattr(type(one), "__torch_function__", _DISABLED) is not _DISABLED for one in args)


class ForeignWeights:
    """Looks at the torch calls of one forward.

    Attributes:
        inside: target that runs at the moment, or another name of the code that does; None for the code between targets.
        lent: targets whose weight another target has used, after they had been called.
    """

    def __init__(self, model: nn.Module, targets: Mapping[str, nn.Module], *, pauses: bool) -> None:
        """Learn the parameters that lie inside targets only; one that is tied to a module outside may be used there.

        Args:
            model: the model.
            targets: dotted name to module.
            pauses: what runs between targets holds on to what it has read, so that it may use no weight of a target at all.
        """
        self.inside: str | None = None
        self._pauses = pauses
        self._called: set[str] = set()
        # Name of a weight: its targets, where it was used, whether after one of them.
        self._used: dict[str, tuple[set[str], str, bool]] = {}
        self.lent: set[str] = set()
        holders: dict[int, set[str]] = {}  # module to the targets that it lies in
        for target, module in targets.items():
            for below in module.modules():
                holders.setdefault(id(below), set()).add(target)
        owners: dict[int, set[str]] = {}
        self._names: dict[int, str] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            for own, tensor in module._parameters.items():
                if tensor is not None:
                    owners.setdefault(id(tensor), set()).update(holders.get(id(module), {_OUTSIDE}))
                    self._names.setdefault(id(tensor), f"{name}.{own}".lstrip("."))
        self._owners = {key: found for key, found in owners.items() if _OUTSIDE not in found}
        self._views = self._add_views(model)

    def _add_views(self, model: nn.Module) -> list[Tensor]:
        """Count tensors that modules keep, in the memory of a weight, as that weight; held, so that no identity is used twice."""
        weights: dict[int, list[Tensor]] = {}
        for weight in model.parameters():
            if id(weight) in self._owners and type(weight) is nn.Parameter and has_memory(weight):
                weights.setdefault(weight.untyped_storage()._cdata, []).append(weight)
        views = []
        for name, module in model.named_modules():
            kept = {**module._buffers, **{key: value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE}}
            for key, value in kept.items():
                for view in _held_by(value):
                    below = _weight_below(view, weights)
                    if below is not None:
                        views.append(view)
                        self._owners[id(view)] = self._owners[id(below)]
                        self._names[id(view)] = f"{name}.{key}".lstrip(".") + f", in the memory of {self._names[id(below)]},"
        return views

    def enter(self, target: str) -> None:
        """Take note that a target is called.

        Args:
            target: dotted name.
        """
        self._called.add(target)

    def look(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look at a torch call, or at what a module is handed.

        Args:
            func: torch function; None for a module.
            args: its arguments.
            kwargs: its named arguments.
        """
        for item in (*args, *kwargs.values()):
            if id(item) in self._owners:
                self._note(item, func, args)
            elif isinstance(item, list | tuple | dict):
                for one in item.values() if isinstance(item, dict) else item:
                    if id(one) in self._owners:
                        self._note(one, func, args)

    def _note(self, tensor: Tensor, func: Any, args: tuple[Any, ...]) -> None:
        targets = self._owners[id(tensor)]
        is_late = not targets.isdisjoint(self._called)
        if self.inside in targets or (func is not None and _asks(func, args, tensor)):
            return
        if is_late and (self.inside is not None or func is None):
            self.lent |= targets & self._called
        if not is_late or (self._pauses and self.inside is None):
            self._used.setdefault(self._names[id(tensor)], (targets, str(current_place()), is_late))

    @property
    def borrowed(self) -> tuple[tuple[str, str], ...]:
        """Targets that the forward does not call, and the weight of theirs that it uses all the same, with the place."""
        used = [(sorted(targets), f"{place}: {name}") for name, (targets, place, _) in self._used.items()]
        return tuple((target, use) for targets, use in used if self._called.isdisjoint(targets) for target in targets)

    def check(self) -> None:
        """Refuse what was seen, now that it is known which targets the forward calls.

        Raises:
            Unrepeatable: a weight was used outside of its target.
        """
        for name, (targets, place, is_late) in self._used.items():
            called = sorted(targets & self._called)
            if called:
                held, more = "what is made of it would stay", ""
                if is_late:
                    held, more = "a forward that pauses may still hold it", ', or engine="graph" where Python does not decide by it'
                raise Unrepeatable(
                    f"{place}: {name} is used outside of {called[0]}, the sequential target that it belongs to, and {held} as it was "
                    f'before {called[0]} is compressed; use pipeline="basic" or other sequential targets{more}'
                )


def check_borrowed(borrowed: Iterable[tuple[str, str]], called: Collection[str]) -> None:
    """Refuse weights of a target that one batch calls and another one uses without calling it: it may run on before the target's stage.

    Args:
        borrowed: of all batches, as `ForeignWeights` has them.
        called: targets that some batch calls.

    Raises:
        Unrepeatable: there is one.
    """
    for target, use in borrowed:
        if target in called:
            raise Unrepeatable(
                f"{use} is used outside of {target}, the sequential target that it belongs to, by a batch that does not call it, and "
                f'layers behind would see what it was before {target} is compressed; use pipeline="basic" or other sequential targets'
            )


def _held_by(value: Any) -> Iterable[Any]:
    """What an attribute holds: itself, or what lies in a container."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)


def _weight_below(view: Any, weights: Mapping[int, list[Tensor]]) -> Tensor | None:
    """The weight of which a tensor shows some memory; a parameter is a weight of its own."""
    if not weights or type(view) not in (Tensor, nn.Buffer) or not has_memory(view) or not view.numel():
        return None
    first, last = _span(view)
    near = weights.get(view.untyped_storage()._cdata, ())
    return next((weight for weight in near if _span(weight)[0] < last and first < _span(weight)[1]), None)


def _span(tensor: Tensor) -> tuple[int, int]:
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size()


def _asks(func: Any, args: tuple[Any, ...], tensor: Tensor) -> bool:
    name = call_name(func)
    return name in _ASKS or constant_query(func, args) or (name in _TAKES_AFTER and args[0] is not tensor)


# Python values that are read off the data.

_READS = frozenset(
    (
        *("item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "__bool__", "__int__", "__float__", "__index__", "__complex__"),
        *("__contains__", "__array__", "__dlpack__", "__cuda_array_interface__", "__repr__", "__str__", "__format__", "__reduce_ex__"),
        *("untyped_storage", "storage", "_typed_storage", "data_ptr", "apply_", "map_", "map2_"),
        *DATA_SIZED,  # what comes of these has a size that is read off the data
        *("_nnz", "coalesce", "to_sparse", "to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc", "_pack_padded_sequence"),
    )
)
_TRUSTED = frozenset(("torch", "numpy", "compressor", *sys.stdlib_module_names))
_SILENT = _TRUSTED - {"compressor"}
_LIBRARY = "transformers"
_OURS = "compressor.tracing."
_WRAPPERS = f"{_LIBRARY}.utils"  # set what a config says for the time of a call
_HANDS_ON = frozenset(("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"))
_SETTERS = frozenset(("setattr", "delattr", "__setattr__", "register_buffer", "globals"))
_MODULE_CALL: CodeType = nn.Module._wrapped_call_impl.__code__


class HostReads:
    """Looks at the torch calls of forwards for reads that count.

    Attributes:
        places: name of the module or leaf that reads, whose code is not followed, to file and line of its first read; where no code is
            followed, there is one entry at most, with an empty name.
    """

    def __init__(self, model: nn.Module, followed: Collection[str] = (), leaves: Iterable[Callable[..., Any]] = ()) -> None:
        """Look at nothing before `look` is called.

        Args:
            model: that runs.
            followed: dotted names of the modules whose own code is followed, read for read; the code of all others counts. None are named
                where no code is followed.
            leaves: functions whose code is not followed wherever they are called.
        """
        self.places: dict[str, str] = {}
        self._names = {id(module): name for name, module in reversed([*model.named_modules()])}
        self._followed = frozenset(followed)
        self._known: FrameType | None = None
        self._leaves = frozenset(one.__code__ for one in leaves if hasattr(one, "__code__"))

    def look(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look at a torch call.

        Args:
            func: torch function.
            args: its arguments.
            kwargs: its named arguments.
        """
        if _reads(call_name(func), args, kwargs):
            self.note()

    def forget(self) -> None:
        """Let go of the forward; what was found stays."""
        self._known = None

    @property
    def first(self) -> str:
        """What the first read is, with file, line and module; empty where there is none."""
        found = (f"{place} (inside {name})" if name else place for name, place in self.places.items())
        return next((f"{place} reads a Python value off the data" for place in found), "")

    def note(self) -> None:
        """Keep where the read is that happens now, if it counts."""
        if self.places and not self._followed:
            return
        own = next((frame for frame in _outwards(sys._getframe(1)) if _package(frame) not in _SILENT), None)
        if own is None or own is self._known or _package(own) == "compressor":  # the latter: hooks and modules of ours
            return
        self._known = own  # a loop over experts reads thousands of times
        frames = [*_outwards(own)]
        inside = next((name for frame in reversed(frames) if (name := self._unfollowed(frame)) is not None), None)
        last = next((place for place, frame in reversed([*enumerate(frames)]) if self._unfollowed(frame) is not None), len(frames))
        odd = any(_may_hand_on(frame) for frame in frames[: last + 1])
        if odd and not (inside is None and self._followed):
            self.places.setdefault(inside or "", f"{short_file(own.f_code.co_filename)}:{own.f_lineno}")

    def _unfollowed(self, frame: FrameType) -> str | None:
        """Name the module or leaf that a frame is the call of, if its code is not followed."""
        if frame.f_code in self._leaves:
            return frame.f_code.co_qualname
        if frame.f_code is not _MODULE_CALL or not self._followed:
            return None
        name = self._names.get(id(frame.f_locals["self"]))
        return None if name in self._followed else name


class ReadWatch(TorchDispatchMode):
    """Shows reads that no list of functions names (`F.one_hot(x)`, `torch.arange(x)`): torch marks the operations below them.

    It takes as long as the forward of a small model, so only the forwards of a proof are looked at like that. Active while entered.
    """

    supports_higher_order_operators = True

    def __init__(self, reads: HostReads) -> None:
        """Look at nothing before it is entered.

        Args:
            reads: is told.
        """
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at an operation, then run it."""
        if not _MARKS.isdisjoint(func.tags) and (func is not torch.ops.aten.index.Tensor or _by_mask(args[1])):
            self._reads.note()
        return func(*args, **(kwargs or {}))


_MARKS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


class LeftMemory(Unnoticed):
    """Looks for memory that two forwards use: by it, what one leaves outside of arguments reaches the other. Active while it is entered.

    All that a forward may use is what it was handed or has made, and what belongs to the model or a batch and is not written to.

    Attributes:
        first: where the first such use is, with file and line; empty where there is none.
    """

    def __init__(self, held: Iterable[object]) -> None:
        """Know no forward yet.

        Args:
            held: tensors, or lists, tuples and mappings of such, that all forwards may read.
        """
        super().__init__()
        self.first = ""
        tensors = [*_tensors([*held])]
        self._held = {_memory(item): _hold(item) for item in tensors}
        self._known = {id(item): weakref.ref(item) for item in tensors}
        self._owners: dict[object, tuple[Any, object]] = {}  # of memory, which is kept from being another's later
        self._now: tuple[object, ...] = ()

    def begin(self, forward: object, *, is_trial: bool = False) -> None:
        """Say which forward runs on.

        Args:
            forward: identifies it.
            is_trial: what it does now has no consequences, so that it may not meet it later.
        """
        self._now = (object(), forward) if is_trial else (forward,)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch call, and look at what it is given and gives."""
        kwargs = kwargs or {}
        if self.first or torch._C._functorch.peek_interpreter_stack() is not None:  # the tensors of a vmap have no memory that one may see
            return func(*args, **kwargs)
        held = [(item, item._version) for item in _tensors((args, kwargs)) if not self._use(item) and not item.is_inference()]
        result = func(*args, **kwargs)
        for item, version in held:
            if item._version != version:
                del self._held[_memory(item)]
                self._owners[_memory(item)] = _hold(item), self._now[0]
        for item in _tensors(result):
            self._use(item)
        return result

    def _use(self, tensor: Tensor) -> bool:
        """Let the forward that runs have a memory that no other has; false for what all have."""
        key = _memory(tensor)
        if key in self._held:
            return False
        if key not in self._owners and (known := self._known.get(id(tensor))) is not None and known() is tensor:
            self._held[key] = _hold(tensor)  # a weight that has been brought to the device
            return False
        hold, owner = self._owners.get(key, (None, None))
        if hold is None or (isinstance(hold, weakref.ref) and hold() is not tensor):
            self._owners[key] = _hold(tensor), self._now[0]
        elif owner not in self._now:
            frame = next((frame for frame in _outwards(sys._getframe(1)) if _package(frame) not in _SILENT), None)
            place = "the forward" if frame is None else f"{short_file(frame.f_code.co_filename)}:{frame.f_lineno}"
            self.first = self.first or f"{place} uses a tensor that another batch has left outside of arguments"
        return True


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _memory(tensor: Tensor) -> object:
    """Identify the memory of a tensor; where it has none of its own, the tensor."""
    return tensor.untyped_storage()._cdata if has_memory(tensor) else ("tensor", id(tensor))


def _hold(tensor: Tensor) -> Any:
    """Keep the identity of a memory, but not its bytes."""
    return StorageWeakRef(tensor.untyped_storage()) if has_memory(tensor) else weakref.ref(tensor)


def _reads(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Say whether a torch call gives Python a value of the data, or something of a size that depends on it."""
    if name == "__getitem__":
        return _by_mask(args[1] if isinstance(args[1], tuple) else (args[1],))
    if name == "repeat_interleave":
        repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
        return isinstance(repeats, Tensor) or len(args) + len(kwargs) == 1
    return name in _READS or (name == "where" and len(args) + len(kwargs) == 1)


def _by_mask(index: Iterable[object]) -> bool:
    return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in index)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Give the running frames of the forward that do not belong to those who look, from one on."""
    while frame is not None and frame.f_code is not call_model.__code__:
        if not str(frame.f_globals.get("__name__")).startswith(_OURS):
            yield frame
        frame = frame.f_back


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?")).partition(".")[0]


def _may_hand_on(frame: FrameType) -> bool:
    if _package(frame) == _LIBRARY:
        return not str(frame.f_globals["__name__"]).startswith(_WRAPPERS) and _sets(frame.f_code)
    return _package(frame) not in _TRUSTED


@cache
def _sets(code: CodeType) -> bool:
    """Say whether a function sets attributes, globals, or variables of a function around it."""
    steps = list(dis.get_instructions(code))
    closes = any(step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars for step in steps)
    return closes or any(step.opname in _HANDS_ON for step in steps) or not _SETTERS.isdisjoint(code.co_names)


def catching(codes: Iterable[CodeType]) -> str:
    """Find a function that catches exceptions, or may.

    Args:
        codes: of the functions that call targets, to any depth.

    Returns:
        File and line of the function; empty where there is none.
    """
    library = str(Path(sys.modules[_LIBRARY].__file__ or "?").parent) if _LIBRARY in sys.modules else "?"
    found = [code for code in codes if not code.co_filename.startswith(library) and _catches(code)]
    return "" if not found else f"{short_file(found[0].co_filename)}:{found[0].co_firstlineno}"


@cache
def _catches(code: CodeType) -> bool:
    steps = [step.opname for step in dis.get_instructions(code)]
    bare = any(one == "PUSH_EXC_INFO" and following == "POP_TOP" for one, following in pairwise(steps))
    return bare or "CHECK_EXC_MATCH" in steps or "CHECK_EG_MATCH" in steps or "suppress" in code.co_names
