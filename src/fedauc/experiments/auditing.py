"""Audit a run: repeat its training in memory, and measure what it reveals beside what is proven.

Two audits, each where it applies. Canary clients in a run with `client-dp` give an estimate and a lower limit of ε from
the models that it releases (`fedauc.privacy.audit`). Membership inference measures what the score pool of a pairwise
method tells about single rows (`pool_audit.py`). The run folder is only read, except for `audit.json`.

The canaries test the changes of the model, dual variables and control variates. Score histograms, class counts and the
adaptation of the clip norm are part of the proven ε, but no canary tests their noise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedauc import keys
from fedauc.algorithms.pairwise import Pairwise
from fedauc.experiments.assembly import Assembly
from fedauc.experiments.canary_training import CanaryClients, replay_rounds
from fedauc.experiments.config import Config
from fedauc.experiments.folder import RunFolder, encode_json
from fedauc.experiments.pool_audit import PoolAudit, PoolRecorder, RecordedPairwise, has_attackable_pool
from fedauc.experiments.run_loop import Observer, Progress
from fedauc.experiments.runner import DataCache, assemble_run
from fedauc.files import write_atomically
from fedauc.privacy.audit import AuditResult, audit_canaries
from fedauc.privacy.canaries import BLOCK_VALUES, Canaries, CanaryFilter, CanaryStatistics, combine_statistics
from fedauc.training import Training
from fedauc.transforms._client_noise import NoisedClientDP
from fedauc.transforms.client_dp import list_change_leaves
from fedauc.transforms.secure_sum import SecureSum
from fedauc.wrappers.example_dp import ExampleDP

AUDIT_FILE = "audit.json"

MOST_CANARIES, FEWEST_CANARIES = 200, 4
"""Canaries of a repetition unless the model has fewer parameters, and how many there must be: two in, two outside."""

MOST_REPEATS = 10
"""Repetitions, at most, that are made without being asked for, to have `MOST_CANARIES` in all."""


RoundObserver = Callable[[int, int], None]
"""Is told how many rounds of a repetition are done, and how many it has."""


class DeclaredNoise(NamedTuple):
    """What a run claims about the noise on the changes of its model.

    `noise_multiplier` is that of the model's part, `proven_epsilon` that of everything the run releases, and
    `proven_model_epsilon` that of the model's part alone. `proven_mu` is without amplification by draws.
    """

    coefficients: tuple[float, ...]
    noise_multiplier: float
    sampling: float
    delta: float
    participations: int
    proven_mu: float
    proven_epsilon: float
    proven_model_epsilon: float


class CanaryAudit(NamedTuple):
    """What the canaries show: the declared noise, the verdict, and how it was measured."""

    declared: DeclaredNoise
    result: AuditResult
    canaries: int
    repeats: int
    dimension: int


class RunAudit(NamedTuple):
    """The audits of a run; None where one does not apply."""

    canaries: CanaryAudit | None
    pools: PoolAudit | None
    seed: int
    seconds: float

    @property
    def is_violated(self) -> bool:
        """Whether the run reveals more than it claims."""
        return self.canaries is not None and self.canaries.result.verdict == "violated"

    def to_document(self) -> dict[str, Any]:
        """Plain values for JSON; infinities are written as texts, which JSON has no numbers for."""
        document: dict[str, Any] = _to_plain(self)
        return document


def audit_run(
    path: Path | str,
    canaries: int | None = None,
    repeats: int | None = None,
    seed: int = 0,
    add_bar: Callable[[str], Observer] = lambda name: lambda progress: None,
) -> RunAudit:
    """Repeat the training of a run folder and audit it; the result is also written to its `audit.json`.

    `canaries` is the number of canaries of a repetition (as many as the model has parameters, at most 200), and
    `repeats` the number of repetitions with other noise and other canaries (as many as give 200 canaries, at most 10).
    `seed` keys canaries and noise. `add_bar` makes an observer of the rounds of all repetitions.
    """
    for name, value, least in (("canaries", canaries, FEWEST_CANARIES), ("repeats", repeats, 1)):
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}: raise {name}")
    begin, folder = time.perf_counter(), RunFolder.open(Path(path))
    if any(isinstance(wrapper, ExampleDP) for wrapper in folder.config.recipe.wrappers):
        raise ValueError(
            f"{path} protects single rows with {ExampleDP.name}; canaries are whole clients and cannot test that: "
            "audit a run with client-dp"
        )
    config, cache = _record_scores(folder.config), DataCache()
    # The secret also decides who is drawn; the noise is another one.
    secret = folder.read_secret() if config.recipe.noise_source == "secret" else None
    data, assembly = assemble_run(config, cache, secret)
    folder.check_data(data.fingerprint)
    declared, algorithm = find_declared_noise(assembly.training, config.recipe.stop_at_epsilon), config.recipe.algorithm
    recorder = None
    if has_attackable_pool(algorithm) and isinstance(algorithm, Pairwise):
        recorder = PoolRecorder(assembly.training, algorithm)
    if declared is None and recorder is None and algorithm.scoring_pass:
        raise ValueError(
            f"{path} was trained with {config.recipe.method}, which shares values of single rows that this audit "
            "cannot attack: only pools of plain scores can; audit a run of cycp-pairwise, which shares such scores"
        )
    if declared is None and recorder is None:
        raise ValueError(
            f"{path} has nothing to audit: {config.recipe.method} shares no scores, and no client-dp protects its "
            "clients; train it with --epsilon, or audit a run of a pairwise method"
        )
    canary_audit, observer = None, add_bar("audit")
    if declared is None:
        _replay_to_end(assembly.training, assembly, config, None, recorder, _count_rounds(observer, 1))
    else:
        count, times = choose_numbers(_count_changes(assembly), canaries, repeats)
        show_round, statistics = _count_rounds(observer, times), []
        for number in range(times):
            if number:
                # A new assembly: engines keep the states of their clients.
                data, assembly = assemble_run(config, cache, secret)
            drawn = _draw_canaries(assembly, declared, count, keys.random_integer(seed, "audit", number))
            statistics.append(
                _observe_canaries(assembly, config, declared, drawn, None if number else recorder, show_round)
            )
        combined = combine_statistics(statistics)
        # With draws, no canary has attended all its turns: who knows the draws can expect no more than it has.
        proven_mu = min(declared.proven_mu, combined.declared_mu)
        result = audit_canaries(combined, proven_mu, declared.proven_model_epsilon, declared.delta)
        canary_audit = CanaryAudit(declared, result, count, times, _count_changes(assembly))
    pools = None
    if recorder is not None:
        _, test = data.held_out_examples(config.recipe.device)
        pools = recorder.attack_pools(assembly.network, data.training_clients(config.recipe), test, seed)
    audit = RunAudit(canary_audit, pools, seed, time.perf_counter() - begin)
    write_atomically(folder.path / AUDIT_FILE, encode_json(audit.to_document()).encode())
    return audit


def find_declared_noise(training: Training, stop_at_epsilon: float | None = None) -> DeclaredNoise | None:
    """What a training claims about its noise, from its account; None where it is not private, or adds no noise.

    The noise multiplier is that of the account, which the proven ε belongs to, whatever the transform really does.
    """
    transform = next((member for member in training.uploads.transforms if isinstance(member, NoisedClientDP)), None)
    account = training.account
    if account is not None and any(isinstance(member, SecureSum) for member in training.uploads.transforms):
        raise ValueError(
            "the run has 'secure-sum', whose integers have no room for canaries: audit the recipe without it, with the "
            "same clipping and noise"
        )
    if transform is None or account is None or transform.is_unlimited or not account.noise_multiplier > 0:
        return None
    participations = -(-training.plan.total_rounds // training.schedule.cycle_length)
    if stop_at_epsilon is not None:
        participations = min(participations, account.largest_participations(stop_at_epsilon))
    if participations == 0:
        raise ValueError(
            f"stop_at_epsilon is {stop_at_epsilon:g}; not even one cycle fits, so there is no round to audit"
        )
    promised = replace(transform, noise_multiplier=account.noise_multiplier)
    model_noise = promised.divide_noise(transform.has_histogram).model
    return DeclaredNoise(
        transform.coefficients,
        model_noise,
        account.sampling,
        account.delta,
        participations,
        math.sqrt(participations) / model_noise,
        account.epsilon(participations),
        replace(account, noise_multiplier=model_noise, one_off=()).epsilon(participations),
    )


def choose_numbers(dimension: int, canaries: int | None, repeats: int | None) -> tuple[int, int]:
    """The numbers of canaries and of repetitions for a model with so many parameters.

    More canaries than parameters could be mistaken for each other, so that repetitions make up for few parameters.

    >>> choose_numbers(30, None, None), choose_numbers(1_000_000, None, None)
    ((30, 7), (200, 1))
    """
    if dimension < FEWEST_CANARIES:
        raise ValueError(
            f"the model has {dimension} parameters; an audit needs at least {FEWEST_CANARIES}: audit a larger model"
        )
    if canaries is not None and canaries > dimension:
        raise ValueError(
            f"canaries is {canaries}; the model has {dimension} parameters, and more canaries than these could be "
            f"mistaken for each other: use at most {dimension}, and raise repeats instead"
        )
    count = min(MOST_CANARIES, dimension) if canaries is None else canaries
    return count, repeats or min(MOST_REPEATS, -(-MOST_CANARIES // count))


def _record_scores(config: Config) -> Config:
    """The configuration with an algorithm that hands over the scores of a histogram pool, where it has one."""
    algorithm = config.recipe.algorithm
    if not has_attackable_pool(algorithm) or not isinstance(algorithm, Pairwise) or algorithm.pool != "histogram":
        return config
    return replace(config, recipe=replace(config.recipe, algorithm=RecordedPairwise.of(algorithm)))


def _draw_canaries(assembly: Assembly, declared: DeclaredNoise, count: int, seed: int) -> Canaries:
    """So many canaries for a training, with orthogonal directions where these fit in memory."""
    dimension, groups = _count_changes(assembly), assembly.training.schedule.cycle_length
    fits = count * dimension <= BLOCK_VALUES
    return Canaries(seed, count, dimension, groups, declared.sampling, orthogonal=fits)


def _observe_canaries(
    assembly: Assembly,
    config: Config,
    declared: DeclaredNoise,
    canaries: Canaries,
    recorder: PoolRecorder | None,
    show_round: RoundObserver,
) -> CanaryStatistics:
    """Train once with canaries, and return what they show."""
    training = assembly.training
    # Releases are in units of the clip norm, which may adapt from round to round.
    canary_filter = CanaryFilter(canaries, declared.coefficients, declared.noise_multiplier, 1.0)
    noise_seed, first_number = keys.random_integer(canaries.seed, "noise"), len(training.setting.census.positives)
    joined = CanaryClients(canaries, canary_filter, training.uploads, noise_seed, first_number)
    _replay_to_end(replace(training, uploads=joined.uploads), assembly, config, joined, recorder, show_round)
    return canary_filter.summarize_statistics()


def _replay_to_end(
    training: Training,
    assembly: Assembly,
    config: Config,
    canaries: CanaryClients | None,
    recorder: PoolRecorder | None,
    show_round: RoundObserver,
) -> None:
    """Repeat all rounds of a training from its start."""
    total = training.plan.total_rounds
    show_round(0, total)
    for replayed in replay_rounds(training, assembly.start, config.recipe.stop_at_epsilon, canaries):
        if recorder is not None:
            recorder.observe_round(replayed)
        show_round(replayed.finished.state.round, total)


def _count_rounds(observer: Observer, repeats: int) -> RoundObserver:
    """An observer of rounds over several repetitions of a training, each of which begins at round 0."""
    earlier = -1

    def show_round(done: int, total: int) -> None:
        nonlocal earlier
        earlier += done == 0
        so_far = earlier * total + done
        if done or not earlier:
            is_over = so_far == repeats * total
            observer(Progress(so_far, repeats * total, None, phase="done" if is_over else "training"))

    return show_round


def _count_changes(assembly: Assembly) -> int:
    """How many numbers of an upload are changes of the shared state, d."""
    return sum(leaf.numel() for leaf in list_change_leaves(assembly.start.server.shared))


def _to_plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return {name: _to_plain(member) for name, member in value._asdict().items()}
    if isinstance(value, (tuple, list)):
        return [_to_plain(member) for member in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
