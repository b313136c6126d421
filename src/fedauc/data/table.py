"""Your own table: a CSV, Parquet, Arrow or NumPy file with a label and a client column."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedauc.data import bounds, laid_out
from fedauc.data.dataset import Dataset, Rows, Table
from fedauc.data.frames import Columns
from fedauc.data.hold_out import hold_out, split
from fedauc.data.readers import check_suffix, read
from fedauc.data.standardize import standardize


@dataclass(frozen=True)
class TableFile(Dataset):
    """Rows of a file, split at random unless `test` names a second file.

    In a CSV, Parquet or Arrow file `label`, `client` and `group` name columns and `features` defaults to every other
    numeric one; in an .npz file they name arrays, and the inputs are the array `x`. An empty `client` says there is
    none. A Parquet or Arrow file may be larger than memory: `fedauc.data.laid_out` says where its rows are kept.
    """

    name: ClassVar[str] = "table"
    about: ClassVar[str] = "your own CSV, Parquet, Arrow or NumPy file; cite its source"

    path: str
    label: str = "y"
    client: str = "client"
    group: str = ""
    features: tuple[str, ...] = ()
    test: str = ""
    test_fraction: float = 0.3
    validation_fraction: float = 0.0
    standardize: bool = True

    def __post_init__(self) -> None:
        check_suffix(self.path)
        if self.test:
            check_suffix(self.test)
        if not self.label:
            raise ValueError("label is empty; name the column that holds 0 and 1")
        bounds.fraction("test_fraction", self.test_fraction)
        bounds.share("validation_fraction", self.validation_fraction)

    def load(self, seed: int) -> Table:
        """Read, split by label, standardise on the training part; inputs are float32."""
        large = any(laid_out.is_large(path) for path in self._paths)
        table = self._mapped(seed) if large else self._in_memory(seed)
        return table._replace(note=f"{len(table.train.labels)} rows of {self.path} to train on")

    @property
    def _paths(self) -> tuple[str, ...]:
        return (self.path, self.test) if self.test else (self.path,)

    @property
    def _columns(self) -> Columns:
        return Columns(self.label, self.client, self.group, self.features)

    def _in_memory(self, seed: int) -> Table:
        rows, columns = read(self.path, self._columns)
        table = self._split(rows, columns, seed) if self.test else self._parts(rows, seed)
        return standardize(table) if self.standardize else table

    def _mapped(self, seed: int) -> Table:
        """The same parts from files on disk, made on the first call."""
        key = repr((self._columns, self.test_fraction, self.validation_fraction, self.standardize, seed))
        parsed = laid_out.stored(self._paths, key, lambda into: self._lay_out(into, seed))
        train, test = laid_out.part(parsed, "train"), laid_out.part(parsed, "test")
        return Table(train, laid_out.part(parsed, "validation") if self.validation_fraction else None, test, "")

    def _lay_out(self, into: Path, seed: int) -> None:
        columns = laid_out.lay_out(into, self.path, self._columns, lambda marks: self._deal(marks, seed))
        if self.test:
            laid_out.lay_out(into, self.test, columns, lambda marks: {"test": marks})
        if self.standardize:
            laid_out.standardize(into, ["train", *(["validation"] if self.validation_fraction else []), "test"])

    def _deal(self, marks: Rows, seed: int) -> laid_out.Parts:
        if not self.test:
            parts = self._parts(marks, seed)
            held = {} if parts.validation is None else {"validation": parts.validation}
            return {"train": parts.train, **held, "test": parts.test}
        if self.validation_fraction == 0:
            return {"train": marks}
        train, validation = hold_out(marks, self.validation_fraction, seed, "validation")
        return {"train": train, "validation": validation}

    def _parts(self, rows: Rows, seed: int) -> Table:
        return split(rows, self.test_fraction, self.validation_fraction, seed)

    def _split(self, rows: Rows, columns: Columns, seed: int) -> Table:
        test, _ = read(self.test, columns)
        if test.inputs.shape[1:] != rows.inputs.shape[1:]:
            shapes = f"{tuple(test.inputs.shape[1:])} and path has {tuple(rows.inputs.shape[1:])}"
            raise ValueError(f"test has inputs of shape {shapes}; give both files the same features")
        if self.validation_fraction == 0:
            return Table(rows, None, test, "")
        train, validation = hold_out(rows, self.validation_fraction, seed, "validation")
        return Table(train, validation, test, "")
