"""Files of new rows, read a block at a time, and files of their scores, written a block at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from fedauc.data.columns import list_column_names, to_text
from fedauc.data.features import CategoryColumn
from fedauc.data.io.readers import COLUMNAR_SUFFIXES, check_exists, is_columnar, iterate_frames, requiring_frames
from fedauc.data.io.text_files import CSV_SUFFIXES, JSON_SUFFIXES, format_suffix, iterate_text_frames
from fedauc.discovery import lookup
from fedauc.files import open_atomically
from fedauc.scoring.scorer import Scorer

BLOCK = 1 << 16
"""How many rows of a text file are read at once."""


def iterate_tables(path: Path, scorer: Scorer, others: Sequence[str] = ()) -> Iterator[Any]:
    """The rows of a file in blocks that the scorer takes; `others` are columns that are read as text besides.

    Categories of a text file are read as text, so that a block in which all of them look like numbers is read like any
    other. A model without an encoder takes arrays from an .npz or .npy file.
    """
    check_exists(path)
    if not scorer.feature_names:
        yield _read_array(path)
        return
    suffix = format_suffix(path)
    columns = () if scorer.encoder is None else scorer.encoder.columns
    categories = [column for column in columns if isinstance(column, CategoryColumn)]
    with requiring_frames():
        if is_columnar(path):
            blocks = iterate_frames(path)
        elif suffix in (*CSV_SUFFIXES, *JSON_SUFFIXES):
            identifiers = [name for name in others if name not in scorer.feature_names]
            blocks = iterate_text_frames(path, [*(column.name for column in categories), *identifiers], BLOCK)
        else:
            known = ", ".join((*CSV_SUFFIXES, *JSON_SUFFIXES, *COLUMNAR_SUFFIXES))
            raise ValueError(f"its name must end in {known}: convert the file")
        for block in blocks:
            names = list_column_names(block)
            for name in others:
                lookup("column", name, dict.fromkeys(names))
            if suffix in CSV_SUFFIXES:
                texts = {column.name: column for column in categories if column.name in names}
                block = block.assign(**{name: _match_texts(block[name], column) for name, column in texts.items()})
            yield block


def _match_texts(values: Any, column: CategoryColumn) -> np.ndarray:
    """Texts as the encoder knows them: `3.0` for 3 and `True` for true, unless the encoder knows that very text."""
    known = set(column.values)
    matched: dict[Any, Any] = {}
    for text in values.dropna().unique().tolist():
        stripped = text.strip()
        candidates = [stripped, stripped.lower()] if stripped.lower() in ("true", "false") else [stripped]
        with suppress(ValueError):
            candidates.append(to_text(float(stripped)) or "")
        matched[text] = next((candidate for candidate in candidates if candidate in known), stripped)
    return np.array([matched.get(text) for text in values.tolist()], dtype=object)


def _read_array(path: Path) -> np.ndarray:
    if path.suffix.lower() not in (".npz", ".npy"):
        raise ValueError("the model takes arrays, not columns; give an .npz file with the array x, or an .npy file")
    stored: Any = np.load(path, allow_pickle=False)
    if path.suffix.lower() == ".npy":
        return np.asarray(stored)
    with stored:
        return np.asarray(stored[lookup("array", "x", {name: name for name in stored.files})])


# -------------------------------------------------------------------------------------------------------------- writing


class ScoreWriter:
    """Writes blocks of columns as CSV, JSON lines or Parquet."""

    def __init__(self, file: BinaryIO, suffix: str) -> None:
        self._file, self._suffix = file, suffix
        self._parquet: Any = None
        self._is_first = True

    def write_block(self, columns: Mapping[str, np.ndarray]) -> None:
        """Add rows; all blocks have the same columns."""
        if self._suffix == ".parquet":
            self._write_parquet(columns)
        elif self._suffix in JSON_SUFFIXES:
            rows = zip(*(values.tolist() for values in columns.values()), strict=True)
            records = (json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) for row in rows)
            self._file.write("".join(f"{record}\n" for record in records).encode())
        else:
            rows = zip(*(values.tolist() for values in columns.values()), strict=True)
            lines = [",".join(map(_quote_cell, row)) for row in ([tuple(columns)] if self._is_first else [])]
            lines += [",".join(map(_quote_cell, row)) for row in rows]
            self._file.write("".join(f"{line}\n" for line in lines).encode())
        self._is_first = False

    def close(self) -> None:
        """Finish the file."""
        if self._parquet is not None:
            self._parquet.close()

    def _write_parquet(self, columns: Mapping[str, np.ndarray]) -> None:
        with requiring_frames():
            import pyarrow as pa
            import pyarrow.parquet as pq
        table = pa.table({name: pa.array(values.tolist()) for name, values in columns.items()})
        if self._parquet is None:
            self._parquet = pq.ParquetWriter(self._file, table.schema)
        self._parquet.write_table(table.cast(self._parquet.schema))


@contextmanager
def write_scores(path: Path | None, standard_output: IO[str]) -> Iterator[ScoreWriter]:
    """A writer into a file that appears when it is complete, or of CSV to the standard output."""
    if path is None:
        yield ScoreWriter(standard_output.buffer, ".csv")  # type: ignore[attr-defined]
        standard_output.flush()
        return
    with open_atomically(path) as file:
        writer = ScoreWriter(file, path.suffix.lower())
        yield writer
        writer.close()


OUTPUT_SUFFIXES = (".csv", ".parquet", *JSON_SUFFIXES)


def check_output(path: Path) -> None:
    """Refuse a name whose format is not known, and a folder that does not exist, before anything is computed."""
    if path.suffix.lower() not in OUTPUT_SUFFIXES:
        raise ValueError(f"out is {str(path)!r}; it must end in {', '.join(OUTPUT_SUFFIXES)}: choose another name")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"out is {str(path)!r}, but there is no folder {str(path.parent)!r}; make it first")


def _quote_cell(value: Any) -> str:
    text = "" if value is None else repr(value) if isinstance(value, float) else str(value)
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"\r\n') else text
