"""The verb `harness nightly`: a history of measurements, and what it says. Nothing heavy is imported before `run`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.atomic import check_output_file
from compressor.console import count, positive
from compressor.errors import UserInputError
from compressor.json_text import to_json
from harness.nightly.table import show_figures, show_judgements, show_night, show_nights, show_series
from harness.reporting.verdict import EXIT_CODES, Verdict, worst

if TYPE_CHECKING:
    from harness.nightly.history import History
    from harness.nightly.judging.judgement import Judgement

EPILOG = """exit codes of run and judge: 0 pass, 1 regression (a metric is worse, a cell failed), 2 inconclusive, 3 no verdict"""
DEFAULT = Path("nightly.sqlite")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions of the verb.

    Args:
        parser: of the verb; changed.
    """
    parser.epilog = EPILOG
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (text, declare, _) in _ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text)
        if name not in ("simulate", "run"):
            action.add_argument("--history", type=Path, default=DEFAULT, metavar="F", help=f"file of the history (default: {DEFAULT})")
        if name not in ("export", "import", "accept"):
            action.add_argument("--json", action="store_true", dest="as_json", help="print data instead of text")
        if declare is not None:
            declare(action)


def _metric(action: argparse.ArgumentParser) -> None:
    action.add_argument("metric", metavar="METRIC", help="name of the metric")


def _add(action: argparse.ArgumentParser) -> None:
    _metric(action)
    action.add_argument("values", metavar="VALUE", nargs="+", type=float, help="the repetitions, above 0")
    action.add_argument("--better", choices=("lower", "higher"), default="lower", help="which way is better (default: lower)")
    action.add_argument("--night", metavar="DATE", help="label that sorts by time (default: today in UTC)")
    action.add_argument("--revision", metavar="R", default="", help="of the code that was measured")
    action.add_argument("--device", default="cpu", help="that was measured (default: cpu)")


def _accept(action: argparse.ArgumentParser) -> None:
    _metric(action)
    action.add_argument("night", metavar="NIGHT", help="the first one of the new level, as judge names it")
    action.add_argument("--reason", required=True, metavar="TEXT", help="why it is meant; shown with the metric from now on")
    action.add_argument("--until", metavar="DATE", default="", help="last day on which this counts (default: for good)")


def _judge(action: argparse.ArgumentParser) -> None:
    action.add_argument("metrics", metavar="METRIC", nargs="*", help="names of metrics (default: all)")


def _night(action: argparse.ArgumentParser) -> None:
    action.add_argument("config", type=Path, metavar="CONFIG.yaml", help="the matrix: models, recipes, devices, checks, commands, limits")
    action.add_argument("--night", metavar="DATE", help="label that sorts by time (default: today in UTC); one that was begun goes on")
    action.add_argument("--quiet", action="store_true", help="show no progress bars")


def _export(action: argparse.ArgumentParser) -> None:
    action.add_argument("file", type=Path, metavar="FILE.csv", help="a row a reading; replaced where it is there")


def _import(action: argparse.ArgumentParser) -> None:
    action.add_argument("file", type=Path, metavar="FILE.csv", help="written by export; what is known already is passed over")


def _simulate(action: argparse.ArgumentParser) -> None:
    action.add_argument("--series", type=positive, default=100, metavar="N", help="histories of each kind of noise (default: 100)")
    action.add_argument("--seed", type=count, default=0, help="of the noise (default: 0)")
    action.add_argument("--quiet", action="store_true", help="show no progress bars")


def run(args: argparse.Namespace) -> int:
    """Do one action.

    Args:
        args: as declared by `add_arguments`.

    Returns:
        The exit code of the verdict; of `run` and `judge` alone it can be another than 0.
    """
    return _ACTIONS[args.action][2](args)


def _history(args: argparse.Namespace, *, must_exist: bool = True) -> History:
    from harness.nightly.history import History

    if must_exist and not args.history.exists():
        raise UserInputError(f"{args.history}: there is no history; write one with harness nightly add, or name it with --history")
    return History(args.history)


def _known(history: History, metric: str) -> str:
    from compressor.spelling import suggest

    known = history.metrics()
    if metric not in known:
        raise UserInputError(f"{metric}: {history.path} has no such metric; {suggest(metric, known)}")
    return metric


def _run_night(args: argparse.Namespace) -> int:
    from compressor.progress import RichProgress, SilentProgress
    from harness.nightly.config import read_config
    from harness.nightly.runner import Runner

    config = read_config(args.config)
    found = Runner(config, args.night, SilentProgress() if args.quiet else RichProgress()).run()
    if args.as_json:
        print(to_json(found.to_dict()), end="")
    else:
        show_night(found)
    return EXIT_CODES[found.verdict]


def _run_add(args: argparse.Namespace) -> int:
    from harness.nightly.environment import current_environment

    history = _history(args, must_exist=False)
    environment = current_environment(args.device)
    history.add(args.metric, args.values, environment=environment, night=args.night, revision=args.revision, better=args.better)
    return _judge_and_show(history, [args.metric], args.as_json) and 0  # what it means is for judge to say


def _run_judge(args: argparse.Namespace) -> int:
    history = _history(args)
    return _judge_and_show(history, [_known(history, name) for name in args.metrics] or history.metrics(), args.as_json)


def _judge_and_show(history: History, metrics: list[str], as_json: bool) -> int:
    from harness.nightly.judging.judge import judge

    found: list[Judgement] = [judge(history.series(name), history.acceptances(name)) for name in metrics]
    verdict = worst(one.verdict for one in found)
    if as_json:
        print(to_json({"verdict": verdict.value, "metrics": [one.to_dict() for one in found]}), end="")
    else:
        show_judgements(found, verdict)
    return EXIT_CODES[verdict]


def _run_history(args: argparse.Namespace) -> int:
    history = _history(args)
    rows = history.nights()
    if args.as_json:
        print(to_json([{"night": night, "metrics": metrics, "readings": readings} for night, metrics, readings in rows]), end="")
    else:
        show_nights(rows)
    return EXIT_CODES[Verdict.PASS]


def _run_show(args: argparse.Namespace) -> int:
    from harness.nightly.judging.judge import judge

    history = _history(args)
    metric = _known(history, args.metric)
    series, words = history.series(metric), history.acceptances(metric)
    judgement = judge(series, words)
    if args.as_json:
        rows = [{"night": one.night, "environment": one.environment, "revision": one.revision, "values": one.values} for one in series]
        print(to_json(judgement.to_dict() | {"nights": rows}), end="")
    else:
        show_series(series, words, judgement)
    return EXIT_CODES[Verdict.PASS]


def _run_accept(args: argparse.Namespace) -> int:
    history = _history(args)
    word = history.accept(_known(history, args.metric), args.night, args.reason, args.until)
    print(f"{word.metric}: the level since {word.night} is accepted {'until ' + word.until if word.until else 'for good'}: {word.reason}")
    return EXIT_CODES[Verdict.PASS]


def _run_export(args: argparse.Namespace) -> int:
    check_output_file(args.file, ".csv")
    print(f"{args.file}: {_history(args).export(args.file):,} readings")
    return EXIT_CODES[Verdict.PASS]


def _run_import(args: argparse.Namespace) -> int:
    new = _history(args, must_exist=False).read_in(args.file)
    print(f"{args.history}: {new:,} new measurements")
    return EXIT_CODES[Verdict.PASS]


def _run_simulate(args: argparse.Namespace) -> int:
    from compressor.progress import RichProgress, SilentProgress
    from harness.nightly.judging.simulation import simulate

    found = simulate(args.series, args.seed, SilentProgress() if args.quiet else RichProgress())
    if args.as_json:
        print(to_json([one.to_dict() for one in found]), end="")
    else:
        show_figures(found)
    return EXIT_CODES[Verdict.PASS]


_ACTIONS: Mapping[str, tuple[str, Callable[[argparse.ArgumentParser], None] | None, Callable[[argparse.Namespace], int]]] = {
    "run": ("run every cell of a matrix in a process of its own, and judge what was measured", _night, _run_night),
    "judge": ("say which metrics are worse, since when, by how much", _judge, _run_judge),
    "add": ("write what was measured of a metric tonight", _add, _run_add),
    "history": ("list the nights", None, _run_history),
    "show": ("show the nights of a metric, and what they say", _metric, _run_show),
    "accept": ("say that a change is meant", _accept, _run_accept),
    "export": ("write all readings as CSV", _export, _run_export),
    "import": ("add what export wrote", _import, _run_import),
    "simulate": ("measure false alarms and nights to detection on simulated histories", _simulate, _run_simulate),
}
