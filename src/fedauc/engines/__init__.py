"""How a cohort's local steps are run. Every engine gives the reference loop's result."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from fedauc.data.clients import Clients
from fedauc.discovery import find_members
from fedauc.engines.batched import BatchedEngine
from fedauc.engines.compiled.engine import CompiledEngine
from fedauc.engines.cuda.engine import GraphedEngine
from fedauc.engines.kernels import Unsupported
from fedauc.engines.loop import LoopEngine
from fedauc.engines.simulator import Simulator
from fedauc.interfaces import Algorithm, Engine, Setting
from fedauc.network import ModuleNetwork
from fedauc.plugins import cache_until_registration
from fedauc.uploads import UploadPipeline

COMPILE_FROM = 200_000
"""Local steps in a run from which compiling on a CPU pays off; it takes some ten seconds the first time."""

COMPILE_GRAPH_FROM = 8_000
"""The same on a GPU, where compiling a deep network takes about a minute; shorter runs are captured uncompiled."""


@cache_until_registration
def engines() -> dict[str, type[Simulator]]:
    """Every engine that simulates a federation in this process, by name."""
    return find_members(__name__, Simulator)  # type: ignore[type-abstract]


class EngineParts(NamedTuple):
    """What an engine is made of, and the number of local steps in the run."""

    algorithm: Algorithm
    network: ModuleNetwork
    clients: Clients
    setting: Setting
    uploads: UploadPipeline
    local_steps: int


def make_engine(name: str, parts: EngineParts) -> Simulator:
    """The named engine; `auto` stacks the cohort where that is faster, and compiles its steps for long runs."""
    if name != "auto":
        return engines()[name](*parts[:-1])
    device, modules, reason = parts.network.device.type, parts.network.plain_module.modules(), ""
    # Engines that run the cohort as a stack, the fastest first.
    candidates: list[Callable[..., Simulator]] = [BatchedEngine]
    if device == "cuda":
        candidates = [functools.partial(GraphedEngine, compiled=parts.local_steps >= COMPILE_GRAPH_FROM)]
    elif device == "cpu" and any(isinstance(module, nn.modules.conv._ConvNd) for module in modules):
        candidates = []
        reason = "its convolutions are bound by arithmetic, which stacking on a CPU does not speed up"
    elif parts.local_steps >= COMPILE_FROM:
        candidates = [CompiledEngine, BatchedEngine]
    for kind in candidates:
        try:
            return kind(*parts[:-1])
        except Unsupported as unsupported:
            reason = unsupported.reason
    _log_loop_choice(reason)
    return LoopEngine(*parts[:-1])


def explain_engine(name: str, engine: Engine, local_steps: int) -> str:
    """Which engine trains a run of so many local steps, and why, in one sentence; empty where the log says it already.

    `name` is the one that the recipe asks for.
    """
    chosen = str(getattr(engine, "name", type(engine).__name__))
    if name != "auto":
        return f"the engine {chosen!r} trains them, as the configuration says"
    steps, batched = f"{local_steps:,} local steps", isinstance(engine, BatchedEngine)
    if isinstance(engine, GraphedEngine):
        return (
            f"the engine {chosen!r} trains the clients of a round together in a CUDA graph, since the device is a GPU"
        )
    if isinstance(engine, CompiledEngine):
        return f"the engine {chosen!r} trains them, since compiling pays off for {steps} ({COMPILE_FROM:,} or more)"
    if batched and local_steps >= COMPILE_FROM:
        return f"the engine {chosen!r} trains the clients of a round together, since their steps cannot be compiled"
    if batched:
        return f"the engine {chosen!r} trains the clients of a round together"
    return ""


@functools.lru_cache(maxsize=64)
def _log_loop_choice(reason: str) -> None:
    logging.getLogger("fedauc").info("the model runs in the plain loop: %s", reason)
