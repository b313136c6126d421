"""The page in a few lines: what the tables and figures come to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fedauc.reports.tables import format_share
from paper.claims import ASKED, CLAIMS, Claim, claims
from paper.filling import EARLY, Filled
from paper.orderings import Shown, compared, gains, signed
from paper.table_specs import FRAUD, OURS, PUBLISHED


def short(sheets: Sequence[Shown]) -> Iterator[str]:
    """The highest rows, how far rows are from the paper's numbers, the orderings, the figures' claims, the rounds."""
    mine = [each for each in sheets if each.sheet.view == "auc"]
    for each in mine:
        if each.sheet.name.startswith("table") or each.sheet.name in ("classes", "creditcard"):
            yield from _highest(each)
    yield from _against(mine)
    yield from compared([each for each in mine if each.sheet.name != "classes"])
    found = {each.sheet.name: claims(each) for each in mine if each.sheet.name in CLAIMS}
    for name in [name for name in ASKED if found.get(name)]:
        yield f"{ASKED[name]} (`{name}`): {_counted(found[name])}."
    for each in [each for each in sheets if each.sheet.view == "traffic"]:
        yield from _rounds(each)


def _counted(found: Mapping[str, Claim]) -> str:
    """How many of them hold, and which do not."""
    ways = {holds: [where for where, claim in found.items() if claim.holds is holds] for holds in (True, False, None)}
    told = f"{len(ways[True])} of {len(found)} pairs of data and method"
    told += f"; not {'; '.join(ways[False])}" if ways[False] else ""
    return told + (f"; not told: {'; '.join(ways[None])}" if ways[None] else "")


def _highest(shown: Shown) -> Iterator[str]:
    """The best rows of columns on real data where all runs of two rows at least are done."""
    found = []
    for column in shown.sheet.columns:
        rows = {row: cell for (row, name), cell in shown.filled.items() if name == column.name}
        whole = {name: cell for name, cell in rows.items() if cell.whole}
        if column.dataset in (*PUBLISHED, *FRAUD) and len(whole) > 1:
            best, precise = (_best(whole, read) for read in ("auc", "precision"))
            lacking = ", ".join(name for name in rows if name not in whole)
            told = f"{column.name} {best} of {len(whole)} rows" + (f", without {lacking}" if lacking else "")
            found.append(told + (f" (average precision: {precise})" if shown.sheet.show_precision else ""))
    if found:
        yield f"Highest test AUC in `{shown.sheet.name}`: {'; '.join(found)}."


def _best(rows: Mapping[str, Filled], read: str) -> str:
    means = {name: spread.mean for name, cell in rows.items() if (spread := getattr(cell, read))}
    name = max(means, key=lambda row: means[row], default=None)
    return "-" if name is None else f"{name} {format_share(means[name], 4)}"


def _against(sheets: Sequence[Shown]) -> Iterator[str]:
    """How far whole rows are from the paper's numbers, table by table."""
    told = []
    for shown in sheets:
        if found := gains([shown]):
            least, most = min(found, key=lambda each: each.gap), max(found, key=lambda each: each.gap)
            above = sum(each.gap > 0 for each in found)
            ends = [f"{signed(each.gap)} ({each.column}, {each.row})" for each in (least, most)]
            other = " (against Table 1's, of its one class)" if shown.sheet.name == "classes" else ""
            told.append(f"`{shown.sheet.name}`{other} {above} of {len(found)}, from {' to '.join(ends)}")
    if told:
        yield f"Above the paper's number for the same row: {'; '.join(told)}."


def _rounds(shown: Shown) -> Iterator[str]:
    """Rounds of the paper's methods until a little below the common AUC, as parts of the first row's."""
    first, told = shown.sheet.rows[0].name, []
    for column in shown.sheet.columns:
        base = shown.filled[first, column.name].early
        met = {row: shown.filled[row, column.name].early for row in OURS if (row, column.name) in shown.filled}
        ratios = [
            f"{row} {'≤ ' if reach.first else ''}{reach.rounds / base.rounds:.2f}"
            for row, reach in met.items()
            if reach and base
        ]
        if ratios:
            told.append(f"{column.name} {', '.join(ratios)}")
    if told:
        yield f"Rounds until {format_share(EARLY, 2)} below a common AUC, as a multiple of {first}'s: {'; '.join(told)}."
