"""SchemeModifier: the lifecycle that all quantizing modifiers share; a subclass says how a group of modules becomes codes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import PrivateAttr
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compressor.algorithms.costs import Cost, rounding_cost
from compressor.errors import CalibrationError
from compressor.lifecycle import Event, FinishedStage, ModuleRecord, State
from compressor.lifecycle.state import StageValue
from compressor.model.folder import some
from compressor.modifiers.fallbacks import WithFallbacks
from compressor.modifiers.schemes.input_statistics import InputHook, input_of, join_observers, observing, static_input_qparams
from compressor.modifiers.schemes.targets import SchemeTargets, lost_notes
from compressor.nn import from_buffers, replacement, weight_of
from compressor.numerics import Observer, QParams, QuantizationScheme, calculate_global_scale, check_qparams, make_observer

# Layers that runtimes fuse into one product share their global scale: q/k/v, gate/up.
#
# A fused product has room for one global scale only, so vLLM takes the largest of those it is given, and every other layer is dequantized
# with a scale that is not its own. Here siblings get one and the same: that of all their weights together.

# Last parts of names of layers that read one input and are fused; each tuple one product.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)


def siblings(name: str) -> tuple[str, ...]:
    """Name the layers that a runtime fuses with this one.

    Args:
        name: dotted name of a layer.

    Returns:
        Dotted names, its own among them; its own alone where nothing is fused.
    """
    parent, dot, own = name.rpartition(".")
    parts = next((parts for parts in FUSED if own in parts), (own,))
    return tuple(f"{parent}{dot}{part}" for part in parts)


def shared_global_scales(weights: Mapping[str, Tensor], schemes: Mapping[str, QuantizationScheme]) -> dict[str, Tensor]:
    """Choose the global scales of weights whose formats have one.

    Args:
        weights: dotted name of every layer to its weight [R, C]; all siblings that are quantized must be among them.
        schemes: dotted name to scheme, at least for these layers.

    Returns:
        Name to float32 [1], for layers whose format has a global scale; siblings hold equal values.
    """
    wanted = [name for name in weights if (args := schemes[name].weights) is not None and args.has_global_scale]
    largest = {name: weights[name].detach().abs().amax() for name in wanted}
    found = {}
    for name in wanted:
        together = torch.stack([largest[sibling] for sibling in siblings(name) if sibling in largest])
        found[name] = calculate_global_scale(together, together)
    return found


class SchemeModifier(SchemeTargets, WithFallbacks):
    """Base of the modifiers that quantize linear layers."""

    _schemes: dict[str, QuantizationScheme] = PrivateAttr(default_factory=dict)
    _pending: dict[str, nn.Module] = PrivateAttr(default_factory=dict)
    _input_observers: dict[str, Observer] = PrivateAttr(default_factory=dict)
    _handles_of: dict[str, list[RemovableHandle]] = PrivateAttr(default_factory=dict)
    _attention: dict[str, nn.Module] = PrivateAttr(default_factory=dict)
    _global_scales: dict[str, Tensor] = PrivateAttr(default_factory=dict)
    _joined: set[str] = PrivateAttr(default_factory=set)

    @property
    def schemes(self) -> dict[str, QuantizationScheme]:
        """Which module gets which scheme; empty before the modifier is initialized."""
        return dict(self._schemes)

    def on_initialize(self, state: State) -> bool:
        """Resolve targets against the model; all that cannot work is an error here, before any data is read."""
        self._attention = self.kv_targets(state.model, self.ignore)
        self._schemes = self.resolve(state.model)
        state.report.notes += [*self.pattern_notes(state.model), *self._notes_of_divided(state.schemes)]
        state.claim([*self._schemes, *self._attention], self.label)
        state.schemes.update(self._schemes)
        self._pending = {name: state.model.get_submodule(name) for name in self._schemes}
        self._input_observers, self._handles_of, self._global_scales, self._joined = {}, {}, {}, set()
        self.forget_fallbacks()
        return True

    def _notes_of_divided(self, earlier: Mapping[str, QuantizationScheme]) -> list[str]:
        """Say where layers that runtimes fuse do not share a global scale, because an earlier modifier has the others."""

        def has_one(schemes: Mapping[str, QuantizationScheme], name: str) -> bool:
            return name in schemes and (args := schemes[name].weights) is not None and args.has_global_scale

        pairs = [
            (other, name)
            for name in self._schemes
            if has_one(self._schemes, name)
            for other in siblings(name)
            if other not in self._schemes and has_one(earlier, other)
        ]
        if not pairs:
            return []
        other, name = pairs[0]
        return [
            f"{self.label}: {name} and {other}, which runtimes fuse, are quantized by two modifiers, so each has a global scale of its own "
            f"({len(pairs)} such pairs), and a runtime that fuses them takes one for all; let one modifier have both"
        ]

    def on_calibration_start(self, state: State, event: Event) -> None:
        """Hook the inputs, keys and values whose ranges are static."""
        del event
        for name, hook in self.start_observing(state, self._attention).items():
            handle = self.register_hook(self._attention[name], hook, "forward_pre", with_kwargs=True)
            self._handles_of.setdefault(name, []).append(handle)
        for name in self._pending:
            args = self._schemes[name].input_activations
            if args is not None and args.dynamic is not True:
                self._input_observers[name] = make_observer(args, f"{name} input")
                self.watch(name, observing(self._input_observers[name], state, name))

    def on_sequential_epoch_end(self, state: State, event: Event) -> None:
        """Compress the modules of the stage that has just been calibrated."""
        self._join_kv_ranges(state, event.modules)
        self._compress_pending(state, event.modules)

    def on_calibration_end(self, state: State, event: Event) -> None:
        """Compress what no stage contained: everything, when the pipeline is data-free."""
        del event
        self._join_kv_ranges(state, tuple(self._attention))
        self._compress_pending(state, tuple(self._pending))
        self.remove_hooks([handle for name in self._attention for handle in self._handles_of.pop(name, [])])
        self.place_quantizers(state, self._attention)
        self._attention = {}

    def on_finalize(self, state: State) -> bool:
        """Refuse to finish while a targeted module is still a float layer; note what is lost."""
        if self._pending:
            raise CalibrationError(f"{type(self).__name__}: {some(self._pending)} are still uncompressed; run a calibration first")
        state.report.notes += lost_notes(state.report, self._schemes)
        return True

    def stage_memory(self, modules: Sequence[str]) -> dict[str, StageValue]:
        """What outlives a stage: the fallbacks so far, and the ranges of keys and values, which are used when calibration ends."""
        return {**self.fallbacks_so_far(), **self.kv_ranges(modules)}

    def skip_stage(self, state: State, stage: FinishedStage) -> None:
        """Put the quantized layers of an earlier run in place; their hooks, statistics and work are gone."""
        self._choose_global_scales()  # while the siblings that an earlier stage has compressed are still there
        for name in (name for name in stage.modules if name in self._pending):
            self.remove_hooks(self._handles_of.pop(name, []))
            self._input_observers.pop(name, None)
            module = self._pending.pop(name)
            buffers = {key: tensor for key, tensor in stage.tensors[name].items() if key != "bias"}
            state.replace_module(name, from_buffers(module, self._schemes[name], buffers, name=name))
        self.restore_kv_ranges(stage.memory, state.device)
        self._joined.update(stage.modules)  # they hold what all ranks had learnt
        self.restore_fallbacks(stage.memory)

    def watches(self, model: nn.Module) -> list[str]:
        """Name modules whose inputs have static ranges, and attention whose keys and values have.

        Args:
            model: with or without values; not modified.

        Returns:
            Dotted names.
        """
        attention = list(self.kv_targets(model, self.ignore)) if self.needs_kv else []
        formats = {name: scheme.input_activations for name, scheme in self.resolve(model).items()}
        return attention + [name for name, args in formats.items() if args is not None and args.dynamic is not True]

    def cost(
        self,
        scheme: QuantizationScheme | None,
        rows: Sequence[int],
        columns: int,
        element_bytes: int,
        num_tokens: int,
        has_base_stream: bool = False,
    ) -> Cost:
        """Say what compressing some weights would cost that read one input and get one scheme.

        Args:
            scheme: of all of them; None where they are only pruned.
            rows: out features of each.
            columns: in features of all.
            element_bytes: of one weight element.
            num_tokens: calibration tokens.
            has_base_stream: the uncompressed model runs beside the other.

        Returns:
            The cost; that of rounding unless overridden.
        """
        del scheme, num_tokens, has_base_stream
        return rounding_cost(rows, columns, element_bytes)

    def compress(self, state: State, names: list[str]) -> None:
        """Replace the named modules by quantized ones; the subclass chooses the codes."""
        raise NotImplementedError

    def global_scale(self, name: str) -> Tensor | None:
        """Return the global scale that a module is to get; None where its format has none.

        Args:
            name: dotted name of a module that is being compressed.

        Returns:
            float32 [1], equal for modules that runtimes fuse.
        """
        return self._global_scales.get(name)

    def _compress_pending(self, state: State, modules: Iterable[str]) -> None:
        names = [name for name in modules if name in self._pending]
        if not names:
            return
        self.remove_hooks([handle for name in names for handle in self._handles_of.pop(name, [])])
        self._choose_global_scales()
        join_observers(state.ranks, {name: self._input_observers[name] for name in names if name in self._input_observers})
        with torch.no_grad():
            self.compress(state, names)

    def _join_kv_ranges(self, state: State, modules: Iterable[str]) -> None:
        """Put together what all ranks have learnt of keys and values; once, for counts would be added twice."""
        names = [name for name in modules if name in self._attention and name not in self._joined]
        self._joined.update(names)
        join_observers(state.ranks, self.kv_observers(names))

    @torch.no_grad()
    def _choose_global_scales(self) -> None:
        """Siblings of a module may wait for a later stage, but their weights count already."""
        missing = {name: weight_of(module) for name, module in self._pending.items() if name not in self._global_scales}
        self._global_scales |= shared_global_scales(missing, self._schemes)

    def watch(self, name: str, hook: InputHook) -> None:
        """Show `hook` what a targeted module is handed in each forward, until the module is compressed.

        Args:
            name: dotted module name.
            hook: takes the input.
        """

        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            del module
            hook(input_of(args, kwargs, name))

        self._handles_of.setdefault(name, []).append(self.register_hook(self._pending[name], look, "forward_pre", with_kwargs=True))

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
            inputs = static_input_qparams(self._input_observers.pop(name), name, weight_of(self._pending[name]).dtype)
        linear = self._pending.pop(name)
        layer = replacement(linear, self._schemes[name], codes_RC, qparams, g_idx_C=g_idx_C, input_qparams=inputs, name=name)
        state.replace_module(name, layer)
        known = state.report.modules.get(name)  # what pruning said of it stays
        state.report.modules[name] = record if known is None else replace(record, details={**known.details, **record.details})
