"""A sheet filled from records: means, spreads, curves, tests and costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from fedauc.experiments.config import Config
from fedauc.reports.summary import Spread
from paper.halving import grid_candidates
from paper.printed import Printed, printed
from paper.records import Point, Record, RecordStore
from paper.scales import Scale
from paper.table_specs import OURS, CellSpec, Column, TableSpec, cell_configs, list_cells
from paper.testing import Wins, p_value, wins
from paper.tuning import ChoiceStore, TuningJob, TuningPlan

SIGNIFICANT = 0.05

EARLY = 0.02
"""How far below the target a row is nearly there."""


class Reach(NamedTuple):
    """Rounds and bytes until a target; what the first evaluation has may have been reached before."""

    rounds: float
    bytes: float
    first: bool = False


@dataclass(frozen=True)
class Filled:
    """A cell: test AUC at the end over runs, runs done and stopped of those asked for, and the paper's number.

    `precision` is average precision at the end, `validation` validation AUC there, `selected` test AUC where that is
    highest, `curve` the mean over the runs done. `p_value` is against the column's best row, which has none itself;
    `versus` has that against each of the paper's own methods. `reach` is where the curve of a cell whose runs are all
    done first meets the column's `target`, and `early` where it comes within EARLY of that. A `borrowed` cell has its
    dataset's settings until it is tuned by itself. Where cases are averaged, `cases` has the mean of each.
    """

    asked: int
    done: int
    stopped: int
    auc: Spread | None
    precision: Spread | None = None
    validation: Spread | None = None
    selected: Spread | None = None
    curve: tuple[Point, ...] = ()
    paper: Printed | None = None
    best: bool = False
    p_value: float | None = None
    versus: Mapping[str, float | None] = field(default_factory=dict)
    target: float | None = None
    reach: Reach | None = None
    early: Reach | None = None
    borrowed: bool = False
    cases: tuple[float | None, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether every run is done."""
        return self.auc is not None and self.done == self.asked


Key = tuple[str, str]
"""A row's and a column's name."""

Test = list[list[Wins]]
"""A cell's runs by case, as they are tested."""


class Filler:
    """Looks cells up in a store."""

    def __init__(self, store: RecordStore, scale: Scale, seeds: Sequence[int]) -> None:
        self._store, self._scale, self._seeds = store, scale, seeds
        self._choices = ChoiceStore(store, scale)

    def configs(self, cell: CellSpec) -> list[list[Config]]:
        """The runs of a cell, by case, with what was chosen for its row."""
        chosen = self._choices.chosen_settings(TuningJob.for_cell(cell))
        return cell_configs(self._scale, cell, chosen, self._seeds)

    def records(self, cell: CellSpec) -> list[list[Record | None]]:
        """The records of a cell's runs, by case."""
        # To say what a run is takes milliseconds, and most of a page's may never have been begun.
        begun = self._store.has_runs(self._scale.datasets[cell.column.dataset]["data"], cell.row.method)
        if not begun or self._untuned(cell):
            return [[None] * len(cell.column.seeds or self._seeds) for _ in cell.column.cases]
        return [[self._store.find_record(config) for config in case] for case in self.configs(cell)]

    def _untuned(self, cell: CellSpec) -> bool:
        """Whether its row is still to be tuned: what has run with its defaults is not its result."""
        entry, column = cell
        tried = grid_candidates(entry, TuningPlan.parse(column.grid).grid)
        return tried != [{}] and self._choices.find_or_inherit(TuningJob.for_cell(cell)) is None

    def fill(self, sheet: TableSpec) -> dict[Key, Filled]:
        """Every cell of a sheet. A column's best row is one whose runs are all done."""
        numbers = printed(sheet.name) if self._scale.published else {}
        found: dict[Key, Filled] = {}
        for column in sheet.columns:
            mine = {cell.row.name: self._cell(cell) for cell in list_cells(sheet) if cell.column is column}
            mine = self._tested(sheet, column, mine)
            target = _target([cell for row, cell in mine.items() if row in (sheet.rows[0].name, *OURS)])
            for row, cell in mine.items():
                paper, reach, early = numbers.get((row, column.name)), _met(cell, target), _met(cell, target, EARLY)
                found[row, column.name] = replace(cell, paper=paper, target=target, reach=reach, early=early)
        return found

    def _cell(self, cell: CellSpec) -> Filled:
        """What a cell says by itself."""
        cases = self.records(cell)
        flat = [record for case in cases for record in case]
        done = [record for record in flat if record and record.final_point]
        stopped = sum(bool(record and record.stopped) for record in flat)
        auc, precision, validation, selected = (_spread(cases, cell.column.average_cases, number) for number in NUMBERS)
        found = Filled(len(flat), len(done), stopped, auc, precision, validation, selected, mean_curve(done))
        borrowed = bool(cell.column.tuned_case) and self._choices.find_choice(TuningJob.for_cell(cell)) is None
        apart = [_spread([case], False, NUMBERS[0]) for case in cases] if cell.column.average_cases else []
        return replace(found, borrowed=borrowed, cases=tuple(each.mean if each else None for each in apart))

    def _tested(self, sheet: TableSpec, column: Column, mine: Mapping[str, Filled]) -> dict[str, Filled]:
        """With the tests that only a whole column can tell; a figure compares its columns, not its rows."""
        whole = {row: cell.auc.mean for row, cell in mine.items() if cell.whole and cell.auc}
        best = max(whole, key=lambda row: whole[row], default=None)
        rows = () if sheet.is_figure else sheet.rows
        tests = {entry.name: self._wins(CellSpec(entry, column)) for entry in rows if entry.name in whole}

        def against(row: str, other: str | None) -> float | None:
            one, two = tests.get(row), tests.get(other) if other else None
            if not one or not two or row == other:
                return None
            return p_value(one, two, column.test_overlap, same=column.average_cases)

        return {
            row: replace(
                cell,
                best=row == best,
                p_value=against(row, best),
                versus={ours: against(row, ours) for ours in OURS if ours in mine and ours != row},
            )
            for row, cell in mine.items()
        }

    def _wins(self, cell: CellSpec) -> Test | None:
        """Only where every run's ranks are there, and more than one run: nobody knows what another would have given."""
        found = [[self._store.load_ranks(config) for config in case] for case in self.configs(cell)]
        if sum(map(len, found)) < 2:
            return None
        whole = [[wins(ranks) for ranks in case if ranks is not None] for case in found]
        return whole if all(map(len, whole)) and list(map(len, whole)) == list(map(len, found)) else None


Number = Callable[[Record], float | None]
"""One of a finished run's numbers."""

NUMBERS: tuple[Number, ...] = (
    lambda record: record.auc,
    lambda record: record.average_precision,
    lambda record: record.final_point.validation_auc if record.final_point else None,
    lambda record: record.selected_auc,
)
"""Test AUC, average precision and validation AUC at the end, and test AUC where validation AUC was highest."""


def _spread(cases: Sequence[Sequence[Record | None]], averaged: bool, number: Number) -> Spread | None:
    """Over all runs, or over seeds of the mean over cases; what is missing is left out."""
    values = [[number(record) if record and record.final_point else None for record in case] for case in cases]
    table = np.array(values, dtype=np.float64)
    kept = table.mean(axis=0) if averaged else table.ravel()
    kept = kept[~np.isnan(kept)]
    return Spread.of(kept.tolist()) if len(kept) else None


def mean_curve(records: Sequence[Record]) -> tuple[Point, ...]:
    """The mean over runs that were evaluated in the same rounds; nothing over runs that were not."""
    if len({tuple(point.rounds for point in record.curve) for record in records}) != 1:
        return ()
    return tuple(
        Point(
            cycle=points[0].cycle,
            rounds=points[0].rounds,
            bytes=round(float(np.mean([point.bytes for point in points]))),
            auc=float(np.mean([point.auc for point in points])),
            validation_auc=None,
        )
        for points in zip(*(record.curve for record in records), strict=True)
    )


def reach(curve: Sequence[Point], target: float) -> Reach | None:
    """Where a curve first meets a target, if it does."""
    hit = next((point for point in curve if point.auc >= target), None)
    return Reach(hit.rounds, hit.bytes, hit is curve[0]) if hit else None


def _target(asked: Sequence[Filled]) -> float | None:
    """The lowest of the last AUCs, which all of these reach; None as long as one is not done."""
    if not all(cell.whole and cell.curve for cell in asked):
        return None
    return min(cell.curve[-1].auc for cell in asked)


def _met(cell: Filled, target: float | None, below: float = 0.0) -> Reach | None:
    return reach(cell.curve, target - below) if cell.whole and target is not None else None


def wanted(sheets: Sequence[TableSpec], filler: Filler, tested: bool) -> list[Config]:
    """Every run that the sheets need, in columns that are tested or in the others."""
    mine = [cell for sheet in sheets for cell in list_cells(sheet) if cell.column.tested == tested]
    return [config for cell in mine for case in filler.configs(cell) for config in case]


def marks(filled: Mapping[Key, Filled], key: Key) -> str:
    """An asterisk on a column's best row, a tilde on those not told from it, a question mark on those not tested.

    A column in which nothing was tested has no marks.
    """
    cell = filled[key]
    if not cell.whole or not any(each.p_value is not None for (_, column), each in filled.items() if column == key[1]):
        return ""
    if cell.best:
        return "*"
    if cell.p_value is None:
        return "?"
    return "~" if cell.p_value >= SIGNIFICANT else ""
