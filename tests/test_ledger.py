"""The ledger counts floats and bytes of the records, anchors once per stage and client."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedauc.interfaces import BatchSize, Cohort, Download, Phase, Upload
from fedauc.ledger import Ledger, Traffic
from fedauc.stages import Geometric
from small_federations import FEATURES, HOLDING, run_rounds, small_recipe

D = FEATURES + 1
"""Weights and bias of the small linear scorer."""

SCORES = 2 * (2 + 3)
"""I = 2 steps of 2 positives and 3 negatives."""

FLOATS: dict[str, tuple[int, int]] = {
    "cycp-minimax": (D + 3, D + 3),
    "coda-plus": (D + 3, D + 3),
    "cycp-pairwise": (D + SCORES, D + SCORES),
    "rs-pairwise": (D + SCORES, D + SCORES),
    "cycp-fedavg": (D, D),
    "cycp-local-pairs": (D, D),
    "a-fedavg": (D, D),
    "scaffold": (2 * D, 2 * D),
    "a-scaffold": (2 * D, 2 * D),
    "codasca": (2 * (D + 3), 2 * (D + 3)),
    "focus": (D, D),
}
"""Floats down and up per visit that learns, from the specification."""


@pytest.mark.parametrize("method", FLOATS)
def test_traffic_per_visit_is_the_specifications(method: str) -> None:
    down, up = FLOATS[method]
    rounds = run_rounds(small_recipe(method))
    last = rounds[-1].traffic
    visits = sum(len(r.cohort.clients) for r in rounds)
    scoring = sum(len(r.cohort.clients) for r in rounds if r.phase.scoring)
    # A scoring visit is sent the model alone and sends scores alone.
    assert last.floats_down == (visits - scoring) * down + scoring * D
    assert last.floats_up == (visits - scoring) * up + scoring * SCORES
    assert (last.bytes_down, last.bytes_up) == (8 * last.floats_down, 8 * last.floats_up)


@pytest.mark.parametrize(("method", "settings"), [("cycp-minimax", {}), ("codasca", {}), ("rs-minimax", {})])
def test_the_stage_reference_counts_once_per_stage_and_client(method: str, settings: dict[str, Any]) -> None:
    stages = Geometric(initial=2, scale=1.0)
    plain = run_rounds(small_recipe(method, cycles=6, stages=stages))[-1].traffic
    rounds = run_rounds(small_recipe(method, cycles=6, stages=stages, prox=0.1))
    reached = {(r.phase.stage, client) for r in rounds for client in r.cohort.clients}
    # Three stages; under cyclic and full participation all 7 clients with data come in each.
    assert method == "rs-minimax" or len(reached) == 3 * HOLDING
    # d + 2 floats: w, a and b.
    assert rounds[-1].traffic.floats_down == plain.floats_down + len(reached) * (D + 2)
    assert rounds[-1].traffic.floats_up == plain.floats_up


def download(stage: int = 0, anchor: bool = True) -> Download:
    """3 float32 shared, 2 float64 anchored, and 4 float16 of each client's own."""
    phase = Phase(0, 0, stage, 0.1, 1, BatchSize(1, 1))
    per_client = torch.zeros(2, 4, dtype=torch.float16)
    return Download(phase, (torch.zeros(3),), torch.zeros(2, dtype=torch.float64) if anchor else (), per_client)


UPLOAD = Upload(mean=torch.zeros(3), pool=(torch.zeros(2, 5, dtype=torch.float64),))
TWO = Cohort(0, (4, 7), (0.5, 0.5), absent=(1, 2, 3))


def test_floats_and_bytes_follow_the_records() -> None:
    ledger = Ledger()
    ledger.record_round(download(), UPLOAD, TWO)
    # Down per client 3 shared + 2 anchored + 4 own; up per client 3 + 5.
    assert ledger.traffic == Traffic(
        rounds=1,
        visits=2,
        absences=3,
        floats_down=2 * (3 + 2 + 4),
        floats_up=2 * (3 + 5),
        bytes_down=2 * (3 * 4 + 2 * 8 + 4 * 2),
        bytes_up=2 * (3 * 4 + 5 * 8),
    )


def test_an_anchor_is_counted_again_in_the_next_stage_and_for_a_new_client() -> None:
    ledger = Ledger()
    sent = []
    for stage, clients in [(0, (4, 7)), (0, (4, 7)), (0, (4, 5)), (1, (4, 5)), (1, (7, 5))]:
        before = ledger.traffic.floats_down
        ledger.record_round(download(stage), UPLOAD, TWO._replace(clients=clients))
        sent.append((ledger.traffic.floats_down - before - 2 * (3 + 4)) // 2)
    # New clients of each stage: 4 and 7, none, 5, 4 and 5, 7.
    assert sent == [2, 0, 1, 2, 1]


def test_without_an_anchor_nobody_is_marked_as_having_it() -> None:
    ledger = Ledger()
    ledger.record_round(download(anchor=False), UPLOAD, TWO)
    assert ledger.anchored == set()
    assert ledger.traffic.floats_down == 2 * (3 + 4)


def test_a_round_that_nobody_came_to_counts_as_a_round_with_absences() -> None:
    ledger = Ledger()
    ledger.record_empty_round(Cohort(0, (), (), absent=(1, 2)))
    assert ledger.traffic == Traffic(rounds=1, absences=2)


def test_a_ledger_goes_on_where_another_stood_without_sharing_it() -> None:
    one, two = Ledger(), Ledger()
    one.record_round(download(), UPLOAD, TWO)
    two.restore_from(one)
    two.record_round(download(), UPLOAD, TWO)
    assert two.traffic.floats_down == one.traffic.floats_down + 2 * (3 + 4)
    two.record_round(download(), UPLOAD, TWO._replace(clients=(8, 9)))
    assert one.anchored == {4, 7}
    assert one.traffic.rounds == 1
