"""Tables for a terminal of 80 columns, and for Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fedauc.experiments.checkpoint import write_atomically
from fedauc.experiments.comparison import Comparison
from fedauc.experiments.folder import RunFolder
from fedauc.reports.caveats import list_caveats
from fedauc.reports.curves import write_curves
from fedauc.reports.summary import (
    MethodSummary,
    Ranking,
    SettingSummary,
    Spread,
    compare_methods,
    rank_settings,
    summarize_run,
)

LEFT = 2
"""Columns of a comparison that stand to the left: the method and its AUC."""


def format_bytes(amount: int) -> str:
    """Bytes in three digits.

    >>> format_bytes(999), format_bytes(1536000), format_bytes(2_000_000_000)
    ('999 B', '1.54 MB', '2 GB')
    """
    value, units = float(amount), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def format_share(value: float, digits: int) -> str:
    """A number between 0 and 1 without its leading zero, so that a row fits 80 columns.

    >>> format_share(0.98123, 4), format_share(1.0, 3)
    ('.9812', '1.000')
    """
    return f"{value:.{digits}f}".removeprefix("0")


def comparison_cells(line: MethodSummary) -> list[str]:
    """A line's cells: AUC with its DeLong interval, or with its spread over several seeds."""
    auc = format_share(line.auc, 4)
    if line.seeds > 1:
        auc += f" ± {format_share(line.spread, 4)}"
    elif line.low is not None and line.high is not None:
        auc += f" [{format_share(line.low, 3)}, {format_share(line.high, 3)}]"
    precision = "-" if line.average_precision is None else format_share(line.average_precision, 3)
    p_value = "-" if line.p_value is None else "<.001" if line.p_value < 0.001 else format_share(line.p_value, 3)
    traffic = [format_bytes(line.bytes_up), format_bytes(line.bytes_down)]
    return [line.method, auc, precision, str(line.rounds), *traffic, f"{line.seconds:.1f}", p_value]


def comparison_headers(lines: Sequence[MethodSummary]) -> list[str]:
    """What the cells of a comparison are: the AUC has an interval, or the standard deviation over seeds."""
    auc = "AUC ± sd" if _has_several_seeds(lines) else "AUC [95 %]"
    return ["method", auc, "AP", "rounds", "up", "down", "sec", "p"]


def comparison_caption(lines: Sequence[MethodSummary]) -> str:
    """What p is, in a sentence; nothing if there is nothing to compare."""
    if len(lines) < 2:
        return ""
    scores = " on the first seed's scores" if _has_several_seeds(lines) else ""
    return f"p: paired DeLong test against {lines[0].method}{scores}."


def _has_several_seeds(lines: Sequence[MethodSummary]) -> bool:
    return any(line.seeds > 1 for line in lines)


def comparison_table(lines: Sequence[MethodSummary]) -> Table:
    """The comparison, for a terminal."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for place, header in enumerate(comparison_headers(lines)):
        table.add_column(header, justify="left" if place < LEFT else "right", no_wrap=True)
    for line in lines:
        table.add_row(*comparison_cells(line))
    return table


def comparison_markdown(lines: Sequence[MethodSummary], labels: Sequence[str]) -> str:
    """The comparison, for a document, under the labels of its rows."""
    return _caveats_above(labels) + _markdown_table(
        comparison_headers(lines), [comparison_cells(line) for line in lines]
    )


def ranking_table(found: Ranking) -> Table:
    """The settings of a sweep, for a terminal; a long setting is folded between its options."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for header in ranking_headers(found):
        table.add_column(header, no_wrap=header != "setting")
    for line in found.lines:
        table.add_row(*ranking_cells(found, line))
    return table


def ranking_markdown(found: Ranking, labels: Sequence[str]) -> str:
    """The settings of a sweep, for a document, under the labels of its rows."""
    table = _markdown_table(ranking_headers(found), [ranking_cells(found, line) for line in found.lines])
    return f"{_caveats_above(labels)}{table}\n{ranking_caption(found)}\n"


def ranking_headers(found: Ranking) -> list[str]:
    """What the cells of a ranking are; there is no column for a validation part that is not there."""
    return ["setting", "runs", *(["validation"] if found.by == "validation_auc" else []), "final", "best"]


def ranking_cells(found: Ranking, line: SettingSummary) -> list[str]:
    """A line's cells: mean and spread over seeds; `2 of 3` says that a run is not done."""
    runs = str(line.runs) if line.done == line.runs else f"{line.done} of {line.runs}"
    judged = [line.judged] if found.by == "validation_auc" else []
    spreads = [_format_spread(spread, line.done) for spread in (*judged, line.final, line.best)]
    return [line.setting.replace("/", " "), runs, *spreads]


def ranking_caption(found: Ranking) -> str:
    """How the settings are sorted, in a sentence."""
    if found.by == "validation_auc":
        return "Sorted by validation AUC in each run's best round; final and best are test AUC."
    return "Sorted by test AUC in each run's best round, as there is no validation part: not for reporting."


def _format_spread(found: Spread, runs: int) -> str:
    if not runs:
        return "-"
    return format_share(found.mean, 4) + (f" ± {format_share(found.deviation, 4)}" if runs > 1 else "")


def _caveats_above(labels: Sequence[str]) -> str:
    return "".join(f"{label}\n\n" for label in labels)


def _markdown_table(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [headers, ["---"] * len(headers), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def describe_run(found: dict[str, Any]) -> dict[str, str]:
    """What a run's summary says, name by name."""
    if found["final"] is None:
        return {"method": found["method"], "status": found["status"]}
    chosen = "validation AUC" if found["best_by"] == "validation_auc" else "test AUC, so not for reporting"
    return {
        "method": f"{found['method']}, seed {found['seed']}",
        "status": found["status"],
        "final": _describe_quality(found["final"]),
        "best": f"{_describe_quality(found['best'])} (by {chosen})",
        "rounds": f"{found['rounds']} ({found['visits']} client visits, {found['absences']} absences)",
        "traffic": f"{format_bytes(found['bytes_up'])} up, {format_bytes(found['bytes_down'])} down",
        "seconds": f"{found['seconds']:.1f}",
    }


def _describe_quality(found: dict[str, Any]) -> str:
    text = f"AUC {found['auc']:.4f}"
    if found["low"] is not None:
        text += f" [{found['low']:.4f}, {found['high']:.4f}], AP {found['average_precision']:.4f}"
    return f"{text}, after {found['round'] + 1} rounds"


def describe_groups(groups: Sequence[Sequence[str]]) -> str:
    """How many runs there are, and which share a graph.

    >>> print(describe_groups([["a/seed-0", "a/seed-1"], ["b/seed-0"]]))
    3 runs: 2 in shared graphs, 1 alone
    graph 1:
      a/seed-0
      a/seed-1
    alone:
      b/seed-0
    """
    shared = [group for group in groups if len(group) > 1]
    alone = [name for group in groups if len(group) == 1 for name in group]
    together = sum(map(len, shared))
    lines = [f"{together + len(alone)} runs: {together} in shared graphs, {len(alone)} alone"]
    for number, group in enumerate(shared, 1):
        lines += [f"graph {number}:", *(f"  {name}" for name in group)]
    return "\n".join(lines + (["alone:", *(f"  {name}" for name in alone)] if alone else []))


def print_run(folder: RunFolder) -> None:
    """Print caveats on the data, then a run's result, one fact a line."""
    _print_caveats([(folder.path.name, folder)])
    table = Table.grid(padding=(0, 2))
    for name, value in (describe_run(summarize_run(folder)) | {"folder": str(folder.path)}).items():
        table.add_row(f"[bold]{name}[/bold]", value)
    Console().print(table)


def print_comparison(comparison: Comparison) -> None:
    """Print caveats on the data, then the table of a comparison or sweep with its caption."""
    _print_caveats(comparison.run_folders())
    if comparison.sweep:
        ranking = rank_settings(comparison.run_folders(), comparison.seeds_per_setting())
        table, caption = ranking_table(ranking), ranking_caption(ranking)
    else:
        methods = compare_methods(comparison.run_folders())
        table, caption = comparison_table(methods), comparison_caption(methods)
    Console().print(table)
    if caption:
        Console().print(caption)


def write_comparison(comparison: Comparison) -> None:
    """Write `table.md`, and for a comparison of methods the learning curves; print the table."""
    folders = list(comparison.run_folders())
    if comparison.sweep:
        text = ranking_markdown(rank_settings(folders, comparison.seeds_per_setting()), list_caveats(folders))
    else:
        text = comparison_markdown(compare_methods(folders), list_caveats(folders))
        write_curves(folders, comparison.path / "curves.png")
    write_atomically(comparison.path / "table.md", text.encode())
    print_comparison(comparison)
    if not comparison.sweep:
        Console().print(f"Curves: {comparison.path / 'curves.png'}", soft_wrap=True)


def _print_caveats(folders: Iterable[tuple[str, RunFolder]]) -> None:
    for caveat in list_caveats(folders):
        Console().print(caveat, markup=False, highlight=False)
