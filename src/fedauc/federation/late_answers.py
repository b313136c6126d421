"""Late answers: an answer to an earlier round is merged into the round in which it arrives, with a staleness weight.

    x ← x + Σ_m weight_m · s_m · Δ_m,   s_m = 1 / (1 + rounds late)^a,   Σ_m weight_m = 1

The sum is over all answers of the round, those in time (s = 1) and late ones. A late answer has the mean weight of the
clients that were due, so that with equal weights each of n answers has 1/n. The weight of staleness multiplies the
change itself: a round whose only answer is late takes a smaller step.

Xie, Koyejo and Gupta, Asynchronous federated optimization, 2019 (arXiv:1903.03934) use this polynomial; Nguyen et al.,
Federated learning with buffered asynchronous aggregation, AISTATS 2022, divide by the number of answers as well.

A late answer is a change from the model that the site was sent, so that it means something for every algorithm whose
clients keep no state of their own: control variates and trackers must add up to the server's, and do not any more when
one of them is scaled. The scores of a late answer join the pool of the round in which they arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fedauc.experiments.recipe import Recipe
from fedauc.experiments.secure_training import find_secure_sum
from fedauc.federation.agreement import ServerPolicy
from fedauc.federation.exchange import LateAnswerDropped, OpenMessage
from fedauc.federation.serialization import Payload
from fedauc.interfaces import Cohort, Phase, Upload
from fedauc.network import ModuleNetwork
from fedauc.training import Training
from fedauc.trees import is_empty


class LateAnswer(NamedTuple):
    """The round that a late answer belongs to, how many rounds it is late, and its staleness weight."""

    round: int
    staleness: int
    weight: float


def staleness_weight(rounds_late: int, exponent: float) -> float:
    """The factor on a change that arrives so many rounds late.

    >>> staleness_weight(0, 0.5), staleness_weight(3, 0.5)
    (1.0, 0.5)
    """
    return float(1 / (1 + rounds_late) ** exponent)


class LateAnswers:
    """The visits whose round has ended without their answer, and which of their answers may still be used.

    They are in this process's memory alone: after a resume they count as lost.
    """

    def __init__(self, policy: ServerPolicy) -> None:
        self._policy = policy
        self._phase: Phase | None = None
        self._rounds: dict[int, int] = {}
        self.open_messages: dict[int, OpenMessage[Upload]] = {}

    def begin_round(
        self, phase: Phase, read_upload: Callable[[int, Payload], Upload]
    ) -> Callable[[int, Payload], Upload]:
        """Make this the current round; returns the reader of its answers, which may be called in a later round."""
        self._phase, self._rounds = phase, {}

        def read_answer(client: int, payload: Payload) -> Upload:
            self._check_age(phase)
            upload = read_upload(client, payload)
            self._rounds[client] = phase.round
            return upload

        return read_answer

    def _check_age(self, phase: Phase) -> None:
        """Refuse to use an answer that is too old, or whose step belongs to another stage or to a scoring round."""
        assert self._phase is not None
        current, limit = self._phase, self._policy.max_staleness
        if phase.round == current.round:
            return
        late = current.round - phase.round
        if late > limit:
            raise LateAnswerDropped(f"it answers round {phase.round}, {late} rounds late; max-staleness is {limit}")
        if phase.stage != current.stage:
            raise LateAnswerDropped(f"it answers round {phase.round} of stage {phase.stage}, which has ended")
        if phase.scoring or current.scoring:
            raise LateAnswerDropped(f"it answers round {phase.round}; scoring rounds take and give no late answers")

    def describe(self, client: int) -> LateAnswer:
        """What the current round's answer of a client is, if it is late."""
        assert self._phase is not None
        staleness = self._phase.round - self._rounds[client]
        weight = staleness_weight(staleness, self._policy.staleness_exponent)
        return LateAnswer(self._rounds[client], staleness, weight)


def select_present(cohort: Cohort, answered: tuple[int, ...], late: tuple[int, ...] = ()) -> Cohort:
    """The cohort as it came: clients that answered in time, then late ones; those that did neither are absent.

    Weights sum to 1 again, unless the denominator is fixed. Equal ones are 1/n to the bit, as in a simulation whose
    trace says who came.

    >>> select_present(Cohort(7, (2, 3), (0.5, 0.5)), answered=(2,), late=(0,))
    Cohort(round=7, clients=(2, 0), weights=(0.5, 0.5), absent=(3,), expected_size=None)
    """
    weights = dict(zip(cohort.clients, cohort.weights, strict=True))
    average = sum(cohort.weights) / len(cohort.weights)
    present = [*(weights[client] for client in answered), *(average for _ in late)]
    if cohort.expected_size is None:
        has_equal = len(set(cohort.weights)) == 1
        present = [1 / len(present) if has_equal else weight / sum(present) for weight in present]
    missing = tuple(client for client in cohort.clients if client not in (*answered, *late))
    absent = (*cohort.absent, *missing)
    return Cohort(cohort.round, (*answered, *late), tuple(present), absent, cohort.expected_size)


def check_late_policy(policy: ServerPolicy, recipe: Recipe, training: Training, network: ModuleNetwork) -> None:
    """Refuse to merge late answers where a late answer would break what the run promises, or the algorithm."""
    if policy.late_answers == "drop":
        return
    reason = ""
    if find_secure_sum(recipe) is not None:
        reason = "a secure sum holds the answers of one round only"
    elif recipe.is_private:
        reason = "the guarantee of a private run counts an answer in its own round"
    else:
        server, phase = training.algorithm.init(training.setting, network.initial_model()), training.plan.phase(0)
        download = training.algorithm.dispatch(training.setting, server, Cohort(0, (0,), (1.0,)), phase)
        if not is_empty(training.algorithm.initial_client_state(download)):
            reason = f"clients of {training.algorithm.name!r} keep a state that must stay in step with the server"
    if reason:
        raise ValueError(f"late_answers is 'merge', but {reason}: use 'drop'")
