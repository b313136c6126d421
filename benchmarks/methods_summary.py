"""Tables, ranks, tests and the figure of docs/methods.md, out of the runs of `methods.py`.

    python benchmarks/methods_summary.py benchmarks/records/methods.jsonl benchmarks/records/methods.json   # the record
    python benchmarks/methods_summary.py benchmarks/records/methods.json docs/methods.md      # the page and its figure

Only problems on which every contender has run on every split are summarised; the record names the others.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from methods_statistics import compare_problems, compare_splits, correct_by_holm, rank_contenders

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "methods.png"
PLAIN, BALANCED = "cycp-fedavg", "cycp-fedavg-balanced"
REFERENCES = (PLAIN, BALANCED)
METRICS = {"auc": "AUC", "ap": "average precision", "pauc": "partial AUC (false positive rate at most .05)"}
TARGET_MARGIN = 0.005
"""The common AUC of a problem is that of CyCp-FedAvg less this much."""

Record = dict[str, Any]
Runs = Mapping[tuple[str, str], Sequence[Record]]
"""By problem and contender: the run of the chosen setting on every split, in the order of the splits."""


# --------------------------------------------------------------------------- the record


def collect_chosen_runs(records: Sequence[Record]) -> tuple[dict[tuple[str, str], list[Record]], list[str]]:
    """The runs of chosen settings, and the contenders of problems that are not complete, with what they lack."""
    from methods import CONTENDERS, SPLITS, Run, choose_setting, index_records
    from problems import list_problems

    by_key, runs, missing = index_records(list(records)), {}, []
    for problem in list_problems():
        for contender in CONTENDERS:
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


def summarise_over_problems(record: Record) -> list[Record]:
    """Every contender against each reference: mean difference, wins and losses, and Wilcoxon's test with Holm's rule.

    Wilcoxon's p-values are corrected over the contenders, those of single problems over the problems.
    """
    entries = []
    for metric in METRICS:
        for reference in REFERENCES:
            others = [name for name in record["contenders"] if name != reference]
            table = {name: list_differences(record, name, reference, metric) for name in others}
            corrected = correct_by_holm([compare_problems([row[0] for row in table[name]]) for name in others])
            for name, p in zip(others, corrected, strict=True):
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
                        "better_by_holm": sum(
                            row[0] > 0 and q < 0.05 for row, q in zip(rows, holm, strict=True)
                        ),
                        "worse_by_holm": sum(row[0] < 0 and q < 0.05 for row, q in zip(rows, holm, strict=True)),
                        "wilcoxon_holm_p": p,
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


def summarise_settings(records: Sequence[Record], problems: Sequence[str], contenders: Sequence[str]) -> list[Record]:
    """What one setting for all problems costs: the test AUC on split 0 less that of the setting tuned per problem."""
    tried = [run for run in records if run["split"] == 0 and run["problem"] in problems]
    entries = []
    for contender in contenders:
        own = [run for run in tried if run["contender"] == contender]
        tuned = {name: max((r for r in own if r["problem"] == name), key=lambda r: r["validation"]) for name in problems}
        rates = sorted({rate for run in own for rate in list_rates(run["setting"])})
        settings = {json.dumps(run["setting"]): run["setting"] for run in own}
        for key, setting in settings.items():
            losses = {
                run["problem"]: run["auc"] - tuned[run["problem"]]["auc"]
                for run in own
                if json.dumps(run["setting"]) == key
            }
            entries.append(
                {
                    "contender": contender,
                    "setting": setting,
                    "mean": round(mean(losses.values()), 5),
                    "least": round(min(losses.values()), 5),
                    "worst_problem": min(losses, key=losses.__getitem__),
                    "chosen": sum(run["setting"] == setting for run in tuned.values()),
                    "at_the_end_of_the_grid": list_rates(setting)[0] in (rates[0], rates[-1]),
                    "diverged": sum("stopped" in run for run in own if json.dumps(run["setting"]) == key),
                }
            )
    return entries


def list_rates(setting: Mapping[str, Any]) -> list[float]:
    """The learning rate of a setting, of the clients or of the server."""
    return [value for name, value in setting.items() if name != "weighting"]


def summarise_weighting(records: Sequence[Record], problems: Sequence[str], contenders: Sequence[str]) -> list[Record]:
    """`pooled` less `clients`, each with its own best learning rate by validation: test AUC on split 0, per problem."""
    entries = []
    for contender in contenders:
        differences = {}
        for problem in problems:
            own = [r for r in records if (r["problem"], r["contender"], r["split"]) == (problem, contender, 0)]
            best = {
                kind: max((r for r in own if r["setting"]["weighting"] == kind), key=lambda r: r["validation"])
                for kind in ("pooled", "clients")
            }
            differences[problem] = best["pooled"]["auc"] - best["clients"]["auc"]
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


def make_record(records: Sequence[Record]) -> Record:
    """Everything that the page shows."""
    from problems import describe_problem

    runs, missing = collect_chosen_runs(records)
    problems, contenders = choose_complete(runs)
    record: Record = {
        "about": {
            "runs": len(records),
            "seconds": round(sum(run["seconds"] for run in records)),
            "missing": missing,
            "diverged": sum("stopped" in run for run in records),
        },
        "problems": [describe_problem(name) for name in problems],
        "contenders": contenders,
        "results": [summarise_result(runs, problem, name) for problem in problems for name in contenders],
        "settings": summarise_settings(records, problems, contenders),
        "weighting": summarise_weighting(records, problems, contenders),
    }
    return {**record, "ranks": summarise_ranks(record), "over_problems": summarise_over_problems(record)}


# --------------------------------------------------------------------------- the page


def write_number(value: float, sign: bool = False, digits: int = 3) -> str:
    """A number without its leading zero, as in .912 or +.004."""
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    return text.replace("0.", ".", 1)


def write_p(value: float) -> str:
    """A p-value."""
    return "< .001" if value < 0.001 else write_number(value)


def make_table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def find_comparison(record: Record, metric: str, reference: str, contender: str) -> Record:
    """A contender against a reference over all problems."""
    return next(
        entry
        for entry in record["over_problems"]
        if (entry["metric"], entry["reference"], entry["contender"]) == (metric, reference, contender)
    )


def sort_by_rank(record: Record, metric: str = "auc") -> list[str]:
    """Contenders, the best mean rank first."""
    ranks = record["ranks"][metric]["ranks"]
    return sorted(record["contenders"], key=lambda name: ranks[name])


def make_overview(record: Record) -> str:
    """The first table: ranks, and the difference to both references."""
    body = []
    for name in sort_by_rank(record):
        cells = [f"`{name}`", f"{record['ranks']['auc']['ranks'][name]:.1f}"]
        for reference in REFERENCES:
            if name == reference:
                cells += ["-", "-"]
            else:
                entry = find_comparison(record, "auc", reference, name)
                cells.append(f"{write_number(entry['mean'], True)} (p {write_p(entry['wilcoxon_holm_p'])})")
                cells.append(f"{entry['better']} / {entry['worse']}")
        cells += [f"{record['ranks'][metric]['ranks'][name]:.1f}" for metric in ("ap", "pauc")]
        body.append(cells)
    head = ["", "mean rank, AUC", "AUC less FedAvg", "better / worse", "AUC less balanced", "better / worse"]
    return make_table([*head, "rank, AP", "rank, partial AUC"], body)


def compare_kinds(record: Record, reference: str) -> str:
    """The mean difference to a reference by the kind of problem."""
    kinds = dict.fromkeys(problem["kind"] for problem in record["problems"])
    names = {kind: [p["name"] for p in record["problems"] if p["kind"] == kind] for kind in kinds}
    body = [
        [
            f"`{name}`",
            *(
                write_number(
                    mean(find_result(record, p, name)["differences"][reference]["auc"][0] for p in names[kind]), True
                )
                for kind in kinds
            ),
        ]
        for name in sort_by_rank(record)
        if name != reference
    ]
    return make_table([f"AUC less `{reference}`", *(f"{kind} ({len(names[kind])})" for kind in kinds)], body)


def show_metric(record: Record, metric: str) -> str:
    """The mean over splits of every contender (columns) on every problem (rows); the best is marked."""
    names = sort_by_rank(record)
    body = []
    for problem in record["problems"]:
        values = [find_result(record, problem["name"], name)[metric] for name in names]
        cells = [write_number(value) + (" \\*" if value == max(values) else "") for value in values]
        body.append([f"`{problem['name']}`", *cells])
    return make_table([METRICS[metric], *(f"`{name}`" for name in names)], body)


def show_differences(record: Record, reference: str) -> str:
    """The paired AUC differences with intervals; those whose interval excludes zero are marked."""
    names = [name for name in sort_by_rank(record) if name != reference]
    body = []
    for problem in record["problems"]:
        rows = [find_result(record, problem["name"], name)["differences"][reference]["auc"] for name in names]
        cells = [
            f"{write_number(center, True)} [{write_number(low, True)}, {write_number(high, True)}]"
            + (" \\*" if low > 0 or high < 0 else "")
            for center, low, high, _ in rows
        ]
        body.append([f"`{problem['name']}`", *cells])
    return make_table([f"AUC less `{reference}`", *(f"`{name}`" for name in names)], body)


def show_rounds(record: Record) -> str:
    """Rounds and kilobytes until the common AUC of each problem."""
    names = sort_by_rank(record)
    body = []
    for problem in record["problems"]:
        rows = [find_result(record, problem["name"], name) for name in names]
        cells = [
            "never" if row["rounds_to_target"] is None
            else f"{row['rounds_to_target']:.0f} ({row['bytes_to_target'] / 1000:,.0f})"
            for row in rows
        ]
        body.append([f"`{problem['name']}`", write_number(rows[0]["target"]), *cells])
    return make_table(["rounds (kB uploaded)", "AUC", *(f"`{name}`" for name in names)], body)


def summarise_rounds(record: Record) -> str:
    """On how many problems the common AUC is reached, and the rounds and bytes relative to CyCp-FedAvg."""
    body = []
    for name in sort_by_rank(record):
        pairs = [
            (find_result(record, problem["name"], name), find_result(record, problem["name"], PLAIN))
            for problem in record["problems"]
        ]
        both = [(a, b) for a, b in pairs if a["rounds_to_target"] and b["rounds_to_target"]]
        ratios = [
            f"{median(a[key] / b[key] for a, b in both):.2f}" if both else "-"
            for key in ("rounds_to_target", "bytes_to_target")
        ]
        reached = sum(a["rounds_to_target"] is not None for a, _ in pairs)
        body.append([f"`{name}`", f"{reached} of {len(pairs)}", *ratios])
    return make_table(["", "reaches the common AUC", "rounds / FedAvg's", "bytes / FedAvg's"], body)


def show_tests(record: Record) -> str:
    """All three metrics against both references, over problems."""
    body = []
    for name in sort_by_rank(record):
        cells = [f"`{name}`"]
        for metric in METRICS:
            for reference in REFERENCES:
                if name == reference:
                    cells.append("-")
                    continue
                entry = find_comparison(record, metric, reference, name)
                p = write_p(entry["wilcoxon_holm_p"])
                cells.append(
                    f"{write_number(entry['mean'], True)} (p {p}); {entry['better_by_holm']} / {entry['worse_by_holm']}"
                )
        body.append(cells)
    short = {"auc": "AUC", "ap": "AP", "pauc": "partial AUC"}
    words = {PLAIN: "FedAvg", BALANCED: "balanced"}
    head = [f"{short[metric]} less {words[reference]}" for metric in METRICS for reference in REFERENCES]
    return make_table(["", *head], body)


def describe_problems(record: Record) -> str:
    """What each problem is."""
    head = ["problem", "kind", "what", "training rows", "positives", "sites", "of one class", "rows of a site", "columns"]
    body = [
        [
            f"`{p['name']}`",
            p["kind"],
            p["about"],
            f"{p['train_rows']:,}",
            f"{p['train_positives']:,}",
            str(p["sites"]),
            str(p["sites_with_one_class"]),
            f"{p['smallest_site']:,} to {p['largest_site']:,}",
            f"{p['columns']}",
        ]
        for p in record["problems"]
    ]
    return make_table(head, body)


def show_settings(record: Record) -> str:
    """For every contender: how its settings were chosen, its best common setting, and what weighting changes."""
    count, body = len(record["problems"]), []
    for name in sort_by_rank(record):
        entries = [entry for entry in record["settings"] if entry["contender"] == name]
        best = max(entries, key=lambda entry: entry["mean"])
        pooled = sum(entry["chosen"] for entry in entries if entry["setting"]["weighting"] == "pooled")
        ends = sum(entry["chosen"] for entry in entries if entry["at_the_end_of_the_grid"])
        rates = Counter({rate: 0 for entry in entries for rate in list_rates(entry["setting"])})
        for entry in entries:
            rates[list_rates(entry["setting"])[0]] += entry["chosen"]
        weighting = next(entry for entry in record["weighting"] if entry["contender"] == name)
        body.append(
            [
                f"`{name}`",
                f"{pooled} of {count}",
                f"{write_number(weighting['mean'], True)} (p {write_p(weighting['p'])})",
                ", ".join(f"{rate:g}: {rates[rate]}" for rate in sorted(rates)),
                str(ends),
                f"{list_rates(best['setting'])[0]:g}, {best['setting']['weighting']}: {write_number(best['mean'], True)} "
                f"({write_number(best['least'], True)} `{best['worst_problem']}`)",
            ]
        )
    head = ["", "`pooled` chosen", "AUC, `pooled` less `clients`", "learning rates chosen", "at an end of the grid"]
    return make_table([*head, "best single setting: AUC less tuned (worst problem)"], body)


def make_blocks(record: Record) -> dict[str, str]:
    """Every generated part of docs/methods.md by name."""
    blocks = {
        "overview": make_overview(record),
        "kinds against FedAvg": compare_kinds(record, PLAIN),
        "kinds against balanced": compare_kinds(record, BALANCED),
        "tests": show_tests(record),
        "differences to FedAvg": show_differences(record, PLAIN),
        "differences to balanced": show_differences(record, BALANCED),
        "rounds in short": summarise_rounds(record),
        "rounds": show_rounds(record),
        "settings": show_settings(record),
        "problems": describe_problems(record),
    }
    return blocks | {metric: show_metric(record, metric) for metric in METRICS}


def update_page(text: str, record: Record) -> str:
    """The page with the generated parts between its markers replaced by those of the record."""
    for name, block in make_blocks(record).items():
        pattern = rf"<!-- begin {re.escape(name)} -->\n.*?<!-- end -->"
        before, after = f"<!-- begin {name} -->\n", "<!-- end -->"
        text = re.sub(pattern, lambda _, part=f"{before}\n{block}\n\n{after}": part, text, flags=re.DOTALL)
    return text


# --------------------------------------------------------------------------- the figure


def draw_figure(record: Record, path: Path) -> None:
    """Left: mean ranks with the critical difference. Right: AUC less that of balanced FedAvg on every problem."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = sort_by_rank(record)
    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 6.6), width_ratios=(1, 1.7))
    ranking = record["ranks"]["auc"]
    ranks = [ranking["ranks"][name] for name in names]
    left.barh(range(len(names)), ranks, color=["#2a6f97" if name != BALANCED else "#e07a5f" for name in names])
    for row, rank in enumerate(ranks):
        left.text(rank + 0.08, row, f"{rank:.1f}", va="center", fontsize=9)
    edge = ranks[0] + ranking["critical_difference"]
    left.axvline(edge, color="black", ls="--", lw=1)
    left.set_title(f"Mean rank of the AUC over {len(record['problems'])} problems (1 is best)", fontsize=10)
    left.set_xlabel(f"left of the dashed line: not significantly worse than the first (critical difference "
                    f"{ranking['critical_difference']:.1f})", fontsize=8.5)  # fmt: skip
    left.set_yticks(range(len(names)), names, fontsize=9)
    left.invert_yaxis()
    left.set_xlim(0, len(names))
    problems = [problem["name"] for problem in record["problems"]]
    shown = [name for name in names if name != BALANCED]
    rows = [[find_result(record, p, n)["differences"][BALANCED]["auc"] for n in shown] for p in problems]
    values = np.array([[cell[0] for cell in row] for row in rows])
    image = right.imshow(np.clip(values, -0.03, 0.03), cmap="RdBu", vmin=-0.03, vmax=0.03, aspect="auto")
    for i, row in enumerate(rows):
        for j, (center, low, high, _) in enumerate(row):
            text = f"{1000 * center:+.0f}" + ("*" if low > 0 or high < 0 else "")
            right.text(j, i, text, ha="center", va="center", fontsize=7.5, color="white" if abs(center) > 0.02 else "black")
    right.set_xticks(range(len(shown)), shown, rotation=35, ha="right", fontsize=8.5)
    right.set_yticks(range(len(problems)), problems, fontsize=8.5)
    right.set_title(f"AUC less that of {BALANCED}, in thousandths (* interval excludes 0)", fontsize=10)
    figure.colorbar(image, ax=right, fraction=0.03, pad=0.02)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Write the record, or the page and its figure."""
    source, target = map(Path, sys.argv[1:3])
    if target.suffix == ".json":
        record = make_record([json.loads(line) for line in source.read_text().splitlines()])
        target.write_text(json.dumps(record, indent=1) + "\n")
    else:
        record = json.loads(source.read_text())
        target.write_text(update_page(target.read_text(), record))
        draw_figure(record, FIGURE)


if __name__ == "__main__":
    main()
