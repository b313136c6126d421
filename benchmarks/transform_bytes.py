"""Bytes against AUC for each transform of uploads, on card fraud.

    python benchmarks/transform_bytes.py

CyCp-Pairwise on the sample of card transactions that comes with the library: 48 hourly clients in 8 groups, 30 cycles,
a linear model and an MLP, default settings, three seeds. Bytes are those of the traffic ledger: what clients send and
what they are sent. The masks of a real federation come on top of secure sums (`benchmarks/secure_sum.py`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from fedauc.data.datasets.creditcard import CreditCard
from fedauc.experiments.fitting import fit
from fedauc.models.linear import Linear
from fedauc.models.mlp import MLP
from fedauc.models.model import ModelConfig
from fedauc.transforms.client_dp import ClientDP
from fedauc.transforms.quantize import Quantize
from fedauc.transforms.secure_sum import SecureSum
from fedauc.transforms.top_k import TopK

RECORDS = Path(__file__).parent / "records" / "transform-bytes.json"
MODELS: dict[str, ModelConfig] = {"linear": Linear(), "mlp": MLP()}
HISTOGRAM = {"pool": "histogram"}
BUDGET = {"epsilon": 8.0, "delta": 1e-3}
CASES: dict[str, dict[str, Any]] = {
    "raw scores": {},
    "raw scores, 8-bit weights": {"transforms": (Quantize(),)},
    "histogram pool": HISTOGRAM,
    "histogram pool, 8 bits": {**HISTOGRAM, "transforms": (Quantize(),)},
    "histogram pool, 4 bits": {**HISTOGRAM, "transforms": (Quantize(bits=4),)},
    "histogram pool, top 10 %": {**HISTOGRAM, "transforms": (TopK(share=0.1),)},
    "histogram pool, secure sum": {**HISTOGRAM, "transforms": (SecureSum(),)},
    "histogram pool, client-dp, ε = 8": {**HISTOGRAM, **BUDGET, "transforms": (ClientDP(),)},
    "histogram pool, client-dp by secure sum, ε = 8": {
        **HISTOGRAM,
        **BUDGET,
        "weighting": "paper",
        "transforms": (ClientDP(), SecureSum()),
    },
}


def main() -> None:
    """Train every case, print the table and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    seeds = [int(seed) for seed in parser.parse_args().seeds.split(",")]
    torch.set_num_threads(1)
    records = []
    print("| model | uploads | kB up | kB down | test AUC |\n|---|---|---|---|---|")
    for model_name, model in MODELS.items():
        for case, settings in CASES.items():
            runs = [
                fit(
                    model,
                    CreditCard(),
                    "cycp-pairwise",
                    cycles=30,
                    seed=seed,
                    metrics="auc",
                    verbose=False,
                    **{"weighting": "clients", **settings},
                )
                for seed in seeds
            ]
            scores, traffic = [run.history[-1][1].auc for run in runs], runs[0].traffic
            records.append(
                {
                    "model": model_name,
                    "uploads": case,
                    "bytes_up": traffic.bytes_up,
                    "bytes_down": traffic.bytes_down,
                    "auc": [round(score, 5) for score in scores],
                }
            )
            spread = f" ± {stdev(scores):.4f}" if len(scores) > 1 else ""
            sizes = f"{traffic.bytes_up / 1e3:,.0f} | {traffic.bytes_down / 1e3:,.0f}"
            print(f"| {model_name} | {case} | {sizes} | {mean(scores):.4f}{spread} |", flush=True)
    RECORDS.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
