"""What is in the data of a run: rows, positives, sites, features, and the columns that were left out and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedauc.data.features import FeatureEncoder, describe_kind
from fedauc.data.preparation import Split

SHOWN = 12
"""How many names a sentence lists."""

PLURALS = {"number": "numbers", "category": "categories", "date": "dates"}


def describe_data(split: Split) -> dict[str, Any]:
    """Plain values for JSON."""
    clients, summary = split.train, split.summary
    counts = {"train": (len(clients.rows), int(clients.census.positives.sum()))}
    for name, part in (("validation", split.validation), ("test", split.test)):
        if part is not None:
            counts[name] = (len(part.labels), int(part.labels.sum()))
    features = [] if split.encoder is None else split.encoder.columns
    return {
        "rows": {name: rows for name, (rows, _) in counts.items()},
        "positives": {name: positives for name, (_, positives) in counts.items()},
        "label_values": {"negative": split.label_values[0], "positive": split.label_values[1]},
        "sites": len(clients),
        "inputs": list(clients.inputs.shape[1:]),
        "features": [
            {"name": column.name, "kind": describe_kind(column), "inputs": len(column.feature_names)}
            for column in features
        ],
        "dropped_rows": summary.dropped_rows,
        "ignored": dict(summary.ignored),
        "warnings": list(summary.warnings),
        "preparation": summary.traffic._asdict(),
    }


def list_data_notes(split: Split) -> list[str]:
    """What a user reads before training on a table, in one sentence each; none for data that come prepared."""
    summary, encoder = split.summary, split.encoder
    if encoder is None or not summary.traffic.sites:
        return []
    described = describe_data(split)
    rows = ", ".join(
        f"{count} {part} rows ({described['positives'][part]} positive)" for part, count in described["rows"].items()
    )
    notes = [
        f"{rows} of {described['sites']} sites; label {split.label_values[1]!r} is positive",
        f"{len(encoder.columns)} columns become {len(encoder.feature_names)} inputs: {_list_features(encoder)}",
    ]
    if summary.dropped_rows:
        noun, verb = ("row", "was") if summary.dropped_rows == 1 else ("rows", "were")
        notes.append(f"{summary.dropped_rows} {noun} without a label, a client or a group {verb} dropped")
    if summary.ignored:
        reasons = "; ".join(f"{name!r}: {reason}" for name, reason in summary.ignored.items())
        notes.append(f"columns left out: {reasons}")
    traffic = summary.traffic
    notes.append(
        f"these inputs were prepared from summaries of the sites: {traffic.bytes_up} bytes up and {traffic.bytes_down} "
        "bytes down are in the traffic of the run"
    )
    return [*notes, *summary.warnings]


def _list_features(encoder: FeatureEncoder) -> str:
    by_kind: dict[str, list[str]] = {}
    for column in encoder.columns:
        by_kind.setdefault(describe_kind(column), []).append(column.name)
    return "; ".join(f"{PLURALS[kind]} {_shorten_list(names)}" for kind, names in by_kind.items())


def _shorten_list(names: Sequence[str]) -> str:
    listed = ", ".join(names[:SHOWN])
    return f"{listed} and {len(names) - SHOWN} more" if len(names) > SHOWN else listed
