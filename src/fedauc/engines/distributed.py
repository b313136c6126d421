"""Several processes, one simulation: each rank visits its share of the cohort with an engine of its own.

`torchrun` starts the processes; torch.distributed carries one all-reduce per round for `mean`, and an all-gather for
`pool`. Every rank then holds the same server state, so that nothing else needs to travel. A client always belongs to
the same rank, which keeps its memory.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from fedauc.interfaces import Cohort, Download, Engine, Upload, Visits
from fedauc.trees import Tree, is_empty, tree_leaves, tree_map, tree_stack


@final
class DistributedEngine(Engine):
    """An engine per rank, and the sum of what they return."""

    name: ClassVar[str] = "distributed"

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()

    def visit(self, download: Download, cohort: Cohort) -> Visits:
        """Visit this rank's clients, then share."""
        mine = [place for place, client in enumerate(cohort.clients) if client % self._ranks == self._rank]
        visits = self._inner.visit(_share(download, mine), _part(cohort, mine)) if mine else Visits(Upload(), None)
        pool = self._pool(visits.upload.pool, mine)
        if download.phase.scoring:
            return Visits(Upload((), pool), None)
        mean, losses = _sum(download.shared, visits, len(mine))
        return Visits(Upload(mean, pool), losses / len(cohort.clients))

    def client_states(self) -> dict[int, Tree]:
        """Every rank's clients, on every rank; each must ask."""
        found: dict[int, Tree] = {}
        for part in _gather(self._inner.client_states()):
            found |= part
        return found

    def restore_client_states(self, client_states: dict[int, Tree]) -> None:
        """Keep this rank's clients."""
        self._inner.restore_client_states(
            {c: client_state for c, client_state in client_states.items() if c % self._ranks == self._rank}
        )

    def _pool(self, pool: Tree, mine: list[int]) -> Tree:
        """Every client's part, in the cohort's order."""
        parts: dict[int, Tree] = {}
        for places, shared in _gather((mine, pool)):
            if not is_empty(shared):
                parts |= {place: tree_map(lambda leaf, at=at: leaf[at], shared) for at, place in enumerate(places)}
        return tree_stack([parts[place] for place in sorted(parts)]) if parts else ()


def _share(download: Download, places: list[int]) -> Download:
    return download._replace(per_client=tree_map(lambda leaf: leaf[places], download.per_client))


def _part(cohort: Cohort, places: list[int]) -> Cohort:
    """These clients with their weights in the whole cohort, so that ranks' means add up to the cohort's."""
    clients = tuple(cohort.clients[place] for place in places)
    return Cohort(cohort.round, clients, tuple(cohort.weights[place] for place in places))


def _sum(shared: Tree, visits: Visits, count: int) -> tuple[Tree, Tensor]:
    """The sum over ranks of the change of what is shared, and of the clients' losses; an idle rank adds zeros."""
    mean = tree_map(torch.zeros_like, shared) if is_empty(visits.upload.mean) else visits.upload.mean
    leaves = tree_leaves(mean)
    # One buffer, so one message: in the widest type, since buffers may be wider than weights.
    like = torch.zeros(1, dtype=_widest(leaves), device=leaves[0].device)
    losses = like if visits.loss is None else visits.loss.detach().to(like).reshape(1) * count
    flat = torch.cat([*(leaf.reshape(-1).to(like) for leaf in leaves), losses])
    dist.all_reduce(flat)
    *parts, total = torch.split(flat, [*(leaf.numel() for leaf in leaves), 1])
    summed = iter(parts)
    return tree_map(lambda leaf: next(summed).view(leaf.shape).to(leaf.dtype), mean), total[0]


def _widest(leaves: list[Tensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (leaf.dtype for leaf in leaves))


def _gather(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
