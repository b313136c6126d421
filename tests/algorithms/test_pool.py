"""The pool of passive scores: who is in it, in which proportion, and how it is drawn from."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from fedauc.algorithms import _pool
from fedauc.algorithms._pool import RoundScores, draw_passive_scores, rebuild_pool, resample_systematically
from fedauc.algorithms.pairwise import Pairwise
from fedauc.interfaces import BatchSize, Census, Cohort, Phase, Setting
from fedauc.objectives.kinds import Passive

BATCH = BatchSize(2, 3)
CENSUS = Census(np.array([4, 0, 1, 0]), np.array([2, 8, 0, 0]))
"""Client 0 holds both classes, 1 lacks positives, 2 lacks negatives, 3 is empty."""

NONE = Passive(torch.zeros(0), torch.zeros(0))


def make_setting(weighting: str = "clients", census: Census = CENSUS) -> Setting:
    return Setting(seed=1, cycle_length=2, batch=BATCH, census=census, weighting=weighting)


def make_phase(round: int = 0, local_steps: int = 2) -> Phase:
    return Phase(round, 0, 0, 0.1, local_steps, BATCH)


def tagged_scores(*shape: int, client: int, side: int, extra: int = 0) -> Tensor:
    """Scores that say whose they are: 100 client + 10 side + place."""
    scores = 100 * client + 10 * side + torch.arange(int(np.prod(shape)), dtype=torch.float64).reshape(shape)
    return scores if not extra else scores[..., None].expand(*shape, extra)


def round_scores(*clients: int, extra: int = 0) -> RoundScores:
    """One round's scores of 2 steps of 2 positives and 3 negatives."""
    positives = torch.stack([tagged_scores(2, 2, client=c, side=1, extra=extra) for c in clients])
    negatives = torch.stack([tagged_scores(2, 3, client=c, side=0, extra=extra) for c in clients])
    return RoundScores(torch.tensor(clients), Passive(positives, negatives))


@pytest.mark.parametrize("weighting", ["clients", "paper"])
def test_only_holders_of_a_class_enter_its_pool(weighting: str) -> None:
    pool = rebuild_pool(make_setting(weighting), [round_scores(0, 1), round_scores(2)], make_phase(), NONE)
    # Clients 0 and 2 hold positives (10, 11, 12, 13 each), 0 and 1 negatives (0 to 5 each).
    assert pool.positives.tolist() == [10, 11, 12, 13, 210, 211, 212, 213]
    assert pool.negatives.tolist() == [0, 1, 2, 3, 4, 5, 100, 101, 102, 103, 104, 105]


def test_a_class_that_nobody_had_keeps_its_old_scores() -> None:
    old = Passive(torch.tensor([7.0, 8.0], dtype=torch.float64), torch.tensor([9.0], dtype=torch.float64))
    pool = rebuild_pool(make_setting(), [round_scores(1)], make_phase(), old)
    assert pool.positives.tolist() == [7, 8]
    assert pool.negatives.tolist() == [100, 101, 102, 103, 104, 105]
    nothing = rebuild_pool(make_setting(), [], make_phase(), old)
    assert (nothing.positives.tolist(), nothing.negatives.tolist()) == ([7, 8], [9])


def test_embeddings_stay_whole() -> None:
    pool = rebuild_pool(make_setting("pooled"), [round_scores(0, 1, extra=3)], make_phase(), NONE)
    assert (pool.positives.shape, pool.negatives.shape) == ((4, 3), (12, 3))
    assert all(len(set(row)) == 1 for row in pool.negatives.tolist())


def test_pooled_weighting_counts_an_entry_by_its_clients_rows() -> None:
    # Negatives: client 0 holds 2 rows and client 1 holds 8, so of 12 entries they get 12 * 2/10 and 12 * 8/10.
    shares = Counter[int]()
    for number in range(200):
        pool = rebuild_pool(make_setting("pooled"), [round_scores(0, 1)], make_phase(number), NONE)
        assert len(pool.negatives) == 12
        owners = Counter((pool.negatives // 100).int().tolist())
        assert 2 <= owners[0] <= 3
        shares.update(owners)
    # 12 * 200 = 2400 entries; the mean of client 0's 2.4 per round has standard error sqrt(0.24 / 200) = 0.035.
    assert shares[0] / 200 == pytest.approx(2.4, abs=4 * 0.035)


@pytest.mark.parametrize("weights", [[1, 1, 1, 1], [1, 2, 3, 4], [1000, 1, 1, 1], [0, 5, 0, 5, 2]], ids=str)
def test_systematic_resampling_is_within_one_of_the_expected_number(weights: list[int]) -> None:
    array = np.array(weights)
    expected = array / array.sum() * len(array)
    totals = np.zeros(len(array))
    for number in range(500):
        chosen = resample_systematically(array, (3, "resample", number))
        counts = np.bincount(chosen, minlength=len(array))
        assert len(chosen) == len(array)
        assert (np.abs(counts - expected) < 1).all()
        totals += counts
    # One draw's count has a standard deviation of at most 1/2, so the mean of 500 has 0.022.
    np.testing.assert_allclose(totals / 500, expected, atol=4 * 0.0224)


def test_equal_weights_resample_to_every_entry_once() -> None:
    assert sorted(resample_systematically(np.full(7, 3), ("any",)).tolist()) == list(range(7))


def pool_of(size: int) -> Passive:
    return Passive(torch.arange(size, dtype=torch.float64), torch.arange(size, dtype=torch.float64) + 1000)


def test_a_client_draws_without_replacement_until_the_pool_is_exhausted() -> None:
    cohort = Cohort(0, (0, 2), (0.5, 0.5))
    # 7 steps of 2 and 3: 14 positives and 21 negatives from 10 each: every entry once (twice), then a reshuffle.
    passive = draw_passive_scores(make_setting(), pool_of(10), cohort, make_phase(local_steps=7))
    assert (passive.positives.shape, passive.negatives.shape) == ((2, 7, 2), (2, 7, 3))
    for client in range(2):
        first, second = passive.positives[client].flatten().tolist(), passive.negatives[client].flatten().tolist()
        assert sorted(first[:10]) == list(range(10))
        assert len(set(first[10:])) == 4
        assert sorted(second[:10]) == sorted(second[10:20]) == list(range(1000, 1010))


def test_draws_differ_by_client_round_and_class_and_not_by_company() -> None:
    joint = draw_passive_scores(make_setting(), pool_of(50), Cohort(0, (0, 2), (0.5, 0.5)), make_phase())
    alone = draw_passive_scores(make_setting(), pool_of(50), Cohort(0, (2,), (1.0,)), make_phase())
    later = draw_passive_scores(make_setting(), pool_of(50), Cohort(1, (2,), (1.0,)), make_phase(1))
    assert torch.equal(joint.positives[1], alone.positives[0])
    assert not torch.equal(joint.positives[0], joint.positives[1])
    assert not torch.equal(later.positives, alone.positives)
    assert not torch.equal(alone.positives, alone.negatives[..., :2] - 1000)


def test_large_pools_are_drawn_from_for_one_client_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cohort = Cohort(0, (0, 2, 1), (0.5, 0.25, 0.25))
    embeddings = Passive(*(side[:, None] + torch.tensor([0.0, 0.5]) for side in pool_of(10)))
    for pool in (pool_of(50), embeddings):
        joint = draw_passive_scores(make_setting(), pool, cohort, make_phase())
        monkeypatch.setattr(_pool, "WORDS_PER_BLOCK", 1)
        separate = draw_passive_scores(make_setting(), pool, cohort, make_phase())
        monkeypatch.undo()
        assert all(torch.equal(*sides) for sides in zip(joint, separate, strict=True))


@pytest.mark.parametrize("extra", [(), (3,)], ids=["scores", "embeddings"])
def test_a_class_without_scores_is_drawn_as_nothing(extra: tuple[int, ...]) -> None:
    pool = Passive(torch.zeros(0, *extra), torch.ones(5, *extra))
    passive = draw_passive_scores(make_setting(), pool, Cohort(0, (0, 1), (0.5, 0.5)), make_phase())
    assert passive.positives.shape == (2, 2, 0, *extra)
    assert passive.negatives.shape == (2, 2, 3, *extra)


# ------------------------------------------------------------------------------------------------- limits of scores


def limit_by_hand(census: Census, rounds: list[RoundScores], reach: float) -> list[list[np.ndarray]]:
    """The twin: the range of each client that holds rows, medians over clients, and clipping, in plain numpy."""
    counts = (census.positives, census.negatives)
    lows, highs = dict[int, float](), dict[int, float]()
    for clients, scores in rounds:
        for position, client in enumerate(clients.tolist()):
            held = [np.asarray(side)[position] for side, rows in zip(scores, counts, strict=True) if rows[client] > 0]
            lows[client] = min([lows.get(client, np.inf), *(values.min() for values in held)])
            highs[client] = max([highs.get(client, -np.inf), *(values.max() for values in held)])
    low, high = np.median(list(lows.values())), np.median(list(highs.values()))
    slack = reach * (high - low)
    return [[np.clip(np.asarray(side), low - slack, high + slack) for side in scores] for _, scores in rounds]


def random_rounds(seed: int, scales: tuple[float, ...]) -> list[RoundScores]:
    """Two rounds; every client has a scale of its own, and client 0 comes twice."""
    rng = np.random.default_rng(seed)

    def draw(client: int, size: int) -> Tensor:
        return torch.from_numpy(scales[client] * rng.normal(size=(2, size)))

    return [
        RoundScores(
            torch.tensor(clients),
            Passive(torch.stack([draw(c, 2) for c in clients]), torch.stack([draw(c, 3) for c in clients])),
        )
        for clients in ((0, 1), (2, 3, 0))
    ]


FOUR = Census(np.array([4, 0, 1, 5]), np.array([2, 8, 0, 5]))
"""Client 1 lacks positives and client 2 negatives, so that their scores of that class say nothing."""


@pytest.mark.parametrize("reach", [0.0, 0.5, 2.0])
def test_limited_scores_are_the_twins(reach: float) -> None:
    rounds = random_rounds(7, (1.0, 2.0, 0.5, 1e6))
    limited = _pool.limit_scores(make_setting(census=FOUR), rounds, reach)
    for result, expected in zip(limited, limit_by_hand(FOUR, rounds, reach), strict=True):
        for side, values in zip(result.scores, expected, strict=True):
            np.testing.assert_array_equal(side.numpy(), values)
    # The last client's scores were a million times larger.
    assert max(float(side.abs().max()) for uploaded in limited for side in uploaded.scores) < 100


def test_two_clients_have_no_usual_range() -> None:
    rounds = random_rounds(7, (1.0, 1e6, 1.0, 1.0))[:1]
    assert _pool.limit_scores(make_setting(census=FOUR), rounds, 0.0) == rounds


def test_a_pool_is_rebuilt_from_limited_scores() -> None:
    """Client 3 holds half the positives, so that its scores are among those that are resampled."""
    rounds, setting = random_rounds(3, (1.0, 2.0, 0.5, 1e6)), make_setting("pooled", FOUR)
    pool = rebuild_pool(setting, rounds, make_phase(), NONE)
    limited = rebuild_pool(setting, rounds, make_phase(), NONE, reach=1.0)
    assert float(pool.positives.abs().max()) > 1e5
    assert float(limited.positives.abs().max()) < 100
    unlimited = rebuild_pool(setting, rounds, make_phase(), NONE, reach=1e12)
    assert unlimited.positives.tolist() == pool.positives.tolist()


def test_a_reach_needs_scores_in_the_pool() -> None:
    with pytest.raises(ValueError, match=r"pool_reach is 1, but a histogram has its range already: leave pool_reach"):
        Pairwise(pool="histogram", pool_reach=1.0)
    assert Pairwise(pool_reach=1.0).without_server_settings() == Pairwise()
