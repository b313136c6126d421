"""Lanes: fixed tensors for the clients of a visit, and the local step that moves them.

A graph reads and writes the same tensors each time: a visit is written into its lanes, the graph is replayed once per
local step, with a counter on the device that says which batch comes next, and the result is read out of the lanes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedauc.data.augmentation import apply_crops
from fedauc.engines.batched import Advanced, Opened, Rows, gather
from fedauc.engines.convolve import stackable
from fedauc.engines.simulator import CachedForward
from fedauc.engines.windows import windows
from fedauc.interfaces import Algorithm, Batch, Download, ForwardPass, Model, Network, Phase
from fedauc.network import ModuleNetwork
from fedauc.pieces import Cut, PerClientScalar, SplitVector, is_large
from fedauc.trees import Tree, is_empty, tree_leaves, tree_map


class Data(NamedTuple):
    """All rows of a run's clients, on the device."""

    inputs: Tensor
    labels: Tensor


class Lanes(NamedTuple):
    """Places for the clients of one run, or of several: a run has as many lanes as its largest cohort has clients.

    Leaves have a leading lane dimension, L, but for what runs are sent, which has an entry per run. `rows` hold a whole
    visit's draws, and `emitted` and `losses` have room for every step's, `[L, I, ...]`. Vectors of the model's length
    are in pieces, as `cut` says; `light` holds bfloat16 copies of some of the model's pieces. The learning rate is one
    number for one run, and one per lane for several.
    """

    data: tuple[Data, ...]
    download: Download
    local: Tree
    rows: Rows
    emitted: Tree = ()
    losses: Tree = ()
    light: tuple[Tensor, ...] = ()
    cut: Cut = Cut()

    @property
    def width(self) -> int:
        """Lanes of each run."""
        return len(self.losses) // len(self.data)

    def fill(self, opened: Sequence[Opened | None]) -> None:
        """Write each run's visit into its lanes; those beyond its cohort keep what they had, and nobody reads them."""
        for run, mine in enumerate(opened):
            if mine is not None:
                self._fill(run, mine)
        self.lighten(self.local)

    def _fill(self, run: int, opened: Opened) -> None:
        start, count, learning_rate = run * self.width, len(opened.cohort.clients), self.download.phase.learning_rate
        assert isinstance(learning_rate, Tensor)
        mine = learning_rate[start : start + self.width] if learning_rate.ndim else learning_rate
        mine.fill_(opened.download.phase.learning_rate)
        sent = self.cut.apart((opened.download.shared, opened.download.anchor), 1)
        tree_map(lambda old, new: old[run].copy_(new[0]), (self.download.shared, self.download.anchor), sent)
        given = (self.cut.apart(opened.local, 1), opened.rows)
        tree_map(lambda old, new: old[start : start + count].copy_(new), (self.local, self.rows), given)

    def lighten(self, local: Tree) -> None:
        """Copy a state's weights where they are kept in bfloat16 too."""
        model = _model(local) if self.light else None
        for light, heavy in zip(self.light, model.weights if model else (), strict=False):
            light.copy_(heavy)

    def result(self, run: int, count: int) -> Advanced:
        """What a run's first lanes hold after the last step; the scores are kept long after the lanes move on."""
        mine = slice(run * self.width, run * self.width + count)
        local = self.cut.joined(tree_map(lambda leaf: leaf[mine], self.local))
        emitted = self.cut.joined(tree_map(lambda leaf: leaf[mine].clone(), self.emitted))
        return Advanced(local, emitted, self.losses[mine, 0].clone())

    def single(self) -> list[Lanes]:
        """Each lane for itself, as views."""
        return [self._one(lane) for lane in range(len(self.losses))]

    def _one(self, lane: int) -> Lanes:
        run, (phase, shared, anchor, own) = lane // self.width, self.download
        mine = (self.local, self.rows, self.emitted, self.losses, self.light)
        part = tree_map(lambda leaf: leaf[lane : lane + 1], mine)
        shared, anchor = tree_map(lambda leaf: leaf[run : run + 1], (shared, anchor))
        if isinstance(phase.learning_rate, Tensor) and phase.learning_rate.ndim:
            phase = phase._replace(learning_rate=phase.learning_rate[lane])
        return Lanes((self.data[run],), Download(phase, shared, anchor, own), *part)._replace(cut=self.cut)

    def sent(self) -> Download:
        """What each lane's client was sent."""
        count, width, (phase, shared, anchor, _) = len(self.data), self.width, self.download

        def spread(leaf: Tensor) -> Tensor:
            wide = leaf[:, None].expand(count, width, *leaf.shape[1:])
            return wide.flatten(0, 1) if count > 1 else wide[0]

        each: Any = (
            PerClientScalar(phase.learning_rate)
            if isinstance(phase.learning_rate, Tensor) and phase.learning_rate.ndim
            else None
        )
        own = phase if each is None else phase._replace(learning_rate=each)
        return Download(own, *tree_map(spread, (shared, anchor)))

    def tensors(self) -> list[Tensor]:
        """Every tensor but the data's."""
        return tree_leaves(self._trees())

    def holding(self, tensors: Sequence[Tensor]) -> Lanes:
        """The same lanes with other tensors."""
        given, phase = iter(tensors), self.download.phase
        learning_rate, shared, anchor, *rest = tree_map(lambda leaf: next(given), self._trees())
        download = Download(phase._replace(learning_rate=learning_rate), shared, anchor, self.download.per_client)
        return Lanes(self.data, download, *rest)._replace(cut=self.cut)

    def _trees(self) -> tuple[Tree, ...]:
        _, (phase, shared, anchor, _), *rest, _ = self
        return phase.learning_rate, shared, anchor, *rest


class LaneNetwork(Network):
    """A module over some lanes as pure functions; their own weights may also be at hand in bfloat16."""

    def __init__(self, step: Step, lanes: Lanes) -> None:
        self._step, self._lanes = step, lanes

    def forward_pass(self, model: Model, inputs: Tensor) -> ForwardPass:
        """One forward pass in training mode; the pullback is its transposed derivative.

        The numbers are those of casting the weights; other weights than the lanes' own are cast.
        """
        light, own, step = self._lanes.light, _model(self._lanes.local), self._step
        if light and own is not None and model.weights is own.weights:
            mixed: Any = SplitVector(*light, *itertools.islice(own.weights, len(light), None))
            model = model._replace(weights=mixed)
        return step.network.trace(step.module, model, inputs, step.stacked, self._lanes.cut)


class Step:
    """One local step of some lanes, in place. `stacked` takes many lanes at once, otherwise each goes alone."""

    def __init__(self, algorithm: Algorithm, network: ModuleNetwork, stacked: bool) -> None:
        self._algorithm, self.network, self.stacked = algorithm, network, stacked
        self.module: nn.Module = stackable(network.plain) if stacked else network.plain

    def __call__(self, lanes: Lanes, at: Tensor) -> None:
        """Step number `at` `[1]`: the state moves on, and what the step emits goes to its place."""
        self.move(lanes, at, take(lanes, at))

    def settle(self, lanes: Lanes, at: Tensor) -> None:
        """Nothing is done before the first step."""

    def move(self, lanes: Lanes, at: Tensor, drawn: Data) -> None:
        """The step, on rows that have been gathered."""
        local, emitted, losses = self.look(lanes, at, drawn)
        room = (lanes.emitted, lanes.losses)
        tree_map(lambda old, new: old.index_copy_(1, at, new[:, None]), room, (emitted, losses))
        # What a state takes over from another place of the old one must not be overwritten first.
        known = set(map(id, tree_leaves(lanes.local)))
        local = tree_map(lambda old, new: new.clone() if id(new) in known - {id(old)} else new, lanes.local, local)
        lanes.lighten(local)
        tree_map(lambda old, new: old if old is new else old.copy_(new), lanes.local, local)

    def look(self, lanes: Lanes, at: Tensor, drawn: Data) -> tuple[Tree, Tree, Tensor]:
        """The state after step `at`, what the step emits, and the losses before it."""
        (inputs, labels), (moves, own) = drawn, (_at(tree, at) for tree in (lanes.rows.moves, lanes.rows.own))
        batch = Batch(inputs if is_empty(moves) else apply_crops(inputs, moves), labels, lanes.rows.weights, own)
        download, network = lanes.sent(), CachedForward(LaneNetwork(self, lanes))
        losses = labels.new_zeros(len(labels))
        if not download.phase.scoring:
            losses = self._algorithm.monitored_loss(network, download, lanes.local, batch)
        return *self._algorithm.step(network, download, lanes.local, batch), losses


def take(lanes: Lanes, at: Tensor) -> Data:
    """The rows of step `at`. Compiled code does without the data, so that it serves data of any size."""
    rows = torch.split(_at(lanes.rows.rows, at), lanes.width)
    found = [[gather(part, mine) for part in data] for data, mine in zip(lanes.data, rows, strict=True)]
    return Data(*(torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True)))


class Unshared(Exception):
    """Runs that cannot share a stack of lanes."""


def make_lanes(data: Sequence[Data], opened: Sequence[Opened], width: int, step: Step) -> Lanes:
    """Lanes of the right shapes, filled from the runs' visits; in pieces, if the algorithm can take that.

    Only then can several runs share them (Unshared otherwise): a learning rate per lane must meet vectors in pieces, or
    numbers, one per lane.
    """
    network = step.network
    # Statistics of the same length would be taken for weights.
    if len(network.cut.lengths) > 1 and sum(network.cut.lengths) != network.state().buffers.numel():
        try:
            cut = network.cut._replace(
                windows=windows(network, data[0].inputs, opened[0].download.phase.batch.total_rows)
            )
            return _lightened(_lanes(data, opened, width, step, cut), network)
        except (TypeError, AttributeError):
            # The rule does more with a vector than add and scale it.
            pass
    return _lanes(data, opened, width, step, Cut())


def _lanes(data: Sequence[Data], opened: Sequence[Opened], width: int, step: Step, cut: Cut) -> Lanes:
    """A trial step tells the shape of what steps emit."""
    given = [(cut.apart(mine.local, 1), mine.rows) for mine in opened]
    local, rows = tree_map(lambda *leaves: torch.cat([_spread(leaf, width) for leaf in leaves]), *given)
    if len(data) > 1 and not _by_number(local):
        raise Unshared
    sent = [cut.apart((mine.download.shared, mine.download.anchor), 1) for mine in opened]
    shared, anchor = tree_map(lambda *leaves: torch.stack([leaf[0] for leaf in leaves]), *sent)
    phase, weights = opened[0].download.phase, rows.weights
    learning_rate = weights.new_zeros(len(weights)) if len(data) > 1 else weights.new_zeros(())
    constant = Phase(0, 0, 0, learning_rate, phase.local_steps, phase.batch, phase.scoring)
    losses = weights.new_zeros(len(weights), phase.local_steps)
    lanes = Lanes(tuple(data), Download(constant, shared, anchor), local, rows, (), losses, (), cut)
    first, at = lanes.single()[0], torch.zeros(1, dtype=torch.int64, device=weights.device)
    _, emitted, _ = step.look(first, at, take(first, at))
    room = tree_map(lambda leaf: leaf.new_zeros(len(losses), phase.local_steps, *leaf.shape[1:]), emitted)
    return lanes._replace(emitted=room)


def _by_number(local: Tree) -> bool:
    """Whether a state is vectors in pieces, statistics, and single numbers."""
    if isinstance(local, Tensor):
        return local.ndim == 1
    if isinstance(local, Model):
        return isinstance(local.weights, SplitVector)
    return isinstance(local, SplitVector) or all(map(_by_number, local))


def _lightened(lanes: Lanes, network: ModuleNetwork) -> Lanes:
    """In mixed precision, with bfloat16 copies of the leading pieces that are weights of convolutions."""
    model = _model(lanes.local)
    if not network.mixed or model is None:
        return lanes
    layers = dict(network.plain.named_modules())
    sizes = zip(network.names, lanes.cut.inner_lengths(), strict=True)
    large = [layers[name.rpartition(".")[0]] for name, length in sizes if is_large(length)]
    convolutions = itertools.takewhile(lambda layer: type(layer) is nn.Conv2d, large)
    return lanes._replace(light=tuple(piece.bfloat16() for piece, _ in zip(model.weights, convolutions, strict=False)))


def _model(local: Tree) -> Model | None:
    """The model in a client's state."""
    if isinstance(local, Model | Tensor):
        return local if isinstance(local, Model) else None
    return next((found for child in local if (found := _model(child)) is not None), None)


def _spread(leaf: Tensor, width: int) -> Tensor:
    """A copy with as many entries as lanes; those beyond the first visit's clients repeat its first."""
    more = leaf[:1].expand(max(0, width - len(leaf)), *leaf.shape[1:])
    return torch.cat([leaf[:width], more])


def _at(tree: Tree, at: Tensor) -> Tree:
    return tree_map(lambda leaf: leaf.index_select(1, at).squeeze(1), tree)
