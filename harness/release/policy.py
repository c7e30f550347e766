"""What a release must show: required checks, limits, what runs outside of this process, and waivers that end."""

from __future__ import annotations

import re
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from compressor.errors import UserInputError
from harness.settings_file import SettingsPart, check_command, read_settings
from harness.validation.policy import Policy, Positive, Share

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
Told = Annotated[str, Field(min_length=1, pattern=r"\S")]
_PLACES = ("base", "compressed", "python")
DEFAULT = "default"
"""The policy without a file."""


def is_waivable(name: str) -> bool:
    """Whether a check can be waived: not those that say whether the policy itself is kept."""
    return not name.startswith("policy.")


class Waiver(SettingsPart):
    """A check that may fail until a day."""

    reason: Told
    """Why; shown on the page."""
    until: date
    """The last day on which it counts."""

    @field_validator("until", mode="before")
    @classmethod
    def _is_a_day(cls, until: object) -> object:
        """Pydantic takes a number for seconds since 1970, and midnights for days."""
        if type(until) is date or (isinstance(until, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", until)):
            return until
        raise ValueError("write a day as YYYY-MM-DD")


class GenerationLimits(SettingsPart):
    """What is generated, and how far two ways to one result may part."""

    prompts: Annotated[int, Field(ge=2, le=256)] = 4
    """The first so many held-out sequences."""
    prompt_tokens: Annotated[int, Field(ge=8)] = 16
    new_tokens: Annotated[int, Field(ge=16)] = 32
    long_context: Annotated[int, Field(ge=32)] = 4096
    """Tokens at most; never more than the model has positions."""
    max_extra_loops: Share = 0.25
    """Share of prompts on which the checkpoint falls into a loop and the base does not."""
    max_deviation: Positive = 1e-3
    """Largest difference of two ways to one logit in float32, relative to the largest logit."""
    max_dtype_deviation: Positive = 0.1
    """The same between float32 and the dtype of the config."""


class ReleasePolicy(SettingsPart):
    """Everything a release is held against. Paths are relative to the file."""

    required: tuple[Told, ...] = (
        *("files.config", "files.shards", "files.tensors", "files.safe", "files.stable"),
        *("format.accepted", "format.loads", "behaviour.*", "tokenizer.vocabulary", "tokenizer.special_tokens", "tokenizer.settings"),
        *("generation.*", "invariance.*", "reload.*"),
    )
    """Names or patterns of checks that must have looked: one that is skipped fails."""
    waivers: dict[str, Waiver] = Field(default_factory=dict)
    """By the name of the check that may fail."""
    dataset: str | None = None
    """Held-out data; `--dataset` goes before it."""
    limits: Policy = Policy()
    """Those of `harness validate`."""
    server: Literal["vllm", "sglang", "none"] = "vllm"
    """Whose loader the files are held against."""
    trained: bool = False
    """It was trained too: values may differ from the base's, behaviour decides."""
    generation: GenerationLimits = GenerationLimits()
    environments: dict[Name, Path] = Field(default_factory=dict)
    """Name, such as oldest and newest, to a Python interpreter with transformers and compressed-tensors of its own."""
    vllm: Path | None = None
    """The Python interpreter that has vLLM, if the server itself shall write."""
    commands: dict[Name, str] = Field(default_factory=dict)
    """Name to a command line, which exits with 0 (pass), 1 (fail) or another number (cannot tell): servers, tasks, ONNX. `{base}`,
    `{compressed}` and `{python}` (of this process) stand for what they say."""
    tasks: dict[Name, Path] = Field(default_factory=dict)
    """Name to a task file of lm-evaluation-harness, in whose folder it runs; both models answer, and what is lost is held against
    `limits.max_accuracy_drop`."""
    evaluator: Path | None = None
    """The Python interpreter that has lm-evaluation-harness, if it is not this one."""
    minutes: Positive = 60.0
    """That each environment, vLLM, each command and each task may take a model."""

    @field_validator("waivers")
    @classmethod
    def _waivable(cls, waivers: dict[str, Waiver]) -> dict[str, Waiver]:
        for name in waivers:
            if not is_waivable(name):
                raise ValueError(f"{name} says whether this policy is kept, and cannot be waived")
        return waivers

    @field_validator("commands")
    @classmethod
    def _known_places(cls, commands: dict[str, str]) -> dict[str, str]:
        for name, line in commands.items():
            check_command(name, line, _PLACES)
        return commands

    def requires(self, check: str) -> bool:
        """Say whether a check must have looked.

        Args:
            check: its name.

        Returns:
            Whether it must.
        """
        return any(fnmatchcase(check, pattern) for pattern in self.required)


def load_release_policy(path: str | Path | None) -> ReleasePolicy:
    """Read a policy; what it does not name keeps its default.

    Args:
        path: a YAML mapping; None, or the word `default`, for the built-in one.

    Returns:
        The policy, its paths made absolute.

    Raises:
        UserInputError: there is no such file, or it names or gives something that is not allowed.
    """
    if path is None or str(path) == DEFAULT:
        return ReleasePolicy()
    path = Path(path)
    if not path.is_file():
        raise UserInputError(f"{path}: no such policy file; name one, or write --policy {DEFAULT}")
    policy, root = read_settings(path, ReleasePolicy, "setting"), path.absolute().parent
    beside = policy.dataset is not None and (root / policy.dataset).exists()
    return policy.model_copy(
        update={
            "dataset": str(root / policy.dataset) if beside and policy.dataset else policy.dataset,
            "environments": {name: root / python.expanduser() for name, python in policy.environments.items()},
            "tasks": {name: root / task.expanduser() for name, task in policy.tasks.items()},
            "vllm": policy.vllm and root / policy.vllm.expanduser(),
            "evaluator": policy.evaluator and root / policy.evaluator.expanduser(),
        }
    )
