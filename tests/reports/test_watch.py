"""`fedauc watch` and `fedauc board`, on runs that are finished, under way, and not yet there."""

from __future__ import annotations

import http.client
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from cli_helpers import fedauc
from fedauc.experiments.runner import Run
from fedauc.reports.board import make_server
from fedauc.reports.watch import read_watched, render_watched
from report_runs_helpers import make_config, pause_after


def render_text(path: Path) -> str:
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(render_watched(path, read_watched(path), 80))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_run_under_way_shows_rounds_and_time_left(tmp_path: Path) -> None:
    pause_after(6, Run.create(make_config(cycles=4), tmp_path / "run"))
    (run,) = read_watched(tmp_path / "run")
    assert (run.rounds, run.total, run.is_over, len(run.values)) == (6, 12, False, 2)
    assert run.phase.startswith("training, stage")
    text = render_text(tmp_path / "run")
    assert "6 of 12" in text
    assert "left" in text
    # An hour later nothing was written, and no process holds the lock.
    later = read_watched(tmp_path / "run", now=(tmp_path / "run" / "records.jsonl").stat().st_mtime + 3600)
    assert later[0].phase.startswith("not running: go on with `fedauc resume")


def test_a_comparison_fits_80_columns(comparison_folder: Path) -> None:
    text = render_text(comparison_folder)
    assert max(map(len, text.splitlines())) <= 80
    assert "2 of 2 runs are over" in text


def test_the_command_ends_when_all_runs_are_done(comparison_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = fedauc(capsys, "watch", str(comparison_folder))
    assert done.code == 0
    assert [line.split(",")[0] for line in done.out.splitlines()] == ["cycp-fedavg: done", "cycp-minimax: done"]


def test_a_folder_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    assert read_watched(tmp_path / "later") == []
    assert "waiting for" in render_text(tmp_path / "later")


class BoardClient:
    """Asks a running board."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str, **headers: str) -> tuple[int, bytes, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, content, answer.headers.get("ETag", "")


@pytest.fixture
def paused_run(tmp_path: Path) -> Path:
    pause_after(3, Run.create(make_config(cycles=3), tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def board(paused_run: Path) -> Iterator[BoardClient]:
    with make_server([paused_run], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield BoardClient(server.server_address[1])
        server.shutdown()
        thread.join()


def test_a_board_serves_new_numbers_while_a_run_goes_on(board: BoardClient, paused_run: Path) -> None:
    status, page, _ = board.get("/")
    assert status == 200
    assert b'data-live="1"' in page
    status, content, version = board.get("/data.json")
    before = json.loads(content)
    assert (status, before["finished"]) == (200, False)
    headers = {"If-None-Match": version}
    assert board.get("/data.json", **headers)[0] == 304
    Run.resume(paused_run).train_to_end()
    status, content, _ = board.get("/data.json", **headers)
    after = json.loads(content)
    assert (status, after["finished"]) == (200, True)
    points = [len(numbers["figures"]["learning-0-learning-rounds"]["data"][-1]["x"]) for numbers in (before, after)]
    assert points == [1, 3]


def test_a_board_refuses_other_hosts_and_paths(board: BoardClient) -> None:
    assert board.get("/", Host="example.org")[0] == 403
    assert board.get("/../config.json")[0] == 404


def test_a_busy_port_is_refused_in_one_line(board: BoardClient, paused_run: Path) -> None:
    with pytest.raises(ValueError, match=rf"port is {board.port}, which cannot be used .*; choose another --port"):
        make_server([paused_run], board.port)


def test_a_folder_that_does_not_exist_is_refused_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    done = fedauc(capsys, "watch", str(tmp_path / "none"))
    assert done.code == 2
    assert f"{tmp_path / 'none'} does not exist; give the folder of a run that has been started" in done.err
