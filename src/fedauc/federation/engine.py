"""The engine whose clients are sites on other machines. Training, schedule, ledger and records do not know that."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from fedauc.engines.loop import LoopEngine
from fedauc.federation.exchange import LOG, AnswerRefused, Exchange, ExchangeResult, describe_missing_sites, read_answer
from fedauc.federation.secure_rounds import SecureRounds, flatten_integers, rebuild_integers
from fedauc.federation.serialization import Payload, rebuild_tree, unpack_tensors
from fedauc.federation.visit_messages import pack_visit
from fedauc.guards import TrainingStopped
from fedauc.interfaces import Census, Cohort, Download, Engine, Phase, Upload, UploadSize, Visits
from fedauc.privacy.secure_sum import SecureSumSession
from fedauc.trees import Tree, tree_at, tree_leaves
from fedauc.uploads import UploadCollector, UploadPipeline, mark_all_absent

NEVER = -1
"""The round and the stage of a site that has not been visited."""


class SiteProgress(NamedTuple):
    """What the server knows about a site's state: the last accepted round, and the stage whose anchor it has."""

    last_accepted_round: Tensor = torch.tensor(NEVER)
    anchor_stage: Tensor = torch.tensor(NEVER)


class RoundAttendance(NamedTuple):
    """The clients that answered in a round, and those that were absent or refused, with the reasons."""

    round: int
    answered: tuple[int, ...]
    absent: dict[int, str]
    refused: dict[int, str]
    skipped: str = ""
    """Why the answers of the round were not used."""


@final
class FederatedEngine(Engine):
    """Sends downloads to sites, waits until the round's deadline, checks the uploads, and averages them.

    `header` is part of every message, and `census` holds the class counts that the sites registered; None where they
    hide them. `template_engine` has one client with placeholder rows; a visit to it shows what a valid upload looks
    like. With `secure` the server sees sums of uploads only, so that it cannot check a single one. `plan` is sent to
    sites that no longer have it.
    """

    name: ClassVar[str] = "federated"

    def __init__(
        self,
        exchange: Exchange,
        header: dict[str, Any],
        census: Census | None,
        template_engine: LoopEngine,
        uploads: UploadPipeline,
        secure: SecureRounds | None = None,
        plan: Mapping[str, Any] | None = None,
    ) -> None:
        self._plan, self._sites_without_plan = plan, set[int]()
        self._exchange, self.header, self._census = exchange, header, census
        self._template_engine, self._uploads, self._secure = template_engine, uploads, secure
        self._site_progress: dict[int, SiteProgress] = {}
        self._templates: dict[tuple[Any, ...], Upload] = {}
        self._skipped_rounds = 0
        self.last_attendance: RoundAttendance | None = None

    def visit(self, download: Download, cohort: Cohort) -> Visits:
        """The mean over the sites that answered in time; the others are absent, and below the quorum all are."""
        if self._secure is not None:
            return self._visit_securely(self._secure, download, cohort)
        template = self._upload_template(download)
        result = self._exchange.ask_sites(
            {client: partial(self._pack_message, download, cohort, client) for client in cohort.clients},
            lambda client, payload: self._read_upload(client, payload, download.phase, template),
            self._forget_lost_state,
        )
        if not self._uploads.has_fixed_denominator:
            # In a private run whether a site is refused must not depend on others; uploads are clipped there anyway.
            self._refuse_outliers(result, download.shared)
        answered = tuple(client for client in cohort.clients if client in result.answers)
        self.last_attendance = RoundAttendance(cohort.round, answered, result.absent, result.refused)
        quorum = self._exchange.policy.quorum
        if len(answered) < min(quorum, len(cohort.clients)):
            problem = f"{len(answered)} of {len(cohort.clients)} sites answered; the quorum is {quorum}"
            return self._skip_round(cohort, problem)
        cohort = self._accept_answers(download, cohort, answered)
        collector = UploadCollector(self._uploads, download.shared)
        for client, weight in zip(answered, cohort.weights, strict=True):
            collector.add_upload(result.answers[client], weight)
        upload, size = collector.reduce_uploads()
        return Visits(upload, None, cohort, size)

    def _visit_securely(self, secure: SecureRounds, download: Download, cohort: Cohort) -> Visits:
        """The sum over the sites that answered in time, in two exchanges; below the threshold there is none.

        The size of the uploads is that of the masked vectors, as in a simulation; keys, packets and shares come on top.
        """
        template = self._uploads.zero_mean(download.shared)
        length = flatten_integers(template).numel()
        total, answered, problem, result = secure.sum_uploads(
            cohort,
            length,
            lambda client, session: self._pack_message(download, cohort, client, session),
            lambda client, header: self._check_answer(client, header, download.phase),
            self._forget_lost_state,
        )
        self.last_attendance = RoundAttendance(cohort.round, answered, result.absent, result.refused)
        if total is None:
            return self._skip_round(cohort, problem)
        cohort = self._accept_answers(download, cohort, answered)
        size = UploadSize(len(answered) * length, len(answered) * length * total.element_size())
        return Visits(Upload(rebuild_integers(total, template)), None, cohort, size)

    def _accept_answers(self, download: Download, cohort: Cohort, answered: tuple[int, ...]) -> Cohort:
        """Remember whose uploads are used; the cohort as it came, with the other sites absent."""
        self._skipped_rounds = 0
        progress = SiteProgress(torch.tensor(cohort.round), torch.tensor(download.phase.stage))
        self._site_progress |= dict.fromkeys(answered, progress)
        if len(answered) == len(cohort.clients):
            return cohort
        # The weights of the sites that answered must sum to 1 again, unless the denominator is fixed; the other sites
        # are absent.
        weights = dict(zip(cohort.clients, cohort.weights, strict=True))
        total = sum(weights[client] for client in answered) if cohort.expected_size is None else 1.0
        missing = (client for client in cohort.clients if client not in answered)
        present_weights = tuple(weights[client] / total for client in answered)
        if cohort.expected_size is None and len(set(cohort.weights)) == 1:
            # The same bits as in a simulation in which only these sites were due: a sum of fractions is rounded.
            present_weights = (1 / len(answered),) * len(answered)
        return Cohort(cohort.round, answered, present_weights, (*cohort.absent, *missing), cohort.expected_size)

    @property
    def is_secure(self) -> bool:
        """Whether the server sees sums of uploads only."""
        return self._secure is not None

    def client_states(self) -> dict[int, Tree]:
        """What the server knows about each site; the client states themselves stay at the sites."""
        return dict(self._site_progress)

    def restore_client_states(self, client_states: dict[int, Tree]) -> None:
        """Restore what the server knew about each site."""
        self._site_progress = dict(client_states)

    def _pack_message(
        self, download: Download, cohort: Cohort, client: int, session: SecureSumSession | None = None
    ) -> Payload:
        progress = self._site_progress.get(client, SiteProgress())
        has_anchor = int(progress.anchor_stage) == download.phase.stage
        header, position = {**self.header, "client": client}, cohort.clients.index(client)
        if client in self._sites_without_plan:
            self._sites_without_plan.discard(client)
            header["plan"] = self._plan
        if session is not None:
            header["session"] = session.to_plain()
        return pack_visit(header, download, position, int(progress.last_accepted_round), has_anchor)

    def _forget_lost_state(self, client: int, what: str) -> None:
        """A site has lost its disk: plan and anchor are sent again, and a lost client state starts afresh."""
        if what == "plan":
            self._sites_without_plan.add(client)
            return
        progress = self._site_progress.get(client, SiteProgress())
        last_accepted = progress.last_accepted_round if what == "anchor" else torch.tensor(NEVER)
        self._site_progress[client] = SiteProgress(last_accepted)

    def _read_upload(self, client: int, payload: Payload, phase: Phase, template: Upload) -> Upload:
        """A site's upload, if it has the right kind, round, class counts, size, dtypes and shapes, and is finite."""
        self._check_answer(client, read_answer(payload, "visit"), phase)
        max_bytes = sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(template))
        tensors = unpack_tensors(payload, max_bytes)
        if set(tensors) != {"mean", "pool"}:
            raise AnswerRefused(f"it contains {sorted(tensors)}; expected are ['mean', 'pool']")
        mean, pool = (rebuild_tree(tensors[part], getattr(template, part), part) for part in ("mean", "pool"))
        invalid = sum(int((~torch.isfinite(leaf)).sum()) for leaf in tree_leaves((mean, pool)))
        if invalid:
            raise AnswerRefused(f"{invalid} of its values are NaN or infinite")
        return Upload(mean, pool)

    def _check_answer(self, client: int, header: dict[str, Any], phase: Phase) -> None:
        """Refuse an answer to another round, or from rows that have changed, where the server knows their counts."""
        if header.get("round") != phase.round:
            raise AnswerRefused(f"it answers round {header.get('round')!r}; this is round {phase.round}")
        if self._census is None:
            return
        counts, received = [int(side[client]) for side in self._census], header.get("class_counts")
        if received != counts:
            raise AnswerRefused(f"it now holds {received!r} positives and negatives; it registered {counts}")

    def _refuse_outliers(self, result: ExchangeResult[Upload], shared: Tree) -> None:
        """Refuse updates far larger than the cohort's median, which needs at least three sites to mean something."""
        norms = {}
        for client, sent in result.answers.items():
            leaves = tree_leaves(self._uploads.decode_upload(sent, shared).mean)
            norms[client] = math.sqrt(sum(float(leaf.double().square().sum()) for leaf in leaves))
        if len(norms) < 3:
            return
        median, limit = statistics.median(norms.values()), self._exchange.policy.norm_limit
        for client, norm in norms.items():
            if norm > limit * median > 0:
                reason = f"its update has norm {norm:.3g}; the limit is {limit:g} times the median of {median:.3g}"
                del result.answers[client]
                result.refused[client] = reason
                LOG.warning("the answer of site %r is refused: %s", self._exchange.sites[client].name, reason)

    def _skip_round(self, cohort: Cohort, problem: str) -> Visits:
        self._skipped_rounds += 1
        policy, problem = self._exchange.policy, f"round {cohort.round}: {problem}"
        assert self.last_attendance is not None
        self.last_attendance = self.last_attendance._replace(skipped=problem)
        if self._skipped_rounds >= policy.patience:
            remedy = "bring sites online and resume, or lower the quorum"
            missing = {**self.last_attendance.absent, **self.last_attendance.refused}
            names = {self._exchange.sites[client].name: reason for client, reason in sorted(missing.items())}
            reasons = describe_missing_sites(names)
            raise TrainingStopped(f"{problem}, for {self._skipped_rounds} rounds in a row{reasons}; {remedy}")
        LOG.warning("%s; the round is skipped", problem)
        return Visits(Upload(), None, mark_all_absent(cohort))

    def _upload_template(self, download: Download) -> Upload:
        """What an upload must look like, from a visit to the placeholder client; computed once per kind of round."""
        kind = (download.phase.scoring, download.phase.local_steps, download.phase.batch)
        if kind not in self._templates:
            first = download._replace(per_client=tree_at(download.per_client, 0))
            self._templates[kind] = self._template_engine.visit_client(first, 0).upload
        return self._templates[kind]
