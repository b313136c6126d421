"""Lanes: the fixed tensors of each client in the graph, and the local step that updates them.

A CUDA graph reads and writes the same tensors each time it is replayed. A visit is written into its lanes, one lane per
client; the graph is replayed once per local step, with a counter on the device that selects the batch; and the result
is read out of the lanes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedauc.data.augmentation import apply_crops
from fedauc.engines.batched import CohortRows, LocalResult, PendingVisit, gather_rows
from fedauc.engines.cuda.convolutions import make_stackable
from fedauc.engines.cuda.padding_weights import find_kernel_windows
from fedauc.engines.simulator import CachedForward
from fedauc.interfaces import Algorithm, Batch, Download, ForwardPass, Model, Network, Phase
from fedauc.network import ModuleNetwork
from fedauc.split_vectors import PerClientScalar, SplitVector, VectorSplit, is_large
from fedauc.trees import Tree, is_empty, list_nodes, tree_leaves, tree_map


class LabeledRows(NamedTuple):
    """Rows and their labels on the device: all of a run's, or those of a step."""

    inputs: Tensor
    labels: Tensor


class Lanes(NamedTuple):
    """The lanes of one run or of several; each run has as many lanes as its largest cohort has clients.

    Leaves have a leading lane dimension L, except `download.shared` and `download.anchor`, which have an entry per run.
    `rows` hold a whole visit's draws; `emitted` and `losses` have room for every step, `[L, I, ...]`. Vectors of the
    model's length are split as `split` says; `bf16_copies` are bfloat16 copies of the first parts of the model. The
    learning rate is one number for one run, and a number per lane for several.
    """

    data: tuple[LabeledRows, ...]
    download: Download
    local: Tree
    rows: CohortRows
    emitted: Tree = ()
    losses: Tree = ()
    bf16_copies: tuple[Tensor, ...] = ()
    split: VectorSplit = VectorSplit()

    @property
    def lanes_per_run(self) -> int:
        """The number of lanes of each run."""
        return len(self.losses) // len(self.data)

    def fill_visits(self, pending: Sequence[PendingVisit | None]) -> None:
        """Write each run's visit into its lanes; lanes beyond its cohort keep old values, which nobody reads."""
        for run, visit in enumerate(pending):
            if visit is None:
                continue
            start, count, learning_rate = run * self.lanes_per_run, len(visit.cohort.clients), self._get_learning_rate()
            run_rate = learning_rate[start : start + self.lanes_per_run] if learning_rate.ndim else learning_rate
            run_rate.fill_(visit.download.phase.learning_rate)
            self._fill_run(run, slice(start, start + count), visit)
        self.update_bf16_copies(self.local)

    def _fill_run(self, run: int, lanes: slice, visit: PendingVisit) -> None:
        sent = self.split.split_tree((visit.download.shared, visit.download.anchor), 1)
        tree_map(lambda old, new: old[run].copy_(new[0]), (self.download.shared, self.download.anchor), sent)
        client_trees = (self.split.split_tree(visit.local, 1), visit.rows)
        tree_map(lambda old, new: old[lanes].copy_(new), (self.local, self.rows), client_trees)

    def update_bf16_copies(self, local: Tree) -> None:
        """Refresh the bfloat16 copies from a state's weights."""
        model = _find_model(local) if self.bf16_copies else None
        for bf16_copy, weights in zip(self.bf16_copies, model.weights if model else (), strict=False):
            bf16_copy.copy_(weights)

    def read_result(self, run: int, count: int) -> LocalResult:
        """What a run's first lanes hold after the last step; emissions and losses are copied, to outlive the lanes."""
        clients = slice(run * self.lanes_per_run, run * self.lanes_per_run + count)
        local = self.split.join_tree(tree_map(lambda leaf: leaf[clients], self.local))
        emitted = self.split.join_tree(tree_map(lambda leaf: leaf[clients].clone(), self.emitted))
        return LocalResult(local, emitted, self.losses[clients, 0].clone())

    def split_lanes(self) -> list[Lanes]:
        """Each lane by itself, as views."""
        return [self._select_lane(lane) for lane in range(len(self.losses))]

    def _select_lane(self, lane: int) -> Lanes:
        run, (phase, shared, anchor, per_client, _) = lane // self.lanes_per_run, self.download
        leaves = (self.local, self.rows, self.emitted, self.losses, self.bf16_copies)
        lane_leaves = tree_map(lambda leaf: leaf[lane : lane + 1], leaves)
        shared, anchor = tree_map(lambda leaf: leaf[run : run + 1], (shared, anchor))
        learning_rate = self._get_learning_rate()
        if learning_rate.ndim:
            phase = phase._replace(learning_rate=learning_rate[lane])
        download = Download(phase, shared, anchor, per_client)
        return Lanes((self.data[run],), download, *lane_leaves)._replace(split=self.split)

    def expand_download(self) -> Download:
        """The download with an entry per lane."""
        runs, width, (phase, shared, anchor, *_) = len(self.data), self.lanes_per_run, self.download

        def expand_leaf(leaf: Tensor) -> Tensor:
            expanded = leaf[:, None].expand(runs, width, *leaf.shape[1:])
            return expanded.flatten(0, 1) if runs > 1 else expanded[0]

        learning_rate: Any = self._get_learning_rate()
        if learning_rate.ndim:
            learning_rate = PerClientScalar(learning_rate)
        expanded_phase = phase._replace(learning_rate=learning_rate)
        return Download(expanded_phase, *tree_map(expand_leaf, (shared, anchor)))

    def list_tensors(self) -> list[Tensor]:
        """Every tensor except the runs' data."""
        return tree_leaves(self._list_trees())

    def replace_tensors(self, tensors: Sequence[Tensor]) -> Lanes:
        """The same lanes with other tensors."""
        remaining, phase = iter(tensors), self.download.phase
        learning_rate, shared, anchor, *others = tree_map(lambda leaf: next(remaining), self._list_trees())
        download = Download(phase._replace(learning_rate=learning_rate), shared, anchor, self.download.per_client)
        return Lanes(self.data, download, *others)._replace(split=self.split)

    def _list_trees(self) -> tuple[Tree, ...]:
        _, (phase, shared, anchor, *_), *others, _ = self
        return phase.learning_rate, shared, anchor, *others

    def _get_learning_rate(self) -> Tensor:
        assert isinstance(self.download.phase.learning_rate, Tensor)
        return self.download.phase.learning_rate


class LaneNetwork(Network):
    """A module over some lanes as pure functions; it uses bfloat16 copies of the lanes' weights, if any."""

    def __init__(self, step: LaneStep, lanes: Lanes) -> None:
        self._step, self._lanes = step, lanes

    def forward_pass(self, model: Model, inputs: Tensor) -> ForwardPass:
        """One forward pass in training mode; the pullback is its transposed derivative.

        The numbers are those of casting the weights; weights other than the lanes' own are cast.
        """
        copies, own_model, step = self._lanes.bf16_copies, _find_model(self._lanes.local), self._step
        if copies and own_model is not None and model.weights is own_model.weights:
            mixed: Any = SplitVector(*copies, *itertools.islice(own_model.weights, len(copies), None))
            model = model._replace(weights=mixed)
        return step.network.trace_clients(step.module, model, inputs, step.stacked, self._lanes.split)


class LaneStep:
    """One local step of some lanes, in place. A `stacked` step takes many lanes at once, otherwise one."""

    def __init__(self, algorithm: Algorithm, network: ModuleNetwork, stacked: bool) -> None:
        self._algorithm, self.network, self.stacked = algorithm, network, stacked
        self.module: nn.Module = make_stackable(network.plain_module) if stacked else network.plain_module

    def __call__(self, lanes: Lanes, step_number: Tensor) -> None:
        """Take step `step_number` `[1]`: update the local states, and store what the step emits."""
        self.run_in_place(lanes, step_number, gather_step_rows(lanes, step_number))

    def update_padding_weights(self, lanes: Lanes, step_number: Tensor) -> None:
        """Does nothing: without compiling, these weights are updated at every step like the others."""

    def run_in_place(self, lanes: Lanes, step_number: Tensor, rows: LabeledRows) -> None:
        """The step, on rows that have been gathered."""
        local, emitted, losses = self.compute_step(lanes, step_number, rows)
        buffers = (lanes.emitted, lanes.losses)
        tree_map(lambda buffer, new: buffer.index_copy_(1, step_number, new[:, None]), buffers, (emitted, losses))
        # A leaf that the new state takes from another position of the old one must not be overwritten first.
        old_leaves = set(map(id, tree_leaves(lanes.local)))
        local = tree_map(lambda old, new: new.clone() if id(new) in old_leaves - {id(old)} else new, lanes.local, local)
        lanes.update_bf16_copies(local)
        tree_map(lambda old, new: old if old is new else old.copy_(new), lanes.local, local)

    def compute_step(self, lanes: Lanes, step_number: Tensor, rows: LabeledRows) -> tuple[Tree, Tree, Tensor]:
        """The local states after a step, what the step emits, and the losses before it."""
        inputs, labels = rows
        trees = (lanes.rows.moves, lanes.rows.per_client, lanes.rows.places, lanes.rows.keys)
        moves, per_client, places, key = _select_step(trees, step_number)
        inputs = inputs if is_empty(moves) else apply_crops(inputs, moves)
        batch = Batch(inputs, labels, lanes.rows.weights, per_client, places, key)
        download, network = lanes.expand_download(), CachedForward(LaneNetwork(self, lanes))
        losses = labels.new_zeros(len(labels))
        if not download.phase.scoring:
            losses = self._algorithm.monitored_loss(network, download, lanes.local, batch)
        return *self._algorithm.step(network, download, lanes.local, batch), losses


def gather_step_rows(lanes: Lanes, step_number: Tensor) -> LabeledRows:
    """The rows of a step. They are gathered outside compiled code, so that it serves data of any size."""
    indices = torch.split(_select_step(lanes.rows.rows, step_number), lanes.lanes_per_run)
    gathered = [[gather_rows(part, index) for part in data] for data, index in zip(lanes.data, indices, strict=True)]
    return LabeledRows(*(torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*gathered, strict=True)))


class CannotShareLanes(Exception):
    """Runs whose client states cannot be in one stack of lanes."""


def make_lanes(data: Sequence[LabeledRows], pending: Sequence[PendingVisit], width: int, step: LaneStep) -> Lanes:
    """Lanes of the right shapes, filled from the runs' visits; with split vectors, if the algorithm can use them.

    Only then can several runs share lanes (CannotShareLanes otherwise): a learning rate per lane can only multiply
    split vectors and numbers per lane.
    """
    network = step.network
    split, buffers = network.vector_split, network.initial_model().buffers.numel()
    # Buffers of the same length would be taken for weights.
    if len(split.lengths) > 1 and sum(split.lengths) != buffers:
        try:
            windows = find_kernel_windows(network, data[0].inputs, pending[0].download.phase.batch.total_rows)
            lanes = _allocate_lanes(data, pending, width, step, split._replace(windows=windows))
            return _add_bf16_copies(lanes, network)
        except (TypeError, AttributeError):
            # The algorithm does more with a vector than add and scale it.
            pass
    return _allocate_lanes(data, pending, width, step, VectorSplit())


def _allocate_lanes(
    data: Sequence[LabeledRows], pending: Sequence[PendingVisit], width: int, step: LaneStep, split: VectorSplit
) -> Lanes:
    """Lanes with these vectors split; a trial step gives the shapes of what steps emit."""
    visits = [(split.split_tree(visit.local, 1), visit.rows) for visit in pending]
    local, rows = tree_map(lambda *leaves: torch.cat([_repeat_first(leaf, width) for leaf in leaves]), *visits)
    if len(data) > 1 and not _is_scalable_per_lane(local):
        raise CannotShareLanes
    sent = [split.split_tree((visit.download.shared, visit.download.anchor), 1) for visit in pending]
    shared, anchor = tree_map(lambda *leaves: torch.stack([leaf[0] for leaf in leaves]), *sent)
    phase, weights = pending[0].download.phase, rows.weights
    learning_rate = weights.new_zeros(len(weights)) if len(data) > 1 else weights.new_zeros(())
    constant = Phase(0, 0, 0, learning_rate, phase.local_steps, phase.batch, phase.scoring)
    losses = weights.new_zeros(len(weights), phase.local_steps)
    lanes = Lanes(tuple(data), Download(constant, shared, anchor), local, rows, (), losses, (), split)
    first, step_number = lanes.split_lanes()[0], torch.zeros(1, dtype=torch.int64, device=weights.device)
    _, emitted, _ = step.compute_step(first, step_number, gather_step_rows(first, step_number))
    buffers = tree_map(lambda leaf: leaf.new_zeros(len(losses), phase.local_steps, *leaf.shape[1:]), emitted)
    return lanes._replace(emitted=buffers)


def _is_scalable_per_lane(local: Tree) -> bool:
    """Whether a local state consists of split vectors, buffers, and one number per lane."""
    if isinstance(local, Tensor):
        return local.ndim == 1
    if isinstance(local, Model):
        return isinstance(local.weights, SplitVector)
    return isinstance(local, SplitVector) or all(map(_is_scalable_per_lane, local))


def _add_bf16_copies(lanes: Lanes, network: ModuleNetwork) -> Lanes:
    """In mixed precision, add bfloat16 copies of the leading parts that are weights of convolutions."""
    model = _find_model(lanes.local)
    if not network.mixed or model is None:
        return lanes
    layers = dict(network.plain_module.named_modules())
    lengths = zip(network.parameter_names, lanes.split.cropped_lengths(), strict=True)
    large_layers = [layers[name.rpartition(".")[0]] for name, length in lengths if is_large(length)]
    convolutions = itertools.takewhile(lambda layer: type(layer) is nn.Conv2d, large_layers)
    copies = tuple(part.bfloat16() for part, _ in zip(model.weights, convolutions, strict=False))
    return lanes._replace(bf16_copies=copies)


def _find_model(local: Tree) -> Model | None:
    """The first model in a client's local state."""
    return next(iter(list_nodes(local, Model)), None)


def _repeat_first(leaf: Tensor, width: int) -> Tensor:
    """A copy with an entry per lane; lanes beyond the visit's clients repeat the first."""
    missing = leaf[:1].expand(max(0, width - len(leaf)), *leaf.shape[1:])
    return torch.cat([leaf[:width], missing])


def _select_step(tree: Tree, step_number: Tensor) -> Tree:
    return tree_map(lambda leaf: leaf.index_select(1, step_number).squeeze(1), tree)
