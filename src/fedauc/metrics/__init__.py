"""How good a ranking is: AUC and its uncertainty, for all rows, within groups, and for embeddings.

Every function is pure. Labels are 0 or 1, and there is one score per row; a higher score means more likely positive.
Arrays, lists and tensors on any device are accepted. Ties count one half, so a constant score has an AUC of 0.5. In the
docstrings m and n are the numbers of positives and negatives, and the wins of a pair (x, x') are
1[h > h'] + 1[h = h'] / 2.

A `Metric` that a configuration can name is one file with the function and a small class around it; `find_metrics`
finds it by its name, and `parse_metric` makes it from a text such as `pauc@0.05`.
"""

from __future__ import annotations

from collections.abc import Iterable

from fedauc.discovery import find_members, lookup, read_members
from fedauc.fields import list_fields
from fedauc.metrics.ap import average_precision
from fedauc.metrics.class_auc import one_class_auc
from fedauc.metrics.delong import Interval, PairedTest, delong_interval, delong_test
from fedauc.metrics.embeddings import pair_auc
from fedauc.metrics.groups import group_auc
from fedauc.metrics.metric import Measurement, Metric
from fedauc.metrics.ndcg import normalized_discounted_gain
from fedauc.metrics.ovr_auc import one_vs_rest_auc
from fedauc.metrics.pauc import partial_auc
from fedauc.metrics.precision import precision_at_top
from fedauc.metrics.ranks import auc
from fedauc.metrics.recall import recall_at_fpr
from fedauc.metrics.tpauc import two_way_partial_auc
from fedauc.plugins import cache_until_registration

__all__ = [
    "Interval",
    "Measurement",
    "Metric",
    "PairedTest",
    "auc",
    "average_precision",
    "delong_interval",
    "delong_test",
    "find_metrics",
    "group_auc",
    "normalized_discounted_gain",
    "one_class_auc",
    "one_vs_rest_auc",
    "pair_auc",
    "parse_metric",
    "parse_metrics",
    "partial_auc",
    "precision_at_top",
    "recall_at_fpr",
    "two_way_partial_auc",
]

DEFAULT_METRICS = ("auc", "ap")
"""What a run measures unless it is told otherwise. The first metric of a list is the one that decides."""


def list_class_metrics(classes: int) -> tuple[str, ...]:
    """What is measured by default where labels are numbers of classes: the mean, and the AUC of every class.

    >>> list_class_metrics(2)
    ('ovr-auc', 'class-auc@0', 'class-auc@1')
    """
    return ("ovr-auc", *(f"class-auc@{number}" for number in range(classes)))


@cache_until_registration
def find_metrics() -> dict[str, type[Metric]]:
    """Every metric by name."""
    return find_members(__name__, Metric)  # type: ignore[type-abstract]


def parse_metric(text: str) -> Metric:
    """The metric that a text `name@argument:argument` describes; arguments that are left out have their defaults.

    >>> parse_metric("pauc@0.01"), parse_metric("tpauc").text
    (PartialAUC(max_fpr=0.01), 'tpauc@0.5:0.5')
    """
    name, at, rest = text.strip().partition("@")
    kind = lookup("metric", name, find_metrics())
    options, values = list_fields(kind), rest.split(":") if at else []
    if len(values) > len(options):
        takes = f"takes {len(options)} ({', '.join(info.name for info in options)})" if options else "takes none"
        count = f"{len(values)} argument{'s' * (len(values) > 1)}"
        raise ValueError(f"metric {text!r} has {count}; {name} {takes}: write {kind().text}")
    arguments: dict[str, float] = {}
    for info, value in zip(options, values, strict=False):
        try:
            arguments[info.name] = int(value) if info.type is int else float(value)
        except ValueError as error:
            expected = "a whole number" if info.type is int else "a number"
            message = f"metric {text!r} has {info.name} {value!r}; it must be {expected}: write {kind().text}"
            raise ValueError(message) from error
    try:
        return kind(**arguments)
    except ValueError as error:
        raise ValueError(f"metric {text!r}: {error}") from error


def parse_metrics(given: str | Metric | Iterable[str | Metric]) -> tuple[Metric, ...]:
    """Metrics from a text such as `auc,pauc@0.05`, from one, or from several; at least one, each once."""
    metrics = read_members("metrics", given, Metric, parse_metric)  # type: ignore[type-abstract]
    if not metrics:
        raise ValueError(f"metrics is empty; name at least 1, such as {','.join(DEFAULT_METRICS)}")
    names = [metric.text for metric in metrics]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"metrics lists {name!r} {names.count(name)} times; list it once")
    return metrics
