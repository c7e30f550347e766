"""A training inside its caller's no_grad or inference mode is the training outside of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from compressor import train
from compressor.errors import UserInputError
from tests import tiny

ROWS = torch.arange(256).reshape(16, 16) % 64


def losses(model: Any) -> list[float]:
    return list(train(model, dataset=ROWS, steps=2, batch_size=2, max_seq_length=16).losses)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_caller_without_gradients_trains_the_same(mode: Any) -> None:
    model, other = tiny.gpt2(n_positions=32, n_layer=1, n_head=2), tiny.gpt2(n_positions=32, n_layer=1, n_head=2)
    other.load_state_dict(model.state_dict())
    expected = losses(model)
    with mode():
        assert losses(other) == expected


def test_what_was_made_in_inference_mode_is_not_trained() -> None:
    with torch.inference_mode():
        model = tiny.gpt2(n_positions=32, n_layer=1, n_head=2)
    with pytest.raises(UserInputError, match=r"was made under torch.inference_mode"):
        losses(model)
    assert losses(copy.deepcopy(model))
