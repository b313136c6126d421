"""Reading the provider tables of CMS and the exclusion list of OIG, a block at a time."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedauc.data.states import STATES

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import csv as tables

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
"""Counts and dollars, taken as log(1 + x). CMS leaves counts below 11 blank, which count as 0."""

MEANS = ("Bene_Avg_Age", "Bene_Avg_Risk_Scre")
"""Taken as they are; a blank gets the year's mean."""

FEATURES = (*AMOUNTS, *MEANS, ENTITY)
"""The columns of the inputs; the last is 1 for an organisation."""

TABLE = (NPI, STATE, *FEATURES)
"""The columns that are read of a provider table."""

LIST = ("NPI", "EXCLTYPE", "EXCLDATE")
"""The columns that are read of the exclusion list."""

LARGEST = 1e15
"""No count, sum of dollars or mean comes near it: what does is no number, or a damaged one."""

BLOCK = 1 << 24
"""Bytes of text parsed at once."""


class Year(NamedTuple):
    """A year's rows of the 50 states: features, labels, and the place of the state in the list of states."""

    inputs: np.ndarray
    labels: np.ndarray
    states: np.ndarray


class Exclusions(NamedTuple):
    """Excluded providers in ascending order, the day of the last exclusion of each as yyyymmdd, the list's length."""

    providers: np.ndarray
    days: np.ndarray
    entries: int


NOBODY = Exclusions(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), 0)
"""For reading a table without its labels: no provider has the number 0."""


def excluded(path: Path, types: frozenset[str] | None) -> Exclusions:
    """Providers that the list excludes for one of the types, or for any; entries without an identifier are left out."""
    entries = list(_entries(path))
    last: dict[int, int] = {}
    for provider, kind, day in entries:
        if provider and (types is None or kind in types):
            last[provider] = max(day, last.get(provider, 0))
    if not last:
        raise ValueError(f"{path} lists no excluded provider with an identifier: fetch it again")
    providers = np.array(sorted(last))
    return Exclusions(providers, np.array([last[provider] for provider in providers.tolist()]), len(entries))


def provider_years(path: Path, year: int, exclusions: Exclusions) -> Year:
    """A year's table. Positive: excluded in that year or later, so that what was billed came before the exclusion."""
    blocks = [_block(path, table, year, exclusions) for table in _tables(path)]
    if not blocks:
        raise ValueError(f"{path} has no rows: fetch it again")
    found = Year(*(np.concatenate(parts) for parts in zip(*blocks, strict=True)))
    for name in MEANS:
        column = found.inputs[:, FEATURES.index(name)]
        known = np.isfinite(column)
        column[~known] = column[known].mean(dtype=np.float64) if known.any() else 0
    return found


def check_columns(path: Path, wanted: Sequence[str]) -> None:
    """Refuse a CSV whose header lacks a column."""
    have, _ = _header(path)
    absent = [name for name in wanted if name not in have]
    if absent:
        others = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        names = f"{', '.join(absent[:3])}{others}"
        raise ValueError(f"{path} lacks the columns {names}: it is another table, or damaged; fetch it again")


# ------------------------------------------------------------------------------------------------- the exclusion list


def _entries(path: Path) -> Iterator[tuple[int, str, int]]:
    """Provider (0: without an identifier), type and day of every entry."""
    check_columns(path, LIST)
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
        lines = csv.reader(stream, strict=True)
        try:
            names = _names(next(lines))
            places = [names.index(name) for name in LIST]
            # An empty line is none.
            for line in filter(None, lines):
                if len(line) != len(names):
                    raise ValueError
                yield _entry(*(line[place].strip() for place in places))
        except (ValueError, csv.Error):
            # The line itself names a person.
            raise ValueError(f"{path} is damaged in line {lines.line_num}: fetch it again") from None


def _entry(provider: str, kind: str, day: str) -> tuple[int, str, int]:
    if not re.fullmatch("[0-9]{10}", provider) or not re.fullmatch("[0-9]{8}", day):
        raise ValueError
    date(int(day[:4]), int(day[4:6]), int(day[6:]))
    return int(provider), kind.lower(), int(day)


# -------------------------------------------------------------------------------------------------- a provider table


def _block(path: Path, table: pa.RecordBatch, year: int, exclusions: Exclusions) -> Year:
    import pyarrow as pa
    from pyarrow import compute

    place = compute.index_in(table.column(STATE), value_set=pa.array(STATES))
    table, place = table.filter(place.is_valid()), place.drop_null().to_numpy()
    # Read as 0, a blank is refused like every number that has not ten digits.
    provider = table.column(NPI).fill_null(0).to_numpy()
    if not ((provider >= 10**9) & (provider < 10**10)).all():
        raise _unreadable(path, NPI)
    row = np.searchsorted(exclusions.providers, provider).clip(max=len(exclusions.providers) - 1)
    later = exclusions.days[row] >= year * 10_000 + 101
    labels = ((exclusions.providers[row] == provider) & later).astype(np.int8)
    return Year(_inputs(path, table), labels, place.astype(np.int8))


def _inputs(path: Path, table: pa.RecordBatch) -> np.ndarray:
    inputs = np.empty((len(table), len(FEATURES)), dtype=np.float32)
    for place, name in enumerate(FEATURES):
        column = table.column(name)
        if name == ENTITY:
            inputs[:, place] = column.fill_null("").to_numpy(zero_copy_only=False) == "O"
            continue
        values = column.fill_null(0).to_numpy()
        # Also false where the value is no number.
        if not (np.abs(values) < LARGEST).all():
            raise _unreadable(path, name)
        inputs[:, place] = values if name in MEANS else np.log1p(np.maximum(values, 0))
        if name in MEANS:
            inputs[column.is_null().to_numpy(zero_copy_only=False), place] = np.nan
    return inputs


def _tables(path: Path) -> Iterator[pa.RecordBatch]:
    """The columns that are used, a block of rows at a time."""
    try:
        import pyarrow as pa
        from pyarrow import csv as tables
    except ImportError:
        raise ValueError(f"{path}: reading it needs pyarrow: run pip install 'fedauc[frames]'") from None
    check_columns(path, TABLE)
    names, lines = _header(path)
    kinds = {NPI: pa.int64(), STATE: pa.string(), ENTITY: pa.string()}
    kinds |= dict.fromkeys((*AMOUNTS, *MEANS), pa.float64())
    odd: list[tables.InvalidRow] = []

    def refuse(row: tables.InvalidRow) -> str:
        odd.append(row)
        return "error"

    read = tables.ReadOptions(block_size=BLOCK, column_names=names, skip_rows=lines)
    parse = tables.ParseOptions(newlines_in_values=True, invalid_row_handler=refuse)
    convert = tables.ConvertOptions(
        include_columns=list(kinds), column_types=kinds, strings_can_be_null=True, null_values=["", "*", "#"]
    )
    rows = 0
    try:
        with tables.open_csv(path, read, parse, convert) as reader:
            for table in reader:
                rows += len(table)
                yield table
    except pa.ArrowException as error:
        raise ValueError(f"{path} is damaged after row {rows}: {_fault(error, odd, names)}; fetch it again") from None


def _fault(error: pa.ArrowException, odd: Sequence[tables.InvalidRow], names: Sequence[str]) -> str:
    """What Arrow found, without its text, which quotes the row and so names a provider."""
    if odd:
        return f"a row has {odd[0].actual_columns} fields, the header {odd[0].expected_columns}"
    place = re.match(r"In CSV column #(\d+)", str(error))
    return f"column {names[int(place[1])]} has a value of another kind" if place else "it cannot be read as CSV"


def _unreadable(path: Path, column: str) -> ValueError:
    return ValueError(f"{path} is damaged: column {column} has a value that cannot be one; fetch it again")


# ------------------------------------------------------------------------------------------------------- the headers


def _header(path: Path) -> tuple[list[str], int]:
    """The names of a CSV's columns, and how many lines they take."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
        lines = csv.reader(stream)
        try:
            return _names(next(lines, [])), lines.line_num
        except csv.Error:
            return [], lines.line_num


def _names(header: Sequence[str]) -> list[str]:
    # A byte order mark that was taken for text, and encoded once more, stands before the first name in some releases.
    return [name.removeprefix("ï»¿") for name in header]
