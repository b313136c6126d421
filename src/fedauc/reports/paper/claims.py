"""What the figures' records say of the communication interval I, the cohort size M and the number of groups K."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

from fedauc.reports.paper.filling import EARLY, Filled, reach
from fedauc.reports.paper.orderings import Shown
from fedauc.reports.tables import share

LOSS = 0.01
"""What a longer interval may cost in AUC."""

Series = Mapping[int, Filled]
"""A row's cells on one dataset by the value of what is varied, smallest first."""


def claims(shown: Shown) -> Iterator[str]:
    """A sentence for each dataset and row that has two values at least whose runs are all done, and not borrowed."""
    say = CLAIMS[shown.sheet.name]
    for dataset in dict.fromkeys(column.dataset for column in shown.sheet.columns):
        for entry in shown.sheet.rows:
            series = {}
            for column in shown.sheet.columns:
                cell = shown.filled[entry.name, column.name]
                if column.dataset == dataset and cell.whole and not cell.borrowed:
                    series[int(column.name.removeprefix(f"{dataset}-")[1:])] = cell
            if len(series) > 1:
                yield f"{dataset}, {entry.name}: {say(dict(sorted(series.items())))}."


def interval(series: Series) -> str:
    """Whether a longer interval loses more than it may."""
    least, *longer = series
    means = {steps: cell.auc.mean for steps, cell in series.items() if cell.auc}
    worst = min(longer, key=lambda steps: means[steps])
    loss = means[least] - means[worst]
    within = "within" if loss <= LOSS else "more than"
    lost = f"{share(loss, 4)} below" if loss > 0 else f"{share(-loss, 4)} above"
    start = f"AUC {share(means[least], 4)} with I = {least}"
    return f"{start}; the lowest up to I = {max(series)} is {lost} that (I = {worst}), {within} a loss of .01"


def cohort(series: Series) -> str:
    """Whether rounds to a common target fall with M, as the paper says."""
    return _trend(series, "M")


def groups(series: Series) -> str:
    """Whether they fall with K, as the paper says of groups that are drawn."""
    return _trend(series, "K")


def _trend(series: Series, symbol: str) -> str:
    """Rounds to the lowest of the last AUCs, which every value's mean curve meets, and to a little less.

    The last AUC is a mean model's, which may lie above all before it. Where the first evaluation of each already has
    that little less, it says nothing.
    """
    last = min(cell.curve[-1].auc for cell in series.values())
    said = [f"rounds to AUC {_rounds(series, symbol, last)}"]
    if any(cell.curve[0].auc < last - EARLY for cell in series.values()):
        said.append(f"to AUC {_rounds(series, symbol, last - EARLY)}")
    return "; ".join(said)


def _rounds(series: Series, symbol: str, target: float) -> str:
    met = [reach(cell.curve, target) for cell in series.values()]
    rounds = [point.rounds for point in met if point]
    listed = ", ".join(f"{count:.0f} ({symbol} = {value})" for value, count in zip(series, rounds, strict=True))
    # Curves are known where they were evaluated: what is less than that apart is not told apart.
    gaps = [after.rounds - before.rounds for cell in series.values() for before, after in pairwise(cell.curve)]
    steady = all(after < before for before, after in pairwise(rounds))
    verdict = "fall with every step" if steady else "fall, not with every step"
    verdict = verdict if rounds[0] - rounds[-1] >= max(gaps, default=1) else "do not fall"
    return f"{share(target, 4)} are {listed}: they {verdict}"


CLAIMS: Mapping[str, Callable[[Series], str]] = {
    "figure1": interval,
    "intervals": interval,
    "figure2": cohort,
    "figure3": groups,
}
"""What each figure is asked."""
