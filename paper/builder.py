"""Tables built from records: means, spreads, learning curves, significance tests and rounds to a common AUC."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedauc.experiments.config import Config
from fedauc.reports.summary import Spread
from paper.records import Point, Record, RecordStore
from paper.scales import Scale
from paper.significance import Case, Difference, compare_rows, compute_pair_shares
from paper.table_specs import CIFAR, OURS, CellSpec, Column, TableSpec, cell_configs, list_cells
from paper.tuning import ChoiceStore, TuningJob, TuningPlan, grid_candidates

NEARLY = 0.02
"""How far below a target AUC a row has nearly reached it."""

NUMBERS = ("auc", "average_precision", "validation", "selected")
"""Test AUC, average precision and validation AUC at the end, and test AUC where validation AUC was highest."""

Key = tuple[str, str]
"""A row's and a column's name."""


class PublishedAuc(NamedTuple):
    """A mean and a standard deviation over three runs, as the paper prints them."""

    mean: float
    deviation: float


def published_aucs(table: str) -> Mapping[Key, PublishedAuc]:
    """What the paper prints for each row and column of a table; nothing for tables that it does not have.

    The numbers are those of Tables 1 to 5, 8 and 9 of Vangapally, Wu, Chen and Guo, Communication-Efficient Federated
    AUC Maximization with Cyclic Client Participation, TMLR 01/2026. The paper's figures come without numbers.

    >>> published_aucs("table1")["cycp-pairwise", "cifar10"]
    PublishedAuc(mean=0.848, deviation=0.0008)
    """
    # The paper does not name the positive class of its Table 1: it may be any of them.
    source, columns = ("table1", CIFAR) if table == "classes" else (table, ())
    return {
        (line["method"], line["column"]): PublishedAuc(line["mean"], line["deviation"])
        for line in _read_published().to_dict("records")
        if line["table"] == source and (not columns or line["column"] in columns)
    }


@functools.cache
def _read_published() -> pd.DataFrame:
    return pd.read_csv(Path(__file__).parent / "published.csv")


class Reach(NamedTuple):
    """Rounds and bytes until a target AUC; an AUC of the first evaluation may have been reached before it."""

    rounds: float
    bytes: float
    at_first_evaluation: bool = False


@dataclass(frozen=True)
class Cell:
    """What the runs of one row in one column say: how many were expected, finished and stopped, and their numbers.

    `auc`, `average_precision`, `validation` and `selected` are NUMBERS over runs, `curve` is the mean over finished
    runs. `p_value` is the test against the column's best row, which has none itself. `reached` is where the curve first
    reaches the column's `target`, and `nearly_reached` where it comes within NEARLY of it. A cell with
    `borrowed_settings` has those of its dataset until it is tuned itself. Where cases are averaged, `case_means` has
    the mean of each.
    """

    expected: int
    finished: int
    stopped: int
    auc: Spread | None
    average_precision: Spread | None = None
    validation: Spread | None = None
    selected: Spread | None = None
    curve: tuple[Point, ...] = ()
    published: PublishedAuc | None = None
    best: bool = False
    p_value: float | None = None
    target: float | None = None
    reached: Reach | None = None
    nearly_reached: Reach | None = None
    borrowed_settings: bool = False
    case_means: tuple[float | None, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every run has finished."""
        return self.auc is not None and self.finished == self.expected


class Table(NamedTuple):
    """A table spec with its cells, its runs, and by column, method and baseline the tested differences of mean AUC."""

    spec: TableSpec
    cells: Mapping[Key, Cell]
    differences: Mapping[tuple[str, str, str], Difference | None] = {}
    runs: Mapping[Config, Record] = {}

    @property
    def name(self) -> str:
        """The name of its command."""
        return self.spec.name

    def column_cells(self, column: str) -> dict[str, Cell]:
        """The cells of a column by row."""
        return {row: cell for (row, name), cell in self.cells.items() if name == column}

    def keep_finished(self) -> Table:
        """The same table with the rows and columns that have a result."""
        finished = [key for key, cell in self.cells.items() if cell.auc]
        rows = tuple(row for row in self.spec.rows if row.name in {name for name, _ in finished})
        columns = tuple(column for column in self.spec.columns if column.name in {name for _, name in finished})
        return self._replace(spec=replace(self.spec, rows=rows, columns=columns))


class TableBuilder:
    """Builds tables from the records of a store."""

    def __init__(self, store: RecordStore, scale: Scale, seeds: Sequence[int]) -> None:
        self.store, self.scale, self.seeds = store, scale, seeds
        self.choices = ChoiceStore(store, scale)

    def list_configs(self, cell: CellSpec) -> list[list[Config]]:
        """The runs of a cell by case, with the settings that were chosen for its row."""
        return cell_configs(self.scale, cell, self.choices.chosen_settings(TuningJob.for_cell(cell)), self.seeds)

    def find_records(self, cell: CellSpec) -> list[list[Record | None]]:
        """The records of a cell's runs by case; a row that is still to be tuned has none."""
        # Building a configuration takes milliseconds, and most of a report's runs may never have been started.
        started = self.store.has_runs(self.scale.datasets[cell.column.dataset]["data"], cell.row.method)
        tunable = grid_candidates(cell.row, TuningPlan.parse(cell.column.grid).grid) != [{}]
        if not started or (tunable and self.choices.find_or_inherit(TuningJob.for_cell(cell)) is None):
            return [[None] * len(cell.column.seeds or self.seeds) for _ in cell.column.cases]
        return [[self.store.find_record(config) for config in case] for case in self.list_configs(cell)]

    def build(self, spec: TableSpec) -> Table:
        """Every cell of a table. A column's best row is one whose runs have all finished."""
        records = [(cell, self.find_records(cell)) for cell in list_cells(spec)]
        cells = self._summarize(spec, records)
        differences: dict[tuple[str, str, str], Difference | None] = {}
        published = published_aucs(spec.name) if self.scale.published else {}
        for column in spec.columns:
            column_cells = {row.name: cells[row.name, column.name] for row in spec.rows}
            means = {row: cell.auc.mean for row, cell in column_cells.items() if cell.complete and cell.auc}
            best = max(means, key=lambda row: means[row], default="")
            # Points of figures are compared across columns, not across rows, and rounds are not tested.
            tested = () if spec.kind != "table" else spec.rows
            shares = {row.name: self._read_shares(CellSpec(row, column)) for row in tested if row.name in means}
            for method, baseline in itertools.product([method for method in OURS if method in shares], shares):
                if method != baseline:
                    differences[column.name, method, baseline] = _compare(shares, column, method, baseline)
            target = _find_target([cell for row, cell in column_cells.items() if row in (spec.rows[0].name, *OURS)])
            for row, cell in column_cells.items():
                against_best = _compare(shares, column, row, best)
                curve = cell.curve if cell.complete else ()
                cells[row, column.name] = replace(
                    cell,
                    published=published.get((row, column.name)),
                    best=row == best,
                    p_value=against_best.p_value if against_best else None,
                    target=target,
                    reached=None if target is None else find_reach(curve, target),
                    nearly_reached=None if target is None else find_reach(curve, target - NEARLY),
                )
        runs = {record.config: record for _, cases in records for case in cases for record in case if record}
        return Table(spec, cells, differences, runs)

    def _summarize(
        self, spec: TableSpec, records: Sequence[tuple[CellSpec, list[list[Record | None]]]]
    ) -> dict[Key, Cell]:
        """What each cell says by itself."""
        runs = pd.DataFrame(
            [
                (cell.row.name, cell.column.name, case, seed, *_read_numbers(record))
                for cell, cases in records
                for case, case_records in enumerate(cases)
                for seed, record in enumerate(case_records)
            ],
            columns=["row", "column", "case", "seed", *NUMBERS],
        ).astype(dict.fromkeys(NUMBERS, float))
        case_means = runs.groupby(["row", "column", "case"])["auc"].mean()
        for column in [column for column in spec.columns if column.average_cases]:
            # A mean over cases needs every case.
            of_column = runs[runs["column"] == column.name].groupby(["row", "column", "seed"])[list(NUMBERS)]
            means = of_column.sum(min_count=len(column.cases)) / len(column.cases)
            runs = pd.concat([runs[runs["column"] != column.name], means.reset_index()])
        spreads = runs.groupby(["row", "column"])[list(NUMBERS)].agg(["mean", "std", "count"]).to_dict("index")
        cells = {}
        for spec_cell, cases in records:
            key = spec_cell.row.name, spec_cell.column.name
            of_cell = [record for case in cases for record in case]
            finished = [record for record in of_cell if record and record.final_point]
            auc, average_precision, validation, selected = (_read_spread(spreads[key], number) for number in NUMBERS)
            cells[key] = Cell(
                len(of_cell),
                len(finished),
                sum(bool(record and record.stopped) for record in of_cell),
                auc,
                average_precision,
                validation,
                selected,
                curve=average_curves(finished),
                borrowed_settings=bool(spec_cell.column.tuned_case)
                and self.choices.find_choice(TuningJob.for_cell(spec_cell)) is None,
                case_means=tuple(
                    None if np.isnan(mean) else float(mean)
                    for mean in (case_means.loc[key] if spec_cell.column.average_cases else ())
                ),
            )
        return cells

    def _read_shares(self, cell: CellSpec) -> list[Case] | None:
        """A cell's runs by case, as they are tested; None unless there are several runs and the ranks of all."""
        ranks = [[self.store.load_ranks(config) for config in case] for case in self.list_configs(cell)]
        if sum(map(len, ranks)) < 2 or any(run is None for case in ranks for run in case):
            return None
        return [[compute_pair_shares(run) for run in case if run is not None] for case in ranks]


def _compare(shares: Mapping[str, list[Case] | None], column: Column, method: str, baseline: str) -> Difference | None:
    first, second = shares.get(method), shares.get(baseline)
    if not first or not second or method == baseline:
        return None
    return compare_rows(first, second, column.test_overlap, same_examples=column.average_cases)


def _read_numbers(record: Record | None) -> tuple[float | None, ...]:
    """A finished run's NUMBERS."""
    if record is None or record.final_point is None:
        return (None,) * len(NUMBERS)
    return record.auc, record.average_precision, record.final_point.validation_auc, record.selected_auc


def _read_spread(summary: Mapping[Hashable, Any], number: str) -> Spread | None:
    mean, deviation, count = (summary[number, name] for name in ("mean", "std", "count"))
    return Spread(float(mean), float(deviation) if count > 1 else 0.0, int(count)) if count else None


def average_curves(records: Sequence[Record]) -> tuple[Point, ...]:
    """The mean over runs that were evaluated after the same rounds; nothing if they were not."""
    if len({tuple(point.rounds for point in record.curve) for record in records}) != 1:
        return ()
    curve = []
    for points in zip(*(record.curve for record in records), strict=True):
        sent, auc = (float(np.mean(values)) for values in list(zip(*points, strict=True))[2:4])
        curve.append(points[0]._replace(bytes=round(sent), auc=auc, validation_auc=None))
    return tuple(curve)


def find_reach(curve: Sequence[Point], target: float) -> Reach | None:
    """Where a curve first reaches a target, if it does."""
    hit = next((point for point in curve if point.auc >= target), None)
    return Reach(hit.rounds, hit.bytes, hit is curve[0]) if hit else None


def _find_target(cells: Sequence[Cell]) -> float | None:
    """The lowest final AUC of these cells, which all of them reach; None until all have finished."""
    if not all(cell.complete and cell.curve for cell in cells):
        return None
    return min(cell.curve[-1].auc for cell in cells)


def list_wanted(specs: Sequence[TableSpec], builder: TableBuilder, tested: bool) -> list[Config]:
    """Every run that the tables need, in columns that are tested or in the others."""
    cells = [cell for spec in specs for cell in list_cells(spec) if cell.column.tested == tested]
    return [config for cell in cells for case in builder.list_configs(cell) for config in case]
