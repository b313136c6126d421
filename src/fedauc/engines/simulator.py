"""What all engines that simulate a federation in this process have in common."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fedauc.data.clients import Clients
from fedauc.engines.draws import Draws
from fedauc.interfaces import Algorithm, Engine, ForwardPass, Model, Network, Setting
from fedauc.network import ModuleNetwork
from fedauc.trees import Tree
from fedauc.uploads import UploadPipeline


class Simulator(Engine):
    """Holds all clients' data on the network's device, the keyed draws of batches, and every client's state."""

    def __init__(
        self,
        algorithm: Algorithm,
        network: ModuleNetwork,
        clients: Clients,
        setting: Setting,
        uploads: UploadPipeline | None = None,
    ) -> None:
        self._algorithm, self._network, self._setting = algorithm, network, setting
        self._uploads = uploads or UploadPipeline()
        self._inputs = network.cast_inputs(clients.inputs)
        self._labels = clients.labels.to(network.device, network.dtype)
        kind = algorithm.objective.batch_kind
        self._draws = Draws(clients, setting, kind, algorithm.needs_places, algorithm.needs_keys)
        self._client_states: dict[int, Tree] = {}

    def use_noise_seed(self, seed: int) -> None:
        """Draw the noise of local steps from another seed: everyone who knows the seed can subtract the noise."""
        self._draws.noise_seed = seed

    def client_states(self) -> dict[int, Tree]:
        """The state of every client that was visited."""
        return dict(self._client_states)

    def restore_client_states(self, client_states: dict[int, Tree]) -> None:
        """Continue with these client states."""
        self._client_states = dict(client_states)


class CachedForward(Network):
    """A network that keeps its last forward pass: the loss and the step that follows it need the same one."""

    def __init__(self, inner: Network) -> None:
        self._inner = inner
        self._last: tuple[Tensor, Tensor, ForwardPass] | None = None

    def forward_pass(self, model: Model, inputs: Tensor) -> ForwardPass:
        """The last pass if it had the same weights and inputs, a new pass otherwise."""
        if self._last is not None and self._last[0] is model.weights and self._last[1] is inputs:
            return self._last[2]
        forward_pass = self._inner.forward_pass(model, inputs)
        self._last = (model.weights, inputs, forward_pass)
        return forward_pass


def count_cores() -> int:
    """Cores that this process may use; the processes of one torchrun share theirs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@contextmanager
def limit_torch_threads(wanted: bool) -> Iterator[None]:
    """Let torch use one thread, if wanted: for small operations, sharing the work costs more than it saves."""
    threads = torch.get_num_threads() if wanted else 1
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
