"""The upgrade alarm: pass lists are goldens per release, and a list that nobody has seen is tried on a small zoo before it is trusted.

An optimizer that gains a pass changes what a skip list protects, without a word. So the list in force is kept with its hash for each
release; where it is new, `explain` runs again and says whether the skips that a team relies on still hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from compressor.atomic import whole_file
from compressor.errors import UserInputError
from compressor.json_text import from_json, to_json
from harness.onnx_graph.contracts.base import Contract
from harness.onnx_graph.roundtrip.explain import OPTIMIZER_OF, explain
from harness.onnx_graph.roundtrip.optimizers import OptimizerFailure, optimize
from harness.onnx_graph.skips.passes import PassList, effective_passes
from harness.reporting.verdict import Verdict

# Small attention graphs, made without torch in a millisecond each: what a new release of an optimizer is tried on.
#
# They differ in what decides whether a pass fires: bias or none, a norm before the projections or a residual beside them, fewer heads of K
# and V, another source for K and V, and weights stored in codes.

_LENGTH = 5


@dataclass(frozen=True)
class AttentionForm:
    """What an attention graph looks like.

    Attributes:
        width: of the activation.
        heads: of Q.
        kv_heads: of K and V.
        bias: whether projections have one.
        norm: a LayerNormalization before the projections.
        residual: the activation that is projected is added to the output: a fourth use of it.
        cross: K and V come from a second input.
        codes: the projections' weights are int8 codes with DequantizeLinear.
    """

    width: int = 32
    heads: int = 2
    kv_heads: int = 2
    bias: bool = False
    norm: bool = True
    residual: bool = False
    cross: bool = False
    codes: bool = False


FORMS: Mapping[str, AttentionForm] = {
    "pre-norm": AttentionForm(),
    "pre-norm with bias": AttentionForm(bias=True),
    "post-norm": AttentionForm(norm=False, residual=True),
    "grouped queries": AttentionForm(heads=4, kv_heads=2),
    "cross": AttentionForm(cross=True),
    "int8 codes": AttentionForm(codes=True),
}
"""Name to form."""


def attention_graph(form: AttentionForm = FORMS["pre-norm"], seed: int = 0) -> onnx.ModelProto:
    """Make one attention block.

    Args:
        form: what it looks like.
        seed: of the weights.

    Returns:
        A graph with input `x` (and `memory`), output `y`, and projections named `project_q`, `project_k`, `project_v`, `project_out`.
    """
    maker = _Maker(form, np.random.default_rng(seed))
    maker.make()
    inputs = ["x", *(["memory"] if form.cross else [])]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, _LENGTH, form.width]) for name in (*inputs, "y")]
    graph = helper.make_graph(maker.nodes, "attention", values[:-1], values[-1:], maker.initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def small_zoo() -> dict[str, Callable[[], onnx.ModelProto]]:
    """Return what makes each graph, by name."""
    return {name: functools.partial(attention_graph, form) for name, form in FORMS.items()}


class _Maker:
    """Collects nodes and initializers."""

    def __init__(self, form: AttentionForm, draw: np.random.Generator) -> None:
        self.form, self._draw = form, draw
        self.nodes: list[NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def make(self) -> None:
        form = self.form
        head = form.width // form.heads
        source = "x"
        if form.norm:
            self._add("LayerNormalization", ["x", self._held("gamma", np.ones(form.width, np.float32))], "h", "norm")
            source = "h"
        for role, num_heads, axes in (
            ("q", form.heads, [0, 2, 1, 3]),
            ("k", form.kv_heads, [0, 2, 3, 1]),
            ("v", form.kv_heads, [0, 2, 1, 3]),
        ):
            flat = self._project(role, "memory" if form.cross and role != "q" else source, num_heads * head)
            shape = self._held(f"split_{role}", np.array([1, _LENGTH, num_heads, head]))
            self._add("Reshape", [flat, shape], f"{role}_heads", f"reshape_{role}")
            self._add("Transpose", [f"{role}_heads"], f"{role}_few", f"transpose_{role}", perm=axes)
            self._repeat(role, num_heads)
        self._attend(head)

    def _attend(self, head: int) -> None:
        self._add("MatMul", ["q", "k"], "scores", "scores")
        self._add("Mul", ["scores", self._held("root", np.array(head**-0.5, np.float32))], "scaled", "scale")
        self._add("Softmax", ["scaled"], "weights", "softmax", axis=-1)
        self._add("MatMul", ["weights", "v"], "mixed", "mix")
        self._add("Transpose", ["mixed"], "joined", "join", perm=[0, 2, 1, 3])
        self._add("Reshape", ["joined", self._held("join_heads", np.array([1, _LENGTH, self.form.width]))], "flat", "flatten")
        self._add("MatMul", ["flat", self._weight("wo", self.form.width)], "projected" if self.form.residual else "y", "project_out")
        if self.form.residual:
            self._add("Add", ["projected", "x"], "y", "residual")

    def _project(self, role: str, source: str, width: int) -> str:
        weight = self._weight(f"w{role}", width)
        if self.form.codes:
            weight = self._codes(role)
        self._add("MatMul", [source, weight], f"{role}_flat", f"project_{role}")
        if not self.form.bias:
            return f"{role}_flat"
        self._add(
            "Add",
            [f"{role}_flat", self._held(f"b{role}", self._draw.standard_normal(width).astype(np.float32))],
            f"{role}_biased",
            f"bias_{role}",
        )
        return f"{role}_biased"

    def _codes(self, role: str) -> str:
        held = next(tensor for tensor in self.initializers if tensor.name == f"w{role}")
        weight = numpy_helper.to_array(held)
        self.initializers.remove(held)
        scale = np.float32(np.abs(weight).max() / 127)
        codes = self._held(f"c{role}", np.clip(np.rint(weight / scale), -128, 127).astype(np.int8))
        self._add("DequantizeLinear", [codes, self._held(f"s{role}", np.array(scale))], f"w{role}", f"dequantize_{role}")
        return f"w{role}"

    def _repeat(self, role: str, num_heads: int) -> None:
        """Give every head of Q its head of K or V."""
        if num_heads == self.form.heads:
            self._add("Identity", [f"{role}_few"], role, f"identity_{role}")
        else:
            index = np.repeat(np.arange(num_heads), self.form.heads // num_heads)
            self._add("Gather", [f"{role}_few", self._held(f"heads_{role}", index)], role, f"repeat_{role}", axis=1)

    def _weight(self, name: str, width: int) -> str:
        return self._held(name, self._draw.standard_normal((self.form.width, width)).astype(np.float32))

    def _held(self, name: str, array: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def _add(
        self, operator: str, inputs: Sequence[str], output: str, name: str, axis: int | None = None, perm: Sequence[int] | None = None
    ) -> None:
        settings = {key: value for key, value in (("axis", axis), ("perm", perm)) if value is not None}
        self.nodes.append(helper.make_node(operator, list(inputs), [output], name=name, **settings))  # type: ignore[arg-type]


DEFAULT_PATH = Path("golden/onnx_passes.json")


@dataclass(frozen=True)
class Trial:
    """What a new list does to one graph of the zoo.

    Attributes:
        graph: its name.
        holds: under the skips that are relied on.
        message: what is broken; empty if it holds.
        needed: the smallest set of skips that keeps it.
    """

    graph: str
    holds: bool
    message: str
    needed: tuple[str, ...]


@dataclass(frozen=True)
class Alarm:
    """One optimizer, against what is known of it.

    Attributes:
        passes: as they are in force here.
        state: `known`, `new release` or `changed` (a release whose list is another than the one on record).
        compared_with: the release that the changes are counted from; empty if none is on record.
        added: passes that are in force now and were not.
        removed: the other way round.
        reordered: the same passes in another order.
        asked: the contract and the skips that it is relied on with.
        trials: on the zoo; empty where a list on record was found to hold what is asked.
    """

    passes: PassList
    state: str
    compared_with: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    reordered: bool
    asked: str
    trials: tuple[Trial, ...]

    @property
    def breaks(self) -> bool:
        """Whether the skips that are relied on no longer hold."""
        return any(not trial.holds for trial in self.trials)

    @property
    def verdict(self) -> Verdict:
        """What that means for who asked: a new list that breaks nothing waits for somebody who accepts it."""
        if self.breaks:
            return Verdict.REGRESSION
        return Verdict.PASS if self.state == "known" else Verdict.INCONCLUSIVE

    def text(self) -> str:
        """Say it in a few lines."""
        head = f"{self.passes.backend} {self.passes.version}: {len(self.passes.effective)} passes, {self.passes.sha256[:12]}, {self.state}"
        if not self.trials:
            return head
        compared = f"compared with {self.compared_with}" if self.compared_with else "nothing to compare with"
        lines = [f"{head}, {f'and not yet tried for {self.asked}' if self.state == 'known' else compared}"]
        changes = (("new", self.added), ("gone", self.removed)) if self.compared_with else ()
        lines += [f"  {word}: {', '.join(names)}" for word, names in changes if names]
        lines += ["  the same passes in another order"] if self.reordered else []
        for trial in self.trials:
            needed = f"needs {', '.join(trial.needed)}" if trial.needed else "needs no skip"
            lines.append(f"  {trial.graph}: {'holds' if trial.holds else 'BROKEN: ' + trial.message.splitlines()[0]}; {needed}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the alarm as JSON types."""
        trials = [{"graph": one.graph, "holds": one.holds, "message": one.message, "needed": list(one.needed)} for one in self.trials]
        fixed = {
            "state": self.state,
            "asked": self.asked,
            "compared_with": self.compared_with,
            "reordered": self.reordered,
            "breaks": self.breaks,
        }
        return {**self.passes.to_dict(), **fixed, "added": list(self.added), "removed": list(self.removed), "trials": trials}


Records = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Backend to release to what `PassList.to_dict` wrote."""


def read_records(path: Path) -> Records:
    """Read the goldens.

    Args:
        path: may be missing: then nothing is known.

    Returns:
        The records.

    Raises:
        UserInputError: it is no such file.
    """
    if not path.exists():
        return {}
    try:
        records = from_json(path.read_text(encoding="utf-8"))
        if not _is_record(records):
            raise ValueError("optimizers, their releases, and the passes in force are expected")
    except (ValueError, OSError) as error:
        raise UserInputError(
            f"{path}: this is no record of passes ({error}); restore it, or remove it and accept the lists again"
        ) from error
    result: Records = records
    return result


def check_passes(records: Records, backend: str, contract: Contract, skips: Sequence[str]) -> Alarm:
    """Compare the passes in force with those on record, and try them where they are new, or are asked for what nobody has tried.

    Args:
        records: as read.
        backend: `onnxsim`, `onnxoptimizer` or `ort`.
        contract: what the skips are relied on for.
        skips: those that are relied on; names that the optimizer does not know are left out.

    Returns:
        What was found.

    Raises:
        UserInputError: the optimizer is not installed.
    """
    passes = effective_passes(backend)
    releases = records.get(backend, {})
    record = releases.get(passes.version)
    of_it = sorted({skip for skip in skips if skip in passes.known})
    asked = f"{contract.name} under {', '.join(of_it) or 'no skip'}"
    is_known = record is not None and record["sha256"] == passes.sha256
    if record is not None and is_known and asked in record.get("held", ()):
        return Alarm(passes, "known", passes.version, (), (), False, asked, ())
    compared = passes.version if record is not None else max(releases, key=_release, default="")
    before = tuple(releases[compared]["effective"]) if compared else ()
    added = tuple(name for name in passes.effective if name not in before)
    removed = tuple(name for name in before if name not in passes.effective)
    reordered = bool(before) and not added and not removed
    state = "known" if is_known else "new release" if record is None else "changed"
    trials = tuple(_try(name, backend, contract, of_it) for name in small_zoo())
    return Alarm(passes, state, compared, added, removed, reordered and not is_known, asked, trials)


def _is_record(records: Any) -> bool:
    if not isinstance(records, dict) or not all(isinstance(releases, dict) for releases in records.values()):
        return False
    entries = [record for releases in records.values() for record in releases.values()]
    kinds = {"effective": list, "sha256": str}
    return all(isinstance(one, dict) and all(isinstance(one.get(key), kind) for key, kind in kinds.items()) for one in entries) and all(
        isinstance(one.get("held", []), list) for one in entries
    )


def accept(path: Path, alarms: Sequence[Alarm]) -> None:
    """Put the lists in force on record, and what they were found to hold.

    Args:
        path: of the goldens; written whole or not at all.
        alarms: what was found.
    """
    records = {backend: dict(releases) for backend, releases in read_records(path).items()}
    for alarm in alarms:
        record = {"effective": list(alarm.passes.effective), "sha256": alarm.passes.sha256}
        releases = records.setdefault(alarm.passes.backend, {})
        before = releases.get(alarm.passes.version, {}).get("held", []) if alarm.state == "known" else []
        releases[alarm.passes.version] = {**record, "held": sorted({*before, alarm.asked})}
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        partial.write_text(to_json(records), encoding="utf-8")


def _try(graph: str, backend: str, contract: Contract, skips: Sequence[str]) -> Trial:
    model = small_zoo()[graph]()
    try:
        result = contract.check(model, optimize(model, OPTIMIZER_OF[backend], skips))
    except OptimizerFailure as error:
        return Trial(graph, False, str(error), ())
    return Trial(graph, result.holds, result.message, explain(model, contract, backend).skips)


def _release(version: str) -> tuple[int, ...]:
    """Sort releases by their numbers."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())
