"""A model that runs, from a folder that may hold nothing but config.json: for looking at how data flows, not for what comes out.

What stands in for missing weights depends on size. Small models get random ones. For large ones every parameter is a single number seen as
a tensor of the right shape, which takes no memory, so that all layers are there and run. Of very large ones the layers that only repeat
earlier ones are left out as well. Who must tell one channel from another asks for values that differ: then repeated layers are left out
first, and what is left gets random ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import ModelError
from compressor.model.experts.unfuse import layout_of
from compressor.model.folder import (
    ModelFolder,
    check_no_adapter,
    check_no_revision,
    check_not_quantized,
    check_weight_files,
    one_line,
    read_config,
    resolve_folder,
    weight_files,
)
from compressor.model.loading.load import (
    LOAD_ERRORS,
    check_in_memory,
    load_model,
    quiet_transformers,
    read_generation_config,
    remedy,
    resolve_class,
)
from compressor.model.targets import text_config
from compressor.random_state import random_numbers_kept

# The shapes of a model without its weights: what a plan needs, in milliseconds for a model of any size.


def load_skeleton(
    source: str | Path | nn.Module, *, trust_remote_code: bool = False, model_class: str | type | None = None, revision: str | None = None
) -> nn.Module:
    """Build a model on the meta device from its config alone; a model in memory is returned as it is.

    Args:
        source: folder with a config.json, its name on the hub, or a module; neither is changed.
        trust_remote_code: run Python files of the folder, where its config asks for them.
        model_class: class of transformers, or its name; None for AutoModelForCausalLM.
        revision: branch, tag or commit on the hub; None is main.

    Returns:
        The model; parameters have shapes and dtypes but, from a folder, no values.

    Raises:
        ModelError: no folder, no usable config, or the model is quantized already.
    """
    if isinstance(source, nn.Module):
        check_in_memory(source, model_class=model_class, revision=revision)
        return source
    folder = resolve_folder(source, revision, weights=False, code=trust_remote_code).path
    check_not_quantized(read_config(folder), str(folder))
    check_no_adapter(folder)
    read_generation_config(folder)
    loader = resolve_class(model_class)
    from transformers import AutoConfig

    try:
        with quiet_transformers(), torch.device("meta"):
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
            dtype = getattr(config, "dtype", None) or torch.float32
            if hasattr(loader, "from_config"):
                model: nn.Module = loader.from_config(config, trust_remote_code=trust_remote_code, dtype=dtype)
            else:
                model = loader(config).to(dtype)
    except LOAD_ERRORS as error:
        raise ModelError(f"{folder}: its config gives no model ({one_line(error)}); {remedy(error)}") from error
    return model.eval()


MAX_LOADED_BYTES = 4_000_000_000  # weights of a folder are read up to here
MAX_RANDOM = 200_000_000  # parameters that are drawn
MAX_WHOLE = 100_000_000_000  # parameters of a model of which all layers run
MAX_WHOLE_WITH_EXPERTS = 5_000_000_000  # the same where experts are fused, whose products do cost time
MAX_DIFFERING = 2_500_000_000  # parameters that are all given values of their own
_NUMBER = 0.01
_PERIOD = 1_000_003  # prime, so that rows of a weight differ
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


@dataclass(frozen=True)
class StandIn:
    """A model for looking at.

    Attributes:
        model: on the CPU, in eval mode.
        how: what its weights are, in one line.
        num_left_out: layers of the real model that it lacks, because they repeat others.
        folder: where it came from; None for a model in memory.
    """

    model: nn.Module
    how: str
    num_left_out: int = 0
    folder: Path | None = None


def stand_in(
    source: str | Path | nn.Module,
    *,
    model_class: str | type | None = None,
    trust_remote_code: bool = False,
    seed: int = 0,
    differing: bool = False,
    revision: str | None = None,
) -> StandIn:
    """Make a model that runs.

    Args:
        source: folder with a config.json, its name on the hub, of which no weights are fetched, or a model in memory, which is taken as it
            is.
        model_class: class of transformers, or its name; None for the one that config.json names, else AutoModelForCausalLM.
        trust_remote_code: run Python files of the folder, where its config asks for them.
        seed: of random weights.
        differing: channels must differ, so a large model is stood in for by one layer of each kind with random values.
        revision: branch, tag or commit on the hub; None is main.

    Returns:
        The model, and what it is.

    Raises:
        ModelError: no folder, no usable config, a quantized model, weights that cannot be read, or a model too large for `differing`.
    """
    if isinstance(source, nn.Module):
        if model_class is not None:
            raise ModelError(f"model_class: {model_class!r} was given for a model in memory, which has its class; leave model_class out")
        check_no_revision(revision, "a model in memory")
        return StandIn(source, "its own weights")
    found = resolve_folder(source, revision, weights=False, code=trust_remote_code)
    folder = found.path
    chosen = model_class or _named_class(read_config(folder))
    num_bytes = _weight_bytes(found)
    if 0 < num_bytes <= MAX_LOADED_BYTES:
        model = load_model(folder, device="cpu", trust_remote_code=trust_remote_code, model_class=chosen).model
        return StandIn(model, "weights of the folder", folder=folder)
    skeleton = load_skeleton(folder, trust_remote_code=trust_remote_code, model_class=chosen)
    count = sum(parameter.numel() for parameter in skeleton.parameters())
    why = f"{num_bytes / 1e9:.1f} GB of weights were not read" if num_bytes else "the folder holds no weights"
    if count <= MAX_RANDOM:
        with random_numbers_kept(foreign=False):
            torch.manual_seed(seed)
            return StandIn(_build(folder, chosen, trust_remote_code, None), f"random ({why})", folder=folder)
    has_experts = any(layout_of(module) is not None for module in skeleton.modules())
    keep = _layers_to_keep(skeleton) if differing or count > (MAX_WHOLE_WITH_EXPERTS if has_experts else MAX_WHOLE) else None
    model = _build(folder, chosen, trust_remote_code, keep, weightless=True)
    left = _num_layers(skeleton) - _num_layers(model)
    if differing:
        _fill_with_random(model, seed, str(folder))
        text = f"random ({why}; {count / 1e9:,.1f} billion parameters)"
    else:
        _fill_with_one_number(model)
        text = f"every tensor is one number, repeated, which takes no memory ({why}; {count / 1e9:,.1f} billion parameters)"
    return StandIn(model, text + (f"; {left} layers that repeat earlier ones are left out" if left else ""), left, folder)


def _weight_bytes(found: ModelFolder) -> int:
    """0 for a config alone; what there is of weights must be whole, lest random ones be taken for a damaged folder.

    In the cache of the hub lies what somebody has fetched, which may be a part.
    """
    folder = found.path
    if not any(folder.glob("*.safetensors*")):
        return 0
    if found.origin is not None and not all((folder / name).is_file() for name in weight_files(folder)):
        return 0
    check_weight_files(folder)
    return sum((folder / name).stat().st_size for name in weight_files(folder))


def _named_class(config: dict[str, Any]) -> str | None:
    """The class that the config names, where transformers has it."""
    import transformers

    names = config.get("architectures")
    named = names[0] if isinstance(names, list) and names else None
    return named if isinstance(named, str) and hasattr(transformers, named) else None


def _build(
    folder: Path, model_class: str | type | None, trust_remote_code: bool, keep: int | None, *, weightless: bool = False
) -> nn.Module:
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    loader = resolve_class(model_class)
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
            if keep is not None:
                config = _cut(config, keep)
            if not weightless:
                return _from_config(loader, config, trust_remote_code, torch.float32).eval()
            with no_init_weights():
                return _from_config(loader, config, trust_remote_code, torch.bfloat16).eval()
    except LOAD_ERRORS as error:
        raise ModelError(f"{folder}: its config gives no model ({one_line(error)}); {remedy(error)}") from error


def _from_config(loader: Any, config: Any, trust_remote_code: bool, dtype: torch.dtype) -> nn.Module:
    if hasattr(loader, "from_config"):
        model: nn.Module = loader.from_config(config, trust_remote_code=trust_remote_code, dtype=dtype)
        return model
    make = getattr(loader, "_from_config", None)
    built: nn.Module = loader(config).to(dtype) if make is None else make(config, dtype=dtype)
    return built


class _OneNumberLinear(nn.Linear):
    """A linear layer whose weight is one number: its product is a sum, which costs next to nothing."""

    def forward(self, input: Tensor) -> Tensor:
        """Multiply with the number; the result is what the plain layer would give, up to rounding."""
        total = input.sum(dim=-1, keepdim=True) * _NUMBER
        output = total.expand(*input.shape[:-1], self.out_features).to(self.weight.dtype).clone()
        bias = self._parameters["bias"]
        return output if bias is None else output + bias


_OneNumberLinear.__name__ = nn.Linear.__name__  # reports and patterns shall call it what it stands for


def _fill_with_one_number(model: nn.Module) -> None:
    """Let every parameter be one number; experts run one by one, so that only those that are needed do. Changes the model."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _OneNumberLinear
        for name, parameter in module.named_parameters(recurse=False):
            number = torch.full((1,), _NUMBER, dtype=parameter.dtype).expand(parameter.shape)
            module._parameters[name] = nn.Parameter(number, requires_grad=False)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # type: ignore[operator]


def _fill_with_random(model: nn.Module, seed: int, name: str) -> None:
    """Give every parameter values that look random: the same million of them over and over, from another place on. Changes the model."""
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > MAX_DIFFERING:
        raise ModelError(
            f"{name}: one layer of each kind has {count / 1e9:,.1f} billion parameters, too many to be given values "
            f"(at most {MAX_DIFFERING / 1e9:g}); copy its config.json with smaller sizes, and look at that"
        )
    drawn = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    for index, parameter in enumerate(model.parameters()):
        values = (1 + drawn / 8 if parameter.dim() == 1 else drawn / 32).to(parameter.dtype).roll(index)
        flat = parameter.data.view(-1)
        for start in range(0, len(flat), _PERIOD):
            flat[start : start + _PERIOD] = values[: len(flat) - start]


def _stacks(model: nn.Module) -> Iterator[nn.ModuleList]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            yield module


def _longest_stack(model: nn.Module) -> list[nn.Module]:
    return max((list(stack) for stack in _stacks(model)), key=len, default=[])


def _num_layers(model: nn.Module) -> int:
    return sum(len(stack) for stack in _stacks(model) if any(True for _ in stack.parameters()))


def _layers_to_keep(skeleton: nn.Module) -> int | None:
    """Enough layers for every kind to come, and one that repeats; None where nothing repeats."""
    kinds = [_kind(layer) for layer in _longest_stack(skeleton)]
    last_new = max((kinds.index(kind) for kind in set(kinds)), default=0)
    keep = last_new + 2
    return keep if keep < len(kinds) else None


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """What tells layers apart: classes and shapes, and the kind of attention that a layer notes down."""
    shapes = tuple((name, type(module).__name__) for name, module in layer.named_modules())
    own = tuple(sorted((key, value) for key, value in vars(layer).items() if isinstance(value, str) and not key.startswith("_")))
    return shapes, tuple(tuple(parameter.shape) for parameter in layer.parameters()), own


def _cut(config: Any, keep: int) -> Any:
    """A config with fewer layers; lists with an entry per layer are cut with them."""
    config = copy.deepcopy(config)
    text = text_config(config)
    name = next((name for name in _LAYER_COUNTS if isinstance(getattr(text, name, None), int)), None)
    if name is None:
        return config
    total = getattr(text, name)
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == total:
            setattr(text, key, value[:keep])
    setattr(text, name, keep)
    return config
