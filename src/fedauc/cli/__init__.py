"""The shell face: run, compare, sweep, resume, list, show, data."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedauc.cli import data as data_cli
from fedauc.cli import federation as federation_cli
from fedauc.discovery import lookup
from fedauc.experiments.checkpoint import write_atomically
from fedauc.experiments.comparison import Comparison
from fedauc.experiments.config import Config
from fedauc.experiments.folder import RunFolder
from fedauc.experiments.options import DEFAULT_METHOD, build_config, describe_type, list_options
from fedauc.experiments.ranks import join_process_group, rank_folder
from fedauc.experiments.run_group import plan_run_groups
from fedauc.experiments.runner import DataCache, Run
from fedauc.experiments.sweep import expand_sweep, read_list, read_seeds, read_varied
from fedauc.guards import TrainingStopped
from fedauc.reports.caveats import list_caveats
from fedauc.reports.listing import members_table, methods_table
from fedauc.reports.profile import profile_work
from fedauc.reports.profile import shares_table as spent_table
from fedauc.reports.progress import ProgressBars
from fedauc.reports.summary import MethodSummary, Ranking, rank_settings, summarize_run
from fedauc.reports.summary import compare_methods as summarize_all
from fedauc.reports.tables import (
    comparison_caption,
    comparison_markdown,
    comparison_table,
    describe_groups,
    describe_run,
    pairs_table,
    ranking_caption,
    ranking_markdown,
    ranking_table,
)
from fedauc.version import VERSION

SHORT = {
    "participation.groups": ["--groups"],
    "participation.per-round": ["--per-round"],
    "objective.score": ["--score"],
    "learning-rate": ["--learning-rate", "--lr"],
}
"""Short names for what is set most often."""

KEYWORD = inspect.Parameter.KEYWORD_ONLY

USAGE: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""The base of every usage error, wherever the installed typer keeps it."""

AGAIN = {"data": "the same command", "federation": "fedauc federation resume DIR"}
"""How commands go on that `fedauc resume` does not know."""

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
app.add_typer(data_cli.app, name="data")
app.add_typer(federation_cli.app, name="federation")


def run_app(application: typer.Typer = app, program: str = "fedauc", again: str = "") -> None:
    """Run a command line: bad input is one line and exit code 2, a run that cannot go on is exit code 3.

    `again` says how an interrupted command goes on, where that is not `fedauc resume`.
    """
    try:
        with join_process_group(), show_notes():
            code = application(prog_name=program, standalone_mode=False)
    except USAGE as error:
        _exit_with_message(describe_usage_error(error), 2)
    except (ValueError, OSError) as error:
        _exit_with_message(f"error: {error}", 2)
    except TrainingStopped as stopped:
        _exit_with_message(str(stopped), 3)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    # Some releases of typer turn an interrupt into this code.
    if code == 130:
        again = again or AGAIN.get("".join(sys.argv[1:2]), "fedauc resume DIR").replace(
            "DIR", find_out_folder(sys.argv[1:])
        )
        _exit_with_message(f"interrupted; go on with: {again}", 130)
    sys.exit(code if isinstance(code, int) else 0)


def find_out_folder(words: list[str]) -> str:
    """The run's folder as it was typed; DIR where it was not."""
    apart = [part for word in words for part in (word.split("=", 1) if word.startswith("--out=") else [word])]
    named = [after for word, after in pairwise(apart) if word in ("resume", "--out")]
    return shlex.quote(named[-1]) if named else "DIR"


class NoteHandler(logging.Handler):
    """Prints what the library itself has to say, such as why a model runs in the plain loop, on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """One note, folded to the width of the terminal; a federation's processes have logs of their own."""
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


def add_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every field of the configuration as an option; it receives them as `texts`."""
    made = list_options()
    names = {option.name: option.name.replace("-", "_").replace(".", "__") for option in made}

    @functools.wraps(command)
    def wrapper(**given: Any) -> None:
        texts = {name: given.pop(key) for name, key in names.items()}
        command(texts={name: text for name, text in texts.items() if text is not None}, **given)

    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "texts"]
    extra = []
    for option in made:
        kind = "name" if option.type is None else describe_type(option.type)
        flags = SHORT.get(option.name, [f"--{option.name}"])
        spec = typer.Option(*flags, metavar=kind, help=option.help, rich_help_panel=option.panel, show_default=False)
        note = Annotated[str | None, spec]
        extra.append(inspect.Parameter(names[option.name], KEYWORD, default=None, annotation=note))
    keyword = [p.replace(kind=KEYWORD) for p in own]
    wrapper.__signature__ = inspect.Signature(keyword + extra)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in keyword + extra}
    return wrapper


Out = Annotated[Path, typer.Option("--out", help="The folder to make.", show_default=False)]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A JSON configuration to start from.")]
Folder = Annotated[Path, typer.Argument(help="A folder that run, compare or sweep made.", show_default=False)]
Seeds = Annotated[str, typer.Option("--seeds", metavar="int,...", help="Seeds; everything runs with each.")]
ONE = f"A name from `fedauc list methods`; {DEFAULT_METHOD} unless given."
SOME = "Names from `fedauc list methods`"


def _print_version(asked: bool) -> None:
    if asked:
        print(VERSION)
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Federated AUC maximization for clients that take part in cycles."""


@app.command()
@add_config_options
def run(
    texts: dict[str, str],
    out: Out,
    method: Annotated[str | None, typer.Option("--method", help=ONE)] = None,
    config: ConfigFile = None,
    profile: Annotated[bool, typer.Option("--profile", help="Print where the time went.")] = False,
) -> None:
    """Train one method into a run folder.

    Example: [bold]fedauc run --data creditcard --method cycp-pairwise --cycles 30 --seed 0 --out runs/first[/bold]
    """
    built = build_config(method, Config.read(config) if config else None, texts)
    with rank_folder(out) as folder:
        made = Run.create(built, folder)
        with ProgressBars() as bars:
            observer = bars.bar(built.recipe.method)
            spent = profile_work(lambda: made.train_to_end(observer)) if profile else made.train_to_end(observer)
        _print_run(RunFolder.open(folder))
        if isinstance(spent, list):
            Console().print(spent_table(spent))


@app.command()
@add_config_options
def compare(
    texts: dict[str, str],
    out: Out,
    methods_: Annotated[str, typer.Option("--methods", metavar="a,b,...", help=f"{SOME}.")],
    seeds: Seeds = "0",
    config: ConfigFile = None,
) -> None:
    """Train several methods side by side, then print a table and draw the learning curves.

    Example: [bold]fedauc compare --methods cycp-fedavg,cycp-minimax,cycp-pairwise --cycles 30 --out runs/three[/bold]
    """
    runs = _expand_runs(methods_, seeds, texts, config)
    with rank_folder(out) as folder:
        _run_comparison(Comparison.create(folder, runs))


@app.command()
@add_config_options
def sweep(
    texts: dict[str, str],
    out: Annotated[Path | None, typer.Option("--out", help="The folder to make; not needed for --plan.")] = None,
    methods_: Annotated[
        str | None,
        typer.Option("--methods", "--method", metavar="a,b,...", help=f"{SOME}; {DEFAULT_METHOD} unless given."),
    ] = None,
    vary: Annotated[
        list[str] | None, typer.Option("--vary", metavar="option=a,b,...", help="Values of an option of `fedauc run`.")
    ] = None,
    seeds: Seeds = "0",
    config: ConfigFile = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only say what would run, and which runs share a graph.")
    ] = False,
) -> None:
    """Train every combination of methods, varied options and seeds, and rank the settings by validation AUC.

    With the graphed engine, runs that differ in seeds, learning rates or data alone go together in one CUDA graph.

    Example: [bold]fedauc sweep --method cycp-pairwise --vary learning-rate=0.03,0.1 --seeds 0,1,2 --out runs/sweep[/bold]
    """
    runs = _expand_runs(methods_, seeds, texts, config, vary)
    if plan:
        Console().print(describe_groups(plan_run_groups(runs, DataCache())), markup=False, highlight=False)
        return
    if out is None:
        raise ValueError("sweep lacks --out, the folder to make; --plan alone needs none")
    with rank_folder(out) as folder:
        _run_comparison(Comparison.create(folder, runs, sweep=True))


@app.command()
def resume(folder: Folder) -> None:
    """Go on with an interrupted run, comparison or sweep, from its last checkpoint, to the same records.

    Example: [bold]fedauc resume runs/first[/bold]
    """
    with rank_folder(folder) as mine:
        if Comparison.is_comparison(mine):
            _run_comparison(Comparison(mine))
            return
        run = Run.resume(mine)
        with ProgressBars() as bars:
            run.train_to_end(bars.bar(run.config.recipe.method))
        _print_run(RunFolder.open(mine))


@app.command()
def show(folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print a run's final and best AUC with interval, rounds and bytes.

    Example: [bold]fedauc show runs/first --json[/bold]
    """
    if Comparison.is_comparison(folder):
        found = Comparison(folder)
        if as_json:
            print(json.dumps([{"setting": name} | summarize_run(each) for name, each in found.run_folders()], indent=2))
        elif found.sweep:
            _print_sweep(
                rank_settings(found.run_folders(), found.seeds_per_setting()), list_caveats(found.run_folders())
            )
        else:
            _print_comparison(summarize_all(found.run_folders()), list_caveats(found.run_folders()))
    elif as_json:
        print(json.dumps(summarize_run(RunFolder.open(folder)), indent=2))
    else:
        _print_run(RunFolder.open(folder))


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="methods, objectives, participation, data, models, ...")] = "methods",
) -> None:
    """List what a configuration can name, with parameters and defaults.

    Example: [bold]fedauc list objectives[/bold]
    """
    kinds = {"methods": "method", "objectives": "objective", "participation": "participation", "data": "data"}
    kinds |= {"models": "model", "partitions": "partition", "algorithms": "algorithm", "stages": "stages"}
    kind = lookup("list", what, kinds)
    Console().print(methods_table() if kind == "method" else members_table(kind))


@app.command()
def version() -> None:
    """Print the version.

    Example: [bold]fedauc version[/bold]
    """
    print(VERSION)


def _run_comparison(found: Comparison) -> None:
    names = name_bars(list(found.read_configs()))
    with ProgressBars() as bars:
        stopped = found.train_runs(lambda place: bars.bar(names[place]))
    (_write_sweep_report if found.sweep else _write_comparison_report)(found)
    for place, reason in stopped.items():
        print(f"{place}: {reason}", file=sys.stderr)
    if stopped:
        raise typer.Exit(3)


def _write_sweep_report(found: Comparison) -> None:
    ranked, told = rank_settings(found.run_folders(), found.seeds_per_setting()), list_caveats(found.run_folders())
    write_atomically(found.path / "table.md", ranking_markdown(ranked, told).encode())
    _print_sweep(ranked, told)


def _print_sweep(ranked: Ranking, told: list[str]) -> None:
    _print_caveats(told)
    Console().print(ranking_table(ranked))
    Console().print(ranking_caption(ranked))


def _write_comparison_report(found: Comparison) -> None:
    from fedauc.reports.curves import write_curves

    lines, told = summarize_all(found.run_folders()), list_caveats(found.run_folders())
    write_curves(found.run_folders(), found.path / "curves.png")
    (found.path / "table.md").write_text(comparison_markdown(lines, told))
    _print_comparison(lines, told)
    Console().print(f"Curves: {found.path / 'curves.png'}", soft_wrap=True)


def _print_comparison(lines: list[MethodSummary], told: list[str]) -> None:
    _print_caveats(told)
    Console().print(comparison_table(lines))
    if test := comparison_caption(lines):
        Console().print(test)


def name_bars(places: list[str]) -> dict[str, str]:
    """Runs' names beside their bars: what they differ in. The seed comes before what may be cut off."""
    parts = {place: place.split("/") for place in places}
    seeds = len({part[-1] for part in parts.values()}) > 1
    methods = len({part[0] for part in parts.values()}) > 1
    return {
        place: " ".join(varied[-1:] * seeds + [method] * (methods or len(varied) == 1) + varied[:-1])
        for place, (method, *varied) in parts.items()
    }


def _print_caveats(told: list[str]) -> None:
    for label in told:
        Console().print(label, markup=False, highlight=False)


def _print_run(folder: RunFolder) -> None:
    _print_caveats(list_caveats([(folder.path.name, folder)]))
    Console().print(pairs_table(describe_run(summarize_run(folder)) | {"folder": folder.path}))


def _expand_runs(
    names: str | None, seeds: str, texts: dict[str, str], config: Path | None, vary: list[str] | None = None
) -> dict[str, Config]:
    """The runs that lists of methods and seeds and the options of a command line stand for."""
    if "seed" in texts:
        raise ValueError(f"seed is {texts['seed']}, but several runs take --seeds; use --seeds {texts['seed']}")
    base = Config.read(config) if config else None
    found = (base.recipe.method if base else DEFAULT_METHOD) if names is None else names
    varied = read_varied(vary or [], {flag.removeprefix("--"): name for name, flags in SHORT.items() for flag in flags})
    return expand_sweep(read_list("methods", found), read_seeds(seeds), varied, texts, base)


def describe_usage_error(error: Any) -> str:
    """What is wrong with a command line, and where help is; nothing where help was printed already."""
    message, place = error.format_message().strip(), getattr(error, "ctx", None)
    if not message:
        return ""
    stop = "" if message[-1] in ".?!" else "."
    return f"error: {message}{stop} See `{place.command_path if place else 'fedauc COMMAND'} --help`."


def _exit_with_message(message: str, code: int) -> None:
    if message:
        print(" ".join(message.split()), file=sys.stderr)
    sys.exit(code)
