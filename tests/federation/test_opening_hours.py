"""A site that is closed is waited for like one that is offline; its rounds are not skipped at once."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import Any

import pytest

from fedauc.federation.exchange import CLOSED_PAUSE, Exchange, SiteClosed, SiteDeclined, read_answer
from fedauc.federation.in_process import InProcessGrid
from fedauc.federation.owner_policy import OpeningHours
from fedauc.federation.serialization import pack_payload
from fedauc.federation.server import FederatedRun
from federation.hospital_tables import make_controlled_sites, make_hospital_agreement
from federation.memory_grid import SimulatedTime

MONDAY = datetime.datetime(2026, 1, 5, 5, 0, tzinfo=datetime.UTC)
"""The virtual moment 0."""

NIGHT = "south"
"""The hospital that has opening hours."""


def train_hospitals(folder: Path, hours: str, trained: float, **policy: Any) -> tuple[FederatedRun, SimulatedTime]:
    """Register at the virtual second 0 and begin training at another one; one hospital is open at these hours."""
    sites, time = make_controlled_sites(folder / "sites"), SimulatedTime()
    closing: Any = sites[NIGHT]
    closing._policy = dataclasses.replace(closing._policy, hours=OpeningHours((hours,)))
    closing._now = lambda: MONDAY + datetime.timedelta(seconds=time.now)
    agreement = make_hospital_agreement(**policy)
    agreement = dataclasses.replace(agreement, policy=dataclasses.replace(agreement.policy, poll_interval=0.5))
    exchange = Exchange(InProcessGrid(sites), agreement.sites, agreement.policy, time.make_clock())
    run = FederatedRun.create(agreement, exchange, folder / "run")
    time.now = max(time.now, trained)
    run.train_to_end()
    return run, time


def test_a_run_waits_until_a_site_opens(tmp_path: Path) -> None:
    """The site opens an hour after the run has begun, and is asked twice for its table, not all the time."""
    run, time = train_hospitals(tmp_path, "mon 06:00-24:00", 0.0, deadline=7200.0, registration_deadline=7200.0)
    assert 3600 <= time.now < 3700
    attendance = run.folder.read_result()["attendance"]
    assert attendance[NIGHT] == {"answered": 2, "absent": 0, "refused": 0}
    log = (tmp_path / "sites" / NIGHT / "state" / "audit.jsonl").read_text()
    assert log.count("hours.open") == 1


def test_a_site_that_stays_closed_is_absent_after_the_deadline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, time = train_hospitals(tmp_path, "mon 00:00-05:30", 1800.0, deadline=900.0, patience=99)
    lines = [line["absent"] for line in run.folder.read_lines("attendance.jsonl")]
    missed = [line[NIGHT] for line in lines if NIGHT in line]
    assert missed == ["the site reports: this site answers mon 00:00-05:30 (UTC)"] * 2
    assert time.now >= 1800.0 + 2 * 900.0
    assert "is asked again when it opens" in caplog.text


def test_where_offline_groups_are_skipped_a_closed_site_is_not_waited_for(tmp_path: Path) -> None:
    run, time = train_hospitals(
        tmp_path, "mon 00:00-05:30", 1800.0, deadline=900.0, on_group_offline="skip", patience=99
    )
    assert time.now < 1800.0 + 900.0
    assert run.folder.read_result()["attendance"][NIGHT] == {"answered": 0, "absent": 0, "refused": 2}


@pytest.mark.parametrize("opens_in", [-1.0, "soon", float("inf"), None])
def test_only_a_number_of_seconds_says_when_a_site_opens(opens_in: object) -> None:
    refusal = {"kind": "refusal", "reason": "closed", "opens_in": opens_in}
    with pytest.raises(SiteDeclined) as declined:
        read_answer(pack_payload(refusal), "visit")
    assert not isinstance(declined.value, SiteClosed)
    with pytest.raises(SiteClosed):
        read_answer(pack_payload({**refusal, "opens_in": CLOSED_PAUSE}), "visit")
