"""Example-level privacy in plain numpy: gradients row by row, clipping, noise from keys, and the steps of a visit."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedauc import keys

Gradient = Callable[[np.ndarray, np.ndarray], tuple[float, np.ndarray]]
"""The raw output of one row and its gradient `[d]`, from flat weights `[d]` and the row."""

MASK = (1 << 64) - 1


class PrivateSettings(NamedTuple):
    """The fields of the wrapper."""

    clip: float
    sigma: float
    dual_clip: float = 1.0


class Step(NamedTuple):
    """The rows of a local step, with their labels and weights, and the key of its noise."""

    inputs: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    key: int


def make_step_key(seed: int, round_number: int, client: int, step: int) -> int:
    """The key of a client's local step, a word of 64 bits."""
    return int(keys.client_words([client], seed, "step noise", round_number, step)[0])


def mix_word(word: int) -> int:
    """SplitMix64's output function in Python's integers."""
    word &= MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def draw_normal(key: int, stream: int, count: int) -> np.ndarray:
    """Standard normal numbers of a stream of a key, by Box and Muller."""
    gamma = 0x9E3779B97F4A7C15
    folded, half = mix_word(key + (stream + 1) * gamma), (count + 1) // 2
    uniform = np.array([(mix_word(folded + i * gamma) >> 11) / 2**53 for i in range(1, 2 * half + 1)])
    radius, angle = np.sqrt(-2 * np.log1p(-uniform[:half])), 2 * np.pi * uniform[half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def clip_vector(vector: np.ndarray, bound: float) -> np.ndarray:
    length = float(np.sqrt((vector**2).sum()))
    return vector if length <= bound else vector * (bound / length)


def linear_gradient(weights: np.ndarray, row: np.ndarray) -> tuple[float, np.ndarray]:
    return float(weights[:-1] @ row + weights[-1]), np.append(row, 1.0)


def two_layer_gradient(weights: np.ndarray, row: np.ndarray) -> tuple[float, np.ndarray]:
    """tanh(A x + b) · v + c, with h = 3 hidden units."""
    hidden, features = 3, len(row)
    matrix = weights[: hidden * features].reshape(hidden, features)
    bias, last = weights[hidden * features :][:hidden], weights[hidden * features + hidden :][:hidden]
    units = np.tanh(matrix @ row + bias)
    slopes = last * (1 - units**2)
    return float(units @ last + weights[-1]), np.concatenate([np.outer(slopes, row).ravel(), slopes, units, [1.0]])


def run_fedavg_visit(
    weights: np.ndarray, steps: list[Step], rate: float, gradient: Gradient, settings: PrivateSettings
) -> np.ndarray:
    """The change of the weights: SGD on the logistic loss."""
    start = weights
    for inputs, labels, row_weights, key in steps:
        bound, total = settings.clip / len(inputs), np.zeros_like(weights)
        for row, label, row_weight in zip(inputs, labels, row_weights, strict=True):
            output, output_gradient = gradient(weights, row)
            slope = row_weight * (1 / (1 + np.exp(-output)) - label)
            total += clip_vector(slope * output_gradient, bound)
        weights = weights - rate * (total + settings.sigma * bound * draw_normal(key, 0, len(weights)))
    return np.asarray(weights - start)


def run_minimax_visit(
    point: np.ndarray, steps: list[Step], rate: float, gradient: Gradient, settings: PrivateSettings
) -> np.ndarray:
    """The change of (w, a, b, α): descent-ascent on the saddle function with margin 1 and sigmoid scores.

    Gradient and duals each have noise of multiplier √2 σ.
    """
    start, sigma = point, np.sqrt(2) * settings.sigma
    for inputs, labels, row_weights, key in steps:
        weights, (a, b, alpha) = point[:-3], point[-3:]
        bound, dual_bound = settings.clip / len(inputs), settings.dual_clip / len(inputs)
        total, dual_total = np.zeros_like(weights), np.zeros(3)
        for row, label, row_weight in zip(inputs, labels, row_weights, strict=True):
            output, output_gradient = gradient(weights, row)
            score = 1 / (1 + np.exp(-output))
            if label:
                slope = 2 * (score - a) - 2 * (1 + alpha)
                duals = np.array([-2 * (score - a), 0, -2 * score])
            else:
                slope = 2 * (score - b) + 2 * (1 + alpha)
                duals = np.array([0, -2 * (score - b), 2 * score])
            total += clip_vector(row_weight * slope * score * (1 - score) * output_gradient, bound)
            dual_total += clip_vector(row_weight * duals, dual_bound)
        total += sigma * bound * draw_normal(key, 0, len(weights))
        dual_total += sigma * dual_bound * draw_normal(key, 1, 3) - np.array([0, 0, 2 * alpha])
        point = np.concatenate([weights - rate * total, np.array([a, b, alpha]) + rate * dual_total * [-1, -1, 1]])
    return np.asarray(point - start)
