"""Every table and figure before anything has run: its rows, its columns, and the runs behind every cell.

A table is one function below, whose docstring is its text on the page of results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

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


# ------------------------------------------------------------------------------------------------- the paper's tables

METHODS = ("cycp-fedavg", "a-fedavg", "a-scaffold", "rs-minimax", "rs-pairwise", "cycp-minimax", "cycp-pairwise")
"""The rows of every table of the paper, in its order."""

OURS = ("cycp-minimax", "cycp-pairwise")
"""The rows of its figures."""

PUBLISHED = ("cifar10", "cifar100", "chestmnist", "insurance")
STAND_INS = ("chest-stand-in",)
SYNTHETIC = "insurance-synthetic"

FRAUD = {"creditcard": "wide", "creditcard-mlp": "wider:480"}
"""Card fraud with a linear model and with a hidden layer, and the grids they are tuned over. Both need large learning
rates; with only 120 cycles, the many candidates of the wider grid would have one or two cycles each."""

FRAUD_COHORTS = (1, 2, 4, 6)
"""Clients per round, of 48 clients in 8 groups of six."""

FRAUD_GROUPS = (1, 2, 4, 8, 16)
"""Numbers of groups of the 48 clients; the data have eight."""

ALL_METHODS = (*METHODS, "fedavg", "scaffold", "coda-plus", "codasca", "fedxl1")
"""The methods of the paper's tables, and further ones."""


def original_labels(scale: Scale) -> TableSpec:
    """The original labels. Images are assigned to 100 clients by a Dirichlet distribution, insurance data by state.

    Runs have 100 cycles of 10 groups, in which all clients of a group take part, with 16 local steps on batches of 32
    examples. The model is ResNet-18 with the ImageNet stem and GroupNorm on CIFAR, DenseNet-121 on chest images, and a
    linear model on insurance data. On images, the classes in a batch, the weighting of clients and the weight decay
    differ by method (see `batches`): a-fedavg and a-scaffold use the settings of cycp-fedavg, and rs-minimax and
    rs-pairwise those of the cyclic methods. On images, two learning rates are tuned for each row, while λ, the proximal
    weight and the amplification are fixed.
    """
    columns = (*_dataset_columns(), Column(SYNTHETIC, SYNTHETIC, by_default=False, grid="wider:480"))
    return TableSpec("table1", "Table 1: original labels, dir = 0.5", _method_rows(METHODS), columns)


def flipped_labels(scale: Scale) -> TableSpec:
    """As Table 1, but 20 % of the training positives are labelled negative."""
    columns = _dataset_columns({"flip-positives": "0.2"})
    return TableSpec("table2", "Table 2: flipped labels, dir = 0.5, flip = 20 %", _method_rows(METHODS), columns)


def cifar10_heterogeneity(scale: Scale) -> TableSpec:
    """Heterogeneity and label noise on CIFAR-10."""
    return _skew_table("table3", "cifar10", "CIFAR-10")


def cifar100_heterogeneity(scale: Scale) -> TableSpec:
    """Heterogeneity and label noise on CIFAR-100."""
    return _skew_table("table4", "cifar100", "CIFAR-100")


def chestmnist_heterogeneity(scale: Scale) -> TableSpec:
    """Heterogeneity and label noise on ChestMNIST."""
    return _skew_table("table5", "chestmnist", "ChestMNIST")


def client_counts(scale: Scale) -> TableSpec:
    """50 and 200 clients. All clients of a group take part with groups of 5, and ten at a time with groups of 20."""
    sizes: dict[str, Options] = {"50": {}, "200": {"participation.per-round": "10"}}
    columns = tuple(
        _dataset_column(f"{name}-{count}", name, {**_skew_case("0.1"), "partition.clients": count, **cohort})
        for name in PUBLISHED[:2]
        for count, cohort in sizes.items()
    )
    return TableSpec("table8", "Table 8: number of clients, dir = 0.1, flip = 0", _method_rows(METHODS), columns)


def repeated_removal(scale: Scale) -> TableSpec:
    """Three versions of the data, which differ in split, removed positives and partition."""
    draws = tuple({"data-seed": str(seed)} for seed in range(3))
    columns = tuple(replace(_dataset_column(name, name), cases=draws) for name in PUBLISHED[:2])
    return TableSpec("table9", "Table 9: repeated random removal, dir = 0.5", _method_rows(METHODS), columns)


# ------------------------------------------------------------------------------------------------ the paper's figures


def communication_intervals(scale: Scale) -> TableSpec:
    """The communication interval I, at the same total number of local steps. The paper finds no loss with a long one.

    Points that are not part of a table are tuned one by one, on images over three learning rates instead of two. They
    have the batches, weighting and weight decay of the table.
    """
    columns = []
    for dataset in (*PUBLISHED, *FRAUD):
        for steps in scale.intervals:
            columns.append(
                _figure_point(dataset, f"I{steps}", _interval_case(scale, steps), steps == scale.local_steps)
            )
    title = "Figure 1: communication interval I, equal local steps"
    return TableSpec("figure1", title, _method_rows(OURS), tuple(columns), is_figure=True)


def clients_per_round(scale: Scale) -> TableSpec:
    """Clients per round M, out of the same groups; the largest M is the whole group. The paper finds more to be faster.

    Points that are not part of a table are tuned one by one, on images over three learning rates instead of two. They
    have the batches, weighting and weight decay of the table. The AUC to reach is the lowest final AUC of all points,
    and .02 less.
    """
    columns = []
    for dataset in (*PUBLISHED[:2], *FRAUD):
        cohorts = FRAUD_COHORTS if dataset in FRAUD else scale.cohorts
        for size in cohorts:
            whole = size == cohorts[-1]
            columns.append(
                _figure_point(dataset, f"M{size}", {} if whole else {"participation.per-round": str(size)}, whole)
            )
    return TableSpec(
        "figure2", "Figure 2: clients per round M, flip = 0", _method_rows(OURS), tuple(columns), is_figure=True
    )


def group_counts(scale: Scale) -> TableSpec:
    """The number of groups K with one client per round, at the same number of rounds; the groups are random.

    The paper (in its appendix) finds more groups to be faster in general. CyCp-Pairwise needs K more rounds, which only
    compute scores, at the start and after each stage that continues from a mean model. Points are tuned one by one, as
    in Figure 2. The AUC to reach is the lowest final AUC of all points, so that a K that collapses makes it easy for
    the others.
    """
    columns = []
    for dataset in (*PUBLISHED[:2], *FRAUD):
        own = dataset in FRAUD and scale.published
        rounds = scale.cycles * (FRAUD_GROUPS[-2] if own else scale.groups)
        for groups in FRAUD_GROUPS if own else scale.group_counts:
            cycles = rounds // groups
            case = {"participation.groups": str(groups), "cycles": str(cycles), "participation.per-round": "1"}
            case |= {"evaluate-every": str(max(1, cycles // 50)), "participation.assignment": "random"}
            columns.append(_figure_point(dataset, f"K{groups}", case))
    title = "Figure 3: number of groups K, M = 1, equal rounds"
    return TableSpec("figure3", title, _method_rows(OURS), tuple(columns), is_figure=True)


# --------------------------------------------------------------------------------------------------- beyond the paper


def intervals_at_equal_rounds(scale: Scale) -> TableSpec:
    """As Figure 1, but at the same number of rounds, so that a longer interval has more local steps in total.

    Points have the settings of Figure 1.
    """
    columns = []
    for dataset in (*PUBLISHED[:2], *FRAUD):
        for steps in (scale.intervals[0], scale.local_steps, scale.intervals[-1]):
            point = _figure_point(dataset, f"I{steps}", _interval_case(scale, steps), steps == scale.local_steps)
            cases = tuple(_drop_length(case) for case in point.cases)
            columns.append(replace(point, cases=cases))
    title = "Communication interval I, equal rounds"
    return TableSpec("intervals", title, _method_rows(OURS), tuple(columns), is_figure=True)


def mean_over_classes(scale: Scale) -> TableSpec:
    """The image columns of Table 1 as the mean over five positive classes, since the paper does not name its class.

    Each class has one run per method, so that there is no standard deviation over runs, with the settings that Table 1
    tuned for class 0. In brackets is what the paper's Table 1 has for its class.
    """
    cases = tuple({scale.positive_option: str(positive)} for positive in range(5))
    columns = tuple(
        replace(_dataset_column(name, name), cases=cases, average_cases=True, seeds=(0,)) for name in PUBLISHED[:2]
    )
    return TableSpec("classes", "Table 1 as the mean over positive classes 0-4", _method_rows(METHODS), columns)


def scores_and_weighting(scale: Scale) -> TableSpec:
    """How raw outputs become scores, and how clients are weighted."""
    rows = tuple(
        Row(f"{method}-{score}-{weighting}", method, {"objective.score": score, "weighting": weighting})
        for method in OURS
        for score in ("identity", "sigmoid")
        for weighting in ("clients", "pooled", "paper")
    )
    return TableSpec("ablation", "Scores and weighting", rows, (*_dataset_columns()[:2], *map(_fraud_column, FRAUD)))


def rounds_and_bytes(scale: Scale) -> TableSpec:
    """Rounds and bytes to an AUC that all CyCp methods reach; the runs are those of Table 1 and of card fraud."""
    fraud = tuple(replace(column, by_default=False) for column in card_fraud(scale).columns)
    known = tuple(column for column in original_labels(scale).columns if column.dataset not in STAND_INS)
    columns = (*known, *fraud)
    return TableSpec("traffic", "Rounds and bytes to a common AUC", _method_rows(METHODS), columns, "traffic")


def two_sided_noise(scale: Scale) -> TableSpec:
    """Labels flipped in both directions; the sigmoid and the barrier hinge are symmetric losses.

    A column's number is the share of each class that is flipped. The row `cycp-pairwise` has the sigmoid loss.
    """
    cases = {share: {"flip-positives": share, "flip-negatives": share} for share in ("0.01", "0.05", "0.1")}
    columns = tuple(
        _dataset_column(f"{name}-{share}", name, case) for name in PUBLISHED[:2] for share, case in cases.items()
    )
    columns += tuple(_fraud_column(name, f"-{share}", case) for name in FRAUD for share, case in cases.items())
    rows = (*_method_rows(("cycp-fedavg", *OURS)), *(_surrogate_row(name) for name in ("square", "barrier-hinge")))
    return TableSpec("noise", "Two-sided label noise", rows, columns)


def learning_rate_schedules(scale: Scale) -> TableSpec:
    """Learning rates that stay or fall tenfold after 1/2 and 3/4 of the cycles, last or mean models, and weight decay.

    This search decided the learning-rate schedule of image models by validation AUC; `batches` starts from
    `constant-mean-1e-3`. Nothing else is tuned here. Batches have 16 positives and 16 negatives, and all clients have
    the same weight. A mean model is the mean over the rounds of a stage, and the next stage starts from it.
    """
    even = {"positives": "16", "negatives": "16", "weighting": "clients"}
    fixed: dict[str, tuple[str, Options]] = {
        "cycp-fedavg-0.1": ("cycp-fedavg", {"learning-rate": "0.1"}),
        "cycp-minimax-0.01": ("cycp-minimax", {"learning-rate": "0.01", "algorithm.prox": "0.1"} | even),
        "cycp-pairwise-0.03": ("cycp-pairwise", {"learning-rate": "0.03"} | even),
        "cycp-pairwise-0.1": ("cycp-pairwise", {"learning-rate": "0.1"} | even),
    }
    rows = tuple(Row(name, method, settings) for name, (method, settings) in fixed.items())
    ways = {
        "falling": ("0.1", "last", "0.0001"),
        "falling-mean": ("0.1", "round_mean", "0.0001"),
        "constant-mean": ("1", "round_mean", "0.0001"),
        "constant-mean-1e-3": ("1", "round_mean", "0.001"),
    }
    columns = []
    for name, (decay, output, weight_decay) in ways.items():
        case = {"stages.decay": decay, "stage-output": output, "algorithm.weight-decay": weight_decay}
        columns.append(Column(f"cifar10-{name}", "cifar10", (case,), seeds=(0,), grid="none"))
    title = "Learning rates, stage means and weight decay, dir = 0.5"
    return TableSpec("schedules", title, rows, tuple(columns), show_validation=True)


def batch_composition(scale: Scale) -> TableSpec:
    """Positives and negatives in a batch, the weighting of clients, and weight decay, at two or three learning rates.

    This search decided the remaining settings of image models by validation AUC: each method uses the best of its rows.
    FedAvg draws 32 examples of any class. Nothing else is tuned here, and a dash was not tried. The search began after
    the test AUCs of `alike` were known.
    """
    rows = [Row(f"cycp-fedavg-{step}", "cycp-fedavg", {"learning-rate": step}) for step in ("0.3", "0.1", "0.03")]
    own: dict[str, tuple[Options, tuple[str, str]]] = {
        "cycp-minimax": ({"algorithm.prox": "0.01"}, ("0.01", "0.003")),
        "cycp-pairwise": ({}, ("0.1", "0.03")),
    }
    for method, (settings, steps) in own.items():
        for positives, negatives in ("16", "16"), ("4", "28"):
            batch = {**settings, "positives": positives, "negatives": negatives}
            name = f"{method}-{positives}-{negatives}"
            rows += [Row(f"{name}-{step}", method, batch | {"learning-rate": step}) for step in steps]
    columns = []
    for weighting in ("clients", "pooled"):
        for label, weight_decay in ("1e-3", "0.001"), ("3e-3", "0.003"):
            case = {"weighting": weighting, "algorithm.weight-decay": weight_decay}
            columns.append(Column(f"cifar10-{weighting}-{label}", "cifar10", (case,), seeds=(0,), grid="none"))
    title = "Batches, weighting and weight decay, dir = 0.5"
    return TableSpec("batches", title, tuple(rows), tuple(columns), show_validation=True)


def identical_batches(scale: Scale) -> TableSpec:
    """CyCp rows on CIFAR-10 with 16 positives and 16 negatives, equal client weights and weight decay 1e-3 for all.

    Their learning rates are those with the best validation AUC. Table 1 would have these numbers without `batches`.
    """
    kept = ("cycp-fedavg-0.1", "cycp-minimax-16-16-0.01", "cycp-pairwise-16-16-0.03")
    rows = tuple(row for row in batch_composition(scale).rows if row.name in kept)
    case = {"weighting": "clients", "algorithm.weight-decay": "0.001"}
    column = Column("cifar10-alike", "cifar10", (case,), grid="none")
    return TableSpec("alike", "CyCp rows with the same batches, dir = 0.5", rows, (column,))


def surrogate_losses(scale: Scale) -> TableSpec:
    """The seven losses of the paper's Table 10; `cycp-pairwise` has the sigmoid loss, `cycp-minimax` its own form."""
    pairwise = ("square", "squared-hinge", "pairwise-logistic", "sigmoid", "barrier-hinge", "qnorm-hinge")
    rows = (Row("cycp-minimax", "cycp-minimax"), *map(_surrogate_row, pairwise))
    return TableSpec(
        "surrogates", "The seven surrogates of Table 10", rows, (*_dataset_columns(), *map(_fraud_column, FRAUD))
    )


def card_fraud(scale: Scale) -> TableSpec:
    """Every method on 284,807 card transactions, at 48 hourly clients in 8 groups by time of day.

    Each of five runs has its own split: 30 % of the rows to test on, and 20 % of the rest for validation. `creditcard`
    is a linear model, `creditcard-mlp` has a hidden layer of 64 units. `central` is logistic regression by SGD at one
    client that holds every row, with as many local steps as all clients have together. Methods in which all clients
    take part in every round have one round per cycle, the others eight. Tuning uses the first split alone; its rows are
    also in the test parts of the other splits. Two test parts share 30 % of their rows, and the test allows for that.
    Other tables and figures use the first three splits.
    """
    columns = tuple(replace(_fraud_column(name, splits=5), by_default=True) for name in FRAUD)
    rows = (*_method_rows(ALL_METHODS), central_row(scale, HOURS))
    return TableSpec("creditcard", "Card fraud over five splits", rows, columns, show_precision=True)


def central_row(scale: Scale, clients: int) -> Row:
    """Logistic regression by SGD at one client that holds every row, with the local steps of all clients."""
    steps = {"local-steps": str(clients * scale.local_steps)}
    return Row("central", "fedavg", {"partition": "iid", "partition.clients": "1", "participation.groups": "1"} | steps)


TABLES: Mapping[str, Callable[[Scale], TableSpec]] = {
    "table1": original_labels,
    "table2": flipped_labels,
    "table3": cifar10_heterogeneity,
    "table4": cifar100_heterogeneity,
    "table5": chestmnist_heterogeneity,
    "table8": client_counts,
    "table9": repeated_removal,
    "figure1": communication_intervals,
    "figure2": clients_per_round,
    "figure3": group_counts,
    "intervals": intervals_at_equal_rounds,
    "classes": mean_over_classes,
    "creditcard": card_fraud,
    "traffic": rounds_and_bytes,
    "schedules": learning_rate_schedules,
    "batches": batch_composition,
    "alike": identical_batches,
    "ablation": scores_and_weighting,
    "noise": two_sided_noise,
    "surrogates": surrogate_losses,
}
"""Every table and figure that comes from runs, by name."""


def _method_rows(methods: Sequence[str]) -> tuple[Row, ...]:
    return tuple(Row(method, method) for method in methods)


def _surrogate_row(objective: str) -> Row:
    if objective == "sigmoid":
        return Row("cycp-pairwise", "cycp-pairwise")
    return Row(objective, "cycp-pairwise", {"objective": objective})


def _dataset_columns(case: Options | None = None) -> tuple[Column, ...]:
    """A column for every dataset; stand-ins are run only when they are named."""
    names = (*PUBLISHED, *STAND_INS)
    return tuple(replace(_dataset_column(name, name, case), by_default=name in PUBLISHED) for name in names)


def _dataset_column(name: str, dataset: str, case: Options | None = None) -> Column:
    """A dataset's column. Image models are tuned in full runs, because short ones rank learning rates differently."""
    return Column(name, dataset, (case or {},), grid="full" if dataset in IMAGES else "steps")


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


def _interval_case(scale: Scale, steps: int) -> dict[str, str]:
    """So many local steps per round, at the same total number of local steps."""
    cycles = scale.cycles * scale.local_steps // steps
    return {"local-steps": str(steps), "cycles": str(cycles), "evaluate-every": str(max(1, cycles // 50))}


def _drop_length(case: Options) -> dict[str, str]:
    return {name: value for name, value in case.items() if name not in ("cycles", "evaluate-every")}


def _skew_table(name: str, dataset: str, title: str) -> TableSpec:
    columns = tuple(
        _dataset_column(f"dir{skew}-flip{flip}", dataset, {**_skew_case(skew), "flip-positives": flip})
        for skew in ("0.1", "10")
        for flip in ("0", "0.2")
    )
    label = f"Table {name[-1]}: dir and flip on {title}"
    return TableSpec(name, label, _method_rows(METHODS), columns)


def _skew_case(concentration: str) -> dict[str, str]:
    return {"partition.concentration": concentration}
