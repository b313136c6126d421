"""What a run folder says, in a few numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedauc.experiments.folder import RunFolder
from fedauc.metrics import delong_test
from fedauc.reports.caveats import has_caveat

QUALITY = ("round", "auc", "low", "high", "average_precision", "validation_auc")


def summarize_run(folder: RunFolder) -> dict[str, Any]:
    """Final and best AUC with interval, rounds, traffic, seconds and status; `data` if the data has a caveat.

    The best round is chosen on validation AUC where there is one; otherwise on test AUC, and `best_by` says so: that
    number is for looking at a curve, not for reporting.
    """
    records, config = folder.read_records(), folder.config
    stopped = folder.path / "stopped.txt"
    unfinished = f"unfinished: go on with `fedauc resume {folder.path}`"
    status = stopped.read_text().strip() if stopped.is_file() else unfinished
    summary: dict[str, Any] = {"data": folder.note} if has_caveat(folder.note) else {}
    summary |= {"method": config.recipe.method, "seed": config.recipe.seed}
    summary["status"] = "done" if folder.done else status
    if not records:
        return summary | {"final": None, "best": None, "rounds": 0, "seconds": 0.0}
    last, by = records[-1], "validation_auc" if "validation_auc" in records[-1] else "auc"
    best = max(records, key=lambda record: record[by])
    counts = ("rounds", "visits", "absences", "floats_up", "floats_down", "bytes_up", "bytes_down")
    return {
        **summary,
        "final": {key: last[key] for key in QUALITY if key in last},
        "best": {key: best[key] for key in QUALITY if key in best},
        "best_by": by,
        **{key: last[key] for key in counts},
        "seconds": round(folder.training_seconds(), 3),
    }


class Spread(NamedTuple):
    """A number over several seeds: its mean, its sample standard deviation (0 for a single seed), and how many."""

    mean: float
    deviation: float
    values: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        return Spread(float(np.mean(values)), deviation, len(values))


class SettingSummary(NamedTuple):
    """A setting over its finished runs: the AUC it is judged by, and its test AUC at the end and in the best round."""

    setting: str
    done: int
    runs: int
    judged: Spread
    final: Spread
    best: Spread


class Ranking(NamedTuple):
    """Settings, the best first; `by` is `validation_auc`, or `auc` (of the test part) where some run has no other."""

    by: str
    settings: list[SettingSummary]


@dataclass(frozen=True)
class MethodSummary:
    """One method over its seeds; intervals and p-values are of the first seed's test scores."""

    method: str
    seeds: int
    auc: float
    spread: float
    low: float | None
    high: float | None
    average_precision: float | None
    rounds: int
    bytes_up: int
    bytes_down: int
    seconds: float
    p_value: float | None


def compare_methods(folders: Iterable[tuple[str, RunFolder]]) -> list[MethodSummary]:
    """One line per method, in order; each is tested against the first by a paired DeLong test."""
    runs: dict[str, list[RunFolder]] = {}
    for method, folder in folders:
        if folder.read_records():
            runs.setdefault(method, []).append(folder)
    reference = next(iter(runs.values()), [None])[0]
    return [_summarize_method(method, seeds, reference) for method, seeds in runs.items()]


def rank_settings(folders: Iterable[tuple[str, RunFolder]], runs_per_setting: Mapping[str, int]) -> Ranking:
    """One line per setting, of so many runs each, from the runs that are done."""
    done: dict[str, list[dict[str, Any]]] = {setting: [] for setting in runs_per_setting}
    for setting, folder in folders:
        if folder.done:
            done[setting].append(summarize_run(folder))
    by = "auc" if any(run["best_by"] == "auc" for runs in done.values() for run in runs) else "validation_auc"
    summaries = []
    for setting, runs in done.items():
        columns = [
            [run[when][quantity] for run in runs]
            for when, quantity in (("best", by), ("final", "auc"), ("best", "auc"))
        ]
        spreads = [Spread.of(column) if runs else Spread(math.nan, math.nan, 0) for column in columns]
        summaries.append(SettingSummary(setting, len(runs), runs_per_setting[setting], *spreads))
    return Ranking(by, sorted(summaries, key=lambda line: -line.judged.mean if line.done else math.inf))


def _summarize_method(method: str, folders: list[RunFolder], reference: RunFolder | None) -> MethodSummary:
    summaries = [summarize_run(folder) for folder in folders]
    spread = Spread.of([summary["final"]["auc"] for summary in summaries])
    precisions = [summary["final"]["average_precision"] for summary in summaries]
    first = summaries[0]
    return MethodSummary(
        method=method,
        seeds=len(summaries),
        auc=spread.mean,
        spread=spread.deviation,
        low=first["final"]["low"],
        high=first["final"]["high"],
        average_precision=None if None in precisions else float(np.mean(precisions)),
        rounds=first["rounds"],
        bytes_up=first["bytes_up"],
        bytes_down=first["bytes_down"],
        seconds=float(np.mean([summary["seconds"] for summary in summaries])),
        p_value=_p_value(folders[0], reference),
    )


def _p_value(folder: RunFolder, reference: RunFolder | None) -> float | None:
    """The p-value against the reference, if both are done and scored the same rows."""
    if reference is None or folder.path == reference.path or not (folder.done and reference.done):
        return None
    (labels, scores), (reference_labels, reference_scores) = folder.read_scores(), reference.read_scores()
    if scores.ndim != 1 or not np.array_equal(labels, reference_labels):
        return None
    return delong_test(labels, scores, reference_scores).p_value
