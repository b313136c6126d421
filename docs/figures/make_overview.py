"""The README's figure: one cycle of client groups, and the test AUC that it gives.

    fedauc compare --methods cycp-fedavg,cycp-fedavg-balanced,cycp-minimax,cycp-pairwise --cycles 30 --seeds 0,1,2,3,4 \
      --out runs/demo
    python docs/figures/make_overview.py runs/demo

The left panel shows the schedule of the card-fraud data that come with the library: 48 hourly clients in 8 groups by
time of day. The right panel is drawn from the runs' records: the mean over the seeds with the band between the lowest
and the highest, and after the last round the 95 % interval of the first seed's AUC over test rows (DeLong).
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Wedge

GROUPS, CLIENTS_PER_GROUP = 8, 6
TITLES = {
    "cycp-fedavg": "CyCp-FedAvg",
    "cycp-fedavg-balanced": "CyCp-FedAvg, balanced batches",
    "cycp-minimax": "CyCp-Minimax",
    "cycp-pairwise": "CyCp-Pairwise",
}
COLOURS = {
    "cycp-fedavg": "#0072B2",
    "cycp-fedavg-balanced": "#CC79A7",
    "cycp-minimax": "#D55E00",
    "cycp-pairwise": "#009E73",
}


def draw_cycle(axis: Axes) -> None:
    """A ring of groups around the server, the group of the current round in colour."""
    for group in range(GROUPS):
        middle = 90 - (group + 0.5) * 360 / GROUPS
        active = group == 2
        axis.add_patch(
            Wedge((0, 0), 1.0, middle - 21, middle + 21, width=0.24, color="#009E73" if active else "#DDE3E8")
        )
        for client in range(CLIENTS_PER_GROUP):
            angle = math.radians(middle + 15 - 6 * client)
            axis.plot(0.88 * math.cos(angle), 0.88 * math.sin(angle), "o", markersize=3.5, color="#37474F")
        angle = math.radians(middle)
        x, y = math.cos(angle), math.sin(angle)
        label = f"{3 * group:02d}-{3 * group + 3:02d} h"
        axis.text(1.27 * x, 1.14 * y, label, ha="center", va="center", fontsize=8)
        if active:
            for start, end, side in (((0.28, 0.28), (0.75, 0.75), 0.1), ((0.75, 0.75), (0.28, 0.28), 0.1)):
                path = ((start[0] * x, start[1] * y), (end[0] * x, end[1] * y))
                arrow = FancyArrowPatch(
                    *path, connectionstyle=f"arc3,rad={side}", arrowstyle="-|>", mutation_scale=12, color="#37474F"
                )
                axis.add_patch(arrow)
            note = "this round: 6 clients download\nthe model, take local steps\nand upload their changes"
            axis.text(1.55, 1.14 * y, note, va="center", fontsize=8, color="#00795A")
    axis.text(0, 0, "server", ha="center", va="center", fontsize=10, weight="bold")
    axis.annotate(
        "", (0.38 * math.cos(0.4), -1.34), (-0.38 * math.cos(0.4), -1.34),
        arrowprops={"arrowstyle": "<|-", "connectionstyle": "arc3,rad=-0.25", "color": "#37474F"},
    )  # fmt: skip
    axis.text(0, -1.56, "one cycle = 8 rounds, one per group", ha="center", fontsize=9)
    axis.set(xlim=(-1.5, 2.6), ylim=(-1.66, 1.3), aspect="equal", title="Sites are online by schedule")
    axis.axis("off")


def draw_curves(axis: Axes, runs: Path) -> None:
    """Test AUC after every cycle: mean and range over seeds, and the interval over test rows at the end."""
    for number, (method, title) in enumerate(TITLES.items()):
        files = sorted((runs / method).glob("seed-*/records.jsonl"))
        runs_of_method = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        first, colour = runs_of_method[0], COLOURS[method]
        rounds, aucs = (
            [record["rounds"] for record in first],
            np.array([[r["auc"] for r in run] for run in runs_of_method]),
        )
        axis.plot(rounds, aucs.mean(0), label=title, color=colour, linewidth=1.8)
        axis.fill_between(rounds, aucs.min(0), aucs.max(0), color=colour, alpha=0.3, linewidth=0)
        last = first[-1]
        bounds = [[last["auc"] - last["low"]], [last["high"] - last["auc"]]]
        axis.errorbar([262 + 9 * number], [last["auc"]], bounds, fmt="o", color=colour, markersize=4, capsize=3)
    axis.text(284, 0.9925, "95 % interval\nover test rows", ha="right", va="bottom", fontsize=8, color="#37474F")
    axis.axhline(0.98, color="#90A4AE", linewidth=0.8, linestyle=":")
    title = f"Card fraud, 148 frauds in the test rows, {len(files)} seeds"
    axis.set(xlabel="rounds", ylabel="test AUC", ylim=(0.955, 0.997), title=title)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower center")


def main(runs: Path) -> None:
    """Write overview.png beside this script."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained", width_ratios=(1.15, 1))
    draw_cycle(axes[0])
    draw_curves(axes[1], runs)
    figure.savefig(Path(__file__).with_name("overview.png"), dpi=160)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
