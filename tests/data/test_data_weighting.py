"""The mean over non-empty clients of scale * class mean is what each weighting says."""

from __future__ import annotations

import numpy as np
import pytest

from fedauc.data.weighting import class_scales, row_scales
from fedauc.interfaces import Census

# Client 0 holds both classes, 1 and 2 one class each, 3 is empty, 4 holds both.
POSITIVES = np.array([2, 0, 5, 0, 1])
NEGATIVES = np.array([7, 4, 0, 0, 30])
CENSUS = Census(POSITIVES, NEGATIVES)


def draw_losses(sizes: np.ndarray) -> list[np.ndarray]:
    draw = np.random.default_rng(1)
    return [draw.standard_normal(size) for size in sizes]


def weighted_mean(rows: list[np.ndarray], nonempty: int, weighting: str) -> float:
    """The definition, from the losses of every client's rows of one class."""
    if weighting == "pooled":
        return float(np.concatenate(rows).mean())
    means = [values.mean() for values in rows if len(values)]
    return float(sum(means) / (len(means) if weighting == "clients" else nonempty))


def scaled_mean(rows: list[np.ndarray], scales: np.ndarray, nonempty: int) -> float:
    terms = [scale * values.mean() for scale, values in zip(scales, rows, strict=True) if len(values)]
    return float(sum(terms) / nonempty)


@pytest.mark.parametrize("weighting", ["clients", "pooled", "paper"])
@pytest.mark.parametrize("column", [0, 1])
def test_class_scales_match_the_definition(weighting: str, column: int) -> None:
    rows = draw_losses(CENSUS[column])
    scales = class_scales(CENSUS, weighting)
    assert scales.shape == (5, 2)
    assert scales.dtype == np.float64
    # Four of the five clients are not empty.
    assert scaled_mean(rows, scales[:, column], 4) == pytest.approx(weighted_mean(rows, 4, weighting), rel=1e-12)
    assert (scales[:, column][CENSUS[column] == 0] == 0).all()


@pytest.mark.parametrize("weighting", ["clients", "pooled", "paper"])
def test_row_scales_match_the_definition(weighting: str) -> None:
    rows = draw_losses(POSITIVES + NEGATIVES)
    scales = row_scales(CENSUS, weighting)
    assert scaled_mean(rows, scales, 4) == pytest.approx(weighted_mean(rows, 4, weighting), rel=1e-12)
    if weighting != "pooled":
        assert scales.tolist() == [1, 1, 1, 0, 1]


@pytest.mark.parametrize("scales", [class_scales, row_scales])
def test_unknown_weighting_names_the_nearest(scales: type) -> None:
    with pytest.raises(ValueError, match="unknown weighting 'pool': did you mean 'pooled'"):
        scales(CENSUS, "pool")
