"""What of a step on a device works on the host all the same, where no captured graph repeats it.

A graph holds kernels and copies of one device. An operator on CPU tensors runs at capture and never again: an optimizer that counts its
steps on the CPU would stand still. A value that a kernel takes from a CPU tensor is frozen, and a copy between host and device either
stops the capture or reads memory that is gone at the replay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_COPIES = frozenset({"aten::_to_copy", "aten::copy_"})


def host_hazard(name: str, device: torch.device, operands: Sequence[tuple[torch.device, bool]], target: torch.device | None) -> str | None:
    """Say what of an operator a graph would not repeat.

    Args:
        name: the operator.
        device: where the step runs.
        operands: for each tensor its device, and whether the step made it. Made on the CPU by an operator of the step, it may hold what
            kernels keep there, such as a seed.
        target: the device that the operator was asked for, or None.

    Returns:
        A clause for a message, or None where nothing is wrong.
    """
    if device.type == "cpu":
        return None
    on_host = [made for place, made in operands if place.type == "cpu"]
    if name == "aten::lift_fresh":  # torch.tensor(...): values of Python, copied to where it was asked for
        return None if on_host else "makes a tensor from Python's values, which would be copied from the host every time"
    if not all(on_host):
        return "works on a tensor on the CPU, which a graph neither repeats nor reads again"
    if name in _COPIES and len(on_host) < len(operands) and (on_host or (target is not None and target.type == "cpu")):
        return "copies between host and device"
    if name in _COPIES and on_host and target is not None and target.type != "cpu":
        return "copies from the host, and the values would be frozen"
    return None
