"""In which precision float32 is multiplied and convolved: torch has one setting for each backend and kind of operator.

`torch.get_float32_matmul_precision()` raises once somebody has set one of them by itself (`torch.backends.cuda.matmul.fp32_precision`).
"""

from __future__ import annotations

from types import MappingProxyType

import torch

_PLACES = (("generic", "all"), *((backend, kind) for backend in ("cuda", "mkldnn") for kind in ("all", "matmul", "conv", "rnn")))
_OLDER_NAMES = MappingProxyType({"ieee": "highest", "tf32": "high", "bf16": "medium"})


def float32_precisions() -> tuple[str, ...]:
    """Return what holds in each place, for `set_float32_precisions`."""
    return tuple(map(_at, _PLACES))


def set_float32_precisions(precisions: tuple[str, ...]) -> None:
    """Put back what `float32_precisions` gave. Changes settings of the process."""
    of_place = dict(zip(_PLACES, precisions, strict=True))
    older = {_OLDER_NAMES[of_place[backend, "matmul"]] for backend in ("cuda", "mkldnn")}
    if len(older) == 1:  # the older setting, over both, has a memory of its own
        torch.set_float32_matmul_precision(older.pop())
    for place, precision in of_place.items():
        for value in ("none", precision):  # none: a place goes on following what is set for all
            if _at(place) != precision:
                torch._C._set_fp32_precision_setter(*place, value)


def matmul_precision(device: torch.device) -> str:
    """Return the precision of products on a device, by the names of `torch.set_float32_matmul_precision`."""
    return _OLDER_NAMES[_at(("cuda" if device.type == "cuda" else "mkldnn", "matmul"))]


def _at(place: tuple[str, str]) -> str:
    """Where nothing is set, all digits count; torch.set_float32_matmul_precision("highest") says so."""
    precision: str = torch._C._get_fp32_precision_getter(*place)
    return "ieee" if precision == "none" else precision
