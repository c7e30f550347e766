"""A golden of one instruction set is held to its declared tier on another, and says so; variants of several stand side by side."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.errors import GoldenError
from harness.goldens import golden as golden_module
from harness.goldens.golden import GoldenMismatch
from harness.goldens.store.manifest import read_manifest
from harness.goldens.store.provenance import Platform, current_platform, nearest
from harness.tolerance import T1, T3

AVX512, AVX2 = Platform("cpu", "x86_64", "AVX512"), Platform("cpu", "x86_64", "AVX2")
NEON, H100 = Platform("cpu", "aarch64", "NEON"), Platform("cuda", "sm_90", "cuda12.8")
CPU, GPU, CLOSE, FAR = torch.arange(1.0, 9.0), torch.arange(1.0, 9.0), torch.arange(1.0, 9.0), torch.arange(1.0, 9.0)
CLOSE[3] = torch.nextafter(CLOSE[3], torch.tensor(9.0))
FAR[3] += 0.01


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch):
    """Work on another platform."""

    def switch(platform: Platform) -> None:
        monkeypatch.setattr(golden_module, "current_platform", lambda device="cpu": platform)

    return switch


@pytest.mark.parametrize(
    ("here", "offered", "chosen"),
    [
        (AVX2, [H100, NEON, AVX512, AVX2], AVX2),
        (AVX2, [H100, NEON, AVX512], AVX512),
        (AVX2, [H100, NEON], NEON),
        (AVX2, [H100], H100),
        (H100, [AVX2, Platform("cuda", "sm_80", "cuda12.8"), NEON], Platform("cuda", "sm_80", "cuda12.8")),
        (Platform("cpu", "aarch64", "DEFAULT"), [Platform("cpu", "x86_64", "DEFAULT"), NEON], NEON),
    ],
    ids=str,
)
def test_the_nearest_platform_wins_whatever_the_order(here: Platform, offered: list[Platform], chosen: Platform) -> None:
    for order in itertools.permutations(offered):
        assert order[nearest(here, order)] == chosen


def test_ties_are_broken_by_name_not_by_order() -> None:
    offered = [Platform("cpu", "x86_64", "DEFAULT"), AVX512]
    assert offered[nearest(AVX2, offered)] == offered[::-1][nearest(AVX2, offered[::-1])]


def test_elsewhere_the_declared_tier_applies_and_is_told(shelf, on) -> None:
    limits = {"elsewhere": T1(2)}
    on(AVX512)
    shelf.write("x", CPU, **limits)
    assert shelf.check("x", CLOSE, **limits)["verdict"] == "outputs regressed", "at home every bit counts"
    on(AVX2)
    found = shelf.check("x", CLOSE, **limits)
    assert found["verdict"] == "pass"
    assert (
        found["note"]
        == "accepted on cpu-x86_64-AVX512, checked on cpu-x86_64-AVX2; held to the tier for elsewhere, T1(max_ulp=2), in place of T0()"
    )
    assert shelf.check("x", CPU, **limits)["note"], "told even where the bits are the same"
    assert shelf.check("x", FAR, **limits)["verdict"] == "outputs regressed"


def test_elsewhere_nothing_is_loosened_that_was_not_declared(shelf, on) -> None:
    on(AVX512)
    shelf.write("x", CPU)
    on(NEON)
    found = shelf.check("x", CLOSE)
    assert found["verdict"] == "outputs regressed"
    assert "no tier is declared for elsewhere, so it stays T0(): declare elsewhere=..., or add" in found["message"]
    assert shelf.check("x", CPU)["verdict"] == "pass"


def test_inputs_that_another_instruction_set_draws_otherwise_are_no_regression(shelf, on) -> None:
    on(AVX512)
    shelf.write("x", CPU, inputs={"noise": CPU})
    on(AVX2)
    found = shelf.check("x", FAR, inputs={"noise": CLOSE})
    assert found["verdict"] == "inputs drifted"
    assert "torch.randn draws other numbers on another instruction set" in found["message"]
    on(AVX512)
    assert "randn" not in shelf.check("x", FAR, inputs={"noise": CLOSE})["message"]


def test_a_vacuous_tier_for_elsewhere_is_never_written(shelf, on) -> None:
    on(AVX512)
    assert shelf.check("x", CPU, elsewhere=T3(min_sqnr_db=-50.0))["verdict"] == "limit is vacuous"


def test_each_platform_may_have_a_variant_of_its_own(shelf, on) -> None:
    on(AVX512)
    shelf.write("x", CPU)
    on(AVX2)
    shelf.write("x", CLOSE, variant=True)
    assert sorted(name for name in shelf.content() if name != "manifest.json") == ["x.safetensors", "x@cpu-x86-64-avx2.safetensors"]
    assert shelf.check("x", CLOSE)["verdict"] == "pass"
    assert shelf.check("x", CPU)["verdict"] == "outputs regressed"
    on(AVX512)
    assert shelf.check("x", CPU)["verdict"] == "pass"
    assert read_manifest(shelf.root).goldens["x"].history[-1]["what"] == "variant for cpu-x86_64-AVX2"
    before = shelf.content()
    on(AVX2)
    with pytest.raises(GoldenError, match="inputs, recipe or seed differ"):
        shelf.write("x", FAR, variant=True, seed=3)
    assert shelf.content() == before
    shelf.write("x", FAR)
    assert sorted(shelf.content()) == ["manifest.json", "x.safetensors"], "what replaces a golden replaces every variant"


@pytest.mark.parametrize("update", ["new", "failed", "all"])
@pytest.mark.parametrize("own", [CPU, CLOSE], ids=["the same bits", "other bits"])
def test_a_variant_is_added_where_the_check_passes_too(shelf, on, update: str, own: torch.Tensor) -> None:
    limits = {"elsewhere": T1(2)}
    on(AVX512)
    shelf.write("x", CPU, **limits)
    on(AVX2)
    assert shelf.write("x", own, update=update, variant=True, **limits).written == ("x: variant for cpu-x86_64-AVX2, T0()",)
    assert not shelf.check("x", own, **limits)["note"]
    assert shelf.check("x", torch.nextafter(own, torch.zeros(8)), **limits)["verdict"] == "outputs regressed", "now at home: every bit"
    before = shelf.content()
    assert not shelf.write("x", own, update=update, variant=True, **limits).written
    assert shelf.content() == before


def test_what_fails_elsewhere_is_no_missing_variant(shelf, on) -> None:
    on(AVX512)
    shelf.write("x", CPU, elsewhere=T1(2))
    on(AVX2)
    with pytest.raises(GoldenMismatch):
        shelf.write("x", FAR, update="new", variant=True, elsewhere=T1(2))


def test_a_platform_that_comes_to_give_another_ones_bits_is_written(shelf, on) -> None:
    on(AVX512)
    shelf.write("x", CPU)
    on(AVX2)
    shelf.write("x", CLOSE, variant=True)
    on(AVX512)
    shelf.write("x", CLOSE, variant=True)
    for platform in (AVX512, AVX2):
        on(platform)
        assert shelf.check("x", CLOSE)["verdict"] == "pass"
        assert shelf.check("x", CPU)["verdict"] == "outputs regressed"


def test_the_same_bits_on_another_platform_change_nothing(shelf, on) -> None:
    on(AVX512)
    shelf.write("x", CPU)
    on(AVX2)
    assert shelf.write("x", CPU, update="all").unchanged == ("x",)


def test_the_platform_is_that_of_the_device_that_computed(shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    assert current_platform().instruction_set == torch.backends.cpu.get_cpu_capability()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert current_platform("cuda") == H100
    shelf.write("x", CPU, device="cuda", elsewhere=T1(2))
    assert "accepted on cuda-sm_90-cuda12.8, checked on cpu-" in shelf.check("x", CLOSE, elsewhere=T1(2))["note"]
    assert shelf.check("x", CLOSE, elsewhere=T1(2), device="cuda")["verdict"] == "outputs regressed"


def test_tensors_of_several_devices_need_a_word(shelf) -> None:
    both = {"a": torch.ones(1), "b": torch.ones(1, device="meta")}
    with pytest.raises(GoldenError):
        shelf.check("x", both)


_SCRIPT = """
import sys, torch
from pathlib import Path
from harness.goldens.store.candidates import read_candidate
from harness.goldens.golden import Golden, GoldenMismatch, GoldenSettings
from harness.goldens.store.writer import accept
from harness.tolerance import T1
folder, update, declared = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
x = torch.arange(1.0, 4097.0)
golden = Golden(GoldenSettings(folder / "golden", folder / "cache", update), "t::t")
try:
    golden.check("sum", {"sum": torch.exp(-x / 64).sin(), "codes": (x % 7).to(torch.int8)}, inputs={"x": x},
                 elsewhere={"sum": T1(64)} if declared else None, reason="vectors")
except GoldenMismatch:
    pass
if update:
    accept(folder / "golden", [read_candidate(Path(golden.outcomes[0]["candidate"]))])
print(golden.outcomes[0]["verdict"], "|", golden.outcomes[0]["note"])
"""


def _under(capability: str, *arguments: str, repo_root: Path) -> str:
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": str(repo_root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", _SCRIPT, *arguments], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.strip()


@pytest.mark.nightly
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this processor has one instruction set only")
def test_accepted_on_one_real_instruction_set_and_checked_on_another(tmp_path: Path, repo_root: Path) -> None:
    _under("", str(tmp_path), "new", "declared", repo_root=repo_root)
    here = json.loads((tmp_path / "golden" / "manifest.json").read_text())["goldens"]["sum"]["variants"][0]["platform"]["instruction_set"]
    there = _under("default", str(tmp_path), "", "declared", repo_root=repo_root)
    assert there.startswith("pass | accepted on cpu-")
    assert f"{here}, checked on cpu-" in there
    assert "DEFAULT; held to the tier for elsewhere, sum: T1(max_ulp=64)" in there
