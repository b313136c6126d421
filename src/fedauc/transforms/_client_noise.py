"""The server's noise of `client-dp`, once the noise multiplier and the bands of a run are setting."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, final

import torch

from fedauc.interfaces import ScoreHistogram, ServerRound
from fedauc.privacy.banded_noise import next_noise
from fedauc.transforms.client_dp import (
    HISTOGRAM_NORM,
    ClientDP,
    ClippedUpload,
    ServerState,
    list_change_leaves,
    map_upload,
)
from fedauc.trees import Tree, list_nodes

if TYPE_CHECKING:
    from torch import Tensor

CHANGE_STREAM, POOL_STREAM, CLIP_STREAM = range(3)
"""The streams of a round's noise."""


@final
@dataclass(frozen=True, kw_only=True)
class NoisedClientDP(ClientDP):
    """`client-dp` with the coefficients c_0, ... of its bands; one coefficient of 1 gives independent noise.

    All noise is `slack` times as large, for uploads that are rounded after they were clipped.
    """

    coefficients: tuple[float, ...] = (1.0,)
    has_histogram: bool = False
    slack: float = 1.0

    @staticmethod
    def of(transform: ClientDP, coefficients: tuple[float, ...], has_histogram: bool) -> NoisedClientDP:
        """A transform whose noise multiplier and bands are set."""
        values: dict[str, Any] = {setting.name: getattr(transform, setting.name) for setting in fields(ClientDP)}
        return NoisedClientDP(**values, coefficients=coefficients, has_histogram=has_histogram)

    def initial_server_state(self, shared: Tree) -> Tree:
        """As without noise; histograms that the noise is not planned for are refused."""
        if not self.has_histogram and not self.is_unlimited and list_nodes(shared, ScoreHistogram):
            raise ValueError(
                "the algorithm uploads histograms of scores, which get no noise: only those of the pairwise methods, "
                "which are used once per cycle, do; leave them out, or use --algorithm.pool histogram"
            )
        return super().initial_server_state(shared)

    def server(self, mean: Tree, state: Tree, server_round: ServerRound) -> tuple[Tree, Tree]:
        """Add the noise of the round to the change, and at the end of a cycle that of the histograms."""
        if not isinstance(state, ServerState):
            return mean, state
        noise, size = server_round.noise, server_round.cohort.divisor
        multipliers = self.divide_noise(self.has_histogram)
        clip, within_norm = float(state.clip), torch.zeros(())
        if isinstance(mean, ClippedUpload):
            mean, within_norm = mean
        previous = state.previous_noise
        count, device = previous.shape[-1], previous.device
        fresh = noise.draw_normal(CHANGE_STREAM, count, device).to(previous.dtype)
        current, previous = next_noise(self.coefficients, fresh, previous)
        parts = iter(torch.split(current, [leaf.numel() for leaf in list_change_leaves(mean)]))
        scale = multipliers.model * clip * self.slack / size

        def add_noise(leaf: Tensor) -> Tensor:
            return leaf + scale * next(parts).to(leaf.dtype).view(leaf.shape)

        def add_pool_noise(histogram: ScoreHistogram) -> ScoreHistogram:
            if not server_round.phase.ends_cycle:
                return histogram
            masses = histogram.masses
            normal = noise.draw_normal(POOL_STREAM, masses.numel(), masses.device).to(masses.dtype).view(masses.shape)
            return histogram._replace(masses=masses + multipliers.pool * HISTOGRAM_NORM * self.slack / size * normal)

        noised = map_upload(mean, add_noise, add_pool_noise)
        if self.clip_quantile is not None:
            # What clients send is 1/2 or -1/2, so that a client changes the sum by 1/2 at most.
            normal = float(noise.draw_normal(CLIP_STREAM, 1)[0])
            share = 0.5 + float(within_norm) + multipliers.clip * 0.5 / size * normal
            clip *= math.exp(-self.clip_learning_rate * (min(max(share, 0.0), 1.0) - self.clip_quantile))
        return noised, ServerState(previous, torch.tensor(clip, dtype=torch.float64))
