"""What the modifiers of one session share: the model, the mask of the running batch, the modules they replaced, and the report."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compressor.data import CalibrationData
from compressor.data.collate import leading_tensor
from compressor.distributed.ranks import Ranks
from compressor.errors import NumericsError, TargetError, UserInputError
from compressor.lifecycle.hooks import hand_over_hooks
from compressor.model.targets import other_names, put_module
from compressor.monitor import Monitor
from compressor.nn import QuantizedLinear
from compressor.nn.experts import tokens_are_rows
from compressor.nn.fake_quant import FakeQuantizedLinear
from compressor.numerics import QuantizationScheme
from compressor.pages import let_go
from compressor.progress import Progress, SilentProgress


def _at_hand(names: Collection[str]) -> None:
    """Weights are there already."""


Detail = float | int | str
# What a state notes of modules, beside `phases`.
_NOTED = ("claims", "schemes", "touched", "settled", "sparse", "narrowable", "settled_to_base")


@dataclass(frozen=True)
class ModuleRecord:
    """What one modifier did to one module.

    Attributes:
        name: dotted module name.
        modifier: class name of the modifier.
        scheme: the scheme in words.
        error: relative squared error of the module's outputs, or of its weight where no output was seen; >= 0. GPTQ and SparseGPT
            estimate that of outputs of more than 1024 features, to 1 or 2 %. Against what this modifier was handed: of a weight that was
            pruned before, that of the pruned one.
        num_tokens: tokens that the module saw in calibration; None where none are needed.
        details: further numbers for the report.

    Raises:
        NumericsError: a number is NaN or infinite, which no report can hold.
    """

    name: str
    modifier: str
    scheme: str
    error: float
    num_tokens: int | None = None
    details: Mapping[str, Detail] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        """Refuse what is no number, while it can be said of which module it is."""
        numbers = {"error": self.error, **self.details}
        wrong = next((key for key, value in numbers.items() if isinstance(value, float) and not math.isfinite(value)), None)
        if wrong is not None:
            raise NumericsError(
                f"{self.name}: {self.modifier} finds {wrong}={numbers[wrong]}: its weights or outputs are too large for float32; scale the "
                "model down, or ignore this module"
            )


@dataclass(frozen=True, order=True)
class Fallback:
    """A module that did not get what the recipe asked for, the kind of fallback, and what happened."""

    module: str
    kind: str
    detail: str


@dataclass
class Report:
    """What the session did, module by module; the same run gives the same report.

    Attributes:
        modules: records by dotted module name.
        fallbacks: what did not get what the recipe asked for.
        notes: what else a user must know, a sentence each.
        transforms: what was done to weights before they were compressed and leaves the model's function as it is, in this order: plain data
            that suffice to do it again to the base.
    """

    modules: dict[str, ModuleRecord] = field(default_factory=dict)
    fallbacks: list[Fallback] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    transforms: list[dict[str, Any]] = field(default_factory=list)

    def add_fallback(self, module: str, kind: str, detail: str) -> None:
        """Note that a module did not get what the recipe asked for.

        Args:
            module: dotted module name.
            kind: the kind of fallback; fallbacks are counted by kind.
            detail: one sentence for the reader.
        """
        self.fallbacks.append(Fallback(module, kind, detail))

    def errors(self, names: Iterable[str]) -> dict[str, float]:
        """Return the relative errors of the named modules that were compressed."""
        return {name: self.modules[name].error for name in names if name in self.modules}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, sorted by name and free of times, ready for JSON."""
        modules = {}
        for name in sorted(self.modules):
            record = self.modules[name]
            details = {key: record.details[key] for key in sorted(record.details)}
            modules[name] = {
                "modifier": record.modifier,
                "scheme": record.scheme,
                "error": record.error,
                "num_tokens": record.num_tokens,
                "details": details,
            }
        rest = {key: list(value) for key, value in (("notes", self.notes), ("transforms", self.transforms)) if value}
        return {"modules": modules, "fallbacks": [asdict(fallback) for fallback in sorted(self.fallbacks)], **rest}


@dataclass
class State:
    """The shared state of one session; a callback gets it and may change the model through it.

    Attributes:
        model: the model under compression.
        device: where modules are processed.
        seed: seed of the run.
        report: what was done so far.
        token_mask: bool [batch, sequence], True for a real token, set before each forward pass; None when every token is real.
        batch_index: number of the batch that runs; None where nobody says.
        batch_shape: rows and columns of its tokens; None where nobody says.
        sample_parts: in which part of all samples each sample of that batch is (PartSum); None for those that another process counts.
        has_base_stream: True where every batch runs through the model as it was before compression, too.
        base_stream: True while a batch runs through the model as it was before compression, for modifiers that compare the two.
        picked: names of modules whose rows the forward picks by values; in the other stream they get those of other tokens.
        has_steps: False where no step of a training will come, so that nothing is to be made ready for one.
        keep_originals: keep replaced modules, so that an abort can put them back.
        originals: replaced modules by dotted name, in the order of replacement.
        swapped: names of the originals that are kept in any case, see `swap_module`.
        tensors: tables of modules that got tensors of their own, names and old tensors, see `own_tensors` and `put_tensor`.
        handles: of hooks that a modifier has put on the model to stay, see `keep_hook`.
        settings: objects of which an attribute changed, its name and its old value, see `set_setting`.
        claims: which modifier will change which module, by dotted name; so that no two change the same.
        touched: names of modules that modifiers change as well, but not for themselves alone.
        settled: names of modules that got parameters of their own and hold what they will hold, unless they are claimed, too.
        sparse: names of modules of which a modifier makes weights zero; who comes after it keeps these.
        settled_to_base: names of modules whose weights were changed to give what the uncompressed model gave on inputs of its own.
        phases: which modifier holds which tensor from when to when, by the tensor's id; see `hold`.
        schemes: what quantized modules get, by dotted name, as the modifiers before this one in the recipe have said.
        narrowable: names of modules whose weights are rounded in ranges that another modifier may narrow.
        kept_ranges: share of its range that each group of such a weight keeps, [R, G], by dotted name.
        data: calibration data, for modifiers that run forwards of their own; None where no data flows.
        progress: where such modifiers show how far they are.
        monitor: what the run has taken so far.
        bring: has the weights of named modules at hand on the device until others are named; those of the stage at work are there.
        ranks: the processes that share the run; a modifier that learns from samples sees those of its own, and adds up with the others.

    Raises:
        UserInputError: no generator takes the seed.
    """

    model: nn.Module
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    report: Report = field(default_factory=Report)
    token_mask: torch.Tensor | None = None
    batch_index: int | None = None
    batch_shape: tuple[int, ...] | None = None
    sample_parts: tuple[int | None, ...] = (0,)
    has_base_stream: bool = False
    base_stream: bool = False
    picked: frozenset[str] = frozenset()
    has_steps: bool = True
    keep_originals: bool = False
    originals: dict[str, nn.Module] = field(default_factory=dict)
    swapped: set[str] = field(default_factory=set)
    tensors: list[tuple[dict[str, Any], str, Tensor]] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)
    settings: list[tuple[object, str, object]] = field(default_factory=list)
    claims: dict[str, str] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)
    sparse: set[str] = field(default_factory=set)
    settled_to_base: set[str] = field(default_factory=set)
    phases: dict[int, list[tuple[float, float, str]]] = field(default_factory=dict)
    schemes: dict[str, QuantizationScheme] = field(default_factory=dict)
    narrowable: set[str] = field(default_factory=set)
    kept_ranges: dict[str, Tensor] = field(default_factory=dict)
    data: CalibrationData | None = None
    progress: Progress = field(default_factory=SilentProgress)
    monitor: Monitor = field(default_factory=Monitor)
    bring: Callable[[Collection[str]], None] = _at_hand
    ranks: Ranks = field(default_factory=Ranks)

    def __post_init__(self) -> None:
        """Refuse a seed that no generator takes; note which modules the model holds in several places."""
        self._other_names = other_names(self.model)
        self._placed: dict[str, tuple[nn.Module, WeakSet[nn.Module]]] = {}  # what stands by a name, and what stood there before
        if not -(2**63) <= self.seed < 2**64:
            raise UserInputError(f"seed: {self.seed} was given, and torch takes whole numbers from -2**63 to 2**64 - 1; give one of them")

    def enter_batch(self, data: CalibrationData, index: int) -> None:
        """Note which batch is about to run.

        Args:
            data: the batches with their masks.
            index: number of the batch.
        """
        mask = data.token_masks[index]
        self.token_mask = None if mask is None else mask.to(self.device)
        self.batch_index = index
        self.batch_shape = tuple(leading_tensor(data.batches[index]).shape[:2])
        self.sample_parts = tuple(part if self.ranks.counts(part) else None for part in data.sample_parts[index])

    def own_batches(self, data: CalibrationData) -> list[int]:
        """Say which batches hold a sample that this process counts.

        Args:
            data: the batches.

        Returns:
            Their numbers, in order; all in one process.
        """
        return [index for index, parts in enumerate(data.sample_parts) if any(map(self.ranks.counts, parts))]

    def leave_batch(self) -> None:
        """Note that no batch runs any more."""
        self.token_mask, self.batch_index, self.batch_shape, self.sample_parts = None, None, None, (0,)

    def claim(self, names: Iterable[str], modifier: str) -> None:
        """Note that a modifier will change modules, which no other may claim.

        Args:
            names: dotted names of the modules.
            modifier: label of the modifier.

        Raises:
            TargetError: another modifier has claimed one of them; nothing is claimed.
        """
        names = tuple(names)  # a generator gives them once
        taken = [name for name in names if name in self.claims]
        if taken:
            raise TargetError(
                f"{modifier}: {len(taken)} of its modules ({', '.join(taken[:3])}{', ...' if len(taken) > 3 else ''}) belong to "
                f"{self.claims[taken[0]]} already; make their targets disjoint, or leave one of the two out"
            )
        self.claims.update(dict.fromkeys(names, modifier))

    def touch(self, names: Iterable[str]) -> None:
        """Note that tensors of modules will change, in place and for others to change again: zeros that quantization keeps.

        Args:
            names: dotted names of the modules. What is neither claimed nor touched must be at the end what it was.
        """
        self.touched.update(names)

    def hold(self, tensors: Mapping[str, torch.Tensor], modifier: str, start: float, end: float) -> None:
        """Note that a modifier decides alone what becomes of tensors, from `start` to `end`; others may before and after.

        Args:
            tensors: name to tensor; one of several names is the same tensor.
            modifier: label of the modifier.
            start: index at which it begins.
            end: index before which it is over; math.inf where it is not.

        Raises:
            TargetError: another modifier holds one of them at that time; nothing is noted.
        """
        known = ((name, *phase) for name, tensor in tensors.items() for phase in self.phases.get(id(tensor), ()))
        taken = [(name, begins, ends, other) for name, begins, ends, other in known if start < ends and begins < end]
        if taken:
            name, begins, ends, other = taken[0]
            raise TargetError(
                f"{modifier}: {name}, one of {len(taken)}, is set to zero by {other} at the same time ({_span(start, end)} and "
                f"{_span(begins, ends)}); make their targets disjoint, leave one out, or let one begin where the other is over"
            )
        for tensor in tensors.values():
            self.phases.setdefault(id(tensor), []).append((start, end, modifier))

    def remember(self) -> Callable[[], None]:
        """Note what is claimed and reported now, for a call that may fail as a whole.

        Returns:
            A function that brings it back; it changes the state.
        """
        # Copies, for what follows adds to these very objects.
        noted = {name: copy.copy(getattr(self, name)) for name in _NOTED}
        phases = {key: list(held) for key, held in self.phases.items()}
        reported = {one.name: copy.copy(getattr(self.report, one.name)) for one in fields(self.report)}

        def bring_back() -> None:
            for owner, kept in ((self, {**noted, "phases": phases}), (self.report, reported)):
                for name, value in kept.items():
                    setattr(owner, name, value)

        return bring_back

    def replace_module(self, name: str, new: nn.Module) -> None:
        """Put `new` in the place of a module of the model; it takes over the training flag and the forward hooks. Changes the model.

        Args:
            name: dotted name of the module that goes.
            new: the module that comes.

        Raises:
            TargetError: the model has no module of that name, or the name is that of the model itself.
        """
        try:
            old = self.model.get_submodule(name)
        except AttributeError as error:
            raise TargetError(f"{name}: no module of the model has this name; give a dotted name from named_modules()") from error
        if old is self.model:
            raise TargetError("the model: it cannot be replaced inside itself; give the dotted name of a module below it")
        if isinstance(new, QuantizedLinear | FakeQuantizedLinear) and getattr(new.scheme.input_activations, "strategy", None) == "token":
            new.tokens_are_rows = tokens_are_rows(self.model, self.schemes)  # of all modifiers: none replaces before all are initialized
        new.train(old.training)
        hand_over_hooks(old, new)
        put_module(self.model, name, new, self._other_names)
        self._placed.setdefault(name, (new, WeakSet()))[1].add(old)
        self._placed[name] = (new, self._placed[name][1])
        self.touch([name])
        let_go(old.parameters(recurse=False))  # nobody else knows them any more
        if self.keep_originals:
            # The first is the model's own; what is replaced later is a modifier's work.
            self.originals.setdefault(name, old)

    def place_again(self) -> None:
        """Put what has taken a module's place there again, where the model holds the old one. Changes the model.

        A forward may put another module around the parts of one (BigBird's attention on short rows). What is replaced meanwhile stands
        in the other one, which goes when the run takes back what its forwards did.

        Raises:
            TargetError: something else stands there, so that what was done to the module is lost.
        """
        held = dict(self.model.named_modules(remove_duplicate=False))
        for name, (new, olds) in self._placed.items():
            now = held.get(name)
            if now in olds:
                put_module(self.model, name, new, self._other_names)
            elif now is not new and not any(above in self._placed for above in _above(name)):
                raise TargetError(
                    f"{name}: what a modifier has put there is gone, for the model's own forward exchanges modules around it; use "
                    'pipeline="basic", or ignore it'
                )

    def swap_module(self, name: str, new: nn.Module) -> None:
        """Put `new` in the place of a module whose tensors it shares. Changes the model.

        The old one costs no memory, so an abort puts it back even where originals are not kept, up to the end of a successful finalize.

        Args:
            name: dotted name of the module that goes.
            new: the module that comes; it holds the parameters of the old one.
        """
        keep, self.keep_originals = self.keep_originals, True
        try:
            self.replace_module(name, new)
        finally:
            self.keep_originals = keep
        self.swapped.add(name)

    def own_tensors(self, name: str) -> None:
        """Give a module parameters of its own, equal to those it has, to be changed in place by one modifier and others after it.

        Unlike a replaced module it stays the object that others hold, hooks and all. An abort brings the old parameters back.

        Args:
            name: dotted name of the module. Changes it.
        """
        module = self.model.get_submodule(name)
        for key, old in module._parameters.items():
            if old is not None:
                module._parameters[key] = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
                if self.keep_originals:
                    self.tensors.append((module._parameters, key, old))
        self.touch([name])

    def put_tensor(self, name: str, key: str, new: torch.Tensor) -> None:
        """Give a module another parameter or buffer, maybe of another shape. An abort brings the old one back.

        Args:
            name: dotted name of the module. Changes it.
            key: of the tensor.
            new: its values.
        """
        module = self.model.get_submodule(name)
        table: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
        old = table[key]
        table[key] = nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
        self.touch([name])
        if self.keep_originals:
            self.tensors.append((table, key, old))

    def keep_hook(self, handle: RemovableHandle) -> None:
        """Note a hook that becomes a part of the model. An abort takes it off, where originals are kept.

        Args:
            handle: of torch.
        """
        if self.keep_originals:
            self.handles.append(handle)

    def set_setting(self, holder: object, name: str, value: object) -> None:
        """Give an attribute of the model's config, or of a module, another value. An abort brings the old one back.

        Args:
            holder: whose attribute it is. Changes it.
            name: of the attribute.
            value: its new value.

        Raises:
            UserInputError: it has no such attribute, or none that can be set.
        """
        try:
            old = getattr(holder, name)
            setattr(holder, name, value)
        except AttributeError as error:
            raise UserInputError(
                f"{type(holder).__name__}.{name}: it was to become {value!r:.60}, and {error}; give an attribute that is there and can be "
                "set, for an abort brings its old value back"
            ) from error
        self.settings.append((holder, name, old))

    def forget_originals(self, swapped: bool = False) -> None:
        """Forget kept originals.

        Args:
            swapped: those that were swapped, too.
        """
        if swapped:
            self.swapped.clear()
            self.settings.clear()
        self.tensors.clear()
        self.handles.clear()
        for name in self.originals.keys() - self.swapped:
            del self.originals[name]

    def restore_originals(self) -> None:
        """Put every kept original back, the latest first, and forget them. Changes the model."""
        self._placed.clear()
        # Latest first: an inner module may have been replaced before the one around it.
        for name in reversed(tuple(self.originals)):
            put_module(self.model, name, self.originals.pop(name), self._other_names)
        while self.tensors:
            table, key, old = self.tensors.pop()
            table[key] = old
        while self.handles:
            self.handles.pop().remove()
        while self.settings:
            setattr(*self.settings.pop())
        self.swapped.clear()


def _above(name: str) -> Iterable[str]:
    """The names of the modules around one."""
    while name := name.rpartition(".")[0]:
        yield name


def _span(start: float, end: float) -> str:
    if math.isinf(start):
        return "the whole run"
    return f"from {start:g} on" if math.isinf(end) else f"{start:g} to {end:g}"


# What an earlier run left of a stage that it finished; see `Modifier.stage_memory` and `Modifier.skip_stage`.

StageValue = Detail | Tensor


@dataclass(frozen=True)
class FinishedStage:
    """What an earlier run left of a stage that it finished.

    Attributes:
        modules: dotted names of the stage's modules.
        memory: what the modifier's `stage_memory` gave after the stage; tensors are on the CPU.
        tensors: what modules held after the stage, by module and name, on the CPU; at least for every claimed module.
    """

    modules: Sequence[str]
    memory: Mapping[str, StageValue]
    tensors: Mapping[str, Mapping[str, Tensor]]
