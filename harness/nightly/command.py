"""The verb `harness nightly`: a history of measurements, and what it says. Nothing heavy is imported before `run`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from compressor.console import count, positive
from compressor.errors import UserInputError
from compressor.json_text import to_json
from compressor.settings.kinds import TEXT, FilePath, Flag, Numbers, Text, Texts, Whole
from compressor.settings.options import Option, Settings
from harness.nightly.blame.command import COMMAND as BLAME
from harness.nightly.table import show_figures, show_judgements, show_night, show_nights, show_series
from harness.reporting.verdict import Verdict, exit_codes, worst
from harness.verbs import Actions, Command

if TYPE_CHECKING:
    from compressor.progress import Progress
    from harness.nightly.config import NightlyConfig
    from harness.nightly.history import History
    from harness.nightly.judging.judgement import Judgement
    from harness.nightly.measurement import Measurement
    from harness.nightly.runner import Night


class HistorySettings(Settings):
    """Where the history lies."""

    history: Annotated[FilePath, Option(metavar="F")] = Path("nightly.sqlite")
    """File of the history."""


class ShownSettings(HistorySettings):
    """How what was found is printed."""

    as_json: Annotated[Flag, Option("--json")] = False
    """Print data instead of text."""


class NightSettings(Settings):
    """Which night runs."""

    config: Annotated[FilePath, Option(positional=True, metavar="CONFIG.yaml")]
    """The matrix: models, recipes, devices, checks, commands, limits."""
    night: Annotated[Text | None, Option(metavar="DATE")] = None
    """Label that sorts by time (default: today in UTC); one that was begun goes on."""
    at: Annotated[Text | None, Option(metavar="REV")] = None
    """Run the code of this commit, in a working tree of its own: one that ran elsewhere bridges both machines or versions."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print data instead of text."""
    quiet: Annotated[Flag, Option()] = False
    """Show no progress bars."""


class JudgeSettings(ShownSettings):
    """What is judged."""

    metrics: Annotated[Texts, Option(positional=True, nargs="*", metavar="METRIC")] = ()
    """Names of metrics (default: all)."""


class AddSettings(ShownSettings):
    """What was measured."""

    metric: Annotated[Text, Option(positional=True, metavar="METRIC")]
    """Name of the metric."""
    values: Annotated[Numbers, Option(positional=True, nargs="+", metavar="VALUE", read=float)]
    """The repetitions, above 0."""
    better: Annotated[Literal["lower", "higher"], TEXT, Option()] = "lower"
    """Which way is better."""
    night: Annotated[Text | None, Option(metavar="DATE")] = None
    """Label that sorts by time (default: today in UTC)."""
    revision: Annotated[str, Option(metavar="R")] = ""
    """Of the code that was measured."""
    device: Annotated[Text, Option()] = "cpu"
    """That was measured."""


class ShowSettings(ShownSettings):
    """Which metric is asked for."""

    metric: Annotated[Text, Option(positional=True, metavar="METRIC")]
    """Name of the metric."""


class AcceptSettings(HistorySettings):
    """Which change is meant."""

    metric: Annotated[Text, Option(positional=True, metavar="METRIC")]
    """Name of the metric."""
    night: Annotated[Text, Option(positional=True, metavar="NIGHT")]
    """The first one of the new level, as judge names it."""
    reason: Annotated[str, Option(metavar="TEXT")]
    """Why it is meant; shown with the metric from now on."""
    until: Annotated[str | None, Option(metavar="DATE")] = None
    """Last day on which this counts (default: for good)."""


class ExportSettings(HistorySettings):
    """Where the history goes."""

    file: Annotated[FilePath, Option(positional=True, metavar="FILE")]
    """A .csv or .parquet with a row a reading, or a .zip with acceptances and cells, too; replaced where export wrote it."""


class ImportSettings(HistorySettings):
    """Where it comes from."""

    file: Annotated[FilePath, Option(positional=True, metavar="FILE")]
    """Written by export; what is known already is passed over."""


class ReportSettings(HistorySettings):
    """Where the pages go."""

    output_dir: Annotated[FilePath, Option(metavar="DIR")]
    """Folder for index.html, metrics, junit.xml, summary.md and night.json; must not exist, or be empty."""


class SimulateSettings(Settings):
    """How much is simulated."""

    series: Annotated[Whole, Option(metavar="N", read=positive)] = 100
    """Histories of each kind of noise."""
    seed: Annotated[Whole, Option(read=count)] = 0
    """Of the noise."""
    recorded: Annotated[FilePath | None, Option(metavar="F")] = None
    """A history whose nights are a further kind of noise; they should be of one commit."""
    as_json: Annotated[Flag, Option("--json")] = False
    """Print data instead of text."""
    quiet: Annotated[Flag, Option()] = False
    """Show no progress bars."""


def _history(settings: HistorySettings, *, must_exist: bool = True) -> History:
    from harness.nightly.history import History

    return _existing(settings.history) if must_exist else History(settings.history)


def _existing(path: Path) -> History:
    from harness.nightly.history import History

    if not path.exists():
        raise UserInputError(f"{path}: there is no history; write one with harness nightly add, or name another file")
    return History(path)


def _known(history: History, metric: str) -> str:
    from compressor.spelling import suggest

    known = history.metrics()
    if metric not in known:
        raise UserInputError(f"{metric}: {history.path} has no such metric; {suggest(metric, known)}")
    return metric


def _run_night(settings: NightSettings) -> Verdict:
    from compressor.progress import progress_of
    from harness.nightly.config import read_config
    from harness.nightly.runner import Runner

    config, progress = read_config(settings.config), progress_of(not settings.quiet)
    found = (
        Runner(config, settings.night, progress).run() if settings.at is None else _run_at(settings.at, config, settings.night, progress)
    )
    if settings.as_json:
        print(to_json(found.to_dict()), end="")
    else:
        show_night(found)
    return found.verdict


def _run_at(revision: str, config: NightlyConfig, night: str | None, progress: Progress) -> Night:
    """Run a night of a commit; logs and checkpoints lie beside those of the night itself."""
    from harness.nightly.blame.measuring import config_at, lacking, variables_of
    from harness.nightly.blame.repository import Repository
    from harness.nightly.runner import Runner

    repository = Repository(config.root)
    commit = repository.commit(revision, "--at")
    own = config.model_copy(update={"folder": config.folder / f"at-{commit.revision[:12]}"})
    own.folder.mkdir(parents=True, exist_ok=True)
    with repository.tree(commit.revision, own.folder / "tree") as tree:
        placed, variables = config_at(own, repository, tree), variables_of(repository, tree)
        lacks = partial(lacking, repository, own.root, placed.root)
        return Runner(placed, night, progress, revision=commit.revision, variables=variables, lacks=lacks).run()


def _add(settings: AddSettings) -> Verdict:
    from harness.nightly.environment import current_environment

    history = _history(settings, must_exist=False)
    environment = current_environment(settings.device)
    history.add(
        settings.metric, settings.values, environment=environment, night=settings.night, revision=settings.revision, better=settings.better
    )
    _judge_and_show(history, [settings.metric], settings.as_json)
    return Verdict.PASS  # what it means is for judge to say


def _judge(settings: JudgeSettings) -> Verdict:
    history = _history(settings)
    return _judge_and_show(history, [_known(history, name) for name in settings.metrics] or history.metrics(), settings.as_json)


def _judge_and_show(history: History, metrics: list[str], as_json: bool) -> Verdict:
    from harness.nightly.judging.judge import judge

    found: list[Judgement] = [judge(history.series(name), history.acceptances(name)) for name in metrics]
    verdict = worst(one.verdict for one in found)
    if as_json:
        print(to_json({"verdict": verdict.value, "metrics": [one.to_dict() for one in found]}), end="")
    else:
        show_judgements(found, verdict)
    return verdict


def _nights(settings: ShownSettings) -> Verdict:
    history = _history(settings)
    rows = history.nights()
    if settings.as_json:
        print(to_json([{"night": night, "metrics": metrics, "readings": readings} for night, metrics, readings in rows]), end="")
    else:
        show_nights(rows)
    return Verdict.PASS


def _show(settings: ShowSettings) -> Verdict:
    from harness.nightly.judging.judge import judge

    history = _history(settings)
    metric = _known(history, settings.metric)
    series, words = history.series(metric), history.acceptances(metric)
    judgement = judge(series, words)
    if settings.as_json:
        rows = [{"night": one.night, "environment": one.environment, "revision": one.revision, "values": one.values} for one in series]
        print(to_json(judgement.to_dict() | {"acceptances": list(map(asdict, words)), "nights": rows}), end="")
    else:
        show_series(series, words, judgement)
    return Verdict.PASS


def _accept(settings: AcceptSettings) -> Verdict:
    from harness.nightly.judging.judge import changes_of, judge

    history = _history(settings)
    if settings.until == "":
        raise UserInputError("--until: an empty text was given, which is no day; give YYYY-MM-DD, or leave it out to accept for good")
    word = history.accept(_known(history, settings.metric), settings.night, settings.reason, settings.until or "")
    series, words = history.series(word.metric), history.acceptances(word.metric)
    meant = next((one for one in reversed(changes_of(series, words)) if one.acceptance == word), None)  # it may mean earlier ones, too
    level = f"the level since {meant.night}" if meant else f"a level that begins on {word.night} or before"
    print(f"{word.metric}: {level} is accepted {'until ' + word.until if word.until else 'for good'}: {word.reason}")
    if meant is not None and meant.night != word.night:
        print(f"it begins on {meant.night}, not on {word.night}, the night that was named")
    unchanged = judge(series, words) if meant is None else _unchanged(series, word.night)
    if unchanged is not None:
        print(f"none is seen that begins there: {unchanged.summary}")
    if meant is not None and word.until and date.fromisoformat(word.until) < date.max:  # behind which there is no day
        behind = changes_of(series, words, date.fromisoformat(word.until) + timedelta(days=1))
        for other in {one.acceptance for one in behind if one.night == meant.night and one.acceptance is not None}:
            end = f"until {other.until}" if other.until else "for good"
            print(f"behind {word.until} an earlier word goes on {end}, that on {other.night}; say it again with its own --until")
    return Verdict.PASS


def _unchanged(series: list[Measurement], night: str) -> Judgement | None:
    """What a night of sequences says against the one before, whatever the baseline; None where it is worse, and of repetitions."""
    from harness.nightly.judging.paired import judge_paired

    place = next(index for index, one in enumerate(series) if one.night == night)
    found = judge_paired(series[place - 1 : place + 1]) if series[0].kind == "paired" else None
    return None if found is None or found.verdict is Verdict.REGRESSION else found


def _export(settings: ExportSettings) -> Verdict:
    from harness.nightly.exchange import check_target

    check_target(settings.file)
    counts = _history(settings).export(settings.file)
    beside = _counted({name: count for name, count in counts.items() if name != "readings"})
    whole = settings.file.suffix == ".zip"
    print(f"{settings.file}: {counts['readings']:,} readings" + (f", {beside}" if whole and beside else ""))
    if beside and not whole:
        print(f"not in it: {beside}; export to a .zip takes them along")
    return Verdict.PASS


def _counted(counts: Mapping[str, int]) -> str:
    """Such as `1 acceptance and 3 cells`; what there is none of is left out."""
    return " and ".join(f"{count:,} {name if count > 1 else name[:-1]}" for name, count in counts.items() if count)


def _import(settings: ImportSettings) -> Verdict:
    new = _history(settings, must_exist=False).read_in(settings.file)
    beside = _counted({f"new {name}": count for name, count in new.items() if name != "measurements"})
    print(f"{settings.history}: {new['measurements']:,} new measurements" + (f", {beside}" if beside else ""))
    return Verdict.PASS


def _report(settings: ReportSettings) -> Verdict:
    from harness.nightly.report.site import summary_of, write_site

    page, night = write_site(_history(settings), settings.output_dir)
    print(f"{summary_of(night)}{page}")
    return night.verdict


def _simulate(settings: SimulateSettings) -> Verdict:
    from compressor.progress import progress_of
    from harness.nightly.judging.simulation import NOISES, recorded, simulate

    noises = dict(NOISES)
    if settings.recorded is not None:
        noises["recorded"] = recorded(_existing(settings.recorded))
    found = simulate(settings.series, settings.seed, progress_of(not settings.quiet), noises)
    if settings.as_json:
        print(to_json([one.to_dict() for one in found]), end="")
    else:
        show_figures(found)
    return Verdict.PASS


COMMAND = Actions(
    "measurements over nights: a history, and which change is none of noise",
    {
        "run": Command(
            "run every cell of a matrix in a process of its own, and judge what was measured",
            NightSettings,
            _run_night,
            exit_codes(
                "every cell passed, no metric is worse",
                "a metric is worse, or a cell failed",
                "a cell could not tell, or fails in quarantine",
            ),
        ),
        "judge": Command(
            "say which metrics are worse, since when, by how much",
            JudgeSettings,
            _judge,
            exit_codes("no metric is worse", "one is", "nights are too few, or too noisy, to tell"),
        ),
        "add": Command("write what was measured of a metric tonight", AddSettings, _add, exit_codes("written; judge says what it means")),
        "history": Command("list the nights", ShownSettings, _nights, exit_codes("listed")),
        "show": Command("show the nights of a metric, and what they say", ShowSettings, _show, exit_codes("shown")),
        "accept": Command("say that a change is meant", AcceptSettings, _accept, exit_codes("accepted")),
        "blame": BLAME,
        "export": Command(
            "write all readings as CSV or parquet, or all that there is as an archive", ExportSettings, _export, exit_codes("written")
        ),
        "import": Command("add what export wrote", ImportSettings, _import, exit_codes("added")),
        "report": Command(
            "write the last night as pages with trends, JUnit and Markdown",
            ReportSettings,
            _report,
            exit_codes(
                "every cell passed, no metric is worse",
                "a metric is worse, or a cell failed",
                "a cell could not tell, or fails in quarantine; or no cell ran, and nights are too few, or too noisy",
            ),
        ),
        "simulate": Command(
            "measure false alarms and nights to detection on simulated histories", SimulateSettings, _simulate, exit_codes("measured")
        ),
    },
)
