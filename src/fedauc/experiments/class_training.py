"""What a training with several classes needs, and what it cannot do yet: checked before anything runs."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from fedauc.algorithms.logit_adjusted import LogitAdjustedFedAvg
from fedauc.data.checks import as_inputs
from fedauc.data.classes import (
    MIN_ROWS_PER_CLASS,
    ClassCensus,
    as_class_labels,
    check_every_class,
    class_label_tensor,
)
from fedauc.data.clients import Examples
from fedauc.data.names import as_names
from fedauc.experiments.recipe import Recipe
from fedauc.interfaces import Census
from fedauc.wrappers.personal_head import PersonalHead

CLASS_ENGINES = ("auto", "loop", "batched")
"""The engines that train several classes."""


def check_class_training(recipe: Recipe, census: Census) -> None:
    """Refuse an objective for other labels than the table has, and what several classes cannot be combined with."""
    objective = recipe.algorithm.objective
    if not isinstance(census, ClassCensus):
        if objective.takes_classes:
            raise ValueError(
                f"objective {objective.name!r} is for labels of several classes, and these are 0 or 1; use "
                "Clients.from_classes, or an objective for two classes"
            )
        return
    classes = len(census.counts)
    if not objective.takes_classes:
        raise ValueError(
            f"objective {objective.name!r} is for labels 0 or 1, and there are {classes} classes; use "
            "algorithm=OneVsRestPairwise(), or cycp-fedavg with objective='softmax'"
        )
    if recipe.batch.total_rows < classes:
        raise ValueError(
            f"positives + negatives is {recipe.batch.total_rows} rows of a local step, and there are {classes} "
            "classes; a step needs at least one row of each: raise positives or negatives"
        )
    if recipe.is_private:
        raise ValueError(
            f"epsilon and private noise are for labels 0 or 1, and there are {classes} classes; unset them"
        )
    if recipe.engine not in CLASS_ENGINES or recipe.device != "cpu":
        raise ValueError(
            f"engine is {recipe.engine!r} on {recipe.device}, and there are {classes} classes, which only the engines "
            "'loop' and 'batched' train, on a CPU; use engine='batched' and device='cpu'"
        )
    if dist.is_available() and dist.is_initialized():
        raise ValueError(f"this is a distributed run, and there are {classes} classes; train them in one process")
    if isinstance(recipe.algorithm, LogitAdjustedFedAvg):
        raise ValueError(f"{recipe.method} adjusts one score per row, and there are {classes} classes; use cycp-fedavg")
    if any(isinstance(wrapper, PersonalHead) for wrapper in recipe.wrappers):
        raise ValueError(f"personal-head is for labels 0 or 1, and there are {classes} classes; leave it out")


def check_class_outputs(objective: str, outputs: int, classes: int) -> None:
    """Refuse a model that has not one output for each class."""
    if outputs != classes:
        raise ValueError(
            f"the model gives {outputs} numbers per row; objective {objective!r} needs {classes}, one for each class: "
            "give a module with as many outputs, such as torch.nn.Linear(features, classes)"
        )


def read_class_examples(rows: Any, classes: int) -> Examples:
    """Rows to evaluate on, from examples or from (inputs, labels) with the numbers of their classes."""
    inputs, labels, *clients = rows[:3]
    checked = as_inputs(inputs)
    numbers = as_class_labels(labels, len(checked))
    check_every_class(numbers, classes, MIN_ROWS_PER_CLASS)
    names = as_names(clients[0], "client", len(checked)) if clients and clients[0] is not None else None
    return Examples(checked, class_label_tensor(numbers, checked), names)
