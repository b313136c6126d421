"""Ideas beyond the paper, judged by the benchmark of `methods.py`: the generated tables of docs/methods.md on them.

    python benchmarks/methods_tried.py benchmarks/out/methods.jsonl benchmarks/records    # copies runs of candidates
    python benchmarks/methods_tried.py benchmarks/records docs/methods.md                 # the tables of the page

Reads records/methods.jsonl, the runs of the contenders, and records/methods_tried.jsonl, in which two kinds of runs
stand. Candidates (`CANDIDATES` of `methods.py`) were tuned and measured exactly as the contenders were. Prototypes,
whose lines say so, were tried on fewer problems, on the two splits that tune, with four learning rates and one
weighting; they are compared with the reference under the same restriction. The code of prototypes that did not win is
not in fedauc.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from methods_record import BALANCED, METRICS, PAIRWISE, PLAIN, Record, choose_complete, collect_chosen_runs, list_rates
from methods_statistics import Difference, compare_problems, compare_splits, correct_by_holm
from methods_summary import make_table, replace_blocks, write_number, write_p

TRIED = "methods_tried.jsonl"
MOMENTUM = "cycp-pairwise + momentum"
REFERENCES = (PLAIN, BALANCED, PAIRWISE, MOMENTUM)

Chosen = Mapping[tuple[str, str], Sequence[Record]]
"""By problem and contender: the runs of the chosen setting, in the order of the splits."""


def read_runs(path: Path) -> list[Record]:
    """The runs in a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def compare_pair(runs: Chosen, problems: Sequence[str], pair: tuple[str, str], metric: str) -> list[Difference]:
    """The first of a pair less the second, on every problem, with the interval over splits."""
    return [
        compare_splits(
            [a[metric] - b[metric] for a, b in zip(runs[p, pair[0]], runs[p, pair[1]], strict=True)],
            runs[p, pair[0]][0]["overlap"],
        )
        for p in problems
    ]


class Counts(NamedTuple):
    """Comparisons in which one contender is above or below another: by the interval, and after Holm's rule."""

    comparisons: int
    above: int
    below: int
    above_by_holm: int
    below_by_holm: int


def count_comparisons(runs: Chosen, problems: Sequence[str], name: str, rivals: Sequence[str], metric: str) -> Counts:
    """A contender against all of its rivals on all problems; p-values are corrected over the problems of a rival."""
    above = below = above_by_holm = below_by_holm = 0
    for rival in rivals:
        differences = compare_pair(runs, problems, (name, rival), metric)
        corrected = correct_by_holm([difference.p for difference in differences])
        above += sum(difference.low > 0 for difference in differences)
        below += sum(difference.high < 0 for difference in differences)
        significant = [difference.mean for difference, p in zip(differences, corrected, strict=True) if p < 0.05]
        above_by_holm += sum(center > 0 for center in significant)
        below_by_holm += sum(center < 0 for center in significant)
    return Counts(len(rivals) * len(problems), above, below, above_by_holm, below_by_holm)


def list_baselines(contenders: Sequence[str]) -> list[str]:
    """Every contender but CyCp-Pairwise and its variants."""
    return [name for name in contenders if not name.startswith(PAIRWISE)]


def count_all_comparisons(runs: Chosen) -> dict[tuple[str, str], Counts]:
    """By contender and metric: against all baselines."""
    problems, contenders = choose_complete(runs)
    baselines = list_baselines(contenders)
    return {
        (name, metric): count_comparisons(runs, problems, name, [b for b in baselines if b != name], metric)
        for name in contenders
        for metric in METRICS
    }


def show_counts(counts: Mapping[tuple[str, str], Counts]) -> str:
    """The table of all contenders against all baselines, the fewest losses of AUC first."""
    names = sorted(
        {name for name, _ in counts}, key=lambda name: (counts[name, "auc"].below, -counts[name, "auc"].above)
    )
    body = []
    for name in names:
        own = [counts[name, metric] for metric in METRICS]
        cells = [f"{c.above} / {c.below} ({c.above_by_holm} / {c.below_by_holm})" for c in own]
        body.append([f"`{name}`", str(own[0].comparisons), *cells])
    return make_table(["above / below", "comparisons", *METRICS.values()], body)


def show_candidates(runs: Chosen, candidates: Sequence[str], metric: str) -> str:
    """Every candidate against the references: mean difference, Wilcoxon's p-value, and problems above / below."""
    body = []
    for name in candidates:
        problems = [problem for problem, contender in runs if contender == name]
        cells = []
        for reference in REFERENCES:
            differences = compare_pair(runs, problems, (name, reference), metric)
            centers = [difference.mean for difference in differences]
            above, below = (sum(test) for test in zip(*((d.low > 0, d.high < 0) for d in differences), strict=True))
            cells.append(
                f"{write_number(mean(centers), True, 4)} (p {write_p(compare_problems(centers))}); {above} / {below}"
            )
        c = count_comparisons(runs, problems, name, list_baselines(list_contenders()), metric)
        cells.append(f"{c.above} / {c.below} ({c.above_by_holm} / {c.below_by_holm}) of {c.comparisons}")
        body.append([f"`{name}`", str(len(problems)), *cells])
    heads = (f"less `{reference}`" for reference in REFERENCES)
    return make_table([METRICS[metric], "problems", *heads, "any baseline: above / below"], body)


def show_constant(runs: Chosen) -> str:
    """Contenders with a constant learning rate, less the same with the default: difference, p-value, above / below."""
    problems, _ = choose_complete(runs)
    body = []
    for name in list_constant():
        cells = []
        for metric in METRICS:
            differences = compare_pair(runs, problems, (name, name.removesuffix(" + constant")), metric)
            centers = [difference.mean for difference in differences]
            above, below = sum(d.low > 0 for d in differences), sum(d.high < 0 for d in differences)
            cells.append(
                f"{write_number(mean(centers), True, 4)} (p {write_p(compare_problems(centers))}); {above} / {below}"
            )
        body.append([f"`{name.removesuffix(' + constant')}`", *cells])
    return make_table(["constant less falling", *METRICS.values()], body)


def tune_on_problem(runs: Sequence[Record]) -> float:
    """The mean test AUC on the tuning splits of the learning rate with the highest mean validation AUC there."""
    by_rate: dict[float, list[Record]] = {}
    for run in runs:
        by_rate.setdefault(list_rates(run["setting"])[0], []).append(run)
    best = max(by_rate.values(), key=lambda group: mean(run["validation"] for run in group))
    return mean(run["auc"] for run in best)


def compare_prototypes(runs: Sequence[Record], prototypes: Sequence[Record]) -> dict[tuple[str, str], dict[str, float]]:
    """By name and weighting of the prototype: its AUC less that of its reference, on every problem that it saw.

    Prototypes without a reference are references themselves.
    """
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for run in (*runs, *prototypes):
        if run["split"] < 2:
            groups.setdefault((run["contender"], run["setting"]["weighting"], run["problem"]), []).append(run)
    table: dict[tuple[str, str], dict[str, float]] = {}
    for run in (run for run in prototypes if "reference" in run):
        key, problem = (run["contender"], run["setting"]["weighting"]), run["problem"]
        if problem not in table.setdefault(key, {}):
            reference = groups[run["reference"], run["reference_weighting"], problem]
            table[key][problem] = tune_on_problem(groups[(*key, problem)]) - tune_on_problem(reference)
    return table


def show_prototypes(runs: Sequence[Record], prototypes: Sequence[Record]) -> str:
    """Every prototype less its reference: the mean over problems, the extremes, and Wilcoxon's test."""
    references = {(run["contender"], run["setting"]["weighting"]): run for run in prototypes}
    body = []
    for key, differences in compare_prototypes(runs, prototypes).items():
        values, run = list(differences.values()), references[key]
        worst, best = (choose(differences, key=differences.__getitem__) for choose in (min, max))
        body.append(
            [
                key[0],
                f"`{key[1]}`",
                f"`{run['reference']}`, `{run['reference_weighting']}`",
                f"{write_number(mean(values), True, 4)} (p {write_p(compare_problems(values))})",
                f"{sum(value > 0 for value in values)} of {len(values)}",
                f"{write_number(differences[worst], True)} (`{worst}`)",
                f"{write_number(differences[best], True)} (`{best}`)",
            ]
        )
    return make_table(["prototype", "weighting", "less", "AUC", "higher on", "lowest", "highest"], body)


def make_blocks(records: Path) -> dict[str, str]:
    """Every generated part of docs/methods.md that is about what was tried, from the folder of records."""
    runs, tried = read_runs(records / "methods.jsonl"), read_runs(records / TRIED)
    measured: list[dict[str, Any]] = [run for run in tried if not run.get("prototype")]
    chosen, _ = collect_chosen_runs([*runs, *measured])
    contenders = {key: own for key, own in chosen.items() if key[1] in list_contenders()}
    return {
        "any baseline": show_counts(count_all_comparisons(contenders)),
        **{f"candidates {metric}": show_candidates(chosen, list_candidates(), metric) for metric in METRICS},
        "constant": show_constant(chosen),
        "prototypes": show_prototypes(runs, [run for run in tried if run.get("prototype")]),
    }


def list_contenders() -> list[str]:
    """The names of the contenders of the benchmark."""
    from methods import CONTENDERS

    return list(CONTENDERS)


def list_candidates() -> list[str]:
    """The names of the candidates."""
    from methods import CANDIDATES

    return list(CANDIDATES)


def list_constant() -> list[str]:
    """The names of the contenders with a constant learning rate."""
    from methods import CONSTANT

    return list(CONSTANT)


def copy_candidates(source: Path, target: Path) -> None:
    """Replace the recorded runs of candidates by those of a file of runs; prototypes stay.

    Curves are left out, and so are runs with learning rates that are not in the grid.
    """
    from methods import CANDIDATES, CONSTANT, TUNING_SPLITS

    copied = CANDIDATES | CONSTANT
    measured = [run for run in read_runs(source) if run["contender"] in copied]
    chosen = {id(run) for own in collect_chosen_runs(measured)[0].values() for run in own}
    candidates = [
        {key: value for key, value in run.items() if key != "curve"}
        for run in measured
        if id(run) in chosen
        or (run["split"] in TUNING_SPLITS and run["setting"] in copied[run["contender"]].list_settings())
    ]
    prototypes = [run for run in read_runs(target) if run.get("prototype")]
    lines = [json.dumps(run, separators=(",", ":")) + "\n" for run in (*candidates, *prototypes)]
    target.write_text("".join(lines))


def main() -> None:
    """Copy the runs of candidates to the records, or write the tables into the page."""
    source, target = map(Path, sys.argv[1:3])
    if target.is_dir():
        copy_candidates(source, target / TRIED)
    else:
        target.write_text(replace_blocks(target.read_text(), make_blocks(source)))


if __name__ == "__main__":
    main()
