"""The server's side: gather the sites, run the rounds, keep everything in a folder, go on after a crash.

federation.json    what was asked for
gathered.json      what the sites said of themselves, the run's name, and where the server ran
records.jsonl      one line per evaluated round
attendance.jsonl   who came to each round, who was away or refused, and why
timing.jsonl       seconds so far, per evaluated round
checkpoints/       the last two states, one written after every round
result.json, model.npz   when the run is done
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedauc.data.clients import Clients
from fedauc.engines.loop import LoopEngine
from fedauc.experiments.assembly import Assembly, assemble_training
from fedauc.experiments.checkpoint import Checkpoint, write_atomically
from fedauc.experiments.codec import to_plain
from fedauc.experiments.folder import RunFolder, describe_environment
from fedauc.federation import journal
from fedauc.federation.agreement import FederationAgreement
from fedauc.federation.engine import FederatedEngine, RoundAttendance, read_answer
from fedauc.federation.evaluation import evaluate_at_sites
from fedauc.federation.exchange import LOG, Exchange
from fedauc.federation.serialization import Payload, pack_payload
from fedauc.federation.site import ModelBuilder
from fedauc.federation.visit_messages import ClassTotals
from fedauc.guards import TrainingStopped
from fedauc.interfaces import Census, Cohort, Setting
from fedauc.ledger import Ledger
from fedauc.participation.full import Full
from fedauc.training import Round, State, Training

ATTENDANCE = "attendance.jsonl"


class SiteRegistration(NamedTuple):
    """What a site says of itself, once: rows per class, the shape of a row, and whether rows are bytes or floats."""

    rows: tuple[int, int]
    shape: tuple[int, ...]
    dtype: str


class RegisteredSites(NamedTuple):
    """What the server knows of the sites' data. The run's name keeps runs apart in the sites' drawers."""

    run: str
    census: Census
    shape: tuple[int, ...]
    dtype: str


def register_sites(exchange: Exchange) -> RegisteredSites:
    """Ask every site for its counts; one that does not answer holds no rows for this run."""
    letters = {place: lambda: pack_payload({"kind": "hello"}) for place in range(len(exchange.sites))}
    outcome = exchange.ask_sites(letters, _hello, seconds=exchange.policy.registration_deadline)
    if not outcome.answers:
        reasons = {exchange.sites[place].name: why for place, why in {**outcome.absent, **outcome.refused}.items()}
        raise TrainingStopped(
            f"no site has answered within {exchange.policy.registration_deadline:g} s: {reasons}; start some"
        )
    (first, known), *others = sorted(outcome.answers.items())
    for place, hello in others:
        if (hello.shape, hello.dtype) != (known.shape, known.dtype):
            one, two = (exchange.sites[each].name for each in (first, place))
            ours, theirs = f"{known.dtype} {known.shape}", f"{hello.dtype} {hello.shape}"
            raise ValueError(f"site {two!r} has rows {theirs}, site {one!r} has {ours}; give all the same features")
    counts = np.zeros((2, len(exchange.sites)), dtype=np.int64)
    for place, hello in outcome.answers.items():
        counts[:, place] = hello.rows
    if not counts.sum(axis=1).all():
        raise ValueError(f"the sites hold {counts[0].sum()} positives and {counts[1].sum()} negatives; both are needed")
    return RegisteredSites(secrets.token_hex(8), Census(*counts), known.shape, known.dtype)


@dataclass
class FederatedRun:
    """A federated run that is ready to go."""

    federation: FederationAgreement
    exchange: Exchange
    folder: RunFolder
    gathered: RegisteredSites
    assembly: Assembly
    state: State

    @staticmethod
    def create(
        federation: FederationAgreement, exchange: Exchange, out: Path, build: ModelBuilder | None = None
    ) -> FederatedRun:
        """Gather the sites, check everything, then make the folder."""
        if out.exists():
            raise ValueError(f"{out} exists already; choose another out, or go on with `fedauc federation resume`")
        gathered = register_sites(exchange)
        assembly = _assemble(federation, exchange, gathered, build)
        folder = _make(out, federation, gathered, assembly)
        return FederatedRun(federation, exchange, folder, gathered, assembly, assembly.start)

    @staticmethod
    def resume(exchange: Exchange, out: Path, build: ModelBuilder | None = None) -> FederatedRun:
        """Go on from the last finished round of a folder."""
        if not (out / "federation.json").is_file():
            raise ValueError(f"{out} is no federated run: it has no federation.json; give the run's folder")
        federation, gathered = FederationAgreement.read_json(out / "federation.json"), _gathered(out)
        _check_same(federation, exchange)
        assembly, folder = _assemble(federation, exchange, gathered, build), RunFolder(out)
        state, client_states, ledger, _ = folder.rewind_to_checkpoint("cpu")
        journal.cut(out / ATTENDANCE, state.round)
        assembly.training.engine.restore_client_states(client_states)
        assembly.training.ledger.restore_from(ledger)
        return FederatedRun(federation, exchange, folder, gathered, assembly, state)

    def go(self, observer: Callable[[Round], None] | None = None) -> dict[str, Any]:
        """Train to the end, and return the result; what stops a run is written down."""
        if self.folder.done:
            return self.folder.read_result()
        stopped = self.folder.path / "stopped.txt"
        stopped.unlink(missing_ok=True)
        try:
            self._train(observer or (lambda finished: None))
        except TrainingStopped as reason:
            write_atomically(stopped, f"{reason}\n".encode())
            raise
        return self._finish()

    def _train(self, observer: Callable[[Round], None]) -> None:
        training, spent, since = self.assembly.training, self.folder.training_seconds(), time.perf_counter()
        seen: list[RoundAttendance] = []
        _federated(training).attended = seen.append
        for finished in training.rounds(self.state):
            self.state = finished.state
            if self._due(finished):
                self.folder.append_record(self._record(finished), spent + time.perf_counter() - since)
            attended = seen.pop() if seen else RoundAttendance(finished.phase.round, (), {}, {})
            journal.append(self.folder.path / ATTENDANCE, self._words(attended, finished.cohort))
            # Last, since it is what a resumed run goes on from; sites repeat a visit to the same bits.
            self.folder.write_checkpoint(Checkpoint(self.state, training.engine.client_states(), training.ledger, []))
            observer(finished)

    def _due(self, finished: Round) -> bool:
        phase = finished.phase
        last = phase.round == self.assembly.training.plan.total_rounds - 1
        every = self.federation.policy.evaluate_every
        return last or (phase.ends_cycle and not phase.scoring and phase.learning_cycles % every == 0)

    def _record(self, finished: Round) -> dict[str, Any]:
        phase = finished.phase
        facts = _facts(self.federation, self.assembly.training, self.gathered)
        model = self.federation.recipe.algorithm.extract_model(finished.state.server.shared)
        return {
            "round": phase.round,
            "cycle": phase.cycle,
            "stage": phase.stage,
            "learning_rate": phase.learning_rate,
            **evaluate_at_sites(self.exchange, {**facts, "round": phase.round}, model),
            **finished.diagnostic_values,
            **finished.traffic._asdict(),
        }

    def _words(self, attendance: RoundAttendance, cohort: Cohort) -> dict[str, Any]:
        """Who came and who did not, by name; sites that the schedule itself left out are away as well."""
        names = [site.name for site in self.exchange.sites]
        refused = {names[place]: why for place, why in attendance.refused.items()}
        away = {names[place]: "was away by the schedule" for place in cohort.absent if names[place] not in refused}
        away |= {names[place]: why for place, why in attendance.away.items()}
        came = [names[place] for place in attendance.came]
        # Below the quorum those who came are absent too, but they did come.
        away = {name: why for name, why in away.items() if name not in came}
        return {"round": attendance.round, "came": came, "away": away, "refused": refused}

    def _finish(self) -> dict[str, Any]:
        path, network = self.folder.path, self.assembly.network
        model = self.federation.recipe.algorithm.extract_model(self.state.server.shared)
        tensors = network.module(model).state_dict()
        # numpy has no bfloat16, and its files need no pickle.
        arrays = {name: (t.float() if t.dtype == torch.bfloat16 else t).cpu().numpy() for name, t in tensors.items()}
        journal.save_arrays(path / "model.npz", arrays)
        lines = journal.read(path / ATTENDANCE)
        counts = {
            site.name: {word: sum(site.name in line[word] for line in lines) for word in ("came", "away", "refused")}
            for site in self.exchange.sites
        }
        result = {"final": self.folder.read_records()[-1], "attendance": counts}
        write_atomically(path / "result.json", (json.dumps(result, indent=2) + "\n").encode())
        return result


def _check_same(federation: FederationAgreement, exchange: Exchange) -> None:
    """A site is its place in the table, so the table of a run must stay as it was; keys may change."""
    began, now = ([site.name for site in sites] for sites in (federation.sites, exchange.sites))
    if began != now:
        changed = sorted(set(began) ^ set(now)) or "their order"
        raise ValueError(f"the table of sites has changed since the run began ({changed}); put it back, or start anew")


def _hello(place: int, parcel: Payload) -> SiteRegistration:
    facts = read_answer(parcel, "hello")
    rows, shape, dtype = facts.get("rows", []), facts.get("shape", []), facts.get("dtype")
    if not _counts(rows, least=0) or len(rows) != 2:
        raise ValueError(f"rows is {rows!r}; it must be two counts")
    if not _counts(shape, least=1) or not shape or dtype not in ("uint8", "float"):
        raise ValueError(f"a row is {dtype!r} {shape!r}; it must be uint8 or float, with sizes of at least 1")
    return SiteRegistration((rows[0], rows[1]), tuple(shape), dtype)


def _counts(values: Any, least: int) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= least for value in values)


def _assemble(
    federation: FederationAgreement, exchange: Exchange, gathered: RegisteredSites, build: ModelBuilder | None
) -> Assembly:
    """The simulator's assembly over clients without rows, with the federated engine in place of its own."""
    # The server only averages; on a GPU the flat vector would have an order of its own, which no site shares.
    recipe = dataclasses.replace(federation.recipe, engine="loop", device="cpu")
    if recipe.algorithm.objective.takes_embeddings and federation.policy.evaluation != "none":
        raise ValueError(f"evaluation is {federation.policy.evaluation!r}; embeddings have no score: use 'none'")
    module = (build or federation.model.build)(gathered.shape, recipe.seed)
    groups = np.array([site.group for site in federation.sites])
    ghosts = _ghosts(gathered, gathered.census, groups if groups[0] else None)
    assembly = assemble_training(recipe, module, ghosts)
    training = assembly.training
    facts = _facts(federation, training, gathered)
    one = Census(np.array([1]), np.array([1]))
    alone = dataclasses.replace(training.setting, census=one)
    rehearsal = LoopEngine(training.algorithm, assembly.network, _ghosts(gathered, one), alone)
    engine = FederatedEngine(exchange, facts, gathered.census, rehearsal)
    return assembly._replace(training=dataclasses.replace(training, engine=engine))


def _ghosts(gathered: RegisteredSites, census: Census, groups: np.ndarray | None = None) -> Clients:
    """Clients as the server knows them, with two made-up rows, a positive and a negative, to try the model on."""
    dtype = torch.uint8 if gathered.dtype == "uint8" else torch.float32
    inputs = torch.zeros((2, *gathered.shape), dtype=dtype)
    names = np.arange(len(census.positives))
    offsets = np.concatenate([[0], np.full(len(names), 2)])
    return Clients(inputs, torch.tensor([1.0, 0.0]), np.arange(2), offsets, census, names, groups)


def _facts(federation: FederationAgreement, training: Training, gathered: RegisteredSites) -> dict[str, Any]:
    setting: Setting = training.setting
    # Who comes when is no site's business: the recipe goes out without its schedule.
    recipe = dataclasses.replace(federation.recipe, algorithm=training.algorithm, participation=Full())
    return {
        "run": gathered.run,
        "recipe": to_plain(recipe),
        "model": to_plain(federation.model),
        "totals": ClassTotals.from_census(gathered.census),
        "cycle_length": setting.cycle_length,
    }


def _federated(training: Training) -> FederatedEngine:
    assert isinstance(training.engine, FederatedEngine)
    return training.engine


def _make(out: Path, federation: FederationAgreement, gathered: RegisteredSites, assembly: Assembly) -> RunFolder:
    """The run's folder, whole or not at all."""
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    (part / "checkpoints").mkdir(parents=True)
    counts = {"positives": gathered.census.positives.tolist(), "negatives": gathered.census.negatives.tolist()}
    rows = {"shape": list(gathered.shape), "dtype": gathered.dtype}
    known = {"run": gathered.run, "rounds": assembly.training.plan.total_rounds, **counts, **rows}
    write_atomically(part / "federation.json", federation.to_json().encode())
    write_atomically(
        part / "gathered.json", (json.dumps({**known, **describe_environment()}, indent=2) + "\n").encode()
    )
    RunFolder(part).write_checkpoint(Checkpoint(assembly.start, {}, Ledger(), []))
    part.rename(out)
    LOG.info("the run %s is in %s", gathered.run, out)
    return RunFolder(out)


def _gathered(out: Path) -> RegisteredSites:
    known = json.loads((out / "gathered.json").read_text())
    census = Census(np.array(known["positives"]), np.array(known["negatives"]))
    return RegisteredSites(known["run"], census, tuple(known["shape"]), known["dtype"])
