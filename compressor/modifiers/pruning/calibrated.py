"""What SparseGPT and Wanda share: which layer gets which share of zeros, by what flows into it, and how a pruned weight is placed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator
from torch import Tensor, nn

from compressor.algorithms.pruning.magnitude import Pattern, pruned_weights, removed_share
from compressor.algorithms.pruning.wanda import layer_sparsities, outlier_share, scores
from compressor.errors import CalibrationError, RecipeError, SchemeError, TargetError
from compressor.lifecycle import Event, ModuleRecord, State
from compressor.lifecycle.state import Detail
from compressor.model.folder import some
from compressor.model.targets import matches
from compressor.modifiers.fallbacks import WithFallbacks
from compressor.modifiers.own_forwards import MeanSquare
from compressor.modifiers.pruning.magnitude import pattern_of
from compressor.modifiers.pruning.masks import PruningModifier, weight_rows
from compressor.nn.quantized_linear import is_conv1d

_ANY = "0:0"  # of llm-compressor, for no pattern


class CalibratedPruningModifier(PruningModifier, WithFallbacks):
    """Base of the modifiers that choose zeros by what flows into a layer.

    Attributes:
        sparsity: share of zeros, or one for each layer of the model in its order.
        mask_structure: `0:0` (or `unstructured`), or `N:M`: N of every M neighbours in a row stay, such as `2:4`.
        sparsity_profile: `owl`: layers with more outliers keep more weights.
        owl_m: multiple of a layer's mean score from which on a score is an outlier.
        owl_lmbda: the shares of the layers are at most twice this far apart.
    """

    sparsity: float | list[float]
    mask_structure: str = _ANY
    sparsity_profile: Literal["owl"] | None = None
    owl_m: float | None = Field(default=None, gt=0)
    owl_lmbda: float | None = Field(default=None, gt=0, lt=0.5)
    sequential_update: bool | None = None  # of llm-compressor, where either value means: one layer after another

    _pending: dict[str, nn.Module] = PrivateAttr(default_factory=dict)
    _shares: dict[str, float] = PrivateAttr(default_factory=dict)
    _zeros: dict[str, int] = PrivateAttr(default_factory=dict)

    @field_validator("sparsity_profile", mode="before")
    @classmethod
    def _in_small_letters(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @field_validator("sparsity", mode="after")
    @classmethod
    def _is_share(cls, value: float | list[float]) -> float | list[float]:
        given = value if isinstance(value, list) else [value]
        if not given or not all(0 <= one < 1 for one in given) or not any(given):
            raise RecipeError(f"{value} is no share of weights between 0 and 1, or prunes nothing or everything; give for example 0.5")
        return value

    @field_validator("mask_structure", mode="before")
    @classmethod
    def _is_structure(cls, value: Any) -> Any:
        if isinstance(value, int):
            raise RecipeError(f"mask_structure={value} is a number: YAML reads 2:4 as 2 * 60 + 4; put it in quotes, '2:4'")
        if isinstance(value, str) and value != _ANY:
            pattern_of(value)
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        given = self.sparsity if isinstance(self.sparsity, list) else [self.sparsity]
        pattern = self.structure
        if pattern is not None and any(abs(one - pattern.sparsity) > 1e-9 for one in given):
            raise RecipeError(
                f"sparsity={self.sparsity} is not that of mask_structure={self.mask_structure!r}, of which {pattern.keep} of {pattern.of} "
                f"weights stay; give sparsity={pattern.sparsity:g}"
            )
        owl = (self.sparsity_profile is not None, self.owl_m is not None, self.owl_lmbda is not None)
        if any(owl) and not all(owl):
            raise RecipeError("sparsity_profile: owl needs owl_m and owl_lmbda, such as 5 and 0.08, and these need it; give all or none")
        if all(owl) and (pattern is not None or isinstance(self.sparsity, list)):
            what = "a pattern fixes the share of each" if pattern is not None else "a list gives each its own"
            raise RecipeError(f"sparsity_profile: owl gives layers shares of their own, and {what}; leave one of the two out")
        if self.start is not None or self.end is not None or self.update:
            raise RecipeError(f"start={self.start}, end={self.end}: it prunes during a calibration, which has no steps; leave them out")
        return self

    @property
    def structure(self) -> Pattern | None:
        """Which neighbours may go; None for any."""
        return None if self.mask_structure == _ANY else pattern_of(self.mask_structure)

    @property
    def why_fewer(self) -> str:
        """What moves zeros, and what to do."""
        keeps = "GPTQModifier keeps them with preserve_sparsity_mask, AutoRoundModifier and rounding in any case"
        return f"what came after it changed them: {keeps}"

    @property
    def phase(self) -> tuple[float, float]:
        """The whole run."""
        return -math.inf, math.inf

    @property
    def wanted_sparsity(self) -> float:
        """Whatever was chosen layer by layer."""
        return 0.0

    def scheme_label(self) -> str:
        """Return in words what targeted modules get."""
        structure = "unstructured" if self.structure is None else self.mask_structure
        if isinstance(self.sparsity, list):
            return f"{structure}, {min(self.sparsity):.4g} to {max(self.sparsity):.4g} zeros"
        return f"{structure}, {100 * self.sparsity:.4g}% zeros" + (", by outliers" if self.sparsity_profile else "")

    def prunable(self, model: nn.Module) -> dict[str, nn.Module]:
        """Find the linear layers that the targets are or hold; see PruningModifier.

        Args:
            model: on any device; not modified.

        Returns:
            Dotted name to module.

        Raises:
            TargetError: a pattern matches nothing, or something without linear layers; a tied weight.
            SchemeError: rows do not divide into runs of the pattern.
        """
        found = super().prunable(model)
        self._check_alone(model, found)
        if self.structure is not None:
            shapes = {name: tuple(weight_rows(module).shape) for name, module in found.items()}
            bad = [f"{name} {list(shape)}" for name, shape in shapes.items() if shape[1] % self.structure.of]
            if bad:
                listed = ", ".join(bad[:3]) + (", ..." if bad[3:] else "")
                raise SchemeError(
                    f"{len(bad)} modules: the rows of {listed} do not divide into runs of {self.structure.of} for {self.mask_structure}; "
                    "add them to ignore"
                )
        return found

    def _check_alone(self, model: nn.Module, found: Mapping[str, nn.Module]) -> None:
        """Refuse a weight that several targets have: each meets inputs of its own, by which it would lose other values."""
        owners = {id(module.get_parameter("weight")): name for name, module in found.items()}
        for name, module in self.targeted(model).items():
            owner = owners[id(module.get_parameter("weight"))]
            if owner != name:
                raise TargetError(
                    f"{owner}: its weight is tied to {name}.weight, whose inputs are others, so that each would lose other values; add "
                    "both to ignore, or untie the weights first"
                )

    def targeted(self, model: nn.Module) -> dict[str, nn.Module]:
        """Resolve the targets: linear layers, and those inside of anything else that they name."""
        inside: dict[str, nn.Module] = {}
        for name, module in super().targeted(model).items():
            linear = {below: part for below, part in module.named_modules(prefix=name) if isinstance(part, nn.Linear) or is_conv1d(part)}
            if not linear:
                raise TargetError(f"{name}: {type(module).__name__} is and holds no linear layer to prune; add it to ignore")
            inside |= linear
        found = {name: module for name, module in inside.items() if not any(matches(name, module, pattern) for pattern in self.ignore)}
        return {name: module for name, module in model.named_modules() if name in found}

    def on_initialize(self, state: State) -> bool:
        """Find the weights and their shares of zeros."""
        super().on_initialize(state)
        self._pending, self._zeros, self._worked = dict(self._modules), {}, True
        self._shares = self._given_shares()
        self.forget_fallbacks()
        return True

    def on_start(self, state: State, event: Event) -> None:
        """Nothing: it prunes in a calibration."""

    def on_calibration_start(self, state: State, event: Event) -> None:
        """A subclass hooks what it learns from."""

    def share_of(self, name: str) -> float:
        """Return the share of zeros of a module."""
        return self._shares[name]

    def place(
        self, state: State, name: str, pruned_RC: Tensor, error: float, num_tokens: int | None, details: Mapping[str, Detail]
    ) -> None:
        """Write a pruned weight, and record it. Changes the model.

        Args:
            state: of the run.
            name: dotted module name.
            pruned_RC: [R, C].
            error: relative squared error of the outputs.
            num_tokens: that were looked at.
            details: of the record.
        """
        del self._pending[name]
        self._zeros[name] = int((pruned_RC == 0).sum())
        state.own_tensors(name)
        weight_rows(state.model.get_submodule(name)).copy_(pruned_RC)
        state.report.modules[name] = ModuleRecord(name, type(self).__name__, self.scheme_label(), error, num_tokens, dict(details))

    def on_finalize(self, state: State) -> bool:
        """Report what is zero now."""
        if self._pending:
            raise CalibrationError(f"{self.label}: {some(self._pending)} are not pruned yet; run a calibration first")
        return super().on_finalize(state)

    def fewer(self, zeros: Mapping[str, int], sizes: Mapping[str, int], num_wanted: int) -> str | None:
        """Say how many of the zeros that were chosen another modifier has changed, where it has."""
        del sizes, num_wanted
        lost = sum(max(0, chosen - zeros[name]) for name, chosen in self._zeros.items())
        return f"at least {lost:,} of the {sum(self._zeros.values()):,} weights that were pruned are not zero at the end" if lost else None

    def prune_by_size(self, state: State, name: str, kind: str = "no_tokens", detail: str = "no calibration token reached it") -> None:
        """Prune a module of which nothing else is known by the sizes of its weights: a fallback, which the recipe must allow.

        Args:
            state: of the run.
            name: dotted module name.
            kind: of the fallback.
            detail: what happened.
        """
        self.fall_back(state, name, kind, detail)
        weight_RC = weight_rows(self._pending[name])
        (gone_RC,) = pruned_weights([weight_RC], self.share_of(name), self.structure, names=[name])
        error = float(removed_share(weight_RC, gone_RC))
        self.place(state, name, weight_RC.masked_fill(gone_RC, 0.0), error, None, {"fallback": kind})

    def _given_shares(self) -> dict[str, float]:
        layers = _layers(self._modules)
        if not isinstance(self.sparsity, list):
            return dict.fromkeys(self._modules, self.sparsity)
        if len(self.sparsity) != len(layers):
            raise TargetError(
                f"{self.label}: sparsity lists {len(self.sparsity)} shares, and the targets lie in {len(layers)} layers "
                f"({', '.join(list(layers)[:3])}{', ...' if len(layers) > 3 else ''}); give one for each"
            )
        return {name: share for share, names in zip(self.sparsity, layers.values(), strict=True) for name in names}

    def share_by_outliers(self, state: State, squares: Mapping[str, MeanSquare]) -> None:
        """Give each layer its share of zeros by its outliers.

        Args:
            state: of the run; its report gets a note.
            squares: of the uncompressed model.
        """
        assert self.owl_m is not None and self.owl_lmbda is not None and isinstance(self.sparsity, float)
        layers = {layer: [name for name in names if squares[name].num_tokens] for layer, names in _layers(self._modules).items()}
        layers = {layer: names for layer, names in layers.items() if names}
        found = []
        for names in layers.values():
            found.append(
                outlier_share([scores(weight_rows(self._modules[name]), squares[name].value(), name) for name in names], self.owl_m)
            )
        sizes = [sum(weight_rows(self._modules[name]).numel() for name in names) for names in layers.values()]
        shares = layer_sparsities(found, sizes, self.sparsity, self.owl_lmbda)
        for names, share in zip(layers.values(), shares, strict=True):
            self._shares |= dict.fromkeys(names, share)
            widths = {name: weight_rows(self._modules[name]).shape[1] for name in names}
            if gone := next((name for name, width in widths.items() if round(share * width) == width), None):
                raise CalibrationError(
                    f"{self.label}: by its outliers {gone} gets {share:.1%} zeros, all {widths[gone]} weights of a row; lower owl_lmbda or "
                    "sparsity"
                )
        span = f"{min(shares):.1%} to {max(shares):.1%}"
        state.report.notes.append(f"{self.label}: by their outliers {len(layers)} layers get {span} zeros, {self.sparsity:.1%} together")


def dead_input(num_tokens: int) -> tuple[str, str]:
    """Name the fallback of a module whose whole input was zero.

    Args:
        num_tokens: that reached it.

    Returns:
        Its kind, and what happened.
    """
    return "dead_input", f"its input was zero, or below 1e-22, on all {num_tokens} calibration tokens"


def _layers(names: Iterable[str]) -> dict[str, list[str]]:
    """Group modules by the layer that they lie in: up to the first number of their dotted names; others by themselves."""
    layers: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        number = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
        layers.setdefault(".".join(parts[: number + 1]), []).append(name)
    return layers
