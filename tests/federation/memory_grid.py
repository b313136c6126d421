"""A grid in memory: its sites are real, its time is made up, and it loses, delays and spoils what it is told to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedauc.data.clients import Clients, Examples
from fedauc.experiments.recipe import Recipe
from fedauc.federation.agreement import FederationAgreement, ServerPolicy, SiteEntry
from fedauc.federation.exchange import Clock, Exchange, Node, Reply
from fedauc.federation.serialization import Payload, pack_payload, unpack_tensors
from fedauc.federation.site import DEFAULT_POLICY, Site, SitePolicy
from fedauc.federation.site_data import SiteData
from fedauc.federation.site_state import FolderSiteState
from small_federations import GROUPS, small_federation, small_recipe

NAMES = tuple(f"site-{index}" for index in range(len(GROUPS)))

SECONDS = 10.0
"""The deadline in made-up time."""


class Fault(NamedTuple):
    """What goes wrong with a site's visit in a round; `times` is how often."""

    site: int
    round: int
    kind: str
    times: int = 1


class Time:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> Clock:
        return Clock(lambda: self.now, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


class MemoryGrid:
    """Sites answer at once; faults decide what becomes of the answer."""

    def __init__(self, sites: dict[str, Site], time: Time, faults: Sequence[Fault] = ()) -> None:
        self.sites, self.time = sites, time
        self.faults = list(faults)
        self.numbers = {name: 100 + place for place, name in enumerate(sites)}
        self.since = dict.fromkeys(sites, "0")
        self.keys = {name: f"key-of-{name}" for name in sites}
        self.offline: set[str] = set()
        self.pushed: list[tuple[str, dict[str, Any]]] = []
        self._waiting: list[tuple[float, Reply]] = []

    def online_nodes(self) -> list[Node]:
        online = [name for name in self.sites if name not in self.offline]
        return [Node(self.numbers[name], name, self.keys[name], self.since[name]) for name in online]

    def push_message(self, node: int, parcel: Payload, seconds: float) -> str:
        message = f"message-{len(self.pushed)}"
        name = next(name for name, number in self.numbers.items() if number == node)
        facts = parcel.read_header()
        self.pushed.append((name, facts))
        self._deliver(message, name, parcel, self._fault(name, facts))
        return message

    def pull_replies(self, messages: Sequence[str]) -> list[Reply]:
        # A reply stays, as in Flower, where the same one comes for as long as it is asked for.
        return [reply for when, reply in self._waiting if when <= self.time.now and reply.message_id in messages]

    def _fault(self, name: str, facts: dict[str, Any]) -> str:
        if facts["kind"] != "visit":
            return ""
        for place, fault in enumerate(self.faults):
            if NAMES[fault.site] == name and fault.round == facts["phase"]["round"] and fault.times:
                self.faults[place] = fault._replace(times=fault.times - 1)
                return fault.kind
        return ""

    def _deliver(self, message: str, name: str, parcel: Payload, fault: str) -> None:
        if fault == "lost":
            return
        if fault == "error":
            # What the service says of a node that stopped serving, long after, and in its own name.
            self._later(3.0, Reply(message, None, "code 5 from node 1: the node is unavailable"))
            return
        if fault == "other id":
            self.numbers[name] += 1000
            self.since[name] = f"{self.time.now + 1}"
            return
        answer = self.sites[name].answer_message(parcel)
        delay = {"late": 2 * SECONDS, "slow": 2.0}.get(fault, 0.0)
        self._later(delay, Reply(message, spoil(answer, fault)))
        if fault == "duplicate":
            # Another one than the first, so that it shows if it is used.
            self._later(0.0, Reply(message, spoil(answer, "huge")))

    def _later(self, seconds: float, reply: Reply) -> None:
        self._waiting.append((self.time.now + seconds, reply))


def spoil(answer: Payload, fault: str) -> Payload:
    """The answer with one thing wrong."""
    if fault not in ("nan", "shape", "oversized", "huge", "dtype", "garbage", "deep", "short", "count", "stale"):
        return answer
    facts = answer.read_header()
    layouts, trees = facts.pop("layouts"), {name: tuple(leaves) for name, leaves in unpack_tensors(answer).items()}
    if fault == "garbage":
        return Payload("{", answer.body)
    if fault == "deep":
        return Payload("[" * 100_000, answer.body)
    if fault == "short":
        return Payload(json.dumps({**facts, "layouts": layouts}), answer.body[:-1])
    if fault == "count":
        facts["class_counts"] = [1000, 1000]
    if fault == "stale":
        facts["round"] -= 1
    name = "mean" if trees["mean"] else "pool"
    first, *rest = trees[name]
    changed = {
        "nan": torch.full_like(first, torch.nan),
        "shape": first[:-1],
        "oversized": first.flatten().repeat(1000),
        "huge": first * 1e6,
        "dtype": first.float(),
    }.get(fault, first)
    return pack_payload(facts, {**trees, name: (changed, *rest)})


def sites_of(
    clients: Clients, folder: Path, test: Examples | None = None, allows: SitePolicy = DEFAULT_POLICY, rows: int = 25
) -> dict[str, Site]:
    """A real site per client, with `rows` of the test rows each."""

    def load(client: int) -> SiteData:
        mine = clients.rows[clients.offsets[client] : clients.offsets[client + 1]]
        part = slice(client * rows, (client + 1) * rows)
        held = None if test is None else Examples(test.inputs[part], test.labels[part])
        labels = clients.labels[mine].numpy().astype(np.int8)
        return SiteData(clients.inputs[mine], labels, held)

    return {
        name: Site(
            lambda place=place: load(place),  # type: ignore[misc]
            lambda run, name=name: FolderSiteState(folder / name / run),  # type: ignore[misc]
            allows,
        )
        for place, name in enumerate(NAMES)
    }


def terms(**changes: Any) -> ServerPolicy:
    """Ten made-up seconds per round, looked at every fifth of a second."""
    return ServerPolicy(**{"deadline": SECONDS, "registration_deadline": SECONDS, "poll_interval": 0.2, **changes})


def entries() -> tuple[SiteEntry, ...]:
    """The server's table: every site with its group and key."""
    return tuple(SiteEntry(name, f"g{group}", f"key-of-{name}") for name, group in zip(NAMES, GROUPS, strict=True))


def agreed(method: str, changes: dict[str, Any] | None = None, **settings: Any) -> FederationAgreement:
    """The small recipe among the small federation's sites."""
    recipe: Recipe = small_recipe(method, **settings)
    return FederationAgreement(recipe=recipe, sites=entries(), policy=terms(**(changes or {})))


def grid_of(folder: Path, faults: Sequence[Fault] = (), test: Examples | None = None) -> MemoryGrid:
    """A fresh grid over the small federation."""
    return MemoryGrid(sites_of(small_federation(), folder, test), Time(), faults)


def exchange_of(grid: MemoryGrid, agreement: FederationAgreement) -> Exchange:
    """The server's exchange over a grid."""
    return Exchange(grid, agreement.sites, agreement.policy, grid.time.clock())
