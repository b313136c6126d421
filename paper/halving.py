"""Successive halving (Jamieson and Talwalkar 2016): many candidates for a few cycles, the best third for more.

A budget of cycles is spent evenly over the rungs, so that methods with few candidates and with many cost the same. A
rung is a run of its own, with its whole schedule of learning rates in so many cycles.

>>> [(rung.candidates, rung.cycles) for rung in rungs(12, 120)]
[(12, 3), (4, 10), (2, 20)]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import NamedTuple

from fedauc.algorithms import find_methods
from fedauc.algorithms.minimax import ProximalStep
from fedauc.algorithms.pairwise import Pairwise
from paper.scales import Options
from paper.table_specs import Row

REDUCTION = 3
"""One candidate in so many goes on."""


class Rung(NamedTuple):
    """So many candidates for so many cycles each."""

    candidates: int
    cycles: int


class Trial(NamedTuple):
    """Candidates that are to run for so many cycles."""

    candidates: tuple[Options, ...]
    cycles: int


class TrialResult(NamedTuple):
    """A candidate after a rung: its validation AUC, None if it could not go on."""

    settings: Options
    cycles: int
    validation_auc: float | None


class HalvingResult(NamedTuple):
    """The last candidate left, and how every rung went."""

    settings: Options
    trials: tuple[TrialResult, ...]


def plan_rungs(candidates: int, cycles: int) -> list[Rung]:
    """The rungs down to one candidate, each with an even share of the cycles; none where there is nothing to choose."""
    if cycles < minimum_budget(candidates):
        needed = f"{candidates} candidates need at least {minimum_budget(candidates)}"
        raise ValueError(f"tuning has {cycles} cycles; {needed}: raise it")
    sizes = _rung_sizes(candidates)
    return [Rung(size, cycles // len(sizes) // size) for size in sizes]


def minimum_budget(candidates: int) -> int:
    """The fewest cycles that give every candidate one in the first rung.

    >>> least(324), least(1)
    (1944, 0)
    """
    return candidates * len(_rung_sizes(candidates))


def _rung_sizes(candidates: int) -> list[int]:
    """How many candidates each rung has."""
    found = []
    while candidates > 1:
        found.append(candidates)
        candidates = math.ceil(candidates / REDUCTION)
    return found


def halve_candidates(
    candidates: Sequence[Options], cycles: int
) -> Generator[Trial, Sequence[float | None], HalvingResult]:
    """Ask for trials, be sent their validation AUCs, return the winner; the earlier candidate wins a tie.

    Those that stopped do not go on. Where all have, the last wins, which grids have the smallest step for.
    """
    left, judged = list(candidates), list[TrialResult]()
    for rung in plan_rungs(len(left), cycles):
        found = yield Trial(tuple(left), rung.cycles)
        judged += [TrialResult(each, rung.cycles, auc) for each, auc in zip(left, found, strict=True)]
        alive = [(auc, place) for place, auc in enumerate(found) if auc is not None]
        if not alive:
            return HalvingResult(left[-1], tuple(judged))
        best = sorted(alive, key=lambda pair: -pair[0])[: math.ceil(len(left) / REDUCTION)]
        left = [left[place] for _, place in sorted(best, key=lambda pair: pair[1])]
    return HalvingResult(left[0], tuple(judged))


# --------------------------------------------------------------------------------------------------------------- grids

STEPS = ("0.1", "0.01", "0.001")
WIDE = ("1", *STEPS)
WIDER = ("100", "10", *WIDE)
FINE = ("1", "0.3", "0.1", "0.03", "0.01", "0.003", "0.001")
STAGES = {"stages.initial": ("1", "10", "50"), "stages.decay": ("0.1", "0.2", "0.5"), "stages.scale": ("2", "5", "10")}

GRIDS = ("none", "steps", "wide", "wider", "fine", "long", "full", "lower", "paper")
"""No tuning; learning rates with λ or ρ; the same with a larger one, with three, or with more; those without the ends,
with two λ or ρ, for longer rungs; the method's own and the next smaller, for runs of full length; the same with one
that is smaller still; the paper's, with its stages."""

FULL_LENGTH = {"full": 2, "lower": 3}
"""The grids for runs of full length, and how many learning rates they have."""

FULL = {"objective.scale": "1", "algorithm.prox": "0.01", "algorithm.amplify": "1.5"}
"""The other values where only learning rates are tuned."""


def _learning_rates(grid: str, usual: float) -> tuple[str, ...]:
    """The learning rates of a grid, largest first; `usual` is the method's own.

    >>> _steps("full", 0.1), _steps("full", 0.05), _steps("full", 0.0001), _steps("lower", 0.01)
    (('0.1', '0.03'), ('0.03', '0.01'), ('0.003', '0.001'), ('0.01', '0.003', '0.001'))
    """
    if count := FULL_LENGTH.get(grid):
        starts = range(len(FINE) - count + 1)
        nearest = min(starts, key=lambda place: abs(math.log(float(FINE[place]) / usual)))
        return FINE[nearest : nearest + count]
    return {"wide": WIDE, "wider": WIDER, "fine": FINE, "long": FINE[1:-1]}.get(grid, STEPS)


def grid_candidates(entry: Row, grid: str) -> list[Options]:
    """The paper's grid for a row: learning rates for all, λ for the sigmoid loss, ρ for the minimax methods.

    The paper does not define ρ; the proximal weight is nearest. Nor does it name the amplification, which its
    baselines' own papers tune. What a row settles itself is not tuned.
    """
    if grid == "none":
        return [{}]
    method = find_methods()[entry.method]
    algorithm = method.algorithm
    axes: dict[str, Sequence[str]] = {}
    minimax, pairwise = issubclass(algorithm, ProximalStep), issubclass(algorithm, Pairwise)
    if pairwise and "objective" not in entry.settings:
        axes["objective.scale"] = ("1", "0.1", "0.01", "0.001")
    if minimax:
        axes["algorithm.prox"] = ("0.1", "0.01", "0.001")
    if entry.method in ("a-fedavg", "a-scaffold"):
        axes["algorithm.amplify"] = ("1.5", "2", "3")
    if grid == "long":
        axes = {name: values[:2] for name, values in axes.items()}
    if grid in FULL_LENGTH:
        axes = {name: (FULL[name],) for name in axes}
    axes = {"learning-rate": _learning_rates(grid, method.learning_rate), **axes}
    staged = grid == "paper" and (minimax or pairwise)
    fixed = {"stages": "geometric"} if staged else {}
    axes = {name: values for name, values in axes.items() if name not in entry.settings}
    return [{**fixed, **values} for values in _cross_product({**axes, **(STAGES if staged else {})})]


def check_budget(grid: str, cycles: int, entries: Iterable[Row]) -> None:
    """Refuse cycles that are too few for one of the rows, with what is enough for all of them."""
    most = max(len(grid_candidates(entry, grid)) for entry in entries)
    if cycles < (needed := minimum_budget(most)):
        raise ValueError(
            f"tuning has {cycles} cycles; {most} candidates need at least {needed}: use --tuning {grid}:{needed}"
        )


def _cross_product(axes: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
