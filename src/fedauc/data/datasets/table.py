"""Your own table: a file or a frame with numbers, categories, dates and missing values, a label and a client column."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from fedauc.data.columns import as_pandas_frame, is_table
from fedauc.data.dataset import ClientColumns, Dataset, Rows, TableParts
from fedauc.data.feature_fitting import FeatureSettings
from fedauc.data.io.disk_tables import is_large
from fedauc.data.io.readers import (
    Columns,
    check_suffix,
    is_npz,
    merge_roster_blocks,
    read_client_columns,
    read_table,
)
from fedauc.data.large_tables import load_large_table
from fedauc.data.raw_tables import TableLayout
from fedauc.data.splits import hold_out_validation, split_table
from fedauc.data.standardization import standardize_table
from fedauc.data.table_loading import load_table
from fedauc.fields import check_fields, describe, option


@dataclass(frozen=True)
class Table(Dataset):
    """Rows of a file or a frame, split at random unless `test` names a second file.

    The first argument is the path of a text, Parquet, Arrow or .npz file, or a frame of pandas or polars, a table of
    pyarrow, or a mapping of arrays. `label`, `client` and `group` name columns, and `features` defaults to every other
    one. Numbers are standardised, categories and dates encoded, by summaries that sites make of their training rows
    (`fedauc.data.summaries`); `TableParts.encoder` does the same to new rows. In an .npz file the names are those of
    arrays, and the inputs are the array `x`. A Parquet or Arrow file may be larger than memory:
    `fedauc.data.io.disk_tables` says where its copy is.
    """

    name: ClassVar[str] = "table"
    about: ClassVar[str] = "your own CSV, JSON lines, Parquet, Arrow or NumPy file; cite its source"
    path_fields: ClassVar[tuple[str, ...]] = ("path", "test")

    path: str | Any = field(metadata=describe("The file to read."))
    label: str = option("y", "Column with the labels: 0 and 1, true and false, or any two values with positive.")
    positive: str = option("", "The label value that counts as positive; every other value is negative.")
    client: str = option("client", "Column with the client of each row; empty if there is none.")
    group: str = option("", "Column with the group of each row's client.")
    roster_columns: tuple[str, ...] = option(
        (), "Columns that schedules may use, such as a time zone: one value for all rows of a client."
    )
    features: tuple[str, ...] = option((), "Columns to use as inputs; every other column by default.")
    ignore: tuple[str, ...] = option((), "Columns to leave out, such as one that was filled in after the outcome.")
    categories: tuple[str, ...] = option((), "Columns of numbers that are categories, such as codes of regions.")
    numbers: Literal["standardize", "quantiles"] = option(
        "standardize", "What a number becomes: its standardised value, or that and its place between quantiles."
    )
    quantile_bins: int = option(16, "Bins of a number column with numbers quantiles.", at_least=2, at_most=256)
    min_category_rows: int = option(10, "Training rows that a category needs to have its own input.", at_least=1)
    max_categories: int = option(50, "Categories of a column with inputs of their own, the most frequent.", at_least=1)
    incomplete_rows: Literal["refuse", "drop"] = option(
        "refuse", "What to do with rows that lack a label, a client or a group."
    )
    test: str | Any = option("", "A second file with the test rows.")
    test_fraction: float = option(0.3, "Fraction of each class held out for testing.", above=0, below=1)
    validation_fraction: float = option(
        0.0, "Fraction of the remaining rows held out for validation.", at_least=0, below=1
    )
    standardize: bool = option(True, "Standardise numbers on the training rows; otherwise they stay as they are.")

    def __post_init__(self) -> None:
        for name in self.path_fields:
            value = getattr(self, name)
            if isinstance(value, Path):
                object.__setattr__(self, name, str(value))
            elif not isinstance(value, str) and not is_table(value):
                raise ValueError(f"{name} is a {type(value).__name__}; give the path of a file, or a frame")
        for source in (self.path, self.test):
            if isinstance(source, str) and source:
                check_suffix(source)
        if isinstance(self.path, str) and not self.path:
            raise ValueError("path is empty; give the path of a file, or a frame")
        if not self.label:
            raise ValueError("label is empty; name the column that holds 0 and 1")
        if self.roster_columns and not self.client:
            raise ValueError(f"roster_columns is {self.roster_columns}, but client is empty; name the client column")
        if self.numbers == "quantiles" and not self.standardize:
            raise ValueError("numbers is 'quantiles', but standardize is false; quantiles are of standardised values")
        check_fields(self)

    def load(self, seed: int) -> TableParts:
        """Read, split by label, encode as fitted on the training part; inputs are float32."""
        sources = [self.path, self.test] if self._has_test else [self.path]
        if any(isinstance(source, str) and is_npz(Path(source)) for source in sources):
            parts = self._load_arrays(seed)
        elif any(isinstance(source, str) and is_large(source) for source in sources):
            if not all(isinstance(source, str) for source in sources):
                raise ValueError("one of path and test is a frame and the other a large file; give both as files")
            key = repr((self.test_fraction, self.validation_fraction, seed))
            parts = load_large_table(sources, self.layout, lambda rows: self._split_rows(rows, seed), key)
        else:
            parts = load_table(sources, self.layout, lambda rows: self._split_rows(rows, seed))
        client_columns = self._read_client_columns() if self.roster_columns else {}
        name = Path(self.path).name if isinstance(self.path, str) else f"a {type(self.path).__name__}"
        note = f"{len(parts.train.labels)} rows of {name} to train on"
        return parts._replace(note=note, client_columns=client_columns)

    @property
    def layout(self) -> TableLayout:
        """What the columns are for, and how they are encoded."""
        roles = Columns(self.label, self.client, self.group, self.features, self.roster_columns, self.ignore)
        bins = self.quantile_bins if self.numbers == "quantiles" else 0
        limits = (self.min_category_rows, self.max_categories)
        settings = FeatureSettings(self.standardize, bins, *limits, kept=self.features)
        return TableLayout(roles, settings, self.categories, self.positive, self.incomplete_rows == "drop")

    def _split_rows(self, rows: Rows, seed: int) -> dict[str, Rows]:
        """The parts of the first file by name."""
        if self._has_test:
            (train, validation), test = hold_out_validation(rows, self.validation_fraction, seed), None
        else:
            train, validation, test, *_ = split_table(rows, self.test_fraction, self.validation_fraction, seed)
        parts = {"train": train, "validation": validation, "test": test}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def _has_test(self) -> bool:
        return not (isinstance(self.test, str) and not self.test)

    def _load_arrays(self, seed: int) -> TableParts:
        """The parts of an .npz file: an array of numbers, or of anything else that stays as it is."""
        if self.numbers != "standardize" or self.categories or self.ignore:
            raise ValueError(
                "an .npz file has an array of inputs without column names: leave numbers, categories and ignore as "
                "they are, or give a table with named columns"
            )
        rows, columns = read_table(self.path, self.layout.roles)
        parts = self._split_rows(rows, seed)
        if self._has_test:
            parts["test"], _ = read_table(self.test, columns)
            if parts["test"].inputs.shape[1:] != rows.inputs.shape[1:]:
                shapes = f"{tuple(parts['test'].inputs.shape[1:])} and path has {tuple(rows.inputs.shape[1:])}"
                raise ValueError(f"test has inputs of shape {shapes}; give both files the same features")
        table = TableParts(parts["train"], parts.get("validation"), parts["test"], "")
        names = [f"x{number}" for number in range(rows.inputs.shape[1])] if rows.inputs.ndim == 2 else []
        return standardize_table(table, names) if self.standardize else table

    def _read_client_columns(self) -> ClientColumns:
        if isinstance(self.path, str):
            return read_client_columns(self.path, self.layout.roles)
        frame = as_pandas_frame(self.path)
        needed = [self.client, *self.roster_columns]
        return merge_roster_blocks([{name: frame[name].to_numpy() for name in needed}], self.layout.roles)
