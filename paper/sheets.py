"""One function per table and figure: its rows and its columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fedauc.data.datasets.creditcard import HOURS
from paper.layout import Column, Entry, Sheet
from paper.scales import IMAGES, Scale, Texts

# ------------------------------------------------------------------------------------------------- the paper's tables

METHODS = ("cycp-fedavg", "a-fedavg", "a-scaffold", "rs-minimax", "rs-pairwise", "cycp-minimax", "cycp-pairwise")
"""The rows of every table of the paper, in its order."""

OURS = ("cycp-minimax", "cycp-pairwise")
"""The rows of its figures."""

PUBLISHED = ("cifar10", "cifar100", "chestmnist", "insurance")
STAND_INS = ("chest-stand-in", "insurance-stand-in")
SYNTHETIC = "insurance-synthetic"

FRAUD = {"creditcard": "wide", "creditcard-mlp": "wider:480"}
"""Card fraud with a linear scorer and with a hidden layer, and what they are tuned over: logistic loss and a hidden
layer want large steps. In 120 cycles the wider grid's many candidates have one or two each, which chooses worse."""

FRAUD_COHORTS = (1, 2, 4, 6)
"""Clients of 48 in 8 groups that come in a round; six are a whole group."""

FRAUD_GROUPS = (1, 2, 4, 8, 16)
"""Groups that the 48 clients are put into; eight are the data's own number."""

ALL_METHODS = (*METHODS, "fedavg", "scaffold", "coda-plus", "codasca", "fedxl1")
"""Those of the paper's rows, and those beyond."""


def table1(scale: Scale) -> Sheet:
    """The labels as they are. Images are dealt to 100 clients by Dirichlet draws, insurance data by state.

    100 cycles of 10 groups, which take part whole, with 16 local steps on 32 rows: ResNet-18 with the ImageNet stem and
    GroupNorm on CIFAR, DenseNet-121 on chest images, a linear scorer on insurance data. On images, a batch's classes,
    weighting and weight decay differ by method: see `batches`. There a-fedavg and a-scaffold have CyCp-FedAvg's, and
    rs-minimax and rs-pairwise those of the cyclic methods. There, two learning rates are tuned by row; λ, the proximal
    weight and the amplification are fixed.
    """
    columns = (*_datasets(), Column(SYNTHETIC, SYNTHETIC, usual=False, grid="wider:480"))
    return Sheet("table1", "Table 1: original labels, dir = 0.5", _entries(METHODS), columns)


def table2(scale: Scale) -> Sheet:
    """As Table 1, with 20 % of the training positives turned into negatives."""
    columns = _datasets({"flip-positives": "0.2"})
    return Sheet("table2", "Table 2: flipped labels, dir = 0.5, flip = 20 %", _entries(METHODS), columns)


def table3(scale: Scale) -> Sheet:
    """Heterogeneity and label noise on CIFAR-10."""
    return _skewed("table3", "cifar10", "CIFAR-10")


def table4(scale: Scale) -> Sheet:
    """Heterogeneity and label noise on CIFAR-100."""
    return _skewed("table4", "cifar100", "CIFAR-100")


def table5(scale: Scale) -> Sheet:
    """Heterogeneity and label noise on ChestMNIST."""
    return _skewed("table5", "chestmnist", "ChestMNIST")


def table8(scale: Scale) -> Sheet:
    """50 and 200 clients. Groups of 5 take part whole; of those of 20, ten clients at a time."""
    sizes: dict[str, Texts] = {"50": {}, "200": {"participation.per-round": "10"}}
    columns = tuple(
        _column(f"{name}-{count}", name, {**_skew("0.1"), "partition.clients": count, **cohort})
        for name in PUBLISHED[:2]
        for count, cohort in sizes.items()
    )
    return Sheet("table8", "Table 8: number of clients, dir = 0.1, flip = 0", _entries(METHODS), columns)


def table9(scale: Scale) -> Sheet:
    """The data drawn three times: split, removal and partition."""
    draws = tuple({"data-seed": str(seed)} for seed in range(3))
    columns = tuple(replace(_column(name, name), cases=draws) for name in PUBLISHED[:2])
    return Sheet("table9", "Table 9: repeated random removal, dir = 0.5", _entries(METHODS), columns)


# ------------------------------------------------------------------------------------------------ the paper's figures


def figure1(scale: Scale) -> Sheet:
    """The communication interval I, at the same number of local steps in all. The paper finds no loss with a long one.

    Points that are not a table's are tuned one by one, on images over three learning rates instead of two; their batches,
    weighting and weight decay are the table's.
    """
    columns = []
    for dataset in (*PUBLISHED, *FRAUD):
        for steps in scale.intervals:
            columns.append(_point(dataset, f"I{steps}", _interval(scale, steps), steps == scale.local_steps))
    title = "Figure 1: communication interval I, equal local steps"
    return Sheet("figure1", title, _entries(OURS), tuple(columns), varied=True)


def figure2(scale: Scale) -> Sheet:
    """Clients per round M, out of the same groups; the largest M is the whole group. The paper finds more to be faster.

    Points that are not a table's are tuned one by one, on images over three learning rates instead of two; their batches,
    weighting and weight decay are the table's. The AUC to reach is the lowest that a point ends with, and .02 less.
    """
    columns = []
    for dataset in (*PUBLISHED[:2], *FRAUD):
        cohorts = FRAUD_COHORTS if dataset in FRAUD else scale.cohorts
        for size in cohorts:
            whole = size == cohorts[-1]
            columns.append(_point(dataset, f"M{size}", {} if whole else {"participation.per-round": str(size)}, whole))
    return Sheet("figure2", "Figure 2: clients per round M, flip = 0", _entries(OURS), tuple(columns), varied=True)


def figure3(scale: Scale) -> Sheet:
    """The number of groups K with one client per round, at the same number of rounds; the groups are drawn.

    The paper (its appendix) finds more groups to be faster in general. CyCp-Pairwise has a cycle of K rounds that only
    score beside those rounds, at the start and after each stage whose mean goes on. Points are tuned one by one, as in
    Figure 2, and the AUC to reach is the lowest that one ends with: a K that collapses makes it easy for the others.
    """
    columns = []
    for dataset in (*PUBLISHED[:2], *FRAUD):
        own = dataset in FRAUD and scale.published
        rounds = scale.cycles * (FRAUD_GROUPS[-2] if own else scale.groups)
        for groups in FRAUD_GROUPS if own else scale.group_counts:
            cycles = rounds // groups
            case = {"participation.groups": str(groups), "cycles": str(cycles), "participation.per-round": "1"}
            case |= {"evaluate-every": str(max(1, cycles // 50)), "participation.assignment": "random"}
            columns.append(_point(dataset, f"K{groups}", case))
    title = "Figure 3: number of groups K, M = 1, equal rounds"
    return Sheet("figure3", title, _entries(OURS), tuple(columns), varied=True)


# --------------------------------------------------------------------------------------------------- beyond the paper


def intervals(scale: Scale) -> Sheet:
    """Figure 1 at the same number of rounds, so that a longer interval has more local steps in all.

    Points have the settings of Figure 1.
    """
    columns = []
    for dataset in (*PUBLISHED[:2], *FRAUD):
        for steps in (scale.intervals[0], scale.local_steps, scale.intervals[-1]):
            point = _point(dataset, f"I{steps}", _interval(scale, steps), steps == scale.local_steps)
            cases = tuple(_without_length(case) for case in point.cases)
            columns.append(replace(point, cases=cases))
    title = "Communication interval I, equal rounds"
    return Sheet("intervals", title, _entries(OURS), tuple(columns), varied=True)


def classes(scale: Scale) -> Sheet:
    """Table 1's image columns as the mean over five positive classes, since the paper does not name its one.

    Each class has one run per method, so that there is no deviation over runs, with the settings that Table 1 tuned for
    class 0. In brackets is what the paper's Table 1 has for its class.
    """
    cases = tuple({scale.positive: str(positive)} for positive in range(5))
    columns = tuple(replace(_column(name, name), cases=cases, averaged=True, seeds=(0,)) for name in PUBLISHED[:2])
    return Sheet("classes", "Table 1 as the mean over positive classes 0-4", _entries(METHODS), columns)


def ablation(scale: Scale) -> Sheet:
    """How raw outputs become scores, and whose data counts how much."""
    rows = tuple(
        Entry(f"{method}-{score}-{weighting}", method, {"objective.score": score, "weighting": weighting})
        for method in OURS
        for score in ("identity", "sigmoid")
        for weighting in ("clients", "pooled", "paper")
    )
    return Sheet("ablation", "Scores and weighting", rows, (*_datasets()[:2], *map(_fraud, FRAUD)))


def traffic(scale: Scale) -> Sheet:
    """Rounds and bytes to an AUC that all CyCp methods reach; the runs are those of Table 1 and of card fraud.

    Stand-ins have too few positives for that.
    """
    fraud = tuple(replace(column, usual=False) for column in creditcard(scale).columns)
    known = tuple(column for column in table1(scale).columns if column.dataset not in STAND_INS)
    columns = (*known, *fraud)
    return Sheet("traffic", "Rounds and bytes to a common AUC", _entries(METHODS), columns, "traffic")


def noise(scale: Scale) -> Sheet:
    """Labels flipped both ways; the sigmoid and the barrier hinge are the symmetric losses.

    A column's number is the share of each class that is flipped; `cycp-pairwise` has the sigmoid loss.
    """
    cases = {share: {"flip-positives": share, "flip-negatives": share} for share in ("0.01", "0.05", "0.1")}
    columns = tuple(_column(f"{name}-{share}", name, case) for name in PUBLISHED[:2] for share, case in cases.items())
    columns += tuple(_fraud(name, f"-{share}", case) for name in FRAUD for share, case in cases.items())
    rows = (*_entries(("cycp-fedavg", *OURS)), *(_surrogate(name) for name in ("square", "barrier-hinge")))
    return Sheet("noise", "Two-sided label noise", rows, columns)


def schedules(scale: Scale) -> Sheet:
    """Steps that fall tenfold after half and three quarters of the cycles, or stay; last models or stage means; decay.

    It decided the image columns' schedule, by validation AUC: `constant-mean-1e-3` is where `batches` starts from.
    Nothing is tuned here. Batches have 16 positives and 16 negatives, and clients count alike. A mean is over the
    rounds of a stage, and its next stage starts from there.
    """
    even = {"positives": "16", "negatives": "16", "weighting": "clients"}
    fixed: dict[str, tuple[str, Texts]] = {
        "cycp-fedavg-0.1": ("cycp-fedavg", {"learning-rate": "0.1"}),
        "cycp-minimax-0.01": ("cycp-minimax", {"learning-rate": "0.01", "algorithm.prox": "0.1"} | even),
        "cycp-pairwise-0.03": ("cycp-pairwise", {"learning-rate": "0.03"} | even),
        "cycp-pairwise-0.1": ("cycp-pairwise", {"learning-rate": "0.1"} | even),
    }
    rows = tuple(Entry(name, method, settings) for name, (method, settings) in fixed.items())
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
    return Sheet("schedules", title, rows, tuple(columns), validation=True)


def batches(scale: Scale) -> Sheet:
    """A batch's positives and negatives, whose data counts how much, and weight decay, at two learning rates or three.

    It decided the rest of the image columns' settings, by validation AUC: each method has what is highest in its rows.
    FedAvg draws rows of any class, 32 at a time. Nothing is tuned here; what has no number was not tried. The search
    began after `alike`, whose test AUCs were known by then.
    """
    rows = [Entry(f"cycp-fedavg-{step}", "cycp-fedavg", {"learning-rate": step}) for step in ("0.3", "0.1", "0.03")]
    own: dict[str, tuple[Texts, tuple[str, str]]] = {
        "cycp-minimax": ({"algorithm.prox": "0.01"}, ("0.01", "0.003")),
        "cycp-pairwise": ({}, ("0.1", "0.03")),
    }
    for method, (settings, steps) in own.items():
        for positives, negatives in ("16", "16"), ("4", "28"):
            batch = {**settings, "positives": positives, "negatives": negatives}
            name = f"{method}-{positives}-{negatives}"
            rows += [Entry(f"{name}-{step}", method, batch | {"learning-rate": step}) for step in steps]
    columns = []
    for weighting in ("clients", "pooled"):
        for label, weight_decay in ("1e-3", "0.001"), ("3e-3", "0.003"):
            case = {"weighting": weighting, "algorithm.weight-decay": weight_decay}
            columns.append(Column(f"cifar10-{weighting}-{label}", "cifar10", (case,), seeds=(0,), grid="none"))
    title = "Batches, weighting and weight decay, dir = 0.5"
    return Sheet("batches", title, tuple(rows), tuple(columns), validation=True)


def alike(scale: Scale) -> Sheet:
    """CyCp rows on CIFAR-10 with 16 positives and 16 negatives, clients that count alike and weight decay 1e-3 for all.

    Their learning rates are those that were best on validation rows. This is what Table 1 would have without `batches`.
    """
    kept = ("cycp-fedavg-0.1", "cycp-minimax-16-16-0.01", "cycp-pairwise-16-16-0.03")
    rows = tuple(row for row in batches(scale).rows if row.name in kept)
    case = {"weighting": "clients", "algorithm.weight-decay": "0.001"}
    column = Column("cifar10-alike", "cifar10", (case,), grid="none")
    return Sheet("alike", "CyCp rows with the same batches, dir = 0.5", rows, (column,))


def surrogates(scale: Scale) -> Sheet:
    """The seven losses of the paper's Table 10; `cycp-pairwise` has the sigmoid loss, `cycp-minimax` its own form."""
    pairwise = ("square", "squared-hinge", "pairwise-logistic", "sigmoid", "barrier-hinge", "qnorm-hinge")
    rows = (Entry("cycp-minimax", "cycp-minimax"), *map(_surrogate, pairwise))
    return Sheet("surrogates", "The seven surrogates of Table 10", rows, (*_datasets(), *map(_fraud, FRAUD)))


def creditcard(scale: Scale) -> Sheet:
    """Every method on 284,807 card transactions, at 48 hourly clients in 8 groups by time of day.

    Each of five runs has a split of its own: 30 % to test on, 20 % of the rest for validation. `creditcard` is a linear
    scorer, `creditcard-mlp` has a hidden layer of 64. `central` is logistic regression by SGD at one client that holds
    every row, with as many local steps as all clients have together. Methods in which all clients take part in every
    round have one round a cycle, the others eight. Tuning sees the first split alone, whose rows are
    in the test parts of the others too. Two test parts share 30 % of their rows, which the test allows for. Other
    tables and figures have the first three of the splits.
    """
    columns = tuple(replace(_fraud(name, splits=5), usual=True) for name in FRAUD)
    rows = (*_entries(ALL_METHODS), central(scale, HOURS))
    return Sheet("creditcard", "Card fraud over five splits", rows, columns, precision=True)


def central(scale: Scale, clients: int) -> Entry:
    """Logistic regression by SGD at one client that holds every row, with the local steps of them all."""
    steps = {"local-steps": str(clients * scale.local_steps)}
    return Entry(
        "central", "fedavg", {"partition": "iid", "partition.clients": "1", "participation.groups": "1"} | steps
    )


SHEETS: Mapping[str, Callable[[Scale], Sheet]] = {
    made.__name__: made
    for made in (
        *(table1, table2, table3, table4, table5, table8, table9),
        *(figure1, figure2, figure3),
        *(intervals, classes, creditcard, traffic, schedules, batches, alike, ablation, noise, surrogates),
    )
}
"""Every table and figure that comes from runs, by name."""


def _entries(methods: Sequence[str]) -> tuple[Entry, ...]:
    return tuple(Entry(method, method) for method in methods)


def _surrogate(objective: str) -> Entry:
    if objective == "sigmoid":
        return Entry("cycp-pairwise", "cycp-pairwise")
    return Entry(objective, "cycp-pairwise", {"objective": objective})


def _datasets(case: Texts | None = None) -> tuple[Column, ...]:
    """Every dataset; stand-ins come only when named."""
    names = (*PUBLISHED, *STAND_INS)
    return tuple(replace(_column(name, name, case), usual=name in PUBLISHED) for name in names)


def _column(name: str, dataset: str, case: Texts | None = None) -> Column:
    """Image models are tuned in whole runs: short ones put their learning rates in another order."""
    return Column(name, dataset, (case or {},), grid="full" if dataset in IMAGES else "steps")


def _fraud(dataset: str, suffix: str = "", case: Texts | None = None, splits: int = 3) -> Column:
    """Card fraud over several splits; it comes only when named."""
    cases = tuple({**(case or {}), "data-seed": str(seed)} for seed in range(splits))
    return Column(dataset + suffix, dataset, cases, usual=False, seeds=(0,), overlap=0.3, grid=FRAUD[dataset])


def _point(dataset: str, value: str, case: Texts, tested: bool = False) -> Column:
    """A figure's point. Those that are a table's runs too keep their ranks; the others are tuned by themselves."""
    made = _fraud(dataset, f"-{value}", case) if dataset in FRAUD else _column(f"{dataset}-{value}", dataset, case)
    if tested:
        return made
    return replace(made, tested=False, tuned=made.cases[0], grid="lower" if dataset in IMAGES else made.grid)


def _interval(scale: Scale, steps: int) -> dict[str, str]:
    """So many local steps a round, in fewer cycles the more they are."""
    cycles = scale.cycles * scale.local_steps // steps
    return {"local-steps": str(steps), "cycles": str(cycles), "evaluate-every": str(max(1, cycles // 50))}


def _without_length(case: Texts) -> dict[str, str]:
    return {name: value for name, value in case.items() if name not in ("cycles", "evaluate-every")}


def _skewed(name: str, dataset: str, title: str) -> Sheet:
    columns = tuple(
        _column(f"dir{skew}-flip{flip}", dataset, {**_skew(skew), "flip-positives": flip})
        for skew in ("0.1", "10")
        for flip in ("0", "0.2")
    )
    label = f"Table {name[-1]}: dir and flip on {title}"
    return Sheet(name, label, _entries(METHODS), columns)


def _skew(concentration: str) -> dict[str, str]:
    return {"partition.concentration": concentration}
