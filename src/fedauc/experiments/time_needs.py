"""How long a round takes, estimated before it begins, so that a run of hours says so instead of seeming to hang."""

from __future__ import annotations

import time

import torch

from fedauc.data.clients import Clients
from fedauc.experiments.assembly import Assembly
from fedauc.experiments.progress_lines import format_seconds

LONG_ROUND = 50_000
"""Local steps of a round, over all its clients, from which its time is announced."""

MEASURED_STEPS = 3


def measure_step_seconds(assembly: Assembly, clients: Clients) -> float:
    """Seconds of one forward and one backward pass over a batch, the fastest of a few."""
    network, rows = assembly.network, assembly.training.setting.batch.total_rows
    model = network.initial_model()
    inputs = clients.inputs[torch.arange(rows) % len(clients.inputs)]
    fastest = float("inf")
    for _ in range(MEASURED_STEPS):
        begin = time.perf_counter()
        passed = network.forward_pass(model, network.cast_inputs(inputs))
        passed.pullback(torch.ones_like(passed.outputs))
        fastest = min(fastest, time.perf_counter() - begin)
    return fastest


def describe_long_rounds(assembly: Assembly, clients: Clients) -> list[str]:
    """A sentence on the time of rounds that take long; none for others, and no time on an accelerator."""
    training = assembly.training
    longest = max(training.plan.stages, key=lambda stage: stage.local_steps)
    cohort = max(1, round(training.schedule.cohort(0).divisor))
    if cohort * longest.local_steps < LONG_ROUND:
        return []
    sentence = f"a round has about {cohort} clients with {longest.local_steps:,} local steps each"
    if assembly.network.device.type != "cpu":
        return [f"{sentence}, so that the first progress may take long"]
    seconds = measure_step_seconds(assembly, clients)
    one_round = seconds * cohort * longest.local_steps
    whole_run = seconds * cohort * training.plan.local_steps
    return [
        f"{sentence}: at {1000 * seconds:.2g} ms a step, as measured now, it takes about {format_seconds(one_round)}, "
        f"and the run about {format_seconds(whole_run)}; the first progress is shown after the first round"
    ]
