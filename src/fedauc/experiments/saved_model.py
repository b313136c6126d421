"""What a finished run saves beside its weights: the scorer for new rows, and the model card."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from fedauc import keys
from fedauc.data.clients import Clients, Examples
from fedauc.data.dataset import LABEL_VALUES
from fedauc.data.features import FeatureEncoder
from fedauc.data.preparation import Preparation, Split
from fedauc.experiments.config import Config
from fedauc.experiments.evaluation import Evaluator, score_rows
from fedauc.experiments.folder import describe_environment
from fedauc.experiments.guarantee import list_withheld, withhold_facts
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.run_loop import RunEnd
from fedauc.interfaces import Model
from fedauc.metrics import group_auc, parse_metrics
from fedauc.metrics.metric import Metric
from fedauc.models.model import ModelConfig
from fedauc.network import ModuleNetwork
from fedauc.scoring.model_card import CardFacts, MetricOnTest, PartSize, write_model_card
from fedauc.scoring.scorer import ReferenceRows, Scorer, make_scorer

MAX_REFERENCE_ROWS = 1 << 18
"""Of more training rows a random sample is scored for calibration and thresholds, so that it takes seconds."""


class FitEvidence(NamedTuple):
    """What `Fitted.save` needs beside the module: reference rows, one row as the module takes it, and the card's facts.

    `reference` is None for a model of embeddings, and `model` for a module of the caller's own. `withheld` says why
    there are no reference rows after a private training.
    """

    reference: ReferenceRows | None
    example: Tensor
    facts: CardFacts
    model: ModelConfig | None = None
    label_values: tuple[str, str] = LABEL_VALUES
    withheld: str = ""


def score_reference_rows(
    network: ModuleNetwork, model: Model, clients: Clients, validation: Examples | None, seed: int
) -> ReferenceRows | None:
    """Scores of the validation rows, or of training rows where there are none; None for a model of embeddings.

    All rows are scored with the shared model, as new rows will be: also those of clients with a head of their own.
    """
    if validation is not None:
        scores = score_rows(network, model, validation.inputs)
        labels, owners = validation.labels.cpu().numpy(), validation.clients
        return ReferenceRows("validation", labels, scores, owners) if scores.ndim == 1 else None
    chosen = np.arange(len(clients.rows))
    if len(chosen) > MAX_REFERENCE_ROWS:
        chosen = np.sort(keys.sample_indices(len(chosen), MAX_REFERENCE_ROWS, seed, "reference rows"))
    rows = clients.rows[chosen]
    scores = score_rows(network, model, clients.inputs[rows])
    owners = clients.names[np.searchsorted(clients.offsets, chosen, side="right") - 1]
    return ReferenceRows("training", clients.labels[rows].cpu().numpy(), scores, owners) if scores.ndim == 1 else None


def make_run_scorer(config: Config, split: Split, network: ModuleNetwork, model: Model) -> Scorer | None:
    """The scorer of a run's model; None, and a note, where it cannot be calibrated or gives embeddings."""
    reference = score_reference_rows(network, model, split.train, split.validation, config.recipe.seed)
    if reference is None:
        return None
    example = network.cast_inputs(split.train.inputs[:1]).cpu()
    try:
        return make_scorer(
            network.build_module(model), config.model, example, reference, split.encoder, split.label_values
        )
    except ValueError as error:
        # The run is done, and its result must not be lost.
        logging.getLogger("fedauc").warning("no scorer.json is written, because %s", error)
        return None


def write_run_card(
    folder: Path,
    scorer: Scorer | None,
    config: Config,
    split: Split,
    result: Mapping[str, Any],
    tested: tuple[np.ndarray, np.ndarray] | None,
    guarantee: dict[str, Any] | None = None,
) -> None:
    """The model card of a run, with the labels and scores of its test rows where these are released."""
    facts = CardFacts(
        data=split.note,
        model=config.model.name,
        method=config.recipe.method,
        sites=len(split.train),
        parts=_measure_parts(split.train, split.validation, split.test),
        settings={**describe_settings(config.recipe), "saved after round": result["final"]["round"] + 1},
        metrics=_list_metrics(parse_metrics(config.metrics), result["final"]),
        client_auc=result.get("client_auc"),
        test=tested if tested is not None and tested[1].ndim == 1 else None,
        limits=_list_limits(config.recipe, config.preparation),
        environment=describe_environment(),
        gives_embeddings=config.recipe.algorithm.objective.takes_embeddings,
    )
    write_model_card(folder, scorer, withhold_facts(facts, config.recipe, guarantee))


def withhold_evidence(
    evidence: FitEvidence, recipe: Recipe, guarantee: dict[str, Any] | None, has_validation: bool
) -> FitEvidence:
    """What a fitted model is saved with, without what a private training does not release."""
    reason = list_withheld(recipe, guarantee is not None, has_validation).get("calibration", "")
    reference = None if reason else evidence.reference
    facts = withhold_facts(evidence.facts, recipe, guarantee)
    return evidence._replace(reference=reference, facts=facts, withheld=reason)


def gather_evidence(
    recipe: Recipe,
    evaluator: Evaluator,
    end: RunEnd,
    clients: Clients,
    validation: Examples | None,
    test: Examples | None,
    model: ModelConfig | None,
    split: Split | None,
) -> FitEvidence:
    """What a fitted model needs to be saved; `split` is that of the dataset that the rows come from, if any."""
    network, tested = evaluator.network, None
    if test is not None:
        scores = evaluator.score_examples(end.model, test)
        tested = (test.labels.cpu().numpy(), scores) if scores.ndim == 1 else None
    parts = _measure_parts(clients, validation, test)
    facts = CardFacts(
        data=f"{parts[0].rows:,} rows given as arrays" if split is None else split.note,
        model=type(network.plain_module).__name__ if model is None else model.name,
        method=recipe.method,
        sites=len(clients),
        parts=parts,
        settings={**describe_settings(recipe), "saved after round": end.round + 1},
        metrics=_list_metrics(evaluator.metrics, end.record if test is not None else None),
        client_auc=None if tested is None or test is None or test.clients is None else group_auc(*tested, test.clients),
        test=tested,
        limits=_list_limits(recipe, Preparation()),
        environment=describe_environment(),
        gives_embeddings=recipe.algorithm.objective.takes_embeddings,
    )
    reference = score_reference_rows(network, end.model, clients, validation, recipe.seed)
    example = network.cast_inputs(clients.inputs[:1]).cpu()
    return FitEvidence(reference, example, facts, model, LABEL_VALUES if split is None else split.label_values)


def save_fitted(
    module: nn.Module,
    evidence: FitEvidence | None,
    encoder: FeatureEncoder | None,
    column_names: tuple[str, ...],
    folder: Path,
    calibration: str,
) -> Scorer:
    """Write a fitted model's scorer and model card."""
    if evidence is not None and evidence.withheld:
        reason = evidence.withheld.partition(";")[0]
        raise ValueError(f"the model cannot be saved: {reason}; use torch.save(fitted.module.state_dict())")
    if evidence is None or evidence.reference is None:
        raise ValueError(
            "the model gives several numbers per row, not one score; save it with "
            "torch.save(fitted.module.state_dict())"
        )
    scorer = make_scorer(
        copy.deepcopy(module),
        evidence.model,
        evidence.example,
        evidence.reference,
        encoder,
        evidence.label_values,
        calibration,
    )
    scorer = dataclasses.replace(scorer, column_names=() if encoder is not None else column_names)
    scorer.save(folder)
    write_model_card(folder, scorer, evidence.facts)
    return scorer


def describe_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings that a model card names."""
    objective, participation = recipe.algorithm.objective, recipe.participation
    return {
        "objective": objective.name,
        "participation": getattr(participation, "name", type(participation).__name__),
        "cycles": recipe.cycles,
        "learning rate": f"{recipe.learning_rate:g}",
        "local steps": recipe.local_steps,
        "rows of a local step": f"{recipe.positives} positives, {recipe.negatives} negatives",
        "weighting": recipe.weighting,
        "model at the end": recipe.keep,
        "seed": recipe.seed,
        "type of the weights": recipe.dtype,
    }


def _list_limits(recipe: Recipe, preparation: Preparation) -> list[str]:
    """What this run's settings add to the limits of every model."""
    limits = []
    if preparation.flip_positives or preparation.flip_negatives:
        limits.append("Some training labels were flipped on purpose, as an experiment.")
    if preparation.remove_positives or preparation.positive_rate is not None:
        limits.append("Training positives were removed on purpose, so that training rows have fewer than new rows.")
    if any(wrapper.name == "personal-head" for wrapper in recipe.wrappers):
        limits.append("Clients have heads of their own; the saved model has the initial head, which nobody trained.")
    return limits


def _measure_parts(train: Clients, validation: Examples | None, test: Examples | None) -> list[PartSize]:
    parts = [PartSize("training", len(train.rows), int(train.census.positives.sum()))]
    held_out = {"validation": validation, "test": test}
    return parts + [PartSize.of(name, part.labels.cpu().numpy()) for name, part in held_out.items() if part is not None]


def _list_metrics(metrics: Sequence[Metric], record: Mapping[str, Any] | None) -> list[MetricOnTest]:
    """The metrics that a record has, in words for a card."""
    known, listed = record or {}, list[MetricOnTest]()
    for metric in metrics:
        value, *interval = [known.get(column) for column in metric.columns]
        if value is not None:
            listed.append(MetricOnTest(metric.label, value, *interval))
    return listed
