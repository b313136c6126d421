"""Which calibration a report shows: the one that was saved with the model, or one that is fitted for the page."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedauc import keys
from fedauc.reports.report_runs import ReportRun, ScoredRows
from fedauc.scoring.calibration import Calibration, fit_calibration, read_calibration


class ChosenCalibration(NamedTuple):
    """A calibration, the rows that it is judged on, and a sentence on where it comes from."""

    calibration: Calibration
    labels: np.ndarray
    scores: np.ndarray
    note: str


def choose_calibration(run: ReportRun, rows: ScoredRows) -> ChosenCalibration:
    """The saved calibration on all test rows; without one, one half of each class fits and the other half judges."""
    if run.scorer:
        fitted_on = f"fitted on the {run.scorer['calibrated_on']} rows and shown on the test rows"
        note = f"The calibration that was saved with the model, {fitted_on}."
        return ChosenCalibration(read_calibration(run.scorer["calibration"]), rows.labels, rows.scores, note)
    fits = np.zeros(len(rows.labels), dtype=bool)
    for label in (0, 1):
        members = np.flatnonzero(rows.labels == label)
        order = keys.sample_indices(len(members), len(members), "report", "calibration", label)
        fits[members[order[: (len(members) + 1) // 2]]] = True
    calibration = fit_calibration(rows.labels[fits], rows.scores[fits])
    note = (
        "No calibration was saved with the model. Platt scaling was fitted on one half of the test rows for this page, "
        "and is shown on the other half."
    )
    return ChosenCalibration(calibration, rows.labels[~fits], rows.scores[~fits], note)
