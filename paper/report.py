"""The page of results: `results.md.jinja` filled with what the records say; no result in it is written by hand."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jinja2
import pandas as pd

from fedauc.discovery import lookup
from fedauc.experiments.config import Config
from fedauc.reports.tables import format_share
from paper import findings, formatting, table_specs
from paper.builder import Cell, Table, TableBuilder
from paper.figures import collect_panels, draw_curves, draw_differences
from paper.findings import Comparison, Finding, PublishedGap
from paper.records import Record, RecordStore
from paper.scales import Scale
from paper.significance import FEWEST_EXAMPLES
from paper.table_specs import FRAUD, PUBLISHED, TABLES, Column, build_tables, cell_configs, list_cells
from paper.tuning import TuningChoice, TuningJob, grid_candidates

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES = "figures"
"""The folder of figures beside the page."""


class Page(NamedTuple):
    """The text, its figures by file name, and whether any run has finished."""

    text: str
    figures: Mapping[str, Callable[[], Figure]]
    has_runs: bool = True


def build_page(store: RecordStore, scale: Scale, seeds: Sequence[int], names: Sequence[str] = TABLES) -> Page:
    """The page for the named tables, as far as they have finished runs."""
    report = Report(TableBuilder(store, scale, seeds), names)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"markdown": formatting.to_markdown, "signed": formatting.format_difference}
    environment.filters["share"] = format_share
    text = environment.get_template("results.md.jinja").render(
        report=report, scale=scale, fmt=formatting, cmp=findings, specs=table_specs, fewest_examples=FEWEST_EXAMPLES
    )
    return Page(text, report.figures, bool(report.tables))


class Report:
    """What the template asks for; `tables` has every table with a finished run that no earlier table shows."""

    def __init__(self, builder: TableBuilder, names: Sequence[str]) -> None:
        self.builder, self._scale = builder, builder.scale
        specs = build_tables(self._scale)
        self.every_table = [builder.build(lookup("table", name, specs)) for name in names]
        self.tables: dict[str, Table] = {}
        self.runs: dict[Config, Record] = {}
        for table in self.every_table:
            has_own_runs = table.spec.kind == "traffic" or table.runs.keys() - self.runs.keys()
            if has_own_runs and (finished := table.keep_finished()).spec.rows:
                self.tables[table.name] = finished
                self.runs |= table.runs

    def read_facts(self) -> dict[str, tuple[str, int]]:
        """By dataset, the note of its first finished run, and the number of positives to test on."""
        facts: dict[str, tuple[str, int]] = {}
        for cell in [cell for table in self.tables.values() for cell in list_cells(table.spec)]:
            if cell.column.dataset not in facts:
                records = [record for case in self.builder.find_records(cell) for record in case]
                record = next((record for record in records if record and record.data), None)
                ranks = self.builder.store.load_ranks(record.config) if record else None
                if record and ranks:
                    facts[cell.column.dataset] = record.data, int(ranks.labels.sum())
        return facts

    @property
    def auc_tables(self) -> list[Table]:
        """The tables that show AUCs."""
        return [table for table in self.tables.values() if table.spec.kind != "traffic"]

    @functools.cached_property
    def figures(self) -> dict[str, Callable[[], Figure]]:
        """What draws each figure, by file name."""
        drawings: dict[str, Callable[[], Figure]] = {}
        if answer := [pair for pair in self.compare_methods("table1") if pair.column.dataset in PUBLISHED]:
            drawings[f"{self._scale.name}-answer.png"] = functools.partial(draw_differences, answer)
        for name, table in self.tables.items():
            panels = collect_panels(table) if name in ("table1", "creditcard", *findings.JUDGES) else []
            if panels:
                drawings[f"{self._scale.name}-{name}.png"] = functools.partial(draw_curves, panels)
        return drawings

    def figure_path(self, name: str) -> str:
        """The path of a figure beside the page; nothing if there is none."""
        file = f"{self._scale.name}-{name}.png"
        return f"{FIGURES}/{file}" if file in self.figures else ""

    def split_columns(self, name: str, published: bool = True) -> Table | None:
        """A table with the columns on the paper's data, or with the others; None if there are none."""
        for table in self.find_tables(name):
            columns = [column for column in table.spec.columns if (column.dataset in PUBLISHED) == published]
            return table._replace(spec=replace(table.spec, columns=tuple(columns))) if columns else None
        return None

    def find_tables(self, *names: str) -> list[Table]:
        """Those of the named tables that have finished runs."""
        return [self.tables[name] for name in names if name in self.tables]

    def _list_columns(self, name: str) -> Iterator[tuple[Column, dict[str, Cell]]]:
        for table in self.find_tables(name):
            yield from ((column, table.column_cells(column.name)) for column in table.spec.columns)

    def compare_methods(self, *names: str, between_own: bool = False) -> list[Comparison]:
        """The comparisons of some tables that have finished."""
        return [pair for table in self.find_tables(*names) for pair in findings.list_comparisons(table, between_own)]

    def list_gaps(self, *names: str) -> list[PublishedGap]:
        """Every finished row of some tables less the paper's number, the smallest first."""
        return sorted(findings.list_published_gaps(self.find_tables(*names)), key=lambda gap: gap.value)

    def list_best_rows(self, name: str, number: str = "auc") -> Iterator[str]:
        """The best row of each column on real data in which all runs of at least two rows have finished."""
        for column, rows in self._list_columns(name):
            means = {
                row: spread.mean for row, cell in rows.items() if cell.complete and (spread := getattr(cell, number))
            }
            if column.dataset in (*PUBLISHED, *FRAUD) and len(means) > 1:
                best = max(means, key=lambda row: means[row])
                missing = ", ".join(row for row in rows if row not in means)
                without = f"; {missing} not finished" if missing else ""
                yield f"{column.name}: {best} {format_share(means[best], 4)} (of {len(means)} rows{without})"

    def find_effects(self, name: str) -> list[Finding]:
        """What a figure says about what it varies."""
        return [finding for table in self.find_tables(name) for finding in findings.list_findings(table)]

    def round_ratios(self, method: str) -> dict[str, list[str]]:
        """Rounds until a method nearly reaches the common AUC, as a multiple of the first row's, with the columns."""
        ratios = dict[str, list[str]]()
        for column, cells in self._list_columns("traffic"):
            first = next(iter(cells.values())).nearly_reached
            reach = cells[method].nearly_reached if method in cells else None
            if first and reach:
                bound = "at most " if reach.at_first_evaluation else ""
                ratios.setdefault(f"{bound}{reach.rounds / first.rounds:.2f}", []).append(column.name)
        return ratios

    # ------------------------------------------------------------------------------------------------------ settings

    @functools.cached_property
    def choices(self) -> dict[TuningJob, TuningChoice]:
        """The settings that were chosen for the rows shown."""
        jobs = dict.fromkeys(
            TuningJob.for_cell(cell) for table in self.tables.values() for cell in list_cells(table.spec)
        )
        return {job: choice for job in jobs if (choice := self.builder.choices.find_choice(job))}

    def choice_frame(self) -> pd.DataFrame:
        """Chosen settings, the size of their grid, and what the choice cost."""
        rows = []
        for job, choice in self.choices.items():
            settings = ", ".join(f"{name} {value}" for name, value in choice.settings.items()) or "defaults"
            grid_size = len(grid_candidates(job.row, choice.grid))
            cost = (choice.runs, choice.cycles, f"{choice.seconds:.0f}")
            rows.append([job.row.name, settings, choice.grid, grid_size, *cost])
        columns = ["row", "chosen", "grid", "candidates", "runs", "cycles", "seconds"]
        return pd.DataFrame(rows, index=[job.column or job.dataset for job in self.choices], columns=columns)

    def chosen_rates(self) -> pd.DataFrame:
        """How many learning rates each tuned row had, and whether it chose an end of the grid, which may be too short.

        With two learning rates, each is an end.
        """
        lines = []
        for job, choice in self.choices.items():
            rates = [candidate.get("learning-rate") for candidate in grid_candidates(job.row, choice.grid)]
            chosen, where = choice.settings.get("learning-rate"), job.column or job.dataset
            point = job.name if job.column else ""
            lines.append((where, job.row.name, point, len(set(rates)), chosen == rates[0], chosen == rates[-1]))
        return pd.DataFrame(lines, columns=["column", "row", "point", "rates", "largest", "smallest"])

    def search_counts(self) -> dict[str, int]:
        """By method, the full-length runs with which the fixed settings of image models were found."""
        runs = set[Config]()
        for table in self.find_tables("schedules", "batches"):
            for cell in list_cells(table.spec):
                if table.cells[cell.row.name, cell.column.name].finished:
                    runs |= {config for case in cell_configs(self._scale, cell, {}, ()) for config in case}
        return dict(sorted(Counter(config.recipe.method for config in runs).items()))

    # ------------------------------------------------------------------------------------------- what ran and what not

    def missing_runs(self) -> dict[str, str]:
        """By command, the columns without a run, with some of their runs, or still to be tuned."""
        missing = {}
        for table in [table for table in self.every_table if table.spec.kind != "traffic"]:
            columns = []
            for column in table.spec.columns:
                cells = table.column_cells(column.name).values()
                done = sum(cell.finished + cell.stopped for cell in cells)
                expected = sum(cell.expected for cell in cells)
                tuning = ", to be tuned" if any(cell.borrowed_settings for cell in cells) else ""
                if done < expected or tuning:
                    columns.append(f"{column.name} ({done} of {expected}{tuning})" if done else column.name)
            if columns:
                missing[table.name] = ", ".join(columns)
        return missing

    def list_versions(self) -> list[str]:
        """The versions and commits of the runs shown."""
        texts = set()
        for record in self.runs.values():
            known = ", ".join(f"{name} {value}" for name, value in record.versions.items() if value)
            texts.add(f"{known}; commit {record.commit or 'unknown'}")
        return sorted(texts)
