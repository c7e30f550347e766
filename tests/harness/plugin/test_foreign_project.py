"""The plugin works in a project that is not ours, with nothing but this distribution installed, and the chapter on goldens says how."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

CI_VARIABLES = ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITLAB_CI", "BUILDKITE", "JENKINS_URL", "TEAMCITY_VERSION", "TF_BUILD", "CIRCLECI")

TESTS = """
import pytest, torch
from harness.tolerance import T1, T3

def test_golden_and_tiny_model(golden, tiny_model, device):
    ids = torch.arange(24, device=device).reshape(2, 12)
    with torch.no_grad():
        logits = tiny_model.to(device)(ids).logits
    golden.check("tiny/logits", logits, tier=T1(64, at="tensor"), elsewhere=T3(min_sqnr_db=60), inputs={"ids": ids}, reason="sums")

def test_tiny_model_is_fresh_and_leaves_the_random_numbers_alone(tiny_model, request):
    before = torch.get_rng_state()
    from harness.goldens.tiny_model import build_tiny_model
    other = build_tiny_model()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(tiny_model.parameters(), other.parameters(), strict=True))
    assert sum(p.numel() for p in tiny_model.parameters()) < 200_000

def test_reference_model(reference_model):
    assert (reference_model / "model.safetensors").is_file() and (reference_model / "heldout.safetensors").is_file()

def test_verify_module(verify):
    verify(torch.nn.Linear(4, 3), inputs=torch.rand(2, 4))

def test_verify_modifier(verify):
    from compressor import QuantizationModifier
    verify(QuantizationModifier(scheme="W8A16"), checks=["lifecycle.completes"])

def test_verify_fails_for_a_module_that_does_not_keep_the_contract(verify):
    class Forgetful(torch.nn.Linear):
        def forward(self, x):
            self.train()
            return super().forward(x) + torch.rand(())
        def state_dict(self, *args, **kwargs):
            return {}
    verify(Forgetful(4, 3), inputs=torch.rand(2, 4))

@pytest.mark.gpu
def test_gpu(device): assert device.type == "cuda"
@pytest.mark.nightly
def test_nightly(): assert False
@pytest.mark.release
def test_release(): assert False
@pytest.mark.peer
def test_peer(peer_python): assert False
@pytest.mark.check(20)
def test_check(): pass
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Path:
    """A folder as pip leaves it: both packages, the data, and the metadata with the entry point of pyproject.toml."""
    site = tmp_path_factory.mktemp("site")
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())
    info = site / "compressor_harness-0.1.0.dist-info"
    info.mkdir()
    for package in ("compressor", "harness"):
        (site / package).symlink_to(repo_root / package)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: compressor-harness\nVersion: 0.1.0\n")
    entries = project["project"]["entry-points"]["pytest11"]
    (info / "entry_points.txt").write_text("[pytest11]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items()))
    return site


def _run(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in CI_VARIABLES and not name.startswith("PYTEST")}
    # What other plugins are installed, and load or say, is no matter of ours; this one is found by its entry point.
    environment |= {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "compressor_harness", "-p", "no:cacheprovider", "-rsf", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.nightly
def test_every_fixture_and_marker_in_a_foreign_project(site: Path, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers --strict-config\nharness_cache_dir = .left_over\n")
    (tmp_path / "test_theirs.py").write_text(TESTS)
    done = _run(site, tmp_path, "--golden-update=new")
    assert "1 failed, 6 passed, 4 skipped" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_theirs.py::test_verify_fails_for_a_module_that_does_not_keep_the_contract" in done.stdout
    assert "written: tiny/logits: created" in done.stdout
    for reason in ("no CUDA device", "--harness-profile=nightly", "--harness-profile=release", "--peer-python"):
        assert reason in done.stdout
    assert (tmp_path / "golden" / "tiny" / "logits.safetensors").is_file()


def test_start_up_imports_nothing_heavy(site: Path, tmp_path: Path) -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'matplotlib', 'safetensors', 'pydantic', 'rich'}"
    (tmp_path / "test_light.py").write_text(f"import sys\ndef test_light():\n    assert not {heavy} & set(sys.modules)\n")
    done = _run(site, tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_a_reference_model_that_is_not_there_is_an_error_and_a_named_one_is_used(site: Path, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(reference_model): assert reference_model.name == 'theirs'\n")
    done = _run(site, tmp_path, "--harness-reference-model=nowhere")
    assert "holds no config.json; name the folder of a checkpoint" in done.stdout
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text("{}")
    (tmp_path / "pytest.ini").write_text("[pytest]\nharness_reference_model = theirs\n")
    assert "1 passed" in _run(site, tmp_path).stdout


@pytest.mark.nightly
def test_the_chapter_of_the_goldens_is_enough(site: Path, tmp_path: Path, repo_root: Path) -> None:
    """Do literally what harness/goldens/README.md says, in an empty folder."""
    chapter = (repo_root / "harness" / "goldens" / "README.md").read_text()
    test = re.search(r"```python\n(.*?)```", chapter, re.DOTALL)
    assert test is not None
    (tmp_path / "test_attention.py").write_text(test.group(1))
    outputs = []
    for command in re.findall(r"^(pytest\b[^#\n]*)", chapter, re.MULTILINE):
        outputs.append(_run(site, tmp_path, *command.split()[1:]).stdout)
    assert len(outputs) == 2
    assert "written: attention/causal: created" in outputs[0]
    assert "1 passed" in outputs[1]
