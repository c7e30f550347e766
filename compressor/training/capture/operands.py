"""What stands in the arguments of an operator: in tuples, lists and dicts of exactly these types, of which no schema has others.

`torch.utils._pytree` asks every leaf a dozen times what it is, which was a fifth of the time of a capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def operands(arguments: Any) -> list[Any]:
    """List what stands in arguments, however deep, in their order.

    Args:
        arguments: of an operator.

    Returns:
        Tensors, numbers, None and whatever else is no tuple, list or dict.
    """
    kind = type(arguments)
    if kind is tuple or kind is list:
        return [leaf for part in arguments for leaf in operands(part)]
    if kind is dict:
        return [leaf for part in arguments.values() for leaf in operands(part)]
    return [arguments]


def with_operands(arguments: Any, change: Callable[[Any], Any]) -> Any:
    """Make arguments of the same form with other operands.

    Args:
        arguments: of an operator; not changed.
        change: gives the operand in the place of one.

    Returns:
        New tuples, lists and dicts.
    """
    kind = type(arguments)
    if kind is tuple or kind is list:
        return kind([with_operands(part, change) for part in arguments])
    if kind is dict:
        return {key: with_operands(part, change) for key, part in arguments.items()}
    return change(arguments)
