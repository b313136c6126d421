"""The page in a few lines: what the tables and figures come to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedauc.experiments.paper.sheets import PUBLISHED
from fedauc.reports.paper.claims import ASKED, CLAIMS, claims
from fedauc.reports.paper.orderings import Shown, compared, gains, signed
from fedauc.reports.tables import share


def short(sheets: Sequence[Shown]) -> Iterator[str]:
    """The highest rows, how far rows are from the paper's numbers, the orderings, the figures' claims."""
    mine = [each for each in sheets if each.sheet.view == "auc"]
    tables = [each for each in mine if each.sheet.name.startswith("table") or each.sheet.name == "classes"]
    yield from _highest(tables)
    yield from _against(mine)
    yield from compared(mine)
    found = {each.sheet.name: claims(each) for each in mine if each.sheet.name in CLAIMS}
    for name in [name for name in ASKED if found.get(name)]:
        broken = [where for where, claim in found[name].items() if not claim.holds]
        told = f"{len(found[name]) - len(broken)} of {len(found[name])} pairs of data and method"
        yield f"{ASKED[name]} (`{name}`): {told}" + (f"; not {'; '.join(broken)}." if broken else ".")


def _highest(tables: Sequence[Shown]) -> Iterator[str]:
    """The best rows of columns on the paper's data where all runs of two rows at least are done."""
    found = []
    for shown in tables:
        for column in shown.sheet.columns:
            rows = {entry.name: shown.filled[entry.name, column.name] for entry in shown.sheet.rows}
            if column.dataset in PUBLISHED and sum(cell.whole for cell in rows.values()) > 1:
                for name, cell in rows.items():
                    if cell.best and cell.auc:
                        found.append(f"{shown.sheet.name} {column.name} {name} {share(cell.auc.mean, 4)}")
    if found:
        yield f"Highest test AUC: {', '.join(found)}."


def _against(sheets: Sequence[Shown]) -> Iterator[str]:
    """How far whole rows are from the paper's numbers, and which row the most."""
    found = gains(sheets)
    if found:
        above = sum(each.gap > 0 for each in found)
        least, most = min(found, key=lambda each: each.gap), max(found, key=lambda each: each.gap)
        yield (
            f"Above the paper's number for the same row: {above} of {len(found)}; the differences go "
            f"from {signed(least.gap)} ({least.column}, {least.row}) to {signed(most.gap)} ({most.column}, "
            f"{most.row})."
        )
