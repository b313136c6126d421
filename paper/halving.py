"""Successive halving (Jamieson and Talwalkar 2016): many candidates for a few cycles, the best third for more.

A budget of cycles is spent evenly over the rungs, so that methods with few candidates and with many cost the same. Each
rung trains its candidates anew, with a whole schedule of learning rates in so many cycles.

>>> [(rung.candidates, rung.cycles) for rung in plan_rungs(12, 120)]
[(12, 3), (4, 10), (2, 20)]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple

from fedauc.algorithms import find_methods
from fedauc.algorithms.minimax import ProximalStep
from fedauc.algorithms.pairwise import Pairwise
from paper.scales import Options
from paper.table_specs import Row

REDUCTION = 3
"""One candidate in so many reaches the next rung."""


class Rung(NamedTuple):
    """How many candidates a rung has, and for how many cycles each of them is trained."""

    candidates: int
    cycles: int


class Trial(NamedTuple):
    """Candidates that are to be trained for so many cycles."""

    candidates: tuple[Options, ...]
    cycles: int


class TrialResult(NamedTuple):
    """A candidate after a rung with its validation AUC, or None if its run stopped."""

    settings: Options
    cycles: int
    validation_auc: float | None


class HalvingResult(NamedTuple):
    """The settings that won, and the results of every rung."""

    settings: Options
    trials: tuple[TrialResult, ...]


def plan_rungs(candidates: int, cycles: int) -> list[Rung]:
    """The rungs down to one candidate, each with an even share of the cycles; a single candidate needs none."""
    if cycles < (needed := minimum_budget(candidates)):
        raise ValueError(f"tuning has {cycles} cycles; {candidates} candidates need at least {needed}: raise it")
    sizes = _rung_sizes(candidates)
    return [Rung(size, cycles // len(sizes) // size) for size in sizes]


def minimum_budget(candidates: int) -> int:
    """The fewest cycles that give every candidate one in the first rung.

    >>> minimum_budget(324), minimum_budget(1)
    (1944, 0)
    """
    return candidates * len(_rung_sizes(candidates))


def _rung_sizes(candidates: int) -> list[int]:
    sizes = []
    while candidates > 1:
        sizes.append(candidates)
        candidates = math.ceil(candidates / REDUCTION)
    return sizes


Bracket = Generator[Trial, Sequence[float | None], HalvingResult]
"""A successive halving: it yields trials, is sent their validation AUCs, and returns the result."""


def halve_candidates(candidates: Sequence[Options], cycles: int) -> Bracket:
    """Choose among candidates. The earlier one wins a tie, and candidates whose runs stopped are out.

    If all of them stopped, the last wins: grids end with the smallest learning rate.
    """
    remaining, results = list(candidates), list[TrialResult]()
    for rung in plan_rungs(len(remaining), cycles):
        aucs = yield Trial(tuple(remaining), rung.cycles)
        results += [TrialResult(settings, rung.cycles, auc) for settings, auc in zip(remaining, aucs, strict=True)]
        finished = [(auc, position) for position, auc in enumerate(aucs) if auc is not None]
        if not finished:
            return HalvingResult(remaining[-1], tuple(results))
        best = sorted(finished, key=lambda pair: -pair[0])[: math.ceil(len(remaining) / REDUCTION)]
        remaining = [remaining[position] for position in sorted(position for _, position in best)]
    return HalvingResult(remaining[0], tuple(results))


# --------------------------------------------------------------------------------------------------------------- grids

FINE = ("1", "0.3", "0.1", "0.03", "0.01", "0.003", "0.001")

LEARNING_RATES = {
    "steps": ("0.1", "0.01", "0.001"),
    "wide": ("1", "0.1", "0.01", "0.001"),
    "wider": ("100", "10", "1", "0.1", "0.01", "0.001"),
    "fine": FINE,
    "long": FINE[1:-1],
    "paper": ("0.1", "0.01", "0.001"),
}
"""The learning rates of each grid. `long` has fewer other values too, for longer rungs; `paper` has stages too."""

FULL_LENGTH = {"full": 2, "lower": 3}
"""Grids of runs of full length, and how many learning rates they have: the method's default and smaller ones."""

GRIDS = ("none", *LEARNING_RATES, *FULL_LENGTH)

FIXED = {"objective.scale": "1", "algorithm.prox": "0.01", "algorithm.amplify": "1.5"}
"""The other values in runs of full length, where only the learning rate is tuned."""

STAGES = {"stages.initial": ("1", "10", "50"), "stages.decay": ("0.1", "0.2", "0.5"), "stages.scale": ("2", "5", "10")}


def grid_learning_rates(grid: str, default: float) -> tuple[str, ...]:
    """The learning rates of a grid, largest first; `default` is the method's own.

    >>> grid_learning_rates("full", 0.1), grid_learning_rates("full", 0.05), grid_learning_rates("lower", 0.01)
    (('0.1', '0.03'), ('0.03', '0.01'), ('0.01', '0.003', '0.001'))
    """
    if grid not in FULL_LENGTH:
        return LEARNING_RATES[grid]
    starts = range(len(FINE) - FULL_LENGTH[grid] + 1)
    nearest = min(starts, key=lambda start: abs(math.log(float(FINE[start]) / default)))
    return FINE[nearest : nearest + FULL_LENGTH[grid]]


def grid_candidates(row: Row, grid: str) -> list[Options]:
    """The candidates of a row: learning rates for all, λ for the sigmoid loss, ρ for the minimax methods.

    The paper does not define ρ; the proximal weight is nearest. Nor does it name the amplification, which its
    baselines' own papers tune. Options that the row sets itself are not tuned.
    """
    if grid == "none":
        return [{}]
    method = find_methods()[row.method]
    minimax, pairwise = issubclass(method.algorithm, ProximalStep), issubclass(method.algorithm, Pairwise)
    axes: dict[str, Sequence[str]] = {}
    if pairwise and "objective" not in row.settings:
        axes["objective.scale"] = ("1", "0.1", "0.01", "0.001")
    if minimax:
        axes["algorithm.prox"] = ("0.1", "0.01", "0.001")
    if row.method in ("a-fedavg", "a-scaffold"):
        axes["algorithm.amplify"] = ("1.5", "2", "3")
    if grid == "long":
        axes = {name: values[:2] for name, values in axes.items()}
    if grid in FULL_LENGTH:
        axes = {name: (FIXED[name],) for name in axes}
    axes = {"learning-rate": grid_learning_rates(grid, method.learning_rate), **axes}
    axes = {name: values for name, values in axes.items() if name not in row.settings}
    staged = grid == "paper" and (minimax or pairwise)
    axes |= STAGES if staged else {}
    common = {"stages": "geometric"} if staged else {}
    return [{**common, **dict(zip(axes, values, strict=True))} for values in itertools.product(*axes.values())]


def check_budget(grid: str, cycles: int, rows: Iterable[Row]) -> None:
    """Refuse cycles that are too few for one of the rows, and name the number that is enough for all of them."""
    most = max(len(grid_candidates(row, grid)) for row in rows)
    if cycles < (needed := minimum_budget(most)):
        remedy = f"use --tuning {grid}:{needed}"
        raise ValueError(f"tuning has {cycles} cycles; {most} candidates need at least {needed}: {remedy}")
