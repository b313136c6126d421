"""The batched engine: the whole cohort takes each local step at once, as one stack of clients."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedauc.data.augmentation import apply_crops
from fedauc.data.clients import Clients
from fedauc.data.io.memory import release_freed_memory
from fedauc.engines.kernels import KernelNetwork, Unsupported
from fedauc.engines.simulator import CachedForward, Simulator, limit_torch_threads
from fedauc.interfaces import Algorithm, Batch, Cohort, Download, ForwardPass, Model, Network, Setting, Visits
from fedauc.network import ModuleNetwork
from fedauc.trees import Tree, is_empty, send_to_device, tree_at, tree_map, tree_stack
from fedauc.uploads import UploadPipeline, algorithm_state

ONE_THREAD_BELOW = 1 << 26
"""Multiplications in a cohort's step below which one thread is faster: starting a second one takes too long."""

GATHER_AT_ONCE = 1 << 24
"""Bytes up to which all rows of a visit are gathered at once; larger visits gather step by step."""


class CohortRows(NamedTuple):
    """A visit's draws: rows `[M, I, B]`, weights `[M, B]`; per client, crops, places, keys `[M, I, ...]`."""

    rows: Tensor
    weights: Tensor
    per_client: Tree
    moves: Tree
    places: Tree = ()
    keys: Tree = ()


class PendingVisit(NamedTuple):
    """A cohort about to take its local steps; every leaf has a leading client dimension."""

    download: Download
    cohort: Cohort
    client_state: Tree
    local: Tree
    rows: CohortRows


class LocalResult(NamedTuple):
    """A cohort after its local steps: local states, emissions `[M, I, ...]`, losses before the first step `[M]`."""

    local: Tree
    emitted: Tree
    losses: Tensor


class StackedEngine(Simulator):
    """Runs the algorithm's client verbs on weights, duals, states and batches with a leading client dimension."""

    def __init__(
        self,
        algorithm: Algorithm,
        network: ModuleNetwork,
        clients: Clients,
        setting: Setting,
        uploads: UploadPipeline | None = None,
    ) -> None:
        super().__init__(algorithm, network, clients, setting, uploads)
        self._stacked_network = stack_network(network, self._inputs[:2])

    @torch.no_grad()
    def visit(self, download: Download, cohort: Cohort) -> Visits:
        """Visit all clients of the cohort at once."""
        with limit_torch_threads(self._is_small_visit(download, cohort)):
            return self._visit_cohort(download, cohort)

    def _visit_cohort(self, download: Download, cohort: Cohort) -> Visits:
        pending = self.open_visit(download, cohort)
        return self.close_visit(pending, self._run_local_steps(pending))

    def open_visit(self, download: Download, cohort: Cohort) -> PendingVisit:
        """Everything the cohort's local steps need."""
        expanded = self._expand_download(download, len(cohort.clients))
        client_state = self._stack_client_states(download, cohort)
        local = self._algorithm.begin(expanded, algorithm_state(client_state))
        return PendingVisit(expanded, cohort, client_state, local, self._draw_rows(download, cohort))

    def close_visit(self, pending: PendingVisit, result: LocalResult) -> Visits:
        """The reduced upload after the local steps; the clients' new states are stored."""
        download, cohort, client_state, _, _ = pending
        key = self._uploads.make_client_keys(cohort.round, cohort.clients, self._network.device)
        sent, client_state = self._uploads.finish_visit(
            self._algorithm, download, client_state, result.local, result.emitted, key
        )
        shared, shares = tree_at(download.shared, 0), self._send_shares(cohort)
        upload, size = self._uploads.reduce_stack(sent, shared, shares)
        self._store_client_states(client_state, cohort)
        return Visits(upload, None if download.phase.scoring else result.losses.mean(), size=size)

    @abstractmethod
    def _run_local_steps(self, pending: PendingVisit) -> LocalResult:
        """Take every local step."""

    def _run_steps_one_by_one(self, pending: PendingVisit) -> LocalResult:
        algorithm, network = self._algorithm, CachedForward(self._stacked_network)
        download, local = pending.download, pending.local
        batches = VisitBatches(self._inputs, self._labels, pending.rows)
        losses, emitted = torch.zeros_like(pending.rows.weights[:, 0]), EmittedBuffer(len(batches))
        for step in range(len(batches)):
            batch = tree_at(batches.select_steps(step, step + 1), 0)
            if step == 0 and not download.phase.scoring:
                losses = algorithm.monitored_loss(network, download, local, batch)
            local, emission = algorithm.step(network, download, local, batch)
            emitted.write_step(emission, step)
        if batches.large:
            # The memory that such steps free lies between tensors that stay, in gaps too small for the next round.
            release_freed_memory()
        return LocalResult(local, emitted.steps, losses)

    def _is_small_visit(self, download: Download, cohort: Cohort) -> bool:
        """Whether a step's matrix products are too small to share among threads."""
        return self._network.device.type == "cpu" and self._count_products(download, cohort) < ONE_THREAD_BELOW

    def _count_products(self, download: Download, cohort: Cohort) -> int:
        """About as many multiplications as a step's forward pass has: exact for linear layers."""
        return len(cohort.clients) * download.phase.batch.total_rows * sum(self._network.vector_split.lengths)

    def _send_shares(self, cohort: Cohort) -> Tensor:
        return send_to_device(np.array(cohort.weights), self._network.device)

    def _expand_download(self, download: Download, count: int) -> Download:
        """The download with a leading client dimension."""
        return download._replace(shared=expand_tree(download.shared, count), anchor=expand_tree(download.anchor, count))

    def _stack_client_states(self, download: Download, cohort: Cohort) -> Tree:
        initial = self._uploads.initial_client_state(self._algorithm, download)
        if is_empty(initial):
            return ()
        return tree_stack([self._client_states.get(client, initial) for client in cohort.clients])

    def _store_client_states(self, client_state: Tree, cohort: Cohort) -> None:
        for position, client in enumerate(() if is_empty(client_state) else cohort.clients):
            # A view would keep the whole cohort's stack alive.
            self._client_states[client] = tree_map(torch.clone, tree_at(client_state, position))

    def _draw_rows(self, download: Download, cohort: Cohort) -> CohortRows:
        draws, device = self._draws.draw_cohort(cohort.clients, download.phase), self._inputs.device
        moves = () if draws.moves is None else send_to_device(draws.moves, device)
        weights = send_to_device(draws.weights, device).to(self._labels)
        optional = [() if drawn is None else send_to_device(drawn, device) for drawn in (draws.places, draws.keys)]
        return CohortRows(send_to_device(draws.rows, device), weights, download.per_client, moves, *optional)


@final
class BatchedEngine(StackedEngine):
    """The cohort as a stack of models: one step after another, each as soon as its rows are gathered."""

    name: ClassVar[str] = "batched"

    def _run_local_steps(self, pending: PendingVisit) -> LocalResult:
        return self._run_steps_one_by_one(pending)


class VisitBatches:
    """A visit's batches for the whole cohort, `[I, M, B, ...]`; large ones are gathered when their step comes."""

    def __init__(self, inputs: Tensor, labels: Tensor, rows: CohortRows) -> None:
        self._inputs, self._index, self._weights = inputs, rows.rows.transpose(0, 1).contiguous(), rows.weights
        self._moves = None if is_empty(rows.moves) else rows.moves.transpose(0, 1)
        self._per_step = tree_map(lambda leaf: leaf.transpose(0, 1), (rows.per_client, rows.places, rows.keys))
        self._labels = gather_rows(labels, self._index)
        self.large = self._index.numel() * inputs[0].numel() * inputs.element_size() > GATHER_AT_ONCE
        # One buffer for the rows of all steps: buffers that every step allocates and frees fragment the memory.
        self._gathered = inputs.new_empty(0) if self.large else gather_rows(inputs, self._index)

    def __len__(self) -> int:
        return len(self._index)

    def select_steps(self, start: int, end: int) -> Batch:
        """The batches of some steps, with a leading step dimension."""
        if self.large:
            inputs = gather_rows(self._inputs, self._index[start:end], self._gathered)
        else:
            inputs = self._gathered[start:end]
        if self._moves is not None:
            inputs = apply_crops(inputs, self._moves[start:end])
        weights = self._weights.expand(len(inputs), *self._weights.shape)
        per_step = tree_map(lambda leaf: leaf[start:end], self._per_step)
        return Batch(inputs, self._labels[start:end], weights, *per_step)


class EmittedBuffer:
    """What the steps emit, `[M, ...]` each, written into one tensor `[M, I, ...]`.

    Kept one by one, these small tensors would lie between the large ones of a step and fragment the memory.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.steps: Tree = ()

    def write_step(self, emission: Tree, step: int) -> None:
        """Store what a step emitted."""
        if step == 0:
            self.steps = tree_map(lambda leaf: leaf.new_empty(len(leaf), self._count, *leaf.shape[1:]), emission)
        tree_map(lambda buffer, leaf: buffer[:, step].copy_(leaf), self.steps, emission)


class VmapNetwork(Network):
    """Any module without buffers, through torch.func.vmap: one mapped forward pass and one backward pass."""

    def __init__(self, network: ModuleNetwork) -> None:
        if network.initial_model().buffers.numel():
            raise Unsupported("its buffers cannot be mapped over clients")
        self._mapped = vmap(network.call_flat, randomness="error")

    def forward_pass(self, model: Model, inputs: Tensor) -> ForwardPass:
        """One backward pass gives every client its own gradient, since no client's outputs depend on another's."""
        weights = model.weights.detach().requires_grad_()
        with torch.enable_grad():
            outputs = self._mapped(weights, inputs)

        def pullback(cotangent: Tensor) -> Tensor:
            (gradient,) = torch.autograd.grad(outputs, weights, cotangent)
            return gradient

        return ForwardPass(outputs.detach(), model.buffers, pullback)


def stack_network(network: ModuleNetwork, rows: Tensor) -> Network:
    """The fastest stacked form of a network; raises Unsupported, with the reason, where there is none."""
    if network.mixed:
        raise Unsupported("mixed precision runs layer by layer under torch.autocast")
    try:
        return KernelNetwork(network.plain_module)
    except Unsupported:
        mapped = VmapNetwork(network)
    try:
        # Some modules fail under vmap only when they run (randomness, data-dependent control flow).
        mapped.forward_pass(expand_tree(network.initial_model(), 1), rows[None])
    except RuntimeError as error:
        raise Unsupported(str(error).split("\n")[0]) from error
    return mapped


def gather_rows(source: Tensor, index: Tensor, buffer: Tensor | None = None) -> Tensor:
    """`source[index]` by index_select, several times faster since it copies whole rows; into `buffer`, if given."""
    return torch.index_select(source, 0, index.reshape(-1), out=buffer).view(*index.shape, *source.shape[1:])


def expand_tree(tree: Tree, count: int) -> Tree:
    """The same tree for so many clients, without a copy."""
    return tree_map(lambda leaf: leaf.expand(count, *leaf.shape), tree)
