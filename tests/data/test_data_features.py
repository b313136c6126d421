"""The feature encoder: its equations, any kind of table, and the network that does the same."""

from __future__ import annotations

import datetime
import decimal
import importlib
import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from fedauc.data.columns import as_days, as_numbers
from fedauc.data.datasets.creditcard import COLUMNS, CreditCard
from fedauc.data.features import CategoryColumn, DateColumn, FeatureEncoder, NumberColumn

EDGES = (-1.0, 0.0, 0.5, 2.0)
ENCODER = FeatureEncoder(
    (
        NumberColumn("age", fill=40.0, shift=40.0, scale=10.0, has_indicator=True, edges=EDGES),
        CategoryColumn("state", ("CA", "NY"), has_missing=True, has_other=True),
        DateColumn("day", fill=19000.0, shift=19000.0, scale=100.0, has_indicator=True, has_time=True),
        NumberColumn("member", fill=0.5, shift=0.0, scale=1.0),
        CategoryColumn("plan", ("a", "b")),
    )
)
DAYS = [
    datetime.datetime(2024, 2, 29, 18, 0),
    None,
    datetime.datetime(1969, 12, 31, 12, 0),
    datetime.datetime(2000, 1, 1),
]
FRAME = pd.DataFrame(
    {
        "plan": ["b", "never seen", "a", None],
        "age": [31.0, np.nan, 48.5, 1000.0],
        "member": [True, False, None, True],
        "state": pd.Categorical(["NY", None, " CA", "TX"]),
        "day": np.array(DAYS, dtype="datetime64[us]"),
        "unused": ["x"] * 4,
    }
)


def piecewise_linear(z: float) -> list[float]:
    """The encoding of Gorishniy et al. 2022, equation 1, with both ends clipped."""
    return [min(max((z - left) / (right - left), 0.0), 1.0) for left, right in itertools.pairwise(EDGES)]


def encode_row(age: float, state: list[int], days: float, member: float, plan: list[int]) -> list[float]:
    z = 0.0 if np.isnan(age) else (age - 40) / 10
    waves = [wave(2 * np.pi * days / period) for period in (365.2425, 7, 1) for wave in (np.sin, np.cos)]
    date = [0.0] * 7 if np.isnan(days) else [(days - 19000) / 100, *waves]
    return [z, *piecewise_linear(z), float(np.isnan(age)), *state, *date, float(np.isnan(days)), member, *plan]


# 2024-02-29 is 19782 days after 1970-01-01, and 2000-01-01 is 10957.
EXPECTED = np.array(
    [
        encode_row(31.0, [0, 1, 0, 0], 19782.75, 1.0, [0, 1]),
        encode_row(np.nan, [0, 0, 1, 0], np.nan, 0.0, [0, 0]),
        encode_row(48.5, [1, 0, 0, 0], -0.5, 0.5, [1, 0]),
        encode_row(1000.0, [0, 0, 0, 1], 10957.0, 1.0, [0, 0]),
    ]
)


def as_mapping(frame: pd.DataFrame) -> dict[str, Any]:
    return {str(name): frame[name].tolist() for name in frame}


def make_decimals(values: list[float]) -> Any:
    decimals = [None if np.isnan(value) else decimal.Decimal(str(value)) for value in values]
    return np.array(decimals, dtype=object)


TABLES: dict[str, Callable[[pd.DataFrame], Any]] = {
    "pandas": lambda frame: frame,
    "pandas by arrow": lambda frame: frame.convert_dtypes(dtype_backend="pyarrow"),
    "pandas nullable": lambda frame: frame.convert_dtypes(),
    "polars": lambda frame: importlib.import_module("polars").from_pandas(frame),
    "polars lazy": lambda frame: importlib.import_module("polars").from_pandas(frame).lazy(),
    "pyarrow": lambda frame: pa.Table.from_pandas(frame),
    "mapping": as_mapping,
    "text dates": lambda frame: frame.assign(day=frame["day"].dt.strftime("%Y-%m-%dT%H:%M:%SZ")),
    "time zone": lambda frame: frame.assign(day=frame["day"].dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo")),
    "decimals": lambda frame: frame.assign(age=make_decimals(frame["age"].tolist())),
}


@pytest.mark.parametrize("kind", TABLES)
def test_every_kind_of_table_is_encoded_by_column_name(kind: str) -> None:
    encoded = ENCODER.encode(TABLES[kind](FRAME))
    assert encoded.dtype == np.float32
    assert encoded.shape == (4, len(ENCODER.feature_names))
    np.testing.assert_allclose(encoded, EXPECTED, rtol=1e-6, atol=1e-6)


def test_features_have_names() -> None:
    assert ENCODER.input_names == ("age", "state", "day", "member", "plan")
    assert ENCODER.feature_names[:9] == (
        "age",
        "age (bin 1)",
        "age (bin 2)",
        "age (bin 3)",
        "age (missing)",
        "state=CA",
        "state=NY",
        "state (missing)",
        "state (other)",
    )
    assert ENCODER.feature_names[9:11] == ("day", "day (sine of year)")
    assert ENCODER.feature_names[-3:] == ("member", "plan=a", "plan=b")


def test_the_module_gives_the_same_values() -> None:
    numbers, codes = ENCODER.split_columns(FRAME)
    assert (str(numbers.dtype), str(codes.dtype)) == ("float64", "int64")
    encoded = ENCODER.build_module()(torch.from_numpy(numbers), torch.from_numpy(codes))
    assert encoded.dtype == torch.float32
    # Sines of torch and numpy may differ in the last bit of float32.
    np.testing.assert_allclose(encoded.numpy(), ENCODER.encode(FRAME), atol=1e-7, rtol=1e-6)


def test_the_encoder_survives_json() -> None:
    assert FeatureEncoder.from_document(json.loads(json.dumps(ENCODER.to_document()))) == ENCODER


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda frame: frame.drop(columns="day"),
            "the table lacks the column 'day'; it has age, member",
        ),
        (lambda frame: frame.drop(columns=["day", "age"]), "the table lacks the columns 'age', 'day'; it has member,"),
        (
            lambda frame: frame.assign(age="old"),
            "column 'age' holds 'old' at row 0 (counted from 0); it must hold numbers",
        ),
        (lambda frame: frame.assign(age=np.inf), "inputs holds 4 values that are not finite, the first inf at row 0"),
        (
            lambda frame: frame.assign(age=1e39),
            "inputs holds 4 values beyond float32, the first 1e+39 at row 0 (counted from 0), column",
        ),
        (lambda frame: frame.assign(day="yesterday"), "column 'day' holds 'yesterday'; write dates as 2024-01-31"),
        (lambda frame: frame.to_numpy(), "rows are an array, but column 'state' is no number; give a table with"),
    ],
)
def test_what_cannot_be_encoded_is_named_in_one_line(change: Callable[[pd.DataFrame], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        ENCODER.encode(change(FRAME))
    assert "\n" not in str(caught.value)


def test_an_encoder_of_numbers_takes_an_array_of_the_right_width() -> None:
    encoder = FeatureEncoder.of_numbers(["a", "b"], np.array([1.0, 2.0]), np.array([2.0, 4.0]))
    assert encoder.encode(np.array([[3, 6], [1, 2]])).tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert encoder.encode(pd.DataFrame({"b": [6], "a": [3]})).tolist() == [[1.0, 1.0]]
    with pytest.raises(ValueError, match=re.escape("give numbers [n, 2], in the order a, b")):
        encoder.encode(np.zeros((3, 4)))


def test_the_encoder_of_creditcard_gives_the_rows_that_training_uses() -> None:
    parts = CreditCard().load(0)
    assert parts.encoder is not None
    assert parts.encoder.input_names == COLUMNS
    raw = np.asarray(CreditCard().read_rows().inputs)
    for part in (parts.train, parts.test):
        assert part.numbers is not None
        assert np.array_equal(parts.encoder.encode(raw[part.numbers]), part.inputs)


def test_numbers_and_days_take_what_python_has() -> None:
    numbers = np.array([1, True, decimal.Decimal("2.5"), None, np.float32(3.5), pd.NA], dtype=object)
    np.testing.assert_array_equal(as_numbers(numbers, "x"), [1, 1, 2.5, np.nan, 3.5, np.nan])
    days = np.array(
        [datetime.date(1970, 1, 2), pd.Timestamp("1970-01-02 06:00"), pd.NaT, "1970-01-01T00:00+06:00"], object
    )
    np.testing.assert_array_equal(as_days(days, "t"), [1, 1.25, np.nan, -0.25])
