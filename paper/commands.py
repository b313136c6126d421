"""The shell face of the paper's experiments: list, run (or a table's own name), report."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedauc.data.io.stored import MissingFiles, is_writable
from fedauc.discovery import lookup
from fedauc.experiments.checkpoint import write_atomically
from fedauc.experiments.sweep import read_list, read_seeds
from fedauc.reports.progress import ProgressBars
from paper.builder import TableBuilder, list_wanted
from paper.figures import write_figure
from paper.records import RecordStore
from paper.report import FIGURES, build_page, list_specs
from paper.run_queue import OutOfTime, RunQueue
from paper.scales import SCALES, Scale
from paper.table_specs import PUBLISHED, TABLES, TableSpec
from paper.terminal import print_counts, print_tables
from paper.tuning import TuningPlan, tune_rows

HOME = "FEDAUC_RECORDS"
"""The environment variable that names the folder of records; `paper/records` by default."""

WORK = Path("runs") / "paper"
"""Runs that are not finished yet."""

app = typer.Typer(no_args_is_help=True, help="The paper's tables and figures.", rich_markup_mode="rich")

ScaleName = Annotated[str, typer.Option("--scale", help="paper, or smoke: minutes on drawn rows.")]
Columns = Annotated[str, typer.Option("--columns", metavar="a,b,...", help="Columns; the usual ones by default.")]
Rows = Annotated[str, typer.Option("--methods", metavar="a,b,...", help="Rows; every one by default.")]
Seeds = Annotated[str, typer.Option("--seeds", metavar="int,...", help="Seeds, where a column has none of its own.")]
Minutes = Annotated[float, typer.Option("--budget-minutes", help="Stop after so long; go on by the same command.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Grid = Annotated[
    str,
    typer.Option(
        "--tuning",
        metavar="grid[:cycles]",
        help="steps, wide, wider, fine, long, full, lower or paper, and cycles per row (120, for full two whole runs, "
        "for lower three), or none, where nothing was chosen yet; by default what was chosen before.",
    ),
]


@app.command("list")
def list_(scale: ScaleName = "paper") -> None:
    """List the tables and figures with their columns.

    Example: [bold]python -m paper list[/bold]
    """
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for header in ("name", "what", "columns"):
        table.add_column(header, overflow="fold")
    for line in list_specs(lookup("scale", scale, SCALES)):
        table.add_row(*line)
    table.add_row("table7", "Table 7: data statistics", ", ".join(PUBLISHED))
    Console().print(table)


@app.command()
def report(
    out: Annotated[
        Path | None, typer.Option("--out", help="The Markdown file; docs/results.md, or docs/smoke.md, by default.")
    ] = None,
    tables: Annotated[str, typer.Option("--tables", metavar="a,b,...", help="Tables; every one by default.")] = "",
    scale: ScaleName = "paper",
    seeds: Seeds = "0,1,2",
) -> None:
    """Write a page of every table, and its figures beside it, from the records alone; nothing runs.

    Example: [bold]python -m paper report --out report.md[/bold]
    """
    names, store = _names("tables", tables) or list(TABLES), _filled()
    _runnable(names)
    found = lookup("scale", scale, SCALES)
    out = out or Path("docs") / ("results.md" if found.published else f"{scale}.md")
    page = build_page(store, found, read_seeds(seeds), names)
    if not page.has_runs:
        raise ValueError(
            f"no run of {', '.join(names)} at scale {scale} has finished in {store.path}: {out} is as it was"
        )
    for name, draw in page.figures.items():
        write_figure(draw(), out.parent / FIGURES / name)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page.text.encode())
    figures = f"{len(page.figures)} figure{'s' * (len(page.figures) > 1)}"
    print(f"wrote {out}" + (f" and {figures} beside it" if page.figures else ""))


@app.command()
def table7(columns: Columns = "", scale: ScaleName = "paper") -> None:
    """Count positives and negatives beside the paper's Table 7; nothing runs.

    Example: [bold]python -m paper table7 --columns cifar10[/bold]
    """
    found = lookup("scale", scale, SCALES)
    names = _names("columns", columns) or list(PUBLISHED)
    for name in names:
        lookup("column of table7", name, found.datasets)
    print_counts(found, names)


@app.command()
def run(
    names: Annotated[list[str], typer.Argument(help="Names from `python -m paper list`.")],
    columns: Columns = "",
    methods: Rows = "",
    seeds: Seeds = "0,1,2",
    budget_minutes: Minutes = float("inf"),
    device: Device = "cpu",
    scale: ScaleName = "paper",
    tuning: Grid = "",
) -> None:
    """Run several tables, whose runs then share graphs; what has a record is not run again.

    Example: [bold]python -m paper run table1 table2 --columns cifar10,cifar100 --device cuda[/bold]
    """
    if not budget_minutes > 0:
        raise ValueError(f"budget-minutes is {budget_minutes:g}; it must be above 0: leave it out to set no limit")
    found, store = lookup("scale", scale, SCALES), _store()
    sheets = _sheets(names, found, columns, methods)
    builder = TableBuilder(store, found, read_seeds(seeds))
    plan = TuningPlan.parse(tuning) if tuning else None
    late, absent = False, ""
    deadline = time.monotonic() + 60 * budget_minutes
    if not is_writable(store.path):
        remedy = f"name another folder for records in {HOME}, or look at these with `python -m paper show`"
        raise ValueError(f"{store.path} cannot be written: {remedy}")
    with ProgressBars() as bars, RunQueue(store, WORK, device, bars.add_bar, deadline) as shop:
        try:
            tune_rows(sheets, found, shop, plan)
            for tested in (True, False):
                shop.run_missing(list_wanted(sheets, builder, tested), tested)
        except OutOfTime:
            late = True
        except MissingFiles as error:
            absent = str(error)
    print_tables(sheets, builder)
    if absent:
        raise ValueError(f"{absent}; or name columns whose data is there: --columns")
    if late:
        print(f"stopped after {budget_minutes:g} minutes; go on by the same command")


@app.command("show")
def show_(
    names: Annotated[list[str], typer.Argument(help="Names from `python -m paper list`.")],
    columns: Columns = "",
    methods: Rows = "",
    seeds: Seeds = "0,1,2",
    scale: ScaleName = "paper",
) -> None:
    """Print tables from the records alone; nothing runs.

    Example: [bold]python -m paper show table1 --columns cifar10,cifar100[/bold]
    """
    found, store = lookup("scale", scale, SCALES), _filled()
    print_tables(_sheets(names, found, columns, methods), TableBuilder(store, found, read_seeds(seeds)))


def _sheets(names: Sequence[str], scale: Scale, columns: str, methods: str) -> list[TableSpec]:
    _runnable(names)
    made = [lookup("table", name, TABLES)(scale) for name in names]
    return [sheet.select(_names("columns", columns), _names("methods", methods)) for sheet in made]


def _runnable(names: Sequence[str]) -> None:
    if "table7" in names:
        raise ValueError("table7 is counted, not run: use `python -m paper table7`")


def _shortcut(name: str) -> Callable[..., None]:
    """`python -m paper table1` for `python -m paper run table1`."""

    def command(**given: Any) -> None:
        run([name], **given)

    own = [each for each in inspect.signature(run, eval_str=True).parameters.values() if each.name != "names"]
    command.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in own}
    # A terminal breaks the lines itself, wherever they are broken here.
    about = "\n\n".join(" ".join(part.split()) for part in (inspect.getdoc(TABLES[name]) or "").split("\n\n"))
    command.__doc__ = f"{about}\n\nExample: [bold]python -m paper {name} --scale smoke[/bold]"
    return command


for _name in TABLES:
    app.command(_name)(_shortcut(_name))


def _store() -> RecordStore:
    return RecordStore(Path(os.environ.get(HOME) or "paper/records"))


def _filled() -> RecordStore:
    """Where there is something to show."""
    store = _store()
    if not store.has_records:
        raise ValueError(f"{store.path} has no records: name their folder in {HOME}, or run a table first")
    return store


def _names(what: str, text: str) -> list[str]:
    return read_list(what, text) if text else []
