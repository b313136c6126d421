"""The compiled engine gives the loop's result, on few cases, since each is compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedauc import Clients, Recipe
from fedauc import engines as choice
from fedauc.engines import compiled
from fedauc.engines.batched import BatchedEngine
from fedauc.engines.compiled import CompiledEngine
from fedauc.engines.kernels import Unsupported
from fedauc.experiments.recipe import Assembly, assemble
from fedauc.stages import Geometric
from fedauc.trees import tree_leaves

# The compiler itself uses what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")

FEATURES = 4

CASES: dict[str, dict[str, Any]] = {
    "cycp-fedavg": {"weight_decay": 0.01},
    "cycp-minimax": {"prox": 0.1, "stages": Geometric(initial=1, decay=0.5)},
    "cycp-pairwise": {"stages": Geometric(initial=1, decay=0.5)},
    "a-scaffold": {},
    "codasca": {},
}


def federation() -> Clients:
    """Six clients of 12 rows, a third positives, the first without any."""
    rng = np.random.default_rng(3)
    labels = (np.arange(72) % 3 == 0) & (np.arange(72) >= 12)
    return Clients.from_arrays(rng.normal(size=(72, FEATURES)) + labels[:, None], labels, client=np.arange(72) // 12)


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def assembled(engine: str, method: str, **settings: Any) -> Assembly:
    chosen: dict[str, Any] = {"cycles": 2, "local_steps": 5, "positives": 3, "negatives": 3, "dtype": "float64"}
    return assemble(Recipe.of(method, engine=engine, **{**chosen, **settings}), model(), federation())


@pytest.mark.parametrize("method", CASES)
def test_compiled_runs_equal_the_loops(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps are two compiled calls of two and one step left over; stages change the step size."""
    monkeypatch.setattr(compiled, "CHUNK", 2)
    found = []
    for engine in ("loop", "compiled"):
        training, _, start = assembled(engine, method, **CASES[method])
        found.append([finished.state.server for finished in training.rounds(start)])
    for loop, other in zip(*found, strict=True):
        for left, right in zip(tree_leaves(loop), tree_leaves(other), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


def test_long_runs_are_compiled_and_short_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine() -> type:
        return type(assembled("auto", "cycp-fedavg").training.engine)

    assert engine() is BatchedEngine
    # 2 cycles of 6 rounds of 5 steps.
    monkeypatch.setattr(choice, "COMPILE_FROM", 60)
    assert engine() is CompiledEngine
    monkeypatch.setattr(choice, "COMPILE_FROM", 61)
    assert engine() is BatchedEngine


def test_what_has_no_kernel_is_not_compiled() -> None:
    recipe = Recipe.of("cycp-fedavg", engine="compiled")
    module = nn.Sequential(nn.Linear(FEATURES, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    with pytest.raises(Unsupported, match="layers without a kernel"):
        assemble(recipe, module, federation())
