"""`fit`: train a model on your own table or arrays, without a run folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from fedauc.data.checks import as_inputs, check_classes, naming_source
from fedauc.data.classes import ClassCensus
from fedauc.data.clients import Clients, Examples, examples
from fedauc.data.columns import select_features
from fedauc.data.dataset import Dataset
from fedauc.data.description import list_data_notes
from fedauc.data.features import FeatureEncoder
from fedauc.data.preparation import Preparation, Split, prepare_table
from fedauc.data.scales import warn_of_scales
from fedauc.discovery import lookup, read_members
from fedauc.experiments.assembly import Assembly, assemble_training, make_secret, record_preparation
from fedauc.experiments.callbacks import Callback, choose_callbacks, find_callbacks
from fedauc.experiments.callbacks.evaluation import Evaluation
from fedauc.experiments.class_training import read_class_examples
from fedauc.experiments.decisions import describe_decisions
from fedauc.experiments.evaluation import Evaluator, PersonalModels, Quality, RecordColumns, score_rows
from fedauc.experiments.guarantee import describe_guarantee
from fedauc.experiments.parameters import flatten_parameters
from fedauc.experiments.private_evaluation import NoisedEvaluation, PlannedReleases, check_private_evaluation
from fedauc.experiments.private_standardization import has_private_standardization, standardize_privately
from fedauc.experiments.progress_lines import ProgressLines, is_watched
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.run_loop import Observer, RunLoop, first_checkpoint
from fedauc.experiments.run_view import RunView
from fedauc.experiments.saved_model import FitEvidence, gather_evidence, save_fitted, withhold_evidence
from fedauc.ledger import Traffic
from fedauc.metrics import DEFAULT_METRICS, Metric, list_class_metrics, parse_metrics
from fedauc.models import find_models
from fedauc.models.model import ModelConfig
from fedauc.network import ModuleNetwork
from fedauc.scoring.scorer import Scorer
from fedauc.training import State
from fedauc.trees import Tree

CHECKED_ROWS = 256
"""Training rows that are scored after a cycle when there are no held-out rows."""


@dataclass(frozen=True)
class Fitted:
    """A trained model, how it got there, and what travelled. `history` holds (round, quality) per evaluated cycle.

    Rounds count from 0, so the model of round r has seen r + 1 rounds. `round` is the round that the module comes from:
    the last one, or the best one with `keep="best"`. `state` is the training state after the last round
    (`state.round` is the number of rounds that are done) and `client_states` what each client keeps, both as
    `Training.rounds` needs them to go on. `stopped_early` says why a callback has ended the run. `encoder` turns the
    rows of a raw table into inputs, where the model was trained on one; `feature_names` are the columns of a frame.
    `epsilon` is what a private run has spent, at the delta of its recipe; None for other runs.
    """

    module: nn.Module
    recipe: Recipe
    history: list[tuple[int, Quality]]
    traffic: Traffic
    round: int
    state: State
    client_states: dict[int, Tree]
    stopped_early: str | None = None
    encoder: FeatureEncoder | None = None
    feature_names: tuple[str, ...] = ()
    evidence: FitEvidence | None = None
    epsilon: float | None = None

    def save(self, folder: str | Path, calibration: str = "platt") -> Scorer:
        """Write what `fedauc.load` needs to score new rows, and a model card; `calibration` may be isotonic too.

        Calibration and threshold come from the validation rows, or from the training rows where there are none.
        """
        return save_fitted(self.module, self.evidence, self.encoder, self.feature_names, Path(folder), calibration)

    def scores(self, inputs: Any) -> np.ndarray:
        """Raw scores of new rows; where clients have personal heads, these use the initial head, not a client's.

        A model of several classes gives `[n, C]`, the log-odds of each class against the rest.

        The columns of a table are found by name, in any order. A model that was trained on a raw table encodes them as
        its training rows were.
        """
        if not hasattr(inputs, "collect") and len(inputs) == 0:
            return np.zeros(0)
        rows = self.encoder.encode(inputs) if self.encoder else select_features(inputs, self.feature_names)
        network = ModuleNetwork(self.module)
        objective = self.recipe.algorithm.objective
        return score_rows(network, network.initial_model(), as_inputs(rows), objective)


def fit(
    module: nn.Module | ModelConfig | str,
    clients: Clients | Dataset,
    method: str | Recipe = "cycp-pairwise",
    test: Examples | tuple[Any, Any] | None = None,
    validation: Examples | tuple[Any, Any] | None = None,
    metrics: str | Metric | Sequence[str | Metric] = DEFAULT_METRICS,
    callbacks: str | Callback | Sequence[str | Callback] = (),
    verbose: bool | None = None,
    **settings: Any,
) -> Fitted:
    """Train `module` on the clients' data; evaluate on `test` and `validation` rows after every cycle.

    `module` is a network, or a model such as `"linear"` or `MLP(...)`, which is built for the inputs. In the place of
    clients a dataset will do, such as `fedauc.Table("claims.csv", ...)`: its test and validation rows are held out as
    in `fedauc run`, by the setting `data_seed` (0).

    The sites are simulated: their rows are in this process, and `fedauc federation` runs the same rounds across
    machines. With `verbose`, a handful of lines on standard error say what was decided, how far the run is and how
    long it still takes; unless given, they are printed where standard error is a terminal or a notebook.

    Held-out rows are examples, or a pair of arrays. `metrics` are texts such as `pauc@0.05`, or instances; all are
    measured on the test rows, and the first one on the validation rows too. `callbacks` are instances, or names of
    those that `fedauc list callbacks` shows. Both may be one, several, or a text with commas. `settings` are fields of
    the recipe, the algorithm or the schedule, such as `cycles`, `learning_rate`, `objective`, `groups`, `seed`,
    `keep="best"` or `patience`; `preset="as-printed"` has the settings of the paper, over which others win.

    Clients with labels of several classes (`Clients.from_classes`) need a module with an output per class, and
    `algorithm=OneVsRestPairwise()`, or "cycp-fedavg" with `objective="softmax"`.

    The module itself is left as it was; the trained one is in the result.
    """
    data_seed = settings.pop("data_seed", 0)
    recipe = method if isinstance(method, Recipe) else Recipe.of(method, **settings)
    if isinstance(method, Recipe) and settings:
        raise ValueError(f"settings {sorted(settings)} come with a whole recipe; use dataclasses.replace(recipe, ...)")
    data = _read_data(clients, test, validation, data_seed)
    secret = make_secret() if recipe.noise_source == "secret" else None
    standardizes = data.split is not None and has_private_standardization(recipe)
    if data.split is not None and standardizes:
        data = data.of_split(standardize_privately(data.split, recipe, secret))
    given_callbacks = read_members("callbacks", callbacks, Callback, _make_callback)
    chosen_metrics = parse_metrics(metrics)
    if isinstance(data.clients.census, ClassCensus) and metrics == DEFAULT_METRICS:
        chosen_metrics = parse_metrics(list_class_metrics(len(data.clients.census.counts)))
    if not isinstance(module, nn.Module):
        model = _read_model(module)
        data, module = data._replace(model=model), _build_module(model, data.clients, recipe.seed)
    check_private_evaluation(recipe, chosen_metrics, data.validation, data.test)
    releases = PlannedReleases(1, data.held_out_parts, standardizes)
    assembly = assemble_training(recipe, module, data.clients, secret, releases)
    guarantee = describe_guarantee(recipe, assembly.training, releases)
    if data.split is not None:
        record_preparation(assembly, data.split)
    personal = PersonalModels.of(assembly.training, data.clients.names)
    if personal is not None:
        personal.report_unknown_clients({"test": data.test, "validation": data.validation})
    advice = assembly.training.advice
    noised = NoisedEvaluation.of_run(recipe, assembly.training, data.held_out_parts)
    evaluator = Evaluator(recipe.algorithm, assembly.network, chosen_metrics, personal, advice, noised)
    verbose = is_watched(sys.stderr) if verbose is None else verbose
    with ProgressLines(quiet=not verbose) as lines:
        notes = list_data_notes(data.split) if data.split is not None else []
        for sentence in (*notes, *describe_decisions(recipe, data.clients.roster, assembly, guarantee)):
            lines.print_line(sentence)
        fitted = _train_model(recipe, data, assembly, evaluator, given_callbacks, lines.add_bar(recipe.method))
    assert fitted.evidence is not None
    evidence = withhold_evidence(fitted.evidence, recipe, guarantee, data.validation is not None)
    return replace(fitted, evidence=evidence)


class _FitData(NamedTuple):
    """Clients to train, rows to evaluate on, the split of a dataset where they come from one, and the model.

    `model` is None where the caller has given a network.
    """

    clients: Clients
    test: Examples | None
    validation: Examples | None
    split: Split | None = None
    model: ModelConfig | None = None

    @staticmethod
    def of_split(split: Split) -> _FitData:
        """The data of a dataset."""
        return _FitData(split.train, split.test, split.validation, split)

    @property
    def held_out_parts(self) -> int:
        """How many parts of held-out rows there are."""
        return (self.test is not None) + (self.validation is not None)


def _read_data(clients: Clients | Dataset, test: Any, validation: Any, seed: int) -> _FitData:
    """The data that `fit` was given, checked before training."""
    if isinstance(clients, Dataset):
        if test is not None or validation is not None:
            raise ValueError("test or validation rows come with a dataset, which holds out its own; leave them out")
        return _FitData.of_split(prepare_table(clients.load(seed), Preparation(), seed))
    warn_of_scales(clients)
    return _FitData(clients, _read_part("test", test, clients), _read_part("validation", validation, clients))


def _train_model(
    recipe: Recipe,
    data: _FitData,
    assembly: Assembly,
    evaluator: Evaluator,
    callbacks: tuple[Callback, ...],
    observer: Observer,
) -> Fitted:
    """Run all rounds, and collect what a caller may want to know."""
    history: list[tuple[int, Quality]] = []
    inputs, has_test, has_validation = data.clients.inputs, data.test is not None, data.validation is not None

    def measure_model(run: RunView) -> Quality | None:
        phase = run.round.phase
        if not has_test and not has_validation:
            # Without held-out rows, a few training rows still show whether all scores are the same; in a private run
            # their exact scores decide nothing.
            if not assembly.training.is_private:
                evaluator.check_outputs(run.model, inputs[:: max(1, len(inputs) // CHECKED_ROWS)], phase)
            return None
        quality = evaluator.measure_model(run.model, phase, data.validation, data.test)
        history.append((phase.round, quality))
        return quality

    chosen = choose_callbacks(recipe, callbacks, has_validation)
    loop = RunLoop(
        assembly,
        first_checkpoint(assembly.start, assembly.training.ledger),
        (*chosen, Evaluation(measure_model)),
        RecordColumns.of(evaluator.metrics, has_test, has_validation),
        clients=data.clients,
        # The clients' mean loss is exact.
        reports_losses=not assembly.training.is_private,
        evaluates_average=recipe.evaluates_average,
        stop_at_epsilon=recipe.stop_at_epsilon,
        parameters=flatten_parameters({"recipe": recipe}),
    )
    loop.train_to_end(observer)
    end = loop.finish()
    return Fitted(
        assembly.network.build_module(end.model),
        recipe,
        history,
        assembly.training.ledger.traffic,
        end.round,
        loop.state,
        assembly.training.engine.client_states(),
        end.notes.get("stopped_early"),
        None if data.split is None else data.split.encoder,
        data.clients.feature_names,
        gather_evidence(recipe, evaluator, end, data.clients, data.validation, data.test, data.model, data.split),
        assembly.training.spent_epsilon(loop.state.round, len(loop.records)),
    )


def _read_model(module: ModelConfig | str) -> ModelConfig:
    model: Any = lookup("model", module, find_models())() if isinstance(module, str) else module
    if not isinstance(model, ModelConfig):
        raise ValueError(f"module is a {type(model).__name__}; give a torch module, or a model such as 'linear'")
    return model


def _build_module(model: ModelConfig, clients: Clients, seed: int) -> nn.Module:
    """The network that a model describes, for the clients' inputs."""
    model.check_inputs(clients.inputs)
    return model.build(tuple(clients.inputs.shape[1:]), seed)


def _read_part(name: str, rows: Any, clients: Clients) -> Examples | None:
    """The rows of one part, checked: all classes, and the shape of the training rows."""
    if rows is None:
        return None
    is_given_as_arrays = isinstance(rows, (tuple, list)) and len(rows) in (2, 3)
    if not (is_given_as_arrays or isinstance(rows, Examples)):
        raise ValueError(f"{name} is a {type(rows).__name__}; give a pair of arrays (inputs, labels), or examples(...)")
    with naming_source(name):
        if not isinstance(rows, Examples):
            rows = (select_features(rows[0], clients.feature_names), *rows[1:])
        if isinstance(clients.census, ClassCensus):
            part = read_class_examples(rows, len(clients.census.counts))
        else:
            part = rows if isinstance(rows, Examples) else examples(*rows)
            check_classes(part.labels.cpu().numpy())
    shape, expected = tuple(part.inputs.shape[1:]), tuple(clients.inputs.shape[1:])
    if shape != expected:
        raise ValueError(f"{name} has rows of shape {shape}, the training rows {expected}; give both the same features")
    return part


def _make_callback(name: str) -> Callback:
    return lookup("callback", name, find_callbacks())()
