"""The command `compressor`. Arguments are read and checked before torch is imported, so that `--help` and mistakes answer at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.atomic import default_run_dir
from compressor.cli import convert, inspect, mappings, resumed_lines, trace, train
from compressor.console import Parser, add_completion, add_verbosity, logged, with_output
from compressor.distributed.launch import is_first_rank, num_ranks
from compressor.errors import AlreadyDoneError, CompressorError, RankError, UserInputError
from compressor.interruption import EXIT_INTERRUPTED
from compressor.json_text import from_json, to_json
from compressor.settings.options import Settings, add_options, chosen
from compressor.settings.verbs import MODEL_HELP, OneshotSettings, PlanSettings, RecipeSettings

if TYPE_CHECKING:
    from compressor.entrypoints.oneshot import OneshotResult
    from compressor.planning import Plan


_SHARED_BY_RANKS = ("oneshot",)
_BY_THE_FIRST_RANK = ("trace",)  # it looks at two short samples, which leaves nothing to share
EXIT_OK, EXIT_ERROR, EXIT_USAGE = 0, 1, 2


@dataclass(frozen=True)
class Verb:
    """One subcommand: its line of help, its arguments and what it does."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; by default those of the process.

    Returns:
        Exit code: 0 done, 1 an error that one line on standard error explains, 2 wrong arguments, 130 interrupted
        (ctrl-C, SIGTERM), 141 nobody reads what it prints any more.
    """
    return with_output("compressor", lambda: _run(argv), EXIT_ERROR)


def _run(argv: Sequence[str] | None) -> int:
    words = sys.argv[1:] if argv is None else argv
    args = _parser(words).parse_args(words)
    if num_ranks() > 1 and args.verb not in _SHARED_BY_RANKS:
        if args.verb in _BY_THE_FIRST_RANK:
            return _guarded(args) if is_first_rank() else EXIT_OK
        if is_first_rank():
            shared = ", ".join(_SHARED_BY_RANKS)
            print(
                f"compressor {args.verb}: error: {num_ranks()} ranks were started, and only {shared} shares its work; start one",
                file=sys.stderr,
            )
        return EXIT_USAGE
    return _guarded(args)


def _guarded(args: argparse.Namespace) -> int:
    try:
        with logged(getattr(args, "verbose", 0)):
            return VERBS[args.verb].run(args)
    except SystemExit as error:  # of a modifier that the recipe names: 0 would say that all is done
        print(f"compressor {args.verb}: error: code that it ran called sys.exit({error.code!r}); take that out", file=sys.stderr)
        return EXIT_ERROR
    except RankError as error:
        if error.is_mine_to_tell:
            print(f"compressor {args.verb}: error: {_one_line(error)}", file=sys.stderr)
        return EXIT_OK if error.kind == AlreadyDoneError.__name__ else EXIT_ERROR
    except AlreadyDoneError as done:
        return _tell_done(args, done)
    except (CompressorError, ExceptionGroup) as error:
        print(f"compressor {args.verb}: error: {_one_line(error)}", file=sys.stderr)
        return EXIT_ERROR
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        need = "compressor plan says what a run needs, and compressor convert needs little more than one tensor"
        told = _notes(error) or _left(args)
        print(f"compressor {args.verb}: error: memory: there is too little of it ({_first_line(error)}); {need}; {told}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt as error:
        print(f"compressor {args.verb}: interrupted; {_notes(error) or _left(args)}", file=sys.stderr)
        return EXIT_INTERRUPTED


def _tell_done(args: argparse.Namespace, done: AlreadyDoneError) -> int:
    """Nothing is left to do, which is no failure: what asked for the record gets it."""
    print(f"compressor {args.verb}: {_one_line(done)}", file=sys.stderr)
    if args.json:
        record = from_json((Path(args.output_dir) / "compression.json").read_text(encoding="utf-8"))
        print(to_json({**record, "output_dir": str(Path(args.output_dir).resolve())}), end="")
    return EXIT_OK


def _is_out_of_memory(error: BaseException) -> bool:
    """Tell it of an error of Python, of a GPU's allocator (by name: torch may not be imported yet), and of a CPU's, which has no class."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = Parser(prog="compressor", description="Compress a model by a recipe, and record what was done.")
    add_completion(parser)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name in argv[:1] if argv and argv[0] in VERBS else VERBS:  # one verb answers sooner than all
        VERBS[name].add_arguments(verbs.add_parser(name, help=VERBS[name].help, description=VERBS[name].help))
    return parser


def _one_line(error: BaseException) -> str:
    if isinstance(error, ExceptionGroup):
        return "; ".join(_one_line(inner) for inner in error.exceptions)
    return " ".join("; ".join(part for part in (str(error), _notes(error)) if part).split())


def _left(args: argparse.Namespace) -> str:
    """What an interruption leaves behind: checkpoints appear whole or not at all, which it may come too late for."""
    output_dir = getattr(args, "output_dir", None)
    if output_dir is None:
        return "nothing was written"
    if (Path(output_dir) / "compression.json").is_file():
        return f"the checkpoint in {output_dir} is whole"
    try:
        run_dir = Path(getattr(args, "run_dir", None) or default_run_dir(output_dir))
    except (UserInputError, ValueError):  # nothing is beside a path that leads nowhere, or beside the root
        return "nothing was written"
    goes_on = f"what {run_dir} holds is kept; the same command with --resume goes on from there"
    return goes_on if run_dir.exists() else "nothing was written"


def _notes(error: BaseException) -> str:
    """What was added to an error on its way up, such as where finished stages are kept."""
    return "; ".join(getattr(error, "__notes__", []))


def _oneshot_arguments(parser: argparse.ArgumentParser) -> None:
    _model_arguments(parser, "oneshot", OneshotSettings)
    add_verbosity(parser)


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    _model_arguments(parser, "plan", PlanSettings)


def _model_arguments(parser: argparse.ArgumentParser, verb: str, settings: type[Settings]) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP[verb])
    add_options(parser, settings)
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")


def _run_oneshot(args: argparse.Namespace) -> int:
    result = _oneshot(args)
    if not is_first_rank():
        return EXIT_OK
    if args.json:
        own = {"output_dir": str(result.output_dir), "seconds": result.seconds, "resumed": result.resumed}
        laps = {name: [asdict(lap) for lap in getattr(result, name)] for name in ("phases", "stages")}
        print(to_json({**result.record, **own, **laps}), end="")
    else:
        _print_result(result, resumed_lines(args.resume, result.resumed))
    return EXIT_OK


def _oneshot(args: argparse.Namespace) -> OneshotResult:
    from compressor.distributed.launch import launched
    from compressor.entrypoints.oneshot import oneshot

    with launched():
        return oneshot(args.model, **chosen(args, OneshotSettings))


def _print_result(result: OneshotResult, resumed: Sequence[str]) -> None:
    from rich.table import Table

    from compressor.console import Console

    table = Table(title="Compressed modules")
    for column, justify in (("module", "left"), ("scheme", "left"), ("relative error", "right"), ("tokens", "right")):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for record in result.report.modules.values():
        tokens = "-" if record.num_tokens is None else f"{record.num_tokens:,}"
        table.add_row(record.name, record.scheme, f"{record.error:.2e}", tokens)
    console = Console()
    console.print(table)
    for fallback in result.report.fallbacks:
        console.print(f"fallback: {fallback.module}: {fallback.kind}: {fallback.detail}", style="yellow")
    for note in result.report.notes:
        console.print(f"note: {note}", soft_wrap=True)
    for line in resumed:
        console.print(line)
    seconds = ", ".join(f"{phase} {value:.1f} s" for phase, value in result.seconds.items())
    console.print(f"{len(result.report.modules)} modules compressed, {len(result.report.fallbacks)} fallbacks; {seconds}")
    console.print(f"checkpoint: {result.output_dir}", soft_wrap=True)


def _run_plan(args: argparse.Namespace) -> int:
    from compressor.planning import plan

    made = plan(args.model, **chosen(args, PlanSettings))
    if args.json:
        print(to_json(made.to_dict()), end="")
    else:
        _print_plan(made)
    return _exit_code(made)


def _exit_code(made: Plan) -> int:
    """Of a command on the same recipe, which writes a checkpoint."""
    return EXIT_OK if made.unwritable is None else EXIT_ERROR


def _print_plan(made: Plan) -> None:
    from compressor.console import Console
    from compressor.planning.show import show_plan

    show_plan(made, Console())


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="recipe_verb", required=True, metavar="VERB")
    texts = {
        "schema": "Print the JSON schema of recipes, for editors.",
        "check": "Say what a recipe resolves to, on a model if one is given.",
    }
    added = {name: verbs.add_parser(name, help=text, description=text) for name, text in texts.items()}
    check = added["check"]
    check.add_argument("recipe", metavar="FILE", help="recipe: a YAML or JSON file, or its text")
    add_options(check, RecipeSettings)
    check.add_argument("--model", metavar="M", help="folder of a model, or its name on the hub; weights are not needed")
    check.add_argument("--json", action="store_true", help="print the result as JSON on standard output")


def _run_recipe(args: argparse.Namespace) -> int:
    from compressor.recipe import load_recipe, recipe_schema

    if args.recipe_verb == "schema":
        print(to_json(recipe_schema()), end="")
        return EXIT_OK
    recipe = load_recipe(args.recipe, args=args.recipe_args)
    made = None
    if not args.json:
        print(recipe.dump(), end="")
    if args.model is not None:
        from compressor.planning import plan_recipe

        made = plan_recipe(args.model, recipe, PlanSettings(recipe=args.recipe, recipe_args=args.recipe_args))
    if args.json:
        print(to_json({**recipe.to_dict(), "plan": None if made is None else made.to_dict()}), end="")
    elif made is not None:
        _print_plan(made)
    return EXIT_OK if made is None else _exit_code(made)


VERBS: dict[str, Verb] = {
    "oneshot": Verb("Compress a model with a recipe and calibration data, and save the checkpoint.", _oneshot_arguments, _run_oneshot),
    "convert": Verb(convert.HELP, convert.add_arguments, convert.run),
    "plan": Verb(
        "Say what each module would get, with estimates of memory and time; run nothing. Ends with 1 where a run would be refused.",
        _plan_arguments,
        _run_plan,
    ),
    "inspect": Verb(inspect.HELP, inspect.add_arguments, inspect.run),
    "mappings": Verb(mappings.HELP, mappings.add_arguments, mappings.run),
    "trace": Verb(trace.HELP, trace.add_arguments, trace.run),
    "train": Verb(train.HELP, train.add_arguments, train.run),
    "recipe": Verb("Check a recipe, or print the schema of recipes.", _recipe_arguments, _run_recipe),
}

if __name__ == "__main__":
    raise SystemExit(main())
