"""What the board shows of a federation that goes on: who is awaited, who has answered, and why others have not."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from fedauc.experiments.folder import RunFolder
from fedauc.federation import round_status
from fedauc.federation.exchange import ExchangeView
from fedauc.federation.round_status import ROUND_TIMES_FILE, STATUS_FILE, StatusWriter, read_status
from fedauc.federation.server import CENSUS_FILE
from fedauc.reports.board import ReportBoard
from fedauc.reports.operation import ABSENT, ANSWERED, NOT_ASKED, REFUSED, UNUSED, Operation
from fedauc.reports.page import build_document, render_page
from fedauc.reports.report_runs import ReportRun, read_report_runs
from federation.memory_grid import Fault, MemoryGrid, create_run, make_agreement, make_grid
from small_federations import held_out


class Interrupted(Exception):
    """Stands for a look at the folder in the middle of a round."""


class InterruptedGrid(MemoryGrid):
    """Ends the server two simulated seconds into a round in which a site does not answer."""

    interrupted_round = 7

    def online_nodes(self):  # type: ignore[no-untyped-def]
        visits = [header["phase"]["round"] for _, header in self.sent_headers if header["kind"] == "visit"]
        if visits and visits[-1] == self.interrupted_round:
            if self.time.now >= self.interrupted_at + 2:
                raise Interrupted
        else:
            self.interrupted_at = self.time.now
        return super().online_nodes()


FAULTS = [
    Fault(site=6, round=2, kind="nan", times=9),
    *(Fault(site=site, round=3, kind="lost", times=9) for site in (1, 4)),
    *(Fault(site=1, round=number, kind="lost", times=9) for number in (4, 5, 6, 7)),
    Fault(site=4, round=5, kind="slow"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve rounds of all sites, of which round 3 is skipped; the server is in round 7, where site 1 is awaited."""
    home = tmp_path_factory.mktemp("operation")
    grid = InterruptedGrid(make_grid(home / "sites", test=held_out()).sites, FAULTS)
    policy = {"evaluation": "histograms", "quorum": 6}
    run = create_run(make_agreement("cycp-fedavg", policy, cycles=12, participation="full"), grid, home / "run")
    with pytest.raises(Interrupted):
        run.train_to_end()
    census = json.loads((home / "run" / CENSUS_FILE).read_text())
    census["preparation"] = {"warnings": ["column 'creatinine' has mean 88 at site 'site-3', 1 at the median site"]}
    (home / "run" / CENSUS_FILE).write_text(json.dumps(census))
    return home


def read_one(path: Path) -> ReportRun:
    (run,) = read_report_runs([path])
    return run


@pytest.fixture
def operation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Operation:
    census = json.loads((folder / "run" / CENSUS_FILE).read_text())
    warnings = census.pop("preparation")
    run_folder = folder / "run" / CENSUS_FILE
    run_folder.write_text(json.dumps(census))
    made = Operation(read_one(folder))
    made.census["preparation"] = warnings
    run_folder.write_text(json.dumps(census))
    return made
