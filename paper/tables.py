"""Tables built from records: means, spreads, learning curves and significance tests; and their cells as text."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedauc.experiments.config import Config
from fedauc.reports.caveats import caveat_sentence, has_caveat
from fedauc.reports.summary import Spread
from fedauc.reports.tables import format_bytes, format_share
from paper.records import MOST_ROWS, Point, Record, RecordStore
from paper.scales import Scale
from paper.significance import SIGNIFICANCE_LEVEL, Difference, PairShares, compare_rows, compute_pair_shares
from paper.table_specs import OURS, CellSpec, Column, TableSpec, cell_configs
from paper.tuning import ChoiceStore, TuningJob, TuningPlan, grid_candidates

NEARLY = 0.02
"""How far below a target AUC a row has nearly reached it."""

NUMBERS = ("auc", "average_precision", "validation", "selected")
"""Test AUC, average precision and validation AUC at the end, and test AUC where validation AUC was highest."""

Key = tuple[str, str]
"""A row's and a column's name."""


@dataclass(frozen=True)
class Cell:
    """What the runs of one row in one column say: how many were expected, finished and stopped, and their numbers.

    `numbers` are those of NUMBERS that the runs have, `curve` is the mean over finished runs, and `published` what the
    paper prints. `best` is the highest mean of a column, and `mark` what the test against it says. `borrowed_settings`
    are those of the dataset, until a cell is tuned itself. `case_aucs` has the AUC of each of the column's cases.
    """

    expected: int
    finished: int
    stopped: int
    numbers: Mapping[str, Spread] = field(default_factory=dict)
    curve: tuple[Point, ...] = ()
    published: Spread | None = None
    best: bool = False
    mark: str = ""
    borrowed_settings: bool = False
    case_aucs: tuple[Spread | None, ...] = ()
    runs: Mapping[Config, Record] = field(default_factory=dict)

    @property
    def auc(self) -> Spread | None:
        """Test AUC after the last cycle."""
        return self.numbers.get("auc")

    @property
    def complete(self) -> bool:
        """Whether every run has finished."""
        return self.auc is not None and self.finished == self.expected

    def find_reach(self, target: float | None) -> Point | None:
        """Where the curve first reaches a target AUC, if every run has finished and it does."""
        if target is None or not self.complete:
            return None
        return next((point for point in self.curve if point.auc >= target), None)


class Table(NamedTuple):
    """A table spec with its cells, and by column, method and baseline the tested differences of mean AUC."""

    spec: TableSpec
    cells: Mapping[Key, Cell]
    differences: Mapping[tuple[str, str, str], Difference | None] = {}

    @property
    def name(self) -> str:
        """The name of its command."""
        return self.spec.name

    @property
    def runs(self) -> dict[Config, Record]:
        """The recorded runs of all cells."""
        return {config: record for cell in self.cells.values() for config, record in cell.runs.items()}

    def column_cells(self, column: str) -> dict[str, Cell]:
        """The cells of a column by row."""
        return {row: cell for (row, name), cell in self.cells.items() if name == column}

    def find_target(self, column: str) -> float | None:
        """The lowest final AUC of the first row and the CyCp rows, which all of them reach; None until all have run."""
        cells = self.column_cells(column)
        compared = [cells[name] for name in {next(iter(cells)), *map(self.find_row, OURS)} & cells.keys()]
        if not all(cell.complete and cell.curve for cell in compared):
            return None
        return min(cell.curve[-1].auc for cell in compared)

    def find_row(self, method: str) -> str:
        """The name of the first row of a method; that of the method where the table has no such row."""
        return next((row.name for row in self.spec.rows if row.method == method), method)

    def keep_finished(self) -> Table:
        """The same table with the rows and columns that have a result."""
        finished = [key for key, cell in self.cells.items() if cell.auc]
        rows = tuple(row for row in self.spec.rows if row.name in {name for name, _ in finished})
        columns = tuple(column for column in self.spec.columns if column.name in {name for _, name in finished})
        return self._replace(spec=replace(self.spec, rows=rows, columns=columns))


# ------------------------------------------------------------------------------------------------------------ building


@functools.cache
def published_aucs(table: str) -> Mapping[Key, Spread]:
    """What the paper prints for each row and column of a table; nothing for tables that it does not have.

    The numbers are those of Tables 1 to 5, 8 and 9 of Vangapally, Wu, Chen and Guo, Communication-Efficient Federated
    AUC Maximization with Cyclic Client Participation, TMLR 01/2026. The paper's figures come without numbers.

    >>> published_aucs("table1")["cycp-pairwise", "cifar10"]
    Spread(mean=0.848, deviation=0.0008, values=3)
    """
    # The paper does not name the positive class of its Table 1: it may be any of those in `classes`.
    source = "table1" if table == "classes" else table
    numbers = pd.read_csv(Path(__file__).parent / "published.csv")
    lines = numbers[numbers["table"] == source].to_dict("records")
    return {(line["method"], line["column"]): Spread(line["mean"], line["deviation"], 3) for line in lines}


class TableBuilder:
    """Builds tables from the records of a store."""

    def __init__(self, store: RecordStore, scale: Scale, seeds: Sequence[int]) -> None:
        self.store, self.scale, self.seeds = store, scale, seeds
        self.choices = ChoiceStore(store, scale)

    def list_configs(self, cell: CellSpec) -> list[list[Config]]:
        """The runs of a cell by case, with the settings that were chosen for its row."""
        return cell_configs(self.scale, cell, self.choices.chosen_settings(TuningJob.for_cell(cell)), self.seeds)

    def is_tuned(self, cell: CellSpec) -> bool:
        """Whether the settings of a cell are chosen, or there is nothing to choose."""
        has_grid = grid_candidates(cell.row, TuningPlan.parse(cell.grid, self.scale).grid) != [{}]
        return not has_grid or self.choices.find_or_inherit(TuningJob.for_cell(cell)) is not None

    def build(self, spec: TableSpec) -> Table:
        """A table from the records that there are."""
        cells, differences = dict[Key, Cell](), dict[tuple[str, str, str], Difference | None]()
        published = published_aucs(spec.name) if self.scale.published else {}
        for column in spec.columns:
            in_column = {row.name: self._build_cell(CellSpec(row, column)) for row in spec.rows}
            means = {row: cell.auc.mean for row, cell in in_column.items() if cell.complete and cell.auc}
            best = max(means, key=lambda row: means[row], default="")
            # Points of figures are compared across columns, not across rows, and rounds are not tested.
            shares = {row: self._read_shares(in_column[row], column) for row in means if spec.kind == "table"}
            for method, baseline in itertools.permutations(shares, 2):
                first, second = shares[method], shares[baseline]
                if first and second and (method in (*OURS, best) or (method, baseline) in spec.contrasts):
                    test = compare_rows(first, second, column.test_overlap, same_examples=column.average_cases)
                    differences[column.name, method, baseline] = test
            marks = mark_rows({row: differences.get((column.name, best, row)) for row in means}, best)
            for row, cell in in_column.items():
                paper_auc = published.get((row, column.name))
                cell = replace(cell, published=paper_auc, best=row == best, mark=marks.get(row, ""))
                cells[row, column.name] = cell
        return Table(spec, cells, differences)

    def _build_cell(self, cell: CellSpec) -> Cell:
        """What a cell says by itself."""
        row, column = cell
        job, seeds = TuningJob.for_cell(cell), column.seeds or self.seeds
        cases: list[list[Record | None]] = [[None] * len(seeds) for _ in column.cases]
        runs = dict[Config, Record]()
        # Building a configuration takes milliseconds, and most of a report's runs may never have been started.
        started = self.store.has_runs(self.scale.datasets[column.dataset]["data"], row.method)
        if started and self.is_tuned(cell):
            for position, configs in enumerate(self.list_configs(cell)):
                runs |= {config: record for config in configs if (record := self.store.find_record(config))}
                cases[position] = [runs.get(config) for config in configs]
        finished = [record for record in runs.values() if record.final_point]
        # A mean over cases is one result per seed.
        results = list(zip(*cases, strict=True)) if column.average_cases else [[run] for case in cases for run in case]
        return Cell(
            expected=len(seeds) * len(cases),
            finished=len(finished),
            stopped=sum(bool(record.stopped) for record in runs.values()),
            numbers=_summarize_numbers(results),
            curve=average_curves(finished),
            borrowed_settings=bool(column.tuned_case) and self.choices.find_choice(job) is None,
            case_aucs=tuple(_summarize_numbers(zip(case, strict=True)).get("auc") for case in cases),
            runs=runs,
        )

    def _read_shares(self, cell: Cell, column: Column) -> list[list[PairShares]] | None:
        """A cell's runs by case, as they are tested; None unless there are several runs and the ranks of all."""
        ranks = [self.store.load_ranks(config) for config in cell.runs]
        shares = [compute_pair_shares(run) for run in ranks if run is not None]
        if len(shares) < max(2, cell.expected):
            return None
        seeds = cell.expected // len(column.cases)
        return [shares[start : start + seeds] for start in range(0, cell.expected, seeds)]


def mark_rows(tests: Mapping[str, Difference | None], best: str) -> dict[str, str]:
    """`*` for a column's best row, `~` for rows not significantly different from it, `?` for rows not tested.

    A column in which nothing was tested has no marks.
    """
    if not any(tests.values()):
        return {}
    marks = {row: "~" if test.p_value >= SIGNIFICANCE_LEVEL else "" for row, test in tests.items() if test}
    return dict.fromkeys(tests, "?") | marks | {best: "*"}


def _summarize_numbers(results: Iterable[Sequence[Record | None]]) -> dict[str, Spread]:
    """The spread of every number over results, each of which is the mean of some runs that have all finished."""
    values = dict[str, list[float]]()
    for runs in results:
        numbers = [_read_numbers(run) for run in runs if run and run.final_point]
        for name in NUMBERS:
            known = [value for run in numbers if (value := run[name]) is not None]
            if len(known) == len(runs):
                values.setdefault(name, []).append(float(np.mean(known)))
    return {name: Spread.of(of_name) for name, of_name in values.items()}


def _read_numbers(record: Record) -> dict[str, float | None]:
    scored = [(point.validation_auc, point.auc) for point in record.curve if point.validation_auc is not None]
    # The first of equal cycles is selected.
    selected = max(scored, key=lambda pair: pair[0])[1] if scored else None
    at_end = (record.auc, record.average_precision, record.curve[-1].validation_auc)
    return dict(zip(NUMBERS, (*at_end, selected), strict=True))


def average_curves(records: Sequence[Record]) -> tuple[Point, ...]:
    """The mean over runs that were evaluated after the same rounds; nothing if they were not."""
    if len({tuple(point.rounds for point in record.curve) for record in records}) != 1:
        return ()
    curve = []
    for points in zip(*(record.curve for record in records), strict=True):
        sent, auc = (float(np.mean([getattr(point, name) for point in points])) for name in ("bytes", "auc"))
        curve.append(points[0]._replace(bytes=round(sent), auc=auc, validation_auc=None))
    return tuple(curve)


# --------------------------------------------------------------------------------------------------------------- texts

SMOKE_CAVEAT = "Smoke scale: synthetic data and a linear model. These numbers say nothing about the paper's."

ROUNDS_LEGEND = (
    "Rounds until the mean test AUC first reaches a common target, in brackets as a multiple of the first row's, and "
    "the bytes sent in both directions. The target is the lowest AUC that the first row and the CyCp rows end with; "
    f"the second table is for {format_share(NEARLY, 2)} less. Rounds in which the pairwise methods only score are "
    "counted. ≤ marks a target that was reached at the first evaluation. - means that there is no target yet, because "
    "some of these rows have not finished."
)


def describe_aucs(published: bool = True, tested: bool = True) -> str:
    """What a table of AUCs shows: the paper's numbers only at its scale, marks only where something is tested."""
    text = "Test AUC after the last cycle: mean ± standard deviation over runs"
    text += "; the paper's number is in brackets" if published else ""
    text += ". - means that no run has finished."
    if not tested:
        return text
    return text + (
        " * is the highest mean of a column, among rows whose runs have all finished. ~ means not significantly "
        f"different from it (p ≥ {format_share(SIGNIFICANCE_LEVEL, 2)}), ? means not tested. Single runs and points of "
        "figures are not tested and have no marks. The test is DeLong's paired test with the variance over training "
        "seeds added; over several splits or classes, a t-test over them must be significant too. On test sets of more "
        f"than {MOST_ROWS:,} examples it uses every positive and a sample of the negatives. Runs that diverged or "
        "crashed are counted as stopped."
    )


def format_mean(spread: Spread | None) -> str:
    """A mean of four digits, or a dash."""
    return "-" if spread is None else format_share(spread.mean, 4)


def format_spread(spread: Spread | None) -> str:
    """A mean and its standard deviation, such as `.9012 ± .0020`."""
    deviation = f" ± {format_share(spread.deviation, 4)}" if spread and spread.values > 1 else ""
    return format_mean(spread) + deviation


def format_auc(cell: Cell) -> str:
    """A cell of AUCs, such as `.9110 ± .0012* [.8480]`."""
    published = f" [{format_mean(cell.published)}]" if cell.published else ""
    if cell.auc is None:
        return (f"stopped {cell.stopped} of {cell.expected}" if cell.stopped else "-") + published
    stopped = f", {cell.stopped} stopped" if cell.stopped else ""
    missing = "" if cell.finished == cell.expected else f" ({cell.finished} of {cell.expected}{stopped})"
    return f"{format_spread(cell.auc)}{cell.mark}{missing}{published}"


def format_rounds(cell: Cell, first: Cell, target: float | None) -> str:
    """Rounds, their ratio to the first row's, and bytes to the target, such as `120 (0.31), 3.2 GB`."""
    reach, first_reach = cell.find_reach(target), first.find_reach(target)
    if target is None and cell.complete:
        return "-"
    if reach is None or first_reach is None:
        both_complete = cell.complete and first.complete
        return "not reached" if both_complete else f"{cell.finished} of {cell.expected} runs"
    bound = "≤ " if reach is cell.curve[0] else ""
    return f"{bound}{reach.rounds} ({reach.rounds / first_reach.rounds:.2f}), {format_bytes(reach.bytes)}"


def make_frame(table: Table, format_cell: Callable[[Cell], str] = format_auc) -> pd.DataFrame:
    """A text for each cell, by default its AUC; the columns of a figure, which are many, become rows."""
    columns = [column.name for column in table.spec.columns]
    rows = {row.name: [format_cell(table.cells[row.name, column]) for column in columns] for row in table.spec.rows}
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
    return frame.T if table.spec.kind == "figure" else frame


def make_number_frame(table: Table, number: str) -> pd.DataFrame:
    """One of NUMBERS for each cell, with its spread."""
    return make_frame(table, lambda cell: format_spread(cell.numbers.get(number)))


def make_mean_frame(table: Table) -> pd.DataFrame:
    """Mean test AUCs with the paper's below them, a column for each method."""
    rows = {}
    for column in table.spec.columns:
        cells = [table.cells[row.name, column.name] for row in table.spec.rows]
        rows[f"{column.name}, here"] = [format_mean(cell.auc) + cell.mark for cell in cells]
        if any(cell.published for cell in cells):
            rows[f"{column.name}, paper"] = [format_mean(cell.published) for cell in cells]
    return pd.DataFrame.from_dict(rows, orient="index", columns=[row.name for row in table.spec.rows])


def make_rounds_frame(table: Table, margin: float = 0.0) -> pd.DataFrame:
    """Rounds and bytes to the target AUC less a margin, below that AUC itself."""
    texts = {}
    for column in [column.name for column in table.spec.columns]:
        cells, target = table.column_cells(column), table.find_target(column)
        first, goal = next(iter(cells.values())), None if target is None else target - margin
        rounds = [format_rounds(cells[row.name], first, goal) for row in table.spec.rows]
        texts[column] = ["-" if goal is None else format_share(goal, 4), *rounds]
    return pd.DataFrame(texts, index=["AUC to reach", *(row.name for row in table.spec.rows)])


def make_case_frame(table: Table) -> pd.DataFrame:
    """The means behind columns that are averaged over cases, a row for each case."""
    rows = {}
    for column in [column for column in table.spec.columns if column.average_cases]:
        for position, case in enumerate(column.cases):
            label = ", ".join([column.name, *(f"{name} {value}" for name, value in case.items())])
            cells = [table.cells[row.name, column.name] for row in table.spec.rows]
            rows[label] = [format_mean(cell.case_aucs[position]) for cell in cells]
    return pd.DataFrame.from_dict(rows, orient="index", columns=[row.name for row in table.spec.rows])


def to_markdown(frame: pd.DataFrame, corner: str = "") -> str:
    """A Markdown table, with `corner` above the row names.

    >>> print(to_markdown(pd.DataFrame({"cifar10": [".9*"]}, index=["a"]), "method"), end="")
    | method | cifar10 |
    | --- | --- |
    | a | .9\\* |
    """
    lines = [[corner, *frame.columns], ["---"] * (1 + frame.shape[1]), *frame.itertuples(name=None)]
    text = "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
    # A single asterisk is a mark, two of them are bold.
    return re.sub(r"~|(?<!\*)\*(?!\*)", r"\\\g<0>", text)


def list_data_caveats(table: Table, store: RecordStore) -> Iterator[str]:
    """A caveat for each column whose runs used synthetic or substitute data."""
    for column in table.spec.columns:
        cells = table.column_cells(column.name).values()
        runs = {config: run.data for cell in cells for config, run in cell.runs.items() if has_caveat(run.data)}
        if runs:
            ranks = next(filter(None, map(store.load_ranks, runs)), None)
            note = next(iter(runs.values()))
            yield caveat_sentence(column.name, note, int(ranks.labels.sum()) if ranks else None)


def list_borrowed(table: Table) -> Iterator[str]:
    """A caveat on points of figures that ran with the settings of another column, if there are any."""
    columns: dict[str, list[str]] = {}
    for (row, column), cell in table.cells.items():
        if cell.borrowed_settings and cell.finished:
            columns.setdefault(column, []).append(row)
    if columns:
        listed = ", ".join(f"{column} ({', '.join(rows)})" for column, rows in columns.items())
        yield f"Not tuned separately yet, so these have a table's settings for the same data: {listed}."
