"""Checks of who takes experts out of a mixture. The model before is the oracle, in float64, through the forward of its own class."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.checks.catalogue.registry import CheckContext, CheckFailed, NothingToCheckError, register
from harness.checks.inputs.expert_batches import BATCHES, PADDING, Batches, names, repadded, telling_batches
from harness.checks.inputs.expert_scores import LONG_READINGS, LOW_IDS, READINGS, Reading, look, telling_draw
from harness.checks.inputs.left_behind import attributes, left_behind, settings
from harness.checks.inputs.norm_linear_models import build, logits, reloaded, token_ids
from harness.checks.protocols import ExpertPruner
from harness.checks.suites.transform import refuse_vacuous
from harness.modules.tensors import same_bits

_REFITTED = 1e-3  # what least squares may make of another order of the same sums
_EPS = 64 * torch.finfo(torch.float32).eps
# Of what least squares could make good: a ridge, few rounds, and tokens that only judge take their part.
_LEFT, _LEFT_ON_AVERAGE = 0.6, 0.25
_UNLIKE, _NOTHING_LOST = 0.05, 1e-6
_TRIES = 16  # models of an architecture, at most, until all mistakes about batches and padding would have shown
_HIDDEN = 1e-4  # relative change of tokens behind padding that is rounding
_FAR = -1e4  # a bias with which no router chooses an expert
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k")  # settings: experts that a token is sent to
_BIASES = ("bias", "e_score_correction_bias")
_EXPERTS = ".experts."


def _layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Fused experts, by what they hold."""
    return [(name, module) for name, module in model.named_modules() if getattr(module._parameters.get("down_proj"), "ndim", 0) == 3]


def _router(model: nn.Module, name: str, number: int) -> dict[str, Tensor]:
    """Tensors beside the experts of a layer with a place for each of them, by dotted name; views with these places first."""
    parent = model.get_submodule(name.rpartition(".")[0])
    found = {**dict(parent.named_parameters()), **dict(parent.named_buffers())}
    inside = f"{name.rpartition('.')[2]}."
    beside = {key: value.detach() for key, value in found.items() if not key.startswith(inside)}
    return {key: value.movedim(value.shape.index(number), 0) for key, value in beside.items() if number in value.shape}


def _chosen(kept: Sequence[Sequence[int]]) -> list[set[int]]:
    """Who stays, whatever their order."""
    return [set(own) for own in kept]


def _prune(subject: ExpertPruner, model: nn.Module, ids: Sequence[Tensor], masks: Sequence[Tensor | None] | None = None) -> list[list[int]]:
    kept = subject.prune(model, ids, masks or [None] * len(ids))
    return [list(map(int, one)) for one in kept]


@register(
    None,
    "criterion",
    "The experts that go are those whose mean of router weight times size of output is least, computed in float64",
    kind="expert_pruner",
    needs=("router_weighted",),
)
def criterion(subject: ExpertPruner, context: CheckContext) -> str:
    """Score each expert through the forward of the fused class, on batches on which mistakes would choose otherwise."""
    judged, late, untold = 0, set(LONG_READINGS), {architecture: set(READINGS) for architecture in subject.architectures}
    for seed, architecture in _models(subject, context):
        judged += _judge_choice(subject, architecture, seed, READINGS, untold[architecture])
    for seed, architecture in _models(subject, context, 6):
        if late:  # once is enough: these lie in what is read of the data, not of a model
            judged += _judge_choice(subject, architecture, seed, LONG_READINGS, late)
    judged += _judge_batches(subject, context, late)
    if not judged:
        raise NothingToCheckError("no layer was decided")
    missed = sorted(set.intersection(*untold.values()) | late)
    return f"{judged} layers of {len(untold)} architectures" + (f"; not told from {', '.join(missed)}" if missed else "")


def _judge_choice(subject: ExpertPruner, architecture: str, seed: int, readings: Mapping[str, Reading], untold: set[str]) -> int:
    """Hold who stays against the criterion; take out of `untold` what would have chosen otherwise. Returns how many layers were decided."""
    model = build(architecture, seed=seed)
    layers = [name for name, _ in _layers(model)]
    ids = torch.cat(token_ids(model, seed=seed, rows=8, length=24)) if readings is READINGS else _long_rows(model, seed)
    drawn = telling_draw(ids, look(model, layers, ids), subject.sparsity, readings, untold, seed)
    untold -= drawn.told
    kept = _prune(subject, model, drawn.ids)
    if len(kept) != len(layers):
        raise CheckFailed(f"{architecture}: {len(kept)} layers of experts are told, and the model has {len(layers)}")
    _hold_choice(architecture, layers, drawn.wanted, kept)
    return len(drawn.wanted) - drawn.wanted.count(None)


def _hold_choice(
    architecture: str, layers: Sequence[str], wanted: Sequence[set[int] | None], kept: Sequence[Sequence[int]], how: str = ""
) -> None:
    for layer, due, own in zip(layers, wanted, kept, strict=True):
        if due is not None and set(own) != due:
            raise CheckFailed(f"{architecture}: {how}of {layer} the experts {own} stay, where {sorted(due)} matter most")


def _judge_batches(subject: ExpertPruner, context: CheckContext, late: set[str]) -> int:
    """Hold who stays against the criterion on many batches, until each of them has decided in each layer."""
    untold: set[str] = set()
    judged = known = 0
    for seed, architecture in _models(subject, context, _TRIES):
        model = build(architecture, seed=seed)
        layers = [name for name, _ in _layers(model)]
        untold |= names(BATCHES, range(known, len(layers)))
        if not untold:
            break
        known = max(known, len(layers))
        ids = torch.cat(token_ids(model, seed=seed, rows=12, length=80))
        drawn = telling_batches(ids, look(model, layers, ids), subject.sparsity, untold, seed)
        untold -= drawn.told
        _hold_choice(architecture, layers, drawn.wanted, _prune(subject, model, drawn.ids))
        judged += len(layers) - drawn.wanted.count(None)
    late |= untold
    return judged


def _long_rows(model: Any, seed: int) -> Tensor:
    """Rows [12, 96] half of whose ids are a low one, commonly special, and whose last third is one token.

    The model names none for padding any more, so that each is a token.
    """
    model.config.pad_token_id = model.generation_config.pad_token_id = None
    ids = torch.cat(token_ids(model, seed=seed, rows=6, length=96))
    ids[:, 64:] = ids[:, 64:65]
    low = torch.arange(len(ids))[:, None] % LOW_IDS
    return torch.where(torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.5, low, ids)


def _models(subject: ExpertPruner, context: CheckContext, number: int = 3) -> list[tuple[int, str]]:
    """Seeds and architectures: what one model cannot tell apart another may."""
    return [(context.seed + more, architecture) for more in range(number) for architecture in subject.architectures]


@register(
    None,
    "unused_experts",
    "Experts that no router chooses go, and the output stays what it was",
    kind="expert_pruner",
)
def unused_experts(subject: ExpertPruner, context: CheckContext) -> str:
    """Keep the routers of some experts off by a bias, in models whose routers have one and weigh the chosen alone."""
    seen = []
    for architecture in subject.architectures:
        model = build(architecture, seed=context.seed)
        unused = _put_off(model, subject.sparsity, context.seed)
        if not unused:
            continue
        ids = token_ids(model, seed=context.seed, rows=4, length=24)
        before, seen_of = logits(model, ids[0]), look(model, [name for name, _ in _layers(model)], torch.cat(ids))
        kept = _prune(subject, model, ids)
        for own, one, (total, _) in zip(kept, seen_of, unused, strict=True):
            sent = one.hits.sum((0, 1)).tolist()  # others may be without tokens, too, and go as well
            gone = [number for number in range(total) if number not in own]
            if any(sent[number] for number in gone):
                idle = [number for number, count in enumerate(sent) if not count]
                raise CheckFailed(f"{architecture}: the experts {gone} go, where no token was ever sent to {idle}")
        _same(architecture, "without experts that no router chooses", logits(model, ids[0]), before)
        seen.append(architecture)
    if not seen:
        raise NothingToCheckError("no architecture of the subject has routers with a bias")
    return ", ".join(seen)


def _put_off(model: nn.Module, sparsity: float, seed: int) -> list[tuple[int, list[int]]]:
    """Keep routers from as many experts as will go; of each layer how many it has, and who they are. Nothing where a router has no bias."""
    found = []
    generator = torch.Generator().manual_seed(seed)
    for name, module in _layers(model):
        number = module.down_proj.shape[0]
        biases = [value for key, value in _router(model, name, number).items() if key.rpartition(".")[2] in _BIASES]
        if not biases:
            return []
        gone = sorted(map(int, torch.randperm(number, generator=generator)[: int(number * sparsity)]))
        with torch.no_grad():
            biases[0][gone] = _FAR  # a view of the router's
        found.append((number, gone))
    return found


def _same(architecture: str, what: str, found: Tensor, expected: Tensor, limit: float = _EPS) -> None:
    refuse_vacuous(expected, limit)
    error = float((found - expected).norm() / expected.norm())
    if not error <= limit:
        raise CheckFailed(f"{architecture}: {what} the output is {error:.2g} off, relative, where {limit:.2g} are allowed")


@register(
    None,
    "smaller_model",
    "What is saved and loaded again is a model of its class with fewer experts, which holds what this one holds, and computes the same",
    kind="expert_pruner",
)
def smaller_model(subject: ExpertPruner, context: CheckContext) -> str:
    """Load it with the loader of its own class, which builds it from its config."""
    for architecture in subject.architectures:
        pruned = _pruned(subject, context, architecture)
        left = [module.down_proj.shape[0] for _, module in _layers(pruned.loaded)]
        wanted = [number - int(number * subject.sparsity) for number in (module.down_proj.shape[0] for _, module in _layers(pruned.base))]
        if left != wanted or [len(one) for one in pruned.kept] != wanted:
            raise CheckFailed(
                f"{architecture}: layers of {left} experts are loaded, and {[len(one) for one in pruned.kept]} told; {wanted} should stay"
            )
        own, its = pruned.model.state_dict().keys(), pruned.loaded.state_dict().keys()
        apart = {key.partition(_EXPERTS)[0] for key in its - own if _EXPERTS in key}  # layers whose experts may lie one by one
        if odd := sorted(key for key in own ^ its if _EXPERTS not in key or key.partition(_EXPERTS)[0] not in apart):
            raise CheckFailed(f"{architecture}: {odd[0]} is no tensor of the class, or a tensor of it that is gone", odd)
        if pruned.beside:
            raise CheckFailed(f"{architecture}: {pruned.beside[0]}", pruned.beside)
        ids = token_ids(pruned.base, seed=context.seed)
        _same(architecture, "loaded again,", logits(pruned.loaded, ids[0]), logits(pruned.model, ids[0]))
    return f"{len(subject.architectures)} architectures: {', '.join(subject.architectures)}"


class _Pruned(NamedTuple):
    """A model before and after, what was loaded of it again, who stays, and what is not as its class makes it."""

    base: nn.Module
    model: nn.Module
    loaded: nn.Module
    kept: list[list[int]]
    beside: list[str]


def _pruned(subject: ExpertPruner, context: CheckContext, architecture: str) -> _Pruned:
    def make() -> _Pruned:
        model: Any = build(architecture, seed=context.seed)
        model.get_output_embeddings().train()  # whoever sets all modules to one mode, and not back, is seen
        base, before = copy.deepcopy(model), attributes(model)
        kept = _prune(subject, model, token_ids(model, seed=context.seed))
        after, loaded = attributes(model), reloaded(model)
        return _Pruned(base, model, loaded, kept, left_behind(model, before, after, loaded, reloaded(base)))

    return context.once(subject, f"pruned {architecture}", make)


@register(
    None,
    "kept_weights",
    "What stays is what it was, bit for bit: all but the last weights of experts, where these are moved to make up for the rest",
    kind="expert_pruner",
)
def kept_weights(subject: ExpertPruner, context: CheckContext) -> str:
    """Take the experts that stay, and their rows of the router, out of the base; hold all tensors and settings against it."""
    compared = 0
    for architecture in subject.architectures:
        pruned = _pruned(subject, context, architecture)
        wanted, moved = _taken_out(pruned)
        found = pruned.loaded.state_dict()
        if lost := sorted(wanted.keys() ^ found.keys()):
            raise CheckFailed(f"{architecture}: {lost[0]} is in one of base and pruned model alone")
        for name in wanted.keys() - (moved if "refits" in subject.tags else set()):
            if not same_bits(found[name], wanted[name]):
                raise CheckFailed(f"{architecture}: {name} is not what it was, of the experts that are told to stay")
        _hold_settings(architecture, pruned)
        compared += len(wanted)
    return f"{compared} tensors of {len(subject.architectures)} architectures"


def _taken_out(pruned: _Pruned) -> tuple[dict[str, Tensor], set[str]]:
    """What is left of the base's tensors, those of experts in the order that is told; and the names of their last weights."""
    wanted, moved = dict(pruned.base.state_dict()), set()
    for (name, module), own in zip(_layers(pruned.base), pruned.kept, strict=True):
        number, parent = len(module.down_proj), name.rpartition(".")[0]
        stacks = [f"{name}.{key}" for key, _ in module.named_parameters()]
        for key in (*stacks, *(f"{parent}.{key}" for key in _router(pruned.base, name, number))):
            wanted[key] = wanted[key].index_select(wanted[key].shape.index(number), torch.tensor(own))
        moved.add(f"{name}.down_proj")
    return wanted, moved


def _hold_settings(architecture: str, pruned: _Pruned) -> None:
    """No setting may differ but what counts experts, or would choose more of them than there are."""
    before, after = dict(settings(reloaded(pruned.base))), dict(settings(pruned.loaded))
    number, left = len(_layers(pruned.base)[0][1].down_proj), len(pruned.kept[0])
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name), after.get(name)
        if was != now and not (now == left and isinstance(was, int) and left < was <= number):
            raise CheckFailed(f"{architecture}: the setting {name} was {was!r} and is {now!r}")


@register(None, "any_order", "Experts in another order give the same choice and the same output", kind="expert_pruner")
def any_order(subject: ExpertPruner, context: CheckContext) -> str:
    """Exchange the experts of each layer, and the rows of its router with them."""
    for architecture in subject.architectures:
        model = build(architecture, seed=context.seed)
        other, orders = copy.deepcopy(model), []
        generator = torch.Generator().manual_seed(context.seed + 1)
        for name, module in _layers(other):
            order = torch.randperm(module.down_proj.shape[0], generator=generator)
            orders.append([int(place) for place in order])
            tensors = [*module.parameters(recurse=False), *_router(other, name, len(order)).values()]
            for tensor in tensors:
                with torch.no_grad():
                    tensor.copy_(tensor[order].clone())
        ids = token_ids(model, seed=context.seed, rows=4, length=24)
        _same(architecture, "with experts in another order", logits(other, ids[0]), logits(model, ids[0]))
        kept, found = _prune(subject, model, ids), _prune(subject, other, ids)
        back = [[order[place] for place in own] for order, own in zip(orders, found, strict=True)]
        if _chosen(back) != _chosen(kept):
            raise CheckFailed(f"{architecture}: the experts {kept} stay, and in another order {back}")
        limit = _REFITTED if "refits" in subject.tags else _EPS
        _same(architecture, "pruned in another order", logits(other, ids[0]), logits(model, ids[0]), limit)
    return f"{len(subject.architectures)} architectures"


@register(
    None, "padding", "Padding decides nothing, on either side, in rows of unequal length, in any of many batches", kind="expert_pruner"
)
def padding(subject: ExpertPruner, context: CheckContext) -> str:
    """Show the same tokens with other padding, on batches on which it would choose otherwise if it counted in one of many ways."""
    untold: set[str] = set()
    number = known = 0
    for seed, architecture in _models(subject, context, _TRIES):
        if seed > context.seed and not untold:
            break  # each architecture was looked at
        model = build(architecture, seed=seed)
        layers = [name for name, _ in _layers(model)]
        untold |= names(PADDING, range(known, len(layers)))
        known = max(known, len(layers))
        ids = torch.cat(token_ids(model, seed=seed, rows=12, length=80))
        sides = ("left", "right") if _hides_padding(model, ids) else ("right",)
        drawn = telling_batches(ids, look(model, layers, ids), subject.sparsity, untold, seed, sides=sides)
        untold -= drawn.told
        _hold_padding(subject, architecture, model, drawn, sides)
        number += 1
    return f"{number} models" + (f"; not told from {', '.join(sorted(untold))}" if untold else "")


def _hold_padding(subject: ExpertPruner, architecture: str, model: nn.Module, drawn: Batches, sides: Sequence[str]) -> None:
    """Who stays, and what is made of them, does not hang on what padding there is, nor on where it is."""
    other = copy.deepcopy(model)
    batches = enumerate(zip(drawn.ids, drawn.masks, strict=True))
    again = [repadded(ids, mask, left="left" in sides and place % 2 == 0) for place, (ids, mask) in batches]
    kept = _prune(subject, model, drawn.ids, drawn.masks)
    if "router_weighted" in subject.tags:
        _hold_choice(architecture, [name for name, _ in _layers(other)], drawn.wanted, kept, "with padding ")
    found = _prune(subject, other, [ids for ids, _ in again], [mask for _, mask in again])
    if _chosen(found) != _chosen(kept):
        raise CheckFailed(f"{architecture}: the experts {kept} stay, and with other padding {found}")
    limit = _REFITTED if "refits" in subject.tags else _EPS
    ids = token_ids(model, seed=0)[0]
    _same(architecture, "pruned with other padding", logits(other, ids), logits(model, ids), limit)


def _hides_padding(model: Any, ids: Tensor) -> bool:
    """Whether tokens behind padding give what they give alone: not where a model counts places from the first one on."""
    mask = torch.arange(12).expand(4, 12) >= 5
    with torch.no_grad():
        behind = model(input_ids=ids[:4, :12], attention_mask=mask.long(), use_cache=False).logits[:, 5:]
    alone = logits(model, ids[:4, 5:12])
    return bool((behind - alone).norm() <= _HIDDEN * alone.norm())


@register(
    None,
    "too_few",
    "Where fewer experts would stay than a token is sent to, it says so and changes nothing, or leaves a model that computes",
    kind="expert_pruner",
)
def too_few(subject: ExpertPruner, context: CheckContext) -> str:
    """Send each token to all experts, so that none can go."""
    seen = []
    for architecture in subject.architectures:
        model = _sent_to_all(build(architecture, seed=context.seed))
        if model is None:
            continue
        base, ids = copy.deepcopy(model), token_ids(model, seed=context.seed)
        try:
            _prune(subject, model, ids)
        except Exception as error:  # the subject may refuse with any class
            if not str(error).strip():
                raise CheckFailed(f"{architecture}: {type(error).__name__} came without a message") from error
            _hold_unchanged(architecture, model, base, ids[0])
        else:
            _same(
                architecture,
                "with fewer experts than a token was sent to, loaded again,",
                logits(reloaded(model), ids[0]),
                logits(model, ids[0]),
            )
        seen.append(architecture)
    if not seen:
        raise NothingToCheckError("no architecture of the subject says by a known setting to how many experts a token is sent")
    return f"{len(seen)} architectures: {', '.join(seen)}"


def _sent_to_all(model: Any) -> nn.Module | None:
    """The same weights in a model of its class that sends each token to all experts; None where no known setting says so."""
    config, number = copy.deepcopy(model.config), len(_layers(model)[0][1].down_proj)
    names = [name for name in _CHOSEN if isinstance(getattr(config, name, None), int)]
    for name in names:
        setattr(config, name, number)
    other: nn.Module = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    return other if names else None


def _hold_unchanged(architecture: str, model: nn.Module, base: nn.Module, ids: Tensor) -> None:
    """A model that was refused is what it was, in its tensors, its settings and attributes, and what it computes."""
    found, wanted = model.state_dict(), base.state_dict()
    other = sorted(found.keys() ^ wanted.keys()) or [name for name in wanted if not same_bits(found[name], wanted[name])]
    if other:
        raise CheckFailed(f"{architecture}: it was refused, and {other[0]} is not what it was")
    if attributes(model) != attributes(base) or not same_bits(logits(model, ids), logits(base, ids)):
        raise CheckFailed(f"{architecture}: it was refused, and is not the model that it was")


@register(
    None,
    "refitted",
    "Moved experts bring the first layer as near to what it gave as least squares in float64 can, but for little",
    kind="expert_pruner",
    needs=("refits",),
)
def refitted(subject: ExpertPruner, context: CheckContext) -> str:
    """Put the old weights of those that stay back, and compare what the first layer gives, moved, unmoved, and at best."""
    shares = []
    for architecture in subject.architectures:
        model = build(architecture, seed=context.seed)
        name, layer = _layers(model)[0]
        _made_alike(layer, context.seed)
        old, plain = layer.down_proj.detach().clone(), copy.deepcopy(model)
        ids = token_ids(model, seed=context.seed, rows=32, length=24)
        kept = _prune(subject, model, ids)
        loaded = reloaded(model)
        unmoved = copy.deepcopy(loaded)
        unmoved.get_submodule(name).down_proj.data = old[kept[0]]
        wanted, found, without = (_given(one, name, ids) for one in (plain, loaded, unmoved))
        missing = wanted - without
        if float(missing.square().sum()) <= _NOTHING_LOST * float(wanted.square().sum()):
            continue  # the experts that went were hardly used
        inputs = _inner(unmoved, name, ids)
        best = missing - inputs @ torch.linalg.lstsq(inputs, missing, driver="gelsd").solution
        least, lost, own = (float(one.square().sum()) for one in (best, missing, found - wanted))
        shares.append((own - least) / (lost - least))
        if not shares[-1] <= _LEFT:
            raise CheckFailed(f"{architecture}: {shares[-1]:.3g} of the squared error of {name} that could be made good is left")
    if not shares:
        raise NothingToCheckError("the experts that went were hardly used")
    average = statistics.fmean(shares)
    if not average <= _LEFT_ON_AVERAGE:
        raise CheckFailed(f"on average {average:.3g} of the squared error of the first layer that could be made good is left")
    return f"{min(shares):.2f} to {max(shares):.2f} of the squared error that can be made good is left"


def _inner(model: nn.Module, name: str, ids: Sequence[Tensor]) -> Tensor:
    """What the last weights of all experts of a layer read, times the router's: [N, E D], read off through unit matrices in their place."""
    model = copy.deepcopy(model)
    layer: Any = model.get_submodule(name)
    down = layer.down_proj
    if getattr(layer, "is_transposed", False):
        columns, rows = down.shape[1:]
    else:
        rows, columns = down.shape[1:]
    parts = []
    with torch.no_grad():
        for bias in (one for key, one in layer.named_parameters(recurse=False) if key == "down_proj_bias"):
            bias.zero_()
        for expert in range(len(down)):
            for start in range(0, columns, rows):
                unit = torch.zeros(rows, columns, dtype=down.dtype)
                width = min(rows, columns - start)
                unit[:width, start : start + width] = torch.eye(width, dtype=down.dtype)
                down.zero_()
                down[expert] = unit.T if getattr(layer, "is_transposed", False) else unit
                parts.append(_given(model, name, ids)[:, :width])
    return torch.cat(parts, dim=1)


def _made_alike(layer: Any, seed: int) -> None:
    """Let all experts see nearly the same in a token, so that one can stand in for another once its last weights are right."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, first in layer.named_parameters(recurse=False):
            if not name.startswith("down_proj"):
                noise = torch.randn(first.shape, generator=generator, dtype=torch.float32)
                first.copy_(first[:1] + _UNLIKE * first.std() * noise)


def _given(model: nn.Module, name: str, ids: Sequence[Tensor]) -> Tensor:
    """What a layer of experts gives."""
    found: list[Tensor] = []
    with ExitStack() as stack:
        stack.callback(model.get_submodule(name).register_forward_hook(lambda module, args, output: found.append(output.double())).remove)
        for batch in ids:
            logits(model, batch)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in found])
