"""A site's resident worker: a real process behind a real socket, killed between and during visits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedauc.federation.exchange import Reply
from fedauc.federation.serialization import Payload
from fedauc.federation.server import FederatedRun
from fedauc.federation.site_worker import (
    LOCK_NAME,
    Frame,
    RequestExpired,
    SiteWorker,
    WorkerFailure,
    receive_frame,
    send_frame,
)
from fedauc.files import is_process_alive
from fedauc.locks import hold_lock
from federation.memory_grid import NAMES, MemoryGrid, make_agreement, make_exchange, make_grid

TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def worker_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import the handlers of the tests."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *filter(None, sys.path)]))


@pytest.fixture
def simple_worker(tmp_path: Path) -> Iterator[SiteWorker]:
    worker = SiteWorker("federation.worker_sites:serve_simple_requests", tmp_path / "state")
    worker.start()
    yield worker
    worker.stop()


class WorkerGrid(MemoryGrid):
    """A message service whose sites are answered by one resident worker, which is started again when it has died."""

    def __init__(self, worker: SiteWorker, folder: Path) -> None:
        super().__init__(dict.fromkeys(NAMES))  # type: ignore[arg-type]
        self.worker, self.folder, self.failures = worker, folder, list[str]()

    def _deliver_message(self, message_id: str, name: str, payload: Payload, fault: str) -> None:
        if self.worker.pid is None:
            self.worker.start()
        header = {"folder": str(self.folder), "site": name, "text": payload.header_text}
        try:
            answer = self.worker.ask(Frame(header, (payload.body.tobytes(),)), 60.0)
        except WorkerFailure as failure:
            self.failures.append(str(failure))
            self._reply_after(0.0, Reply(message_id, None, str(failure)))
            return
        body = np.frombuffer(bytes(answer.blobs[0]), np.uint8)
        self._reply_after(0.0, Reply(message_id, Payload(answer.header["text"], body)))


def read_model(out: Path) -> list[bytes]:
    with np.load(out / "model.npz", allow_pickle=False) as arrays:
        return [arrays[name].tobytes() for name in arrays.files]


def test_a_worker_killed_between_and_during_visits_changes_no_bit(tmp_path: Path) -> None:
    """CODASCA keeps client states at the sites, so a visit that left a trace would change the model."""
    agreement = make_agreement("codasca", {"evaluation": "none"}, cycles=5)
    plain = make_grid(tmp_path / "plain")
    FederatedRun.create(agreement, make_exchange(plain, agreement), tmp_path / "expected").train_to_end()
    worker, folder = SiteWorker("federation.worker_sites:serve_small_federation", tmp_path / "lock"), tmp_path / "sites"
    folder.mkdir()
    grid, rounds = WorkerGrid(worker, folder), list[int]()

    def disturb_worker(progress: object) -> None:
        rounds.append(len(rounds))
        if len(rounds) == 1 and worker.pid is not None:
            os.kill(worker.pid, signal.SIGKILL)
        elif len(rounds) in (2, 3):
            (folder / ("kill-before" if len(rounds) == 2 else "kill-after")).touch()

    try:
        run = FederatedRun.create(agreement, make_exchange(grid, agreement), tmp_path / "run")
        result = run.train_to_end(disturb_worker)
    finally:
        worker.stop()
    assert grid.failures[-2:] == ["the site's worker was ended by signal 9 (SIGKILL) while it answered"] * 2
    assert not list(folder.glob("kill-*"))
    assert all(counts["absent"] == 0 for counts in result["attendance"].values())
    assert read_model(tmp_path / "run") == read_model(tmp_path / "expected")


def test_one_process_answers_all_requests_and_is_replaced_when_it_dies(simple_worker: SiteWorker) -> None:
    blobs = (b"", bytes(1 << 22), b"rows")
    first = simple_worker.ask(Frame({"kind": "answer"}, blobs), 30.0)
    assert tuple(map(bytes, first.blobs)) == blobs
    assert simple_worker.ask(Frame({"kind": "answer"}), 30.0).header["pid"] == first.header["pid"] == simple_worker.pid
    os.kill(first.header["pid"], signal.SIGKILL)
    with pytest.raises(WorkerFailure, match="was ended by signal 9"):
        simple_worker.ask(Frame({"kind": "answer"}), 30.0)
    simple_worker.start()
    assert simple_worker.ask(Frame({"kind": "answer"}), 30.0).header["pid"] != first.header["pid"]


def test_a_failure_names_its_kind_and_quotes_no_row(simple_worker: SiteWorker) -> None:
    with pytest.raises(WorkerFailure, match=r"^the site's worker failed with ValueError; see the site's log$"):
        simple_worker.ask(Frame({"kind": "fail"}), 30.0)
    assert simple_worker.ask(Frame({"kind": "answer"}), 30.0).header["pid"] == simple_worker.pid


def test_a_worker_whose_answer_has_expired_is_stopped(simple_worker: SiteWorker) -> None:
    pid = simple_worker.ask(Frame({"kind": "answer"}), 30.0).header["pid"]
    with pytest.raises(RequestExpired, match="expired"):
        simple_worker.ask(Frame({"kind": "sleep"}), 0.2)
    assert not is_process_alive(pid)
    assert simple_worker.pid is None


def test_a_worker_without_a_handler_says_how_it_ended(tmp_path: Path) -> None:
    worker = SiteWorker("federation.worker_sites:missing", tmp_path / "state")
    worker.start()
    with pytest.raises(WorkerFailure, match="ended with exit code 1; see the site's log"):
        worker.ask(Frame({"kind": "answer"}), 30.0)
    worker.stop()


def test_a_worker_waits_for_the_folder_of_an_earlier_one(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    worker = SiteWorker("federation.worker_sites:serve_simple_requests", state)
    with hold_lock(state / LOCK_NAME, "busy"):
        worker.start()
        answers = list[Frame]()
        thread = threading.Thread(target=lambda: answers.append(worker.ask(Frame({"kind": "answer"}), 30.0)))
        thread.start()
        time.sleep(1.5)
        assert not answers
    thread.join()
    assert answers[0].header["pid"] == worker.pid
    worker.stop()


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """Even while it computes: the parent is killed, and cannot tell it."""
    code = (
        "import sys, time; from pathlib import Path; from fedauc.federation.site_worker import *\n"
        f"worker = SiteWorker('federation.worker_sites:serve_simple_requests', Path({str(tmp_path)!r}))\n"
        "worker.start(); worker.ask(Frame({'kind': 'answer'})); print(worker.pid, flush=True)\n"
        "worker.ask(Frame({'kind': 'sleep'}))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    end = time.monotonic() + 10
    while is_process_alive(pid):
        assert time.monotonic() < end, "the worker outlived its parent"
        time.sleep(0.05)
    parent.stdout.close()


def test_a_frame_that_breaks_off_or_is_too_long_is_no_frame() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_frame(ours, Frame({"kind": "answer"}, (b"one", b"two")))
        assert receive_frame(theirs) == Frame({"kind": "answer"}, (bytearray(b"one"), bytearray(b"two")))
        ours.sendall(b"\x7f" * 8)
        with pytest.raises(ValueError, match=r"a frame's header has .* bytes; at most"):
            receive_frame(theirs)
        ours.sendall(b"\0\0\0\0\0\0\0\x09{")
        ours.shutdown(socket.SHUT_WR)
        assert receive_frame(theirs) is None
