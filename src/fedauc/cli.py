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

from fedauc import data_cli
from fedauc.discovery import lookup
from fedauc.experiments.checkpoint import write_atomically
from fedauc.experiments.comparison import Comparison
from fedauc.experiments.config import Config
from fedauc.experiments.folder import RunFolder
from fedauc.experiments.options import DEFAULT, build, describe, options
from fedauc.experiments.ranks import join_process_group, rank_folder
from fedauc.experiments.run_group import plan_run_groups
from fedauc.experiments.runner import DataCache, Run
from fedauc.experiments.sweep import expand_sweep, read_list, read_seeds, read_varied
from fedauc.federation import commands as federation_commands
from fedauc.guards import TrainingStopped
from fedauc.reports.labels import labels
from fedauc.reports.listing import members_table, methods_table
from fedauc.reports.profile import profiled
from fedauc.reports.profile import table as spent_table
from fedauc.reports.progress import Bars
from fedauc.reports.summary import Line, Ranking, rank, summarize
from fedauc.reports.summary import compare as summarize_all
from fedauc.reports.tables import (
    caption,
    comparison,
    groups_text,
    markdown,
    order,
    pairs,
    ranking,
    ranking_markdown,
    run_facts,
)
from fedauc.reports.words import explained
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
app.add_typer(federation_commands.app, name="federation")


def start(application: typer.Typer = app, program: str = "fedauc", again: str = "") -> None:
    """Run a command line: bad input is one line and exit code 2, a run that cannot go on is exit code 3.

    `again` says how an interrupted command goes on, where that is not `fedauc resume`.
    """
    try:
        with join_process_group(), spoken():
            code = application(prog_name=program, standalone_mode=False)
    except USAGE as error:
        _fail(_usage(error), 2)
    except (ValueError, OSError) as error:
        _fail(f"error: {error}", 2)
    except TrainingStopped as stopped:
        _fail(str(stopped), 3)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    # Some releases of typer turn an interrupt into this code.
    if code == 130:
        again = again or AGAIN.get("".join(sys.argv[1:2]), "fedauc resume DIR").replace("DIR", _folder(sys.argv[1:]))
        _fail(f"interrupted; go on with: {again}", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _folder(words: list[str]) -> str:
    """The run's folder as it was typed; DIR where it was not."""
    apart = [part for word in words for part in (word.split("=", 1) if word.startswith("--out=") else [word])]
    named = [after for word, after in pairwise(apart) if word in ("resume", "--out")]
    return shlex.quote(named[-1]) if named else "DIR"


class Notes(logging.Handler):
    """Prints what the library itself has to say, such as why a model runs in the plain loop, on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """One note, folded to the width of the terminal; a federation's processes have logs of their own."""
        if record.name == "fedauc":
            Console(stderr=True).print(f"note: {record.getMessage()}", markup=False, highlight=False)


@contextmanager
def spoken() -> Iterator[None]:
    """Show notes as long as a command runs."""
    logger, handler = logging.getLogger("fedauc"), Notes()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def configurable(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every field of the configuration as an option; it receives them as `texts`."""
    made = options()
    names = {option.name: option.name.replace("-", "_").replace(".", "__") for option in made}

    @functools.wraps(command)
    def wrapper(**given: Any) -> None:
        texts = {name: given.pop(key) for name, key in names.items()}
        command(texts={name: text for name, text in texts.items() if text is not None}, **given)

    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "texts"]
    extra = []
    for option in made:
        kind = "name" if option.kind is None else describe(option.kind)
        flags = SHORT.get(option.name, [f"--{option.name}"])
        spec = typer.Option(
            *flags, metavar=kind, help=explained(option), rich_help_panel=option.panel, show_default=False
        )
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
ONE = f"A name from `fedauc list methods`; {DEFAULT} unless given."
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
@configurable
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
    built = build(method, Config.read(config) if config else None, texts)
    with rank_folder(out) as folder:
        made = Run.create(built, folder)
        with Bars() as bars:
            observer = bars.bar(built.recipe.method)
            spent = profiled(lambda: made.train_to_end(observer)) if profile else made.train_to_end(observer)
        _show_run(RunFolder.open(folder))
        if isinstance(spent, list):
            Console().print(spent_table(spent))


@app.command()
@configurable
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
    runs = _expand(methods_, seeds, texts, config)
    with rank_folder(out) as folder:
        _go(Comparison.create(folder, runs))


@app.command()
@configurable
def sweep(
    texts: dict[str, str],
    out: Annotated[Path | None, typer.Option("--out", help="The folder to make; not needed for --plan.")] = None,
    methods_: Annotated[
        str | None,
        typer.Option("--methods", "--method", metavar="a,b,...", help=f"{SOME}; {DEFAULT} unless given."),
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
    runs = _expand(methods_, seeds, texts, config, vary)
    if plan:
        Console().print(groups_text(plan_run_groups(runs, DataCache())), markup=False, highlight=False)
        return
    if out is None:
        raise ValueError("sweep lacks --out, the folder to make; --plan alone needs none")
    with rank_folder(out) as folder:
        _go(Comparison.create(folder, runs, sweep=True))


@app.command()
def resume(folder: Folder) -> None:
    """Go on with an interrupted run, comparison or sweep, from its last checkpoint, to the same records.

    Example: [bold]fedauc resume runs/first[/bold]
    """
    with rank_folder(folder) as mine:
        if Comparison.is_comparison(mine):
            _go(Comparison(mine))
            return
        run = Run.resume(mine)
        with Bars() as bars:
            run.train_to_end(bars.bar(run.config.recipe.method))
        _show_run(RunFolder.open(mine))


@app.command()
def show(folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print a run's final and best AUC with interval, rounds and bytes.

    Example: [bold]fedauc show runs/first --json[/bold]
    """
    if Comparison.is_comparison(folder):
        found = Comparison(folder)
        if as_json:
            print(json.dumps([{"setting": name} | summarize(each) for name, each in found.run_folders()], indent=2))
        elif found.sweep:
            _show_sweep(rank(found.run_folders(), found.seeds_per_setting()), labels(found.run_folders()))
        else:
            _show_comparison(summarize_all(found.run_folders()), labels(found.run_folders()))
    elif as_json:
        print(json.dumps(summarize(RunFolder.open(folder)), indent=2))
    else:
        _show_run(RunFolder.open(folder))


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


def _go(found: Comparison) -> None:
    names = _bar_names(list(found.read_configs()))
    with Bars() as bars:
        stopped = found.train_runs(lambda place: bars.bar(names[place]))
    (_report_sweep if found.sweep else _report_comparison)(found)
    for place, reason in stopped.items():
        print(f"{place}: {reason}", file=sys.stderr)
    if stopped:
        raise typer.Exit(3)


def _report_sweep(found: Comparison) -> None:
    ranked, told = rank(found.run_folders(), found.seeds_per_setting()), labels(found.run_folders())
    write_atomically(found.path / "table.md", ranking_markdown(ranked, told).encode())
    _show_sweep(ranked, told)


def _show_sweep(ranked: Ranking, told: list[str]) -> None:
    _show_labels(told)
    Console().print(ranking(ranked))
    Console().print(order(ranked))


def _report_comparison(found: Comparison) -> None:
    from fedauc.reports.curves import draw

    lines, told = summarize_all(found.run_folders()), labels(found.run_folders())
    draw(found.run_folders(), found.path / "curves.png")
    (found.path / "table.md").write_text(markdown(lines, told))
    _show_comparison(lines, told)
    Console().print(f"Curves: {found.path / 'curves.png'}", soft_wrap=True)


def _show_comparison(lines: list[Line], told: list[str]) -> None:
    _show_labels(told)
    Console().print(comparison(lines))
    if test := caption(lines):
        Console().print(test)


def _bar_names(places: list[str]) -> dict[str, str]:
    """Runs' names beside their bars: what they differ in. The seed comes before what may be cut off."""
    parts = {place: place.split("/") for place in places}
    seeds = len({part[-1] for part in parts.values()}) > 1
    methods = len({part[0] for part in parts.values()}) > 1
    return {
        place: " ".join(varied[-1:] * seeds + [method] * (methods or len(varied) == 1) + varied[:-1])
        for place, (method, *varied) in parts.items()
    }


def _show_labels(told: list[str]) -> None:
    for label in told:
        Console().print(label, markup=False, highlight=False)


def _show_run(folder: RunFolder) -> None:
    _show_labels(labels([(folder.path.name, folder)]))
    Console().print(pairs(run_facts(summarize(folder)) | {"folder": folder.path}))


def _expand(
    names: str | None, seeds: str, texts: dict[str, str], config: Path | None, vary: list[str] | None = None
) -> dict[str, Config]:
    """The runs that lists of methods and seeds and the options of a command line stand for."""
    if "seed" in texts:
        raise ValueError(f"seed is {texts['seed']}, but several runs take --seeds; use --seeds {texts['seed']}")
    base = Config.read(config) if config else None
    found = (base.recipe.method if base else DEFAULT) if names is None else names
    varied = read_varied(vary or [], {flag.removeprefix("--"): name for name, flags in SHORT.items() for flag in flags})
    return expand_sweep(read_list("methods", found), read_seeds(seeds), varied, texts, base)


def _usage(error: Any) -> str:
    """What is wrong with a command line, and where help is; nothing where help was printed already."""
    message, place = error.format_message().strip(), getattr(error, "ctx", None)
    if not message:
        return ""
    stop = "" if message[-1] in ".?!" else "."
    return f"error: {message}{stop} See `{place.command_path if place else 'fedauc COMMAND'} --help`."


def _fail(message: str, code: int) -> None:
    if message:
        print(" ".join(message.split()), file=sys.stderr)
    sys.exit(code)
