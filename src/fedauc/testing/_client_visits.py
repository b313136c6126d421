"""Visits of an algorithm to three clients by hand, without an engine: its client methods on a linear network."""

from __future__ import annotations

from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from fedauc.interfaces import (
    Algorithm,
    Batch,
    BatchSize,
    Census,
    Cohort,
    Download,
    ForwardPass,
    Model,
    Network,
    Phase,
    Server,
    Setting,
    Upload,
)
from fedauc.random_tensors import client_keys
from fedauc.testing.small_federation import EMBEDDING_SIZE, FEATURES, small_federation
from fedauc.trees import Tree, is_empty, tree_at, tree_map, tree_stack

STEPS = 3
CLIENTS = 3
BATCH = BatchSize(2, 3)
EVERYONE = Cohort(0, (0, 1, 2), (0.2, 0.3, 0.5))


@final
class LinearNetwork(Network):
    """h = X w in plain torch, for any number of leading dimensions; `width` columns of weights make an embedding."""

    def __init__(self, width: int = 0) -> None:
        self._width = width

    def forward_pass(self, model: Model, inputs: Tensor) -> ForwardPass:
        """The outputs; buffers count the passes."""
        weights = model.weights.reshape(*model.weights.shape[:-1], FEATURES, max(self._width, 1))
        outputs = inputs @ weights

        def pull_back(cotangent: Tensor) -> Tensor:
            wide = cotangent if self._width else cotangent[..., None]
            return (inputs.transpose(-1, -2) @ wide).flatten(-2)

        return ForwardPass(outputs if self._width else outputs[..., 0], model.buffers + 1, pull_back)


class Visited(NamedTuple):
    """What a visit yields."""

    upload: Upload
    client_state: Tree
    loss: Tensor


def embedding_width(algorithm: Algorithm) -> int:
    """The numbers per row that the objective takes, or 0 for a score."""
    return EMBEDDING_SIZE if algorithm.objective.takes_embeddings else 0


def make_setting() -> Setting:
    """Clients 0, 4 and 6 of the small federation, which hold both classes."""
    census = Census(*(counts[[0, 4, 6]] for counts in small_federation().census))
    return Setting(0, 2, BATCH, census, "clients")


def start_model(algorithm: Algorithm) -> Model:
    """The model of the first round."""
    rng = np.random.default_rng(5)
    weights = 0.5 * rng.normal(size=FEATURES * max(embedding_width(algorithm), 1))
    return Model(torch.from_numpy(weights), torch.zeros(2, dtype=torch.float64))


def make_phase(algorithm: Algorithm, number: int) -> Phase:
    """Cycles of two rounds, each with everyone; the first is a scoring cycle where the algorithm asks for one."""
    scoring = algorithm.scoring_pass and number < 2
    return Phase(number, number // 2, 0, 0.1, STEPS, BATCH, scoring, number == 0, ends_cycle=number % 2 == 1)


def draw_batches(number: int, per_client: Tree) -> list[Batch]:
    """Each step's batch of 3 clients, `[3, 5, ...]`: 2 positives, then 3 negatives; the last client lacks positives."""
    rng = np.random.default_rng([7, number])
    labels = torch.tensor([1.0, 1, 0, 0, 0], dtype=torch.float64).expand(CLIENTS, 5)
    weights = torch.from_numpy(rng.uniform(0.1, 0.5, size=(CLIENTS, 5)))
    weights[2, :2] = 0
    inputs = torch.from_numpy(rng.normal(size=(STEPS, CLIENTS, 5, FEATURES)))
    # Every client holds at least 2 positives and 5 negatives.
    places = torch.from_numpy(rng.integers([0, 0, 2, 2, 2], [2, 2, 7, 7, 7], size=(STEPS, CLIENTS, 5)))
    keys = [torch.from_numpy(client_keys(range(CLIENTS), "step noise", number, step)) for step in range(STEPS)]
    passive = [tree_map(lambda leaf, at=step: leaf[:, at], per_client) for step in range(STEPS)]
    return [Batch(inputs[step], labels, weights, passive[step], places[step], keys[step]) for step in range(STEPS)]


def visit_client(algorithm: Algorithm, download: Download, client_state: Tree, batches: list[Batch]) -> Visited:
    """The client methods in their order; `[I, ...]` comes after the leading dimensions of the batches."""
    network, lead = LinearNetwork(embedding_width(algorithm)), batches[0].weights.ndim - 1
    client_state = algorithm.initial_client_state(download) if is_empty(client_state) else client_state
    local, emitted, losses = algorithm.begin(download, client_state), [], []
    for batch in batches:
        if not download.phase.scoring:
            losses.append(algorithm.monitored_loss(network, download, local, batch))
        local, out = algorithm.step(network, download, local, batch)
        emitted.append(out)
    stacked = tree_map(lambda *leaves: torch.stack(leaves, dim=lead), *emitted)
    loss = torch.stack(losses, dim=lead) if losses else torch.zeros(batches[0].weights.shape[:-1])
    return Visited(*algorithm.finish(download, client_state, local, stacked), loss)


def visit_one_by_one(
    algorithm: Algorithm, download: Download, client_states: list[Tree], batches: list[Batch]
) -> list[Visited]:
    """The three clients, each alone."""
    return [
        visit_client(
            algorithm,
            download._replace(per_client=tree_at(download.per_client, client)),
            client_states[client],
            [tree_at(batch, client) for batch in batches],
        )
        for client in range(CLIENTS)
    ]


def stack_download(download: Download) -> Download:
    """What all are sent, once for each of the three clients."""

    def add_clients(leaf: Tensor) -> Tensor:
        return leaf.expand(CLIENTS, *leaf.shape)

    return download._replace(
        shared=tree_map(add_clients, download.shared), anchor=tree_map(add_clients, download.anchor)
    )


def average_uploads(uploads: list[Upload], cohort: Cohort) -> Upload:
    """The uploads as an engine returns them: the weighted mean, and a stack of the pools."""
    stacked: Upload = tree_stack(uploads)
    weights = torch.tensor(cohort.weights, dtype=torch.float64)
    return stacked._replace(mean=tree_map(lambda leaf: torch.tensordot(weights, leaf, dims=1), stacked.mean))


def server_after_scoring(algorithm: Algorithm) -> Server:
    """The server before the first learning round: after one scoring round, where the algorithm asks for scoring."""
    setting = make_setting()
    server = algorithm.init(setting, start_model(algorithm))
    if algorithm.scoring_pass:
        phase = make_phase(algorithm, 0)
        download = algorithm.dispatch(setting, server, EVERYONE, phase)
        batches = draw_batches(0, download.per_client)
        visits = visit_one_by_one(algorithm, download, [(), (), ()], batches)
        upload = average_uploads([visited.upload for visited in visits], EVERYONE)
        server = algorithm.merge(setting, server, upload, EVERYONE, make_phase(algorithm, 1))
    return server
