"""The batched engine: the whole cohort takes each local step at once, as one stack of clients."""

from __future__ import annotations

from abc import abstractmethod
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


class StackedEngine(Simulator):
    """Parameters, duals, variates and batches carry a leading client dimension; the algorithm's verbs do not notice."""

    def __init__(self, algorithm: Algorithm, network: ModuleNetwork, clients: Clients, setting: Setting) -> None:
        super().__init__(algorithm, network, clients, setting)
        self._stacked = stacked(network, self._inputs[:2])

    @torch.no_grad()
    def visit(self, order: Order, cohort: Cohort) -> Visits:
        """Visit the cohort side by side."""
        count = len(cohort.clients)
        memory = self._recall(order, cohort)
        wide = order._replace(shared=_widen(order.shared, count), anchor=_widen(order.anchor, count))
        local, rows = self._algorithm.begin(wide, memory), self._gather(order, cohort)
        first = tree_at(rows.steps(0, 1), 0)
        value = None if order.phase.scoring else self._algorithm.monitor(self._stacked, wide, local, first).mean()
        local, emitted = self._advance(wide, local, rows)
        together = tree_map(lambda *steps: torch.stack(steps, dim=1), *emitted)
        upload, memory = self._algorithm.finish(wide, memory, local, together)
        self._remember(memory, cohort)
        return Visits(Upload(_mean(upload.mean, cohort), upload.pool), value)

    @abstractmethod
    def _advance(self, order: Order, local: Tree, rows: VisitBatches) -> tuple[Tree, list[Tree]]:
        """Take every local step: the last local state, and what each step emitted."""

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

    def _gather(self, order: Order, cohort: Cohort) -> VisitBatches:
        drawn = [self._draws.rows(client, order.phase) for client in cohort.clients]
        index = torch.from_numpy(np.stack([visit.rows for visit in drawn], axis=1)).to(self._inputs.device)
        weights = torch.from_numpy(np.stack([visit.weights for visit in drawn])).to(self._labels)
        own = tree_map(lambda leaf: leaf.transpose(0, 1), order.own)
        return VisitBatches(self._inputs, index, _rows(self._labels, index), weights, own)


class VisitBatches:
    """A visit's batches for the whole cohort, `[I, M, B, ...]`; large ones are gathered when their step comes."""

    def __init__(self, inputs: Tensor, index: Tensor, labels: Tensor, weights: Tensor, own: Tree) -> None:
        self._inputs, self._index, self._labels, self._weights, self._own = inputs, index, labels, weights, own
        size = index.numel() * inputs[0].numel() * inputs.element_size()
        self._gathered = _rows(inputs, index) if size <= GATHER else None

    def __len__(self) -> int:
        return len(self._index)

    def steps(self, start: int, end: int) -> Batch:
        """The batches of some steps, with a leading step dimension."""
        inputs = _rows(self._inputs, self._index[start:end]) if self._gathered is None else self._gathered[start:end]
        weights = self._weights.expand(len(inputs), *self._weights.shape)
        return Batch(inputs, self._labels[start:end], weights, tree_map(lambda leaf: leaf[start:end], self._own))


def _rows(source: Tensor, index: Tensor) -> Tensor:
    """source[index], by index_select, which copies whole rows and is several times faster."""
    return source.index_select(0, index.reshape(-1)).view(*index.shape, *source.shape[1:])


@final
class BatchedEngine(StackedEngine):
    """One step after another, each as soon as its rows are gathered."""

    name: ClassVar[str] = "batched"

    def _advance(self, order: Order, local: Tree, rows: VisitBatches) -> tuple[Tree, list[Tree]]:
        emitted = []
        for step in range(len(rows)):
            batch = tree_at(rows.steps(step, step + 1), 0)
            local, scores = self._algorithm.step(self._stacked, order, local, batch)
            emitted.append(scores)
        return local, emitted


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
