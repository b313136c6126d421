"""Every table and figure before anything has run: its rows, its columns, and the runs behind every cell.

A table is an entry of `tables.toml`. The columns of figures, which depend on the scale, are made here.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedauc.algorithms import find_methods
from fedauc.data.datasets.creditcard import HOURS
from fedauc.discovery import lookup
from fedauc.experiments.config import Config
from paper.scales import IMAGES, Options, Scale


@dataclass(frozen=True)
class Row:
    """A row: a method, and the options it changes from the method's defaults. It is tuned once per dataset.

    It is tuned over `grid`, where it has one of its own, and else over that of its column.
    """

    name: str
    method: str
    settings: Options = field(default_factory=dict, hash=False)
    grid: str = ""

    @staticmethod
    def parse(text: str) -> Row:
        """Read `name=method,option=value,...`, as a row is written in `tables.toml` and after `--row`.

        The option `grid` is the row's own grid.

        >>> Row.parse("square=cycp-pairwise,objective=square")
        Row(name='square', method='cycp-pairwise', settings={'objective': 'square'}, grid='')
        """
        name, _, rest = text.partition("=")
        method, *pairs = rest.split(",")
        if not name or not method or not all("=" in pair for pair in pairs):
            example = "square=cycp-pairwise,objective=square"
            raise ValueError(f"row is {text!r}; it must be name=method and options, such as {example}")
        lookup("method", method, find_methods())
        settings = dict(pair.split("=", 1) for pair in pairs)
        return Row(name, method, settings, settings.pop("grid", ""))


@dataclass(frozen=True)
class Column:
    """A column: a dataset, and the options it changes. Several `cases` repeat the runs on other data.

    With `average_cases`, the mean over the cases is one result per seed; otherwise every case and seed is a result.
    Columns that are not `by_default` run only when they are named. `seeds` replace the seeds asked for where the cases
    repeat a run already. `test_overlap` is the share of test rows that two cases with different test parts have in
    common. `grid` is what the rows are tuned over, with their cycles after a colon where those are not the usual ones.
    Runs of columns that are not `tested` store no ranks: the points of a figure are compared with each other, not its
    rows. A column with a `tuned_case` has settings of its own, which are tuned in that case; until then it has those of
    its dataset.
    """

    name: str
    dataset: str
    cases: tuple[Options, ...] = ({},)
    average_cases: bool = False
    by_default: bool = True
    seeds: Sequence[int] = ()
    test_overlap: float = 0.0
    grid: str = "steps"
    tested: bool = True
    tuned_case: Options = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class TableSpec:
    """The rows and columns of a table. In a figure, columns are the values of one option.

    Cells show test AUC or, of kind `traffic`, what it takes to reach a common one. `more_numbers` are shown below it.
    `contrasts` are pairs of rows that are tested against each other.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    kind: Literal["table", "figure", "traffic"] = "table"
    more_numbers: Sequence[str] = ()
    contrasts: Sequence[tuple[str, str]] = ()

    def select(self, columns: Sequence[str], rows: Sequence[str]) -> TableSpec:
        """The table with only the named rows and columns; by default all rows, and the columns shown by default.

        A table without such columns has all of them.
        """
        columns_by_name = {column.name: column for column in self.columns}
        rows_by_name = {row.name: row for row in self.rows}
        selected_columns = tuple(lookup(f"column of {self.name}", name, columns_by_name) for name in columns)
        selected_rows = tuple(lookup(f"method of {self.name}", name, rows_by_name) for name in rows)
        default_columns = tuple(column for column in self.columns if column.by_default)
        return replace(
            self, columns=selected_columns or default_columns or self.columns, rows=selected_rows or self.rows
        )

    def add_rows(self, rows: Sequence[Row]) -> TableSpec:
        """The table with more rows below its own."""
        for row in rows:
            if row.name in {known.name for known in self.rows}:
                raise ValueError(f"{self.name} already has a row {row.name!r}; give yours another name")
        return replace(self, rows=(*self.rows, *rows))


class CellSpec(NamedTuple):
    """One row in one column of a table."""

    row: Row
    column: Column

    @property
    def grid(self) -> str:
        """What the row is tuned over here."""
        return self.row.grid or self.column.grid


def list_cells(table: TableSpec) -> Iterator[CellSpec]:
    """Every cell, column by column, so that runs on the same data follow each other."""
    return (CellSpec(row, column) for column in table.columns for row in table.rows)


def cell_configs(scale: Scale, cell: CellSpec, tuned: Options, seeds: Sequence[int]) -> list[list[Config]]:
    """The runs of a cell: per case, one per seed. The column wins over the row, and the row over tuned settings."""
    row, column = cell
    options = [{**tuned, **row.settings, **case} for case in column.cases]
    configs = [scale.build_config(column.dataset, row.method, case) for case in options]
    return [[_with_seed(config, seed) for seed in column.seeds or seeds] for config in configs]


@functools.lru_cache(maxsize=8192)
def _with_seed(config: Config, seed: int) -> Config:
    return replace(config, recipe=replace(config.recipe, seed=seed))


# -------------------------------------------------------------------------------------------------- rows and columns

METHODS = ("cycp-fedavg", "a-fedavg", "a-scaffold", "rs-minimax", "rs-pairwise", "cycp-minimax", "cycp-pairwise")
"""The rows of every table of the paper, in its order."""

OURS = ("cycp-minimax", "cycp-pairwise")
"""The rows of its figures."""

ALL_METHODS = (*METHODS, "fedavg", "scaffold", "coda-plus", "codasca", "fedxl1")
"""The methods of the paper's tables, and further ones."""

PUBLISHED = ("cifar10", "cifar100", "chestmnist", "insurance")
CIFAR = PUBLISHED[:2]
FRAUD = ("creditcard", "creditcard-mlp")
"""Card fraud with a linear model and with a hidden layer."""

# Image models are tuned in full runs, because short ones rank learning rates differently. Card fraud needs large
# learning rates; with only 120 cycles, the many candidates of the wider grid would have one or two cycles each.
TUNING_GRIDS = dict.fromkeys(IMAGES, "full")
TUNING_GRIDS |= {"creditcard": "wide", "creditcard-mlp": "wider:480", "insurance-synthetic": "wider:480"}

FRAUD_COHORTS = (1, 2, 4, 6)
"""Clients per round, of 48 clients in 8 groups of six."""

FRAUD_GROUPS = (1, 2, 4, 8, 16)
"""Numbers of groups of the 48 clients; the data have eight."""

FRAUD_SPLITS = 3
"""Versions of the data of card fraud, unless a table has another number."""


def make_column(name: str, dataset: str, options: Options, cases: Sequence[Options] = (), **settings: Any) -> Column:
    """A column in which some options are changed; `{}` in the name is replaced by the dataset."""
    defaults: dict[str, Any] = {"by_default": dataset in PUBLISHED, "grid": TUNING_GRIDS.get(dataset, "steps")}
    if dataset in FRAUD:
        defaults |= {"seeds": (0,), "test_overlap": 0.3}
        cases = cases or _split_cases(FRAUD_SPLITS)
    all_options = tuple({**options, **case} for case in cases or [{}])
    return Column(name.format(dataset), dataset, all_options, **(defaults | settings))


def make_point(dataset: str, value: str, options: Options, in_table: bool = False) -> Column:
    """A point of a figure. Runs that a table has too store their ranks; other points are tuned by themselves."""
    column = make_column(f"{{}}-{value}", dataset, options)
    if in_table:
        return column
    return replace(column, tested=False, tuned_case=column.cases[0], grid="lower" if dataset in IMAGES else column.grid)


def _split_cases(splits: int) -> list[Options]:
    return [{"data-seed": str(seed)} for seed in range(splits)]


def _run_length(cycles: int) -> dict[str, str]:
    return {"cycles": str(cycles), "evaluate-every": str(max(1, cycles // 50))}


def _interval_columns(scale: Scale, dataset: str) -> list[Column]:
    """So many local steps I per round, at the same total number of local steps."""
    points = []
    for steps in scale.intervals:
        options = {"local-steps": str(steps), **_run_length(scale.cycles * scale.local_steps // steps)}
        points.append(make_point(dataset, f"I{steps}", options, in_table=steps == scale.local_steps))
    return points


def _short_interval_columns(scale: Scale, dataset: str) -> list[Column]:
    """The first point of Figure 1, where rows are tested against each other."""
    return [replace(_interval_columns(scale, dataset)[0], tested=True)]


def _equal_round_columns(scale: Scale, dataset: str) -> list[Column]:
    """Points of Figure 1, which share its settings, but with the scale's number of cycles."""
    shown = (scale.intervals[0], scale.local_steps, scale.intervals[-1])
    points = zip(scale.intervals, _interval_columns(scale, dataset), strict=True)
    pairs = [
        (point, make_column("", dataset, {"local-steps": str(steps)})) for steps, point in points if steps in shown
    ]
    return [replace(point, cases=column.cases) for point, column in pairs]


def _cohort_columns(scale: Scale, dataset: str) -> list[Column]:
    """So many clients M per round; the last number is the whole group, as in the tables."""
    *sizes, group = FRAUD_COHORTS if dataset in FRAUD else scale.cohorts
    points = [make_point(dataset, f"M{size}", {"participation.per-round": str(size)}) for size in sizes]
    return [*points, make_point(dataset, f"M{group}", {}, in_table=True)]


def _group_columns(scale: Scale, dataset: str) -> list[Column]:
    """So many groups K with one client per round, at the same number of rounds."""
    counts, default = scale.group_counts, scale.groups
    if dataset in FRAUD and scale.published:
        counts, default = FRAUD_GROUPS, FRAUD_GROUPS[-2]
    points, one_client = [], {"participation.per-round": "1", "participation.assignment": "random"}
    for groups in counts:
        options = {"participation.groups": str(groups), **one_client, **_run_length(scale.cycles * default // groups)}
        points.append(make_point(dataset, f"K{groups}", options))
    return points


# ------------------------------------------------------------------------------------------------------------- tables

TEXTS: Mapping[str, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "tables.toml").read_text())

TABLES = tuple(TEXTS)
"""The names of all tables and figures that come from runs."""


def describe_table(name: str) -> str:
    """What a table is about, with a line for each paragraph."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in TEXTS[name]["about"].split("\n\n"))


def build_tables(scale: Scale) -> dict[str, TableSpec]:
    """Every table and figure that comes from runs, by name."""
    specs = {}
    for name, text in TEXTS.items():
        rows = [Row.parse(row if "=" in row else f"{row}={row}") for row in text.get("rows", METHODS)]
        if name == "creditcard":
            # Logistic regression by SGD at one client that holds every row, with the local steps of all clients.
            one_client = {"partition": "iid", "partition.clients": "1", "participation.groups": "1"}
            rows.append(Row("central", "fedavg", one_client | {"local-steps": str(HOURS * scale.local_steps)}))
        columns = list[Column]()
        for dataset in text["datasets"]:
            columns += FIGURES[name](scale, dataset) if name in FIGURES else _table_columns(text, scale, dataset)
        settings: dict[str, Any] = {key: text[key] for key in ("kind", "more_numbers") if key in text}
        settings["contrasts"] = tuple(tuple(pair.split(" minus ")) for pair in text.get("contrasts", ()))
        specs[name] = TableSpec(name, text["title"], tuple(rows), tuple(columns), **settings)
    return specs


def _table_columns(text: Mapping[str, Any], scale: Scale, dataset: str) -> list[Column]:
    cases = _split_cases(text.get("splits", {}).get(dataset, 0))
    cases += [{scale.positive_option: str(positive)} for positive in range(text.get("classes", 0))]
    settings = {key: text[key] for key in ("average_cases", "by_default", "grid", "seeds") if key in text}
    options = text.get("options", {"{}": {}})
    return [make_column(name, dataset, options[name], cases, **settings) for name in options]


FIGURES: Mapping[str, Callable[[Scale, str], list[Column]]] = {
    "figure1": _interval_columns,
    "figure2": _cohort_columns,
    "figure3": _group_columns,
    "intervals": _equal_round_columns,
    "short-interval": _short_interval_columns,
}
"""What makes the columns of a figure on a dataset, or those of a table with points of a figure."""
