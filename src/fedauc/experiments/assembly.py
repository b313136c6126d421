"""Put a recipe, a model and clients together into a `Training` that is ready to run."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fedauc.data.classes import ClassCensus
from fedauc.data.clients import Clients
from fedauc.data.preparation import Split
from fedauc.engines import EngineParts, make_engine
from fedauc.engines.cuda.engine import GraphedEngine
from fedauc.engines.distributed import DistributedEngine
from fedauc.experiments.class_training import check_class_outputs, check_class_training
from fedauc.experiments.memory_needs import check_draw_memory
from fedauc.experiments.private_evaluation import PlannedReleases
from fedauc.experiments.private_training import prepare_example_privacy, prepare_privacy, refuse_personal_models
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.secure_training import PrivateUploads, prepare_secure_sum
from fedauc.interfaces import Algorithm, Engine, Schedule, Setting
from fedauc.keys import random_integer
from fedauc.ledger import Ledger
from fedauc.network import Compute, ModuleNetwork
from fedauc.objectives.minimax import Minimax
from fedauc.stages import Budget, Plan, Theory
from fedauc.training import State, Training
from fedauc.wrappers import wrap_algorithm

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}

SECRET_BYTES = 32
"""Length of the secret from which the noise of a private run comes."""

SAMPLED_ROWS, UNIT_SIZE = 256, 10.0
"""The scale of inputs is judged by about so many rows: their root mean square is at most this after standardisation."""


class Assembly(NamedTuple):
    """A training, its network and its first state."""

    training: Training
    network: ModuleNetwork
    start: State


def assemble_training(
    recipe: Recipe,
    module: nn.Module,
    clients: Clients,
    secret: bytes | None = None,
    releases: PlannedReleases | None = None,
) -> Assembly:
    """Check the recipe against the clients and put the parts together.

    `secret` is where the noise of a private run comes from, and who is drawn; a recipe that asks for one and is given
    none makes its own, with which it cannot be resumed. `releases` is what the caller of a private run releases beside
    the uploads.
    """
    if recipe.noise_source == "secret" and secret is None:
        secret = make_secret()
    # Amplification by sampling needs draws that nobody can predict.
    schedule_seed = recipe.seed if secret is None else random_integer(secret.hex(), "schedule")
    check_class_training(recipe, clients.census)
    schedule = recipe.participation.bind(clients.roster, schedule_seed)
    shape = tuple(clients.inputs.shape[1:])
    if recipe.augment != "none" and len(shape) != 3:
        raise ValueError(f"augment is {recipe.augment!r}, but rows have shape {shape}; it needs images [C, H, W]")
    setting = Setting(
        recipe.seed, schedule.cycle_length, recipe.batch, clients.census, recipe.weighting, recipe.augment
    )
    # Whom a random draw has chosen must not decide anything, so the size that is expected counts.
    per_round = max(1, round(schedule.cohort(0).divisor))
    rows = int(clients.census.positives.sum()), int(clients.census.negatives.sum())
    algorithm, plan = complete_algorithm(recipe, *rows), plan_rounds(recipe, schedule.cycle_length, per_round)
    check_draw_memory(per_round, max(stage.local_steps for stage in plan.stages), recipe.batch)
    # A recorded trace may end early; better to hear of it now than in its last round.
    schedule.cohort(plan.total_rounds - 1)
    compute = Compute(recipe.device, recipe.precision == "mixed", channels_last=recipe.device.startswith("cuda"))
    network = ModuleNetwork(module, DTYPES[recipe.dtype], compute)
    _check_model(algorithm, network, clients)
    uploads, account, wrappers = recipe.uploads, None, recipe.wrappers
    if (private_steps := prepare_example_privacy(recipe, schedule, plan, setting)) is not None:
        wrappers, account = private_steps
    algorithm = wrap_algorithm(algorithm, wrappers, network.parameter_lengths, network.buffer_names)
    has_buffers = bool(network.buffer_names)
    private = prepare_privacy(recipe, recipe.algorithm, schedule, plan, setting, has_buffers, secret, releases)
    if private is not None:
        refuse_personal_models(algorithm)
        uploads, account, setting = private
    shared = algorithm.init(setting, network.initial_model()).shared
    uploads, account = prepare_secure_sum(recipe, PrivateUploads(uploads, account), schedule, plan, shared)
    uploads.mean.check_cohort_size(per_round)
    parts = EngineParts(algorithm, network, clients, setting, uploads, plan.local_steps)
    engine = _make_run_engine(recipe.engine, parts, schedule, plan, secret)
    training = Training(
        algorithm,
        engine,
        schedule,
        plan,
        setting,
        recipe.stage_output,
        Ledger(),
        uploads,
        recipe.server_optimizer,
        recipe.ema_decay,
        _are_inputs_scaled(clients.inputs),
        account,
    )
    return Assembly(training, network, training.initial_state(network.initial_model()))


def plan_rounds(recipe: Recipe, cycle_length: int, per_round: int) -> Plan:
    """The phases of a run whose cycles have so many rounds, each with so many clients."""
    budget = Budget(recipe.cycles, recipe.learning_rate, recipe.local_steps, cycle_length, per_round)
    stages, outputs_mean = recipe.stages.divide_budget(budget), recipe.stage_output != "last"
    scoring = [recipe.algorithm.scoring_pass and (index == 0 or outputs_mean) for index in range(len(stages))]
    return Plan(stages, cycle_length, recipe.batch, scoring)


def complete_algorithm(recipe: Recipe, positives: int, negatives: int) -> Algorithm:
    """The algorithm with what the schedule and the data decide: the theorem's proximal weight, and the class prior.

    The numbers are the rows of each class at all clients.
    """
    algorithm, changes = recipe.algorithm, dict[str, Any]()
    if isinstance(recipe.stages, Theory) and getattr(algorithm, "prox", None) == 0:
        # The theorem's schedule stands on strongly convex stages, so it brings its proximal weight along.
        changes["prox"] = recipe.stages.proximal_weight
    objective = algorithm.objective
    if isinstance(objective, Minimax) and objective.prior_from_data and objective.prior is None:
        if recipe.is_private:
            raise ValueError(
                "prior_from_data is true, but a private run does not release its share of positives; give a public "
                "number: --objective.prior"
            )
        changes["objective"] = objective.with_prior(positives, negatives)
    return dataclasses.replace(algorithm, **changes)


def _make_run_engine(name: str, parts: EngineParts, schedule: Schedule, plan: Plan, secret: bytes | None) -> Engine:
    """The engine of a run, which knows its largest cohort and its secret; one per rank of a distributed run."""
    uploads, distributed = parts.uploads, dist.is_available() and dist.is_initialized()
    engine = make_engine(name, parts._replace(uploads=uploads.on_each_rank() if distributed else uploads))
    if secret is not None:
        # The noise that clients add in their local steps is as secret as the server's.
        engine.use_noise_seed(int.from_bytes(secret, "big"))
    if isinstance(engine, GraphedEngine):
        # Draws of random size differ from cycle to cycle. Nobody may come in a whole cycle.
        is_random = schedule.cohort(0).expected_size is not None
        rounds = range(plan.total_rounds if is_random else min(schedule.cycle_length, plan.total_rounds))
        engine.largest_cohort = max(1, *(len(schedule.cohort(round).clients) for round in rounds))
    return DistributedEngine(engine, uploads) if distributed else engine


def make_secret() -> bytes:
    """A new secret for the noise of a private run; the ranks of a distributed run share that of the first."""
    secret = [secrets.token_bytes(SECRET_BYTES)]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(secret, src=0)
    return secret[0]


def record_preparation(assembly: Assembly, split: Split) -> None:
    """Count in the ledger what the preparation of features has sent."""
    _, floats_up, floats_down, bytes_up, bytes_down = split.summary.traffic
    assembly.training.ledger.record_preparation(floats_down, floats_up, bytes_down, bytes_up)


def _check_model(algorithm: Algorithm, network: ModuleNetwork, clients: Clients) -> None:
    """Run a few rows through the model, so that what does not fit is said before anything is written."""
    tried_rows, objective = _choose_rows_to_try(clients.inputs), algorithm.objective
    try:
        outputs = network.predict(network.initial_model(), tried_rows)
    except (RuntimeError, TypeError, AttributeError, IndexError) as error:
        shape, reason = tuple(tried_rows.shape[1:]), " ".join(str(error).split())
        raise ValueError(
            f"the model does not accept rows of shape {shape} and type {tried_rows.dtype}: {reason}"
        ) from error
    numbers_per_row = outputs.shape[1] if outputs.ndim == 2 else 1
    if isinstance(clients.census, ClassCensus):
        check_class_outputs(objective.name, numbers_per_row, len(clients.census.counts))
    elif (outputs.ndim == 2) != objective.takes_embeddings:
        needs = "at least 2 (an embedding)" if objective.takes_embeddings else "1 (a score), or objective 'contrastive'"
        raise ValueError(
            f"the model gives {numbers_per_row} numbers per row; objective {objective.name!r} needs {needs}"
        )


def _are_inputs_scaled(inputs: Tensor) -> bool:
    """Whether rows are of about unit size, as after standardisation; integers, such as token ids, have no scale."""
    sample = inputs[:: max(1, len(inputs) // SAMPLED_ROWS)]
    return not inputs.is_floating_point() or float(sample.double().square().mean().sqrt()) <= UNIT_SIZE


def _choose_rows_to_try(inputs: Tensor) -> Tensor:
    """Two rows; of integers also those with the smallest and the largest, which a table of embeddings may not have."""
    if inputs.is_floating_point() or inputs.dtype == torch.uint8:
        return inputs[:2]
    flat = inputs.flatten(1)
    extremes = [int(flat.amin(1).argmin()), int(flat.amax(1).argmax())]
    return inputs[[0, min(1, len(inputs) - 1), *extremes]]
