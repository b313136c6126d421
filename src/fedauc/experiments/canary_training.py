"""Repeat the rounds of a training with canary clients beside the real ones, and keep what the rounds release.

A canary's upload takes the way of every upload: the run's transforms at the client, the weighted mean, and the run's
noise at the server. What a round releases about it is the noised sum less the exact sum of the real clients, which the
adversary of the definition knows:

    round r:  (noised mean - real clients' mean) · M / C_r  =  Σ_canaries u_i + σ y_r        C_r: the round's clip norm

So nothing of the mechanism is modelled here: if the clip, the noise or its bands are wrong, the releases show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from fedauc import keys
from fedauc.experiments.assembly import SECRET_BYTES
from fedauc.interfaces import Cohort, Phase, ScoreHistogram, Upload, Visits
from fedauc.privacy.canaries import BLOCK_VALUES, UPLOAD_FACTOR, Canaries, CanaryFilter
from fedauc.random_tensors import fold_in
from fedauc.training import PendingRound, Round, State, Training
from fedauc.transforms.client_dp import ClientDP, ClippedUpload, list_change_leaves, map_upload
from fedauc.trees import Tree, is_empty, tree_add, tree_map
from fedauc.uploads import UploadPipeline


class ReplayedRound(NamedTuple):
    """A repeated round: what was sent to whom, what the real clients sent, and the state after it."""

    pending: PendingRound
    visits: Visits | None
    finished: Round


@dataclass(frozen=True, eq=False)
class RecordingPipeline(UploadPipeline):
    """A run's pipeline that also keeps what its last round released."""

    released: list[Tree] = field(default_factory=list)

    def transform_mean(
        self, mean: Tree, server_state: Tree, cohort: Cohort, phase: Phase, shared: Tree = ()
    ) -> tuple[Tree, Tree]:
        """The mean after the transforms' work at the server, which is kept, and their new state there."""
        noised, state = super().transform_mean(mean, server_state, cohort, phase, shared)
        self.released[:] = [] if is_empty(mean) else [noised]
        return noised, state


class CanaryClients:
    """Canaries in a training with `client-dp`: they join its rounds, and its releases go to their filter.

    `first_number` is the client number of the first canary, beyond those of the real clients.
    """

    def __init__(
        self,
        canaries: Canaries,
        canary_filter: CanaryFilter,
        uploads: UploadPipeline,
        noise_seed: int,
        first_number: int,
    ) -> None:
        secret = None
        if uploads.secret is not None:
            secret = keys.random_words(SECRET_BYTES // 8, noise_seed, "secret").tobytes()
        self.uploads = RecordingPipeline(uploads.transforms, uploads.mean, noise_seed, secret)
        self.releases = 0
        self._canaries, self._filter, self._first_number = canaries, canary_filter, first_number
        self._is_in = canaries.flip_coins()
        kinds = [isinstance(transform, ClientDP) for transform in uploads.transforms]
        self._place_of_noise = kinds.index(True)

    def join_round(self, pending: PendingRound, visits: Visits | None) -> Visits | None:
        """The visits of a round with the uploads of the canaries that attend it, each with the weight of a client."""
        if pending.phase.scoring:
            return visits
        attending = np.flatnonzero(self._canaries.draw_attendance(self.releases) & self._is_in)
        mean = self._find_real_mean(pending, visits)
        block = max(1, BLOCK_VALUES // self._canaries.dimension)
        for start in range(0, len(attending), block):
            mean = tree_add(mean, self._upload_canaries(pending, attending[start : start + block]))
        joined = visits or Visits(Upload(), None)
        return joined._replace(upload=joined.upload._replace(mean=mean))

    def observe_release(self, pending: PendingRound, visits: Visits | None) -> None:
        """Let the filter see what the round has released; `visits` are those of the real clients alone."""
        if not self.uploads.released:
            return
        noised, real = (
            _flatten_changes(tree) for tree in (self.uploads.released[0], self._find_real_mean(pending, visits))
        )
        unit = pending.cohort.divisor / self._find_clip(pending)
        self._filter.observe_round(((noised - real) * unit).numpy())
        self.releases += 1

    def _find_real_mean(self, pending: PendingRound, visits: Visits | None) -> Tree:
        """The mean of the real clients' uploads, before the server's transforms."""
        if visits is None or is_empty(visits.upload.mean):
            return self.uploads.zero_mean(pending.server.shared)
        return visits.upload.mean

    def _find_clip(self, pending: PendingRound) -> float:
        return float(pending.state.transforms[self._place_of_noise].clip)

    def _upload_canaries(self, pending: PendingRound, attending: np.ndarray) -> Tree:
        """The share of some canaries in the mean, after the run's transforms. Canaries keep no state between turns."""
        shared = pending.server.shared
        like = list_change_leaves(shared)[0]
        directions = np.concatenate([self._canaries.draw_directions(canary, canary + 1) for canary in attending])
        vectors = torch.from_numpy(directions * np.float32(UPLOAD_FACTOR * self._find_clip(pending))).to(like)
        sizes = [leaf.numel() for leaf in list_change_leaves(shared)]
        parts, count = iter(torch.split(vectors, sizes, dim=1)), len(attending)

        def set_histogram(histogram: ScoreHistogram) -> ScoreHistogram:
            return ScoreHistogram(*(leaf.new_zeros(count, *leaf.shape) for leaf in histogram))

        mean = map_upload(shared, lambda leaf: next(parts).reshape(count, *leaf.shape).to(leaf.dtype), set_histogram)
        upload, transforms = Upload(mean), self.uploads.transforms
        numbers = tuple(self._first_number + canary for canary in attending.tolist())
        key = self.uploads.make_client_keys(pending.phase.round, numbers, like.device)
        announced = self.uploads.announce_state(pending.state.transforms) or ((),) * len(transforms)
        for number, transform in enumerate(transforms):
            state = tree_map(lambda leaf: leaf.expand(count, *leaf.shape), transform.initial_state(shared))
            upload, _ = transform.client(upload, state, fold_in(key, number), announced[number])
        weights = torch.full((count,), 1 / pending.cohort.divisor, dtype=torch.float64, device=like.device)
        return self.uploads.reduce_stack(upload, shared, weights).upload.mean


def replay_rounds(
    training: Training, start: State, stop_at_epsilon: float | None = None, canaries: CanaryClients | None = None
) -> Iterator[ReplayedRound]:
    """The rounds of a training, with canaries beside its clients where there are any.

    It ends where the run would: after the plan's last round, or before `stop_at_epsilon` is exceeded.
    """
    state = start
    while state.round < training.plan.total_rounds:
        spent = training.spent_epsilon(state.round + 1)
        if stop_at_epsilon is not None and spent is not None and spent > stop_at_epsilon:
            return
        pending = training.open_round(state)
        visits = None if pending.download is None else training.engine.visit(pending.download, pending.cohort)
        joined = visits if canaries is None else canaries.join_round(pending, visits)
        finished = training.close_round(pending, joined)
        if canaries is not None:
            canaries.observe_release(pending, visits)
        state = finished.state
        yield ReplayedRound(pending, visits, finished)


def _flatten_changes(mean: Tree) -> torch.Tensor:
    """The changes of a mean as one float64 vector on the CPU, without histograms and counts of clipped uploads."""
    tree = mean.upload if isinstance(mean, ClippedUpload) else mean
    return torch.cat([leaf.double().flatten().cpu() for leaf in list_change_leaves(tree)])
