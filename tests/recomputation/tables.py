"""The cells of every table: which runs belong to one, and its mean, deviation, marks and differences."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from recomputation.differences import Interval, Shares, compare, rank_shares
from recomputation.records import BASELINES, FRAUD, IMAGES, METHODS, OURS, Records, Run, Specs, make_key

SEEDS = (0, 1, 2)
Options = Mapping[str, str]

GRIDS = dict.fromkeys(IMAGES, "full") | {
    "creditcard": "wide",
    "creditcard-mlp": "wider",
    "insurance-synthetic": "wider",
}


class Column(NamedTuple):
    """A column: its cases, its seeds, whether cases are averaged, and the job that a point of a figure is tuned by."""

    name: str
    dataset: str
    cases: Sequence[Options]
    seeds: Sequence[int]
    average: bool = False
    grid: str = "steps"
    job: str = ""
    tuned_case: Options | None = None


class Row(NamedTuple):
    """A row of a table."""

    name: str
    method: str
    options: Options


class Spread(NamedTuple):
    """A mean, its sample deviation, and over how many values."""

    mean: float
    deviation: float
    values: int


class Point(NamedTuple):
    """An evaluated cycle of a mean curve."""

    rounds: int
    bytes: int
    auc: float


@dataclass
class Cell:
    """A row in a column: the runs by case, None where there is none, and what they say."""

    cases: list[list[Run | None]]
    average: bool
    borrowed: bool
    numbers: dict[str, Spread] = field(default_factory=dict)
    mark: str = ""

    def __post_init__(self) -> None:
        """Compute the numbers."""
        for name in ("auc", "average_precision", "validation", "selected"):
            results = list(zip(*self.cases, strict=True)) if self.average else [[run] for run in self.slots]
            known = [[read_number(run, name) for run in result] for result in results]
            values = [np.mean(np.array(numbers, float)) for numbers in known if None not in numbers]
            if values:
                deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
                self.numbers[name] = Spread(float(np.mean(values)), deviation, len(values))

    @property
    def slots(self) -> list[Run | None]:
        """Every run that is asked for."""
        return [run for case in self.cases for run in case]

    @property
    def runs(self) -> list[Run]:
        """The runs that have a record."""
        return [run for run in self.slots if run]

    @property
    def finished(self) -> list[Run]:
        """The runs that reached their end."""
        return [run for run in self.runs if run.finished]

    @property
    def stopped(self) -> int:
        """The number of runs that ended early."""
        return sum(bool(run.line["stopped"]) for run in self.runs)

    @property
    def complete(self) -> bool:
        """Whether every run has finished."""
        return len(self.finished) == len(self.slots)

    @property
    def auc(self) -> Spread | None:
        """The test AUC."""
        return self.numbers.get("auc")

    @property
    def curve(self) -> list[Point]:
        """The mean over the finished runs, where they were evaluated after the same rounds."""
        curves = [run.line["curve"] for run in self.finished]
        if len({tuple(point[1] for point in curve) for curve in curves}) != 1:
            return []
        stacked = np.array([[point[1:4] for point in curve] for curve in curves]).mean(axis=0)
        return [Point(int(rounds), round(sent), float(auc)) for rounds, sent, auc in stacked]

    def reach(self, target: float | None) -> Point | None:
        """The first point of a complete cell's curve with at least the target AUC."""
        if target is None or not self.complete:
            return None
        return next((point for point in self.curve if point.auc >= target), None)


def read_number(run: Run | None, name: str) -> float | None:
    """A number of a finished run. `selected` is the test AUC in the first cycle of highest validation AUC."""
    if run is None or not run.finished:
        return None
    curve = run.line["curve"]
    if name == "validation":
        value = curve[-1][4]
    elif name == "selected":
        scored = [point for point in curve if point[4] is not None]
        value = scored[int(np.argmax([point[4] for point in scored]))][3] if scored else None
    else:
        value = run.line[name]
    return None if value is None else float(value)


class Table:
    """A table with its cells and the tests between its rows."""

    def __init__(self, name: str, specs: Specs, records: Records) -> None:
        self.name, self.text = name, specs.tables[name]
        self.kind = self.text.get("kind", "table")
        self.rows, self.columns = list_rows(name, specs), list_columns(name, specs)
        self.published = {key[1:]: mean for key, mean in specs.published.items() if key[0] == name}
        self.cells = {
            (row.name, column.name): build_cell(row, column, specs, records)
            for column in self.columns
            for row in self.rows
        }
        self.tests: dict[tuple[str, str, str], Interval | None] = {}
        if self.kind == "table":
            for column in self.columns:
                self._test_column(column, records)

    def _test_column(self, column: Column, records: Records) -> None:
        cells = {row.name: self.cells[row.name, column.name] for row in self.rows}
        means = {row: cell.auc.mean for row, cell in cells.items() if cell.complete and cell.auc}
        best = max(means, key=lambda row: means[row], default="")
        shares = {row: shares for row in means if (shares := _read_shares(cells[row], records))}
        overlap = 0.3 if column.dataset in FRAUD else 0.0
        for one, other in itertools.permutations(shares, 2):
            if one in (*OURS, best) or f"{one} minus {other}" in self.text.get("contrasts", ()):
                test = compare(shares[one], shares[other], overlap, column.average)
                self.tests[column.name, one, other] = test
        against_best = {row: self.tests.get((column.name, best, row)) for row in means}
        if any(against_best.values()):
            for row, test in against_best.items():
                mark = "?" if test is None else "~" if test.p_value >= 0.05 else ""
                cells[row].mark = "*" if row == best else mark

    @property
    def runs(self) -> dict[str, Run]:
        """All recorded runs by name."""
        return {run.name: run for cell in self.cells.values() for run in cell.runs}

    def shown(self) -> tuple[list[Row], list[Column]]:
        """The rows and columns with a result."""
        finished = [key for key, cell in self.cells.items() if cell.auc]
        rows = [row for row in self.rows if row.name in {row for row, _ in finished}]
        return rows, [column for column in self.columns if column.name in {column for _, column in finished}]

    def differences(self, between_own: bool = False) -> dict[tuple[str, str, str], tuple[float, Interval | None]]:
        """By column, CyCp method and baseline, the difference of means and its test, where both are complete."""
        found = {}
        rows, columns = self.shown()
        names = [row.name for row in rows]
        baselines = [name for name in names if name in BASELINES]
        for column in columns:
            for method in [name for name in OURS if name in names]:
                others = [*baselines, OURS[0]] if between_own and method == OURS[1] and OURS[0] in names else baselines
                for baseline in others:
                    first, second = self.cells[method, column.name], self.cells[baseline, column.name]
                    if first.complete and second.complete and first.auc and second.auc:
                        key = column.name, method, baseline
                        found[key] = first.auc.mean - second.auc.mean, self.tests.get(key)
        return found

    def published_difference(self, key: tuple[str, str, str]) -> float | None:
        """The paper's difference between two rows, if it has both."""
        column, method, baseline = key
        pair = [self.published.get((row, column)) for row in (method, baseline)]
        return None if pair[0] is None or pair[1] is None else pair[0] - pair[1]


def _read_shares(cell: Cell, records: Records) -> list[list[Shares]] | None:
    """A cell's runs by case, as they are tested; None unless there are several, all with ranks."""
    if len(cell.runs) < 2:
        return None
    stored = {run.name: ranks for run in cell.runs if (ranks := records.find_ranks(run))}
    if len(stored) < len(cell.slots):
        return None
    return [[rank_shares(*stored[run.name]) for run in case if run] for case in cell.cases]


def build_cell(row: Row, column: Column, specs: Specs, records: Records) -> Cell:
    """The runs of a cell, with the settings that were chosen for its row."""
    choice = records.choices.get(f"{column.job or column.dataset}-{row.name}")
    borrowed = bool(column.job) and choice is None
    choice = choice or records.choices.get(f"{column.dataset}-{row.name}")
    cases: list[list[Run | None]] = []
    for case in column.cases:
        settings = {} if column.grid == "none" else choice["settings"] if choice else None
        found: list[Run | None] = [None] * len(column.seeds)
        if settings is not None:
            options = specs.run_options(column.dataset, row.method, {**settings, **row.options, **case})
            keys = [make_key(row.method, {**options, "seed": seed}) for seed in column.seeds]
            found = [records.runs.get(key) for key in keys]
        cases.append(found)
    return Cell(cases, column.average, borrowed)


def list_rows(name: str, specs: Specs) -> list[Row]:
    """The rows of a table, `name=method,option=value,...`; central training has the steps of all 48 clients."""
    rows = []
    for text in specs.tables[name].get("rows", METHODS):
        label, _, rest = text.partition("=")
        method, *pairs = (rest or label).split(",")
        options = dict(pair.split("=", 1) for pair in pairs)
        options.pop("grid", None)
        rows.append(Row(label, method, options))
    if name == "creditcard":
        steps = str(48 * specs.scale["local_steps"])
        one_client = {"partition": "iid", "partition.clients": "1", "participation.groups": "1", "local-steps": steps}
        rows.append(Row("central", "fedavg", one_client))
    return rows


def list_columns(name: str, specs: Specs) -> list[Column]:
    """The columns of a table or the points of a figure."""
    text = specs.tables[name]
    if name in ("figure1", "figure2", "figure3", "intervals"):
        return [point for dataset in text["datasets"] for point in _list_points(name, dataset, specs.scale)]
    if name == "short-interval":
        return [_list_points("figure1", dataset, specs.scale)[0] for dataset in text["datasets"]]
    columns = []
    for dataset in text["datasets"]:
        repeats = [{"data-seed": str(seed)} for seed in range(text.get("splits", {}).get(dataset, 0))]
        repeats += [{"data.positive": str(label)} for label in range(text.get("classes", 0))]
        for label, options in text.get("options", {"{}": {}}).items():
            column = _make_column(label.replace("{}", dataset), dataset, options, repeats)
            grid, seeds = text.get("grid", column.grid), text.get("seeds", column.seeds)
            columns.append(column._replace(grid=grid, seeds=seeds, average=text.get("average_cases", False)))
    return columns


def _make_column(name: str, dataset: str, options: Options, repeats: Sequence[Options] = ()) -> Column:
    if dataset in FRAUD:
        repeats = repeats or [{"data-seed": str(split)} for split in range(3)]
    cases = [{**options, **repeat} for repeat in repeats or [{}]]
    return Column(name, dataset, cases, (0,) if dataset in FRAUD else SEEDS, grid=GRIDS.get(dataset, "steps"))


def _list_points(name: str, dataset: str, scale: Mapping[str, Any]) -> list[Column]:
    """The points of a figure; those that are not a table's are tuned one by one, in their first case."""
    cycles, steps, fraud = scale["cycles"], scale["local_steps"], dataset in FRAUD

    def length(count: int) -> dict[str, str]:
        return {"cycles": str(count), "evaluate-every": str(max(1, count // 50))}

    points: list[tuple[str, Options, bool]] = []
    if name in ("figure1", "intervals"):
        for value in scale["intervals"]:
            points.append((f"I{value}", {"local-steps": str(value), **length(cycles * steps // value)}, value == steps))
    elif name == "figure2":
        *sizes, group = (1, 2, 4, 6) if fraud else scale["cohorts"]
        points = [(f"M{value}", {"participation.per-round": str(value)}, False) for value in sizes]
        points.append((f"M{group}", {}, True))
    else:
        counts, usual = ((1, 2, 4, 8, 16), 8) if fraud else (scale["group_counts"], scale["groups"])
        one = {"participation.per-round": "1", "participation.assignment": "random"}
        for value in counts:
            options = {"participation.groups": str(value), **one, **length(cycles * usual // value)}
            points.append((f"K{value}", options, False))
    columns = []
    for label, changes, in_table in points:
        column = _make_column(f"{dataset}-{label}", dataset, changes)
        if not in_table:
            column = column._replace(job=column.name, tuned_case=column.cases[0])
        if name == "intervals":
            if label not in (f"I{scale['intervals'][0]}", f"I{steps}", f"I{scale['intervals'][-1]}"):
                continue
            cases = _make_column("", dataset, {"local-steps": changes["local-steps"]}).cases
            column = column._replace(cases=cases)
        columns.append(column)
    return columns
