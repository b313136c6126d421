"""Run a configuration into a folder, or go on with one that was interrupted."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from fedauc.data.clients import Clients, Examples
from fedauc.data.description import describe_data, list_data_notes
from fedauc.data.preparation import Split, prepare_table
from fedauc.experiments.assembly import DTYPES, Assembly, assemble_training, record_preparation
from fedauc.experiments.callbacks import Callback, choose_callbacks
from fedauc.experiments.callbacks.evaluation import Evaluation
from fedauc.experiments.callbacks.record_writer import RecordWriter
from fedauc.experiments.checkpoint import Checkpoint, Checkpointer
from fedauc.experiments.config import Config, resolve_data_paths
from fedauc.experiments.decisions import describe_decisions, describe_recommended, log_once
from fedauc.experiments.evaluation import Evaluator, PersonalModels, Quality, RecordColumns
from fedauc.experiments.folder import DATA_FILE, RunFolder, check_new_folder, describe_environment, encode_json
from fedauc.experiments.parameters import flatten_parameters
from fedauc.experiments.plugin_use import describe_used_plugins
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.roster import ROSTER_FILE, describe_roster
from fedauc.experiments.run_loop import Observer, RunLoop, first_checkpoint
from fedauc.experiments.run_view import RunView
from fedauc.experiments.saved_model import make_run_scorer, write_run_card
from fedauc.metrics import group_auc, parse_metrics
from fedauc.progress import report_activity


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
        check_new_folder(path)
        config = resolve_data_paths(config)
        data, assembly = assemble_run(config, cache or DataCache())
        environment = {**describe_environment(), **describe_used_plugins(config)}
        decisions = describe_decisions(config.recipe, data.split.train.roster, assembly)
        decisions += describe_recommended(config.data, config.recipe)
        environment |= {"data": data.fingerprint, "note": data.split.note, "decisions": decisions}
        environment |= {"scoring_rounds": assembly.training.plan.scoring_rounds}
        roster = describe_roster(data.split.train, assembly.training)
        files = {
            "config.json": config.to_json(),
            "environment.json": encode_json(environment),
            ROSTER_FILE: encode_json(roster, indent=None),
            DATA_FILE: encode_json(describe_data(data.split)),
        }
        first = first_checkpoint(assembly.start, assembly.training.ledger)
        for sentence in (*list_data_notes(data.split), *decisions):
            log_once(sentence)
        return Run._make_run(config, RunFolder.create(path, files, first), data, assembly, first)

    @staticmethod
    def resume(path: Path, cache: DataCache | None = None) -> Run:
        """Go on from the last checkpoint of a folder; a finished run is left as it is."""
        folder = RunFolder.open(path)
        config = folder.config
        data, assembly = assemble_run(config, cache or DataCache())
        folder.check_data(data.fingerprint)
        if folder.done:
            return Run._make_run(config, folder, data, assembly, first_checkpoint(assembly.start))
        with folder.lock():
            checkpoint = folder.rewind_to_checkpoint(config.recipe.device)
        assembly.training.engine.restore_client_states(checkpoint.client_states)
        assembly.training.ledger.restore_from(checkpoint.ledger)
        return Run._make_run(config, folder, data, assembly, checkpoint)

    @staticmethod
    def _make_run(
        config: Config, folder: RunFolder, data: PreparedData, assembly: Assembly, checkpoint: Checkpoint
    ) -> Run:
        callbacks = (RecordWriter(folder), *make_callbacks(config, data, assembly))
        clients = data.training_clients(config.recipe)
        if (personal := PersonalModels.of(assembly.training, clients.names)) is not None:
            personal.report_unknown_clients({"test": data.split.test, "validation": data.split.validation})
        columns = RecordColumns.of(parse_metrics(config.metrics), True, data.split.validation is not None)
        checkpointer = Checkpointer(folder.write_checkpoint)
        averaged = config.recipe.evaluates_average
        loop = RunLoop(
            assembly,
            checkpoint,
            callbacks,
            columns,
            folder,
            checkpointer,
            clients,
            evaluates_average=averaged,
            parameters=flatten_parameters(config),
        )
        return Run(config, folder, data, assembly, loop)

    def train_to_end(self, observer: Observer = lambda progress: None) -> dict[str, Any]:
        """Train the remaining rounds, and return the result."""
        if self.folder.done:
            return self.folder.read_result()
        self.loop.train_to_end(observer)
        return self.write_result()

    def write_result(self) -> dict[str, Any]:
        """Write the model that the run ends with, its test scores and the result, and return the result."""
        network, (_, test) = self.assembly.network, self.data.held_out_examples(self.config.recipe.device)
        model, _, final, notes = self.loop.finish()
        evaluator = make_evaluator(self.config, self.data, self.assembly)
        labels, scores = test.labels.cpu().numpy(), evaluator.score_examples(model, test)
        by_group = self._measure_auc_by_group(labels, scores)
        result = {"data": self.data.split.note, "final": final, **notes, **by_group}
        assert self.loop.checkpointer is not None
        self.loop.checkpointer.wait()
        scorer = make_run_scorer(self.config, self.data.split, network, model)
        if scorer is None:
            self.folder.write_model(network.build_module(model).state_dict())
        else:
            scorer.save(self.folder.path)
        write_run_card(self.folder.path, scorer, self.config, self.data.split, result, (labels, scores))
        origins = {"rows": self.data.split.test.rows, "clients": self.data.split.test.clients}
        known_origins = {name: column for name, column in origins.items() if column is not None}
        self.folder.write_arrays("scores.npz", {"labels": labels, "scores": scores, **known_origins})
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


def make_evaluator(config: Config, data: PreparedData, assembly: Assembly) -> Evaluator:
    """What measures the models of a run."""
    personal = PersonalModels.of(assembly.training, data.split.train.names)
    metrics, advice = parse_metrics(config.metrics), assembly.training.advice
    return Evaluator(config.recipe.algorithm, assembly.network, metrics, personal, advice)


def make_callbacks(config: Config, data: PreparedData, assembly: Assembly) -> tuple[Callback, ...]:
    """The callbacks of a configuration: its own, those of its recipe, and the evaluation."""
    evaluator = make_evaluator(config, data, assembly)

    def measure_model(run: RunView) -> Quality:
        validation, test = data.held_out_examples(config.recipe.device)
        return evaluator.measure_model(run.model, run.round.phase, validation, test)

    how_to_hold_out = "raise --data.validation-fraction" if hasattr(config.data, "validation_fraction") else ""
    has_validation = data.split.validation is not None
    chosen = choose_callbacks(config.recipe, config.callbacks, has_validation, how_to_hold_out)
    return (*chosen, Evaluation(measure_model, config.evaluate_every))


class PreparedData:
    """Prepared data that runs share: as loaded, and once for each device and float type that runs train with."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self._clients: dict[tuple[str, str], Clients] = {}
        self._examples: dict[str, tuple[Examples | None, Examples]] = {}

    @cached_property
    def fingerprint(self) -> str:
        """A short hash, to notice when the data change under a run."""
        digest, train, test = hashlib.blake2b(digest_size=8), self.split.train, self.split.test
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
            with report_activity(f"loading {config.data.name}"):
                split = prepare_table(config.data.load(config.data_seed), config.preparation, config.data_seed)
            self._last = self._used[key] = PreparedData(split)
        return self._last


def assemble_run(config: Config, cache: DataCache) -> tuple[PreparedData, Assembly]:
    """A run's data and parts; what does not fit is a `ValueError` before anything is written."""
    data = cache.prepare_data(config)
    train, validation, test = data.split[:3]
    for rows in (train.inputs, test.inputs, *(() if validation is None else (validation.inputs,))):
        config.model.check_inputs(rows)
    module = config.model.build(tuple(data.split.train.inputs.shape[1:]), config.recipe.seed)
    assembly = assemble_training(config.recipe, module, data.training_clients(config.recipe))
    record_preparation(assembly, data.split)
    # Metrics and callbacks that do not fit the data are refused here too.
    make_callbacks(config, data, assembly)
    return data, assembly
