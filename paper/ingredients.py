"""Which ingredient of the paper makes a difference: a paragraph for each dataset of the table `as-printed`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from fedauc.reports.tables import format_share
from paper.findings import Comparison, correct_comparisons, list_contrasts
from paper.significance import SIGNIFICANCE_LEVEL
from paper.table_specs import OURS, CellSpec, Column
from paper.tables import Table
from paper.tuning import ChoiceStore, TuningChoice, TuningJob

FEDAVG = "cycp-fedavg"

FIRST, LAST = "ours", "as-printed"
"""How the names of a method's first and last row end."""

UNTRAINED = 0.6
"""Where no trial of a row's tuning has a higher validation AUC, there was no setting to choose that trains."""

Contrasts = Mapping[tuple[str, str], Comparison]
"""The contrasts of a column by the names of their rows."""


def describe_ingredients(table: Table, choices: ChoiceStore) -> Iterator[tuple[str, list[str]]]:
    """By dataset, sentences on what changes from our settings to the paper's: the answer, and what it rests on."""
    every_pair = correct_comparisons(list(list_contrasts(table)))
    for column in table.spec.columns:
        pairs = {(pair.method, pair.baseline): pair for pair in every_pair if pair.column == column}
        leads = {
            last: _join([(pairs.get((f"{name}-{last}", f"{FEDAVG}-{last}")), name) for name in OURS])
            for last in (LAST, FIRST)
        }
        if not leads[LAST]:
            continue
        if all(cell.complete for cell in table.column_cells(column.name).values()):
            answer, *steps = _describe_steps(table, column, pairs, choices)
        else:
            answer, steps = "Not known, because some rows between ours and the paper's have no runs.", []
        sentences = [answer, f"As printed, the difference to `{FEDAVG}` is {leads[LAST]}."]
        sentences += [f"With our settings it is {leads[FIRST]}."] if leads[FIRST] else []
        changes = _join([(pairs.get((f"{name}-{LAST}", f"{name}-{FIRST}")), name) for name in (FEDAVG, *OURS)])
        sentences += [f"From our settings to the paper's, mean AUC changes by {changes}."] if changes else []
        yield column.name, [*sentences, *steps, *_describe_untrained(table, column, choices)]


def _join(parts: Sequence[tuple[Comparison | None, str]]) -> str:
    """The comparisons that there are, each with its method."""
    return "; ".join(f"{pair} (`{name}`)" for pair, name in parts if pair)


def _describe_steps(table: Table, column: Column, pairs: Contrasts, choices: ChoiceStore) -> Iterator[str]:
    """Whose AUC changes the lead over FedAvg more, and the largest steps."""
    cells = table.column_cells(column.name)
    changes, ranges, largest, significant = dict[str, float](), list[str](), list[str](), list[str]()
    for method in (FEDAVG, *OURS):
        rows = [row for row in table.spec.rows if row.method == method]
        changes[method] = abs(pairs[rows[-1].name, rows[0].name].value)
        means = [cell.auc.mean for row in rows if (cell := cells[row.name]).auc]
        ranges.append(f"{format_share(min(means), 4)} to {format_share(max(means), 4)} (`{method}`)")
        tuned = {row.name: choices.find_choice(TuningJob.for_cell(CellSpec(row, column))) for row in rows}
        steps = [pairs[row.name, above.name] for above, row in pairwise(rows)]
        top = max(steps, key=lambda step: abs(step.value))
        settings = _compare_settings(tuned[top.method], tuned[top.baseline])
        largest.append(f"`{top.method}` {top}{settings}")
        corrected = {step.method: step.corrected for step in steps if step.corrected is not None}
        significant += [f"`{row}`" for row, p_value in corrected.items() if p_value < SIGNIFICANCE_LEVEL]
    moved = [name for name in OURS if changes[FEDAVG] > changes[name]]
    causes = {"FedAvg's own AUC": moved} | {f"the AUC of `{name}`": [name] for name in OURS if name not in moved}
    yield " ".join(
        f"The lead of {' and of '.join(f'`{name}`' for name in names)} over FedAvg changes mostly through {cause}."
        for cause, names in causes.items()
        if names
    )
    yield f"The rows have means of {', '.join(ranges)}."
    yield f"The largest step of each method, against the row above: {'; '.join(largest)}."
    yield f"Significant steps after correction: {', '.join(significant) or 'none'}."


def _compare_settings(chosen: TuningChoice | None, before: TuningChoice | None) -> str:
    """The tuned settings that differ, such as ` (learning-rate 0.01 instead of 0.1)`."""
    if not chosen or not before:
        return ""
    changed = [
        f"{name} {value} instead of {before.settings[name]}"
        for name, value in chosen.settings.items()
        if name in before.settings and before.settings[name] != value
    ]
    return f" ({', '.join(changed)})" if changed else ""


def _describe_untrained(table: Table, column: Column, choices: ChoiceStore) -> Iterator[str]:
    """Rows whose tuning found nothing that trains."""
    for row in table.spec.rows:
        choice = choices.find_choice(TuningJob.for_cell(CellSpec(row, column)))
        aucs = [trial["validation_auc"] for trial in choice.trials] if choice else []
        trained = [auc for auc in aucs if auc is not None]
        if trained and max(trained) < UNTRAINED:
            yield (
                f"The {len(aucs)} trials in the tuning of `{row.name}` had a validation AUC of "
                f"{format_share(max(trained), 4)} or less, so that there was no setting to choose that trains."
            )
