"""Tables for a terminal of 80 columns, and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from fedauc.reports.summary import Line

HEADERS = ("method", "AUC [95 %]", "AP", "rounds", "up", "down", "sec", "p")


def size(amount: int) -> str:
    """Bytes in three digits.

    >>> size(999), size(1536000), size(2_000_000_000)
    ('999 B', '1.54 MB', '2 GB')
    """
    value, units = float(amount), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def share(value: float, digits: int) -> str:
    """A number between 0 and 1 without its leading zero, so that a row fits 80 columns.

    >>> share(0.98123, 4), share(1.0, 3)
    ('.9812', '1.000')
    """
    return f"{value:.{digits}f}".removeprefix("0")


def cells(line: Line) -> list[str]:
    """A line's cells: AUC with its DeLong interval, or with its spread over several seeds."""
    auc = share(line.auc, 4)
    if line.seeds > 1:
        auc += f" ± {share(line.spread, 4)}"
    elif line.low is not None and line.high is not None:
        auc += f" [{share(line.low, 3)}, {share(line.high, 3)}]"
    precision = "-" if line.average_precision is None else share(line.average_precision, 3)
    p_value = "-" if line.p_value is None else "<.001" if line.p_value < 0.001 else share(line.p_value, 3)
    traffic = [size(line.bytes_up), size(line.bytes_down)]
    return [line.method, auc, precision, str(line.rounds), *traffic, f"{line.seconds:.1f}", p_value]


def comparison(lines: Sequence[Line]) -> Table:
    """The comparison, for a terminal."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for header in HEADERS:
        table.add_column(header, justify="left" if header in HEADERS[:2] else "right", no_wrap=True)
    for line in lines:
        table.add_row(*cells(line))
    return table


def markdown(lines: Sequence[Line]) -> str:
    """The comparison, for a document."""
    rows = [HEADERS, ["---"] * len(HEADERS), *(cells(line) for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def pairs(values: dict[str, Any]) -> Table:
    """Names and values, one pair a line."""
    table = Table.grid(padding=(0, 2))
    for name, value in values.items():
        table.add_row(f"[bold]{name}[/bold]", str(value))
    return table
