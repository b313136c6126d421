"""Fixed-point numbers: exact sums, and refusal of everything that does not fit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedauc.privacy.fixed_point import LARGEST_SUM, NOISE_TAIL, FixedPoint, choose_scale, sum_modulo


def test_int32_addition_in_torch_is_addition_modulo_two_to_the_32() -> None:
    draw = np.random.default_rng(0)
    first, second = (draw.integers(0, 1 << 32, 1000, dtype=np.uint64) for _ in range(2))
    expected = ((first + second) % (1 << 32)).astype(np.uint32).view(np.int32)
    left, right = (torch.from_numpy(words.astype(np.uint32).view(np.int32)) for words in (first, second))
    assert np.array_equal((left + right).numpy(), expected)
    assert np.array_equal(sum_modulo(torch.stack([left, right])).numpy(), expected)


@pytest.mark.parametrize("clients", [1, 2, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_decoded_sum_is_the_sum_of_the_rounded_values(clients: int, dtype: torch.dtype) -> None:
    draw = np.random.default_rng(clients)
    code = FixedPoint(choose_scale(3.0, clients), clients)
    vectors = torch.from_numpy(draw.uniform(-3, 3, (clients, 50))).to(dtype)
    # The extremes: every client at the bound, with the same sign.
    vectors[:, 0], vectors[:, 1] = 3.0, -3.0
    rounded = [[round(float(value) * code.scale) for value in row] for row in vectors]
    expected = [sum(column) / code.scale for column in zip(*rounded, strict=True)]
    encoded = code.encode_vector(vectors)
    assert encoded.dtype == torch.int32
    assert torch.equal(encoded[0], code.encode_vector(vectors[0]))
    assert code.decode_sum(sum_modulo(encoded)).tolist() == expected


def test_the_largest_values_fit_and_the_next_ones_are_refused() -> None:
    code = FixedPoint(1.0, 3)
    bound = LARGEST_SUM // 3
    stack = code.encode_vector(torch.full((3, 1), float(bound), dtype=torch.float64))
    assert sum_modulo(stack).item() == 3 * bound
    for value in (bound + 1.0, -bound - 1.0, 2.0**40, math.inf, -math.inf, math.nan):
        with pytest.raises(ValueError, match=r"update\[1\] is .*; with scale 1 and 3 clients it must be within ±7.158"):
            code.encode_vector(torch.tensor([0.0, value], dtype=torch.float64), "update")


def test_an_error_names_the_position_in_a_stack() -> None:
    with pytest.raises(ValueError, match=r"vector\[1, 2\] is nan"):
        FixedPoint(1.0, 3).encode_vector(torch.tensor([[0.0, 0, 0], [0, 0, math.nan]]))


def test_noise_out_of_range_is_refused() -> None:
    code = FixedPoint(2.0, 2)
    encoded = code.encode_vector(torch.tensor([1.5, -2.0]))
    assert code.add_integers(encoded, torch.tensor([4, -1])).tolist() == [7, -5]
    with pytest.raises(ValueError, match=r"vector with noise\[0\]"):
        code.add_integers(encoded, torch.tensor([LARGEST_SUM, 0]))


@pytest.mark.parametrize(("norm", "clients", "noise"), [(1.0, 10, 0.0), (0.37, 50, 0.2), (1e-6, 3, 1.0), (1e9, 2, 0.0)])
def test_the_scale_is_the_largest_power_of_two_that_fits(norm: float, clients: int, noise: float) -> None:
    scale, bound = choose_scale(norm, clients, noise), LARGEST_SUM // clients
    reach = norm + NOISE_TAIL * noise
    assert math.log2(scale).is_integer()
    assert reach * scale + 1 <= bound < 2 * reach * scale + 1


def test_configurations_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="scale is 0"):
        FixedPoint(0.0, 3)
    with pytest.raises(ValueError, match="clients is 0"):
        FixedPoint(1.0, 0)
    with pytest.raises(ValueError, match="largest_norm is nan"):
        choose_scale(math.nan, 3)
    with pytest.raises(ValueError, match="largest_norm is 0"):
        choose_scale(0.0, 3)
    with pytest.raises(ValueError, match="clients is"):
        choose_scale(1.0, LARGEST_SUM)
    with pytest.raises(ValueError, match="dtype"):
        FixedPoint(1.0, 3).decode_sum(torch.zeros(3))
    with pytest.raises(ValueError, match="dtype"):
        sum_modulo(torch.zeros(3, 2, dtype=torch.int64))
