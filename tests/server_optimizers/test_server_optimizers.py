"""Every server optimizer against its equations in numpy."""

from __future__ import annotations

import numpy as np
import torch

from fedauc.interfaces import ServerOptimizer
from fedauc.server_optimizers.adaptive import Adam, Yogi
from fedauc.server_optimizers.momentum import Momentum
from fedauc.server_optimizers.plain import Plain

CHANGES = np.random.default_rng(2).normal(scale=0.1, size=(6, 5))


def run_optimizer(optimizer: ServerOptimizer) -> np.ndarray:
    """The weights after each change, from zero."""
    weights, path = torch.zeros(5, dtype=torch.float64), []
    state = optimizer.init(weights)
    for change in CHANGES:
        step, state = optimizer.update(torch.from_numpy(change), state)
        weights = weights + step
        path.append(weights.numpy())
    return np.array(path)


def test_plain_adds_the_changes() -> None:
    np.testing.assert_array_equal(run_optimizer(Plain()), np.cumsum(CHANGES, axis=0))


def test_momentum_follows_its_equation() -> None:
    velocity, weights, path = np.zeros(5), np.zeros(5), []
    for change in CHANGES:
        velocity = 0.7 * velocity + change
        weights = weights + 0.5 * velocity
        path.append(weights)
    np.testing.assert_allclose(run_optimizer(Momentum(beta=0.7, learning_rate=0.5)), path, rtol=1e-13)


def test_adam_and_yogi_follow_their_equations() -> None:
    for optimizer in (Adam(tau=0.01), Yogi(tau=0.01)):
        first, second, weights, path = np.zeros(5), np.full(5, 0.01**2), np.zeros(5), []
        for change in CHANGES:
            first = 0.9 * first + 0.1 * change
            if isinstance(optimizer, Adam):
                second = 0.99 * second + 0.01 * change**2
            else:
                second = second - 0.01 * change**2 * np.sign(second - change**2)
            weights = weights + 0.01 * first / (np.sqrt(second) + 0.01)
            path.append(weights)
        np.testing.assert_allclose(run_optimizer(optimizer), path, rtol=1e-12)
