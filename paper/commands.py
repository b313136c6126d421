"""The commands of `python -m paper`: list, missing, run (or a table's own name), show, merge, table7 and report."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.console import Console
from rich.table import Table as RichTable

from fedauc.data import find_datasets
from fedauc.data.io.stored import MissingFiles, is_writable
from fedauc.data.statistics import PAPER_COUNTS, count_classes
from fedauc.discovery import lookup
from fedauc.experiments.config import Config
from fedauc.experiments.sweep import read_list, read_seeds
from fedauc.files import write_atomically
from fedauc.reports.caveats import caveat_sentence
from fedauc.reports.progress import ProgressBars
from paper.figures import collect_panels, draw_curves, write_figure
from paper.records import RecordStore
from paper.report import Report
from paper.run_queue import OutOfTime, RunQueue
from paper.scales import SCALES, Scale
from paper.table_specs import PUBLISHED, TABLES, CellSpec, Row, TableSpec, build_tables, describe_table, list_cells
from paper.tables import (
    NEARLY,
    ROUNDS_LEGEND,
    SMOKE_CAVEAT,
    Table,
    TableBuilder,
    describe_aucs,
    list_borrowed,
    list_data_caveats,
    make_frame,
    make_number_frame,
    make_rounds_frame,
)
from paper.tuning import ChoiceStore, TuningJob, TuningPlan, tune_rows

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
    table = _make_rich_table("name", "what", "columns")
    for spec in build_tables(lookup("scale", scale, SCALES)).values():
        table.add_row(spec.name, spec.title, ", ".join(column.name for column in spec.columns))
    table.add_row("table7", "Table 7: data statistics", ", ".join(PUBLISHED))
    Console().print(table)


@app.command("missing")
def list_missing(
    names: Annotated[list[str] | None, typer.Argument(help="Tables; every one by default.", show_default=False)] = None,
    columns: Columns = "",
    methods: Rows = "",
    seeds: Seeds = "0,1,2",
    scale: ScaleName = "paper",
) -> None:
    """List the runs that tables still need, with the hours that they take at the pace of the recorded runs.

    A run that several tables need is counted in the first one. Rows without chosen settings are counted as tuning jobs,
    whose runs come on top.

    Example: [bold]python -m paper missing table3 table8[/bold]
    """
    chosen_scale, store = lookup("scale", scale, SCALES), _open_records()
    builder = TableBuilder(store, chosen_scale, read_seeds(seeds))
    table, counted, hours = (
        _make_rich_table("table", "column", "runs", "missing", "to tune", "hours"),
        set[Config](),
        0.0,
    )
    for spec in _select_specs(names or list(TABLES), chosen_scale, columns, methods, ()):
        every_column = spec.columns if columns else build_tables(chosen_scale)[spec.name].columns
        for column in every_column:
            cells = [CellSpec(row, column) for row in spec.rows]
            runs = {config for cell in cells for case in builder.list_configs(cell) for config in case}
            missing = {config for config in runs - counted if not store.is_complete(config, column.tested)}
            untuned = {job for cell in cells if not builder.is_tuned(cell) for job in [TuningJob.for_cell(cell)]}
            if not missing:
                continue
            counted |= missing
            pace = store.seconds_per_cycle(next(iter(missing)).data.name)
            needed = None if pace is None else pace * sum(config.recipe.cycles for config in missing) / 3600
            hours += needed or 0.0
            shown = "unknown" if needed is None else f"{needed:.1f}"
            table.add_row(spec.name, column.name, f"{len(runs)}", f"{len(missing)}", f"{len(untuned)}", shown)
    Console().print(table)
    _print_line(f"{len(counted):,} runs are missing, about {hours:.1f} hours where a dataset has recorded runs")


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
def count_positives(columns: Columns = "", scale: ScaleName = "paper") -> None:
    """Count positives and negatives beside the paper's Table 7; nothing runs.

    Example: [bold]python -m paper table7 --columns cifar10[/bold]
    """
    chosen_scale = lookup("scale", scale, SCALES)
    datasets = _split_names("columns", columns) or list(PUBLISHED)
    table = _make_rich_table("dataset", "part", "here", "paper")
    caveats, missing = list[str](), list[str]()
    for name in datasets:
        dataset = find_datasets()[lookup("column of table7", name, chosen_scale.datasets)["data"]]
        caveats += [caveat_sentence(name, dataset.caveat)] if dataset.caveat else []
        try:
            counts = count_classes(dataset(), 0)
        except MissingFiles as absent:
            table.add_row(name, "-", "missing", "")
            missing.append(str(absent))
            continue
        for part, count in counts.items():
            paper = getattr(PAPER_COUNTS[dataset.name], part) if dataset.name in PAPER_COUNTS else None
            published = f"{paper.positives:,} / {paper.negatives:,}" if paper else "-"
            table.add_row(name, part, f"{count.positives:,} / {count.negatives:,}", published)
    Console().print(table)
    for line in [*caveats, *([] if chosen_scale.published else [SMOKE_CAVEAT])]:
        _print_line(line)
    # A long address must not be broken: it is to be copied.
    print("\n".join(missing), end="\n" * bool(missing))


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
    specs = _select_specs(names, chosen_scale, columns, methods, row)
    builder = TableBuilder(store, chosen_scale, read_seeds(seeds))
    plan = TuningPlan.parse(tuning, chosen_scale) if tuning else None
    if not is_writable(store.path):
        remedy = f"name another folder for records in {RECORDS_VARIABLE}, or look at these with `python -m paper show`"
        raise ValueError(f"{store.path} cannot be written: {remedy}")
    is_late, missing_files, deadline = False, "", time.monotonic() + 60 * budget_minutes
    with ProgressBars() as bars, RunQueue(store, WORK_FOLDER, device, bars.add_bar, deadline) as queue:
        try:
            tune_rows(specs, builder.choices, queue, plan)
            for tested in (True, False):
                cells = [cell for spec in specs for cell in list_cells(spec) if cell.column.tested == tested]
                cases = (case for cell in cells for case in builder.list_configs(cell))
                queue.run_missing((config for case in cases for config in case), tested)
        except OutOfTime:
            is_late = True
        except MissingFiles as error:
            missing_files = str(error)
    print_tables(specs, builder)
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
    specs = _select_specs(names, chosen_scale, columns, methods, row)
    print_tables(specs, TableBuilder(store, chosen_scale, read_seeds(seeds)))


@app.command("merge")
def merge_records(folders: Annotated[list[Path], typer.Argument(help="Folders of records.")]) -> None:
    """Add the runs and the chosen settings of other folders of records, such as those of a GPU machine.

    A run that has a record here already is left out.

    Example: [bold]python -m paper merge gpu-1/records gpu-2/records[/bold]
    """
    store = _open_records(may_be_empty=True)
    sources = [RecordStore(folder) for folder in folders]
    for source in sources:
        if not source.has_records:
            raise ValueError(f"{source.path} has no records; name a folder with files such as cifar10.jsonl")
    for source in sources:
        runs = store.merge(source)
        choices = sum(ChoiceStore(store, scale).merge(ChoiceStore(source, scale)) for scale in SCALES.values())
        print(f"added {runs} runs and {choices} choices of settings from {source.path}")


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


def _select_specs(
    names: Sequence[str], scale: Scale, columns: str, methods: str, more_rows: Sequence[str] | None
) -> list[TableSpec]:
    _refuse_table7(names)
    added = [Row.parse(text) for text in more_rows or ()]
    rows = _split_names("methods", methods)
    rows += [row.name for row in added if rows and row.name not in rows]
    specs = [lookup("table", name, build_tables(scale)).add_rows(added) for name in names]
    return [spec.select(_split_names("columns", columns), rows) for spec in specs]


def _refuse_table7(names: Sequence[str]) -> None:
    if "table7" in names:
        raise ValueError("table7 is counted, not run: use `python -m paper table7`")


def _open_records(may_be_empty: bool = False) -> RecordStore:
    store = RecordStore(Path(os.environ.get(RECORDS_VARIABLE) or "paper/records"))
    if not (store.has_records or may_be_empty):
        raise ValueError(f"{store.path} has no records: name their folder in {RECORDS_VARIABLE}, or run a table first")
    return store


def _split_names(option: str, text: str) -> list[str]:
    return read_list(option, text) if text else []


# ------------------------------------------------------------------------------------------------------------ printing

NUMBER_TITLES = {"validation": "Validation AUC", "average_precision": "Average precision"}


def print_tables(specs: Sequence[TableSpec], builder: TableBuilder) -> None:
    """Print what the records say of some tables, with caveats and a legend."""
    built = [builder.build(spec) for spec in specs]
    for table in built:
        _print_line(table.spec.title)
        if table.spec.kind == "traffic":
            print_frame(make_rounds_frame(table))
            print_frame(make_rounds_frame(table, NEARLY))
        else:
            print_frame(make_frame(table))
        for number in table.spec.more_numbers:
            _print_line(NUMBER_TITLES[number])
            print_frame(make_number_frame(table, number))
        for line in (*list_data_caveats(table, builder.store), *list_borrowed(table), *_list_tunings(table, builder)):
            _print_line(line)
        panels = collect_panels(table) if table.spec.kind == "figure" else {}
        if panels and is_writable(builder.store.path):
            path = builder.store.path / "figures" / f"{builder.scale.name}-{table.name}.png"
            write_figure(draw_curves(panels), path)
            Console().print(f"Curves: {path}", soft_wrap=True)
    kinds = {spec.kind for spec in specs}
    if "traffic" in kinds:
        _print_line(ROUNDS_LEGEND)
    if kinds != {"traffic"}:
        published = any(cell.published for table in built for cell in table.cells.values())
        _print_line(describe_aucs(published, tested="table" in kinds))
    if not builder.scale.published:
        _print_line(SMOKE_CAVEAT)


def print_frame(frame: pd.DataFrame) -> None:
    """Print a frame in as many parts as it takes to break no name and no number."""
    console, start = Console(), 0
    while start < frame.shape[1]:
        stop = start + 1
        while stop < frame.shape[1] and _measure_width(console, frame.iloc[:, start : stop + 1]) <= console.width:
            stop += 1
        if start:
            console.print()
        part = frame.iloc[:, start:stop]
        # A single column that is wider than the terminal is left to the terminal to wrap.
        Console(width=max(console.width, _measure_width(console, part))).print(_to_rich_table(part))
        start = stop


def _to_rich_table(frame: pd.DataFrame) -> RichTable:
    table = _make_rich_table("", *frame.columns)
    for row in frame.itertuples(name=None):
        table.add_row(*(text.replace("[", "\\[") for text in row))
    return table


def _measure_width(console: Console, frame: pd.DataFrame) -> int:
    """The width that a table takes with nothing folded, whatever the width of the terminal."""
    return _to_rich_table(frame).__rich_measure__(console, console.options.update(max_width=1 << 16)).maximum


def _make_rich_table(*headers: str) -> RichTable:
    table = RichTable(box=None, padding=(0, 1), pad_edge=False)
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def _print_line(line: str) -> None:
    Console().print(line, highlight=False, markup=False)


def _list_tunings(table: Table, builder: TableBuilder) -> Iterator[str]:
    """A caveat for each column whose rows were not tuned in the same way."""
    for column in table.spec.columns:
        rows_by_tuning = dict[str, list[str]]()
        for row in table.spec.rows:
            choice = builder.choices.find_or_inherit(TuningJob.for_cell(CellSpec(row, column)))
            if choice:
                tuning = "not tuned" if choice.grid == "none" else f"tuned with {choice.grid}:{choice.budget}"
                rows_by_tuning.setdefault(tuning, []).append(row.name)
        if len(rows_by_tuning) > 1:
            listed = "; ".join(f"{', '.join(rows)} {tuning}" for tuning, rows in rows_by_tuning.items())
            yield f"Rows of {column.name} were tuned differently: {listed}."
