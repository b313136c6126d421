"""pfl-research's federated averaging on its simulated backend, in as many processes as pfl finds itself in."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from harness.torch_models import build_module, flatten_weights, load_weights
from harness.work import Work


class Scorer(nn.Module):
    """A workload's model with the two methods pfl asks for."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The mean logistic loss."""
        return F.binary_cross_entropy_with_logits(self.body(inputs)[:, 0], labels)

    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, float]:
        """None: pfl evaluates the first round's clients whatever the frequency, and that is no part of the work."""
        return {}


def main(work: Work, answer_requests: Callable[..., None]) -> None:
    """Serve rounds in this process."""
    answer_requests(runner(work))


def runner(work: Work) -> Callable[[int], np.ndarray]:
    """A visit's rows, in the order they are drawn, are the user's data; it passes over them once."""
    scorer = Scorer(build_module(work.workload))
    model = PyTorchModel(scorer, torch.optim.SGD, torch.optim.SGD(scorer.parameters(), lr=1.0))
    inputs, labels, start = torch.from_numpy(work.inputs), torch.from_numpy(work.labels), torch.from_numpy(work.start)
    visits = torch.from_numpy(work.rows).flatten(0, 1).flatten(1)
    local = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=work.learning_rate, local_batch_size=work.shape.batch
    )

    def user(visit: int) -> PyTorchTensorDataset:
        chosen = visits[visit]
        return PyTorchTensorDataset((inputs[chosen], labels[chosen]), user_id=str(visit))

    def run(rounds: int) -> np.ndarray:
        load_weights(scorer, start)
        users = FederatedDataset(user, count().__next__)
        central = NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=work.rows.shape[1],
            val_cohort_size=0,
        )
        backend = SimulatedBackend(training_data=users, val_data=users)
        FederatedAveraging().run(central, backend, model, local, send_metrics_to_platform=False)
        return flatten_weights(scorer).numpy()

    return run
