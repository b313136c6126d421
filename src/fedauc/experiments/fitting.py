"""`fit`: train your own model on your own arrays, without a run folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedauc.data.checks import as_inputs, check_classes, naming_source
from fedauc.data.clients import Clients, Examples, examples
from fedauc.data.features import FeatureEncoder
from fedauc.discovery import lookup, read_members
from fedauc.experiments.assembly import assemble_training
from fedauc.experiments.callbacks import Callback, choose_callbacks, find_callbacks
from fedauc.experiments.callbacks.evaluation import Evaluation
from fedauc.experiments.decisions import describe_decisions
from fedauc.experiments.evaluation import Evaluator, PersonalModels, Quality, RecordColumns, score_rows
from fedauc.experiments.progress_lines import ProgressLines, is_watched
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.run_loop import RunLoop, first_checkpoint
from fedauc.experiments.run_view import RunView
from fedauc.experiments.saved_model import FitEvidence, gather_evidence, save_fitted
from fedauc.ledger import Traffic
from fedauc.metrics import DEFAULT_METRICS, Metric, parse_metrics
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
    `Training.rounds` needs them to go on. `stopped_early` says why a callback has ended the run.
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
    evidence: FitEvidence | None = None

    def save(self, folder: str | Path, calibration: str = "platt") -> Scorer:
        """Write what `fedauc.load` needs to score new rows, and a model card; `calibration` may be isotonic too.

        Calibration and threshold come from the validation rows, or from the training rows where there are none.
        """
        return save_fitted(self.module, self.evidence, self.encoder, Path(folder), calibration)

    def scores(self, inputs: Any) -> np.ndarray:
        """Raw scores of new rows; where clients have personal heads, these use the initial head, not a client's."""
        if len(inputs) == 0:
            return np.zeros(0)
        network = ModuleNetwork(self.module)
        return score_rows(network, network.initial_model(), as_inputs(inputs))


def fit(
    module: nn.Module,
    clients: Clients,
    method: str | Recipe = "cycp-pairwise",
    test: Examples | tuple[Any, Any] | None = None,
    validation: Examples | tuple[Any, Any] | None = None,
    metrics: str | Metric | Sequence[str | Metric] = DEFAULT_METRICS,
    callbacks: str | Callback | Sequence[str | Callback] = (),
    verbose: bool | None = None,
    **settings: Any,
) -> Fitted:
    """Train `module` on the clients' data; evaluate on `test` and `validation` rows after every cycle.

    The sites are simulated: their rows are in this process, and `fedauc federation` runs the same rounds across
    machines. With `verbose`, a handful of lines on standard error say what was decided, how far the run is and how
    long it still takes; unless given, they are printed where standard error is a terminal or a notebook.

    Held-out rows are examples, or a pair of arrays. `metrics` are texts such as `pauc@0.05`, or instances; all are
    measured on the test rows, and the first one on the validation rows too. `callbacks` are instances, or names of
    those that `fedauc list callbacks` shows. Both may be one, several, or a text with commas. `settings` are fields of
    the recipe, the algorithm or the schedule, such as `cycles`, `learning_rate`, `objective`, `groups`, `seed`,
    `keep="best"` or `patience`. The module itself is left as it was; the trained one is in the result.
    """
    recipe = method if isinstance(method, Recipe) else Recipe.of(method, **settings)
    if isinstance(method, Recipe) and settings:
        raise ValueError(f"settings {sorted(settings)} come with a whole recipe; use dataclasses.replace(recipe, ...)")
    test_rows, validation_rows = _read_part("test", test, clients), _read_part("validation", validation, clients)
    given_callbacks = read_members("callbacks", callbacks, Callback, _make_callback)
    chosen_metrics = parse_metrics(metrics)
    assembly = assemble_training(recipe, module, clients)
    personal = PersonalModels.of(assembly.training, clients.names)
    if personal is not None:
        personal.report_unknown_clients({"test": test_rows, "validation": validation_rows})
    advice = assembly.training.advice
    evaluator = Evaluator(recipe.algorithm, assembly.network, chosen_metrics, personal, advice)
    history: list[tuple[int, Quality]] = []

    def measure_model(run: RunView) -> Quality | None:
        phase = run.round.phase
        if test_rows is None and validation_rows is None:
            # Without held-out rows, a few training rows still show whether all scores are the same.
            stride = max(1, len(clients.inputs) // CHECKED_ROWS)
            evaluator.check_outputs(run.model, clients.inputs[::stride], phase)
            return None
        quality = evaluator.measure_model(run.model, phase, validation_rows, test_rows)
        history.append((phase.round, quality))
        return quality

    chosen = choose_callbacks(recipe, given_callbacks, validation_rows is not None)
    all_callbacks = (*chosen, Evaluation(measure_model))
    columns = RecordColumns.of(evaluator.metrics, test_rows is not None, validation_rows is not None)
    loop = RunLoop(
        assembly,
        first_checkpoint(assembly.start),
        all_callbacks,
        columns,
        clients=clients,
        evaluates_average=recipe.evaluates_average,
    )
    if verbose is None:
        verbose = is_watched(sys.stderr)
    with ProgressLines(quiet=not verbose) as lines:
        for sentence in describe_decisions(recipe, clients.roster, assembly):
            lines.print_line(sentence)
        loop.train_to_end(lines.add_bar(recipe.method))
    end = loop.finish()
    training = assembly.training
    return Fitted(
        assembly.network.build_module(end.model),
        recipe,
        history,
        training.ledger.traffic,
        end.round,
        loop.state,
        training.engine.client_states(),
        end.notes.get("stopped_early"),
        evidence=gather_evidence(recipe, evaluator, end, clients, validation_rows, test_rows),
    )


def _read_part(name: str, rows: Any, clients: Clients) -> Examples | None:
    """The rows of one part, checked: both classes, and the shape of the training rows."""
    if rows is None:
        return None
    is_given_as_arrays = isinstance(rows, (tuple, list)) and len(rows) in (2, 3)
    if not (is_given_as_arrays or isinstance(rows, Examples)):
        raise ValueError(f"{name} is a {type(rows).__name__}; give a pair of arrays (inputs, labels), or examples(...)")
    with naming_source(name):
        part = rows if isinstance(rows, Examples) else examples(*rows)
        check_classes(part.labels.cpu().numpy())
    shape, expected = tuple(part.inputs.shape[1:]), tuple(clients.inputs.shape[1:])
    if shape != expected:
        raise ValueError(f"{name} has rows of shape {shape}, the training rows {expected}; give both the same features")
    return part


def _make_callback(name: str) -> Callback:
    return lookup("callback", name, find_callbacks())()
