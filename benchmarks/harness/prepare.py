"""Makes a workload's file: fedauc decides who takes part and which rows they use."""

from __future__ import annotations

import numpy as np

from fedauc.data.clients import Clients
from fedauc.engines.draws import Draws
from fedauc.experiments.assembly import Assembly, assemble_training
from fedauc.experiments.recipe import Recipe
from harness import torch_models
from harness.work import PER_ROUND, WORKLOADS, Work, make_examples


def make_recipe(workload: str, rounds: int, engine: str) -> Recipe:
    """FedAvg on the logistic loss at one learning rate, each round a fresh uniform cohort."""
    shape = WORKLOADS[workload]
    return Recipe.of(
        "fedavg",
        stages="constant",
        per_round=PER_ROUND,
        groups=1,
        cycles=rounds,
        learning_rate=shape.learning_rate,
        local_steps=shape.local_steps,
        positives=shape.batch // 2,
        negatives=shape.batch - shape.batch // 2,
        weighting="clients",
        engine=engine,
    )


def assemble_workload(workload: str, rounds: int, engine: str) -> tuple[Assembly, Clients]:
    """fedauc's training of a workload, and its clients."""
    clients = Clients.from_arrays(*make_examples(workload))
    return assemble_training(
        make_recipe(workload, rounds, engine), torch_models.build_module(workload), clients
    ), clients


def prepare_work(workload: str, rounds: int) -> Work:
    """The work of so many rounds, draws read from fedauc."""
    (training, network, _), clients = assemble_workload(workload, rounds, "loop")
    draws = Draws(clients, training.setting, training.algorithm.objective.batch_kind)
    cohorts = [training.schedule.cohort(number) for number in range(rounds)]
    visits = [[draws.draw_visit(client, training.plan.phase(c.round)) for client in c.clients] for c in cohorts]
    for visit in (visit for visits_of_round in visits for visit in visits_of_round):
        assert np.allclose(visit.weights * visit.rows.shape[1], 1), "a peer's mean loss would weigh rows differently"
    inputs, labels, _ = make_examples(workload)
    return Work(
        workload=workload,
        inputs=inputs,
        labels=labels,
        clients=np.array([cohort.clients for cohort in cohorts]),
        rows=np.array([[visit.rows for visit in visits_of_round] for visits_of_round in visits]),
        start=network.initial_model().weights.numpy(),
        learning_rate=WORKLOADS[workload].learning_rate,
    )
