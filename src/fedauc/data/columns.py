"""Columns of any table (pandas, polars, pyarrow, a mapping of arrays) as numpy arrays: numbers, texts and days.

A missing value is None, NaN, NaT, pandas' NA or an empty text, whatever library the table comes from.
"""

from __future__ import annotations

import datetime
import decimal
import numbers
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fedauc.data.checks import name_row

SHOWN = 5
"""How many names an error lists."""

ISO_DATE = re.compile(r"\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?\s?(?:Z|[+-]\d\d:?\d\d)?)?")
"""A date, or a date and a time, as ISO 8601 writes it."""

SECONDS_PER_DAY = 86_400.0

BOOLEAN_WORDS = ("true", "false", "yes", "no", "y", "n", "t", "f", "on", "off")
"""Texts that people write for booleans, in lower case."""


def list_column_names(table: Any) -> list[str]:
    """The names of a table's columns."""
    if isinstance(table, Mapping):
        return list(table)
    if hasattr(table, "collect_schema"):
        return list(table.collect_schema().names())
    names = table.column_names if _library_of(table) == "pyarrow" else table.columns
    return [name if isinstance(name, str) else str(name) for name in names]


def is_table(values: Any) -> bool:
    """Whether the columns of `values` have names: a frame of pandas or polars, a table of pyarrow, or a mapping."""
    return isinstance(values, Mapping) or _library_of(values) != ""


def read_columns(table: Any, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The named columns as arrays; numbers keep their type, and everything else becomes objects or datetime64.

    >>> read_columns({"age": [31, 45], "state": ["CA", None]}, ["state"])
    {'state': array(['CA', None], dtype=object)}
    """
    if isinstance(table, torch.Tensor | np.ndarray) or not is_table(table):
        raise ValueError(
            f"the table is a {type(table).__name__}, which has no column names; give a frame of pandas or polars, a "
            "table of pyarrow, or a mapping of arrays"
        )
    known = set(list_column_names(table))
    if missing := [name for name in names if name not in known]:
        noun = "column" if len(missing) == 1 else "columns"
        listed = ", ".join(map(repr, missing[:SHOWN])) + (", ..." if len(missing) > SHOWN else "")
        raise ValueError(f"the table lacks the {noun} {listed}; it has {', '.join(map(str, sorted(known)))}")
    if isinstance(table, Mapping):
        return {name: _as_column(table[name], name) for name in names}
    library = _library_of(table)
    if library == "polars":
        table = (table.collect() if hasattr(table, "collect") else table).select(list(names)).to_arrow()
    elif library == "pyarrow":
        table = table.select(list(names))
    frame = table if library == "pandas" else table.to_pandas(date_as_object=False)
    return {name: read_pandas_column(frame[name]) for name in names}


def select_features(inputs: Any, names: Sequence[str]) -> Any:
    """The columns of a table with these names as an array, in this order; anything without column names as it is."""
    if not names or not is_table(inputs):
        return inputs
    columns = read_columns(inputs, names)
    return np.stack([as_numbers(columns[name], name) for name in names], axis=1)


def as_pandas_frame(table: Any) -> Any:
    """A pandas frame of a polars frame, a pyarrow table or a mapping of arrays; a pandas frame is returned as it is."""
    library = _library_of(table)
    if library == "pandas":
        return table
    import pandas as pd

    if library == "polars":
        table = (table.collect() if hasattr(table, "collect") else table).to_arrow()
    if library in ("polars", "pyarrow"):
        return table.to_pandas(date_as_object=False)
    if isinstance(table, Mapping):
        return pd.DataFrame(dict(table))
    raise ValueError(
        f"the table is a {type(table).__name__}, which has no column names; give a frame of pandas or polars, a table "
        "of pyarrow, or a mapping of arrays"
    )


def read_pandas_column(column: Any) -> np.ndarray:
    """A pandas column as an array: plain numbers as they are, others as float64, datetime64 or objects."""
    kind = column.dtype.kind if hasattr(column.dtype, "kind") else "O"
    if isinstance(column.dtype, np.dtype) and kind in "biufM":
        plain: np.ndarray = column.to_numpy()
        return plain
    if kind == "M":
        # Where a column has a time zone, these are the same instants in UTC.
        naive = column if column.dt.tz is None else column.dt.tz_convert("UTC").dt.tz_localize(None)
        instants: np.ndarray = naive.to_numpy(dtype="datetime64[us]", na_value=np.datetime64("NaT"))
        return instants
    if kind in "iuf":
        values: np.ndarray = column.to_numpy(dtype=np.float64, na_value=np.nan)
        return values
    objects: np.ndarray = column.to_numpy(dtype=object)
    return objects


def as_numbers(values: np.ndarray, name: str, may_be_missing: bool = True) -> np.ndarray:
    """A column of numbers or booleans as float64, NaN where it is missing; text and infinite values are refused.

    The refusal advises leaving a value empty only where one may be missing.

    >>> as_numbers(np.array([True, None, 2], dtype=object), "flag")
    array([ 1., nan,  2.])
    """
    if values.dtype.kind in "biuf":
        converted = values.astype(np.float64)
    elif values.dtype.kind == "O":
        try:
            converted = np.fromiter(map(_to_number, values.tolist()), np.float64, len(values))
        except TypeError:
            raise ValueError(_explain_texts(values.tolist(), name, may_be_missing)) from None
    else:
        raise ValueError(f"column {name!r} is {_describe_kind(values)}; it must hold numbers: convert it")
    # The bound is float32's, the type of inputs.
    wrong = np.abs(converted) > np.finfo(np.float32).max
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        if np.isinf(converted[row]):
            remedy = "leave them empty if they are missing" if may_be_missing else "correct them"
            raise ValueError(
                f"inputs holds {wrong.sum()} values that are not finite, the first {converted[row]} at "
                f"{name_row(row)}, column {name!r}: {remedy}, or drop their rows"
            )
        raise ValueError(
            f"inputs holds {wrong.sum()} values beyond float32, the first {converted[row]:g} at {name_row(row)}, "
            f"column {name!r}; the bound is {np.finfo(np.float32).max:.2g}: rescale that column or drop it"
        )
    return converted


def as_days(values: np.ndarray, name: str) -> np.ndarray:
    """A column of dates or times as days since 1970 in float64, NaN where it is missing.

    >>> as_days(np.array(["1970-01-02", None, "1970-01-03 12:00"], dtype=object), "day")
    array([1. , nan, 2.5])
    """
    if values.dtype.kind == "M":
        missing = np.isnat(values)
        microseconds = values.astype("datetime64[us]").astype(np.int64) / (1e6 * SECONDS_PER_DAY)
        return np.where(missing, np.nan, microseconds)
    coded = code_texts(values, lambda value: value if _is_instant(value) else to_text(value))
    days = np.array([_to_days(value, name) for value in coded.values] + [np.nan])
    return np.asarray(days[coded.codes])


class CodedTexts(NamedTuple):
    """A column as codes `[n]` into its distinct values in order of appearance; -1 where it is missing."""

    codes: np.ndarray
    values: list[Any]


def code_texts(values: np.ndarray, convert: Callable[[Any], Any] | None = None) -> CodedTexts:
    """Number the distinct texts of a column.

    >>> code_texts(np.array(["b", "a", None, " b"], dtype=object))
    CodedTexts(codes=array([ 0,  1, -1,  0], dtype=int32), values=['b', 'a'])
    """
    to_value = convert or to_text
    code_of_raw: dict[Any, int] = {}
    code_of_value: dict[Any, int] = {}
    codes = np.empty(len(values), dtype=np.int32)
    for row, raw in enumerate(values.tolist()):
        # True and 1 are equal as keys, but not as texts.
        key = (raw, type(raw)) if isinstance(raw, bool | float) else raw
        code = code_of_raw.get(key)
        if code is None:
            value = None if is_missing(raw) else to_value(raw)
            code = -1 if value is None else code_of_value.setdefault(value, len(code_of_value))
            code_of_raw[key] = code
        codes[row] = code
    return CodedTexts(codes, list(code_of_value))


def to_text(value: Any) -> str | None:
    """A category as text, the same for 3 and 3.0, without spaces around it; None where nothing is left."""
    if isinstance(value, bool | np.bool_):
        return str(bool(value)).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip() or None


def is_missing(value: Any) -> bool:
    """Whether a value stands for a missing one. Only NaN and NaT differ from themselves; pandas' NA has its text."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or str(value) in ("<NA>", "NaT") or (isinstance(value, numbers.Number) and value != value)


def are_dates(values: Iterable[Any]) -> bool:
    """Whether all values are dates, or texts of dates in ISO 8601, such as `2024-01-31` or `2024-01-31T12:00`."""
    return all(_is_instant(value) or (isinstance(value, str) and ISO_DATE.fullmatch(value.strip())) for value in values)


def _library_of(table: Any) -> str:
    """The library of a frame or table; empty for anything else, such as an array or a pandas column."""
    kind = type(table)
    library, name = kind.__module__.split(".")[0], kind.__name__
    names = {"pandas": ("DataFrame",), "polars": ("DataFrame", "LazyFrame"), "pyarrow": ("Table", "RecordBatch")}
    is_known = name in names.get(library, ()) or any(base.__name__ == "DataFrame" for base in kind.__mro__[1:])
    return library if is_known and library in names else ""


def _as_column(values: Any, name: str) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    elif type(values).__module__.split(".")[0] == "pandas":
        values = read_pandas_column(values) if hasattr(values, "dtype") else np.asarray(values)
    array = values if isinstance(values, np.ndarray) else np.array(list(values), dtype=object)
    if array.ndim != 1:
        raise ValueError(f"column {name!r} has shape {array.shape}; give one value per row")
    if array.dtype.kind == "O" and all(type(value) in (int, float, bool) for value in array.tolist()):
        return np.asarray(array.tolist())
    return array if array.dtype.kind in "biufMO" else array.astype(object)


def _to_number(value: Any) -> float:
    if is_missing(value):
        return np.nan
    if _is_number(value):
        return float(value)
    raise TypeError(f"{value!r} is no number")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real | decimal.Decimal | np.bool_)


def _explain_texts(values: Sequence[Any], name: str, may_be_missing: bool) -> str:
    """Why a column is no numbers. One wrong cell makes text of all others, so the first that cannot be read counts."""
    texts = {row: value for row, value in enumerate(values) if not (is_missing(value) or _is_number(value))}
    wrong = {row: value for row, value in texts.items() if not _can_be_read(value)}
    words = {row: str(value).strip().lower() for row, value in wrong.items()}
    has_booleans = bool(words) and set(words.values()) <= set(BOOLEAN_WORDS)
    if has_booleans:
        wrong = {row: wrong[row] for row, word in words.items() if word not in ("true", "false")} or wrong
    row, value = next(iter((wrong or texts).items()))
    cell = f"column {name!r} holds {str(value)[:40]!r} at {name_row(row)}"
    if has_booleans:
        return f"{cell}; it must hold booleans or numbers: write true or false"
    if not wrong:
        return f"{cell}, which is text; it must hold numbers: convert the column"
    return f"{cell}; it must hold numbers: {'correct it or leave it empty' if may_be_missing else 'correct it'}"


def _can_be_read(value: Any) -> bool:
    """Whether a text spells a number."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _is_instant(value: Any) -> bool:
    return isinstance(value, datetime.date | np.datetime64)


def _to_days(value: Any, name: str) -> float:
    if isinstance(value, np.datetime64):
        return float(value.astype("datetime64[us]").astype(np.int64)) / (1e6 * SECONDS_PER_DAY)
    if isinstance(value, str):
        try:
            value = datetime.datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(f"column {name!r} holds {value[:40]!r}; write dates as 2024-01-31") from None
    if not isinstance(value, datetime.date):
        raise ValueError(f"column {name!r} holds {str(value)[:40]!r}; write dates as 2024-01-31")
    if not isinstance(value, datetime.datetime):
        value = datetime.datetime(value.year, value.month, value.day)
    instant = value if value.tzinfo else value.replace(tzinfo=datetime.UTC)
    since_1970: datetime.timedelta = instant - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return since_1970.total_seconds() / SECONDS_PER_DAY


def _describe_kind(values: np.ndarray) -> str:
    return "a date" if values.dtype.kind == "M" else "text"
