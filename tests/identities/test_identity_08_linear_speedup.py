"""Identity 8: on a homogeneous noisy quadratic the stationary variance is η²σ² / (M (1 - (1 - ηh)²)): linear in 1/M.

The noise is the data's: each client holds ROWS rows, half at b + s and half at b - s, of which a step sees B = 2
without replacement. A batch mean has variance s²/2 · (ROWS - 2)/(ROWS - 1), and a gradient h² times that, σ². With one
local step every round draws anew, so w - b is an AR(1) process.
"""

from __future__ import annotations

import numpy as np
import pytest

from fedauc.data.clients import Clients
from fedauc.engines.draws import Draws
from fedauc.experiments.assembly import Assembly, assemble_training
from fedauc.experiments.recipe import Recipe
from fedauc.stages import Constant
from identities.identity_runs import Offset, Quadratic, Rows, make_clients, run_assembly, shared_path

ROWS, CENTRE, SPREAD = 500, 3.0, 2.0
STEP, CURVATURE = 0.25, 2.0
SIGMA2 = CURVATURE**2 * SPREAD**2 / 2 * (ROWS - 2) / (ROWS - 1)
DECAY = 1 - STEP * CURVATURE
"""1 - ηh = 1/2."""

WARM, ROUNDS = 30, 800
"""After 30 rounds the start is forgotten to 2⁻³⁰."""

STANDARD_ERROR = float(np.sqrt(2 / (ROUNDS - WARM) * (1 + DECAY**2) / (1 - DECAY**2)))
"""Relative, of the variance of an AR(1) path of Gaussians about its known mean: 6.6 % (bounded noise has less)."""

COHORTS = [1, 2, 4, 8]


def make_federation(clients: int) -> Clients:
    """The same rows for every client. Labels cut across the values: each class holds both in equal parts."""
    half = np.tile(CENTRE + SPREAD * np.array([1.0, -1.0]), ROWS // 4)[:, None]
    return make_clients([Rows(half, half)] * clients)


def assemble_run(clients: int) -> Assembly:
    recipe = Recipe.of(
        "cycp-fedavg",
        groups=1,
        objective=Quadratic(curvature=CURVATURE),
        stages=Constant(),
        cycles=ROUNDS,
        learning_rate=STEP,
        local_steps=1,
        positives=1,
        negatives=1,
        dtype="float64",
        seed=8,
    )
    return assemble_training(recipe, Offset(CENTRE), make_federation(clients))


def stationary_variance(clients: int) -> float:
    return STEP**2 * SIGMA2 / (clients * (1 - DECAY**2))


@pytest.fixture(scope="module")
def sampled_walks() -> dict[int, np.ndarray]:
    """w after each round, for each M."""
    return {clients: shared_path(run_assembly(assemble_run(clients)))[:, 0] for clients in COHORTS}


def simulate_autoregression(start: float, batches: np.ndarray) -> np.ndarray:
    """The twin: w ← mean over clients of w - ηh (w - batch mean); `batches` are rows' values `[rounds, M, B]`."""
    w, path = start, []
    for batch in batches:
        w = float(np.mean([w - STEP * CURVATURE * (w - mean) for mean in batch.mean(axis=1)]))
        path.append(w)
    return np.array(path)


@pytest.mark.parametrize("clients", COHORTS)
def test_the_run_is_its_twin_on_the_rows_it_drew(sampled_walks: dict[int, np.ndarray], clients: int) -> None:
    training = assemble_run(clients).training
    data = make_federation(clients)
    draws = Draws(data, training.setting, "rows")
    values = data.inputs[:, 0].numpy()
    phases = [training.plan.phase(number) for number in range(200)]
    batches = np.array(
        [[values[draws.draw_visit(client, phase)[0][0]] for client in range(clients)] for phase in phases]
    )
    np.testing.assert_allclose(sampled_walks[clients][:200], simulate_autoregression(CENTRE, batches), rtol=1e-13)


@pytest.mark.parametrize("clients", COHORTS)
def test_stationary_variance_falls_as_one_over_the_cohort(sampled_walks: dict[int, np.ndarray], clients: int) -> None:
    measured = np.square(sampled_walks[clients][WARM:] - CENTRE).mean()
    # Four standard errors, 26 %: a cohort of half the size would be 100 % off, one of twice the size 50 %.
    assert measured == pytest.approx(stationary_variance(clients), rel=4 * STANDARD_ERROR)


def test_the_speed_up_is_linear(sampled_walks: dict[int, np.ndarray]) -> None:
    logs = np.log([np.square(sampled_walks[clients][WARM:] - CENTRE).mean() for clients in COHORTS])
    slope = np.polyfit(np.log(COHORTS), logs, 1)[0]
    # The slope's standard error: that of one log variance over the spread of log M, 6.6 % / 1.55.
    spread = np.sqrt(np.square(np.log(COHORTS) - np.log(COHORTS).mean()).sum())
    assert slope == pytest.approx(-1, abs=4 * STANDARD_ERROR / spread)


@pytest.mark.parametrize("clients", COHORTS)
def test_the_formula_is_that_of_a_long_walk_of_the_twins_own_dice(clients: int) -> None:
    """The twin's recursion without the library, on independent draws: 4000 walkers after 60 rounds."""
    rng = np.random.default_rng(8)
    walkers = np.full(4000, CENTRE)
    for _ in range(60):
        noise = rng.normal(0, np.sqrt(SIGMA2), (4000, clients)).mean(axis=1)
        walkers = walkers - STEP * (CURVATURE * (walkers - CENTRE) + noise)
    # The variance of 4000 independent Gaussians is known to sqrt(2/4000) = 2.2 %.
    assert np.square(walkers - CENTRE).mean() == pytest.approx(stationary_variance(clients), rel=4 * 0.0224)
