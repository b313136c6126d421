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

from fedauc.data.augment import move
from fedauc.engines.batched import Advanced, Opened, Rows, gather, widen
from fedauc.engines.convolve import stackable
from fedauc.engines.simulator import Once
from fedauc.interfaces import Algorithm, Batch, Model, Network, Order, Phase, Scored
from fedauc.network import ModuleNetwork
from fedauc.pieces import Cut, Pieces, is_large
from fedauc.trees import Tree, is_empty, tree_leaves, tree_map


class Data(NamedTuple):
    """All rows of a run's clients, on the device."""

    inputs: Tensor
    labels: Tensor


class Lanes(NamedTuple):
    """Places for the clients of one run: every leaf but the data's and the order's has a leading lane dimension.

    `rows` hold a whole visit's draws, and `emitted` and `losses` have room for every step's, `[M, I, ...]`. Vectors of
    the model's length are in pieces, as `cut` says; `light` holds bfloat16 copies of some of the model's pieces.
    """

    data: Data
    order: Order
    local: Tree
    rows: Rows
    emitted: Tree = ()
    losses: Tree = ()
    light: tuple[Tensor, ...] = ()
    cut: Cut = Cut()

    def fill(self, opened: Opened) -> None:
        """Write a visit into the lanes; those beyond its cohort keep what they had, and nobody reads them."""
        count, order, step_size = len(opened.cohort.clients), opened.order, self.order.phase.step_size
        assert isinstance(step_size, Tensor)
        step_size.fill_(order.phase.step_size)
        sent, known = self.cut.apart((order.shared, order.anchor), 1), (self.order.shared, self.order.anchor)
        tree_map(lambda old, new: old.copy_(new[0]), known, sent)
        local = self.cut.apart(opened.local, 1)
        tree_map(lambda old, new: old[:count].copy_(new), (self.local, self.rows), (local, opened.rows))
        self.lighten(self.local)

    def lighten(self, local: Tree) -> None:
        """Copy a state's weights where they are kept in bfloat16 too."""
        model = _model(local) if self.light else None
        for light, heavy in zip(self.light, model.weights if model else (), strict=False):
            light.copy_(heavy)

    def result(self, count: int) -> Advanced:
        """What the first lanes hold after the last step; the scores are kept long after the lanes move on."""
        local = self.cut.joined(tree_map(lambda leaf: leaf[:count], self.local))
        emitted = tree_map(lambda leaf: leaf[:count].clone(), self.emitted)
        return Advanced(local, emitted, self.losses[:count, 0].clone())

    def single(self) -> list[Lanes]:
        """Each lane for itself, as views."""
        mine = (self.local, self.rows, self.emitted, self.losses, self.light)
        count = len(self.losses)
        parts = [tree_map(lambda leaf, at=at: leaf[at : at + 1], mine) for at in range(count)]
        return [Lanes(self.data, self.order, *part)._replace(cut=self.cut) for part in parts]

    def tensors(self) -> list[Tensor]:
        """Every tensor but the data's."""
        return tree_leaves(self._trees())

    def holding(self, tensors: Sequence[Tensor]) -> Lanes:
        """The same lanes with other tensors."""
        given, phase = iter(tensors), self.order.phase
        step_size, shared, anchor, *rest = tree_map(lambda leaf: next(given), self._trees())
        order = Order(phase._replace(step_size=step_size), shared, anchor, self.order.own)
        return Lanes(self.data, order, *rest)._replace(cut=self.cut)

    def _trees(self) -> tuple[Tree, ...]:
        _, (phase, shared, anchor, _), *rest, _ = self
        return phase.step_size, shared, anchor, *rest


class LaneNetwork(Network):
    """A module over some lanes as pure functions: mapped over many, or for one."""

    def __init__(self, network: ModuleNetwork, stacked: bool) -> None:
        self._network, self._stacked = network, stacked
        self._module: nn.Module = stackable(network.plain) if stacked else network.plain

    def score(self, model: Model, inputs: Tensor) -> Scored:
        """One forward pass in training mode; the pullback is its transposed derivative."""
        return self._network.trace(self._module, model, inputs, self._stacked)


class LightNetwork(Network):
    """A network whose own weights are also at hand in bfloat16."""

    def __init__(self, inner: Network, lanes: Lanes) -> None:
        self._inner, self._lanes = inner, lanes

    def score(self, model: Model, inputs: Tensor) -> Scored:
        """The same numbers as casting the weights; other weights than the lanes' own are cast."""
        light, own = self._lanes.light, _model(self._lanes.local)
        if light and own is not None and model.weights is own.weights:
            mixed: Any = Pieces(*light, *itertools.islice(own.weights, len(light), None))
            model = model._replace(weights=mixed)
        return self._inner.score(model, inputs)


class Step:
    """One local step of some lanes, in place. `stacked` takes many lanes at once, otherwise each goes alone."""

    def __init__(self, algorithm: Algorithm, network: ModuleNetwork, stacked: bool) -> None:
        self._algorithm, self._lanes, self.stacked = algorithm, LaneNetwork(network, stacked), stacked
        self.network = network

    def __call__(self, lanes: Lanes, at: Tensor) -> None:
        """Step number `at` `[1]`: the state moves on, and what the step emits goes to its place."""
        self.move(lanes, at, take(lanes, at))

    def move(self, lanes: Lanes, at: Tensor, drawn: Data) -> None:
        """The step, on rows that have been gathered."""
        local, emitted, losses = self.look(lanes, at, drawn)
        lanes.lighten(local)
        tree_map(lambda old, new: old if old is new else old.copy_(new), lanes.local, local)
        room = (lanes.emitted, lanes.losses)
        tree_map(lambda old, new: old.index_copy_(1, at, new[:, None]), room, (emitted, losses))

    def look(self, lanes: Lanes, at: Tensor, drawn: Data) -> tuple[Tree, Tree, Tensor]:
        """The state after step `at`, what the step emits, and the losses before it."""
        (inputs, labels), (moves, own) = drawn, (_at(tree, at) for tree in (lanes.rows.moves, lanes.rows.own))
        batch = Batch(inputs if is_empty(moves) else move(inputs, moves), labels, lanes.rows.weights, own)
        phase, count = lanes.order.phase, len(labels)
        order = Order(phase, widen(lanes.order.shared, count), widen(lanes.order.anchor, count))
        network, losses = Once(LightNetwork(self._lanes, lanes)), labels.new_zeros(count)
        if not phase.scoring:
            losses = self._algorithm.monitor(network, order, lanes.local, batch)
        return *self._algorithm.step(network, order, lanes.local, batch), losses


def take(lanes: Lanes, at: Tensor) -> Data:
    """The rows of step `at`. Compiled code does without the data, so that it serves data of any size."""
    rows = _at(lanes.rows.rows, at)
    return Data(*(gather(part, rows) for part in lanes.data))


def make_lanes(data: Data, opened: Opened, width: int, step: Step) -> Lanes:
    """Lanes of the right shapes, filled from a visit; in pieces, if the algorithm can take that."""
    network = step.network
    # Statistics of the same length would be taken for weights.
    if len(network.cut.lengths) > 1 and sum(network.cut.lengths) != network.state().buffers.numel():
        try:
            return _lightened(_lanes(data, opened, width, step, network.cut), network)
        except (TypeError, AttributeError):
            # The rule does more with a vector than add and scale it.
            pass
    return _lanes(data, opened, width, step, Cut())


def _lanes(data: Data, opened: Opened, width: int, step: Step, cut: Cut) -> Lanes:
    """A trial step tells the shape of what steps emit."""
    apart = cut.apart((opened.local, opened.order.shared, opened.order.anchor), 1)
    local, rows = tree_map(lambda leaf: _spread(leaf, width), (apart[0], opened.rows))
    phase, weights = opened.order.phase, rows.weights
    constant = Phase(0, 0, 0, weights.new_zeros(()), phase.local_steps, phase.batch, phase.scoring)
    sent = tree_map(lambda leaf: leaf[0].clone(), apart[1:])
    lanes = Lanes(data, Order(constant, *sent), local, rows, (), weights.new_zeros(width, phase.local_steps), (), cut)
    first, at = lanes.single()[0], torch.zeros(1, dtype=torch.int64, device=weights.device)
    _, emitted, _ = step.look(first, at, take(first, at))
    room = tree_map(lambda leaf: leaf.new_zeros(width, phase.local_steps, *leaf.shape[1:]), emitted)
    return lanes._replace(emitted=room)


def _lightened(lanes: Lanes, network: ModuleNetwork) -> Lanes:
    """In mixed precision, with bfloat16 copies of the leading pieces that are weights of convolutions."""
    model = _model(lanes.local)
    if not network.mixed or model is None:
        return lanes
    layers = dict(network.plain.named_modules())
    sizes = zip(network.names, network.cut.lengths, strict=True)
    large = [layers[name.rpartition(".")[0]] for name, length in sizes if is_large(length)]
    convolutions = itertools.takewhile(lambda layer: isinstance(layer, nn.Conv2d), large)
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
