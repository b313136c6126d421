"""A sheet filled from records: means, spreads, tests and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedauc.experiments.config import Config
from fedauc.experiments.paper.records import Ranks, Record, Store
from fedauc.experiments.paper.scales import Scale
from fedauc.experiments.paper.sheets import Cell, Sheet, cells, runs
from fedauc.experiments.paper.tuning import Choices
from fedauc.reports.paper.printed import Printed, printed
from fedauc.reports.paper.testing import p_value
from fedauc.reports.summary import Spread

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Filled:
    """A cell: test AUC at the end over seeds, runs done and stopped of those asked for, and the paper's number.

    `p_value` is against the column's best row, which has none itself. `reach` is (rounds, bytes), the mean over runs,
    until the test AUC of every run first was the first row's final one.
    """

    asked: int
    done: int
    stopped: int
    auc: Spread | None
    paper: Printed | None = None
    best: bool = False
    p_value: float | None = None
    reach: tuple[float, float] | None = None


Key = tuple[str, str]
"""A row's and a column's name."""


class Filler:
    """Looks cells up in a store."""

    def __init__(self, store: Store, scale: Scale, seeds: Sequence[int]) -> None:
        self._store, self._scale, self._seeds = store, scale, seeds
        self._choices = Choices(store, scale)

    def configs(self, cell: Cell) -> list[list[Config]]:
        """The runs of a cell, by case, with what was chosen for its row."""
        chosen = self._choices.settings(cell.column.dataset, cell.entry)
        return runs(self._scale, cell, chosen, self._seeds)

    def fill(self, sheet: Sheet) -> dict[Key, Filled]:
        """Every cell of a sheet. A column's best row is one whose runs are all done."""
        numbers = printed(sheet.name) if self._scale.published else {}
        found: dict[Key, Filled] = {}
        for column in sheet.columns:
            mine = {cell.entry.name: self._cell(cell) for cell in cells(sheet) if cell.column is column}
            whole = {row: cell for row, cell in mine.items() if cell.done == cell.asked}
            best = max(whole, key=lambda row: _mean(whole[row]), default=None)
            target = mine[sheet.rows[0].name].auc
            for entry in sheet.rows:
                key, cell = (entry.name, column.name), Cell(entry, column)
                other = next(each for each in sheet.rows if each.name == best) if best else entry
                found[key] = replace(
                    mine[entry.name],
                    paper=numbers.get(key),
                    best=entry.name == best,
                    p_value=None if other == entry else self._test(cell, Cell(other, column)),
                    reach=_reach(self._flat(cell), target),
                )
        return found

    def _cell(self, cell: Cell) -> Filled:
        """What a cell says by itself."""
        flat = self._flat(cell)
        done = sum(bool(record and record.final) for record in flat)
        stopped = sum(bool(record and record.stopped) for record in flat)
        return Filled(len(flat), done, stopped, _spread(self._records(cell), cell.column.averaged))

    def _flat(self, cell: Cell) -> list[Record | None]:
        return [record for case in self._records(cell) for record in case]

    def _records(self, cell: Cell) -> list[list[Record | None]]:
        return [[self._store.get(config) for config in case] for case in self.configs(cell)]

    def _test(self, cell: Cell, best: Cell) -> float | None:
        """Only where every run of both is there."""
        ours, theirs = self._ranks(cell), self._ranks(best)
        return p_value(ours, theirs) if ours and theirs else None

    def _ranks(self, cell: Cell) -> list[list[Ranks]] | None:
        found = [[self._store.ranks(config) for config in case] for case in self.configs(cell)]
        whole = [[ranks for ranks in case if ranks is not None] for case in found]
        return whole if all(map(len, whole)) and list(map(len, whole)) == list(map(len, found)) else None


def _mean(cell: Filled) -> float:
    return cell.auc.mean if cell.auc else -1.0


def _spread(cases: Sequence[Sequence[Record | None]], averaged: bool) -> Spread | None:
    """Over all runs, or over seeds of the mean over cases; what is missing is left out."""
    values = [[record.final.auc if record and record.final else np.nan for record in case] for case in cases]
    table = np.array(values)
    kept = table.mean(axis=0) if averaged else table.ravel()
    kept = kept[~np.isnan(kept)]
    return Spread.of(kept.tolist()) if len(kept) else None


def _reach(records: Sequence[Record | None], target: Spread | None) -> tuple[float, float] | None:
    """Where the curves first meet the target, if all do."""
    found = []
    for record in records:
        curve = record.curve if record else ()
        hit = next((point for point in curve if target and point.auc >= target.mean), None)
        if hit is None:
            return None
        found.append((hit.rounds, hit.bytes))
    rounds, amount = np.mean(found, axis=0)
    return float(rounds), float(amount)


def wanted(sheets: Sequence[Sheet], filler: Filler) -> list[Config]:
    """Every run that the sheets need."""
    return [config for sheet in sheets for cell in cells(sheet) for case in filler.configs(cell) for config in case]


def marks(filled: Mapping[Key, Filled], key: Key) -> str:
    """An asterisk on a column's best row, a tilde on those that the test does not tell from it."""
    cell = filled[key]
    if cell.best:
        return "*"
    return "~" if cell.p_value is not None and cell.p_value >= SIGNIFICANT else ""
