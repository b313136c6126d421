"""Medicare providers by state, labelled by the list of excluded providers: the paper's Insurance data.

The first half is the dataset; below it are the readers of the provider tables of CMS and of the exclusion list of OIG,
which read a block at a time. No error message quotes a row, because a row names a provider.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np

from fedauc.data.dataset import Rows, TableParts
from fedauc.data.io.disk_tables import write_array
from fedauc.data.io.stored import File, MissingFiles, ParsedArrays, Source, StoredDataset, save_array
from fedauc.data.standardization import standardize_table
from fedauc.fields import check_fields, option

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import csv as pyarrow_csv

TRAIN, VALIDATION, TEST = (2017, 2018, 2019, 2020), 2021, 2022
"""The chronological split."""

YEARS = (*TRAIN, VALIDATION, TEST)

_STATE_NAMES = """
AL AK AZ AR CA CO CT DE FL GA HI ID IL IN IA KS KY LA ME MD MA MI MN MS MO MT NE NV NH NJ NM NY NC ND OH OK OR PA RI SC
SD TN TX UT VT VA WA WV WI WY
"""
STATES = tuple(_STATE_NAMES.split())
"""The 50 states by their postal abbreviations."""

FORMAT = 1
"""To be raised whenever the same files give different arrays, so that arrays parsed before are not used."""

ROWS_PER_ENTRY = 20
"""The exclusion list must have at least `min_rows` divided by this many entries: 45,000 by default."""

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

FRAUD = frozenset({"1128a1", "1128a2", "1128a3", "1128b4", "1128b7", "1128c3gi", "1128c3gii"})
"""Exclusion types that label fraud: Herland, Khoshgoftaar and Bauder 2018, https://doi.org/10.1186/s40537-018-0138-3."""

NPI, STATE, ENTITY = "Rndrng_NPI", "Rndrng_Prvdr_State_Abrvtn", "Rndrng_Prvdr_Ent_Cd"

TOTALS = ("HCPCS_Cds", "Benes", "Srvcs")
MONEY = ("Sbmtd_Chrg", "Mdcr_Alowd_Amt", "Mdcr_Pymt_Amt", "Mdcr_Stdzd_Amt")
PEOPLE = ("Age_LT_65", "Age_65_74", "Age_75_84", "Age_GT_84", "Feml", "Male", "Dual", "Ndual")

AMOUNTS = (
    *(f"Tot_{name}" for name in (*TOTALS, *MONEY)),
    *(f"{kind}_{name}" for kind in ("Drug", "Med") for name in (*(f"Tot_{total}" for total in TOTALS), *MONEY)),
    *(f"Bene_{name}_Cnt" for name in PEOPLE),
)
"""Counts and dollars, used as log(1 + x). CMS leaves counts below 11 blank; they count as 0."""

MEANS = ("Bene_Avg_Age", "Bene_Avg_Risk_Scre")
"""Used as they are; a blank becomes the year's mean."""

FEATURES = (*AMOUNTS, *MEANS, ENTITY)
"""The columns of the inputs; the last is 1 for an organisation."""

TABLE_COLUMNS = (NPI, STATE, *FEATURES)
"""The columns of a provider table that are read."""

LIST_COLUMNS = ("NPI", "EXCLTYPE", "EXCLDATE")
"""The columns of the exclusion list that are read."""

LARGEST = 1e15
"""No count, sum of dollars or mean comes near this bound; a value that reaches it is damaged."""

BLOCK = 1 << 24
"""Bytes of text parsed at once."""


def _provider_source(year: int) -> Source:
    name = f"MUP_PHY_R25_P07_V20_D{year % 100}_Prov.csv"
    return Source(name, f"https://data.cms.gov/sites/default/files/2025-11/{FOLDERS[year]}/{name}", "", PAGE)


@dataclass(frozen=True)
class Medicare(StoredDataset):
    """One row per provider and year, one client per state, positive where the provider was later excluded for fraud.

    Neither source publishes a checksum, so a year with fewer than `min_rows` rows is treated as a damaged file. What
    identifies a provider is read while the arrays are built and is in none of them.
    """

    name: ClassVar[str] = "medicare"
    about: ClassVar[str] = (
        "Medicare Part B by provider 2017-2022 with exclusions for fraud; CMS, Medicare Physician & Other "
        "Practitioners, and OIG, List of Excluded Individuals/Entities, both public domain"
    )
    sources: ClassVar[tuple[Source, ...]] = (*map(_provider_source, YEARS), LEIE)

    exclusions: Literal["fraud", "all"] = option("fraud", "Which exclusions make a provider positive.")
    min_rows: int = option(900_000, "Rows that each year must have; lower it for a sample.", at_least=1)

    def __post_init__(self) -> None:
        check_fields(self)

    def find_files(self) -> tuple[File, ...]:
        """One CSV per year, of any release, and the exclusion list."""
        existing = list(self.existing_files())
        for year, source in zip(YEARS, self.sources, strict=False):
            names = [file.path.name for known, file in existing if known is source]
            if len(names) > 1:
                releases = f"{len(names)} releases of {year} ({', '.join(names)})"
                raise ValueError(f"{self.home_folder} has {releases}: keep one")
        missing = tuple(source for source in self.sources if source not in (known for known, _ in existing))
        if missing:
            raise MissingFiles(self.name, self.home_folder, missing)
        return tuple(file for _, file in existing)

    def existing_files(self) -> Iterator[tuple[Source, File]]:
        """Every release of every year, and the exclusion list."""
        tables = sorted(path for path in self.home_folder.glob("*.[cC][sS][vV]") if path.is_file())
        *year_sources, list_source = self.sources
        for year, source in zip(YEARS, year_sources, strict=True):
            # Names end in _D17_Prov.csv or _DY17_Prov.csv.
            ending = re.compile(rf"_DY?{year % 100}_Prov\.csv$", re.IGNORECASE)
            yield from ((source, File(path, "")) for path in tables if ending.search(path.name))
        if (self.home_folder / LEIE.name).is_file():
            yield list_source, File(self.home_folder / LEIE.name, "")

    def cache_key(self) -> str:
        """How the files are read, and which exclusions count."""
        return f"{FORMAT} {self.exclusions} {sorted(FRAUD)}"

    def check_download(self, source: Source, path: Path) -> None:
        """Refuse a file that lacks the columns."""
        super().check_download(source, path)
        read_header(path, LIST_COLUMNS if source.name == LEIE.name else TABLE_COLUMNS)

    def check_content(self, source: Source, path: Path) -> None:
        """Refuse a file that cannot be read to its end or is too short."""
        super().check_content(source, path)
        if source.name == LEIE.name:
            self._check_length(path, read_exclusions(path, None).entries)
        else:
            year = YEARS[self.sources.index(source)]
            self._check_length(path, len(read_provider_year(path, year, no_exclusions()).labels))

    def parse_files(self, files: tuple[File, ...], into: Path) -> dict[str, int]:
        """Standardised features, labels and states of all years in order; the rows of each year and of each part."""
        *tables, exclusion_list = (file.path for file in files)
        exclusions = read_exclusions(exclusion_list, FRAUD if self.exclusions == "fraud" else None)
        years = [read_provider_year(path, year, exclusions) for path, year in zip(tables, YEARS, strict=True)]
        counts = {str(year): len(rows.labels) for year, rows in zip(YEARS, years, strict=True)}
        counts["listed"] = exclusions.entries
        self._check_lengths(files, counts)
        return write_years(years, into) | counts

    def load_parsed(self) -> ParsedArrays:
        """The arrays, parsed on first use; `min_rows` is checked even if they were parsed with a lower one."""
        parsed = super().load_parsed()
        self._check_lengths(self.find_files(), parsed.counts)
        return parsed

    def _check_lengths(self, files: tuple[File, ...], counts: dict[str, int]) -> None:
        for file, count in zip(files, [*(counts[str(year)] for year in YEARS), counts["listed"]], strict=True):
            self._check_length(file.path, count)

    def _check_length(self, path: Path, count: int) -> None:
        bound, items, bound_text = self.min_rows, "rows of the 50 states", "min_rows"
        if path.name == LEIE.name:
            bound, items, bound_text = bound // ROWS_PER_ENTRY, "entries", f"min_rows / {ROWS_PER_ENTRY}"
        if count < bound:
            raise ValueError(
                f"{path} has {count} {items}; it must have at least {bound_text}, {bound}: fetch it again, or lower "
                "min_rows for a sample"
            )

    def load(self, seed: int) -> TableParts:
        """2017 to 2020 to train on, 2021 for validation, 2022 for testing, whatever the seed."""
        return read_years(*self.load_parsed())


class ProviderYear(NamedTuple):
    """A year's rows of the 50 states: features, labels, and the index of each row's state in `STATES`."""

    inputs: np.ndarray
    labels: np.ndarray
    states: np.ndarray


class Exclusions(NamedTuple):
    """Excluded providers in ascending order, the day of each one's last exclusion as yyyymmdd, the list's length."""

    providers: np.ndarray
    days: np.ndarray
    entries: int


def no_exclusions() -> Exclusions:
    """For reading a table without its labels: no provider has the number 0."""
    return Exclusions(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), 0)


def write_years(years: list[ProviderYear], into: Path) -> dict[str, int]:
    """Standardise years on the training ones and write them, training first, then validation, then test."""
    *train, validation, test = (Rows(year.inputs, year.labels, year.states) for year in years)
    joined = Rows(*(np.concatenate(columns) for columns in zip(*(rows[:3] for rows in train), strict=True)))
    table = standardize_table(TableParts(joined, validation, test, ""))
    assert table.validation is not None
    parts = {"train": table.train, "validation": table.validation, "test": table.test}
    shape = (sum(len(part.labels) for part in parts.values()), *table.train.inputs.shape[1:])
    with write_array(into / "inputs.npy", np.dtype(np.float32), shape) as append_rows:
        for part in parts.values():
            append_rows(np.asarray(part.inputs))
    save_array(into, "labels", np.concatenate([part.labels for part in parts.values()]))
    save_array(into, "states", np.concatenate([np.asarray(part.client) for part in parts.values()]))
    return {name: len(part.labels) for name, part in parts.items()}


def read_years(arrays: dict[str, np.ndarray], counts: dict[str, int]) -> TableParts:
    """The parts as slices of the memory-mapped arrays, with the state as the client."""
    rows = Rows(arrays["inputs"], np.array(arrays["labels"]), np.array(STATES)[arrays["states"]])
    first, second = counts["train"], counts["train"] + counts["validation"]
    parts = (rows.take(slice(first)), rows.take(slice(first, second)), rows.take(slice(second, None)))
    note = f"Medicare Part B by provider and LEIE, {first} provider-years of {len(STATES)} states to train on"
    return TableParts(*parts, note)


# ------------------------------------------------------------------------------------------------- the exclusion list


def read_exclusions(path: Path, types: frozenset[str] | None) -> Exclusions:
    """The providers excluded for one of the types, or for any; entries without an identifier are left out."""
    entries = list(_read_entries(path))
    last_day: dict[int, int] = {}
    for provider, kind, day in entries:
        if provider and (types is None or kind in types):
            last_day[provider] = max(day, last_day.get(provider, 0))
    if not last_day:
        raise ValueError(f"{path} lists no excluded provider with an identifier: fetch it again")
    providers = np.array(sorted(last_day))
    return Exclusions(providers, np.array([last_day[provider] for provider in providers.tolist()]), len(entries))


def _read_entries(path: Path) -> Iterator[tuple[int, str, int]]:
    """Provider (0: without an identifier), type and day of every entry."""
    names, _ = read_header(path, LIST_COLUMNS)
    positions = [names.index(name) for name in LIST_COLUMNS]
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
        lines = csv.reader(stream, strict=True)
        try:
            next(lines)
            # Empty lines are skipped.
            for line in filter(None, lines):
                if len(line) != len(names):
                    raise ValueError
                provider, kind, day = (line[position].strip() for position in positions)
                if not re.fullmatch("[0-9]{10}", provider) or not re.fullmatch("[0-9]{8}", day):
                    raise ValueError
                date(int(day[:4]), int(day[4:6]), int(day[6:]))
                yield int(provider), kind.lower(), int(day)
        except (ValueError, csv.Error):
            # The message does not quote the line, which names a person.
            raise ValueError(f"{path} is damaged in line {lines.line_num}: fetch it again") from None


# --------------------------------------------------------------------------------------------------- a provider table


def read_provider_year(path: Path, year: int, exclusions: Exclusions) -> ProviderYear:
    """A year's table. Positive: excluded in that year or later, so that the billing came before the exclusion."""
    blocks = [_label_block(path, batch, year, exclusions) for batch in _read_batches(path)]
    if not blocks:
        raise ValueError(f"{path} has no rows: fetch it again")
    table = ProviderYear(*(np.concatenate(columns) for columns in zip(*blocks, strict=True)))
    for name in MEANS:
        column = table.inputs[:, FEATURES.index(name)]
        known = np.isfinite(column)
        column[~known] = column[known].mean(dtype=np.float64) if known.any() else 0
    return table


def _label_block(path: Path, batch: pa.RecordBatch, year: int, exclusions: Exclusions) -> ProviderYear:
    import pyarrow as pa
    from pyarrow import compute

    states = compute.index_in(batch.column(STATE), value_set=pa.array(STATES))
    batch, states = batch.filter(states.is_valid()), states.drop_null().to_numpy()
    # A blank is read as 0 and refused like every number that does not have ten digits.
    provider = batch.column(NPI).fill_null(0).to_numpy()
    if not ((provider >= 10**9) & (provider < 10**10)).all():
        raise _value_error(path, NPI)
    nearest = np.searchsorted(exclusions.providers, provider).clip(max=len(exclusions.providers) - 1)
    is_later = exclusions.days[nearest] >= year * 10_000 + 101
    labels = ((exclusions.providers[nearest] == provider) & is_later).astype(np.int8)
    return ProviderYear(_compute_features(path, batch), labels, states.astype(np.int8))


def _compute_features(path: Path, batch: pa.RecordBatch) -> np.ndarray:
    inputs = np.empty((len(batch), len(FEATURES)), dtype=np.float32)
    for position, name in enumerate(FEATURES):
        column = batch.column(name)
        if name == ENTITY:
            inputs[:, position] = column.fill_null("").to_numpy(zero_copy_only=False) == "O"
            continue
        values = column.fill_null(0).to_numpy()
        # The comparison is also false for NaN.
        if not (np.abs(values) < LARGEST).all():
            raise _value_error(path, name)
        inputs[:, position] = values if name in MEANS else np.log1p(np.maximum(values, 0))
        if name in MEANS:
            inputs[column.is_null().to_numpy(zero_copy_only=False), position] = np.nan
    return inputs


def _read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The columns that are used, a block of rows at a time."""
    try:
        import pyarrow as pa
        from pyarrow import csv as pyarrow_csv
    except ImportError:
        raise ValueError(f"{path}: reading it needs pyarrow: run pip install pyarrow") from None
    names, header_lines = read_header(path, TABLE_COLUMNS)
    types = {NPI: pa.int64(), STATE: pa.string(), ENTITY: pa.string()}
    types |= dict.fromkeys((*AMOUNTS, *MEANS), pa.float64())
    invalid: list[pyarrow_csv.InvalidRow] = []

    def record_invalid(row: pyarrow_csv.InvalidRow) -> str:
        invalid.append(row)
        return "error"

    read = pyarrow_csv.ReadOptions(block_size=BLOCK, column_names=names, skip_rows=header_lines)
    parse = pyarrow_csv.ParseOptions(newlines_in_values=True, invalid_row_handler=record_invalid)
    convert = pyarrow_csv.ConvertOptions(
        include_columns=list(types), column_types=types, strings_can_be_null=True, null_values=["", "*", "#"]
    )
    rows = 0
    try:
        with pyarrow_csv.open_csv(path, read, parse, convert) as reader:
            for batch in reader:
                rows += len(batch)
                yield batch
    except pa.ArrowException as error:
        # Arrow's own message quotes the row and so names a provider.
        column = re.match(r"In CSV column #(\d+)", str(error))
        fault = f"column {names[int(column[1])]} has a value of another kind" if column else "it cannot be read as CSV"
        if invalid:
            fault = f"a row has {invalid[0].actual_columns} fields, the header {invalid[0].expected_columns}"
        raise ValueError(f"{path} is damaged after row {rows}: {fault}; fetch it again") from None


def _value_error(path: Path, column: str) -> ValueError:
    return ValueError(f"{path} is damaged: column {column} has a value that cannot be one; fetch it again")


def read_header(path: Path, needed: Sequence[str]) -> tuple[list[str], int]:
    """The names of a CSV's columns, and how many lines the header takes; refuses a CSV that lacks a needed column."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
        lines = csv.reader(stream)
        try:
            # In some releases a byte order mark was mistaken for text and encoded again before the first name.
            names = [name.removeprefix("ï»¿") for name in next(lines, [])]
        except csv.Error:
            names = []
    missing = [name for name in needed if name not in names]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        first = f"{', '.join(missing[:3])}{more}"
        raise ValueError(f"{path} lacks the columns {first}: it is another table, or damaged; fetch it again")
    return names, lines.line_num
