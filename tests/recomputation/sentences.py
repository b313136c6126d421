"""The sentences of docs/results.md that have numbers of their own, made from the recomputed tables."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from recomputation.effects import Effect
from recomputation.page import NEARLY, Outcome, Page, parse_page, share, signed
from recomputation.records import OURS, REAL_DATA, Specs

PAPERS_TABLES = ("table1", "table2", "table3", "table4", "table5", "table8", "table9")

FIXED_TEXTS = (
    "95 % confidence interval",
    "p < .05",
    "p ≥ .05",
    "On test sets of more than 22,500 examples",
    "`table9` does",
    "Test sets with fewer than 20 positives",
    "p is close to .05",
    "`classes` repeats Table 1 for classes 0 to 4",
    "Table 1: differences with intervals",
    "Classes 0 to 4 one by one",
    "the paper's Table 1, which has a single class",
    "those of Table 1.",
    "Table 2: differences with intervals",
    "less .02.",
    "to the AUC less .02 and",
    "the second table is for .02 less",
    "is at most .01",
    "on CIFAR-10, class 0, seed 0",
)
"""Names, and bounds that the page explains: they have digits, but are no results."""

FIXED_TABLES = (["name", "method"], ["grid", "learning rates", "other values"])
"""The headers of tables that explain names."""


def count_words(pairs: Sequence[Outcome]) -> str:
    """How many comparisons had which outcome."""
    counts = Counter(pair.sign for pair in pairs)
    assert not counts[None], "the page says how many were not tested"
    return (
        f"significantly better in {counts[1]}, significantly worse in {counts[-1]} and not significantly different in "
        f"{counts[0]}"
    )


def list_words(pairs: Sequence[Outcome]) -> str:
    """The significant comparisons by name."""
    several = len({pair.table for pair in pairs}) > 1
    words = []
    for pair in [pair for pair in pairs if pair.sign]:
        position = "above" if pair.value > 0 else "below"
        table = f" in `{pair.table}`" if several else ""
        words.append(f"`{pair.method}` {position} `{pair.baseline}` on {pair.column.name}{table}")
    return f" Significant: {'; '.join(words)}." if words else ""


def corrected_words(pairs: Sequence[Outcome]) -> str:
    """How many comparisons stay significant after Holm's correction for all tests of their table."""
    tests = {pair.table: pair.tests for pair in pairs}
    listed = [
        f"{count} tests of {f'Table {name[5:]}' if name[5:].isdigit() else f'the table `{name}`'}"
        for name, count in tests.items()
    ]
    family = f"all {listed[0]}" if len(listed) == 1 else f"all tests of the same table ({', '.join(listed)})"
    counts = Counter(pair.sign_at(pair.corrected) for pair in pairs if pair.corrected is not None)
    return (
        f"With Holm's correction for {family}, it is significantly better in {counts[1]} and significantly worse in "
        f"{counts[-1]}."
    )


def margin_words(pairs: Sequence[Outcome]) -> str:
    """In how many comparisons the confidence interval leaves the paper's difference out."""
    known = [(pair.value - pair.published, pair.test) for pair in pairs if pair.published is not None and pair.test]
    excluded = sum(abs(distance) > test.half_width for distance, test in known)
    return (
        f"The 95 % confidence interval of the difference excludes the paper's difference in {excluded} of {len(known)}."
    )


def effect_words(effects: Sequence[Effect]) -> str:
    """How many pairs of data and method agree with the paper, and which do not."""
    by_verdict = {verdict: [each.label for each in effects if each.holds is verdict] for verdict in (True, False, None)}
    text = f"for {len(by_verdict[True])} of {len(effects)} pairs of data and method."
    text += f" Not for {'; '.join(by_verdict[False])}." if by_verdict[False] else ""
    return text + (f" Undecided: {'; '.join(by_verdict[None])}." if by_verdict[None] else "")


def make_sentences(page: Page) -> Iterator[str]:
    """Every sentence that must be on the page."""
    yield from _make_headlines(page)
    table1 = page.outcomes("table1")
    real = [pair for pair in table1 if pair.column.dataset in REAL_DATA]
    other = [pair for pair in table1 if pair.column.dataset not in REAL_DATA]
    yield (
        f"In {len(real)} comparisons of a CyCp method with a baseline in Table 1, the CyCp method is "
        f"{count_words(real)}.{list_words(real)} {margin_words(real)} {corrected_words(real)}"
    )
    for name in ("table1", "classes"):
        yield f"Highest test AUC in `{name}`: {page.best_rows(name)}."
    published = [pair for pair in page.outcomes(*PAPERS_TABLES) if pair.published is not None]
    for words, chosen in (
        ("ahead of", [pair for pair in published if (pair.published or 0) > 0]),
        ("not ahead of", [pair for pair in published if (pair.published or 0) <= 0]),
    ):
        yield (
            f"Where the paper has the CyCp method {words} the baseline ({len(chosen)} comparisons), it is "
            f"{count_words(chosen)}.{list_words(chosen)} {margin_words(chosen)} {corrected_words(chosen)}"
        )
    yield (
        f"In {len(other)} comparisons of a CyCp method with a baseline, the CyCp method is {count_words(other)}. "
        f"{corrected_words(other)}"
    )
    for dataset, note, positives in page.facts():
        if note.startswith(("SYNTHETIC", "STAND-IN")):
            source = note.split(";")[0]
            yield f"`{dataset}` is not the paper's data: {source}, {positives} positives to test on."
    for effects in page.effects.values():
        yield effect_words(effects)
    for name, opening in (
        ("table2", "With a fifth of the training positives labelled negative (Table 2)"),
        ("noise", "With labels flipped in both directions on card fraud"),
    ):
        pairs = page.outcomes(name)
        count = f"{count_words(pairs)} of {len(pairs)} comparisons with a baseline."
        margins = f" {margin_words(pairs)}" if name == "table2" else ""
        yield f"{opening}, the CyCp method is {count}{list_words(pairs)}{margins} {corrected_words(pairs)}"
    yield f"Highest test AUC: {page.best_rows('table2')}."
    fraud = page.outcomes("creditcard")
    yield (
        f"In {len(fraud)} comparisons of AUC with a baseline, the CyCp method is {count_words(fraud)}."
        f"{list_words(fraud)} {corrected_words(fraud)}"
    )
    precision = page.best_rows("creditcard", "average_precision")
    yield f"Highest test AUC: {page.best_rows('creditcard')}. Highest average precision: {precision}."
    yield from _make_test_counts(page)
    yield from _make_printed_sentences(page)
    yield from page.withdrawn()
    yield from _make_tuning_sentences(page)
    yield from _make_version_sentences(page)


def _make_test_counts(page: Page) -> Iterator[str]:
    """For how many tests the p-values of a table of differences are corrected."""
    for name, table in page.shown.items():
        if table.kind == "table" and (count := sum(test is not None for _, test in table.differences(True).values())):
            yield f"corrected for all {count} tests of CyCp methods in this table (Holm)"
        if "contrasts" in table.text:
            tests = sum(", corrected " in text for text in page.contrasts(name).values())
            yield f"corrected for the {tests} tests of this list (Holm)"
            if name == "as-printed":
                yield f"corrected for all {tests} tests of the list below (Holm)"


def _make_printed_sentences(page: Page) -> Iterator[str]:
    """What `as-printed` says of each dataset: leads over FedAvg, and the steps where all of them have run."""
    table, texts = page.shown["as-printed"], page.contrasts("as-printed")
    for column in [column.name for column in table.shown()[1]]:
        yield f"- **{column}:**"
        for ending, words in (
            ("as-printed", "As printed, the difference to `cycp-fedavg` is"),
            ("ours", "With our settings it is"),
        ):
            of_methods = [(texts.get((column, f"{name}-{ending}", f"cycp-fedavg-{ending}")), name) for name in OURS]
            if any(text for text, _ in of_methods):
                yield f"{words} {'; '.join(f'{text} (`{name}`)' for text, name in of_methods if text)}."
        changes = [(texts.get((column, f"{name}-as-printed", f"{name}-ours")), name) for name in ("cycp-fedavg", *OURS)]
        known = "; ".join(f"{text} (`{name}`)" for text, name in changes if text)
        if known:
            yield f"From our settings to the paper's, mean AUC changes by {known}."
        if all(table.cells[row.name, column].complete for row in table.rows):
            yield from _make_step_sentences(page, column, texts)
        for row in table.rows:
            trials = page.records.choices.get(f"{column}-{row.name}", {"trials": []})["trials"]
            best = max((trial["validation_auc"] or 0 for trial in trials), default=0)
            if 0 < best < 0.6:
                yield (
                    f"The {len(trials)} trials in the tuning of `{row.name}` had a validation AUC of {share(best)} or "
                    "less, so that there was no setting to choose that trains."
                )


def _make_step_sentences(page: Page, column: str, texts: dict[tuple[str, str, str], str]) -> Iterator[str]:
    table, changes = page.shown["as-printed"], dict[str, float]()
    ranges, largest, significant = list[str](), list[str](), list[str]()
    for method in ("cycp-fedavg", *OURS):
        rows = [row.name for row in table.rows if row.method == method]
        means = {row: spread.mean for row in rows if (spread := table.cells[row, column].auc)}
        changes[method] = abs(means[rows[-1]] - means[rows[0]])
        ranges.append(f"{share(min(means.values()))} to {share(max(means.values()))} (`{method}`)")
        steps = {pair: means[pair[1]] - means[pair[0]] for pair in itertools.pairwise(rows)}
        above, below = max(steps, key=lambda pair: abs(steps[pair]))
        of_steps = {new: re.search(r"corrected (?:< )?(\S+)$", texts[column, new, old]) for old, new in steps}
        significant += [f"`{row}`" for row, match in of_steps.items() if match and float(match[1]) < 0.05]
        old, new = (page.records.choices[f"{column}-{row}"]["settings"] for row in (above, below))
        others = ", ".join(f"{name} {new[name]} instead of {old[name]}" for name in new if old[name] != new[name])
        largest.append(f"`{below}` {texts[column, below, above]}" + (f" ({others})" if others else ""))
    yield f"The rows have means of {', '.join(ranges)}."
    yield f"The largest step of each method, against the row above: {'; '.join(largest)}."
    yield f"Significant steps after correction: {', '.join(significant) or 'none'}."
    for method in OURS:
        is_fedavg = changes["cycp-fedavg"] > changes[method]
        # Both methods share a sentence where FedAvg's rows change both leads.
        cause = "FedAvg's own AUC" if is_fedavg else f"the AUC of `{method}`"
        yield f"over FedAvg changes mostly through {cause}."


def _make_headlines(page: Page) -> Iterator[str]:
    published = [pair for pair in page.outcomes(*PAPERS_TABLES) if pair.published is not None]
    ahead = [pair for pair in published if (pair.published or 0) > 0]
    datasets = " and ".join(dict.fromkeys(pair.column.dataset for pair in ahead))
    yield (
        f"in {len(ahead)} comparisons on {datasets} the paper has a CyCp method ahead of a baseline, by "
        f"{signed(min(pair.published or 0 for pair in ahead))} to "
        f"{signed(max(pair.published or 0 for pair in ahead))}; "
        f"here the difference is {signed(min(pair.value for pair in ahead))} to "
        f"{signed(max(pair.value for pair in ahead))}. {margin_words(ahead)} The CyCp method is {count_words(ahead)} "
        f"(p < .05, one test at a time). {corrected_words(ahead)}"
    )
    gaps = sorted((value, row, column) for (row, _, column), value in page.gaps("table1").items())
    (low, low_row, low_column), (high, high_row, high_column) = gaps[0], gaps[-1]
    yield (
        f"{sum(value > 0 for value, *_ in gaps)} of the {len(gaps)} numbers below are higher than in the paper, with "
        f"differences from {signed(low)} (`{low_row}`, {low_column}) to {signed(high)} (`{high_row}`, {high_column})."
    )
    texts = []
    for method in (*OURS, "cycp-fedavg-balanced"):
        ratios: dict[str, list[str]] = {}
        for column in [column.name for column in page.shown["traffic"].shown()[1]]:
            table, target = page.shown["traffic"], page.target(column)
            if target is not None:
                cells = [table.cells[row, column] for row in (method, table.rows[0].name)]
                reach, first = (cell.reach(target - NEARLY) for cell in cells)
                if reach and first:
                    bound = "at most " if reach == cells[0].curve[0] else ""
                    ratios.setdefault(f"{bound}{reach.rounds / first.rounds:.2f} times", []).append(column)
        words = [f"{ratio} on {' and '.join(columns)}" for ratio, columns in ratios.items()]
        words[0] = words[0].replace("times", "times the rounds of `cycp-fedavg`") if method == OURS[0] else words[0]
        texts.append(f"`{method}` needs {', '.join(words)}")
    balanced = f"FedAvg on balanced batches ({texts.pop().replace(' needs', ') needs')}."
    yield f"to come within {share(NEARLY, 2)} of a common AUC, {'; '.join(texts)}. {balanced}"
    counts = [
        f"{sum(each.holds is True for each in page.effects[name])} of {len(page.effects[name])}"
        for name in ("figure1", "figure2", "figure3")
    ]
    yield (
        f"a longer communication interval I costs at most .01 AUC for {counts[0]} pairs of dataset and method, more "
        f"clients per round M save rounds for {counts[1]}, and more groups K save rounds for {counts[2]}."
    )
    yield f"{len(page.missing())} of {len(page.every)} tables and figures lack some or all of their runs"


def _make_tuning_sentences(page: Page) -> Iterator[str]:
    runs = {run.name: run for label, row, choice in page.jobs().values() for run in page.trial_runs(row, label, choice)}
    cycles, seconds = (sum(run.cycles for run in runs.values()), sum(run.line["seconds"] for run in runs.values()))
    yield f"This took {len(runs)} runs, {cycles} cycles and {seconds:.0f} seconds."
    totals = [sum(line[name] for line in page.specs.discarded) for name in ("runs", "cycles", "seconds")]
    yield f"{totals[0]} further runs, with {totals[1]} cycles and {totals[2]:.0f} seconds:"
    searched = {run.name: run.method for name in ("schedules", "batches") for run in page.shown[name].runs.values()}
    counts = ", ".join(f"{method} {count}" for method, count in sorted(Counter(searched.values()).items()))
    yield f"(`schedules` and `batches`): {counts}."
    ends, points, largest_rows = Counter[str](), list[str](), dict[str, list[str]]()
    for job, (label, row, choice) in page.jobs().items():
        rates = sorted({float(trial["settings"]["learning-rate"]) for trial in choice["trials"]})
        chosen, many = float(choice["settings"]["learning-rate"]), len(rates) > 2
        ends["many"] += many
        ends["two"] += len(rates) == 2
        ends["two, larger"] += len(rates) == 2 and chosen == rates[1]
        if many and chosen == rates[0]:
            ends["smallest"] += 1
            points += [job] if job != f"{label}-{row}" or re.search(r"-[IMK]\d+$", label) else []
        if many and chosen == rates[-1]:
            ends["largest"] += 1
            largest_rows.setdefault(label, []).append(row)
    yield (
        f"Of {ends['many']} rows with more than two learning rates, {ends['smallest']} chose the smallest of their "
        f"grid and {ends['largest']} the largest."
    )
    yield f"Of {ends['two']} rows with two learning rates, {ends['two, larger']} chose the larger."
    yield f"Points of figures that chose the smallest learning rate: {', '.join(points)}."
    listed = "; ".join(f"{label} ({', '.join(rows)})" for label, rows in largest_rows.items())
    yield f"Rows that chose the largest: {listed}."


def _make_version_sentences(page: Page) -> Iterator[str]:
    seconds = sum(run.line["seconds"] for run in page.runs.values())
    yield f"{len(page.runs)} runs, {seconds:.0f} seconds of training and evaluation"
    for run in page.runs.values():
        versions = ", ".join(f"{name} {version}" for name, version in run.line["versions"].items() if version)
        yield f"{versions}; commit {run.line['commit'] or 'unknown'}"


# ---------------------------------------------------------------------------------------------------------- comparison


class Expectation:
    """Everything that the page must say."""

    def __init__(self, page: Page, specs: Specs) -> None:
        self.tables, self.sentences = list(page.tables()), list(dict.fromkeys(make_sentences(page)))
        about = [text["about"] for text in specs.tables.values()]
        about += [f"{text['title']} (<code>{name}</code>)" for name, text in specs.tables.items()]
        paragraphs = [" ".join(part.split()) for text in about for part in re.split(r"\n\s*\n", text)]
        known = sorted({*self.sentences, *paragraphs, *FIXED_TEXTS}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known)))

    def find_disagreements(self, text: str) -> list[str]:
        """What the page says differently: table cells, sentences, and digits in prose that nothing explains."""
        tables, prose = parse_page(text)
        tables = [table for table in tables if table[0] not in FIXED_TABLES]
        problems = []
        if len(tables) != len(self.tables):
            problems.append(f"the page has {len(tables)} tables; the records make {len(self.tables)}")
        for shown, expected in zip(tables, self.tables, strict=False):
            if len(shown) != len(expected):
                problems.append(f"a table under {shown[0]} has {len(shown)} lines; the records make {len(expected)}")
            for cells, wanted in zip(shown, expected, strict=False):
                if cells != wanted:
                    problems.append(f"the page has {cells}; the records make {wanted}")
        plain = "\n".join(prose).replace("\\", "")
        problems += [f"not on the page: {sentence}" for sentence in self.sentences if sentence not in plain]
        # Figures are files whose names have digits.
        for line in re.sub(r"!\[[^]]*\]\([^)]*\)", "", plain).splitlines():
            rest = self._known.sub("", line)
            if re.search(r"\d", rest):
                problems.append(f"no record explains a number in: {rest.strip()}")
        return problems
