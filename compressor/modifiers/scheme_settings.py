"""What all quantizing modifiers share: which module gets which scheme, input ranges, and putting codes in place.

A recipe names schemes in one of three ways, as in llm-compressor: `scheme: W4A16` with `targets`, `scheme: {W4A16: [targets]}`, or
`config_groups` with full arguments. All of them resolve to one table, module name -> scheme, before any work starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from pydantic import Field, PrivateAttr, field_validator, model_validator
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compressor.errors import CalibrationError, NumericsError, SchemeError, TargetError
from compressor.lifecycle import Event, Modifier, ModuleRecord, State
from compressor.model.targets import resolve_targets
from compressor.nn import QuantizedLinear
from compressor.numerics import Observer, QParams, QuantizationArgs, QuantizationScheme, check_qparams, make_observer, preset_scheme

InputHook = Callable[[nn.Module, tuple[Any, ...]], None]


class SchemeModifier(Modifier):
    """Base of the modifiers that quantize linear layers; a subclass says how one group of modules is rounded.

    Attributes:
        targets: class names, dotted names or `re:` patterns of the modules that get `scheme`.
        ignore: patterns of modules that stay as they are.
        scheme: preset name, or a mapping of preset names to targets.
        config_groups: named schemes with full arguments, in place of `scheme`.
        weight_observer: observer of all weights, in place of the scheme's own.
        input_observer: observer of all static inputs, in place of the scheme's own.
        fallback_budget: how many modules may fall back to a simpler algorithm before the run is an error.
    """

    targets: list[str] = Field(default_factory=lambda: ["Linear"])
    ignore: list[str] = Field(default_factory=list)
    scheme: str | dict[str, list[str]] | None = None
    config_groups: dict[str, QuantizationScheme] | None = None
    weight_observer: str | None = None
    input_observer: str | None = None
    fallback_budget: int = Field(default=0, ge=0)

    _schemes: dict[str, QuantizationScheme] = PrivateAttr(default_factory=dict)
    _pending: dict[str, nn.Linear] = PrivateAttr(default_factory=dict)
    _input_observers: dict[str, Observer] = PrivateAttr(default_factory=dict)
    _handles_of: dict[str, list[RemovableHandle]] = PrivateAttr(default_factory=dict)
    _num_fallbacks: int = PrivateAttr(default=0)

    @field_validator("targets", mode="before")
    @classmethod
    def _one_target_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("scheme", mode="before")
    @classmethod
    def _scheme_targets_are_lists(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: [targets] if isinstance(targets, str) else targets for name, targets in value.items()}
        return value

    @model_validator(mode="after")
    def _one_source_of_schemes(self) -> SchemeModifier:
        if (self.scheme is None) == (self.config_groups is None):
            given = "both scheme and config_groups were" if self.scheme is not None else "neither scheme nor config_groups was"
            raise SchemeError(f"{type(self).__name__}: {given} given; give exactly one of them")
        self.target_schemes()
        return self

    def target_schemes(self) -> list[QuantizationScheme]:
        """Return the schemes with their targets, observers and column order filled in.

        Raises:
            SchemeError: a preset does not exist.
        """
        if self.config_groups is not None:
            schemes = list(self.config_groups.values())
        elif isinstance(self.scheme, dict):
            schemes = [preset_scheme(name, targets) for name, targets in self.scheme.items()]
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
        """Return which module gets which scheme, in the order of the model; nothing is changed.

        Raises:
            TargetError: a pattern matches nothing, a target is no linear layer, or a weight is tied to another module.
            SchemeError: a group size does not divide the columns of some modules (all are named), or two schemes claim one module.
        """
        found: dict[str, QuantizationScheme] = {}
        modules: dict[str, nn.Module] = {}
        for scheme in self.target_schemes():
            for name, module in resolve_targets(model, scheme.targets, self.ignore).items():
                if name in found and found[name] != scheme:
                    raise SchemeError(f"{name}: two schemes of {type(self).__name__} claim it; make their targets disjoint")
                found[name], modules[name] = scheme, module
        _check_linear(modules, type(self).__name__)
        _check_groups(found, modules)
        _check_ties(model, modules)
        order = {name: index for index, (name, _) in enumerate(model.named_modules())}
        return dict(sorted(found.items(), key=lambda item: order[item[0]]))

    @property
    def needs_inputs(self) -> bool:
        """True when a scheme has static input ranges, which only calibration data can give."""
        inputs = [scheme.input_activations for scheme in self.target_schemes()]
        return any(args is not None and not args.dynamic for args in inputs)

    def on_initialize(self, state: State) -> bool:
        """Resolve targets against the model; all that cannot work is an error here, before any data is read."""
        self._schemes = self.resolve(state.model)
        self._pending = {name: _linear(state.model, name) for name in self._schemes}
        self._input_observers, self._handles_of, self._num_fallbacks = {}, {}, 0
        return True

    def on_calibration_start(self, state: State, event: Event) -> None:
        """Hook the inputs whose ranges are static."""
        del event
        for name in self._pending:
            args = self._schemes[name].input_activations
            if args is not None and not args.dynamic:
                self._input_observers[name] = make_observer(args)
                self.watch(name, _observing(self._input_observers[name], state, name))

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        """Compress the modules of the stage that has just been calibrated."""
        self._compress_pending(state, event.modules)

    def on_calibration_end(self, state: State, event: Event) -> None:
        """Compress what no stage contained: everything, when the pipeline is data-free."""
        del event
        self._compress_pending(state, tuple(self._pending))

    def on_finalize(self, state: State) -> bool:
        """Refuse to finish while a targeted module is still a float layer."""
        del state
        if self._pending:
            raise CalibrationError(f"{type(self).__name__}: {sorted(self._pending)} are still uncompressed; run a calibration first")
        return True

    def compress(self, state: State, names: list[str]) -> None:
        """Replace the named modules by quantized ones; the subclass chooses the codes."""
        raise NotImplementedError

    def _compress_pending(self, state: State, modules: Iterable[str]) -> None:
        names = [name for name in modules if name in self._pending]
        if not names:
            return
        self.remove_hooks([handle for name in names for handle in self._handles_of.pop(name, [])])
        with torch.no_grad():
            self.compress(state, names)

    def watch(self, name: str, hook: InputHook) -> None:
        """Call `hook` before each forward of a targeted module, until the module is compressed.

        Args:
            name: dotted module name.
            hook: as torch's forward pre-hook; it sees the positional arguments.
        """
        self._handles_of.setdefault(name, []).append(self.register_hook(self._pending[name], hook, "forward_pre"))

    def place(
        self, state: State, name: str, codes_RC: Tensor, qparams: QParams, record: ModuleRecord, g_idx_C: Tensor | None = None
    ) -> None:
        """Put a quantized layer where the float layer was, and record how well it fits.

        Args:
            state: of the run; its model and report change.
            name: dotted module name.
            codes_RC: [R, C] codes.
            qparams: of the weight; checked to be finite, positive and in range.
            record: goes into the report.
            g_idx_C: [C] group of each column when columns were reordered into groups, else None.

        Raises:
            NumericsError: a scale or zero point is not usable.
            CalibrationError: a static input saw no data.
        """
        check_qparams(qparams, name)
        inputs = None
        if name in self._input_observers:
            inputs = _input_qparams(self._input_observers.pop(name), name, self._pending[name].weight.dtype)
        linear = self._pending.pop(name)
        layer = QuantizedLinear.from_linear(linear, self._schemes[name], codes_RC, qparams, g_idx_C=g_idx_C, input_qparams=inputs)
        state.replace_module(name, layer)
        state.report.modules[name] = record

    def fall_back(self, state: State, name: str, kind: str, detail: str) -> None:
        """Count a fallback to a simpler algorithm; beyond the budget it is an error.

        Raises:
            CalibrationError: the budget of the recipe is spent.
        """
        state.report.add_fallback(name, kind, detail)
        self._num_fallbacks += 1
        if self._num_fallbacks > self.fallback_budget:
            raise CalibrationError(
                f"{name}: {detail}; the recipe allows fallback_budget={self.fallback_budget} such modules: "
                "repair the cause, ignore the module, or raise fallback_budget"
            )


def scheme_label(args: QuantizationArgs) -> str:
    """Return a short text for a weight format: `int4 group 128`, `int8 channel`, `float8 tensor`."""
    label = f"{args.type}{args.num_bits} {args.strategy}"
    label += f" {args.group_size}" if args.group_size and args.strategy == "group" else ""
    return label if args.symmetric else label + " asymmetric"


def _linear(model: nn.Module, name: str) -> nn.Linear:
    module = model.get_submodule(name)
    assert isinstance(module, nn.Linear)
    return module


def _observing(observer: Observer, state: State, name: str) -> InputHook:
    def observe(module: nn.Module, args: tuple[Any, ...]) -> None:
        del module
        observer.update(real_tokens(args[0].detach(), state.token_mask, name))

    return observe


def real_tokens(x: Tensor, token_mask: Tensor | None, name: str) -> Tensor:
    """Return the inputs of real tokens, [N, C], without padding.

    Args:
        x: [batch, seq, C] or [batch * seq, C].
        token_mask: [batch, seq] bool, True at real tokens; None when all are real.
        name: dotted module name, for errors only.

    Returns:
        [N, C], a view of x where nothing is padded.

    Raises:
        CalibrationError: the mask does not fit, so that padding would enter the statistics.
    """
    if token_mask is None or bool(token_mask.all()):
        return x.reshape(-1, x.shape[-1])
    if x.shape[:-1] == token_mask.shape:
        return x[token_mask.to(x.device)]
    if x.dim() == 2 and x.shape[0] == token_mask.numel():
        return x[token_mask.flatten().to(x.device)]
    raise CalibrationError(
        f"{name}: an input of shape {tuple(x.shape)} does not line up with a padded batch of {tuple(token_mask.shape)} tokens; "
        "use batch_size=1, which needs no padding"
    )


def _input_qparams(observer: Observer, name: str, dtype: torch.dtype) -> QParams:
    try:
        qparams = observer.qparams()
    except NumericsError as error:
        raise CalibrationError(f"{name}: its static input range was never observed ({error}); add data that exercises it") from error
    qparams = QParams(qparams.scale.to(dtype), qparams.zero_point)
    check_qparams(qparams, f"{name} input")
    return qparams


def _check_linear(modules: dict[str, nn.Module], modifier: str) -> None:
    others = {name: type(module).__name__ for name, module in modules.items() if not isinstance(module, nn.Linear)}
    if others:
        listed = ", ".join(f"{name} ({kind})" for name, kind in others.items())
        raise TargetError(f"{modifier}: targets that are no linear layers: {listed}; name linear layers or add these to ignore")


def _check_groups(schemes: dict[str, QuantizationScheme], modules: dict[str, nn.Module]) -> None:
    bad = []
    for name, scheme in schemes.items():
        columns, size = modules[name].in_features, scheme.weights.group_size if scheme.weights else None
        if isinstance(columns, int) and size and size > 0 and columns % size:
            bad.append(f"{name} has {columns} columns for group_size={size}")
    if bad:
        raise SchemeError(
            f"{len(bad)} modules: " + ", ".join(bad) + "; columns must divide into groups: ignore these modules or choose a divisor"
        )


def _check_ties(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(name)
    for name, module in modules.items():
        others = owners[id(module.weight)] - {f"{name}.weight"}
        if others:
            raise TargetError(f"{name}: its weight is tied to {sorted(others)}; add {name!r} to ignore or untie the weights first")
