"""Calibration calls that end early: as soon as every watched module has been seen, the rest of the target need not run."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NoReturn

from torch import nn

from compressor.errors import CalibrationError
from compressor.tracing.sample import Sample, running_sample

# Watched modules by name: True where a hook needs the module's output, False where its input is enough.
Watched = Mapping[str, bool]


class Enough(BaseException):
    """Ends a calibration call whose watched modules have all been seen; no `except Exception` of a model may catch it."""


@contextlib.contextmanager
def cutting(model: nn.Module, watched: Watched) -> Iterator[None]:
    """End calibration calls once each watched module has been seen; works through hooks behind all that are there already.

    Args:
        model: the model; carries the hooks for the duration.
        watched: the modules to wait for.

    Yields:
        Nothing.
    """

    def see(name: str) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            del args
            sample = running_sample()
            if sample is not None:
                sample.unseen.discard(name)
                if not sample.unseen:
                    raise Enough

        return hook

    with ExitStack() as hooks:
        for name, needs_output in watched.items():
            module = model.get_submodule(name)
            handle = module.register_forward_hook(see(name)) if needs_output else module.register_forward_pre_hook(see(name))
            hooks.callback(handle.remove)
        yield


def complain(sample: Sample, target: str, assumed: Counter[str]) -> NoReturn:
    """End a run whose calibration pass stopped too early: the real call went another way than that of the first sample.

    Args:
        sample: that made the real call; the error appears in the caller of its `advance`.
        target: dotted name.
        assumed: how often each watched module was called in the first sample's calibration call.
    """
    odd = sorted(name for name in assumed.keys() | sample.calls.keys() if assumed[name] != sample.calls[name])
    told = ", ".join(f"{name} {sample.calls[name]}x instead of {assumed[name]}x" for name in odd)
    sample.escape(
        CalibrationError(
            f"{target or 'the model'}: batch {sample.index} calls {told}, unlike the first batch, so the calibration pass, which stopped "
            'early, missed calls; use pipeline="basic" or ignore these modules'
        )
    )
