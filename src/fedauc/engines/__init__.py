"""How a cohort's local steps are run. Every engine gives the reference loop's result."""

from __future__ import annotations

import logging
from functools import lru_cache

from torch import nn

from fedauc.data.clients import Clients
from fedauc.discovery import lookup, members
from fedauc.engines.batched import BatchedEngine
from fedauc.engines.kernels import Unsupported
from fedauc.engines.loop import LoopEngine
from fedauc.engines.simulator import Simulator
from fedauc.interfaces import Algorithm, Setting
from fedauc.network import ModuleNetwork

AUTO = "auto"


def engines() -> dict[str, type[Simulator]]:
    """Every engine that simulates a federation in this process, by name."""
    return members(__name__, Simulator)  # type: ignore[type-abstract]


def check_engine(name: str) -> None:
    """Refuse unknown names."""
    lookup("engine", name, {AUTO: None, **dict.fromkeys(engines())})


def make_engine(
    name: str, algorithm: Algorithm, network: ModuleNetwork, clients: Clients, setting: Setting
) -> Simulator:
    """The named engine; `auto` stacks the cohort where that is faster, and falls back to the loop."""
    if name != AUTO:
        return engines()[name](algorithm, network, clients, setting)
    reason = _resists(network)
    if reason is None:
        try:
            return BatchedEngine(algorithm, network, clients, setting)
        except Unsupported as unsupported:
            reason = unsupported.reason
    _say(type(network.plain).__name__, reason)
    return LoopEngine(algorithm, network, clients, setting)


def _resists(network: ModuleNetwork) -> str | None:
    """Why stacking would not pay, if it would not."""
    if network.device.type != "cpu":
        return "it runs on a GPU"
    if any(isinstance(module, nn.modules.conv._ConvNd) for module in network.plain.modules()):
        return "its convolutions are bound by arithmetic, which stacking on a CPU does not speed up"
    return None


@lru_cache(maxsize=64)
def _say(model: str, reason: str) -> None:
    logging.getLogger("fedauc").info("%s runs in the plain loop: %s", model, reason)
