"""Identity 10: amplification by 1 is none, A-SCAFFOLD's first period has no correction, and c is the mean of the c_m.

All on the logistic loss with random batches; the twins of identity 6 follow the same methods on quadratics.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedauc.data.clients import Clients
from fedauc.experiments.assembly import assemble_training
from fedauc.experiments.recipe import Recipe
from fedauc.interfaces import Participation
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.uniform import Uniform
from fedauc.stages import Constant, Geometric, StageRule
from fedauc.training import Round
from fedauc.trees import Tree
from identities.identity_runs import (
    Rows,
    flatten_tree,
    gaussian_clients,
    linear_module,
    make_clients,
    run_assembly,
    shared_path,
)

K, FEATURES = 3, 4
COUNTS = [(3, 8), (5, 4), (0, 6), (0, 0), (2, 7), (6, 1), (4, 4)]
"""Seven clients of unlike sizes; one holds a single class and one holds nothing, so that N = 6."""

HOLDING = [0, 1, 2, 4, 5, 6]

PARTICIPATIONS: dict[str, Participation] = {
    "full groups": Cyclic(given=((0, 1), (2, 4), (5, 6))),
    "one of two": Cyclic(given=((0, 1), (2, 4), (5, 6)), per_round=1),
    "uniform": Uniform(per_round=3, groups=K),
}
STAGES: dict[str, StageRule] = {"one stage": Constant(), "several stages": Geometric(initial=2, decay=0.5, scale=1)}

who = pytest.mark.parametrize("participation", PARTICIPATIONS.values(), ids=PARTICIPATIONS.keys())
when = pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES.keys())
factors = pytest.mark.parametrize("amplify", [1.0, 1.5, 0.3])


def make_federation() -> list[Rows]:
    return gaussian_clients(COUNTS, FEATURES, seed=10)


def all_clients() -> Clients:
    return make_clients(make_federation())


def run_method(
    method: str, participation: Participation, **client_variates: Any
) -> tuple[list[Round], list[dict[int, Tree]]]:
    """A run's rounds, and the clients' memories after each."""
    settings: dict[str, Any] = {
        "stages": Constant(),
        "cycles": 5,
        "learning_rate": 0.2,
        "local_steps": 4,
        "positives": 2,
        "negatives": 2,
    }
    recipe = Recipe.of(method, participation=participation, dtype="float64", seed=10, **{**settings, **client_variates})
    training, _, start = assemble_training(recipe, linear_module([0.2, -0.1, 0.3, 0.0]), all_clients())
    rounds, client_states = [], []
    for finished in training.rounds(start):
        rounds.append(finished)
        client_states.append(training.engine.client_states())
    return rounds, client_states


def models_of(rounds: list[Round]) -> np.ndarray:
    """The model after each round; it comes first in what is shared."""
    return np.asarray(shared_path(rounds)[:, :FEATURES])


@who
@when
def test_amplification_by_one_is_fedavg_bit_for_bit(participation: Participation, stages: StageRule) -> None:
    amplified, _ = run_method("a-fedavg", participation, amplify=1.0, stages=stages)
    plain, _ = run_method("cycp-fedavg", participation, stages=stages)
    np.testing.assert_array_equal(models_of(amplified), models_of(plain))


@who
def test_amplification_stretches_each_period_from_its_start(participation: Participation) -> None:
    """Up to the first period's end A-FedAvg is FedAvg; there it stands γ times as far from the start."""
    amplified, _ = run_method("a-fedavg", participation, amplify=1.5, cycles=1)
    plain, _ = run_method("cycp-fedavg", participation, cycles=1)
    np.testing.assert_array_equal(models_of(amplified)[:-1], models_of(plain)[:-1])
    start = np.array([0.2, -0.1, 0.3, 0.0])
    stretched = start + 1.5 * (models_of(plain)[-1] - start)
    np.testing.assert_allclose(models_of(amplified)[-1], stretched, rtol=1e-14, atol=1e-15)
    assert np.abs(stretched - models_of(plain)[-1]).max() > 1e-3


@who
@factors
def test_a_scaffolds_first_period_is_a_fedavgs_bit_for_bit(participation: Participation, amplify: float) -> None:
    scaffold, _ = run_method("a-scaffold", participation, amplify=amplify)
    fedavg, _ = run_method("a-fedavg", participation, amplify=amplify)
    np.testing.assert_array_equal(models_of(scaffold)[:K], models_of(fedavg)[:K])
    # From the second period on the variates are at work.
    assert np.abs(models_of(scaffold)[K] - models_of(fedavg)[K]).max() > 1e-3


@who
def test_a_scaffolds_first_period_is_fedavg_bit_for_bit(participation: Participation) -> None:
    scaffold, _ = run_method("a-scaffold", participation, amplify=1.0, cycles=1)
    fedavg, _ = run_method("cycp-fedavg", participation, cycles=1)
    np.testing.assert_array_equal(models_of(scaffold), models_of(fedavg))


def mean_variate(client_variates: dict[int, np.ndarray]) -> np.ndarray:
    """The mean over the clients that hold data; c_m is 0 until m's first visit."""
    return np.asarray(np.mean([client_variates.get(client, np.zeros(FEATURES)) for client in HOLDING], axis=0))


@who
@when
@factors
def test_a_scaffolds_variate_is_the_mean_of_the_clients_at_every_periods_end(
    participation: Participation, stages: StageRule, amplify: float
) -> None:
    rounds, client_states = run_method("a-scaffold", participation, amplify=amplify, stages=stages)
    for finished, states in zip(rounds[K - 1 :: K], client_states[K - 1 :: K], strict=True):
        client_variates = {client: client_state.next_variate().numpy() for client, client_state in states.items()}
        variate = finished.state.server.shared.variate.numpy()
        np.testing.assert_allclose(variate, mean_variate(client_variates), rtol=1e-12, atol=1e-14)
        assert np.abs(variate).max() > 1e-3


def test_a_scaffolds_variates_are_frozen_inside_a_period() -> None:
    rounds, _ = run_method("a-scaffold", PARTICIPATIONS["uniform"])
    variates = np.stack([flatten_tree(finished.state.server.shared.variate) for finished in rounds]).reshape(
        -1, K, FEATURES
    )
    # Within a period only its last round moves c.
    np.testing.assert_array_equal(variates[1:, : K - 1], np.repeat(variates[:-1, -1:], K - 1, axis=1))
    assert not variates[0, : K - 1].any()
    assert (np.abs(np.diff(variates[:, -1], axis=0)).max(axis=1) > 1e-3).all()


def test_uniform_participation_visits_a_client_several_times_in_a_period() -> None:
    """What makes the uniform cases above hard: a client whose period mean spans visits, and one left out."""
    rounds, _ = run_method("a-scaffold", PARTICIPATIONS["uniform"])
    periods = [rounds[start : start + K] for start in range(0, len(rounds), K)]
    counts = [np.bincount([c for r in period for c in r.cohort.clients], minlength=7)[HOLDING] for period in periods]
    assert np.max(counts) == K
    assert np.min(counts) == 0


@who
@when
def test_scaffolds_variate_is_the_mean_of_the_clients_after_every_round(
    participation: Participation, stages: StageRule
) -> None:
    rounds, client_states = run_method("scaffold", participation, stages=stages)
    for finished, states in zip(rounds, client_states, strict=True):
        client_variates = {client: client_state.numpy() for client, client_state in states.items()}
        variate = finished.state.server.shared.variate.numpy()
        np.testing.assert_allclose(variate, mean_variate(client_variates), rtol=1e-12, atol=1e-14)
    assert np.abs(variate).max() > 1e-3


@who
def test_codascas_variate_is_the_mean_of_the_clients_after_every_round(participation: Participation) -> None:
    rounds, client_states = run_method("codasca", participation)
    for finished, states in zip(rounds, client_states, strict=True):
        client_variates = {client: flatten_tree(client_state) for client, client_state in states.items()}
        mean = np.mean([client_variates.get(client, np.zeros(FEATURES + 3)) for client in HOLDING], axis=0)
        np.testing.assert_allclose(flatten_tree(finished.state.server.shared.variate), mean, rtol=1e-12, atol=1e-14)
    assert np.abs(mean).max() > 1e-3


def logistic_gradient(w: np.ndarray, rows: Rows) -> np.ndarray:
    """Of the mean of log(1 + e^{-dz}) over all a client's rows, z = w·x, d = ±1."""
    inputs = np.concatenate(rows)
    signs = np.repeat([1.0, -1.0], [len(rows.positives), len(rows.negatives)])
    slopes = -signs / (1 + np.exp(signs * (inputs @ w)))
    return np.asarray(slopes @ inputs / len(inputs))


def a_scaffold_twin(start: np.ndarray, cohorts: list[tuple[int, ...]], amplify: float) -> np.ndarray:
    """Section 3's A-SCAFFOLD with full gradients, one local step of 0.2: (w, c) after each round."""
    data, client_variates, common = (
        make_federation(),
        {client: np.zeros(FEATURES) for client in HOLDING},
        np.zeros(FEATURES),
    )
    model = previous = start
    gradients_by_client: dict[int, list[np.ndarray]] = {}
    path = []
    for number, cohort in enumerate(cohorts):
        ends = []
        for client in cohort:
            gradient = logistic_gradient(model, data[client])
            gradients_by_client.setdefault(client, []).append(gradient)
            ends.append(model - 0.2 * (gradient - client_variates[client] + common))
        model = np.mean(ends, axis=0)
        if (number + 1) % K == 0:
            client_variates |= {client: np.mean(gradients, axis=0) for client, gradients in gradients_by_client.items()}
            common, gradients_by_client = np.mean(list(client_variates.values()), axis=0), {}
            model = previous = previous + amplify * (model - previous)
        path.append(np.concatenate([model, common]))
    return np.array(path)


@who
@factors
def test_a_scaffold_on_the_logistic_loss_is_its_twin_step_by_step(participation: Participation, amplify: float) -> None:
    # The six clients' sizes are 11, 9, 6, 9, 7 and 8; their least common multiple, 5544, is a full batch for each.
    recipe = Recipe.of(
        "a-scaffold",
        participation=participation,
        amplify=amplify,
        stages=Constant(),
        cycles=4,
        learning_rate=0.2,
        local_steps=1,
        positives=5543,
        negatives=1,
        weighting="clients",
        dtype="float64",
    )
    start = np.array([0.2, -0.1, 0.3, 0.0])
    rounds = run_assembly(assemble_training(recipe, linear_module(start), all_clients()))
    twin = a_scaffold_twin(start, [finished.cohort.clients for finished in rounds], amplify)
    # Sums of 5544 terms of order 1e-4.
    np.testing.assert_allclose(shared_path(rounds), twin, rtol=1e-10, atol=1e-12)
