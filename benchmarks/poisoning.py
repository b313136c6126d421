"""What one misbehaving site does to a federation on the demo's card transactions, and what each defence changes.

    python benchmarks/poisoning.py honest       # refusals in runs in which every site is honest
    python benchmarks/poisoning.py attacks      # AUC with one poisoned site
    python benchmarks/poisoning.py tables       # prints the tables of docs/robustness.md

Sites, server, checks and folders are the real ones, in one process. Both commands add to records/poisoning.json. The
poisoned site is the one with the most frauds. Site i of n has the rows of the hours i, i + n, i + 2n, ... `six` has six
sites in three groups of two, where no cohort is large enough for a robust mean, `twelve` has two groups of six, and
`hours` is the demo, 48 sites in eight groups of six.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedauc.algorithms import find_methods
from fedauc.data.datasets.creditcard import CreditCard
from fedauc.experiments.recipe import Recipe
from fedauc.federation.agreement import FederationAgreement, ServerPolicy, SiteEntry
from fedauc.federation.engine import FederatedEngine
from fedauc.federation.exchange import Exchange
from fedauc.federation.in_process import AnsweringSite, InProcessGrid
from fedauc.federation.serialization import Payload, pack_payload, unpack_tensors
from fedauc.federation.server import FederatedRun
from fedauc.federation.site import Site
from fedauc.federation.site_data import SiteData
from fedauc.federation.site_state import FolderSiteState
from fedauc.guards import TrainingStopped
from fedauc.metrics import auc
from fedauc.stages import Geometric
from harness.report import describe_hardware

RECORD = Path(__file__).parent / "records" / "poisoning.json"

UNLIMITED = 1e30
CYCLES = 6


class Visit(NamedTuple):
    """What a site sends in a round, and a generator for an attack that needs one."""

    mean: tuple[Tensor, ...]
    pool: tuple[Tensor, ...]
    random: np.random.Generator


Attack = Callable[[Visit], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]


def scale_update(factor: float) -> Attack:
    """Send a multiple of the update."""
    return lambda visit: (tuple(factor * leaf for leaf in visit.mean), visit.pool)


def add_noise(visit: Visit) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Send Gaussian noise of ten times the update's norm instead of it."""
    noised = []
    for leaf in visit.mean:
        noise = torch.from_numpy(visit.random.normal(size=tuple(leaf.shape))).to(leaf)
        noised.append(10 * noise * leaf.norm() / noise.norm().clamp(min=1e-30))
    return tuple(noised), visit.pool


def send_scores(positive: float, negative: float) -> Attack:
    """Send one score for all positives, and one for all negatives."""

    def poison(visit: Visit) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        pool = tuple(visit.pool[side].clone() for side in (0, 1))
        for leaf, score in zip(pool, (positive, negative), strict=True):
            read_scores(leaf).fill_(score)
        return visit.mean, pool

    return poison


def swap_scores(visit: Visit) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Send the scores of negatives as those of positives, and the other way round; a batch has as many of each."""
    pool = tuple(leaf.clone() for leaf in visit.pool)
    for leaf, opposite in zip(pool, reversed(visit.pool), strict=True):
        read_scores(leaf).copy_(read_scores(opposite))
    return visit.mean, pool


def read_scores(leaf: Tensor) -> Tensor:
    """The scores of a class as a view; a positive may travel with estimates after its score."""
    return leaf[..., 0] if leaf.ndim > 2 else leaf


def poison_histogram(factor: float) -> Attack:
    """Swap the histograms of the classes, with a multiple of their masses."""
    return lambda visit: (tuple(factor * leaf.flip(0) if leaf.ndim == 2 else leaf for leaf in visit.mean), visit.pool)


UPDATE_ATTACKS: dict[str, Attack] = {
    "update times -1": scale_update(-1),
    "update times -10": scale_update(-10),
    "update times -1000": scale_update(-1000),
    "noise of ten times the norm": add_noise,
}

SCORE_ATTACKS: dict[str, Attack] = {
    "classes swapped": swap_scores,
    "all scores 0": send_scores(0, 0),
    "scores 20 the wrong way": send_scores(-20, 20),
    "scores 1e6 the wrong way": send_scores(-1e6, 1e6),
    "scores 1e6 the right way": send_scores(1e6, -1e6),
}

HISTOGRAM_ATTACKS: dict[str, Attack] = {
    "histograms swapped": poison_histogram(1),
    "histograms swapped, mass times 1000": poison_histogram(1000),
}

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "cycp-fedavg": ("cycp-fedavg", {}),
    "cycp-pairwise, sigmoid": ("cycp-pairwise", {}),
    "cycp-pairwise, logistic": ("cycp-pairwise", {"objective": "pairwise-logistic"}),
    "cycp-pairwise, squared hinge": ("cycp-pairwise", {"objective": "squared-hinge", "learning_rate": 0.01}),
    "cycp-pairwise, histograms": ("cycp-pairwise", {"pool": "histogram"}),
}


class PoisonedSite:
    """A site that changes what it sends when it is visited."""

    def __init__(self, site: AnsweringSite, attack: Attack) -> None:
        self._site, self._attack = site, attack

    def answer_message(self, payload: Payload) -> Payload:
        """The site's answer, poisoned where it is one to a visit."""
        answer = self._site.answer_message(payload)
        header = answer.read_header()
        if header["kind"] != "visit":
            return answer
        header.pop("layouts")
        tensors, random = unpack_tensors(answer), np.random.default_rng(header["round"])
        mean, pool = tuple(tensors["mean"]), tuple(tensors["pool"])
        if mean or pool:
            is_mute = not pool and self._attack in SCORE_ATTACKS.values()
            mean, pool = (mean, pool) if is_mute else self._attack(Visit(mean, pool, random))
        return pack_payload(header, {"mean": mean, "pool": pool})


FEDERATIONS = {"six": (6, 3), "twelve": (12, 2), "hours": (48, 8)}
"""Sites and groups."""


class Federation(NamedTuple):
    """Rows of each site, their groups, and the held-out rows of all together."""

    rows: list[SiteData]
    groups: list[str]
    test: tuple[Tensor, np.ndarray]


def make_federation(name: str) -> Federation:
    """The demo's rows at `six`, `twelve` or 48 sites (`hours`)."""
    count, group_count = FEDERATIONS[name]
    data = CreditCard().load(0)
    assert data.train.client is not None
    hours = np.array([int(str(client).removeprefix("hour-")) for client in data.train.client])
    sites = hours % count
    groups = [str(site % 24 // 3 if name == "hours" else site % group_count) for site in range(count)]
    rows = []
    for site in range(len(groups)):
        part = data.train.take(np.flatnonzero(sites == site))
        rows.append(SiteData.from_arrays(np.asarray(part.inputs, np.float32), part.labels))
    test = torch.from_numpy(np.asarray(data.test.inputs, np.float32))
    return Federation(rows, groups, (test, np.asarray(data.test.labels)))


class Defence(NamedTuple):
    """The settings of the recipe and of the server's policy, and whether uploads are compared with the history."""

    recipe: Mapping[str, Any]
    policy: Mapping[str, Any]
    checks: bool = True


DEFENCES: dict[str, Defence] = {
    "none": Defence({}, {"norm_limit": UNLIMITED, "quarantine_after": 0}, checks=False),
    "checks": Defence({}, {}),
    "history limit 3": Defence({}, {"history_limit": 3.0}),
    "checks, trimmed mean": Defence({"mean": "trimmed"}, {}),
    "checks, median": Defence({"mean": "median"}, {}),
    "checks, pool reach 0": Defence({"pool_reach": 0.0}, {}),
}


def train_federation(
    federation: Federation, method: str, defence: Defence, attack: Attack | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """A whole run: its AUC on all held-out rows, None if it had to stop, and who was refused how often."""
    name, options = METHODS.get(method, (method, {}))
    recipe = Recipe.of(name, **{"cycles": CYCLES, **options, **defence.recipe, **settings})
    names = [f"site-{number:02d}" for number in range(len(federation.rows))]
    entries = tuple(SiteEntry(name, group) for name, group in zip(names, federation.groups, strict=True))
    policy = ServerPolicy(evaluation="none", poll_interval=1e-4, **defence.policy)
    agreement = FederationAgreement(recipe=recipe, sites=entries, policy=policy)
    poisoned = int(np.argmax([site.class_counts[0] for site in federation.rows]))
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        sites: dict[str, AnsweringSite] = {
            name: Site(
                lambda rows=rows: rows,  # type: ignore[misc]
                lambda run, name=name: FolderSiteState(Path(folder) / name / run),  # type: ignore[misc]
            )
            for name, rows in zip(names, federation.rows, strict=True)
        }
        if attack is not None:
            sites[names[poisoned]] = PoisonedSite(sites[names[poisoned]], attack)
        run = FederatedRun.create(agreement, Exchange(InProcessGrid(sites), entries, policy), Path(folder) / "run")
        engine = run.loop.training.engine
        assert isinstance(engine, FederatedEngine)
        if not defence.checks:
            engine.checks = None
        stopped = ""
        try:
            run.train_to_end()
        except TrainingStopped as reason:
            stopped = str(reason)
        lines = run.folder.read_lines("attendance.jsonl")
        model = run.loop.evaluated_model()
        scores = run.loop.network.predict(model, federation.test[0]).double().numpy()
        quarantined = [line["site"] for line in run.folder.read_lines("quarantine.jsonl")]
    refused = {site: sum(site in line["refused"] for line in lines) for site in names}
    reasons = sorted({reason for line in lines for reason in line["refused"].values()})
    return {
        "auc": None if stopped or not np.isfinite(scores).all() else float(auc(federation.test[1], scores)),
        "stopped": stopped[:200],
        "answers": sum(len(line["answered"]) + len(line["refused"]) for line in lines),
        "refused": {site: count for site, count in refused.items() if count},
        "quarantined": quarantined,
        "poisoned": names[poisoned] if attack is not None else None,
        "reasons": reasons[:5],
        "seconds": round(time.perf_counter() - begin, 1),
    }


class Case(NamedTuple):
    """One run: which federation and method, the defence, and the attack, "" for none; `settings` are of the recipe."""

    federation: str
    method: str
    defence: str
    attack: str = ""
    settings: str = ""


HONEST_HOURS = ("cycp-average-precision", "cycp-pairwise", "a-scaffold", "cycp-pairwise, histograms", "cycp-fedavg")
"""What is also run at 48 sites; the first ones have the most uneven updates."""

HONEST_SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    "constant": {"stages": "constant"},
    "geometric": {"stages": Geometric(initial=1)},
}


def list_honest_cases() -> list[Case]:
    """Every method with learning rates that fall at milestones, that stay, and that halve from stage to stage."""
    cases = [
        Case("six", method, "checks", settings=name)
        for name in HONEST_SETTINGS
        for method in [*find_methods(), "cycp-pairwise, histograms"]
    ]
    cases += [Case("twelve", method, "checks") for method in [*find_methods(), "cycp-pairwise, histograms"]]
    return [*cases, *(Case("hours", method, "checks") for method in HONEST_HOURS)]


def list_attack_cases() -> list[Case]:
    """Score attacks where cohorts are small, and update attacks where they are small and where they are larger."""
    cases = [
        Case("six", method, defence, attack)
        for method in ("cycp-pairwise, sigmoid", "cycp-pairwise, squared hinge", "cycp-pairwise, logistic")
        for defence in ("none", "checks", "checks, pool reach 0")
        for attack in ("", *SCORE_ATTACKS)
    ]
    cases += [
        Case("six", "cycp-partial-auc", defence, attack)
        for defence in ("none", "checks")
        for attack in ("", *SCORE_ATTACKS)
    ]
    cases += [
        Case("six", "cycp-pairwise, histograms", defence, attack)
        for defence in ("none", "checks")
        for attack in ("", *HISTOGRAM_ATTACKS)
    ]
    cases += [
        Case("six", method, defence, attack)
        for method in ("cycp-pairwise, sigmoid", "cycp-fedavg")
        for defence in ("none", "checks", "history limit 3")
        for attack in ("", *UPDATE_ATTACKS)
    ]
    cases += [
        Case("twelve", method, defence, attack)
        for method in ("cycp-pairwise, sigmoid", "cycp-fedavg")
        for defence in ("none", "checks", "checks, trimmed mean", "checks, median")
        for attack in ("", *UPDATE_ATTACKS)
    ]
    return list(dict.fromkeys(cases))


def run_cases(cases: list[Case], record: Path) -> None:
    """Run what the record does not hold yet, and add it."""
    stored: dict[str, Any] = json.loads(record.read_text()) if record.is_file() else {"about": {}, "rows": []}
    done = {Case(*(row[name] for name in Case._fields)) for row in stored["rows"]}
    attacks = {**UPDATE_ATTACKS, **SCORE_ATTACKS, **HISTOGRAM_ATTACKS, "": None}
    federations: dict[str, Federation] = {}
    for case in cases:
        if case in done:
            continue
        federation = federations.setdefault(case.federation, make_federation(case.federation))
        defence, attack = DEFENCES[case.defence], attacks[case.attack]
        outcome = train_federation(federation, case.method, defence, attack, HONEST_SETTINGS[case.settings])
        stored["rows"].append({**case._asdict(), **outcome})
        stored["about"] = {"cycles": CYCLES, "seed": 0, **describe_hardware()}
        record.write_text(json.dumps(stored, indent=1) + "\n")
        score = outcome["stopped"] or f"AUC {outcome['auc'] or math.nan:.4f}"
        print(f"{' | '.join(case)} | {score} | refused {outcome['refused']}", flush=True)


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["honest", "attacks", "tables"])
    parser.add_argument("--record", type=Path, default=RECORD)
    arguments = parser.parse_args()
    # What is refused is counted; thousands of warnings would hide the results.
    logging.getLogger("fedauc").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    if arguments.part == "tables":
        print_tables(json.loads(arguments.record.read_text())["rows"])
        return
    run_cases(list_honest_cases() if arguments.part == "honest" else list_attack_cases(), arguments.record)


def print_tables(rows: list[dict[str, Any]]) -> None:
    """The refusals of honest sites, then one table of AUCs for each federation and method."""
    honest = [row for row in rows if not row["attack"] and row["defence"] == "checks"]
    answers, refused = sum(row["answers"] for row in honest), sum(sum(row["refused"].values()) for row in honest)
    print(f"{len(honest)} honest runs, {answers} answers, {refused} refused")
    for row in honest:
        if row["refused"]:
            print(f"  {row['federation']} {row['method']} {row['settings']}: {row['refused']} {row['reasons']}")
    attacked = [row for row in rows if not row["settings"]]
    for federation, method in dict.fromkeys((row["federation"], row["method"]) for row in attacked if row["attack"]):
        part = [row for row in attacked if (row["federation"], row["method"]) == (federation, method)]
        defences = list(dict.fromkeys(row["defence"] for row in part))
        print(f"\n{federation}, {method}\n\n| attack | {' | '.join(defences)} |\n|---|{'---|' * len(defences)}")
        for attack in dict.fromkeys(row["attack"] for row in part):
            cells = {row["defence"]: describe_outcome(row) for row in part if row["attack"] == attack}
            print(f"| {attack or 'none'} | {' | '.join(cells.get(defence, '-') for defence in defences)} |")


def describe_outcome(row: dict[str, Any]) -> str:
    """The AUC, and how often the poisoned site and others were refused."""
    poisoned = row["refused"].get(row["poisoned"], 0)
    others = sum(row["refused"].values()) - poisoned
    notes = [f"{poisoned} refused"] * bool(poisoned) + [f"{others} of others"] * bool(others)
    score = "stopped" if row["stopped"] else "no number" if row["auc"] is None else f"{row['auc']:.4f}"
    return f"{score} ({', '.join(notes)})" if notes else score


if __name__ == "__main__":
    main()
