"""The same as `table_loading.py` for files larger than memory: block by block, with the arrays on disk.

A first pass reads labels, clients and groups and finds the kind and the texts of every column. A second one writes the
raw columns of each part, from which the encoder is fitted and the inputs are encoded; then the raw columns are deleted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedauc.data import standardization
from fedauc.data.checks import counting_rows_from
from fedauc.data.column_warnings import refuse_stray_texts, warn_of_texts
from fedauc.data.columns import CodedTexts, are_dates, as_days, as_numbers, code_texts, read_columns
from fedauc.data.dataset import Rows, TableParts, TableSummary
from fedauc.data.feature_fitting import FittedFeatures, Kind, RawColumn, RawEncoder, fit_features
from fedauc.data.features import FeatureEncoder
from fedauc.data.io import disk_tables, readers
from fedauc.data.io.memory import index_type, row_blocks
from fedauc.data.labels import Labels, check_label_classes, read_labels
from fedauc.data.raw_tables import (
    ROW_NUMBER_REASON,
    TableLayout,
    choose_features,
    find_complete_rows,
    infer_kind,
    is_row_number,
    read_roles,
)
from fedauc.data.summaries import SummaryTraffic
from fedauc.data.table_loading import Split, check_features, make_parts, naming_table, number_sites

MAX_TEXTS = 1 << 20
"""A column with more distinct texts is an identifier if most of its rows differ; its texts are then forgotten."""

IDENTIFIER_REASON = "nearly every value is different, like a name or an identifier"


def load_large_table(sources: Sequence[Any], layout: TableLayout, split: Split, key: str) -> TableParts:
    """The parts as memory-mapped files, which the first call writes."""
    parsed = disk_tables.load_disk_table(
        list(map(str, sources)), repr(layout) + key, lambda into: _write_table(into, sources, layout, split)
    )
    names = ("train", "validation", "test")
    parts = {name: disk_tables.read_part(parsed, name) for name in names if f"{name}-inputs" in parsed.arrays}
    document = json.loads(bytes(parsed.arrays["document"]))
    traffic = SummaryTraffic(*document["traffic"])
    fitted = FittedFeatures(FeatureEncoder.from_document(document["encoder"]), {}, traffic)
    labels = Labels(parts["train"].labels, tuple(document["label_values"]))
    # A copy that an older version wrote does not say how many rows were dropped.
    dropped_rows = document.get("dropped_rows", 0)
    summary = TableSummary(document["ignored"], tuple(document["warnings"]), dropped_rows=dropped_rows)
    return make_parts(parts, fitted, labels, summary)


def _write_table(into: Path, sources: Sequence[str], layout: TableLayout, split: Split) -> None:
    first = sources[0]
    with naming_table(first), readers.requiring_frames():
        roles, columns = _RoleScan(layout), _ColumnScan(layout)
        for start, frame in _iterate_blocks(first, layout):
            columns.add_block(frame, start)
            roles.add_block(frame, start)
        rows, labels = roles.read_rows(layout.positive)
        check_label_classes(labels, layout.roles.label)
    parts = split(rows)
    for name, part in parts.items():
        roles.write_roles(into, name, part)
    with naming_table(first), readers.requiring_frames():
        raw = _write_raw_columns(into, _iterate_blocks(first, layout), columns, parts)
        refuse_stray_texts(raw["train"].values(), layout.categories, np.asarray(parts["train"].inputs))
    fitted = fit_features(list(raw["train"].values()), layout.settings, *roles.number_sites(parts["train"]))
    check_features(fitted, columns.ignored)
    for name, part in parts.items():
        encoder = RawEncoder(fitted.encoder, raw[name])
        shape = (len(part.labels), len(fitted.encoder.feature_names))
        with disk_tables.write_inputs(into, name, shape) as append_rows:
            for block in row_blocks(shape, standardization.BLOCK):
                append_rows(encoder.encode_rows(block))
    raw.clear()
    for file in into.glob("raw-*"):
        file.unlink()
    dropped_rows = roles.dropped_rows
    for second in sources[1:]:
        with naming_table(second), readers.requiring_frames():
            dropped_rows += _write_test_part(into, second, layout, fitted.encoder, labels.values)
    document = {
        "encoder": fitted.encoder.to_document(),
        "label_values": labels.values,
        "ignored": {**columns.ignored, **fitted.ignored},
        "warnings": [*columns.warnings, *([labels.note] if labels.note else [])],
        "traffic": fitted.traffic,
        "dropped_rows": dropped_rows,
    }
    np.save(into / "document.npy", np.frombuffer(json.dumps(document).encode(), dtype=np.uint8))


def _write_test_part(
    into: Path, source: str, layout: TableLayout, encoder: FeatureEncoder, label_values: tuple[str, str]
) -> int:
    """Write the rows of a second file, encoded as those of the first one were; returns how many were dropped."""
    roles = _RoleScan(layout)
    for start, frame in _iterate_blocks(source, layout):
        if start == 0:
            # What does not fit in names or types is said before the whole file is read.
            readers.check_frame(frame)
            encoder.split_columns(frame)
        roles.add_block(frame, start)
    rows, _ = roles.read_rows(label_values[1] if layout.positive else "")
    roles.write_roles(into, "test", rows)
    shape = (len(rows.labels), len(encoder.feature_names))
    with disk_tables.write_inputs(into, "test", shape) as append_rows:
        for start, frame in _iterate_blocks(source, layout):
            with counting_rows_from(start):
                append_rows(encoder.encode(frame)[roles.find_complete(start, len(frame))])
    return roles.dropped_rows


def _write_raw_columns(
    into: Path, blocks: Iterator[tuple[int, Any]], columns: _ColumnScan, parts: Mapping[str, Rows]
) -> dict[str, dict[str, RawColumn]]:
    """The raw columns of each part, memory-mapped."""
    kinds = columns.kinds
    dtypes = {name: np.dtype(np.int32 if kind == "category" else np.float64) for name, kind in kinds.items()}
    paths = {part: {name: into / f"raw-{part}-{index}.npy" for index, name in enumerate(kinds)} for part in parts}
    part_of_row = np.full(1 + max(int(np.asarray(rows.inputs)[-1]) for rows in parts.values()), -1, dtype=np.int8)
    for number, (part, rows) in enumerate(parts.items()):
        part_of_row[np.asarray(rows.inputs)] = number
        for name, path in paths[part].items():
            with disk_tables.write_array(path, dtypes[name], rows.labels.shape):
                pass
    for start, frame in blocks:
        numbers = part_of_row[start : start + len(frame)]
        selected = [np.flatnonzero(numbers == number) for number in range(len(parts))]
        for name, values in read_columns(frame, list(kinds)).items():
            with counting_rows_from(start):
                converted = columns.convert_values(values, name, kinds[name])
            for rows_of_part, part in zip(selected, parts, strict=True):
                # Opened for each block, because a table may have more columns than a process may have open files.
                with paths[part][name].open("ab") as stream:
                    stream.write(np.ascontiguousarray(converted[rows_of_part], dtype=dtypes[name]).data)
    return {
        part: {
            name: RawColumn(name, kinds[name], np.load(path, mmap_mode="r"), columns.list_texts(name))
            for name, path in paths[part].items()
        }
        for part in parts
    }


class _RoleScan:
    """The label, client and group of every complete row, as codes."""

    def __init__(self, layout: TableLayout) -> None:
        self._layout = layout
        columns = zip(("client", "group"), layout.roles[1:3], strict=True)
        self._names = {role: (column, disk_tables.NameCodes(role)) for role, column in columns if column}
        self._label, self._label_codes = _TextCodes(), list[np.ndarray]()
        self._blocks: list[np.ndarray] = []
        self._numbers = np.zeros(0, dtype=np.int64)
        self.dropped_rows = 0

    def add_block(self, frame: Any, start: int) -> None:
        """The next rows of the file."""
        roles = self._layout.roles
        with counting_rows_from(start):
            arrays = read_roles(frame, roles)
            complete = find_complete_rows(arrays, self._layout)
            self._label_codes.append(self._label.add_texts(arrays[roles.label][complete]))
            for column, codes in self._names.values():
                codes.add_names(arrays[column][complete])
            self._blocks.append(complete.astype(np.int64) + start)
            self.dropped_rows += len(frame) - len(complete)

    def read_rows(self, positive: str) -> tuple[Rows, Labels]:
        """All complete rows, with their numbers as inputs and codes for names; and the labels."""
        self._numbers = np.concatenate(self._blocks)
        if not len(self._numbers):
            raise ValueError("the table has no rows; give at least one positive and one negative")
        coded = CodedTexts(np.concatenate(self._label_codes), list(self._label.code_of))
        labels = read_labels(coded, positive, self._layout.roles.label)
        self._label_codes, self._blocks = [], []
        numbers = self._numbers.astype(index_type(int(self._numbers[-1]) + 1))
        names = {role: codes.all_codes() for role, (_, codes) in self._names.items()}
        return Rows(numbers, labels.labels, names.get("client"), names.get("group"), numbers), labels

    def number_sites(self, rows: Rows) -> tuple[np.ndarray | None, int]:
        """The site of each row in the sorted order of their names, and the number of sites."""
        if rows.client is None:
            return number_sites(None)
        names = np.array(list(self._names["client"][1].code_of))
        rank = np.empty(len(names), dtype=np.int64)
        rank[np.argsort(names)] = np.arange(len(names))
        return number_sites(rank[rows.client])

    def find_complete(self, start: int, length: int) -> np.ndarray:
        """The complete rows of a block, counted from its first row."""
        first, last = np.searchsorted(self._numbers, [start, start + length])
        return np.asarray(self._numbers[first:last] - start)

    def write_roles(self, into: Path, part: str, rows: Rows) -> None:
        """Write labels, names and row numbers of a part."""
        np.save(into / f"{part}-labels.npy", rows.labels)
        np.save(into / f"{part}-numbers.npy", np.asarray(rows.numbers))
        for role, (_, codes) in self._names.items():
            disk_tables.write_names(into / f"{part}-{role}.npy", codes, getattr(rows, role))


class _ColumnScan:
    """The kind and the texts of every feature, from all blocks."""

    def __init__(self, layout: TableLayout) -> None:
        self._layout, self._rows = layout, 0
        self._kinds: dict[str, set[str]] = {}
        self._codes: dict[str, _TextCodes] = {}
        self._last_number: dict[str, int | None] = {}
        self._warnings: tuple[str, ...] = ()

    def add_block(self, frame: Any, start: int) -> None:
        """The next rows of the file."""
        roles = self._layout.roles
        if not self._kinds:
            readers.check_frame(frame)
            chosen, self._warnings = choose_features(list(frame.columns), roles)
            self._kinds = {name: set() for name in chosen}
        self._rows += len(frame)
        with counting_rows_from(start):
            for name, values in read_columns(frame, list(self._kinds)).items():
                kind = "text" if name in self._layout.categories else infer_kind(values)
                self._kinds[name].add(kind)
                if kind == "text":
                    self._codes.setdefault(name, _TextCodes()).add_texts(values)
                self._follow_row_number(name, values)

    def _follow_row_number(self, name: str, values: np.ndarray) -> None:
        """Remember the last number of a column that has counted all rows so far, and None for any other column."""
        last = self._last_number.get(name, values[0] - 1 if values.dtype.kind in "iu" else None)
        counts_on = last is not None and is_row_number(name, np.concatenate([[last], values]))
        self._last_number[name] = int(values[-1]) if counts_on else None

    @property
    def ignored(self) -> dict[str, str]:
        """The columns that are no features, with the reasons."""
        reasons = {}
        for name in self._kinds:
            if name not in self._layout.roles.features:
                if self._last_number.get(name) is not None:
                    reasons[name] = ROW_NUMBER_REASON
                elif name in self._codes and self._codes[name].is_forgotten:
                    reasons[name] = IDENTIFIER_REASON
        return reasons

    @property
    def warnings(self) -> tuple[str, ...]:
        """What needs attention."""
        kinds = self.kinds
        texts = [RawColumn(name, kind, np.zeros(0), self.list_texts(name)) for name, kind in kinds.items()]
        return self._warnings + warn_of_texts(texts, self._layout.categories)

    @property
    def kinds(self) -> dict[str, Kind]:
        """The kind of every feature: text is a date if all of it is, and a column of several kinds is a category."""
        ignored = self.ignored
        return {name: self._decide_kind(name) for name in self._kinds if name not in ignored}

    def _decide_kind(self, name: str) -> Kind:
        kinds = self._kinds[name] - {"empty"}
        if name in self._layout.categories or "text" in kinds:
            is_date = name not in self._layout.categories and are_dates(self.list_texts(name))
            return "date" if is_date else "category"
        if kinds <= {"number", "boolean"}:
            return "boolean" if kinds == {"boolean"} else "number"
        return "date" if kinds == {"date"} else "category"

    def list_texts(self, name: str) -> list[str]:
        """The distinct texts of a column in the order of their codes."""
        return list(self._codes[name].code_of) if name in self._codes else []

    def convert_values(self, values: np.ndarray, name: str, kind: Kind) -> np.ndarray:
        """Numbers, days, or codes of texts."""
        if kind == "category":
            return self._codes.setdefault(name, _TextCodes()).add_texts(values)
        return as_days(values, name) if kind == "date" else as_numbers(values, name)


class _TextCodes:
    """Codes of texts that come in blocks, by first appearance in `code_of`."""

    def __init__(self) -> None:
        self.code_of: dict[str, int] = {}
        self.is_forgotten = False
        self._rows = 0

    def add_texts(self, values: np.ndarray) -> np.ndarray:
        """The codes of the next rows, -1 where a value is missing."""
        self._rows += len(values)
        if self.is_forgotten:
            return np.full(len(values), -1, dtype=np.int32)
        codes, texts = code_texts(values)
        numbers = [self.code_of.setdefault(text, len(self.code_of)) for text in texts]
        if len(self.code_of) > max(MAX_TEXTS, self._rows // 2):
            self.code_of, self.is_forgotten = {}, True
        return np.asarray(np.array([*numbers, -1], dtype=np.int32)[codes])


def _iterate_blocks(source: str, layout: TableLayout) -> Iterator[tuple[int, Any]]:
    """The rows of a file block by block, each with the number of its first row."""
    file, start = Path(source), 0
    single_frame = [] if readers.is_columnar(file) else [readers.read_file_frame(file, layout.roles)]
    for frame in single_frame or readers.iterate_frames(file):
        yield start, frame
        start += len(frame)
