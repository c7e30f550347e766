"""Layers that compute as their quantized forms will, and train the float weight behind it: quantization-aware training.

A fake-quantized layer holds the very parameters of the layer whose place it takes, under the same names, so an optimizer goes on with them.
Its forward rounds weight and input to the values that codes stand for, with the functions that the quantized layer uses: the same bits come
out. Backward goes straight through the rounding, and is zero for values that are cut off (Bengio et al. 2013, arXiv:1308.3432; Jacob et al.
2018, arXiv:1712.05877). Scales are constants to the gradient: computed from the weight in every forward, or kept where they are fixed.
Nothing is read on the host, so that a training step can be captured.

Shapes: R rows (out features), C columns (in features).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from compressor.algorithms.rtn import nearest_codes
from compressor.errors import SchemeError
from compressor.nn.build import check_fit
from compressor.nn.quantized_linear import is_conv1d, linear_shape
from compressor.nn.straight_through import straight_through, through_rounding
from compressor.numerics import (
    QParams,
    QuantizationArgs,
    QuantizationScheme,
    dynamic_qparams,
    inside_range,
    range_qparams,
    weight_qparams,
)
from compressor.numerics.quantize import values_as_read


class FakeQuantizedLayer(nn.Module):
    """Base of the layers: a float weight, and what it will be.

    Attributes:
        weight: the parameter of the float layer.
        scheme: formats of weight and input.
        name: dotted name of the layer in its model, for errors.
        fixed: the weight's scales are those that `keep_scales` stored last.
        observing: static ranges of inputs still grow.
        in_step: a step of the training runs; between steps forwards find ranges as they are in evaluation.
        stored_dtype: what the layer is cast to once it has become codes, which come from the weight as it was trained; None: nothing else.
    """

    weight: nn.Parameter

    def __init__(self, module: nn.Module, scheme: QuantizationScheme, name: str, global_scale: Tensor | None) -> None:
        """Take over the parameters of a float layer, and compute scales for the first time."""
        super().__init__()
        check_fit(module, scheme, name)
        self.scheme, self.name = scheme, name
        self.fixed, self.observing, self.in_step = False, False, True
        self.stored_dtype: torch.dtype | None = None
        self.weight = module.get_parameter("weight")
        self._transposed = is_conv1d(module)
        self._global_scale = global_scale
        self._kept = weight_qparams(self.weight_RC.detach(), self.weight_args, name, global_scale)
        self.train(module.training)

    @property
    def weight_args(self) -> QuantizationArgs:
        """Number format of the weight."""
        assert self.scheme.weights is not None
        return self.scheme.weights

    @property
    def weight_RC(self) -> Tensor:
        """The float weight, one row per output."""
        return self.weight.t() if self._transposed else self.weight

    def keep_scales(self) -> None:
        """Store the scales of the present weight, in place.

        Raises:
            NumericsError: the weight holds NaN or infinity.
        """
        now = weight_qparams(self.weight_RC.detach(), self.weight_args, self.name, self._global_scale)
        self._kept.scale.copy_(now.scale)
        if self._kept.zero_point is not None and now.zero_point is not None:
            self._kept.zero_point.copy_(now.zero_point)
        if self._kept.global_scale is not None and now.global_scale is not None:
            self._kept.global_scale.copy_(now.global_scale)

    def weight_qparams(self) -> QParams:
        """Return the scales that a forward uses now."""
        if self.fixed:
            return self._kept
        return weight_qparams(self.weight_RC.detach(), self.weight_args, self.name, self._global_scale, checked=False)

    def fake_weight(self) -> Tensor:
        """Return the values of the weight's codes, [R, C] in its dtype; gradients go straight through to the weight."""
        args, qparams = self.weight_args, self.weight_qparams()

        def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
            codes = nearest_codes(weight, qparams, args, checked=False)
            return values_as_read(codes, qparams, args, weight.dtype), inside_range(weight, qparams, args)

        return straight_through(self.weight_RC, rounded)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors that a resumed run needs beside the parameters, by name."""
        kept = self._kept._asdict()
        return {f"weight_{key}": value for key, value in kept.items() if value is not None}

    def input_range(self) -> Mapping[str, Tensor] | None:
        """Return the extremes of a static input; None where the input has none."""
        return None

    def extra_repr(self) -> str:
        """Format and bits."""
        args = self.weight_args
        text = f"type={args.type}, bits={args.num_bits}, strategy={args.strategy}, fixed={self.fixed}"
        return text + (f", group_size={args.group_size}" if args.group_size else "")


class FakeQuantizedLinear(FakeQuantizedLayer):
    """A linear layer (or Conv1D of transformers) in training; static ranges of inputs are the extremes seen while it observes.

    Attributes:
        in_features: columns of the weight.
        out_features: rows of the weight.
        bias: the parameter of the float layer, or None.
        tokens_are_rows: see QuantizedLinear.
    """

    tokens_are_rows = False
    bias: nn.Parameter | None

    def __init__(self, module: nn.Module, scheme: QuantizationScheme, name: str, global_scale: Tensor | None) -> None:
        """Take over the parameters of a linear layer."""
        super().__init__(module, scheme, name, global_scale)
        self.in_features, self.out_features = linear_shape(module)
        self.register_parameter("bias", module.bias)  # type: ignore[arg-type]
        args = scheme.input_activations
        self._extremes: tuple[Tensor, Tensor] | None = None
        if args is not None and args.dynamic is not True:
            if args.observer_kind != "minmax":
                raise SchemeError(f"{name} input: observer={args.observer!r} counts values on the host; training needs 'minmax'")
            self._extremes = self.weight.new_zeros(1), self.weight.new_zeros(1)
            self.observing = True

    def forward(self, input: Tensor) -> Tensor:
        """Multiply [..., C] with the fake-quantized weight.

        Args:
            input: floating point, [..., C].

        Returns:
            [..., R].
        """
        args = self.scheme.input_activations
        if args is not None and input.numel() > 0:
            qparams = self._input_qparams(input.detach(), args)
            x = through_rounding(input, qparams, args)
            return nn.functional.linear(x, self.fake_weight(), self.bias)
        return nn.functional.linear(input, self.fake_weight(), self.bias)

    def tensors(self) -> Mapping[str, Tensor]:
        """What the weight has, and the range of the input."""
        return {**super().tensors(), **{f"input_{key}": value for key, value in (self.input_range() or {}).items()}}

    def input_range(self) -> Mapping[str, Tensor] | None:
        """The extremes of the input so far; None where nobody looks."""
        return None if self._extremes is None else dict(zip(("min", "max"), self._extremes, strict=True))

    def _input_qparams(self, x: Tensor, args: QuantizationArgs) -> QParams:
        if self._extremes is None:
            return dynamic_qparams(x, args, by_row=self.tokens_are_rows)
        known = range_qparams(*self._observe(x, self._extremes), args)
        return dynamic_qparams(x, args, known.global_scale, by_row=self.tokens_are_rows) if args.dynamic else known

    @torch.no_grad()
    def _observe(self, x: Tensor, extremes: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The extremes with this input, which are kept; outside of training those that are kept, or its own."""
        if not self.observing:
            return extremes
        low, high = torch.aminmax(x)
        seen = torch.minimum(extremes[0], low), torch.maximum(extremes[1], high)
        if not (self.training and self.in_step):
            is_known = extremes[0] < extremes[1]
            return torch.where(is_known, extremes[0], seen[0]), torch.where(is_known, extremes[1], seen[1])
        for kept, now in zip(extremes, seen, strict=True):
            kept.copy_(now)
        return seen


class FakeQuantizedEmbedding(FakeQuantizedLayer):
    """An embedding in training; the whole table is rounded, then rows are looked up.

    Attributes:
        num_embeddings: rows of the table.
        embedding_dim: columns of the table.
        padding_idx: row that gets no gradient, or None.
    """

    def __init__(self, module: nn.Embedding, scheme: QuantizationScheme, name: str, global_scale: Tensor | None) -> None:
        """Take over the table of an embedding."""
        super().__init__(module, scheme, name, global_scale)
        self.num_embeddings, self.embedding_dim, self.padding_idx = module.num_embeddings, module.embedding_dim, module.padding_idx

    def forward(self, input: Tensor) -> Tensor:
        """Look rows up.

        Args:
            input: ids, integers, any shape.

        Returns:
            [..., C].
        """
        return nn.functional.embedding(input, self.fake_weight(), self.padding_idx)


def fake_quantized(module: nn.Module, scheme: QuantizationScheme, name: str, global_scale: Tensor | None = None) -> FakeQuantizedLayer:
    """Make the layer that trains in a module's place.

    Args:
        module: a linear layer, Conv1D or embedding; it is not changed, and its parameters are shared.
        scheme: formats of weight and input.
        name: dotted name of the module, for errors.
        global_scale: float32 [1] for formats that have one; whoever gives it keeps it up to date.

    Returns:
        The layer, in the training mode of the module.

    Raises:
        SchemeError: the scheme does not fit the module, or training cannot have it.
        NumericsError: the weight holds NaN or infinity.
    """
    if isinstance(module, nn.Embedding):
        return FakeQuantizedEmbedding(module, scheme, name, global_scale)
    return FakeQuantizedLinear(module, scheme, name, global_scale)
