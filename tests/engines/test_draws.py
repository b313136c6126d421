"""A visit's batches: which rows, how often, and how much each counts."""

from __future__ import annotations

import numpy as np
import pytest

from fedauc.engines import draws as drawing
from fedauc.engines.draws import Draws
from fedauc.interfaces import BatchKind, BatchSize, Phase, Setting
from small_federations import HOLDING, NEGATIVES, POSITIVES, small_federation

CLIENTS = small_federation()
BATCH = BatchSize(2, 3)
BOTH, NO_POSITIVES, NO_NEGATIVES = 4, 1, 3
"""Client 4 holds 2 + 7 rows, client 1 holds 0 + 6, client 3 holds 4 + 0."""

present = pytest.mark.parametrize("client", [c for c in range(8) if POSITIVES[c] + NEGATIVES[c]])
every_weighting = pytest.mark.parametrize("weighting", ["clients", "pooled", "paper"])


def draws(draw: BatchKind = "classes", weighting: str = "clients", seed: int = 0) -> Draws:
    return Draws(CLIENTS, Setting(seed, 3, BATCH, CLIENTS.census, weighting), draw)


def phase(round: int = 0, local_steps: int = 2, batch: BatchSize = BATCH) -> Phase:
    return Phase(round, 0, 0, 0.1, local_steps, batch)


def scale(held: tuple[int, ...], client: int, weighting: str) -> float:
    """What a client's class mean counts, from the definition of each weighting."""
    if held[client] == 0:
        return 0.0
    holders, rows = sum(count > 0 for count in held), sum(held)
    return {"clients": HOLDING / holders, "pooled": HOLDING * held[client] / rows, "paper": 1.0}[weighting]


@present
@every_weighting
def test_class_weights_sum_to_the_class_scale(client: int, weighting: str) -> None:
    weights = draws(weighting=weighting).draw_visit(client, phase()).weights
    assert weights.shape == (5,)
    assert weights[:2].sum() == pytest.approx(scale(POSITIVES, client, weighting), rel=1e-12)
    assert weights[2:].sum() == pytest.approx(scale(NEGATIVES, client, weighting), rel=1e-12)
    assert len(set(weights[:2])) == len(set(weights[2:])) == 1


@present
@every_weighting
def test_row_weights_sum_to_the_row_scale(client: int, weighting: str) -> None:
    both = tuple(p + n for p, n in zip(POSITIVES, NEGATIVES, strict=True))
    weights = draws("rows", weighting).draw_visit(client, phase()).weights
    assert weights.shape == (5,)
    assert weights.sum() == pytest.approx(scale(both, client, weighting), rel=1e-12)
    assert len(set(weights)) == 1


@present
def test_rows_are_the_clients_own_and_positives_come_first(client: int) -> None:
    index = draws().draw_visit(client, phase(local_steps=6)).rows
    assert index.shape == (6, 5)
    labels = CLIENTS.labels.numpy()[index]
    client_rows = np.concatenate([CLIENTS.positives(client), CLIENTS.negatives(client)])
    assert np.isin(index, client_rows).all()
    assert (labels[:, :2] == (POSITIVES[client] > 0)).all()
    assert (labels[:, 2:] == (NEGATIVES[client] == 0)).all()


@pytest.mark.parametrize(("client", "side"), [(NO_POSITIVES, slice(0, 2)), (NO_NEGATIVES, slice(2, 5))])
@every_weighting
def test_an_absent_class_is_filled_from_the_other_at_weight_zero(client: int, side: slice, weighting: str) -> None:
    rows = draws(weighting=weighting).draw_visit(client, phase())
    assert (rows.weights[side] == 0).all()
    assert rows.weights.sum() > 0
    other = CLIENTS.labels.numpy()[rows.rows[:, side]]
    assert (other == (client == NO_NEGATIVES)).all()


def test_no_row_comes_twice_in_a_visit_that_has_enough() -> None:
    # 3 steps of 2 negatives need 6 of client 1's 6 and of client 4's 7.
    for client in (NO_POSITIVES, BOTH):
        index = draws().draw_visit(client, phase(local_steps=3, batch=BatchSize(1, 2))).rows[:, 1:]
        assert len(np.unique(index)) == 6
    # 3 steps of 3 rows need 9 of client 4's 2 + 7.
    assert len(np.unique(draws("rows").draw_visit(BOTH, phase(local_steps=3, batch=BatchSize(1, 2))).rows)) == 9


def test_a_small_client_wraps_around_after_using_every_row() -> None:
    # 4 steps of 2 positives from 2: each step has both; 7 steps of 3 negatives from 7: each three times.
    index = draws().draw_visit(BOTH, phase(local_steps=7)).rows
    positives, negatives = set(CLIENTS.positives(BOTH).tolist()), CLIENTS.negatives(BOTH)
    assert all(set(step) == positives for step in index[:, :2].tolist())
    passes = index[:, 2:].reshape(3, 7)
    assert all(sorted(one) == sorted(negatives.tolist()) for one in passes.tolist())
    assert not np.array_equal(passes[0], passes[1])


@pytest.mark.parametrize("draw", ["classes", "rows"])
def test_rows_are_a_function_of_seed_round_and_client(draw: BatchKind) -> None:
    def index(round: int = 0, seed: int = 0) -> np.ndarray:
        return draws(draw, seed=seed).draw_visit(BOTH, phase(round, local_steps=4)).rows

    assert np.array_equal(index(), index())
    assert not np.array_equal(index(), index(round=1))
    assert not np.array_equal(index(), index(seed=1))


def test_the_mean_over_clients_is_the_weightings_objective() -> None:
    # The mean over the 7 clients of scale times class mean, of row numbers, for `pooled`: the mean over all rows.
    weighted_means = [
        sum(draws(weighting="pooled").draw_visit(client, phase()).weights[:2]) * CLIENTS.positives(client).mean()
        for client in range(8)
        if POSITIVES[client]
    ]
    assert sum(weighted_means) / HOLDING == pytest.approx(np.flatnonzero(CLIENTS.labels.numpy()).mean(), rel=1e-12)


@pytest.mark.parametrize("draw", ["classes", "rows"])
def test_clients_drawn_for_one_at_a_time_draw_what_they_draw_together(
    draw: BatchKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [c for c in range(8) if POSITIVES[c] + NEGATIVES[c]]
    together = draws(draw).draw_cohort(chosen, phase(local_steps=4)).rows
    # Blocks of at most two words: fewer than any client needs.
    monkeypatch.setattr(drawing, "WORDS_PER_BLOCK", 2)
    assert np.array_equal(draws(draw).draw_cohort(chosen, phase(local_steps=4)).rows, together)
