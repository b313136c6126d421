"""What the server compares uploads with: what the fleet has sent in the last cycles, and what the census says.

An upload has two kinds of numbers: the change of the shared state, and, with the pairwise methods, scores or histograms
of scores. For each upload that was used the server remembers the norm of the change and the smallest and the largest
score. With these, over the last cycles, every site counts once, by its largest norm and its widest range:

    norm  ≤ history_limit · e^σ · median over sites of their largest norm
            σ: the spread of the logarithms of these norms (their median absolute deviation)
    score within [L - score_limit · R, H + score_limit · R],
            L, H: the medians over sites of their smallest and of their largest score; R = max(H - L, 0.1)

Rounds that only score rows have a history of their own. A median over sites stays among honest ones while most sites
are honest, however often a site comes and however small a cohort is. Norms of rounds with smaller learning rates or
fewer local steps are scaled up. Fewer than three sites say nothing, so that the first rounds of a run have no bound of
this kind.

The masses of a histogram sum up, per class, to the client's weight in the loss, which the server knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedauc.data.weighting import class_scales
from fedauc.federation.agreement import ServerPolicy
from fedauc.federation.exchange import AnswerRefused
from fedauc.interfaces import Download, Phase, ScoreHistogram, Upload
from fedauc.training import Training
from fedauc.transforms.client_dp import list_change_leaves
from fedauc.trees import is_empty, list_nodes, tree_leaves
from fedauc.uploads import UploadPipeline

HISTORY_CYCLES = 3
"""Cycles that the server looks back on. Attendance differs from cycle to cycle, so one would often be too few."""

LEAST_SITES = 3
"""Sites below which a median says nothing: that of two lies halfway to a wrong one."""

LEAST_RANGE = 0.1
"""Scores of a model that has made only a few steps lie in a narrower range, which says nothing about later ones."""

BLOCK_LENGTH = 1 << 16
"""Numbers whose squares are summed at once."""

MASS_TOLERANCE = 1e-3
"""Relative error of a sum of masses, which sites compute in the type of the model."""


class UploadMeasures(NamedTuple):
    """The norm of an upload's change and its smallest and largest score; NaN for what it does not have."""

    norm: float = math.nan
    low: float = math.nan
    high: float = math.nan


class UploadHistory(NamedTuple):
    """The uploads that were used in the last cycles: rounds and clients `[n]`, and numbers `[n, 4]`.

    The numbers are the learning rate times the local steps, the norm, and the smallest and the largest score.
    """

    rounds: Tensor = torch.zeros(0, dtype=torch.int64)
    clients: Tensor = torch.zeros(0, dtype=torch.int64)
    numbers: Tensor = torch.zeros(0, 4, dtype=torch.float64)

    def add_uploads(self, phase: Phase, measures: dict[int, UploadMeasures], cycle_length: int) -> UploadHistory:
        """The history after a round; what is older than the last cycles is forgotten."""
        rows = [[_effort(phase), *measured] for measured in measures.values()]
        recent = self.rounds > phase.round - HISTORY_CYCLES * cycle_length
        return UploadHistory(
            torch.cat([self.rounds[recent], torch.full((len(rows),), phase.round)]),
            torch.cat([self.clients[recent], torch.tensor(list(measures), dtype=torch.int64)]),
            torch.cat([self.numbers[recent], torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)]),
        )

    def check_upload(self, measures: UploadMeasures, phase: Phase, policy: ServerPolicy) -> None:
        """Refuse an upload that is far beyond what the fleet has sent in rounds of the same kind."""
        same_kind = self.numbers[:, 1].isnan().numpy() == math.isnan(measures.norm)
        effort, norms, lows, highs = self.numbers.numpy()[same_kind].T
        clients = self.clients.numpy()[same_kind]
        largest = _combine_by_site(clients, norms * np.maximum(1.0, _effort(phase) / effort), np.max)
        if len(largest) >= LEAST_SITES and (median := float(np.median(largest))) > 0:
            limit = policy.history_limit * math.exp(_spread(largest / median))
            if measures.norm > limit * median:
                bound = f"the limit is {limit:.3g} times the fleet's median of {median:.3g}"
                raise AnswerRefused(f"its update has norm {measures.norm:.3g}; {bound}")
        lowest, highest = _combine_by_site(clients, lows, np.min), _combine_by_site(clients, highs, np.max)
        if len(lowest) < LEAST_SITES:
            return
        low, high = float(np.median(lowest)), float(np.median(highest))
        # A model that has learned nothing gives all rows one score, which is no range to compare with.
        if high == low:
            return
        slack = policy.score_limit * max(high - low, LEAST_RANGE)
        if measures.low < low - slack or measures.high > high + slack:
            scores = f"its scores lie between {measures.low:.3g} and {measures.high:.3g}"
            bound = f"the fleet's lie between {low:.3g} and {high:.3g}, and may be left by {slack:.3g}"
            raise AnswerRefused(f"{scores}; {bound} (score-limit {policy.score_limit:g})")


class UploadChecks:
    """The checks of a run's uploads, and the history that they need.

    `class_weights` `[N, 2]` are the clients' weights in the loss. In a private run, which has a fixed denominator, no
    upload is compared with those of others: whether a site is refused must not depend on them.
    """

    def __init__(
        self,
        policy: ServerPolicy,
        cycle_length: int,
        uploads: UploadPipeline,
        class_weights: np.ndarray,
        takes_embeddings: bool,
    ) -> None:
        self._policy, self._cycle_length, self._uploads = policy, cycle_length, uploads
        self._class_weights, self._takes_embeddings = class_weights, takes_embeddings
        self.history = UploadHistory()
        self._pending: dict[int, UploadMeasures] = {}

    def check_upload(self, client: int, sent: Upload, download: Download) -> None:
        """Refuse what a client has sent if its decoded upload is implausible; otherwise measure it."""
        upload, transforms = self._uploads.decode_upload(sent, download.shared), self._uploads.transforms
        if not any(transform.encodes for transform in transforms):
            # A code, above all one with error feedback, keeps masses only on average over rounds.
            positives, negatives = map(float, self._class_weights[client])
            check_histograms(upload, (positives, negatives), is_exact=not transforms)
        measures = measure_upload(upload, self._takes_embeddings)
        if math.isinf(measures.norm) or (math.isnan(measures.norm) and not is_empty(upload.mean)):
            raise AnswerRefused("its update has no finite norm")
        if self._uploads.has_fixed_denominator:
            return
        self.history.check_upload(measures, download.phase, self._policy)
        self._pending[client] = measures

    def remember_uploads(self, phase: Phase, clients: Iterable[int]) -> None:
        """Add the uploads that the round used to the history, and forget the others."""
        used = {client: self._pending[client] for client in clients if client in self._pending}
        self._pending.clear()
        if used:
            self.history = self.history.add_uploads(phase, used, self._cycle_length)


def make_upload_checks(training: Training, policy: ServerPolicy) -> UploadChecks:
    """The checks for the uploads of a training."""
    setting, objective = training.setting, training.algorithm.objective
    weights = class_scales(setting.census, setting.weighting, setting.totals)
    return UploadChecks(policy, setting.cycle_length, training.uploads, weights, objective.takes_embeddings)


def measure_upload(upload: Upload, takes_embeddings: bool) -> UploadMeasures:
    """The numbers by which a decoded upload is compared with others; embeddings have no range of scores.

    The norm is that of the change: histograms, whose masses are known, would hide a small model's.
    """
    leaves, scores = list_change_leaves(upload.mean), [] if takes_embeddings else tree_leaves(upload.pool)
    # In blocks that stay in the processor's cache: a copy of the whole as doubles takes ten times as long.
    blocks = (block.double() for leaf in leaves for block in torch.split(leaf.flatten(), BLOCK_LENGTH))
    norm = math.sqrt(sum(float(block.square().sum()) for block in blocks)) if leaves else math.nan
    # An anchor that travels with estimates has its score first.
    flat = torch.cat([(leaf[..., 0] if leaf.ndim > 2 else leaf).flatten() for leaf in scores]) if scores else None
    if flat is None or not len(flat):
        return UploadMeasures(norm)
    return UploadMeasures(norm, float(flat.min()), float(flat.max()))


def check_histograms(upload: Upload, class_weights: tuple[float, float], is_exact: bool) -> None:
    """Refuse masses that are negative, or do not sum up per class to the client's weight in the loss.

    With transforms that scale uploads down the sums may be smaller, so that `is_exact` is false.
    """
    for histogram in list_nodes(upload.mean, ScoreHistogram):
        masses = histogram.masses.double()
        if float(masses.min()) < -MASS_TOLERANCE or bool(histogram.ends.any()):
            raise AnswerRefused("its histogram of scores has negative masses, or changes the ends")
        for name, total, weight in zip(("positives", "negatives"), masses.sum(-1).tolist(), class_weights, strict=True):
            error = abs(total - weight) if is_exact else total - weight
            if error > MASS_TOLERANCE * max(1.0, weight):
                raise AnswerRefused(
                    f"its histogram of {name} has mass {total:.4g}; its weight in the loss is {weight:.4g}"
                )


def _combine_by_site(clients: np.ndarray, values: np.ndarray, combine: Callable[[np.ndarray], float]) -> np.ndarray:
    """One number for every site that has any."""
    known = ~np.isnan(values)
    return np.array([combine(values[known & (clients == site)]) for site in np.unique(clients[known])])


def _spread(ratios: np.ndarray) -> float:
    """The median absolute deviation of the logarithms of numbers around 1, as a standard deviation."""
    logarithms = np.log(np.maximum(ratios, np.finfo(np.float64).tiny))
    return float(1.4826 * np.median(np.abs(logarithms)))


def _effort(phase: Phase) -> float:
    """The length of a visit's path, up to gradients."""
    return float(phase.learning_rate) * phase.local_steps
