"""Medicare providers by state, labelled by the list of excluded providers: the paper's Insurance data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from fedauc.data import bounds
from fedauc.data.cache import Parsed
from fedauc.data.dataset import Rows, Table
from fedauc.data.medicare_files import (
    FRAUD,
    LIST,
    NOBODY,
    TABLE,
    Year,
    check_columns,
    excluded,
    provider_years,
)
from fedauc.data.sources import Absent, File, Source, Stored, save
from fedauc.data.standardize import standardize
from fedauc.data.states import STATES
from fedauc.discovery import lookup

TRAIN, VALIDATION, TEST = (2017, 2018, 2019, 2020), 2021, 2022
"""The chronological split."""

YEARS = (*TRAIN, VALIDATION, TEST)

FORMAT = 1
"""To be raised whenever the same files give other arrays, so that those parsed before are not taken."""

ROWS_PER_ENTRY = 20
"""The list must have an entry for that many of `least_rows`: 45,000 by default."""

PAGE = (
    "https://data.cms.gov/provider-summary-by-type-of-service/medicare-physician-other-practitioners/"
    "medicare-physician-other-practitioners-by-provider"
)
LEIE = Source(
    "UPDATED.csv",
    "https://oig.hhs.gov/exclusions/downloadables/UPDATED.csv",
    "",
    "https://oig.hhs.gov/exclusions/exclusions_list.asp",
)
FOLDERS = {
    2017: "b7e195ce-710d-4584-8293-787ffc38b017",
    2018: "57ea60f2-ef4b-46f2-8778-c7a50fab1737",
    2019: "ac110c46-3429-4f3c-9348-56f0a5312cb8",
    2020: "056e8c6b-7e39-4945-b9a4-52d0a1cbbb9a",
    2021: "fc6ea9aa-12f0-4c2f-9909-6c8e06c961cf",
    2022: "adcd20c5-4534-43cd-8dfa-881ebe7bacfd",
}
"""Where data.cms.gov keeps the release of November 2025 of each year."""


def _source(year: int) -> Source:
    name = f"MUP_PHY_R25_P07_V20_D{year % 100}_Prov.csv"
    return Source(name, f"https://data.cms.gov/sites/default/files/2025-11/{FOLDERS[year]}/{name}", "", PAGE)


@dataclass(frozen=True)
class Medicare(Stored):
    """One row per provider and year, one client per state, positive where the provider was excluded for fraud later.

    Neither source publishes a checksum: a year with fewer than `least_rows` rows is taken for a damaged file. What
    identifies a provider is read while the arrays are built and is in none of them.
    """

    name: ClassVar[str] = "medicare"
    about: ClassVar[str] = (
        "Medicare Part B by provider 2017-2022 with exclusions for fraud; CMS, Medicare Physician & Other "
        "Practitioners, and OIG, List of Excluded Individuals/Entities, both public domain"
    )
    sources: ClassVar[tuple[Source, ...]] = (*map(_source, YEARS), LEIE)

    exclusions: Literal["fraud", "all"] = "fraud"
    least_rows: int = 900_000

    def __post_init__(self) -> None:
        lookup("exclusions", self.exclusions, {"fraud": True, "all": True})
        bounds.whole("least_rows", self.least_rows)

    def files(self) -> tuple[File, ...]:
        """One CSV per year, of any release, and the list."""
        there = list(self.there())
        for year, source in zip(YEARS, self.sources, strict=False):
            names = [file.path.name for each, file in there if each is source]
            if len(names) > 1:
                raise ValueError(f"{self.home} has {len(names)} releases of {year} ({', '.join(names)}): keep one")
        absent = tuple(source for source in self.sources if source not in (each for each, _ in there))
        if absent:
            raise Absent(self.name, self.home, absent)
        return tuple(file for _, file in there)

    def there(self) -> Iterator[tuple[Source, File]]:
        """Every release of every year, and the list."""
        for source, year in zip(self.sources, (*YEARS, None), strict=True):
            for path in _releases(self.home, year) if year else [self.home / LEIE.name]:
                if path.is_file():
                    yield source, File(path, "")

    def key(self) -> str:
        """How the files are read, and which exclusions count."""
        return f"{FORMAT} {self.exclusions} {sorted(FRAUD)}"

    def looks_right(self, source: Source, path: Path) -> None:
        """Refuse what has not the columns."""
        super().looks_right(source, path)
        check_columns(path, LIST if source.name == LEIE.name else TABLE)

    def examine(self, source: Source, path: Path) -> None:
        """Refuse what cannot be read to its end, or is too short."""
        super().examine(source, path)
        if source.name == LEIE.name:
            self._check_list(path, excluded(path, None).entries)
        else:
            year = YEARS[self.sources.index(source)]
            self._check_year(path, len(provider_years(path, year, NOBODY).labels))

    def parse(self, files: tuple[File, ...], into: Path) -> dict[str, int]:
        """Standardised features, labels and states of all years in order; the rows of each year and of each part."""
        *tables, listed = (file.path for file in files)
        exclusions = excluded(listed, FRAUD if self.exclusions == "fraud" else None)
        found = [provider_years(path, year, exclusions) for path, year in zip(tables, YEARS, strict=True)]
        counts = {str(year): len(rows.labels) for year, rows in zip(YEARS, found, strict=True)}
        counts["listed"] = exclusions.entries
        self._check(files, counts)
        return write_years(found, into) | counts

    def parsed(self) -> Parsed:
        """The arrays, parsed on first use; those parsed under a lower `least_rows` are held to this one."""
        found = super().parsed()
        self._check(self.files(), found.counts)
        return found

    def _check(self, files: tuple[File, ...], counts: dict[str, int]) -> None:
        *tables, listed = (file.path for file in files)
        for path, year in zip(tables, YEARS, strict=True):
            self._check_year(path, counts[str(year)])
        self._check_list(listed, counts["listed"])

    def _check_year(self, path: Path, rows: int) -> None:
        if rows < self.least_rows:
            raise ValueError(
                f"{path} has {rows} rows of the 50 states; it must have at least least_rows, "
                f"{self.least_rows}: fetch it again, or lower least_rows for a sample"
            )

    def _check_list(self, path: Path, entries: int) -> None:
        least = self.least_rows // ROWS_PER_ENTRY
        if entries < least:
            raise ValueError(
                f"{path} has {entries} entries; it must have at least least_rows / {ROWS_PER_ENTRY}, "
                f"{least}: fetch it again, or lower least_rows for a sample"
            )

    def load(self, seed: int) -> Table:
        """2017 to 2020 to train on, 2021 for validation, 2022 for testing, whatever the seed."""
        arrays, counts = self.parsed()
        return read_years(arrays, counts, "Medicare Part B by provider and LEIE")


def write_years(found: list[Year], into: Path) -> dict[str, int]:
    """Standardise years on the training ones and write them, training first, then validation, then test."""
    *train, validation, test = (Rows(year.inputs, year.labels, year.states) for year in found)
    joined = Rows(*(np.concatenate(parts) for parts in zip(*(rows[:3] for rows in train), strict=True)))
    table = standardize(Table(joined, validation, test, ""))
    assert table.validation is not None
    parts = (table.train, table.validation, table.test)
    _write(into / "inputs.npy", [np.asarray(part.inputs) for part in parts])
    save(into, "labels", np.concatenate([part.labels for part in parts]))
    save(into, "states", np.concatenate([np.asarray(part.client) for part in parts]))
    return {name: len(part.labels) for name, part in zip(("train", "validation", "test"), parts, strict=True)}


def read_years(arrays: dict[str, np.ndarray], counts: dict[str, int], note: str) -> Table:
    """The parts as slices of the mapped arrays, with the state as the client."""
    rows = Rows(arrays["inputs"], np.array(arrays["labels"]), np.array(STATES)[arrays["states"]])
    first, second = counts["train"], counts["train"] + counts["validation"]
    parts = (rows.take(slice(first)), rows.take(slice(first, second)), rows.take(slice(second, None)))
    return Table(*parts, f"{note}, {first} provider-years of {len(STATES)} states to train on")


def _write(path: Path, parts: list[np.ndarray]) -> None:
    """One array of rows that are in several: written, as on a full disk a mapped file kills the process."""
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    header = {"descr": np.lib.format.dtype_to_descr(parts[0].dtype), "fortran_order": False, "shape": shape}
    with path.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        for part in parts:
            stream.write(np.ascontiguousarray(part).data)


def _releases(folder: Path, year: int) -> list[Path]:
    """The CSVs of a year, whose names end in _D17_Prov.csv or _DY17_Prov.csv."""
    ending = re.compile(rf"_DY?{year % 100}_Prov\.csv$", re.IGNORECASE)
    return sorted(path for path in folder.glob("*.[cC][sS][vV]") if ending.search(path.name))
