"""Weights of a sequential target that are used outside of it, which no run in stages can follow everywhere.

A value that is made of such a weight before the target's stage is made of the weight as it was before compression, and lives on. And a
paused forward may hold the weight, or the module around it, in a variable, where it stays what it was when a modifier has replaced it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from compressor.tracing.graph.nested_values import call_name, constant_query
from compressor.tracing.graph.nodes import Unrepeatable, current_place

# These ask a tensor for its shape, or take only shape and dtype of it; the latter, where it is not the first of their arguments.
_ASKS = frozenset(
    (
        *("shape", "ndim", "nbytes", "size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "is_contiguous"),
        *("data_ptr", "__len__", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "_version", "_is_view"),
    )
)
_OUTSIDE = "outside of all targets"
_TAKES_AFTER = frozenset(("to", "type_as", "expand_as", "view_as", "reshape_as"))


class ForeignWeights:
    """Looks at the torch calls of one forward.

    Attributes:
        inside: target that runs at the moment, or another name of the code that does; None for the code between targets.
    """

    def __init__(self, model: nn.Module, targets: Mapping[str, nn.Module], *, pauses: bool) -> None:
        """Learn the parameters that lie inside targets only; one that is tied to a module outside may be used there.

        Args:
            model: the model.
            targets: dotted name to module.
            pauses: what runs between targets holds on to what it has read, so that it may use no weight of a target at all.
        """
        self.inside: str | None = None
        self._pauses = pauses
        self._called: set[str] = set()
        self._used: dict[
            str, tuple[set[str], str, bool]
        ] = {}  # name of a weight: its targets, where it was used, whether after one of them
        holders: dict[int, set[str]] = {}  # module to the targets that it lies in
        for target, module in targets.items():
            for below in module.modules():
                holders.setdefault(id(below), set()).add(target)
        owners: dict[int, set[str]] = {}
        self._names: dict[int, str] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            for own, tensor in module._parameters.items():
                if tensor is not None:
                    owners.setdefault(id(tensor), set()).update(holders.get(id(module), {_OUTSIDE}))
                    self._names.setdefault(id(tensor), f"{name}.{own}".lstrip("."))
        self._owners = {key: found for key, found in owners.items() if _OUTSIDE not in found}

    def enter(self, target: str) -> None:
        """Take note that a target is called.

        Args:
            target: dotted name.
        """
        self._called.add(target)

    def look(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look at a torch call, or at what a module is handed.

        Args:
            func: torch function; None for a module.
            args: its arguments.
            kwargs: its named arguments.
        """
        for item in (*args, *kwargs.values()):
            if id(item) in self._owners:
                self._note(item, func, args)
            elif isinstance(item, list | tuple | dict):
                for one in item.values() if isinstance(item, dict) else item:
                    if id(one) in self._owners:
                        self._note(one, func, args)

    def _note(self, tensor: Tensor, func: Any, args: tuple[Any, ...]) -> None:
        targets = self._owners[id(tensor)]
        is_late = not targets.isdisjoint(self._called)
        is_over = is_late and not (self._pauses and self.inside is None)
        if not is_over and self.inside not in targets and (func is None or not _asks(func, args, tensor)):
            self._used.setdefault(self._names[id(tensor)], (targets, str(current_place()), is_late))

    def check(self) -> None:
        """Refuse what was seen, now that it is known which targets the forward calls.

        Raises:
            Unrepeatable: a weight was used outside of its target.
        """
        for name, (targets, place, is_late) in self._used.items():
            called = sorted(targets & self._called)
            if called:
                why = f"what is made of it would stay as it was before {called[0]} is compressed; use"
                if is_late:
                    why = f'a forward that pauses may still hold it as it was before {called[0]} is compressed; use engine="graph",'
                raise Unrepeatable(
                    f"{place}: {name} is used outside of {called[0]}, the sequential target that it belongs to, and {why} "
                    'pipeline="basic" or other sequential targets'
                )


def _asks(func: Any, args: tuple[Any, ...], tensor: Tensor) -> bool:
    name = call_name(func)
    return name in _ASKS or constant_query(func, args) or (name in _TAKES_AFTER and args[0] is not tensor)
