"""How much memory a forward takes and where: the model's own forward with weights on the meta device, which have shapes and no bytes.

Every operation is seen as it runs; a tensor counts from the moment it is made until Python lets it go. What kernels take for themselves is
not seen, which for attention would be wrong by a whole score matrix: `scaled_dot_product_attention` counts as the fused kernels do.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from compressor.planning.repeats import filled, outside, repeated_layers, shapes_of, standing_in

# Operations on tensors of which some have values and some have only shapes.
#
# Forwards look at some values: is a mask all ones, where does a sequence begin. What does not depend on a weight is therefore computed for
# real, on the CPU, and joins the tensors of the meta device where the two meet.

_SMALL = 1 << 22  # elements of a tensor made from nothing, up to which its values are at hand
_INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._unsafe_index)

_MADE = ("ones_like", "zeros_like", "empty_like", "full_like", "new_ones", "new_zeros", "new_empty", "new_full")
# Cheap enough to run twice: where less is live ahead of it, a recorded graph keeps that.
_LIGHT = ("pow", "mean", "rsqrt", "mul", "add", "sub", "div", "_to_copy", "var", "sqrt", "native_layer_norm", "_fused_rms_norm", "view")
_LIGHT_OPERATIONS = frozenset(getattr(torch.ops.aten, name) for name in _LIGHT)
FROM_SHAPES = frozenset(getattr(torch.ops.aten, name) for name in _MADE)  # what they give depends on no value of what they are given


def tensors_in(value: Any) -> list[Tensor]:
    """Collect the tensors in a value.

    Args:
        value: containers of anything.

    Returns:
        The tensors, in their order.
    """
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def run_mixed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation: on the CPU while all its tensors are there, else on the meta device.

    Args:
        func: an overload of an operation of torch.
        args: its arguments.
        kwargs: its named arguments.

    Returns:
        What it gives.
    """
    devices = {tensor.device.type for tensor in tensors_in((args, kwargs))}
    wanted = kwargs.get("device")
    if wanted is not None and "meta" in devices:
        kwargs = {**kwargs, "device": torch.device("meta")}  # there is nothing to copy to another device
    elif wanted is not None and torch.device(wanted).type == "meta" and _is_small(func, args):
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if devices == {"cpu", "meta"}:
        args, kwargs = tree_map_only(Tensor, _on_meta, (_indices(func, args), kwargs))
    adapted = _ADAPTED.get(func._overloadpacket)
    return func(*args, **kwargs) if adapted is None else adapted(func, *args, **kwargs)


def _spread_topk(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Routers choose experts by values that nobody has here: let every expert be chosen equally often."""
    values, chosen = func(x, *args, **kwargs)
    if x.device.type != "meta" or chosen.numel() > _SMALL:
        return values, chosen
    return values, (torch.arange(chosen.numel()) % x.shape[-1]).view(chosen.shape)


def _count_floats(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Code for GPUs counts integers, which the CPU cannot."""
    return func(x if x.is_floating_point() else x.double(), *args, **kwargs).to(x.dtype)


def _multiply_groups(func: Any, left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The meta device takes bfloat16 only."""
    if left.dim() == 2 and right.dim() == 3 and left.device.type == "meta":
        return left.new_empty(left.shape[0], right.shape[-1])
    return func(left, right, *args, **kwargs)


# Operations that need more than shapes, or more than the meta device has.
_ADAPTED: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.topk: _spread_topk,
    torch.ops.aten.histc: _count_floats,
    torch.ops.aten._grouped_mm: _multiply_groups,
}


def _is_small(func: Any, args: Any) -> bool:
    """True for a copy of what is on the CPU, and for what is made from nothing and costs little to have."""
    size = args[0] if args and isinstance(args[0], list | tuple) and all(isinstance(side, int) for side in args[0]) else ()
    return bool(tensors_in(args)) or math.prod(size) <= _SMALL or func._overloadpacket is torch.ops.aten.arange


def _indices(func: Any, args: Any) -> Any:
    """Turn masks that select into numbers of places: how many there are is known on the CPU only."""
    if func._overloadpacket not in _INDEXING or not any(isinstance(index, Tensor) and index.device.type == "cpu" for index in args[1]):
        return args
    places: list[Tensor | None] = []
    for index in args[1]:
        is_mask = isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) and index.device.type == "cpu"
        places += list(index.nonzero(as_tuple=True)) if is_mask else [index]
    return (args[0], places, *args[2:])


def _on_meta(tensor: Tensor) -> Tensor:
    if tensor.device.type == "meta":
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


_FROM_VALUES = (torch.tensor, torch.as_tensor, torch.asarray)


@dataclass(frozen=True)
class Call:
    """One call of a watched module.

    Attributes:
        name: dotted name of the module.
        source: number of the tensor that it reads; calls that read one tensor in a row share it.
        num_tokens: rows of its input.
        columns: features of its input.
        element_bytes: of one input element.
        extra_bytes: memory in use beyond what was there when the target was entered.
    """

    name: str
    source: int
    num_tokens: int
    columns: int
    element_bytes: int
    extra_bytes: int


@dataclass
class Footprint:
    """What one forward takes in one stretch: inside a sequential target, or between two of them.

    Attributes:
        name: dotted name of the target; "" for a stretch between targets.
        own_bytes: live when it begins, different for each sample; what a paused forward holds.
        shared_bytes: live when it begins, equal for all samples of one shape: masks, rotary tables.
        needed_bytes: the part of own_bytes that is read later on, or of what it was before norms, if that was less; what a recorded graph
            keeps.
        needed_shared_bytes: the part of shared_bytes that is read later on.
        peak_bytes: the most that is in use beyond what was live when it began.
        flops: in matrix products, convolutions and attention.
        calls: of watched modules.
        output_bytes: of what the forward returns; in the last stretch only.
    """

    name: str
    own_bytes: int = 0
    shared_bytes: int = 0
    needed_bytes: int = 0
    needed_shared_bytes: int = 0
    peak_bytes: int = 0
    flops: float = 0.0
    calls: list[Call] = field(default_factory=list)
    output_bytes: int = 0


@dataclass
class _Storage:
    """One storage in use. `varies` is True where its bytes depend on the batch."""

    num_bytes: int
    varies: bool
    num_tensors: int = 0
    last_use: int = 0


@dataclass
class _Example:
    """A layer that runs, and is taken for others like it.

    Attributes:
        name: its dotted name.
        num_calls: how often it has run.
        first: number of the stretch in which it began.
        last: number of the stretch in which it ended.
        flops: its own, where no stretch began inside.
        calls: its own, where no stretch began inside.
        num_ahead: calls that its first stretch had seen before.
        gave: shapes of what it gave.
    """

    name: str
    num_calls: int = 0
    first: int = 0
    last: int = 0
    flops: float = 0.0
    calls: list[Call] = field(default_factory=list)
    num_ahead: int = 0
    gave: Any = None

    def begin(self, number: int, stretch: Footprint) -> None:
        """Note where the layer is entered."""
        self.first, self.flops, self.num_ahead = number, stretch.flops, len(stretch.calls)

    def end(self, number: int, stretch: Footprint, handed: Any, output: Any) -> None:
        """Note where it is left."""
        self.num_calls += 1
        self.last, self.gave = number, shapes_of(output, handed)
        is_inside = self.first == number
        self.flops = stretch.flops - self.flops if is_inside else 0.0
        self.calls = stretch.calls[self.num_ahead :] if is_inside else []

    def name_of(self, layer: str, inside: str) -> str:
        """Name in another layer what has this name here."""
        return layer + inside.removeprefix(self.name) if inside else ""

    def calls_of(self, layer: str, place: int, calls: Sequence[Call]) -> list[Call]:
        """Turn calls inside into those of another layer, whose place tells the tensors that they read from others."""
        return [replace(call, name=self.name_of(layer, call.name), source=(place << 32) + call.source) for call in calls]


def measure_footprints(model: nn.Module, batch: dict[str, Tensor], targets: Sequence[str], watched: Sequence[str]) -> list[Footprint]:
    """Run one forward on the meta device and see what it takes.

    Args:
        model: on the meta device, in eval mode, without caches that grow; not modified.
        batch: keyword arguments of its forward, on the CPU.
        targets: dotted names of the sequential targets.
        watched: dotted names of the modules whose inputs matter.

    Returns:
        Stretches in the order in which the forward passes them, beginning and ending between targets.

    Raises:
        NotImplementedError: an operation gives a result whose shape depends on values.
        RuntimeError: the forward asks for a value.
    """
    skipped = repeated_layers(model, {*targets, *watched})
    try:
        return _followed(model, batch, targets, watched, skipped)
    except _OutOfOrderError:
        return _followed(model, batch, targets, watched, {})


class _OutOfOrderError(Exception):
    """A layer is called before the one that it is taken for, or more than once."""


def _followed(
    model: nn.Module, batch: dict[str, Tensor], targets: Sequence[str], watched: Sequence[str], skipped: Mapping[str, str]
) -> list[Footprint]:
    """Follow a forward in which some layers are taken for others."""
    ledger = _Ledger(model, batch)
    examples = {name: _Example(name) for name in dict.fromkeys(skipped.values())}
    with ExitStack() as stack:
        for name, example in examples.items():
            stack.callback(model.get_submodule(name).register_forward_pre_hook(ledger.beginning(example)).remove)
        for name in outside(targets, skipped):
            module = model.get_submodule(name)
            stack.callback(module.register_forward_pre_hook(ledger.entering(name)).remove)
            stack.callback(module.register_forward_hook(ledger.leaving()).remove)
        for name in outside(watched, skipped):
            stack.callback(model.get_submodule(name).register_forward_pre_hook(ledger.calling(name), with_kwargs=True).remove)
        for name, example in examples.items():
            stack.callback(model.get_submodule(name).register_forward_hook(ledger.ending(example), with_kwargs=True).remove)
        for name, like in skipped.items():
            stack.enter_context(standing_in(model.get_submodule(name), ledger.taking(name, examples[like])))
        stack.enter_context(torch.no_grad())
        stack.enter_context(ledger)
        stack.enter_context(FusedAttention(ledger))
        output = model(**batch)
    if any(example.num_calls > 1 for example in examples.values()):
        raise _OutOfOrderError
    footprints = ledger.finish()
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors_in(output)}
    footprints[-1].output_bytes = sum(storages.values())
    return footprints


class _Ledger(TorchDispatchMode):
    """Keeps the books: which storages are in use, and what each stretch has seen at most."""

    def __init__(self, model: nn.Module, batch: dict[str, Tensor]) -> None:
        super().__init__()
        self._weights = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        self._in_use: dict[int, _Storage] = {}
        self._now = self._clock = 0
        self._depth = 0
        self._stretches = [Footprint("")]
        self._live_at: list[list[_Storage]] = [[]]
        self._began_at = [0]
        self._ahead: list[tuple[int, list[_Storage]]] = []  # what was live ahead of light operations, and when; until a heavy one comes
        self._ahead_of: list[list[tuple[int, list[_Storage]]]] = [[]]
        self._base = 0
        self._last_input: tuple[weakref.ref[Tensor], int] | None = None
        self._batch = {tensor.untyped_storage()._cdata for tensor in batch.values()}
        self._taken: list[tuple[int, str, _Example]] = []  # layers that did not run, the stretch in which they were called, and for what

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_light = func._overloadpacket in _LIGHT_OPERATIONS
        self._ahead = [*self._ahead, (self._clock, list(self._in_use.values()))] if is_light else []
        out = run_mixed(func, args, kwargs)
        self._clock += 1
        varies = False
        for tensor in tensors_in((args, kwargs)):
            storage = self._in_use.get(tensor.untyped_storage()._cdata)
            varies |= storage.varies if storage is not None else tensor.untyped_storage()._cdata in self._batch
            if storage is not None:
                storage.last_use = self._clock
        for tensor in tensors_in(out):
            self._note(tensor, varies and func._overloadpacket not in FROM_SHAPES)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self._stretches[-1].flops += count(*args, **kwargs, out_val=out)
        return out

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return what attention gives, in the layout of the fused kernels, with its log-sum-exp beside it for a moment."""
        heads, queries, self._ahead = query.shape[:-2], query.shape[-2], []
        self._stretches[-1].flops += 2.0 * query[..., 0, 0].numel() * queries * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        sums = torch.empty(*heads, queries, dtype=torch.float32, device="meta")
        del sums
        made = query.new_empty(*heads[:-1], queries, heads[-1], value.shape[-1])
        self._in_use[made.untyped_storage()._cdata].varies = True  # its values are not those of an empty tensor
        return made.transpose(-2, -3)

    def entering(self, name: str) -> Callable[..., None]:
        """A pre-hook that begins the stretch of a target."""

        def hook(*args: object) -> None:
            del args
            self._depth += 1
            if self._depth == 1:
                self._begin(name)

        return hook

    def leaving(self) -> Callable[..., None]:
        """A hook that begins the stretch after a target."""

        def hook(*args: object) -> None:
            del args
            self._depth -= 1
            if self._depth == 0:
                self._begin("")

        return hook

    def calling(self, name: str) -> Callable[..., None]:
        """A pre-hook that notes a call of a watched module."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            del module
            x = next(iter(tensors_in((args, kwargs))), None)
            if x is None or x.dim() == 0:
                return
            same = self._last_input is not None and self._last_input[0]() is x
            source = self._last_input[1] if same and self._last_input is not None else self._clock
            self._last_input = (weakref.ref(x), source)
            columns = x.shape[-1]
            call = Call(name, source, x.numel() // max(1, columns), columns, x.element_size(), self._now - self._base)
            self._stretches[-1].calls.append(call)

        return hook

    def beginning(self, example: _Example) -> Callable[..., None]:
        """A pre-hook that notes where a layer begins which others are taken for."""

        def hook(*args: object) -> None:
            del args
            example.begin(len(self._stretches) - 1, self._stretches[-1])

        return hook

    def ending(self, example: _Example) -> Callable[..., None]:
        """A hook that notes where it ends."""

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            del module
            example.end(len(self._stretches) - 1, self._stretches[-1], (args, kwargs), output)

        return hook

    def taking(self, name: str, example: _Example) -> Callable[..., Any]:
        """A forward of a layer that is taken for another."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            if example.num_calls != 1 or any(taken == name for _, taken, _ in self._taken):
                raise _OutOfOrderError
            self._taken.append((len(self._stretches) - 1, name, example))
            self._stretches[-1].flops += example.flops
            self._stretches[-1].calls += example.calls_of(name, len(self._taken), example.calls)
            return filled(example.gave, (args, kwargs), self._made)

        return forward

    def _made(self, size: torch.Size, dtype: torch.dtype) -> Tensor:
        made = torch.empty(size, dtype=dtype, device="meta")
        self._in_use[made.untyped_storage()._cdata].varies = True
        return made

    def finish(self) -> list[Footprint]:
        """Return all stretches, with those of layers that did not run behind the ones in which they were called."""
        stretches, behind = self._judged(), defaultdict(list)
        for place, (number, name, example) in enumerate(self._taken, 1):
            for like in stretches[example.first + 1 : example.last + 1]:
                calls = example.calls_of(name, place, like.calls)
                behind[number].append(replace(like, name=example.name_of(name, like.name), calls=calls))
        return [one for number, stretch in enumerate(stretches) for one in (stretch, *behind[number])]

    def _judged(self) -> list[Footprint]:
        """Say of each stretch what was live when it began, now that it is known what was read later."""
        for stretch, began, live, ahead in zip(self._stretches, self._began_at, self._live_at, self._ahead_of, strict=True):
            stretch.own_bytes = sum(storage.num_bytes for storage in live if storage.varies)
            stretch.shared_bytes = sum(storage.num_bytes for storage in live if not storage.varies)
            needed = [storage for storage in live if storage.last_use > began]
            kept = [[one for one in then if one.varies and one.last_use > clock] for clock, then in [*ahead, (began, live)]]
            stretch.needed_bytes = min(sum(storage.num_bytes for storage in storages) for storages in kept)
            stretch.needed_shared_bytes = sum(storage.num_bytes for storage in needed if not storage.varies)
        return self._stretches

    def _begin(self, name: str) -> None:
        self._stretches.append(Footprint(name))
        self._live_at.append(list(self._in_use.values()))
        self._began_at.append(self._clock)
        self._ahead_of.append(self._ahead)
        self._ahead = []
        self._base = self._now

    def _note(self, tensor: Tensor, varies: bool) -> None:
        """Count a tensor that an operation gave, and with the first one on a storage the storage."""
        key = tensor.untyped_storage()._cdata
        if key in self._batch or key in self._weights:
            return
        storage = self._in_use.get(key)
        if storage is None:
            storage = self._in_use[key] = _Storage(tensor.untyped_storage().nbytes(), varies)
            self._now += storage.num_bytes
            self._stretches[-1].peak_bytes = max(self._stretches[-1].peak_bytes, self._now - self._base)
        storage.varies |= varies
        storage.num_tensors += 1
        weakref.finalize(tensor, self._let_go, key, storage)

    def _let_go(self, key: int, storage: _Storage) -> None:
        storage.num_tensors -= 1
        if not storage.num_tensors:
            self._now -= storage.num_bytes
            if self._in_use.get(key) is storage:
                del self._in_use[key]


class Attending(Protocol):
    """What stands for attention as a whole."""

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return what attention gives."""


class FusedAttention(TorchFunctionMode):
    """Keeps attention in one piece: on the meta device torch would write out its score matrix."""

    def __init__(self, ledger: Attending) -> None:
        """Take who says what attention gives."""
        super().__init__()
        self._ledger = ledger

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            return self._ledger.attended(named["query"], named["key"], named["value"])
        kwargs = dict(kwargs or {})
        if func in _FROM_VALUES and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
            kwargs["device"] = "cpu"  # made from values that Python has
        return func(*args, **kwargs)
