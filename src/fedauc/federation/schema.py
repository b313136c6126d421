"""The columns that the sites of a federation have agreed on, and the check of a table against them.

The schema is `schema.toml` in the app's folder: for every column its name, kind, unit, allowed range, categories, and
whether values may be missing; and the label with its two values. Every site checks its table before the first round.
A site's refusal goes to the server, so it names the column and the rule, but quotes no value: that is in the site's
log only.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fedauc.data.checks import name_row
from fedauc.data.columns import as_days, as_numbers, code_texts, is_missing, list_column_names, read_columns
from fedauc.data.feature_fitting import Kind, RawColumn
from fedauc.data.io.readers import Columns, check_exists, check_frame, naming_file, read_file_frame
from fedauc.data.raw_tables import convert_column, infer_kind
from fedauc.experiments.config import from_plain, to_plain
from fedauc.federation.toml_files import read_toml_file
from fedauc.scoring.scorer import match_labels
from fedauc.scoring.unusual_columns import ColumnRange
from fedauc.version import VERSION

SCHEMA_FILE = "schema.toml"

MAX_LISTED_CATEGORIES = 50
"""A text column of an example with more values gets no vocabulary: the sites report their frequent values instead."""

UNIT_IN_NAME = re.compile(r"^(?P<name>.*\S)\s*[\[(](?P<unit>[^\])]+)[\])]$")
"""A column name that ends in its unit, such as `glucose (mmol/l)` or `weight [kg]`."""


@dataclass(frozen=True)
class SchemaColumn:
    """What a column must be at every site.

    Numbers may have a unit and a range; a category may have a vocabulary, without which the sites report how many rows
    have each of their frequent values. With `center` and `scale` a number x becomes (x - center) / scale, and no site
    reports any sum of the column.
    """

    name: str
    kind: Literal["number", "boolean", "category", "date"] = "number"
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    categories: tuple[str, ...] = ()
    missing: bool = False
    center: float | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        where = f"column {self.name!r} of the schema"
        if not self.name.strip():
            raise ValueError("a column of the schema has no name; give the name that the sites' tables use")
        if self.kind != "number" and (self.minimum, self.maximum) != (None, None):
            raise ValueError(f"{where} is a {self.kind} with a range; only numbers have one: leave it out")
        if self.kind != "category" and self.categories:
            raise ValueError(f"{where} is a {self.kind} with categories; only a category has some: leave them out")
        for bound in ("minimum", "maximum", "center"):
            value = getattr(self, bound)
            if value is not None and not math.isfinite(value):
                raise ValueError(
                    f"{where} has {bound} {value!r}; it must be a finite number: leave it out, or correct it"
                )
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            raise ValueError(f"{where} has minimum {self.minimum:g} above maximum {self.maximum:g}; swap them")
        if (self.center is None) != (self.scale is None):
            raise ValueError(f"{where} has only one of center and scale; give both, or none")
        if self.scale is not None and (self.kind == "category" or not 0 < self.scale < math.inf):
            raise ValueError(f"{where} has scale {self.scale!r}; only numbers have one, and it must be above 0")

    @property
    def needs_sums(self) -> bool:
        """Whether its encoding comes from sums over the sites' rows."""
        return not self.categories if self.kind == "category" else self.scale is None

    @property
    def range(self) -> ColumnRange:
        """The allowed values."""
        return ColumnRange(self.name, self.minimum, self.maximum, self.unit)


@dataclass(frozen=True, kw_only=True)
class DataSchema:
    """The agreed columns, in the order of the model's inputs; the label; and columns that sites may have unused."""

    columns: tuple[SchemaColumn, ...]
    label: str = "y"
    negative: str = "0"
    positive: str = "1"
    ignored: tuple[str, ...] = ()
    fedauc: str = VERSION
    """The version that wrote the schema, which sites compare with theirs."""

    def __post_init__(self) -> None:
        names = [*(column.name for column in self.columns), self.label, *self.ignored]
        if not self.columns:
            raise ValueError("the schema has no columns; list at least 1 in [[columns]]")
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise ValueError(f"the schema lists {repeated[0]!r} twice; give every column one part")
        if self.negative == self.positive:
            raise ValueError(f"the label's values are both {self.positive!r}; give two different ones")

    @property
    def ranges(self) -> tuple[ColumnRange, ...]:
        """The ranges of the columns that have one."""
        has_range = [(column.minimum, column.maximum) != (None, None) for column in self.columns]
        return tuple(column.range for column, known in zip(self.columns, has_range, strict=True) if known)

    @property
    def label_values(self) -> tuple[str, str]:
        """The negative and the positive value of the label."""
        return self.negative, self.positive

    def to_toml(self) -> str:
        """The schema as TOML with a comment on every part."""
        lines = [
            "# What every site's table must hold; the columns may be in any order. A site that differs is refused.",
            "# kind: number, boolean, category or date. Numbers may have a unit, a minimum and a maximum.",
            "# A category without categories is open: sites report how many rows have each of their frequent values.",
            "# center and scale: agreed numbers for (x - center) / scale; without them sites report sums.",
            f"fedauc = {_quote_text(self.fedauc)} # the version that all sites should have",
            f"label = {_quote_text(self.label)}",
            f"negative = {_quote_text(self.negative)}",
            f"positive = {_quote_text(self.positive)}",
            f"ignored = {_format_value(self.ignored)} # columns that a site may have, and that are not used",
        ]
        for column in self.columns:
            lines += ["", "[[columns]]"]
            for known in fields(column):
                value = getattr(column, known.name)
                is_asked_for = known.name == "unit" and column.kind == "number"
                if is_asked_for or value not in (None, (), ""):
                    lines.append(f"{known.name} = {_format_value(value)}")
        return "\n".join(lines) + "\n"

    @staticmethod
    def read_toml(path: Path) -> DataSchema:
        """Read a schema file."""
        data = read_toml_file(path, "schema", "`fedauc federation init --example` writes one")
        schema: DataSchema = from_plain(DataSchema, data, str(path))
        return schema

    @staticmethod
    def from_header(data: Any) -> DataSchema:
        """The schema in a message."""
        schema: DataSchema = from_plain(DataSchema, data, "schema")
        return schema

    def to_header(self) -> Any:
        """Plain values for a message."""
        return to_plain(self)


class SchemaProblem(NamedTuple):
    """What is wrong with a column: the rule that is broken, which may be sent, and a detail that may quote a value."""

    rule: str
    detail: str = ""


class CheckedTable(NamedTuple):
    """A table whose columns are those of the schema, in its order, with labels 0 and 1."""

    columns: tuple[RawColumn, ...]
    labels: np.ndarray


def check_table(frame: Any, schema: DataSchema) -> tuple[CheckedTable | None, list[SchemaProblem]]:
    """The table in the schema's order, or None and everything that is wrong with it."""
    names = list_column_names(frame)
    expected = [*(column.name for column in schema.columns), schema.label]
    missing = [name for name in expected if name not in names]
    extra = [name for name in names if name not in expected and name not in schema.ignored]
    problems = _compare_names(missing, extra)
    if len(frame) == 0:
        problems.append(SchemaProblem("the table has no rows"))
    if problems:
        return None, problems
    arrays = read_columns(frame, expected)
    columns = list[RawColumn]()
    for column in schema.columns:
        raw, new_problems = _check_column(arrays[column.name], column)
        problems += new_problems
        if raw is not None:
            columns.append(raw)
    labels, label_problems = _check_labels(arrays[schema.label], schema)
    problems += label_problems
    return (None if problems else CheckedTable(tuple(columns), labels)), problems


def make_schema(path: Path, label: str, ignored: Sequence[str] = ()) -> DataSchema:
    """A schema for tables like an example, to be edited: ranges are widened, so that they quote no row."""
    check_exists(path)
    with naming_file(path):
        frame = read_file_frame(path, Columns(label, ""))
        check_frame(frame)
        names = list_column_names(frame)
        for name in (label, *ignored):
            if name not in names:
                raise ValueError(f"it has no column {name!r}; it has {', '.join(names)}")
        arrays = read_columns(frame, names)
        values = sorted({str(value) for value in code_texts(arrays[label]).values})
        if len(values) != 2:
            raise ValueError(f"label column {label!r} has {len(values)} values; it must have 2: choose another column")
        if not {value.lower() for value in values} <= {"0", "1", "false", "true"}:
            # Without an order of their own, the rarer value is the positive one.
            counts = {value: int(sum(str(cell) == value for cell in arrays[label].tolist())) for value in values}
            values.sort(key=lambda value: -counts[value])
        others = [name for name in names if name != label and name not in ignored]
        columns = tuple(_describe_column(arrays[name], name) for name in others)
    return DataSchema(columns=columns, label=label, negative=values[0], positive=values[1], ignored=tuple(ignored))


def _compare_names(missing: Sequence[str], extra: Sequence[str]) -> list[SchemaProblem]:
    """What is missing and what is too much; one of each looks like a renamed column."""
    if len(missing) == len(extra) == 1:
        return [SchemaProblem(f"column {missing[0]!r} is missing, and there is a column {extra[0]!r}: rename it")]
    problems = [SchemaProblem(f"column {name!r} is missing") for name in missing]
    remedy = "remove it, or list it as ignored in the schema"
    return problems + [SchemaProblem(f"column {name!r} is not in the schema: {remedy}") for name in extra]


def _check_column(values: np.ndarray, column: SchemaColumn) -> tuple[RawColumn | None, list[SchemaProblem]]:
    where = f"column {column.name!r}"
    try:
        raw = _convert_values(values, column)
    except ValueError as error:
        return None, [SchemaProblem(f"{where} holds values that are no {column.kind}", str(error))]
    is_known = raw.values >= 0 if raw.kind == "category" else ~np.isnan(raw.values)
    problems = []
    if not column.missing and not is_known.all():
        first = name_row(int(np.flatnonzero(~is_known)[0]))
        rule = f"{where} has missing values; the schema allows none"
        problems.append(SchemaProblem(rule, f"{int((~is_known).sum())} rows, the first {first}"))
    if column.kind == "category" and column.categories:
        unknown = [text for text in raw.texts if text not in column.categories]
        if unknown:
            rule = f"{where} holds categories that are not in the schema"
            problems.append(SchemaProblem(rule, ", ".join(map(repr, unknown[:5]))))
    if column.kind in ("number", "boolean"):
        if column.kind == "boolean":
            wrong, words = is_known & (raw.values != 0) & (raw.values != 1), "true and false (or 1 and 0)"
        else:
            wrong, words = column.range.find_outside(raw.values), str(column.range)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            detail = f"{int(wrong.sum())} rows, the first {raw.values[row]:g} at {name_row(row)}"
            problems.append(SchemaProblem(f"{where} holds values outside {words}", detail))
    return raw, problems


def _convert_values(values: np.ndarray, column: SchemaColumn) -> RawColumn:
    """The column as its kind says; a ValueError where that is impossible."""
    if column.kind == "category":
        codes, texts = code_texts(values)
        return RawColumn(column.name, "category", codes, texts)
    if column.kind == "date":
        if infer_kind(values) in ("number", "boolean"):
            raise ValueError(f"column {column.name!r} holds numbers; write dates as 2024-01-31")
        return RawColumn(column.name, "date", as_days(values, column.name))
    kind: Kind = column.kind
    return RawColumn(column.name, kind, as_numbers(values, column.name, column.missing))


def _check_labels(values: np.ndarray, schema: DataSchema) -> tuple[np.ndarray, list[SchemaProblem]]:
    where, words = f"label column {schema.label!r}", f"{schema.negative!r} and {schema.positive!r}"
    absent = [row for row, value in enumerate(values.tolist()) if is_missing(value)]
    problems = []
    if absent:
        detail = f"{len(absent)} rows, the first {name_row(absent[0])}"
        problems.append(SchemaProblem(f"{where} has missing values", detail))
    try:
        labels = match_labels(values.tolist(), schema.label_values, may_be_missing=False)
    except ValueError as error:
        problems.append(SchemaProblem(f"{where} holds values other than {words}", str(error)))
        labels = np.zeros(0)
    return labels.astype(np.int8), problems


def _describe_column(values: np.ndarray, name: str) -> SchemaColumn:
    """A column of an example as the schema describes it."""
    raw = convert_column(values, name)
    unit = UNIT_IN_NAME.match(name)
    if raw.kind == "category":
        texts = tuple(sorted(raw.texts)) if len(raw.texts) <= MAX_LISTED_CATEGORIES else ()
        return SchemaColumn(name, "category", categories=texts, missing=bool((raw.values < 0).any()))
    missing = bool(np.isnan(raw.values).any())
    if raw.kind != "number":
        return SchemaColumn(name, raw.kind, missing=missing)
    low, high = widen_range(raw.values)
    return SchemaColumn(name, "number", unit["unit"] if unit else "", low, high, missing=missing)


def widen_range(values: np.ndarray) -> tuple[float | None, float | None]:
    """A range that holds the values with room, in numbers of one digit: it says their size, and quotes none of them.

    >>> widen_range(np.array([18.0, 97.0, np.nan]))
    (0.0, 200.0)
    >>> widen_range(np.array([-3.2, 0.4]))
    (-7.0, 7.0)
    """
    known = values[~np.isnan(values)]
    if not len(known) or not np.abs(known).max():
        return None, None
    size = 2 * float(np.abs(known).max())
    power = 10.0 ** math.floor(math.log10(size))
    bound = float(f"{math.ceil(size / power - 1e-9) * power:.12g}")
    return (0.0 if known.min() >= 0 else -bound), bound


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _quote_text(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_quote_text(text) for text in value)}]"
    return repr(float(value))


def _quote_text(text: str) -> str:
    # Strings of JSON are basic strings of TOML, except that TOML has no surrogate pairs, so that none may be escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def describe_problems(problems: Sequence[SchemaProblem], is_private: bool) -> list[str]:
    """One line per problem; those for the site's own eyes quote values."""
    return [f"{rule} ({detail})" if is_private and detail else rule for rule, detail in problems]


def summarize_schema(schema: DataSchema) -> Mapping[str, int]:
    """How many columns of each kind there are, for a line on the screen."""
    kinds = [column.kind for column in schema.columns]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
