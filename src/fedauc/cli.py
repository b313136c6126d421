"""The shell face: run, compare, resume, list, show."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedauc.algorithms import methods
from fedauc.discovery import lookup
from fedauc.experiments.codec import families
from fedauc.experiments.comparison import Comparison
from fedauc.experiments.config import Config
from fedauc.experiments.folder import RunFolder
from fedauc.experiments.options import build, build_each, describe, options, parameters, shown
from fedauc.experiments.ranks import joined, own_folder
from fedauc.experiments.runner import Observer, Run
from fedauc.guards import TrainingStopped
from fedauc.reports.profile import profiled
from fedauc.reports.profile import table as spent_table
from fedauc.reports.progress import Bars
from fedauc.reports.summary import compare as summarize_all
from fedauc.reports.summary import summarize
from fedauc.reports.tables import comparison, markdown, pairs, size
from fedauc.version import VERSION

SHORT = {
    "participation.groups": ["--groups"],
    "participation.per-round": ["--per-round"],
    "objective.score": ["--score"],
    "step-size": ["--step-size", "--lr"],
}
"""Short names for what is set most often."""

KEYWORD = inspect.Parameter.KEYWORD_ONLY

USAGE: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""The base of every usage error, wherever the installed typer keeps it."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Federated AUC maximization for clients that take part in cycles.",
)


def start() -> None:
    """Run the command line: bad input is one line and exit code 2, a run that cannot go on is exit code 3."""
    try:
        with joined():
            code = app(standalone_mode=False)
    except USAGE as error:
        _fail(f"error: {error.format_message()} See `fedauc COMMAND --help`.", 2)
    except (ValueError, OSError) as error:
        _fail(f"error: {error}", 2)
    except TrainingStopped as stopped:
        _fail(str(stopped), 3)
    except KeyboardInterrupt:
        _fail("interrupted; go on with: fedauc resume DIR", 130)
    except typer.Abort:
        _fail("interrupted; go on with: fedauc resume DIR", 130)
    sys.exit(code if isinstance(code, int) else 0)


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
        spec = typer.Option(*flags, metavar=kind, help=option.help, rich_help_panel=option.panel, show_default=False)
        note = Annotated[str | None, spec]
        extra.append(inspect.Parameter(names[option.name], KEYWORD, default=None, annotation=note))
    keyword = [p.replace(kind=KEYWORD) for p in own]
    wrapper.__signature__ = inspect.Signature(keyword + extra)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in keyword + extra}
    return wrapper


Out = Annotated[Path, typer.Option("--out", help="The folder to make.", show_default=False)]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A JSON configuration to start from.")]
Folder = Annotated[Path, typer.Argument(help="A folder that run or compare made.", show_default=False)]


@app.command()
@configurable
def run(
    texts: dict[str, str],
    out: Out,
    method: Annotated[str | None, typer.Option("--method", help="A name from `fedauc list methods`.")] = None,
    config: ConfigFile = None,
    profile: Annotated[bool, typer.Option("--profile", help="Print where the time went.")] = False,
) -> None:
    """Train one method into a run folder.

    Example: [bold]fedauc run --data creditcard --method cycp-pairwise --cycles 30 --seed 0 --out runs/first[/bold]
    """
    built = build(method, Config.read(config) if config else None, texts)
    with own_folder(out) as folder:
        made = Run.create(built, folder)
        with Bars() as bars:
            observer = bars.bar(built.recipe.method)
            spent = profiled(lambda: made.go(observer)) if profile else made.go(observer)
        _show_run(RunFolder.open(folder))
        if isinstance(spent, list):
            Console().print(spent_table(spent))


@app.command()
@configurable
def compare(
    texts: dict[str, str],
    out: Out,
    methods_: Annotated[str, typer.Option("--methods", metavar="a,b,...", help="Names from `fedauc list methods`.")],
    seeds: Annotated[str, typer.Option("--seeds", metavar="int,...", help="Seeds; every method runs with each.")] = "0",
    config: ConfigFile = None,
) -> None:
    """Train several methods side by side, then print a table and draw the learning curves.

    Example: [bold]fedauc compare --methods cycp-fedavg,cycp-minimax,cycp-pairwise --cycles 30 --out runs/three[/bold]
    """
    base = Config.read(config) if config else None
    configs = build_each(_names("methods", methods_), base, texts)
    with own_folder(out) as folder:
        _go(Comparison.create(folder, configs, _seeds(seeds, texts)))


@app.command()
def resume(folder: Folder) -> None:
    """Go on with an interrupted run or comparison, from its last checkpoint, to the same records.

    Example: [bold]fedauc resume runs/first[/bold]
    """
    with own_folder(folder) as mine:
        if Comparison.is_one(mine):
            _go(Comparison(mine))
            return
        run = Run.resume(mine)
        with Bars() as bars:
            run.go(bars.bar(run.config.recipe.method))
        _show_run(RunFolder.open(mine))


@app.command()
def show(folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print a run's final and best AUC with interval, rounds and bytes.

    Example: [bold]fedauc show runs/first --json[/bold]
    """
    if Comparison.is_one(folder):
        found = Comparison(folder).folders()
        if as_json:
            print(json.dumps([summarize(each) for _, each in found], indent=2))
        else:
            Console().print(comparison(summarize_all(found)))
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
    Console().print(_methods() if kind == "method" else _members(kind))


@app.command()
def version() -> None:
    """Print the version.

    Example: [bold]fedauc version[/bold]
    """
    print(VERSION)


def _go(found: Comparison) -> None:
    from fedauc.reports.curves import draw

    with Bars() as bars:
        stopped = found.go(lambda place: _each(bars, place))
    lines = summarize_all(found.folders())
    draw(found.folders(), found.path / "curves.png")
    (found.path / "table.md").write_text(markdown(lines))
    console, picture = Console(), found.path / "curves.png"
    console.print(comparison(lines))
    test = f"p: paired DeLong test against {lines[0].method}. " if len(lines) > 1 else ""
    console.print(f"{test}Curves: {picture}", soft_wrap=True)
    for place, reason in stopped.items():
        print(f"{place}: {reason}", file=sys.stderr)
    if stopped:
        raise typer.Exit(3)


def _each(bars: Bars, place: str) -> Observer:
    method, _, seed = place.partition("/")
    return bars.bar(method if seed == "seed-0" else f"{method} {seed}")


def _show_run(folder: RunFolder) -> None:
    found = summarize(folder)
    if found["final"] is None:
        Console().print(pairs({"method": found["method"], "status": found["status"]}))
        return
    chosen = "validation AUC" if found["best_by"] == "validation_auc" else "test AUC, so not for reporting"
    rows = {
        "method": f"{found['method']}, seed {found['seed']}",
        "status": found["status"],
        "final": _quality(found["final"]),
        "best": f"{_quality(found['best'])} (by {chosen})",
        "rounds": f"{found['rounds']} ({found['visits']} client visits, {found['absences']} absences)",
        "traffic": f"{size(found['bytes_up'])} up, {size(found['bytes_down'])} down",
        "seconds": f"{found['seconds']:.1f}",
        "folder": folder.path,
    }
    Console().print(pairs(rows))


def _quality(found: dict[str, Any]) -> str:
    text = f"AUC {found['auc']:.4f}"
    if found["low"] is not None:
        text += f" [{found['low']:.4f}, {found['high']:.4f}], AP {found['average_precision']:.4f}"
    return f"{text}, round {found['round']}"


def _methods() -> Table:
    table = _table("method", "algorithm", "participation", "step", "reference")
    for method in methods().values():
        row = (method.algorithm.name, method.participation, f"{method.step_size:g}", method.reference)
        table.add_row(method.name, *row)
    return table


def _members(kind: str) -> Table:
    members = next(family.members for family in families() if family.kind == kind)
    table = _table("name", "parameters", "what")
    for name, member in members.items():
        made = ", ".join(f"{found.name}={shown(found.default)}" for found in parameters(member))
        table.add_row(name, made or "-", (member.__doc__ or "").split("\n")[0])
    return table


def _table(*headers: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def _names(what: str, text: str) -> list[str]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found or len(set(found)) < len(found):
        raise ValueError(f"{what} is {text!r}; it must list at least 1 name, each once")
    return found


def _seeds(text: str, texts: dict[str, str]) -> list[int]:
    if "seed" in texts:
        raise ValueError(f"seed is {texts['seed']}, but compare takes --seeds; use --seeds {texts['seed']}")
    try:
        return [int(seed) for seed in _names("seeds", text)]
    except ValueError as error:
        raise ValueError(f"seeds is {text!r}; it must list whole numbers, each once, such as 0,1,2") from error


def _fail(message: str, code: int) -> None:
    print(" ".join(message.split()), file=sys.stderr)
    sys.exit(code)
