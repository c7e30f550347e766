"""The fixtures: what a test can ask for. Each imports what it needs when it is asked for."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from harness.plugin.options import folder_setting, setting
from harness.reporting.verdict import Verdict

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from harness.goldens.golden import Golden
    from harness.lifecycle.report import VerifyReport
    from harness.modules.contract import ModuleReport
    from harness.nightly import Judgement
    from harness.nightly.measurement import Better
    from harness.replay.equivalence.compare import Equivalence
    from harness.replay.equivalence.run import Batches, Between, Factory


GOLDEN = pytest.StashKey["Golden"]()
"""Where a test's item keeps its `golden`, for the hooks that report."""
_SHARE = "share/compressor-harness/reference/config.json"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Iterator[Golden]:
    """Golden outputs: `golden.check(name, tensors, tier=..., inputs=...)` holds tensors against what was accepted before."""
    from harness.goldens.golden import Golden, GoldenSettings

    config = request.config
    settings = GoldenSettings(
        root=folder_setting(config, "golden_dir"),
        cache=folder_setting(config, "cache_dir") / "golden",
        update=setting(config, "update"),
        reason=setting(config, "reason"),
        add_variant=bool(setting(config, "variant")),
    )
    made = Golden(settings, request.node.nodeid)
    request.node.stash[GOLDEN] = made
    yield made
    made.is_over = True


@pytest.fixture
def tiny_model() -> PreTrainedModel:
    """A fresh Llama of 2 layers and 0.1 M parameters, float32 on the CPU; the same weights on every machine."""
    from harness.goldens.tiny_model import build_tiny_model

    return build_tiny_model()


@pytest.fixture(scope="session")
def reference_model(pytestconfig: pytest.Config) -> Path:
    """The folder of a model that has really learned something: ours (bf16, 5.8 M parameters), or the one that the project names."""
    given = setting(pytestconfig, "reference_model")
    if given:
        folder = pytestconfig.rootpath / given
        if not (folder / "config.json").is_file():
            pytest.fail(f"harness_reference_model: {folder} holds no config.json; name the folder of a checkpoint", pytrace=False)
        return folder
    for folder in _reference_folders(pytestconfig):
        if (folder / "model.safetensors").is_file() and (folder / "config.json").is_file():
            return folder
    pytest.skip("the reference model is not installed; name a checkpoint with --harness-reference-model=DIR or harness_reference_model")


def _reference_folders(config: pytest.Config) -> list[Path]:
    """Where the reference model may lie: in the project under test, in the source tree of the harness, or where pip installed it."""
    source_tree = Path(__file__).resolve().parents[2]
    folders = [folder_setting(config, "golden_dir") / "reference", source_tree / "golden" / "reference"]
    try:
        files = distribution("compressor-harness").files or []
    except PackageNotFoundError:
        files = []
    folders += [Path(str(file.locate())).resolve().parent for file in files if file.as_posix().endswith(_SHARE)]
    return folders


class Verify(Protocol):
    """How the fixture `verify` is called."""

    def __call__(
        self,
        subject: object,
        model: Any = None,
        *,
        inputs: Any = None,
        tags: Sequence[str] = (),
        expected_failures: Mapping[str, str] | None = None,
        checks: Collection[str] | None = None,
    ) -> VerifyReport | ModuleReport:
        """Hold a modifier or a module against its contract; the test fails, with the report, where it does not keep it."""


@pytest.fixture
def verify(request: pytest.FixtureRequest) -> Verify:
    """Hold a modifier against the lifecycle contract, or a torch module against torch's; the test fails with the report as its message."""
    import torch

    def hold(
        subject: object,
        model: torch.nn.Module | None = None,
        *,
        inputs: Any = None,
        tags: Sequence[str] = (),
        expected_failures: Mapping[str, str] | None = None,
        checks: Collection[str] | None = None,
    ) -> VerifyReport | ModuleReport:
        __tracebackhide__ = True
        if isinstance(subject, torch.nn.Module):
            report: VerifyReport | ModuleReport = _verify_module(subject, inputs)
        else:
            from harness.lifecycle.verify import verify as verify_modifier

            report = verify_modifier(subject, model, inputs=inputs, tags=tags, expected_failures=expected_failures, checks=checks)
        request.node.user_properties.append(("harness.verify", f"{report.subject}: {report.verdict.value}"))
        if not report.passed:
            pytest.fail(report.to_text(), pytrace=False)
        return report

    return hold


class AssertStepEquivalent(Protocol):
    """How the fixture `assert_step_equivalent` is called."""

    def __call__(
        self,
        factory: Factory,
        batches: Batches,
        modes: Sequence[str] = ("eager", "capture", "replay"),
        *,
        steps: int | None = None,
        seed: int = 0,
        every: int = 1,
        before_step: Between | None = None,
    ) -> Equivalence:
        """Demand that a training step gives the same bits in every mode; the test fails, with the report, where it does not."""


@pytest.fixture
def assert_step_equivalent(request: pytest.FixtureRequest) -> AssertStepEquivalent:
    """Hold a training step in capture and replay against eager, bit for bit; see `harness.replay.assert_equivalent`."""
    from harness.replay.equivalence.compare import MODES, compare_modes

    def hold(
        factory: Factory,
        batches: Batches,
        modes: Sequence[str] = MODES,
        *,
        steps: int | None = None,
        seed: int = 0,
        every: int = 1,
        before_step: Between | None = None,
    ) -> Equivalence:
        __tracebackhide__ = True
        found = compare_modes(factory, batches, modes, steps=steps, seed=seed, every=every, before_step=before_step)
        request.node.user_properties.append(("harness.replay", found.verdict.value))
        if not found.passed:
            pytest.fail(found.to_text(), pytrace=False)
        return found

    return hold


class AssertNoRegression(Protocol):
    """How the fixture `assert_no_regression` is called."""

    def __call__(self, metric: str, values: Sequence[float], *, better: Better = "lower", device: str = "cpu") -> Judgement:
        """Keep tonight's values of a metric; the test fails where its nights show a change for the worse that nobody accepted.

        Where nights that are enough may hide one, it warns.
        """


@pytest.fixture
def assert_no_regression(request: pytest.FixtureRequest) -> AssertNoRegression:
    """Hold a measurement against its history, and add it; see `harness nightly`."""
    from harness.nightly import History, judge
    from harness.nightly.environment import current_environment

    history = History(folder_setting(request.config, "history"))

    def hold(metric: str, values: Sequence[float], *, better: Better = "lower", device: str = "cpu") -> Judgement:
        __tracebackhide__ = True
        history.add(metric, values, environment=current_environment(device), better=better)
        found = judge(history.series(metric), history.acceptances(metric))
        request.node.user_properties.append(("harness.nightly", f"{metric}: {found.verdict.value}: {found.summary}"))
        if found.verdict is Verdict.REGRESSION:
            night = found.changes[-1].night
            accept = shlex.join(["harness", "nightly", "accept", "--reason", "...", "--history", str(history.path), "--", metric, night])
            pytest.fail(f"{metric}: {found.summary}; if it is meant: {accept}", pytrace=False)
        if found.verdict is Verdict.INCONCLUSIVE and found.is_long:
            request.node.warn(pytest.PytestWarning(f"{metric} is inconclusive: {found.summary}"))
        return found

    return hold


def _verify_module(module: torch.nn.Module, inputs: Any) -> ModuleReport:
    from harness.modules.contract import verify_module

    if inputs is None:
        pytest.fail("verify: a module was given without inputs; give inputs=..., what its forward takes", pytrace=False)
    return verify_module(module, inputs)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device a test works on: what --harness-device says, else CUDA for a test marked `gpu` and the CPU for every other."""
    import torch

    wanted = setting(request.config, "device")
    if request.node.get_closest_marker("gpu") and not wanted.startswith("cuda"):
        wanted = "cuda"
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        pytest.fail(f"--harness-device={wanted}: torch sees no CUDA device; leave it out, or say auto", pytrace=False)
    return torch.device(wanted or "cpu")


@pytest.fixture(scope="session")
def peer_python(pytestconfig: pytest.Config) -> Path:
    """The interpreter given with `--peer-python`; for tests marked `peer`."""
    path = pytestconfig.getoption("--peer-python")
    if path is None:
        pytest.fail("the fixture peer_python needs --peer-python=PATH; mark the test with pytest.mark.peer", pytrace=False)
    return Path(path)
