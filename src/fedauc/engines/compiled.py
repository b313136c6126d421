"""The compiled engine: the batched engine whose steps are compiled, several to a call.

Small models are bound by the cost of starting operations, not by arithmetic. Compiling takes seconds, so `auto` chooses
this engine for long runs only; the choice depends on the configuration alone, so that a resumed run makes it again. The
step size is an input of the compiled function, so that a new stage needs no new compilation.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from fedauc.data.clients import Clients
from fedauc.engines.batched import Advanced, Opened, StackedEngine, VisitBatches, together
from fedauc.engines.kernels import Unsupported
from fedauc.engines.stacked import KernelNetwork
from fedauc.interfaces import Algorithm, Batch, Order, Phase, Setting
from fedauc.network import ModuleNetwork
from fedauc.trees import Tree, tree_at, tree_map

CHUNK = 16
"""Local steps in one compiled call: more would cost more to compile than it saves."""


@final
class CompiledEngine(StackedEngine):
    """Chunks of steps as one compiled function; steps that fill no chunk run as they are."""

    name: ClassVar[str] = "compiled"

    def __init__(self, algorithm: Algorithm, network: ModuleNetwork, clients: Clients, setting: Setting) -> None:
        super().__init__(algorithm, network, clients, setting)
        if not isinstance(self._stacked, KernelNetwork):
            raise Unsupported("it has layers without a kernel, which are not compiled")
        _check_compiler()
        self._compiled = torch.compile(self._steps, fullgraph=True)

    def _advance(self, opened: Opened) -> Advanced:
        order, rows = opened.order, VisitBatches(self._inputs, self._labels, opened.rows)
        step_size = torch.tensor(order.phase.step_size, dtype=self._network.dtype, device=self._network.device)
        phase = Phase(0, 0, 0, step_size, order.phase.local_steps, order.phase.batch, order.phase.scoring)
        sent = Order(phase, order.shared, order.anchor)
        local, emitted = tree_map(Tensor.contiguous, opened.local), []
        losses = self._loss(self._stacked, order, local, tree_at(rows.steps(0, 1), 0))
        for start in range(0, len(rows), CHUNK):
            batches = rows.steps(start, start + CHUNK)
            steps = self._compiled if len(batches.labels) == CHUNK else self._steps
            local, scores = steps(sent, local, batches)
            emitted += scores
        return Advanced(local, together(emitted), losses)

    def _steps(self, order: Order, local: Tree, batches: Batch) -> tuple[Tree, list[Tree]]:
        """Some steps in a row."""
        emitted = []
        for step in range(len(batches.labels)):
            local, scores = self._algorithm.step(self._stacked, order, local, tree_at(batches, step))
            emitted.append(scores)
        return local, emitted


def _check_compiler() -> None:
    """Compile something tiny: a machine without a C++ compiler says so here, not in the first round."""
    try:
        torch.compile(torch.neg, fullgraph=True)(torch.zeros(2))
    except RuntimeError as error:
        raise Unsupported(f"torch.compile does not work here ({' '.join(str(error).split()[:20])})") from error
