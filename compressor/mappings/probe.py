"""Finding scale pairs on the model's own forward.

Output channels of a module are multiplied by powers of two, which changes no other bit of what floating-point products make of them. What
a layer is then handed is either what it was handed before, or that times the same powers, bit for bit: then the layer reads the channels,
its input is put back, and the forward runs on as if nothing had happened. If anything else is met, or the model's output differs in a
single bit at the end, no scale may move there, and what was met is the reason. No operator and no architecture is known by name.

First one source of each kind (`model.layers.*.mlp.up_proj`) is tried alone, then all sources of the kinds that passed at once. What a
factor does to weights, offsets of norms among it, is tried on copies of single modules in float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from compressor.data.collate import Batch, batch_to, call_model
from compressor.errors import NumericsError, TargetError, TracingError
from compressor.mappings.alone import close, double, doubled_arguments, input_first, input_of, outputs_of, scaling_offset
from compressor.mappings.pairs import Mappings, Refusal, ScalePair, pattern_of, scale_reader
from compressor.mappings.read_past import read_past
from compressor.model import resolve_device
from compressor.model.evaluation import evaluation_mode
from compressor.model.targets import owners_of_parameters
from compressor.nn import weight_of
from compressor.nn.build import is_quantizable
from compressor.nn.experts import SortedExperts, UnfusedExperts
from compressor.nn.online_rotation import ALREADY, online_rotations, turned_already
from compressor.progress import Progress, SilentProgress
from compressor.settings.kinds import DEVICE, MODULE, NAMES, PROGRESS
from compressor.settings.options import checked
from compressor.spelling import suggest
from compressor.tracing.footprint import Footprint
from compressor.tracing.graph.nodes import Unrepeatable
from compressor.tracing.picking import as_batch, check_model, excerpt
from compressor.tracing.targets.call_order import plain_forward

# Exponents of factors: so far apart that whatever is the same within a range alone, such as a clamp, is left on some channel. float16 has
# few of its own, and none to lose below.
_EXPONENTS = (-40, 40)
_OF_FLOAT16 = (0, 10)
# What a factor may take from the smallest numbers, which are rounded more coarsely.
_SMALLEST = 2.0**-116
_OF_SMALLEST_FLOAT16 = 2.0**-22  # four of its steps below its normal numbers
_NOT_BY_CHANNEL = "its weight does not scale its output channel by channel"


@checked(model=MODULE, device=DEVICE, sources=NAMES, progress=PROGRESS)
def find_pairs(
    model: nn.Module, batch: Batch, device: torch.device, *, sources: Collection[str] | None = None, progress: Progress | None = None
) -> Mappings:
    """Find which scales may move in a model, and prove each on a few tokens.

    Args:
        model: as it was afterwards; in any float dtype.
        batch: of token ids, or of whatever it takes; an excerpt of it is used.
        device: of the model.
        sources: dotted names to try; None for all norms and linear layers.
        progress: where a bar is shown.

    Returns:
        Proved pairs, and what was refused with the reason.

    Raises:
        TracingError: the forward fails, or gives other bits when it is run again; the batch is none; or the model cannot be followed.
        ModelError: there is no such device.
        TargetError: the model has no such source.
        NumericsError: it gives NaN.
    """
    names = [name for name, _ in model.named_modules() if name]
    unknown = next((name for name in sources or () if name not in names), None)
    if unknown is not None:
        raise TargetError(f"sources: {unknown!r} is no module of {type(model).__name__}; {suggest(unknown, names)}")
    check_model(model)
    prober = Prober(model, as_batch(batch), resolve_device(device), stirs_dead=True)
    with evaluation_mode(model), Footprint(model), all_experts(model), torch.no_grad():
        prober.run_plainly()
        kinds: dict[str, list[str]] = {}
        for name in prober.sources if sources is None else [name for name in prober.sources if name in sources]:
            kinds.setdefault(pattern_of(name), []).append(name)
        with (progress or SilentProgress()).task("find mappings", total=len(kinds) + 1) as task:
            found = _Findings()
            for members in kinds.values():
                prober.try_kind(members, found)
                task.advance()
            prober.try_all([name for members in kinds.values() for name in members if name not in found.refused], found)
            task.advance()
    for name in set(sources or ()).difference(prober.sources):
        is_other = name in prober.widths or name not in prober.modules
        found.refused[name] = "it is no norm and no linear layer" if is_other else "the forward of this data does not call it"
    order = {name: place for place, name in enumerate(names)}
    pairs = sorted(found.pairs.values(), key=lambda pair: order[pair.source])
    refused = [Refusal(name, why) for name, why in sorted(found.refused.items(), key=lambda item: order[item[0]])]
    return Mappings(tuple(pairs), tuple(refused))


@dataclass
class _Findings:
    """What has been proved so far, and what has been refused."""

    pairs: dict[str, ScalePair] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


class Blocked(Exception):
    """A forward met something that is no scaled input."""

    def __init__(self, met: str) -> None:
        super().__init__(met)
        self.met = met


@contextmanager
def all_experts(model: nn.Module) -> Iterator[None]:
    """Have every expert called on all tokens; what a router did not choose counts for nothing."""
    layers = [module for module in model.modules() if isinstance(module, UnfusedExperts)]

    def forward_of(layer: UnfusedExperts) -> Callable[..., Tensor]:
        if isinstance(layer, SortedExperts):
            return layer.forward_dense

        def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            final = torch.zeros_like(hidden_states)
            for index, expert in enumerate(layer.experts()):
                share_N1 = (top_k_weights * (top_k_index == index)).sum(-1, keepdim=True)
                final = final + expert(hidden_states) * share_N1
            return final.to(hidden_states.dtype)

        return forward

    for layer in layers:
        layer.__dict__["forward"] = forward_of(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["forward"]


class Prober:
    """Runs a model with factors on some outputs, and watches what arrives.

    Attributes:
        sources: dotted names of norms and linear layers that the forward calls, in the order of their first calls.
    """

    def __init__(self, model: nn.Module, batch: Batch, device: torch.device, *, in_front: bool = False, stirs_dead: bool = False) -> None:
        """Take a model and a batch, of which an excerpt is used where the model takes one.

        `in_front` looks at inputs before hooks, and rotations, do; `stirs_dead`: weights of all zeros give numbers, so readers are told.
        """
        self._in_front, self._stirs_dead = in_front, stirs_dead
        self._stirred: dict[str, Tensor] = {}
        self.sources: list[str] = []
        self._model, self._batch, self._whole, self._device = model, batch_to(excerpt(batch, 0), device), batch, device
        self.modules = {name: module for name, module in model.named_modules() if has_weight(module)}
        self.inputs: dict[str, list[Tensor]] = {}
        self.arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}  # of the first call, in which weights are tried
        self.widths: dict[str, int] = {}
        self.outputs: list[Tensor] = []
        self.past: set[str] = set()  # layers whose weight or bias counts elsewhere, too
        self.tied = tied_modules(model)
        self._scalable: dict[Any, float | str] = {}
        turns: dict[str, set[tuple[str, ...]]] = {}
        for name, module in self.modules.items():
            turns.setdefault(pattern_of(name), set()).add(tuple(one.side for one in online_rotations(module)))
        self._turns_differ = any(len(kinds) > 1 for kinds in turns.values())

    def run_plainly(self) -> None:
        """Note what every layer is handed, and what the model gives; see `find_pairs` for the errors."""
        try:
            self.outputs = self.forward(self._noting(), plain_forward)
        except Unrepeatable:  # the model may take whole batches only, as one whose rows belong together does (MusicGen)
            self.inputs, self.arguments, self._batch = {}, {}, batch_to(self._whole, self._device)
            self.outputs = self.forward(self._noting(), plain_forward)
        if self._stirred:
            self.inputs, self.arguments = {}, {}
            self.outputs = self.forward(self._noting(), plain_forward)
        again = self.forward({})
        if any(bool(one.isnan().any()) for one in self.outputs):
            spoilt = [name for name, seen in self.inputs.items() if not all(bool(one.isfinite().all()) for one in seen)]
            first = f", and {spoilt[0]} is the first that is handed NaN or infinity" if spoilt else ""
            raise NumericsError(f"mappings: the model gives NaN{first}; check the model in its own dtype on this data")
        if len(again) != len(self.outputs) or not all(map(torch.equal, again, self.outputs)):
            raise TracingError(
                "mappings: the forward gives other bits when it is run again, so nothing can be proved on it; switch off what draws random "
                "numbers"
            )
        self.sources = [name for name in self.inputs if name in self.widths]
        own = [name for name in self.inputs if not self.tied.get(name)]
        self.past = set(read_past(self._model, own, lambda: torch.cat([one.double().flatten() for one in self.forward({})])))

    def try_kind(self, members: Sequence[str], found: _Findings) -> None:
        """Try the first source of a kind: what stops it stops all, but for a rotation that other layers may be without."""
        for place, source in enumerate(members, 1):
            self.try_one(source, found)
            why = found.refused.get(source, "")
            if not (self._turns_differ and ALREADY in why):
                found.refused |= dict.fromkeys(members[place:], why) if why else {}
                return

    def try_one(self, source: str, found: _Findings) -> None:
        """Try one source alone, and note what came of it."""
        unfit = self._unfit(source)
        if unfit:
            found.refused[source] = unfit
            return
        watch = _Watch(self, {source: self._factor(source)})
        why = watch.run()
        pair = watch.pairs.get(source)
        if not why and pair is None:
            why = "no layer reads its output"
        why = why or self._cannot_change(source, watch)
        if why or pair is None:
            found.refused[source] = why
        else:
            found.pairs[source] = replace(pair, offset=self._offset(source))

    def try_all(self, sources: Sequence[str], found: _Findings) -> None:
        """Try all sources at once; each alone, where that fails."""
        fit = [source for source in sources if not self._unfit(source)]
        watch = _Watch(self, {source: self._factor(source) for source in fit})
        if watch.run() or any(source not in watch.pairs or self._cannot_change(source, watch) for source in fit):
            for source in [one for one in sources if one not in found.pairs]:
                self.try_one(source, found)
            return
        found.pairs |= {source: replace(watch.pairs[source], offset=self._offset(source)) for source in fit}
        found.refused |= {source: self._unfit(source) for source in sources if source not in fit}

    def _unfit(self, source: str) -> str:
        turned = turned_already(self.modules[source], "output")
        if turned:
            return f"it is a layer {turned}"
        offset = self._offset_or_reason(source)
        return offset if isinstance(offset, str) else ""

    def _offset(self, source: str) -> float:
        offset = self._offset_or_reason(source)
        assert isinstance(offset, float)
        return offset

    def _cannot_change(self, source: str, watch: _Watch) -> str:
        """Say why weights cannot take the factor, though the outputs could."""
        pair = watch.pairs[source]
        mixed = next((name for name in pair.readers if watch.seen[name] != {source}), None)
        if mixed is not None:
            return f"{mixed} is called on other inputs, too"
        kinds = {pattern_of(name) for name in pair.readers}
        uncalled = next((name for name in self.modules if name not in self.inputs and pattern_of(name) in kinds), None)
        if uncalled is not None:
            return f"{uncalled}, which this data does not call, may read it, too"
        past = next((name for name in (source, *pair.readers) if name in self.past), None)
        if past is not None:
            return f"the weight or bias of {past} is read past its forward"
        tied = next((name for name in (source, *pair.readers) if self.tied.get(name)), None)
        if tied is not None:
            return f"{tied} is tied to {self.tied[tied]}"
        stubborn = next((name for name in pair.readers if not self._divides(name)), None)
        return f"{stubborn} does more with its weight than multiply" if stubborn else ""

    def _factor(self, source: str) -> Tensor:
        """Powers of two, drawn by the source's name."""
        width = self.widths[source]
        is_narrow = any(seen[0].dtype == torch.float16 for seen in self.inputs.values())
        least, most = _OF_FLOAT16 if is_narrow else _EXPONENTS
        generator = torch.Generator().manual_seed(len(source) * 7919 + width)
        exponents = torch.randint(least, most + 1, (width,), generator=generator)
        return torch.exp2(exponents.float()).to(self.inputs[source][0].device)

    # What a factor does to the weights of one module alone, in float64.

    def _offset_or_reason(self, source: str) -> float | str:
        module = self.modules[source]
        key = ("source", type(module), module.get_parameter("weight").shape, pattern_of(source))
        if key not in self._scalable:
            self._scalable[key] = self._find_offset(source, module)
        return self._scalable[key]

    def _find_offset(self, source: str, module: nn.Module) -> float | str:
        weight = module.get_parameter("weight")
        if len(weight if weight.dim() == 1 else weight_of(module)) != self.widths[source]:  # a norm that has a row for each head
            return _NOT_BY_CHANNEL
        offset = scaling_offset(module, self.widths[source], self.arguments[source])
        return _NOT_BY_CHANNEL if offset is None else offset

    def _divides(self, name: str) -> bool:
        module = self.modules[name]
        key = ("reader", type(module), module.get_parameter("weight").shape, pattern_of(name))
        if key not in self._scalable:
            (x, *args), kwargs = doubled_arguments(self.arguments[name])
            factor_K = torch.linspace(0.5, 2.0, x.shape[-1], dtype=torch.float64, device=x.device)
            changed = double(module)
            scale_reader(changed, factor_K)
            plain, scaled = outputs_of(double(module), (x, *args), kwargs), outputs_of(changed, (x * factor_K, *args), kwargs)
            same = len(plain) == len(scaled) and all(map(close, scaled, plain)) and bool(plain)
            self._scalable[key] = 0.0 if same else "no"
        return self._scalable[key] == 0.0

    # Forwards.

    def _noting(self) -> dict[str, tuple[Callable[..., Any] | None, Callable[..., Any] | None]]:
        def before(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                x = input_of(args, kwargs)
                if x is not None and x.numel() and x.shape[-1] == columns_of(module):  # an expert without tokens shows nothing
                    self.inputs.setdefault(name, []).append(x.detach().clone())
                    self.arguments.setdefault(name, tree_map_only(Tensor, lambda one: one.detach().clone(), input_first(args, kwargs)))

            return hook

        def after(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                del args
                if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
                    self.widths[name] = output.shape[-1]
                    if self._stirs_dead and not output.any() and not module.get_parameter("weight").any():
                        self._stirred[name] = torch.linspace(0.5, 1.5, output.shape[-1], dtype=output.dtype, device=output.device)

            return hook

        return {name: (before(name), after(name)) for name in self.modules}

    def forward(
        self,
        hooks: Mapping[str, tuple[Callable[..., Any] | None, Callable[..., Any] | None]],
        run: Callable[[nn.Module, Batch], Any] = call_model,
    ) -> list[Tensor]:
        """Run the model with hooks before and after modules, by name; return the tensors that it gives."""
        with ExitStack() as stack:
            for name, noise_C in self._stirred.items():
                stack.callback(self.modules[name].register_forward_hook(partial(_stir, noise_C)).remove)
            for name, (before, after) in hooks.items():
                if before is not None:
                    stack.callback(self.modules[name].register_forward_pre_hook(before, with_kwargs=True, prepend=self._in_front).remove)
                if after is not None:
                    stack.callback(self.modules[name].register_forward_hook(after).remove)
            return [leaf.detach() for leaf in tree_leaves(_plain(run(self._model, self._batch))) if isinstance(leaf, Tensor)]


class _Watch:
    """One forward with factors.

    Attributes:
        pairs: what was read of each source.
        seen: of every layer, whose factors its inputs carried; None for calls without any.
    """

    def __init__(self, prober: Prober, factors: Mapping[str, Tensor]) -> None:
        """Take factors by source."""
        self.pairs: dict[str, ScalePair] = {}
        self.seen: dict[str, set[str | None]] = {}
        self._prober, self._factors = prober, factors
        self._active: list[str] = []  # sources that have been called, the latest last
        self._calls: dict[str, int] = {}

    def run(self) -> str:
        """Run it; say what stopped it, or nothing where all was as before."""
        prober = self._prober
        hooks = {
            name: (self._arriving(name) if name in prober.inputs else None, self._leaving(name) if name in self._factors else None)
            for name in prober.modules
        }
        try:
            outputs = prober.forward(hooks)
        except Blocked as blocked:
            return f"it meets {blocked.met}"
        if len(outputs) != len(prober.outputs) or not all(map(torch.equal, outputs, prober.outputs)):
            return "it meets the model's output, which no layer between them reads"
        return ""

    def _leaving(self, name: str) -> Callable[..., Tensor]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            del module, args
            if name in self._active:
                self._active.remove(name)
            self._active.append(name)
            return output * self._factors[name].to(output.dtype)

        return hook

    def _arriving(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            x, number = input_of(args, kwargs), self._calls.get(name, 0)
            if x is not None and not x.numel():
                return None
            self._calls[name] = number + 1
            known = self._prober.inputs[name]
            if x is None or number >= len(known) or x.shape != known[number].shape:
                raise Blocked(f"{name} ({caller()}), which is called otherwise")
            base = known[number].clone()
            if self._active and not base.any():
                raise Blocked(f"{name} ({caller()}), whose input is zero on this data, so that nothing can be seen")
            if torch.equal(x, base):
                self.seen.setdefault(name, set()).add(None)
                return None
            for source in reversed(self._active):
                if self._reads(name, source, x, base):
                    self.seen.setdefault(name, set()).add(source)
                    return tree_map_only(Tensor, lambda one: base if one is x else one, (args, kwargs))
            why = turned_already(module, "input") or "whose input is no longer a scaled one"
            raise Blocked(f"{name} ({caller()}), {why}")

        return hook

    def _reads(self, name: str, source: str, x: Tensor, base: Tensor) -> bool:
        factor_C, pair = self._factors[source], self.pairs.get(source)
        columns = x.shape[-1]
        if columns % len(factor_C):
            return False
        shapes = [(pair.head_dim, pair.repeats)] if pair is not None else _layouts(len(factor_C), columns)
        for head_dim, repeats in shapes:
            tried = ScalePair(source, (name,), head_dim, repeats)
            if len(factor_C) * repeats == columns and _is_scaled(x, base, tried.spread(factor_C)):
                readers = (name,) if pair is None else pair.readers if name in pair.readers else (*pair.readers, name)
                place = caller() if pair is None else pair.place
                self.pairs[source] = replace(tried, readers=readers, place=place)
                return True
        return False


def _stir(noise_C: Tensor, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    del module, args
    return output + noise_C


def _layouts(channels: int, columns: int) -> list[tuple[int | None, int]]:
    """How channels may lie in columns: as they are, or heads of some size, each several times in a row; large heads first."""
    repeats = columns // channels
    if repeats == 1:
        return [(None, 1)]
    return [(size, repeats) for size in range(channels, 0, -1) if channels % size == 0]


def _is_scaled(x: Tensor, base: Tensor, factor_K: Tensor) -> bool:
    """Bit for bit but for the last places of the smallest numbers, which a factor shifts, and where float16 has overflowed."""
    other = base * factor_K.to(x.dtype)
    if x.dtype != torch.float16:
        return bool(((x == other) | ((x - other).abs() <= _SMALLEST)).all())
    is_told = x.isfinite()  # a factor is at least 1, and so is what it makes of the last place of a small number
    return bool(is_told.any()) and bool(((x - other).float().abs() <= _OF_SMALLEST_FLOAT16 * factor_K.float())[is_told].all())


def has_weight(module: nn.Module) -> bool:
    """Tell norms, linear layers and embeddings, alone, from other modules.

    Args:
        module: any module.

    Returns:
        True where a forward is watched.
    """
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() in (1, 2) and weight.is_floating_point() and next(module.children(), None) is None


def columns_of(module: nn.Module) -> int:
    """Return how many channels a module with a weight reads.

    Args:
        module: see `has_weight`.

    Returns:
        Columns of the weight, or entries of that of a norm.
    """
    weight = weight_of(module) if is_quantizable(module) else module.get_parameter("weight")
    return int(weight.shape[-1])


def tied_modules(model: nn.Module) -> dict[str, str]:
    """Modules whose weight or bias another one holds, too, or that compute it, with the name of what they share it with."""
    tied = {}
    for names in owners_of_parameters(model).values():
        for name in names if len(names) > 1 else ():
            tied[name.rpartition(".")[0]] = next(other for other in names if other != name)
    return tied


def _plain(output: Any) -> Any:
    return dict(output) if hasattr(output, "keys") else output


def caller() -> str:
    """File and line of the code that called the module whose hook is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if Path(name).parent != Path(__file__).parent and f"torch{'/'}nn" not in Path(name).as_posix():
            break
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
