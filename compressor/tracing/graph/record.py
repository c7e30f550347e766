"""Recording one forward: inputs become placeholders, the forward runs once, and the recorder's graph becomes a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import is_tensor, nn

from compressor.data.collate import Batch, call_model, copied_batch
from compressor.errors import TracingError
from compressor.tracing.graph.leaves import LeafFunction
from compressor.tracing.graph.patches import recording
from compressor.tracing.graph.program import Program, build_program, signature_of
from compressor.tracing.graph.recorder import Recorder
from compressor.tracing.graph.refusal import Refusal, current_frames, one_line
from compressor.tracing.isolation import ModuleValues, RandomState
from compressor.tracing.out_of_memory import is_out_of_memory


def record(
    model: nn.Module, batch: Batch, targets: Mapping[str, nn.Module], groups: Mapping[str, int], leaves: Sequence[LeafFunction]
) -> Program:
    """Run the forward of a model once and record it.

    Args:
        model: as it was afterwards.
        batch: on the device of the model; not modified.
        targets: dotted name to module.
        groups: target to the number of the stage it shares.
        leaves: functions to record as one node.

    Returns:
        The program of this batch.

    Raises:
        Refusal: the forward does what a graph cannot repeat.
    """
    batch = copy_batch(batch)
    values, outside = ModuleValues(), RandomState.current(foreign=True)
    with torch.no_grad():
        recorder = Recorder(model, targets)
    try:
        given = _bind_inputs(recorder, batch)
        with recording(recorder, leaves, values):
            output = _run(model, given)
            with recorder.opaque():
                recorder.surroundings.check()
                recorder.weights.check()
                encoded = recorder.encoder.encode(output)
            reassigned = {f"{recorder.names.get(id(module), '?')}.{name}".lstrip(".") for module, name in values.noted()}
    finally:
        outside.restore()
    return build_program(recorder, encoded, signature_of(batch), groups, reassigned)


def _run(model: nn.Module, batch: Batch) -> Any:
    try:
        return call_model(model, batch)
    except TracingError:
        raise
    except Exception as error:  # the model's own code raises what it likes
        if is_out_of_memory(error):
            raise
        # Whatever the forward cannot do with symbolic numbers; a plain forward tells whether the model is to blame.
        raise Refusal(
            f"forward: while it was recorded, {one_line(error)}; write int(...) around a size or .item() value handed to code in C, "
            'or use engine="suspend"',
            current_frames(),
        ) from error


def _bind_inputs(recorder: Recorder, batch: Batch) -> Batch:
    bound: dict[str, Any] = {}
    with recorder.opaque():
        for name, item in named_inputs(batch).items():
            if is_tensor(item):
                node = recorder.emit("placeholder", str(name))
                bound[name] = recorder.binder.bind(node, item)
            else:
                bound[name] = item  # part of the signature
    return bound if isinstance(batch, dict) else tuple(bound.values())


def copy_batch(batch: Batch) -> Batch:
    """Copy a batch for a graph, in which every input has a node of its own.

    Args:
        batch: not modified.

    Returns:
        A copy; a tensor that stands in two places becomes two that look at one memory.
    """
    seen: set[int] = set()

    def apart(item: Any) -> Any:
        if not is_tensor(item) or id(item) not in seen:
            seen.add(id(item))
            return item
        return item.detach()

    copied = copied_batch(batch)
    return {name: apart(item) for name, item in copied.items()} if isinstance(copied, dict) else tuple(map(apart, copied))


def named_inputs(batch: Batch) -> dict[str, Any]:
    """Name the values of a batch as the placeholders of a program do.

    Args:
        batch: dict or tuple.

    Returns:
        Name to value.
    """
    if isinstance(batch, dict):
        return {str(name): item for name, item in batch.items()}
    return {f"arg_{number}": item for number, item in enumerate(batch)}
