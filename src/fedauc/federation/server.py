"""The server's side: register the sites, run the rounds, keep everything in a folder, and resume after a crash.

federation.json    the agreement
census.json        what the sites registered, the run's id, and where the server ran
records.jsonl      one line per evaluated round
attendance.jsonl   which sites answered in each round, which were absent or refused, and why
timing.jsonl       seconds so far, per evaluated round
checkpoints/       the last two states, one written after every round
result.json, model.npz   when the run is done
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedauc.engines.loop import LoopEngine
from fedauc.experiments.assembly import Assembly, assemble_training
from fedauc.experiments.checkpoint import Checkpoint, write_atomically
from fedauc.experiments.config import to_plain
from fedauc.experiments.folder import RunFolder, describe_environment
from fedauc.federation import journal
from fedauc.federation.agreement import FederationAgreement
from fedauc.federation.engine import FederatedEngine, RoundAttendance
from fedauc.federation.evaluation import evaluate_at_sites
from fedauc.federation.exchange import LOG, Exchange
from fedauc.federation.registration import CENSUS_FILE, RegisteredSites, register_sites
from fedauc.federation.site import ModelBuilder
from fedauc.federation.visit_messages import ClassTotals
from fedauc.guards import TrainingStopped
from fedauc.interfaces import Census, Cohort
from fedauc.ledger import Ledger
from fedauc.participation.full import Full
from fedauc.training import Round, State, Training

AGREEMENT_FILE = "federation.json"
ATTENDANCE_FILE = "attendance.jsonl"


@dataclass
class FederatedRun:
    """A federated run that is ready to be trained."""

    agreement: FederationAgreement
    exchange: Exchange
    folder: RunFolder
    registered: RegisteredSites
    assembly: Assembly
    state: State

    @staticmethod
    def create(
        agreement: FederationAgreement, exchange: Exchange, out: Path, build_model: ModelBuilder | None = None
    ) -> FederatedRun:
        """Register the sites, check everything, then write the folder."""
        if out.exists():
            raise ValueError(
                f"{out} exists already; choose another out, or continue it with `fedauc federation resume`"
            )
        registered = register_sites(exchange)
        assembly = _assemble_federation(agreement, exchange, registered, build_model)
        folder = _create_folder(out, agreement, registered, assembly)
        return FederatedRun(agreement, exchange, folder, registered, assembly, assembly.start)

    @staticmethod
    def resume(exchange: Exchange, out: Path, build_model: ModelBuilder | None = None) -> FederatedRun:
        """Continue from the last finished round of a folder."""
        if not (out / AGREEMENT_FILE).is_file():
            raise ValueError(f"{out} is no federated run: it has no {AGREEMENT_FILE}; give the run's folder")
        agreement, registered = FederationAgreement.read_json(out / AGREEMENT_FILE), RegisteredSites.read_json(out)
        _check_same_sites(agreement, exchange)
        assembly, folder = _assemble_federation(agreement, exchange, registered, build_model), RunFolder(out)
        state, client_states, ledger, _ = folder.rewind_to_checkpoint("cpu")
        journal.cut(out / ATTENDANCE_FILE, state.round)
        assembly.training.engine.restore_client_states(client_states)
        assembly.training.ledger.restore_from(ledger)
        return FederatedRun(agreement, exchange, folder, registered, assembly, state)

    def go(self, observer: Callable[[Round], None] | None = None) -> dict[str, Any]:
        """Train to the end and return the result; the reason for an early stop is written to stopped.txt."""
        if self.folder.done:
            return self.folder.read_result()
        stopped = self.folder.path / "stopped.txt"
        stopped.unlink(missing_ok=True)
        try:
            self._train(observer or (lambda finished: None))
        except TrainingStopped as reason:
            write_atomically(stopped, f"{reason}\n".encode())
            raise
        return self._write_result()

    def _train(self, observer: Callable[[Round], None]) -> None:
        training, spent, since = self.assembly.training, self.folder.training_seconds(), time.perf_counter()
        attendance: list[RoundAttendance] = []
        _federated_engine(training).on_attendance = attendance.append
        for finished in training.rounds(self.state):
            self.state = finished.state
            if self._due(finished):
                self.folder.append_record(self._make_record(finished), spent + time.perf_counter() - since)
            latest = attendance.pop() if attendance else RoundAttendance(finished.phase.round, (), {}, {})
            journal.append(self.folder.path / ATTENDANCE_FILE, self._attendance_record(latest, finished.cohort))
            # The checkpoint comes last, because a resumed run starts from it; sites repeat a visit to the same bits.
            self.folder.write_checkpoint(Checkpoint(self.state, training.engine.client_states(), training.ledger, []))
            observer(finished)

    def _due(self, finished: Round) -> bool:
        phase = finished.phase
        last = phase.round == self.assembly.training.plan.total_rounds - 1
        every = self.agreement.policy.evaluate_every
        return last or (phase.ends_cycle and not phase.scoring and phase.learning_cycles % every == 0)

    def _make_record(self, finished: Round) -> dict[str, Any]:
        phase = finished.phase
        return {
            "round": phase.round,
            "cycle": phase.cycle,
            "stage": phase.stage,
            "learning_rate": phase.learning_rate,
            **self._evaluate_round(finished),
            **finished.diagnostic_values,
            **finished.traffic._asdict(),
        }

    def _evaluate_round(self, finished: Round) -> dict[str, Any]:
        header = _message_header(self.agreement, self.assembly.training, self.registered)
        model = self.agreement.recipe.algorithm.extract_model(finished.state.server.shared)
        return evaluate_at_sites(self.exchange, {**header, "round": finished.phase.round}, model)

    def _attendance_record(self, attendance: RoundAttendance, cohort: Cohort) -> dict[str, Any]:
        """Who answered and who did not, by name; sites that the schedule itself leaves out are absent as well."""
        names = [site.name for site in self.exchange.sites]
        answered = [names[client] for client in attendance.answered]
        refused = {names[client]: reason for client, reason in attendance.refused.items()}
        absent = {names[client]: "is unavailable according to the schedule" for client in cohort.absent}
        absent |= {names[client]: reason for client, reason in attendance.absent.items()}
        # Below the quorum the cohort counts those who answered as absent too, but they did answer.
        absent = {name: reason for name, reason in absent.items() if name not in refused and name not in answered}
        return {"round": attendance.round, "answered": answered, "absent": absent, "refused": refused}

    def _write_result(self) -> dict[str, Any]:
        path, network = self.folder.path, self.assembly.network
        model = self.agreement.recipe.algorithm.extract_model(self.state.server.shared)
        tensors = network.module(model).state_dict()
        # numpy has no bfloat16, and its files need no pickle.
        arrays = {name: (t.float() if t.dtype == torch.bfloat16 else t).cpu().numpy() for name, t in tensors.items()}
        journal.save_arrays(path / "model.npz", arrays)
        attendance = count_attendance(journal.read(path / ATTENDANCE_FILE), [site.name for site in self.exchange.sites])
        result = {"final": self.folder.read_records()[-1], "attendance": attendance}
        write_atomically(path / "result.json", (json.dumps(result, indent=2) + "\n").encode())
        return result


def count_attendance(lines: list[dict[str, Any]], names: list[str]) -> dict[str, dict[str, int]]:
    """For each site, the rounds in which it answered, was absent, and was refused."""
    statuses = ("answered", "absent", "refused")
    return {name: {status: sum(name in line[status] for line in lines) for status in statuses} for name in names}


def _check_same_sites(agreement: FederationAgreement, exchange: Exchange) -> None:
    """A site's number is its row in the site table, so the table of a run must not change; keys may."""
    before, now = ([site.name for site in sites] for sites in (agreement.sites, exchange.sites))
    if before != now:
        changed = sorted(set(before) ^ set(now)) or "their order"
        raise ValueError(f"the site table has changed since the run began ({changed}); restore it, or start a new run")


def _assemble_federation(
    agreement: FederationAgreement, exchange: Exchange, registered: RegisteredSites, build_model: ModelBuilder | None
) -> Assembly:
    """The simulator's assembly over placeholder clients, with the federated engine in place of its own."""
    # The server only averages. On a GPU the flat vector would have an order of its own, which the sites do not share.
    recipe = dataclasses.replace(agreement.recipe, engine="loop", device="cpu")
    if recipe.algorithm.objective.takes_embeddings and agreement.policy.evaluation != "none":
        raise ValueError(f"evaluation is {agreement.policy.evaluation!r}; embeddings have no score: use 'none'")
    module = (build_model or agreement.model.build)(registered.shape, recipe.seed)
    groups = np.array([site.group for site in agreement.sites])
    clients = registered.placeholder_clients(registered.census, groups if groups[0] else None)
    assembly = assemble_training(recipe, module, clients)
    training, one_client = assembly.training, Census(np.array([1]), np.array([1]))
    template_setting = dataclasses.replace(training.setting, census=one_client)
    template_clients = registered.placeholder_clients(one_client)
    template_engine = LoopEngine(training.algorithm, assembly.network, template_clients, template_setting)
    header = _message_header(agreement, training, registered)
    engine = FederatedEngine(exchange, header, registered.census, template_engine)
    return assembly._replace(training=dataclasses.replace(training, engine=engine))


def _message_header(agreement: FederationAgreement, training: Training, registered: RegisteredSites) -> dict[str, Any]:
    """What every message about training and evaluation tells a site of the run."""
    # Sites need not know who takes part when, so the recipe is sent without its schedule.
    recipe = dataclasses.replace(agreement.recipe, algorithm=training.algorithm, participation=Full())
    return {
        "run": registered.run_id,
        "recipe": to_plain(recipe),
        "model": to_plain(agreement.model),
        "class_totals": ClassTotals.from_census(registered.census),
        "cycle_length": training.setting.cycle_length,
    }


def _federated_engine(training: Training) -> FederatedEngine:
    assert isinstance(training.engine, FederatedEngine)
    return training.engine


def _create_folder(
    out: Path, agreement: FederationAgreement, registered: RegisteredSites, assembly: Assembly
) -> RunFolder:
    """The run's folder, complete or not at all."""
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    (part / "checkpoints").mkdir(parents=True)
    census = {**registered.to_json(), "rounds": assembly.training.plan.total_rounds, **describe_environment()}
    write_atomically(part / AGREEMENT_FILE, agreement.to_json().encode())
    write_atomically(part / CENSUS_FILE, (json.dumps(census, indent=2) + "\n").encode())
    RunFolder(part).write_checkpoint(Checkpoint(assembly.start, {}, Ledger(), []))
    part.rename(out)
    LOG.info("the folder of run %s is %s", registered.run_id, out)
    return RunFolder(out)
