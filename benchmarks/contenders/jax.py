"""jax: clients mapped by vmap, local steps in one scan, a round one jitted function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from harness.jax_models import join_weights, make_logistic_loss, split_weights
from harness.work import Work


def main(work: Work, answer_requests: Callable[..., None]) -> None:
    """The data stay on the device; each round gets its row numbers."""
    inputs, labels = jnp.asarray(work.inputs), jnp.asarray(work.labels)
    start = split_weights(work.workload, jnp.asarray(work.start))
    slope = jax.grad(make_logistic_loss(work.workload))

    def visit(parts: Any, batches: Any, inputs: Any, labels: Any) -> Any:
        def step(parts: Any, chosen: Any) -> tuple[Any, None]:
            slopes = slope(parts, inputs[chosen], labels[chosen])
            return [part - work.learning_rate * slope for part, slope in zip(parts, slopes, strict=True)], None

        return jax.lax.scan(step, parts, batches)[0]

    @jax.jit
    def one_round(parts: Any, cohort: Any, inputs: Any, labels: Any) -> Any:
        visited = jax.vmap(visit, in_axes=(None, 0, None, None))(parts, cohort, inputs, labels)
        return [part.mean(0) for part in visited]

    rows = work.rows.astype(np.int32)

    def run(rounds: int) -> np.ndarray:
        parts = start
        for cohort in rows[:rounds]:
            parts = one_round(parts, cohort, inputs, labels)
        return np.asarray(join_weights(parts))

    answer_requests(run)
