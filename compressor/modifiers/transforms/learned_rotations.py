"""Rotations that are learned: each begins at a fixed one, and moves so that the quantized model comes closer to the one as it was.

Q = Q0 (I - S)^-1 (I + S) with S = P (A - A^T) P / sqrt(B) is orthogonal whatever A is (Cayley); P leaves the mean of a row alone where Q
has to. A is trained with Adam on KL(base || model), where the model computes with turned weights that are rounded to the format of the
modifiers behind, and inputs likewise; the gradient of a rounding is that of what is rounded. After SpinQuant (arXiv:2405.16406), which
takes the loss of the next token and steps along the manifold.

A weight is turned once for a forward and once more for its gradient, which is let go as soon as it has become one of Q.

Shapes: B channels of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from compressor.algorithms.rotations import Rotation
from compressor.mappings.pairs import ScalePair
from compressor.mappings.turns import Turn, TurnPlan
from compressor.modifiers.tuning.gradients import Unreached
from compressor.nn.build import is_quantizable
from compressor.nn.quantized_linear import is_conv1d
from compressor.nn.straight_through import through_rounding
from compressor.numerics import QuantizationArgs, QuantizationScheme
from compressor.numerics.observers import weight_qparams
from compressor.numerics.quantize import dynamic_qparams


@dataclass
class LearnedRotation:
    """A rotation on its way.

    Attributes:
        start_BB: Q0, float32.
        move_BB: A, float32, zero at the start.
        keeps_mean: whether Q has to keep the mean of a row.
        now_BB: Q in the forward that is running.
    """

    start_BB: Tensor
    move_BB: Tensor
    keeps_mean: bool
    now_BB: Tensor

    @classmethod
    def of(cls, rotation: Rotation, device: torch.device, *, keeps_mean: bool) -> LearnedRotation:
        """Begin at a rotation."""
        start_BB = rotation.matrix().to(device, torch.float32)
        return cls(start_BB, torch.zeros_like(start_BB).requires_grad_(), keeps_mean, start_BB)

    def turn(self, x_ND: Tensor) -> Tensor:
        """Multiply rows by Q as it is now, run by run."""
        return (x_ND.reshape(-1, len(self.now_BB)) @ self.now_BB.to(x_ND.dtype)).reshape(x_ND.shape)

    def matrix(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Compute Q [B, B] from A."""
        size = len(self.move_BB)
        skew_BB = (self.move_BB - self.move_BB.T).to(dtype) / size**0.5
        if self.keeps_mean:
            skew_BB = skew_BB - skew_BB.mean(0, keepdim=True)
            skew_BB = skew_BB - skew_BB.mean(1, keepdim=True)
        unit_BB = torch.eye(size, dtype=dtype, device=skew_BB.device)
        return self.start_BB.to(dtype) @ torch.linalg.solve(unit_BB - skew_BB, unit_BB + skew_BB)

    def settled(self) -> Rotation:
        """Return what has been learned, as orthogonal as float64 has it."""
        with torch.no_grad():
            matrix = self.matrix(torch.float64).cpu()
            u, _, v = torch.linalg.svd(matrix)  # the start is orthogonal to float32 only
        return Rotation((u @ v,))


class LearnedTurns:
    """All rotations of a model that are learned, with the modules that they turn; see `compressor.modifiers.tuning.budget.tune`.

    Attributes:
        unreached: modules that are turned.
    """

    def __init__(
        self,
        model: nn.Module,
        folds: Sequence[ScalePair],
        turns: Sequence[Turn],
        schemes: Mapping[str, QuantizationScheme],
        device: torch.device,
        *,
        keeps_mean: bool,
    ) -> None:
        """Begin at fixed rotations.

        Args:
            model: as it was, neither folded nor turned.
            folds: norms that become neutral.
            turns: fixed rotations, each with who writes and reads.
            schemes: what modifiers behind will do with modules, by dotted name.
            device: of the model.
            keeps_mean: of the first turn, where folds are given.
        """
        self._model, self._schemes = model, schemes
        self._rotations: list[LearnedRotation] = []
        learned = []
        for number, turn in enumerate(turns):
            assert isinstance(turn.rotation, Rotation)
            self._rotations.append(LearnedRotation.of(turn.rotation, device, keeps_mean=keeps_mean and bool(folds) and number == 0))
            learned.append(replace(turn, rotation=self._rotations[-1]))
        self._plan = TurnPlan(model, folds, learned)
        quantized = [name for name, scheme in schemes.items() if scheme.weights is not None and is_quantizable(model.get_submodule(name))]
        self._rounded = [name for name in quantized if name not in self._plan.names]
        self._turns = turns
        self.unreached = Unreached(name for name in self._plan.names if self._plan.turns_of(name))

    def tensors(self) -> list[Tensor]:
        """Return what moves, for an optimizer."""
        return [rotation.move_BB for rotation in self._rotations]

    def copies(self) -> list[Tensor]:
        """Return copies of it."""
        return [move.detach().clone() for move in self.tensors()]

    @torch.no_grad()
    def restore(self, copies: list[Tensor]) -> None:
        """Take it back to copies."""
        for move, kept in zip(self.tensors(), copies, strict=True):
            move.copy_(kept)

    def settled(self) -> list[Turn]:
        """Return the turns with what has been learned."""
        return [replace(turn, rotation=learned.settled()) for turn, learned in zip(self._turns, self._rotations, strict=True)]

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Let the model compute with turned and rounded weights for the duration; every backward adds to the gradients of A.

        Yields:
            Nothing.
        """
        is_trained = torch.is_grad_enabled()
        with torch.set_grad_enabled(is_trained):
            matrices = [rotation.matrix() for rotation in self._rotations]
        for rotation, matrix in zip(self._rotations, matrices, strict=True):
            rotation.now_BB = matrix.detach().requires_grad_(is_trained)
        with ExitStack() as held:
            for name in (*self._plan.names, *self._rounded):
                module = self._model.get_submodule(name)
                table: dict[str, Any] = module._parameters
                held.callback(table.update, dict(table))
                self._put(name, module)
                held.callback(_rounding_inputs(module, self._schemes.get(name)))
            yield
        if is_trained:
            for rotation, matrix in zip(self._rotations, matrices, strict=True):
                if rotation.now_BB.grad is not None:
                    matrix.backward(rotation.now_BB.grad)

    def _put(self, name: str, module: nn.Module) -> None:
        """Put values in the place of a module's parameters, which hand their gradients on."""
        with torch.no_grad():
            values = self._values(name, module)
        for key, value in values.items():
            module._parameters[key] = self._leaf(name, module, key, value) if torch.is_grad_enabled() else nn.Parameter(value, False)

    def _leaf(self, name: str, module: nn.Module, key: str, value: Tensor) -> nn.Parameter:
        stored = dict(module._parameters)
        leaf = nn.Parameter(value)

        def hand_on(tensor: Tensor) -> None:
            gradient, tensor.grad = tensor.grad, None
            self.unreached.meet(name, gradient)
            if not self._plan.turns_of(name):
                return
            now = dict(module._parameters)
            module._parameters.update(stored)  # what the values are made of
            try:
                with torch.enable_grad():
                    made = self._values(name, module)[key]
                if made.requires_grad:
                    made.backward(gradient)
            finally:
                module._parameters.update(now)

        leaf.register_post_accumulate_grad_hook(hand_on)
        return leaf

    def _values(self, name: str, module: nn.Module) -> dict[str, Tensor]:
        dtype = module.get_parameter("weight").dtype
        if name in self._plan.names:
            weight, bias = self._plan.tensors(name, torch.promote_types(dtype, torch.float32))
        else:
            weight, bias = (module.get_parameter("weight").T if is_conv1d(module) else module.get_parameter("weight")), None
        scheme = self._schemes.get(name)
        if scheme is not None and scheme.weights is not None and weight.dim() == 2:
            args = _plainly_observed(scheme.weights)
            weight = through_rounding(weight, weight_qparams(weight.detach(), args, name), args)
        values = {"weight": (weight.T.contiguous() if is_conv1d(module) else weight).to(dtype)}
        return values if bias is None else {**values, "bias": bias.to(dtype)}


def _plainly_observed(args: QuantizationArgs) -> QuantizationArgs:
    """Scales from the extremes, in every step anew: what observers find better is found behind, once."""
    return args.model_copy(update={"observer": "minmax", "observer_kwargs": {}})


def _rounding_inputs(module: nn.Module, scheme: QuantizationScheme | None) -> Callable[[], None]:
    """Have a layer round its inputs as they come; those of formats that need a fixed range stay as they are. Returns what ends it."""
    args = None if scheme is None else scheme.input_activations
    if args is None or args.dynamic is not True:
        return lambda: None

    def hook(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        del module
        x = given[0]
        return (through_rounding(x, dynamic_qparams(x.detach(), args), args), *given[1:])

    return module.register_forward_pre_hook(hook).remove
