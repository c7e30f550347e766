"""The graph engine as a plan sees it: which program each batch takes, the proof that it is right, and what there is to say about it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from compressor.data.collate import Batch, batch_to
from compressor.tracing.graph.guards import describe_guard
from compressor.tracing.graph.planner import GraphPlanner, Variant, content_digest
from compressor.tracing.graph.verify import Case, verify_programs
from compressor.tracing.graph.wording import Wording
from compressor.tracing.partition import module_names
from compressor.tracing.picking import facts_of, other_content, pick
from compressor.tracing.records import Guard, Stage, Verify


class GraphEngine:
    """A planner, with the proofs of its programs.

    Attributes:
        planner: records programs and gives batches theirs.
        num_verified: batches on which a program was held against the plain model.
        kept: attributes of modules by which one batch changes what the next one gives in the plain model.
    """

    def __init__(self, model: nn.Module, planner: GraphPlanner, verify: Verify, device: torch.device | None) -> None:
        """Start without a program."""
        self.planner = planner
        self.num_verified = 0
        self.kept: set[str] = set()
        self._model, self._verify, self._device = model, verify, device
        self._proved: WeakKeyDictionary[Variant, dict[Any, set[Any]]] = WeakKeyDictionary()

    def choose(self, batches: Sequence[Batch]) -> list[Variant]:
        """Give each batch its variant, and prove those that are new.

        Args:
            batches: not modified.

        Returns:
            A variant for each batch.

        Raises:
            TracingError: the engine cannot follow the model, or a program computes something else than the plain model.
        """
        chosen = self.planner.choose(batches)
        for variant in self.planner.variants:
            variant.num_batches = sum(one is variant for one in chosen)
        self.verify(chosen, batches, self._to_prove(chosen, batches))
        return chosen

    def _to_prove(self, chosen: Sequence[Variant], batches: Sequence[Batch]) -> list[int]:
        """Choose the batches for the proof; takes them for proved from now on."""
        taken: list[int] = []
        for variant in dict.fromkeys(chosen) if self._verify != "off" else ():
            samples = [sample for sample, one in enumerate(chosen) if one is variant]
            proved = self._proved.setdefault(variant, {})
            if self._verify == "all":
                picked = pick({sample: {"content": content_digest(batches[sample])} for sample in samples}, proved, len(batches))
            else:
                picked = pick({sample: facts_of(batches[sample]) for sample in samples}, proved)
                picked += other_content([sample for sample in samples if sample not in picked], picked, batches, proved)
            taken += picked
        if len(taken) == 1:  # alone it would meet nothing that another sample has left behind
            taken += [sample for sample in range(len(batches)) if sample != taken[0]][:1]
        return taken

    def verify(self, chosen: Sequence[Variant], batches: Sequence[Batch], samples: Sequence[int]) -> None:
        """Hold programs, as they are now, against the plain model.

        Args:
            chosen: variant of each batch.
            batches: not modified.
            samples: numbers of the batches to compare.

        Raises:
            TracingError: the first difference.
        """
        cases = []
        for sample in samples:
            batch = batches[sample] if self._device is None else batch_to(batches[sample], self._device)
            cases.append(Case(chosen[sample].program, batch, sample))
        self.kept |= set(verify_programs(self._model, cases, self.planner.groups, self.planner.returning))
        self.num_verified += len(samples)

    def stages(self) -> tuple[Stage, ...]:
        """Describe the stages of the first variant."""
        segments = self.planner.variants[0].program.segments
        made = []
        for index, segment in enumerate(segments[1:]):
            following = segments[index + 2].live_in if index + 2 < len(segments) else ()
            modules = tuple(name for target in segment.targets for name in module_names(self._model, target))
            calls = sum(
                node.op == "call_module" and (str(node.target) if node.target != "_root" else "") in segment.targets
                for node in self.planner.variants[0].program.flat.nodes
            )
            made.append(
                Stage(
                    index=index,
                    target_names=segment.targets,
                    modules=modules,
                    live_in=segment.live_in,
                    live_out=following,
                    mutates=tuple(name for name in segment.live_in if name in segment.mutates),
                    live_bytes=segment.live_bytes,
                    num_calls=calls,
                    graph=segment.graph,
                )
            )
        return tuple(made)

    def guards(self) -> tuple[Guard, ...]:
        """Describe the guards of all variants, but for those that cannot fail."""
        names = list(inspect.signature(self._model.forward).parameters)
        wording = Wording({f"arg_{place}": name for place, name in enumerate(names)})
        made = []
        for variant in self.planner.variants:
            place = {node.name: index for index, segment in enumerate(variant.program.segments) for node in segment.graph.nodes}
            made += [describe_guard(node, place.get(node.name, 0), variant.index, wording) for node in variant.program.guard_nodes]
        return tuple(one for one in made if one is not None)
