"""The commands that train and show runs: run, compare, sweep, resume, show, list.

A command checks its options first and imports what needs torch only then, so that a mistake is reported at once.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from fedauc.cli.completion import complete_from
from fedauc.cli.lazy_import import finish_imports
from fedauc.version import VERSION

if TYPE_CHECKING:
    from fedauc.experiments.comparison import Comparison
    from fedauc.experiments.config import Config
    from fedauc.experiments.runner import Run

Opened = TypeVar("Opened")

SHORT_NAMES = {
    "participation.groups": ["--groups"],
    "participation.per-round": ["--per-round"],
    "objective.score": ["--score"],
    "learning-rate": ["--learning-rate", "--lr"],
}
"""Shorter names for the options that are used most often."""

LISTS = {
    "methods": "method",
    "objectives": "objective",
    "participation": "participation",
    "data": "data",
    "models": "model",
    "partitions": "partition",
    "algorithms": "algorithm",
    "stages": "stages",
    "wrappers": "wrappers",
    "transforms": "transforms",
    "means": "mean",
    "server-optimizers": "server-optimizer",
    "metrics": "metric",
    "callbacks": "callbacks",
    "engines": "engine",
    "presets": "preset",
}
"""What `fedauc list` knows, and the option of `fedauc run` that takes these names."""

OutFolder = Annotated[Path, typer.Option("--out", help="The folder to make.", show_default=False)]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A JSON configuration to start from.")]
RunsFolder = Annotated[Path, typer.Argument(help="A folder that run, compare, sweep or tune made.", show_default=False)]
Seeds = Annotated[str, typer.Option("--seeds", metavar="int,...", help="Seeds; everything runs with each.")]
ONE_METHOD = "A name from `fedauc list methods`; cycp-pairwise unless given."
SEVERAL_METHODS = "Names from `fedauc list methods`; cycp-pairwise unless given."


def complete_method(incomplete: str) -> list[str]:
    """The methods that begin so."""
    from fedauc.algorithms import find_methods

    return complete_from(find_methods())(incomplete)


def complete_methods(incomplete: str) -> list[str]:
    """A list of methods with the last one completed."""
    from fedauc.algorithms import find_methods

    return complete_from(find_methods(), several=True)(incomplete)


def add_config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every field of the configuration as an option; it receives the given ones as `texts`."""
    from fedauc.experiments.options import MemberName, describe_type, list_options

    keyword = inspect.Parameter.KEYWORD_ONLY
    options = list_options()
    argument_names = {option.name: option.name.replace("-", "_").replace(".", "__") for option in options}

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> None:
        values = {name: arguments.pop(argument) for name, argument in argument_names.items()}
        texts = {name: text for name, text in values.items() if text is not None}
        with spelling_options({option.name: option.path[-1] for option in options if option.name in texts}):
            command(texts=texts, **arguments)

    signature = inspect.signature(command, eval_str=True)
    parameters = [
        parameter.replace(kind=keyword) for parameter in signature.parameters.values() if parameter.name != "texts"
    ]
    for option in options:
        declaration = typer.Option(
            *option_flags(option.name),
            metavar=describe_type(option.type),
            help=option.help,
            rich_help_panel=option.panel,
            show_default=False,
            autocompletion=complete_from(option.choices, several=option.type == tuple[MemberName, ...]),
        )
        annotation = Annotated[str | None, declaration]
        parameters.append(inspect.Parameter(argument_names[option.name], keyword, default=None, annotation=annotation))
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def option_flags(name: str) -> list[str]:
    """How an option is written on the command line."""
    return SHORT_NAMES.get(name, [f"--{name}"])


@contextmanager
def spelling_options(given: Mapping[str, str]) -> Iterator[None]:
    """Make errors name options as they are written on the command line; `given` maps their names to their fields.

    >>> with spelling_options({"participation.per-round": "per_round"}):
    ...     raise ValueError("per_round is 0; it must be a whole number of at least 1: raise per_round")
    Traceback (most recent call last):
    ...
    ValueError: --per-round is 0; it must be a whole number of at least 1: raise --per-round
    """
    try:
        yield
    except ValueError as error:
        message = str(error)
        for option, field in given.items():
            # Two options may set fields of one name, which the message does not tell apart.
            is_unique = list(given.values()).count(field) == 1
            names = f"(?:{re.escape(option)}|{re.escape(field)})" if is_unique else re.escape(option)
            # Only where the word stands for the option: its value follows, or what to do with it precedes.
            pattern = (
                rf"(?<![\w.-]){names}(?= is )|(?<=\b(?:raise|lower|leave) ){names}(?![\w-])|(?<=\bgive ){names}(?= as )"
            )
            message = re.sub(pattern, option_flags(option)[0], message)
        for option, flags in SHORT_NAMES.items():
            message = message.replace(f"--{option}", flags[0])
        if message == str(error):
            raise
        raise ValueError(message) from error


def run(
    texts: dict[str, str],
    out: OutFolder,
    method: Annotated[str | None, typer.Option("--method", help=ONE_METHOD, autocompletion=complete_method)] = None,
    config: ConfigFile = None,
    profile: Annotated[bool, typer.Option("--profile", help="Print where the time went.")] = False,
) -> None:
    """Train one method into a run folder. The sites are simulated: all rows are read in this process.

    To train across machines instead, see [bold]fedauc federation --help[/bold].

    Example: [bold]fedauc run --data creditcard --method cycp-pairwise --cycles 30 --seed 0 --out runs/first[/bold]
    """
    from fedauc.experiments.config import Config
    from fedauc.experiments.options import build_config

    built = build_config(method, Config.read(config) if config else None, texts)
    finish_imports()

    from fedauc.experiments.ranks import rank_folder
    from fedauc.experiments.runner import Run

    with rank_folder(out) as folder:
        _train_run(lambda: Run.create(built, folder), profile)


def compare(
    texts: dict[str, str],
    out: OutFolder,
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            metavar="a,b,...",
            help="Names from `fedauc list methods`.",
            show_default=False,
            autocompletion=complete_methods,
        ),
    ],
    seeds: Seeds = "0",
    config: ConfigFile = None,
) -> None:
    """Train several methods side by side on simulated sites, then print a table and draw the learning curves.

    Example: [bold]fedauc compare --methods cycp-fedavg,cycp-minimax,cycp-pairwise --cycles 30 --out runs/three[/bold]
    """
    runs = _expand_runs(methods, seeds, texts, config)
    finish_imports()

    from fedauc.experiments.comparison import Comparison
    from fedauc.experiments.ranks import rank_folder

    with rank_folder(out) as folder:
        _train_comparison(lambda: Comparison.create(folder, runs))


def sweep(
    texts: dict[str, str],
    out: Annotated[Path | None, typer.Option("--out", help="The folder to make; not needed for --plan.")] = None,
    methods: Annotated[
        str | None,
        typer.Option("--methods", "--method", metavar="a,b,...", help=SEVERAL_METHODS, autocompletion=complete_methods),
    ] = None,
    vary: Annotated[
        list[str] | None, typer.Option("--vary", metavar="option=a,b,...", help="Values of an option of `fedauc run`.")
    ] = None,
    seeds: Seeds = "0",
    config: ConfigFile = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only print what would run, and which runs share a graph.")
    ] = False,
) -> None:
    """Train every combination of methods, varied options and seeds, and rank the settings by validation AUC.

    With the graphed engine, runs that differ in nothing but seeds, learning rates or data share one CUDA graph.

    Example: [bold]fedauc sweep --method cycp-pairwise --vary lr=0.03,0.1 --seeds 0,1,2 --out runs/sweep[/bold]
    """
    runs = _expand_runs(methods, seeds, texts, config, vary)
    if out is None and not plan:
        raise ValueError("sweep lacks --out, the folder to make; --plan alone needs none")
    finish_imports()

    from fedauc.experiments.comparison import Comparison
    from fedauc.experiments.ranks import rank_folder
    from fedauc.experiments.run_group import plan_run_groups
    from fedauc.experiments.runner import DataCache
    from fedauc.reports.tables import describe_groups

    if out is None or plan:
        print(describe_groups(plan_run_groups(runs, DataCache())))
        return
    with rank_folder(out) as folder:
        _train_comparison(lambda: Comparison.create(folder, runs, sweep=True))


def resume(folder: RunsFolder) -> None:
    """Go on with an interrupted run, comparison, sweep or tuning, from its last checkpoint, to the same records.

    Example: [bold]fedauc resume runs/first[/bold]
    """
    from fedauc.experiments.comparison import Comparison
    from fedauc.experiments.folder import RunFolder
    from fedauc.experiments.ranks import rank_folder
    from fedauc.experiments.runner import Run
    from fedauc.experiments.tuning import Tuning

    if Tuning.is_tuning(folder):
        from fedauc.cli.tuning import train_tuning

        train_tuning(lambda: _open_folder(folder, Tuning))
        return
    with rank_folder(folder) as ranks_folder:
        if Comparison.is_comparison(ranks_folder):
            _train_comparison(lambda: _open_folder(ranks_folder, Comparison))
        else:
            if RunFolder.open(ranks_folder).done:
                logging.getLogger("fedauc").info("%s is finished already; nothing is left to train", folder)
            _train_run(lambda: _open_folder(ranks_folder, Run.resume))


def show(
    folder: RunsFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    sites: Annotated[bool, typer.Option("--sites", help="Print the AUC of every site of a run.")] = False,
) -> None:
    """Print a run's final and best AUC with interval, rounds, bytes, and the sites with the lowest and highest AUC.

    Example: [bold]fedauc show runs/first --json[/bold]
    """
    from fedauc.files import naming_damage

    with naming_damage(folder):
        _show_folder(folder, as_json, sites)


def _show_folder(folder: Path, as_json: bool, sites: bool) -> None:
    """Print what `show` prints."""
    from fedauc.experiments.comparison import Comparison
    from fedauc.experiments.folder import RunFolder
    from fedauc.experiments.tuning import Tuning
    from fedauc.reports.summary import summarize_run
    from fedauc.reports.tables import print_comparison, print_run
    from fedauc.reports.trials import print_trials

    if sites and (Tuning.is_tuning(folder) or Comparison.is_comparison(folder)):
        raise ValueError(f"--sites is given, but {folder} holds several runs; show one of their folders")
    if Tuning.is_tuning(folder):
        tuning = Tuning(folder)
        if as_json:
            print(json.dumps([trial._asdict() for trial in tuning.list_trials()], indent=2))
        else:
            print_trials(tuning)
        return
    if not Comparison.is_comparison(folder):
        if as_json:
            print(json.dumps(summarize_run(RunFolder.open(folder)), indent=2))
        else:
            print_run(RunFolder.open(folder), all_sites=sites)
        return
    comparison = Comparison(folder)
    if as_json:
        runs = [{"setting": setting} | summarize_run(run_folder) for setting, run_folder in comparison.run_folders()]
        print(json.dumps(runs, indent=2))
    else:
        print_comparison(comparison)


def list_members(
    what: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(LISTS)}; the methods unless given.",
            show_default=False,
            autocompletion=complete_from(LISTS),
        ),
    ] = "",
) -> None:
    """List what a configuration can name, with parameters and defaults.

    Example: [bold]fedauc list objectives[/bold]
    """
    from rich.console import Console
    from rich.table import Column, Table

    from fedauc.algorithms import find_methods
    from fedauc.discovery import lookup
    from fedauc.experiments.options import format_default, list_parameters
    from fedauc.experiments.presets import PRESETS
    from fedauc.experiments.recipe import ENGINES
    from fedauc.experiments.registration import list_kinds
    from fedauc.plugins import plugin_of_class, plugin_of_method

    kind = lookup("list", what or "methods", LISTS)
    rows: list[tuple[str, ...]] = []
    if kind == "method":
        headers = ["method", "algorithm", "participation", "lr", "reference"]
        rows = [
            (name, method.algorithm.name, method.participation, f"{method.learning_rate:g}", method.reference)
            for name, method in sorted(find_methods().items())
        ]
        origins = [plugin_of_method(row[0]) for row in rows]
    elif kind == "engine":
        headers = ["name", "what"]
        rows = list(ENGINES.items())
        origins = []
    elif kind == "preset":
        headers = ["name", "methods", "what"]
        rows = [(name, ", ".join(preset.settings), preset.about) for name, preset in PRESETS.items()]
        origins = []
    else:
        headers = ["name", "parameters", "what"]
        members = sorted(list_kinds()[kind].items())
        origins = [plugin_of_class(member) or "" for _, member in members]
        for name, member in members:
            parameters = [
                f"{parameter.name}={format_default(parameter.default)}" for parameter in list_parameters(member)
            ]
            rows.append((name, ", ".join(parameters) or "-", (member.__doc__ or "").split("\n")[0]))
    if any(origins):
        headers.append("from")
        rows = [(*row, origin or "fedauc") for row, origin in zip(rows, origins, strict=True)]
    # A name is copied into a command, so it stays on one line.
    columns = [Column(header, overflow="fold", no_wrap=position == 0) for position, header in enumerate(headers)]
    table = Table(*columns, box=None, padding=(0, 1), pad_edge=False)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if not what:
        Console().print(f"\nThese are the methods. `fedauc list NAME` shows others: {', '.join(list(LISTS)[1:])}.")


def print_version() -> None:
    """Print the version.

    Example: [bold]fedauc version[/bold]
    """
    print(VERSION)


COMMANDS: dict[str, Callable[..., None]] = {
    "run": run,
    "compare": compare,
    "sweep": sweep,
    "resume": resume,
    "show": show,
    "list": list_members,
    "version": print_version,
}
"""The commands of this module, in the order in which help lists them."""


def name_bars(runs: list[str]) -> dict[str, str]:
    """Names of runs beside their bars: what they differ in. The seed comes before what may be cut off."""
    parts = {run: run.split("/") for run in runs}
    seeds = len({part[-1] for part in parts.values()}) > 1
    methods = len({part[0] for part in parts.values()}) > 1
    return {
        run: " ".join(varied[-1:] * seeds + [method] * (methods or len(varied) == 1) + varied[:-1])
        for run, (method, *varied) in parts.items()
    }


def _open_folder(folder: Path, open_folder: Callable[[Path], Opened]) -> Opened:
    """What a folder holds, ready to go on; a damaged file in it is a one-line error."""
    from fedauc.files import naming_damage

    with naming_damage(folder):
        return open_folder(folder)


def _train_run(open_run: Callable[[], Run], profile: bool = False) -> None:
    """Load a run and train it to its end under a progress bar, and print its result."""
    from rich.console import Console

    from fedauc.engines.loop import ONE_THREAD
    from fedauc.experiments.folder import RunFolder
    from fedauc.reports.profile import profile_work, shares_table
    from fedauc.reports.progress import open_progress
    from fedauc.reports.tables import print_run

    shares = None
    with open_progress() as bars:
        run = open_run()
        observer = bars.add_bar(run.config.recipe.method)
        if profile:
            token = ONE_THREAD.set(True)
            try:
                shares = profile_work(lambda: run.train_to_end(observer))
            finally:
                ONE_THREAD.reset(token)
        else:
            run.train_to_end(observer)
    _open_folder(run.folder.path, lambda path: print_run(RunFolder.open(path)))
    if shares is not None:
        Console().print(shares_table(shares))


def _train_comparison(open_comparison: Callable[[], Comparison]) -> None:
    """Train what has not run yet, print and write the tables, and end with code 3 if a run had to stop."""
    from fedauc.reports.progress import open_progress
    from fedauc.reports.tables import write_comparison

    with open_progress() as bars:
        comparison = open_comparison()
        names = name_bars(list(comparison.read_configs()))
        stopped = comparison.train_runs(lambda name: bars.add_bar(names[name]))
    write_comparison(comparison)
    for name, reason in stopped.items():
        print(f"{name}: {reason}", file=sys.stderr)
    if stopped:
        raise typer.Exit(3)


def _expand_runs(
    methods: str | None, seeds: str, texts: dict[str, str], file: Path | None, vary: list[str] | None = None
) -> dict[str, Config]:
    """The configurations of all runs that a command line asks for, by their paths in the folder."""
    from fedauc.experiments.config import Config
    from fedauc.experiments.options import DEFAULT_METHOD, list_options
    from fedauc.experiments.sweep import expand_sweep, read_list, read_seeds, read_varied

    if "seed" in texts:
        raise ValueError(f"seed is {texts['seed']}, but several runs take --seeds; use --seeds {texts['seed']}")
    base = Config.read(file) if file else None
    if methods is None:
        methods = base.recipe.method if base else DEFAULT_METHOD
    full_names = {flag.removeprefix("--"): name for name, flags in SHORT_NAMES.items() for flag in flags}
    varied = read_varied(vary or [], full_names)
    fields = {option.name: option.path[-1] for option in list_options()}
    with spelling_options({name: fields[name] for name in (*texts, *varied) if name in fields}):
        return expand_sweep(read_list("methods", methods), read_seeds(seeds), varied, texts, base)
