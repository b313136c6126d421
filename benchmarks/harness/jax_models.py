"""The workloads' models in jax, on the flat weights of `torch_models`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

Array = Any
Model = Callable[[Sequence[Array], Array], Array]

_IMAGES = ("NCHW", "OIHW", "NCHW")


def split_weights(workload: str, flat: Array) -> list[Array]:
    """A flat vector as the list of parameters, in torch's shapes and order."""
    parts, offset = [], 0
    for shape in SHAPES[workload]:
        parts.append(flat[offset : offset + prod(shape)].reshape(shape))
        offset += prod(shape)
    return parts


def join_weights(parts: Sequence[Array]) -> Array:
    """The parameters as one flat vector."""
    return jnp.concatenate([part.reshape(-1) for part in parts])


def make_logistic_loss(workload: str) -> Callable[[Sequence[Array], Array, Array], Array]:
    """The mean logistic loss of a batch, a function of (parameters, inputs, labels)."""
    model = MODELS[workload]

    def loss(parts: Sequence[Array], inputs: Array, labels: Array) -> Array:
        scores = model(parts, inputs)
        return jnp.mean(jax.nn.softplus((1 - 2 * labels) * scores))

    return loss


def _linear(parts: Sequence[Array], inputs: Array) -> Array:
    weight, bias = parts
    return inputs @ weight[0] + bias[0]


def _mlp(parts: Sequence[Array], inputs: Array) -> Array:
    hidden = jax.nn.relu(inputs @ parts[0].T + parts[1])
    return hidden @ parts[2][0] + parts[3][0]


def _cnn(parts: Sequence[Array], inputs: Array) -> Array:
    images = _halve(_convolve(parts[0], parts[1], inputs))
    images = _halve(_convolve(parts[2], parts[3], images))
    pooled = _convolve(parts[4], parts[5], images).mean((2, 3))
    return _mlp(parts[6:], pooled)


def _convolve(weight: Array, bias: Array, images: Array) -> Array:
    outputs = jax.lax.conv_general_dilated(images, weight, (1, 1), "SAME", dimension_numbers=_IMAGES)
    return jax.nn.relu(outputs + bias[:, None, None])


def _halve(images: Array) -> Array:
    rows, channels, height, width = images.shape
    return images.reshape(rows, channels, height // 2, 2, width // 2, 2).mean((3, 5))


SHAPES: dict[str, list[tuple[int, ...]]] = {
    "linear": [(1, 64), (1,)],
    "mlp": [(128, 64), (128,), (1, 128), (1,)],
    "cnn": [
        *((32, 3, 3, 3), (32,), (64, 32, 3, 3), (64,), (128, 64, 3, 3), (128,)),
        *((32, 128), (32,), (1, 32), (1,)),
    ],
}

MODELS: dict[str, Model] = {"linear": _linear, "mlp": _mlp, "cnn": _cnn}
