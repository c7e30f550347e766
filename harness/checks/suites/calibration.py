"""Checks of calibration runs: 41 to 46, and that every token counts. A run is a black box that is started twice."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.checks.catalogue.registry import CheckContext, CheckFailed, NothingToCheckError, register
from harness.checks.inputs.pairs import told_of
from harness.checks.protocols import Calibrated, Calibration
from harness.tolerance import T0, T3, compare, vacuous_decoys

_MAX_CODES = 0.001
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
_SECONDS = 300
_MODES = {"layer after layer": True, "all layers at once": False}
# Of rows that share batches: in twos, threes and fives every batch has padding, and long ones are among the first and the last.
_UNEQUAL = (9, 70, 4, 12, 1, 7, 130, 3, 15, 2, 5, 11, 90)


def _run(subject: Calibration, rows: list[Tensor], **options: Any) -> Calibrated:
    found = subject.run(rows, **options)
    if not isinstance(found, Calibrated):
        raise CheckFailed(f"run() returned {type(found).__name__}, where a Calibrated belongs")
    for what, tensors in (("statistic", found.statistics), ("global scale", found.global_scales)):
        if odd := [name for name, tensor in tensors.items() if not bool(tensor.float().isfinite().all())]:
            raise CheckFailed(f"{odd[0]}: its {what} is not finite, and nothing can be held against it", odd)
    return found


def _rows(subject: Calibration, context: CheckContext, lengths: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(context.seed)
    return [torch.randint(3, subject.vocabulary, (length,), generator=generator) for length in lengths]


@register(
    41,
    "padding",
    "Padding does not matter: statistics agree to 1e-6 relative with and without it",
    kind="calibration",
    caught_by=("Model-Optimizer#1261", "GPTQModel#1968"),
)
def padding(subject: Calibration, context: CheckContext) -> str:
    """Run rows of unequal length one by one, and in batches of several sizes, of which the last is not full, in both modes.

    Every batch has padding, short ones and long ones, and the longest row is the first of a batch, the last or between others.
    """
    rows = _rows(subject, context, _UNEQUAL)
    worst = 0.0
    for mode, sequential in _MODES.items():
        alone = _run(subject, rows, batch_size=1, sequential=sequential).statistics
        if not alone:
            raise NothingToCheckError("the subject keeps no statistics")
        for size in (2, 3, 5, len(rows)):
            with told_of(f"{mode}, in batches of {size}"):
                padded = _run(subject, rows, batch_size=size, sequential=sequential).statistics
                worst = max(worst, _apart(alone, padded, "padding has changed it"))
    return f"{len(alone)} statistics, relative error up to {worst:.1e}"


def _apart(alone: Mapping[str, Tensor], padded: Mapping[str, Tensor], what: str) -> float:
    """Return the greatest relative error of statistics that must agree; `what` says why one does not."""
    _same_names(alone, padded)
    worst = 0.0
    for name, expected in alone.items():
        tier = T3(max_relative_error=1e-6)
        if passed := vacuous_decoys(expected, tier, others={other: value for other, value in alone.items() if _differ(value, expected)}):
            raise CheckFailed(f"{name}: the limit measures nothing: {', '.join(passed)} would pass")
        found = compare(padded[name], expected, tier, name=name)
        if not found.ok:
            raise CheckFailed(f"{name}: {what}: {found.summary}")
        worst = max(worst, found.distance.relative_error if found.distance else 0.0)
    return worst


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether two statistics are of different inputs; those of one input are no decoys of each other."""
    return one.shape == other.shape and float((one - other).double().norm()) > 0.01 * float(other.double().norm())


def _same_names(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    if one.keys() != other.keys():
        raise CheckFailed(f"the two runs made different things: {sorted(one.keys() ^ other.keys())[0]} is in one of them only")


@register(
    42,
    "starved_modules",
    "Every target saw a token, or the run says so, names the module, and keeps within the budget that the recipe sets",
    kind="calibration",
    caught_by=("llm-compressor#2826", "llm-compressor#2952"),
)
def starved_modules(subject: Calibration, context: CheckContext) -> str:
    """Give a model more experts than tokens, and allow any number of fallbacks, none, one, one too few, enough, and one too many."""
    fed = _run(subject, _rows(subject, context, (12, 12)))
    _refuse_silence(fed, "a dense model")
    starved = subject.run_starved(budget=None)
    if starved is None:
        raise NothingToCheckError("the subject has no model whose modules can be starved")
    seen = _tokens_seen(starved)
    hungry = [name for name, count in seen.items() if not count]
    if not hungry:
        raise NothingToCheckError("every module of the starved model saw a token" if seen else "the subject counts no tokens")
    _refuse_silence(starved, "a starved model")
    count = len(starved.fallbacks)
    for budget in sorted({0, 1, count - 1, count, count + 1}):
        fits = _fits(subject, budget)
        if fits and budget < count:
            raise CheckFailed(f"{count} fallbacks went through a budget of {budget}")
        if not fits and budget >= count:
            raise CheckFailed(f"a budget of {budget} was refused, and {count} fallbacks there were")
    return f"{len(hungry)} of {len(seen)} modules saw no token and are named; the budget is kept"


def _tokens_seen(done: Calibrated) -> dict[str, int]:
    """Tokens by module; where any are counted, a module with codes that is not among them saw none."""
    return {**(dict.fromkeys(done.codes, 0) if done.num_tokens else {}), **done.num_tokens}


def _refuse_silence(done: Calibrated, model: str) -> None:
    """Whoever saw no token, or has codes and no statistic where others have one, must be named as a fallback."""
    have = done.statistics.keys() if done.statistics.keys() & done.codes.keys() else done.codes.keys()
    hungry = {name: f"saw no token of {model}" for name, count in _tokens_seen(done).items() if not count}
    without = {name: f"has codes of {model}, and no statistic as others have" for name in done.codes if name not in have}
    if silent := [f"{name} {what}" for name, what in {**without, **hungry}.items() if name not in done.fallbacks]:
        raise CheckFailed(f"{silent[0]}, and the run does not say so ({len(silent)} modules)", silent)


def _fits(subject: Calibration, budget: int) -> bool:
    try:
        subject.run_starved(budget=budget)
    except Exception:  # noqa: BLE001 - the subject may refuse with any class
        return False
    return True


@register(43, "new_process", "A second run, in a new process, is bitwise equal", kind="calibration")
def new_process(subject: Calibration, context: CheckContext) -> str:
    """Compare everything that the two made."""
    rows = _rows(subject, context, (12, 12, 12))
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "rows.safetensors", Path(folder) / "out.safetensors"
        save_file({"input_ids": torch.stack(rows)}, given)
        command = subject.command(given, out)
        if command is None:
            raise NothingToCheckError("the subject names no command")
        if isinstance(command, str):
            raise CheckFailed("command() returned one text; return its words in a list")
        done = subprocess.run(list(command), capture_output=True, text=True, check=False, timeout=_SECONDS)
        if not done.returncode and not out.is_file():
            raise CheckFailed("the command exits with 0 and has written no tensors to `out`")
        if done.returncode:
            raise CheckFailed(f"the command exits with {done.returncode}: {' '.join(done.stderr.split())[-300:]}")
        there = load_file(out)
    return f"{_all_equal(_run(subject, rows).tensors, there, 'a new process')} tensors"


def _all_equal(here: Mapping[str, Tensor], there: Mapping[str, Tensor], what: str) -> int:
    _same_names(here, there)
    for name, expected in here.items():
        if not bool(expected.float().isfinite().all()):  # which float8 does not have
            raise CheckFailed(f"{name} holds values that are not finite")
        found = compare(there[name], expected, T0(), name=name)
        if not found.ok:
            raise CheckFailed(f"{name} differs in {what}: {found.summary}")
    if not here:
        raise CheckFailed("the run made no tensor")
    return len(here)


@register(44, "batch_size", "Batch size 1 against N changes <= 0.1 % of codes", kind="calibration")
def batch_size(subject: Calibration, context: CheckContext) -> str:
    """Count codes in both modes, of rows of one length and of several, with a last batch that is not full.

    Codes rolled by one must be beyond the limit.
    """
    worst = total = 0
    for mode, sequential in _MODES.items():
        for lengths in ((12,) * 5, _UNEQUAL):
            rows = _rows(subject, context, lengths)
            one, many = (_run(subject, rows, batch_size=size, sequential=sequential).codes for size in (1, 4))
            with told_of(f"{mode}, {len(rows)} rows of {min(lengths)} to {max(lengths)} tokens"):
                changed, total = _changed_codes(one, many)
            worst = max(worst, changed)
    return f"{worst} of {total} codes"


def _changed_codes(one: Mapping[str, Tensor], many: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return how many codes differ, and of how many."""
    _same_names(one, many)
    changed = sum(int((one[name].float() != many[name].float()).sum()) for name in one)
    total = sum(codes.numel() for codes in one.values())
    decoy = sum(int((codes.float() != codes.float().roll(1, -1)).sum()) for codes in one.values())
    if decoy <= _MAX_CODES * total:
        raise CheckFailed("the limit measures nothing: codes rolled by one would pass")
    if changed > _MAX_CODES * total:
        raise CheckFailed(f"{changed} of {total} codes ({changed / total:.2%}) depend on the batch size")
    return changed, total


@register(45, "siblings", "Fused siblings (q/k/v, gate/up) share a global scale exactly", kind="calibration")
def siblings(subject: Calibration, context: CheckContext) -> str:
    """Group modules by the names that runtimes fuse."""
    done = _run(subject, _rows(subject, context, (12, 12)))
    if not (scales := done.global_scales):
        raise NothingToCheckError("the format has no global scale")
    count = 0
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in scales):
        for family in _FUSED:
            present = [f"{parent}.{last}" for last in family if f"{parent}.{last}" in scales]
            values = {name: scales[name].flatten().tolist() for name in present}
            without = [name for last in family if (name := f"{parent}.{last}") in done.codes and name not in scales]
            if present and without:
                raise CheckFailed(f"{without[0]} has codes and no global scale, and is fused with {present[0]}, which has one", without)
            if any(value != values[present[0]] for value in values.values()):
                raise CheckFailed(
                    f"{', '.join(f'{name} {value}' for name, value in values.items())}: runtimes fuse them and keep one scale"
                )
            count += len(present) > 1
    if not count:
        raise NothingToCheckError("the model has no modules that runtimes fuse")
    return f"{count} families, one scale each"


@register(46, "one_layer", "Sequential equals basic, bitwise, for a model of one layer, and every row counts", kind="calibration")
def one_layer(subject: Calibration, context: CheckContext) -> str:
    """Compare everything that both made; of two layers the statistics must differ, else the second sees the first uncompressed."""
    for lengths, size in (((3, 9, 20, 1, 50), 2), ((130,), 1), ((5, 5), 2), ((12, 12, 12), 1)):
        rows = _rows(subject, context, lengths)
        sequential, basic = (_run(subject, rows, batch_size=size, sequential=way, num_layers=1) for way in (True, False))
        count = _all_equal(sequential.tensors, basic.tensors, "the basic pipeline")
        if sequential.statistics or basic.statistics:
            _all_equal(sequential.statistics, basic.statistics, "the basic pipeline")
        _hold_all_seen(_tokens_seen(sequential), sum(lengths))
        for row, length in enumerate(lengths if sequential.statistics else ()):
            others = _exchanged(subject, rows, row, length - 1)
            changed = _run(subject, others, batch_size=size, num_layers=1).statistics
            _hold_changed(
                sequential.statistics, changed, f"the last token of row {row} ({length} tokens) of {len(rows)} counts for nothing"
            )
    ways = [_run(subject, rows, sequential=way, num_layers=2).statistics for way in (True, False)]
    if ways[0] and all(torch.equal(ways[0][name], ways[1].get(name, torch.empty(0))) for name in ways[0]):
        raise CheckFailed(
            "statistics of two layers are the same, sequential or not: the second is calibrated on what the first gave uncompressed"
        )
    return f"{count} tensors"


@register(
    None, "every_token", "Every token counts: another first, last or middle token of any row changes every statistic", kind="calibration"
)
def every_token(subject: Calibration, context: CheckContext) -> str:
    """Exchange one token at a time, in rows that need no padding; of a dense model every target sees all tokens."""
    rows = _rows_of_every_kind(subject, context)
    plain, total = _run(subject, rows), sum(map(len, rows))
    seen = _tokens_seen(plain)
    _hold_all_seen(seen, total)
    _refuse_silence(plain, "a dense model")
    if not plain.statistics:
        _hold_parts(subject, rows, seen)
        raise NothingToCheckError("the subject keeps no statistics")
    for row, place in _PLACES:
        others = _exchanged(subject, rows, row, place)
        _must_differ(subject, plain, others, f"token {place} of row {row} ({len(rows[row])} tokens) counts for nothing")
    _must_differ(subject, plain, rows[:-1], "the last row, which equals the first, counts for nothing")
    for token in _special(subject):
        for others, where in (
            ([tokens[tokens != token] for tokens in rows], ""),
            ([tokens[:-1] if tokens[-1] == token and len(tokens) > 1 else tokens for tokens in rows], " at the end of a row"),
        ):
            _must_differ(subject, plain, others, f"tokens of id {token}{where} count for nothing")
    _hold_parts(subject, rows, seen)
    _hold_at_once(subject, rows, plain)
    return f"{len(plain.statistics)} statistics, {len(_PLACES)} tokens of {len(rows)} rows"


def _hold_all_seen(seen: Mapping[str, int], total: int) -> None:
    if wrong := [f"{name} saw {count} of {total} tokens" for name, count in seen.items() if count < total]:
        raise CheckFailed(f"{wrong[0]} of a dense model", wrong)


def _hold_at_once(subject: Calibration, rows: list[Tensor], plain: Calibrated) -> None:
    """Where all layers run at once, the first sees what it saw before, and the others every row, wherever it stands, to its last token."""
    with told_of("all layers at once"):
        at_once = _run(subject, rows, sequential=False)
        _hold_all_seen(_tokens_seen(at_once), sum(map(len, rows)))
        first = _run(subject, rows[:1], num_layers=1).statistics.keys() & plain.statistics.keys()
        theirs, ours = ({name: value for name, value in of.statistics.items() if name in first} for of in (plain, at_once))
        _apart(theirs, ours, "the first layer does not see what it sees layer after layer")
        for others in (rows[::-1], rows[3:] + rows[:3]):
            _apart(at_once.statistics, _run(subject, others, sequential=False).statistics, "the order of the rows decides")
        for row in (0, 6, 8, 9):
            others = _exchanged(subject, rows, row, len(rows[row]) - 1)
            _must_differ(subject, at_once, others, f"the last token of row {row} ({len(rows[row])} tokens) counts for nothing", False)


def _hold_parts(subject: Calibration, rows: list[Tensor], seen: Mapping[str, int]) -> None:
    """More than all is right where there are several passes; what is put in front of each row, or behind it, is none of its tokens."""
    more = _tokens_seen(_run(subject, [*rows[:5], *rows[5].split(4), *rows[6:]]))
    for name, count in seen.items():
        if more.get(name) != count:
            raise CheckFailed(f"{name} saw {count} tokens of {len(rows)} rows, and {more.get(name)} where one row comes in two parts")


# Row and place of the tokens that are exchanged: first, last and middle ones, in every row.
_PLACES = ((0, 0), (1, 4), (1, 8), (2, 6), (3, 0), (4, 3), (5, 4), (6, 0), (7, 2), (8, 0), (9, 0), (9, 70), (9, 129), (10, 5))


def _special(subject: Calibration) -> tuple[int, ...]:
    """Ids that are taken for padding, or for begin and end."""
    return 0, 1, 2, subject.vocabulary - 1


def _rows_of_every_kind(subject: Calibration, context: CheckContext) -> list[Tensor]:
    """Eleven rows: one that begins as the first does, some with ids that are taken for padding, a token alone, and the first one again."""
    rows = _rows(subject, context, (6, 9, 7, 5, 4, 8, 3, 6, 1, 130))
    rows[5][:4] = rows[0][:4]
    for row, token in zip((1, 2, 3, 7), _special(subject), strict=True):
        rows[row][1] = rows[row][-2] = token
    for row, token in zip((4, 5, 6, 0), _special(subject), strict=True):
        rows[row][-1] = token
    return [*rows, rows[0].clone()]


def _exchanged(subject: Calibration, rows: list[Tensor], row: int, place: int) -> list[Tensor]:
    """The same rows with another token at one place."""
    others = [tokens.clone() for tokens in rows]
    others[row][place] = 3 + (others[row][place] - 2) % (subject.vocabulary - 3)
    return others


def _must_differ(subject: Calibration, plain: Calibrated, rows: list[Tensor], what: str, sequential: bool = True) -> None:
    _hold_changed(plain.statistics, _run(subject, rows, sequential=sequential).statistics, what)


def _hold_changed(plain: Mapping[str, Tensor], changed: Mapping[str, Tensor], what: str) -> None:
    _same_names(plain, changed)
    if blind := [name for name, expected in plain.items() if torch.equal(expected, changed[name])]:
        raise CheckFailed(f"{blind[0]}: {what}", blind)
