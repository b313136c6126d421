"""Run a configuration into a folder, or go on with one that was interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedauc.data.dataset import Dataset
from fedauc.data.prepare import Preparation, Split, prepare
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
    spent: float = 0.0

    @staticmethod
    def create(config: Config, path: Path) -> Run:
        """Check everything, then make the folder: a bad configuration writes nothing."""
        refuse_existing(path)
        split, assembly = _prepare(config)
        folder = RunFolder.create(path, config, Checkpoint(assembly.start, {}, Ledger()))
        return Run(config, folder, split, assembly, assembly.start)

    @staticmethod
    def resume(path: Path) -> Run:
        """Go on from the last checkpoint of a folder."""
        folder = RunFolder.open(path)
        config = folder.config
        split, assembly = _prepare(config)
        state, memories, ledger = folder.rewind(config.recipe.device)
        assembly.training.engine.restore(memories)
        assembly.training.ledger.resume(ledger)
        return Run(config, folder, split, assembly, state, folder.seconds())

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
        training, losses = self.assembly.training, []
        record, since = None, time.perf_counter()
        observer(Progress(self.state.round, training.plan.rounds, None))
        for finished in training.rounds(self.state):
            self.state = finished.state
            losses.append(finished.value)
            if self._due(finished, self.config.evaluate_every):
                record = self._record(finished, [value for value in losses if value is not None])
                losses = []
                self.folder.append(record, self.spent + time.perf_counter() - since)
            if self._due(finished, self.config.checkpoint_every) and not losses:
                self._checkpoint()
            observer(Progress(self.state.round, training.plan.rounds, record))

    def _due(self, finished: Round, every: int) -> bool:
        """Whether the round ends a learning cycle that is due; the last one always is."""
        phase = finished.phase
        last = phase.round == self.assembly.training.plan.rounds - 1
        return last or (phase.ends_cycle and not phase.scoring and (phase.cycle + 1) % every == 0)

    def _checkpoint(self) -> None:
        training = self.assembly.training
        self.folder.checkpoint(Checkpoint(self.state, training.engine.memories(), training.ledger))

    def _record(self, finished: Round, losses: list[float]) -> dict[str, Any]:
        phase, quality = finished.phase, self._evaluate(self._model, finished)
        return {
            "round": phase.round,
            "cycle": phase.cycle,
            "stage": phase.stage,
            "step_size": phase.step_size,
            "loss": float(np.mean(losses)) if losses else None,
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
        found["group_auc"] = {str(key): value for key, value in group_auc(labels, outputs, mine).items()}
        return found


@lru_cache(maxsize=1)
def load_split(data: Dataset, preparation: Preparation, seed: int) -> Split:
    """The prepared data; the last one is kept, since runs that are compared share it."""
    return prepare(data.load(seed), preparation, seed)


def check(config: Config) -> None:
    """Raise what a run of the configuration would raise before its first round."""
    _prepare(config)


def _prepare(config: Config) -> tuple[Split, Assembly]:
    split = load_split(config.data, config.preparation, config.data_seed)
    module = config.model.build(tuple(split.train.inputs.shape[1:]), config.recipe.seed)
    return split, assemble(config.recipe, module, split.train)
