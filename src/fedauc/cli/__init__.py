"""The `fedauc` command: which command is meant, and how errors, notes and interruptions reach the user.

Help, lists and usage errors must come at once, but importing torch takes seconds. So `start` delays the imports of
numpy and torch, and a command finishes them only after it has checked its options.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from fedauc.cli import auditing, doctor, reporting, scoring, training, tuning, verifying
from fedauc.cli.completion import is_completing, read_typed_words, sketch_group
from fedauc.cli.help_panels import keep_option_names
from fedauc.cli.lazy_import import delay_import, finish_imports
from fedauc.plugins import VARIABLE
from fedauc.version import VERSION

USAGE_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""The base of every usage error, wherever the installed typer keeps it."""

COMMANDS = (
    training.COMMANDS
    | tuning.COMMANDS
    | scoring.COMMANDS
    | reporting.COMMANDS
    | auditing.COMMANDS
    | verifying.COMMANDS
    | doctor.COMMANDS
)
"""All commands by name."""

GROUPS = {
    "data": "Manage the files that datasets need.",
    "federation": "The same algorithms across machines, on Flower.",
}
"""Groups of commands; each has a module of its own."""

REFUSED_MEMORY = "can't allocate memory"
"""What torch says when the system refuses it memory; it is no MemoryError."""

HOW_TO_CONTINUE = {
    **dict.fromkeys(("data", "federation", *scoring.COMMANDS, *auditing.COMMANDS), "go on with: the same command"),
    **dict.fromkeys(("federation local", "federation resume"), "go on with: fedauc federation resume DIR"),
    "federation run": "a run that has begun goes on; on the server, `fedauc federation show DIR` follows it, and "
    "`fedauc federation pause DIR` stops it after its round",
}
"""How commands go on that `fedauc resume` does not know."""


def start() -> None:
    """Run `fedauc` with the words of the shell."""
    words = take_plugins(sys.argv[1:])
    typed = take_plugins(read_typed_words()) if is_completing() else words
    command = next((word for word in typed if not word.startswith("-")), "")
    is_distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if is_completing() or (command not in ("resume", "show", *GROUPS) and not is_distributed):
        delay_import("numpy")
        delay_import("torch")
    else:
        finish_imports()
    folder = find_out_folder(words)
    remedy = HOW_TO_CONTINUE.get(command, "go on with: fedauc resume DIR")
    remedy = HOW_TO_CONTINUE.get(" ".join(words[:2]), remedy).replace("DIR", folder)
    trains_into = folder if command in ("run", "compare", "sweep", "tune", "resume") else ""
    run_app(partial(build_app, command), words, "fedauc", remedy, trains_into)


def take_plugins(words: list[str]) -> list[str]:
    """The words of a command without `--plugin MODULE`; the modules are added to those of the environment variable.

    The processes that a command starts, such as the sites of a local federation, inherit them there.
    """
    names, rest, remaining = [os.environ.get(VARIABLE, "")], list[str](), iter(words)
    for word in remaining:
        if word == "--plugin" or word.startswith("--plugin="):
            names.append(word.partition("=")[2] or next(remaining, ""))
            if not names[-1]:
                _exit_with_message("error: --plugin names no module. See `fedauc --help`.", 2)
        else:
            rest.append(word)
    if names[1:]:
        os.environ[VARIABLE] = ",".join(filter(None, names))
    return rest


def build_app(command: str) -> typer.Typer:
    """All commands; only the given one has its options, because there are hundreds of them."""
    app = typer.Typer(
        no_args_is_help=True, add_completion=True, rich_markup_mode="rich", pretty_exceptions_enable=False
    )
    app.callback()(_main)
    for name, function in COMMANDS.items():
        if name != command:
            # Only its line in the list of commands will be shown.
            app.command(name, help=inspect.getdoc(function))(lambda: None)
        elif "texts" in inspect.signature(function).parameters:
            app.command(name)(training.add_config_options(function))
        else:
            app.command(name)(function)
    for name, text in GROUPS.items():
        group = typer.Typer()
        if name == command:
            group = sketch_group(name) if is_completing() else importlib.import_module(f"fedauc.cli.{name}").app
        app.add_typer(group, name=name, help=text)
    return app


def run_app(
    make_app: Callable[[], typer.Typer], words: list[str], program: str, how_to_continue: str, folder: str = ""
) -> None:
    """Run a command line: bad input is one line and exit code 2, a run that cannot go on is exit code 3.

    A command that is interrupted (exit code 130) or terminated (143) says how it goes on, once its folder is there.
    """
    try:
        with ExitStack() as stack:
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                # Under `torchrun`, the other processes are joined.
                from fedauc.experiments.ranks import join_process_group

                stack.enter_context(join_process_group())
            stack.enter_context(show_notes())
            command = typer.main.get_command(make_app())
            hide_flag_types(command)
            refuse_repeated_lists(command, words)
            if "--help" in words:
                keep_option_names()
            code = command(words, prog_name=program, standalone_mode=False)
    except USAGE_ERROR as error:
        _exit_with_message(describe_usage_error(error), 2)
    except ValueError as error:
        _exit_with_message(f"error: {error}", 2)
    except OSError as error:
        _exit_with_message(describe_system_error(error, how_to_continue if _is_made(folder) else ""), 2)
    except MemoryError as error:
        _exit_with_message(describe_memory_error(error), 2)
    except RuntimeError as error:
        from fedauc.guards import TrainingStopped

        if REFUSED_MEMORY in str(error):
            _exit_with_message(describe_memory_error(error), 2)
        if not isinstance(error, TrainingStopped):
            raise
        _exit_with_message(str(error), 3)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except SystemExit as end:
        if end.code != 143:
            raise
        code = 143
    # Some releases of typer turn an interrupt into this code.
    if code in (130, 143):
        ended = "interrupted" if code == 130 else "terminated"
        if folder and not _is_made(folder):
            _exit_with_message(f"{ended} before the first round; nothing was saved", code)
        _exit_with_message(f"{ended}; {how_to_continue}", code)
    sys.exit(code if isinstance(code, int) else 0)


def _is_made(folder: str) -> bool:
    """Whether a folder exists that was typed as an option."""
    return bool(folder) and Path(shlex.split(folder)[0]).exists()


def describe_system_error(error: OSError, how_to_continue: str) -> str:
    """What the system refused, with the path where it is known, and how a run goes on once that is mended."""
    if error.filename is None or error.strerror is None:
        return f"error: {error}"
    remedy = f"; mend that, then {how_to_continue}" if how_to_continue else ""
    return f"error: {error.filename}: {error.strerror.lower()}{remedy}"


def describe_memory_error(error: Exception) -> str:
    """What was asked of the memory of this machine, as far as the error says, and what to lower."""
    requested = re.search(r"allocate (\d[\d.]*) ?(bytes|[KMGTPE]iB)", str(error))
    amount = "more memory than it may have"
    if requested and requested[2] == "bytes":
        amount = f"about {int(requested[1]) / 2**30:,.1f} GiB at once"
    elif requested:
        amount = f"about {requested[1]} {requested[2]} at once"
    return f"error: the command needs {amount}: lower the rows, the model or the batch, or use a larger machine"


def hide_flag_types(command: Any) -> None:
    """Show flags without `<bool>` in the help of a command and its subcommands: they take no value."""
    for parameter in (*command.params, command.get_help_option(typer.Context(command))):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for subcommand in getattr(command, "commands", {}).values():
        hide_flag_types(subcommand)


def refuse_repeated_lists(command: Any, words: list[str]) -> None:
    """Refuse an option that takes a list, such as `--transforms a,b`, where it is given twice: the last would win."""
    for parameter in command.params:
        if (parameter.metavar or "").endswith(",...") and not parameter.multiple:
            count = sum(word.partition("=")[0] in parameter.opts for word in words)
            if count > 1:
                remedy = "give it once, with all its values separated by commas"
                raise ValueError(f"{parameter.opts[0]} is given {count} times, of which only the last counts; {remedy}")
    for subcommand in getattr(command, "commands", {}).values():
        refuse_repeated_lists(subcommand, words)


def find_out_folder(words: list[str]) -> str:
    """The run's folder as it was typed; DIR where it was not."""
    if words[:2] == ["federation", "run"]:
        # Its first argument is the app's folder, which may be the current one.
        return shlex.quote(words[2]) if words[2:] and not words[2].startswith("-") else "DIR"
    split = [part for word in words for part in (word.split("=", 1) if word.startswith("--out=") else [word])]
    folders = [value for word, value in pairwise(split) if word in ("resume", "--out")]
    return shlex.quote(folders[-1]) if folders else "DIR"


class NoteHandler(logging.Handler):
    """Prints the library's own messages, such as why a model runs in the plain loop, on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """One note, folded to the width of the terminal; a federation's processes have logs of their own."""
        from rich.console import Console

        if record.name == "fedauc":
            Console(stderr=True).print(f"note: {record.getMessage()}", markup=False, highlight=False)


@contextmanager
def show_notes() -> Iterator[None]:
    """Show notes as long as a command runs."""
    logger, handler = logging.getLogger("fedauc"), NoteHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def describe_usage_error(error: Any) -> str:
    """What is wrong with a command line, and where help is; nothing where help was printed already."""
    message, context = error.format_message().strip(), getattr(error, "ctx", None)
    if near := getattr(error, "possibilities", None):
        # The parser lists them by the alphabet.
        option = error.option_name
        near = sorted(near, key=lambda name: -difflib.SequenceMatcher(None, option, name).ratio())
        message = f"No such option: {option} (did you mean {' or '.join(near)}?)"
    if not message:
        return ""
    stop = "" if message[-1] in ".?!" else "."
    return f"error: {message}{stop} See `{context.command_path if context else 'fedauc COMMAND'} --help`."


def _print_version(requested: bool) -> None:
    if requested:
        print(VERSION)
        raise typer.Exit()


def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    plugin: Annotated[
        str | None, typer.Option("--plugin", metavar="MODULE", help="A module with your own members; may be repeated.")
    ] = None,
) -> None:
    """Federated AUC maximization for clients that take part in cycles."""


def _exit_with_message(message: str, code: int) -> None:
    if message:
        print(" ".join(message.split()), file=sys.stderr)
    sys.exit(code)
