"""Load a table into memory: read its columns, split its rows, fit the encoder on the training part, encode all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from fedauc.data.checks import naming_source
from fedauc.data.column_warnings import warn_of_leaks
from fedauc.data.columns import as_pandas_frame, code_texts
from fedauc.data.dataset import Rows, TableParts, TableSummary
from fedauc.data.feature_fitting import FittedFeatures, RawEncoder, fit_features
from fedauc.data.features import FeatureEncoder
from fedauc.data.io.readers import Columns, check_exists, check_frame, naming_file, read_file_frame
from fedauc.data.labels import Labels, check_label_classes, read_labels
from fedauc.data.names import as_names, enumerate_names
from fedauc.data.raw_tables import TableLayout, find_complete_rows, read_raw_table, read_roles

Split = Callable[[Rows], dict[str, Rows]]
"""Divides rows, whose inputs are row numbers, into parts by name."""


def load_table(sources: Sequence[Any], layout: TableLayout, split: Split) -> TableParts:
    """The parts of one table, or of two of which the second holds the test rows; a source is a path or a frame."""
    with naming_table(sources[0]):
        raw = read_raw_table(_read_frame(sources[0], layout.roles), layout)
        labels = read_labels(raw.label, layout.positive, layout.roles.label)
        check_label_classes(labels, layout.roles.label)
    parts = split(Rows(np.arange(len(labels.labels)), labels.labels, raw.client, raw.group, raw.numbers))
    train = parts["train"]
    columns = [column._replace(values=column.values[train.inputs]) for column in raw.columns.values()]
    fitted = fit_features(columns, layout.settings, *number_sites(train.client))
    check_features(fitted, raw.ignored)
    encoder = RawEncoder(fitted.encoder, raw.columns)
    encoded = {name: rows._replace(inputs=encoder.encode_rows(np.asarray(rows.inputs))) for name, rows in parts.items()}
    dropped_rows = raw.dropped_rows
    for source in sources[1:]:
        with naming_table(source):
            frame = _read_frame(source, layout.roles)
            encoded["test"] = encode_frame(frame, layout, fitted.encoder, labels.values)
            dropped_rows += len(frame) - len(encoded["test"].labels)
    return make_parts(encoded, fitted, labels, TableSummary(raw.ignored, raw.warnings, dropped_rows=dropped_rows))


def encode_frame(frame: Any, layout: TableLayout, encoder: FeatureEncoder, label_values: tuple[str, str]) -> Rows:
    """The rows of another table, encoded in the same way."""
    arrays = read_roles(frame, layout.roles)
    complete = find_complete_rows(arrays, layout)
    positive = label_values[1] if layout.positive else ""
    coded = code_texts(arrays[layout.roles.label][complete])
    labels = read_labels(coded, positive, layout.roles.label).labels
    client, group = (arrays[name][complete] if name else None for name in layout.roles[1:3])
    inputs = encoder.encode(frame)
    return Rows(inputs if len(complete) == len(inputs) else inputs[complete], labels, client, group, complete)


def number_sites(client: np.ndarray | None) -> tuple[np.ndarray | None, int]:
    """The site of each row and the number of sites; without a client column all rows are of one site."""
    if client is None:
        return None, 1
    names, site = enumerate_names(as_names(client, "client", len(client)))
    return site, len(names)


def check_features(fitted: FittedFeatures, ignored: Mapping[str, str]) -> None:
    """Refuse a table of which no column is left."""
    if not fitted.encoder.columns:
        reasons = "; ".join(f"{name!r}: {reason}" for name, reason in {**ignored, **fitted.ignored}.items())
        raise ValueError(f"no column is left for features ({reasons}): add columns, or list some in --data.features")


def make_parts(parts: Mapping[str, Rows], fitted: FittedFeatures, labels: Labels, summary: TableSummary) -> TableParts:
    """The loaded table with what became of its columns."""
    leaks = warn_of_leaks(np.asarray(parts["train"].inputs), parts["train"].labels, fitted.encoder)
    warnings = (*summary.warnings, *((labels.note,) if labels.note else ()), *leaks)
    ignored = {**summary.ignored, **fitted.ignored}
    complete_summary = summary._replace(ignored=ignored, warnings=warnings, traffic=fitted.traffic)
    train, validation, test = parts["train"], parts.get("validation"), parts["test"]
    return TableParts(train, validation, test, "", {}, fitted.encoder, labels.values, complete_summary)


def naming_table(source: Any) -> AbstractContextManager[None]:
    """Make every ValueError name the file, or say that it is about a frame."""
    if not isinstance(source, str):
        return naming_source("table")
    check_exists(Path(source))
    return naming_file(Path(source))


def _read_frame(source: Any, roles: Columns) -> Any:
    frame = read_file_frame(Path(source), roles) if isinstance(source, str) else as_pandas_frame(source)
    check_frame(frame)
    return frame
