"""Where the random generators stand, and how they get back there: whoever must leave them as they were asks here.

What costs: torch's state of a CPU is a copy of 5 kB; those of Python and numpy, in a form that can be compared, take a tenth of a
millisecond, so that they are left out where nobody needs them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
Devices = torch.device | Literal["used", "all"]


class ForeignRandom(NamedTuple):
    """The states of the generators of Python and numpy, as their own functions take them; two of them can be compared.

    Attributes:
        python: of the module `random`.
        numpy: of `numpy.random`.
    """

    python: Any
    numpy: Any

    def restore(self) -> None:
        """Make the two generators continue from here."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)


def foreign_random() -> ForeignRandom:
    """Return the states of the generators of Python and numpy.

    Returns:
        A copy.
    """
    state: Any = np.random.get_state()
    if isinstance(state, tuple):
        name, keys, *rest = state
        state = (name, tuple(keys.tolist()), *rest)
    return ForeignRandom(random.getstate(), state)


class RandomState(NamedTuple):
    """The states of torch's default generators, of Python's and numpy's where asked, and of generators that somebody names.

    Attributes:
        by_device: the default generators of torch; `cpu` comes first.
        foreign: of Python and numpy; None where they were not asked for.
        named: of the generators that were given, in their order.
    """

    by_device: Mapping[str, Tensor]
    foreign: ForeignRandom | None = None
    named: tuple[Tensor, ...] = ()

    @classmethod
    def current(cls, *, foreign: bool, devices: Devices = "used", generators: Sequence[torch.Generator] = ()) -> RandomState:
        """Copy the states as they are now.

        Args:
            foreign: those of Python and numpy too.
            devices: beside the CPU: one device; the GPUs, once they are in use; or all GPUs, which brings CUDA up.
            generators: further ones.

        Returns:
            The copy.
        """
        states = {"cpu": torch.get_rng_state()}
        if isinstance(devices, torch.device):
            if devices.type == "cuda":
                states[str(devices)] = torch.cuda.get_rng_state(devices)
        elif torch.cuda.is_available() if devices == "all" else torch.cuda.is_initialized():
            states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
        named = tuple([generator.get_state() for generator in generators]) if generators else ()
        return cls(states, foreign_random() if foreign else None, named)

    def restore(self, generators: Sequence[torch.Generator] = ()) -> None:
        """Make the generators continue from here.

        Args:
            generators: those that were given to `current`.
        """
        for device, state in self.by_device.items():
            if device == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)
        if self.foreign is not None:
            self.foreign.restore()
        for generator, state in zip(generators, self.named, strict=True):
            generator.set_state(state.clone())

    def equals(self, other: RandomState) -> bool:
        """Say whether all generators stand at the same place.

        Args:
            other: of the same generators.

        Returns:
            False also where one of the two knows a generator that the other does not.
        """
        mine, its = ({**state.by_device, **dict(enumerate(state.named))} for state in (self, other))
        return self.foreign == other.foreign and mine.keys() == its.keys() and all(torch.equal(mine[key], its[key]) for key in mine)


@contextmanager
def random_numbers_kept(*, foreign: bool = True, devices: Devices = "used") -> Iterator[None]:
    """Leave the default generators as they were, whatever is drawn or seeded in the block.

    Args:
        foreign: those of Python and numpy too.
        devices: as in `RandomState.current`; `all` where the block may be the first to use a GPU.

    Yields:
        Nothing.
    """
    before = RandomState.current(foreign=foreign, devices=devices)
    try:
        yield
    finally:
        before.restore()


def generator_state(generator: Any) -> Any:
    """Return where one generator stands.

    Args:
        generator: of torch, Python or numpy.

    Returns:
        What `set_generator_state` takes; None where it has no state, as that of the operating system.
    """
    if isinstance(generator, random.Random):
        try:
            return generator.getstate()
        except NotImplementedError:
            return None
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if isinstance(generator, torch.Generator) else generator.get_state(legacy=False)


def set_generator_state(generator: Any, state: Any) -> None:
    """Put one generator back. Changes it.

    Args:
        generator: of torch, Python or numpy.
        state: of `generator_state`.
    """
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def same_state(one: Any, other: Any) -> bool:
    """Compare two states of one generator.

    Args:
        one: of `generator_state`.
        other: of the same generator.

    Returns:
        True if it stands where it stood.
    """
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return all(same_state(one[key], other[key]) for key in one)
    return all(map(same_state, one, other)) if isinstance(one, tuple) else bool(one == other)
