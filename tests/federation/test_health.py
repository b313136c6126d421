"""The health checks of containers say that a site or a server is well, or why not."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedauc.federation.app_folder import create_certificates
from fedauc.federation.health import HEALTH_FILE, Pulse, find_server_problem, find_site_problem


def shift_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + seconds)


def test_a_site_is_well_while_it_hears_from_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "has not reached the server yet" in find_site_problem(tmp_path)
    pulse = Pulse(tmp_path / "state")
    pulse.wait()
    assert find_site_problem(tmp_path / "state") == ""
    shift_clock(monkeypatch, 61)
    assert "can it reach the server?" in find_site_problem(tmp_path / "state")
    pulse.wait()
    assert find_site_problem(tmp_path / "state") == ""


def test_a_site_is_well_until_the_deadline_of_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pulse = Pulse(tmp_path)
    pulse.wait()
    pulse.answer(600)
    shift_clock(monkeypatch, 650)
    assert find_site_problem(tmp_path) == ""
    shift_clock(monkeypatch, 20)
    assert find_site_problem(tmp_path)


def test_the_file_is_written_every_few_seconds_only(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path)
    pulse.wait()
    before = (tmp_path / HEALTH_FILE).stat().st_mtime_ns
    for _ in range(100):
        pulse.wait()
    assert (tmp_path / HEALTH_FILE).stat().st_mtime_ns == before
    pulse.answer(600)
    written = json.loads((tmp_path / HEALTH_FILE).read_text())
    assert written["activity"] == "answers a message"
    for _ in range(100):
        pulse.answer(600)
    assert json.loads((tmp_path / HEALTH_FILE).read_text()) == written


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"until": "soon"}'])
def test_a_damaged_file_is_a_problem_and_no_traceback(tmp_path: Path, content: str) -> None:
    (tmp_path / HEALTH_FILE).write_text(content)
    assert "cannot be read" in find_site_problem(tmp_path)


class Answer(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[http.server.HTTPServer]:
    """A server with a certificate for localhost."""
    create_certificates(tmp_path / "certificates", ["localhost"])
    running = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "certificates" / "server.pem", tmp_path / "certificates" / "server.key")
    running.socket = context.wrap_socket(running.socket, server_side=True)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def test_a_server_is_well_if_its_certificate_is_trusted(
    server: http.server.HTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, certificate = f"localhost:{server.server_port}", tmp_path / "certificates" / "ca.pem"
    assert find_server_problem(address, certificate) == ""
    create_certificates(tmp_path / "foreign", ["localhost"])
    assert "CERTIFICATE_VERIFY_FAILED" in find_server_problem(address, tmp_path / "foreign" / "ca.pem")
    monkeypatch.setattr(Answer, "status", 503)
    assert find_server_problem(address, certificate) == f"{address} answers with the status 503"
    assert "cannot be reached" in find_server_problem("localhost:9", certificate)
    assert "write HOST:PORT" in find_server_problem("localhost", certificate)
