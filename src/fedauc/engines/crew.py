"""Threads that visit clients side by side, each with its own copy of the network: for models bound by arithmetic."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeVar

import torch

from fedauc.network import ModuleNetwork

Item = TypeVar("Item")
Result = TypeVar("Result")


class Crew:
    """As many threads as there are cores for them. A visit's result does not depend on the thread it ran in."""

    def __init__(self, network: ModuleNetwork) -> None:
        self._network = network
        self._copies: SimpleQueue[ModuleNetwork] = SimpleQueue()
        self.size = spare_cores() if network.device.type == "cpu" else 1

    def visits(self, visit: Callable[[ModuleNetwork, Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Every item's result, in their order."""
        while self._copies.qsize() < self.size:
            # Running a module swaps weights in and out of it.
            self._copies.put(copy.deepcopy(self._network))

        def take(item: Item) -> Result:
            network = self._copies.get()
            try:
                return visit(network, item)
            finally:
                self._copies.put(network)

        with ThreadPoolExecutor(self.size) as threads:
            yield from threads.map(take, items)


def spare_cores() -> int:
    """Cores of this process for each of torch's threads."""
    return max(1, cores() // torch.get_num_threads())


def cores() -> int:
    """Cores of this process; processes of one torchrun share theirs."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, found // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@contextmanager
def one_thread(wanted: bool) -> Iterator[None]:
    """Let torch use one thread, if that is wanted: for small operations, sharing costs more than it saves."""
    threads = torch.get_num_threads() if wanted else 1
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
