"""What a recipe's `kv_cache_scheme` asks for: scales for keys and values, calibrated or dynamic; for queries where attention is a target.

Keys and values are watched where they enter the cache, queries where attention takes them, in float and without padding. The quantizers
come when calibration ends, all at once, so that no layer is calibrated behind a quantized cache and another in front of one.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, PrivateAttr, field_validator
from torch import Tensor, nn

from compressor.errors import CalibrationError, NumericsError, SchemeError, TargetError
from compressor.lifecycle import State
from compressor.model.folder import some
from compressor.model.targets import matches
from compressor.modifiers.schemes.input_statistics import own_tokens
from compressor.nn.attention.kv_cache import (
    PROJECTIONS,
    attach_kv_quantizer,
    attention_modules,
    check_kv_args,
    kv_args,
    kv_scale_bytes,
    num_heads,
    parts_of,
    with_view,
)
from compressor.nn.attention.queries import shows_queries
from compressor.numerics import Observer, QuantizationArgs, make_observer


class KVCacheTargets(BaseModel):
    """The settings that say how keys and values are quantized, and queries, and the work that follows from them.

    Attributes:
        kv_cache_scheme: format of keys and values; None leaves them as they are.
    """

    model_config = ConfigDict(extra="forbid")

    kv_cache_scheme: QuantizationArgs | None = None

    _kv_observers: dict[str, dict[str, Observer]] = PrivateAttr(default_factory=dict)

    @field_validator("kv_cache_scheme", mode="after")
    @classmethod
    def _check_kv(cls, value: QuantizationArgs | None) -> QuantizationArgs | None:
        if value is not None:
            check_kv_args(value, "kv_cache_scheme")
        return value

    @property
    def attention_patterns(self) -> list[str]:
        """Targets of the schemes that quantize attention itself; empty where there is none."""
        return []

    @property
    def kv_format(self) -> QuantizationArgs | None:
        """Format of keys and values, and of queries where attention itself is a target; None leaves them as they are."""
        return self.kv_cache_scheme

    @property
    def needs_kv(self) -> bool:
        """Whether the scales of keys and values must be calibrated."""
        return self.kv_format is not None and not self.kv_format.dynamic

    def kv_bytes(self, model: nn.Module, ignore: Sequence[str]) -> int:
        """Say what the scales of keys and values, and of queries, take in a checkpoint.

        Args:
            model: not modified.
            ignore: see `kv_targets`.

        Returns:
            Bytes.
        """
        args, queries = self.kv_format, "q" in self._parts
        found = {} if args is None else self.kv_targets(model, ignore)
        return sum(kv_scale_bytes(module, args, name, queries=queries) for name, module in found.items() if args is not None)

    def kv_targets(self, model: nn.Module, ignore: Sequence[str]) -> dict[str, nn.Module]:
        """Find the attention modules whose keys and values are to be quantized, and queries where attention itself is a target.

        Args:
            model: not modified.
            ignore: patterns of the recipe, which may leave out weights only.

        Returns:
            Dotted name to module; empty without a format for them.

        Raises:
            TargetError: readers would quantize keys and values in no attention module, the model has an encoder and a decoder, or they are
                quantized already, or `ignore` names attention modules and nothing else; or targets of attention name something else, or
                not all attention modules, or queries cannot be seen.
            SchemeError: one scale per head was asked of a module that does not say how many it has.
        """
        if self.kv_format is None:
            return {}
        found = attention_modules(model)
        where = f"{type(self).__name__}.{'config_groups' if self.attention_patterns else 'kv_cache_scheme'}"
        if not found:
            raise TargetError(
                f"{where}: {type(model).__name__} has no attention module in which readers would quantize keys and values (its class named "
                f"*Attention*, with {', '.join(PROJECTIONS)}, and handed the cache); leave it out"
            )
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise TargetError(f"{where}: a cache of encoder and decoder cannot be quantized; leave it out for {type(model).__name__}")
        taken = next((name for name, module in found.items() if kv_args(module) is not None), None)
        if taken is not None:
            raise TargetError(f"{where}: keys and values of {taken} are quantized already; leave it out")
        _check_ignored(model, found, ignore, where)
        if self.attention_patterns:
            _check_attention(model, found, self.attention_patterns, where)
        if self.kv_format.strategy == "attn_head":
            for name, module in found.items():
                for part in self._parts:
                    num_heads(module, part, name)
        return found

    def describe_kv(self, num_modules: int) -> str | None:
        """Say what of attention is quantized.

        Args:
            num_modules: attention modules of the model.

        Returns:
            A sentence; None where nothing is.
        """
        args = self.kv_format
        if args is None:
            return None
        kind = f"{args.type}{args.num_bits} {args.strategy}, {'dynamic' if args.dynamic else 'static'}"
        return (
            f"{'queries, keys' if self.attention_patterns else 'keys'} and values of {num_modules} attention modules are quantized ({kind})"
        )

    @property
    def _parts(self) -> tuple[str, ...]:
        return parts_of(bool(self.attention_patterns))

    def start_observing(self, state: State, modules: Mapping[str, nn.Module]) -> dict[str, Any]:
        """Make the observers and the hooks that feed them.

        Args:
            state: of the run; its token mask says what is padding.
            modules: as `kv_targets` gives them.

        Returns:
            Dotted name to a forward pre-hook with keyword arguments; empty where nothing is calibrated.
        """
        args = self.kv_format
        self._kv_observers = {}
        if args is None or not self.needs_kv:
            return {}
        self._kv_observers = {name: {part: make_observer(args, f"{name}.{part}") for part in self._parts} for name in modules}
        return {
            name: _observing(observers, state, name, self._heads(name, modules[name])) for name, observers in self._kv_observers.items()
        }

    def checking_heads(self, modules: Mapping[str, nn.Module]) -> dict[str, Any]:
        """Make the hooks that refuse, in a forward that has shapes alone, what `start_observing` would refuse.

        Args:
            modules: as `kv_targets` gives them.

        Returns:
            Dotted name to a forward pre-hook with keyword arguments; empty where heads have no scales of their own.
        """
        heads = {name: found for name, module in modules.items() if (found := self._heads(name, module))}
        return {name: _checking(name, found, queries="q" in self._parts) for name, found in heads.items()}

    def _heads(self, name: str, module: nn.Module) -> dict[str, int]:
        """How many readers count, where each has a scale of its own."""
        has_own = self.kv_format is not None and self.kv_format.strategy == "attn_head"
        return {part: num_heads(module, part, name) for part in self._parts} if has_own else {}

    def kv_observers(self, modules: Collection[str]) -> dict[str, Observer]:
        """Return what observes keys and values, and queries.

        Args:
            modules: dotted names; others are left out.

        Returns:
            By "<name> <part>".
        """
        return {
            f"{name} {part}": observer
            for name, observers in self._kv_observers.items()
            if name in modules
            for part, observer in observers.items()
        }

    def kv_ranges(self, modules: Collection[str]) -> dict[str, Tensor]:
        """Return what has been learnt of keys and values, for a run that goes on later.

        Args:
            modules: dotted names; others are left out.

        Returns:
            Tensors by "kv <name> <part> <key>".
        """
        return {
            f"kv {place} {key}": tensor
            for place, observer in self.kv_observers(modules).items()
            for key, tensor in observer.state().items()
        }

    def restore_kv_ranges(self, kept: Mapping[str, Any], device: torch.device) -> None:
        """Take over what `kv_ranges` gave.

        Args:
            kept: what it gave, and anything else.
            device: of the run.
        """
        states: dict[tuple[str, str], dict[str, Tensor]] = {}
        for text, tensor in kept.items():
            if text.startswith("kv "):
                _, name, part, key = text.split(" ")
                states.setdefault((name, part), {})[key] = tensor.to(device)
        for (name, part), state in states.items():
            self._kv_observers[name][part].restore(state)

    def place_quantizers(self, state: State, modules: Mapping[str, nn.Module]) -> None:
        """Put attention modules with scales and quantizers in the places of those without. Changes the model; all modules, or none.

        Args:
            state: of the run; its report gets a note.
            modules: as `kv_targets` gives them.

        Raises:
            CalibrationError: a module saw no token.
            NumericsError: a scale is not usable.
        """
        args = self.kv_format
        if args is None:
            return
        found = {name: self._calibrated(name) for name in modules} if self.needs_kv else {}
        copies = {name: _own_copy(module) for name, module in modules.items()}
        for name, module in copies.items():
            attach_kv_quantizer(module, args, found.get(name), name=name, queries="q" in self._parts)
        for name, module in copies.items():
            state.replace_module(name, module)  # which an abort can undo
        source = "config_groups" if self.attention_patterns else "kv_cache_scheme"
        state.report.notes.append(f"{source}: {self.describe_kv(len(modules))}")
        self._kv_observers = {}

    def _calibrated(self, name: str) -> dict[str, Any]:
        try:
            return {part: observer.qparams() for part, observer in self._kv_observers[name].items()}
        except (NumericsError, LookupError) as error:
            what = " ".join(self._parts)
            raise CalibrationError(f"{name}: its {what} were never observed ({error}); add data that exercises it") from error


def _check_ignored(model: nn.Module, attention: Mapping[str, nn.Module], ignore: Sequence[str], where: str) -> None:
    for pattern in ignore:
        meant = {name for name, module in model.named_modules() if matches(name, module, pattern)}
        if meant and meant <= attention.keys():
            raise TargetError(
                f"{where}: ignore {pattern!r} names attention, but keys and values are quantized in all attention modules or in none "
                "(ignore leaves out weights); take it out of ignore"
            )


def _check_attention(model: nn.Module, attention: Mapping[str, nn.Module], patterns: Sequence[str], where: str) -> None:
    """Refuse targets of a scheme for inputs alone that are not all attention modules, and only these, and attention that hides queries."""
    meant = {name: type(module).__name__ for name, module in model.named_modules() if any(matches(name, module, one) for one in patterns)}
    others = [f"{name} ({kind})" for name, kind in meant.items() if name not in attention]
    missed = sorted(attention.keys() - meant.keys())
    kinds = sorted({type(module).__name__ for module in attention.values()})
    if others or missed:
        fault = f"mean {some(others)} as well, no attention that keeps a cache" if others else f"leave out {some(missed)}"
        raise TargetError(
            f"{where}: targets {list(patterns)} of a scheme for inputs alone {fault}; attention is quantized in all of its modules "
            f"or in none: give {kinds} as targets, or the scheme weights"
        )
    hidden = [name for name, module in attention.items() if not shows_queries(module)]
    if hidden:
        raise TargetError(
            f"{where}: {some(hidden)}: {kinds} multiply queries and keys themselves, where queries cannot be quantized; give their format "
            "as kv_cache_scheme, for keys and values alone"
        )


def _own_copy(module: nn.Module) -> nn.Module:
    """A module with the same parameters, buffers and children, but its own tables of them, and its own hooks."""
    twin = copy.copy(module)
    for key, value in vars(twin).items():
        if isinstance(value, dict | set):
            twin.__dict__[key] = copy.copy(value)
    return twin


def _check_heads(states: Tensor, heads: Mapping[str, int], name: str, part: str) -> None:
    if states.shape[1] != heads.get(part, states.shape[1]):
        raise SchemeError(
            f"{name}.{part}: has {states.shape[1]} heads, and readers count {heads[part]} by its config; use strategy='tensor'"
        )


def _checking(name: str, heads: Mapping[str, int], *, queries: bool) -> Any:
    def look(part: str, states: Tensor) -> Tensor:
        _check_heads(states, heads, name, part)
        return states

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_view(module, args, kwargs, look, queries=queries)

    return hook


def _observing(observers: Mapping[str, Observer], state: State, name: str, heads: Mapping[str, int]) -> Any:
    """A forward pre-hook; `heads` says how many readers count, where each has a scale of its own."""

    def look(part: str, states: Tensor) -> Tensor:
        tokens_NHD = own_tokens(state, states.detach().transpose(1, 2).flatten(2), state.token_mask, f"{name}.{part}")
        _check_heads(states, heads, name, part)
        if tokens_NHD.numel():
            observers[part].update(tokens_NHD.reshape(len(tokens_NHD), states.shape[1], -1).transpose(0, 1).unsqueeze(0))
        return states

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if state.base_stream:  # ranges are those of the compressed model
            return None
        return with_view(module, args, kwargs, look, queries="q" in observers)

    return hook
