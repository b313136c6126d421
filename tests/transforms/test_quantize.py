"""Block quantization against a numpy twin, its size, its rounding, and error feedback."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedauc.interfaces import Upload
from fedauc.random_tensors import fold_in, random_uniform, server_key
from fedauc.transforms.quantize import Quantize
from fedauc.trees import tree_leaves


def quantize_with_numpy(vector: np.ndarray, bits: int, block: int, shift: np.ndarray | float) -> np.ndarray:
    """What the server reads, block by block."""
    largest, read = 2 ** (bits - 1) - 1, np.zeros_like(vector)
    for start in range(0, len(vector), block):
        part = slice(start, start + block)
        scale = np.abs(vector[part]).max() / largest
        if scale > 0:
            offset = shift[part] if isinstance(shift, np.ndarray) else shift
            codes = np.clip(np.floor(vector[part] / scale + offset), -largest, largest)
            read[part] = codes * scale
    return read


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("count", [33, 64, 101])
def test_what_the_server_reads_equals_the_numpy_twin(bits: int, rounding: str, count: int) -> None:
    vector = np.random.default_rng(0).normal(size=count).astype(np.float32)
    vector[40:48] = 0
    transform = Quantize(bits=bits, block=8, rounding=rounding, error_feedback=False)  # type: ignore[arg-type]
    key = server_key(1, "test")
    sent, _ = transform.client(Upload((torch.from_numpy(vector),)), (), key)
    read = transform.decode(sent, (torch.zeros(count),)).mean[0].numpy()
    shift = random_uniform(fold_in(key, 0), count).numpy() if rounding == "stochastic" else 0.5
    np.testing.assert_allclose(read, quantize_with_numpy(vector, bits, 8, shift), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("bits", "expected"), [(8, 1000 + 4 * 4), (4, 500 + 4 * 4)])
def test_the_bytes_are_one_code_per_number_and_one_scale_per_block(bits: int, expected: int) -> None:
    sent, _ = Quantize(bits=bits, block=256).client(
        Upload((torch.randn(1000, generator=torch.Generator().manual_seed(0)),)),
        (torch.zeros(1000),),
        server_key(0, "test"),
    )
    assert sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(sent)) == expected


def test_stochastic_rounding_is_unbiased() -> None:
    """The mean over 4,000 clients is within 5 standard errors; a number's deviation is at most half a step."""
    vector = torch.linspace(-1, 1, 40)
    clients = 4000
    keys = fold_in(torch.arange(clients), 7)
    transform = Quantize(bits=4, block=64, error_feedback=False)
    sent, _ = transform.client(Upload((vector.expand(clients, -1),)), (), keys)
    read = transform.decode(sent, (vector,)).mean[0]
    step = 1 / 7
    assert float((read.mean(0) - vector).abs().max()) < 5 * (step / 2) / clients**0.5
    assert float((read - vector).abs().max()) <= step * 1.000001


def test_dual_variables_are_sent_as_they_are() -> None:
    upload = Upload((torch.randn(64, generator=torch.Generator().manual_seed(0)), torch.tensor(0.12345678)))
    transform = Quantize()
    sent, state = transform.client(upload, transform.initial_state(upload.mean), server_key(0, "test"))
    assert torch.equal(transform.decode(sent, upload.mean).mean[1], upload.mean[1])
    assert float(state[1]) == 0


def test_error_feedback_converges_where_plain_quantization_stalls() -> None:
    """Two clients minimise ½‖w - (0, ..., 1)‖², and one coordinate of their changes is large but cancels in the mean.

    With the nearest of 15 codes the large coordinate sets the scale, so that every small change is rounded to zero:
    plain quantization never moves. With error feedback the small changes add up until they count.
    """
    target = torch.zeros(32)
    target[1:] = 1.0
    pull = torch.zeros(2, 32)
    pull[0, 0], pull[1, 0] = 2.0, -2.0
    distances = {}
    for feedback in (False, True):
        transform = Quantize(bits=4, block=32, rounding="nearest", error_feedback=feedback)
        weights, states = torch.zeros(32), transform.initial_state((torch.zeros(2, 32),))
        for number in range(400):
            changes = 0.05 * (target - weights) + pull
            sent, states = transform.client(Upload((changes,)), states, fold_in(torch.arange(2), number))
            weights = weights + transform.decode(sent, (weights,)).mean[0].mean(0)
        distances[feedback] = float((weights - target).norm())
    assert distances[False] == pytest.approx(float(target.norm()))
    assert distances[True] < 0.25 * distances[False]


def test_bits_must_be_eight_or_four() -> None:
    with pytest.raises(ValueError, match="bits is 6; it must be 8 or 4"):
        Quantize(bits=6)
