"""Checks of runtime layers: 14 and 64 for them, and that their product is that of their weight."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from harness.checks.catalogue.registry import CheckContext, CheckFailed, NothingToCheckError, register
from harness.checks.protocols import Layer
from harness.checks.strategies import hurtful, large_shapes, uniform
from harness.lifecycle.driving.snapshot import Held, Snapshot, describe_change, freeze, module_items
from harness.tolerance import T3, compare, vacuous_decoys

_COARSE = {"tiny": 0.01, "subnormal": 0.01}


def _linear(shape: tuple[int, int], dtype: torch.dtype, bias: bool = True, name: str = "spread groups") -> nn.Linear:
    linear = nn.Linear(shape[1], shape[0], bias=bias, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(hurtful(name, shape, dtype, group=16))
        if bias:
            linear.bias.copy_(uniform((shape[0],), torch.Generator().manual_seed(3)))
    return linear


def _shapes(subject: Layer) -> list[tuple[int, int]]:
    multiple = subject.column_multiple
    if multiple == 1:
        return [(5, 37), (33, 64), (1, 13), (7, 1), (1, 1), (32, 32)]
    # In a square of several groups those that run down the columns fit, too.
    return [(5, 3 * multiple), (33, multiple), (1, 2 * multiple), (2 * multiple, 2 * multiple)]


@register(14, "weight_as_calibrated", "The stored weight is what calibration computed, bitwise, after a state dict too", kind="layer")
def weight_as_calibrated(subject: Layer, context: CheckContext) -> str:
    """Build layers of every shape and dtype, copy them, and send them through their state dict."""
    count = 0
    for dtype in subject.dtypes:
        for shape in _shapes(subject):
            for name in ("spread groups", "dead groups", "lopsided"):
                linear = _linear(shape, dtype, name=name)
                before = linear.weight.detach().clone()
                layer = subject.build(linear)
                _hold(subject.weight(layer), subject.expected_weight(linear), f"{name} {list(shape)} {dtype}")
                if not torch.equal(before, linear.weight):
                    raise CheckFailed("building the layer has changed the float layer")
                other = subject.build(_linear(shape, dtype, name="outliers"))
                with torch.no_grad():
                    other(torch.ones(2, shape[1], dtype=dtype))  # what it has unpacked by now it must not keep
                other.load_state_dict(layer.state_dict())
                _hold(subject.weight(other), subject.weight(layer), f"{name} {list(shape)} {dtype}, from a state dict")
                _hold(subject.weight(copy.deepcopy(layer)), subject.weight(layer), f"{name} {list(shape)} {dtype}, a deepcopy")
                count += 1
    return f"{count} layers"


def _hold(actual: Tensor, expected: Tensor, what: str) -> None:
    result = compare(actual, expected)
    if not result.ok:
        raise CheckFailed(f"{what}: the weight is another one: {result.summary}")


@register(None, "product", "The output is the product of the quantized input and the weight, plus the bias: 32 u sqrt(C)", kind="layer")
def product(subject: Layer, context: CheckContext) -> str:
    """Multiply inputs of one to three dimensions, and none, in training and in evaluation mode; and those that hurt."""
    worst = 0.0
    for dtype in subject.dtypes:
        sizes = [(_shapes(subject)[0], True), (_shapes(subject)[1], False)]
        sizes += [(shape, True) for shape in large_shapes(subject.column_multiple) if dtype == subject.dtypes[0]]
        for number, (shape, bias) in enumerate(sizes):
            linear = _linear(shape, dtype, bias, name="bell")
            added = torch.zeros(shape[0]) if not bias else linear.bias.detach().clone()
            layer = subject.build(linear)
            plain = _plain_inputs(shape[1], dtype) if number < 2 else []
            for x in plain:
                worst = max(worst, _hold_product(subject, layer.train(), x, added, "in training mode", num_more=7))
                _hold_memory(layer, x)
                worst = max(worst, _hold_product(subject, layer.eval(), x, added, "in evaluation mode"))
                _hold_memory(layer, x)
                _hold_layouts(layer, x)
            for name, x in _hurtful_inputs(shape[1], dtype, bias).items():
                if name == "subnormal" and not torch.equal(subject.expected_input(layer, x), x):
                    continue  # the scale of such an input is only asked to be above zero
                # Near the smallest numbers products are rounded in steps of the same size, however small they are.
                error = _hold_product(subject, layer, x, added, f"{name}, in evaluation mode", least=_COARSE.get(name, 0.0))
                worst = max(worst, 0.0 if name in _COARSE else error)
    return f"relative error up to {worst:.1e}"


def _plain_inputs(columns: int, dtype: torch.dtype) -> list[Tensor]:
    inputs = [uniform((*leading, columns), torch.Generator().manual_seed(1)) for leading in ((7,), (2, 3), (1, 1), (0, 4))]
    return [x.to(dtype) * torch.arange(1, columns + 1).sqrt().to(dtype) for x in inputs]


def _hurtful_inputs(columns: int, dtype: torch.dtype, bias: bool) -> dict[str, Tensor]:
    """Many tokens, large values, rows of zeros; and small ones, where no bias hides what becomes of them."""
    many, large = hurtful("bell", (130, columns), dtype), hurtful("large", (3, columns), dtype)
    some = hurtful("outliers", (5, columns), dtype)
    some[1::2] = 0
    found = {"130 tokens": many, "65 tokens a sequence": many.reshape(2, 65, columns), "large": large, "rows of zeros": some}
    found |= {"zeros only": torch.zeros(2, columns, dtype=dtype), "a constant": torch.full((3, columns), 0.3, dtype=dtype)}
    small = {} if bias else {name: hurtful(name, (3, columns), dtype) for name in ("small", "tiny", "subnormal")}
    return {**found, **small}


def _hold_product(subject: Layer, layer: nn.Module, x: Tensor, bias: Tensor, where: str, *, num_more: int = 1, least: float = 0.0) -> float:
    actual = _run_again_and_again(layer, x, num_more)
    wide = subject.expected_input(layer, x).to(torch.float64) @ subject.weight(layer).to(torch.float64).t()
    exact = (wide + bias.to(torch.float64)).to(x.dtype)
    if actual.shape != exact.shape or actual.dtype != exact.dtype:
        raise CheckFailed(f"{actual.dtype} {list(actual.shape)} came out where {exact.dtype} {list(exact.shape)} is due")
    if not exact.numel():
        return 0.0
    limit = min(0.2, 32 * float(torch.finfo(x.dtype).eps) * x.shape[-1] ** 0.5)
    tier = T3(max_relative_error=max(least, limit))
    decoys = vacuous_decoys(exact, tier) if bool(exact.any()) and exact.unique().numel() > 1 else []
    if decoys and exact.numel() > 1:
        raise CheckFailed(f"the limit {tier} measures nothing: {', '.join(decoys)} would pass")
    result = compare(actual, exact, tier, name="output")
    if not result.ok:
        raise CheckFailed(f"an input of {list(x.shape)} in {x.dtype}, {where}: {result.summary}")
    return result.distance.relative_error if result.distance else 0.0


def _run_again_and_again(layer: nn.Module, x: Tensor, num_more: int) -> Tensor:
    """Run a layer several times; each time gives the same, and changes neither its input nor the process, nor what it is itself."""
    before = _standing(layer)
    with torch.enable_grad():
        _watched_forward(layer, x)
    with torch.no_grad():
        around = Snapshot.of_surroundings()
        first, around = _watched_from(around, layer, x)
        first = first.clone()
        for _ in range(num_more):
            actual, around = _watched_from(around, layer, x)
            if not torch.equal(first, actual):
                raise CheckFailed(f"an input of {list(x.shape)} in {x.dtype}: a later forward gives another output than the first one")
    if changed := [key for key, value in _standing(layer).items() if before.get(key, ()) != value]:
        raise CheckFailed(f"a forward has changed the {' '.join(changed[0])} of the layer, or added to it")
    return actual


def _standing(layer: nn.Module) -> dict[tuple[str, str], object]:
    """What no forward may change of its layer: hooks, modes, modules and what a checkpoint holds. What it has unpacked it may keep."""
    found = {key: thing for name, module in layer.named_modules() for key, thing in module_items(name, module) if _is_standing(*key)}
    return found | {("state", key): freeze(value) for key, value in layer.state_dict().items()}


def _is_standing(kind: str, where: str) -> bool:
    return kind in ("hooks", "training", "module", "requires_grad") or where.endswith(("__class__", "forward"))


def _watched_forward(layer: nn.Module, x: Tensor) -> Tensor:
    """Run a layer; looked at where the caller has chosen the grad mode, so that leaving another one is seen."""
    return _watched_from(Snapshot.of_surroundings(), layer, x)[0]


def _watched_from(around: Snapshot, layer: nn.Module, x: Tensor) -> tuple[Tensor, Snapshot]:
    """Run a layer in known surroundings; those that it leaves are the next one's."""
    before = freeze(x, tensors=Held)
    actual: Tensor = layer(x)
    if before != (after := freeze(x, tensors=Held)):
        raise CheckFailed(f"the forward has changed its input: {describe_change(before, after)}")
    left = Snapshot.of_surroundings()
    if changed := around.differences(left, ("threads",)):
        raise CheckFailed(f"the forward has changed something of the process: {changed[0]}")
    return actual, left


@torch.no_grad()
def _hold_memory(layer: nn.Module, x: Tensor) -> None:
    """An input that is changed in place is a new one, and what came out before stays as it was."""
    if not x.numel():
        return
    memory = x.clone()
    first = layer(memory)
    before = first.clone()
    # As an allocator gives memory out again: the address and the version of the old input, and other values.
    memory.data.copy_(x * -0.5)
    again, alone = layer(memory), layer(x * -0.5)
    what = f"an input of {list(x.shape)} in {x.dtype}"
    if not torch.equal(first, before):
        raise CheckFailed(f"{what}: a later forward has changed the output of an earlier one; give each call memory of its own")
    if not torch.equal(again, alone):
        raise CheckFailed(f"{what}: an input that was changed in place gives another output than a new one of the same values")


def _hold_layouts(layer: nn.Module, x: Tensor) -> None:
    """Inputs that are views give what a contiguous input of the same values gives."""
    larger = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), 3.0, dtype=x.dtype)
    larger[..., 1::2] = x
    views = {
        "rows that lie apart": torch.cat((x, -x), -1)[..., : x.shape[-1]],
        "columns that lie apart": larger[..., 1::2],
        "a transposed view": x.transpose(0, -1).contiguous().transpose(0, -1),
        "sequences that lie apart": x.transpose(0, -2).contiguous().transpose(0, -2),
    }
    with torch.no_grad():
        plain = layer(x)
        for name, view in views.items():
            what = f"an input of {list(x.shape)} in {x.dtype}, {name}"
            actual = _watched_forward(layer, view)
            # In another order of additions; a T3 of the norm, which one output that is near zero does not decide.
            limit = 8 * float(torch.finfo(x.dtype).eps) * float(plain.to(torch.float64).norm())
            if actual.shape != plain.shape or not float((actual.to(torch.float64) - plain.to(torch.float64)).norm()) <= limit:
                raise CheckFailed(f"{what}: another output than for a contiguous input of the same values")


@register(64, "shapes", "Odd, one-wide and prime shapes in every supported dtype build, run and keep to their dtype", kind="layer")
def every_shape(subject: Layer, context: CheckContext) -> str:
    """Build and run every shape, and move layers to every dtype and back."""
    count = 0
    for dtype in subject.dtypes:
        for shape in _shapes(subject):
            layer = subject.build(_linear(shape, dtype)).eval()
            x = uniform((2, 3, shape[1]), torch.Generator().manual_seed(2)).to(dtype)
            with torch.no_grad():
                y = layer(x)
            if y.shape != (2, 3, shape[0]) or y.dtype != dtype or not bool(y.isfinite().all()):
                raise CheckFailed(f"{list(shape)} {dtype}: the output is {y.dtype} {list(y.shape)}, finite: {bool(y.isfinite().all())}")
            for part in range(2):
                with torch.no_grad():
                    alone = layer(x[part : part + 1])
                limit = 16 * float(torch.finfo(dtype).eps) * float(y.abs().amax())
                if float((alone - y[part : part + 1]).abs().amax()) > limit:
                    raise CheckFailed(f"{list(shape)} {dtype}: a sequence by itself gives another output than in a batch")
            count += 1
    return f"{count} layers"


@register(None, "moves", "Moving a layer to another dtype leaves codes and scales of one byte alone, and its weight to 4 u", kind="layer")
def moves(subject: Layer, context: CheckContext) -> str:
    """Move float32 layers to bfloat16 and float16, and run them there."""
    if torch.float32 not in subject.dtypes:
        raise NothingToCheckError("the subject takes no float32 layers")
    shape = _shapes(subject)[0]
    for dtype in (torch.bfloat16, torch.float16):
        layer = subject.build(_linear(shape, torch.float32, name="bell"))
        kept = {
            key: value.clone() for key, value in layer.state_dict().items() if value.dtype.itemsize == 1 or not value.is_floating_point()
        }
        before = subject.weight(layer).to(torch.float64)
        moved = copy.deepcopy(layer).to(dtype).eval()
        after = moved.state_dict()
        for key, value in kept.items():
            if after[key].dtype != value.dtype or not torch.equal(after[key].view(torch.uint8), value.view(torch.uint8)):
                raise CheckFailed(f"{key} has become {after[key].dtype} when the layer went from float32 to {dtype}")
        error = float((subject.weight(moved).to(torch.float64) - before).norm())
        if not error <= 4 * float(torch.finfo(dtype).eps) * float(before.norm()):
            raise CheckFailed(f"the weight has changed by {error / float(before.norm()):.3g} when the layer went to {dtype}")
        with torch.no_grad():
            y = moved(uniform((3, shape[1]), torch.Generator().manual_seed(4)).to(dtype))
        if y.dtype != dtype or not bool(y.isfinite().all()):
            raise CheckFailed(f"a layer in {dtype} gives {y.dtype}, finite: {bool(y.isfinite().all())}")
    return "bfloat16 and float16"
