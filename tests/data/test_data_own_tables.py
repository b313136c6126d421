"""Your own table with everything that real tables have: categories, dates, missing values, text labels, odd columns."""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import fedauc
from fedauc.data import Preparation, prepare_table
from fedauc.data.columns import as_pandas_frame
from fedauc.data.dataset import TableParts
from fedauc.data.description import describe_data, list_data_notes
from fedauc.data.io import disk_tables, readers
from fedauc.data.partitions import IID
from fedauc.experiments.config import Config
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.runner import Run

ROWS = 600
OPTIONS: dict[str, Any] = {"label": "fraud", "positive": "yes", "client": "state"}


def make_claims(rows: int = ROWS) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    age, amount = draw.normal(45, 12, rows).round(), np.exp(draw.normal(3, 1.5, rows)).round(2)
    plan = draw.choice(["gold", "silver", "bronze"], rows)
    positive = draw.random(rows) < 1 / (1 + np.exp(2 - 0.1 * (age - 45) - (plan == "gold")))
    return pd.DataFrame(
        {
            "claim": [f"C{number:06d}" for number in draw.permutation(rows)],
            "age": np.where(draw.random(rows) < 0.1, np.nan, age),
            "amount": amount,
            "plan": pd.Series(plan).where(draw.random(rows) >= 0.05, None),
            "day": (np.datetime64("2023-01-01") + draw.integers(0, 700, rows)).astype(str),
            "member": draw.random(rows) < 0.5,
            "currency": "USD",
            "empty": np.nan,
            "state": draw.choice(["CA", "NY", "NA", "007"], rows),
            "fraud": np.where(positive, "yes", "no"),
        }
    )


CLAIMS = make_claims()


def write_json_lines(frame: pd.DataFrame, path: Path) -> None:
    frame.to_json(path, orient="records", lines=True)


FORMATS: dict[str, Callable[[pd.DataFrame, Path], Any]] = {
    "claims.csv": lambda frame, path: frame.to_csv(path, index=False),
    "claims.csv.gz": lambda frame, path: frame.to_csv(path, index=False),
    "claims.tsv": lambda frame, path: frame.to_csv(path, index=False, sep="\t"),
    "pipes.txt": lambda frame, path: frame.to_csv(path, index=False, sep="|"),
    "european.csv": lambda frame, path: frame.to_csv(path, index=False, sep=";", decimal=","),
    "claims.jsonl": write_json_lines,
    "claims.ndjson": write_json_lines,
    "claims.parquet": lambda frame, path: frame.to_parquet(path),
    "claims.feather": lambda frame, path: frame.to_feather(path),
}
FRAMES: dict[str, Callable[[pd.DataFrame], Any]] = {
    "pandas": lambda frame: frame,
    "polars": lambda frame: importlib.import_module("polars").from_pandas(frame),
    "pyarrow": lambda frame: pa.Table.from_pandas(frame),
    "categoricals": lambda frame: frame.assign(plan=frame["plan"].astype("category")),
    "mapping": lambda frame: {str(name): frame[name].to_numpy() for name in frame},
}


def assert_same_parts(parts: TableParts, expected: TableParts) -> None:
    for part, expected_part in ((parts.train, expected.train), (parts.test, expected.test)):
        assert np.array_equal(np.asarray(part.inputs), np.asarray(expected_part.inputs))
        assert np.array_equal(part.labels, expected_part.labels)
        assert np.asarray(part.client).tolist() == np.asarray(expected_part.client).tolist()
        assert np.array_equal(np.asarray(part.numbers), np.asarray(expected_part.numbers))
    assert parts.encoder == expected.encoder
    assert parts.label_values == expected.label_values
    assert parts.summary == expected.summary


@pytest.fixture(scope="module")
def expected_parts() -> TableParts:
    return fedauc.Table(CLAIMS, **OPTIONS).load(0)


@pytest.mark.parametrize("name", FORMATS)
def test_every_file_format_gives_the_same_inputs(tmp_path: Path, expected_parts: TableParts, name: str) -> None:
    FORMATS[name](CLAIMS, tmp_path / name)
    assert_same_parts(fedauc.Table(str(tmp_path / name), **OPTIONS).load(0), expected_parts)


@pytest.mark.parametrize("kind", FRAMES)
def test_every_frame_gives_the_same_inputs(expected_parts: TableParts, kind: str) -> None:
    assert_same_parts(fedauc.Table(FRAMES[kind](CLAIMS), **OPTIONS).load(0), expected_parts)


@pytest.mark.parametrize("numbers", ["standardize", "quantiles"])
def test_a_file_larger_than_memory_gives_the_same_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: Any
) -> None:
    monkeypatch.setenv("FEDAUC_DATA", str(tmp_path / "home"))
    frame = CLAIMS.assign(row=np.arange(7, ROWS + 7), fraud=CLAIMS["fraud"].where(CLAIMS.index % 50 != 3))
    frame.to_parquet(tmp_path / "claims.parquet")
    options = {**OPTIONS, "numbers": numbers, "incomplete_rows": "drop", "validation_fraction": 0.2}
    table = fedauc.Table(str(tmp_path / "claims.parquet"), test=str(tmp_path / "claims.parquet"), **options)
    expected = table.load(1)
    monkeypatch.setattr(disk_tables, "LARGE", 0)
    monkeypatch.setattr(readers, "BLOCK", 70)
    for _ in range(2):
        # The second time from the copy.
        parts = table.load(1)
        assert isinstance(parts.train.inputs, np.memmap)
        assert_same_parts(parts, expected)
    assert set(parts.summary.ignored) == {"claim", "currency", "empty", "row"}


def test_the_inputs_are_those_of_a_pooled_twin(expected_parts: TableParts) -> None:
    """Numbers by numpy on the pooled training rows, categories by pandas."""
    train = CLAIMS.iloc[np.asarray(expected_parts.train.numbers)]
    names = list(expected_parts.encoder.feature_names if expected_parts.encoder else ())
    inputs = np.asarray(expected_parts.train.inputs, dtype=np.float64)
    age = train["age"].to_numpy()
    expected_age = np.nan_to_num((age - np.nanmean(age)) / np.nanstd(age))
    np.testing.assert_allclose(inputs[:, names.index("age")], expected_age, atol=1e-6)
    np.testing.assert_array_equal(inputs[:, names.index("age (missing)")], np.isnan(age))
    for plan in ("bronze", "gold", "silver"):
        np.testing.assert_array_equal(inputs[:, names.index(f"plan={plan}")], train["plan"] == plan)
    np.testing.assert_array_equal(inputs[:, names.index("plan (missing)")], train["plan"].isna())
    days = (pd.to_datetime(train["day"]) - pd.Timestamp(0)).dt.days.to_numpy()
    expected_sine = np.sin(2 * np.pi * days / 365.2425)
    np.testing.assert_allclose(inputs[:, names.index("day (sine of year)")], expected_sine, atol=1e-6)


def test_columns_left_out_are_named_with_reasons() -> None:
    frame = CLAIMS.copy()
    frame.insert(0, "Unnamed: 0", range(ROWS))
    split = prepare_table(fedauc.Table(frame, **OPTIONS).load(0), Preparation(), 0)
    assert dict(split.summary.ignored) == {
        "Unnamed: 0": "it numbers the rows; list it in --data.features to use it anyway",
        "claim": "nearly every value is different, like a name or an identifier",
        "currency": "all training rows have the same value, 'USD'",
        "empty": "no training row has a value",
    }
    notes = "\n".join(list_data_notes(split))
    assert "of 4 sites; label 'yes' is positive" in notes
    assert "5 columns become 13 inputs: numbers age, amount, member; categories plan; dates day" in notes
    assert f"{split.summary.traffic.bytes_up} bytes up" in notes
    described = json.loads(json.dumps(describe_data(split)))
    assert described["rows"] == {"train": 420, "test": 180}
    assert described["features"][0] == {"name": "age", "kind": "number", "inputs": 2}
    # Listed columns are used, whatever they look like.
    listed = fedauc.Table(frame, **OPTIONS, features=("Unnamed: 0", "currency")).load(0)
    assert listed.encoder is not None
    assert listed.encoder.input_names == ("Unnamed: 0", "currency")
    assert fedauc.Table(frame, **OPTIONS, ignore=("age",)).load(0).encoder != listed.encoder


def test_other_clients_than_the_files_count_their_own_summaries() -> None:
    parts = fedauc.Table(CLAIMS, **{**OPTIONS, "client": ""}).load(0)
    split = prepare_table(parts, Preparation(IID(8)), 0)
    assert split.summary.traffic.sites == 8
    assert split.summary.traffic.bytes_up == 8 * parts.summary.traffic.bytes_up


@pytest.mark.parametrize(
    ("values", "positive", "label_values", "sum_of_labels"),
    [
        ([0, 1], "", ("0", "1"), 1),
        ([0.0, 1.0], "", ("0", "1"), 1),
        ([False, True], "", ("false", "true"), 1),
        (["FALSE", "TRUE"], "", ("FALSE", "TRUE"), 1),
        (["no", "yes"], "yes", ("no", "yes"), 1),
        (["good", "bad"], "bad", ("good", "bad"), 1),
        ([-1, 1], "1", ("-1", "1"), 1),
        ([3, 7], "7", ("3", "7"), 1),
        (["a", "b", "c"], "b", ("not b", "b"), 1),
    ],
)
def test_any_two_label_values_will_do(
    values: list[Any], positive: str, label_values: tuple[str, str], sum_of_labels: int
) -> None:
    repeats = 12
    frame = pd.DataFrame({"x": np.linspace(0, 1, repeats * len(values)), "y": values * repeats, "client": "a"})
    parts = fedauc.Table(frame, positive=positive).load(0)
    assert parts.label_values == label_values
    total = sum(int(part.labels.sum()) for part in (parts.train, parts.test))
    assert total == repeats * sum_of_labels
    assert bool(parts.summary.warnings) == (len(values) > 2)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            lambda frame: frame,
            {"positive": ""},
            "label column 'fraud' holds 'no' (",
        ),
        (
            lambda frame: frame,
            {"positive": ""},
            "say which one is positive, usually the rarer: use --data.positive yes",
        ),
        (lambda frame: frame, {"positive": "Yes"}, "for positive 'Yes': did you mean 'yes'?"),
        (lambda frame: frame.assign(amount=np.inf), {}, "values that are not finite, the first inf at row 0"),
        (
            lambda frame: frame.assign(state=frame["state"].where(frame.index > 2)),
            {},
            "column 'state' is missing in 3 rows, the first row 0 (counted from 0); fill them in, or use "
            "--data.incomplete-rows drop",
        ),
        (lambda frame: frame[["currency", "state", "fraud"]], {}, "no column is left for features ('currency': all"),
        (lambda frame: frame, {"features": ("age", "fraud")}, "features lists the label column 'fraud'"),
        (lambda frame: frame.assign(age=[[1]] * ROWS), {}, "a column holds a list in a cell"),
        (lambda frame: frame.iloc[:0], {}, "the table has no rows"),
    ],
)
def test_mistakes_are_named_in_one_line(
    change: Callable[[pd.DataFrame], pd.DataFrame], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        fedauc.Table(change(CLAIMS), **{**OPTIONS, **options}).load(0)
    assert "\n" not in str(caught.value)


def test_a_second_table_with_other_columns_fails_before_training() -> None:
    lacking = CLAIMS.drop(columns=["age", "plan"])
    with pytest.raises(ValueError, match=re.escape("the table lacks the columns 'age', 'plan'; it has amount")):
        fedauc.Table(CLAIMS, **OPTIONS, test=lacking).load(0)


def test_a_site_column_among_the_features_and_numbers_with_text_are_warned_of() -> None:
    codes = np.arange(ROWS) % 30
    frame = CLAIMS.assign(code=[str(code) if code else "unknown" for code in codes])
    warnings = fedauc.Table(frame, **OPTIONS, features=("age", "state", "code")).load(0).summary.warnings
    assert "column 'state' is the client column and a feature too" in warnings[0]
    assert "column 'code' counts as categories because it holds 'unknown' among numbers" in warnings[1]


def test_numbers_can_be_categories_and_have_bins() -> None:
    frame = CLAIMS.assign(region=np.arange(ROWS) % 3)
    parts = fedauc.Table(frame, **OPTIONS, features=("region", "amount"), categories=("region",), numbers="quantiles")
    encoder = parts.load(0).encoder
    assert encoder is not None
    assert encoder.feature_names[:4] == ("region=0", "region=1", "region=2", "amount")
    assert encoder.feature_names[4:] == tuple(f"amount (bin {number})" for number in range(1, 17))


def test_sites_with_one_row_or_one_class_are_trained() -> None:
    frame = CLAIMS.assign(state=[f"site {number}" if number < 5 else "rest" for number in range(ROWS)])
    fitted = fedauc.fit("linear", fedauc.Table(frame, **OPTIONS), groups=2, cycles=1)
    assert len(fitted.scores(frame)) == ROWS


def test_fit_on_a_table_scores_new_rows_by_column_name(tmp_path: Path) -> None:
    CLAIMS.to_csv(tmp_path / "claims.csv", index=False)
    table = fedauc.Table(tmp_path / "claims.csv", **OPTIONS)
    fitted = fedauc.fit("linear", table, "cycp-pairwise", groups=2, cycles=2, data_seed=3)
    new = CLAIMS.drop(columns=["fraud", "state", "claim"])
    scores = fitted.scores(new)
    assert np.array_equal(
        scores, fitted.scores(importlib.import_module("polars").from_pandas(new[sorted(new.columns)]))
    )
    parts = table.load(3)
    assert np.allclose(
        scores[np.asarray(parts.test.numbers)], _score_inputs(fitted.module, parts.test.inputs), atol=1e-6
    )
    with pytest.raises(ValueError, match=re.escape("the table lacks the column 'plan'; it has age")):
        fitted.scores(new.drop(columns="plan"))
    # The preparation is the first entry of the ledger.
    without = fedauc.fit("linear", prepare_table(parts, Preparation(), 3).train, groups=2, cycles=2)
    assert fitted.traffic.bytes_up == without.traffic.bytes_up + parts.summary.traffic.bytes_up
    assert fitted.traffic.bytes_down == without.traffic.bytes_down + parts.summary.traffic.bytes_down


def _score_inputs(module: torch.nn.Module, inputs: Any) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(module(torch.from_numpy(np.asarray(inputs))).squeeze(1).numpy())


def test_clients_from_a_frame_remember_their_features() -> None:
    frame = CLAIMS[["age", "amount", "state", "fraud"]].assign(
        age=CLAIMS["age"].fillna(40.0), fraud=CLAIMS["fraud"] == "yes"
    )
    clients = fedauc.Clients.from_frame(importlib.import_module("polars").from_pandas(frame), "fraud", "state")
    assert clients.feature_names == ("age", "amount")
    fitted = fedauc.fit("linear", clients, groups=2, cycles=1, test=(frame[["amount", "age"]], frame["fraud"]))
    swapped = fitted.scores(frame[["amount", "age"]])
    assert np.array_equal(swapped, fitted.scores(frame[["age", "amount"]].to_numpy()))
    with pytest.raises(ValueError, match="lacks the column 'age'"):
        fitted.scores(frame[["amount"]])


def test_columns_of_very_different_size_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    inputs = np.random.default_rng(0).normal(size=(80, 2))
    labels, client = np.arange(80) % 4 == 0, np.arange(80) % 2
    with caplog.at_level(logging.WARNING, "fedauc"):
        fedauc.fit("linear", fedauc.Clients.from_arrays(inputs, labels, client), groups=2, cycles=1)
        assert caplog.text == ""
        scaled = fedauc.Clients.from_arrays(inputs * [1, 2e3], labels, client)
        fedauc.fit("linear", scaled, groups=2, cycles=1, learning_rate=1e-9)
    assert "column 1 has standard deviation" in caplog.text
    assert "standardise the columns, or use fedauc.Table" in caplog.text


def test_a_run_can_be_resumed_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    CLAIMS.to_csv(tmp_path / "claims.csv", index=False)
    monkeypatch.chdir(tmp_path)
    config = Config(recipe=Recipe.of("cycp-pairwise", cycles=1, groups=2), data=fedauc.Table("claims.csv", **OPTIONS))
    expected = Run.create(config, tmp_path / "first").train_to_end()
    Run.create(config, tmp_path / "second")
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = Run.resume(tmp_path / "second")
    assert run.train_to_end() == expected
    scores = np.load(tmp_path / "second" / "scores.npz")
    assert set(scores["clients"]) <= {"CA", "NY", "NA", "007"}
    assert (CLAIMS["fraud"].to_numpy()[scores["rows"]] == "yes").tolist() == (scores["labels"] == 1).tolist()
    assert json.loads((tmp_path / "second" / "data.json").read_text())["sites"] == 4


def test_a_frame_has_no_run_folder(tmp_path: Path) -> None:
    config = Config(recipe=Recipe.of("cycp-pairwise", cycles=1), data=fedauc.Table(CLAIMS, **OPTIONS))
    with pytest.raises(
        ValueError, match="a DataFrame in memory, which a run folder cannot load again; save it as a file"
    ):
        Run.create(config, tmp_path / "run")
    with pytest.raises(ValueError, match="give the path of a file, or a frame"):
        replace(config.data, path=3)  # type: ignore[call-arg]
    assert as_pandas_frame(CLAIMS) is CLAIMS
