"""What a run works on, in numbers: batches and their lengths, stacks of weights that read one input, layers and their forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from compressor.algorithms.costs import Cost, Memory, Work, rounding_cost, together
from compressor.data.collate import tokens_at_once
from compressor.lifecycle import BaseStream, Modifier, PlannedModule
from compressor.model.targets import ends_of, outward
from compressor.numerics import QuantizationScheme
from compressor.planning.footprint import Call, Footprint

TOKEN_BYTES = 8  # int64 ids


@runtime_checkable
class Costed(Protocol):
    """A modifier that can say what it costs."""

    def cost(
        self,
        scheme: QuantizationScheme | None,
        rows: Sequence[int],
        columns: int,
        element_bytes: int,
        num_tokens: int,
        has_base_stream: bool,
    ) -> Cost:
        """Say what compressing some weights would cost that read one input and get one scheme, or none where they are only pruned."""


@runtime_checkable
class Searching(Protocol):
    """A modifier that computes beside the stages what forwards do not say."""

    def search_flops(self, rows: Sequence[int], columns: int, num_tokens: int) -> float:
        """Say what the search over some weights takes that read one input."""


@runtime_checkable
class Remembering(Protocol):
    """A modifier that keeps more for what it computes beside the stages than a forward takes."""

    def own_memory(self, work: Work) -> Memory:
        """Say what that is, of the whole model."""


@runtime_checkable
class Learning(Protocol):
    """A modifier that trains within the stages."""

    def block_memory(self, work: Work) -> Memory:
        """Say what that takes, of a block."""


@runtime_checkable
class Streaming(Protocol):
    """A modifier that compares with the uncompressed model."""

    def base_stream_for(self, schemes: Iterable[QuantizationScheme]) -> BaseStream:
        """Say whether the uncompressed model shall run beside."""


@dataclass(frozen=True)
class Batches:
    """Calibration batches, all of one length.

    Attributes:
        num_samples: sequences.
        num_tokens: of each sequence.
        batch_size: sequences in one forward.
        ranks: processes that share the run; all numbers are those of one of them.
    """

    num_samples: int
    num_tokens: int
    batch_size: int
    ranks: int = 1

    @staticmethod
    def of(num_samples: int, num_tokens: int, batch_size: int | None, device: torch.device, ranks: int = 1) -> Batches:
        """Take as many sequences into a batch as a run would.

        Args:
            num_samples: sequences, of all ranks.
            num_tokens: of each.
            batch_size: what the user asked for; None leaves it to the run.
            device: that would compute.
            ranks: processes that share them.

        Returns:
            The batches.
        """
        size = batch_size or max(1, tokens_at_once(device) // num_tokens)
        own = -(-num_samples // ranks)
        return Batches(own, num_tokens, min(size, own), ranks)

    @property
    def total_tokens(self) -> int:
        """Of all sequences."""
        return self.num_samples * self.num_tokens

    @property
    def num_batches(self) -> float:
        """How many forwards of a full batch all samples are worth."""
        return self.num_samples / self.batch_size

    @property
    def num_bytes(self) -> int:
        """Of all token ids."""
        return TOKEN_BYTES * self.total_tokens


@dataclass(frozen=True)
class Target:
    """One module that the recipe changes: what its modifier planned, its scheme, and how to ask for its cost.

    Attributes:
        module: as planned.
        scheme: of its weight; None where it is only pruned.
        modifier: that makes it what it is in the end.
        others: that change it before.
    """

    module: PlannedModule
    scheme: QuantizationScheme | None
    modifier: object
    others: tuple[object, ...] = ()

    def number(self, key: str) -> int:
        """Return one of the numbers that the modifier planned with."""
        return int(self.module.details[key])


class Beside(NamedTuple):
    """What a modifier computes beside the stages.

    Attributes:
        num_forwards: of a full batch; a backward counts as two.
        search_flops: as of `Searching`; None where forwards are all.
        memory: as of `Remembering`; None where forwards are all.
        place: `ahead` of the stages, `within` each of them, or `behind`.
        trains: its forwards keep something for a backward.
    """

    num_forwards: float
    search_flops: Callable[[Sequence[int], int, int], float] | None = None
    memory: Callable[[Work], Memory] | None = None
    place: Literal["ahead", "within", "behind"] = "ahead"
    trains: bool = False

    def of(self, work: Work) -> Memory:
        """What it takes beyond forwards."""
        return Memory() if self.memory is None else self.memory(work)


def beside_of(modifier: Modifier, num_forwards: float) -> Beside:
    """Say what a modifier computes beside the stages, and when.

    Args:
        modifier: of the recipe.
        num_forwards: of a full batch.

    Returns:
        The work.
    """
    search = modifier.search_flops if isinstance(modifier, Searching) else None
    if isinstance(modifier, Learning):
        return Beside(num_forwards, search, modifier.block_memory, "within", modifier.needs_gradients)
    place: Literal["ahead", "behind"] = "behind" if modifier.needs_all_layers else "ahead"
    if isinstance(modifier, Remembering):
        return Beside(num_forwards, search, modifier.own_memory, place, modifier.needs_gradients)
    return Beside(num_forwards, search, place=place)


def wants_base_stream(targets: Sequence[Target], runs_once: bool) -> bool:
    """Say whether the uncompressed model would run beside the other.

    Args:
        targets: modules that change.
        runs_once: layers run in one pass.

    Returns:
        True where a modifier asks for it, and gets it.
    """
    asked = {
        target.modifier.base_stream_for([] if target.scheme is None else [target.scheme])
        for target in targets
        if isinstance(target.modifier, Streaming)
    }
    return "required" in asked or ("wanted" in asked and runs_once)


@dataclass(frozen=True)
class Stack:
    """Weights that read one input and get one scheme, and what they cost together.

    Attributes:
        targets: the weights.
        cost: of all.
        solving_flops: of that, what does not depend on the samples.
    """

    targets: tuple[Target, ...]
    cost: Cost
    solving_flops: float


def group_stacks(
    targets: Sequence[Target], calls: Sequence[Call], total_tokens: int, batch_tokens: int, has_base_stream: bool = False
) -> list[Stack]:
    """Group weights by the input that they read, as the modifiers will.

    Args:
        targets: modules of one stage.
        calls: of the modules in one forward; a module without a call stands alone.
        total_tokens: of all samples; 0 for a run without data.
        batch_tokens: of the forward that was looked at.
        has_base_stream: the uncompressed model runs beside the other.

    Returns:
        Stacks in the order of their first module; a Hessian belongs to the first stack that reads its input.
    """
    called: Mapping[str, Call] = {call.name: call for call in calls}
    groups: dict[object, list[Target]] = {}
    for target in targets:
        call = called.get(target.module.name)
        key = target.module.name if call is None else call.source
        groups.setdefault((key, target.module.modifier, target.module.scheme, target.number("columns")), []).append(target)
    stacks = []
    for members in groups.values():
        call = called.get(members[0].module.name)
        share = 1.0 if call is None else call.num_tokens / batch_tokens
        cost, solving = (_cost(members, tokens, has_base_stream) for tokens in (round(share * total_tokens), 0))
        stacks.append(Stack(tuple(members), cost, solving.flops))
    return stacks


def _cost(members: Sequence[Target], num_tokens: int, has_base_stream: bool) -> Cost:
    first = members[0]
    rows, columns = [member.number("rows") for member in members], first.number("columns")
    element_bytes = first.number("bytes_before") // max(1, rows[0] * columns)
    asked = [one for one in (first.modifier, *first.others) if isinstance(one, Costed)]
    costs = [one.cost(first.scheme, rows, columns, element_bytes, num_tokens, has_base_stream) for one in asked]
    return together(costs) if costs else rounding_cost(rows, columns, element_bytes)


def guess_footprints(layers: Mapping[str, Sequence[Target]], batches: Batches) -> list[Footprint]:
    """Guess what forwards take, from the shapes of the weights alone: for models whose forward cannot be followed without weights.

    Args:
        layers: modules that change, by stage.
        batches: of the run.

    Returns:
        A stretch per stage: hidden states cross it, and inside it inputs and outputs of its widest modules are in use together.
    """
    tokens = batches.batch_size * batches.num_tokens
    footprints = []
    for name, targets in layers.items():
        shapes = [(target.number("rows"), target.number("columns"), target.number("bytes_before")) for target in targets]
        if not shapes:
            continue
        width = max(1, shapes[0][2] // max(1, shapes[0][0] * shapes[0][1]))
        hidden = tokens * min(columns for _, columns, _ in shapes) * width
        widest = max(rows + columns for rows, columns, _ in shapes)
        flops = 2.0 * tokens * sum(rows * columns for rows, columns, _ in shapes)
        footprints.append(Footprint(name, 2 * hidden, 0, hidden, 0, 2 * tokens * widest * width, flops))
    return footprints


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers, shared ones once.

    Args:
        model: on any device.

    Returns:
        Bytes.
    """
    return sum(tensor.numel() * tensor.element_size() for tensor in _unique([*model.parameters(), *model.buffers()]))


def _unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def join_by_input(footprints: Sequence[Footprint]) -> list[Footprint]:
    """Join targets that read one input to one stage, as a run in one pass does.

    Args:
        footprints: of one forward, stretch by stretch.

    Returns:
        Stretches of which a named one stands for all targets of a stage, their names joined by commas; what lies between these has gone
        into them.
    """
    joined: list[Footprint] = []
    for stretch in footprints:
        last = joined[-1] if joined else None
        if last is None or (stretch.name and not _reads_the_same(joined, stretch)):
            joined.append(stretch)
        elif stretch.name:
            *joined, inside, between = joined
            joined.append(_one(_one(inside, between), stretch, f"{inside.name}, {stretch.name}"))
        elif last.name:
            joined.append(stretch)
    return joined


def _reads_the_same(joined: Sequence[Footprint], stretch: Footprint) -> bool:
    if len(joined) < 2 or joined[-1].name or joined[-1].flops or not joined[-2].calls or not stretch.calls:
        return False
    return joined[-2].calls[-1].source == stretch.calls[0].source


def _one(first: Footprint, second: Footprint, name: str | None = None) -> Footprint:
    grown = max(0, second.own_bytes + second.shared_bytes - first.own_bytes - first.shared_bytes)
    return replace(
        first,
        name=name or first.name,
        peak_bytes=max(first.peak_bytes, grown + second.peak_bytes),
        flops=first.flops + second.flops,
        calls=[*first.calls, *second.calls],
        output_bytes=first.output_bytes + second.output_bytes,
        saved_bytes=first.saved_bytes + second.saved_bytes,
    )


def stages_of(layers: Sequence[str], targets: Sequence[Target]) -> dict[str, list[Target]]:
    """Sort the modules that change into the layers that hold them.

    Args:
        layers: dotted names of the sequential targets.
        targets: modules that change.

    Returns:
        By layer; the key "" holds what lies in none.
    """
    found: dict[str, list[Target]] = {layer: [] for layer in (*layers, "")}
    for target in targets:
        found[next(name for name in outward(target.module.name) if name in found)].append(target)
    return found


def head_of(skeleton: nn.Module) -> tuple[int, int] | None:
    """Return the rows of the output head, and the bytes of what it reads of a token; None where there is none."""
    head = ends_of(skeleton)[0] if hasattr(skeleton, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)
    return (weight.shape[0], weight.shape[1] * weight.element_size()) if isinstance(weight, Tensor) and weight.dim() == 2 else None
