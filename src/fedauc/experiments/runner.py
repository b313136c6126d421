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
from fedauc.experiments.assembly import DTYPES, Assembly, assemble_training, make_secret, record_preparation
from fedauc.experiments.callbacks import Callback, choose_callbacks
from fedauc.experiments.callbacks.evaluation import Evaluation
from fedauc.experiments.callbacks.record_writer import RecordWriter
from fedauc.experiments.checkpoint import Checkpoint, Checkpointer
from fedauc.experiments.config import Config, resolve_data_paths
from fedauc.experiments.decisions import describe_decisions, log_once
from fedauc.experiments.evaluation import Evaluator, PersonalModels, Quality, RecordColumns
from fedauc.experiments.folder import (
    DATA_FILE,
    PRIVACY_FILE,
    RunFolder,
    check_new_folder,
    describe_environment,
    encode_json,
)
from fedauc.experiments.guarantee import describe_guarantee, list_withheld
from fedauc.experiments.parameters import flatten_parameters
from fedauc.experiments.plugin_use import describe_used_plugins
from fedauc.experiments.private_evaluation import NoisedEvaluation, PlannedReleases, check_private_evaluation
from fedauc.experiments.private_standardization import has_private_standardization, standardize_privately
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.roster import ROSTER_FILE, describe_roster
from fedauc.experiments.run_loop import Observer, RunLoop, first_checkpoint
from fedauc.experiments.run_view import RunView
from fedauc.experiments.saved_model import make_run_scorer, write_run_card
from fedauc.experiments.time_needs import describe_long_rounds
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
        secret = make_secret() if config.recipe.noise_source == "secret" else None
        data, assembly = assemble_run(config, cache or DataCache(), secret)
        environment = {**describe_environment(), **describe_used_plugins(config)}
        guarantee = describe_guarantee(config.recipe, assembly.training, plan_releases(config, data.split))
        decisions = describe_decisions(config.recipe, data.split.train.roster, assembly, guarantee)
        environment |= {"data": data.fingerprint, "note": data.split.note, "decisions": decisions}
        environment |= {"scoring_rounds": assembly.training.plan.scoring_rounds}
        roster = describe_roster(data.split.train, assembly.training)
        files = {
            "config.json": config.to_json(),
            "environment.json": encode_json(environment),
            ROSTER_FILE: encode_json(roster, indent=None),
            DATA_FILE: encode_json(describe_data(data.split)),
        }
        if guarantee is not None:
            files[PRIVACY_FILE] = encode_json(guarantee)
        first = first_checkpoint(assembly.start, assembly.training.ledger)
        long_rounds = describe_long_rounds(assembly, data.training_clients(config.recipe))
        for sentence in (*list_data_notes(data.split), *decisions, *long_rounds):
            log_once(sentence)
        return Run._make_run(config, RunFolder.create(path, files, first, secret), data, assembly, first)

    @staticmethod
    def resume(path: Path, cache: DataCache | None = None) -> Run:
        """Go on from the last checkpoint of a folder; a finished run is left as it is."""
        folder = RunFolder.open(path)
        config = folder.config
        secret = folder.read_secret() if config.recipe.noise_source == "secret" else None
        data, assembly = assemble_run(config, cache or DataCache(), secret)
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
            # The clients' mean loss is exact.
            reports_losses=not assembly.training.is_private,
            evaluates_average=averaged,
            stop_at_epsilon=config.recipe.stop_at_epsilon,
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
        """Write the model that the run ends with, its test scores and the result, and return the result.

        A private run leaves out what would reveal exact scores, and its result says so.
        """
        config, network, split = self.config, self.assembly.network, self.data.split
        _, test = self.data.held_out_examples(config.recipe.device)
        model, last_round, final, notes = self.loop.finish()
        if final is None:
            raise ValueError(
                f"{self.folder.path / 'records.jsonl'} has lost the record of round {last_round}, which the last "
                "checkpoint is after; put it back, or delete that checkpoint to resume from the one before it"
            )
        guarantee = describe_guarantee(config.recipe, self.assembly.training, plan_releases(config, split))
        withheld = list_withheld(config.recipe, guarantee is not None, split.validation is not None)
        result = {"data": split.note, "final": final, **notes}
        tested = None
        if "scores" not in withheld:
            evaluator = make_evaluator(config, self.data, self.assembly)
            tested = test.labels.cpu().numpy(), evaluator.score_examples(model, test)
            result |= self._measure_auc_by_group(*tested)
        result |= {"not_released": withheld} if withheld else {}
        assert self.loop.checkpointer is not None
        self.loop.checkpointer.wait()
        scorer = None if "calibration" in withheld else make_run_scorer(config, split, network, model)
        if scorer is None:
            self.folder.write_model(network.build_module(model).state_dict())
        else:
            scorer.save(self.folder.path)
        write_run_card(self.folder.path, scorer, config, split, result, tested, guarantee)
        if tested is not None:
            origins = {"rows": split.test.rows, "clients": split.test.clients}
            known_origins = {name: column for name, column in origins.items() if column is not None}
            self.folder.write_arrays("scores.npz", {"labels": tested[0], "scores": tested[1], **known_origins})
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
    parts = plan_releases(config, data.split).held_out_parts
    noised = NoisedEvaluation.of_run(config.recipe, assembly.training, parts)
    return Evaluator(config.recipe.algorithm, assembly.network, metrics, personal, advice, noised)


def plan_releases(config: Config, split: Split) -> PlannedReleases:
    """What a run releases beside its uploads, if it is private."""
    parts = 1 if split.validation is None else 2
    return PlannedReleases(config.evaluate_every, parts, has_private_standardization(config.recipe))


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
    """Prepared data that runs share: as loaded, and once for each device and float type that runs train with.

    `source` is what a private run has standardised anew, with noise.
    """

    def __init__(self, split: Split, source: PreparedData | None = None) -> None:
        self.split, self._source = split, source
        self._clients: dict[tuple[str, str], Clients] = {}
        self._examples: dict[str, tuple[Examples | None, Examples]] = {}

    @cached_property
    def fingerprint(self) -> str:
        """A short hash, to notice when the data change under a run."""
        if self._source is not None:
            return self._source.fingerprint
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


def assemble_run(config: Config, cache: DataCache, secret: bytes | None = None) -> tuple[PreparedData, Assembly]:
    """A run's data and parts; what does not fit is a `ValueError` before anything is written."""
    data, recipe = cache.prepare_data(config), config.recipe
    if recipe.noise_source == "secret" and secret is None:
        secret = make_secret()
    if has_private_standardization(recipe):
        data = PreparedData(standardize_privately(data.split, recipe, secret), source=data)
    train, validation, test = data.split[:3]
    check_private_evaluation(recipe, parse_metrics(config.metrics), validation, test)
    for rows in (train.inputs, test.inputs, *(() if validation is None else (validation.inputs,))):
        config.model.check_inputs(rows)
    module = config.model.build(tuple(data.split.train.inputs.shape[1:]), recipe.seed)
    clients, releases = data.training_clients(recipe), plan_releases(config, data.split)
    assembly = assemble_training(recipe, module, clients, secret, releases)
    record_preparation(assembly, data.split)
    # Metrics and callbacks that do not fit the data are refused here too.
    make_callbacks(config, data, assembly)
    return data, assembly
