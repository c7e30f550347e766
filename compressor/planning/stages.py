"""From workload and footprints to estimates, stage by stage, as the pipelines run them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from compressor.algorithms.costs import FLOAT32_BYTES, Work
from compressor.distributed.ranks import share_out
from compressor.model.targets import outward
from compressor.numerics.part_sums import most_sums
from compressor.planning.estimate import Phase, Speed, StageEstimate
from compressor.planning.footprint import Footprint
from compressor.planning.workload import Batches, Beside, Stack, Target, group_stacks
from compressor.tracing.footprint import COPIED_BYTES
from compressor.tracing.targets.running import WAITING_STREAMS

_UNPACKING_BYTES = 9  # of one weight element while a compressed layer is made or made float again: codes, words, float32 values


@dataclass(frozen=True)
class Setting:
    """What all stages have in common.

    Attributes:
        model_bytes: of all weights.
        keeps_float: float weights stay in memory: mapped from their file on a CPU, or the caller's own.
        in_frames: the engine keeps whole forwards waiting, not only what they still need.
        memory_bytes: granted to activations; None for no limit.
        batches: calibration data.
        speed: of the machine.
        runs_once: layers run in one pass.
        has_base_stream: the uncompressed model runs beside the other.
        flows: some module is watched while data flow; else the first batch alone does, or the first two through a whole model.
        num_ahead: layers that are brought before their time, where they come one by one; None where the caller holds all weights.
        stretches: bytes of these layers by dotted name; empty where none come.
        head: rows of the output head, and bytes of what it reads of a token; None where there is none.
        kept_bytes: what modifiers behind the stages keep of the uncompressed model meanwhile.
    """

    model_bytes: int
    keeps_float: bool
    in_frames: bool
    memory_bytes: int | None
    batches: Batches
    speed: Speed
    runs_once: bool = False
    has_base_stream: bool = False
    flows: bool = True
    num_ahead: int | None = None
    stretches: Mapping[str, int] = field(default_factory=dict)
    head: tuple[int, int] | None = None
    kept_bytes: int = 0

    def at_hand(self, stage: str) -> int:
        """Say what a stage needs at hand of the weights, those beside the layers included where they are at work or have one place only.

        Args:
            stage: names of its targets; of no layer in particular for what runs through the whole model.

        Returns:
            Bytes.
        """
        own = next((self.stretches[name] for name in outward(stage) if name in self.stretches), None)
        if not self.num_ahead:  # embeddings and the head take turns with the layers
            return max(self._largest, self._outside) if own is None else own
        return (self._largest if own is None else own) + self.num_ahead * self._largest + self._outside

    @property
    def held_bytes(self) -> int:
        """What lies in main memory whatever happens: batches, and what modifiers keep."""
        return self.batches.num_bytes + self.kept_bytes

    @property
    def num_flowing(self) -> float:
        """Full batches that run through the layers."""
        return self.batches.num_batches if self.flows else min(1.0, self.batches.num_batches)

    @property
    def copied_bytes(self) -> int:
        """A small model is copied whole while forwards run that must leave it as it is."""
        return self.model_bytes if self.model_bytes <= COPIED_BYTES else 0

    @cached_property
    def _largest(self) -> int:
        return max(self.stretches.values(), default=0)

    @cached_property
    def _outside(self) -> int:
        return self.model_bytes - sum(self.stretches.values())

    @property
    def num_streams(self) -> int:
        """Of activations."""
        return 2 if self.has_base_stream else 1


class _Late(NamedTuple):
    """A stage that the uncompressed model has been shown, but must still run through.

    Attributes:
        stage: what a forward takes in it.
        forward_bytes: in use while a batch runs through it.
        module_bytes: of its modules as they were.
    """

    stage: Footprint
    forward_bytes: int
    module_bytes: int


class _PutOff(NamedTuple):
    """A stage that is done, before which some batches wait, for behind it more would be live.

    Attributes:
        share: of the batches.
        live_bytes: of all batches, there and behind it.
        forward_bytes: in use while a batch runs through it.
        flops: of one batch.
    """

    share: float
    live_bytes: int
    forward_bytes: int
    flops: float


class Timeline:
    """Puts one stage after the other, and carries on what stays: compressed layers, and activations.

    Attributes:
        stages: made so far.
        offload_bytes: the most that activations need beyond the memory granted to them.
    """

    def __init__(self, setting: Setting, within: Iterable[Beside] = ()) -> None:
        """Start with the float model, and what modifiers compute within stages."""
        self._within = tuple(within)
        self.stages: list[StageEstimate] = []
        self.offload_bytes = 0
        self._setting = setting
        self._weights = setting.model_bytes
        self._late: _Late | None = None
        self._put_off: _PutOff | None = None

    def add_stage(
        self, inside: Footprint, between: Footprint, following: Footprint, targets: Sequence[Target], least_bytes: int = 0
    ) -> None:
        """Add a stage of the sequential pipeline.

        Args:
            inside: what a forward takes in its target.
            between: what a forward takes behind it, up to the next target.
            following: what a forward takes in the next target; nothing where it was the last.
            targets: modules that change in it.
            least_bytes: of a batch, where it takes little.
        """
        batches, has_base = self._setting.batches, self._setting.has_base_stream
        batch_tokens = batches.batch_size * batches.num_tokens
        stacks = group_stacks(targets, inside.calls, batches.total_tokens, batch_tokens, has_base)
        made = sum(target.number("bytes_after") for target in targets)
        floats = sum(target.number("bytes_before") for target in targets)
        replaced = made - (0 if self._setting.keeps_float else floats)
        statistics = self._statistics(stacks)
        grown = max(0, between.own_bytes + between.shared_bytes - inside.own_bytes - inside.shared_bytes) if self._setting.runs_once else 0
        forward = max(inside.peak_bytes, grown + between.peak_bytes if following.name else 0) + inside.needed_shared_bytes
        # In one pass modules are shown their inputs only; a layer of experts, whose own are inside, runs all the same.
        is_shown = self._setting.runs_once and all(call.name in inside.name.split(", ") for call in inside.calls)
        # The uncompressed model is shown, too, where more would wait behind the stage than before it, and runs through it with the next.
        was_late, self._late = self._late, None
        if has_base and is_shown and was_late is None and following.name and following.needed_bytes > inside.needed_bytes:
            self._late = _Late(inside, forward, floats)
        beside, behind = inside if was_late is None else was_late.stage, following if self._late is None else inside
        was_put_off, self._put_off = (
            self._put_off,
            self._choose(inside, between, following, least_bytes, forward),
        )
        here = self._live(inside) if was_put_off is None else was_put_off.live_bytes
        there = self._live(following) if self._put_off is None else self._put_off.live_bytes
        with_twins, with_late = (self._live(one) if has_base else 0 for one in (beside, behind))
        waiting = self._in_memory(here + with_twins)
        calibrated = self._in_memory(here + max(with_twins, with_late))
        passed_on = self._in_memory(max(here, there) + with_late)
        again = 0 if was_put_off is None else was_put_off.forward_bytes
        runs = 0 if (is_shown and (not has_base or self._late is not None)) or not self._setting.flows else forward
        calibrating = max(runs, again, 0 if was_late is None else was_late.forward_bytes, _observing(inside, batches.num_tokens))
        before = 0 if was_late is None else was_late.module_bytes
        kept = sum({call.source: call.num_tokens * call.columns * call.element_bytes for call in inside.calls}.values()) if has_base else 0
        flops = ((1 if is_shown or not self._setting.flows else 2) + (1 if has_base else 0)) * inside.flops
        flops += self._setting.num_streams * between.flops if self._setting.runs_once else 0
        flops += 0 if was_put_off is None else was_put_off.share * was_put_off.flops
        learning = [one.of(self._work(stacks, [inside], is_whole=False)) for one in self._within]
        learned = round(sum(one.kept_bytes for one in learning))
        here = (calibrated if has_base else waiting) + learned
        flops += sum(one.num_forwards for one in self._within) / batches.num_batches * inside.flops
        self._add_worst(
            inside.name,
            [
                ("calibrate", self._weights + before, statistics, here, calibrating + kept),
                ("compress", self._weights + made, *_compressing(stacks, here)),
                *((one.doing, self._weights, 0, here, round(one.working_bytes)) for one in learning),
                ("propagate", self._weights + replaced + floats, 0, passed_on, max(forward, again, _unpacking(targets))),
            ],
            flops=flops * self._setting.num_flowing + sum(stack.cost.flops for stack in stacks),
            seconds=self._seconds(flops * self._setting.num_flowing, stacks),
        )
        self._weights += replaced

    def add_beside(self, name: str, stretches: Sequence[Footprint], targets: Sequence[Target], beside: Beside) -> None:
        """Add what a modifier computes beside the stages: forwards of the whole model, and a search over weights with one input each.

        Args:
            name: of the modifier.
            stretches: what a forward takes.
            targets: modules that change in the stages.
            beside: what it computes.
        """
        batches = self._setting.batches
        calls = [call for stretch in stretches for call in stretch.calls]
        memory = beside.of(self._work(group_stacks(targets, calls, 0, batches.batch_size * batches.num_tokens), stretches))
        copied = min(self._weights, self._setting.copied_bytes)
        held = self._setting.held_bytes + (0 if beside.place == "behind" else round(memory.kept_bytes))
        peaks = [stretch.own_bytes + stretch.shared_bytes + stretch.peak_bytes + stretch.output_bytes for stretch in stretches]
        flops = sum(stretch.flops for stretch in stretches) * beside.num_forwards
        self._add_worst(
            name,
            [
                ("calibrate", self._weights, round(memory.statistics_bytes), held, max(peaks, default=0) + copied),
                (memory.doing, self._weights, 0, held, copied + round(memory.working_bytes)),
            ],
            flops=flops,
            seconds=self._seconds(flops, []),
        )
        if beside.search_flops is not None:
            stacks = group_stacks(targets, calls, batches.total_tokens, batches.batch_size * batches.num_tokens)
            flops = sum(
                beside.search_flops([one.number("rows") for one in stack.targets], stack.targets[0].number("columns"), batches.total_tokens)
                for stack in stacks
            )
            last = self.stages[-1]
            seconds = last.seconds + flops / self._setting.speed.flops
            self.stages[-1] = replace(last, flops=last.flops + flops, seconds=seconds)

    def kept_bytes(self, beside: Beside, stretches: Sequence[Footprint]) -> int:
        """Say what a modifier keeps in main memory while it waits for the end of the stages; see `add_beside`."""
        return round(beside.of(self._work([], stretches)).kept_bytes)

    def add_whole(
        self, name: str, stretches: Sequence[Footprint], targets: Sequence[Target], num_forwards: float, copied_bytes: int = 0
    ) -> None:
        """Add forwards of the whole model, and the compression of modules that saw them: the pipeline `basic`, or what lies in no stage.

        Args:
            name: what happens.
            stretches: what a forward takes, from its beginning to its end.
            targets: modules that change.
            num_forwards: of a full batch.
            copied_bytes: kept beside them.
        """
        batches, held = self._setting.batches, self._setting.held_bytes
        calls = [call for stretch in stretches for call in stretch.calls]
        stacks = group_stacks(targets, calls, batches.total_tokens if num_forwards else 0, batches.batch_size * batches.num_tokens)
        statistics = self._statistics(stacks)
        made = sum(target.number("bytes_after") for target in targets)
        floats = 0 if self._setting.keeps_float else sum(target.number("bytes_before") for target in targets)
        peaks = [stretch.own_bytes + stretch.shared_bytes + stretch.peak_bytes + stretch.output_bytes for stretch in stretches]
        flops = sum(stretch.flops for stretch in stretches) * num_forwards
        self._add_worst(
            name,
            [
                ("calibrate", self._weights, statistics, held if stretches else 0, max(peaks, default=0) + copied_bytes),
                ("compress", self._weights + made, *_compressing(stacks, held if stretches else 0)),
            ],
            flops=flops + sum(stack.cost.flops for stack in stacks),
            seconds=self._seconds(flops, stacks),
        )
        self._weights += made - floats

    def add_fixed(self, name: str, phase: Phase, temporaries: int) -> None:
        """Add a stage that has the weights in memory and little else.

        Args:
            name: what happens.
            phase: what it counts as.
            temporaries: beyond the weights.
        """
        # Files are written tensor by tensor, whichever lies where.
        away = self._weights if self._setting.stretches else 0
        self.stages.append(StageEstimate(name, phase, self._weights, 0, 0, temporaries, away))

    def _add_worst(self, name: str, phases: Sequence[tuple[Phase, int, int, int, int]], *, flops: float, seconds: float) -> None:
        worst = max((StageEstimate(name, *phase) for phase in phases), key=lambda stage: stage.peak_bytes)
        self.stages.append(replace(worst, away_bytes=self._away(name), flops=flops, seconds=seconds))

    def _away(self, stage: str) -> int:
        """Finished layers lie in the run folder, or go back; those to come are not there yet."""
        return max(0, self._weights - self._setting.at_hand(stage)) if self._setting.stretches else 0

    def _choose(self, inside: Footprint, between: Footprint, following: Footprint, least: int, forward: int) -> _PutOff | None:
        """Say which share of the batches waits before a stage that is done; None where all run on."""
        number, granted = self._setting.batches.num_batches, WAITING_STREAMS * least
        more = following.needed_bytes - inside.needed_bytes
        room = 0 if self._setting.has_base_stream else max(0, granted - inside.needed_bytes)
        fits = following.needed_bytes <= granted or more <= room
        if fits or not (self._setting.runs_once and following.name) or self._put_off is not None:
            return None
        on = math.floor(number * room / more)
        live = round(number * inside.needed_bytes + on * more) + following.needed_shared_bytes
        return _PutOff(1 - on / number, live, forward, inside.flops + between.flops)

    def _work(self, stacks: Sequence[Stack], stretches: Sequence[Footprint], *, is_whole: bool = True) -> Work:
        """What modifiers compute on by themselves, of one sequence where it grows with these."""
        batches, size = self._setting.batches, self._setting.batches.batch_size
        given = max((stretch.needed_bytes + stretch.needed_shared_bytes for stretch in stretches), default=0)
        stream = max((stretch.needed_bytes for stretch in stretches), default=0)
        if is_whole and stretches:
            head = self._setting.head
            stream = size * batches.num_tokens * head[1] if head is not None else stretches[-1].output_bytes
        return Work(
            batches.num_samples,
            batches.num_tokens,
            [[_shape(target) for target in stack.targets] for stack in stacks],
            self._setting.model_bytes,
            given / size,
            stream / size,
            max((stretch.peak_bytes for stretch in stretches), default=0) / size,
            sum(stretch.saved_bytes for stretch in stretches) / size,
            0 if self._setting.head is None else self._setting.head[0],
        )

    def _live(self, stretch: Footprint) -> int:
        """What waits of all samples while one stage is at work."""
        if self._setting.in_frames:
            return round(self._setting.num_flowing * (stretch.own_bytes + stretch.shared_bytes))
        return round(self._setting.num_flowing * stretch.needed_bytes) + stretch.needed_shared_bytes

    def _in_memory(self, live: int) -> int:
        granted = self._setting.memory_bytes
        kept = live if granted is None else min(live, granted)
        self.offload_bytes = max(self.offload_bytes, live - kept)
        return kept + self._setting.held_bytes

    def _statistics(self, stacks: Sequence[Stack]) -> int:
        """What sums take at the end of a calibration, of which a rank has fewer than a process that has all samples."""
        batches = self._setting.batches
        alone, shared = most_sums(batches.total_tokens), most_sums(batches.total_tokens * batches.ranks, batches.ranks)
        return sum(stack.cost.statistics_bytes for stack in stacks) // alone * shared

    def _seconds(self, forward_flops: float, stacks: Sequence[Stack]) -> float:
        """Ranks share forwards and statistics evenly; each stack of weights is solved by one of them."""
        speed = self._setting.speed
        summing = sum(stack.cost.flops - stack.solving_flops for stack in stacks) / speed.flops
        loads = [0.0] * self._setting.batches.ranks
        owners = share_out([stack.solving_flops for stack in stacks], len(loads))  # by what a run goes by
        for stack, owner in zip(stacks, owners, strict=True):
            loads[owner] += _solving_seconds(stack, speed)
        return forward_flops / speed.model_flops + summing + max(loads)


def _solving_seconds(stack: Stack, speed: Speed) -> float:
    columns = stack.cost.num_columns * speed.column_seconds
    return stack.solving_flops / speed.flops + columns + stack.cost.num_roundings * speed.rounding_seconds


def _observing(inside: Footprint, sequence_tokens: int) -> int:
    """Where a hook takes a float32 copy of one sequence of a module's input."""
    return max(
        (
            call.extra_bytes
            + (FLOAT32_BYTES * min(sequence_tokens, call.num_tokens) * call.columns if call.element_bytes < FLOAT32_BYTES else 0)
            for call in inside.calls
        ),
        default=0,
    )


def _compressing(stacks: Sequence[Stack], activations: int) -> tuple[int, int, int]:
    """Statistics, activations and working memory at the worst of all solves: statistics go as their stacks are solved."""
    waiting = sum(stack.cost.settled_bytes for stack in stacks)
    worst = (waiting, 0)
    for stack in stacks:
        worst = max(worst, (waiting, max(stack.cost.working_bytes, _unpacking(stack.targets))), key=sum)
        waiting -= stack.cost.settled_bytes
    return worst[0], activations, worst[1]


def _shape(target: Target) -> tuple[int, int, int]:
    rows, columns = target.number("rows"), target.number("columns")
    return rows, columns, target.number("bytes_before") // max(1, rows * columns)


def _unpacking(targets: Sequence[Target]) -> int:
    return max((_UNPACKING_BYTES * target.number("rows") * target.number("columns") for target in targets), default=0)


def _add_layers(timeline: Timeline, footprints: Sequence[Footprint], layers: dict[str, Sequence[Target]]) -> None:
    """Add a stage for each call of a target; what lies in it changes in the first one. Changes `layers`."""
    nothing = Footprint("")
    places = [at for at, stretch in enumerate(footprints) if stretch.name]
    sizes = sorted(footprints[at].needed_bytes for at in places)
    least = sizes[(len(sizes) - 1) // 4]
    for at, after in zip(places, [*places[1:], None], strict=True):
        between = footprints[at + 1] if at + 1 < len(footprints) and not footprints[at + 1].name else nothing
        following = nothing if after is None else footprints[after]
        inside = [target for name in footprints[at].name.split(", ") for target in layers.pop(name, ())]
        timeline.add_stage(footprints[at], between, following, inside, least)


def lay_out(
    setting: Setting,
    pipeline: str,
    footprints: Sequence[Footprint],
    layers: Mapping[str, Sequence[Target]],
    beside: Mapping[str, Beside] = MappingProxyType({}),
) -> Timeline:
    """Put the stages of a pipeline in their order.

    Args:
        setting: what they have in common.
        pipeline: `data_free`, `basic` or `sequential`.
        footprints: of one forward, stretch by stretch.
        layers: modules that change, by stage; "" for those in none.
        beside: what modifiers compute beside all of these, by label.

    Returns:
        All stages.
    """
    everything = [target for targets in layers.values() for target in targets]
    places = {place: {name: one for name, one in beside.items() if one.place == place} for place in ("ahead", "within", "behind")}
    behind = [Timeline(setting).kept_bytes(one, footprints) for one in places["behind"].values()]
    setting = replace(setting, kept_bytes=sum(behind))
    timeline = Timeline(setting, places["within"].values())
    for name, one in places["ahead"].items():
        timeline.add_beside(name, footprints, everything, one)
    _add_stages(timeline, setting, pipeline, footprints, layers)
    for name, one in places["behind"].items():
        timeline.add_beside(name, footprints, everything, one)
    timeline.add_fixed("save", "save", max((target.number("bytes_after") for target in everything), default=0))
    return timeline


def _add_stages(
    timeline: Timeline, setting: Setting, pipeline: str, footprints: Sequence[Footprint], layers: Mapping[str, Sequence[Target]]
) -> None:
    """Add what the pipeline does."""
    everything = [target for targets in layers.values() for target in targets]
    num_batches = setting.batches.num_batches
    if pipeline == "data_free":
        timeline.add_whole("compress", [], everything, 0)
    elif pipeline == "basic" or not any(stretch.name for stretch in footprints):  # no layers: the whole model is one stage
        looks = min(2.0, num_batches)  # what forwards leave behind is looked at on the first two batches
        flowing = num_batches if setting.flows else 0
        timeline.add_whole(
            "all layers" if pipeline == "basic" else "the model", footprints, everything, flowing + looks, setting.copied_bytes
        )
    else:
        timeline.add_whole("trace", footprints, [], 3, setting.copied_bytes)  # recorded, run, and held against the plain model
        _add_layers(timeline, footprints, dict(layers))
        timeline.add_whole("rest", [footprints[-1]], layers.get("", ()), num_batches if layers.get("") and setting.flows else 1)
