"""The scikit-learn classifier: its contract, its place in pipelines and searches, and its own promises."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, LeaveOneGroupOut, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

import fedauc
from fedauc import Clients, FederatedAUCClassifier, fit
from fedauc.data.dataset import Rows
from fedauc.models.linear import Linear
from fedauc.models.mlp import MLP

CHECKS = list(estimator_checks_generator(FederatedAUCClassifier(cycles=3)))

SITES = 6


def make_rows(count: int = 240, features: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A fifth positives, shifted by one in every feature, at six sites; columns of very different scales."""
    rng = np.random.default_rng(1)
    y = np.arange(count) % 5 == 0
    x = (rng.normal(size=(count, features)) + y[:, None]) * 10.0 ** np.arange(features)
    return x, y.astype(int), np.arange(count) // 5 % SITES


def make_classifier(**parameters: Any) -> FederatedAUCClassifier:
    return FederatedAUCClassifier(**{"cycles": 2, "groups": 3, **parameters})


@pytest.mark.parametrize(("estimator", "check"), CHECKS, ids=[check.func.__name__ for _, check in CHECKS])
def test_the_contract_of_scikit_learn_holds(estimator: Any, check: Any) -> None:
    check(estimator)


def test_no_check_of_scikit_learn_is_left_out() -> None:
    """More than fifty checks, none of them marked as an expected failure."""
    assert len(CHECKS) > 50
    tags = FederatedAUCClassifier().__sklearn_tags__()
    assert (tags.no_validation, tags.non_deterministic, tags._skip_test) == (False, False, False)


def test_scores_rank_as_those_of_fit_and_their_auc_is_the_score() -> None:
    x, y, site = make_rows()
    model = make_classifier(random_state=3).fit(x, y, clients=site)
    scaled = ((x - x.mean(0)) / x.std(0)).astype(np.float32)
    clients = Clients.from_arrays(scaled, y, client=site)
    twin = fit(Linear().build((4,), 3), clients, "cycp-pairwise", cycles=2, groups=3, seed=3, weighting="pooled")
    assert model.score(x, y) == pytest.approx(roc_auc_score(y, twin.scores(scaled)), abs=1e-12)
    assert model.score(x, y) == pytest.approx(roc_auc_score(y, model.decision_function(x)), abs=1e-12)
    # Platt's targets as weights of rows that appear once in each class; the classifier puts its scores into bins.
    targets = np.where(y == 1, (y.sum() + 1) / (y.sum() + 2), 1 / ((1 - y).sum() + 2))
    scores, weights = np.tile(twin.scores(scaled), 2)[:, None], np.concatenate([targets, 1 - targets])
    logistic = LogisticRegression(C=np.inf, tol=1e-8).fit(scores, np.repeat([1, 0], len(y)), sample_weight=weights)
    expected = logistic.predict_proba(scores[: len(y)])[:, 1]
    np.testing.assert_allclose(model.predict_proba(x)[:, 1], expected, atol=2e-3)


@pytest.mark.parametrize("labels", [("no", "yes"), (-1, 1), (False, True), (2, 7)])
def test_labels_are_any_two_values_and_the_larger_one_is_positive(labels: tuple[Any, Any]) -> None:
    x, y, site = make_rows()
    named = np.array(labels)[y]
    model = make_classifier().fit(x, named, clients=site)
    assert model.classes_.tolist() == list(labels)
    assert set(model.predict(x)) == set(labels)
    assert model.score(x, named) == make_classifier().fit(x, y, clients=site).score(x, y) > 0.9


def test_the_same_random_state_gives_the_same_bits_and_pickles_keep_them() -> None:
    x, y, site = make_rows()
    first, again, other = (make_classifier(model="mlp", random_state=seed).fit(x, y, site) for seed in (1, 1, 2))
    scores = first.decision_function(x)
    assert np.array_equal(scores, again.decision_function(x))
    assert not np.array_equal(scores, other.decision_function(x))
    assert np.array_equal(scores, pickle.loads(pickle.dumps(first)).decision_function(x))
    drawn = make_classifier(random_state=np.random.RandomState(0)).fit(x, y, site)
    assert drawn.score(x, y) > 0.9


def test_clones_and_parameters_follow_scikit_learn() -> None:
    model = make_classifier(model=MLP(hidden=(8,)), settings={"local_steps": 2})
    copied = clone(model).set_params(cycles=1)
    assert copied.get_params()["model"] == MLP(hidden=(8,))
    assert (model.cycles, copied.cycles) == (2, 1)
    x, y, site = make_rows()
    assert copied.fit(x, y, site).module_.body[1].out_features == 8
    own = make_classifier(model=torch.nn.Linear(4, 1)).fit(x, y, site)
    assert isinstance(own.module_, torch.nn.Linear)


def test_a_frame_gives_feature_names_and_columns_in_another_order_are_refused() -> None:
    x, y, site = make_rows()
    frame = pd.DataFrame(x, columns=["age", "income", "visits", "days"])
    model = make_classifier().fit(frame, pd.Series(y), clients=pd.Series(site).astype(str))
    assert model.feature_names_in_.tolist() == model.get_feature_names_out().tolist() == list(frame)
    assert np.array_equal(model.decision_function(frame), make_classifier().fit(x, y, site).decision_function(x))
    with pytest.raises(ValueError, match="feature names should match"):
        model.decision_function(frame[list(frame)[::-1]])
    assert make_classifier(groups=1).fit(x, y).get_feature_names_out().tolist() == ["x0", "x1", "x2", "x3"]


def make_frame(rows: int = 240) -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
    """Numbers with gaps, text, booleans, dates, and a column that says nothing."""
    x, y, site = make_rows(rows)
    frame = pd.DataFrame(
        {
            "age": np.where(np.arange(rows) % 7 == 0, np.nan, x[:, 0]),
            "city": np.where(x[:, 1] > 5, "Bern", "Rome"),
            "smokes": x[:, 2] > 50,
            "since": pd.Timestamp("2020-01-01") + pd.to_timedelta(np.arange(rows), unit="D"),
            "country": "CH",
        }
    )
    return frame, y, site


def test_a_frame_with_text_dates_and_gaps_is_encoded_by_summaries_of_the_sites() -> None:
    frame, y, site = make_frame()
    model = make_classifier().fit(frame, y, clients=site)
    assert model.score(frame, y) > 0.8
    names = model.get_feature_names_out().tolist()
    assert {"age", "age (missing)", "city=Bern", "smokes", "since"} <= set(names)
    assert list(model.ignored_columns_) == ["country"]
    assert model.n_features_in_ == len(model.feature_names_in_) == 5
    scores = model.decision_function(frame)
    assert np.array_equal(scores, model.decision_function(frame[list(frame)[::-1]]))
    assert np.array_equal(scores, pickle.loads(pickle.dumps(model)).decision_function(frame))
    assert np.isfinite(model.decision_function(frame.assign(city="Oslo", age=np.nan))).all()
    with pytest.raises(ValueError, match="'city'"):
        model.decision_function(frame.drop(columns="city"))
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        make_classifier().fit(frame, y[:-1], clients=site)
    with sklearn.config_context(enable_metadata_routing=True):
        folds = cross_val_score(make_classifier(), frame, y, cv=3, params={"clients": site}, error_score="raise")
    assert min(folds) > 0.7


def test_bins_give_a_network_what_a_line_cannot_say() -> None:
    """Positives lie in the middle of the only feature, which no linear model of that feature can rank."""
    x = np.linspace(-1, 1, 400)[:, None]
    y = (np.abs(x[:, 0]) < 0.3).astype(int)
    chosen = {"groups": None, "cycles": 10, "learning_rate": 0.5}
    straight, bent = (make_classifier(bins=bins, **chosen).fit(x, y).score(x, y) for bins in (0, 8))
    assert straight < 0.6
    assert bent > 0.9


def test_early_stopping_and_the_best_round_go_by_validation_auc() -> None:
    x, y, site = make_rows()
    chosen = {"cycles": 8, "validation_fraction": 0.3, "patience": 2, "keep": "best", "learning_rate": 1.0}
    model = make_classifier(**chosen).fit(x, y, site)
    values = [quality.validation_auc for _, quality in model.history_]
    assert "validation_auc" in str(model.stopped_early_)
    assert model.round_ == model.history_[int(np.argmax(values))][0] < model.history_[-1][0]
    assert len(values) < 8
    assert make_classifier().fit(x, y, site).history_ == []


def test_a_pipeline_and_a_grid_search_pass_the_sites_on() -> None:
    x, y, site = make_rows()
    pipeline = make_pipeline(StandardScaler(), make_classifier(standardize=False))
    assert pipeline.fit(x, y, federatedaucclassifier__clients=site).score(x, y) > 0.9
    with sklearn.config_context(enable_metadata_routing=True):
        routed = make_pipeline(PolynomialFeatures(), make_classifier())
        search = GridSearchCV(routed, {"federatedaucclassifier__learning_rate": [0.01, 0.1]}, cv=2)
        search.fit(x, y, clients=site)
        traffic = search.best_estimator_[-1].traffic_
    # Every site is visited once in each of two cycles and in the scoring cycle before them.
    assert traffic.visits == 3 * SITES
    assert search.best_score_ > 0.9


def test_cross_validation_leaves_out_one_site_after_the_other() -> None:
    x, y, site = make_rows()
    with sklearn.config_context(enable_metadata_routing=True):
        model = make_classifier().set_fit_request(clients=True)
        folds, groups = LeaveOneGroupOut(), {"clients": site, "groups": site}
        scores = cross_val_score(model, x, y, cv=folds, params=groups, error_score="raise")
    expected = []
    for held_out in range(SITES):
        rows = site != held_out
        trained = make_classifier().fit(x[rows], y[rows], clients=site[rows])
        expected.append(trained.score(x[~rows], y[~rows]))
    assert scores.tolist() == expected


def test_groups_of_sites_are_those_of_the_schedule() -> None:
    x, y, site = make_rows()
    model = FederatedAUCClassifier(cycles=2).fit(x, y, clients=site, groups=site // 3)
    # Two groups: a scoring cycle and two cycles.
    assert model.traffic_.rounds == 3 * 2
    everybody = FederatedAUCClassifier(settings={"participation": "full"})
    with pytest.raises(ValueError, match="schedule 'full' of cycp-pairwise has no groups"):
        everybody.fit(x, y, clients=site, groups=site // 3)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"method": "cycp-pairwize"}, "did you mean 'cycp-pairwise'"),
    "model": ({"model": "liner"}, "did you mean 'linear'"),
    "cycles": ({"cycles": 0}, "cycles is 0; it must be a whole number of at least 1"),
    "setting": ({"settings": {"local_stepps": 3}}, "did you mean 'local_steps'"),
    "setting twice": ({"settings": {"seed": 3}}, "use the parameter random_state"),
    "bins": ({"bins": 1}, "bins is 1; it must be 0, or a whole number of at least 2"),
    "bins of raw numbers": ({"bins": 4, "standardize": False}, "bins is 4, but standardize is False"),
    "fraction": ({"validation_fraction": 1.5}, "validation_fraction is 1.5; it must be a number of at least 0"),
    "best without rows": ({"keep": "best"}, "keep is 'best', but validation_fraction is 0"),
    "patience without rows": ({"patience": 3}, "patience is 3, but validation_fraction is 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_parameters_are_refused_by_fit_and_not_before(case: str) -> None:
    parameters, message = BAD[case]
    x, y, site = make_rows()
    model = make_classifier(**parameters)
    with pytest.raises(ValueError, match=message):
        model.fit(x, y, clients=site)


def test_rows_that_no_ranking_can_be_learned_from_are_refused() -> None:
    x, y, site = make_rows()
    with pytest.raises(ValueError, match="y holds the class 0 alone in 40 rows; an AUC needs two classes"):
        make_classifier().fit(x[:40], np.zeros(40, dtype=int))
    with pytest.raises(ValueError, match="all 4 features are constant in the 240 training rows"):
        make_classifier().fit(np.ones_like(x), y, site)
    with pytest.raises(ValueError, match="client has shape \\(3,\\) and inputs has 240 rows"):
        make_classifier().fit(x, y, clients=[1, 2, 3])
    x[:, 1] = 5.0
    model = make_classifier().fit(x, y, site)
    assert model.score(x, y) > 0.8
    with pytest.raises(ValueError, match="y holds 0, and the classes are 0, 1: an AUC needs rows of both"):
        model.score(x[y == 0][:5], y[y == 0][:5])
    with pytest.raises(ValueError, match="y holds 0, 7, and the classes are 0, 1"):
        model.score(x, np.where(y == 1, 7, 0))


@pytest.mark.parametrize(
    ("parameters", "private_evaluation"),
    [({}, False), ({"validation_fraction": 0.4}, True)],
    ids=["no validation rows", "protected validation rows"],
)
def test_a_private_classifier_is_calibrated_on_no_protected_row(
    parameters: dict[str, Any], private_evaluation: bool
) -> None:
    """Exact scores of protected rows are outside the budget: log-odds are the scores. Public rows may be used."""
    x, y, site = make_rows()
    settings = {"epsilon": 50.0, "delta": 1e-3, "pool": "histogram", "private_evaluation": private_evaluation}
    model = make_classifier(settings=settings, **parameters).fit(x, y, clients=site)
    assert (model.calibration_.slope, model.calibration_.intercept) == (1.0, 0.0)
    public = make_classifier(settings={**settings, "private_evaluation": False}, validation_fraction=0.4)
    assert public.fit(x, y, clients=site).calibration_.slope != 1.0


def test_a_ranking_that_is_worse_than_chance_is_not_turned_around() -> None:
    """The calibrated probability rises with the score even where the rows at hand say otherwise."""
    x, y, site = make_rows()
    model = make_classifier().fit(x, y, site)
    inputs = model.encoder_.encode(x)
    calibration = model._fit_calibration(Rows(inputs, 1 - y, site))
    assert calibration.slope > 0
    np.testing.assert_allclose(calibration.probabilities(model._score(inputs)), (1 - y).mean(), atol=0.01)


def test_without_scikit_learn_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "fedauc.estimator")
    monkeypatch.delitem(vars(fedauc), "FederatedAUCClassifier")
    with pytest.raises(ImportError, match=r"needs scikit-learn 1.6 .* run pip install scikit-learn$"):
        fedauc.FederatedAUCClassifier()
