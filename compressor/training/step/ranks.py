"""What the ranks of a data-parallel step have to do alike, so that no one waits for a collective that the others never call.

A step under DistributedDataParallel is repeated on each rank from a plan of its own. A proof runs the step three times and a replay once,
so the ranks settle before every planned step what all of them do, by one small sum over a group of their own. A rank that refuses a step
runs it to its end first, for the others wait in its collectives; then all ranks raise, and all put their state back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from compressor.errors import HostReadError, ReplayError, UserInputError
from compressor.pages import raw_bytes
from compressor.training.step.collectives import group_named
from compressor.training.uncompiled import uncompiled

T = TypeVar("T")
PROOFS = ("prove", "audit")
# What DistributedDataParallel can be asked for that a capture cannot hold: how to tell, the error, and what to say.
_REFUSED: tuple[tuple[Callable[[Any], object], type[ReplayError], str], ...] = (
    (
        lambda wrapped: wrapped.find_unused_parameters or wrapped.static_graph,
        HostReadError,
        "find_unused_parameters and static_graph read on the host which parameters were used, and the answer would be frozen; "
        "leave both off, and switch requires_grad off for parameters that the loss does not reach",
    ),
    (
        lambda wrapped: wrapped._comm_hooks or "comm_hook" in wrapped._get_ddp_logging_data(),
        ReplayError,
        "a communication hook goes on in threads that cannot be watched; leave it off",
    ),
    (lambda wrapped: wrapped.mixed_precision, ReplayError, "its mixed_precision copies on streams of its own; use TrainStep(autocast=...)"),
    (lambda wrapped: wrapped._delay_all_reduce_params, ReplayError, "delayed gradients arrive in the next step; do not delay any"),
    (
        lambda wrapped: wrapped._join_config.enable,
        ReplayError,
        "inside join() ranks stop at different steps; give all ranks as many batches",
    ),
)


@dataclass(frozen=True)
class StepDecision:
    """What one rank does in one step.

    Attributes:
        action: warm-up, eager, capture, prove, audit or replay.
        rehearsed: the step is run eagerly before, and undone, to compare with.
        may_be_refused: it has to be undone where it is refused, here or on another rank.
        unproven: an audit would not do for the plan, which lacks its whole proof.
    """

    action: str
    rehearsed: bool = False
    may_be_refused: bool = False
    unproven: bool = False


class Ranks:
    """The ranks that run a step together, found by the DistributedDataParallel modules of its model.

    Args:
        model: the model; not changed.

    Attributes:
        buckets: buffers of DistributedDataParallel for gradients, by name; found by `watching`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._sharded = [name for name, parameter in model.named_parameters() if type(parameter).__name__ == "DTensor"]
        self.buckets: dict[str, Tensor] = {}
        self._channel = ""  # the name of a group: who holds a group keeps its threads from ending with it

    @property
    def is_wrapped(self) -> bool:
        """Whether DistributedDataParallel synchronizes this step, with however many ranks."""
        return bool(self._wrapped)

    @property
    def groups(self) -> frozenset[str]:
        """Names of the process groups, which run every step to its end: DistributedDataParallel does not survive half a backward pass."""
        return frozenset(wrapped.process_group.group_name for wrapped in self._wrapped)

    @property
    def _many(self) -> bool:
        return any(wrapped.process_group.size() > 1 for wrapped in self._wrapped)

    @contextmanager
    def synchronizing(self, last: bool) -> Iterator[None]:
        """Let gradients add up on each rank alone, but for the last micro-batch of a step.

        Args:
            last: this is the last one.

        Yields:
            Nothing.
        """
        with ExitStack() as stack:
            if not last:
                for wrapped in self._wrapped:
                    stack.enter_context(wrapped.no_sync())
            yield

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let this rank run the model without the others, as for an evaluation.

        Yields:
            Nothing.
        """
        kept = [wrapped.require_forward_param_sync for wrapped in self._wrapped]
        for wrapped in self._wrapped:
            wrapped.require_forward_param_sync = False
        try:
            yield
        finally:
            for wrapped, flag in zip(self._wrapped, kept, strict=True):
                wrapped.require_forward_param_sync = flag

    def watched(self, run: Callable[[], Tensor]) -> Tensor:
        """Run a step and take note of the buffers that its collectives write, beside what it makes itself. Changes `buckets`.

        Args:
            run: an eager step, after the second forward, in which DistributedDataParallel builds its buckets anew.

        Returns:
            What it returned.
        """
        if not self._wrapped:
            return run()
        watch = _Watch()
        with uncompiled(), watch:
            result = run()
        self.buckets = {f"bucket:{number}": tensor for number, tensor in enumerate(watch.found.values())}
        return result

    def spoil(self) -> None:
        """Fill the buckets with what no step would leave in them; a step fills them anew."""
        for bucket in self.buckets.values():
            raw_bytes(bucket).fill_(0xA5)

    def refuse(self, device: torch.device) -> None:
        """Refuse what a capture cannot hold.

        Args:
            device: where the step runs.

        Raises:
            ReplayError: sharded parameters, or a feature of DistributedDataParallel that cannot be replayed.
        """
        if self._sharded:
            raise ReplayError(
                f"{self._sharded[0]}: it is a DTensor; a tape holds whole tensors, so use DistributedDataParallel, or mode='eager'"
            )
        for wrapped in self._wrapped:
            for asks, error, text in _REFUSED:
                if asks(wrapped):
                    raise error(f"DistributedDataParallel: {text}, or use mode='eager'")
            if device.type != "cpu":
                raise ReplayError(
                    f"DistributedDataParallel on {device}: a graph that holds collectives was never tried; use mode='eager', "
                    "or train on one device"
                )
        if len(self.groups) > 1:
            raise ReplayError(
                f"DistributedDataParallel: {len(self.groups)} process groups in one model do not settle on one action; "
                "use one group, or mode='eager'"
            )

    def settle(self, choose: Callable[[], StepDecision]) -> StepDecision:
        """Choose what this rank would do, and settle with the others what it does.

        All ranks prove, or none does: where one of them would and another has no plan yet, the first runs this step eagerly. A proof runs
        the step more often than an audit, so where the plan of one rank lacks it all make it. All ranks rehearse a step that one captures.

        Args:
            choose: gives a turn.

        Returns:
            The turn that is to be taken.

        Raises:
            ReplayError: a rank could not choose.
        """
        if not self._many:
            return choose()
        turn, chosen = StepDecision(""), False
        try:
            turn, chosen = choose(), True
        finally:  # whatever keeps this rank from choosing, the others are told
            proves, has_plan = turn.action in PROOFS, turn.action in (*PROOFS, "replay")
            refused, proving, without, rehearsed, doubtful, unproven = self._sum(
                not chosen, proves, not has_plan, turn.rehearsed, turn.may_be_refused, turn.unproven
            )
        self._raise(None, refused)
        action = turn.action
        if proving and without and proves:
            action = "eager"
        elif proving and not without:
            action = "prove" if unproven else "audit"
        return StepDecision(action, bool(rehearsed), bool(doubtful))

    def together(self, run: Callable[[], T]) -> T:
        """Run something that may be refused; refused by one rank, it is refused by all.

        Args:
            run: performs the same collectives whether it is refused or not.

        Returns:
            What it returned.

        Raises:
            ReplayError: this rank or another one refused.
        """
        if not self._many:
            return run()
        result, error = None, None
        try:
            result = run()
        except ReplayError as caught:
            error = caught
        (refused,) = self._sum(error is not None)
        self._raise(error, refused)
        return result  # type: ignore[return-value]

    def meet(self, settings: str) -> None:
        """Check, once, that the trainers of all ranks were made alike.

        Args:
            settings: what decides how often a step is run.

        Raises:
            UserInputError: another rank has other settings.
        """
        if self._channel or not self._many:
            return
        digest = int.from_bytes(hashlib.blake2b(settings.encode(), digest_size=3).digest(), "big")
        total, squares = self._sum(digest, digest * digest)
        size = self._wrapped[0].process_group.size()
        if (total, squares) != (size * digest, size * digest * digest):
            raise UserInputError(f"Trainer: the ranks were made with different settings, here {settings}; make all of them alike")

    def _sum(self, *numbers: int) -> list[int]:
        """Add numbers over all ranks."""
        group = self._wrapped[0].process_group
        try:
            if not self._channel:
                ranks = dist.get_process_group_ranks(group)
                timeout = group._get_backend(torch.device("cpu")).options._timeout
                channel = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)
                self._channel = channel.group_name
            tensor = torch.tensor(numbers, dtype=torch.int64)
            dist.all_reduce(tensor, group=group_named(self._channel))
        except RuntimeError as error:
            raise ReplayError(
                f"rank {group.rank()} of {group.size()}: the other ranks did not answer ({error}); "
                "look for the error of the rank that stopped, and train alike on all ranks"
            ) from error
        return [int(number) for number in tensor]

    def _raise(self, error: ReplayError | None, refused: int) -> None:
        if error is not None:
            raise error
        if refused:
            group = self._wrapped[0].process_group
            who = "another rank" if refused == 1 else f"{refused} other ranks"
            raise ReplayError(
                f"rank {group.rank()} of {group.size()}: {who} refused this step, so it is undone here too; look there for the error"
            )


class _Watch(TorchDispatchMode):
    """Notes the whole flat tensors that are summed over the ranks from within a backward pass, as only the buckets are."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operator."""
        if func._schema.name == "c10d::allreduce_" and torch._C._current_autograd_node() is not None:
            flat = [tensor for tensor in args[0] if tensor.dim() == 1 and tensor.untyped_storage().nbytes() == tensor.nbytes]
            self.found.update((tensor.untyped_storage()._cdata, tensor.detach()) for tensor in flat)
        return func(*args, **(kwargs or {}))
