"""The reference engine: a plain loop over clients and local steps. Every other engine must give its result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, final

import torch
from torch import Tensor

from fedauc import keys
from fedauc.data.augment import move
from fedauc.engines.simulator import Once, Simulator
from fedauc.interfaces import Batch, Cohort, Network, Order, Upload, Visits
from fedauc.trees import Tree, is_empty, send, tree_add, tree_at, tree_map, tree_stack


@final
class LoopEngine(Simulator):
    """One client after another, one step after another, on the network's device."""

    name: ClassVar[str] = "loop"

    def visit(self, order: Order, cohort: Cohort) -> Visits:
        """Visit the cohort in turn, keeping a running mean, so that memory does not grow with the cohort."""
        mean, pools, values = (), [], []
        for place, (client, weight) in enumerate(zip(cohort.clients, cohort.weights, strict=True)):
            upload, value = self._visit(order._replace(own=tree_at(order.own, place)), client)
            share = tree_map(lambda leaf, weight=weight: weight * leaf, upload.mean)
            mean = share if is_empty(mean) else tree_add(mean, share)
            pools.append(upload.pool)
            values.append(value)
        loss = None if order.phase.scoring else torch.stack(values).mean()
        return Visits(Upload(mean, tree_stack(pools)), loss)

    def _visit(self, order: Order, client: int) -> tuple[Upload, Tensor]:
        memory = self._memories[client] if client in self._memories else self._algorithm.blank(order)
        local, emitted, batches = self._algorithm.begin(order, memory), [], self._batches(order, client)
        with self._keyed(order.phase.round, client):
            network = Once(self._network)
            value = self._value(network, order, local, batches[0])
            for batch in batches:
                local, scores = self._algorithm.step(network, order, local, batch)
                emitted.append(scores)
        upload, memory = self._algorithm.finish(order, memory, local, tree_stack(emitted))
        if not is_empty(memory):
            self._memories[client] = memory
        return upload, value

    def _value(self, network: Network, order: Order, local: Tree, batch: Batch) -> Tensor:
        """The loss before the first step; a scoring visit has none."""
        if order.phase.scoring:
            return torch.full((), torch.nan)
        return self._algorithm.monitor(network, order, local, batch)

    @contextmanager
    def _keyed(self, round: int, client: int) -> Iterator[None]:
        """A module's own randomness (dropout) is keyed too, and the caller's generators are left as they were."""
        seed = keys.integer(self._setting.seed, "module", round, client)
        cuda = self._network.device.type == "cuda"
        with torch.random.fork_rng([self._network.device] if cuda else []):
            torch.default_generator.manual_seed(seed)
            if cuda:
                torch.cuda.manual_seed(seed)
            yield

    def _batches(self, order: Order, client: int) -> list[Batch]:
        drawn = self._draws.cohort((client,), order.phase)
        index = send(drawn.rows[0], self._inputs.device)
        weights = send(drawn.weights[0], self._inputs.device).to(self._labels)
        moves = None if drawn.moves is None else send(drawn.moves[0], self._inputs.device)
        batches = []
        for step, chosen in enumerate(index):
            rows = self._inputs[chosen]
            inputs = rows if moves is None else move(rows, moves[step])
            batches.append(Batch(inputs, self._labels[chosen], weights, tree_at(order.own, step)))
        return batches
