"""Settings that recipes written by llm-compressor carry and that mean nothing here: accepted where they ask for what happens anyway.

llm-compressor writes every default of a modifier into the recipe it saves. A value that asks for something else is refused by name, so
that no setting is dropped that would have changed the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from compressor.errors import SchemeError

# Setting -> the values that ask for what happens anyway; None: any value, since it changes how the work is split but no result.
FOREIGN_SETTINGS: Mapping[str, tuple[Any, ...] | None] = MappingProxyType(
    {
        "batched_quantization": None,
        "bypass_divisibility_checks": (False,),
        "offload_hessians": None,
        "output_observer": (None,),
        "requires_calibration_data": (True, False),
        "sequential_update": (True, None),
    }
)
OBSERVER_FIELDS: Mapping[str, str] = MappingProxyType({"weights": "weight_observer", "input": "input_observer"})


def own_settings(data: Mapping[str, Any], modifier: str) -> dict[str, Any]:
    """Translate the settings of a modifier as llm-compressor writes them.

    Args:
        data: setting name to value; not modified.
        modifier: class name, for errors only.

    Returns:
        Settings of ours: foreign ones are gone, `observer: {weights: mse}` has become `weight_observer: mse`.

    Raises:
        SchemeError: a foreign setting asks for something that is not done here.
    """
    own = dict(data)
    for name, values in FOREIGN_SETTINGS.items():
        if name in own and values is not None and own[name] not in values:
            raise SchemeError(f"{modifier}.{name}: {own[name]!r} asks for something that is not done here; leave it out")
        own.pop(name, None)
    observers = own.pop("observer", None)
    if observers is None:
        return own
    if not isinstance(observers, Mapping) or not set(observers) <= set(OBSERVER_FIELDS):
        raise SchemeError(
            f"{modifier}.observer: {observers!r} is no mapping of {' and '.join(OBSERVER_FIELDS)} to observers; give such a one"
        )
    return own | {OBSERVER_FIELDS[kind]: observer for kind, observer in observers.items()}
