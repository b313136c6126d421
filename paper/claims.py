"""What the figures' records say of the communication interval I, the cohort size M and the number of groups K."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import combinations, pairwise
from typing import NamedTuple

from fedauc.reports.tables import format_share
from paper.filling import EARLY, Filled, reach
from paper.orderings import Shown

LOSS = 0.01
"""What a longer interval may cost in AUC."""

SURE = 2
"""Standard errors over runs by which a loss must differ from that to be told from it."""

Series = Mapping[int, Filled]
"""A row's cells on one dataset by the value of what is varied, smallest first."""


class Claim(NamedTuple):
    """What the records say, and whether that is what the paper says; None where they cannot tell."""

    said: str
    holds: bool | None


def claims(shown: Shown) -> dict[str, Claim]:
    """By dataset and row, those with two values at least whose runs are all done, and not borrowed."""
    say, found = CLAIMS[shown.sheet.name], dict[str, Claim]()
    for dataset in dict.fromkeys(column.dataset for column in shown.sheet.columns):
        for entry in shown.sheet.rows:
            series = {}
            for column in shown.sheet.columns:
                cell = shown.filled[entry.name, column.name]
                if column.dataset == dataset and cell.whole and cell.curve and not cell.borrowed:
                    series[int(column.name.removeprefix(f"{dataset}-")[1:])] = cell
            if len(series) > 1:
                found[f"{dataset}, {entry.name}"] = say(dict(sorted(series.items())))
    return found


def interval(series: Series) -> Claim:
    """Whether a longer interval loses more than it may, against any shorter one."""
    aucs = {steps: cell.auc for steps, cell in series.items() if cell.auc}
    short, long = max(combinations(aucs, 2), key=lambda pair: aucs[pair[0]].mean - aucs[pair[1]].mean)
    before, after = aucs[short], aucs[long]
    # As it is printed: what is printed as .01 is .01.
    loss = round(before.mean - after.mean, 4)
    if loss <= 0:
        return Claim(f"no interval up to I = {max(series)} is below a shorter one", True)
    error = math.sqrt(before.deviation**2 / before.values + after.deviation**2 / after.values)
    holds = None if abs(loss - LOSS) < SURE * error else loss <= LOSS
    verdict = {None: "not told from", True: "within", False: "more than"}[holds]
    fell = f"AUC falls from {format_share(before.mean, 4)} (I = {short}) to {format_share(after.mean, 4)} (I = {long}) at most"
    return Claim(
        f"{fell}, by {format_share(loss, 4)} with a standard error of {format_share(error, 4)}: {verdict} .01", holds
    )


def cohort(series: Series) -> Claim:
    """Whether rounds to a common target fall with M, as the paper says."""
    return _trend(series, "M")


def groups(series: Series) -> Claim:
    """Whether they fall with K, as the paper says of groups that are drawn."""
    return _trend(series, "K")


def _trend(series: Series, symbol: str) -> Claim:
    """Rounds to the lowest of the last AUCs, which every value's mean curve meets, and to a little less.

    The last AUC is a mean model's, which may lie above all before it. Where the first evaluation of each already has
    that little less, it says nothing.
    """
    last = min(cell.curve[-1].auc for cell in series.values())
    late = _rounds(series, symbol, last)
    if not any(cell.curve[0].auc < last - EARLY for cell in series.values()):
        return Claim(f"rounds to AUC {late.said}", late.holds)
    early = _rounds(series, symbol, last - EARLY)
    return Claim(f"rounds to AUC {late.said}; to AUC {early.said}", bool(late.holds and early.holds))


def _rounds(series: Series, symbol: str, target: float) -> Claim:
    met = [reach(cell.curve, target) for cell in series.values()]
    rounds = [point.rounds for point in met if point]
    listed = ", ".join(f"{count:.0f} ({symbol} = {value})" for value, count in zip(series, rounds, strict=True))
    # Curves are known where they were evaluated: what is less than that apart is not told apart.
    gaps = [after.rounds - before.rounds for cell in series.values() for before, after in pairwise(cell.curve)]
    steady = all(after < before for before, after in pairwise(rounds))
    holds = rounds[0] - rounds[-1] >= max(gaps, default=1)
    verdict = ("fall with every step" if steady else "fall, not with every step") if holds else "do not fall"
    return Claim(f"{format_share(target, 4)} are {listed}: they {verdict}", holds)


CLAIMS: Mapping[str, Callable[[Series], Claim]] = {
    "figure1": interval,
    "intervals": interval,
    "figure2": cohort,
    "figure3": groups,
}
"""What each figure is asked."""

ASKED: Mapping[str, str] = {
    "figure1": f"A longer interval I costs no more than {format_share(LOSS, 2)} AUC at equal local steps",
    "intervals": f"A longer interval I costs no more than {format_share(LOSS, 2)} AUC at equal rounds",
    "figure2": "Rounds to a common AUC fall from the smallest M to the largest",
    "figure3": "Rounds to a common AUC fall from the smallest K to the largest",
}
"""The same in words."""
