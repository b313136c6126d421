"""The suite of a model configuration: a network that is keyed by the seed and can be stacked."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from fedauc import keys
from fedauc.models.model import ModelConfig
from fedauc.testing._expectations import check_configuration, expect, expect_close, untouched_generators

ROUNDING = 1e-9
"""float64 rounds at 1.1e-16; a row alone is summed in another order than in a batch, in every layer."""


def check_model(config: ModelConfig, inputs: Tensor | None = None) -> None:
    """Check a model configuration on a few rows of your own, or on five images `[3, 8, 8]` of bytes."""
    rows = random_images() if inputs is None else inputs.double() if inputs.is_floating_point() else inputs
    check_configuration(config, ModelConfig)
    check_outputs(config, rows)
    check_build_seed(config, rows)
    check_rows_apart(config, rows)
    check_stacking(config, rows)


def random_images(count: int = 5, shape: tuple[int, ...] = (3, 8, 8)) -> Tensor:
    """Keyed images of bytes."""
    generator = keys.numpy_generator("suite", "images")
    return torch.from_numpy(generator.integers(0, 256, size=(count, *shape), dtype=np.uint8))


def flat_weights(module: nn.Module) -> Tensor:
    """Every parameter in one vector."""
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def build_module(config: ModelConfig, rows: Tensor, seed: int = 0) -> nn.Module:
    """The network for these rows, in float64."""
    return config.build(tuple(rows.shape[1:]), seed).double()


def check_outputs(config: ModelConfig, rows: Tensor) -> None:
    """The module gives finite outputs `[rows, E]`, where E = 1 for a score, and every weight has a gradient."""
    module = build_module(config, rows)
    outputs = module(rows)
    shape = tuple(outputs.shape)
    expect(outputs.ndim == 2 and len(outputs) == len(rows), f"{len(rows)} rows give outputs {shape}, not [rows, E]")
    expect(bool(outputs.isfinite().all()), "an output is not finite")
    outputs.sum().backward()
    idle = [name for name, parameter in module.named_parameters() if parameter.grad is None]
    expect(not idle, f"the outputs do not depend on {', '.join(idle)}")


def check_build_seed(config: ModelConfig, rows: Tensor) -> None:
    """The same seed gives the same weights, and building uses no global generator."""
    with untouched_generators("the model"):
        first, again = (flat_weights(build_module(config, rows, seed=7)) for _ in range(2))
    expect(torch.equal(first, again), "building twice with one seed gives different weights")


def check_rows_apart(config: ModelConfig, rows: Tensor) -> None:
    """In evaluation mode, the output of a row does not depend on the other rows."""
    module = build_module(config, rows).eval()
    alone = torch.cat([module(row[None]) for row in rows])
    expect_close(module(rows), alone, "the output of a row depends on the other rows", ROUNDING, ROUNDING)


def check_stacking(config: ModelConfig, rows: Tensor) -> None:
    """Two modules run as a stack under `vmap`, as the batched engine runs the clients of a cohort."""
    modules = [build_module(config, rows, seed).eval() for seed in (0, 1)]
    stacked, buffers = torch.func.stack_module_state(modules)

    def run_model(parameters: dict[str, Tensor], state: dict[str, Tensor], inputs: Tensor) -> Tensor:
        outputs: Tensor = torch.func.functional_call(modules[0], (parameters, state), (inputs,))
        return outputs

    together = torch.func.vmap(run_model)(stacked, buffers, torch.stack([rows, rows.flip(0)]))
    expected = modules[1](rows.flip(0))
    expect_close(together[1], expected, "a stack of two models does not give what each gives", ROUNDING, ROUNDING)
