"""Crops and flips against a plain implementation with real padding; the random numbers are keyed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedauc import Clients, fit
from fedauc.data.augmentation import MARGIN, apply_crops, draw_crops
from fedauc.models.cnn import SmallCNN


def crop_by_padding(image: np.ndarray, down: int, right: int, mirror: int) -> np.ndarray:
    """Pad with black, cut a window, turn it around."""
    padded = np.pad(image, ((0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN)))
    height, width = image.shape[1:]
    window = padded[:, down : down + height, right : right + width]
    return window[:, :, ::-1] if mirror else window


def test_every_move_is_a_window_of_the_padded_image() -> None:
    """All 9 x 9 x 2 moves, on images that are not square and have no black pixel of their own."""
    images = np.random.default_rng(0).integers(1, 256, (162, 3, 6, 9)).astype(np.uint8)
    crops = np.stack(np.meshgrid(np.arange(9), np.arange(9), np.arange(2)), axis=-1).reshape(-1, 3).astype(np.uint8)
    cropped = apply_crops(torch.from_numpy(images), torch.from_numpy(crops)).numpy()
    for image, (down, right, mirror), got in zip(images, crops, cropped, strict=True):
        np.testing.assert_array_equal(got, crop_by_padding(image, down, right, mirror))


def test_leading_dimensions_are_free() -> None:
    images = torch.randint(0, 256, (2, 3, 5, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    crops = torch.from_numpy(draw_crops(30, 0, 0, 0)).view(2, 3, 5, 3)
    together = apply_crops(images, crops)
    for index in np.ndindex(2, 3, 5):
        assert torch.equal(together[index], apply_crops(images[index], crops[index]))


def test_moves_are_keyed_and_spread_evenly() -> None:
    many = draw_crops(90_000, 1, 2, 3)
    assert np.array_equal(many, draw_crops(90_000, 1, 2, 3))
    for key in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not np.array_equal(many, draw_crops(90_000, *key))
    for column, values in ((0, 9), (1, 9), (2, 2)):
        counts = np.bincount(many[:, column], minlength=values)
        assert len(counts) == values
        # Six standard deviations of a binomial count.
        expected = 90_000 / values
        assert abs(counts - expected).max() < 6 * np.sqrt(expected)


def make_image_clients(count: int = 24) -> Clients:
    rng = np.random.default_rng(0)
    labels = np.arange(count) % 3 == 0
    pictures = rng.integers(0, 256, (count, 1, 8, 8)).astype(np.uint8)
    return Clients.from_arrays(pictures, labels, client=np.arange(count) // 6)


def test_engines_see_the_same_crops() -> None:
    """And training sees them at all: without them it ends elsewhere."""
    module = SmallCNN().build((1, 8, 8), 0)
    settings: dict[str, Any] = {"cycles": 1, "local_steps": 2, "positives": 2, "negatives": 2, "dtype": "float64"}

    def weights(**changes: Any) -> torch.Tensor:
        trained = fit(module, make_image_clients(), "cycp-fedavg", **settings, **changes).module
        return torch.cat([parameter.detach().flatten() for parameter in trained.parameters()])

    reference = weights(engine="loop", augment="crop-flip")
    torch.testing.assert_close(weights(engine="batched", augment="crop-flip"), reference, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(weights(engine="loop"), reference)


def test_rows_that_are_no_images_are_refused() -> None:
    table = Clients.from_arrays(np.zeros((6, 2)), np.arange(6) % 2, client=np.arange(6) // 3)
    with pytest.raises(ValueError, match=r"augment is 'crop-flip', but rows have shape \(2,\); it needs images"):
        fit(torch.nn.Linear(2, 1), table, augment="crop-flip")
    with pytest.raises(ValueError, match="augment is 'crop'; use 'none' or 'crop-flip'"):
        fit(torch.nn.Linear(2, 1), table, augment="crop")
