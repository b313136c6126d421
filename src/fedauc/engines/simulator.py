"""What engines that hold all clients' data have in common."""

from __future__ import annotations

from fedauc.data.clients import Clients
from fedauc.engines.draws import Draws
from fedauc.interfaces import Algorithm, Engine, Setting
from fedauc.network import ModuleNetwork
from fedauc.trees import Tree


class Simulator(Engine):
    """Client data on the network's device, keyed draws, and client memories by client."""

    def __init__(self, algorithm: Algorithm, network: ModuleNetwork, clients: Clients, setting: Setting) -> None:
        self._algorithm, self._network, self._setting = algorithm, network, setting
        self._inputs = network.cast(clients.inputs)
        self._labels = clients.labels.to(network.device, network.dtype)
        self._draws = Draws(clients, setting, algorithm.objective.draw)
        self._memories: dict[int, Tree] = {}

    def memories(self) -> dict[int, Tree]:
        """Every visited client's memory."""
        return dict(self._memories)

    def restore(self, memories: dict[int, Tree]) -> None:
        """Put memories back."""
        self._memories = dict(memories)
