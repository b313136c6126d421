"""`MODEL_CARD.md`: what a saved model is for, what it was trained on, how good it is, and what it must not be used for.

The sections follow Mitchell et al. 2019 (Model Cards for Model Reporting).
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedauc.files import write_atomically
from fedauc.scoring.calibration import measure_brier_score, measure_calibration_error
from fedauc.scoring.scorer import REFERENCE_FILE, Scorer
from fedauc.scoring.thresholds import OperatingPoint, Rate, list_operating_points

CARD_FILE = "MODEL_CARD.md"

SITES_SHOWN = 3
"""How many of the worst and of the best sites a card names."""

FEATURES_SHOWN = 40
"""How many features a card names."""

VERSIONS_SHOWN = ("fedauc", "python", "torch", "numpy", "platform")
"""What a card says of the environment."""


class MetricOnTest(NamedTuple):
    """A metric on the test rows; `low` and `high` are the ends of its 95 % interval, where it has one."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


class PartSize(NamedTuple):
    """Rows and positives of a part of the data."""

    part: str
    rows: int
    positives: int

    @staticmethod
    def of(part: str, labels: np.ndarray) -> PartSize:
        """The size of a part from its labels."""
        return PartSize(part, len(labels), int((labels == 1).sum()))


@dataclass(frozen=True)
class CardFacts:
    """What a card says that the scorer does not know.

    `data` and `model` describe them in one line each, `settings` are the numbers of the run by name, `client_auc` holds
    the test AUC of every site (None where a site lacks a class), `test` the labels and scores of the test rows, and
    `limits` are sentences to add to the standing ones. `privacy` are sentences on the guarantee of a private training,
    and `test_note` says how the metrics were measured. `is_simulated` is false where sites kept their rows.
    """

    data: str
    model: str
    method: str
    sites: int
    parts: Sequence[PartSize]
    settings: Mapping[str, Any]
    metrics: Sequence[MetricOnTest] = ()
    client_auc: Mapping[str, float | None] | None = None
    test: tuple[np.ndarray, np.ndarray] | None = None
    limits: Sequence[str] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    gives_embeddings: bool = False
    privacy: Sequence[str] = ()
    is_simulated: bool = True
    test_note: str = "Measured on the test rows, which neither training nor the choice of a threshold has used."


def write_model_card(folder: Path, scorer: Scorer | None, facts: CardFacts) -> None:
    """Write the card beside the model."""
    write_atomically(folder / CARD_FILE, compose_model_card(scorer, facts).encode())


def compose_model_card(scorer: Scorer | None, facts: CardFacts) -> str:
    """The card as Markdown; without a scorer (a model of embeddings) it has no calibration and no thresholds."""
    sections = [
        f"# Model card: {facts.method} with {facts.model}",
        _describe_use(scorer, facts),
        _describe_data(scorer, facts),
        _describe_method(facts),
        _describe_test(facts),
        _describe_sites(facts),
        *([] if scorer is None else [_describe_calibration(scorer, facts.test), _describe_points(scorer)]),
        _describe_guarantee(facts),
        _describe_limits(scorer, facts),
        *([] if scorer is None else [_describe_loading(scorer)]),
        _describe_versions(facts),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def update_model_card(folder: Path, scorer: Scorer) -> None:
    """Replace the calibration and the operating points in the card of a run after they were chosen anew."""
    path, scores = folder / CARD_FILE, folder / "scores.npz"
    if not path.is_file():
        return
    tested = None
    if scores.is_file():
        with scores.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            tested = stored["labels"], stored["scores"]
    renewed = {"Calibration": _describe_calibration(scorer, tested), "Operating points": _describe_points(scorer)}
    sections = path.read_text(encoding="utf-8").split("\n\n## ")
    changed = [renewed.get(section.partition("\n")[0], section).removeprefix("## ") for section in sections]
    write_atomically(path, "\n\n## ".join(changed).encode())


def _describe_use(scorer: Scorer | None, facts: CardFacts) -> str:
    lines = ["## Intended use", ""]
    if scorer is None and not facts.gives_embeddings:
        text = "The model ranks rows by its score. No calibration and no threshold were saved with it."
        return "\n".join([*lines, text])
    if scorer is None:
        return "\n".join([*lines, "The model gives an embedding per row, for verification: rows of a class lie close."])
    negative, positive = scorer.label_values
    lines.append(
        f"The model ranks rows by how likely their label is `{positive}` rather than `{negative}`. It was trained to "
        "maximise the AUC, for positives that are rare. Its score orders rows, its probability is a calibrated score, "
        "and its decision compares the score with the threshold below. People or rules outside the model decide what "
        "follows from a decision. It is not made for rows of another kind or origin than those it was trained on."
    )
    return "\n".join(lines)


def _describe_data(scorer: Scorer | None, facts: CardFacts) -> str:
    lines = ["## Data", "", f"{facts.data}.", "", f"Training rows are divided over {facts.sites:,} sites."]
    rows = [
        (size.part, f"{size.rows:,}", f"{size.positives:,}", f"{size.positives / max(1, size.rows):.3%}")
        for size in facts.parts
    ]
    if rows:
        lines += ["", *format_table(("part", "rows", "positives", "share"), rows)]
    if scorer is not None and scorer.feature_names:
        names = [f"`{name}`" for name in scorer.feature_names]
        more = f" and {len(names) - FEATURES_SHOWN} more" if len(names) > FEATURES_SHOWN else ""
        width = math.prod(scorer.input_shape)
        lines += ["", f"{len(names)} columns, encoded as {width} inputs: {', '.join(names[:FEATURES_SHOWN])}{more}."]
    elif scorer is not None:
        lines += ["", f"A row is an array of shape {scorer.input_shape} and type {scorer.input_dtype}."]
    return "\n".join(lines)


def _describe_method(facts: CardFacts) -> str:
    lines = ["## Method", "", f"`{facts.method}` on the model `{facts.model}`, with these settings:", ""]
    return "\n".join([*lines, *format_table(("setting", "value"), [(k, f"`{v}`") for k, v in facts.settings.items()])])


def _describe_test(facts: CardFacts) -> str:
    if not facts.metrics and facts.privacy:
        return "## Test results\n\nNo metric is known: the evaluation's noise hides it, or there were no test rows."
    if not facts.metrics:
        return "## Test results\n\nNo test rows were given, so nothing is known about new rows."
    rows = [(metric.label, f"{metric.value:.4f}", _format_interval(metric)) for metric in facts.metrics]
    return "\n".join(
        ["## Test results", "", facts.test_note, "", *format_table(("metric", "value", "95 % interval"), rows)]
    )


def _describe_sites(facts: CardFacts) -> str:
    if not facts.client_auc:
        return ""
    known = sorted((value, name) for name, value in facts.client_auc.items() if value is not None)
    if not known:
        return ""
    unknown = len(facts.client_auc) - len(known)
    shown = known if len(known) <= 2 * SITES_SHOWN else [*known[:SITES_SHOWN], *known[-SITES_SHOWN:]]
    lines = ["## Sites", "", f"Test AUC by site, the worst and the best of {len(known):,}:", ""]
    lines += format_table(("site", "AUC"), [(f"`{name}`", f"{value:.4f}") for value, name in shown])
    if unknown:
        lines += ["", f"Sites without an AUC, because their test rows are of one class: {unknown:,}."]
    return "\n".join(lines)


def _describe_calibration(scorer: Scorer, tested: tuple[np.ndarray, np.ndarray] | None) -> str:
    names = {"platt": "Platt scaling", "isotonic": "Isotonic calibration"}
    part = scorer.calibrated_on
    fitted = f"{names[scorer.calibration.name]} of the {part} rows"
    if part != "site's training":
        fitted += ", fitted on histograms of the sites' scores that were added up"
    lines = ["## Calibration", "", f"{fitted}."]
    held_out = "held-out" if part == "site's training" else "test"
    if part == "training":
        lines[-1] += " There were no validation rows."
    if part != "validation":
        lines[-1] += " Training rows are fitted better than new ones, so that probabilities may be too extreme."
    if tested is not None:
        labels, scores = tested
        probabilities = scorer.calibration.probabilities(scores)
        constant = np.full(len(labels), np.mean(labels))
        lines += [
            "",
            f"On the {held_out} rows the calibration error (ten groups of equal size) is "
            f"{measure_calibration_error(labels, probabilities):.4f}, and the Brier score "
            f"{measure_brier_score(labels, probabilities):.5f}; a constant probability would have "
            f"{measure_brier_score(labels, constant):.5f}.",
        ]
    return "\n".join(lines)


def _describe_points(scorer: Scorer) -> str:
    point = scorer.operating_point
    lines = [
        "## Operating points",
        "",
        f"A row is an alert if its score is at least **{point.threshold:.6g}** (rule: {point.rule}). "
        f"The numbers are those of the {scorer.calibrated_on} rows, with Wilson's 95 % intervals for a fixed "
        "threshold. FPR is the false positive rate, the share of negatives that are alerts. Precision and alerts per "
        "1,000 rows hold where positives are as frequent as there.",
        "",
    ]
    points = [point]
    if scorer.reference is not None:
        table = list_operating_points(scorer.reference.labels, scorer.reference.scores)
        points += [candidate for candidate in table if candidate.rule != point.rule]
    lines += format_table(POINT_HEADERS, [format_point(candidate) for candidate in points])
    return "\n".join(
        [*lines, "", "The first line is the threshold in use. `fedauc threshold DIR --fpr 0.05` changes it."]
    )


def _describe_guarantee(facts: CardFacts) -> str:
    return "\n".join(["## Privacy", "", *(f"- {sentence}" for sentence in facts.privacy)]) if facts.privacy else ""


def _describe_limits(scorer: Scorer | None, facts: CardFacts) -> str:
    simulated = (
        "The federation was simulated: all sites' rows were read in one place. What a real federation would have sent "
        "is counted, but nothing was kept apart."
    )
    limits = [
        *([simulated] if facts.is_simulated else []),
        *(
            []
            if facts.privacy
            else ["Training was not differentially private, and the weights may reveal something about training rows."]
        ),
        "The AUC says how well rows are ranked over all sites together; a site of its own may be ranked worse.",
        *facts.limits,
    ]
    if scorer is not None:
        limits.append("A new share of positives, or new kinds of rows, make probabilities and thresholds wrong.")
    return "\n".join(["## Limits", "", *(f"- {limit}" for limit in limits)])


def _describe_loading(scorer: Scorer) -> str:
    table = 'pandas.read_csv("new.csv")' if scorer.feature_names else "rows"
    lines = [
        "## How to use it",
        "",
        f"The folder needs `scorer.json` and `{'model.pt' if scorer.model is not None else 'model.pt2'}`; "
        f"`{REFERENCE_FILE}` is needed to choose another threshold.",
        "",
        "```",
        *(["import pandas", ""] if scorer.feature_names else []),
        "import fedauc",
        "",
        'scorer = fedauc.load("DIR")',
        f"probabilities = scorer.predict_proba({table})[:, 1]",
        "```",
    ]
    if scorer.feature_names:
        lines += ["", "On the command line: `fedauc predict DIR new.csv --out scores.csv`."]
    return "\n".join(lines)


def _describe_versions(facts: CardFacts) -> str:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    versions = [(name, f"`{facts.environment[name]}`") for name in VERSIONS_SHOWN if name in facts.environment]
    return "\n".join(["## Versions", "", f"Written on {today}.", "", *format_table(("part", "version"), versions)])


POINT_HEADERS = ("rule", "threshold", "FPR, %", "recall, %", "precision, %", "alerts/1,000")


def format_point(point: OperatingPoint) -> tuple[str, ...]:
    """An operating point as the cells of a table."""
    shares = [format_rate(rate, 100) for rate in (point.fpr, point.recall, point.precision)]
    return point.rule, f"{point.threshold:.5g}", *shares, format_rate(point.alerts_per_1000)


def format_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table; a bar inside a cell is escaped."""
    lines = [headers, ["---"] * len(headers), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def format_rate(rate: Rate, factor: float = 1) -> str:
    """A share with its interval in three digits; with a factor of 100, in percent.

    >>> format_rate(Rate(0.00929, 0.0051, 0.017), 100), format_rate(Rate(118.8, 101.1, 139.0))
    ('0.93 (0.51-1.70)', '119 (101-139)')
    """
    if math.isnan(rate.estimate):
        return "no alerts"
    numbers = [factor * value for value in rate]
    estimate, low, high = (f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}" for number in numbers)
    return f"{estimate} ({low}-{high})"


def _format_interval(metric: MetricOnTest) -> str:
    return "" if metric.low is None or metric.high is None else f"{metric.low:.4f} to {metric.high:.4f}"
