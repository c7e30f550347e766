"""Watches a step below autograd: runs every operator for real, refuses what a capture cannot repeat, and writes the rest down."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compressor.errors import DynamicShapeError, EscapedTensorError, HostReadError, ReplayError, UntrackedRandomnessError
from compressor.training.capture.operators import ALLOCATIONS, Extent, Kind, Record, operands, spell_place, with_operands, written_arguments
from compressor.training.capture.storages import Lasting, Storages
from compressor.training.remedies import for_batch_norm, for_other_models
from compressor.training.step.collectives import is_collective, refuse_collective, spell_object, wait_for, without_group
from compressor.training.step.digests import content_digest, rng_digest
from compressor.training.uncompiled import uncompiled

# Where a refused operator was called from, and what helps there: advice that names the caller's own line and torch's own switch.

_TORCH, _OWN = Path(torch.__file__).parent, Path(__file__).parents[1]
_STEP = str(_OWN / "step" / "step.py")
_ADVICE = "keep it a tensor (torch.where, a tensor lr, fused=True), or decide before the step"
# Where distributions read their arguments, and what turns that off for those that they make.
_VALIDATING = tuple(f"distributions/{name}.py" for name in ("distribution", "constraints", "geometric", "continuous_bernoulli"))
_WITHIN = "where it makes others within itself, call torch.distributions.Distribution.set_default_validate_args(False) instead"
# Part of torch that reads, where several are on the way the innermost: what to do about it.
_ADVICE_BY_PART = {
    "optim": "keep settings of its groups Python numbers, and let only lr be a tensor",
    **dict.fromkeys(_VALIDATING, f"give the distribution validate_args=False, or, {_WITHIN}"),
    "distributions": "torch reads there whatever is set; run it outside of the step, and give what it gave with the batch",
    "nn/modules/batchnorm.py": f"without a momentum it counts its batches; count in a tensor:{for_batch_norm()}",
    "nn/utils/rnn.py": "pad instead of packing, and mask what lies behind the end of a row",
}


def caller() -> str:
    """Name the line of the step, outside torch and this package, that the running operator came from.

    Returns:
        Such as ` at model.py:12`; where the step itself calls torch, the line of torch; empty where neither is known.
    """
    frames = _frames()
    outside = [frame for frame in frames if not _is_in(frame, _TORCH)]
    if outside:
        return f" at {Path(outside[-1].filename).name}:{outside[-1].lineno}"
    parts = [frame for frame in frames if _part(frame) is not None]
    return f" at torch/{Path(parts[-1].filename).relative_to(_TORCH).as_posix()}:{parts[-1].lineno}" if parts else ""


def advice_on_reading() -> str:
    """Say what helps against the read on the host that is under way.

    Returns:
        A clause.
    """
    part = next((part for part in map(_part, reversed(_frames())) if part is not None), None)
    return _ADVICE if part is None else _ADVICE_BY_PART[part]


def _frames() -> list[traceback.FrameSummary]:
    """Return the frames within the step, the innermost last, without those of this package that watch it."""
    frames = list(traceback.extract_stack())
    begin = max((place for place, frame in enumerate(frames) if frame.filename == _STEP), default=-1)
    return [frame for frame in frames[begin + 1 :] if not _is_in(frame, _OWN)]


def _is_in(frame: traceback.FrameSummary, folder: Path) -> bool:
    return Path(frame.filename).is_relative_to(folder)


def _part(frame: traceback.FrameSummary) -> str | None:
    if not _is_in(frame, _TORCH):
        return None
    path = Path(frame.filename).relative_to(_TORCH).as_posix()
    return next((part for part in _ADVICE_BY_PART if path == part or path.startswith(f"{part}/")), None)


# What of a step on a device works on the host all the same, where no captured graph repeats it.
#
# A graph holds kernels and copies of one device. An operator on CPU tensors runs at capture and never again: an optimizer that counts its
# steps on the CPU would stand still. A value that a kernel takes from a CPU tensor is frozen, and a copy between host and device either
# stops the capture or reads memory that is gone at the replay.

_COPIES = frozenset({"aten::_to_copy", "aten::copy_"})


def host_hazard(name: str, device: torch.device, operands: Sequence[tuple[torch.device, bool]], target: torch.device | None) -> str | None:
    """Say what of an operator a graph would not repeat.

    Args:
        name: the operator.
        device: where the step runs.
        operands: for each tensor its device, and whether the step made it. Made on the CPU by an operator of the step, it may hold what
            kernels keep there, such as a seed.
        target: the device that the operator was asked for, or None.

    Returns:
        A clause for a message, or None where nothing is wrong.
    """
    if device.type == "cpu":
        return None
    on_host = [made for place, made in operands if place.type == "cpu"]
    if name == "aten::lift_fresh":  # torch.tensor(...): values of Python, copied to where it was asked for
        return None if on_host else "makes a tensor from Python's values, which would be copied from the host every time"
    if not all(on_host):
        return "works on a tensor on the CPU, which a graph neither repeats nor reads again"
    if name in _COPIES and len(on_host) < len(operands) and (on_host or (target is not None and target.type == "cpu")):
        return "copies between host and device"
    if name in _COPIES and on_host and target is not None and target.type != "cpu":
        return "copies from the host, and the values would be frozen"
    return None


_HOST_READS = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"})
_STORAGE_CHANGES = frozenset(
    {"aten::set_", "aten::resize_", "aten::resize_as_", "aten::_resize_output_", "inductor::resize_storage_bytes_"}
)
_OF_SHAPES = frozenset({"aten::is_same_size", "aten::_has_same_storage_numel"})  # a plan holds for one shape, so the answer stays
_NOTHING = object()
_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "bool": "b", "complex": "c"}


class Recorder(TorchDispatchMode):
    """Records the operators of one step.

    Args:
        roles: names of the tensors that exist before the step and stay, by role and name.
        device: where the step runs; the CPU's generator is only watched where it draws for the step.
        where: says which module runs, given whether this is the backward pass.
        see: called with each operator as it has run, and with the tensors that it wrote; for tools that look at values.
        groups: names of process groups whose ranks run this step together, and wait in its collectives; with any, a step that is refused is
            run to its end.
        lasting: names of tensors that earlier recordings have met outside, such as a teacher's, whose values may change between steps.

    Attributes:
        ops: the operators so far.
        phase: the phase of the step, set from outside.
        storages: the storages that the step made.
    """

    supports_higher_order_operators = True  # they come to `__torch_dispatch__`, to be refused in our words

    def __init__(
        self,
        roles: Mapping[str, Tensor],
        device: torch.device,
        where: Callable[[bool], str] = lambda backward: "",
        see: Callable[[Record, list[Tensor]], None] | None = None,
        groups: frozenset[str] = frozenset(),
        lasting: Lasting | None = None,
    ) -> None:
        super().__init__()
        self.ops: list[Record] = []
        self.phase = ""
        self._uncompiled = ExitStack()
        self._where, self._see, self._groups = where, see, groups
        self._refusal: ReplayError | None = None
        self._returned: Any = _NOTHING
        self._names: dict[int, str] = {}
        for name, tensor in roles.items():
            self._names.setdefault(tensor.untyped_storage()._cdata, name)
        self._outside: list[torch.UntypedStorage] = []  # a storage that is gone could give its identity to another
        self._lasting = Lasting() if lasting is None else lasting
        self.storages = Storages()
        self._aliases: dict[Extent, Tensor] = {}
        self._device, self._watches_rng = device, device.type == "cpu"
        self._rng = rng_digest()

    def maker(self, tensor: Tensor) -> Record | None:
        """Name what made the storage that a tensor lies in.

        Args:
            tensor: any tensor.

        Returns:
            The operator, or None where the step has not made it; else a replay overwrites it.
        """
        number = self.storages.number(tensor.untyped_storage()) if tensor.layout is torch.strided else None
        return None if number is None else self.maker_of(number)

    def maker_of(self, number: int) -> Record:
        """Name what made a storage.

        Args:
            number: the number of the storage.

        Returns:
            The operator.
        """
        return next(op for op in self.ops for out in op.outs if isinstance(out, Extent) and out.storage == number)

    def alias(self, tensor: Tensor) -> Extent | Tensor:
        """Return what stands for a tensor on the record.

        Args:
            tensor: a dense tensor.

        Returns:
            An extent of a storage that the step made; else a detached alias, the same one for the same view.
        """
        storage = tensor.untyped_storage()
        number = self.storages.number(storage)
        if number is not None:
            return Extent.of(tensor, number)
        key = Extent.of(tensor, storage._cdata)
        if key not in self._aliases:
            self._aliases[key] = tensor.detach()
        return self._aliases[key]

    def has_met(self, tensor: Tensor) -> bool:
        """Say whether the step has worked on a tensor that is neither its own nor known to it.

        Args:
            tensor: any tensor.

        Returns:
            True where an operator was given it.
        """
        return tensor.layout is torch.strided and self._names.get(tensor.untyped_storage()._cdata, "").startswith("outside:")

    def finish(self) -> None:
        """Check what can only be seen when the step is over.

        Raises:
            UntrackedRandomnessError: the generator was moved after the last operator that draws.
        """
        if self._watches_rng and rng_digest() != self._rng:
            raise UntrackedRandomnessError(_untracked(f"op {len(self.ops)} ({self.phase}): end of the step"))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one operator and write it down."""
        kwargs = kwargs or {}
        self.storages.sweep()
        if isinstance(func, HigherOrderOperator):
            place = spell_place(len(self.ops), self.phase, self._where(self.phase == "backward"), func)
            raise ReplayError(
                f"{place} runs functions of its own{caller()}, by values that a replay would not look at; write torch.where for a "
                "torch.cond, a loop of fixed length for a loop of torch, or use mode='eager'"
            )
        if self._refusal is not None or func._schema.name in _OF_SHAPES or func._schema.name.startswith("profiler::"):
            return func(*args, **kwargs)
        try:
            return self._watch(func, args, kwargs)
        except ReplayError as error:
            if not self._groups:
                raise
            self._refusal = error
            return func(*args, **kwargs) if self._returned is _NOTHING else self._returned
        finally:
            self._returned = _NOTHING

    def __enter__(self) -> Recorder:
        """Begin to watch."""
        self._uncompiled.enter_context(uncompiled())
        super().__enter__()
        return self

    def __exit__(self, *failed: Any) -> None:
        """Stop watching, and raise what was put off until the end of the step."""
        super().__exit__(*failed)
        self._uncompiled.close()
        if self._refusal is not None and failed[0] is None:
            raise self._refusal

    def _watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator and write it down, or refuse it."""
        module = self._where(self.phase == "backward")
        place = spell_place(len(self.ops), self.phase, module, func)
        given = operands((args, kwargs))
        refuse_collective(func, given, self._groups, place)
        self._refuse(func, given, place)
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        if seeded and self._watches_rng and rng_digest() != self._rng:
            raise UntrackedRandomnessError(_untracked(place))
        if func._schema.name == "aten::lift_fresh":
            return self._constant(func, args[0], module)
        known = {leaf.untyped_storage()._cdata for leaf in given if isinstance(leaf, Tensor)}
        read = ", ".join(self._spell(leaf) for leaf in given)
        self._check_writes(func, args, kwargs, place)
        result = self._returned = func(*args, **kwargs)
        if seeded and self._watches_rng:
            self._rng = rng_digest()
        outs = self._outputs(func, wait_for(result) if is_collective(func) else result, place)
        fresh = [out.untyped_storage()._cdata not in known for out in outs]
        line = f"{self.phase:<9} {func}({read}) -> {', '.join(self._spell(out, made=True) for out in outs)}"
        given_args, given_kwargs = with_operands(
            (args, kwargs), lambda one: self.alias(one) if isinstance(one, Tensor) else without_group(one)
        )
        out_aliases, kind, grad_mode = [self.alias(out) for out in outs], _kind(func, outs, fresh), torch.is_grad_enabled()
        record = Record(
            len(self.ops), func, given_args, given_kwargs, out_aliases, fresh, kind, self.phase, module, line, seeded, grad_mode
        )
        self._append(record, [*outs, *written_arguments(func, args, kwargs)])
        return result

    def _constant(self, func: Any, source: Tensor, module: str) -> Tensor:
        """Record a tensor that Python made inside the step: its values are copied in, since the step may go on to write into it."""
        values = source.detach().clone()
        name = f"const:{content_digest(values)}"
        result: Tensor = func(source)
        self._spell(result, made=True)
        line = f"{self.phase:<9} {func}({name}) -> {self._spell(result)}"
        index, out = len(self.ops), self.alias(result)
        self._append(Record(index, func, (values,), {}, [out], [True], Kind.COPY, self.phase, module, line, False, False), [result])
        return result

    def _append(self, record: Record, written: list[Tensor]) -> None:
        self.ops.append(record)
        if self._see is not None:
            self._see(record, written)

    def _refuse(self, func: Any, given: Sequence[Any], place: str) -> None:
        name = func._schema.name
        if name in _HOST_READS:
            raise HostReadError(f"{place} reads a tensor on the host{caller()}, and the value would be frozen; {advice_on_reading()}")
        if name in _STORAGE_CHANGES:
            raise ReplayError(
                f"{place} changes a storage{caller()}, so that addresses would not hold; allocate once and write in place, and copy with "
                "clone(), not copy.deepcopy"
            )
        if torch.Tag.dynamic_output_shape in func.tags and not (name == "aten::index" and not _has_mask(given[1:])):
            raise DynamicShapeError(f"{place} has an output whose shape depends on data{caller()}; use a mask or a fixed size instead")
        tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
        _refuse_layout(tensors, place)
        hosts = [(leaf.device, self.storages.number(leaf.untyped_storage()) is not None) for leaf in tensors]
        target = next((leaf for leaf in given if isinstance(leaf, torch.device)), None)
        hazard = host_hazard(name, self._device, hosts, target)
        if hazard:
            raise HostReadError(f"{place} {hazard}{caller()}; keep everything of the step on {self._device}, the batch too")

    def _check_writes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: str) -> None:
        for tensor in written_arguments(func, args, kwargs):
            name = self._names.get(tensor.untyped_storage()._cdata, "")
            if name.startswith("in:"):
                raise EscapedTensorError(
                    f"{place} writes into batch{name.removeprefix('in:')}, which belongs to the caller, and a replay would not change it; "
                    "clone it first"
                )
            if name.startswith("outside:"):
                raise EscapedTensorError(
                    f"{place} writes to a tensor of {list(tensor.shape)} that is no parameter or buffer of the model, optimizer state or "
                    "input; register it as a buffer of the model (a criterion that keeps state is one of its modules), let a modifier give "
                    f"it in training_tensors(), or write instead:{for_other_models()}"
                )

    def _outputs(self, func: Any, result: Any, place: str) -> list[Tensor]:
        leaves = [leaf for leaf in tree_leaves(result) if leaf is not None]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # Sizes, as attention on a GPU returns its longest sequence, and dtypes follow from shapes and dtypes, the same in every replay.
        if len(leaves) - len(tensors) > _returned_facts(func):
            raise HostReadError(f"{place} returned values to the host, which would be frozen; keep them tensors")
        _refuse_layout(tensors, place)
        return tensors

    def _name(self, tensor: Tensor, made: bool) -> str:
        storage = tensor.untyped_storage()
        number = self.storages.number(storage)
        if number is not None:
            self.storages.grow(number, storage)
            return f"%{number}"
        name = self._names.get(storage._cdata)
        if name is None:
            if made:
                return f"%{self.storages.add(storage)}"
            name = self._lasting.name(storage)
            if name is None:
                values = content_digest(tensor)[:8] if tensor.device.type == "cpu" else f"{tensor.device.type}{len(self._outside)}"
                name = f"outside:{values}"
                self._lasting.add(storage, name)
            self._names[storage._cdata] = name
            self._outside.append(storage)
        return name

    def _spell(self, leaf: Any, made: bool = False) -> str:
        if isinstance(leaf, torch.Generator):
            return "generator"
        if isinstance(leaf, torch.ScriptObject):
            return spell_object(leaf)
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        text = f"{self._name(leaf, made)}:{_short(leaf.dtype)}[{','.join(map(str, leaf.shape))}]"
        if leaf.device.type != "cpu":
            text += f"@{leaf.device}"
        if not leaf.is_contiguous():
            text += f"({','.join(map(str, leaf.stride()))})"
        return text + (f"+{leaf.storage_offset()}" if leaf.storage_offset() else "")


def _kind(func: Any, outs: Sequence[Tensor], fresh: Sequence[bool]) -> Kind:
    if torch.Tag.inplace_view in func.tags:  # t_, squeeze_, ...: whoever comes later is recorded with the new view
        return Kind.VIEW
    if func._schema.is_mutable or is_collective(func):
        return Kind.MUTATE
    if not outs:
        return Kind.CHECK
    if func._schema.name in ALLOCATIONS:
        return Kind.ALLOCATE
    return Kind.COPY if any(fresh) else Kind.VIEW


def _has_mask(given: Sequence[Any]) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in given)


def _returned_facts(func: Any) -> int:
    """Count the results of an operator that are sizes or dtypes by its schema, whose text alone still tells them from other integers."""
    if func is torch.ops.aten.can_cast.default:  # a truth value, of two dtypes
        return 1
    results = str(func._schema).rpartition("->")[2]
    return results.count("SymInt") + results.count("ScalarType")


def _refuse_layout(tensors: Sequence[Any], place: str) -> None:
    for tensor in tensors:
        if tensor._is_zerotensor():
            raise ReplayError(
                f"{place} works on zeros without memory{caller()}, which forward-mode differentiation makes; "
                "differentiate backwards (torch.func.vjp, jacrev, autograd.grad), or use mode='eager'"
            )
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise ReplayError(
                f"{place} works on a {type(tensor).__name__}{caller()}, which stands for others by __torch_dispatch__; unwrap it in "
                "front of the step, or use mode='eager'"
            )
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
            raise DynamicShapeError(f"{place} works on {kind}, whose size depends on data; use dense tensors (Embedding(sparse=False))")


def _short(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    letters = name.rstrip("0123456789_fnuzem")
    return _SHORT.get(letters, letters) + name[len(letters) :]


def _untracked(place: str) -> str:
    return (
        f"{place}: a random generator was moved by something that is no operator (manual_seed, set_rng_state, checkpointing, "
        "another thread); draw outside the step"
    )
