"""The model card says what is known, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from markdown_it import MarkdownIt

from fedauc.scoring.calibration import measure_brier_score, measure_calibration_error
from fedauc.scoring.model_card import CardFacts, MetricOnTest, PartSize, compose_model_card, update_model_card
from fedauc.scoring.scorer import Scorer
from fedauc.scoring.thresholds import choose_by_recall
from small_scorers import draw_table, make_small_scorer

FACTS = CardFacts(
    data="900 rows of claims.csv to train on",
    model="mlp",
    method="cycp-pairwise",
    sites=7,
    parts=[PartSize("training", 900, 45), PartSize("test", 300, 15)],
    settings={"cycles": 30, "odd | value": "a|b"},
    metrics=[MetricOnTest("AUC", 0.91234, 0.88, 0.94), MetricOnTest("AP", 0.5)],
    client_auc={**{f"site-{number}": number / 10 for number in range(1, 10)}, "one-class": None},
    limits=["A limit of this run."],
    environment={"fedauc": "0.0.1", "gpu": "none of your business"},
)


def render_card(scorer: Scorer | None, facts: CardFacts = FACTS) -> str:
    return str(MarkdownIt("commonmark").enable("table").render(compose_model_card(scorer, facts)))


def test_a_card_has_its_sections_in_order() -> None:
    html = render_card(make_small_scorer())
    headings = [part.split("</h2>")[0] for part in html.split("<h2>")[1:]]
    assert headings == [
        "Intended use",
        "Data",
        "Method",
        "Test results",
        "Sites",
        "Calibration",
        "Operating points",
        "Limits",
        "How to use it",
        "Versions",
    ]
    assert html.startswith("<h1>Model card: cycp-pairwise with mlp</h1>")


def test_a_card_shows_the_numbers() -> None:
    html = render_card(make_small_scorer())
    for cell in ("900", "45", "5.000%", "0.9123", "0.8800 to 0.9400", "0.5000"):
        assert f"<td>{cell}</td>" in html
    assert "<code>age</code>, <code>state</code>, <code>day</code>, <code>flag</code>" in html
    assert "A limit of this run." in html
    assert "none of your business" not in html
    # A bar inside a cell does not begin a new one.
    assert "<td>odd | value</td>" in html


def test_a_card_names_the_worst_and_the_best_sites() -> None:
    html = render_card(make_small_scorer())
    for number in (1, 2, 3, 7, 8, 9):
        assert f"<td><code>site-{number}</code></td>\n<td>0.{number}000</td>" in html
    assert "site-5" not in html
    assert "Sites without an AUC, because their test rows are of one class: 1." in html


def test_a_card_measures_the_calibration_on_the_test_rows() -> None:
    scorer = make_small_scorer()
    scores = scorer.scores(draw_table(300, seed=5))
    labels = (np.arange(300) % 10 == 0).astype(np.int8)
    facts = CardFacts(**{**vars(FACTS), "test": (labels, scores)})
    probabilities = scorer.calibration.probabilities(scores)
    card = compose_model_card(scorer, facts)
    assert f"is {measure_calibration_error(labels, probabilities):.4f}" in card
    assert f"Brier score {measure_brier_score(labels, probabilities):.5f}" in card
    # A constant probability of 1/10 has the Brier score 0.1 · 0.9.
    assert "would have 0.09000" in card


def test_a_card_without_test_rows_says_so() -> None:
    card = compose_model_card(make_small_scorer(), CardFacts(**{**vars(FACTS), "metrics": [], "client_auc": None}))
    assert "No test rows were given" in card
    assert "## Sites" not in card


def test_a_card_of_embeddings_has_no_thresholds() -> None:
    html = render_card(None, replace(FACTS, gives_embeddings=True))
    assert "Operating points" not in html
    assert "gives an embedding per row" in html


def test_a_card_without_a_scorer_is_not_taken_for_one_of_embeddings() -> None:
    """A private run may have no public rows to calibrate on."""
    html = render_card(None)
    assert "No calibration and no threshold were saved" in html
    assert "embedding" not in html


def test_a_new_operating_point_replaces_the_old_one_in_the_card(tmp_path: Path) -> None:
    scorer = make_small_scorer()
    before = compose_model_card(scorer, FACTS)
    (tmp_path / "MODEL_CARD.md").write_text(before)
    rows = scorer.require_reference()
    changed = scorer.with_operating_point(choose_by_recall(rows.labels, rows.scores, 0.77)).with_calibration("isotonic")
    update_model_card(tmp_path, changed)
    assert (tmp_path / "MODEL_CARD.md").read_text() == compose_model_card(changed, FACTS)
    assert "rule: recall 0.77" in (tmp_path / "MODEL_CARD.md").read_text()
