"""The goldens of this project hold: layers, packers, solvers, logits per scheme, stages of the graph engine; and they are tight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.goldens.store.listing import manifests_of, state_of_goldens
from harness.goldens.store.store import GoldenStore
from harness.tolerance import compare, vacuous_decoys
from tests.reference_model.algorithm_cases import ALGORITHMS, elsewhere
from tests.reference_model.layer_cases import ALONE, Result
from tests.reference_model.model_cases import (
    LOGIT_SCHEMES,
    SOLVER_INPUTS,
    SOLVER_SCHEMES,
    SOLVERS,
    graph_stages,
    logits_of,
    rounded,
    solved,
    solved_elsewhere,
    solver_inputs,
)


def _check(golden, name: str, result: Result, elsewhere=None) -> None:
    golden.check(
        name,
        result.tensors,
        tier=result.tier if result.tiers else None,
        elsewhere=elsewhere,
        inputs=result.inputs,
        decoys=result.decoys,
        reason=result.reason,
    )


@pytest.mark.parametrize("name", ALONE)
def test_layers_and_packers(golden, name: str) -> None:
    _check(golden, name, ALONE[name]())


@pytest.fixture
def stored(golden, reference_model: Path):
    """The inputs of the solvers."""
    return golden.inputs(SOLVER_INPUTS, lambda: solver_inputs(reference_model))


@pytest.mark.parametrize("scheme", SOLVER_SCHEMES)
def test_rounding_to_nearest_on_stored_inputs(golden, stored, scheme: str) -> None:
    _check(golden, f"solvers/{scheme} rounded to nearest", rounded(scheme, stored))


@pytest.mark.parametrize("scheme", SOLVER_SCHEMES)
@pytest.mark.parametrize("solver", SOLVERS)
def test_gptq_on_stored_inputs(golden, stored, scheme: str, solver: str) -> None:
    _check(golden, f"solvers/{scheme} {solver}", solved(scheme, solver, stored), elsewhere=solved_elsewhere(scheme))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_on_stored_inputs(golden, stored, name: str) -> None:
    result = ALGORITHMS[name](stored)
    _check(golden, f"algorithms/{name}", result, elsewhere=elsewhere(result))


@pytest.mark.parametrize("scheme", LOGIT_SCHEMES)
def test_logits_of_the_compressed_reference_model(golden, reference_model: Path, scheme: str) -> None:
    _check(golden, f"logits/{scheme}", logits_of(scheme, reference_model))


def test_stages_of_the_graph_engine(golden, tiny_model) -> None:
    _check(golden, "graphs/tiny llama", graph_stages(tiny_model, torch.arange(24).reshape(2, 12)))


def test_the_goldens_are_small_whole_and_nothing_else_lies_there(repo_root: Path) -> None:
    root = repo_root / "golden"
    rows = state_of_goldens(root)
    assert {row["state"] for row in rows if not row["name"].endswith(".safetensors")} == {"ok"}
    assert not [row["name"] for row in rows if row["state"] == "in no manifest"]
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file() and not {"reference", "judges"} & {*path.parts})
    assert size <= 10_000_000
    names = {name for manifest in manifests_of(root) for name in manifest.goldens}
    assert names >= {
        *ALONE,
        SOLVER_INPUTS,
        "graphs/tiny llama",
        *(f"logits/{scheme}" for scheme in LOGIT_SCHEMES),
        *(f"algorithms/{name}" for name in ALGORITHMS),
    }


@pytest.mark.nightly
def test_every_limit_below_bitwise_has_its_reason_and_lets_no_decoy_through(repo_root: Path) -> None:
    store = GoldenStore(repo_root / "golden")
    for manifest in manifests_of(store.root):
        for entry in manifest.goldens.values():
            loose = [tensor for tensor in entry.variants[0].tensors if entry.tier.tier_of(tensor).code != "T0"]
            assert bool(entry.reason) or not (loose or entry.elsewhere), entry.name
            tensors = store.load(entry, entry.variants[0]) if loose or entry.elsewhere else {}
            for name, tensor in tensors.items():
                for tiers in (entry.tier, entry.elsewhere or entry.tier):
                    assert not vacuous_decoys(tensor, tiers.tier_of(name), context=tensors), f"{entry.name}: {name}"


PLANTED = {
    "a swapped nibble": ("packers/int4", "5x131 dim 1", lambda packed: (packed >> 4 & 0x0F0F0F0F) | (packed & 0x0F0F0F0F) << 4),
    "a scale of another row": ("layers/W4A16", "linear 7x384/weight_scale", lambda scale: scale.roll(1, 0)),
    "codes off by one at the end": ("layers/W8A8", "linear 7x33/weight", lambda codes: torch.cat([codes[:, :-1], codes[:, -1:] ^ 1], 1)),
    "zero points of another sign": ("layers/int8 channel asymmetric", "linear 7x33/weight_zero_point", lambda zero: -zero),
    "a mean in place of a sum": ("layers/FP8_DYNAMIC", "linear 7x33/out", lambda out: out / 33),
    "a bias that is left out": ("layers/W8A16", "linear 7x384/out", lambda out: out - 0.2),
    "sums in bf16": ("layers/W4A16", "linear 7x384/out", lambda out: out * (1 + 2**-5)),
    "a transposed fp4 pair": ("packers/fp4", "packed", lambda packed: (packed >> 4) | (packed << 4)),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_does_not_pass_our_goldens(bug: str) -> None:
    name, tensor, wrong = PLANTED[bug]
    result = ALONE[name]()
    right = result.tensors[tensor]
    assert not compare(wrong(right).to(right.dtype), right, result.tier.get(tensor, result.tier["*"]), name=tensor).ok
