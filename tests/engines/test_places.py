"""Every row of a batch knows its place among the rows of its client, so that a client can keep a value per row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fedauc.algorithms._local import sgd_step
from fedauc.algorithms.fedavg import FedAvg
from fedauc.engines import engines
from fedauc.engines.draws import Draws
from fedauc.engines.loop import LoopEngine
from fedauc.experiments.recipe import Recipe
from fedauc.federation.site_data import SiteData
from fedauc.interfaces import Batch, BatchSize, Cohort, Download, Model, Network, Upload
from fedauc.trees import Tree, is_empty, tree_sub
from fedauc.wrappers.momentum import Momentum
from small_federations import (
    EMPTY,
    assemble_small,
    record_exchanges,
    run_rounds,
    same_bits,
    small_federation,
    small_recipe,
)

CAPACITY = 10
"""No client of the small federation has more rows."""


class Local(NamedTuple):
    """The local model, and the moving average of each row's loss."""

    model: Model
    averages: Tensor


@dataclass(frozen=True, kw_only=True)
class AveragedLosses(FedAvg):
    """A row counts with the moving average of its loss, as in per-example estimators of average precision."""

    name: ClassVar[str] = "averaged-losses"
    needs_places: ClassVar[bool] = True

    def initial_client_state(self, download: Download) -> Tensor:
        return torch.zeros(CAPACITY, dtype=download.shared.weights.dtype)

    def begin(self, download: Download, client_state: Tensor) -> Local:  # type: ignore[override]
        return Local(download.shared, client_state)

    def step(self, network: Network, download: Download, local: Local, batch: Batch) -> tuple[Local, Tree]:  # type: ignore[override]
        forward = network.forward_pass(local.model, batch.inputs)
        losses = self.objective.example_loss(forward.outputs, batch.labels)
        updated = 0.5 * local.averages.gather(-1, batch.places) + 0.5 * losses
        slopes = batch.weights * updated * self.objective.example_slope(forward.outputs, batch.labels)
        weights = sgd_step(local.model.weights, forward.pullback(slopes), download.phase.learning_rate, 0.0)
        averages = local.averages.scatter(-1, batch.places, updated)
        return Local(Model(weights, forward.buffers), averages), ()

    def monitored_loss(self, network: Network, download: Download, local: Local, batch: Batch) -> Tensor:  # type: ignore[override]
        return super().monitored_loss(network, download, local.model, batch)

    def finish(self, download: Download, client_state: Tree, local: Local, emitted: Tree) -> tuple[Upload, Tree]:  # type: ignore[override]
        return Upload(mean=tree_sub(local.model, download.shared)), local.averages


def make_recipe(**changes: Any) -> Recipe:
    return replace(small_recipe("cycp-fedavg", cycles=3, **changes), algorithm=AveragedLosses())


@pytest.mark.parametrize("kind", ["classes", "rows"])
def test_places_number_the_rows_of_a_client_with_its_positives_first(kind: Any) -> None:
    clients, training = small_federation(), assemble_small(small_recipe("cycp-fedavg")).training
    draws = Draws(clients, training.setting, kind, needs_places=True)
    numbers = [client for client in range(len(clients)) if client != EMPTY]
    phase = training.plan.phase(0)._replace(local_steps=20, batch=BatchSize(3, 4))
    drawn = draws.draw_cohort(numbers, phase)
    assert drawn.places is not None
    for client, rows, places in zip(numbers, drawn.rows, drawn.places, strict=True):
        own_rows = np.concatenate([clients.positives(client), clients.negatives(client)])
        np.testing.assert_array_equal(own_rows[places], rows)
        assert set(places.ravel()) == set(range(len(own_rows)))
    without = Draws(clients, training.setting, kind).draw_cohort(numbers, phase)
    assert without.places is None
    np.testing.assert_array_equal(without.rows, drawn.rows)


def test_an_algorithm_that_asks_for_no_places_gets_none() -> None:
    seen: list[Tree] = []

    class Watching(FedAvg):
        def step(self, network: Network, download: Download, local: Any, batch: Batch) -> Any:
            seen.append(batch.places)
            return super().step(network, download, local, batch)

    run_rounds(replace(small_recipe("cycp-fedavg", engine="loop"), algorithm=Watching()))
    assert seen
    assert all(map(is_empty, seen))


@pytest.mark.parametrize("wrappers", [(), (Momentum(),)], ids=["plain", "wrapped"])
@pytest.mark.parametrize(
    "engine",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "compiled")) for name in sorted(set(engines()) - {"loop"})],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
def test_every_engine_keeps_the_same_value_per_row(engine: str, wrappers: tuple[Momentum, ...]) -> None:
    outcomes = []
    for name in ("loop", engine):
        training, _, start = assemble_small(make_recipe(engine=name, wrappers=wrappers))
        *_, last = training.rounds(start)
        outcomes.append((last.state.server.shared, training.engine.client_states()))
    (expected, expected_states), (shared, states) = outcomes
    torch.testing.assert_close(shared, expected, rtol=1e-10, atol=1e-12)
    assert states.keys() == expected_states.keys() != set()
    for client, state in states.items():
        torch.testing.assert_close(state, expected_states[client], rtol=1e-10, atol=1e-12)


def test_the_engine_of_a_site_gives_the_same_bits() -> None:
    """A site numbers its rows as the simulation does, so its state and upload are those of the simulated client."""
    recipe, clients = make_recipe(engine="loop"), small_federation()
    training, network, _ = assemble_small(recipe)
    _, exchanges = record_exchanges(recipe)
    site_states: dict[int, Tree] = {}
    for download, cohort, _ in exchanges:
        simulated = training.engine.visit(download, cohort)
        parts = []
        for client in cohort.clients:
            rows = np.sort(np.concatenate([clients.positives(client), clients.negatives(client)]))
            data = SiteData.from_arrays(clients.inputs[rows], clients.labels[rows])
            only_client = data.as_only_client(client, len(clients))
            engine = LoopEngine(training.algorithm, network, only_client, training.setting)
            engine.restore_client_states({client: site_states[client]} if client in site_states else {})
            parts.append(engine.visit(download, Cohort(cohort.round, (client,), (1.0,))).upload.mean.weights)
            site_states |= engine.client_states()
        weights = zip(cohort.weights, parts, strict=True)
        torch.testing.assert_close(sum(share * part for share, part in weights), simulated.upload.mean.weights)
    states = training.engine.client_states()
    assert states.keys() == site_states.keys()
    assert all(same_bits(state, site_states[client]) for client, state in states.items())
