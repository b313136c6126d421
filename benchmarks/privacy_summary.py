"""The tables and the figure of docs/privacy.md, from the records of `privacy.py` and `transform_bytes.py`.

python benchmarks/privacy_summary.py            # prints the tables, writes docs/figures/privacy.png
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib.pyplot as plt

from privacy import RECORDS, SEEDS

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "privacy.png"
TITLES = {
    "fraud": "Card fraud: 48 clients, whole groups, δ = 1e-3",
    "insurance": "Synthetic insurance: 10,000 clients, rate .1, δ = 1e-5",
    "images": "CIFAR-10, small CNN: 10,000 clients, rate .1, δ = 1e-5",
}
NAMES = {
    "cycp-pairwise": "CyCp-Pairwise",
    "cycp-minimax": "CyCp-Minimax",
    "cycp-fedavg": "CyCp-FedAvg",
    "cycp-fedavg-balanced": "CyCp-FedAvg, balanced",
}
COLOURS = {
    "cycp-fedavg": "#0072B2",
    "cycp-minimax": "#D55E00",
    "cycp-pairwise": "#009E73",
    "cycp-fedavg-balanced": "#CC79A7",
}
UNPROTECTED = ("none", "none, clipped", "none, raw scores")

Cell = tuple[str, str, str, float]


def collect_cells(records: list[dict[str, Any]]) -> dict[Cell, list[dict[str, Any]]]:
    """The records of each study, method, kind of noise and budget."""
    cells: dict[Cell, list[dict[str, Any]]] = {}
    for record in records:
        cell = (record["study"], record["method"], record["noise"], float(record["epsilon"]))
        cells.setdefault(cell, []).append(record)
    return cells


def report_cell(records: list[dict[str, Any]]) -> tuple[float, float] | None:
    """Mean and standard deviation over the reported seeds; a run that had to be stopped counts as AUC .5."""
    scores = [record["test"] or 0.5 for record in records if record["seed"] in SEEDS]
    return (mean(scores), stdev(scores)) if len(scores) == len(SEEDS) else None


def print_study(study: str, cells: dict[Cell, list[dict[str, Any]]]) -> None:
    """One table: budgets in the columns, methods and kinds of noise in the rows."""
    budgets = sorted({cell[3] for cell in cells if cell[0] == study and math.isfinite(cell[3])})
    print(f"\n### {TITLES[study]}\n")
    print("| method | noise | " + " | ".join(f"ε = {budget:g}" for budget in budgets) + " | no privacy |")
    print("|---|---|" + "---|" * (len(budgets) + 1))
    for method, name in NAMES.items():
        unprotected = []
        for noise in UNPROTECTED:
            result = report_cell(cells.get((study, method, noise, math.inf), []))
            if result:
                label = {"none": "", "none, clipped": " clipped", "none, raw scores": " raw scores"}[noise]
                unprotected.append(f"{result[0]:.4f}{label}")
        for noise in ("banded", "independent"):
            values = [report_cell(cells.get((study, method, noise, budget), [])) for budget in budgets]
            shown = [f"{value[0]:.4f} ± {value[1]:.4f}" if value else "-" for value in values]
            last = ", ".join(unprotected) if noise == "banded" else ""
            print(f"| {name if noise == 'banded' else ''} | {noise} | " + " | ".join(shown) + f" | {last} |")


def print_pairs(study: str, records: list[dict[str, Any]]) -> None:
    """Banded minus independent noise at the same learning rate, clipping norm, budget and seed."""
    pairs: dict[tuple[Any, ...], dict[str, float]] = {}
    for record in records:
        if record["study"] == study and record["seed"] == 0 and record["noise"] in ("banded", "independent"):
            key = tuple(record[name] for name in ("method", "epsilon", "learning_rate", "clip"))
            pairs.setdefault(key, {})[record["noise"]] = record["test"] or 0.5
    gains = [pair["banded"] - pair["independent"] for pair in pairs.values()]
    print(
        f"{study}: {len(gains)} pairs of runs that differ in the noise alone: banded is {mean(gains):+.4f} on average, "
        f"lower in {sum(gain < 0 for gain in gains)}, by {-min(0, *gains):.4f} at most"
    )


def draw_figure(cells: dict[Cell, list[dict[str, Any]]]) -> None:
    """AUC against epsilon, one panel per study."""
    studies = [study for study in TITLES if any(cell[0] == study for cell in cells)]
    figure, axes = plt.subplots(1, len(studies), figsize=(5.2 * len(studies), 4.6), squeeze=False)
    for axis, study in zip(axes[0], studies, strict=True):
        budgets = sorted({cell[3] for cell in cells if cell[0] == study and math.isfinite(cell[3])})
        for method, name in NAMES.items():
            for noise, style in (("banded", "-"), ("independent", "--")):
                results = [report_cell(cells.get((study, method, noise, budget), [])) for budget in budgets]
                known = [(budget, *result) for budget, result in zip(budgets, results, strict=True) if result]
                if known:
                    x, y, error = zip(*known, strict=True)
                    label = f"{name}, {noise} noise"
                    axis.errorbar(x, y, error, fmt=f"o{style}", color=COLOURS[method], capsize=2, ms=4, label=label)
            unprotected = report_cell(cells.get((study, method, "none", math.inf), []))
            if unprotected:
                axis.axhline(unprotected[0], color=COLOURS[method], lw=0.9, ls=":", label=f"{name}, no privacy")
            raw = report_cell(cells.get((study, method, "none, raw scores", math.inf), []))
            if raw:
                axis.plot([budgets[-1] * 1.25], [raw[0]], "x", color=COLOURS[method], label="raw scores, no privacy")
        axis.set(xscale="log", xlabel="ε of the whole run (client level)", ylabel="test AUC")
        axis.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
        axis.minorticks_off()
        axis.set_title(TITLES[study], fontsize=10)
        axis.grid(alpha=0.25)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=5, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(FIGURE, dpi=110)


def main() -> None:
    """Print the tables and draw the figure."""
    records = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    cells = collect_cells(records)
    for study in TITLES:
        if any(cell[0] == study for cell in cells):
            print_study(study, cells)
    print()
    for study in TITLES:
        if any(cell[0] == study for cell in cells):
            print_pairs(study, records)
    draw_figure(cells)


if __name__ == "__main__":
    main()
