"""What every participation keeps. A new file in the folder fails here until it has an example."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch

from fedauc.interfaces import Cohort, Participation, Roster, Schedule
from fedauc.participation import find_participations
from fedauc.participation.cyclic import Cyclic
from fedauc.participation.full import Full
from fedauc.participation.trace import Trace
from fedauc.participation.uniform import Uniform

# 30 clients, every tenth empty (0, 10, 20): 27 hold data. Labels 0, 1, 2 by remainder: each group holds 9.
TOTAL = 30
SIZES = np.where(np.arange(TOTAL) % 10 == 0, 0, 4)
LABELS = np.arange(TOTAL) % 3
PLAIN = Roster(SIZES)
LABELLED = Roster(SIZES, LABELS)
HOLDING = set(np.flatnonzero(SIZES).tolist())

ROUNDS = 24
# In round r the clients c with (c + r) divisible by 4 are available, empty ones among them; nobody in round 5.
RECORDED = tuple((r, c) for r in range(ROUNDS) for c in range(TOTAL) if (c + r) % 4 == 0 and r != 5)

EXAMPLES: dict[str, dict[str, Participation]] = {
    "cyclic": {
        "default": Cyclic(),
        "whole groups": Cyclic(groups=4, assignment="random"),
        "draws": Cyclic(groups=3, per_round=4),
        "sparse draws": Cyclic(groups=1, per_round=2, assignment="random"),
        "reshuffled": Cyclic(groups=5, per_round=3, assignment="random", order="reshuffled"),
        "given": Cyclic(given=(tuple(range(12)), tuple(range(12, 30))), per_round=3),
    },
    "uniform": {"default": Uniform(), "few": Uniform(per_round=2), "cycle": Uniform(groups=9)},
    "full": {"default": Full()},
    "trace": {
        "alone": Trace(rows=RECORDED, cycle_length=6),
        "repeated": Trace(rows=RECORDED[:20], cycle_length=6, repeat=True),
        "due": Trace(rows=RECORDED, schedule=Cyclic(groups=3, per_round=4)),
    },
}
CASES = [pytest.param(p, id=f"{name}-{case}") for name, cases in EXAMPLES.items() for case, p in cases.items()]
DRAWING = [case for case in CASES if "draws" in str(case.id) or case.id in ("cyclic-reshuffled", "uniform-few")]

everyone = pytest.mark.parametrize("participation", CASES)
rosters = pytest.mark.parametrize("clients", [PLAIN, LABELLED], ids=["plain", "labelled"])


def list_cohorts(schedule: Schedule, rounds: int = ROUNDS) -> list[Cohort]:
    return [schedule.cohort(round) for round in range(rounds)]


def test_every_member_has_an_example_of_its_own_type() -> None:
    members = find_participations()
    assert set(members) == set(EXAMPLES)
    assert all(type(example) is members[name] for name, cases in EXAMPLES.items() for example in cases.values())


@everyone
@rosters
def test_cohorts_are_valid(participation: Participation, clients: Roster) -> None:
    for round, cohort in enumerate(list_cohorts(participation.bind(clients, 0))):
        assert cohort.round == round
        assert all(type(client) is int for client in (*cohort.clients, *cohort.absent))
        assert list(cohort.clients) == sorted(set(cohort.clients))
        assert set(cohort.clients) | set(cohort.absent) <= HOLDING
        assert not set(cohort.clients) & set(cohort.absent)


@everyone
@rosters
def test_weights_are_equal_and_sum_to_one(participation: Participation, clients: Roster) -> None:
    for cohort in list_cohorts(participation.bind(clients, 0)):
        assert len(cohort.weights) == len(cohort.clients)
        assert len(set(cohort.weights)) <= 1
        # At most 27 terms of relative error 2**-53 each: far below 1e-14. Only an empty cohort sums to 0.
        assert sum(cohort.weights) == pytest.approx(float(bool(cohort.clients)), abs=1e-14)


@everyone
@rosters
def test_groups_split_the_clients_that_hold_data(participation: Participation, clients: Roster) -> None:
    schedule = participation.bind(clients, 0)
    listed = [client for group in schedule.groups for client in group.tolist()]
    assert sorted(listed) == sorted(HOLDING)
    assert schedule.cycle_length >= 1
    assert all(isinstance(group, np.ndarray) and group.dtype == np.int64 for group in schedule.groups)


@everyone
@rosters
def test_cohorts_are_a_pure_function_of_seed_and_round(participation: Participation, clients: Roster) -> None:
    expected = list_cohorts(participation.bind(clients, 3))
    again = participation.bind(clients, 3)
    # Backwards, twice, and out of the blue with numpy's integer: no query may depend on an earlier one.
    assert [again.cohort(round) for round in reversed(range(ROUNDS))] == expected[::-1]
    assert again.cohort(7) == again.cohort(7) == expected[7]
    fresh = participation.bind(clients, 3).cohort(np.int64(ROUNDS - 1))  # type: ignore[arg-type]
    assert fresh == expected[-1]
    assert type(fresh.round) is int


@pytest.mark.parametrize("participation", DRAWING)
def test_seeds_differ(participation: Participation) -> None:
    # 24 draws of at least 1 of 9 agree by chance with probability below 9**-24.
    assert list_cohorts(participation.bind(PLAIN, 0)) != list_cohorts(participation.bind(PLAIN, 1))


@everyone
def test_negative_rounds_are_refused_in_one_line(participation: Participation) -> None:
    schedule = participation.bind(PLAIN, 0)
    with pytest.raises(ValueError, match=r"^round is -1; it must be at least 0: rounds count from 0$"):
        schedule.cohort(-1)


@everyone
def test_clients_without_any_data_are_refused_in_one_line(participation: Participation) -> None:
    with pytest.raises(ValueError, match=r"^all 30 clients are empty; at least 1 must hold data: give it rows$"):
        participation.bind(Roster(np.zeros(TOTAL, dtype=int)), 0)


@everyone
def test_global_generators_are_untouched(participation: Participation) -> None:
    states = generator_states()
    list_cohorts(participation.bind(LABELLED, 0))
    assert generator_states() == states


def generator_states() -> tuple[object, ...]:
    legacy = repr(np.random.get_state())  # noqa: NPY002
    return random.getstate(), legacy, torch.get_rng_state().tolist()


@everyone
def test_configuration_is_frozen_hashable_and_equal_to_its_copy(participation: Participation) -> None:
    assert dataclasses.is_dataclass(participation)
    twin = dataclasses.replace(copy.deepcopy(participation))
    assert twin == participation
    assert hash(twin) == hash(participation)
    for name in [field.name for field in dataclasses.fields(participation)] or ["anything"]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(participation, name, None)


@everyone
def test_configuration_is_plain_json(participation: Participation) -> None:
    again = rebuild(type(participation), json.loads(json.dumps(dataclasses.asdict(participation))))
    assert again == participation
    assert hash(again) == hash(participation)


def rebuild(kind: type[Participation], fields: dict[str, Any]) -> Participation:
    if fields.get("schedule"):
        fields["schedule"] = rebuild(Cyclic, fields["schedule"])
    return kind(**fields)


@everyone
def test_schedules_pickle(participation: Participation) -> None:
    schedule = participation.bind(LABELLED, 0)
    assert list_cohorts(pickle.loads(pickle.dumps(schedule))) == list_cohorts(schedule)


@everyone
def test_the_roster_is_only_read(participation: Participation) -> None:
    sizes, groups = SIZES.copy(), LABELS.copy()
    sizes.flags.writeable = groups.flags.writeable = False
    list_cohorts(participation.bind(Roster(sizes, groups), 0))
