"""The server's process never holds a single site's update: its memory is searched while it waits.

The server runs in a process of its own and reaches the sites, which live in the test's process, through a pipe. While
it waits for an answer on the pipe it does nothing, and the test reads its writable memory. A plain run in the same
process afterwards shows that the search finds updates where there are some.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedauc.engines.loop import ClientVisit, LoopEngine
from fedauc.federation.agreement import FederationAgreement
from fedauc.federation.exchange import Exchange, Node, Reply
from fedauc.federation.serialization import Payload
from fedauc.federation.server import FederatedRun
from fedauc.interfaces import Download, Upload
from fedauc.models.mlp import MLP
from fedauc.participation.cyclic import Cyclic
from fedauc.transforms._prepared_secure_sum import PreparedSecureSum
from fedauc.transforms.secure_sum import SecureSum
from fedauc.trees import Tree
from federation.memory_grid import MemoryGrid, make_agreement, make_grid

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/PID/mem, which Linux has")

SITES = 4
WINDOW = slice(20, 28)
"""Numbers of an update that are searched for: eight in a row, from the middle of the 49."""


def agree(*transforms: SecureSum) -> FederationAgreement:
    """One round of four sites, after one of three."""
    schedule = Cyclic(given=((0, 1, 3), (4, 5, 6, 7)), assignment="given")
    policy = {"evaluation": "none", "poll_interval": 0.01, "deadline": 60.0, "registration_deadline": 60.0}
    settings: dict[str, Any] = {"cycles": 1, "participation": schedule, "transforms": transforms}
    return replace(make_agreement("cycp-fedavg", policy, **settings), model=MLP(hidden=(8,)))


# ---------------------------------------------------------------------------------------------- the server's process


class PipeGrid:
    """A grid whose every call goes through a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def online_nodes(self) -> list[Node]:
        return self._call("online_nodes")  # type: ignore[no-any-return]

    def push_message(self, node_id: int, payload: Payload, seconds: float) -> str:
        return str(self._call("push_message", node_id, payload, seconds))

    def pull_replies(self, message_ids: Sequence[str]) -> list[Reply]:
        return self._call("pull_replies", message_ids)  # type: ignore[no-any-return]

    def _call(self, name: str, *arguments: Any) -> Any:
        self._pipe.send((name, arguments))
        return self._pipe.recv()


def run_servers(pipe: Connection, folder: Path) -> None:
    """A run with secure sums, then a plain one."""
    for name, transforms in (("secure", (SecureSum(),)), ("plain", ())):
        agreement = agree(*transforms)
        exchange = Exchange(PipeGrid(pipe), agreement.sites, agreement.policy)
        FederatedRun.create(agreement, exchange, folder / name).train_to_end()
        pipe.send(("finished", (name,)))
        pipe.recv()


# ------------------------------------------------------------------------------------------------- the test's process


def read_writable_memory(process: int) -> Iterator[bytes]:
    """The contents of a process's writable mappings."""
    with Path(f"/proc/{process}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            addresses, permissions = line.split()[:2]
            if not permissions.startswith("rw"):
                continue
            start, end = (int(address, 16) for address in addresses.split("-"))
            memory.seek(start)
            try:
                yield memory.read(end - start)
            except OSError:
                continue  # A device's mapping cannot be read.


def search_memory(process: int, patterns: Sequence[bytes]) -> int:
    """How many of the patterns a process's memory holds."""
    matches = set[bytes]()
    for content in read_writable_memory(process):
        # Memory that was never used is all zeros, which no update is.
        if content.strip(b"\0"):
            matches |= {pattern for pattern in patterns if pattern in content}
    return len(matches)


class WatchedSites:
    """Sites behind a pipe that answer one at a time; the server's memory is searched at chosen moments."""

    def __init__(self, grid: MemoryGrid, updates: list[Tensor], count: int) -> None:
        self._grid, self._updates, self._count = grid, updates, count
        self._delivered: set[str] = set()
        self.matches: dict[str, int] = {}

    def serve(self, pipe: Connection, process: int) -> None:
        """Answer the server until its run is finished."""
        while True:
            name, arguments = pipe.recv()
            moment = self._name_moment(name, arguments)
            if moment and moment not in self.matches:
                patterns = [update[WINDOW].numpy().tobytes() for update in self._updates]
                self.matches[moment] = search_memory(process, patterns)
            if name == "finished":
                pipe.send(None)
                return
            if name == "pull_replies":
                replies = self._grid.pull_replies(*arguments)
                fresh = [reply for reply in replies if reply.message_id not in self._delivered][:1]
                self._delivered |= {reply.message_id for reply in fresh}
                pipe.send(fresh)
            else:
                pipe.send(getattr(self._grid, name)(*arguments))

    def _name_moment(self, name: str, arguments: tuple[Any, ...]) -> str:
        """Whether the server holds what the sites of the second round have sent."""
        if name == "finished":
            return "after the run"
        if len(self._updates) < self._count:
            return ""
        if name == "push_message" and arguments[1].read_header()["kind"] == "unmask":
            return "before unmasking"
        # Three of four answers have been delivered, one by one, and the server asks for the last.
        return "with three answers" if name == "pull_replies" and len(arguments[0]) == 1 else ""


def test_no_update_of_a_site_is_in_the_servers_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret_updates, plain_updates = list[Tensor](), list[Tensor]()
    encode, visit = PreparedSecureSum.client, LoopEngine.visit_client

    def record_encoding(
        transform: PreparedSecureSum, upload: Upload, state: Tree, key: Tensor, announced: Tree = ()
    ) -> tuple[Upload, Tree]:
        encoded, state = encode(transform, upload, state, key, announced)
        secret_updates.extend([upload.mean.weights, encoded.mean.weights])
        return encoded, state

    def record_visit(engine: LoopEngine, download: Download, client: int) -> ClientVisit:
        visited = visit(engine, download, client)
        plain_updates.append(visited.upload.mean.weights)
        return visited

    monkeypatch.setattr(PreparedSecureSum, "client", record_encoding)
    monkeypatch.setattr(LoopEngine, "visit_client", record_visit)
    context = multiprocessing.get_context("spawn")
    pipe, remote = context.Pipe()
    server = context.Process(target=run_servers, args=(remote, tmp_path), daemon=True)
    server.start()
    remote.close()  # So that a server that has died ends the connection.
    try:
        secure = WatchedSites(make_grid(tmp_path / "secure-sites"), secret_updates, 2 * (3 + SITES))
        secure.serve(pipe, server.pid or 0)
        plain_updates.clear()
        plain = WatchedSites(make_grid(tmp_path / "plain-sites"), plain_updates, 3 + SITES)
        plain.serve(pipe, server.pid or 0)
        server.join(30)
    finally:
        server.terminate()
    assert len(secret_updates) == 2 * (3 + SITES)
    assert {update.dtype for update in secret_updates} == {torch.float64, torch.int32}
    assert secure.matches == {"with three answers": 0, "before unmasking": 0, "after the run": 0}
    # The same search finds the updates that a plain run has sent.
    assert plain.matches["with three answers"] >= 3
    assert server.exitcode == 0
