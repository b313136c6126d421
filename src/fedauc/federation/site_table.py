"""A site's rows as a table with named columns, which is checked against the federation's schema before it is used."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedauc.data.columns import as_pandas_frame
from fedauc.data.feature_fitting import RawEncoder
from fedauc.data.features import FeatureEncoder
from fedauc.data.io.readers import Columns, check_exists, check_frame, is_npz, read_file_frame
from fedauc.federation.column_sums import ColumnSums, sum_columns
from fedauc.federation.schema import CheckedTable, DataSchema, SchemaProblem, check_table, describe_problems
from fedauc.federation.site_data import ARRAY_NAMES, SiteData, split_rows, write_arrays
from fedauc.federation.site_state import SiteRefusal

LOG = logging.getLogger("fedauc.site")

CACHES_KEPT = 3
"""How many preparations of the same rows stay on the disk: those of several runs at a time."""


class SiteTable(NamedTuple):
    """A table in a file or in memory, the folder for its prepared rows, and the share of rows that are held out.

    `label` names the label column where the federation has no schema.
    """

    source: Any
    cache: Path | None = None
    label: str = "y"
    test_fraction: float = 0.3

    @staticmethod
    def from_file(path: Path | str, cache: Path | str, label: str = "y", test_fraction: float = 0.3) -> SiteTable:
        """A CSV, JSON lines, Parquet or Arrow file; prepared rows are written to `cache` and mapped from there."""
        return SiteTable(Path(path), Path(cache), label, test_fraction)

    @staticmethod
    def from_frame(frame: Any, test_fraction: float = 0.3) -> SiteTable:
        """A frame of pandas or polars, a pyarrow table or a mapping of columns, prepared anew for every message."""
        return SiteTable(as_pandas_frame(frame), test_fraction=test_fraction)

    def read_without_schema(self) -> SiteData:
        """All columns of numbers as they are, for a federation without a schema."""
        if not isinstance(self.source, Path) or self.cache is None:
            raise SiteRefusal("the run has no schema, which a table in memory needs: start it with one")
        return SiteData.from_file(self.source, self.cache, self.label, self.test_fraction)

    def find_problems(self, schema: DataSchema) -> tuple[CheckedTable | None, list[SchemaProblem]]:
        """The table in the schema's order, or what is wrong with it."""
        if not isinstance(self.source, Path):
            return check_table(self.source, schema)
        if is_npz(self.source):
            return None, [SchemaProblem("the data is an .npz file, whose columns have no names: give a CSV or Parquet")]
        try:
            check_exists(self.source)
            frame = read_file_frame(self.source, Columns(schema.label, ""))
            check_frame(frame)
        except ValueError as error:
            return None, [SchemaProblem("the table cannot be read", str(error))]
        return check_table(frame, schema)

    def check_schema(self, schema: DataSchema, site: str) -> CheckedTable:
        """The table in the schema's order; a table that differs is refused, with its values in the site's log only."""
        table, problems = self.find_problems(schema)
        if table is not None:
            return table
        for line in describe_problems(problems, is_private=True):
            LOG.error("the table does not fit the schema: %s", line)
        more = f"; and {len(problems) - 1} more, in the site's log" if len(problems) > 1 else ""
        raise SiteRefusal(f"site {site!r}: {problems[0].rule}{more}", "schema")

    def sum_training_rows(
        self, schema: DataSchema, site: str, minimum: int, validation_fraction: float = 0.0
    ) -> ColumnSums:
        """The sums of every column over the rows to train on, where at least `minimum` rows have a value."""
        table = self.check_schema(schema, site)
        train, _ = split_rows(table.labels, self.test_fraction)
        train = train[split_rows(table.labels[train], validation_fraction, "validation")[0]]
        columns = [column._replace(values=column.values[train]) for column in table.columns]
        return sum_columns(columns, schema, minimum)

    def prepare_rows(self, schema: DataSchema, encoder: FeatureEncoder, site: str) -> SiteData:
        """The encoded rows; those of a file come from the cache after the first time."""
        if self.cache is None or not isinstance(self.source, Path):
            return SiteData.from_arrays(*self._encode_table(schema, encoder, site))
        if not self.source.is_file():
            raise SiteRefusal(f"site {site!r}: its table is not where the site's configuration says")
        status = self.source.stat()
        version = [status.st_size, status.st_mtime_ns, self.test_fraction, schema.to_header(), encoder.to_document()]
        digest = hashlib.blake2b(json.dumps(version).encode(), digest_size=8).hexdigest()
        folder = self.cache / f"prepared-{digest}"
        if not folder.is_dir():
            write_arrays(folder, dict(zip(ARRAY_NAMES, self._encode_table(schema, encoder, site), strict=True)))
            _remove_old_caches(self.cache)
        return SiteData.from_folder(folder)

    def _encode_table(self, schema: DataSchema, encoder: FeatureEncoder, site: str) -> tuple[np.ndarray, ...]:
        table = self.check_schema(schema, site)
        inputs = RawEncoder(encoder, {column.name: column for column in table.columns}).encode_rows(slice(None))
        train, test = split_rows(table.labels, self.test_fraction)
        return inputs[train], table.labels[train], inputs[test], table.labels[test]


def _remove_old_caches(folder: Path) -> None:
    caches = sorted(folder.glob("prepared-*"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in caches[CACHES_KEPT:]:
        shutil.rmtree(path, ignore_errors=True)
