"""Differential privacy for clients: uploads are clipped, summed with a fixed denominator, and noised at the server.

    client m, round r:  u_m = Δ_m · min(1, C / ‖Δ_m‖₂)          Δ_m: model, dual variables and control variates together
    server:             mean = (Σ_m u_m + σ C y_r) / M          M: the expected number of clients, not how many came
    independent noise:  y_r = z_r                               z_r: standard normal
    banded noise:       y_r = (z_r - Σ_{i=1}^{b-1} c_i y_{r-i}) / c_0,   Σ_i c_i² = 1

Banded noise is correlated so that what one round adds, later rounds partly take back: the sum over rounds, which is
what the model sees, has much less of it. A client takes part every K rounds, and with at most K bands its rounds do
not overlap, so the guarantee is that of independent noise of the same σ (see `fedauc.privacy.accounting`).

Histograms of scores are no gradients: a client's histogram has mass at most 1 per class, so that their joint norm is at
most √2. Noise is added once per cycle, to the sum of the cycle's histograms.

With `clip_quantile` the norm C adapts (Andrew et al., Differentially private learning with adaptive clipping, NeurIPS
2021): clients also send whether their upload was within C, and the server moves C, by the noised share of those that
were, until the share is the quantile. Choquette-Choo et al., (Amplified) banded matrix factorization, NeurIPS 2023;
McMahan et al., Learning differentially private recurrent language models, ICLR 2018.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch

from fedauc.fields import option
from fedauc.interfaces import ScoreHistogram, ServerRound, Upload, UploadTransform
from fedauc.transforms._clipping import clip_factor, expand_to, scale_leaf, upload_norm
from fedauc.trees import Tree, is_empty, list_nodes, tree_leaves

if TYPE_CHECKING:
    from torch import Tensor

HISTOGRAM_NORM = math.sqrt(2)
"""The largest Euclidean norm of a client's histogram: both classes have mass 1, each in a single bin."""


class ClippedUpload(NamedTuple):
    """A clipped upload, and 1/2 if it was within the norm before, else -1/2."""

    upload: Tree
    within_norm: Tensor


class ServerState(NamedTuple):
    """The noise of the last rounds `[bands - 1, D]`, the latest first, and the clipping norm."""

    previous_noise: Tensor
    clip: Tensor


@dataclass(frozen=True, kw_only=True)
class ClientDP(UploadTransform):
    """Clips every upload and adds noise to their mean, so that no client can be recognised in the models.

    Formal guarantees. (ε, δ) differential privacy where two federations are neighbours if one has one client more, for
    everything that the server publishes: models, dual variables, control variates, score histograms. ε is computed by
    `fedauc.privacy.accounting`; the run refuses a setting that the proof does not cover. The server is trusted: it sees
    every upload before the noise. Its checkpoints hold sums without noise, and are as confidential as the uploads.
    """

    name: ClassVar[str] = "client-dp"
    needs_fixed_denominator: ClassVar[bool] = True
    refuses_pools: ClassVar[bool] = True

    clip: float = option(
        0.1, "Largest Euclidean norm of a client's upload; the start where it adapts.", above=0, at_most=math.inf
    )
    noise_multiplier: float | None = option(
        None, "Noise as a multiple of the clipping norm; by default what --epsilon needs.", at_least=0
    )
    bands: int | None = option(
        None, "Rounds over which noise is correlated, 1 for independent noise; by default a cycle.", at_least=1
    )
    pool_share: float = option(0.1, "Share of the noise budget for histograms of scores.", above=0, below=1)
    clip_quantile: float | None = option(
        None, "Share of uploads that the clipping norm adapts to; by default it stays.", above=0, below=1
    )
    clip_learning_rate: float = option(0.2, "How fast the clipping norm adapts.", above=0)
    clip_share: float = option(0.02, "Share of the noise budget for adapting the clipping norm.", above=0, below=1)
    statistics_share: float = option(0.01, "Share of the budget for the noised class counts.", above=0, below=1)
    max_rows: int = option(100, "Rows of a class that a client counts with at most, for weighting pooled.", at_least=1)
    evaluation_share: float = option(
        0.05, "Share of the budget for all evaluations together, with --private-evaluation.", above=0, below=1
    )
    evaluation_norm: float = option(
        10.0,
        "Largest Euclidean norm of a client's counts of held-out rows by score and class; more is scaled down.",
        above=0,
    )
    standardization: Literal["public", "private"] = option(
        "public",
        "Whether the numbers by which columns are standardised count as public, or are noised within the budget.",
    )
    standardization_share: float = option(0.02, "Share of the budget for private standardisation.", above=0, below=1)
    column_bounds: tuple[float, ...] = option(
        (),
        "Largest absolute value of a column, in its own unit, as known to the public, for private standardisation: one "
        "number for all columns, or one for each.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool_share + self.clip_share >= 1:
            raise ValueError(
                f"pool_share is {self.pool_share:g} and clip_share is {self.clip_share:g}; together they must be below "
                "1, because the rest is for the model: lower one of them"
            )

    @property
    def is_unlimited(self) -> bool:
        """Whether uploads stay as they are, as for an infinite epsilon."""
        return math.isinf(self.clip)

    def divide_noise(self, has_histogram: bool) -> NoiseMultipliers:
        """The noise of each part of an upload, such that all parts together have `noise_multiplier`.

        Gaussians that see one participation combine to (Σ σ_i^-2)^(-1/2), so a part with a share s of the budget has
        σ / √s.
        """
        joint = self.noise_multiplier or 0.0
        shares = {"pool": self.pool_share * has_histogram, "clip": self.clip_share * (self.clip_quantile is not None)}
        model = joint / math.sqrt(1 - sum(shares.values()))
        return NoiseMultipliers(model, *(joint / math.sqrt(share) if share else 0.0 for share in shares.values()))

    def announce(self, server_state: Tree) -> Tree:
        """The clipping norm, where it adapts."""
        return server_state.clip if self.clip_quantile is not None and not self.is_unlimited else ()

    def initial_server_state(self, shared: Tree) -> Tree:
        """No noise yet, and the clipping norm; nothing for uploads that stay as they are."""
        if self.is_unlimited:
            return ()
        like = tree_leaves(shared)[0]
        size = sum(leaf.numel() for leaf in list_change_leaves(shared))
        previous = torch.zeros((self.bands or 1) - 1, size, dtype=like.dtype, device=like.device)
        return ServerState(previous, torch.tensor(self.clip, dtype=torch.float64))

    def client(self, upload: Upload, state: Tree, key: Tensor, announced: Tree = ()) -> tuple[Upload, Tree]:
        """Scale the change down to the norm, and histograms to mass 1 per class."""
        if is_empty(upload.mean) or self.is_unlimited:
            return upload, state
        leading = key.ndim
        norm = upload_norm(list_change_leaves(upload.mean), leading)
        limit = torch.as_tensor(self.clip if is_empty(announced) else announced, dtype=norm.dtype, device=norm.device)
        masses = [histogram.masses for histogram in list_nodes(upload.mean, ScoreHistogram)]
        usable = torch.isfinite(norm)
        for leaf in masses:
            usable = usable & torch.isfinite(leaf).flatten(leading).all(-1)
        factor = clip_factor(norm, limit)

        def clip_leaf(leaf: Tensor) -> Tensor:
            # An upload with a number that is not finite has no bound, so it counts as zero.
            return torch.where(expand_to(usable, leaf), scale_leaf(leaf, factor), torch.zeros_like(leaf))

        def clip_histogram(histogram: ScoreHistogram) -> ScoreHistogram:
            limited, zeros = _limit_mass(histogram.masses), torch.zeros_like(histogram.masses)
            # The ends are the server's: what a client says of them has no bound.
            masses = torch.where(expand_to(usable, limited), limited, zeros)
            return ScoreHistogram(masses, torch.zeros_like(histogram.ends))

        clipped = map_upload(upload.mean, clip_leaf, clip_histogram)
        if self.clip_quantile is not None:
            within = torch.where(norm <= limit, 0.5, -0.5).to(tree_leaves(upload.mean)[0].dtype)
            clipped = ClippedUpload(clipped, within)
        return upload._replace(mean=clipped), state

    def zero_mean(self, zeros: Tree) -> Tree:
        """Nobody was within the norm, or beyond it."""
        if self.clip_quantile is None or self.is_unlimited:
            return zeros
        return ClippedUpload(zeros, torch.zeros_like(tree_leaves(zeros)[0].flatten()[:1].sum()))

    def server(self, mean: Tree, state: Tree, server_round: ServerRound) -> tuple[Tree, Tree]:
        """The mean without what clients say about their norm; the noise of a run is added by `NoisedClientDP`."""
        if isinstance(mean, ClippedUpload):
            mean = mean.upload
        return mean, state


class NoiseMultipliers(NamedTuple):
    """The noise of the parts of an upload, each as a multiple of the part's largest norm."""

    model: float
    pool: float
    clip: float


def map_upload(
    tree: Tree, change: Callable[[Tensor], Tensor], histogram: Callable[[ScoreHistogram], ScoreHistogram]
) -> Tree:
    """Apply one function to the tensors of an upload that are changes, and another to its histograms."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, ScoreHistogram):
        return histogram(tree)
    children = [map_upload(child, change, histogram) for child in tree]
    return tuple(children) if type(tree) is tuple else type(tree)(*children)


def list_change_leaves(tree: Tree) -> list[Tensor]:
    """The tensors of an upload that are changes of the shared state, in order; histograms are none."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, ScoreHistogram):
        return []
    return [leaf for child in tree for leaf in list_change_leaves(child)]


def _limit_mass(masses: Tensor) -> Tensor:
    """Each class with mass at most 1: larger weights, which `pooled` gives to large clients, are cut.

    Negative masses, which no algorithm of the library uploads, count as their amount, so that the norm has a bound.
    """
    return masses / masses.abs().sum(-1, keepdim=True).clamp(min=1)
