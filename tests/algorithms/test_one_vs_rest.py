"""Several classes: the objective and rounds against numpy twins, engines, evaluation, and what is refused."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

import fedauc
from fedauc.algorithms._pool import draw_passive_scores
from fedauc.algorithms.one_vs_rest import OneVsRestPairwise
from fedauc.algorithms.pairwise import Pairwise
from fedauc.data.classes import ClassCensus
from fedauc.data.clients import Clients
from fedauc.engines.draws import Draws
from fedauc.experiments.assembly import assemble_training
from fedauc.experiments.recipe import Recipe
from fedauc.interfaces import Setting
from fedauc.metrics import one_vs_rest_auc, parse_metric
from fedauc.objectives.one_vs_rest import ClassRows, OneVsRestLoss
from fedauc.objectives.softmax import Softmax
from fedauc.training import Round
from fedauc.wrappers.momentum import Momentum
from fedauc.wrappers.personal_head import PersonalHead

Array = np.ndarray

COUNTS = np.array([[4, 0, 2, 6, 1, 0], [3, 5, 0, 2, 1, 0], [0, 2, 3, 1, 4, 5]])
"""Rows of three classes at six clients in three groups; some clients lack one class or two."""

GROUPS = np.array([0, 0, 1, 1, 2, 2])
CLASSES, FEATURES = 3, 4
SIZES = (2, 2, 1)
"""Rows of each class of the 5 rows in a batch."""


def draw_rows(counts: Array, seed: int) -> tuple[Array, Array, Array]:
    """Inputs whose classes differ along two features, labels and owners, in a random order."""
    rng = np.random.default_rng(seed)
    owner, labels = (np.repeat(part.ravel(), counts.T.ravel()) for part in np.indices(counts.T.shape))
    inputs = rng.normal(size=(len(labels), FEATURES))
    inputs[:, 0] += labels == 1
    inputs[:, 1] += labels == 2
    order = rng.permutation(len(labels))
    return inputs[order], labels[order], owner[order]


def class_federation() -> Clients:
    inputs, labels, owner = draw_rows(COUNTS, seed=0)
    return Clients.from_classes(inputs, labels, owner, GROUPS[owner])


def class_scorer(outputs: int = CLASSES) -> nn.Linear:
    module = nn.Linear(FEATURES, outputs, dtype=torch.float64)
    rng = np.random.default_rng(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.from_numpy(0.3 * rng.normal(size=parameter.shape)))
    return module


def class_recipe(method: str = "cycp-pairwise", **changes: Any) -> Recipe:
    settings: dict[str, Any] = {"cycles": 2, "local_steps": 2, "positives": 2, "negatives": 3, "seed": 3}
    settings["weighting"] = "clients"
    if method == "cycp-pairwise":
        settings["algorithm"] = OneVsRestPairwise()
    return Recipe.of(method, **{**settings, "dtype": "float64", **changes})


def run_class_rounds(recipe: Recipe, module: nn.Module | None = None) -> list[Round]:
    training, _, start = assemble_training(recipe, module or class_scorer(), class_federation())
    return list(training.rounds(start))


# --------------------------------------------------------------------------------------------------- the twin in numpy


def psi(t: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(t)))


def psi_slope(t: Array) -> Array:
    return np.asarray(-psi(t) * psi(-t))


def log_odds_twin(outputs: Array) -> Array:
    shares = np.exp(outputs) / np.exp(outputs).sum(-1, keepdims=True)
    return np.asarray(np.log(shares / (1 - shares)))


def output_slopes_twin(outputs: Array, slopes: Array) -> Array:
    """The derivative with respect to outputs `[B, C]`, given that with respect to the log-odds, row by row."""
    result = np.zeros_like(outputs)
    for row, (z, given) in enumerate(zip(outputs, slopes, strict=True)):
        shares = np.exp(z) / np.exp(z).sum()
        # ∂s_c/∂z_y = (1[c = y] - p_y) / (1 - p_c), the chain rule through the softmax.
        jacobian = (np.eye(len(z)) - shares[None]) / (1 - shares[:, None])
        result[row] = given @ jacobian
    return result


def slopes_twin(rows: list[Array], scales: Array, passive: list[Array], shares: Array) -> list[Array]:
    """The derivative with respect to the scores `[B_c, C]` of the rows of every class, pair by pair."""
    slopes = [np.zeros_like(scores) for scores in rows]
    for c in range(CLASSES):
        for y in range(CLASSES):
            if y == c:
                continue
            mixture = shares[y] / (1 - shares[c]) / CLASSES
            for i, score in enumerate(rows[c][:, c]):
                change = mixture * psi_slope(score - passive[y][:, c]).mean()
                slopes[c][i, c] += scales[c] / len(rows[c]) * change
            for j, score in enumerate(rows[y][:, c]):
                change = -mixture * psi_slope(passive[c][:, c] - score).mean()
                slopes[y][j, c] += scales[y] / len(rows[y]) * change
    return slopes


def run_twin(rounds: list[Round]) -> list[tuple[Array, list[Array]]]:
    """Weights and pools after each of the rounds, of which only phases and cohorts are used."""
    clients, recipe = class_federation(), class_recipe()
    setting = Setting(recipe.seed, 3, recipe.batch, clients.census, "clients")
    draws = Draws(clients, setting, "classes")
    table = np.concatenate([clients.inputs.numpy(), np.ones((len(clients.inputs), 1))], axis=1)
    module = class_scorer()
    w = np.concatenate([module.weight.detach().numpy(), module.bias.detach().numpy()[:, None]], axis=1)
    scales = len(GROUPS) / (COUNTS > 0).sum(1)[:, None] * (COUNTS > 0)
    shares = COUNTS.sum(1) / COUNTS.sum()
    splits = np.cumsum(SIZES)[:-1]
    pools, recent, result = [np.zeros((0, CLASSES))] * CLASSES, [list[Array]() for _ in range(CLASSES)], []
    for finished in rounds:
        phase, ends = finished.phase, []
        if not phase.scoring:
            numbered = tuple(torch.arange(len(pool)) for pool in pools)
            places = draw_passive_scores(setting, numbered, finished.cohort, phase)
        for m, client in enumerate(finished.cohort.clients):
            local = w.copy()
            for step, chosen in enumerate(draws.draw_visit(client, phase).rows):
                x = table[chosen]
                outputs = x @ local.T
                rows = np.split(log_odds_twin(outputs), splits)
                if not phase.scoring:
                    passive = [pool[place[m][step].numpy()] for pool, place in zip(pools, places, strict=True)]
                    slopes = np.concatenate(slopes_twin(rows, scales[:, client], passive, shares))
                    local = local - float(phase.learning_rate) * output_slopes_twin(outputs, slopes).T @ x
                for c in range(CLASSES):
                    if COUNTS[c, client]:
                        recent[c].extend(rows[c])
            ends.append(local)
        if not phase.scoring:
            w = np.mean(ends, axis=0)
        if phase.ends_cycle:
            pools, recent = [np.array(scores) for scores in recent], [list[Array]() for _ in range(CLASSES)]
        result.append((w, pools))
    return result


def test_two_cycles_are_the_algorithm() -> None:
    rounds = run_class_rounds(class_recipe())
    assert [finished.phase.scoring for finished in rounds] == [True] * 3 + [False] * 6
    for finished, (w, pools) in zip(rounds, run_twin(rounds), strict=True):
        server = finished.state.server
        expected = np.concatenate([w[:, :-1].ravel(), w[:, -1]])
        np.testing.assert_allclose(server.shared.weights.numpy(), expected, rtol=0, atol=1e-12)
        if finished.phase.ends_cycle:
            for got, pool in zip(server.private.pools, pools, strict=True):
                np.testing.assert_allclose(got.numpy(), pool, rtol=0, atol=1e-12)
    assert not np.allclose(rounds[-1].state.server.shared.weights, rounds[2].state.server.shared.weights, atol=1e-3)


def test_all_rows_as_active_and_passive_give_the_gradient_of_the_exact_loss() -> None:
    inputs, labels, _ = draw_rows(COUNTS, seed=1)
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels)
    scores = torch.from_numpy(inputs[order][:, :CLASSES].copy()).requires_grad_()
    classes, shares = torch.from_numpy(labels[order]), torch.from_numpy(counts / len(labels))
    exact = sum(
        torch.sigmoid(-(scores[classes == c, c][:, None] - scores[classes != c, c][None])).mean() for c in range(3)
    )
    (expected,) = torch.autograd.grad(torch.as_tensor(exact) / 3, scores)
    weights = torch.from_numpy(1 / counts[labels[order]])
    rows = ClassRows(scores.detach(), counts.tolist())
    torch.testing.assert_close(OneVsRestLoss().active_slopes(rows, weights, rows, shares), expected)
    value = OneVsRestLoss(scale=1e-7).monitored_loss(rows, weights, rows, shares)
    assert float(value) == pytest.approx(1 - one_vs_rest_auc(labels[order], scores.detach()), abs=1e-12)


def test_the_score_of_a_class_is_its_log_odds_and_the_slopes_are_its_derivatives() -> None:
    outputs = torch.from_numpy(np.random.default_rng(1).normal(size=(5, 4)) * 3).requires_grad_()
    slopes = torch.from_numpy(np.random.default_rng(2).normal(size=(5, 4)))
    objective = OneVsRestLoss()
    scores = objective.to_scores(outputs)
    np.testing.assert_allclose(scores.detach(), log_odds_twin(outputs.detach().numpy()), rtol=1e-12)
    given = objective.to_output_slopes(scores.detach(), slopes)
    (expected,) = torch.autograd.grad((slopes * scores).sum(), outputs)
    torch.testing.assert_close(given, expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(given, output_slopes_twin(outputs.detach().numpy(), slopes.numpy()), rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_odds_stay_finite_and_exact_where_probabilities_do_not(dtype: torch.dtype) -> None:
    outputs = torch.tensor([[1e4, 0.0, -1e4], [200.0, 200.0, 0.0], [0.0, -90.0, -180.0]], dtype=dtype)
    scores = OneVsRestLoss().to_scores(outputs)
    expected = [[1e4, -1e4, -2e4], [0.0, 0.0, -200 - np.log(2)], [90.0, -90.0, -180.0]]
    np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-6)
    assert bool(OneVsRestLoss().to_output_slopes(scores, torch.ones_like(scores)).isfinite().all())


def test_two_classes_with_outputs_0_and_h_have_the_score_of_one_output() -> None:
    h = torch.tensor([-2.0, 0.5, 3.0])
    scores = OneVsRestLoss().to_scores(torch.stack([torch.zeros(3), h], dim=-1))
    torch.testing.assert_close(scores, torch.stack([-h, h], dim=-1))


# ------------------------------------------------------------------------------------------------------------- engines


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weighting": "pooled"},
        {"algorithm": OneVsRestPairwise(pool="window", objective=OneVsRestLoss(surrogate="squared-hinge"))},
        {"wrappers": (Momentum(beta=0.6),)},
        {"method": "cycp-fedavg", "objective": Softmax()},
        {"method": "cycp-fedavg", "objective": Softmax(draw="classes")},
        {"method": "scaffold", "objective": Softmax()},
    ],
    ids=str,
)
def test_the_batched_engine_gives_what_the_loop_gives(changes: dict[str, Any]) -> None:
    ends = []
    for engine in ("loop", "batched"):
        head = nn.Linear(5, CLASSES).double()
        nn.init.eye_(head.weight)
        nn.init.zeros_(head.bias)
        module = nn.Sequential(class_scorer(5), nn.Tanh(), head)
        last = run_class_rounds(class_recipe(engine=engine, **changes), module)[-1]
        assert last.loss_value
        ends.append((last.state.server.shared, last.loss))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-10, atol=1e-12)


def test_batches_have_every_class_in_its_order_and_absent_ones_without_weight() -> None:
    clients = class_federation()
    recipe = class_recipe()
    setting = Setting(0, 3, recipe.batch, clients.census, "clients")
    phase = run_class_rounds(recipe)[3].phase
    drawn = Draws(clients, setting, "classes").draw_visit(1, phase)
    labels = clients.labels.numpy()[drawn.rows]
    # Client 1 has no rows of class 0; of the six clients four have class 1, and five class 2.
    assert (labels[:, 2:] == [1, 1, 2]).all()
    np.testing.assert_allclose(drawn.weights, [0, 0, 6 / 4 / 2, 6 / 4 / 2, 6 / 5])


def test_softmax_is_the_cross_entropy() -> None:
    scores, labels = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 4))), torch.tensor([0, 3, 1, 2, 2, 0])
    expected = nn.functional.cross_entropy(scores, labels, reduction="none")
    torch.testing.assert_close(Softmax().example_loss(scores, labels.double()), expected)


# ---------------------------------------------------------------------------------------------- training and evaluation


def test_fit_learns_and_records_the_auc_of_every_class() -> None:
    inputs, labels, owner = draw_rows(10 * COUNTS, seed=2)
    clients = Clients.from_classes(inputs, labels, owner, GROUPS[owner])
    held_inputs, held_labels, _ = draw_rows(20 * COUNTS, seed=3)
    # A scorer that ranks badly: with the true classes of these rows the AUC is .76, and that of `class_scorer` is .72.
    start = class_scorer()
    start.weight.data.neg_()
    with torch.no_grad():
        outputs = start(torch.from_numpy(held_inputs))
    before = one_vs_rest_auc(held_labels, outputs.softmax(-1))
    assert one_vs_rest_auc(held_labels, outputs) != pytest.approx(before, abs=1e-4)
    fitted = fedauc.fit(
        start,
        clients,
        algorithm=OneVsRestPairwise(),
        test=(held_inputs, held_labels),
        validation=(held_inputs, held_labels),
        cycles=6,
        dtype="float64",
        learning_rate=0.3,
    )
    first, last = fitted.history[0][1], fitted.history[-1][1]
    with torch.no_grad():
        trained = fitted.module(torch.from_numpy(held_inputs)).numpy()
    scores = fitted.scores(held_inputs)
    np.testing.assert_allclose(scores, log_odds_twin(trained), rtol=1e-9)
    expected = [roc_auc_score(held_labels == c, scores[:, c]) for c in range(CLASSES)]
    assert [last[f"class-auc@{c}"] for c in range(CLASSES)] == pytest.approx(expected, abs=1e-12)
    probabilities = np.exp(trained) / np.exp(trained).sum(1, keepdims=True)
    assert last["ovr-auc"] == pytest.approx(roc_auc_score(held_labels, probabilities, multi_class="ovr"), abs=1e-12)
    assert last["ovr-auc"] == last["validation_ovr-auc"] == pytest.approx(np.mean(expected), abs=1e-12)
    assert last["ovr-auc"] > max(first["ovr-auc"], before + 0.05)
    with pytest.raises(ValueError, match="the model gives several numbers per row, not one score; save it with"):
        fitted.save("nowhere")


def test_a_softmax_is_evaluated_by_its_probabilities() -> None:
    inputs, labels, _ = draw_rows(10 * COUNTS, seed=3)
    settings: dict[str, Any] = {"objective": Softmax(), "learning_rate": 1.0}
    fitted = fedauc.fit(class_scorer(), class_federation(), "cycp-fedavg", test=(inputs, labels), cycles=2, **settings)
    with torch.no_grad():
        outputs = fitted.module(torch.from_numpy(inputs).float())
    expected = roc_auc_score(labels, outputs.double().softmax(-1), multi_class="ovr")
    assert fitted.history[-1][1]["ovr-auc"] == pytest.approx(expected, abs=1e-6)
    assert abs(one_vs_rest_auc(labels, outputs) - expected) > 1e-3


def test_two_classes_with_one_score_have_the_auc() -> None:
    labels, scores = np.array([0, 1, 0, 1, 1]), np.array([0.1, 0.4, 0.5, 0.3, 0.9])
    for text in ("ovr-auc", "class-auc@0", "class-auc@1"):
        assert parse_metric(text).measure(labels, scores).value == pytest.approx(roc_auc_score(labels, scores))
    with pytest.raises(ValueError, match="class 2 has no scores; there are classes 0 to 1"):
        parse_metric("class-auc@2").measure(labels, scores)


def test_a_census_of_classes_survives_pickling() -> None:
    census = pickle.loads(pickle.dumps(ClassCensus(COUNTS)))
    assert np.array_equal(census.counts, COUNTS)
    assert np.array_equal(census.negatives, COUNTS.sum(0))
    assert not census.positives.any()


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"method": "cycp-pairwise", "algorithm": Pairwise()},
            r"^objective 'sigmoid' is for labels 0 or 1, and there are 3 ",
        ),
        (
            {"method": "cycp-minimax"},
            "^objective 'minimax' is for labels 0 or 1, and there are 3 classes; use algorithm=",
        ),
        (
            {"positives": 1, "negatives": 1},
            r"^positives \+ negatives is 2 rows of a local step, and there are 3 classes",
        ),
        (
            {"engine": "compiled"},
            "^engine is 'compiled' on cpu, and there are 3 classes, which only the engines 'loop' ",
        ),
        ({"epsilon": 8.0, "delta": 1e-3}, r"^epsilon and private noise are for labels 0 or 1, and there are 3 classes"),
        (
            {"wrappers": (PersonalHead(),)},
            r"^personal-head is for labels 0 or 1, and there are 3 classes; leave it out",
        ),
        (
            {"method": "cycp-fedavg-logit-adjusted", "objective": Softmax()},
            r"^cycp-fedavg-logit-adjusted adjusts one score per row, and there are 3 classes; use cycp-fedavg",
        ),
    ],
)
def test_what_several_classes_cannot_be_combined_with_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_class_rounds(class_recipe(**changes))


def test_models_labels_and_metrics_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^the model gives 2 numbers per row; objective 'one-vs-rest' needs 3, one"):
        run_class_rounds(class_recipe(), class_scorer(2))
    inputs, labels, owner = draw_rows(COUNTS, seed=0)
    binary = Clients.from_arrays(inputs, labels == 1, owner)
    with pytest.raises(
        ValueError, match=r"^objective 'one-vs-rest' is for labels of several classes, and these are 0 "
    ):
        assemble_training(class_recipe(), class_scorer(), binary)
    with pytest.raises(ValueError, match=r"^metric 'auc' needs one score per row, and objective 'one-vs-rest' has a "):
        fedauc.fit(class_scorer(), class_federation(), class_recipe(), metrics="auc")
    with pytest.raises(ValueError, match=r"^test: labels holds class 3; the training rows have classes 0 to 2"):
        fedauc.fit(class_scorer(), class_federation(), class_recipe(), test=(inputs, labels + 1))
    with pytest.raises(ValueError, match=r"^test: labels holds 0 rows of class 2; at least 2 of each of the 3 classes"):
        fedauc.fit(class_scorer(), class_federation(), class_recipe(), test=(inputs, labels.clip(0, 1)))
    with pytest.raises(
        ValueError, match=r"^labels holds 0\.5 in row \d+ \(counted from 0\); labels of classes are whole"
    ):
        Clients.from_classes(inputs, labels / 2, owner)
    with pytest.raises(ValueError, match=r"^labels holds 0 rows of class 1; at least 1 of each of the 4 classes"):
        Clients.from_classes(inputs, np.where(labels == 1, 3, labels), owner)
