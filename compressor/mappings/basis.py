"""Finding the residual basis: which modules write to the hidden states that all layers add to, and which read them.

What may be turned by an orthogonal matrix without a change of what the model computes is asked of its own forward. A vector is added to the
output of one module. If every layer is then handed what it was handed before, or that plus a multiple of the same vector, the module writes
to hidden states, and those layers read them; each is given back its old input, so nothing else can change. Modules that share a reader
write to one basis; the one with the most kinds of writers is meant. At last the output of every writer is turned: each reader must be
handed its old input turned alike, all other layers and the model's output what they were. No operator and no architecture is known by name.

Shapes: D channels of the basis, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from compressor.algorithms.rotations import Rotation, make_rotation
from compressor.data.collate import Batch
from compressor.errors import TargetError
from compressor.mappings.alone import close, double, doubled_arguments, input_of, output_of
from compressor.mappings.pairs import Mappings, ScalePair, pattern_of
from compressor.mappings.probe import Blocked, Prober, all_experts, caller, find_pairs
from compressor.model.evaluation import evaluation_mode
from compressor.nn import weight_of
from compressor.nn.build import is_quantizable
from compressor.nn.online_rotation import turned_already
from compressor.progress import Progress, SilentProgress
from compressor.tracing.footprint import Footprint

_SPREAD = 4.0  # of the added vector, over the largest hidden state of a channel: it stands above the rounding of narrow dtypes
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative; narrow dtypes round every sum
_NARROW_TOLERANCE = 0.1
_MOST_TRIED = 16  # layers of one kind, of which one that is heard speaks for all


@dataclass(frozen=True)
class Basis:
    """Hidden states that may be turned.

    Attributes:
        size: D.
        writers: dotted names of embeddings and linear layers whose outputs are added to them.
        norms: that read them, each with all layers that read the norm.
        readers: dotted names of layers that read them without a norm between.
        keeps_mean: a norm subtracts the mean of a token's channels, so that only a rotation that keeps it may be used.
        tied: heads whose weight is that of an embedding, with its name; they get one of their own, for the two are turned differently.
        place: file and line of the model's code that calls the first reader.
    """

    size: int
    writers: tuple[str, ...]
    norms: tuple[ScalePair, ...]
    readers: tuple[str, ...]
    keeps_mean: bool
    tied: Mapping[str, str] = field(default_factory=dict)
    place: str = ""


def find_basis(model: nn.Module, batch: Batch, device: torch.device, *, progress: Progress | None = None) -> Basis:
    """Find the basis of the hidden states that layers add to, and prove that it may be turned.

    Args:
        model: as it was afterwards; in any float dtype.
        batch: of token ids; an excerpt of it is used.
        device: of the model.
        progress: where a bar is shown.

    Returns:
        The basis.

    Raises:
        TargetError: there is none, or it cannot be turned; the message says what is in the way.
        TracingError: the forward fails, or gives other bits when it is run again.
        NumericsError: it gives NaN.
    """
    with untied_heads(model) as tied:
        prober = Prober(model, batch, device)
        with evaluation_mode(model), Footprint(model), all_experts(model), torch.no_grad():
            prober.run_plainly()
            search = _Search(prober)
            found = search.run(progress or SilentProgress())
        norms = [name for name in found.readers if search.is_norm(name)]
        pairs = find_pairs(model, batch, device, sources=norms, progress=progress)
    return Basis(
        size=found.size,
        writers=tuple(name for name in prober.modules if name in found.writers),
        norms=tuple(_foldable(pairs, name) for name in norms),
        readers=tuple(name for name in found.readers if name not in norms),
        keeps_mean=search.keeps_mean(norms),
        tied={head: source for head, source in tied.items() if source in found.writers},
        place=found.place,
    )


@contextmanager
def untied_heads(model: nn.Module) -> Iterator[dict[str, str]]:
    """Give heads that share the weight of an embedding a parameter of their own, of the same memory, for a while.

    Args:
        model: the same afterwards.

    Yields:
        Dotted names of the heads, each with that of its embedding.
    """
    embeddings = {id(module.weight): name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    heads = {
        name: embeddings[id(weight)]
        for name, module in model.named_modules()
        if not isinstance(module, nn.Embedding) and (weight := module._parameters.get("weight")) is not None and id(weight) in embeddings
    }
    kept = {name: model.get_submodule(name).get_parameter("weight") for name in heads}
    for name, weight in kept.items():
        model.get_submodule(name)._parameters["weight"] = nn.Parameter(weight.data, requires_grad=False)
    try:
        yield heads
    finally:
        for name, weight in kept.items():
            model.get_submodule(name)._parameters["weight"] = weight


def _foldable(pairs: Mappings, norm: str) -> ScalePair:
    pair = pairs.by_source.get(norm)
    if pair is None or pair.head_dim is not None:
        why = pairs.why_not.get(norm, "its readers have heads")
        raise TargetError(f"the weight of {norm}, which reads the hidden states, cannot move into what reads it, for {why}")
    return pair


@dataclass
class _Found:
    """Writers and readers, readers in the order of their calls."""

    size: int
    writers: set[str]
    readers: tuple[str, ...]
    place: str


class _Search:
    """Asks one forward after the other."""

    def __init__(self, prober: Prober) -> None:
        """Take a prober that has run plainly."""
        self._prober = prober
        self._tolerance = _NARROW_TOLERANCE
        self._norm_keeps_mean: dict[tuple[Any, ...], bool] = {}

    def run(self, progress: Progress) -> _Found:
        """Find writers and readers, and prove that they are all."""
        prober = self._prober
        kinds: dict[str, list[str]] = {}
        for name in prober.modules:
            if name in prober.widths:
                kinds.setdefault(pattern_of(name), []).append(name)
        reads: dict[str, set[str]] = {}
        blocked: dict[str, str] = {}
        with progress.task("find the residual basis", total=len(kinds) + 1) as task:
            for members in kinds.values():
                for name in members[:_MOST_TRIED]:  # routers may not choose the first of them
                    ruler_D = self._ruler(name, prober.widths[name])
                    if ruler_D is None:
                        break
                    watch = _Shift(prober, name, ruler_D)
                    blocked[name] = watch.run()
                    if not blocked[name] and watch.readers:
                        reads[name] = {pattern_of(one) for one in watch.readers}
                    if blocked[name] or watch.readers:
                        break
                task.advance()
            groups = [_connected(reads, name) for name in reads]
            groups = [group for group in groups if group[1:] or not self.is_norm(group[0])]  # one norm and its layers: no sum
            if not groups:
                raise TargetError(_why_none(prober, blocked))
            writers = max(groups, key=len)
            found = self._proved(prober.widths[writers[0]], {name: kinds[pattern_of(name)] for name in writers})
            task.advance()
        return found

    def is_norm(self, name: str) -> bool:
        """Tell norms from layers."""
        return self._prober.modules[name].get_parameter("weight").dim() == 1

    def keeps_mean(self, norms: Collection[str]) -> bool:
        """Say whether a norm takes hidden states that have another mean for others; norms that may not be turned at all are an error."""
        return any(self._keeps_mean(name) for name in norms)

    def _ruler(self, source: str, size: int) -> Tensor | None:
        """A vector [D] that stands above what it is added to; None where no layer has so many inputs."""
        inputs = [x for calls in self._prober.inputs.values() for x in calls if x.shape[-1] == size]
        if not inputs:
            return None
        dtype = inputs[0].dtype
        self._tolerance = _TOLERANCE.get(dtype, _NARROW_TOLERANCE)
        largest_D = torch.stack([x.float().flatten(0, -2).abs().amax(0) for x in inputs]).amax(0)
        generator = torch.Generator().manual_seed(len(source))
        signs_D = torch.randint(2, (size,), generator=generator) * 2 - 1
        spread_D = (1 + torch.rand(size, generator=generator, dtype=torch.float32)) * signs_D * _SPREAD
        return (largest_D.clamp_min(float(largest_D.mean()) + 1e-6) * spread_D.to(largest_D.device)).to(dtype)

    def _proved(self, size: int, members: Mapping[str, list[str]]) -> _Found:
        writers = {name for names in members.values() for name in names}
        norm = next((name for name in members if self.is_norm(name)), None)
        if norm is not None:
            raise TargetError(f"{norm} adds to the hidden states what it multiplies channel by channel, and no rotation may pass that")
        for name, module in self._prober.modules.items():
            if name in writers and (why := turned_already(module, "output")):
                raise TargetError(f"{name}, which adds to the hidden states, is a layer {why}")
        uncalled = [
            name
            for name in self._prober.modules
            if pattern_of(name) in {pattern_of(one) for one in writers} and name not in self._prober.widths
        ]
        if uncalled:
            raise TargetError(f"{uncalled[0]}, which this data does not call, may write to the hidden states, too")
        tied = next((name for name in self._prober.modules if name in writers and self._prober.tied.get(name)), None)
        if tied is not None:
            raise TargetError(f"{tied}, which adds to the hidden states, is tied to {self._prober.tied[tied]}")
        watch = _Turned(self._prober, writers, make_rotation("random-matrix", size), self._tolerance)
        met = watch.run()
        if met:
            raise TargetError(f"turned hidden states meet {met}")
        stubborn = next((name for name in watch.readers if not self.is_norm(name) and not self._turns(name)), None)
        if stubborn is not None:
            raise TargetError(f"{stubborn}, which reads them, does more with its weight than multiply")
        return _Found(size, writers, tuple(watch.readers), watch.place)

    # One module alone, in float64.

    def _keeps_mean(self, name: str) -> bool:
        module = self._prober.modules[name]
        key = (type(module), pattern_of(name))
        if key not in self._norm_keeps_mean:
            found = next((keeps for keeps in (False, True) if self._norm_turns(name, keeps_mean=keeps)), None)
            if found is None:
                raise TargetError(f"{name}, which reads the hidden states, gives others when they are turned")
            self._norm_keeps_mean[key] = found
        return self._norm_keeps_mean[key]

    def _norm_turns(self, name: str, *, keeps_mean: bool) -> bool:
        (x, *args), kwargs = doubled_arguments(self._prober.arguments[name])
        rotation = make_rotation("random-matrix", x.shape[-1], seed=1, keeps_mean=keeps_mean)
        for neutral in (1.0, 0.0):  # 0 where the norm multiplies by 1 + weight
            module = double(self._prober.modules[name])
            module.get_parameter("weight").data.fill_(neutral)
            bias = module._parameters.get("bias")
            if bias is not None:
                bias.data.zero_()
            plain, turned = output_of(module, (x, *args), kwargs), output_of(module, (rotation.turn(x), *args), kwargs)
            if plain is not None and bool(plain.any()):
                return close(turned, rotation.turn(plain))
        return False

    def _turns(self, name: str) -> bool:
        (x, *args), kwargs = doubled_arguments(self._prober.arguments[name])
        rotation = make_rotation("random-matrix", x.shape[-1], seed=1)
        changed = double(self._prober.modules[name])
        weight = weight_of(changed) if is_quantizable(changed) else changed.get_parameter("weight")
        weight.copy_(rotation.turn(weight))
        plain = output_of(double(self._prober.modules[name]), (x, *args), kwargs)
        return plain is not None and close(output_of(changed, (rotation.turn(x), *args), kwargs), plain)


def find_values(
    model: nn.Module, batch: Batch, device: torch.device, pairs: Collection[ScalePair], head_dim: int | None
) -> tuple[tuple[ScalePair, int], ...]:
    """Find which linear layers give values that attention weighs, and nothing else: each head of them may be turned.

    Args:
        model: as it was afterwards.
        batch: of token ids; an excerpt of it is used.
        device: of the model.
        pairs: of scales that may move; those between linear layers are tried.
        head_dim: size of heads, where a pair does not say it.

    Returns:
        The pairs that passed, in their order, each with the size of its heads.
    """
    prober = Prober(model, batch, device)
    found: list[tuple[ScalePair, int]] = []
    with evaluation_mode(model), Footprint(model), all_experts(model), torch.no_grad():
        prober.run_plainly()
        fit: dict[str, bool] = {}
        for pair in pairs:
            size = pair.head_dim or head_dim
            kind = pattern_of(pair.source)
            if size is None or prober.modules[pair.source].get_parameter("weight").dim() != 2 or prober.widths[pair.source] % size:
                continue
            if kind not in fit:
                dtype = prober.inputs[pair.source][0].dtype
                watch = _Turned(prober, {pair.source}, make_rotation("random-matrix", size), _TOLERANCE.get(dtype, _NARROW_TOLERANCE))
                fit[kind] = size > 1 and not watch.run() and tuple(watch.readers) == pair.readers
            if fit[kind]:
                found.append((pair, size))
    return tuple(found)


def _why_none(prober: Prober, blocked: Mapping[str, str]) -> str:
    embedding = next((name for name in blocked if isinstance(prober.modules[name], nn.Embedding)), None)
    first = embedding or next(iter(blocked), None)
    return "no layer reads what another one gives" if first is None else f"what {first} gives meets {blocked[first] or 'no layer'}"


def _connected(reads: Mapping[str, set[str]], first: str) -> list[str]:
    """Writers that share readers with one, or with others that do."""
    found, seen = [first], set(reads[first])
    while True:
        more = [name for name in reads if name not in found and reads[name] & seen]
        if not more:
            return found
        found += more
        seen = seen.union(*(reads[name] for name in more))


class Watch:
    """One forward with changed outputs.

    Attributes:
        readers: dotted names of layers that were handed what was changed, in the order of their first calls.
        place: of the first such call.
    """

    def __init__(self, prober: Prober, sources: Collection[str]) -> None:
        """Take the modules whose outputs change."""
        self.readers: dict[str, None] = {}
        self.place = ""
        self._prober, self._sources = prober, sources
        self._calls: dict[str, int] = {}

    def run(self) -> str:
        """Run it; say what it met, or nothing where all was as it should be."""
        prober = self._prober
        hooks = {
            name: (self._arriving(name) if name in prober.inputs else None, self._leaving if name in self._sources else None)
            for name in prober.modules
        }
        try:
            outputs = prober.forward(hooks)
        except Blocked as blocked:
            return blocked.met
        if len(outputs) != len(prober.outputs) or not all(map(torch.equal, outputs, prober.outputs)):
            return "the model's output, which no layer between them reads"
        uneven = next((name for name in self.readers if self._calls[name] != len(prober.inputs[name])), None)
        return f"{uneven}, which is called otherwise" if uneven else ""

    def changed(self, output: Tensor) -> Tensor:
        """Return what a source gives in place of its output."""
        raise NotImplementedError

    def is_changed(self, x: Tensor, base: Tensor) -> bool:
        """Say whether an input that is another one carries the change of the sources, and nothing else."""
        raise NotImplementedError

    def _leaving(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        del module, args
        return self.changed(output)

    def _arriving(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            x, number = input_of(args, kwargs), self._calls.get(name, 0)
            self._calls[name] = number + 1
            known = self._prober.inputs[name]
            if x is None or number >= len(known) or x.shape != known[number].shape:
                raise Blocked(f"{name} ({caller()}), which is called otherwise")
            base = known[number].clone()
            if torch.equal(x, base):
                if name in self.readers:
                    raise Blocked(f"{name} ({caller()}), which is called on other inputs, too")
                return None
            if not self.is_changed(x, base):
                why = turned_already(module, "input") or "whose input is something else then"
                raise Blocked(f"{name} ({caller()}), {why}")
            if number and name not in self.readers:
                raise Blocked(f"{name} ({caller()}), which is called on other inputs, too")
            self.readers[name] = None
            self.place = self.place or caller()
            return tree_map_only(Tensor, lambda one: base if one is x else one, (args, kwargs))

        return hook


class _Shift(Watch):
    """A vector is added to what one module gives."""

    def __init__(self, prober: Prober, source: str, ruler_D: Tensor) -> None:
        """Take the module and the vector [D]."""
        super().__init__(prober, {source})
        self._ruler_D = ruler_D
        self._tolerance = _TOLERANCE.get(ruler_D.dtype, _NARROW_TOLERANCE)

    def changed(self, output: Tensor) -> Tensor:
        """Add it to every token."""
        return output + self._ruler_D.to(output.dtype)

    def is_changed(self, x: Tensor, base: Tensor) -> bool:
        """Say whether each token differs by a multiple of it: routers weigh what experts give."""
        if x.shape[-1] != len(self._ruler_D):
            return False
        share_ND = (x.double() - base.double()) / self._ruler_D.double()
        share_N1 = share_ND.mean(-1, keepdim=True)
        off_N = (share_ND - share_N1).square().mean(-1).sqrt()
        return bool((off_N <= self._tolerance * share_N1.abs().amax().clamp_max(1.0)).all())


class _Turned(Watch):
    """What all writers give is turned."""

    def __init__(self, prober: Prober, sources: Collection[str], rotation: Rotation, tolerance: float) -> None:
        """Take the writers and the matrix."""
        super().__init__(prober, sources)
        self._rotation, self._tolerance = rotation, tolerance

    def changed(self, output: Tensor) -> Tensor:
        """Turn every token."""
        return self._rotation.turn(output.double()).to(output.dtype)

    def is_changed(self, x: Tensor, base: Tensor) -> bool:
        """Say whether every token is turned."""
        if x.shape[-1] % self._rotation.size:
            return False
        turned = self._rotation.turn(base.double())
        off_N = (x.double() - turned).square().mean(-1).sqrt()
        return bool((off_N <= self._tolerance * turned.square().mean(-1).sqrt().clamp_min(1e-30)).all())
