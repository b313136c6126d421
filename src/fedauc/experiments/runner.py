"""Run a configuration into a folder, or go on with one that was interrupted."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from fedauc.data.clients import Clients, Examples
from fedauc.data.preparation import Split, prepare_table
from fedauc.experiments.assembly import DTYPES, Assembly, assemble_training
from fedauc.experiments.checkpoint import Checkpoint, write_atomically
from fedauc.experiments.config import Config
from fedauc.experiments.evaluation import Evaluator
from fedauc.experiments.folder import RunFolder, refuse_existing
from fedauc.experiments.recipe import Recipe
from fedauc.guards import TrainingStopped
from fedauc.interfaces import Model
from fedauc.ledger import Ledger
from fedauc.metrics import group_auc
from fedauc.training import Round, State


class Progress(NamedTuple):
    """How far a run is: rounds done, rounds in all, the last record, and whether it cannot go on."""

    done: int
    rounds: int
    record: dict[str, Any] | None
    stopped: bool = False


Observer = Callable[[Progress], None]


@dataclass
class Run:
    """A run that is ready to go: parts assembled, folder open, state known."""

    config: Config
    folder: RunFolder
    data: PreparedData
    assembly: Assembly
    state: State
    losses: list[Tensor] = field(default_factory=list)
    spent: float = 0.0
    record: dict[str, Any] | None = None

    @staticmethod
    def create(config: Config, path: Path, load: DataCache | None = None) -> Run:
        """Check everything, then make the folder: a bad configuration writes nothing."""
        refuse_existing(path)
        data, assembly = assemble_run(config, load or DataCache())
        first = Checkpoint(assembly.start, {}, Ledger(), [])
        folder = RunFolder.create(path, config, first, data.fingerprint, data.split.note)
        return Run(config, folder, data, assembly, assembly.start)

    @staticmethod
    def resume(path: Path, load: DataCache | None = None) -> Run:
        """Go on from the last checkpoint of a folder; a finished run is left as it is."""
        folder = RunFolder.open(path)
        config = folder.config
        data, assembly = assemble_run(config, load or DataCache())
        folder.check_data(data.fingerprint)
        if folder.done:
            return Run(config, folder, data, assembly, assembly.start)
        state, client_states, ledger, losses = folder.rewind_to_checkpoint(config.recipe.device)
        assembly.training.engine.restore_client_states(client_states)
        assembly.training.ledger.restore_from(ledger)
        kept = [torch.tensor(loss, dtype=torch.float64) for loss in losses]
        return Run(config, folder, data, assembly, state, kept, folder.training_seconds())

    def train_to_end(self, observer: Observer | None = None) -> dict[str, Any]:
        """Train to the end, and return the result."""
        if self.folder.done:
            return self.folder.read_result()
        observer = observer or (lambda progress: None)
        observer(self.progress)
        try:
            begin = time.perf_counter()
            for finished in self.assembly.training.rounds(self.state):
                self.take(finished, time.perf_counter() - begin)
                observer(self.progress)
                begin = time.perf_counter()
        except TrainingStopped as stopped:
            self.stop(stopped)
            raise
        return self.finish()

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return Progress(self.state.round, self.assembly.training.plan.total_rounds, self.record)

    def take(self, finished: Round, seconds: float) -> None:
        """Go on to the state after a round that took so many seconds; evaluate it and save it where that is due."""
        begin = time.perf_counter() - seconds
        self.state = finished.state
        self.losses += [] if finished.loss is None else [finished.loss]
        if self._due(finished, self.config.evaluate_every):
            self.record, self.losses = self._record(finished), []
            self.folder.append_record(self.record, self.spent + time.perf_counter() - begin)
        if self._due(finished, self.config.checkpoint_every):
            self._checkpoint()
        self.spent += time.perf_counter() - begin

    def stop(self, reason: TrainingStopped) -> None:
        """Write down why the run cannot go on."""
        write_atomically(self.folder.path / "stopped.txt", f"{reason}\n".encode())

    def _due(self, finished: Round, every: int) -> bool:
        """Whether the round ends a learning cycle that is due; the last one always is."""
        phase = finished.phase
        last = phase.round == self.assembly.training.plan.total_rounds - 1
        return last or (phase.ends_cycle and not phase.scoring and phase.learning_cycles % every == 0)

    def _checkpoint(self) -> None:
        training = self.assembly.training
        losses = [float(loss) for loss in self.losses]
        self.folder.write_checkpoint(Checkpoint(self.state, training.engine.client_states(), training.ledger, losses))

    def _record(self, finished: Round) -> dict[str, Any]:
        phase, quality = finished.phase, self._evaluate(self._model, finished)
        return {
            "round": phase.round,
            "cycle": phase.cycle,
            "stage": phase.stage,
            "learning_rate": phase.learning_rate,
            "loss": float(np.mean([float(loss) for loss in self.losses])) if self.losses else None,
            **quality,
            **finished.diagnostic_values,
            **finished.traffic._asdict(),
        }

    def _evaluate(self, model: Model, finished: Round) -> dict[str, Any]:
        evaluate = Evaluator(self.config.recipe.algorithm, self.assembly.network)
        validation, test = self.data.held(self.config.recipe.device)
        found = evaluate(model, test, finished.phase)._asdict()
        if validation is not None:
            found["validation_auc"] = evaluate(model, validation, finished.phase).auc
        return found

    @property
    def _model(self) -> Model:
        return self.config.recipe.algorithm.extract_model(self.state.server.shared)

    def finish(self) -> dict[str, Any]:
        """Write the result of the last state, and return it."""
        network, (_, test) = self.assembly.network, self.data.held(self.config.recipe.device)
        outputs = Evaluator(self.config.recipe.algorithm, network).score_examples(self._model, test)
        labels = test.labels.cpu().numpy()
        result = {
            "data": self.data.split.note,
            "final": self.folder.read_records()[-1],
            **self._by_group(labels, outputs),
        }
        weights = network.module(self._model).state_dict()
        self.folder.write_result(result, weights, {"labels": labels, "scores": outputs})
        return result

    def _by_group(self, labels: np.ndarray, outputs: np.ndarray) -> dict[str, Any]:
        """AUC inside each client and each group, where test rows say whose they are."""
        owners, clients = self.data.split.test.clients, self.data.split.train
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


class PreparedData:
    """Prepared data that runs share: as loaded, and once for each device and float type that trains on it."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self._moved: dict[tuple[str, str], Clients] = {}
        self._held: dict[str, tuple[Examples | None, Examples]] = {}

    @cached_property
    def fingerprint(self) -> str:
        """A short hash, to notice when the data change under a run."""
        digest, (train, _, test, _) = hashlib.blake2b(digest_size=8), self.split
        tensors = (train.inputs, train.labels, test.inputs, test.labels)
        arrays = [train.rows, train.offsets, *(tensor.cpu().numpy() for tensor in tensors)]
        for array in arrays:
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def clients(self, recipe: Recipe) -> Clients:
        """The clients' rows where the recipe trains, so that no engine needs a copy of its own."""
        key = (recipe.device, recipe.dtype)
        if key not in self._moved:
            self._moved[key] = self.split.train.to(DTYPES[recipe.dtype], recipe.device)
        return self._moved[key]

    def held(self, device: str) -> tuple[Examples | None, Examples]:
        """Validation and test rows, their inputs where they are scored: sent once, not with every evaluation."""
        if device not in self._held:
            validation, test = (
                part and part._replace(inputs=part.inputs.to(device))
                for part in (self.split.validation, self.split.test)
            )
            assert test is not None
            self._held[device] = validation, test
        return self._held[device]


class DataCache:
    """Prepares data, and keeps the last and what runs still use: runs side by side share each split."""

    def __init__(self) -> None:
        self._used: WeakValueDictionary[object, PreparedData] = WeakValueDictionary()
        self._last: PreparedData | None = None

    def __call__(self, config: Config) -> PreparedData:
        """The prepared data of a configuration."""
        key = (config.data, config.preparation, config.data_seed)
        self._last = self._used.get(key) or PreparedData(_load(config))
        self._used[key] = self._last
        return self._last


def assemble_run(config: Config, load: DataCache) -> tuple[PreparedData, Assembly]:
    """A run's data and parts, or what does not fit, before anything is written."""
    data = load(config)
    module = config.model.build(tuple(data.split.train.inputs.shape[1:]), config.recipe.seed)
    return data, assemble_training(config.recipe, module, data.clients(config.recipe))


def _load(config: Config) -> Split:
    return prepare_table(config.data.load(config.data_seed), config.preparation, config.data_seed)
