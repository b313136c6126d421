"""The summary of the runs of `methods.py`: means, paired differences, ranks, tests over problems, and settings.

Only problems on which every contender has run on every split are summarised; the summary names what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from methods_statistics import compare_problems, compare_splits, correct_by_holm, rank_contenders

PLAIN, BALANCED, PAIRWISE = "cycp-fedavg", "cycp-fedavg-balanced", "cycp-pairwise"
REFERENCES = (PLAIN, BALANCED, PAIRWISE)
"""What every contender is compared with."""

METRICS = {"auc": "AUC", "ap": "average precision", "pauc": "partial AUC (false positive rate at most .05)"}
TARGET_MARGIN = 0.005
"""The common AUC of a problem is that of CyCp-FedAvg less this much."""

Record = dict[str, Any]
Runs = Mapping[tuple[str, str], Sequence[Record]]
"""By problem and contender: the run of the chosen setting on every split, in the order of the splits."""


def collect_chosen_runs(records: Sequence[Record]) -> tuple[dict[tuple[str, str], list[Record]], list[str]]:
    """The runs of chosen settings, and the contenders of problems that are not complete, with what they lack.

    Candidates count where they have runs; nothing is missing where they have none.
    """
    from methods import CONTENDERS, EVERYONE, SPLITS, Run, choose_setting, index_records
    from problems import list_problems

    by_key, runs, missing = index_records(list(records)), {}, []
    others = [name for name in EVERYONE if name not in CONTENDERS]
    candidates = [name for name in others if any(record["contender"] == name for record in records)]
    for problem in list_problems():
        for contender in (*CONTENDERS, *candidates):
            chosen = choose_setting(by_key, problem, contender)
            found = [by_key.get(Run(problem, contender, chosen or {}, split).key) for split in SPLITS]
            if chosen is None or any(record is None for record in found):
                missing.append(f"{contender} on {problem}")
            else:
                runs[problem, contender] = [record for record in found if record is not None]
    return runs, missing


def choose_complete(runs: Runs) -> tuple[list[str], list[str]]:
    """Problems on which every contender that has run anywhere has run, and those contenders."""
    contenders = list(dict.fromkeys(contender for _, contender in runs))
    problems = dict.fromkeys(problem for problem, _ in runs)
    return [name for name in problems if all((name, contender) in runs for contender in contenders)], contenders


def count_rounds_to_target(run: Record, target: float) -> float:
    """The first round after which the test AUC is at least the target; infinite if it never is."""
    return next((float(number) for number, auc in run.get("curve", []) if auc >= target), float("inf"))


def summarise_result(runs: Runs, problem: str, contender: str) -> Record:
    """The means over splits of a contender on a problem, and its paired differences to the references."""
    own = runs[problem, contender]
    target = mean(run["auc"] for run in runs[problem, PLAIN]) - TARGET_MARGIN
    rounds = median(count_rounds_to_target(run, target) for run in own)
    per_round = mean(run.get("bytes_up", 0) / run.get("rounds", 1) for run in own)
    reached = rounds < float("inf")
    entry: Record = {
        "problem": problem,
        "contender": contender,
        "setting": own[0]["setting"],
        **{name: round(mean(run[name] for run in own), 5) for name in METRICS},
        "target": round(target, 4),
        "rounds_to_target": rounds if reached else None,
        "bytes_to_target": round(rounds * per_round) if reached else None,
        "bytes_per_round": round(per_round),
        "stopped": sum("stopped" in run for run in own),
        "differences": {},
    }
    for reference in REFERENCES:
        if reference != contender:
            pairs = list(zip(own, runs[problem, reference], strict=True))
            entry["differences"][reference] = {
                name: [round(value, 6) for value in compare_splits([a[name] - b[name] for a, b in pairs], a["overlap"])]
                for name in METRICS
                for a, _ in pairs[:1]
            }
    return entry


def find_result(record: Record, problem: str, contender: str) -> Record:
    """A contender's numbers on a problem."""
    results = record["results"]
    return next(entry for entry in results if (entry["problem"], entry["contender"]) == (problem, contender))


def list_differences(record: Record, contender: str, reference: str, metric: str) -> list[list[float]]:
    """Mean, ends of the interval and p-value of the difference on every problem."""
    return [
        find_result(record, problem["name"], contender)["differences"][reference][metric]
        for problem in record["problems"]
    ]


def average_by_data(record: Record, values: Sequence[float]) -> list[float]:
    """One value per dataset: the mean over the problems that were made of it."""
    groups: dict[str, list[float]] = {}
    for problem, value in zip(record["problems"], values, strict=True):
        groups.setdefault(problem["data"], []).append(value)
    return [mean(group) for group in groups.values()]


def summarise_over_problems(record: Record) -> list[Record]:
    """Every contender against each reference: mean difference, wins and losses, and Wilcoxon's test with Holm's rule.

    Wilcoxon's p-values are corrected over the contenders, those of single problems over the problems. Problems that
    were made of the same data are not independent, so that the test is also made over datasets.
    """
    entries = []
    for metric in METRICS:
        for reference in REFERENCES:
            others = [name for name in record["contenders"] if name != reference]
            table = {name: list_differences(record, name, reference, metric) for name in others}
            means = {name: [row[0] for row in table[name]] for name in others}
            corrected = correct_by_holm([compare_problems(means[name]) for name in others])
            by_data = correct_by_holm([compare_problems(average_by_data(record, means[name])) for name in others])
            for name, p, data_p in zip(others, corrected, by_data, strict=True):
                rows = table[name]
                holm = correct_by_holm([row[3] for row in rows])
                entries.append(
                    {
                        "metric": metric,
                        "reference": reference,
                        "contender": name,
                        "mean": round(mean(row[0] for row in rows), 5),
                        "median": round(median(row[0] for row in rows), 5),
                        "least": round(min(row[0] for row in rows), 5),
                        "higher": sum(row[0] > 0 for row in rows),
                        "better": sum(row[1] > 0 for row in rows),
                        "worse": sum(row[2] < 0 for row in rows),
                        "better_by_holm": sum(row[0] > 0 and q < 0.05 for row, q in zip(rows, holm, strict=True)),
                        "worse_by_holm": sum(row[0] < 0 and q < 0.05 for row, q in zip(rows, holm, strict=True)),
                        "wilcoxon_holm_p": p,
                        "wilcoxon_holm_p_over_datasets": data_p,
                    }
                )
    return entries


def summarise_ranks(record: Record) -> dict[str, Any]:
    """Mean ranks over problems for every metric."""
    ranks = {}
    for metric in METRICS:
        values = [
            [find_result(record, problem["name"], name)[metric] for name in record["contenders"]]
            for problem in record["problems"]
        ]
        ranking = rank_contenders(np.array(values))
        ranks[metric] = {
            "ranks": dict(zip(record["contenders"], (round(rank, 3) for rank in ranking.ranks), strict=True)),
            "friedman_p": ranking.friedman_p,
            "critical_difference": round(ranking.critical_difference, 3),
        }
    return ranks


class Trial(NamedTuple):
    """A setting on a problem: validation and test AUC, as means over the tuning splits."""

    setting: Record
    validation: float
    auc: float
    diverged: bool


Trials = Mapping[tuple[str, str], Sequence[Trial]]
"""By problem and contender: every setting that was tried."""


def collect_trials(records: Sequence[Record], problems: Sequence[str]) -> dict[tuple[str, str], list[Trial]]:
    """All settings of all contenders on the problems."""
    from methods import TUNING_SPLITS

    groups: dict[tuple[str, str, str], list[Record]] = {}
    for run in records:
        if run["split"] in TUNING_SPLITS and run["problem"] in problems:
            groups.setdefault((run["problem"], run["contender"], json.dumps(run["setting"])), []).append(run)
    trials: dict[tuple[str, str], list[Trial]] = {}
    for (problem, contender, setting), runs in groups.items():
        validation, auc = (mean(run[name] for run in runs) for name in ("validation", "auc"))
        trial = Trial(json.loads(setting), validation, auc, any("stopped" in run for run in runs))
        trials.setdefault((problem, contender), []).append(trial)
    return trials


def choose_best(trials: Iterable[Trial]) -> Trial:
    """The one with the highest validation AUC."""
    return max(trials, key=lambda trial: trial.validation)


def summarise_settings(trials: Trials, problems: Sequence[str], contenders: Sequence[str]) -> list[Record]:
    """What one setting for all problems costs: its test AUC on the tuning splits less that of the tuned setting."""
    entries = []
    for contender in contenders:
        tuned = {problem: choose_best(trials[problem, contender]) for problem in problems}
        settings = [trial.setting for trial in trials[problems[0], contender]]
        rates = sorted({list_rates(setting)[0] for setting in settings})
        for setting in settings:
            own = {p: next(trial for trial in trials[p, contender] if trial.setting == setting) for p in problems}
            losses = {problem: own[problem].auc - tuned[problem].auc for problem in problems}
            entries.append(
                {
                    "contender": contender,
                    "setting": setting,
                    "mean": round(mean(losses.values()), 5),
                    "least": round(min(losses.values()), 5),
                    "worst_problem": min(losses, key=losses.__getitem__),
                    "chosen": sum(trial.setting == setting for trial in tuned.values()),
                    "at_the_end_of_the_grid": list_rates(setting)[0] in (rates[0], rates[-1]),
                    "diverged": sum(trial.diverged for trial in own.values()),
                }
            )
    return entries


def list_rates(setting: Mapping[str, Any]) -> list[float]:
    """The learning rate of a setting, of the clients or of the server."""
    return [value for name, value in setting.items() if name != "weighting"]


def summarise_weighting(trials: Trials, problems: Sequence[str], contenders: Sequence[str]) -> list[Record]:
    """`pooled` less `clients`, each with its own best learning rate: test AUC on the tuning splits, per problem."""
    entries = []
    for contender in contenders:
        differences = {}
        for problem in problems:
            pooled, clients = (
                choose_best(trial for trial in trials[problem, contender] if trial.setting["weighting"] == weighting)
                for weighting in ("pooled", "clients")
            )
            differences[problem] = pooled.auc - clients.auc
        entries.append(
            {
                "contender": contender,
                "mean": round(mean(differences.values()), 5),
                "higher": sum(value > 0 for value in differences.values()),
                "p": compare_problems(list(differences.values())),
                "differences": {problem: round(value, 5) for problem, value in differences.items()},
            }
        )
    return entries


def collect_common_runs(
    records: Sequence[Record], problems: Sequence[str], contenders: Sequence[str]
) -> dict[tuple[str, str], list[Record]]:
    """The runs of each contender's common setting on every problem, in the order of the splits."""
    from methods import SPLITS, Run, choose_common_setting, index_records
    from problems import list_problems

    by_key, runs = index_records(list(records)), {}
    for contender in contenders:
        setting = choose_common_setting(by_key, list(list_problems()), contender)
        for problem in problems:
            found = [by_key.get(Run(problem, contender, setting or {}, split).key) for split in SPLITS]
            if setting is not None and all(record is not None for record in found):
                runs[problem, contender] = [record for record in found if record is not None]
    return runs


def summarise_common_settings(records: Sequence[Record], problems: Sequence[str], names: Sequence[str]) -> list[Record]:
    """Contenders with one setting for all problems; empty where not all of them have run.

    Choosing per problem follows the noise of few validation positives; here hardly anything is chosen.
    """
    runs = collect_common_runs(records, problems, names)
    if any((problem, name) not in runs for problem in problems for name in names):
        return []
    common = {name: {p: mean(run["auc"] for run in runs[p, name]) for p in problems} for name in names}
    ranks = rank_contenders(np.array([[common[name][problem] for name in names] for problem in problems])).ranks
    entries: list[Record] = []
    for contender, rank in zip(names, ranks, strict=True):
        pairs = {
            reference: [
                compare_splits(
                    [a["auc"] - b["auc"] for a, b in zip(runs[p, contender], runs[p, reference], strict=True)],
                    runs[p, contender][0]["overlap"],
                )
                for p in problems
            ]
            for reference in REFERENCES
        }
        differences = {
            reference: [common[contender][problem] - common[reference][problem] for problem in problems]
            for reference in REFERENCES
        }
        entries.append(
            {
                "contender": contender,
                "setting": runs[problems[0], contender][0]["setting"],
                "rank": round(rank, 3),
                "auc": round(mean(common[contender].values()), 5),
                "mean": {name: round(mean(values), 5) for name, values in differences.items()},
                "better": {name: sum(row.low > 0 for row in rows) for name, rows in pairs.items()},
                "worse": {name: sum(row.high < 0 for row in rows) for name, rows in pairs.items()},
                "p": {name: compare_problems(values) for name, values in differences.items()},
            }
        )
    for reference in REFERENCES:
        others = [entry for entry in entries if entry["contender"] != reference]
        for entry, p in zip(others, correct_by_holm([entry["p"][reference] for entry in others]), strict=True):
            entry["p"][reference] = p
    return entries


def drop_curves(records: Sequence[Record]) -> list[Record]:
    """The runs of chosen settings as they are, and without curves those that chose them and those of common settings.

    Runs with learning rates that are no longer in the grid are left out.
    """
    from methods import CONTENDERS, TUNING_SPLITS
    from problems import list_problems

    chosen = {id(run) for own in collect_chosen_runs(records)[0].values() for run in own}
    common = collect_common_runs(records, list(list_problems()), list(CONTENDERS))
    others = {id(run) for own in common.values() for run in own} | {
        id(run)
        for run in records
        if run["split"] in TUNING_SPLITS and run["setting"] in CONTENDERS[run["contender"]].list_settings()
    }
    kept = ("problem", "contender", "setting", "split", "validation", "auc", "overlap", "seconds", "stopped")
    return [
        run if id(run) in chosen else {key: run[key] for key in kept if key in run}
        for run in records
        if id(run) in chosen | others
    ]


def make_record(records: Sequence[Record], describe: Callable[[str], Record]) -> Record:
    """Everything that the page shows; `describe` says what a problem is."""
    runs, missing = collect_chosen_runs(records)
    problems, contenders = choose_complete(runs)
    trials = collect_trials(records, problems)
    record: Record = {
        "about": {
            "runs": len(records),
            "seconds": round(sum(run["seconds"] for run in records)),
            "missing": missing,
            "diverged": sum("stopped" in run for run in records),
        },
        "problems": [describe(name) for name in problems],
        "contenders": contenders,
        "results": [summarise_result(runs, problem, name) for problem in problems for name in contenders],
        "settings": summarise_settings(trials, problems, contenders),
        "weighting": summarise_weighting(trials, problems, contenders),
        "common_settings": summarise_common_settings(records, problems, contenders),
    }
    return {**record, "ranks": summarise_ranks(record), "over_problems": summarise_over_problems(record)}
