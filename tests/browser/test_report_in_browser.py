"""The report page and the board in headless Chromium; `make test-browser` installs what they need."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedauc.experiments.runner import Run
from fedauc.federation.round_status import STATUS_FILE
from fedauc.reports.board import make_server
from fedauc.reports.page import render_page
from fedauc.reports.report_runs import read_report_runs
from report_runs_helpers import make_config, pause_after, train_comparison
from reports.test_operation import make_waiting_run

HERE = Path(__file__).parent
OPPOSITE = {"light": "dark", "dark": "light"}

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    path = folder / "report.html"
    path.write_text(render_page(read_report_runs([train_comparison(folder / "comparison")])))
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_works_in_a_browser(page: Path, width: int, scheme: str) -> None:
    command = ["node", str(HERE / "check_page.mjs"), page.as_uri(), str(width), scheme]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["messages"] == []
    assert found["requests"] == [page.as_uri()]
    assert found["theme"] == scheme
    # Two runs: 6 figures that they share, and 5 for each.
    assert sorted(found["figures"]) == sorted(found["places"])
    assert len(found["figures"]) == 16
    assert min(found["figures"].values()) > 0
    assert found["overflow"] <= 0
    assert found["violations"] == []
    assert "color-contrast" in found["passes"]
    assert found["keyboard"] == {
        "toggle": True,
        "themeAfter": OPPOSITE[scheme],
        "header": True,
        "sorted": "ascending",
        "summary": True,
        "unfolded": True,
    }
    assert found["pages"] > 10_000


@contextmanager
def serve_board(folder: Path) -> Iterator[str]:
    """A board of a folder at a free port."""
    with make_server([folder], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_the_board_of_a_federation_works_in_a_browser(tmp_path: Path, width: int, scheme: str) -> None:
    make_waiting_run(tmp_path)
    with serve_board(tmp_path) as address:
        command = ["node", str(HERE / "check_page.mjs"), address, str(width), scheme]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["messages"] == []
    assert set(found["requests"]) == {address, f"{address}data.json"}
    assert {"operation-1-attendance", "operation-1-round-times"} <= set(found["figures"])
    assert min(found["figures"].values()) > 0
    assert found["overflow"] <= 0
    assert found["violations"] == []


def test_a_board_counts_how_long_a_round_waits_and_shows_a_new_answer(tmp_path: Path) -> None:
    make_waiting_run(tmp_path)
    path = tmp_path / "run" / STATUS_FILE
    status = json.loads(path.read_text())
    path.write_text(json.dumps({**status, "began": time.time() - 3000, "written": time.time(), "deadline": 86400.0}))
    with serve_board(tmp_path) as address:
        command = ["node", str(HERE / "watch_board.mjs"), address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as browser:
            assert browser.stdin is not None
            assert browser.stdout is not None
            first = json.loads(browser.stdout.readline())["waiting"]
            assert re.search(
                r"waiting for the answers of a round for 5\d min \d+ s of at most 24 h 0 min, for site-1", first
            )
            over = {**status, "waiting": {}, "is_over": True, "round": 7}
            path.write_text(json.dumps({**over, "written": time.time()}))
            browser.stdin.write('{"waitingIsOver": true}\n')
            browser.stdin.close()
            second = json.loads(browser.stdout.readline())
            assert "the server has finished waiting for the answers of a round" in second["waiting"]
            assert second["sameDocument"]
            assert second["messages"] == []


def test_a_board_updates_itself_without_loading_the_page_again(tmp_path: Path) -> None:
    """After the second cycle the open page has a second point; the finished run has curves, for which it loads anew."""
    run = Run.create(make_config(cycles=3), tmp_path / "run")
    pause_after(3, run)
    with make_server([tmp_path / "run"], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        command = ["node", str(HERE / "watch_board.mjs"), address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as browser:
            assert browser.stdin is not None
            assert browser.stdout is not None
            first = json.loads(browser.stdout.readline())
            assert (first["points"], first["rounds"], first["hasRoc"]) == (1, "3", False)

            pause_after(6, Run.resume(tmp_path / "run"))
            browser.stdin.write('{"rounds": "6"}\n')
            browser.stdin.flush()
            second = json.loads(browser.stdout.readline())
            assert (second["points"], second["sameDocument"], second["unfolded"]) == (2, True, True)
            assert second["messages"] == []

            Run.resume(tmp_path / "run").train_to_end()
            browser.stdin.write('{"hasRoc": true, "state": "finished"}\n')
            browser.stdin.close()
            third = json.loads(browser.stdout.readline())
            assert (third["points"], third["hasRoc"], third["state"]) == (3, True, "finished")
            assert third["messages"] == []
        server.shutdown()
        thread.join()
