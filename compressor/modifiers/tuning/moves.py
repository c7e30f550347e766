"""What moves while codes are fixed: the scales of quantized layers, and what norms multiply with and add.

A model is only put into a trial state for the duration of a context; nothing is written before `settle`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from compressor.algorithms.scale_tuning import FixedCodes, move_gradient, moved_scale, scaled_weight, unit_of
from compressor.lifecycle import State
from compressor.mappings.alone import close, double, doubled_arguments, output_of
from compressor.modifiers.tuning.gradients import Unreached
from compressor.nn import QuantizedLayer
from compressor.numerics import check_qparams


@dataclass(frozen=True)
class MovingScale:
    """The scales of one layer.

    Attributes:
        layer: holds the codes.
        fixed: what does not move.
        move: float32, shaped like the scale; zero at the start.
    """

    layer: QuantizedLayer
    fixed: FixedCodes
    move: Tensor

    @classmethod
    def of(cls, layer: QuantizedLayer) -> MovingScale:
        """Begin at the scales that the layer has."""
        qparams, stored = layer.weight_qparams(), layer.get_buffer("weight_scale").dtype
        qparams = qparams._replace(scale=qparams.scale.clone())  # else the start would move with what is stored
        codes, args = layer.codes(), layer.weight_args
        unit = unit_of(codes, qparams.zero_point, args)
        fixed = FixedCodes(codes, qparams, args, getattr(layer, "weight_g_idx", None), stored, layer.dtype, unit)
        return cls(layer, fixed, torch.zeros_like(qparams.scale, dtype=torch.float32).requires_grad_())

    def value(self) -> Tensor:
        """The weight that the moved scales give."""
        return scaled_weight(self.move, self.fixed)

    def take(self, gradient: Tensor) -> None:
        """Add what a gradient of the weight means for the move."""
        _add(self.move, move_gradient(gradient, self.move, self.fixed))

    def settle(self, name: str) -> float:
        """Store the moved scales; return the largest relative step. Changes the layer."""
        scale = moved_scale(self.move.detach(), self.fixed)
        check_qparams(self.fixed.qparams._replace(scale=scale), name)
        self.layer.get_buffer("weight_scale").copy_(scale.to(self.fixed.stored))
        return float((scale.float() / self.fixed.qparams.scale.float() - 1).abs().max())


@dataclass(frozen=True)
class MovingNorm:
    """One parameter of a norm: a vector that stands behind no product.

    Attributes:
        norm: the module.
        key: name of the parameter in it.
        start: as it was.
        move: float32, zero at the start.
        unit: by how much a move of 1 changes a value, relative to their mean size.
    """

    norm: nn.Module
    key: str
    start: Tensor
    move: Tensor
    unit: float

    @classmethod
    def of(cls, norm: nn.Module, key: str, unit: float) -> MovingNorm:
        """Begin at what the norm has."""
        start = norm.get_parameter(key)
        return cls(norm, key, start, torch.zeros_like(start, dtype=torch.float32).requires_grad_(), unit)

    @property
    def step(self) -> Tensor:
        """What a move of 1 adds."""
        return self.unit * self.start.detach().float().abs().mean().clamp(min=1e-3)

    @torch.no_grad()
    def value(self) -> Tensor:
        """The moved parameter, rounded to its dtype; bit for bit as it was where nothing moved."""
        return (self.start.float() + self.move * self.step).to(self.start.dtype)

    def take(self, gradient: Tensor) -> None:
        """Add what a gradient of the parameter means for the move."""
        _add(self.move, gradient.float() * self.step)


class Moves:
    """Everything of a model that moves.

    Attributes:
        scales: by the name of the layer.
        norms: by the name of the parameter.
        unreached: of both.
    """

    def __init__(self, model: nn.Module, names: Mapping[str, object], *, norms: Callable[[], object] | None) -> None:
        """Begin where the model is.

        Args:
            model: compressed.
            names: of the modules that may be layers with scales.
            norms: runs a forward, in which norms are told by what they do; None: they do not move.
        """
        layers = {name: module for name, module in model.named_modules() if name in names and isinstance(module, QuantizedLayer)}
        self.scales = {name: MovingScale.of(layer) for name, layer in layers.items() if not layer.weight_args.is_mx}
        units = [scale.fixed.unit for scale in self.scales.values()]
        unit = sum(units) / max(1, len(units))
        self.norms = {f"{name}.{key}": MovingNorm.of(norm, key, unit) for name, norm, key in _norms(model, norms)} if norms else {}
        self.unreached = Unreached([*self.scales, *self.norms])

    def tensors(self) -> list[Tensor]:
        """Return the moves, for an optimizer."""
        return [*(scale.move for scale in self.scales.values()), *(norm.move for norm in self.norms.values())]

    def copies(self) -> list[Tensor]:
        """Return copies of the moves."""
        return [move.detach().clone() for move in self.tensors()]

    @torch.no_grad()
    def restore(self, copies: list[Tensor]) -> None:
        """Take moves back to copies."""
        for move, kept in zip(self.tensors(), copies, strict=True):
            move.copy_(kept)

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Let the model compute with the moved values for the duration; every backward adds to the gradients of the moves.

        The gradient of a weight is summed over groups as soon as it is there, and let go. Changes the model meanwhile.

        Yields:
            Nothing.
        """
        with ExitStack() as held:
            for name, one in self.scales.items():
                held.enter_context(one.layer.materialize(self._leaf(name, one)))
            for name, norm in self.norms.items():
                table: dict[str, Any] = norm.norm._parameters
                held.callback(table.__setitem__, norm.key, norm.start)
                table[norm.key] = self._leaf(name, norm)
            yield

    def _leaf(self, name: str, moving: MovingScale | MovingNorm) -> Tensor:
        """The present value, which hands its gradient on."""
        leaf = moving.value()
        if torch.is_grad_enabled():

            def hand_on(tensor: Tensor) -> None:
                assert tensor.grad is not None
                self.unreached.meet(name, tensor.grad)
                moving.take(tensor.grad)
                tensor.grad = None

            leaf.requires_grad_().register_post_accumulate_grad_hook(hand_on)
        return leaf

    @torch.no_grad()
    def settle(self, state: State) -> dict[str, float]:
        """Store what has moved: scales in their layers, norms in modules that take the place of those that were. Changes the model.

        Args:
            state: of the run.

        Returns:
            The largest relative step, by the name of the module.
        """
        steps = {name: one.settle(name) for name, one in self.scales.items()}
        changed: dict[str, nn.Module] = {}
        for full_name, one in self.norms.items():
            name, value = full_name.rpartition(".")[0], one.value()
            if not torch.equal(value, one.start):
                new = changed.setdefault(name, _twin(one.norm))
                new.register_parameter(one.key, nn.Parameter(value, requires_grad=one.start.requires_grad))
                steps[name] = max(steps.get(name, 0.0), float(one.move.abs().max()) * one.unit)
        for name, new in changed.items():
            state.replace_module(name, new)
        return steps


def _add(move: Tensor, gradient: Tensor) -> None:
    move.grad = gradient if move.grad is None else move.grad.add_(gradient)


def _norms(model: nn.Module, run: Callable[[], object]) -> Iterator[tuple[str, nn.Module, str]]:
    """Vectors, which no other module shares, of what calls itself a norm, or acts as one in a forward."""
    owners: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    leaves = {name: module for name, module in model.named_modules() if _has_tensors_alone(module)}
    named = {name for name, module in leaves.items() if "norm" in type(module).__name__.lower()}
    asked = {name: module for name, module in leaves.items() if name not in named and _has_vectors_alone(module)}
    named |= _acting_as_norms(asked, run) if asked else set()
    for name, module in leaves.items():
        if name in named:
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter.dim() == 1 and parameter.is_floating_point() and owners[id(parameter)] == 1:
                    yield name, module, key


def _has_tensors_alone(module: nn.Module) -> bool:
    """Whether whatever lies inside, such as an activation, has none."""
    return not any(True for child in module.children() for _ in (*child.parameters(), *child.buffers()))


def _has_vectors_alone(module: nn.Module) -> bool:
    return {one.ndim for one in module._parameters.values() if one is not None} == {1}


def _acting_as_norms(modules: Mapping[str, nn.Module], run: Callable[[], object]) -> set[str]:
    """Those with a vector, whatever its name, that scales what they give, channel by channel, in a call of a forward."""
    calls: dict[str, Any] = {}

    def noting(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            del module
            if name not in calls:
                calls[name] = tree_map_only(Tensor, Tensor.clone, (args, kwargs))

        return hook

    with torch.no_grad(), ExitStack() as held:
        for name, module in modules.items():
            held.callback(module.register_forward_pre_hook(noting(name), with_kwargs=True).remove)
        run()
        return {name for name, call in calls.items() if any(_scales(modules[name], key, call) for key in modules[name]._parameters)}


def _scales(norm: nn.Module, key: str, call: tuple[Any, Any]) -> bool:
    """Whether what a module gives grows by a factor for each channel where one of its vectors, or 1 + it, does, and what it adds."""
    args, kwargs = doubled_arguments(call)
    plain = output_of(double(norm), args, kwargs)
    start = norm._parameters[key]
    if plain is None or start is None or plain.shape[-1:] != start.shape or not plain.any():
        return False
    factor_C = torch.linspace(0.5, 2.0, len(start), dtype=torch.float64, device=start.device)
    for offset in (0.0, 1.0):
        changed = double(norm)
        for name, one in changed._parameters.items():
            if one is not None and one.shape == start.shape:
                own = offset if name == key else 0.0
                one.copy_((one + own) * factor_C - own)
        if close(output_of(changed, args, kwargs), plain * factor_C):
            return True
    return False


def _twin(norm: nn.Module) -> nn.Module:
    """A module with tables of its own, and no hooks: those of the other are handed over."""
    new = copy.copy(norm)
    for key, value in vars(norm).items():
        if key in ("_parameters", "_buffers", "_modules"):
            vars(new)[key] = dict(value)
        elif key.startswith("_forward_") and isinstance(value, dict):
            vars(new)[key] = type(value)()
    return new
