"""The parts of the page of results, each made from filled sheets."""

from __future__ import annotations

import inspect
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fedauc.experiments.config import Config
from fedauc.reports.caveats import caveat_sentence, has_caveat
from paper.claims import CLAIMS, claims
from paper.halving import grid_candidates
from paper.orderings import Shown, gained, gains, matrix, orderings, overview
from paper.records import Record
from paper.scales import Scale
from paper.table_specs import PUBLISHED, TABLES, TableSpec, cell_configs, list_cells
from paper.tables import (
    REACHED,
    borrowed,
    by_case,
    grid,
    markdown,
    precision_text,
    rows,
    selected_text,
    validation_text,
)
from paper.testing import LEAST
from paper.tuning import ChoiceStore, TuningChoice, TuningJob

FIGURES = "figures"
"""The folder of pictures beside the page."""

ORDERED = (
    "Each CyCp method against each baseline where all runs of both are done: above or below if the mean AUCs differ "
    f"with p < .05, otherwise no difference found. Test parts with fewer than {LEAST} positives are not tested. "
    "P-values are not corrected for their number. The sizes of the differences are with each table."
)


class Facts(NamedTuple):
    """What is known of a dataset: the note of its runs, and the positives of its test part."""

    note: str
    positives: int

    @property
    def foreign(self) -> bool:
        """Whether the rows only stand in for others."""
        return has_caveat(self.note)


def prose(text: str) -> str:
    """A paragraph."""
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False) + "\n"


def drawn(sheet: TableSpec) -> bool:
    """Whether the sheet's curves are shown."""
    return sheet.name in ("table1", "creditcard", *CLAIMS)


def lacking(sheets: Sequence[Shown]) -> Iterator[str]:
    """What has not run, or not to the end, by table; the views of other tables' runs are left out."""
    lines = []
    for sheet, filled in sheets:
        found = []
        for column in sheet.columns if sheet.view == "auc" else ():
            mine = [filled[entry.name, column.name] for entry in sheet.rows]
            done, asked = (sum(getattr(cell, what) for cell in mine) for what in ("done", "asked"))
            done += sum(cell.stopped for cell in mine)
            tune = ", to be tuned" if any(cell.borrowed for cell in mine) else ""
            if done < asked or tune:
                found.append(f"{column.name} ({done} of {asked}{tune})" if done else column.name)
        if found:
            lines.append([f"`python -m paper {sheet.name}`", ", ".join(found)])
    if lines:
        yield "## Not run\n"
        yield prose(
            "Columns without a run, with some of their runs, or still to be tuned, and the command that goes on with "
            "them; `--columns` names some of them, and those of stand-ins and card fraud must be named. Image models "
            "want a GPU (`--device cuda`). What has a record is not run again."
        )
        yield grid([["command", "columns"], *lines])


def brief(lines: Iterable[str]) -> Iterator[str]:
    """What the page comes to, where it comes to something."""
    if found := list(lines):
        yield "## In short\n"
        yield "".join(map(item, found))


def ordered(shown: Sequence[Shown]) -> Iterator[str]:
    """Which method is above which, over all tables."""
    mine = [each for each in shown if each.sheet.view == "auc"]
    if any(list(orderings(each)) for each in mine):
        yield "## Orderings\n"
        yield prose(ORDERED)
        yield grid(overview(mine))
        if found := gains(mine):
            yield grid(gained(found))


def section(shown: Shown, facts: Mapping[str, Facts], picture: str | None, about: bool = True) -> Iterator[str]:
    """A sheet: what it is about at the paper's scale, its table, its differences, what it claims, its curves."""
    sheet = shown.sheet
    yield f"## {sheet.title} (`{sheet.name}`)\n"
    yield from map(prose, (inspect.getdoc(TABLES[sheet.name]) or "").split("\n\n") if about else ())
    if sheet.view == "traffic":
        yield prose(REACHED)
    theirs = tuple(column for column in sheet.columns if column.dataset in PUBLISHED)
    if theirs:
        yield markdown(replace(sheet, columns=theirs), shown.filled)
    if others := tuple(column for column in sheet.columns if column not in theirs):
        yield from map(prose, _foreign(sheet, facts))
        yield markdown(replace(sheet, columns=others), shown.filled)
    if sheet.name.startswith("table") and any(cell.selected for cell in shown.filled.values()):
        yield prose("Test AUC where a run's validation AUC was highest, mean ± standard deviation over runs:")
        yield grid(rows(sheet, shown.filled, selected_text))
    if sheet.show_validation:
        yield prose("Validation AUC after the last cycle:")
        yield grid(rows(sheet, shown.filled, validation_text))
    if sheet.show_precision:
        yield prose("Average precision after the last cycle, mean ± standard deviation over runs:")
        yield grid(rows(sheet, shown.filled, precision_text))
    if any(column.average_cases for column in sheet.columns):
        yield prose("By case, mean over runs:")
        yield grid(by_case(sheet, shown.filled))
    found = list(orderings(shown, own=True)) if sheet.view == "auc" and not sheet.is_figure else []
    if found:
        paper = "; in brackets the paper's" if any(each.paper is not None for each in found) else ""
        yield prose(f"Differences of mean AUC, CyCp method less baseline{paper}:")
        yield grid(matrix(found))
    yield from map(prose, borrowed(shown.filled))
    if sheet.name in CLAIMS and (told := claims(shown)):
        yield "".join(item(f"{where}: {claim.said}.") for where, claim in told.items())
    if picture:
        yield f"![Test AUC over rounds]({FIGURES}/{picture})\n"


def _foreign(sheet: TableSpec, facts: Mapping[str, Facts]) -> Iterator[str]:
    """A warning for each column on rows that only stand in."""
    for column in sheet.columns:
        known = facts.get(column.dataset)
        if known and known.foreign:
            few = " These are too few to say anything." if known.positives < LEAST else ""
            yield caveat_sentence(column.name, known.note, known.positives) + few


def data(facts: Mapping[str, Facts]) -> Iterator[str]:
    """What the runs were trained on."""
    yield "## Data\n"
    yield grid([["dataset", "rows", "test positives"], *([name, *map(str, known)] for name, known in facts.items())])


def tuned(shown: Sequence[Shown], choices: ChoiceStore, scale: Scale) -> Iterator[str]:
    """What was chosen, out of how many candidates, at what cost."""
    jobs = dict.fromkeys(TuningJob.for_cell(cell) for each in shown for cell in list_cells(each.sheet))
    chosen = {job: found for job in jobs if (found := choices.find_choice(job))}
    trained, cycles, seconds = choices.total_cost(chosen)
    yield "## Tuning\n"
    yield prose(
        "Successive halving on validation AUC, once per dataset and row, on labels as they are; a dataset's rows "
        "that are tuned over one grid have the same cycles to spend, less what their candidates do not divide. The "
        "grid `steps` has learning rates .1, .01 and .001, with λ = 1, .1, .01, .001 for the sigmoid loss, proximal "
        "weights .1, .01, .001 for the minimax methods and amplifications 1.5, 2, 3 where there is one; `wide` has a "
        "learning rate of 1 too, `wider` also 10 and 100; `fine` has 1, .3, .03 and .003 beside those of "
        "`steps`, `long` the same less its ends, with the first two of the other values. `full` has two learning "
        "rates, the method's own and the next smaller, at λ = 1, proximal weight .01 and amplification 1.5, in "
        "runs of full length; `lower` has one that is smaller still, for points of figures, which are tuned one by "
        f"one, on images. In all {trained} runs, {cycles} cycles, {seconds:.0f} seconds. {_ends(chosen)}"
    )
    yield from map(prose, _searched(shown, scale))
    lines = [["dataset", "row", "chosen", "grid", "candidates", "runs", "cycles", "seconds"]]
    for job, found in chosen.items():
        values = ", ".join(f"{name} {value}" for name, value in found.settings.items()) or "defaults"
        cost = [
            str(len(grid_candidates(job.entry, found.grid))),
            str(found.runs),
            str(found.cycles),
            f"{found.seconds:.0f}",
        ]
        lines.append([job.column or job.dataset, job.entry.name, values, found.grid, *cost])
    yield grid(lines)


def _searched(shown: Sequence[Shown], scale: Scale) -> Iterator[str]:
    """How many whole runs each method's settings on images were found with, beside its row's two learning rates."""
    found = set[tuple[str, Config]]()
    for sheet, filled in shown:
        for cell in list_cells(sheet) if sheet.name in ("schedules", "batches") else ():
            if filled[cell.row.name, cell.column.name].done:
                found |= {(cell.row.method, config) for case in cell_configs(scale, cell, {}, ()) for config in case}
    if found:
        counted = Counter(method for method, _ in found)
        listed = ", ".join(f"{method} {counted[method]}" for method in sorted(counted))
        yield (
            "The settings of image models that are not tuned by row were found with whole runs on CIFAR-10, class 0, "
            f"seed 0, by validation AUC (`schedules` and `batches`): {listed}; none for the other "
            "rows, which take them over, and none on other images. Some of the AUC methods' came after their test AUC "
            "had been seen to be below CyCp-FedAvg's (`alike`)."
        )


def _ends(chosen: Mapping[TuningJob, TuningChoice]) -> str:
    """How often the grid may have been too short; of two learning rates each is an end."""
    wide, smallest, largest, lowest, two = 0, 0, dict[str, list[str]](), list[str](), list[bool]()
    for job, found in chosen.items():
        tried = [each.get("learning-rate") for each in grid_candidates(job.entry, found.grid)]
        if len(set(tried)) > 2:
            wide, smallest = wide + 1, smallest + (found.settings.get("learning-rate") == tried[-1])
            if found.settings.get("learning-rate") == tried[0]:
                largest.setdefault(job.column or job.dataset, []).append(job.entry.name)
            elif found.settings.get("learning-rate") == tried[-1] and job.column:
                lowest.append(job.name)
        elif len(set(tried)) == 2:
            two.append(found.settings.get("learning-rate") == tried[0])
    listed = "; ".join(f"{dataset} ({', '.join(names)})" for dataset, names in largest.items())
    more = f", so that a larger one might do better: {listed}" if listed else ""
    points = f" (points of figures: {', '.join(lowest)})" if lowest else ""
    of = f"Of {wide} rows with more than two learning rates, {smallest} chose the smallest of their grid{points}"
    pairs = f" Of {len(two)} rows with two, {sum(two)} chose the larger." if two else ""
    return f"{of} and {sum(map(len, largest.values()))} the largest{more}.{pairs}"


def origin(records: Iterable[Record]) -> Iterator[str]:
    """The runs' time, versions and commits."""
    known = list(records)
    yield "## Runs\n"
    yield prose(f"{len(known)} runs, {sum(each.seconds for each in known):.0f} seconds of training and evaluation, on:")
    yield "".join(map(item, sorted(set(map(_versions, known)))))


def _versions(record: Record) -> str:
    known = ", ".join(f"{name} {value}" for name, value in record.versions.items() if value)
    return f"{known}; commit {record.commit or 'unknown'}"


def item(text: str) -> str:
    """A line of a list."""
    return (
        textwrap.fill(f"- {text}", 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False) + "\n"
    )
