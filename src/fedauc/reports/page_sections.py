"""The sections of a report page: which texts, tables and figures stand in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedauc.reports.attendance import build_calendar
from fedauc.reports.calibration_choice import choose_calibration
from fedauc.reports.figures import Figure
from fedauc.reports.operation import Operation
from fedauc.reports.report_figures import (
    draw_calendar,
    draw_calibration,
    draw_histograms,
    draw_learning,
    draw_precision_recall,
    draw_roc,
    draw_runs,
    draw_sites,
)
from fedauc.reports.report_runs import ReportRun
from fedauc.reports.report_tables import (
    ReportTable,
    flatten_document,
    tabulate_attendance,
    tabulate_groups,
    tabulate_pairs,
    tabulate_privacy,
    tabulate_sites,
    tabulate_summary,
    tabulate_thresholds,
    tabulate_traffic,
)
from fedauc.reports.sentences import (
    answer_comparison,
    answer_run,
    client_noun,
    describe_privacy,
    list_facts,
    list_page_caveats,
    summarize_settings,
    tabulate_settings,
)
from fedauc.reports.site_quality import SiteQuality, measure_sites
from fedauc.scoring.calibration import measure_brier_score, measure_calibration_error

MAX_DETAILED_RUNS = 6
"""Of more runs the page shows the details of the best ones, and all in its table."""

NO_SCORES = "The scores of the test rows are missing"


class Paragraph(NamedTuple):
    """A paragraph; its tone is plain, answer, caveat or missing."""

    text: str
    tone: str = "plain"


class Facts(NamedTuple):
    """Large numbers: name, value, and a line below."""

    facts: list[tuple[str, str, str]]


class Definitions(NamedTuple):
    """Names and what they stand for."""

    lines: list[tuple[str, str]]


class Folded(NamedTuple):
    """Parts that are shown on demand."""

    title: str
    parts: list[Part]


class Ticking(NamedTuple):
    """A sentence in pieces; a piece with a time, in seconds since 1970, is shown as the duration since then."""

    pieces: list[tuple[str, float | None]]


Part = Paragraph | Facts | Definitions | ReportTable | Folded | Ticking


class Block(NamedTuple):
    """Parts and figures of all runs (`run` is None), or of the run with that number."""

    run: int | None
    parts: list[Part]
    figures: list[Figure]


class Section(NamedTuple):
    """A section with its anchor, title, and what a reader without training in statistics should know."""

    key: str
    title: str
    lead: str
    blocks: list[Block]


NOT_COVERED = (
    "Who took part, how often, and how many rows clients hold is not covered by the guarantee of this run, so that it "
    "is left out. The run folder has it, and is as confidential as the uploads."
)


def choose_detailed_runs(runs: Sequence[ReportRun]) -> list[ReportRun]:
    """The runs whose details are shown: all, or of many the best ones."""
    if len(runs) <= MAX_DETAILED_RUNS:
        return list(runs)
    return sorted(runs, key=judge_run, reverse=True)[:MAX_DETAILED_RUNS]


def judge_run(run: ReportRun) -> float:
    """What runs are ordered by: the first metric on the validation rows where there are some, else on the test rows."""
    column, final = run.metrics[0].columns[0], run.final or {}
    value = final.get(f"validation_{column}")
    value = final.get(column) if value is None else value
    return -np.inf if value is None else float(value)


def build_sections(runs: Sequence[ReportRun], live: bool = False) -> list[Section]:
    """All sections of a page, in order; a live page of a federation begins with what its operator looks at."""
    detailed = choose_detailed_runs(runs)

    def detail(build: Callable[[ReportRun], Block]) -> list[Block]:
        return [build(run)._replace(run=number) for number, run in enumerate(detailed)]

    sections = [Section("answer", "The answer", "", _answer(runs))]
    if live and any(run.is_federation for run in detailed):
        lead = "What the server waits for, and who has answered. This part is for the operator and in no report."
        blocks = [
            block._replace(run=number)
            for number, run in enumerate(detailed)
            for block in (_operation_now(run), _operation_rounds(run))
        ]
        sections.append(Section("operation", "The federation now", lead, blocks))
    if len(runs) > 1:
        lead = "Runs are compared on the same test rows, so that chance in the rows affects all of them alike."
        sections.append(Section("comparison", "Runs side by side", lead, [_comparison(runs, detailed)]))
    sections += [
        Section(
            "ranking",
            "How well the model ranks",
            "The ROC curve shows how many positives are found for a given share of false alarms; the precision-recall "
            "curve shows how many of the alarms are right.",
            [_ranking(detailed)],
        ),
        Section(
            "learning",
            "How it learned",
            "The same evaluations against what they cost: rounds, traffic and time.",
            [_learning(detailed)],
        ),
        Section(
            "sites",
            "Where it works less well",
            "An average can hide a place where the model fails. The lowest values come first; wide intervals mean "
            "few rows.",
            detail(_sites),
        ),
        Section(
            "participation",
            "Who took part",
            "Each cell is a visit in a round, in the colour of the group.",
            detail(_participation),
        ),
        Section(
            "scores",
            "Scores and probabilities",
            "The further apart the two classes are, the better. Calibrated probabilities lie on the diagonal.",
            detail(_scores),
        ),
        Section(
            "thresholds",
            "From a score to a decision",
            "Choose a row by the false alarms that can be handled, or by the positives that must be found.",
            detail(_thresholds),
        ),
        Section("traffic", "Traffic", "What was sent between server and clients.", detail(_traffic)),
        Section(
            "privacy",
            "Privacy: what left the clients",
            "Federated training keeps rows where they are; it does not by itself guarantee privacy, added noise does.",
            detail(_privacy),
        ),
        Section(
            "settings",
            "Configuration and environment",
            "Everything that is needed to run it again.",
            detail(_settings),
        ),
        Section("methods", "How the numbers are computed", "", [Block(None, [Definitions(METHODS)], [])]),
    ]
    return sections


METHODS = [
    (
        "AUC",
        "The probability that a random positive row has a higher score than a random negative one; 0.5 is chance and 1 "
        "is perfect. Ties count one half.",
    ),
    (
        "Average precision (AP)",
        "The mean precision over the recalls of all positives; chance is the share of positives.",
    ),
    (
        "95 % interval of an AUC",
        "DeLong's interval, symmetric in the logit of the AUC. It covers the chance in the test rows, not that in "
        "training with another seed.",
    ),
    (
        "Bands of curves",
        "Pointwise percentiles of 400 bootstrap resamples of the test rows within each class, from a fixed seed.",
    ),
    (
        "p",
        "DeLong's two-sided paired test that two runs have the same AUC on the same rows; below 0.05 is significant.",
    ),
    ("Intervals of rates", "Wilson's score interval at 95 %."),
]


def _answer(runs: Sequence[ReportRun]) -> list[Block]:
    answer = answer_run(runs[0]) if len(runs) == 1 else answer_comparison(runs)
    caveats: list[Part] = [Paragraph(text, "caveat") for text in list_page_caveats(runs)]
    opening = Block(None, [Paragraph(answer, "answer"), *caveats], [])
    if len(runs) == 1:
        return [opening._replace(parts=[*opening.parts[:1], Facts(list_facts(runs[0])), *caveats])]
    details = [
        Block(number, [Paragraph(answer_run(run)), Facts(list_facts(run))], [])
        for number, run in enumerate(choose_detailed_runs(runs))
    ]
    return [opening, *details]


def _comparison(runs: Sequence[ReportRun], detailed: Sequence[ReportRun]) -> Block:
    metric = runs[0].metrics[0]
    finals = [(run.name, run.final) for run in runs if (run.final or {}).get(metric.columns[0]) is not None][:30]
    settings = tabulate_settings(summarize_settings(runs), metric.label)
    parts: list[Part] = [*([] if settings is None else [settings]), tabulate_summary(runs)]
    pairs = tabulate_pairs(detailed)
    if pairs is not None:
        parts.append(Folded("Every pair of runs", [pairs]))
    if len(detailed) < len(runs):
        parts.append(Paragraph(f"The sections below show the {len(detailed)} best of {len(runs)} runs."))
    if not finals:
        return Block(None, parts, [])
    columns = [[(final or {}).get(column) for _, final in finals] for column in metric.columns]
    values, low, high = (np.array(column, dtype=float) for column in (columns * 3 if len(columns) == 1 else columns))
    return Block(None, parts, [draw_runs([name for name, _ in finals], values, low, high, metric.label)])


def _ranking(runs: Sequence[ReportRun]) -> Block:
    scored = [(run.name, run.scored) for run in runs]
    shown = [(name, rows) for name, rows in scored if rows is not None]
    if not shown:
        return Block(None, [Paragraph(_explain_missing_scores(runs[0]), "missing")], [])
    missing = [name for name, rows in scored if rows is None]
    parts: list[Part] = [Paragraph(f"{NO_SCORES} for {', '.join(missing)}.", "missing")] if missing else []
    return Block(None, parts, [draw_roc(shown), draw_precision_recall(shown)])


def _learning(runs: Sequence[ReportRun]) -> Block:
    names = [run.name for run in runs if not run.records]
    parts: list[Part] = (
        [Paragraph(f"No round has been evaluated yet in {', '.join(names)}.", "missing")] if names else []
    )
    return Block(None, parts, draw_learning(runs) if len(names) < len(runs) else [])


def _sites(run: ReportRun) -> Block:
    noun, rows = client_noun(run), run.scored
    if rows is None or rows.clients is None:
        return _stored_site_auc(run, noun)
    overall = measure_sites(rows.labels, rows.scores, np.full(len(rows.labels), "all"))[0].auc or 0.0
    by_client = measure_sites(rows.labels, rows.scores, rows.clients)
    parts: list[Part] = []
    figures = []
    if run.roster is not None and run.roster.listed is not None and run.roster.group_count > 1:
        group_of_client = dict(zip(run.roster.listed["name"], run.roster.listed["group"], strict=True))
        numbers = np.array([group_of_client.get(str(name), -1) for name in rows.clients.tolist()])
        known = numbers >= 0
        if known.any():
            names = np.array([group["name"] for group in run.roster.groups])[numbers[known]]
            by_group = measure_sites(rows.labels[known], rows.scores[known], names)
            parts.append(tabulate_sites(by_group, "group", "group"))
            figures.append(draw_sites(by_group, overall, "group", "group"))
    figures.append(draw_sites(by_client, overall, noun, noun))
    parts.append(Folded(f"Table of {len(by_client):,} {noun}s", [tabulate_sites(by_client, noun, noun)]))
    return Block(None, parts, figures)


def _stored_site_auc(run: ReportRun, noun: str) -> Block:
    """What a folder without the clients of its test rows says: the AUCs that the run itself has stored."""
    last = run.records[-1] if run.records else {}
    stored = run.result.get("client_auc") or last.get("site_auc")
    if not stored:
        reason = "the sites do not share their own AUC" if run.is_federation else "the test rows name no client"
        if run.is_embedding:
            reason = "the model gives embeddings, not scores"
        elif not run.done and not run.is_federation:
            reason = "the run is not finished"
        elif "scores" in run.result.get("not_released", {}):
            reason = run.result["not_released"]["scores"]
        return Block(None, [Paragraph(f"There is no AUC per {noun}: {reason}.", "missing")], [])
    lines = [SiteQuality(name, 0, 0, value, note="not stored") for name, value in stored.items()]
    lines.sort(key=lambda line: np.inf if line.auc is None else line.auc)
    overall = (run.final or {}).get("auc")
    table = tabulate_sites(lines, noun, noun)
    table = table._replace(headers=table.headers[:2], rows=[row[:2] for row in table.rows], caption=f"AUC per {noun}.")
    note = Paragraph(f"The folder holds an AUC per {noun}, but not whose the test rows are: intervals are missing.")
    figures = [] if overall is None else [draw_sites(lines, overall, noun, noun)]
    return Block(None, [note, Folded(f"Table of {len(lines):,} {noun}s", [table])], figures)


def _participation(run: ReportRun) -> Block:
    if run.hides_clients:
        return Block(None, [Paragraph(NOT_COVERED, "missing")], [])
    calendar, noun = build_calendar(run), client_noun(run)
    groups = tabulate_groups(run)
    folded: list[Part] = [] if groups is None else [Folded("Training rows of each group", [groups])]
    if isinstance(calendar, str):
        return Block(None, [Paragraph(calendar, "missing"), *folded], [])
    attendance = Folded("Visits and absences", [tabulate_attendance(calendar, noun)])
    figures = [draw_calendar(calendar, noun)] if calendar.present.size else []
    return Block(None, [attendance, *folded], figures)


def _scores(run: ReportRun) -> Block:
    rows = run.scored
    if rows is None:
        return Block(None, [Paragraph(_explain_missing_scores(run), "missing")], [])
    chosen = choose_calibration(run, rows)
    probabilities = chosen.calibration.probabilities(chosen.scores)
    brier, error = (
        measure(chosen.labels, probabilities) for measure in (measure_brier_score, measure_calibration_error)
    )
    base = float(np.mean(chosen.labels == 1))
    text = (
        f"{chosen.note} Brier score {brier:.4f}, against {base * (1 - base):.4f} for always giving the share of "
        f"positives; mean calibration error {error:.4f}."
    )
    figures = [draw_histograms(rows), draw_calibration(chosen.labels, probabilities)]
    return Block(None, [Paragraph(text)], figures)


def _thresholds(run: ReportRun) -> Block:
    if run.scored is None:
        return Block(None, [Paragraph(_explain_missing_scores(run), "missing")], [])
    return Block(None, [tabulate_thresholds(run.scored, run.scorer.get("operating_point"))], [])


def _traffic(run: ReportRun) -> Block:
    if run.hides_clients:
        return Block(None, [Paragraph(NOT_COVERED, "missing")], [])
    table = tabulate_traffic(run)
    return Block(None, [Paragraph("No round has been evaluated yet.", "missing") if table is None else table], [])


def _privacy(run: ReportRun) -> Block:
    table = tabulate_privacy(run)
    return Block(None, [*([] if table is None else [table]), Definitions(describe_privacy(run))], [])


def _list_environment(run: ReportRun) -> dict[str, Any]:
    """The environment without what is exact about private rows: a hash of all of them, and the note on their number.

    Who knows all rows but a few could try what these are until the hash agrees.
    """
    hidden = {"note", "data"} if run.hides_clients else {"data"} if run.privacy is not None else set()
    return {key: value for key, value in run.environment.items() if key not in hidden}


def _operation_now(run: ReportRun) -> Block:
    """What the server waits for, and what somebody should look at."""
    if not run.is_federation:
        return Block(None, [Paragraph("This run is a simulation: nobody is waited for.", "missing")], [])
    operation = Operation(run)
    pieces = operation.describe_waiting()
    parts: list[Part] = [Ticking(pieces)] if pieces else []
    parts.append(Facts(operation.list_facts()))
    parts += [Paragraph(alarm, "caveat") for alarm in operation.list_alarms()]
    if run.hides_clients:
        note = "Who took part is not covered by the guarantee of this private run: do not publish this part."
        parts.append(Paragraph(note, "caveat"))
    return Block(None, parts, [])


def _operation_rounds(run: ReportRun) -> Block:
    """Who answered in which round, how long rounds took, and the reasons."""
    if not run.is_federation:
        return Block(None, [], [])
    operation = Operation(run)
    parts: list[Part] = [operation.tabulate_sites()]
    if reasons := operation.list_reasons():
        parts.append(Folded("Why sites gave no answer", [Definitions(reasons)]))
    if operation.lines:
        parts.append(Folded("Rounds", [operation.tabulate_rounds()]))
    figures = [operation.draw_attendance()] if operation.lines else []
    figures += [operation.draw_times()] if operation.times else []
    return Block(None, parts, figures)


def _settings(run: ReportRun) -> Block:
    data = [Paragraph(f"Data: {run.note}.")] if run.note else []
    return Block(
        None,
        [
            Paragraph(f"Folder {run.folder.path.resolve().name}, method {run.recipe.method}, seed {run.recipe.seed}."),
            *data,
            Folded("Configuration", [Definitions(flatten_document(run.config))]),
            Folded("Environment", [Definitions(flatten_document(_list_environment(run)))]),
        ],
        [],
    )


def _explain_missing_scores(run: ReportRun) -> str:
    if run.is_federation:
        return f"{NO_SCORES}: a federation's rows and their scores stay at the sites."
    if run.is_embedding:
        return "The model gives embeddings, not scores: its AUC is that of pairs, and it has no curve or threshold."
    if not run.done:
        return f"{NO_SCORES}: they are written when the run is done."
    if "scores" in run.result.get("not_released", {}):
        return f"{NO_SCORES}: {run.result['not_released']['scores']}."
    return f"{NO_SCORES}: the folder has no scores.npz."
