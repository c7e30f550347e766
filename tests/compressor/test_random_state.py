from __future__ import annotations

import random

import numpy as np
import torch

from compressor.random_state import RandomState, generator_state, random_numbers_kept, same_state, set_generator_state


def _draws() -> list[float]:
    return [torch.rand(()).item(), random.random(), float(np.random.rand())]


def test_generators_continue_where_they_stood_before_the_block() -> None:
    with random_numbers_kept():
        expected = _draws()
    with random_numbers_kept():
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        _draws()
    assert _draws() == expected


def test_a_block_that_raises_puts_them_back_as_well() -> None:
    before = RandomState.current(foreign=True)
    try:
        with random_numbers_kept():
            _draws()
            raise KeyError
    except KeyError:
        assert RandomState.current(foreign=True).equals(before)


def test_a_state_sees_each_of_its_generators_move() -> None:
    own = torch.Generator().manual_seed(1)
    start = RandomState.current(foreign=True, generators=[own])
    for draw in (lambda: torch.rand(1), random.random, np.random.rand, lambda: torch.rand(1, generator=own)):
        draw()
        assert not RandomState.current(foreign=True, generators=[own]).equals(start)
        start.restore([own])
        assert RandomState.current(foreign=True, generators=[own]).equals(start)
    assert not RandomState.current(foreign=True).equals(start), "it knows one generator less"


def test_what_nobody_asked_for_is_left_alone() -> None:
    start = RandomState.current(foreign=False, devices=torch.device("cpu"))
    assert [*start.by_device] == ["cpu"] and start.foreign is None
    state = random.getstate()
    random.random()
    start.restore()
    assert random.getstate() != state


def test_one_generator_of_any_library_goes_back() -> None:
    for generator in (random.Random(1), np.random.default_rng(1), np.random.RandomState(1), torch.Generator()):
        state = generator_state(generator)
        draw = generator.random if hasattr(generator, "random") else lambda: torch.rand(1, generator=generator)  # noqa: B023
        draw()
        assert not same_state(generator_state(generator), state)
        set_generator_state(generator, state)
        assert same_state(generator_state(generator), state)
