"""A simulation with the attendance that a federation has written down: who answered in time, and whose answer was late.

It is the reference for late answers, and shares no code with them: a loop over rounds in which every used visit is
computed with the download of its own round, and the mean is written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import NamedTuple, final

import torch

from fedauc.data.clients import Clients
from fedauc.engines.loop import LoopEngine
from fedauc.experiments.assembly import Assembly
from fedauc.experiments.folder import RunFolder
from fedauc.experiments.recipe import Recipe
from fedauc.interfaces import Cohort, Download, Engine, Upload, UploadSize, Visits
from fedauc.training import Round
from fedauc.trees import Tree, is_empty, tree_add, tree_at, tree_map, tree_stack
from fedauc.uploads import UploadPipeline
from federation.memory_grid import NAMES
from small_federations import assemble_small, small_federation


class RoundTrace(NamedTuple):
    """The clients whose answers a round's mean holds: those in time, and late ones with the round they answer."""

    in_time: tuple[int, ...]
    late: tuple[tuple[int, int], ...] = ()


def read_trace(folder: Path, names: Sequence[str] = NAMES) -> list[RoundTrace]:
    """The attendance in a run's folder, whose sites have these names; a skipped round holds no answers."""
    trace = []
    for line in RunFolder(folder).read_lines("attendance.jsonl"):
        late = tuple((names.index(name), answer["round"]) for name, answer in line.get("late", {}).items())
        in_time = tuple(names.index(name) for name in line["answered"])
        trace.append(RoundTrace(()) if "skipped" in line else RoundTrace(in_time, late))
    return trace


@final
class TraceEngine(Engine):
    """Visits clients as a trace says; an answer that is s rounds late counts 1 / (1 + s)^exponent times."""

    name = "trace"

    def __init__(self, visitor: LoopEngine, uploads: UploadPipeline, trace: list[RoundTrace], exponent: float) -> None:
        self._visitor, self._uploads, self._trace, self._exponent = visitor, uploads, trace, exponent
        self._late_uploads: dict[tuple[int, int], tuple[Upload, Tree]] = {}

    def visit(self, download: Download, cohort: Cohort) -> Visits:
        round = download.phase.round
        in_time, late = self._trace[round]
        used_later = {client for line in self._trace for client, answered in line.late if answered == round}
        answers = list[tuple[int, Upload, float]]()
        for client in cohort.clients:
            if client in (*in_time, *used_later):
                upload, state = self._visit(download, cohort.clients.index(client), client)
                if client in used_later:
                    self._late_uploads[client, round] = upload, state
                else:
                    answers.append((client, upload, 1.0))
                    self._keep_state(client, state)
        for client, answered in sorted(late):
            upload, state = self._late_uploads.pop((client, answered))
            answers.append((client, upload, 1 / (1 + round - answered) ** self._exponent))
            self._keep_state(client, state)
        clients = tuple(client for client, _, _ in answers)
        absent = tuple(client for client in cohort.clients if client not in clients)
        present = Cohort(round, clients, (1 / max(1, len(clients)),) * len(clients), (*cohort.absent, *absent))
        size = self._count_size([upload for _, upload, _ in answers])
        return Visits(self._average(download, answers), None, present, size)

    def _visit(self, download: Download, position: int, client: int) -> tuple[Upload, Tree]:
        single = download._replace(per_client=tree_at(download.per_client, position))
        visit = self._visitor.visit_client(single, client)
        return visit.upload, visit.client_state

    def _keep_state(self, client: int, state: Tree) -> None:
        if not is_empty(state):
            self._visitor.restore_client_states({**self._visitor.client_states(), client: state})

    def _average(self, download: Download, answers: list[tuple[int, Upload, float]]) -> Upload:
        """Σ s_m Δ_m / n, or another mean of the s_m Δ_m; scores stay those of single clients."""
        changes, pools = list[Tree](), list[Tree]()
        for _, sent, factor in answers:
            change, pool = self._uploads.decode_upload(sent, download.shared)
            changes.append(tree_map(lambda leaf, factor=factor: factor * leaf, change))
            pools.append(pool)
        if not changes or is_empty(changes[0]):
            return Upload((), tree_stack(pools) if pools else ())
        if self._uploads.mean.name != "weighted":
            weights = torch.full((len(changes),), 1 / len(changes), dtype=torch.float64)
            return Upload(self._uploads.mean.combine(tree_stack(changes), weights), tree_stack(pools))
        first, *others = [tree_map(lambda leaf: leaf * (1 / len(changes)), change) for change in changes]
        return Upload(reduce(tree_add, others, first), tree_stack(pools))

    def _count_size(self, uploads: list[Upload]) -> UploadSize | None:
        sizes = [self._uploads.measure_size(upload) for upload in uploads]
        if not sizes or sizes[0] is None:
            return None
        return UploadSize(*(sum(parts) for parts in zip(*sizes, strict=True)))

    def client_states(self) -> dict[int, Tree]:
        return self._visitor.client_states()

    def restore_client_states(self, client_states: dict[int, Tree]) -> None:
        self._visitor.restore_client_states(client_states)


def replay(recipe: Recipe, trace: list[RoundTrace], exponent: float = 0.5) -> list[Round]:
    """Every round of a simulation of the small federation with this attendance."""
    return replay_assembly(assemble_small(recipe), small_federation(), trace, exponent)


def replay_assembly(
    assembly: Assembly, clients: Clients, trace: list[RoundTrace], exponent: float = 0.5
) -> list[Round]:
    """Every round of an assembled simulation with this attendance."""
    training, network, state = assembly
    visitor = LoopEngine(training.algorithm, network, clients, training.setting, training.uploads)
    engine = TraceEngine(visitor, training.uploads, trace, exponent)
    return list(replace(training, engine=engine).rounds(state))
