"""A small scorer of a raw table with numbers, categories and dates, and tables with gaps and unseen values for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fedauc.data.features import CategoryColumn, DateColumn, FeatureEncoder, NumberColumn
from fedauc.models.mlp import MLP
from fedauc.scoring.scorer import ReferenceRows, Scorer, make_scorer

ENCODER = FeatureEncoder(
    (
        NumberColumn("age", 40, 40, 10, has_indicator=True, edges=(-1.0, 0.0, 1.5)),
        CategoryColumn("state", ("CA", "NY"), has_missing=True, has_other=True),
        DateColumn("day", 100, 100, 300, has_indicator=True, has_time=True),
        CategoryColumn("flag", ("true", "false")),
    )
)


def draw_table(rows: int, seed: int = 0) -> dict[str, Any]:
    """Raw columns; a quarter of the states is unknown to the encoder, and every column has missing values."""
    draws = np.random.default_rng(seed)

    def draw_values(*values: Any) -> np.ndarray:
        return np.array(values, dtype=object)[draws.integers(0, len(values), rows)]

    return {
        "day": draw_values(None, "1970-03-01", "1971-05-04 12:30", "2024-02-29"),
        "age": np.where(draws.random(rows) < 0.2, np.nan, draws.normal(40, 10, rows).round(2)),
        "flag": draw_values(True, False, None),
        "state": draw_values("CA", "NY", "TX", None),
    }


def make_small_scorer(calibration: str = "platt", seed: int = 0) -> Scorer:
    """An untrained network, with labels that follow its scores, so that calibration and thresholds mean something."""
    model = MLP(hidden=(8,))
    module = model.build((len(ENCODER.feature_names),), seed)
    inputs = torch.from_numpy(ENCODER.encode(draw_table(600, seed)))
    with torch.no_grad():
        scores = module(inputs)[:, 0].double().numpy()
    draws = np.random.default_rng(seed)
    labels = (draws.random(len(scores)) < 1 / (1 + np.exp(2 - 4 * scores))).astype(np.int8)
    reference = ReferenceRows("validation", labels, scores, draws.integers(0, 5, len(scores)).astype(str))
    return make_scorer(module, model, inputs[:1], reference, ENCODER, ("no", "yes"), calibration)
