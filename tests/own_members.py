"""One member of each kind, as a user would write them outside the library; tests copy this file to a folder of its own.

Each differs from what it derives from, so that a run without it has other records.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from fedauc import keys
from fedauc.algorithms import Method
from fedauc.algorithms.fedavg import LocalSGD
from fedauc.data.dataset import Dataset, Rows, TableParts
from fedauc.data.partitions import Assignment, Partition
from fedauc.experiments.callbacks.callback import Callback
from fedauc.fields import option
from fedauc.interfaces import (
    Algorithm,
    Batch,
    Cohort,
    Download,
    Mean,
    Model,
    Network,
    Participation,
    Phase,
    Roster,
    Schedule,
    Server,
    ServerOptimizer,
    Setting,
    Upload,
    UploadTransform,
    Wrapper,
)
from fedauc.metrics.metric import Measurement, Metric
from fedauc.models.model import ModelConfig
from fedauc.objectives.kinds import PointObjective
from fedauc.stages import Budget, Stage, StageRule
from fedauc.trees import Tree, is_empty, tree_map

if TYPE_CHECKING:
    # `fedauc list` need not wait for torch.
    from torch import Tensor, nn

    from fedauc.experiments.run_view import RunView


@dataclass(frozen=True, kw_only=True)
class OwnLoss(PointObjective):
    """(margin - z)² for a positive and (margin + z)² for a negative."""

    name: ClassVar[str] = "own-loss"
    margin: float = option(1.0, "Scores beyond the margin are penalized too.", above=0)

    def example_loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The squared distance to the margin of the row's class."""
        return (self.margin - (2 * labels - 1) * scores).square()


@dataclass(frozen=True, kw_only=True)
class OwnAlgorithm(LocalSGD):
    """FedAvg with momentum at the server, and a clients' step without any change."""

    name: ClassVar[str] = "own-algorithm"
    beta: float = option(0.5, "Share of the velocity that stays.", at_least=0, below=1)

    def init(self, setting: Setting, model: Model) -> Server:
        """A velocity of zero."""
        return Server(shared=model, anchor=model, private=torch.zeros_like(model.weights))

    def merge(self, setting: Setting, server: Server, reduced: Upload, cohort: Cohort, phase: Phase) -> Server:
        """v <- beta v + mean change, w <- w + v."""
        if is_empty(reduced.mean):
            return server
        velocity = self.beta * server.private + reduced.mean.weights
        shared = Model(server.shared.weights + velocity, server.shared.buffers + reduced.mean.buffers)
        return server._replace(shared=shared, private=velocity)


class OwnSchedule(Schedule):
    """Even clients in even rounds, odd clients in odd rounds."""

    cycle_length = 2

    def __init__(self, roster: Roster) -> None:
        parity = np.arange(len(roster.sizes)) % 2
        self.groups = tuple(np.flatnonzero((parity == rest) & (roster.sizes > 0)) for rest in (0, 1))

    def cohort(self, round: int) -> Cohort:
        """The group of the round."""
        clients = tuple(int(client) for client in self.groups[round % 2])
        return Cohort(int(round), clients, (1 / len(clients),) * len(clients))


@dataclass(frozen=True)
class OwnParticipation(Participation):
    """Two groups take turns."""

    name: ClassVar[str] = "own-schedule"

    def bind(self, clients: Roster, seed: int) -> Schedule:
        """The schedule of these clients."""
        return OwnSchedule(clients)


@dataclass(frozen=True)
class OwnData(Dataset):
    """Two Gaussian classes."""

    name: ClassVar[str] = "own-data"
    about: ClassVar[str] = "generated from the seed; nothing to cite"
    rows: int = option(120, "Rows of each part.", at_least=20)

    def load(self, seed: int) -> TableParts:
        """Training, validation and test rows."""
        train, validation, test = (self._draw_rows(seed, part) for part in ("train", "validation", "test"))
        return TableParts(train, validation, test, f"{self.rows} rows of two Gaussian classes")

    def _draw_rows(self, seed: int, part: str) -> Rows:
        labels = (np.arange(self.rows) % 4 == 0).astype(np.int8)
        noise = keys.numpy_generator(seed, "own-data", part).normal(size=(self.rows, 3))
        return Rows((noise + labels[:, None]).astype(np.float32), labels)


@dataclass(frozen=True)
class OwnPartition(Partition):
    """Row i belongs to client i modulo the number of clients, counted from the seed."""

    name: ClassVar[str] = "own-partition"
    clients: int = option(6, "Number of clients.", at_least=1)

    def assign(self, rows: Rows, seed: int) -> Assignment:
        """One client after the other."""
        client = (np.arange(len(rows.labels)) + seed) % self.clients
        return Assignment(client, np.array([f"client-{number}" for number in range(self.clients)]))


@dataclass(frozen=True)
class OwnModel(ModelConfig):
    """A narrow hidden layer."""

    name: ClassVar[str] = "own-model"
    width: int = option(4, "Width of the hidden layer.", at_least=1)

    def build_layers(self, input_shape: tuple[int, ...]) -> nn.Module:
        """Two linear layers with a smooth activation between them."""
        from torch import nn

        layers = [nn.Flatten(), nn.Linear(int(np.prod(input_shape)), self.width), nn.SiLU(), nn.Linear(self.width, 1)]
        return nn.Sequential(*layers)


@dataclass(frozen=True)
class OwnStages(StageRule):
    """Every cycle is a stage, with a lower learning rate than the one before."""

    name: ClassVar[str] = "own-stages"

    def generate_stages(self, budget: Budget) -> Iterator[Stage]:
        """η, η / 2, η / 3, ..."""
        for number in range(budget.cycles):
            yield Stage(1, budget.learning_rate / (number + 1), budget.local_steps)


@dataclass(frozen=True)
class OwnMetric(Metric):
    """The share of the positives that are in the upper half of the rows."""

    name: ClassVar[str] = "own-metric"

    def measure(self, labels: np.ndarray, scores: np.ndarray) -> Measurement:
        """Positives at or above the median score."""
        return Measurement(float((scores[labels == 1] >= np.median(scores)).mean()))


@dataclass(frozen=True)
class OwnCallback(Callback):
    """Interrupts the run, as Ctrl-C does, after the round that an environment variable names."""

    name: ClassVar[str] = "own-callback"

    def on_round_end(self, run: RunView, state: Tree) -> Tree:
        """Count the rounds, and interrupt."""
        if os.environ.get("OWN_INTERRUPT") == str(run.rounds_done):
            raise KeyboardInterrupt
        return state


@dataclass(frozen=True, kw_only=True)
class OwnTransform(UploadTransform):
    """Uploads shrink by a factor."""

    name: ClassVar[str] = "own-transform"
    factor: float = option(0.9, "What remains of an upload.", above=0, at_most=1)

    def client(self, upload: Upload, state: Tree, key: Tensor, announced: Tree = ()) -> tuple[Upload, Tree]:
        """The smaller upload."""
        return upload._replace(mean=tree_map(lambda leaf: self.factor * leaf, upload.mean)), state


@dataclass(frozen=True, kw_only=True)
class OwnMean(Mean):
    """Halfway between the smallest and the largest upload, coordinate by coordinate."""

    name: ClassVar[str] = "own-mean"

    def combine(self, uploads: Tree, weights: Tensor) -> Tree:
        """(min + max) / 2."""
        return tree_map(lambda leaf: (leaf.amin(0) + leaf.amax(0)) / 2 if leaf.numel() else leaf.sum(0), uploads)


@dataclass(frozen=True, kw_only=True)
class OwnOptimizer(ServerOptimizer):
    """The server adds half the change of the last round."""

    name: ClassVar[str] = "own-optimizer"

    def init(self, weights: Tensor) -> Tensor:
        """No change yet."""
        return torch.zeros_like(weights)

    def update(self, change: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """This change and half of the last one."""
        return change + state / 2, change


@dataclass(frozen=True, kw_only=True)
class OwnWrapper(Wrapper):
    """Weights shrink after every local step."""

    name: ClassVar[str] = "own-wrapper"

    def step(
        self, inner: Algorithm, network: Network, download: Download, local: Tree, carried: Tree, batch: Batch
    ) -> tuple[Tree, Tree, Tree]:
        """The inner step, then the shrinking."""
        local, emitted = inner.step(network, download, local, batch)
        model = inner.local_model(local)
        return inner.replace_local_model(local, model._replace(weights=0.99 * model.weights)), carried, emitted


METHODS = (Method("own-method", OwnAlgorithm, "own-schedule", 0.05, reference="this file"),)
