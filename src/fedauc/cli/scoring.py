"""The commands that use a trained model: predict, threshold, calibrate, export."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedauc.cli.lazy_import import finish_imports
from fedauc.cli.training import spelling_options

if TYPE_CHECKING:
    import numpy as np

    from fedauc.scoring.scorer import ReferenceRows, Scorer
    from fedauc.scoring.table_files import ScoreWriter
    from fedauc.scoring.thresholds import OperatingPoint

RULE_FIELDS = {
    "fpr": "fpr",
    "recall": "recall",
    "cost-fn": "cost_fn",
    "cost-fp": "cost_fp",
    "alerts-per-day": "alerts",
}
"""The options that choose a threshold, and what the rules call their values."""

ModelFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a finished run.", show_default=False)]


def predict(
    folder: ModelFolder,
    table: Annotated[Path, typer.Argument(help="CSV, JSON lines, Parquet or Arrow with new rows.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="A .csv, .parquet or .jsonl file to write; CSV on the screen unless given."),
    ] = None,
    identifier: Annotated[
        str | None, typer.Option("--id", metavar="COLUMN", help="Column that names rows; row numbers unless given.")
    ] = None,
    label: Annotated[
        str | None, typer.Option("--label", metavar="COLUMN", help="Column with the true labels, to measure the AUC.")
    ] = None,
) -> None:
    """Score new rows: raw score, calibrated probability, and the decision at the model's threshold.

    The preparation of the columns is part of the model. Columns that the model does not use are ignored.

    Example: [bold]fedauc predict runs/first new.csv --out scores.csv[/bold]
    """
    finish_imports()

    from fedauc.data.io.readers import check_exists, naming_file
    from fedauc.scoring.scorer import load
    from fedauc.scoring.table_files import check_output, write_scores

    check_exists(table)
    if out is not None:
        check_output(out)
    scorer = load(folder)
    labels: list[np.ndarray] = []
    with naming_file(table), write_scores(out, sys.stdout) as writer:
        scores = _score_blocks(scorer, table, identifier, label, writer, labels)
    if out is not None:
        alerts = int((scores >= scorer.operating_point.threshold).sum())
        print(f"{out}: {len(scores):,} rows, {alerts:,} of them with the decision {scorer.label_values[1]!r}")
    if label is not None:
        if _is_trained_on(folder, table):
            logging.getLogger("fedauc").warning(
                "%s is the table that the model was trained on, so that its AUC is too high for new rows; "
                "`fedauc show %s` has that of the test rows",
                table,
                folder,
            )
        _print_metrics(scorer, labels, scores, sys.stderr if out is None else sys.stdout)


def threshold(
    folder: ModelFolder,
    fpr: Annotated[float | None, typer.Option("--fpr", help="Largest false positive rate.")] = None,
    recall: Annotated[float | None, typer.Option("--recall", help="Smallest share of positives to find.")] = None,
    cost_fn: Annotated[float | None, typer.Option("--cost-fn", help="Cost of a missed positive.")] = None,
    cost_fp: Annotated[float | None, typer.Option("--cost-fp", help="Cost of a false alert.")] = None,
    alerts: Annotated[float | None, typer.Option("--alerts-per-day", help="Alerts that can be handled.")] = None,
    rows: Annotated[float | None, typer.Option("--rows-per-day", help="Rows that arrive meanwhile.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and store nothing.")] = False,
) -> None:
    """Show the operating points of a model, and store the one that is chosen: by rate, recall, cost or alerts.

    The numbers come from the validation rows of the run, or from its training rows where there were none.

    Example: [bold]fedauc threshold runs/first --cost-fn 100 --cost-fp 1[/bold]
    """
    rules = _list_rules(fpr, recall, (cost_fn, cost_fp), (alerts, rows))
    finish_imports()

    from fedauc.scoring.scorer import load

    scorer = load(folder)
    if rules:
        with spelling_options(RULE_FIELDS):
            scorer = scorer.with_operating_point(rules[0](scorer.require_reference()))
    if rules and not dry_run:
        _store_decision(folder, scorer)
    _print_points(scorer, "not stored" if rules and dry_run else "in use")


def calibrate(
    folder: ModelFolder,
    by: Annotated[
        str, typer.Option("--by", metavar="NAME", help="platt, for few positives, or isotonic, for many.")
    ] = "platt",
) -> None:
    """Fit the probabilities of a model again, and store them; scores and threshold stay.

    Platt scaling fits two numbers, an isotonic calibration any rising curve. Both come from the validation rows of the
    run, or from its training rows where there were none.

    Example: [bold]fedauc calibrate runs/first --by isotonic[/bold]
    """
    finish_imports()

    from fedauc.scoring.calibration import measure_brier_score, measure_calibration_error
    from fedauc.scoring.scorer import load

    stored = load(folder)
    calibrated, rows = stored.with_calibration(by), stored.require_reference()
    _store_decision(folder, calibrated)
    for scorer, name in ((stored, "before"), (calibrated, "now")):
        probabilities = scorer.calibration.probabilities(rows.scores)
        error, brier = (
            measure(rows.labels, probabilities) for measure in (measure_calibration_error, measure_brier_score)
        )
        print(f"{name:8}{scorer.calibration.name:10}calibration error {error:.4f}, Brier score {brier:.5f}")
    print(f"measured on the {rows.part} rows, which the calibration was fitted on")


def export(
    folder: ModelFolder,
    out: Annotated[Path, typer.Option("--out", help="The folder to write into.", show_default=False)],
    to: Annotated[str, typer.Option("--to", metavar="a,b,...", help="onnx, pt2, safetensors or joblib.")] = "onnx",
) -> None:
    """Write a model for other programs, with the preparation of the columns and the calibration.

    Example: [bold]fedauc export runs/first --to onnx,pt2 --out exported[/bold]
    """
    finish_imports()

    from fedauc.export import export_scorer
    from fedauc.scoring.scorer import load

    for file in export_scorer(load(folder), [name.strip() for name in to.split(",")], out):
        print(file)


COMMANDS: dict[str, Callable[..., None]] = {
    "predict": predict,
    "threshold": threshold,
    "calibrate": calibrate,
    "export": export,
}
"""The commands of this module, in the order in which help lists them."""


def _store_decision(folder: Path, scorer: Scorer) -> None:
    """Write the threshold and the calibration of a scorer into its folder, its model card and its manifest."""
    from fedauc.experiments.manifest import check_manifest_entries, update_manifest
    from fedauc.files import naming_damage
    from fedauc.scoring.model_card import CARD_FILE, update_model_card
    from fedauc.scoring.scorer import SCORER_FILE

    # What was changed by somebody else must not get a new hash here.
    check_manifest_entries(folder, (SCORER_FILE, CARD_FILE))
    with naming_damage(folder):
        scorer.save_decision(folder)
        update_model_card(folder, scorer)
    update_manifest(folder, (SCORER_FILE, CARD_FILE))


def _is_trained_on(folder: Path, table: Path) -> bool:
    """Whether a file is the table of the run in a folder; a model that was saved by `fit` does not know its table."""
    from fedauc.experiments.folder import read_json_object
    from fedauc.files import naming_damage

    if not (folder / "config.json").is_file():
        return False
    with naming_damage(folder):
        path = Path(str(read_json_object(folder / "config.json").get("data", {}).get("path", "")))
    return path.is_file() and path.samefile(table)


def _list_rules(
    fpr: float | None,
    recall: float | None,
    costs: tuple[float | None, float | None],
    alerts: tuple[float | None, float | None],
) -> list[Callable[[ReferenceRows], OperatingPoint]]:
    """The rule that the options ask for, as a function of the reference rows; none where no option is given."""
    for names, pair in ((("--cost-fn", "--cost-fp"), costs), (("--alerts-per-day", "--rows-per-day"), alerts)):
        if (pair[0] is None) != (pair[1] is None):
            missing = names[0] if pair[0] is None else names[1]
            raise ValueError(f"{missing} is missing; {names[0]} and {names[1]} go together")
    given_rules = [fpr is not None, recall is not None, costs[0] is not None, alerts[0] is not None]
    if sum(given_rules) > 1:
        raise ValueError("several rules are given; choose one of --fpr, --recall, --cost-fn and --alerts-per-day")

    def choose(rows: ReferenceRows) -> OperatingPoint:
        from fedauc.scoring import thresholds

        if fpr is not None:
            return thresholds.choose_by_fpr(rows.labels, rows.scores, fpr)
        if recall is not None:
            return thresholds.choose_by_recall(rows.labels, rows.scores, recall)
        if costs[0] is not None and costs[1] is not None:
            return thresholds.choose_by_cost(rows.labels, rows.scores, costs[0], costs[1])
        assert alerts[0] is not None
        assert alerts[1] is not None
        return thresholds.choose_by_alerts(rows.labels, rows.scores, alerts[0], alerts[1])

    return [choose] if any(given_rules) else []


def _score_blocks(
    scorer: Scorer,
    table: Path,
    identifier: str | None,
    label: str | None,
    writer: ScoreWriter,
    labels: list[np.ndarray],
) -> np.ndarray:
    """Score a file block by block into a writer; return all scores, and add the label column to `labels`."""
    import numpy as np

    from fedauc.data.checks import counting_rows_from
    from fedauc.scoring.scorer import match_labels
    from fedauc.scoring.table_files import iterate_tables
    from fedauc.scoring.unusual_columns import UnusualColumns

    others = [name for name in (identifier, label) if name is not None]
    if others and not scorer.feature_names:
        raise ValueError(f"{others[0]!r} names a column, but the model takes arrays, which have none; leave it out")
    start, all_scores = 0, [np.zeros(0)]
    unusual = None if scorer.encoder is None else UnusualColumns(scorer.encoder, scorer.ranges)
    for block in iterate_tables(table, scorer, others):
        with counting_rows_from(start):
            scored = scorer.score_rows(block)
        if unusual is not None:
            unusual.add_block(block)
        rows = len(scored.scores)
        names = np.arange(start, start + rows) if identifier is None else block[identifier].to_numpy(dtype=object)
        columns = {
            identifier or "row": names,
            "score": scored.scores,
            "probability": scored.probabilities,
            "decision": scorer.classes[scored.alerts.astype(np.int64)],
        }
        writer.write_block(columns)
        start += rows
        all_scores.append(scored.scores)
        if label is not None:
            labels.append(match_labels(block[label].tolist(), scorer.label_values))
    for line in [] if unusual is None else unusual.describe():
        logging.getLogger("fedauc").warning(line)
    return np.concatenate(all_scores)


def _print_metrics(scorer: Scorer, labels: list[np.ndarray], scores: np.ndarray, stream: Any) -> None:
    """The AUC with its interval, and what the threshold does, on rows whose labels are known."""
    import numpy as np

    from fedauc.metrics.delong import delong_interval
    from fedauc.scoring.calibration import measure_brier_score, measure_calibration_error
    from fedauc.scoring.model_card import format_rate
    from fedauc.scoring.thresholds import measure_threshold

    classes = np.concatenate(labels)
    is_labelled = classes >= 0
    if not is_labelled.all():
        print(f"{int((~is_labelled).sum())} rows without a label are left out", file=stream)
    positive, values = classes[is_labelled], np.asarray(scores)[is_labelled]
    if positive.min(initial=1) == positive.max(initial=0):
        print(f"no AUC: all {len(positive)} labels are of one class", file=stream)
        return
    interval = delong_interval(positive, values)
    point = measure_threshold(positive, values, scorer.operating_point.threshold, scorer.operating_point.rule)
    probabilities = scorer.calibration.probabilities(values)
    lines = {
        "rows": f"{len(values):,}, {point.positives:,} of them {scorer.label_values[1]}",
        "AUC": f"{interval.estimate:.4f} [{interval.low:.4f}, {interval.high:.4f}]",
        "recall": f"{format_rate(point.recall, 100)} %",
        "false positive rate": f"{format_rate(point.fpr, 100)} %",
        "precision": f"{format_rate(point.precision, 100)} %",
        "calibration error": f"{measure_calibration_error(positive, probabilities):.4f}",
        "Brier score": f"{measure_brier_score(positive, probabilities):.5f}",
    }
    for name, text in lines.items():
        print(f"{name:20}{text}", file=stream)


def _print_points(scorer: Scorer, state: str) -> None:
    """The chosen threshold and the table of others."""
    from rich.console import Console
    from rich.table import Table

    from fedauc.scoring.model_card import POINT_HEADERS, format_point
    from fedauc.scoring.thresholds import list_operating_points

    rows, point = scorer.require_reference(), scorer.operating_point
    alternatives = [
        candidate for candidate in list_operating_points(rows.labels, rows.scores) if candidate.rule != point.rule
    ]
    lines = [format_point(candidate) for candidate in (point, *alternatives)]
    console = Console()
    headed = list(zip(POINT_HEADERS, *lines, strict=True))
    # A column is as wide as its longest word, so that only spaces are broken; what room is left widens the first ones.
    widths = [max(len(word) for cell in cells for word in cell.split()) for cells in headed]
    gap = 2 if sum(widths) + 2 * len(widths) <= console.width else 1
    room = max(0, console.width - sum(widths) - gap * len(widths))
    for number, cells in enumerate(headed):
        wider = min(room, max(map(len, cells)) - widths[number])
        widths[number], room = widths[number] + wider, room - wider
    table = Table(box=None, padding=(0, gap, 0, 0))
    for header, width in zip(POINT_HEADERS, widths, strict=True):
        table.add_column(header, width=width)
    for number, cells in enumerate(lines):
        table.add_row(*cells, style="" if number else "bold")
    console.print(table)
    note = f"The first line is the chosen threshold ({state}). The numbers are those of the {rows.part} rows"
    console.print(f"\n{note}, with Wilson's 95 % intervals.", highlight=False)
