"""The reference engine: a plain loop over clients and local steps. Every other engine must give its result."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from queue import SimpleQueue
from typing import ClassVar, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from fedauc import keys
from fedauc.data.augmentation import apply_crops
from fedauc.data.clients import Clients
from fedauc.engines.simulator import CachedForward, Simulator, count_cores
from fedauc.interfaces import Algorithm, Batch, Cohort, Download, Network, Setting, Upload, Visits
from fedauc.network import ModuleNetwork
from fedauc.trees import Tree, is_empty, send_to_device, tree_at, tree_stack
from fedauc.uploads import UploadCollector, UploadPipeline, algorithm_state

USE_THREADS_FROM = 0.002
"""Seconds per local step from which threads pay off; with shorter steps they wait for Python's global lock."""

ONE_THREAD: ContextVar[bool] = ContextVar("one_thread", default=False)
"""Whether clients are visited in one thread however slow they are: a profiler does not see the others."""

Task = TypeVar("Task")
Result = TypeVar("Result")


class ClientVisit(NamedTuple):
    """One client's visit: its upload, its loss before the first step, its new state, seconds of its fastest step."""

    upload: Upload
    loss: Tensor
    client_state: Tree
    fastest_step: float


@final
class LoopEngine(Simulator):
    """One client after another, one step after another, on the network's device.

    On a CPU with spare cores, clients of slow models are visited by several threads. The result is the same to the bit,
    since each client's steps stay in order and uploads are added up in the cohort's order.
    """

    name: ClassVar[str] = "loop"

    def __init__(
        self,
        algorithm: Algorithm,
        network: ModuleNetwork,
        clients: Clients,
        setting: Setting,
        uploads: UploadPipeline | None = None,
    ) -> None:
        super().__init__(algorithm, network, clients, setting, uploads)
        self._thread_pool = ClientThreadPool(network)
        self._threads_pay_off = False

    def visit(self, download: Download, cohort: Cohort) -> Visits:
        """Visit the cohort and keep a running mean, so that memory does not grow with the cohort."""
        collector, losses = UploadCollector(self._uploads, download.shared), []
        visits = zip(cohort.clients, cohort.weights, self._visit_clients(download, cohort), strict=True)
        for client, weight, (upload, loss, client_state, _) in visits:
            collector.add_upload(upload, weight)
            losses.append(loss)
            if not is_empty(client_state):
                self._client_states[client] = client_state
        upload, size = collector.reduce_uploads()
        mean_loss = None if download.phase.scoring else torch.stack(losses).mean()
        return Visits(upload, mean_loss, size=size)

    def _visit_clients(self, download: Download, cohort: Cohort) -> Iterator[ClientVisit]:
        """The cohort's visits in order: one by one, until they turn out to be slow enough for threads."""
        tasks = [
            (download._replace(per_client=tree_at(download.per_client, position)), client)
            for position, client in enumerate(cohort.clients)
        ]
        while tasks and (ONE_THREAD.get() or not self._threads_pay_off or self._thread_pool.size == 1):
            yield self.visit_client(*tasks.pop(0))
        if tasks:
            yield from self._thread_pool.map_clients(lambda network, task: self._visit_client(network, *task), tasks)

    def visit_client(self, download: Download, client: int) -> ClientVisit:
        """One client's visit, whose state is not stored; the upload is what travels.

        The module's own randomness (dropout) is keyed too; the caller's generators stay as they are.
        """
        seed = keys.random_integer(self._setting.seed, "module", download.phase.round, client)
        cuda = self._network.device.type == "cuda"
        with torch.random.fork_rng([self._network.device] if cuda else []):
            torch.default_generator.manual_seed(seed)
            if cuda:
                torch.cuda.manual_seed(seed)
            generator_state = torch.get_rng_state()
            visit = self._visit_client(self._network, download, client)
            # The generator is seeded for one client at a time, so a module that draws from it cannot run in threads.
            is_deterministic = torch.equal(generator_state, torch.get_rng_state())
            self._threads_pay_off = visit.fastest_step > USE_THREADS_FROM and is_deterministic
        return visit

    def _visit_client(self, network: Network, download: Download, client: int) -> ClientVisit:
        algorithm, cached, fastest_step = self._algorithm, CachedForward(network), math.inf
        has_state = client in self._client_states
        initial_state = self._uploads.initial_client_state
        client_state = self._client_states[client] if has_state else initial_state(algorithm, download)
        local, emitted = algorithm.begin(download, algorithm_state(client_state)), []
        batches = self._draw_batches(download, client)
        loss = torch.full((), torch.nan)
        if not download.phase.scoring:
            loss = algorithm.monitored_loss(cached, download, local, batches[0])
        for batch in batches:
            start = time.thread_time()
            local, emission = algorithm.step(cached, download, local, batch)
            fastest_step = min(fastest_step, time.thread_time() - start)
            emitted.append(emission)
        key = self._uploads.make_client_keys(download.phase.round, (client,), self._network.device)
        upload, client_state = self._uploads.finish_visit(
            algorithm, download, client_state, local, tree_stack(emitted), tree_at(key, 0)
        )
        return ClientVisit(upload, loss, client_state, fastest_step)

    def _draw_batches(self, download: Download, client: int) -> list[Batch]:
        draws, device = self._draws.draw_cohort((client,), download.phase), self._inputs.device
        weights = send_to_device(draws.weights[0], device).to(self._labels)
        moves = None if draws.moves is None else send_to_device(draws.moves[0], device)
        optional = [() if drawn is None else send_to_device(drawn[0], device) for drawn in (draws.places, draws.keys)]
        batches = []
        for step, rows in enumerate(send_to_device(draws.rows[0], device)):
            inputs = self._inputs[rows] if moves is None else apply_crops(self._inputs[rows], moves[step])
            per_step = tree_at((download.per_client, *optional), step)
            batches.append(Batch(inputs, self._labels[rows], weights, *per_step))
        return batches


class ClientThreadPool:
    """Visits clients in as many threads as there are spare cores, each with its own copy of the network."""

    def __init__(self, network: ModuleNetwork) -> None:
        self._network = network
        self._copies: SimpleQueue[ModuleNetwork] = SimpleQueue()
        self.size = count_spare_cores() if network.device.type == "cpu" else 1

    def map_clients(self, visit: Callable[[ModuleNetwork, Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Every task's result, in order."""
        while self._copies.qsize() < self.size:
            # Running a module swaps weights in and out of it, so threads cannot share one.
            self._copies.put(copy.deepcopy(self._network))

        def visit_with_copy(task: Task) -> Result:
            network = self._copies.get()
            try:
                return visit(network, task)
            finally:
                self._copies.put(network)

        with ThreadPoolExecutor(self.size) as executor:
            yield from executor.map(visit_with_copy, tasks)


def count_spare_cores() -> int:
    """Cores of this process for each of torch's threads."""
    return max(1, count_cores() // torch.get_num_threads())
