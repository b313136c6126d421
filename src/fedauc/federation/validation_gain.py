"""How much better a model is than the best one before it, over the validation rows of the sites that answered for both.

Sites are absent, join and leave, and the AUC over other rows is another number, whatever the model. With W_ij the
number of pairs of a positive of site i and a negative of site j in which the positive has the higher score, ties
counted one half, the AUC over any set S of the sites that answered an evaluation is

    AUC_S = Σ_{i,j∈S} W_ij / (Σ_{i∈S} n_i⁺ · Σ_{j∈S} n_j⁻),

so that W and the counts are all that must be kept of the best evaluation. Numbers of pairs are multiples of one half,
whose sums are exact in float64; with the same sites both times the comparison is that of the two AUCs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class SiteWins(NamedTuple):
    """An evaluation: the clients `[k]`, their rows of each class `[k, 2]` (positives first), and W `[k, k]`."""

    clients: Tensor
    rows: Tensor
    wins: Tensor

    def drop_clients(self, clients: Collection[int]) -> SiteWins:
        """The same evaluation without some clients."""
        remaining = ~torch.isin(self.clients, torch.tensor(sorted(clients), dtype=torch.int64))
        return SiteWins(self.clients[remaining], self.rows[remaining], self.wins[remaining][:, remaining])


def count_wins(answers: Mapping[int, Sequence[Tensor]]) -> SiteWins:
    """The wins of every two clients from their histograms (a tensor each) or their scores and labels (two tensors).

    >>> scores, labels = torch.tensor([0.1, 0.3, 0.3]), torch.tensor([0.0, 0.0, 1.0])
    >>> count_wins({4: (scores, labels)}).wins
    tensor([[1.5000]], dtype=torch.float64)
    """
    clients = sorted(answers)
    sites = [_count_values(*answers[client]) for client in clients]
    totals = [[int(positives.sum()), int(negatives.sum())] for _, positives, negatives in sites]
    wins = torch.zeros(len(clients), len(clients), dtype=torch.float64)
    holding = [positives > 0 for _, positives, _ in sites]
    owners = [torch.full((int(chosen.sum()),), row) for row, chosen in enumerate(holding)]
    values = [scores[chosen] for (scores, _, _), chosen in zip(sites, holding, strict=True)]
    counts = [positives[chosen] for (_, positives, _), chosen in zip(sites, holding, strict=True)]
    for column, (scores, _, negatives) in enumerate(sites):
        # Before the first value lie no negatives.
        below = torch.cat([torch.zeros(1, dtype=torch.float64), negatives.cumsum(0)])
        # Every positive of every site against the negatives of this one.
        lower, upper = (below[torch.searchsorted(scores, torch.cat(values), right=right)] for right in (False, True))
        wins[:, column].index_add_(0, torch.cat(owners), torch.cat(counts) * (lower + upper) / 2)
    rows = torch.tensor(totals, dtype=torch.int64).reshape(-1, 2)
    return SiteWins(torch.tensor(clients, dtype=torch.int64), rows, wins)


def measure_gain(now: SiteWins, best: SiteWins) -> float | None:
    """AUC_S of an evaluation minus that of the best one, over the sites S of both; None where S lacks a class."""
    in_both = sorted(set(now.clients.tolist()) & set(best.clients.tolist()))
    values = [_measure_auc(evaluation, in_both) for evaluation in (now, best)]
    return None if values[0] is None or values[1] is None else values[0] - values[1]


def _measure_auc(evaluation: SiteWins, clients: list[int]) -> float | None:
    """AUC_S of an evaluation; None where the sites hold no pair."""
    _, rows, wins = evaluation.drop_clients({*evaluation.clients.tolist()} - {*clients})
    positives, negatives = rows.sum(0).tolist()
    pairs = positives * negatives
    return float(wins.sum()) / pairs if pairs else None


def _count_values(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The values of one site in rising order, and how many positives and negatives have each; bins are values too."""
    if len(tensors) == 1:
        negatives, positives = tensors[0].double()
        return torch.arange(len(positives), dtype=torch.float64), positives, negatives
    scores, labels = tensors
    values, codes = torch.unique(scores.double(), return_inverse=True)
    positives, negatives = (torch.bincount(codes[labels == label], minlength=len(values)).double() for label in (1, 0))
    return values, positives, negatives
