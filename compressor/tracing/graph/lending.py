"""Copies of live values for a calibration pass, so that the propagation pass finds them as they were."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from compressor.tracing.isolation import copy_arguments


def copy_live(values: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Copy all that is live, since what a target writes to, and in what way, may depend on the sample.

    Args:
        values: live values by name; not modified.
        model: its modules and tensors are not copied.

    Returns:
        The values; tensors that share memory share it in the copy, too.
    """
    ordered = sorted(values, key=lambda name: not isinstance(values[name], Tensor))  # tensors before the objects that hold them as well
    copies = copy_arguments({name: values[name] for name in ordered}, model)
    return {name: copies[name] for name in values}
