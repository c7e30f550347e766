"""The one definition of a training step: zero grad, forward, loss, backward, optimizer step. Every mode runs exactly this.

Gradients are allocated when the step is made and zeroed in place ever after. A parameter that the backward pass does not reach, since the
loss does not depend on it or since it was frozen, keeps zeros there, but clipping and optimizer see None, as in an ordinary loop: they
leave it alone, where zeros would mean decay and momentum. What modifiers do inside the step (LOSS_CALCULATED, OPTIM_PRE_STEP,
OPTIM_POST_STEP) is part of the step: it is recorded with it, and is therefore told no step index. What follows the index belongs into
BATCH_START and BATCH_END.

An optimizer whose groups say `fused=True` or `capturable=True` promises to read nothing on the host, and its update is captured with the
rest of the step. Any other, such as `torch.optim.AdamW` as it comes, updates in Python behind every captured part: with the same bits, and
with whatever schedule, counter or branch it has.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from compressor.errors import LifecycleError, UserInputError
from compressor.lifecycle import Event, EventType, Modifier, Session
from compressor.settings.kinds import NUMBER, WHOLE, object_of
from compressor.settings.options import checked
from compressor.training.capture.storages import Lasting
from compressor.training.step.averages import WeightAverages
from compressor.training.step.batch import Batch
from compressor.training.step.ranks import Ranks

PHASES = ("zero_grad", "forward", "loss", "backward", "optimizer")
LossFunction = Callable[[nn.Module, Batch], Tensor]


@runtime_checkable
class HasPlanKey(Protocol):
    """A modifier that says which of its states make another step: whatever changes the operators must change the key."""

    def plan_key(self) -> Hashable:
        """Return the state as a key; never the step index itself."""


@runtime_checkable
class HasTensors(Protocol):
    """A modifier that owns tensors which the step reads or writes, such as masks and scales."""

    def training_tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors by name."""


class TrainStep:
    """A model, its loss and its optimizer as one repeatable step.

    Args:
        model: in training mode, on its device; its parameters get gradients.
        loss_fn: calls the model on a batch and returns a scalar loss; it must not keep tensors.
        optimizer: any of torch or of one's own, over parameters of the model; those of `adamw()` and `sgd()` are captured with the step.
        session: an initialized session of modifiers, or None.
        accumulate: number of micro-batches of a step; above 1 a batch is a list of that many.
        clip_norm: largest norm of all gradients of the optimizer's parameters together; None: no clipping.
        autocast: dtype of `torch.autocast` around `loss_fn`; None: none. Around the step it is an error.
        averages: moving averages of the weights, updated at the end of every step.

    Attributes:
        made_of: classes of the modules when the step was made; a modifier that starts may give them others.
        made_with: settings of the optimizer's groups and of the averages when the step was made; a state of others is no state of it.
        update_is_captured: the optimizer's update is part of what a capture holds.
        skipped: parameters of the optimizer that the last step's backward pass did not reach; the update leaves them alone.
        lasting: names of the tensors that recordings of the step met outside of it.

    Raises:
        UserInputError: a setting of the wrong kind or out of range, or nothing to train.
    """

    @checked(
        session=object_of(Session, words="a Session"),
        accumulate=WHOLE,
        clip_norm=NUMBER,
        averages=object_of(WeightAverages, words="WeightAverages"),
    )
    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer,
        session: Session | None = None,
        *,
        accumulate: int = 1,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        averages: WeightAverages | None = None,
    ) -> None:
        _refuse_wrong_types(model, loss_fn, optimizer)
        if accumulate < 1:
            raise UserInputError(f"TrainStep: accumulate={accumulate} is not positive; give the number of micro-batches of a step")
        if clip_norm is not None and not clip_norm > 0:
            raise UserInputError(f"TrainStep: clip_norm={clip_norm} is not positive; give the largest norm, or None")
        if autocast not in (None, torch.bfloat16, torch.float16):  # torch would go on without
            raise UserInputError(f"TrainStep: autocast={autocast!r} is no dtype of torch.autocast; give torch.bfloat16, or None")
        self.model, self.loss_fn, self.optimizer, self.session = model, loss_fn, optimizer, session
        self.accumulate, self.clip_norm, self.autocast, self.averages = accumulate, clip_norm, autocast, averages
        if averages is not None:
            averages.settle = self._settle
        self.ranks = Ranks(model)
        self.made_of = {name: type(module).__qualname__ for name, module in model.named_modules()}
        self.made_with = _settings_of(optimizer, averages)
        self.lasting = Lasting()
        self.choose_update()
        self.mark: Callable[[str], None] = _ignore
        self.trained: list[nn.Parameter] = []
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self.skipped: tuple[nn.Parameter, ...] = ()
        self._find_trained()
        if not self.trained:
            raise UserInputError("TrainStep: no parameter of the optimizer requires a gradient; nothing would be trained")
        if any(isinstance(parameter, nn.UninitializedParameter) for parameter in self.trained):
            raise UserInputError("TrainStep: a lazy layer has no parameters yet; call the model on a batch before the optimizer is made")
        self._refuse_sparse_gradients()
        self.allocate_gradients()

    @property
    def device(self) -> torch.device:
        """Where the first trained parameter lies; the first that was, where none is left in the optimizer, or all are frozen."""
        return (self.trained or list(self._gradients))[0].device

    @property
    def modifiers(self) -> Sequence[Modifier]:
        """The modifiers of the session."""
        return () if self.session is None else self.session.modifiers

    def choose_update(self) -> None:
        """Settle whether a capture holds the update, by what the groups of the optimizer promise now. Changes `update_is_captured`."""
        self.update_is_captured = all(group.get("fused") or group.get("capturable") for group in self.optimizer.param_groups)

    def allocate_gradients(self) -> None:
        """Give every trained parameter without a gradient the one it had, or one of zeros. Changes the parameters' `.grad`."""
        for parameter in self.trained:
            if parameter.grad is None:
                gradient = self._gradients.get(parameter)
                kept = None if gradient is None else (gradient.shape, gradient.dtype, gradient.device)
                if gradient is None or kept != (parameter.shape, parameter.dtype, parameter.device):
                    gradient = torch.zeros_like(parameter)
                parameter.grad = self._gradients[parameter] = gradient

    def __call__(self, batch: Batch) -> Tensor:
        """Perform one step. Changes parameters, gradients, buffers and optimizer state.

        Args:
            batch: what `loss_fn` takes; a list of `accumulate` of them where that is above 1.

        Returns:
            The mean loss of the micro-batches, detached.
        """
        loss = self.captured_part(batch)
        self.finish()
        return loss

    def captured_part(self, batch: Batch) -> Tensor:
        """Perform what a capture holds: all of the step, or all but the update. Changes what that part of the step writes.

        Args:
            batch: as for the whole step.

        Returns:
            The loss; in a captured step it lies in a storage that the next replay overwrites.
        """
        self.mark("zero_grad")
        if [*map(id, self.trained)] != [*map(id, self._trainable())]:
            self._find_trained()
            self.allocate_gradients()
        self.optimizer.zero_grad(set_to_none=False)
        zeroed = [(parameter, parameter.grad, _version(parameter.grad)) for parameter in self._in_optimizer()]
        micro_batches = self.micro_batches(batch)
        total: Tensor | None = None
        for number, micro_batch in enumerate(micro_batches):
            last = number + 1 == len(micro_batches)
            with self.ranks.synchronizing(last):
                self.mark("forward")
                loss = self.loss_of(micro_batch)
                self.mark("loss")
                if self.accumulate > 1:
                    loss = loss / self.accumulate
                total = loss if total is None else total.detach() + loss
                if last:
                    self._tell(EventType.LOSS_CALCULATED, total)
                self.mark("backward")
                if not loss.requires_grad:
                    raise UserInputError(
                        "loss_fn: its loss has no gradient (detached, or computed under torch.no_grad()), so nothing would be learnt; "
                        "return what the model's output leads to"
                    )
                loss.backward()
        self.skipped = tuple(p for p, gradient, version in zeroed if p.grad is gradient and _version(gradient) == version)
        self.mark("optimizer")
        self._tell(EventType.OPTIM_PRE_STEP)
        if self.clip_norm is not None:  # after the modifiers: the gradient of a pruned weight is no part of the norm
            skipped = set(self.skipped)
            nn.utils.clip_grad_norm_([p for p in self.trained if p not in skipped], self.clip_norm)
        if self.update_is_captured:
            self._update()
        assert total is not None
        return total.detach()

    def finish(self) -> None:
        """Perform what no capture holds, which is nothing or the update. Changes parameters, optimizer state and averages."""
        if not self.update_is_captured:
            self._update()

    def micro_batches(self, batch: Batch) -> Sequence[Batch]:
        """Split the batch of a step.

        Args:
            batch: what the step was given.

        Returns:
            Its micro-batches.

        Raises:
            UserInputError: there are not `accumulate` of them.
        """
        if self.accumulate == 1:
            return [batch]
        if not isinstance(batch, list | tuple) or len(batch) != self.accumulate:
            what = f"{len(batch)} micro-batches" if isinstance(batch, list | tuple) else type(batch).__name__
            raise UserInputError(f"TrainStep: {what} given for accumulate={self.accumulate}; give a list of that many micro-batches")
        return batch

    def loss_of(self, batch: Batch) -> Tensor:
        """Run model and loss on one micro-batch, under the step's autocast.

        Args:
            batch: one micro-batch.

        Returns:
            The loss.

        Raises:
            UserInputError: the loss function gave something else than a scalar tensor, or torch.autocast is on around the trainer.
        """
        if torch.is_autocast_enabled(self.device.type):
            raise UserInputError(
                "TrainStep: torch.autocast is on around the trainer, where it would cover more or less than the loss; "
                f"end it, and give TrainStep(autocast={torch.get_autocast_dtype(self.device.type)})"
            )
        if self.autocast is None:  # not one that is off, which would set torch's dtype of autocast meanwhile
            loss = self.loss_fn(self.model, batch)
        else:
            with torch.autocast(self.device.type, self.autocast):
                loss = self.loss_fn(self.model, batch)
        given: object = loss
        if not isinstance(given, Tensor) or given.dim() or given.is_complex():
            what = f"a {given.dtype} tensor of shape {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            raise UserInputError(f"loss_fn: it returned {what}, which is no scalar loss; return the mean over the batch")
        return loss

    def plan_key(self) -> Hashable:
        """Return the modifiers' part of a plan's key: where each stands, and its own key where it has one.

        A modifier without a key of its own gets another plan for the first batch of each update interval, in which it may do other
        things; one with a key speaks for itself.
        """
        return tuple((m.flags.started, m.flags.ended, m.plan_key() if isinstance(m, HasPlanKey) else m.flags.due) for m in self.modifiers)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the model's parameters by name, and those of the optimizer that lie outside of it by their place there."""
        named = dict(self.model.named_parameters())
        inside = {id(parameter) for parameter in named.values()}
        for number, group in enumerate(self.optimizer.param_groups):
            named |= {f"group{number}[{place}]": p for place, p in enumerate(group["params"]) if id(p) not in inside}
        return named

    def learners(self) -> dict[str, Tensor]:
        """Return what may get a gradient by name: the parameters, and buffers, which may be asked for one as well."""
        return {**self.parameters(), **{name: buffer for name, buffer in self.model.named_buffers() if buffer.is_leaf}}

    def tensors(self) -> dict[str, Tensor]:
        """List everything that the step may read or write between steps, by role and name."""
        return dict(self._tensors())

    @contextmanager
    def marking(self, mark: Callable[[str], None]) -> Iterator[None]:
        """Report each phase while the block runs.

        Args:
            mark: called with the name of each phase as it begins.

        Yields:
            Nothing.
        """
        self.mark = mark
        try:
            yield
        finally:
            self.mark = _ignore

    def _in_optimizer(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])

    def _trainable(self) -> list[nn.Parameter]:
        """List the parameters of the optimizer that require a gradient now, in the model's order.

        The norm of all gradients, a sum, is then the same however the optimizer groups them.
        """
        places = {id(p): place for place, p in enumerate(self.model.parameters())}
        trained = [p for p in self._in_optimizer() if p.requires_grad]
        return sorted(trained, key=lambda p: places.get(id(p), len(places)))

    def _refuse_sparse_gradients(self) -> None:
        """Gradients stay allocated, so sparse ones would be added up densely: other bits, and updates of rows that no batch asked for."""
        if isinstance(self.optimizer, torch.optim.SparseAdam):
            raise UserInputError("TrainStep: SparseAdam takes sparse gradients, and those of a step are dense; take AdamW")
        trained = set(self.trained)
        for name, module in self.model.named_modules():
            if getattr(module, "sparse", False) is True and not trained.isdisjoint(module.parameters(recurse=False)):
                raise UserInputError(
                    f"TrainStep: {name or 'the model'}: {type(module).__name__}(sparse=True) gives sparse gradients, and a step has "
                    "dense ones; set sparse=False"
                )

    def _find_trained(self) -> None:
        self.trained = self._trainable()
        self._gradients |= {parameter: parameter.grad for parameter in self.trained if parameter.grad is not None}

    def _update(self) -> None:
        hidden = [(parameter, parameter.grad) for parameter in self.skipped]
        for parameter, _ in hidden:
            parameter.grad = None
        gradients = [(parameter, parameter.grad) for parameter in self._in_optimizer()]
        try:
            self.optimizer.step()
            for parameter, gradient in gradients:
                if parameter.grad is not gradient and parameter.grad is not None and gradient is not None:
                    _take_over(parameter, gradient)
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient
        self._tell(EventType.OPTIM_POST_STEP)
        if self.averages is not None:
            self.averages.update()

    def _tell(self, event_type: EventType, loss: Tensor | None = None) -> None:
        """Hand an event of the step to the modifiers, past the session: a proof repeats the step, and a replay does not come here."""
        if self.session is None:
            return
        if self.session.last is not EventType.BATCH_START:
            raise LifecycleError(f"TrainStep: the session stands at {self.session.last.name}; send BATCH_START first, or use a Trainer")
        event = Event(event_type, index=math.nan, step=-1, loss=loss)
        for modifier in self.session.modifiers:
            modifier.update_event(self.session.state, event)

    def _settle(self) -> None:
        """Let the modifiers follow weights that were written outside of the step."""
        for modifier in self.modifiers:
            modifier.settle()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.parameters().items():
            yield f"param:{name}", parameter.detach()
        yield from ((f"grad:{name}", tensor.grad) for name, tensor in self.learners().items() if tensor.grad is not None)
        yield from ((f"buffer:{name}", buffer) for name, buffer in self.model.named_buffers())
        yield from self._optimizer_tensors()
        if self.averages is not None:
            yield from ((f"average:{name}", value) for name, value in self.averages.tensors.items())
        for number, modifier in enumerate(self.modifiers):
            if isinstance(modifier, HasTensors):
                yield from ((f"modifier{number}.{key}", value) for key, value in modifier.training_tensors().items())

    def _optimizer_tensors(self) -> Iterator[tuple[str, Tensor]]:
        names = {parameter: name for name, parameter in self.parameters().items()}
        for number, group in enumerate(self.optimizer.param_groups):
            yield from ((f"group{number}.{key}", value) for key, value in group.items() if isinstance(value, Tensor))
            for parameter in group["params"]:
                yield from self._state_tensors(parameter, names[parameter])
        held = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        for parameter in [one for one in names if one not in held]:  # out of all groups for a while, and finds its moments when it is back
            yield from self._state_tensors(parameter, names[parameter])

    def _state_tensors(self, parameter: nn.Parameter, name: str) -> Iterator[tuple[str, Tensor]]:
        state = state_of(self.optimizer, parameter)
        return ((f"opt.{key}:{name}", value) for key, value in state.items() if isinstance(value, Tensor))


def _settings_of(optimizer: torch.optim.Optimizer, averages: WeightAverages | None) -> dict[str, Any]:
    """Name settings that are plain values, or tensors of one, as learning rates are."""
    found: dict[str, Any] = {} if averages is None else {"averages": f"decays {[*averages.decays]}, warmup={averages.warmup}"}
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        for key, value in group.items():
            plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta else value
            plain = list(plain) if isinstance(plain, tuple) else plain
            if all(isinstance(one, bool | int | float | str | None) for one in (plain if isinstance(plain, list) else [plain])):
                found[f"{key} of optimizer group {number}"] = plain
    return found


def _refuse_wrong_types(model: object, loss_fn: object, optimizer: object) -> None:
    """Refuse what is no part of a training step, and optimizers that no step can serve."""
    if not isinstance(model, nn.Module):
        raise UserInputError(f"TrainStep: model is of {type(model).__name__}; give a torch.nn.Module")
    if not callable(loss_fn):
        raise UserInputError(f"TrainStep: loss_fn is of {type(loss_fn).__name__}; give a function of model and batch")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserInputError(
            f"TrainStep: optimizer is of {type(optimizer).__name__}; give one torch.optim.Optimizer, and each its own step"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserInputError(
            f"TrainStep: {type(optimizer).__name__} calls the loss itself, in a closure, as often as it likes; a step has one loss, "
            "so take another optimizer"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UserInputError("TrainStep: SparseAdam takes sparse gradients only, and those of a step are dense; take Adam or AdamW")


def state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Mapping[str, object]:
    """Return what an optimizer keeps for a parameter, by key; where that is no mapping, it is called `state`."""
    state: object = optimizer.state.get(parameter, {})
    return state if isinstance(state, Mapping) else {"state": state}


def _version(tensor: Tensor | None) -> int:
    """Return how often a tensor was written in place."""
    return -1 if tensor is None else tensor._version


@torch.no_grad()
def _take_over(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Keep the gradient that a step has allocated where an optimizer put another one, with the values of that."""
    given = parameter.grad
    if given is not None and given.layout is torch.strided and (given.shape, given.dtype) == (gradient.shape, gradient.dtype):
        parameter.grad = gradient.copy_(given)


def _ignore(phase: str) -> None:
    """Do nothing: nobody follows the phases."""
