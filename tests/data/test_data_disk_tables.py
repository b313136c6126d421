"""Tables larger than memory: copied to disk once, with the same rows, to the bit, as from memory."""

from __future__ import annotations

import os
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pytest

from fedauc.data import Preparation, TableParts, prepare_table, standardization
from fedauc.data.clients import Clients
from fedauc.data.dataset import Rows
from fedauc.data.datasets.table import Table
from fedauc.data.io import disk_tables, readers

ROWS = 60
BLOCK = 7
"""Rows read at once here: does not divide 60, nor the 25 rows of a batch of the files below."""

BATCH = 25


def make_frame(rows: int = ROWS) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    row = np.arange(rows)
    return pd.DataFrame(
        {
            "amount": draw.normal(5.0, 3.0, rows).astype(np.float32),
            "age": draw.integers(18, 90, rows),
            "note": ["text"] * rows,
            "fraud": row % 4 == 0,
            "rate": draw.normal(size=rows),
            "bank": [f"bank-{number % 5}" for number in row],
            "land": [["de", "fr", "de", "it", "fr"][number % 5] for number in row],
        }
    )


NAMES: dict[str, Any] = {"label": "fraud", "client": "bank", "group": "land"}


def write_parquet(file: Path, rows: pd.DataFrame) -> None:
    rows.to_parquet(file, row_group_size=BATCH)


def write_arrow(file: Path, rows: pd.DataFrame) -> None:
    table = pa.Table.from_pandas(rows)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=BATCH)


def write_stream(file: Path, rows: pd.DataFrame) -> None:
    table = pa.Table.from_pandas(rows)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=BATCH)


def write_feather(file: Path, rows: pd.DataFrame) -> None:
    pyarrow.feather.write_feather(rows, file, compression="lz4")


Writer = Callable[[Path, pd.DataFrame], None]
KINDS: list[tuple[str, Writer]] = [
    ("rows.parquet", write_parquet),
    ("rows.arrow", write_arrow),
    ("stream.arrow", write_stream),
    ("rows.feather", write_feather),
]
every_kind = pytest.mark.parametrize(("name", "write"), KINDS, ids=[f"{kind[1].__name__}" for kind in KINDS])


@pytest.fixture
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Every file counts as large and is read in small blocks; returns the folder of the copies."""
    monkeypatch.setattr(disk_tables, "LARGE", 0)
    monkeypatch.setattr(readers, "BLOCK", BLOCK)
    monkeypatch.setenv("FEDAUC_DATA", str(tmp_path / "home"))
    return tmp_path / "home" / "parsed"


def write_table(folder: Path, name: str, write: Writer, rows: pd.DataFrame | None = None) -> str:
    write(folder / name, make_frame() if rows is None else rows)
    return str(folder / name)


def assert_same_table(table: TableParts, expected: TableParts) -> None:
    for rows, expected_rows in zip(table[:3], expected[:3], strict=True):
        assert isinstance(rows, Rows) == isinstance(expected_rows, Rows)
        if isinstance(rows, Rows) and isinstance(expected_rows, Rows):
            assert isinstance(rows.inputs, np.memmap)
            for column, expected_column in zip(rows, expected_rows, strict=True):
                np.testing.assert_array_equal(np.asarray(column), np.asarray(expected_column))
    assert table.note == expected.note


@every_kind
@pytest.mark.parametrize(
    ("standardize", "validation", "second"),
    [(True, 0.0, ""), (False, 0.2, ""), (True, 0.2, "later.parquet"), (False, 0.0, "later.csv")],
)
def test_rows_are_the_same_to_the_bit_as_from_memory(
    tmp_path: Path, cache_folder: Path, name: str, write: Writer, standardize: bool, validation: float, second: str
) -> None:
    if second:
        later = make_frame(2 * ROWS).iloc[ROWS:]
        later.to_csv(tmp_path / second, index=False) if second.endswith("csv") else later.to_parquet(tmp_path / second)
    write_table(tmp_path, name, write)
    dataset = Table(
        str(tmp_path / name),
        **NAMES,
        standardize=standardize,
        validation_fraction=validation,
        test=str(tmp_path / second) if second else "",
    )
    table = dataset.load(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_tables, "LARGE", 1 << 40)
        assert_same_table(table, dataset.load(3))
    # What a run makes of them: clients of both, and examples.
    split = prepare_table(table, Preparation(), 0)
    assert split.train.names.tolist() == [f"bank-{number}" for number in range(5)]
    assert split.train.groups is not None
    assert split.train.groups.tolist() == ["de", "fr", "de", "it", "fr"]


@every_kind
def test_clients_from_a_file_are_those_from_its_frame(
    tmp_path: Path, cache_folder: Path, name: str, write: Writer
) -> None:
    clients = Clients.from_file(write_table(tmp_path, name, write), "fraud", "bank", ["rate", "age"], "land")
    expected = Clients.from_frame(make_frame(), "fraud", "bank", ["rate", "age"], "land")
    # A file's values are read as float32.
    assert np.array_equal(clients.inputs.numpy(), expected.inputs.numpy().astype(np.float32))
    for column, expected_column in (
        (clients.rows, expected.rows),
        (clients.names, expected.names),
        (clients.groups, expected.groups),
    ):
        assert column is not None
        assert expected_column is not None
        assert np.array_equal(column, expected_column)


def test_a_small_file_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAUC_DATA", str(tmp_path / "home"))
    clients = Clients.from_file(write_table(tmp_path, "rows.arrow", write_arrow), "fraud", "bank")
    assert len(clients) == 5
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(("edge", "expected"), [(0, True), (1, False)])
def test_large_is_from_so_many_bytes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edge: int, expected: bool
) -> None:
    path = write_table(tmp_path, "rows.arrow", write_arrow)
    # 60 rows of 7 columns, four bytes each if they were all features.
    monkeypatch.setattr(disk_tables, "LARGE", ROWS * 7 * 4 + edge)
    assert disk_tables.is_large(path) == expected
    assert not disk_tables.is_large(str(tmp_path / "rows.csv"))


def test_a_second_load_reads_nothing_but_the_copy(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Table(write_table(tmp_path, "rows.arrow", write_arrow), **NAMES)
    first = dataset.load(0)

    def refuse(*_: Any) -> Any:
        raise AssertionError("the file was read again")

    monkeypatch.setattr(readers, "iterate_frames", refuse)
    assert_same_table(dataset.load(0), first)
    # Another seed is another split.
    with pytest.raises(AssertionError, match="read again"):
        dataset.load(1)


def test_a_changed_file_is_noticed_and_its_old_copy_dropped(tmp_path: Path, cache_folder: Path) -> None:
    path = write_table(tmp_path, "rows.arrow", write_arrow)
    dataset = Table(path, **NAMES, standardize=False)
    before, standardized = dataset.load(0), Table(path, **NAMES).load(0)
    assert len(list(cache_folder.iterdir())) == 2
    write_arrow(Path(path), make_frame().assign(age=1))
    # The same size; only the time tells.
    os.utime(path, ns=(0, 12345))
    after = dataset.load(0)
    assert np.all(np.asarray(after.train.inputs)[:, 1] == 1)
    assert not np.all(np.asarray(before.train.inputs)[:, 1] == 1)
    # The standardised copy is another one: it goes when it is asked for again.
    assert len(list(cache_folder.iterdir())) == 2
    assert len(standardized.train.labels) == len(after.train.labels)


def test_what_another_process_has_just_finished_stays(tmp_path: Path, cache_folder: Path) -> None:
    (tmp_path / "rows").touch()

    def build(into: Path) -> None:
        np.save(into / "all-labels.npy", np.arange(3))

    def overtaken(into: Path) -> None:
        build(into)
        disk_tables.load_disk_table((str(tmp_path / "rows"),), "key", build)
        faster.append(next(cache_folder.glob("table-*")).stat().st_ino)

    faster: list[int] = []
    disk_tables.load_disk_table((str(tmp_path / "rows"),), "key", overtaken)
    assert [path.stat().st_ino for path in cache_folder.iterdir()] == faster


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        # Row 57 is the first after 25 + 25 + 7, so the second of a block that begins at row 57.
        ("rate", np.inf, "inputs holds 1 values that are not finite, the first inf at row 58 (counted from 0)"),
        ("rate", 1e39, "inputs holds 1 values beyond float32, the first 1e+39 at row 58 (counted from 0)"),
        ("bank", None, "column 'bank' is missing in 1 rows, the first row 58 (counted from 0)"),
        ("fraud", 2, "label column 'fraud' holds 0 (44 rows), 1 (15 rows), 2 (1 row); labels must be 0 or 1"),
    ],
)
def test_wrong_values_are_named_and_leave_nothing_behind(
    tmp_path: Path, cache_folder: Path, column: str, value: Any, message: str
) -> None:
    rows = make_frame()
    rows["fraud"] = rows["fraud"].astype(np.int64)
    rows.loc[58, column] = value
    path = write_table(tmp_path, "rows.arrow", write_arrow, rows)
    with pytest.raises(ValueError, match=re.escape(f"file {path!r}: {message}")) as caught:
        Table(path, **NAMES).load(0)
    assert "\n" not in str(caught.value)
    assert not any(cache_folder.rglob("*"))
    write_arrow(Path(path), make_frame())
    assert len(Table(path, **NAMES).load(0).train.labels) == 42


def test_a_damaged_copy_is_named_and_made_again_once_deleted(tmp_path: Path, cache_folder: Path) -> None:
    dataset = Table(write_table(tmp_path, "rows.arrow", write_arrow), **NAMES)
    dataset.load(0)
    (victim,) = cache_folder.rglob("train-inputs.npy")
    raw = bytearray(victim.read_bytes())
    raw[-3] ^= 1
    victim.write_bytes(raw)
    with pytest.raises(ValueError, match=re.escape(f"{victim} is damaged: delete the folder {victim.parent}")):
        dataset.load(0)
    shutil.rmtree(victim.parent)
    assert len(dataset.load(0).train.labels) == 42


def test_writing_parts_takes_little_memory(tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of 20 MB, 0.8 MB at a time."""
    rows, width, block = 50_000, 100, 1 << 11
    monkeypatch.setattr(readers, "BLOCK", block)
    monkeypatch.setattr(disk_tables, "BLOCK", block * width)
    monkeypatch.setattr(standardization, "BLOCK", block * width)
    values = np.random.default_rng(0).standard_normal((rows, width), dtype=np.float32)
    table = pd.DataFrame(values, columns=[f"x{number}" for number in range(width)])
    table["y"], table["client"] = np.arange(rows) % 10 == 0, np.arange(rows) % 50
    peaks = []
    for attempt in range(3):
        # Whatever else the process does meanwhile only adds to what is traced, so the least of three counts.
        file = tmp_path / f"rows{attempt}.feather"
        write_feather(file, table)
        tracemalloc.start()
        try:
            loaded = Table(str(file)).load(0)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert len(loaded.train.labels) == 35_000
    # Some 60 bytes a row are numbers, labels, names and the split, against 400 of inputs; the rest is a few blocks.
    assert min(peaks) < values.nbytes / 2


# ------------------------------------------------------------------------------------------------------- damaged files


def damage_bytes(raw: bytes, seed: int) -> bytes:
    """Some bytes changed, or the end cut off."""
    draw = np.random.default_rng(seed)
    if seed % 7 == 0:
        return raw[: int(draw.integers(0, len(raw)))]
    changed = np.frombuffer(raw, dtype=np.uint8).copy()
    places = draw.integers(0, len(raw), int(draw.integers(1, 9)))
    changed[places] ^= draw.integers(1, 256, len(places)).astype(np.uint8)
    return changed.tobytes()


def read_error(file: Path) -> str:
    """What is said against a file; nothing if it can be read. Any other error than a ValueError comes through."""
    try:
        prepare_table(Table(str(file), **NAMES).load(0), Preparation(), 0)
    except ValueError as error:
        return str(error)
    return ""


@every_kind
@pytest.mark.parametrize("limit", [0, 1 << 40], ids=["mapped", "in memory"])
def test_a_damaged_file_is_refused_in_one_line_or_read(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, write: Writer, limit: int
) -> None:
    monkeypatch.setattr(disk_tables, "LARGE", limit)
    write(tmp_path / name, make_frame())
    raw = (tmp_path / name).read_bytes()
    said = []
    for seed in range(DAMAGED):
        file = tmp_path / f"{seed}{name}"
        file.write_bytes(damage_bytes(raw, seed))
        said.append(read_error(file))
    assert any(said)
    assert not any("\n" in message for message in said)


DAMAGED = int(os.environ.get("FEDAUC_DAMAGED", "25"))
"""How many damaged files of each kind are tried."""
