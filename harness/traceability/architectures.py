"""The zoo: tiny random models of many architectures, built offline from the configuration classes of transformers.

What there is stands in the YAML files beside this one, a line per architecture; a file of the same form adds more.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compressor.random_state import random_numbers_kept
from compressor.spelling import did_you_mean
from compressor.yaml_text import from_yaml
from harness.errors import HarnessError
from harness.traceability.batches import MAKERS, Batch, make_batches
from harness.traceability.verdicts import Subject

NAMED_FILES = ("decoders.yaml", "encoders.yaml", "multimodal.yaml")
MORE_FILES = ("more.yaml",)
_FIELDS = {"class", "base", "config", "layers", "batch", "batch_options", "note"}


@dataclass(frozen=True)
class Architecture:
    """One architecture of the zoo.

    Attributes:
        name: what it is called on the command line.
        model_class: a class of transformers.
        config: arguments of its configuration class.
        layers: class names of its layers: the sequential targets that a user would name.
        kind: which batches it takes, a name in MAKERS.
        batch_options: of the maker.
        is_named: belongs to the list that must pass, not to those beyond it.
    """

    name: str
    model_class: str
    config: Mapping[str, Any]
    layers: tuple[str, ...]
    kind: str = "text"
    batch_options: Mapping[str, Any] = field(default_factory=dict)
    is_named: bool = True

    def build(self, seed: int = 0) -> nn.Module:
        """Build the model on the CPU, in float32, in eval mode, without a cache.

        Args:
            seed: of the weights; every floating parameter is drawn anew, so that none stays at a constant that hides an error.

        Returns:
            The model.
        """
        import transformers

        model_class = getattr(transformers, self.model_class)
        with random_numbers_kept():
            torch.manual_seed(seed)
            random.seed(seed)
            model: nn.Module = model_class(model_class.config_class(**_copied(self.config))).float().eval()
        draw_weights(model, seed)
        for module in model.modules():
            config: Any = module.__dict__.get("config")
            if getattr(config, "use_cache", False):
                config.use_cache = False
        return model

    def batches(self, seed: int = 1) -> dict[str, Batch]:
        """Draw its batches: variant to batch, `same` first.

        Args:
            seed: of everything random.

        Returns:
            The batches.
        """
        return make_batches(self.kind, self.batch_options, seed)

    def subject(self) -> Subject:
        """Return what the audit takes."""
        return Subject(self.name, self.build, self.batches(), self.layers)


def draw_weights(model: nn.Module, seed: int) -> None:
    """Shake all floating parameters, so that no weight is zero, none is one, and no two layers are alike. Changes the model.

    Args:
        model: the model.
        seed: of the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


@functools.cache
def zoo() -> dict[str, Architecture]:
    """Read the zoo.

    Returns:
        Name to architecture: those that must pass first.
    """
    folder = Path(__file__).parent
    named = [one for file in NAMED_FILES for one in read_architectures(folder / file, is_named=True)]
    more = [one for file in MORE_FILES for one in read_architectures(folder / file, is_named=False)]
    return {one.name: one for one in [*named, *more]}


def read_architectures(path: Path, *, is_named: bool = False) -> list[Architecture]:
    """Read a file of architectures.

    Args:
        path: a YAML file with `bases` (name to sizes) and `architectures` (name to class, base, config, layers, batch, batch_options).
        is_named: what to note in them.

    Returns:
        The architectures, in the order of the file.

    Raises:
        HarnessError: an entry is not of this form.
        UserInputError: it is no safe YAML.
    """
    content, _ = from_yaml(path.read_text(encoding="utf-8"), path.name)
    if not isinstance(content, dict) or not isinstance(content.get("architectures"), dict):
        raise HarnessError(f"{path.name}: holds no mapping `architectures`; give name: {{class: ..., config: ...}}")
    bases = content.get("bases") or {}
    return [_read_one(path.name, name, entry, bases, is_named) for name, entry in content["architectures"].items()]


def _read_one(where: str, name: str, entry: Any, bases: Mapping[str, Any], is_named: bool) -> Architecture:
    if not isinstance(entry, dict) or "class" not in entry or entry.keys() - _FIELDS:
        raise HarnessError(f"{where}: {name} must have a `class` and may have {', '.join(sorted(_FIELDS - {'class'}))}; rename the rest")
    kind, base = entry.get("batch", "text"), entry.get("base")
    for what, given, known in (("batch", kind, MAKERS), ("base", base, bases)):
        if given is not None and given not in known:
            raise HarnessError(f"{where}: {name}: {what} {given!r} does not exist; choose one of {', '.join(known)}")
    config = (bases[base] if base else {}) | entry.get("config", {})
    return Architecture(
        name, entry["class"], config, tuple(entry.get("layers", ())), kind, entry.get("batch_options", {}), is_named=is_named
    )


def choose(names: Sequence[str], *, more: bool = False) -> list[Architecture]:
    """Choose architectures by name.

    Args:
        names: those wanted; none means all that must pass.
        more: without names, those beyond the list, too.

    Returns:
        The architectures.

    Raises:
        HarnessError: there is none of that name.
    """
    known = zoo()
    for name in names:
        if name not in known:
            raise HarnessError(f"ARCH: {name!r} is not in the zoo; {did_you_mean(name, known)}choose from {', '.join(known)}")
    return [known[name] for name in names] if names else [one for one in known.values() if more or one.is_named]


def _copied(value: Any) -> Any:
    """Configuration classes change what they are given."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value
