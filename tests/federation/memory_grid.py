"""A message service in memory: its sites are real, its time is simulated, and it injects the faults it is given."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fedauc.data.clients import Clients, Examples
from fedauc.experiments.folder import RunFolder
from fedauc.federation.agreement import FederationAgreement, ServerPolicy, SiteEntry
from fedauc.federation.exchange import Clock, Exchange, Node, Reply
from fedauc.federation.serialization import Payload, pack_payload, unpack_tensors
from fedauc.federation.server import FederatedRun
from fedauc.federation.site import DEFAULT_POLICY, Site, SitePolicy, draw_noise_secret
from fedauc.federation.site_data import SiteData
from fedauc.federation.site_state import FolderSiteState
from fedauc.privacy.secure_sum import read_session_round
from fedauc.training import Round
from small_federations import GROUPS, linear_scorer, small_federation, small_recipe

NAMES = tuple(f"site-{index}" for index in range(len(GROUPS)))

DEADLINE = 10.0
"""Seconds of simulated time that a round waits for its sites."""


class Fault(NamedTuple):
    """What goes wrong with a site's visit in a round, or with another exchange; `times` is how often.

    The kind "after 7" is an answer that takes seven seconds of simulated time.
    """

    site: int
    round: int
    kind: str
    times: int = 1
    exchange: str = "visit"


class SimulatedTime:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def make_clock(self) -> Clock:
        return Clock(lambda: self.now, self._pass_time)

    def _pass_time(self, seconds: float) -> None:
        self.now += seconds


class MemoryGrid:
    """Sites answer at once; faults decide what becomes of the answer."""

    def __init__(self, sites: dict[str, Site], faults: Sequence[Fault] = ()) -> None:
        self.sites, self.time, self.faults = sites, SimulatedTime(), list(faults)
        self.node_ids = {name: 100 + position for position, name in enumerate(sites)}
        self.online_since = dict.fromkeys(sites, "0")
        self.keys = {name: f"key-of-{name}" for name in sites}
        self.offline: set[str] = set()
        self.sent_headers: list[tuple[str, dict[str, Any]]] = []
        self.answers: list[tuple[str, Payload]] = []
        self._replies: list[tuple[float, Reply]] = []

    def online_nodes(self) -> list[Node]:
        online = [name for name in self.sites if name not in self.offline]
        return [Node(self.node_ids[name], name, self.keys[name], self.online_since[name]) for name in online]

    def push_message(self, node_id: int, payload: Payload, seconds: float) -> str:
        message_id = f"message-{len(self.sent_headers)}"
        name = next(name for name, number in self.node_ids.items() if number == node_id)
        header = payload.read_header()
        self.sent_headers.append((name, header))
        self._deliver_message(message_id, name, payload, self._next_fault(name, header))
        return message_id

    def pull_replies(self, message_ids: Sequence[str]) -> list[Reply]:
        # A reply stays, as in Flower, which returns it for as long as it is asked for it.
        return [reply for due, reply in self._replies if due <= self.time.now and reply.message_id in message_ids]

    def visit_headers(self, name: str) -> list[dict[str, Any]]:
        """The headers of the messages that asked a site for a visit."""
        return [header for site, header in self.sent_headers if site == name and header["kind"] == "visit"]

    def _next_fault(self, name: str, header: dict[str, Any]) -> str:
        kind = header["kind"]
        if kind not in ("visit", "unmask"):
            return ""
        session = bytes.fromhex(header["session"]["session_id"]) if kind == "unmask" else b""
        round = read_session_round(session) if session else header["phase"]["round"]
        for position, fault in enumerate(self.faults):
            is_meant = (NAMES[fault.site], fault.round, fault.exchange) == (name, round, kind)
            if is_meant and fault.times:
                self.faults[position] = fault._replace(times=fault.times - 1)
                return fault.kind
        return ""

    def _deliver_message(self, message_id: str, name: str, payload: Payload, fault: str) -> None:
        if fault == "lost":
            return
        if fault == "error":
            # The service itself reports a node that has died, and only after a while.
            self._reply_after(3.0, Reply(message_id, None, "code 5 from node 1: the node is unavailable"))
            return
        if fault == "other id":
            self.node_ids[name] += 1000
            self.online_since[name] = f"{self.time.now + 1}"
            return
        answer = self.sites[name].answer_message(payload)
        self.answers.append((name, answer))
        if fault == "lost reply":
            self._reply_after(1.0, Reply(message_id, None, "code 8: the process has died"))
            return
        delay = {"late": 2 * DEADLINE, "slow": 2.0}.get(fault, 0.0)
        if fault.startswith("after "):
            delay = float(fault.removeprefix("after "))
        self._reply_after(delay, Reply(message_id, corrupt_answer(answer, fault)))
        if fault == "duplicate":
            # It differs from the first, so that using it would change the result.
            self._reply_after(0.0, Reply(message_id, corrupt_answer(answer, "huge")))

    def _reply_after(self, seconds: float, reply: Reply) -> None:
        self._replies.append((self.time.now + seconds, reply))


def corrupt_answer(answer: Payload, fault: str) -> Payload:
    """The answer with one thing wrong."""
    if fault not in (
        "nan",
        "shape",
        "oversized",
        "huge",
        "dtype",
        "garbage",
        "deep",
        "short",
        "count",
        "stale",
        "short masked",
    ):
        return answer
    header = answer.read_header()
    layouts, trees = header.pop("layouts"), {name: tuple(leaves) for name, leaves in unpack_tensors(answer).items()}
    if fault == "garbage":
        return Payload("{", answer.body)
    if fault == "short masked":
        first, *rest = trees["masked"]
        return pack_payload(header, {**trees, "masked": (first[:-1], *rest)})
    if fault == "deep":
        return Payload("[" * 100_000, answer.body)
    if fault == "short":
        return Payload(json.dumps({**header, "layouts": layouts}), answer.body[:-1])
    if fault == "count":
        header["class_counts"] = [1000, 1000]
    if fault == "stale":
        header["round"] -= 1
    name = "mean" if trees["mean"] else "pool"
    first, *rest = trees[name]
    changed = {
        "nan": torch.full_like(first, torch.nan),
        "shape": first[:-1],
        "oversized": first.flatten().repeat(1000),
        "huge": first * 1e6,
        "dtype": first.float(),
    }.get(fault, first)
    return pack_payload(header, {**trees, name: (changed, *rest)})


def make_sites(
    clients: Clients,
    folder: Path,
    test: Examples | None = None,
    policy: SitePolicy = DEFAULT_POLICY,
    draw_secret: Callable[[], bytes] = draw_noise_secret,
) -> dict[str, Site]:
    """A real site per client, with 25 of the test rows each."""

    def load_site(client: int) -> SiteData:
        rows = clients.rows[clients.offsets[client] : clients.offsets[client + 1]]
        part = slice(client * 25, (client + 1) * 25)
        examples = None if test is None else Examples(test.inputs[part], test.labels[part])
        return SiteData(clients.inputs[rows], clients.labels[rows].numpy().astype(np.int8), examples)

    return {
        name: Site(
            lambda client=client: load_site(client),  # type: ignore[misc]
            lambda run_id, name=name: FolderSiteState(folder / name / run_id),  # type: ignore[misc]
            policy,
            draw_secret=draw_secret,
        )
        for client, name in enumerate(NAMES)
    }


def make_grid(folder: Path, faults: Sequence[Fault] = (), test: Examples | None = None) -> MemoryGrid:
    """A fresh grid over the small federation."""
    return MemoryGrid(make_sites(small_federation(), folder, test), faults)


def make_policy(**changes: Any) -> ServerPolicy:
    """Ten simulated seconds per round; answers are checked every fifth of a second."""
    return ServerPolicy(
        **{
            "deadline": DEADLINE,
            "registration_deadline": DEADLINE,
            "poll_interval": 0.2,
            "on_site_failure": "continue",
            **changes,
        }
    )


def make_agreement(method: str, policy_changes: dict[str, Any] | None = None, **settings: Any) -> FederationAgreement:
    """The small recipe among the small federation's sites, each with its group and key."""
    sites = tuple(SiteEntry(name, f"g{group}", f"key-of-{name}") for name, group in zip(NAMES, GROUPS, strict=True))
    policy = make_policy(**(policy_changes or {}))
    return FederationAgreement(recipe=small_recipe(method, **settings), sites=sites, policy=policy)


def make_exchange(grid: MemoryGrid, agreement: FederationAgreement) -> Exchange:
    """The server's exchange over a grid."""
    return Exchange(grid, agreement.sites, agreement.policy, grid.time.make_clock())


def build_linear(shape: tuple[int, ...], seed: int) -> nn.Module:
    """The small federation's model."""
    assert shape == (4,)
    return linear_scorer()


def create_run(agreement: FederationAgreement, grid: MemoryGrid, out: Path) -> FederatedRun:
    """A new run of the linear model."""
    return FederatedRun.create(agreement, make_exchange(grid, agreement), out, build_linear)


def resume_run(agreement: FederationAgreement, grid: MemoryGrid, out: Path) -> FederatedRun:
    """A resumed run of the linear model."""
    return FederatedRun.resume(make_exchange(grid, agreement), RunFolder(out), build_linear)


def collect_rounds(
    run: FederatedRun, rounds: list[Round], after_round: Callable[[Round], None] = lambda finished: None
) -> dict[str, Any]:
    """Train to the end; `rounds` receives every round that the server has saved, also if training is interrupted."""

    def collect_saved(progress: object) -> None:
        finished = run.loop.last_round
        if finished is not None:
            rounds.append(finished)
            after_round(finished)

    return run.train_to_end(collect_saved)
