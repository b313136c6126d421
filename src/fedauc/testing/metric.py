"""The suite of a metric: a pure function of labels and scores, with a text and columns of its own."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from fedauc import keys, plugins
from fedauc.metrics import find_metrics, parse_metric
from fedauc.metrics.metric import Measurement, Metric
from fedauc.testing._expectations import check_configuration, expect, find_outsiders, untouched_generators

ROWS = 400
"""Every fourth row is a positive."""


def check_metric(metric: Metric) -> None:
    """Check a metric on scores with and without ties, and on embeddings where it takes them."""
    check_configuration(metric, Metric)
    check_text(metric)
    for levels in (None, 5):
        check_measurement(metric, levels)
        check_order(metric, levels)
    if metric.takes_embeddings:
        labels, scores = draw_rows(None)
        embeddings = np.stack([scores, np.sin(np.arange(ROWS))], axis=1)
        check_value(metric.measure(labels, embeddings), "embeddings")


def draw_rows(levels: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Labels, and scores that lean the right way, cut into so many levels if that is given."""
    generator = keys.numpy_generator(0, "rows")
    labels = (np.arange(ROWS) % 4 == 0).astype(np.float64)
    scores = generator.normal(size=ROWS) + labels
    return labels, scores if levels is None else np.floor(scores.clip(-2, 2.9) * levels / 5)


def check_text(metric: Metric) -> None:
    """The text gives the metric back, and no other metric of the library has its columns."""
    with plugins.restore_registrations():
        for outsider in find_outsiders(metric):
            plugins.add_class(outsider)
        expect(parse_metric(metric.text) == metric, f"the text {metric.text!r} must give the metric back")
        others = [kind() for kind in find_metrics().values() if kind is not type(metric)]
    taken = {column: known for known in others for column in known.columns}
    for column in metric.columns:
        expect(column not in taken, f"column {column!r} belongs to {taken.get(column)}; use another name")
    ends = 2 if metric.has_interval else 0
    columns = f"the columns are {metric.columns}"
    expect(len(metric.columns) == 1 + ends, f"{columns}; there must be one for the value and {ends} for the interval")
    expect(len(set(metric.columns)) == 1 + ends, f"{columns}; they must differ")


def check_measurement(metric: Metric, levels: int | None) -> None:
    """The value is a plain number, the same for every order of the rows, and the arrays stay as they were."""
    labels, scores = draw_rows(levels)
    copies = labels.copy(), scores.copy()
    with untouched_generators(f"metric {metric.text}"):
        measured = metric.measure(labels, scores)
    check_value(measured, "scores")
    expect(np.array_equal(labels, copies[0]) and np.array_equal(scores, copies[1]), "measure changes its arguments")
    order = keys.numpy_generator(0, "order").permutation(ROWS)
    shuffled = metric.measure(labels[order], scores[order])
    close = np.isclose(measured.value, shuffled.value, rtol=1e-12, atol=1e-12)
    expect(close, f"the value is {measured.value}, but {shuffled.value} for the same rows in another order")
    has_interval = measured.low is not None and measured.high is not None
    expect(has_interval == metric.has_interval, f"has_interval is {metric.has_interval}, but measure gives {measured}")
    if measured.low is not None and measured.high is not None:
        inside = measured.low <= measured.value <= measured.high
        expect(inside, f"the value lies outside its interval: {measured}")


def check_value(measured: Any, what: str) -> None:
    """A measurement whose value is a finite Python float, as JSON needs it."""
    expect(isinstance(measured, Measurement), f"measure returns {measured!r} for {what}; it must be a Measurement")
    expect(type(measured.value) is float, f"the value for {what} is {measured.value!r}; it must be a Python float")
    expect(np.isfinite(measured.value), f"the value for {what} is {measured.value}; it must be finite")
    expect(json.loads(json.dumps(measured)) == list(measured), f"{measured} does not survive JSON")


def check_order(metric: Metric, levels: int | None) -> None:
    """Higher is better: nothing beats a perfect score, and a reversed one is worse."""
    labels, scores = draw_rows(levels)
    perfect, noisy, reverse = (metric.measure(labels, values).value for values in (labels, scores, -labels))
    values = f"perfect scores have {perfect}, noisy ones {noisy} and reversed ones {reverse}"
    expect(perfect >= max(noisy, reverse), f"{values}; higher must be better")
    expect(perfect > reverse, f"{values}; the metric does not tell them apart")
