"""The tables of a report, for a page and for LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedauc.metrics import delong_test
from fedauc.reports.attendance import Calendar
from fedauc.reports.report_runs import ReportRun, ScoredRows
from fedauc.reports.site_quality import SiteQuality
from fedauc.reports.tables import format_bytes
from fedauc.scoring.thresholds import OperatingPoint, Rate, list_operating_points

MAX_SITE_ROWS = 500
"""Rows of a table of sites: the worst ones."""


class Cell(NamedTuple):
    """What a cell shows, and the number that it is sorted by, where there is one."""

    text: str
    value: float | None = None


class ReportTable(NamedTuple):
    """A table: its name in files, caption, headers, and rows of cells. Columns after the first are numbers."""

    key: str
    caption: str
    headers: list[str]
    rows: list[list[Cell]]


def tabulate_summary(runs: Sequence[ReportRun]) -> ReportTable:
    """A row per run: final metrics with interval, rounds, traffic, seconds, and the paired test against the first."""
    metrics = runs[0].metrics
    several = len(runs) > 1
    headers = ["run", *_head_metrics(runs), "rounds", "up", "down", "seconds"]
    if several:
        headers += ["difference", "p"]
    all_done = all(_shorten_status(run) == "done" for run in runs)
    headers += [] if all_done else ["status"]
    rows = []
    for run in runs:
        final, last = run.final or {}, run.records[-1] if run.records else {}
        cells = [Cell(run.name)]
        for metric in metrics:
            value = final.get(metric.columns[0])
            ends = [final.get(column) for column in metric.columns[1:]]
            text = format_number(value)
            if ends and None not in ends:
                text += f" [{format_number(ends[0])}, {format_number(ends[1])}]"
            cells.append(Cell(text, value))
        traffic = [last.get(key) for key in ("bytes_up", "bytes_down")]
        cells.append(Cell(f"{last.get('rounds', 0):,}", last.get("rounds", 0)))
        cells += [Cell("–" if amount is None else format_bytes(amount), amount) for amount in traffic]
        seconds = last.get("seconds")
        cells.append(Cell("–" if seconds is None else f"{seconds:,.1f}", seconds))
        cells += _test_against(runs[0], run) if several else []
        cells += [] if all_done else [Cell(_shorten_status(run))]
        rows.append(cells)
    caption = "Final test metrics of each run, with 95 % intervals where a metric has one."
    if several:
        caption += (
            f" Difference and p: the AUC minus that of {runs[0].name}, by DeLong's paired test on the same test rows; "
            "p-values are not corrected for the number of tests."
        )
    return ReportTable("summary", caption, headers, rows)


def tabulate_pairs(runs: Sequence[ReportRun]) -> ReportTable | None:
    """The p-value of DeLong's paired test for each pair of runs; None where fewer than three can be compared."""
    tested = [run for run in runs if run.scored is not None]
    if len(tested) < 3:
        return None
    rows = []
    for first in tested:
        cells = [Cell(first.name)]
        cells += [Cell("–") if first is second else _test_against(second, first)[1] for second in tested]
        rows.append(cells)
    caption = "Two-sided p-values of DeLong's paired test for each pair of runs, on the same test rows."
    return ReportTable("pairs", caption, ["run", *(run.name for run in tested)], rows)


def tabulate_sites(lines: Sequence[SiteQuality], noun: str, key: str) -> ReportTable:
    """A row per site or group, the lowest AUC first."""
    rows = []
    for line in lines[:MAX_SITE_ROWS]:
        interval = "" if line.low is None or line.high is None else f"[{line.low:.3f}, {line.high:.3f}]"
        rows.append(
            [
                Cell(line.name),
                Cell(format_number(line.auc), line.auc),
                Cell(interval or line.note, line.low),
                Cell(f"{line.rows:,}", line.rows),
                Cell(f"{line.positives:,}", line.positives),
            ]
        )
    caption = f"Test AUC per {noun} with DeLong's 95 % interval, the lowest first."
    if len(lines) > len(rows):
        caption += f" Of {len(lines):,}, the {len(rows)} lowest are listed."
    return ReportTable(f"auc-by-{key}", caption, [noun, "AUC", "95 % interval", "test rows", "positives"], rows)


def tabulate_thresholds(rows: ScoredRows, saved: dict[str, Any] | None = None) -> ReportTable:
    """The saved operating point on the test rows, then operating points by false positive rate and by recall."""
    points = list_operating_points(rows.labels, rows.scores)
    names = [point.rule.replace("fpr", "FPR at most").replace("recall", "recall at least") for point in points]
    if saved is not None:
        alerts, positive = rows.scores >= saved["threshold"], rows.labels == 1
        counts = (alerts & positive, alerts & ~positive, positive, ~positive)
        points.insert(0, OperatingPoint(saved["rule"], saved["threshold"], *(int(rows.sum()) for rows in counts)))
        names.insert(0, f"saved with the model ({saved['rule']})")
    lines = []
    for bound, point in zip(names, points, strict=True):
        rates = (point.recall, point.fpr, point.precision)
        lines.append(
            [
                Cell(bound),
                Cell(f"{point.threshold:.4g}", point.threshold),
                *(Cell(_format_rate(rate), rate.estimate) for rate in rates),
                Cell(f"{point.alerts_per_1000.estimate:.1f}", point.alerts_per_1000.estimate),
            ]
        )
    headers = ["rule", "threshold", "recall", "false positive rate", "precision", "alerts per 1,000"]
    caption = (
        "Thresholds on the raw score and what they do on the test rows, with Wilson's 95 % intervals. They are chosen "
        "on these rows, except one that was saved with the model. Precision and alerts hold for data with the same "
        "share of positives."
    )
    return ReportTable("thresholds", caption, headers, lines)


def tabulate_traffic(run: ReportRun) -> ReportTable | None:
    """Bytes and numbers in both directions: in all, per round and per visit; None before the first record."""
    if not run.records:
        return None
    last = run.records[-1]
    rows = []
    for direction, key in (("server to clients", "down"), ("clients to server", "up")):
        amount, floats = last[f"bytes_{key}"], last[f"floats_{key}"]
        per_round, per_visit = amount / max(1, last["rounds"]), amount / max(1, last["visits"])
        cells = [Cell(format_bytes(round(value)), value) for value in (amount, per_round, per_visit)]
        rows.append([Cell(direction), *cells, Cell(f"{floats:,}", floats)])
    caption = (
        f"Traffic of {last['rounds']:,} rounds with {last['visits']:,} visits and {last['absences']:,} absences, "
        "counted from what is sent: models, updates and scores, without protocol overhead."
    )
    return ReportTable("traffic", caption, ["direction", "total", "per round", "per visit", "numbers"], rows)


def tabulate_attendance(calendar: Calendar, noun: str) -> ReportTable:
    """Visits and absences of each row of a calendar."""
    first = "group" if calendar.is_aggregate else noun
    rows = [
        [
            Cell(name),
            Cell(calendar.group_names[group]),
            Cell(f"{size:,}", size),
            Cell(f"{visits:,}", visits),
            Cell(f"{absences:,}", absences),
        ]
        for name, group, size, visits, absences in zip(
            calendar.rows,
            calendar.row_groups.tolist(),
            calendar.sizes.tolist(),
            calendar.visits.tolist(),
            calendar.absences.tolist(),
            strict=True,
        )
    ]
    headers = [first, "group", f"{noun}s", "visits", "absences"]
    if not calendar.is_aggregate:
        headers, rows = [*headers[:2], *headers[3:]], [[*row[:2], *row[3:]] for row in rows]
    else:
        headers, rows = [headers[0], *headers[2:]], [[row[0], *row[2:]] for row in rows]
    return ReportTable("attendance", "Visits and absences in all rounds so far.", headers, rows)


def tabulate_groups(run: ReportRun) -> ReportTable | None:
    """Clients, training rows and positives of each group; None for folders without a roster."""
    if run.roster is None:
        return None
    rows = [
        [
            Cell(group["name"]),
            *(Cell(f"{group[key]:,}", group[key]) for key in ("clients", "rows", "positives")),
            Cell(f"{group['positives'] / max(1, group['rows']):.2%}", group["positives"] / max(1, group["rows"])),
        ]
        for group in run.roster.groups
    ]
    headers = ["group", "clients", "training rows", "positives", "share"]
    return ReportTable("groups", "Training rows of each group.", headers, rows)


def tabulate_privacy(run: ReportRun) -> ReportTable | None:
    """What a private run has spent, and a row per part with its noise and its cost alone; None for other runs."""
    if run.privacy is None:
        return None
    guarantee, spent = run.privacy, run.spent_epsilon
    noises = {"training": guarantee["noise_multiplier"], **guarantee["one_off"]}
    noises |= {"evaluation": guarantee["evaluation_noise"]} if guarantee["evaluations"] else {}
    times = {"training": guarantee["participations"], "evaluation": guarantee["evaluations"]}
    rows = [
        [
            Cell(name),
            Cell(f"{times.get(name, 1):,}", times.get(name, 1)),
            Cell(f"{noise:.4g}", noise),
            Cell(f"{guarantee['epsilon_alone'][name]:.4g}", guarantee["epsilon_alone"][name]),
        ]
        for name, noise in noises.items()
    ]
    budget = guarantee["epsilon"]
    rows.append([Cell("everything, at the end"), Cell("–"), Cell("–"), Cell(f"{budget:.4g}", budget)])
    rows.append(
        [Cell("everything, so far"), Cell("–"), Cell("–"), Cell("–" if spent is None else f"{spent:.4g}", spent)]
    )
    caption = (
        f"Epsilon at delta {guarantee['delta']:g}, for each {guarantee['unit']}. Times: how often it takes part at "
        "most. Noise: its standard deviation over the bound of what is released. The parts are what each would cost "
        "alone at the end of the run; together they cost less than their sum."
    )
    return ReportTable("privacy", caption, ["part", "times", "noise", "epsilon"], rows)


def flatten_document(document: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Names and values of nested JSON, for a table of settings.

    >>> flatten_document({"a": 1, "b": {"c": [2, 3], "d": None}})
    [('a', '1'), ('b.c', '2, 3'), ('b.d', 'none')]
    """
    lines: list[tuple[str, str]] = []
    for key, value in document.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            lines += flatten_document(value, f"{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for number, item in enumerate(value, 1):
                lines += flatten_document(item, f"{name}.{number}.")
        else:
            items = value if isinstance(value, list) else [value]
            lines.append((name, ", ".join("none" if item is None else str(item) for item in items) or "none"))
    return lines


def format_number(value: float | None) -> str:
    """Four digits, or a dash.

    >>> format_number(0.98765), format_number(None)
    ('0.9877', '–')
    """
    return "–" if value is None else f"{value:.4f}"


def format_p_value(value: float) -> str:
    """Three digits; tiny ones as a bound.

    >>> format_p_value(0.0412), format_p_value(1e-9)
    ('0.041', '<0.001')
    """
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _head_metrics(runs: Sequence[ReportRun]) -> list[str]:
    return [metric.label for metric in runs[0].metrics]


def _shorten_status(run: ReportRun) -> str:
    if run.done:
        return "stopped early" if "stopped_early" in run.result else "done"
    return "unfinished" if run.status == "unfinished" else "stopped"


def _test_against(reference: ReportRun, run: ReportRun) -> list[Cell]:
    """Difference of the AUCs and p-value, or dashes where the runs did not score the same rows."""
    first, second = reference.scored, run.scored
    if run is reference or first is None or second is None or not np.array_equal(first.labels, second.labels):
        return [Cell("–"), Cell("–")]
    tested = delong_test(second.labels, second.scores, first.scores)
    return [Cell(f"{tested.difference:+.4f}", tested.difference), Cell(format_p_value(tested.p_value), tested.p_value)]


def _format_rate(rate: Rate) -> str:
    if np.isnan(rate.estimate):
        return "–"
    return f"{rate.estimate:.3f} [{rate.low:.3f}, {rate.high:.3f}]"
