"""The schema of a federation's tables: written from an example, read back, and enforced without quoting a value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedauc.federation.schema import (
    DataSchema,
    SchemaColumn,
    check_table,
    describe_problems,
    make_schema,
    widen_range,
)
from federation.hospital_tables import SCHEMA, make_hospital


def test_a_schema_survives_its_file(tmp_path: Path) -> None:
    odd = SchemaColumn('weight "dry" [kg]', unit="kg", minimum=-1.5, maximum=1e22, missing=True, center=70, scale=15)
    schema = DataSchema(columns=(*SCHEMA.columns, odd), label="é\\n", ignored=("a", "b,c"))
    (tmp_path / "schema.toml").write_text(schema.to_toml(), encoding="utf-8")
    assert DataSchema.read_toml(tmp_path / "schema.toml") == schema
    assert DataSchema.from_header(schema.to_header()) == schema


def test_a_schema_from_an_example_fits_the_example_and_quotes_no_value(tmp_path: Path) -> None:
    table = make_hospital(7).assign(weight=np.linspace(41.37, 97.61, 120), patient=range(1000, 1120))
    table.to_csv(tmp_path / "example.csv", index=False)
    schema = make_schema(tmp_path / "example.csv", "died", ["patient"])
    assert [(column.name, column.kind) for column in schema.columns] == [
        ("age", "number"),
        ("temperature", "number"),
        ("sex", "category"),
        ("ward", "category"),
        ("weight", "number"),
    ]
    assert (schema.negative, schema.positive) == ("no", "yes")
    assert schema.columns[1].missing
    assert not schema.columns[0].missing
    assert "97.61" not in schema.to_toml()
    assert "41.37" not in schema.to_toml()
    checked, problems = check_table(table, schema)
    assert problems == []
    assert checked is not None


@pytest.mark.parametrize("scale", [1e-7, 0.3, 1.0, 4e5])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_widened_range_holds_the_values_with_room(scale: float, sign: float) -> None:
    values = sign * scale * np.random.default_rng(1).random(50)
    low, high = widen_range(values)
    assert low is not None
    assert high is not None
    assert low <= 1.5 * values.min()
    assert high >= 1.5 * values.max() or sign < 0
    assert max(-low, high) <= 6 * np.abs(values).max()


def test_columns_in_another_order_are_reordered_by_name() -> None:
    table = make_hospital(1)
    checked, _ = check_table(table, SCHEMA)
    permuted, problems = check_table(table[table.columns[::-1]].assign(patient=0), SCHEMA)
    assert problems == []
    assert checked is not None
    assert permuted is not None
    for column, same in zip(checked.columns, permuted.columns, strict=True):
        assert column.name == same.name
        assert np.array_equal(column.values, same.values, equal_nan=column.kind == "number")
    assert checked.labels.tolist() == (table["died"] == "yes").astype(int).tolist()


WRONG: dict[str, tuple[Callable[[pd.DataFrame], pd.DataFrame], str, str]] = {
    "renamed": (
        lambda table: table.rename(columns={"age": "Age"}),
        "column 'age' is missing, and there is a column 'Age': rename it",
        "",
    ),
    "missing": (lambda table: table.drop(columns="sex"), "column 'sex' is missing", ""),
    "extra": (
        lambda table: table.assign(zip=12345),
        "column 'zip' is not in the schema: remove it, or list it as ignored in the schema",
        "",
    ),
    "text": (
        lambda table: table.assign(age=[*table["age"][:-1], "Jane"]),
        "column 'age' holds values that are no number",
        "Jane",
    ),
    "range": (
        lambda table: table.assign(age=table["age"].where(table.index != 5, 777)),
        "column 'age' holds values outside 0 to 120 years",
        "777 at row 5",
    ),
    "infinite": (
        lambda table: table.assign(temperature=np.inf),
        "column 'temperature' holds values that are no number",
        "inf",
    ),
    "category": (
        lambda table: table.assign(sex=table["sex"].where(table.index != 3, "x")),
        "column 'sex' holds categories that are not in the schema",
        "'x'",
    ),
    "empty": (
        lambda table: table.assign(age=table["age"].where(table.index != 3)),
        "column 'age' has missing values; the schema allows none",
        "row 3",
    ),
    "no label": (
        lambda table: table.assign(died=table["died"].where(table.index != 4)),
        "label column 'died' has missing values",
        "row 4",
    ),
    "labels": (
        lambda table: table.assign(died=np.where(table["died"] == "yes", 2, 1)),
        "label column 'died' holds values other than 'no' and 'yes'",
        "neither 'no' nor 'yes'",
    ),
    "no rows": (lambda table: table[:0], "the table has no rows", ""),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_table_that_differs_is_refused_by_column_and_rule(kind: str) -> None:
    change, rule, detail = WRONG[kind]
    checked, problems = check_table(change(make_hospital(2)), SCHEMA)
    assert checked is None
    assert describe_problems(problems, is_private=False) == [rule]
    assert detail in describe_problems(problems, is_private=True)[0]


@pytest.mark.parametrize("value", ["n/k", np.inf])
def test_leaving_a_value_empty_is_advised_only_where_the_schema_allows_it(value: str | float) -> None:
    """Ages and labels may not be missing, temperatures may; the details are for the site's own eyes."""
    table = make_hospital(1).astype(dict.fromkeys(("age", "temperature", "died"), object))
    for column in ("age", "temperature", "died"):
        table.loc[3, column] = value
    _, problems = check_table(table, SCHEMA)
    details = {problem.rule.split("'")[1]: problem.detail for problem in problems}
    assert details.keys() == {"age", "temperature", "died"}
    for column, detail in details.items():
        assert "correct" in detail or column == "temperature"
        assert ("empty" in detail) == (column == "temperature")


def test_dates_and_booleans_have_their_kinds() -> None:
    schema = DataSchema(columns=(SchemaColumn("day", "date"), SchemaColumn("icu", "boolean")))
    table = pd.DataFrame({"day": ["2024-01-31", "2024-02-01"], "icu": [0, 1], "y": [0, 1]})
    checked, problems = check_table(table, schema)
    assert problems == []
    assert checked is not None
    assert checked.columns[0].values.tolist() == [19753.0, 19754.0]
    _, problems = check_table(table.assign(day=[19753, 19754], icu=[0, 2]), schema)
    assert describe_problems(problems, is_private=False) == [
        "column 'day' holds values that are no date",
        "column 'icu' holds values outside true and false (or 1 and 0)",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("columns = []", "the schema has no columns"),
        ('[[columns]]\nname = "a"\n[[columns]]\nname = "a"', "lists 'a' twice"),
        ('[[columns]]\nname = "a"\nkind = "text"', "kind"),
        ('[[columns]]\nname = "a"\nminimum = 2\nmaximum = 1', "minimum 2 above maximum 1; swap them"),
        ('[[columns]]\nname = "a"\ncenter = 2', "only one of center and scale; give both"),
        ('[[columns]]\nname = "a"\nminimum = nan', "minimum nan; it must be a finite number"),
        ('[[columns]]\nname = "a"\ncenter = inf\nscale = 1', "center inf; it must be a finite number"),
        ('[[columns]]\nname = "a"\nkind = "category"\nmaximum = 1', "only numbers have one"),
        ("[[columns]", "is not TOML"),
    ],
)
def test_a_bad_schema_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        DataSchema.read_toml(tmp_path / "schema.toml")
    assert "\n" not in str(caught.value)
