"""What a table or figure is before anything has run: rows, columns, and the run behind every cell."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from fedauc.discovery import lookup
from fedauc.experiments.config import Config
from paper.scales import Scale, Texts

View = Literal["auc", "traffic"]
"""What cells show: test AUC, or what it takes to reach a common one."""


@dataclass(frozen=True)
class Entry:
    """A row: a method, and what it changes from its defaults. It is tuned once per dataset."""

    name: str
    method: str
    settings: Texts = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Column:
    """A column: a dataset, and what it changes; several `cases` are repetitions on other data.

    `averaged` cases count as one result per seed; otherwise every case and seed is a result of its own. Columns that
    are not `usual` run only when named. `seeds` are its own, whatever is asked for, where cases repeat a run already.
    `overlap` is the share of test rows that two cases with other test parts have in common. `grid` is tuned over where
    no other is asked for, with a row's cycles after a colon if they are not the usual ones: a wider one off the paper's
    data, where its learning rates may not reach far enough. Runs of columns that are not `tested` keep no ranks: a figure's
    points are compared with each other, not its rows. A column with a `tuned` case has settings for itself, chosen
    there; until then it has those of its dataset.
    """

    name: str
    dataset: str
    cases: tuple[Texts, ...] = ({},)
    averaged: bool = False
    usual: bool = True
    seeds: tuple[int, ...] = ()
    overlap: float = 0.0
    grid: str = "steps"
    tested: bool = True
    tuned: Texts = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Sheet:
    """A table or figure before anything has run; `precision` and `validation` ask for more numbers beside test AUC.

    Where something is `varied`, columns are its values, and are shown one below the other.
    """

    name: str
    title: str
    rows: tuple[Entry, ...]
    columns: tuple[Column, ...]
    view: View = "auc"
    precision: bool = False
    validation: bool = False
    varied: bool = False

    def narrowed(self, columns: Sequence[str], rows: Sequence[str]) -> Sheet:
        """Only the columns (the usual ones, if none is named) and rows named."""
        mine, entries = {each.name: each for each in self.columns}, {each.name: each for each in self.rows}
        kept = [lookup(f"column of {self.name}", name, mine) for name in columns]
        chosen = [lookup(f"method of {self.name}", name, entries) for name in rows]
        usual = tuple(column for column in self.columns if column.usual)
        return replace(self, columns=tuple(kept) or usual, rows=tuple(chosen) or self.rows)


class Cell(NamedTuple):
    """One row in one column of a sheet."""

    entry: Entry
    column: Column


def cells(sheet: Sheet) -> Iterator[Cell]:
    """Every cell, column by column: runs on the same data come one after another."""
    for column in sheet.columns:
        for entry in sheet.rows:
            yield Cell(entry, column)


def runs(scale: Scale, cell: Cell, tuned: Texts, seeds: Sequence[int]) -> list[list[Config]]:
    """A cell's configurations: per case, one per seed. The column wins over the row, the row over what was tuned."""
    entry, column = cell
    made = [scale.config(column.dataset, entry.method, {**tuned, **entry.settings, **case}) for case in column.cases]
    return [[seeded(config, seed) for seed in column.seeds or seeds] for config in made]


@functools.lru_cache(maxsize=8192)
def seeded(config: Config, seed: int) -> Config:
    """A configuration with another seed of training."""
    return replace(config, recipe=replace(config.recipe, seed=seed))
