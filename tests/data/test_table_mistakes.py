"""What a user of `--data table` gets wrong is named: the value, its row, and what to write instead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from fedauc.data import column_warnings
from fedauc.data.checks import counting_rows_from, name_row
from fedauc.data.column_warnings import find_column_auc
from fedauc.data.columns import as_numbers
from fedauc.data.dataset import TableParts
from fedauc.data.datasets.table import Table
from fedauc.data.description import describe_data, list_data_notes
from fedauc.data.features import CategoryColumn, FeatureEncoder, NumberColumn
from fedauc.data.io import disk_tables
from fedauc.data.io.text_files import iterate_text_frames
from fedauc.data.preparation import Preparation, prepare_table

ROWS = 120


def make_frame(**columns: Any) -> pd.DataFrame:
    """Rows of four sites, a third of them positive, with one number that says little."""
    numbers = np.arange(ROWS)
    base = {"x": np.sin(numbers), "y": numbers % 3 == 0, "site": [f"s{number % 4}" for number in numbers]}
    return pd.DataFrame({**base, **columns})


def load_frame(frame: Any, **options: Any) -> TableParts:
    return Table(frame, **{"label": "y", "client": "site", **options}).load(0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            ["42.51", "7", None, "n/a?", "bad"],
            "column 'x' holds 'n/a?' at row 3 (counted from 0); it must hold numbers",
        ),
        ([1.5, "7"], "column 'x' holds '7' at row 1 (counted from 0), which is text; it must hold numbers"),
        (["yes", "no"], "column 'x' holds 'yes' at row 0 (counted from 0); it must hold booleans or numbers"),
        ([True, "true", "No"], "column 'x' holds 'No' at row 2 (counted from 0); it must hold booleans or numbers"),
        (["yes", "perhaps"], "column 'x' holds 'yes' at row 0 (counted from 0); it must hold numbers: correct it"),
    ],
)
def test_the_first_value_that_is_no_number_is_named_with_its_row(values: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        as_numbers(np.array(values, dtype=object), "x")


def test_yes_and_no_for_booleans_are_answered_with_true_and_false() -> None:
    with pytest.raises(ValueError, match=r"write true or false$"):
        as_numbers(np.array(["no", "yes", None], dtype=object), "member")


def test_rows_of_a_block_are_counted_from_the_beginning_of_the_file() -> None:
    message = re.escape("9 wrong, the first row 104 (counted from 0) and the last row 110 (counted from 0)")
    with pytest.raises(ValueError, match=message), counting_rows_from(100):
        raise ValueError(f"9 wrong, the first {name_row(4)} and the last {name_row(10)}")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            [0] * 60 + [1] * 40 + [2] * 20,
            "label column 'y' holds 0 (60 rows), 1 (40 rows), 2 (20 rows); labels must be 0 or 1: name another column, "
            "or say which value is positive, and all others are negative: use --data.positive VALUE",
        ),
        ([0, 1, 2] * 40, "all others are negative: use --data.positive VALUE"),
        (
            [1] * 99 + list(range(10, 31)),
            "holds 10 (1 row), 11 (1 row), 12 (1 row), 13 (1 row), 14 (1 row) and 17 other values; labels must",
        ),
        (
            ["no"] * ROWS,
            "label column 'y' holds 'no' (120 rows); labels must be 0 or 1: name another column",
        ),
        (
            [False] * ROWS,
            "table: label column 'y' holds no positives: all 120 rows are 'false'; an AUC needs both classes: add rows "
            "labelled 'true', or name another column",
        ),
        ([1] * ROWS, "label column 'y' holds no negatives: all 120 rows are 1; an AUC needs both classes"),
    ],
)
def test_labels_that_are_not_two_classes_are_listed_with_their_counts(labels: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load_frame(make_frame(y=labels))


def test_a_file_of_one_class_is_named_with_its_label_column(tmp_path: Path) -> None:
    path = tmp_path / "claims.csv"
    make_frame(y=0).to_csv(path, index=False)
    message = re.escape(f"file {str(path)!r}: label column 'y' holds no positives: all 120 rows are 0")
    with pytest.raises(ValueError, match=message):
        load_frame(str(path))


@pytest.mark.parametrize("header", ["x,y,site,amount,amount", '"amount", y,site,"amount",x'])
def test_a_column_name_that_a_csv_file_repeats_is_refused(tmp_path: Path, header: str) -> None:
    path = tmp_path / "claims.csv"
    path.write_text(f"{header}\n1,0,a,1,1\n")
    message = re.escape(f"file {str(path)!r}: column 'amount' appears twice; rename or drop one")
    with pytest.raises(ValueError, match=message):
        load_frame(str(path))
    with pytest.raises(ValueError, match="column 'amount' appears twice"):
        next(iterate_text_frames(path, [], 10))


@pytest.mark.parametrize(
    ("names", "expected"),
    [(["2.0", "3.0", ""], {"2", "3"}), (["2.0", "3.5", ""], {"2.0", "3.5"}), (["002", "3", ""], {"002", "3"})],
)
def test_integer_names_of_sites_keep_their_form_when_one_is_blank(
    tmp_path: Path, names: list[str], expected: set[str]
) -> None:
    path = tmp_path / "claims.csv"
    make_frame(site=names * 40).to_csv(path, index=False)
    parts = load_frame(str(path), incomplete_rows="drop")
    assert parts.train.client is not None
    assert set(parts.train.client) == expected
    # What a block holds is matched with the categories of a model, or copied to its predictions, as it is written.
    assert set(next(iterate_text_frames(path, ["site"], 50))["site"].dropna()) == {name for name in names if name}


@pytest.mark.parametrize("large", [False, True])
def test_dropped_rows_are_counted_in_the_notes_and_in_the_description(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    monkeypatch.setenv("FEDAUC_DATA", str(tmp_path / "cache"))
    if large:
        monkeypatch.setattr(disk_tables, "LARGE", 0)
    frame = make_frame()
    frame.loc[[3, 7], "site"] = None
    paths = [str(tmp_path / name) for name in ("train.parquet", "test.parquet")]
    for path, rows in zip(paths, (frame, frame.iloc[:60]), strict=True):
        rows.to_parquet(path)
    for test, dropped in (("", 2), (paths[1], 4)):
        split = prepare_table(load_frame(paths[0], test=test, incomplete_rows="drop"), Preparation(), 0)
        assert describe_data(split)["dropped_rows"] == dropped
        assert f"{dropped} rows without a label, a client or a group were dropped" in list_data_notes(split)
    complete = prepare_table(load_frame(make_frame()), Preparation(), 0)
    assert describe_data(complete)["dropped_rows"] == 0
    assert not any("dropped" in note for note in list_data_notes(complete))


DAYS = pd.date_range("2024-01-01", periods=ROWS)


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            [*map(str, range(7)), "n/k", *(f"{0.5 * row}" for row in range(8, ROWS))],
            "column 'when' holds 'n/k' at row 7 (counted from 0), where most rows hold numbers and 1 of ",
        ),
        (
            [*DAYS[:5].strftime("%Y-%m-%d"), *["unknown"] * 4, *DAYS[9:].strftime("%Y-%m-%d")],
            "where most rows hold dates and ",
        ),
    ],
)
def test_a_few_texts_among_numbers_do_not_remove_a_column(
    values: list[str], message: str, is_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source: Any = make_frame(when=values)
    if is_large:
        monkeypatch.setattr(disk_tables, "LARGE", 0)
        source, frame = str(tmp_path / "large.parquet"), source
        frame.to_parquet(source)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_frame(source)
    ignored = load_frame(source, categories=("when",)).summary.ignored
    assert ignored == {"when": "nearly every value is different, like a name or an identifier"}


@pytest.mark.parametrize(
    ("texts", "warning"),
    [
        (DAYS.strftime("%d/%m/%Y"), "column 'when' looks like dates; write them as 2024-12-31 to use them as dates"),
        (DAYS.strftime("%m/%d/%Y %H:%M"), "column 'when' looks like dates; write them as 2024-12-31"),
        (DAYS.strftime("%d.%m.%y"), "column 'when' looks like dates; write them as 2024-12-31"),
        (DAYS.strftime("%d %b %Y"), "column 'when' looks like dates; write them as 2024-12-31"),
        (DAYS.strftime("%B %d, %Y"), "column 'when' looks like dates; write them as 2024-12-31"),
        (
            ["unknown"] * 12 + [*DAYS.strftime("%Y-%m-%d")[12:]],
            "column 'when' counts as categories because it holds 'unknown' among dates; leave such cells empty",
        ),
    ],
)
def test_text_that_looks_like_dates_is_named(texts: Any, warning: str) -> None:
    (only,) = load_frame(make_frame(when=list(texts))).summary.warnings
    assert only.startswith(warning)
    assert load_frame(make_frame(when=list(texts)), categories=("when",)).summary.warnings == ()


@pytest.mark.parametrize(
    "texts", [DAYS.strftime("%Y-%m-%d"), ["1/2", "3/4", "5/6", "7/8"] * 30, ["10.20.30.40", "a"] * 60]
)
def test_dates_in_iso_8601_and_other_texts_need_no_warning(texts: Any) -> None:
    assert load_frame(make_frame(when=list(texts))).summary.warnings == ()


POSITIVE = np.arange(ROWS) % 3 == 0
NOISE = np.cos(7.0 * np.arange(ROWS))


@pytest.mark.parametrize(
    "values",
    [
        NOISE + 5 * POSITIVE,
        NOISE - 5 * POSITIVE,
        POSITIVE,
        np.where(POSITIVE, NOISE, np.nan),
        np.where(POSITIVE, "paid back", "open"),
        # No single category separates the labels, but the column does.
        np.where(POSITIVE, np.where(NOISE > 0, "a", "b"), np.where(NOISE > 0, "c", "d")),
        np.where(POSITIVE, DAYS, np.datetime64("NaT", "D")),
    ],
    ids=["higher", "lower", "boolean", "present", "category", "categories", "date"],
)
def test_a_column_that_alone_separates_the_labels_is_named(values: Any) -> None:
    parts = load_frame(make_frame(leak=values))
    expected = "column 'leak' alone separates the labels; use --data.ignore leak if it is known only after the outcome"
    assert parts.summary.warnings == (expected,)
    assert load_frame(make_frame(leak=values), ignore=("leak",)).summary.warnings == ()


@pytest.mark.parametrize("values", [NOISE + POSITIVE, np.where(POSITIVE & (NOISE > 0), "a", "b")])
def test_a_column_that_only_helps_is_not_called_a_leak(values: Any) -> None:
    assert load_frame(make_frame(helps=values)).summary.warnings == ()


def test_the_area_of_a_column_is_that_of_scikit_learn() -> None:
    values = np.round(NOISE + POSITIVE, 1)
    area = roc_auc_score(POSITIVE, values)
    number = NumberColumn("x", has_indicator=True)
    missing = np.zeros(ROWS)
    assert find_column_auc(np.stack([values, missing], 1), POSITIVE, number) == pytest.approx(area)
    assert find_column_auc(np.stack([-values, missing], 1), POSITIVE, number) == pytest.approx(area)
    codes = np.arange(ROWS) % 7 % 4
    one_hot = (codes[:, None] == np.arange(3)).astype(float)
    shares = pd.Series(POSITIVE).groupby(codes).transform("mean")
    category = CategoryColumn("x", ("0", "1", "2"))
    assert find_column_auc(one_hot, POSITIVE, category) == pytest.approx(roc_auc_score(POSITIVE, shares))


def test_few_rows_and_very_large_tables_are_not_searched_for_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    labels, encoder = np.repeat([0, 1], 10), FeatureEncoder((NumberColumn("leak"),))
    inputs = labels[:, None].astype(np.float32)
    assert len(column_warnings.warn_of_leaks(inputs, labels, encoder)) == 1
    assert column_warnings.warn_of_leaks(inputs[1:], labels[1:], encoder) == ()
    monkeypatch.setattr(column_warnings, "MAX_LEAK_VALUES", 19)
    assert column_warnings.warn_of_leaks(inputs, labels, encoder) == ()
