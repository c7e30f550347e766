"""How much memory a forward takes and where: the model's own forward with weights on the meta device, which have shapes and no bytes.

Every operation is seen as it runs; a tensor counts from the moment it is made until Python lets it go. What kernels take for themselves is
not seen, which for attention would be wrong by a whole score matrix: `scaled_dot_product_attention` counts as the fused kernels do.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from compressor.planning.operations import FROM_SHAPES, LIGHT_OPERATIONS, run_mixed, tensors_in
from compressor.planning.repeats import filled, outside, repeated_layers, shapes_of, standing_in

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
        saved_bytes: kept for a backward, by a forward with gradients.
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
    saved_bytes: int = 0


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
        saved: its own, where no stretch began inside.
        num_ahead: calls that its first stretch had seen before.
        gave: shapes of what it gave.
    """

    name: str
    num_calls: int = 0
    first: int = 0
    last: int = 0
    flops: float = 0.0
    calls: list[Call] = field(default_factory=list)
    saved: int = 0
    num_ahead: int = 0
    gave: Any = None

    def begin(self, number: int, stretch: Footprint) -> None:
        """Note where the layer is entered."""
        self.first, self.flops, self.saved, self.num_ahead = number, stretch.flops, stretch.saved_bytes, len(stretch.calls)

    def end(self, number: int, stretch: Footprint, handed: Any, output: Any) -> None:
        """Note where it is left."""
        self.num_calls += 1
        self.last, self.gave = number, shapes_of(output, handed)
        is_inside = self.first == number
        self.flops = stretch.flops - self.flops if is_inside else 0.0
        self.saved = stretch.saved_bytes - self.saved if is_inside else 0
        self.calls = stretch.calls[self.num_ahead :] if is_inside else []

    def name_of(self, layer: str, inside: str) -> str:
        """Name in another layer what has this name here."""
        return layer + inside.removeprefix(self.name) if inside else ""

    def calls_of(self, layer: str, place: int, calls: Sequence[Call]) -> list[Call]:
        """Turn calls inside into those of another layer, whose place tells the tensors that they read from others."""
        return [replace(call, name=self.name_of(layer, call.name), source=(place << 32) + call.source) for call in calls]


def measure_footprints(
    model: nn.Module, batch: dict[str, Tensor], targets: Sequence[str], watched: Sequence[str], *, trains: bool = False
) -> list[Footprint]:
    """Run one forward on the meta device and see what it takes.

    Args:
        model: on the meta device, in eval mode, without caches that grow; not modified.
        batch: keyword arguments of its forward, on the CPU.
        targets: dotted names of the sequential targets.
        watched: dotted names of the modules whose inputs matter.
        trains: a second forward, with gradients of all parameters, says what is kept for a backward.

    Returns:
        Stretches in the order in which the forward passes them, beginning and ending between targets.

    Raises:
        NotImplementedError: an operation gives a result whose shape depends on values.
        RuntimeError: the forward asks for a value.
    """
    skipped = repeated_layers(model, {*targets, *watched})
    try:
        found = _followed(model, batch, targets, watched, skipped)
    except _OutOfOrderError:
        skipped = {}
        found = _followed(model, batch, targets, watched, skipped)
    if trains:
        kept = _followed(model, batch, targets, watched, skipped, trains=True)
        found = [replace(one, saved_bytes=other.saved_bytes) for one, other in zip(found, kept, strict=True)]
    return found


class _OutOfOrderError(Exception):
    """A layer is called before the one that it is taken for, or more than once."""


def _followed(
    model: nn.Module,
    batch: dict[str, Tensor],
    targets: Sequence[str],
    watched: Sequence[str],
    skipped: Mapping[str, str],
    *,
    trains: bool = False,
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
        stack.enter_context(saved_tensors_hooks(ledger.saved, lambda tensor: tensor) if trains else torch.no_grad())
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
        self._saved: set[int] = set()
        self._taken: list[tuple[int, str, _Example]] = []  # layers that did not run, the stretch in which they were called, and for what

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_light = func._overloadpacket in LIGHT_OPERATIONS
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
        if torch.is_grad_enabled():
            for tensor in (query, key, value, made):
                self.saved(tensor)
        self._in_use[made.untyped_storage()._cdata].varies = True  # its values are not those of an empty tensor
        return made.transpose(-2, -3)

    def saved(self, tensor: Tensor) -> Tensor:
        """Count what is kept for a backward, once; return it."""
        key = tensor.untyped_storage()._cdata
        if key not in self._saved and key not in self._weights and key not in self._batch:
            self._saved.add(key)
            self._stretches[-1].saved_bytes += tensor.untyped_storage().nbytes()
        return tensor

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
            self._stretches[-1].saved_bytes += example.saved
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
