"""Run a configuration into a folder, or go on with one that was interrupted."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from fedauc.data.clients import Clients, Examples
from fedauc.data.preparation import Split, prepare_table
from fedauc.experiments.assembly import DTYPES, Assembly, assemble_training
from fedauc.experiments.checkpoint import Checkpoint, Checkpointer
from fedauc.experiments.config import Config
from fedauc.experiments.evaluation import Evaluator
from fedauc.experiments.folder import RunFolder, describe_environment, encode_json, refuse_existing
from fedauc.experiments.plugin_use import describe_used_plugins
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.run_loop import Observer, RunLoop
from fedauc.ledger import Ledger
from fedauc.metrics import group_auc
from fedauc.training import Round


@dataclass
class Run:
    """A run that is ready to go: parts assembled, folder open, state known."""

    config: Config
    folder: RunFolder
    data: PreparedData
    assembly: Assembly
    loop: RunLoop

    @staticmethod
    def create(config: Config, path: Path, cache: DataCache | None = None) -> Run:
        """Check everything, then make the folder: a bad configuration writes nothing."""
        refuse_existing(path)
        data, assembly = assemble_run(config, cache or DataCache())
        environment = {**describe_environment(), **describe_used_plugins(config)}
        environment |= {"data": data.fingerprint, "note": data.split.note}
        files = {"config.json": config.to_json(), "environment.json": encode_json(environment)}
        first = Checkpoint(assembly.start, {}, Ledger(), [])
        return Run._make_run(config, RunFolder.create(path, files, first), data, assembly, first)

    @staticmethod
    def resume(path: Path, cache: DataCache | None = None) -> Run:
        """Go on from the last checkpoint of a folder; a finished run is left as it is."""
        folder = RunFolder.open(path)
        config = folder.config
        data, assembly = assemble_run(config, cache or DataCache())
        folder.check_data(data.fingerprint)
        if folder.done:
            return Run._make_run(config, folder, data, assembly, Checkpoint(assembly.start, {}, Ledger(), []))
        with folder.lock():
            checkpoint = folder.rewind_to_checkpoint(config.recipe.device)
        assembly.training.engine.restore_client_states(checkpoint.client_states)
        assembly.training.ledger.restore_from(checkpoint.ledger)
        return Run._make_run(config, folder, data, assembly, checkpoint)

    @staticmethod
    def _make_run(
        config: Config, folder: RunFolder, data: PreparedData, assembly: Assembly, checkpoint: Checkpoint
    ) -> Run:
        loop = RunLoop(
            assembly.training,
            checkpoint.state,
            functools.partial(_evaluate_round, config, data, assembly),
            config.evaluate_every,
            folder,
            Checkpointer(folder.write_checkpoint),
            [torch.tensor(loss, dtype=torch.float64) for loss in checkpoint.losses],
        )
        return Run(config, folder, data, assembly, loop)

    def train_to_end(self, observer: Observer = lambda progress: None) -> dict[str, Any]:
        """Train the remaining rounds, and return the result."""
        if self.folder.done:
            return self.folder.read_result()
        self.loop.train_to_end(observer)
        return self.write_result()

    def write_result(self) -> dict[str, Any]:
        """Write the model, the test scores and the result of the last state, and return the result."""
        network, (_, test) = self.assembly.network, self.data.held_out_examples(self.config.recipe.device)
        model = self.config.recipe.algorithm.extract_model(self.loop.state.server.shared)
        scores = Evaluator(self.config.recipe.algorithm, network).score_examples(model, test)
        labels = test.labels.cpu().numpy()
        final = self.folder.read_records()[-1]
        result = {"data": self.data.split.note, "final": final, **self._measure_auc_by_group(labels, scores)}
        assert self.loop.checkpointer is not None
        self.loop.checkpointer.wait()
        self.folder.write_model(network.build_module(model).state_dict())
        self.folder.write_arrays("scores.npz", {"labels": labels, "scores": scores})
        self.folder.write_result(result)
        return result

    def _measure_auc_by_group(self, labels: np.ndarray, scores: np.ndarray) -> dict[str, Any]:
        """The AUC inside each client and each group, where test rows say whose they are."""
        owners, clients = self.data.split.test.clients, self.data.split.train
        if owners is None or scores.ndim > 1:
            return {}
        group_of_client = {
            str(clients.names[client]): group
            for group, members in enumerate(self.assembly.training.schedule.groups)
            for client in members
        }
        groups = np.array([group_of_client.get(str(owner), -1) for owner in owners])
        known = groups >= 0
        client_auc = group_auc(labels, scores, owners)
        auc_by_group = group_auc(labels[known], scores[known], groups[known])
        return {
            "client_auc": {str(client): value for client, value in client_auc.items()},
            "group_auc": {str(group): value for group, value in auc_by_group.items()},
        }


def _evaluate_round(config: Config, data: PreparedData, assembly: Assembly, finished: Round) -> dict[str, Any]:
    """A record's columns of quality: those of the test rows, and the AUC of the validation rows."""
    evaluator = Evaluator(config.recipe.algorithm, assembly.network)
    model = config.recipe.algorithm.extract_model(finished.state.server.shared)
    validation, test = data.held_out_examples(config.recipe.device)
    columns: dict[str, Any] = evaluator.measure_quality(model, test, finished.phase)._asdict()
    if validation is not None:
        columns["validation_auc"] = evaluator.measure_quality(model, validation, finished.phase).auc
    return columns


class PreparedData:
    """Prepared data that runs share: as loaded, and once for each device and float type that runs train with."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self._clients: dict[tuple[str, str], Clients] = {}
        self._examples: dict[str, tuple[Examples | None, Examples]] = {}

    @cached_property
    def fingerprint(self) -> str:
        """A short hash, to notice when the data change under a run."""
        digest, (train, _, test, _) = hashlib.blake2b(digest_size=8), self.split
        tensors = (train.inputs, train.labels, test.inputs, test.labels)
        arrays = [train.rows, train.offsets, *(tensor.cpu().numpy() for tensor in tensors)]
        for array in arrays:
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def training_clients(self, recipe: Recipe) -> Clients:
        """The clients' rows on the recipe's device, so that no engine needs a copy of its own."""
        key = (recipe.device, recipe.dtype)
        if key not in self._clients:
            self._clients[key] = self.split.train.to(DTYPES[recipe.dtype], recipe.device)
        return self._clients[key]

    def held_out_examples(self, device: str) -> tuple[Examples | None, Examples]:
        """Validation and test rows, with inputs on the device: they are sent once, not with every evaluation."""
        if device not in self._examples:
            validation, test = (
                part and part._replace(inputs=part.inputs.to(device))
                for part in (self.split.validation, self.split.test)
            )
            assert test is not None
            self._examples[device] = validation, test
        return self._examples[device]


class DataCache:
    """Prepares data, and keeps the last split and those that runs still use, so that runs share them."""

    def __init__(self) -> None:
        self._used: WeakValueDictionary[object, PreparedData] = WeakValueDictionary()
        self._last: PreparedData | None = None

    def prepare_data(self, config: Config) -> PreparedData:
        """The prepared data of a configuration."""
        key = (config.data, config.preparation, config.data_seed)
        if key in self._used:
            self._last = self._used[key]
        else:
            split = prepare_table(config.data.load(config.data_seed), config.preparation, config.data_seed)
            self._last = self._used[key] = PreparedData(split)
        return self._last


def assemble_run(config: Config, cache: DataCache) -> tuple[PreparedData, Assembly]:
    """A run's data and parts; what does not fit is a `ValueError` before anything is written."""
    data = cache.prepare_data(config)
    module = config.model.build(tuple(data.split.train.inputs.shape[1:]), config.recipe.seed)
    return data, assemble_training(config.recipe, module, data.training_clients(config.recipe))
