"""The reference engine: a plain loop over clients and local steps. Every other engine must give its result."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from fedauc import keys
from fedauc.data.augmentation import apply_crops
from fedauc.data.clients import Clients
from fedauc.engines.crew import Crew
from fedauc.engines.simulator import CachedForward, Simulator
from fedauc.interfaces import Algorithm, Batch, Cohort, Download, Network, Setting, Upload, Visits
from fedauc.network import ModuleNetwork
from fedauc.trees import Tree, is_empty, send_to_device, tree_add, tree_at, tree_map, tree_stack

WORTH = 0.002
"""Seconds of a local step from which threads pay: below, they wait for each other's Python."""


class Visited(NamedTuple):
    """A client's visit: what it sends, its loss before the first step, its memory; the seconds of its fastest step."""

    upload: Upload
    value: Tensor
    client_state: Tree
    pace: float


@final
class LoopEngine(Simulator):
    """One client after another, one step after another, on the network's device.

    On a CPU with cores to spare, clients of slow models are visited by several threads: with the same result to the
    bit, since each client's steps stay in order and uploads are added up in the cohort's order.
    """

    name: ClassVar[str] = "loop"

    def __init__(self, algorithm: Algorithm, network: ModuleNetwork, clients: Clients, setting: Setting) -> None:
        super().__init__(algorithm, network, clients, setting)
        self._crew = Crew(network)
        self._shareable = False

    def visit(self, download: Download, cohort: Cohort) -> Visits:
        """Visit the cohort, keeping a running mean, so that memory does not grow with the cohort."""
        mean, pools, values = (), [], []
        visits = zip(cohort.clients, cohort.weights, self._visits(download, cohort), strict=True)
        for client, weight, (upload, value, client_state, _) in visits:
            share = tree_map(lambda leaf, weight=weight: weight * leaf, upload.mean)
            mean = share if is_empty(mean) else tree_add(mean, share)
            pools.append(upload.pool)
            values.append(value)
            if not is_empty(client_state):
                self._client_states[client] = client_state
        loss = None if download.phase.scoring else torch.stack(values).mean()
        return Visits(Upload(mean, tree_stack(pools)), loss)

    def _visits(self, download: Download, cohort: Cohort) -> Iterator[Visited]:
        """The cohort's visits in order: one by one until they turn out to be worth sharing."""
        tasks = [
            (download._replace(per_client=tree_at(download.per_client, place)), client)
            for place, client in enumerate(cohort.clients)
        ]
        while tasks and not (self._shareable and self._crew.size > 1):
            yield self._alone(*tasks.pop(0))
        if tasks:
            yield from self._crew.visits(lambda network, task: self._visit(network, *task), tasks)

    def _alone(self, download: Download, client: int) -> Visited:
        with self._keyed(download.phase.round, client):
            before = torch.get_rng_state()
            visited = self._visit(self._network, download, client)
            # The generator is keyed for one client at a time, so a module that draws from it cannot be shared.
            self._shareable = visited.pace > WORTH and torch.equal(before, torch.get_rng_state())
        return visited

    def _visit(self, network: Network, download: Download, client: int) -> Visited:
        client_state = (
            self._client_states[client]
            if client in self._client_states
            else self._algorithm.initial_client_state(download)
        )
        local, emitted, batches = self._algorithm.begin(download, client_state), [], self._batches(download, client)
        once, pace = CachedForward(network), math.inf
        value = self._value(once, download, local, batches[0])
        for batch in batches:
            start = time.thread_time()
            local, scores = self._algorithm.step(once, download, local, batch)
            pace = min(pace, time.thread_time() - start)
            emitted.append(scores)
        upload, client_state = self._algorithm.finish(download, client_state, local, tree_stack(emitted))
        return Visited(upload, value, client_state, pace)

    def _value(self, network: Network, download: Download, local: Tree, batch: Batch) -> Tensor:
        """The loss before the first step; a scoring visit has none."""
        if download.phase.scoring:
            return torch.full((), torch.nan)
        return self._algorithm.monitored_loss(network, download, local, batch)

    @contextmanager
    def _keyed(self, round: int, client: int) -> Iterator[None]:
        """A module's own randomness (dropout) is keyed too, and the caller's generators are left as they were."""
        seed = keys.random_integer(self._setting.seed, "module", round, client)
        cuda = self._network.device.type == "cuda"
        with torch.random.fork_rng([self._network.device] if cuda else []):
            torch.default_generator.manual_seed(seed)
            if cuda:
                torch.cuda.manual_seed(seed)
            yield

    def _batches(self, download: Download, client: int) -> list[Batch]:
        drawn = self._draws.cohort((client,), download.phase)
        index = send_to_device(drawn.rows[0], self._inputs.device)
        weights = send_to_device(drawn.weights[0], self._inputs.device).to(self._labels)
        moves = None if drawn.moves is None else send_to_device(drawn.moves[0], self._inputs.device)
        batches = []
        for step, chosen in enumerate(index):
            rows = self._inputs[chosen]
            inputs = rows if moves is None else apply_crops(rows, moves[step])
            batches.append(Batch(inputs, self._labels[chosen], weights, tree_at(download.per_client, step)))
        return batches
