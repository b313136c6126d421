"""The batched engine: the whole cohort takes each local step at once, as one stack of clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from fedauc.data.clients import Clients
from fedauc.engines.kernels import Unsupported
from fedauc.engines.simulator import Simulator
from fedauc.engines.stacked import KernelNetwork, VmapNetwork
from fedauc.interfaces import Algorithm, Batch, Cohort, Network, Order, Setting, Upload, Visits
from fedauc.network import ModuleNetwork
from fedauc.trees import Tree, is_empty, tree_at, tree_map, tree_stack

GATHER = 1 << 24
"""Bytes of a visit's rows that are gathered at once; larger visits gather step by step."""


@final
class BatchedEngine(Simulator):
    """Parameters, duals, variates and batches carry a leading client dimension; the algorithm's verbs do not notice."""

    name: ClassVar[str] = "batched"

    def __init__(self, algorithm: Algorithm, network: ModuleNetwork, clients: Clients, setting: Setting) -> None:
        super().__init__(algorithm, network, clients, setting)
        self._stacked = stacked(network, self._inputs[:2])

    @torch.no_grad()
    def visit(self, order: Order, cohort: Cohort) -> Visits:
        """Visit the cohort side by side."""
        count = len(cohort.clients)
        memory = self._recall(order, cohort)
        wide = order._replace(shared=_widen(order.shared, count), anchor=_widen(order.anchor, count))
        local, emitted, value = self._algorithm.begin(wide, memory), [], None
        for batch in self._batches(order, cohort):
            if value is None and not order.phase.scoring:
                value = self._algorithm.monitor(self._stacked, wide, local, batch).mean()
            local, scores = self._algorithm.step(self._stacked, wide, local, batch)
            emitted.append(scores)
        together = tree_map(lambda *steps: torch.stack(steps, dim=1), *emitted)
        upload, memory = self._algorithm.finish(wide, memory, local, together)
        self._remember(memory, cohort)
        return Visits(Upload(_mean(upload.mean, cohort), upload.pool), value)

    def _recall(self, order: Order, cohort: Cohort) -> Tree:
        known = [self._memories.get(client, ()) for client in cohort.clients]
        if any(is_empty(memory) for memory in known):
            blank = self._algorithm.blank(order)
            known = [blank if is_empty(memory) else memory for memory in known]
        return tree_stack(known)

    def _remember(self, memory: Tree, cohort: Cohort) -> None:
        if is_empty(memory):
            return
        for place, client in enumerate(cohort.clients):
            # A view would keep the whole cohort's stack alive.
            self._memories[client] = tree_map(torch.clone, tree_at(memory, place))

    def _batches(self, order: Order, cohort: Cohort) -> Iterator[Batch]:
        drawn = [self._draws.rows(client, order.phase) for client in cohort.clients]
        index = torch.from_numpy(np.stack([visit.rows for visit in drawn], axis=1)).to(self._inputs.device)
        weights = torch.from_numpy(np.stack([visit.weights for visit in drawn])).to(self._labels)
        labels, size = self._labels[index], index.numel() * self._inputs[0].numel() * self._inputs.element_size()
        gathered = self._inputs[index] if size <= GATHER else None
        for step, chosen in enumerate(index):
            inputs = self._inputs[chosen] if gathered is None else gathered[step]
            yield Batch(inputs, labels[step], weights, tree_map(lambda leaf, at=step: leaf[:, at], order.own))


def stacked(network: ModuleNetwork, rows: Tensor) -> Network:
    """The fastest stacked form of a network, or Unsupported with the reason."""
    try:
        return KernelNetwork(network.plain)
    except Unsupported:
        mapped = VmapNetwork(network)
        _try(network, mapped, rows)
        return mapped


def _try(network: ModuleNetwork, mapped: VmapNetwork, rows: Tensor) -> None:
    """Some modules only turn out at run time to resist vmap (randomness, data-dependent control flow)."""
    model = _widen(network.state(), 1)
    try:
        mapped.score(model, rows[None])
    except RuntimeError as error:
        raise Unsupported(str(error).split("\n")[0]) from error


def _widen(tree: Tree, count: int) -> Tree:
    return tree_map(lambda leaf: leaf.expand(count, *leaf.shape), tree)


def _mean(tree: Tree, cohort: Cohort) -> Tree:
    def average(leaf: Tensor) -> Tensor:
        weights = torch.tensor(cohort.weights, dtype=leaf.dtype, device=leaf.device)
        mean: Tensor = torch.tensordot(weights, leaf, dims=1)
        return mean

    return tree_map(average, tree)
