"""What both commands share at the terminal. Output that nobody takes: a reader that has seen enough (`| head`) ends them quietly, as it
ends other programs; a disk that is full is an error of one line. And arguments: none is dropped.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import select
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, TextIO

import rich.console
from rich.segment import Segment

from compressor.interruption import ended_by_sigterm
from compressor.spelling import suggest

# The console that tables are printed on: rich's, but a closed pipe is an error as everywhere, where rich exits with 1, a verdict here.


_FILE_WIDTH = 10_000  # columns: whoever searches a file finds a name whole, and a sentence in its line


class Console(rich.console.Console):
    """As rich's, but `| head` does not end it with exit code 1, and nothing is cut into lines for a file."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what rich takes."""
        super().__init__(*args, **kwargs)
        if kwargs.get("width") is None and "COLUMNS" not in os.environ and not self.is_terminal:
            self.width = _FILE_WIDTH

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Render as rich does, with what only a terminal would obey shown."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)

    def on_broken_pipe(self) -> None:
        """Let the command end as behind `print` (compressor/console.py)."""
        raise BrokenPipeError


# Names of tensors, modules and files come from checkpoints of others, and a terminal obeys what it finds in them.

# Controls but tab and line feed, turned text, and halves of characters, which no file can hold.
_OBEYED = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")


def visible(text: str) -> str:
    """Write out what a terminal would obey and nobody would see.

    Args:
        text: to be printed, of one line or more.

    Returns:
        The text, with control characters and changes of direction as `\\u001b`, which JSON reads back.
    """
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class _Visible:
    """A standard stream on which everything is visible, but for the colours of rich, which writes to what it finds under this name."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        body = text.strip("\r")  # around a line it is the progress bar of another library
        front, _, back = text.partition(body) if body else (text, "", "")
        return self.rich_proxied_file.write(f"{front}{visible(body)}{back}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


class Parser(argparse.ArgumentParser):
    """As argparse's, but none of its words is dropped: an option that holds one value may not be given two; and an error is one line."""

    usage_error = 2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what argparse takes."""
        super().__init__(*args, **kwargs)
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Take what argparse takes; the parser of a verb knows its options, and is asked before that of the command."""
        found, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            if not word.startswith("-"):
                self.error(f"{word!r} is one argument too many; leave it out")
            option = word.partition("=")[0]
            names = [one[2:] for one in self._option_string_actions if one.startswith("--")]
            advice = suggest(option.lstrip("-"), names, f"see {self.prog} --help", show="--{}".format)
            self.error(f"{option}: there is no such option; {advice}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Say in one line what is wrong and what to do, and exit."""
        self.exit(self.usage_error, f"{self.prog}: error: {_reworded(message, self.prog)}\n")


def _reworded(message: str, program: str) -> str:
    """argparse's words in our form."""
    if found := re.fullmatch(r"the following arguments are required: (.*)", message):
        return f"{found[1]} {'are' if ', ' in found[1] else 'is'} missing; see {program} --help"
    text = message.removeprefix("argument ")
    if found := re.fullmatch(r"(.*): invalid choice: '?(.*?)'? \(choose from (.*)\)", text):
        return f"{found[1]}: {found[2]!r} does not exist; {suggest(found[2], [word.strip(chr(39)) for word in found[3].split(', ')])}"
    return text if "; " in text else f"{text}; see {program} --help"


class _StoreOnce(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        before = getattr(namespace, self.dest, self.default)
        if option is not None and before not in (self.default, values):
            parser.error(f"{option}: {_shown(before)} and {_shown(values)} were given, and it holds one value; give it once")
        setattr(namespace, self.dest, values)


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


class _Completion(argparse.Action):
    """Prints what a shell needs to complete the command, and ends it: the shell then completes without starting Python."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        import shtab

        _complete_paths(parser)
        print(shtab.complete(parser, shell=values))
        parser.exit()


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Declare `--completion SHELL`.

    Args:
        parser: of the command, not of a verb; changed.
    """
    text = 'print the completion script of a shell, such as: eval "$(%(prog)s --completion bash)"'
    parser.add_argument("--completion", action=_Completion, choices=("bash", "zsh", "fish"), default=argparse.SUPPRESS, help=text)


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    """Let every argument that takes text complete to names of files. Changes the parser."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                _complete_paths(verb)
        elif action.choices is None and action.type is None and action.nargs != 0:
            action.complete = shtab.FILE  # type: ignore[attr-defined]


# What the library logs, on the command line.


class _Lines(logging.Handler):
    """Writes to what standard error is when a line comes: under a progress bar, that is the bar, which makes room for it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        print(self.format(record), file=sys.stderr)


def add_verbosity(parser: argparse.ArgumentParser) -> None:
    """Declare `--verbose`.

    Args:
        parser: of a verb; changed.
    """
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log phases and stages; twice: modules and steps, too")


@contextmanager
def logged(verbose: int) -> Iterator[None]:
    """Write what the library logs to standard error, as far as it was asked for.

    Args:
        verbose: 0 for warnings, 1 for phases and stages, 2 for everything.

    Yields:
        Nothing.
    """
    logger, handler = logging.getLogger("compressor"), _Lines()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel((logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


EXIT_CLOSED_PIPE = 141
"""What a shell reports of a program that wrote into a closed pipe: 128 + SIGPIPE."""


def with_output(name: str, run: Callable[[], int], failed: int) -> int:
    """Run a command, see that its output arrives, and that SIGTERM ends it as ctrl-C does: with a word on what is kept.

    Args:
        name: of the command, for the line that says that it did not.
        run: the command, to its exit code.
        failed: exit code where standard output cannot be written.

    Returns:
        The command's exit code, EXIT_CLOSED_PIPE, or `failed`.
    """
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by whoever started the command
            setattr(sys, stream, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    try:
        try:
            with ended_by_sigterm(), _visible_streams():
                return run()
        finally:  # also behind the help of argparse, which exits: what is left in the buffer would fail where nobody can say so
            sys.stdout.flush()
    except OSError as error:
        reason = _broken(error)
        if reason is None:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)  # the interpreter flushes once more at its end
        if reason == "closed":
            os.dup2(nowhere, 2)
            return EXIT_CLOSED_PIPE
        print(f"{name}: error: standard output: it cannot be written ({reason}); make room or write elsewhere", file=sys.stderr)
        return failed


@contextmanager
def _visible_streams() -> Iterator[None]:
    with ExitStack() as stack:
        for name in ("stdout", "stderr"):
            stack.callback(setattr, sys, name, getattr(sys, name))
            setattr(sys, name, _Visible(getattr(sys, name)))
        yield


def _broken(error: OSError) -> str | None:
    """Say what is wrong with standard output: `closed`, the system's text, or None where the error came from elsewhere."""
    if isinstance(error, BrokenPipeError) and (_is_closed(1) or _is_closed(2)):
        return "closed"
    try:
        print(flush=True)
    except OSError as again:
        return again.strerror
    return None


def _is_closed(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


# Numbers on the command line, with a line of their own for what is none; nothing heavy is imported.


def positive(text: str) -> int:
    """Read a whole number above 0, or raise ArgumentTypeError."""
    return _read(text, "a whole number above 0", least=1)


def count(text: str) -> int:
    """Read a whole number of 0 or more, or raise ArgumentTypeError."""
    return _read(text, "a whole number of 0 or more", least=0)


def whole(text: str) -> int:
    """Read a whole number, or raise ArgumentTypeError."""
    return _read(text, "a whole number")


def _read(text: str, kind: str, least: int | None = None) -> int:
    value = int(text) if text.removeprefix("-").isdecimal() else None
    if value is None or (least is not None and value < least):
        raise argparse.ArgumentTypeError(f"{text!r} is not {kind}")
    return value
