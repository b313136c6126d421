"""How a cohort's local steps are run. Every engine gives the reference loop's result."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from torch import nn

from fedauc.data.clients import Clients
from fedauc.discovery import find_members, lookup
from fedauc.engines.batched import BatchedEngine
from fedauc.engines.compiled import CompiledEngine
from fedauc.engines.graphed import GraphedEngine
from fedauc.engines.kernels import Unsupported
from fedauc.engines.loop import LoopEngine
from fedauc.engines.simulator import Simulator
from fedauc.interfaces import Algorithm, Setting
from fedauc.network import ModuleNetwork

AUTO = "auto"

COMPILE_FROM = 200_000
"""Local steps of a run from which compiling, which takes some ten seconds the first time, pays."""


COMPILE_GRAPH_FROM = 8_000
"""The same on a GPU, where compiling a deep network takes about a minute; shorter runs are captured as they are."""


@functools.cache
def engines() -> dict[str, type[Simulator]]:
    """Every engine that simulates a federation in this process, by name."""
    return find_members(__name__, Simulator)  # type: ignore[type-abstract]


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
    for kind in [] if reason else _candidates(parts):
        try:
            return kind(*parts[:-1])
        except Unsupported as unsupported:
            reason = unsupported.reason
    _say(str(reason))
    return LoopEngine(*parts[:-1])


def _candidates(parts: Parts) -> list[Callable[..., Simulator]]:
    """What may run the cohort side by side, the fastest first."""
    if parts.network.device.type == "cuda":
        return [functools.partial(GraphedEngine, compiled=parts.steps >= COMPILE_GRAPH_FROM)]
    return [*([CompiledEngine] if parts.steps >= COMPILE_FROM else []), BatchedEngine]


def _resists(network: ModuleNetwork) -> str | None:
    """Why stacking would not pay, if it would not."""
    if network.device.type != "cpu":
        return None
    if any(isinstance(module, nn.modules.conv._ConvNd) for module in network.plain.modules()):
        return "its convolutions are bound by arithmetic, which stacking on a CPU does not speed up"
    return None


@lru_cache(maxsize=64)
def _say(reason: str) -> None:
    logging.getLogger("fedauc").info("the model runs in the plain loop: %s", reason)
