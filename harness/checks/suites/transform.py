"""Checks of transforms: 31 to 36. The float model before is the oracle; nothing of the transform's own arithmetic is used."""

from __future__ import annotations

import copy
import gc
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from harness.checks.catalogue.registry import CheckContext, CheckFailed, NothingToCheckError, register
from harness.checks.forked import in_a_fork
from harness.checks.inputs.norm_linear_models import build, every_id, forward, in_dtype, logits, logits_before, reloaded, token_ids, truly
from harness.checks.protocols import OnlineTransform, Transform
from harness.lifecycle.driving.snapshot import Difference, Snapshot
from harness.lifecycle.other_process import digests
from harness.tolerance import T3, climb, vacuous_decoys

Case = TypeVar("Case")

_UNITS = 32.0
# bfloat16, float32, float64: 32 eps of bfloat16 are a quarter of the output, and hide a doubled head; ours are within 1.5.
_OUTPUT_UNITS = (4.0, _UNITS, _UNITS)
_CALIBRATIONS = {torch.bfloat16: ((2, 12), (2, 12)), torch.float32: ((3, 24),), torch.float64: ((1, 9), (4, 12), (2, 30))}
"""Rows and lengths of the batches that a transform learns from: one alone, too, and unequal ones."""
_AGAIN = 3  # forwards after which there are no more tensors than before
_LEAST_CHANGE = 1e-4
_LEAST_SPREAD = 1 / 12  # of the rows, or columns, that the energy of one entry counts for; random rotations have 1/3
_PLACES = 8  # of an entry, along the diagonal of a weight
_ALIKE = 0.9  # cosine of the two sides; of n channels drawn apart it is about n^-1/2


def _apply(
    subject: Transform, model: nn.Module, context: CheckContext, shapes: Sequence[tuple[int, int]] = (), *, is_frozen: bool = False
) -> None:
    """Give it batches of these rows and lengths, or two of 2 x 12; where gradients are on if no weight is to have one."""
    if is_frozen:
        model.requires_grad_(False)
    others = [token_ids(model, seed=context.seed + at, rows=rows, length=length)[0] for at, (rows, length) in enumerate(shapes)]
    with torch.set_grad_enabled(is_frozen):
        subject.apply(model, others or token_ids(model, seed=context.seed + 7))


def _ladder(subject: Transform, architecture: str, context: CheckContext) -> str:
    """Compare float outputs before and after at three dtypes; the error must fall with each."""
    model = build(architecture, seed=context.seed)
    batches = [torch.cat([token_ids(model, seed=context.seed)[0], every_id(model)]), *_other_shapes(model, context)]

    def both(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        own = in_dtype(model, dtype)
        with truly(dtype):
            before = _rows(logits_before(architecture, own, ids) for ids in batches)
        _apply(subject, own, context, _CALIBRATIONS[dtype])  # what the subject wants in float32 stays in float32
        with truly(dtype):
            after = _rows(logits(own, ids) for ids in batches)
        refuse_vacuous(before, max(_OUTPUT_UNITS) * torch.finfo(dtype).eps)
        return after, before

    ladder = climb(both, max_units=_OUTPUT_UNITS)
    if not ladder.ok:
        allowed = f"{_OUTPUT_UNITS[0]:g} eps of bfloat16 and {_UNITS:g} of the others are allowed"
        raise CheckFailed(f"{architecture}: the float output has changed: {ladder}, where {allowed}")
    return f"{architecture} {ladder}"


def _other_shapes(model: nn.Module, context: CheckContext) -> list[Tensor]:
    """A token alone, as in each step of a generation, two of them, a row alone, and several long ones: what runs in a forward may look."""
    shapes = ((1, 1), (1, 2), (1, 12), (4, 40))
    return [token_ids(model, seed=context.seed + 1, rows=rows, length=length)[0] for rows, length in shapes]


def _rows(outputs: Iterable[Tensor]) -> Tensor:
    """Outputs [B, T, V] of several batches as [N, V]."""
    return torch.cat([one.flatten(0, 1) for one in outputs])


def refuse_vacuous(expected: Tensor, limit: float) -> None:
    """Raise where a limit on the relative error lets a decoy through.

    Args:
        expected: the right tensor.
        limit: relative error.

    Raises:
        CheckFailed: the limit measures nothing here.
    """
    if passed := vacuous_decoys(expected, T3(max_relative_error=limit)):
        raise CheckFailed(f"the limit {limit:.3g} measures nothing: {', '.join(passed)} would pass")


@register(
    None, "another_model", "A model of the same names and shapes that came before decides nothing, as it would by a cache", kind="transform"
)
def another_model(subject: Transform, context: CheckContext) -> str:
    """Transform a model of the first architecture behind another one, and alone, each in a copy of this process that ends with it.

    The first of all checks, for the copies know of what the subject has kept before.
    """

    one, other = (build(subject.architectures[0], seed=context.seed + more) for more in (1, 2))

    def made(*models: nn.Module) -> dict[str, str]:
        for model in models:
            _apply(subject, model, context)
        return digests(one.state_dict())

    alone, behind = in_a_fork(lambda: made(one)), in_a_fork(lambda: made(other, one))
    if differing := sorted(name for name in alone.keys() | behind.keys() if alone.get(name) != behind.get(name)):
        what = f"{len(differing)} of {len(alone)} tensors are others behind another model of the same names and shapes"
        raise CheckFailed(f"{what}; first: {differing[0]}", differing)
    return f"{len(alone)} tensors, alone and behind another model"


@register(
    31,
    "float_output",
    "The float output is unchanged: relative error <= 4 eps in bfloat16, 32 eps in float32 and float64",
    kind="transform",
    needs=("invariant_fp",),
    caught_by=("SpinQuant#14", "QuaRot#7"),
)
def float_output(subject: Transform, context: CheckContext) -> str:
    """Look at the first architecture."""
    return _ladder(subject, subject.architectures[0], context)


@register(
    32,
    "every_architecture",
    "The float output is unchanged for every architecture, with random norm weights and embeddings whose mean is not zero",
    kind="transform",
    needs=("invariant_fp",),
    caught_by=("llm-compressor#2500", "llm-compressor#1455"),
)
def every_architecture(subject: Transform, context: CheckContext) -> str:
    """Look at all the others."""
    rest = list(subject.architectures[1:])
    if not rest:
        raise NothingToCheckError("the subject claims one architecture only, which check 31 looks at")
    failed = []

    def look(architecture: str) -> str:
        try:
            _ladder(subject, architecture, context)
        except CheckFailed as broken:
            failed.append(str(broken))
        return architecture

    seen = _each(rest, look)
    if failed:
        raise CheckFailed(f"{len(failed)} of {len(rest)} architectures; first: {failed[0]}", failed)
    return f"{len(rest)} architectures: {', '.join(seen)}"


def _each(cases: Sequence[Case], look: Callable[[Case], str]) -> list[str]:
    """Look at each, and say why where one cannot be looked at; an error only where that is so of all."""
    seen, left_out = [], []
    for case in cases:
        try:
            seen.append(look(case))
        except NothingToCheckError as reason:
            left_out.append(str(reason))
    if not seen:
        raise NothingToCheckError("; ".join(left_out))
    return [*seen, *left_out]


@register(
    None,
    "every_forward",
    "Forwards that go on changing what layers are handed do so in both modes, with gradients, again and again; they leave and keep nothing",
    kind="transform",
    needs=("invariant_fp", "online"),
)
def every_forward(subject: Transform, context: CheckContext) -> str:
    """Run the first architecture in four modes, and look at it and the random numbers before and after."""
    architecture = subject.architectures[0]
    model = build(architecture, seed=context.seed)
    batches = token_ids(model, seed=context.seed)
    plain = _in_modes(model, batches)
    _apply(subject, model, context)
    before, _ = plain["evaluation mode without gradients"]
    limit = _UNITS * torch.finfo(before.dtype).eps
    refuse_vacuous(before, limit)
    for mode, (after, found) in _in_modes(model, batches).items():
        due, own = plain[mode]
        if left := [one for one in found if (one.kind, one.where) not in {(its.kind, its.where) for its in own}]:
            raise CheckFailed(f"{architecture} in {mode}: a forward changes {left[0]}", [str(one) for one in left])
        if torch.equal(due, before):  # else the model drops out by itself, and what is turned meets other zeros
            _hold(after, due, limit, f"{architecture} in {mode}: the float output has changed")
    if kept := _kept_tensors(model, batches[0]):
        raise CheckFailed(f"{architecture}: {_AGAIN} more forwards of one batch leave {kept} tensors in memory, which something keeps")
    return f"{architecture}: relative error <= {limit:.2g} in {', '.join(plain)}"


def _kept_tensors(model: nn.Module, ids: Tensor) -> int:
    """How many tensors more there are in this process after some forwards, wherever they are held; 0 where that is fewer than forwards."""

    def after(times: int) -> int:
        for _ in range(times):
            logits(model, ids)
        gc.collect()
        return sum(issubclass(type(one), Tensor) for one in gc.get_objects())  # a dead proxy has no class to ask for

    before = after(1)
    more = after(_AGAIN) - before
    return more if more >= _AGAIN else 0


def _in_modes(model: nn.Module, batches: Sequence[Tensor]) -> dict[str, tuple[Tensor, list[Difference]]]:
    """Outputs [N, V] by mode, and what forwards behind the first, which may make something for all others, have changed."""
    found = {}
    for training, gradients in itertools.product((False, True), repeat=2):
        model.train(training)
        with torch.set_grad_enabled(gradients):
            forward(model, batches[0])
            before = Snapshot(model)
            outputs = _rows(forward(model, ids).detach() for ids in batches)
            mode = f"{'training' if training else 'evaluation'} mode {'with' if gradients else 'without'} gradients"
            found[mode] = outputs, before.differences(Snapshot(model))
    model.eval()
    return found


@register(33, "orthogonal", "||R R^T - I|| <= 32 eps sqrt(n)", kind="transform")
def orthogonal(subject: Transform, context: CheckContext) -> str:
    """Multiply in float64."""
    model = build(subject.architectures[0], seed=context.seed)
    rotations = subject.rotations(model)
    if not rotations:
        raise NothingToCheckError("the subject does not rotate")
    worst = 0.0
    for name, rotation in rotations.items():
        if rotation.ndim != 2 or rotation.shape[0] != rotation.shape[1]:
            raise CheckFailed(f"{name} has the shape {list(rotation.shape)}, which is no rotation")
        n = rotation.shape[0]
        unit = torch.eye(n, dtype=torch.float64)
        limit = _UNITS * torch.finfo(rotation.dtype).eps * math.sqrt(n)
        refuse_vacuous(unit, limit / math.sqrt(n))
        wide = rotation.to(torch.float64)
        error = float((wide @ wide.t() - unit).norm())
        if not error <= limit:
            raise CheckFailed(f"{name}: ||R R^T - I|| = {error:.3g}, where {limit:.3g} are allowed")
        worst = max(worst, error / limit)
    return f"{len(rotations)} matrices, at most {worst:.1%} of the limit"


@register(
    34,
    "tied_weights",
    "Tied weights are untied first, or handled exactly, and are what they are after tying again, as loading does",
    kind="transform",
    needs=("invariant_fp",),
    caught_by=("GPTQModel#1550",),
)
def tied_weights(subject: Transform, context: CheckContext) -> str:
    """Transform a model whose embedding is its head, then tie its weights as `from_pretrained` would."""
    architecture = subject.architectures[0]
    model = build(architecture, seed=context.seed, tied=True)
    ids = token_ids(model, seed=context.seed)[0]
    before = logits(model, ids)
    limit = _UNITS * torch.finfo(before.dtype).eps
    refuse_vacuous(before, limit)
    _apply(subject, model, context)
    _hold(logits(model, ids), before, limit, f"{architecture} with tied weights: the float output has changed")
    model.tie_weights()  # type: ignore[operator]
    _hold(logits(model, ids), before, limit, f"{architecture}: tying again, as a loader does, changes it; set tie_word_embeddings to False")
    return f"{architecture}: relative error <= {limit:.2g}"


def _hold(actual: Tensor, expected: Tensor, limit: float, what: str) -> None:
    error = float((actual - expected).double().norm() / expected.double().norm())
    if not error <= limit:
        raise CheckFailed(f"{what}: relative error {error:.3g}, where {limit:.3g} are allowed")


@register(None, "checkpoint", "What is saved and loaded again computes what the transformed model does", kind="transform")
def checkpoint(subject: Transform, context: CheckContext) -> str:
    """Save and load every architecture, and the first with tied weights: of a checkpoint only weights, buffers and the config count."""

    def look(case: tuple[str, bool]) -> str:
        architecture, tied = case
        model = build(architecture, seed=context.seed, tied=tied)
        batches = [token_ids(model, seed=context.seed)[0], *_other_shapes(model, context)]
        _apply(subject, model, context)
        here = _rows(logits(model, ids) for ids in batches)
        limit = _UNITS * torch.finfo(here.dtype).eps
        refuse_vacuous(here, limit)
        loaded = cast(OnlineTransform, subject).reload(model) if "online" in subject.tags else reloaded(model)
        what = f"{architecture}{' with tied weights' if tied else ''}"
        _hold(_rows(logits(loaded, ids) for ids in batches), here, limit, f"{what}: saved and loaded again it does not compute the same")
        return what

    cases = [(architecture, False) for architecture in subject.architectures]
    return ", ".join(_each([*cases, (subject.architectures[0], True)], look))


@register(
    None,
    "repeats",
    "A second call makes the same of an equal model, whatever mode it is in, whether gradients are on, and whatever seed the caller has",
    kind="transform",
)
def repeats(subject: Transform, context: CheckContext) -> str:
    """Transform two equal models of the first architecture; the second one is in training mode, frozen, and gradients are on."""
    first, second = (build(subject.architectures[0], seed=context.seed) for _ in range(2))
    ids = token_ids(first, seed=context.seed)[0]
    if not torch.equal(logits(second.train(), ids), logits(first, ids)):
        second.eval()  # it drops out by itself, and whoever looks at what its layers read would draw numbers
    _apply(subject, first, context)
    _apply(subject, second, context, is_frozen=True)
    weights, again = first.state_dict(), second.state_dict()
    shared = weights.keys() & again.keys()
    differing = sorted((weights.keys() ^ again.keys()) | {name for name in shared if not torch.equal(weights[name], again[name])})
    if differing:
        raise CheckFailed(f"{len(differing)} of {len(weights)} tensors are others after a second call; first: {differing[0]}", differing)
    here = logits(first, ids)
    limit = _UNITS * torch.finfo(here.dtype).eps
    refuse_vacuous(here, limit)
    _hold(logits(second.eval(), ids), here, limit, "transformed in another mode the model computes something else")
    return f"{len(weights)} tensors, twice"


@register(35, "not_vacuous", "The targeted weights did change, each of them", kind="transform")
def not_vacuous(subject: Transform, context: CheckContext) -> str:
    """Compare parameters by name on every architecture."""

    def look(architecture: str) -> str:
        model = build(architecture, seed=context.seed)
        targets = list(subject.targets(model))
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        unknown = [name for name in targets if name not in before]
        if unknown or not targets:
            raise CheckFailed(f"{architecture}: {f'{unknown[0]} is no parameter' if unknown else 'no weight is targeted'}")
        _apply(subject, model, context)
        after = dict(model.named_parameters())
        still = [name for name in targets if name in after and _change(after[name], before[name]) < _LEAST_CHANGE]
        if still:
            raise CheckFailed(f"{architecture}: {len(still)} of {len(targets)} targeted weights did not change; first: {still[0]}", still)
        return f"{architecture}: {len(targets)} weights changed"

    return "; ".join(_each(subject.architectures, look))


def _change(after: Tensor, before: Tensor) -> float:
    return math.inf if after.shape != before.shape else float((after.detach() - before).double().norm() / before.double().norm())


@register(
    36,
    "search_pays",
    "A searched loss is <= the loss of the identity, at every group of layers that read one input",
    kind="transform",
    caught_by=("llm-compressor#2522",),
)
def search_pays(subject: Transform, context: CheckContext) -> str:
    """Quantize the weights of all targeted layers before and after; compare relative output errors on the data of the search."""
    if subject.fake_quantize is None:
        raise NothingToCheckError("the subject does not search")
    model = build(subject.architectures[0], seed=context.seed)
    modules = dict(model.named_modules())
    names = [name.removesuffix(".weight") for name in subject.targets(model)]
    linears = [name for name in names if isinstance(modules.get(name), nn.Linear)]
    batches = token_ids(model, seed=context.seed + 7)
    plain = _losses(model, linears, batches, subject.fake_quantize)
    _apply(subject, model, context)
    searched = _losses(model, linears, batches, subject.fake_quantize)
    worse = [
        f"{' and '.join(group)}: {searched[group]:.4g} after the search, {plain[group]:.4g} without it"
        for group in plain
        if not searched.get(group, math.inf) <= plain[group] * (1 + 1e-5)
    ]
    if worse:
        raise CheckFailed(f"{len(worse)} of {len(plain)} groups lose by the search; first: {worse[0]}", worse)
    return f"{len(plain)} groups, {sum(searched.values()) / max(sum(plain.values()), 1e-30):.3f} of the loss of the identity"


@register(
    None,
    "incoherent",
    "One entry of a weight, at eight places from its first to its last, is spread over its rows and columns, by a rotation of each",
    kind="transform",
    needs=("incoherent",),
)
def incoherent(subject: Transform, context: CheckContext) -> str:
    """Transform models that differ in one entry of each targeted weight, from its first to its last, and look where the difference lies."""
    plain = build(subject.architectures[0], seed=context.seed)
    names = list(subject.targets(plain))
    model = copy.deepcopy(plain)
    _apply(subject, model, context)
    worst = min(_least_spread(subject, context, plain, model, names, place / (_PLACES - 1)) for place in range(_PLACES))
    return f"{len(names)} weights, {_PLACES} entries of each, over {worst:.0%} of rows and columns at least"


def _least_spread(
    subject: Transform, context: CheckContext, plain: nn.Module, model: nn.Module, names: Sequence[str], place: float
) -> float:
    """Least spread of an entry at a place, 0 (the first row and column) to 1 (the last), over the rows and columns of all weights."""
    other = copy.deepcopy(plain)
    with torch.no_grad():
        for weight in map(other.get_parameter, names):
            row, column = (round(place * (size - 1)) for size in weight.shape)
            weight[row, column] += weight.norm()
    _apply(subject, other, context)
    worst = math.inf
    for name in names:
        difference_RC = (other.get_parameter(name) - model.get_parameter(name)).detach().double()
        for axis, side in enumerate(("rows", "columns")):
            worst = min(worst, spread := _spread(difference_RC.square().sum(1 - axis)))
            if not spread >= _LEAST_SPREAD:
                raise CheckFailed(f"{name}: one entry is spread over {spread:.1%} of the {side}, where {_LEAST_SPREAD:.1%} are the least")
        energy_RC = difference_RC.square()
        row_C, column_R = difference_RC[energy_RC.sum(1).argmax()], difference_RC[:, energy_RC.sum(0).argmax()]
        if len(row_C) == len(column_R) and not abs(float(torch.cosine_similarity(row_C, column_R, dim=0))) < _ALIKE:
            raise CheckFailed(f"{name}: rows and columns are turned alike, so that a weight near a multiple of I stays as it is")
    return worst


def _spread(energy_N: Tensor) -> float:
    """Share of N that would hold this energy if each held as much (participation ratio)."""
    return float(energy_N.sum().square() / energy_N.square().sum().clamp_min(1e-300)) / len(energy_N)


def _losses(
    model: nn.Module, names: list[str], batches: list[Tensor], fake_quantize: Callable[[Tensor], Tensor]
) -> dict[tuple[str, ...], float]:
    """Squared error over squared output of each group of linear layers that read one input tensor."""
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    handles = [model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0])) for name in names]
    try:
        for ids in batches:
            logits(model, ids)
    finally:
        for handle in handles:
            handle.remove()
    groups: dict[int, list[str]] = {}
    for name in names:
        if seen[name]:
            groups.setdefault(seen[name][0].data_ptr(), []).append(name)
    return {tuple(group): _group_loss(model, group, seen, fake_quantize) for group in groups.values()}


def _group_loss(model: nn.Module, group: list[str], seen: dict[str, list[Tensor]], fake_quantize: Callable[[Tensor], Tensor]) -> float:
    noise = signal = 0.0
    for name in group:
        weight = model.get_parameter(f"{name}.weight").detach()
        error = (fake_quantize(weight.clone()) - weight).double()
        for x in seen[name]:
            rows = x.reshape(-1, x.shape[-1]).double()
            noise += float((rows @ error.t()).square().sum())
            signal += float((rows @ weight.double().t()).square().sum())
    return noise / max(signal, 1e-300)
