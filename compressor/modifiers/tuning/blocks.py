"""Blocks of a model by themselves: what they are called with, what they should give, and how far from it they are."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten, treespec_dumps, treespec_loads

from compressor.distributed.ranks import Ranks
from compressor.errors import CalibrationError, NumericsError
from compressor.lifecycle import State
from compressor.modifiers.schemes.input_statistics import input_of
from compressor.modifiers.tuning.gradients import send_back
from compressor.modifiers.tuning.sequences import Axes, Piece, cut, find_axes, joined
from compressor.nn import weight_of
from compressor.nn.quantized_linear import is_conv1d
from compressor.tracing.targets.sample_state import values_kept


@dataclass
class BlockCall:
    """One call of a block, in main memory.

    Attributes:
        batch: its number.
        inputs: (args, kwargs).
        mask: bool [batch, tokens], or None.
        size: rows and tokens of the batch.
    """

    batch: int
    inputs: Any
    mask: Tensor | None
    size: tuple[int, ...]


@dataclass
class BlockCalls:
    """The calls of one block, batch by batch.

    Attributes:
        name: dotted name of the block, for errors.
        calls: on the stream of the compressed model.
        targets: the batch, and what the uncompressed block gave on the stream of the uncompressed model, by place among its floats: the
            first and all that lie as it does; empty where nobody asked.
        rows_differ: these are not rows of the same tokens as those that the block gave on the stream of the compressed model.
    """

    name: str
    calls: list[BlockCall] = field(default_factory=list)
    targets: list[tuple[int, dict[int, Tensor]]] = field(default_factory=list)
    rows_differ: bool = False

    @property
    def correspond(self) -> bool:
        """False where the block was not called as often on both streams, or gave rows of other tokens."""
        return not self.targets or (len(self.targets) == len(self.calls) and not self.rows_differ)

    def note_call(self, state: State, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep a call on the stream of the compressed model."""
        if state.base_stream:
            return
        inputs = tree_map(_kept, (args, dict(kwargs)))
        first = _first_of((args, dict(kwargs)), f"{self.name}: it is handed")
        mask = None if state.token_mask is None else state.token_mask.cpu()
        self.calls.append(BlockCall(state.batch_index or 0, inputs, mask, tuple(state.batch_shape or first.shape[:2])))

    def note_output(self, state: State, output: Any) -> None:
        """Keep what it gave on the stream of the uncompressed model, and hold what it gives on the other against it."""
        if state.base_stream:
            given = floats_of(output, self.name)
            self.targets.append((state.batch_index or 0, {place: _kept(given[place]) for place in _lying_as(0, given)}))
        elif len(self.calls) <= len(self.targets):
            given, (_, target) = floats_of(output, self.name), self.targets[len(self.calls) - 1]
            alike = all(place < len(given) and given[place].shape == one.shape for place, one in target.items())
            self.rows_differ |= not alike or self.name in state.picked

    def brought_to_first(self, ranks: Ranks) -> int:
        """Bring the calls of all ranks to the first, in the order of batches. Changes the calls: the others keep none.

        Args:
            ranks: of the run.

        Returns:
            How many there are.

        Raises:
            CalibrationError: the block is called with something that ranks cannot tell each other.
        """
        if ranks.size == 1:
            return len(self.calls)
        calls = _of_all(ranks, [_told(one, self.name) for one in self.calls])
        self.rows_differ = any(ranks.gather(self.rows_differ))
        targets = _of_all(ranks, [[batch, list(given), list(given.values())] for batch, given in self.targets])
        self.calls, self.targets = (
            [_heard(*one) for one in calls],
            [(batch, dict(zip(places, given, strict=True))) for batch, places, given in targets],
        )
        return int(ranks.broadcast(len(self.calls), 0))


class BlockLoss:
    """The squared error of a block's output over sequences that are drawn.

    Of several floats the first that the weights change is judged, with all such that have a value for each of the same tokens: not what
    is handed through, nor attention probabilities, which nobody reads.

    Attributes:
        name: of the block.
    """

    def __init__(self, block: nn.Module, calls: BlockCalls, device: torch.device, layers: Mapping[str, nn.Module]) -> None:
        """Compute the targets that are missing with the block as it is now, a forward of all calls, and cut calls into sequences.

        Args:
            block: uncompressed.
            calls: of it.
            device: of the model.
            layers: inside the block, by name: those whose weights will be tried.

        Raises:
            CalibrationError: calls on the two streams do not correspond, or one gives another output when it is made again.
            NumericsError: NaN or infinity in what the block should give for a token that counts.
        """
        self._block, self._device, self.name = block, device, calls.name
        targets = [given for _, given in calls.targets]
        if not calls.correspond:
            raise CalibrationError(
                f"{self.name}: {len(targets)} calls in the uncompressed model and {len(calls.calls)} in the compressed one do not "
                f"correspond{', for their rows are other tokens' if calls.rows_differ else ''}; use target='propagated'"
            )
        self._pieces: list[Piece] = []
        known: dict[str, tuple[list[int], Axes | None]] = {}
        for number, call in enumerate(calls.calls):
            inputs, mask, size = call.inputs, call.mask, call.size
            shapes = str(tree_map(lambda one: (one.shape, one.dtype) if isinstance(one, Tensor) else one, (inputs, size[0])))
            given = [] if targets and shapes in known else [_kept(one) for one in self._output(inputs)]
            if shapes not in known:
                places = self._changed_by(layers, inputs) if len(given) > 1 else [0]
                run = partial(self._judged, places=places)
                known[shapes] = places, find_axes(inputs, _at(places, given), size[0], run, f"{self.name}: the block")
            places, axes = known[shapes]
            if targets and not targets[number].keys() >= set(places):
                raise CalibrationError(
                    f"{self.name}: its weights change none of what was kept of its output in the uncompressed model, the first tensor and "
                    "those that lie as it does; use target='propagated'"
                )
            target = _at(places, targets[number] if targets else given)
            if not all(bool(torch.isfinite(_that_count(one, mask)).all()) for one in target.values()):
                raise NumericsError(
                    f"{self.name}: its calibration outputs hold NaN or infinity; check the model in its own dtype on this data"
                )
            mask_axis = None if mask is None else 0
            tokens = target[places[0]][..., 0].numel()
            self._pieces += cut((inputs, target, mask), size[0], tokens, None if axes is None else (*axes, mask_axis))

    def draw(self, num_sequences: int, generator: torch.Generator) -> list[int]:
        """Draw pieces.

        Args:
            num_sequences: in all of them, at most, unless the first has more: calls that cannot be cut are drawn whole.
            generator: of the numbers.

        Returns:
            Their numbers, to be handed to `backward`.
        """
        order = torch.randperm(len(self._pieces), generator=generator).tolist()
        rows = accumulate(self._pieces[number].num_rows for number in order)
        return [number for place, (number, sum_) in enumerate(zip(order, rows, strict=True)) if sum_ <= num_sequences or not place]

    def backward(self, numbers: Sequence[int]) -> float:
        """Sum the squared error over some sequences, and add its gradients where grad mode is on.

        Args:
            numbers: as drawn.

        Returns:
            The sum over sequences, tokens that count, and channels.

        Raises:
            NumericsError: it is NaN or infinite.
            CalibrationError: there are no gradients.
        """
        total = 0.0
        for inputs, target, mask in joined([self._pieces[one] for one in numbers]):
            given, counted = self._judged(inputs, target), None if mask is None else mask.to(self._device)
            errors = (_that_count((given[place].float() - one.to(self._device).float()).square(), counted) for place, one in target.items())
            loss = torch.stack([error.sum() for error in errors]).sum()
            total += float(loss.detach())
            if torch.is_grad_enabled():
                send_back(loss, None, self.name)
        if not math.isfinite(total):
            raise NumericsError(
                f"{self.name}: the squared error of its outputs is {total} on {len(numbers)} calibration sequences, and nothing can be "
                "learned from that; check the model in its own dtype on this data"
            )
        return total

    @torch.no_grad()
    def uncalled(self, modules: Mapping[str, nn.Module]) -> list[str]:
        """Run the calls again until all modules have been handed tokens.

        Args:
            modules: inside the block, by name.

        Returns:
            Names of those that no token comes to.
        """
        left = dict.fromkeys(modules)

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str) -> None:
            del module
            if input_of(args, kwargs, name).numel():
                left.pop(name, None)

        with ExitStack() as hooks:
            for name, module in modules.items():
                hooks.callback(module.register_forward_pre_hook(partial(note, name=name), with_kwargs=True).remove)
            for inputs, _, _ in joined(self._pieces):
                if not left:
                    break
                self._output(inputs)
        return list(left)

    def _to(self, tree: Any) -> Any:
        """A copy: a block may write to what it is given, and is called again with it."""
        return tree_map(lambda one: one.to(self._device, copy=True) if isinstance(one, Tensor) else _copied(one), tree)

    def _output(self, inputs: Any) -> list[Tensor]:
        args, kwargs = self._to(inputs)
        with values_kept(self._block):  # each call begins with what the modules of the block held before all of them
            return floats_of(self._block(*args, **kwargs), self.name)

    def _judged(self, inputs: Any, places: Iterable[int]) -> dict[int, Tensor]:
        return _at(places, self._output(inputs))

    def _changed_by(self, layers: Mapping[str, nn.Module], inputs: Any) -> list[int]:
        """Places of the floats that are judged; dependence on weights is told by gradients, of which nothing is saved."""
        tried = {name: weight_of(layer).detach().requires_grad_() for name, layer in layers.items()}
        with torch.enable_grad(), weights_tried(layers, tried), saved_tensors_hooks(lambda saved: None, lambda saved: saved):
            given = self._output(inputs)
        first = next((place for place, one in enumerate(given) if one.requires_grad), 0)
        return [place for place in _lying_as(first, given) if given[place].requires_grad] or [first]


def _lying_as(first: int, floats: Sequence[Tensor]) -> list[int]:
    """Places of the floats whose shape is that of one of them but for channels."""
    return [place for place, one in enumerate(floats) if one.shape[:-1] == floats[first].shape[:-1]]


def _at(places: Iterable[int], floats: Sequence[Tensor] | Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {place: floats[place] for place in places}


def _told(call: BlockCall, name: str) -> list[Any]:
    """A call as ranks tell it."""
    leaves, spec = tree_flatten(call.inputs)
    strange = next((one for one in leaves if not isinstance(one, Tensor | int | float | str | None)), None)
    if strange is not None:
        raise CalibrationError(
            f"{name}: it is called with a {type(strange).__name__}, which ranks cannot tell each other; run it in one process"
        )
    return [call.batch, leaves, treespec_dumps(spec), call.mask, call.size]


def _heard(batch: int, leaves: list[Any], spec: str, mask: Tensor | None, size: Sequence[int]) -> BlockCall:
    return BlockCall(batch, tree_unflatten(leaves, treespec_loads(spec)), mask, tuple(size))


def _of_all(ranks: Ranks, own: list[list[Any]]) -> list[list[Any]]:
    """Bring lists that begin with the number of a batch to the first rank, by these numbers; each passes by itself."""
    found: list[list[Any]] = []
    for source, count in enumerate(ranks.gather(len(own))):
        known = {one[0] for one in found}  # a batch that lies across two ranks has run on both
        for place in range(count):
            one = ranks.broadcast(own[place] if source == ranks.rank else None, source)
            if ranks.is_first and one[0] not in known:
                found.append(one)
    return sorted(found, key=lambda one: int(one[0]))


def _that_count(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None or mask.shape != values.shape[:-1] else values[mask]


def floats_of(output: Any, name: str) -> list[Tensor]:
    """Return the output itself, or the floats in a tuple, a dict or what else torch looks into.

    Args:
        output: of a block.
        name: of the block, for errors.

    Returns:
        Floating-point tensors, in their order; scalars, such as a loss, are left out.

    Raises:
        CalibrationError: there is none.
    """
    found = [one for one in tree_leaves(output) if isinstance(one, Tensor) and one.is_floating_point() and one.dim()]
    if not found:
        raise CalibrationError(_nothing_in(output, f"{name}: it gives", "floating-point tensor"))
    return found


def _first_of(tree: Any, what: str) -> Tensor:
    found = next((one for one in tree_leaves(tree) if isinstance(one, Tensor)), None)
    if found is None:
        raise CalibrationError(_nothing_in(tree, what, "tensor"))
    return found


def _nothing_in(tree: Any, what: str, wanted: str) -> str:
    kinds = ", ".join(sorted({type(one).__name__ for one in tree_leaves(tree)})) or "nothing"
    return f"{what} {kinds}, in which no {wanted} can be found; ignore the modules in it, or use GPTQModifier"


@contextmanager
def weights_tried(modules: Mapping[str, nn.Module], weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Let float layers compute with other weights for the duration. Changes the modules meanwhile.

    Args:
        modules: by name.
        weights: [R, C] of each.

    Yields:
        Nothing.
    """
    with ExitStack() as held:
        for name, module in modules.items():
            table: dict[str, Any] = module._parameters
            held.callback(table.__setitem__, "weight", table["weight"])
            table["weight"] = weights[name].t() if is_conv1d(module) else weights[name]
        yield


def _kept(one: Any) -> Any:
    return one.detach().to("cpu", copy=True) if isinstance(one, Tensor) else _copied(one)


def _copied(one: Any) -> Any:
    """What torch does not look into, as the keys and values that layers share in an object: the next layers write to it."""
    if isinstance(one, nn.Module | type) or callable(one):
        return one
    try:
        return copy.deepcopy(one)
    except (TypeError, RuntimeError):  # a lock, a generator, a tensor with a history
        return one
