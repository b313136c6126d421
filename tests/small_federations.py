"""The small federation and the comparisons of the exported suites, under one name for the tests."""

from __future__ import annotations

from fedauc.testing._expectations import all_finite, same_bits
from fedauc.testing.small_federation import (
    EMPTY,
    FEATURES,
    GROUPS,
    HOLDING,
    NEGATIVES,
    POSITIVES,
    Exchange,
    RecordingEngine,
    assemble_small,
    held_out,
    linear_scorer,
    record_exchanges,
    run_rounds,
    small_federation,
    small_recipe,
)

__all__ = [
    "EMPTY",
    "FEATURES",
    "GROUPS",
    "HOLDING",
    "NEGATIVES",
    "POSITIVES",
    "Exchange",
    "RecordingEngine",
    "all_finite",
    "assemble_small",
    "held_out",
    "linear_scorer",
    "record_exchanges",
    "run_rounds",
    "same_bits",
    "small_federation",
    "small_recipe",
]
