"""What a recipe says of schemes: the settings that all modifiers share which may be given some, and what they mean together.

A recipe names schemes in one of three ways, as in llm-compressor: `scheme: W4A16` with `targets`, `scheme: {W4A16: [targets]}`, or
`config_groups` with full arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from compressor.errors import SchemeError, TargetError
from compressor.model.targets import check_patterns
from compressor.modifiers.schemes.kv_cache import KVCacheTargets
from compressor.nn.attention.kv_cache import check_kv_args
from compressor.numerics import QuantizationArgs, QuantizationScheme, preset_scheme
from compressor.numerics.scheme import OBSERVER_KINDS
from compressor.spelling import suggest

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
        "enable_torch_compile": (True, False, None),
        "offload_hessians": (True, False, None),
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


class SchemeSettings(KVCacheTargets):
    """Settings that say which linear layers get which scheme.

    Attributes:
        targets: class names, dotted names or `re:` patterns of the modules that get `scheme`.
        ignore: patterns of modules that stay as they are.
        scheme: preset name, or a mapping of preset names to targets.
        config_groups: named schemes with full arguments, in place of `scheme`; one for inputs alone is for attention itself.
        kv_cache_scheme: format of keys and values; None leaves them as they are.
        weight_observer: observer of all weights, in place of the scheme's own.
        input_observer: observer of all static inputs, in place of the scheme's own.
    """

    model_config = ConfigDict(extra="forbid")
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
    def _one_source_of_schemes(self) -> SchemeSettings:
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
    def attention_patterns(self) -> list[str]:
        """Targets of the schemes that quantize attention itself; empty where there is none."""
        return [target for scheme in self.attention_schemes() for target in scheme.targets]

    @property
    def kv_format(self) -> QuantizationArgs | None:
        """Format of keys and values, and of queries where attention itself is a target; None leaves them as they are."""
        return next((scheme.input_activations for scheme in self.attention_schemes()), self.kv_cache_scheme)

    def attention_schemes(self) -> list[QuantizationScheme]:
        """List the schemes of the recipe that are for attention itself: for inputs alone, without weights.

        Returns:
            Each with its observer filled in.
        """
        groups = (self.config_groups or {}).values()
        return [self._with_observer(scheme) for scheme in groups if scheme.weights is None and scheme.input_activations is not None]

    def _check_attention(self) -> None:
        formats = [scheme.input_activations for scheme in self.attention_schemes()]
        for scheme in self.attention_schemes():
            assert scheme.input_activations is not None
            check_kv_args(scheme.input_activations, f"{type(self).__name__}: inputs alone of {scheme.targets}")
        if formats and any(args not in (None, formats[0]) for args in (*formats, self.kv_cache_scheme)):
            raise SchemeError(
                f"{type(self).__name__}: queries, keys and values were given several formats, as config_groups or as kv_cache_scheme; give "
                "one, for all attention modules"
            )

    @property
    def lacks_schemes(self) -> bool:
        """True where a modifier before this one must say all that concerns schemes."""
        return self.borrows and not set(SchemeSettings.model_fields) & {
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
        self._check_attention()
        schemes = [*self.target_schemes(), *self.attention_schemes()]
        own = {target for scheme in schemes for target in scheme.targets}
        if not isinstance(self.scheme, str) and self.targets != ["Linear"] and set(self.targets) != own:
            raise SchemeError(f"targets: {self.targets} was given beside schemes that name their own; leave targets out")
        if self.weight_observer is not None and not self.target_schemes():
            raise SchemeError(f"weight_observer: {self.weight_observer!r} was given without a scheme for weights; leave it out")
        inputs = [scheme.input_activations for scheme in schemes]
        if self.input_observer is not None and all(args is None or args.dynamic is True for args in inputs):
            raise SchemeError("input_observer: no scheme has inputs with static scales, which it could find; leave it out")

    def target_schemes(self) -> list[QuantizationScheme]:
        """List the schemes of the recipe that are for weights.

        Returns:
            Each scheme with its targets, observers and column order filled in.

        Raises:
            SchemeError: a preset does not exist.
        """
        if self.config_groups is not None:
            schemes = [one for one in self.config_groups.values() if one.weights is not None or one.input_activations is None]
        elif isinstance(self.scheme, dict):
            schemes = [preset_scheme(name, targets) for name, targets in self.scheme.items()]
        elif self.scheme is None and self.kv_cache_scheme is not None:
            schemes = []
        else:
            assert self.scheme is not None
            schemes = [preset_scheme(self.scheme, self.targets)]
        return [self._completed(scheme) for scheme in schemes]

    def _completed(self, scheme: QuantizationScheme) -> QuantizationScheme:
        weights = scheme.weights
        if weights is None:
            raise SchemeError(f"{type(self).__name__}: a scheme for {scheme.targets} without weights was given; add its weights")
        if self.weight_observer is not None:
            weights = weights.model_copy(update={"observer": self.weight_observer})
        return self._with_observer(scheme.model_copy(update={"weights": weights}))

    def _with_observer(self, scheme: QuantizationScheme) -> QuantizationScheme:
        inputs = scheme.input_activations
        if inputs is None or self.input_observer is None:
            return scheme
        return scheme.model_copy(update={"input_activations": inputs.model_copy(update={"observer": self.input_observer})})

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
