"""What the figures say of I, M and K: the largest loss from a longer interval, and the rounds to a common AUC."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from recomputation.tables import Cell, Table


class Effect(NamedTuple):
    """The lines of a dataset and a method, and whether they agree with the paper; None where that is undecided."""

    label: str
    lines: Sequence[Mapping[str, str]]
    holds: bool | None


def list_effects(table: Table) -> list[Effect]:
    """By dataset and row, over the values that have all runs and settings of their own."""
    effects = []
    for dataset in dict.fromkeys(column.dataset for column in table.columns):
        for row in table.shown()[0]:
            cells = {}
            for column in table.shown()[1]:
                cell = table.cells[row.name, column.name]
                if column.dataset == dataset and cell.complete and not cell.borrowed:
                    cells[int(column.name.split("-")[-1][1:])] = cell
            if len(cells) > 1:
                judge = _judge_intervals if table.name in ("figure1", "intervals") else _judge_rounds
                symbol = "M" if table.name == "figure2" else "K"
                effects.append(Effect(f"{dataset}, {row.name}", *judge(dict(sorted(cells.items())), symbol)))
    return effects


def _four(value: float) -> str:
    return f"{value:.4f}"[1:]


def _judge_intervals(cells: Mapping[int, Cell], _: str) -> tuple[list[dict[str, str]], bool | None]:
    """The largest drop of the mean from a shorter interval to a longer one, beside its standard error."""
    spreads = {value: cell.auc for value, cell in cells.items() if cell.auc}
    drops = {(a, b): spreads[a].mean - spreads[b].mean for a, b in itertools.combinations(spreads, 2)}
    (short, long), drop = max(drops.items(), key=lambda item: item[1])
    drop = round(drop, 4)
    if drop <= 0:
        return [{"largest loss": f"none up to I = {max(cells)}", "verdict": "no loss"}], True
    pair = spreads[short], spreads[long]
    error = float(np.sqrt(sum(spread.deviation**2 / spread.values for spread in pair)))
    holds = None if abs(drop - 0.01) < 2 * error else drop <= 0.01
    words = {None: "within 2 standard errors of .01", True: "at most .01", False: "more than .01"}
    line = {"largest loss": _four(drop), "standard error": _four(error)}
    line |= {"from": f"{_four(pair[0].mean)} (I = {short})", "to": f"{_four(pair[1].mean)} (I = {long})"}
    return [line | {"verdict": words[holds]}], holds


def _judge_rounds(cells: Mapping[int, Cell], symbol: str) -> tuple[list[dict[str, str]], bool | None]:
    """The rounds to the lowest final AUC of all values, and to .02 less unless every curve starts there."""
    curves = {value: cell.curve for value, cell in cells.items()}
    target = min(curve[-1].auc for curve in curves.values())
    goals = [target] if all(curve[0].auc >= target - 0.02 for curve in curves.values()) else [target, target - 0.02]
    resolution = max(b.rounds - a.rounds for curve in curves.values() for a, b in itertools.pairwise(curve))
    lines, verdicts = [], []
    for goal in goals:
        rounds = {value: next(point.rounds for point in curve if point.auc >= goal) for value, curve in curves.items()}
        counts = list(rounds.values())
        verdicts.append(counts[0] - counts[-1] >= resolution)
        steady = "fall at every step" if all(b < a for a, b in itertools.pairwise(counts)) else ""
        words = (steady or "fall, but not at every step") if verdicts[-1] else "do not fall"
        by_value = {f"{symbol} = {value}": str(count) for value, count in rounds.items()}
        lines.append({"AUC to reach": _four(goal), **by_value, "rounds": words})
    if unstable := [value for value, cell in cells.items() if did_not_train(cell)]:
        names = " and ".join(f"{symbol} = {value}" for value in unstable)
        return [line | {"rounds": f"withdrawn: {names} did not train"} for line in lines], None
    return lines, all(verdicts)


def did_not_train(cell: Cell) -> bool:
    """Whether the AUC varies by more than .05 over runs."""
    return cell.auc is not None and cell.auc.deviation > 0.05
