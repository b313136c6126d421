"""What the board shows of a federation that goes on: who is awaited, who has answered, and why others have not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_helpers import fedauc
from fedauc.experiments.folder import RunFolder
from fedauc.federation import round_status
from fedauc.federation.exchange import ExchangeView, Node
from fedauc.federation.round_status import ROUND_TIMES_FILE, STATUS_FILE, StatusWriter, read_status
from fedauc.files import write_atomically
from fedauc.reports.board import ReportBoard
from fedauc.reports.operation import ABSENT, ANSWERED, NOT_ASKED, REFUSED, UNUSED, Operation, SiteRecord
from fedauc.reports.page import build_document, render_page
from fedauc.reports.report_runs import read_report_runs
from federation.memory_grid import Fault, MemoryGrid, create_run, make_agreement, make_grid
from small_federations import held_out


class Interrupted(Exception):
    """Stands for a look at the folder in the middle of a round."""


class InterruptedGrid(MemoryGrid):
    """Ends the server two simulated seconds into a round in which a site does not answer."""

    interrupted_round, interrupted_at = 7, 0.0

    def online_nodes(self) -> list[Node]:
        visits = [header["phase"]["round"] for _, header in self.sent_headers if header["kind"] == "visit"]
        if visits and visits[-1] == self.interrupted_round:
            if self.time.now >= self.interrupted_at + 2:
                raise Interrupted
        else:
            self.interrupted_at = self.time.now
        return super().online_nodes()


def make_waiting_run(home: Path) -> None:
    """A run in `home` whose server is in the middle of its eighth round."""
    grid = InterruptedGrid(make_grid(home / "sites", test=held_out()).sites, FAULTS)
    policy = {"evaluation": "histograms", "quorum": 6}
    run = create_run(make_agreement("cycp-fedavg", policy, cycles=12, participation="full"), grid, home / "run")
    with pytest.raises(Interrupted):
        run.train_to_end()


FAULTS = [
    Fault(site=6, round=2, kind="nan", times=9),
    *(Fault(site=site, round=3, kind="lost", times=9) for site in (1, 4)),
    *(Fault(site=1, round=number, kind="lost", times=9) for number in (4, 5, 6, 7)),
    Fault(site=4, round=5, kind="slow"),
]
"""Site 6 sends NaN in the third round; sites 1 and 4 are silent in the fourth, and site 1 from then on."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven of twelve rounds of all sites, of which the fourth was skipped; in the eighth, site 1 is awaited."""
    home = tmp_path_factory.mktemp("operation")
    make_waiting_run(home)
    return home


@pytest.fixture
def operation(folder: Path) -> Operation:
    (run,) = read_report_runs([folder])
    return Operation(run)


def find_site(operation: Operation, name: str) -> SiteRecord:
    return next(site for site in operation.sites if site.name == name)


def test_the_status_says_who_is_awaited_and_for_how_long(folder: Path, operation: Operation) -> None:
    status = read_status(folder / "run")
    assert (status["kind"], status["round"], status["deadline"], status["is_over"]) == ("visit", 7, 10.0, False)
    assert status["waiting"] == {"site-1": "did not answer before the deadline"}
    assert sorted(status["answered"]) == ["site-0", "site-3", "site-4", "site-5", "site-6", "site-7"]
    assert len(status["online"]) == 8
    pieces = operation.describe_waiting()
    assert "".join(text for text, since in pieces if since is None) == (
        "Round 8: the server has been waiting for the answers of a round for  of at most 10.0 s, for site-1."
        " It wrote this  ago."
    )
    assert [since for _, since in pieces if since is not None] == [status["began"], status["written"]]


def test_every_round_of_every_site_has_a_code_and_a_reason(operation: Operation) -> None:
    codes = {site.name: site.codes.tolist() for site in operation.sites}
    assert codes["site-0"] == [ANSWERED] * 3 + [UNUSED] + [ANSWERED] * 3
    assert codes["site-1"] == [ANSWERED] * 3 + [ABSENT] * 4
    assert codes["site-2"] == [NOT_ASKED] * 7
    assert codes["site-4"] == [ANSWERED] * 3 + [ABSENT] + [ANSWERED] * 3
    assert codes["site-6"] == [ANSWERED, ANSWERED, REFUSED, UNUSED] + [ANSWERED] * 3
    assert dict(operation.list_reasons()) == {
        "site-1": "did not answer before the deadline (4 rounds, last in round 7)",
        "site-4": "did not answer before the deadline (round 4)",
        "site-6": "5 of its values are NaN or infinite (round 3)",
    }
    assert (find_site(operation, "site-1").last_answer, find_site(operation, "site-2").last_answer) == (2, None)
    assert (find_site(operation, "site-1").missed_in_a_row, find_site(operation, "site-4").missed_in_a_row) == (4, 0)


def test_the_times_are_those_of_the_simulated_clock(operation: Operation) -> None:
    """A round without a missing site takes no simulated time; one with a missing site takes its deadline of 10 s."""
    seconds = [operation.times[number]["seconds"] for number in range(7)]
    assert seconds[:3] == [0.0, 0.0, 0.0]
    assert all(10.0 <= value <= 10.4 for value in seconds[3:])
    assert find_site(operation, "site-4").seconds == [0.0, 0.0, 0.0, 0.0, 2.2, 0.0]
    facts = {name: (value, below) for name, value, below in operation.list_facts()}
    assert facts["rounds done"] == ("7 of 12", "about 50.0 s left")
    assert facts["have answered"] == ("6 of 7", "missing: site-1")
    assert facts["rounds skipped"] == ("1", "last: round 4; the run stops after 3 in a row")


def test_alarms_name_what_somebody_should_look_at(operation: Operation) -> None:
    operation.census["preparation"] = {"warnings": ["column 'a' has mean 88 at site 'x'"]}
    operation.delivery = {"site-0": "delivered", "site-1": "is offline"}
    assert operation.list_alarms() == [
        "Data: column 'a' has mean 88 at site 'x'.",
        "Site 'site-2' takes no part in the run: the site reports: ValueError; see the site's log.",
        "Site 'site-1' has given no answer in its last 4 rounds: did not answer before the deadline.",
        "Site 'site-1' has not received the model: is offline. It is sent again when the run is resumed.",
    ]


def test_only_the_board_shows_it(folder: Path) -> None:
    runs = read_report_runs([folder])
    assert 'id="operation"' in render_page(runs, live=True)
    assert 'id="operation"' not in render_page(runs)
    texts = build_document(runs)["texts"]
    assert "awaited, online" in texts["operation-1"]
    # Rounds count from 1 everywhere on the page.
    assert "5 of 7 sites answered; the quorum is 6; site-1: did not answer" in texts["operation-1"]


def test_the_board_notices_a_new_status(folder: Path) -> None:
    board = ReportBoard([folder])
    version = board.read_version()
    assert board.read_version() == version
    path = folder / "run" / STATUS_FILE
    path.write_text(path.read_text() + " ")
    assert board.read_version() != version


def test_show_says_what_the_run_waits_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = fedauc(capsys, "federation", "show", str(folder)).out.splitlines()
    assert lines[0] == "unfinished, 7 of 12 rounds"
    assert "a round takes 10.0 s (median of the last 7)" in lines
    assert any(line.startswith("round 8: waiting since") and line.endswith("for site-1") for line in lines)
    assert "site-6: answered 6, absent 0, refused 1; last: 5 of its values are NaN or infinite (round 3)" in lines


def test_a_finished_run_has_no_status_and_a_time_for_every_round(tmp_path: Path) -> None:
    grid = make_grid(tmp_path / "sites", test=held_out())
    run = create_run(make_agreement("cycp-pairwise"), grid, tmp_path / "run")
    run.train_to_end()
    assert read_status(tmp_path / "run") == {}
    lines = RunFolder(tmp_path / "run").read_lines(ROUND_TIMES_FILE)
    assert [line["round"] for line in lines] == list(range(9))
    (report,) = read_report_runs([tmp_path])
    operation = Operation(report)
    assert operation.describe_waiting() == []
    assert ("rounds done", "9 of 9", "the run is done") in operation.list_facts()


def make_view(answered: int, is_over: bool = False) -> ExchangeView:
    """An exchange of three sites."""
    after = dict.fromkeys(range(answered), 0.1)
    waiting = dict.fromkeys(range(answered, 3), "was not online")
    return ExchangeView("visit", 0, 1.0, 60.0, frozenset({0, 1, 2}), after, waiting, {}, {}, is_over)


def test_the_status_is_written_no_oftener_than_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, now = list[int](), [100.0]

    def count_writes(path: Path, *chunks: bytes, is_durable: bool) -> None:
        written.append(len(json.loads(chunks[0])["answered"]))
        write_atomically(path, *chunks, is_durable=is_durable)

    monkeypatch.setattr(round_status, "write_atomically", count_writes)
    writer = StatusWriter(RunFolder(tmp_path), ["a", "b", "c"], lambda: now[0])
    for seconds, answered in ((0.0, 0), (0.1, 1), (0.7, 2), (1.0, 2), (5.0, 2), (11.0, 2), (11.1, 3)):
        now[0] = 100.0 + seconds
        writer.observe(make_view(answered, is_over=answered == 3))
    # At the beginning, after half a second with news, after ten without any, and at the end.
    assert written == [0, 2, 2, 3]


def test_a_status_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = StatusWriter(RunFolder(tmp_path / "gone"), ["a", "b", "c"])
    for _ in range(3):
        writer.observe(make_view(0, is_over=True))
        writer.write_round(0)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "the status of the run cannot be written, so that the board is out of date"
    ]
