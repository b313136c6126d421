"""Two hospitals that are never online at the same time train one model; what does each gain over training alone?

    python examples/two_hospitals.py --out runs/examples

Rows are tumours of the Wisconsin breast cancer data (scikit-learn), of which each hospital knows only a few malignant
ones. The hospitals take turns, one per round, and their rows stay where they are: the server sees models and scores.
`docs/deployment.md` shows the same two hospitals on two machines.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler
from torch import nn

import fedauc
from fedauc.metrics import delong_interval

MALIGNANT = {"hospital A": 6, "hospital B": 4}
"""How many malignant tumours each hospital has seen; benign ones are shared out in the same proportion of 20 to 1."""


def load_hospitals(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, fedauc.Examples]:
    """Training rows, labels and hospital of each row, and the rows of all later patients to test on."""
    data = load_breast_cancer()
    malignant = data.target == 0
    random = np.random.default_rng(seed)
    positives, negatives = (random.permutation(np.flatnonzero(malignant == kind)) for kind in (True, False))
    rows, hospitals = [], []
    for hospital, count in MALIGNANT.items():
        chosen = [*positives[:count], *negatives[: 20 * count]]
        positives, negatives = positives[count:], negatives[20 * count :]
        rows += chosen
        hospitals += [hospital] * len(chosen)
    later = np.concatenate([positives, negatives])
    scaler = StandardScaler().fit(data.data[rows])
    test = fedauc.examples(scaler.transform(data.data[later]), malignant[later])
    return scaler.transform(data.data[rows]), malignant[rows], np.array(hospitals), test


def main(out: Path) -> None:
    """Train at each hospital alone, then at both in turn, and compare on the same later patients."""
    out.mkdir(parents=True, exist_ok=True)
    inputs, labels, hospital, test = load_hospitals(seed=0)
    trained_on = {f"{name} alone": hospital == name for name in MALIGNANT} | {"both in turn": hospital != ""}
    intervals = {}
    for title, rows in trained_on.items():
        clients = fedauc.Clients.from_arrays(inputs[rows], labels[rows], client=hospital[rows])
        fitted = fedauc.fit(nn.Linear(inputs.shape[1], 1), clients, "cycp-pairwise", groups=len(clients), cycles=20)
        intervals[title] = interval = delong_interval(test.labels, fitted.scores(test.inputs))
        print(
            f"{title:16} {int(labels[rows].sum()):2} malignant tumours to learn from, "
            f"AUC {interval.estimate:.4f} [{interval.low:.3f}, {interval.high:.3f}]"
        )
    figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
    for position, interval in enumerate(intervals.values()):
        axis.plot([interval.low, interval.high], [position, position], color="tab:blue", linewidth=2)
        axis.plot(interval.estimate, position, "o", color="tab:blue")
    axis.set(yticks=range(len(intervals)), yticklabels=list(intervals), ylim=(-0.5, len(intervals) - 0.5))
    axis.set(xlabel=f"AUC on {len(test.labels)} later patients, with its 95 % interval")
    figure.savefig(out / "two_hospitals.png", dpi=150)
    print(f"The figure is {out / 'two_hospitals.png'}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/examples"), help="the folder for the figure")
    main(parser.parse_args().out)
