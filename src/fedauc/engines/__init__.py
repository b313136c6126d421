"""How a cohort's local steps are run. Every engine gives the reference loop's result."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import NamedTuple

from torch import nn

from fedauc.data.clients import Clients
from fedauc.discovery import lookup, members
from fedauc.engines.batched import BatchedEngine
from fedauc.engines.compiled import CompiledEngine
from fedauc.engines.kernels import Unsupported
from fedauc.engines.loop import LoopEngine
from fedauc.engines.simulator import Simulator
from fedauc.interfaces import Algorithm, Setting
from fedauc.network import ModuleNetwork

AUTO = "auto"

COMPILE_FROM = 200_000
"""Local steps of a run from which compiling, which takes some ten seconds the first time, pays."""


def engines() -> dict[str, type[Simulator]]:
    """Every engine that simulates a federation in this process, by name."""
    return members(__name__, Simulator)  # type: ignore[type-abstract]


def check_engine(name: str) -> None:
    """Refuse unknown names."""
    lookup("engine", name, {AUTO: None, **dict.fromkeys(engines())})


class Parts(NamedTuple):
    """What an engine is made of, and how many local steps the plan holds."""

    algorithm: Algorithm
    network: ModuleNetwork
    clients: Clients
    setting: Setting
    steps: int


def make_engine(name: str, parts: Parts) -> Simulator:
    """The named engine; `auto` stacks the cohort where that is faster, and compiles it for long runs."""
    if name != AUTO:
        return engines()[name](*parts[:-1])
    reason = _resists(parts.network)
    candidates: list[type[Simulator]] = [] if reason else [BatchedEngine]
    if candidates and parts.steps >= COMPILE_FROM:
        candidates.insert(0, CompiledEngine)
    for kind in candidates:
        try:
            return kind(*parts[:-1])
        except Unsupported as unsupported:
            reason = unsupported.reason
    _say(type(parts.network.plain).__name__, str(reason))
    return LoopEngine(*parts[:-1])


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
