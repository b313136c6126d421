"""The figures of a report: what they show is decided here, how they look elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedauc.metrics import auc, average_precision
from fedauc.reports.attendance import Calendar
from fedauc.reports.figures import (
    Axis,
    Bars,
    Cells,
    Figure,
    Intervals,
    Layer,
    Line,
    Points,
    Shares,
    name_colour,
    name_dash,
)
from fedauc.reports.report_runs import ReportRun, ScoredRows
from fedauc.reports.score_curves import CurveBand, histogram_scores, precision_recall_band, roc_band
from fedauc.reports.site_quality import SiteQuality
from fedauc.scoring.thresholds import wilson_interval

MAX_BANDS = 2
"""Bands of more curves than this would hide each other."""

MAX_SITES_DRAWN = 20
"""Of more sites the figure shows the worst ones."""

BAND_NOTE = (
    "The band is a pointwise 95 % bootstrap interval: 400 resamples of the test rows within each class, "
    "drawn from a fixed seed."
)


def draw_roc(runs: Sequence[tuple[str, ScoredRows]]) -> Figure:
    """ROC curves, a line per run."""
    layers: list[Layer] = [_diagonal("chance")]
    layers += _draw_bands([(name, roc_band(rows.labels, rows.scores)) for name, rows in runs])
    values = ", ".join(f"{name} {auc(rows.labels, rows.scores):.3f}" for name, rows in runs)
    return Figure(
        key="roc",
        title="ROC curve",
        summary=f"True positive rate against false positive rate on the test rows. AUC: {values}.",
        x=Axis("false positive rate", (0, 1)),
        y=Axis("true positive rate (recall)", (0, 1.01)),
        layers=layers,
        note=_band_note(len(runs)),
        legend=_list_colours([name for name, _ in runs]),
    )


def draw_precision_recall(runs: Sequence[tuple[str, ScoredRows]]) -> Figure:
    """Precision-recall curves, a line per run."""
    share = float(np.mean(runs[0][1].labels == 1))
    ends = np.array([0.0, 1.0])
    layers: list[Layer] = [Line("no skill", ends, np.full(2, share), "muted", "dot")]
    layers += _draw_bands([(name, precision_recall_band(rows.labels, rows.scores)) for name, rows in runs])
    values = ", ".join(f"{name} {average_precision(rows.labels, rows.scores):.3f}" for name, rows in runs)
    return Figure(
        key="precision-recall",
        title="Precision-recall curve",
        summary=f"Precision against recall on the test rows. Average precision: {values}.",
        x=Axis("recall", (0, 1)),
        y=Axis("precision", (0, 1.01)),
        layers=layers,
        note=_band_note(len(runs)),
        legend=_list_colours([name for name, _ in runs]),
    )


def draw_learning(runs: Sequence[ReportRun]) -> list[Figure]:
    """The first metric against rounds, megabytes and seconds."""
    metric = runs[0].metrics[0]
    shown = [run for run in runs if run.records]
    axes = (("rounds", "rounds"), ("megabytes", "megabytes, up and down"), ("seconds", "training seconds"))
    figures = []
    # The bytes of a run with private draws tell how many clients were drawn.
    hides_draws = any(run.privacy is not None and run.privacy["sampling"] < 1 for run in shown)
    for key, title in axes:
        if key == "megabytes" and hides_draws:
            continue
        layers: list[Layer] = []
        for number, run in enumerate(shown):
            records = [record for record in run.records if record.get(metric.columns[0]) is not None]
            x = np.array([_measure_effort(record, key) for record in records], dtype=float)
            low_name, high_name = ("auc_low", "auc_high") if run.is_federation else (*metric.columns[1:], "", "")[:2]
            has_band = len(shown) == 1 and all(record.get(low_name) is not None for record in records)
            layers.append(
                Line(
                    run.name,
                    x,
                    np.array([record[metric.columns[0]] for record in records], dtype=float),
                    name_colour(number),
                    name_dash(number),
                    low=np.array([record[low_name] for record in records], dtype=float) if has_band else None,
                    high=np.array([record[high_name] for record in records], dtype=float) if has_band else None,
                    markers=len(records) <= 40,
                )
            )
            column = f"validation_{metric.columns[0]}"
            validated = [record for record in run.records if record.get(column) is not None]
            if len(shown) == 1 and validated:
                x = np.array([_measure_effort(record, key) for record in validated], dtype=float)
                values = np.array([record[column] for record in validated], dtype=float)
                layers.append(Line("validation rows", x, values, "series1", "dash"))
        figures.append(
            Figure(
                key=f"learning-{key}",
                title=f"{metric.label} against {key}",
                summary=f"Test {metric.label} against {title}, a line per run, a point per evaluation.",
                x=Axis(title, logarithmic=key == "megabytes" and _differ_widely(shown)),
                y=Axis(f"test {metric.label}"),
                layers=layers,
                height=280,
                legend=_list_colours([run.name for run in shown]),
            )
        )
    return figures


def draw_sites(lines: Sequence[SiteQuality], overall: float, key: str, noun: str) -> Figure:
    """The AUC of each site or group with its interval, the worst on top."""
    measured = [line for line in lines if line.auc is not None][:MAX_SITES_DRAWN]
    values = np.array([line.auc for line in measured], dtype=float)
    low = np.array([line.low if line.low is not None else np.nan for line in measured], dtype=float)
    high = np.array([line.high if line.high is not None else np.nan for line in measured], dtype=float)
    layers: list[Layer] = [
        Intervals(f"AUC per {noun}", [line.name for line in measured], values, low, high),
        Line("all test rows", np.full(2, overall), np.array([-0.5, len(measured) - 0.5]), "series1", "dash"),
    ]
    shown = f"the {len(measured)} lowest of {len(lines)}" if len(lines) > len(measured) else f"all {len(measured)}"
    return Figure(
        key=f"auc-by-{key}",
        title=f"AUC per {noun}, the lowest first",
        summary=f"AUC with 95 % DeLong interval per {noun}, {shown}; the dashed line is the AUC of all test rows.",
        x=Axis("AUC", (min(0.5, float(np.nanmin([*low, *values], initial=1.0)) - 0.02), 1.005)),
        y=Axis(""),
        layers=layers,
        note="A dot without a line has too few rows of a class for an interval." if np.isnan(low).any() else "",
        height=max(240, 110 + 22 * len(measured)),
        wide=True,
    )


def draw_runs(names: Sequence[str], values: np.ndarray, low: np.ndarray, high: np.ndarray, label: str) -> Figure:
    """The final value of each run with its interval."""
    start = float(np.nanmin([*low, *values]))
    return Figure(
        key="runs",
        title=f"Final test {label} of each run",
        summary=f"Final test {label} with 95 % interval, a row per run.",
        x=Axis(f"test {label}", (max(0.0, start - 0.03), min(1.0, float(np.nanmax([*high, *values]))) + 0.01)),
        y=Axis(""),
        layers=[Intervals(label, names, values, low, high)],
        height=max(220, 110 + 30 * len(names)),
        wide=True,
    )


def draw_histograms(rows: ScoredRows) -> Figure:
    """The scores of both classes."""
    counted = histogram_scores(rows.labels, rows.scores)
    return Figure(
        key="score-histogram",
        title="Scores by class",
        summary="Share of the negatives and of the positives among the test rows by score.",
        x=Axis("score"),
        y=Axis("share of the class"),
        layers=[
            Bars("negatives", counted.edges, counted.negatives, "series0"),
            Bars("positives", counted.edges, counted.positives, "series1"),
        ],
    )


def draw_calibration(labels: np.ndarray, probabilities: np.ndarray) -> Figure:
    """A reliability plot: the share of positives against the probability, in ten groups of equal width."""
    group = np.minimum((probabilities * 10).astype(int), 9)
    rows = np.bincount(group, minlength=10)
    filled = rows > 0
    means = np.bincount(group, weights=probabilities, minlength=10)[filled] / rows[filled]
    positives = np.bincount(group, weights=labels == 1, minlength=10)[filled]
    rates = [wilson_interval(int(hits), int(total)) for hits, total in zip(positives, rows[filled], strict=True)]
    shares, low, high = (np.array(column) for column in zip(*rates, strict=True))
    return Figure(
        key="calibration",
        title="Calibration",
        summary="Share of positives against calibrated probability, in ten groups of rows by probability.",
        x=Axis("calibrated probability", (-0.02, 1.02)),
        y=Axis("share of positives", (-0.03, 1.04)),
        layers=[
            _diagonal("perfect calibration"),
            Points("rows grouped by probability", means, shares, low, high),
        ],
        note="Vertical lines are Wilson's 95 % intervals. Groups with few rows have long ones.",
    )


def draw_calendar(calendar: Calendar, noun: str) -> Figure:
    """Clients or groups against rounds; a client's cell has the colour of its group, an absence its own."""
    rounds = calendar.present.shape[1]
    shown = f"rounds {calendar.first_round + 1} to {calendar.first_round + rounds}"
    layer: Layer
    legend: list[tuple[str, str]] = []
    if calendar.is_aggregate:
        shares = calendar.present / np.maximum(calendar.sizes, 1)[:, None]
        layer = Shares(calendar.rows, calendar.first_round + 1, shares, f"share of the group's {noun}s that took part")
        summary = f"Share of each group's {noun}s that took part, {shown}."
    else:
        groups = len(calendar.group_names)
        names = [*calendar.group_names, "absent"]
        colours = ["empty", *(name_colour(number) for number in range(groups)), "absent"]
        codes = np.where(calendar.present > 0, 1 + calendar.row_groups[:, None], 0)
        codes = np.where(calendar.absent > 0, groups + 1, codes)
        layer = Cells(calendar.rows, calendar.first_round + 1, codes, colours, ["", *names])
        total = int(calendar.absences.sum())
        # One colour per group is a legend only as long as colours do not repeat.
        if groups <= 8:
            legend = list(zip(names, colours[1:], strict=True))[: None if total else -1]
        summary = f"Which {noun} took part in which round, {shown}; {total} absences in the whole run."
    height = 120 + int(max(5.0, min(16.0, 900 / len(calendar.rows))) * len(calendar.rows))
    return Figure(
        key="calendar",
        title="Participation calendar",
        summary=summary,
        x=Axis("round"),
        y=Axis(""),
        layers=[layer],
        height=max(220, height),
        wide=True,
        legend=legend,
    )


def _differ_widely(runs: Sequence[ReportRun]) -> bool:
    """Whether some run sent ten times what another one sent, so that a linear axis would hide the latter."""
    totals = [_measure_effort(run.records[-1], "megabytes") for run in runs]
    return max(totals, default=0) > 10 * min(totals, default=0)


def _measure_effort(record: dict[str, object], key: str) -> float:
    if key == "megabytes":
        return (float(str(record["bytes_up"])) + float(str(record["bytes_down"]))) / 1e6
    value = record[key]
    return np.nan if value is None else float(str(value))


def _draw_bands(curves: Sequence[tuple[str, CurveBand]]) -> list[Layer]:
    with_band = len(curves) <= MAX_BANDS
    return [
        Line(
            name,
            band.x,
            band.y,
            name_colour(number),
            name_dash(number),
            band.grid if with_band else None,
            band.low if with_band else None,
            band.high if with_band else None,
        )
        for number, (name, band) in enumerate(curves)
    ]


def _list_colours(names: Sequence[str]) -> list[tuple[str, str]]:
    """A legend for several curves; one curve needs none outside its figure."""
    return [(name, name_colour(number)) for number, name in enumerate(names)] if len(names) > 1 else []


def _band_note(curves: int) -> str:
    return BAND_NOTE if curves <= MAX_BANDS else f"Bands are left out of figures with more than {MAX_BANDS} curves."


def _diagonal(name: str) -> Line:
    ends = np.array([0.0, 1.0])
    return Line(name, ends, ends, "muted", "dot")
