"""A linear layer that does more than multiply is refused; one that only spells the product differently is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from compressor import QuantizationModifier, oneshot, plan
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


class _ScaledByParameter(nn.Linear):
    def __init__(self, inputs: int, outputs: int, device: str = "cpu") -> None:
        super().__init__(inputs, outputs, device=device)
        self.scale = nn.Parameter(torch.full((1,), 2.0, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_scaled_product_is_seen_with_and_without_weights(device: str) -> None:
    with pytest.raises(TargetError, match="_Scaled"):
        check_linear_forwards({"layer": _Scaled(8, 4, device=device)})
    check_linear_forwards({"layer": _ScaledByParameter(8, 4, "meta")})  # by what, nobody knows


@pytest.mark.parametrize("kind", [_Scaled, _ScaledByParameter])
def test_a_plan_of_a_model_in_memory_refuses_what_a_run_refuses(kind: type[nn.Linear]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), kind(8, 4)).eval()
    recipe = {"q_modifiers": {"QuantizationModifier": {"scheme": "W8A8", "targets": ["Linear"]}}}
    for verb in (plan, oneshot):
        with pytest.raises(TargetError, match=f"1: 1 targets of class {kind.__name__} are linear layers whose forward does more"):
            verb(model, recipe=recipe)
    assert plan(model, recipe={"q_modifiers": {"QuantizationModifier": {"scheme": "W8A8", "targets": ["0"]}}}).modules


def test_a_recipe_for_all_linear_layers_stops_at_a_router() -> None:
    model = nn.Sequential(nn.Linear(8, 8), _Router(8, 4))
    with pytest.raises(TargetError, match="add _Router to ignore"):
        QuantizationModifier(scheme="W8A8").resolve(model)
    assert list(QuantizationModifier(scheme="W8A8", ignore=["_Router"]).resolve(model)) == ["0"]
