"""Collectives of `torch.distributed` as operators of a step: what each writes, how it is waited for, and how it is spelt.

DistributedDataParallel synchronizes gradients in C++, but every collective passes the dispatcher as an operator `c10d::...` with the group
as an argument, so a recorder sees it and a replay can call it again. Their schemas do not say what they write; the table below does. They
run on threads of their own: whoever records or repeats one waits for it at once, which moves no value, since nobody may touch the tensors
of a collective that is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from compressor.errors import ReplayError

_NAMESPACE = "c10d"
# Operator to the argument that it writes. Sending and receiving is left out: which rank does what would have to be agreed upon.
_WRITTEN = {
    "allreduce_": "tensors",
    "allreduce_coalesced_": "tensors",
    "broadcast_": "tensors",
    "reduce_": "tensors",
    "allgather_": "output_tensors",
    "allgather_coalesced_": "output_lists",
    "allgather_into_tensor_coalesced_": "outputs",
    "_allgather_base_": "output_tensor",
    "gather_": "output_tensors",
    "scatter_": "output_tensors",
    "reduce_scatter_": "output_tensors",
    "reduce_scatter_tensor_coalesced_": "outputs",
    "_reduce_scatter_base_": "output_tensor",
    "alltoall_": "output_tensors",
    "alltoall_base_": "output",
    "barrier": "",
}
COLLECTIVE_WRITES = {f"{_NAMESPACE}::{name}": frozenset({argument} - {""}) for name, argument in _WRITTEN.items()}


@dataclass(frozen=True, slots=True)
class NamedGroup:
    """Stands for a process group on a record: a record that held the group itself would keep its threads from ending with it.

    Attributes:
        name: the group's name.
    """

    name: str

    def boxed(self) -> Any:
        """Return the group as operators take it.

        Returns:
            The group in a box.
        """
        return group_named(self.name).boxed()


def group_named(name: str) -> Any:
    """Find a process group.

    Args:
        name: its name.

    Returns:
        The group.

    Raises:
        ReplayError: it was destroyed.
    """
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    try:
        return resolve(name)
    except RuntimeError as error:
        raise ReplayError(f"process group {name}: it was destroyed since the capture ({error}); make model and trainer anew") from error


def is_collective(func: Any) -> bool:
    """Say whether an operator lets processes communicate.

    Args:
        func: the overload.

    Returns:
        True for operators of `torch.distributed`.
    """
    return str(func.namespace) == _NAMESPACE


def wait_for(result: object) -> list[Tensor]:
    """Wait until a collective is done.

    Args:
        result: what its operator returned.

    Returns:
        The tensors among it.
    """
    leaves = tree_leaves(result)
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject) and leaf._has_method("wait"):  # type: ignore[attr-defined]
            leaf.wait()  # type: ignore[attr-defined]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def without_group(leaf: object) -> object:
    """Return what stands for an argument on a record.

    Args:
        leaf: a leaf of the arguments that is no tensor.

    Returns:
        The name of a process group, else the leaf.
    """
    group = _group(leaf)
    return leaf if group is None else NamedGroup(group.group_name)


def repeating(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], object]:
    """Return what repeats a collective and waits for it.

    Args:
        func: the overload.
        args: its arguments as they were recorded.
        kwargs: its keyword arguments, likewise.

    Returns:
        A function without arguments.
    """

    def run() -> list[Tensor]:
        boxed_args, boxed_kwargs = tree_map_only(NamedGroup, NamedGroup.boxed, (args, kwargs))
        return wait_for(func(*boxed_args, **boxed_kwargs))

    return run


def refuse_collective(func: Any, given: Sequence[object], groups: Collection[str], place: str) -> None:
    """Refuse a collective that a replay could not repeat in step with the other ranks.

    Args:
        func: the overload.
        given: the leaves of its arguments.
        groups: names of the process groups whose ranks run this step together.
        place: where the operator stands, for messages.

    Raises:
        ReplayError: the operator is not known, or communicates with ranks that are not known to run the same step.
    """
    namespace, _, name = str(func._schema.name).partition("::")
    if namespace == "_c10d_functional":
        raise ReplayError(
            f"{place} communicates without a handle to wait for; use torch.distributed.all_reduce and its like, "
            "or let DistributedDataParallel synchronize"
        )
    if namespace != _NAMESPACE:
        return
    if name not in _WRITTEN:
        raise ReplayError(f"{place} is no collective of all ranks, so ranks could not replay it alike; communicate outside the step")
    for group in (_group(leaf) for leaf in given):
        if group is not None and group.size() > 1 and group.group_name not in groups:
            raise ReplayError(
                f"{place} communicates with {group.size()} ranks that are not known to run this step; "
                "wrap the model in DistributedDataParallel over the same group, or use mode='eager'"
            )


def spell_object(leaf: torch.ScriptObject) -> str:
    """Spell an argument of a collective without its address.

    Args:
        leaf: a process group or a reduction.

    Returns:
        For example `group 0 of 2` or `reduction 0`.
    """
    group = _group(leaf)
    if group is not None:
        return f"group {group.group_name} of {group.size()}"
    if leaf._has_method("op"):  # type: ignore[attr-defined]
        return f"reduction {leaf.op()}"  # type: ignore[attr-defined]
    return str(leaf._type().name())  # type: ignore[attr-defined]


def _group(leaf: object) -> Any:
    """Return the process group that an argument holds, or None."""
    if isinstance(leaf, torch.ScriptObject) and leaf._type().name() == "ProcessGroup":  # type: ignore[attr-defined]
        return dist.ProcessGroup.unbox(leaf)
    return None
