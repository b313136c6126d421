"""A table as it was read: which columns are features, of what kind, and the label, client and group of each row."""

from __future__ import annotations

import decimal
import numbers
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedauc.data.checks import name_row
from fedauc.data.column_warnings import refuse_stray_texts, warn_of_texts
from fedauc.data.columns import (
    CodedTexts,
    are_dates,
    as_days,
    as_numbers,
    code_texts,
    is_missing,
    list_column_names,
    read_columns,
)
from fedauc.data.feature_fitting import FeatureSettings, Kind, RawColumn
from fedauc.data.io.memory import index_type
from fedauc.data.io.readers import Columns
from fedauc.data.names import find_missing_names
from fedauc.discovery import lookup

ROW_NUMBER_NAME = re.compile(r"Unnamed: \d+|index|level_0|__index_level_\d+__")
"""Names that pandas gives to a column of row numbers."""

ROW_NUMBER_REASON = "it numbers the rows; list it in --data.features to use it anyway"


class TableLayout(NamedTuple):
    """What columns are for and how they are encoded. Numbers in `categories` count as categories."""

    roles: Columns
    settings: FeatureSettings = FeatureSettings()
    categories: tuple[str, ...] = ()
    positive: str = ""
    drops_incomplete: bool = False


class RawTable(NamedTuple):
    """Features before they are encoded, the roles of the rows, and what was left out or needs attention.

    `numbers` are the numbers of the rows in the file, counted from 0.
    """

    columns: Mapping[str, RawColumn]
    label: CodedTexts
    client: np.ndarray | None
    group: np.ndarray | None
    numbers: np.ndarray
    ignored: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    dropped_rows: int = 0


def read_raw_table(frame: Any, layout: TableLayout) -> RawTable:
    """The columns of a table in memory."""
    roles = layout.roles
    chosen, warnings = choose_features(list(frame.columns), roles)
    arrays = read_columns(frame, [*dict.fromkeys([*role_names(roles), *chosen])])
    complete = find_complete_rows(arrays, layout)
    ignored, columns = dict[str, str](), dict[str, RawColumn]()
    for name in chosen:
        if name not in roles.features and is_row_number(name, arrays[name]):
            ignored[name] = ROW_NUMBER_REASON
            continue
        column = convert_column(arrays[name], name, name in layout.categories)
        columns[name] = column if len(complete) == len(frame) else column._replace(values=column.values[complete])
    refuse_stray_texts(columns.values(), layout.categories, complete)
    warnings += warn_of_texts(columns.values(), layout.categories)
    label, client, group = (arrays[name][complete] if name else None for name in roles[:3])
    assert label is not None
    return RawTable(columns, code_texts(label), client, group, complete, ignored, warnings, len(frame) - len(complete))


def role_names(roles: Columns) -> list[str]:
    """The columns that say something about rows other than their features."""
    return [name for name in (roles.label, roles.client, roles.group) if name]


def read_roles(frame: Any, roles: Columns) -> dict[str, np.ndarray]:
    """The columns of the label, the clients and the groups."""
    for name in role_names(roles):
        lookup("column", name, dict.fromkeys(list_column_names(frame), True))
    return read_columns(frame, role_names(roles))


def choose_features(names: Sequence[str], roles: Columns) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns that may be features: those listed, or all that have no other role; and warnings."""
    for name in (*role_names(roles), *roles.roster, *roles.features, *roles.ignore):
        lookup("column", name, dict.fromkeys(names, True))
    if roles.label in roles.features:
        raise ValueError(f"features lists the label column {roles.label!r}; leave it out, or every score is the label")
    others = (*role_names(roles), *roles.roster, *roles.ignore)
    chosen = roles.features or tuple(name for name in names if name not in others)
    chosen = tuple(name for name in chosen if name not in roles.ignore)
    if not chosen:
        raise ValueError(f"no column is left for features among {', '.join(names)}; list some in --data.features")
    warnings = tuple(
        f"column {name!r} is the {role} column and a feature too: scores of new {role}s then rest on a name"
        for role, name in (("client", roles.client), ("group", roles.group))
        if name and name in chosen
    )
    return chosen, warnings


def find_complete_rows(arrays: Mapping[str, np.ndarray], layout: TableLayout) -> np.ndarray:
    """The numbers of the rows that have a label, a client and a group; others are refused unless they are dropped."""
    rows = len(arrays[layout.roles.label])
    incomplete = np.zeros(rows, dtype=bool)
    for name in role_names(layout.roles):
        missing = find_missing_names(arrays[name])
        if missing.any() and not layout.drops_incomplete:
            first = int(np.flatnonzero(missing)[0])
            raise ValueError(
                f"column {name!r} is missing in {missing.sum()} rows, the first {name_row(first)}; fill them in, or "
                "use --data.incomplete-rows drop"
            )
        incomplete |= missing
    return np.flatnonzero(~incomplete).astype(index_type(rows))


def convert_column(values: np.ndarray, name: str, is_category: bool = False) -> RawColumn:
    """A column with its kind: by its type, and text by whether all of it is dates."""
    kind = infer_kind(values)
    if kind in ("number", "boolean", "empty") and not (is_category and kind != "empty"):
        return RawColumn(name, "boolean" if kind == "boolean" else "number", as_numbers(values, name))
    if kind == "date" and not is_category:
        return RawColumn(name, "date", as_days(values, name))
    codes, texts = code_texts(values)
    if not is_category and are_dates(texts):
        return RawColumn(name, "date", as_days(values, name))
    return RawColumn(name, "category", codes, texts)


def infer_kind(values: np.ndarray) -> Kind | str:
    """The kind that the type of an array says: number, boolean, date, text, or empty where every value is missing."""
    by_type = {"b": "boolean", "i": "number", "u": "number", "f": "number", "M": "date"}
    if values.dtype.kind in by_type:
        is_empty = values.dtype.kind == "f" and len(values) > 0 and bool(np.isnan(values).all())
        return "empty" if is_empty else by_type[values.dtype.kind]
    types = {type(value) for value in values.tolist() if not is_missing(value)}
    if not types:
        return "empty"
    if all(issubclass(kind, bool | np.bool_) for kind in types):
        return "boolean"
    if all(issubclass(kind, numbers.Real | decimal.Decimal | np.bool_) for kind in types):
        return "number"
    for kind in types:
        if issubclass(kind, list | dict | set | np.ndarray):
            raise ValueError(f"a column holds a {kind.__name__} in a cell; give every cell one value, or leave it out")
    return "text" if any(issubclass(kind, str) for kind in types) else "date"


def is_row_number(name: str, values: np.ndarray) -> bool:
    """Whether a column counts the rows: by the name that pandas gives it, or integers that go up by one."""
    if values.dtype.kind not in "iu" or len(values) < 3:
        return False
    return bool((np.diff(values) == 1).all()) or ROW_NUMBER_NAME.fullmatch(name) is not None
