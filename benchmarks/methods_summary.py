"""Tables, ranks, tests and the figure of docs/methods.md, out of the runs of `methods.py`.

    python benchmarks/methods_summary.py benchmarks/out/methods.jsonl benchmarks/records    # runs and their summary
    python benchmarks/methods_summary.py benchmarks/records/methods.json docs/methods.md    # the page and its figure

The first command copies the runs to methods.jsonl, those of settings that were not chosen without their curves, and
writes their summary (`methods_record.py`) to methods.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median

import numpy as np

from methods_record import (
    BALANCED,
    METRICS,
    PLAIN,
    REFERENCES,
    Record,
    drop_curves,
    find_result,
    list_rates,
    make_record,
)

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "methods.png"


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
        for reference in (PLAIN, BALANCED):
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
            "never"
            if row["rounds_to_target"] is None
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


def show_tests(record: Record, metric: str) -> str:
    """Every contender against every reference over problems: Wilcoxon's test, and single problems after Holm's rule."""
    body = []
    for name in sort_by_rank(record):
        cells = [f"`{name}`"]
        for reference in REFERENCES:
            if name == reference:
                cells.append("-")
                continue
            entry = find_comparison(record, metric, reference, name)
            p, data_p = write_p(entry["wilcoxon_holm_p"]), write_p(entry["wilcoxon_holm_p_over_datasets"])
            counts = f"{entry['better_by_holm']} / {entry['worse_by_holm']}"
            cells.append(f"{write_number(entry['mean'], True, 4)} (p {p}, {data_p}); {counts}")
        body.append(cells)
    return make_table([METRICS[metric], *(f"less `{reference}`" for reference in REFERENCES)], body)


def show_fixed_settings(record: Record) -> str:
    """One setting for all problems: mean test AUC less that of the tuned setting, and on the worst problem."""
    body = []
    for name in sort_by_rank(record):
        entries = [entry for entry in record["settings"] if entry["contender"] == name]
        rates = sorted({list_rates(entry["setting"])[0] for entry in entries})
        cells = []
        for weighting in ("clients", "pooled"):
            for rate in rates:
                setting = next(
                    entry
                    for entry in entries
                    if entry["setting"]["weighting"] == weighting and list_rates(entry["setting"])[0] == rate
                )
                cells.append(f"{write_number(setting['mean'], True)} ({write_number(setting['least'], True)})")
        body.append([f"`{name}`", *cells])
    head = [f"`{weighting}`, {rate}" for weighting in ("clients", "pooled") for rate in (".003", ".03", ".1", "1")]
    return make_table(["", *head], body)


def show_common_settings(record: Record) -> str:
    """Contenders with one setting for all problems."""
    body = []
    for entry in sorted(record["common_settings"], key=lambda entry: entry["rank"]):
        cells = [
            "-"
            if entry["contender"] == reference
            else f"{write_number(entry['mean'][reference], True)} (p {write_p(entry['p'][reference])}); "
            f"{entry['better'][reference]} / {entry['worse'][reference]}"
            for reference in REFERENCES
        ]
        setting = f"{list_rates(entry['setting'])[0]:g}, `{entry['setting']['weighting']}`"
        body.append([f"`{entry['contender']}`", setting, f"{entry['rank']:.1f}", write_number(entry["auc"]), *cells])
    head = ["", "setting", "mean rank", "mean AUC", *(f"less `{reference}`" for reference in REFERENCES)]
    return make_table(head, body)


def describe_problems(record: Record) -> str:
    """What each problem is."""
    head = [
        "problem",
        "kind",
        "what",
        "training rows",
        "positives",
        "sites",
        "of one class",
        "rows of a site",
    ]
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
        ]
        for p in record["problems"]
    ]
    return make_table(head, body)


def show_settings(record: Record) -> str:
    """For every contender: which settings were chosen, and what weighting changes."""
    count, body = len(record["problems"]), []
    for name in sort_by_rank(record):
        entries = [entry for entry in record["settings"] if entry["contender"] == name]
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
            ]
        )
    head = ["", "`pooled` chosen", "AUC, `pooled` less `clients`", "learning rates chosen", "at an end of the grid"]
    return make_table(head, body)


def make_blocks(record: Record) -> dict[str, str]:
    """Every generated part of docs/methods.md by name."""
    blocks = {
        "overview": make_overview(record),
        "kinds against FedAvg": compare_kinds(record, PLAIN),
        "kinds against balanced": compare_kinds(record, BALANCED),
        "common settings": show_common_settings(record),
        "fixed settings": show_fixed_settings(record),
        "differences to FedAvg": show_differences(record, PLAIN),
        "differences to balanced": show_differences(record, BALANCED),
        "rounds in short": summarise_rounds(record),
        "rounds": show_rounds(record),
        "settings": show_settings(record),
        "problems": describe_problems(record),
    }
    blocks |= {f"tests {metric}": show_tests(record, metric) for metric in METRICS}
    return blocks | {metric: show_metric(record, metric) for metric in METRICS}


def update_page(text: str, record: Record) -> str:
    """The page with the generated parts of the record."""
    return replace_blocks(text, make_blocks(record))


def replace_blocks(text: str, blocks: Mapping[str, str]) -> str:
    """The page with the generated parts between its markers replaced by others of the same names."""
    for name, block in blocks.items():
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
        left.text(rank - 0.1, row, f"{rank:.1f}", va="center", ha="right", fontsize=9, color="white")
    edge = ranks[0] + ranking["critical_difference"]
    left.axvline(edge, color="black", ls="--", lw=1)
    left.set_title(f"Mean rank of the AUC over {len(record['problems'])} problems (1 is best)", fontsize=10)
    critical = f"(critical difference {ranking['critical_difference']:.1f}, Nemenyi)"
    left.set_xlabel(f"bars that end left of the dashed line are not\nsignificantly worse than the first {critical}")
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
            right.text(
                j, i, text, ha="center", va="center", fontsize=7.5, color="white" if abs(center) > 0.02 else "black"
            )
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
    if target.is_dir():
        from methods import CONTENDERS
        from problems import describe_problem

        measured = [json.loads(line) for line in source.read_text().splitlines()]
        runs = drop_curves([run for run in measured if run["contender"] in CONTENDERS])
        lines = [json.dumps(run, separators=(",", ":")) + "\n" for run in runs]
        (target / "methods.jsonl").write_text("".join(lines))
        (target / "methods.json").write_text(json.dumps(make_record(runs, describe_problem), indent=1) + "\n")
    else:
        record = json.loads(source.read_text())
        target.write_text(update_page(target.read_text(), record))
        draw_figure(record, FIGURE)


if __name__ == "__main__":
    main()
