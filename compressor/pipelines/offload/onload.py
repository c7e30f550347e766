"""Weights at hand for one stretch of a model at a time: a stretch is a sequential target, usually a decoder layer.

Whatever calls a module of a stretch (a plain forward, a recorded graph, a paused one) brings the stretch; the one before goes, unless the
stage at work holds it.

On the CPU to go is to give back the pages of mapped files; embeddings and the head take turns with the layers there. For another device
weights wait in main memory: a stretch is copied there by a thread of its own, through pinned memory and on a stream of its own where there
is CUDA, while the one before computes; it leaves as it has become. Parameters stay the objects that they are. What lies in no stretch
(embeddings, norms, the head), or in several, stays there all the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from compressor.errors import CalibrationError, TargetError
from compressor.nn.experts import Expert
from compressor.numerics.checksum import checksum
from compressor.pages import SMALL_BYTES, let_go
from compressor.pipelines.memory import free_bytes, return_freed_pages
from compressor.tracing.targets.out_of_memory import is_out_of_memory

FREE_SHARE = 0.5  # of the device's free memory, that weights may take as a whole: activations and solvers need the rest


class WeightsByStretch:
    """Weights that lie where they are used: of stretches that are not at hand mapped pages go. A context manager."""

    def __init__(self, model: nn.Module, targets: Collection[str]) -> None:
        """Do nothing yet.

        Args:
            model: modules of its stretches may be replaced meanwhile.
            targets: dotted names of the stretches, in the order of the model.
        """
        self._model, self._targets = model, tuple(targets)
        self._homes: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._held: frozenset[str] = frozenset()
        self._here: list[str] = []
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        """Listen to the calls of all modules in stretches. Changes the model."""
        self._cleanup.callback(self._listen_no_more)
        for target in self._targets:
            modules = self._know(target)
            # Experts run where a layer of theirs has been called, which asks who looks at them.
            quiet = {part for module in modules if isinstance(module, Expert) for part in module.modules()}
            for module in modules:
                if module not in quiet and not isinstance(module, torch.jit.ScriptModule):
                    module.register_forward_pre_hook(self._called)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Let all stretches go, and take the hooks off."""
        self._held = frozenset()
        self.put_away()
        self._cleanup.close()

    def __deepcopy__(self, memo: object) -> Self:
        """Copies of a module tell the same one of their calls."""
        return self

    def hold(self, modules: Collection[str]) -> None:
        """Bring the stretches of some modules, which stay until others are held.

        Args:
            modules: dotted names.
        """
        self._held = frozenset(target for target in self._targets if any(_lies_in(name, target) for name in modules))
        self.put_away()
        if self._targets:
            let_go(_outside(self._model, self._targets))
        for target in sorted(self._held, key=self._targets.index):
            self._need(target)
            self._look_ahead(target)

    def put_away(self) -> None:
        """Let all stretches go that are not held."""
        going, self._here = [one for one in self._here if one not in self._held], [one for one in self._here if one in self._held]
        with torch._C.DisableTorchFunction():  # modes that record or watch a forward see the forward alone
            for target in going:
                self._send_back(target)

    def refuse_rewritten(self, names: Collection[str]) -> None:
        """Take note of tensors that the model's own forward rewrites: where they lie, they may be.

        Args:
            names: of parameters and buffers.
        """

    def _called(self, module: nn.Module, args: object) -> None:
        if module not in self._homes:  # it has taken the place of one that was at hand
            for target in self._here:
                self._know(target)
        if module in self._homes:
            self._need(self._homes[module])

    def _need(self, target: str) -> None:
        if target not in self._here:
            self.put_away()
            self._here.append(target)
            with torch._C.DisableTorchFunction():
                self._bring(target)
                if not self._held:
                    self._look_ahead(target)

    def _know(self, target: str) -> list[nn.Module]:
        modules = list(self._model.get_submodule(target).modules())
        self._homes.update(dict.fromkeys(modules, target))
        return modules

    def _listen_no_more(self) -> None:
        for module in (*self._model.modules(), *self._homes):  # also what was replaced, and comes back when a run fails later
            hooks = module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if hook == self._called]:
                del hooks[key]

    def _bring(self, target: str) -> None:
        """Mapped pages come by themselves."""

    def _look_ahead(self, target: str) -> None:
        """Nothing is prepared."""

    def _send_back(self, target: str) -> None:
        let_go(_tensors(self._model.get_submodule(target)))
        if not self._held:  # no stage is at work, which would do so at its end: the proof leaves activations of all layers on the heap
            return_freed_pages()


class _Lent(NamedTuple):
    """A parameter or buffer on the device: the object, the tensor that it was, and the checksum of what was brought."""

    own: Tensor
    host: Tensor
    brought: int


class OnloadedWeights(WeightsByStretch):
    """Weights that wait in main memory, and are copied to the device stretch by stretch, the next one ahead of its time."""

    def __init__(self, model: nn.Module, targets: Collection[str], device: torch.device) -> None:
        """Do nothing yet.

        Args:
            model: in main memory.
            targets: dotted names of the stretches, in the order of the model.
            device: where forwards run.
        """
        super().__init__(model, targets)
        self._device = device
        self._lent: dict[str | None, list[_Lent]] = {}
        self._coming: dict[str, _Coming] = {}
        counts = Counter(id(tensor) for target in targets for tensor in _tensors(model.get_submodule(target)))
        # A tensor of several stretches, or of one and the rest, has one place only.
        inside = {key for key, count in counts.items() if count == 1} - {id(one) for one in _outside(model, targets)}
        self._outside = [one for one in _tensors(model) if id(one) not in inside]
        self._shared = {id(one) for one in self._outside}

    def __enter__(self) -> Self:
        """Copy what lies in no stretch."""
        self._copier = self._cleanup.enter_context(ThreadPoolExecutor(1, "onload"))
        self._side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._cleanup.callback(self._return, None)
        self._install(None, self._ask(self._outside))
        # The end of a forward, however it ends: who looks at the model then finds it as it was.
        self._cleanup.callback(self._model.register_forward_hook(lambda *_: self.put_away(), always_call=True).remove)
        return super().__enter__()

    def refuse_rewritten(self, names: Collection[str]) -> None:
        """Refuse tensors that the model's own forward rewrites: they come and go as they were.

        Args:
            names: of parameters and buffers.

        Raises:
            CalibrationError: there is one.
        """
        for name in names:
            raise CalibrationError(
                f"{name}: the model's own forward rewrites it, which weights that wait in main memory do not keep; give "
                "sequential_offload_device='none'"
            )

    def _bring(self, target: str) -> None:
        own, coming = self._own(target), self._coming.pop(target, None)
        # What was asked for ahead of its time may have been replaced or written to since, or there was no room for it yet.
        if coming is not None and (not _same(own, coming) or _found_no_room(coming)):
            coming = None  # which frees it
        self._install(target, coming or self._ask(own))

    def _look_ahead(self, target: str) -> None:
        after = self._targets[self._targets.index(target) + 1 :][:1]
        known, self._coming = self._coming, {}
        for one in after:
            if one not in self._here:
                self._coming[one] = known[one] if one in known else self._ask(self._own(one))

    def _ask(self, own: list[Tensor]) -> _Coming:
        return _Coming(own, [one._version for one in own], self._copier.submit(self._copies, [one.detach() for one in own]))

    def _own(self, target: str) -> list[Tensor]:
        return [one for one in _tensors(self._model.get_submodule(target)) if id(one) not in self._shared]

    @torch.no_grad()
    def _copies(self, tensors: list[Tensor]) -> _Copies:
        """Copy tensors to the device; runs in the thread, which no mode of torch sees."""
        if self._side is None:
            return _Copies([one.to(self._device, copy=True) for one in tensors], None)
        with torch.cuda.stream(self._side):
            made = [one.pin_memory().to(self._device, non_blocking=True) for one in tensors]
            return _Copies(made, self._side.record_event())

    def _install(self, target: str | None, coming: _Coming) -> None:
        """Let parameters and buffers be what was brought. Changes the model."""
        copies = coming.copies.result()
        if copies.event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copies.event)
            for made in copies.tensors:
                made.record_stream(stream)  # freed on this stream, and made on another
        lent = self._lent.setdefault(target, [])
        for own, made in zip(coming.own, copies.tensors, strict=True):
            lent.append(_Lent(own, own.detach(), checksum(made)))
            own.data = made

    def _send_back(self, target: str) -> None:
        self._return(target)
        super()._send_back(target)

    @torch.no_grad()
    def _return(self, target: str | None) -> None:
        """Let what was brought be what it was, in the bytes that it has become; what came meanwhile goes to main memory."""
        for own, host, brought in self._lent.pop(target, []):
            if own.shape == host.shape and own.dtype == host.dtype:
                if checksum(own) != brought:
                    host.copy_(own)
                own.data = host
        for new in self._own(target) if target is not None else _tensors(self._model):
            if new.device.type != "cpu":
                new.data = new.cpu()


class _Copies(NamedTuple):
    """Tensors on the device, and what tells when they are there; None where they are."""

    tensors: list[Tensor]
    event: Any


class _Coming(NamedTuple):
    """Parameters and buffers on their way, and how often each had been written to when it was asked for."""

    own: list[Tensor]
    versions: list[int]
    copies: Future[_Copies]


def weights_by_stretch(model: nn.Module, targets: Mapping[str, nn.Module], device: torch.device) -> WeightsByStretch:
    """Choose how the weights of a model come to be at hand.

    Args:
        model: on the device, or in main memory for another device.
        targets: the stretches by dotted name, in the order of the model.
        device: where forwards run.

    Returns:
        A context manager.
    """
    if needs_copies(model, device):
        return OnloadedWeights(model, targets, device)
    return WeightsByStretch(model, (*targets, *_heavy(model, targets)) if device.type == "cpu" else ())


def weights_wait(model: nn.Module, device: torch.device, obstacle: str | None, asked: str | None) -> bool:
    """Decide whether the weights of a model wait in main memory for their turn.

    Args:
        model: in main memory, or on the device.
        device: where the run takes place.
        obstacle: why layers cannot take turns; None where they can.
        asked: `cpu`, `none`, or None where the user leaves it to us.

    Returns:
        True if so: for a device other than the CPU alone.

    Raises:
        TargetError: that was asked for, and cannot be.
    """
    if device.type == "cpu":
        return False
    if obstacle is not None:
        if asked == "cpu":
            raise TargetError(f"sequential_offload_device: 'cpu' was given, but {obstacle}; leave it out")
        return False
    return asked == "cpu" if asked is not None else sum(one.nbytes for one in _tensors(model)) > FREE_SHARE * free_bytes(device)


def needs_copies(model: nn.Module, device: torch.device) -> bool:
    """Say whether weights lie elsewhere than where forwards run.

    Args:
        model: any.
        device: where forwards run.

    Returns:
        True where they wait in main memory.
    """
    return device.type != "cpu" and all(one.device.type == "cpu" for one in model.parameters())


def _tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers, each once."""
    return [*module.parameters(), *module.buffers()]


def _outside(model: nn.Module, targets: Collection[str]) -> Iterator[Tensor]:
    inside = {id(part) for target in targets for part in model.get_submodule(target).modules()}
    for module in model.modules():
        if id(module) not in inside:
            yield from (*module.parameters(recurse=False), *module.buffers(recurse=False))


def _heavy(model: nn.Module, targets: Collection[str]) -> list[str]:
    """Layers outside of all stretches whose weights are worth a turn of their own: beside embeddings or a head no other layer need be."""
    inside = {id(part) for target in targets for part in model.get_submodule(target).modules()}
    outside = {name: module for name, module in model.named_modules() if id(module) not in inside and not any(module.children())}
    return [name for name, module in outside.items() if sum(one.nbytes for one in module.parameters()) >= SMALL_BYTES]


def _same(own: list[Tensor], coming: _Coming) -> bool:
    return list(map(id, own)) == list(map(id, coming.own)) and [one._version for one in own] == coming.versions


def _found_no_room(coming: _Coming) -> bool:
    error = coming.copies.exception()
    return error is not None and is_out_of_memory(error)


def _lies_in(name: str, target: str) -> bool:
    return not target or name == target or name.startswith(f"{target}.")
