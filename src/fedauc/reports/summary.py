"""What a run folder says, in a few numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fedauc.experiments.folder import RunFolder
from fedauc.experiments.presets import name_preset
from fedauc.metrics import DEFAULT_METRICS, Metric, delong_test, parse_metrics
from fedauc.reports.caveats import has_caveat


def summarize_run(folder: RunFolder) -> dict[str, Any]:
    """Final and best metrics, rounds, traffic, seconds and status; `data` if the data has a caveat.

    The best round is chosen by the first metric on the validation rows where there are some; otherwise on the test
    rows, and `best_by` says so: that number is for looking at a curve, not for reporting. `final` describes the model
    that a finished run has saved, and so do `client_auc` and `group_auc`, where test rows say whose they are. A private
    run has `privacy` (what it promises), `epsilon` (what it has spent) and `not_released` (what it leaves out and why).
    """
    records, config = folder.read_records(), folder.config
    stopped = folder.path / "stopped.txt"
    unfinished = f"unfinished: go on with `fedauc resume {folder.path}`"
    status = stopped.read_text().strip() if stopped.is_file() else unfinished
    summary: dict[str, Any] = {"data": folder.note} if has_caveat(folder.note) else {}
    summary |= {"method": config.recipe.method, "seed": config.recipe.seed}
    if (preset := name_preset(config.recipe.method, config.recipe)) is not None:
        summary["preset"] = preset
    summary["status"] = "done" if folder.done else status
    if (guarantee := folder.read_privacy()) is not None:
        summary["privacy"] = guarantee
    if not records:
        return summary | {"final": None, "best": None, "rounds": 0, "seconds": 0.0}
    last, metrics = records[-1], parse_metrics(config.metrics)
    decisive = metrics[0].columns[0]
    by = f"validation_{decisive}" if f"validation_{decisive}" in last else decisive
    # Noise can hide the value of a private evaluation.
    best = max(records, key=lambda record: -math.inf if record[by] is None else record[by])
    result = folder.read_result() if folder.done else {}
    final = result.get("final", last)
    columns = ("round", *(column for metric in metrics for column in metric.columns), f"validation_{decisive}")
    described = ("kept_round", "stopped_early", "client_auc", "group_auc", "not_released")
    counts = ("rounds", "visits", "absences", "floats_up", "floats_down", "bytes_up", "bytes_down")
    return {
        **summary,
        **{key: result[key] for key in described if key in result},
        **({"epsilon": last["epsilon"]} if "epsilon" in last else {}),
        "final": {key: final[key] for key in columns if key in final},
        "best": {key: best[key] for key in columns if key in best},
        "best_by": by,
        **{key: last[key] for key in counts},
        "scoring_rounds": min(folder.scoring_rounds, last["rounds"]),
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
    """A setting over its finished runs: the value it is judged by, and the test values at the end and the best round.

    They are values of the first metric; `others` holds the means of the other metrics at the end, by label.
    """

    setting: str
    done: int
    runs: int
    judged: Spread
    final: Spread
    best: Spread
    others: dict[str, float | None]


class Ranking(NamedTuple):
    """Settings, the best first, by the metric of that label.

    `on_validation` says on which rows; on the test rows, where some run has no others.
    """

    label: str
    on_validation: bool
    settings: list[SettingSummary]


@dataclass(frozen=True)
class MethodSummary:
    """One method over its seeds; intervals and p-values are of the first seed's test scores.

    `value`, `spread`, `low` and `high` belong to the first metric, which has that `label`; `others` holds the means of
    the other metrics by their labels, None where a metric is not defined. `value` is NaN where no run has a record.
    `unfinished` says what became of runs that are not done, by their seeds.
    """

    method: str
    seeds: int
    label: str
    value: float
    spread: float
    low: float | None
    high: float | None
    others: dict[str, float | None]
    rounds: int
    bytes_up: int
    bytes_down: int
    seconds: float
    p_value: float | None
    scoring_rounds: int = 0
    unfinished: Mapping[int, str] = field(default_factory=dict)
    first_run_done: bool = True


def compare_methods(folders: Iterable[tuple[str, RunFolder]]) -> list[MethodSummary]:
    """One line per method, in order; each is tested against the first that is done, by a paired DeLong test."""
    runs: dict[str, list[RunFolder]] = {}
    for method, folder in folders:
        runs.setdefault(method, []).append(folder)
    reference = next((folder for seeds in runs.values() for folder in seeds[:1] if folder.done), None)
    return [_summarize_method(method, seeds, reference) for method, seeds in runs.items()]


def rank_settings(folders: Iterable[tuple[str, RunFolder]], runs_per_setting: Mapping[str, int]) -> Ranking:
    """One line per setting, of so many runs each, from the runs that are done. All runs have the same metrics."""
    done: dict[str, list[dict[str, Any]]] = {setting: [] for setting in runs_per_setting}
    metrics = parse_metrics(DEFAULT_METRICS)
    for setting, folder in folders:
        if folder.done:
            metrics = parse_metrics(folder.config.metrics)
            done[setting].append(summarize_run(folder))
    decisive, *others = metrics
    if metrics == parse_metrics(DEFAULT_METRICS):
        # Settings are mostly compared by one number; metrics that were asked for are shown beside it.
        others = []
    column = decisive.columns[0]
    on_validation = all(run["best_by"] != column for runs in done.values() for run in runs)
    by = f"validation_{column}" if on_validation else column
    summaries = []
    for setting, runs in done.items():
        columns = [
            [math.nan if run[when][quantity] is None else run[when][quantity] for run in runs]
            for when, quantity in (("best", by), ("final", column), ("best", column))
        ]
        judged, final, best = (Spread.of(values) if runs else Spread(math.nan, math.nan, 0) for values in columns)
        means = {metric.label: _mean_of(metric, runs) for metric in others}
        summaries.append(SettingSummary(setting, len(runs), runs_per_setting[setting], judged, final, best, means))
    ordered = sorted(summaries, key=lambda line: -line.judged.mean if line.done else math.inf)
    return Ranking(decisive.label, on_validation, ordered)


def _summarize_method(method: str, folders: list[RunFolder], reference: RunFolder | None) -> MethodSummary:
    everything = [summarize_run(folder) for folder in folders]
    unfinished = {summary["seed"]: summary["status"] for summary in everything if summary["status"] != "done"}
    decisive, *others = parse_metrics(folders[0].config.metrics)
    summaries = [summary for summary in everything if summary["final"] is not None]
    if not summaries:
        undefined = dict.fromkeys((metric.label for metric in others), None)
        nothing = (math.nan, 0.0, None, None, undefined, 0, 0, 0, 0.0, None)
        return MethodSummary(
            method, len(folders), decisive.label, *nothing, unfinished=unfinished, first_run_done=False
        )
    values = [summary["final"][decisive.columns[0]] for summary in summaries]
    spread = Spread.of([math.nan if value is None else value for value in values])
    first = summaries[0]
    low, high = (first["final"][column] for column in decisive.columns[1:]) if decisive.has_interval else (None, None)
    return MethodSummary(
        method=method,
        seeds=len(summaries),
        label=decisive.label,
        value=spread.mean,
        spread=spread.deviation,
        low=low,
        high=high,
        others={metric.label: _mean_of(metric, summaries) for metric in others},
        rounds=first["rounds"],
        bytes_up=first["bytes_up"],
        bytes_down=first["bytes_down"],
        seconds=float(np.mean([summary["seconds"] for summary in summaries])),
        p_value=_p_value(folders[0], reference),
        scoring_rounds=first["scoring_rounds"],
        unfinished=unfinished,
        first_run_done=folders[0].done,
    )


def _mean_of(metric: Metric, summaries: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean of a metric at the end of runs; None where it is not defined for one of them, or there are none."""
    values = [summary["final"][metric.columns[0]] for summary in summaries]
    return float(np.mean(values)) if values and None not in values else None


def _p_value(folder: RunFolder, reference: RunFolder | None) -> float | None:
    """The p-value against the reference, if both are done and scored the same rows."""
    if reference is None or folder.path == reference.path or not (folder.done and reference.done):
        return None
    if not (folder.has_scores and reference.has_scores):
        return None
    (labels, scores), (reference_labels, reference_scores) = folder.read_scores(), reference.read_scores()
    if scores.ndim != 1 or not np.array_equal(labels, reference_labels):
        return None
    return delong_test(labels, scores, reference_scores).p_value
