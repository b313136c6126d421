"""Everything that a report needs of a run, read from its folder: a simulated run, or a federation's.

Nothing is trained or computed again. What an older or unfinished folder lacks is None or empty, and the report says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedauc.data.summaries import SummaryTraffic
from fedauc.experiments.comparison import Comparison
from fedauc.experiments.config import to_plain
from fedauc.experiments.folder import DATA_FILE, RunFolder
from fedauc.experiments.recipe import Recipe
from fedauc.experiments.roster import ROSTER_FILE, RunRoster, name_groups
from fedauc.federation.agreement import FederationAgreement
from fedauc.federation.membership import read_members
from fedauc.federation.registration import CENSUS_FILE, RegisteredSites
from fedauc.federation.server import AGREEMENT_FILE, read_failure
from fedauc.metrics import Metric, parse_metrics
from fedauc.reports.caveats import has_caveat


class ScoredRows(NamedTuple):
    """Labels, scores and, where the folder has them, the clients of the test rows."""

    labels: np.ndarray
    scores: np.ndarray
    clients: np.ndarray | None


@dataclass(frozen=True)
class ReportRun:
    """One run. `records` have `seconds` beside the columns of `records.jsonl`; `config` holds plain JSON values."""

    name: str
    folder: RunFolder
    is_federation: bool
    status: str
    recipe: Recipe
    metrics: tuple[Metric, ...]
    config: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any]
    records: list[dict[str, Any]]
    roster: RunRoster | None
    policy: dict[str, Any]
    privacy: dict[str, Any] | None = None
    """What a private run promises; None for other runs."""
    setting: str = ""
    """The name without the seed, in a comparison or sweep."""

    @property
    def done(self) -> bool:
        """Whether the run has finished."""
        return self.folder.done

    @property
    def hides_clients(self) -> bool:
        """Whether the run promises its clients privacy, so that a report tells nothing exact about them."""
        return self.privacy is not None and self.privacy["unit"] == "client"

    @property
    def spent_epsilon(self) -> float | None:
        """What a private run has spent so far; a federation that evaluates nothing has it in its records, too."""
        records = self.folder.read_records()
        spent: float | None = records[-1].get("epsilon") if records else None
        return spent

    @property
    def note(self) -> str:
        """What the run was trained on; without its counts where clients are private, empty if the folder is silent."""
        note = str(self.result.get("data") or self.environment.get("note", ""))
        return note.split(":")[0] if self.hides_clients and has_caveat(note) else "" if self.hides_clients else note

    @property
    def final(self) -> dict[str, Any] | None:
        """The record of the saved model, or the last record of a run that has not finished."""
        return self.result.get("final") or (self.records[-1] if self.records else None)

    @property
    def rounds_done(self) -> int:
        """Rounds up to the last record."""
        return int(self.records[-1]["rounds"]) if self.records else 0

    @property
    def is_embedding(self) -> bool:
        """Whether the model gives embeddings instead of scores."""
        return bool(self.recipe.algorithm.objective.takes_embeddings)

    @cached_property
    def preparation(self) -> SummaryTraffic | None:
        """What the preparation of features has sent; None where nothing was sent for it, and in old folders."""
        if self.is_federation:
            agreed = self.environment.get("preparation")
            return None if agreed is None else SummaryTraffic(*agreed["traffic"])
        path = self.folder.path / DATA_FILE
        document = json.loads(path.read_text()) if path.is_file() else {}
        traffic = SummaryTraffic(**document.get("preparation", {}))
        return traffic if traffic.sites else None

    @cached_property
    def scorer(self) -> dict[str, Any]:
        """What `scorer.json` says: the calibration and the operating point that were saved; empty without one."""
        path = self.folder.path / "scorer.json"
        document: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        return document

    @cached_property
    def scored(self) -> ScoredRows | None:
        """The scores of the test rows; None before the run is done, for embeddings, and at a federation's server."""
        path = self.folder.path / "scores.npz"
        if not self.done or not path.is_file():
            return None
        with np.load(path, allow_pickle=False) as stored:
            labels, scores = stored["labels"], stored["scores"]
            clients = stored["clients"] if "clients" in stored.files else None
        return ScoredRows(labels, scores, clients) if scores.ndim == 1 else None


def read_report_runs(paths: Sequence[Path]) -> list[ReportRun]:
    """The runs of all folders, in order, with names that differ."""
    runs: list[ReportRun] = []
    for path in paths:
        prefix = f"{path.resolve().name}: " if len(paths) > 1 else ""
        if Comparison.is_comparison(path):
            members = _read_comparison(Comparison(path))
        else:
            members = [read_run(path)]
            prefix = ""
        runs += [replace(run, name=prefix + run.name) for run in members]
    if not runs:
        raise ValueError(f"{paths[0]} holds no run yet; wait until its first run has started")
    names = [run.name for run in runs]
    return [
        run if names.count(run.name) == 1 else replace(run, name=f"{run.name} ({run.folder.path.resolve().name})")
        for run in runs
    ]


def read_run(path: Path) -> ReportRun:
    """A run folder, or the folder of a federation's app or run."""
    run_path = path / "run" if (path / "run" / AGREEMENT_FILE).is_file() else path
    if (run_path / AGREEMENT_FILE).is_file():
        return _read_federation(RunFolder(run_path))
    if failure := read_failure(path / "run") or read_failure(path):
        raise ValueError(f"the run could not begin: {failure}")
    return _read_simulation(RunFolder.open(path))


def _read_comparison(comparison: Comparison) -> list[ReportRun]:
    several_seeds = any(count > 1 for count in comparison.seeds_per_setting().values())
    runs = []
    for setting, folder in comparison.run_folders():
        run = _read_simulation(folder)
        name = setting.replace("/", " ")
        shown = f"{name}, seed {run.recipe.seed}" if several_seeds else name
        runs.append(replace(run, name=shown, setting=name))
    return runs


def _read_simulation(folder: RunFolder) -> ReportRun:
    config, path = folder.config, folder.path
    roster = path / ROSTER_FILE
    return ReportRun(
        name=config.recipe.method,
        folder=folder,
        is_federation=False,
        status=_describe_status(folder),
        recipe=config.recipe,
        metrics=parse_metrics(config.metrics),
        config=json.loads((path / "config.json").read_text()),
        environment=json.loads((path / "environment.json").read_text()),
        result=folder.read_result() if folder.done else {},
        records=_read_timed_records(folder),
        roster=RunRoster(**json.loads(roster.read_text())) if roster.is_file() else None,
        policy={},
        privacy=folder.read_privacy(),
    )


def _read_federation(folder: RunFolder) -> ReportRun:
    path = folder.path
    agreement, registered = FederationAgreement.read_json(path / AGREEMENT_FILE), RegisteredSites.read_json(path)
    census = json.loads((path / CENSUS_FILE).read_text())
    document = json.loads((path / AGREEMENT_FILE).read_text())
    # Sites may have joined and left since the run began; one that has left counts as without rows.
    members = read_members(path, agreement.sites, registered.census, int(census["rounds"]))
    agreement, registered = replace(agreement, sites=members.sites), registered._replace(census=members.census)
    # The keys of sites are no part of a report.
    del document["sites"]
    sites = [{key: value for key, value in site.items() if key != "key"} for site in to_plain(members.sites)]
    return ReportRun(
        name=agreement.recipe.method,
        folder=folder,
        is_federation=True,
        status=_describe_status(folder),
        recipe=agreement.recipe,
        metrics=parse_metrics("auc"),
        config={**document, "sites": sites},
        environment={key: census[key] for key in census if key not in ("positives", "negatives", "run", "missing")},
        result=folder.read_result() if folder.done else {},
        records=[record for record in _read_timed_records(folder) if record["auc"] is not None],
        roster=_describe_sites(agreement, registered, int(census["rounds"])),
        policy=document["policy"],
        privacy=folder.read_privacy(),
    )


def _describe_sites(agreement: FederationAgreement, registered: RegisteredSites, rounds: int) -> RunRoster:
    """The sites of a federation as the roster of a run."""
    positives, sizes = registered.census.positives, registered.census.positives + registered.census.negatives
    labels = np.array([site.group for site in agreement.sites])
    _, group = np.unique(labels, return_inverse=True)
    members = [np.flatnonzero(group == number) for number in range(group.max() + 1)]
    names = name_groups(members, [labels] if labels[0] else [])
    groups = [
        {
            "name": name,
            "clients": len(rows),
            "rows": int(sizes[rows].sum()),
            "positives": int(positives[rows].sum()),
        }
        for name, rows in zip(names, members, strict=True)
    ]
    listed = {
        "name": [site.name for site in agreement.sites],
        "group": group.tolist(),
        "rows": sizes.tolist(),
        "positives": positives.tolist(),
        "label": None,
        "columns": {},
    }
    totals = int(sizes.sum()), int(positives.sum())
    return RunRoster(rounds, len(groups), len(sizes), *totals, len(groups), groups, listed)


def _describe_status(folder: RunFolder) -> str:
    stopped = folder.path / "stopped.txt"
    if folder.done:
        return "done"
    return stopped.read_text().strip() if stopped.is_file() else "unfinished"


def _read_timed_records(folder: RunFolder) -> list[dict[str, Any]]:
    """The records with the training seconds of their rounds; a run may be writing them just now."""
    seconds = {line["round"]: line["seconds"] for line in folder.read_lines("timing.jsonl")}
    return [{**record, "seconds": seconds.get(record["round"])} for record in folder.read_records()]
