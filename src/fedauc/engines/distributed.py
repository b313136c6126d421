"""Several processes run one simulation: each rank visits its clients with an engine of its own.

`torchrun` starts the processes. Every round has one all-reduce for `mean` and one all-gather for `pool`; every rank
then holds the same server state, so nothing else needs to travel. A client always belongs to the same rank, which keeps
its state.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from fedauc.interfaces import Cohort, Download, Engine, Upload, UploadSize, Visits
from fedauc.transforms.weighted_mean import WeightedMean
from fedauc.trees import Tree, is_empty, tree_leaves, tree_map, tree_stack
from fedauc.uploads import UploadPipeline


@final
class DistributedEngine(Engine):
    """An engine per rank, and the sum of what they return.

    Weighted means of the ranks add up. Any other mean needs every upload: then `inner` returns them as a stack (see
    `UploadPipeline.on_each_rank`), and this engine combines them.
    """

    name: ClassVar[str] = "distributed"

    def __init__(self, inner: Engine, uploads: UploadPipeline) -> None:
        self._inner, self._uploads = inner, uploads
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()

    def visit(self, download: Download, cohort: Cohort) -> Visits:
        """Visit this rank's clients, then combine the ranks' results."""
        positions = [position for position, client in enumerate(cohort.clients) if self._owns_client(client)]
        visits = Visits(Upload(), None)
        if positions:
            # The clients keep their weights in the whole cohort, so that the ranks' means add up to the cohort's.
            clients, weights = zip(*((cohort.clients[p], cohort.weights[p]) for p in positions), strict=True)
            part = Cohort(cohort.round, clients, weights)
            per_client = tree_map(lambda leaf: leaf[positions], download.per_client)
            visits = self._inner.visit(download._replace(per_client=per_client), part)
        pool = _gather_by_client(visits.upload.pool, positions)
        size = _sum_sizes(visits.size) if self._uploads.transforms else None
        if download.phase.scoring:
            return Visits(Upload((), pool), None, size=size)
        if isinstance(self._uploads.mean, WeightedMean):
            zeros = self._uploads.zero_mean(download.shared)
            mean, loss_sum = _sum_over_ranks(zeros, visits, len(positions))
        else:
            stack = _gather_by_client(visits.upload.mean, positions)
            mean = self._uploads.combine_uploads(stack, torch.tensor(cohort.weights, dtype=torch.float64))
            _, loss_sum = _sum_over_ranks(
                tree_map(torch.zeros_like, download.shared), visits._replace(upload=Upload()), len(positions)
            )
        return Visits(Upload(mean, pool), loss_sum / len(cohort.clients), size=size)

    def client_states(self) -> dict[int, Tree]:
        """Every rank's client states, on every rank; all ranks must call this together."""
        client_states: dict[int, Tree] = {}
        for rank_states in _gather_objects(self._inner.client_states()):
            client_states |= rank_states
        return client_states

    def restore_client_states(self, client_states: dict[int, Tree]) -> None:
        """Keep the states of this rank's clients."""
        own_states = {client: state for client, state in client_states.items() if self._owns_client(client)}
        self._inner.restore_client_states(own_states)

    def _owns_client(self, client: int) -> bool:
        return client % self._ranks == self._rank


def _gather_by_client(stack: Tree, positions: list[int]) -> Tree:
    """Every client's entry of the ranks' stacks, in the cohort's order."""
    entries: dict[int, Tree] = {}
    for rank_positions, rank_stack in _gather_objects((positions, stack)):
        if not is_empty(rank_stack):
            for index, position in enumerate(rank_positions):
                entries[position] = tree_map(lambda leaf, index=index: leaf[index], rank_stack)
    return tree_stack([entries[position] for position in sorted(entries)]) if entries else ()


def _sum_over_ranks(zeros: Tree, visits: Visits, count: int) -> tuple[Tree, Tensor]:
    """The sum over ranks of the shared state's change, and of the clients' losses; an idle rank adds zeros."""
    mean = zeros if is_empty(visits.upload.mean) else visits.upload.mean
    leaves = tree_leaves(mean)
    # One buffer, so one message, in the widest dtype, since buffers may be wider than weights.
    widest = functools.reduce(torch.promote_types, (leaf.dtype for leaf in leaves))
    like = torch.zeros(1, dtype=widest, device=leaves[0].device)
    losses = like if visits.loss is None else visits.loss.detach().to(like).reshape(1) * count
    flat = torch.cat([*(leaf.reshape(-1).to(like) for leaf in leaves), losses])
    dist.all_reduce(flat)
    *parts, loss_sum = torch.split(flat, [*(leaf.numel() for leaf in leaves), 1])
    summed = iter(parts)
    return tree_map(lambda leaf: next(summed).view(leaf.shape).to(leaf.dtype), mean), loss_sum[0]


def _sum_sizes(size: UploadSize | None) -> UploadSize:
    """What the clients of all ranks sent."""
    sizes = [rank_size for rank_size in _gather_objects(size) if rank_size is not None]
    return UploadSize(*map(sum, zip(*sizes, strict=True)))


def _gather_objects(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
