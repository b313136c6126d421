"""Norm clipping against a numpy twin."""

from __future__ import annotations

import numpy as np
import torch

from fedauc.interfaces import Model, Upload
from fedauc.transforms.clip import Clip


def make_upload(clients: int, scale: float) -> Upload:
    """A model's change and a dual variable's, for a stack of clients."""
    rng = np.random.default_rng(5)
    weights = torch.from_numpy(scale * rng.normal(size=(clients, 7)))
    duals = torch.from_numpy(scale * rng.normal(size=clients))
    return Upload(mean=(Model(weights, torch.zeros(clients, 0, dtype=torch.float64)), duals), pool=(weights[:, :2],))


def test_the_whole_upload_is_scaled_to_the_bound() -> None:
    upload = make_upload(clients=4, scale=3.0)
    clipped, _ = Clip(norm=2.0).client(upload, (), torch.zeros(4, dtype=torch.int64))
    vectors = np.column_stack([upload.mean[0].weights.numpy(), upload.mean[1].numpy()])
    norms = np.linalg.norm(vectors, axis=1)
    expected = vectors * np.minimum(1, 2.0 / norms)[:, None]
    assert (norms > 2).any()
    np.testing.assert_allclose(clipped.mean[0].weights.numpy(), expected[:, :-1], rtol=1e-12)
    np.testing.assert_allclose(clipped.mean[1].numpy(), expected[:, -1], rtol=1e-12)
    assert torch.equal(clipped.pool[0], upload.pool[0])


def test_an_upload_inside_the_bound_keeps_its_bits() -> None:
    upload = make_upload(clients=3, scale=0.01)
    clipped, _ = Clip(norm=2.0).client(upload, (), torch.zeros(3, dtype=torch.int64))
    assert torch.equal(clipped.mean[0].weights, upload.mean[0].weights)


def test_an_upload_of_zeros_stays_zero() -> None:
    upload = make_upload(clients=2, scale=0.0)
    clipped, _ = Clip(norm=2.0).client(upload, (), torch.zeros(2, dtype=torch.int64))
    assert torch.equal(clipped.mean[0].weights, torch.zeros_like(upload.mean[0].weights))
