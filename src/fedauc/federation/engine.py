"""The engine whose clients are sites on other machines. Training, schedule, ledger and records do not know that."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from fedauc.engines.loop import LoopEngine
from fedauc.federation.exchange import (
    LOG,
    AnswerRefused,
    Exchange,
    ExchangeResult,
    SiteDeclined,
    decline_when_closed,
    describe_missing_sites,
    read_answer,
)
from fedauc.federation.late_answers import LateAnswer, LateAnswers, select_present
from fedauc.federation.quarantine import Quarantine, QuarantineState
from fedauc.federation.secure_rounds import SecureRounds, flatten_integers, rebuild_integers
from fedauc.federation.serialization import Payload, rebuild_tree, unpack_tensors
from fedauc.federation.site_data import count_held_out
from fedauc.federation.upload_checks import UploadChecks, UploadHistory
from fedauc.federation.validation_gain import SiteWins, count_wins, measure_gain
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


FLEET = -1
"""The key, among those of clients, of what the server knows of all sites together."""


class FleetRecord(NamedTuple):
    """What the server remembers of the sites' behaviour: their uploads, refusals, and held-out rows per class `[N, 2]`.

    A site that has not sent scores of test or of validation rows yet has -1 of them. `best_validation` is the best
    evaluation on the validation rows so far.
    """

    history: UploadHistory
    quarantine: QuarantineState
    held_out_counts: Tensor
    validation_counts: Tensor = torch.zeros((0, 2), dtype=torch.int64)
    best_validation: SiteWins | tuple[()] = ()


class RoundAttendance(NamedTuple):
    """The clients that answered in a round, and those that were absent or refused, with the reasons."""

    round: int
    answered: tuple[int, ...]
    absent: dict[int, str]
    refused: dict[int, str]
    skipped: str = ""
    """Why the answers of the round were not used."""
    late: Mapping[int, LateAnswer] = MappingProxyType({})
    """The clients whose answer to an earlier round came in this one."""
    dropped: Mapping[int, str] = MappingProxyType({})
    """The clients whose answer to an earlier round was given up, and why."""


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
        self.checks: UploadChecks | None = None
        """What uploads are compared with; set where the server sees single ones."""
        self.quarantine = Quarantine(exchange.policy, [site.name for site in exchange.sites], header["cycle_length"])
        self._held_out_counts = {part: torch.full((len(exchange.sites), 2), NEVER) for part in ("test", "validation")}
        self._best_validation: SiteWins | tuple[()] = ()
        self._template_engine, self._uploads, self._secure = template_engine, uploads, secure
        self._site_progress: dict[int, SiteProgress] = {}
        self._templates: dict[tuple[Any, ...], Upload] = {}
        self._skipped_rounds = 0
        self._late = LateAnswers(exchange.policy)
        self.last_attendance: RoundAttendance | None = None

    def visit(self, download: Download, cohort: Cohort) -> Visits:
        """The mean over the sites that answered in time; the others are absent, and below the quorum all are.

        By policy, answers to earlier rounds that arrive in this one are part of the mean.
        """
        policy = self._exchange.policy
        if policy.on_group_offline == "skip" and not {*cohort.clients} & {*self._exchange.online_sites()}:
            absent = dict.fromkeys(cohort.clients, "was offline when the round began")
            self.last_attendance = RoundAttendance(cohort.round, (), absent, {})
            return self._skip_round(cohort, f"none of {len(cohort.clients)} sites is online")
        if self._secure is not None:
            return self._visit_securely(self._secure, download, cohort)
        template = self._upload_template(download)
        excluded = self.quarantine.exclude_sites(cohort)
        for client in excluded:
            self._late.open_messages.pop(client, None)
        asked = [client for client in cohort.clients if client not in excluded]
        read_upload: Callable[[int, Payload], Upload] = partial(self._read_upload, download=download, template=template)
        if policy.on_group_offline == "skip":
            read_upload = decline_when_closed(read_upload)
        result = self._exchange.ask_sites(
            {client: partial(self._pack_message, download, cohort, client) for client in asked},
            self._late.begin_round(download.phase, read_upload),
            self._forget_lost_state,
            open_messages=self._late.open_messages if policy.late_answers == "merge" else None,
            enough=policy.enough,
        )
        if not self._uploads.has_fixed_denominator:
            # In a private run whether a site is refused must not depend on others; uploads are clipped there anyway.
            self._refuse_outliers(result, download.shared)
        answered = tuple(client for client in cohort.clients if client in result.answers.keys() - result.late)
        late = {client: self._late.describe(client) for client in sorted(result.late & result.answers.keys())}
        self._note_attendance(cohort, answered, result, excluded, late)
        answer_count = len(answered) + len(late)
        if answer_count < min(policy.quorum, len(cohort.clients)):
            problem = f"{answer_count} of {len(cohort.clients)} sites answered; the quorum is {policy.quorum}"
            return self._skip_round(cohort, problem)
        cohort = self._accept_answers(download, cohort, answered, late)
        collector = UploadCollector(self._uploads, download.shared)
        for client, weight in zip(cohort.clients, cohort.weights, strict=True):
            collector.add_upload(result.answers[client], weight, late[client].weight if client in late else 1.0)
        upload, size = collector.reduce_uploads()
        return Visits(upload, None, cohort, size)

    def _visit_securely(self, secure: SecureRounds, download: Download, cohort: Cohort) -> Visits:
        """The sum over the sites that answered in time, in two exchanges; below the threshold there is none.

        The size of the uploads is that of the masked vectors, as in a simulation; keys, packets and shares come on top.
        """
        template = self._uploads.zero_mean(download.shared)
        length = flatten_integers(template).numel()
        excluded = self.quarantine.exclude_sites(cohort)
        total, answered, problem, result = secure.sum_uploads(
            cohort,
            excluded,
            length,
            lambda client, session: self._pack_message(download, cohort, client, session),
            lambda client, header: self._check_answer(client, header, download.phase),
            self._forget_lost_state,
        )
        self._note_attendance(cohort, answered, result, excluded)
        if total is None:
            return self._skip_round(cohort, problem)
        cohort = self._accept_answers(download, cohort, answered)
        size = UploadSize(len(answered) * length, len(answered) * length * total.element_size())
        return Visits(Upload(rebuild_integers(total, template)), None, cohort, size)

    def _note_attendance(
        self,
        cohort: Cohort,
        answered: tuple[int, ...],
        result: ExchangeResult[Any],
        excluded: dict[int, str],
        late: Mapping[int, LateAnswer] = MappingProxyType({}),
    ) -> None:
        """Say who answered and who did not, and put sites in quarantine that have misbehaved too often."""
        self.quarantine.count_refusals(result.misbehaved, cohort.round)
        absent = {**result.absent, **excluded}
        self.last_attendance = RoundAttendance(
            cohort.round, answered, absent, result.refused, late=late, dropped=result.dropped
        )

    def _accept_answers(
        self,
        download: Download,
        cohort: Cohort,
        answered: tuple[int, ...],
        late: Mapping[int, LateAnswer] = MappingProxyType({}),
    ) -> Cohort:
        """Remember whose uploads are used; the cohort as it came, with the other sites absent."""
        if self.checks is not None:
            self.checks.remember_uploads(download.phase, (*answered, *late))
        self._skipped_rounds = 0
        stage = torch.tensor(download.phase.stage)
        self._site_progress |= dict.fromkeys(answered, SiteProgress(torch.tensor(cohort.round), stage))
        self._site_progress |= {
            client: SiteProgress(torch.tensor(answer.round), stage) for client, answer in late.items()
        }
        is_complete = len(answered) == len(cohort.clients) and not late
        return cohort if is_complete else select_present(cohort, answered, tuple(late))

    @property
    def is_secure(self) -> bool:
        """Whether the server sees sums of uploads only."""
        return self._secure is not None

    def client_states(self) -> dict[int, Tree]:
        """What the server knows about each site, and about all; the client states themselves stay at the sites."""
        history = UploadHistory() if self.checks is None else self.checks.history
        counts, best = self._held_out_counts, self._best_validation
        record = FleetRecord(history, self.quarantine.state, counts["test"], counts["validation"], best)
        return {**self._site_progress, FLEET: record}

    def restore_client_states(self, client_states: dict[int, Tree]) -> None:
        """Restore what the server knew about each site, and about all; older checkpoints say nothing of the latter."""
        states = dict(client_states)
        if (record := states.pop(FLEET, None)) is not None:
            self.quarantine.restore_state(record.quarantine)
            for part, counts in (("test", record.held_out_counts), ("validation", record.validation_counts)):
                # Sites that have joined since the checkpoint have the last numbers.
                self._held_out_counts[part][: len(counts)] = counts
                # A site that has left may return with other rows.
                self._held_out_counts[part][sorted(self._exchange.left)] = NEVER
            best = record.best_validation
            self._best_validation = best.drop_clients(self._exchange.left) if isinstance(best, SiteWins) else best
            if self.checks is not None:
                self.checks.history = record.history
        self._site_progress = states

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

    def _read_upload(self, client: int, payload: Payload, download: Download, template: Upload) -> Upload:
        """A site's upload, if it has the right kind, round, class counts, size, dtypes and shapes, and is plausible."""
        self._check_answer(client, read_answer(payload, "visit"), download.phase)
        max_bytes = sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(template))
        tensors = unpack_tensors(payload, max_bytes)
        if set(tensors) != {"mean", "pool"}:
            raise AnswerRefused(f"it contains {sorted(tensors)}; expected are ['mean', 'pool']")
        mean, pool = (rebuild_tree(tensors[part], getattr(template, part), part) for part in ("mean", "pool"))
        invalid = sum(count_invalid(leaf) for leaf in tree_leaves((mean, pool)))
        if invalid:
            raise AnswerRefused(f"{invalid} of its values are NaN or infinite")
        if self.checks is not None:
            self.checks.check_upload(client, Upload(mean, pool), download)
        return Upload(mean, pool)

    def _check_answer(self, client: int, header: dict[str, Any], phase: Phase) -> None:
        """Refuse an answer to another round, or from rows that have changed, where the server knows their counts."""
        if header.get("round") != phase.round:
            raise AnswerRefused(f"it answers round {header.get('round')!r}; this is round {phase.round}")
        self.check_counts(client, header)

    def check_counts(self, client: int, header: dict[str, Any]) -> None:
        """Refuse an answer from rows that have changed, where the server knows their counts."""
        if self._census is None:
            return
        counts, received = [int(side[client]) for side in self._census], header.get("class_counts")
        if received != counts:
            if counts == [0, 0]:
                raise SiteDeclined("it had not registered when the run began, and takes no part in it")
            raise AnswerRefused(f"it now holds {received!r} positives and negatives; it registered {counts}")

    def check_held_out_counts(
        self, client: int, counts: Mapping[str, tuple[int, int]], withheld: Collection[str] = ()
    ) -> None:
        """Refuse scores of other held-out rows than those of a site's first evaluation: positives and negatives.

        Validation rows must also be as many as follow from the site's rows to train on. Nothing is known of the parts
        that a site has withheld.
        """
        fraction = self._exchange.policy.validation_fraction
        validation = dict(zip(("positives", "negatives"), counts.get("validation", (0, 0)), strict=True))
        for (name, rows), side in zip(validation.items(), self._census or (), strict=False):
            if "validation" not in withheld and rows != count_held_out(int(side[client]) + rows, fraction):
                problem = f"it sends scores of {rows} validation {name}, and trains on {side[client]}"
                raise AnswerRefused(f"{problem}; a part of {fraction:g} of a class is not that")
        for part, known in self._held_out_counts.items():
            first, sent = tuple(known[client].tolist()), counts.get(part, (0, 0))
            if part not in withheld and NEVER not in first and sent != first:
                name = "held-out" if part == "test" else part
                problem = f"it sends scores of {sent[0]} {name} positives and {sent[1]} negatives"
                raise AnswerRefused(f"{problem}; before they were {first[0]} and {first[1]}")
        for part, known in self._held_out_counts.items():
            if part in withheld:
                continue
            # The tensors of a record that was read before stay as they were.
            self._held_out_counts[part] = known.clone()
            self._held_out_counts[part][client] = torch.tensor(counts.get(part, (0, 0)))

    def compare_validation(self, answers: Mapping[int, Sequence[Tensor]]) -> float | None:
        """How much better the model is than the best one before, over the validation rows of the sites of both.

        None where there is nothing to compare; then this evaluation is the best one, unless it has no value.
        """
        now, best = count_wins(answers), self._best_validation
        gain = measure_gain(now, best) if isinstance(best, SiteWins) else None
        has_value = bool(answers) and bool(now.rows.sum(0).prod())
        if has_value and (gain is None or gain > 0):
            self._best_validation = now
        return gain

    def _refuse_outliers(self, result: ExchangeResult[Upload], shared: Tree) -> None:
        """Refuse updates far larger than the cohort's median, which needs at least three sites to mean something."""
        norms = {}
        for client, sent in result.answers.items():
            leaves = tree_leaves(self._uploads.decode_upload(sent, shared).mean)
            norms[client] = math.hypot(*(measure_norm(leaf) for leaf in leaves))
        if len(norms) < 3:
            return
        median, limit = statistics.median(norms.values()), self._exchange.policy.norm_limit
        for client, norm in norms.items():
            if norm > limit * median > 0:
                reason = f"its update has norm {norm:.3g}; the limit is {limit:g} times the median of {median:.3g}"
                del result.answers[client]
                result.refused[client] = reason
                # With a few small sites in the cohort, an honest update may be that large.
                result.excused.add(client)
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


def count_invalid(leaf: Tensor) -> int:
    """How many values of a tensor are NaN or infinite.

    >>> count_invalid(torch.tensor([1.0, float("nan"), float("inf")]))
    2
    """
    if not leaf.numel() or not leaf.is_floating_point():
        return 0
    # A NaN is the smallest and the largest value of its tensor; nearly always one pass without a copy is enough.
    if all(math.isfinite(float(end)) for end in torch.aminmax(leaf)):
        return 0
    return int((~torch.isfinite(leaf)).sum())


def measure_norm(leaf: Tensor) -> float:
    """The Euclidean norm of a tensor, in its own precision, of at least float32; float64 where that overflows.

    >>> round(measure_norm(torch.tensor([3e30, 4e30])) / 1e30, 3)
    5.0
    """
    leaf = leaf if leaf.is_floating_point() else leaf.double()
    norm = float(torch.linalg.vector_norm(leaf, dtype=torch.promote_types(leaf.dtype, torch.float32)))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(leaf, dtype=torch.float64))
