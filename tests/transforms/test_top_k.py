"""Top-k sparsification against a numpy twin."""

from __future__ import annotations

import numpy as np
import torch

from fedauc.interfaces import Upload
from fedauc.random_tensors import server_key
from fedauc.transforms.top_k import TopK
from fedauc.trees import tree_leaves


def test_the_largest_numbers_travel_and_the_rest_is_kept_as_error() -> None:
    vector = np.random.default_rng(3).normal(size=50)
    transform = TopK(share=0.1)
    upload = Upload((torch.from_numpy(vector),))
    sent, state = transform.client(upload, transform.initial_state(upload.mean), server_key(0, "test"))
    largest = np.argsort(-np.abs(vector))[:5]
    expected = np.zeros(50)
    expected[largest] = vector[largest]
    np.testing.assert_array_equal(transform.decode(sent, upload.mean).mean[0].numpy(), expected)
    np.testing.assert_array_equal(state[0].numpy(), vector - expected)
    assert sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(sent)) == 5 * (4 + 8)


def test_with_error_feedback_every_number_is_sent_in_time() -> None:
    """A constant change of 40 numbers with 4 sent per round: after 400 rounds less than 3 % is still on its way."""
    change = torch.linspace(1, 2, 40, dtype=torch.float64)
    transform = TopK(share=0.1)
    state, total = transform.initial_state((change,)), torch.zeros(40, dtype=torch.float64)
    for number in range(400):
        sent, state = transform.client(Upload((change,)), state, server_key(number, "test"))
        total += transform.decode(sent, (change,)).mean[0]
    assert float((total / (400 * change) - 1).abs().max()) < 0.03
