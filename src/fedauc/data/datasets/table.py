"""Your own table: a CSV, Parquet, Arrow or NumPy file with a label and a client column."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from fedauc.data.dataset import Dataset, Rows, TableParts
from fedauc.data.io import disk_tables
from fedauc.data.io.readers import Columns, check_suffix, read_client_columns, read_table
from fedauc.data.splits import hold_out_validation, split_table
from fedauc.data.standardization import standardize_table
from fedauc.fields import check_fields, describe, option


@dataclass(frozen=True)
class Table(Dataset):
    """Rows of a file, split at random unless `test` names a second file.

    In a CSV, Parquet or Arrow file `label`, `client` and `group` name columns and `features` defaults to every other
    numeric one; in an .npz file they name arrays, and the inputs are the array `x`. An empty `client` says there is
    none. A Parquet or Arrow file may be larger than memory: `fedauc.data.io.disk_tables` says where its copy is.
    """

    name: ClassVar[str] = "table"
    about: ClassVar[str] = "your own CSV, Parquet, Arrow or NumPy file; cite its source"

    path: str = field(metadata=describe("The file to read."))
    label: str = option("y", "Column with the labels 0 and 1.")
    client: str = option("client", "Column with the client of each row; empty if there is none.")
    group: str = option("", "Column with the group of each row's client.")
    roster_columns: tuple[str, ...] = option(
        (), "Columns that schedules may use, such as a time zone: one value for all rows of a client."
    )
    features: tuple[str, ...] = option((), "Columns to use as inputs; every other numeric column by default.")
    test: str = option("", "A second file with the test rows.")
    test_fraction: float = option(0.3, "Fraction of each class held out for testing.", above=0, below=1)
    validation_fraction: float = option(
        0.0, "Fraction of the remaining rows held out for validation.", at_least=0, below=1
    )
    standardize: bool = option(True, "Standardise every column on the training rows.")

    def __post_init__(self) -> None:
        check_suffix(self.path)
        if self.test:
            check_suffix(self.test)
        if not self.label:
            raise ValueError("label is empty; name the column that holds 0 and 1")
        if self.roster_columns and not self.client:
            raise ValueError(f"roster_columns is {self.roster_columns}, but client is empty; name the client column")
        check_fields(self)

    def load(self, seed: int) -> TableParts:
        """Read, split by label, standardise on the training part; inputs are float32."""
        paths = (self.path, self.test) if self.test else (self.path,)
        if any(disk_tables.is_large(path) for path in paths):
            table = self._load_from_disk(paths, seed)
        else:
            table = self._load_into_memory(seed)
        client_columns = read_client_columns(self.path, self._columns) if self.roster_columns else {}
        note = f"{len(table.train.labels)} rows of {self.path} to train on"
        return table._replace(note=note, client_columns=client_columns)

    @property
    def _columns(self) -> Columns:
        return Columns(self.label, self.client, self.group, self.features, self.roster_columns)

    def _load_into_memory(self, seed: int) -> TableParts:
        rows, columns = read_table(self.path, self._columns)
        parts = self._split_rows(rows, seed)
        if self.test:
            parts["test"], _ = read_table(self.test, columns)
            if parts["test"].inputs.shape[1:] != rows.inputs.shape[1:]:
                shapes = f"{tuple(parts['test'].inputs.shape[1:])} and path has {tuple(rows.inputs.shape[1:])}"
                raise ValueError(f"test has inputs of shape {shapes}; give both files the same features")
        table = TableParts(parts["train"], parts.get("validation"), parts["test"], "")
        return standardize_table(table) if self.standardize else table

    def _load_from_disk(self, paths: tuple[str, ...], seed: int) -> TableParts:
        """The same parts from memory-mapped files, which the first call writes."""
        key = repr((self._columns, self.test_fraction, self.validation_fraction, self.standardize, seed))
        parsed = disk_tables.load_disk_table(paths, key, lambda into: self._write_to_disk(into, seed))
        validation = disk_tables.read_part(parsed, "validation") if self.validation_fraction else None
        return TableParts(disk_tables.read_part(parsed, "train"), validation, disk_tables.read_part(parsed, "test"), "")

    def _write_to_disk(self, into: Path, seed: int) -> None:
        columns = disk_tables.write_parts(into, self.path, self._columns, lambda rows: self._split_rows(rows, seed))
        if self.test:
            disk_tables.write_parts(into, self.test, columns, lambda rows: {"test": rows})
        if self.standardize:
            validation = ["validation"] if self.validation_fraction else []
            disk_tables.standardize_parts(into, ["train", *validation, "test"])

    def _split_rows(self, rows: Rows, seed: int) -> disk_tables.Parts:
        """The parts of the first file by name."""
        if self.test:
            (train, validation), test = hold_out_validation(rows, self.validation_fraction, seed), None
        else:
            train, validation, test, *_ = split_table(rows, self.test_fraction, self.validation_fraction, seed)
        parts = {"train": train, "validation": validation, "test": test}
        return {name: part for name, part in parts.items() if part is not None}
