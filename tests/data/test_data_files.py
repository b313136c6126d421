"""Files that are no table: each is refused in one line that names it and says what to do."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedauc.data import Preparation, prepare_table
from fedauc.data.datasets.table import Table
from fedauc.data.partitions import IID

ROWS = 12
FRAME = pd.DataFrame({"x": np.linspace(0.0, 1.0, ROWS), "y": np.arange(ROWS) % 2, "client": ["a", "b"] * 6})
# 1e39 is above float32's largest value, 3.4e38, and far below float64's.
HUGE = FRAME.assign(x=[*FRAME["x"][:-1], -1e39])


def write_parquet(file: Path) -> None:
    FRAME.to_parquet(file)


def write_npz(file: Path) -> None:
    # With a file object, numpy keeps the name as it is.
    with file.open("wb") as stream:
        np.savez(stream, x=FRAME[["x"]].to_numpy(), y=FRAME["y"].to_numpy(), client=np.arange(ROWS) % 2)


def write_csv(file: Path) -> None:
    FRAME.to_csv(file, index=False)


def damage_bytes(write: Callable[[Path], None], find: bytes) -> Callable[[Path], None]:
    """Write a file, then flip the four bytes that follow the last place of some text."""

    def build(file: Path) -> None:
        write(file)
        raw = bytearray(file.read_bytes())
        start = raw.rindex(find) + len(find)
        raw[start : start + 4] = bytes(255 - byte for byte in raw[start : start + 4])
        file.write_bytes(raw)

    return build


def huge_npz(file: Path) -> None:
    np.savez(file, x=HUGE[["x"]].to_numpy(), y=HUGE["y"], client=np.arange(ROWS) % 2)


WRONG: list[tuple[str, Callable[[Path], object], str]] = [
    ("empty.csv", Path.touch, "it is empty: write one line of column names, then one line per row"),
    ("blank.csv", lambda file: file.write_text("\n\n"), "it is empty: write one line of column names"),
    ("header.csv", lambda file: file.write_text("x,y,client\n"), "the table has no rows; give at least one positive"),
    ("header.parquet", lambda file: FRAME.iloc[:0].to_parquet(file), "the table has no rows; give at least one"),
    (
        "late.csv",
        lambda file: file.write_text("x,y,client\n1,0,a\n1,0,a,7\n"),
        "it is no regular CSV (Expected 3 fields in line 3, saw 4): give every line as many values as the first",
    ),
    (
        "early.csv",
        lambda file: file.write_text("x,y,client\n1,0,a,7\n1,0,a\n"),
        "its lines hold more values than its first line has names: name every column",
    ),
    ("bytes.csv", lambda file: file.write_bytes(bytes(range(128, 256))), "it is not UTF-8 text: save the table as CSV"),
    ("excel.csv", lambda file: file.write_text("x,y,client\n", "utf-16"), "it is not UTF-8 text: save the table as"),
    ("break.csv", lambda file: file.write_text('x,"a\nb"\n1,2\n'), "unknown column 'y': known: a b, x"),
    ("empty.parquet", Path.touch, "it is damaged or no Parquet file ("),
    ("text.parquet", lambda file: file.write_text("x,y,client\n" * 9), "it is damaged or no Parquet file ("),
    ("page.parquet", damage_bytes(write_parquet, b"PAR1\x15"), "it is damaged or no Parquet file ("),
    ("empty.npz", Path.touch, "it is no .npz archive: write it with numpy.savez"),
    ("entry.npz", damage_bytes(write_npz, b"PK\x01\x02"), "damaged"),
    ("values.npz", damage_bytes(write_npz, b"}"), "damaged"),
    (
        "huge.csv",
        lambda file: HUGE.to_csv(file, index=False),
        "the first -1e+39 at row 11 (counted from 0), column 'x'; the bound is",
    ),
    (
        "huge.npz",
        huge_npz,
        "inputs holds 1 values beyond float32, the first -1e+39 at row 11 (counted from 0), column 0; the bound is",
    ),
    ("folder.csv", Path.mkdir, "it is a directory: name one file in it"),
    ("folder", Path.mkdir, "it is a directory: name one file in it"),
]


@pytest.mark.parametrize(("name", "build", "message"), WRONG, ids=[name for name, _, _ in WRONG])
@pytest.mark.parametrize("second", [False, True], ids=["path", "test"])
def test_files_that_are_no_table_are_refused(
    tmp_path: Path, name: str, build: Callable[[Path], object], message: str, second: bool
) -> None:
    wrong, good = tmp_path / name, tmp_path / ("good.npz" if name.endswith("npz") else "good.csv")
    build(wrong)
    (write_npz if name.endswith("npz") else write_csv)(good)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        (Table(str(good), test=str(wrong)) if second else Table(str(wrong))).load(0)
    assert repr(str(wrong)) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("write", "suffix"), [(write_csv, ".CSV"), (write_parquet, ".Parquet"), (write_npz, ".NPZ")])
def test_suffixes_may_be_in_upper_case(tmp_path: Path, write: Callable[[Path], None], suffix: str) -> None:
    file = tmp_path / f"rows{suffix}"
    write(file)
    table = Table(str(file), standardize=False).load(0)
    values = np.concatenate([np.asarray(part.inputs)[:, 0] for part in (table.train, table.test)])
    assert sorted(values.tolist()) == FRAME["x"].astype(np.float32).tolist()
    shutil.move(file, tmp_path / f"row{suffix}")
    with pytest.raises(ValueError, match=re.escape(f"did you mean 'row{suffix}'?")):
        Table(str(file)).load(0)


def test_the_largest_float32_is_still_read(tmp_path: Path) -> None:
    largest = float(np.finfo(np.float32).max)
    FRAME.assign(x=[*FRAME["x"][:-1], largest]).to_csv(tmp_path / "edge.csv", index=False)
    table = Table(str(tmp_path / "edge.csv"), standardize=False).load(0)
    assert max(np.asarray(part.inputs).max() for part in (table.train, table.test)) == np.float32(largest)


def rare(file: Path, positives: int) -> str:
    """Thirty rows of which the first few are positive."""
    frame = pd.DataFrame({"x": np.arange(30.0), "y": np.arange(30) < positives, "client": "a"})
    frame.to_csv(file, index=False)
    return str(file)


@pytest.mark.parametrize(
    ("positives", "validation", "held"),
    [
        (3, 0.0, [2]),  # 0.3 of 3 is 1, raised to 2; 1 is left to train on.
        (5, 0.1, [2, 2]),  # 2 of 5 for test, then 2 of the 3 left for validation.
        (20, 0.5, [6, 7]),  # 0.3 of 20, then half of 14: nothing to raise.
    ],
)
def test_two_of_each_class_are_held_out(tmp_path: Path, positives: int, validation: float, held: list[int]) -> None:
    table = Table(rare(tmp_path / "rare.csv", positives), validation_fraction=validation).load(0)
    parts = [table.test] if table.validation is None else [table.test, table.validation]
    assert [int(part.labels.sum()) for part in parts] == held
    assert table.train.labels.sum() == positives - sum(held)
    # The held-out parts are enough to evaluate on.
    prepare_table(table, Preparation(IID(2)), 0)


@pytest.mark.parametrize(
    ("positives", "validation", "message"),
    [
        (
            2,
            0.0,
            "2 of the at least 3 needed rows labelled 1 are there to split: 2 for the test part and 1 to train on",
        ),
        (1, 0.0, "1 of the at least 3 needed rows labelled 1 are there to split"),
        # The test part takes 2 of 4, and 2 are not enough for two parts.
        (4, 0.1, "2 of the at least 3 needed rows labelled 1 are there to split: 2 for the validation part"),
        (29, 0.0, "1 of the at least 3 needed rows labelled 0 are there to split"),
    ],
)
def test_too_few_rows_of_a_class_are_counted(tmp_path: Path, positives: int, validation: float, message: str) -> None:
    dataset = Table(rare(tmp_path / "rare.csv", positives), validation_fraction=validation)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        dataset.load(0)
    assert "\n" not in str(caught.value)


def test_second_file_needs_two_of_each_class(tmp_path: Path) -> None:
    later = rare(tmp_path / "later.csv", 1)
    table = Table(rare(tmp_path / "rare.csv", 3), test=later).load(0)
    with pytest.raises(ValueError, match="test part: labels holds 1 of the at least 2 positives"):
        prepare_table(table, Preparation(IID(2)), 0)
