"""Identity 6: on heterogeneous quadratics cyclic FedAvg settles beside the optimum, exactly where the formula says.

With ρ = (1 - ηh)^I and full groups, a round maps w to ρw + (1 - ρ)b̄_k, so K of them have the fixed point
(1 - ρ) Σ_k ρ^{K-k} b̄_k / (1 - ρ^K). Amplification moves along the same line, so A-FedAvg keeps that point; control
variates frozen over the cycle take the drift out, so A-SCAFFOLD reaches the mean of all optima, and so does FOCUS,
which tracks all clients' gradients. In FedAWE a client goes on from its own last model, so that groups which never
meet never learn of one another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedauc.experiments.recipe import Recipe
from fedauc.interfaces import Participation
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.uniform import Uniform
from fedauc.stages import Constant
from fedauc.training import Round
from identities.identity_runs import Offset, Quadratic, make_quadratic_clients, run_recipe, shared_path
from identities.identity_twins import Local, fedavg_path, fedawe_path, focus_path, scaffold_path

OPTIMA = np.array([4.0, -1.0, 0.5, 3.0, -2.0, -5.0])
GROUPS = ((0, 3), (1, 2), (4, 5))
"""K = 3 groups of 2, with means 3.5, -0.25 and -3.5: far from the overall mean of -1/12."""

K = len(GROUPS)
OPTIMUM = OPTIMA.mean()
CURVATURE, START = 2.0, 10.0

CYCLIC = Cyclic(given=GROUPS)
PARTICIPATIONS: dict[str, Participation] = {
    "full groups": CYCLIC,
    "one of two": Cyclic(given=GROUPS, per_round=1),
    "uniform": Uniform(per_round=3, groups=K),
}

steps = pytest.mark.parametrize(("learning_rate", "local_steps"), [(0.1, 1), (0.05, 4), (0.2, 3)])
amplified = pytest.mark.parametrize("amplify", [1.0, 1.5, 0.5])


def run_method(
    method: str, participation: Participation, cycles: int, learning_rate: float, local_steps: int, **settings: Any
) -> list[Round]:
    """Each client's two rows are one batch, so every gradient is exact."""
    recipe = Recipe.of(
        method,
        participation=participation,
        objective=Quadratic(curvature=CURVATURE),
        stages=Constant(),
        cycles=cycles,
        learning_rate=learning_rate,
        local_steps=local_steps,
        positives=1,
        negatives=1,
        dtype="float64",
        **settings,
    )
    return run_recipe(recipe, Offset(START), make_quadratic_clients(OPTIMA.tolist()))


def cohorts_of(rounds: list[Round]) -> list[tuple[int, ...]]:
    return [finished.cohort.clients for finished in rounds]


def biased_limit(learning_rate: float, local_steps: int) -> float:
    rho = (1 - learning_rate * CURVATURE) ** local_steps
    means = [OPTIMA[list(group)].mean() for group in GROUPS]
    total = sum(rho ** (K - k) * mean for k, mean in enumerate(means, start=1))
    return float((1 - rho) * total / (1 - rho**K))


def cycles_to_rest(learning_rate: float, local_steps: int, amplify: float = 1.0) -> int:
    """A cycle shrinks the error by 1 - γ + γρ^K; enough cycles for 1e-13 of the start, which is about 10 away."""
    rate = abs(1 - amplify * (1 - (1 - learning_rate * CURVATURE) ** (K * local_steps)))
    return int(np.ceil(np.log(1e-14) / np.log(rate)))


@pytest.mark.parametrize("participation", PARTICIPATIONS.values(), ids=PARTICIPATIONS.keys())
@steps
def test_fedavg_is_its_twin_step_by_step(participation: Participation, learning_rate: float, local_steps: int) -> None:
    rounds = run_method("cycp-fedavg", participation, 5, learning_rate, local_steps)
    twin = fedavg_path(START, OPTIMA, cohorts_of(rounds), Local(learning_rate, CURVATURE, local_steps))
    np.testing.assert_allclose(shared_path(rounds)[:, 0], twin, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("participation", PARTICIPATIONS.values(), ids=PARTICIPATIONS.keys())
@steps
@amplified
def test_a_fedavg_is_its_twin_step_by_step(
    participation: Participation, learning_rate: float, local_steps: int, amplify: float
) -> None:
    rounds = run_method("a-fedavg", participation, 5, learning_rate, local_steps, amplify=amplify)
    twin = fedavg_path(START, OPTIMA, cohorts_of(rounds), Local(learning_rate, CURVATURE, local_steps, K, amplify))
    np.testing.assert_allclose(shared_path(rounds)[:, 0], twin, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("participation", PARTICIPATIONS.values(), ids=PARTICIPATIONS.keys())
@steps
@amplified
def test_a_scaffold_is_its_twin_step_by_step(
    participation: Participation, learning_rate: float, local_steps: int, amplify: float
) -> None:
    rounds = run_method("a-scaffold", participation, 6, learning_rate, local_steps, amplify=amplify)
    twin = scaffold_path(START, OPTIMA, cohorts_of(rounds), Local(learning_rate, CURVATURE, local_steps, K, amplify))
    # Columns: w and c.
    np.testing.assert_allclose(shared_path(rounds), np.stack(twin, axis=1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("participation", PARTICIPATIONS.values(), ids=PARTICIPATIONS.keys())
def test_scaffold_is_its_twin_step_by_step(participation: Participation) -> None:
    rounds = run_method("scaffold", participation, 6, 0.05, 4)
    twin = scaffold_path(START, OPTIMA, cohorts_of(rounds), Local(0.05, CURVATURE, 4))
    np.testing.assert_allclose(shared_path(rounds), np.stack(twin, axis=1), rtol=1e-12, atol=1e-12)


@steps
def test_cyclic_fedavg_settles_where_the_formula_says(learning_rate: float, local_steps: int) -> None:
    cycles = cycles_to_rest(learning_rate, local_steps)
    limit = shared_path(run_method("cycp-fedavg", CYCLIC, cycles, learning_rate, local_steps))[-1, 0]
    assert limit == pytest.approx(biased_limit(learning_rate, local_steps), abs=1e-12)
    # The bias is no rounding matter: the last group pulls towards -3.5.
    assert limit < OPTIMUM - 0.3


@steps
@amplified
def test_a_fedavg_settles_at_the_same_biased_point(learning_rate: float, local_steps: int, amplify: float) -> None:
    cycles = cycles_to_rest(learning_rate, local_steps, amplify)
    limit = shared_path(run_method("a-fedavg", CYCLIC, cycles, learning_rate, local_steps, amplify=amplify))[-1, 0]
    assert limit == pytest.approx(biased_limit(learning_rate, local_steps), abs=1e-12)


@pytest.mark.parametrize(("learning_rate", "local_steps"), [(0.1, 1), (0.05, 4)])
@amplified
def test_a_scaffold_reaches_the_true_optimum(learning_rate: float, local_steps: int, amplify: float) -> None:
    # In the twin the slowest case, γ = 0.5 with one step of 0.1, comes within 1e-9 after 79 cycles.
    limit = shared_path(run_method("a-scaffold", CYCLIC, 80, learning_rate, local_steps, amplify=amplify))
    assert limit[-1, 0] == pytest.approx(OPTIMUM, abs=1e-8)
    # There the mean gradient vanishes, and c with it.
    assert limit[-1, 1] == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize("participation", PARTICIPATIONS.values(), ids=PARTICIPATIONS.keys())
@pytest.mark.parametrize("server_step", ["local-steps", "clients"])
@steps
def test_focus_is_its_twin_step_by_step(
    participation: Participation, server_step: str, learning_rate: float, local_steps: int
) -> None:
    rounds = run_method("focus", participation, 5, learning_rate, local_steps, server_step=server_step)
    scale = len(OPTIMA) if server_step == "clients" else local_steps
    local = Local(learning_rate, CURVATURE, local_steps)
    models, trackers = focus_path(START, OPTIMA, cohorts_of(rounds), local, scale)
    np.testing.assert_allclose(shared_path(rounds)[:, 0], models, rtol=1e-11)
    private = [finished.state.server.private.item() for finished in rounds]
    np.testing.assert_allclose(private, trackers, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("participation", PARTICIPATIONS.values(), ids=PARTICIPATIONS.keys())
@pytest.mark.parametrize(("learning_rate", "local_steps"), [(0.05, 1), (0.02, 4)])
def test_focus_reaches_the_true_optimum(participation: Participation, learning_rate: float, local_steps: int) -> None:
    rounds = run_method("focus", participation, 150, learning_rate, local_steps)
    assert shared_path(rounds)[-1, 0] == pytest.approx(OPTIMUM, abs=1e-8)
    assert rounds[-1].state.server.private.item() == pytest.approx(0, abs=1e-8)


def test_groups_that_never_meet_do_not_mix_in_fedawe() -> None:
    local = Local(0.05, CURVATURE, 4)
    strict = [GROUPS[number % K] for number in range(60 * K)]
    path = fedawe_path(START, OPTIMA, strict, local)
    # Every group ends at its own optimum, and the server's model is that of the group that came last.
    means = [OPTIMA[list(group)].mean() for group in GROUPS]
    np.testing.assert_allclose(path[-K:], means, atol=1e-9)
    # A group's path is what it would be without the others: their optima do not enter it.
    moved = OPTIMA.copy()
    moved[list(GROUPS[1])] += 100
    np.testing.assert_array_equal(fedawe_path(START, moved, strict, local)[0::K], path[0::K])
    # Where all clients meet from time to time, as its authors assume, the same method does mix.
    rng = np.random.default_rng(0)
    random = [rng.choice(len(OPTIMA), 3, replace=False).tolist() for _ in range(4000)]
    mixed = fedawe_path(START, OPTIMA, random, Local(0.002, CURVATURE, 4))[2000:]
    assert np.abs(mixed.mean() - OPTIMUM) < 0.1
    assert np.abs(np.array(means) - OPTIMUM).max() > 3
