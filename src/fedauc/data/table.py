"""Your own table: a CSV, Parquet or NumPy file with a label and a client column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedauc.data import bounds
from fedauc.data.dataset import Dataset, Rows, Table
from fedauc.data.frames import Columns
from fedauc.data.hold_out import hold_out, split
from fedauc.data.readers import check_suffix, read
from fedauc.data.standardize import standardize


@dataclass(frozen=True)
class TableFile(Dataset):
    """Rows of a file, split at random unless `test` names a second file.

    In a CSV or Parquet file `label`, `client` and `group` name columns and `features` defaults to every other numeric
    one; in an .npz file they name arrays, and the inputs are the array `x`. An empty `client` says there is none.
    """

    name: ClassVar[str] = "table"
    about: ClassVar[str] = "your own CSV, Parquet or NumPy file; cite its source"

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
        rows, columns = read(self.path, Columns(self.label, self.client, self.group, self.features))
        table = self._split(rows, columns, seed) if self.test else self._parts(rows, seed)
        if self.standardize:
            table = standardize(table)
        return table._replace(note=f"{len(table.train.labels)} rows of {self.path} to train on")

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
