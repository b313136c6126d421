"""The network for tables gives the loop's result on every engine, and learns what a linear model cannot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedauc import Clients, fit
from fedauc.engines import engines
from fedauc.engines.kernels import KernelNetwork
from fedauc.models.linear import Linear
from fedauc.models.tabular import Tabular
from fedauc.network import ModuleNetwork

MODEL = Tabular(width=5, blocks=2, hidden=3)


def train_weights(engine: str, method: str) -> Tensor:
    rng = np.random.default_rng(0)
    labels = np.arange(96) % 3 == 0
    clients = Clients.from_arrays(rng.normal(size=(96, 4)) + labels[:, None], labels, client=np.arange(96) // 16)
    chosen: dict[str, Any] = {
        "cycles": 2,
        "groups": 2,
        "local_steps": 3,
        "positives": 2,
        "negatives": 3,
        "dtype": "float64",
    }
    fitted = fit(MODEL.build((4,), 0), clients, method, engine=engine, **chosen)
    return torch.nn.utils.parameters_to_vector(fitted.module.parameters()).detach()


@pytest.mark.parametrize("method", ["cycp-pairwise", "a-scaffold"])
@pytest.mark.parametrize("engine", sorted(set(engines()) - {"loop", "compiled"}))
def test_every_engine_gives_the_weights_of_the_loop(method: str, engine: str) -> None:
    torch.testing.assert_close(train_weights(engine, method), train_weights("loop", method), rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
def test_compiled_steps_give_the_weights_of_the_loop() -> None:
    found, expected = (train_weights(engine, "cycp-pairwise") for engine in ("compiled", "loop"))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_the_network_runs_on_kernels() -> None:
    """Without them the compiled engine would refuse it."""
    KernelNetwork(ModuleNetwork(MODEL.build((4,), 0)).plain_module)


def test_the_network_learns_a_product_that_a_linear_model_cannot() -> None:
    """A row is positive where two features have the same sign, so each feature alone says nothing."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1600, 2)).astype(np.float32)
    y = x[:, 0] * x[:, 1] > 0.5
    clients = Clients.from_arrays(x[:1000], y[:1000], client=np.arange(1000) // 100)
    settings: dict[str, Any] = {"cycles": 12, "groups": 2, "learning_rate": 0.3, "test": (x[1000:], y[1000:])}
    straight, bent = (
        fit(model.build((2,), 0), clients, "cycp-pairwise", **settings).history[-1][1].auc
        for model in (Linear(), Tabular())
    )
    assert straight < 0.6
    assert bent > 0.9
