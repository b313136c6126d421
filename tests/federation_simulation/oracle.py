"""What must hold when a federation has been through its faults: the simulator's bits, and complete, honest files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch

from fedauc.data.clients import Clients
from fedauc.experiments.assembly import Assembly, assemble_training
from fedauc.experiments.checkpoint import Checkpoint, load_checkpoint
from fedauc.experiments.folder import RunFolder
from fedauc.experiments.manifest import compare_with_manifest
from fedauc.federation.audit_log import AuditLog, read_entries, verify_log
from fedauc.federation.delivery import verify_model
from fedauc.federation.registration import RegisteredSites
from fedauc.federation.site_report import describe_report
from fedauc.federation.site_state import FolderSiteState, load_client_state
from fedauc.interfaces import Cohort, Participation, Roster, Schedule
from fedauc.participation._common import make_cohort
from fedauc.participation.cyclic import Cyclic
from fedauc.training import Round
from fedauc.trees import Tree, is_empty
from federation_simulation.scenario import FEATURES
from federation_simulation.simulation import Simulation, SimulationFailure
from small_federations import same_bits


@dataclass(frozen=True)
class Attended(Participation):
    """The schedule of a run, with the clients that took part in each of its rounds; the others are absent."""

    name: ClassVar[str] = "attended"

    schedule: Cyclic = Cyclic()
    answered: tuple[tuple[int, ...], ...] = field(default=())

    def bind(self, clients: Roster, seed: int) -> Schedule:
        """Bind the schedule."""
        return AttendedSchedule(self.schedule.bind(clients, seed), self.answered)


class AttendedSchedule(Schedule):
    """The cohorts of a schedule, as far as they came."""

    def __init__(self, due: Schedule, answered: Sequence[Sequence[int]]) -> None:
        self.cycle_length, self.groups = due.cycle_length, due.groups
        self._due, self._answered = due, answered

    def cohort(self, round: int) -> Cohort:
        due = np.array(self._due.cohort(round).clients)
        present = np.isin(due, self._answered[round])
        return make_cohort(round, due[present], tuple(due[~present].tolist()))


def expect(condition: bool, problem: str) -> None:
    """A condition that a federation must meet whatever happened to it."""
    if not condition:
        raise SimulationFailure(problem)


def check_outcome(simulation: Simulation) -> None:
    """Check the finished run and the sites."""
    for problem in simulation.problems:
        raise SimulationFailure(problem)
    folder, names = RunFolder(simulation.out), simulation.scenario.names
    attendance = folder.read_lines("attendance.jsonl")
    answered = [
        () if "skipped" in line else tuple(names.index(name) for name in line["answered"]) for line in attendance
    ]
    assembly = assemble_simulator(simulation, answered)
    total = assembly.training.plan.total_rounds
    rounds = [line["round"] for line in attendance]
    expect(rounds == list(range(total)), f"attendance.jsonl has rounds {rounds}; the run has {total}")
    paths = sorted((simulation.out / "checkpoints").glob("*.pt"))
    checkpoint = load_checkpoint(paths[-1], "cpu")
    expect(checkpoint.state.round == total, f"the last checkpoint is that of round {checkpoint.state.round}")
    finished = simulate_rounds(simulation, assembly, answered)
    check_model(simulation, assembly, finished, checkpoint)
    check_records(simulation, finished)
    check_refusals(simulation, attendance)
    check_sites(simulation, assembly, checkpoint)
    check_leftovers(simulation)


def assemble_simulator(simulation: Simulation, answered: Sequence[Sequence[int]]) -> Assembly:
    """The training in one process, of the sites that registered, with their attendance."""
    scenario, registered = simulation.scenario, RegisteredSites.read_json(simulation.out)
    recipe, data = scenario.agreement.recipe, [site.data for site in simulation.sites.values()]
    counts = np.stack(registered.census, axis=1).sum(axis=1)
    present = [client for client in range(len(data)) if counts[client]]
    clients = Clients.from_assignment(
        torch.cat([data[client].inputs for client in present]).numpy(),
        np.concatenate([data[client].labels for client in present]),
        np.concatenate([np.full(len(data[client].labels), client) for client in present]),
        np.arange(len(data)),
        np.array([site.group for site in scenario.agreement.sites]),
    )
    assert isinstance(recipe.participation, Cyclic)
    recipe = replace(recipe, engine="loop", participation=Attended(recipe.participation, tuple(map(tuple, answered))))
    return assemble_training(recipe, scenario.agreement.model.build((FEATURES,), recipe.seed), clients)


def simulate_rounds(simulation: Simulation, assembly: Assembly, answered: Sequence[Sequence[int]]) -> list[Round]:
    """The rounds of the simulator. A site that has lost its disk starts afresh, where the server was told so."""
    engine, state, rounds = assembly.training.engine, assembly.start, list[Round]()
    for number, clients in enumerate(answered):
        states = engine.client_states()
        lost = {client for client in clients if client in states and is_fresh_start(simulation, client, number)}
        engine.restore_client_states({client: tree for client, tree in states.items() if client not in lost})
        finished = next(assembly.training.rounds(state))
        rounds.append(finished)
        state = finished.state
    return rounds


def is_fresh_start(simulation: Simulation, client: int, round: int) -> bool:
    """Whether a site has answered a round from no client state, which it may do if it has lost its disk."""
    site = simulation.sites[simulation.scenario.names[client]]
    return site.losses > 0 and site.last_accepted.get(round, 0) < 0


def check_model(simulation: Simulation, assembly: Assembly, rounds: list[Round], checkpoint: Checkpoint) -> None:
    """The model and the server's state have the simulator's bits."""
    last = rounds[-1].state
    for number, (ours, theirs) in enumerate(zip(checkpoint.state, last, strict=True)):
        name = last._fields[number]
        expect(ours == theirs if isinstance(ours, int) else same_bits(ours, theirs), f"the state's {name} differs")
    model = assembly.training.algorithm.extract_model(
        assembly.training.averaged_shared(last)
        if simulation.scenario.agreement.recipe.evaluates_average
        else last.server.shared
    )
    expected = assembly.network.build_module(model).state_dict()
    with np.load(simulation.out / "model.npz", allow_pickle=False) as arrays:
        expect(set(arrays.files) == set(expected), "model.npz has other arrays")
        for name in arrays.files:
            same = arrays[name].tobytes() == expected[name].numpy().tobytes()
            expect(same, f"model.npz: {name} has other bits than the simulator's for this attendance")


def check_records(simulation: Simulation, rounds: list[Round]) -> None:
    """Records are complete, none is double, and they count what the simulator counts."""
    folder, policy = RunFolder(simulation.out), simulation.scenario.agreement.policy
    records = folder.read_records()
    learning = [r.phase for r in rounds if r.phase.ends_cycle and not r.phase.scoring]
    due = [phase.round for phase in learning if phase.learning_cycles % policy.evaluate_every == 0]
    due = sorted({*due, len(rounds) - 1})
    found = [record["round"] for record in records]
    expect(found == due, f"records.jsonl has rounds {found}; evaluated were {due}")
    expect([line["round"] for line in folder.read_lines("timing.jsonl")] == due, "timing.jsonl has other rounds")
    for record in records:
        traffic = rounds[record["round"]].traffic
        different = {name: record[name] for name, value in traffic._asdict().items() if record[name] != value}
        expect(not different, f"the record of round {record['round']} counts {different}; the simulator {traffic}")
    differences = compare_with_manifest(simulation.out)
    late = {"delivery.json"}
    expect(set(differences.changed) <= late and not differences.missing, f"the manifest says {differences}")
    expect(set(differences.unlisted) <= late, f"files are not in the manifest: {differences.unlisted}")


def check_refusals(simulation: Simulation, attendance: list[dict]) -> None:  # type: ignore[type-arg]
    """Whoever was refused or absent has a reason that a fault of the scenario explains."""
    kinds = {fault.kind for fault in simulation.scenario.faults}
    explained = {
        "OSError; see": "fill disk",
        "cannot write its audit log": "fill disk",
        "this site answers": "skew clock",
        "its update has norm": "",
    }
    for line in attendance:
        for name, reason in line["refused"].items():
            known = [kind for text, kind in explained.items() if text in reason]
            expect(bool(known) and known[0] in {*kinds, ""}, f"round {line['round']}: {name} is refused: {reason}")
        expect(not line["absent"] or bool(kinds), f"round {line['round']}: {line['absent']} without any fault")


def check_sites(simulation: Simulation, assembly: Assembly, checkpoint: Checkpoint) -> None:
    """Every site has the client state that the server knows of, an intact audit log, report and model."""
    run = json.loads((simulation.out / "census.json").read_text())["run"]
    states = assembly.training.engine.client_states()
    for client, site in enumerate(simulation.sites.values()):
        folder = site.state_folder
        # The next entry sets aside a line that a crash has left incomplete.
        AuditLog(folder).append({"event": "the end of the simulation", "rule": "operator"})
        report = verify_log(folder)
        expect(not report.problem, f"the audit log of {site.name}: {report.problem}")
        logged = {entry.get("sha256") for entry in read_entries(folder)}
        expect(logged.issuperset(site.sent_digests), f"an answer of {site.name} has left and is not in its audit log")
        progress: Tree = checkpoint.client_states.get(client, ())
        accepted = -1 if is_empty(progress) else int(progress[0])
        if client in states and accepted >= 0 and not lost_state_later(simulation, site.name):
            stored = load_client_state(FolderSiteState(folder / run), accepted, states[client])
            expect(same_bits(stored, states[client]), f"{site.name} has another client state than the simulator")
        if (folder / "reports" / f"{run}.jsonl").is_file():
            describe_report(folder, run)
    if simulation.scenario.delivers_models:
        status = json.loads((simulation.out / "delivery.json").read_text())["sites"]
        expect(set(status.values()) == {"delivered"}, f"not every site has the model: {status}")
        for site in simulation.sites.values():
            if site.losses and not (site.state_folder / "models" / run).is_dir():
                continue
            expect(verify_model(site.state_folder / "models" / run) == [], f"the model of {site.name} is damaged")


def lost_state_later(simulation: Simulation, name: str) -> bool:
    """Whether a site has lost its disk, perhaps after its last accepted visit."""
    return simulation.sites[name].losses > 0


def check_leftovers(simulation: Simulation) -> None:
    """No half-written file, and no lock, is left in the run's folder; a site removes its own when it writes again."""
    left = [str(path.relative_to(simulation.out)) for path in simulation.out.parent.rglob(".*")]
    expect(not left, f"{left} are left behind")
