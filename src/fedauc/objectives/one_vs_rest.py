"""The mean over classes of a pairwise AUC loss: each class against the rest, by its own score from one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from fedauc.fields import option
from fedauc.interfaces import Objective
from fedauc.objectives.class_scores import log_odds_against_rest, slopes_of_outputs
from fedauc.objectives.compositional import SURROGATES, SurrogateName
from fedauc.objectives.kinds import Active, GapObjective, PassiveDistribution, check_raw_outputs

if TYPE_CHECKING:
    from torch import Tensor


class ClassRows(NamedTuple):
    """Scores of rows for all classes `[..., B, C]`, in the order of their classes, of which class c has `sizes[c]`."""

    scores: Tensor
    sizes: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class OneVsRestLoss(Objective):
    """F = mean_c Σ_{y≠c} π_y / (1 - π_c) · mean over rows i of class c and j of class y of ψ(h_i^c - h_j^c).

    h^c is the log-odds of class c against the rest, from the softmax of the model's outputs, and π_y the share of class
    y among the rows of all clients. (With output c alone as the score, a linear model has a line for each class; with
    log-odds the other outputs count too, and AUCs are higher: docs/objectives.md.) Class c is the positives
    of problem c, and the mixture of the other classes, as they are in the rows, its negatives: with ψ(t) = 1[t < 0] and
    no ties, 1 - F is the macro one-vs-rest AUC.

    Active rows come with the weights of their class, which sum to 1 over its rows at an average client. Each of them is
    a positive of one problem and a negative of C - 1 problems.

    >>> rows = ClassRows(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), (1, 1))
    >>> OneVsRestLoss(scale=0.01).monitored_loss(rows, torch.ones(2), rows, torch.tensor([0.5, 0.5]))
    tensor(0.)
    """

    name: ClassVar[str] = "one-vs-rest"
    takes_classes: ClassVar[bool] = True
    surrogate: SurrogateName = option("sigmoid", "Loss of the gap between the scores of a pair.")
    scale: float = option(1.0, "Gap between scores that the surrogate counts as 1.", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_raw_outputs(self)

    def to_scores(self, outputs: Tensor) -> Tensor:
        """The log-odds of each class against the rest."""
        return log_odds_against_rest(outputs)

    def to_ranking(self, outputs: Tensor) -> Tensor:
        """The scores."""
        return self.to_scores(outputs)

    def to_output_slopes(self, scores: Tensor, slopes: Tensor) -> Tensor:
        """Derivatives with respect to the outputs, given those with respect to the log-odds."""
        return slopes_of_outputs(scores, slopes)

    def active_slopes(self, rows: ClassRows, weights: Tensor, passive: ClassRows, shares: Tensor) -> Tensor:
        """The derivative `[..., B, C]` with respect to all scores of active rows with weights `[..., B]` (no 1/2)."""
        active, distribution = _compare_classes(self._stretch(rows), weights, self._stretch(passive), shares)
        by_role = self._surrogate.active_slopes(active, distribution)
        return (by_role.positives + by_role.negatives).transpose(-1, -2) / self.scale

    def monitored_loss(self, rows: ClassRows, weights: Tensor, passive: ClassRows, shares: Tensor) -> Tensor:
        """The loss `[...]`: half the sum over both roles, because each pair has two sides."""
        active, distribution = _compare_classes(self._stretch(rows), weights, self._stretch(passive), shares)
        return self._surrogate.monitored_loss(active, distribution).sum(-1)

    @property
    def _surrogate(self) -> GapObjective:
        return SURROGATES[self.surrogate]

    def _stretch(self, rows: ClassRows) -> ClassRows:
        """The rows with scores in units of `scale`."""
        return rows._replace(scores=rows.scores / self.scale)


def _compare_classes(
    rows: ClassRows, weights: Tensor, passive: ClassRows, shares: Tensor
) -> tuple[Active, PassiveDistribution]:
    """The C problems as a leading dimension `[..., C, B]`, where all rows have both roles, one of them without weight.

    A class that has no passive rows takes no part.
    """
    columns, partners = rows.scores.transpose(-1, -2), passive.scores.transpose(-1, -2)
    positive, negative = _role_weights(rows.sizes, shares)
    scaled = weights[..., None, :] / shares.shape[-1]
    positive_masses, negative_masses = _role_weights(passive.sizes, shares)
    lengths = shares.new_tensor([max(size, 1) for size in passive.sizes])
    per_row = 1 / lengths[_list_classes(passive.sizes, shares)]
    return (
        Active(columns, columns, scaled * positive, scaled * negative),
        PassiveDistribution(partners, positive_masses * per_row, negative_masses * per_row),
    )


def _role_weights(sizes: Sequence[int], shares: Tensor) -> tuple[Tensor, Tensor]:
    """How much a row counts in problem c, `[..., C, B]`: 1[y = c] as a positive, 1[y ≠ c] π_y / (1 - π_c) else."""
    labels = _list_classes(sizes, shares)
    is_positive = (labels == torch.arange(len(sizes), device=shares.device)[:, None]).to(shares.dtype)
    mixture = shares[..., labels][..., None, :] / (1 - shares)[..., :, None]
    return is_positive.expand_as(mixture), (1 - is_positive) * mixture


def _list_classes(sizes: Sequence[int], shares: Tensor) -> Tensor:
    """The class of every row `[B]`."""
    return torch.tensor([number for number, size in enumerate(sizes) for _ in range(size)], device=shares.device).long()
