"""A linear layer that does more than multiply is refused; one that only spells the product differently is not."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from compressor import QuantizationModifier
from compressor.errors import TargetError
from compressor.modifiers.schemes.targets import check_linear_forwards


class _Router(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x).topk(1)


class _Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class _Spelled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("kind", "is_refused"), [(_Router, True), (_Spelled, False), (nn.Linear, False)])
def test_only_what_does_more_is_refused(kind: type[nn.Linear], is_refused: bool, device: str) -> None:
    modules = {"layers.0": kind(8, 4, device=device)}
    if is_refused:
        with pytest.raises(TargetError, match=r"layers\.0: 1 targets of class _Router .* add _Router to ignore"):
            check_linear_forwards(modules)
    else:
        check_linear_forwards(modules)


def test_a_scaled_product_is_seen_where_there_are_weights() -> None:
    with pytest.raises(TargetError, match="_Scaled"):
        check_linear_forwards({"layer": _Scaled(8, 4)})


def test_a_recipe_for_all_linear_layers_stops_at_a_router() -> None:
    model = nn.Sequential(nn.Linear(8, 8), _Router(8, 4))
    with pytest.raises(TargetError, match="add _Router to ignore"):
        QuantizationModifier(scheme="W8A8").resolve(model)
    assert list(QuantizationModifier(scheme="W8A8", ignore=["_Router"]).resolve(model)) == ["0"]
