"""Queries of attention, seen where attention takes them: after rotary embedding, beside the keys and values that the cache gives back.

transformers hands queries to a function that it looks up by the name in the module's config. `see_queries` gives the module a config with
another name until that lookup: the function of that name shows the queries, takes the config away again, and calls the one that was meant.
Between the two a module may run others, and forwards of several batches may be halfway through it, so what waits stands in a line.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from compressor.errors import TargetError

_NAME = "compressor_queries"  # among the attention functions of transformers
_AWAITED = "_awaited_queries"
_REGISTRY, _LOOKUP = "ALL_ATTENTION_FUNCTIONS", "get_interface"


def shows_queries(attention: nn.Module) -> bool:
    """Tell whether an attention module looks its function up after its keys and values went through the cache.

    Args:
        attention: any module.

    Returns:
        False where its queries cannot be seen: it multiplies them itself.
    """
    forward = _forward(attention)
    code = getattr(forward, "__code__", None)
    names = code.co_names if code is not None else ()  # in the order of first use
    if _LOOKUP not in names or "update" not in names or not hasattr(attention, "config"):
        return False
    return _REGISTRY in forward.__globals__ and names.index("update") < names.index(_LOOKUP)


def see_queries(attention: nn.Module, transform: Callable[[Tensor], Tensor]) -> None:
    """Show the next queries of a module that runs. Changes the module, up to then.

    Args:
        attention: of a kind that `shows_queries`; its keys and values have just gone into the cache.
        transform: takes queries [batch, heads, sequence, D]; what it gives goes on in their place.
    """
    if _AWAITED not in vars(attention):
        functions = _forward(attention).__globals__[_REGISTRY]
        if _NAME not in functions:
            functions.register(_NAME, _attend)
        own: Any = attention.config
        named = copy.copy(own)
        named._attn_implementation_internal = _NAME
        vars(attention).update({_AWAITED: (own, []), "config": named})
    vars(attention)[_AWAITED][1].append(transform)


def _attend(attention: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    if _AWAITED not in vars(attention):
        raise TargetError(
            f"{type(attention).__name__}: multiplies queries and keys more than once in a forward, and queries are seen once; give their "
            "format as kv_cache_scheme, for keys and values alone"
        )
    own, transforms = vars(attention)[_AWAITED]
    transform = transforms.pop(0)
    if not transforms:
        vars(attention).pop(_AWAITED)
    named, attention.config = attention.config, own  # for functions that read it
    try:
        names = _forward(attention).__globals__
        meant = names[_REGISTRY].get_interface(own._attn_implementation, names.get("eager_attention_forward"))
        return meant(attention, transform(query), *args, **kwargs)
    finally:
        if transforms:
            attention.config = named


def _forward(attention: nn.Module) -> Any:
    return inspect.unwrap(type(attention).forward)
