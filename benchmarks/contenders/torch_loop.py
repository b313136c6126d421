"""What one would write by hand: one client after another, one optimizer step after another. The reference result."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.torch_models import build_module, flatten_weights, load_weights
from harness.work import Work


class Client:
    """One module and one optimizer, reloaded for every visit."""

    def __init__(self, work: Work) -> None:
        self._module = build_module(work.workload)
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=work.learning_rate)
        self._inputs, self._labels = torch.from_numpy(work.inputs), torch.from_numpy(work.labels)

    def visit(self, weights: Tensor, batches: Tensor) -> Tensor:
        """The flat weights after a step on each batch of rows."""
        load_weights(self._module, weights)
        for chosen in batches:
            self._optimizer.zero_grad()
            scores = self._module(self._inputs[chosen])[:, 0]
            F.binary_cross_entropy_with_logits(scores, self._labels[chosen]).backward()
            self._optimizer.step()
        return flatten_weights(self._module)


def main(work: Work, answer_requests: Callable[..., None]) -> None:
    """Serve rounds in this process."""
    client, rows = Client(work), torch.from_numpy(work.rows)

    def run(rounds: int) -> np.ndarray:
        weights = torch.from_numpy(work.start)
        for cohort in rows[:rounds]:
            weights = torch.stack([client.visit(weights, batches) for batches in cohort]).mean(0)
        return weights.numpy()

    answer_requests(run)
