"""Plain numpy twins of whole runs. Nothing here knows the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

TINY = 1e-30
"""A complex step: derivatives of analytic functions to the last bit, with no formula of their own to get wrong."""


def complex_gradient(function: Callable[[np.ndarray], complex], point: np.ndarray) -> np.ndarray:
    """The gradient of a real analytic function, from its values alone."""
    steps = TINY * 1j * np.eye(len(point))
    return np.array([function(point + step).imag / TINY for step in steps])


class Local(NamedTuple):
    """η, h, I of local gradient descent on h/2 (w - b)², the period P and the factor γ of amplification."""

    learning_rate: float
    curvature: float
    steps: int
    period: int = 1
    amplify: float = 1.0


def fedavg_path(start: float, optima: np.ndarray, cohorts: Sequence[Sequence[int]], local: Local) -> np.ndarray:
    """(Amplified) FedAvg on quadratics: w after each round."""
    model = previous = start
    models = []
    for number, cohort in enumerate(cohorts):
        ends = []
        for client in cohort:
            w = model
            for _ in range(local.steps):
                w = w - local.learning_rate * local.curvature * (w - optima[client])
            ends.append(w)
        model = float(np.mean(ends))
        if (number + 1) % local.period == 0:
            model = previous = previous + local.amplify * (model - previous)
        models.append(model)
    return np.array(models)


def scaffold_path(
    start: float, optima: np.ndarray, cohorts: Sequence[Sequence[int]], local: Local
) -> tuple[np.ndarray, np.ndarray]:
    """Amplified SCAFFOLD on quadratics with exact gradients: w and c after each round. A period of 1 is SCAFFOLD."""
    model = previous = start
    client_variates, server_variate = np.zeros(len(optima)), 0.0
    models, variates = [], []
    gradients_by_client: dict[int, list[float]] = {}
    for number, cohort in enumerate(cohorts):
        ends = []
        for client in cohort:
            w = model
            for _ in range(local.steps):
                gradient = local.curvature * (w - optima[client])
                gradients_by_client.setdefault(client, []).append(gradient)
                w = w - local.learning_rate * (gradient - client_variates[client] + server_variate)
            ends.append(w)
        model = float(np.mean(ends))
        if (number + 1) % local.period == 0:
            for client, gradients in gradients_by_client.items():
                client_variates[client] = np.mean(gradients)
            server_variate, gradients_by_client = float(client_variates.mean()), {}
            model = previous = previous + local.amplify * (model - previous)
        models.append(model)
        variates.append(server_variate)
    return np.array(models), np.array(variates)


def focus_path(
    start: float, optima: np.ndarray, cohorts: Sequence[Sequence[int]], local: Local, server_steps: float
) -> tuple[np.ndarray, np.ndarray]:
    """FOCUS on quadratics with exact gradients: x, and the mean y of all clients' last gradients, after each round."""
    model, gradients = start, np.zeros(len(optima))
    models, trackers = [], []
    for cohort in cohorts:
        for client in cohort:
            x, last = model, gradients[client]
            for _ in range(local.steps):
                gradient = local.curvature * (x - optima[client])
                # y_m is the sum of the changes of the gradient in this visit, which telescopes.
                x = x - local.learning_rate * (gradient - last)
            gradients[client] = gradient
        model = model - local.learning_rate * server_steps * float(gradients.mean())
        models.append(model)
        trackers.append(float(gradients.mean()))
    return np.array(models), np.array(trackers)


def fedawe_path(start: float, optima: np.ndarray, cohorts: Sequence[Sequence[int]], local: Local) -> np.ndarray:
    """FedAWE on quadratics with exact gradients: the server's model after each round.

    Xiang, Ioannidis, Yeh, Joe-Wong and Su, Efficient federated learning against heterogeneous and non-stationary client
    unavailability, NeurIPS 2024, with a server's learning rate of 1. A client goes on from its own model, multiplies
    its change by the number of rounds since it last took part, and takes over the mean of those who are there.
    """
    client_models, last_rounds = np.full(len(optima), start), np.full(len(optima), -1)
    models = []
    for number, cohort in enumerate(cohorts):
        echoed = []
        for client in cohort:
            x = client_models[client]
            for _ in range(local.steps):
                x = x - local.learning_rate * local.curvature * (x - optima[client])
            echoed.append(client_models[client] + (number - last_rounds[client]) * (x - client_models[client]))
        clients = list(cohort)
        client_models[clients] = np.mean(echoed)
        last_rounds[clients] = number
        models.append(float(np.mean(echoed)))
    return np.array(models)
