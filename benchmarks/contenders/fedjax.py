"""FedJAX's federated averaging with its default, jitted backend: one client after another, each step compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg

from harness.jax_models import join_weights, make_logistic_loss, split_weights
from harness.work import Work


def main(work: Work, answer_requests: Callable[..., None]) -> None:
    """A visit's rows, in the order they are drawn, are the client's data; it passes over them once, unshuffled."""
    slope = jax.grad(make_logistic_loss(work.workload))
    shape = work.shape

    def gradient(parts: Any, batch: Any, rng: Any) -> Any:
        return slope(parts, batch["x"], batch["y"])

    once = fedjax.ShuffleRepeatBatchHParams(batch_size=shape.batch, num_epochs=1, skip_shuffle=True)
    optimizers = fedjax.optimizers.sgd(work.learning_rate), fedjax.optimizers.sgd(1.0)
    algorithm = fed_avg.federated_averaging(gradient, *optimizers, once)
    start = split_weights(work.workload, jnp.asarray(work.start))
    key = jax.random.PRNGKey(0)

    def client(number: int, batches: np.ndarray) -> tuple[bytes, Any, Any]:
        chosen = batches.reshape(-1)
        held = {"x": work.inputs[chosen], "y": work.labels[chosen]}
        return str(number).encode(), fedjax.ClientDataset(held), key

    def run(rounds: int) -> np.ndarray:
        state = algorithm.init(start)
        for clients, cohort in zip(work.clients[:rounds], work.rows, strict=False):
            state, _ = algorithm.apply(state, [client(*visit) for visit in zip(clients, cohort, strict=True)])
        return np.asarray(join_weights(state.params))

    answer_requests(run)
