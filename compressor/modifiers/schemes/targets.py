"""Which module gets which scheme: the settings that all quantizing modifiers share, and what they resolve to.

A recipe names schemes in one of three ways, as in llm-compressor: `scheme: W4A16` with `targets`, `scheme: {W4A16: [targets]}`, or
`config_groups` with full arguments. All of them resolve to one table, module name -> scheme, before any work starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator
from torch import Tensor, nn

from compressor.errors import SchemeError, TargetError
from compressor.lifecycle import PlannedModule
from compressor.model.experts.unfuse import check_no_unknown_experts
from compressor.model.folder import some
from compressor.model.targets import check_patterns, loose_patterns, matches, resolve_layers
from compressor.modifiers.schemes.kv_cache import KVCacheTargets
from compressor.nn import check_fit, is_quantizable, weight_of
from compressor.numerics import QuantizationArgs, QuantizationScheme, preset_scheme
from compressor.numerics.packing import quantized_weight_bytes
from compressor.numerics.scheme import OBSERVER_KINDS
from compressor.spelling import suggest

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
    """Run a forward that is not torch's own on two random rows."""
    if type(module).forward is nn.Linear.forward:
        return True
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


# Settings that recipes written by llm-compressor carry and that mean nothing here: accepted where they ask for what happens anyway.
#
# llm-compressor writes every default of a modifier into the recipe it saves. A value that asks for something else is refused by name, so
# that no setting is dropped that would have changed the result.

# Setting -> the values that ask for what happens anyway; None: any value, since it changes how the work is split but no result.
FOREIGN_SETTINGS: Mapping[str, tuple[Any, ...] | None] = MappingProxyType(
    {
        "batched_quantization": None,
        "bypass_divisibility_checks": (False,),
        "device_ids": None,
        "enable_torch_compile": None,
        "offload_hessians": None,
        "output_observer": (None,),
        "requires_calibration_data": (True, False),
        "sequential_update": (True, None),
    }
)
OBSERVER_FIELDS: Mapping[str, str] = MappingProxyType({"weights": "weight_observer", "input": "input_observer"})


def own_settings(data: Mapping[str, Any], modifier: str) -> dict[str, Any]:
    """Translate the settings of a modifier as llm-compressor writes them.

    Args:
        data: setting name to value; not modified.
        modifier: class name, for errors only.

    Returns:
        Settings of ours: foreign ones are gone, `observer: {weights: mse}` has become `weight_observer: mse`.

    Raises:
        SchemeError: a foreign setting asks for something that is not done here.
    """
    own = dict(data)
    for name, values in FOREIGN_SETTINGS.items():
        if name in own and values is not None and own[name] not in values:
            raise SchemeError(f"{modifier}.{name}: {own[name]!r} asks for something that is not done here; leave it out")
        own.pop(name, None)
    observers = own.pop("observer", None)
    if observers is None:
        return own
    if not isinstance(observers, Mapping) or not set(observers) <= set(OBSERVER_FIELDS):
        raise SchemeError(
            f"{modifier}.observer: {observers!r} is no mapping of {' and '.join(OBSERVER_FIELDS)} to observers; give such a one"
        )
    return own | {OBSERVER_FIELDS[kind]: observer for kind, observer in observers.items()}


_NO_SCHEME = "neither scheme nor config_groups was"


class SchemeTargets(KVCacheTargets):
    """Settings that say which linear layers get which scheme.

    Attributes:
        targets: class names, dotted names or `re:` patterns of the modules that get `scheme`.
        ignore: patterns of modules that stay as they are.
        scheme: preset name, or a mapping of preset names to targets.
        config_groups: named schemes with full arguments, in place of `scheme`.
        kv_cache_scheme: format of keys and values; None leaves them as they are.
        weight_observer: observer of all weights, in place of the scheme's own.
        input_observer: observer of all static inputs, in place of the scheme's own.
    """

    model_config = ConfigDict(extra="forbid")
    takes_embeddings: ClassVar[bool] = True  # False where the algorithm needs the inputs of a product
    takes_order: ClassVar[bool] = False  # True where the algorithm can take columns in an order of its own
    borrows: ClassVar[bool] = False  # True where it may be given beside a QuantizationModifier that says the schemes

    targets: list[str] = Field(default_factory=lambda: ["Linear"])
    ignore: list[str] = Field(default_factory=list)
    scheme: str | dict[str, list[str]] | None = None
    config_groups: dict[str, QuantizationScheme] | None = None
    weight_observer: str | None = None
    input_observer: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _settings_of_llm_compressor(cls, data: Any) -> Any:
        return own_settings(data, cls.__name__) if isinstance(data, Mapping) else data

    @field_validator("targets", "ignore", mode="before")
    @classmethod
    def _one_pattern_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("targets", "ignore", mode="after")
    @classmethod
    def _patterns_mean_something(cls, value: list[str], info: ValidationInfo) -> list[str]:
        check_patterns(value, required=info.field_name == "targets")
        return value

    @field_validator("scheme", "config_groups", mode="after")
    @classmethod
    def _schemes_mean_something(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if not value:
            raise SchemeError("{} holds no scheme, so nothing would be changed; add one with its targets")
        for name, content in value.items():
            try:
                check_patterns(content.targets if isinstance(content, QuantizationScheme) else content, required=True)
            except TargetError as error:
                raise TargetError(f"targets of {name}: {error}") from None
        return value

    @field_validator("weight_observer", "input_observer", mode="after")
    @classmethod
    def _observer_exists(cls, value: str | None) -> str | None:
        if value is not None and value not in OBSERVER_KINDS:
            raise SchemeError(f"{value!r} does not exist; {suggest(value, list(OBSERVER_KINDS))}")
        return value

    @field_validator("scheme", mode="before")
    @classmethod
    def _scheme_targets_are_lists(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: [targets] if isinstance(targets, str) else targets for name, targets in value.items()}
        return value

    @model_validator(mode="after")
    def _one_source_of_schemes(self) -> SchemeTargets:
        if self.scheme is None and self.config_groups is None and self.kv_cache_scheme is not None:
            for name, value, default in (("targets", self.targets, ["Linear"]), ("weight_observer", self.weight_observer, None)):
                if value != default:
                    raise SchemeError(f"{name}: {value!r} was given without a scheme for weights; leave it out, or give a scheme")
            return self  # keys and values only
        if self.lacks_schemes:
            return self
        if (self.scheme is None) == (self.config_groups is None):
            given = "both scheme and config_groups were" if self.scheme is not None else _NO_SCHEME
            raise SchemeError(f"{type(self).__name__}: {given} given; give exactly one of them")
        self._check_use()
        return self

    @property
    def lacks_schemes(self) -> bool:
        """True where a modifier before this one must say all that concerns schemes."""
        return self.borrows and not set(SchemeTargets.model_fields) & {
            name
            for name in self.model_fields_set
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True)
        }

    def check_settings(self) -> None:
        """Refuse what no other modifier of the recipe makes up for.

        Raises:
            SchemeError: there is no scheme, or one that asks for an order of columns which nobody makes.
        """
        if self.lacks_schemes:
            raise SchemeError(f"{type(self).__name__}: {_NO_SCHEME} given, by a QuantizationModifier before it neither; give one of them")
        ordered = [scheme for scheme in self.target_schemes() if scheme.weights is not None and scheme.weights.actorder == "group"]
        if ordered and not self.takes_order:
            raise SchemeError(f"{type(self).__name__}: actorder='group' was given to a modifier that orders no columns; use GPTQModifier")

    def _check_use(self) -> None:
        """Refuse settings that would do nothing."""
        schemes = self.target_schemes()
        own = {target for scheme in schemes for target in scheme.targets}
        if not isinstance(self.scheme, str) and self.targets != ["Linear"] and set(self.targets) != own:
            raise SchemeError(f"targets: {self.targets} was given beside schemes that name their own; leave targets out")
        inputs = [scheme.input_activations for scheme in schemes]
        if self.input_observer is not None and all(args is None or args.dynamic is True for args in inputs):
            raise SchemeError("input_observer: no scheme has inputs with static scales, which it could find; leave it out")

    def target_schemes(self) -> list[QuantizationScheme]:
        """List the schemes of the recipe.

        Returns:
            Each scheme with its targets, observers and column order filled in.

        Raises:
            SchemeError: a preset does not exist.
        """
        if self.config_groups is not None:
            schemes = list(self.config_groups.values())
        elif isinstance(self.scheme, dict):
            schemes = [preset_scheme(name, targets) for name, targets in self.scheme.items()]
        elif self.scheme is None and self.kv_cache_scheme is not None:
            schemes = []
        else:
            assert self.scheme is not None
            schemes = [preset_scheme(self.scheme, self.targets)]
        return [self._completed(scheme) for scheme in schemes]

    def _completed(self, scheme: QuantizationScheme) -> QuantizationScheme:
        weights, inputs = scheme.weights, scheme.input_activations
        if weights is None:
            raise SchemeError(f"{type(self).__name__}: a scheme for {scheme.targets} without weights was given; add its weights")
        if self.weight_observer is not None:
            weights = weights.model_copy(update={"observer": self.weight_observer})
        if inputs is not None and self.input_observer is not None:
            inputs = inputs.model_copy(update={"observer": self.input_observer})
        return scheme.model_copy(update={"weights": weights, "input_activations": inputs})

    def resolve(self, model: nn.Module) -> dict[str, QuantizationScheme]:
        """Decide which module gets which scheme.

        Args:
            model: on any device; not modified.

        Returns:
            Dotted module name to scheme, in the order of the model.

        Raises:
            TargetError: a pattern matches nothing, a target is no linear layer, or a weight is tied to another module.
            SchemeError: a group size does not divide the columns of some modules (all are named), or two schemes claim one module.
            ModelError: all linear layers are targeted, and some experts are kept in a way that hides theirs.
        """
        self.check_settings()
        found: dict[str, QuantizationScheme] = {}
        modules: dict[str, nn.Module] = {}
        for scheme in self.target_schemes():
            check_no_unknown_experts(model, scheme.targets, self.ignore)
            for name, module in resolve_layers(model, scheme.targets, self.ignore, self._is_layer).items():
                if name in found and found[name] != scheme:
                    raise SchemeError(f"{name}: two schemes of {type(self).__name__} claim it; make their targets disjoint")
                found[name], modules[name] = scheme, module
        _check_kinds(modules, type(self).__name__, embeddings=self.takes_embeddings)
        check_linear_forwards(modules)
        check_fast_paths(model, modules)
        _check_groups(found, modules)
        for name, module in modules.items():
            check_fit(module, found[name], name)
        _check_ties(model, modules)
        order = {name: index for index, (name, _) in enumerate(model.named_modules())}
        return dict(sorted(found.items(), key=lambda item: order[item[0]]))

    def pattern_notes(self, model: nn.Module) -> list[str]:
        """Say which patterns of the recipe match something else than layers, or nothing.

        Args:
            model: on any device; not modified.

        Returns:
            A sentence each.
        """
        targets = [target for scheme in self.target_schemes() for target in scheme.targets]
        return [f"{type(self).__name__}: {said}" for said in loose_patterns(model, targets, self.ignore, self._is_layer)]

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
        packed = scheme.compression_format == "pack-quantized"
        after = quantized_weight_bytes(rows, columns, scheme.weights, packed=packed, scale_bytes=weight.element_size())
        return PlannedModule(name, type(self).__name__, scheme_label(scheme.weights), None, {**details, "bytes_after": after})

    @property
    def needs_inputs(self) -> bool:
        """True when inputs, keys or values have static ranges, which only calibration data can give."""
        inputs = [scheme.input_activations for scheme in self.target_schemes()]
        return self.needs_kv or any(args is not None and args.dynamic is not True for args in inputs)

    @property
    def needs_importance(self) -> bool:
        """True when the scales of a weight depend on the inputs that it meets."""
        weights = [scheme.weights for scheme in self.target_schemes()]
        return any(args is not None and args.observer_kind == "imatrix" for args in weights)


def scheme_label(args: QuantizationArgs) -> str:
    """Return a short text for a weight format: `int4 group 128`, `int8 channel`, `float8 tensor`."""
    label = f"{args.type}{args.num_bits} {args.strategy}"
    label += f" {args.group_size}" if args.group_size and args.is_grouped else ""
    label += f" {args.block_structure[0]}x{args.block_structure[1]}" if args.block_structure else ""
    return label if args.symmetric else label + " asymmetric"


def _is_kind(module: nn.Module, *, embeddings: bool) -> bool:
    return is_quantizable(module) and (embeddings or not isinstance(module, nn.Embedding))


def _check_kinds(modules: dict[str, nn.Module], modifier: str, *, embeddings: bool) -> None:
    others = {name: type(module).__name__ for name, module in modules.items() if not _is_kind(module, embeddings=embeddings)}
    if others:
        listed = ", ".join(f"{name} ({kind})" for name, kind in others.items())
        raise TargetError(f"{modifier}: targets that are no linear layers: {listed}; name linear layers or add these to ignore")
    computed = [name for name, module in modules.items() if "weight" not in module._parameters]
    if computed:
        raise TargetError(
            f"{modifier}: {some(computed)}: the weight is computed from other parameters (weight norm, a mask, a parametrization), not "
            "kept; bake it in first (torch.nn.utils.parametrize.remove_parametrizations, torch.nn.utils.prune.remove), or add these to "
            "ignore"
        )


def _check_groups(schemes: dict[str, QuantizationScheme], modules: dict[str, nn.Module]) -> None:
    bad = []
    for name, scheme in schemes.items():
        columns = weight_of(modules[name]).shape[1]
        sizes = {args.group_size for args in (scheme.weights, scheme.input_activations) if args is not None and args.is_grouped}
        bad += [f"{name} has {columns} columns for group_size={size}" for size in sorted(filter(None, sizes)) if columns % size]
    if bad:
        listed = ", ".join(bad[:3]) + (", ..." if bad[3:] else "")
        raise SchemeError(f"{len(bad)} modules: {listed}; columns must divide into groups: ignore these modules or choose a divisor")


def _check_ties(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(name)
    for name, module in modules.items():
        others = owners[id(module.get_parameter("weight"))] - {f"{name}.weight"}
        if others:
            raise TargetError(f"{name}: its weight is tied to {sorted(others)}; add {name!r} to ignore or untie the weights first")
