"""Every table and figure before anything has run: its rows, its columns, and the runs behind every cell.

A table is one line of `build_tables`; `tables.toml` has its title and its text on the page of results.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedauc.algorithms import find_methods
from fedauc.data.datasets.creditcard import HOURS
from fedauc.discovery import lookup
from fedauc.experiments.config import Config
from paper.scales import IMAGES, Options, Scale

View = Literal["auc", "traffic"]
"""What cells show: test AUC, or what it takes to reach a common one."""


@dataclass(frozen=True)
class Row:
    """A row: a method, and the options it changes from the method's defaults. It is tuned once per dataset."""

    name: str
    method: str
    settings: Options = field(default_factory=dict, hash=False)

    @staticmethod
    def parse(text: str) -> Row:
        """Read `name=method,option=value,...`, which is how a command names a row that the tables do not have.

        >>> Row.parse("square=cycp-pairwise,objective=square")
        Row(name='square', method='cycp-pairwise', settings={'objective': 'square'})
        """
        name, _, rest = text.partition("=")
        method, *pairs = rest.split(",")
        if not name or not method or not all("=" in pair for pair in pairs):
            example = "square=cycp-pairwise,objective=square"
            raise ValueError(f"row is {text!r}; it must be name=method and options, such as {example}")
        lookup("method", method, find_methods())
        return Row(name, method, dict(pair.split("=", 1) for pair in pairs))


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
    seeds: tuple[int, ...] = ()
    test_overlap: float = 0.0
    grid: str = "steps"
    tested: bool = True
    tuned_case: Options = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class TableSpec:
    """The rows and columns of a table or figure. In a figure, columns are the values of one option."""

    name: str
    title: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    view: View = "auc"
    show_precision: bool = False
    show_validation: bool = False
    is_figure: bool = False

    def select(self, columns: Sequence[str], rows: Sequence[str]) -> TableSpec:
        """The table with only the named rows and columns; by default all rows, and the columns shown by default."""
        columns_by_name = {column.name: column for column in self.columns}
        rows_by_name = {row.name: row for row in self.rows}
        selected_columns = tuple(lookup(f"column of {self.name}", name, columns_by_name) for name in columns)
        selected_rows = tuple(lookup(f"method of {self.name}", name, rows_by_name) for name in rows)
        default_columns = tuple(column for column in self.columns if column.by_default)
        return replace(self, columns=selected_columns or default_columns, rows=selected_rows or self.rows)

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


def list_cells(table: TableSpec) -> Iterator[CellSpec]:
    """Every cell, column by column, so that runs on the same data follow each other."""
    return (CellSpec(row, column) for column in table.columns for row in table.rows)


def cell_configs(scale: Scale, cell: CellSpec, tuned: Options, seeds: Sequence[int]) -> list[list[Config]]:
    """The runs of a cell: per case, one per seed. The column wins over the row, and the row over tuned settings."""
    row, column = cell
    options = [{**tuned, **row.settings, **case} for case in column.cases]
    configs = [scale.build_config(column.dataset, row.method, case) for case in options]
    return [[with_seed(config, seed) for seed in column.seeds or seeds] for config in configs]


@functools.lru_cache(maxsize=8192)
def with_seed(config: Config, seed: int) -> Config:
    """A configuration with another seed of training."""
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
STAND_IN, SYNTHETIC = "chest-stand-in", "insurance-synthetic"

FRAUD = {"creditcard": "wide", "creditcard-mlp": "wider:480"}
"""Card fraud with a linear model and with a hidden layer, and the grids they are tuned over. Both need large learning
rates; with only 120 cycles, the many candidates of the wider grid would have one or two cycles each."""

FRAUD_COHORTS = (1, 2, 4, 6)
"""Clients per round, of 48 clients in 8 groups of six."""

FRAUD_GROUPS = (1, 2, 4, 8, 16)
"""Numbers of groups of the 48 clients; the data have eight."""


def _method_rows(methods: Sequence[str]) -> tuple[Row, ...]:
    return tuple(Row(method, method) for method in methods)


def _surrogate_rows(*objectives: str) -> tuple[Row, ...]:
    return tuple(Row(objective, "cycp-pairwise", {"objective": objective}) for objective in objectives)


def _dataset_column(name: str, dataset: str, *cases: Options) -> Column:
    """A dataset's column. Image models are tuned in full runs, because short ones rank learning rates differently."""
    return Column(name, dataset, cases or ({},), grid="full" if dataset in IMAGES else "steps")


def _dataset_columns(*cases: Options) -> tuple[Column, ...]:
    """A column for every dataset; the stand-in is run only when it is named."""
    stand_in = replace(_dataset_column(STAND_IN, STAND_IN, *cases), by_default=False)
    return (*(_dataset_column(name, name, *cases) for name in PUBLISHED), stand_in)


def _fraud_column(dataset: str, suffix: str = "", case: Options | None = None, splits: int = 3) -> Column:
    """A column of card fraud over several splits, which is run only when it is named."""
    cases = tuple({**(case or {}), "data-seed": str(seed)} for seed in range(splits))
    return Column(dataset + suffix, dataset, cases, by_default=False, seeds=(0,), test_overlap=0.3, grid=FRAUD[dataset])


def _figure_point(dataset: str, value: str, case: Options, tested: bool = False) -> Column:
    """A point of a figure. Runs that a table has too store their ranks; other points are tuned by themselves."""
    if dataset in FRAUD:
        column = _fraud_column(dataset, f"-{value}", case)
    else:
        column = _dataset_column(f"{dataset}-{value}", dataset, case)
    if tested:
        return column
    return replace(column, tested=False, tuned_case=column.cases[0], grid="lower" if dataset in IMAGES else column.grid)


def _skew_columns(dataset: str) -> tuple[Column, ...]:
    return tuple(
        _dataset_column(f"dir{skew}-flip{flip}", dataset, {"partition.concentration": skew, "flip-positives": flip})
        for skew in ("0.1", "10")
        for flip in ("0", "0.2")
    )


def _client_columns() -> tuple[Column, ...]:
    skew = {"partition.concentration": "0.1"}
    sizes = {
        "50": skew | {"partition.clients": "50"},
        "200": skew | {"partition.clients": "200", "participation.per-round": "10"},
    }
    return tuple(_dataset_column(f"{name}-{count}", name, sizes[count]) for name in CIFAR for count in sizes)


def _interval_columns(scale: Scale) -> tuple[Column, ...]:
    """So many local steps per round, at the same total number of local steps."""
    columns = []
    for dataset in (*PUBLISHED, *FRAUD):
        for steps in scale.intervals:
            cycles = scale.cycles * scale.local_steps // steps
            case = {"local-steps": str(steps), "cycles": str(cycles), "evaluate-every": str(max(1, cycles // 50))}
            columns.append(_figure_point(dataset, f"I{steps}", case, steps == scale.local_steps))
    return tuple(columns)


def _equal_round_columns(scale: Scale) -> tuple[Column, ...]:
    """Points of Figure 1, which share its settings, but with the scale's number of cycles."""
    suffixes = tuple(f"-I{steps}" for steps in (scale.intervals[0], scale.local_steps, scale.intervals[-1]))
    return tuple(
        replace(
            point,
            cases=tuple(
                {name: case[name] for name in case if name not in ("cycles", "evaluate-every")} for case in point.cases
            ),
        )
        for point in _interval_columns(scale)
        if point.dataset in (*CIFAR, *FRAUD) and point.name.endswith(suffixes)
    )


def _cohort_columns(scale: Scale) -> tuple[Column, ...]:
    columns = []
    for dataset in (*CIFAR, *FRAUD):
        *parts, whole = FRAUD_COHORTS if dataset in FRAUD else scale.cohorts
        columns += [_figure_point(dataset, f"M{size}", {"participation.per-round": str(size)}) for size in parts]
        columns.append(_figure_point(dataset, f"M{whole}", {}, tested=True))
    return tuple(columns)


def _group_columns(scale: Scale) -> tuple[Column, ...]:
    columns = []
    for dataset in (*CIFAR, *FRAUD):
        own = dataset in FRAUD and scale.published
        rounds = scale.cycles * (FRAUD_GROUPS[-2] if own else scale.groups)
        for groups in FRAUD_GROUPS if own else scale.group_counts:
            cycles = rounds // groups
            case = {"participation.groups": str(groups), "cycles": str(cycles), "participation.per-round": "1"}
            case |= {"evaluate-every": str(max(1, cycles // 50)), "participation.assignment": "random"}
            columns.append(_figure_point(dataset, f"K{groups}", case))
    return tuple(columns)


def _class_columns(scale: Scale) -> tuple[Column, ...]:
    cases = tuple({scale.positive_option: str(positive)} for positive in range(5))
    columns = (_dataset_column(name, name, *cases) for name in CIFAR)
    return tuple(replace(column, average_cases=True, seeds=(0,)) for column in columns)


def _noise_columns() -> tuple[Column, ...]:
    cases = {share: {"flip-positives": share, "flip-negatives": share} for share in ("0.01", "0.05", "0.1")}
    images = (_dataset_column(f"{name}-{share}", name, case) for name in CIFAR for share, case in cases.items())
    return (*images, *(_fraud_column(name, f"-{share}", case) for name in FRAUD for share, case in cases.items()))


def _surrogate_table_rows() -> tuple[Row, ...]:
    before = _surrogate_rows("square", "squared-hinge", "pairwise-logistic")
    return (*_method_rows(OURS[:1]), *before, *_method_rows(OURS[1:]), *_surrogate_rows("barrier-hinge", "qnorm-hinge"))


def central_row(scale: Scale, clients: int) -> Row:
    """Logistic regression by SGD at one client that holds every row, with the local steps of all clients."""
    steps = {"local-steps": str(clients * scale.local_steps)}
    return Row("central", "fedavg", {"partition": "iid", "partition.clients": "1", "participation.groups": "1"} | steps)


# ------------------------------------------------------------------------------------------------------------- tables

TEXTS: Mapping[str, Mapping[str, Any]] = tomllib.loads((Path(__file__).parent / "tables.toml").read_text())

TABLES = tuple(TEXTS)
"""The names of all tables and figures that come from runs."""


def describe_table(name: str) -> str:
    """What a table is about, with a line for each paragraph."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in TEXTS[name]["about"].split("\n\n"))


def _listed_rows(name: str) -> list[Row]:
    rows = TEXTS[name]["rows"].items()
    return [Row(label, row["method"], {key: row[key] for key in row if key != "method"}) for label, row in rows]


def _listed_columns(name: str, seeds: tuple[int, ...] = (0,)) -> list[Column]:
    """Columns of a search on CIFAR-10, whose rows have fixed settings."""
    columns = TEXTS[name]["columns"].items()
    return [Column(label, "cifar10", (case,), seeds=seeds, grid="none") for label, case in columns]


def _make_spec(
    name: str, columns: Sequence[Column], rows: Sequence[Row] = _method_rows(METHODS), **settings: Any
) -> TableSpec:
    return TableSpec(name, TEXTS[name]["title"], tuple(rows), tuple(columns), **settings)


def build_tables(scale: Scale) -> dict[str, TableSpec]:
    """Every table and figure that comes from runs, by name."""
    datasets, fraud = _dataset_columns(), tuple(map(_fraud_column, FRAUD))
    synthetic = Column(SYNTHETIC, SYNTHETIC, by_default=False, grid="wider:480")
    removals = [{"data-seed": str(seed)} for seed in range(3)]
    splits = [_fraud_column(name, splits=5) for name in FRAUD]
    figure: dict[str, Any] = {"rows": _method_rows(OURS), "is_figure": True}
    noise_rows = (*_method_rows(("cycp-fedavg", *OURS)), *_surrogate_rows("square", "barrier-hinge"))
    fraud_rows = (*_method_rows(ALL_METHODS), central_row(scale, HOURS))
    specs = [
        _make_spec("table1", (*datasets, synthetic)),
        _make_spec("table2", _dataset_columns({"flip-positives": "0.2"})),
        _make_spec("table3", _skew_columns("cifar10")),
        _make_spec("table4", _skew_columns("cifar100")),
        _make_spec("table5", _skew_columns("chestmnist")),
        _make_spec("table8", _client_columns()),
        _make_spec("table9", [_dataset_column(name, name, *removals) for name in CIFAR]),
        _make_spec("figure1", _interval_columns(scale), **figure),
        _make_spec("figure2", _cohort_columns(scale), **figure),
        _make_spec("figure3", _group_columns(scale), **figure),
        _make_spec("intervals", _equal_round_columns(scale), **figure),
        _make_spec("classes", _class_columns(scale)),
        _make_spec(
            "creditcard", [replace(column, by_default=True) for column in splits], fraud_rows, show_precision=True
        ),
        _make_spec("traffic", (*datasets[:-1], synthetic, *splits), view="traffic"),
        _make_spec("schedules", _listed_columns("schedules"), _listed_rows("schedules"), show_validation=True),
        _make_spec("batches", _listed_columns("batches"), _listed_rows("batches"), show_validation=True),
        _make_spec("alike", _listed_columns("alike", seeds=()), _listed_rows("alike")),
        _make_spec("ablation", (*datasets[:2], *fraud), _listed_rows("ablation")),
        _make_spec("noise", _noise_columns(), noise_rows),
        _make_spec("surrogates", (*datasets, *fraud), _surrogate_table_rows()),
    ]
    return {spec.name: spec for spec in specs}
