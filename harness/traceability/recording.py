"""What every module of a model was given and gave back, and the first place where two such records differ, bit for bit.

This shares nothing with the tracing engines or with their own verification: plain forward hooks, clones of tensors, and a comparison of
their bytes. Inputs and outputs are kept apart, because forwards that take turns leave a module in another order than they enter it.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harness.traceability.batches import Batch, copies

Leaf = Tensor | str
Leaves = tuple[tuple[str, Leaf], ...]
_MAX_DEPTH = 8
_OPAQUE = (nn.Module, type, torch.Generator)


@dataclass
class Record:
    """The calls of a run.

    Attributes:
        inputs: module name to what each call was given.
        outputs: module name to what each call returned; fewer than inputs where a call raised.
        results: what each forward returned.
    """

    inputs: dict[str, list[Leaves]] = field(default_factory=dict)
    outputs: dict[str, list[Leaves]] = field(default_factory=dict)
    results: list[Leaves] = field(default_factory=list)
    _is_paused: bool = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Write nothing for the duration: what `quiet` means for a modifier's hooks.

        Yields:
            Nothing.
        """
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def tensors_of(self, names: Collection[str]) -> Record:
        """Return only the tensors of the calls of some modules: nothing about flags, missing defaults and results.

        Args:
            names: of the modules.

        Returns:
            Another record.
        """
        inputs = {name: [_only_tensors(call) for call in self.inputs.get(name, [])] for name in names}
        outputs = {name: [_only_tensors(call) for call in self.outputs.get(name, [])] for name in names}
        return Record(inputs, outputs)

    def add(self, calls: dict[str, list[Leaves]], name: str, value: Any) -> None:
        """Write down one input or output. Changes the record, unless it is paused.

        Args:
            calls: `inputs` or `outputs` of this record.
            name: of the module.
            value: what it was given or gave back.
        """
        if not self._is_paused:
            calls.setdefault(name, []).append(flatten(value))


@contextmanager
def recording(model: nn.Module, record: Record, names: Collection[str] | None = None, *, only_inputs: bool = False) -> Iterator[None]:
    """Write all calls of modules into a record, for the duration.

    Args:
        model: carries hooks for the duration.
        record: grows.
        names: modules to look at; None takes all.
        only_inputs: put no hook behind a module.

    Yields:
        Nothing.
    """
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if names is None or name in names:
                before = module.register_forward_pre_hook(_before(record, name), with_kwargs=True)
                hooks.callback(before.remove)
                if not only_inputs:
                    hooks.callback(module.register_forward_hook(_after(record, name)).remove)
        yield


def _before(record: Record, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        record.add(record.inputs, name, (args, kwargs))

    return hook


def _after(record: Record, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        del module, args
        record.add(record.outputs, name, output)

    return hook


def flatten(value: Any) -> Leaves:
    """Take a value apart into copies of its tensors and the text of its plain values, each with its path.

    Args:
        value: anything; what cannot be looked into without consuming it (a generator) is represented by its type.

    Returns:
        Path and leaf, in a fixed order.
    """
    with torch.no_grad(), torch._C.DisableTorchFunction():
        return tuple(_leaves(value, "", 0, set()))


def _leaves(value: Any, path: str, depth: int, above: set[int]) -> Iterator[tuple[str, Leaf]]:
    if isinstance(value, Tensor):
        yield path, value.detach().clone()
    elif isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        yield path, repr(float(value)) if isinstance(value, torch.SymFloat) else repr(int(value))
    elif value is None or isinstance(value, str | bytes | int | float | complex | torch.dtype | torch.device):
        yield path, repr(value)
    elif depth == _MAX_DEPTH or id(value) in above or isinstance(value, _OPAQUE) or (callable(value) and not hasattr(value, "__dict__")):
        yield path, f"<{type(value).__name__}>"
    else:
        for key, item in _parts(value):
            yield from _leaves(item, f"{path}.{key}", depth + 1, above | {id(value)})


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The items of a container, or the attributes of an object."""
    if isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, tuple | list | Sequence):
        yield from ((str(index), item) for index, item in enumerate(value))
    elif hasattr(value, "__dict__") and not callable(value) and not type(value).__name__.endswith("Config"):
        yield from ((name, item) for name, item in vars(value).items() if not name.startswith("__"))
    else:
        yield "", f"<{type(value).__name__}>"


def _only_tensors(leaves: Leaves) -> Leaves:
    return tuple((path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor))


def same_bits(left: Leaf, right: Leaf) -> bool:
    """Say whether two leaves are the same, bit for bit; every NaN equals itself.

    Args:
        left: a tensor or a text.
        right: a tensor or a text.

    Returns:
        True for tensors of one type, shape and content, and for equal texts.
    """
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return isinstance(left, str) and isinstance(right, str) and left == right
    return left.dtype == right.dtype and left.shape == right.shape and left.device == right.device and _bytes(left) == _bytes(right)


def _bytes(tensor: Tensor) -> bytes:
    if tensor.is_meta:
        return b""
    content: bytes = tensor.cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()
    return content


def _checksum(leaves: Leaves) -> int:
    total = 0
    for path, leaf in leaves:
        total = zlib.crc32(path.encode(), total)
        head = leaf if isinstance(leaf, str) else f"{leaf.dtype}{tuple(leaf.shape)}"
        total = zlib.crc32(head.encode(), total)
        if isinstance(leaf, Tensor):
            total = zlib.crc32(_bytes(leaf), total)
    return total


def first_difference(expected: Record, got: Record, *, may_miss: Collection[str] = (), any_order: bool = False) -> str | None:
    """Find the first module, in the order of the expected record, whose calls differ.

    Args:
        expected: of the plain model.
        got: of a traced run.
        may_miss: modules that a traced run need not call: those that it took apart, because targets lie inside.
        any_order: the calls of a module may come in any order: for forwards that take turns.

    Returns:
        One line that names module, call and value; None where the records are the same.
    """
    for index, (left, right) in enumerate(zip(expected.results, got.results, strict=True)):
        problem = _differ(left, right)
        if problem:
            return f"result of forward {index}{problem}; {_first_call(expected, got, may_miss, any_order) or 'all module calls are equal'}"
    return _first_call(expected, got, may_miss, any_order)


def _first_call(expected: Record, got: Record, may_miss: Collection[str], any_order: bool) -> str | None:
    for what, left, right in (("input", expected.inputs, got.inputs), ("output", expected.outputs, got.outputs)):
        for name in [*left, *(name for name in right if name not in left)]:
            if name in may_miss and not right.get(name):
                continue
            problem = _calls_differ(left.get(name, []), right.get(name, []), any_order)
            if problem:
                return f"{what} of {name or 'the model'}{problem}"
    return None


def _calls_differ(expected: list[Leaves], got: list[Leaves], any_order: bool) -> str | None:
    if len(expected) != len(got):
        return f": {len(got)} calls instead of {len(expected)}"
    if any_order:
        expected, got = sorted(expected, key=_checksum), sorted(got, key=_checksum)
    for index, (left, right) in enumerate(zip(expected, got, strict=True)):
        problem = _differ(left, right)
        if problem:
            return f", call {index}{problem}"
    return None


def _differ(expected: Leaves, got: Leaves) -> str | None:
    paths = [path for path, _ in expected]
    if paths != [path for path, _ in got]:
        odd = sorted({*paths} ^ {path for path, _ in got}) or ["another order"]
        return f": has other parts ({', '.join(odd[:3])})"
    for (path, left), (_, right) in zip(expected, got, strict=True):
        if not same_bits(left, right):
            return f"{path}: {_describe(left, right)}"
    return None


def _describe(left: Leaf, right: Leaf) -> str:
    if isinstance(left, Tensor) and isinstance(right, Tensor) and (left.shape, left.dtype) == (right.shape, right.dtype):
        if left.is_floating_point():
            return f"differs by up to {(left - right).abs().nan_to_num().max().item():.3g}"
        return f"differs in {int((left != right).sum())} of {left.numel()} places"
    return f"{_short(left)} became {_short(right)}"


def _short(leaf: Leaf) -> str:
    return leaf[:40] if isinstance(leaf, str) else f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"


# The naive reference for sequential calibration: all plain forwards run again from the start for every stage.


@torch.no_grad()
def plain_forward(model: nn.Module, batch: Batch) -> Any:
    """Run one plain forward on a copy of a batch, from a fixed state of the random generator.

    Args:
        model: not modified, but by its own forward.
        batch: not modified.

    Returns:
        What the model returns.
    """
    torch.manual_seed(0)
    return model(**copies([batch])[0])


def compress_stage(model: nn.Module, names: Collection[str]) -> None:
    """Stand in for a compression: every weight of a stage is moved, by an amount that its name decides, and rounded. Changes the model.

    Matrices, and what is tied to a module elsewhere, become new parameters, as when a modifier replaces a module: so a head is untied
    from the embedding, and who kept the old tensor is found out. Other vectors are changed in place.

    Args:
        model: the model.
        names: modules of the stage.
    """
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name in sorted(names):
        module = model.get_submodule(name)
        for own, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_floating_point():
                generator = torch.Generator().manual_seed(zlib.crc32(f"{name}.{own}".encode()))
                moved = parameter.detach() * (1 + 0.2 * torch.rand(parameter.shape, generator=generator)).to(parameter)
                if parameter.dim() > 1 or owners[id(parameter)] > 1:
                    setattr(module, own, nn.Parameter((moved * 64).round() / 64))
                else:
                    parameter.detach().copy_((moved * 64).round() / 64)


def watchable(model: nn.Module, names: Collection[str]) -> list[str]:
    """Choose what a modifier would hook: modules with weights of their own.

    Args:
        model: the model.
        names: to choose from.

    Returns:
        Dotted names.
    """
    return [name for name in names if any(True for _ in model.get_submodule(name).parameters(recurse=False))]


def naive_passes(model: nn.Module, batches: Sequence[Batch], stages: Sequence[str]) -> Record:
    """The reference for sequential calibration: for every stage, run all plain forwards again from the start.

    Args:
        model: changed: each stage is compressed before the next is calibrated.
        batches: all of them.
        stages: targets in the order in which they are compressed.

    Returns:
        The inputs of the modules of each stage as its calibration must see them, and the results of the compressed model.
    """
    record = Record()
    for stage in stages:
        names = [name for name, _ in model.get_submodule(stage).named_modules(prefix=stage)]
        with recording(model, record, set(watchable(model, names)), only_inputs=True):
            for batch in batches:
                plain_forward(model, batch)
        compress_stage(model, names)
    record.results = [flatten(plain_forward(model, batch)) for batch in batches]
    return record
