"""Means that a few wrong or malicious clients cannot move far. Every client of the cohort counts alike.

Yin et al., Byzantine-robust distributed learning: towards optimal statistical rates, ICML 2018 (median and trimmed
mean); Blanchard et al., Machine learning with adversaries: Byzantine tolerant gradient descent, NeurIPS 2017 (Krum).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedauc.fields import option
from fedauc.interfaces import Mean
from fedauc.trees import Tree, tree_leaves, tree_map

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Median(Mean):
    """The median of each coordinate; of an even number of clients, the mean of the two in the middle."""

    name: ClassVar[str] = "median"

    def check_cohort_size(self, clients: int) -> None:
        """The median of two is their mean."""
        if clients < 3:
            raise ValueError(
                f"mean is 'median', which needs 3 clients per round; there are {clients}: take more per round"
            )

    def combine(self, uploads: Tree, weights: Tensor) -> Tree:
        """The coordinate-wise median."""
        return tree_map(_take_median, uploads)


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Mean):
    """The mean of each coordinate without the ⌊trim·M⌋ smallest and the ⌊trim·M⌋ largest of its M values."""

    name: ClassVar[str] = "trimmed"
    trim: float = option(0.2, "Share of the clients left out on each side.", above=0, below=0.5)

    def check_cohort_size(self, clients: int) -> None:
        """At least one client must be left out on each side."""
        if math.floor(self.trim * clients) < 1:
            problem = f"trim is {self.trim:g}, which leaves out nobody of {clients} clients per round"
            remedy = f"raise trim to {1 / clients:.3g}, or take {math.ceil(1 / self.trim)} clients per round"
            raise ValueError(f"{problem}; {remedy}")

    def combine(self, uploads: Tree, weights: Tensor) -> Tree:
        """The coordinate-wise trimmed mean; a round with too few clients for trimming is averaged."""

        def trim_leaf(leaf: Tensor) -> Tensor:
            out = math.floor(self.trim * len(leaf))
            return torch.sort(leaf, dim=0).values[out : len(leaf) - out].mean(0)

        return tree_map(trim_leaf, uploads)


@dataclass(frozen=True, kw_only=True)
class Krum(Mean):
    """The upload that is nearest to its neighbours, where at most f clients of a round are wrong.

    A client's score is the sum of its squared distances to its M - f - 2 nearest neighbours. The `selected` clients
    with the lowest scores are averaged (Krum for 1, multi-Krum for more). An upload is compared as a whole.
    """

    name: ClassVar[str] = "krum"
    wrong: int = option(1, "Number of clients of a round that may be wrong, f.", at_least=0)
    selected: int = option(1, "Number of uploads that are averaged.", at_least=1)

    def check_cohort_size(self, clients: int) -> None:
        """Krum's guarantee needs M ≥ 2f + 3."""
        if clients < 3:
            raise ValueError(
                f"mean is 'krum', which needs 3 clients per round; there are {clients}: take more per round"
            )
        if clients < 2 * self.wrong + 3:
            bound = f"{clients} clients per round allow at most {(clients - 3) // 2}"
            raise ValueError(f"wrong is {self.wrong}; {bound}: lower wrong, or take more clients per round")
        if self.selected > clients - self.wrong:
            bound = f"it must be at most {clients - self.wrong}, the clients per round without the wrong ones"
            raise ValueError(f"selected is {self.selected}; {bound}: lower selected")

    def combine(self, uploads: Tree, weights: Tensor) -> Tree:
        """The mean of the selected uploads; in a round with fewer clients than planned, of as many as there are."""
        vectors = torch.cat([leaf.reshape(len(leaf), -1).double() for leaf in tree_leaves(uploads)], dim=1)
        neighbours = max(1, len(vectors) - self.wrong - 2)
        distances = torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist").square()
        # Column 0 of the sorted distances is a client's distance to itself.
        scores = torch.sort(distances, dim=1).values[:, 1 : neighbours + 1].sum(1)
        best = torch.sort(scores, stable=True).indices[: self.selected]
        return tree_map(lambda leaf: leaf[best].mean(0), uploads)


def _take_median(leaf: Tensor) -> Tensor:
    ordered = torch.sort(leaf, dim=0).values
    middle = len(leaf) // 2
    return ordered[middle] if len(leaf) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
