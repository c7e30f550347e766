"""What the pruning modifiers share: masks that are chosen outside of the training step and applied inside it.

A mask is DATA: it is written in place at BATCH_START and BATCH_END, so a captured step goes on with it. The step applies it twice:
gradients of pruned weights become zero before the optimizer's step, and the weights themselves after it. Switching masks on and off is
STRUCTURE and part of `plan_key`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field, PrivateAttr, ValidationInfo, field_validator
from torch import Tensor, nn

from compressor.algorithms.pruning.magnitude import Blocks, Pattern, num_zeros, removed_share
from compressor.errors import LifecycleError, TargetError
from compressor.lifecycle import Event, EventType, Modifier, ModuleRecord, PlannedModule, State
from compressor.lifecycle.state import Detail, StageValue
from compressor.model.folder import some
from compressor.model.targets import check_patterns, loose_patterns, overlaps_itself, resolve_layers, share_values
from compressor.nn import QuantizedLayer, is_quantizable
from compressor.nn.build import missing_parameter
from compressor.nn.fake_quant import FakeQuantizedLayer
from compressor.nn.quantized_linear import is_conv1d

_WHOLE_RUN = (-math.inf, math.inf)  # a phase beside which no modifier has another
_MORE_ZEROS = (
    "more would become zero than was asked for; add it to ignore, or give it memory of its own: "
    "module.weight = nn.Parameter(module.weight.detach().clone(memory_format=torch.contiguous_format))"
)


class PruningModifier(Modifier):
    """Base of the modifiers that keep weights at zero.

    Attributes:
        targets: class names, dotted names or `re:` patterns of modules with a weight.
        ignore: patterns of modules that stay as they are.
    """

    contract_tags: ClassVar[Collection[str]] = frozenset({"in_place", "idempotent"})

    targets: list[str] = Field(default_factory=lambda: ["Linear"])
    ignore: list[str] = Field(default_factory=list)

    _modules: dict[str, nn.Module] = PrivateAttr(default_factory=dict)
    _pruned: dict[str, Tensor] = PrivateAttr(default_factory=dict)
    _active: bool = PrivateAttr(default=False)
    _worked: bool = PrivateAttr(default=False)
    _removed: dict[str, Tensor] = PrivateAttr(default_factory=dict)

    @field_validator("targets", "ignore", mode="before")
    @classmethod
    def _one_pattern_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("targets", "ignore", mode="after")
    @classmethod
    def _patterns_mean_something(cls, value: list[str], info: ValidationInfo) -> list[str]:
        check_patterns(value, required=info.field_name == "targets")
        return value

    def plan_key(self) -> Hashable:
        """Return whether masks are applied: that changes the operators of a step, which weights are masked does not."""
        return "masked" if self._active else "free"

    def training_tensors(self) -> Mapping[str, Tensor]:
        """Return the masks, True where a weight is kept at zero, and what they removed; they are there from the start on."""
        masks = {f"{name}.pruned": mask for name, mask in self._pruned.items()}
        return masks | {f"{name}.removed": share for name, share in self._removed.items()}

    def on_initialize(self, state: State) -> bool:
        """Find the weights; nothing is changed yet."""
        self._modules = self.prunable(state.model)
        loose = loose_patterns(state.model, self.targets, self.ignore, _has_rows)
        state.report.notes += [f"{self.label}: {said}" for said in loose]
        self.hold_weights(state)
        state.touch(self._modules)
        state.sparse.update(self._modules)
        self._pruned, self._active, self._worked, self._removed = {}, False, False, {}
        return True

    def on_start(self, state: State, event: Event) -> None:
        """Make room for the masks, which begin to count; weights change with the first batch."""
        del state, event
        self.begin()

    def on_event(self, state: State, event: Event) -> None:
        """Apply the masks inside the step, up to the one behind `end`: until it begins, averages that are put in place have them, too."""
        del state
        if event.type is EventType.BATCH_START and self.should_end(event.index) and not self.keeps_on:
            self._active = False
        if self._active and event.type is EventType.OPTIM_PRE_STEP:
            for name, mask in self._pruned.items():
                gradient = self._modules[name].get_parameter("weight").grad
                if gradient is not None:
                    _as_rows(self._modules[name], gradient).masked_fill_(mask, 0.0)
        if self._active and event.type is EventType.OPTIM_POST_STEP:
            self.apply()

    def stage_memory(self, modules: Sequence[str]) -> Mapping[str, StageValue]:
        """Nothing: a resumed run prunes again, to the same bytes."""
        del modules
        return {}

    def on_finalize(self, state: State) -> bool:
        """Report what is zero now, and let the masks go."""
        if not self._worked:
            raise LifecycleError(
                f"{self.label}: it never pruned, because start={self.start} was not reached; "
                "give a start within the training, or no start for oneshot"
            )
        zeros, sizes, num_wanted, broken = {}, {}, 0, []
        for name in self._modules:
            weight = _present_weight(state.model.get_submodule(name))
            zeros[name], sizes[name] = int((weight == 0).sum()), weight.numel()
            num_wanted += self.num_wanted(weight)
            if not self.stands_in(weight):
                broken.append(name)
        said = self.fewer(zeros, sizes, num_wanted)
        if said is None and broken:
            said = f"{self.scheme_label()} does not stand in {some(broken)} at the end"
        if said is not None:
            state.report.notes.append(f"{self.label}: {said}; {self.why_fewer}")
        for name in self._modules:
            self.record(state, name, zeros[name] / sizes[name], stands=said is None)
        self._pruned, self._active = {}, False
        return True

    def prunable(self, model: nn.Module) -> dict[str, nn.Module]:
        """Find the modules whose weights are pruned.

        Args:
            model: on any device; not modified.

        Returns:
            Dotted name to module, in the order of the model; a weight that several modules share comes once.

        Raises:
            TargetError: a pattern matches nothing, or a module without a float weight of two dimensions or more, or with one that a
                module outside of the targets shares, or that shares memory with itself or another tensor.
        """
        found: dict[str, nn.Module] = {}
        seen: set[int] = set()
        resolved = self.targeted(model)
        for name, module in resolved.items():
            weight = module._parameters.get("weight")
            if weight is None or not _has_rows(module) or not weight.numel():
                why = missing_parameter(module) if is_quantizable(module) else ""
                none = f"{type(module).__name__} has no float weight of two dimensions or more with values to prune; add it"
                raise TargetError(f"{name}: its weight {why}, or add {name!r} to ignore" if why else f"{name}: {none} to ignore")
            if id(weight) not in seen:
                found[name] = module
            seen.add(id(weight))
        _check_ties(model, found, resolved.values())
        return found

    def targeted(self, model: nn.Module) -> dict[str, nn.Module]:
        """Resolve targets and ignore.

        Args:
            model: not modified.

        Returns:
            Dotted name to module, in the order of the model.
        """
        return resolve_layers(model, self.targets, self.ignore, _has_rows)

    def plan(self, model: nn.Module) -> list[PlannedModule]:
        """List what each targeted module would get.

        Args:
            model: on any device, the meta device included; not modified.

        Returns:
            One entry per module, in the order of the model.
        """
        planned = []
        for name, module in self.prunable(model).items():
            weight = weight_rows(module)
            size = weight.numel() * weight.element_size()
            details: dict[str, float | int | str] = {"shape": "x".join(map(str, weight.shape)), "bytes_before": size, "bytes_after": size}
            details |= {"rows": weight.shape[0], "columns": weight[0].numel()}
            planned.append(PlannedModule(name, type(self).__name__, self.scheme_label(), None, details))
        return planned

    def hold_weights(self, state: State) -> None:
        """Note in the state when this modifier decides which weights are zero, so that no other does then.

        Args:
            state: of the session, or of a plan.
        """
        if self.phase is not None:
            weights = {name: module.get_parameter("weight") for name, module in self.prunable(state.model).items()}
            state.hold(weights, self.label, *self.phase)

    @property
    def phase(self) -> tuple[float, float] | None:
        """From when to when this modifier decides which weights are zero; None where it only keeps zeros, which disturbs no other."""
        return None

    @property
    def keeps_on(self) -> bool:
        """Whether the masks count behind `end`, too."""
        return False

    @property
    def wanted_sparsity(self) -> float:
        """The share of zeros that a finished run should have; 0 where it is whatever was found."""
        return 0.0

    def num_wanted(self, weight: Tensor) -> int:
        """Say how many weights of a module should be zero when a run is finished.

        Args:
            weight: as `weights` gives it.

        Returns:
            Their number.
        """
        return num_zeros(self.wanted_sparsity, weight.numel())

    def fewer(self, zeros: Mapping[str, int], sizes: Mapping[str, int], num_wanted: int) -> str | None:
        """Say that fewer weights are zero at the end than should be.

        Args:
            zeros: number of zeros of each module.
            sizes: number of weights of each.
            num_wanted: how many should be zero, of all together.

        Returns:
            The first half of a note; None where there are as many.
        """
        found = sum(zeros.values())
        share = found / max(1, sum(sizes.values()))
        return f"{share:.1%} of the weights are zero at the end, not {self.wanted_sparsity:.1%}" if found < num_wanted else None

    @property
    def structure(self) -> Pattern | Blocks | None:
        """In which places zeros may lie; None for any."""
        return None

    def stands_in(self, weight: Tensor) -> bool:
        """Say whether the zeros of a weight lie where `structure` wants them.

        Args:
            weight: as `weights` gives it.

        Returns:
            True where they do.
        """
        structure = self.structure
        if isinstance(structure, Blocks):
            return structure.num_zero(weight) >= num_zeros(self.wanted_sparsity, structure.count(weight.shape))
        return structure is None or structure.stands_in(weight)

    @property
    def why_fewer(self) -> str:
        """Why less is zero at the end than was wanted, and what to do."""
        return "what came after it changed them: set leave_enabled, or keep the zeros with a ConstantPruningModifier"

    def scheme_label(self) -> str:
        """Return in words what targeted modules get."""
        raise NotImplementedError

    def begin(self) -> None:
        """Make masks that keep everything, and let them count."""
        self._pruned = {name: torch.zeros_like(weight_rows(module), dtype=torch.bool) for name, module in self._modules.items()}
        self._removed = {name: torch.zeros((), dtype=torch.float64, device=mask.device) for name, mask in self._pruned.items()}
        self._active = self._worked = True

    @torch.no_grad()
    def write_masks(self, masks: Sequence[Tensor]) -> None:
        """Take over new masks and apply them, in place. Changes the weights.

        Args:
            masks: in the order of the modules, True where a weight goes.
        """
        for (name, module), mask in zip(self._modules.items(), masks, strict=True):
            self._removed[name].copy_(removed_share(weight_rows(module), mask))
            self._pruned[name].copy_(mask)
        self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        """Set the masked weights to zero, in place; without reading anything on the host."""
        for name, mask in self._pruned.items():
            weight_rows(self._modules[name]).masked_fill_(mask, 0.0)

    def settle(self) -> None:
        """Apply the masks where they count."""
        if self._active:
            self.apply()

    def weights(self) -> list[Tensor]:
        """Return the weights, detached, [R, C] for linear layers; in the order of the modules."""
        return [weight_rows(module) for module in self._modules.values()]

    def record(self, state: State, name: str, sparsity: float, stands: bool) -> None:
        """Note the share of zeros that a module has at the end, and what was pruned where that stands, whoever has the module now.

        Args:
            state: of the run; its report changes.
            name: dotted module name.
            sparsity: the share.
            stands: there are as many zeros as were wanted, where they were wanted.
        """
        known = state.report.modules.get(name)
        if known is None:
            removed = self._removed.get(name)
            known = ModuleRecord(name, type(self).__name__, self.scheme_label(), 0.0 if removed is None else float(removed))
        elif self.phase not in (None, _WHOLE_RUN) and known.modifier == type(self).__name__:
            known = dataclasses.replace(known, scheme=f"{known.scheme}, {self.scheme_label()}")
        details: dict[str, Detail] = {**known.details, "sparsity": sparsity}
        if self.phase is not None and stands:
            said = known.details.get("pruned")  # by another such modifier, at another time
            details["pruned"] = self.scheme_label() if said is None else f"{said}; {self.scheme_label()}"
        state.report.modules[name] = dataclasses.replace(known, details=details)


def _has_rows(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() >= 2 and weight.is_floating_point()


def _check_ties(model: nn.Module, pruned: Mapping[str, nn.Module], targets: Collection[nn.Module]) -> None:
    """Refuse weights of which another tensor holds a part, or that hold one place twice: more would become zero than anybody asked for."""
    inside = {id(module) for module in targets}
    owners: dict[int, list[tuple[str, Tensor]]] = {}
    for name, module in pruned.items():
        weight = module.get_parameter("weight")
        if overlaps_itself(weight):
            raise TargetError(f"{name}: some values of its weight lie in one place of memory, and {_MORE_ZEROS}")
        owners.setdefault(weight.untyped_storage()._cdata, []).append((name, weight))
    for name, module in model.named_modules():
        is_target = id(module) in inside
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or tensor.layout is not torch.strided:
                continue
            others = [one for one in owners.get(tensor.untyped_storage()._cdata, ()) if not (is_target and one[1] is tensor)]
            owner = next((one for one, weight in others if share_values(weight, tensor)), None)
            if owner is not None and is_target:
                raise TargetError(f"{owner}: its weight lies in the memory of {f'{name}.{key}'.lstrip('.')}, and {_MORE_ZEROS}")
            if owner is not None:
                both = f"add {name!r} to targets, " if key == "weight" and _has_rows(module) else ""
                raise TargetError(
                    f"{owner}: its weight is tied to {f'{name}.{key}'.lstrip('.')}, which is no target and would be pruned with it; add "
                    f"{owner!r} to ignore, {both}or untie the weights first"
                )


def weight_rows(module: nn.Module) -> Tensor:
    """Return the weight of a module without its graph: [R, C] for linear layers (for Conv1D the transpose), as it lies for others.

    Args:
        module: has a parameter `weight`.

    Returns:
        A view; writing into it changes the weight.
    """
    return _as_rows(module, module.get_parameter("weight").detach())


def _as_rows(module: nn.Module, tensor: Tensor) -> Tensor:
    return tensor.t() if is_conv1d(module) else tensor


def _present_weight(module: nn.Module) -> Tensor:
    """The values that the checkpoint will hold: a layer that trains with rounding becomes codes after this modifier is finalized."""
    if isinstance(module, FakeQuantizedLayer):
        return module.fake_weight().detach()
    return module.dequantized_weight() if isinstance(module, QuantizedLayer) else weight_rows(module)
