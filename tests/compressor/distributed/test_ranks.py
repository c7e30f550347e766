"""Several processes make what one makes, to the byte; one that fails ends all at once, with one message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor import oneshot
from tests.compressor.distributed import rank_jobs

GROUPED = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}}
STATIC = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}
STATIC |= {"input_activations": {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "observer": "mse"}}
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True, "observer": "mse"}
ATTENTION = {"targets": ["re:.*self_attn$"], "input_activations": KV}
LAYERS = ["re:.*layers.*proj"]
RECIPES: dict[str, dict[str, Any]] = {
    "smoothquant and gptq with static inputs": {
        "SmoothQuantModifier": {},
        "GPTQModifier": {"ignore": ["lm_head"], "config_groups": {"a": STATIC, "b": ATTENTION}, "kv_cache_scheme": KV},
    },
    "awq": {"AWQModifier": {}, "QuantizationModifier": {"ignore": ["lm_head"], "config_groups": {"a": GROUPED}}},
    "sparsegpt by outliers": {
        "SparseGPTModifier": {"sparsity": 0.5, "targets": LAYERS, "sparsity_profile": "owl", "owl_m": 5, "owl_lmbda": 0.08}
    },
    "learned rounding": {"AutoRoundModifier": {"ignore": ["lm_head"], "iters": 4, "config_groups": {"a": GROUPED}}},
    "learned rounding, suspended": {"AutoRoundModifier": {"ignore": ["lm_head"], "iters": 4, "config_groups": {"a": GROUPED}}},
    "gptq, suspended": {"GPTQModifier": {"ignore": ["lm_head"], "config_groups": {"a": GROUPED}}},
    "gptq and training": {"GPTQModifier": {"mode": "best", "ignore": ["lm_head"], "config_groups": {"a": GROUPED}}},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the ranks have: learned values depend on the number of threads in their last digits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def settings(model: Path, recipe: str) -> dict[str, Any]:
    chosen = {"recipe": {"quant_modifiers": RECIPES[recipe]}, "dataset": str(model / "data.safetensors"), "max_seq_length": 96}
    return chosen | ({"engine": "suspend"} if recipe.endswith("suspended") else {})


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("recipe", "size"),
    [
        ("smoothquant and gptq with static inputs", 2),
        ("learned rounding, suspended", 2),
        *(pytest.param(recipe, size, marks=pytest.mark.nightly) for recipe in RECIPES for size in (2, 4)),
    ],
)
def test_any_number_of_ranks_writes_the_same_bytes(model: Path, recipe: str, size: int, tmp_path: Path) -> None:
    alone = oneshot(str(model), output_dir=str(tmp_path / "alone"), progress=False, **settings(model, recipe))
    codes, results, _ = rank_jobs.run(rank_jobs.compress, size, tmp_path / "ranks", str(model), settings(model, recipe))
    assert codes == [0] * size, results
    assert [result["output_dir"] for result in results] == [str(tmp_path / "ranks" / "out")] * size
    assert files(tmp_path / "ranks" / "out") == files(tmp_path / "alone")
    assert all(result["notes"] == alone.report.notes for result in results)
    assert not any(result["in_memory"] for result in results)  # what is finished lies in the run folder, for all ranks of a host
    assert not (tmp_path / "ranks" / "out.partial-run").exists()


def test_ranks_tell_each_other_values_and_add_up_in_one_order(tmp_path: Path) -> None:
    _, (alone,), _ = rank_jobs.run(rank_jobs.talk, 1, tmp_path / "1")
    codes, results, _ = rank_jobs.run(rank_jobs.talk, 4, tmp_path / "4")
    assert codes == [0] * 4
    for rank, told in enumerate(results):
        assert told["ranks"] == [0, 1, 2, 3] and told["first"] == 0
        assert told["long"] == [0, 4000, 8000, 12000, 5000]
        assert told["halves"] == [6 * (other + 0.5) for other in range(4)]
        assert told["rest"] == [[None, True, "x"]] * 4 and told["scales"] == [True] * 4
        assert told["solved"] == [[0, 2], [1, 0], [2, 1]]  # the most expensive first
        assert told["union"] == ["all", "only 0", "only 1", "only 2", "only 3"]
        assert told["everywhere"] == alone["everywhere"]
        assert told["owned"] == (alone["owned"] if rank == 3 else None)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raises", "layer: a planted error; repair it"),
        ("is killed", "was killed, or ended without a word"),
        ("is stopped", "is stopped by a signal"),
    ],
)
def test_a_rank_that_fails_ends_all_in_seconds_with_one_message(how: str, says: str, tmp_path: Path) -> None:
    codes, results, seconds = rank_jobs.run(rank_jobs.fail, 4, tmp_path / "ranks", how)
    survivors = [results[rank] for rank in (0, 2, 3)]
    assert [codes[rank] for rank in (0, 2, 3)] == [0, 0, 0] and seconds < 10
    assert all(one["error"] == "RankError" and one["text"].startswith("rank 1 of 4: ") and says in one["text"] for one in survivors)
    if how == "raises":
        assert results[1]["error"] == "CalibrationError" and results[1]["notes"] == ["rank 1 of 4"]
        assert not any(one["mine"] for one in survivors)  # the one that failed says so
    else:
        assert codes[1] == -9
        assert sum(one["mine"] for one in survivors) == 1


def test_what_cannot_be_shared_out_is_refused_by_its_name(model: Path, tmp_path: Path) -> None:
    codes, results, _ = rank_jobs.run(rank_jobs.disagree, 2, tmp_path / "twice")
    assert codes == [0, 0] and all("called between several stages" in one["text"] for one in results)
    codes, results, _ = rank_jobs.run(rank_jobs.unshared, 2, tmp_path / "own", str(model), settings(model, "awq"))
    assert codes == [0, 0] and all("Own[0]: learns from calibration data" in one["text"] for one in results)
    codes, results, _ = rank_jobs.run(rank_jobs.compress, 3, tmp_path / "three", str(model), settings(model, "awq"))
    assert codes == [0] * 3 and all("start 1, 2, 4 or 8" in one["text"] for one in results)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"max_seq_length": 64}, "data.tokens was "),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"recipe": {"quant_modifiers": RECIPES["awq"]}}, "recipe said "),
    ],
    ids=["data", "seed", "recipe"],
)
def test_a_rank_that_is_asked_for_something_else_ends_all(model: Path, other: dict[str, Any], says: str, tmp_path: Path) -> None:
    chosen = settings(model, "smoothquant and gptq with static inputs")
    codes, results, _ = rank_jobs.run(rank_jobs.compress_otherwise, 2, tmp_path / "ranks", str(model), chosen, other)
    assert codes == [0, 0], results
    assert all("rank 1 was asked for something else than rank 0 (" in one["text"] for one in results), results
    assert all(says in one["text"] for one in results) and not (tmp_path / "ranks" / "out").exists()


def test_the_first_that_is_left_says_what_a_killed_first_rank_has_kept(model: Path, tmp_path: Path) -> None:
    chosen = settings(model, "smoothquant and gptq with static inputs")
    codes, (_, told), _ = rank_jobs.run(rank_jobs.killed_after, 2, tmp_path / "ranks", str(model), chosen, 2, 0)
    assert codes == [-9, 0] and told["mine"] and "rank 0 of 2: was killed" in told["text"]
    assert told["notes"][0].startswith("2 of ") and f"kept in {tmp_path / 'ranks' / 'out.partial-run'}; the same" in told["notes"][0]


@pytest.mark.nightly
def test_another_number_of_ranks_goes_on_where_one_was_killed(model: Path, tmp_path: Path) -> None:
    chosen = settings(model, "smoothquant and gptq with static inputs")
    oneshot(str(model), output_dir=str(tmp_path / "alone"), progress=False, **chosen)
    folder = tmp_path / "ranks"
    codes, results, _ = rank_jobs.run(rank_jobs.killed_after, 2, folder, str(model), chosen, 3)
    assert codes[1] == -9 and results[0]["error"] == "RankError"
    codes, results, _ = rank_jobs.run(rank_jobs.resume, 4, tmp_path / "again", str(model), chosen, str(folder / "out"))
    assert codes == [0] * 4 and all(result["resumed"].startswith("resumed after stage 3 of ") for result in results), results
    assert not any(result["in_memory"] for result in results)
    assert files(folder / "out") == files(tmp_path / "alone")
