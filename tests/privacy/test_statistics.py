"""Noised class totals and moments: numpy twins, sensitivity by removing every client, and the scale of the noise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedauc.class_totals import ClassTotalsEstimate
from fedauc.data.standardization import column_moments
from fedauc.data.weighting import class_scales, row_scales
from fedauc.interfaces import Census
from fedauc.privacy.statistics import (
    DEVIATION_SHARE,
    add_normal_noise,
    class_total_contributions,
    moment_contributions,
    moments_from_sum,
    noised_class_totals,
    noised_moments,
)

# Client 0 holds both classes, 1 and 2 one class each, 3 is empty, 4 is larger than MAX_ROWS in both classes.
CENSUS = Census(np.array([2, 0, 5, 0, 70]), np.array([7, 4, 0, 0, 30]))
MAX_ROWS = 10


def refuse_to_draw(count: int) -> np.ndarray:
    raise AssertionError(f"{count} numbers were drawn")


def drop_client(census: Census, client: int) -> Census:
    """The census in which a client holds nothing."""
    columns = [np.where(np.arange(len(column)) == client, 0, column) for column in census]
    return Census(*columns)


# -------------------------------------------------------------------------------------------------------- class totals


def test_without_noise_the_totals_are_those_of_the_census() -> None:
    holders = noised_class_totals(CENSUS, "clients", 0.0, MAX_ROWS, refuse_to_draw)
    assert holders.holders == (3, 3)
    assert (holders.clients, holders.rows, holders.max_rows) == (4, None, None)
    rows = noised_class_totals(CENSUS, "pooled", 0.0, MAX_ROWS, refuse_to_draw)
    assert rows.rows == (2 + 5 + 10, 7 + 4 + 10)
    assert (rows.clients, rows.holders, rows.max_rows) == (4, None, MAX_ROWS)


@pytest.mark.parametrize("multiplier", [0.0, 1.0, math.inf])
def test_the_paper_weighting_releases_nothing(multiplier: float) -> None:
    totals = noised_class_totals(CENSUS, "paper", multiplier, MAX_ROWS, refuse_to_draw)
    assert totals == ClassTotalsEstimate(4)


def test_an_infinite_multiplier_gives_public_defaults() -> None:
    for census in (CENSUS, Census(np.array([1, 1, 1, 0, 1]), np.array([9, 0, 0, 0, 0]))):
        assert noised_class_totals(census, "clients", math.inf, MAX_ROWS, refuse_to_draw).holders == (4, 4)
        assert noised_class_totals(census, "pooled", math.inf, MAX_ROWS, refuse_to_draw).rows == (40, 40)


@pytest.mark.parametrize("weighting", ["clients", "pooled", "paper"])
@pytest.mark.parametrize("max_rows", [1, 10, 1000])
def test_no_client_moves_the_class_totals_by_more_than_1(weighting: str, max_rows: int) -> None:
    released = class_total_contributions(CENSUS, weighting, max_rows).sum(axis=0)
    changes = [
        np.linalg.norm(
            released - class_total_contributions(drop_client(CENSUS, client), weighting, max_rows).sum(axis=0)
        )
        for client in range(5)
    ]
    assert max(changes) <= 1 + 1e-12
    if weighting != "paper" and max_rows <= 10:
        # Client 4 uses all of the bound, so that no noise is wasted.
        assert changes[4] == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize(("weighting", "unit"), [("clients", 1), ("pooled", 10)])
def test_the_noise_of_class_totals_has_the_documented_scale(weighting: str, unit: int) -> None:
    draw = np.random.default_rng(3).standard_normal
    # Many clients, so that the limits do not cut the noise.
    census = Census(np.arange(1000) % 2 * 3, np.full(1000, 5))
    multiplier = 4.0
    results = [noised_class_totals(census, weighting, multiplier, 10, draw) for _ in range(2000)]
    totals = np.array([result.holders if weighting == "clients" else result.rows for result in results])
    expected = np.array([500, 1000]) if weighting == "clients" else np.array([1500, 5000])
    deviation = math.sqrt(2) * multiplier * unit
    # Half of the noise of the 1,000 holders of negatives lies beyond N and is cut off.
    columns = [0] if weighting == "clients" else [0, 1]
    assert totals.mean(axis=0)[columns] == pytest.approx(expected[columns], abs=4 * deviation / math.sqrt(2000))
    assert totals.std(axis=0)[columns] == pytest.approx(deviation, rel=0.07)
    assert abs(np.corrcoef(totals.T)[0, 1]) < 0.1


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_class_totals_stay_within_their_limits(sign: float) -> None:
    for weighting, most in (("clients", 4.0), ("pooled", 40.0)):
        totals = noised_class_totals(CENSUS, weighting, 1000.0, MAX_ROWS, lambda count: np.full(count, sign))
        assert (totals.holders or totals.rows) == ((most, most) if sign > 0 else (1.0, 1.0))


# -------------------------------------------------------------------------------------------------------------- scales


def test_exact_totals_give_the_scales_of_the_census() -> None:
    totals = noised_class_totals(CENSUS, "clients", 0.0, MAX_ROWS, refuse_to_draw)
    assert class_scales(CENSUS, "clients", totals) == pytest.approx(class_scales(CENSUS, "clients"), rel=1e-12)
    totals = noised_class_totals(CENSUS, "pooled", 0.0, 1000, refuse_to_draw)
    assert class_scales(CENSUS, "pooled", totals) == pytest.approx(class_scales(CENSUS, "pooled"), rel=1e-12)
    assert row_scales(CENSUS, "pooled", totals) == pytest.approx(row_scales(CENSUS, "pooled"), rel=1e-12)
    for weighting in ("clients", "paper"):
        assert np.array_equal(row_scales(CENSUS, weighting, ClassTotalsEstimate(4)), row_scales(CENSUS, weighting))
    assert np.array_equal(class_scales(CENSUS, "paper", ClassTotalsEstimate(4)), class_scales(CENSUS, "paper"))


def test_noised_totals_give_the_documented_scales() -> None:
    totals = ClassTotalsEstimate(4, (2.5, 3.5), (20.0, 31.0), MAX_ROWS)
    expected = [[4 / 2.5, 4 / 3.5], [0, 4 / 3.5], [4 / 2.5, 0], [0, 0], [4 / 2.5, 4 / 3.5]]
    assert class_scales(CENSUS, "clients", totals).tolist() == expected
    expected = [[4 * 2 / 20, 4 * 7 / 31], [0, 4 * 4 / 31], [4 * 5 / 20, 0], [0, 0], [4 * 10 / 20, 4 * 10 / 31]]
    assert class_scales(CENSUS, "pooled", totals).tolist() == expected
    assert row_scales(CENSUS, "pooled", totals) == pytest.approx(np.array([9, 4, 5, 0, 20]) * 4 / 51, rel=1e-12)


def test_a_client_needs_only_its_own_rows_and_the_totals() -> None:
    """A site that knows nothing of the others computes the same scale."""
    totals = ClassTotalsEstimate(4, (2.5, 3.5), (20.0, 31.0), MAX_ROWS)
    for weighting in ("clients", "pooled", "paper"):
        for client in range(5):
            alone = Census(*(column[client : client + 1] for column in CENSUS))
            assert np.array_equal(
                class_scales(alone, weighting, totals)[0], class_scales(CENSUS, weighting, totals)[client]
            )
            assert row_scales(alone, weighting, totals)[0] == row_scales(CENSUS, weighting, totals)[client]


def test_scales_refuse_totals_that_were_not_released() -> None:
    with pytest.raises(ValueError, match=r"totals\.holders is None; weighting 'clients' needs a number"):
        class_scales(CENSUS, "clients", ClassTotalsEstimate(4))
    for scales in (class_scales, row_scales):
        with pytest.raises(ValueError, match=r"totals\.rows is None, totals\.max_rows None; weighting 'pooled' needs"):
            scales(CENSUS, "pooled", ClassTotalsEstimate(4))
        with pytest.raises(ValueError, match="unknown weighting 'pool': did you mean 'pooled'"):
            scales(CENSUS, "pool", ClassTotalsEstimate(4))


# ------------------------------------------------------------------------------------------------------------- moments


def draw_table(clients: int, columns: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of clients of different sizes and means; some values lie outside of [-3, 3]."""
    generator = np.random.default_rng(seed)
    client_of_row = np.repeat(np.arange(clients), generator.integers(1, 9, clients))
    generator.shuffle(client_of_row)
    shift = generator.normal(size=(clients, columns))[client_of_row]
    return shift + generator.normal(size=(len(client_of_row), columns)), client_of_row


def twin_moments(inputs: np.ndarray, client_of_row: np.ndarray, bound: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean over clients of their mean, and the deviation from their mean squares, client by client."""
    clipped = np.clip(inputs, -bound, bound)
    parts = [clipped[client_of_row == client] for client in np.unique(client_of_row)]
    mean = np.mean([part.mean(axis=0) for part in parts], axis=0)
    squares = np.mean([np.square(part).mean(axis=0) for part in parts], axis=0)
    return mean, np.sqrt(squares - np.square(mean))


@pytest.mark.parametrize("bound", [3.0, np.array([0.5, 3.0, 40.0])])
def test_without_noise_the_moments_are_those_of_clipped_clients(bound: float | np.ndarray) -> None:
    inputs, client_of_row = draw_table(40, 3)
    mean, deviation = noised_moments(inputs, client_of_row, bound, 0.0, refuse_to_draw)
    expected_mean, expected_deviation = twin_moments(inputs, client_of_row, np.broadcast_to(bound, 3))
    assert mean == pytest.approx(expected_mean, abs=1e-12)
    assert deviation == pytest.approx(expected_deviation, abs=1e-12)


def test_equal_clients_within_the_bound_give_the_moments_of_all_rows() -> None:
    inputs = np.random.default_rng(1).normal(size=(60, 4))
    mean, deviation = noised_moments(inputs, np.arange(60) % 12, 10.0, 0.0, refuse_to_draw)
    expected_mean, expected_deviation = column_moments(inputs)
    assert mean == pytest.approx(expected_mean, abs=1e-12)
    assert deviation == pytest.approx(expected_deviation, abs=1e-12)


@pytest.mark.parametrize("columns", [1, 2, 17])
def test_no_client_moves_the_moments_by_more_than_1(columns: int) -> None:
    inputs, client_of_row = draw_table(30, columns)
    # The worst client is at the bound in every column; the opposite one, and one that is 0, are cases of their own.
    inputs[client_of_row == 3] = 1e9
    inputs[client_of_row == 4] = -np.inf
    inputs[client_of_row == 5] = 0.0
    released = moment_contributions(inputs, client_of_row, 2.0).sum(axis=0)
    changes = []
    for client in range(30):
        others = client_of_row != client
        without = moment_contributions(inputs[others], client_of_row[others], 2.0).sum(axis=0)
        changes.append(np.linalg.norm(released - without))
    assert max(changes) <= 1 + 1e-12
    assert changes[3] == pytest.approx(1, rel=1e-12)
    assert changes[4] == pytest.approx(1, rel=1e-12)


def test_the_noise_of_moments_has_the_documented_scale() -> None:
    draw = np.random.default_rng(8).standard_normal
    inputs, client_of_row = draw_table(500, 3)
    bound, multiplier = np.array([1.0, 4.0, 20.0]), 0.5
    expected, _ = noised_moments(inputs, client_of_row, bound, 0.0, refuse_to_draw)
    means = np.array([noised_moments(inputs, client_of_row, bound, multiplier, draw)[0] for _ in range(1500)])
    noise = multiplier * math.sqrt(1 + 1.25 * 3) / 500 * bound
    assert means.mean(axis=0) == pytest.approx(expected, abs=float(4 * noise.max() / math.sqrt(1500)))
    assert means.std(axis=0) == pytest.approx(noise, rel=0.07)


def test_deviations_are_not_estimated_below_the_noise() -> None:
    inputs = np.full((200, 2), 1.5)
    mean, deviation = noised_moments(inputs, np.arange(200), 3.0, 0.0, refuse_to_draw)
    assert mean == pytest.approx(1.5, abs=1e-12)
    assert deviation == pytest.approx(DEVIATION_SHARE * 3.0, rel=1e-9)
    _, noised = noised_moments(inputs, np.arange(200), 3.0, 2.0, np.zeros)
    assert noised == pytest.approx(3.0 * math.sqrt(2.0 * math.sqrt(1 + 1.25 * 2) / 200), rel=1e-9)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_moments_stay_within_the_bound_under_any_noise(sign: float) -> None:
    inputs, client_of_row = draw_table(20, 3)
    mean, deviation = noised_moments(inputs, client_of_row, 2.0, 500.0, lambda count: np.full(count, sign))
    assert (np.abs(mean) <= 2).all()
    assert (deviation > 0).all()
    assert (deviation <= 2).all()


def test_an_infinite_multiplier_standardises_by_the_bound() -> None:
    inputs, client_of_row = draw_table(20, 2)
    mean, deviation = noised_moments(inputs, client_of_row, np.array([2.0, 5.0]), math.inf, refuse_to_draw)
    assert mean.tolist() == [0, 0]
    assert deviation.tolist() == [2, 5]


def test_sites_that_add_their_own_contributions_give_the_same_moments() -> None:
    inputs, client_of_row = draw_table(20, 3)
    summed = sum(
        moment_contributions(inputs[client_of_row == client], np.zeros((client_of_row == client).sum()), 2.0)[0]
        for client in range(20)
    )
    assert isinstance(summed, np.ndarray)
    noise = np.random.default_rng(5).standard_normal(7)
    expected = noised_moments(inputs, client_of_row, 2.0, 0.3, lambda count: noise[:count])
    for values, wanted in zip(moments_from_sum(summed + 0.3 * noise, 2.0, 0.3), expected, strict=True):
        assert values == pytest.approx(wanted, abs=1e-12)


# -------------------------------------------------------------------------------------------------------------- errors


def test_errors_name_the_value_and_the_remedy() -> None:
    inputs, client_of_row = draw_table(5, 2)
    for multiplier in (-1.0, math.nan):
        with pytest.raises(ValueError, match=f"multiplier is {multiplier}; it must be at least 0"):
            noised_class_totals(CENSUS, "clients", multiplier, MAX_ROWS, np.zeros)
        with pytest.raises(ValueError, match=f"multiplier is {multiplier}; it must be at least 0"):
            noised_moments(inputs, client_of_row, 1.0, multiplier, np.zeros)
    with pytest.raises(ValueError, match="unknown weighting 'pool': did you mean 'pooled'"):
        noised_class_totals(CENSUS, "pool", 1.0, MAX_ROWS, np.zeros)
    with pytest.raises(ValueError, match="max_rows is 0; it must be at least 1"):
        noised_class_totals(CENSUS, "pooled", 1.0, 0, np.zeros)
    for bound in (0.0, math.inf, np.array([1.0, 2.0, 3.0])):
        with pytest.raises(ValueError, match="it must be a number above 0, or 2 of them"):
            noised_moments(inputs, client_of_row, bound, 1.0, np.zeros)
    with pytest.raises(ValueError, match="give the client of every row"):
        noised_moments(inputs, client_of_row[1:], 1.0, 1.0, np.zeros)
    inputs[0, 1] = math.nan
    with pytest.raises(ValueError, match="column 1 holds NaN"):
        noised_moments(inputs, client_of_row, 1.0, 1.0, np.zeros)
    with pytest.raises(ValueError, match=r"draw_normal gave shape \(2,\); it must be \(3,\)"):
        add_normal_noise(np.zeros(3), 1.0, lambda count: np.zeros(count - 1))
