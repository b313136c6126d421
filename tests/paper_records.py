"""Records as runs would leave them, with curves and scores that a test chooses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedauc.experiments.config import Config
from paper.records import Point, Record, RecordStore
from paper.scales import PAPER
from paper.table_specs import CellSpec, cell_configs
from paper.tuning import ChoiceStore, TuningChoice, TuningJob

VERSIONS = {"fedauc": "0", "python": "3", "torch": "2", "numpy": "2", "gpu": None}


def labelled(positives: int, negatives: int) -> np.ndarray:
    return np.repeat(np.array([1, 0], dtype=np.int8), (positives, negatives))


def scored(labels: np.ndarray, skill: float, seed: int, shared: float = 0.9) -> np.ndarray:
    """Scores that rank positives higher by `skill` standard deviations; most of the noise is the same for all."""
    common, own = (np.random.default_rng(key).normal(size=len(labels)) for key in (0, seed + 1))
    scores: np.ndarray = skill * labels + shared * common + np.sqrt(1 - shared**2) * own
    return scores


def by_default(store: RecordStore, cell: CellSpec, seeds: Sequence[int]) -> list[list[Config]]:
    """A cell's runs with nothing tuned, which is recorded as its choice."""
    ChoiceStore(store, PAPER).add_choice(TuningJob.for_cell(cell), TuningChoice({}, "none", 0))
    return cell_configs(PAPER, cell, {}, seeds)


def keep(
    store: RecordStore,
    config: Config,
    aucs: Sequence[float],
    scores: tuple[np.ndarray, np.ndarray] | None,
    data: str = "made up; for a test",
    validation: Sequence[float] = (),
) -> None:
    """A finished run whose test AUC after 10, 20, ... rounds, of 1 kB each, was as given; average precision is half.

    Validation AUC is test AUC, unless it is given too.
    """
    pairs = enumerate(zip(aucs, validation or aucs, strict=True))
    curve = tuple(Point(place, 10 * (place + 1), 10_000 * (place + 1), *pair) for place, pair in pairs)
    record = Record("", aucs[-1], None, None, aucs[-1] / 2, curve, 1.0, data, VERSIONS, "abc")
    store.add_record(config, record, scores)
