"""Tables for a terminal of 80 columns, and for Markdown."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from fedauc.experiments.comparison import Comparison
from fedauc.experiments.folder import RunFolder
from fedauc.experiments.guarantee import describe_spending
from fedauc.files import write_atomically
from fedauc.metrics import Metric, parse_metrics
from fedauc.reports.caveats import list_caveats
from fedauc.reports.curves import write_curves
from fedauc.reports.summary import MethodSummary, Ranking, compare_methods, rank_settings, summarize_run

REVERSED = (
    "the model ranks negatives above positives more often than not: lower the learning rate, or use validation rows "
    "and --keep best"
)
"""What a user must know of a run whose test AUC is below one half."""

RIGHT_ALIGNED = ("AP", "rounds", "up", "down", "sec", "p")
"""Headers of the columns that are aligned to the right in a terminal."""


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


class TextTable(NamedTuple):
    """A table whose cells are text already, and its caption; a narrow terminal omits the `optional` columns."""

    headers: list[str]
    rows: list[list[str]]
    caption: str
    optional: list[str]

    def fit_width(self, width: int) -> TextTable:
        """The table without the last optional columns where it is wider than a terminal; the caption names them."""
        shown, omitted = self, list[str]()
        for header in reversed(self.optional):
            if shown.minimum_width() <= width:
                break
            position = shown.headers.index(header)
            headers, *rows = ([*row[:position], *row[position + 1 :]] for row in (shown.headers, *shown.rows))
            shown, omitted = shown._replace(headers=headers, rows=rows), [header, *omitted]
        omitted.sort(key=self.headers.index)
        if omitted:
            pronoun = "it" if len(omitted) == 1 else "them"
            note = f"Omitted, for lack of room: {', '.join(omitted)}; `show --json` has {pronoun}."
            shown = shown._replace(caption=f"{shown.caption} {note}".strip())
        return shown

    def minimum_width(self) -> int:
        """The columns of a terminal that the table needs; a long setting is folded between its words."""
        widths = []
        for header, *cells in zip(self.headers, *self.rows, strict=True):
            words = [word for cell in cells for word in cell.split()] if header == "setting" else cells
            widths.append(max(map(len, (header, *words))))
        return sum(widths) + 2 * (len(widths) - 1)

    def to_rich(self) -> Table:
        """The table for a terminal; a long setting is folded between its options, and a long method anywhere."""
        table = Table(box=None, padding=(0, 1), pad_edge=False)
        for header in self.headers:
            justify: Literal["left", "right"] = "right" if header in RIGHT_ALIGNED else "left"
            is_name = header in ("setting", "method")
            overflow: Literal["fold", "ellipsis"] = "fold" if is_name else "ellipsis"
            table.add_column(header, justify=justify, no_wrap=not is_name, overflow=overflow)
        for row in self.rows:
            table.add_row(*row)
        return table

    def to_markdown(self) -> str:
        """The table for a document, without its caption."""
        rows = [self.headers, ["---"] * len(self.headers), *self.rows]
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def tabulate_methods(methods: Sequence[MethodSummary], explains_rounds: bool = True) -> TextTable:
    """A row per method: the first metric with its interval, or with its standard deviation over several seeds.

    The caption explains rounds that only collect scores, unless the user has read that when training began.
    """
    rows = []
    labels = list(dict.fromkeys(label for method in methods for label in method.others))
    label = methods[0].label if methods else "AUC"
    # The test compares AUCs, so that its p-values belong only beside an AUC.
    has_test = "AUC" in (label, *labels)
    for method in methods:
        if math.isnan(method.value):
            status = "stopped" if any(reason.startswith("stopped") for reason in method.unfinished.values()) else "-"
            rows.append([method.method, status, *["-"] * (len(labels) + 4 + has_test)])
            continue
        value = format_share(method.value, 4)
        if method.seeds > 1:
            value += f" ± {format_share(method.spread, 4)}"
        elif method.low is not None and method.high is not None:
            value += f" [{format_share(method.low, 3)}, {format_share(method.high, 3)}]"
        others = [_format_metric(method.others.get(label)) for label in labels]
        p_value = "-" if method.p_value is None else format_share(method.p_value, 3)
        if method.p_value is not None and method.p_value < 0.001:
            p_value = "<.001"
        traffic = [format_bytes(method.bytes_up), format_bytes(method.bytes_down)]
        rows.append([method.method, value, *others, str(method.rounds), *traffic, f"{method.seconds:.1f}"])
        rows[-1] += [p_value] if has_test else []
    several_seeds = any(method.seeds > 1 for method in methods)
    has_interval = any(method.low is not None for method in methods)
    measure = " ± sd" if several_seeds else " [95 %]" if has_interval else ""
    headers = ["method", f"{label}{measure}", *labels, "rounds", "up", "down", "sec", *(["p"] if has_test else [])]
    scores = " on the first seed's scores" if several_seeds else ""
    sentences = []
    if has_test and len(methods) > 1:
        reference = next((method for method in methods if method.first_run_done), methods[0])
        sentences.append(f"p: paired DeLong test of the AUC against {reference.method}{scores}.")
    if explains_rounds:
        sentences += [
            f"{method.method}: {describe_scoring_rounds(method.rounds, method.scoring_rounds)}."
            for method in methods
            if method.scoring_rounds
        ]
    backward = [
        method.method
        for method in methods
        if method.first_run_done and is_reversed(method.value if label == "AUC" else method.others.get("AUC"))
    ]
    sentences += [f"{', '.join(backward)}: {REVERSED}."] if backward else []
    for method in methods:
        sentences += [f"{method.method}, seed {seed}: {status}." for seed, status in method.unfinished.items()]
    return TextTable(headers, rows, " ".join(sentences), ["down", "sec", *labels])


def describe_scoring_rounds(rounds: int, scoring_rounds: int) -> str:
    """Why a run has more rounds than its learning cycles.

    >>> describe_scoring_rounds(248, 8)
    '8 of the 248 rounds only collect the scores that later rounds compare with, 240 train'
    """
    purpose = "only collect the scores that later rounds compare with"
    return f"{scoring_rounds} of the {rounds} rounds {purpose}, {rounds - scoring_rounds} train"


def tabulate_settings(ranking: Ranking) -> TextTable:
    """A row per setting of a sweep: mean and spread over seeds; `2 of 3` says that a run is not done."""
    rows = []
    labels = list(dict.fromkeys(label for setting in ranking.settings for label in setting.others))
    for setting in ranking.settings:
        runs = str(setting.runs) if setting.done == setting.runs else f"{setting.done} of {setting.runs}"
        cells = []
        for spread in (*([setting.judged] if ranking.on_validation else []), setting.final, setting.best):
            deviation = f" ± {format_share(spread.deviation, 4)}" if setting.done > 1 else ""
            cells.append(format_share(spread.mean, 4) + deviation if setting.done else "-")
        others = [_format_metric(setting.others[label]) for label in labels]
        rows.append([setting.setting.replace("/", " "), runs, *cells, *others])
    if ranking.on_validation:
        caption = (
            f"Sorted by validation {ranking.label} in each run's best round; final and best are test {ranking.label}."
        )
        return TextTable(["setting", "runs", "validation", "final", "best", *labels], rows, caption, labels)
    reason = "as there is no validation part: not for reporting"
    caption = f"Sorted by test {ranking.label} in each run's best round, {reason}."
    return TextTable(["setting", "runs", "final", "best", *labels], rows, caption, labels)


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
    shared_runs = sum(map(len, shared))
    lines = [f"{shared_runs + len(alone)} runs: {shared_runs} in shared graphs, {len(alone)} alone"]
    for number, group in enumerate(shared, 1):
        lines += [f"graph {number}:", *(f"  {name}" for name in group)]
    return "\n".join(lines + (["alone:", *(f"  {name}" for name in alone)] if alone else []))


def print_run(folder: RunFolder, all_sites: bool = False) -> None:
    """Print caveats on the data, then a run's result, one fact a line; `all_sites` adds the AUC of every site."""
    _print_caveats([(folder.path.name, folder)])
    summary = summarize_run(folder)
    facts = {"method": summary["method"], "status": summary["status"]}
    if "preset" in summary:
        facts["settings"] = f"those of the preset {summary['preset']}"
    if summary["final"] is not None:
        facts |= _describe_result(summary, parse_metrics(folder.config.metrics))
    if "privacy" in summary:
        facts |= _describe_privacy(summary)
    table = Table.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    for name, value in (facts | {"folder": str(folder.path)}).items():
        table.add_row(f"[bold]{name}[/bold]", escape(value))
    Console().print(table)
    if all_sites:
        if "client_auc" not in summary:
            raise ValueError(
                f"{folder.path} has no AUC of sites; finished runs have it, where test rows say whose they are"
            )
        _print_sites(summary["client_auc"])


def _describe_result(summary: dict[str, Any], metrics: Sequence[Metric]) -> dict[str, str]:
    """The facts of a run that has been evaluated."""
    part, label = "validation" if summary["best_by"].startswith("validation_") else "test", metrics[0].label
    is_done, is_best = summary["status"] == "done", summary["best"]["round"] == summary["final"]["round"]
    notes = ["the model that is saved"] if is_done else []
    notes += [f"with the highest {part} {label}"] if is_best else []
    best_notes = [f"the highest {part} {label}"] + (["so not for reporting"] if part == "test" else [])
    # Test rows must not choose the model, so that only validation rows can.
    how = "--keep best" if part == "validation" else "with validation rows --keep best"
    best_notes += [f"not saved: {how} would save it"] if is_done else []
    rounds = [f"{summary['visits']} client visits", f"{summary['absences']} absences"]
    if summary["scoring_rounds"]:
        rounds.append(describe_scoring_rounds(summary["rounds"], summary["scoring_rounds"]))
    facts = {
        "method": f"{summary['method']}, seed {summary['seed']}",
        "final" if is_done else "latest": _describe_quality(summary["final"], metrics, notes),
        **({} if is_best else {f"best on {part}": _describe_quality(summary["best"], metrics, best_notes)}),
        "rounds": f"{summary['rounds']} ({', '.join(rounds)})",
        "traffic": f"{format_bytes(summary['bytes_up'])} up, {format_bytes(summary['bytes_down'])} down",
        "seconds": f"{summary['seconds']:.1f}",
    }
    if is_done and is_reversed(summary["final"].get("auc")):
        facts["warning"] = REVERSED[0].upper() + REVERSED[1:]
    if "stopped_early" in summary:
        facts["status"] = f"done, stopped early: {summary['stopped_early']}"
    if summary.get("client_auc"):
        facts["sites"] = describe_sites(summary["client_auc"])
    return facts


def _describe_privacy(summary: dict[str, Any]) -> dict[str, str]:
    """What a private run has spent, which noise it adds, what counts as public, and what it leaves out."""
    guarantee = summary["privacy"]
    records = [{"epsilon": summary["epsilon"]}] if "epsilon" in summary else []
    bands = guarantee["bands"]
    noise = f"noise multiplier {guarantee['noise_multiplier']:.4g}, {bands} band{'s' * (bands > 1)}"
    alone = ", ".join(f"{name} {epsilon:.3g}" for name, epsilon in guarantee["epsilon_alone"].items())
    facts = {
        "privacy": f"{describe_spending(guarantee, records)}; {noise}; at the end each part alone: {alone}",
        "public": ", ".join(guarantee["public"]),
    }
    if "not_released" in summary:
        facts["left out"] = "; ".join(f"{name}: {reason}" for name, reason in summary["not_released"].items())
    return facts


def describe_sites(client_auc: Mapping[str, float | None]) -> str:
    """The sites with the lowest and the highest AUC, and how many have none.

    >>> describe_sites({"a": 0.91234, "b": None, "c": 0.7, "d": 1.0})
    'AUC from 0.7000 (c) to 1.0000 (d), median 0.9123; 1 of 4 sites has no AUC: its test rows are all of one class'
    """
    ranked = sorted((value, site) for site, value in client_auc.items() if value is not None)
    without, sites = len(client_auc) - len(ranked), len(client_auc)
    text = "no site has test rows of both classes"
    if ranked:
        (low, worst), (high, best) = ranked[0], ranked[-1]
        text = f"AUC from {low:.4f} ({worst}) to {high:.4f} ({best}), median {median(value for value, _ in ranked):.4f}"
    if ranked and without:
        verb, whose = ("has", "its test rows are") if without == 1 else ("have", "their test rows are each")
        text += f"; {without} of {sites} sites {verb} no AUC: {whose} all of one class"
    return text


def _print_sites(client_auc: Mapping[str, float | None]) -> None:
    """Every site with its AUC, the worst first; those without one come last."""
    table = Table("site", "AUC", box=None, padding=(0, 1), pad_edge=False)
    for site, value in sorted(client_auc.items(), key=lambda item: (item[1] is None, item[1] or 0.0, item[0])):
        table.add_row(escape(site), "-" if value is None else f"{value:.4f}")
    Console().print(table)


def print_comparison(comparison: Comparison, explains_rounds: bool = True) -> None:
    """Print caveats on the data, then the table of a comparison or sweep with its caption."""
    _print_caveats(comparison.run_folders())
    table = _tabulate_comparison(comparison, explains_rounds).fit_width(Console().width)
    Console().print(table.to_rich())
    if table.caption:
        Console().print(table.caption)
    for line in describe_winner(comparison):
        Console().print(line, soft_wrap=True, markup=False, highlight=False)


def describe_winner(comparison: Comparison) -> list[str]:
    """The command that trains the best setting of a sweep again; nothing before a run is done."""
    if not comparison.sweep:
        return []
    best = rank_settings(comparison.run_folders(), comparison.seeds_per_setting()).settings[0]
    folder = next((run for setting, run in comparison.run_folders() if setting == best.setting and run.done), None)
    if folder is None:
        return []
    command = ["fedauc", "run", "--config", str(folder.path / "config.json"), "--out", f"{comparison.path}-best"]
    return [f"Train the best setting again: {shlex.join(command)}"]


def write_comparison(comparison: Comparison) -> None:
    """Write `table.md`, and for a comparison of methods the learning curves; print the table."""
    folders, table = list(comparison.run_folders()), _tabulate_comparison(comparison)
    text = "".join(f"{caveat}\n\n" for caveat in list_caveats(folders)) + table.to_markdown()
    if comparison.sweep:
        text += "".join(f"\n{line}\n" for line in (table.caption, *describe_winner(comparison)))
    write_atomically(comparison.path / "table.md", text.encode())
    print_comparison(comparison, explains_rounds=False)
    if not comparison.sweep:
        write_curves(folders, comparison.path / "curves.png")
        Console().print(f"Curves: {comparison.path / 'curves.png'}", soft_wrap=True)


def _tabulate_comparison(comparison: Comparison, explains_rounds: bool = True) -> TextTable:
    if comparison.sweep:
        return tabulate_settings(rank_settings(comparison.run_folders(), comparison.seeds_per_setting()))
    return tabulate_methods(compare_methods(comparison.run_folders()), explains_rounds)


def _describe_quality(quality: dict[str, Any], metrics: Sequence[Metric], notes: Sequence[str] = ()) -> str:
    parts = []
    for metric in metrics:
        value, *interval = (quality[column] for column in metric.columns)
        if value is not None:
            ends = f" [{interval[0]:.4f}, {interval[1]:.4f}]" if interval and interval[0] is not None else ""
            parts.append(f"{metric.label} {value:.4f}{ends}")
    if not parts:
        parts.append(f"{metrics[0].label} unknown, because noise hides it")
    rounds = quality["round"] + 1
    remark = f" ({', '.join(notes)})" if notes else ""
    return f"test {', '.join(parts)}, after {rounds} round{'s' * (rounds > 1)}{remark}"


def is_reversed(auc: float | None) -> bool:
    """Whether a test AUC says that the model ranks the wrong way round."""
    return auc is not None and auc < 0.5


def _format_metric(value: float | None) -> str:
    return "-" if value is None else format_share(value, 3)


def _print_caveats(folders: Iterable[tuple[str, RunFolder]]) -> None:
    for caveat in list_caveats(folders):
        Console().print(caveat, markup=False, highlight=False)
