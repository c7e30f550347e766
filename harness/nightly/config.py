"""What `harness nightly run` reads: the matrix of models, recipes, devices and checks, with limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from compressor.errors import UserInputError
from harness.settings_file import SettingsPart, check_command, read_settings

Check = Literal["compress", "validate", "speed"]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
_PLACES = ("model", "recipe", "device", "compressed")


class Data(SettingsPart):
    """Which texts calibrate and which judge."""

    calibration: str
    """Any source that `compressor oneshot --dataset` takes."""
    held_out: str
    """Any source that `harness validate --dataset` takes; the same sequences every night."""
    num_calibration_samples: Annotated[int, Field(ge=1)] = 512
    num_held_out: Annotated[int, Field(ge=8)] = 256
    max_seq_length: Annotated[int, Field(ge=2)] | None = None
    """Tokens of a sequence; None for what the model takes, at most 2048."""


class Limits(SettingsPart):
    """What a cell may use before it is ended."""

    minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    memory_gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Of all its processes together; None for no limit."""


class NightlyConfig(SettingsPart):
    """A nightly run. Paths are relative to the file."""

    models: Annotated[dict[Name, str], Field(min_length=1)]
    """Name to folder, or to a name on the hub."""
    recipes: dict[Name, Path] = Field(default_factory=dict)
    """Name to recipe file."""
    data: Data | None = None
    """Needed by the checks."""
    devices: Annotated[tuple[str, ...], Field(min_length=1)] = ("cpu",)
    checks: tuple[Check, ...] = ("compress", "validate", "speed")
    """`compress`: time by phase as ratios, size, memory; `validate`: its verdict, KL and loss by sequence; `speed`: ratios to the base."""
    commands: dict[Name, str] = Field(default_factory=dict)
    """Name to a command line of any program; `{model}`, `{recipe}`, `{device}` and `{compressed}` say for which cells it runs."""
    repetitions: Annotated[int, Field(ge=1, le=1000)] = 5
    retries: Annotated[int, Field(ge=0, le=10)] = 0
    """How often a cell that ended without a verdict is tried again; every attempt is a row."""
    limits: Limits = Limits()
    history: Path = Path("nightly.sqlite")
    folder: Path = Path("nightly")
    """Where checkpoints and logs of the nights go."""
    root: Path = Path()
    """Where cells run, and whose commit is noted: the folder of the file, unless it names another."""

    @field_validator("commands")
    @classmethod
    def _known_places(cls, commands: dict[str, str]) -> dict[str, str]:
        for name, line in commands.items():
            check_command(name, line, _PLACES)
            if name in ("compress", "validate", "speed"):
                raise ValueError(f"{name} is the name of a check; give the command another")
        return commands


def read_config(path: Path) -> NightlyConfig:
    """Read a config; what it names must be there.

    Args:
        path: of the YAML file.

    Returns:
        The config, its paths absolute.

    Raises:
        UserInputError: a key or value is not allowed, a file is missing, or checks lack what they need.
    """
    config, root = read_settings(path, NightlyConfig, "setting"), path.absolute().parent
    for name, recipe in config.recipes.items():
        if not (root / recipe).is_file():
            raise UserInputError(f"{path}: recipes.{name}: there is no file {recipe}; paths are relative to the config")
    if config.checks and not config.recipes:
        raise UserInputError(f"{path}: recipes: none is named, and {', '.join(config.checks)} need one; name one, or write checks: []")
    if config.checks and config.data is None:
        raise UserInputError(f"{path}: data: is missing, and {', '.join(config.checks)} need it; add calibration and held_out")
    looking = [*config.checks, *(name for name, line in config.commands.items() if "{compressed}" in line)]
    if looking and "compress" not in config.checks:
        raise UserInputError(f"{path}: checks: {looking[0]} needs what compress makes; add compress")
    if not config.checks and not config.commands:
        raise UserInputError(f"{path}: checks: there are none, and no commands; name one")
    if not (root / config.root).is_dir():
        raise UserInputError(f"{path}: root: there is no folder {config.root}; paths are relative to the config")
    data = config.data and config.data.model_copy(
        update={name: _placed(getattr(config.data, name), root) for name in ("calibration", "held_out")}
    )
    return config.model_copy(
        update={
            "data": data,
            "models": {name: _placed(model, root) for name, model in config.models.items()},
            "recipes": {name: root / recipe for name, recipe in config.recipes.items()},
            "history": root / config.history,
            "folder": root / config.folder,
            "root": root / config.root,
        }
    )


def _placed(text: str, root: Path) -> str:
    """A path beside the config where there is one, else the text: a name on the hub, or of a usual data set."""
    return str(root / text) if (root / text).exists() else text
