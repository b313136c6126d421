"""Train a convolutional network on images that are spread over clinics, with one abnormal image in twenty.

    python examples/images.py --out runs/examples

The images are synthetic, so that the script runs anywhere in seconds: noise with, in the abnormal ones, a faint disc.
The same two calls train ResNet-18 on CIFAR-10 or your own images: give any `nn.Module` and add `device="cuda"`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import fedauc

CLINICS, PIXELS = 12, 16


def make_images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise images `[count, 1, 16, 16]`; every twentieth has a disc of radius 3 at a random place."""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % 20 == 0
    images = random.normal(size=(count, 1, PIXELS, PIXELS)).astype(np.float32)
    rows, columns = np.mgrid[:PIXELS, :PIXELS]
    for position in np.flatnonzero(labels):
        row, column = random.integers(4, PIXELS - 4, size=2)
        images[position, 0] += 1.5 * ((rows - row) ** 2 + (columns - column) ** 2 <= 9)
    return images, labels


def make_network() -> nn.Module:
    """Two strided convolutions, the mean of each channel, and a linear layer that gives the score."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 1),
    )


def main(out: Path, cycles: int) -> None:
    """Train with the clinics in four groups that take turns, and draw how the AUC grows."""
    out.mkdir(parents=True, exist_ok=True)
    images, labels = make_images(2400, seed=0)
    test_images, test_labels = make_images(1500, seed=1)
    clinic = np.random.default_rng(2).integers(CLINICS, size=len(images))
    clients = fedauc.Clients.from_arrays(images, labels, client=clinic)
    test = fedauc.examples(test_images, test_labels)

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    for axis, position, title in ((axes[0], 1, "normal"), (axes[1], 20, "abnormal")):
        axis.imshow(images[position, 0], cmap="gray")
        axis.set(title=title, xticks=[], yticks=[])
    for method in ("cycp-fedavg", "cycp-pairwise"):
        fitted = fedauc.fit(
            make_network(), clients, method, test=test, groups=4, cycles=cycles, local_steps=8, learning_rate=0.1
        )
        aucs = [quality.auc for _, quality in fitted.history]
        print(f"{method:14} AUC {aucs[-1]:.3f} after {fitted.traffic.rounds} rounds")
        axes[2].plot([round for round, _ in fitted.history], aucs, label=method)
    axes[2].set(xlabel="rounds", ylabel="test AUC")
    axes[2].legend()
    figure.savefig(out / "images.png", dpi=150)
    print(f"The figure is {out / 'images.png'}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/examples"), help="the folder for the figure")
    parser.add_argument("--cycles", type=int, default=6, help="how often every group is visited")
    arguments = parser.parse_args()
    main(arguments.out, arguments.cycles)
