"""Run a configuration into a folder, or go on with one that was interrupted."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedauc.data.prepare import Split, prepare
from fedauc.experiments.checkpoint import Checkpoint, write_atomically
from fedauc.experiments.config import Config
from fedauc.experiments.evaluation import Evaluator
from fedauc.experiments.folder import RunFolder, refuse_existing
from fedauc.experiments.recipe import Assembly, assemble
from fedauc.guards import TrainingStopped
from fedauc.interfaces import Model
from fedauc.ledger import Ledger
from fedauc.metrics import group_auc
from fedauc.training import Round, State


class Progress(NamedTuple):
    """How far a run is: rounds done, rounds in all, and the last record."""

    done: int
    rounds: int
    record: dict[str, Any] | None


Observer = Callable[[Progress], None]


@dataclass
class Run:
    """A run that is ready to go: parts assembled, folder open, state known."""

    config: Config
    folder: RunFolder
    split: Split
    assembly: Assembly
    state: State
    losses: list[Tensor] = field(default_factory=list)
    spent: float = 0.0

    @staticmethod
    def create(config: Config, path: Path, load: Loader | None = None) -> Run:
        """Check everything, then make the folder: a bad configuration writes nothing."""
        refuse_existing(path)
        split, assembly = _prepare(config, load or Loader())
        first = Checkpoint(assembly.start, {}, Ledger(), [])
        return Run(config, RunFolder.create(path, config, first, fingerprint(split)), split, assembly, assembly.start)

    @staticmethod
    def resume(path: Path, load: Loader | None = None) -> Run:
        """Go on from the last checkpoint of a folder; a finished run is left as it is."""
        folder = RunFolder.open(path)
        config = folder.config
        split, assembly = _prepare(config, load or Loader())
        folder.check_data(fingerprint(split))
        if folder.done:
            return Run(config, folder, split, assembly, assembly.start)
        state, memories, ledger, losses = folder.rewind(config.recipe.device)
        assembly.training.engine.restore(memories)
        assembly.training.ledger.resume(ledger)
        kept = [torch.tensor(loss, dtype=torch.float64) for loss in losses]
        return Run(config, folder, split, assembly, state, kept, folder.seconds())

    def go(self, observer: Observer | None = None) -> dict[str, Any]:
        """Train to the end, and return the result."""
        if self.folder.done:
            return self.folder.result()
        try:
            self._train(observer or (lambda progress: None))
        except TrainingStopped as stopped:
            write_atomically(self.folder.path / "stopped.txt", f"{stopped}\n".encode())
            raise
        return self._finish()

    def _train(self, observer: Observer) -> None:
        training = self.assembly.training
        record, since = None, time.perf_counter()
        observer(Progress(self.state.round, training.plan.rounds, None))
        for finished in training.rounds(self.state):
            self.state = finished.state
            self.losses += [] if finished.loss is None else [finished.loss]
            if self._due(finished, self.config.evaluate_every):
                record, self.losses = self._record(finished), []
                self.folder.append(record, self.spent + time.perf_counter() - since)
            if self._due(finished, self.config.checkpoint_every):
                self._checkpoint()
            observer(Progress(self.state.round, training.plan.rounds, record))

    def _due(self, finished: Round, every: int) -> bool:
        """Whether the round ends a learning cycle that is due; the last one always is."""
        phase = finished.phase
        last = phase.round == self.assembly.training.plan.rounds - 1
        return last or (phase.ends_cycle and not phase.scoring and phase.learned % every == 0)

    def _checkpoint(self) -> None:
        training = self.assembly.training
        losses = [float(loss) for loss in self.losses]
        self.folder.checkpoint(Checkpoint(self.state, training.engine.memories(), training.ledger, losses))

    def _record(self, finished: Round) -> dict[str, Any]:
        phase, quality = finished.phase, self._evaluate(self._model, finished)
        return {
            "round": phase.round,
            "cycle": phase.cycle,
            "stage": phase.stage,
            "step_size": phase.step_size,
            "loss": float(np.mean([float(loss) for loss in self.losses])) if self.losses else None,
            **quality,
            **finished.vitals,
            **finished.traffic._asdict(),
        }

    def _evaluate(self, model: Model, finished: Round) -> dict[str, Any]:
        evaluate = Evaluator(self.config.recipe.algorithm, self.assembly.network)
        found = evaluate(model, self.split.test, finished.phase)._asdict()
        if self.split.validation is not None:
            found["validation_auc"] = evaluate(model, self.split.validation, finished.phase).auc
        return found

    @property
    def _model(self) -> Model:
        return self.config.recipe.algorithm.model(self.state.server.shared)

    def _finish(self) -> dict[str, Any]:
        network, test = self.assembly.network, self.split.test
        outputs = Evaluator(self.config.recipe.algorithm, network).outputs(self._model, test)
        labels = test.labels.cpu().numpy()
        result = {"data": self.split.note, "final": self.folder.records()[-1], **self._by_group(labels, outputs)}
        weights = network.module(self._model).state_dict()
        self.folder.finish(result, weights, {"labels": labels, "scores": outputs})
        return result

    def _by_group(self, labels: np.ndarray, outputs: np.ndarray) -> dict[str, Any]:
        """AUC inside each client and each group, where test rows say whose they are."""
        owners, clients = self.split.test.clients, self.split.train
        if owners is None or outputs.ndim > 1:
            return {}
        found = {"client_auc": {str(key): value for key, value in group_auc(labels, outputs, owners).items()}}
        groups = {
            str(clients.names[c]): g
            for g, members in enumerate(self.assembly.training.schedule.groups)
            for c in members
        }
        mine = np.array([groups.get(str(owner), -1) for owner in owners])
        known = mine >= 0
        by_group = group_auc(labels[known], outputs[known], mine[known])
        found["group_auc"] = {str(key): value for key, value in by_group.items()}
        return found


class Loader:
    """Prepares data, and keeps the last: runs that are compared share it."""

    def __init__(self) -> None:
        self._key: object = None
        self._split: Split | None = None

    def __call__(self, config: Config) -> Split:
        """The prepared data of a configuration."""
        key = (config.data, config.preparation, config.data_seed)
        if self._split is None or self._key != key:
            table = config.data.load(config.data_seed)
            self._key, self._split = key, prepare(table, config.preparation, config.data_seed)
        return self._split


def fingerprint(split: Split) -> str:
    """A short hash of the prepared data, to notice when it changes under a run."""
    digest = hashlib.blake2b(digest_size=8)
    tensors = (split.train.inputs, split.train.labels, split.test.inputs, split.test.labels)
    arrays = [split.train.rows, split.train.offsets, *(tensor.cpu().numpy() for tensor in tensors)]
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def check(config: Config, load: Loader) -> None:
    """Raise what a run of the configuration would raise before its first round."""
    _prepare(config, load)


def _prepare(config: Config, load: Loader) -> tuple[Split, Assembly]:
    split = load(config)
    module = config.model.build(tuple(split.train.inputs.shape[1:]), config.recipe.seed)
    return split, assemble(config.recipe, module, split.train)
