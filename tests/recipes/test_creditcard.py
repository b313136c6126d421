"""The demo's quality: AUC methods against centralised logistic regression and against FedAvg."""

from __future__ import annotations

import numpy as np
from recipes.creditcard import CENTRAL, table, train

RIVALS = ("cycp-fedavg", "cycp-minimax", "cycp-pairwise")


def test_one_split_gives_a_sane_outcome() -> None:
    outcome = train(CENTRAL, 0)
    # 148 test frauds at an AUC near .98 have a standard error near .005.
    assert 0.95 < outcome.auc < 1
    assert 0.001 < outcome.error < 0.02


def test_the_auc_methods_match_central_logistic_regression_and_beat_fedavg() -> None:
    """Five splits, 30 cycles: means within .002 of central, and above CyCp-FedAvg's."""
    found = table([CENTRAL, *RIVALS], range(5))
    mean = {name: float(np.mean([outcome.auc for outcome in outcomes])) for name, outcomes in found.items()}
    for name in ("cycp-minimax", "cycp-pairwise"):
        assert mean[name] >= mean[CENTRAL] - 0.002
        assert mean[name] > mean["cycp-fedavg"]
