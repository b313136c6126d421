"""The page of results: `results.md.jinja` filled with what the records say; no result in it is written by hand."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
import pandas as pd

from fedauc.discovery import lookup
from fedauc.experiments.config import Config
from fedauc.reports.tables import format_share
from paper import findings, ingredients, table_specs, tables
from paper.discarded_runs import DiscardedRuns, read_discarded
from paper.figures import collect_panels, draw_curves, draw_differences
from paper.findings import JUDGES, Comparison, Finding, correct_comparisons, list_comparisons, list_findings
from paper.records import Record, RecordStore
from paper.scales import Scale
from paper.significance import FEWEST_EXAMPLES
from paper.table_specs import FRAUD, OURS, PUBLISHED, TABLES, build_tables, list_cells
from paper.tables import Table, TableBuilder
from paper.tuning import TuningChoice, TuningJob, grid_candidates

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Report:
    """What the template asks for; `tables` has every table with a finished run that no earlier table shows."""

    def __init__(self, store: RecordStore, scale: Scale, seeds: Sequence[int], names: Sequence[str] = TABLES) -> None:
        self.store, self.scale, self.builder = store, scale, TableBuilder(store, scale, seeds)
        specs = build_tables(scale)
        self.every_table = [self.builder.build(lookup("table", name, specs)) for name in names]
        self.tables: dict[str, Table] = {}
        self.runs: dict[Config, Record] = {}
        for table in self.every_table:
            has_own_runs = table.spec.kind == "traffic" or table.runs.keys() - self.runs.keys()
            if has_own_runs and (finished := table.keep_finished()).spec.rows:
                self.tables[table.name] = finished
                self.runs |= table.runs
        self.auc_tables = [table for table in self.tables.values() if table.spec.kind != "traffic"]
        self.effects = {name: list[Finding]() for name in JUDGES}
        self.effects |= {table.name: list_findings(table) for table in self.find_tables(*JUDGES)}

    @functools.cached_property
    def text(self) -> str:
        """The page in Markdown."""
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        environment.filters |= {"markdown": tables.to_markdown, "signed": findings.format_difference}
        environment.filters["share"] = format_share
        modules = {"tables": tables, "findings": findings, "ingredients": ingredients, "specs": table_specs}
        numbers = {"fewest_examples": FEWEST_EXAMPLES}
        return environment.get_template("results.md.jinja").render(report=self, scale=self.scale, **modules, **numbers)

    @functools.cached_property
    def figures(self) -> dict[str, Callable[[], Figure]]:
        """What draws each figure, by its path beside the page."""
        drawings: dict[str, Callable[[], Figure]] = {}
        if answer := [pair for pair in self.compare_methods("table1") if pair.column.dataset in PUBLISHED]:
            drawings[self.figure_path("answer")] = functools.partial(draw_differences, answer)
        for table in self.find_tables("table1", "creditcard", *JUDGES):
            if panels := collect_panels(table):
                drawings[self.figure_path(table.name)] = functools.partial(draw_curves, panels)
        return drawings

    def figure_path(self, name: str) -> str:
        """The path of a figure beside the page."""
        return f"figures/{self.scale.name}-{name}.png"

    def find_tables(self, *names: str) -> list[Table]:
        """Those of the named tables that have finished runs."""
        return [self.tables[name] for name in names if name in self.tables]

    def split_columns(self, name: str, published: bool = True) -> Table | None:
        """A table with the columns on the paper's data, or with the others; None if there are none."""
        for table in self.find_tables(name):
            columns = [column for column in table.spec.columns if (column.dataset in PUBLISHED) == published]
            return table._replace(spec=replace(table.spec, columns=tuple(columns))) if columns else None
        return None

    def compare_methods(self, *names: str, between_own: bool = False) -> list[Comparison]:
        """The comparisons of some tables that have finished, each corrected for all tests of its table."""
        pairs = [
            pair
            for table in self.find_tables(*names)
            for pair in correct_comparisons(list(list_comparisons(table, between_own=True)))
        ]
        return [pair for pair in pairs if between_own or pair.baseline not in OURS]

    def list_best_rows(self, name: str, number: str = "auc") -> Iterator[str]:
        """The best row of each column on real data in which all runs of at least two rows have finished."""
        for table in self.find_tables(name):
            for column in [column for column in table.spec.columns if column.dataset in (*PUBLISHED, *FRAUD)]:
                cells = table.column_cells(column.name)
                finished = {row: cell for row, cell in cells.items() if cell.complete and number in cell.numbers}
                means = {row: cell.numbers[number].mean for row, cell in finished.items()}
                if len(means) > 1:
                    best = max(means, key=lambda row: means[row])
                    missing = ", ".join(row for row in cells if row not in means)
                    without = f"; {missing} not finished" if missing else ""
                    yield f"{column.name}: {best} {format_share(means[best], 4)} (of {len(means)} rows{without})"

    def round_ratios(self, method: str) -> dict[str, list[str]]:
        """Rounds until a method nearly reaches the common AUC, as a multiple of the first row's, with the columns."""
        ratios = dict[str, list[str]]()
        for table in self.find_tables("traffic"):
            for column in [column.name for column in table.spec.columns]:
                cells, target = table.column_cells(column), table.find_target(column)
                if target is not None and method in cells:
                    reach, first = (
                        cells[row].find_reach(target - tables.NEARLY) for row in (method, next(iter(cells)))
                    )
                    if reach and first:
                        bound = "at most " if reach is cells[method].curve[0] else ""
                        ratios.setdefault(f"{bound}{reach.rounds / first.rounds:.2f}", []).append(column)
        return ratios

    def find_learning_rates(self, name: str, row: str) -> dict[str, str]:
        """The learning rates that a row of a table was given by its tuning, by column."""
        jobs = {
            cell.column.name: TuningJob.for_cell(cell)
            for table in self.find_tables(name)
            for cell in list_cells(table.spec)
            if cell.row.name == row
        }
        settings = {column: self.builder.choices.chosen_settings(job) for column, job in jobs.items()}
        return {column: options["learning-rate"] for column, options in settings.items() if "learning-rate" in options}

    def read_facts(self) -> dict[str, tuple[str, int]]:
        """By dataset, the note of its first finished run, and the number of positives to test on."""
        facts: dict[str, tuple[str, int]] = {}
        for table in self.tables.values():
            for spec in list_cells(table.spec):
                runs = table.cells[spec.row.name, spec.column.name].runs
                config = next((config for config, record in runs.items() if record.data), None)
                if config and spec.column.dataset not in facts and (ranks := self.store.load_ranks(config)):
                    facts[spec.column.dataset] = runs[config].data, int(ranks.labels.sum())
        return facts

    @functools.cached_property
    def discarded(self) -> list[DiscardedRuns]:
        """Runs that were made earlier and whose records are no longer kept; those of other scales are not known."""
        return read_discarded() if self.scale.published else []

    def make_discarded_frame(self) -> pd.DataFrame:
        """The discarded runs, a row for each method and a column for each dataset."""
        counts = pd.DataFrame(self.discarded).pivot_table("runs", "method", "dataset", "sum", fill_value=0)
        return counts.assign(all=counts.sum(axis=1)).astype(int).astype(str)

    @functools.cached_property
    def choices(self) -> dict[TuningJob, TuningChoice]:
        """The settings that were chosen for the rows shown."""
        jobs = [TuningJob.for_cell(cell) for table in self.tables.values() for cell in list_cells(table.spec)]
        return {job: choice for job in jobs if (choice := self.builder.choices.find_choice(job))}

    def make_choice_frame(self) -> pd.DataFrame:
        """Chosen settings, the size of their grid and what the choice cost; `point` is the name of a figure's point.

        A row that chose the `largest` or the `smallest` of its learning rates may have had a grid that was too short.
        """
        lines = []
        for job, choice in self.choices.items():
            settings = ", ".join(f"{name} {value}" for name, value in choice.settings.items()) or "defaults"
            cost = (choice.runs, choice.cycles, f"{choice.seconds:.0f}")
            rates = [candidate.get("learning-rate") for candidate in grid_candidates(job.row, choice.grid)]
            is_end = [choice.settings.get("learning-rate") == rate for rate in (rates[0], rates[-1])]
            point = job.name if job.column else ""
            lines.append([job.row.name, settings, choice.grid, len(rates), *cost, point, len(set(rates)), *is_end])
        shown = ["row", "chosen", "grid", "candidates", "runs", "cycles", "seconds"]
        columns = [*shown, "point", "rates", "largest", "smallest"]
        return pd.DataFrame(lines, index=[job.column or job.dataset for job in self.choices], columns=columns)

    def list_withdrawn(self, name: str) -> Iterator[str]:
        """A caveat for each point of a figure that did not train, with the learning rates that it was tuned over."""
        for table in self.find_tables(name):
            for cell_spec in list_cells(table.spec):
                cell = table.cells[cell_spec.row.name, cell_spec.column.name]
                if table.spec.kind != "figure" or not cell.auc or not findings.is_unstable(cell):
                    continue
                caveat = f"Withdrawn: {cell_spec.column.name} ({cell_spec.row.name}), whose AUC of "
                caveat += f"{tables.format_spread(cell.auc)} varies by more than "
                caveat += f"{format_share(findings.UNSTABLE_DEVIATION, 2)} over runs."
                choice = self.builder.choices.find_or_inherit(TuningJob.for_cell(cell_spec))
                if choice and choice.trials:
                    tried = {trial["settings"]["learning-rate"]: trial["validation_auc"] for trial in choice.trials}
                    results = [f"{rate} ({format_share(auc, 4)})" for rate, auc in tried.items() if auc is not None]
                    caveat += (
                        f" Its learning rate {choice.settings['learning-rate']} was chosen by validation AUC among "
                    )
                    caveat += f"{', '.join(results)}."
                yield caveat

    def count_searches(self) -> dict[str, int]:
        """By method, the full-length runs with which the fixed settings of image models were found."""
        searches = self.find_tables("schedules", "batches")
        runs = {config for table in searches for cell in table.cells.values() if cell.finished for config in cell.runs}
        return dict(sorted(Counter(config.recipe.method for config in runs).items()))

    def list_missing_runs(self) -> dict[str, str]:
        """By command, the columns without a run, with some of their runs, or still to be tuned."""
        missing = dict[str, list[str]]()
        for table in [table for table in self.every_table if table.spec.kind != "traffic"]:
            for column in [column.name for column in table.spec.columns]:
                cells = table.column_cells(column).values()
                done = sum(cell.finished + cell.stopped for cell in cells)
                expected = sum(cell.expected for cell in cells)
                tuning = ", to be tuned" if any(cell.borrowed_settings for cell in cells) else ""
                if done < expected or tuning:
                    count = f" ({done} of {expected}{tuning})" if done else ""
                    missing.setdefault(table.name, []).append(column + count)
        return {name: ", ".join(columns) for name, columns in missing.items()}

    def list_versions(self) -> list[str]:
        """The versions and commits of the runs shown."""
        texts = set()
        for record in self.runs.values():
            known = ", ".join(f"{name} {value}" for name, value in record.versions.items() if value)
            texts.add(f"{known}; commit {record.commit or 'unknown'}")
        return sorted(texts)
