"""The server's side: register the sites, run the rounds, keep everything in a folder, and resume after a crash.

Before a run every site registers its class counts and the shape of its rows, which is all that the server learns of its
data. For secure sums it registers a key as well, and hides its counts where it adds noise. A resumed run starts from
the same counts. The files of a run's folder are:

federation.json    the agreement
census.json        what the sites registered, the run's id, and where the server ran
privacy.json       what a private run promises
membership.json    which sites have joined or left, and from which round on, where some have
records.jsonl      one line per evaluated round
attendance.jsonl   which sites answered in each round, which were absent or refused, and why
quarantine.jsonl   which sites were no longer asked from which round on, why, and which were asked again
releases.json      whom the operator has released from quarantine
timing.jsonl       seconds so far, per evaluated round
round_times.jsonl  when each round ended, its seconds, and how long each site took
status.json        while the run goes on: what the server is waiting for
checkpoints/       the last two states; one is written after every round, before the next round is sent
noise.key          the secret from which a private run draws noise and clients; never share it
stopped.txt        why training had to be stopped, or that the operator has paused it
pause-requested.json   the operator wants a pause; the server takes it away when the run is resumed
(beside the folder, where a run could not begin: OUT-failed.txt says why)
result.json, model.npz   when the run is done
delivery.json      which sites have received the model, and its hash
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedauc.engines.loop import LoopEngine
from fedauc.experiments.assembly import Assembly, assemble_training, make_secret
from fedauc.experiments.callbacks import Callback
from fedauc.experiments.callbacks.evaluation import Evaluation
from fedauc.experiments.callbacks.record_writer import RecordWriter
from fedauc.experiments.checkpoint import Checkpoint, Checkpointer
from fedauc.experiments.config import to_plain
from fedauc.experiments.evaluation import RecordColumns
from fedauc.experiments.folder import PRIVACY_FILE, RunFolder, describe_environment, encode_json
from fedauc.experiments.guarantee import describe_guarantee, summarize_guarantee
from fedauc.experiments.manifest import update_manifest
from fedauc.experiments.private_evaluation import PlannedReleases
from fedauc.experiments.private_training import find_client_dp, has_client_noise
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.run_loop import Observer, Progress, RunLoop, first_checkpoint
from fedauc.experiments.run_view import RunView
from fedauc.experiments.secure_training import find_secure_sum
from fedauc.federation.agreement import FederationAgreement
from fedauc.federation.data_agreement import agreement_header
from fedauc.federation.deadlines import check_enough
from fedauc.federation.delivery import DELIVERY_FILE, deliver_model, hash_tensors
from fedauc.federation.engine import FederatedEngine, RoundAttendance
from fedauc.federation.evaluation import evaluate_at_sites
from fedauc.federation.exchange import LOG, Exchange, describe_missing_sites
from fedauc.federation.late_answers import check_late_policy
from fedauc.federation.membership import (
    Members,
    check_change,
    check_same_plan,
    compare_table,
    forget_later_changes,
    list_member_names,
    read_members,
    write_members,
)
from fedauc.federation.pausing import PausedByOperator, describe_pause, is_pause_due, withdraw_pause
from fedauc.federation.quarantine import list_quarantined
from fedauc.federation.registration import CENSUS_FILE, RegisteredSites, register_joining_sites, register_sites
from fedauc.federation.round_status import ROUND_TIMES_FILE, StatusWriter, read_status
from fedauc.federation.run_plan import describe_plan, describe_validation
from fedauc.federation.secure_rounds import SecureRounds
from fedauc.federation.site import ModelBuilder
from fedauc.federation.upload_checks import make_upload_checks
from fedauc.federation.versions import MESSAGE_FORMAT
from fedauc.federation.visit_messages import describe_totals
from fedauc.files import write_atomically
from fedauc.guards import TrainingStopped
from fedauc.interfaces import Census, Model, UploadTransform
from fedauc.metrics import parse_metrics
from fedauc.network import ModuleNetwork
from fedauc.participation.cyclic_poisson import CyclicPoisson
from fedauc.participation.full import Full
from fedauc.training import Training
from fedauc.transforms._client_noise import NoisedClientDP
from fedauc.transforms._prepared_secure_sum import PreparedSecureSum
from fedauc.transforms.client_dp import ClientDP
from fedauc.trees import Tree
from fedauc.version import VERSION
from fedauc.wrappers import WrappedAlgorithm, unwrap_algorithm
from fedauc.wrappers.example_dp import ExampleDP

AGREEMENT_FILE = "federation.json"
ATTENDANCE_FILE = "attendance.jsonl"

UNAVAILABLE = "is unavailable according to the schedule"
"""Why a site is absent that was not asked."""


class FederatedRun:
    """A federated run that is ready to be trained."""

    def __init__(
        self,
        agreement: FederationAgreement,
        exchange: Exchange,
        assembly: Assembly,
        folder: RunFolder,
        checkpoint: Checkpoint,
    ) -> None:
        self.agreement, self.folder = agreement, folder
        self._exchange, self._assembly = exchange, assembly
        assert isinstance(assembly.training.engine, FederatedEngine)
        self._engine = assembly.training.engine
        self._status = StatusWriter(folder, [site.name for site in agreement.sites], exchange.clock.now)
        self._engine.quarantine.attach_folder(folder)
        self.loop = RunLoop(
            assembly,
            checkpoint,
            (
                RecordWriter(folder),
                *agreement.choose_callbacks(),
                AttendanceWriter(folder, self._engine, tuple(site.name for site in agreement.sites), self._status),
                Evaluation(self._evaluate_round, agreement.policy.evaluate_every),
            ),
            RecordColumns.of(parse_metrics("auc"), True, agreement.policy.validation_fraction > 0),
            folder,
            Checkpointer(folder.write_checkpoint, every_round=True),
            reports_losses=False,
            evaluates_average=agreement.recipe.evaluates_average,
            stop_at_epsilon=agreement.recipe.stop_at_epsilon,
        )

    @staticmethod
    def create(
        agreement: FederationAgreement, exchange: Exchange, out: Path, build_model: ModelBuilder | None = None
    ) -> FederatedRun:
        """Register the sites, check everything, then write the folder."""
        if out.exists():
            raise ValueError(f"{out} exists already; choose another out, or resume the run in it")
        secret = make_secret() if find_client_dp(agreement.recipe) is not None else None
        _check_private_policy(agreement)
        registered = register_sites(exchange, agreement.recipe, agreement.schema, describe_plan(agreement))
        try:
            assembly = _assemble_federation(agreement, exchange, registered, build_model, secret)
        except ValueError as error:
            # A group may have lost its only site, which the error cannot know.
            raise ValueError(f"{error}{describe_missing_sites(registered.missing)}") from error
        rounds = assembly.training.plan.total_rounds
        environment = {**describe_environment(), "message_format": MESSAGE_FORMAT, "missing": dict(registered.missing)}
        length = assembly.training.setting.cycle_length
        census = {**registered.to_json(), "rounds": rounds, "cycle_length": length, **environment}
        files = {AGREEMENT_FILE: agreement.to_json(), CENSUS_FILE: encode_json(census)}
        parts = 0 if agreement.policy.evaluation == "none" else 1 + (agreement.policy.validation_fraction > 0)
        releases = PlannedReleases(held_out_parts=parts)
        if (guarantee := describe_guarantee(agreement.recipe, assembly.training, releases, True)) is not None:
            files[PRIVACY_FILE] = encode_json(guarantee)
            LOG.info("%s", summarize_guarantee(guarantee))
        ledger = assembly.training.ledger
        if registered.agreed is not None:
            _, floats_up, floats_down, bytes_up, bytes_down = registered.agreed.traffic
            ledger.record_preparation(floats_down, floats_up, bytes_down, bytes_up)
        first = first_checkpoint(assembly.start, ledger)
        folder = RunFolder.create(out, files, first, secret)
        _failure_file(out).unlink(missing_ok=True)
        LOG.info("the folder of run %s is %s", registered.run_id, out)
        return FederatedRun(agreement, exchange, assembly, folder, first)

    @staticmethod
    def resume(exchange: Exchange, folder: RunFolder, build_model: ModelBuilder | None = None) -> FederatedRun:
        """Continue from the last finished round of a folder; sites join and leave as the site table says."""
        out = folder.path
        if not (out / AGREEMENT_FILE).is_file():
            raise ValueError(f"{out} is no federated run: it has no {AGREEMENT_FILE}; give the run's folder")
        if not folder.done:
            _check_message_format(out)
        agreement, registered = FederationAgreement.read_json(out / AGREEMENT_FILE), RegisteredSites.read_json(out)
        secret = folder.read_secret() if find_client_dp(agreement.recipe) is not None else None
        checkpoint = folder.rewind_to_checkpoint("cpu")
        forget_later_changes(out, checkpoint.state.round)
        members = read_members(out, agreement.sites, registered.census, checkpoint.state.round)
        change = compare_table(members, exchange.sites)

        def assemble(settled: Members) -> tuple[FederationAgreement, Exchange, Assembly]:
            changed = dataclasses.replace(agreement, sites=settled.sites)
            used = dataclasses.replace(exchange, sites=settled.sites, left=settled.left)
            known = registered._replace(census=settled.census)
            return changed, used, _assemble_federation(changed, used, known, build_model, secret)

        agreement_now, exchange_now, assembly = assemble(change.unchanged_members)
        # Those who have taken part in a finished run still get its model.
        if (change.joining or change.leaving) and not folder.done:
            plan, round = assembly.training.plan, checkpoint.state.round
            check_change(change, agreement.recipe, plan, round)
            settled = change.settle(round, register_joining_sites(exchange, agreement, registered, change))
            agreement_now, exchange_now, assembly = assemble(settled)
            check_same_plan(plan, assembly.training.plan)
            write_members(out, settled)
        agreement, exchange = agreement_now, exchange_now
        assembly.training.engine.restore_client_states(checkpoint.client_states)
        assembly.training.ledger.restore_from(checkpoint.ledger)
        return FederatedRun(agreement, exchange, assembly, folder, checkpoint)

    def train_to_end(self, observer: Observer = lambda progress: None) -> dict[str, Any]:
        """Train the remaining rounds and return the result."""
        if self.folder.done:
            self._send_model_again()
            if (self.folder.path / DELIVERY_FILE).is_file():
                update_manifest(self.folder.path, [DELIVERY_FILE])
            return self.folder.read_result()
        (self.folder.path / "stopped.txt").unlink(missing_ok=True)
        self._exchange.observers[:] = [self._status.observe]
        withdraw_pause(self.folder.path)

        def observe_and_pause(progress: Progress) -> None:
            observer(progress)
            finished = self.loop.last_round
            if finished is not None and not self.loop.is_over and is_pause_due(self.folder.path, finished.phase):
                raise PausedByOperator(describe_pause(progress.done, progress.rounds))

        try:
            self.loop.train_to_end(observe_and_pause)
        except PausedByOperator as pause:
            self.folder.write_stop_reason(str(pause))
            LOG.info("the run is %s", pause)
            raise TrainingStopped(str(pause)) from pause
        withdraw_pause(self.folder.path)
        end = self.loop.finish()
        tensors = self._assembly.network.build_module(end.model).state_dict()
        # numpy has no bfloat16, and its files need no pickle.
        arrays = {name: (t.float() if t.dtype == torch.bfloat16 else t).cpu().numpy() for name, t in tensors.items()}
        self.folder.write_arrays("model.npz", arrays)
        self._deliver(end.model, end.record, {})
        attendance = count_attendance(self.folder, [site.name for site in self.agreement.sites])
        result = {"final": end.record, **end.notes, "attendance": attendance}
        self._status.delete()
        self.folder.write_result(result)
        return result

    def _send_model_again(self) -> None:
        """Send the model of a finished run to the sites that were offline when it ended."""
        path = self.folder.path / DELIVERY_FILE
        stored = json.loads(path.read_text())["sites"] if path.is_file() else {}
        if not stored or all(status == "delivered" for status in stored.values()):
            return
        with np.load(self.folder.path / "model.npz", allow_pickle=False) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        network = self._assembly.network
        module = network.build_module(network.initial_model())
        module.load_state_dict(tensors)
        model = ModuleNetwork(module, network.dtype).initial_model()
        self._deliver(model, self.folder.read_result()["final"], stored)

    def _deliver(self, model: Model, record: Mapping[str, Any] | None, delivered: Mapping[str, str]) -> None:
        """Send the model to every site that is online, unless it scores nothing by itself; write down who has it.

        The record is that of the round that the model comes from.
        """
        algorithm = self._assembly.training.algorithm
        if algorithm.has_personal_models or algorithm.objective.takes_embeddings:
            LOG.info("the model is not sent to the sites, because it scores no rows by itself")
            return
        digest = hash_tensors(self._assembly.network.build_module(model).state_dict())
        final = record or {}
        # The model is for every site, also for one that was offline when the others admitted the run.
        header = {**self._engine.header, "plan": describe_plan(self.agreement)}
        header |= {"round": int(final.get("round", 0)), "federation_auc": final.get("auc")}
        excluded = self._engine.quarantine.list_excluded(range(len(self.agreement.sites)))
        status = deliver_model(self._exchange, header, model, digest, delivered, excluded)
        content = encode_json({"sha256": digest, "sites": status})
        write_atomically(self.folder.path / DELIVERY_FILE, content.encode())

    def _evaluate_round(self, run: RunView) -> dict[str, Any]:
        header = {**self._engine.header, "round": run.round.phase.round}
        return evaluate_at_sites(self._exchange, header, run.model, self._engine)


@dataclasses.dataclass(frozen=True)
class AttendanceWriter(Callback):
    """Writes who answered and who did not in each round, by name; unavailable sites are absent as well."""

    folder: RunFolder
    engine: FederatedEngine
    names: tuple[str, ...]
    status: StatusWriter

    def on_round_end(self, run: RunView, state: Tree) -> None:
        """Write the line of a round."""
        finished, names, attendance = run.round, self.names, self.engine.last_attendance
        if attendance is None or attendance.round != finished.phase.round:
            is_small = self.engine.is_secure and len(finished.cohort.absent) > 0
            reason = "fewer sites were due than a secure sum needs, and none was asked" if is_small else ""
            attendance = RoundAttendance(finished.phase.round, (), {}, {}, reason)
        answered = [names[client] for client in attendance.answered]
        refused = {names[client]: reason for client, reason in attendance.refused.items()}
        absent = {names[client]: UNAVAILABLE for client in finished.cohort.absent}
        absent |= {names[client]: reason for client, reason in attendance.absent.items()}
        # Below the quorum the cohort counts sites as absent that did answer.
        present = {*refused, *answered, *(names[client] for client in attendance.late)}
        absent = {name: reason for name, reason in absent.items() if name not in present}
        line = {"round": attendance.round, "answered": answered, "absent": absent, "refused": refused}
        if attendance.late:
            line["late"] = {names[client]: answer._asdict() for client, answer in attendance.late.items()}
        if attendance.dropped:
            line["dropped"] = {names[client]: reason for client, reason in attendance.dropped.items()}
        if attendance.skipped:
            line["skipped"] = attendance.skipped
        self.folder.append_line(ATTENDANCE_FILE, line)
        self.status.write_round(attendance.round)


def count_attendance(folder: RunFolder, names: list[str]) -> dict[str, dict[str, int]]:
    """For each site, the number of rounds in which it answered, was absent, was refused, or (if ever) came late."""
    lines, statuses = folder.read_lines(ATTENDANCE_FILE), ["answered", "absent", "refused"]
    statuses += [status for status in ("late", "dropped") if any(status in line for line in lines)]
    return {
        name: {status: sum(name in line.get(status, ()) for line in lines) for status in statuses} for name in names
    }


def find_last_reasons(folder: RunFolder) -> dict[str, str]:
    """For every site that has missed a round, why it gave no answer the last time."""
    reasons = dict[str, str]()
    for line in folder.read_lines(ATTENDANCE_FILE):
        missing = {**line["absent"], **line["refused"]}
        reasons |= {name: f"{reason} (round {line['round'] + 1})" for name, reason in missing.items()}
    return reasons


def count_missing_evaluations(folder: RunFolder) -> dict[str, dict[str, Any]]:
    """For every site whose scores an evaluation could not use, in how many, and the last reason."""
    missing = dict[str, dict[str, Any]]()
    for record in folder.read_records():
        for name, reason in record.get("missing", {}).items():
            count = missing.get(name, {"count": 0})["count"] + 1
            missing[name] = {"count": count, "reason": f"{reason} (round {record['round'] + 1})"}
    return missing


def write_failure(out: Path, error: Exception) -> None:
    """Say beside a run's folder why the run could not begin; `flwr run` itself ends with exit code 0."""
    write_atomically(_failure_file(out), f"{error}\n".encode())


def read_failure(out: Path) -> str:
    """Why the last run into that folder could not begin; empty if it has begun."""
    path = _failure_file(out)
    return path.read_text(encoding="utf-8").strip() if path.is_file() and not out.exists() else ""


def _failure_file(out: Path) -> Path:
    return out.with_name(f"{out.name}-failed.txt")


def summarize_run(path: Path) -> dict[str, Any]:
    """The status, rounds, records, attendance and guarantee of a run, finished or not, and what it waits for now."""
    if not (path / CENSUS_FILE).is_file():
        raise ValueError(f"{path} is no federated run: it has no {CENSUS_FILE}; give the app's or the run's folder")
    folder, stopped, delivery = RunFolder(path), path / "stopped.txt", path / DELIVERY_FILE
    agreement = json.loads((path / AGREEMENT_FILE).read_text())
    names = list_member_names(path, [site["name"] for site in agreement["sites"]])
    census = json.loads((path / CENSUS_FILE).read_text())
    return {
        "status": "done" if folder.done else stopped.read_text().strip() if stopped.is_file() else "unfinished",
        "done": len(folder.read_lines(ATTENDANCE_FILE)),
        "rounds": census["rounds"],
        "cycles": agreement["recipe"]["cycles"],
        "cycle_length": census.get("cycle_length"),
        "missing": census.get("missing", {}),
        "records": folder.read_records(),
        "result": folder.read_result() if folder.done else {},
        "attendance": count_attendance(folder, names),
        "reasons": find_last_reasons(folder),
        "missing_evaluations": count_missing_evaluations(folder),
        "round_seconds": [line["seconds"] for line in folder.read_lines(ROUND_TIMES_FILE)],
        "now": {} if folder.done else read_status(path),
        "privacy": folder.read_privacy(),
        "quarantine": list_quarantined(folder),
        "delivery": json.loads(delivery.read_text())["sites"] if delivery.is_file() else {},
        "warnings": census.get("preparation", {}).get("warnings", []),
    }


def _check_message_format(out: Path) -> None:
    """Refuse to go on with a run whose sites keep the state and the plan of another message format."""
    census = json.loads((out / CENSUS_FILE).read_text())
    began = int(census.get("message_format", 1))
    if began != MESSAGE_FORMAT:
        versions = f"began with fedauc {census.get('fedauc')} (messages of format {began})"
        ours = f"this is fedauc {VERSION} (format {MESSAGE_FORMAT})"
        raise ValueError(f"{out} {versions}; {ours}: finish the run with that version, or start a new one")


def _check_private_policy(agreement: FederationAgreement) -> None:
    """Refuse what would release more than a private run accounts for, and a patience that could not be resumed."""
    policy = agreement.policy
    if find_client_dp(agreement.recipe) is not None and policy.evaluation != "none":
        reason = "scores of held-out rows are not noised, so they would break the guarantee of a private run"
        raise ValueError(f"evaluation is {policy.evaluation!r}; {reason}: use 'none'")
    secure_sum, has_draws = find_secure_sum(agreement.recipe), isinstance(agreement.recipe.participation, CyclicPoisson)
    if find_client_dp(agreement.recipe) is not None and has_draws and secure_sum is None and policy.quorum > 1:
        reason = "where clients are drawn in secret, whether one was drawn would decide whether the others count"
        raise ValueError(f"quorum is {policy.quorum}; {reason}: use 1, or the participation 'cyclic'")
    if secure_sum is not None and policy.patience < 2:
        reason = "sites answer a round once, so that a round in which the server crashes must be skipped"
        raise ValueError(f"patience is {policy.patience}; {reason}: use at least 2")


def _assemble_federation(
    agreement: FederationAgreement,
    exchange: Exchange,
    registered: RegisteredSites,
    build_model: ModelBuilder | None,
    secret: bytes | None,
) -> Assembly:
    """The simulator's assembly over placeholder clients, with the federated engine in place of its own."""
    # The server only averages. On a GPU the flat vector would have an order of its own, which the sites do not share.
    recipe = dataclasses.replace(agreement.recipe, engine="loop", device="cpu")
    if recipe.algorithm.objective.takes_embeddings and agreement.policy.evaluation != "none":
        raise ValueError(f"evaluation is {agreement.policy.evaluation!r}; embeddings have no score: use 'none'")
    module = (build_model or agreement.model.build)(registered.shape, recipe.seed)
    groups = np.array([site.group for site in agreement.sites])
    clients = registered.placeholder_clients(registered.census, groups if groups[0] else None)
    columns = [dict(site.columns) for site in agreement.sites]
    site_columns = {name: np.array([values[name] for values in columns]) for name in columns[0]}
    clients = dataclasses.replace(clients, columns=site_columns)
    assembly = assemble_training(recipe, module, clients, secret)
    if assembly.training.algorithm.has_personal_models and agreement.policy.evaluation != "none":
        reason = "parts of the model stay at the sites, so the server has none to evaluate"
        raise ValueError(f"evaluation is {agreement.policy.evaluation!r}; {reason}: use 'none'")
    check_late_policy(agreement.policy, recipe, assembly.training, assembly.network)
    has_single_uploads = not recipe.is_private and find_secure_sum(recipe) is None
    check_enough(agreement.policy.enough, assembly.training.schedule.groups, has_single_uploads)
    training, one_client = assembly.training, Census(np.array([1]), np.array([1]))
    template_setting = dataclasses.replace(training.setting, census=one_client)
    template_clients = registered.placeholder_clients(one_client)
    template_engine = LoopEngine(
        training.algorithm, assembly.network, template_clients, template_setting, training.uploads
    )
    header = {
        "run": registered.run_id,
        "recipe": to_plain(_describe_recipe(agreement.recipe, training)),
        "model": to_plain(agreement.model),
        **describe_totals(training.setting, find_client_dp(agreement.recipe) is not None),
        "cycle_length": training.setting.cycle_length,
        **describe_validation(agreement.policy.validation_fraction),
    }
    if agreement.schema is not None:
        header |= agreement_header(agreement.schema, registered.agreed)
    secure, last = None, (training.uploads.transforms or (None,))[-1]
    if isinstance(last, PreparedSecureSum):
        LOG.info("uploads are summed securely: the server sees no single one, and cannot check their norms")
        header["secure_sum"] = last.to_plain()
        secure = SecureRounds(exchange, last, registered.run_id, registered.public_keys)
    census, plan = None if has_client_noise(agreement.recipe) else registered.census, describe_plan(agreement)
    engine = FederatedEngine(exchange, header, census, template_engine, training.uploads, secure, plan)
    if secure is None:
        engine.checks = make_upload_checks(training, agreement.policy)
    return assembly._replace(training=dataclasses.replace(training, engine=engine))


def _describe_recipe(recipe: Recipe, training: Training) -> Recipe:
    """What a site must know of the recipe: how to train and to transform its uploads, with the values of this run."""
    wrappers, wrapped = recipe.wrappers, training.algorithm
    while isinstance(wrapped, WrappedAlgorithm):
        if isinstance(noised := wrapped.wrapper, ExampleDP):
            # The noise that the budget needs, which the recipe does not say.
            wrappers = tuple(noised if isinstance(member, ExampleDP) else member for member in wrappers)
        wrapped = wrapped.inner
    transforms: list[UploadTransform] = []
    for transform in training.uploads.transforms:
        if isinstance(transform, NoisedClientDP):
            # Sites clip; the noise is the server's.
            options = {known.name: getattr(transform, known.name) for known in dataclasses.fields(ClientDP)}
            transform = ClientDP(**options)
        transforms.append(transform.to_options() if isinstance(transform, PreparedSecureSum) else transform)
    # Sites need not know who takes part when, nor the budget that the noise was computed from.
    return dataclasses.replace(
        recipe,
        algorithm=unwrap_algorithm(training.algorithm),
        participation=Full(),
        wrappers=wrappers,
        transforms=tuple(transforms),
        epsilon=None,
        stop_at_epsilon=None,
    )
