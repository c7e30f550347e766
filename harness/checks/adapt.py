"""From the objects that people have to subjects of the catalogue."""

from __future__ import annotations

import importlib
from typing import Any

from compressor.errors import UserInputError
from harness.checks.catalogue import KINDS


def adapt(subject: object) -> Any:
    """Return a subject of the catalogue.

    Args:
        subject: one already, or an object of a library that we know.

    Returns:
        An object with `kind`, `name`, `tags` and what the protocol of its kind asks.

    Raises:
        UserInputError: it is neither.
    """
    if isinstance(subject, type):
        return adapt(_made(subject))
    kind = getattr(subject, "kind", None)
    if isinstance(kind, str) and kind in KINDS:
        _check_members(subject, kind)
        return subject
    for path, adapter in _ADAPTERS.items():
        if any(f"{cls.__module__}.{cls.__qualname__}" == path for cls in type(subject).__mro__):
            module, _, name = adapter.partition(":")
            return getattr(importlib.import_module(module), name)(subject)
    known = ", ".join(f"{kind} ({protocol})" for kind, protocol in KINDS.items())
    raise UserInputError(
        f"check: {type(subject).__name__} is nothing that can be checked; give it a `kind`, one of {known}, and the members of that "
        "protocol in harness.checks.protocols"
    )


# Class -> the function or class that makes a subject of its objects.
_ADAPTERS = {
    "compressor.numerics.scheme.QuantizationArgs": "harness.checks.adapters_ours:OurQuantizer",
    "compressor.numerics.scheme.QuantizationScheme": "harness.checks.adapters_ours_runtime:OurLayer",
    "compressed_tensors.quantization.quant_args.QuantizationArgs": "harness.checks.adapters_compressed_tensors:ForeignQuantizer",
}


def _made(cls: type) -> object:
    try:
        return cls()
    except TypeError as error:
        raise UserInputError(f"check: {cls.__qualname__} cannot be made without arguments ({error}); give an object of it") from error


def _check_members(subject: object, kind: str) -> None:
    """Refuse a subject that lacks what its protocol asks."""
    from harness.checks import protocols

    wanted = protocols.members(getattr(protocols, KINDS[kind]))
    missing = [name for name in wanted if not hasattr(subject, name)]
    if missing:
        raise UserInputError(
            f"check: {type(subject).__name__} is a {kind} without {', '.join(missing)}; see harness.checks.protocols.{KINDS[kind]}"
        )
