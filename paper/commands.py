"""The commands of `python -m paper`: list, run (or a table's own name), show, table7, report."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedauc.data.io.stored import MissingFiles, is_writable
from fedauc.discovery import lookup
from fedauc.experiments.sweep import read_list, read_seeds
from fedauc.files import write_atomically
from fedauc.reports.progress import ProgressBars
from paper.figures import write_figure
from paper.records import RecordStore
from paper.report import Report
from paper.run_queue import OutOfTime, RunQueue
from paper.scales import SCALES, Scale
from paper.table_specs import PUBLISHED, TABLES, Row, TableSpec, build_tables, describe_table, list_cells
from paper.tables import TableBuilder
from paper.terminal import make_rich_table, print_counts, print_tables
from paper.tuning import TuningPlan, tune_rows

RECORDS_VARIABLE = "FEDAUC_RECORDS"
"""The environment variable that names the folder of records; `paper/records` by default."""

WORK_FOLDER = Path("runs") / "paper"
"""The folder of unfinished runs."""

app = typer.Typer(no_args_is_help=True, help="The paper's tables and figures.", rich_markup_mode="rich")

Names = Annotated[list[str], typer.Argument(help="Names from `python -m paper list`.")]
ScaleName = Annotated[str, typer.Option("--scale", help="paper, or smoke: minutes on synthetic rows.")]
Columns = Annotated[
    str, typer.Option("--columns", metavar="a,b,...", help="Columns; the default ones if none is named.")
]
Rows = Annotated[str, typer.Option("--methods", metavar="a,b,...", help="Rows; every row by default.")]
MoreRows = Annotated[
    list[str] | None,
    typer.Option("--row", metavar="name=method,option=value,...", help="One more row, such as your own method."),
]
Seeds = Annotated[str, typer.Option("--seeds", metavar="int,...", help="Seeds, where a column has none of its own.")]
Minutes = Annotated[float, typer.Option("--budget-minutes", help="Stop after so long; the same command continues.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Grid = Annotated[
    str,
    typer.Option(
        "--tuning",
        metavar="grid[:cycles]",
        help="steps, wide, wider, fine, long, full, lower, paper or none, and cycles per row (120 by default; two full "
        "runs for full, three for lower). By default, earlier choices stay.",
    ),
]


@app.command("list")
def list_tables(scale: ScaleName = "paper") -> None:
    """List the tables and figures with their columns.

    Example: [bold]python -m paper list[/bold]
    """
    table = make_rich_table("name", "what", "columns")
    for spec in build_tables(lookup("scale", scale, SCALES)).values():
        table.add_row(spec.name, spec.title, ", ".join(column.name for column in spec.columns))
    table.add_row("table7", "Table 7: data statistics", ", ".join(PUBLISHED))
    Console().print(table)


@app.command("report")
def write_report(
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
    names, store = _split_names("tables", tables) or list(TABLES), _open_records()
    _refuse_table7(names)
    chosen_scale = lookup("scale", scale, SCALES)
    out = out or Path("docs") / ("results.md" if chosen_scale.published else f"{scale}.md")
    report = Report(store, chosen_scale, read_seeds(seeds), names)
    if not report.tables:
        raise ValueError(
            f"no run of {', '.join(names)} at scale {scale} has finished in {store.path}: {out} is as it was"
        )
    for path, draw in report.figures.items():
        write_figure(draw(), out.parent / path)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, report.text.encode())
    figures = f"{len(report.figures)} figure{'s' * (len(report.figures) > 1)}"
    print(f"wrote {out}" + (f" and {figures} beside it" if report.figures else ""))


@app.command("table7")
def count_classes(columns: Columns = "", scale: ScaleName = "paper") -> None:
    """Count positives and negatives beside the paper's Table 7; nothing runs.

    Example: [bold]python -m paper table7 --columns cifar10[/bold]
    """
    chosen_scale = lookup("scale", scale, SCALES)
    names = _split_names("columns", columns) or list(PUBLISHED)
    for name in names:
        lookup("column of table7", name, chosen_scale.datasets)
    print_counts(chosen_scale, names)


@app.command("run")
def run_tables(
    names: Names,
    columns: Columns = "",
    methods: Rows = "",
    seeds: Seeds = "0,1,2",
    budget_minutes: Minutes = float("inf"),
    device: Device = "cpu",
    scale: ScaleName = "paper",
    tuning: Grid = "",
    row: MoreRows = None,
) -> None:
    """Run several tables, whose runs then share graphs; runs that have a record are not repeated.

    Example: [bold]python -m paper run table1 table2 --columns cifar10,cifar100 --device cuda[/bold]
    """
    if not budget_minutes > 0:
        raise ValueError(f"budget-minutes is {budget_minutes:g}; it must be above 0: leave it out to set no limit")
    chosen_scale, store = lookup("scale", scale, SCALES), _open_records(may_be_empty=True)
    tables = _build_specs(names, chosen_scale, columns, methods, row)
    builder = TableBuilder(store, chosen_scale, read_seeds(seeds))
    plan = TuningPlan.parse(tuning, chosen_scale) if tuning else None
    is_late, missing_files = False, ""
    deadline = time.monotonic() + 60 * budget_minutes
    if not is_writable(store.path):
        remedy = f"name another folder for records in {RECORDS_VARIABLE}, or look at these with `python -m paper show`"
        raise ValueError(f"{store.path} cannot be written: {remedy}")
    with ProgressBars() as bars, RunQueue(store, WORK_FOLDER, device, bars.add_bar, deadline) as queue:
        try:
            tune_rows(tables, builder.choices, queue, plan)
            for tested in (True, False):
                cells = [cell for table in tables for cell in list_cells(table) if cell.column.tested == tested]
                cases = (case for cell in cells for case in builder.list_configs(cell))
                queue.run_missing((config for case in cases for config in case), tested)
        except OutOfTime:
            is_late = True
        except MissingFiles as error:
            missing_files = str(error)
    print_tables(tables, builder)
    if missing_files:
        raise ValueError(f"{missing_files}; or name columns whose data is there: --columns")
    if is_late:
        print(f"stopped after {budget_minutes:g} minutes; go on by the same command")


@app.command("show")
def show_tables(
    names: Names,
    columns: Columns = "",
    methods: Rows = "",
    seeds: Seeds = "0,1,2",
    scale: ScaleName = "paper",
    row: MoreRows = None,
) -> None:
    """Print tables from the records alone; nothing runs.

    Example: [bold]python -m paper show table1 --columns cifar10,cifar100[/bold]
    """
    chosen_scale, store = lookup("scale", scale, SCALES), _open_records()
    tables = _build_specs(names, chosen_scale, columns, methods, row)
    print_tables(tables, TableBuilder(store, chosen_scale, read_seeds(seeds)))


def _build_specs(
    names: Sequence[str], scale: Scale, columns: str, methods: str, more_rows: Sequence[str] | None
) -> list[TableSpec]:
    _refuse_table7(names)
    tables = [lookup("table", name, build_tables(scale)) for name in names]
    rows = [Row.parse(text) for text in more_rows or ()]
    for table in tables:
        table.add_rows(rows)
    selected = [table.select(_split_names("columns", columns), _split_names("methods", methods)) for table in tables]
    return [table.add_rows(rows) for table in selected]


def _refuse_table7(names: Sequence[str]) -> None:
    if "table7" in names:
        raise ValueError("table7 is counted, not run: use `python -m paper table7`")


def _table_command(name: str) -> Callable[..., None]:
    """`python -m paper table1` for `python -m paper run table1`."""

    def command(**options: Any) -> None:
        run_tables([name], **options)

    signature = inspect.signature(run_tables, eval_str=True)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "names"]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = f"{describe_table(name)}\n\nExample: [bold]python -m paper {name} --scale smoke[/bold]"
    return command


for _name in TABLES:
    app.command(_name)(_table_command(_name))


def _open_records(may_be_empty: bool = False) -> RecordStore:
    store = RecordStore(Path(os.environ.get(RECORDS_VARIABLE) or "paper/records"))
    if not (store.has_records or may_be_empty):
        raise ValueError(f"{store.path} has no records: name their folder in {RECORDS_VARIABLE}, or run a table first")
    return store


def _split_names(option: str, text: str) -> list[str]:
    return read_list(option, text) if text else []
