"""Which module gets which scheme: what the settings of `compressor.modifiers.schemes.settings` come to on a model.

All of them resolve to one table, module name -> scheme, before any work starts.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from compressor.errors import SchemeError, TargetError
from compressor.lifecycle import PlannedModule, Report
from compressor.model.experts.unfuse import check_no_unknown_experts
from compressor.model.folder import some
from compressor.model.targets import closeness, loose_patterns, matches, owners_of_parameters, resolve_layers
from compressor.modifiers.schemes.settings import SchemeSettings
from compressor.nn import check_fit, is_quantizable, weight_of
from compressor.nn.build import missing_parameter
from compressor.numerics import QuantizationArgs, QuantizationScheme
from compressor.numerics.packing import quantized_bytes

_LOST = 0.9  # relative squared error, 1 where all became zero; 2 bits have 0.3 to 0.6

# Linear layers that are more than linear: a router that is a subclass of nn.Linear also chooses experts, and no quantized layer does.

_TOLERANCE = 0.05  # relative; coarse, because a forward that does something else is off by far more


def check_fast_paths(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse layers whose weights torch reads past them: its fast path through a transformer layer, which only inference takes.

    Args:
        model: not modified.
        names: dotted names of the targets.

    Raises:
        TargetError: names them, and says what to do.
    """
    if not torch.backends.mha.get_fastpath_enabled():
        return
    found = [name for name in names if _is_read_past(model.get_submodule(name.rpartition(".")[0]))]
    if found:
        raise TargetError(
            f"{some(found)}: nn.TransformerEncoderLayer reads the weights of {len(found)} targets past them where it may take torch's fast "
            "path, and a quantized layer has no such weight; call torch.backends.mha.set_fastpath_enabled(False), here and where the "
            "compressed model runs, or ignore them"
        )


def _is_read_past(parent: nn.Module) -> bool:
    if not isinstance(parent, nn.TransformerEncoderLayer):
        return False
    attention: Any = parent.self_attn
    return bool(attention.batch_first and parent.activation_relu_or_gelu)


def check_linear_forwards(modules: Mapping[str, nn.Module]) -> None:
    """Refuse targets whose forward was exchanged, or computes something else than a product with their weight.

    Args:
        modules: targets by dotted name; not modified.

    Raises:
        TargetError: names them, and says what to do.
    """
    patched = [name for name, module in modules.items() if "forward" in vars(module)]
    if patched:
        raise TargetError(
            f"{some(patched)}: the forward of {len(patched)} targets was exchanged on the object, as hooks of accelerate do, and a "
            "quantized layer would leave it out; take it off (accelerate.hooks.remove_hook_from_module), or ignore them"
        )
    odd = {name: type(module).__name__ for name, module in modules.items() if isinstance(module, nn.Linear) and not _is_linear(module)}
    if odd:
        kinds = ", ".join(sorted(set(odd.values())))
        raise TargetError(
            f"{some(odd)}: {len(odd)} targets of class {kinds} are linear layers whose forward does more than multiply, which a quantized "
            f"layer would leave out; add {kinds} to ignore"
        )


@torch.no_grad()
def _is_linear(module: nn.Linear) -> bool:
    """Run a forward that is not torch's own on two random rows, without values with random weights."""
    if type(module).forward is nn.Linear.forward:
        return True
    module = _with_values(module) if module.weight.is_meta else module
    weight = module.weight
    rows = torch.randn(2, module.in_features, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(
        weight.device, weight.dtype
    )
    try:
        given: object = type(module).forward(module, rows)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        return False
    expected = nn.functional.linear(rows, weight, module.bias)
    if not isinstance(given, Tensor) or given.shape != expected.shape:
        return False
    if weight.is_meta:
        return True
    return torch.allclose(given.float(), expected.float(), rtol=_TOLERANCE, atol=_TOLERANCE * float(expected.float().abs().max()))


def _with_values(module: nn.Linear) -> nn.Linear:
    """The same with other weights; itself where it holds more, of which nobody here knows the values."""
    if {*module._parameters, *module._buffers, *module._modules} - {"weight", "bias"}:
        return module
    twin = copy.copy(module)
    generator = torch.Generator().manual_seed(1)
    twin._parameters = {
        name: None if one is None else nn.Parameter(torch.randn(one.shape, generator=generator, dtype=torch.float32).to(one.dtype))
        for name, one in module._parameters.items()
    }
    return twin


class SchemeTargets(SchemeSettings):
    """Settings of schemes, and which linear layers of a model they mean."""

    takes_embeddings: ClassVar[bool] = True  # False where the algorithm needs the inputs of a product

    def resolve(self, model: nn.Module) -> dict[str, QuantizationScheme]:
        """Decide which module gets which scheme.

        Args:
            model: on any device; not modified.

        Returns:
            Dotted module name to scheme, in the order of the model.

        Raises:
            TargetError: a pattern matches nothing, a target is no linear layer, or a weight is tied to another module.
            SchemeError: a group size does not divide the columns of some modules (all are named), or two schemes claim one module
                equally closely.
            ModelError: all linear layers are targeted, and some experts are kept in a way that hides theirs.
        """
        self.check_settings()
        modules: dict[str, nn.Module] = {}
        claims: dict[str, list[QuantizationScheme]] = {}
        for scheme in self.target_schemes():
            check_no_unknown_experts(model, scheme.targets, self.ignore)
            for name, module in resolve_layers(model, scheme.targets, self.ignore, self._is_layer).items():
                modules[name] = module
                claims.setdefault(name, []).append(scheme)
        found = {name: self._closest(name, modules[name], schemes) for name, schemes in claims.items()}
        _check_kinds(modules, type(self).__name__, embeddings=self.takes_embeddings)
        check_linear_forwards(modules)
        check_fast_paths(model, modules)
        _check_groups(found, modules)
        for name, module in _first_of_alike(modules, found).items():
            check_fit(module, found[name], name)
        _check_ties(model, modules)
        order = {name: index for index, (name, _) in enumerate(model.named_modules())}
        return dict(sorted(found.items(), key=lambda item: order[item[0]]))

    def _closest(self, name: str, module: nn.Module, schemes: list[QuantizationScheme]) -> QuantizationScheme:
        """The scheme that means a module most closely: by its name, a regular expression, its class; of one kind the first sorted."""
        if len(schemes) == 1:
            return schemes[0]
        ranks = [closeness(name, module, scheme.targets) for scheme in schemes]
        known = [rank for rank in ranks if rank is not None]
        best = [scheme for scheme, rank in zip(schemes, ranks, strict=True) if rank is None or rank == min(known)]
        if any(scheme != best[0] for scheme in best):
            raise SchemeError(
                f"{name}: two schemes of {type(self).__name__} claim it equally closely ({best[0].targets} and {best[1].targets}); make "
                "their targets disjoint, or name it in one of them (its whole name goes before re:, and re: before a class)"
            )
        return best[0]

    def pattern_notes(self, model: nn.Module) -> list[str]:
        """Say which patterns of the recipe match something else than layers, or nothing.

        Args:
            model: on any device; not modified.

        Returns:
            A sentence each.
        """
        targets = [target for scheme in self.target_schemes() for target in scheme.targets]
        said = [*loose_patterns(model, targets, self.ignore, self._is_layer), *self._contested(model)]
        return [f"{type(self).__name__}: {one}" for one in said]

    def _contested(self, model: nn.Module) -> list[str]:
        """Say of layers that two schemes mean by patterns of one kind which of them holds."""
        schemes = self.target_schemes()
        found: dict[tuple[str, str], list[str]] = {}
        for name, module in model.named_modules() if len(schemes) > 1 else ():
            if self._is_layer(module) and not any(matches(name, module, pattern) for pattern in self.ignore):
                ranks = sorted(rank for scheme in schemes if (rank := closeness(name, module, scheme.targets)) is not None)
                if len(ranks) > 1 and ranks[0][0] == ranks[1][0]:
                    found.setdefault((ranks[0][1], ranks[1][1]), []).append(name)
        return [
            f"{one!r} and {other!r} both mean {len(names)} layers ({some(names)}), which get the scheme of the first, as patterns sort"
            for (one, other), names in found.items()
        ]

    def _is_layer(self, module: nn.Module) -> bool:
        return _is_kind(module, embeddings=self.takes_embeddings)

    def plan(self, model: nn.Module) -> list[PlannedModule]:
        """List what each linear layer of the model would get, or why it stays as it is.

        Args:
            model: on any device, the meta device included; not modified.

        Returns:
            One entry per linear layer, in the order of the model.
        """
        self.kv_targets(model, self.ignore)
        schemes = self.resolve(model)
        shown = {name: module for name, module in model.named_modules() if name in schemes or isinstance(module, nn.Linear)}
        return [self._planned(name, module, schemes.get(name)) for name, module in shown.items()]

    def _planned(self, name: str, module: nn.Module, scheme: QuantizationScheme | None) -> PlannedModule:
        weight = weight_of(module)
        rows, columns = weight.shape
        before = weight.numel() * weight.element_size()
        details: dict[str, float | int | str] = {"shape": f"{rows}x{columns}", "rows": rows, "columns": columns, "bytes_before": before}
        if scheme is None or scheme.weights is None:
            ignored = [pattern for pattern in self.ignore if matches(name, module, pattern)]
            reason = f"ignored by {ignored[0]!r}" if ignored else "no target matches it"
            return PlannedModule(name, type(self).__name__, None, reason, {**details, "bytes_after": before})
        after = quantized_bytes(rows, columns, scheme, scale_bytes=weight.element_size())
        return PlannedModule(name, type(self).__name__, scheme_label(scheme.weights), None, {**details, "bytes_after": after})


def scheme_label(args: QuantizationArgs) -> str:
    """Return a short text for a weight format: `int4 group 128`, `int8 channel`, `float8 tensor`."""
    label = f"{args.type}{args.num_bits} {args.strategy}"
    label += f" {args.group_size}" if args.group_size and args.is_grouped else ""
    label += f" {args.block_structure[0]}x{args.block_structure[1]}" if args.block_structure else ""
    return label if args.symmetric else label + " asymmetric"


def lost_notes(report: Report, names: Iterable[str]) -> list[str]:
    """Name the modules of which next to nothing is left, such as one beside a much larger one with which it shares a global scale.

    Args:
        report: of the run.
        names: of modules that were quantized.

    Returns:
        A sentence, or none.
    """
    lost = {name: error for name, error in report.errors(names).items() if error >= _LOST}
    if not lost:
        return []
    return [
        f"{len(lost)} modules are lost ({some(lost)}: relative error {max(lost.values()):.3g}): their format, or a scale that they share "
        "with others, has no room for the sizes of their weights; ignore them, or give them another scheme"
    ]


def _is_kind(module: nn.Module, *, embeddings: bool) -> bool:
    return is_quantizable(module) and (embeddings or not isinstance(module, nn.Embedding))


def _check_kinds(modules: dict[str, nn.Module], modifier: str, *, embeddings: bool) -> None:
    others = {name: type(module).__name__ for name, module in modules.items() if not _is_kind(module, embeddings=embeddings)}
    if others:
        listed = ", ".join(f"{name} ({kind})" for name, kind in others.items())
        raise TargetError(f"{modifier}: targets that are no linear layers: {listed}; name linear layers or add these to ignore")
    for name, module in modules.items():
        why = missing_parameter(module)
        if why:
            raise TargetError(f"{modifier}: {name}: its weight {why}, or add {name!r} to ignore")
    empty = [f"{name} {list(weight_of(module).shape)}" for name, module in modules.items() if not weight_of(module).numel()]
    if empty:
        raise TargetError(f"{modifier}: {some(empty)}: the weight holds no values; add these to ignore")


def _first_of_alike(modules: dict[str, nn.Module], schemes: dict[str, QuantizationScheme]) -> dict[str, nn.Module]:
    """The first of all modules of one class, size and scheme, with attributes of the same names: a model has thousands of experts."""
    first: dict[Hashable, tuple[str, nn.Module]] = {}
    for name, module in modules.items():
        weight = weight_of(module)
        kind = (type(module), weight.shape, weight.dtype, id(schemes[name]))
        first.setdefault((kind, *vars(module), *module._parameters, *module._buffers, *module._modules), (name, module))
    return dict(first.values())


def _check_groups(schemes: dict[str, QuantizationScheme], modules: dict[str, nn.Module]) -> None:
    bad = []
    for name, scheme in schemes.items():
        columns = weight_of(modules[name]).shape[1]
        both = {"inputs": scheme.input_activations, "weights": scheme.weights}
        sizes = {args.group_size: what for what, args in both.items() if args is not None and args.group_size and args.is_grouped}
        bad += [f"{name} has {columns} columns for {what} of group_size={size}" for size, what in sizes.items() if columns % size]
    if bad:
        listed = ", ".join(bad[:3]) + (", ..." if bad[3:] else "")
        raise SchemeError(f"{len(bad)} modules: {listed}; columns must divide into groups: ignore these modules or choose a divisor")


def _check_ties(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    owners = owners_of_parameters(model)
    for name, module in modules.items():
        others = {*owners[id(module.get_parameter("weight"))]} - {f"{name}.weight"}
        if others:
            raise TargetError(f"{name}: its weight is tied to {sorted(others)}; add {name!r} to ignore or untie the weights first")
