"""The reference loop on CUDA gives the CPU's result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedauc import Clients, fit
from fedauc.algorithms import find_methods
from fedauc.experiments.assembly import assemble_training
from fedauc.experiments.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedauc.experiments.recipe import Recipe

pytestmark = pytest.mark.gpu


def federation() -> Clients:
    """Six clients of 20 rows, one without positives."""
    rng = np.random.default_rng(0)
    labels = (np.arange(120) % 5 == 0) & (np.arange(120) >= 20)
    inputs = rng.normal(size=(120, 4)) + labels[:, None]
    return Clients.from_arrays(inputs, labels, client=np.arange(120) // 20)


def model() -> nn.Module:
    torch.default_generator.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("method", find_methods())
def test_cuda_equals_cpu_in_float64(method: str) -> None:
    """Two cycles; 1e-9 leaves room for sums in another order."""
    settings: dict[str, Any] = {"cycles": 2, "local_steps": 3, "positives": 4, "negatives": 4, "dtype": "float64"}
    fitted = {device: fit(model(), federation(), method, device=device, **settings) for device in ("cpu", "cuda")}
    pairs = zip(fitted["cpu"].module.state_dict().values(), fitted["cuda"].module.state_dict().values(), strict=True)
    for expected, value in pairs:
        torch.testing.assert_close(value.cpu(), expected, rtol=1e-9, atol=1e-9)
    assert fitted["cpu"].traffic == fitted["cuda"].traffic


def test_dropout_on_cuda_is_keyed_and_leaves_the_generators_alone() -> None:
    shaky = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    first, second = (fit(shaky, federation(), "cycp-fedavg", device="cuda", cycles=1) for _ in range(2))
    for one, two in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(one, two)
    assert torch.equal(torch.cuda.get_rng_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_checkpoint_of_a_cuda_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """Stopping after every round and going on from the file gives the uninterrupted run's weights."""
    recipe = Recipe.of("a-scaffold", cycles=2, local_steps=2, device="cuda", dtype="float64")
    uninterrupted = fit(model(), federation(), recipe)
    path, assembly = tmp_path / "state.pt", assemble_training(recipe, model(), federation())
    state = assembly.start
    for _ in range(assembly.training.plan.total_rounds):
        finished = next(assembly.training.rounds(state))
        save_checkpoint(
            path, Checkpoint(finished.state, assembly.training.engine.client_states(), assembly.training.ledger, [])
        )
        assembly = assemble_training(recipe, model(), federation())
        loaded = load_checkpoint(path, "cuda")
        assembly.training.engine.restore_client_states(loaded.client_states)
        assembly.training.ledger.restore_from(loaded.ledger)
        state = loaded.state
    again = assembly.network.build_module(recipe.algorithm.extract_model(state.server.shared))
    for one, two in zip(uninterrupted.module.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(one, two)
