"""The batched engine: the whole cohort takes each local step at once, as one stack of clients."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from fedauc.data.augmentation import apply_crops
from fedauc.data.clients import Clients
from fedauc.data.io.memory import release_freed_memory
from fedauc.engines.crew import one_thread
from fedauc.engines.kernels import Unsupported
from fedauc.engines.simulator import CachedForward, Simulator
from fedauc.engines.stacked import KernelNetwork, VmapNetwork
from fedauc.interfaces import Algorithm, Batch, Cohort, Download, Network, Setting, Upload, Visits
from fedauc.network import ModuleNetwork
from fedauc.trees import Tree, is_empty, send_to_device, tree_at, tree_map, tree_stack

SMALL = 1 << 26
"""Multiplications of a cohort's step below which one thread does better: starting a second takes too long."""

GATHER = 1 << 24
"""Bytes of a visit's rows that are gathered at once; larger visits gather step by step."""


class Rows(NamedTuple):
    """A visit's draws on the device: row numbers `[M, I, B]`, weights `[M, B]`, own draws and crops `[M, I, ...]`."""

    rows: Tensor
    weights: Tensor
    own: Tree
    moves: Tree


class Opened(NamedTuple):
    """A cohort about to take its local steps; every leaf has a leading client dimension."""

    download: Download
    cohort: Cohort
    client_state: Tree
    local: Tree
    rows: Rows


class Advanced(NamedTuple):
    """A cohort after its local steps: its state, what it emitted `[M, I, ...]`, its losses before the first `[M]`."""

    local: Tree
    emitted: Tree
    losses: Tensor


class StackedEngine(Simulator):
    """Parameters, duals, variates and batches carry a leading client dimension; the algorithm's verbs do not notice."""

    def __init__(self, algorithm: Algorithm, network: ModuleNetwork, clients: Clients, setting: Setting) -> None:
        super().__init__(algorithm, network, clients, setting)
        self._stacked = stacked(network, self._inputs[:2])

    @torch.no_grad()
    def visit(self, download: Download, cohort: Cohort) -> Visits:
        """Visit the cohort side by side."""
        with one_thread(self._is_small(download, cohort)):
            return self._visited(download, cohort)

    def _visited(self, download: Download, cohort: Cohort) -> Visits:
        opened = self.open(download, cohort)
        return self.close(opened, self._advance(opened))

    def _is_small(self, download: Download, cohort: Cohort) -> bool:
        """Whether a step's products are too small to share among threads."""
        return self._network.device.type == "cpu" and self._products(download, cohort) < SMALL

    def _products(self, download: Download, cohort: Cohort) -> int:
        """About as many multiplications as a step's forward pass has: exact for linear layers."""
        return len(cohort.clients) * download.phase.batch.total_rows * sum(self._network.cut.lengths)

    def open(self, download: Download, cohort: Cohort) -> Opened:
        """Everything the cohort's local steps need."""
        wide, client_state = self._widened(download, len(cohort.clients)), self._recall(download, cohort)
        return Opened(
            wide, cohort, client_state, self._algorithm.begin(wide, client_state), self._draw(download, cohort)
        )

    def close(self, opened: Opened, advanced: Advanced) -> Visits:
        """What comes back after the local steps."""
        download, cohort, client_state, _, _ = opened
        upload, client_state, loss = self._reduced(download, client_state, advanced, self._shares(cohort))
        self._remember(client_state, cohort)
        return Visits(upload, None if download.phase.scoring else loss)

    def _shares(self, cohort: Cohort) -> Tensor:
        return send_to_device(np.array(cohort.weights), self._network.device)

    def _widened(self, download: Download, count: int) -> Download:
        """What each client of the cohort is sent."""
        return download._replace(shared=widen(download.shared, count), anchor=widen(download.anchor, count))

    def _reduced(
        self, download: Download, client_state: Tree, advanced: Advanced, shares: Tensor
    ) -> tuple[Upload, Tree, Tensor]:
        """The cohort's mean upload, what its clients remember, and their mean loss."""
        upload, client_state = self._algorithm.finish(download, client_state, advanced.local, advanced.emitted)
        mean = tree_map(lambda leaf: _mean(shares, leaf), upload.mean)
        return Upload(mean, upload.pool), client_state, advanced.losses.mean()

    @abstractmethod
    def _advance(self, opened: Opened) -> Advanced:
        """Take every local step."""

    def _step_by_step(self, opened: Opened) -> Advanced:
        download, local, emitted, network = opened.download, opened.local, Emitted(), CachedForward(self._stacked)
        rows, losses = VisitBatches(self._inputs, self._labels, opened.rows), opened.rows.weights[:, 0]
        for place in range(len(rows)):
            batch = tree_at(rows.steps(place, place + 1), 0)
            losses = losses if place else self._loss(network, download, local, batch)
            local, scores = self._algorithm.step(network, download, local, batch)
            emitted.keep(scores, place, len(rows))
        if rows.large:
            # What such steps free lies between scores that stay, in holes that the next round would not fit into.
            release_freed_memory()
        return Advanced(local, emitted.all, losses)

    def _recall(self, download: Download, cohort: Cohort) -> Tree:
        initial_client_state = self._algorithm.initial_client_state(download)
        return (
            ()
            if is_empty(initial_client_state)
            else tree_stack([self._client_states.get(client, initial_client_state) for client in cohort.clients])
        )

    def _remember(self, client_state: Tree, cohort: Cohort) -> None:
        if is_empty(client_state):
            return
        for place, client in enumerate(cohort.clients):
            # A view would keep the whole cohort's stack alive.
            self._client_states[client] = tree_map(torch.clone, tree_at(client_state, place))

    def _draw(self, download: Download, cohort: Cohort) -> Rows:
        drawn, device = self._draws.cohort(cohort.clients, download.phase), self._inputs.device
        moves = () if drawn.moves is None else send_to_device(drawn.moves, device)
        return Rows(
            send_to_device(drawn.rows, device),
            send_to_device(drawn.weights, device).to(self._labels),
            download.per_client,
            moves,
        )

    def _loss(self, network: Network, download: Download, local: Tree, batch: Batch) -> Tensor:
        """Each client's loss before its first step; a scoring visit has none."""
        if download.phase.scoring:
            return batch.weights.new_zeros(len(batch.weights))
        return self._algorithm.monitored_loss(network, download, local, batch)


class VisitBatches:
    """A visit's batches for the whole cohort, `[I, M, B, ...]`; large ones are gathered when their step comes."""

    def __init__(self, inputs: Tensor, labels: Tensor, rows: Rows) -> None:
        self._inputs, self._index, self._weights = inputs, rows.rows.transpose(0, 1).contiguous(), rows.weights
        self._moves = None if is_empty(rows.moves) else rows.moves.transpose(0, 1)
        self._own = tree_map(lambda leaf: leaf.transpose(0, 1), rows.own)
        self._labels = gather(labels, self._index)
        self.large = self._index.numel() * inputs[0].numel() * inputs.element_size() > GATHER
        # One place for the rows of all steps: memory that each of them takes and frees would not stay in one piece.
        self._gathered = inputs.new_empty(0) if self.large else gather(inputs, self._index)

    def __len__(self) -> int:
        return len(self._index)

    def steps(self, start: int, end: int) -> Batch:
        """The batches of some steps, with a leading step dimension."""
        if self.large:
            inputs = gather(self._inputs, self._index[start:end], self._gathered)
        else:
            inputs = self._gathered[start:end]
        if self._moves is not None:
            inputs = apply_crops(inputs, self._moves[start:end])
        weights = self._weights.expand(len(inputs), *self._weights.shape)
        return Batch(inputs, self._labels[start:end], weights, tree_map(lambda leaf: leaf[start:end], self._own))


def gather(source: Tensor, index: Tensor, room: Tensor | None = None) -> Tensor:
    """source[index], by index_select, which copies whole rows and is several times faster; in `room`, if given."""
    return torch.index_select(source, 0, index.reshape(-1), out=room).view(*index.shape, *source.shape[1:])


@final
class BatchedEngine(StackedEngine):
    """One step after another, each as soon as its rows are gathered."""

    name: ClassVar[str] = "batched"

    def _advance(self, opened: Opened) -> Advanced:
        return self._step_by_step(opened)


class Emitted:
    """What steps emit `[M, ...]`, written side by side, `[M, I, ...]`.

    Kept one by one, these small tensors would lie between a step's large ones, whose next ones no longer fit there.
    """

    def __init__(self) -> None:
        self.all: Tree = ()

    def keep(self, emitted: Tree, place: int, steps: int) -> None:
        """What one of so many steps emitted."""
        if not place:
            self.all = tree_map(lambda leaf: leaf.new_empty(len(leaf), steps, *leaf.shape[1:]), emitted)
        tree_map(lambda room, leaf: room[:, place].copy_(leaf), self.all, emitted)


def stacked(network: ModuleNetwork, rows: Tensor) -> Network:
    """The fastest stacked form of a network, or Unsupported with the reason."""
    if network.mixed:
        raise Unsupported("mixed precision runs layer by layer under torch.autocast")
    try:
        return KernelNetwork(network.plain)
    except Unsupported:
        mapped = VmapNetwork(network)
        _try(network, mapped, rows)
        return mapped


def _try(network: ModuleNetwork, mapped: VmapNetwork, rows: Tensor) -> None:
    """Some modules only turn out at run time to resist vmap (randomness, data-dependent control flow)."""
    model = widen(network.state(), 1)
    try:
        mapped.forward_pass(model, rows[None])
    except RuntimeError as error:
        raise Unsupported(str(error).split("\n")[0]) from error


def widen(tree: Tree, count: int) -> Tree:
    """The same for so many clients, without a copy."""
    return tree_map(lambda leaf: leaf.expand(count, *leaf.shape), tree)


def _mean(shares: Tensor, leaf: Tensor) -> Tensor:
    if not leaf.numel():
        return leaf.new_zeros(leaf.shape[1:])
    return (shares.to(leaf.dtype) @ leaf.reshape(len(leaf), -1)).view(leaf.shape[1:])
