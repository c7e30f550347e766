"""Does the model call what was put in its place? A layer that its owner also holds in a list or a function stays there as it was.

Forwards that run anyway before compression tell which modules are called; one of the smallest batch at the end tells what is left of it.
A module counts only where its owner is called as well: which experts a token is sent to may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from compressor.data import Batch, CalibrationData, batch_to
from compressor.data.collate import leading_tensor
from compressor.errors import CalibrationError
from compressor.lifecycle import Session, State
from compressor.tracing.footprint import Footprint
from compressor.tracing.graph.nodes import Unrepeatable, one_line
from compressor.tracing.targets.call_order import plain_forward


def compressed_names(state: State) -> list[str]:
    """List the modules that the modifiers have claimed or changed, in the order of the model."""
    return [name for name, _ in state.model.named_modules() if name in state.claims or name in state.touched]


@contextmanager
def calls_of(model: nn.Module, names: Sequence[str]) -> Iterator[set[str]]:
    """Note which modules are called for the duration.

    Args:
        model: hooks come and go.
        names: dotted names.

    Yields:
        Those that were called so far.
    """
    called: set[str] = set()
    with ExitStack() as hooks:
        for name in names:
            module = model.get_submodule(name)
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.callback(module.register_forward_pre_hook(_noting(called, name, module)).remove)
        yield called


def _noting(called: set[str], name: str, module: nn.Module) -> Callable[..., None]:
    """A hook for the calls of one module alone: what comes in its place may share its table of hooks."""

    def hook(given: nn.Module, args: object) -> None:
        if given is module:
            called.add(name)

    return hook


def check_still_called(session: Session, data: CalibrationData, before: set[str]) -> None:
    """Run the compressed model on its smallest batch, and look for layers that are called no more. The model is as before.

    Args:
        session: after the last stage; its hooks are put to sleep.
        data: the batches.
        before: modules that were called before compression.

    Raises:
        CalibrationError: a layer is called no more, though its owner is; or the compressed model raises an error.
    """
    model = session.state.model
    owners = {name: _owner(model, name) for name in compressed_names(session.state) if name in before}
    if not owners:
        return
    batch = batch_to(_smallest(data), session.state.device)
    watched = list(dict.fromkeys((*owners, *owners.values())))
    with session.hooks_disabled(), torch.no_grad(), Footprint(model), calls_of(model, watched) as called:
        try:
            plain_forward(model, batch)
        except Unrepeatable as error:
            raise CalibrationError(
                f"forward: the compressed model raises {one_line(error.__cause__ or error)} on a batch that it took before; ignore the "
                "layers of which its code asks for more than to be called"
            ) from error
    lost = [name for name, owner in owners.items() if owner in called and name not in called]
    if lost:
        more = f" (and {len(lost) - 1} more)" if lost[1:] else ""
        raise CalibrationError(
            f"{lost[0]}{more}: {owners[lost[0]] or 'the model'} calls it no more now that it is compressed: it holds the float layer in "
            "another place (a list, a dict, a function), or asks for its class; let it call its submodule by name, or ignore the layer"
        )


def _smallest(data: CalibrationData) -> Batch:
    """The smallest batch; of token ids alone its first row, which any model of tokens takes."""
    batch = min(data.batches, key=lambda one: leading_tensor(one).numel())
    if isinstance(batch, dict) and batch.keys() <= {"input_ids", "attention_mask"}:
        return {name: tensor[:1] for name, tensor in batch.items()}
    return batch


def _owner(model: nn.Module, name: str) -> str:
    """The nearest module around another one that is called itself; a ModuleList is not."""
    owner = name.rpartition(".")[0]
    while owner and type(model.get_submodule(owner)).forward is nn.Module.forward:
        owner = owner.rpartition(".")[0]
    return owner
