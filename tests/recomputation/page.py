"""What docs/results.md must say: every table in its order, and every sentence that has a number of its own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t

from recomputation.differences import Interval, holm
from recomputation.effects import Effect, did_not_train, list_effects
from recomputation.records import FRAUD, OURS, REAL_DATA, Records, Run, Specs, make_key
from recomputation.tables import Cell, Column, Spread, Table

NEARLY = 0.02
USUAL = ("cycp-fedavg", *OURS, "cycp-fedavg-balanced")
POOLED = ("fedavg-pooled", "minimax-pooled", "pairwise-pooled", "balanced-pooled")

Lines = list[list[str]]
"""A table as text: its header, and its rows with their labels."""


class Outcome(NamedTuple):
    """A CyCp method against a baseline: 1, 0 or -1 if it is significantly better, neither or significantly worse."""

    table: str
    column: Column
    method: str
    baseline: str
    value: float
    test: Interval | None
    published: float | None
    corrected: float | None
    tests: int

    @property
    def sign(self) -> int | None:
        """The outcome of the test by itself; None if there is none."""
        return None if self.test is None else self.sign_at(self.test.p_value)

    def sign_at(self, p_value: float) -> int:
        """The outcome with another p-value."""
        return 0 if p_value >= 0.05 else 1 if self.value > 0 else -1


def share(value: float, digits: int = 4) -> str:
    """A number between 0 and 1 as the page writes it: without the zero before its point."""
    text = f"{value:.{digits}f}"
    return text[1:] if text.startswith("0.") else text


def signed(value: float) -> str:
    """A difference as the page writes it."""
    text = share(abs(round(value, 4)))
    return ("-" if round(value, 4) < 0 else "+") + text


def spread_text(spread: Spread | None) -> str:
    """A mean with its deviation, where there is one."""
    if spread is None:
        return "-"
    return share(spread.mean) + (f" ± {share(spread.deviation)}" if spread.values > 1 else "")


def bytes_text(count: float) -> str:
    """Three digits and a unit."""
    unit = 0
    while count >= 999.5 and unit < 4:
        count, unit = count / 1000, unit + 1
    return f"{count:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}"


def grid_lines(texts: dict[tuple[str, str], str], corner: str = "") -> Lines:
    """A table from texts by row and column, in the order of their first occurrence; a dash where there is none."""
    rows, columns = (list(dict.fromkeys(key[side] for key in texts)) for side in (0, 1))
    return [[corner, *columns], *([row, *(texts.get((row, column), "-") for column in columns)] for row in rows)]


def transpose(lines: Lines) -> Lines:
    """The same table with rows and columns exchanged."""
    return [list(line) for line in zip(*lines, strict=True)]


class Page:
    """The page that the records make."""

    def __init__(self, records: Records, specs: Specs) -> None:
        self.records, self.specs = records, specs
        self.every = {name: Table(name, specs, records) for name in specs.tables}
        self.shown: dict[str, Table] = {}
        self.runs: dict[str, Run] = {}
        for name, table in self.every.items():
            # A table whose runs are all in earlier ones would repeat them.
            if (table.kind == "traffic" or table.runs.keys() - self.runs.keys()) and table.shown()[0]:
                self.shown[name] = table
                self.runs |= table.runs
        names = [name for name in ("figure1", "intervals", "figure2", "figure3") if name in self.shown]
        self.effects = {name: list_effects(self.shown[name]) for name in names}

    # ---------------------------------------------------------------------------------------------------------- tables

    def tables(self) -> Iterator[Lines]:
        """Every table with results, in the order of the page."""
        yield self._means()
        yield from self._aucs("classes")
        yield from [*self._aucs("table1", [True]), self._numbers("table1", "selected"), self._differences("table1")]
        yield from [self._by_case("classes"), self._differences("classes")]
        yield from self._aucs("alike")
        yield from [self._gaps(), self._outcome_counts()]
        yield from [self._over_classes(), *self._aucs("all-classes"), self._by_case("all-classes")]
        yield from [self._differences("all-classes"), self._contrasts("all-classes")]
        yield from [*self._aucs("controls"), self._differences("controls"), self._contrasts("controls")]
        yield from [*self._aucs("as-printed"), self._contrasts("as-printed")]
        yield from self._aucs("table1", [False])
        yield from [self._traffic(True, NEARLY), self._traffic(False, NEARLY), self._savings("traffic", USUAL)]
        yield self._savings("traffic-pooled", POOLED)
        yield from [self._traffic(True, 0.0), self._traffic(False, 0.0)]
        for figure, effects in self.effects.items():
            yield self._effect_lines(effects)
            yield from self._aucs(figure)
            if figure == "figure1":
                yield from self._aucs("short-interval")
                yield from [self._differences("short-interval"), self._contrasts("short-interval")]
        yield from [*self._aucs("table2"), self._numbers("table2", "selected"), self._differences("table2")]
        yield from [*self._aucs("noise"), self._differences("noise")]
        yield from [*self._aucs("creditcard"), self._numbers("creditcard", "average_precision")]
        yield self._differences("creditcard")
        yield from [*self._aucs("surrogates"), self._differences("surrogates")]
        yield from self._aucs("ablation")
        yield from [*self._aucs("weightings"), self._differences("weightings"), self._contrasts("weightings")]
        yield from [*self._aucs("pools"), self._differences("pools"), self._contrasts("pools")]
        yield self._discarded()
        yield [["dataset", "row", "chosen", "grid", "candidates", "runs", "cycles", "seconds"], *self._choice_lines()]
        for name in ("schedules", "batches"):
            yield from [*self._aucs(name), self._numbers(name, "validation")]
        yield [["command", "columns"], *([f"`python -m paper {name}`", text] for name, text in self.missing().items())]
        yield [["dataset", "data", "test positives"], *self.facts()]

    def _columns(self, name: str, real: bool | None = None) -> list[Column]:
        columns = self.shown[name].shown()[1]
        return [column for column in columns if real is None or (column.dataset in REAL_DATA) == real]

    def _aucs(self, name: str, sides: Sequence[bool] = (True, False)) -> Iterator[Lines]:
        table = self.shown[name]
        for real in sides:
            columns = self._columns(name, real)
            texts = {
                (row.name, column.name): self._auc_text(table, row.name, column.name)
                for row in table.shown()[0]
                for column in columns
            }
            if texts:
                yield transpose(grid_lines(texts)) if table.kind == "figure" else grid_lines(texts)

    def _auc_text(self, table: Table, row: str, column: str) -> str:
        cell, published = table.cells[row, column], table.published.get((row, column))
        bracket = "" if published is None else f" [{share(published)}]"
        if cell.auc is None:
            return (f"stopped {cell.stopped} of {len(cell.slots)}" if cell.stopped else "-") + bracket
        stopped = f", {cell.stopped} stopped" if cell.stopped else ""
        part = "" if cell.complete else f" ({len(cell.finished)} of {len(cell.slots)}{stopped})"
        return f"{spread_text(cell.auc)}{cell.mark}{part}{bracket}"

    def _numbers(self, name: str, number: str) -> Lines:
        table = self.shown[name]
        rows, columns = table.shown()
        cells = {(row.name, column.name): table.cells[row.name, column.name] for row in rows for column in columns}
        return grid_lines({key: spread_text(cell.numbers.get(number)) for key, cell in cells.items()})

    def _means(self) -> Lines:
        table, texts = self.shown["table1"], dict[tuple[str, str], str]()
        for column in self._columns("table1", True):
            for row in table.shown()[0]:
                cell = table.cells[row.name, column.name]
                texts[f"{column.name}, here", row.name] = (share(cell.auc.mean) if cell.auc else "-") + cell.mark
                texts[f"{column.name}, paper", row.name] = share(table.published[row.name, column.name])
        ordered = dict(sorted(texts.items(), key=lambda item: item[0][0]))
        return grid_lines(ordered, "mean test AUC")

    def _by_case(self, name: str) -> Lines:
        table, texts = self.shown[name], dict[tuple[str, str], str]()
        for column in self._columns(name):
            for position, case in enumerate(column.cases):
                label = ", ".join([column.name, *(f"{option} {value}" for option, value in case.items())])
                for row in table.shown()[0]:
                    of_case = Cell([table.cells[row.name, column.name].cases[position]], False, False)
                    texts[label, row.name] = share(of_case.auc.mean) if of_case.auc else "-"
        return grid_lines(texts)

    def _over_classes(self) -> Lines:
        """The gains of each contrast of `all-classes` over the first five classes, the last five and all ten."""
        cells, lines = self.shown["all-classes"].cells, [["rows", "classes 0-4", "classes 5-9", "all 10"]]
        for pair in self.shown["all-classes"].text["contrasts"]:
            of_rows = []
            for row in pair.split(" minus "):
                of_cases = [Cell([case], False, False).auc for case in cells[row, "cifar10"].cases]
                of_rows.append(np.array([spread.mean for spread in of_cases if spread]))
            gains, texts = of_rows[0] - of_rows[1], []
            for part in (gains[:5], gains[5:], gains):
                error = part.std(ddof=1) / math.sqrt(len(part))
                half, p_value = (
                    t.ppf(0.975, len(part) - 1) * error,
                    2 * t.sf(abs(part.mean()) / error, len(part) - 1),
                )
                text = "< .001" if p_value < 0.001 else f"= {share(p_value, 3)}"
                texts.append(f"{signed(part.mean())} ± {share(half)}, p {text}")
            lines.append([f"cifar10: {pair}", *texts])
        return lines

    def contrasts(self, name: str) -> dict[tuple[str, str, str], str]:
        """By column and two rows, the text of each pair that a table names and whose runs have all finished."""
        table, found = self.shown[name], dict[tuple[str, str, str], tuple[float, Interval | None]]()
        same = set[tuple[str, str, str]]()
        for column in [column.name for column in table.shown()[1]]:
            for pair in table.text["contrasts"]:
                row, other = pair.split(" minus ")
                one, two = table.cells[row, column], table.cells[other, column]
                if one.auc and two.auc and one.complete and two.complete:
                    key = column, row, other
                    if {run.name for run in one.runs} == {run.name for run in two.runs}:
                        same.add(key)
                    found[key] = one.auc.mean - two.auc.mean, None if key in same else table.tests.get(key)
        texts = self._difference_texts(table, found)
        return {key: "same runs" if key in same else text for key, text in texts.items()}

    def _contrasts(self, name: str) -> Lines:
        """The pairs of rows that a table names, one on each line."""
        texts = self.contrasts(name)
        return [
            ["rows", "difference"],
            *([f"{column}: {row} minus {other}", text] for (column, row, other), text in texts.items()),
        ]

    def _differences(self, name: str) -> Lines:
        table, texts = self.shown[name], dict[tuple[str, str], str]()
        for (column, method, baseline), text in self._difference_texts(table, table.differences(True)).items():
            texts[f"{column}: {method}", baseline] = text
        lines = grid_lines(texts)
        return lines if len(lines) >= len(lines[0]) else transpose(lines)

    def _difference_texts(
        self, table: Table, found: dict[tuple[str, str, str], tuple[float, Interval | None]]
    ) -> dict[tuple[str, str, str], str]:
        """Each difference with its interval and p-values, which are corrected for all of them."""
        texts = {}
        tested = {key: test.p_value for key, (_, test) in found.items() if test}
        corrected = dict(zip(tested, holm(list(tested.values())), strict=True))
        for key, (value, test) in found.items():
            published = table.published_difference(key)
            bracket = "" if published is None else f" [{signed(published)}]"
            text = f"{signed(value)}{bracket}, not tested"
            if test:
                bold = "**" if test.p_value < 0.05 else ""
                p_value, after = (
                    "< .001" if value < 0.001 else f"= {share(value, 3)}" for value in (test.p_value, corrected[key])
                )
                text = f"{bold}{signed(value)} ± {share(test.half_width)}{bold}{bracket}, p {p_value}, corrected "
                text += after.removeprefix("= ")
            texts[key] = text
        return texts

    def outcomes(self, *names: str) -> list[Outcome]:
        """The comparisons of CyCp methods with baselines in some tables."""
        found = []
        for table in [self.shown[name] for name in names if name in self.shown]:
            columns = {column.name: column for column in table.columns}
            tested = {key: test.p_value for key, (_, test) in table.differences(True).items() if test}
            corrected = dict(zip(tested, holm(list(tested.values())), strict=True))
            for key, (value, test) in table.differences().items():
                column, method, baseline = key
                published = table.published_difference(key)
                result = (value, test, published, corrected.get(key), len(tested))
                found.append(Outcome(table.name, columns[column], method, baseline, *result))
        return found

    def gaps(self, *names: str) -> dict[tuple[str, str, str], float]:
        """By row, table and column, how much higher the mean is than the paper's."""
        found = {}
        for table in [self.shown[name] for name in names if name in self.shown]:
            for (row, column), cell in table.cells.items():
                if cell.complete and cell.auc and (row, column) in table.published:
                    found[row, table.name, column] = cell.auc.mean - table.published[row, column]
        return found

    def _gaps(self) -> Lines:
        found = self.gaps(*(name for name, table in self.shown.items() if table.kind != "traffic"))
        texts = {(row, f"{table} {column}"): signed(value) for (row, table, column), value in found.items()}
        return grid_lines(texts, "AUC minus the paper's")

    def _outcome_counts(self) -> Lines:
        counts: dict[tuple[str, str], Counter[int | None]] = {}
        for pair in self.outcomes(*(name for name, table in self.shown.items() if table.kind == "table")):
            of_table = pair.column.dataset in REAL_DATA or pair.column.name == pair.table
            label = pair.table if of_table else f"{pair.table}, {pair.column.name}"
            counts.setdefault((label, pair.method), Counter())[pair.sign] += 1
        header = ["significantly higher", "not significantly different", "significantly lower", "not tested"]
        lines = [[*label, *(str(count[sign]) for sign in (1, 0, -1, None))] for label, count in counts.items()]
        return [["table", "method", *header], *lines]

    def target(self, column: str, name: str = "traffic", rows: Sequence[str] = ("cycp-fedavg", *OURS)) -> float | None:
        """The lowest final AUC of the first row and the CyCp rows of a column of `traffic`, or of a table like it."""
        table = self.shown[name]
        cells = [table.cells[row, column] for row in rows]
        return min(cell.curve[-1].auc for cell in cells) if all(cell.complete for cell in cells) else None

    def _traffic(self, real: bool, margin: float) -> Lines:
        table, texts = self.shown["traffic"], dict[tuple[str, str], str]()
        for column in [column.name for column in self._columns("traffic", real)]:
            target = self.target(column)
            goal = None if target is None else target - margin
            texts["AUC to reach", column] = "-" if goal is None else share(goal)
            first = table.cells[table.rows[0].name, column].reach(goal)
            for row in table.rows:
                cell = table.cells[row.name, column]
                reach = cell.reach(goal)
                texts[row.name, column] = "not reached" if goal is not None else "-"
                if goal is not None and not cell.complete:
                    texts[row.name, column] = f"{len(cell.finished)} of {len(cell.slots)} runs"
                if reach and first:
                    bound = "≤ " if reach == cell.curve[0] else ""
                    ratio = f"{reach.rounds / first.rounds:.2f}"
                    texts[row.name, column] = f"{bound}{reach.rounds} ({ratio}), {bytes_text(reach.bytes)}"
        return grid_lines(texts)

    def _savings(self, name: str, rows: Sequence[str]) -> Lines:
        """Whether FedAvg on balanced batches is as early as the faster CyCp method, and which other baselines are.

        The rows are FedAvg, the CyCp methods, and FedAvg on balanced batches.
        """
        table, (usual, *ours, balanced) = self.shown[name], rows
        lines = [[f"data, AUC to reach{', pooled' * (name != 'traffic')}", *rows, "its learning rate", "it saves"]]
        lines[0].append("other baselines as fast as the faster CyCp method")
        for column in self._columns(name):
            target = self.target(column.name, name, rows[:-1])
            if target is None or not table.cells[balanced, column.name].complete:
                continue
            rate = self.records.choices[f"{column.dataset}-{balanced}"]["settings"]["learning-rate"]
            for goal in (target - NEARLY, target):
                needed, texts = dict[str, float](), dict[str, str]()
                for row in [row.name for row in table.rows]:
                    cell = table.cells[row, column.name]
                    reach = cell.reach(goal)
                    needed[row] = reach.rounds if reach else math.inf
                    texts[row] = f"{'≤ ' if reach == cell.curve[0] else ''}{reach.rounds}" if reach else "not reached"
                best = min(needed[row] for row in ours)
                verdict = "all" if needed[balanced] <= best else "none" if needed[balanced] >= needed[usual] else "part"
                verdict = verdict if best < needed[usual] else "there is nothing to save"
                others = [row for row in needed if row not in rows and row[:3] != "rs-"]
                fast = ", ".join(row for row in others if needed[row] <= best) or "-"
                shown = [texts[row] for row in rows]
                lines.append([f"{column.name}, {share(goal)}", *shown, rate, verdict, fast])
        return lines

    def _effect_lines(self, effects: Sequence[Effect]) -> Lines:
        lines = [(effect.label, line) for effect in effects for line in effect.lines]
        names = list(dict.fromkeys(name for _, line in lines for name in line))
        varied = sorted((name for name in names if " = " in name), key=lambda name: int(name.split(" = ")[1]))
        others = [name for name in names if name not in varied]
        header = [*others[:1], *varied, *others[1:]] if varied else names
        return [
            ["data, method", *header],
            *([label, *(line.get(name, "-") for name in header)] for label, line in lines),
        ]

    # ---------------------------------------------------------------------------------------------------------- tuning

    def jobs(self) -> dict[str, tuple[str, str, dict[str, Any]]]:
        """By job, the dataset or point, the row and the recorded choice of everything that is shown."""
        found = dict[str, tuple[str, str, dict[str, Any]]]()
        for table in self.shown.values():
            rows, columns = table.shown()
            for column in columns:
                for row in rows:
                    job = f"{column.job or column.dataset}-{row.name}"
                    if job in self.records.choices:
                        found.setdefault(job, (column.job or column.dataset, row.name, self.records.choices[job]))
        return found

    def _choice_lines(self) -> Lines:
        lines = []
        for label, row, choice in self.jobs().values():
            settings = ", ".join(f"{name} {value}" for name, value in choice["settings"].items())
            trials = choice["trials"]
            candidates = len({str(sorted(trial["settings"].items())) for trial in trials})
            cycles = sum(run.cycles for run in self.trial_runs(row, label, choice))
            # A choice has the seconds of the time when it was made; a run that was repeated later has others.
            cost = [str(len(trials)), str(cycles), f"{choice['seconds']:.0f}"]
            lines.append([label, row, settings, choice["grid"], str(candidates), *cost])
        return lines

    def trial_runs(self, row_name: str, label: str, choice: dict[str, Any]) -> list[Run]:
        """The recorded runs behind a choice; a trial that is not of full length has its share of the cycles."""
        columns = [(table, column) for table in self.shown.values() for column in table.columns]
        table, column = next(
            (table, column)
            for table, column in columns
            if label == (column.job or column.dataset) and row_name in {row.name for row in table.rows}
        )
        row = next(row for row in table.rows if row.name == row_name)
        case, runs = dict(column.tuned_case or {}), []
        for trial in choice["trials"]:
            full = self.specs.scale["cycles"]
            part = str(max(1, round(trial["cycles"] * int(case.get("cycles", full)) / full)))
            shortened = {} if trial["cycles"] == full else {"cycles": part, "evaluate-every": part}
            options = {**row.options, **trial["settings"], **case, **shortened}
            runs.append(
                self.records.runs[make_key(row.method, self.specs.run_options(column.dataset, row.method, options))]
            )
        for run, trial in zip(runs, choice["trials"], strict=True):
            assert (run.line["curve"][-1][4] if run.finished else None) == trial["validation_auc"], run.name
        return runs

    def _discarded(self) -> Lines:
        """The runs that are no longer kept, by method and dataset."""
        counts: Counter[tuple[str, str]] = Counter()
        for line in self.specs.discarded:
            counts[line["method"], line["dataset"]] += line["runs"]
        methods, datasets = (sorted({key[side] for key in counts}) for side in (0, 1))
        lines = [(method, [counts[method, dataset] for dataset in datasets]) for method in methods]
        return [["method", *datasets, "all"], *([name, *map(str, row), str(sum(row))] for name, row in lines)]

    def withdrawn(self) -> Iterator[str]:
        """The points of figures that did not train, with what they were tuned over."""
        for table in [self.shown[name] for name in self.effects]:
            rows, columns = table.shown()
            for column in columns:
                for row in rows:
                    cell = table.cells[row.name, column.name]
                    if did_not_train(cell):
                        choice = self.records.choices[f"{column.job or column.dataset}-{row.name}"]
                        trials = {trial["settings"]["learning-rate"]: trial for trial in choice["trials"]}
                        tried = [f"{rate} ({share(trial['validation_auc'])})" for rate, trial in trials.items()]
                        yield (
                            f"Withdrawn: {column.name} ({row.name}), whose AUC of {spread_text(cell.auc)} varies by "
                            f"more than .05 over runs. Its learning rate {choice['settings']['learning-rate']} was "
                            f"chosen by validation AUC among {', '.join(tried)}."
                        )

    # ------------------------------------------------------------------------------------------------------ data, runs

    def missing(self) -> dict[str, str]:
        """By table, the columns that lack runs or are still to be tuned."""
        missing = dict[str, list[str]]()
        for name, table in self.every.items():
            for column in table.columns if table.kind != "traffic" else ():
                cells = [table.cells[row.name, column.name] for row in table.rows]
                done = sum(len(cell.finished) + cell.stopped for cell in cells)
                expected = sum(len(cell.slots) for cell in cells)
                tuning = ", to be tuned" if any(cell.borrowed for cell in cells) else ""
                if done < expected or tuning:
                    count = f" ({done} of {expected}{tuning})" if done else ""
                    missing.setdefault(name, []).append(column.name + count)
        return {name: ", ".join(columns) for name, columns in missing.items()}

    def facts(self) -> Lines:
        """By dataset, what its first run says of the data, and the positives to test on."""
        facts = dict[str, list[str]]()
        for table in self.shown.values():
            rows, columns = table.shown()
            for column in columns:
                for row in rows:
                    run = next((run for run in table.cells[row.name, column.name].runs if run.line["data"]), None)
                    if run and column.dataset not in facts and (ranks := self.records.find_ranks(run)):
                        facts[column.dataset] = [column.dataset, run.note, str(int(ranks[0].sum()))]
        return list(facts.values())

    def best_rows(self, name: str, number: str = "auc") -> str:
        """The row with the highest mean in each column on real data, among those whose runs have all finished."""
        texts, table = [], self.shown[name]
        for column in [column for column in table.shown()[1] if column.dataset in (*REAL_DATA, *FRAUD)]:
            cells = {row.name: table.cells[row.name, column.name] for row in table.rows}
            means = {row: cell.numbers[number].mean for row, cell in cells.items() if cell.complete}
            best = max(means, key=lambda row: means[row])
            lacking = [row for row in cells if row not in means]
            without = f"; {', '.join(lacking)} not finished" if lacking else ""
            texts.append(f"{column.name}: {best} {share(means[best])} (of {len(means)} rows{without})")
        return "; ".join(texts)


# ------------------------------------------------------------------------------------------------------------- reading


def parse_page(text: str) -> tuple[list[Lines], list[str]]:
    """The tables of a Markdown page as text without backslashes, and its other lines."""
    tables, prose = list[Lines](), list[str]()
    in_table = False
    for line in text.splitlines():
        if line.startswith("|"):
            cells = [cell.strip().replace("\\", "") for cell in line.strip().strip("|").split("|")]
            if not in_table:
                tables.append([])
            if set("".join(cells)) != {"-"}:
                tables[-1].append(cells)
        elif line.strip():
            prose.append(line)
        in_table = line.startswith("|")
    return tables, prose
