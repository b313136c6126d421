"""Train a fraud scorer on a table that has one row per transaction, a label column and a site column.

    python examples/fraud_table.py --out runs/examples

The table holds 28,930 real card transactions, 492 of them frauds. Every hour of the two recorded days is one site, and
sites of the same time of day are online together, so the schedule is cyclic by nature.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
from sklearn.metrics import roc_curve
from sklearn.model_selection import train_test_split

import fedauc
from fedauc.data.datasets.creditcard import CreditCard
from fedauc.metrics import delong_interval

METHODS = {
    "cycp-fedavg": "FedAvg, logistic loss",
    "cycp-minimax": "CyCp-Minimax",
    "cycp-pairwise": "CyCp-Pairwise",
}


def write_table(path: Path) -> None:
    """Write the card transactions that come with the library as a table, so that the rest starts from a file."""
    rows = CreditCard().read_rows()
    table = pd.DataFrame(rows.inputs, columns=[f"v{column}" for column in range(rows.inputs.shape[1])])
    table.assign(fraud=rows.labels, site=rows.client, shift=rows.group).to_parquet(path)


def main(out: Path) -> None:
    """Train three methods on the same sites and compare them on held-out transactions."""
    out.mkdir(parents=True, exist_ok=True)
    write_table(out / "transactions.parquet")

    table = pd.read_parquet(out / "transactions.parquet")
    features = [str(column) for column in table.columns if str(column).startswith("v")]
    train, test = train_test_split(table, test_size=0.3, stratify=table["fraud"], random_state=0)
    mean, deviation = train[features].mean(), train[features].std()
    train = train.assign(**(train[features] - mean) / deviation)
    test = test.assign(**(test[features] - mean) / deviation)

    clients = fedauc.Clients.from_frame(train, label="fraud", client="site", group="shift", features=features)
    test_rows = fedauc.examples(test[features].to_numpy(), test["fraud"].to_numpy())

    figure, (roc, curve) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for method, title in METHODS.items():
        fitted = fedauc.fit(torch.nn.Linear(len(features), 1), clients, method, test=test_rows, cycles=10)
        scores = fitted.scores(test[features].to_numpy())
        interval = delong_interval(test["fraud"], scores)
        traffic = (fitted.traffic.bytes_up + fitted.traffic.bytes_down) / 1e6
        print(
            f"{title:22} AUC {interval.estimate:.4f} [{interval.low:.3f}, {interval.high:.3f}] after "
            f"{fitted.traffic.rounds} rounds, {traffic:.2f} MB"
        )
        false_positives, true_positives, _ = roc_curve(test["fraud"], scores)
        roc.plot(false_positives, true_positives, label=title)
        curve.plot([round for round, _ in fitted.history], [quality.auc for _, quality in fitted.history], label=title)
    roc.set(
        xlim=(0, 0.2), ylim=(0.7, 1), xlabel="share of genuine transactions flagged", ylabel="share of frauds found"
    )
    roc.set(title="ROC on held-out transactions")
    curve.set(xlabel="rounds", ylabel="test AUC", title="AUC after every cycle of 8 groups")
    curve.legend()
    figure.savefig(out / "fraud_table.png", dpi=150)
    print(f"The figure is {out / 'fraud_table.png'}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/examples"), help="folder for table and figure")
    main(parser.parse_args().out)
