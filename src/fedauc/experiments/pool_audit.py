"""Membership inference against the scores that a pairwise method shares: raw, and as histograms.

Members are the rows whose scores entered the pool of the last cycle; the others are test rows. The adversary has a row,
its class and the client that it would belong to, and the models and pools that the server sends around. It scores the
row with the model that was sent to that client's round: the client's first local step scores its rows with exactly
these weights, later steps with weights that have moved a little.

Both pools are attacked on the same training, so that the difference is that of the pools: the raw pool of a run that
shares histograms consists of the scores that its clients have binned, and the histogram of a run that shares raw scores
is that of these scores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch

from fedauc import keys
from fedauc.algorithms._histogram_pool import read_distribution, spread_over_bins
from fedauc.algorithms._pool import RoundScores, rebuild_pool
from fedauc.algorithms.pairwise import Pairwise
from fedauc.data.clients import Clients, Examples
from fedauc.engines.draws import Draws
from fedauc.experiments.canary_training import ReplayedRound
from fedauc.interfaces import Algorithm, Batch, Download, Model, Network, ScoreHistogram, Upload
from fedauc.metrics.delong import Interval, delong_interval
from fedauc.network import ModuleNetwork
from fedauc.objectives.kinds import Passive
from fedauc.privacy.membership import attack_histogram_pool, attack_raw_pool, label_statistics
from fedauc.training import State, Training
from fedauc.trees import Tree, is_empty

if TYPE_CHECKING:
    from torch import Tensor

MOST_CANDIDATES = 20_000
"""Members, and others, of a class that are attacked at most; more would hardly narrow the interval."""

ROWS_AT_ONCE = 8192
"""Scores that are put into bins at the same time."""


class EmittedScores(NamedTuple):
    """What a recorded local step emits: its scores, and their histogram."""

    scores: Passive
    masses: Tensor


@dataclass(frozen=True, kw_only=True)
class RecordedPairwise(Pairwise):
    """A pairwise method with a histogram pool whose clients also hand over the scores that they have binned."""

    hands_scores_to_audit: ClassVar[bool] = True

    @staticmethod
    def of(algorithm: Pairwise) -> RecordedPairwise:
        """The same method, with its scores recorded."""
        return RecordedPairwise(**{setting.name: getattr(algorithm, setting.name) for setting in fields(Pairwise)})

    def step(self, network: Network, download: Download, local: Model, batch: Batch) -> tuple[Model, Tree]:
        """A local step, which emits the scores beside their histogram."""
        scores = self.objective.to_scores(network.forward_pass(local, batch.inputs).outputs)
        stepped, masses = super().step(network, download, local, batch)
        positives = download.phase.batch.positives
        return stepped, EmittedScores(Passive(scores[..., :positives], scores[..., positives:]), masses)

    def finish(self, download: Download, client_state: Tree, local: Model, emitted: Tree) -> tuple[Upload, Tree]:
        """The upload, with the raw scores as its pool, which the server of a histogram pool ignores."""
        upload, state = super().finish(download, client_state, local, emitted.masses)
        return upload._replace(pool=emitted.scores), state


class ClassAttack(NamedTuple):
    """How well rows of one class are recognised: AUC of members against other rows, with 95 % intervals."""

    label: str
    members: int
    others: int
    raw_auc: Interval
    histogram_auc: Interval


class PoolAudit(NamedTuple):
    """The attacks on the pools of the last cycle. `shared` is what the run shares, "raw" or "histogram"."""

    shared: str
    is_noised: bool
    bins: int
    scores: int
    classes: tuple[ClassAttack, ...]


class _Candidates(NamedTuple):
    """Rows of a class: their inputs `[n, ...]`, and the visited round `[n]` in which their client was sent a model."""

    inputs: Tensor
    rounds: np.ndarray


def has_attackable_pool(algorithm: Algorithm) -> bool:
    """Whether an algorithm shares scores that can be attacked: embeddings are no scores."""
    if not isinstance(algorithm, Pairwise) or algorithm.objective.takes_embeddings:
        return False
    return algorithm.pool != "histogram" or type(algorithm) in (Pairwise, RecordedPairwise)


class PoolRecorder:
    """Keeps the visits of the last cycle of a training, and attacks the pools that they lead to."""

    def __init__(self, training: Training, algorithm: Pairwise) -> None:
        self._training, self._algorithm = training, algorithm
        self._last_cycle: deque[ReplayedRound] = deque(maxlen=training.schedule.cycle_length)
        self._state: State | None = None

    def observe_round(self, replayed: ReplayedRound) -> None:
        """Keep a round until it belongs to the last cycle no more."""
        self._last_cycle.append(replayed)
        self._state = replayed.finished.state

    def list_visited_rounds(self) -> list[ReplayedRound]:
        """The rounds of the last cycle that clients came to."""
        return [
            visited_round
            for visited_round in self._last_cycle
            if visited_round.visits and not is_empty(visited_round.visits.upload.pool)
        ]

    def rebuild_raw_pool(self) -> Passive:
        """The flat pool of each class that the last cycle's scores make up."""
        visited = self.list_visited_rounds()
        recent = [
            RoundScores(torch.tensor(visited_round.pending.cohort.clients), visited_round.visits.upload.pool)
            for visited_round in visited
            if visited_round.visits is not None
        ]
        empty = torch.zeros(0)
        return rebuild_pool(self._training.setting, recent, visited[-1].pending.phase, Passive(empty, empty))

    def find_histogram(self, raw: Passive) -> ScoreHistogram:
        """The pool that the run's server holds, with its noise if it has any; for a raw pool, the histogram of it."""
        assert self._state is not None
        if self._algorithm.pool == "histogram":
            released: ScoreHistogram = self._state.server.shared.pool
            return released
        model = self._training.algorithm.extract_model(self._state.server.shared)
        values = {setting.name: getattr(self._algorithm, setting.name) for setting in fields(Pairwise)}
        binned = Pairwise(**{**values, "pool": "histogram"})
        ends = binned.init(self._training.setting, model).shared.pool.ends.double().cpu()
        masses = torch.stack([_bin_scores(scores.double().cpu(), ends, binned.pool_bins) for scores in raw])
        return ScoreHistogram(masses, ends)

    def attack_pools(self, network: ModuleNetwork, clients: Clients, test: Examples, seed: int) -> PoolAudit:
        """Attack both pools with the rows that are in them and with the test rows."""
        visited = self.list_visited_rounds()
        if not visited:
            raise ValueError("no client came in the last cycle, so that its pool is empty; raise the rate of the draws")
        raw = self.rebuild_raw_pool()
        histogram = self.find_histogram(raw)
        distribution = read_distribution(histogram)
        members = self._find_members(visited, clients, seed)
        others = self._find_others(visited, clients, test, seed)
        attacks = []
        for side, label in enumerate(("positive", "negative")):
            if min(len(members[side].rounds), len(others[side].rounds)) < 2 or not len(raw[side]):
                continue
            member_scores, other_scores = (
                self._score_candidates(network, visited, group[side]) for group in (members, others)
            )
            pool, masses = raw[side].double().cpu().numpy(), distribution[1 + side].double().cpu().numpy()
            centers = distribution[0].double().cpu().numpy()
            raw_auc = delong_interval(
                *label_statistics(attack_raw_pool(member_scores, pool), attack_raw_pool(other_scores, pool))
            )
            histogram_auc = delong_interval(
                *label_statistics(
                    attack_histogram_pool(member_scores, centers, masses),
                    attack_histogram_pool(other_scores, centers, masses),
                )
            )
            attacks.append(ClassAttack(label, len(member_scores), len(other_scores), raw_auc, histogram_auc))
        shares_histogram = self._algorithm.pool == "histogram"
        return PoolAudit(
            "histogram" if shares_histogram else "raw",
            shares_histogram and self._training.account is not None,
            histogram.masses.shape[-1],
            sum(map(len, raw)),
            tuple(attacks),
        )

    def _find_members(self, visited: Sequence[ReplayedRound], clients: Clients, seed: int) -> list[_Candidates]:
        """The rows of each class that clients have drawn in the visited rounds, each with its first round."""
        draws = Draws(clients, self._training.setting, self._training.algorithm.objective.batch_kind)
        members = []
        for side, held in enumerate(self._training.setting.census):
            rows, rounds = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
            for number, visited_round in enumerate(visited):
                phase, numbers = visited_round.pending.phase, np.array(visited_round.pending.cohort.clients)
                drawn = draws.draw_cohort(numbers.tolist(), phase).rows[held[numbers] > 0]
                positives = phase.batch.positives
                part = drawn[..., :positives] if side == 0 else drawn[..., positives:]
                rows.append(part.reshape(-1).astype(np.int64))
                rounds.append(np.full(part.size, number))
            distinct, first = np.unique(np.concatenate(rows), return_index=True)
            chosen = _choose_at_most(len(distinct), seed, "members", side)
            inputs = clients.inputs[torch.from_numpy(distinct[chosen]).to(clients.inputs.device)]
            members.append(_Candidates(inputs, np.concatenate(rounds)[first][chosen]))
        return members

    def _find_others(
        self, visited: Sequence[ReplayedRound], clients: Clients, test: Examples, seed: int
    ) -> list[_Candidates]:
        """Test rows of each class, with the round of their client; a round at random where that is not known."""
        round_of_client = {
            str(clients.names[client]): number
            for number, visited_round in enumerate(visited)
            for client in visited_round.pending.cohort.clients
        }
        labels, others = test.labels.cpu().numpy(), []
        for side in range(2):
            rows = np.flatnonzero((labels > 0) == (side == 0))
            rows = rows[_choose_at_most(len(rows), seed, "others", side)]
            rounds = keys.numpy_generator(seed, "claimed round", side).integers(len(visited), size=len(rows))
            if test.clients is not None:
                names = test.clients[rows]
                rounds = np.array([round_of_client.get(str(name), at) for name, at in zip(names, rounds, strict=True)])
            others.append(_Candidates(test.inputs[torch.from_numpy(rows).to(test.inputs.device)], rounds))
        return others

    def _score_candidates(
        self, network: ModuleNetwork, visited: Sequence[ReplayedRound], candidates: _Candidates
    ) -> np.ndarray:
        """Scores `[n]` of rows, each with the model that its round was sent."""
        scores = np.zeros(len(candidates.rounds))
        for number, visited_round in enumerate(visited):
            chosen = np.flatnonzero(candidates.rounds == number)
            if len(chosen):
                model = self._training.algorithm.extract_model(visited_round.pending.server.shared)
                index = torch.from_numpy(chosen).to(candidates.inputs.device)
                outputs = network.predict(model, candidates.inputs[index])
                scores[chosen] = self._algorithm.objective.to_scores(outputs).double().numpy()
        return scores


def _choose_at_most(count: int, *key: int | str) -> np.ndarray:
    """All numbers below `count`, or a keyed choice of `MOST_CANDIDATES` of them, in order."""
    if count <= MOST_CANDIDATES:
        return np.arange(count)
    return np.sort(keys.sample_indices(count, MOST_CANDIDATES, *key))


def _bin_scores(scores: Tensor, ends: Tensor, bins: int) -> Tensor:
    """The histogram `[bins]` of scores `[n]`, with mass 1 in all; 0 without scores."""
    total = torch.zeros(bins, dtype=scores.dtype)
    for part in torch.split(scores, ROWS_AT_ONCE):
        total += spread_over_bins(part, torch.ones_like(part), ends, bins)
    return total / max(len(scores), 1)
