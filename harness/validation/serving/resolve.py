"""Which scheme a server gives each layer: its own reading of targets and ignore patterns, which is not that of compressed-tensors.

Facts of `find_matched_target` and `should_ignore_layer` in compressed_tensors/utils.py of vLLM 0.33.0 and SGLang 0.5.23: an ignore pattern
is a name or `re:`, never a class; a target is tried on the name, then on the shards of a fused layer, then as a part of the class name that
the layer has in the server. There a linear layer is some `...Linear`, the head a `ParallelLMHead`, an embedding a `VocabParallelEmbedding`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.validation.format.scheme import block_sizes
from harness.validation.serving.contract import ARGUMENT_VALUES, EMBEDDINGS, EXPERT_FUSED, FUSED, HEADS, POSITIONS, ROUTERS
from harness.validation.serving.servers import Arguments
from harness.validation.subject import Subject

_EXPERT = re.compile(r"^(.+\.experts)\.([0-9]+)\.([^.]+)$")
_CLASSES = {"head": "ParallelLMHead", "embedding": "VocabParallelEmbedding", "experts": "RoutedExperts", "linear": "ParallelLinear"}


@dataclass(frozen=True)
class Group:
    """One entry of config_groups as it stands in the file."""

    name: str
    targets: tuple[str, ...]
    weights: Arguments
    inputs: Arguments | None
    format: str

    @property
    def packs_by_name(self) -> bool:
        """Whether experts of a mixture are meant where linear layers are."""
        return "Linear" in self.targets


def read_groups(config: Mapping[str, Any]) -> list[Group]:
    """Read the config groups as the servers do: without those of attention modules, whose scales stand in the file.

    Args:
        config: the value of quantization_config, of the shape that `misshapen` holds.

    Returns:
        The groups, in the order of the file.

    Raises:
        ValueError: one has no targets or no weights.
    """
    found = []
    for name, group in (config.get("config_groups") or {}).items():
        targets = group.get("targets")
        if targets is None:
            raise ValueError(f"config_groups.{name}: has no list of targets")
        if len(targets) == 1 and targets[0].endswith("Attention"):
            continue
        weights, inputs = group.get("weights"), group.get("input_activations")
        if weights is None:
            raise ValueError(f"config_groups.{name}: has no arguments for weights, which every group must have")
        weights, inputs = _spelt_out(weights), _spelt_out(inputs) if inputs else None
        for arguments in (weights, inputs or {}):
            _check_values(f"config_groups.{name}", arguments)
        found.append(Group(name, tuple(targets), weights, inputs, str(group.get("format") or config.get("format"))))
    return found


def _spelt_out(arguments: Arguments) -> Arguments:
    """Blocks as two numbers; compressed-tensors takes `128x128` as well."""
    block = arguments.get("block_structure")
    return {**arguments, "block_structure": list(block_sizes(block))} if isinstance(block, str) else arguments


def _check_values(where: str, arguments: Arguments) -> None:
    """Raise ValueError where a value is none that a loader could compute with."""
    for key, is_sound in ARGUMENT_VALUES.items():
        if arguments.get(key) is not None and not is_sound(arguments[key]):
            raise ValueError(f"{where}: {key} is {arguments[key]!r}")


@dataclass(frozen=True)
class Layer:
    """A weight of the base as a server builds it.

    Attributes:
        name: dotted module name.
        kind: linear, head, embedding, experts, router or position.
        shards: names of all that become one with it, itself among them, in order; itself alone where nothing is fused.
        siblings: the shards, and of an expert the projections of the same expert that become one with it.
        group: the scheme that it gets there; None for floats.
        is_named: a target or an ignore pattern means it.
        is_split: the ignore patterns mean some of the shards only.
    """

    name: str
    kind: str
    shards: tuple[str, ...]
    group: Group | None
    is_named: bool
    is_split: bool = False
    siblings: tuple[str, ...] = ()


def read_layers(subject: Subject, groups: Sequence[Group], routers: Iterable[str]) -> Iterator[Layer]:
    """Give every layer of the base what a server gives it.

    Args:
        subject: both folders.
        groups: of the config.
        routers: architectures whose routers the server may quantize.

    Yields:
        One layer per matrix of the base.
    """
    names = [
        key.removesuffix(".weight") for key, entry in subject.base.entries.items() if key.endswith(".weight") and len(entry.shape) == 2
    ]
    patterns = (subject.quantization_config or {}).get("ignore") or ()
    architectures = set(subject.base_config.get("architectures") or ())
    there = set(names)
    for name in names:
        kind = _kind(name)
        shards = _shards(name, there) if kind == "linear" else (name,)
        if kind == "position" or (kind == "router" and not architectures & set(routers)):
            yield Layer(name, kind, shards, None, True)
            continue
        siblings = _shards(name, there, EXPERT_FUSED) if kind == "experts" else shards
        yield replace(_layer(name, "linear" if kind == "router" else kind, shards, groups, patterns), siblings=siblings)


def _kind(name: str) -> str:
    last = name.rpartition(".")[2]
    kinds = {"head": HEADS, "embedding": EMBEDDINGS, "position": POSITIONS, "router": ROUTERS}
    return next((kind for kind, names in kinds.items() if last in names), "experts" if _EXPERT.match(name) else "linear")


def _shards(name: str, there: set[str], fused: Iterable[tuple[str, ...]] = tuple(FUSED.values())) -> tuple[str, ...]:
    parent, _, last = name.rpartition(".")
    for parts in fused:
        names = tuple(f"{parent}.{part}" for part in parts)
        if last in parts and there.issuperset(names):
            return names
    return (name,)


def _layer(name: str, kind: str, shards: tuple[str, ...], groups: Sequence[Group], patterns: Sequence[str]) -> Layer:
    expert = _EXPERT.match(name)
    asked = f"{expert[1]}.0.{expert[3]}" if expert else name  # the servers look at the first expert alone
    names = shards if len(shards) > 1 else (asked,)
    ignored = [any(_means(pattern, one) for pattern in patterns) for one in names]
    if any(ignored):
        return Layer(name, kind, shards, None, True, is_split=not all(ignored))
    group = _by_name(names, groups) or _by_class(kind, groups)
    return Layer(name, kind, shards, group, group is not None)


def _by_name(names: Sequence[str], groups: Sequence[Group]) -> Group | None:
    """The group of the first shard, where every shard is named by some target."""
    found = [next((group for group in groups for target in group.targets if _means(target, one)), None) for one in names]
    return found[0] if all(found) else None


def _by_class(kind: str, groups: Sequence[Group]) -> Group | None:
    own = _CLASSES[kind].lower()
    for group in groups:
        if (kind == "experts" and group.packs_by_name) or any(
            not _is_pattern(target) and target.lower() in own for target in group.targets
        ):
            return group
    return None


def _is_pattern(target: str) -> bool:
    return target.startswith("re:")


def _means(pattern: str, name: str) -> bool:
    return re.match(pattern[3:], name) is not None if _is_pattern(pattern) else pattern == name
