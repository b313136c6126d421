"""Reading the provider tables of CMS and the exclusion list of OIG, a block at a time."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedauc.data.states import STATES

if TYPE_CHECKING:
    import pyarrow as pa

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

BLOCK = 1 << 24
"""Bytes of text parsed at once."""


class Year(NamedTuple):
    """A year's rows of the 50 states: features, labels, and the place of the state in the list of states."""

    inputs: np.ndarray
    labels: np.ndarray
    states: np.ndarray


class Exclusions(NamedTuple):
    """Excluded providers in ascending order, and the day of the last exclusion of each as yyyymmdd."""

    providers: np.ndarray
    days: np.ndarray


def excluded(path: Path, types: frozenset[str] | None) -> Exclusions:
    """Providers that the list excludes for one of the types, or for any; entries without an identifier are left out."""
    last: dict[int, int] = {}
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
        reader = csv.DictReader(stream)
        _check_columns(path, reader.fieldnames or [], ("NPI", "EXCLTYPE", "EXCLDATE"))
        for number, row in enumerate(reader, start=2):
            if types is None or row["EXCLTYPE"].strip().lower() in types:
                try:
                    provider, day = int(row["NPI"]), int(row["EXCLDATE"])
                except (TypeError, ValueError):
                    raise ValueError(f"{path} is damaged in line {number}: fetch it again") from None
                if provider:
                    last[provider] = max(day, last.get(provider, 0))
    if not last:
        raise ValueError(f"{path} lists no excluded provider with an identifier: fetch it again")
    providers = np.array(sorted(last))
    return Exclusions(providers, np.array([last[provider] for provider in providers.tolist()]))


def provider_years(path: Path, year: int, exclusions: Exclusions) -> Year:
    """A year's table. Positive: excluded in that year or later, so that what was billed came before the exclusion."""
    blocks = [_block(table, year, exclusions) for table in _tables(path)]
    found = Year(*(np.concatenate(parts) for parts in zip(*blocks, strict=True)))
    for name in MEANS:
        column = found.inputs[:, FEATURES.index(name)]
        known = np.isfinite(column)
        column[~known] = column[known].mean(dtype=np.float64) if known.any() else 0
    return found


def _block(table: pa.RecordBatch, year: int, exclusions: Exclusions) -> Year:
    names = np.array(STATES)
    order = np.argsort(names)
    state = np.asarray(table.column(STATE).fill_null("").to_numpy(zero_copy_only=False), dtype="U2")
    place = order[np.searchsorted(names, state, sorter=order).clip(max=len(names) - 1)]
    here = names[place] == state
    provider = table.column(NPI).to_numpy(zero_copy_only=False)[here]
    row = np.searchsorted(exclusions.providers, provider).clip(max=len(exclusions.providers) - 1)
    later = exclusions.days[row] >= year * 10_000 + 101
    labels = ((exclusions.providers[row] == provider) & later).astype(np.int8)
    return Year(_inputs(table)[here], labels, place[here].astype(np.int8))


def _inputs(table: pa.RecordBatch) -> np.ndarray:
    inputs = np.empty((len(table), len(FEATURES)), dtype=np.float32)
    for place, name in enumerate(FEATURES):
        column = table.column(name)
        if name == ENTITY:
            inputs[:, place] = column.fill_null("").to_numpy(zero_copy_only=False) == "O"
        elif name in MEANS:
            inputs[:, place] = column.to_numpy(zero_copy_only=False)
        else:
            inputs[:, place] = np.log1p(np.maximum(column.fill_null(0).to_numpy(zero_copy_only=False), 0))
    return inputs


def _tables(path: Path) -> Iterator[pa.RecordBatch]:
    """The columns that are used, a block of rows at a time."""
    try:
        import pyarrow as pa
        from pyarrow import csv as tables
    except ImportError:
        raise ValueError(f"{path}: reading it needs pyarrow: run pip install 'fedauc[frames]'") from None
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
        _check_columns(path, next(csv.reader(stream), []), (NPI, STATE, *FEATURES))
    kinds = {NPI: pa.int64(), STATE: pa.string(), ENTITY: pa.string()}
    kinds |= dict.fromkeys((*AMOUNTS, *MEANS), pa.float64())
    convert = tables.ConvertOptions(
        include_columns=list(kinds), column_types=kinds, strings_can_be_null=True, null_values=["", "*", "#"]
    )
    try:
        with tables.open_csv(path, tables.ReadOptions(block_size=BLOCK), convert_options=convert) as reader:
            yield from reader
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is damaged ({' '.join(str(error).split())}): fetch it again") from error


def _check_columns(path: Path, have: Sequence[str], wanted: Sequence[str]) -> None:
    # A byte order mark stands before the first name in some releases.
    known = {name.removeprefix("ï»¿") for name in have}
    absent = [name for name in wanted if name not in known]
    if absent:
        raise ValueError(
            f"{path} lacks the columns {', '.join(absent)}: it is another table, or damaged; fetch it again"
        )
