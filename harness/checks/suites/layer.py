"""Checks of runtime layers: 14 and 64 for them, and that their product is that of their weight."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product as product_of
from typing import Any

import torch
from torch import Tensor, nn

from harness.checks.catalogue.kinds import SideEffectError
from harness.checks.catalogue.registry import CheckContext, CheckFailed, NothingToCheckError, register
from harness.checks.inputs.layer_cases import (
    LayerCase,
    answer,
    block_shapes,
    float_linear,
    hold_apart,
    hold_close,
    hurtful_inputs,
    largest_input,
    layer_shapes,
    plain_inputs,
)
from harness.checks.inputs.pairs import pairwise
from harness.checks.inputs.presentations import EXPANDED, GRAD_MODES, HELD, TENSORS, WAYS, layouts
from harness.checks.protocols import Layer
from harness.checks.strategies import NOT_FINITE, hurtful, large_shapes, uniform
from harness.lifecycle.driving.snapshot import Held, Snapshot, describe_change, freeze, module_items
from harness.tolerance import T3, compare, vacuous_decoys

_COARSE = {"tiny": 0.01, "subnormal": 0.01}


@register(14, "weight_as_calibrated", "The stored weight is what calibration computed, bitwise, after a state dict too", kind="layer")
def weight_as_calibrated(subject: Layer, context: CheckContext) -> str:
    """Build layers of every shape and dtype, large ones among them, copy them, and send them through their state dict."""
    count = 0
    for dtype in subject.dtypes:
        cases = [(shape, name) for shape in layer_shapes(subject) for name in ("spread groups", "dead groups", "lopsided")]
        further = [*large_shapes(subject.column_multiple), *block_shapes(subject)]
        for shape, name in (*cases, *((shape, "spread groups") for shape in further)):
            linear = float_linear(shape, dtype, name=name)
            before = linear.weight.detach().clone()
            layer = subject.build(linear)
            _hold(subject.weight(layer), subject.expected_weight(linear), f"{name} {list(shape)} {dtype}")
            if not torch.equal(before, linear.weight):
                raise CheckFailed("building the layer has changed the float layer")
            other = subject.build(float_linear(shape, dtype, name="outliers"))
            with torch.no_grad():
                other(torch.ones(2, shape[1], dtype=dtype))  # what it has unpacked by now it must not keep
            other.load_state_dict(layer.state_dict())
            _hold(subject.weight(other), subject.weight(layer), f"{name} {list(shape)} {dtype}, from a state dict")
            _hold(subject.weight(copy.deepcopy(layer)), subject.weight(layer), f"{name} {list(shape)} {dtype}, a deepcopy")
            count += 1
        _hold_built_again(subject, layer_shapes(subject)[0], dtype)
    return f"{count} layers"


def _hold_built_again(subject: Layer, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Build from one and the same float layer, whose values change meanwhile."""
    linear, other = float_linear(shape, dtype), float_linear(shape, dtype, name="outliers")
    subject.build(linear)
    linear.weight.data.copy_(other.weight)
    _hold(
        subject.weight(subject.build(linear)), subject.weight(subject.build(other)), f"{list(shape)} {dtype}, built again from other values"
    )


def _hold(actual: Tensor, expected: Tensor, what: str) -> None:
    one, two = (x + 0 if x.dtype.itemsize > 1 else x for x in (actual, expected))  # integer codes know no sign of 0
    result = compare(one, two)
    if not result.ok:
        raise CheckFailed(f"{what}: the weight is another one: {result.summary}")


@register(
    None,
    "product",
    "The output is the product of the quantized input and the weight, plus the bias: 32 u sqrt(C), in 16 bits 4 u",
    kind="layer",
)
def product(subject: Layer, context: CheckContext) -> str:
    """Multiply inputs of two to four dimensions, and none, in training and in evaluation mode; and those that hurt."""
    worst = 0.0
    for dtype in subject.dtypes:
        first, second, *others = layer_shapes(subject)
        sizes = [(first, True), (second, False)]
        sizes += [(shape, True) for shape in large_shapes(subject.column_multiple) if dtype == subject.dtypes[0]]
        for number, (shape, bias) in enumerate(sizes):
            case = LayerCase.built(subject, shape, dtype, bias)
            worst = max(worst, _hold_plain(case, shape[1], dtype) if number < 2 else 0.0)
            if not number:
                _hold_lengths(case, hurtful("bell", (max(_LENGTHS), shape[1]), dtype))
            _hold_nonfinite(case, shape[1], dtype)
            for name, x in {
                **hurtful_inputs(shape[1], dtype, bias),
                "largest": largest_input(case, hurtful("bell", (3, shape[1]), dtype)),
            }.items():
                kind = name.partition(",")[0]
                if kind == "subnormal" and not torch.equal(subject.expected_input(case.layer, x), x):
                    continue  # the scale of such an input is only asked to be above zero
                # Near the smallest numbers products are rounded in steps of the same size, however small they are.
                case.layer.eval()
                error = _hold_product(case, x, f"{name}, in evaluation mode", least=_COARSE.get(kind, 0.0))
                worst = max(worst, 0.0 if kind in _COARSE else error)
        others += block_shapes(subject) if dtype == subject.dtypes[0] else []
        for shape, bias in ((shape, bias) for shape in others for bias in (True, False)):  # one wide, one high, and square
            case = LayerCase.built(subject, shape, dtype, bias, times=16)  # else one bias outweighs what a few columns add up to
            x = plain_inputs(((7,),), shape[1], dtype)[0]
            case.layer.eval()
            worst = max(worst, _hold_product(case, x, f"weight {list(shape)}, in evaluation mode", num_more=0))
            if bias:
                _hold_presentations(case.layer, x)
    return f"relative error up to {worst:.1e}"


@register(
    None,
    "conditions_meet",
    "Any two of shape, bias, dtype, mode, tokens, layout, kind of tensor, gradients and values may meet: the product, and NaN stays",
    kind="layer",
)
def conditions_meet(subject: Layer, context: CheckContext) -> str:
    """Multiply an input for each pair of conditions."""
    cases = pairwise(
        {
            "tokens": _MEETING,
            "laid": tuple(WAYS),
            "held": tuple(HELD),
            "shape": [*layer_shapes(subject), *large_shapes(subject.column_multiple)],
            "dtype": subject.dtypes,
            "values": ("usual", "large", "small", "rows of zeros"),
            "bias": (True, False),
            "mode": ("training", "evaluation"),
            "grad": tuple(GRAD_MODES),
            "planted": NOT_FINITE,
        },
        # A bias hides what becomes of small inputs, and the rows of a single token are one row whatever is done to them.
        {"laid": tuple(EXPANDED), "bias": (True,), "tokens": [sizes for sizes in _MEETING if math.prod(sizes) == 1]},
    )
    built: dict[object, LayerCase] = {}
    for one in cases:
        key = one["shape"], one["dtype"], one["bias"]
        if key not in built:
            built[key] = LayerCase.built(subject, *key, times=16)  # else one bias outweighs what a few columns add up to
        _hold_meeting(built[key], one)
    return f"{len(cases)} inputs"


# Few tokens, one and many, in two to four dimensions.
_MEETING = ((7,), (1,), (130,), (2, 3), (1, 1), (1, 9), (2, 65), (2, 3, 2), (1, 1, 1), (2, 5, 13))


def _hold_meeting(case: LayerCase, one: Mapping[str, Any]) -> None:
    x = plain_inputs((one["tokens"],), one["shape"][1], one["dtype"])[0]
    if one["values"] == "large":
        x = largest_input(case, x)
    elif one["values"] == "small":
        x = x * (hurtful("small", (1, x.shape[-1]), x.dtype).abs().amax() / x.abs().amax())
    elif one["values"] == "rows of zeros":
        x.view(-1, x.shape[-1])[1::2] = 0
    given = HELD[one["held"]](WAYS[one["laid"]](x))
    case.layer.train(one["mode"] == "training")
    with GRAD_MODES[one["grad"]]():
        actual = case.layer(given).detach()
    bias = "" if one["bias"] else ", no bias"
    laid = f"{one['laid']}, {one['held']}"
    where = f"weight {list(one['shape'])}{bias}, {laid}, {one['values']}, {one['grad']}, in {one['mode']} mode"
    _hold_output(case, actual, given.detach().clone(memory_format=torch.contiguous_format), where)
    x.view(-1)[0 if one["laid"] in EXPANDED else -1] = one["planted"]
    planted = HELD[one["held"]](WAYS[one["laid"]](x))
    with GRAD_MODES[one["grad"]]():
        found = answer(case.layer, planted, where)
    if found is not None:
        _hold_planted(case, planted.detach().clone(memory_format=torch.contiguous_format), found.detach(), f"{one['planted']}, {where}")


def _hold_planted(case: LayerCase, x: Tensor, found: Tensor, what: str) -> None:
    """Whatever NaN comes into, and infinity where no quantizer cuts it off, is no number."""
    seen = case.subject.expected_input(case.layer, x)
    hit = (x.isnan() | (x.isinf() & ~seen.isfinite())).any(-1)
    if bool(found[hit].isfinite().any()):
        raise CheckFailed(f"{what}: {int(found[hit].isfinite().sum())} of {found[hit].numel()} outputs of these tokens are numbers")


# Tokens, sequences, a single token, and none; and one step of several sequences, and more dimensions.
_LEADING = ((7,), (2, 3), (1, 1), (0, 4))
_MORE_LEADING = ((1,), (3, 1), (2, 3, 2), (3, 3), (2, 2, 3), (0,), (2, 0, 3))


def _hold_plain(case: LayerCase, columns: int, dtype: torch.dtype) -> float:
    """Inputs of every rank in either mode, again and again, in memory with other values and in every presentation."""
    worst = 0.0
    for leading in (*_LEADING, *_MORE_LEADING):
        x = plain_inputs((leading,), columns, dtype)[0]
        for mode in ("training", "evaluation"):
            case.layer.train(mode == "training")
            num_more = 0 if leading in _MORE_LEADING else 7 if mode == "training" else 1
            worst = max(worst, _hold_product(case, x, f"in {mode} mode", num_more=num_more))
            if leading in _LEADING:
                _hold_memory(case.layer, x)
        if leading in _LEADING[:2]:
            _hold_presentations(case.layer, x)
    return worst


# Kernels go by the number of tokens, each in a range of its own: tiles that are full, one more, one less, half full.
_LENGTHS = (8, 13, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 96, 128, 129, 192)


def _hold_lengths(case: LayerCase, x: Tensor) -> None:
    """Any number of tokens is multiplied alike."""
    case.layer.eval()
    for length in _LENGTHS:
        with torch.no_grad():
            actual = case.layer(x[:length].clone())
        _hold_output(case, actual, x[:length], "in evaluation mode")


def _hold_nonfinite(case: LayerCase, columns: int, dtype: torch.dtype) -> None:
    """NaN in a token is all over what comes out of it, or is refused, and so is infinity where no quantizer cuts it off; no other knows."""
    case.layer.eval()
    x = plain_inputs(((2, 3),), columns, dtype)[0]
    for value, place in product_of(NOT_FINITE, ((0, 0, 0), (-1, -1, -1))):
        given = x.clone()
        given[place] = value
        what = f"{value} at {list(place)} of {list(x.shape)} in {dtype}"
        with torch.no_grad():
            found, alone = answer(case.layer, given, what), case.layer(x)
        if found is None:
            continue
        _hold_planted(case, given, found, what)
        seen = case.subject.expected_input(case.layer, given)
        others = (seen == case.subject.expected_input(case.layer, x)).all(-1)  # one scale for all tokens is no number any more
        hold_close(found[others], alone[others], f"{what}: another output of tokens that are as before")


def _hold_product(case: LayerCase, x: Tensor, where: str, *, num_more: int = 1, least: float = 0.0) -> float:
    return _hold_output(case, _run_again_and_again(case.layer, x, num_more), x, where, least=least, tries_decoys=True)


def _hold_output(case: LayerCase, actual: Tensor, x: Tensor, where: str, *, least: float = 0.0, tries_decoys: bool = False) -> float:
    wide = case.subject.expected_input(case.layer, x).to(torch.float64) @ case.weight.t()
    exact = (wide + case.bias.to(torch.float64)).to(x.dtype)
    if actual.shape != exact.shape or actual.dtype != exact.dtype:
        raise CheckFailed(f"{actual.dtype} {list(actual.shape)} came out where {exact.dtype} {list(exact.shape)} is due")
    if not exact.numel():
        return 0.0
    # In 16 bits a sum in float32 is rounded once; 32 u sqrt(C) would be everything there.
    steps = 32 * x.shape[-1] ** 0.5 if x.dtype.itemsize > 2 else 4
    tier = T3(max_relative_error=max(least, steps * float(torch.finfo(x.dtype).eps)))
    decoys = vacuous_decoys(exact, tier) if tries_decoys and bool(exact.any()) and exact.unique().numel() > 1 else []
    if decoys and exact.numel() > 1:
        raise CheckFailed(f"the limit {tier} measures nothing: {', '.join(decoys)} would pass")
    result = compare(actual, exact, tier, name="output")
    if not result.ok:
        raise CheckFailed(f"an input of {list(x.shape)} in {x.dtype}, {where}: {result.summary}")
    return result.distance.relative_error if result.distance else 0.0


def _run_again_and_again(layer: nn.Module, x: Tensor, num_more: int) -> Tensor:
    """Run a layer several times; each time gives the same, and changes neither its input nor the process, nor what it is itself."""
    before, what = _standing(layer), f"an input of {list(x.shape)} in {x.dtype}"
    with torch.enable_grad():
        trained = _watched_forward(layer, x).detach()
    with torch.no_grad():
        around = Snapshot.of_surroundings()
        first, around = _watched_from(around, layer, x)
        first = first.clone()
        for _ in range(num_more):
            actual, around = _watched_from(around, layer, x)
            if not torch.equal(first, actual):
                raise CheckFailed(f"{what}: a later forward gives another output than the first one")
    hold_close(trained, first, f"{what}: where gradients are on, another output than where they are off")
    if changed := [key for key, value in _standing(layer).items() if before.get(key, ()) != value]:
        raise CheckFailed(f"a forward has changed the {' '.join(changed[0]).strip()} of the layer, or added to it")
    return first


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
    actual = _unchanged(layer, x)
    left = Snapshot.of_surroundings()
    if changed := around.differences(left, ("threads",)):
        raise SideEffectError(f"the forward has changed something of the process: {changed[0]}", str(changed[0]))
    return actual, left


def _unchanged(layer: nn.Module, x: Tensor) -> Tensor:
    before = freeze(x, tensors=Held)
    actual: Tensor = layer(x)
    if before != (after := freeze(x, tensors=Held)):
        raise CheckFailed(f"the forward has changed its input: {describe_change(before, after)}")
    return actual


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


def _hold_presentations(layer: nn.Module, x: Tensor) -> None:
    """Inputs that are views, Parameters or results give what an ordinary input of the same values gives, with gradients on and off."""
    where, around = f"an input of {list(x.shape)} in {x.dtype}", Snapshot.of_surroundings()
    with torch.no_grad():
        for name, view, plain in layouts(x):
            hold_close(_unchanged(layer, view), layer(plain), f"{where}, {name}: another output than for a contiguous input")
        whole = layer(x)
    for mode, grad in GRAD_MODES.items():
        for name, make in TENSORS.items():
            with grad():
                actual = _unchanged(layer, make(x)).detach()
            hold_close(actual, whole, f"{where}, {name}, {mode}: another output than for an ordinary input")
    if changed := around.differences(Snapshot.of_surroundings(), ("threads",)):
        raise SideEffectError(f"{where}: a forward has changed something of the process: {changed[0]}", str(changed[0]))


@register(64, "shapes", "Odd, one-wide and prime shapes in every supported dtype build, run and keep to their dtype", kind="layer")
def every_shape(subject: Layer, context: CheckContext) -> str:
    """Build and run every shape, and move layers to every dtype and back."""
    count = 0
    for dtype in subject.dtypes:
        for shape in layer_shapes(subject):
            layer = subject.build(float_linear(shape, dtype)).eval()
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


@register(
    None,
    "copies",
    "A layer that was filled from a state dict or copied gives the output of the one that it came from, and goes its own way from then on",
    kind="layer",
)
def copies(subject: Layer, context: CheckContext) -> str:
    """Run what was filled, copied, or built without gradients; then fill and move a copy, and run what it came from."""
    count = 0
    for dtype in subject.dtypes:
        cases = list(zip(layer_shapes(subject), (True, False, True), strict=False))
        for shape, bias in cases if dtype == subject.dtypes[0] else cases[:1]:
            source = subject.build(float_linear(shape, dtype, bias, name="bell")).eval()
            x = plain_inputs(_LEADING, shape[1], dtype)[0]
            with torch.no_grad():
                expected = source(x).clone()
                for name, made in _offspring(subject, source, shape, dtype, bias, x):
                    what = f"{list(shape)} in {dtype}, {name}"
                    hold_close(made.eval()(x), expected, f"{what}: another output than the layer that it came from")
                    count += 1
                other, blank = (subject.build(float_linear(shape, dtype, bias, name="outliers", seed=seed)).eval() for seed in (5, 6))
                hold_apart(source, other, blank, f"{list(shape)} in {dtype}", x)
    return f"{count} layers that came from another"


def _offspring(
    subject: Layer, source: nn.Module, shape: tuple[int, int], dtype: torch.dtype, bias: bool, x: Tensor
) -> Iterator[tuple[str, nn.Module]]:
    """Layers that must be as their source: with its weight and its bias, whatever they held, unpacked or multiplied before."""
    *others, left = (subject.build(float_linear(shape, dtype, bias, name="outliers", seed=seed)).eval() for seed in (5, 6, 7, 8))
    for name, other in zip(("filled from a state dict", "filled after it had run", "filled again"), others, strict=True):
        if name != "filled from a state dict":
            other(x)
        if name == "filled again":
            other.load_state_dict(left.state_dict())
            other(x)
        other.load_state_dict({key: value.clone() for key, value in source.state_dict().items()})
        yield name, other
    yield "a deepcopy", copy.deepcopy(source)
    yield "a deepcopy of one that was filled", copy.deepcopy(others[0])
    left(x)
    filled = copy.deepcopy(left)
    filled.load_state_dict(source.state_dict())
    yield "a deepcopy that was filled", filled
    yield "moved to the dtype that it has", copy.deepcopy(source).to(dtype)
    yield "built where gradients are off", subject.build(float_linear(shape, dtype, bias, name="bell"))


@register(
    None,
    "moves",
    "Moving a layer to another dtype leaves codes and scales of one byte alone, its weight to 4 u, and nothing that a forward has unpacked",
    kind="layer",
)
def moves(subject: Layer, context: CheckContext) -> str:
    """Move float32 layers to bfloat16 and float16, run them before, there or both, and move them back."""
    if torch.float32 not in subject.dtypes:
        raise NothingToCheckError("the subject takes no float32 layers")
    # One where the bias decides, one without, and one of a single output.
    for shape, bias, times in zip(layer_shapes(subject), (True, False, True), (1, 1, 16), strict=False):
        for dtype in (torch.bfloat16, torch.float16):
            _hold_move(LayerCase.built(subject, shape, torch.float32, bias, times), dtype)
            _hold_runs(subject, partial(float_linear, shape, torch.float32, bias, "bell", times=times), dtype)
    return "bfloat16 and float16, and back"


@torch.no_grad()
def _hold_move(case: LayerCase, dtype: torch.dtype) -> None:
    """A layer that has run is moved, multiplies there with what it then holds and with its bias, and so it does when it is back."""
    here, there = (plain_inputs(_LEADING, case.weight.shape[1], one)[0] for one in (torch.float32, dtype))
    case.layer.eval()(here)
    state = {key: value.clone() for key, value in case.layer.state_dict().items()}
    moved = LayerCase.of(case.subject, copy.deepcopy(case.layer).to(dtype).eval(), case.bias.to(dtype))
    after = moved.layer.state_dict()
    for key, value in state.items():
        if (value.dtype.itemsize == 1 or not value.is_floating_point()) and freeze(after[key]) != freeze(value):
            raise CheckFailed(f"{key} has become {after[key].dtype}, or has changed, when the layer went from float32 to {dtype}")
    error, norm = float((moved.weight - case.weight).norm()), float(case.weight.norm())
    if not error <= 4 * float(torch.finfo(dtype).eps) * norm:
        raise CheckFailed(f"the weight has changed by {error / norm:.3g} when the layer went to {dtype}")
    _hold_product(moved, there, f"of a layer that went from float32 to {dtype}", num_more=0)
    back, lost = moved.layer.to(torch.float32), 8 * float(torch.finfo(dtype).eps)  # what is rounded once stays so
    _hold_product(replace(case, layer=back), here, f"of a layer that went to {dtype} and back", num_more=0, least=lost)
    # A bias, or the scale of an input quantizer, may come back rounded or not.
    if not bool(case.bias.any()) and torch.equal(case.subject.expected_input(back, here), here):
        _hold_product(LayerCase.of(case.subject, back, case.bias), here, f"of the weight that it holds when back from {dtype}", num_more=0)
    back.load_state_dict(state)
    _hold_product(replace(case, layer=back), here, f"of a layer that went to {dtype} and back, and was filled then", num_more=0)


@torch.no_grad()
def _hold_runs(subject: Layer, linear: Callable[[], nn.Linear], dtype: torch.dtype) -> None:
    """A layer that runs before it is moved, or on the way, is the one that is only moved: what it has unpacked does not outlive a move."""
    here, there = (plain_inputs(_LEADING, linear().in_features, one)[0] for one in (torch.float32, dtype))
    only_moved = subject.build(linear()).eval().to(dtype).to(torch.float32)(here)
    for when in ("before it went", "there", "before it went, and there"):
        layer = subject.build(linear()).eval()
        if when.startswith("before"):
            layer(here)
        layer.to(dtype)
        if when.endswith("there"):
            layer(there)
        what = f"an input of {list(here.shape)}, of a layer that went to {dtype} and back, and has run {when}"
        hold_close(layer.to(torch.float32)(here), only_moved, f"{what}: another output than one that was only moved")
