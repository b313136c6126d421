"""The engine whose clients are sites on other machines. Training, participation, ledger and records do not know."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from fedauc.engines.loop import LoopEngine
from fedauc.federation import visit_messages as orders
from fedauc.federation.exchange import LOG, AnswerRefused, Exchange, ExchangeResult, present
from fedauc.federation.serialization import Payload, rebuild_tree, unpack_tensors
from fedauc.guards import TrainingStopped
from fedauc.interfaces import Census, Cohort, Download, Engine, Phase, Upload, Visits
from fedauc.trees import Tree, is_empty, tree_add, tree_leaves, tree_map

NEVER = -1
"""The visit and the stage of a site that has had none."""


class SiteProgress(NamedTuple):
    """What the server knows a site to hold: the memory of a visit, and the reference of a stage."""

    visit: Tensor
    stage: Tensor


class RoundAttendance(NamedTuple):
    """A round's answers by site, in words: who came, who was away and whose answer was refused, with the reason."""

    round: int
    came: tuple[int, ...]
    away: dict[int, str]
    refused: dict[int, str]


class UploadTemplate(NamedTuple):
    """What an upload must look like, and its bytes."""

    upload: Upload
    bytes: int


@final
class FederatedEngine(Engine):
    """Sends orders to sites, waits for the round's deadline, checks what comes back, and averages it.

    `facts` go with every order; `census` is what the sites said of themselves; `rehearsal` is a client of made-up rows,
    visited once per kind of round to learn what an upload must look like.
    """

    name: ClassVar[str] = "federated"

    def __init__(self, exchange: Exchange, facts: dict[str, Any], census: Census, rehearsal: LoopEngine) -> None:
        self._exchange, self._facts, self._census, self._rehearsal = exchange, facts, census, rehearsal
        self._held: dict[int, SiteProgress] = {}
        self._likes: dict[tuple[Any, ...], UploadTemplate] = {}
        self._skipped = 0
        self.attended: Callable[[RoundAttendance], None] = lambda attendance: None

    def visit(self, download: Download, cohort: Cohort) -> Visits:
        """The mean over the sites that answered in time; the others are marked absent, below the quorum all are."""
        like = self._like(download)
        outcome = self._exchange.ask_sites(
            {client: self._letter(download, place, client) for place, client in enumerate(cohort.clients)},
            lambda client, parcel: self._read(client, parcel, download.phase, like),
            self._lacks,
        )
        self._refuse_outliers(outcome)
        came = present(outcome, cohort.clients)
        self.attended(RoundAttendance(cohort.round, tuple(came), outcome.absent, outcome.refused))
        if len(came) < min(self._exchange.policy.quorum, len(cohort.clients)):
            return self._skip(cohort, len(came))
        self._skipped = 0
        for client in came:
            self._held[client] = SiteProgress(torch.tensor(cohort.round), torch.tensor(download.phase.stage))
        there = _those(cohort, came)
        return Visits(_reduce([outcome.answers[client] for client in came], there.weights), None, there)

    def client_states(self) -> dict[int, Tree]:
        """What each site is known to hold; the memories themselves stay at the sites."""
        return dict(self._held)

    def restore_client_states(self, client_states: dict[int, Tree]) -> None:
        """Put back what is known."""
        self._held = dict(client_states)

    def _letter(self, download: Download, place: int, client: int) -> Callable[[], Payload]:
        def write() -> Payload:
            known = self._held.get(client)
            accepted = NEVER if known is None else int(known.visit)
            anchored = known is not None and int(known.stage) == download.phase.stage
            return orders.pack_visit({**self._facts, "client": client}, download, place, accepted, anchored)

        return write

    def _lacks(self, client: int, what: str) -> None:
        """A site lost its disk: send the reference again; a lost memory starts afresh."""
        known = self._held.get(client, SiteProgress(torch.tensor(NEVER), torch.tensor(NEVER)))
        none = torch.tensor(NEVER)
        self._held[client] = known._replace(stage=none) if what == "anchor" else SiteProgress(none, none)

    def _read(self, client: int, parcel: Payload, phase: Phase, like: UploadTemplate) -> Upload:
        """A site's upload, if it is what was asked for: kind, round, counts, size, dtypes, shapes, finite."""
        facts = read_answer(parcel, "visit")
        if facts.get("round") != phase.round:
            raise AnswerRefused(f"it answers round {facts.get('round')!r}; this is round {phase.round}")
        counts = [int(side[client]) for side in self._census]
        if facts.get("rows") != counts:
            raise AnswerRefused(f"it now holds {facts.get('rows')!r} positives and negatives; it began with {counts}")
        found = unpack_tensors(parcel, max_bytes=like.bytes)
        due = like.upload
        if set(found) != {"mean", "pool"}:
            raise AnswerRefused(f"it brings {sorted(found)}; due are ['mean', 'pool']")
        upload = Upload(rebuild_tree(found["mean"], due.mean, "mean"), rebuild_tree(found["pool"], due.pool, "pool"))
        broken = sum(int((~torch.isfinite(leaf)).sum()) for leaf in tree_leaves(upload))
        if broken:
            raise AnswerRefused(f"{broken} of its values are NaN or infinite")
        return upload

    def _refuse_outliers(self, outcome: ExchangeResult[Upload]) -> None:
        """Refuse a change far larger than the cohort's median; two sites cannot outvote each other."""
        norms = {client: _norm(upload.mean) for client, upload in outcome.answers.items()}
        if len(norms) < 3:
            return
        middle, limit = statistics.median(norms.values()), self._exchange.policy.norm_limit
        for client, norm in norms.items():
            if norm > limit * middle > 0:
                reason = f"its change has norm {norm:.3g}; the limit is {limit:g} times the median of {middle:.3g}"
                del outcome.answers[client]
                outcome.refused[client] = reason
                LOG.warning("the answer of site %r is refused: %s", self._exchange.sites[client].name, reason)

    def _skip(self, cohort: Cohort, came: int) -> Visits:
        self._skipped += 1
        quorum, patience = self._exchange.policy.quorum, self._exchange.policy.patience
        what = f"round {cohort.round}: {came} of {len(cohort.clients)} sites answered; the quorum is {quorum}"
        if self._skipped >= patience:
            remedy = "bring sites online and resume, or lower the quorum"
            raise TrainingStopped(f"{what}, for {self._skipped} rounds in a row; {remedy}")
        LOG.warning("%s; the round is skipped", what)
        return Visits(Upload(), None, Cohort(cohort.round, (), (), (*cohort.absent, *cohort.clients)))

    def _like(self, download: Download) -> UploadTemplate:
        """What an upload must look like, from a rehearsal with made-up rows; once per kind of round."""
        kind = (download.phase.scoring, download.phase.local_steps, download.phase.batch)
        if kind not in self._likes:
            alone = download._replace(per_client=tree_map(lambda leaf: leaf[:1], download.per_client))
            upload = self._rehearsal.visit(alone, Cohort(download.phase.round, (0,), (1.0,))).upload
            size = sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(upload))
            self._likes[kind] = UploadTemplate(upload, size)
            self._rehearsal.restore_client_states({})
        return self._likes[kind]


def read_answer(parcel: Payload, kind: str) -> dict[str, Any]:
    """The facts of an answer of that kind; a site's refusal or lack is raised."""
    facts = parcel.read_header()
    if facts.get("kind") == "lacking":
        raise orders.MissingSiteState(str(facts.get("what")))
    if facts.get("kind") == "unable":
        raise AnswerRefused(f"the site says: {str(facts.get('reason'))[:200]}")
    if facts.get("kind") != kind:
        raise AnswerRefused(f"it is of kind {facts.get('kind')!r}; due is {kind!r}")
    return facts


def _those(cohort: Cohort, came: list[int]) -> Cohort:
    """The cohort as it came, its weights summing to 1 again."""
    if len(came) == len(cohort.clients):
        return cohort
    weights = [weight for client, weight in zip(cohort.clients, cohort.weights, strict=True) if client in came]
    away = tuple(client for client in cohort.clients if client not in came)
    total = sum(weights)
    return Cohort(cohort.round, tuple(came), tuple(weight / total for weight in weights), (*cohort.absent, *away))


def _reduce(uploads: list[Upload], weights: tuple[float, ...]) -> Upload:
    """The weighted mean and the stacked pools, added up in the loop engine's order, so that the bits agree."""
    mean: Tree = ()
    for upload, weight in zip(uploads, weights, strict=True):
        share = tree_map(lambda leaf, weight=weight: weight * leaf, upload.mean)
        mean = share if is_empty(mean) else tree_add(mean, share)
    return Upload(mean, tree_map(lambda *leaves: torch.cat(leaves), *[upload.pool for upload in uploads]))


def _norm(tree: Tree) -> float:
    return math.sqrt(sum(float(leaf.double().square().sum()) for leaf in tree_leaves(tree)))
