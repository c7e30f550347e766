"""What has to be true of the model itself: what a run may leave behind, and which hooks a forward runs in which order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from harness.lifecycle.oracle import ModifierModel
from harness.lifecycle.probes import CHAIN_PARTS
from harness.lifecycle.snapshot import Difference, Snapshot

# What a run may leave behind once it is over: replaced modules and other weights; what modifiers share is no part of the model.
MAY_STAY = ("module", "tensor", "grad", "state", "settings", "session")


# What its author can do about a difference, by kind.
REMEDIES = {
    "settings": "fields are settings, which a recipe writes; keep state under a private name, as self._seen",
    "rng": "draw from a torch.Generator of your own, or declare 'random'",
    "attribute": "take it back when the calibration ends, or declare 'annotates'",
    "class": "keep state on the object, under a private name, as self._seen",
    "hooks": "make hooks with self.register_hook, which takes them away again",
}


def causes(differences: Sequence[Difference]) -> list[str]:
    """Return what lies behind differences: the kinds and places, where a module that was added stands for all that came with it."""
    return list(dict.fromkeys("hooks" if one.kind == "hooks" else f"{one.kind} {one.where}" for one in outermost(differences)))


def outermost(differences: Sequence[Difference]) -> list[Difference]:
    """Return differences without those that a module or tensor has brought along that came or went itself."""
    moved = [one for one in differences if one.text.startswith(("appeared", "vanished"))]
    modules = tuple(f"{one.where}." for one in moved if one.kind == "module")
    tensors = {one.where for one in moved if one.kind == "tensor"}

    def is_brought(one: Difference) -> bool:
        return (bool(modules) and one.where.startswith(modules)) or (one.kind in ("requires_grad", "grad") and one.where in tensors)

    names = {name[:-1] for name in modules}
    return [one for one in differences if not is_brought(one) and not (one.kind == "training" and one.where in names)]


def leftovers(start: Snapshot, end: Snapshot, allowed: Collection[str] = ()) -> list[Difference]:
    """Return what a run left behind on modules that it did not replace.

    Args:
        start: before the run.
        end: after it.
        allowed: kinds of differences that are no violation.

    Returns:
        The differences; weights and replaced modules are none.
    """
    changed = outermost(start.differences(end, allowed))
    replaced = replaced_modules(changed)
    found = [difference for difference in changed if difference.kind not in MAY_STAY or is_added(difference)]
    found = [one for one in found if not (is_added(one) and "attribute" in allowed)]
    return [one for one in found if not any(one.where == name or one.where.startswith(f"{name}.") for name in replaced)]


def is_added(difference: Difference) -> bool:
    """Say whether a module or tensor has come where none was: replacing one is a modifier's work, adding one leaves something behind."""
    return difference.kind in ("module", "tensor") and difference.text.startswith("appeared")


def replaced_modules(differences: Sequence[Difference]) -> list[str]:
    """Return the names of modules in whose place another one stands."""
    return [one.where for one in differences if one.kind == "module" and one.text.startswith("changed")]


def fire_order(
    modifiers: Sequence[ModifierModel], world: Mapping[str, str], sleeps: Callable[[int], bool], fails: bool = False
) -> list[str]:
    """Return the hooks that one forward of the chain has to run, in torch's order: by module, pre-hooks first, as registered.

    Args:
        modifiers: the models, whose hooks are named `modifier.serial kind module@token`.
        world: what stands where.
        sleeps: says whether the hooks of a modifier sleep.
        fails: the forward of the first layer raises: after it only hooks with always_call run.

    Returns:
        Names of hooks.
    """
    live = [hook for model in modifiers if not sleeps(model.number) for hook in model.hooks if lives(hook, world)]

    def place(hook: str) -> tuple[int, bool, int]:
        serial, kind, where = hook.split(" ")
        return CHAIN_PARTS.index(where.split("@")[0]), not _is_pre(kind), int(serial.split(".")[1])

    if fails:
        live = [hook for hook in live if place(hook)[0] == 0 and (_is_pre(hook.split(" ")[1]) or "+always" in hook)]
    return sorted(live, key=place)


def _is_pre(kind: str) -> bool:
    return kind.startswith("forward_pre")


def lives(hook: str, world: Mapping[str, str]) -> bool:
    """Say whether the module that carries a hook stands in the model."""
    module, _, token = hook.split(" ")[2].partition("@")
    return world.get(module, "original") == token


def list_differences(differences: Sequence[object], limit: int = 4) -> str:
    """Return the first few differences in one line, and how many more there are."""
    more = f" and {len(differences) - limit} more" if len(differences) > limit else ""
    kinds = dict.fromkeys(one.kind for one in differences[:limit] if isinstance(one, Difference))
    remedies = [REMEDIES[kind] for kind in kinds if kind in REMEDIES]
    return "; ".join([*(str(difference) for difference in differences[:limit])]) + more + "".join(f"; {remedy}" for remedy in remedies)
