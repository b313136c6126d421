"""Your own files: every format gives the same rows, and mistakes are named."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedauc.data.datasets.table import Table

ROWS = 40
FRAME = pd.DataFrame(
    {
        "amount": np.linspace(-1.0, 1.0, ROWS) ** 3,
        "age": np.arange(ROWS) % 7,
        "fraud": np.arange(ROWS) % 4 == 0,
        "bank": [f"{number % 3:03d}" for number in range(ROWS)],
        "land": [["de", "fr", "fr"][number % 3] for number in range(ROWS)],
    }
)
NAMES: dict[str, Any] = {"label": "fraud", "client": "bank", "group": "land"}


def write_table(folder: Path, suffix: str, frame: pd.DataFrame = FRAME) -> str:
    path = folder / f"rows{suffix}"
    if suffix == ".csv":
        frame.to_csv(path, index=False)
    elif suffix == ".parquet":
        frame.to_parquet(path)
    else:
        names: dict[str, Any] = {key: frame[key].to_numpy().astype(str) for key in ("bank", "land")}
        np.savez(path, x=frame[["amount", "age"]].to_numpy(), fraud=frame["fraud"].to_numpy(), **names)
    return str(path)


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".npz"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    table = Table(write_table(tmp_path, suffix), **NAMES, standardize=False, test_fraction=0.25).load(0)
    # A quarter of 10 positives and of 30 negatives, to the nearest row and ties to even: 2 and 8.
    assert (len(table.train.labels), len(table.test.labels), table.test.labels.sum()) == (30, 10, 2)
    assert table.train.client is not None
    assert table.train.group is not None
    assert set(table.train.client) == {"000", "001", "002"}
    columns = (FRAME[name].tolist() for name in ("amount", "age", "fraud", "bank"))
    joined = {(float(np.float32(x)), age): (fraud, bank) for x, age, fraud, bank in zip(*columns, strict=True)}
    for part in (table.train, table.test):
        assert part.inputs.dtype == np.float32
        assert part.client is not None
        for inputs, label, client in zip(np.asarray(part.inputs), part.labels, part.client, strict=True):
            assert (bool(label), client) == joined[float(inputs[0]), int(inputs[1])]


def test_second_file_is_the_test_part(tmp_path: Path) -> None:
    train = write_table(tmp_path, ".csv")
    shuffled = FRAME[["land", "age", "bank", "fraud", "amount"]].iloc[:12]
    shuffled.to_parquet(tmp_path / "later.parquet")
    later = str(tmp_path / "later.parquet")
    table = Table(train, **NAMES, test=later, standardize=False, validation_fraction=0.1).load(0)
    assert len(table.test.labels) == 12
    assert table.validation is not None
    assert len(table.train.labels) + len(table.validation.labels) == ROWS
    # Columns are matched by name, whatever their order.
    assert np.array_equal(np.asarray(table.test.inputs)[:, 1], FRAME["age"][:12])


def test_group_array_of_an_npz_is_found(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", x=np.zeros((8, 1)), y=np.arange(8) % 2, client=np.arange(8), group=np.arange(8) // 4)
    table = Table(str(tmp_path / "g.npz")).load(0)
    assert table.train.group is not None
    assert set(table.train.group) == {0, 1}


def test_client_column_may_be_absent(tmp_path: Path) -> None:
    assert Table(write_table(tmp_path, ".csv"), label="fraud", client="").load(0).train.client is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "row.csv"}, "no such file: did you mean 'rows.csv'?"),
        ({"path": "zebra.npz"}, "no such file: give the path of a file that exists"),
        ({"label": "fraudd"}, "unknown column 'fraudd': did you mean 'fraud'?"),
        ({"client": "banks"}, "unknown column 'banks': did you mean 'bank'?"),
        ({"features": ("age", "fraud")}, "features lists the label column 'fraud'; leave it out"),
        ({"features": ("ages",)}, "unknown column 'ages': did you mean 'age'?"),
        (
            {"label": "age"},
            "label column 'age' holds 5 (5 rows), 6 (5 rows), 0 (6 rows), 1 (6 rows), 2 (6 rows) and 2 other "
            "values; labels must be 0 or 1: name another column",
        ),
        ({"label": "land"}, "label column 'land' holds '"),
        ({"test_fraction": 0.99}, "takes all 30 rows labelled 0 and leaves none to train on: lower it"),
        ({"path": "rows.npz", "label": "froud"}, "unknown array 'froud': did you mean 'fraud'?"),
        ({"path": "rows.npz", "features": ("age",)}, "an .npz file has no column names: leave features empty"),
        ({"path": "text.npz"}, "it is no .npz archive: write it with numpy.savez"),
        ({"path": "objects.npz", "label": "y", "client": "c", "group": ""}, "array 'c' holds Python objects"),
        ({"path": "rows.npz", "test": "wide.npz"}, "test has inputs of shape (3,) and path has (2,)"),
    ],
)
def test_mistakes_are_named_in_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    for suffix in (".csv", ".npz"):
        write_table(tmp_path, suffix)
    (tmp_path / "text.npz").write_text("not an archive")
    np.savez(tmp_path / "objects.npz", x=np.zeros((4, 1)), y=[0, 1, 0, 1], c=np.array(["a", 1, "b", 2], dtype=object))
    names: dict[str, Any] = {key: FRAME[key].to_numpy().astype(str) for key in ("bank", "land")}
    np.savez(tmp_path / "wide.npz", x=np.zeros((ROWS, 3)), fraud=FRAME["fraud"], **names)
    settings: dict[str, Any] = {"path": "rows.csv", **NAMES} | changes
    for key in {"path", "test"} & set(settings):
        settings[key] = str(tmp_path / str(settings[key]))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Table(**settings).load(0)
    assert "\n" not in str(caught.value)


def test_missing_pandas_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_table(tmp_path, ".csv")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ValueError, match=re.escape("needs pandas and pyarrow: run pip install pandas pyarrow")):
        Table(path, **NAMES).load(0)
